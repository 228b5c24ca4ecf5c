"""Which parameter learns by what, the update rules against float64, and what ranks share."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import train_gpt
from train_gpt import (
    GPT,
    RECORDS,
    Group,
    Moment,
    Optimizers,
    Rows,
    adam,
    muon,
    parameter_groups,
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


@pytest.mark.parametrize("record", RECORDS)
def test_each_parameter_of_each_record_is_in_the_one_group_that_is_expected(record):
    with torch.device("meta"):
        model = GPT(RECORDS[record])
    optimizers = Optimizers(model, model.hp)
    found = Counter()
    for group, rows in optimizers.groups:
        assert group.rule is (muon if group.name == "muon" else adam)
        found.update((p, group.name) for p, *_ in rows.views)
    named = model.named_parameters()
    assert found == Counter((p, expected_group(name, p)) for name, p in named)


def test_a_parameter_that_is_not_in_exactly_one_group_is_named(tiny, monkeypatch):
    model = GPT(tiny)
    model.gate = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="gate.weight is in 0 of the parameter_groups"):
        Optimizers(model, tiny)

    def groups_of(model, hp):
        gates = Group("gates", [model.gate.weight, model.embed.weight], adam, 0.1, 1)
        return [*parameter_groups(model, hp), gates]

    monkeypatch.setattr(Optimizers, "groups_of", staticmethod(groups_of))
    with pytest.raises(ValueError, match="embed.weight is in 2 of the parameter_groups"):
        Optimizers(model, tiny)


def test_parameters_and_their_sums_begin_at_multiples_of_16_bytes(tiny):
    """Of any shape: compiled code assumes what the first layer of a kind had."""
    layers = "long+v0,long+vfirst,none,long+vfirst"
    hp = replace(tiny, layers=layers, model_dim=48, head_dim=12, num_heads=1, batch_seqs=2)
    model = GPT(replace(hp, vocab_size=509))
    model.embed.bfloat16()
    before = {name: p.clone() for name, p in model.named_parameters()}
    Optimizers(model, hp, rank=1, world_size=3)
    for name, p in model.named_parameters():
        assert p.data_ptr() % 16 == 0 and torch.equal(p, before[name]), name
    sums = [p.grad for p in model.parameters()]
    assert all(s.data_ptr() % 16 == 0 and s.dtype == torch.float32 for s in sums)
    assert len(sums) == len(before)


def test_a_rebound_parameter_is_refused(tiny):
    """It would no longer learn."""
    model = GPT(tiny)
    optimizers = Optimizers(model, tiny)
    model.embed.weight.data = model.embed.weight.data.clone()
    with pytest.raises(RuntimeError, match="of a parameter in embed 32 was rebound"):
        optimizers.step(MOMENTS[0])
    optimizers = Optimizers(model, tiny)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="of a parameter in head 32 was rebound"):
        optimizers.step(MOMENTS[0])


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
            model.get_parameter(name).grad.copy_(grad)
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
        assert not any(p.grad.any() for p in model.parameters())
    for name, p in model.named_parameters():
        tolerance = 2e-4 if expected_group(name, p) == "muon" else 1e-5
        torch.testing.assert_close(p.detach().double(), weights[name], rtol=0, atol=tolerance)


# -----------------------------------------------------------------------------
# What ranks share: they are threads here, and in tests/test_ranks.py processes


@pytest.fixture
def on_ranks(monkeypatch):
    """Return run(n, work): it returns what work(0), ..., work(n - 1) return, which call collectives
    together. Memory that nobody has written is NaN."""
    here = threading.local()
    given = {}
    done = SimpleNamespace(wait=lambda: None)

    def exchange(tensor: torch.Tensor) -> list[torch.Tensor]:
        here.barrier.wait()
        given[here.rank] = tensor.clone()
        here.barrier.wait()
        return [given[rank] for rank in range(here.barrier.parties)]

    def reduce_scatter(output, tensor, async_op):
        shares = sum(exchange(tensor)).split(len(output))
        output.copy_(shares[here.rank])
        return done

    def all_gather(output, tensor, async_op):
        output.copy_(torch.cat(exchange(tensor)))
        return done

    def all_reduce(tensor, async_op):
        tensor.copy_(sum(exchange(tensor)))
        return done

    def run(count: int, work) -> list:
        barrier = threading.Barrier(count, timeout=120)

        def as_rank(rank: int):
            here.rank, here.barrier = rank, barrier
            try:
                return work(rank)
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(as_rank, range(count)))

    monkeypatch.setattr(train_gpt, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(train_gpt, "all_gather", all_gather)
    monkeypatch.setattr(train_gpt.dist, "all_reduce", all_reduce)
    torch.use_deterministic_algorithms(True)
    yield run
    torch.use_deterministic_algorithms(False)


def by_rows(rows, lr, now, hp):
    """A rule that keeps what is not shaped like its matrices: a number a row, and a count."""
    if not rows.state:
        rows.state["rows"] = torch.zeros_like(rows.grad[..., :1])
        rows.state["count"] = torch.zeros(len(rows.grad))
    rows.state["rows"] += rows.grad.square().mean(-1, keepdim=True)
    rows.state["count"] += 1
    rows.own.sub_(rows.grad / (rows.state["rows"] + now.step + 1).sqrt(), alpha=lr)


@pytest.mark.parametrize("rule", [muon, by_rows])
@pytest.mark.parametrize("counts", [(1, 3, 8, 1), (2, 2, 5, 1)])
def test_a_run_goes_on_with_any_number_of_ranks(rule, counts, on_ranks, tiny, monkeypatch):
    """A step on each of these numbers of ranks, with all saved between them, against four steps of
    one rank. Five ranks have less than one matrix each of the four of the MLPs' shapes; eight ranks
    have one micro-batch each."""
    hp = replace(tiny, grad_clip=1e9)  # every step has norms

    def groups_of(model, hp):
        groups = parameter_groups(model, hp)
        return [replace(g, rule=rule) if g.name == "muon" else g for g in groups]

    monkeypatch.setattr(Optimizers, "groups_of", staticmethod(groups_of))

    def stepped(ranks, moments, weights, state):
        def work(rank):
            model = GPT(hp)
            model.load_state_dict(weights)
            optimizers = Optimizers(model, hp, rank, ranks)
            optimizers.load_state_dict(state)
            for now in moments:
                for name, grad in made_up_gradients(model, now.step).items():
                    part = 2 * (rank + 1) / (ranks * (ranks + 1))  # all parts make one
                    model.get_parameter(name).grad.copy_(part * grad)
                optimizers.begin_last_backward(now)
                (norm,) = optimizers.step(now)
            return model.state_dict(), optimizers.state_dict(), norm

        found = on_ranks(ranks, work)
        weights, state, _ = found[0]
        for equal, *_ in found:
            assert all(torch.equal(equal[name], weights[name]) for name in weights)
        return weights, state, torch.stack([norm for *_, norm in found]).norm()

    initial = GPT(tiny).state_dict()
    expected, state, norm = stepped(1, MOMENTS, initial, {})
    found, again = initial, {}
    for count, now in zip(counts, MOMENTS, strict=True):
        found, again, norm_again = stepped(count, [now], found, again)
    torch.testing.assert_close(norm_again, norm)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(again, state, rtol=1e-5, atol=1e-6)
    if rule is by_rows:
        kept = again["muon 32x32"]
        assert kept["rows"].shape == (16, 32, 1) and kept["count"] == len(MOMENTS)


# -----------------------------------------------------------------------------
# When gradients leave


@pytest.fixture
def batch(tiny):
    """Return inputs and targets of two micro-batches."""
    tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].int(), tokens[:, 1:]


@pytest.fixture
def model(tiny, randomize):
    """Return a model of six layers, two of them without attention."""
    layers = "long+v0,short,none,short,long,none"
    hp = replace(tiny, num_layers=6, layers=layers, batch_seqs=2)
    return randomize(GPT(hp))


def leaving(model, batch, monkeypatch, optimizers_class=Optimizers, now=None, events=None) -> list:
    """Return the names of groups and messages as gradients leave, in a step of the first of two
    ranks, and "begins" and "ended", of the last backward pass. They are appended to events."""
    optimizers = optimizers_class(model, model.hp, 0, 2)
    begin, step, send = optimizers.begin_last_backward, optimizers.step, Rows.send
    events = [] if events is None else events

    def alone(output, tensor, async_op):
        """A collective in which the other rank has zeros."""
        common = min(len(output), len(tensor))
        output.zero_()[:common] = tensor[:common].clone()
        return SimpleNamespace(wait=lambda: None)

    def noted(rows, message):
        events.append((rows.name, message))
        send(rows, message)

    def noted_begin(now):
        begin(now)
        events.append("begins")

    def noted_step(now):
        events.append("ended")
        return step(now)

    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(train_gpt, name, alone)
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(train_gpt.dist, "all_reduce", lambda tensor, async_op: done)
    monkeypatch.setattr(Rows, "send", noted)
    optimizers.begin_last_backward, optimizers.step = noted_begin, noted_step
    train_gpt.train_step(model, optimizers, *batch, now or Moment(0, model.hp))
    return events


def test_gradients_leave_in_the_order_of_the_groups_and_matrices_during_the_last_backward_pass(
    model, batch, compile_with, monkeypatch
):
    """A message has eight matrices at least: two layers' of attention, then those of the two
    below. Layers are compiled one at a time, by a backend that needs no C++ compiler."""
    compile_with(aot_eager)
    monkeypatch.setattr(train_gpt.compiled, "allowed", True)
    events, layer = [], ("layer", 0)
    model.blocks[0].lambdas.register_post_accumulate_grad_hook(lambda p: events.append(layer))
    leaving(model, batch, monkeypatch, events=events)
    begins, ended = events.index("begins"), events.index("ended")
    assert events[:begins] == [layer, ("head 32", 0)]
    during = events[begins + 1 : ended]
    assert during.index(("muon 32x32", 0)) < during.index(layer)
    names = {"muon 32x32", "muon 32x128", "muon 128x32", "layer"}
    assert len(during) == 5 and {name for name, _ in during} == names
    names = [name for name, _ in events[ended + 1 :]]
    assert [name.split()[0] for name in names] == ["embed", "values", "scalar"]
