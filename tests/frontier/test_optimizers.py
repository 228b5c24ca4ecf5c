"""Update rules of later records, their groups of parameters, and a head that is the embedding."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import reference
import test_optimizers
import torch
from train_gpt_2026 import (
    GPT,
    RECORDS,
    Optimizers,
    adam_table,
    cautious_adam_,
    cautious_step_,
    moment,
    normuon_,
    parameter_table,
    polar_express,
)

import train_gpt
from frontier import reference_2026 as exact
from train_gpt import UserError, gradient_buffer, members

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


@pytest.mark.parametrize("shape", SHAPES)
def test_polar_express_in_bfloat16(shape):
    g = randn(*shape).bfloat16()
    found, expected = polar_express(g), through_svd(g)
    assert found.dtype == torch.bfloat16
    assert (found.double() - expected).norm() / expected.norm() < 0.04


def test_a_zero_gradient_has_a_zero_update_in_all_rules():
    assert not polar_express(torch.zeros(2, 8, 16)).any()
    second = torch.zeros(2, 1, 16)
    assert not normuon_([torch.zeros(2, 8, 16)], [second], 0.95)[0].any() and not second.any()
    weight = torch.ones(8, 16)
    cautious_step_([weight], [torch.zeros(8, 16)], torch.tensor(0.1), torch.tensor(0.0))
    assert torch.equal(weight, torch.ones(8, 16))


@pytest.mark.parametrize("rows, cols", [(8, 24), (24, 8), (16, 16)])
def test_normuon_gives_neurons_one_size_in_the_mean_and_keeps_each_matrixs_norm(rows, cols):
    """A neuron is a row or a column, along the longer side. Of steady updates, the sizes are equal
    after many steps."""
    update = randn(3, rows, cols) * torch.linspace(0.1, 3, max(rows, cols)).view(
        (-1, 1) if rows >= cols else (1, -1)
    )
    second = torch.zeros(3, rows, 1) if rows >= cols else torch.zeros(3, 1, cols)
    for _ in range(200):
        (found,) = normuon_([update], [second], 0.95)
    norms = torch.linalg.matrix_norm(update)
    torch.testing.assert_close(torch.linalg.matrix_norm(found), norms, rtol=1e-4, atol=0)
    sizes = found.norm(dim=2 if rows >= cols else 1)
    torch.testing.assert_close(sizes, sizes[:, :1].expand_as(sizes), rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(12, 5), (5, 12), (7, 7)])
def test_normuon_equals_float64_number_by_number(shape):
    """Of one matrix, over three steps with a float64 reading of the rule."""
    second = torch.zeros(1, shape[0], 1) if shape[0] >= shape[1] else torch.zeros(1, 1, shape[1])
    means = [0.0] * max(shape)
    for step in range(3):
        update = randn(1, *shape, seed=step)
        found = normuon_([update], [second], 0.9)[0][0].double()
        upright = update[0].double() if shape[0] >= shape[1] else update[0].double().T
        rows = []
        for i, row in enumerate(upright):
            means[i] = 0.9 * means[i] + 0.1 * row.pow(2).mean().item()
            rows.append(row / means[i] ** 0.5)
        expected = torch.stack(rows)
        expected *= upright.norm() / expected.norm()
        if shape[0] < shape[1]:
            expected = expected.T
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_cautious_step_decays_where_update_and_weight_agree():
    """Number by number: also where an update is 0."""
    weight, update = randn(9, 11), randn(9, 11, seed=1)
    update[0] = 0.0
    expected = []
    for w, u in zip(weight.flatten().tolist(), update.flatten().tolist(), strict=True):
        shrinks = u == 0 or (u > 0) == (w > 0)
        expected.append(w - 0.1 * (u + (0.3 * w if shrinks else 0.0)))
    cautious_step_([weight], [update], torch.tensor(0.1), torch.tensor(0.3))
    assert weight.flatten().tolist() == pytest.approx(expected, abs=1e-6)


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
# Groups of parameters


def expected_group(name: str, p: torch.Tensor, record: str = "") -> str:
    """Return a parameter's group as the records say it: Adam for the head, the embeddings and the
    scalars, else Muon; in 2026 Adam for gates, too, and groups of their own for what is new. The
    demo is 2026-03-06."""
    record = "2026-03-06_SimplifyHC" if record == "demo" else record
    if "2026" in record:
        own = "x0", "smear_gate", "skip_gates", "gate"
        if "03-06" in record:
            own += "bigram_lambda", "residual_lambda", "post_lambda"
        for text in own:
            if text in name:
                return "gates" if text == "gate" else text.split("_")[0]
    if name == "lm_head.weight":
        return "head"
    if "embed" in name:
        return "values" if "value" in name or "bigram" in name else "embed"
    return "scalar" if p.ndim < 2 else "muon"


@pytest.mark.parametrize("record", RECORDS)
def test_each_parameter_of_each_record_is_in_the_one_row_that_is_expected(record):
    with torch.device("meta"):
        model = GPT(RECORDS[record])
    named = list(model.named_parameters())
    expected = {name: expected_group(name, p, record) for name, p in named}
    groups = members(model, parameter_table(model.hp))
    found = [(name, group) for group, params in groups.items() for name in params]
    assert len(found) == len(expected) and dict(found) == expected
    buckets = Optimizers(model.to_empty(device="meta"), model.hp).order
    assert Counter(p for bucket in buckets for p in bucket.params) == Counter(model.parameters())


def test_a_row_of_adam_groups_changes_the_numbers_of_its_group_alone(bare):
    hp = replace(bare, adam_rule="cautious", smear=True, attention_gate=True)
    plain = {group.name: group for group in parameter_table(hp)}
    rows = "embed+lr=.3+beta1=.7,gates+beta2=.5+decay=2,scalar+lr=8e-5"
    table = {group.name: group for group in parameter_table(replace(hp, adam_groups=rows))}
    numbers = {
        name: (group.lr, *group.rule.keywords["betas"], group.rule.keywords["decay"])
        for name, group in table.items()
        if name != "muon"
    }
    assert numbers == {
        "head": (0.008, 0.8, 0.95, 0.0),
        "embed": (0.3, 0.7, 0.95, 0.0),
        "values": (0.6, 0.8, 0.95, 0.0),
        "scalar": (8e-5, 0.8, 0.95, 0.0),
        "gates": (0.04, 0.8, 0.5, 2.0),
    }
    assert set(plain) == set(table) - {"gates"}  # without a row, gates are Muon's, as in 2025-08-23
    assert any(text == "blocks.*gate" for text in plain["muon"].patterns)


WRONG = {
    "heads+lr=1": "a row begins with one of bigram embed gates head",
    "muon+lr=1": "a row begins with one of",
    "lr=1": "a row begins with one of",
    "head+rate=1": "is not of lr=NUMBER beta1=NUMBER",
    "head+lr=x": "'head[+]lr=x' is not of",
    "head+lr=1/2": "is not of",
    "head+lr=1+lr=2": "is not of",
    "head+beta1=1": "a beta must be below 1",
    "head+decay=1": "decay wants --adam_rule cautious",
    "head+lr=1,head+lr=2": "a row comes twice",
}


@pytest.mark.parametrize("rows", WRONG)
def test_a_wrong_row_of_adam_groups_is_refused_with_the_reason(rows, bare):
    with pytest.raises(UserError, match=f"--adam_groups.*{WRONG[rows]}"):
        adam_table(replace(bare, adam_groups=rows))


def test_adam_at_every_second_step_takes_the_sum_of_two_gradients(bare, randomize):
    """Matrices learn at each step. What Adam does is what it does at once with the sum."""
    hp = replace(bare, adam_every=2, batch_seqs=1)
    model = randomize(GPT(hp))
    optimizers = Optimizers(model, hp)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    table = parameter_table(hp)
    at_once = randomize(GPT(hp))
    of_sum = Optimizers(at_once, hp)
    for step in range(2):
        for i, p in enumerate(model.parameters()):
            gradient_buffer(p).add_(randn(*p.shape, seed=100 * step + i))
        optimizers.step(moment(step, hp))
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
        assert changed == set(members(model, table)["muon"] if step == 0 else before)
    for i, p in enumerate(at_once.parameters()):
        gradient_buffer(p).copy_(randn(*p.shape, seed=i) + randn(*p.shape, seed=100 + i))
    of_sum.step(moment(1, hp))
    for name, p in at_once.named_parameters():
        if name not in members(model, table)["muon"]:
            torch.testing.assert_close(model.get_parameter(name), p, rtol=0, atol=1e-6)
    assert not any(gradient_buffer(p).any() for p in model.parameters())


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


# -----------------------------------------------------------------------------
# A head that is the embedding


@pytest.fixture
def plain(bare, randomize) -> GPT:
    """Return a model with reference.py's epsilon, and an Adam that does not turn rounding into
    steps."""
    layers = "long+v0,short,none,short,long+x1,none+x0"
    hp = replace(bare, num_layers=6, layers=layers, norm_eps=2.0**-7, batch_seqs=2, adam_eps=1e-3)
    return randomize(GPT(hp))


@pytest.fixture
def tied(plain) -> GPT:
    """Return the same with a head that is the embedding, to the end."""
    hp = replace(plain.hp, tied_frac=1.0)
    weights = plain.state_dict() | {"embed.weight": plain.lm_head.weight}
    model = GPT(hp)
    model.load_state_dict(weights)
    return model


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets of two micro-batches."""
    tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].int(), tokens[:, 1:]


