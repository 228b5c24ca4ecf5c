"""Whole runs: kills, demos at their full size, and what torchrun does with ranks."""

import os
import signal
import subprocess
import sys

import pytest

from runs import HANGS, SCRIPT, rows, run, val_losses
from train_gpt import HERE

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
FORK = str(HERE / "forks/train_gpt_2026.py")
# As a user has it, and not the tests: with a thread for each core, and all of the CPU's
# instructions. A busy machine may take long.
OF_TESTS = "OMP_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR"
OWN = {name: value for name, value in os.environ.items() if name not in OF_TESTS}


def test_twenty_stops_of_each_kind_change_no_bit():
    """Kills and SIGTERMs, each with a resume."""
    command = [sys.executable, "-m", "pytest", "-q", f"{HERE}/tests/test_resume.py"]
    command += ["-k", "random_moments"]
    done = subprocess.run(command, env=os.environ | {"KILLS": "20"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("script", "last"), [(SCRIPT, 320), (FORK, 180)])
def test_the_demo_learns_from_8_32_to_below_3_7(script, last, tmp_path):
    """The head of train_gpt.py begins at zero, that of the fork does not."""
    flags = ["--record", "demo", "--device", "cpu"]
    done = run(flags, script=script, cwd=tmp_path, env=OWN, check=True, timeout=3600)
    losses = val_losses(done.stdout)
    assert losses[0] == pytest.approx(8.31777, abs=0 if script == SCRIPT else 0.01)
    assert losses[last] < 3.7


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
