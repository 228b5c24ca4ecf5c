"""Download FineWeb as GPT-2 tokens, in shards of 10^8 tokens (200 MB), from the Hugging Face hub.

    python cached_fineweb.py          # validation and 7 train shards: the default record
    python cached_fineweb.py 10       # 10 train shards: the records of 2024; there are 103
    python cached_fineweb.py --edu    # from FineWeb-Edu, 99 train shards, in data/finewebedu10B
    python cached_fineweb.py --100B   # from the larger sample, 1030, in data/fineweb100B
    python cached_fineweb.py --verify 'data/fineweb10B/*.bin'  # check downloaded shards

A shard is downloaded into NAME.part, where an interrupted download continues. It gets its name when
its checksum and its header are right. SHA256SUMS lists the complete shards, in sha256sum's format.
--verify compares shards with the SHA256SUMS in their folder, without a network.
"""

import argparse
import fcntl
import glob
import hashlib
import os
import re
import shutil
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

DATASETS = {  # repository on the hub, prefix of its file names, number of train shards
    "10B": ("kjj0/fineweb10B-gpt2", "fineweb", 103),
    "100B": ("kjj0/fineweb100B-gpt2", "fineweb", 1030),
    "edu": ("kjj0/finewebedu10B-gpt2", "finewebedu", 99),
}
DATA = Path(__file__).resolve().parent / "data"
MANIFEST = "SHA256SUMS"
WORKERS = 8  # shards downloaded at a time
# Bytes of a request. A kill loses at most one request's bytes for each worker. The whole 10B set
# takes fewer than the 3000 requests in 5 minutes that the hub allows without a token.
BLOCK_BYTES = 16 * 2**20


class UserError(Exception):
    """What is wrong, where, and what to do about it: one line for people."""


# -----------------------------------------------------------------------------
# Local files


def is_shard(path: Path) -> bool:
    """Say whether a file exists, has a shard's header, and is as long as the header says."""
    try:
        with path.open("rb") as file:
            magic, version, count = struct.unpack("<3i", file.read(12).ljust(12, b"\0"))
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    return (magic, version, size) == (20240520, 1, 1024 + 2 * count)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> dict[str, str]:
    """Return {file name: sha256} from a folder's SHA256SUMS; {} if there is none."""
    path = folder / MANIFEST
    text = path.read_text(errors="replace") if path.exists() else ""
    return {name: sha for sha, name in re.findall(r"^([0-9a-f]{64}) [ *](.+)$", text, re.M)}


def write_manifest(folder: Path, sums: dict[str, str]) -> None:
    staged = folder / f"{MANIFEST}.part"
    staged.write_text("".join(f"{sha}  {name}\n" for name, sha in sorted(sums.items())))
    staged.replace(folder / MANIFEST)


def lock(folder: Path) -> None:
    """Lock the folder while this process lives: two calls would append to the same .part."""
    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another call is downloading into {folder}: wait for it") from None
    except OSError:
        pass  # some network file systems cannot lock a folder


# -----------------------------------------------------------------------------
# Files on the hub


