"""Sampling: a cache that changes nothing, chances as they should be, and text from the terminal."""

import argparse
import re
from dataclasses import replace

import pytest
import sample
import torch
from conftest import ROOT, at_window
from launch import say_what_next
from runs import error_of
from sample import Decoder, choose, gpt2_encoding, text_of
from script import parse_with_checkpoint

import train_gpt
from train_gpt import BLOCK, RECORDS

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


def read_at_once(model: train_gpt.GPT, tokens: list[int], window: int) -> torch.Tensor:
    """Return the logits (T, vocabulary) after each of the tokens, without any memory."""
    blocks = torch.tensor(tokens + [0] * (-len(tokens) % BLOCK))
    return model.lm_head.logits(model.hidden(blocks, at_window(window, model.hp)))[: len(tokens)]


def close(a: torch.Tensor, b: torch.Tensor, atol: float) -> bool:
    return torch.allclose(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("window", [64, 256])
@torch.inference_mode()
def test_cached_tokens_are_the_uncached_ones(model, window):
    """300 of them, across ends of windows and of documents. Each is the likeliest one, but none of
    the last 44: a random model would soon repeat."""
    tokens = [END, *range(4, 40), END, *range(20, 30)]
    decoder = Decoder(model, at_window(window, model.hp))
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
def test_a_long_prompt_is_read_in_blocks(model):
    """Its last document is longer than the window; a change far back in the window is seen."""
    decoder = Decoder(model, at_window(256, model.hp))
    prompt = torch.randint(4, 48, (900,), generator=torch.Generator().manual_seed(0)).tolist()
    prompt[100] = END
    expected = read_at_once(model, prompt, 256)[-1]
    assert close(decoder(prompt), expected, atol=1e-4)
    more = prompt[:200]
    assert close(decoder(more), read_at_once(model, prompt + more, 256)[-1], atol=1e-4)
    prompt[-190] = 47 - prompt[-190]
    changed = Decoder(model, at_window(256, model.hp))(prompt)
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


def test_the_command_that_the_launcher_prints_gives_text(trained, capsys, monkeypatch):
    monkeypatch.chdir(trained.folder)
    say_what_next(RECORDS["demo"], [trained.path.relative_to(trained.folder)])
    command = capsys.readouterr().out
    words = re.fullmatch(r"read what it writes: (.*/run\.sh) tools/sample\.py (\S+)\n", command)
    assert words[1] == str(ROOT / "run.sh") and trained.folder / words[2] == trained.path

    def written(*flags: str, name=(words[2],)) -> str:
        sample.main([*name, *flags])
        return capsys.readouterr().out

    a, b, c = (written("--n", "2", "--tokens", "20", "--seed", seed) for seed in "112")
    assert a == b != c and len(a.split("-" * 80)) == 2
    long = ["--n", "1", "--tokens", "140", "--temperature", "0", "--prompt", "a b c"]
    text = written(*long)
    assert text.startswith("a b c") and text == written(*long, "--no_cache")
    assert text == written(*long, name=())  # of the newest checkpoint


FORK = "import train_gpt\n\n\nclass Run(train_gpt.Run):\n    pass\n"


def test_a_checkpoint_is_read_by_the_script_whose_file_name_it_has(trained, tmp_path, monkeypatch):
    """Of a path the name alone counts: a checkpoint cannot choose a file elsewhere."""
    monkeypatch.chdir(tmp_path)
    state = torch.load(trained.path, weights_only=True)

    def run_class_of(state: dict, *words: str) -> type[train_gpt.Run]:
        torch.save(state, "it.pt")
        return parse_with_checkpoint(argparse.ArgumentParser(), ["it.pt", *words])[1].run_class

    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/sampled_fork.py").write_text("raise RuntimeError")
    forked = state | {"script": f"{tmp_path}/elsewhere/sampled_fork.py"}
    with pytest.raises(train_gpt.UserError) as refusal:
        run_class_of(forked)
    assert "it.pt was saved by sampled_fork.py; there is no script " in str(refusal.value)
    (tmp_path / "sampled_fork.py").write_text(FORK)
    found = run_class_of(forked)
    assert train_gpt.script_of(found) == tmp_path / "sampled_fork.py"
    assert run_class_of(forked, "--script", str(ROOT / "train_gpt.py")) is train_gpt.Run
    assert run_class_of(state | {"script": "train_gpt.py"}) is train_gpt.Run


def test_without_a_checkpoint_it_ends_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, err = error_of([], capsys, sample.main)
    assert status == 1
    assert err.startswith("sample.py: error: no checkpoint under logs/: train a model first")
