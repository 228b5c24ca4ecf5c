"""forks/optimizers against tests/track3_reference.py in float64, at the steps of published runs;
settings and first weights against the published ones."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import train_gpt_track3 as track
from track3_reference import (
    RESULTS,
    Weight,
    extrapolation,
    fall,
    momentum_of_46,
    result,
    root,
    schatten4,
)
from train_gpt_track3 import RECORDS, Optimizers, Run

HIDDEN = [f"blocks.0.{name}.weight" for name in ("q", "k", "v", "attn_proj", "fc", "mlp_proj")]
psgd, shampoo = track.catalog.psgd, track.catalog.shampoo
SQUARE, OBLONG = (8, 8), (16, 4)  # channels, and those of all heads: q is 8x8, or 4x16
# Where steps begin that cross a switch; and gradients about as small as some epsilon.
SWITCHES = [("adamh", 246), ("muloco", 25), ("muown", 3067)]
SWITCHES += [("ema_nesterov", 496), ("ema_nesterov", 2394), ("tail_ema", 2712), ("row_floor", 2682)]
SWITCHES += [("soap_muon", s) for s in (296, 1371, 1621, 1945, 2696)]
SWITCHES += [("aurora_soap", 2496), ("rre", 2820), ("rre", 2911), ("klsoap_powercool", 1872)]
SWITCHES += [("spectral_annealing", s) for s in (510, 996, 1000, 1396, 1886, 2036, 2096, 2532)]
SMALL = [("normuon", 1e-15), ("contra_muon", 1e-11), ("shampoo", 1e-15), ("muown", 1e-13)]
SMALL += [("soap_muon", 1e-7), ("soap_muon", 1e-9), ("aurora", 1e-8), ("pmuon", 1e-3)]
SMALL += [("sinksoap", 1e-4)]
CASES = [(name, 0, *case) for name in RESULTS for case in ((1, SQUARE), (1e-8, OBLONG))]
CASES += [(name, first, 1, OBLONG) for name, first in SWITCHES]
CASES += [(name, 0, scale, SQUARE) for name, scale in SMALL]


@pytest.fixture(autouse=True)
def float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def preset(optimizers, expected: dict, scale: float, hp) -> None:
    """Give SOAP its factors and bases. Otherwise the factors of tall and wide matrices have too low
    a rank in the first steps, and rounding chooses a part of their bases."""
    highest = 3999.0 if scale < 1 else 0.1**-0.5  # of KL-SOAP's roots: soon they would be > 4000
    for bank in [bank for group, bank in optimizers.groups if group.item_ndim == 2]:
        for i, side in enumerate(("left", "right")):
            basis, d = torch.eye(bank.shard.size(i - 2)), bank.shard.size(i - 2)
            factor = basis * d * (scale * (highest if hp.optimizer == "klsoap" else 1)) ** 2
            given = {"factor": factor, "basis": basis, "root": torch.linspace(0.9, 1, d) * highest}
            for key, value in given.items():
                bank.state[f"{side} {key}"] = value.expand(bank.num_items, *value.shape).clone()
            for weight in (expected[p] for p in bank.params):
                weight.q, weight.roots = [*weight.q, basis], [*weight.roots, given["root"]]
                weight.past[f"factor{i}"], weight.second = [(factor, 0)], 0 * weight.w
        bank.state |= {key: torch.zeros_like(bank.shard) for key in ("exp_avg", "exp_avg_sq")}


def compare(
    hp, reference, first, scale, shape, patch, count=8, given=True, of="", error=1e-9, faint=None
):
    """Make steps from `first` on with gradients of a scale, and compare weights `of` some names.
    With a small scale, some weights and the first gradients are zero, as in published runs. The
    first row of the `faint` parameter has small gradients."""
    hp = replace(hp, vocab_size=16, model_dim=shape[0], num_heads=1, head_dim=shape[1])
    model = track.GPT(replace(hp, num_layers=1, batch_seqs=1, seq_len=524288))
    model.forward, names = lambda *args: None, {p: name for name, p in model.named_parameters()}
    optimizers, generator, expected = Optimizers(model, model.hp), torch.Generator(), {}
    past = []  # of all hidden matrices as one vector, step by step

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    for p, name in names.items():
        p.data.copy_(torch.linspace(0.1, 4, len(p)).diag() @ draw(*p.shape))
        if scale < 1 and name.endswith(("mlp_proj.weight", "q.weight")):
            p.data[: 1 if "q" in name else None] = 0
        weight = expected[p] = Weight(p.detach().clone())
        weight.first_step, weight.steady = first, draw(*p.shape)
        weight.probes = {s: draw(2, *p.shape) for s in range(first, first + count)}
        weight.starts = [draw(len(p), len(p)), draw(p[0].numel(), p[0].numel())]
    if given and "soap" in hp.optimizer or hp.optimizer == "spectral_annealing":
        preset(optimizers, expected, scale, hp)

    def probes(bank, seeds, *shape):
        return torch.stack([expected[p].probes[seeds[1]] for p in bank.params])

    def starts(bank, seeds, *shape):
        return torch.stack([expected[p].starts[not seeds[1]] for p in bank.params])

    patch.setattr(psgd, "noise", probes)
    patch.setattr(track.catalog.pmuon, "noise", starts)
    for s in range(first, first + count):
        now = Run.Moment(s, model.hp)
        model(now)
        for p in names if reference.opened else ():
            point = expected[p].gradient_point(reference, s)
            torch.testing.assert_close(p.detach(), point, rtol=1e-9, atol=1e-12)
        for p, name in names.items():
            p.grad = scale * (expected[p].steady + draw(*p.shape)) * (scale == 1 or s > first)
            if name == faint:
                p.grad[0] *= 1e-6
            if name.endswith(of):
                expected[p].step(name, reference, s, p.grad.clone())
        optimizers.step(now)
        matrices = [weight for p, weight in expected.items() if names[p] in HIDDEN]
        past.append(torch.cat([weight.w.flatten() for weight in matrices]))
        if reference.extrapolates and s + 1 >= 2823 and (s + 1) % 5 == 0:
            moved = past[-1] + extrapolation(past[-4:])
            lengths = [weight.w.numel() for weight in matrices]
            for weight, w in zip(matrices, moved.split(lengths), strict=True):
                weight.w = w.view_as(weight.w)
            past[-1] = moved
    for p, name in names.items():
        if name.endswith(of):
            rest, way = (expected[p].w - x for x in (p.detach(), expected[p].initial))
            assert rest.abs().max() < error * way.abs().max() + 1e-15, name
    for bank in [bank for _, bank in optimizers.groups if "left" in bank.state]:  # psgd balances it
        factors = torch.stack([expected[p].q[0] for p in bank.params])
        torch.testing.assert_close(bank.state["left"], factors, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("record", "first", "scale", "shape"), CASES)
def test_all_weights_are_those_of_the_reference(record, first, scale, shape, monkeypatch):
    compare(RECORDS[record], RESULTS[record], first, scale, shape, monkeypatch)


@pytest.mark.parametrize("record", ["sinksoap", "aurora"])
def test_a_row_with_small_gradients_is_equalised_as_published(record, monkeypatch):
    case = RECORDS[record], RESULTS[record], 0, 1, SQUARE
    # Eigenvectors are rounded as the CPU does, and the faint row amplifies that to 3e-7.
    compare(*case, monkeypatch, faint="blocks.0.fc.weight", error=1e-6)


@pytest.mark.parametrize("record", ["soap", "klsoap", "soap_muon"])
def test_first_bases_are_those_of_the_first_gradient(record, monkeypatch):
    """In its bases, a gradient is diagonal but for rounding, which SOAP divides by 1e-8."""
    case, of = (RECORDS[record], RESULTS[record], 0, 1, SQUARE), ("q.weight", "attn_proj.weight")
    compare(*case, monkeypatch, given=False, of=of, error=1e-6 if record == "soap" else 1e-9)


@pytest.mark.parametrize("record", ["soap_muon", "tail_ema", "row_floor"])
def test_trust_has_limits_until_the_published_steps(record):
    """From the momentum itself, which deserves all trust, to noise that deserves none. The result
    is as long as the momentum."""
    momentum, noise, gradient = torch.randn(3, 16, 4)
    weight, found, expected = Weight(momentum), [], []
    for weight.s in (0, 1374, 1375, 1376, 1500, 1624, 1625, 1626):
        now = Run.Moment(weight.s, RECORDS[record])
        for share in (0, 0.5, 1, 2, -9):
            case, weight.g = (momentum + share * noise, momentum), gradient + momentum
            found.append(track.catalog.soap_muon.trust(*case, weight.g, now).item())
            expected.append(weight.trust(*case))
            bank = SimpleNamespace(name="attn_proj 16x4", shard_grad=weight.g)
            update = track.catalog.soap_muon.gated(bank, *case, now)
            assert schatten4(update) == pytest.approx(schatten4(momentum))
    assert found == pytest.approx(expected, abs=1e-12)
    assert {0.0, 0.45, 0.85, 1.0} < set(expected)


@pytest.mark.parametrize("changes", [{"outer": 3}, {"ahead": (0.3, 3, 9), "tail": (5, 4)}])
def test_what_goes_around_a_short_run(changes, monkeypatch):
    reference = result(12, 0.035, "muon", 0.025, fall(12), **changes)
    own = {"ema_nesterov": (0.3, 3 / 12, 9 / 12), "tail_ema": (5 / 12, 4 / 12)}
    own = {"outer_period": 3} if "outer" in changes else own
    hp = replace(RECORDS["muon_untuned_adam"], num_iterations=12, **own)
    hp = replace(hp, schedule=(1.0, 0.7, 1.0, 0.0))
    compare(hp, reference, 0, 1, SQUARE, monkeypatch, count=12)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("frozen", ["none", "blocks.0", "blocks.1.fc", "blocks.0.attn_proj"])
def test_each_kind_of_weights_takes_its_share_of_the_average(frozen, ranks):
    sizes = {"vocab_size": 16, "model_dim": 8, "num_heads": 1, "head_dim": 8, "num_layers": 3}
    hp = replace(RECORDS["spectral_annealing"], **sizes)
    models = [track.GPT(hp) for _ in range(ranks)]
    for name, p in [pair for model in models for pair in model.named_parameters()]:
        p.requires_grad = not name.startswith(frozen)
    optimizers = [Optimizers(model, hp, rank, ranks) for rank, model in enumerate(models)]
    names = {p: name for name, p in models[0].named_parameters()}
    for of_ranks in zip(*(each.groups for each in optimizers), strict=True):
        shares = []
        for _, bank in of_ranks:
            share = torch.as_tensor(track.around.tail_ema.own_shares(bank))
            shares.append(share.flatten().expand(len(bank.shard)))
        bank = of_ranks[0][1]
        shares = torch.cat(shares)[: bank.num_items]
        for p, share in zip(bank.params, shares.chunk(len(bank.params)), strict=True):
            name, kind = names[p], 0.8 if "blocks.0." in names[p] else 0.55
            kind = {"embed.weight": 0.0, "lm_head.weight": 0.5}.get(name, kind)
            assert (share == (1.0 if p.ndim == 1 else kind)).all(), name


@pytest.mark.parametrize("anchor", [0.0, 0.45])
def test_an_average_that_nothing_reads_is_not_kept(anchor):
    sizes = {"vocab_size": 16, "model_dim": 8, "num_heads": 1, "head_dim": 8, "num_layers": 2}
    hp = replace(RECORDS["spectral_annealing"], **sizes, anchor=(anchor, 0.8, 0.9))
    hp = replace(hp, tail_shares=(0.5, 0.0, 0.0, 0.7, 0.0))
    for _, bank in Optimizers(track.GPT(hp), hp).groups:
        track.around.tail_ema.blend(bank, Run.Moment(2500, hp), hp)
        is_read = anchor or bank.name.split()[0] not in ("head", "embed")
        assert ("tail average" in bank.state) == bool(is_read), bank.name


def test_a_momentum_of_rank_one_has_finite_powers_in_float32():
    """Rounding makes eigenvalues of its covariance negative. The powers' root mean square is 1."""
    momentum = torch.randn(3, 32, 1).float() @ torch.randn(3, 1, 16).float()
    torch.set_default_dtype(torch.float32)
    bank = SimpleNamespace(state={}, shard=momentum, rank=0, name="muon 32x16")
    for _ in range(3):
        gram = momentum @ momentum.mT
        found = track.catalog.pmuon.powered(bank, "left", gram, RECORDS["pmuon"])
        assert found.square().sum((1, 2)).tolist() == pytest.approx([32] * 3, rel=1e-4)


