"""Masks of windows that are a distance, also of paired heads, against a brute-force T x T mask."""

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masks import brute_force, read_block_mask, starts, tokens_with_documents  # the textbook's
from train_gpt_2026 import GPT, Hyperparameters, attend, first_visible, moment

from train_gpt import BLOCK, END_OF_TEXT, block_lists, dense_mask, flex_mask

windows = st.one_of(st.integers(1, 700), st.sampled_from([BLOCK * b for b in range(1, 6)]))


def within_distance(tokens: torch.Tensor, window: int, places: int = 1) -> torch.Tensor:
    """Return the mask as it is defined, place by place: a place sees itself and those before it in
    its document, as far as the window's whole blocks reach. A token has one place, or two."""
    document = (tokens == END_OF_TEXT).cumsum(0).repeat_interleave(places)
    reach = max(window // BLOCK, 1) * BLOCK
    visible = torch.zeros(len(document), len(document), dtype=torch.bool)
    for i in range(len(document)):
        first = max(i - reach, 0)
        visible[i, first : i + 1] = document[first : i + 1] == document[i]
    return visible


@settings(max_examples=8, deadline=None)
@given(starts=starts, window=windows)
def test_a_window_that_is_a_distance_equals_brute_force(starts, window):
    tokens = tokens_with_documents(starts)
    expected = within_distance(tokens, window)
    first = first_visible(tokens, window, "distance")
    assert torch.equal(dense_mask(first) == 0, expected)
    assert torch.equal(read_block_mask(flex_mask(*block_lists(first))), expected)


@pytest.mark.parametrize("rule", ["blocks", "tokens"])
def test_other_windows_are_the_textbooks(rule):
    tokens = tokens_with_documents([0, 60, 61, 300])
    for window in (100, 128, 300):
        first = first_visible(tokens, window, rule)
        assert torch.equal(dense_mask(first) == 0, brute_force(tokens, window, rule))


@settings(max_examples=5, deadline=None)
@given(starts=starts)
def test_an_endless_distance_sees_all_of_the_document(starts):
    """However large its number is: positions are int32."""
    tokens = tokens_with_documents(starts)
    for window in (2**31, 10**10):
        first = first_visible(tokens, window, "distance")
        assert torch.equal(dense_mask(first) == 0, brute_force(tokens, 10**5, "tokens"))


@settings(max_examples=5, deadline=None)
@given(starts=starts, window=st.sampled_from([128, 384, 10**6]))
def test_layers_have_masks_of_their_windows_and_pairs_of_heads_count_places(starts, window):
    """A short window is half of the long one; a mask that no layer attends with is not made."""
    hp = Hyperparameters(
        layers="long,short+pair,none,long+pair",
        num_layers=4,
        num_heads=2,
        head_dim=16,
        model_dim=32,
        vocab_size=512,
        paired_heads=True,
        window_rule="distance",
    )
    with torch.device("meta"):
        model = GPT(hp)
    tokens = tokens_with_documents(starts)
    now = replace(moment(0, hp), window=window, short=window // 2)
    masks = model.masks(tokens, now, dense_mask)
    assert set(masks) == {"long", "short+pair", "long+pair"}
    for name, mask in masks.items():
        places = 2 if name.endswith("+pair") else 1
        size = window if name.startswith("long") else window // 2
        assert torch.equal(mask == 0, within_distance(tokens, size, places)), name


@pytest.mark.skipif(not shutil.which("g++"), reason="compiled FlexAttention on a CPU needs g++")
def test_compiled_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(
    bare, randomize, with_window
):
    """FlexAttention has no backward on a CPU: forward only here, gradients in tests/gpu. A layer is
    of paired heads, and one of keys from the token before."""
    hp = replace(
        bare,
        vocab_size=50257,
        num_layers=2,
        layers="long+v0,short+x0+pair",
        paired_heads=True,
        key_offset=True,
        window_rule="distance",
    )
    model = randomize(GPT(hp).eval())
    generator, length = torch.Generator().manual_seed(1), 1024
    flex = torch.compile(attend, dynamic=False)

    def compare(starts: tuple[int, ...], window: int) -> None:
        tokens = torch.randint(0, 50256, (length,), generator=generator, dtype=torch.int32)
        tokens[list(starts)] = END_OF_TEXT
        now = with_window(window, hp)
        masks = model.masks(tokens, now, block_lists)
        rotary = model.rotary_of(length, now, torch.device("cpu"))
        found = model.trunk(*model.embedded(tokens), rotary, masks, attend=flex)
        torch.testing.assert_close(found, model.hidden(tokens, now), rtol=0, atol=1e-4)

    with torch.no_grad():
        compare((0,), 128)  # compiles both
        with torch._dynamo.config.patch(error_on_recompile=True):
            for starts in ((0, 100, 400, 401, 700), (5, 640)):
                for window in (128, 256, 640, 1792):
                    compare(starts, window)
