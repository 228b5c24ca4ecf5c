"""Runs of seconds of the frontier's records, for tests of whole runs."""

import functools
from dataclasses import replace
from pathlib import Path

import torch

import runs
import train_gpt
from conftest import language
from ngram_table import NgramTable
from train_gpt_2026 import Run
from train_gpt_2026_08 import LAYERS_DEMO, RECORDS

main = functools.partial(train_gpt.main, run=Run)  # of forks/train_gpt_2026.py
outcome = functools.partial(runs.outcome, run=Run)

A, C = "2025-08-23_SparseAttnGate", "2026-01-19_BigramHashEmbedding"
C5, D = "2026-01-26-UntieValueEmbeddings", "2026-03-06_SimplifyHC"
M = "medium_2025-12-31"
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
# Rotary frequencies do not change with the second window.
ROW[M] = (
    f"--record {M} --layers long+v0,short+v1,short+x1,long+v0+x0+backout --num_layers 4 "
    f"--stages {STAGES} --extension_frac .125 --tied_frac .5 --yarn_window 128 --last_window 384"
)
# Adam's epsilon is that at which rounding noise stays noise, with gradients of a sequence's sum.
PLAIN = f"{SIZES} --adam_eps 2e-4 --batch_seqs 4 --save_every 2 --val_loss_every 2"
WORDS = f"{PLAIN} --align_to_documents off"
# In July with composed heads and what mixers make.
LATER = (
    f"{PLAIN} --num_layers 5 --extension_frac .125 --tied_frac .5 --last_window 384 "
    "--bigram_signs 37"
)
STAGES_JULY = STAGES.replace("targets=1/.5,", "targets=1/.5+prefix=1+falls=1,").replace(
    ".25,", ".25+prefix=1,"
)
JULY = (
    f"{LATER} --record 2026-07 --stages {STAGES_JULY} --bigram_rows 301 --mlp_width 128 --layers "
    "short+v0+pair+embed+bigram,long+v1+xsa+gate+embed+bigram,short+xsa+mixer+embed+bigram,none+x1,"
    "long+v2+in2+gate+composed+mudd"
)
# In August with all techniques but one: GPT-2's tokenizer did not make the made-up language. The
# n-gram table learns after steps 1 and 3, and then after 7.
STAGES_AUGUST = (
    "length=1+window=128+targets=1/.5/.25+candidates=256+prefix=1,"
    "length=2+window=128+lr=1.52+targets=1/.5+candidates=256+prefix=.8/.6,"
    "length=3+window=256+lr=1.73+candidates=384/512,length=3+window=256"
)
AUGUST = (
    f"{LATER} --record 2026-08-30 --stages {STAGES_AUGUST} --layers {LAYERS_DEMO} "
    "--mudd_groups 4 --mlp_width 112 --anvil_from 4 "
    "--attention_border 200 --canonical_mask off --val_seq_len 256 "
    "--ngram_rows 3002 --ngram_slow_from 4 --ngram_lr .1"
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


def table_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the whole n-gram table and its moments, from all pieces of a checkpoint."""
    table = NgramTable(replace(RECORDS["demo"], model_dim=32, ngram_rows=3002))
    table.share(0, 1, torch.device("cpu"), torch.float32)
    table.load(folder / checkpoint(step), weights_only=False)
    return {name: getattr(table, name)[:3002].float() for name in ("rows", "second", "learned_at")}


def plain_fp8_mlp(x, w_in, w_out, scale) -> tuple:
    """Compute what the kernels of the MLP in FP8 do, without FP8."""
    post = (x @ w_in.T).relu().square()
    return post @ w_out.T, post.detach().max().float()
