"""One line of train_gpt.py, edited, changes what compiled code computes, and as it changes what
uncompiled code does: no function has a second form for the compiler.

Here are functions alone, each compiled by Inductor on the CPU.
"""

import importlib.util
import itertools
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

import train_gpt
from runs import SCRIPT

needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="there is no C++ compiler (g++), which Inductor needs"
)
NUMBERS = itertools.count()


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """Return load(old, new): it returns train_gpt.py as a module in which the one line that has
    `old` has `new` in its place."""
    source = Path(SCRIPT).read_text("utf-8")

    def load(old: str = "", new: str = ""):
        assert not old or source.count(old) == 1, f"{source.count(old)} lines have {old!r}"
        name = f"edited_{next(NUMBERS)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(old, new) if old else source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    """Draw all parameters of a module, and return it."""
    for p in module.parameters():
        p.data = randn(*p.shape) if p.ndim < 2 else randn(*p.shape) * p.size(-1) ** -0.5
    return module


# Each of these calls a function of the module m, compiled if that is allowed, and returns tensors.


def masks(m, hp):
    tokens = torch.arange(256, dtype=torch.int32)
    model = m.GPT(replace(hp, window_rule="tokens"))
    return [model.masks(tokens, torch.tensor(70), torch.tensor(35))["long"].clamp(-1)]


def lists(m, hp):
    first = torch.arange(1024, dtype=torch.int32).sub(300).clamp(0)
    return m.compiled(m.block_lists)(first)[1:]


def angles(m, hp):
    return m.GPT(hp).rotary(torch.arange(64), m.Moment(0, hp))


def attention(m, hp):
    layer = drawn(m.CausalSelfAttention(hp, m.Layer("long", "0")))
    rotary = m.rotary_table(torch.arange(8)[:, None], m.rotary_frequencies(hp, torch.device("cpu")))
    mask = m.make_mask(torch.zeros(8, dtype=torch.int32))
    return m.compiled(layer.forward)(randn(1, 8, 32), randn(8, 32), rotary, mask)[:1]


@torch.enable_grad()
def mlp(m, hp):
    """With its gradients."""
    layer = drawn(m.MLP(hp))
    x = randn(8, 32).requires_grad_()
    out = m.compiled(layer.forward)(x)
    return [out, *torch.autograd.grad(out, [x, *layer.parameters()], randn(8, 32) + 1)]


def block(m, hp):
    """Without attention."""
    layer = drawn(m.Block(hp, m.Layer("none")))
    x, x0 = (randn(1, 8, 32) + i for i in range(2))
    return m.compiled(layer.forward)(x, x0, None, None, None, None, None)[:1]


def layers(m, hp):
    """Two of them, as a run compiles them; the second adds the output of the first."""
    hp = replace(hp, num_layers=2, layers="none,none")
    return [drawn(m.GPT(hp)).hidden(torch.arange(128, dtype=torch.int32), m.Moment(0, hp))]


@torch.enable_grad()
def chunk(m, hp):
    """The loss of a head, and its gradients."""
    head = drawn(m.Head(hp))
    x = randn(8, 32).requires_grad_()
    loss = head.loss(x, torch.arange(8))
    loss.backward()
    return loss, x.grad, head.weight.grad


@torch.enable_grad()
def chunk_in_float8(m, hp):
    """The same in FP8, which is slow on a CPU."""
    with patch.object(m, "fp8_supported", lambda device: True):
        return chunk(m, hp)


def muon(m, hp):
    buffer = randn(2, 8, 16) + 1
    arguments = randn(2, 8, 16), buffer, torch.tensor(0.9), True, m.zeropower_via_newtonschulz5
    return m.muon_updates(*arguments), buffer


def same(found, expected) -> bool:
    """Say whether tensors are equal but for rounding, in float8 to neighbours."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return all((a - b).norm() <= 3e-3 * b.norm() for a, b in pairs)


@torch.no_grad()
def check_edit(result_of, old: str, new: str, edited, hp) -> None:
    """Compare the edited source, compiled and not, and the source as it is."""
    module = edited(old, new)
    expected = result_of(module, hp)
    assert not same(result_of(train_gpt, hp), expected)
    torch._dynamo.reset()
    counters.clear()
    module.compiled.allowed = True
    assert same(result_of(module, hp), expected)
    assert counters["stats"]["unique_graphs"] and not counters["graph_break"]


