"""Each technique's switch: on, it trains and matters."""

import functools
import re
from dataclasses import replace

import pytest
import torch

import train_gpt
import train_gpt_2026
from frontier.small_runs import A
from train_gpt_2026 import Hyperparameters, Moment, Optimizers, Run

CPU = torch.device("cpu")
LAYERS = "long+v0,short,short+x1,long+v2+x0"
PAIRS = "long+v0+pair,short+pair,short+x1,long+v2+x0+pair"
# What is on, and behind a bar what makes it matter.
SWITCHES = f"""yarn on | stages window=128+lr=1,window=256+lr=.5
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


@pytest.fixture
def small(bare) -> Hyperparameters:
    return replace(bare, batch_seqs=2, layers=LAYERS)


def with_flags(hp: Hyperparameters, text: str) -> Hyperparameters:
    """Return the settings with those of a text: "name value, name value"."""
    flags = [f"--{pair.strip()}".split() for pair in text.split(", ") if pair.strip()]
    words = f"--record {A} --vocab_size 512 --layers {LAYERS} --num_layers 4".split()
    words += sum(flags, [])
    settings, _ = train_gpt.parse_args(words, Run)
    return replace(hp, **{name[2:]: getattr(settings, name[2:]) for name, *_ in flags})


@functools.cache
def four_steps(hp: Hyperparameters) -> tuple[list[float], dict]:
    """Return the losses of four steps and of a validation after them, and the last weights."""
    words = torch.randint(1, 24, (769,), generator=torch.Generator().manual_seed(0)).cumsum(0) % 512
    model, val = train_gpt.build(Run, hp, CPU), (words[None, :-1].int(), words[None, 1:])
    optimizers, losses = Optimizers(model, hp), []
    for step in range(4):
        now = Moment(step, hp)
        size = 2 * now.seq_len
        batch = words[:size].int().view(2, -1), words[1 : size + 1].view(2, -1)
        losses.append(train_gpt.train_step(model, optimizers, *batch, now)[0].item())
    return [*losses, train_gpt.evaluate(model, val, Moment(4, hp), CPU)], model.state_dict()


@pytest.mark.parametrize("text", re.split("[;\n] *", SWITCHES), ids=lambda text: text.split()[0])
def test_each_switch_trains_and_matters(text, small):
    on, more = text.split("|")
    plain = with_flags(small, more)
    hp = with_flags(plain, on)
    train_gpt_2026.check(hp)
    (losses, _), (expected, _) = four_steps(hp), four_steps(plain)
    assert max(losses) < 7 and min(losses[3:]) < losses[0] - 0.02 and losses != expected


def test_every_new_setting_has_a_switch_here():
    """But for what is of whole documents, which test_data.py has."""
    new = set(vars(Hyperparameters())) - set(vars(train_gpt.Hyperparameters()))
    switched = {pair.split()[0] for pair in re.split(r"[;\n,|] *", SWITCHES) if pair.strip()}
    assert new - switched == {"align_to_documents", "max_document_tokens"}


@pytest.mark.parametrize("text", [f"layers {PAIRS}", "bigram_lambda .5", "stages lr=1"])
def test_what_waits_for_a_switch_changes_nothing_without_it(text, small):
    (losses, weights), (expected, same) = four_steps(with_flags(small, text)), four_steps(small)
    assert losses == expected and weights.keys() == same.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in same.items())
