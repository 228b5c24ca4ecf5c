"""Of each script, a run that goes on ends with the same bits, and ranks compute what one does."""

import contextlib
import functools
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import spy
import train_gpt
import train_gpt_2026
import train_gpt_2026_08 as later
import train_gpt_track3 as track3
from conftest import language
from frontier.small_runs import AUGUST, JULY, LAST, ROW, WORDS, D, M, plain_fp8_mlp, table_of
from ngram_table import NgramTable
from runs import (
    Program,
    assert_close,
    assert_same,
    before_step,
    begin_from,
    console_of,
    outcome,
    val_losses,
)

# Adam's epsilon does not amplify rounding noise. Of 2 sequences in validation, 4 ranks have none.
OF_DEMO = (
    "--num_iterations 8 --val_loss_every 2 --adam_eps 1e-6 --num_layers 6 --model_dim 32 "
    "--num_heads 1 --run_id it --val_tokens 512 --batch_seqs 4"
)
OF_ADAMW = "--context_len 128 --adam_eps 1e-3 --warmup_steps 6"
SAVED = f"{OF_DEMO} --save_every 2 --keep 9"
# Of each script a Run, a small run's words, and the steps after which one rank goes on: within a
# stage, at its end, where the head has left the embedding, within a cycle of the n-gram table.
RUNS = {
    "train_gpt": (train_gpt.Run, SAVED, [4]),
    "medium": (train_gpt_2026.Run, f"{WORDS} {ROW[M]}", [6]),
    "2026-03": (train_gpt_2026.Run, f"{WORDS} {ROW[D]}", [2, 6]),
    "2026-07": (later.Run, JULY, [6]),
    "2026-08": (later.Run, AUGUST, [4, 6]),
    "adamw": (track3.Run, f"{SAVED} --record adamw-demo {OF_ADAMW}", [4]),
}


def start(words: list[str], run: type[train_gpt.Run]) -> None:
    """Run main; in July on the path of FP8, whose matmuls are plain on a CPU. Chunks of the n-gram
    table are as small as pieces need to begin and end within them."""
    if "2026-07" in words:
        in_use = train_gpt.IN_USE
        train_gpt.gpu_kernels.choose_kernels = lambda *_: in_use.add("fp8_relu2_mlp")
        train_gpt.gpu_kernels.FusedFP8MLP.apply = plain_fp8_mlp
    NgramTable.CHUNK = 100
    main = spy.main if "RANK" in os.environ else train_gpt.main
    main(words, run)


def begun(
    name: str, folder: Path, ranks: int = 0, before: SimpleNamespace | None = None, step: int = 0
) -> SimpleNamespace:
    """Make a small run on some ranks, or let an outcome's go on after a step, in a new folder.
    Return its outcome."""
    run, words, _ = RUNS[name]
    folder.mkdir()
    if before:
        begin_from(before, step, folder)
    words = [*language(folder), *words.split(), "--resume", "on"]
    with contextlib.chdir(folder):
        program = Program(words, ranks, functools.partial(start, run=run))
        assert program.end() == [0] * max(ranks, 1), program.text("err")
    assert (f"\nresumed at step {step}\n" in program.text("out")) == (step > 0)
    found = outcome(folder, LAST, run)
    if "ngram_rows" in RUNS[name][1]:
        found.tensors |= table_of(folder, LAST)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_with_the_same_bits_and_on_other_ranks_but_for_rounding(name, tmp_path):
    """One rank goes on after one, and two after four. All ranks end with the same weights."""
    whole = begun(name, tmp_path / "whole")
    assert whole.rows[-1]["val_loss"] < whole.rows[0]["val_loss"] - 0.1
    for step in RUNS[name][2]:
        assert_same(begun(name, tmp_path / f"after {step}", 0, whole, step), whole, since=step)
    four = begun(name, tmp_path / "four", 4)
    assert_close(four, whole)
    two = begun(name, tmp_path / "two", 2, four, RUNS[name][2][0])
    assert_close(two, whole, since=RUNS[name][2][0])
    if name == "2026-07":  # a plain product does not read them, FP8 would
        scales = [whole.tensors[f"blocks.{i}.mlp.scale"].item() for i in range(5)]
        assert len(set(scales)) == 5 and min(scales) > 1e-6 and max(scales) < 1
    for ranks in (four, two):
        assert len({report["weights"] for report in spy.reports(ranks.folder)}) == 1


