"""Bad input ends with a status, one line that helps, and no half-written file, on all ranks."""

import contextlib
import math
import os
import resource
import shlex
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from conftest import language, shard
from runs import Program, before_step, console_of, error_of, wait_at_most

import train_gpt
from train_gpt import UserError, main

# Flags that are added to those of a run that works, the status, and words of the message. Files
# are those of `folder`. tests/slow has some of each kind in processes and under torchrun.
FLAGS = [
    ("--no_such_flag 1", 2, "unrecognized arguments: --no_such_flag 1"),
    ("--num_iter 3", 2, "unrecognized arguments: --num_iter 3; did you mean --num_iterations?"),
    ("--muon_rl=0.0325", 2, "arguments: --muon_rl=0.0325; did you mean --muon_lr?"),
    ("--muon_lr", 2, "argument --muon_lr: expected one argument"),
    ("--muon_lr fast", 2, "argument --muon_lr: invalid float value: 'fast'"),
    ("--fp8 maybe", 2, "argument --fp8: maybe is neither on nor off"),
    ("--record 2023", 2, "there is no record 2023: did you mean 2024-11-19_FlexAttention or"),
    ("--record Demo", 2, "there is no record Demo: did you mean demo?"),
    ("--record 2024", 2, "did you mean 2024-11-19_FlexAttention or 2024-11-24_WindowWarmup?"),
    ("--record 2026-03", 2, "record 2026-03 is in forks/train_gpt_2026.py: ./run.sh forks/train_"),
    ("--record muon", 2, "record muon is in forks/train_gpt_track3.py: ./run.sh forks/train_gpt_"),
    ("--seq_len 100", 2, "--seq_len 100: must be at least 128, a multiple of 128"),
    ("--val_seq_len 64", 2, "--val_seq_len 64: must be at least 128, a multiple of 128"),
    ("--val_tokens 300", 2, "--val_tokens 300: must be a multiple of val_seq_len"),
    ("--num_iterations 0", 2, "--num_iterations 0: must be at least 1"),
    ("--muon_lr nan", 2, "--muon_lr nan: must be at least 0"),
    ("--adam_betas 0.9 1.5", 2, "--adam_betas 0.9 1.5: must be from 0 to 0.9999"),
    (f"--seed {'9' * 30}", 2, f"--seed {'9' * 30}: must be from 0 to {2**63 - 1}"),
    ("--x_s 0", 2, "--x_s 0: must be at least 1e-06"),
    ("--logit_softcap 80", 2, "--logit_softcap 80: must be from 0.001 to 38"),
    ("--num_layers 3", 2, "--num_layers 3: must be even, and at most the 12 rows of --layers"),
    ("--num_layers 14", 2, "--num_layers 14: must be even, and at most the 12 rows of --layers"),
    ("--layers foo", 2, "--layers: 'foo' is not a layer; a row is long, short or"),
    ("--layers long,none+v0,long,long", 2, "--layers: 'none+v0' is not a layer; a row is long,"),
    ("--layers long,long,long", 2, "--num_layers 4: must be even, and at most the 3 rows"),
    ("--device cuda", 1, "process 0 finds 0 GPUs on its machine: use --device cpu"),
    ("--kernels on", 1, "--kernels on: Triton wants a CUDA GPU"),
    ("--seq_len 17408 --batch_seqs 1", 1, "a sequence of 17408 tokens needs a GPU; try --record"),
]
SHARDS = [
    ("--train_files none*.bin", 1, "no shard matches none*.bin"),
    ("--train_files magic.bin", 1, "magic.bin is not an intact token shard: its 1040 bytes begin "),
    ("--train_files version.bin", 1, "its 1040 bytes begin with [20240520, 7, 8], expected [20"),
    ("--train_files size.bin", 1, "begin with [20240520, 1, 9], expected [20240520, 1, 8]"),
    ("--train_files .", 1, "Is a directory: '.'"),
    ("--train_files high.bin", 1, "high.bin: token 512 at position 7 is outside the vocabulary"),
    ("--val_files high.bin", 1, "high.bin: token 512 at position 7 is outside the vocabulary"),
    # The last 47 of 50304 rows are padding.
    (
        "--train_files padding.bin --vocab_size 50304",
        1,
        "padding.bin: token 50257 at position 7 is",
    ),
    ("--seq_len 8192", 1, "a shard has at most 30000 tokens, a batch needs 65537"),
    ("--val_tokens 262144", 1, "a shard has at most 10001 tokens, a batch needs 262145"),
    ("--epochs 1 --num_iterations 30", 1, "holds 29 batches, the run reads 30"),
]
CHECKPOINTS = [
    ("--eval it.pt --model_dim 32", 1, "the checkpoint has other hyperparameters: Error(s) in"),
    ("--resume it.pt --num_iterations 1 --seed 2", 2, "other hyperparameters: seed 1 -> 2"),
    ("--eval half.pt", 2, "half.pt is not an intact checkpoint of this program"),
    ("--eval empty.pt", 2, "empty.pt is not an intact checkpoint of this program"),
    ("--eval train_1.bin", 2, "train_1.bin is not an intact checkpoint of this program"),
    ("--eval none.pt", 2, "there is no checkpoint none.pt: name a file, or auto for the newest"),
    ("--eval auto", 2, "no checkpoint under logs/: train a model first, or name one"),
    ("--resume weights.pt", 2, "--resume weights.pt: the file has only weights, for --eval"),
    ("--eval ''", 2, "there is no checkpoint : name a file"),  # a shell's variable that is not set
    ("--resume ''", 2, "there is no checkpoint : name a file"),
    ("--eval 2024.pt", 1, "is a published one of 2024, with separate q, k and v: not supported"),
]
RUNNING = [("--embed_lr 1e38", 1, "the loss is nan at step 2: try lower learning rates, or")]
TABLE = [*FLAGS, *SHARDS, *CHECKPOINTS, *RUNNING]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> tuple[Path, list[str]]:
    """Make the files that the table names; return their folder and the flags of a run that works
    there."""
    folder = tmp_path_factory.mktemp("bad")
    flags = [*language(folder), "--val_loss_every", "0"]
    console_of([*flags, "--num_iterations", "1", "--save_every", "1", "--run_id", "it"], folder)
    (folder / "logs/it/state_step000001.pt").rename(folder / "it.pt")
    shutil.rmtree(folder / "logs")
    whole = (folder / "it.pt").read_bytes()
    (folder / "half.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.pt").write_bytes(b"")
    headers = {"magic": {"magic": 1}, "version": {"version": 7}, "size": {"count": 9}}
    for name, header in headers.items():
        shard(folder / f"{name}.bin", range(8), **header)
    for name, token in (("high", 512), ("padding", 50257)):
        shard(folder / f"{name}.bin", [1] * 7 + [token] + [1] * 2000)
    model = torch.load(folder / "it.pt", weights_only=True)["model"]
    names = "transformer.wte.weight", "transformer.h.0.attn.c_q.weight", "lm_head.weight"
    of_2024 = {f"_orig_mod.{name}": torch.zeros(2, 2) for name in names}
    for name, weights in (("weights", model), ("2024", of_2024)):
        state = {"step": 9, "code": "", "model": weights, "optimizers": [{}, {}]}
        torch.save(state, folder / f"{name}.pt")
    return folder, flags


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("words", "status", "message"), TABLE)
def test_bad_input_ends_with_one_line(words, status, message, folder, capsys, monkeypatch):
    """It writes nothing but the log of a run that had begun."""
    if words == "--device cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    folder, flags = folder
    monkeypatch.chdir(folder)
    before = files(folder)
    found, err = error_of([*flags, *shlex.split(words), "--save_every", "4"], capsys)
    assert found == status and message in err and err.startswith("train_gpt.py: error: ")
    new = files(folder) - before
    assert {Path(name).suffix for name in new} in (set(), {".txt", ".jsonl", ".lock"})
    for name in new:
        (folder / name).unlink()


