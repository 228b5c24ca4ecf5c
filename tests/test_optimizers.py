"""Which parameter learns by what, the update rules against float64, and what ranks share."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.debugging import aot_eager
from torch.testing._internal.distributed.fake_pg import FakeStore

import train_gpt
import train_gpt_2026
from runs import Program
from train_gpt import (
    GPT,
    RECORDS,
    Group,
    Moment,
    Optimizers,
    Rows,
    adam,
    muon,
    zeropower_via_newtonschulz5,
)

MOMENTS = [Moment(step, RECORDS["demo"]) for step in range(4)]
RATES = [(1.0, 0.85), (1.0, 0.9), (0.6, 0.95), (0.2, 0.95)]
for now, (lr, momentum) in zip(MOMENTS, RATES, strict=True):
    now.lr, now.momentum = lr, momentum  # a ramp of momentum, then a fall of the learning rate

# -----------------------------------------------------------------------------
# Muon against a singular value decomposition in float64


def quintic(s: torch.Tensor) -> torch.Tensor:
    """Return what five steps make of one singular value."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


def through_svd(g: torch.Tensor) -> torch.Tensor:
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    return u @ torch.diag_embed(quintic(s / s.pow(2).sum(-1, keepdim=True).sqrt())) @ vh


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (3, 48, 48), (5, 96, 24)])
@pytest.mark.parametrize(
    ("dtype", "error", "error_of_values"),
    [(torch.float32, 1e-3, 1e-3), (torch.bfloat16, 0.04, 0.03)],
)
def test_newton_schulz_keeps_singular_vectors(dtype, error, error_of_values, shape):
    g = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found, expected = zeropower_via_newtonschulz5(g), through_svd(g)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() / expected.norm() < error
    s = torch.linalg.svdvals(found.double())
    assert (s - torch.linalg.svdvals(expected)).abs().max() < error_of_values
    assert s.max() < 1.25 and (s > 0.65).float().mean() > 0.9


def test_zero_gradient_gives_a_zero_update():
    assert not zeropower_via_newtonschulz5(torch.zeros(2, 8, 16)).any()


# -----------------------------------------------------------------------------
# The groups of parameters, and a step of all of them


def expected_group(name: str, p: torch.Tensor) -> str:
    """Return the group that the records want: Adam for the head, the embeddings and the scalars,
    else Muon."""
    if name == "lm_head.weight":
        return "head"
    if "embed" in name:
        return "values" if "value" in name else "embed"
    return "scalar" if p.ndim < 2 else "muon"


def test_a_parameter_that_is_not_in_exactly_one_group_is_named(tiny):
    model = GPT(tiny)
    model.gate = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="gate.weight is in 0 of the parameter_groups"):
        Optimizers(model, tiny)

    class Own(Optimizers):
        def parameter_groups(self, model, hp):
            gates = Group("gates", [model.gate.weight, model.embed.weight], adam, 0.1, 1)
            return [*super().parameter_groups(model, hp), gates]

    with pytest.raises(ValueError, match="embed.weight is in 2 of the parameter_groups"):
        Own(model, tiny)


def test_parameters_begin_at_multiples_of_16_bytes(tiny):
    """Of any shape: compiled code assumes what the first layer of a kind had."""
    layers = "long+v0,long+vfirst,none,long+vfirst"
    hp = replace(tiny, layers=layers, model_dim=48, head_dim=12, num_heads=1, batch_seqs=2)
    model = GPT(replace(hp, vocab_size=509))
    model.embed.bfloat16()
    before = {name: p.clone() for name, p in model.named_parameters()}
    Optimizers(model, hp, rank=1, world_size=3)
    for name, p in model.named_parameters():
        assert p.data_ptr() % 16 == 0 and torch.equal(p, before[name]), name


def test_a_rebound_parameter_is_refused(tiny):
    """It would no longer learn."""
    model = GPT(tiny)
    optimizers = Optimizers(model, tiny)
    model.embed.weight.data = model.embed.weight.data.clone()
    with pytest.raises(RuntimeError, match="of a parameter in embed 32 was rebound"):
        optimizers.step(MOMENTS[0])


def test_gradients_of_backward_passes_add_up_and_one_that_does_not_come_is_zero(tiny):
    """The first of a step replaces what the step before has left, also if it is sparse."""
    model = GPT(tiny)
    optimizers = Optimizers(model, tiny)
    rows_of = {p: rows for _, rows in optimizers.groups for p in rows.places}
    embed, head = model.embed.weight, model.lm_head.weight
    for step in range(2):
        for i in (1, 2):
            for p in model.parameters():
                p.grad = torch.full_like(p, float(i))
            embed.grad = embed.grad.to_sparse(1)
            for _, rows in optimizers.groups:
                rows.collect()
        assert all((rows_of[p].places[p] == 3).all() for p in model.parameters()), step
        optimizers.step(MOMENTS[0])
    head.grad = torch.ones_like(head)
    optimizers.step(MOMENTS[0])  # which divides gradients by batch_seqs
    one = 1 / tiny.batch_seqs
    assert (rows_of[head].places[head] == one).all() and not rows_of[embed].places[embed].any()


