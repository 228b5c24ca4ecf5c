"""Turn text into token shards that train_gpt.py reads.

    pip install -r data/requirements.txt
    python data/tokenize_text.py texts/ 'more/*.jsonl' --out data/mine --name mine

An input is a file, a folder (searched recursively, in sorted order) or a glob pattern of these:

    .txt       one document; with --blank_line_documents, one per block between blank lines
    .jsonl     one document per line, in the field `text`, or in the one that --field names
    .parquet   one document per row, in such a column (needs pyarrow)
    .bin       tokens as uint16 without a header, as nanoGPT writes them
    .npy       tokens as a numpy array of integers, as build-nanogpt writes them

Files of tokens must be named, by their path or a pattern: a folder's are left alone. They need only
the header, so their tokens are taken as they are, before all text:

    python data/tokenize_text.py train.bin --val val.bin --out data/mine --name mine

Text becomes GPT-2's tokens, and each document begins with token 50256. With --end_of_text N, it
becomes GPT-2's first N tokens, and token N begins a document. With --tokenizer FILE, it becomes
those of a Hugging Face tokenizer.json, whose token --end_of_text N begins a document. --tokenizer
none says that the tokens of .bin files have no text, as those of shakespeare_char.

Documents keep their order: shuffle them first if neighbours are alike. "<|endoftext|>" in a
document is ordinary text; with --split_at "<|endoftext|>", documents also end there. Nulls and
documents of white space only are left out. The number of workers does not change the shards.
Memory holds one train and one validation shard, and for each worker a few batches or the longest
document (for GPT-2's tokens, a .txt that is one is read in pieces).

DIR is a new or empty folder, which appears when all shards are whole; until then, DIR.unfinished
holds them. With --overwrite, DIR may hold shards of the same NAME: the new ones replace them.
"""

import argparse
import contextlib
import fcntl
import functools
import glob
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path
from threading import Thread
from typing import NoReturn, TextIO

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out
try:
    import tiktoken  # noqa: F401 (GPT-2's tokens need it)

    from tokenizer import GPT2_TOKENS, tokenizer_of
except ModuleNotFoundError as error:
    sys.exit(f"tokenize_text.py: error: {error}: pip install -r data/requirements.txt")

HERE = Path(__file__).resolve().parents[1]  # the project
SUFFIXES = ".txt", ".jsonl", ".parquet"  # of text
TOKENS = ".bin", ".npy"  # of tokens without a shard's header
MAGIC = 20240520  # begins a shard's header
NPY = b"\x93NUMPY"  # begins a .npy
MADE = "made_by_tokenize_text"  # the file that marks a folder of unfinished shards as ours
PIECE = 2**18  # characters that are encoded at once; longer documents are cut
BATCH = 2**20  # characters that a worker gets at once
SHORTEST = 130  # tokens that a run needs to train, or to validate: a block of 128 and its targets
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
unfinished_folders = []  # that this process is writing

tokenizer = functools.cache(tokenizer_of)  # once per process


def fail(message: object) -> NoReturn:
    """End the program with one line on standard error and status 1."""
    sys.exit("tokenize_text.py: error: " + " ".join(str(message).split()))


# -----------------------------------------------------------------------------
# Input: files, and the documents in them


def find_files(pattern: str) -> list[str]:
    """Return the files of an INPUT, sorted; in a folder, those of text."""
    files = []
    for path in [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern)):
        if os.path.isdir(path):
            inside = sorted(glob.glob(f"{glob.escape(path)}/**", recursive=True))
            files += [p for p in inside if p.lower().endswith(SUFFIXES) and os.path.isfile(p)]
        elif not path.lower().endswith(SUFFIXES + TOKENS):
            fail(f"{path}: unknown extension, expected one of {', '.join(SUFFIXES + TOKENS)}")
        elif not os.path.isfile(path):  # reading a pipe may never end
            fail(f"{path}: not a regular file: write the text or the tokens to one first")
        else:
            files.append(path)
    if not files:
        fail(f"no {', '.join(SUFFIXES)} or named {' or '.join(TOKENS)} file matches {pattern}")
    return files


