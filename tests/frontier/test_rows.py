"""The records of 2025-08-23 (row A), GPT-2 medium of 2025-12-31 (M), 2026-01-04 (B), 2026-01-19
(C), 2026-01-26 (C5), 2026-03-06 (D), and of May, July and August 2026 against their float64
reading: first weights, loss and gradients, whole steps of the optimizers, schedules."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

import reference
import train_gpt
import train_gpt_2026
import train_gpt_2026_08 as august
import train_gpt_track3 as track3
from frontier import reference_2026 as exact
from frontier import reference_2026_07 as newest
from frontier import reference_2026_08 as reading
from tokenizer import GPT2

RECORDS = {
    "A": (train_gpt_2026, "2025-08-23_SparseAttnGate"),
    "M": (train_gpt_2026, "medium_2025-12-31"),
    "B": (train_gpt_2026, "2026-01-04_MixedPrecisionInterweavedOptimizer"),
    "C": (train_gpt_2026, "2026-01-19_BigramHashEmbedding"),
    "C5": (train_gpt_2026, "2026-01-26-UntieValueEmbeddings"),
    "D": (train_gpt_2026, "2026-03-06_SimplifyHC"),
    "May": (august, "2026-05-27-MuddGatedAndDC"),
    "July": (august, "2026-07-17_FP8DownProjection"),
    "August": (august, "2026-08-30_ANVIL2"),
}
SCRIPT = {name: script for name, (script, _) in RECORDS.items()}
FULL = {name: script.RECORDS[record] for name, (script, record) in RECORDS.items()}
ROW = {"M": exact.M, "B": exact.B, "C": exact.C, "C5": exact.C5, "D": exact.D}
ROW |= {"May": newest.V3, "July": newest.HEAD}
LATER, EARLY = [*ROW, "August"], ["M", "B", "C", "C5"]
# What small MLPs make.
MADE = {"May": newest.MADE, "July": newest.MADE, "August": reading.MADE}
LAYERS = {name: row.layers for name, row in ROW.items()} | {"August": reading.LAYERS}
SIZES = {"model_dim": 48, "num_heads": 6, "head_dim": 8, "vocab_size": 512, "end_of_text": 511}
SMALL = {name: replace(hp, **SIZES) for name, hp in FULL.items()}
for name in ("A", "B"):
    SMALL[name] = replace(SMALL[name], model_dim=64, num_heads=2, head_dim=32)
for name in ("C", "C5", "D", "May", "July"):
    SMALL[name] = replace(SMALL[name], bigram_rows=1234)
for name in MADE:
    SMALL[name] = replace(SMALL[name], bigram_signs=37, mlp_width=192)
COUNTS = {"10240": "400", "14336": "416", "24576": "480"}  # candidates, of 512 tokens
SMALL["August"] = replace(
    SMALL["August"],
    mlp_width=176,
    ngram_rows=1234,
    stages=re.sub("10240|14336|24576", lambda found: COUNTS[found[0]], FULL["August"].stages),
    fp8=False,
)
ENCODING = GPT2().encoding
WORDS = [ENCODING.decode_single_token_bytes(i) for i in range(50256)]

# -----------------------------------------------------------------------------
# Loss and gradients, all layers


def sequence(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets: short documents, one of a single token, and a document of nearly
    all the rest."""
    stream = torch.randint(0, 511, (length + 1,), generator=torch.Generator().manual_seed(0))
    stream[[0, 60, 130, 131, length - 20]] = 511
    return stream[:-1].int(), stream[1:]


def moment(name: str, step: int):
    return SCRIPT[name].Moment(step, SMALL[name])


def drawn(hp, randomize, script=august) -> torch.nn.Module:
    """Return a script's model of random weights, also in a table of n-grams."""
    torch.manual_seed(0)  # of signs: some make a number's gradient so small that rounding shows
    model = randomize(script.GPT(hp))
    if getattr(model, "ngrams", None):
        model.share_ngrams()
        model.ngrams.rows[:-1].normal_(generator=torch.Generator().manual_seed(1))
    return model


def among(chosen: list[int], tokens: torch.Tensor) -> torch.Tensor:
    """Return the places of tokens among the chosen ones, or -1."""
    place = {token: i for i, token in enumerate(chosen)}
    return torch.tensor([place.get(token, -1) for token in tokens.tolist()])


