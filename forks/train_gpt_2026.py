"""Train the NanoGPT-speedrun records of August 2025 to March 2026: a fork of train_gpt.py.

    torchrun --standalone --nproc_per_node=8 forks/train_gpt_2026.py    # 2026-03-06_SimplifyHC
    ./run.sh forks/train_gpt_2026.py                                    # the same; on a CPU, a demo

This file imports train_gpt.py and overrides what the records changed. Each technique is a setting,
or a word in a row of layers or stages, so each can be turned off. Numbers are those of the sources
in the public logs, in github.com/KellerJordan/modded-nanogpt. A name such as
2025-12-14_PartialKeyOffset is the public record that introduced a technique.

What is overridden, in train_gpt.py's order:

    Settings         the new settings; tables of layers, stages and Adam's groups; the records
    Data             sequences that begin with a document; long documents are cut
    Schedules        stages of the run, and what each of them sets
    Model            paired heads, gates, bigrams, YaRN, several targets a token, a tied head
    Optimizers       Polar Express, NorMuon, cautious weight decay, Adam at every second step
    Run              the class that tools use
"""

import itertools
import math
import re
import sys
from dataclasses import dataclass, fields, replace
from functools import cache, lru_cache, partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train_gpt.py lies
import train_gpt as t  # before torch: it sets how OpenMP's threads wait
from train_gpt import BLOCK, END_OF_TEXT, Group, Kernel, UserError, number, setting

# isort: split
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Triple = tuple[float, float, float]


# -----------------------------------------------------------------------------
# Settings: those of the records after 2025-01-26


# A layer is written as its window and words, joined by "+": long+v0+x5. The words are:
#     v0 to v9    rows of this value-embedding table are mixed into v
#     x5          the output of layer 5 is added to the input
#     in5         attention reads the output of layer 5
#     pair        two heads attend as one of twice as many positions
#     backout     a share of the layer's output is subtracted before the last norm
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
LAYERS_DEMO = "short+v0+pair,long+v1,short+pair+x0+backout,long+v2"

# Stages of the run, and settings of Adam's parameter groups. number_rows reads both.
LATER_STAGES = (
    "length=2+window=896+lr=1.52+targets=1/.5,length=3+window=1408+lr=1.73,"
    "length=3+window=1664+lr=1.73"
)
STAGES_2026 = f"length=1+window=384+lr=1+targets=1/.5/.25,{LATER_STAGES}"
STAGES_HC = f"length=1+window=384+lr=1+cap=896+targets=1/.5/.25,{LATER_STAGES}"
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


@dataclass(frozen=True)
class Hyperparameters(t.Hyperparameters):
    """train_gpt.py's settings, and those of later records. Defaults: 2025-01-26_BatchSize."""

    window_rule: str = setting(
        "blocks", "unit of attention windows", choices=("blocks", "tokens", "distance")
    )
    layers: str = setting(LAYERS_2025_SKIPS, "window and words of each layer", group="model")
    num_layers: int = setting(12, "number of layers, half from each end of --layers", 2)

    stages: str = setting("", "settings of each stage; empty: one", group="stages, documents")
    extension_frac: float = setting(0.0, "share of steps after the schedule's end", 0, 0.9)
    exact_stages: bool = setting(False, "stages and learning rates change at unrounded steps")
    last_window: int = setting(0, "long window of the last validation, 0: unchanged", 0)
    align_to_documents: bool = setting(False, "begin each training sequence with a document")
    max_document_tokens: int = setting(
        2048, "tokens at which aligned documents are cut, 0: never", 0
    )

    qkv_init: float = setting(1.0, "factor on init_bound for q, k and v", group="later models")
    out_init: float = setting(0.0, "factor on init_bound for attention's last weight, 0: zeros")
    value_init: float = setting(1.0, "initial standard deviation of value embeddings")
    head_init: float = setting(0.0, "initial standard deviation of the head")
    tied_frac: float = setting(0.0, "share of scheduled steps with head and embedding tied", 0, 1)
    yarn: bool = setting(False, "YaRN: fit rotary frequencies and attn_scale to the window")
    key_offset: bool = setting(False, "long, unpaired: half of a key is the previous token's")
    paired_heads: bool = setting(False, "heads attend in pairs in layers with the word pair")
    attention_gate: bool = setting(False, "gate each head's output")
    value_gate: bool = setting(False, "gate value embeddings for each head")
    gate_by_values: bool = setting(False, "unpaired, value gates also read the value embedding")
    skip_gate: bool = setting(False, "gate skip connections")
    smear: bool = setting(False, "add to each embedding a gated share of the previous one")
    bigram_rows: int = setting(0, "rows of the bigram embedding table, 0: no table", 0)
    bigram_lambda: float = setting(0.1, "initial factor on bigram embeddings in each layer")
    scaled_projections: bool = setting(False, "attention's lambdas scale its projections' weights")
    residual_lambda: float = setting(1.0, "initial factor on the residual stream")
    sublayer_lambdas: bool = setting(False, "factors on residual stream and output, by sublayer")
    x0_apart: bool = setting(False, "the factors on x0 are parameters of their own")
    logit_sigmoid: Triple = setting((0.0, 0.0, 1.0), "a b c: a sigmoid((logit + b) / c); a 0: off")
    loss_sum: bool = setting(False, "gradients are of a sequence's summed loss, not its mean")

    adam_rule: str = setting(
        "torch",
        "PyTorch's Adam, or Adam with cautious weight decay",
        choices=("torch", "cautious"),
        group="later optimizers",
    )
    adam_groups: str = setting("", "Adam's groups with settings of their own")
    adam_every: int = setting(1, "steps between Adam's updates, which sum their gradients", 1, 2)
    muon_mul: Triple = setting((2.0, 1.0, 1.0), "factors on muon_lr: tall, wide, square matrices")
    muon_beta2: float = setting(0.0, "NorMuon's beta2, 0: plain Muon", 0, 0.9999)
    muon_decay: float = setting(0.0, "Muon's cautious weight decay, times lr^2")
    polar_express: bool = setting(False, "orthogonalise by Polar Express, not by Newton-Schulz")
    momentum_cooldown_steps: int = setting(0, "last steps, in which Muon's momentum falls", 0)

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
        return max(len(stage.targets) for stage in stage_table(self.stages))


@dataclass(frozen=True)
class Layer:
    """One layer of the model: what it attends with and what is added to it."""

    window: str  # "long", "short" (half of the stage's long one), or "none": no attention
    values: str | None = None  # the value-embedding table that is mixed into v
    skip_from: int | None = None  # which earlier layer's output is added to the input
    source: int | None = None  # which earlier layer's output attention reads, if not the input
    paired: bool = False  # two heads attend as one of twice as many positions
    backout: bool = False  # a share of its output is subtracted before the last norm

    @property
    def mask(self) -> str:
        """The name of the mask that the layer attends with."""
        return f"{self.window}+pair" if self.paired else self.window


