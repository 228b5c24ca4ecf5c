"""Write the text of the sample corpus, the King James Bible, as train.jsonl and val.jsonl.

    apt-get install bible-kjv bible-kjv-text
    python data/make_sample.py FOLDER

A document is a chapter (1189 of them), a line is a verse, and verse references are stripped.
Chapters whose index modulo 12 is 11 are validation, the others training; each part is shuffled
once with a fixed seed, so that the beginning of either stream speaks for the whole of it.
"""

import json
import random
import re
import subprocess
import sys
from pathlib import Path


def chapters() -> list[str]:
    """The text of each chapter in the order of the book, one verse a line."""
    command = ["bible", "-f", "gen1:1-rev22:21"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    verses_of: dict[str, list[str]] = {}
    for line in printed.splitlines():
        chapter, verse = re.fullmatch(r"(\w+?\d+):\d+ (.+)", line).groups()
        verses_of.setdefault(chapter, []).append(verse.strip())
    return ["\n".join(verses) for verses in verses_of.values()]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python data/make_sample.py FOLDER")
    texts = chapters()
    train = [text for i, text in enumerate(texts) if i % 12 != 11]
    val = [text for i, text in enumerate(texts) if i % 12 == 11]
    for name, documents in ("train", train), ("val", val):
        random.Random(0).shuffle(documents)
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        Path(sys.argv[1], f"{name}.jsonl").write_text("".join(lines))
