"""Sequences that begin with documents, against documents dealt out one by one."""

import itertools
from functools import partial

import pytest
import torch
import train_gpt_2026
from conftest import shard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from train_gpt_2026 import Hyperparameters, Moment

from frontier import reference_2026 as exact
from train_gpt import UserError, distributed_data_generator, plan_batches

END_OF_TEXT = 50256
CPU = torch.device("cpu")
# Tokens of each document of each shard, without its end of text; some documents are empty.
documents = st.one_of(st.integers(0, 2), st.integers(0, 40))
sizes = st.lists(st.lists(documents, max_size=60), min_size=1, max_size=3)
fuzzed = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def planned(pattern, batch_seqs: int, steps: list[tuple[int, int]], count: int) -> list:
    """Return the batches of a run of `count` steps, as planned. `steps` are the tokens of a
    sequence and the tokens at which documents are cut (0: they are not), in turn."""
    hp = Hyperparameters(align_to_documents=True, batch_seqs=batch_seqs, num_iterations=count)
    moments = [Moment(step, hp) for step in range(count + 1)]
    for now, (length, longest) in zip(moments, itertools.cycle(steps), strict=False):
        now.seq_len, now.longest = length, longest
    plan = partial(train_gpt_2026.plan, moments=moments, hp=hp)
    return plan_batches(str(pattern), 64, batch_seqs, count, plan=plan)


def compare(sizes, steps, batches_of, start_step: int, folder) -> None:
    """Compare what 1, 2 and 4 ranks read, put together, with batches_of(shard, step): the batches
    of a shard, from a step on. There are no more batches."""
    for old in folder.glob("*.bin"):
        old.unlink()
    word, expected = itertools.count(1), []
    for i, documents in enumerate(sizes):
        tokens = [7, 7]  # it begins within a document
        for size in documents:
            tokens += [END_OF_TEXT, *(next(word) for _ in range(size))]
        shard(folder / f"s{i}.bin", tokens)
        expected += batches_of(tokens, len(expected)) if documents else []
    pattern = folder / "s*.bin"
    with pytest.raises(UserError, match=f"has {len(expected)} batches of 4 x 64 tokens"):
        planned(pattern, 4, steps, len(expected) + 1)
    if not expected:
        return
    plan = planned(pattern, 4, steps, len(expected))
    for size in (1, 2, 4):
        ranks = [
            distributed_data_generator(plan, rank, size, CPU, start_step) for rank in range(size)
        ]
        for batch, *parts in zip(expected[start_step:], *ranks, strict=True):
            inputs, targets = (torch.cat(both).tolist() for both in zip(*parts, strict=True))
            assert list(zip(inputs, targets, strict=True)) == batch


@fuzzed
@given(sizes, st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25))), st.integers(0, 3))
def test_sequences_are_the_beginnings_of_documents(tmp_path, sizes, steps, start_step):
    """Lengths and caps may change at any step; a run may go on at any."""
    steps = [(16, 24), *steps]

    def batches_of(tokens, step):
        lengths, caps = zip(*(steps[i % len(steps)] for i in range(step, step + 60)), strict=True)
        return exact.batches_b(tokens, lengths, caps, 4)

    compare(sizes, steps, batches_of, start_step, tmp_path)


@fuzzed
@given(sizes, st.integers(1, 32), st.integers(0, 3))
def test_sequences_of_row_a_begin_with_documents_and_cut_none(tmp_path, sizes, length, start_step):
    def batches_of(tokens, _):
        return exact.batches_a(tokens, length, 4)

    compare(sizes, [(length, 0)], batches_of, start_step, tmp_path)


@pytest.mark.parametrize("skipped", [[], [4]])
def test_row_a_leaves_a_shard_by_where_the_next_document_begins(skipped, write_shard):
    """From there on, 9 tokens lie ahead: no more than two batches and a token."""
    tokens = [END_OF_TEXT, 1, 2, 3, *skipped, *[END_OF_TEXT, 5, 6, 7] * 2, END_OF_TEXT]
    path = write_shard("s.bin", tokens)
    assert len(planned(path, 1, [(4, 0)], 1)) == len(exact.batches_a(tokens, 4, 1)) == 1
    with pytest.raises(UserError, match="has 1 batches"):
        planned(path, 1, [(4, 0)], 2)


def test_without_documents_a_batch_has_the_stages_length(write_shard):
    """One shard, whose tokens are their positions."""
    hp = Hyperparameters(num_iterations=6, batch_seqs=2, seq_len=128, stages="length=1,length=3")
    path = str(write_shard("s.bin", range(2560)))
    plan = train_gpt_2026.Run.planner([Moment(step, hp) for step in range(7)], hp)
    batches = distributed_data_generator(plan_batches(path, 128, 2, 5, plan=plan), 0, 1, CPU)
    position = 0
    for length, (inputs, targets) in zip([128] * 3 + [384] * 2, batches, strict=True):
        assert inputs.flatten().tolist() == list(range(position, position + 2 * length))
        assert inputs.shape == (2, length) and torch.equal(targets, inputs + 1)
        position += 2 * length
    with pytest.raises(UserError, match="has 5 batches of 2 x 128"):
        plan_batches(path, 128, 2, 6, plan=plan)
