"""The rows of 2025-08-23 (A), 2026-01-19 (C), 2026-01-26 (C5) and 2026-03-06 (D) as whole runs:
ranks, stops, resumption. What they compute is measured against plain float64 in test_rows.py; there
is row B, too, which is C without two switches."""

import functools
import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import spy
import torch
from runs import Program, before_step, console_of, rows, val_losses
from train_gpt_2026 import Run, moment

import train_gpt
from frontier.small_runs import C5, LAST, A, C, D, checkpoint, main, small_flags
from train_gpt import load_checkpoint

LENGTHS = {A: [128] * 8, C: [128] * 3 + [256] * 2 + [384] * 3, D: [128] * 2 + [256] * 3 + [384] * 3}
CPU = torch.device("cpu")


def outcome(folder: Path, last: int = LAST) -> SimpleNamespace:
    """Return the last weights and optimizer state as bytes, and the rows of the .jsonl, but for
    times."""
    saved, times = load_checkpoint(folder / checkpoint(last), Run), ("ms", "tokens_per_s")
    state = {f"{n} {key}": v for n, of in saved["optimizers"].items() for key, v in of.items()}
    tensors = {name: t.numpy().tobytes() for name, t in (saved["model"] | state).items()}
    metrics = []
    for row in rows(folder / "logs/it.jsonl"):
        metrics.append({k: row[k] for k in row.keys() - {*times, "memory_mib"}})
    return SimpleNamespace(folder=folder, tensors=tensors, rows=metrics)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> dict[str, list[str]]:
    return small_flags(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory) -> dict[str, SimpleNamespace]:
    """Train each row on one rank, undisturbed; return outcomes, with validation losses."""
    found = {}
    for record in (A, C, D):
        folder = tmp_path_factory.mktemp("whole")
        losses = val_losses(console_of(flags[record], folder, main))
        found[record] = SimpleNamespace(losses=losses, **vars(outcome(folder)))
    return found


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


# -----------------------------------------------------------------------------
# Ranks


@pytest.mark.parametrize(("record", "ranks"), [(A, 2), (C, 2), (D, 8)])
def test_ranks_agree_across_stages_and_the_split_of_the_head(record, ranks, flags, whole, tmp_path):
    run = Program(flags[record], ranks, functools.partial(spy.main, run_class=Run))
    assert run.end() == [0] * ranks, run.text("err")
    found, expected = outcome(tmp_path), whole[record]
    for row, alone in zip(found.rows, expected.rows, strict=True):
        for name in row.keys() & {"train_loss", "val_loss"}:
            assert row[name] == pytest.approx(alone[name], abs=1e-4)
    seen = [json.loads(Path(f"rank{rank}.json").read_text()) for rank in range(ranks)]
    assert len({report["weights"] for report in seen}) == 1  # on all ranks, bit for bit
    moments = [(row["seq_len"], row["tied"]) for row in expected.rows[1:]]
    tied = [False] * 8 if record == A else [True] * 6 + [False] * 2
    assert moments == list(zip(LENGTHS[record], tied, strict=True))


# -----------------------------------------------------------------------------
# Stops


def assert_same(found: SimpleNamespace, expected: SimpleNamespace, since: int = -1) -> None:
    assert not [k for k, v in expected.tensors.items() if found.tensors[k] != v]
    assert found.rows == [row for row in expected.rows if row["step"] > since]


RESUMED = [(A, 0), (A, 4), (C, 4), (D, 0), (D, 2), (D, 4), (D, 6)]


@pytest.mark.parametrize(("record", "step"), RESUMED)
def test_resumed_anywhere_it_ends_as_ever(record, step, flags, whole, tmp_path, monkeypatch):
    """Within a stage, at its end, and where the head has left the embedding. And so it does from
    the start, without a warm-up."""
    more = []
    if step:
        more = ["--resume", whole[record].folder / checkpoint(step)]
    else:
        monkeypatch.setattr(train_gpt, "warm_up", lambda *args, **kwargs: None)
    out = console_of([*flags[record], *more], tmp_path, main)
    assert (f"\nresumed at step {step}\n" in out) == (step > 0)
    assert_same(outcome(tmp_path), whole[record], since=step or -1)


def stopped(words: list[str], number: int, step: int) -> None:
    """Run main, which gets a signal before a step, and has the time to notice it."""

    def stop():
        signal.raise_signal(number)
        time.sleep(0.3)

    before_step(step, stop)
    main(words)


STOPS = [(A, "TERM", 2, 5), (D, "TERM", 2, 6), (D, "TERM", 3, 6), (D, "KILL", 5, 4)]


