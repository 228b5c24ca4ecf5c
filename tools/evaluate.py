"""Print a checkpoint's validation loss, and how many bits that is per byte of text.

    ./run.sh tools/evaluate.py [CHECKPOINT] [--FLAG VALUE ...]    the newest checkpoint under logs/
    ./run.sh tools/evaluate.py [CHECKPOINT] --hellaswag           its accuracy on HellaSwag instead

The data is that on which the run validated, or that of --val_files and --val_tokens. Bits per byte
do not depend on the tokenizer: loss / ln 2 is the bits per token, and a token has as many bytes as
its text (the end of a document has none). Other flags are those of the script that saved the
checkpoint. A published checkpoint names no record: add --record NAME if it is not the default one.

HellaSwag (arXiv 1905.07830) has questions with four endings. Two accuracies are printed, as llm.c
computes them: acc chooses the ending of the greatest log-likelihood, acc_norm that of the greatest
log-likelihood per token. Chance is 25 %. Published: about 30 % for llm.c's GPT-2 124M and 29 % for
the record of 2024-11-19; GPT-2 itself has 28.6 % and 29.6 %. The 10,042 validation questions are
fetched once (12 MB), or read from --hellaswag FILE, a .jsonl of the same form: objects with `ctx`,
four `endings` and a `label` from 0 to 3.
"""

import copy
import json
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import train_gpt
from checkpoint import Checkpoint, parse_with_checkpoint
from console import doing, parser_of, program
from gpt2 import bits_per_byte, gpt2_encoding
from script import core
from train_gpt import BLOCK, END_OF_TEXT, GPT, HERE, Moment, UserError

# -----------------------------------------------------------------------------
# Validation loss


def print_loss(checkpoint: Checkpoint, device: torch.device) -> None:
    """Print loss and bits per byte."""
    hp, functions = checkpoint.hp, core(checkpoint.run_class)
    batch = functions.validation_batch(hp, 0, 1, device)
    model = checkpoint.model(device)
    with doing(f"validating on {hp.val_tokens} tokens"):
        functions.choose_kernels(model, hp, device, train_gpt.all_reduce_, print)
        loss = functions.evaluate(model, batch, checkpoint.now, device)
    bits = bits_per_byte(loss, batch[1].cpu().numpy())
    print(f"val_loss:{loss:.5f} bits_per_byte:{bits:.5f} over {hp.val_tokens} tokens")


# -----------------------------------------------------------------------------
# HellaSwag: a question with one ending is a document. Documents are packed into long sequences
# under training's document mask, with a window as wide as the longest one, so that neighbours do
# not change a score. A model may read up to two tokens before a document, and know where its
# sequence begins: each document follows three ends of text.

HOME = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
SEQUENCE = {"cuda": 65536, "cpu": 1024}  # tokens; a CPU's mask is as large as their square
GAP = 3  # ends of text


def fetch(path: Path) -> None:
    """Download the validation questions. An incomplete or changed file is not kept."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with doing(f"fetching {HOME}"):
            torch.hub.download_url_to_file(HOME, str(path), hash_prefix=SHA256, progress=False)
    except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another SHA-256
        reason = f"could not fetch {HOME} ({error})"
        raise UserError(f"{reason}: try again, or name a copy: --hellaswag FILE") from error


def read_questions(path: Path, limit: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Return the tokens of four documents a question, the length of the context that each of them
    begins with, and for each question the index of the right one. UserError for another file."""
    encoding = gpt2_encoding()
    lines = path.read_text("utf-8", errors="replace").rstrip().split("\n")
    documents, starts, labels = [], [], []
    for number, line in enumerate(lines[: limit or None], 1):
        try:
            row = json.loads(line)
            context = [END_OF_TEXT, *encoding.encode_ordinary(row["ctx"])]
            endings = [encoding.encode_ordinary(f" {row['endings'][i]}") for i in range(4)]
            labels.append(range(4).index(int(row["label"])))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            found = f"{type(error).__name__}: {error}"
            raise UserError(f"{path}:{number}: not a HellaSwag question ({found})") from error
        documents += [context + ending for ending in endings]
        starts += [len(context)] * 4
    return documents, starts, labels


