"""Make the sample corpus: the King James Bible as GPT-2 tokens in FineWeb's shard format.

    apt-get install bible-kjv bible-kjv-text
    pip install tiktoken numpy
    python data/make_sample.py        # writes kjv_train_000001.bin and kjv_val_000000.bin

A document is a chapter (1189 of them), a line is a verse, and verse references are stripped.
Chapters whose index modulo 12 is 11 are validation, the others training; each part is shuffled
once with a fixed seed, so that the beginning of either stream speaks for the whole of it.
"""

import random
import re
import subprocess
from pathlib import Path

import numpy as np
from gpt2 import END_OF_TEXT, gpt2_encoding

HERE = Path(__file__).resolve().parent
MAGIC, VERSION = 20240520, 1


def chapters() -> list[str]:
    """The text of each chapter in the order of the book, one verse a line."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    verses_of: dict[str, list[str]] = {}
    for line in printed.splitlines():
        chapter, verse = re.fullmatch(r"(\w+?\d+):\d+ (.+)", line).groups()
        verses_of.setdefault(chapter, []).append(verse.strip())
    return ["\n".join(verses) for verses in verses_of.values()]


def write_shard(path: Path, documents: list[str]) -> None:
    """Shuffle the documents, tokenize them, and write 256 int32 of header and uint16 tokens."""
    random.Random(0).shuffle(documents)
    encoding = gpt2_encoding()
    tokens = [t for text in documents for t in (END_OF_TEXT, *encoding.encode_ordinary(text))]
    header = np.zeros(256, dtype="<i4")
    header[:3] = MAGIC, VERSION, len(tokens)
    path.write_bytes(header.tobytes() + np.array(tokens, dtype="<u2").tobytes())
    print(f"{path.name}: {len(documents)} documents, {len(tokens)} tokens")


if __name__ == "__main__":
    texts = chapters()
    train = [text for i, text in enumerate(texts) if i % 12 != 11]
    val = [text for i, text in enumerate(texts) if i % 12 == 11]
    write_shard(HERE / "kjv_train_000001.bin", train)
    write_shard(HERE / "kjv_val_000000.bin", val)
