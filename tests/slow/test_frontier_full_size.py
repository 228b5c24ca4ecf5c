"""The frontier's demo at its full size, and all records on the sample."""

import os

import pytest
from frontier.small_runs import main
from frontier.test_run import SMALL
from runs import run, val_losses
from train_gpt_2026 import RECORDS

from train_gpt import HERE

SCRIPT = str(HERE / "forks/train_gpt_2026.py")
# As a user has it, and not the tests: with a thread for each core. A busy machine may take long.
OWN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def losses_of(words: list[str], folder, ranks: int = 0) -> dict[int, float]:
    done = run(words, ranks, SCRIPT, cwd=folder, env=OWN, check=True, timeout=3600)
    return val_losses(done.stdout)


def test_the_demo_learns_from_10_83_to_below_4_3(tmp_path):
    losses = losses_of(["--device", "cpu"], tmp_path)
    assert losses[0] == pytest.approx(10.8258, abs=0.01)  # its head does not begin at zero
    assert losses[RECORDS["demo"].num_iterations] < 4.3


def test_two_processes_give_the_losses_of_one(tmp_path):
    """With Adam's epsilon at which rounding noise stays noise: gradients are those of a sequence's
    sum, so it grows with the tokens."""
    flags = ["--record", "demo", "--device", "cpu"]
    flags += ["--adam_eps", str(1e-5 * RECORDS["demo"].seq_len)]
    flags += ["--num_iterations", "20", "--val_loss_every", "5"]
    alone, together = losses_of(flags, tmp_path), losses_of(flags, tmp_path, ranks=2)
    assert list(alone) == list(together) == [0, 5, 10, 15, 20]
    for step in alone:
        assert together[step] == pytest.approx(alone[step], abs=2e-4)


LAYERS = "--layers short+v1,long+v2,short+backout,none+x1"


@pytest.mark.parametrize("record", [name for name in RECORDS if name != "demo"])
def test_each_record_trains_on_the_sample_at_a_reduced_size(record, capsys, tmp_path, monkeypatch):
    """Of 2026, a tied head does not begin at zero, and Adam makes half of the steps."""
    monkeypatch.chdir(tmp_path)
    of_2026 = "2026" in record
    layers = LAYERS if of_2026 else ""
    main(f"--record {record} {SMALL} --val_loss_every 4 {layers}".split())
    losses = val_losses(capsys.readouterr().out)
    assert losses[0] == pytest.approx(10.8258, abs=0.01 if of_2026 else 5e-5)
    assert losses[4] < (10.5 if of_2026 else 10.2) and losses[8] < (9.9 if of_2026 else 8.5)
