"""Download FineWeb as GPT-2 tokens, in shards of 10^8 tokens, into data/fineweb10B.

    python cached_fineweb.py        # validation and 7 train shards: the default record
    python cached_fineweb.py 10     # 10 train shards: the records of 2024; there are 103

What is already there whole is not fetched again.
"""

import argparse
import sys
from pathlib import Path

REPOSITORY = "kjj0/fineweb10B-gpt2"
FOLDER = Path(__file__).resolve().parent / "data" / "fineweb10B"


def is_whole(path: Path) -> bool:
    """Whether the file is there and as long as the token count in its header says."""
    if not path.exists() or path.stat().st_size < 1024:
        return False
    with path.open("rb") as file:
        count = int.from_bytes(file.read(12)[8:], "little")
    return path.stat().st_size == 1024 + 2 * count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", type=int, nargs="?", default=7, help="train shards, 1 to 103 [7]")
    wanted = parser.parse_args().shards
    if not 1 <= wanted <= 103:
        parser.error(f"{wanted} train shards: there are 1 to 103")
    names = ["fineweb_val_000000.bin"]
    names += [f"fineweb_train_{i:06}.bin" for i in range(1, wanted + 1)]
    missing = [name for name in names if not is_whole(FOLDER / name)]
    if not missing:
        return

    from huggingface_hub import hf_hub_download  # only where something is fetched

    for i, name in enumerate(missing, 1):
        print(f"fetching {name} ({i} of {len(missing)}, 200 MB) into {FOLDER}", flush=True)
        try:
            hf_hub_download(REPOSITORY, name, repo_type="dataset", local_dir=FOLDER)
        except Exception as error:  # no network, no space, ...: one line, whichever layer raised it
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            sys.exit(f"cached_fineweb.py: error: could not fetch {name}: {reason}")
        if not is_whole(FOLDER / name):
            (FOLDER / name).unlink()
            sys.exit(f"cached_fineweb.py: error: {name} arrived damaged: start again")


if __name__ == "__main__":
    main()
