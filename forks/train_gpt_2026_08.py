"""Train with techniques of August 2026's records: a fork of forks/train_gpt_2026_07.py.

    torchrun --standalone --nproc_per_node=8 forks/train_gpt_2026_08.py    # record 89, and these
    ./run.sh forks/train_gpt_2026_08.py                                    # the same; or a demo

It imports train_gpt_2026_07.py. Record 92, 2026-08-30_ANVIL2, trains in 39.9 s with many techniques
more than record 89. Those that are here can each be switched off. Numbers are those of
github.com/KellerJordan/modded-nanogpt. Record 92 as a whole is not here yet.

    sampled softmax  in training, the softmax has only a part of the vocabulary: the tokens that are
                     targets, and others in turn. Validation has all tokens.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where train_gpt_2026_07.py lies
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt_2026 as base
import train_gpt_2026_07 as record_89
from train_gpt_2026 import UserError, t

# -----------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class Stage(base.Stage):
    """One stage of the run."""

    candidates: tuple[float, ...] = ()  # tokens in the softmax, by equal parts of the stage


# Those of record 89, with record 92's numbers of candidates. A sequence of 49152 tokens has about
# 11000 different ones.
STAGES = (
    "length=1+window=384+lr=1+cap=896+targets=1/.5/.25+candidates=10240,"
    "length=2+window=896+lr=1.52+targets=1/.5+candidates=10240,"
    "length=3+window=1408+lr=1.73+candidates=14336/14336/24576,"
    "length=3+window=1664+lr=1.73"
)
STAGES_DEMO = (
    "length=1+window=256+lr=1+targets=1/.5/.25+candidates=512,"
    "length=2+window=256+lr=1.52+targets=1/.5+candidates=512,"
    "length=3+window=384+lr=1.73+candidates=768/768/2048,length=3+window=384+lr=1.73"
)


@dataclass(frozen=True)
class Hyperparameters(record_89.Hyperparameters):
    """train_gpt_2026_07.py's settings, and those of later records."""

    sampled_softmax: bool = False  # train with the candidates that --stages names

    stage_class: ClassVar = Stage


def check(hp: Hyperparameters) -> None:
    """Raise UserError for settings that are not allowed, alone or together."""
    record_89.check(hp)
    counts = [count for stage in base.stage_table(hp) for count in stage.candidates]
    if any(count % 16 or not 0 < count <= hp.vocab_size for count in counts):
        rule = f"candidates must be multiples of 16, from 16 to {hp.vocab_size}"
        raise UserError(f"--stages {hp.stages}: {rule}")
    if hp.sampled_softmax and not counts:
        raise UserError("--sampled_softmax on: needs candidates in --stages")
    if hp.sampled_softmax and hp.vocab_size % 128:
        raise UserError("--sampled_softmax on: needs vocab_size a multiple of 128")


RECORDS = {
    "sampled_softmax": Hyperparameters(
        **vars(record_89.RECORDS["2026-07-17_FP8DownProjection"])
        | {"stages": STAGES, "sampled_softmax": True}
    ),
    # At the size of train_gpt_2026_07.py's demo. Of each sequence, 90 to 220 tokens differ.
    "demo": Hyperparameters(
        **vars(record_89.RECORDS["demo"]) | {"stages": STAGES_DEMO, "sampled_softmax": True}
    ),
}


# -----------------------------------------------------------------------------
# Data


def plan(shards: list[np.ndarray], hp: Hyperparameters, moments: list) -> Iterator[tuple]:
    """Plan the batches of these moments, as train_gpt_2026.py does. UserError for a sequence with
    more different targets than its softmax has candidates."""
    for now, (tokens, sequences) in zip(moments, base.plan(shards, hp, moments), strict=False):
        for pieces in sequences if now.candidates else []:
            words = np.concatenate([tokens[start:stop] for start, stop in pieces])[1:]
            count = np.count_nonzero(np.bincount(words))
            if count > now.candidates:
                found = f"{count} different targets in a sequence of step {now.step}"
                remedy = "more candidates in --stages, or --sampled_softmax off"
                raise UserError(f"{found}, but {now.candidates} candidates: try {remedy}")
        yield tokens, sequences


# -----------------------------------------------------------------------------
# Schedules


def part_of_stage(values: tuple, step: int, hp: Hyperparameters):
    """Return which of a stage's values holds at a step: each for an equal part of the stage."""
    gone = 1 - base.left_of_stage(step, hp)
    return values[min(int(gone * len(values) + 1e-9), len(values) - 1)]


