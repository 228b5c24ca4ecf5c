"""HellaSwag: packed scores equal those of one document at a time, and accuracies are right."""

import hashlib
import json
import random
import re
from dataclasses import replace

import hellaswag
import pytest
import reference
import torch
from conftest import at_window
from hellaswag import accuracies, log_likelihoods, read_questions
from runs import Program

import train_gpt
from gpt2 import gpt2_encoding
from train_gpt import RECORDS

WORDS = "the a cat dog river stone walks sings under over blue old house bird 7 quickly"
VOCAB = 128  # GPT-2's tokens that occur in questions of these words, numbered anew


def made_up(count: int, longest: int = 30) -> list[dict]:
    """Return questions of random words; endings differ in length, and some labels are texts."""
    rng = random.Random(0)

    def phrase(least: int, most: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=rng.randint(least, most)))

    rows = []
    for i in range(count):
        label = rng.randrange(4)
        endings = [phrase(2, 6) + "." for _ in range(4)]
        context = f"{i // 10} {i % 10}: {phrase(2, longest)}"
        rows.append({"ctx": context, "endings": endings, "label": str(label) if i % 3 else label})
    return rows


def write(path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_document_is_a_context_and_one_of_its_endings(tmp_path):
    rows = made_up(12)
    write(tmp_path / "it.jsonl", rows)
    encoding = gpt2_encoding()
    asked = read_questions(tmp_path / "it.jsonl", limit=0)
    for row, (texts, start, label) in zip(rows, asked, strict=True):
        assert label == int(row["label"])
        assert encoding.decode(texts[0][:start]) == f"<|endoftext|>{row['ctx']}"
        assert [encoding.decode(text[start:]) for text in texts] == [
            f" {ending}" for ending in row["endings"]
        ]
    assert len(read_questions(tmp_path / "it.jsonl", limit=5)) == 5


def packed(model, questions, window: int, *ranks) -> torch.Tensor:
    """Return the scores of all documents, at a moment with a long window."""
    documents = [document for q in questions for document in q[0]]
    starts = [start for texts, start, _ in questions for _ in texts]
    return log_likelihoods(model, documents, starts, at_window(window, model.hp), *ranks)


@pytest.mark.parametrize("record", ["2024-11-24_WindowWarmup", "2025-01-26_BatchSize"])
def test_packed_scores_are_those_of_one_document_at_a_time_in_float64(
    record, tmp_path, randomize, monkeypatch
):
    """The reference is the cost of the whole document, less that of its context."""
    monkeypatch.setattr(train_gpt, "END_OF_TEXT", 0)
    monkeypatch.setattr(hellaswag, "END_OF_TEXT", 0)
    write(tmp_path / "it.jsonl", made_up(6, 200))
    number = {0: 0}
    asked = [
        ([[number.setdefault(t, len(number)) for t in text] for text in texts], *rest)
        for texts, *rest in read_questions(tmp_path / "it.jsonl", limit=0)
    ]
    assert len(number) <= VOCAB
    sizes = {"model_dim": 32, "num_heads": 2, "head_dim": 16, "vocab_size": VOCAB}
    model = randomize(train_gpt.GPT(replace(RECORDS[record], **sizes))).eval()
    weights = {name: w.double() for name, w in model.state_dict().items()}

    def cost(tokens: list[int]) -> float:
        t = torch.tensor(tokens)
        loss = reference.loss(weights, t[:-1], t[1:], 1792, heads=2, year=int(record[:4]))
        return loss.item() * (len(tokens) - 1)

    expected = []
    for documents, start, _ in asked:
        context = cost(documents[0][:start])
        expected += [context - cost(document) for document in documents]
    found = packed(model, asked, 1792)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    assert accuracies(asked, found) == accuracies(asked, torch.tensor(expected))
    # However they are packed, shared out, and however narrow the window of the last step was.
    monkeypatch.setitem(hellaswag.SEQUENCE, "cpu", 512)
    assert packed(model, asked, 128).tolist() == pytest.approx(expected, rel=1e-4)
    parts = [packed(model, asked, 128, rank, 3) for rank in range(3)]
    assert sum(parts).tolist() == pytest.approx(expected, rel=1e-4)
    assert all((part == 0).any() for part in parts)


def test_accuracies_worked_out_by_hand():
    """The sums are greatest for 1 and 2, the means for 0 and 2; the labels are 1 and 2."""
    asked = [([[0] * 9, [0] * 6], 5, 1), ([[0] * 7, [0] * 7, [0] * 7], 5, 2)]
    scores = torch.tensor([-4.0, -1.5, -2.0, -3.0, -1.0])
    assert accuracies(asked, scores) == (1.0, 0.5)


def test_on_two_ranks_it_prints_what_it_prints_on_one(trained, tmp_path, capsys):
    write(tmp_path / "it.jsonl", made_up(30))
    data = str(tmp_path / "it.jsonl")
    words = [str(trained.path), "--data", data, "--limit", "20", "--device", "cpu"]
    hellaswag.main(words)
    alone = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"acc 0\.\d{4}  acc_norm 0\.\d{4}  standard error 0\.\d{4}", alone[1])
    program = Program(words, ranks=2, work=hellaswag.main)
    assert program.end() == [0, 0], program.text("err")
    assert program.text("out").splitlines()[1:] == alone[1:] and not program.text("out", 1)


def test_questions_are_fetched_once_and_only_whole(trained, tmp_path, monkeypatch, capsys):
    path, home = tmp_path / "data/hellaswag/hellaswag_val.jsonl", tmp_path / "home.jsonl"
    write(home, made_up(5))
    whole = home.read_bytes()
    monkeypatch.setattr(hellaswag, "HOME", home.as_uri())
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(hellaswag, "HERE", tmp_path)
    words = [str(trained.path), "--device", "cpu"]

    home.write_bytes(whole.replace(b"river", b"rivet"))
    with pytest.raises(SystemExit, match="1"):
        hellaswag.main(words)
    assert "has SHA-256" in capsys.readouterr().err and not path.exists()
    home.write_bytes(whole)
    hellaswag.main(words)
    assert ": 5 questions in" in capsys.readouterr().out and path.read_bytes() == whole
    home.unlink()
    hellaswag.main(words)
    assert ": 5 questions in" in capsys.readouterr().out
