"""A run as a rank, which then writes to rank<r>.json what only this rank knows: a hash of its final
weights, and the bytes of the optimizer state that it keeps."""

import hashlib
import json
import os
from pathlib import Path

import train_gpt


def main(words: list[str], run: type[train_gpt.Run] = train_gpt.Run) -> None:
    seen = {}

    make = run.Optimizers

    def noted(model, *arguments):
        seen["model"], seen["optimizers"] = model, make(model, *arguments)
        return seen["optimizers"]

    run.Optimizers = staticmethod(noted)
    train_gpt.main(words, run)
    digest = hashlib.sha256()
    for p in seen["model"].parameters():
        digest.update(p.detach().float().numpy().tobytes())
    state = [t for _, bank in seen["optimizers"].groups for t in bank.state.values() if t.ndim > 1]
    report = {"weights": digest.hexdigest(), "state": sum(tensor.nbytes for tensor in state)}
    Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(report))


def reports(folder: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
