"""The records of 2025-08-23 (row A), 2026-01-04 (B), 2026-01-19 (C), 2026-01-26 (C5) and 2026-03-06
(D) against their float64 reading: loss and gradients, whole steps of the optimizers, schedules."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import train_gpt_2026
from frontier import reference_2026 as exact
from train_gpt_2026 import GPT, RECORDS, Moment, Optimizers

FULL = {
    "A": RECORDS["2025-08-23_SparseAttnGate"],
    "B": RECORDS["2026-01-04_MixedPrecisionInterweavedOptimizer"],
    "C": RECORDS["2026-01-19_BigramHashEmbedding"],
    "C5": RECORDS["2026-01-26-UntieValueEmbeddings"],
    "D": RECORDS["2026-03-06_SimplifyHC"],
}
ROW = {"B": exact.B, "C": exact.C, "C5": exact.C5, "D": exact.D}
TWO_HEADS = {"model_dim": 64, "num_heads": 2, "head_dim": 32, "vocab_size": 512}
SIX_HEADS = {"model_dim": 96, "num_heads": 6, "head_dim": 16, "vocab_size": 512}
SMALL = {name: replace(FULL[name], **TWO_HEADS) for name in ("A", "B")}
SMALL |= {n: replace(FULL[n], **SIX_HEADS, bigram_rows=1234) for n in ("C", "C5", "D")}

# -----------------------------------------------------------------------------
# Loss and gradients, all layers


def sequence(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets: short documents, one of a single token, and a document of nearly
    all the rest."""
    stream = torch.randint(0, 511, (length + 1,), generator=torch.Generator().manual_seed(0))
    stream[[0, 60, 130, 131, length - 20]] = 511
    return stream[:-1].int(), stream[1:]