def layer_fields(text: str) -> dict:
    """Return the fields of Layer that a row's window and words set, or {} if a word is wrong."""
    window, *words = text.split("+")
    found = {"window": window}
    for word in words:
        if word == "pair":  # 2026-01-07_PairedHeadAttention
            name, value = "paired", True
        elif word == "backout":
            name, value = "backout", True
        elif match := re.fullmatch(r"v(\d)", word):
            name, value = "values", match[1]
        elif match := re.fullmatch(r"x(0|[1-9]\d?)", word):
            name, value = "skip_from", int(match[1])
        elif match := re.fullmatch(r"in(0|[1-9]\d?)", word):
            name, value = "source", int(match[1])
        else:
            return {}
        if name in found:
            return {}
        found[name] = value
    if window not in ("long", "short", "none"):
        return {}
    if window == "none" and found.keys() & {"values", "source", "paired"}:
        return {}
    return found


def layer_table(hp: Hyperparameters) -> tuple[Layer, ...]:
    """Return the layers in use: num_layers of --layers, half from each end. Skip connections then
    join mirror images. Rows that name other layers by number need the whole table."""
    rows = hp.layers.split(",")
    n, last = hp.num_layers, len(rows) - 1
    if not 1 <= n <= len(rows):
        raise UserError(f"--num_layers {n}: --layers has {len(rows)}")
    if n < len(rows):
        for place, text in enumerate(rows):
            row = layer_fields(text)
            mirrored = row.get("skip_from", last - place) == last - place
            if not mirrored or "source" in row or "backout" in row:
                reason = f"layers name each other, such as {text!r}: give a shorter --layers"
                raise UserError(f"--num_layers {n}: {reason}")
    half = n // 2
    table = []
    for i, text in enumerate(rows[: n - half] + rows[len(rows) - half :]):
        row = layer_fields(text)
        if n < len(rows) and "skip_from" in row:
            row["skip_from"] = n - 1 - i
        skip, source = row.get("skip_from"), row.get("source", -1)
        bad_skip = skip is not None and (i < n - half or skip >= i)
        if not row or source >= i or bad_skip:
            form = "long, short or none, and words such as +v0, +x1, +in1, +pair or +backout"
            raise UserError(f"--layers: {text!r} cannot be layer {i}; a row is {form}")
        row["paired"] = hp.paired_heads and "paired" in row
        table.append(Layer(**row))
    if sum(row.backout for row in table) > 1:
        raise UserError("--layers: only one layer can have the word backout")
    return tuple(table)


def number_rows(
    text: str, name: str, known: tuple[str, ...], lists: tuple[str, ...] = ()
) -> list[tuple[str, dict]]:
    """Parse a setting such as "head+lr=.008+beta1=.5,embed+lr=.6". Return each row's name ("" if it
    has none) and its numbers by field. Fields in `lists` are tuples, written 1/2/3. UserError for
    an unknown field, a wrong number or a name that comes twice."""
    rows = []
    for row in text.split(",") if text else []:
        words = re.split(r"\+(?=[a-z])", row)  # not within 8e+5
        first = "" if "=" in words[0] else words.pop(0)
        numbers = {}
        for word in words:
            match = re.fullmatch(r"(\w+)=([\d.e/+-]+)", word)
            try:
                values = tuple(float(number) for number in match[2].split("/"))
                legal = match[1] in known and match[1] not in numbers
                legal = legal and all(0 <= value < math.inf for value in values)
                legal = legal and (len(values) == 1 or match[1] in lists)
            except (TypeError, ValueError):
                legal = False
            if not legal:
                forms = " ".join(f"{key}=NUMBER" for key in known)
                raise UserError(f"--{name}: {row!r} is not of {forms}, joined by +")
            numbers[match[1]] = values if match[1] in lists else values[0]
        rows.append((first, numbers))
    names = [first for first, _ in rows if first]
    if len(set(names)) < len(names):
        raise UserError(f"--{name} {text}: a row comes twice")
    return rows


@dataclass(frozen=True)
class Stage:
    """One stage of the run."""

    length: int = 1  # tokens in a training sequence, as a multiple of seq_len
    window: int = 0  # the long window in tokens; 0: it grows as in train_gpt.py
    lr: float = 1.0  # multiplies every learning rate
    cap: int = 0  # tokens at which documents are cut; 0: max_document_tokens
    targets: tuple[float, ...] = (1.0,)  # loss weights of the next token and of those after it;
    # the last of several falls to 0 within the stage


@cache
def stage_table(stages: str) -> tuple[Stage, ...]:
    """Return the stages of the setting; UserError for a wrong row."""
    table = []
    names = tuple(f.name for f in fields(Stage))
    for first, numbers in number_rows(stages, "stages", names, lists=("targets",)):
        stage = Stage(**numbers)
        whole = (stage.length, stage.window, stage.cap)
        wrong = first or not numbers or stage.length < 1 or len(stage.targets) > 3
        if wrong or any(number % 1 for number in whole):
            rule = "whole numbers for length (from 1), window and cap; at most 3 targets"
            raise UserError(f"--stages {stages}: a row is of {rule}; STAGES_2026 shows the form")
        length, window, cap = (int(number) for number in whole)
        table.append(replace(stage, length=length, window=window, cap=cap))
    return tuple(table) or (Stage(),)


def adam_table(hp: Hyperparameters) -> dict[str, dict[str, float]]:
    """Return the numbers that adam_groups sets for each group, by the group's name. UserError for
    an unknown name or a number that is not allowed."""
    known = PATTERNS.keys() - {"muon"}
    table = dict(number_rows(hp.adam_groups, "adam_groups", ("lr", "beta1", "beta2", "decay")))
    for name, row in table.items():
        rule = ""
        if name not in known:
            rule = f"a row begins with one of {' '.join(sorted(known))}"
        elif max(row.get("beta1", 0), row.get("beta2", 0)) >= 1:
            rule = "a beta must be below 1"
        elif "decay" in row and hp.adam_rule != "cautious":
            rule = "decay needs --adam_rule cautious"
        if rule:
            raise UserError(f"--adam_groups {hp.adam_groups}: {rule}")
    return table


def check(hp: Hyperparameters) -> None:
    """Raise UserError for settings that are not allowed, alone or together."""
    layer_table(hp)
    t.check_ranges(hp)
    stages = stage_table(hp.stages)
    has_caps = any(stage.cap for stage in stages)
    has_windows = len(stages) == 1 or min(stage.window for stage in stages) > 0
    a, _, c = hp.logit_sigmoid
    every = hp.adam_every
    for name, wrong, rule in (
        ("val_tokens", hp.val_tokens % hp.val_seq_len, "must be a multiple of val_seq_len"),
        ("extension_frac", hp.scheduled_steps < 1, "leaves no step before the extension"),
        ("stages", has_caps and not hp.align_to_documents, "cap needs --align_to_documents on"),
        ("save_every", hp.save_every % every, f"must be a multiple of --adam_every {every}"),
        ("grad_clip", hp.grad_clip and every > 1, "needs --adam_every 1"),
        ("tied_frac", hp.tied_frac and hp.vocab_size % 128, "needs vocab_size a multiple of 128"),
        ("yarn", hp.yarn and not has_windows, "needs a window in each of --stages"),
        ("key_offset", hp.key_offset and hp.rope != "half", "needs --rope half"),
        ("paired_heads", hp.paired_heads and hp.num_heads % 2, "needs an even --num_heads"),
        ("gate_by_values", hp.gate_by_values and not hp.value_gate, "needs --value_gate on"),
        ("bigram_rows", hp.bigram_rows == 1, "must be 0 (no table), or 2 and more"),
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
    adam_table(hp)


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
        bigram_rows=50304,
        adam_groups=ADAM_HC.replace("lr=.008+beta1=.5", "lr=.048+beta1=.5"),
        bfloat16_head=True,
        train_files=f"{t.SAMPLE}_train_*.bin",
        val_files=f"{t.SAMPLE}_val_*.bin",
        val_loss_every=90,
    ),
}


