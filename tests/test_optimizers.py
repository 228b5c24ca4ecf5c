"""Which parameter learns by what, the update rules against float64, and what ranks share."""

import itertools
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import train_gpt
from train_gpt import (
    GPT,
    RECORDS,
    Bucket,
    Optimizers,
    gradient_buffer,
    members,
    moment,
    muon,
    parameter_table,
    subtract_,
    zeropower_via_newtonschulz5,
)

MOMENTS = [  # a ramp of momentum, then a fall of the learning rate
    replace(moment(step, RECORDS["demo"]), lr=lr, momentum=momentum)
    for step, (lr, momentum) in enumerate([(1.0, 0.85), (1.0, 0.9), (0.6, 0.95), (0.2, 0.95)])
]

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
# The table of parameters, and a step of all of them


def expected_group(name: str, p: torch.Tensor) -> str:
    """Return the group that the records want: Adam for the head, the embeddings and the scalars,
    else Muon."""
    if name == "lm_head.weight":
        return "head"
    if "embed" in name:
        return "values" if "value" in name else "embed"
    return "scalar" if p.ndim < 2 else "muon"


@pytest.mark.parametrize("record", RECORDS)
def test_each_parameter_of_each_record_is_in_the_one_row_that_is_expected(record):
    with torch.device("meta"):
        model = GPT(RECORDS[record])
    named = list(model.named_parameters())
    expected = {name: expected_group(name, p) for name, p in named}
    groups = members(model, parameter_table(model.hp))
    found = [(name, group) for group, params in groups.items() for name in params]
    assert len(found) == len(expected) and dict(found) == expected
    buckets = Optimizers(model.to_empty(device="meta"), model.hp).order
    assert Counter(p for bucket in buckets for p in bucket.params) == Counter(model.parameters())


def test_a_parameter_that_not_exactly_one_row_can_take_is_named(tiny, monkeypatch):
    unknown, vector = GPT(tiny), GPT(tiny)
    unknown.gate = torch.nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="gate.weight matches no row of parameter_table"):
        Optimizers(unknown, tiny)
    vector.blocks[0].gain = torch.nn.RMSNorm(32)
    with pytest.raises(ValueError, match=r"blocks.0.gain.weight matches muon .* shape \(32,\)"):
        Optimizers(vector, tiny)
    table = parameter_table(tiny)
    twice = replace(table[0], name="gates", patterns=("blocks.?.attn.qkv_w",))
    monkeypatch.setattr(Optimizers, "table", lambda self, hp, compile_: (*table, twice))
    with pytest.raises(ValueError, match="blocks.0.attn.qkv_w matches muon and gates"):
        Optimizers(GPT(tiny), tiny)


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
            gradient_buffer(model.get_parameter(name)).copy_(grad)
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
        assert not any(gradient_buffer(p).any() for p in model.parameters())
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


muon_rule = partial(muon, hp=RECORDS["demo"])


def by_rows(buckets, lr, now):
    """A rule that keeps what is not shaped like its matrices: a number a row, and a count."""
    updates = []
    for bucket in buckets:
        rows = bucket.state.setdefault("rows", torch.zeros_like(bucket.grads[..., :1]))
        count = bucket.state.setdefault("count", torch.zeros(()))
        rows += bucket.grads.square().mean(-1, keepdim=True)
        count += 1
        updates.append(bucket.grads / (rows + count).sqrt())
    return updates, partial(torch._foreach_add_, alpha=-lr)


@pytest.mark.parametrize(
    ("rule", "before", "after"), [(muon_rule, 2, 1), (muon_rule, 5, 3), (by_rows, 1, 2)]
)
def test_a_run_goes_on_with_any_number_of_ranks(rule, before, after, on_ranks, tiny, monkeypatch):
    """Two steps, saved, and two more, against four of one rank. Five ranks have less than one
    matrix each of the four of the MLPs' shapes."""
    hp = replace(tiny, grad_clip=1e9)  # every step has norms
    table = [replace(g, rule=rule) if g.name == "muon" else g for g in parameter_table(tiny)]
    monkeypatch.setattr(Optimizers, "table", lambda self, hp, compile_: tuple(table))

    def stepped(ranks, moments, weights, state):
        def work(rank):
            model = GPT(hp)
            model.load_state_dict(weights)
            optimizers = Optimizers(model, hp, rank, ranks)
            optimizers.load_state_dict(state)
            for now in moments:
                for name, grad in made_up_gradients(model, now.step).items():
                    part = 2 * (rank + 1) / (ranks * (ranks + 1))  # all parts make one
                    gradient_buffer(model.get_parameter(name)).copy_(part * grad)
                norms = optimizers.step(now)[0]
            return model.state_dict(), optimizers.state_dict(), norms

        found = on_ranks(ranks, work)
        weights, state, _ = found[0]
        for equal, *_ in found:
            assert all(torch.equal(equal[name], weights[name]) for name in weights)
        return weights, state, torch.stack([norms for *_, norms in found]).norm(dim=0)

    initial = GPT(tiny).state_dict()
    expected, state, norms = stepped(1, MOMENTS, initial, {})
    *halfway, _ = stepped(before, MOMENTS[:2], initial, {})
    found, again, norms_again = stepped(after, MOMENTS[2:], *halfway)
    torch.testing.assert_close(norms_again, norms)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)
        for key, value in state[name].items():
            torch.testing.assert_close(again[name][key], value, rtol=1e-5, atol=1e-6)
    if rule is by_rows:
        kept = again["blocks.0.attn.qkv_w"]
        assert kept["rows"].shape == (3, 32, 1) and kept["count"] == len(MOMENTS)


