"""The table of experiments, of made-up summaries of runs."""

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import experiments
import result

LOSSES = [4.10, 4.12, 4.09, 4.13]  # of the baseline
EQUAL = dict(steps=30, tokens=7680, data="x", machine="1 x CPU", host="here", torch="2.13.0")
USUAL = result.NOTHING | EQUAL | {"kind": "run", "status": "finished", "script": "train_gpt.py"}
USUAL |= {"digest": "a", "record": "demo", "flags": "--batch_seqs 4"}


def row(name: str, loss: float | None, **changed) -> dict:
    return USUAL | {"run": name, "val_loss": loss, "like": "base"} | changed


RUNS = [
    *(USUAL | {"run": f"base_{i}", "group": "base", "val_loss": x} for i, x in enumerate(LOSSES)),
    {"kind": "comparison"},
    row("up", 3.9, flags="--batch_seqs 4 --muon_lr 0.1"),
    row("mine", 4.4, script="mine.py", digest="b"),
    row("same", 4.12, record="2025", flags=""),
    row("long", 3.9, steps=40, host="there"),
    row("broken", None, status="failed", reason="ValueError: no", steps=2),
    row("wild", 9.0, flags="--batch_seqs 4 --muon_lr 9", status="diverged"),
    row("unread", None, status="failed", reason="no such flag", record=None, flags=None),
]


@pytest.fixture
def noted(elsewhere):
    """Write results.jsonl in an empty folder, with a line that a killed process has cut."""

    def write(runs: list[dict]) -> None:
        Path("logs").mkdir(exist_ok=True)
        lines = [json.dumps(run) for run in runs]
        result.RESULTS.write_text("\n".join([*lines, '{"kind": "run", "st']))

    return write


def test_each_run_has_its_change_and_its_verdict(noted, capsys):
    """The deviations are the baseline's; p is that of a t-test of one number and four."""
    noted(RUNS)
    experiments.main(["--json"])
    rows = {row["run"]: row for row in json.loads(capsys.readouterr().out)}
    verdicts = {name: (row["change"], row["verdict"]) for name, row in rows.items()}
    assert verdicts == {
        "up": ("--muon_lr 0.1", "better"),
        "mine": ("source", "worse"),
        "same": ("--record 2025 --batch_seqs as in the record", "too close"),
        "long": ("", "not comparable"),
        "broken": ("", "failed"),
        "wild": ("--muon_lr 9", "diverged"),
        "unread": ("", "failed"),
    }
    assert rows["long"]["reason"] == "steps 40, not 30; host there, not here"
    for name, loss, below in (("up", 3.9, True), ("mine", 4.4, True), ("same", 4.12, False)):
        assert rows[name]["deviations"] == pytest.approx((loss - 4.11) / np.std(LOSSES, ddof=1))
        p = stats.ttest_ind([loss], LOSSES).pvalue  # which leaves out the deviation of one number
        assert (p < experiments.SURE) == below

    experiments.main([])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("up ")]
    assert line.split()[-3:] == ["3.9000", "-11.5", "better"]
