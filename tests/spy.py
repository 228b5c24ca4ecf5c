"""train_gpt.py's main as a rank, which then writes what the rank saw to rank<r>.json.

That is: a hash of its final weights, the bytes that it gave to collectives in its last step, and
the bytes of the optimizer state that it keeps.
"""

import hashlib
import json
import os
from pathlib import Path

import train_gpt


def main(words: list[str]) -> None:
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
    make, step_of = train_gpt.Optimizers.__init__, train_gpt.Optimizers.step

    def remember(self, model, *arguments):
        seen.update(model=model, optimizers=self)
        make(self, model, *arguments)

    def step(self, *arguments):
        norms = step_of(self, *arguments)
        seen["sent"] = list(sent)
        sent.clear()
        return norms

    train_gpt.Optimizers.__init__, train_gpt.Optimizers.step = remember, step
    train_gpt.main(words)

    digest = hashlib.sha256()
    for p in seen["model"].parameters():
        digest.update(p.detach().float().numpy().tobytes())
    state = [t.nbytes for b in seen["optimizers"].order for t in b.state.values() if t.ndim]
    report = {"weights": digest.hexdigest(), "sent": seen["sent"], "state": sum(state)}
    Path(f"rank{os.environ.get('RANK', 0)}.json").write_text(json.dumps(report))
