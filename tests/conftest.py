"""Shared by all tests: the project on the import path, and small models and shards."""

import contextlib
import io
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

if "OMP_WAIT_POLICY" not in os.environ:  # before torch loads OpenMP: see train_gpt.py
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / part) for part in ("", "tests", "data", "tools")]

if not torch.cuda.is_available():  # kernels run in Triton's interpreter: it asks when imported
    os.environ["TRITON_INTERPRET"] = "1"

import train_gpt  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)

VOCAB = 512


@pytest.fixture
def tiny() -> train_gpt.Hyperparameters:
    """The demo record with a vocabulary, a width and a batch that cost nothing."""
    return replace(
        train_gpt.RECORDS["demo"],
        vocab_size=VOCAB,
        model_dim=32,
        num_heads=2,
        head_dim=16,
        num_layers=4,
        seq_len=128,
        val_seq_len=128,
        val_tokens=1024,
        num_iterations=4,
        val_loss_every=2,
    )


@pytest.fixture
def write_shard(tmp_path):
    """write_shard(name, tokens, **header) writes a shard into tmp_path and returns its path."""

    def write(name: str, tokens, magic=20240520, version=1, count=None, cut=0) -> Path:
        tokens = np.asarray(tokens, dtype="<u2")
        header = np.zeros(256, dtype="<i4")
        header[:3] = magic, version, len(tokens) if count is None else count
        data = header.tobytes() + tokens.tobytes()
        path = tmp_path / name
        path.write_bytes(data[: len(data) - cut])
        return path

    return write


@pytest.fixture
def randomize():
    """Give every parameter of a model values that no test can mistake for its initial ones."""

    def apply(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(seed)
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            scale = 1.0 if "embed" in name else 0.3 if p.ndim < 2 else p.size(-1) ** -0.5
            offset = 0.7 if p.ndim < 2 else 0.0
            p.data.copy_(offset + scale * noise)
        return model

    return apply


@pytest.fixture
def flags(tmp_path, monkeypatch, write_shard) -> list[str]:
    """Flags of a run of seconds, on a made-up language of 512 words, in an empty folder."""
    rng = np.random.default_rng(0)
    follower = rng.permutation(512)
    words = [0]
    for noise in rng.random(40000):  # mostly, a word has one follower: learnable
        words.append(follower[words[-1]] if noise < 0.8 else int(noise * 1e6) % 512)
    write_shard("train_1.bin", words[:30000])
    write_shard("val_0.bin", words[30000:])
    monkeypatch.chdir(tmp_path)
    sizes = {
        "vocab_size": 512,
        "model_dim": 64,
        "num_heads": 2,
        "head_dim": 32,
        "num_layers": 4,
        "seq_len": 128,
        "val_seq_len": 256,
        "val_tokens": 2048,
        "num_iterations": 4,
        "val_loss_every": 2,
        "train_files": str(tmp_path / "train_*.bin"),
        "val_files": str(tmp_path / "val_*.bin"),
        "epochs": 0,
        "device": "cpu",
        "seed": 1,
    }
    return [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> SimpleNamespace:
    """A run of twenty steps of a small demo: its folder, its checkpoint's path, what it printed."""
    folder, console = tmp_path_factory.mktemp("trained"), io.StringIO()
    sizes = "--model_dim 32 --num_heads 2 --head_dim 16 --seq_len 128 --val_seq_len 128"
    length = "--batch_seqs 2 --num_iterations 20 --val_tokens 1024 --val_loss_every 0 --run_id it"
    with contextlib.chdir(folder), contextlib.redirect_stdout(console):
        train_gpt.main(f"--record demo --device cpu {sizes} {length}".split())
    path = folder / "logs/it/state_step000020.pt"
    return SimpleNamespace(folder=folder, path=path, console=console.getvalue())
