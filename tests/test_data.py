"""Shards and the loader against plain numpy slices of the stream."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2 import gpt2_encoding
from train_gpt import HERE, UserError, distributed_data_generator, load_data_shard


def test_shard_is_read_back(write_shard):
    tokens = np.array([50256, 0, 65535, 12])
    shard = load_data_shard(write_shard("a.bin", tokens))
    assert shard.dtype == torch.uint16 and shard.tolist() == tokens.tolist()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"magic": 1}, r"1040 bytes begin with \[1, 1, 8\], expected \[20240520, 1, 8\]"),
        ({"version": 2}, r"begin with \[20240520, 2, 8\], expected \[20240520, 1, 8\]"),
        ({"count": 9}, r"1040 bytes begin with \[20240520, 1, 9\], expected \[20240520, 1, 8\]"),
        ({"cut": 2}, r"1038 bytes begin with \[20240520, 1, 8\], expected \[20240520, 1, 7\]"),
        ({"cut": 1}, "its 1039 bytes"),
        ({"cut": 1030}, r"10 bytes begin with \[20240520, 1\]"),
        ({"cut": 1040}, "its 0 bytes"),
        ({"count": 7}, r"1040 bytes begin with \[20240520, 1, 7\]"),
        ({"count": 0, "cut": 16}, "its 1024 bytes"),
    ],
)
def test_damaged_shard_is_named_with_what_was_found_and_expected(write_shard, damage, message):
    path = write_shard("bad.bin", range(8), **damage)
    with pytest.raises(UserError, match=message) as error:
        load_data_shard(path)
    assert str(path) in str(error.value)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=4),
    seq_len=st.integers(1, 20),
    per_rank=st.integers(1, 3),
    world_size=st.integers(1, 4),
    start_step=st.integers(0, 50),
)
def test_ranks_together_see_the_stream_in_order(
    sizes, seq_len, per_rank, world_size, start_step, write_shard, tmp_path
):
    for old in tmp_path.glob("*.bin"):
        old.unlink()
    values = np.arange(sum(sizes))
    shards = np.split(values, np.cumsum(sizes)[:-1])
    for i, shard in enumerate(shards):
        write_shard(f"s{i}.bin", shard)
    batch = per_rank * world_size * seq_len
    expected = [
        s[i * batch : (i + 1) * batch + 1] for s in shards for i in range((len(s) - 1) // batch)
    ]
    pattern = str(tmp_path / "s*.bin")
    batch_seqs = per_rank * world_size

    def loader(rank):
        return distributed_data_generator(
            pattern, seq_len, batch_seqs, rank, world_size, start_step, epochs=0
        )

    if not expected:
        with pytest.raises(UserError, match="a batch needs"):
            loader(0)
        return
    loaders = [loader(rank) for rank in range(world_size)]
    for step in range(start_step, start_step + len(expected) + 1):  # over the end of the stream
        parts = [next(ranked) for ranked in loaders]
        for inputs, targets in parts:
            assert inputs.shape == targets.shape == (per_rank, seq_len)
            assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
        slice_ = expected[step % len(expected)]
        assert torch.cat([i.flatten() for i, _ in parts]).tolist() == slice_[:-1].tolist()
        assert torch.cat([t.flatten() for _, t in parts]).tolist() == slice_[1:].tolist()


def test_no_shard_and_a_world_size_that_does_not_divide_are_refused_at_once(tmp_path, write_shard):
    with pytest.raises(UserError, match="no shard matches .*nothing"):
        distributed_data_generator(str(tmp_path / "nothing*.bin"), 8, 8, 0, 1)
    path = write_shard("a.bin", range(100))
    with pytest.raises(UserError, match="3 ranks cannot share 8 sequences"):
        distributed_data_generator(str(path), 8, 8, 0, 3)


def test_a_cut_of_ones_own_makes_sequences_of_pieces_and_a_length_for_each_step(write_shard):
    """A step's 4 sequences consist of step + 1 pieces of 3 tokens, 5 tokens apart."""
    stream = np.random.default_rng(0).integers(0, 50257, 1000)
    path = str(write_shard("a.bin", stream))

    def cut(shard, position, step):
        pieces = step + 1
        end = position + 4 * 5 * pieces
        if end >= len(shard.tokens):
            return None
        begins = range(position, end, 5 * pieces)
        lengths = [3] * (pieces - 1) + [4]
        return [
            [(begin + 5 * i, begin + 5 * i + n) for i, n in enumerate(lengths)] for begin in begins
        ], end

    position = 0
    parts = [distributed_data_generator(path, 8, 4, rank, 2, cut=cut) for rank in range(2)]
    for step, batches in enumerate(zip(*parts, strict=True)):
        rows = stream[position : position + 20 * (step + 1)].reshape(4, step + 1, 5)
        position += 20 * (step + 1)
        assert np.array_equal(
            torch.cat([inputs for inputs, _ in batches]), rows[..., :3].reshape(4, -1)
        )
        targets = np.concatenate([rows[..., :3].reshape(4, -1)[:, 1:], rows[:, -1, 3:4]], axis=1)
        assert np.array_equal(torch.cat([found for _, found in batches]), targets)
    assert step == 8 and position == 20 * 45  # the next batch wants 200 of the 100 tokens left


def test_a_token_outside_the_vocabulary_is_located_before_training(write_shard, tmp_path):
    write_shard("a.bin", range(50))
    tokens = np.arange(200) % 50
    tokens[150] = 50
    path = write_shard("b.bin", tokens)
    for rank in range(2):  # every rank stops, whichever share it has
        with pytest.raises(UserError, match=f"{path}: token 50 at position 150 is outside .* 50"):
            distributed_data_generator(str(tmp_path / "*.bin"), 8, 2, rank, 2, vocab_size=50)


def test_a_run_longer_than_its_data_is_refused_unless_epochs_allow_it(write_shard):
    path = str(write_shard("a.bin", range(65)))
    with pytest.raises(
        UserError, match="holds 8 batches in 2 epochs, the run reads 9: add shards, or .*epochs"
    ):
        distributed_data_generator(path, 8, 2, 0, 1, num_batches=9, epochs=2)
    for epochs in (3, 0):
        loader = distributed_data_generator(path, 8, 2, 0, 1, num_batches=9, epochs=epochs)
        assert [int(inputs[0, 0]) for inputs, _ in loader] == [0, 16, 32, 48] * 2 + [0]


def test_sample_corpus_is_the_bible_in_gpt2_tokens():
    digest = hashlib.sha256((HERE / "data/vocab.bpe").read_bytes()).hexdigest()
    assert digest == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    encoding = gpt2_encoding()
    assert encoding.encode_ordinary("Hello world, it's 1611!") == [
        *(15496, 995, 11, 340, 338, 1467, 1157, 0)
    ]
    train = load_data_shard(HERE / "data/kjv_train_000001.bin").numpy()
    val = load_data_shard(HERE / "data/kjv_val_000000.bin").numpy()
    assert (train == 50256).sum() + (val == 50256).sum() == 1189  # chapters
    assert train[0] == val[0] == 50256
    assert (len(train), len(val)) == (942584, 81959)
    text = encoding.decode(train.tolist())
    assert "In the beginning God created the heaven and the earth.\nAnd the earth was" in text
    assert "Ge1:1" not in text
    books = encoding.decode(val.tolist()).split("<|endoftext|>")[1:]
    assert len(books) == 99 and not any(chapter in text for chapter in books)
