"""Triton's kernels in its interpreter against float64, and the run that chooses them."""

import re
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from runs import val_losses

import train_gpt
from train_gpt import FusedMLP, fused_loss, fused_symmetric, to_fp8

pytest.importorskip("triton", reason="Triton is not installed: it is for Linux")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs kernels itself")

DTYPES = (torch.float32, torch.float16)  # the interpreter's bfloat16 matmul is broken
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Triton's interpreter is on, and what kernels write into begins as NaN."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    for kernel in train_gpt.KERNELS.values():
        kernel.use = False


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(found, expected) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm()).item()


def exact_loss(logits, targets, cap):
    """In float64, from tanh instead of sigmoids: the loss, and its gradient."""
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(cap * torch.tanh(exact / cap), targets, reduction="sum")
    loss.backward()
    return loss.item(), exact.grad


@interpreted
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab, cap", [(3, 1000, 15.0), (5, 8192, 30.0), (2, 20001, 38.0)])
def test_loss_equals_float64(dtype, rows, vocab, cap):
    """Logits of one to three caps; gradients in the logits' place, as they are used."""
    logits = (cap * randn(rows, vocab)).to(dtype)
    targets = torch.arange(rows) * (vocab // rows) + vocab % rows
    expected, expected_grads = exact_loss(logits, targets, cap)
    assert fused_loss(logits, targets, cap).item() == pytest.approx(expected, rel=1e-6)
    loss = fused_loss(logits, targets, cap, 0.25, logits)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    tolerance = 5e-3 if dtype == torch.bfloat16 else TOLERANCE[dtype]
    assert relative_error(logits, 0.25 * expected_grads) < tolerance


@interpreted
def test_loss_in_float8_clamps_where_the_cast_would_give_inf():
    """The interpreter forgets to carry when it rounds up to a power of two, and cuts off below
    2^-14: such values are left out."""
    logits, targets = 5 * randn(4, 1000), torch.tensor([0, 999, 500, 17])
    grads = torch.zeros(4, 1000, dtype=torch.float8_e5m2)
    for scale, saturated in ((2.0**10, 0), (2.0**16, 4)):  # the targets' gradients reach -1 * scale
        fused_loss(logits, targets, 15.0, scale, grads)
        exact = scale * exact_loss(logits, targets, 15.0)[1]
        expected = to_fp8(exact.float(), 1.0, torch.float8_e5m2).float()
        assert (expected == -57344).sum() == (grads.float() == -57344).sum() == saturated
        power_of_two = expected.abs().frexp().mantissa == 0.5
        kept = (exact.abs() > 2.0**-14) & ~(power_of_two & (expected.abs() > exact.abs()))
        assert kept.float().mean() > 0.5 and torch.equal(grads.float()[kept], expected[kept])


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width, hidden", [(128, 64, 256), (130, 72, 300), (1500, 8, 24)])
def test_mlp_equals_float64_with_gradients(dtype, rows, width, hidden):
    inputs = [randn(1, rows, width), randn(hidden, width, seed=1), randn(width, hidden, seed=2)]
    inputs = [(t * t.size(-1) ** -0.5).to(dtype).requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = randn(1, rows, width, dtype=dtype, seed=3)
    out = FusedMLP.apply(*inputs)
    out.backward(grad)
    expected = F.relu(exact[0] @ exact[1].T) ** 2 @ exact[2].T
    expected.backward(grad.double())
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for found, right in zip(inputs, exact, strict=True):
        assert relative_error(found.grad, right.grad) < TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, n, k", [(1, 128, 64), (3, 200, 72), (2, 24, 300), (1, 300, 300)])
def test_symmetric_products_equal_float64_and_are_symmetric(dtype, count, n, k):
    a = (randn(count, n, k) * k**-0.5).to(dtype)
    found, exact = fused_symmetric(a), a.double() @ a.double().mT
    assert relative_error(found, exact) < TOLERANCE[dtype] and torch.equal(found, found.mT)
    both = fused_symmetric(a, found, 2.0315, -4.775)
    exact = 2.0315 * exact - 4.775 * found.double()
    assert relative_error(both, exact) < TOLERANCE[dtype] and torch.equal(both, both.mT)


@pytest.fixture
def fake_kernels(monkeypatch):
    """fake_kernels(name=fused, ...) puts kernels with a plain twin of 5 ms in place of all."""

    def slow_square(x):
        time.sleep(0.005)
        return x.square()

    def install(**fused):
        monkeypatch.setattr(train_gpt, "KERNELS", {})
        x = randn(100).requires_grad_()
        for name, twin in fused.items():
            plain = lambda x: slow_square(x)  # noqa: E731
            plain.__name__ = name
            train_gpt.Kernel(plain, twin, lambda hp, device: (x,))
        return train_gpt.KERNELS

    return install


def test_the_run_chooses_kernels_that_build_agree_and_win(fake_kernels, tiny):
    def broken(x):
        raise RuntimeError("PTX was\ninvalid")

    def late(x):
        time.sleep(0.02)
        return x.square()

    def wrong_gradient(x):
        return x.detach().square() + (x - x.detach())

    kernels = fake_kernels(
        good=torch.square,
        wrong=torch.abs,
        broken=broken,
        late=late,
        nan=lambda x: x * torch.nan,
        wrong_gradient=wrong_gradient,
        nan_gradient=lambda x: x.square() + 0 * (x - x.detach()).sqrt(),
    )
    lines = []
    train_gpt.choose_kernels(tiny, torch.device("cpu"), False, lines.append)
    assert [name for name, kernel in kernels.items() if kernel.use] == ["good"]
    assert re.fullmatch(r"kernel good: \d+\.\d+ ms, plain \d+\.\d+ ms, .* 0\.0e\+00: on", lines[0])
    assert "deviation nan: off" in lines[4] and "deviation nan: off" in lines[6]
    assert lines[2] == "kernel broken: RuntimeError: PTX was invalid: off"
    for choice in ("off", "on"):
        train_gpt.choose_kernels(replace(tiny, kernels=choice), torch.device("cpu"), False)
        assert {kernel.use for kernel in kernels.values()} == {choice == "on"}


def test_a_kernel_is_on_only_if_it_is_better_on_all_ranks(fake_kernels, tiny, monkeypatch):
    kernels, lines = fake_kernels(here=torch.square, everywhere=torch.square), []
    monkeypatch.setattr(train_gpt.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train_gpt.dist, "get_world_size", lambda: 2)
    other = torch.tensor([0.0, 1.0])  # what the other rank found
    monkeypatch.setattr(train_gpt, "all_reduce_", lambda tensors: tensors[0].add_(other))
    train_gpt.choose_kernels(tiny, torch.device("cpu"), False, lines.append)
    assert [kernel.use for kernel in kernels.values()] == [False, True]
    assert lines[0].endswith(": off, better on 1 of 2 ranks") and lines[1].endswith(": on")


@interpreted
@pytest.mark.parametrize("name", train_gpt.KERNELS)
def test_the_trial_compares_what_kernels_really_give(name, tiny, monkeypatch):
    """All three in float32, whose interpreter is exact; and a mistake in each is noticed."""
    monkeypatch.setattr(train_gpt, "loss_chunk_len", lambda device: 4)
    kernel, cpu = train_gpt.KERNELS[name], torch.device("cpu")
    arguments = list(kernel.example(replace(tiny, num_layers=2), cpu))
    plain, fused = (
        train_gpt.trial(twin, arguments, cpu)[0] for twin in (kernel.plain, kernel.fused)
    )
    for a, b in zip(plain, fused, strict=True):
        assert relative_error(b, a) < 1e-5
    monkeypatch.setattr(kernel, "fused", lambda *given: 1.1 * kernel.plain(*given))
    better, seen = train_gpt.compare_twins(kernel, replace(tiny, num_layers=2), cpu, False)
    assert not better and re.search(r"deviation [12]\.\de-01$", seen)


def test_the_trial_notices_rows_that_change_places(tiny):
    """In the gradients alone: what comes back from above must differ from row to row."""

    class Shuffled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad.roll(1, 0)

    x, cpu = [randn(8, 4).requires_grad_()], torch.device("cpu")
    (out, right), (same, wrong) = (
        train_gpt.trial(f, x, cpu)[0] for f in (torch.square, Shuffled.apply)
    )
    assert torch.equal(out, same) and relative_error(wrong, right) > 0.1


def test_kernels_without_a_gpu_are_refused(monkeypatch, tiny):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(train_gpt.UserError, match="--kernels on: Triton wants a CUDA GPU"):
        train_gpt.choose_kernels(replace(tiny, kernels="on"), torch.device("cpu"), False)
    train_gpt.choose_kernels(tiny, torch.device("cpu"), False)
    assert not any(kernel.use for kernel in train_gpt.KERNELS.values())


def losses_of_a_run(kernels: str, steps: int, every: int, flags, capsys) -> dict[int, float]:
    """Validation losses of two layers in float32; Adam's epsilon as always where sums differ."""
    more = f"--num_layers 2 --batch_seqs 1 --val_tokens 256 --adam_eps 1e-6 --kernels {kernels}"
    steps = f"--num_iterations {steps} --val_loss_every {every}"
    train_gpt.main([*flags, *more.split(), *steps.split()])
    return val_losses(capsys.readouterr().out)


@interpreted
def test_a_run_with_kernels_gives_the_losses_without(flags, capsys):
    """Three steps; tests/slow takes fifty."""
    plain, fused = (losses_of_a_run(choice, 3, 1, flags, capsys) for choice in ("off", "on"))
    assert list(plain) == [0, 1, 2, 3] and plain[3] < plain[0] - 0.1
    assert fused == pytest.approx(plain, abs=1e-4)
