"""The demos at their full size: what they learn, and that two processes learn the same."""

import os

import pytest
from runs import run, val_losses

from train_gpt import RECORDS

# As a user has it, and not the tests: with a thread for each core. A busy machine may take long.
OWN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
OPTIONS = {"env": OWN, "check": True, "timeout": 3600}
# Adam's epsilon at which rounding noise stays noise; with gradients of a sequence's sum, that times
# its tokens. A head in bfloat16 would make more of it.
DEMO = ["--record", "demo", "--adam_eps", str(1e-6 * RECORDS["demo"].seq_len)]
DEMO += ["--bfloat16_head", "off"]
DEMO_2025 = ["--record", "demo_2025-01-26", "--adam_eps", "1e-6"]


def test_demo_learns_from_10_83_to_below_4_3(tmp_path):
    losses = val_losses(run(["--device", "cpu"], cwd=tmp_path, **OPTIONS).stdout)
    assert losses[0] == pytest.approx(10.8258, abs=0.01)  # its head does not begin at zero
    assert losses[RECORDS["demo"].num_iterations] < 4.3


def test_demo_of_2025_learns_from_10_8258_to_below_4_3(tmp_path):
    flags = ["--record", "demo_2025-01-26", "--device", "cpu"]
    losses = val_losses(run(flags, cwd=tmp_path, **OPTIONS).stdout)
    assert losses[0] == 10.8258
    assert losses[128] < 4.3


@pytest.mark.parametrize("record", [DEMO, DEMO_2025], ids=["demo", "demo_2025-01-26"])
def test_two_processes_give_the_losses_of_one(record, tmp_path):
    flags = [*record, "--device", "cpu", "--num_iterations", "20", "--val_loss_every", "5"]
    alone, together = (
        val_losses(run(flags, ranks, cwd=tmp_path, **OPTIONS).stdout) for ranks in (0, 2)
    )
    assert list(alone) == list(together) == [0, 5, 10, 15, 20]
    for step in alone:
        assert together[step] == pytest.approx(alone[step], abs=2e-4)
