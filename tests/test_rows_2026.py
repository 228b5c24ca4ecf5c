"""The records of 2025-08-23 (row A) and 2026-01-04 (row B) against their float64 reading: loss and
gradients, whole steps of the optimizers, schedules, batches."""

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import reference
import reference_2026 as exact
import torch

import train_gpt
from loader import distributed_data_generator
from train_gpt import GPT, RECORDS, Optimizers, gradient_buffer, moment

A = RECORDS["2025-08-23_SparseAttnGate"]
B = RECORDS["2026-01-04_MixedPrecisionInterweavedOptimizer"]
SMALL = {"model_dim": 64, "num_heads": 2, "head_dim": 32, "vocab_size": 512}
SMALL_A, SMALL_B = replace(A, **SMALL), replace(B, **SMALL)
END_OF_TEXT = 50256

# -----------------------------------------------------------------------------
# Loss and gradients, all layers


@pytest.fixture
def small_vocabulary(monkeypatch):
    """Of 512 words, the last of which begins a document."""
    for module in (train_gpt, reference, exact):
        monkeypatch.setattr(module, "END_OF_TEXT", 511)


def sequence(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Short documents, one of a single token, and a document of nearly all the rest."""
    stream = torch.randint(0, 511, (length + 1,), generator=torch.Generator().manual_seed(0))
    stream[[0, 60, 130, 131, length - 20]] = 511
    return stream[:-1].int(), stream[1:]


def in_float64(model: GPT) -> dict[str, torch.Tensor]:
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def reading(hp, weights, inputs, targets, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a row trains at a step, and the mean loss of the next token."""
    case = weights, inputs.long(), targets
    if hp is SMALL_A:
        return exact.loss_a(*case, exact.windows_a(step)[0], hp.num_heads)
    shares = [float(share) for share in exact.target_weights_b(step)]
    rest = *exact.windows_b(step), shares, *exact.rotary_b(step, hp.head_dim), hp.num_heads
    return exact.loss_b(*case, *rest)


# Step and length: windows of 128, 384 and 1792 tokens; 384 (tied), 896 (tied), 1408 and 1664.
CASES = [(SMALL_A, 0, 640), (SMALL_A, 300, 640), (SMALL_A, 1695, 1152), (SMALL_B, 10, 640)]
CASES += [(SMALL_B, 700, 1152), (SMALL_B, 1300, 1152), (SMALL_B, 1810, 1152)]


@pytest.mark.parametrize(("hp", "step", "length"), CASES)
def test_loss_and_all_gradients_equal_float64(hp, step, length, randomize, small_vocabulary):
    """The value is the mean loss of the next token; gradients are those of a sum, in row B with
    several targets. Scalars' gradients are sums of what nearly cancels."""
    model, now = randomize(GPT(hp)), moment(step, hp)
    model.tie(now.tied)
    weights, (inputs, targets) = in_float64(model), sequence(length)
    weights["embed.weight"] = weights["lm_head.weight" if now.tied else "embed.weight"]
    loss = model(inputs, targets, now)
    loss.backward()
    trained, mean = reading(hp, weights, inputs, targets, step)
    trained.backward()
    assert loss.item() == pytest.approx(mean.item(), abs=2e-6)
    for name, p in model.named_parameters():
        expected = weights[name].grad
        error, allowed = (p.grad - expected).norm(), 3e-5 * expected.norm() + 1e-5 * (p.ndim < 2)
        assert error < allowed, f"{name}: error {error:.1e} of {expected.norm():.1e}"


@pytest.mark.parametrize("step", [10, 1840])
def test_validation_has_the_next_token_alone(step, randomize, small_vocabulary):
    """Whatever targets its step trains. The last window changes no rotary frequency."""
    model, (inputs, targets) = randomize(GPT(SMALL_B)).eval(), sequence(640)
    weights, loss = in_float64(model), model(inputs, targets, moment(step, SMALL_B))
    _, mean = reading(SMALL_B, weights, inputs, targets, step)
    assert loss.item() == pytest.approx(mean.item(), abs=2e-6)
    loss.backward()
    (640 * mean).backward()
    found, expected = model.lm_head.weight.grad, weights["lm_head.weight"].grad
    assert (found - expected).norm() < 3e-5 * expected.norm()


@pytest.mark.parametrize("step", [0, 600, 1200, 1695, 1800, 1840])
@pytest.mark.parametrize("hp", [SMALL_A, SMALL_B])
def test_masks_are_those_of_the_published_windows(hp, step, small_vocabulary):
    """Also of windows longer than the sequences above."""
    model = GPT(hp)
    windows, visible = exact.windows_b(step), exact.visible_tokens
    if hp is SMALL_A:
        windows, visible = exact.windows_a(min(step, 1695)), exact.visible_blocks
    tokens, _ = sequence(2816)
    first, position = model.masks(tokens, moment(step, hp), lambda row: row), torch.arange(2816)
    for name, window in zip(("long", "short"), windows, strict=True):
        mask = (position <= position[:, None]) & (position >= first[name][:, None])
        assert torch.equal(mask, visible(tokens, window))


def test_head_and_embedding_are_one_up_to_step_1201(randomize):
    """One weight and one gradient; then two weights, equal at first, and two gradients."""
    model = randomize(GPT(SMALL_B))
    embed, head = model.embed.weight, model.lm_head.weight
    for step in (0, 1201):
        model.tie(moment(step, SMALL_B).tied)
        assert embed.data_ptr() == head.data_ptr()
        assert gradient_buffer(embed) is gradient_buffer(head)
    gradient_buffer(head).fill_(1.0)
    model.tie(moment(1202, SMALL_B).tied)
    assert torch.equal(embed, head) and embed.data_ptr() != head.data_ptr()
    assert gradient_buffer(head).all() and not gradient_buffer(embed).any()


def test_row_b_begins_with_the_published_weights():
    """Bounds of uniform weights, deviations of normal ones, and constants."""
    width = 96
    w = dict(GPT(replace(B, model_dim=width, num_heads=2, head_dim=48)).named_parameters())
    root = width**-0.5
    for name, bound in (("attn.qkv_w", 3**0.5 * root), ("mlp.c_fc.weight", 0.75**0.5 * root)):
        assert w[f"blocks.3.{name}"].abs().max().item() == pytest.approx(bound, rel=0.01)
        assert w[f"blocks.3.{name}"].std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert w["lm_head.weight"].std().item() == pytest.approx(0.005, rel=0.01)
    assert torch.equal(w["embed.weight"], w["lm_head.weight"])
    constants = {"attn.lambdas": [0.5, 1.0], "lambdas": [1.1], "x0_lambda": [0.0]}
    for name, values in constants.items():
        assert w[f"blocks.8.{name}"].tolist() == pytest.approx(values)
    assert w["backout_lambda"].item() == 0.5 and set(w["skip_weights"].tolist()) == {-1.5}
    zeros = {name for name, p in w.items() if not p.any()}
    names = ("c_proj.weight", "gate", "gates", "x0_lambda", "smear_lambda")
    assert zeros == {n for n in w if n.endswith(names) or n.startswith("value_embeds")}


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
STEPS = [(SMALL_A, 0, 1), (SMALL_A, 0, 3), (SMALL_A, 932, 3), (SMALL_B, 0, 1), (SMALL_B, 0, 4)]
STEPS += [(SMALL_B, 598, 6), (SMALL_B, 1198, 8), (SMALL_B, 1199, 6), (SMALL_B, 1836, 4)]


@pytest.mark.parametrize(("hp", "first", "count"), STEPS)
def test_whole_steps_equal_the_float64_reading(hp, first, count, randomize):
    """Matrices learn at each step; in row B all else at odd steps, from two steps' gradients. The
    changes agree but for the rounding of weights, and for the decay of a few numbers whose updates
    are so near 0 that rounding gives them another sign."""
    model, gradients = randomize(GPT(hp)), []
    optimizers = Optimizers(model, hp)
    model.tie(moment(first, hp).tied)
    initial = {name: p.detach().double() for name, p in model.named_parameters()}
    weights = {name: w.clone() for name, w in initial.items()}
    for step in range(first, first + count):
        now, of_step = moment(step, hp), made_up_gradients(model, step)
        model.tie(now.tied)
        for name, grad in of_step.items():  # the sum over hp.batch_seqs sequences
            gradient_buffer(model.get_parameter(name)).add_(hp.batch_seqs * grad)
        optimizers.begin_last_backward(now)
        optimizers.step(now)
        gradients.append({name: grad.double() for name, grad in of_step.items()})
    (exact.play_a if hp is SMALL_A else exact.play_b)(weights, gradients, first)
    for name, p in model.named_parameters():
        expected, change = weights[name], (weights[name] - initial[name]).norm()
        error, allowed = (p.detach() - expected).norm(), 5e-4 * change + 1e-7 * expected.norm()
        assert error <= allowed, f"{name}: error {error:.1e} in a change of {change:.1e}"


def test_each_parameter_of_row_b_learns_by_the_published_numbers():
    """Also by those that a few steps in float32 hide, as the decay of gates."""
    with torch.device("meta"):
        groups = train_gpt.members(GPT(B))
    for group in train_gpt.parameter_table(B):
        for name in map(exact.without_numbers, groups[group.name]):
            if name in exact.NORMUON_B:
                assert (group.name, group.lr, group.every) == ("muon", 0.023, 1)
                continue
            factor, betas, decay = exact.ADAM_B[name]
            found = group.lr, *group.rule.keywords["betas"], group.rule.keywords["decay"]
            assert found == pytest.approx((0.008 * factor, *betas, 0.005 * decay), rel=1e-12)
            assert group.every == 2


# -----------------------------------------------------------------------------
# Schedules


def test_row_a_is_scheduled_as_in_exact_fractions():
    for step in range(1696):
        now, (long, short) = moment(step, A), exact.windows_a(step)
        expected = exact.multiplier_a(step), exact.momentum_a(step)
        assert (now.lr, now.momentum) == pytest.approx([float(x) for x in expected], abs=1e-12)
        assert (now.window, max(now.short // 128, 1) * 128) == (long, short)
        assert (now.seq_len, now.longest, now.targets, now.tied) == (49152, 0, (1.0,), False)


def test_row_b_is_scheduled_as_in_exact_fractions():
    for step in range(1841):
        now, (long, short) = moment(step, B), exact.windows_b(step)
        expected = exact.multiplier_b(step), exact.momentum_b(step), *exact.target_weights_b(step)
        found = now.lr, now.momentum, *now.targets
        assert found == pytest.approx([float(x) for x in expected], abs=1e-12)
        assert (now.window, now.short // 128 * 128) == (long, short)
        assert (now.seq_len, now.longest) == (exact.tokens_b(step), exact.DOCUMENT_CAP_B)
        assert now.tied == exact.tied_b(step)


LR_A = {0: 1, 126: 1, 932: 1, 933: 0.999115, 1000: 0.920059, 1500: 0.330088, 1694: 0.10118}
WINDOW_A = {0: 128, 125: 128, 126: 256, 500: 512, 932: 1024, 1000: 1024, 1500: 1536, 1694: 1792}
LR_B = {0: 1, 600: 1, 601: 1.52, 900: 1.52, 901: 1.518422, 1199: 1.048244, 1200: 1.046667}
LR_B |= {1201: 1.184856, 1250: 1.096111, 1799: 0.101811, 1800: 0.1, 1839: 0.1}
MOMENTUM_B = {0: 0.85, 150: 0.9, 300: 0.95, 1790: 0.95, 1791: 0.948, 1815: 0.9, 1839: 0.852}
TABLES = [(A, "lr", LR_A), (A, "window", WINDOW_A), (B, "lr", LR_B), (B, "momentum", MOMENTUM_B)]


def test_schedules_have_the_published_numbers():
    for hp, field, table in TABLES:
        found = {step: getattr(moment(step, hp), field) for step in table}
        assert found == pytest.approx(table, abs=6e-7)
    for hp, published in ((A, 666.5e6), (B, 487.6e6)):
        tokens = sum(hp.batch_seqs * moment(i, hp).seq_len for i in range(hp.num_iterations))
        assert tokens == pytest.approx(published, abs=5e4)


YARN = {  # by step: frequencies 0, 1, 8, 16 and 31 of 32, and attention's scale
    600: [1, 0.799638, 0.100042, 0.0123408, 0.000418527, 0.116946],
    1200: [1, 0.799638, 0.0792315, 0.00796326, 0.000266335, 0.127518],
    1840: [1, 0.799638, 0.0736302, 0.00676914, 0.000225361, 0.131778],
}


@pytest.mark.parametrize("step", [0, 599, 600, 1199, 1200, 1799, 1800, 1840])
def test_rotary_tables_have_the_published_frequencies_and_scales(step):
    windows = tuple(stage.window for stage in train_gpt.stages_until(step, B))
    frequencies, scale = exact.rotary_b(step)
    found, factor = train_gpt.yarn(1024.0 ** -(torch.arange(32).double() / 31), windows)
    assert [*found.tolist(), 0.1 * factor] == pytest.approx([*frequencies, scale], rel=1e-12)
    _, sin, factor = train_gpt.rotary_table(2, B, "cpu", windows=windows)
    found = [*sin[1, 0, :64].double().asin().tolist(), B.attn_scale * factor.item()]  # position 1
    assert found == pytest.approx([*frequencies, *[0.0] * 32, scale], rel=2e-6)
    if step in YARN:
        assert [found[i] for i in (0, 1, 8, 16, 31, 64)] == pytest.approx(YARN[step], rel=5e-6)


@pytest.mark.parametrize("steps", [46, 100, 190, 920, 1840, 3000])
def test_a_run_of_another_length_has_shares_of_it(steps):
    hp = replace(B, num_iterations=steps)
    rest = steps - round(steps * 40 / 1840)
    *moments, last = [moment(step, hp) for step in range(steps + 1)]
    counts = [sum(now.window == window for now in moments) for window in (384, 896, 1408, 1664)]
    assert sum(counts) == steps and counts[3] == steps - rest
    assert all(abs(count - rest / 3) < 1 for count in counts[:3])
    assert (last.window, last.short // 128) == (2560, 6)
    lengths = [sum(now.seq_len == 16384 * k for now in moments) for k in (1, 2, 3)]
    assert lengths == [*counts[:2], counts[2] + counts[3]]
    assert [now.lr for now in moments[rest:]] == pytest.approx([0.1] * counts[3])
    tied = [now.tied for now in moments].index(False)
    assert tied % 2 == 0 and 0 < tied - rest * 2 / 3 < 3


# -----------------------------------------------------------------------------
# Batches


@pytest.fixture
def shards_of(write_shard, tmp_path):
    """shards_of(seed) makes three, which begin within a document: short documents and some long
    ones. It gives them, and a pattern for their files."""

    def make(seed: int) -> tuple[list[list[int]], str]:
        rng, shards = np.random.default_rng(seed), []
        for i in range(3):
            tokens = rng.integers(0, END_OF_TEXT, 5).tolist()
            while len(tokens) < 1500:
                length = rng.integers(20, 90) if rng.random() < 0.1 else rng.integers(0, 15)
                tokens += [END_OF_TEXT, *rng.integers(0, END_OF_TEXT, length).tolist()]
            write_shard(f"s{i}.bin", tokens)
            shards.append(tokens)
        return shards, str(tmp_path / "s*.bin")

    return make


def compare_batches(shards, pattern: str, count: int, batches_of, start_step=0, **options) -> None:
    """What ranks read, put together, with batches_of(shard, step): a shard's, from a step on."""
    expected = []
    while len(expected) < count:
        for shard in shards:
            expected += batches_of(shard, len(expected))
    expected = expected[start_step:count]
    options |= {"batch_seqs": 4, "start_step": start_step, "epochs": 0}
    for size in (1, 2, 4):
        share = partial(distributed_data_generator, pattern, world_size=size, **options)
        ranks = [itertools.islice(share(rank=rank), len(expected)) for rank in range(size)]
        for batch, *parts in zip(expected, *ranks, strict=True):
            inputs, targets = (torch.cat(both).tolist() for both in zip(*parts, strict=True))
            assert list(zip(inputs, targets, strict=True)) == batch


@pytest.mark.parametrize("seed", range(6))
def test_batches_of_row_a_begin_with_documents(seed, shards_of):
    options = {"seq_len": 32, "longest": 0}
    compare_batches(*shards_of(seed), 40, lambda s, _: exact.batches_a(s, 32, 4), **options)


@pytest.mark.parametrize("skipped", [[], [4]])
def test_row_a_leaves_a_shard_by_where_the_next_document_begins(skipped, write_shard):
    """From there on, 9 tokens lie ahead: no more than two batches and a token."""
    shard = [END_OF_TEXT, 1, 2, 3, *skipped, *[END_OF_TEXT, 5, 6, 7] * 2, END_OF_TEXT]
    batches = distributed_data_generator(str(write_shard("s.bin", shard)), 4, 1, 0, 1, longest=0)
    assert len(list(batches)) == len(exact.batches_a(shard, 4, 1)) == 1


# Lengths and caps by step: as in row B, and any.
SIZES = [([16] * 30 + [32] * 30 + [48] * 32, [24] * 92)]
SIZES += [([16, 48, 32, 1, 64] * 12, [7, 7, 100, 30, 5, 24] * 10)]


@pytest.mark.parametrize(("first", "seed"), [(0, 0), (0, 1), (17, 2), (37, 3)])
@pytest.mark.parametrize(("lengths", "caps"), SIZES)
def test_batches_of_row_b_are_the_beginnings_of_documents(lengths, caps, first, seed, shards_of):
    """Lengths and caps may change at any step; a run may go on at any."""
    options = {"seq_len": lengths.__getitem__, "longest": caps.__getitem__}
    options |= {"start_step": first, "num_batches": len(lengths)}

    def batches_of(shard, step):
        return exact.batches_b(shard, lengths[step:], caps[step:], 4)

    compare_batches(*shards_of(seed), len(lengths), batches_of, **options)
