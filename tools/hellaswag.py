"""Score a checkpoint on the validation questions of HellaSwag (arXiv 1905.07830).

    ./run.sh tools/hellaswag.py [CHECKPOINT]                  the newest checkpoint under logs/
    ./run.sh tools/hellaswag.py CHECKPOINT --limit 1000       the first 1000 questions only
    torchrun --standalone --nproc_per_node=8 tools/hellaswag.py CHECKPOINT

A question has four endings. Two accuracies are printed, as llm.c computes them: acc chooses the
ending of the greatest log-likelihood, acc_norm that of the greatest log-likelihood per token.
Chance is 25 %. Published: about 30 % for llm.c's GPT-2 124M and 29 % for the record of 2024-11-19;
GPT-2 itself has 28.6 % and 29.6 %.

A question with one ending is a document. Documents are packed into long sequences under training's
document mask, with a window as wide as the longest one, so that neighbours do not change a score.
The 10,042 questions are fetched once (12 MB), or read from --data, a .jsonl of the same form:
objects with `ctx`, four `endings` and a `label` from 0 to 3. Other flags are those of the script
that saved the checkpoint.
"""

import argparse
import copy
import hashlib
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import torch
import torch.nn.functional as F
from sample import gpt2_encoding
from script import Checkpoint, parse_with_checkpoint
from torch import Tensor
from tqdm import tqdm

import train_gpt  # sample.py has put it on the path
from train_gpt import BLOCK, END_OF_TEXT, GPT, HERE, Moment, UserError

HOME = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"
SEQUENCE = {"cuda": 65536, "cpu": 1024}  # tokens; a CPU's mask is as large as their square


def fetch(path: Path) -> None:
    """Download the validation questions. An incomplete or changed file is not kept."""
    print(f"fetching {HOME}", file=sys.stderr)
    try:
        with urllib.request.urlopen(HOME, timeout=60) as answer:
            data = answer.read()
    except (OSError, HTTPException) as error:
        raise UserError(f"could not fetch {HOME} ({error}); name a copy with --data") from error
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        raise UserError(f"{HOME} has SHA-256 {found}, not {SHA256}: try again, or use --data")
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(data)
    temporary.rename(path)


Question = tuple[list[list[int]], int, int]


def read_questions(path: Path, limit: int) -> list[Question]:
    """Return for each question the tokens of its four documents, the length of the context that
    they share, and the index of the right one."""
    encoding = gpt2_encoding()
    questions, number = [], 0
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
        for number, line in enumerate(lines, 1):  # noqa: B007
            if limit and len(questions) == limit:
                break
            if not line.strip():
                continue
            row = json.loads(line)
            context = [END_OF_TEXT, *encoding.encode_ordinary(row["ctx"])]
            endings = [encoding.encode_ordinary(f" {row['endings'][i]}") for i in range(4)]
            label = range(4).index(int(row["label"]))
            questions.append(([context + ending for ending in endings], len(context), label))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        found = f"{type(error).__name__}: {error}"
        raise UserError(f"{path}:{number}: not a HellaSwag question ({found})") from error
    if not questions:
        raise UserError(f"{path} holds no question")
    return questions


def pack(lengths: list[int], size: int) -> Iterator[list[tuple[int, int]]]:
    """Yield sequences of up to `size` tokens: a list of (document, its first position) each."""
    sequence, end = [], 0
    for i, length in enumerate(lengths):
        if end + length > size:
            yield sequence
            sequence, end = [], 0
        sequence.append((i, end))
        end += length
    yield sequence