def read_pieces(path: str, args: argparse.Namespace) -> Iterator[tuple[bool, str]]:
    """Yield a file's text in pieces, and for each whether it begins a document. The piece of a
    document without text is empty."""
    try:
        for document in read_documents(path, args):
            begins = True
            for piece in cut(document) if args.tokenizer == "gpt2" else [document.read()]:
                if not begins or piece.strip():  # blank pieces before a document are left out
                    yield begins, piece
                    begins = False
            if begins:
                yield True, ""
    except UnicodeDecodeError:
        with open(path, encoding="utf-8", errors="surrogateescape", newline="\n") as file:
            bad = (i for i, line in enumerate(file, 1) if re.search("[\udc80-\udcff]", line))
            fail(f"{path}:{next(bad)}: not UTF-8: convert the file, for example with iconv")


def read_documents(path: str, args: argparse.Namespace) -> Iterator[TextIO]:
    """Yield the documents of a file. Each must be read before the next one is asked for."""
    for document in read_texts(path, args):
        if args.split_at:
            yield from map(io.StringIO, split_at_marks(document, args.split_at))
        else:
            yield document


def read_texts(path: str, args: argparse.Namespace) -> Iterator[TextIO]:
    """Yield the documents of a file, or the texts that --split_at splits."""
    if path.lower().endswith(".parquet"):
        yield from map(io.StringIO, read_parquet(path, args.field))
        return
    with open(path, encoding="utf-8-sig", newline="\n") as file:
        if path.lower().endswith(".jsonl"):
            yield from map(io.StringIO, read_jsonl(path, file, args.field))
        elif args.blank_line_documents:
            for is_blank, lines in itertools.groupby(file, str.isspace):
                if not is_blank:
                    yield io.StringIO("".join(lines).rstrip("\r\n"))
        else:
            yield file


def split_at_marks(file: TextIO, mark: str) -> Iterator[str]:
    """Yield the texts between marks, without line breaks at their ends."""
    parts, tail = [], ""  # of the text so far
    while piece := file.read(PIECE):
        *ends, tail = (tail + piece).split(mark)
        for end in ends:
            yield "".join([*parts, end]).strip("\r\n")
            parts = []
        parts.append(tail[: -len(mark)])
        tail = tail[-len(mark) :]  # a mark may begin here, and end in the next piece
    yield "".join([*parts, tail]).strip("\r\n")


def read_jsonl(path: str, file: TextIO, field: str) -> Iterator[str]:
    """Yield a field of each line that is not blank."""
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            fail(f"{path}:{number}: not JSON, or too deep: repair or delete the line")
        yield text_of(row, field, f"{path}:{number}")


