"""Signals, kills, locks, other ranks: a resumed run is the uninterrupted one."""

import functools
import os
import random
import re
import shlex
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import runs
import train_gpt
from conftest import language
from runs import Program, assert_same, before_step, console_of, error_of, outcome, rows
from train_gpt import main

KILLS = int(os.environ.get("KILLS", 3))  # tests/slow makes it 20
LAST = 40 if KILLS < 5 else 200
RESUME = ["--resume", "on"]
pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    flags = language(tmp_path_factory.mktemp("my data"))
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "256"]
    flags += ["--num_iterations", str(LAST), "--val_loss_every", "0", "--adam_eps", "1e-6"]
    return [*flags, "--save_every", "5", "--run_id", "it"]


def stopped(words: list[str], number: int, step: int, delay: float) -> None:
    """Run main, which gets a signal `delay` seconds after a step began. Three steps later it waits
    for the signal, if that has not come."""
    sent = threading.Event()

    def send() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), number)
        sent.set()

    before_step(step, threading.Thread(target=send).start)
    before_step(step + 3, sent.wait)
    main(words)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_stopped_at_random_moments_ends_bit_identical(flags, whole, tmp_path, number):
    """Half of the moments are at a step that is saved, or while it is being saved."""
    rng = random.Random(int(number))
    begun = 0
    for stops in range(KILLS):
        near = 5 - begun % 5 - 1  # the step after which it saves
        aim = 7
        if stops:
            aim = begun + (near if rng.random() < 0.5 else rng.randrange(1, 4))
        work = functools.partial(stopped, number=number, step=aim, delay=0.04 * rng.random())
        run = Program([*flags, *RESUME], work=work)
        expected = -number if number == signal.SIGKILL else 128 + number
        assert run.end() == [expected], run.text("err")
        assert ("resumed at step" in run.text("out")) == (stops > 0)
        newest = max(tmp_path.glob("logs/it/*.pt"), default=Path("state_step000000.pt"))
        assert int(newest.stem[-6:]) >= begun
        begun = int(newest.stem[-6:])
        with Path("logs/it.jsonl").open("a") as torn:
            torn.write('{"step": {"st')
    assert 0 < begun < LAST
    console_of([*flags, *RESUME], tmp_path)
    assert not list(tmp_path.glob("logs/it/*.tmp"))
    assert_same(outcome(tmp_path, LAST), whole)
    assert Path("logs/it.txt").read_text().count("\nresumed at step") == KILLS


# ---- signals


def interrupted_twice(words: list[str]) -> None:
    """Run main, which gets two SIGINTs at once: torchrun repeats what the terminal sends."""

    def interrupt():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    before_step(3, interrupt)
    main(words)


def test_ctrl_c_saves_leaves_with_130_and_says_how_to_go_on(flags, tmp_path, monkeypatch):
    """In a folder whose name has a blank, as that of its data."""
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    flags = [*flags, "--save_every", "0", "--muon_lr", "0.0333333333333"]
    run = Program(flags, work=interrupted_twice)
    assert run.end() == [130]
    assert run.text("err") == "\nstopping after this step; a second Ctrl-C ends at once\n"
    said = r"stopped by SIGINT after step (\d+): saved; resume with cd (.*) && "
    said += r"\S*/run.sh \S*/train_gpt.py (.*)\n"
    step, place, command = re.search(said, run.text("out")).groups()
    assert Path(f"logs/it/state_step{int(step):06}.pt").exists() and int(step) >= 3
    assert shlex.split(place) == [str(folder)]
    assert f"\nresumed at step {step}\n" in console_of(shlex.split(command), folder)


def saving_for_ever(words: list[str]) -> None:
    """Run main, whose first save never ends."""

    def save(*arguments):
        print("saving", flush=True)
        time.sleep(1e6)

    torch.save = save
    main(words)


def test_a_second_ctrl_c_leaves_at_once_if_a_second_has_passed(flags, tmp_path):
    run = Program(flags, work=saving_for_ever)
    run.wait_for("step:2/")
    run.send(signal.SIGINT)
    run.wait_for("saving")
    time.sleep(1.1)
    run.send(signal.SIGTERM)  # which does not
    time.sleep(0.3)
    assert run.ranks[0].is_alive()
    run.send(signal.SIGINT)
    assert run.end() == [130] and not list(tmp_path.glob("logs/it/*.pt"))


# ---- ranks


def in_own_folder(words: list[str]) -> None:
    """Run main, where each rank has a folder of its own."""
    Path(os.environ["RANK"]).mkdir(exist_ok=True)
    os.chdir(os.environ["RANK"])
    runs.wait_at_most(0.1)
    main(words)


