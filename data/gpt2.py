"""GPT-2's tokenizer from the committed `vocab.bpe`, without a network."""

from pathlib import Path

import tiktoken

END_OF_TEXT = 50256  # begins every document in a shard
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def gpt2_encoding() -> tiktoken.Encoding:
    """GPT-2's encoding: 256 bytes, then 50000 merges in their order, then END_OF_TEXT.

    OpenAI's file writes bytes as printable characters: bytes that are printable in Latin-1 stand
    for themselves, the others for the characters from U+0100 on. Token ids follow that order.
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}

    lines = Path(__file__).with_name("vocab.bpe").read_text(encoding="utf-8").splitlines()
    merges = [line.replace(" ", "") for line in lines[1:]]  # line 0 is a version comment
    ranks = {bytes([b]): rank for rank, b in enumerate(printable + hidden)}
    for rank, merge in enumerate(merges, start=256):
        ranks[bytes(byte_of[c] for c in merge)] = rank

    return tiktoken.Encoding(
        "gpt2",
        pat_str=SPLIT,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=50257,
    )
