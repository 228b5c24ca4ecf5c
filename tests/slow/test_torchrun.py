"""What torchrun does with ranks that fail: it ends all of them, or starts all of them again."""

import os
import signal
import subprocess
import sys

from runs import HANGS, SCRIPT, rows, run


def test_bad_input_is_said_once(flags):
    done = run([*flags, "--embed_lr", "1e38"], 2)
    assert done.returncode == 1 and f'File "{SCRIPT}"' not in done.stderr
    (line,) = [x for x in done.stderr.splitlines() if x.startswith("train_gpt.py:")]
    assert "the loss is nan at step 2" in line


def test_a_run_that_is_started_again_goes_on(flags, tmp_path):
    """One of two ranks is killed; torchrun ends the other one and starts both anew."""
    flags += ["--num_iterations", "200", "--val_loss_every", "0", "--batch_seqs", "2"]
    flags += ["--save_every", "5", "--run_id", "it", "--resume", "on"]
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
    assert [row["step"] for row in rows(tmp_path / "logs/it.jsonl")] == list(range(1, 201))
