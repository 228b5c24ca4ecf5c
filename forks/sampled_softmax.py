"""Sampled softmax, for forks/train_gpt_2026_08.py: in training, the softmax of a sequence covers a
part of the vocabulary: its targets, and other tokens in turn. The rule comes from record 92 of
github.com/KellerJordan/modded-nanogpt, with a sequence in place of a rank."""

import numpy as np
import torch
from torch import Tensor

SWEEP = 20011  # the sweep over the vocabulary visits token SWEEP * k modulo its size in turn k


def choose_candidates(targets: Tensor, offset: Tensor, count: int, vocab_size: int) -> tuple:
    """Return `count` tokens (count,) in ascending order, and the next sequence's offset ().

    They are all of targets (T,), and tokens of the sweep from the turn `offset` () on that are no
    targets. The next sequence begins behind the turns that were looked at, which are 1.7 times as
    many as needed and 256. (If these do not suffice, tokens are taken at equal distances.) Nothing
    is random, and no size depends on the targets, so the host need not wait for a GPU.
    """
    tokens = torch.arange(vocab_size, device=targets.device)
    is_target = torch.zeros_like(tokens, dtype=torch.bool).index_fill(0, targets, True)
    needed = count - is_target.sum()  # below 0 in a warm-up, where it does not matter
    looked_at = ((1.7 * needed.double()).long() + 256).clamp(max=vocab_size)
    turn = (pow(SWEEP, -1, vocab_size) * tokens - offset) % vocab_size
    near = ~is_target & (turn < looked_at)
    # By gather: a tensor () as an index would let the host wait for it.
    turns = torch.where(near, turn, vocab_size).sort().values
    last = turns.gather(0, (needed - 1).clamp(min=0)[None])
    number = (~is_target).cumsum(0) - 1  # of tokens that are no targets
    distance = ((vocab_size - count + needed) // needed.clamp(min=1)).clamp(min=1)
    spaced = ~is_target & (number % distance == 0) & (number // distance < needed)
    others = torch.where(near.sum() >= needed, near & (turn <= last), spaced) & (needed > 0)
    chosen = torch.where(is_target | others, tokens, vocab_size).sort().values[:count]
    return chosen, torch.where(needed > 0, (offset + looked_at) % vocab_size, offset)


def most_different_targets(tokens: np.ndarray, pieces, batch_seqs: int) -> int:
    """Return the largest number of different targets in a sequence of a batch's batch_seqs."""
    batch = np.concatenate([tokens[start:stop] for start, stop in pieces])
    targets = batch.reshape(batch_seqs, -1)[:, 1:]
    return max(np.count_nonzero(np.bincount(sequence)) for sequence in targets)
