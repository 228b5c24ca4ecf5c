"""forks/train_gpt_2026_08.py: candidates against a plain reading of the published rule, and the
loss among them against float64."""

from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt_2026_08 as script
from frontier import reference_2026_08 as reading
from reference import relative_error
from sampled_softmax import choose_candidates
from train_gpt import UserError
from train_gpt_2026_08 import RECORDS, Moment

RECORD = RECORDS["2026-08-30_ANVIL2"]


def some_targets(kind: str, vocab_size: int, count: int, generator) -> torch.Tensor:
    """Return targets of a kind: fewer different ones than candidates, as many, or those that the
    sweep meets first."""
    if kind == "few":
        return torch.randint(vocab_size, (count // 2,), generator=generator)
    if kind == "all":
        return torch.randperm(vocab_size, generator=generator)[:count]
    return 20011 * torch.arange(count - 20) % vocab_size


def at(targets: tuple, prefix: float, candidates: int) -> SimpleNamespace:
    """Return a moment with these targets and candidates."""
    return SimpleNamespace(targets=targets, prefix=prefix, candidates=candidates)


@pytest.mark.parametrize("kind", ["few", "all", "first of the sweep"])
@pytest.mark.parametrize(("vocab_size", "count"), [(1024, 720), (50304, 10240), (512, 496)])
def test_candidates_are_those_of_a_walk_along_the_sweep(kind, vocab_size, count):
    generator, offset, expected_offset = torch.Generator().manual_seed(0), torch.tensor(7), 7
    for _ in range(5):
        targets = some_targets(kind, vocab_size, count, generator)
        expected = reading.chosen_by_rule(targets.tolist(), expected_offset, count, vocab_size)
        found, offset = choose_candidates(targets, offset, count, vocab_size)
        expected, expected_offset = expected
        assert (found.tolist(), offset.item()) == (expected, expected_offset)


# By the published program, of offsets in the sweep: the next one, and the candidates' sum.
SUMS = {0: (17655, 257517542), 35310: (2661, 257510615)}


def test_candidates_are_the_published_ones():
    for offset, expected in SUMS.items():
        targets = torch.tensor([11, 262, 464, 3290, 294])
        found, after = choose_candidates(targets, torch.tensor(offset), 10240, 50304)
        assert (after.item(), found.sum().item()) == expected
    with torch.device("meta"):
        head = script.Head(replace(RECORD, model_dim=8, batch_seqs=8))
    assert head.first_offsets(8).tolist() == [50304 * rank // 8 for rank in range(8)]


def test_later_passes_over_the_shards_repeat_the_batches_of_earlier_ones():
    """They are what passes over copies of the shards would be, also where a stage begins; and the
    same arrays, so that nothing is searched for twice."""
    hp = replace(RECORDS["demo"], batch_seqs=2, num_iterations=120, end_of_text=2000)
    moments = [Moment(step, hp) for step in range(121)]
    rng = np.random.default_rng(0)
    shards = [rng.integers(1000, size=size, dtype=np.uint16) for size in (3000, 4000)]
    for tokens in shards:
        tokens[rng.integers(len(tokens), size=40)] = hp.end_of_text
    batches, expected = (
        list(islice(script.plan(read, hp, moments), 120))
        for read in (shards * 40, [tokens.copy() for tokens in shards * 40])
    )
    for (tokens, pieces), (copy, of_copy) in zip(batches, expected, strict=True):
        assert np.array_equal(tokens, copy) and np.array_equal(pieces, of_copy)
    assert len({id(pieces) for _, pieces in batches}) < 80
    assert len({id(pieces) for _, pieces in expected}) == 120


def test_a_sequence_with_more_different_targets_than_candidates_is_refused():
    """Before the run, which names the step. A warm-up's made-up tokens are not refused."""
    hp = replace(RECORDS["demo"], seq_len=256, batch_seqs=2, vocab_size=1024, extension_frac=0)
    hp = replace(hp, end_of_text=1000, stages="length=1+window=128+candidates=128")
    moments = [Moment(step, hp) for step in range(4)]
    tokens = np.arange(2000) % 100
    tokens[::300] = hp.end_of_text  # each document makes a sequence
    assert len(list(script.plan([tokens], hp, moments))) == 3
    tokens[601:900] = np.arange(299)  # in the first sequence of step 1
    with pytest.raises(UserError, match="different targets in a sequence of step 1, but 128"):
        list(script.plan([tokens], hp, moments))
    found, offset = choose_candidates(torch.arange(17), torch.tensor(3), 16, 512)
    assert (found.tolist(), offset.item()) == ([*range(16)], 3)
    head = script.Head(replace(hp, model_dim=8, vocab_size=512, fp8=False))
    x, now = torch.randn(17, 8, requires_grad=True), at((1, 0.5), 0.0, 16)
    head.training_loss(x, torch.arange(17), now).backward()


def by_hand(head, x, columns: torch.Tensor, shares: tuple, chosen: list[int]) -> torch.Tensor:
    """Return the loss among the chosen tokens, a token and a target at a time, in float64."""
    a, b, c = 23.0, 5.0, 7.5
    logits = a * torch.sigmoid((x @ head.weight.double()[chosen].T + b) / c)
    total = 0.0
    for row, targets in zip(logits, columns.tolist(), strict=True):
        for target, share in zip(targets, shares, strict=True):
            if target in chosen:
                total = total + share * (row.logsumexp(0) - row[chosen.index(target)])
    return total


@pytest.mark.parametrize(
    ("shares", "prefix", "count"),
    [((1.0,), 0.0, 96), ((1, 0.5), 0.0, 96), ((1, 0.5), 0.25, 96), ((1, 0.5), 0.0, 512)],
)
def test_loss_and_gradients_equal_float64_among_the_candidates(shares, prefix, count):
    """Of two sequences, whose gradients add up; and a second sweep begins behind the first."""
    head = script.Head(replace(RECORD, model_dim=32, vocab_size=512, batch_seqs=2, fp8=False))
    head.double().weight.data.normal_(std=0.2)
    before = [token // 2 if token % 3 else -1 for token in range(512)]
    head.prefixes, offsets = torch.tensor(before), [0, 256]
    head.train()
    generator, expected, inputs = torch.Generator().manual_seed(1), 0.0, []
    for i in range(4):
        x = torch.randn(40, 32, generator=generator, dtype=torch.float64).requires_grad_()
        targets = torch.randint(512, (40,), generator=generator)
        words = targets.tolist()
        chosen, offsets[i % 2] = reading.chosen_by_rule(words, offsets[i % 2], count, 512)
        columns = [words[k:] + [-1] * k for k in range(len(shares))]
        columns += [[before[word] for word in words]] if prefix else []
        columns = torch.tensor(columns).T
        given = (*shares, prefix) if prefix else shares
        expected = expected + by_hand(head, x, columns, given, chosen)
        inputs.append((x, targets, chosen))
    grads = torch.autograd.grad(expected, [head.weight, *[x for x, *_ in inputs]])
    for x, targets, _ in inputs:
        head.training_loss(x, targets, at(shares, prefix, count)).backward()
    for found, grad in zip([head.weight, *[x for x, *_ in inputs]], grads, strict=True):
        assert relative_error(found.grad, grad) < 5e-7  # logits are float32
    assert head.offsets.tolist() == offsets
    others = set(range(512)).difference(*[chosen for *_, chosen in inputs])
    assert bool(others) == (count < 512) and not head.weight.grad[sorted(others)].any()
