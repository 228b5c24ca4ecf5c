"""The whole model against a float64 reference, its published names and initial weights, and the
rows of --layers of both scripts. tests/frontier/test_rows.py has the fork's model."""

from dataclasses import replace

import pytest
import torch

import reference
import train_gpt
import train_gpt_2026
from conftest import at_window
from reference import relative_error
from train_gpt import GPT, RECORDS, Layer, UserError

SIZES = {"model_dim": 64, "num_heads": 2, "head_dim": 32, "fp8": False}
RECORD = replace(RECORDS["2025-01-26_BatchSize"], **SIZES)
RECORD_2024 = replace(RECORDS["2024-11-24_WindowWarmup"], **SIZES)
MEDIUM = replace(RECORDS["medium_2025-01-18"], **SIZES)
PUBLISHED = ["2024-11-19_FlexAttention", "2024-11-24_WindowWarmup", "2025-01-26_BatchSize"]


@pytest.fixture
def small_vocabulary(monkeypatch):
    """Let the last of 512 words begin a document."""
    monkeypatch.setattr(reference, "END_OF_TEXT", 511)


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
    ("hp", "window"),
    [(RECORD, 256), (RECORD, 1792), (RECORD_2024, 64), (RECORD_2024, 192), (MEDIUM, 256)],
)
def test_loss_and_all_gradients_equal_the_float64_reference(
    hp, window, randomize, small_vocabulary
):
    model = randomize(GPT(replace(hp, vocab_size=512, end_of_text=511)))
    layers = reference.MEDIUM if hp is MEDIUM else None
    compare_with_float64(model, window, 2024 if hp is RECORD_2024 else 2025, layers=layers)


def test_any_layer_table_equals_the_float64_reference(randomize, small_vocabulary):
    """Also one whose first layer that attends does not give its values to others."""
    layers = "none,long+v3,short,short+vfirst,long+vfirst,none,short+v0,long+v3"
    hp = replace(RECORD, num_layers=8, layers=layers, vocab_size=512, end_of_text=511)
    rows = [(None, None, None), ("long", 3, None), ("half", None, None), ("half", "first", None)]
    rows += [("long", "first", 3), (None, None, 2), ("half", 0, 1), ("long", 3, 0)]
    compare_with_float64(randomize(GPT(hp)), 256, 2025, layers=rows)


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


def test_medium_has_the_published_number_of_parameters():
    """50257 rows of four tables, a head of 50304, matrices of 16 layers but one, and scalars."""
    with torch.device("meta"):
        model = GPT(RECORDS["medium_2025-01-18"])
    matrices = 15 * 4 * 1024**2 + 16 * 8 * 1024**2
    count = sum(p.numel() for p in model.parameters())
    assert count == (4 * 50257 + 50304) * 1024 + matrices + 16 * 2 + 15 * 2 + 8 == 454_496_326


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


def test_without_any_technique_the_fork_is_the_model_of_train_gpt(tiny):
    """First weights are equal; losses of four steps and of a validation are but for rounding."""
    bare = {"layers": train_gpt_2026.LAYERS_2025_SKIPS}
    bare = train_gpt_2026.Hyperparameters(**vars(tiny) | bare)
    tokens = torch.randint(0, 512, (2, 129), generator=torch.Generator().manual_seed(0))
    batch = tokens[:, :-1].int(), tokens[:, 1:]
    device, found = torch.device("cpu"), []
    for run, hp in ((train_gpt.Run, tiny), (train_gpt_2026.Run, bare)):
        hp = replace(hp, batch_seqs=2, adam_eps=1e-6)
        model = train_gpt.build(run, hp, device)
        initial = {name: weight.clone() for name, weight in model.state_dict().items()}
        optimizers = run.Optimizers(model, hp)
        losses = []
        for step in range(4):
            result = train_gpt.train_step(model, optimizers, *batch, run.Moment(step, hp))
            losses.append(result["loss"].item())
        losses.append(train_gpt.evaluate(model, batch, run.Moment(4, hp), device))
        found.append((initial, losses))
    (expected_initial, expected_losses), (initial, losses) = found
    torch.testing.assert_close(initial, expected_initial, rtol=0, atol=0)
    assert losses == pytest.approx(expected_losses, abs=1e-6) and losses[4] < losses[0] - 0.5


# -----------------------------------------------------------------------------
# Rows of --layers


def rows_of(script, layers: str = "", **settings) -> tuple:
    """Return the layer table of these rows, or of the default record's."""
    if layers:
        settings = {"num_layers": layers.count(",") + 1, "layers": layers} | settings
    return script.layer_table(script.Hyperparameters(**settings))


def test_num_layers_keeps_the_ends_of_the_table():
    """Of an odd number, the upper half is the smaller one."""
    for script, count in ((train_gpt, 6), (train_gpt_2026, 6), (train_gpt_2026, 5)):
        table = rows_of(script)
        assert rows_of(script, num_layers=count) == table[:3] + table[3 - count :]


LAYERS_2026 = {
    "none+x2": train_gpt_2026.Layer("none", skip_from=2),
    "long+v7+x2+in0+pair+backout": train_gpt_2026.Layer("long", "7", 2, 0, True, True),
    "long+backout+in0+v10": train_gpt_2026.Layer("long", "10", None, 0, False, True),
}


def test_a_layer_is_its_window_and_its_words():
    expected = Layer("short", "first"), Layer("none"), Layer("long", "9"), Layer("short")
    assert rows_of(train_gpt, "short+vfirst,none,long+v9,short") == expected
    for row, layer in LAYERS_2026.items():
        assert rows_of(train_gpt_2026, f"long,long,long,{row}", paired_heads=True)[3] == layer
    assert not rows_of(train_gpt_2026, "long,long,long,short+pair")[3].paired


FOUR = "long,long,long,long"
NO_LAYERS = [
    (train_gpt, "long,long,long,none+v0", 4, "'none[+]v0' is not a layer"),
    (train_gpt, "long,long, long,long", 4, "' long' is not a layer"),
    (train_gpt_2026, "long,long,long,long+pair1", 4, "'long[+]pair1' is not a layer"),
    (train_gpt_2026, "long,long,long,long+x3", 4, "'long[+]x3' cannot be layer 3"),
    (train_gpt_2026, "long,long+x0,long,long", 4, "'long[+]x0' cannot be layer 1"),
    (train_gpt, FOUR, 3, "--num_layers 3: must be even, and at most 4"),
    (train_gpt_2026, FOUR, 5, "--num_layers 5: --layers has 4"),
]


@pytest.mark.parametrize(("script", "layers", "count", "reason"), NO_LAYERS)
def test_what_is_no_layer_is_refused(script, layers, count, reason):
    """Only the upper half adds outputs."""
    with pytest.raises(UserError, match=reason):
        rows_of(script, layers, num_layers=count)
