"""Shards of GPT-2 tokens, and batches that depend on the step alone.

train_gpt.py reads its data through distributed_data_generator: batch by batch, cut forward through
the shards from step 0 on, each with the length of its step.
"""

import glob
import itertools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from program import HERE, UserError

FINEWEB = f"{HERE}/data/fineweb10B/fineweb"
END_OF_TEXT = 50256  # the GPT-2 token that begins every document


def load_data_shard(path: str | Path) -> Tensor:
    """The tokens of a shard, (n,) uint16, mapped from the file.

    A shard is 256 little-endian int32 (20240520, version 1, n, zeros), then n uint16: llm.c's
    format. Raises UserError with what was found and what was expected.
    """
    size, header = os.path.getsize(path), np.fromfile(path, "<i4", 256).tolist()
    expected = [20240520, 1, (size - 1024) // 2]  # magic, version, tokens
    if size <= 1024 or size % 2 or header[:3] != expected:
        found = f"its {size} bytes begin with {header[:3]}, expected {expected}"
        raise UserError(f"{path} is not a whole token shard: {found}; fetch or make it again")
    return torch.from_numpy(np.memmap(path, "<u2", mode="c", offset=1024))


class Shard:
    """A shard's tokens (n,), uint16, and where in it sequences lie."""

    def __init__(self, path: str):
        self.path, self.tokens, self.ends = path, load_data_shard(path).numpy(), {}

    def check(self, vocab_size: int) -> None:
        """UserError for a token outside the vocabulary."""
        if (worst := self.tokens.max()) >= vocab_size:
            where = f"{self.path}: token {worst} at position {self.tokens.argmax()}"
            raise UserError(f"{where} is outside the vocabulary of {vocab_size}")

    @cached_property
    def documents(self) -> np.ndarray:
        """Where they start."""
        return np.flatnonzero(self.tokens == END_OF_TEXT)

    def sequence(self, position: int, length: int, longest: int | None):
        """`length` tokens at a position or after it: pieces (start, stop), and the position for the
        next sequence; None if the shard ends before.

        Without `longest`, one piece, and the next one begins with its last token. Else a sequence
        begins with a document, and the next one with a later document. If longest is 0, it is one
        piece. Else a piece is a document's first tokens, at most `longest`, and what the last
        document has left is dropped, as on the leaderboard since September 2025.
        """
        if longest is None:
            stop = position + length
            return ([(position, stop)], stop - 1) if stop <= len(self.tokens) else None
        documents = self.documents
        first = np.searchsorted(documents, position)
        if not longest:
            start = documents[first] if first < len(documents) else len(self.tokens)
            after = np.searchsorted(documents, start + length - 1)
            return ([(start, start + length)], documents[after]) if after < len(documents) else None
        if longest not in self.ends:  # the tokens up to each document's end
            lengths = np.diff(documents, append=len(self.tokens))
            self.ends[longest] = np.minimum(lengths, longest).cumsum()
        ends = self.ends[longest]
        end = length + (ends[first - 1] if first else 0)
        last = np.searchsorted(ends, end)
        if last >= len(ends):
            return None
        starts = documents[first : last + 1]
        stops = starts + np.diff(ends[first : last + 1], prepend=end - length)
        stops[-1] -= ends[last] - end
        return list(zip(starts, stops, strict=True)), starts[-1] + 1

    def batch(self, position: int, count: int, length: int, longest: int | None):
        """So many sequences, one after the other, and the next position; None if the shard ends
        before. As published, one whose whole documents are not cut is left a batch earlier."""
        sequences = []
        if longest == 0 and position + 2 * count * (length - 1) + 1 >= len(self.tokens):
            return None
        for _ in range(count):
            found = self.sequence(position, length, longest)
            if found is None:
                return None
            pieces, position = found
            sequences.append(pieces)
        return sequences, position


def plan_batches(shards: list[Shard], size_of: Callable, batch_seqs: int, vocab_size: int):
    """The batches of the steps, cut forward through the shards, again and again: of each the epoch,
    from 1 on, the shard and its sequences. size_of(step) is a sequence's length, targets included,
    and `longest`. It ends where no shard has room for a step's batch. Shards are checked when they
    are first read.
    """
    step = 0
    for epoch in itertools.count(1):
        first = step
        for shard in shards:
            if epoch == 1:
                shard.check(vocab_size)
            position = 0
            while found := shard.batch(position, batch_seqs, *size_of(step)):
                sequences, position = found
                yield epoch, shard, sequences
                step += 1
        if step == first:
            return


def distributed_data_generator(
    pattern,
    seq_len,
    batch_seqs,
    rank,
    world_size,
    start_step=0,
    num_batches=0,
    epochs=1,
    vocab_size=END_OF_TEXT + 1,
    longest=None,
    device=None,
):
    """This rank's part of each global batch from start_step on, read ahead by a thread.

    Yields inputs (int32) and targets (int64), both (batch_seqs / world_size, seq_len), pinned for a
    CUDA device; targets are the sequence shifted by one. A batch is batch_seqs consecutive
    sequences of one shard (a tail too short for one is dropped); rank r has the r-th part. It ends
    after num_batches, or else after `epochs` passes over the shards (0: never). seq_len and
    `longest` (see Shard.sequence) are numbers, or functions of the step. UserError at once if
    shards are missing, damaged, too short for num_batches (0: for one) or hold a token outside the
    vocabulary.
    """
    if batch_seqs % world_size:
        raise UserError(f"{world_size} ranks cannot share {batch_seqs} sequences: use a divisor")
    paths = sorted(glob.glob(pattern))
    if not paths:
        remedy = f"; fetch FineWeb with {HERE}/cached_fineweb.py" * pattern.startswith(FINEWEB)
        raise UserError(f"no shard matches {pattern}{remedy}")
    shards, vocab_size = [Shard(path) for path in paths], min(vocab_size, END_OF_TEXT + 1)

    def size_of(step: int) -> tuple[int, int | None]:
        length, most = (v(step) if callable(v) else v for v in (seq_len, longest))
        return length + 1, most

    def plan(epochs: int):
        batches = plan_batches(shards, size_of, batch_seqs, vocab_size)
        return itertools.takewhile(lambda batch: not epochs or batch[0] <= epochs, batches)

    found = list(itertools.islice(plan(epochs if num_batches else 1), num_batches or None))
    if len(found) < max(num_batches, 1):
        fits = any(s.batch(0, batch_seqs, *size_of(len(found))) for s in shards)
        if found and fits:
            passes = f" in {epochs} epochs" * (epochs > 1)
            text = f"{pattern} holds {len(found)} batches{passes}"
            raise UserError(f"{text}, the run reads {num_batches}: add shards, or raise --epochs")
        length, most = size_of(len(found))[0], max(len(s.tokens) for s in shards)
        need = (length - 1) * batch_seqs + 1
        raise UserError(f"{pattern}: a shard has at most {most} tokens, a batch needs {need}")
    share = batch_seqs // world_size

    def read(epoch: int, shard: Shard, sequences: list) -> tuple[Tensor, Tensor]:
        own = sequences[rank * share :][:share]
        rows = [np.concatenate([shard.tokens[i:j] for i, j in pieces]) for pieces in own]
        rows = np.stack(rows)
        both = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int64)
        both = tuple(map(torch.from_numpy, both))
        if device is None or device.type == "cpu":
            return both
        torch.cuda.set_device(device)  # else a thread's pinned memory is that of GPU 0
        return tuple(t.pin_memory() for t in both)

    def batches():
        with ThreadPoolExecutor(1) as reader:
            ahead = deque()
            for batch in itertools.islice(found if num_batches else plan(epochs), start_step, None):
                ahead.append(reader.submit(read, *batch))
                if len(ahead) > 4:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    return batches()
