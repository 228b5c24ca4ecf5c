"""Masks of windows that are a distance, also of paired heads, against a brute-force T x T mask."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_masks import read_block_mask, starts, tokens_with_documents  # of train_gpt.py
from train_gpt_2026 import GPT, first_visible

from train_gpt import BLOCK, END_OF_TEXT, block_lists, flex_mask, make_mask

# However large a window's number is, positions are int32.
windows = st.one_of(st.integers(1, 700), st.sampled_from([128, 256, 640, 2**31, 10**10]))


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


@settings(max_examples=12, deadline=None)
@given(starts=starts, window=windows)
def test_a_window_that_is_a_distance_equals_brute_force(starts, window):
    tokens = tokens_with_documents(starts)
    expected = within_distance(tokens, window)
    first = first_visible(tokens, torch.tensor(window), "distance")
    assert torch.equal(make_mask(first) == 0, expected)
    assert torch.equal(read_block_mask(flex_mask(*block_lists(first))), expected)


@pytest.mark.parametrize("window", [128, 384, 10**6])
def test_layers_have_masks_of_their_windows_and_pairs_of_heads_count_places(
    window, bare, with_window
):
    """A short window is half of the long one; a mask that no layer attends with is not made."""
    layers = "long,short+pair,none,long+pair"
    hp = replace(bare, layers=layers, paired_heads=True, window_rule="distance")
    tokens = tokens_with_documents([0, 5, 127, 128, 300, 301])
    masks = GPT(hp).masks(tokens, with_window(window, hp))
    assert set(masks) == {"long", "short+pair", "long+pair"}
    for name, mask in masks.items():
        places = 2 if name.endswith("+pair") else 1
        size = window if name.startswith("long") else window // 2
        assert torch.equal(mask == 0, within_distance(tokens, size, places)), name
