"""Whole runs of the command line, and the community's lines that they print."""

import json
import re
import subprocess
import sys
from pathlib import Path

from train_gpt import HERE

SCRIPT = str(HERE / "train_gpt.py")
STEP = re.compile(r"step:(\d+)/(\d+) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms")
VAL = re.compile(
    r"step:(\d+)/(\d+) val_loss:(\d+\.\d{4}) train_time:(\d+)ms step_avg:(\d+\.\d\d)ms"
)


def run(arguments: list, ranks: int = 0, script: str = SCRIPT, **options):
    """The finished process of the command line, under torchrun if there are ranks."""
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, script, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def rows(path: Path) -> list[dict]:
    """Of a run's .jsonl, all lines: one that is not whole raises."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def val_losses(text: str) -> dict[int, float]:
    return {int(m[1]): float(m[3]) for m in VAL.finditer(text)}
