"""Train the NanoGPT-speedrun records of May to August 2026: a fork of train_gpt.py.

    torchrun --standalone --nproc_per_node=8 forks/train_gpt_2026_08.py    # record 92
    ./run.sh forks/train_gpt_2026_08.py                                    # the same; or a demo

This file has the whole model, in the order in which a token meets it. train_gpt.py lends it the
kernels of attention and MLPs, the loss by chunks, how ranks share weights, and the timed loop. The
defaults are those of record 92 (2026-08-30_ANVIL2); older records turn techniques off. The numbers
come from github.com/KellerJordan/modded-nanogpt. Techniques with a file of their own:

    ngram_table.py       hashed bigrams and trigrams have 84.6 million rows
    composed_heads.py    until record 89, heads also read a mixture of all heads
    prefixes.py          the longest token that begins the next token is also a target
    sampled_softmax.py   in training, the softmax covers a part of the vocabulary
    anvil.py             Muon with two momenta and other polynomials
    fp8_layers.py        FP8 in attention's projections and in MLPs, backward too
    tail_average.py      the run ends with averages of its last weights
    canonical_mask.py    the last validation excludes tokens that cannot follow

Older ones, which train_gpt_2026.py has too, are in functions_2026.py and cautious.py.
"""

import itertools
import math
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train_gpt.py lies
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import cautious
import functions_2026
import tail_average
import train_gpt as t
from anvil import anvil
from canonical_mask import CanonicalMask
from composed_heads import composed
from fp8_layers import FP8Projection, fp8_mlp, fp8_relu2_mlp
from functions_2026 import (
    GATE_CHANNELS,
    as_pairs,
    bigram_hash,
    gate_of,
    next_targets,
    offset_keys,
    read_layer,
    read_stages,
    recomputed_if_small,
    rotated,
    smeared,
    split,
    tie,
    two_places,
    visible_by_distance,
    warm_up,
    yarn,
)
from ngram_table import NgramTable, ngram_hashes, table_adam
from prefixes import token_prefixes
from sampled_softmax import choose_candidates, most_different_targets
from train_gpt import BLOCK, Group, UserError, norm

Triple = tuple[float, float, float]

# -----------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class Layer:
    """One layer of the model. It is written as its window, and then any of its words. A mixer makes
    numbers for each token: factors on streams, and gates of heads."""

    window: str  # "long", "short", or "none": no attention
    values: str | None = None  # v0: rows of this value-embedding table are mixed into v
    skip_from: int | None = None  # x3: a share of layer 3's output is added to the input
    source: int | None = None  # in7: attention reads the output of layer 7, not the input
    mlps: int = 1  # mlps0, mlps2: there is no MLP, or there are two
    paired: bool = False  # pair: two heads attend as one of twice as many positions
    narrow: bool = False  # heads' q and k have only the channels that rotate
    narrow_values: bool = False  # narrowv: heads' values have only the first half of the channels
    xsa: bool = False  # a share of attention's output along a token's own value is subtracted
    gate: bool = False  # each head's output is multiplied by a number of the token
    composed: bool = False  # heads also read a mixture of all heads
    mixer: bool = False  # a mixer makes the numbers of this layer and later ones from here
    embed: bool = False  # a share of x0 is added, after attention
    bigram: bool = False  # and a share of the n-grams' embedding; in layer 0, before attention
    mudd: bool = False  # multiway dynamic dense: the last layer and the head mix earlier streams

    # The fields that words set. A numbered word is followed by a number.
    numbered: ClassVar = {"v": "values", "x": "skip_from", "in": "source", "mlps": "mlps"}
    plain: ClassVar = {"pair": "paired", "narrowv": "narrow_values"} | {
        word: word
        for word in ("narrow", "xsa", "gate", "composed", "mixer", "embed", "bigram", "mudd")
    }

    @property
    def mask(self) -> str:
        """The name of the mask that the layer attends with."""
        return f"{self.window}+pair" if self.paired else self.window


LAYERS = (
    "short+pair+narrow+embed+bigram,short+v0+xsa+narrow+narrowv+embed+bigram,"
    "short+v1+pair+narrow+embed,long+xsa+gate,none+mixer+embed+bigram,"
    "short+pair+narrow+embed+bigram,none+x3,none+mlps0+embed,"
    "short+v2+in7+narrow+narrowv+mlps2,none+bigram,long+v3+in7+gate+mudd"
)
LAYERS_89 = (
    "short+pair+embed+bigram,short+v0+xsa+embed+bigram,short+v1+pair+embed+bigram,"
    "long+xsa+gate+embed+bigram,short+xsa+mixer+embed+bigram,short+pair+embed+bigram,none+x3,"
    "short+xsa+embed+bigram,short+v2+in7+embed+bigram,short+v3+in7+pair+embed+bigram,"
    "long+v4+in7+gate+composed+mudd"
)
LAYERS_DEMO = (
    "short+v0+pair+narrow+embed+bigram,long+v1+xsa+gate,none+mixer+mlps0+embed+bigram,"
    "short+x1+xsa+narrow+narrowv+mlps2+embed,long+v2+in2+gate+mudd"
)
LAYERS_DEMO_89 = (
    "short+v0+pair+embed+bigram,long+v1+xsa+gate+embed+bigram,short+x0+xsa+mixer+embed+bigram,"
    "long+v2+in1+gate+composed+mudd"
)


