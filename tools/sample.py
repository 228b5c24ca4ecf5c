"""What does a model write? Its text, as it is made.

    ./run.sh tools/sample.py                                  of the newest checkpoint under logs/
    ./run.sh tools/sample.py logs/RUN/state_step000128.pt --prompt "In the beginning" --n 3
    ./run.sh tools/sample.py --temperature 0                  the likeliest token each time

Text goes to standard output, everything else to standard error. A sample begins with a document;
where the model ends it, <|endoftext|> is printed and another one begins. Other flags are those of
train_gpt.py, such as --device cpu, or --record for a published checkpoint, which names none.
"""

import argparse
import codecs
import itertools
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "data")]
import program  # noqa: E402
import train_gpt  # noqa: E402
from gpt2 import gpt2_encoding  # noqa: E402
from train_gpt import BLOCK, END_OF_TEXT, GPT, Hyperparameters, Moment, UserError  # noqa: E402


def parse_with_checkpoint(parser: argparse.ArgumentParser, argv: list[str] | None):
    """A tool's flags, and the settings and flags of train_gpt.py, of which `saved` is the
    checkpoint: the file that is named first, or the newest one."""
    parser.formatter_class, parser.allow_abbrev = argparse.RawDescriptionHelpFormatter, False
    parser.error = program.fail
    parser.usage = f"{parser.prog} [CHECKPOINT] [--FLAG VALUE ...]"
    words = sys.argv[1:] if argv is None else argv
    named = bool(words) and not words[0].startswith("-")
    args, flags = parser.parse_known_args(words[named:])
    hp, loaded = train_gpt.parse_args(["--eval", words[0] if named else "auto", *flags])
    if hp.vocab_size <= END_OF_TEXT:
        raise UserError(f"{loaded.checkpoint}: {hp.vocab_size} tokens are not GPT-2's vocabulary")
    return args, hp, loaded


def last_moment(saved: dict, hp: Hyperparameters) -> Moment:
    """A checkpoint's moment: that of its step, or of the last one if it names none."""
    return train_gpt.moment(saved.get("step", hp.num_iterations), hp)


def load_model(hp: Hyperparameters, saved: dict, device: torch.device) -> GPT:
    """The checkpoint's model on a device, for evaluation."""
    return train_gpt.build(hp, device, saved["model"]).eval()


# -----------------------------------------------------------------------------
# Models that are fed tokens, and answer with the logits (V,) of the next one


class Memory:
    """A layer's attention that remembers keys and values; it takes the place of `attend`."""

    def __init__(self):
        self.keys = self.values = None

    def __call__(self, q, k, v, mask: Tensor, scale: float, key_offset: bool) -> Tensor:
        """Of n new tokens, (1, H, n, D), under a mask (n, T) over the T newest. What is remembered
        are keys as they were before the offset, of one token more than is visible."""
        if self.keys is not None:
            k, v = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        self.keys, self.values = k[:, :, -mask.size(1) :], v[:, :, -mask.size(1) :]
        return train_gpt.attend(q, self.keys, self.values, mask, scale, key_offset)


