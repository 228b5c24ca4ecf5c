"""Triton's kernels in its interpreter against float64, and the run that chooses them."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import reference
import train_gpt
import train_gpt_2026
import train_gpt_2026_08
from reference import relative_error
from train_gpt import all_reduce_, to_fp8

kernels = pytest.importorskip("gpu_kernels", reason="Triton is not installed: it is for Linux")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs kernels itself")

# The interpreter's bfloat16 matmul is broken.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
CPU = torch.device("cpu")
SHIFTED = (23.0, 5.0, 7.5)  # of records since September 2025: 23 sigmoid((logit + 5) / 7.5)


@pytest.fixture
def tiny_2026(tiny):
    """Return settings of the fork, with three targets a token at first."""
    layers = train_gpt_2026.LAYERS_2025_SKIPS
    hp = train_gpt_2026.Hyperparameters(**vars(tiny) | {"layers": layers})
    stages = "targets=1/.5/.25,targets=1/.5"
    return replace(hp, stages=stages, logit_sigmoid=SHIFTED, loss_sum=True)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Turn Triton's interpreter on; what kernels write into begins as NaN."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_loss(logits, targets, cap, shares) -> tuple[float, torch.Tensor]:
    """Return, in float64, the loss of the first targets, and the gradient of all targets' losses
    (T, K), times their shares; -1 is no target."""
    exact = logits.detach().double().requires_grad_()
    chances = torch.log_softmax(reference.soft_capped(exact, cap), 1)
    losses = -chances.gather(1, targets.clamp(min=0)) * (targets >= 0)
    (losses @ torch.tensor(shares).double()).sum().backward()
    return losses[:, 0].sum().item(), exact.grad


def kernel_loss(logits, targets, cap, shares, scale=1.0, dtype=None):
    """Return what the kernels compute: the loss, and in dtype the gradient times scale, twice."""
    form = cap if isinstance(cap, tuple) else (2 * cap, 0.0, cap / 2)
    weights = torch.tensor(shares) if len(shares) > 1 else None
    return kernels.softcap_losses(logits, targets, weights, form, scale, dtype)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "rows", "vocab", "cap", "shares"),
    [
        (torch.float16, 5, 8192, 30.0, (1.0,)),
        (torch.bfloat16, 2, 20001, 38.0, (1.0,)),
        (torch.float16, 4, 9000, SHIFTED, (1.0, 0.5, 0.25)),
        (torch.float32, 150, 300, SHIFTED, (1.0, 0.5, 0.25)),
        (torch.float32, 128, 256, 15.0, (1.0,)),
    ],
)
def test_loss_equals_float64(dtype, rows, vocab, cap, shares):
    """Logits reach one to three caps. Targets of a row may be equal, and the last has one alone.
    Tiles of the gradient are of 64 rows and 128 columns."""
    size = cap[0] if isinstance(cap, tuple) else cap
    logits = (size * randn(rows, vocab)).to(dtype)
    targets = torch.arange(rows) * (vocab // rows) + vocab % rows
    targets = targets[:, None].repeat(1, len(shares))
    targets[1, 1:], targets[-1, 1:] = vocab - 1, -1
    expected, expected_grads = exact_loss(logits, targets, cap, shares)
    loss, grads, grads_t = kernel_loss(logits, targets, cap, shares)
    assert loss.item() == pytest.approx(expected, rel=1e-6) and grads is grads_t is None
    loss, grads, grads_t = kernel_loss(logits, targets, cap, shares, 0.25, dtype)
    assert loss.item() == pytest.approx(expected, rel=1e-6) and grads.dtype == dtype
    assert relative_error(grads, 0.25 * expected_grads) < TOLERANCE[dtype]
    assert grads_t.data_ptr() == grads.data_ptr() and torch.equal(grads_t, grads.T)


def check_float8(grads, exact) -> torch.Tensor:
    """Compare gradients with exact ones, and return these in float8. The interpreter forgets to
    carry when it rounds up to a power of two, and cuts off below 2^-14: such are left out."""
    expected = to_fp8(exact.float(), 1.0, torch.float8_e5m2).float()
    power_of_two = expected.abs().frexp().mantissa == 0.5
    kept = (exact.abs() > 2.0**-14) & ~(power_of_two & (expected.abs() > exact.abs()))
    assert kept.float().mean() > 0.5 and torch.equal(grads.float()[kept], expected[kept])
    return expected


@interpreted
@pytest.mark.parametrize(
    ("cap", "shares", "scale", "saturated"),
    [(15.0, (1.0,), 2.0**10, 0), (15.0, (1.0,), 2.0**16, 4), (SHIFTED, (1.0, 0.5), 2.0**10, 0)],
)
def test_loss_in_float8_clamps_where_the_cast_would_give_inf(cap, shares, scale, saturated):
    """The targets' gradients reach -1 * scale."""
    logits, targets = 5 * randn(4, 1000), torch.tensor([[0, 9], [999, 999], [500, -1], [17, 3]])
    targets = targets[:, : len(shares)]
    _, grads, _ = kernel_loss(logits, targets, cap, shares, scale, torch.float8_e5m2)
    expected = check_float8(grads, scale * exact_loss(logits, targets, cap, shares)[1])
    assert (expected == -57344).sum() == (grads.float() == -57344).sum() == saturated


