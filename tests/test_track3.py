"""forks/train_gpt_track3.py against its specification in float64, and the optimizer that README
shows."""

import importlib
import json
import math
import re
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import train_gpt_track3 as track
from conftest import language
from runs import Program, console_of, error_of, rows, val_losses
from train_gpt_track3 import RECORDS, Hyperparameters, Optimizers, Run

import train_gpt
from train_gpt import HERE, train_step

MUON, ADAMW = RECORDS["muon"], RECORDS["adamw"]
OWN = re.search(
    r"```python\n([^`]*train_gpt_track3.*?)```", (HERE / "forks/README.md").read_text("utf-8"), re.S
)[1]
main = partial(train_gpt.main, run=Run)


@pytest.fixture
def small() -> Hyperparameters:
    """Return a very small demo with two contexts in each of two micro-batches."""
    return replace(
        RECORDS["demo"],
        vocab_size=256,
        model_dim=32,
        head_dim=16,
        num_layers=2,
        context_len=128,
        seq_len=256,
        batch_seqs=2,
        val_seq_len=256,
        val_tokens=512,
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


# -----------------------------------------------------------------------------
# Model


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 2.0**-23).sqrt()


def turned(x: torch.Tensor) -> torch.Tensor:
    """Turn pairs of channels (T, D): pair i of the first D/4 by 1024^(-i / (D/4 - 1)) a token,
    clockwise, as complex numbers; the other pairs not at all."""
    pairs = x.size(1) // 2
    rate = torch.tensor([1024 ** (-i / (pairs // 2 - 1)) for i in range(pairs // 2)])
    rate = torch.cat([rate.double(), torch.zeros(pairs // 2)])
    angle = torch.arange(len(x))[:, None] * rate
    z = torch.complex(x[:, :pairs], x[:, pairs:]) * torch.exp(-1j * angle)
    return torch.cat([z.real, z.imag], dim=1)


def loss_of_context(w: dict, hp: Hyperparameters, tokens, targets) -> torch.Tensor:
    """Return the summed loss of one context, from float64 weights by their names."""
    x = rms(w["embed.weight"][tokens]) * w["norm1.gains"]
    hidden = torch.ones(len(tokens), len(tokens)).triu(1).bool()
    for i in range(hp.num_layers):
        own = {n.removeprefix(f"blocks.{i}."): v for n, v in w.items() if f"blocks.{i}." in n}

        def linear(name, x, own=own):
            return x @ own[f"{name}.weight"].T + own[f"{name}.bias"]

        h, heads = rms(x) * own["norm1.gains"], []
        q, k, v = (linear(name, h).split(hp.head_dim, dim=1) for name in "qkv")
        for a, b, c in zip(q, k, v, strict=True):
            scores = 0.12 * turned(rms(a)) @ turned(rms(b)).T
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(1) @ c)
        x = x + linear("attn_proj", torch.cat(heads, dim=1))
        x = x + linear("mlp_proj", linear("fc", rms(x) * own["norm2.gains"]).clamp(min=0) ** 2)
    logits = (rms(x) * w["norm2.gains"]) @ w["lm_head.weight"].T + w["lm_head.bias"]
    logits = 15 * logits / (logits**2 + 225).sqrt()
    right = logits[torch.arange(len(targets)), targets]
    return (logits.logsumexp(1) - right).sum()


@pytest.mark.parametrize("float32_gains", [False, True])
def test_loss_and_gradients_are_those_of_the_specification(
    float32_gains, small, randomize, monkeypatch
):
    """Gradients are of the sum over the whole batch."""
    hp = replace(small, float32_gains=float32_gains)
    model = randomize(track.GPT(hp))
    weights = {n: p.detach().double().requires_grad_() for n, p in model.named_parameters()}
    tokens = torch.randint(256, (2, 257), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(train_gpt, "END_OF_TEXT", tokens[0, 40].item())  # hides nothing here
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    losses = []
    for x, y in zip(inputs.reshape(4, 128), targets.reshape(4, 128), strict=True):
        losses.append(loss_of_context(weights, hp, x, y))
    sum(losses).backward()

    optimizers, found = Optimizers(model, hp), dict(model.named_parameters())
    monkeypatch.setattr(optimizers, "step", lambda now: [])
    loss = train_step(model, optimizers, inputs.int(), targets, Run.moment(0, hp))[0]
    assert loss.item() == pytest.approx(sum(losses).item() / 512, rel=1e-6)
    assert len(found) == 5 + 14 * hp.num_layers
    for name, p in found.items():
        grad = p.grad / hp.batch_seqs  # as Optimizers.step divides
        assert relative_error(grad, weights[name].grad) < 2e-5, name


def test_both_records_have_the_benchmarks_number_of_parameters():
    for hp in (MUON, ADAMW):
        with torch.device("meta"):
            model = track.GPT(hp)
        assert sum(p.numel() for p in model.parameters()) == 162_354_816


@pytest.mark.parametrize("hp", [MUON, ADAMW], ids=["muon", "adamw"])
def test_first_weights_have_the_published_distributions(hp):
    model = track.GPT(replace(hp, num_layers=1, vocab_size=1024))
    for name, p in model.named_parameters():
        p = p.detach().flatten()
        if name.endswith("gains"):
            assert (p == 1).all()
        elif name.startswith("lm_head") or "proj" in name:
            assert not p.any()
        elif name.startswith("embed"):
            assert p.std().item() == pytest.approx(1, rel=0.01)
        elif hp is MUON and name.endswith("bias"):
            assert not p.any()
        elif hp is MUON:
            assert p.std().item() == pytest.approx((0.33 / 768) ** 0.5, rel=0.01)
        else:
            assert p.abs().max().item() == pytest.approx(768**-0.5, rel=0.01)
            assert p.std().item() == pytest.approx((768 * 3) ** -0.5, rel=0.1)


# -----------------------------------------------------------------------------
# Schedule


@pytest.mark.parametrize("hp", [MUON, ADAMW], ids=["muon", "adamw"])
def test_rates_are_flat_for_three_tenths_and_then_fall_to_zero(hp):
    for step in range(0, hp.num_iterations, 25):
        progress = step / hp.num_iterations
        factor = 1.0 if progress < 0.3 else (1 - progress) / 0.7
        if hp is ADAMW:
            factor *= min(1, (step + 1) / 250)
        now = Run.moment(step, hp)
        assert now.lr == pytest.approx(factor, rel=1e-12)
        assert now.momentum == pytest.approx(0.95, rel=1e-12)


def validated(hp: Hyperparameters) -> list[int]:
    return [step for step in range(hp.num_iterations + 1) if Run.moment(step, hp).validate]


def test_runs_validate_every_125_steps_and_every_25_from_nine_tenths_on():
    assert validated(MUON) == [*range(0, 2925, 125), *range(2925, 3251, 25)]
    assert set(range(0, 5626, 125)) <= set(validated(ADAMW))
    assert validated(replace(MUON, val_loss_every=0)) == [3250]


# -----------------------------------------------------------------------------
# Rules


def polar(g: torch.Tensor) -> torch.Tensor:
    """Return g (rows, cols) with its singular values s / norm(s) after twelve steps of
    2 s - 1.5 s^3 + 0.5 s^5, times sqrt(max(1, rows / cols))."""
    u, s, vh = torch.linalg.svd(g, full_matrices=False)
    s = s / s.norm()
    for _ in range(12):
        s = 2 * s - 1.5 * s**3 + 0.5 * s**5
    return max(1, g.size(0) / g.size(1)) ** 0.5 * (u * s) @ vh


class AdamW:
    """AdamW of one tensor in float64, as its paper writes it."""

    def __init__(self, lr, betas, decay):
        self.lr, self.betas, self.decay = lr, betas, decay
        self.first = self.second = 0.0

    def __call__(self, w, g, step, factor):
        lr, (b1, b2) = self.lr * factor, self.betas
        self.first = b1 * self.first + (1 - b1) * g
        self.second = b2 * self.second + (1 - b2) * g**2
        first, second = self.first / (1 - b1**step), self.second / (1 - b2**step)
        return w - lr * self.decay * w - lr * first / (second.sqrt() + 1e-10)


class Muon:
    """Muon of one matrix in float64."""

    momentum = 0.0

    def __call__(self, w, g, step, factor):
        self.momentum = 0.95 * self.momentum + 0.05 * g
        update = polar(0.05 * g + 0.95 * self.momentum)
        return w * (1 - factor * 0.025 * 0.05) - factor * 0.025 * update


@pytest.mark.parametrize("record", ["muon", "adamw"])
def test_three_steps_are_those_of_single_tensors_in_float64(record, small, randomize):
    own = RECORDS[record]
    sizes = ("vocab_size", "model_dim", "num_heads", "head_dim", "num_layers", "batch_seqs")
    hp = replace(own, **{name: getattr(small, name) for name in sizes})
    model = randomize(track.GPT(hp))
    optimizers, generator = Optimizers(model, hp), torch.Generator().manual_seed(0)
    rule_of = {}
    for name, p in model.named_parameters():
        decay = 0.001 if record == "muon" else 0.0
        lrs = {"muon": (0.7, 0.004, 0.015), "adamw": (0.3, 1 / 320, 0.01)}[record]
        lr = lrs[2]
        if p.ndim == 2:
            lr = lrs[0] if name.startswith("embed") else lrs[1]
        rule_of[name] = AdamW(lr, (0.8, 0.95), decay)
        if name.startswith("blocks") and p.ndim == 2:
            rule_of[name] = Muon() if record == "muon" else AdamW(0.0015, (0.9, 0.95), 0.1)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    for step in (0, 1, 2):
        now = Run.moment(step, hp)
        now.lr = 1 - 0.25 * step
        for name, p in model.named_parameters():
            g = torch.randn(p.shape, generator=generator)
            p.grad.copy_(g * hp.batch_seqs)
            expected[name] = rule_of[name](expected[name], g.double(), step + 1, now.lr)
        optimizers.step(now)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-4, atol=2e-5)


# -----------------------------------------------------------------------------
# What is published


def test_published_curves_are_those_of_the_public_logs():
    found = json.loads((HERE / "tools" / "published.json").read_text("utf-8"))
    muon, adamw = found["muon"], found["adamw"]
    losses = {0: 10.82584, 125: 4.58541, 1000: 3.65307, 3225: 3.27931, 3250: 3.27866}
    assert {step: muon["losses"][str(step)] for step in losses} == losses
    assert (muon["mean"], muon["deviation"], muon["runs"]) == (3.27866, 0.00134, 10)
    assert list(adamw["losses"]) == [str(step) for step in range(0, 5626, 125)]
    assert adamw["mean"] == adamw["losses"]["5625"] == 3.27903 and adamw["runs"] == 1
    for row, last in ((muon, "3250"), (adamw, "5625")):
        assert row["seconds"][last] == pytest.approx(60 * row["minutes"], abs=0.05)


# -----------------------------------------------------------------------------
# The command line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fp8 on", "--fp8: the benchmark's"),
        ("--record muon --val_seq_len 1152 --val_tokens 11520", "--val_seq_len 1152: must be a"),
    ],
)
def test_settings_that_the_model_does_not_have_are_refused(flags, message, capsys):
    status, err = error_of(flags.split(), capsys, main)
    assert status == 1 and err.startswith(f"train_gpt_track3.py: error: {message}")


# -----------------------------------------------------------------------------
# The optimizer that README shows


@pytest.fixture
def flags(tmp_path, monkeypatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    words = [*language(tmp_path), "--num_iterations", "4", "--save_every", "2", "--keep", "9"]
    return [*words, "--context_len", "128", "--adam_eps", "1e-6", "--muon_lr", "0.002"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return main of README's file, beside a copy of the fork in a folder of its own."""
    monkeypatch.setattr(track, "muon", track.muon)  # given back at the end
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my_optimizer.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path / "mine")
    module = importlib.import_module("my_optimizer")
    yield partial(train_gpt.main, run=module.Run)
    del sys.modules["my_optimizer"]


def outcome(folder: Path) -> tuple[dict, list]:
    """Return what the last whole checkpoint has, and train and validation losses."""
    saved = torch.load(folder / "logs/it/state_step000004.pt", weights_only=True)["model"]
    found = rows(folder / "logs/it.jsonl")
    return saved, [(row["train_loss"], row.get("val_loss")) for row in found if row["step"]]


def test_it_is_the_same_on_two_ranks_and_resumed(own, flags, tmp_path, monkeypatch):
    """After step 2 it is resumed bit for bit, with a state of a shape of its own."""
    folders = {name: tmp_path / name for name in ("one", "two", "resumed")}
    for folder in folders.values():
        folder.mkdir()
    words = [*flags, "--run_id", "it"]
    console = console_of(words, folders["one"], own)
    assert list(val_losses(console)) == [0, 2, 4]
    weights, losses = outcome(folders["one"])

    state = folders["one"] / "logs/it/state_step000002.pt"
    kept = torch.load(state, weights_only=True)["optimizers"]["muon 256x64"]
    assert {name: tuple(value.shape) for name, value in kept.items()} == {
        "first": (4, 256, 64),
        "second": (4, 256, 1),
    }
    (folders["resumed"] / "logs/it").mkdir(parents=True)
    shutil.copy(state, folders["resumed"] / "logs/it")
    console_of([*words, "--resume", "on"], folders["resumed"], own)
    again, last_losses = outcome(folders["resumed"])
    assert last_losses == losses[2:]
    assert all(torch.equal(again[name], value) for name, value in weights.items())

    monkeypatch.chdir(folders["two"])
    two = Program(words, ranks=2, work=own)
    assert two.end() == [0, 0], two.text("err")
    for row, alone in zip(outcome(folders["two"])[1], losses, strict=True):
        assert row == pytest.approx(alone, abs=1e-4)
