"""HellaSwag: packed scores equal the plain ones, and say what a model has learned."""

import hashlib
import http.server
import json
import random
import re
import threading
from dataclasses import replace

import hellaswag
import pytest
import reference
import torch
from conftest import ROOT
from hellaswag import accuracies, log_likelihoods, read_questions
from runs import run

import train_gpt
from train_gpt import RECORDS, UserError

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


@pytest.fixture
def questions(tmp_path, monkeypatch):
    """Return make(n, longest), which reads n made-up questions from a file, renumbered; 0 ends a
    text."""
    monkeypatch.setattr(train_gpt, "END_OF_TEXT", 0)
    monkeypatch.setattr(hellaswag, "END_OF_TEXT", 0)

    def make(*how) -> list:
        path = tmp_path / "made_up.jsonl"
        number = {0: 0}
        path.write_text("".join(json.dumps(row) + "\n" for row in made_up(*how)))
        asked = [
            ([[number.setdefault(t, len(number)) for t in text] for text in texts], *rest)
            for texts, *rest in read_questions(path, limit=0)
        ]
        assert len(number) <= VOCAB
        return asked

    return make


def packed(model, questions, window: int, *ranks) -> torch.Tensor:
    """Return the scores of all documents, by the moment after training with a long window."""
    now = train_gpt.moment(model.hp.num_iterations, model.hp)
    now = replace(now, window=window, short=window // 2)
    documents = [document for q in questions for document in q[0]]
    starts = [start for texts, start, _ in questions for _ in texts]
    return log_likelihoods(model, documents, starts, now, *ranks)


@pytest.mark.parametrize("record", ["2024-11-24_WindowWarmup", "2025-01-26_BatchSize"])
def test_packed_scores_are_those_of_one_document_at_a_time_in_float64(
    record, questions, randomize, monkeypatch
):
    """Against a separate reading of the model: what the whole document costs, less its context."""
    sizes = {"model_dim": 32, "num_heads": 2, "head_dim": 16, "vocab_size": VOCAB}
    model = randomize(train_gpt.GPT(replace(RECORDS[record], **sizes))).eval()
    weights = {name: w.double() for name, w in model.state_dict().items()}
    asked = questions(6, 200)
    expected = []
    for documents, start, _ in asked:

        def cost(tokens: list[int]) -> float:
            t = torch.tensor(tokens)
            loss = reference.loss(weights, t[:-1], t[1:], 1792, heads=2, year=int(record[:4]))
            return loss.item() * (len(tokens) - 1)

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


def test_a_random_model_guesses(questions, tiny, randomize):
    """200 questions: a quarter, up to four standard deviations."""
    model = randomize(train_gpt.GPT(replace(tiny, vocab_size=VOCAB))).eval()
    asked = questions(200)
    for share in accuracies(asked, packed(model, asked, 256)):
        assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 200) ** 0.5


def test_a_model_trained_on_the_answers_knows_them_all(questions, tiny):
    asked = questions(12)
    tokens = [token for documents, _, label in asked for token in documents[label]]
    tokens += [0] * (-len(tokens) % 128 + 1)
    hp = replace(
        tiny,
        vocab_size=VOCAB,
        model_dim=64,
        seq_len=len(tokens) - 1,
        batch_seqs=1,
        window_min=512,
        num_iterations=50,
    )
    model = train_gpt.GPT(hp)
    optimizers = train_gpt.Optimizers(model, hp)
    batch = torch.tensor([tokens])
    for step in range(50):
        now = train_gpt.moment(step, hp)
        train_gpt.train_step(model, optimizers, batch[:, :-1].int(), batch[:, 1:], now)
    assert accuracies(asked, packed(model.eval(), asked, 256)) == (1.0, 1.0)


