"""Print a checkpoint's validation loss, its perplexity, and how many bits that is per byte of text.

    ./run.sh tools/evaluate.py [CHECKPOINT] [--FLAG VALUE ...]    the newest checkpoint under logs/

It reads the data on which the run validated, or --val_files and --val_tokens. Bits per byte do not
depend on the tokenizer: loss / ln 2 is the bits per token, and a token has the bytes of its text.
Other flags go to the script that saved the checkpoint. A published checkpoint names no record: add
--record NAME if it is not the default one.
"""

import torch

import console
import train_gpt
from checkpoint import parse_with_checkpoint
from script import core, tokenizer_for
from tokenizer import bits_per_byte


@console.program("evaluate.py")
def main(words: list[str]) -> None:
    """Evaluate the checkpoint that the words name. UserError if they are invalid."""
    parser = console.parser_of(__doc__)
    _, checkpoint = parse_with_checkpoint(parser, words, of_text=False)
    hp, functions = checkpoint.hp, core(checkpoint.run_class)
    tokenizer = tokenizer_for(hp)
    device, _, _ = train_gpt.start_device(hp.device)
    print(checkpoint)
    batch = functions.validation_batch(hp, 0, 1, device)
    model = checkpoint.model(device)
    with console.doing(f"validating on {hp.val_tokens} tokens"):
        if functions.gpu_kernels:
            functions.gpu_kernels.choose_kernels(model, hp, device, functions.all_reduce_)
        loss = functions.evaluate(model, batch, checkpoint.now, device)
    text = ""
    if tokenizer:
        bits = bits_per_byte(loss, batch[1].cpu().numpy().ravel(), tokenizer)
        text = f" bits_per_byte:{bits:.5f}"
    perplexity = torch.tensor(loss, dtype=torch.float64).exp()  # math.exp fails where this is inf
    print(f"val_loss:{loss:.5f} perplexity:{perplexity:.2f}{text} over {hp.val_tokens} tokens")


if __name__ == "__main__":
    main()