def test_ranks_without_rank_0_s_checkpoint_stop(flags, whole, tmp_path):
    """As on two machines whose logs/ are two folders."""
    shutil.copytree(whole.folder, tmp_path / "0")
    run = Program([*flags, *RESUME], 2, in_own_folder)
    assert run.end() == [1, 1]
    for rank in range(2):
        assert "error: ranks found different checkpoints: logs/" in run.text("err", rank)


# ---- which run goes on


def waiting(words: list[str], go: str) -> None:
    """Run main, which waits before its seventh step until there is a file `go`."""

    def wait() -> None:
        print("waiting", flush=True)
        while not os.path.exists(go):
            time.sleep(0.01)

    before_step(7, wait)
    main(words)


def test_a_run_that_resumes_with_another_source_or_other_data_says_so(flags, whole, tmp_path):
    """And goes on."""
    said = re.compile("^the (.*) is not the one with which this run began$", re.M)
    shutil.copytree(whole.folder / "logs", tmp_path / "logs")
    log, last = Path("logs/it.txt"), Path(f"logs/it/state_step{LAST:06}.pt")
    text = log.read_text()
    shutil.copy(flags[flags.index("--val_files") + 1].replace("*", "0"), "val_1.bin")
    for changed, more, expected in (
        (text, [], []),
        (text.replace("1 - momentum", "1 + momentum", 1), [], ["source"]),
        (text, ["--val_files", "val_1.bin"], ["val_files"]),
    ):
        last.unlink()
        log.write_text(changed)
        assert said.findall(console_of([*flags, *more, *RESUME], tmp_path)) == expected


def test_a_start_that_saved_nothing_is_put_aside(flags, tmp_path):
    """So the log has the settings that trained: a run that was killed early, or in its header, has
    nothing to resume."""
    for step in (2, None):
        run = Program([*flags, "--muon_lr", "0.3"], work=functools.partial(killed_at, step=step))
        assert run.end() == [-signal.SIGKILL] and Path("logs/it.txt").stat().st_size
        before = {name: Path(name).read_text() for name in ("logs/it.txt", "logs/it.jsonl")}
        out = console_of([*flags, "--num_iterations", "5", *RESUME], tmp_path)
        assert "muon_lr: 0.05\n" in Path("logs/it.txt").read_text()
        assert [row["step"] for row in rows(Path("logs/it.jsonl"))] == [1, 2, 3, 4, 5]
        (aside,) = re.findall(r"its log is now (logs/it.txt_.*\.unfinished)\n", out)
        for name, text in before.items():
            assert not text or Path(aside.replace("logs/it.txt", name)).read_text() == text
        shutil.rmtree("logs")


def test_a_finished_run_that_saved_nothing_is_not_made_again(flags, tmp_path, capsys):
    console_of([*flags, "--num_iterations", "5", "--keep", "0"], tmp_path)
    log = Path("logs/it.txt").read_text()
    _, err = error_of([*flags, "--num_iterations", "5", "--keep", "0", *RESUME], capsys)
    assert "logs/it.txt is of a finished run, which has no checkpoint" in err
    assert Path("logs/it.txt").read_text() == log


def test_a_run_that_another_process_has_trained_meanwhile_starts_again(
    flags, whole, tmp_path, capsys, monkeypatch
):
    """It ends after this one has read its checkpoint, and before this one has the lock."""
    shutil.copytree(whole.folder / "logs", tmp_path / "logs")
    last = Path(f"logs/it/state_step{LAST:06}.pt")
    last.rename("last")
    open_locked = train_gpt.Log.open_locked

    def late(log) -> None:
        Path("last").rename(last)
        open_locked(log)

    monkeypatch.setattr(train_gpt.Log, "open_locked", late)
    _, err = error_of([*flags, *RESUME], capsys)
    assert "another process has trained it meanwhile: start again" in err


def killed_at(words: list[str], step: int | None) -> None:
    """Run main, which is killed before a step, or while it writes the log's header."""
    if step is None:
        write = train_gpt.Log.__call__

        def half(log, line, *more, **options):
            write(log, line[: len(line) // 2], *more, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        train_gpt.Log.__call__ = half
    before_step(step, functools.partial(os.kill, os.getpid(), signal.SIGKILL))
    main(words)


def test_a_live_run_is_not_joined_and_a_finished_one_does_not_go_on(flags, tmp_path, capsys):
    flags = [*flags, "--num_iterations", "9"]
    live = Program(flags, work=functools.partial(waiting, go=str(tmp_path / "go")))
    live.wait_for("waiting")
    try:
        status, err = error_of([*flags, *RESUME], capsys)
    finally:
        Path("go").touch()
    assert status == 1
    assert err.startswith("train_gpt.py: error: another process is writing logs/it.txt")
    assert live.end() == [0], live.text("err")
    assert [row["step"] for row in rows(Path("logs/it.jsonl"))] == list(range(1, 10))
    assert Path("logs/it.txt").read_text().count("step:9/9 val_loss") == 1
    assert "the run it is finished" in console_of([*flags, *RESUME], tmp_path)
