"""GPT-2's tokens, and the longest token that begins each of them: in training, a target beside the
next token, for forks/train_gpt_2026_08.py (a record of 2026-07-13)."""

from functools import cache

from train_gpt import HERE


@cache
def gpt2_tokens(count: int) -> tuple[list[str], list[list[str]]]:
    """Return GPT-2's first `count` tokens, in which a character stands for each byte, and their
    merges: the 256 bytes, in the order of the characters for them, then what each merge joins."""
    plain = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
    others = [chr(256 + i) for i in range(256 - len(plain))]
    lines = (HERE / "data/vocab.bpe").read_text("utf-8").splitlines()[1 : count - 255]
    merges = [line.split(" ") for line in lines]
    return [*plain, *others, *(left + right for left, right in merges)], merges


@cache
def token_prefixes(count: int, vocab_size: int) -> list[int]:
    """Return for each token of a vocabulary, of which the first `count` are GPT-2's, the longest
    other one that its bytes begin with, or -1."""
    tokens, _ = gpt2_tokens(count)
    numbers = {token: number for number, token in enumerate(tokens)}
    prefixes = [-1] * vocab_size
    for number, token in enumerate(tokens):
        shorter = [numbers.get(token[:size], -1) for size in range(1, len(token))]
        prefixes[number] = [-1, *(found for found in shorter if found >= 0)][-1]
    return prefixes