# -----------------------------------------------------------------------------
# Data: sequences that begin with a document


@lru_cache(maxsize=8)
def document_starts(shard: t.Shard) -> np.ndarray:
    """Return where the documents of a shard start, (documents,)."""
    return np.flatnonzero(shard.tokens == END_OF_TEXT)


@lru_cache(maxsize=8)
def kept_tokens(shard: t.Shard, longest: int) -> np.ndarray:
    """Return how many tokens are kept up to each document's end, (documents,), in cut documents."""
    lengths = np.diff(document_starts(shard), append=len(shard.tokens))
    return np.minimum(lengths, longest).cumsum()


def cut_whole(shard: t.Shard, position: int, length: int):
    """Take `length` tokens from the start of the first document at or after a position. Return the
    pieces and where the next sequence begins; None if the shard is too short."""
    documents = document_starts(shard)
    first = np.searchsorted(documents, position)
    start = documents[first] if first < len(documents) else len(shard.tokens)
    after = np.searchsorted(documents, start + length - 1)
    if after >= len(documents):
        return None
    return [(start, start + length)], documents[after]


def cut_pieces(shard: t.Shard, position: int, length: int, longest: int):
    """Take `length` tokens in pieces: of each document its first tokens, at most `longest`. The
    rest of the last document is dropped, as on the leaderboard since September 2025. Return as
    cut_whole."""
    documents, ends = document_starts(shard), kept_tokens(shard, longest)
    first = np.searchsorted(documents, position)
    end = length + (ends[first - 1] if first else 0)
    last = np.searchsorted(ends, end)
    if last >= len(ends):
        return None
    starts = documents[first : last + 1]
    stops = starts + np.diff(ends[first : last + 1], prepend=end - length)
    stops[-1] -= ends[last] - end
    return list(zip(starts, stops, strict=True)), starts[-1] + 1


def cut(shard: t.Shard, position: int, now: "Moment", hp: Hyperparameters):
    """Cut the batch of a moment: consecutive sequences, or sequences that begin with a document."""
    if not hp.align_to_documents:
        return t.cut_consecutive(shard, position, now.step, now.seq_len, hp.batch_seqs)
    longest = now.longest
    # As published: a shard whose documents are not cut is left a batch early.
    if not longest and position + 2 * hp.batch_seqs * now.seq_len + 1 >= len(shard.tokens):
        return None
    sequences = []
    for _ in range(hp.batch_seqs):
        length = now.seq_len + 1  # with the last target
        if longest:
            found = cut_pieces(shard, position, length, longest)
        else:
            found = cut_whole(shard, position, length)
        if found is None:
            return None
        pieces, position = found
        sequences.append(pieces)
    return sequences, position


# -----------------------------------------------------------------------------
# Schedules: stages of the run, and what each of them sets


def stage_starts(hp: Hyperparameters) -> list[float]:
    """Return the step at which each stage begins. Stages are equal shares of the scheduled steps,
    rounded to whole steps unless hp.exact_stages. With an extension, the last stage is that."""
    rows, steps = len(stage_table(hp.stages)), hp.scheduled_steps
    shares = rows - 1 if hp.extension_frac > 0 and rows > 1 else rows
    starts = [steps * k / shares for k in range(rows)]
    return starts if hp.exact_stages else [round(start) for start in starts]


def stages_until(step: int, hp: Hyperparameters) -> tuple[Stage, ...]:
    """Return the stages that have begun; the last one is the current one."""
    return stage_table(hp.stages)[: sum(step >= start for start in stage_starts(hp))]


def get_lr(step: int, hp: Hyperparameters) -> float:
    """Return the multiplier on every learning rate: a linear rise to the stage's, then a linear
    fall to lr_final. With exact stages, a stage's holds from the first step after its start."""
    rise = min((step + 1) / hp.warmup_steps, 1.0) if hp.warmup_steps else 1.0
    left = max(1 - step / hp.scheduled_steps, 0.0)
    fall = min(left / hp.cooldown_frac, 1.0) if hp.cooldown_frac else 1.0
    waits = hp.exact_stages and step in stage_starts(hp)
    stage = stages_until(max(step - waits, 0), hp)[-1]
    return rise * (fall * stage.lr + (1 - fall) * hp.lr_final)


def get_muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Return Muon's momentum at the step: a linear ramp, then flat, then a ramp back if there is a
    cooldown."""
    ramp = min(step / hp.momentum_warmup_steps, 1.0)
    if hp.momentum_cooldown_steps:
        ramp = min(ramp, (hp.num_iterations - step) / hp.momentum_cooldown_steps)
    return (1 - ramp) * hp.momentum_start + ramp * hp.momentum_end


def get_targets(step: int, hp: Hyperparameters) -> tuple[float, ...]:
    """Return the loss weights of the next token and of those after it; the last of several falls to
    0 within the stage."""
    begun, starts = stages_until(step, hp), [*stage_starts(hp), hp.num_iterations]
    start, end = starts[len(begun) - 1 : len(begun) + 1]
    *first, last = begun[-1].targets
    if first:
        last = last * (end - step) / max(end - start, 1)
    return *first, last


def is_tied(step: int, hp: Hyperparameters) -> bool:
    """Say whether head and embedding are one table: for a share of the scheduled steps, extended to
    the next step at which Adam learns. With a share of 1, always."""
    steps, every = math.ceil(hp.scheduled_steps * hp.tied_frac), hp.adam_every
    last = math.ceil((steps + 1) / every) * every - 1
    return hp.tied_frac == 1 or (hp.tied_frac > 0 and step <= last)


@dataclass(frozen=True)
class Moment(t.Moment):
    """All that is scheduled, at one step."""

    longest: int  # tokens at which documents are cut, if batches are aligned to them
    targets: tuple[float, ...]  # loss weights of the next token, the one after it, ...
    tied: bool  # whether the embedding is the head
    adam: bool  # whether Adam learns, from the gradients since its last step

    @property
    def kind(self) -> tuple:
        """What decides how a step is compiled and how much memory it takes. Each sequence length
        and each number of targets is compiled once more; a new window compiles nothing."""
        return self.seq_len, len(self.targets), self.tied, self.adam


def moment(step: int, hp: Hyperparameters) -> Moment:
    """Return the moment of a step from 0 to num_iterations, which is that after the last step."""
    step = min(step, hp.num_iterations)
    at_end = step == hp.num_iterations
    stage = stages_until(step, hp)[-1]
    window = stage.window or t.get_window_size(step, hp)
    return Moment(
        step=step,
        lr=get_lr(step, hp),
        momentum=get_muon_momentum(step, hp),
        window=hp.last_window if at_end and hp.last_window else window,
        short=window // 2,
        seq_len=hp.seq_len * stage.length,
        longest=stage.cap or hp.max_document_tokens,
        targets=get_targets(step, hp),
        tied=is_tied(step, hp),
        adam=at_end or (step + 1) % hp.adam_every == 0,
    )


# -----------------------------------------------------------------------------
# Model: paired heads, gates, bigrams, YaRN, several targets a token, a tied head


def first_visible(input_seq: Tensor, window: int | Tensor, rule: str) -> Tensor:
    """Return the mask of train_gpt.py's first_visible. The rule "distance" rounds the window down
    to whole blocks, and lets a token see that many tokens before itself."""
    if rule == "distance":
        blocks = (torch.as_tensor(window) // BLOCK).clamp(min=1)
        return t.first_visible(input_seq, blocks * BLOCK + 1, "tokens")
    return t.first_visible(input_seq, window, rule)


def offset_keys(k: Tensor) -> Tensor:
    """Return keys (1, H, T, D) in which the channels that half RoPE does not rotate come from the
    previous token, even if it is in another document (2025-12-14_PartialKeyOffset)."""
    before = torch.cat([k[:, :, :1], k[:, :, :-1]], dim=2)
    half = k.size(-1) // 2
    still = torch.arange(k.size(-1), device=k.device) % half >= half // 2
    return torch.where(still, before, k)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: tuple | Tensor, scale: float, key_offset: bool
) -> Tensor:
    """train_gpt.py's attend, with offset keys if key_offset."""
    return t.attend(q, offset_keys(k) if key_offset else k, v, mask, scale)


