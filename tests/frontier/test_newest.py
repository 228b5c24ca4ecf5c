"""forks/train_gpt_2026_08.py: composed heads, caches, published numbers, averages of the last
weights, FP8. test_rows.py has their mathematics."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import tail_average
import train_gpt
import train_gpt_2026_08 as august
from cautious import cautious_adam_, decayed_step_
from composed_heads import composed
from fp8_layers import FP8Projection
from frontier import reference_2026 as exact
from frontier import reference_2026_07 as newest
from frontier import reference_2026_08 as reading
from frontier.small_runs import plain_fp8_mlp
from frontier.test_rows import SMALL, WORDS, drawn, moment, play, sequence
from functions_2026 import tie, visible_by_distance
from prefixes import token_prefixes
from reference import relative_error
from test_kernels import interpreted, kernels, randn
from test_sample import at_windows, tokens_in_cache
from train_gpt_2026_08 import Optimizers

SIZES = {"vocab_size": 512, "model_dim": 32, "num_heads": 4, "head_dim": 8, "batch_seqs": 2}
SIZES |= {"end_of_text": 511, "bigram_rows": 1234, "bigram_signs": 37}
WITH_TABLE = SIZES | {"bigram_rows": 0, "ngram_rows": 1234}


@pytest.mark.parametrize("new", [1, 47, 384])
def test_composed_heads_of_new_tokens_are_the_last_rows_of_all(new, vocabulary_of_512):
    """Under a dense mask, and under the first tokens of which FlexAttention's is made."""
    tokens, _ = sequence(384)
    q, k, v = (randn(1, 6, 384, 16, seed=i).double() for i in range(3))
    w1, w2 = (randn(1, 384, 6, seed=i).double() for i in (3, 4))
    first = visible_by_distance(tokens == 511, torch.tensor(256))
    unit = w1 / (w1.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    case = unit[:, -new:], w2[:, -new:], q[:, :, -new:], k, v
    q, k, v = (part[0].transpose(0, 1) for part in (q, k, v))
    expected = exact.composed(q, k, v, tokens, 0.3, w1[0], w2[0])[-new:]
    for mask in (train_gpt.make_mask(first)[-new:], (first[-new:],)):
        found = composed(*case, mask, 0.3)
        assert relative_error(found[0].transpose(0, 1), expected) < 1e-6


@pytest.mark.parametrize(
    ("name", "sizes"), [("demo-89", SIZES), ("demo", WITH_TABLE | {"sampled_softmax": False})]
)
@torch.inference_mode()
def test_a_cache_changes_no_logits(name, sizes, randomize, monkeypatch):
    """Nor do blocks that have left it."""
    hp = replace(august.RECORDS[name], **sizes | {"vocab_size": 128, "end_of_text": 63})
    model = drawn(hp, randomize).eval()
    tokens = torch.randint(63, (420,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in (0, 40, 41, 130, 400):
        tokens[place] = 63
    sizes = [1, 1, 1, 47, 1, 99, *[1] * 60, 150, *[1] * 60]
    assert tokens_in_cache(model, at_windows(model, 128), tokens, sizes) < 420


def test_signs_and_prefixes_are_the_published_ones():
    tokens = torch.tensor([50256, 464, 3290, 318, 257, 50256, 198, 50256], dtype=torch.int32)
    numbers = SimpleNamespace(signs=torch.arange(8192.0)[:, None])  # each row is its number
    rows = [0, 1408, 3338, 3556, 63, 1361, 1174, 1174]
    assert august.GPT.signed(numbers, torch.ones(8, 1), tokens).flatten().tolist() == rows
    found = token_prefixes(50256, 50304)
    assert sum(found[:50256]) == 548403649 and found[:50256] == newest.prefixes(WORDS)
    assert set(found[50256:]) == {-1}


TINY = replace(
    SMALL["August"],
    layers="short+v0+narrow+narrowv+embed+bigram,none+mixer+mlps0+embed,long+v1+in1+gate+mudd",
    num_layers=3,
    model_dim=32,
    num_heads=2,
    head_dim=16,
    mudd_groups=4,
    mlp_width=112,
    vocab_size=256,
    end_of_text=256,
    muon_mul=(reading.TALL, 2 * reading.TALL, 1.0),
    canonical_mask=False,
)


def test_the_last_weights_are_averages_as_published(randomize, float64, monkeypatch):
    """From before their first steps to the end. What trained them is kept, to see which moved."""
    mix, trained = tail_average.mix_, []

    def keep_and_mix(banks) -> None:
        trained.extend((bank, bank.weights.clone()) for _, bank in banks)
        mix(banks)

    monkeypatch.setattr(tail_average, "mix_", keep_and_mix)
    initial, model, expected = play("August", TINY, 890, 304, randomize)
    found = {key: p.detach().clone() for key, p in model.items()}
    for bank, weights in trained:
        bank.weights.copy_(weights)
    for key, p in model.items():
        moved = (expected[key] - p.detach()).norm()
        error = (found[key] - expected[key]).norm()
        assert error <= 1e-9 * expected[key].norm(), key
        assert (moved > 0.01 * (expected[key] - initial[key]).norm()) == (
            exact.without_numbers(key) in reading.FACTOR or "embed" in key or "lm_head" in key
        )


def test_averages_keep_the_norm_of_all_ranks_weights(monkeypatch):
    monkeypatch.setattr(train_gpt, "all_reduce_", lambda square: square + 16)  # of another rank
    bank = SimpleNamespace(shard=torch.tensor([3.0]))
    assert tail_average.norms([("head", bank)]) == {"head": 5}


def test_a_tied_embedding_is_the_head_after_each_step_that_changes_it():
    """The last of three is one, because averages of the weights end the run."""
    hp, names = SimpleNamespace(tied_frac=1, num_iterations=3), ("head", "embed")
    for step, is_equal in enumerate((False, True, True)):
        weights = torch.ones(1), torch.zeros(1)
        groups = [
            (SimpleNamespace(name=name, steps=2), SimpleNamespace(weights=w))
            for name, w in zip(names, weights, strict=True)
        ]
        tie(groups, SimpleNamespace(tied=True, step=step), hp)
        assert torch.equal(*weights) == is_equal


def test_a_weight_decays_where_its_momentum_is_zero_but_not_where_its_update_is():
    """As in the published programs: matrices by the first rule, Adam's parameters by the second."""
    rate, weights = torch.tensor(0.5), torch.ones(3)
    decayed_step_(weights, torch.zeros(3), torch.tensor([1.0, 0.0, -1.0]), rate, rate)
    assert weights.tolist() == [0.75, 0.75, 1.0]
    weight, both = torch.ones(1), (rate, rate)
    cautious_adam_(weight, *torch.zeros(3, 1), rate, rate, both, both, rate, rate)
    assert weight == 1


def first_step(hp, randomize, frozen: str = "") -> tuple:
    """Make the first two steps, in the last of which Adam and the n-gram table learn. Return the
    names of parameters that did not change, and the optimizers."""
    model = drawn(hp, randomize)
    for name, p in model.named_parameters():
        p.requires_grad_(name != frozen)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizers, (inputs, targets) = Optimizers(model, hp), sequence(512)
    for step in range(2):
        now = august.Moment(step, hp)
        train_gpt.train_step(model, optimizers, inputs[None] % 256, targets[None] % 256, now)
    after = dict(model.named_parameters())
    return {name for name, p in before.items() if torch.equal(p, after[name])}, optimizers


def test_a_frozen_table_stays_and_another_mlp_may_take_the_place(randomize, monkeypatch):
    """A tied embedding that is not frozen is a copy of the head. Waiting gradients are forgotten
    when a run begins anew; it can stop where none of the n-gram table's wait."""
    hp = replace(TINY, batch_seqs=1, sampled_softmax=False)
    for name in ("lm_head.weight", "embed.weight"):
        assert name in first_step(hp, randomize, name)[0]

    class MLP(torch.nn.Module):
        def __init__(self, hp):
            super().__init__()
            self.up = torch.nn.Linear(hp.model_dim, hp.model_dim, bias=False)

        def forward(self, x, post=1.0):
            return post * torch.nn.functional.gelu(self.up(x))

    monkeypatch.setattr(august, "MLP", MLP)
    unchanged, optimizers = first_step(replace(hp, tied_frac=0.0), randomize)
    assert "blocks.0.mlp.up.weight" not in unchanged and optimizers.period == 4
    optimizers.model.ngrams.waiting.append(())
    optimizers.load_state_dict({})
    assert not optimizers.model.ngrams.waiting


def test_shares_of_prefixes_may_fall_within_a_stage():
    hp = replace(TINY, stages="length=1+window=1.28e+2+prefix=.5/.2+falls=1+candidates=96")
    hp = replace(hp, extension_frac=0.0, num_iterations=8)
    found = [august.Moment(step, hp).prefix for step in (0, 2, 4, 6)]
    assert found == pytest.approx([0.25 * x for x in (0.5, 0.5 * 0.75, 0.2 * 0.5, 0.2 * 0.25)])


# -----------------------------------------------------------------------------
# FP8

FACTORS = [2.0**-7, 2.0**-10, 2.0**-11]  # of x and the weights, in FP8


def rounded(x: torch.Tensor, bits: int, lowest: int, highest: int) -> torch.Tensor:
    """Round to bits after the first one, or to multiples of 2^lowest; up to the highest number."""
    step = 2.0 ** (x.frexp().exponent - 1 - bits).clamp(min=lowest)
    return ((x / step).round() * step).clamp(-highest, highest)


e4m3 = partial(rounded, bits=3, lowest=-9, highest=448)
e5m2 = partial(rounded, bits=2, lowest=-16, highest=57344)


def mlp_in_fp8(kernel, kilobytes: int, scale: float | None, monkeypatch) -> tuple:
    """Return an MLP's output, largest square and gradients, on a card with so much shared memory;
    what it multiplies in FP8; and its inputs and the output's gradient in float64. Quotients by
    FACTORS are exact."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(kernels, "card", lambda device: (3, kilobytes))
    inputs = [randn(1, 130, 64), randn(272, 64, seed=1) / 8, randn(64, 272, seed=2) / 16]
    inputs[0][:, 127] *= 2  # the largest square is in the first row of tiles alone: rows wrap
    for tensor, factor in zip(inputs, FACTORS, strict=True):
        tensor.clamp_(-448 * factor, 448 * factor).view(-1)[0] = 448 * factor
        tensor.requires_grad_()
    seen, scaled_mm = [], torch._scaled_mm

    def see(*given, **options):
        seen.append(given[0].double())
        return scaled_mm(*given, **options)

    monkeypatch.setattr(torch, "_scaled_mm", see)
    grad, divisor = randn(1, 130, 64, seed=3), None if scale is None else torch.tensor(scale)
    out, largest = kernel.apply(*inputs, divisor)
    found = torch.autograd.grad(out, inputs, grad)
    exact_inputs = [tensor.detach().double().squeeze() for tensor in (*inputs, grad)]
    return out[0], largest.item(), found, seen, *exact_inputs


@interpreted
@pytest.mark.parametrize(
    ("scale", "kilobytes"), [(None, 99), (1 / 128, 163), (1 / 128, 227), (1 / 8, 99)]
)
def test_the_mlp_of_july_equals_float64_with_gradients(scale, kilobytes, monkeypatch):
    """The first scale clamps. The interpreter forgets to carry when it rounds up to a power of two,
    and cuts off below 2^-6: the output is of what the kernel stores."""
    of_kernel = mlp_in_fp8(kernels.FusedFP8MLP, kilobytes, scale, monkeypatch)
    out, largest, found, seen, x, w_in, w_out, grad = of_kernel
    x8, in8, out8 = (e4m3(a / f) * f for a, f in zip((x, w_in, w_out), FACTORS, strict=True))
    post = (x8 @ in8.T).clamp(min=0) ** 2
    assert largest == pytest.approx(post.max().item(), rel=1e-6)
    expected = post @ w_out.T
    if scale is not None:
        given, narrow = (post / scale).clamp(max=448), seen[0]
        right = e4m3(given)
        carried = (right.frexp().mantissa == 0.5) & (right > given)
        near = (narrow - given).abs() <= (right - given).abs() + 1e-6 * given  # ties are two
        assert near[kept := ~carried & (given > 2.0**-6)].all() and kept.float().mean() > 0.4
        assert (right == 448).any() == (scale == 1 / 128)
        expected = scale * narrow @ out8.T
    assert relative_error(out, expected) < 2e-6
    of_pre = (grad @ w_out) * 2 * post.sqrt()
    for one, right in zip(found, (of_pre @ w_in, of_pre.T @ x, grad.T @ post), strict=True):
        assert relative_error(one.squeeze(0), right) < 2e-6


@interpreted
@pytest.mark.parametrize(("scale", "kilobytes"), [(1 / 128, 99), (1 / 8, 227)])
def test_the_mlp_of_august_equals_float64_with_gradients(scale, kilobytes, monkeypatch):
    """What is stored in FP8 is near what is given; products are of that."""
    of_kernel = mlp_in_fp8(kernels.AllFP8MLP, kilobytes, scale, monkeypatch)
    out, largest, found, seen, x, w_in, w_out, grad = of_kernel
    factors = 2.0**-4, *FACTORS[1:]
    x8, in8, out8 = (e4m3(a / f) * f for a, f in zip((x, w_in, w_out), factors, strict=True))
    post = (x8 @ in8.T).clamp(min=0) ** 2
    assert largest == pytest.approx(post.max().item(), rel=1e-6)
    post8 = scale * seen[0]
    given = post.clamp(max=448 * scale)
    far = (post8 - given).abs() > given / 16 + 2.0**-6 * scale  # where it does not carry
    assert far.float().mean() < 0.05
    assert relative_error(out, post8 @ out8.T) < 2e-6
    grad8 = e5m2(64 * grad) / 64
    pre = (grad8 @ out8) * 2 * post8.sqrt()
    pre_back = pre.abs().max() / 57344
    pre8 = pre_back * seen[1]
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
        e4m3(part.detach().double() / size * 448) * size / 448
        for part, size in ((x, 8), (w, largest), (grad, 1))
    )
    for one, right in ((out, x8 @ w8.T), (x.grad, grad8 @ w8), (w.grad, grad8.T @ x8)):
        assert relative_error(one.detach(), right) < 4e-3  # of bfloat16, and of ties


def test_all_layers_but_two_are_in_fp8(randomize, monkeypatch):
    """In training, where a GPU has it: seven projections and eleven MLPs. The next step's scales of
    squares are of this one's largest, with little room."""
    monkeypatch.setattr(train_gpt, "fp8_supported", lambda device: True)
    kernels.IN_USE.add("fp8_mlp")
    monkeypatch.setattr(kernels.AllFP8MLP, "apply", plain_fp8_mlp)
    calls = []

    def project(x, w):
        calls.append(tuple(w.shape))
        return x @ w.T

    monkeypatch.setattr(august.FP8Projection, "apply", project)
    model, now = drawn(SMALL["August"], randomize), moment("August", 700)
    inputs, targets = sequence(512)
    optimizers = Optimizers(model, model.hp)
    mlps = [part for part in model.modules() if isinstance(part, august.MLP)]
    assert model.kernels[-1] == "fp8_mlp" and len(mlps) == 11
    model(inputs, targets, now).backward()
    rows = [96, 72, 96, 144, 96, 72, 144]  # of q, k and v in layers 0, 1, 2, 3, 5, 8, 10
    assert calls == [(count, 48) for count in rows]
    largest = torch.stack([mlp.largest for mlp in mlps])
    model.ngrams.learn = lambda now: None
    optimizers.step(now)
    scales = torch.stack([mlp.scale for mlp in mlps])
    assert (largest > 0).all() and relative_error(scales, 1.03 / 448 * largest) < 1e-6
    calls.clear()
    train_gpt.evaluate(model, (inputs[None], targets[None]), now, torch.device("cpu"))
    assert not calls


def test_scales_of_the_next_step_are_of_the_largest_squares(randomize, monkeypatch):
    """Of all its sequences, and of this step alone. Validation changes none."""
    kernels.IN_USE.add("fp8_relu2_mlp")
    monkeypatch.setattr(kernels.FusedFP8MLP, "apply", plain_fp8_mlp)
    hp = replace(august.RECORDS["demo-89"], **SIZES, fp8=False)
    model, seen = randomize(august.GPT(hp)), []
    optimizers, mlps = Optimizers(model, hp), [block.mlp for block in model.blocks]

    def see(mlp, arguments):
        seen.append((arguments[0].double() @ mlp.c_fc.weight.double().T).clamp(min=0).max() ** 2)

    for mlp in mlps:
        mlp.register_forward_pre_hook(see)
    for step in range(3):
        seen.clear()
        now = august.Moment(step, hp)
        words = torch.randint(512, (hp.batch_seqs, now.seq_len + 1))
        batch = words[:, :-1].int(), words[:, 1:]
        train_gpt.train_step(model, optimizers, *batch, now)
        largest = torch.stack(seen).view(hp.batch_seqs, -1).amax(0)
        scales = torch.stack([mlp.scale for mlp in mlps])
        assert relative_error(scales, 1.8 / 448 * largest) < 1e-5
        train_gpt.evaluate(model, batch, now, torch.device("cpu"))
        assert not any(mlp.largest for mlp in mlps)
