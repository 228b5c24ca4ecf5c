"""tools/evaluate.py: a checkpoint's loss and bits per byte, worked out in another way."""

import math

import evaluate
import numpy as np
import pytest
import reference
import torch
from conftest import ROOT
from runs import Program

from gpt2 import gpt2_encoding

FLAGS = "--device cpu --val_seq_len 256 --val_tokens 2048 --norm_eps 0.0078125"
LAYERS = [("long", 0, None), ("half", 1, None), ("half", 1, 1), ("long", 2, 0)]  # of the demo


@pytest.fixture(scope="module")
def expected(trained) -> str:
    """Return the line of the trained model on 2048 tokens of the sample corpus: its loss in float64
    from its specification, and the bits of that by the bytes that tiktoken decodes."""
    tokens = np.fromfile(ROOT / "data/kjv_val_000000.bin", "<u2", 2049, offset=1024)
    tokens = torch.from_numpy(tokens.astype(np.int64))
    weights = torch.load(trained.path, weights_only=True)["model"]
    weights = {name: weight.double() for name, weight in weights.items()}
    losses = []
    for start in range(0, 2048, 256):
        piece = tokens[start : start + 257]
        loss = reference.loss(weights, piece[:-1], piece[1:], 256, 2, 2025, LAYERS)
        losses.append(loss.item())
    text = [token for token in tokens[1:].tolist() if token != 50256]
    size = len(gpt2_encoding().decode_bytes(text))
    bits = sum(losses) * 256 / math.log(2) / size
    return f"val_loss:{np.mean(losses):.5f} bits_per_byte:{bits:.5f} over 2048 tokens"


def agree(line: str, expected: str) -> bool:
    """Return whether two such lines differ by float32's rounding alone."""
    found, wanted = (
        [float(word.split(":")[1]) for word in text.split()[:2]] for text in (line, expected)
    )
    same_words = line.split()[2:] == expected.split()[2:]
    return same_words and found == pytest.approx(wanted, abs=2e-5)


def test_loss_and_bits_per_byte_are_those_of_the_specification(trained, expected, capsys):
    evaluate.main([str(trained.path), *FLAGS.split()])
    first, line = capsys.readouterr().out.splitlines()
    assert first == f"{trained.path}, saved by train_gpt.py" and agree(line, expected)


def test_two_ranks_share_the_tokens_and_the_first_prints(trained, expected):
    program = Program([trained.path, *FLAGS.split()], ranks=2, work=evaluate.main)
    assert program.end() == [0, 0], program.text("err")
    assert agree(program.text("out").splitlines()[1], expected) and not program.text("out", 1)


def test_a_published_checkpoint_needs_its_record(trained, expected, tmp_path, capsys):
    """It has no settings of its own."""
    weights = torch.load(trained.path, weights_only=True)["model"]
    weights = {f"_orig_mod.{name}": weight for name, weight in weights.items()}
    path = tmp_path / "state_step000008.pt"
    torch.save({"step": 8, "code": "import torch", "model": weights, "optimizers": []}, path)
    sizes = "--record demo --model_dim 32 --num_heads 2 --head_dim 16 --num_iterations 8"
    evaluate.main([str(path), *f"{sizes} {FLAGS}".split()])
    first, line = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path}, saved by a script") and agree(line, expected)
