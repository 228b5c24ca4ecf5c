"""Print a checkpoint's validation loss, and how many bits that is per byte of text.

    ./run.sh tools/evaluate.py [CHECKPOINT] [--FLAG VALUE ...]    the newest checkpoint under logs/
    torchrun --standalone --nproc_per_node=8 tools/evaluate.py CHECKPOINT

The data is that on which the run validated, or that of --val_files and --val_tokens. Bits per byte
do not depend on the tokenizer: loss / ln 2 is the bits per token, and a token has as many bytes as
its text (the end of a document has none). Other flags are those of the script that saved the
checkpoint. A published checkpoint names no record: add --record NAME if it is not the default one.
"""

import argparse
import math
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "data")]
from script import Checkpoint, core, parse_with_checkpoint  # noqa: E402

import train_gpt  # noqa: E402
from gpt2 import gpt2_tokens  # noqa: E402


def evaluate(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Print loss and bits per byte."""
    hp, functions = checkpoint.hp, core(checkpoint.run_class)
    device, rank, world_size = train_gpt.start_device(hp.device)
    inputs, targets = functions.validation_batch(hp, rank, world_size, device)
    model = checkpoint.model(device)
    functions.choose_kernels(model, hp, device, train_gpt.all_reduce_, print)
    loss = functions.evaluate(model, (inputs, targets), checkpoint.now, device)
    sizes = torch.tensor([*map(len, gpt2_tokens()), 0], device=device)  # in bytes
    total = train_gpt.all_reduce_(sizes[targets].sum()).item()
    bits = loss / math.log(2) * hp.val_tokens / total
    script = checkpoint.saved.get("script", "a script that it does not name")
    print(f"{checkpoint.path}, saved by {script}")
    print(f"val_loss:{loss:.5f} bits_per_byte:{bits:.5f} over {hp.val_tokens} tokens")


def main(argv: list[str] | None = None) -> None:
    """Print what a checkpoint reaches. An error is one line and status 1."""
    parser = argparse.ArgumentParser(prog="evaluate.py", description=__doc__)
    train_gpt.as_program("evaluate.py", lambda: evaluate(*parse_with_checkpoint(parser, argv)))


if __name__ == "__main__":
    main()
