"""forks/train_gpt_2026.py as a fork by import: its records, and its log."""

from dataclasses import replace

import pytest
import torch

import train_gpt
import train_gpt_2026
import train_gpt_2026_07
import train_gpt_2026_08
from frontier.small_runs import D
from train_gpt import HERE
from train_gpt_2026 import RECORDS, Hyperparameters, Run

SCRIPTS = train_gpt_2026, train_gpt_2026_07, train_gpt_2026_08


def test_the_default_is_that_of_train_gpt():
    """In all settings that it has. Rows of layers name their skip connections here."""
    default, theirs = vars(Hyperparameters()), vars(train_gpt.Hyperparameters())
    assert {name for name in theirs if default[name] != theirs[name]} == {"layers"}
    assert theirs == vars(train_gpt.RECORDS["2025-01-26_BatchSize"])


@pytest.mark.parametrize(
    ("script", "name"), [(script, name) for script in SCRIPTS for name in script.RECORDS]
)
def test_a_record_is_made_of_the_forks_settings_and_can_be(script, name):
    hp, run = script.RECORDS[name], script.Run
    assert type(hp) is script.Hyperparameters
    run.check(hp)
    found = train_gpt.parse_args(["--record", name, "--device", "cpu"], run)
    assert found == (replace(hp, device="cpu"), name)
    hash(run.Moment(0, hp).graph_key)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_moment_is_made_without_a_hash_of_all_settings(script, monkeypatch):
    """Which takes as long as all else: of 600000 moments, that were half a minute."""
    monkeypatch.setattr(script.Hyperparameters, "__hash__", None)
    for hp in script.RECORDS.values():
        for step in range(0, hp.num_iterations, 50):
            script.Run.Moment(step, hp)


def test_without_a_record_a_gpu_has_the_newest_and_a_cpu_the_demo(monkeypatch):
    for gpu, name in ((True, "2026-03-06_SimplifyHC"), (False, "demo")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert train_gpt.parse_args([], Run) == (RECORDS[name], name)


def test_the_demo_is_2026_03_06_made_small():
    """Nothing is switched off, and stages have the record's lengths and targets."""
    demo, record = RECORDS["demo"], RECORDS["2026-03-06_SimplifyHC"]
    for name, value in vars(record).items():
        assert not isinstance(value, bool) or getattr(demo, name) == value
    assert demo.bigram_rows > 0 and 0 < demo.tied_frac < 1 and demo.adam_every == 2
    stages, of_record = (train_gpt_2026.stage_table(hp) for hp in (demo, record))
    shapes = [(stage.targets, stage.length) for stage in of_record]
    assert [(stage.targets, stage.length) for stage in stages] == shapes


def test_the_log_begins_with_the_fork_and_has_what_it_imports_in_named_parts(whole):
    parts = (whole(D).folder / "logs/it.txt").read_text().split(f"\n{'=' * 100}\n")
    assert parts[0] == (HERE / "forks/train_gpt_2026.py").read_text()
    for name in ("train_gpt.py", "gpu_kernels.py"):
        assert f"{name}:\n{(HERE / name).read_text()}" in parts[4:-1]