class Decoder:
    """A model that remembers what its window holds: a token costs the same after any number."""

    def __init__(self, model: GPT, when: Moment | int):
        self.model, self.now, self.position = model, model.at(when), 0
        self.recent = torch.empty(0, dtype=torch.int32, device=model.skip_weights.device)
        # Layers attend in turn, and all of them each time.
        attending = [layer for layer in model.layers if layer.window != "none"]
        self.memories = itertools.cycle([Memory() for _ in attending])

    def attend(self, *arguments) -> Tensor:
        """By the memory of the layer whose turn it is."""
        return next(self.memories)(*arguments)

    def mask(self, first: Tensor, new: int) -> Tensor:
        """A mask's last rows: those of the new tokens. Paired heads have two rows a token."""
        return train_gpt.dense_mask(first, rows=new * len(first) // len(self.recent))

    def __call__(self, tokens: list[int]) -> Tensor:
        """The logits after these tokens, which follow those before."""
        model, device, now = self.model, self.recent.device, self.now
        for new in torch.tensor(tokens, dtype=torch.int32, device=device).split(BLOCK):
            # Whole blocks leave, so that those of the mask stay where they are.
            unseen = max(0, (len(self.recent) - now.window - 1) // BLOCK * BLOCK)
            before = self.recent[unseen:]
            self.recent = torch.cat([before, new])
            masks = model.masks(self.recent, now, partial(self.mask, new=len(new)))
            rotary = model.rotary_of(len(new), now, device, self.position)
            # An embedding reads one token back, and a sequence's first two bigrams are special.
            x, more = model.embedded(torch.cat([before[-2:], new]))
            more = {name: rows[-len(new) :] for name, rows in more.items()}
            x = model.trunk(x[-len(new) :], more, rotary, masks, attend=self.attend)
            self.position += len(new)
        return model.lm_head.logits(x[-1:])[0]


class Rereader:
    """The same without a memory: it reads everything again for each token."""

    def __init__(self, model: GPT, when: Moment | int):
        self.model, self.when, self.tokens = model, when, []

    def __call__(self, tokens: list[int]) -> Tensor:
        """As Decoder's."""
        self.tokens += tokens
        blocks = self.tokens + [0] * (-len(self.tokens) % BLOCK)
        blocks = torch.tensor(blocks, dtype=torch.int32, device=self.model.skip_weights.device)
        x = self.model.hidden(blocks, self.when)
        return self.model.lm_head.logits(x[len(self.tokens) - 1 :][:1])[0]


# -----------------------------------------------------------------------------
# Tokens, and their text


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """A token drawn from the top_k likeliest (0: from all); without temperature, the likeliest."""
    if not temperature:
        return logits.argmax().item()
    logits, tokens = logits.cpu().topk(min(top_k or len(logits), len(logits)))
    chance = torch.softmax((logits - logits[0]) / temperature, 0)
    return tokens[torch.multinomial(chance, 1, generator=generator)].item()


def generate(feed: Callable, prompt: list[int], count: int, vocab: int, *choice) -> Iterator[int]:
    """The `count` tokens, of the first `vocab`, that follow a prompt; for `choice` see choose."""
    logits = feed(prompt)
    for i in range(count):
        token = choose(logits[:vocab], *choice)
        yield token
        if i + 1 < count:
            logits = feed([token])


def text_of(tokens: Iterable[int], encoding) -> Iterator[str]:
    """Each token's text; a character of several tokens comes with the last of them."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    for token in tokens:
        piece = decode(encoding.decode_single_token_bytes(token))
        yield f"{piece}\n" if token == END_OF_TEXT else piece
    yield decode(b"", final=True)


def parse(argv: list[str] | None):
    """Flags; UserError for those that cannot be."""
    parser = argparse.ArgumentParser(prog="sample.py", description=__doc__)
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--n", type=int, default=3, help="samples [3]")
    parser.add_argument("--tokens", type=int, default=200, help="tokens in each [200]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: no chance [0.8]")
    parser.add_argument("--top_k", type=int, default=50, help="of how many, 0: of all [50]")
    parser.add_argument("--seed", type=int, help="makes the same text again [another each time]")
    parser.add_argument("--no_cache", action="store_true", help="read all again for each token")
    args, hp, loaded = parse_with_checkpoint(parser, argv)
    if min(args.n, args.tokens) < 1 or not min(args.temperature, args.top_k) >= 0:
        raise UserError("--n and --tokens: at least 1; --temperature and --top_k: at least 0")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed}: from 0 to {2**63 - 1}")
    return args, hp, loaded


@torch.no_grad()
def sample(parsed, store) -> None:
    """Print the samples."""
    args, hp, loaded = parsed
    encoding = gpt2_encoding()
    prompt = [END_OF_TEXT, *encoding.encode(args.prompt, allowed_special="all")]
    device = program.start_device(hp.device, store)
    model = load_model(replace(hp, compile="off"), loaded.saved, device)
    now = last_moment(loaded.saved, hp)
    seed = torch.seed() % 2**32 if args.seed is None else args.seed
    generator = torch.Generator().manual_seed(seed)
    note = partial(print, file=sys.stderr, flush=True)
    note(f"{loaded.checkpoint}, --seed {seed}")
    start, reader = time.perf_counter(), Rereader if args.no_cache else Decoder
    for i in range(args.n):
        if i:
            print("-" * 80)
        choice = encoding.n_vocab, args.temperature, args.top_k, generator
        tokens = generate(reader(model, now), prompt, args.tokens, *choice)
        print(args.prompt, end="")
        for text in text_of(tokens, encoding):
            print(text, end="", flush=True)
        print()
    rate = args.n * args.tokens / (time.perf_counter() - start)
    note(f"{rate:.1f} tokens/s")


def main(argv: list[str] | None = None) -> None:
    """Print what a model writes; status 1 or 2 and a line if it cannot."""
    program.as_program("sample.py", lambda: parse(argv), sample)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    main()
