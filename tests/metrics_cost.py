"""What do the rows of logs/<run_id>.jsonl cost? Steps with and without them, in turn.

    .venv/bin/python tests/metrics_cost.py [PAIRS]

Each pair is two steps in a random order: one that only reads its loss, and one that also writes its
row; every 25th row has the norms of gradients. A step is a single sequence, an eighth of that of
demo_2025-01-26 (of the record's on a GPU), so a row weighs eight times as much as in a run. There
all steps are alike; in the demo, Adam learns at each second one.
"""

import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import program  # noqa: E402
import train_gpt  # noqa: E402


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    device = program.start_device("auto", None)
    on_gpu = device.type == "cuda"
    record = "2025-01-26_BatchSize" if on_gpu else "demo_2025-01-26"
    hp = replace(train_gpt.RECORDS[record], batch_seqs=1)
    model = train_gpt.build(hp, device)
    optimizers = train_gpt.Optimizers(model, hp)
    train_gpt.warm_up(model, optimizers, device)
    tokens = torch.randint(hp.vocab_size, (hp.batch_seqs, hp.seq_len + 1), device=device)
    rng, ratios, rows = random.Random(0), [], []
    with tempfile.TemporaryDirectory() as folder:
        names = [f"grad_norm_{group.name}" for group in train_gpt.parameter_table(hp)]
        metrics = program.Metrics(Path(folder, "it.jsonl"), names, 0)
        for pair in range(pairs):
            seconds = {}
            for written in rng.sample((False, True), 2):
                step, start = pair % 25 if written else 0, program.clock(device)
                inputs, targets = tokens[:, :-1].int(), tokens[:, 1:]
                result = train_gpt.train_step(model, optimizers, inputs, targets, step)
                if written:
                    ready = program.clock(device)
                    metrics.begin(vars(train_gpt.moment(step, hp)), hp.seq_len, result)
                    metrics.fetch(start)
                    metrics.write()
                    rows.append(time.perf_counter() - ready)
                else:
                    program.to_host(result)()
                seconds[written] = program.clock(device) - start
            ratios.append(seconds[True] / seconds[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{pairs} pairs: with / without: median {middle:.4f}, quartiles {low:.4f} {high:.4f}")
    print(
        f"a row takes {1e3 * statistics.median(rows):.3f} ms, a step {1e3 * seconds[False]:.0f} ms"
    )


if __name__ == "__main__":
    main()
