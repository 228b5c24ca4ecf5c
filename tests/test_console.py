"""A lost console ends no run: it saves after a signal, or goes on with its log alone. Which signals
reach what the launcher has started."""

import functools
import os
import pty
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import launch
import result
import train_gpt
from conftest import language
from runs import HANGS, SCRIPT, Program, before_step, console_of, outcome
from test_scripts import launch_with
from train_gpt import HERE, main

# It notes the signals that it gets, and ends at the one that its argument names.
STUB = """import os, signal, sys, time
rank = os.environ.get("RANK", "0")
def note(number, frame):
    with open("signals" + rank, "a") as file:
        print(signal.Signals(number).name, file=file)
    if signal.Signals(number).name == sys.argv[1]:
        sys.exit(3)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, note)
open("ready" + rank, "w").close()
while True:
    time.sleep(0.01)
"""
pytestmark = pytest.mark.usefixtures("elsewhere")


def launcher(words: list[str], ranks: int = 1, ignored: int = 0, terminal: str = "") -> None:
    """Start a program as run.sh does, and exit with its status; in a terminal, if one is named."""
    os.environ["NPROC"] = str(ranks)
    if terminal:
        os.login_tty(os.open(terminal, os.O_RDWR))
    if ignored:
        signal.signal(ignored, signal.SIG_IGN)
    hp = replace(train_gpt.RECORDS["demo"], device="cpu")
    train_gpt.as_program("run.sh", lambda: sys.exit(launch.start(hp, words).status))


def started(last: str, ranks: int = 1, *more) -> Program:
    """Start a launcher of stubs that end at the signal `last`, and wait for them."""
    Path("stub.py").write_text(STUB)
    program = Program(["stub.py", last], work=launcher, more=(ranks, *more))
    for rank in range(ranks):
        wait_for(f"ready{rank}")
    return program


def wait_for(name: str, lines: int = 0) -> None:
    end = time.monotonic() + HANGS
    while not os.path.exists(name) or Path(name).read_text().count("\n") < lines:
        assert time.monotonic() < end
        time.sleep(0.01)


def noted(rank: int = 0) -> list[str]:
    return Path(f"signals{rank}").read_text().split()


@pytest.mark.parametrize(
    ("number", "ranks", "ignored"), [(signal.SIGHUP, 2, 0), (signal.SIGINT, 1, signal.SIGHUP)]
)
def test_a_signal_for_the_launcher_alone_reaches_the_program_as_sigterm(number, ranks, ignored):
    """One that the launcher was told to ignore, as by nohup, does nothing."""
    program = started("SIGTERM", ranks, ignored)
    if ignored:
        program.send(ignored)
        time.sleep(0.1)
    program.send(number)
    assert program.end() == [128 + number] and not program.text("err")
    assert [noted(rank) for rank in range(ranks)] == [["SIGTERM"]] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_sigint_ends_a_program_that_goes_on(ranks):
    """With torchrun, it must reach the ranks, which are not of the terminal's group. The status is
    of the first signal."""
    program = started("SIGINT", ranks)
    program.send(signal.SIGHUP)
    for rank in range(ranks):
        wait_for(f"signals{rank}", 1)
    program.send(signal.SIGINT)
    assert program.end() == [128 + signal.SIGHUP]
    assert [noted(rank) for rank in range(ranks)] == [["SIGTERM", "SIGINT"]] * ranks


def test_ctrl_c_in_a_terminal_reaches_a_single_program_as_it_is():
    terminal, other = pty.openpty()
    program = started("SIGINT", 1, 0, os.ttyname(other))
    os.write(terminal, b"\x03")
    assert program.end() == [128 + signal.SIGINT] and "SIGINT" in noted()


def to_nobody(words: list[str], work) -> None:
    """Do this work; nobody reads this process's output."""
    reader, writer = os.pipe()
    for number in (1, 2):
        os.dup2(writer, number)
    os.close(reader)
    work(words)


def test_a_launcher_without_a_console_notes_how_its_run_ended(flags):
    words = [*flags, "--num_iterations", "100000"]
    program = Program(words, work=to_nobody, more=(functools.partial(launch_with, really=True),))
    wait_for("logs/it.jsonl", 3)
    program.send(signal.SIGHUP)
    assert program.end() == [128 + signal.SIGHUP]
    (line,) = result.noted()
    assert (line["status"], line["reason"], line["val_loss"]) == ("stopped", "SIGHUP", None)
    assert Path(f"logs/it/state_step{line['steps']:06}.pt").exists()
    assert line["resume"].startswith(f"cd {Path.cwd()} && {HERE}/run.sh {SCRIPT} --record demo --")
    assert line["resume"].endswith(" --run_id it --resume on")


LAST, AT = 6, 3  # steps, and the step before which the console is lost


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    flags = language(tmp_path_factory.mktemp("data"))
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "256"]
    return [*flags, "--num_iterations", str(LAST), "--adam_eps", "1e-6", "--run_id", "it"]


# Each of these prepares the output of a process, and returns what happens before a step.


def hung_up():
    return functools.partial(signal.raise_signal, signal.SIGHUP)


def asked_by_slurm():
    """By its --signal=USR1."""
    return functools.partial(signal.raise_signal, signal.SIGUSR1)


def hung_up_under_nohup():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return hung_up()


def reader_gone():
    """As by `| head`."""
    read, write = os.pipe()
    for number in (1, 2):
        os.dup2(write, number)
    os.close(write)
    return functools.partial(os.close, read)


def ctrl_c_ends_the_reader():
    """As by `2>&1 | tee`."""
    close = reader_gone()

    def interrupt():
        close()
        signal.raise_signal(signal.SIGINT)

    return interrupt


def on_a_full_disk():
    """As by `> FILE` on a disk that is full."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    return lambda: None


def closed():
    """As by `>&- 2>&-`: Python then has no such stream."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.close(number)
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
    return lambda: None


def losing(words: list[str], lose) -> None:
    before_step(AT, lose())
    main(words)


STOPS = {
    hung_up: signal.SIGHUP,
    asked_by_slurm: signal.SIGUSR1,
    ctrl_c_ends_the_reader: signal.SIGINT,
}


@pytest.mark.parametrize("lose", [*STOPS, hung_up_under_nohup, reader_gone, on_a_full_disk, closed])
def test_a_run_that_loses_its_console_saves_or_goes_on(lose, flags, whole):
    run = Program(flags, work=functools.partial(losing, lose=lose))
    number = STOPS.get(lose)
    assert run.end() == [128 + number if number else 0], run.text("err")
    if number:
        said = f"stopped by {number.name} after step {AT + 2}: saved; resume with "
        said += f"cd {Path.cwd()} && {HERE}/run.sh {SCRIPT} "
        assert said in Path("logs/it.txt").read_text()
        console_of([*flags, "--resume", "on"], Path.cwd())
    found = outcome(Path.cwd(), LAST)
    assert all(torch.equal(found.tensors[name], whole.tensors[name]) for name in whole.tensors)
    assert found.rows == whole.rows
