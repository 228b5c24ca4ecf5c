"""Bad input ends with a status, one line that helps, and no half-written file, on all ranks."""

import errno
import functools
import math
import os
import re
import resource
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

import train_gpt
from conftest import files_here, language, shard
from logfile import read_log
from runs import (
    SCRIPT,
    Program,
    before_step,
    console_of,
    error_of,
    outcome,
    run,
    val_losses,
    wait_at_most,
)
from train_gpt import UserError, main

# Flags added to those of a run that works, and words of the message.
TABLE = [
    ("--num_iter 3", "unknown words: --num_iter 3; is it --num_iterations? --help lists the flags"),
    ("--iterations=3 --lr 1", "words: --iterations=3 --lr 1; is it --num_iterations? --help"),
    ("--beta 1 --lr", "unknown words: --beta 1 --lr; --help lists the flags"),
    ("--lr 0.1", "--lr 0.1; is it --lr_final or --embed_lr or --head_lr or --scalar_lr or --muon"),
    ("--record", "--record : must be one of 2024-11-19_FlexAttention, 2024-"),
    ("--muon_lr fast", "argument --muon_lr: invalid float value: 'fast'"),
    ("--record 2024", "be one of 2024-11-19_FlexAttention, 2024-11-24_WindowWarmup"),
    ("--seq_len 100", "--seq_len 100: must be a positive multiple of 128"),
    ("--device cuda", "--device cuda: torch finds no GPU, ./run.sh setup says why"),
    ("--seq_len 17408 --batch_seqs 1", "17408 tokens need a GPU and --compile on: try --record"),
    ("--run_id a/b", "--run_id a/b: must be a plain name"),
    ("--vocab_size 50257", "--vocab_size 50257 contradicts --end_of_text 511: all of GPT-2's"),
    ("--vocab_size 300 --end_of_text 299", "is outside the vocabulary of 300: all of GPT-2's"),
    ("--tokenizer no.json", "--tokenizer no.json: must be gpt2, none, or a tokenizer.json"),
    ("--train_files .", "Is a directory: '.'"),
    ("--run_id taken", "File exists: 'logs/taken'"),
    ("--train_files none*.bin", "no shard matches none*.bin: "),
    ("--train_files train_1.bin val_0.bin", "val_0.bin; a pattern must be quoted, as '*.bin'"),
    ("--train_files nanogpt.bin", "nanogpt.bin is not a whole shard: "),
    ("--train_files uint32.bin", "begin with [20240801, 7, 500], not [20240520, 1, 1000]: "),
    ("--train_files high.bin", "high.bin: token 512 at position 7 is outside the vocabulary"),
    ("--val_files high.bin", "high.bin: token 512 at position 7 is outside the vocabulary"),
    ("--epochs 1 --num_iterations 60", "batches of 4 x 128 tokens, but the run needs 60: add"),
    ("--resume on", "--resume on: say which run with --run_id NAME"),
    ("--resume on --run_id it --seed 2", "and this is train_gpt.py "),
    ("--init_from logs/it/state_step000001.pt --model_dim 32", "is not one of this model: "),
    ("--init_from train_1.bin", "train_1.bin is not an intact checkpoint"),
    ("--resume on --run_id it --num_iterations 9", ".pt begins a new run from its weights"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, list[str]]:
    """Make the files that the table names; return their folder and the flags of a run that works
    there."""
    folder = tmp_path_factory.mktemp("bad")
    flags = [*language(folder), "--val_loss_every", "0"]
    console_of([*flags, "--num_iterations", "1", "--run_id", "it"], folder)
    (folder / "logs/taken").touch()
    (folder / "nanogpt.bin").write_bytes(bytes(4000))
    shard(folder / "uint32.bin", range(1000), magic=20240801, version=7, count=500)  # llm.c's
    shard(folder / "high.bin", [1] * 7 + [512] + [1] * 2100)
    return folder, flags


@pytest.mark.parametrize(("words", "message"), TABLE)
def test_bad_input_ends_with_one_line(words, message, folder, capsys, monkeypatch):
    """It writes nothing, but the log of a run that had begun."""
    if words == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    folder, flags = folder
    monkeypatch.chdir(folder)
    before = files_here()
    status, err = error_of([*flags, *shlex.split(words), "--save_every", "4"], capsys)
    assert status == 1 and message in err and err.startswith("train_gpt.py: error: ")
    new = files_here() - before
    has_begun = "--seq_len 17408" in words
    assert {Path(name).suffix for name in new} == ({".txt", ".jsonl"} if has_begun else set())
    for name in new:
        Path(name).unlink()


def test_a_diverged_run_saves_nothing_and_keeps_what_it_had(flags, tmp_path, capsys, monkeypatch):
    step_of = train_gpt.train_step

    def breaking(model, optimizers, inputs, targets, now, **options):
        loss = step_of(model, optimizers, inputs, targets, now, **options)
        if now.step == 2:
            model.embed.weight.data[0, 0] = math.nan
        return loss

    monkeypatch.setattr(train_gpt.Run, "warm_up", lambda *arguments: None)
    monkeypatch.setattr(train_gpt, "train_step", breaking)
    words = ["--save_every", "1", "--val_loss_every", "0", "--run_id", "it"]
    status, err = error_of([*flags, *words], capsys)
    assert status == 1 and "a weight is not finite after step 3" in err
    saved = sorted(tmp_path.glob("logs/*/*"))
    assert [p.name for p in saved] == ["state_step000001.pt", "state_step000002.pt"]
    for tensor in outcome(tmp_path, 2).tensors.values():
        assert tensor.isfinite().all()


def acting(words: list[str], actions: dict) -> None:
    """Run main; before steps of these numbers, something happens."""
    for number, action in actions.items():
        before_step(number, action)
    main(words)


def on_a_small_disk(words: list[str], size: int) -> None:
    """Run main, which cannot write longer files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    main(words)


def fill_the_disk() -> None:
    """Leave room for 20 more bytes of the log."""
    size = os.path.getsize("logs/it.txt") + 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def empty_the_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [([5.0, 5.1], False), ([5.0, 6.239], True), ([6.238], False), ([6.3], True)],
)
def test_a_run_that_ends_above_the_loss_of_a_uniform_guess_says_so(
    losses, diverged, flags, tmp_path, monkeypatch
):
    """It is 6.2383 for 512 tokens. The first loss is validated, or not."""
    monkeypatch.setattr(train_gpt, "evaluate", lambda *arguments: losses.pop(0))
    every = len(losses) - 1  # one more is the warm-up's
    losses = [9.0, *losses]
    out = console_of([*flags, "--val_loss_every", str(4 * (every > 0))], tmp_path)
    assert ("\nthe run has diverged: its last loss is above " in out) == diverged


@pytest.mark.parametrize("last", [3, 9])
def test_a_full_disk_costs_lines_of_the_log_and_no_run(last, flags, tmp_path):
    """At the end it has room again, or not; then the checkpoint is not there either."""
    words = [*flags, "--num_iterations", "5", "--val_loss_every", "0", "--run_id", "it"]
    actions = {2: fill_the_disk, last: empty_the_disk}
    program = Program(words, work=functools.partial(acting, actions=actions))
    assert program.end() == [int(last == 9)] and "Traceback" not in program.text("err")
    out = program.text("out")
    assert out.count("could not write logs/it.txt, the run continues: File too large") == 1
    if last == 3:
        found = read_log(Path("logs/it.txt"))
        assert found.loss == val_losses(out)[5] and found.source == Path(SCRIPT).read_text().strip()


ENVIRONMENTS = {
    "SLURM_PROCID=1 SLURM_NTASKS=2": "each task of srun or mpirun would train alone",
    "SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=2": "each task of srun or mpirun would train alone",
    "OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0": "each task of srun or mpirun would train",
    "PMI_SIZE=2 PMI_RANK=0": "each task of srun or mpirun would train",
}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_ranks_that_torchrun_has_not_made_are_refused(environment, flags, capsys, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for pair in environment.split():
        monkeypatch.setenv(*pair.split("="))
    assert ENVIRONMENTS[environment] in error_of(flags, capsys)[1]


def test_a_run_of_a_notebook_is_asked_for_a_file(flags, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cell", ModuleType("cell"))
    run = type("Run", (train_gpt.Run,), {"__module__": "cell"})
    status, err = error_of(flags, capsys, functools.partial(main, run=run))
    assert status == 1 and err.startswith("notebook: error: save the class Run as a script")


def test_a_rank_without_others_is_none(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert len(val_losses(console_of(flags, tmp_path))) == 3


IN_VAIN = {
    "t.get_learning_rate = 0; t.main(run=Run)": "get_learning_rate: nothing reads this assignment; "
    "is it get_lr?",
    "t.LAYERS_2025 = 'long'; t.main(run=Run)": "LAYERS_2025: nothing reads this assignment; set it",
    "t.main()": "my_fork.py has a class Run, which must be given: main(run=Run)",
}


@pytest.mark.parametrize("line", IN_VAIN)
def test_what_a_fork_says_in_vain_is_named(line, flags, tmp_path):
    message = IN_VAIN[line]
    Path("my_fork.py").write_text(f"import train_gpt as t\nclass Run(t.Run): ...\n{line}\n")
    done = run(flags, script=tmp_path / "my_fork.py")
    assert done.returncode == 1 and message in done.stderr and not Path("logs").exists()


@pytest.mark.parametrize("name", ["it.txt", "it.jsonl", "it/state_step000008.pt"])
def test_files_of_another_run_stay_as_they_are(name, flags, tmp_path, capsys):
    file = tmp_path / "logs" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    status, err = error_of([*flags, "--run_id", "it"], capsys)
    assert f"logs/{name} exists: choose another --run_id, or --resume on" in err
    assert file.read_text() == "mine"
    assert {*tmp_path.glob("logs/**/it.*")} <= {file}


def test_only_checkpoints_of_a_run_are_removed(flags, tmp_path):
    """Neither copies that a user made, nor files beside them."""
    flags += ["--run_id", "it", "--save_every", "1", "--keep", "1"]
    folder = tmp_path / "logs/it"
    folder.mkdir(parents=True)
    theirs = ["_good.pt", "000009.pt.bak", "000009.pt.sha256", "000001.pt.0of2.old", "1.pt"]
    theirs = [f"state_step{name}" for name in theirs]
    for name in (*theirs, "state_step000001.pt.0of2"):
        (folder / name).touch()
    console_of(flags, tmp_path)
    assert {path.name for path in folder.iterdir()} == {*theirs, "state_step000004.pt"}


def test_a_file_system_without_locks_is_said_and_a_thread_may_train(flags, tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(train_gpt.fcntl, "flock", refuse)
    out = console_of([*flags, "--run_id", "it"], tmp_path)
    expected = val_losses(out)
    assert "logs/it.txt cannot be locked (Function not implemented)" in out
    found = []
    thread = threading.Thread(target=lambda: found.append(console_of(flags, tmp_path)))
    thread.start()
    thread.join()
    assert val_losses(found[0]) == expected


def test_a_full_disk_while_saving_leaves_no_half_written_file(flags, tmp_path, monkeypatch):
    work = functools.partial(on_a_small_disk, size=300_000)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = Program([*flags, "--save_every", "2", "--run_id", "it"], work=work)
    assert program.end() == [1]
    err = program.text("err")
    assert err.count("\n") == 1 and not list(tmp_path.glob("it_*"))
    assert "could not save logs/it/state_step000002.pt: [Errno 27] File too large" in err
    assert not list(tmp_path.glob("logs/*/*"))


def test_an_error_of_all_ranks_is_printed_once(flags):
    program = Program([*flags, "--batch_seqs", "4"], 3)
    assert program.fail() == [1] + [-signal.SIGTERM] * 2
    printed = "".join(program.text("err", rank) for rank in range(3))
    (line,) = re.findall("^train_gpt.py: .*", printed, re.M)  # gloo may also print a line
    assert "3 ranks cannot share --batch_seqs 4 evenly" in line
    assert not program.text("out", 1) and not program.text("out", 2)


def only_here() -> None:
    raise UserError("only here")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def failing(words: list[str], fail) -> None:
    """Run main; rank 1 fails in its third step. Who fails waits a second for others, not ten."""
    if os.environ["RANK"] == "1":
        before_step(2, fail)
    if os.environ["RANK"] == "1" or fail is killed:
        wait_at_most(1)
    main(words)


def test_an_error_of_one_rank_stops_all_and_is_the_one_that_is_printed(flags):
    program = Program(flags, 2, functools.partial(failing, fail=only_here))
    assert program.fail() == [-signal.SIGTERM, 1]
    assert program.text("err", 1) == "train_gpt.py: error: only here\n"
    assert "error" not in program.text("err")  # only, perhaps, that it stops


def test_a_rank_that_is_killed_stops_the_others(flags):
    program = Program(flags, 2, functools.partial(failing, fail=killed))
    assert program.end() == [1, -signal.SIGKILL]
    assert "train_gpt.py: error: another rank has stopped or hangs" in program.text("err")


def lose_folder(place: str) -> None:
    shutil.rmtree("logs/it")
    if place == "a file":
        Path("logs/it").touch()


@pytest.mark.parametrize("place", ["nothing", "a file"])
def test_a_run_that_loses_its_folder_saves_its_weights(place, flags, tmp_path, monkeypatch):
    """In the folder, which is made again, or in another place, from which the run goes on."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    flags += ["--num_iterations", "5", "--save_every", "3", "--run_id", "it", "--keep", "9"]
    console_of([*flags, "--run_id", "whole"], tmp_path)
    lose = functools.partial(lose_folder, place)
    program = Program(flags, work=functools.partial(acting, actions={2: lose}))
    assert program.end() == [int(place == "a file")], program.text("err")
    if place == "a file":
        said = r"\[Errno 17\] File exists: 'logs/it'; it is (\S+): move it to (\S+), and"
        here, there = re.search(said, program.text("err")).groups()
        Path("logs/it").unlink()
        Path("logs/it").mkdir()
        shutil.move(here, there)
        assert "resumed at step 3" in console_of([*flags, "--resume", "on"], tmp_path)
    weights, expected = (
        train_gpt.load_checkpoint(f"logs/{run}/state_step000005.pt", train_gpt.Run)["model"]
        for run in ("it", "whole")
    )
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def test_rescued_checkpoints_of_two_runs_of_one_name_are_both_there(flags, tmp_path, monkeypatch):
    """As of two projects that share TMPDIR."""
    monkeypatch.setattr(train_gpt.tempfile, "tempdir", str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    Path("logs").touch()
    for step in (1, 2):
        with pytest.raises(UserError, match="move it to logs/it/state_step000003.pt"):
            train_gpt.save_checkpoint(Path("logs/it/state_step000003.pt"), {"step": step}, 1)
    assert {torch.load(path)["step"] for path in Path("shared").iterdir()} == {1, 2}
