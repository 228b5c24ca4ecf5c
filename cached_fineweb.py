"""Download FineWeb as GPT-2 tokens, in shards of 10^8 tokens (200 MB), from the Hugging Face hub.

    python cached_fineweb.py            # validation and 7 train shards: the default record
    python cached_fineweb.py 10         # 10 of 103: the records of 2024; medium reads 40
    python cached_fineweb.py 0          # validation alone
    python cached_fineweb.py --edu      # from FineWeb-Edu, 99 train shards, in data/finewebedu10B
    python cached_fineweb.py --100B     # from the larger sample, 1030, in data/fineweb100B
    python cached_fineweb.py --verify   # compare downloaded shards with the hub's checksums

A shard gets its name when its checksum is the hub's and its header is right. After an error or a
kill, start again: complete shards are kept, and the one that was under way is fetched anew.
"""

import argparse
import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from train_gpt import HERE, UserError, as_program, load_data_shard

try:
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import logging
except ImportError:
    sys.exit(f"cached_fineweb.py: error: first {sys.executable} -m pip install huggingface-hub")


def is_shard(path: Path) -> bool:
    """Return whether a file exists, has a shard's header, and is as long as the header says."""
    try:
        load_data_shard(path)
    except (FileNotFoundError, UserError):
        return False
    return True


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(repository: str) -> dict:
    """Return what the hub lists, by file name. `size` is in bytes, `lfs.sha256` the checksum."""
    print(f"asking {constants.ENDPOINT} for the shards of {repository}", flush=True)
    try:
        listing = HfApi().list_repo_tree(repository, repo_type="dataset")
        listed = {file.path: file for file in listing if getattr(file, "lfs", None)}
        sum(file.size for file in listed.values())  # a TypeError if one is no number
    except (AttributeError, KeyError, TypeError) as error:
        found = f"{constants.ENDPOINT} lists {repository} in another form than Hugging Face's hub"
        remedy = "set HF_ENDPOINT to another mirror, or unset it"
        raise UserError(f"{found} ({type(error).__name__}: {error}): {remedy}") from error
    return listed


def download(names: list[str], repository: str, folder: Path) -> None:
    """Download the shards that the folder lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names if not is_shard(folder / name)]
    if missing:
        listed = list_files(repository)
        if unknown := [name for name in missing if name not in listed]:
            raise UserError(f"{repository} has no {unknown[0]}: ask for fewer shards")
        size, free = sum(listed[name].size for name in missing), shutil.disk_usage(folder).free
        text = f"{folder} lacks {len(missing)} of {len(names)} shards: {size / 1e9:.1f} GB to fetch"
        text += f", {free / 1e9:.1f} GB of space"
        if size > free:
            raise UserError(f"{text}; make room or choose another folder with --dir")
        print(text, flush=True)
    incoming = folder / ".incoming_of_cached_fineweb"  # shards whose checksum is not yet known
    try:
        for name in missing:
            hf_hub_download(repository, name, repo_type="dataset", local_dir=incoming)
            if sha256_of(incoming / name) != listed[name].lfs.sha256:
                raise UserError(f"{name} has a wrong checksum and is not kept: start again")
            load_data_shard(incoming / name)
            os.replace(incoming / name, folder / name)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    print(f"{folder} is complete: {len(names)} shards")


def verify(repository: str, folder: Path) -> None:
    """Compare the folder's shards with the hub's checksums. UserError if one differs."""
    listed = list_files(repository)
    here = [name for name in listed if (folder / name).exists()]
    bar = tqdm(here, desc="checksums")
    wrong = [name for name in bar if sha256_of(folder / name) != listed[name].lfs.sha256]
    if wrong:
        raise UserError(f"{folder}: {', '.join(wrong)} not as on the hub: remove, and start again")
    print(f"{folder}: {len(here)} shards have the hub's checksums")


def fail(message: str) -> NoReturn:
    """Raise UserError: argparse calls this for a bad flag."""
    raise UserError(message)


def main() -> None:
    """Do what the command line says. An error is the last line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.error = fail
    add = parser.add_argument
    add("shards", type=int, nargs="?", default=7, help="train shards [7]")
    add("--edu", action="store_const", const="edu", default="", help="from FineWeb-Edu")
    add("--100B", action="store_const", const="100B", default="10B", help="from the larger sample")
    add("--dir", type=Path, help="folder of shards [data/ and the dataset's name]")
    add("--verify", action="store_true", help="check shards; no download")
    args = vars(parser.parse_args())
    if not 0 <= args["shards"] <= 1030:
        raise UserError(f"{args['shards']} train shards: ask for 0 (validation alone) to 1030")
    if "HF_HUB_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()  # it warns at each attempt; our error follows the last one
    prefix = f"fineweb{args['edu']}"
    repository = f"kjj0/{prefix}{args['100B']}-gpt2"
    folder = args["dir"] or HERE / "data" / f"{prefix}{args['100B']}"
    train = [f"{prefix}_train_{i:06}.bin" for i in range(1, args["shards"] + 1)]
    try:
        if args["verify"]:
            verify(repository, folder)
        else:
            download([f"{prefix}_val_000000.bin", *train], repository, folder)
    except UserError:
        raise
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # the hub's, or the disk's
        error = error.__cause__ or error
        what = f"{repository} of {constants.ENDPOINT} into {folder}; complete shards are kept"
        raise UserError(f"could not fetch {what}: {type(error).__name__}: {error}") from None


if __name__ == "__main__":
    as_program("cached_fineweb.py", main)
