"""Bad input ends with a status, one line that helps, and no half-written file, on all ranks."""

import functools
import json
import math
import os
import re
import resource
import shlex
import signal
from pathlib import Path

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
    val_losses,
    wait_at_most,
)
from train_gpt import UserError, main

# Flags added to those of a run that works, and words of the message.
TABLE = [
    ("--num_iter 3", "unknown words: --num_iter 3; is it --num_iterations? --help lists the flags"),
    ("--frobnicate 3", "unknown words: --frobnicate 3; --help lists the flags"),
    ("--muon_lr fast", "argument --muon_lr: invalid float value: 'fast'"),
    ("--record 2024", "be one of 2024-11-19_FlexAttention, 2024-11-24_WindowWarmup"),
    ("--record 2025-01-27", "--record 2025-01-27: must be one of 2025-01-26_BatchSize"),
    ("--record x", "one of 2024-11-19_FlexAttention, 2024-11-24_WindowWarmup, 2025-01-26_Ba"),
    ("--record 2026-07-17", "--record 2026-07-17: forks/train_gpt_2026_07.py has it"),
    ("--num_iterations 99999999999", "99999999999 steps, matrices of 32768 numbers: far too many"),
    ("--model_dim 1000000", "matrices of 4000000000000 numbers: far too many"),
    ("--batch_seqs 99999999999", "has 0 batches of 99999999999 x 128 tokens"),
    ("--device mps", "invalid choice: 'mps' (choose from"),
    ("--seq_len 100", "--seq_len 100: must be a positive multiple of 128"),
    ("--val_tokens 300", "--val_tokens 300: must be a positive multiple of 256"),
    ("--adam_betas 0.9 inf", "--adam_betas 0.9 inf: must be finite and not negative"),
    ("--num_layers 14", "--num_layers 14: must be even, and at most 12"),
    ("--device cuda", "process 0 finds 0 GPUs: start fewer, or --device cpu"),
    ("--seq_len 17408 --batch_seqs 1", "17408 tokens need a GPU and --compile on: try --record"),
    ("--run_id " + "a" * 300, "logs/aaaa"),
    ("--run_id ..", "--run_id ..: must be a plain name"),
    ("--run_id a/b", "--run_id a/b: must be a plain name"),
    ("--run_id results", "--run_id results: must be a plain name"),
    ("--run_id a.txt", "--run_id a.txt: must be a plain name"),
    ("--seed 9999999999999999999", "--seed 9999999999999999999: must be finite"),
    ("--run_id taken", "File exists: 'logs/taken'"),
    ("--train_files none*.bin", "no shard matches none*.bin"),
    ("--train_files magic.bin", "magic.bin is no shard: its 1040 bytes begin "),
    ("--train_files uint32.bin", "begin with [20240801, 7, 500], not [20240520, 1, 1000]; fetch"),
    ("--train_files high.bin", "high.bin: token 512 at position 7 is outside the vocabulary"),
    ("--val_files high.bin", "high.bin: token 512 at position 7 is outside the vocabulary"),
    ("--epochs 1 --num_iterations 30", "has 29 batches of 8 x 128 tokens, the run reads 30: add"),
    ("--resume on", "--resume on: say which run with --run_id NAME"),
    ("--resume on --run_id it --seed 2", "saved by train_gpt.py without this: train_gpt.py"),
    ("--init_from logs/it/state_step000001.pt --model_dim 32", "is not one of this model: "),
    ("--init_from nothing.pt", "No such file or directory: 'nothing.pt'"),
    ("--init_from train_1.bin", "train_1.bin is not an intact checkpoint"),
    ("--embed_lr 1e38", "the loss is nan at step 2: try lower rates, smaller"),
    ("--init_bound 1e38", "the loss is nan at step 1: try lower rates, smaller"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, list[str]]:
    """Make the files that the table names; return their folder and the flags of a run that works
    there."""
    folder = tmp_path_factory.mktemp("bad")
    flags = [*language(folder), "--val_loss_every", "0"]
    console_of([*flags, "--num_iterations", "1", "--run_id", "it"], folder)
    (folder / "logs/taken").touch()
    shard(folder / "magic.bin", range(8), magic=1)
    shard(folder / "uint32.bin", range(1000), magic=20240801, version=7, count=500)  # llm.c's
    shard(folder / "high.bin", [1] * 7 + [512] + [1] * 2100)
    return folder, flags


@pytest.mark.parametrize(("words", "message"), TABLE)
def test_bad_input_ends_with_one_line(words, message, folder, capsys, monkeypatch):
    """It writes nothing but the log of a run that had begun."""
    if words == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    folder, flags = folder
    monkeypatch.chdir(folder)
    before = files_here()
    status, err = error_of([*flags, *shlex.split(words), "--save_every", "4"], capsys)
    assert status == 1 and message in err and err.startswith("train_gpt.py: error: ")
    new = files_here() - before
    assert {Path(name).suffix for name in new} in (set(), {".txt", ".jsonl"})
    for name in new:
        if name.endswith(".jsonl"):
            lines = Path(name).read_text().splitlines()
            rows = [json.loads(line, parse_constant=pytest.fail) for line in lines]
            if "loss is nan" in message:
                assert rows[-1].get("train_loss", rows[-1].get("val_loss")) is None
        Path(name).unlink()


def test_a_diverged_run_saves_nothing_and_keeps_what_it_had(flags, tmp_path, capsys, monkeypatch):
    step_of = train_gpt.train_step

    def breaking(model, optimizers, inputs, targets, now, **options):
        loss = step_of(model, optimizers, inputs, targets, now, **options)
        if now.step == 2:
            model.embed.weight.data[0, 0] = math.nan
        return loss

    monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    monkeypatch.setattr(train_gpt, "train_step", breaking)
    words = ["--save_every", "1", "--val_loss_every", "0", "--run_id", "it"]
    status, err = error_of([*flags, *words], capsys)
    assert status == 1 and "a weight is not finite after step 3" in err
    saved = sorted(tmp_path.glob("logs/*/*"))
    assert [p.name for p in saved] == ["state_step000001.pt", "state_step000002.pt"]
    for tensor in outcome(tmp_path, 2).tensors.values():
        assert tensor.isfinite().all()


def on_a_small_disk(words: list[str], size: int) -> None:
    """Run main, which cannot write longer files."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    main(words)


def on_a_disk_that_fills(words: list[str]) -> None:
    """Run main; before a step, the disk has room for 20 more bytes of the log."""

    def fill() -> None:
        size = os.path.getsize("logs/it.txt") + 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    before_step(2, fill)
    main(words)


IN_THE_HEADER = functools.partial(on_a_small_disk, size=50_000)


@pytest.mark.parametrize("work", [IN_THE_HEADER, on_a_disk_that_fills])
def test_a_log_that_a_full_disk_has_cut_is_whole_when_the_run_goes_on(work, flags, tmp_path):
    words = [*flags, "--save_every", "1", "--run_id", "it", "--resume", "on"]
    program = Program(words, work=work)
    assert program.end() == [1]
    message = "train_gpt.py: error: could not write logs/it.txt: File too large"
    assert message in program.text("err") and "Traceback" not in program.text("err")
    out = console_of(words, tmp_path)
    assert ("resumed at step 2" in out) == (work is not IN_THE_HEADER)
    found = read_log(Path("logs/it.txt"))
    assert found.loss == val_losses(out)[4] and found.source == Path(SCRIPT).read_text().strip()


def test_a_full_disk_while_saving_leaves_no_half_written_file(flags, tmp_path):
    work = functools.partial(on_a_small_disk, size=300_000)
    program = Program([*flags, "--save_every", "2", "--run_id", "it"], work=work)
    assert program.end() == [1]
    err = program.text("err")
    assert err.count("\n") == 1
    assert "could not save logs/it/state_step000002.pt: is the disk full?" in err
    assert not list(tmp_path.glob("logs/*/*"))


@pytest.mark.parametrize(
    ("words", "ranks", "message"),
    [
        ("--batch_seqs 4", 3, "3 ranks cannot share --batch_seqs 4 evenly"),
        ("--embed_lr 1e38", 2, "the loss is nan at step 2"),
    ],
)
def test_an_error_of_all_ranks_is_printed_once(words, ranks, message, flags):
    program = Program([*flags, *words.split()], ranks)
    assert program.fail() == [1] + [-signal.SIGTERM] * (ranks - 1)
    printed = "".join(program.text("err", rank) for rank in range(ranks))
    (line,) = re.findall("^train_gpt.py: .*", printed, re.M)  # gloo may also print a line
    assert message in line
    assert not any(program.text("out", rank) for rank in range(1, ranks))


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
