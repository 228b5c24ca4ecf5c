"""Shared by the frontier's tests; what they share with others is in tests/conftest.py."""

import pytest
import torch

import reference
import train_gpt
from frontier import reference_2026
from frontier.small_runs import small_flags


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Let each test run in an empty folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def vocabulary_of_512(monkeypatch) -> None:
    """Let the last of 512 words begin a document."""
    for module in (reference, reference_2026):
        monkeypatch.setattr(module, "END_OF_TEXT", 511)


@pytest.fixture
def float64(monkeypatch):
    """Let all be computed in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


@pytest.fixture(scope="session")
def flags(tmp_path_factory) -> dict[str, list[str]]:
    """Return the flags of a small run of each record."""
    return small_flags(tmp_path_factory.mktemp("data"))


@pytest.fixture(autouse=True)
def float32_heads(monkeypatch) -> None:
    """On any CPU: tests/test_fp8.py has heads in bfloat16."""
    monkeypatch.setattr(train_gpt, "bfloat16_is_fast", lambda device: False)
