"""tools/sample.py: a cache that changes nothing, chances as they should be, text in a terminal.
tools/evaluate.py: loss and bits per byte, computed in another way."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import evaluate
import reference
import sample
import train_gpt
import train_gpt_2026
from conftest import ROOT, at_window
from frontier.small_runs import ROW, SIZES, C, D, M
from sample import Decoder, choose
from tokenizer import GPT2, HuggingFace, text_after
from train_gpt import BLOCK, RECORDS, Moment

END = 63  # begins a document, where tokens are 64
TOKENIZER = GPT2(RECORDS["demo"].end_of_text)


@pytest.fixture(params=["blocks", "tokens", C, D, M])
def model(request, tiny, randomize, monkeypatch) -> train_gpt.GPT:
    """Return a model of random weights with all kinds of layers: of train_gpt.py, under either rule
    of windows, or of three records of the fork."""
    if request.param in ROW:
        words = f"{ROW[request.param]} {SIZES} --vocab_size 64 --end_of_text {END} --tied_frac 0"
        words += " --tokenizer none --num_heads 4 --head_dim 8"
        hp, _ = train_gpt.parse_args(words.split(), train_gpt_2026.Run)
        return randomize(train_gpt_2026.GPT(hp)).eval()
    hp = replace(tiny, vocab_size=64, end_of_text=END)
    if request.param == "tokens":
        like = RECORDS["2024-11-24_WindowWarmup"]
        names = ("layers", "window_rule", "rope", "rope_base", "attn_scale", "logit_softcap")
        hp = replace(hp, **{name: getattr(like, name) for name in names})
    return randomize(train_gpt.GPT(hp)).eval()


def at_windows(model: train_gpt.GPT, window: int) -> Moment:
    """Return the moment of a model's last step, with this long window."""
    script = sys.modules[type(model).__module__]
    now = script.Moment(model.hp.num_iterations, model.hp)
    now.window = window
    if script is not train_gpt:
        now.short = window // 2
    return now


def read_at_once(model: train_gpt.GPT, tokens: list[int], now: Moment) -> torch.Tensor:
    """Return the logits (T, vocabulary) after each of the tokens, without a cache."""
    blocks = torch.tensor(tokens + [0] * (-len(tokens) % BLOCK))
    return model.lm_head.logits(model.hidden(blocks, now))[: len(tokens)]


def tokens_in_cache(model, now: Moment, tokens: list[int], sizes: list[int]) -> int:
    """Read tokens in pieces of these sizes, and compare with what is read at once. Return how many
    tokens the cache keeps."""
    expected = read_at_once(model, tokens, now)
    decoder, place = Decoder(model, now), 0
    for size in sizes:
        place += size
        found = decoder(tokens[place - size : place])
        assert torch.allclose(found, expected[place - 1], rtol=0, atol=2e-4), place
    assert place == len(tokens)
    return len(decoder.recent)