@dataclass(frozen=True)
class Stage:
    """One stage of the run."""

    share: float = 1.0  # its share of the scheduled steps, in proportion to the other stages
    length: float = 1.0  # tokens in a training sequence, as a multiple of seq_len
    window: int = 0  # the long window in tokens
    short: int = 0  # the short window in tokens; 0: half of the long one
    lr: float = 1.0  # multiplies every learning rate
    cap: int = 2048  # tokens at which documents are cut
    targets: tuple[float, ...] = (1.0,)  # loss weights of the next token and of those after it;
    # the last of several falls to 0 within the stage
    prefix: tuple[float, ...] = (0.0,)  # shares of --prefix, by equal parts of the stage
    falls: int = 0  # 1: these shares also fall to 0 within the stage
    candidates: tuple[float, ...] = (0.0,)  # tokens in the softmax, by equal parts; 0: all

    @property
    def short_window(self) -> int:
        """The short window in tokens: one or more whole blocks, as masks have them."""
        return max((self.short or self.window // 2) // BLOCK, 1) * BLOCK


# They begin at steps 0, 320, 681, 1107 and 1174. With an extension, the last stage is that, and its
# share does not count. 49152 tokens have about 11000 different ones.
STAGES = (
    "share=320+length=1+window=384+short=128+lr=1+cap=896+targets=1/.5/.25+prefix=1"
    "+candidates=10240,"
    "share=361+length=2+window=896+short=384+lr=1.52+targets=1/.5+prefix=.8/.6/.4/.2"
    "+candidates=10240,"
    "share=426+length=3+window=1408+short=640+lr=1.73+cap=3072+candidates=14336/14336/24576,"
    f"share=67+length=2.5+window=1408+short=640+lr={1.73 * (20 / 24) ** 0.5}+cap=3072,"
    "length=1+window=1664+short=768+lr=1+cap=3072"
)
STAGES_89 = (
    "length=1+window=384+lr=1+cap=896+targets=1/.5/.25+prefix=1,"
    "length=2+window=896+lr=1.52+targets=1/.5+prefix=1+falls=1,"
    "length=3+window=1408+lr=1.73,length=3+window=1664+lr=1.73"
)
STAGES_DEMO = (
    "share=48+length=1+window=256+lr=1+targets=1/.5/.25+prefix=1+candidates=832,"
    "share=54+length=2+window=256+lr=1.52+targets=1/.5+prefix=.8/.6/.4/.2+candidates=832,"
    "share=64+length=3+window=384+lr=1.73+candidates=1168/1168/2000,"
    "share=10+length=2+window=384+lr=1.4,length=1+window=384+lr=1"
)
STAGES_DEMO_89 = (
    "length=1+window=256+lr=1+targets=1/.5/.25+prefix=1,"
    "length=2+window=256+lr=1.52+targets=1/.5+prefix=1+falls=1,"
    "length=3+window=384+lr=1.73,length=3+window=384+lr=1.73"
)


@dataclass(frozen=True)
class Hyperparameters(t.RunSettings):
    """Every setting of a run. Defaults: 2026-08-30_ANVIL2."""

    val_loss_every: int = 0  # steps between validations, 0 for the last step only
    num_iterations: int = 1194  # training steps
    extension_frac: float = 20 / 1194  # share of steps after the schedule's end
    cooldown_frac: float = 940 / 1174  # share of the scheduled steps in which the rate falls
    lr_final: float = 0.3  # learning-rate multiplier at the schedule's end
    stages: str = STAGES  # settings of each stage
    last_window: int = 2560  # long window of the last validation, 0: unchanged
    batch_seqs: int = 8  # sequences in a batch of all ranks together
    seq_len: int = 16384  # tokens in a training sequence, times the stage's length
    val_seq_len: int = 262144  # tokens in a validation sequence, whole blocks of 128
    val_tokens: int = 10485760  # validation tokens, from the start of the stream
    epochs: int = 1  # largest number of passes over the training shards, 0 for no limit

    layers: str = LAYERS  # window and words of each layer
    num_layers: int = 11  # layers in use: num_layers of --layers, half from each end
    num_heads: int = 6  # attention heads
    head_dim: int = 128  # channels in a head
    model_dim: int = 768  # channels of the residual stream
    mlp_width: int = 2816  # hidden channels of an MLP
    vocab_size: int = 50304  # token ids, a multiple of 128
    end_of_text: int = 50256  # token that begins every document
    seed: int = 0  # seed of the initial weights
    norm_eps: float = 2.0**-23  # RMSNorm's epsilon
    rope_base: float = 1024.0  # rotary frequencies fall from 1 to about 1/rope_base
    attn_scale: float = 0.085  # factor on the products of q and k, before YaRN
    narrow_heads: bool = True  # heads are narrow in layers with the words narrow and narrowv
    narrow_scale: float = 0.13  # factor on the products of narrow q and k, before YaRN
    attention_border: int = 2560  # in training, attention ends at multiples of this in a document
    residual_lambda: float = 1.1**0.5  # initial factor on the residual stream
    bigram_lambda: float = 0.05  # initial factor on the embedding of n-grams
    mixer_width: int = 64  # hidden channels of the mixers, 0: the same numbers for all tokens
    mudd_width: int = 64  # hidden channels of the mixers of mudd, 0: the same for all tokens
    mudd_groups: int = 12  # groups of channels with mixers of their own at the end, 0: one mixer
    mudd_all: bool = True  # the end also mixes all value tables, and what late layers read
    bigram_signs: int = 8192  # rows of the table of random signs for n-grams, 0: no signs
    bigram_rows: int = 0  # rows of a table of bigrams, 0: no table
    ngram_rows: int = 84602880  # rows of the table of bigrams and trigrams, 0: only bigram_rows

    tied_frac: float = 0.9999  # share of scheduled steps with head and embedding tied; 1: always
    logit_sigmoid: Triple = (23.0, 5.0, 7.5)  # a b c: logits become a sigmoid((logit + b) / c)
    prefix: float = 0.25  # loss weight of the next token's prefix, times the stage's share
    sampled_softmax: bool = True  # train with the candidates that --stages names
    canonical_mask: bool = True  # exclude tokens that cannot follow from the last validation
    tail_average: bool = True  # end with averages of the last weights

    optimizer: Literal["muon", "anvil"] = "anvil"  # of matrices
    muon_lr: float = 0.023  # learning rate of matrices
    muon_mul: Triple = ((2816 / 768) ** 0.5, 2 * (2816 / 768) ** 0.5, 1.0)  # tall, wide, square
    muon_beta2: float = 0.9  # NorMuon's beta2
    muon_decay: float = 2.25  # cautious weight decay of matrices, times lr^2
    qk_pairs: bool = True  # q and k are orthogonalised in pairs of heads
    momentum_start: float = 0.85  # Muon's momentum at step 0
    momentum_end: float = 0.93  # Muon's momentum after its ramp
    momentum_warmup_steps: int = 240  # steps of the momentum's linear ramp
    momentum_cooldown_steps: int = 50  # last steps, in which Muon's momentum falls
    slow_momentum: float = 0.98  # ANVIL's second momentum
    fast_momentum: float = 0.85  # its first one, where it mixes them; before, it is Muon's
    anvil_from: int = 514  # step from which ANVIL mixes its two momenta
    anvil_share: float = 0.4385  # share of the first momentum in this mixture
    head_lr: float = 0.008  # Adam's learning rate for head and embedding
    value_lr: float = 0.56  # Adam's learning rate for value tables and bigrams
    adam_eps: float = 1e-10  # Adam's epsilon
    ngram_lr: float = 0.56  # learning rate of the n-gram table
    ngram_beta2: float = 0.95  # the n-gram table's beta2 in two steps
    ngram_decay: float = 0.025  # cautious weight decay of the table, times lr^2, in two steps
    ngram_slow_from: int = 336  # first step from which it learns at each fourth, not second, step

    fp8: bool = True  # train the head in FP8 on GPUs with FP8, in bfloat16 on CPUs with that
    x_s: float = 448 / 100  # FP8 scale of the head's input
    w_s: float = 448 / 2  # FP8 scale of the head's weight
    grad_s: float = 8 * 448 / 0.75  # FP8 scale of the logits' gradient
    fp8_mlp: Literal["off", "up", "both", "all"] = "all"  # FP8 in MLPs; all: backward, too
    fp8_attention: bool = True  # matmuls that make q, k and v in FP8, forward and backward

    # What functions of train_gpt.py read, and no record here changes.
    window_step: ClassVar[int] = 1
    rope: ClassVar[str] = "half"
    logit_softcap: ClassVar[float] = 0.0
    momentum_damped: ClassVar[bool] = True
    grad_clip: ClassVar[float] = 0.0

    @property
    def scheduled_steps(self) -> int:
        """The steps before the extension, which keeps the last learning rate."""
        return self.num_iterations - round(self.num_iterations * self.extension_frac)

    @property
    def most_targets(self) -> int:
        """The largest number of targets that a token has in any stage, for gpu_kernels.py."""
        return max(len(stage.targets) for stage in stage_table(self)) + (self.prefix > 0)


RECORD_92 = Hyperparameters()
# Record 89 as the public project's master has it, at commit f411b3d of 2026-08-01. The logs in the
# folder of this name are of an older program, without composed heads and prefixes. It has composed
# heads, and more layers that add embeddings and n-grams (layers); bigrams in a table that learns as
# the value tables do (bigram_rows); Muon with one momentum (optimizer); FP8 in forward passes of
# MLPs alone (fp8_mlp); head and embedding apart from 2/3 of the steps on (tied_frac).
RECORD_89 = replace(
    RECORD_92,
    val_loss_every=250,
    num_iterations=1285,
    extension_frac=15 / 1285,
    cooldown_frac=0.6,
    lr_final=0.15,
    stages=STAGES_89,
    layers=LAYERS_89,
    mlp_width=3072,
    attn_scale=0.1,
    attention_border=0,
    mudd_groups=0,
    mudd_all=False,
    bigram_rows=377280,
    ngram_rows=0,
    tied_frac=2 / 3,
    sampled_softmax=False,
    canonical_mask=False,
    tail_average=False,
    optimizer="muon",
    muon_mul=(2.0, 4.0, 1.0),
    muon_decay=1.2,
    momentum_end=0.95,
    momentum_warmup_steps=300,
    value_lr=0.6,
    w_s=448 / 1.6,
    grad_s=448 / 0.75,
    fp8_mlp="both",
    fp8_attention=False,
)
# A size that two CPU cores train in a few minutes (BENCHMARKS.md). Sequences are short and begin
# with a document: a run reads the beginnings of chapters of the sample corpus.
SMALL = {
    "cooldown_frac": 0.8,
    "last_window": 512,
    "batch_seqs": 4,
    "seq_len": 128,
    "val_seq_len": 1024,
    "val_tokens": 16384,
    "epochs": 0,
    "num_heads": 2,
    "head_dim": 64,
    "model_dim": 128,
    "vocab_size": 4096,
    "end_of_text": 4095,
    "bigram_signs": 512,
    "tied_frac": 2 / 3,
    "momentum_warmup_steps": 300,
    "head_lr": 0.008 * 768 / 128,  # times the ratio of the widths
    "w_s": 448 / 1.6,
    "grad_s": 448 / 0.75,
    "train_files": f"{t.SAMPLE}_train_*.bin",
    "val_files": f"{t.SAMPLE}_val_*.bin",
}
RECORDS = {
    # As its folder's version this_pr_v3 has it.
    "2026-05-27-MuddGatedAndDC": replace(
        RECORD_89, num_iterations=1290, extension_frac=15 / 1290, prefix=0.0, fp8_mlp="up"
    ),
    "2026-07-17_FP8DownProjection": RECORD_89,
    "2026-08-30_ANVIL2": RECORD_92,
    # Both demos have all techniques of their record, and the same share of candidates.
    "demo": replace(
        RECORD_92,
        **SMALL,
        val_loss_every=120,
        num_iterations=240,
        extension_frac=4 / 180,
        stages=STAGES_DEMO,
        layers=LAYERS_DEMO,
        num_layers=5,
        mlp_width=480,
        attention_border=0,
        mudd_groups=4,
        ngram_rows=200000,
        muon_mul=(3.75**0.5, 2 * 3.75**0.5, 1.0),
        anvil_from=104,
        ngram_slow_from=68,
    ),
    "demo-89": replace(
        RECORD_89,
        **SMALL,
        val_loss_every=90,
        num_iterations=180,
        extension_frac=4 / 180,
        stages=STAGES_DEMO_89,
        layers=LAYERS_DEMO_89,
        num_layers=4,
        mlp_width=512,
        bigram_rows=4096,
    ),
}


def layer_table(hp: Hyperparameters) -> tuple[Layer, ...]:
    """Return the layers in use: num_layers of --layers, half from each end. UserError for rows that
    are wrong, or that name a layer which is not below them."""
    rows, count, half = hp.layers.split(","), hp.num_layers, hp.num_layers // 2
    if not 2 <= count <= len(rows):
        raise UserError(f"--num_layers {count}: --layers has {len(rows)} rows, a model at least 2")
    table = []
    for i, row in enumerate(rows[: count - half] + rows[len(rows) - half :]):
        layer = read_layer(row, Layer)
        attends = layer.window != "none"
        of_heads = layer.xsa or layer.gate or layer.composed or layer.mudd
        rule = ""
        if not attends and (layer.values or layer.source is not None or layer.paired):
            rule = "a layer without attention has no values, source or pairs"
        elif layer.skip_from is not None and (i < count - half or layer.skip_from >= i):
            rule = "layers of the upper half add the output of a layer below"
        elif layer.source is not None and layer.source >= i:
            rule = "attention reads the output of a layer below"
        elif of_heads and (layer.paired or not attends):
            rule = "xsa, gate, composed, mudd need attention without pairs"
        elif layer.mudd and (i < count - 1 or layer.mlps != 1):
            rule = "mudd is for the last layer, with one MLP"
        elif (layer.narrow or layer.narrow_values) and layer.window != "short":
            rule = "narrow heads are short"
        elif layer.mlps > 2:
            rule = "a layer has at most two MLPs"
        elif layer.mudd and (layer.embed or layer.bigram):
            rule = "the layer of mudd adds embeddings and n-grams without these words"
        if rule:
            raise UserError(f"--layers: {row!r} cannot be layer {i} of {count}: {rule}")
        if not hp.narrow_heads:  # a setting turns words off, so that nobody types all layers
            layer = replace(layer, narrow=False, narrow_values=False)
        if not (hp.ngram_rows or hp.bigram_rows):
            layer = replace(layer, bigram=False)
        table.append(layer)
    return tuple(table)


def stage_table(hp: Hyperparameters) -> tuple[Stage, ...]:
    """Return the stages of the settings; UserError for a wrong row."""
    table = read_stages(hp.stages, Stage, hp.seq_len)
    if not all(stage.window and stage.cap and stage.falls <= 1 for stage in table):
        rule = "a stage needs a window, a cap above 0, and falls of 0 or 1"
        raise UserError(f"--stages {hp.stages}: {rule}")
    return table


def check(hp: Hyperparameters) -> None:
    """Raise UserError for settings that are not allowed, alone or together."""
    t.check(hp)
    layers, stages, size, rows = layer_table(hp), stage_table(hp), hp.vocab_size, hp.ngram_rows
    counts = [count for stage in stages for count in stage.candidates if count]
    bad_counts = hp.sampled_softmax and any(count % 16 or count > size for count in counts)
    bad_groups = hp.mudd_groups and (hp.model_dim % hp.mudd_groups or not hp.mudd_width)
    bad_heads = hp.num_heads % 2 or hp.num_heads * hp.head_dim != hp.model_dim
    has_prefix = any(any(stage.prefix) for stage in stages)
    reads_ngrams = any(layer.bigram or layer.mudd for layer in layers)
    if hp.tokenizer != "gpt2" and (hp.canonical_mask or hp.prefix):
        remedy = "--canonical_mask off --prefix 0, and candidates of their number in --stages"
        raise UserError(f"--tokenizer {hp.tokenizer}: tokens that are not GPT-2's need {remedy}")
    for name, wrong, rule in (
        ("extension_frac", hp.scheduled_steps < 1, "leaves no step before the extension"),
        ("save_every", hp.save_every % 2, "must be a multiple of 2, as Adam's steps are"),
        ("vocab_size", size % 128, "must be a multiple of 128"),
        ("num_heads", bad_heads, "must be even, and model_dim / head_dim"),
        ("model_dim", hp.model_dim < GATE_CHANNELS, f"must be at least {GATE_CHANNELS}"),
        ("mlp_width", not 0 < hp.mlp_width <= 16 * hp.model_dim, "is from 1 to 16 model_dim"),
        ("mudd_groups", bad_groups, "must divide model_dim, and needs --mudd_width above 0"),
        ("logit_sigmoid", not all(hp.logit_sigmoid[::2]), "a and c must be above 0"),
        ("stages", bad_counts, f"candidates must be multiples of 16, from 16 to {size}"),
        ("sampled_softmax", hp.sampled_softmax and not counts, "needs candidates in --stages"),
        ("prefix", hp.prefix and not has_prefix, "needs prefix in --stages, which says its shares"),
        ("bigram_rows", hp.bigram_rows == 1, "must be 0 (no table), or 2 and more"),
        ("bigram_rows", rows and hp.bigram_rows, "must be 0 with the table of --ngram_rows"),
        ("bigram_signs", rows and not hp.bigram_signs, "must be above 0 with --ngram_rows"),
        (
            "ngram_rows",
            rows and (rows % 2 or not 6 <= rows <= 2**31),
            "must be 0, or even and from 6 to 2^31",
        ),
        ("ngram_rows", rows and not reads_ngrams, "needs a layer with the word bigram or mudd"),
        ("ngram_slow_from", rows and hp.ngram_slow_from % 4, "must be a multiple of 4"),
    ):
        if wrong:
            raise UserError(f"--{name} {t.show(getattr(hp, name))}: {rule}")


# -----------------------------------------------------------------------------
# Data: each sequence begins with a document, and long documents are cut


def next_batch(tokens, starts, lengths, first: int, now: "Moment", count: int) -> tuple | None:
    """Return the pieces of `count` sequences: of each document from the `first` one on, up to
    now.longest tokens. Documents have these starts and lengths (n,). What is left of a sequence's
    last document is dropped, as on the leaderboard since September 2025. Also return the next
    batch's first document, and with candidates the largest number of different targets in a
    sequence. Return None if too few tokens are left."""
    ends = np.minimum(lengths, now.longest).cumsum()  # tokens up to each document's end
    sequences = []
    for _ in range(count):
        begin = ends[first - 1] if first else 0
        end = begin + now.seq_len + 1  # with the last target
        last = np.searchsorted(ends, end)
        if last == len(ends):
            return None
        pieces = np.stack([starts[first : last + 1]] * 2, axis=1)
        pieces[:, 1] += np.diff(ends[first : last + 1], prepend=begin)
        pieces[-1, 1] -= ends[last] - end
        sequences.append(pieces)
        first = last + 1
    pieces = np.concatenate(sequences)
    return pieces, first, most_different_targets(tokens, pieces, count) if now.candidates else 0


def plan(shards: list[np.ndarray], hp: Hyperparameters, moments: list) -> Iterator[tuple]:
    """Plan the batches of these moments, as train_gpt.py's `consecutive` does. What comes again in
    a later pass is looked up: in a long run, to make it anew takes minutes. UserError for a
    sequence with more different targets than its softmax has candidates."""
    step, batches, has_documents = 0, {}, False
    for tokens in shards:
        starts = np.flatnonzero(tokens == hp.end_of_text)
        lengths = np.diff(starts, append=len(tokens))
        has_documents = has_documents or len(starts) > 0
        first = 0
        while True:
            now = moments[step]
            key = id(tokens), first, now.seq_len, now.longest, now.candidates > 0
            if key not in batches:
                batches[key] = next_batch(tokens, starts, lengths, first, now, hp.batch_seqs)
            if batches[key] is None:
                break
            pieces, first, different = batches[key]
            if now.candidates and different > now.candidates:
                found = f"{different} different targets in a sequence of step {step}"
                remedy = "more candidates in --stages, or --sampled_softmax off"
                raise UserError(f"{found}, but {now.candidates} candidates: try {remedy}")
            yield tokens, pieces
            step += 1
    if not has_documents:
        reason = f"sequences begin with a document, and no token is {hp.end_of_text}"
        raise UserError(f"{reason}: data/tokenize_text.py puts it before each document")


# -----------------------------------------------------------------------------
# Schedules


class Moment:
    """All that is scheduled, at one step, 0 to num_iterations."""

    def __init__(self, step: int, hp: Hyperparameters):
        self.step = step = min(step, hp.num_iterations)
        last = step == hp.num_iterations
        self.validate = last or bool(hp.val_loss_every and step % hp.val_loss_every == 0)

        # Stages are shares of the scheduled steps. With an extension, the last one is that.
        stages = stage_table(hp)
        *ends, whole = itertools.accumulate(stage.share for stage in stages)
        if hp.extension_frac > 0 and ends:
            whole = ends[-1]
        starts = [round(hp.scheduled_steps * end / whole) for end in (0.0, *ends)]
        self.stages = bisect_right(starts, step)  # number of those that have begun
        stage = stages[self.stages - 1]
        start, end = [*starts, hp.num_iterations][self.stages - 1 : self.stages + 1]
        left = (end - step) / max(end - start, 1)  # share of the stage

        def part(values: tuple[float, ...]) -> float:
            """Return which of the values holds, each for an equal part of the stage."""
            number = (step - start) * len(values) // max(end - start, 1)
            return values[min(number, len(values) - 1)]

        fall = 1.0  # of all learning rates: flat, then a linear fall to lr_final
        if hp.cooldown_frac:
            fall = min(max(1 - step / hp.scheduled_steps, 0.0) / hp.cooldown_frac, 1.0)
        self.lr = fall * stage.lr + (1 - fall) * hp.lr_final  # multiplier on every learning rate
        ramp = min(step / hp.momentum_warmup_steps, 1.0)
        if hp.momentum_cooldown_steps:
            ramp = min(ramp, (hp.num_iterations - step) / hp.momentum_cooldown_steps)
        self.momentum = (1 - ramp) * hp.momentum_start + ramp * hp.momentum_end
        mixes = step >= hp.anvil_from
        self.fast_beta = hp.fast_momentum if mixes else self.momentum  # of ANVIL's fast momentum
        self.fast_share = hp.anvil_share if mixes else 1.0  # of it, in the mixture

        self.seq_len = int(hp.seq_len * stage.length)  # tokens in a training sequence
        self.longest = stage.cap  # tokens at which documents are cut
        self.window = hp.last_window if last and hp.last_window else stage.window  # the long one
        self.short = stage.short_window
        *first, final = stage.targets
        self.targets = (*first, final * left if first else final)  # weights of the next tokens
        self.prefix = hp.prefix * part(stage.prefix) * (left if stage.falls else 1.0)
        self.candidates = 0  # tokens in the softmax, 0: all
        if hp.sampled_softmax:
            self.candidates = int(part(stage.candidates))

        # Head and embedding are tied, until a step at which Adam learns.
        tied_steps = round(hp.scheduled_steps * hp.tied_frac)
        tied_until = math.ceil((tied_steps + 1) / ADAM_EVERY) * ADAM_EVERY - 1
        self.tied = hp.tied_frac == 1 or (hp.tied_frac > 0 and step <= tied_until)
        self.ngram_cycle = 2 if step < hp.ngram_slow_from else 4  # steps between updates
        self.ngrams = (step + 1) % self.ngram_cycle == 0  # whether the n-gram table learns

    @property
    def graph_key(self) -> tuple:
        """What is compiled once more for each of its values. A new window compiles nothing."""
        return self.seq_len, len(self.targets), self.prefix > 0, self.candidates, self.tied


# -----------------------------------------------------------------------------
# Model: attention, the MLP, mixers, layers


def random_weight(rows: int, columns: int, bound: float = 1.0) -> nn.Parameter:
    """Return a weight (rows, columns) within bound / sqrt(columns)."""
    return nn.Parameter(t.CastedLinear(columns, rows).weight.detach() * bound)


INIT_BOUND = 0.75**0.5  # bound of the initial matrices


class CausalSelfAttention(nn.Module):
    """Attention with normalised, rotated q and k, value embeddings mixed into v, and a mixer's
    numbers for each token and head. A narrow head is a part of a whole one: the rest of the weights
    exists, as in the public record. Nothing reads it, and only weight decay changes it."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.layer, self.eps, self.fp8 = layer, hp.norm_eps, hp.fp8_attention
        self.head_shape = heads, dim = hp.num_heads, hp.head_dim
        self.scale = hp.narrow_scale if layer.narrow else hp.attn_scale
        qkv = random_weight(3 * heads * dim, hp.model_dim, INIT_BOUND).detach()
        qk, v = qkv.split([2 * heads * dim, heads * dim])
        # Muon orthogonalises each of these matrices (pairs: 2026-04-08_PairedHeadMuon).
        self.qk_w = nn.Parameter(qk.view(-1, (2 if hp.qk_pairs else heads) * dim, hp.model_dim))
        self.v_w = nn.Parameter(v)
        self.c_proj = t.CastedLinear(heads * dim, hp.model_dim)
        self.c_proj.weight.data *= INIT_BOUND
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0]))  # on the weights of qkv and output
        self.value_gate = None
        if layer.values is not None and not layer.mudd:
            self.value_gate = nn.Parameter(torch.zeros(heads, GATE_CHANNELS))

    def qkv(self, x: Tensor) -> list[Tensor]:
        """Return q, k and v, each (1, T, H, D) or narrower, of x (1, T, C)."""
        q, k = self.qk_w.view(2, *self.head_shape, -1)  # weights (H, D, C)
        v = self.v_w.view(*self.head_shape, -1)
        if self.layer.narrow:
            # What half RoPE rotates, the first half of both halves: of 128 channels 0-31 and 64-95.
            q, k = (part.unflatten(1, (4, -1))[:, ::2].flatten(1, 2) for part in (q, k))
        if self.layer.narrow_values:
            v = v[:, : v.size(1) // 2]
        sizes = [len(part) * part.size(1) for part in (q, k, v)]
        w = self.lambdas[0] * torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        if self.fp8 and self.training and t.fp8_supported(x.device):
            qkv = FP8Projection.apply(x.flatten(0, -2), w.type_as(x))[None]
        else:
            qkv = F.linear(x, w.type_as(x))
        return [part.unflatten(-1, (len(q), -1)) for part in qkv.split(sizes, dim=-1)]

    def forward(self, x, value, rotary, mask, numbers: dict[str, Tensor], post) -> Tensor:
        """Map x (1, T, C) to (1, T, C), times post () unless that is None. `value` is rows (T, H *
        D) of a table; `numbers` (1, T, H) are a mixer's: alpha, gate, w1 and w2 of composed heads.
        """
        layer = self.layer
        q, k, v = self.qkv(x)
        if value is not None:
            value = value.view(1, -1, *self.head_shape)
            if self.value_gate is not None:
                half = GATE_CHANNELS // 2
                read = torch.cat([x[..., :half], value.flatten(2)[..., :half]], dim=-1)
                value = 2 * gate_of(read, self.value_gate)[..., None] * value
            v = v + value[..., : v.size(-1)]

        parts = q, k, v
        if layer.paired:
            *parts, rotary = as_pairs(parts, rotary)
        of_heads = ()
        if layer.composed:
            w1 = F.rms_norm(numbers["w1"].float(), numbers["w1"].shape[-1:], eps=1e-6)
            of_heads = w1, numbers["w2"]
        q, k = rotated(*parts[:2], rotary, self.eps)  # (1, H, T, D)
        out = self.attend(q, k, parts[2].transpose(1, 2), mask, self.scale, *of_heads)
        out = out.transpose(1, 2).reshape(v.shape)

        if layer.xsa:  # exclusive attention (arXiv 2603.09078; 2026-04-29_XSAGatedLayers)
            along = (out * v).sum(-1, keepdim=True)
            along = along / v.square().sum(-1, keepdim=True).clamp(min=1e-8)
            out = out - torch.tanh(numbers["alpha"])[..., None] * along * v
        if layer.gate:
            out = out * numbers["gate"][..., None]
        # Factors multiply the weight: one on activations would keep them for its own gradient.
        w = self.c_proj.weight
        if layer.narrow_values:
            w = w.unflatten(1, self.head_shape)[:, :, : v.size(-1)].flatten(1)
        w = self.lambdas[1] * w
        if post is not None:
            w = post * w
        return F.linear(out.flatten(2), w.type_as(out))

    def attend(self, q, k, v, mask: tuple | Tensor, scale: float, *of_heads) -> Tensor:
        """Attend. With w1 and w2 of `composed`, heads are composed, too. tools/sample.py replaces
        this method by one that caches keys and values."""
        if self.layer.mask == "long":
            k = offset_keys(k)
        out = t.attend(q, k, v, mask, scale)
        if of_heads:
            out = out + recomputed_if_small(composed, *of_heads, q, k, v, mask, scale)
        return out


class MLP(nn.Module):
    """Two projections around ReLU squared. In training, matmuls are in FP8 if a kernel is in use
    for that."""

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.c_fc = t.CastedLinear(hp.model_dim, hp.mlp_width)
        self.c_fc.weight.data *= INIT_BOUND
        self.c_proj = t.CastedLinear(hp.mlp_width, hp.model_dim)
        nn.init.zeros_(self.c_proj.weight)
        self.fp8_product = fp8_mlp if hp.fp8_mlp == "all" else fp8_relu2_mlp
        self.squares_in_fp8 = hp.fp8_mlp != "up"
        self.register_buffer("scale", torch.ones(()))  # of squares, in FP8
        self.register_buffer("largest", torch.zeros(()), persistent=False)  # one in this step

    def forward(self, x: Tensor, post: Tensor | None = None) -> Tensor:
        """Map x (..., C) to (..., C), times post () unless that is None: as in attention."""
        w_in, w_out = self.c_fc.weight.type_as(x), self.c_proj.weight
        w_out = (w_out if post is None else post * w_out).type_as(x)
        if not (self.training and self.fp8_product.__name__ in t.IN_USE):
            return t.relu2_mlp(x, w_in, w_out)
        out, largest = self.fp8_product(x, w_in, w_out, self.scale if self.squares_in_fp8 else None)
        self.largest.copy_(torch.maximum(self.largest, largest))
        return out


MIXER_SCALE = 0.1  # factor on what mixers make; those of the layers learn it


class Mixer(nn.Module):
    """A small MLP that makes numbers of each token's stream (MUDD, arXiv 2502.12170). They begin as
    constants, from `bias`. With groups, a number also differs between groups of channels."""

    def __init__(self, hp: Hyperparameters, constants: list[float], width: int, groups: int = 0):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(constants) / MIXER_SCALE)
        self.hidden_w = self.out_w = self.group_w = None
        if width:
            self.hidden_w = random_weight(width, hp.model_dim)
            self.out_w = nn.Parameter(torch.zeros(len(constants), width))
        if groups:
            self.group_w = nn.Parameter(torch.zeros(len(constants), groups, width))

    def forward(self, x: Tensor, scale: float | Tensor = MIXER_SCALE) -> Tensor:
        """Map x (1, T, C) to n numbers (1, T, n), times a scale (1,). With groups they are (1, T,
        n * C): each of them for all channels."""
        bias = self.bias.type_as(x)
        if self.hidden_w is None:
            return (scale * bias).type_as(x).expand(1, x.size(1), -1)
        hidden = F.gelu(F.linear(x, self.hidden_w.type_as(x)))
        numbers = (scale * F.linear(hidden, self.out_w.type_as(x), bias)).type_as(x)
        if self.group_w is not None:
            more = scale * F.linear(hidden, self.group_w.flatten(0, 1).type_as(x))
            more = more.type_as(x).unflatten(-1, self.group_w.shape[:2])
            numbers = (numbers[..., None] + more).flatten(2)
            numbers = numbers.repeat_interleave(x.size(-1) // more.size(-1), dim=-1)
        return numbers


def named(numbers: Tensor, first: dict[str, list[float]]) -> dict[str, Tensor]:
    """Return numbers (1, T, n), which begin as those of `first`, by their names."""
    sizes = [len(constants) for constants in first.values()]
    return dict(zip(first, numbers.split(sizes, dim=-1), strict=True))


# Layers and mixers know streams (1, T, C) by these names:
#
#     x             the residual stream
#     x0            the normed embeddings; bigram: those of n-grams; v0, v1, ...: value tables' rows
#     start         what layer 0 reads: x0, with its share of n-grams
#     output 7      the output of layer 7, if a later layer reads it; normed 7: the same, normed
#     input, read   what the layer of mudd reads, and what its MLP reads
#
# "numbers 7" (1, T, n) are a mixer's for layer 7, until that layer has come.


def numbers_of(i: int, layer: Layer, hp: Hyperparameters) -> dict[str, list[float]]:
    """Return the numbers that a mixer makes for layer i, as they are at first: factors on streams,
    and then a number for each head. Attention of layer 0 reads its share of n-grams."""
    first = {
        "skip": [0.5] * (layer.skip_from is not None),
        "x0": [0.0] * layer.embed,
        "bigram before" if i == 0 else "bigram": [hp.bigram_lambda] * layer.bigram,
        "alpha": [0.0] * hp.num_heads * layer.xsa,
        "gate": [0.25] * hp.num_heads * layer.gate,
        "w1": [1.0] * hp.num_heads * layer.composed,
        "w2": [0.0] * hp.num_heads * layer.composed,
    }
    return {name: constants for name, constants in first.items() if constants}


def numbers_of_mudd(layer: Layer, hp: Hyperparameters) -> dict[str, list[float]]:
    """Return the numbers that the layer of mudd makes for itself, as they are at first: factors on
    streams that go into its values ("v ..."), its input ("x ...") and the stream behind attention
    (2026-04-22_MuddFormer)."""
    late = [] if layer.source is None else [f"output {layer.source}"]
    first = {f"{use} {name}": [0.0] for use in "vx" for name in ("start", *late, "x")}
    first |= {"tables": [2.0, 2.0], "start": [0.0], "bigram": [hp.bigram_lambda]}
    keep = [hp.residual_lambda]
    return first | {"keep": keep, "attention": [1.0], "keep mlp": keep, "mlp": [1.0]}


def numbers_of_end(layers: tuple[Layer, ...], hp: Hyperparameters) -> dict[str, list[float]]:
    """Return the factors on the streams that the end adds, as they are at first. In record 92 these
    are start, output 7, input, v0, output 3, v1 to v3, read, and normed 7."""
    source = layers[-1].source
    late = [] if source is None else [f"output {source}"]
    skips = [f"output {layer.skip_from}" for layer in layers if layer.skip_from is not None]
    tables = [f"v{layer.values}" for layer in layers if layer.values is not None]
    names = ["start", *late, "input", *tables[:1], *skips]
    if hp.mudd_all:
        names += [*tables, "read", *(f"normed {source}" for _ in late)]
    return dict.fromkeys(names, [0.0]) | dict.fromkeys(late, [-0.5])


class Block(nn.Module):
    """One layer: optional attention, then zero to two MLPs. Each of these two sublayers has factors
    on the residual stream and on its output."""

    def __init__(self, hp: Hyperparameters, i: int, layer: Layer):
        super().__init__()
        self.layer, self.eps = layer, hp.norm_eps
        self.first = numbers_of(i, layer, hp)
        self.attn = None if layer.window == "none" else CausalSelfAttention(hp, layer)
        self.mlp = MLP(hp) if layer.mlps else None
        self.second_mlp = MLP(hp) if layer.mlps == 2 else None
        self.value = f"v{layer.values}"  # the stream, if there is one
        if not layer.mudd:
            self.residual_lambda = nn.Parameter(torch.full((2,), hp.residual_lambda))
            self.post_lambda = nn.Parameter(torch.ones(2))

    def read_by_attention(self, x: Tensor, streams: dict[str, Tensor]) -> Tensor:
        """Return what attention reads: an earlier layer's output, normed, or else x."""
        if self.layer.source is not None:
            return streams[f"normed {self.layer.source}"]
        return recomputed_if_small(norm, x, self.eps)

    def forward(self, streams: dict, numbers: dict[str, Tensor], rotary, mask) -> Tensor:
        """Return the layer's output (1, T, C), with a mixer's numbers (1, T, n) for it."""
        x, keep, post, added = streams["x"], self.residual_lambda, self.post_lambda, []
        if self.attn is not None:
            read, value = self.read_by_attention(x, streams), streams.get(self.value)
            added.append(self.attn(read, value, rotary, mask, numbers, post[0]))
        shares = [numbers[name] * streams[name] for name in ("x0", "bigram") if name in numbers]
        if shares:
            added.append(sum(shares[1:], shares[0]))
        if added:
            x = keep[0] * x
        for part in added:
            x = x + part
        read = recomputed_if_small(norm, x, self.eps)
        x = keep[1] * x
        for mlp in (self.mlp, self.second_mlp):
            if mlp is not None:
                x = x + mlp(read, post[1])
        return x


class MuddBlock(Block):
    """The layer of mudd. A mixer of its own makes its factors for each token, and also mixes
    earlier streams into the values and the input of attention."""

    def __init__(self, hp: Hyperparameters, i: int, layer: Layer):
        super().__init__(hp, i, layer)
        self.first_of_mudd = numbers_of_mudd(layer, hp)

    def forward(self, streams, numbers, rotary, mask) -> Tensor:  # overrides
        """Return the layer's output (1, T, C). Add `input` and `read` to the streams."""
        x = streams["input"] = streams["x"]
        added = numbers["start"] * streams["start"]
        if "bigram" in streams:
            added = added + numbers["bigram"] * streams["bigram"]
        value = 0
        if self.value in streams:
            value = numbers["tables"].repeat_interleave(x.size(-1) // 2, dim=-1)
            value = value * streams[self.value]
        for name in ("start", f"output {self.layer.source}", "x"):
            if name in streams:
                value = value + numbers[f"v {name}"] * streams[name]
                x = x + numbers[f"x {name}"] * streams[name]
        out = self.attn(self.read_by_attention(x, streams), value, rotary, mask, numbers, None)
        x = numbers["keep"] * x + numbers["attention"] * out + added
        streams["read"] = recomputed_if_small(norm, x, self.eps)
        return numbers["keep mlp"] * x + numbers["mlp"] * self.mlp(streams["read"])


# -----------------------------------------------------------------------------
# Model: the head, and the whole


class Head(functions_2026.Head):
    """The head of these records: in training, the softmax covers a part of the vocabulary."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp, hp.logit_sigmoid, 0.005)
        self.end_of_text = hp.end_of_text
        # Of this rank's sequences, in the order in which they come: the next one's is first. Other
        # ranks have others, so Optimizers save those of all.
        self.register_buffer("offsets", self.first_offsets(hp.batch_seqs), persistent=False)

    def first_offsets(self, sequences: int) -> Tensor:
        """Return where in the sweep the sequences of the first batch begin, (sequences,)."""
        return torch.arange(sequences) * self.out_features // sequences

    @cached_property
    def prefixes(self) -> Tensor:
        """The longest token that begins each token (V,), or -1."""
        prefixes = token_prefixes(self.end_of_text, self.out_features)
        return torch.tensor(prefixes, device=self.weight.device)

    def training_loss(self, x: Tensor, targets: Tensor, now: Moment) -> Tensor:
        """Return the mean loss () of the next token, of x (T, C) and targets (T,) int64. The
        gradients are those of a sequence's summed losses of all targets of the moment, times their
        shares, in a softmax of now.candidates, if it names some."""
        shares, columns, weight = now.targets, next_targets(targets, len(now.targets)), None
        if now.prefix:  # 2026-07-13's record
            shares = *shares, now.prefix
            columns = torch.cat([columns, self.prefixes[targets][:, None]], dim=1)
        if now.candidates:
            chosen, columns = self.choose(columns, now.candidates)
            weight = F.embedding(chosen, self.weight.detach()).requires_grad_()
            weight.grad_dtype = self.weight.grad_dtype
            weight.register_post_accumulate_grad_hook(partial(self.add_gradient, chosen))
        return self.shares_loss(x, columns, shares, weight)

    def choose(self, columns: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` candidates (count,) for a softmax, and the targets (T, K) as places among
        them. A target that is no candidate, such as a prefix, is -1 and has no share."""
        size = self.out_features
        chosen, offset = choose_candidates(columns[:, 0], self.offsets[0], count, size)
        self.offsets.copy_(torch.cat([self.offsets[1:], offset[None]]))
        place = torch.full((size + 1,), -1, device=columns.device)  # the last place is that of -1
        place[chosen] = torch.arange(count, device=columns.device)
        columns = place[columns]
        columns[:, 0].clamp_(min=0)  # in a run, all are candidates; in a warm-up, perhaps not
        return chosen, columns

    def add_gradient(self, chosen: Tensor, weight: Tensor) -> None:
        """Add the gradient of the candidates' weight to that of the whole, in the backward pass."""
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight, dtype=weight.grad.dtype)
        self.weight.grad.index_add_(0, chosen, weight.grad)
        weight.grad = None


def with_borders(begins: Tensor, distance: int) -> Tensor:
    """Return `begins` (T,), which says what tokens begin a document, as if another document began
    at each such distance from a beginning."""
    position = torch.arange(len(begins), device=begins.device)
    start = torch.where(begins, position, 0).cummax(0).values
    return (position - start) % distance == 0


class GPT(nn.Module):
    """The language model of these records. A tied head is bfloat16 on CUDA, too."""

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.hp, self.layers = hp, layer_table(hp)
        self.kernels = ("chunk_loss", "relu2_mlp")  # of gpu_kernels.py, if they agree
        if hp.fp8_mlp != "off":
            self.kernels += ("fp8_mlp" if hp.fp8_mlp == "all" else "fp8_relu2_mlp",)
        last, width = self.layers[-1], hp.num_heads * hp.head_dim

        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim)
        names = sorted({layer.values for layer in self.layers} - {None})
        tables = {name: nn.Embedding(hp.vocab_size, width) for name in names}
        for table in tables.values():
            table.weight.data *= 0.01
        self.value_embeds = nn.ModuleDict({"embed": nn.ModuleDict(tables)})
        self.bigram_embed = None
        if hp.bigram_rows:
            zeros = torch.zeros(hp.bigram_rows, hp.model_dim)
            self.bigram_embed = nn.Embedding.from_pretrained(zeros, freeze=False)
        self.ngrams = NgramTable(hp) if hp.ngram_rows else None
        self.numbers_in_pieces = hp.ngram_rows * hp.model_dim  # of all ranks together
        # The factors on skip connections, which the upper half of the layers may have.
        self.skip_weights = nn.Parameter(torch.full((hp.num_layers // 2,), -1.5))
        self.smear_gate = nn.Parameter(torch.zeros(1, GATE_CHANNELS))
        self.smear_lambda = nn.Parameter(torch.zeros(1))

        self.blocks = nn.ModuleList()
        for i, layer in enumerate(self.layers):
            self.blocks.append((MuddBlock if layer.mudd else Block)(hp, i, layer))
        self.lm_head = Head(hp)
        if hp.tied_frac:
            self.embed.weight.data.copy_(self.lm_head.weight.data)
        signs = torch.randn(hp.bigram_signs, hp.model_dim).sign()
        self.register_buffer("signs", signs.bfloat16())

        # Mixers of layers go by the layer before which they read x: for those up to the next one.
        self.mixers, self.mixer_scale = nn.ModuleDict(), nn.Parameter(torch.tensor([MIXER_SCALE]))
        begins = [i for i, layer in enumerate(self.layers) if i == 0 or layer.mixer]
        self.mixed = {}  # by mixer: how many numbers it makes for each of these layers
        for i, end in itertools.pairwise([*begins, hp.num_layers]):
            constants = [sum(self.blocks[j].first.values(), []) for j in range(i, end)]
            self.mixed[i] = [len(numbers) for numbers in constants]
            if any(constants):
                self.mixers[f"{i}"] = Mixer(hp, sum(constants, []), hp.mixer_width)
        if last.mudd:
            constants = sum(self.blocks[-1].first_of_mudd.values(), [])
            self.mixers["last"] = Mixer(hp, constants, hp.mudd_width)
            self.first_of_end = numbers_of_end(self.layers, hp)
            constants = sum(self.first_of_end.values(), [])
            self.mixers["end"] = Mixer(hp, constants, hp.mudd_width, hp.mudd_groups)
        self.frequencies: dict[tuple, tuple] = {}  # of rotary, by the windows so far

    @cached_property
    def canonical(self) -> CanonicalMask:
        """The mask of the last validation, which is made when it is needed first."""
        return CanonicalMask(self.hp.end_of_text, len(self.lm_head.weight))

    def forward(self, input_seq: Tensor, target_seq: Tensor, now: Moment) -> Tensor:
        """Return the mean loss () of the next token, of tokens (T,) and targets (T,) int64: in
        training as by training_loss; in the last validation without tokens that cannot follow."""
        x = self.hidden(input_seq, now)
        if self.training:
            return self.lm_head.training_loss(x, target_seq, now)
        if self.hp.canonical_mask and now.step == self.hp.num_iterations:
            return self.canonical.loss(self.lm_head, x, target_seq, input_seq)
        return self.lm_head.loss(x, target_seq)

    def hidden(self, input_seq: Tensor, now: Moment) -> Tensor:
        """Map tokens (T,), whole blocks, to the normalised output (T, C) of the last layer."""
        position = torch.arange(len(input_seq), device=input_seq.device)
        masks, rotary = self.context(input_seq, position, now)
        x, more = self.embedded(input_seq, tied=self.training and now.tied)
        return self.run_layers(x, more, rotary, masks)

    def context(self, input_seq: Tensor, position: Tensor, now: Moment) -> tuple[dict, dict]:
        """Return the masks of tokens (T,), and the rotary tables of tokens at positions (n,)."""
        # Windows are tensors, so that a new one recompiles nothing.
        masks = self.masks(input_seq, torch.tensor(now.window), torch.tensor(now.short))
        return masks, self.rotary(position, now)

    def run_layers(self, x: Tensor, more: dict[str, Tensor], rotary: dict, masks: dict) -> Tensor:
        """Map embeddings (T, C) to the head's input (T, C). `more` is of `embedded`. Four layers
        are one graph. Each graph costs the host time, and with one for all layers, no gradient
        could be sent before the backward pass ends. Graphs of one layer save 1 to 2 GB in
        validation."""
        streams, count = more | {"x": x}, 1 if t.memory_is_small(x.device) else 4
        for start in range(0, len(self.layers), count):
            streams = self.run_graph(start, start + count, streams, rotary, masks)
        return streams["x"]

    @t.compiled
    def run_graph(self, start: int, stop: int, streams: dict, rotary: dict, masks: dict) -> dict:
        """Run the layers from start to stop, if there are so many. Return the streams with those of
        these layers."""
        streams, hp = dict(streams), self.hp
        if start == 0:
            streams["x"] = streams["x0"] = norm(streams["x"], hp.norm_eps)[None]
        for i in range(start, min(stop, len(self.layers))):
            layer, block = self.layers[i], self.blocks[i]
            if f"{i}" in self.mixers:
                made = self.mixers[f"{i}"](streams["x"], self.mixer_scale)
                parts = enumerate(made.split(self.mixed[i], dim=-1), start=i)
                streams |= {f"numbers {j}": part for j, part in parts}
            numbers = named(streams[f"numbers {i}"], block.first) if block.first else {}
            x = streams["x"]
            if "bigram before" in numbers:
                x = x + numbers["bigram before"] * streams["bigram"]
            if i == 0:
                streams["start"] = x
            if layer.skip_from is not None:
                factor = torch.sigmoid(self.skip_weights[i - len(self.layers)]) * numbers["skip"]
                x = x + factor * streams[f"output {layer.skip_from}"]
            if layer.mudd:
                numbers |= named(self.mixers["last"](x), block.first_of_mudd)
            turned, mask = rotary.get((layer.narrow, layer.paired)), masks.get(layer.mask)
            streams["x"] = x
            x = streams["x"] = block(streams, numbers, turned, mask)
            if any(i in (later.skip_from, later.source) for later in self.layers):
                streams[f"output {i}"] = x
            if any(later.source == i for later in self.layers):
                streams[f"normed {i}"] = norm(x, hp.norm_eps)
        if stop >= len(self.layers):
            streams = {"x": self.end(streams)}
        return streams

    def end(self, streams: dict[str, Tensor]) -> Tensor:
        """Map the last output, with shares of streams, to the head's input (T, C)."""
        x = streams["x"]
        if "end" in self.mixers:
            factors = self.mixers["end"](x).chunk(len(self.first_of_end), dim=-1)
            for name, factor in zip(self.first_of_end, factors, strict=True):
                x = x + factor * streams[name]
        return norm(x, self.hp.norm_eps)[0]

    def embedded(self, input_seq: Tensor, tied: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the smeared embeddings (T, C) of tokens (T,), of which the head is the table if it
        is tied; and what else layers add: v0 and so on, and bigram."""
        x = t.look_up(input_seq, (self.lm_head if tied else self.embed).weight)
        x = smeared(x, self.smear_gate, self.smear_lambda)
        tables = self.value_embeds["embed"].items()
        more = {f"v{name}": t.look_up(input_seq, table.weight) for name, table in tables}
        if self.bigram_embed is not None:
            rows = bigram_hash(input_seq, self.hp.bigram_rows)
            more["bigram"] = t.look_up(rows, self.bigram_embed.weight)
            if self.hp.bigram_signs:
                more["bigram"] = self.signed(more["bigram"], input_seq)
        if self.ngrams is not None:
            self.share_ngrams()  # for tools: in a run, Optimizers have made the ranks' parts
            rows, signs = ngram_hashes(input_seq, self.hp.ngram_rows, len(self.signs))
            found = self.ngrams.look_up(rows.flatten())
            more["bigram"] = self.signed_sum(found.view(*rows.shape, -1), signs)
        return x, more

    @t.compiled
    def signed(self, bigram: Tensor, input_seq: Tensor) -> Tensor:
        """Return rows of bigrams (T, C) times signs, chosen by another hash of the tokens (T,) and
        those before them. The first one has those of row 0 (2026-05-20_BigramsSignTrick)."""
        row = F.pad((input_seq[1:] ^ input_seq[:-1]) % len(self.signs), (1, 0))
        return bigram * self.signs[row].type_as(bigram)

    @t.compiled
    def signed_sum(self, rows: Tensor, signs: Tensor) -> Tensor:
        """Return the sum (T, C) of a bigram's and a trigram's rows (2, T, C), times those rows (2,
        T) of the table of signs."""
        return (rows * self.signs[signs.long()].type_as(rows)).sum(0)

    @torch.no_grad()
    @t.compiled
    def masks(self, input_seq: Tensor, long: Tensor, short: Tensor) -> dict:
        """Return the masks of input_seq (T,) for both windows (), by Layer.mask."""
        begins = input_seq == self.hp.end_of_text
        if self.training and self.hp.attention_border:
            begins = with_borders(begins, self.hp.attention_border)
        masks = {}
        for name in sorted({layer.mask for layer in self.layers} - {"none"}):
            places = two_places(begins) if name.endswith("+pair") else begins
            window = long if name.startswith("long") else short
            masks[name] = t.make_mask(visible_by_distance(places, window))
        return masks

    def rotary(self, position: Tensor, now: Moment) -> dict[tuple[bool, bool], tuple]:
        """Return the rotary tables of tokens at positions (T,), by whether heads are narrow, and
        paired: cos and sin (T, 1, head_dim / 2), or (T, 2, head_dim / 2) for two places a token;
        and YaRN's factor () on q. Those of narrow heads follow the short window."""
        tables, stages = {}, stage_table(self.hp)[: now.stages]
        attend = [layer for layer in self.layers if layer.window != "none"]
        for narrow, paired in sorted({(layer.narrow, layer.paired) for layer in attend}):
            windows = tuple(stage.window for stage in stages)
            if narrow:
                windows = tuple(stage.short_window for stage in stages)
            if (narrow, windows) not in self.frequencies:
                frequency = t.rotary_frequencies(self.hp, position.device)
                frequency, factor = yarn(frequency, windows)
                turning = len(frequency) // (1 + narrow)
                self.frequencies[narrow, windows] = frequency[:turning], factor
            frequency, factor = self.frequencies[narrow, windows]
            tables[narrow, paired] = *self.rotary_table(position, frequency, paired), factor
        return tables

    @t.compiled
    def rotary_table(self, position: Tensor, frequency: Tensor, paired: bool) -> tuple:
        """Return cos and sin of tokens at positions (T,), which have two places each if paired."""
        places = [2 * position, 2 * position + 1] if paired else [position]
        return t.rotary_table(torch.stack(places, dim=1), frequency)

    def tables(self) -> list[nn.Module]:
        """Return what is bfloat16 on CUDA. There, as in the public records, a mixer's constants of
        2 and more never move: Adam's steps are smaller than half of their last bit."""
        tables = [self.embed, self.value_embeds, self.mixers]
        if self.bigram_embed is not None:
            tables.append(self.bigram_embed)
        if self.hp.tied_frac:
            tables.append(self.lm_head)
        return tables

    def share_ngrams(self, rank: int = 0, parts: int = 1) -> None:
        """Make this rank's part of the n-gram table, if it is not made yet."""
        if self.ngrams is not None and self.ngrams.rows is None:
            table = self.embed.weight
            self.ngrams.share(rank, parts, table.device, table.dtype)

    def save_pieces(self, path: Path) -> None:
        """Save this rank's piece of the n-gram table."""
        if self.ngrams is not None:
            self.ngrams.save(path)

    def load_pieces(self, path: Path | None, weights_only: bool) -> None:
        """Load this rank's rows of the n-gram table; without a path, zeros."""
        if self.ngrams is not None:
            self.share_ngrams()
            self.ngrams.load(path, weights_only)


# -----------------------------------------------------------------------------
# Optimizers, and the class that tools use

ADAM_EVERY = 2  # steps between Adam's updates, which sum their gradients
# Matrices: names of parameters as a pattern.
MATRICES = {"muon": r"blocks\..*(weight|v_w)", "pairs": r"blocks\..*qk_w"}
# What Adam trains: names, learning rate or its setting, beta1, beta2, decay, dimensions of a row.
ADAM = {
    "head": (r"lm_head\.weight", "head_lr", 0.5, 0.95, 0.75, 1),
    "embed": (r"embed\.weight", "head_lr", 0.5, 0.95, 0.75, 1),
    "values": (r"value_embeds\..*|bigram_embed\.weight", "value_lr", 0.75, 0.95, 0.025, 1),
    "scalar": (r"skip_weights|smear_lambda|blocks\..*\.lambdas", 0.04, 0.9, 0.99, 0.0, 0),
    "gates": (r"blocks\..*gate", 0.008, 0.9, 0.99, 0.005, 0),
    "residual": (r"blocks\..*residual_lambda", 0.04, 0.9, 0.95, 0.0, 0),
    "post": (r"blocks\..*post_lambda", 0.008, 0.9, 0.95, 0.0, 0),
    "smear": (r"smear_gate", 8e-5, 0.9, 0.99, 0.0, 0),
    "mixer": (r"mixers\.\d+\..*_w", 8e-4, 0.9, 0.99, 0.005, 0),
    "mixer_bias": (r"mixers\.\d+\.bias", 8e-4, 0.9, 0.99, 0.0, 0),
    "mixer_scale": (r"mixer_scale", 8e-4, 0.9, 0.99, 0.0, 0),
    "mudd": (r"mixers\.(last|end)\..*_w", 0.002, 0.9, 0.99, 0.005, 0),
    "mudd_bias": (r"mixers\.(last|end)\.bias", 0.002, 0.9, 0.99, 0.0, 0),
}


def muon(bank, lr: float, now: Moment, hp: Hyperparameters, factors: Triple) -> None:
    """Step by NorMuon with Polar Express, with a factor on lr for the matrices' shape. Weights
    decay cautiously, by muon_decay * lr^2."""
    update = cautious.muon_update(bank, now, hp, cautious.polar_express)
    if "second_moment" not in bank.state:
        bank.state["second_moment"] = cautious.new_second_moment(bank.shard_grad)
    update = cautious.normuon(update, bank.state["second_moment"], hp.muon_beta2)
    factor = cautious.shape_factor(update.shape, factors)
    rates = cautious.numbers(lr * factor, lr * hp.muon_decay)
    cautious.decayed_step_(bank.shard, update, update, *rates)


def adam(bank, lr: float, now: Moment, hp: Hyperparameters, betas: tuple, decay: float) -> None:
    """Step by Adam with cautious weight decay."""
    cautious.adam(bank, lr, betas, hp.adam_eps, decay)


class Optimizers(t.Optimizers):
    """train_gpt.py's Optimizers, with a head that may be tied, and with state outside the groups:
    the n-gram table, averages of the last weights, and scales of squares in FP8. A sequence of the
    batch has a sweep of the sampled softmax of its own, so it does not matter how many ranks there
    are."""

    def __init__(self, model: GPT, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        if hp.ngram_rows and hp.val_tokens // hp.val_seq_len % world_size:
            rule = "val_tokens / val_seq_len must be a multiple of the ranks"
            raise UserError(f"--ngram_rows, on {world_size} ranks: {rule}")
        if hp.ngram_rows:
            self.period = math.lcm(self.period, 4)  # the table learns at each fourth step
        model.share_ngrams(rank, world_size)
        self.set_offsets(model.lm_head.first_offsets(hp.batch_seqs))

    @staticmethod
    def parameter_groups(model: GPT, hp: Hyperparameters) -> list[Group]:  # overrides
        """Return the groups, in the order in which weights are updated. A tied head waits for the
        embedding's gradient. Matrices come first: they do not wait."""

        def matching(pattern: str) -> list[nn.Parameter]:
            return [p for name, p in model.named_parameters() if re.fullmatch(pattern, name)]

        groups = []
        for name, pattern in MATRICES.items():
            factors = hp.muon_mul if name == "muon" else (1.0, 1.0, 1.0)
            rule = partial(anvil if hp.optimizer == "anvil" else muon, factors=factors)
            params = matching(pattern)[::-1]
            groups.append(Group(name, params, rule, hp.muon_lr, item_ndim=2))
        for name, (pattern, lr, *betas, decay, item_ndim) in ADAM.items():
            rule = partial(adam, betas=betas, decay=decay)
            if name == "values" and hp.ngram_rows:  # in the rhythm of the n-gram table
                rule = partial(table_adam, betas=betas, decay=decay)
            lr = getattr(hp, lr) if isinstance(lr, str) else lr
            groups.append(Group(name, matching(pattern), rule, lr, item_ndim, ADAM_EVERY))
        return groups

    @torch.no_grad()
    def step(self, now: Moment) -> dict[str, Tensor]:  # overrides
        """Update all groups that learn at a moment, the FP8 scales, the n-gram table when its cycle
        ends, and the averages."""
        split(self.groups, now, self.hp)
        results = super().step(now)
        self.scale_squares()
        ngrams = self.model.ngrams
        if ngrams is not None:
            ngrams.collect()
            if now.ngrams:
                ngrams.learn(now)
        if self.hp.tail_average:
            tail_average.average(self.groups, now, self.hp)
        tie(self.groups, now, self.hp)
        return results

    def scale_squares(self) -> None:
        """Set the FP8 scales of squares by the largest one of a step on all ranks, with room for it
        to grow. (Public ranks each take that of their last sequence.)"""
        mlps = [part for part in self.model.modules() if hasattr(part, "largest")]
        is_used = {"fp8_mlp", "fp8_relu2_mlp"} & t.IN_USE
        if not mlps or not is_used or self.hp.fp8_mlp == "up":
            return
        room = 1.03 if self.hp.fp8_mlp == "all" else 1.8
        largest = torch.stack([mlp.largest for mlp in mlps])
        if self.world_size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        scales = torch.stack([mlp.scale for mlp in mlps])
        scales = torch.where(largest > 0, room / 448 * largest, scales)
        torch._foreach_copy_([mlp.scale for mlp in mlps], list(scales))
        torch._foreach_zero_([mlp.largest for mlp in mlps])

    def set_offsets(self, offsets: Tensor) -> None:
        """Give the head those of this rank's sequences, of all (batch_seqs,)."""
        head = self.model.lm_head
        head.offsets = offsets.chunk(self.world_size)[self.rank].to(head.weight.device, copy=True)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:  # overrides
        """Return all states, and the offsets of all sequences, on rank 0's CPU."""
        saved, offsets = super().state_dict(), self.model.lm_head.offsets
        if self.world_size > 1:
            own, offsets = offsets, offsets.new_empty(self.hp.batch_seqs)
            t.all_gather(offsets, own)
        return saved | {"sampled softmax": {"offsets": offsets.cpu()}}

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:  # overrides
        """Load state that any number of ranks saved, or begin anew with {}."""
        of_groups = {key: state for key, state in saved.items() if key != "sampled softmax"}
        super().load_state_dict(of_groups)
        if self.model.ngrams is not None:
            self.model.ngrams.waiting = []  # load_pieces brings what is to wait
        first = {"offsets": self.model.lm_head.first_offsets(self.hp.batch_seqs)}
        self.set_offsets(saved.get("sampled softmax", first)["offsets"])


class Run(t.Run):
    """A run of these records."""

    records = RECORDS
    default_record = "2026-08-30_ANVIL2"
    GPT = GPT
    Optimizers = Optimizers
    Moment = Moment
    check = staticmethod(check)
    plan = staticmethod(plan)
    warm_up = staticmethod(warm_up)


if __name__ == "__main__":
    t.main(run=Run)
