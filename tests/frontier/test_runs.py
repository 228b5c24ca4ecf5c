"""Whole runs of forks/train_gpt_2026.py beside those of tests/test_ranks.py: stops while gradients
wait, odd numbers of steps, early splits of the head, and what a checkpoint's model computes."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from frontier.small_runs import C5, LAST, D, checkpoint, main, outcome
from runs import Program, assert_close, assert_same, before_step, begin_from, console_of
from train_gpt_2026 import Run

RESUME = ["--resume", "on"]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> SimpleNamespace:
    """Return the outcome of a small run."""
    folder = tmp_path_factory.mktemp("whole")
    console_of(flags[D], folder, main)
    return outcome(folder)


def test_a_stop_waits_until_all_gradients_are_used(flags, tmp_path, monkeypatch):
    """The signal has come before the first step, and Adam learns at every second one."""
    monkeypatch.setattr(train_gpt, "stop_signals", [(signal.SIGTERM, 0.0)])
    with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
        console_of(flags[D], tmp_path, main)
    assert [path.name for path in tmp_path.glob("logs/*/*.pt")] == ["state_step000002.pt"]


def test_a_warm_up_changes_no_bit(flags, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "warm_up", lambda *arguments: None)
    console_of(flags[D], tmp_path, main)
    assert_same(outcome(tmp_path), whole)
    moments = [(row["seq_len"], row["tied"]) for row in whole.rows[1:]]
    lengths = [128] * 2 + [256] * 3 + [384] * 3
    assert moments == list(zip(lengths, [True] * 6 + [False] * 2, strict=True))


def rank_0_stopped(words: list[str]) -> None:
    """Run main; a SIGTERM comes before the first step, to one rank only."""

    def stop():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(0.3)  # to notice it

    if os.environ["RANK"] == "0":
        before_step(0, stop)
    main(words)


def test_one_rank_goes_on_where_two_were_stopped(flags, whole, tmp_path):
    """A signal is seen in the next step. Adam learns at each second step, and that is one."""
    run = Program([*flags[D], "--save_every", 0], 2, rank_0_stopped)
    assert run.end() == [143, 143], run.text("err")
    assert "stopped by SIGTERM after step 2" in run.text("out")
    assert list(tmp_path.glob("logs/it/*.pt")) == [tmp_path / checkpoint(2)]
    out = console_of([*flags[D], *RESUME], tmp_path, main)
    assert "\nresumed at step 2\n" in out
    assert_close(outcome(tmp_path), whole)


def whole_and_resumed(words: list, folder: Path, last: int) -> SimpleNamespace:
    """Compare a run with one that is resumed after step 6; return the outcome."""
    (folder / "whole").mkdir()
    console_of(words, folder / "whole", main)
    found = outcome(folder / "whole", last)
    begin_from(found, 6, folder / "resumed")
    console_of([*words, *RESUME], folder / "resumed", main)
    assert_same(outcome(folder / "resumed", last), found, since=6)
    return found


def test_in_the_last_of_an_odd_number_of_steps_only_matrices_learn(flags, tmp_path):
    """The first half of what Adam would take up has no second one. Warming up leaves no gradient of
    such a half, either."""
    whole = whole_and_resumed([*flags[C5], "--num_iterations", 7], tmp_path, last=7)
    assert whole.rows[-1]["val_loss"] < whole.rows[0]["val_loss"] - 0.2
    before = outcome(tmp_path / "whole", last=6).tensors
    weights = whole.tensors.items()
    changed = {name for name, x in weights if not torch.equal(x, before[name])}
    ends = "qkv_w", "c_proj.weight", "c_fc.weight"
    assert changed == {name for name in before if name.endswith(ends)}


def test_a_run_whose_longest_sequences_are_tied_goes_on_with_two_tables(flags, tmp_path):
    """The warm-up ends with the longest sequences, while the head is the embedding; then a
    checkpoint of two tables is taken over."""
    stages = "length=3+window=256+targets=1/.5,length=1+window=128"
    words = [*flags[D], "--stages", stages, "--extension_frac", 0, "--tied_frac", 0.25]
    whole = whole_and_resumed(words, tmp_path, LAST)
    lengths = [(row["seq_len"], row["tied"]) for row in whole.rows[1:]]
    assert lengths == [(384, True)] * 4 + [(128, False)] * 4