@pytest.mark.parametrize("window", [128, 256])
@torch.inference_mode()
def test_a_cache_changes_no_logits(window, model):
    """In pieces and one by one, until blocks have left the cache."""
    now = at_windows(model, window)
    tokens = torch.randint(END, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in (0, 40, 41, 130, 600):
        tokens[place] = END
    sizes = [1, 1, 1, 47, 1, 99, *[1] * 300, 120, *[1] * 70]
    assert tokens_in_cache(model, now, tokens, sizes) <= window + 2 * BLOCK


def test_choices_follow_the_softmax_of_the_likeliest():
    generator = torch.Generator().manual_seed(0)
    logits, count = torch.tensor([1.0, 3.0, 2.0, 0.0, 2.5, 9.0]), 4000  # the last one is padding
    drawn = [choose(logits, 5, 0.5, 3, generator) for _ in range(count)]
    weights = {1: 2.0**0, 4: 2.718281828 ** ((2.5 - 3.0) / 0.5), 2: 2.718281828 ** (-1.0 / 0.5)}
    assert set(drawn) == set(weights)
    for token, weight in weights.items():
        p = weight / sum(weights.values())
        assert abs(drawn.count(token) / count - p) < 4 * (p * (1 - p) / count) ** 0.5
    for all_of_them in (0, 9):
        drawn = {choose(logits, 5, 0.5, all_of_them, generator) for _ in range(count)}
        assert drawn == {0, 1, 2, 3, 4}
    assert choose(logits, 5, 0.0, 0, generator) == choose(logits, 5, 1e-40, 0, generator) == 1


def ids_of(words) -> dict[str, int]:
    return {word: i for i, word in enumerate(["<s>", *words])}


def of_bytes() -> Tokenizer:
    """As GPT-2's, of single bytes."""
    tokenizer = Tokenizer(models.BPE(ids_of(pre_tokenizers.ByteLevel.alphabet()), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def of_llama_2() -> Tokenizer:
    """Of characters, and of bytes for those that it does not have."""
    ids = ids_of([*"▁abcdefghijklmnopqrstuvwxyz", *(f"<0x{byte:02X}>" for byte in range(256))])
    tokenizer = Tokenizer(models.BPE(ids, [], byte_fallback=True))
    space = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return tokenizer


def of_words() -> Tokenizer:
    ids = ids_of(["▁the", "▁old", "▁river", "▁🙂中"])
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<s>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def of_bert() -> Tokenizer:
    ids = ids_of(["the", "old", "ri", "##ver", "🙂", "##中"])
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TEXT = "the old river 🙂中"


@pytest.mark.parametrize("make", [None, of_bytes, of_llama_2, of_words, of_bert])
def test_a_text_comes_in_whole_characters_with_its_spaces(make, tmp_path):
    """After each part of it as a prompt, and in a second document. Where tokens are bytes, a torn
    character costs no other."""
    tokenizer = TOKENIZER
    if make:
        make().save(str(tmp_path / "it.json"))
        tokenizer = HuggingFace(str(tmp_path / "it.json"), 0)
    tokens, end = tokenizer.encode(TEXT), tokenizer.end_of_text
    prompts = [tokens[:i] for i in range(len(tokens))]
    prompts = [prompt for prompt in prompts if not tokenizer.decode(prompt).endswith("\ufffd")]
    assert len(prompts) >= 4
    for prompt in prompts:
        pieces = [*text_after(prompt, [*tokens[len(prompt) :], end, *tokens], tokenizer)]
        expected = f"{TEXT}{tokenizer.mark}\n{TEXT}"
        assert tokenizer.decode(prompt) + "".join(pieces) == expected
        assert not any("\ufffd" in piece for piece in pieces)
    if make in (None, of_bytes, of_llama_2):
        torn = tokens[:-1]
        written = "".join(text_after([], [*torn, *tokens, end, *torn], tokenizer))
        first, *_, rest = written.rstrip("\ufffd").split("\ufffd")
        assert first == TEXT[:-1] and rest.strip() == expected[:-1]
        assert written.endswith("\ufffd")


@torch.inference_mode()
def test_text_is_that_of_the_seed_or_of_the_likeliest_tokens(trained, capsys, monkeypatch):
    """Of the newest checkpoint, without a cache."""
    monkeypatch.chdir(trained.folder)

    def written(*flags: str) -> str:
        sample.main(list(flags))
        return capsys.readouterr().out

    a, b, c = (written("--n", "2", "--tokens", "20", "--seed", seed) for seed in "112")
    assert a == b != c and len(a.split("-" * 80)) == 2
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)

    saved = train_gpt.load_checkpoint(trained.path, train_gpt.Run)
    model = train_gpt.GPT(saved["hyperparameters"]).eval()
    model.load_state_dict(saved["model"])
    tokens = [model.hp.end_of_text, *TOKENIZER.encode("a b c")]
    for _ in range(10):
        logits = read_at_once(model, tokens, at_window(256, model.hp))
        tokens.append(logits[-1].argmax().item())
    text = written("--n", "1", "--tokens", "10", "--temperature", "0", "--prompt", "a b c")
    assert text == TOKENIZER.encoding.decode(tokens[1:]) + "\n"
    monkeypatch.setattr(sample, "choose", lambda *_: TOKENIZER.encode("\a")[0])
    assert written("--n", "1", "--tokens", "2") == "\\x07\\x07\n"


FLAGS = "--record demo --model_dim 32 --num_heads 2 --head_dim 16 --num_iterations 8"
FLAGS += " --device cpu --val_seq_len 256 --val_tokens 2048 --norm_eps 0.0078125"
LAYERS = [("long", 0, None), ("half", 1, None), ("half", 1, 1), ("long", 2, 0)]  # of the demo


def test_loss_and_bits_per_byte_are_those_of_the_specification(trained, tmp_path, capsys):
    """In float64, on 2048 tokens, whose bytes tiktoken decodes. The checkpoint is like a published
    one: it has torch.compile's prefix in its names and no settings, and names no script. At its
    step, windows have one block."""
    weights = torch.load(trained.path, weights_only=True)["model"]
    of_compiled = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    path = tmp_path / "state_step000004.pt"
    torch.save({"step": 4, "code": "", "model": of_compiled, "optimizers": []}, path)
    evaluate.main([str(path), *FLAGS.split()])
    first, line = capsys.readouterr().out.splitlines()
    assert first == f"{path}, saved by a script that it does not name"

    tokens = np.fromfile(ROOT / "data/kjv_val_000000.bin", "<u2", 2049, offset=1024)
    tokens = torch.from_numpy(tokens.astype(np.int64))
    weights, total = {name: weight.double() for name, weight in weights.items()}, 0.0
    for start in range(0, 2048, 256):
        x, y = tokens[start : start + 256], tokens[start + 1 : start + 257]
        total += 256 * reference.loss(weights, x, y, 128, 2, 2025, LAYERS).item()
    text = [token for token in tokens[1:].tolist() if token != TOKENIZER.end_of_text]
    bits = total / math.log(2) / len(TOKENIZER.encoding.decode_bytes(text))
    loss_word, perplexity_word, bits_word, *rest = line.split()
    assert float(loss_word.removeprefix("val_loss:")) == pytest.approx(total / 2048, abs=2e-5)
    perplexity = float(perplexity_word.removeprefix("perplexity:"))
    assert perplexity == pytest.approx(math.exp(total / 2048), rel=2e-5)
    assert float(bits_word.removeprefix("bits_per_byte:")) == pytest.approx(bits, abs=2e-5)
    assert rest == ["over", "2048", "tokens"]