def read_parquet(path: str, field: str) -> Iterator[str]:
    """Yield a column of each row."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        fail(f"{path}: to read it, pip install pyarrow")
    try:
        with ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None
            batches = file.iter_batches(batch_size=256, columns=columns)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows, 1):
                yield text_of(row, field, f"{path}: row {number}")
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        fail(f"{path}: not a whole .parquet of UTF-8 text ({error}): fetch or make it again")


def text_of(row: object, field: str, where: str) -> str:
    """Return the document in a line of a .jsonl or a row of a .parquet; for a null, ""."""
    if not isinstance(row, dict) or field not in row:
        fail(f"{where}: no field `{field}`: name the one that holds the text with --field")
    if not isinstance(row[field], str | None):
        kind = type(row[field]).__name__
        fail(f"{where}: `{field}` is of type {kind}, expected a string: repair or delete it")
    return row[field] or ""


def read_tokens(path: str) -> Iterator[np.ndarray]:
    """Yield the tokens of a file that holds only them, uint16, in pieces."""
    with open(path, "rb") as file:
        begins = file.read(len(NPY))
        size = file.seek(0, os.SEEK_END)
    if int.from_bytes(begins[:4], "little") == MAGIC:
        fail(f"{path}: is a shard already: give it to --train_files or --val_files")
    is_npy = begins == NPY or path.lower().endswith(".npy")
    if not size or (size % 2 and not is_npy):
        fail(f"{path}: has {size} bytes, expected uint16: copy or make it again")
    try:
        if is_npy:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            tokens = np.memmap(path, "<u2", mode="r")
    except ValueError:
        fail(f"{path}: not a whole .npy: copy it again, or name it .bin if it is only uint16")
    except OSError as error:  # as of some network disks
        fail(f"{path}: cannot be mapped into memory ({error.strerror}): copy it to another disk")
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        found = f"{tokens.dtype} of {tokens.ndim} dimensions"
        fail(f"{path}: holds {found}, expected integers of one dimension: make it again")
    lower, upper = (tokens[half:PIECE:2].max(initial=0) for half in (0, 1))
    if not is_npy and upper < lower / 4096:  # they are halves of longer numbers
        remedy = f"np.save('new.npy', np.fromfile({os.path.basename(path)!r}, 'uint32'))"
        fail(f"{path}: seems to hold uint32, not uint16: make a .npy, which says so: {remedy}")
    for start in range(0, len(tokens), PIECE):
        piece = tokens[start : start + PIECE]
        if piece.min() < 0 or piece.max() >= 2**16:
            fail(f"{path}: has ids from {piece.min()} to {piece.max()}: shards hold 0 to 65535")
        yield piece.astype("<u2")


def cut(document: TextIO) -> Iterator[str]:
    """Yield a document in pieces of at most 2 * PIECE characters, cut between a word and a space.

    These cuts do not change the tokens: GPT-2 joins a space to the word after it, never to the one
    before. Where PIECE characters hold no such place, the cut is at their end, to limit memory and
    because tiktoken fails on a million white-space characters in a row.
    """
    text = document.read(PIECE)
    while more := document.read(PIECE):
        words = re.match(r".*\S(?=[ \n])", text, re.DOTALL)
        end = words.end() if words else len(text)
        yield text[:end]
        text = text[end:] + more
    yield text


# -----------------------------------------------------------------------------
# Tokens: batches of text are encoded in parallel and keep their order

Batch = list[tuple[str, bool, str]]  # "train" or "val", whether a document begins, its piece


def make_batches(split_of: dict[str, str], args: argparse.Namespace) -> Iterator[Batch]:
    """Yield the pieces of the files in order, BATCH characters or a little more at a time.

    A share of the documents in "train" files, --val_fraction, becomes validation: the first one and
    others at even distances, so that a few documents are enough to have some. `share_the_text`
    mends it where they are too few. The last lines say how many had no text, and how often a mark
    between documents was read as text.
    """
    batch, size, documents, blank, marks = [], 0, 0, 0, 0
    for path, split_of_file in split_of.items():
        mark = tokenizer(args.tokenizer, args.end_of_text).mark
        for begins, piece in read_pieces(path, args):
            if not piece:
                blank += 1
                continue
            marks += piece.count(mark)
            if begins:
                split = split_of_file
                if split == "train":
                    before, documents = math.ceil(documents * args.val_fraction), documents + 1
                    is_val = math.ceil(documents * args.val_fraction) > before
                    split = "val" if is_val else "train"
            batch.append((split, begins, piece))
            size += len(piece)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch
    if blank:
        tqdm.write(f"tokenize_text.py: left out, without text: {blank} documents", sys.stderr)
    if marks:
        remedy = f"--split_at {shlex.quote(mark)} makes documents of the texts between them"
        tqdm.write(f"tokenize_text.py: {mark} was read as text {marks} times: {remedy}", sys.stderr)


def encode(batch: Batch, args: argparse.Namespace) -> dict[str, np.ndarray]:
    """Return the tokens of each split's text, uint16."""
    tokens = {"val": [], "train": []}
    for split, begins, piece in batch:
        ids = tokenizer(args.tokenizer, args.end_of_text).encode(piece)
        tokens[split] += [args.end_of_text] * begins + ids
    if max(map(max, filter(None, tokens.values())), default=0) >= 2**16:
        fail(f"{args.tokenizer} has ids above 65535: shards hold uint16, so use a smaller one")
    return {split: np.array(ids, "<u2") for split, ids in tokens.items()}


def begin_worker() -> None:
    """Leave signals of the terminal to the parent, and end when it has ended, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """Wait for the end of the parent, then end this process."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode_all(batches: Iterable[Batch], args: argparse.Namespace) -> Iterator[dict]:
    """Yield encode(batch, args) of each batch, in order, from --workers processes."""
    pool = None
    try:
        if args.workers > 1:
            pool = ProcessPoolExecutor(args.workers, initializer=begin_worker)
    except (ImportError, OSError) as error:  # as in a container without semaphores
        tqdm.write(f"tokenize_text.py: only one process can encode here ({error})", sys.stderr)
    if pool is None:
        yield from (encode(batch, args) for batch in batches)
        return
    with pool:
        pending = deque()
        for batch in batches:
            pending.append(pool.submit(encode, batch, args))
            if len(pending) > 2 * args.workers:  # all are busy: do not read ahead
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