def read(name: str, model, inputs, targets, step: int) -> tuple:
    """Return all weights in float64, what a record trains at a step, and the mean loss of the next
    token, among the candidates of a sampled softmax in training."""
    w = {key: p.detach().double().requires_grad_() for key, p in model.named_parameters()}
    now, heads, tokens = moment(name, step), model.hp.num_heads, inputs.long()
    if now.tied and model.training:
        w["embed.weight"] = w["lm_head.weight"]
    if name == "A":
        case = w, tokens, targets, exact.windows_a(step)[0], heads
        mean = reference.loss(*case, year=2025, epsilon=exact.EPSILON)
        return w, len(tokens) * mean, mean
    before = torch.tensor([*newest.prefixes(WORDS[:511]), -1])
    if name != "August":
        if name in MADE:
            w["signs"] = model.signs.double()
        logits = (newest if name in MADE else exact).capped_logits
        weights, share = exact.target_weights(ROW[name], step), newest.prefix_share(ROW[name], step)
        capped = logits(ROW[name], w, tokens, step, heads)
        return w, *exact.loss(capped, targets, weights, before, share)
    w["signs"] = model.signs.double()
    w["ngrams"] = model.ngrams.rows[:-1].double().requires_grad_()
    rows, signs = august.ngram_hashes(inputs, len(w["ngrams"]), len(w["signs"]))
    b = reading.ngrams(w, rows.long(), signs.long())
    border = model.hp.attention_border if model.training else 0
    capped, chosen = reading.capped_logits(w, tokens, b, step, heads, border), [*range(512)]
    if model.training and now.candidates:
        chosen, _ = reading.chosen_by_rule(targets.tolist(), 0, now.candidates, 512)
        assert len(chosen) == {10: 400, 400: 400, 590: 400, 900: 416, 1000: 480}[step]
    before = among(chosen, before)[chosen]
    numbers = reading.target_weights(step), before, reading.prefix_share(step)
    return w, *exact.loss(capped[:, chosen], among(chosen, targets), *numbers)


# One in each stage; the first two are tied, in row D also the third, in July the first three. Of
# row M, the third is behind the split, and the last has a window that changes no frequency. Of
# August, the last is behind the split, and the last but three have a sampled softmax.
CASES = [("M", 10), ("M", 700), ("M", 786), ("M", 1600)]
CASES += [("A", 300), ("B", 700), ("B", 1300), ("C", 10), ("C", 1580), ("C5", 1300), ("D", 10)]
CASES += [("D", 967), ("D", 1460), ("July", 10), ("July", 800), ("July", 847), ("July", 1275)]
CASES += [("May", 10), ("May", 852)]
CASES += [("August", step) for step in (10, 400, 590, 900, 1000, 1110, 1175, 1180)]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_loss_and_all_gradients_equal_float64(name, step, randomize, vocabulary_of_512, float64):
    """The value is the mean loss of the next token; gradients are those of a sum, from row B on
    with several targets. Long documents of each stage have borders of attention."""
    hp = SMALL[name]
    if name == "August":
        hp = replace(hp, attention_border=100)
    model, (inputs, targets) = drawn(hp, randomize, SCRIPT[name]), sequence(500)
    loss = model(inputs, targets, moment(name, step))
    loss.backward()
    w, trained, mean = read(name, model, inputs, targets, step)
    trained.backward()
    assert loss.item() == pytest.approx(mean.item(), rel=1e-13)
    assert (model.embed.weight.grad is None) == moment(name, step).tied
    found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    if name == "August":
        model.ngrams.collect()
        ((ids, grads),) = model.ngrams.waiting
        found["ngrams"] = torch.zeros(1235, 48).index_add_(0, ids, grads)[:-1]
    assert w.keys() - found.keys() <= {"signs", "embed.weight", "blocks.7.post_lambda"}
    for key, grad in found.items():
        expected = torch.zeros_like(grad) if w[key].grad is None else w[key].grad
        error = (grad.to_dense() - expected).norm()
        assert error <= 1e-11 * expected.norm(), f"{key}: {error:.1e} of {expected.norm():.1e}"


