"""GPT-2's tokenizer from the committed `vocab.bpe`, without a network."""

import math
from pathlib import Path

import numpy as np

END_OF_TEXT = 50256  # begins every document in a shard
MERGES = Path(__file__).with_name("vocab.bpe")  # as OpenAI published it
SPLIT = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_characters() -> dict[str, int]:
    """The characters that stand for bytes in OpenAI's files, in the order of token ids.

    Bytes that are printable in Latin-1 stand for themselves, the others for the characters from
    U+0100 on.
    """
    printable = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


def gpt2_tokens() -> list[str]:
    """The tokens by id, in such characters: 256 bytes, then 50000 merges in their order."""
    lines = MERGES.read_text(encoding="utf-8").splitlines()  # line 0 is a version comment
    return [*byte_characters(), *(line.replace(" ", "") for line in lines[1:])]


def is_gpt2(vocab_size: int) -> bool:
    """Say whether a vocabulary of this size is GPT-2's, with the head's padding or without."""
    return vocab_size in (50257, 50304)


def bits_per_byte(loss: float, tokens: np.ndarray, vocab_size: int) -> float | None:
    """Return a mean loss over tokens (any shape), in nats per token, as bits per byte of their
    text: loss / ln 2 * tokens / bytes. END_OF_TEXT has no bytes. None for tokens that are not
    GPT-2's: no more is known of their text."""
    if not is_gpt2(vocab_size) or tokens.max() > END_OF_TEXT:
        return None
    sizes = np.array([*map(len, gpt2_tokens()), 0])
    return loss / math.log(2) * tokens.size / int(sizes[tokens].sum())


def gpt2_encoding():
    """GPT-2's encoding, a tiktoken.Encoding: its tokens, and END_OF_TEXT."""
    import tiktoken  # here, because the rest of this file needs no package but numpy

    byte_of = byte_characters()
    ranks = {bytes(byte_of[c] for c in token): i for i, token in enumerate(gpt2_tokens())}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=SPLIT,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=50257,
    )