@interpreted
@pytest.mark.parametrize("shares", [(1.0,), (1.0, 0.5)])
def test_gradients_in_float8_are_laid_out_both_ways(shares):
    """cuBLAS reads both. Of nine tiles five are cut off."""
    rows, vocab = 150, 300
    logits = 5 * randn(rows, vocab)
    targets = torch.arange(rows * len(shares)).view(rows, -1) % vocab
    arguments = logits, targets, 15.0, shares, 2.0**10
    _, grads, grads_t = kernel_loss(*arguments, torch.float8_e5m2)
    assert grads.is_contiguous() and grads_t.is_contiguous() and grads_t.shape == (vocab, rows)
    assert torch.equal(grads_t.float().T, grads.float())
    check_float8(grads, kernel_loss(*arguments, torch.float32)[1].double())


@interpreted
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("script", [train_gpt, train_gpt_2026])
def test_a_chunk_equals_float64_with_gradients(script, fp8, tiny, tiny_2026, monkeypatch):
    """Also those that the twin's backward pass multiplies by another gradient, here 2."""
    monkeypatch.setattr(kernels, "has_fp8", lambda device: fp8)
    hp = tiny if script is train_gpt else replace(tiny_2026, grad_s=2.0**9)
    hp = replace(hp, fp8=fp8, logit_softcap=15.0)
    arguments = kernels.example("chunk_loss", script.GPT(hp), hp, CPU, torch.float32, 32)
    head, x, targets, scale, *shares = arguments
    head.weight.data *= 0.2  # no value leaves the range of float8
    loss = kernels.fused_chunk_loss(*arguments)
    loss_grads = torch.autograd.grad(2 * loss, [x, head.weight])
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, head.weight))
    shares = shares[0].tolist() if shares else [1.0]
    targets = targets.view(32, -1)
    cap = SHIFTED if script is train_gpt_2026 else 15.0
    expected, grads = exact_loss(x64 @ w64.T, targets, cap, shares)
    assert loss.item() == pytest.approx(scale * expected, rel=5e-3 if fp8 else 1e-6)
    for found, right in zip(loss_grads, (grads @ w64, grads.T @ x64), strict=True):
        assert relative_error(found, 2 * scale * right) < (0.08 if fp8 else 2e-6)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "rows", "width", "hidden", "kilobytes"),
    [
        (torch.float32, 1200, 8, 136, 99),
        (torch.float16, 128, 64, 256, 163),
        (torch.float32, 130, 72, 300, 227),
        (torch.float32, 1200, 8, 136, 227),
    ],
)
def test_mlp_equals_float64_with_gradients(dtype, rows, width, hidden, kilobytes, monkeypatch):
    """Tiles are narrow on cards with 99 KB of shared memory; 1200 rows have more than eight rows of
    tiles. With 227 KB, three programs share all tiles of the forward pass."""
    monkeypatch.setattr(kernels, "card", lambda device: (3, kilobytes))
    inputs = [randn(1, rows, width), randn(hidden, width, seed=1), randn(width, hidden, seed=2)]
    inputs = [(t * t.size(-1) ** -0.5).to(dtype).requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = randn(1, rows, width, dtype=dtype, seed=3)
    out = kernels.FusedMLP.apply(*inputs)
    out.backward(grad)
    expected = F.relu(exact[0] @ exact[1].T) ** 2 @ exact[2].T
    expected.backward(grad.double())
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for found, right in zip(inputs, exact, strict=True):
        assert relative_error(found.grad, right.grad) < TOLERANCE[dtype]


@pytest.fixture
def fenced(monkeypatch):
    """Return fenced(tensor), a copy with fences of NaNs before and behind it in memory, aligned to
    16 bytes. From then on, the interpreter may neither read nor write a fence."""
    module = kernels.triton.runtime.interpreter
    fences, interpreter = [], module._interpreter

    def guard(access):
        def guarded(pointers, *given):
            mask = given[1] if access is interpreter.store else given[0]
            for first, last in fences:
                assert not (mask & (pointers >= first) & (pointers < last)).any()
            return access(pointers, *given)

        return guarded

    names = {name: getattr(interpreter, name) for name in dir(interpreter)}
    names |= {name: guard(names[name]) for name in ("load", "store")}
    monkeypatch.setattr(module, "_interpreter", SimpleNamespace(**names))

    def fence(tensor: torch.Tensor) -> torch.Tensor:
        margin = 2**16
        memory = tensor.new_empty(tensor.numel() + 2 * margin)
        inside = memory[margin:-margin].view(tensor.shape).copy_(tensor)
        for side in (memory[:margin], memory[margin + tensor.numel() :]):
            fences.append((side.data_ptr(), side.data_ptr() + side.nbytes))
        return inside

    return fence


@interpreted
def test_kernels_neither_read_nor_write_beyond_their_tensors(fenced):
    """The last tile of each kind is cut off."""
    described = kernels.TensorDescriptor.from_tensor
    a, b, out = fenced(randn(130, 72)), fenced(randn(72, 300, seed=1)), fenced(randn(130, 300))
    post, exact = fenced(randn(130, 300).square()), a.double() @ b.double()
    squares, grads = exact.relu() ** 2, exact * 2 * post.double().sqrt()
    of_a, of_out, sizes = described(a, [128, 32]), described(out, [128, 128]), (130, 300, 72)
    kernels.relu2_backward_kernel[3, 2](of_a, described(b, [32, 128]), post, of_out, *sizes, 32)
    assert relative_error(out, grads) < 1e-6
    of_w = described(fenced(b.T.contiguous()), [256, 32])
    kernels.relu2_forward_kernel[3,](of_a, of_w, of_out, *sizes, 32)
    assert relative_error(out, squares) < 1e-6
    tiles = *sizes, 300, 1, 128, 128, 32
    kernels.relu2_kernel[3, 2](a, b, post, out, None, None, None, None, *tiles)
    assert relative_error(out, grads) < 1e-6
    narrow, one, largest = fenced(out), fenced(torch.ones(1)), fenced(torch.zeros(1))
    kernels.relu2_kernel[3, 2](a, b, None, out, one, narrow, one, largest, *tiles)
    assert relative_error(out, squares) < 1e-6 and torch.equal(narrow, out.clamp(max=448))
    assert largest.item() == out.max()
    logits, targets = fenced(post), fenced(torch.arange(260).view(130, 2))
    shares, sums, grads, grads_t = map(fenced, (torch.ones(2), post[:, 0], out, out.T.contiguous()))
    numbers = 130, 300, 4.0, -1.0, 0.0, 1.0, 1e9, 2, 64, 128
    kernels.softcap_grad_kernel[3, 3](logits, targets, shares, sums, grads, grads_t, *numbers)
    assert torch.equal(grads.T, grads_t) and grads.isfinite().all()


@pytest.mark.parametrize("name", kernels.WRITTEN_FOR)
def test_each_kernel_was_written_for_the_formulas_as_they_are(name, tiny, tiny_2026):
    """If this fails, change the kernel with its formula, and then the digest in gpu_kernels.py."""
    of_july, of_august = (
        train_gpt_2026_08.GPT(replace(train_gpt_2026_08.RECORDS[name], vocab_size=512))
        for name in ("demo-89", "demo")
    )
    models = train_gpt.GPT(tiny), train_gpt_2026.GPT(tiny_2026), of_july, of_august
    models = [model for model in models if name in model.kernels]
    assert {kernels.digest(model, name) for model in models} == set(kernels.WRITTEN_FOR[name])


@pytest.fixture
def fake_kernels(monkeypatch):
    """Return install(name=kernel, ...): it returns a model with functions that square, or call
    these kernels."""

    def install(**kernel_of):
        example = randn(100).requires_grad_()

        def functions(model, name):
            def square(x):
                return kernel_of[name](x) if name in kernels.IN_USE else x.square()

            return [train_gpt.compiled if name == "compiled" else square]

        monkeypatch.setattr(kernels, "WRITTEN_FOR", dict.fromkeys(kernel_of, ("square",)))
        monkeypatch.setattr(kernels, "example", lambda *given: (example,))
        monkeypatch.setattr(kernels, "functions", functions)
        monkeypatch.setattr(kernels, "digest", lambda model, name: "square")
        return SimpleNamespace(kernels=tuple(kernel_of))

    return install


def broken(x):
    raise RuntimeError("PTX was\ninvalid")


def chosen(model, hp, all_reduce_=all_reduce_, device=CPU) -> tuple[list[str], list[str]]:
    """Return the kernels in use after a choice, and what it says."""
    lines = []
    kernels.choose_kernels(model, hp, device, all_reduce_, lines.append)
    return sorted(kernels.IN_USE), lines


def test_a_run_uses_kernels_that_build_and_agree_and_says_why_others_are_off(fake_kernels, tiny):
    model = fake_kernels(
        good=torch.square,
        wrong=torch.abs,
        broken=broken,
        wrong_gradient=lambda x: x.detach().square() + (x - x.detach()),
        rounded=lambda x: (1 + 1e-5) * x.square(),
        nan=lambda x: x.square() * math.nan,
    )
    used, lines = chosen(model, tiny)
    assert used == ["good", "rounded"] and len(lines) == 5
    assert lines[0].startswith("kernel wrong is off: in torch.float32 it deviates")
    assert lines[1] == "kernel broken is off: RuntimeError: PTX was invalid"
    assert lines[2].startswith("kernel wrong_gradient is off: in torch.float32 it deviates")
    assert lines[3] == "kernel nan is off: in torch.float32 it deviates from the formula by nan"
    assert lines[4] == "kernels: good rounded"


def test_without_kernels_or_a_gpu_nothing_is_compared(fake_kernels, tiny, monkeypatch):
    model = fake_kernels(good=torch.square)
    assert chosen(model, tiny)[0] == ["good"]
    monkeypatch.setattr(kernels, "fault", lambda *given: pytest.fail("compared"))
    assert chosen(model, replace(tiny, kernels=False)) == ([], [])
    monkeypatch.delenv("TRITON_INTERPRET")
    assert chosen(model, tiny) == ([], [])
    monkeypatch.setattr(torch.version, "hip", "7.0")  # as torch for AMD's cards
    gpu = SimpleNamespace(type="cuda")
    assert chosen(model, tiny, device=gpu) == ([], ["kernels: none"])


def test_a_kernel_is_on_only_if_it_agrees_on_all_ranks(fake_kernels, tiny):
    model = fake_kernels(here=torch.square, everywhere=torch.square)
    other = torch.tensor([torch.inf, 0])  # what the other rank found
    expected = ["kernel here is off: another rank cannot use it", "kernels: everywhere"]
    assert chosen(model, tiny, lambda votes: votes.add_(other)) == (["everywhere"], expected)


def found(name: str, times: dict) -> str:
    """Find no fault, as kernels.fault does, and times."""
    kernels.TIMES[name] = times[name]
    return ""


def test_a_kernel_is_on_only_if_it_is_not_slower_on_all_ranks_together(
    fake_kernels, tiny, monkeypatch
):
    """Each rank alone would choose otherwise than the other; the ranks' times are summed first. A
    rank logs its own times. A twentieth slower is noise."""
    model = fake_kernels(sum=torch.square, slow=torch.square)
    ranks = [  # milliseconds of the plain function and of its twin
        {"sum": [3.0, 1.0], "slow": [4.0, 3.0]},
        {"sum": [1.0, 3.2], "slow": [1.0, 3.0]},
    ]
    votes = []
    for times in ranks:  # what each rank gives to all_reduce_
        monkeypatch.setattr(kernels, "fault", lambda name, *_, t=times: found(name, t))
        chosen(model, tiny, lambda vote: votes.append(vote) or vote)
    used, lines = chosen(model, tiny, lambda vote: sum(votes))
    assert used == ["sum"] and lines == [
        "kernel sum: 3.20 ms, plain 1.00 ms",
        "kernel slow: 3.00 ms, plain 1.00 ms",
        "kernel slow is off: plain is faster",
        "kernels: sum",
    ]


@interpreted
@pytest.mark.parametrize("script", [train_gpt, train_gpt_2026])
def test_steps_with_kernels_are_those_without(script, tiny, tiny_2026, randomize, monkeypatch):
    """Adam's epsilon is one at which rounding noise stays noise."""
    hp = replace(tiny, adam_eps=1e-6, layers="long,none")
    if script is train_gpt_2026:
        rules = {"adam_rule": "cautious", "polar_express": True, "muon_beta2": 0.95}
        hp = replace(tiny_2026, adam_eps=1e-3, layers="long,none+x0", **rules)
    hp = replace(hp, num_layers=2, batch_seqs=1)
    tokens = torch.randint(0, 512, (1, 129), generator=torch.Generator().manual_seed(0))
    batch, losses = (tokens[:, :-1].int(), tokens[:, 1:]), []
    for choice in (False, True):
        model = randomize(script.GPT(hp))
        kernels.IN_USE.update(model.kernels if choice else ())
        optimizers = script.Optimizers(model, hp)
        moments = [script.Moment(step, hp) for step in range(3)]
        results = [train_gpt.train_step(model, optimizers, *batch, now) for now in moments]
        losses.append([result["loss"].item() for result in results])
    plain, fused = losses
    assert plain[2] < plain[0] - 0.1
    assert fused == pytest.approx(plain, abs=1e-4)