@pytest.mark.parametrize("rows", [300, 301])
def test_shares_of_a_table_arrive_in_the_table_if_they_are_equal(rows, on_ranks):
    table = torch.rand(rows, 4)

    def work(rank):
        bucket = Bucket([table.clone()], 1, rank, 2)
        (arrived,) = bucket.gather(bucket.weights())()
        assert torch.equal(arrived, table)
        return arrived.data_ptr() == bucket.params[0].data_ptr()

    assert on_ranks(2, work) == [rows == 300] * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_updates_of_another_dtype_are_subtracted_as_in_float64(compiled):
    """Of two shapes; compiled code has another formula."""
    weights, updates = ([torch.randn(3, 5), torch.randn(2, 4, 4)] for _ in range(2))
    updates = [update.bfloat16() for update in updates]
    expected = [w.double() - 0.3 * u.double() for w, u in zip(weights, updates, strict=True)]
    step_ = torch.compile(subtract_, backend="aot_eager") if compiled else subtract_
    step_(weights, updates, torch.tensor(0.3, dtype=torch.float64))
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight.double(), value, rtol=1e-6, atol=1e-6)


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


def leaving(model, batch, monkeypatch, optimizers_class=Optimizers, now=None) -> list[str]:
    """Return the names of parameters as their gradients leave, in a step of the first of two ranks,
    and "begins" and "ended", of the last backward pass."""
    optimizers = optimizers_class(model, model.hp, 0, 2)
    begin, step, launch = optimizers.begin_last_backward, optimizers.step, Bucket.launch
    events = []

    def alone(output, tensor, async_op):
        """A collective in which the other rank has zeros."""
        common = min(len(output), len(tensor))
        output.zero_()[:common] = tensor[:common]
        return SimpleNamespace(wait=lambda: None)

    def noted(bucket):
        events.extend(optimizers.names[p] for p in bucket.params)
        launch(bucket)

    def noted_begin(now):
        begin(now)
        events.append("begins")

    def noted_step(now):
        events.append("ended")
        return step(now)

    for name in ("reduce_scatter", "all_gather"):
        monkeypatch.setattr(train_gpt, name, alone)
    monkeypatch.setattr(train_gpt.dist, "all_reduce", partial(alone, torch.empty(0)))
    monkeypatch.setattr(Bucket, "launch", noted)
    optimizers.begin_last_backward, optimizers.step = noted_begin, noted_step
    train_gpt.train_step(model, optimizers, *batch, now or moment(0, model.hp))
    return events


def test_gradients_leave_in_the_order_of_the_table_and_matrices_during_the_last_backward_pass(
    model, batch, monkeypatch
):
    """A bucket has eight matrices at least: two layers' of attention, then those of the two
    below."""
    events = leaving(model, batch, monkeypatch)
    every_name = [name for name, _ in model.named_parameters()]
    assert Counter(events) == Counter(["begins", "ended", *every_name])
    begins, ended = events.index("begins"), events.index("ended")

    def groups(names):
        found = [expected_group(name, model.get_parameter(name)) for name in names]
        return [group for group, _ in itertools.groupby(found)]

    assert events[:begins] == ["lm_head.weight"]
    assert groups(events[begins + 1 : ended]) == ["muon"]
    assert groups(events[ended + 1 :]) == ["embed", "values", "scalar"]
    layers = [int(name.split(".")[1]) for name in events if "qkv_w" in name or "attn.c_" in name]
    assert [set(layers[:4]), set(layers[4:])] == [{3, 4}, {0, 1}]


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_of_matrices_are_dropped_after_a_step_of_one_micro_batch(count, tiny, batch):
    """Those of two micro-batches are summed in one place, as those of tables always are."""
    hp = replace(tiny, batch_seqs=count)
    model = GPT(hp)
    optimizers = Optimizers(model, hp)
    matrix, table = model.blocks[0].mlp.c_fc.weight, model.embed.weight
    place = gradient_buffer(table).data_ptr()
    for step in range(2):
        train_gpt.train_step(model, optimizers, *(t[:count] for t in batch), moment(step, hp))
        assert (matrix.grad is None) == (count == 1)
        assert gradient_buffer(table).data_ptr() == place and not gradient_buffer(table).any()


def test_two_parameters_with_one_gradient_tensor_are_refused(tiny):
    """In place, what is added to one would be added to the other."""
    model = GPT(replace(tiny, batch_seqs=1))
    optimizers = Optimizers(model, model.hp)
    shared = torch.ones(2)
    for i in (0, 1):
        model.blocks[i].lambdas.grad = shared.view(2)
    with pytest.raises(ValueError, match=r"blocks\.\d\.lambdas and .* have equal gradients"):
        optimizers.zero_grad(optimizers.groups)