class Moment(record_89.Moment):
    """All that is scheduled, at one step."""

    def __init__(self, step: int, hp: Hyperparameters):
        super().__init__(step, hp)
        counts = base.stages_until(self.step, hp)[-1].candidates
        self.candidates = 0  # tokens in the softmax, 0: all
        if hp.sampled_softmax and counts:
            self.candidates = int(part_of_stage(counts, self.step, hp))

    @property
    def graph_key(self) -> tuple:
        """The loss of each number of candidates is compiled once more."""
        return *super().graph_key, self.candidates


# -----------------------------------------------------------------------------
# Model


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
    last = torch.where(near, turn, vocab_size).sort().values[(needed - 1).clamp(min=0)]
    number = (~is_target).cumsum(0) - 1  # of tokens that are no targets
    distance = ((vocab_size - count + needed) // needed.clamp(min=1)).clamp(min=1)
    spaced = ~is_target & (number % distance == 0) & (number // distance < needed)
    others = torch.where(near.sum() >= needed, near & (turn <= last), spaced) & (needed > 0)
    chosen = torch.where(is_target | others, tokens, vocab_size).sort().values[:count]
    return chosen, torch.where(needed > 0, (offset + looked_at) % vocab_size, offset)


class Head(record_89.Head):
    """train_gpt_2026_07.py's Head, whose softmax may have a part of the vocabulary."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        # Of this rank's sequences, in the order in which they come: the next one's is first.
        self.register_buffer("offsets", self.first_offsets(hp.batch_seqs), persistent=False)

    def first_offsets(self, sequences: int) -> Tensor:
        """Return where in the sweep the sequences of the first batch begin, (sequences,)."""
        return torch.arange(sequences) * len(self.weight) // sequences

    def loss(self, x, targets, shares=(1.0,), prefix: float = 0.0, candidates: int = 0) -> Tensor:
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
        weight. Their gradient is added at their places."""
        whole = self.weight
        self.weight = nn.Parameter(F.embedding(chosen, whole.detach()))
        self.weight.grad_dtype = torch.float32
        try:
            loss = self.weighted_loss(*arguments)
            grad = self.weight.grad
        finally:
            self.weight = whole
        if whole.grad is None:
            whole.grad = torch.zeros_like(whole, dtype=grad.dtype)
        whole.grad.index_add_(0, chosen, grad)
        return loss


class GPT(record_89.GPT):
    """The language model with these techniques."""

    head_class = t.Late(lambda: Head)

    def forward(self, input_seq: Tensor, target_seq: Tensor, now: Moment) -> Tensor:
        """Return what train_gpt_2026_07.py's returns. In training, of a sampled softmax."""
        if not self.training:
            return super().forward(input_seq, target_seq, now)
        self.tied = now.tied
        hidden = self.hidden(input_seq, now)
        return self.lm_head.loss(hidden, target_seq, now.targets, now.prefix, now.candidates)


# -----------------------------------------------------------------------------
# Optimizers, and the class that tools use


class Optimizers(record_89.Optimizers):
    """train_gpt_2026_07.py's Optimizers, which also keep where the sweeps of sequences stand. A
    sequence of the batch has a sweep of its own, so it does not matter how many ranks there are."""

    def __init__(self, model: GPT, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        self.set_offsets(model.lm_head.first_offsets(hp.batch_seqs))

    def set_offsets(self, offsets: Tensor) -> None:
        """Give the head those of this rank's sequences, of all (batch_seqs,)."""
        head = self.model.lm_head
        head.offsets = offsets.chunk(self.world_size)[self.rank].to(head.weight.device, copy=True)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return all states, and the offsets of all sequences, on rank 0's CPU."""
        saved, offsets = super().state_dict(), self.model.lm_head.offsets
        if self.world_size > 1:
            own, offsets = offsets, offsets.new_empty(self.hp.batch_seqs)
            t.all_gather(offsets, own)
        return saved | {"sampled softmax": {"offsets": offsets.cpu()}}

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Load state that any number of ranks saved, or begin anew with {}."""
        super().load_state_dict(saved)
        first = {"offsets": self.model.lm_head.first_offsets(self.hp.batch_seqs)}
        self.set_offsets(saved.get("sampled softmax", first)["offsets"])


class Run(record_89.Run):
    """A run with these techniques."""

    records = RECORDS
    default_record = "sampled_softmax"
    model_class = t.Late(lambda: GPT)
    optimizers_class = t.Late(lambda: Optimizers)
    moment = t.Late(lambda: Moment)
    check = t.Late(lambda: check)
    plan = t.Late(lambda: plan)


if __name__ == "__main__":
    t.main(run=Run)
