"""Train with techniques of August 2026's records: a fork of forks/train_gpt_2026_07.py.

    torchrun --standalone --nproc_per_node=8 forks/train_gpt_2026_08.py    # record 89, and these
    ./run.sh forks/train_gpt_2026_08.py                                    # the same; or a demo

It imports train_gpt_2026_07.py. Record 92, 2026-08-30_ANVIL2, trains in 39.9 s with many techniques
more than record 89. Those that are here can each be switched off. Numbers are those of
github.com/KellerJordan/modded-nanogpt. Record 92 as a whole is not here yet.

    n-gram table     hashed bigrams and trigrams have 84.6 million rows in place of 377280. Ranks
                     share the table by rows, and it learns with one second moment for each row.
    sampled softmax  in training, the softmax has only a part of the vocabulary: the tokens that are
                     targets, and others in turn. Validation has all tokens.
"""

import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where train_gpt_2026_07.py lies
import numpy as np
import torch
import torch.distributed as dist
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
    "length=1+window=256+lr=1+targets=1/.5/.25+candidates=10240,"
    "length=2+window=256+lr=1.52+targets=1/.5+candidates=10240,"
    "length=3+window=384+lr=1.73+candidates=14336/14336/24576,length=3+window=384+lr=1.73"
)


@dataclass(frozen=True)
class Hyperparameters(record_89.Hyperparameters):
    """train_gpt_2026_07.py's settings, and those of later records."""

    sampled_softmax: bool = False  # train with the candidates that --stages names
    ngram_rows: int = 0  # rows of the table of bigrams and trigrams, 0: only bigram_rows
    ngram_lr: float = 0.56  # learning rate of the n-gram table
    ngram_beta2: float = 0.95  # the n-gram table's beta2 in two steps
    ngram_decay: float = (
        0.025  # cautious weight decay of the n-gram table, times lr^2, in two steps
    )
    ngram_slow_from: int = (
        336  # step from which it learns at each fourth step, before at each second
    )

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
    if hp.ngram_rows and (hp.ngram_rows % 2 or hp.ngram_rows < 6 or hp.ngram_rows > 2**31):
        raise UserError(f"--ngram_rows {hp.ngram_rows}: must be even, and from 6 to 2^31")
    if hp.ngram_rows and (hp.bigram_rows or not hp.bigram_signs):
        raise UserError("--ngram_rows: needs --bigram_rows 0 and --bigram_signs above 0")
    if hp.ngram_rows and (hp.ngram_slow_from % 4 or hp.adam_every != 2):
        raise UserError("--ngram_rows: needs --ngram_slow_from a multiple of 4, --adam_every 2")
    if hp.sampled_softmax and hp.vocab_size % 128:
        raise UserError("--sampled_softmax on: needs vocab_size a multiple of 128")