def test_more_processes_than_gpus_is_a_sentence(flags, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    status, err = error_of([*flags, "--device", "cuda"], capsys)
    assert status == 1
    assert "process 2 finds 2 GPUs on its machine: start 2 processes per node" in err


# ---- in a run


def test_a_diverged_run_saves_nothing_and_keeps_what_it_had(flags, tmp_path, capsys, monkeypatch):
    """The step that breaks the weights is not saved."""
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
    assert "the last checkpoint is logs/it/state_step000002.pt" in err
    saved = sorted(tmp_path.glob("logs/*/*"))
    assert [p.name for p in saved] == ["state_step000001.pt", "state_step000002.pt"]
    for path in saved:
        weights = train_gpt.load_checkpoint(path, train_gpt.Run)["model"].values()
        assert all(tensor.isfinite().all() for tensor in weights)


def on_a_small_disk(words: list[str]) -> None:
    """Run main, which cannot write files of more than 300 kB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
    main(words)


def test_a_full_disk_while_saving_leaves_no_half_written_file(flags, tmp_path):
    program = Program([*flags, "--save_every", "2", "--run_id", "it"], work=on_a_small_disk)
    assert program.end() == [1]
    err = program.text("err")
    assert err.count("\n") == 1
    assert "could not save logs/it/state_step000002.pt: is the disk full?" in err
    assert not list(tmp_path.glob("logs/*/*"))


# ---- on several ranks


@pytest.mark.parametrize(
    ("words", "ranks", "status", "message"),
    [
        ("--batch_seqs 4", 3, 1, "3 ranks cannot share 4 sequences: use a divisor"),
        ("--seq_len 5", 2, 2, "--seq_len 5: must be at least 128, a multiple of 128"),
        ("--embed_lr 1e38", 2, 1, "the loss is nan at step 2"),
    ],
)
def test_an_error_of_all_ranks_is_printed_once(words, ranks, status, message, flags):
    program = Program([*flags, *words.split()], ranks)
    assert program.fail() == [status] + [-signal.SIGTERM] * (ranks - 1)
    printed = "".join(program.text("err", rank) for rank in range(ranks))
    assert printed.count("\n") == 1 and message in printed
    assert not any(program.text("out", rank) for rank in range(1, ranks))


def failing(words: list[str]) -> None:
    """Run main with an error in the third step of rank 1, which waits only a second for others."""

    def fail():
        raise UserError("only here")

    if os.environ["RANK"] == "1":
        wait_at_most(1)
        before_step(3, fail)
    main(words)


def test_an_error_of_one_rank_stops_all_and_is_the_one_that_is_printed(flags):
    """Rank 0, which has lost rank 1, waits for longer than that: torchrun ends it meanwhile."""
    program = Program([*flags, "--num_iterations", "9"], 2, failing)
    assert program.fail() == [-signal.SIGTERM, 1]
    assert program.text("err", 1) == "train_gpt.py: error: only here\n" and not program.text("err")


def test_rank_0_reports_at_once_and_others_wait(monkeypatch, capsys):
    """They wait for 10 seconds and more, because torchrun ends them before. A rank that has lost
    another one waits, too."""
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    lost = RuntimeError("Connection closed by peer: gloo")

    def report(error: BaseException, rank: int) -> tuple[int, str]:
        monkeypatch.setenv("RANK", str(rank))

        def work(parsed):
            raise error

        with pytest.raises(SystemExit) as stop, contextlib.redirect_stdout(None):
            train_gpt.as_program("it.py", parse=lambda: None, work=work)
        return stop.value.code, capsys.readouterr().err

    assert report(UserError("mine"), 0) == report(UserError("mine"), 3)
    assert report(UserError("mine"), 0) == (1, "it.py: error: mine\n")
    for rank in (0, 3):
        status, err = report(lost, rank)
        assert status == 1 and err.startswith("it.py: error: another rank has stopped or hangs: ")
    assert waited == [0, 10.75, 0, 5, 10.75]
    assert report(KeyboardInterrupt(), 0) == (130, "\nit.py: interrupted\n")


def killed(words: list[str]) -> None:
    """Run main; rank 1 is killed in its third step."""
    wait_at_most(0.1)
    if os.environ["RANK"] == "1":
        before_step(3, lambda: os.kill(os.getpid(), signal.SIGKILL))
    main(words)


def test_a_rank_that_is_killed_stops_the_others(flags):
    program = Program([*flags, "--num_iterations", "9"], 2, killed)
    assert program.end() == [1, -signal.SIGKILL]
    assert "train_gpt.py: error: another rank has stopped or hangs" in program.text("err")