def leaving(model: GPT, batch, monkeypatch) -> list[str]:
    """Return what the textbook's function of this name returns, of a step of this fork."""
    now = moment(0, model.hp)
    return test_optimizers.leaving(model, batch, monkeypatch, Optimizers, now)


def test_an_untied_head_learns_before_the_matrices_and_the_embedding_on_its_own(
    plain, batch, monkeypatch
):
    events = leaving(plain, batch, monkeypatch)
    names = dict(plain.named_parameters()).keys()
    assert Counter(events) == Counter(["begins", "ended", *names])
    left = [name for name in events if name not in ("begins", "ended")]
    groups = itertools.groupby(expected_group(name, plain.get_parameter(name)) for name in left)
    assert [group for group, _ in groups] == ["head", "muon", "embed", "values", "scalar"]


def test_a_tied_head_learns_for_the_embedding_when_the_last_backward_pass_has_ended(
    tied, batch, monkeypatch
):
    """Matrices, whose gradients are there before, do not wait for it."""
    events = leaving(tied, batch, monkeypatch)
    names = dict(tied.named_parameters()).keys()
    assert Counter(events) == Counter(["begins", "ended", *names - {"embed.weight"}])
    assert events.index("lm_head.weight") > events.index("ended")
    assert events.index("blocks.5.mlp.c_fc.weight") < events.index("ended")
    assert tied.embed.weight.data_ptr() == tied.lm_head.weight.data_ptr()


