"""The tokenizers of runs: GPT-2's, from the committed `vocab.bpe`, or a Hugging Face
`tokenizer.json`. No network is needed.

Two settings of a run say which tokens it has. `tokenizer` is "gpt2", the path of a tokenizer.json,
or "none" for tokens without a text. `end_of_text` is the token that begins each document. GPT-2's
ids are 256 bytes, then merges in their order, so its first N tokens are a smaller tokenizer, which
cuts a text into more tokens. Token N then begins a document; 50256 are all of them.
"""

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

GPT2_TOKENS = 50256  # 256 bytes and 50000 merges; the next id begins a document
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


def gpt2_merges(count: int) -> list[str]:
    """The lines of vocab.bpe for the first `count` tokens; line 0 is a version comment."""
    return MERGES.read_text(encoding="utf-8").splitlines()[: 1 + count - 256]


def gpt2_tokens(count: int) -> list[str]:
    """The first `count` tokens by id, in such characters."""
    return [*byte_characters(), *(line.replace(" ", "") for line in gpt2_merges(count)[1:])]


class GPT2:
    """GPT-2's tokens before `end_of_text`, and that one."""

    mark = "<|endoftext|>"

    def __init__(self, end_of_text: int = GPT2_TOKENS):
        self.end_of_text, self.vocab_size = end_of_text, end_of_text + 1

    @cached_property
    def encoding(self):
        """A tiktoken.Encoding. Text is split by BPE with the first merges alone."""
        import tiktoken  # here, because bits per byte need no package but numpy

        byte_of = byte_characters()
        tokens = gpt2_tokens(self.end_of_text)
        return tiktoken.Encoding(
            "gpt2",
            pat_str=SPLIT,
            mergeable_ranks={bytes(byte_of[c] for c in t): i for i, t in enumerate(tokens)},
            special_tokens={self.mark: self.end_of_text},
            explicit_n_vocab=self.end_of_text + 1,
        )

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, in which <|endoftext|> is ordinary text."""
        return self.encoding.encode_ordinary(text)

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text, in which <|endoftext|> begins a document."""
        return self.encoding.encode(text, allowed_special="all")

    def decode(self, tokens: list[int]) -> str:
        """Return the tokens' text, in which U+FFFD stands for an incomplete character."""
        return self.encoding.decode(tokens)

    def count_bytes(self, tokens: np.ndarray) -> int:
        """Return the bytes of the tokens' text. What begins a document has none."""
        sizes = np.zeros(2**16, int)  # of the ids in shards; those after end_of_text have no text
        sizes[: self.end_of_text] = [*map(len, gpt2_tokens(self.end_of_text))]
        return int(sizes[tokens].sum())


class HuggingFace:
    """The tokens of a tokenizer.json, of which `end_of_text` is one."""

    def __init__(self, path: str, end_of_text: int):
        from tokenizers import Tokenizer  # here, because no other tokenizer needs it

        self.end_of_text = end_of_text
        self.path = Path(path)
        self.tokens = Tokenizer.from_file(str(path))
        self.tokens.no_truncation()  # the file may ask for either, which would cut documents, or
        self.tokens.no_padding()  # fill them up
        self.vocab_size = max(self.tokens.get_vocab().values()) + 1
        self.mark = self.tokens.id_to_token(end_of_text)  # None if it has no such token

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, in which special tokens are ordinary text."""
        self.tokens.encode_special_tokens = True
        return self.tokens.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text, in which special tokens are themselves."""
        self.tokens.encode_special_tokens = False
        return self.tokens.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        """Return the tokens' text, in which U+FFFD stands for an incomplete character."""
        return self.tokens.decode(tokens)

    def count_bytes(self, tokens: np.ndarray) -> int:
        """Return the bytes of the tokens' text, a document at a time, because a tokenizer may add a
        space to its beginning. What begins a document has none."""
        documents = np.split(tokens, np.flatnonzero(tokens == self.end_of_text))
        size = 0
        for document in documents:
            ids = document[document != self.end_of_text].tolist()
            size += len(self.tokens.decode(ids, skip_special_tokens=False).encode())
        return size


def tokenizer_of(tokenizer: str, end_of_text: int) -> GPT2 | HuggingFace | None:
    """Return the tokenizer that these settings of a run name; None for "none". ValueError for a
    file that cannot be read, or without its package."""
    if tokenizer == "none":
        return None
    if tokenizer == "gpt2" and not MERGES.is_file():
        raise ValueError(f"{MERGES} is missing: copy the project's data/{MERGES.name} there")
    if tokenizer == "gpt2":
        return GPT2(end_of_text)
    if not Path(tokenizer).is_file():
        raise ValueError(f"{tokenizer} is no file: name a tokenizer.json")
    try:
        found = HuggingFace(tokenizer, end_of_text)
    except ImportError as error:
        raise ValueError(f"{error}: pip install -r data/requirements.txt") from error
    except Exception as error:  # what the package raises has no type of its own
        reason = f"is not a tokenizer.json of Hugging Face's tokenizers ({error})"
        raise ValueError(f"{tokenizer} {reason}") from error
    if found.mark is None:
        remedy = f"name one of its {found.vocab_size} that begins a document"
        raise ValueError(f"{tokenizer} has no token --end_of_text {end_of_text}: {remedy}")
    return found


def text_after(
    prompt: list[int], tokens: Iterable[int], tokenizer: GPT2 | HuggingFace
) -> Iterator[str]:
    """Yield the text of tokens that follow a prompt; a character of several tokens comes with the
    last of them. All tokens of a document are decoded together, because the ones before may decide
    whether a token begins with a space, and which character its byte belongs to."""
    document, shown = list(prompt), len(tokenizer.decode(prompt))
    for token in tokens:
        if token == tokenizer.end_of_text:
            yield f"{tokenizer.decode(document)[shown:]}{tokenizer.mark}\n"
            document, shown = [], 0
            continue
        document.append(token)
        text = tokenizer.decode(document)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(document)[shown:]


def bits_per_byte(loss: float, tokens: np.ndarray, tokenizer: GPT2 | HuggingFace) -> float:
    """Return a mean loss over tokens (n,), in nats per token, as bits per byte of their text: loss
    / ln 2 * tokens / bytes."""
    return loss / math.log(2) * tokens.size / tokenizer.count_bytes(tokens)
