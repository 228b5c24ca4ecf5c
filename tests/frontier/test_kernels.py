"""The Triton twin of the loss of several targets, in Triton's interpreter, against float64."""

from dataclasses import replace

import pytest
import reference
import torch
import torch.nn.functional as F
import train_gpt_2026
from train_gpt_2026 import weighted_cross_entropy

import train_gpt
from train_gpt import as_is, choose_kernels, names_in_use, to_fp8

kernels = pytest.importorskip("kernels", reason="Triton is not installed: it is for Linux")
from test_kernels import (  # noqa: E402 (the textbook's)
    DTYPES,
    TOLERANCE,
    exact_loss,
    interpreted,
    interpreter,  # noqa: F401 (a fixture for all tests here)
    randn,
    relative_error,
)

SHIFTED = (23.0, 5.0, 7.5)


@pytest.fixture(autouse=True)
def unused():
    """Let no test leave the kernel in use."""
    yield
    weighted_cross_entropy.use = False


@interpreted
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab, cap", [(6, 9000, SHIFTED), (3, 1000, 15.0)])
def test_loss_in_a_sigmoids_form_equals_float64(dtype, rows, vocab, cap):
    """cap * tanh(logit / cap) is such a form, less a constant. Gradients come in the logits' place,
    as they are used."""
    form = cap if isinstance(cap, tuple) else (2 * cap, 0.0, cap / 2)
    logits = (form[0] * randn(rows, vocab)).to(dtype)
    targets = torch.arange(rows) * (vocab // rows) + vocab % rows
    expected, expected_grads = exact_loss(logits, targets, cap)
    assert kernels.fused_losses(logits, targets, form).item() == pytest.approx(expected, rel=1e-6)
    loss = kernels.fused_losses(logits, targets, form, None, 0.25, logits)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    tolerance = 5e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    assert relative_error(logits, 0.25 * expected_grads) < tolerance


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
    loss = kernels.fused_losses(logits, targets, SHIFTED, torch.tensor(shares), 0.25, logits)
    first = F.cross_entropy(capped, targets[:, 0], reduction="sum").item()
    assert loss.item() == pytest.approx(first, rel=1e-6)
    assert relative_error(logits, 0.25 * exact.grad) < TOLERANCE[dtype]


@interpreted
def test_loss_in_float8_is_the_plain_functions():
    """But where the interpreter forgets to carry, when it rounds up to a power of two, or cuts off
    what is below 2^-14."""
    logits, targets = 5 * randn(4, 1000), torch.tensor([[0, 9], [999, 999], [500, -1], [17, 3]])
    shares, scale = torch.tensor([1.0, 0.5]), 2.0**10
    grads = torch.zeros(4, 1000, dtype=torch.float8_e5m2)
    kernels.fused_losses(logits, targets, SHIFTED, shares, scale, grads)
    exact = logits.clone()
    weighted_cross_entropy.plain(logits.clone(), targets, SHIFTED, shares, scale, exact)
    expected = to_fp8(exact, 1.0, torch.float8_e5m2).float()
    power_of_two = expected.abs().frexp().mantissa == 0.5
    kept = (exact.abs() > 2.0**-14) & ~(power_of_two & (expected.abs() > exact.abs()))
    assert kept.float().mean() > 0.5 and torch.equal(grads.float()[kept], expected[kept])


@interpreted
def test_the_twin_agrees_on_its_example_and_a_mistake_is_noticed(bare, monkeypatch):
    """In float32, in which the interpreter is exact; it is slow, and takes few rows of logits. The
    example has as many targets as a token ever has."""
    stages = "targets=1/.5/.25,targets=1/.5"
    hp = replace(bare, stages=stages, logit_sigmoid=SHIFTED, loss_sum=True)
    name, plain = weighted_cross_entropy.name, weighted_cross_entropy.plain
    example = hp, torch.device("cpu"), torch.float32, False
    assert weighted_cross_entropy.fused is kernels.TWINS[name]
    logits, targets, form, shares, grad_scale, grads = kernels.EXAMPLES[name](*example)
    assert targets.shape == (len(logits), 3) and form == SHIFTED
    few = logits[:32], targets[-32:], form, shares, grad_scale, grads[:32]
    twins = [kernels.outcome(twin, few) for twin in (plain, kernels.TWINS[name])]
    for expected, found in zip(*twins, strict=True):
        assert relative_error(found, expected) < 1e-5
    monkeypatch.setitem(kernels.EXAMPLES, name, lambda *given: few)
    assert kernels.fault(plain, as_is, *example) == ""
    monkeypatch.setitem(kernels.TWINS, name, lambda *given: 1.1 * plain(*given))
    assert kernels.fault(plain, as_is, *example)


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
    for choice in ("off", "on"):
        model = randomize(train_gpt_2026.GPT(hp))
        choose_kernels(model, replace(hp, kernels=choice), torch.device("cpu"))
        used = ["weighted_cross_entropy", "relu2_mlp", "symmetric_matmul"]
        assert names_in_use(model.kernels) == (used if choice == "on" else [])
        optimizers = train_gpt_2026.Optimizers(model, hp)
        batch = tokens[:, :-1].int(), tokens[:, 1:]
        moments = [train_gpt_2026.moment(step, hp) for step in range(3)]
        results = [train_gpt.train_step(model, optimizers, *batch, now) for now in moments]
        losses.append([result[0].item() for result in results])
    plain, fused = losses
    assert plain[2] < plain[0] - 0.1
    assert fused == pytest.approx(plain, abs=1e-4)


def test_the_twin_was_written_for_the_plain_function_as_it_is():
    """If this fails, change the twin with its function, and then the digest in kernels.py."""
    plain = train_gpt_2026.weighted_cross_entropy.plain
    assert kernels.WRITTEN_FOR["weighted_cross_entropy"] == kernels.digest(plain)
