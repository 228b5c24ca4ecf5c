"""Triton's kernels in its interpreter against float64, and the run that chooses them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import reference
import torch
import torch.nn.functional as F
from reference import relative_error

import train_gpt
from train_gpt import Kernel, UserError, as_is, choose_kernels, names_in_use, to_fp8

kernels = pytest.importorskip("kernels", reason="Triton is not installed: it is for Linux")
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs kernels itself")

DTYPES = (torch.float32, torch.float16)  # the interpreter's bfloat16 matmul is broken
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
PLAIN = train_gpt.softcapped_cross_entropy, train_gpt.relu2_mlp, train_gpt.symmetric_matmul


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Turn Triton's interpreter on; what kernels write into begins as NaN."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
    for kernel in PLAIN:
        kernel.use = False


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_loss(logits, targets, cap):
    """Return the loss in float64, from tanh instead of sigmoids, and its gradient."""
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(reference.soft_capped(exact, cap), targets, reduction="sum")
    loss.backward()
    return loss.item(), exact.grad


@interpreted
@pytest.mark.parametrize(
    ("dtype", "rows", "vocab", "cap", "tolerance"),
    [
        (torch.float32, 3, 1000, 15.0, 2e-6),
        (torch.float16, 5, 8192, 30.0, 1e-3),
        (torch.bfloat16, 2, 20001, 38.0, 5e-3),
    ],
)
def test_loss_equals_float64(dtype, rows, vocab, cap, tolerance):
    """Logits reach one to three caps; gradients come in the logits' place, as they are used."""
    logits = (cap * randn(rows, vocab)).to(dtype)
    targets = torch.arange(rows) * (vocab // rows) + vocab % rows
    expected, expected_grads = exact_loss(logits, targets, cap)
    assert kernels.fused_loss(logits, targets, cap).item() == pytest.approx(expected, rel=1e-6)
    loss = kernels.fused_loss(logits, targets, cap, 0.25, logits)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert relative_error(logits, 0.25 * expected_grads) < tolerance


@interpreted
def test_loss_in_float8_clamps_where_the_cast_would_give_inf():
    """The interpreter forgets to carry when it rounds up to a power of two, and cuts off below
    2^-14: such values are left out."""
    logits, targets = 5 * randn(4, 1000), torch.tensor([0, 999, 500, 17])
    grads = torch.zeros(4, 1000, dtype=torch.float8_e5m2)
    for scale, saturated in ((2.0**10, 0), (2.0**16, 4)):  # the targets' gradients reach -1 * scale
        kernels.fused_loss(logits, targets, 15.0, scale, grads)
        exact = scale * exact_loss(logits, targets, 15.0)[1]
        expected = to_fp8(exact.float(), 1.0, torch.float8_e5m2).float()
        assert (expected == -57344).sum() == (grads.float() == -57344).sum() == saturated
        power_of_two = expected.abs().frexp().mantissa == 0.5
        kept = (exact.abs() > 2.0**-14) & ~(power_of_two & (expected.abs() > exact.abs()))
        assert kept.float().mean() > 0.5 and torch.equal(grads.float()[kept], expected[kept])


@interpreted
@pytest.mark.parametrize(
    ("dtype", "rows", "width", "hidden", "narrow"),
    [
        (torch.float16, 128, 64, 256, False),
        (torch.float32, 130, 72, 300, False),
        (torch.float32, 1200, 8, 136, True),
    ],
)
def test_mlp_equals_float64_with_gradients(dtype, rows, width, hidden, narrow, monkeypatch):
    """Tiles are narrow on cards with little shared memory; 1200 rows have more than eight rows of
    tiles."""
    monkeypatch.setattr(kernels, "shared_memory_is_small", lambda device: narrow)
    inputs = [randn(1, rows, width), randn(hidden, width, seed=1), randn(width, hidden, seed=2)]
    inputs = [(t * t.size(-1) ** -0.5).to(dtype).requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = randn(1, rows, width, dtype=dtype, seed=3)
    out = kernels.fused_mlp(*inputs)
    out.backward(grad)
    expected = F.relu(exact[0] @ exact[1].T) ** 2 @ exact[2].T
    expected.backward(grad.double())
    assert relative_error(out, expected) < TOLERANCE[dtype]
    for found, right in zip(inputs, exact, strict=True):
        assert relative_error(found.grad, right.grad) < TOLERANCE[dtype]


@interpreted
@pytest.mark.parametrize(
    ("dtype", "count", "n", "k"),
    [(torch.float16, 1, 128, 64), (torch.float32, 3, 200, 72), (torch.float32, 2, 24, 300)],
)
def test_symmetric_products_equal_float64_and_are_symmetric(dtype, count, n, k):
    a = (randn(count, n, k) * k**-0.5).to(dtype)
    found, exact = kernels.fused_symmetric(a), a.double() @ a.double().mT
    assert relative_error(found, exact) < TOLERANCE[dtype] and torch.equal(found, found.mT)
    both = kernels.fused_symmetric(a, found, 2.0315, -4.775)
    exact = 2.0315 * exact - 4.775 * found.double()
    assert relative_error(both, exact) < TOLERANCE[dtype] and torch.equal(both, both.mT)


def relu2_mlp(x, w_in, w_out):
    """Compute nearly what train_gpt.py's function of this name computes."""
    return F.linear(F.leaky_relu(F.linear(x, w_in), 0.01).square(), w_out)


@pytest.mark.parametrize("kernel", PLAIN)
def test_each_twin_was_written_for_the_plain_function_as_it_is(kernel):
    """If this fails, change the twin with its function, and then the digest in kernels.py."""
    assert kernels.WRITTEN_FOR[kernel.name] == kernels.digest(kernel.plain)


def test_a_twin_never_replaces_a_function_that_was_edited(tiny):
    found = kernels.fault(relu2_mlp, as_is, tiny, torch.device("cpu"), torch.float32, False)
    assert "was edited" in found


def square(name: str) -> Kernel:
    """Return a kernel of this name whose plain function squares."""

    def plain(x):
        return x.square()

    plain.__name__ = name
    return Kernel(plain)


@pytest.fixture
def fake_kernels(monkeypatch):
    """Return install(name=twin, ...): it returns a model with kernels that square."""

    def install(**twins):
        example = randn(100).requires_grad_()
        for module in (kernels, train_gpt):
            monkeypatch.setattr(module, "TWINS", twins)
        monkeypatch.setattr(kernels, "EXAMPLES", dict.fromkeys(twins, lambda *given: (example,)))
        monkeypatch.setattr(kernels, "WRITTEN_FOR", dict.fromkeys(twins, "square"))
        monkeypatch.setattr(kernels, "digest", lambda plain: "square")
        return SimpleNamespace(kernels=tuple(map(square, twins)), compile_=as_is)

    return install


def broken(x):
    raise RuntimeError("PTX was\ninvalid")


def chosen(model, hp) -> tuple[list[str], list[str]]:
    """Return the kernels in use after a choice on a CPU, and what it says."""
    lines = []
    choose_kernels(model, hp, torch.device("cpu"), log=lines.append)
    return names_in_use(model.kernels), lines


class Shuffled(torch.autograd.Function):
    """A square whose gradients are in wrong rows: these must differ to show it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad.roll(1, 0)


def test_auto_uses_kernels_that_build_and_agree_and_says_why_others_are_off(fake_kernels, tiny):
    model = fake_kernels(
        good=torch.square,
        wrong=torch.abs,
        broken=broken,
        nan=lambda x: x * torch.nan,
        wrong_gradient=lambda x: x.detach().square() + (x - x.detach()),
        nan_gradient=lambda x: x.square() + 0 * (x - x.detach()).sqrt(),
        shuffled=Shuffled.apply,
        slightly_off=lambda x: 1.005 * x.square(),
    )
    used, lines = chosen(model, tiny)
    off = ["wrong", "broken", "nan", "wrong_gradient", "nan_gradient", "shuffled"]
    assert used == ["good", "slightly_off"] and len(lines) == 7
    for name, line in zip(off, lines, strict=False):
        reason = "RuntimeError: PTX was invalid" if name == "broken" else "it deviates"
        assert line.startswith(f"kernel {name} is off: {reason}")
    assert lines[6] == "kernels: good slightly_off"


def test_what_is_compared_is_compiled_as_the_run_compiles_it(fake_kernels, tiny):
    model = fake_kernels(good=torch.square)
    model.compile_ = lambda function: broken if function is torch.square else function
    assert chosen(model, tiny) == ([], ["kernel good is off: RuntimeError: PTX was invalid"])


def test_on_and_off_compare_nothing(fake_kernels, tiny, monkeypatch):
    model = fake_kernels(good=torch.square, broken=broken)
    monkeypatch.setattr(train_gpt, "fault", lambda *given: pytest.fail("compared"))
    both = ["good", "broken"]
    assert chosen(model, replace(tiny, kernels="on")) == (both, ["kernels: good broken"])
    assert chosen(model, replace(tiny, kernels="off")) == ([], [])


def test_a_kernel_is_on_only_if_it_agrees_on_all_ranks(fake_kernels, tiny, monkeypatch):
    model = fake_kernels(here=torch.square, everywhere=torch.square)
    other = torch.tensor([1.0, 0.0])  # what the other rank found
    monkeypatch.setattr(train_gpt, "all_reduce_", lambda tensors: tensors[0].add_(other))
    expected = ["kernel here is off: another rank cannot use it", "kernels: everywhere"]
    assert chosen(model, tiny) == (["everywhere"], expected)


@interpreted
@pytest.mark.parametrize("kernel", PLAIN, ids=lambda kernel: kernel.name)
def test_twins_agree_on_the_examples(kernel, tiny, monkeypatch):
    """In float32, in which the interpreter is exact; of few rows of logits: it is slow."""
    name, example = kernel.name, (tiny, torch.device("cpu"), torch.float32, False)
    assert kernel.fused is kernels.TWINS[name]
    arguments = kernels.EXAMPLES[name](*example)
    if name == "softcapped_cross_entropy":
        arguments = [a[:32] if torch.is_tensor(a) else a for a in arguments]
    twins = [kernels.outcome(twin, arguments) for twin in (kernel.plain, kernel.fused)]
    for expected, found in zip(*twins, strict=True):
        assert relative_error(found, expected) < 1e-5
    monkeypatch.setitem(kernels.EXAMPLES, name, lambda *given: arguments)
    assert kernels.fault(kernel.plain, as_is, *example) == ""


def test_kernels_without_a_gpu_are_refused(monkeypatch, tiny):
    monkeypatch.delenv("TRITON_INTERPRET")
    model = train_gpt.GPT(tiny)
    with pytest.raises(UserError, match="--kernels on: Triton wants a CUDA GPU"):
        chosen(model, replace(tiny, kernels="on"))
    assert chosen(model, tiny) == ([], [])


@interpreted
def test_steps_with_kernels_are_those_without(tiny, randomize):
    """Adam's epsilon is one at which rounding noise stays noise."""
    hp = replace(tiny, num_layers=2, layers="long,none", batch_seqs=1, adam_eps=1e-6)
    tokens = torch.randint(0, 512, (1, 129), generator=torch.Generator().manual_seed(0))
    losses = []
    for choice in ("off", "on"):
        model = randomize(train_gpt.GPT(hp))
        choose_kernels(model, replace(hp, kernels=choice), torch.device("cpu"))
        assert len(names_in_use(model.kernels)) == (3 if choice == "on" else 0)
        optimizers = train_gpt.Optimizers(model, hp)
        batch = tokens[:, :-1].int(), tokens[:, 1:]
        moments = [train_gpt.moment(step, hp) for step in range(2)]
        results = [train_gpt.train_step(model, optimizers, *batch, now) for now in moments]
        losses.append([result[0].item() for result in results])
    plain, fused = losses
    assert plain[1] < plain[0] - 0.1
    assert fused == pytest.approx(plain, abs=1e-4)