SAMPLED = Hyperparameters(
    **vars(record_89.RECORDS["2026-07-17_FP8DownProjection"])
    | {"stages": STAGES, "sampled_softmax": True}
)
RECORDS = {
    "sampled_softmax": SAMPLED,  # record 89 with that alone
    "ngrams": replace(SAMPLED, bigram_rows=0, ngram_rows=84602880),  # and with record 92's table
    # At the size of train_gpt_2026_07.py's demo. Fewer candidates end higher (BENCHMARKS.md).
    "demo": Hyperparameters(
        **vars(record_89.RECORDS["demo"])
        | {"stages": STAGES_DEMO, "sampled_softmax": True, "bigram_rows": 0, "ngram_rows": 200000}
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
        self.ngram_cycle = 2 if self.step < hp.ngram_slow_from else 4  # steps between updates
        self.ngrams = (self.step + 1) % self.ngram_cycle == 0  # whether the n-gram table learns

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


def ngram_hashes(tokens: Tensor, rows: int, sign_rows: int) -> tuple[Tensor, Tensor]:
    """Return for each token (T,) the rows of the n-gram table, and of the table of signs, that its
    bigram and its trigram select: both (2, T). The first half of the n-gram table is of bigrams, as
    in bigram_hash, and the second of trigrams. Each half's last row, and row 0 of the signs, are of
    tokens before which there are too few. Products of int32 wrap."""
    x, half = tokens.int(), rows // 2
    now, before, first = x[2:], x[1:-1], x[:-2]
    trigrams = half + (17351 * now ^ 60961 * before ^ 45259 * first) % (half - 1)
    trigrams = F.pad(trigrams, (2, 0), value=rows - 1)[: len(x)]
    of_bigrams = F.pad((48271 * x[1:] ^ 30011 * x[:-1]) % sign_rows, (1, 0))
    of_trigrams = F.pad((58699 * now ^ 39779 * before ^ 26801 * first) % sign_rows, (2, 0))
    of_trigrams = of_trigrams[: len(x)]
    bigrams = base.bigram_hash(tokens, half)
    return torch.stack([bigrams, trigrams]), torch.stack([of_bigrams, of_trigrams])


def numbered(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (n,) in ascending order, the number of each among the different ones, and the same
    numbers in the order of ids."""
    ordered, order = ids.sort(stable=True)
    numbers = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0)).cumsum(0)
    return ordered, numbers, torch.empty_like(numbers).index_copy_(0, order, numbers)


@t.compiled
def ngram_adam_(
    rows, second, learned_at, ids, grads, step, step_size, lr_decay, beta, two_steps_beta
) -> None:
    """Make a step of Adam in place, without a momentum and with one second moment for each row, on
    the rows of ids (n,) by gradients (n, C). `second` (rows,) is the mean square, and `learned_at`
    (rows,) the number of steps after which it was last updated: what it has missed, it makes up
    for. Where an update shrinks a weight, the weight decays, too: see cautious_adam_."""
    old = rows[ids].to(second.dtype)
    missed = two_steps_beta ** ((step - learned_at[ids]) / 2)
    square = second[ids] * missed + (1 - beta) * grads.square().mean(-1)
    update = step_size * grads / (square.sqrt() + 1e-10)[:, None]
    rows[ids] = (old - update - lr_decay * old * (update * old > 0)).to(rows.dtype)
    second[ids] = square
    learned_at[ids] = step


class NgramTable:
    """The table of bigrams and trigrams. Each rank owns `size` rows of it, and looks others up on
    their owners. A copy, or a gradient, of the whole table would not fit a GPU: gradients are of
    the rows that a sequence reads. It is no parameter of the model, and is saved in pieces.

    Each step sends the gradients of the rows that it reads to their owners, where they wait for the
    step in which the table learns. All sizes depend on the number of tokens alone, so the host
    never waits for a GPU. A row that nothing has read is zero, and does not move.
    """

    CHUNK = 2**16  # rows that are saved at once

    def __init__(self, hp: Hyperparameters):
        self.hp = hp
        self.rows = None  # (size + 1, C), of which the last one stands for no row

    def share(self, rank: int, parts: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make this rank's part, of zeros. UserError if it does not fit."""
        self.rank, self.parts = rank, parts
        self.size = -(-self.hp.ngram_rows // parts)
        row_bytes = self.hp.model_dim * dtype.itemsize + 8
        if device.type == "cuda":
            free = 0.9 * torch.cuda.mem_get_info(device)[0]
            if self.size * row_bytes > free:
                found = f"--ngram_rows {self.hp.ngram_rows} needs {self.size * row_bytes / 1e9:.1f}"
                fits = int(free / row_bytes / 2) * parts // 2 * 2
                raise UserError(f"{found} GB on each of {parts} ranks: try --ngram_rows {fits}")
        self.rows = torch.zeros(self.size + 1, self.hp.model_dim, device=device, dtype=dtype)
        precise = torch.promote_types(dtype, torch.float32)
        self.second = self.rows.new_zeros(self.size + 1, dtype=precise)
        self.learned_at = self.rows.new_zeros(self.size + 1, dtype=torch.int32)
        self.clear()

    def clear(self) -> None:
        """Begin anew, with zeros."""
        for tensor in (self.rows, self.second, self.learned_at):
            tensor.zero_()
        self.updates = 0
        self.read: list[tuple[Tensor, Tensor]] = []  # rows asked of this rank, and rows looked up
        self.waiting: list[tuple[Tensor, Tensor]] = []  # own rows, and their gradients

    def room(self, count: int) -> int:
        """Return the largest number of rows that are asked of one owner for `count` ids. Hashes
        spread evenly, but half of the owners have all bigrams: a quarter more, and 256, is 20
        standard deviations and more."""
        if self.parts == 1:
            return count
        return min(count, 5 * count // (4 * self.parts) + 256)

    def exchange(self, rows: Tensor) -> Tensor:
        """Send the p-th of parts (parts * n, ...) to rank p; return what came, by rank."""
        if self.parts == 1:
            return rows
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows.contiguous())
        return received

    def look_up(self, ids: Tensor) -> Tensor:
        """Return the rows (n, C) of ids (n,). In training, note them for `collect`."""
        ordered, numbers, number = numbered(ids.long())
        room, device = self.room(len(ids)), ids.device
        owner = ordered // self.size
        starts = torch.searchsorted(owner, torch.arange(self.parts, device=device))
        first = numbers[starts.clamp(max=len(ids) - 1)]  # of each owner
        place = owner * room + numbers - first[owner]
        torch._assert_async((place < (owner + 1) * room).all(), "n-grams are not spread evenly")
        wanted = torch.full((self.parts * room,), self.size, device=device)
        wanted[place] = ordered % self.size
        asked = self.exchange(wanted)
        rows = self.exchange(F.embedding(asked, self.rows))
        if torch.is_grad_enabled():
            self.read.append((asked, rows.requires_grad_()))
        place_of_number = torch.zeros_like(numbers).index_copy_(0, numbers, place)
        return F.embedding(place_of_number[number], rows)

    def collect(self) -> None:
        """Send the gradients of the rows that were read to their owners."""
        for asked, rows in self.read:
            self.waiting.append((asked, self.exchange(rows.grad)))
        self.read = []

    def learn(self, now: "Moment") -> None:
        """Update the rows that have gradients, by their sum over steps and mean over sequences."""
        ids, grads = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting = []
        self.updates += 1
        # The sum of a row's gradients, in a fixed order. There may be fewer rows than ids.
        ordered, numbers, number = numbered(ids)
        distinct = torch.full_like(ids, self.size).index_copy_(0, numbers, ordered)
        sums = torch.ops.aten.embedding_dense_backward(grads, number, len(ids), -1, False)
        lr, pairs = self.hp.ngram_lr * now.lr, now.ngram_cycle / 2
        betas = self.hp.ngram_beta2**pairs, self.hp.ngram_beta2
        step_size = lr * (1 - betas[0] ** self.updates) ** 0.5
        lr_decay = lr * lr * self.hp.ngram_decay * pairs
        rates = [self.second.new_full((), rate) for rate in (step_size, lr_decay, *betas)]
        step = self.learned_at.new_full((), now.step + 1)
        sums = sums.to(self.second.dtype) / self.hp.batch_seqs
        state = self.rows, self.second, self.learned_at
        ngram_adam_(*state, distinct, sums, step, *rates)

    def save(self, path: Path) -> None:
        """Save this rank's piece beside a checkpoint, on all ranks: PATH.0of8 and so on. The names
        of its entries are a first row of the table and a number of rows."""
        piece = path.with_name(f"{path.name}.{self.rank}of{self.parts}")
        unfinished = piece.with_name(f"{piece.name}.tmp")
        first = self.rank * self.size
        ids, grads = torch.empty(0, dtype=torch.long), torch.empty(0, self.hp.model_dim)
        if self.waiting:
            ids, grads = (torch.cat(parts).cpu() for parts in zip(*self.waiting, strict=True))
        kept = ids < self.size
        rest = {"ids": ids[kept] + first, "grads": grads[kept], "updates": self.updates}
        state = self.rows, self.second, self.learned_at
        with t.written_whole(piece, unfinished) as file, zipfile.ZipFile(file, "w") as archive:
            with archive.open("waiting", "w", force_zip64=True) as entry:
                torch.save(rest, entry)
            for start in range(0, self.size, self.CHUNK):
                stop = min(start + self.CHUNK, self.size)
                chunk = [tensor[start:stop].to("cpu", copy=True) for tensor in state]
                with archive.open(f"{first + start} {stop - start}", "w") as entry:
                    torch.save(chunk, entry)

    def load(self, path: Path, weights_only: bool) -> None:
        """Load this rank's rows from the pieces of any number of ranks. With weights_only, begin
        the optimizer anew. UserError if a piece is missing or damaged."""
        self.clear()
        pieces = sorted(path.parent.glob(f"{path.name}.*of*[0-9]"))
        if not pieces or len(pieces) != int(pieces[0].name.split("of")[-1]):
            raise UserError(f"{path} lacks pieces of its n-gram table: {path.name}.0of8, for 8")
        begin, end = self.rank * self.size, (self.rank + 1) * self.size
        state = self.rows, self.second, self.learned_at
        try:
            for piece in pieces:
                with zipfile.ZipFile(piece) as archive:
                    for name in archive.namelist():
                        with archive.open(name) as file:
                            self.load_entry(name, file, begin, end, state)
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            raise UserError(f"{piece} is not an intact piece ({type(error).__name__})") from error
        if weights_only:
            self.second.zero_()
            self.learned_at.zero_()
            self.updates, self.waiting = 0, []

    def load_entry(self, name: str, file, begin: int, end: int, state: tuple) -> None:
        """Load what an entry of a piece has of the rows from begin to end."""
        device = self.rows.device
        if name == "waiting":
            saved = torch.load(file, weights_only=True)
            own = (saved["ids"] >= begin) & (saved["ids"] < end)
            self.updates = saved["updates"]
            if own.any():
                ids, grads = saved["ids"][own] - begin, saved["grads"][own]
                self.waiting.append((ids.to(device), grads.to(device)))
            return
        first, count = map(int, name.split())
        start, stop = max(first, begin), min(first + count, end)
        if start < stop:
            for tensor, part in zip(state, torch.load(file, weights_only=True), strict=True):
                tensor[start - begin : stop - begin] = part[start - first : stop - first].to(device)


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

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        self.ngrams = NgramTable(hp) if hp.ngram_rows else None

    def share_ngrams(self, rank: int = 0, parts: int = 1) -> None:
        """Make this rank's part of the n-gram table, if it is not made yet."""
        if self.ngrams is not None and self.ngrams.rows is None:
            table = self.embed.weight
            self.ngrams.share(rank, parts, table.device, table.dtype)

    def save_pieces(self, path: Path) -> None:
        """Save this rank's piece of the n-gram table, and wait for those of others."""
        if self.ngrams is not None:
            self.ngrams.save(path)
            t.all_reduce_(torch.zeros(1, device=self.embed.weight.device)).item()

    def load_pieces(self, path: Path | None, weights_only: bool) -> None:
        """Load this rank's rows of the n-gram table; without a path, zeros."""
        if self.ngrams is not None:
            self.share_ngrams()
            if path is None:
                self.ngrams.clear()
            else:
                self.ngrams.load(path, weights_only)

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what train_gpt_2026_07.py's returns. "bigram" is the sum of a bigram's and a
        trigram's row of the n-gram table, each with signs."""
        x, more = super().embedded(input_seq)
        if self.ngrams is not None:
            self.share_ngrams()
            rows, signs = ngram_hashes(input_seq, self.hp.ngram_rows, len(self.signs))
            found = self.ngrams.look_up(rows.flatten())
            more["bigram"] = self.signed_sum(found.view(*rows.shape, -1), signs)
        return x, more

    @t.compiled
    def signed_sum(self, rows: Tensor, signs: Tensor) -> Tensor:
        """Return the sum (T, C) of rows (2, T, C) times those rows (2, T) of the table of signs."""
        return (rows * self.signs[signs.long()].type_as(rows)).sum(0)

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
    """train_gpt_2026_07.py's Optimizers, which also let the n-gram table learn, and keep where the
    sweeps of sequences stand. A sequence of the batch has a sweep of its own, so it does not matter
    how many ranks there are."""

    def __init__(self, model: GPT, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        if hp.ngram_rows and hp.val_tokens // hp.val_seq_len % world_size:
            rule = "val_tokens / val_seq_len must be a multiple of the ranks"
            raise UserError(f"--ngram_rows, on {world_size} ranks: {rule}")
        model.share_ngrams(rank, world_size)
        self.set_offsets(model.lm_head.first_offsets(hp.batch_seqs))

    def set_offsets(self, offsets: Tensor) -> None:
        """Give the head those of this rank's sequences, of all (batch_seqs,)."""
        head = self.model.lm_head
        head.offsets = offsets.chunk(self.world_size)[self.rank].to(head.weight.device, copy=True)

    @torch.no_grad()
    def step(self, now: Moment) -> list[Tensor]:
        """Update all groups that learn at a moment, and the n-gram table when its cycle ends."""
        norms = super().step(now)
        ngrams = self.model.ngrams
        if ngrams is not None:
            ngrams.collect()
            if now.ngrams:
                ngrams.learn(now)
        return norms

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
    default_record = "ngrams"
    model_class = t.Late(lambda: GPT)
    optimizers_class = t.Late(lambda: Optimizers)
    moment = t.Late(lambda: Moment)
    check = t.Late(lambda: check)
    plan = t.Late(lambda: plan)


if __name__ == "__main__":
    t.main(run=Run)
