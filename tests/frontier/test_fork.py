"""The forks of 2026 as forks by import: their records."""

from dataclasses import replace

import pytest
import torch

import train_gpt
import train_gpt_2026
import train_gpt_2026_08
from train_gpt_2026 import RECORDS, Hyperparameters, Run

SCRIPTS = train_gpt_2026, train_gpt_2026_08


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


def test_without_a_record_a_gpu_has_the_newest_and_a_cpu_the_demo(monkeypatch):
    for gpu, name in ((True, "2026-03-06_SimplifyHC"), (False, "demo")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert train_gpt.parse_args([], Run) == (RECORDS[name], name)
