"""Muon against a singular value decomposition in float64."""

import pytest
import torch

from train_gpt import Muon, zeropower_via_newtonschulz5


def quintic(s: torch.Tensor) -> torch.Tensor:
    """What five steps make of one singular value."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def through_svd(g: torch.Tensor) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    return u @ torch.diag_embed(quintic(s / s.pow(2).sum(-1, keepdim=True).sqrt())) @ vh


SHAPES = [(64, 64), (32, 128), (128, 32), (3, 48, 48), (5, 96, 24)]


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_keeps_singular_vectors_in_float32(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found, expected = zeropower_via_newtonschulz5(g, steps=5).double(), through_svd(g)
    assert (found - expected).norm() / expected.norm() < 1e-3
    s = torch.linalg.svdvals(found)
    assert (s - torch.linalg.svdvals(expected)).abs().max() < 1e-3
    assert s.max() < 1.25 and (s > 0.65).float().mean() > 0.9


@pytest.mark.parametrize("shape", SHAPES)
def test_newton_schulz_in_bfloat16(shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    found, expected = zeropower_via_newtonschulz5(g), through_svd(g)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() / expected.norm() < 0.04
    s = torch.linalg.svdvals(found.double())
    assert (s - torch.linalg.svdvals(expected)).abs().max() < 0.03


def test_zero_gradient_gives_a_zero_update():
    assert not zeropower_via_newtonschulz5(torch.zeros(2, 8, 16)).any()
    weight = torch.nn.Parameter(torch.ones(8, 16))
    weight.grad = torch.zeros_like(weight)
    Muon([weight], lr=0.1).step()
    assert torch.equal(weight.detach(), torch.ones(8, 16))


@pytest.mark.parametrize("damped", [True, False])
def test_steps_follow_momentum_nesterov_and_the_shape_factor(damped):
    """Three steps of a tall, a square, a wide and a merged weight, matrix by matrix in float64.
    Damped as in 2025, or as torch's SGD has it and the records of 2024."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 16), (16, 16), (16, 64), (3, 16, 16), (64, 16)]
    weights = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
    expected = [w.detach().double() for w in weights]
    buffers = [torch.zeros_like(w) for w in expected]
    muon = Muon(weights, lr=0.05, damped=damped)
    for mu in (0.85, 0.9, 0.95):
        for group in muon.param_groups:
            group["momentum"] = mu
        for i, w in enumerate(weights):
            w.grad = torch.randn(w.shape, generator=generator)
            g = w.grad.double()
            taken = (1 - mu) * g if damped else g
            buffers[i] = mu * buffers[i] + taken
            direction = taken + mu * buffers[i]
            rows, cols = w.shape[-2:]
            factor = max(1, rows / cols) ** 0.5
            expected[i] = expected[i] - 0.05 * factor * through_svd(direction)
        muon.step()
    for w, e in zip(weights, expected, strict=True):
        torch.testing.assert_close(w.detach().double(), e, rtol=0, atol=2e-4)
