"""The table of bigrams and trigrams of forks/train_gpt_2026_08.py: hashes of tokens select rows,
ranks share them, and they learn by their own Adam. The numbers come from record 92 of
github.com/KellerJordan/modded-nanogpt."""

import re
import zipfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import cautious
import train_gpt as t
from functions_2026 import bigram_hash
from train_gpt import UserError


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
    bigrams = bigram_hash(tokens, half)
    return torch.stack([bigrams, trigrams]), torch.stack([of_bigrams, of_trigrams])


def numbered(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (n,) in ascending order, the number of each among the different ones, and the same
    numbers in the order of ids."""
    ordered, order = ids.sort(stable=True)
    numbers = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0)).cumsum(0)
    return ordered, numbers, torch.empty_like(numbers).index_copy_(0, order, numbers)


@t.compiled
def ngram_adam(
    rows, second, learned_at, ids, sums, sequences, step, step_size, lr_decay, beta, two_steps_beta
) -> tuple[Tensor, Tensor]:
    """Make a step of Adam on the rows of ids (n,), without a momentum and with one second moment
    for each row. Gradients are sums (n, C) over `sequences`, and are divided by them. Return the
    new rows (n, C) and mean squares (n,). `second` (rows,) is the mean square, and `learned_at`
    (rows,) the number of steps after which it was last updated: what it has missed, it makes up
    for. Where an update shrinks a weight, the weight decays, too: see cautious.py.

    It writes nothing in place. Inductor may copy what a kernel writes to into locked host memory,
    to the end of the run: 17 GB on each of 8 ranks."""
    old, grads = rows[ids].to(second.dtype), sums.to(second.dtype) / sequences
    missed = two_steps_beta ** ((step - learned_at[ids]).to(second.dtype) / 2)
    square = second[ids] * missed + (1 - beta) * grads.square().mean(-1)
    update = step_size * grads / (square.sqrt() + 1e-10)[:, None]
    return (old - update - lr_decay * old * (update * old > 0)).to(rows.dtype), square


def pieces_beside(path: Path) -> dict[int, dict[int, Path]]:
    """Return the pieces of n-gram tables beside a checkpoint: by the number of ranks that saved
    them, and then by rank. Only regular files count."""
    name = re.compile(re.escape(path.name) + r"\.(0|[1-9][0-9]{0,3})of([1-9][0-9]{0,3})")
    sets = {}
    for file in path.parent.iterdir():
        found = name.fullmatch(file.name)
        if found and int(found[1]) < int(found[2]) and file.is_file():
            sets.setdefault(int(found[2]), {})[int(found[1])] = file
    return sets


def find_pieces(path: Path) -> list[Path]:
    """Return the pieces of a checkpoint's n-gram table, by rank. Incomplete sets of another number
    of ranks are ignored. UserError if no set is complete, or more than one."""
    sets = pieces_beside(path)
    complete = [parts for parts, pieces in sets.items() if len(pieces) == parts]
    if len(complete) == 1:
        return [piece for rank, piece in sorted(sets[complete[0]].items())]
    if complete:
        complete.sort(key=lambda parts: sets[parts][0].stat().st_mtime)
        *older, newest = (f"{path.name}.*of{parts}" for parts in complete)
        older = " ".join(older)
        found = f"{path} has more than one n-gram table, {newest} and {older}"
        raise UserError(f"{found}: remove the older pieces, {older}")
    if not sets:
        names = f"{path.name}.0ofN, {path.name}.1ofN ... of N ranks"
        raise UserError(f"{path} lacks its n-gram table: copy the pieces {names}, too")
    parts = min(sets, key=lambda parts: parts - len(sets[parts]))  # lacks the fewest pieces
    missing = [f"{path.name}.{rank}of{parts}" for rank in range(parts) if rank not in sets[parts]]
    raise UserError(f"{path} lacks {' '.join(missing)}: copy all pieces of its n-gram table, too")


def remove_pieces(path: Path) -> None:
    """Remove a checkpoint and its pieces, of any number of ranks, if there are some: the checkpoint
    first, because none shall be there without its pieces."""
    path.unlink(missing_ok=True)
    for pieces in pieces_beside(path).values():
        for piece in pieces.values():
            piece.unlink()


class NgramTable:
    """The table of bigrams and trigrams. Each rank owns `size` rows of it, and looks others up on
    their owners. A copy, or a gradient, of the whole table would not fit a GPU: gradients are of
    the rows that a sequence reads. It is no parameter of the model, and is saved in pieces.

    Each step sends the gradients of the rows that it reads to their owners, where they wait for the
    step in which the table learns. All sizes depend on the number of tokens alone, so the host
    never waits for a GPU. A row that nothing has read is zero, and does not move.
    """

    CHUNK = 2**16  # rows that are saved at once

    def __init__(self, hp):
        self.hp = hp
        self.rows = None  # (size + 1, C), of which the last one stands for no row

    def share(self, rank: int, parts: int, device: torch.device, dtype: torch.dtype) -> None:
        """Make this rank's part, of zeros. UserError if it does not fit."""
        self.rank, self.parts = rank, parts
        self.size = -(-self.hp.ngram_rows // parts)
        if device.type == "cuda":
            free = 0.9 * torch.cuda.mem_get_info(device)[0]
            row_bytes = self.row_bytes(dtype)
            if self.size * row_bytes > free:
                found = f"--ngram_rows {self.hp.ngram_rows} needs {self.size * row_bytes / 1e9:.1f}"
                fits = int(free / row_bytes / 4) * parts // 2 * 2  # the rest takes 25 GB
                raise UserError(f"{found} GB on each of {parts} ranks: try --ngram_rows {fits}")
        self.rows = torch.zeros(self.size + 1, self.hp.model_dim, device=device, dtype=dtype)
        precise = torch.promote_types(dtype, torch.float32)
        self.second = self.rows.new_zeros(self.size + 1, dtype=precise)
        self.learned_at = self.rows.new_zeros(self.size + 1, dtype=torch.int32)
        self.clear()

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a row, with its second moment and the step when it learned."""
        return self.hp.model_dim * dtype.itemsize + max(dtype.itemsize, 4) + 4

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

    def learn(self, now) -> None:
        """Update the rows that have gradients, by their sum over steps and mean over sequences."""
        ids, grads = (torch.cat(parts) for parts in zip(*self.waiting, strict=True))
        self.waiting = []
        self.updates += 1
        # The sum of a row's gradients, in a fixed order. There may be fewer rows than ids. The sums
        # have the name of the joined gradients, whose memory is freed.
        ordered, numbers, number = numbered(ids)
        distinct = torch.full_like(ids, self.size).index_copy_(0, numbers, ordered)
        grads = torch.ops.aten.embedding_dense_backward(grads, number, len(ids), -1, False)
        lr, pairs = self.hp.ngram_lr * now.lr, now.ngram_cycle / 2
        betas = self.hp.ngram_beta2**pairs, self.hp.ngram_beta2
        step_size = lr * (1 - betas[0] ** self.updates) ** 0.5
        lr_decay = lr * lr * self.hp.ngram_decay * pairs
        rates = [self.second.new_full((), rate) for rate in (step_size, lr_decay, *betas)]
        step = self.learned_at.new_full((), now.step + 1)
        state = self.rows, self.second, self.learned_at
        # Of another size in each cycle of other sequences.
        for tensor in (distinct, grads) if t.compilation.allowed else ():
            torch._dynamo.mark_dynamic(tensor, 0)
        sequences = self.hp.batch_seqs
        new, square = ngram_adam(*state, distinct, grads, sequences, step, *rates)
        self.rows.index_copy_(0, distinct, new)
        self.second.index_copy_(0, distinct, square)
        self.learned_at.index_fill_(0, distinct, now.step + 1)

    def wait_for_ranks(self) -> None:
        """Wait until all ranks call this."""
        t.all_reduce_(torch.zeros(1, device=self.rows.device)).item()

    def save(self, path: Path) -> None:
        """Save this rank's piece beside a checkpoint, on all ranks: PATH.0of8 and so on. The names
        of its entries are a first row of the table and a number of rows. No rank begins before what
        another save has left is removed, and none goes on before all pieces are saved."""
        if self.rank == 0:
            remove_pieces(path)
        self.wait_for_ranks()
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
        self.wait_for_ranks()

    def load(self, path: Path | None, weights_only: bool) -> None:
        """Load this rank's rows from the pieces of any number of ranks; without a path, zeros. With
        weights_only, begin the optimizer anew. UserError if a piece is missing or damaged, as by
        find_pieces."""
        self.clear()
        if path is None:
            return
        pieces, saved = find_pieces(path), 0
        begin, end = self.rank * self.size, (self.rank + 1) * self.size
        state = self.rows, self.second, self.learned_at
        try:
            for piece in pieces:
                with zipfile.ZipFile(piece) as archive:
                    for name in archive.namelist():
                        with archive.open(name) as file:
                            self.load_entry(name, file, begin, end, state)
                        if name != "waiting":
                            saved += int(name.split()[1])
        except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            raise UserError(f"{piece} is not an intact piece ({type(error).__name__})") from error
        # In another number of rows, hashes would find those of other n-grams.
        if saved != -(-self.hp.ngram_rows // len(pieces)) * len(pieces):
            reason = f"{path} has an n-gram table of {saved} rows, or a few less"
            raise UserError(f"{reason}, not of --ngram_rows {self.hp.ngram_rows}")
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


@torch.no_grad()
def table_adam(bank, lr: float, now, hp, betas: tuple, decay: float) -> None:
    """Step by cautious.py's Adam when the n-gram table learns. In between, gradients wait in their
    sum. Where it learns at each fourth step, betas and decay are those of two steps."""
    if "waiting" in bank.state:
        bank.shard_grad.add_(bank.state["waiting"])
    if not now.ngrams:
        bank.state["waiting"] = bank.shard_grad.clone()
        return
    if "waiting" in bank.state:
        bank.state["waiting"].zero_()
    pairs = now.ngram_cycle / 2
    betas = tuple(beta**pairs for beta in betas)
    cautious.adam(bank, lr, betas, hp.adam_eps, decay * pairs)
