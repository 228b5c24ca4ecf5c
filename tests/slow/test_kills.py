"""Twenty kills and twenty SIGTERMs, each with a resume; a restart by torchrun."""

import os
import signal
import subprocess
import sys

from conftest import ROOT
from runs import HANGS, SCRIPT, rows


def test_twenty_stops_of_each_kind_change_no_bit():
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "test_resume.py")]
    command += ["-k", "random_moments"]
    done = subprocess.run(command, env=os.environ | {"KILLS": "20"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_run_that_torchrun_starts_again_goes_on(flags, tmp_path):
    """One of two ranks is killed; torchrun ends the other one and starts both anew."""
    flags += ["--num_iterations", "200", "--val_loss_every", "0", "--adam_eps", "1e-6"]
    flags += ["--batch_seqs", "2", "--save_every", "5"]
    flags += ["--run_id", "it", "--resume", "on"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, "--max_restarts=1", SCRIPT, *flags]
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
    (path,) = tmp_path.glob("logs/*.jsonl")
    assert [row["step"] for row in rows(path)] == list(range(1, 201))
