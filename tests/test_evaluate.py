"""tools/evaluate.py: loss, bits per byte and HellaSwag's accuracies, computed in other ways."""

import hashlib
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import evaluate
import reference
import train_gpt
import train_gpt_track3
from conftest import ROOT, at_window
from gpt2 import gpt2_encoding
from runs import error_of
from test_sample import END, at_windows, model, read_at_once  # noqa: F401

FLAGS = "--record demo --model_dim 32 --num_heads 2 --head_dim 16 --num_iterations 8"
FLAGS += " --device cpu --val_seq_len 256 --val_tokens 2048 --norm_eps 0.0078125"
LAYERS = [("long", 0, None), ("half", 1, None), ("half", 1, 1), ("long", 2, 0)]  # of the demo


def test_loss_and_bits_per_byte_are_those_of_the_specification(trained, tmp_path, capsys):
    """In float64, on 2048 tokens, whose bytes tiktoken decodes. The checkpoint is like a published
    one: it has torch.compile's prefix in its names and no settings, and names no script."""
    weights = torch.load(trained.path, weights_only=True)["model"]
    of_compiled = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    path = tmp_path / "state_step000008.pt"
    torch.save({"step": 8, "code": "", "model": of_compiled, "optimizers": []}, path)
    evaluate.main([str(path), *FLAGS.split()])
    first, line = capsys.readouterr().out.splitlines()
    assert first == f"{path}, saved by a script that it does not name"

    tokens = np.fromfile(ROOT / "data/kjv_val_000000.bin", "<u2", 2049, offset=1024)
    tokens = torch.from_numpy(tokens.astype(np.int64))
    weights, total = {name: weight.double() for name, weight in weights.items()}, 0.0
    for start in range(0, 2048, 256):
        x, y = tokens[start : start + 256], tokens[start + 1 : start + 257]
        total += 256 * reference.loss(weights, x, y, 256, 2, 2025, LAYERS).item()
    text = [token for token in tokens[1:].tolist() if token != 50256]
    bits = total / math.log(2) / len(gpt2_encoding().decode_bytes(text))
    loss_word, bits_word, *rest = line.split()
    assert float(loss_word.removeprefix("val_loss:")) == pytest.approx(total / 2048, abs=2e-5)
    assert float(bits_word.removeprefix("bits_per_byte:")) == pytest.approx(bits, abs=2e-5)
    assert rest == ["over", "2048", "tokens"]


# ---- HellaSwag

WORDS = "the a cat dog river stone walks sings under over blue old house bird 7"


def made_up(path: Path, count: int) -> list[dict]:
    """Write questions of random words; endings differ in length, and some labels are texts."""
    rng, words, rows = random.Random(0), WORDS.split(), []
    for i in range(count):
        texts = [" ".join(rng.choices(words, k=rng.randint(2, n))) for n in (30, 6, 6, 6, 6)]
        rows.append({"ctx": texts[0], "endings": texts[1:]})
        rows[i]["label"] = rng.choice("0123") if i % 3 else rng.randrange(4)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@torch.no_grad()
def test_packed_documents_have_the_scores_that_they_have_alone(model, monkeypatch):  # noqa: F811
    """Behind three ends of text, however narrow the window of the last step was."""
    monkeypatch.setattr(evaluate, "END_OF_TEXT", END)
    rng = random.Random(0)
    documents, starts, expected = [], [], []
    for length in (70, 200, 33, 150, 90, 370, 5):
        documents.append([END, *rng.choices(range(END), k=length)])
        starts.append(rng.randint(1, length))
        tokens = [END, END, END, *documents[-1]]
        chances = read_at_once(model, tokens, at_windows(model, 1024)).log_softmax(1)
        places = range(len(tokens))[3 + starts[-1] :]
        scores = [chances[i - 1, tokens[i]].double().item() for i in places]
        expected.append(sum(scores))
    for size in (512, 1024):
        monkeypatch.setitem(evaluate.SEQUENCE, "cpu", size)
        now = at_windows(model, 128)
        found = evaluate.log_likelihoods(model, documents, starts, now)
        assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_questions_are_fetched_once_and_only_whole_and_scored(
    trained, tmp_path, monkeypatch, capsys
):
    """The expected accuracies are of one document at a time. Questions and labels are read anew."""
    path, home = tmp_path / "data/hellaswag/hellaswag_val.jsonl", tmp_path / "home.jsonl"
    rows = made_up(home, 15)
    whole = home.read_bytes()
    monkeypatch.setattr(evaluate, "HOME", home.as_uri())
    monkeypatch.setattr(evaluate, "SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr(evaluate, "HERE", tmp_path)
    words = [str(trained.path), "--device", "cpu", "--hellaswag", "--limit", "12"]
    home.write_bytes(whole.replace(b"river", b"rivet"))
    status, err = error_of(words, capsys, evaluate.main)
    assert status == 1 and "could not fetch" in err and not path.exists()
    home.write_bytes(whole)
    evaluate.main(words)
    home.unlink()
    evaluate.main(words)
    line, again = [text for text in capsys.readouterr().out.splitlines() if "acc" in text]
    assert line == again and path.read_bytes() == whole

    saved = train_gpt.load_checkpoint(trained.path, train_gpt.Run)
    scorer = train_gpt.GPT(saved["hyperparameters"]).eval()
    scorer.load_state_dict(saved["model"])
    encode = gpt2_encoding().encode_ordinary
    right = torch.zeros(2)
    for row in rows[:12]:
        sums, means = [], []
        for ending in row["endings"]:
            tokens = [50256, *encode(f"{row['ctx']} {ending}")]
            with torch.no_grad():
                logits = read_at_once(scorer, tokens, at_window(256, scorer.hp))
            scores = logits.log_softmax(1)[range(len(tokens) - 1), tokens[1:]]
            scores = scores[len(encode(row["ctx"])) :]
            sums.append(scores.sum())
            means.append(scores.mean())
        chosen = torch.tensor([sums, means]).argmax(1)
        right += chosen == int(row["label"])
    by_sum, by_mean = (right / 12).tolist()
    error = (by_mean * (1 - by_mean) / 12) ** 0.5
    expected = f"acc {by_sum:.4f}  acc_norm {by_mean:.4f}  standard error {error:.4f}"
    assert line == f"{expected}, 12 questions"


def test_what_cannot_be_scored_is_refused(trained, randomize, tmp_path, capsys):
    """A file of other rows; and a model whose questions would see each other."""
    (tmp_path / "it.jsonl").write_text('{"ctx": "a", "endings": ["b"], "label": 0}\n')
    made_up(tmp_path / "right.jsonl", 3)
    hp = train_gpt_track3.Run.records["demo"]
    of_track3 = {"script": "train_gpt_track3.py", "record": "demo", "step": 1, "seconds": 1.0}
    of_track3["model"] = randomize(train_gpt_track3.GPT(hp)).state_dict()
    torch.save(of_track3 | {"hyperparameters": dict(vars(hp))}, tmp_path / "it.pt")
    for path, questions, message in (
        (trained.path, "it.jsonl", "it.jsonl:1: not a HellaSwag question (IndexError"),
        (tmp_path / "it.pt", "right.jsonl", "its model has no document mask"),
    ):
        words = [path, "--hellaswag", tmp_path / questions, "--device", "cpu"]
        status, err = error_of(words, capsys, evaluate.main)
        assert status == 1 and message in err