@contextmanager
def asking(repository: str):
    """Turn any error of the hub's library or the network into a UserError."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    where = f"{repository} on {constants.ENDPOINT}"
    try:
        yield
    except OfflineModeIsEnabled:
        raise UserError(f"cannot ask for {where}: HF_HUB_OFFLINE is set; unset it") from None
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, FileNotFoundError) or status in (401, 403, 404):
            remedy = "see HF_ENDPOINT and HF_TOKEN"
            raise UserError(f"there is no {where}, or not for you: {remedy}") from None
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        remedy = "check the network and start again; what is here stays"
        raise UserError(f"cannot reach {where}: {reason}: {remedy}") from None


class Hub:
    """One dataset on the hub.

    Files are read in blocks through HfFileSystem, which can start anywhere in a file.
    hf_hub_download (in huggingface-hub 2.4) deletes a partial file when it fails, and starts again.
    """

    def __init__(self, repository: str):
        from huggingface_hub import HfFileSystem
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # no warnings about retries
        self.repository = repository
        self.root = f"datasets/{repository}"
        with asking(repository):
            self.files = HfFileSystem()
            listing = self.files.ls(self.root, detail=True, expand_info=False)
        self.listing = {Path(entry["name"]).name: entry for entry in listing}

    def find(self, name: str) -> tuple[int, str]:
        """Return a file's size in bytes and its sha256, as the hub lists them."""
        entry = self.listing.get(name)
        if entry is None or not entry.get("lfs"):
            raise UserError(f"{self.repository} lists no {name} with a checksum: ask for fewer")
        return entry["size"], entry["lfs"].sha256

    def fetch(self, name: str, size: int, path: Path, advance) -> None:
        """Append to `path` until it has `size` bytes; call advance(n) when n bytes have arrived."""
        with asking(self.repository):
            source = self.files.open(f"{self.root}/{name}", "rb", size=size, cache_type="none")
        with path.open("ab", buffering=0) as file:  # unbuffered: a kill loses no complete block
            while (start := path.stat().st_size) < size:
                wanted = min(BLOCK_BYTES, size - start)
                with asking(self.repository):
                    source.seek(start)
                    block = source.read(wanted)
                    if len(block) != wanted:  # a proxy that ignores ranges sends the whole file
                        raise OSError(f"{name} came with {len(block)} bytes instead of {wanted}")
                advance(file.write(block))
            os.fsync(file.fileno())  # on disk before it gets its name


def complete(hub: Hub, folder: Path, name: str, advance) -> str:
    """Download one shard into the folder, unless it is there already, and return its sha256."""
    size, sha = hub.find(name)
    path, part = folder / name, folder / f"{name}.part"
    if is_shard(path):  # complete, but not in the manifest
        if sha256_of(path) != sha:
            raise UserError(f"{path} is not what {hub.repository} has: move it away, start again")
        return sha
    hub.fetch(name, size, part, advance)
    right = sha256_of(part) == sha
    if not right or not is_shard(part):
        part.unlink()
        problem = "does not match its header" if right else "has a wrong checksum"
        raise UserError(f"{name} from {hub.repository} {problem}: not kept, start again")
    part.replace(path)
    return sha


# -----------------------------------------------------------------------------
# The command line


