"""Runs of seconds of the frontier's records, for tests of whole runs."""

import functools
from pathlib import Path

import runs
import train_gpt
from conftest import language
from train_gpt_2026 import Run

main = functools.partial(train_gpt.main, run=Run)  # of forks/train_gpt_2026.py
outcome = functools.partial(runs.outcome, run=Run)

A, C = "2025-08-23_SparseAttnGate", "2026-01-19_BigramHashEmbedding"
C5, D = "2026-01-26-UntieValueEmbeddings", "2026-03-06_SimplifyHC"
LAST = 8  # steps
# Sequences of 128, 256 and 384 tokens by thirds of 7 steps (row C does not round them), then an
# extension of one; head and embedding part at step 6. Windows are narrower than sequences, and last
# another one.
STAGES = (
    "length=1+window=128+targets=1/.5/.25,length=2+window=128+lr=1.52+targets=1/.5,"
    "length=3+window=256+lr=1.73,length=3+window=256"
)
SIZES = (
    f"--num_heads 2 --head_dim 16 --model_dim 32 --num_iterations {LAST} --run_id it --keep 9 "
    "--device cpu --seq_len 128 --val_seq_len 512 --val_tokens 1024 --epochs 0"
)
LAYERS = {
    C: "short+v1+pair,long+v2,short+pair+backout,none+x1",
    C5: "short+v0+pair,long+v1,short+v2+backout,long+v3",
    D: "short+v0+pair,long+v1,short+pair+backout,none+x1,long+v2+in2",
}
ROW = {A: f"--record {A} --num_layers 4"}
for name, table in LAYERS.items():
    ROW[name] = (
        f"--record {name} --layers {table} --num_layers {table.count(',') + 1} "
        f"--stages {STAGES} --extension_frac .125 --tied_frac .5 --last_window 384 "
        "--bigram_rows 301"  # an odd number: ranks own unequal shares
    )
# On the made-up language no token begins a document. Adam's epsilon is that at which rounding
# noise stays noise, with gradients of a sequence's sum.
WORDS = (
    f"{SIZES} --vocab_size 512 --align_to_documents off --adam_eps 2e-4 --batch_seqs 8 "
    "--save_every 2 --val_loss_every 2"
)
checkpoint = "logs/it/state_step{:06}.pt".format
# What layers do, all of it switched on.
TECHNIQUES = {
    "key_offset": True,
    "paired_heads": True,
    "attention_gate": True,
    "value_gate": True,
    "gate_by_values": True,
    "skip_gate": True,
    "smear": True,
    "bigram_rows": 301,
    "scaled_projections": True,
    "sublayer_lambdas": True,
    "x0_apart": True,
}


def small_flags(folder: Path) -> dict[str, list[str]]:
    """Return the flags of a small run of each record, on the made-up language that is written into
    the folder."""
    words = [*language(folder), *WORDS.split()]
    return {record: [*words, *row.split()] for record, row in ROW.items()}
