"""Shared by the frontier's tests; what they share with others is in tests/conftest.py."""

import functools
from dataclasses import replace

import pytest
import reference
import train_gpt_2026
from runs import console_of, val_losses
from train_gpt_2026 import Hyperparameters, Moment

import train_gpt
from frontier import reference_2026
from frontier.small_runs import main, outcome, small_flags


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Let each test run in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bare(tiny) -> Hyperparameters:
    """Return train_gpt.py's tiny settings as the fork's, with every technique off."""
    return replace(Hyperparameters(**vars(tiny)), layers=train_gpt_2026.LAYERS_2025_SKIPS)


@pytest.fixture
def with_window():
    """Return at(window, hp, **changed): the moment after training with this long window."""

    def at(window: int, hp: Hyperparameters, **changed) -> Moment:
        now = Moment(hp.num_iterations, hp)
        vars(now).update(window=window, short=window // 2, **changed)
        return now

    return at


@pytest.fixture
def vocabulary_of_512(monkeypatch) -> None:
    """Let the last of 512 words begin a document."""
    for module in (train_gpt, train_gpt_2026, reference, reference_2026):
        monkeypatch.setattr(module, "END_OF_TEXT", 511)


@pytest.fixture(scope="session")
def flags(tmp_path_factory) -> dict[str, list[str]]:
    """Return the flags of a small run of each record."""
    return small_flags(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def whole(flags, tmp_path_factory):
    """Return whole(record): a small run of it on one rank, with its folder and its console."""

    @functools.cache
    def run(record: str):
        folder = tmp_path_factory.mktemp("whole")
        console = console_of(flags[record], folder, main)
        found = outcome(folder)
        found.console, found.losses = console, val_losses(console)
        return found

    return run
