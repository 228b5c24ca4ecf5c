"""The whole model against a float64 reference, and its published names and initial weights."""

import math
from dataclasses import replace

import pytest
import reference
import torch
import torch.nn.functional as F
from conftest import at_window
from reference import relative_error

import train_gpt
from train_gpt import GPT, RECORDS, Layer, UserError, layer_table

RECORD = replace(RECORDS["2025-01-26_BatchSize"], model_dim=64, num_heads=2, head_dim=32)
RECORD_2024 = replace(RECORDS["2024-11-24_WindowWarmup"], model_dim=64, num_heads=2, head_dim=32)
PUBLISHED = ["2024-11-19_FlexAttention", "2024-11-24_WindowWarmup", "2025-01-26_BatchSize"]


@pytest.fixture
def small_vocabulary(monkeypatch):
    """Let the last of 512 words begin a document."""
    for module in (train_gpt, reference):
        monkeypatch.setattr(module, "END_OF_TEXT", 511)


def sequence(length: int, end_of_text: int = 511) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(0, end_of_text, (length + 1,), generator=generator)
    stream[[0, 60, 130, 131, 300][: 1 + length // 100]] = end_of_text
    return stream[:-1].int(), stream[1:]


def compare_with_float64(model, window: int, year: int, **options) -> None:
    """Compare the loss and all gradients, on three blocks of tokens; the first layer of "first"
    mixes its v with itself, by a share whose gradient is zero."""
    inputs, targets = sequence(3 * 128)
    loss = model(inputs, targets, at_window(window, model.hp))
    loss.backward()
    weights = {k: v.detach().double().requires_grad_() for k, v in model.named_parameters()}
    heads = model.hp.num_heads
    expected = reference.loss(weights, inputs.long(), targets, window, heads, year, **options)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-5)
    giving = [
        f"blocks.{i}.attn.lambdas" for i, row in enumerate(model.layers) if row.values == "first"
    ]
    for name, p in model.named_parameters():
        if name in giving[:1]:
            assert p.grad.abs().max() < 1e-6
            continue
        error = relative_error(p.grad.to_dense(), weights[name].grad)
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("hp", "window"), [(RECORD, 256), (RECORD, 1792), (RECORD_2024, 64), (RECORD_2024, 192)]
)
def test_loss_and_all_gradients_equal_the_float64_reference(
    hp, window, randomize, small_vocabulary
):
    model = randomize(GPT(replace(hp, vocab_size=512)))
    compare_with_float64(model, window, 2025 if hp is RECORD else 2024)


def test_any_layer_table_equals_the_float64_reference(randomize, small_vocabulary):
    """Also one whose first layer that attends does not give its values to others."""
    layers = "none,long+v3,short,short+vfirst,long+vfirst,none,short+v0,long+v3"
    hp = replace(RECORD, num_layers=8, layers=layers, vocab_size=512)
    rows = [(None, None, None), ("long", 3, None), ("half", None, None), ("half", "first", None)]
    rows += [("long", "first", 3), (None, None, 2), ("half", 0, 1), ("long", 3, 0)]
    compare_with_float64(randomize(GPT(hp)), 256, 2025, layers=rows)


@pytest.mark.parametrize("record", PUBLISHED)
def test_each_record_begins_at_ln_50304(record):
    """The zero head hides all but the padded vocabulary's size."""
    hp = replace(RECORDS[record], model_dim=64, num_heads=2, head_dim=32)
    with torch.no_grad():
        loss = GPT(hp)(*sequence(128, 50256), train_gpt.Moment(0, hp)).item()
    assert round(loss, 4) == 10.8258 == round(math.log(50304), 4)