@torch.compiler.assume_constant_result
def memory_is_small(device: torch.device, tokens: int = 49152) -> bool:
    """Say whether a GPU has less than 0.8 MB for each token of a sequence: 40 GB for 49152. Such a
    GPU recomputes some activations, which takes a few milliseconds."""
    if device.type == "cpu":
        return False
    return torch.cuda.get_device_properties(device).total_memory < 0.8e6 * tokens


def recomputed(function, x: Tensor, *more):
    """Return function(x, *more) of x (1, T, ...). Where memory is small, compiled code does not
    keep the result: the backward pass computes it again."""
    training = torch.is_grad_enabled() and torch.compiler.is_compiling()
    if training and memory_is_small(x.device, x.size(1)):
        return checkpoint(function, x, *more, use_reentrant=False, preserve_rng_state=False)
    return function(x, *more)


def yarn(frequency: Tensor, windows: tuple[int, ...]) -> tuple[Tensor, float]:
    """Return rotary frequencies, and the factor on attention's scale, after the long window has had
    these sizes: YaRN (arXiv 2309.00071). Each time it grows, frequencies that turn less than once
    in the old window are divided by its growth. Those that turn more than 32 times are unchanged;
    those between are interpolated."""
    factor = 1.0
    for old, new in itertools.pairwise(windows):
        turns = old * frequency / (2 * math.pi)
        fast = ((turns - 1) / 31).clamp(0, 1)
        frequency = frequency * (old / new + fast * (1 - old / new))
        factor *= 1 + 0.2 * math.log(new / old)
    return frequency, factor


def rotate_normed(x: Tensor, cos: Tensor, sin: Tensor, eps: float, factor: Tensor) -> Tensor:
    """Return what train_gpt.py's function of this name returns, times a factor ()."""
    normed = t.norm(x, eps).float()
    swapped = normed.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return ((normed * cos + swapped * sin) * factor).type_as(x).transpose(1, 2)


GATE_CHANNELS = 12  # channels of its input that a gate reads