@pytest.mark.parametrize(("record", "name", "step", "saved"), STOPS)
def test_a_stopped_run_ends_bit_identical(record, name, step, saved, flags, whole, tmp_path):
    """A signal is seen in the next step, whose result comes one later. Where Adam learns at each
    second step, a run that would end after an odd number of steps makes one more."""
    number, every = signal.Signals[f"SIG{name}"], 2 if name == "KILL" else 0
    work = functools.partial(stopped, number=number, step=step)
    run = Program([*flags[record], "--save_every", every], work=work)
    assert run.end() == [-number if name == "KILL" else 128 + number], run.text("err")
    assert max(tmp_path.glob("logs/it/*.pt")) == tmp_path / checkpoint(saved)
    assert name == "KILL" or f"--resume auto goes on after step {saved}\n" in run.text("out")
    console_of([*flags[record], "--resume", "auto"], tmp_path, main)
    assert_same(outcome(tmp_path), whole[record])


@pytest.mark.parametrize("step", [0, 3])
def test_one_rank_goes_on_where_two_were_stopped(step, flags, whole, tmp_path):
    """Before the head leaves the embedding, within the second stage, and where it has left it; up
    to rounding."""
    work = functools.partial(stopped, number=signal.SIGTERM, step=step)
    run = Program([*flags[D], "--save_every", 0], 2, work)
    assert run.end() == [143, 143], run.text("err")
    saved = {0: 4, 3: 6}[step]
    (path,) = tmp_path.glob("logs/it/*.pt")
    assert path == tmp_path / checkpoint(saved)
    out = console_of([*flags[D], "--resume", "auto"], tmp_path, main)
    assert f"\nresumed at step {saved}\n" in out
    found, expected = outcome(tmp_path).rows, whole[D].rows
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, alone in zip(found, expected, strict=True):
        for name in row.keys() & {"train_loss", "val_loss"}:
            assert row[name] == pytest.approx(alone[name], abs=1e-4)


def test_two_ranks_go_on_where_one_was_stopped(flags, whole, tmp_path):
    run = Program([*flags[D], "--resume", whole[D].folder / checkpoint(4)], 2, main)
    assert run.end() == [0, 0], run.text("err")
    expected = [row for row in whole[D].rows if row["step"] > 4]
    for row, alone in zip(outcome(tmp_path).rows, expected, strict=True):
        for name in row.keys() & {"train_loss", "val_loss"}:
            assert row[name] == pytest.approx(alone[name], abs=1e-4)


def test_in_the_last_of_an_odd_number_of_steps_only_matrices_learn(flags, tmp_path):
    """The first half of what Adam would take up has no second one. Resumed before it, a run ends
    as ever: warming up leaves no gradient of such a half, either."""
    words = [*flags[C5], "--num_iterations", 7]
    for folder in (tmp_path / "whole", tmp_path / "resumed"):
        folder.mkdir()
        losses = val_losses(console_of(words, folder, main))
        words += ["--resume", tmp_path / "whole" / checkpoint(6)]
    whole, resumed = (outcome(tmp_path / name, last=7) for name in ("whole", "resumed"))
    assert list(losses) == [7] and losses[7] < whole.rows[0]["val_loss"] - 0.2
    assert_same(resumed, whole, since=6)
    before = outcome(tmp_path / "whole", last=6).tensors
    changed = {key.split()[0] for key, value in whole.tensors.items() if value != before[key]}
    ends = "qkv_w", "c_proj.weight", "c_fc.weight"
    assert changed == {key for key in before if key.endswith(ends)}


LONG_FIRST = "length=3+window=256+targets=1/.5,length=1+window=128"


def test_a_run_whose_longest_sequences_are_tied_goes_on_with_two_tables(flags, tmp_path):
    """The warm-up ends with the longest sequences, while the head is the embedding; then a
    checkpoint of two tables is taken over."""
    words = [*flags[D], "--stages", LONG_FIRST, "--extension_frac", 0, "--tied_frac", 0.25]
    for folder in (tmp_path / "whole", tmp_path / "resumed"):
        folder.mkdir()
        console_of(words, folder, main)
        words += ["--resume", tmp_path / "whole" / checkpoint(6)]
    whole, resumed = (outcome(tmp_path / name) for name in ("whole", "resumed"))
    lengths = [(row["seq_len"], row["tied"]) for row in whole.rows[1:]]
    assert lengths == [(384, True)] * 4 + [(128, False)] * 4
    assert_same(resumed, whole, since=6)


# -----------------------------------------------------------------------------
# Evaluation


@pytest.mark.parametrize("record", [A, D])
def test_a_finished_run_is_evaluated_at_the_moment_of_its_step(record, whole, capsys):
    losses, folder = whole[record].losses, whole[record].folder
    for step in (2, 6, LAST):
        words = ["--eval", str(folder / checkpoint(step)), "--device", "cpu"]
        main(words)
        assert f"val_loss:{losses[step]:.4f} over 1024 tokens" in capsys.readouterr().out
    run = Run(*train_gpt.parse_args(words, Run))
    moments = [moment(step, run.hp) for step in (LAST, LAST - 1)]
    last, before = (train_gpt.evaluate(run.model, run.val_batch, now, CPU) for now in moments)
    assert last == whole[record].rows[-1]["val_loss"]
    assert (last == before) == (record == A)  # D's last validation has another window
