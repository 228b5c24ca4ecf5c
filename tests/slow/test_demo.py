"""The demo at its full size: what it learns, and that two processes learn the same."""

import os

import pytest
from runs import run, val_losses

# As a user has it, and not the tests: with a thread for each core. A busy machine may take long.
OWN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def losses_of(words: list[str], folder, ranks: int = 0) -> dict[int, float]:
    done = run(words, ranks, cwd=folder, env=OWN, check=True, timeout=3600)
    return val_losses(done.stdout)


def test_the_demo_learns_from_10_82584_to_below_4_3(tmp_path):
    losses = losses_of(["--record", "demo", "--device", "cpu"], tmp_path)
    assert losses[0] == 10.82584
    assert losses[128] < 4.3


def test_two_processes_give_the_losses_of_one(tmp_path):
    """With Adam's epsilon at which rounding noise stays noise."""
    flags = ["--record", "demo", "--device", "cpu", "--adam_eps", "1e-6"]
    flags += ["--num_iterations", "20", "--val_loss_every", "5"]
    alone, together = losses_of(flags, tmp_path), losses_of(flags, tmp_path, ranks=2)
    assert list(alone) == list(together) == [0, 5, 10, 15, 20]
    for step in alone:
        assert together[step] == pytest.approx(alone[step], abs=2e-4)