# -----------------------------------------------------------------------------
# Output: shards


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write 256 little-endian int32 (20240520, version 1, n, zeros), then n uint16."""
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, 1, len(tokens)
    try:
        with path.open("wb") as file:
            file.write(header.data)
            file.write(tokens.data)
    except OSError as error:
        fail(f"could not write {path}: is the disk full? ({error})")


@contextlib.contextmanager
def made_at_once(out: Path, name: str, overwrite: bool) -> Iterator[Path]:
    """Yield a folder in which to write the shards of a name. At the end it becomes `out`, in one
    rename; an error leaves nothing. An `out` of old shards is moved away just before."""
    whole = out.resolve()  # a folder, also if `out` is a link to it
    old = sorted(whole.iterdir()) if whole.is_dir() else []
    shard = re.compile(re.escape(name) + r"_(train|val)_\d{6}\.bin")
    if others := [path.name for path in old if not shard.fullmatch(path.name)]:
        fail(f"--out {out}: the folder holds {others[0]}: name a new folder")
    if old and not overwrite:
        fail(f"{out / old[0].name} already exists: choose another --out, or add --overwrite")
    if whole.exists() and (not whole.is_dir() or os.path.ismount(whole)):
        fail(f"--out {out}: cannot be replaced: name a new folder")
    unfinished = whole.with_name(f"{whole.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        lock = os.open(unfinished, os.O_RDONLY)
    except OSError as error:
        fail(f"--out {out}: cannot write there ({error.strerror}): name another folder")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        fail(f"another process is writing {unfinished}: wait for it, or choose another --out")
    except OSError as error:
        reason = f"{unfinished} cannot be locked ({error.strerror}): let no other process write it"
        print(f"tokenize_text.py: {reason}", file=sys.stderr)
    if not (unfinished / MADE).exists() and any(unfinished.iterdir()):
        fail(f"{unfinished} is not of tokenize_text.py: move it away, or choose another --out")
    unfinished_folders.append(unfinished)
    try:
        (unfinished / MADE).touch()
        empty(unfinished)  # of what a process that was killed has left
        (unfinished / "new").mkdir()
        yield unfinished / "new"
        if old:
            whole.rename(unfinished / "old")
        (unfinished / "new").rename(whole)
    finally:
        remove(unfinished)
        unfinished_folders.remove(unfinished)
        os.close(lock)


def empty(unfinished: Path) -> None:
    """Delete the shards in a folder of unfinished ones, and nothing else."""
    for name in ("new", "old"):
        shutil.rmtree(unfinished / name, ignore_errors=True)


def remove(unfinished: Path) -> None:
    """Delete a folder of unfinished shards. It stays if it holds something else."""
    empty(unfinished)
    with contextlib.suppress(OSError):
        (unfinished / MADE).unlink()
        unfinished.rmdir()


class Shards:
    """Gathers the tokens of a split, and writes a shard whenever there are enough."""

    def __init__(self, folder: Path, stem: str, first_number: int, args: argparse.Namespace):
        self.folder, self.stem, self.first_number = folder, stem, first_number
        self.buffer, self.filled = np.empty(args.shard_size, "<u2"), 0
        self.end_of_text, self.largest = args.end_of_text, 0  # token so far
        self.written = {}  # file name -> tokens
        self.documents = 0

    def add(self, tokens: np.ndarray) -> None:
        self.documents += np.count_nonzero(tokens == self.end_of_text)
        self.largest = max(self.largest, tokens.max(initial=0))
        # A document continues in the next shard if one is full, as in FineWeb: each shard but the
        # last holds shard_size tokens.
        while len(tokens):
            part, tokens = np.split(tokens, [len(self.buffer) - self.filled])
            self.buffer[self.filled :][: len(part)] = part
            self.filled += len(part)
            if self.filled == len(self.buffer):
                self.flush()

    def flush(self) -> None:
        """Write the tokens that are left, if any."""
        if self.filled:
            name = f"{self.stem}_{self.first_number + len(self.written):06}.bin"
            write_shard(self.folder / name, self.buffer[: self.filled])
            self.written[name], self.filled = self.filled, 0


# -----------------------------------------------------------------------------
# The command line


def share(text: str) -> Fraction:
    """Return the value of --val_fraction, exactly: 1/12 takes every twelfth document."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be from 0 to less than 1, like 0.1 or 1/12")
    return value


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line. A bad value ends the program with one line and status 2."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = lambda message: parser.exit(2, f"tokenize_text.py: error: {message}\n")
    add = parser.add_argument
    add("inputs", nargs="+", metavar="INPUT", help="file, folder or pattern")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the shards")
    add("--name", default="text", help="shards are NAME_train_000001.bin and so on [text]")
    add("--val", nargs="+", default=[], metavar="INPUT", help="input for validation")
    add(
        "--val_fraction",
        type=share,
        metavar="F",
        help="share of the other documents for validation [0.05; 0 with --val]",
    )
    splits = parser.add_mutually_exclusive_group().add_argument
    splits("--blank_line_documents", action="store_true", help="split a .txt at blank lines")
    splits("--split_at", default="", metavar="TEXT", help="split a document at each such mark")
    add("--field", default="text", metavar="NAME", help="key or column of the documents [text]")
    add("--shard_size", type=int, default=10**8, metavar="N", help="tokens in a shard [100000000]")
    # A job may have fewer cores than its machine; macOS does not say so.
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    cores = min(cores, 256)
    add("--workers", type=int, default=cores, metavar="N", help="processes [all cores]")
    help_ = "gpt2, the path of a tokenizer.json, or none [gpt2]"
    add("--tokenizer", default="gpt2", metavar="FILE", help=help_)
    help_ = "token that begins a document; of GPT-2's, only smaller ones are used [50256]"
    add("--end_of_text", type=int, metavar="N", help=help_)
    add("--overwrite", action="store_true", help="replace the shards in DIR")
    words = sys.argv[1:] if argv is None else argv
    for word in words:
        if re.search("[\ud800-\udfff]", word):
            parser.error(f"{word!a} is not UTF-8 text")
        if re.fullmatch(r"--\w+=--", word):  # argparse drops --
            parser.error(f"{word}: -- is not a value of a flag")
    args = parser.parse_args(words)
    if args.val_fraction is None:
        args.val_fraction = Fraction(0) if args.val else Fraction("0.05")
    if args.end_of_text is None and args.tokenizer not in ("gpt2", "none"):
        remedy = "name its token that begins a document with --end_of_text N"
        parser.error(f"--tokenizer {args.tokenizer}: {remedy}")
    if args.end_of_text is None:
        args.end_of_text = GPT2_TOKENS
    lowest, highest = (256, GPT2_TOKENS) if args.tokenizer == "gpt2" else (0, 2**16 - 1)
    if not lowest <= args.end_of_text <= highest:
        parser.error(f"--end_of_text {args.end_of_text}: must be from {lowest} to {highest}")
    if not 1 <= args.shard_size < 2**31:
        parser.error(f"--shard_size {args.shard_size}: must be from 1 to {2**31 - 1}")
    if not 1 <= args.workers <= 256:
        parser.error(f"--workers {args.workers}: must be from 1 to 256")
    if not re.fullmatch(r"[\w.-]+", args.name):
        parser.error(f"--name {args.name}: must be of letters, digits, '_', '-' and '.'")
    return args


