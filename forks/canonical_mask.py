"""Which tokens cannot follow a token, because GPT-2's tokenizer would have split their text in
another way: the mask of forks/train_gpt_2026_08.py. It knows only the tokenizer's merges. The rule
comes from record 91 of github.com/KellerJordan/modded-nanogpt, by @jvarho, pull request 350, after
Vieira et al. 2025, arXiv 2506.07956."""

import re
import unicodedata
from collections import defaultdict
from functools import cache
from math import inf

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt as t
from prefixes import gpt2_tokens

IMPOSSIBLE = -60.0  # the logit of a token that cannot follow
CONTRACTION = re.compile(r"(^|[^\W_])'(s|t|re|ve|m|ll|d)$")


def kind(text: bytes, at_end: bool) -> str:
    """Return the kind of the character at the start, or at the end, of a token's bytes: Space,
    Letter, Number, Other, or ? if its bytes are incomplete."""
    for size in range(1, min(4, len(text)) + 1):
        try:
            character = (text[-size:] if at_end else text[:size]).decode("utf-8")
        except UnicodeDecodeError:
            continue
        if character.isspace() and not "\x1c" <= character <= "\x1f":
            return "S"
        category = unicodedata.category(character)[0]
        return category if category in "LN" else "O"
    return "?"


class CanonicalMask:
    """The tokens that cannot follow a token p. GPT-2's tokenizer joins pieces of a text, beginning
    with bytes, by merges in a fixed order, the rank. If p and then x had come from one text, no
    merge of any rank would have joined p's last piece and x's first piece. A token that contradicts
    this cannot follow. The merges of p alone say what its last piece is at each rank."""

    def __init__(self, count: int, vocab_size: int):  # the first `count` of GPT-2's tokens
        self.vocab_size = vocab_size
        names, merges = gpt2_tokens(count)
        plain = [ord(name) for name in names[:256] if ord(name) < 256]
        values = [*plain, *sorted({*range(256)} - {*plain})]
        byte_of = dict(zip(names[:256], values, strict=True))
        self.texts = [bytes(byte_of[c] for c in name) for name in names]
        number_of = {name: number for number, name in enumerate(names)}
        # The token that a merge makes is also its rank.
        self.merge = {(number_of[a], number_of[b]): number_of[a + b] for a, b in merges}
        self.right_of = defaultdict(list)  # by left piece: (rank, right piece) of its merges
        for (left, right), rank in self.merge.items():
            self.right_of[left].append((rank, right))
        self.byte_tokens = {value: number_of[name] for name, value in byte_of.items()}
        self.last_pieces = []  # of each token: (piece, first rank, end) of its last piece
        self.beginning_with = defaultdict(list)  # by piece: (token, first rank, end), of the first
        for token, text in enumerate(self.texts):
            first, last = self.pieces(text)
            self.last_pieces.append(last)
            for piece, start, end in first:
                self.beginning_with[piece].append((token, start, end))
        starts = np.array([kind(text, at_end=False) for text in self.texts])
        self.starting = {name: self.packed(starts == name) for name in "SL?"}
        # What is computed once is kept: up to 1.3 GB for all tokens of GPT-2.
        self.joined_by = cache(self.joined_by)
        self.joined_with = cache(self.joined_with)
        self.impossible_after = cache(self.impossible_after)

    def pieces(self, text: bytes) -> tuple[list, list]:
        """Return what the first piece of a token is, and the last one: (piece, start, end) for the
        merges with these ranks. A merge within x comes after one of its rank at the seam, as text
        is joined from left to right; a merge within p before."""
        parts = [self.byte_tokens[value] for value in text]
        first, last = [(parts[0], 0)], [(parts[-1], 0)]
        while len(parts) > 1:
            pairs = [self.merge.get(pair, inf) for pair in zip(parts, parts[1:], strict=False)]
            rank = min(pairs)
            place = pairs.index(rank)
            parts[place : place + 2] = [rank]
            if place == 0:
                first.append((rank, rank + 1))
            if place == len(parts) - 1:
                last.append((rank, rank))
        ends = ([start for _, start in row[1:]] + [inf] for row in (first, last))
        return tuple(
            [(piece, start, end) for (piece, start), end in zip(row, of_row, strict=True)]
            for row, of_row in zip((first, last), ends, strict=True)
        )

    def packed(self, is_member: np.ndarray) -> np.ndarray:
        """Return a set of tokens (n,) as bits, (vocab_size / 8,) uint8."""
        padded = np.zeros(self.vocab_size, bool)
        padded[: len(is_member)] = is_member
        return np.packbits(padded, bitorder="little")

    def joined_by(self, rank: int, right: int) -> np.ndarray:
        """Return the tokens whose first piece is `right` at a rank, as bits."""
        found = [token for token, start, end in self.beginning_with[right] if start <= rank < end]
        member = np.zeros(self.vocab_size, bool)
        member[found] = True
        return self.packed(member)

    def joined_with(self, left: int, start: int, end: float) -> np.ndarray:
        """Return the tokens with whose first piece a merge joins a last piece, as bits."""
        merges = [(rank, right) for rank, right in self.right_of[left] if start <= rank < end]
        rows = [self.joined_by(*merge) for merge in merges]
        return np.bitwise_or.reduce(rows) if rows else self.packed(np.zeros(0, bool))

    def bits(self, tokens: Tensor) -> Tensor:
        """Return impossible_after of tokens (T,) as (T, vocab_size / 8) uint8, on their device."""
        distinct, places = tokens.unique(return_inverse=True)
        rows = np.stack([self.impossible_after(token) for token in distinct.tolist()])
        return torch.from_numpy(rows).to(tokens.device)[places]

    def impossible_after(self, token: int) -> np.ndarray:
        """Return the tokens that cannot follow a token, as bits (vocab_size / 8,) uint8, of which
        the lowest of a byte comes first. Where the tokenizer splits text before any merge, a token
        says too little of that: a seam of two spaces, or before a letter, or in an incomplete
        character, and what follows a contraction, is always possible."""
        hidden = self.packed(np.zeros(0, bool))
        if token >= len(self.texts) or CONTRACTION.search(
            self.texts[token].decode("utf-8", "replace")
        ):
            return hidden
        for piece in self.last_pieces[token]:
            hidden = hidden | self.joined_with(*piece)
        before = kind(self.texts[token], at_end=True)
        hidden &= ~self.starting["?"]
        if before == "S":
            hidden &= ~self.starting["S"]
        if before == "O":
            hidden &= ~self.starting["L"]
        return hidden

    def loss(self, head, x: Tensor, targets: Tensor, tokens: Tensor) -> Tensor:
        """Return a head's mean loss () of x (T, C) and targets (T,), if what cannot follow the
        tokens (T,) has no chance."""
        size, total = head.chunk_len(x.device), 0
        for part in zip(x.split(size), targets.split(size), tokens.split(size), strict=True):
            x_part, targets_part, tokens_part = part
            total = total + loss_of_chunk(head, x_part, targets_part, self.bits(tokens_part))
        return total / len(x)


@t.compiled
def loss_of_chunk(head, x: Tensor, targets: Tensor, bits: Tensor) -> Tensor:
    """Return the summed loss () of a chunk, without the tokens (T, vocabulary / 8) whose bit is
    set."""
    place = torch.arange(8, device=x.device, dtype=torch.uint8)
    hidden = (bits[..., None] >> place & 1).bool().flatten(1)
    return F.cross_entropy(
        torch.where(hidden, IMPOSSIBLE, head.logits(x)), targets, reduction="sum"
    )
