"""The demos at their full size: what they learn, and that two processes learn the same."""

import os

import pytest

from runs import SCRIPT, run, val_losses
from train_gpt import HERE

FORK = str(HERE / "forks/train_gpt_2026.py")
# As a user has it, and not the tests: with a thread for each core. A busy machine may take long.
OWN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def losses_of(script: str, words: list[str], folder, ranks: int = 0) -> dict[int, float]:
    flags = ["--record", "demo", "--device", "cpu", *words]
    done = run(flags, ranks, script, cwd=folder, env=OWN, check=True, timeout=3600)
    return val_losses(done.stdout)


@pytest.mark.parametrize(("script", "last"), [(SCRIPT, 128), (FORK, 180)])
def test_the_demo_learns_from_10_83_to_below_4_3(script, last, tmp_path):
    """The head of train_gpt.py begins at zero, that of the fork does not."""
    losses = losses_of(script, [], tmp_path)
    assert losses[0] == pytest.approx(10.82584, abs=0 if script == SCRIPT else 0.01)
    assert losses[last] < 4.3


@pytest.mark.parametrize(("script", "epsilon"), [(SCRIPT, 1e-6), (FORK, 1e-5 * 512)])
def test_two_processes_give_the_losses_of_one(script, epsilon, tmp_path):
    """With Adam's epsilon at which rounding noise stays noise: gradients of the fork are those of a
    sequence's sum, so it grows with the 512 tokens."""
    words = f"--num_iterations 20 --val_loss_every 5 --adam_eps {epsilon}".split()
    alone, together = (losses_of(script, words, tmp_path, ranks) for ranks in (0, 2))
    assert list(alone) == list(together) == [0, 5, 10, 15, 20]
    assert together == pytest.approx(alone, abs=2e-4)