def test_accuracies_worked_out_by_hand():
    """The sums are greatest for 1 and 2, the means for 0 and 2; the labels are 1 and 2."""
    asked = [([[0] * 9, [0] * 6], 5, 1), ([[0] * 7, [0] * 7, [0] * 7], 5, 2)]
    scores = torch.tensor([-4.0, -1.5, -2.0, -3.0, -1.0])
    assert accuracies(asked, scores) == (1.0, 0.5)


def test_on_two_ranks_it_prints_what_it_prints_on_one(trained, tmp_path, capsys):
    data = tmp_path / "it.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in made_up(30)))
    words = [str(trained.path), "--data", str(data), "--limit", "20", "--device", "cpu"]
    hellaswag.main(words)
    alone = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{trained.path}: 20 questions in \d+\.\d s", alone[0])
    assert re.fullmatch(r"acc 0\.\d{4}  acc_norm 0\.\d{4}  standard error 0\.\d{4}", alone[1])
    done = run(words, ranks=2, script=str(ROOT / "tools" / "hellaswag.py"))
    assert done.stdout.splitlines()[1:] == alone[1:], done.stderr


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Serve as the dataset's home, on the loopback interface; home.data is what it gives."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", str(home.length))
            self.end_headers()
            self.wfile.write(home.data)

        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as home:
        threading.Thread(target=home.serve_forever, daemon=True).start()
        home.data = "".join(json.dumps(row) + "\n" for row in made_up(5)).encode()
        home.length = len(home.data)
        monkeypatch.setattr(hellaswag, "HOME", f"http://127.0.0.1:{home.server_port}/val.jsonl")
        monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(home.data).hexdigest())
        monkeypatch.setattr(hellaswag, "HERE", tmp_path)
        yield home
        home.shutdown()


def test_questions_are_fetched_once_and_only_whole(home, trained, tmp_path, capsys):
    path = tmp_path / "data/hellaswag/hellaswag_val.jsonl"
    whole = home.data
    words = [str(trained.path), "--device", "cpu"]
    for data, message in (
        (whole[:-10], "could not fetch"),
        (whole.replace(b"river", b"rivet"), "has SHA-256"),
    ):
        home.data = data
        with pytest.raises(SystemExit) as stop:
            hellaswag.main(words)
        assert stop.value.code == 1 and message in capsys.readouterr().err
        assert not list(tmp_path.rglob("hellaswag_val*"))
    home.data = whole
    hellaswag.main(words)
    assert ": 5 questions in" in capsys.readouterr().out and path.read_bytes() == whole
    home.shutdown()
    hellaswag.main(words)
    assert ": 5 questions in" in capsys.readouterr().out


QUESTION = '{"ctx": "a", "endings": ["b", "c", "d", "e"], "label": 3}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it.jsonl holds no question"),
        (QUESTION + '{"ctx": 1}\n', "it.jsonl:2: not a HellaSwag question"),
        (QUESTION.replace("3", "-1"), "it.jsonl:1: not a HellaSwag question"),
        (QUESTION.replace(', "e"', ""), "it.jsonl:1: not a HellaSwag question"),
        ("\udcff", "it.jsonl:0: not a HellaSwag question (UnicodeDecodeError"),
        (QUESTION + "no json\n", "it.jsonl:2: not a HellaSwag question (JSONDecodeError"),
    ],
)
def test_a_bad_file_is_named_with_its_line(text, message, tmp_path):
    (tmp_path / "it.jsonl").write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=re.escape(message)):
        read_questions(tmp_path / "it.jsonl", limit=0)


def test_an_error_is_one_line(trained, tmp_path, capsys):
    (tmp_path / "it.jsonl").write_text("no json\n")
    with pytest.raises(SystemExit) as stop:
        hellaswag.main([str(trained.path), "--data", str(tmp_path / "it.jsonl"), "--device", "cpu"])
    err = capsys.readouterr().err
    assert stop.value.code == 1 and err.count("\n") == 1
    assert err.startswith(f"hellaswag.py: error: {tmp_path / 'it.jsonl'}:1: not a Hella")