@pytest.fixture
def flags(flags) -> list[str]:
    return [*flags, *OF_DEMO.split()]


def check_ranks(flags: list[str], alone: Path, together: Path, ranks: int) -> None:
    """Compare the runs of two folders. All ranks have the same weights, and 1/ranks of the state,
    up to padding: two floats for each element that Adam trains, one for each of Muon's."""
    expected = outcome(alone)
    assert_close(outcome(together), expected)
    assert expected.rows[8]["val_loss"] < expected.rows[0]["val_loss"] - 0.7
    hp, _ = train_gpt.parse_args(flags, train_gpt.Run)
    model = train_gpt.GPT(hp)
    muon = [p.numel() for n, p in model.named_parameters() if "blocks" in n and p.ndim > 1]
    state = 4 * (2 * sum(p.numel() for p in model.parameters()) - sum(muon))
    reports = spy.reports(together)
    assert len(reports) == ranks and len({report["weights"] for report in reports}) == 1
    for report in reports:
        assert state / ranks <= report["state"] < 1.35 * state / ranks


def stopped_by_one(words: list[str]) -> None:
    """Run main, of which rank 1 gets a signal, and then says whether rank 0 has saved. Rank 0 waits
    some seconds for rank 1 to leave before that."""
    save = train_gpt.save_checkpoint

    def slowly(*arguments) -> None:
        end = time.monotonic() + 3
        while not os.path.exists("left") and time.monotonic() < end:
            time.sleep(0.1)
        save(*arguments)

    train_gpt.save_checkpoint = slowly
    if os.environ["RANK"] == "1":
        before_step(1, functools.partial(os.kill, os.getpid(), signal.SIGTERM))
    try:
        train_gpt.main(words)
    finally:
        Path("left").touch()
        sys.stderr.write(f"saved: {[path.name for path in Path('logs/it').glob('*.pt')]}\n")


def test_a_signal_to_one_rank_stops_all_which_wait_until_rank_0_has_saved(flags):
    program = Program([*flags, "--run_id", "it"], 2, stopped_by_one)
    assert program.end() == [128 + signal.SIGTERM] * 2
    assert "saved: ['state_step000003.pt']" in program.text("err", 1)


def test_a_start_by_torchrun_has_keys_of_its_own(monkeypatch):
    """torchrun's store keeps those of the start before, where ranks would wait for each other."""
    store, kept = dist.HashStore(), {"WORLD_SIZE": "2", "RANK": "0"}
    for name, value in (kept | {"TORCHELASTIC_RESTART_COUNT": "3"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", lambda url: iter([(store, 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, store, **more: store.set("a", "b"))
    train_gpt.start_device("cpu")
    assert store.check(["3/a"])


def test_ranks_of_two_nodes_equal_one(flags, tmp_path, monkeypatch):
    """With clipping, each row has the gradient's norm. Rank 0 alone prints."""
    flags += ["--grad_clip", "0.1"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    losses = val_losses(console_of(flags, alone))
    assert all(row["grad_norm"] > 0.1 for row in outcome(alone).rows[1:])
    monkeypatch.chdir(together)
    program = Program(flags, 4, spy.main, nodes=2)
    assert program.end() == [0] * 4, program.text("err")
    check_ranks(flags, alone, together, 4)
    assert val_losses(program.text("out")) == pytest.approx(losses, abs=1e-4)
    assert not any(program.text("out", rank) for rank in range(1, 4))