def packed(documents: list[list[int]], starts: list[int], size: int) -> Iterator[tuple]:
    """Yield sequences of at most `size` tokens, which are whole documents, and for each token the
    index of the document for which it is scored: from its start on. Other tokens have -1."""
    tokens, owners = [], []
    for i, (document, start) in enumerate(zip(documents, starts, strict=True)):
        if len(tokens) + GAP + len(document) > size:
            yield tokens, owners
            tokens, owners = [], []
        tokens += [END_OF_TEXT] * GAP + document
        owners += [-1] * (GAP + start) + [i] * (len(document) - start)
    yield tokens, owners


@torch.no_grad()
def log_likelihoods(
    model: GPT, documents: list[list[int]], starts: list[int], now: Moment
) -> Tensor:
    """Return the log-likelihood of each document's tokens from `starts` on, summed: (n,), float64,
    on CPU. UserError if a document sees those before it."""
    device = model.lm_head.weight.device
    longest = GAP + max(map(len, documents))
    size = max(SEQUENCE[device.type], -(-longest // BLOCK) * BLOCK)
    # Twice for short windows, and twice for paired heads, which have two positions per token.
    now = copy.copy(now)
    now.window = max(now.window, 4 * (longest + BLOCK))
    now.short = now.window // 2
    ends = torch.full((size,), END_OF_TEXT, device=device)
    others = ends.clone()
    others[-BLOCK : -BLOCK // 2] = 0  # before the last document, which is one token
    if not model.hidden(ends.int(), now)[-1].equal(model.hidden(others.int(), now)[-1]):
        raise UserError("its model has no document mask: a question would see the others")

    scores = torch.zeros(len(documents), dtype=torch.float64)
    bar = tqdm(list(packed(documents, starts, size)), disable=None, leave=False)
    with doing(lambda: f"scored {scores.count_nonzero()}/{len(scores)}" if bar.disable else ""):
        for tokens, owners in bar:
            sequence = ends.clone()
            sequence[: len(tokens)] = torch.tensor(tokens)
            owners = torch.tensor(owners)
            x = model.hidden(sequence.int(), now)
            for places in (owners >= 0).nonzero().flatten().split(1024):  # 0.2 GB of logits
                logits = model.lm_head.logits(x[places - 1])
                losses = F.cross_entropy(logits, sequence[places], reduction="none")
                scores.index_add_(0, owners[places], -losses.double().cpu())
    return scores


def print_accuracies(checkpoint: Checkpoint, device: torch.device, path: Path, limit: int) -> None:
    """Print the accuracies on the first `limit` questions of a file (0: on all)."""
    documents, starts, labels = read_questions(path, limit)
    scores = log_likelihoods(checkpoint.model(device), documents, starts, checkpoint.now)
    lengths = torch.tensor([len(d) - start for d, start in zip(documents, starts, strict=True)])
    chosen = [of.view(-1, 4).argmax(1) for of in (scores, scores / lengths)]
    acc, acc_norm = ((one == torch.tensor(labels)).double().mean().item() for one in chosen)
    error = (acc_norm * (1 - acc_norm) / len(labels)) ** 0.5
    accuracy = f"acc {acc:.4f}  acc_norm {acc_norm:.4f}  standard error {error:.4f}"
    print(f"{accuracy}, {len(labels)} questions")


@program("evaluate.py")
def main(words: list[str]) -> None:
    """Evaluate the checkpoint that the words name. UserError if they are invalid."""
    parser = parser_of(__doc__)
    text = "print accuracies on HellaSwag, or on the questions of a FILE"
    parser.add_argument("--hellaswag", nargs="?", const="", metavar="FILE", help=text)
    parser.add_argument("--limit", type=int, default=0, help="HellaSwag questions to ask [0: all]")
    args, checkpoint = parse_with_checkpoint(parser, words)
    if args.limit < 0:
        raise UserError("--limit: must be at least 0")
    device, _, _ = train_gpt.start_device(checkpoint.hp.device)
    print(checkpoint)
    if args.hellaswag is None:
        return print_loss(checkpoint, device)
    path = Path(args.hellaswag or HERE / "data" / "hellaswag" / "hellaswag_val.jsonl")
    if not (args.hellaswag or path.exists()):
        fetch(path)
    print_accuracies(checkpoint, device, path, args.limit)


if __name__ == "__main__":
    main()
