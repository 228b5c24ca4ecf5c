"""The launcher's console: which signals reach what it started, and output that goes nowhere.

What it starts is a stub, which notes signals; so is torchrun.
"""

import os
import pty
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import launch
import result
import train_gpt
from runs import Program

STUB = """import os, signal, sys, time
def note(number, frame):
    with open("signals", "a") as file:
        print(signal.Signals(number).name, file=file)
    if signal.Signals(number).name == sys.argv[1]:
        sys.exit(3)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, note)
open("ready", "w").close()
while True:
    time.sleep(0.01)
"""
TORCHRUN = """import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, lambda *_: os.killpg(rank.pid, signal.SIGTERM))
rank = subprocess.Popen([sys.executable, *sys.argv[3:]], start_new_session=True)
sys.exit(rank.wait())
"""


def launcher(words: list[str], ignored: int = 0, terminal: str = "") -> None:
    """Start a program as run.sh does, and exit with its status; in a terminal, if one is named."""
    if terminal:
        os.login_tty(os.open(terminal, os.O_RDWR))
    if ignored:
        signal.signal(ignored, signal.SIG_IGN)
    hp = replace(train_gpt.RECORDS["demo"], device="cpu")
    train_gpt.as_program("run.sh", lambda: sys.exit(launch.start(hp, words).status))


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return start(last, *more): it starts a launcher of a stub that ends at the signal `last`, and
    waits for the stub."""
    monkeypatch.chdir(tmp_path)
    Path("stub.py").write_text(STUB)

    def start(last: str, *more) -> Program:
        program = Program(["stub.py", last], work=launcher, more=more)
        wait_for(Path("ready"))
        return program

    return start


def wait_for(path: Path, lines: int = 0) -> None:
    """Return when a file has so many lines."""
    end = time.monotonic() + 30
    while not path.exists() or path.read_text().count("\n") < lines:
        assert time.monotonic() < end
        time.sleep(0.01)


def noted() -> list[str]:
    """Return the signals that the stub has had."""
    return Path("signals").read_text().split()


@pytest.mark.parametrize("number", result.STOPS)
def test_a_signal_for_the_launcher_alone_reaches_the_program_as_sigterm(number, started):
    program = started("SIGTERM")
    program.send(number)
    assert program.end() == [128 + number] and noted() == ["SIGTERM"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_what_the_launcher_was_told_to_ignore_does_nothing(number, started):
    """As by nohup."""
    program = started("SIGTERM", number)
    program.send(number)
    time.sleep(0.1)
    program.send(signal.SIGTERM)
    assert program.end() == [128 + signal.SIGTERM] and noted() == ["SIGTERM"]


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_a_second_sigint_ends_a_program_that_goes_on(nproc, started, tmp_path, monkeypatch):
    """With torchrun, it must reach the ranks, which are not of the terminal's group."""
    path = tmp_path / "torch" / "distributed" / "run.py"
    path.parent.mkdir(parents=True)
    path.write_text(TORCHRUN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NPROC", nproc)
    program = started("SIGINT")
    program.send(signal.SIGINT)
    wait_for(Path("signals"), 1)
    program.send(signal.SIGINT)
    assert program.end() == [128 + signal.SIGINT] and noted() == ["SIGTERM", "SIGINT"]


def test_ctrl_c_in_a_terminal_reaches_a_single_program_as_it_is(started):
    terminal, other = pty.openpty()
    program = started("SIGINT", 0, os.ttyname(other))
    os.write(terminal, b"\x03")
    assert program.end() == [128 + signal.SIGINT] and "SIGINT" in noted()


TALK = "import sys\nfor i in range(20000): print('line', i, file=sys.stderr)\n"


def to_nobody(words: list[str], closed: bool) -> None:
    """Start a program; nobody reads this process's standard error, or it is closed."""
    reader, writer = os.pipe()
    os.dup2(writer, 2)
    os.close(reader)
    if closed:
        os.close(2)
    launcher(words)


@pytest.mark.parametrize("closed", [True, False])
def test_a_lost_standard_error_does_not_block_the_program(closed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("talk.py").write_text(TALK)
    assert Program(["talk.py"], work=to_nobody, more=(closed,)).end() == [0]
