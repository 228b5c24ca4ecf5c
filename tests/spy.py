"""train_gpt.py's main as a rank, which then writes what the rank saw to rank<r>.json.

That is: a hash of its final weights, the bytes that it gave to collectives in its last step, and
the bytes of the optimizer state that it keeps.
"""

import hashlib
import json
import os
from pathlib import Path

import train_gpt


def main(words: list[str], run: type[train_gpt.Run] = train_gpt.Run) -> None:
    """Run train_gpt.py, or a fork whose Run is given, and write the report."""
    optimizers_class = run.optimizers_class
    make, step_of = optimizers_class.__init__, optimizers_class.step
    seen, sent = {}, []

    def counting(name, payload):
        """Note the bytes of a collective's larger tensor; of it a ring sends (n - 1) / n."""
        collective = getattr(train_gpt, name)

        def counted(output, input_, **options):
            sent.append((name, payload(output, input_)))
            return collective(output, input_, **options)

        setattr(train_gpt, name, counted)

    counting("reduce_scatter", lambda output, input_: input_.nbytes)
    counting("all_gather", lambda output, input_: output.nbytes)

    def remember(self, model, *arguments):
        seen["model"], seen["optimizers"] = model, self
        make(self, model, *arguments)

    def step(self, *arguments):
        norms = step_of(self, *arguments)
        seen["sent"] = list(sent)
        sent.clear()
        return norms

    optimizers_class.__init__, optimizers_class.step = remember, step
    train_gpt.main(words, run)

    digest = hashlib.sha256()
    for p in seen["model"].parameters():
        digest.update(p.detach().float().numpy().tobytes())
    rows = [rows for _, rows in seen["optimizers"].groups]
    state = [t.nbytes for r in rows for t in r.state.values() if t.ndim > 1]
    report = {"weights": digest.hexdigest(), "sent": seen["sent"], "state": sum(state)}
    Path(f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(report))
