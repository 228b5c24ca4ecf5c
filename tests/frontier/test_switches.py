"""Each technique's switch: on, it trains and matters; and off, in the demos of later records."""

import functools
import re
from dataclasses import replace

import pytest
import torch

import train_gpt
import train_gpt_2026
import train_gpt_2026_08
from frontier.small_runs import A
from train_gpt_2026 import Hyperparameters, Run

CPU = torch.device("cpu")
LAYERS = "long+v0,short,short+x1,long+v2+x0"
PAIRS = "long+v0+pair,short+pair,short+x1,long+v2+x0+pair"
# What is on, and behind a bar what makes it matter.
SWITCHES = f"""yarn on | stages window=128+lr=1,window=256+lr=.5
yarn_window 128 | yarn on, stages window=128+lr=1,window=256+lr=.5
gate_channels 16 | attention_gate on; second_embed on |; gate_mul .1 | attention_gate on
exact_stages on | stages window=128+lr=1,window=256+lr=.5
stages length=1+targets=1/.5,length=2+lr=.5 |; last_window 384 |; extension_frac .25 |
tied_frac .5, head_init .02 |; x0_apart on, adam_groups x0+lr=.2 |; residual_lambda 1.1 |
momentum_cooldown_steps 4 | momentum_warmup_steps 1
key_offset on |; attention_gate on |; value_gate on |; skip_gate on |; smear on |; loss_sum on |
scaled_projections on |; layers {LAYERS}+backout |; logit_sigmoid 23 5 7.5 |; window_rule distance |
paired_heads on | layers {PAIRS}; bigram_rows 301 |; bigram_lambda .5 | bigram_rows 301
sublayer_lambdas on, x0_apart on | x0_apart on, bigram_rows 301; out_init 1 |
gate_by_values on, value_gate on | value_gate on; layers {LAYERS}+in0 |; layers {LAYERS}+in1 |
adam_rule cautious |; adam_every 2 |; muon_beta2 .95 |; muon_decay 1.2 |; polar_express on |
muon_mul 1 2 3 |; qkv_init 2 |; value_init 0 |; head_init .02 |"""
# Without one technique each: a flag, or behind a - the word that is removed from a table.
OFF_JULY = """stages length=2+window=384+lr=1.52+targets=1/.5+prefix=1
extension_frac 0 --last_window 0;residual_lambda 1;bigram_rows 0;bigram_signs 0;tied_frac 0
logit_sigmoid 15 0 7.5;momentum_cooldown_steps 0;muon_beta2 .5;muon_decay 0;value_lr .1
qk_pairs off;mudd_width 0;mixer_width 0;prefix 0;fp8_mlp off;lr_final .1
layers -x\\d+;layers -in\\d+;layers -v\\d;layers -mudd;layers -xsa;layers -mixer;layers -gate
layers -composed;layers -pair;layers -embed;layers -bigram;stages -targets=[^+,]*
stages -falls=1"""
OFF_AUGUST = """sampled_softmax off;ngram_rows 0 --bigram_rows 50304;optimizer muon;narrow_heads off
mlp_width 128;mudd_groups 0;mudd_all off;layers -mlps\\d;layers -embed;layers -narrowv
layers -bigram;prefix 0;tail_average off;anvil_share 1;attention_border 100;tied_frac 0"""
OFF = [("demo-89", words) for words in re.split("[;\n]", OFF_JULY)]
OFF += [("demo", words) for words in re.split("[;\n]", OFF_AUGUST)]
# What the first steps on a CPU do not show.
LATE = {"momentum_cooldown_steps 0", "fp8_mlp off", "lr_final .1", "tail_average off"}
LATE |= {"anvil_share 1", "stages -falls=1"}
COUNTS = {"832": "400", "1168": "416", "2000": "480"}  # candidates, of 512 tokens
STAGES = train_gpt_2026_08.RECORDS["demo"].stages
STAGES = re.sub("|".join(COUNTS), lambda found: COUNTS[found[0]], STAGES)
SIZES = "--vocab_size 512 --end_of_text 511 --model_dim 32 --num_heads 4 --head_dim 8"
SIZES += " --batch_seqs 2 --bigram_signs 37"
SIZES = {
    "demo-89": f"{SIZES} --mlp_width 128 --bigram_rows 1234",
    "demo": f"{SIZES} --ngram_rows 1234 --mlp_width 120 --canonical_mask off --stages {STAGES}",
}


