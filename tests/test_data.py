"""Shards and the loader against plain numpy slices of the stream, and the fork's sequences that
begin with documents against documents dealt out one by one."""

import hashlib
import itertools
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import train_gpt
import train_gpt_2026
import train_gpt_2026_08
from conftest import shard
from frontier import reference_2026 as exact
from tokenizer import GPT2
from train_gpt import HERE, UserError, distributed_data_generator, load_data_shard, plan_batches
from train_gpt_2026 import Hyperparameters, Moment

END_OF_TEXT = 50256
CPU = torch.device("cpu")


def plan_of(pattern, seq_len: int, batch_seqs: int, count: int, **settings) -> list:
    """Return `count` batches of train_gpt.py, as planned."""
    hp = train_gpt.Hyperparameters(seq_len=seq_len, batch_seqs=batch_seqs, **settings)
    return plan_batches(str(pattern), hp, count, train_gpt.consecutive)


# -----------------------------------------------------------------------------
# Shards, and batches of one length


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"magic": 1}, r"1040 bytes begin with \[1, 1, 8\], not \[20240520, 1, 8\]"),
        ({"cut": 2}, r"1038 bytes begin with \[20240520, 1, 8\], not \[20240520, 1, 7\]"),
        ({"cut": 1040}, "its 0 bytes"),
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
    enough for two batches of 48, 97 and 50 for one, and 49 for none."""
    shards = np.split(np.arange(471), np.cumsum([98, 97, 49, 50]))
    for i, tokens in enumerate(shards):
        write_shard(f"s{i}.bin", tokens)
    batch_seqs = per_rank * world_size
    batch = batch_seqs * seq_len
    expected = []
    for s in shards:
        i = 0
        while i + batch + 1 < len(s):
            expected.append(s[i : i + batch + 1])
            i += batch
    steps = start_step + len(expected) + 1
    batches = plan_of(tmp_path / "s*.bin", seq_len, batch_seqs, steps, epochs=0)
    hp = train_gpt.Hyperparameters(batch_seqs=batch_seqs)
    loaders = [
        distributed_data_generator(batches, hp, rank, world_size, CPU, start_step)
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


def test_a_shard_on_a_disk_without_memory_maps_is_read(write_shard, monkeypatch):
    def refuse(*arguments, **options):
        raise RuntimeError("unable to mmap: No such device (19)")

    monkeypatch.setattr(torch, "from_file", refuse)
    assert load_data_shard(write_shard("a.bin", range(65))).tolist() == [*range(65)]


def test_what_has_no_batch_is_refused_at_once(tmp_path, write_shard):
    with pytest.raises(UserError, match="no shard matches .*nothing"):
        plan_of(tmp_path / "nothing*.bin", 8, 8, 1)
    path = write_shard("a.bin", range(65))
    for epochs in (0, 1, 3):
        with pytest.raises(UserError, match="has 0 batches of 8 x 8 .* or sequences shorter"):
            plan_of(path, 8, 8, 1, epochs=epochs)


def test_a_token_outside_the_vocabulary_is_located_before_training(write_shard, tmp_path):
    """In a shard that is read."""
    write_shard("a.bin", range(50))
    tokens = np.arange(200) % 50
    tokens[150] = 50
    path = write_shard("b.bin", tokens)
    pattern = tmp_path / "*.bin"
    assert len(plan_of(pattern, 8, 2, 3, vocab_size=50)) == 3
    with pytest.raises(UserError, match=f"{path}: token 50 at position 150 is outside .* 50"):
        plan_of(pattern, 8, 2, 4, vocab_size=50)


def test_a_run_longer_than_its_data_is_refused_unless_epochs_allow_it(write_shard):
    path = write_shard("a.bin", range(66))
    with pytest.raises(UserError, match="has 8 batches .* the run needs 9: .* --epochs"):
        plan_of(path, 8, 2, 9, epochs=2)
    hp = train_gpt.Hyperparameters(batch_seqs=2)
    for epochs in (3, 0):
        loader = distributed_data_generator(plan_of(path, 8, 2, 9, epochs=epochs), hp, 0, 1, CPU)
        assert [int(inputs[0, 0]) for inputs, _ in loader] == [0, 16, 32, 48] * 2 + [0]


def test_sample_corpus_is_the_bible_in_gpt2_s_first_tokens():
    """1189 chapters, of which 99 are for validation alone."""
    digest = hashlib.sha256((HERE / "data/vocab.bpe").read_bytes()).hexdigest()
    assert digest == "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
    names = "train_000001", "val_000000"
    tokens = [load_data_shard(HERE / f"data/kjv_{name}.bin").tolist() for name in names]
    encoding = GPT2(train_gpt.RECORDS["demo"].end_of_text).encoding
    train, val = (encoding.decode(part).split("<|endoftext|>")[1:] for part in tokens)
    assert (len(train), len(val)) == (1090, 99) and not {*train} & {*val}
    beginning = "In the beginning God created the heaven and the earth.\nAnd the earth was"
    assert any(chapter.startswith(beginning) for chapter in train)


def test_validation_reads_all_shards_in_order_and_no_sequence_crosses_them(tmp_path):
    """Whatever plan training has; and no shard stays open. Two sequences want 258 tokens."""
    before = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    expected = []
    for i, size in enumerate((1000, 257, 800)):
        tokens = np.arange(size) + 1000 * i
        shard(tmp_path / f"v{i}.bin", tokens)
        expected += [tokens[k : k + 129].tolist() for k in range(0, size - 129, 128)]
    flags = {"val_files": f"{tmp_path}/v*.bin", "val_seq_len": 128, "val_tokens": 128 * 14}
    hp = train_gpt.Hyperparameters(**flags)
    for ranks in (1, 3):
        found = {}
        for rank in range(ranks):
            inputs, targets = train_gpt.validation_batch(hp, rank, ranks, CPU)
            rows = torch.cat([inputs, targets[:, -1:]], dim=1).tolist()
            found |= dict(zip(range(rank, 14, ranks), rows, strict=True))
        assert [found[i] for i in range(14)] == expected
    with pytest.raises(UserError, match="14 batches .* needs 15: .* or make --val_tokens"):
        train_gpt.validation_batch(replace(hp, val_tokens=128 * 15), 0, 1, CPU)
    assert not before or len(os.listdir("/proc/self/fd")) == before


# -----------------------------------------------------------------------------
# The fork's sequences

# Tokens of each document of each shard, without its end of text; some documents are empty.
documents = st.one_of(st.integers(0, 2), st.integers(0, 40))
sizes = st.lists(st.lists(documents, max_size=60), min_size=1, max_size=3)
fuzzed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def planned(pattern, batch_seqs: int, steps: list[tuple[int, int]], count: int, script) -> list:
    """Return the batches of a run of `count` steps, as a script plans them. `steps` are the tokens
    of a sequence and the tokens at which documents are cut (0: they are not), in turn."""
    if script is train_gpt_2026:
        hp = Hyperparameters(align_to_documents=True)
    else:
        hp = replace(script.RECORDS["demo"], sampled_softmax=False)
    more = {"batch_seqs": batch_seqs, "num_iterations": count, "epochs": 2}
    hp = replace(hp, vocab_size=50304, end_of_text=END_OF_TEXT, **more)
    moments = [script.Moment(step, hp) for step in range(count + 1)]
    for now, (length, longest) in zip(moments, itertools.cycle(steps), strict=False):
        now.seq_len, now.longest = length, longest
    return plan_batches(str(pattern), replace(hp, seq_len=64), count, script.plan, moments)


def compare(sizes, steps, batches_of, start_step: int, folder, script=train_gpt_2026) -> None:
    """Compare what 1, 2 and 4 ranks read in two epochs, put together, with batches_of(shard, step):
    the batches of a shard, from a step on. There are no more batches."""
    for old in folder.glob("*.bin"):
        old.unlink()
    word, shards, expected = itertools.count(1), [], []
    for i, documents in enumerate(sizes):
        tokens = [7, 7]  # it begins within a document
        for size in documents:
            tokens += [END_OF_TEXT, *(next(word) for _ in range(size))]
        shard(folder / f"s{i}.bin", tokens)
        shards += [tokens] if documents else []
    for tokens in shards * 2:
        expected += batches_of(tokens, len(expected))
    pattern = folder / "s*.bin"
    reason = f"has {len(expected)} batches of 4 x 64 tokens" if any(sizes) else "no token is 50256"
    with pytest.raises(UserError, match=reason):
        planned(pattern, 4, steps, len(expected) + 1, script)
    if not expected:
        return
    plan, hp = planned(pattern, 4, steps, len(expected), script), Hyperparameters(batch_seqs=4)
    for size in (1, 2, 4):
        ranks = [
            distributed_data_generator(plan, hp, rank, size, CPU, start_step)
            for rank in range(size)
        ]
        for batch, *parts in zip(expected[start_step:], *ranks, strict=True):
            inputs, targets = (torch.cat(both).tolist() for both in zip(*parts, strict=True))
            assert list(zip(inputs, targets, strict=True)) == batch


@pytest.mark.parametrize("script", [train_gpt_2026, train_gpt_2026_08])
@fuzzed
@example(sizes=[[30] * 4], steps=[(16, 5)], start_step=0)  # of the second epoch, another cap
@given(
    sizes=sizes,
    steps=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25))),
    start_step=st.integers(0, 3),
)
def test_sequences_are_the_beginnings_of_documents(script, tmp_path, sizes, steps, start_step):
    """Lengths and caps may change at any step; a run may go on at any."""
    steps = [(16, 24), *steps]

    def batches_of(tokens, step):
        lengths, caps = zip(*(steps[i % len(steps)] for i in range(step, step + 60)), strict=True)
        return exact.batches_b(tokens, lengths, caps, 4)

    compare(sizes, steps, batches_of, start_step, tmp_path, script)


@fuzzed
@given(sizes, st.integers(1, 32), st.integers(0, 3))
def test_sequences_of_row_a_begin_with_documents_and_cut_none(tmp_path, sizes, length, start_step):
    def batches_of(tokens, _):
        return exact.batches_a(tokens, length, 4)

    compare(sizes, [(length, 0)], batches_of, start_step, tmp_path)


def test_without_documents_a_batch_has_the_stages_length(write_shard):
    """One shard, whose tokens are their positions."""
    hp = Hyperparameters(num_iterations=6, batch_seqs=2, seq_len=128, stages="length=1,length=3")
    path = str(write_shard("s.bin", range(2560)))
    plan = train_gpt_2026.Run.plan, [Moment(step, hp) for step in range(7)]
    batches = distributed_data_generator(plan_batches(path, hp, 5, *plan), hp, 0, 1, CPU)
    position = 0
    for length, (inputs, targets) in zip([128] * 3 + [384] * 2, batches, strict=True):
        assert inputs.flatten().tolist() == list(range(position, position + 2 * length))
        assert inputs.shape == (2, length) and torch.equal(targets, inputs + 1)
        position += 2 * length
    with pytest.raises(UserError, match="has 5 batches of 2 x 128"):
        plan_batches(path, hp, 6, *plan)
