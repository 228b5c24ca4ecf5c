"""forks/train_gpt_2026_08.py on several ranks, which go on where other numbers of ranks were."""

import torch

import runs
from frontier.test_ngrams import assert_it_goes_on, at_ranks, table_of  # noqa: F401


def test_two_ranks_go_on_to_the_same_bits(at_ranks):  # noqa: F811
    assert_it_goes_on(at_ranks, 2, (4, 6))


def test_other_numbers_of_ranks_go_on_with_the_same_table(at_ranks):  # noqa: F811
    """1, 2, 4 and 1 again, also from the middle of a cycle."""
    whole, two = at_ranks(0), (2, 4, (0,))
    runs.assert_close(at_ranks(*two), whole, since=4)
    runs.assert_close(at_ranks(4, 6, two), whole, since=6)
    runs.assert_close(at_ranks(0, 6, two), whole, since=6)
    last = table_of(at_ranks(4, 6, two).folder, 8)
    for a, b in zip(last, table_of(whole.folder, 8), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=1e-3, atol=1e-4)
