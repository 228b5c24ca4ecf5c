"""Lost consoles, as people lose them: real shells on a real terminal, with one process, with the
launcher, and with two ranks. A run that was stopped goes on, and ends with the same bits."""

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from conftest import language
from runs import HANGS, SCRIPT, outcome
from train_gpt import HERE

LAST = 300
LAUNCH = f"{sys.executable} {HERE}/tools/start.py"
STARTS = {
    "one process": f"{sys.executable} {SCRIPT}",
    "launcher": LAUNCH,
    "two ranks": f"NPROC=2 {LAUNCH}",
}
# The shell's command, what happens during the third step, and the signal that stops the run.
CASES = {
    "HUP": ("exec {}", "hang up", signal.SIGHUP),
    "| tee": ("{} | tee out", "Ctrl-C", signal.SIGINT),
    "2>&1 | tee": ("{} 2>&1 | tee out", "Ctrl-C", signal.SIGINT),
    "closed pty": ("{}", "close", signal.SIGHUP),
    "| head": ("{} | head -n 4", None, None),
    "2>&1 | head": ("{} 2>&1 | head -n 4", None, None),
    "/dev/full": ("{} > /dev/full 2>&1", None, None),
    "closed stdout": ("{} >&- 2>&-", None, None),
    "nohup": ("nohup {} > out", "close", None),
}


def start(command: str) -> tuple[subprocess.Popen, int]:
    """Start a shell on a terminal of its own. Return it, and the terminal's other side."""
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.close(os.open(os.ttyname(slave), os.O_RDWR))  # the first one of a session is its own

    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    options = {"start_new_session": True, "preexec_fn": own_terminal}
    shell = subprocess.Popen(["bash", "-c", command], **streams, **options)
    os.close(slave)
    return shell, master


def read_until(condition, master: int) -> str:
    """Read the terminal until a condition holds. Return what was read."""
    os.set_blocking(master, False)
    end, text = time.monotonic() + HANGS, b""
    while not condition():
        assert time.monotonic() < end, text.decode(errors="replace")
        try:
            text += os.read(master, 65536)
        except OSError:  # nothing there, or nobody
            time.sleep(0.01)
    return text.decode(errors="replace")


def has_logged(text: str) -> bool:
    log = Path("logs/it.txt")
    return log.exists() and f"\n{text}" in log.read_text().rpartition("\nrecord ")[2]


def has_ended() -> bool:
    return has_logged("stopped by ") or Path(f"logs/it/state_step{LAST:06}.pt").exists()


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> str:
    flags = language(tmp_path_factory.mktemp("data"))
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "256"]
    flags += ["--num_iterations", str(LAST), "--val_loss_every", "0", "--run_id", "it"]
    return shlex.join(flags)


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> dict:
    """Train undisturbed in each way; return the outcomes."""
    found = {}
    for name, command in STARTS.items():
        folder = tmp_path_factory.mktemp("whole")
        subprocess.run(f"{command} {flags}", shell=True, cwd=folder, check=True)
        found[name] = outcome(folder, LAST)
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STARTS)
def test_a_lost_console_ends_no_run(name, case, flags, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    form, event, number = CASES[case]
    run = f"{STARTS[name]} {flags}"
    if form.startswith(("exec", "nohup")) and run.startswith("NPROC"):
        run = f"env {run}"
    shell, master = start(form.format(run))
    read_until(lambda: has_logged("step:3/"), master)
    if event == "hang up":
        os.kill(shell.pid, signal.SIGHUP)
    elif event == "Ctrl-C":
        os.write(master, b"\x03")
    elif event == "close":
        os.close(master)
        master = os.open(os.devnull, os.O_RDONLY)
    read_until(has_ended, master)
    read_until(lambda: shell.poll() is not None, master)
    if number:
        assert has_logged("stopped by ") and list(tmp_path.glob("logs/it/*.pt"))
        results = Path("logs/results.jsonl")
        if name != "one process":  # the launcher notes how the run ended, if it still lives
            deadline = time.monotonic() + HANGS
            while not results.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert json.loads(results.read_text())["status"] == "stopped"
        again = subprocess.run(f"{run} --resume on", shell=True, capture_output=True, text=True)
        assert again.returncode == 0 and "resumed at step" in again.stdout, again.stderr
    found = outcome(tmp_path, LAST)
    for key, tensor in whole[name].tensors.items():
        assert torch.equal(found.tensors[key], tensor), key
    assert found.rows == whole[name].rows
