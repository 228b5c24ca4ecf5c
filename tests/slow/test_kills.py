"""Twenty kills and twenty SIGTERMs, each with a resume; a SIGTERM to torchrun; its restarts."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT
from runs import HANGS, SCRIPT, console_of, rows, val_losses


def test_twenty_stops_of_each_kind_change_no_bit():
    command = [sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "test_resume.py")]
    command += ["-k", "random_moments"]
    done = subprocess.run(command, env=os.environ | {"KILLS": "20"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_run_whose_torchrun_gets_sigterm_goes_on(flags, tmp_path):
    """On one rank then; it ends as the run that nothing stopped."""
    flags += ["--num_iterations", "200", "--val_loss_every", "0", "--adam_eps", "1e-6"]
    flags += ["--batch_seqs", "2", "--run_id", "it"]
    (tmp_path / "whole").mkdir()
    expected = val_losses(console_of([*flags, "--save_every", "0"], tmp_path / "whole"))[200]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    process = subprocess.Popen([*launcher, SCRIPT, *flags], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step:20/"):
            process.send_signal(signal.SIGTERM)
    assert process.wait(HANGS) != 0
    out = console_of([*flags, "--resume", "auto"], tmp_path)
    assert int(re.search(r"resumed at step (\d+)", out)[1]) in range(20, 199)
    assert val_losses(out)[200] == pytest.approx(expected, abs=1.5e-4)


@pytest.mark.parametrize("name", [[], ["--run_id", "it"]])
def test_a_run_that_torchrun_starts_again_goes_on(name, flags, tmp_path):
    """One of two ranks is killed; torchrun ends the other one and starts both anew."""
    flags += ["--num_iterations", "200", "--val_loss_every", "0", "--adam_eps", "1e-6"]
    flags += ["--batch_seqs", "2", "--save_every", "5", "--resume", "auto", *name]
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
