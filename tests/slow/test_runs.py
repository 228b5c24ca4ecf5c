"""Whole runs: kills, demos at their full size, what torchrun does with ranks and nodes, and runs of
forks/train_gpt_2026_08.py that go on where other numbers of ranks were."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

from frontier.test_ngrams import assert_it_goes_on, at_ranks, table_of  # noqa: F401
from runs import HANGS, RUNS, SCRIPT, assert_close, console_of, rows, run, val_losses
from test_ranks import check_ranks
from test_ranks import flags as small_flags  # noqa: F401
from train_gpt import HERE

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
FORK = str(HERE / "forks/train_gpt_2026.py")
# As a user has it, and not the tests: with a thread for each core. A busy machine may take long.
OWN = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def test_twenty_stops_of_each_kind_change_no_bit():
    """Kills and SIGTERMs, each with a resume."""
    command = [sys.executable, "-m", "pytest", "-q", f"{HERE}/tests/test_resume.py"]
    command += ["-k", "random_moments"]
    done = subprocess.run(command, env=os.environ | {"KILLS": "20"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


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


def test_a_run_that_is_started_again_goes_on(flags, tmp_path):
    """One of two ranks is killed; torchrun ends the other one and starts both anew."""
    flags += ["--num_iterations", "200", "--val_loss_every", "0", "--batch_seqs", "2"]
    flags += ["--save_every", "5", "--run_id", "it", "--resume", "on"]
    command = [*TORCHRUN, "--standalone", "--max_restarts=1", SCRIPT, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step:20/") and "restarted" not in lines:
            lines.append("restarted")
            children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True)
            os.kill(int(children.stdout.split()[-1]), signal.SIGKILL)
    assert process.wait(HANGS) == 0
    resumed = [int(line.split()[-1]) for line in lines if line.startswith("resumed at step")]
    assert len(resumed) == 1 and resumed[0] in (15, 20, 25)
    assert [row["step"] for row in rows(tmp_path / "logs/it.jsonl")] == list(range(1, 201))


def test_two_nodes_of_two_ranks_equal_one(small_flags, tmp_path):  # noqa: F811
    """Each has its own torchrun; they meet on the loopback interface."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    console_of(small_flags, alone)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*TORCHRUN, "--nnodes=2", "--rdzv_backend=c10d", "--rdzv_id=x"]
    command += [f"--rdzv_endpoint=127.0.0.1:{port}", RUNS, "spy:main", *small_flags]
    nodes = [subprocess.Popen(command, cwd=together) for _ in range(2)]
    assert [node.wait(HANGS) for node in nodes] == [0, 0]
    check_ranks(small_flags, alone, together, 4)


def test_two_ranks_with_a_table_go_on_to_the_same_bits(at_ranks):  # noqa: F811
    assert_it_goes_on(at_ranks, 2, (4, 6))


def test_other_numbers_of_ranks_go_on_with_the_same_table(at_ranks):  # noqa: F811
    """1, 2, 4 and 1 again, also from the middle of a cycle."""
    whole, two = at_ranks(0), (2, 4, (0,))
    assert_close(at_ranks(*two), whole, since=4)
    assert_close(at_ranks(4, 6, two), whole, since=6)
    assert_close(at_ranks(0, 6, two), whole, since=6)
    last = table_of(at_ranks(4, 6, two).folder, 8)
    for a, b in zip(last, table_of(whole.folder, 8), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4)
