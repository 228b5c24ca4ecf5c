"""Shared by the frontier's tests; what they share with the textbook's is in tests/conftest.py."""

from dataclasses import replace

import pytest
import reference
import train_gpt_2026
from test_memory import graphs  # noqa: F401 (fixtures of the textbook's)
from test_optimizers import on_ranks  # noqa: F401
from train_gpt_2026 import Hyperparameters, Moment

import train_gpt
from frontier import reference_2026


@pytest.fixture
def bare(tiny) -> Hyperparameters:
    """Return the textbook's tiny settings as the frontier's, with every technique off."""
    return replace(Hyperparameters(**vars(tiny)), layers=train_gpt_2026.LAYERS_2025_SKIPS)


@pytest.fixture
def with_window():
    """Return at(window, hp, **changed): the moment after training with this long window."""

    def at(window: int, hp: Hyperparameters, **changed) -> Moment:
        last = train_gpt_2026.moment(hp.num_iterations, hp)
        return replace(last, window=window, short=window // 2, **changed)

    return at


@pytest.fixture
def vocabulary_of_512(monkeypatch) -> None:
    """Let the last of 512 words begin a document."""
    for module in (train_gpt, train_gpt_2026, reference, reference_2026):
        monkeypatch.setattr(module, "END_OF_TEXT", 511)
