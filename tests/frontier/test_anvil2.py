"""forks/train_gpt_2026_08.py: record 92 against its float64 reading, and each of its techniques
turned off."""

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import runs
import tail_average
import train_gpt
import train_gpt_2026_08 as script
from fp8_layers import FP8Projection
from frontier import reference_2026 as exact
from frontier import reference_2026_07 as newest
from frontier import reference_2026_08 as reading
from frontier import test_newest, test_rows
from frontier.test_sampled_softmax import chosen_by_rule
from gpt2 import gpt2_encoding
from reference import relative_error
from test_kernels import interpreted, kernels, randn
from train_gpt_2026_08 import GPT, RECORDS, Moment, Optimizers, Run

NAME = "2026-08-30_ANVIL2"
RECORD = RECORDS[NAME]
COUNTS = {"10240": "400", "14336": "416", "24576": "480"}  # candidates, of 512 tokens
STAGES = re.sub("10240|14336|24576", lambda found: COUNTS[found[0]], RECORD.stages)
SMALL = replace(
    RECORD,
    **test_rows.SIX_HEADS,
    mlp_width=352,
    ngram_rows=1234,
    bigram_signs=37,
    stages=STAGES,
    fp8=False,
)
CPU = torch.device("cpu")
ENCODING = gpt2_encoding()
WORDS = [ENCODING.decode_single_token_bytes(i) for i in range(50256)]
main = functools.partial(train_gpt.main, run=Run)

# -----------------------------------------------------------------------------
# Loss and gradients


@pytest.fixture
def float64(monkeypatch):
    """Let all be computed in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch, "float32", torch.float64)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


def drawn(hp, randomize) -> GPT:
    """Return a model whose table of n-grams is drawn, too."""
    model = randomize(GPT(hp))
    model.share_ngrams()
    model.ngrams.rows[:-1].normal_(generator=torch.Generator().manual_seed(1))
    return model


def read_logits(model, inputs, now, border: int = 0) -> tuple[dict, torch.Tensor]:
    """Return all weights in float64, and the reading's capped logits (T, V)."""
    w = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    w["embed.weight"] = w["lm_head.weight" if now.tied else "embed.weight"]
    w["signs"] = model.signs.double()
    w["ngrams"] = model.ngrams.rows[:-1].double().requires_grad_()
    rows, signs = script.ngram_hashes(inputs, len(w["ngrams"]), len(w["signs"]))
    b = reading.ngrams(w, rows.long(), signs.long())
    return w, reading.capped_logits(w, inputs.long(), b, now.step, 6, border)


