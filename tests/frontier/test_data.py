"""Sequences that begin with documents, against documents dealt out one by one."""

import itertools
from dataclasses import replace

import pytest
import torch
import train_gpt_2026
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_gpt_2026 import Hyperparameters, moment

from train_gpt import UserError, distributed_data_generator


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.lists(st.integers(0, 40), max_size=30), min_size=1, max_size=3),
    seq_len=st.integers(1, 30),
    longest=st.integers(1, 25),
    world_size=st.sampled_from([1, 2, 4]),
    start_step=st.integers(0, 3),
)
def test_aligned_sequences_are_the_beginnings_of_whole_documents(
    sizes, seq_len, longest, world_size, start_step, write_shard, tmp_path
):
    """A document is 50256 and `size` tokens of its own."""
    for old in tmp_path.glob("*.bin"):
        old.unlink()
    word, batches = itertools.count(1), []
    for i, shard in enumerate(sizes):
        documents = [[50256, *(next(word) for _ in range(size))] for size in shard]
        write_shard(f"s{i}.bin", [7, 7, *sum(documents, [])])  # begins within a document
        sequences, current = [], []
        for document in documents:
            current += document[:longest]
            if len(current) > seq_len:
                sequences.append(current[: seq_len + 1])
                current = []
        batches += [sequences[j : j + 4] for j in range(0, len(sequences) - 3, 4)]
    hp = Hyperparameters(align_to_documents=True, batch_seqs=4)
    now = replace(moment(0, hp), seq_len=seq_len, longest=longest)

    def loader(rank, start):
        return distributed_data_generator(
            str(tmp_path / "s*.bin"),
            seq_len,
            4,
            rank,
            world_size,
            start,
            cut=lambda shard, position, step: train_gpt_2026.cut(shard, position, now, hp),
        )

    if not batches:
        with pytest.raises(UserError, match="a batch needs"):
            loader(0, 0)
        return
    found = [list(loader(rank, start_step)) for rank in range(world_size)]
    assert {len(part) for part in found} == {max(len(batches) - start_step, 0)}
    for step, expected in enumerate(batches[start_step:]):
        inputs, targets = (torch.cat([part[step][i] for part in found]).tolist() for i in (0, 1))
        assert inputs == [sequence[:-1] for sequence in expected]
        assert targets == [sequence[1:] for sequence in expected]
        for sequence in inputs:
            starts = [i for i, token in enumerate(sequence) if token == 50256]
            ends = [*starts[1:], len(sequence)]
            assert starts[0] == 0
            assert all(end - start <= longest for start, end in zip(starts, ends, strict=True))


def test_without_documents_a_batch_is_the_textbooks_of_the_stages_length(write_shard):
    """One shard, whose tokens are their positions."""
    hp = Hyperparameters(
        num_iterations=6, seq_len=128, batch_seqs=2, stages="length=1,length=3", vocab_size=2560
    )
    path = str(write_shard("s.bin", range(2560)))

    def cut(shard, position, step):
        return train_gpt_2026.cut(shard, position, moment(step, hp), hp)

    batches = distributed_data_generator(path, 128, 2, 0, 1, num_batches=5, cut=cut)
    position = 0
    for step, (inputs, targets) in enumerate(batches):
        length = 128 if step < 3 else 384
        assert inputs.flatten().tolist() == list(range(position, position + 2 * length))
        assert inputs.shape == (2, length) and torch.equal(targets, inputs + 1)
        position += 2 * length
    assert step == 4
