"""Whole runs of the command line, and the community's lines that they print."""

import re
import subprocess
import sys

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


def val_losses(text: str) -> dict[int, float]:
    return {int(m[1]): float(m[3]) for m in VAL.finditer(text)}