def made_up_gradients(model, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


@pytest.mark.parametrize("damped", [True, False])
def test_steps_equal_a_float64_loop_over_single_parameters(damped, tiny, randomize):
    """Of two sequences' gradients, the mean. Muon's momentum is damped since 2025."""
    hp = replace(tiny, momentum_damped=damped, batch_seqs=2, adam_eps=1e-3, muon_lr=0.05)
    model = randomize(GPT(hp))
    optimizers = Optimizers(model, hp)
    rates = {"head": 0.008, "embed": 0.6, "values": 0.6, "scalar": 0.04}
    weights = {n: p.detach().double() for n, p in model.named_parameters()}
    first = {n: torch.zeros_like(w) for n, w in weights.items()}
    second = {n: torch.zeros_like(w) for n, w in weights.items()}
    for t, now in enumerate(MOMENTS, 1):
        for name, grad in made_up_gradients(model, t).items():
            model.get_parameter(name).grad = grad
            g, w = grad.double() / 2, weights[name]
            group = expected_group(name, w)
            if group == "muon":
                mu, taken = now.momentum, (1 - now.momentum) * g if damped else g
                first[name] = mu * first[name] + taken
                rows, cols = w.shape[-2:]
                direction = through_svd(taken + mu * first[name])
                w -= 0.05 * now.lr * max(1, rows / cols) ** 0.5 * direction
                continue
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g * g
            mean, square = first[name] / (1 - 0.8**t), second[name] / (1 - 0.95**t)
            w -= rates[group] * now.lr * mean / (square.sqrt() + 1e-3)
        optimizers.step(now)
        assert all(p.grad is None for p in model.parameters())
    for name, p in model.named_parameters():
        tolerance = 2e-4 if expected_group(name, p) == "muon" else 1e-5
        torch.testing.assert_close(p.detach().double(), weights[name], rtol=0, atol=tolerance)


# -----------------------------------------------------------------------------
# What ranks share; tests/test_ranks.py has whole runs


def by_rows(rows, lr, now, hp):
    """A rule that keeps what is not shaped like its matrices: a number a row, a count a matrix."""
    if not rows.state:
        rows.state["rows"] = torch.zeros_like(rows.grad[..., :1])
        rows.state["count"] = torch.zeros(rows.grad.shape[:2])
    rows.state["rows"] += rows.grad.square().mean(-1, keepdim=True)
    rows.state["count"] += 1
    scale = rows.state["rows"] + rows.state["count"][..., None, None]
    rows.own.sub_(rows.grad / scale.sqrt(), alpha=lr)


def muon_or_by_rows(rows, lr, now, hp):
    rule = by_rows if rows.name == "muon 32x32" else muon
    return rule(rows, lr, now, hp)


class OwnOptimizers(Optimizers):
    def parameter_groups(self, model, hp):
        groups = super().parameter_groups(model, hp)
        return [replace(g, rule=muon_or_by_rows) if g.name == "muon" else g for g in groups]


def some_steps(words: list[str], hp, moments: list[Moment], start: str, end: str) -> None:
    """As a rank, go on from the file `start`, and write what this rank has at the end."""
    _, rank, ranks = train_gpt.start_device("cpu")
    weights, state, _ = torch.load(start)
    model = GPT(hp)
    model.load_state_dict(weights)
    optimizers = OwnOptimizers(model, hp, rank, ranks)
    optimizers.load_state_dict(state)
    for now in moments:
        for name, grad in made_up_gradients(model, now.step).items():
            part = 2 * (rank + 1) / (ranks * (ranks + 1))  # all parts make one
            model.get_parameter(name).grad = part * grad
        (norm,) = optimizers.step(now)
    torch.save((model.state_dict(), optimizers.state_dict(), norm), f"{end}{rank}")


def test_a_run_goes_on_with_any_number_of_ranks(tiny, tmp_path, monkeypatch):
    """A step on 3, 8, 5 and 1 ranks, with all saved between them, against four steps of one rank.
    Five ranks have less than one matrix each of the four of the MLPs' shapes."""
    monkeypatch.chdir(tmp_path)
    hp = replace(tiny, grad_clip=1e9)  # every step has norms
    torch.save((GPT(hp).state_dict(), {}, None), "start")
    some_steps([], hp, MOMENTS, "start", "alone")
    weights, state, norm = torch.load("alone0")
    before = "start"
    for ranks, now in zip((3, 8, 5, 0), MOMENTS, strict=True):
        work = partial(some_steps, hp=hp, moments=[now], start=before, end=f"{now.step}_")
        program = Program([], ranks, work)
        assert program.end() == [0] * max(ranks, 1), program.text("err")
        before = f"{now.step}_0"
        found, again, norm_again = torch.load(before)
        for rank in range(1, ranks):
            others, _, other_norm = torch.load(f"{now.step}_{rank}")
            assert all(torch.equal(others[name], found[name]) for name in found)
            assert other_norm == norm_again
    torch.testing.assert_close(norm_again, norm)
    torch.testing.assert_close(found, weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(again, state, rtol=1e-5, atol=1e-6)
    kept = again["muon 32x32"]
    assert kept["rows"].shape == (16, 32, 1) and kept["count"].tolist() == [len(MOMENTS)] * 16


@pytest.fixture
def first_of_two():
    """Be the first of two ranks, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("script", "tied_frac", "first", "last"),
    [
        (train_gpt, None, ["head"], ["embed", "values", "scalar"]),
        (train_gpt_2026, 0.0, ["head"], ["embed", "values", "scalar"]),
        (train_gpt_2026, 1.0, [], ["head", "values", "scalar"]),
    ],
)
def test_gradients_leave_when_they_are_complete(
    script, tied_frac, first, last, tiny, first_of_two, compile_with, monkeypatch
):
    """All in the last of two backward passes: the head's first, the upper layers' matrices before
    the first layer's are there, also where four layers are a graph. A message has eight matrices at
    least."""
    layers = "long+v0,short,none,short,long,none,short,short"
    hp = replace(tiny, num_layers=8, batch_seqs=4, layers=layers)
    if script is train_gpt_2026:
        layers = "long+v0,short,none,short,long+x1,none+x0,short,short"
        hp = script.Hyperparameters(**vars(hp) | {"layers": layers}, tied_frac=tied_frac)
    else:
        compile_with(aot_eager)  # it needs no C++ compiler
        monkeypatch.setattr(train_gpt.compiled, "allowed", True)
    model, events = script.GPT(hp), []
    optimizers = script.Optimizers(model, hp, 0, 2)

    def note(owner, name, event_of):
        function = getattr(owner, name)

        def noted(*arguments):
            events.append(event_of(*arguments))
            return function(*arguments)

        monkeypatch.setattr(owner, name, noted)

    note(Rows, "send", lambda rows, message: rows.name.split()[0])
    note(optimizers, "step", lambda now: "step")
    model.blocks[0].lambdas.register_post_accumulate_grad_hook(lambda p: events.append("layer 0"))
    tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].int(), tokens[:, 1:]
    train_gpt.train_step(model, optimizers, *batch, script.Moment(0, hp))
    assert events.pop(0) == "layer 0" and events.pop() == "step"
    assert events[: len(first)] == first
    matrices = [event for event in events if event in ("layer 0", "muon")]
    assert sorted(matrices) == ["layer 0"] + 5 * ["muon"] and matrices[0] == "muon"
    assert sorted(events[len(first) :]) == sorted([*matrices, *last])
    assert tied_frac != 1.0 or events.index("head") > events.index("layer 0")


def test_what_is_sent_of_frozen_parameters_of_bfloat16_matrices_and_after_too_many_gradients(
    tiny, first_of_two
):
    """Of a frozen parameter nothing; of matrices whose sums are cast, one message, because a rank's
    part has one place; and no message twice."""
    hp = replace(tiny, batch_seqs=2)
    model, tokens = GPT(hp), torch.arange(hp.seq_len)
    model.blocks[0].lambdas.requires_grad_(False)
    optimizers = Optimizers(model, hp, 0, 2)
    model(tokens.int(), tokens, MOMENTS[0]).backward()
    assert not any(rows.works for group, rows in optimizers.groups if group.name == "scalar")
    loss = model(tokens.int(), tokens, MOMENTS[0])
    with pytest.raises(RuntimeError, match="head 32: over 1 gradients, see Group.steps"):
        loss.backward()

    for dtype, messages in ((torch.float32, 3), (torch.bfloat16, 1)):
        params = [torch.nn.Parameter(torch.zeros(16, 16, dtype=dtype)) for _ in range(24)]
        rows = Rows(Group("muon", params, muon, 0.1, row_ndim=2), params, 0, 2, micro_batches=2)
        assert len(rows.weights) == messages


# ---- memory


def test_a_model_and_its_optimizers_are_freed_without_a_collection(tiny):
    """Five are built and deleted. With several ranks, a parameter's hook keeps it."""
    tensors = []
    gc.disable()
    try:
        for _ in range(5):
            model = GPT(tiny)
            optimizers = Optimizers(model, tiny)
            tokens = torch.arange(tiny.seq_len)
            model(tokens.int(), tokens, Moment(0, tiny)).backward()
            tensors += [weakref.ref(p) for p in model.parameters()]
            tensors += [weakref.ref(rows.weights) for _, rows in optimizers.groups]
            del model, optimizers
            assert not [tensor for tensor in tensors if tensor() is not None]
    finally:
        gc.enable()
