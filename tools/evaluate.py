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

import argparse
import copy
import json
from http.client import HTTPException
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

import train_gpt
from gpt2 import bits_per_byte, gpt2_encoding
from script import Checkpoint, core, parse_with_checkpoint
from train_gpt import BLOCK, END_OF_TEXT, GPT, HERE, Moment, UserError

# -----------------------------------------------------------------------------
# Validation loss


def print_loss(checkpoint: Checkpoint, device: torch.device) -> None:
    """Print loss and bits per byte."""
    hp, functions = checkpoint.hp, core(checkpoint.run_class)
    batch = functions.validation_batch(hp, 0, 1, device)
    model = checkpoint.model(device)
    functions.choose_kernels(model, hp, device, train_gpt.all_reduce_, print)
    loss = functions.evaluate(model, batch, checkpoint.now, device)
    bits = bits_per_byte(loss, batch[1].cpu().numpy())
    print(f"val_loss:{loss:.5f} bits_per_byte:{bits:.5f} over {hp.val_tokens} tokens")


# -----------------------------------------------------------------------------
# HellaSwag: a question with one ending is a document. Documents are packed into long sequences
# under training's document mask, with a window as wide as the longest one, so that neighbours do
# not change a score.

HOME = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
SEQUENCE = {"cuda": 65536, "cpu": 1024}  # tokens; a CPU's mask is as large as their square


def fetch(path: Path) -> None:
    """Download the validation questions. An incomplete or changed file is not kept."""
    print(f"fetching {HOME}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        torch.hub.download_url_to_file(HOME, str(path), hash_prefix=SHA256, progress=False)
    except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: another SHA-256
        reason = f"could not fetch {HOME} ({error})"
        raise UserError(f"{reason}: try again, or name a copy: --hellaswag FILE") from error


Question = tuple[list[list[int]], int, int]


def read_questions(path: Path, limit: int) -> list[Question]:
    """Return for each question the tokens of its four documents, the length of the context that
    they share, and the index of the right one. UserError for another file."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    encoding = gpt2_encoding()
    lines = path.read_text("utf-8", errors="replace").rstrip().split("\n")
    questions = []
    for number, line in enumerate(lines[: limit or None], 1):
        try:
            row = json.loads(line)
            context = [END_OF_TEXT, *encoding.encode_ordinary(row["ctx"])]
            endings = [encoding.encode_ordinary(f" {row['endings'][i]}") for i in range(4)]
            label = range(4).index(int(row["label"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            found = f"{type(error).__name__}: {error}"
            raise UserError(f"{path}:{number}: not a HellaSwag question ({found})") from error
        questions.append(([context + ending for ending in endings], len(context), label))
    return questions


@torch.no_grad()
def log_likelihoods(
    model: GPT, documents: list[list[int]], starts: list[int], now: Moment
) -> Tensor:
    """Return the log-likelihood of each document's tokens from `starts` on, summed: (n,), float64,
    on CPU."""
    device = model.lm_head.weight.device
    # A fork's model may read tokens before the start of a document. Each document follows enough
    # ends of text to hide its neighbour.
    gap = [END_OF_TEXT] * getattr(model, "context_tokens", 0)
    longest = len(gap) + max(map(len, documents))
    size = max(SEQUENCE[device.type], -(-longest // BLOCK) * BLOCK)
    # Twice for short windows, and twice for paired heads, which have two positions per token.
    now = copy.copy(now)
    now.window = max(now.window, 4 * (longest + BLOCK))
    now.short = now.window // 2
    scores = torch.zeros(len(documents), dtype=torch.float64)
    chunk = 256 if device.type == "cpu" else 4096  # rows: 0.8 GB of float32 logits
    tokens, places, targets, owners = [], [], [], []  # of the sequence that is being filled
    for i, document in enumerate(tqdm(documents, disable=None, leave=False)):
        tokens += gap
        first = len(tokens) + starts[i] - 1  # the place after which the first scored token comes
        tokens += document
        places += range(first, len(tokens) - 1)
        targets += document[starts[i] :]
        owners += [i] * (len(document) - starts[i])
        if len(documents) > i + 1 and len(tokens) + len(gap) + len(documents[i + 1]) <= size:
            continue
        tokens += [END_OF_TEXT] * (size - len(tokens))
        x = model.hidden(torch.tensor(tokens, dtype=torch.int32, device=device), now)
        x = x[torch.tensor(places, device=device)].split(chunk)
        right = torch.tensor(targets, device=device).split(chunk)
        parts = torch.tensor(owners).split(chunk)
        for rows, row_targets, row_owners in zip(x, right, parts, strict=True):
            losses = F.cross_entropy(model.lm_head.logits(rows), row_targets, reduction="none")
            scores.index_add_(0, row_owners, -losses.double().cpu())
        tokens, places, targets, owners = [], [], [], []
    return scores


def accuracies(questions: list[Question], scores: Tensor) -> tuple[float, float]:
    """Return the shares of questions whose right ending has the greatest score, and the greatest
    score per token."""
    by_sum = by_mean = 0
    of_documents = iter(scores.tolist())
    for documents, start, label in questions:
        sums = [next(of_documents) for _ in documents]
        means = [s / (len(d) - start) for s, d in zip(sums, documents, strict=True)]
        by_sum += sums.index(max(sums)) == label
        by_mean += means.index(max(means)) == label
    return by_sum / len(questions), by_mean / len(questions)


def print_accuracies(checkpoint: Checkpoint, device: torch.device, path: Path, limit: int) -> None:
    """Print the accuracies on the first `limit` questions of a file (0: on all)."""
    questions = read_questions(path, limit)
    documents = [document for q in questions for document in q[0]]
    starts = [q[1] for q in questions for _ in q[0]]
    scores = log_likelihoods(checkpoint.model(device), documents, starts, checkpoint.now)
    acc, acc_norm = accuracies(questions, scores)
    error = (acc_norm * (1 - acc_norm) / len(questions)) ** 0.5
    accuracy = f"acc {acc:.4f}  acc_norm {acc_norm:.4f}  standard error {error:.4f}"
    print(f"{accuracy}, {len(questions)} questions")


def evaluate(argv: list[str] | None) -> None:
    """Evaluate the checkpoint that the words name. UserError if they are invalid."""
    parser = argparse.ArgumentParser(prog="evaluate.py", description=__doc__)
    text = "print accuracies on HellaSwag, or on the questions of a FILE"
    parser.add_argument("--hellaswag", nargs="?", const="", metavar="FILE", help=text)
    parser.add_argument("--limit", type=int, default=0, help="HellaSwag questions to ask [0: all]")
    args, checkpoint = parse_with_checkpoint(parser, argv)
    if args.limit < 0:
        raise UserError("--limit: must be at least 0")
    device, _, _ = train_gpt.start_device(checkpoint.hp.device)
    print(checkpoint)
    if args.hellaswag is None:
        return print_loss(checkpoint, device)
    if hasattr(checkpoint.hp, "context_len"):  # a sequence holds many questions
        reason = "its model has no document mask, so a question would see the others"
        raise UserError(f"{checkpoint.path} cannot be scored on HellaSwag: {reason}")
    path = Path(args.hellaswag or HERE / "data" / "hellaswag" / "hellaswag_val.jsonl")
    if not (args.hellaswag or path.exists()):
        fetch(path)
    print_accuracies(checkpoint, device, path, args.limit)


def main(argv: list[str] | None = None) -> None:
    """Print what a checkpoint reaches. An error is one line and status 1."""
    train_gpt.as_program("evaluate.py", lambda: evaluate(argv))


if __name__ == "__main__":
    main()
