"""Sampling: a cache that changes nothing, chances as they should be, and text from the terminal."""

import argparse
import re
import sys
from dataclasses import replace

import pytest
import sample
import torch
from conftest import ROOT
from sample import Decoder, Rereader, choose, gpt2_encoding, parse_with_checkpoint, text_of

import train_gpt
from train_gpt import BLOCK, RECORDS, main

END = 3  # ends a document in these tests: of 48 tokens, a random model says it often enough


@pytest.fixture(params=["blocks", "tokens"])
def model(request, tiny, randomize, monkeypatch) -> train_gpt.GPT:
    """Return a model of random weights under either rule of windows, with all kinds of layers."""
    monkeypatch.setattr(train_gpt, "END_OF_TEXT", END)
    hp = replace(tiny, vocab_size=48)
    if request.param == "tokens":
        like = RECORDS["2024-11-24_WindowWarmup"]
        names = ("layers", "window_rule", "rope", "rope_base", "attn_scale", "logit_softcap")
        hp = replace(hp, **{name: getattr(like, name) for name in names})
    return randomize(train_gpt.GPT(hp)).eval()


def with_window(model: train_gpt.GPT, window: int) -> train_gpt.Moment:
    """Return the moment after training, with a long window of so many tokens."""
    now = train_gpt.moment(model.hp.num_iterations, model.hp)
    return replace(now, window=window, short=window // 2)


def read_at_once(model: train_gpt.GPT, tokens: list[int], window: int) -> torch.Tensor:
    """Return the logits (T, vocabulary) after each of the tokens, without any memory."""
    blocks = torch.tensor(tokens + [0] * (-len(tokens) % BLOCK))
    return model.logits(blocks, window)[: len(tokens)]


def close(a: torch.Tensor, b: torch.Tensor, atol: float) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("window", [64, 256])
@torch.inference_mode()
def test_cached_tokens_are_the_uncached_ones(model, window):
    """300 of them, across ends of windows and of documents. Each is the likeliest one, but none of
    the last 44: a random model would soon repeat."""
    tokens = [END, *range(4, 40), END, *range(20, 30)]
    decoder = Decoder(model, with_window(model, window))
    rows = [decoder(tokens)]
    for _ in range(300):
        logits = rows[-1][:48].clone()
        logits[tokens[-44:]] = -torch.inf
        tokens.append(logits.argmax().item())
        rows.append(decoder(tokens[-1:]))
    assert close(torch.stack(rows), read_at_once(model, tokens, window)[-301:], atol=1e-4)
    assert tokens.count(END) > 5 and len(set(tokens)) > 44
    assert len(decoder.recent) <= window + 2 * BLOCK


@torch.inference_mode()
def test_the_reader_without_a_cache_reads_all_again(model):
    tokens = [END, *range(4, 40), END, *range(20, 30)]
    reader = Rereader(model, with_window(model, 64))
    rows = [reader(tokens[:20]), reader(tokens[20:21]), reader(tokens[21:])]
    assert close(torch.stack(rows), read_at_once(model, tokens, 64)[[19, 20, -1]], atol=1e-5)


@torch.inference_mode()
def test_a_long_prompt_is_read_in_blocks(model):
    """Its last document is longer than the window; a change far back in the window is seen."""
    decoder = Decoder(model, with_window(model, 256))
    prompt = torch.randint(4, 48, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt[100] = END
    expected = read_at_once(model, prompt, 256)[-1]
    assert close(decoder(prompt), expected, atol=1e-4)
    more = prompt[:200]
    assert close(decoder(more), read_at_once(model, prompt + more, 256)[-1], atol=1e-4)
    prompt[-190] = 47 - prompt[-190]
    changed = Decoder(model, with_window(model, 256))(prompt)
    assert not close(changed, expected, atol=5e-4)


def test_choices_follow_the_softmax_of_the_likeliest():
    generator = torch.Generator().manual_seed(0)
    logits, count = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.5]), 4000
    drawn = [choose(logits, 0.5, 3, generator) for _ in range(count)]
    weights = {1: 2.0**0, 4: 2.718281828 ** ((2.5 - 3.0) / 0.5), 2: 2.718281828 ** (-1.0 / 0.5)}
    assert set(drawn) == set(weights)
    for token, weight in weights.items():
        p = weight / sum(weights.values())
        assert abs(drawn.count(token) / count - p) < 4 * (p * (1 - p) / count) ** 0.5
    assert {choose(logits, 0.5, 0, generator) for _ in range(count)} == {0, 1, 2, 3, 4}
    assert choose(logits, 0.0, 0, generator) == choose(logits, 1e-40, 0, generator) == 1


def test_pieces_of_text_are_whole_characters():
    encoding, text = gpt2_encoding(), "naïve 🙂 日本語\n\nend"
    tokens = encoding.encode(text)
    pieces = list(text_of(tokens, encoding))
    assert "".join(pieces) == text and len(tokens) > 12 and "🙂" in "".join(pieces[:6])
    assert list(text_of([50256, *encoding.encode("A")], encoding))[:2] == ["<|endoftext|>\n", "A"]
    assert list(text_of(encoding.encode("日")[:1], encoding)) == ["", "\ufffd"]  # not all of it