def download(names: list[str], repository: str, folder: Path) -> str:
    """Download the shards that the folder lacks, and return a line that says so."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = read_manifest(folder)
    todo = [name for name in names if name not in sums or not is_shard(folder / name)]
    if not todo:
        return f"{folder} is complete: {len(names)} shards, checksums in {MANIFEST}"
    lock(folder)
    sums = read_manifest(folder)  # again: another call may just have ended
    missing = [name for name in todo if not is_shard(folder / name)]
    try:
        hub = Hub(repository)
    except UserError as error:
        if missing:
            raise
        return f"{folder} has all {len(names)} shards, but {len(todo)} without a checksum: {error}"

    from tqdm import tqdm

    parts = [folder / f"{name}.part" for name in missing]
    here = sum(part.stat().st_size for part in parts if part.exists())
    total, free = sum(hub.find(name)[0] for name in missing), shutil.disk_usage(folder).free
    gigabytes = f"{(total - here) / 1e9:.1f} GB"
    if total - here > free:
        need = f"{gigabytes} to fetch, {free / 1e9:.1f} GB free"
        raise UserError(f"no space in {folder}: {need}; make room or choose another with --dir")

    doing = f"fetching {len(missing)} shards, {gigabytes}, into" if missing else "comparing"
    print(f"{doing} {folder}", flush=True)
    style = {"unit": "B", "unit_scale": True, "disable": None, "leave": False}
    with tqdm(total=total, initial=here, desc=folder.name, **style) as bar:
        one_at_a_time = threading.Lock()

        def advance(n: int) -> None:
            with one_at_a_time:
                bar.update(n)

        pool = ThreadPoolExecutor(WORKERS)
        jobs = {pool.submit(complete, hub, folder, name, advance): name for name in todo}
        for job in as_completed(jobs):
            sums[jobs[job]] = job.result()
            write_manifest(folder, sums)
    return f"{folder} is now complete: {len(names)} shards, checksums in {MANIFEST}"


def verify(patterns: list[str]) -> str:
    """Compare the shards that match patterns with the SHA256SUMS in their folders.

    Return a line that says that all agree; UserError if one does not.
    """
    pool, jobs, wrong = ThreadPoolExecutor(WORKERS), {}, []
    for pattern in patterns:
        names = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern))
        jobs |= {path: pool.submit(sha256_of, path) for path in map(Path, names)}
        if not names:
            raise UserError(f"no shard matches {pattern}: name some, like 'data/fineweb10B/*.bin'")
    for path, job in jobs.items():
        try:
            sha, expected = job.result(), read_manifest(path.parent).get(path.name)
        except OSError as error:
            where = error.filename or path
            raise UserError(f"cannot read {where}: {error.strerror}; name shards only") from None
        if expected is None:
            where = f"no checksum of {path.name} in {path.with_name(MANIFEST)}"
            raise UserError(f"there is {where}: cached_fineweb.py or sha256sum makes one")
        wrong += [str(path)] * (sha != expected)
    if wrong:
        raise UserError(f"{', '.join(wrong)}: not as {MANIFEST} has it; remove and fetch again")
    return f"{len(jobs)} shards are as {MANIFEST} has them"


def parse_arguments() -> tuple:
    """Return `download` or `verify`, as the command line says, and its arguments."""
    parser = argparse.ArgumentParser(
        prog="cached_fineweb.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: error: {message}\n")
    parser.add_argument("shards", type=int, nargs="?", default=7, help="train shards [7]")
    kind = parser.add_mutually_exclusive_group()
    choice = {"dest": "kind", "action": "store_const"}
    kind.add_argument("--edu", **choice, const="edu", default="10B", help="from FineWeb-Edu")
    kind.add_argument("--100B", **choice, const="100B", help="from the larger sample of FineWeb")
    parser.add_argument("--dir", type=Path, help="folder of shards [data/ and the dataset's name]")
    parser.add_argument("--verify", nargs="+", metavar="PATTERN", help="check shards; no download")
    args = parser.parse_args()
    if args.verify:
        if vars(parser.parse_args([])) != vars(args) | {"verify": None}:
            parser.error("--verify fetches nothing: give it by itself")
        return verify, args.verify
    repository, prefix, count = DATASETS[args.kind]
    if not 1 <= args.shards <= count:
        parser.error(f"{args.shards} train shards: {repository} has 1 to {count}")
    names = [f"{prefix}_train_{i:06}.bin" for i in range(1, args.shards + 1)]
    folder = args.dir or DATA / repository.split("/")[1].removesuffix("-gpt2")
    return download, [f"{prefix}_val_000000.bin", *names], repository, folder


def main() -> None:
    action, *arguments = parse_arguments()
    try:
        print(action(*arguments))
        return
    except KeyboardInterrupt:
        status, line = 130, "interrupted: start again to go on"
    except UserError as error:
        status, line = 1, f"error: {error}"
    except OSError as error:  # of the disk: the network's errors are UserErrors
        where = error.filename or arguments[-1]
        status, line = 1, f"error: cannot use {where}: {error.strerror}; what is complete stays: "
        line += "make room there or choose another folder with --dir"
    except ImportError as error:
        status, line = 1, f"error: {error.name} is missing: {sys.executable} -m pip install -r "
        line += "requirements.txt"
    print(f"cached_fineweb.py: {line}", file=sys.stderr, flush=True)
    os._exit(status)  # without waiting for the blocks that are being downloaded


if __name__ == "__main__":
    main()
