"""The demo at its full size: what it learns, and that two processes learn the same."""

import os

import pytest
from runs import run, val_losses

# As a user has it, and not the tests: with a thread for each core. A busy machine may take long.
OWN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
OPTIONS = {"env": OWN, "check": True, "timeout": 3600}


def test_demo_learns_from_10_8258_to_below_4_3(tmp_path):
    losses = val_losses(run(["--device", "cpu"], cwd=tmp_path, **OPTIONS).stdout)
    assert losses[0] == 10.8258
    assert losses[128] < 4.3


def test_two_processes_give_the_losses_of_one(tmp_path):
    flags = ["--device", "cpu", "--adam_eps", "1e-6"]
    flags += ["--num_iterations", "20", "--val_loss_every", "5"]
    alone, together = (
        val_losses(run(flags, ranks, cwd=tmp_path, **OPTIONS).stdout) for ranks in (0, 2)
    )
    assert list(alone) == list(together) == [0, 5, 10, 15, 20]
    for step in alone:
        assert together[step] == pytest.approx(alone[step], abs=2e-4)