def in_float64(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def reading(name, weights, inputs, targets, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a row trains at a step, and the mean loss of the next token."""
    case, heads = (weights, inputs.long(), targets), SMALL[name].num_heads
    if name == "A":
        return exact.loss_a(*case, exact.windows_a(step)[0], heads)
    return exact.loss(ROW[name], *case, step, heads)


# One in each stage; the first two are tied, in row D also the third.
CASES = [("A", 300), ("B", 700), ("B", 1300), ("C", 10), ("C", 1580), ("C5", 1300)]
CASES += [("D", 10), ("D", 967), ("D", 1460)]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_loss_and_all_gradients_equal_float64(name, step, randomize, vocabulary_of_512):
    """The value is the mean loss of the next token; gradients are those of a sum, from row B on
    with several targets. Scalars' gradients are sums of what nearly cancels."""
    model, now = randomize(GPT(SMALL[name])), Moment(step, SMALL[name])
    weights, (inputs, targets) = in_float64(model), sequence(500)
    weights["embed.weight"] = weights["lm_head.weight" if now.tied else "embed.weight"]
    loss = model(inputs, targets, now)
    loss.backward()
    trained, mean = reading(name, weights, inputs, targets, step)
    trained.backward()
    assert loss.item() == pytest.approx(mean.item(), abs=2e-6)
    assert (model.embed.weight.grad is None) == now.tied
    for key, p in model.named_parameters():
        if p.grad is None:
            continue  # the head has its gradient
        expected = weights[key].grad
        error, allowed = (
            (p.grad.to_dense() - expected).norm(),
            3e-5 * expected.norm() + 1e-5 * (p.ndim < 2),
        )
        assert error < allowed, f"{key}: error {error:.1e} of {expected.norm():.1e}"


@pytest.mark.parametrize(("name", "step"), [("C", 10), ("D", 1490)])
def test_validation_has_the_next_token_alone(name, step, randomize, vocabulary_of_512):
    """Whatever targets its step trains. The last window changes no rotary frequency."""
    model, (inputs, targets) = randomize(GPT(SMALL[name])).eval(), sequence(500)
    weights, loss = in_float64(model), model(inputs, targets, Moment(step, SMALL[name]))
    _, mean = reading(name, weights, inputs, targets, step)
    assert loss.item() == pytest.approx(mean.item(), abs=2e-6)
    loss.backward()
    (500 * mean).backward()
    found, expected = model.lm_head.weight.grad, weights["lm_head.weight"].grad
    assert (found - expected).norm() < 3e-5 * expected.norm()


@pytest.mark.parametrize("rows", [2, 1234, 251520, 754560])
def test_bigrams_have_the_published_rows(rows):
    """Wrapped to 32 bits by hand. The last row of the table is the first token's alone."""
    tokens = torch.randint(0, 50304, (3000,), generator=torch.Generator().manual_seed(0))
    tokens[:4] = torch.tensor([50256, 50303, 50303, 0])
    found = train_gpt_2026.bigram_hash(tokens.int(), rows).tolist()
    assert found == exact.bigram_rows(tokens.tolist(), rows)
    assert found[0] == rows - 1 and min(found) >= 0 and max(found[1:]) < rows - 1
    published = [50256, 464, 3290, 318, 257, 50256, 198, 50256]
    found = train_gpt_2026.bigram_hash(torch.tensor(published, dtype=torch.int32), 251520)
    assert found.tolist() == [251519, 204580, 223622, 60513, 135950, 5304, 14985, 158884]


MASKS = [("A", 2816, 0), ("A", 2816, 600), ("A", 2816, 1695), ("B", 2816, 1200), ("B", 2816, 1840)]
MASKS += [("C", 900, 0), ("D", 900, 483), ("D", 900, 1490)]


@pytest.mark.parametrize(("name", "length", "step"), MASKS)
def test_masks_are_those_of_the_published_windows(name, length, step, vocabulary_of_512):
    """Also of windows longer than the sequences above. In layers of paired heads a window counts
    places, two for each token."""
    windows = exact.windows_a(step) if name == "A" else exact.windows(ROW[name], step)
    tokens, _ = sequence(length)
    masks = GPT(SMALL[name]).masks(tokens, Moment(step, SMALL[name]))
    windows = dict(zip(("long", "short"), windows, strict=True))
    if name in ("C", "D"):
        windows["short+pair"] = windows["short"]
    assert set(masks) == set(windows)
    for key, mask in masks.items():
        if name == "A":
            expected = exact.visible_blocks(tokens, windows[key])
        else:
            expected = exact.visible_places(tokens, windows[key], 1 + key.endswith("pair"))
        assert torch.equal(mask == 0, expected)


def first_numbers(name: str, layer: int) -> dict[str, list[float]]:
    """A layer's parameters that are not matrices."""
    attends = layer != 6
    numbers = {"attn.lambdas": [0.5, 1.0]} if attends else {}
    if name == "D":
        both = 1 + attends  # of attention and MLP
        numbers |= {"residual_lambda": [1.1**0.5] * both, "post_lambda": [1.0] * both}
        return numbers | ({"x0_lambda": [0.0], "bigram_lambda": [0.05]} if attends else {})
    numbers |= {"lambdas": [1.1], "x0_lambda": [0.0]}
    return numbers | ({"bigram_lambda": [0.1]} if name != "B" else {})


@pytest.mark.parametrize("name", ROW)
def test_rows_begin_with_the_published_weights(name):
    """Bounds of uniform weights, deviations of normal ones, and constants."""
    small = {"model_dim": 96, "num_heads": 2, "head_dim": 48}
    small |= {"bigram_rows": 1234} if name != "B" else {}
    w = dict(GPT(replace(FULL[name], **small)).named_parameters())
    wide, narrow = (3 / 96) ** 0.5, (0.75 / 96) ** 0.5
    bounds = {"attn.qkv_w": wide, "mlp.c_fc.weight": narrow}
    if name == "D":
        bounds |= {"attn.qkv_w": narrow, "attn.c_proj.weight": narrow}
    for key, bound in bounds.items():
        assert w[f"blocks.3.{key}"].abs().max().item() == pytest.approx(bound, rel=0.01)
        assert w[f"blocks.3.{key}"].std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert w["lm_head.weight"].std().item() == pytest.approx(0.005, rel=0.01)
    assert torch.equal(w["embed.weight"], w["lm_head.weight"])
    tables = [p for key, p in w.items() if key.startswith("value_embeds")]
    assert len(tables) == (5 if name in ("C5", "D") else 3)
    for table in tables if name == "D" else []:
        assert table.std().item() == pytest.approx(0.01, rel=0.01)

    found = {key: p.tolist() for key, p in w.items() if key.startswith("blocks") and p.ndim < 2}
    expected = {}
    for i in range(11):
        expected |= {f"blocks.{i}.{key}": n for key, n in first_numbers(name, i).items()}
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        assert found[key] == pytest.approx(numbers), key
    assert w["backout_lambda"].item() == 0.5 and set(w["skip_weights"].tolist()) == {-1.5}
    zeros = {key for key, p in w.items() if not p.any()}
    ends = ["mlp.c_proj.weight", "bigram_embed.weight", "gate", "gates"]
    ends += ["x0_lambda", "smear_lambda"]
    if name != "D":
        ends += ["attn.c_proj.weight", *(f"value_embeds.embed.{k}.weight" for k in range(5))]
    assert zeros == {key for key in w if key.endswith(tuple(ends))}


# -----------------------------------------------------------------------------
# Updates


def made_up_gradients(model: GPT, step: int) -> dict[str, torch.Tensor]:
    """Some so small that every epsilon matters, some zero: a layer's at step 0, some words'."""
    generator, gradients = torch.Generator().manual_seed(step), {}
    for name, p in model.named_parameters():
        size = 1e-9 if p.ndim < 2 or "gate" in name else 1e-8 if "blocks.1." in name else 1.0
        size = 0.0 if step == 0 and "blocks.0." in name else size
        gradients[name] = size * torch.randn(p.shape, generator=generator)
        gradients[name][: 200 * ("embed" in name)] = 0.0
    return gradients


# First step and count: the beginning, changes of the learning rate, the split, the end.
STEPS = [("A", 0, 3), ("A", 932, 3), ("B", 1198, 8), ("B", 1836, 4), ("C", 518, 6)]
STEPS += [("C5", 1021, 8), ("D", 0, 4), ("D", 481, 4), ("D", 964, 8), ("D", 1486, 4)]


@pytest.mark.parametrize(("name", "first", "count"), STEPS)
def test_whole_steps_equal_the_float64_reading(name, first, count, randomize):
    """Matrices learn at each step; from row B on all else at odd steps, from two steps' gradients.
    The changes agree but for the rounding of weights, and for the decay of a few numbers whose
    updates are so near 0 that rounding gives them another sign."""
    hp = SMALL[name]
    model, gradients = randomize(GPT(hp)), []
    if Moment(first, hp).tied:
        model.embed.weight.data.copy_(model.lm_head.weight.data)
    optimizers = Optimizers(model, hp)
    initial = {key: p.detach().double() for key, p in model.named_parameters()}
    weights = {key: w.clone() for key, w in initial.items()}
    for step in range(first, first + count):
        now, of_step = Moment(step, hp), made_up_gradients(model, step)
        for key, grad in of_step.items():  # the sum over hp.batch_seqs sequences
            read = "lm_head.weight" if now.tied and key == "embed.weight" else key
            of_both = model.get_parameter(read)
            grad = hp.batch_seqs * grad
            of_both.grad = grad if of_both.grad is None else of_both.grad + grad
        optimizers.step(now)
        gradients.append({key: grad.double() for key, grad in of_step.items()})
    play = exact.play_a if name == "A" else partial(exact.play, ROW[name])
    play(weights, gradients, first)
    for key, p in model.named_parameters():
        expected, change = weights[key], (weights[key] - initial[key]).norm()
        error, allowed = (p.detach() - expected).norm(), 5e-4 * change + 1e-7 * expected.norm()
        assert error <= allowed, f"{key}: error {error:.1e} in a change of {change:.1e}"


@pytest.mark.parametrize("name", ROW)
def test_each_parameter_learns_by_the_published_numbers(name):
    """Also by those that a few steps in float32 hide, as the decay of gates."""
    with torch.device("meta"):
        model = GPT(FULL[name])
    names = {p: exact.without_numbers(key) for key, p in model.named_parameters()}
    learning = set()
    for group in Optimizers.parameter_groups(model, FULL[name]):
        for key in {names[p] for p in group.params}:
            learning.add(key)
            if key in exact.NORMUON_B:
                assert (group.name, group.lr) == ("muon", 0.023)
                continue
            factor, betas, decay = ROW[name].adam[key]
            found = group.lr, *group.rule.keywords["betas"], group.rule.keywords["decay"]
            assert found == pytest.approx((0.008 * factor, *betas, 0.005 * decay), rel=1e-12)
    assert learning == (ROW[name].adam | ROW[name].normuon).keys()


# -----------------------------------------------------------------------------
# Schedules


def test_row_a_is_scheduled_as_in_exact_fractions():
    for step in range(1696):
        now, (long, short) = Moment(step, FULL["A"]), exact.windows_a(step)
        expected = exact.multiplier_a(step), exact.ramp(step)
        assert (now.lr, now.momentum) == pytest.approx([float(x) for x in expected], abs=1e-12)
        assert (now.window, max(now.short // 128, 1) * 128) == (long, short)
        assert (now.seq_len, now.longest, now.targets, now.tied) == (49152, 0, (1.0,), False)


@pytest.mark.parametrize("name", ROW)
def test_later_rows_are_scheduled_as_in_exact_fractions(name):
    row, hp = ROW[name], FULL[name]
    assert hp.num_iterations == row.steps + exact.EXTENSION
    for step in range(hp.num_iterations + 1):
        now, (long, short) = Moment(step, hp), exact.windows(row, step)
        expected = exact.multiplier(row, step), exact.momentum_of(row, step)
        expected = [float(x) for x in (*expected, *exact.target_weights(row, step))]
        assert (now.lr, now.momentum, *now.targets) == pytest.approx(expected, abs=1e-12), step
        assert (now.window, now.short // 128 * 128) == (long, short), step
        lengths = exact.tokens_of(row, step), exact.document_cap(row, step)
        assert (now.seq_len, now.longest) == lengths, step
        assert now.tied == exact.is_tied(row, step), step


TARGETS_C = {0: (1, 0.5, 0.25), 520: (1, 0.5), 521: (1, 0.499), 1039: (1, 0.00096), 1040: (1,)}


def test_schedules_have_the_published_numbers():
    for step, targets in TARGETS_C.items():
        assert Moment(step, FULL["C"]).targets == pytest.approx(targets, abs=5e-5)
    for name, published in (("A", 666.5e6), ("B", 487.6e6), ("C", 424.7e6), ("D", 395.8e6)):
        hp = FULL[name]
        tokens = sum(hp.batch_seqs * Moment(i, hp).seq_len for i in range(hp.num_iterations))
        assert tokens == pytest.approx(published, abs=5e4)


YARN = {  # by stage: frequencies 0, 1, 8, 16 and 31 of 32, and attention's scale
    1: [1, 0.799638, 0.100042, 0.0123408, 0.000418527, 0.116946],
    2: [1, 0.799638, 0.0792315, 0.00796326, 0.000266335, 0.127518],
    3: [1, 0.799638, 0.0736302, 0.00676914, 0.000225361, 0.131778],
}
TURNS = [("B", 599), ("B", 600), ("B", 1800), ("C", 1039), ("C", 1040), ("C", 1600)]
TURNS += [("D", 482), ("D", 483), ("D", 967), ("D", 1490)]


@pytest.mark.parametrize(("name", "step"), TURNS)
def test_rotary_tables_have_the_published_frequencies_and_scales(name, step):
    hp = FULL[name]
    windows = tuple(stage.window for stage in train_gpt_2026.stages_until(step, hp))
    frequencies, scale = exact.rotary(ROW[name], step)
    found, factor = train_gpt_2026.yarn(1024.0 ** -(torch.arange(32).double() / 31), windows)
    assert [*found.tolist(), 0.1 * factor] == pytest.approx([*frequencies, scale], rel=1e-12)
    with torch.device("meta"):
        model = GPT(hp)
    _, sin, factor = model.rotary(torch.arange(2), Moment(step, hp))[False]
    found = [*sin[1, 0, :64].double().asin().tolist(), hp.attn_scale * factor.item()]  # position 1
    assert found == pytest.approx([*frequencies, *[0.0] * 32, scale], rel=2e-6)
    if (stage := exact.stage(ROW[name], step)) in YARN:
        assert [found[i] for i in (0, 1, 8, 16, 31, 64)] == pytest.approx(YARN[stage], rel=5e-6)


@pytest.mark.parametrize("steps", [46, 190, 3000])
@pytest.mark.parametrize("name", ["B", "D"])
def test_a_run_of_another_length_has_shares_of_it(name, steps):
    hp = replace(FULL[name], num_iterations=steps)
    rest = steps - round(steps * 40 / FULL[name].num_iterations)
    *moments, last = [Moment(step, hp) for step in range(steps + 1)]
    counts = [sum(now.window == window for now in moments) for window in (384, 896, 1408, 1664)]
    assert sum(counts) == steps and counts[3] == steps - rest
    assert all(abs(count - rest / 3) < 1 for count in counts[:3])
    assert (last.window, last.short // 128) == (2560, 6)
    lengths = [sum(now.seq_len == 16384 * k for now in moments) for k in (1, 2, 3)]
    assert lengths == [*counts[:2], counts[2] + counts[3]]
    floor = float(ROW[name].floor)
    assert [now.lr for now in moments[rest:]] == pytest.approx([floor] * counts[3])
    tied = [now.tied for now in moments].index(False)
    # Of integers: 2/3 of the steps, rounded up in row B and to the nearest in row D, then made odd.
    share = -(-2 * rest // 3) if name == "B" else (4 * rest + 3) // 6
    assert tied == (share | 1) + 1