VALIDATIONS = [("M", 4740), ("C", 10), ("D", 1490), ("July", 10), ("July", 1285), ("August", 10)]


@pytest.mark.parametrize(("name", "step"), VALIDATIONS)
def test_validation_has_the_next_token_alone(name, step, randomize, vocabulary_of_512):
    """In float32, of all tokens, whatever targets and candidates its step trains. The last window
    changes no rotary frequency."""
    model, (inputs, targets) = drawn(SMALL[name], randomize, SCRIPT[name]).eval(), sequence(500)
    loss = model(inputs, targets, moment(name, step))
    w, _, mean = read(name, model, inputs, targets, step)
    assert loss.item() == pytest.approx(mean.item(), abs=2e-6)
    loss.backward()
    (500 * mean).backward()
    assert reference.relative_error(model.lm_head.weight.grad, w["lm_head.weight"].grad) < 3e-5


@pytest.mark.parametrize("rows", [2, 251520, 377280])
def test_bigrams_have_the_published_rows(rows):
    """Wrapped to 32 bits by hand. The last row of the table is the first token's alone."""
    tokens = torch.randint(0, 50304, (3000,), generator=torch.Generator().manual_seed(0))
    tokens[:4] = torch.tensor([50256, 50303, 50303, 0])
    found = train_gpt_2026.bigram_hash(tokens.int(), rows).tolist()
    assert found == exact.bigram_rows(tokens.tolist(), rows)
    assert found[0] == rows - 1 and min(found) >= 0 and max(found[1:]) < rows - 1
    if rows == 251520:
        tokens = torch.tensor([50256, 464, 3290, 318, 257]).int()
        published = [251519, 204580, 223622, 60513, 135950]
        assert train_gpt_2026.bigram_hash(tokens, rows).tolist() == published


@pytest.mark.parametrize("training", [True, False])
def test_masks_are_those_of_the_published_windows(training, vocabulary_of_512):
    """Of a sequence longer than windows are. In layers of paired heads a window counts places, two
    for each token. There are borders in training alone."""
    tokens, _ = sequence(2944)
    seen = reading.with_borders(tokens, 1000) if training else tokens
    assert torch.equal(seen, tokens) != training
    model = august.GPT(replace(SMALL["August"], attention_border=1000)).train(training)
    now, (long, short) = moment("August", 700), reading.windows(700)
    masks = model.masks(tokens, torch.tensor(now.window), torch.tensor(now.short))
    for kind, window, places in (("long", long, 1), ("short", short, 1), ("short+pair", short, 2)):
        expected = exact.visible_places(seen, window, places)
        assert torch.equal(masks.pop(kind) == 0, expected)
    assert not masks


