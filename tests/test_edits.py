"""One line of train_gpt.py, edited, changes what compiled code computes, and as it changes what
uncompiled code does: no function has a second form for the compiler. And no kernel stands in for
what was edited."""

import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.utils import counters

import train_gpt
from runs import SCRIPT

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


# Each of these calls functions of the module m, compiled if that is allowed, and returns tensors.


def masks(m, hp):
    tokens = torch.arange(256, dtype=torch.int32)
    return [m.GPT(hp).masks(tokens, torch.tensor(70), torch.tensor(35))["long"].clamp(-1)]


def lists(m, hp):
    """Of a GPU's masks."""
    first = torch.arange(1024, dtype=torch.int32).sub(300).clamp(0)
    return m.compiled(m.block_lists)(first)[1:]


@torch.enable_grad()
def loss(m, hp):
    """Of a model of two layers, with all gradients."""
    model = drawn(m.GPT(replace(hp, num_layers=2, layers="long+v0,none")))
    loss = model(torch.arange(128, dtype=torch.int32), torch.arange(1, 129), m.Moment(0, hp))
    loss.backward()
    return [loss, *(p.grad.to_dense() for p in model.parameters())]


@torch.enable_grad()
def loss_in_float8(m, hp):
    """Of a head, in FP8, which is slow on a CPU."""
    head = drawn(m.Head(replace(hp, fp8=True)))
    x = randn(8, 32).requires_grad_()
    with patch.object(m, "fp8_supported", lambda device: True):
        loss = head.loss(x, torch.arange(8))
        loss.backward()
    return loss, x.grad, head.weight.grad


def muon(m, hp):
    buffer = randn(2, 8, 16) + 1
    arguments = randn(2, 8, 16), buffer, torch.tensor(0.9), True, m.zeropower_via_newtonschulz5
    return m.muon_updates(*arguments), buffer


def same(found, expected) -> bool:
    """Say whether tensors are equal but for rounding, in float8 to neighbours."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True)]
    return all((a - b).norm() <= 3e-3 * b.norm() for a, b in pairs)


EDITS = [
    (masks, "(position // BLOCK + (1 - blocks))", "(position // BLOCK + (2 - blocks))"),
    (lists, "(end - start + int(with_diagonal))", "(end - start)"),
    (loss, "F.relu(", "F.gelu("),
    (loss_in_float8, "grad.T, x, grad_s * x_s", "grad.T, x, 2 * grad_s * x_s"),
    (muon, "X = torch.baddbmm(X, B, X, beta=a)", "X = torch.baddbmm(X, B, X, beta=0.9 * a)"),
]


@pytest.mark.parametrize(("result_of", "old", "new"), EDITS)
@torch.no_grad()
def test_an_edited_line_changes_compiled_code_as_uncompiled(
    result_of, old, new, edited, tiny, compile_with
):
    """What is traced decides that. tests/slow has Inductor."""
    module = edited(old, new)
    expected = result_of(module, tiny)
    assert not same(result_of(train_gpt, tiny), expected)
    compile_with(aot_eager)
    module.compilation.allowed = True
    assert same(result_of(module, tiny), expected) and counters["stats"]["unique_graphs"]


# -----------------------------------------------------------------------------
# Kernels. What goes by a name is edited, or a helper of its helper, or assigned, or overridden.


def is_fit(name: str, model) -> bool:
    """Say whether a kernel was written for what a model calls by its name."""
    kernels = pytest.importorskip("gpu_kernels")
    return kernels.digest(model, name) in kernels.WRITTEN_FOR[name]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("chunk_loss", "2 * self.softcap * self(x)", "2 * self.softcap * self(2 * x)"),
        ("chunk_loss", "1.0 / scale", "1.001 / scale"),
        ("relu2_mlp", "F.relu(", "F.gelu("),
    ],
)
def test_a_kernel_never_replaces_a_function_that_was_edited_nor_one_whose_helper_was(
    name, old, new, edited, tiny
):
    """The script is a copy in another folder here."""
    assert is_fit(name, edited().GPT(tiny))
    model = edited(old, new).GPT(tiny)
    fault = pytest.importorskip("gpu_kernels").fault(name, model, tiny, torch.device("cpu"))
    assert "was edited" in fault


class Other(train_gpt.Head):
    """A head that computes the same, in a method of its own."""

    def logits(self, x):
        return train_gpt.Head.logits(self, x)


def test_a_kernel_never_replaces_what_a_fork_assigns_or_overrides(tiny, monkeypatch):
    model = train_gpt.GPT(tiny)
    for name, helper in (("chunk_loss", "to_fp8"), ("relu2_mlp", "relu_squared")):
        assert is_fit(name, model)
        with monkeypatch.context() as patched:
            patched.setattr(train_gpt, helper, lambda *given: None)
            assert not is_fit(name, model)
    model.lm_head = Other(tiny)
    assert not is_fit("chunk_loss", model)
