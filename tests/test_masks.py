"""The attention masks against a brute-force T x T mask, and the two attention paths."""

import math
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

import train_gpt
from conftest import at_window
from test_loss import NewShapes
from train_gpt import BLOCK, GPT, attend, block_lists, make_mask
from train_gpt_2026 import first_visible  # train_gpt.py's, but for the rule "distance"

LENGTH, END_OF_TEXT = 4 * BLOCK, 511


def brute_force(tokens: torch.Tensor, window: int, rule: str) -> torch.Tensor:
    """Return the mask as it is defined, position by position and block by block."""
    length = len(tokens)
    blocks = length // BLOCK
    document = (tokens == END_OF_TEXT).cumsum(0)
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        reach = {"blocks": i, "tokens": window - 1, "distance": max(window // BLOCK, 1) * BLOCK}
        first = max(i - reach[rule], 0)
        visible[i, first : i + 1] = document[first : i + 1] == document[i]
    if rule != "blocks":
        return visible
    kept = torch.zeros_like(visible)
    for q in range(blocks):  # the nearest blocks that survive causality and the document test
        rows = slice(q * BLOCK, (q + 1) * BLOCK)
        columns = [slice(k * BLOCK, (k + 1) * BLOCK) for k in range(q, -1, -1)]
        survivors = [c for c in columns if visible[rows, c].any()]
        for c in survivors[: max(window // BLOCK, 1)]:
            kept[rows, c] = visible[rows, c]
    return kept


def read_block_mask(mask) -> torch.Tensor:
    """Return what a kernel sees: full blocks whole, and inside partial ones what mask_mod says."""
    length = mask.kv_num_blocks.numel() * BLOCK
    visible = torch.zeros(length, length, dtype=torch.bool)
    q, kv = torch.arange(length)[:, None], torch.arange(length)[None]
    inside = mask.mask_mod(0, 0, q, kv)
    for row in range(length // BLOCK):
        rows = slice(row * BLOCK, (row + 1) * BLOCK)
        lists = (
            (mask.kv_num_blocks, mask.kv_indices, inside),
            (mask.full_kv_num_blocks, mask.full_kv_indices, torch.ones_like(inside)),
        )
        for counts, indices, content in lists:
            for column in indices[0, 0, row, : counts[0, 0, row]].tolist():
                columns = slice(column * BLOCK, (column + 1) * BLOCK)
                assert not visible[rows, columns].any(), "a block is listed twice"
                visible[rows, columns] = content[rows, columns]
    return visible


def flex_mask(first: torch.Tensor) -> BlockMask:
    """Return the mask that `attend` hands to FlexAttention."""
    with patch.object(train_gpt, "flex_attention", lambda q, k, v, block_mask, **_: block_mask):
        return attend(first, first, first, block_lists(first), 1.0)


def query_blocks(mask: BlockMask) -> list[list[int]]:
    """Return the partial and the full query blocks of each key block, sorted."""
    found = []
    for counts, blocks in (
        (mask.q_num_blocks, mask.q_indices),
        (mask.full_q_num_blocks, mask.full_q_indices),
    ):
        rows = zip(blocks[0, 0].tolist(), counts[0, 0].tolist(), strict=True)
        found += [sorted(row[:count]) for row, count in rows]
    return found


starts = st.sets(st.integers(0, LENGTH - 1), max_size=12)
windows = st.one_of(st.integers(1, 700), st.sampled_from([BLOCK * b for b in range(1, 6)]))
ENDLESS = 3 * 10**9  # as int32, which positions are, it would be negative


@settings(max_examples=30, deadline=None)
@given(starts=starts, window=windows, rule=st.sampled_from(["blocks", "tokens", "distance"]))
@example(starts={0, 300}, window=ENDLESS, rule="blocks")
@example(starts={0, 300}, window=ENDLESS, rule="tokens")
@example(starts={0, 300}, window=ENDLESS, rule="distance")
@example(starts={0, 300}, window=100, rule="blocks")
def test_masks_equal_brute_force(starts, window, rule):
    """A distance counts whole blocks."""
    tokens = torch.zeros(LENGTH, dtype=torch.int32)
    tokens[list(starts)] = END_OF_TEXT
    expected = brute_force(tokens, window, rule)
    first = first_visible(tokens == END_OF_TEXT, torch.tensor(window), rule)
    dense, mask = make_mask(first), flex_mask(first)
    assert set(dense.unique().tolist()) <= {0.0, -float("inf")}
    assert torch.equal(dense == 0, expected)
    assert torch.equal(read_block_mask(mask), expected)
    # The query blocks of each key block are what PyTorch makes of the key blocks.
    keys = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    transposed = BlockMask.from_kv_blocks(*keys, BLOCK_SIZE=BLOCK, mask_mod=mask.mask_mod)
    assert query_blocks(mask) == query_blocks(transposed)
    if rule == "blocks":
        computed = mask.kv_num_blocks + mask.full_kv_num_blocks
        assert computed.max() <= max(window // BLOCK, 1)


def check_flex_attention(backend: str, tiny, randomize, monkeypatch) -> None:
    """Compare it with SDPA, in a model, and check that a new window does not recompile."""
    hp = replace(tiny, vocab_size=512, end_of_text=511, num_layers=2, layers="long+v0,short")
    model, generator = randomize(GPT(hp).eval()), torch.Generator().manual_seed(1)
    torch._dynamo.reset()  # what other tests have compiled
    flexible = torch.compile(attend, dynamic=False, backend=backend)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for starts, window in (((0, 100, 400, 401, 700), 128), ((0,), 640), ((5, 640), 1792)):
            tokens = torch.randint(0, END_OF_TEXT, (1024,), generator=generator, dtype=torch.int32)
            tokens[list(starts)] = END_OF_TEXT
            expected = model.hidden(tokens, at_window(window, hp))
            with monkeypatch.context() as on_a_gpu:
                on_a_gpu.setattr(train_gpt, "make_mask", block_lists)
                on_a_gpu.setattr(train_gpt, "attend", flexible)
                found = model.hidden(tokens, at_window(window, hp))
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(
    tiny, randomize, monkeypatch
):
    """As captured, without the lists of blocks; tests/slow has Inductor, tests/gpu gradients."""
    check_flex_attention("eager", tiny, randomize, monkeypatch)


@pytest.mark.parametrize(
    ("length", "rule", "blocks"), [(262144, "blocks", 14), (65536, "tokens", 15)]
)
def test_block_mask_needs_no_square_of_tokens(length, rule, blocks):
    """T x T booleans of a validation sequence would be 69 GB in 2025, and 4 GB in 2024. The largest
    tensor has the four lists of blocks that the mask consists of."""
    tokens = torch.zeros(length, dtype=torch.int32)
    tokens[::5000] = END_OF_TEXT
    with NewShapes() as watch:
        mask = flex_mask(first_visible(tokens == END_OF_TEXT, torch.tensor(1792), rule))
    assert max(map(math.prod, watch.shapes)) <= 4 * (length // BLOCK) ** 2
    counts = (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten()
    assert len(counts) == length // BLOCK and counts.max() == blocks and counts[0] == 1
