"""A lost console ends no run: it saves after a signal, or goes on with its log alone."""

import fcntl
import functools
import os
import signal
import struct
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import train_gpt
from conftest import language
from runs import Program, before_step, console_of, outcome
from train_gpt import HERE, main

LAST, AT = 6, 3  # steps, and the step before which the console is lost
RESUME = ["--resume", "on"]
pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    flags = language(tmp_path_factory.mktemp("data"))
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "256"]
    return [*flags, "--num_iterations", str(LAST), "--adam_eps", "1e-6", "--run_id", "it"]


# Each of these prepares the streams of a process, and returns what happens before a step.


def hung_up(*_):
    return functools.partial(signal.raise_signal, signal.SIGHUP)


def hung_up_under_nohup(*_):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return hung_up()


def terminal_closed(*numbers):
    """The streams are a terminal, which hangs up: a SIGHUP comes, and then each write fails."""
    os.setsid()  # the first terminal that it opens becomes its own
    master, slave = os.openpty()
    os.close(os.open(os.ttyname(slave), os.O_RDWR))
    for number in numbers:
        os.dup2(slave, number)
    return functools.partial(os.close, master)


def reader_gone(*numbers):
    """As by `| head`."""
    read, write = os.pipe()
    for number in numbers:
        os.dup2(write, number)
    os.close(write)
    return functools.partial(os.close, read)


def ctrl_c_ends_the_reader(*numbers):
    """As by `| tee`."""
    close = reader_gone(*numbers)

    def interrupt():
        close()
        signal.raise_signal(signal.SIGINT)

    return interrupt


def full(*numbers):
    for number in numbers:
        os.dup2(os.open("/dev/full", os.O_WRONLY), number)
    return lambda: None


def closed(*numbers):
    """As by `>&-`: Python then has no such stream."""
    for number in numbers:
        os.close(number)
        name = ("stdin", "stdout", "stderr")[number]
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
    return lambda: None


def losing(words: list[str], lose, numbers: tuple[int, ...]) -> None:
    """Run main; its streams of these numbers are lost before a step."""
    before_step(AT, lose(*numbers))
    main(words)


STOPS = [
    (hung_up, (), signal.SIGHUP),
    (terminal_closed, (1,), signal.SIGHUP),
    (terminal_closed, (1, 2), signal.SIGHUP),
    (ctrl_c_ends_the_reader, (1,), signal.SIGINT),
    (ctrl_c_ends_the_reader, (1, 2), signal.SIGINT),
]
GOES_ON = [hung_up_under_nohup, reader_gone, full, closed]
CASES = [*STOPS, *((lose, (1, 2), 0) for lose in GOES_ON)]


@pytest.mark.parametrize(("lose", "numbers", "number"), CASES)
def test_a_run_that_loses_its_console_saves_or_goes_on(lose, numbers, number, flags, whole):
    run = Program(flags, work=functools.partial(losing, lose=lose, numbers=numbers))
    assert run.end() == [128 + number if number else 0], run.text("err")
    if number:
        said = f"stopped by {number.name} after step {AT + 2}: saved; go on with {HERE}/run.sh"
        assert said in Path("logs/it.txt").read_text()
        console_of([*flags, *RESUME], Path.cwd())
    found = outcome(Path.cwd(), LAST)
    assert all(torch.equal(found.tensors[name], whole.tensors[name]) for name in whole.tensors)
    assert found.rows == whole.rows


@pytest.mark.parametrize("lose", [hung_up, ctrl_c_ends_the_reader])
def test_two_ranks_that_lose_their_console_save(lose, flags, whole):
    run = Program(flags, 2, functools.partial(losing, lose=lose, numbers=(1, 2)))
    number = signal.SIGHUP if lose is hung_up else signal.SIGINT
    assert run.end() == [128 + number] * 2, run.text("err")
    console_of([*flags, *RESUME], Path.cwd())
    assert outcome(Path.cwd(), LAST).rows[-1]["val_loss"] == pytest.approx(
        whole.rows[-1]["val_loss"], abs=1.5e-4
    )


def test_a_terminal_shows_validations_and_the_time_left(tiny, tmp_path, monkeypatch):
    """The rate, and the time left, are those of the last step alone."""
    monkeypatch.chdir(tmp_path)
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    hp = replace(tiny, run_id="it", num_iterations=8, keep=0)
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        log = train_gpt.Log(hp, 0)
        os.utime(log.path, (0, 0))
        log.note_validation(3, 16)
        assert log.path.stat().st_mtime > time.time() - 100
        log.ended = time.perf_counter() - 20  # the last step takes 20 s, and 7 are to come
        log.begin_step(train_gpt.Moment(0, hp), torch.tensor([5.0, 0.0]))
        log.bar.refresh()
        log.bar.close()
    shown = os.read(master, 10**5).decode()
    assert "validation 3/16" in shown and "loss 5.000" in shown and "02:20 left" in shown
