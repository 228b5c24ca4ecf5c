"""Both attention masks against a brute-force T x T mask, and the two attention paths."""

import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from train_gpt import (
    BLOCK,
    END_OF_TEXT,
    GPT,
    RECORDS,
    attend,
    block_lists,
    dense_mask,
    first_visible,
    flex_mask,
    get_window_size,
)

LENGTH = 4 * BLOCK


def tokens_with_documents(starts) -> torch.Tensor:
    tokens = torch.zeros(LENGTH, dtype=torch.int32)
    tokens[list(starts)] = END_OF_TEXT
    return tokens


def brute_force(tokens: torch.Tensor, window: int, rule: str) -> torch.Tensor:
    """Return the mask as it is defined, position by position and block by block."""
    length = len(tokens)
    blocks = length // BLOCK
    document = (tokens == END_OF_TEXT).cumsum(0)
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        first = 0 if rule == "blocks" else max(i - window + 1, 0)
        visible[i, first : i + 1] = document[first : i + 1] == document[i]
    if rule == "tokens":
        return visible
    kept = torch.zeros_like(visible)
    for q in range(blocks):  # the nearest blocks that survive causality and the document test
        rows = slice(q * BLOCK, (q + 1) * BLOCK)
        columns = [slice(k * BLOCK, (k + 1) * BLOCK) for k in range(q, -1, -1)]
        survivors = [c for c in columns if visible[rows, c].any()]
        for c in survivors[: max(window // BLOCK, 1)]:
            kept[rows, c] = visible[rows, c]
    return kept


starts = st.sets(st.integers(0, LENGTH - 1), max_size=12)
windows = st.one_of(st.integers(1, 700), st.sampled_from([BLOCK * b for b in range(1, 6)]))


@settings(max_examples=15, deadline=None)
@given(starts=starts, window=windows, rule=st.sampled_from(["blocks", "tokens"]))
def test_masks_equal_brute_force(starts, window, rule):
    tokens = tokens_with_documents(starts)
    expected = brute_force(tokens, window, rule)
    first = first_visible(tokens, window, rule)

    dense = dense_mask(first)
    assert set(dense.unique().tolist()) <= {0.0, -float("inf")}
    assert torch.equal(dense == 0, expected)
    assert torch.equal(read_block_mask(flex_mask(*block_lists(first))), expected)


@settings(max_examples=15, deadline=None)
@given(starts=starts, window=windows, rule=st.sampled_from(["blocks", "tokens"]))
def test_lists_of_query_blocks_are_those_of_key_blocks_transposed(starts, window, rule):
    """As PyTorch transposes them, through a dense matrix; the order in a list is free."""
    mask = flex_mask(*block_lists(first_visible(tokens_with_documents(starts), window, rule)))
    keys = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    expected = BlockMask.from_kv_blocks(*keys, BLOCK_SIZE=BLOCK, mask_mod=mask.mask_mod)
    for name in ("q", "full_q"):
        rows = []
        for of in (mask, expected):
            counts, blocks = getattr(of, f"{name}_num_blocks"), getattr(of, f"{name}_indices")
            pairs = zip(blocks[0, 0].tolist(), counts[0, 0].tolist(), strict=True)
            rows.append([sorted(row[:count]) for row, count in pairs])
        assert rows[0] == rows[1]


@settings(max_examples=5, deadline=None)
@given(starts=starts, rule=st.sampled_from(["blocks", "tokens"]))
def test_an_endless_window_sees_all_of_the_document(starts, rule):
    """However large its number is: positions are int32."""
    tokens = tokens_with_documents(starts)
    for window in (2**31, 10**10):
        first = first_visible(tokens, window, rule)
        assert torch.equal(dense_mask(first) == 0, brute_force(tokens, 10**5, rule))


def test_the_last_rows_of_a_mask_are_those_of_the_whole_mask():
    first = first_visible(tokens_with_documents([0, 300]), 200, "tokens")
    for rows in (1, 5, LENGTH):
        assert torch.equal(dense_mask(first, rows), dense_mask(first)[-rows:])


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("2024-11-19_FlexAttention", {0: 1024, 1875: 1024}),
        ("2024-11-24_WindowWarmup", {0: 64, 300: 320, 1000: 1024}),
        ("2025-01-26_BatchSize", {0: 128, 300: 384, 1000: 1024}),
    ],
)
def test_mask_of_each_record_equals_brute_force(name, windows):
    hp = RECORDS[name]
    tokens = torch.zeros(11 * BLOCK, dtype=torch.int32)
    tokens[[0, 5, 130, 131]] = END_OF_TEXT  # the last document is longer than any window here
    for step, window in windows.items():
        assert get_window_size(step, hp) == window
        first = first_visible(tokens, window, hp.window_rule)
        expected = brute_force(tokens, window, hp.window_rule)
        assert torch.equal(dense_mask(first) == 0, expected)
        assert torch.equal(read_block_mask(flex_mask(*block_lists(first))), expected)


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


@settings(max_examples=15, deadline=None)
@given(starts=starts, window=st.integers(1, 6))
def test_block_window_computes_no_more_blocks_than_it_holds(starts, window):
    first = first_visible(tokens_with_documents(starts), window * BLOCK, "blocks")
    mask = flex_mask(*block_lists(first))
    assert (mask.kv_num_blocks + mask.full_kv_num_blocks).max() <= window


@pytest.mark.skipif(not shutil.which("g++"), reason="compiled FlexAttention on a CPU needs g++")
def test_compiled_flex_attention_equals_sdpa_and_a_new_window_does_not_recompile(tiny, randomize):
    """FlexAttention has no backward on a CPU: forward only here, gradients in tests/gpu."""
    hp = replace(tiny, vocab_size=50257, num_layers=2, layers="long+v0,short")
    model = randomize(GPT(hp).eval())
    generator, length = torch.Generator().manual_seed(1), 1024
    flex = torch.compile(attend, dynamic=False)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for starts in ((0, 100, 400, 401, 700), (0,), (5, 640)):
            tokens = torch.randint(0, 50256, (length,), generator=generator, dtype=torch.int32)
            tokens[list(starts)] = END_OF_TEXT
            for window in (128, 256, 640, 1792):
                masks = model.masks(tokens, window, block_lists)
                rotary = model.rotary_of(length, window, torch.device("cpu"))
                found = model.trunk(*model.embedded(tokens), rotary, masks, attend=flex)
                torch.testing.assert_close(found, model.hidden(tokens, window), rtol=0, atol=1e-4)


class LargestTensor(TorchDispatchMode):
    """Notes how many elements the largest tensor has that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return result


@pytest.mark.parametrize(
    ("length", "rule", "window", "blocks"),
    [(262144, "blocks", 1792, 14), (65536, "tokens", 1792, 15), (65536, "tokens", 1024, 9)],
)
def test_block_mask_needs_no_square_of_tokens(length, rule, window, blocks):
    """Lengths of validation in 2025 and 2024: T x T booleans of them would be 69 GB and 4 GB. The
    largest tensor has the four lists of blocks that the mask consists of."""
    tokens = torch.zeros(length, dtype=torch.int32)
    tokens[::5000] = END_OF_TEXT
    with LargestTensor() as largest:
        mask = flex_mask(*block_lists(first_visible(tokens, window, rule)))
    assert largest.elements <= 4 * (length // BLOCK) ** 2
    counts = (mask.kv_num_blocks + mask.full_kv_num_blocks).flatten()
    assert len(counts) == length // BLOCK and counts.max() == blocks and counts[0] == 1