@torch.no_grad()
def log_likelihoods(
    model: GPT,
    documents: list[list[int]],
    starts: list[int],
    now: Moment,
    rank: int = 0,
    world_size: int = 1,
) -> Tensor:
    """Return the log-likelihood of each document's tokens from `starts` on, summed: (n,), float64,
    on CPU. Ranks share the work, and each returns all scores."""
    device = model.lm_head.weight.device
    # A fork's model may read tokens before the start of a document. Each document follows enough
    # ends of text to hide its neighbour.
    gap = model.context_tokens
    lengths = [gap + len(document) - 1 for document in documents]  # the last token is a target only
    longest = -(-max(lengths) // BLOCK) * BLOCK
    size = max(SEQUENCE[device.type], longest)
    wide = 2 * (longest + BLOCK)  # twice: paired heads have two positions per token
    now = copy.copy(now)
    now.window, now.short = max(now.window, wide), max(now.short, wide)
    scores = torch.zeros(len(documents), dtype=torch.float64)
    sequences = list(pack(lengths, size))[rank::world_size]
    for sequence in tqdm(sequences, disable=None if rank == 0 else True, leave=False):
        tokens, places, targets, owners = [], [], [], []
        for i, place in sequence:
            document, start = documents[i], starts[i]
            tokens += [*[END_OF_TEXT] * gap, *document[:-1]]
            places += range(place + gap + start - 1, place + gap + len(document) - 1)
            targets += document[start:]
            owners += [i] * (len(document) - start)
        tokens += [END_OF_TEXT] * (size - len(tokens))
        tokens, places, targets = (torch.tensor(t).to(device) for t in (tokens, places, targets))
        x = model.hidden(tokens.int(), now)[places]
        chunk = 256 if device.type == "cpu" else 4096  # rows: 0.8 GB of float32 logits
        for rows, right, of in zip(
            x.split(chunk), targets.split(chunk), torch.tensor(owners).split(chunk), strict=True
        ):
            losses = F.cross_entropy(model.lm_head.logits(rows), right, reduction="none")
            scores.index_add_(0, of, -losses.double().cpu())
    scores = scores.to(device)
    return train_gpt.all_reduce_(scores).cpu()


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


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Checkpoint]:
    """Return flags and checkpoint; UserError if they are invalid."""
    parser = argparse.ArgumentParser(prog="hellaswag.py", description=__doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="a .jsonl of questions")
    parser.add_argument("--limit", type=int, default=0, help="number of questions [0: all]")
    args, checkpoint = parse_with_checkpoint(parser, argv)
    if args.limit < 0:
        raise UserError("--limit: must be at least 0")
    if hasattr(checkpoint.hp, "context_len"):  # a sequence holds many questions
        reason = "its model has no document mask, so a question would see the others"
        raise UserError(f"{checkpoint.path} cannot be scored: {reason}")
    return args, checkpoint


def evaluate(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Print the accuracies."""
    path = args.data or HERE / "data" / "hellaswag" / "hellaswag_val.jsonl"
    hp = checkpoint.hp
    device, rank, world_size = train_gpt.start_device(hp.device)
    if not (args.data or path.exists()) and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        fetch(path)
    train_gpt.all_reduce_(torch.zeros(1, device=device)).item()  # waits for the questions
    questions = read_questions(path, args.limit)
    model = checkpoint.model(device)
    documents = [document for q in questions for document in q[0]]
    starts = [q[1] for q in questions for _ in q[0]]
    start = train_gpt.clock(device)
    scores = log_likelihoods(model, documents, starts, checkpoint.now, rank, world_size)
    acc, acc_norm = accuracies(questions, scores)
    error = (acc_norm * (1 - acc_norm) / len(questions)) ** 0.5
    seconds = train_gpt.clock(device) - start
    print(f"{checkpoint.path}: {len(questions)} questions in {seconds:.1f} s")
    print(f"acc {acc:.4f}  acc_norm {acc_norm:.4f}  standard error {error:.4f}")


def main(argv: list[str] | None = None) -> None:
    """Print a model's accuracies. An error is one line and status 1."""
    train_gpt.as_program("hellaswag.py", lambda: evaluate(*parse(argv)))


if __name__ == "__main__":
    main()