def first_numbers(name: str) -> dict[str, list[float]]:
    """Return a record's parameters that are not matrices."""
    found = {"skip_weights": [-1.5] * (len(LAYERS[name]) // 2), "smear_lambda": [0.0]}
    found |= {"mixer_scale": [0.1]} if name in MADE else {"backout_lambda": [0.5]}
    for i, layer in enumerate(LAYERS[name]):
        numbers = {"attn.lambdas": [0.5, 1.0]} if layer.window else {}
        if name in EARLY:
            numbers |= {"lambdas": [1.05 if name == "M" else 1.1], "x0_lambda": [0.0]}
            if name == "M":
                numbers["second_lambda"] = [0.0]
            elif name != "B":
                numbers["bigram_lambda"] = [0.1]
        elif name not in MADE or i < newest.LAST:
            both = 2 if layer.window or name in MADE else 1  # of attention and MLP
            numbers |= {"residual_lambda": [1.1**0.5] * both, "post_lambda": [1.0] * both}
        if name == "D" and layer.window:
            numbers |= {"x0_lambda": [0.0], "bigram_lambda": [0.05]}
        found |= {f"blocks.{i}.{key}": value for key, value in numbers.items()}
    for mixer, made in MADE.get(name, {}).items():
        row = found[f"mixers.{mixer}.bias"] = []
        for one, count in zip(made.split(), newest.sizes(made, 6), strict=True):
            row += [10 * newest.FIRST.get(re.sub("_.*", "", one), 0.0)] * count
    return found


@pytest.mark.parametrize("name", LATER)
def test_records_begin_with_the_published_weights(name):
    """Bounds of uniform weights, deviations of normal ones, and constants."""
    torch.manual_seed(0)
    hp = replace(SMALL[name], model_dim=96, head_dim=16, num_heads=6)
    wide, narrow = (3 / 96) ** 0.5, (0.75 / 96) ** 0.5
    hp = replace(hp, bigram_signs=512) if name in MADE else hp
    model = SCRIPT[name].GPT(hp)
    w, late = dict(model.named_parameters()), name not in EARLY
    bounds = {"attn.qkv_w": narrow if late else wide, "mlp.c_fc.weight": narrow}
    bounds |= {"attn.qk_w": narrow, "attn.v_w": narrow}
    bounds |= {"attn.c_proj.weight": narrow} if late else {}
    bounds = {f"blocks.{i}.{key}": bound for key, bound in bounds.items() for i in (3, 8)}
    bounds |= {f"mixers.{mixer}.hidden_w": 96**-0.5 for mixer in MADE.get(name, {})}
    for key in bounds.keys() & w.keys():
        assert w[key].abs().max().item() == pytest.approx(bounds[key], rel=0.01)
        assert w[key].std().item() == pytest.approx(bounds[key] / 3**0.5, rel=0.02)
    assert w["lm_head.weight"].std().item() == pytest.approx(0.005, rel=0.01)
    assert torch.equal(w["embed.weight"], w["lm_head.weight"])
    if name == "M":
        assert w["second_embed.weight"].std().item() == pytest.approx(1, rel=0.01)
    for key in w if late else []:
        if "value_embeds" in key:
            assert w[key].std().item() == pytest.approx(0.01, rel=0.01)

    found, expected = {key: p.tolist() for key, p in w.items() if p.ndim < 2}, first_numbers(name)
    assert found.keys() == expected.keys()
    for key, numbers in expected.items():
        assert found[key] == pytest.approx(numbers), key
    ends = ["mlp.c_proj.weight", "bigram_embed.weight", "gate", "gates", "x0_lambda"]
    ends += ["smear_lambda", "second_lambda", "out_w", "group_w"]
    zeros = [key for key in w if key.endswith(tuple(ends))]
    if not late:
        zeros += [key for key in w if "value_embeds" in key or key.endswith("attn.c_proj.weight")]
    assert {key for key, p in w.items() if not p.any()} == set(zeros)
    if name in MADE:
        signs = model.signs.float()
        assert set(signs.unique().tolist()) == {-1, 1} and abs(signs.mean()) < 0.02


def test_medium_has_the_published_size_and_no_fp8():
    """Five skip connections, with 16 channels of a gate each, are those of layers without one."""
    with torch.device("meta"):
        model = train_gpt_2026.GPT(FULL["M"])
    assert sum(p.numel() for p in model.parameters()) == 613_420_437 + 5 * (1 + 16)
    assert not FULL["M"].fp8


# -----------------------------------------------------------------------------
# Updates


def made_up_gradients(model, step: int) -> dict[str, torch.Tensor]:
    """Some so small that every epsilon matters, some zero: a layer's at step 0, some words'."""
    generator, gradients = torch.Generator().manual_seed(step), {}
    for name, p in model.named_parameters():
        size = 1e-9 if p.ndim < 2 or "gate" in name else 1e-8 if "blocks.1." in name else 1.0
        size = 0.0 if step == 0 and "blocks.0." in name else size
        gradients[name] = size * torch.randn(p.shape, generator=generator)
        gradients[name][: 200 * ("embed" in name)] = 0.0
    return gradients


def play(name: str, hp, first: int, count: int, randomize) -> tuple[dict, dict, dict]:
    """Return weights before and after some steps with made-up gradients, and the reading's."""
    script, gradients = SCRIPT[name], []
    model = drawn(hp, randomize, script)
    if script.Moment(first, hp).tied:
        model.embed.weight.data.copy_(model.lm_head.weight.data)
    optimizers = script.Optimizers(model, hp)
    initial = {key: p.detach().double().clone() for key, p in model.named_parameters()}
    weights = {key: w.clone() for key, w in initial.items()}
    if name == "August":  # the table is in test_ngrams.py
        model.ngrams.waiting = [(torch.tensor([0]), torch.zeros(1, hp.model_dim))]
        model.ngrams.learn = lambda now: None
    for step in range(first, first + count):
        now, of_step = script.Moment(step, hp), made_up_gradients(model, step)
        for key, grad in of_step.items():  # the sum over hp.batch_seqs sequences
            tied = now.tied and key == "embed.weight"
            of_both = model.get_parameter("lm_head.weight" if tied else key)
            grad = hp.batch_seqs * grad
            of_both.grad = grad if of_both.grad is None else of_both.grad + grad
        optimizers.add_gradients()
        optimizers.step(now)
        gradients.append({key: grad.double() for key, grad in of_step.items()})
    if name == "August":
        reading.play(weights, gradients, first)
    elif name == "A":
        exact.play(weights, gradients, first, exact.rule_a, lambda step: False)
    else:
        rules = partial(exact.rule, ROW[name]), partial(exact.is_tied, ROW[name])
        exact.play(weights, gradients, first, *rules)
    return initial, dict(model.named_parameters()), weights


# First step and count: the beginning, changes of the learning rate, the split, the end. Of August:
# the beginning, the slower rhythm, two momenta, the taper and the split.
STEPS = [("M", 0, 4), ("M", 782, 6), ("M", 1174, 4), ("M", 4736, 4)]
STEPS += [("A", 0, 3), ("A", 932, 3), ("B", 1198, 8), ("B", 1836, 4), ("C", 518, 6)]
STEPS += [("C5", 1021, 8), ("D", 0, 4), ("D", 481, 4), ("D", 964, 8), ("D", 1486, 4)]
STEPS += [("July", 0, 4), ("July", 845, 6), ("May", 849, 4)]
STEPS += [("August", 0, 4), ("August", 333, 8), ("August", 512, 4), ("August", 1173, 7)]


@pytest.mark.parametrize(("name", "first", "count"), STEPS)
def test_whole_steps_equal_the_float64_reading(name, first, count, randomize, float64):
    """Matrices learn at each step; from row B on all else at odd steps, from two steps' gradients,
    and value tables of August in a rhythm of their own."""
    initial, found, expected = play(name, SMALL[name], first, count, randomize)
    for key, p in found.items():
        change, error = (expected[key] - initial[key]).norm(), (p - expected[key]).norm()
        assert error <= 1e-9 * change, f"{key}: error {error:.1e} in a change of {change:.1e}"


# -----------------------------------------------------------------------------
# Schedules


def test_row_a_is_scheduled_as_in_exact_fractions():
    for step in range(1696):
        now, (long, short) = moment("A", step), exact.windows_a(step)
        expected = exact.multiplier_a(step), exact.ramp(step)
        assert (now.lr, now.momentum) == pytest.approx([float(x) for x in expected], abs=1e-12)
        assert (now.window, max(now.short // 128, 1) * 128) == (long, short)
        assert (now.seq_len, now.longest, now.targets, now.tied) == (49152, 0, (1.0,), False)


def scheduled(name: str, step: int) -> dict:
    """Return what is scheduled at a step of a later record."""
    if name == "August":
        long, short = reading.windows(step)
        stage, momentum = reading.stage(step), reading.momentum(step)
        share, beta = (1.0, momentum) if step < 514 else (0.4385, 0.85)
        return {
            "lr": reading.multiplier(step),
            "momentum": momentum,
            "targets": tuple(reading.target_weights(step)),
            "window": long,
            "short": short,
            "seq_len": 2048 * reading.LENGTHS[stage],
            "longest": reading.CAPS[stage],
            "tied": reading.is_tied(step),
            "prefix": reading.prefix_share(step),
            "candidates": reading.candidates(step),
            "ngrams": reading.learns(step),
            "fast_share": share,
            "fast_beta": beta,
        }
    row = ROW[name]
    long, short = exact.windows(row, step)
    found = {
        "lr": float(exact.multiplier(row, step)),
        "momentum": float(exact.momentum_of(row, step)),
        "targets": tuple(float(weight) for weight in exact.target_weights(row, step)),
        "window": long,
        "short": short,
        "seq_len": exact.tokens_of(row, step),
        "longest": exact.document_cap(row, step),
        "tied": exact.is_tied(row, step),
    }
    return found | ({"prefix": float(newest.prefix_share(row, step))} if name in MADE else {})


@pytest.mark.parametrize("name", LATER)
def test_later_rows_are_scheduled_as_in_exact_fractions(name):
    hp = FULL[name]
    steps = reading.STEPS if name == "August" else ROW[name].steps + ROW[name].extension
    assert hp.num_iterations == steps
    for step in range(steps + 1):
        now = SCRIPT[name].Moment(step, hp)
        now.short = now.short // 128 * 128
        for key, value in scheduled(name, step).items():
            assert getattr(now, key) == pytest.approx(value, abs=1e-12), (key, step)


def test_a_target_falls_from_its_whole_weight_in_a_stage_shorter_than_a_step():
    hp = replace(FULL["M"], num_iterations=11)  # in twelve stages
    found = [train_gpt_2026.get_targets(step, hp) for step in range(3)]
    assert found == [(1, 0.5, 0.25), (1, pytest.approx(0.5 * 10 / 11)), (1,)]


TOKENS = {
    "A": 666.5e6,
    "M": 2177.0e6,
    "B": 487.6e6,
    "C": 424.7e6,
    "D": 395.8e6,
    "May": 340.1e6,
    "July": 338.8e6,
}


def test_records_train_on_the_published_numbers_of_tokens():
    for name, published in TOKENS.items():
        lengths = [moment(name, step).seq_len for step in range(FULL[name].num_iterations)]
        assert 8 * sum(lengths) == pytest.approx(published, abs=5e4)


# Frequencies 0, 1, 2, 8, 16 and 31, and attention's scale, by whether heads are narrow, in the last
# stage of 2026-08-30.
YARN = {
    False: (1, 0.799638, 0.639421, 0.0736302, 0.00676914, 0.000225361, 0.112011),
    True: (0.749932, 0.529483, 0.335206, 0.0349181, 0.00465742, 0.00016276, 0.181136),
}


def test_rotary_tables_have_the_published_frequencies_and_scales():
    """Of full size. Models above turn by frequencies of their own size."""
    with torch.device("meta"):
        model = august.GPT(FULL["August"])
    tables = model.rotary(torch.arange(2), august.Moment(1180, FULL["August"]))
    for narrow, published in YARN.items():
        _, sin, factor = tables[(narrow, False)]
        turning = sin[1, 0].double().asin().tolist()  # of position 1
        scale = model.blocks[0 if narrow else 3].attn.scale * factor.item()
        found = [turning[i] for i in (0, 1, 2, 8, 16, 31)] + [scale]
        assert found == pytest.approx(published, rel=5e-6)


# -----------------------------------------------------------------------------
# Validation

# Of each script the records, in small, and record 92 with the mask and without.
SHAPES = {"vocab_size": 512, "model_dim": 32, "num_heads": 2, "head_dim": 16}
SUMMED = [
    *((train_gpt, replace(hp, **SHAPES)) for hp in train_gpt.RECORDS.values()),
    *((SCRIPT[name], SMALL[name]) for name in FULL),
    (august, replace(SMALL["August"], canonical_mask=False)),
    (track3, replace(track3.RECORDS["muon"], **SHAPES)),
]


@pytest.mark.parametrize(("script", "hp"), SUMMED)
@torch.no_grad()
def test_the_chances_of_all_tokens_sum_to_1_in_the_last_validation(script, hp, randomize):
    """By the model's own loss of each token as the target, one after the other."""
    model, now = randomize(script.GPT(hp)).eval(), script.Moment(hp.num_iterations, hp)
    x = torch.randn(1, hp.model_dim, generator=torch.Generator().manual_seed(0))
    model.hidden = lambda tokens, now: x
    before = torch.tensor([262], dtype=torch.int32)  # " the", which some tokens cannot follow
    losses = torch.stack([model(before, torch.tensor([token]), now) for token in range(512)])
    assert torch.exp(-losses.double()).sum().item() == pytest.approx(1, abs=1e-5)
    assert losses.max() - losses.min() > 0.1
