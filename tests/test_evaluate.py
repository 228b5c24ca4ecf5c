"""tools/evaluate.py: loss and bits per byte, computed in another way."""

import math

import numpy as np
import pytest
import torch

import evaluate
import reference
from conftest import ROOT
from gpt2 import gpt2_encoding

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
