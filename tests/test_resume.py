"""Signals, kills, other ranks: no run is lost, and a resumed run is the uninterrupted one."""

import contextlib
import errno
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
from train_gpt import Run, UserError, load_checkpoint, main

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
    assert "no unfinished run of these settings is there, a new one begins" in out
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


def test_ranks_without_rank_0_s_checkpoint_stop(flags, tmp_path):
    """So it is on two machines whose logs/ is not one folder."""
    run = Program([*flags, "--resume", "auto"], 2, in_own_folder)
    assert run.end(slice(1, 2)) == [2]
    run.fail()
    said = r"rank 0 chose logs/it/state_step\d+.pt, which is not here: logs/ must be one folder"
    assert re.search(said, run.text("err", 1))


def in_own_folder(words: list[str]) -> None:
    """Run main, where only rank 0 finds a checkpoint."""
    folder = Path(os.environ["RANK"])
    folder.mkdir()
    os.chdir(folder)
    if os.environ["RANK"] == "0":
        alone = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
        with contextlib.suppress(SystemExit):
            before_step(5, functools.partial(signal.raise_signal, signal.SIGTERM))
            main(words)
        os.environ.update(alone)
    main(words)


# ---- which run goes on


def waiting(words: list[str], step: int, go: str) -> None:
    """Run main, which waits before a step until there is a file `go`."""

    def wait() -> None:
        if os.environ.get("RANK", "0") == "0":
            print("waiting", flush=True)
        while not os.path.exists(go):
            time.sleep(0.01)

    before_step(step, wait)
    main(words)


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in rows(path)]


@pytest.mark.parametrize("ranks", [0, 2])
def test_a_live_run_is_not_joined(ranks, flags, tmp_path):
    """Another process begins a run of its own; one that names the live run is refused. When the
    live run has ended, nothing is left to do."""
    flags = [*flags, "--num_iterations", "9"]
    work = functools.partial(waiting, step=7, go=str(tmp_path / "go"))
    live = Program(flags, ranks, work)
    live.wait_for("waiting")
    assert Path("logs/it/state_step000005.pt").exists()
    holder = f"the run it goes on in process {live.ranks[0].pid} on "

    named = Program([*flags, "--resume", "auto"], ranks)
    assert set(named.end()) == {2} and holder in named.text("err")  # on all ranks

    other = Program([*flags, "--run_id", "", "--resume", "auto"], ranks)
    assert set(other.end()) == {0}, other.text("err")
    assert holder in other.text("out") and "a new one begins" in other.text("out")

    assert live.ranks[0].is_alive()
    Path("go").touch()
    assert set(live.end()) == {0}, live.text("err")
    first, second = sorted(tmp_path.glob("logs/*.jsonl"), key=lambda path: path.name == "it.jsonl")
    assert steps_of(first) == steps_of(second) == list(range(1, 10))
    assert "\nresumed at step" not in Path("logs/it.txt").read_text()

    out = console_of([*flags, "--resume", "auto"], tmp_path)
    assert "the run had finished: step 9 of 9 is saved" in out


@pytest.fixture
def stopped_runs(flags, tmp_path) -> list[str]:
    """Leave two runs unfinished, "old" and the newer "new", which has another seed; return the
    flags of both, without their seed."""
    flags = [*flags[: flags.index("--seed")], *flags[flags.index("--seed") + 2 :]]
    flags += ["--num_iterations", "9"]
    for name, seed in (("old", 1), ("new", 2)):
        words = [*flags, "--run_id", name, "--seed", seed]
        run = Program(words, work=functools.partial(stopped, number=15, step=4, delay=0))
        assert run.end() == [128 + 15]
    return flags[: flags.index("--run_id")] + flags[flags.index("--run_id") + 2 :]


def test_resume_auto_goes_on_with_the_run_that_is_asked_for(stopped_runs, flags, tmp_path):
    """Without a word of what is learned, that is the newest one; else the one with these settings;
    if there is none, a new one begins; a finished one is no such run."""
    machine = ["--device", "cpu", "--resume", "auto"]
    _, args = train_gpt.parse_args(machine, Run)
    assert Path(args.checkpoint).parent.name == "new"
    found = {}
    for seed in (1, 2, 3):
        _, args = train_gpt.parse_args([*stopped_runs, *machine, "--seed", str(seed)], Run)
        found[seed] = args.checkpoint and Path(args.checkpoint).parent.name
    assert found == {1: "old", 2: "new", 3: None}

    assert "resumed at step" in console_of(machine, tmp_path)
    assert steps_of(Path("logs/new.jsonl")) == list(range(1, 10))
    _, args = train_gpt.parse_args(machine, Run)
    assert Path(args.checkpoint).parent.name == "old"
    with pytest.raises(UserError, match=re.escape("seed 1 -> 3; --resume_force goes on")):
        train_gpt.parse_args([*machine, "--run_id", "old", "--seed", "3"], Run)
    hp, args = train_gpt.parse_args([*machine, "--resume_force", "--seed", "3"], Run)
    assert Path(args.checkpoint).parent.name == "old" and hp.seed == 3
    _, args = train_gpt.parse_args([*machine, "--record", "demo"], Run)
    assert args.checkpoint is None  # the demo's own settings are not those of either