def among(chosen: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """Return the places of tokens among the chosen ones, or -1."""
    place = {token: i for i, token in enumerate(chosen)}
    return torch.tensor([place.get(token, -1) for token in tokens.tolist()])


# One in each stage, and one behind the split; the last but one has all tokens in the softmax.
@pytest.mark.parametrize("step", [10, 400, 590, 900, 1000, 1110, 1175, 1180])
def test_loss_and_all_gradients_equal_float64(step, randomize, vocabulary_of_512, float64):
    hp = replace(SMALL, attention_border=100)  # which long documents of the first stage have, too
    model, now = drawn(hp, randomize), Moment(step, hp)
    inputs, targets = test_rows.sequence(500)
    loss = model(inputs, targets, now)
    loss.backward()
    w, capped = read_logits(model, inputs, now, border=100)
    before, chosen = torch.tensor(newest.prefixes(WORDS[:512])), [*range(512)]
    if now.candidates:
        chosen, _ = chosen_by_rule(targets.tolist(), 0, now.candidates, 512)
    assert len(chosen) == {10: 400, 400: 400, 590: 400, 900: 416, 1000: 480}.get(step, 512)
    places, prefixes = among(chosen, targets), among(chosen, before)
    of_places = torch.full((len(chosen),), -1).scatter_(0, places, prefixes[targets])
    trained, mean = reading.loss(capped[:, chosen], places, of_places, step)
    trained.backward()
    assert loss.item() == pytest.approx(mean.item(), rel=1e-13)
    model.ngrams.collect()
    ((ids, grads),) = model.ngrams.waiting
    found = {"ngrams": torch.zeros(1235, 96).index_add_(0, ids, grads)[:-1]}
    found |= {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert w.keys() - found.keys() <= {"signs", "embed.weight", "blocks.7.post_lambda"}
    for key, grad in found.items():
        expected = torch.zeros_like(grad) if w[key].grad is None else w[key].grad
        error = (grad.to_dense() - expected).norm()
        assert error <= 1e-11 * expected.norm(), f"{key}: {error:.1e} of {expected.norm():.1e}"


def test_what_narrow_heads_lack_never_learns(randomize, vocabulary_of_512):
    model, now = drawn(SMALL, randomize), Moment(700, SMALL)
    model(*test_rows.sequence(500), now).backward()
    for i in reading.NARROW + reading.LONG:
        q = model.blocks[i].attn.qk_w.grad.view(12, 16, -1)
        lives = [d for d in range(16) if q[:, d].any()]
        assert lives == (reading.rotating(16) if i in reading.NARROW else [*range(16)])
        v = model.blocks[i].attn.v_w.grad.view(6, 16, -1)
        o = model.blocks[i].attn.c_proj.weight.grad.T.reshape(6, 16, -1)
        for part in (v, o):
            assert [d for d in range(16) if part[:, d].any()] == (
                [*range(8)] if i in reading.NARROW_VALUES else [*range(16)]
            )


@pytest.mark.parametrize("step", [10, 700, 1194])
def test_masks_have_borders_in_training_alone(step, vocabulary_of_512):
    """Windows of pairs count two places for each token."""
    hp = replace(SMALL, attention_border=1000)
    model, now, (tokens, _) = GPT(hp), Moment(step, hp), test_rows.sequence(2944)
    for training in (True, False):
        masks = model.train(training).masks(tokens, now)
        seen = reading.with_borders(tokens, 1000) if training else tokens
        assert training == (not torch.equal(seen, tokens))
        short, long = reading.windows(step)
        expected = {"short": (short, 1), "long": (long, 1), "short+pair": (short, 2)}
        assert set(masks) == set(expected)
        for name, (window, places) in expected.items():
            assert torch.equal(masks[name] == 0, exact.visible_places(seen, window, places))


def test_the_record_begins_with_the_published_weights():
    w = dict(GPT(replace(SMALL, bigram_signs=512)).named_parameters())
    bound = (0.75 / 96) ** 0.5
    for key in ("attn.qk_w", "attn.v_w", "attn.c_proj.weight", "mlp.c_fc.weight"):
        for i in (3, 8):  # 8 is narrow
            assert w[f"blocks.{i}.{key}"].abs().max().item() == pytest.approx(bound, rel=0.01)
            assert w[f"blocks.{i}.{key}"].std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    constants = {"mixer_scale": [0.1], "skip_weights": [-1.5] * 5, "smear_lambda": [0.0]}
    for i in range(10):
        constants[f"blocks.{i}.residual_lambda"] = [1.1**0.5] * 2
        constants[f"blocks.{i}.post_lambda"] = [1.0] * 2
    attends = (*reading.NARROW, *reading.LONG)
    constants |= {f"blocks.{i}.attn.lambdas": [0.5, 1.0] for i in attends}
    for name, made in reading.MADE.items():
        values = [[10 * newest.FIRST.get(re.sub("_.*", "", one), 0.0)] for one in made.split()]
        sizes = [6 if one[0] in "ag" else 1 for one in made.split()]
        rows = zip(values, sizes, strict=True)
        constants[f"mixers.{name}.bias"] = sum([value * count for value, count in rows], [])
    assert {key for key, p in w.items() if p.ndim < 2} == constants.keys()
    assert all(w[key].tolist() == pytest.approx(numbers) for key, numbers in constants.items())
    ends = "mlp.c_proj.weight", "gate", "smear_lambda", "out_w", "group_w"
    assert {key for key, p in w.items() if not p.any()} == {key for key in w if key.endswith(ends)}
    gates = [f"blocks.{i}.attn.value_gate" for i in (1, 2, 8)]
    assert [key for key in w if key.endswith("value_gate")] == gates
    assert w["value_embeds.embed.3.weight"].std().item() == pytest.approx(0.01, rel=0.01)
    assert "blocks.7.mlp.c_fc.weight" not in w and "blocks.8.second_mlp.c_fc.weight" in w


def test_it_has_the_published_sizes():
    with torch.device("meta"):
        model = GPT(replace(RECORD, canonical_mask=False))
    shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
    assert {shape for key, shape in shapes.items() if "c_fc" in key} == {(2816, 768)}
    assert shapes["blocks.0.attn.qk_w"] == (6, 256, 768)
    assert shapes["mixers.end.group_w"] == (10, 12, 64) and model.signs.shape == (8192, 768)
    assert [len(mixer.bias) for mixer in model.mixers.values()] == [23, 13, 14, 10]
    assert len([key for key in shapes if "c_fc" in key]) == 11


# -----------------------------------------------------------------------------
# Schedules


def test_it_is_scheduled_as_published():
    for step in range(RECORD.num_iterations + 1):
        now, (short, long) = Moment(step, RECORD), reading.windows(step)
        expected = reading.multiplier(step), reading.momentum(step)
        assert (now.lr, now.momentum) == pytest.approx(expected, abs=1e-12), step
        assert (now.window, now.short) == (long, short), step
        lengths = 2048 * reading.LENGTHS[reading.stage(step)], reading.CAPS[reading.stage(step)]
        assert (now.seq_len, now.longest) == lengths, step
        assert now.tied == reading.is_tied(step), step
        if step < RECORD.num_iterations:
            weights = *reading.target_weights(step), reading.prefix_share(step)
            assert (*now.targets, now.prefix) == pytest.approx(weights, abs=1e-12), step
            assert now.candidates == reading.candidates(step), step
            assert now.ngrams == reading.learns(step), step
            share = (1.0, reading.momentum(step)) if step < 514 else (0.4385, 0.85)
            assert (now.fast_share, now.fast_beta) == pytest.approx(share, abs=1e-12), step
    tokens = sum(8 * Moment(step, RECORD).seq_len for step in range(1194))
    assert tokens == sum(
        16384 * n * size for n, size in ((320, 8), (361, 16), (426, 24), (67, 20), (20, 8))
    )


# By stage: frequencies 0, 1, 2, 8, 16 and 31, and attention's scale, of wide and of narrow heads.
PUBLISHED = {
    400: (
        (1, 0.799638, 0.639421, 0.100042, 0.0123408, 0.000418527, 0.099404),
        (0.749932, 0.529483, 0.378512, 0.0643697, 0.00931484, 0.000325521, 0.158564),
    ),
    700: (
        (1, 0.799638, 0.639421, 0.0792315, 0.00796326, 0.000266335, 0.108390),
        (0.749932, 0.529483, 0.335206, 0.0410587, 0.00558891, 0.000195312, 0.174764),
    ),
    1180: (
        (1, 0.799638, 0.639421, 0.0736302, 0.00676914, 0.000225361, 0.112011),
        (0.749932, 0.529483, 0.335206, 0.0349181, 0.00465742, 0.00016276, 0.181136),
    ),
}


@pytest.mark.parametrize("step", [0, 400, 700, 1120, 1180, 1194])
def test_rotary_tables_have_the_published_frequencies_and_scales(step):
    with torch.device("meta"):
        model = GPT(replace(RECORD, canonical_mask=False))
    tables = model.rotary(torch.arange(2), Moment(step, RECORD))
    for narrow, which, scale in ((False, 1, 0.085), (True, 0, 0.13)):
        frequencies, expected = reading.turns_of(min(step, 1193), which, scale, 128)
        _, sin, factor = tables[narrow, False]
        turning = sin[1, 0].double().asin()
        assert len(turning) == (32 if narrow else 64) and not turning[32:].any()
        layer = model.blocks[0 if narrow else 3].attn
        found = [*turning[:32].tolist(), layer.scale * factor.item()]
        assert found == pytest.approx([*frequencies, expected], rel=2e-6)
        if step in PUBLISHED:
            found = [found[i] for i in (0, 1, 2, 8, 16, 31, 32)]
            assert found == pytest.approx(PUBLISHED[step][narrow], rel=5e-6)


# -----------------------------------------------------------------------------
# Updates


def test_each_parameter_learns_by_the_published_numbers():
    with torch.device("meta"):
        model = GPT(replace(RECORD, canonical_mask=False))
    names = {p: exact.without_numbers(key) for key, p in model.named_parameters()}
    learning = set()
    for group in script.Optimizers.parameter_groups(model, RECORD):
        for key in {names[p] for p in group.params}:
            learning.add(key)
            if key in reading.FACTOR:
                assert group.rule.func is script.anvil and group.lr == 0.023
                assert group.rule.keywords["factor"] == (1.0 if key.endswith("qk_w") else None)
                continue
            factor, betas, decay = reading.ADAM[key]
            found = group.lr, *group.rule.keywords["betas"], group.rule.keywords["decay"]
            assert found == pytest.approx((0.008 * factor, *betas, 0.005 * decay), rel=1e-12)
            waits = group.rule.func is script.table_adam
            assert waits == key.startswith("value_embeds") and group.steps == 2
    assert learning == reading.ADAM.keys() | reading.FACTOR.keys()


def play(hp, first: int, count: int, randomize) -> tuple[dict, dict, dict]:
    """Return weights before and after some steps with made-up gradients, and the reading's."""
    model, gradients = drawn(hp, randomize), []
    if Moment(first, hp).tied:
        model.embed.weight.data.copy_(model.lm_head.weight.data)
    optimizers = Optimizers(model, hp)
    initial = {key: p.detach().double().clone() for key, p in model.named_parameters()}
    weights = {key: w.clone() for key, w in initial.items()}
    model.ngrams.waiting = [(torch.tensor([0]), torch.zeros(1, hp.model_dim))]
    model.ngrams.learn = lambda now: None  # the table is in test_ngrams.py
    for step in range(first, first + count):
        now, of_step = Moment(step, hp), test_rows.made_up_gradients(model, step)
        for key, grad in of_step.items():
            read = "lm_head.weight" if now.tied and key == "embed.weight" else key
            of_both = model.get_parameter(read)
            grad = hp.batch_seqs * grad
            of_both.grad = grad if of_both.grad is None else of_both.grad + grad
        for _, rows in optimizers.groups:
            rows.collect()
        optimizers.step(now)
        gradients.append({key: grad.double() for key, grad in of_step.items()})
    reading.play(weights, gradients, first)
    return initial, dict(model.named_parameters()), weights


# The beginning; the slower rhythm; two momenta; the taper and the split.
@pytest.mark.parametrize(("first", "count"), [(0, 4), (333, 8), (512, 4), (1173, 7)])
def test_whole_steps_equal_the_float64_reading(first, count, randomize, float64):
    """As in test_rows.py. Gradients of value tables wait across steps of Adam."""
    initial, found, expected = play(SMALL, first, count, randomize)
    for key, p in found.items():
        change, error = (expected[key] - initial[key]).norm(), (p - expected[key]).norm()
        assert error <= 1e-9 * change, f"{key}: error {error:.1e} in a change of {change:.1e}"


TINY = replace(
    SMALL,
    layers="short+v0+narrow+narrowv+embed+bigram,none+mixer+mlps0+embed,long+v1+in1+gate+mudd",
    num_layers=3,
    model_dim=32,
    num_heads=2,
    mudd_groups=4,
    mlp_width=112,
    vocab_size=256,
    muon_mul=(reading.TALL, 2 * reading.TALL, 1.0),
    canonical_mask=False,
)


def test_the_last_weights_are_averages_as_published(randomize, float64):
    """From before their first steps to the end."""
    initial, found, expected = play(TINY, 890, 304, randomize)
    without = replace(TINY, tail_average=False)
    _, last, _ = play(without, 890, 304, randomize)
    for key, p in found.items():
        moved = (expected[key] - last[key].detach()).norm()
        error = (p.detach() - expected[key]).norm()
        assert error <= 1e-9 * expected[key].norm(), key
        assert (moved > 0.01 * (expected[key] - initial[key]).norm()) == (
            exact.without_numbers(key) in reading.FACTOR or "embed" in key or "lm_head" in key
        )


def test_a_shorter_run_averages_the_same_share():
    hp = replace(TINY, num_iterations=180)
    rows = SimpleNamespace(weights=torch.zeros(1, 1, 1, 3, 2))
    group = SimpleNamespace(name="muon")
    assert tail_average.bank_of(group, rows) == "mlp"
    for average, first in (("long", 135), ("short", 142)):
        steps = [
            step for step in range(180) if tail_average.rate("mlp", average, Moment(step, hp), hp)
        ]
        assert 0 <= min(steps) - first < 4 and max(steps) == 179


# -----------------------------------------------------------------------------
# FP8


def e5m2(x: torch.Tensor) -> torch.Tensor:
    """Round to two bits after the first, or to multiples of 2^-16; up to 57344."""
    step = 2.0 ** (x.frexp().exponent.clamp(min=-13) - 3)
    return ((x / step).round() * step).clamp(-57344, 57344)


@interpreted
@pytest.mark.parametrize("kilobytes", [99, 227])
@pytest.mark.parametrize("scale", [1 / 128, 1 / 8])
def test_the_mlp_in_fp8_equals_float64_with_gradients(scale, kilobytes, monkeypatch):
    """As in test_newest.py. What is stored in FP8 is near what is given; products are of that."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "card", lambda device: (3, kilobytes))
    inputs = [randn(1, 130, 64), randn(272, 64, seed=1) / 8, randn(64, 272, seed=2) / 16]
    factors = [2.0**-10, 2.0**-11]  # powers of two: quotients are exact
    for tensor, factor in zip(inputs[1:], factors, strict=True):
        tensor.clamp_(-448 * factor, 448 * factor).view(-1)[0] = 448 * factor
    seen, scaled_mm = [], torch._scaled_mm

    def see(*given, **options):
        seen.append([part.double() for part in given[:2]])
        return scaled_mm(*given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", see)
    for tensor in inputs:
        tensor.requires_grad_()
    grad = randn(1, 130, 64, seed=3)
    out, largest = kernels.AllFP8MLP.apply(*inputs, torch.tensor(scale))
    found = torch.autograd.grad(out, inputs, grad)
    x, w_in, w_out, grad = (tensor.detach().double().squeeze() for tensor in (*inputs, grad))
    x8 = test_newest.e4m3(16 * x) / 16
    in8, out8 = (test_newest.e4m3(w / f) * f for w, f in zip((w_in, w_out), factors, strict=True))
    post = (x8 @ in8.T).clamp(min=0) ** 2
    assert largest.item() == pytest.approx(post.max().item(), rel=1e-6)
    post8 = scale * seen[0][0]
    given = post.clamp(max=448 * scale)
    far = (post8 - given).abs() > given / 16 + 2.0**-6 * scale  # where it does not carry
    assert far.float().mean() < 0.05
    assert relative_error(out[0], post8 @ out8.T) < 2e-6
    grad8 = e5m2(64 * grad) / 64
    pre = (grad8 @ out8) * 2 * post8.sqrt()
    pre_back = pre.abs().max() / 57344
    pre8 = pre_back * seen[1][0]
    assert relative_error(pre8, pre_back * e5m2(pre / pre_back)) < 1e-3
    for one, right in zip(found, (pre8 @ in8, pre8.T @ x8, grad8.T @ post8), strict=True):
        assert relative_error(one.squeeze(0), right) < 2e-6


def test_the_projection_in_fp8_equals_float64_with_gradients():
    """Some inputs are above 8, and some gradients above 1: they are clamped, and learn."""
    x, w = (randn(48, 64) * 4).bfloat16(), (randn(80, 64, seed=1) / 8).bfloat16()
    grad = (randn(48, 80, seed=2) / 2).bfloat16()
    out = FP8Projection.apply(x.requires_grad_(), w.requires_grad_())
    out.backward(grad)
    assert out.dtype == torch.bfloat16 and x.abs().max() > 8 and grad.abs().max() > 1
    largest = w.detach().double().abs().max()
    x8, w8, grad8 = (
        test_newest.e4m3(part.detach().double() / size * 448) * size / 448
        for part, size in ((x, 8), (w, largest), (grad, 1))
    )
    for one, right in ((out, x8 @ w8.T), (x.grad, grad8 @ w8), (w.grad, grad8.T @ x8)):
        assert relative_error(one.detach(), right) < 4e-3  # of bfloat16, and of ties


def test_all_layers_but_two_are_in_fp8(randomize, monkeypatch):
    """In training, where a GPU has it: seven projections and eleven MLPs. The next step's scales of
    squares are of this one's largest, with little room."""
    monkeypatch.setattr(train_gpt, "fp8_supported", lambda device: True)
    monkeypatch.setattr(script.fp8_mlp, "in_use", lambda: True)
    calls = []

    def project(x, w):
        calls.append(tuple(w.shape))
        return x @ w.T

    monkeypatch.setattr(script.FP8Projection, "apply", project)
    model, now = drawn(SMALL, randomize), Moment(700, SMALL)
    inputs, targets = test_rows.sequence(512)
    optimizers = Optimizers(model, SMALL)
    mlps = [part for part in model.modules() if isinstance(part, script.MLP)]
    assert model.kernels[-1] == "fp8_mlp" and len(mlps) == 11
    model(inputs, targets, now).backward()
    rows = [192, 144, 192, 288, 192, 144, 288]  # of q, k and v in layers 0, 1, 2, 3, 5, 8, 10
    assert calls == [(count, 96) for count in rows]
    largest = torch.stack([mlp.largest for mlp in mlps])
    model.ngrams.learn = lambda now: None
    optimizers.step(now)
    scales = torch.stack([mlp.scale for mlp in mlps])
    assert (largest > 0).all() and relative_error(scales, 1.03 / 448 * largest) < 1e-6
    calls.clear()
    train_gpt.evaluate(model, (inputs[None], targets[None]), now, CPU)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_example_by_which_a_gpu_checks_the_twin_saturates_nothing(dtype):
    """Beyond the ranges of the twin, it would never agree."""
    arguments = kernels.example("fp8_mlp", None, RECORD, CPU, dtype, 256)
    x, w_in, w_out, scale = arguments
    out, largest = script.fp8_mlp(*arguments)
    assert w_in.shape == (2816, 768) and w_out.shape == (768, 2816)
    assert x.abs().max() * 2**4 < 448 and largest / scale < 448
    assert 0.1 < out.abs().max() * 2**6 < 57344
    grads = torch.autograd.grad(out, (x, w_in, w_out), out.detach())
    x8, out8 = (
        part.detach().double() for part in (e5m2(64 * out.double()) / 64, test_newest.e4m3(out))
    )
    assert relative_error(x8, out.double()) < 0.06 and out8.isfinite().all() and len(grads) == 3


def test_layers_may_lack_what_mixers_make(randomize):
    """Without numbers there is no mixer."""
    hp = replace(TINY, layers="long+mlps0,none+mixer,short", num_layers=3)
    model = randomize(GPT(hp))
    inputs, targets = test_rows.sequence(256)
    model(inputs.clamp(max=255), targets.clamp(max=255), Moment(1110, hp)).backward()
    assert not model.mixers and model.blocks[0].mlp is None


# -----------------------------------------------------------------------------
# Whole runs


@pytest.mark.parametrize("words", [f"--record {NAME}", "--record demo"])
def test_settings_are_allowed(words):
    train_gpt.parse_args(words.split(), Run)


# Without one technique each.
OFF = """sampled_softmax off;ngram_rows 0 --bigram_rows 50304;optimizer muon;narrow_heads off
mlp_width 0;mudd_groups 0;layers -mlps\\d;layers -embed;layers -narrowv;layers -bigram;prefix 0
tail_average off;anvil_share 1;attention_border 100;tied_frac 0"""
LATE = {"tail_average off", "anvil_share 1"}
SIZES = {"vocab_size": 512, "model_dim": 32, "num_heads": 4, "head_dim": 8, "batch_seqs": 2}
SIZES |= {"bigram_signs": 37, "ngram_rows": 1234, "mlp_width": 120, "canonical_mask": False}


@functools.cache
def first_losses(hp) -> list[float]:
    model = train_gpt.build(Run, hp, CPU)
    optimizers, moments = Optimizers(model, hp), [Moment(step, hp) for step in range(4)]
    batch = test_newest.batch_of(hp, 0)
    return [train_gpt.train_step(model, optimizers, *batch, now)[0].item() for now in moments]


@pytest.mark.parametrize("words", re.split("[;\n]", OFF))
def test_it_trains_without_any_technique_and_differently(words, monkeypatch):
    monkeypatch.setattr(train_gpt, "END_OF_TEXT", 0)
    stages = re.sub("10240|14336|24576", lambda found: COUNTS[found[0]], RECORDS["demo"].stages)
    demo = replace(RECORDS["demo"], stages=stages)
    name, value = words.split(" ", 1)
    if value.startswith("-"):
        value, count = re.subn(rf"\+{value[1:]}(?=[+,]|$)", "", getattr(demo, name))
        assert count
    flags = [f"--{name}", *value.split()]
    kept = {key: size for key, size in SIZES.items() if f"--{key}" not in flags}
    sizes = [word for key, size in kept.items() for word in (f"--{key}", train_gpt.show(size))]
    hp, _ = train_gpt.parse_args(["--record", "demo", "--stages", stages, *sizes, *flags], Run)
    losses, whole = first_losses(hp), first_losses(replace(demo, **SIZES))
    assert max(losses) < 7 and losses[3] < losses[0] - 0.02
    assert (losses == whole) == (words in LATE)


BAD = {
    "--layers long+narrow,long": "narrow heads are short",
    "--layers long,short+mlps3 --num_layers 2": "at most two MLPs",
    "--mudd_groups 5": "must divide model_dim",
    "--mudd_width 0": "needs --mudd_width above 0",
    "--mlp_width 600": "at most 4 model_dim",
    "--optimizer adam": "invalid choice",
    "--vocab_size 512": "is for GPT-2's tokens",
    "--loss_sum off": "FP8 in all layers needs it",
    "--scaled_projections off": "must be on",
    "--stages length=1+candidates=10240+window=128": "--prefix 0.25: needs prefix in --stages",
}


@pytest.mark.parametrize("words", BAD)
def test_a_bad_value_ends_with_one_line(words, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "train", lambda *arguments: pytest.fail("it trains"))
    given = ["--record", "demo", "--num_layers", "2" if "layers" in words else "5", *words.split()]
    status, err = runs.error_of(given, capsys, main)
    assert status == 1 and BAD[words] in err
