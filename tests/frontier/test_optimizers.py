"""Update rules of later records, and a head that is the embedding; see test_rows.py, too."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_optimizers import leaving  # the textbook's
from train_gpt_2026 import GPT, Optimizers, cautious_adam_, moment, parameter_table, polar_express

import train_gpt
from frontier import reference_2026 as exact
from train_gpt import gradient_buffer, members

SHAPES = [(64, 64), (32, 128), (128, 32), (3, 48, 48), (5, 96, 24)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# -----------------------------------------------------------------------------
# Rules of single matrices; whole steps of each record are in test_rows.py


def through_svd(g: torch.Tensor) -> torch.Tensor:
    """Return what Polar Express makes of each matrix: its singular values, one by one."""
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / (1.02 * s.pow(2).sum(-1, keepdim=True).sqrt() + 1e-6)
    for a, b, c in exact.POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_express_keeps_singular_vectors_and_brings_values_near_1(shape):
    g = randn(*shape)
    found, expected = polar_express(g).double(), through_svd(g)
    assert (found - expected).norm() / expected.norm() < 1e-3
    s = torch.linalg.svdvals(found)
    assert 0.9 < s.median() < 1.1 and s.max() < 1.15
    worst = torch.linalg.svdvals(train_gpt.zeropower_via_newtonschulz5(g).double())
    assert (s - 1).abs().mean() < (worst - 1).abs().mean()  # nearer than Newton-Schulz


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cautious_adam_in_pieces_is_that_of_one_piece(dtype, monkeypatch):
    """Bit for bit, on tables with a last piece of other size, after three steps."""
    lerp_, shapes = torch.Tensor.lerp_, []

    def learned(compiling: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        torch.manual_seed(0)
        weights = [torch.randn(1100, 128).to(dtype), torch.randn(40, 30, 50).to(dtype)]
        state = []
        for weight in weights:
            moments = {key: torch.zeros(weight.shape) for key in ("exp_avg", "exp_avg_sq")}
            state.append({"step": torch.tensor(0.0), **moments})
        for rate in (0.1, 0.05, 0.2):
            grads = [torch.randn(w.shape).to(dtype) * (torch.rand(w.shape) > 0.1) for w in weights]
            cautious_adam_(weights, grads, state, torch.tensor(rate), (0.6, 0.9), 1e-8, 5.0)
        return [*weights, *(kept[key] for kept in state for key in kept)]

    def spied(first, *arguments):
        shapes.append(tuple(first.shape))
        return lerp_(first, *arguments)

    monkeypatch.setattr(torch.Tensor, "lerp_", spied)
    expected = learned(True)
    assert {*shapes} == {(1100, 128), (40, 30, 50)}
    shapes.clear()
    found = learned(False)
    assert {*shapes} == {(513, 128), (74, 128), (40, 30, 50)}
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


# -----------------------------------------------------------------------------
# Groups of parameters: their norms, and the order in which their gradients leave


@pytest.mark.parametrize("every, steps", [(1, [24, 49, 99]), (2, [49, 99])])
def test_norms_are_made_where_all_learn_and_are_those_of_the_mean_gradient(every, steps, bare):
    """Every 25 steps, or every 25 of Adam's."""
    hp = replace(bare, adam_every=every, batch_seqs=4, num_iterations=100)
    model = GPT(hp)
    optimizers = Optimizers(model, hp)
    groups = members(model, parameter_table(hp))
    for step in (0, 1, 23, 24, 25, 48, 49, 50, 99):
        expected = {}
        for name, params in groups.items():
            for i, p in enumerate(params.values()):
                gradient_buffer(p).copy_(randn(*p.shape, seed=step + i))
            squares = [gradient_buffer(p).double().square().sum() for p in params.values()]
            expected[name] = sum(squares).sqrt().item() / 4
        norms = optimizers.step(moment(step, hp))
        assert len(norms) == (step in steps), step
        if norms:
            names = [group.name for group, _ in optimizers.groups]
            assert norms[0].tolist() == pytest.approx([expected[name] for name in names])


@pytest.fixture
def events(bare, randomize, monkeypatch):
    """Return of(tied_frac): a model, and what `leaving` returns of its first step."""

    def of(tied_frac: float) -> tuple[GPT, list[str]]:
        layers = "long+v0,short,none,short,long+x1,none+x0"
        hp = replace(bare, num_layers=6, layers=layers, batch_seqs=2, tied_frac=tied_frac)
        model = randomize(GPT(hp))
        tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0))
        batch = tokens[:, :-1].int(), tokens[:, 1:]
        return model, leaving(model, batch, monkeypatch, Optimizers, moment(0, hp))

    return of


def test_an_untied_head_learns_before_the_matrices_and_the_embedding_on_its_own(events):
    model, events = events(0.0)
    groups = members(model, parameter_table(model.hp))
    group_of = {name: group for group, params in groups.items() for name in params}
    assert Counter(events) == Counter(["begins", "ended", *group_of])
    left = [group_of[name] for name in events if name in group_of]
    assert [name for name, _ in itertools.groupby(left)] == [
        "head",
        "muon",
        "embed",
        "values",
        "scalar",
    ]


def test_a_tied_head_learns_for_the_embedding_when_the_last_backward_pass_has_ended(events):
    """Matrices, whose gradients are there before, do not wait for it."""
    model, events = events(1.0)
    names = dict(model.named_parameters()).keys()
    assert Counter(events) == Counter(["begins", "ended", *names - {"embed.weight"}])
    assert events.index("lm_head.weight") > events.index("ended")
    assert events.index("blocks.5.mlp.c_fc.weight") < events.index("ended")
    assert model.embed.weight.data_ptr() == model.lm_head.weight.data_ptr()