def tokenize(args: argparse.Namespace) -> None:
    """Write all shards of --out, or none."""
    # A file of --val is not training text as well, where INPUT is the folder that holds it.
    split_of = {os.path.abspath(f): "train" for i in args.inputs for f in find_files(i)}
    split_of |= {os.path.abspath(f): "val" for i in args.val for f in find_files(i)}
    token_files = [path for path in split_of if path.lower().endswith(TOKENS)]
    texts = {path: split for path, split in split_of.items() if path not in token_files}
    try:
        named = tokenizer(args.tokenizer, args.end_of_text)
    except ValueError as error:
        fail(error)
    if texts and named is None:
        fail(f"{[*texts][0]}: is text, and --tokenizer none is for the tokens of .bin files")
    with made_at_once(args.out, args.name, args.overwrite) as folder:
        val = Shards(folder, f"{args.name}_val", 0, args)
        train = Shards(folder, f"{args.name}_train", 1, args)
        batches = make_batches(texts, args)
        with tqdm(unit=" tokens", unit_scale=True, disable=None, leave=False) as bar:
            for path in token_files:
                shards = val if split_of[path] == "val" else train
                for tokens in read_tokens(path):
                    shards.add(tokens)
                    bar.update(len(tokens))
                if args.tokenizer == "gpt2" and shards.largest > args.end_of_text:
                    remedy = "if they are not GPT-2's, say so with --tokenizer none"
                    fail(f"{path}: token {shards.largest} is above --end_of_text: {remedy}")
            for tokens in encode_all(batches, args):
                val.add(tokens["val"])
                train.add(tokens["train"])
                bar.update(len(tokens["val"]) + len(tokens["train"]))
        if not any(shards.filled or shards.written for shards in (val, train)):
            fail("no documents: there is nothing but white space in the input")
        may_be_cut = args.val_fraction and not args.val and not token_files
        is_cut = may_be_cut and share_the_text(val, train, args.val_fraction)
        if not train.filled and not train.written:
            remedy = f"add text, a run needs {2 * SHORTEST} tokens"
            remedy += ", or try --blank_line_documents, --split_at or --val_fraction 0"
            fail(f"no training text: validation takes all documents ({val.documents}); {remedy}")
        val.flush()
        train.flush()

    for name, count in (val.written | train.written).items():
        print(f"{args.out / name}: {count} tokens")
    if is_cut:
        found = f"documents: {train.documents + val.documents}, too few to choose from"
        print(f"{found}: the last {sum(val.written.values())} tokens are for validation")
    else:
        print(f"documents: {train.documents} for training, {val.documents} for validation")
    if not val.written:
        print("no validation text: a run validates on the training text")
    vocab_size = max(train.largest + 1, val.largest + 1, named.vocab_size if named else 0)
    words = ["--tokenizer", args.tokenizer] if args.tokenizer != "gpt2" else []
    words += ["--vocab_size", str(vocab_size), "--end_of_text", str(args.end_of_text)]
    print(command_of(args.out / args.name, train.written, val.written or train.written, words))


