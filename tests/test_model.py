"""The whole model against a float64 reading of its specification, and its published names."""

import math
from dataclasses import replace

import pytest
import reference
import torch

import train_gpt
from train_gpt import GPT, RECORDS, CastedLinear, Layer, UserError, layer_table

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
    """Compare the loss and all gradients, on three blocks of tokens; only a first layer that mixes
    its v with itself has a gradient of zero."""
    inputs, targets = sequence(3 * 128)
    loss = model(inputs, targets, window)
    loss.backward()
    weights = {k: v.detach().double().requires_grad_() for k, v in model.named_parameters()}
    heads = model.hp.num_heads
    expected = reference.loss(weights, inputs.long(), targets, window, heads, year, **options)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-5)
    attending = [i for i, row in enumerate(model.layers) if row.window != "none"]
    for name, p in model.named_parameters():
        first = name == f"blocks.{attending[0]}.attn.lambdas"
        if first and model.layers[attending[0]].values == "first":
            assert p.grad.abs().max() < 1e-6
            continue
        error = (p.grad - weights[name].grad).norm() / weights[name].grad.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    ("hp", "window"),
    [(RECORD, 128), (RECORD, 256), (RECORD, 384), (RECORD, 1792)]
    + [(RECORD_2024, 64), (RECORD_2024, 192), (RECORD_2024, 1024)],
)
def test_loss_and_all_gradients_equal_the_float64_reading(hp, window, randomize, small_vocabulary):
    model = randomize(GPT(replace(hp, vocab_size=512)))
    compare_with_float64(model, window, 2025 if hp is RECORD else 2024)


def test_full_width_equals_the_float64_reading(randomize, small_vocabulary):
    """Six heads of 128 channels, the record's first and last layer; tests/slow has all layers."""
    hp = replace(RECORDS["2025-01-26_BatchSize"], num_layers=2, vocab_size=512)
    layers = [("long", 0, None), ("long", 2, 0)]
    compare_with_float64(randomize(GPT(hp)), 256, 2025, layers=layers)


def test_any_layer_table_is_read_as_in_float64(randomize, small_vocabulary):
    """Its windows and tables in other places, and values of the first layer that attends, which
    mixes nothing itself."""
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
        loss = GPT(hp)(*sequence(128, 50256), 128).item()
    assert round(loss, 4) == 10.8258 == round(math.log(50304), 4)


@pytest.mark.parametrize("cap", [15.0, 30.0])
def test_logits_are_soft_capped_and_give_the_loss(cap, randomize, small_vocabulary):
    """softmax does not see that the model's are larger by the cap."""
    model = randomize(GPT(replace(RECORD, vocab_size=512, logit_softcap=cap))).eval()
    inputs, targets = sequence(256)
    with torch.no_grad():
        logits, loss = model.logits(inputs, 256), model(inputs, targets, 256)
        raw = model.hidden(inputs, 256).double() @ model.lm_head.weight.double().T
    assert logits.shape == (256, 512) and logits.dtype == torch.float32
    expected = reference.soft_capped(raw, cap)
    torch.testing.assert_close(logits.double() - cap, expected, rtol=0, atol=1e-5)
    assert loss.item() == pytest.approx(
        torch.nn.functional.cross_entropy(expected, targets).item(), abs=1e-5
    )


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


def test_initial_weights_are_the_published_ones():
    torch.manual_seed(0)
    model = GPT(RECORD)
    w = dict(model.named_parameters())
    assert w["embed.weight"].std().item() == pytest.approx(1, abs=0.01)
    for name in ("blocks.3.attn.qkv_w", "blocks.3.mlp.c_fc.weight"):
        bound = math.sqrt(3) * 0.5 / math.sqrt(64)
        assert w[name].abs().max().item() == pytest.approx(bound, rel=0.01)
        assert w[name].std().item() == pytest.approx(0.5 / math.sqrt(64), rel=0.02)
    zeros = [n for n, p in w.items() if not p.any()]
    assert zeros == [n for n in w if n.endswith("c_proj.weight") or n == "lm_head.weight"]
    assert w["blocks.0.lambdas"].tolist() == [1, 0]
    assert w["blocks.0.attn.lambdas"].tolist() == [0.5, 0.5]
    assert w["skip_weights"].tolist() == [1] * 6