EDITS = [
    (masks, "position + (1 - window)", "position + (2 - window)"),
    (lists, "counts = end - start + int(is_partial)", "counts = end - start"),
    (angles, "return angle.cos(), angle.sin()", "return angle.cos(), -angle.sin()"),
    (attention, "(x.size(-1),), eps=eps)", "(x.size(-1),), eps=0.5)"),
    (attention, "cos[..., None, :] + pairs.flip(-2)", "cos[..., None, :] - pairs.flip(-2)"),
    (attention, "mask.type_as(q), scale=scale)", "mask.type_as(q), scale=2 * scale)"),
    (attention, "v = self.lambdas[0] * v", "v = self.lambdas[1] * v"),
    (mlp, "F.relu(", "F.gelu("),
    (block, "return x + self.mlp(", "return x - self.mlp("),
    (layers, "x = x + skip_weight * skip", "x = x - skip_weight * skip"),
    (chunk, "2 * self.softcap * self(x)", "2 * self.softcap * self(2 * x)"),
    (chunk, "return scale * F.cross_entropy(", "return scale * 2 * F.cross_entropy("),
    (chunk, "self.weight.type_as(x))", "-self.weight.type_as(x))"),
    (chunk_in_float8, "return scaled_matmul(x, w.T", "return 2 * scaled_matmul(x, w.T"),
    (
        chunk_in_float8,
        "grad_w = scaled_matmul(grad.T, x, ",
        "grad_w = scaled_matmul(grad.T, x, 2 * ",
    ),
    (chunk_in_float8, "(x * scale).clamp(", "(x + scale).clamp("),
    (chunk_in_float8, "1.0 / scale", "2.0 / scale"),
    (muon, "grad.lerp(buffer, momentum)", "grad.lerp(buffer, 0 * momentum)"),
    (muon, "X = torch.baddbmm(X, B, X, beta=a)", "X = torch.baddbmm(X, B, X, beta=0.9 * a)"),
    (muon, "A.mT, beta=b, alpha=c)", "A.mT, beta=b, alpha=0.9 * c)"),
]


@needs_compiler
@pytest.mark.parametrize(("result_of", "old", "new"), EDITS)
def test_an_edited_line_changes_compiled_code_as_uncompiled(result_of, old, new, edited, tiny):
    check_edit(result_of, old, new, edited, tiny)


# -----------------------------------------------------------------------------
# Edits and Triton twins

OF_TWINS = [
    ("chunk_loss", "return scale * F.cross_entropy(", "return scale * 2 * F.cross_entropy("),
    ("chunk_loss", "2 * self.softcap * self(x)", "2 * self.softcap * self(2 * x)"),
    ("chunk_loss", "self.weight.type_as(x))", "-self.weight.type_as(x))"),
    ("chunk_loss", "grad = to_fp8(grad, grad_s", "grad = to_fp8(grad, 2 * grad_s"),
    ("chunk_loss", "(x * scale).clamp(", "(x + scale).clamp("),
    ("chunk_loss", "1.0 / scale", "1.001 / scale"),
    ("chunk_loss", ">= (8, 9)", ">= (9, 0)"),
    ("relu2_mlp", "F.relu(", "F.gelu("),
]


def was_edited(name: str, model) -> bool:
    """Say whether what a model calls by the name of a twin is not what that was written for."""
    kernels = pytest.importorskip("gpu_kernels")
    return kernels.digest(model, name) not in kernels.WRITTEN_FOR[name]


@pytest.mark.parametrize(("name", "old", "new"), OF_TWINS)
def test_a_twin_never_replaces_a_function_that_was_edited_nor_one_whose_helper_was(
    name, old, new, edited, tiny
):
    """The script is a copy in another folder here."""
    kernels = pytest.importorskip("gpu_kernels")
    assert not was_edited(name, edited().GPT(tiny))
    model = edited(old, new).GPT(tiny)
    assert "was edited" in kernels.fault(name, model, tiny, torch.device("cpu"))


class Other(train_gpt.Head):
    """A head that computes the same, in methods of its own."""

    def logits(self, x):
        return train_gpt.Head.logits(self, x)

    def forward(self, x):
        return train_gpt.Head.forward(self, x)

    def chunk_loss(self, x, targets, scale):
        return train_gpt.Head.chunk_loss(self, x, targets, scale)


OTHERS = [(train_gpt.Head, name, vars(Other)[name]) for name in ("logits", "forward", "chunk_loss")]
OTHERS += [(train_gpt, name, lambda *given: None) for name in ("to_fp8", "FP8Linear", "relu2_mlp")]


@pytest.mark.parametrize(("owner", "name", "value"), OTHERS)
def test_a_twin_never_replaces_what_a_fork_assigns_or_overrides(
    owner, name, value, tiny, monkeypatch
):
    model = train_gpt.GPT(tiny)
    twin = name if name in train_gpt.GPT.kernels else "chunk_loss"
    assert not was_edited(twin, model)
    monkeypatch.setattr(owner, name, value)
    assert was_edited(twin, model)
    monkeypatch.undo()
    if owner is train_gpt.Head:
        model.lm_head = type("Its", (train_gpt.Head,), {name: value})(tiny)
        assert was_edited(twin, model)
