"""forks/train_gpt_2026_07.py: its records against their float64 reading, its FP8 kernel, whole
runs, and each of its techniques turned off."""

import functools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import runs
import train_gpt
import train_gpt_2026
import train_gpt_2026_07 as script
from frontier import reference_2026 as exact
from frontier import reference_2026_07 as newest
from frontier import small_runs, test_rows, test_runs
from gpt2 import gpt2_encoding
from reference import relative_error
from sample import Decoder
from test_kernels import interpreted, kernels, randn
from test_sample import at_windows, read_at_once
from train_gpt_2026_07 import GPT, RECORDS, Moment, Optimizers, Run

HEAD, V3 = "2026-07-17_FP8DownProjection", "2026-05-27-MuddGatedAndDC"
ROW = {HEAD: newest.HEAD, V3: newest.V3}
SIZES = {"bigram_rows": 1234, "bigram_signs": 37}
SMALL = {name: replace(RECORDS[name], **test_rows.SIX_HEADS, **SIZES) for name in ROW}
SIZES |= {"vocab_size": 512, "model_dim": 32, "num_heads": 4, "head_dim": 8, "batch_seqs": 2}
CPU = torch.device("cpu")
ENCODING = gpt2_encoding()
WORDS = [ENCODING.decode_single_token_bytes(i) for i in range(50256)]
main = functools.partial(train_gpt.main, run=Run)


def in_float64(model: GPT) -> dict[str, torch.Tensor]:
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    return weights | {"signs": model.signs.double()}


