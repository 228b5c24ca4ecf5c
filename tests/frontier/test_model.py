"""The rows of --layers, and the model without any technique. What layers compute: test_rows.py."""

from dataclasses import replace

import pytest
import reference
import torch
import train_gpt_2026
from train_gpt_2026 import GPT, Hyperparameters, Layer, Moment, layer_table

import train_gpt
from frontier.small_runs import TECHNIQUES
from train_gpt import UserError

DEFAULT = Hyperparameters()


def test_without_any_technique_it_is_the_model_of_train_gpt(tiny, bare):
    """Weights at first are equal, and groups of parameters; the losses of four steps and of a
    validation, and the last weights, are but for rounding. Adam's epsilon leaves rounding small."""
    tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].int(), tokens[:, 1:]
    device, found = torch.device("cpu"), []
    for run, hp in ((train_gpt.Run, tiny), (train_gpt_2026.Run, bare)):
        hp = replace(hp, batch_seqs=2, adam_eps=1e-6)
        model = train_gpt.build(run, hp, device)
        initial = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizers = run.optimizers_class(model, hp)
        losses = []
        for step in range(4):
            result = train_gpt.train_step(model, optimizers, *batch, run.moment(step, hp))
            losses.append(result[0].item())
        losses.append(train_gpt.evaluate(model, batch, run.moment(4, hp), device))
        names = {id(p): name for name, p in model.named_parameters()}
        groups = {
            rows.name: [names[id(p)] for p, *_ in rows.views] for _, rows in optimizers.groups
        }
        found.append((initial, losses, model.state_dict(), groups))
    (initial_there, losses_there, last_there, groups_there), (initial, losses, last, groups) = found
    assert initial.keys() == initial_there.keys() and groups == groups_there
    assert all(torch.equal(initial[name], weight) for name, weight in initial_there.items())
    assert losses == pytest.approx(losses_there, abs=1e-6) and losses[4] < losses[0] - 0.5
    for name, weight in last_there.items():
        torch.testing.assert_close(last[name], weight, rtol=0, atol=1e-5)


# -----------------------------------------------------------------------------
# Rows of --layers


def test_the_default_layers_are_the_published_ones_of_2025():
    windows = {"long": "long", "half": "short", None: "none"}
    expected = [
        Layer(windows[window], None if values is None else str(values), skip)
        for window, values, skip in reference.LAYERS[2025]
    ]
    assert list(layer_table(DEFAULT)) == expected


@pytest.mark.parametrize("count", [5, 6])
def test_num_layers_keeps_the_ends_of_the_table(count):
    """Of an odd number, the upper half is the smaller one."""
    lower = [Layer("long", "0"), Layer("short", "1"), Layer("short", "2")]
    upper = [Layer("short", "0", 2), Layer("short", "1", 1), Layer("long", "2", 0)]
    assert list(layer_table(replace(DEFAULT, num_layers=count))) == lower + upper[6 - count :]


def test_num_layers_is_at_most_the_rows():
    with pytest.raises(UserError, match="--num_layers 13: --layers has 12"):
        layer_table(replace(DEFAULT, num_layers=13))


def fourth_layer(text: str, **settings) -> Layer:
    hp = replace(DEFAULT, num_layers=4, layers=f"long,long,long,{text}", **settings)
    return layer_table(hp)[3]


WORDS = {
    "long": Layer("long"),
    "none+x2": Layer("none", skip_from=2),
    "short+v9": Layer("short", "9"),
    "short+v1+x1": Layer("short", "1", 1),
    "none+backout": Layer("none", backout=True),
    "short+pair": Layer("short", paired=True),
    "long+v7+x2+in0+pair+backout": Layer("long", "7", 2, 0, True, True),
}


def test_a_layer_is_its_window_and_its_words():
    assert {text: fourth_layer(text, paired_heads=True) for text in WORDS} == WORDS
    assert fourth_layer("short+pair", paired_heads=False) == Layer("short")


NO_LAYERS = [
    *("", "wide", " long", "v0", "+long", "long+", "long+nonsense", "long+v10", "long+x-1"),
    *("long+x0x1", "long+v0+v1", "long+x0+x1", "long+long", "long+pair+pair", "long+x1+v1"),
]


@pytest.mark.parametrize("text", NO_LAYERS)
def test_what_is_no_layer_is_refused_with_the_form_of_a_row(text):
    with pytest.raises(UserError, match="is not a layer; a layer is long, short or none") as error:
        fourth_layer(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["none+v0", "none+in1", "none+in0", "none+pair", "long+x3", "long+in3", "long+x9", "long+in9"],
)
def test_a_layer_reads_what_is_there_and_only_if_it_attends(text):
    with pytest.raises(UserError, match="cannot be layer 3") as error:
        fourth_layer(text)
    assert repr(text) in str(error.value)


def test_only_the_upper_half_adds_outputs():
    with pytest.raises(UserError, match="'long[+]x0' cannot be layer 1"):
        layer_table(replace(DEFAULT, num_layers=4, layers="long,long+x0,long,long"))


# -----------------------------------------------------------------------------
# What a later token changes


def test_a_later_token_changes_no_earlier_output(bare, randomize):
    """Also with all techniques at once: what looks back a token, or reads two."""
    layers = "long+v0+pair,short+backout,short+x1+in0,long+v2+x0"
    hp = replace(bare, layers=layers, yarn=True, window_rule="distance", **TECHNIQUES)
    model = randomize(GPT(hp)).eval()
    tokens = torch.randint(0, 512, (256,), dtype=torch.int32)
    changed = tokens.clone()
    changed[150:] = torch.randint(0, 512, (106,), dtype=torch.int32)
    now = Moment(4, model.hp)
    with torch.no_grad():
        a, b = (model.lm_head.logits(model.hidden(t, now)) for t in (tokens, changed))
    assert torch.equal(a[:150], b[:150]) and not torch.equal(a[150:], b[150:])