def share_the_text(val: Shards, train: Shards, val_fraction: Fraction) -> bool:
    """If there are so few documents that a split is too short for a run, and if all of the text is
    still in memory: let its end be validation, a share of the tokens or enough of them. Return
    whether it is."""
    if val.written or train.written or min(val.filled, train.filled) >= SHORTEST:
        return False
    tokens = np.concatenate([split.buffer[: split.filled] for split in (val, train)])
    size = max(SHORTEST, math.ceil(len(tokens) * val_fraction))
    if len(tokens) - size < SHORTEST:
        return False
    for split, part in ((train, tokens[:-size]), (val, tokens[-size:])):
        split.filled = split.documents = 0
        split.add(part)
    return True


def command_of(stem: Path, train: dict[str, int], val: dict[str, int], flags: list[str]) -> str:
    """Return a command that trains the demo on shards, given the tokens of each by its name: with
    the demo's batches and validation, or with as many tokens as a shard has. `flags` say whose
    tokens they are. The command is for a shell in the current folder."""
    for kind, shards in (("training", train), ("validation", val)):
        if max(shards.values()) < SHORTEST:
            found = f"its longest shard has {max(shards.values())} tokens, a run needs {SHORTEST}"
            return f"the {kind} text is too short: {found}"
    run_sh = "./run.sh" if Path.cwd() == HERE else f"{HERE}/run.sh"
    pattern = glob.escape(str(stem))  # train_gpt.py finds shards by glob
    words = [run_sh, "--record", "demo", "--train_files", f"{pattern}_train_*.bin"]
    words += flags
    fitting = max(train.values()) - 2
    sequences, length = 4, 256
    if fitting < sequences * length:
        length = min(fitting // 128 * 128, length)
        sequences = fitting // length
        words += ["--seq_len", str(length), "--batch_seqs", str(sequences)]
    if sum((tokens - 2) // (sequences * length) for tokens in train.values()) < 320:  # its steps
        words += ["--epochs", "0"]
    fitting = max(val.values()) - 2
    length = min(fitting // 128 * 128, 1024)
    tokens = min(fitting // length * length, 16384)
    words += ["--val_files", f"{pattern}_{'train' if val is train else 'val'}_*.bin"]
    words += ["--val_seq_len", str(length), "--val_tokens", str(tokens)]
    return shlex.join(words)


def stop(number: int, frame) -> NoReturn:
    """End the program after a signal, and leave no folder. An exception would be lost where Python
    starts a worker. The workers end with the program."""
    for folder in unfinished_folders:
        remove(folder)
    text = f"\ntokenize_text.py: stopped by {signal.Signals(number).name}\n"
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
    os._exit(128 + number)


def main(argv: list[str] | None = None) -> None:
    """Tokenize. An error is one line and status 1 or 2; after signal n, the status is 128 + n."""
    args = parse_args(argv)
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, stop)
    try:
        tokenize(args)
    except BrokenExecutor:
        fail("a worker was killed: is the memory full? Try fewer --workers")
    except OSError as error:
        fail(error)


if __name__ == "__main__":
    main()
