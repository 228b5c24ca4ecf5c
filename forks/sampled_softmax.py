"""Sampled softmax, for forks/train_gpt_2026_08.py: in training, the softmax of a sequence covers a
part of the vocabulary: its targets, and other tokens in turn. The rule comes from record 92 of
github.com/KellerJordan/modded-nanogpt, with a sequence in place of a rank."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt_2026 as base
import train_gpt_2026_07 as record_89
from train_gpt_2026 import UserError

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
    needed = count - is_target.sum()  # below 0 in a warm-up, for whose made-up tokens it is all one
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


class Head(record_89.Head):
    """train_gpt_2026_07.py's Head, whose softmax may have a part of the vocabulary."""

    def __init__(self, hp: base.Hyperparameters):
        super().__init__(hp)
        # Of this rank's sequences, in the order in which they come: the next one's is first.
        self.register_buffer("offsets", self.first_offsets(hp.batch_seqs), persistent=False)

    def first_offsets(self, sequences: int) -> Tensor:
        """Return where in the sweep the sequences of the first batch begin, (sequences,)."""
        return torch.arange(sequences) * len(self.weight) // sequences

    def loss(self, x, targets, shares=(1.0,), prefix=0.0, candidates=0) -> Tensor:  # overrides
        """Return what train_gpt_2026_07.py's returns, of a softmax of so many candidates, 0: of
        all tokens. A prefix that is no candidate has no share."""
        if not candidates:
            return super().loss(x, targets, shares, prefix)
        if prefix:
            columns, shares = self.with_prefixes(targets, len(shares)), (*shares, prefix)
        else:
            columns = base.next_targets(targets, len(shares))
        size = len(self.weight)
        chosen, offset = choose_candidates(targets, self.offsets[0], candidates, size)
        self.offsets.copy_(torch.cat([self.offsets[1:], offset[None]]))
        place = torch.full((size + 1,), -1, device=x.device)  # the last place is that of -1
        place[chosen] = torch.arange(candidates, device=x.device)
        columns = place[columns]
        columns[:, 0].clamp_(min=0)  # all are candidates, but in a warm-up
        return self.loss_of_rows(chosen, x, columns, shares)

    def loss_of_rows(self, chosen: Tensor, *arguments) -> Tensor:
        """Return weighted_loss(*arguments) as if the chosen rows (n,) of the weight were the whole
        weight."""
        whole = self.weight
        self.weight = nn.Parameter(F.embedding(chosen, whole.detach()))
        self.weight.grad_dtype = whole.grad_dtype
        self.weight.register_post_accumulate_grad_hook(partial(self.add_gradient, chosen))
        try:
            return self.weighted_loss(*arguments)
        finally:
            self.weight = whole

    def add_gradient(self, chosen: Tensor, rows: Tensor) -> None:
        """Add the gradient of the chosen rows (n,) at their places, in the backward pass. It is
        sent with the tied embedding's; without that, after the backward pass."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, dtype=rows.grad.dtype)
        self.weight.grad.index_add_(0, chosen, rows.grad)
        rows.grad = None


def most_different_targets(tokens: np.ndarray, pieces, batch_seqs: int) -> int:
    """Return the largest number of different targets in a sequence of a batch's batch_seqs."""
    batch = np.concatenate([tokens[start:stop] for start, stop in pieces])
    targets = batch.reshape(batch_seqs, -1)[:, 1:]
    return max(np.count_nonzero(np.bincount(sequence)) for sequence in targets)


def plan(shards: list[np.ndarray], hp, moments: list) -> Iterator[tuple]:  # overrides
    """Plan the batches of these moments, as train_gpt_2026.py does. UserError for a sequence with
    more different targets than its softmax has candidates."""
    counts = {}  # by the identity of a batch's pieces: those that come again are the same array
    for now, (tokens, pieces) in zip(moments, base.plan(shards, hp, moments), strict=False):
        if now.candidates:
            if id(pieces) not in counts:
                counts[id(pieces)] = most_different_targets(tokens, pieces, hp.batch_seqs)
            count = counts[id(pieces)]
            if count > now.candidates:
                found = f"{count} different targets in a sequence of step {now.step}"
                remedy = "more candidates in --stages, or --sampled_softmax off"
                raise UserError(f"{found}, but {now.candidates} candidates: try {remedy}")
        yield tokens, pieces