def reading(name, weights, inputs, targets, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    before = torch.tensor(newest.prefixes(WORDS[:512]))
    return newest.loss(ROW[name], weights, inputs.long(), targets, before, step, heads=6)


@pytest.fixture(autouse=True)
def later_rows(monkeypatch) -> None:
    """Let test_rows.py's tests be of these records, and reference_2026.py have their rules."""
    for name in ("EXTENSION", "matrices", "normuon_step"):
        monkeypatch.setattr(exact, name, getattr(newest, name))
    things = {thing.__name__: thing for thing in (GPT, Moment, Optimizers, in_float64, reading)}
    for name, thing in {**things, "FULL": RECORDS, "SMALL": SMALL, "ROW": ROW}.items():
        monkeypatch.setattr(test_rows, name, thing)


# One in each stage; the first three of HEAD are tied.
CASES = [(HEAD, 10), (HEAD, 800), (HEAD, 847), (HEAD, 1275), (V3, 10), (V3, 852)]


@pytest.mark.parametrize(("name", "step"), CASES)
def test_loss_and_all_gradients_equal_float64(name, step, randomize, vocabulary_of_512):
    test_rows.test_loss_and_all_gradients_equal_float64(name, step, randomize, None)


def test_validation_has_the_next_token_alone(randomize, vocabulary_of_512):
    test_rows.test_validation_has_the_next_token_alone(HEAD, 1285, randomize, None)
    test_rows.test_validation_has_the_next_token_alone(HEAD, 10, randomize, None)


@pytest.mark.parametrize("new", [1, 47, 128, 200, 384])
def test_composed_heads_of_new_tokens_are_the_last_rows_of_all(new, vocabulary_of_512):
    """Under a dense mask, and under the first tokens of which FlexAttention's is made."""
    tokens, _ = test_rows.sequence(384)
    q, k, v = (randn(1, 6, 384, 16, seed=i).double() for i in range(3))
    w1, w2 = (randn(1, 384, 6, seed=i).double() for i in (3, 4))
    first = train_gpt_2026.first_visible(tokens, torch.tensor(256), "distance")
    unit = w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    case = unit[:, -new:], w2[:, -new:], q[:, :, -new:], k, v
    q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
    expected = newest.composed(q, k, v, tokens, 0.3, w1[0], w2[0])[-new:]
    for mask in (train_gpt.make_mask(first)[-new:], (first[-new:],)):
        found = script.composed(*case, mask, 0.3)
        assert relative_error(found[0].transpose(0, 1), expected) < 1e-6


@torch.inference_mode()
def test_a_cache_changes_no_logits(randomize, monkeypatch):
    """Nor do blocks that have left it."""
    monkeypatch.setattr(train_gpt, "END_OF_TEXT", 63)
    model = randomize(GPT(replace(RECORDS["demo"], **SIZES | {"vocab_size": 128}))).eval()
    tokens = torch.randint(63, (420,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in (0, 40, 41, 130, 400):
        tokens[place] = 63
    expected, place = read_at_once(model, tokens, now := at_windows(model, 128)), 0
    decoder = Decoder(model, now)
    for size in [1, 1, 1, 47, 1, 99, *[1] * 60, 150, *[1] * 60]:
        place += size
        found = decoder(tokens[place - size : place])
        assert torch.allclose(found, expected[place - 1], rtol=0, atol=2e-4), place
    assert place == 420 and len(decoder.recent) < 420


def test_records_begin_with_the_published_weights():
    """Bounds of uniform weights, and constants."""
    model = GPT(replace(SMALL[HEAD], bigram_signs=512))
    w = dict(model.named_parameters())
    bounds = {f"mixers.{name}.hidden_w": 96**-0.5 for name in newest.MADE}
    for key in ("attn.qk_w", "attn.v_w", "attn.c_proj.weight", "mlp.c_fc.weight"):
        bounds[f"blocks.3.{key}"] = (0.75 / 96) ** 0.5
    for key, bound in bounds.items():
        assert w[key].abs().max().item() == pytest.approx(bound, rel=0.01)
        assert w[key].std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    constants = {"mixer_scale": [0.1], "skip_weights": [-1.5] * 5, "smear_lambda": [0.0]}
    for i in range(10):  # the last layer has neither
        constants[f"blocks.{i}.residual_lambda"] = [1.1**0.5] * (1 + (i != 6))
        constants[f"blocks.{i}.post_lambda"] = [1.0] * (1 + (i != 6))
    constants |= {f"blocks.{i}.attn.lambdas": [0.5, 1.0] for i in range(11) if i != 6}
    for name, made in newest.MADE.items():
        values = [[10 * newest.FIRST.get(re.sub("_.*", "", one), 0.0)] for one in made.split()]
        rows = zip(values, newest.sizes(name, 6), strict=True)
        constants[f"mixers.{name}.bias"] = sum([value * count for value, count in rows], [])
    assert {key for key, p in w.items() if p.ndim < 2} == constants.keys()
    assert all(w[key].tolist() == pytest.approx(numbers) for key, numbers in constants.items())
    assert set(model.signs.unique().tolist()) == {-1, 1} and abs(model.signs.float().mean()) < 0.02
    ends = "mlp.c_proj.weight", "bigram_embed.weight", "gate", "smear_lambda", "out_w"
    assert {key for key, p in w.items() if not p.any()} == {key for key in w if key.endswith(ends)}
    gates = [f"blocks.{i}.attn.value_gate" for i in (1, 2, 8, 9)]
    assert [key for key in w if key.endswith("value_gate")] == gates


@pytest.mark.parametrize("name", ROW)
def test_each_parameter_learns_by_the_published_numbers(name):
    with torch.device("meta"):
        model = GPT(RECORDS[name])
    names = {p: exact.without_numbers(key) for key, p in model.named_parameters()}
    groups = train_gpt_2026.Optimizers.parameter_groups(model, RECORDS[name])
    learning = {names[p]: group for group in groups for p in group.params}
    assert learning.keys() == (newest.ADAM | newest.NORMUON).keys()
    for key, group in learning.items():
        if key in newest.NORMUON:
            expected = ("pairs", 1.0) if key.endswith("qk_w") else ("muon", None)
            assert (group.name, group.rule.keywords["factor"], group.lr) == (*expected, 0.023)
            continue
        factor, betas, decay = newest.ADAM[key]
        found = group.lr, *group.rule.keywords["betas"], group.rule.keywords["decay"]
        assert found == pytest.approx((0.008 * factor, *betas, 0.005 * decay), rel=1e-12)
    assert [len(mixer.bias) for mixer in model.mixers.values()] == [26, 41, 14, 5]
    assert model.blocks[0].attn.qk_w.shape == (6, 256, 768)
    assert model.bigram_embed.weight.shape == (377280, 768) and model.signs.shape == (8192, 768)


@pytest.mark.parametrize(("name", "first", "count"), [(HEAD, 0, 4), (HEAD, 845, 6), (V3, 849, 4)])
def test_whole_steps_equal_the_float64_reading(name, first, count, randomize):
    test_rows.test_whole_steps_equal_the_float64_reading(name, first, count, randomize)


@pytest.mark.parametrize(("name", "tokens"), [(HEAD, 338.8e6), (V3, 340.1e6)])
def test_records_are_scheduled_as_in_exact_fractions(name, tokens):
    test_rows.test_later_rows_are_scheduled_as_in_exact_fractions(name)
    moments = [Moment(step, RECORDS[name]) for step in range(RECORDS[name].num_iterations)]
    expected = [float(newest.prefix_share(ROW[name], now.step)) for now in moments]
    assert [now.prefix for now in moments] == pytest.approx(expected, abs=1e-12)
    assert sum(8 * now.seq_len for now in moments) == pytest.approx(tokens, abs=5e4)


LRS = {422: 1, 423: 1.52, 508: 1.52, 509: 1.518202, 846: 0.91231, 847: 1.027087, 1269: 0.152073}
SCHEDULED = {
    "lr": LRS | {1270: 0.15},
    "momentum": {1235: 0.95, 1236: 0.948, 1260: 0.9, 1284: 0.852},
    "targets": {422: (1, 0.5, 0.000591), 846: (1, 0.001179), 847: (1,)},
    "prefix": {0: 0.25, 423: 0.25, 846: 0.00058962, 847: 0},
}
PREFIX = {464: 817, 3290: 466, 318: 1312, 257: 220, 262: 294, 15496: 28254, 50255: 17841}


def test_constants_are_the_published_ones():
    """Of schedules, and rows of bigrams and signs, and tokens' prefixes."""
    for name, numbers in SCHEDULED.items():
        for step, expected in numbers.items():
            found = getattr(Moment(step, RECORDS[HEAD]), name)
            assert found == pytest.approx(expected, abs=6e-7), (name, step)
    tokens = torch.tensor([50256, 464, 3290, 318, 257, 50256, 198, 50256], dtype=torch.int32)
    rows = [377279, 86771, 349207, 60382, 135949, 254407, 138941, 156470]
    assert train_gpt_2026.bigram_hash(tokens, 377280).tolist() == rows
    numbers = SimpleNamespace(signs=torch.arange(8192.0)[:, None])  # each row is its number
    rows = [0, 1408, 3338, 3556, 63, 1361, 1174, 1174]
    assert GPT.signed(numbers, torch.ones(8, 1), tokens).flatten().tolist() == rows
    found = script.token_prefixes(50304)
    assert PREFIX.items() <= dict(enumerate(found)).items()
    assert {found[i] for i in (13, 11, 198, *range(50256, 50304))} == {-1}
    assert sum(found[:50256]) == 548403649 and found[:50256] == newest.prefixes(WORDS)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Round to three bits after the first, or to multiples of 2^-9; up to 448."""
    step = 2.0 ** (x.frexp().exponent.clamp(min=-5) - 4)
    return ((x / step).round() * step).clamp(-448, 448)


@interpreted
@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("scale", [None, 1 / 128, 1 / 8])
def test_the_mlp_in_fp8_equals_float64_with_gradients(scale, kilobytes, monkeypatch):
    """On cards with so much shared memory. The first scale clamps. The interpreter forgets to carry
    when it rounds up to a power of two, and cuts off below 2^-6: the output is of what the kernel
    stores."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "card", lambda device: (3, kilobytes))
    inputs = [randn(1, 130, 64), randn(272, 64, seed=1) / 8, randn(64, 272, seed=2) / 16]
    inputs[0][:, 127] *= 2  # the largest square is in the first row of tiles alone: rows wrap
    factors = [2.0**-7, 2.0**-10, 2.0**-11]  # powers of two: quotients are exact
    for tensor, factor in zip(inputs, factors, strict=True):
        tensor.clamp_(-448 * factor, 448 * factor).view(-1)[0] = 448 * factor
        tensor.requires_grad_()
    seen, scaled_mm = [], torch._scaled_mm

    def see(*given, **options):
        seen.append(given)
        return scaled_mm(*given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", see)
    grad, divisor = randn(1, 130, 64, seed=3), None if scale is None else torch.tensor(scale)
    out, largest = kernels.FusedFP8MLP.apply(*inputs, divisor)
    found = torch.autograd.grad(out, inputs, grad)
    x, w_in, w_out, grad = (tensor.detach().double().squeeze() for tensor in (*inputs, grad))
    x8, in8, out8 = (e4m3(a / f) * f for a, f in zip((x, w_in, w_out), factors, strict=True))
    post = (x8 @ in8.T).clamp(min=0) ** 2
    assert largest.item() == pytest.approx(post.max().item(), rel=1e-6)
    expected = post @ w_out.T
    if scale is not None:
        given, narrow = (post / scale).clamp(max=448), seen[0][0].double()
        right = e4m3(given)
        carried = (right.frexp().mantissa == 0.5) & (right > given)
        near = (narrow - given).abs() <= (right - given).abs() + 1e-6 * given  # ties are two
        assert near[kept := ~carried & (given > 2.0**-6)].all() and kept.float().mean() > 0.4
        assert (right == 448).any() == (scale == 1 / 128)
        expected = scale * narrow @ out8.T
    assert relative_error(out[0], expected) < 2e-6
    of_pre = (grad @ w_out) * 2 * post.sqrt()
    for one, right in zip(found, (of_pre @ w_in, of_pre.T @ x, grad.T @ post), strict=True):
        assert relative_error(one.squeeze(0), right) < 2e-6


def batch_of(hp, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets (batch_seqs, T): each word is a little after the one before."""
    size = hp.batch_seqs * Moment(step, hp).seq_len
    some = torch.randint(1, 24, (size + 1,), generator=torch.Generator().manual_seed(step))
    words = (some.cumsum(0) % 512).unfold(0, size, 1).reshape(2, hp.batch_seqs, -1)
    return words[0].int(), words[1]


def test_scales_of_the_next_step_are_of_the_largest_squares(randomize, monkeypatch):
    """Of all its sequences, and of this step alone. Validation changes none."""
    monkeypatch.setattr(script.fp8_relu2_mlp, "in_use", lambda: True)
    hp = replace(RECORDS["demo"], **SIZES, fp8=False)
    model, seen = randomize(GPT(hp)), []
    optimizers, mlps = Optimizers(model, hp), [block.mlp for block in model.blocks]

    def see(mlp, arguments):
        seen.append((arguments[0].double() @ mlp.c_fc.weight.double().T).clamp(min=0).max() ** 2)

    for mlp in mlps:
        mlp.register_forward_pre_hook(see)
    for step in range(3):
        seen.clear()
        train_gpt.train_step(model, optimizers, *batch_of(hp, step), Moment(step, hp))
        largest = torch.stack(seen).view(hp.batch_seqs, -1).amax(0)
        scales = torch.stack([mlp.scale for mlp in mlps])
        assert relative_error(scales, 1.8 / 448 * largest) < 1e-5
        train_gpt.evaluate(model, batch_of(hp, 9), Moment(step, hp), CPU)
        assert not any(mlp.largest for mlp in mlps)


TABLE = "short+v0+pair,long+v1+xsa+gate,short+xsa+mixer,none+x1,long+v2+in2+gate+composed+mudd"
FLAGS = f"--record {HEAD} --layers {TABLE} --bigram_signs 37 --fp8 off"


def in_fp8(words: list[str]) -> None:
    """Run main on the path of FP8, whose matmuls are plain on a CPU."""
    script.fp8_relu2_mlp.in_use = lambda: True
    main(words)


def test_resumed_with_as_many_ranks_or_more_it_ends_as_ever(tmp_path, monkeypatch):
    """Two ranks have the scales of both; checkpoints keep them."""
    words = f"{small_runs.WORDS} {small_runs.ROW[small_runs.D]} {FLAGS}".split()
    words, whole = [*small_runs.language(tmp_path), *words], None
    for ranks, step in (0, 0), (0, 6), (2, 2):
        (folder := tmp_path / f"{ranks}_{step}").mkdir()
        if step:
            test_runs.copied(whole, step, folder)
        monkeypatch.chdir(folder)
        run = runs.Program([*words, "--resume", "on"], ranks, in_fp8)
        assert run.end() == [0] * max(ranks, 1), run.text("err")
        found = runs.outcome(folder, run=Run)
        whole = whole or found
        (runs.assert_close if ranks else test_runs.assert_same)(found, whole, since=step or -1)
    scales = {found.tensors[f"blocks.{i}.mlp.scale"].item() for i in range(5)}
    assert len(scales) == 5 and min(scales) > 1e-6 and max(scales) < 1
    assert whole.rows[-1]["val_loss"] < whole.rows[0]["val_loss"] - 0.2


# Without one technique each: a flag, or behind a - the word that is removed from a table.
OFF = """align_to_documents off;stages length=2+window=384+lr=1.52+targets=1/.5
extension_frac 0 --last_window 0;yarn off;window_rule blocks;smear off;sublayer_lambdas off
residual_lambda 1;scaled_projections off;key_offset off;paired_heads off;bigram_rows 0
bigram_signs 0;value_gate off --gate_by_values off;gate_by_values off;value_init 0;out_init 0
tied_frac 0;logit_sigmoid 0 0 1;polar_express off;muon_beta2 0;momentum_cooldown_steps 0
muon_decay 0;adam_every 1;qk_pairs off;mudd_width 0;mixer_width 0;prefix 0;fp8_mlp off;lr_final .1
layers -x\\d+;layers -in\\d+;layers -v\\d;layers -mudd;layers -xsa;layers -mixer;layers -gate
layers -composed;stages -targets=[^+,]*;adam_groups -decay=[^+,]*;adam_groups -beta[12]=[^+,]*"""
# What the first steps on a CPU do not show.
LATE = {"align_to_documents off", "yarn off", "momentum_cooldown_steps 0", "fp8_mlp off"}
LATE |= {"lr_final .1"}


def flags_without(words: str) -> list[str]:
    """Return the flags of a line of OFF, for the demo."""
    name, value = words.split(" ", 1)
    if value.startswith("-"):
        value, count = re.subn(rf"\+{value[1:]}", "", getattr(RECORDS["demo"], name))
        assert count
    return [f"--{name}", *value.split()]


@functools.cache
def first_losses(hp) -> list[float]:
    model = train_gpt.build(Run, hp, CPU)
    optimizers, moments = (
        Optimizers(model, hp),
        [Moment(step, hp) for step in range(5)],
    )  # betas show in the fifth
    steps = [train_gpt.train_step(model, optimizers, *batch_of(hp, 0), now) for now in moments]
    return [result[0].item() for result in steps]


@pytest.mark.parametrize("words", re.split("[;\n]", OFF))
def test_it_trains_without_any_technique_and_differently(words):
    flags = flags_without(words)
    hp, _ = train_gpt.parse_args(["--record", "demo", *flags], Run)
    Run.check(hp)
    kept = {key: size for key, size in SIZES.items() if f"--{key}" not in flags}
    losses, whole = (
        first_losses(replace(hp, **kept)),
        first_losses(replace(RECORDS["demo"], **SIZES)),
    )
    assert max(losses) < 7 and losses[3] < losses[0] - 0.02
    assert (losses == whole) == (words in LATE)


BAD = """layers short+v0+pair,long+v1+mudd,short+x0,long;layers short+v0+pair+xsa,long,short+x0,long
layers short,long,short+pair+composed,long;layers long,none+gate,long,long;fp8_mlp down
attention_gate on;skip_gate on"""


@pytest.mark.parametrize("words", re.split("[;\n]", BAD))
def test_a_bad_value_ends_with_one_line_that_names_its_flag(words, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "train", lambda *arguments: pytest.fail("it trains"))
    status, err = runs.error_of(["--record", "demo", *f"--{words}".split()], capsys, main)
    begins = f"train_gpt_2026_07.py: error: .*--{words.split()[0]}"
    assert status == 1 and re.match(begins, err)