def gate_of(x: Tensor, weight: Tensor) -> Tensor:
    """Return gates (..., n) between 0 and 1, from the first 12 channels of x (..., C) and a weight
    (n, 12)."""
    return torch.sigmoid(F.linear(x[..., :GATE_CHANNELS], weight.type_as(x)))


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
        self.key_offset = hp.key_offset and layer.mask == "long"
        self.gates_by_values = hp.gate_by_values and not layer.paired
        self.gate = self.value_gate = None
        if hp.attention_gate:
            self.gate = nn.Parameter(torch.zeros(hp.num_heads, GATE_CHANNELS))
        if hp.value_gate and layer.values is not None:
            self.value_gate = nn.Parameter(torch.zeros(hp.num_heads, GATE_CHANNELS))

    def gated(self, x: Tensor, value: Tensor) -> Tensor:
        """Return the value embedding (1, T, H, D), gated for each head."""
        if self.value_gate is None:
            return value
        read = x
        if self.gates_by_values:
            half = GATE_CHANNELS // 2
            read = torch.cat([x[..., :half], value.flatten(2)[..., :half]], dim=-1)
        return 2 * gate_of(read, self.value_gate)[..., None] * value

    def forward(self, x: Tensor, value: Tensor | None, rotary, mask, attend, post: Tensor | None):
        """Map x (1, T, C) to (1, T, C), times post () if there is one. `value` is rows (T, H * D)
        of a table. Factors on the output multiply the last weight: a factor on activations would
        keep them for its own gradient, 1.6 GB for 2026-03-06."""
        qkv_w, out_w = self.qkv_w, self.c_proj.weight
        if self.scales_projections:
            qkv_w, out_w = self.lambdas[0] * qkv_w, self.lambdas[1] * out_w
        if post is not None:
            out_w = post * out_w
        qkv = F.linear(x, qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(1, -1, 3, *self.head_shape).unbind(2)  # (1, T, H, D)
        shape = v.shape
        if not self.scales_projections:
            v = self.lambdas[0] * v
        if value is not None:
            value = self.gated(x, value.view(shape))
            v = v + (value if self.scales_projections else self.lambdas[1] * value)
        cos, sin, factor = rotary
        # Half of the heads attend at each position. Even heads rotate by a token's first position.
        if self.paired:
            heads, head_dim = self.head_shape
            turn = torch.arange(heads, device=x.device) % 2
            q, k, v = (part.reshape(1, -1, heads // 2, head_dim) for part in (q, k, v))
            cos, sin = (part[:, turn].view(-1, heads // 2, head_dim) for part in (cos, sin))
        if factor is None:
            q = recomputed(t.rotate_normed, q, cos, sin, self.eps)  # (1, H, T, D)
        else:
            q = recomputed(rotate_normed, q, cos, sin, self.eps, factor)
        k = recomputed(t.rotate_normed, k, cos, sin, self.eps)
        out = attend(q, k, v.transpose(1, 2), mask, self.scale, self.key_offset)
        out = out.transpose(1, 2).reshape(shape)
        if self.gate is not None:
            out = out * gate_of(x, self.gate)[..., None]
        return F.linear(out.flatten(2), out_w.type_as(x))


class MLP(t.MLP):
    """train_gpt.py's MLP, with a factor on its output."""

    def forward(self, x: Tensor, post: Tensor | None = None) -> Tensor:
        """Map x (..., C) to (..., C), times post () if there is one. It multiplies the last weight,
        as in attention."""
        w_out = self.c_proj.weight if post is None else post * self.c_proj.weight
        return t.relu2_mlp(x, self.c_fc.weight.type_as(x), w_out.type_as(x))


class Block(nn.Module):
    """One layer: attention, then the MLP. An earlier output, x0 and bigrams may be added before.

    There are factors on the layer's input and on x0. With hp.sublayer_lambdas, each sublayer has
    factors on the residual stream and on its output; x0 and bigrams are then added after attention,
    so a layer without attention adds neither. Whatever differs between layers is an argument.
    """

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.attn = None if layer.window == "none" else CausalSelfAttention(hp, layer)
        self.mlp = MLP(hp)
        self.eps = hp.norm_eps
        self.lambdas = self.residual_lambda = self.post_lambda = None
        self.x0_lambda = self.bigram_lambda = None
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
        if mixes and hp.bigram_rows:
            self.bigram_lambda = nn.Parameter(torch.tensor([hp.bigram_lambda]))

    def mixed(self, x: Tensor, x0: Tensor, bigram: Tensor | None) -> Tensor:
        """Return x plus shares of x0 and of the bigram embedding."""
        share = self.lambdas[1] if self.x0_lambda is None else self.x0_lambda[0]
        x = x + share * x0
        if bigram is not None:
            x = x + self.bigram_lambda[0] * bigram
        return x

    def kept(self, x: Tensor, sublayer: int) -> Tensor:
        """Return the residual stream past attention (0) or past the MLP (-1)."""
        return x if self.residual_lambda is None else self.residual_lambda[sublayer] * x

    def forward(self, x, x0, value, skip, rotary, mask, attend, bigram=None, source=None) -> Tensor:
        """Map x (1, T, C) to (1, T, C). skip is (factor, earlier output) or None. Attention reads
        `source`, a normed earlier output, or else x."""
        by_sublayer = self.lambdas is None
        if skip is not None:
            x = x + skip[0] * skip[1]
        if not by_sublayer:
            x = self.mixed(self.lambdas[0] * x, x0, bigram)
        if self.attn is not None:
            read = recomputed(t.norm, x, self.eps) if source is None else source
            post = self.post_lambda[0] if by_sublayer else None
            out = self.attn(read, value, rotary, mask, attend, post)
            x = self.kept(x, 0) + out
            if by_sublayer:
                x = self.mixed(x, x0, bigram)
        post = self.post_lambda[-1] if by_sublayer else None
        out = self.mlp(recomputed(t.norm, x, self.eps), post)
        return self.kept(x, -1) + out


def bigram_hash(tokens: Tensor, rows: int) -> Tensor:
    """Return, for each token (T,), the row of the bigram table that the token and the previous one
    select, (T,) int32. The first token selects the last row; for the second token, that row's
    number stands for the first token. Products of int32 wrap (2026-01-19_BigramHashEmbedding)."""
    first = torch.full_like(tokens[:1], rows - 1, dtype=torch.int32)
    tokens = torch.cat([first, tokens[1:].int()])
    return torch.cat([first, (36313 * tokens[1:] ^ 27191 * tokens[:-1]) % (rows - 1)])


def next_targets(targets: Tensor, count: int) -> Tensor:
    """Return the next `count` targets of each token, (T, count), from targets (T,). Beyond the end
    they are -1."""
    return F.pad(targets, (0, count - 1), value=-1).unfold(0, count, 1).contiguous()


@Kernel
def weighted_cross_entropy(logits, targets, form, shares=None, grad_scale=None, grads=None):
    """Return the summed loss () of logits (T, V), which may be overwritten, and targets (T,) int64.

    The logits first become z = a sigmoid((logit + b) / c) of the form (a, b, c). The gradient of
    the logits * grad_scale goes to grads (T, V): the logits' own memory, or float8_e5m2. dz/dlogit
    is (z - z^2 / a) / c. z is at most a, so softmax may subtract a instead of the row's maximum.

    With shares (K,) and targets (T, K) of next_targets, the gradient is that of the losses of all K
    targets times their shares, and the loss returned is that of the next token alone.
    """
    a, b, c = form
    targets = targets.view(len(targets), -1)
    share = (targets >= 0) * (1.0 if shares is None else shares)  # (T, K)
    if torch.compiler.is_compiling():  # two passes over the logits; only the result is stored
        z = a * torch.sigmoid(1 / c * (logits.float() + b))
        z_of_target = a * torch.sigmoid(1 / c * (logits.gather(1, targets[:, :1]).float() + b))
        p = torch.exp(z - a)
        total = p.sum(dim=1, keepdim=True)
        loss = (total.log() + a - z_of_target).sum()
        column = torch.arange(p.size(1), device=p.device)
        p = p / total * share.sum(1, keepdim=True)
        for k in range(share.size(1)):
            p = p - share[:, k, None] * (column == targets[:, k, None])
    else:  # z and p are stored, and overwritten where that is possible
        z = logits.float()
        z = torch.add(z.new_full((), b / c), z, alpha=1 / c, out=z).sigmoid_().mul_(a)
        p = torch.softmax(z, dim=-1)
        loss = -p.gather(1, targets[:, :1]).log().sum()
        if shares is not None:
            p.mul_(share.sum(1, keepdim=True))
        p.scatter_add_(1, targets.clamp(min=0), -share)
    if grads is not None:
        grad = z.addcmul_(z, z, value=-1 / a).mul_(p).mul_(1 / c * grad_scale)
        in_fp8 = grads.dtype == torch.float8_e5m2
        grads.copy_(t.to_fp8(grad, 1.0, grads.dtype) if in_fp8 else grad)
    return loss


class Head(t.Head):
    """train_gpt.py's Head, with logits capped by a sigmoid, and several targets for each token."""

    cross_entropy = weighted_cross_entropy

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        if hp.head_init:
            self.weight.data.normal_(std=hp.head_init)
        self.form = hp.sigmoid_form
        self.summed = hp.loss_sum

    def chunk_len(self, device: torch.device) -> int:
        """Return the tokens in a chunk: fewer where memory is small."""
        return 8192 if memory_is_small(device) else super().chunk_len(device)

    def loss(self, x: Tensor, targets: Tensor, shares: tuple[float, ...] = (1.0,)) -> Tensor:
        """Return the mean loss () of the next token, of x (T, C) and targets (T,) int64. With K
        shares, the gradients are those of the losses of K targets, times their shares. With
        --loss_sum a micro-batch counts as a sum over its tokens, as FP8 scales and Adam's epsilon
        of these records expect: the same numbers on any number of ranks."""
        weights = None
        if shares != (1.0,):
            weights = torch.stack([number(share, x) for share in shares])
            targets = next_targets(targets, len(shares))
        grad_scale = 1.0 if self.summed else 1 / len(x)
        return self.loss_of(x, targets, (self.form, weights), grad_scale)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (T, padded vocabulary) of x (T, C), between 0 and a, in float32, never
        from FP8."""
        a, b, c = self.form
        return a * torch.sigmoid((F.linear(x, self.weight.type_as(x)).float() + b) / c)


class GPT(t.GPT):
    """The language model of these records; a tied head is bfloat16 on CUDA, too."""

    attend = staticmethod(attend)
    # Most layers differ, so a graph for each would share nothing, and each graph costs the host
    # time. With one graph for all layers, no gradient could be sent before the backward pass ends.
    layers_a_graph = 4

    def __init__(self, hp: Hyperparameters):
        nn.Module.__init__(self)  # not train_gpt.py's: most parts differ
        self.hp = hp
        self.layers = layer_table(hp)
        self.kernels = weighted_cross_entropy, t.relu2_mlp, t.symmetric_matmul
        names = sorted({layer.values for layer in self.layers} - {None})
        width = hp.num_heads * hp.head_dim
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim)
        tables = {name: nn.Embedding(hp.vocab_size, width) for name in names}
        for table in tables.values():
            table.weight.data *= hp.value_init
        self.value_embeds = nn.ModuleDict({"embed": nn.ModuleDict(tables)})
        self.bigram_embed = None
        if hp.bigram_rows:
            zeros = torch.zeros(hp.bigram_rows, hp.model_dim)
            self.bigram_embed = nn.Embedding.from_pretrained(zeros, freeze=False)
        self.blocks = nn.ModuleList(Block(hp, layer) for layer in self.layers)
        skips = hp.num_layers // 2  # the upper half of the layers may have a skip connection
        self.skip_weights = nn.Parameter(torch.full((skips,), -1.5 if hp.skip_gate else 1.0))
        self.skip_gates = self.smear_gate = self.smear_lambda = self.backout_lambda = None
        if hp.skip_gate:
            self.skip_gates = nn.Parameter(torch.zeros(skips, GATE_CHANNELS))
        if hp.smear:
            self.smear_gate = nn.Parameter(torch.zeros(1, GATE_CHANNELS))
            self.smear_lambda = nn.Parameter(torch.zeros(1))
        if any(layer.backout for layer in self.layers):
            self.backout_lambda = nn.Parameter(torch.tensor([0.5]))
        self.lm_head = Head(hp)
        if hp.tied_frac:
            self.embed.weight.data.copy_(self.lm_head.weight.data)
        self.use_flex = False
        self.compiled, self.compile_ = False, t.as_is
        self.tied = False
        self.rotary: dict[tuple, dict] = {}  # the last of rotary_of

    @property
    def context_tokens(self) -> int:
        """How many ends of text make a document independent of what stands before them. Smear and
        offset keys read the previous token, so the last of two is the same after any text. Bigrams
        need three, because the hash of a sequence's second token is a special one."""
        if self.bigram_embed is not None:
            return 3
        return 2 if self.hp.smear or self.hp.key_offset else 0

    def tables(self) -> list[nn.Module]:
        """Return the vocabulary tables that are bfloat16 on CUDA."""
        tables = [self.embed, self.value_embeds]
        if self.bigram_embed is not None:
            tables.append(self.bigram_embed)
        if self.hp.tied_frac:
            tables.append(self.lm_head)
        return tables

    def compile_layers(self) -> None:
        """Compile several layers as one graph, and what reads the previous token. Where memory is
        small, a graph is one layer: validation then needs less memory."""
        if memory_is_small(self.lm_head.weight.device):
            self.layers_a_graph = 1
        self.layers_from = self.compile_(self.layers_from)
        if self.smear_gate is not None or self.bigram_embed is not None:
            self.with_the_token_before = self.compile_(self.with_the_token_before)

    def tie(self, tied: bool) -> None:
        """Let embedding and head share memory and gradient, or be two tables."""
        if tied == self.tied:
            return
        embed, head = self.embed.weight, self.lm_head.weight
        embed.data = head.data if tied else head.data.clone()
        t.gradient_buffer(head)
        for name in ("grad", "grad32"):  # one of them is the buffer
            setattr(embed, name, getattr(head, name, None) if tied else None)
        self.tied = tied

    def load_state_dict(self, *args, **kwargs):
        """Load weights. Embedding and head are two tables then: else one would overwrite the
        other."""
        self.tie(False)
        return super().load_state_dict(*args, **kwargs)

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the smeared embeddings (T, C) of tokens (T,), and what else layers add: rows of
        each value table by its name, and of the bigram table by "bigram"."""
        x, more = super().embedded(input_seq)
        x, rows = self.with_the_token_before(x, input_seq)
        if rows is not None:
            more["bigram"] = t.lookup(self.bigram_embed, rows)
        return x, more

    def with_the_token_before(self, x: Tensor, input_seq: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the smeared embeddings (T, C) of tokens (T,), and the rows (T,) of their bigrams.
        Both read the previous token, even if it is in another document."""
        rows = None
        if self.smear_gate is not None:
            share = self.smear_lambda * gate_of(x[1:], self.smear_gate)
            x = torch.cat([x[:1], x[1:] + (share * x[:-1]).type_as(x)])
        if self.bigram_embed is not None:
            rows = bigram_hash(input_seq, self.hp.bigram_rows)
        return x, rows

    def windows(self, when: Moment) -> dict[str, int]:
        """Return the windows that layers attend with, by Layer.mask."""
        names = sorted({layer.mask for layer in self.layers} - {"none"})
        return {name: when.window if name.startswith("long") else when.short for name in names}

    def make_masks(self, input_seq: Tensor, windows: dict[str, Tensor], make_mask) -> dict:
        """Return the masks of input_seq (T,) for these windows, by name. Where heads are paired, a
        token has two positions: a document begins at the first, and windows count positions."""
        masks = {}
        for name, window in windows.items():
            tokens = input_seq
            if name.endswith("+pair"):
                second = torch.full_like(input_seq, -1)
                tokens = torch.stack([input_seq, second], dim=1).flatten()
            masks[name] = make_mask(first_visible(tokens, window, self.hp.window_rule))
        return masks

    def rotary_of(self, length: int, when: Moment, device: torch.device, start: int = 0):
        """Return the rotary tables of `length` tokens from `start` on, by whether heads are paired:
        cos and sin (T, 1, head_dim), or (T, 2, head_dim) for two positions a token; and YaRN's
        factor () on q, or None. The last tables are kept for the next call."""
        windows = tuple(stage.window for stage in stages_until(when.step, self.hp))
        key = length, start, windows, device
        if key in self.rotary:
            return self.rotary[key]
        frequency, factor = t.rotary_frequencies(self.hp, device), None
        if self.hp.yarn:
            frequency, factor = yarn(frequency, windows)
            factor = number(factor, frequency)
        tables = {}
        for paired in {layer.paired for layer in self.layers}:
            count = 2 if paired else 1
            position = torch.arange(count * start, count * (start + length), device=device)
            cos, sin = t.rotary_table(position.view(length, count), frequency)
            tables[paired] = cos, sin, factor
        self.rotary = {key: tables}
        return tables

    def skip_factor(self, i: int, weight: Tensor, x0: Tensor) -> Tensor:
        """Return the factor on the i-th skip connection: its weight (), or a gate (1, T, 1) made
        from weight and x0."""
        if self.skip_gates is None:
            return weight
        return torch.sigmoid(weight) * (2 * gate_of(x0, self.skip_gates[i, None]))

    def trunk(self, x: Tensor, more: dict[str, Tensor], rotary, masks: dict, attend) -> Tensor:
        """Map what `embedded` returns, embeddings (T, C) and `more`, to the head's input (T, C).
        Masks are as make_masks returns them, rotary tables as rotary_of."""
        streams = {"x": x}
        for start in range(0, len(self.layers), self.layers_a_graph):
            streams = self.layers_from(start, streams, more, rotary, masks, attend)
        return streams["x"]

    def layers_from(
        self, start: int, streams: dict[str, Tensor], more, rotary, masks: dict, attend
    ) -> dict[str, Tensor]:
        """Run the layers of one graph, from `start` on. The first graph begins with a norm; the
        last one ends with backout and a norm. `streams` are x and the earlier outputs that later
        layers read, (1, T, C), by name. Return them with those of these layers added."""
        streams = dict(streams)
        if start == 0:
            streams["x"] = t.norm(streams["x"], self.hp.norm_eps)[None]
            streams["x0"] = streams["x"]
        x, x0, bigram = streams["x"], streams["x0"], more.get("bigram")
        weights = self.skip_weights.unbind()
        first_skip = len(self.layers) - len(weights)  # the first layer that may have one
        end = min(start + self.layers_a_graph, len(self.layers))
        for i in range(start, end):
            layer, block = self.layers[i], self.blocks[i]
            own_bigram = bigram
            if i == 0 and bigram is not None and self.hp.sublayer_lambdas:
                # By sublayer, bigrams are added after attention; layer 0's attention reads them.
                x = x + block.bigram_lambda[0] * bigram
                own_bigram = None
            skip = None
            if layer.skip_from is not None:
                factor = self.skip_factor(i - first_skip, weights[i - first_skip], x0)
                skip = factor, streams[f"output {layer.skip_from}"]
            x = block(
                x,
                x0,
                more.get(layer.values),
                skip,
                rotary[layer.paired],
                masks.get(layer.mask),
                attend,
                bigram=own_bigram,
                source=streams.get(f"source {layer.source}"),
            )
            if any(later.skip_from == i for later in self.layers):
                streams[f"output {i}"] = x
            if any(later.source == i for later in self.layers):
                streams[f"source {i}"] = t.norm(x, self.hp.norm_eps)
            if layer.backout:
                streams["backout"] = x
        if end == len(self.layers):
            if "backout" in streams:
                x = x - self.backout_lambda[0] * streams["backout"]
            x = t.norm(x, self.hp.norm_eps)[0]
        streams["x"] = x
        return streams

    def forward(self, input_seq: Tensor, target_seq: Tensor, when: Moment) -> Tensor:
        """Return the mean loss () of the next token, of tokens (T,) and targets (T,) int64. In
        training, its gradients are those of all targets of the moment: see Head.loss."""
        if not self.training:
            return self.lm_head.loss(self.hidden(input_seq, when), target_seq)
        self.tie(when.tied)
        return self.lm_head.loss(self.hidden(input_seq, when), target_seq, when.targets)


# -----------------------------------------------------------------------------
# Optimizers: Polar Express, NorMuon, cautious weight decay, Adam at every second step


# Coefficients of each step of Polar Express (arXiv 2505.16932), with a margin for rounding.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(G: Tensor) -> Tensor:
    """Orthogonalise as zeropower_via_newtonschulz5, with singular values nearer to 1."""
    return t.zeropower_via_newtonschulz5(G, 5, POLAR_EXPRESS, margin=1.02, eps=1e-6)


def normuon_(updates, second_moments, beta2: float) -> list[Tensor]:
    """Return the updates (n, rows, cols) with each neuron (along the longer side) divided by the
    root of its second moment; each matrix keeps its Frobenius norm: NorMuon (arXiv 2510.05491).
    The second moments, (n, rows, 1) or (n, 1, cols), change in place."""
    normed = []
    for update, second_moment in zip(updates, second_moments, strict=True):
        old = update.float()
        neuron = -1 if second_moment.size(-1) == 1 else -2
        second_moment.lerp_(old.square().mean(dim=neuron, keepdim=True), 1 - beta2)
        new = old * second_moment.clamp(min=1e-10).rsqrt()
        before = torch.linalg.matrix_norm(old, keepdim=True)
        after = torch.linalg.matrix_norm(new, keepdim=True)
        normed.append((new * (before / after.clamp(min=1e-10))).type_as(update))
    return normed


def cautious_step_(weights, updates, lr: Tensor, decay: Tensor) -> None:
    """Subtract lr * updates. Where the update also shrinks the weight, or is 0, subtract
    lr * decay * weight, too: cautious weight decay (arXiv 2510.12402). Compiled: one launch."""
    changes = []
    for weight, update in zip(weights, updates, strict=True):
        changes.append(lr * (update + decay * weight * (update * weight >= 0)))
    torch._foreach_sub_(weights, changes)


def cautious_adam_(weights, grads, state, lr: Tensor, betas, eps: float, decay: float) -> None:
    """Make a step of Adam in place, in float32, on lists of weights, gradients and state.

    Epsilon is added to the root of the uncorrected second moment. Where an update shrinks a weight,
    the weight also decays by lr^2 * decay. On a CPU, parts of about 65536 numbers are updated one
    after the other, because they stay in the cache.
    """
    beta1, beta2 = betas
    for weight, grad, kept in zip(weights, grads, state, strict=True):
        step = kept["step"].add_(1)
        step_size = lr * (1 - beta2**step).sqrt() / (1 - beta1**step)
        parts = [(weight, grad, kept["exp_avg"], kept["exp_avg_sq"])]
        if not (weight.is_cuda or torch.compiler.is_compiling()):
            rows = 1 + 65536 // weight[0].numel()
            parts = zip(*(tensor.split(rows) for tensor in parts[0]), strict=True)
        for w, g, first, second in parts:
            first.lerp_(g.float(), 1 - beta1)
            second.lerp_(g.float().square(), 1 - beta2)
            update, old = step_size * first / (second.sqrt() + eps), w.float()
            w.copy_(old - update - lr * lr * decay * old * (update * old > 0))


def muon_updates(
    grads, momenta, momentum: Tensor, damped: bool, orthogonalise, second_moments, beta2: float
) -> list[Tensor]:
    """Return the updates of train_gpt.py's function of this name, one tensor for each gradient.
    With a beta2 they are NorMuon's."""
    updates = t.muon_updates(grads, momenta, momentum, damped, orthogonalise)
    updates = updates.split([len(grad) for grad in grads])
    return normuon_(updates, second_moments, beta2) if beta2 else list(updates)


MUON_STEPS = muon_updates, t.subtract_, cautious_step_


def muon(buckets, lr: float, now: Moment, hp: Hyperparameters, steps=MUON_STEPS):
    """train_gpt.py's Muon for matrices (n, rows, cols). With muon_beta2 it is NorMuon. With
    muon_decay, weights decay cautiously, by muon_decay * lr^2. `steps` are MUON_STEPS, compiled."""
    make_updates, subtract, subtract_cautiously = steps
    rows, cols = buckets[0].row_shape
    for bucket in buckets:
        if bucket.state:
            continue
        bucket.state["momentum_buffer"] = torch.zeros_like(bucket.grads)
        if hp.muon_beta2:
            shape = (rows, 1) if rows >= cols else (1, cols)
            bucket.state["second_moment"] = bucket.grads.new_zeros(len(bucket.grads), *shape)
    grads = [bucket.grads for bucket in buckets]
    momenta = [bucket.state["momentum_buffer"] for bucket in buckets]
    momentum = number(now.momentum, grads[0])
    seconds = [bucket.state.get("second_moment") for bucket in buckets]
    orthogonalise = polar_express if hp.polar_express else t.zeropower_via_newtonschulz5
    updates = make_updates(
        grads, momenta, momentum, hp.momentum_damped, orthogonalise, seconds, hp.muon_beta2
    )
    tall, wide, square = hp.muon_mul
    factor = square
    if rows != cols:
        factor = tall if rows > cols else wide
    if not hp.muon_decay:
        return updates, partial(subtract, lr=torch.tensor(lr * factor, dtype=torch.float64))
    scaled_lr = number(lr * factor, grads[0])
    decay = number(lr * hp.muon_decay, grads[0])
    return updates, partial(subtract_cautiously, lr=scaled_lr, decay=decay)


def cautious_adam(buckets, lr: float, now: Moment, betas, eps: float, decay: float, step_):
    """Adam with cautious weight decay and float32 moments; step_ is the compiled cautious_adam_."""
    weights = [bucket.weights() for bucket in buckets]
    for bucket, weight in zip(buckets, weights, strict=True):
        if bucket.state:
            continue
        bucket.state["step"] = torch.zeros((), device=weight.device)
        bucket.state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
        bucket.state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
    grads = [bucket.grads for bucket in buckets]
    states = [bucket.state for bucket in buckets]
    step_(weights, grads, states, number(lr, weights[0]), betas, eps, decay)
    return weights, t.copy_new


# The parameters of each group, in the order of a step. A group in ELSEWHERE is merged into the
# group named there, unless hp.adam_groups has a row for it.
PATTERNS = {
    "head": ("lm_head.weight",),
    "muon": ("blocks.*.weight", "blocks.*.qkv_w"),
    "embed": ("embed.weight",),
    "values": ("value_embeds.*", "bigram_embed.weight"),
    "scalar": ("skip_weights", "blocks.*lambdas", "smear_lambda", "backout_lambda"),
    "gates": ("blocks.*gate",),
    "x0": ("blocks.*.x0_lambda",),
    "bigram": ("blocks.*.bigram_lambda",),
    "residual": ("blocks.*.residual_lambda",),
    "post": ("blocks.*.post_lambda",),
    "smear": ("smear_gate",),
    "skip": ("skip_gates",),
}
ELSEWHERE = {
    "gates": "muon",
    "x0": "scalar",
    "bigram": "scalar",
    "residual": "scalar",
    "post": "scalar",
    "smear": "scalar",
    "skip": "scalar",
}


def parameter_table(hp: Hyperparameters, compile_=t.as_is) -> tuple[Group, ...]:
    """Return the groups, in the order in which gradients are sent and weights are updated."""
    own, patterns = adam_table(hp), dict(PATTERNS)
    for name, other in ELSEWHERE.items():
        if name not in own:
            patterns[other] += patterns.pop(name)
    steps = tuple(compile_(step) for step in MUON_STEPS)
    cautious_adam_step = compile_(cautious_adam_)
    lrs = {"head": hp.head_lr, "embed": hp.embed_lr, "values": hp.embed_lr}
    groups = []
    for name, texts in patterns.items():
        if name == "muon":
            rule = partial(muon, hp=hp, steps=steps)
            groups.append(Group(name, texts, rule, hp.muon_lr, 2, least_rows=8))
            continue
        row = own.get(name, {})
        lr = row.get("lr", lrs.get(name, hp.scalar_lr))
        betas = row.get("beta1", hp.adam_betas[0]), row.get("beta2", hp.adam_betas[1])
        rule = partial(t.adam, betas=betas, eps=hp.adam_eps)
        if hp.adam_rule == "cautious":
            decay = row.get("decay", 0.0)
            rule = partial(
                cautious_adam, betas=betas, eps=hp.adam_eps, decay=decay, step_=cautious_adam_step
            )
        if name not in lrs:
            groups.append(Group(name, texts, rule, lr, 0, least_rows=math.inf))
        elif name == "head" and not hp.tied_frac:
            groups.append(Group(name, texts, rule, lr, 1, complete="forward"))
        else:
            groups.append(Group(name, texts, rule, lr, 1, complete="end"))
    if hp.tied_frac:
        # A tied head waits for the embedding's gradient. Matrices come first: they do not wait.
        groups.sort(key=lambda group: group.name != "muon")
    return tuple(groups)


class Optimizers(t.Optimizers):
    """train_gpt.py's Optimizers, with groups that wait.

    Where Adam learns at every second step, its gradients wait in their buffers. While head and
    embedding are tied, they share memory and gradient, and the group "head" learns. At the split
    the embedding takes over a copy of the head's moments and of their count.
    """

    table = staticmethod(parameter_table)

    def __init__(self, model: GPT, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        self.norms_every = 25 * hp.adam_every

    def learning(self, now: Moment):
        """Return the groups that learn at a moment, with their buckets."""
        waiting = {"embed"} if now.tied else set()
        if not now.adam:
            waiting |= PATTERNS.keys() - {"muon"}
        return [row for row in self.groups if row[0].name not in waiting]

    def step(self, now: Moment) -> list[Tensor]:
        """Update all groups that learn at a moment: see train_gpt.py."""
        if self.hp.tied_frac and not now.tied:
            buckets_of = {group.name: buckets for group, buckets in self.groups}
            # Both tables have one shape, so the state of a row lies on the same rank.
            for head, embed in zip(buckets_of["head"], buckets_of["embed"], strict=True):
                if not embed.state:
                    embed.state = {key: value.clone() for key, value in head.state.items()}
        return super().step(now)


# -----------------------------------------------------------------------------
# Run


class Run(t.Run):
    """A run of these records."""

    records = RECORDS
    default_record = "2026-03-06_SimplifyHC"
    settings = Hyperparameters
    model_class = GPT
    optimizers_class = Optimizers
    check = staticmethod(check)
    moment = staticmethod(moment)
    cut = staticmethod(cut)

    def can_stop(self, step: int) -> bool:
        """Say whether a checkpoint can be taken. It holds no gradients, so where Adam learns at
        every second step it is taken after an even number of steps. A stop signal may wait one
        step."""
        return step % self.hp.adam_every == 0


if __name__ == "__main__":
    t.main(run_class=Run)
