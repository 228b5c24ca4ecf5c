"""FP8 forward and both backward products against float64, on the CPU's scaled matmul.

Rounding to float8_e4m3fn has a mean square error of 2.6 %, to float8_e5m2 of 5.2 %: tolerances are
what two such operands give.
"""

import os
import runpy

import pytest
import torch

import reference
import train_gpt
from reference import relative_error
from train_gpt import CastedLinear, Head, Hyperparameters, to_fp8

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
X_S, W_S, GRAD_S = 2.0, 2.0**9, 2.0**19  # the record's scales


@pytest.fixture(autouse=True)
def fp8_on_a_cpu(monkeypatch) -> None:
    """Let FP8 be used on a CPU, whose FP8 is slow."""
    monkeypatch.setattr(train_gpt, "fp8_supported", lambda device: True)


def layer(tokens=256, width=128, vocab=512, weight_std=0.05, grad_std=2.0**-17):
    generator = torch.Generator().manual_seed(0)
    scales = {"x_s": X_S, "w_s": W_S, "grad_s": GRAD_S}
    head = Head(Hyperparameters(model_dim=width, vocab_size=vocab, **scales))
    head.weight.data = weight_std * torch.randn(vocab, width, generator=generator)
    x = torch.randn(tokens, width, generator=generator).requires_grad_()
    return head, x, grad_std * torch.randn(tokens, vocab, generator=generator)


def saturated(x, scale, dtype):
    """Return the share of values that the range of the dtype clamps."""
    return ((x * scale).abs() > torch.finfo(dtype).max).float().mean().item()


def test_any_linear_layer_can_be_in_fp8():
    """Its input may have more dimensions, and its gradients reach both."""
    head, x, grad = layer()
    other = CastedLinear(128, 512, use_fp8=True, x_s=X_S, w_s=W_S, grad_s=GRAD_S)
    other.weight = head.weight
    results = []
    for out in (head(x), other(x.view(2, 128, 128)).view(256, 512)):
        results.append([out, *torch.autograd.grad(out, [x, head.weight], grad.bfloat16())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_values_over_the_range_clamp_and_stay_finite():
    x = torch.tensor([1e3, -1e3, 1e6, -1e6, 3.0])
    assert to_fp8(x, 2.0, E4M3).float().tolist() == [448, -448, 448, -448, 6]
    assert to_fp8(x, 2.0, E5M2).float().tolist() == [2048, -2048, 57344, -57344, 6]
    assert (x * 2).to(E5M2).float().isinf().sum() == 2  # what the cast alone would do

    head, x, grad = layer(grad_std=0.1)  # 0.1 * 2^19 saturates about 27 % of the gradient
    share = saturated(grad, GRAD_S, E5M2)
    assert 0.2 < share < 0.35
    head(x).backward(grad.bfloat16())
    assert x.grad.isfinite().all() and head.weight.grad.isfinite().all()
    clamped = grad.clamp(-57344 / GRAD_S, 57344 / GRAD_S).double()
    expected = clamped @ head.weight.detach().double()
    assert relative_error(x.grad, expected) < 0.08


def test_outside_fp8_training_products_are_in_the_input_s_dtype():
    head, x, _ = layer()
    head.eval()
    assert torch.equal(head(x), x @ head.weight.T)
    x = x.bfloat16()
    for layer_of_any_kind in (head, CastedLinear(128, 32)):
        weight = layer_of_any_kind.weight.bfloat16()
        torch.testing.assert_close(layer_of_any_kind(x), x @ weight.T)


def test_chunked_loss_with_an_fp8_head_equals_float64_to_the_rounding():
    tokens = 304  # chunks of 256 and 48
    head, x, _ = layer(tokens)
    targets = torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(0))
    inputs, weight = x.detach().bfloat16().requires_grad_(), head.weight
    loss = head.loss(inputs, targets)
    loss.backward()

    x64, w64 = (t.detach().double().requires_grad_() for t in (inputs, weight))
    logits = x64 @ w64.T
    logits.retain_grad()
    expected = reference.softcapped_loss(logits, targets, 15.0)
    expected.backward()
    assert saturated(x64, X_S, E4M3) == saturated(w64, W_S, E4M3) == 0
    assert saturated(logits.grad, GRAD_S, E5M2) == 0
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    assert relative_error(inputs.grad, x64.grad) < 0.07
    assert relative_error(weight.grad, w64.grad) < 0.07


@pytest.fixture
def bfloat16_on_a_cpu(monkeypatch) -> None:
    """Let bfloat16 be used in place of FP8, as on CPUs that are fast in it."""
    monkeypatch.setattr(train_gpt, "fp8_supported", lambda device: False)
    monkeypatch.setattr(train_gpt, "bfloat16_is_fast", lambda device: device.type == "cpu")


def test_on_a_cpu_with_fast_bfloat16_it_is_in_that_and_only_in_training(bfloat16_on_a_cpu):
    """Products of what bfloat16 rounds, forward and backward. Tests in float64 stay that."""
    head, x, grad = layer()
    out = head(x)
    out.backward(grad.bfloat16())
    x64, w64, g64 = (part.detach().bfloat16().double() for part in (x, head.weight, grad))
    expected = x64 @ w64.T, g64 @ w64, g64.T @ x64
    for found, right in zip((out, x.grad, head.weight.grad), expected, strict=True):
        assert 1e-4 < relative_error(found.detach(), right) < 2e-3  # of the result's rounding
    assert (out.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    assert head.eval()(x).dtype == torch.float32
    assert head.train().double()(x.double()).dtype == torch.float64
    head.use_fp8 = False
    assert head.float()(x).dtype == torch.float32


@pytest.mark.parametrize(
    ("kind", "has_instructions", "may_be_used", "expected"),
    [
        ("cpu", True, True, True),
        ("cpu", True, False, False),
        ("cpu", False, True, False),
        ("cuda", True, True, False),
    ],
)
def test_bfloat16_is_fast_where_a_cpu_s_instructions_may_be_used(
    kind, has_instructions, may_be_used, expected, monkeypatch
):
    onednn = torch.ops.mkldnn
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_instructions)
    monkeypatch.setattr(onednn, "_is_mkldnn_bf16_supported", lambda: may_be_used)
    names = runpy.run_path(train_gpt.__file__)  # which asks when it is imported
    assert names["bfloat16_is_fast"](torch.device(kind)) == expected


def test_a_limit_of_onednn_s_instructions_makes_bfloat16_slow():
    """What tests/conftest.py sets limits them, on any CPU."""
    if os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2":
        assert not runpy.run_path(train_gpt.__file__)["CPU_HAS_BFLOAT16"]
