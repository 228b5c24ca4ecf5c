"""Shards and the loader against plain numpy slices of the stream."""

import hashlib

import numpy as np
import pytest
import torch

from gpt2 import gpt2_encoding
from train_gpt import HERE, UserError, distributed_data_generator, load_data_shard, plan_batches

CPU = torch.device("cpu")


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
        ({"count": 0, "cut": 16}, "its 1024 bytes"),
    ],
)
def test_damaged_shard_is_named_with_what_was_found_and_expected(write_shard, damage, message):
    path = write_shard("bad.bin", range(8), **damage)
    with pytest.raises(UserError, match=message) as error:
        load_data_shard(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("seq_len", "per_rank", "world_size", "start_step"),
    [(16, 3, 1, 0), (8, 2, 3, 0), (8, 2, 3, 11), (1, 1, 4, 100), (24, 1, 2, 5)],
)
def test_ranks_together_see_the_stream_in_order(
    seq_len, per_rank, world_size, start_step, write_shard, tmp_path
):
    """From any step on, and over the end of the stream. A batch lies in one shard: 98 tokens are
    enough for two batches of 48, 97 and 50 for one."""
    shards = np.split(np.arange(471), np.cumsum([98, 97, 49, 50]))
    for i, shard in enumerate(shards):
        write_shard(f"s{i}.bin", shard)
    batch_seqs = per_rank * world_size
    batch = batch_seqs * seq_len
    expected = []
    for s in shards:
        expected += [s[i : i + batch + 1] for i in range(0, len(s) - batch - 1, batch)]
    steps = start_step + len(expected) + 1
    planned = plan_batches(str(tmp_path / "s*.bin"), seq_len, batch_seqs, steps, epochs=0)
    loaders = [
        distributed_data_generator(planned, rank, world_size, CPU, start_step)
        for rank in range(world_size)
    ]
    for step in range(start_step, steps):
        parts = [next(ranked) for ranked in loaders]
        for inputs, targets in parts:
            assert inputs.shape == targets.shape == (per_rank, seq_len)
            assert (inputs.dtype, targets.dtype) == (torch.int32, torch.int64)
        inputs, targets = (torch.cat(tokens).flatten() for tokens in zip(*parts, strict=True))
        tokens = expected[step % len(expected)]
        assert np.array_equal(inputs, tokens[:-1]) and np.array_equal(targets, tokens[1:])


def test_what_has_no_batch_is_refused_at_once(tmp_path, write_shard):
    with pytest.raises(UserError, match="no shard matches .*nothing"):
        plan_batches(str(tmp_path / "nothing*.bin"), 8, 8, 1)
    path = str(write_shard("a.bin", range(65)))
    for epochs in (0, 1, 3):
        with pytest.raises(UserError, match="has 0 batches of 8 x 8 .* longest has 65 tokens"):
            plan_batches(path, 8, 8, 1, epochs)


def test_a_plan_of_ones_own_makes_sequences_of_pieces_and_a_length_for_each_step(write_shard):
    stream = np.random.default_rng(0).integers(0, 50257, 330)
    path = str(write_shard("a.bin", stream))

    def plan(shards, seq_len, batch_seqs):
        """Two sequences of step + 1 tokens and, ten tokens from their start, three more."""
        for step in range(8):
            begins = 40 * step, 40 * step + 20
            yield shards[0], [[(i, i + step + 1), (i + 10, i + 13)] for i in begins]

    planned = plan_batches(path, 8, 2, 8, plan=plan)
    for rank in range(2):
        batches = list(distributed_data_generator(planned, rank, 2, CPU))
        assert len(batches) == 8
        for step, (inputs, targets) in enumerate(batches):
            begin = 40 * step + 20 * rank
            pieces = stream[begin : begin + step + 1], stream[begin + 10 : begin + 13]
            row = np.concatenate(pieces)[None]
            assert np.array_equal(inputs, row[:, :-1]) and np.array_equal(targets, row[:, 1:])


def test_a_token_outside_the_vocabulary_is_located_before_training(write_shard, tmp_path):
    """In a shard that is read."""
    write_shard("a.bin", range(50))
    tokens = np.arange(200) % 50
    tokens[150] = 50
    path = write_shard("b.bin", tokens)
    pattern = str(tmp_path / "*.bin")
    assert len(plan_batches(pattern, 8, 2, 3, vocab_size=50)) == 3
    with pytest.raises(UserError, match=f"{path}: token 50 at position 150 is outside .* 50"):
        plan_batches(pattern, 8, 2, 4, vocab_size=50)


def test_a_run_longer_than_its_data_is_refused_unless_epochs_allow_it(write_shard):
    path = str(write_shard("a.bin", range(66)))
    with pytest.raises(UserError, match="has 8 batches .* the run reads 9: .*raise --epochs"):
        plan_batches(path, 8, 2, 9, epochs=2)
    for epochs in (3, 0):
        loader = distributed_data_generator(plan_batches(path, 8, 2, 9, epochs), 0, 1, CPU)
        assert [int(inputs[0, 0]) for inputs, _ in loader] == [0, 16, 32, 48] * 2 + [0]


def test_sample_corpus_is_the_bible_in_gpt2_tokens():
    digest = hashlib.sha256((HERE / "data/vocab.bpe").read_bytes()).hexdigest()
    assert digest == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    encoding = gpt2_encoding()
    tokens = [15496, 995, 11, 340, 338, 1467, 1157, 0]
    assert encoding.encode_ordinary("Hello world, it's 1611!") == tokens
    train, val = (
        load_data_shard(HERE / f"data/kjv_{name}.bin").numpy()
        for name in ("train_000001", "val_000000")
    )
    assert (len(train), len(val)) == (942584, 81959) and train[0] == val[0] == 50256
    assert (train == 50256).sum() + (val == 50256).sum() == 1189  # chapters
    text = encoding.decode(train.tolist())
    assert "In the beginning God created the heaven and the earth.\nAnd the earth was" in text
    chapters = encoding.decode(val.tolist()).split("<|endoftext|>")[1:]
    assert len(chapters) == 99 and not any(chapter in text for chapter in chapters)