def test_the_command_that_a_run_prints_last_gives_text(trained, capsys, monkeypatch):
    """As is, with a seed twice, and greedily with the cache and without."""
    monkeypatch.chdir(trained.folder)
    command = trained.console.splitlines()[-1]
    words = re.fullmatch(r"read what it writes: (.*/run\.sh) tools/sample\.py (\S+)", command)
    assert words[1] == str(ROOT / "run.sh") and trained.folder / words[2] == trained.path

    def written(*flags: str) -> str:
        sample.main([words[2], *flags])
        out, err = capsys.readouterr()
        assert re.fullmatch(rf"{words[2]}, --seed \d+\n\d+\.\d tokens/s\n", err)
        return out

    a, b, c = (written("--tokens", "20", "--seed", seed) for seed in "112")
    assert a == b != c and len(a.split("-" * 80)) == 3
    long = ["--n", "1", "--tokens", "140", "--temperature", "0", "--prompt", "a b c"]
    text = written(*long)
    assert text.startswith("a b c") and text == written(*long, "--no_cache")


@pytest.fixture
def saved_by(trained, tmp_path, monkeypatch):
    """Return save(name), which writes a checkpoint that names a script, in an empty folder, where
    the test runs; without a name, it has weights only, as a published one. It returns the file's
    name. What the test imports from there is forgotten."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)

    def save(name: str | None) -> str:
        state = torch.load(trained.path, weights_only=True)
        state = {"model": state["model"]} if name is None else state | {"script": name}
        torch.save(state, "it.pt")
        return "it.pt"

    yield save
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def run_class_of(words: list[str]) -> type[train_gpt.Run]:
    """Return the Run by which a tool reads the checkpoint."""
    return parse_with_checkpoint(argparse.ArgumentParser(), words)[1].run_class


FORK = "import train_gpt\n\n\nclass Run(train_gpt.Run):\n    pass\n"


def test_a_checkpoint_is_read_by_the_script_whose_file_name_it_has(saved_by, tmp_path):
    """Of a path the name alone counts: a checkpoint cannot choose a file elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/sampled_fork.py").write_text("raise RuntimeError")
    path = saved_by(f"{tmp_path}/elsewhere/sampled_fork.py")
    with pytest.raises(train_gpt.UserError) as refusal:
        run_class_of([path])
    assert "it.pt was saved by sampled_fork.py; there is no script " in str(refusal.value)
    assert "name one by its path" in str(refusal.value)
    (tmp_path / "sampled_fork.py").write_text(FORK)
    found = run_class_of([path])
    assert train_gpt.script_of(found) == tmp_path / "sampled_fork.py"
    assert run_class_of([path, "--script", str(ROOT / "train_gpt.py")]) is train_gpt.Run
    assert run_class_of([saved_by("train_gpt.py")]) is train_gpt.Run
    assert run_class_of([path, "--script", "./sampled_fork.py"]) is found


def test_a_published_checkpoint_is_train_gpts(saved_by):
    sizes = ["--model_dim", "32", "--num_heads", "2", "--head_dim", "16", "--device", "cpu"]
    assert run_class_of([saved_by(None), "--record", "demo", *sizes]) is train_gpt.Run


def test_a_checkpoint_of_a_fork_writes_text(saved_by, tmp_path, capsys):
    (tmp_path / "sampled_fork.py").write_text(FORK)
    sample.main([saved_by("sampled_fork.py"), "--n", "1", "--tokens", "5", "--device", "cpu"])
    assert "it.pt, --seed" in capsys.readouterr().err


def test_without_a_name_it_is_the_newest_checkpoint(trained, monkeypatch, capsys):
    monkeypatch.chdir(trained.folder)
    sample.main(["--n", "1", "--tokens", "5", "--device", "cpu"])
    assert "logs/it/state_step000008.pt, --seed" in capsys.readouterr().err
    main(["--eval", "auto", "--device", "cpu"])
    assert "over 1024 tokens, logs/it/state_step000008.pt\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "no checkpoint under logs/: train a model first, or name one"),
        ("logs/none.pt", "there is no checkpoint logs/none.pt: name a file, or auto"),
        ("broken.pt", "broken.pt is not a whole checkpoint of this program"),
        ("it.pt --tokens 0", "--n and --tokens: at least 1"),
        ("it.pt --temperature nan", "--temperature and --top_k: at least 0"),
        ("it.pt --seed 9999999999999999999999", "--seed 9999999999999999999999: from 0 to"),
        ("--tokens many", "argument --tokens: invalid int value: 'many'"),
        ("--tocens 3", "unrecognized arguments: --tocens 3"),
        ("it.pt --script none.py", "there is no script none.py: name one by its path"),
        ("words.pt", "words.pt: 512 tokens are not GPT-2's vocabulary"),
    ],
)
def test_what_cannot_be_ends_with_one_line(words, message, flags, trained, tmp_path, capsys):
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    (tmp_path / "it.pt").symlink_to(trained.path)
    if words == "words.pt":
        main([*flags, "--num_iterations", "1", "--save_every", "1"])
        next(tmp_path.glob("logs/*/*.pt")).rename(words)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        sample.main(words.split())
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("sample.py: error: ") and message in err and err.count("\n") == 1
