"""Train the NanoGPT-speedrun records of August 2025 to March 2026, and GPT-2 medium's of December
2025: a fork of train_gpt.py.

    torchrun --standalone --nproc_per_node=8 forks/train_gpt_2026.py    # 2026-03-06_SimplifyHC
    ./run.sh forks/train_gpt_2026.py                                    # the same; on a CPU, a demo

This file imports train_gpt.py and overrides what the records changed. Each technique is a setting,
or a word in a row of layers or stages, so each can be turned off. The numbers come from the sources
in the public logs, in github.com/KellerJordan/modded-nanogpt. A name such as
2025-12-14_PartialKeyOffset is the public record that introduced a technique. What
train_gpt_2026_08.py has, too, is in functions_2026.py and cautious.py.

It overrides, in train_gpt.py's order:

    Settings         the new settings; tables of layers, stages and Adam's groups; the records
    Data             sequences that begin with a document; long documents are cut
    Schedules        stages of the run, and what each of them sets
    Model            paired heads, gates, bigrams, YaRN, several targets a token, a tied head
    Optimizers       Polar Express, NorMuon, cautious weight decay, Adam at every second step
    Run              the class that tools use
"""

import bisect
import itertools
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train_gpt.py lies
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cautious
import functions_2026
import train_gpt as t
from functions_2026 import (
    GATE_CHANNELS,
    as_pairs,
    bigram_hash,
    gate_of,
    next_targets,
    number_rows,
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
from train_gpt import Group, UserError

Triple = tuple[float, float, float]

# -----------------------------------------------------------------------------
# Settings: those of the records after 2025-01-26


@dataclass(frozen=True)
class Layer:
    """One layer of the model: what it attends with and what is added to it. It is written as its
    window, and then any of its words: long+v0+x5. Layers in use are numbered from 0."""

    window: str  # "long", "short" (half of the stage's long one), or "none": no attention
    values: str | None = None  # v0, v1: rows of this value-embedding table are mixed into v
    skip_from: int | None = None  # x5: in the upper half, layer 5's output is added to the input
    source: int | None = None  # in5: attention reads the output of layer 5, not the input
    paired: bool = False  # pair: two heads attend as one of twice as many positions
    backout: bool = False  # backout: a share of its output is subtracted before the last norm

    # The fields that words set. A numbered word is followed by a number.
    numbered: ClassVar = {"v": "values", "x": "skip_from", "in": "source"}
    plain: ClassVar = {"pair": "paired", "backout": "backout"}

    @property
    def mask(self) -> str:
        """The name of the mask that the layer attends with."""
        return f"{self.window}+pair" if self.paired else self.window


LAYERS_2025_SKIPS = (
    "long+v0,short+v1,short+v2,short,long,short,"
    "short+x5,none+x4,short+x3,short+v0+x2,short+v1+x1,long+v2+x0"
)
LAYERS_2026 = (
    "short+v1+pair,short+v2,short+pair,long,short,short+pair,none+x3,"
    "short+backout,short+v0,short+v1+pair,long+v2"
)
LAYERS_UNTIED = (
    "short+v0+pair,short+v1,short+pair,long,short,short+pair,none+x3,"
    "short+backout,short+v2,short+v3+pair,long+v4"
)
LAYERS_HC = (  # late attention reads the output of layer 7
    "short+pair,short+v0,short+v1+pair,long,short,short+pair,none+x3,"
    "short+backout,short+v2+in7,short+v3+in7+pair,long+v4+in7"
)
LAYERS_MEDIUM = (
    "long+v0,short+v1,short+v2,short+v3,long+v4,short,short,short,"
    "short,short+x6,short+x4,long+x2+v0+backout,short+v1,short+v2,short+v3,long+v4"
)
LAYERS_DEMO = "short+v0+pair,long+v1,short+x0+pair+backout,long+v2"


@dataclass(frozen=True)
class Stage:
    """One stage of the run."""

    share: float = 1.0  # its share of the scheduled steps, in proportion to the other stages
    length: float = 1.0  # tokens in a training sequence, as a multiple of seq_len
    window: int = 0  # the long window in tokens; 0: it grows as in train_gpt.py
    short: int = 0  # the short window in tokens; 0: half of the long one
    lr: float = 1.0  # multiplies every learning rate
    cap: int = 0  # tokens at which documents are cut; 0: max_document_tokens
    targets: tuple[float, ...] = (1.0,)  # loss weights of the next token and of those after it;
    # the last of several falls to 0 within the stage


# Stages of the run, and settings of Adam's parameter groups. number_rows reads both.
LATER_STAGES = (
    "length=2+window=896+lr=1.52+targets=1/.5,length=3+window=1408+lr=1.73,"
    "length=3+window=1664+lr=1.73"
)
STAGES_2026 = f"length=1+window=384+lr=1+targets=1/.5/.25,{LATER_STAGES}"
STAGES_HC = f"length=1+window=384+lr=1+cap=896+targets=1/.5/.25,{LATER_STAGES}"
STAGES_MEDIUM = (
    "length=1+window=384+lr=1+targets=1/.5/.25,length=2+window=896+lr=1.52+targets=1/.5,"
    "length=3+window=1408+lr=1.73,length=4+window=1664+lr=2,length=4+window=1920+lr=2,"
    "length=4+window=2176+lr=2,length=4+window=2432+lr=2,length=4+window=2688+lr=2,"
    "length=4+window=2944+lr=2+share=4,length=4+window=2944+lr=2"
)
STAGES_DEMO = (
    "length=1+window=256+lr=1+targets=1/.5/.25,length=2+window=256+lr=1.52+targets=1/.5,"
    "length=3+window=384+lr=1.73,length=3+window=384+lr=1.73"
)
ADAM_SHARED = (
    "head+lr=.008+beta1=.5+decay=.75,embed+lr=.008+beta1=.5+decay=.75,"
    "values+lr=.6+beta1=.75+decay=.025,scalar+lr=.04+beta1=.9+beta2=.99,"
    "gates+lr=.008+beta1=.9+beta2=.99+decay=.005,smear+lr=8e-5+beta1=.9+beta2=.99,"
    "skip+lr=4e-4+beta1=.9+beta2=.99"
)
ADAM_2026 = f"{ADAM_SHARED},x0+lr=.04+beta1=.65"
ADAM_HC = (
    f"{ADAM_SHARED},x0+lr=.008+beta1=.9,bigram+lr=.008+beta1=.9,residual+lr=.04+beta1=.9,"
    "post+lr=.008+beta1=.9"
)
ADAM_MEDIUM = (
    "head+lr=.004+decay=.75,embed+lr=.004+decay=.75,values+lr=.3+decay=.025,"
    "scalar+lr=.04+beta1=.9+beta2=.99,smear+lr=4e-5,skip+lr=4e-5,x0+lr=.02"
)

# Groups of parameters, in their order in a step: their names as a pattern, and the group that takes
# them if adam_groups has no row for this one.
GROUPS = {
    "head": (r"lm_head\.weight", "head"),
    "muon": (r"blocks\..*(weight|qkv_w)", "muon"),
    "embed": (r"embed\.weight", "embed"),
    "values": (r"value_embeds\..*|(bigram|second)_embed\.weight", "values"),
    "scalar": (r"skip_weights|blocks\..*lambdas|smear_lambda|backout_lambda", "scalar"),
    "gates": (r"blocks\..*gate", "gates"),  # learn by Muon, without a row of their own
    "x0": (r"blocks\..*(x0|second)_lambda", "scalar"),
    "bigram": (r"blocks\..*bigram_lambda", "scalar"),
    "residual": (r"blocks\..*residual_lambda", "scalar"),
    "post": (r"blocks\..*post_lambda", "scalar"),
    "smear": (r"smear_gate", "scalar"),
    "skip": (r"skip_gates", "scalar"),
}


@dataclass(frozen=True)
class Hyperparameters(t.Hyperparameters):
    """train_gpt.py's settings, and those of later records. Defaults: 2025-01-26_BatchSize."""

    window_rule: Literal["blocks", "tokens", "distance"] = "blocks"  # unit of attention windows
    layers: str = LAYERS_2025_SKIPS  # window and words of each layer

    stages: str = ""  # settings of each stage; empty: one stage
    extension_frac: float = 0.0  # share of steps after the schedule's end
    exact_stages: bool = False  # stages and learning rates change at unrounded steps
    last_window: int = 0  # long window of the last validation, 0: unchanged
    align_to_documents: bool = False  # begin each training sequence with a document
    max_document_tokens: int = 2048  # tokens at which aligned documents are cut, 0: never

    qkv_init: float = 1.0  # factor on init_bound for q, k and v
    out_init: float = 0.0  # factor on init_bound for attention's last weight, 0: zeros
    value_init: float = 1.0  # initial standard deviation of value embeddings
    head_init: float = 0.0  # initial standard deviation of the head
    tied_frac: float = 0.0  # share of scheduled steps with head and embedding tied
    yarn: bool = False  # YaRN: fit rotary frequencies and attn_scale to the window
    yarn_window: int = 0  # longest window that YaRN fits them to, 0: no limit
    key_offset: bool = False  # long, unpaired: half of a key is the previous token's
    paired_heads: bool = False  # heads attend in pairs in layers with the word pair
    attention_gate: bool = False  # gate each head's output
    value_gate: bool = False  # gate value embeddings for each head
    gate_channels: int = GATE_CHANNELS  # channels of its input that a gate reads
    gate_by_values: bool = False  # unpaired, value gates also read the value embedding
    skip_gate: bool = False  # gate skip connections
    smear: bool = False  # add to each embedding a gated share of the previous one
    second_embed: bool = False  # add a second embedding of the token in each layer
    bigram_rows: int = 0  # rows of the bigram embedding table, 0: no table
    bigram_lambda: float = 0.1  # initial factor on bigram embeddings in each layer
    scaled_projections: bool = False  # attention's lambdas scale its projections' weights
    residual_lambda: float = 1.0  # initial factor on the residual stream
    sublayer_lambdas: bool = False  # factors on residual stream and output, by sublayer
    x0_apart: bool = False  # the factors on x0 are parameters of their own
    logit_sigmoid: Triple = (0.0, 0.0, 1.0)  # a b c: a sigmoid((logit + b) / c); a 0: off
    loss_sum: bool = False  # gradients are of a sequence's summed loss, not its mean

    adam_rule: Literal["torch", "cautious"] = "torch"  # cautious: with cautious weight decay
    adam_groups: str = ""  # Adam's groups with settings of their own
    adam_every: int = 1  # steps between Adam's updates, which sum their gradients
    muon_mul: Triple = (2.0, 1.0, 1.0)  # factors on muon_lr: tall, wide, square matrices
    gate_mul: float = 1.0  # factor on muon_lr: gates, where they learn by Muon
    muon_beta2: float = 0.0  # NorMuon's beta2, 0: plain Muon
    muon_decay: float = 0.0  # Muon's cautious weight decay, times lr^2
    polar_express: bool = False  # orthogonalise by Polar Express, not by Newton-Schulz
    momentum_cooldown_steps: int = 0  # last steps, in which Muon's momentum falls

    @property
    def scheduled_steps(self) -> int:
        """The steps before the extension, which keeps the last learning rate."""
        return self.num_iterations - round(self.num_iterations * self.extension_frac)

    @property
    def sigmoid_form(self) -> Triple:
        """(a, b, c) of the capped logits a * sigmoid((logit + b) / c). Without logit_sigmoid they
        are cap * tanh(logit / cap) plus a constant, which softmax ignores."""
        if self.logit_sigmoid[0]:
            return self.logit_sigmoid
        return 2 * self.logit_softcap, 0.0, self.logit_softcap / 2

    @property
    def most_targets(self) -> int:
        """The largest number of targets that a token has in any stage."""
        return max(len(stage.targets) for stage in stage_table(self))


def layer_table(hp: Hyperparameters) -> tuple[Layer, ...]:  # overrides
    """Return the layers in use: num_layers of --layers, half from each end. UserError for rows that
    are wrong, or that name a layer which is not below them."""
    rows = hp.layers.split(",")
    n, half = hp.num_layers, hp.num_layers // 2
    if not 2 <= n <= len(rows):
        raise UserError(f"--num_layers {n}: --layers has {len(rows)} rows, and a model at least 2")
    table = []
    for i, row in enumerate(rows[: n - half] + rows[len(rows) - half :]):
        layer = read_layer(row, Layer)
        table.append(replace(layer, paired=layer.paired and hp.paired_heads))
        rule = ""
        if layer.window == "none" and (layer.values or layer.source is not None or layer.paired):
            rule = "a layer without attention has no values, source or pairs"
        elif layer.skip_from is not None and (i < n - half or layer.skip_from >= i):
            rule = "layers of the upper half add the output of a layer below"
        elif layer.source is not None and layer.source >= i:
            rule = "attention reads the output of a layer below"
        elif sum(layer.backout for layer in table) > 1:
            rule = "only one layer can have the word backout"
        if rule:
            raise UserError(f"--layers: {row!r} cannot be layer {i}: {rule}")
    return tuple(table)


def stage_table(hp: Hyperparameters) -> tuple[Stage, ...]:
    """Return the stages of the settings; UserError for a wrong row."""
    return read_stages(hp.stages, Stage, hp.seq_len)


def adam_table(hp: Hyperparameters) -> dict[str, dict[str, float]]:
    """Return the numbers that adam_groups sets for each group, by the group's name. UserError for
    an unknown name, a name that comes twice, or a decay that the rule does not have."""
    fields = dict.fromkeys(("lr", "beta1", "beta2", "decay"), 0.0)
    rows = number_rows(hp.adam_groups, "adam_groups", fields)
    table, known = dict(rows), GROUPS.keys() - {"muon"}
    rule = ""
    if len(table) < len(rows) or not table.keys() <= known:
        rule = f"each row begins with another one of {' '.join(sorted(known))}"
    elif hp.adam_rule != "cautious" and any("decay" in row for row in table.values()):
        rule = "decay needs --adam_rule cautious"
    if rule:
        raise UserError(f"--adam_groups {hp.adam_groups}: {rule}")
    return table


def check(hp: Hyperparameters) -> None:  # overrides
    """Raise UserError for settings that are not allowed, alone or together."""
    t.check(hp)
    layer_table(hp)
    adam_table(hp)
    stages = stage_table(hp)
    has_caps = any(stage.cap for stage in stages)
    has_windows = len(stages) == 1 or min(stage.window for stage in stages) > 0
    a, _, c = hp.logit_sigmoid
    every = hp.adam_every
    for name, wrong, rule in (
        ("extension_frac", hp.scheduled_steps < 1, "leaves no step before the extension"),
        ("stages", has_caps and not hp.align_to_documents, "cap needs --align_to_documents on"),
        ("adam_every", every < 1, "must be 1 or more"),
        ("save_every", every and hp.save_every % every, "must be a multiple of --adam_every"),
        ("grad_clip", hp.grad_clip and every > 1, "needs --adam_every 1"),
        ("tied_frac", hp.tied_frac and hp.vocab_size % 128, "needs vocab_size a multiple of 128"),
        ("yarn", hp.yarn and not has_windows, "needs a window in each of --stages"),
        ("key_offset", hp.key_offset and hp.rope != "half", "needs --rope half"),
        ("paired_heads", hp.paired_heads and hp.num_heads % 2, "needs an even --num_heads"),
        ("gate_by_values", hp.gate_by_values and not hp.value_gate, "needs --value_gate on"),
        ("bigram_rows", hp.bigram_rows == 1, "must be 0 (no table), or 2 and more"),
        (
            "gate_channels",
            hp.gate_channels % 2 or not 0 < hp.gate_channels <= hp.model_dim,
            "must be even, above 0, and at most model_dim",
        ),
        ("sublayer_lambdas", hp.sublayer_lambdas and not hp.x0_apart, "needs --x0_apart on"),
        (
            "layers",
            hp.sublayer_lambdas and hp.layers.startswith("none"),
            "--sublayer_lambdas on needs attention in layer 0",
        ),
        ("logit_sigmoid", a and not c, "its third number must be above 0"),
    ):
        if wrong:
            raise UserError(f"--{name} {t.show(getattr(hp, name))}: {rule}")


BIGRAM_HASH = Hyperparameters(
    num_iterations=1600,
    cooldown_frac=0.55,
    stages=STAGES_2026,
    extension_frac=40 / 1600,
    exact_stages=True,
    last_window=2560,
    window_rule="distance",
    seq_len=16384,
    align_to_documents=True,
    layers=LAYERS_2026,
    num_layers=11,
    vocab_size=50304,
    qkv_init=2.0,
    value_init=0.0,
    head_init=0.005,
    tied_frac=2 / 3,
    attn_scale=0.1,
    yarn=True,
    key_offset=True,
    paired_heads=True,
    attention_gate=True,
    value_gate=True,
    skip_gate=True,
    smear=True,
    bigram_rows=5 * 50304,
    scaled_projections=True,
    residual_lambda=1.1,
    x0_apart=True,
    norm_eps=2.0**-23,
    logit_sigmoid=(23.0, 5.0, 7.5),
    loss_sum=True,
    adam_rule="cautious",
    adam_groups=ADAM_2026,
    adam_every=2,
    muon_lr=0.023,
    muon_mul=(2.0, 4.0, 1.0),
    muon_beta2=0.95,
    muon_decay=1.2,
    polar_express=True,
    momentum_cooldown_steps=50,
    x_s=448 / 100,
    w_s=448 / 1.6,
    grad_s=448 / 0.75,
    val_loss_every=250,
)
SIMPLIFY_HC = replace(
    BIGRAM_HASH,
    num_iterations=1490,
    cooldown_frac=0.6,
    lr_final=0.15,
    stages=STAGES_HC,
    extension_frac=40 / 1490,
    exact_stages=False,
    layers=LAYERS_HC,
    qkv_init=1.0,
    out_init=1.0,
    value_init=0.01,
    gate_by_values=True,
    bigram_lambda=0.05,
    sublayer_lambdas=True,
    residual_lambda=1.1**0.5,
    adam_groups=ADAM_HC,
)
# In all records of 2026, weights are float32 masters. The public scripts keep them as bfloat16,
# with the missing bits in a buffer beside them.
RECORDS = {
    # On CUDA, Adam's moments of bfloat16 tables are float32 here, as in the public records since
    # December 2025. The public script of this record has them in bfloat16.
    "2025-08-23_SparseAttnGate": Hyperparameters(
        num_iterations=1695,
        cooldown_frac=0.45,
        align_to_documents=True,
        max_document_tokens=0,
        vocab_size=50304,
        attention_gate=True,
        loss_sum=True,
        adam_rule="cautious",
        norm_eps=2.0**-23,
        muon_mul=(1.0, 1.0, 1.0),
        x_s=448 / 768**0.5,
        grad_s=448.0,
    ),
    # GPT-2 medium, to 2.92 (@classiclarryd, 2025-12-31): nearly 2026-01-04 at 16 layers of width
    # 1024. A second embedding of the token is added in each layer, gates learn by Muon, and YaRN
    # ends with the fourth of twelve stages.
    "medium_2025-12-31": replace(
        BIGRAM_HASH,
        paired_heads=False,
        bigram_rows=0,
        num_iterations=4740,
        cooldown_frac=0.7,
        stages=STAGES_MEDIUM,
        extension_frac=40 / 4740,
        last_window=3456,
        max_document_tokens=4096,
        layers=LAYERS_MEDIUM,
        num_layers=16,
        num_heads=8,
        model_dim=1024,
        tied_frac=1 / 6,
        yarn_window=1664,
        gate_channels=16,
        second_embed=True,
        residual_lambda=1.05,
        adam_groups=ADAM_MEDIUM,
        adam_eps=1e-8,
        muon_lr=0.015,
        muon_mul=(2.0, 4.0, 2.0),
        gate_mul=0.1,
        fp8=False,
    ),
    # 2026-01-19 without two of its techniques. Here q, k, v and output of a layer learn with Muon's
    # factor 2, because the public script stores them as one matrix of 3072 rows. From 2026-01-19 on
    # they are four square matrices, with factor 1.
    "2026-01-04_MixedPrecisionInterweavedOptimizer": replace(
        BIGRAM_HASH,
        paired_heads=False,
        bigram_rows=0,
        num_iterations=1840,
        cooldown_frac=0.5,
        extension_frac=40 / 1840,
        muon_mul=(2.0, 4.0, 2.0),
    ),
    "2026-01-19_BigramHashEmbedding": BIGRAM_HASH,
    # An odd number of steps: Adam never uses the gradient of the last one, as in the public run.
    "2026-01-26-UntieValueEmbeddings": replace(
        BIGRAM_HASH, num_iterations=1575, extension_frac=40 / 1575, layers=LAYERS_UNTIED
    ),
    "2026-03-06_SimplifyHC": SIMPLIFY_HC,
    # 2026-03-06 at a size that two CPU cores train in a few minutes (BENCHMARKS.md). Sequences are
    # short and begin with a document: a run reads the beginnings of the first 761 of 1090 chapters.
    # The learning rates of head and embedding are multiplied by 768 / 128, the ratio of the widths.
    "demo": replace(
        SIMPLIFY_HC,
        num_iterations=180,
        cooldown_frac=0.8,
        stages=STAGES_DEMO,
        extension_frac=4 / 180,
        last_window=512,
        seq_len=128,
        batch_seqs=4,
        val_seq_len=1024,
        val_tokens=16384,
        epochs=0,
        layers=LAYERS_DEMO,
        num_layers=4,
        num_heads=2,
        head_dim=64,
        model_dim=128,
        vocab_size=4096,
        end_of_text=4095,
        bigram_rows=4096,
        adam_groups=ADAM_HC.replace("lr=.008+beta1=.5", "lr=.048+beta1=.5"),
        train_files=f"{t.SAMPLE}_train_*.bin",
        val_files=f"{t.SAMPLE}_val_*.bin",
        val_loss_every=90,
    ),
}


# -----------------------------------------------------------------------------
# Data: sequences that begin with a document


def whole_documents(documents: np.ndarray, position: int, length: int):
    """Take `length` tokens from the first of the documents, which start at (n,), at or after a
    position. Return the pieces and where the next sequence begins; None if too few are left."""
    first = np.searchsorted(documents, position)
    if first == len(documents):
        return None
    start = documents[first]
    after = np.searchsorted(documents, start + length - 1)
    if after == len(documents):
        return None
    return [(start, start + length)], documents[after]


def beginnings(documents: np.ndarray, ends: np.ndarray, position: int, length: int):
    """Take `length` tokens: of each document its first ones. `ends` (n,) counts the tokens that are
    kept up to each document's end. The rest of the last document is dropped, as on the leaderboard
    since September 2025. Return as whole_documents."""
    first = np.searchsorted(documents, position)
    end = length + (ends[first - 1] if first else 0)
    last = np.searchsorted(ends, end)
    if last == len(ends):
        return None
    starts = documents[first : last + 1]
    stops = starts + np.diff(ends[first : last + 1], prepend=end - length)
    stops[-1] -= ends[last] - end
    return np.stack([starts, stops], axis=1), starts[-1] + 1


def next_batch(tokens, documents, lengths, position: int, now: "Moment", hp: Hyperparameters):
    """Return the pieces of the batch that begins at a position, and where the next one begins.
    None if the shard has too few tokens. As published, it is left a batch early if its documents,
    which have these `lengths`, are not cut."""
    length = now.seq_len + 1  # with the last target
    batch = hp.batch_seqs * now.seq_len
    if not hp.align_to_documents:
        if position + batch + 1 >= len(tokens):
            return None
        starts = range(position, position + batch, now.seq_len)
        return [(start, start + length) for start in starts], position + batch
    if not now.longest and position + 2 * batch + 1 >= len(tokens):
        return None
    ends = np.minimum(lengths, now.longest).cumsum()
    sequences = []  # pieces of each
    for _ in range(hp.batch_seqs):
        if now.longest:
            sequence = beginnings(documents, ends, position, length)
        else:
            sequence = whole_documents(documents, position, length)
        if sequence is None:
            return None
        pieces, position = sequence
        sequences.append(pieces)
    return np.concatenate(sequences), position


def plan(shards: list[np.ndarray], hp, moments: list) -> Iterator[tuple]:  # overrides
    """Plan the batches of these moments, as train_gpt.py's `consecutive` does. With
    hp.align_to_documents, each sequence begins with a document. A batch that comes again in a later
    pass is the same array of pieces: in a long run, to search for each anew takes minutes."""
    step, has_documents = 0, False
    batches = {}  # by all that next_batch depends on
    for tokens in shards:
        documents = np.flatnonzero(tokens == hp.end_of_text)
        has_documents = has_documents or len(documents) > 0
        lengths = np.diff(documents, append=len(tokens))
        position = 0
        while True:
            now = moments[step]
            key = id(tokens), position, now.seq_len, now.longest
            if key not in batches:
                batches[key] = next_batch(tokens, documents, lengths, position, now, hp)
            if batches[key] is None:
                break
            pieces, position = batches[key]
            yield tokens, pieces
            step += 1
    if hp.align_to_documents and not has_documents:
        raise UserError(f"a sequence begins with a document, and no token is {hp.end_of_text}")


# -----------------------------------------------------------------------------
# Schedules: stages of the run, and what each of them sets


def stage_starts(hp: Hyperparameters) -> tuple[float, ...]:
    """Return the step at which each stage begins. Stages are shares of the scheduled steps, rounded
    to whole steps unless hp.exact_stages. With an extension, the last stage is that."""
    steps, extended, exact = hp.scheduled_steps, hp.extension_frac > 0, hp.exact_stages
    return starts_of(stage_table(hp), steps, extended, exact)


@cache
def starts_of(
    table: tuple[Stage, ...], steps: int, extended: bool, exact: bool
) -> tuple[float, ...]:
    """Return what stage_starts does, which depends on these settings alone."""
    *ends, whole = itertools.accumulate(stage.share for stage in table)
    if extended and ends:
        whole = ends[-1]
    starts = [steps * end / whole for end in (0.0, *ends)]
    return tuple(starts if exact else (round(start) for start in starts))


def stages_until(step: int, hp: Hyperparameters) -> tuple[Stage, ...]:
    """Return the stages that have begun; the last one is the current one."""
    return stage_table(hp)[: bisect.bisect_right(stage_starts(hp), step)]


def get_lr(step: int, hp: Hyperparameters) -> float:  # overrides
    """Return the multiplier on every learning rate: a linear rise to the stage's, then a linear
    fall to lr_final. With exact stages, a stage's holds from the first step after its start."""
    rise = min((step + 1) / hp.warmup_steps, 1.0) if hp.warmup_steps else 1.0
    left = max(1 - step / hp.scheduled_steps, 0.0)
    fall = min(left / hp.cooldown_frac, 1.0) if hp.cooldown_frac else 1.0
    waits = hp.exact_stages and step in stage_starts(hp)
    stage = stages_until(max(step - waits, 0), hp)[-1]
    return rise * (fall * stage.lr + (1 - fall) * hp.lr_final)


def get_muon_momentum(step: int, hp: Hyperparameters) -> float:  # overrides
    """Return Muon's momentum at the step: a linear ramp, then flat, then a ramp back if there is a
    cooldown."""
    ramp = min(step / hp.momentum_warmup_steps, 1.0)
    if hp.momentum_cooldown_steps:
        ramp = min(ramp, (hp.num_iterations - step) / hp.momentum_cooldown_steps)
    return (1 - ramp) * hp.momentum_start + ramp * hp.momentum_end


def left_of_stage(step: int, hp: Hyperparameters) -> float:
    """Return the share of the current stage that is left, from 1 to 0."""
    starts = (*stage_starts(hp), hp.num_iterations)
    begun = bisect.bisect_right(starts, step, hi=len(starts) - 1)
    start, end = starts[begun - 1 : begun + 1]
    return (end - step) / (end - start) if step < end else 0.0


def get_targets(step: int, hp: Hyperparameters) -> tuple[float, ...]:
    """Return the loss weights of the next token and of those after it; the last of several falls to
    0 within the stage."""
    *first, last = stages_until(step, hp)[-1].targets
    return *first, last * left_of_stage(step, hp) if first else last


def is_tied(step: int, hp: Hyperparameters) -> bool:
    """Say whether head and embedding are one table: for a share of the scheduled steps, extended to
    the next step at which Adam learns. With a share of 1, always. Records with exact stages round
    the share up, the others to the nearest step."""
    share, every = hp.scheduled_steps * hp.tied_frac, hp.adam_every
    steps = math.ceil(share) if hp.exact_stages else round(share)
    last = math.ceil((steps + 1) / every) * every - 1
    return hp.tied_frac == 1 or (hp.tied_frac > 0 and step <= last)


class Moment(t.Moment):
    """All that is scheduled, at one step."""

    short = 0  # the short window: a stage sets it, in place of t.Moment's property

    def __init__(self, step: int, hp: Hyperparameters):
        super().__init__(step, hp)
        last = self.step == hp.num_iterations
        stage = stages_until(self.step, hp)[-1]
        self.lr = get_lr(self.step, hp)
        self.momentum = get_muon_momentum(self.step, hp)
        window = stage.window or self.window
        self.short = stage.short or window // 2
        self.window = hp.last_window if last and hp.last_window else window
        self.seq_len = int(hp.seq_len * stage.length)
        self.longest = stage.cap or hp.max_document_tokens  # tokens at which documents are cut
        self.targets = get_targets(self.step, hp)  # loss weights of the next token, the one after
        self.tied = is_tied(self.step, hp)  # whether the embedding is the head

    @property
    def graph_key(self) -> tuple:  # overrides
        """Each sequence length and each number of targets is compiled once more. A new window
        compiles nothing."""
        return self.seq_len, len(self.targets), self.tied


# -----------------------------------------------------------------------------
# Model: paired heads, gates, bigrams, YaRN, several targets a token, a tied head


def first_visible(begins: Tensor, window: Tensor, rule: str) -> Tensor:  # overrides
    """Return the mask of train_gpt.py's first_visible, which does not know the rule "distance"."""
    if rule == "distance":
        return visible_by_distance(begins, window)
    return t.first_visible(begins, window, rule)


class CausalSelfAttention(nn.Module):
    """Attention with normalised, rotated q and k, value embeddings mixed into v, and gates."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        width = hp.num_heads * hp.head_dim
        self.head_shape = hp.num_heads, hp.head_dim
        self.scale = hp.attn_scale or hp.head_dim**-0.5
        self.eps = hp.norm_eps
        qkv = t.CastedLinear(hp.model_dim, 3 * width).weight.detach().view(3, width, -1)
        self.qkv_w = nn.Parameter(qkv * (hp.init_bound * hp.qkv_init))
        # Factors on the weights of qkv and of the output, or else on v and the value embedding.
        self.scales_projections = hp.scaled_projections
        self.lambdas = nn.Parameter(torch.tensor([0.5, 1.0 if hp.scaled_projections else 0.5]))
        self.c_proj = t.CastedLinear(width, hp.model_dim)
        if hp.out_init:
            self.c_proj.weight.data *= hp.init_bound * hp.out_init
        else:
            nn.init.zeros_(self.c_proj.weight)
        self.paired = layer.paired
        self.offsets_keys = hp.key_offset and layer.mask == "long"
        self.gates_by_values = hp.gate_by_values and not layer.paired
        self.gate = self.value_gate = None
        if hp.attention_gate:
            self.gate = nn.Parameter(torch.zeros(hp.num_heads, hp.gate_channels))
        if hp.value_gate and layer.values is not None:
            self.value_gate = nn.Parameter(torch.zeros(hp.num_heads, hp.gate_channels))

    def attend(self, q, k, v, mask: tuple | Tensor, scale: float) -> Tensor:
        """Attend as train_gpt.py does. tools/sample.py replaces this method by one that caches keys
        and values."""
        k = offset_keys(k) if self.offsets_keys else k
        return t.attend(q, k, v, mask, scale)

    def gated(self, x: Tensor, value: Tensor) -> Tensor:
        """Return the value embedding (1, T, H, D), gated for each head."""
        if self.value_gate is None:
            return value
        read = x
        if self.gates_by_values:
            half = self.value_gate.size(1) // 2
            read = torch.cat([x[..., :half], value.flatten(2)[..., :half]], dim=-1)
        return 2 * gate_of(read, self.value_gate)[..., None] * value

    def projected(self, x: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:
        """Return q, k and v, each (1, T, H, D), of x (1, T, C) and a table's rows (T, H * D)."""
        qkv_w = self.lambdas[0] * self.qkv_w if self.scales_projections else self.qkv_w
        qkv = F.linear(x, qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(1, -1, 3, *self.head_shape).unbind(2)
        if not self.scales_projections:
            v = self.lambdas[0] * v
        if value is not None:
            value = self.gated(x, value.view(v.shape))
            v = v + (value if self.scales_projections else self.lambdas[1] * value)
        return q, k, v

    def forward(self, x: Tensor, value: Tensor | None, rotary, mask, post: Tensor | None):
        """Map x (1, T, C) to (1, T, C), times post () if there is one. `value` is a table's rows
        (T, H * D). Factors on the output multiply the last weight: a factor on activations would
        keep them for its own gradient, 1.6 GB for 2026-03-06."""
        parts = self.projected(x, value)
        shape = parts[2].shape
        if self.paired:
            *parts, rotary = as_pairs(parts, rotary)
        q, k = rotated(*parts[:2], rotary, self.eps)  # (1, H, T, D)
        out = self.attend(q, k, parts[2].transpose(1, 2), mask, self.scale)
        out = out.transpose(1, 2).reshape(shape)
        if self.gate is not None:
            out = out * gate_of(x, self.gate)[..., None]
        out_w = self.c_proj.weight
        if self.scales_projections:
            out_w = self.lambdas[1] * out_w
        if post is not None:
            out_w = post * out_w
        return F.linear(out.flatten(2), out_w.type_as(out))


class MLP(t.MLP):
    """train_gpt.py's MLP, with a factor on its output."""

    def forward(self, x: Tensor, post: Tensor | None = None) -> Tensor:  # overrides
        """Map x (..., C) to (..., C), times post () if there is one. It multiplies the last weight,
        as in attention."""
        w_out = self.c_proj.weight if post is None else post * self.c_proj.weight
        return t.relu2_mlp(x, self.c_fc.weight.type_as(x), w_out.type_as(x))


class Block(nn.Module):
    """One layer: attention, then the MLP. An earlier output and embeddings (x0, the second one,
    bigrams) may be added before.

    There are factors on the layer's input and on x0. With hp.sublayer_lambdas, each sublayer has
    factors on the residual stream and on its output; embeddings are then added after attention, so
    a layer without attention adds none. Whatever differs between layers is an argument.
    """

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.attn = None if layer.window == "none" else CausalSelfAttention(hp, layer)
        self.mlp = MLP(hp)
        self.eps = hp.norm_eps
        self.lambdas = self.residual_lambda = self.post_lambda = None
        self.x0_lambda = self.second_lambda = self.bigram_lambda = None
        if hp.sublayer_lambdas:
            sublayers = 1 if self.attn is None else 2
            self.residual_lambda = nn.Parameter(torch.full((sublayers,), hp.residual_lambda))
            self.post_lambda = nn.Parameter(torch.ones(sublayers))
        elif hp.x0_apart:
            self.lambdas = nn.Parameter(torch.tensor([hp.residual_lambda]))
        else:
            self.lambdas = nn.Parameter(torch.tensor([hp.residual_lambda, 0.0]))
        mixes = self.attn is not None or not hp.sublayer_lambdas
        if mixes and hp.x0_apart:
            self.x0_lambda = nn.Parameter(torch.zeros(1))
        if mixes and hp.second_embed:
            self.second_lambda = nn.Parameter(torch.zeros(1))
        if mixes and hp.bigram_rows:
            self.bigram_lambda = nn.Parameter(torch.tensor([hp.bigram_lambda]))

    def added(self, x0: Tensor, second: Tensor | None, bigram: Tensor | None) -> Tensor | None:
        """Return the sum of the layer's shares of x0, of the second embedding and of the bigram
        embedding, if it has any."""
        if self.x0_lambda is None and self.lambdas is None:
            return None
        share = self.lambdas[1] if self.x0_lambda is None else self.x0_lambda[0]
        out = share * x0
        if second is not None:
            out = out + self.second_lambda[0] * second
        return out if bigram is None else out + self.bigram_lambda[0] * bigram

    def kept(self, x: Tensor, sublayer: int) -> Tensor:
        """Return the residual stream past attention (0) or past the MLP (-1)."""
        return x if self.residual_lambda is None else self.residual_lambda[sublayer] * x

    def forward(self, x, added, value, rotary, mask, source) -> Tensor:
        """Map x (1, T, C) to (1, T, C). `added` is what `added` returns. Attention reads `source`,
        a normed earlier output, or else x."""
        by_sublayer = self.lambdas is None
        if not by_sublayer:
            x = self.lambdas[0] * x + added
        if self.attn is not None:
            read = recomputed_if_small(t.norm, x, self.eps) if source is None else source
            post = None if self.post_lambda is None else self.post_lambda[0]
            out = self.attn(read, value, rotary, mask, post)
            x = self.kept(x, 0) + out
            if by_sublayer:
                x = x + added
        post = None if self.post_lambda is None else self.post_lambda[-1]
        out = self.mlp(recomputed_if_small(t.norm, x, self.eps), post)
        return self.kept(x, -1) + out


class Head(functions_2026.Head):
    """The head of these records."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp, hp.sigmoid_form, hp.head_init)
        if not hp.loss_sum:
            self.grad_scale = None


class GPT(t.GPT):
    """The language model of these records; a tied head is bfloat16 on CUDA, too."""

    def __init__(self, hp: Hyperparameters):
        nn.Module.__init__(self)  # not train_gpt.py's: most parts differ
        self.hp = hp
        self.layers = layer_table(hp)
        names = sorted({layer.values for layer in self.layers} - {None})
        width = hp.num_heads * hp.head_dim
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim)
        tables = {name: nn.Embedding(hp.vocab_size, width) for name in names}
        for table in tables.values():
            table.weight.data *= hp.value_init
        self.value_embeds = nn.ModuleDict({"embed": nn.ModuleDict(tables)})
        self.second_embed = self.bigram_embed = None
        if hp.second_embed:
            self.second_embed = nn.Embedding(hp.vocab_size, hp.model_dim)
        if hp.bigram_rows:
            zeros = torch.zeros(hp.bigram_rows, hp.model_dim)
            self.bigram_embed = nn.Embedding.from_pretrained(zeros, freeze=False)
        self.blocks = nn.ModuleList(Block(hp, layer) for layer in self.layers)
        skips = hp.num_layers // 2  # the upper half of the layers may have a skip connection
        self.skip_weights = nn.Parameter(torch.full((skips,), -1.5 if hp.skip_gate else 1.0))
        self.skip_gates = self.smear_gate = self.smear_lambda = self.backout_lambda = None
        if hp.skip_gate:
            self.skip_gates = nn.Parameter(torch.zeros(skips, hp.gate_channels))
        if hp.smear:
            self.smear_gate = nn.Parameter(torch.zeros(1, hp.gate_channels))
            self.smear_lambda = nn.Parameter(torch.zeros(1))
        if any(layer.backout for layer in self.layers):
            self.backout_lambda = nn.Parameter(torch.tensor([0.5]))
        self.lm_head = Head(hp)
        if hp.tied_frac:
            self.embed.weight.data.copy_(self.lm_head.weight.data)
        self.tied = False  # whether training looks embeddings up in the head
        self.frequencies: dict[tuple, tuple] = {}  # of rotary, by the windows so far

    def tables(self) -> list[nn.Module]:  # overrides
        """Return the vocabulary tables that are bfloat16 on CUDA."""
        tables = [self.embed, self.value_embeds]
        if self.second_embed is not None:
            tables.append(self.second_embed)
        if self.bigram_embed is not None:
            tables.append(self.bigram_embed)
        if self.hp.tied_frac:
            tables.append(self.lm_head)
        return tables

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # overrides
        """Return the smeared embeddings (T, C) of tokens (T,), and what else layers add: rows of
        each value table by its name, of the second table by "second", of the bigram table by
        "bigram"."""
        x = t.look_up(input_seq, (self.lm_head if self.tied else self.embed).weight)
        tables = self.value_embeds["embed"].items()
        more = {name: t.look_up(input_seq, table.weight) for name, table in tables}
        if self.second_embed is not None:
            more["second"] = t.look_up(input_seq, self.second_embed.weight)
        x, bigrams = self.with_the_token_before(x, input_seq)
        if bigrams is not None:
            more["bigram"] = t.look_up(bigrams, self.bigram_embed.weight)
        return x, more

    @t.compiled
    def with_the_token_before(self, x: Tensor, input_seq: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the smeared embeddings (T, C) of tokens (T,), and the rows (T,) of their bigrams.
        Both read the previous token, even if it is in another document."""
        rows = None
        if self.smear_gate is not None:
            x = smeared(x, self.smear_gate, self.smear_lambda)
        if self.bigram_embed is not None:
            rows = bigram_hash(input_seq, self.hp.bigram_rows)
        return x, rows

    def context(self, input_seq: Tensor, position: Tensor, now: Moment) -> tuple:  # overrides
        """Return the masks of tokens (T,), and the rotary tables of tokens at positions (n,)."""
        masks = self.masks(input_seq, torch.tensor(now.window), torch.tensor(now.short))
        return masks, self.rotary(position, now)

    @torch.no_grad()
    @t.compiled
    def masks(self, input_seq: Tensor, long: Tensor, short: Tensor) -> dict:  # overrides
        """Return the masks of input_seq (T,) for both windows (), by Layer.mask."""
        masks = {}
        for name in sorted({layer.mask for layer in self.layers} - {"none"}):
            window = long if name.startswith("long") else short
            begins = input_seq == self.hp.end_of_text
            begins = two_places(begins) if name.endswith("+pair") else begins
            masks[name] = t.make_mask(first_visible(begins, window, self.hp.window_rule))
        return masks

    def rotary(self, position: Tensor, now: Moment) -> dict[bool, tuple]:  # overrides
        """Return the rotary tables of tokens at positions (T,), by whether heads are paired: cos
        and sin (T, 1, head_dim / 2), or (T, 2, head_dim / 2) for two positions a token; and YaRN's
        factor () on q."""
        windows = ()
        if self.hp.yarn:
            limit = self.hp.yarn_window or math.inf
            begun = [stage.window for stage in stages_until(now.step, self.hp)]
            windows = tuple(window for window in begun if window <= limit)
        if windows not in self.frequencies:
            frequency = t.rotary_frequencies(self.hp, position.device)
            self.frequencies[windows] = yarn(frequency, windows)
        return self.rotary_tables(position, *self.frequencies[windows])

    @t.compiled
    def rotary_tables(self, position: Tensor, frequency: Tensor, factor: Tensor) -> dict:
        """Return the tables that `rotary` returns."""
        tables = {}
        for paired in {layer.paired for layer in self.layers}:
            places = position[:, None]
            if paired:
                places = torch.stack([2 * position, 2 * position + 1], dim=1)
            tables[paired] = *t.rotary_table(places, frequency), factor
        return tables

    def run_layers(self, x: Tensor, more: dict, rotary, masks: dict) -> Tensor:  # overrides
        """Map embeddings (T, C) to the head's input (T, C). `more` is of `embedded`. Four layers
        are one graph. Each graph costs the host time, and with one for all layers, no gradient
        could be sent before the backward pass ends. Graphs of one layer save 1 to 2 GB in
        validation."""
        streams, count = more | {"x": x}, 1 if t.memory_is_small(x.device) else 4
        for start in range(0, len(self.layers), count):
            streams = self.run_graph(start, start + count, streams, rotary, masks)
        return streams["x"]

    @t.compiled
    def run_graph(self, start: int, stop: int, streams: dict, rotary, masks) -> dict:
        """Run the layers from start to stop, if there are so many. Return the streams (1, T, C)
        with those of these layers: x; x0 and second, the embeddings; what later layers read of
        layer i, "output i" and "normed i"; and backout, of which a share is subtracted at the
        end."""
        streams, hp = dict(streams), self.hp
        if start == 0:
            streams["x"] = streams["x0"] = t.norm(streams["x"], hp.norm_eps)[None]
            if "second" in streams:
                streams["second"] = t.norm(streams["second"], hp.norm_eps)[None]
        for i in range(start, min(stop, len(self.layers))):
            layer, block, bigram = self.layers[i], self.blocks[i], streams.get("bigram")
            x = streams["x"]
            if layer.skip_from is not None:
                x = x + self.skip_factor(i, streams["x0"]) * streams[f"output {layer.skip_from}"]
            if i == 0 and bigram is not None and hp.sublayer_lambdas:
                # By sublayer, bigrams are added after attention; layer 0's attention reads them.
                x = x + block.bigram_lambda[0] * bigram
                bigram = None
            added = block.added(streams["x0"], streams.get("second"), bigram)
            value = streams.get(layer.values)
            mask, source = masks.get(layer.mask), streams.get(f"normed {layer.source}")
            x = streams["x"] = block(x, added, value, rotary[layer.paired], mask, source)
            if any(later.skip_from == i for later in self.layers):
                streams[f"output {i}"] = x
            if any(later.source == i for later in self.layers):
                streams[f"normed {i}"] = t.norm(x, hp.norm_eps)
            if layer.backout:
                streams["backout"] = x
        if stop >= len(self.layers):
            x = streams["x"]
            if "backout" in streams:
                x = x - self.backout_lambda[0] * streams["backout"]
            streams = {"x": t.norm(x, hp.norm_eps)[0]}
        return streams

    def skip_factor(self, i: int, x0: Tensor) -> Tensor:
        """Return the factor on layer i's skip connection: its weight (), or a gate (1, T, 1)."""
        skip = i - len(self.layers)  # counted from the last layer's
        if self.skip_gates is None:
            return self.skip_weights[skip]
        gate = gate_of(x0, self.skip_gates[skip, None])
        return torch.sigmoid(self.skip_weights[skip]) * (2 * gate)

    def forward(self, input_seq: Tensor, target_seq: Tensor, now: Moment) -> Tensor:  # overrides
        """Return the mean loss () of the next token, of tokens (T,) and targets (T,) int64. In
        training, its gradients are those of all targets of the moment: see Head.shares_loss."""
        if not self.training:
            return self.lm_head.loss(self.hidden(input_seq, now), target_seq)
        self.tied = now.tied
        targets = next_targets(target_seq, len(now.targets))
        return self.lm_head.shares_loss(self.hidden(input_seq, now), targets, now.targets)


# -----------------------------------------------------------------------------
# Optimizers: Polar Express, NorMuon, cautious weight decay, Adam at every second step


def is_of_gates(bank) -> bool:
    """Say whether items are gates that learn by Muon. Their neurons are rows, one for each head."""
    return bank.name.startswith("gates")


def muon(bank, lr, now: Moment, hp: Hyperparameters) -> None:  # overrides
    """Step by Muon, with muon_beta2 by NorMuon. muon_mul has factors on lr, and gate_mul that of
    gates. With muon_decay, weights decay cautiously, by muon_decay * lr^2."""
    orthogonalise = cautious.polar_express if hp.polar_express else t.zeropower_via_newtonschulz5
    update = cautious.muon_update(bank, now, hp, orthogonalise)
    if hp.muon_beta2:
        if "second_moment" not in bank.state:
            zeros = cautious.new_second_moment(bank.shard_grad, by_row=is_of_gates(bank))
            bank.state["second_moment"] = zeros
        update = cautious.normuon(update, bank.state["second_moment"], hp.muon_beta2)
    factor = cautious.shape_factor(update.shape, hp.muon_mul)
    scaled_lr = lr * (hp.gate_mul if is_of_gates(bank) else factor)
    if hp.muon_decay:
        rates = cautious.numbers(scaled_lr, lr * hp.muon_decay)
        cautious.decayed_step_(bank.shard, update, update, *rates)
    else:
        bank.shard.sub_(update, alpha=scaled_lr)


def adam(bank, lr, now: Moment, hp, betas: tuple, decay: float) -> None:  # overrides
    """Step by PyTorch's Adam, or by the one with cautious weight decay."""
    if hp.adam_rule == "torch":
        t.adam(bank, lr, now, hp, betas)
    else:
        cautious.adam(bank, lr, betas, hp.adam_eps, decay)


class Optimizers(t.Optimizers):
    """train_gpt.py's Optimizers, with the groups of --adam_groups, and a head that may be tied."""

    @staticmethod
    def parameter_groups(model: GPT, hp: Hyperparameters) -> list[Group]:  # overrides
        """Return the groups, in the order in which weights are updated."""
        own = adam_table(hp)
        members = {name: [] for name in GROUPS}
        for name, (pattern, elsewhere) in GROUPS.items():
            found = [p for key, p in model.named_parameters() if re.fullmatch(pattern, key)]
            members[name if name in own else elsewhere] += found
        lrs = {"head": hp.head_lr, "embed": hp.embed_lr, "values": hp.embed_lr}
        groups = []
        for name, params in members.items():
            if name == "muon" or (name == "gates" and name not in own):
                groups.append(Group(name, params[::-1], muon, hp.muon_lr, 2))
                continue
            row = own.get(name, {})
            lr = row.get("lr", lrs.get(name, hp.scalar_lr))
            betas = row.get("beta1", hp.adam_betas[0]), row.get("beta2", hp.adam_betas[1])
            rule = partial(adam, betas=betas, decay=row.get("decay", 0.0))
            item_ndim = 1 if name in lrs else 0
            groups.append(Group(name, params, rule, lr, item_ndim, hp.adam_every))
        if hp.tied_frac:
            # A tied head waits for the embedding's gradient. Matrices come first: they do not wait.
            groups.sort(key=lambda group: group.name != "muon")
        return groups

    @torch.no_grad()
    def step(self, now: Moment) -> dict[str, Tensor]:  # overrides
        """Update all groups that learn at a moment: see train_gpt.py."""
        split(self.groups, now, self.hp)
        results = super().step(now)
        tie(self.groups, now, self.hp)
        return results


# -----------------------------------------------------------------------------
# Run


class Run(t.Run):
    """A run of these records."""

    records = RECORDS
    default_record = "2026-03-06_SimplifyHC"
    GPT = GPT
    Optimizers = Optimizers
    Moment = Moment
    check = staticmethod(check)
    plan = staticmethod(plan)
    warm_up = staticmethod(warm_up)


if __name__ == "__main__":
    t.main(run=Run)
