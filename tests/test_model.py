"""The whole model against a float64 reading of its specification, and its published names."""

import ast
import math
import sys
from dataclasses import replace

import pytest
import reference
import torch

from train_gpt import (
    GPT,
    HERE,
    RECORDS,
    CastedLinear,
    Layer,
    dense_mask,
    first_visible,
    get_window_size,
    layer_table,
    norm,
    rotary_table,
)

RECORD = replace(RECORDS["2025-01-26_BatchSize"], model_dim=64, num_heads=2, head_dim=32)
RECORD_2024 = replace(RECORDS["2024-11-24_WindowWarmup"], model_dim=64, num_heads=2, head_dim=32)
PUBLISHED = ["2024-11-19_FlexAttention", "2024-11-24_WindowWarmup", "2025-01-26_BatchSize"]


def sequence(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    stream = torch.randint(0, 50256, (length + 1,), generator=generator)
    stream[[0, 60, 130, 131, 300][: 1 + length // 100]] = 50256
    return stream[:-1].int(), stream[1:]


@pytest.mark.parametrize(
    ("hp", "window"),
    [(RECORD, 128), (RECORD, 256), (RECORD, 384), (RECORD, 1792)]
    + [(RECORD_2024, 64), (RECORD_2024, 192), (RECORD_2024, 1024)],
)
def test_loss_and_all_gradients_equal_the_float64_reading(hp, window, randomize):
    model = randomize(GPT(hp))
    inputs, targets = sequence(3 * 128)
    loss = model(inputs, targets, torch.tensor(window))
    loss.backward()

    weights = {k: v.detach().double().requires_grad_() for k, v in model.named_parameters()}
    year = 2025 if hp is RECORD else 2024
    expected = reference.loss(weights, inputs.long(), targets, window, heads=2, year=year)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=2e-5)
    for name, p in model.named_parameters():
        if name == "blocks.0.attn.lambdas" and hp is RECORD_2024:
            assert p.grad.abs().max() < 1e-6  # the first layer mixes its v with itself
            continue
        error = (p.grad - weights[name].grad).norm() / weights[name].grad.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("year", [2024, 2025])
def test_full_size_records_begin_at_ln_50304_and_equal_the_float64_reading(year, randomize):
    """1024 tokens; at the start the zero head hides everything, so then all weights are random."""
    records = [RECORDS[name] for name in PUBLISHED if name.startswith(str(year))]
    inputs, targets = sequence(1024)
    with torch.no_grad():
        model = GPT(records[0])
        first = model(inputs[:128], targets[:128], 128).item()
        assert round(first, 4) == 10.8258 == round(math.log(50304), 4)
        randomize(model)
        weights = {k: v.double() for k, v in model.named_parameters()}
        for hp in records:
            assert layer_table(hp) == model.layers  # what differs is the schedule and the window
            window = get_window_size(hp.num_iterations // 2, hp)
            model.hp = hp
            loss = model(inputs, targets, window).item()
            expected = reference.loss(weights, inputs.long(), targets, window, 6, year).item()
            assert loss == pytest.approx(expected, abs=2e-5)
            assert abs(loss - math.log(50304)) > 0.1


def test_logits_are_soft_capped_and_give_the_loss(randomize):
    model = randomize(GPT(RECORD)).eval()
    inputs, targets = sequence(256)
    with torch.no_grad():
        logits, loss = model.logits(inputs, 256), model(inputs, targets, 256)
    assert logits.shape == (256, 50304) and logits.abs().max() <= 15
    expected = torch.nn.functional.cross_entropy(logits.double(), targets)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


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


def test_num_layers_keeps_the_ends_of_the_table_and_links_them():
    rows = layer_table(replace(RECORDS["2025-01-26_BatchSize"], num_layers=6))
    assert rows == (
        Layer("long", "0"),
        Layer("short", "1"),
        Layer("short", "2"),
        Layer("short", "0", skip_from=2),
        Layer("short", "1", skip_from=1),
        Layer("long", "2", skip_from=0),
    )


def test_layer_table_is_the_published_one():
    """Read another way: windows and tables of 2025 from the test's own list, skips from 11 - i."""
    windows = {"long": "long", "half": "short", None: "none"}
    for name in PUBLISHED:
        for i, row in enumerate(layer_table(RECORDS[name])):
            window, values = reference.LAYERS[int(name[:4])][i]
            skip_from = 11 - i if i > 5 else None
            assert row == Layer(windows[window], None if values is None else str(values), skip_from)


def test_the_first_layers_values_are_the_first_layers(tiny, randomize):
    """Also where that layer mixes nothing: then the mixing scalar of a later one has an effect."""
    model = randomize(GPT(replace(tiny, num_layers=2, layers="long,long+vfirst+x0")).eval())
    tokens = torch.randint(0, 512, (128,), dtype=torch.int32)
    with torch.no_grad():
        before = model.logits(tokens, 128)
        model.blocks[1].attn.lambdas.fill_(0.0)
        assert not torch.allclose(model.logits(tokens, 128), before, atol=1e-2)


def test_an_output_may_be_added_to_several_layers(tiny, randomize):
    """Against the same blocks in a loop that keeps all outputs."""
    layers = "long,long,long+x0,long+x0,long+x1"
    hp = replace(tiny, num_layers=6, layers=f"long,{layers}")
    model = randomize(GPT(hp)).eval()
    tokens = torch.randint(0, 512, (128,), dtype=torch.int32)
    mask = dense_mask(first_visible(tokens, torch.tensor(128), "blocks"))
    rotary = rotary_table(128, hp, "cpu")
    with torch.no_grad():
        x = x0 = norm(model.embed(tokens), hp.norm_eps)[None]
        outputs = []
        for i, block in enumerate(model.blocks):
            source = {3: 0, 4: 0, 5: 1}.get(i)
            skip = None if source is None else (model.skip_weights[i - 3], outputs[source])
            x, _ = block(x, x0, None, skip, rotary, mask, False)
            outputs.append(x)
        assert torch.equal(model.hidden(tokens, 128), norm(x, hp.norm_eps)[0])


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


def test_train_gpt_imports_only_torch_with_its_triton_numpy_tqdm_and_the_standard_library():
    tree = ast.parse((HERE / "train_gpt.py").read_text())
    names = {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in names}
    assert roots - set(sys.stdlib_module_names) == {"torch", "triton", "numpy", "tqdm"}
