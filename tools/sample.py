"""Print text that a trained model writes.

    ./run.sh tools/sample.py                                  with the newest checkpoint under logs/
    ./run.sh tools/sample.py logs/RUN/state_step000320.pt --prompt "In the beginning" --n 3
    ./run.sh tools/sample.py --temperature 0                  the likeliest token each time

Text goes to standard output, everything else to standard error. A sample begins a document; where
the model ends the document, <|endoftext|> is printed and the next one begins. Other flags go to
the script that saved the checkpoint, such as --device cpu. A published checkpoint names no
record: add --record NAME.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import console
import train_gpt
from checkpoint import parse_with_checkpoint
from script import tokenizer_for
from tokenizer import text_after
from train_gpt import BLOCK, GPT, Moment, UserError, printable

# -----------------------------------------------------------------------------
# Decoding: tokens in, logits (V,) of the next token out


class Memory:
    """A layer's cache of keys and values, around the layer's own `attend`."""

    def __init__(self, attend: Callable):
        self.attend = attend.attend if isinstance(attend, Memory) else attend  # not the last text's
        self.keys = self.values = None

    def __call__(self, q, k, v, mask: Tensor, scale: float, *more) -> Tensor:
        """Attend with n new tokens, (1, H, n, D), under a mask (n, T) over the T newest. Keys are
        cached as the layer computes them: a fork's `attend` may take parts of a key from the token
        before, which must still be cached then. `more` is what a fork's layer says of new tokens.
        """
        if self.keys is not None:
            k = torch.cat([self.keys, k], dim=2)
            v = torch.cat([self.values, v], dim=2)
        visible = mask.size(1)
        self.keys, self.values = k[:, :, -visible:], v[:, :, -visible:]
        return self.attend(q, self.keys, self.values, mask, scale, *more)


class Decoder:
    """A model with a cache of its window: a token costs the same, however long the text is. From
    then on, the model's layers attend with this cache."""

    def __init__(self, model: GPT, now: Moment):
        self.model, self.now, self.position = model, now, 0
        self.recent = torch.empty(0, dtype=torch.int32, device=model.lm_head.weight.device)
        for layer in model.modules():
            if hasattr(layer, "attend"):
                layer.attend = Memory(layer.attend)

    def __call__(self, tokens: list[int]) -> Tensor:
        """Return the logits (V,) after these tokens, which follow those before."""
        model, device, now = self.model, self.recent.device, self.now
        for new in torch.tensor(tokens, dtype=torch.int32, device=device).split(BLOCK):
            # Only whole blocks are dropped: the mask's blocks must stay aligned. One token more
            # than the window is kept, because a key may need the token before it.
            unseen = max(0, (len(self.recent) - now.window - 1) // BLOCK * BLOCK)
            before = self.recent[unseen:]
            self.recent = torch.cat([before, new])
            position = torch.arange(self.position, self.position + len(new), device=device)
            masks, rotary = model.context(self.recent, position, now)
            for name, mask in masks.items():  # paired heads have two rows per token
                masks[name] = mask[-(len(new) * len(mask) // len(self.recent)) :]
            # A fork's embedding may read one token back, and a sequence's first two bigrams differ.
            x, more = model.embedded(torch.cat([before[-2:], new]))
            more = {name: rows[-len(new) :] for name, rows in more.items()}
            x = model.run_layers(x[-len(new) :], more, rotary, masks)
            self.position += len(new)
        return model.lm_head.logits(x[-1:])[0]


# -----------------------------------------------------------------------------
# Text, one token after another


def choose(
    logits: Tensor, vocab_size: int, temperature: float, top_k: int, generator: torch.Generator
) -> int:
    """Draw a token from the top_k likeliest (0: from all); at temperature 0, the likeliest."""
    logits = logits[:vocab_size]  # the head's last rows are not tokens
    if temperature < 1e-6:  # where float32 could not divide by it
        return logits.argmax().item()
    logits, tokens = logits.cpu().topk(min(top_k or len(logits), len(logits)))
    chance = torch.softmax((logits - logits[0]) / temperature, 0)
    return tokens[torch.multinomial(chance, 1, generator=generator)].item()


def generate(feed: Callable, prompt: list[int], count: int, *how) -> Iterator[int]:
    """Yield the `count` tokens that follow a prompt, each chosen by choose(logits, *how)."""
    with console.doing("reading the prompt"):
        logits = feed(prompt)
    for i in range(count):
        token = choose(logits, *how)
        yield token
        if i + 1 < count:
            logits = feed([token])


@console.program("sample.py")
@torch.no_grad()
def main(words: list[str]) -> None:
    """Print the samples that the flags ask for. UserError if they are invalid."""
    parser = console.parser_of(__doc__)
    parser.add_argument("--prompt", default="", help="what the text begins with")
    parser.add_argument("--n", type=int, default=3, help="number of samples [3]")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per sample [200]")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: no randomness [0.8]")
    parser.add_argument("--top_k", type=int, default=50, help="tokens to draw from, 0: all [50]")
    seed = torch.seed() % 2**32
    text = "the same seed repeats the text [random]"
    parser.add_argument("--seed", type=int, default=seed, help=text)
    args, checkpoint = parse_with_checkpoint(parser, words, of_text=True)
    if min(args.n, args.tokens) < 1 or not min(args.temperature, args.top_k) >= 0:
        raise UserError("--n and --tokens must be at least 1, --temperature and --top_k at least 0")
    if not 0 <= args.seed < 2**63:
        raise UserError(f"--seed {args.seed}: must be from 0 to {2**63 - 1}")

    tokenizer = tokenizer_for(checkpoint.hp)
    prompt = tokenizer.encode_prompt(args.prompt)
    device, _, _ = train_gpt.start_device(checkpoint.hp.device)
    model = checkpoint.model(device, compile="off")
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans anew for each number of keys
    generator = torch.Generator().manual_seed(args.seed)
    how = tokenizer.vocab_size, args.temperature, args.top_k, generator
    print(f"{checkpoint}; --seed {args.seed}", file=sys.stderr, flush=True)
    start = time.perf_counter()
    for i in range(args.n):
        if i:
            print("-" * 80)
        print(args.prompt, end="")
        context = [tokenizer.end_of_text, *prompt]
        tokens = generate(Decoder(model, checkpoint.now), context, args.tokens, *how)
        for text in text_after(prompt, tokens, tokenizer):
            print(printable(text), end="", flush=True)
        print()
    rate = args.n * args.tokens / (time.perf_counter() - start)
    print(f"{rate:.1f} tokens/s", file=sys.stderr)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    main()
