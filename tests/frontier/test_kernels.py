"""The Triton twin of the loss of several targets, in Triton's interpreter, against float64."""

from dataclasses import replace

import pytest
import reference
import torch
import torch.nn.functional as F
import train_gpt_2026
from reference import relative_error
from train_gpt_2026 import GPT, Moment

import train_gpt
from train_gpt import to_fp8

kernels = pytest.importorskip("gpu_kernels", reason="Triton is not installed: it is for Linux")
from test_kernels import (  # noqa: E402 (of train_gpt.py)
    CPU,
    DTYPES,
    TOLERANCE,
    exact_loss,
    interpreted,
    interpreter,  # noqa: F401 (a fixture for all tests here)
    randn,
)

SHIFTED = (23.0, 5.0, 7.5)
NAME = "weighted_cross_entropy"
plain = kernels.PLAIN[NAME]


@pytest.fixture
def as_written(monkeypatch) -> None:
    """Let the digest be that of the source as it is; another test checks it."""
    twin = *kernels.TWINS[NAME][:2], kernels.digest(plain)
    monkeypatch.setitem(kernels.TWINS, NAME, twin)


@interpreted
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab, cap", [(6, 9000, SHIFTED), (3, 1000, 15.0)])
def test_loss_in_a_sigmoids_form_equals_float64(dtype, rows, vocab, cap):
    """cap * tanh(logit / cap) is such a form, less a constant."""
    form = cap if isinstance(cap, tuple) else (2 * cap, 0.0, cap / 2)
    logits = (form[0] * randn(rows, vocab)).to(dtype)
    targets = torch.arange(rows) * (vocab // rows) + vocab % rows
    expected, expected_grads = exact_loss(logits, targets, cap)
    loss, grads = kernels.fused_losses(logits, targets, form)
    assert loss.item() == pytest.approx(expected, rel=1e-6) and grads is None
    loss, grads = kernels.fused_losses(logits, targets, form, None, 0.25, dtype)
    assert loss.item() == pytest.approx(expected, rel=1e-6) and grads.dtype == dtype
    tolerance = 5e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    assert relative_error(grads, 0.25 * expected_grads) < tolerance


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_of_several_targets_equals_float64(dtype):
    """The gradient is that of a weighted sum, the loss that of the first target; -1 is none."""
    logits, shares = (9 * randn(4, 9000)).to(dtype), (1.0, 0.5, 0.25)
    targets = torch.tensor([[0, 8999, 0], [17, 17, 8192], [8191, 3, -1], [5, -1, -1]])
    exact, total = logits.double().requires_grad_(), 0.0
    capped = reference.soft_capped(exact, SHIFTED)
    for row, own in zip(capped, targets.tolist(), strict=True):
        for share, target in zip(shares, own, strict=True):
            if target >= 0:
                total -= share * torch.log_softmax(row, 0)[target]
    total.backward()
    weights = torch.tensor(shares)
    loss, grads = kernels.fused_losses(logits, targets, SHIFTED, weights, 0.25, dtype)
    first = F.cross_entropy(capped, targets[:, 0], reduction="sum").item()
    assert loss.item() == pytest.approx(first, rel=1e-6)
    assert relative_error(grads, 0.25 * exact.grad) < TOLERANCE[dtype]


@interpreted
def test_loss_in_float8_is_the_plain_functions():
    """But where the interpreter forgets to carry, when it rounds up to a power of two, or cuts off
    what is below 2^-14."""
    logits, targets = 5 * randn(4, 1000), torch.tensor([[0, 9], [999, 999], [500, -1], [17, 3]])
    shares, scale = torch.tensor([1.0, 0.5]), 2.0**10
    arguments = targets, SHIFTED, shares, scale
    _, grads = kernels.fused_losses(logits, *arguments, torch.float8_e5m2)
    _, exact = plain(logits.clone(), *arguments, torch.float32)
    expected = to_fp8(exact, 1.0, torch.float8_e5m2).float()
    power_of_two = expected.abs().frexp().mantissa == 0.5
    kept = (exact.abs() > 2.0**-14) & ~(power_of_two & (expected.abs() > exact.abs()))
    assert kept.float().mean() > 0.5 and torch.equal(grads.float()[kept], expected[kept])


@interpreted
def test_the_twin_agrees_on_its_example_and_a_mistake_is_noticed(bare, as_written, monkeypatch):
    """In float32, in which the interpreter is exact; it is slow, and takes few rows of logits. The
    example has as many targets as a token ever has."""
    stages = "targets=1/.5/.25,targets=1/.5"
    hp = replace(bare, stages=stages, logit_sigmoid=SHIFTED, loss_sum=True)
    twin, example, written_for = kernels.TWINS[NAME]
    logits, targets, form, *more = example(hp, CPU, torch.float32, False)
    assert targets.shape == (len(logits), 3) and form == SHIFTED
    few = logits[:32], targets[-32:], form, *more
    both = [kernels.outcome(function, few) for function in (plain, twin)]
    for expected, found in zip(*both, strict=True):
        assert relative_error(found, expected) < 1e-5
    monkeypatch.setitem(kernels.TWINS, NAME, (twin, lambda *given: few, written_for))
    assert kernels.fault(NAME, hp, CPU) == ""

    def mistaken(*given):
        loss, grads = plain(*given)
        return loss, 1.1 * grads

    monkeypatch.setitem(kernels.TWINS, NAME, (mistaken, lambda *given: few, written_for))
    assert "it deviates" in kernels.fault(NAME, hp, CPU)


@interpreted
def test_steps_with_kernels_are_those_without(bare, randomize):
    """Three of a small model with two targets a token, of which the second learns."""
    hp = replace(
        bare,
        num_layers=2,
        layers="long,none+x0",
        batch_seqs=1,
        adam_eps=1e-3,
        adam_rule="cautious",
        polar_express=True,
        muon_beta2=0.95,
        stages="targets=1/.5",
        logit_sigmoid=SHIFTED,
        loss_sum=True,
    )
    tokens = torch.randint(0, 512, (1, 129), generator=torch.Generator().manual_seed(0))
    losses = []
    for choice in (False, True):
        model = randomize(GPT(hp))
        if choice:
            kernels.IN_USE.update({name: kernels.TWINS[name][0] for name in GPT.kernels})
        optimizers = train_gpt_2026.Optimizers(model, hp)
        batch = tokens[:, :-1].int(), tokens[:, 1:]
        moments = [Moment(step, hp) for step in range(3)]
        results = [train_gpt.train_step(model, optimizers, *batch, now) for now in moments]
        losses.append([result[0].item() for result in results])
    assert losses[0][2] < losses[0][0] - 0.1
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_the_twin_was_written_for_the_plain_function_as_it_is():
    """If this fails, change the twin with its function, and then the digest in gpu_kernels.py."""
    assert kernels.TWINS[NAME][2] == kernels.digest(plain)