@pytest.fixture
def small(tiny) -> Hyperparameters:
    """Return train_gpt.py's tiny settings as the fork's, with every technique off."""
    return Hyperparameters(**vars(tiny) | {"batch_seqs": 2, "layers": LAYERS})


def with_flags(hp: Hyperparameters, text: str) -> Hyperparameters:
    """Return the settings with those of a text: "name value, name value"."""
    flags = [f"--{pair.strip()}".split() for pair in text.split(", ") if pair.strip()]
    words = (
        f"--record {A} --vocab_size 512 --end_of_text 511 --layers {LAYERS} --num_layers 4".split()
    )
    words += sum(flags, [])
    settings, _ = train_gpt.parse_args(words, Run)
    return replace(hp, **{name[2:]: getattr(settings, name[2:]) for name, *_ in flags})


@functools.cache
def first_steps(run, hp, count: int = 4) -> list[float]:
    """Return the losses of some steps and of a validation after them."""
    some = torch.randint(1, 24, (2000,), generator=torch.Generator().manual_seed(0))
    words = some.cumsum(0) % 512  # each is a little after the one before
    model, val = train_gpt.build(run, hp, CPU), (words[None, :768].int(), words[None, 1:769])
    optimizers, losses = run.Optimizers(model, hp), []
    for step in range(count):
        now = run.Moment(step, hp)
        size = 2 * now.seq_len
        batch = words[:size].int().view(2, -1), words[1 : size + 1].view(2, -1)
        losses.append(train_gpt.train_step(model, optimizers, *batch, now)["loss"].item())
    losses.append(train_gpt.evaluate(model, val, run.Moment(count, hp), CPU))
    return losses


@pytest.mark.parametrize("text", re.split("[;\n] *", SWITCHES), ids=lambda text: text.split()[0])
def test_each_switch_trains_and_matters(text, small, float64):
    """In float64: the least effect, 2e-7 of a loss, is as small as what float32 rounds."""
    on, more = text.split("|")
    plain = with_flags(small, more)
    hp = with_flags(plain, on)
    train_gpt_2026.check(hp)
    losses, expected = first_steps(Run, hp), first_steps(Run, plain)
    assert max(losses) < 7 and min(losses[3:]) < losses[0] - 0.02
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 1e-8


def test_every_new_setting_has_a_switch_here():
    """But for what is of whole documents, which test_data.py has."""
    new = set(vars(Hyperparameters())) - set(vars(train_gpt.Hyperparameters()))
    switched = {pair.split()[0] for pair in re.split(r"[;\n,|] *", SWITCHES) if pair.strip()}
    assert new - switched == {"align_to_documents", "max_document_tokens"}


@pytest.mark.parametrize(("record", "words"), OFF)
def test_it_trains_without_any_technique_and_differently(record, words):
    run, (name, value) = train_gpt_2026_08.Run, words.split(" ", 1)
    sizes = ["--record", record, *SIZES[record].split()]
    usual, _ = train_gpt.parse_args(sizes, run)
    if value.startswith("-"):
        value, count = re.subn(rf"\+{value[1:]}(?=[+,]|$)", "", getattr(usual, name))
        assert count
    hp, _ = train_gpt.parse_args([*sizes, f"--{name}", *value.split()], run)
    losses, whole = (first_steps(run, one, 5) for one in (hp, usual))
    assert max(losses) < 7 and losses[3] < losses[0] - 0.02
    assert (losses[:5] == whole[:5]) == (words in LATE)