def test_initial_weights_of_2024_reach_one_over_the_root_of_their_inputs():
    w = dict(GPT(RECORD_2024).named_parameters())
    for name in ("blocks.3.attn.qkv_w", "blocks.3.mlp.c_fc.weight"):
        assert w[name].abs().max().item() == pytest.approx(1 / math.sqrt(64), rel=0.01)
        assert w[name].std().item() == pytest.approx(1 / math.sqrt(3 * 64), rel=0.02)
    assert all(w[f"blocks.{i}.attn.lambdas"].tolist() == [0.5] for i in range(12))
    assert w["embed.weight"].shape[0] == 50304 and not any("value_embeds" in name for name in w)


def test_num_layers_keeps_the_ends_of_the_table():
    rows = layer_table(replace(RECORDS["2025-01-26_BatchSize"], num_layers=6))
    assert rows == (
        Layer("long", "0"),
        Layer("short", "1"),
        Layer("short", "2"),
        Layer("short", "0"),
        Layer("short", "1"),
        Layer("long", "2"),
    )


def test_layer_table_is_the_published_one():
    """The test's own reading has the same rows."""
    windows = {"long": "long", "half": "short", None: "none"}
    for name in PUBLISHED:
        expected = [
            Layer(windows[window], None if values is None else str(values))
            for window, values, _ in reference.LAYERS[int(name[:4])]
        ]
        assert list(layer_table(RECORDS[name])) == expected


def fourth_layer(text: str) -> Layer:
    hp = replace(RECORDS["demo"], num_layers=4, layers=f"long,long,long,{text}")
    return layer_table(hp)[3]


WORDS = {
    "long": Layer("long", None),
    "short": Layer("short", None),
    "none": Layer("none", None),
    "long+v0": Layer("long", "0"),
    "short+v9": Layer("short", "9"),
    "long+vfirst": Layer("long", "first"),
}


@pytest.mark.parametrize("text", WORDS)
def test_a_layer_is_its_window_and_its_values(text):
    assert fourth_layer(text) == WORDS[text]


REFUSED = {
    "no window": ["", "wide", "Long", " long", "v0", "+long"],
    "unknown word": ["long+", "long+nonsense", "long+V0", "long+v10", "long+v", "long+x0"],
    "two of a kind": ["long+v0+v1", "long+v0+v0", "long+v0+vfirst", "long+long"],
    "values without attention": ["none+v0", "none+vfirst"],
}


@pytest.mark.parametrize("reason, text", [(why, text) for why in REFUSED for text in REFUSED[why]])
def test_what_is_no_layer_is_refused_with_the_form_of_a_row(reason, text):
    with pytest.raises(UserError, match="is no layer; a row is long, short or none") as error:
        fourth_layer(text)
    assert repr(text) in str(error.value)


def test_a_table_is_not_longer_than_its_rows():
    with pytest.raises(UserError, match="--num_layers 6: must be even, and at most the 4 rows"):
        layer_table(replace(RECORDS["demo"], num_layers=6, layers="long,long,long,long"))


def test_a_later_token_changes_no_earlier_output(tiny, randomize):
    model = randomize(GPT(tiny)).eval()
    tokens = torch.randint(0, 512, (256,), dtype=torch.int32)
    changed = tokens.clone()
    changed[150:] = torch.randint(0, 512, (106,), dtype=torch.int32)
    with torch.no_grad():
        a, b = (model.logits(t, 256) for t in (tokens, changed))
    assert torch.equal(a[:150], b[:150]) and not torch.equal(a[150:], b[150:])


def test_casted_linear_without_fp8_is_a_linear_layer_in_its_inputs_dtype():
    layer, x = CastedLinear(16, 32), torch.randn(5, 3, 16, dtype=torch.bfloat16)
    out = layer(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, x @ layer.weight.bfloat16().T)
