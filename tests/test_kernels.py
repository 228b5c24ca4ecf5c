"""Triton's kernels in its interpreter against float64, and the run that chooses them."""

import importlib.util
import sys
from dataclasses import replace

import pytest
import reference
import torch
import torch.nn.functional as F
from runs import val_losses

import train_gpt
from train_gpt import HERE, UserError, as_is, choose_kernels, sigmoid_form, to_fp8

kernels = pytest.importorskip("kernels", reason="Triton is not installed: it is for Linux")
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
    """In float64, of one number from tanh instead of sigmoids: the loss, and its gradient."""
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(reference.soft_capped(exact, cap), targets, reduction="sum")
    loss.backward()
    return loss.item(), exact.grad


SOFTCAPS = [(3, 1000, 15.0), (5, 8192, 30.0), (2, 20001, 38.0), (6, 9000, (23.0, 5.0, 7.5))]


@interpreted
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
@pytest.mark.parametrize("rows, vocab, cap", SOFTCAPS)
def test_loss_equals_float64(dtype, rows, vocab, cap):
    """Logits of one to three caps; gradients in the logits' place, as they are used."""
    logits = ((cap if isinstance(cap, float) else 23.0) * randn(rows, vocab)).to(dtype)
    targets, softcap = torch.arange(rows) * (vocab // rows) + vocab % rows, sigmoid_form(cap)
    expected, expected_grads = exact_loss(logits, targets, cap)
    assert kernels.fused_loss(logits, targets, softcap).item() == pytest.approx(expected, rel=1e-6)
    loss = kernels.fused_loss(logits, targets, softcap, None, 0.25, logits)
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
    capped = reference.soft_capped(exact, (23.0, 5.0, 7.5))
    for row, own in zip(capped, targets.tolist(), strict=True):
        for share, target in zip(shares, own, strict=True):
            total -= share * torch.log_softmax(row, 0)[target] if target >= 0 else 0.0
    total.backward()
    softcap = 23.0, 5.0, 7.5
    loss = kernels.fused_loss(logits, targets, softcap, torch.tensor(shares), 0.25, logits)
    first = F.cross_entropy(capped, targets[:, 0], reduction="sum").item()
    assert loss.item() == pytest.approx(first, rel=1e-6)
    assert relative_error(logits, 0.25 * exact.grad) < TOLERANCE[dtype]


@interpreted
def test_loss_in_float8_clamps_where_the_cast_would_give_inf():
    """The interpreter forgets to carry when it rounds up to a power of two, and cuts off below
    2^-14: such values are left out."""
    logits, targets = 5 * randn(4, 1000), torch.tensor([0, 999, 500, 17])
    grads = torch.zeros(4, 1000, dtype=torch.float8_e5m2)
    for scale, saturated in ((2.0**10, 0), (2.0**16, 4)):  # the targets' gradients reach -1 * scale
        kernels.fused_loss(logits, targets, sigmoid_form(15.0), None, scale, grads)
        exact = scale * exact_loss(logits, targets, 15.0)[1]
        expected = to_fp8(exact.float(), 1.0, torch.float8_e5m2).float()
        assert (expected == -57344).sum() == (grads.float() == -57344).sum() == saturated
        power_of_two = expected.abs().frexp().mantissa == 0.5
        kept = (exact.abs() > 2.0**-14) & ~(power_of_two & (expected.abs() > exact.abs()))
        assert kept.float().mean() > 0.5 and torch.equal(grads.float()[kept], expected[kept])


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, width, hidden, narrow",
    [(128, 64, 256, False), (130, 72, 300, False), (130, 72, 300, True), (1500, 8, 24, True)],
)
def test_mlp_equals_float64_with_gradients(dtype, rows, width, hidden, narrow):
    """In wide and narrow tiles; of 1500 rows, there is more than one row of tiles."""
    inputs = [randn(1, rows, width), randn(hidden, width, seed=1), randn(width, hidden, seed=2)]
    inputs = [(t * t.size(-1) ** -0.5).to(dtype).requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    grad = randn(1, rows, width, dtype=dtype, seed=3)
    out = kernels.fused_mlp(*inputs, narrow)
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
    found, exact = kernels.fused_symmetric(a), a.double() @ a.double().mT
    assert relative_error(found, exact) < TOLERANCE[dtype] and torch.equal(found, found.mT)
    both = kernels.fused_symmetric(a, found, 2.0315, -4.775)
    exact = 2.0315 * exact - 4.775 * found.double()
    assert relative_error(both, exact) < TOLERANCE[dtype] and torch.equal(both, both.mT)


@pytest.fixture
def fake_kernels(monkeypatch):
    """fake_kernels(name=twin, ...): those are all kernels then, of plain functions that square."""

    def install(**twins):
        monkeypatch.setattr(train_gpt, "KERNELS", {})
        monkeypatch.setattr(kernels, "TWINS", twins)
        monkeypatch.setattr(train_gpt, "TWINS", twins)
        example = randn(100).requires_grad_()
        monkeypatch.setattr(kernels, "EXAMPLES", dict.fromkeys(twins, lambda *given: (example,)))
        for name in twins:
            plain = lambda x: x.square()  # noqa: E731
            plain.__name__ = name
            train_gpt.Kernel(plain)
        return train_gpt.KERNELS

    return install


def broken(x):
    raise RuntimeError("PTX was\ninvalid")


def chosen(hp) -> tuple[list[str], list[str]]:
    """The kernels in use after a choice on a CPU, and what it says."""
    lines = []
    choose_kernels(hp, torch.device("cpu"), log=lines.append)
    return train_gpt.kernels_in_use(), lines


def test_auto_uses_kernels_that_build_and_agree_and_says_of_others_why(fake_kernels, tiny):
    fake_kernels(
        good=torch.square,
        wrong=torch.abs,
        broken=broken,
        nan=lambda x: x * torch.nan,
        wrong_gradient=lambda x: x.detach().square() + (x - x.detach()),
        nan_gradient=lambda x: x.square() + 0 * (x - x.detach()).sqrt(),
        slightly_off=lambda x: 1.005 * x.square(),
    )
    used, lines = chosen(tiny)
    assert used == ["good", "slightly_off"] and len(lines) == 6
    assert lines[0].startswith("kernel wrong is off: it deviates from the plain function by ")
    assert lines[1] == "kernel broken is off: RuntimeError: PTX was invalid"
    assert lines[2] == "kernel nan is off: it deviates from the plain function by nan"
    assert lines[3].startswith("kernel wrong_gradient is off: it deviates")
    assert lines[4] == "kernel nan_gradient is off: it deviates from the plain function by nan"
    assert lines[5] == "kernels: good slightly_off"


def test_a_kernel_that_only_compiles_wrongly_is_off(fake_kernels, tiny):
    """What is compared is compiled as the run compiles it."""
    fake_kernels(good=torch.square)
    compiled, lines = [], []

    def compile_(function):
        compiled.append(function)
        return broken if function is torch.square else function

    choose_kernels(tiny, torch.device("cpu"), compile_, lines.append)
    assert len(compiled) == 2 and compiled[1] is torch.square
    assert lines == ["kernel good is off: RuntimeError: PTX was invalid", "kernels: none"]


def test_on_and_off_compare_nothing(fake_kernels, tiny, monkeypatch):
    fake_kernels(good=torch.square, broken=broken)
    monkeypatch.setattr(train_gpt, "fault", lambda *given: pytest.fail("compared"))
    for choice, used, line in (("on", ["good", "broken"], "good broken"), ("off", [], "none")):
        reason = ", --kernels off" if choice == "off" else ""
        assert chosen(replace(tiny, kernels=choice)) == (used, [f"kernels: {line}{reason}"])


def test_a_kernel_is_on_only_if_it_agrees_on_all_ranks(fake_kernels, tiny, monkeypatch):
    fake_kernels(here=torch.square, everywhere=torch.square)
    other = torch.tensor([1.0, 0.0])  # what the other rank found
    monkeypatch.setattr(train_gpt, "all_reduce_", lambda tensors: tensors[0].add_(other))
    expected = ["kernel here is off: another rank cannot use it", "kernels: everywhere"]
    assert chosen(tiny) == (["everywhere"], expected)


@interpreted
@pytest.mark.parametrize("name", train_gpt.KERNELS)
def test_twins_agree_on_the_examples_and_a_mistake_in_each_is_noticed(name, tiny, monkeypatch):
    """In float32, in which the interpreter is exact; it is slow, and takes few rows of logits."""
    plain, example = train_gpt.KERNELS[name].plain, (tiny, torch.device("cpu"), torch.float32, 0)
    arguments = kernels.EXAMPLES[name](*example)
    if name == "softcapped_cross_entropy":
        arguments = [a[:32] if torch.is_tensor(a) else a for a in arguments]
    twins = [kernels.outcome(twin, arguments) for twin in (plain, kernels.TWINS[name])]
    for expected, found in zip(*twins, strict=True):
        assert relative_error(found, expected) < 1e-5
    monkeypatch.setitem(kernels.EXAMPLES, name, lambda *given: arguments)
    assert kernels.fault(plain, as_is, *example) == ""
    monkeypatch.setitem(kernels.TWINS, name, lambda *given: 1.1 * plain(*given))
    found = kernels.fault(plain, as_is, *example)
    assert found.startswith("it deviates from the plain function by ")
    assert 0.09 < float(found.split()[-1]) < 0.3


def test_the_comparison_notices_rows_that_change_places(fake_kernels, tiny):
    """In the gradients alone: what comes back from above must differ from row to row."""

    class Shuffled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.square()

        @staticmethod
        def backward(ctx, grad):
            return 2 * ctx.saved_tensors[0] * grad.roll(1, 0)

    fake_kernels(shuffled=Shuffled.apply)
    used, lines = chosen(tiny)
    assert not used and lines[0].startswith("kernel shuffled is off: it deviates")


def test_kernels_without_a_gpu_are_refused(monkeypatch, tiny):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(UserError, match="--kernels on: Triton wants a CUDA GPU"):
        chosen(replace(tiny, kernels="on"))
    used, (line,) = chosen(tiny)
    assert not used and line.startswith("kernels: none, Triton wants a CUDA GPU")


@interpreted
def test_steps_with_kernels_are_those_without(tiny, randomize):
    """Three of a small model; tests/slow has a run of fifty. Adam's epsilon is as always where sums
    differ."""
    hp = replace(tiny, num_layers=2, layers="long,none+x0", batch_seqs=1, adam_eps=1e-6)
    tokens = torch.randint(0, 512, (1, 129), generator=torch.Generator().manual_seed(0))
    losses = []
    for choice in ("off", "on"):
        choose_kernels(replace(hp, kernels=choice), torch.device("cpu"))
        assert len(train_gpt.kernels_in_use()) == (3 if choice == "on" else 0)
        model = randomize(train_gpt.GPT(hp))
        optimizers = train_gpt.Optimizers(model, hp)
        batch = tokens[:, :-1].int(), tokens[:, 1:]
        steps = [train_gpt.train_step(model, optimizers, *batch, i)[0].item() for i in range(3)]
        losses.append(steps)
    plain, fused = losses
    assert plain[2] < plain[0] - 0.1
    assert fused == pytest.approx(plain, abs=1e-4)


def test_train_gpt_runs_without_kernels_py(flags, capsys, monkeypatch, tmp_path):
    """As where Triton is missing: it trains as with kernels off, and says why it has none."""
    monkeypatch.setitem(sys.modules, "kernels", None)
    spec = importlib.util.spec_from_file_location("alone", HERE / "train_gpt.py")
    alone = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "alone", alone)
    spec.loader.exec_module(alone)
    alone.main([*flags, "--num_iterations", "2"])
    text = capsys.readouterr().out
    assert "kernels: none, kernels.py or Triton is missing" in text
    train_gpt.main([*flags, "--num_iterations", "2", "--kernels", "off", "--run_id", "other"])
    assert val_losses(text) == val_losses(capsys.readouterr().out) and val_losses(text)
    with pytest.raises(SystemExit):
        alone.main([*flags, "--kernels", "on", "--run_id", "third"])
    assert "--kernels on: kernels.py or Triton is missing" in capsys.readouterr().err
