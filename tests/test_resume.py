"""Signals, kills, other ranks: no run is lost, and a resumed run is the uninterrupted one."""

import functools
import os
import random
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import language
from runs import SCRIPT, Program, before_step, console_of, rows, val_losses

import train_gpt
from train_gpt import Run, load_checkpoint, main

KILLS = int(os.environ.get("KILLS", 3))  # tests/slow makes it 20
LAST = 40 if KILLS < 5 else 200


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(folder / f"logs/it/state_step{LAST:06}.pt", Run)["model"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    flags = language(tmp_path_factory.mktemp("data"))
    flags += ["--model_dim", "32", "--num_heads", "1", "--batch_seqs", "2", "--val_tokens", "256"]
    flags += ["--num_iterations", str(LAST), "--val_loss_every", "0", "--adam_eps", "1e-6"]
    return [*flags, "--save_every", "5", "--run_id", "it"]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> SimpleNamespace:
    """Train undisturbed; return weights, losses and rows."""
    folder = tmp_path_factory.mktemp("whole")
    losses = val_losses(console_of(flags, folder))
    return SimpleNamespace(
        weights=weights(folder), losses=losses, rows=rows(folder / "logs/it.jsonl")
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def stopped(words: list[str], number: int, step: int, delay: float) -> None:
    """Run main, which gets a signal `delay` seconds after a step began, or three steps later at
    last: then it waits."""
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
    """Half of the moments are around a step that is saved, or while it saves."""
    rng = random.Random(int(number))
    begun = 0
    for stops in range(KILLS):
        near = 5 - begun % 5 - 1  # the step after which it saves
        aim = 7
        if stops:
            aim = begun + (near if rng.random() < 0.5 else rng.randrange(1, 4))
        work = functools.partial(stopped, number=number, step=aim, delay=0.04 * rng.random())
        run = Program([*flags, "--resume", "auto"], work=work)
        expected = -number if number == signal.SIGKILL else 128 + number
        assert run.end() == [expected], run.text("err")
        if number == signal.SIGTERM:
            assert "stopped by SIGTERM and saved" in run.text("out")
        assert ("resumed at step" in run.text("out")) == (stops > 0)
        rows(Path("logs/it.jsonl"), killed=number == signal.SIGKILL)
        newest = max(tmp_path.glob("logs/it/*.pt"), default=Path("state_step000000.pt"))
        assert int(newest.stem[-6:]) >= begun
        begun = int(newest.stem[-6:])
    assert 0 < begun < LAST
    console_of([*flags, "--resume", "auto"], tmp_path)
    assert not list(tmp_path.glob("logs/it/*.tmp"))
    for name, weight in whole.weights.items():
        assert torch.equal(weights(tmp_path)[name], weight), name
    found = rows(Path("logs/it.jsonl"))
    expected = [row.copy() for row in whole.rows]
    assert [row["step"] for row in found] == list(range(1, LAST + 1))
    for row in (*found, *expected):
        assert row.pop("ms") > 0 and row.pop("tokens_per_s") > 0 and row.pop("memory_mib") > 0
    assert found == expected
    log = Path("logs/it.txt").read_text()
    assert log.count("\nresumed at step") == KILLS
    assert log.startswith(Path(SCRIPT).read_text()) and log.count("\nmodel_dim: 32\n") == 1


def killed_while_it_saves(words: list[str]) -> None:
    """Run main, which is killed when half of a checkpoint is written."""
    save = torch.save

    def save_half(state, file):
        save(state, file)
        file.truncate(file.tell() // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half
    main(words)


def test_a_checkpoint_gets_its_name_when_it_is_whole(flags, tmp_path):
    run = Program(flags, work=killed_while_it_saves)
    assert run.end() == [-signal.SIGKILL]
    (half,) = tmp_path.glob("logs/it/*")
    assert half.suffix == ".tmp" and half.stat().st_size > 1000
    out = console_of([*flags, "--resume", "auto", "--num_iterations", "1"], tmp_path)
    assert "no checkpoint under logs/, a new run begins" in out
    assert [path.name for path in tmp_path.glob("logs/it/*")] == ["state_step000001.pt"]


# ---- signals


def twice(words: list[str]) -> None:
    """Run main, which gets two SIGINTs at once: torchrun repeats what the terminal sends."""

    def interrupt():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)

    before_step(3, interrupt)
    main(words)


@pytest.mark.parametrize("work", [main, twice])
def test_ctrl_c_saves_and_leaves_with_130(work, flags, tmp_path):
    long = ["--save_every", "0", "--num_iterations", "100000"]
    run = Program([*flags, *long], work=work)
    if work is main:
        run.wait_for("step:3/")
        run.send(signal.SIGINT)
    assert run.end() == [130] and run.text("err") == ""
    said = r"stopped by SIGINT and saved; --resume auto goes on after step (\d+)"
    step = int(re.search(said, run.text("out"))[1])
    assert load_checkpoint(tmp_path / f"logs/it/state_step{step:06}.pt", Run)["step"] == step >= 3


def saving_for_ever(words: list[str]) -> None:
    """Run main, which never ends to save."""

    def save(*arguments):
        print("saving", flush=True)
        time.sleep(1e6)

    torch.save = save
    main(words)


def test_a_second_ctrl_c_leaves_at_once(flags, tmp_path):
    """It counts from a second after the first one on."""
    run = Program(flags, work=saving_for_ever)
    run.wait_for("step:2/")
    run.send(signal.SIGINT)
    run.wait_for("saving")
    run.send(signal.SIGTERM)
    time.sleep(1.1)
    assert run.ranks[0].is_alive()
    run.send(signal.SIGINT)
    run.ranks[0].join(5)
    assert not run.ranks[0].is_alive()
    assert run.end() == [130] and not list(tmp_path.glob("logs/it/*.pt"))


def test_before_training_ctrl_c_leaves_with_a_line(flags):
    run = Program(flags, work=waiting_to_begin)
    run.wait_for("ready")
    run.send(signal.SIGINT)
    assert run.end() == [130] and run.text("err").strip() == "train_gpt.py: interrupted"


def waiting_to_begin(words: list[str]) -> None:
    """Run main, which never ends to warm up."""

    def warm_up(*arguments):
        print("ready", flush=True)
        time.sleep(1e6)

    train_gpt.warm_up = warm_up
    main(words)


# ---- ranks


def rank_0_stopped(words: list[str]) -> None:
    """Run main; a signal comes to one rank only."""
    if os.environ["RANK"] == "0":
        before_step(20, functools.partial(signal.raise_signal, signal.SIGTERM))
    main(words)


def test_another_number_of_ranks_takes_over(flags, whole, tmp_path):
    """The first half is on two ranks, the second on one; it is compared with all on one."""
    run = Program(flags, 2, rank_0_stopped)
    assert run.end() == [143, 143], run.text("err")
    assert "stopped by SIGTERM and saved" in run.text("out")
    out = console_of([*flags, "--resume", "auto"], tmp_path)
    assert re.search(r"resumed at step 2\d\n", out)
    assert val_losses(out)[LAST] == pytest.approx(whole.losses[LAST], abs=1.5e-4)


def hanging(words: list[str]) -> None:
    """Run main; rank 1 sleeps in its third step."""
    if os.environ["RANK"] == "1":
        before_step(3, lambda: time.sleep(1e6))
    main(words)


def test_a_rank_that_hangs_ends_the_run_by_the_timeout(flags):
    run = Program([*flags, "--comm_timeout", "2"], 2, hanging)
    assert run.end(slice(1)) == [1]
    assert run.text("err").startswith("train_gpt.py: error: another rank has stopped, or hangs")
    run.send(signal.SIGKILL)  # as torchrun does then
    run.end()


def test_ranks_that_find_different_checkpoints_stop(flags, tmp_path):
    """So it is on two machines whose logs/ is not one folder."""
    run = Program([*flags, "--resume", "auto"], 2, in_own_folder)
    assert run.fail() == [1, -signal.SIGTERM]
    assert "ranks found different checkpoints: logs/ must be one folder" in run.text("err")
    assert not run.text("err", 1)


def in_own_folder(words: list[str]) -> None:
    """Run main, where only rank 1 finds a checkpoint."""
    folder = Path(os.environ["RANK"])
    folder.mkdir()
    os.chdir(folder)
    if os.environ["RANK"] == "1":
        alone = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
        main([*words[:-2], "--num_iterations", "1"])
        os.environ.update(alone)
    main([*words, "--resume_force"])
