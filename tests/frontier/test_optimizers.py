"""Update rules of later records, and a head that is the embedding; see test_rows.py, too."""

from dataclasses import replace

import pytest
import torch
from test_optimizers import leaving
from train_gpt_2026 import GPT, Moment, Optimizers, polar_express

import train_gpt
from frontier import reference_2026 as exact

SHAPES = [(64, 64), (32, 128), (128, 32), (3, 48, 48), (5, 96, 24)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -----------------------------------------------------------------------------
# Rules of single matrices; whole steps of each record are in test_rows.py


def through_svd(g: torch.Tensor) -> torch.Tensor:
    """Return what Polar Express makes of each matrix: its singular values, one by one."""
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / (1.02 * s.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)
    for a, b, c in exact.POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_express_keeps_singular_vectors_and_brings_values_near_1(shape):
    g = randn(*shape)
    found, expected = polar_express(g).double(), through_svd(g)
    assert (found - expected).norm() / expected.norm() < 1e-3
    s = torch.linalg.svdvals(found)
    assert 0.9 < s.median() < 1.1 and s.max() < 1.15
    worst = torch.linalg.svdvals(train_gpt.zeropower_via_newtonschulz5(g).double())
    assert (s - 1).abs().mean() < (worst - 1).abs().mean()  # nearer than Newton-Schulz


# -----------------------------------------------------------------------------
# The order in which gradients leave


@pytest.fixture
def events(bare, randomize, monkeypatch):
    """Return of(tied_frac): what `leaving` returns of a model's first step."""

    def of(tied_frac: float) -> list:
        layers = "long+v0,short,none,short,long+x1,none+x0"
        hp = replace(bare, num_layers=6, layers=layers, batch_seqs=2, tied_frac=tied_frac)
        model = randomize(GPT(hp))
        tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0))
        batch = tokens[:, :-1].int(), tokens[:, 1:]
        return leaving(model, batch, monkeypatch, Optimizers, Moment(0, hp))

    return of


def groups(events: list) -> list[str]:
    """Return the names of the groups in a part of the events."""
    return [name.split()[0] for name, _ in events]


def test_an_untied_head_learns_before_the_matrices_and_the_embedding_on_its_own(events):
    found = events(0.0)
    begins, ended = found.index("begins"), found.index("ended")
    assert groups(found[:begins]) == ["head"]
    assert {*groups(found[begins + 1 : ended])} == {"muon"}
    assert groups(found[ended + 1 :]) == ["embed", "values", "scalar"]


def test_a_tied_head_learns_for_the_embedding_when_the_last_backward_pass_has_ended(events):
    """Matrices, whose gradients are there before, do not wait for it."""
    found = events(1.0)
    begins, ended = found.index("begins"), found.index("ended")
    assert begins == 0 and {*groups(found[1:ended])} == {"muon"}
    assert groups(found[ended + 1 :]) == ["head", "values", "scalar"]
