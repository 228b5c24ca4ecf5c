"""The mask of tokens that cannot follow, of forks/train_gpt_2026_08.py: beside published numbers,
and beside GPT-2's tokenizer itself."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import train_gpt
import train_gpt_2026_08 as script
from canonical_mask import CanonicalMask
from frontier.test_rows import SMALL, WORDS, drawn, sequence
from tokenizer import GPT2
from train_gpt import HERE, load_data_shard

SIZES = {50256: 50304, 4095: 4096}  # of GPT-2's tokens so many: of the vocabulary


@pytest.fixture(scope="module")
def masks() -> dict[int, CanonicalMask]:
    return {count: CanonicalMask(count, size) for count, size in SIZES.items()}


def hidden_after(mask: CanonicalMask, token: int) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.impossible_after(token), bitorder="little"))


# By the published program: of a token, how many cannot follow, and the sum of their numbers.
PUBLISHED = {
    0: (133, 3501594),
    220: (16185, 411455495),
    338: (0, 0),  # a contraction
    464: (705, 17262786),
    50256: (0, 0),
}


def test_it_has_the_published_numbers(masks):
    mask = masks[50256]
    for token, (count, total) in PUBLISHED.items():
        found = hidden_after(mask, token)
        assert (len(found), found.sum()) == (count, total), token


def assert_possible(mask: CanonicalMask, tokens: np.ndarray) -> None:
    """Whatever follows a token in a text can follow it."""
    for token in set(tokens[:-1].tolist()):
        after = tokens[1:][tokens[:-1] == token]
        assert not set(after.tolist()) & set(hidden_after(mask, token).tolist()), token


@pytest.mark.parametrize("count", SIZES)
def test_real_text_and_made_up_text_of_all_kinds_are_possible(masks, count):
    """Words, contractions, numbers, white space of all kinds, other scripts, broken characters."""
    encoding = GPT2(count).encoding
    sample = load_data_shard(HERE / "data/kjv_val_000000.bin")[1:20000].tolist()
    real = GPT2(4095).encoding.decode(sample)
    generator = random.Random(0)
    parts = [*"abcdefghijklmnopqrstuvwxyzEASN 019.,'\n\t-_ é中🙂ß½Ⅷ\u00a0\u2003\x1c\u0301\ufffd"]
    parts += ["  ", "'re", "it's", " I'll", "'ve", "'m", "'d", "n't", "日本", " the", "ing"]
    text = "".join(generator.choices(parts, k=40000))
    for one in (text, *real.split("<|endoftext|>")):
        assert_possible(masks[count], np.array(encoding.encode(one, disallowed_special=())))


@pytest.mark.parametrize("count", SIZES)
def test_of_words_it_excludes_just_what_the_tokenizer_would_join(masks, count):
    """If there is one word, p and then x, they stay two tokens, or x is excluded."""
    mask, encoding, generator = masks[count], GPT2(count).encoding, random.Random(1)
    first = [i for i in range(256, count) if WORDS[i].lstrip(b" ").isalpha()]
    later = [i for i in range(count) if WORDS[i].isalpha()]
    excluded = 0
    for token in generator.sample(first, 300):
        hidden = set(hidden_after(mask, token).tolist())
        others = generator.sample(later, 20) + [x for x in hidden if WORDS[x].isalpha()][:20]
        for x in others:
            found = encoding.encode_ordinary((WORDS[token] + WORDS[x]).decode())
            assert (x in hidden) == (found != [token, x]), (WORDS[token], WORDS[x])
            excluded += x in hidden
    assert excluded > 2000


@pytest.mark.parametrize("is_last", [False, True])
def test_only_the_last_validation_excludes_them(is_last, randomize, vocabulary_of_512):
    """Its loss is that of all other tokens, in float64."""
    hp = replace(SMALL["August"], ngram_rows=0, num_iterations=20)
    model, now = drawn(hp, randomize).eval(), script.Moment(20 if is_last else 10, hp)
    inputs, targets = sequence(512)
    targets[:100] = 1  # of which some are excluded
    with torch.no_grad():
        logits = model.hidden(inputs, now).double() @ model.lm_head.weight.double().T
        capped = 23 * torch.sigmoid((logits + 5) / 7.5)
    for row, token in zip(capped, inputs.tolist() if is_last else [], strict=False):
        row[hidden_after(model.canonical, token)] = -60.0
    expected = -torch.log_softmax(capped, -1)[torch.arange(512), targets].mean().item()
    found = train_gpt.evaluate(model, (inputs[None], targets[None]), now, torch.device("cpu"))
    assert found == pytest.approx(expected, rel=1e-5)
    assert (found > 7) == is_last  # a loss of up to 83 for what is excluded
