"""Shards and the loader against plain numpy slices of the stream."""

import hashlib
import os
import random
import re

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


def test_ranks_share_a_numpy_slice_of_the_stream_over_a_shard_boundary(write_shard, tmp_path):
    """8 sequences of 16 tokens: 3 batches from the first shard, whose tail is dropped, 4 after."""
    stream = np.random.default_rng(0).integers(0, 50257, 500 + 600)
    write_shard("s1.bin", stream[:500])
    write_shard("s2.bin", stream[500:])
    begins = [0, 128, 256, 500, 628, 756, 884]
    for world_size in (1, 2, 4, 8):
        parts = [
            list(distributed_data_generator(str(tmp_path / "s*.bin"), 16, 8, rank, world_size))
            for rank in range(world_size)
        ]
        for step, begin in enumerate(begins):
            inputs, targets = (torch.cat([p[step][i].flatten() for p in parts]) for i in (0, 1))
            assert np.array_equal(inputs, stream[begin : begin + 128])
            assert np.array_equal(targets, stream[begin + 1 : begin + 129])
        assert {len(p) for p in parts} == {len(begins)}  # it ends with the data


def test_a_cut_of_ones_own_makes_sequences_of_pieces_and_a_length_for_each_step(write_shard):
    """Against numpy: of a step's 4 sequences each is 3 tokens, 5 tokens further on one more, and so
    on, with a target behind them."""
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
    tokens[150] = 77
    path = write_shard("b.bin", tokens)
    for rank in range(2):  # every rank stops, whichever share it has
        with pytest.raises(UserError, match=f"{path}: token 77 at position 150 is outside .* 50"):
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


DAMAGES = ["magic", "version", "count", "header", "odd", "tokens", "empty", "trailing", "word"]


def damaged(rng: random.Random, whole: bytes) -> tuple[str, bytes]:
    """Choose a way to damage a shard of 400 tokens; return its name, and what the damage leaves."""
    kind = rng.choice(DAMAGES)
    data = bytearray(whole)
    if kind in ("magic", "version", "count"):
        word = ("magic", "version", "count").index(kind)
        data[4 * word + rng.randrange(4)] ^= 1 << rng.randrange(8)
    elif kind == "word":
        i = 1024 + 2 * rng.randrange(400)
        data[i : i + 2] = rng.randrange(50257, 65536).to_bytes(2, "little")
    elif kind == "trailing":
        data += rng.randbytes(rng.randrange(1, 5000))
    elif kind == "header":
        del data[rng.randrange(1, 1025) :]
    elif kind == "empty":
        data.clear()
    elif kind == "tokens":
        del data[2 * rng.randrange(513, 912) :]
    else:  # an odd number of bytes
        del data[2 * rng.randrange(512, 912) + 1 :]
    return kind, bytes(data)


def test_300_damaged_shards_are_refused_by_name(write_shard, tmp_path):
    whole = write_shard("a.bin", np.arange(400)).read_bytes()
    bad = tmp_path / "b.bin"
    pattern = str(tmp_path / "*.bin")
    rng = random.Random(0)
    seen = set()
    for _ in range(300):
        kind, content = damaged(rng, whole)
        seen.add(kind)
        assert content != whole
        bad.write_bytes(content)
        with pytest.raises(UserError, match=re.escape(str(bad))):
            distributed_data_generator(pattern, 8, 2, 0, 1, vocab_size=50257)
    assert seen == {*DAMAGES}
    bad.write_bytes(whole)
    next(distributed_data_generator(pattern, 8, 2, 0, 1, vocab_size=50257))  # whole, it is taken


def test_a_directory_and_a_shard_without_permission_are_refused_by_name(write_shard, tmp_path):
    (tmp_path / "b.bin").mkdir()
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "b.bin"))):
        distributed_data_generator(str(tmp_path / "*.bin"), 8, 2, 0, 1)
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path = write_shard("c.bin", range(400))
    path.chmod(0)
    with pytest.raises(PermissionError, match=re.escape(str(path))):
        distributed_data_generator(str(path), 8, 2, 0, 1)


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