def test_a_tied_embedding_s_gradient_is_that_of_the_plain_model_in_float64(
    tied, batch, with_window
):
    now = with_window(128, tied.hp)
    assert now.tied
    weights = {n: p.detach().double().requires_grad_() for n, p in tied.named_parameters()}
    layers = [("long", 0, None), ("half", None, None), (None, None, None)]
    layers += [("half", None, None), ("long", None, 1), (None, None, 0)]
    for tokens, targets in zip(*batch, strict=True):
        tied(tokens, targets, now).backward()
        both = weights | {"lm_head.weight": weights["embed.weight"]}
        reference.loss(both, tokens.long(), targets, 128, 2, 2025, layers).backward()
    weights["lm_head.weight"] = weights["embed.weight"]
    for name, p in tied.named_parameters():
        expected = weights[name].grad
        error = (gradient_buffer(p) - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_two_ranks_train_a_tied_embedding_as_one_does(tied, batch, on_ranks):
    hp, weights = tied.hp, tied.state_dict()

    def work(rank, world_size):
        model = GPT(hp)
        model.load_state_dict(weights)
        optimizers = Optimizers(model, hp, rank, world_size)
        inputs, targets = (tokens[rank::world_size] for tokens in batch)
        train_gpt.train_step(model, optimizers, inputs, targets, moment(0, hp))
        return dict(model.named_parameters())

    alone, (found, other) = work(0, 1), on_ranks(2, partial(work, world_size=2))
    assert not torch.equal(alone["embed.weight"], weights["embed.weight"])
    for name, weight in alone.items():
        assert torch.equal(found[name], other[name])
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_parted_from_the_head_the_embedding_goes_on_with_its_moments(ranks, tied, batch, on_ranks):
    """Step 2 is the first without the tie. There the embedding's state is the head's of before, and
    then its own."""
    hp = replace(tied.hp, tied_frac=0.25, num_iterations=4)
    weights = tied.state_dict()

    def work(rank):
        model = GPT(hp)
        model.load_state_dict(weights)
        optimizers = Optimizers(model, hp, rank, ranks)
        inputs, targets = (tokens[rank::ranks] for tokens in batch)
        states = []
        for step in range(4):
            now = moment(step, hp)
            assert now.tied == (step < 2)
            before = optimizers.state_dict()
            train_gpt.train_step(model, optimizers, inputs, targets, now)
            states.append((before, optimizers.state_dict()))
        return states

    states = work(0) if ranks == 1 else on_ranks(2, work)[0]
    before, after = states[1]
    assert not before["embed.weight"] and not after["embed.weight"] and after["lm_head.weight"]
    before, after = states[2]
    head = before["lm_head.weight"]
    assert after["embed.weight"]["step"] == head["step"] + 1 == 3
    assert after["lm_head.weight"]["step"] == 3
    # 0.8 of the old mean, and a fifth of a gradient that is zero for words that do not occur.
    absent = torch.ones(512, dtype=torch.bool)
    absent[batch[0].flatten().long()] = False
    found = after["embed.weight"]["exp_avg"][absent]
    torch.testing.assert_close(found, 0.8 * head["exp_avg"][absent], rtol=1e-5, atol=0)
    assert found.any()


@pytest.mark.parametrize("rows", [300, 301])
def test_two_ranks_share_a_table_of_bigrams(rows, bare, batch, on_ranks):
    """Each has half of its rows and of their moments, one of them a row of zeros if there is an odd
    number; the losses are those of one rank."""
    more = {"adam_rule": "cautious", "adam_every": 2, "adam_eps": 1e-3, "batch_seqs": 2}
    hp = replace(bare, bigram_rows=rows, **more)

    def work(rank, world_size):
        model = GPT(hp)
        model.load_state_dict(initial)
        optimizers = Optimizers(model, hp, rank, world_size)
        inputs, targets = (tokens[rank::world_size] for tokens in batch)
        losses = []
        for step in range(6):
            now = moment(step, replace(hp, num_iterations=6))
            result = train_gpt.train_step(model, optimizers, inputs, targets, now)
            losses.append(result[0].item())
        table = model.bigram_embed.weight
        (bucket,) = (b for b in optimizers.order if any(p is table for p in b.params))
        assert len(bucket.params) == 1
        return losses, dict(model.named_parameters()), bucket

    initial = GPT(hp).state_dict()
    (expected, weights, whole), ranks = work(0, 1), on_ranks(2, partial(work, world_size=2))
    losses = [sum(both) for both in zip(*(losses for losses, *_ in ranks), strict=True)]
    assert losses == pytest.approx(expected, abs=2e-5) and expected[5] < expected[0]
    for name, weight in weights.items():
        assert torch.equal(ranks[0][1][name], ranks[1][1][name])
        torch.testing.assert_close(ranks[0][1][name], weight, rtol=0, atol=1e-5)
    assert whole.state["exp_avg"].any() and weights["bigram_embed.weight"].any()
    for key in ("exp_avg", "exp_avg_sq"):
        shares = [bucket.state[key] for *_, bucket in ranks]
        assert [share.shape for share in shares] == [(-(-rows // 2), 32)] * 2
        torch.testing.assert_close(torch.cat(shares)[:rows], whole.state[key], rtol=1e-3, atol=1e-6)
        assert not torch.cat(shares)[rows:].any()


@pytest.mark.parametrize("before, after", [(2, 1), (1, 2), (5, 3)])
def test_a_run_of_normuon_goes_on_with_any_number_of_ranks(before, after, bare, on_ranks):
    """Two steps, saved, and two more, against four of one rank. Of the MLPs' matrices there are
    four of a shape: five ranks find fewer than one each."""
    hp = replace(bare, muon_beta2=0.9, muon_decay=1.2, polar_express=True, adam_rule="cautious")

    def stepped(ranks, steps, weights, state):
        def work(rank):
            model = GPT(hp)
            model.load_state_dict(weights)
            optimizers = Optimizers(model, hp, rank, ranks)
            optimizers.load_state_dict(state)
            for step in steps:
                for i, p in enumerate(model.parameters()):
                    part = 2 * (rank + 1) / (ranks * (ranks + 1))  # all parts make one
                    gradient_buffer(p).copy_(part * randn(*p.shape, seed=100 * step + i))
                optimizers.step(moment(step, hp))
            return model.state_dict(), optimizers.state_dict()

        (weights, state), *others = on_ranks(ranks, work)
        for equal, _ in others:
            assert all(torch.equal(equal[name], weights[name]) for name in weights)
        return weights, state

    initial = GPT(hp).state_dict()
    expected, state = stepped(1, range(4), initial, {})
    found, again = stepped(after, range(2, 4), *stepped(before, range(2), initial, {}))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=2e-5)
        for key, value in state[name].items():
            torch.testing.assert_close(again[name][key], value, rtol=1e-4, atol=1e-6)
    shapes = {
        "attn.qkv_w": (3, 32, 1),
        "mlp.c_fc.weight": (1, 128, 1),
        "mlp.c_proj.weight": (1, 1, 128),
    }
    for name, shape in shapes.items():
        assert again[f"blocks.0.{name}"]["second_moment"].shape == shape
