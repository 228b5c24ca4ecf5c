"""The demo at its full size: what it learns, and that two processes learn the same."""

import re
import subprocess
import sys

import pytest

from train_gpt import HERE

VAL = re.compile(r"step:(\d+)/\d+ val_loss:(\d+\.\d+)")


def val_losses(folder, *flags, ranks=0) -> dict[int, float]:
    launcher = [sys.executable]
    if ranks:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, str(HERE / "train_gpt.py"), "--device", "cpu", *flags]
    text = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return {int(m[1]): float(m[2]) for m in VAL.finditer(text)}


def test_demo_learns_from_10_8258_to_below_4_3(tmp_path):
    losses = val_losses(tmp_path)
    assert losses[0] == 10.8258
    assert losses[128] < 4.3


def test_two_processes_give_the_losses_of_one(tmp_path):
    flags = ["--adam_eps", "1e-6", "--num_iterations", "20", "--val_loss_every", "5"]
    alone, together = val_losses(tmp_path, *flags), val_losses(tmp_path, *flags, ranks=2)
    assert list(alone) == list(together) == [0, 5, 10, 15, 20]
    for step in alone:
        assert together[step] == pytest.approx(alone[step], abs=2e-4)