def test_a_published_checkpoint_among_the_runs_is_none_of_them(tmp_path):
    Path("logs/it").mkdir(parents=True)
    torch.save({"step": 9, "code": "", "model": {}}, "logs/it/state_step000009.pt")
    _, args = train_gpt.parse_args(["--device", "cpu", "--resume", "auto"], Run)
    assert args.checkpoint is None


def test_a_run_that_fails_before_it_trains_is_unlocked(flags, monkeypatch):
    """So it may begin again in the same process, as a notebook's."""
    flags = [*flags, "--num_iterations", "1", "--save_every", "0", "--save_last", "off"]
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "warm_up", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            main(flags)
    main([*flags, "--resume", "auto"])
    assert error.tb is not None and steps_of(Path("logs/it.jsonl")) == [1]


def test_a_finished_run_s_weights_are_saved_unless_off_and_cannot_train_on(flags, tmp_path):
    flags = [*flags, "--num_iterations", "2", "--save_every", "0"]
    console_of([*flags, "--run_id", "none", "--save_last", "off"], tmp_path)
    assert not Path("logs/none").exists()
    words = [*flags, "--run_id", "way", "--save_last", "off", "--save_every", "1"]
    console_of(words, tmp_path)
    assert "the run had finished" in console_of([*words, "--resume", "auto"], tmp_path)
    console_of(flags, tmp_path)
    path = "logs/it/state_step000002.pt"
    saved = load_checkpoint(path, Run)
    assert saved["optimizers"] == {} and saved["step"] == 2
    words = ["--resume", path, "--num_iterations", "3", "--resume_force", "--device", "cpu"]
    with pytest.raises(
        UserError, match="of a finished run, which holds weights only; name an earlier"
    ):
        train_gpt.parse_args(words, Run)


def holding(words: list[str], seconds: float) -> None:
    """Hold the run that is named."""
    with train_gpt.lock_run(*words):
        print("held", flush=True)
        time.sleep(seconds)


def test_a_restart_waits_for_the_processes_before(tmp_path, monkeypatch):
    holder = Program(["it"], work=functools.partial(holding, seconds=2.5))
    holder.wait_for("held")
    with pytest.raises(UserError, match=f"the run it goes on in process {holder.ranks[0].pid}"):
        train_gpt.lock_run("it")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train_gpt.lock_run("it").close()
    assert holder.end() == [0]


def test_where_files_cannot_be_locked_a_note_is_all(tmp_path, monkeypatch, capsys):
    """So it is on some disks of clusters."""

    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(train_gpt.fcntl, "flock", flock)
    train_gpt.lock_run("it").close()
    said = "note: logs/it.lock cannot be locked (No locks available): start no run twice"
    assert capsys.readouterr().out == f"{said}\n"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    Path("logs").write_text("a file, where a folder is wanted")
    with pytest.raises(UserError, match=f"cannot write logs/it.lock in {tmp_path}: "):
        train_gpt.lock_run("it")


def test_another_script_s_run_is_not_joined(flags, tmp_path, capsys):
    """A fork may have the same settings and another model. To evaluate one that is named, a note is
    all."""
    flags = [*flags, "--num_iterations", "3", "--save_every", "2", "--keep", "9"]
    console_of(flags, tmp_path)
    Path("logs/it/state_step000003.pt").unlink()
    path = Path("logs/it/state_step000002.pt")
    torch.save(torch.load(path, weights_only=True) | {"script": "my_fork.py"}, path)
    machine = ["--device", "cpu"]
    _, args = train_gpt.parse_args([*machine, "--resume", "auto"], Run)
    assert args.checkpoint is None
    for words in (["--eval", "auto"], ["--resume", "auto", "--run_id", "it"]):
        with pytest.raises(UserError, match="no intact checkpoint of train_gpt.py is among 1"):
            train_gpt.parse_args([*machine, *words], Run)
    with pytest.raises(
        UserError, match="script my_fork.py -> train_gpt.py; --resume_force goes on"
    ):
        train_gpt.parse_args([*machine, "--resume", str(path)], Run)
    capsys.readouterr()
    train_gpt.parse_args([*machine, "--eval", str(path)], Run)
    assert f"note: {path} is of my_fork.py; train_gpt.py evaluates it" in capsys.readouterr().out