def test_an_update_in_the_warm_up_is_not_annealed():
    """There, too, rates are lower than the first one will be."""
    hp = replace(RECORDS["spectral_annealing"], warmup_steps=9)
    bank = SimpleNamespace(state={}, shard_grad=torch.randn(1, 8, 4))
    bases = {"left basis": torch.eye(8)[None], "right basis": torch.eye(4)[None]}
    update, annealed = torch.randn(1, 8, 4), track.catalog.spectral_annealing.annealed
    for s in (7, 8, 9, 2000):
        bank.state |= bases
        found = annealed(bank, update, Run.Moment(s, hp), hp)
        assert torch.equal(found, update) == (s < 2000), s
        assert ("left covariance" in bank.state) == (s == 2000)


@pytest.mark.parametrize("lowest", [0.5, 0.0, -1e-14, -0.5])
def test_roots_of_factors_whose_lowest_eigenvalue_may_not_be_positive(lowest):
    basis = torch.linalg.qr(torch.randn(6, 6))[0]
    factor = basis @ torch.tensor([lowest, 0.6, 0.7, 0.8, 0.9, 1.0]).diag() @ basis.T
    found = shampoo.pseudoinverse_root(factor)
    torch.testing.assert_close(found, root(factor), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("record", "cases"), [("psgd", (30, 40, 31)), ("pmuon", (0, 1))])
