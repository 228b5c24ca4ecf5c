"""What do the rows of logs/<run_id>.jsonl cost? Steps with and without them, in turn.

    .venv/bin/python tests/metrics_cost.py [PAIRS]

Each pair is two steps in a random order: one that only reads its loss, and one that also writes its
row; every 25th row has the norms of gradients. A step is a single sequence, an eighth of that of
the demo (of the record's on a GPU), so a row weighs eight times as much as in a run.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    device = train_gpt.start_device("auto")
    record = "2025-01-26_BatchSize" if device.type == "cuda" else "demo"
    hp = replace(train_gpt.RECORDS[record], batch_seqs=1, run_id="it")
    run = train_gpt.Run(hp, argparse.Namespace(record=record, saved={}))
    tokens = torch.randint(hp.vocab_size, (hp.batch_seqs, hp.seq_len + 1), device=device)
    inputs, targets = tokens[:, :-1].int(), tokens[:, 1:]
    rng = random.Random(0)
    ratios, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        run.begin(saved={}, resumed=False)
        for pair in range(pairs):
            seconds = {}
            for written in rng.sample((False, True), 2):
                now = run.moment(pair % 25 if written else 0, hp)
                start = train_gpt.clock(device)
                result = train_gpt.train_step(run.model, run.optimizers, inputs, targets, now)
                if written:
                    ready = train_gpt.clock(device)
                    run.log.begin_row(now, hp.seq_len, result)
                    run.log.finish_row(start)
                    run.log.write_row()
                    rows.append(time.perf_counter() - ready)
                else:
                    train_gpt.to_host(result)()
                seconds[written] = train_gpt.clock(device) - start
            ratios.append(seconds[True] / seconds[False])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{pairs} pairs: with / without: median {middle:.4f}, quartiles {low:.4f} {high:.4f}")
    print(
        f"a row takes {1e3 * statistics.median(rows):.3f} ms, a step {1e3 * seconds[False]:.0f} ms"
    )


if __name__ == "__main__":
    main()