def test_logits_are_soft_capped_and_give_the_loss(randomize, small_vocabulary):
    """softmax does not see that the model's are larger by the cap."""
    model = randomize(GPT(replace(RECORD, vocab_size=512, logit_softcap=30.0))).eval()
    inputs, targets = sequence(256)
    now = at_window(256, model.hp)
    with torch.no_grad():
        logits, loss = model.lm_head.logits(model.hidden(inputs, now)), model(inputs, targets, now)
        raw = model.hidden(inputs, now).double() @ model.lm_head.weight.double().T
    assert logits.shape == (256, 512) and logits.dtype == torch.float32
    expected = reference.soft_capped(raw, 30.0)
    torch.testing.assert_close(logits.double() - 30, expected, rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(F.cross_entropy(expected, targets).item(), abs=1e-5)


def test_full_size_model_has_the_published_names_and_shapes():
    with torch.device("meta"):
        model = GPT(RECORDS["2025-01-26_BatchSize"])
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    expected = {"embed.weight": (50257, 768), "skip_weights": (6,), "lm_head.weight": (50304, 768)}
    expected |= {f"value_embeds.embed.{i}.weight": (50257, 768) for i in range(3)}
    for i in range(12):
        expected[f"blocks.{i}.lambdas"] = (2,)
        expected[f"blocks.{i}.mlp.c_fc.weight"] = (3072, 768)
        expected[f"blocks.{i}.mlp.c_proj.weight"] = (768, 3072)
        if i != 7:
            expected[f"blocks.{i}.attn.qkv_w"] = (3, 768, 768)
            expected[f"blocks.{i}.attn.lambdas"] = (2,)
            expected[f"blocks.{i}.attn.c_proj.weight"] = (768, 768)
    assert shapes == expected
    assert shapes == {name: tuple(t.shape) for name, t in model.state_dict().items()}


@pytest.mark.parametrize("hp, bound", [(RECORD, 0.75**0.5), (RECORD_2024, 1.0)])
def test_initial_weights_are_the_published_ones(hp, bound):
    """Hidden weights are uniform within bound / sqrt(fan_in)."""
    torch.manual_seed(0)
    w = dict(GPT(hp).named_parameters())
    assert w["embed.weight"].std().item() == pytest.approx(1, abs=0.01)
    for name in ("blocks.3.attn.qkv_w", "blocks.3.mlp.c_fc.weight"):
        assert w[name].abs().max().item() == pytest.approx(bound / 8, rel=0.01)
        assert w[name].std().item() == pytest.approx(bound / 8 / 3**0.5, rel=0.02)
    zeros = [n for n, p in w.items() if not p.any()]
    assert zeros == [n for n in w if n.endswith("c_proj.weight") or n == "lm_head.weight"]
    assert w["blocks.0.lambdas"].tolist() == [1, 0]
    halves = 2 if hp is RECORD else 1
    assert w["blocks.0.attn.lambdas"].tolist() == [0.5] * halves
    assert w["skip_weights"].tolist() == [1] * 6


def test_num_layers_keeps_the_ends_of_the_table():
    rows = [(row.window, row.values) for row in layer_table(replace(RECORD, num_layers=6))]
    assert rows[:3] == [("long", "0"), ("short", "1"), ("short", "2")]
    assert rows[3:] == [("short", "0"), ("short", "1"), ("long", "2")]


def test_the_layers_of_each_record_are_the_reference_s():
    windows = {"long": "long", "half": "short", None: "none"}
    for name in PUBLISHED:
        expected = [
            Layer(windows[window], None if values is None else str(values))
            for window, values, _ in reference.LAYERS[int(name[:4])]
        ]
        assert list(layer_table(RECORDS[name])) == expected


def four_layers(last: str) -> tuple[Layer, ...]:
    return layer_table(replace(RECORDS["demo"], num_layers=4, layers=f"long,long,long,{last}"))


def test_a_layer_is_its_window_and_its_values():
    for last in ("long", "short", "none"):
        assert four_layers(last)[3] == Layer(last, None)
    for values in ("0", "9", "first"):
        assert four_layers(f"short+v{values}")[3] == Layer("short", values)


NO_LAYERS = ["", "wide", " long", "v0", "long+", "long+V0", "long+v10", "long+x0", "long+v0+v1"]


@pytest.mark.parametrize("text", [*NO_LAYERS, "none+v0"])
def test_what_is_no_layer_is_refused_with_the_form_of_a_row(text):
    with pytest.raises(UserError, match="is not a layer; a row is long, short or none") as error:
        four_layers(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("count", [3, 6])
def test_num_layers_is_even_and_at_most_the_rows(count):
    with pytest.raises(UserError, match=f"--num_layers {count}: must be even, and at most the 4"):
        layer_table(replace(RECORDS["demo"], num_layers=count, layers="long,long,long,long"))