def test_draws_are_noise_of_each_matrix_step_and_seed_on_any_number_of_ranks(
    record, cases, monkeypatch
):
    """No two of 24 matrices of all groups draw alike, in all that a step draws. A case is ten times
    a step, and a seed."""
    module, noise, drawn = getattr(track.catalog, record), {1: [], 2: []}, []

    def spy(*args):
        drawn.append(track.catalog.muon.noise(*args))
        return drawn[-1]

    monkeypatch.setattr(module, "noise", spy)
    sizes = {"model_dim": 32, "num_heads": 2, "head_dim": 16, "num_layers": 4, "vocab_size": 16}
    for ranks, case in itertools.product(noise, cases):
        hp = replace(RECORDS[record], seed=case % 10, **sizes)
        optimizers = [Optimizers(track.GPT(hp), hp, rank, ranks) for rank in range(ranks)]
        for of_ranks in zip(*(each.groups for each in optimizers), strict=True):
            if of_ranks[0][0].item_ndim < 2:
                continue
            drawn.clear()
            for _, bank in of_ranks:
                bank.shard_grad = torch.randn_like(bank.shard)
                getattr(module, record)(bank, 0.01, Run.Moment(case // 10, hp), hp)
            calls = len(drawn) // ranks
            for i in range(calls):
                whole = torch.cat(drawn[i::calls])[: bank.num_items]  # without padding
                noise[ranks].append(whole.flatten(-2).flatten(0, -2)[:, :1024])
    one, two = (torch.cat(found) for found in noise.values())
    assert torch.equal(one, two) and len(one) == len(cases) * 24 * 2
    assert (one @ one.T / 1024 - torch.eye(len(one))).abs().max() < 0.2


def test_eigenvectors_that_float32_does_not_find_are_found_in_float64(monkeypatch):
    basis = torch.linalg.qr(torch.randn(6, 6))[0]
    factor = (basis @ torch.arange(1.0, 7).diag() @ basis.T).float()
    eigh, tried = torch.linalg.eigh, []

    def fails_in_float32(x):
        tried.append(x.dtype)
        if x.dtype == torch.float32:
            raise torch.linalg.LinAlgError
        return eigh(x)

    monkeypatch.setattr(torch.linalg, "eigh", fails_in_float32)
    values, vectors = track.catalog.soap.eigh(factor)
    assert tried == [torch.float32, torch.float64] and vectors.dtype == torch.float32
    torch.testing.assert_close(values, torch.arange(1.0, 7).float())
    torch.testing.assert_close(vectors * values @ vectors.T, factor)
    assert (vectors.double().T @ basis).abs().diagonal().min() > 1 - 1e-6


# -----------------------------------------------------------------------------
# Settings and first weights

KINDS = {"torch": "adamw muon_squared normuon_floor contra_muon", "scaled_baseline": "muonh"}
KINDS |= {"scaled_torch": "adamh muloco klsoap klsoap_powercool soap", "psgd": "psgd"}
KINDS |= {"paired_rademacher": "soap_muon tail_ema row_floor spectral_annealing"}
KINDS |= {"rademacher": "aurora_soap rre"}
KINDS["baseline"] = "muon muon_untuned_adam spectral_descent ema_nesterov normuon muown shampoo"
KINDS["baseline"] += " pmuon sinksoap aurora"
FLOAT32_GAINS = f"{KINDS['torch']} {KINDS['paired_rademacher']} {KINDS['rademacher']} adamh muloco"


@pytest.mark.parametrize("record", RESULTS)
def test_settings_are_the_published_ones(record):
    hp, reference = RECORDS[record], RESULTS[record]
    found = hp.num_iterations, hp.outer_period, hp.float32_gains, hp.mean_loss
    gains = record in FLOAT32_GAINS.split()
    assert found == (reference.steps, reference.outer, gains, record == "psgd")
    assert record in KINDS[hp.init].split()
    assert hp.batch_seqs * hp.seq_len == 524288 and hp.context_len == 1024
    ahead, tail = reference.ahead or (0, 0, 0), reference.tail or (0, 0)
    share, *ends = hp.ema_nesterov
    assert [share, *(end * reference.steps for end in ends)] == pytest.approx(ahead)
    assert [end * reference.steps for end in hp.tail_ema] == pytest.approx(tail)
    assert hp.rre[1] == 0.875 * reference.extrapolates

    # Rates and momentum. adamh's rule replaces the rate in the warm-up.
    for s in (0, 1, 249, 250, *range(299, reference.steps, 100), 1488, 1700, reference.steps - 1):
        now = Run.Moment(s, hp)
        found = {"embed": now.lr * hp.embed_lr, "lm_head": now.lr * hp.head_lr}
        found |= {"vector": now.lr * hp.scalar_lr, "blocks": now.matrix_lr * hp.muon_lr}
        for kind, rate in found.items():
            if kind != "blocks" or record != "adamh" or s >= 250:
                assert rate == pytest.approx(reference.rate(kind, s), rel=1e-12), (s, kind)
        if reference.late:
            assert now.momentum == pytest.approx(momentum_of_46(s), rel=1e-12)


# n: normal with variance 0.33 / fan_in; t: with variance 1 / (3 fan_in); u: uniform with bound
# 1 / sqrt(fan_in). A number is a factor. k and v are as q; the bias of fc as that of q.
COLUMNS = [f"{name}.weight" for name in ("q", "fc", "attn_proj", "mlp_proj", "lm_head")]
COLUMNS += [f"{name}.bias" for name in ("q", "attn_proj", "mlp_proj", "lm_head")]
FIRST_WEIGHTS = {
    "baseline": "n n 0 0 0 0 0 0 0",
    "torch": "u u 0 0 0 u 0 0 0",
    "scaled_torch": "u 1.5u 1.25u 3u 0 u 0 0 0",
    "scaled_baseline": "n 1.5n 1.25n 3n n 0 0 0 0",
    "psgd": "t 1.5t 1.25t 3t u u u u u",
    "rademacher": "u u 0 0 0 u 0 0 0",
    "paired_rademacher": "u u 0 0 0 u 0 0 0",
}


@pytest.mark.parametrize("kind", FIRST_WEIGHTS)
def test_first_weights_have_the_published_distributions(kind):
    hp = replace(RECORDS["muon"], init=kind, model_dim=256, num_layers=4, vocab_size=1024)
    cells = dict(zip(COLUMNS, FIRST_WEIGHTS[kind].split(), strict=True))
    for name, p in track.GPT(replace(hp, num_heads=2)).named_parameters():
        split = {"rademacher": 0.14, "paired_rademacher": 0.125}.get(kind, 0)
        if name.endswith("gains"):
            far = split if name.startswith("blocks") else 0
            assert (p - 1).abs().tolist() == pytest.approx([far] * 256)
        elif name == "embed.weight":
            assert p.std().item() == pytest.approx(1, rel=0.02) and p.abs().max() > 3  # normal
        else:
            scale = (1024 if "mlp_proj" in name else 256) ** -0.5
            scale *= 1 - 0.1 * int(name.split(".")[1]) if split and "fc.w" in name else 1
            name = name.replace(".k.", ".q.").replace(".v.", ".q.").replace("fc.bias", "q.bias")
            cell = next(cells[column] for column in COLUMNS if name.endswith(column))
            scale *= float(cell[:-1] or 1)
            std = scale * {"n": 0.33, "t": 1 / 3, "u": 1 / 3, "0": 0}[cell[-1]] ** 0.5
            assert p.std().item() == pytest.approx(std, rel=4 / (2 * p.numel()) ** 0.5)
            highest = p.abs().max().item() / scale
            assert 0.95 < highest <= 1 if cell[-1] == "u" else highest > 2 or cell == "0"


def test_signs_of_gains_are_mirrored_and_later_layers_are_pairs():
    hp = replace(RECORDS["row_floor"], model_dim=12800, vocab_size=16, num_layers=12)
    signs = torch.stack(track.first_weights.paired_signs(hp))
    extra = signs.unflatten(1, (100, 128)).sum(2) / 2  # plus signs beyond 64, of each head
    assert (extra[6::2] == -extra[7::2]).all()
    assert extra[:6].std().item() == pytest.approx(32**0.5, rel=0.1)
    assert extra[6::2].std().item() == pytest.approx(8**0.5, rel=0.1)
    assert (signs @ signs.T / 12800 - torch.eye(12)).abs().max() < 0.05
    for block in track.GPT(replace(hp, model_dim=8, num_heads=1, head_dim=8)).blocks:
        assert (block.norm1.gains + block.norm2.gains == 2).all()

    signs = torch.stack(track.first_weights.independent_signs(hp))
    extra = signs.unflatten(1, (100, 128)).sum(2) / 2
    assert (extra[6::2] != -extra[7::2]).any() and (signs.abs() == 1).all()
    assert extra.std().item() == pytest.approx(32**0.5, rel=0.1)
    assert (signs @ signs.T / 12800 - torch.eye(12)).abs().max() < 0.05


@pytest.mark.parametrize("kind", ["rademacher", "paired_rademacher"])
def test_gains_are_split_by_the_signs_of_their_kind(kind, monkeypatch):
    name = {"rademacher": "independent_signs"}.get(kind, "paired_signs")
    drawn = [torch.ones(8), -torch.ones(8)]
    monkeypatch.setattr(track.first_weights, name, lambda hp: drawn)
    hp = replace(RECORDS["muon"], init=kind, vocab_size=16, model_dim=8, num_heads=1, head_dim=8)
    first, second = track.GPT(replace(hp, num_layers=2)).blocks
    split = 0.14 if kind == "rademacher" else 0.125
    for gains, expected in ((first.norm1.gains, 1 - split), (second.norm1.gains, 1 + split)):
        assert gains.tolist() == pytest.approx([expected] * 8)
