"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # the record, on a node of 8 H100s
    python train_gpt.py                                      # one GPU; without one, a small demo
    python train_gpt.py --help                               # every setting is a flag

The default is the NanoGPT-speedrun record 2025-01-26_BatchSize: 1770 steps of 393216 tokens,
published as 2.997 minutes on 8 H100s. --record selects others: two of 2024, GPT-2 medium, and the
demo. Settings and ideas come from github.com/KellerJordan/modded-nanogpt. The sections:

    Settings         every setting of a run, with its flag; the records; the table of layers
    Data             shards of tokens, and batches as a function of the step
    Schedules        learning rate, window and momentum as functions of the step
    Numerics         compiled functions, FP8 matmuls, the linear layer
    Model            masks, attention, layers, and the head with its loss
    Optimizers       Muon and Adam as update rules, and how ranks share them
    Training         steps, validation, warm-up, the timed loop: `train` is the whole program
    Machine          devices, ranks, errors, the log, checkpoints, flags

The recipe is all that stands before Machine: some 1400 lines.
"""

import argparse
import atexit
import contextlib
import ctypes
import difflib
import fcntl
import functools
import gc
import glob
import inspect
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

# ruff: noqa: E402 (this comes before imports)
# What the log will hold of this file and the started one. They are read now, because torch's import
# takes seconds, in which they may be edited.
SOURCES = {}
for started in (__file__, getattr(sys.modules["__main__"], "__file__", None)):
    if started and os.path.isfile(started):
        SOURCES[Path(started).resolve()] = Path(started).read_text("utf-8", errors="replace")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

try:
    import gpu_kernels
except ImportError:
    gpu_kernels = None  # without Triton, or this file alone: it computes the same
# A function whose name is in IN_USE, by choose_kernels, calls a Triton kernel, not its formula.
IN_USE: set[str] = gpu_kernels.IN_USE if gpu_kernels else set()

HERE = Path(__file__).resolve().parent
DATA = glob.escape(f"{HERE}/data")  # shards are named by patterns
FINEWEB = f"{DATA}/fineweb10B/fineweb"
SAMPLE = f"{DATA}/kjv"  # the King James Bible
BLOCK = 128  # tokens in a block of the attention mask; sequences are whole blocks
RULE = "=" * 100  # a line of it follows each part of a log's header
# Torch 2.13 has new names for these.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class UserError(ValueError):
    """An error shown in one line, without a traceback: what is wrong, where, and what to do."""


# -----------------------------------------------------------------------------
# Settings: each is a flag, and the comment after it is the flag's help

# Explained by layer_table. Values as in a U-net: @leloykun and @YouJiacheng, 2024. Long and short
# windows: the same, 2025. No attention in layer 7: @YouJiacheng, 2024.
LAYERS_2025 = (
    "long+v0,short+v1,short+v2,short,long,short,short,none,short,short+v0,short+v1,long+v2"
)


@dataclass(frozen=True)
class RunSettings:
    """Settings of how a run is made. They may change when it resumes: its data may have moved."""

    run_id: str = ""  # name of the run, whose log is logs/RUN_ID.txt; if empty, the time
    resume: bool = False  # resume from the newest checkpoint of --run_id, or begin that run
    train_files: str = f"{FINEWEB}_train_*.bin"  # glob for training shards
    val_files: str = f"{FINEWEB}_val_*.bin"  # glob for validation shards
    tokenizer: str = "gpt2"  # vocabulary of the tokens: gpt2, a tokenizer.json, or none
    val_loss_every: int = 125  # steps between validations, 0 for the last step only
    save_every: int = 0  # steps between checkpoints, 0 for the last step only
    keep: int = 2  # newest checkpoints of a run to keep, 0 to save nothing
    init_from: str = ""  # checkpoint whose weights a new run begins with
    device: Literal["auto", "cuda", "cpu"] = "auto"  # auto: cuda if available
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; auto: on a GPU
    kernels: bool = True  # use the Triton kernels that pass a check


@dataclass(frozen=True)
class Hyperparameters(RunSettings):
    """Every setting of a run. Defaults: 2025-01-26_BatchSize."""

    num_iterations: int = 1770  # training steps
    warmup_steps: int = 0  # steps of linear learning-rate warm-up
    cooldown_frac: float = 0.4  # share of the steps in which the learning rate falls
    lr_final: float = 0.1  # learning-rate multiplier at the last step
    window_rule: Literal["blocks", "tokens"] = "blocks"  # unit of attention windows
    window_min: int = 128  # long attention window at step 0, in tokens
    window_span: int = 1728  # rule blocks: final window; rule tokens: growth from window_min
    window_step: int = 128  # the window is a multiple of this many tokens

    batch_seqs: int = 8  # sequences in a batch of all ranks together
    seq_len: int = 49152  # tokens in a training sequence, whole blocks of 128
    val_seq_len: int = 262144  # tokens in a validation sequence, whole blocks of 128
    val_tokens: int = 10485760  # validation tokens, from the start of the stream
    epochs: int = 1  # largest number of passes over the training shards, 0 for no limit

    layers: str = LAYERS_2025  # window and extra values of each layer
    num_layers: int = 12  # layers in use: the first and last num_layers/2 of --layers
    num_heads: int = 6  # attention heads
    head_dim: int = 128  # channels in a head
    model_dim: int = 768  # channels of the residual stream
    vocab_size: int = 50257  # token ids; the head is padded to a multiple of 128
    end_of_text: int = 50256  # token that begins a document; of GPT-2's, only smaller ones are used
    init_bound: float = 0.75**0.5  # initial hidden weights are within this / sqrt(fan_in)
    attn_scale: float = 0.12  # factor on the products of q and k; 0: head_dim**-0.5
    rope: Literal["half", "full"] = "half"  # share of the channels that rotate
    rope_base: float = 1024.0  # rotary frequencies fall from 1 to about 1/rope_base
    norm_eps: float = 2.0**-7  # RMSNorm's epsilon: torch's, early in 2025 (forks/AGREEMENT.md)
    logit_softcap: float = 15.0  # logits become cap * tanh(logit / cap)
    seed: int = 0  # seed of the initial weights

    # Output projections begin at zero. Until they grow, the gradients of scalars are rounding
    # noise, and with so small an epsilon (@YouJiacheng, 2025) Adam takes full steps along it.
    adam_eps: float = 1e-10  # Adam's epsilon
    adam_betas: tuple[float, float] = (0.8, 0.95)  # Adam's betas
    embed_lr: float = 0.6  # Adam's learning rate for token and value embeddings
    head_lr: float = 0.008  # Adam's learning rate for the head
    scalar_lr: float = 0.04  # Adam's learning rate for scalars
    muon_lr: float = 0.05  # Muon's learning rate for hidden matrices
    momentum_start: float = 0.85  # Muon's momentum at step 0
    momentum_end: float = 0.95  # Muon's momentum after its ramp
    momentum_warmup_steps: int = 300  # steps of the momentum's linear ramp
    momentum_damped: bool = True  # momentum is an average of gradients; off: a sum
    grad_clip: float = 0.0  # largest global L2 norm of the gradient, 0 for no limit

    fp8: bool = True  # train the head in FP8 where a GPU has it, in bfloat16 where a CPU does
    x_s: float = 2.0  # FP8 scale of the head's input
    w_s: float = 2.0**9  # FP8 scale of the head's weight
    grad_s: float = 2.0**19  # FP8 scale of the logits' gradient


# The records. Their settings are those of the source code in the public logs.
WINDOW_WARMUP = Hyperparameters(
    num_iterations=1750,
    cooldown_frac=640 / 1750,
    lr_final=0.0,
    window_rule="tokens",
    window_min=64,
    window_step=64,
    seq_len=65536,
    val_seq_len=65536,
    layers=",".join(["long+vfirst"] * 12),
    vocab_size=50304,
    init_bound=1.0,
    attn_scale=0.0,
    rope="full",
    rope_base=10000.0,
    logit_softcap=30.0,
    adam_eps=1e-8,
    momentum_damped=False,
    fp8=False,
)
RECORDS = {
    "2024-11-19_FlexAttention": replace(
        WINDOW_WARMUP,
        num_iterations=1875,
        cooldown_frac=562 / 1875,
        window_min=1024,
        window_span=0,
        adam_betas=(0.9, 0.95),
        muon_lr=0.04,
        momentum_warmup_steps=500,
    ),
    "2024-11-24_WindowWarmup": WINDOW_WARMUP,
    "2025-01-26_BatchSize": Hyperparameters(),
    # GPT-2 medium, to 2.92: the second public leaderboard (@kellerjordan0, 2025-01-18).
    "medium_2025-01-18": Hyperparameters(
        num_iterations=7500,
        seq_len=65536,
        val_seq_len=65536,
        layers="long+v0,short+v1,short+v2,short,long,short,short,none,"
        "short,short,short,long,short,short+v0,short+v1,long+v2",
        num_layers=16,
        num_heads=8,
        model_dim=1024,
        embed_lr=0.3,
        head_lr=0.003,
        scalar_lr=0.015,
        muon_lr=0.025,
        w_s=2.0**5,
        grad_s=2.0**29,
    ),
    # 2025-01-26 at a size that two CPU cores train in a minute or two, on the sample corpus. Its
    # tokens are GPT-2's first 4095: a head of all of them would take nine tenths of a step.
    "demo": Hyperparameters(
        num_iterations=320,
        window_span=256,
        batch_seqs=4,
        seq_len=256,
        val_seq_len=1024,
        val_tokens=16384,
        num_layers=4,
        num_heads=2,
        head_dim=64,
        model_dim=128,
        vocab_size=4096,
        end_of_text=4095,
        norm_eps=2.0**-23,
        train_files=f"{SAMPLE}_train_*.bin",
        val_files=f"{SAMPLE}_val_*.bin",
        val_loss_every=80,
    ),
}


@dataclass(frozen=True)
class Layer:
    """One row of `layers`: a layer's attention window and extra values."""

    window: str  # "long", "short" (half of the long one), or "none": no attention
    values: str | None = None  # mixed into v: embedding table "0" to "9", or "first": the first v
    mask = property(lambda self: self.window)  # the name of its mask in GPT.masks, if it has one


def layer_table(hp: Hyperparameters) -> tuple[Layer, ...]:
    """Return the layers in use. After a row's window, +v0 to +v9 adds values of that embedding
    table (@KoszarskyB, 2024); +vfirst adds the values of the first such layer (Zhou et al. 2024,
    arXiv 2410.17897). UserError for a row of another form."""
    table = []
    for row in hp.layers.split(","):
        found = re.fullmatch(r"(long|short)(\+v(\d|first))?|none", row)
        if not found:
            raise UserError(f"--layers: {row!r} is not a layer, such as none, short or long+v0")
        table.append(Layer(window=row.split("+")[0], values=found[3]))
    half = hp.num_layers // 2
    if hp.num_layers > len(table) or hp.num_layers % 2:
        raise UserError(f"--num_layers {hp.num_layers}: must be even, and at most {len(table)}")
    return tuple(table[:half] + table[len(table) - half :])


# -----------------------------------------------------------------------------
# Data: shards of tokens, and batches that depend on the step alone


def load_data_shard(path: str | Path) -> np.ndarray:
    """Return the tokens (n,) uint16 of a shard, memory-mapped if possible. The format is llm.c's:
    256 little-endian int32 (20240520, version 1, n, zeros), then n uint16. UserError for another.
    """
    header = np.fromfile(path, "<i4", 3).tolist()
    size = os.path.getsize(path)
    expected = [20240520, 1, (size - 1024) // 2]  # magic, version of uint16 tokens, their number
    if size <= 1024 or size % 2 or header != expected:
        reason = f"is not a whole shard: its {size} bytes begin with {header}, not {expected}"
        remedy = "fetch it again, or give uint16 tokens a header by data/tokenize_text.py"
        raise UserError(f"{path} {reason}: {remedy}")
    # Torch's map holds no open file, unlike numpy's: a run may have more shards than that allows.
    try:
        words = torch.from_file(str(path), size=size // 2, dtype=torch.uint16).numpy()
    except RuntimeError:  # some disks cannot map files
        words = np.fromfile(path, "<u2")
    return words[512:]


def consecutive(shards, hp: Hyperparameters, moments: list) -> Iterator[tuple]:
    """Plan the batches of training: yield one of the shards and its slices (start, stop). They are
    batch_seqs sequences of seq_len + 1 tokens. Neighbours overlap by one token, which is a target
    only in the first of them."""
    batch = hp.batch_seqs * hp.seq_len
    for tokens in shards:
        for position in range(0, len(tokens) - batch - 1, batch):  # as in 2025-01-26
            starts = range(position, position + batch, hp.seq_len)
            yield tokens, [(start, start + hp.seq_len + 1) for start in starts]


def in_order(shards, hp: Hyperparameters, moments=()) -> Iterator[tuple]:
    """Plan validation, whatever Run.plan is: consecutive sequences, one in a batch. As in
    2025-01-26, a shard's end of no more than a sequence and its last target is left out."""
    for tokens in shards:
        for start in range(0, len(tokens) - hp.seq_len - 1, hp.seq_len):
            yield tokens, [(start, start + hp.seq_len + 1)]


def plan_batches(pattern: str, hp: Hyperparameters, num_batches: int, plan: Callable, moments=()):
    """Return the first num_batches batches of a plan such as `consecutive`. It reads the shards of
    a pattern at most hp.epochs times (0: no limit). A fork's plan also depends on the batches'
    moments. UserError for shards that are missing, damaged, too short or have other tokens."""
    paths = sorted(glob.glob(pattern))
    if not paths:
        remedy = "cached_fineweb.py fetches FineWeb; patterns have no braces, and [[] for a bracket"
        raise UserError(f"no shard matches {pattern}: {remedy}")
    shards = [load_data_shard(path) for path in paths]
    # A pass has at least one batch, or none has any: so many passes are enough.
    passes = min(hp.epochs or num_batches, num_batches)
    in_turn = itertools.chain.from_iterable(itertools.repeat(shards, passes))
    batches = list(itertools.islice(plan(in_turn, hp, moments), num_batches))
    if len(batches) < num_batches:
        found = f"{pattern} has {len(batches)} batches of {hp.batch_seqs} x {hp.seq_len} tokens"
        remedy = "add shards, use --epochs 0, or make --val_tokens or sequences shorter"
        raise UserError(f"{found}, but the run needs {num_batches}: {remedy}")
    for path, tokens in zip(paths, shards, strict=True):
        is_read = any(tokens is other for other, _ in batches)
        if is_read and tokens.max() >= hp.vocab_size:
            found = f"token {tokens.max()} at position {tokens.argmax()}"
            reason = f"{found} is outside the vocabulary of {hp.vocab_size}"
            remedy = "all of GPT-2's tokens need --vocab_size 50257 --end_of_text 50256"
            raise UserError(f"{path}: {reason}: {remedy}")
    return batches


def distributed_data_generator(batches, hp, rank, world_size, device, start_step=0) -> Iterator:
    """Yield this rank's part of each batch of plan_batches from start_step on, on its way to the
    device: inputs (n, T) int32 and targets (n, T) int64. Rank r has the r-th part of the sequences.
    Shards may not change while a run reads them: of one that is cut off, the system ends the run.
    """
    for tokens, slices in batches[start_step:]:
        sequences = np.concatenate([tokens[start:stop] for start, stop in slices])
        own = sequences.reshape(world_size, hp.batch_seqs // world_size, -1)[rank]
        inputs = torch.from_numpy(own[:, :-1].astype(np.int32))
        targets = torch.from_numpy(own[:, 1:].astype(np.int64))
        if device.type == "cuda":
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


# -----------------------------------------------------------------------------
# Schedules: functions of the step alone, so a resumed run repeats an uninterrupted one


def get_lr(step: int, hp: Hyperparameters) -> float:
    """Return the multiplier on every learning rate: a linear rise, 1, a linear fall to lr_final
    (Hägele et al. 2024, arXiv 2405.18392; a floor above zero: @YouJiacheng, 2025)."""
    rise = min((step + 1) / hp.warmup_steps, 1.0) if hp.warmup_steps else 1.0
    left = 1 - step / hp.num_iterations
    fall = min(left / hp.cooldown_frac, 1.0) if hp.cooldown_frac else 1.0
    return rise * (fall + (1 - fall) * hp.lr_final)


def get_window_size(step: int, hp: Hyperparameters) -> int:
    """Return the long window in tokens, rounded to window_step: up by the rule "blocks", down by
    the rule "tokens". It grows with the step (@fernbear.bsky.social, 2024; in blocks:
    @YouJiacheng, 2024)."""
    share = Fraction(step, hp.num_iterations)  # a float may be rounded to another block
    grown = hp.window_span * share
    if hp.window_rule == "tokens":
        return math.floor((hp.window_min + grown) / hp.window_step) * hp.window_step
    rounded_up = math.ceil(grown / hp.window_step) * hp.window_step
    return max(rounded_up, hp.window_min)


def get_muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Return Muon's momentum at the step: a linear ramp, then flat."""
    ramp = min(step / hp.momentum_warmup_steps, 1.0)
    return (1 - ramp) * hp.momentum_start + ramp * hp.momentum_end


class Moment:
    """All scheduled values at one step, 0 to num_iterations. Variables of it are named `now`."""

    short = property(lambda self: self.window // 2)  # the short window, in tokens

    def __init__(self, step: int, hp: Hyperparameters):
        self.step = min(step, hp.num_iterations)
        self.lr = get_lr(self.step, hp)  # multiplier on every learning rate
        self.momentum = get_muon_momentum(self.step, hp)
        self.window = get_window_size(self.step, hp)  # the long one, in tokens
        self.seq_len = hp.seq_len  # tokens in a training sequence
        last = self.step == hp.num_iterations
        self.validate = last or bool(hp.val_loss_every and self.step % hp.val_loss_every == 0)


# -----------------------------------------------------------------------------
# Numerics: compiled functions, FP8 matmuls, the linear layer


# `build` sets whether it is allowed. With torch's default of 4 for this option, kernels store
# values that are cheaper to compute again.
compilation = SimpleNamespace(allowed=False, options={"realize_reads_threshold": 8})


def compiled(function):
    """Decorate a function or method: torch.compile it at its first call, if compilation.allowed.
    Within other compiled code it is inlined."""
    fast = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal fast
        if torch.compiler.is_compiling() or not compilation.allowed:
            return function(*args, **kwargs)
        if fast is None:
            fast = torch.compile(function, dynamic=False, options=compilation.options)
        return fast(*args, **kwargs)

    return call


def recomputed(function, *arguments):
    """Return function(*arguments). In training, compiled code does not keep the function's
    intermediate results: the backward pass computes them again."""
    if torch.is_grad_enabled() and torch.compiler.is_compiling():
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return x * scale in float8, clamped: a plain cast to float8_e5m2 overflows to inf."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


def scaled_matmul(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return a @ b / scale in dtype, for float8 a (M, K) and b (K, N)."""
    fast = a.dtype == b.dtype  # in forward passes, where both are float8_e4m3fn
    inverse = torch.full((), 1.0 / scale, device=a.device)
    one = torch.ones_like(inverse)
    a, b = a.contiguous(), b.T.contiguous().T  # cuBLAS wants a row-major, b column-major
    return torch._scaled_mm(a, b, inverse, one, out_dtype=dtype, use_fast_accum=fast)


class FP8Linear(torch.autograd.Function):
    """x @ w.T in bfloat16 for x (T, K) and w (N, K). The matmuls read x * x_s and w * w_s as
    float8_e4m3fn, and the output's gradient * grad_s as float8_e5m2. In the head: @YouJiacheng,
    2025; these scales: @leloykun, 2025."""

    @staticmethod
    def forward(ctx, x, w, x_s, w_s, grad_s):
        x = to_fp8(x, x_s, torch.float8_e4m3fn)
        w = to_fp8(w, w_s, torch.float8_e4m3fn)
        ctx.save_for_backward(x, w)
        ctx.scales = x_s, w_s, grad_s
        return scaled_matmul(x, w.T, x_s * w_s, torch.bfloat16)

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        x_s, w_s, grad_s = ctx.scales
        grad = to_fp8(grad, grad_s, torch.float8_e5m2)
        grad_x = scaled_matmul(grad, w, grad_s * w_s, torch.bfloat16)
        grad_w = scaled_matmul(grad.T, x, grad_s * x_s, torch.float32)
        return grad_x, grad_w, None, None, None  # autograd casts to the inputs' dtypes


class CastedLinear(nn.Linear):
    """A linear layer without bias whose weight is cast to its input's dtype when used. With use_fp8
    it trains in FP8 on GPUs that have it, and in bfloat16 on CPUs that are fast in that. Code that
    reads only the weight, such as relu2_mlp, does not see use_fp8."""

    def __init__(self, in_features, out_features, use_fp8=False, x_s=1.0, w_s=1.0, grad_s=1.0):
        # This draws weights within 1 / sqrt(in_features). Callers scale them by init_bound.
        super().__init__(in_features, out_features, bias=False)
        self.use_fp8 = use_fp8
        self.fp8_scales = x_s, w_s, grad_s

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Map (..., in_features) to (..., out_features), by the layer's weight or another."""
        weight = self.weight if weight is None else weight
        if self.use_fp8 and self.training:
            if fp8_supported(x.device):
                out = FP8Linear.apply(x.flatten(0, -2), weight, *self.fp8_scales)
                return out.view(*x.shape[:-1], -1)
            if x.dtype == torch.float32 and bfloat16_is_fast(x.device):
                x = x.bfloat16()
        return F.linear(x, weight.type_as(x))


# -----------------------------------------------------------------------------
# Model: masks, attention, layers, and the head with its loss


def first_visible(begins: Tensor, window: Tensor, rule: str) -> Tensor:
    """Return the first token that each token sees: (T,) int32, never decreasing. Token i sees j
    when first[i] <= j <= i. `begins` (T,) says which tokens begin a document, and a token sees only
    its own document (@KoszarskyB, 2024). `window` () counts tokens, with the token itself. The rule
    "blocks" rounds it down to whole blocks, with the token's own block, which is always seen."""
    position = torch.arange(len(begins), device=begins.device, dtype=torch.int32)
    document_start = torch.where(begins, position, 0).cummax(0).values
    window = window.clamp(1, len(begins) + BLOCK)  # a wider one hides no more, but may overflow
    if rule == "blocks":
        blocks = (window // BLOCK).clamp(min=1)
        window_start = (position // BLOCK + (1 - blocks)) * BLOCK
    else:
        window_start = position + (1 - window)
    return torch.maximum(document_start, window_start)


def runs_of_blocks(start: Tensor, end: Tensor, index: Tensor, with_diagonal=False) -> tuple:
    """Return the blocks of each row, from its start up to its end, and on request the diagonal one
    after them: `count` (1, 1, n) and the list of blocks (1, 1, n, n), of which the first `count`
    are used. start, end and index = 0, 1, ... n - 1 are int32 (n,)."""
    blocks = start[:, None] + index
    blocks = torch.where(blocks < end[:, None], blocks, index[:, None])
    return (end - start + int(with_diagonal))[None, None], blocks[None, None]


def block_lists(first: Tensor) -> tuple[Tensor, ...]:
    """Return `first` (T,), by first_visible, and four lists of blocks for FlexAttention.

    Of the key blocks up to its own, a query block sees some not at all (.), some partly (P) and
    some fully (F). Because `first` never decreases, each kind is one run, and its own block, on the
    diagonal, is seen partly:

        . . P P F F F P

    Two lists have the partly and the fully seen key blocks of each query block; two have the query
    blocks that see each key block partly or fully. A list is a pair by runs_of_blocks, with n = T /
    BLOCK. The lists are made by hand, as @YouJiacheng did in 2024."""
    index = torch.arange(len(first) // BLOCK, device=first.device, dtype=torch.int32)  # of blocks
    # For each query block: the first key block that it sees, and the first one that it sees fully.
    first_seen = first[::BLOCK] // BLOCK
    first_full = torch.minimum((first[BLOCK - 1 :: BLOCK] + (BLOCK - 1)) // BLOCK, index)
    # For each key block: the first query block that no longer sees it fully, or no longer at all.
    end_of_full = torch.searchsorted(first_full, index, right=True, out_int32=True)
    end_of_seen = torch.searchsorted(first_seen, index, right=True, out_int32=True)
    return (
        first,
        *runs_of_blocks(first_seen, first_full, index, with_diagonal=True),  # keys, seen partly
        *runs_of_blocks(first_full, index, index),  # keys, seen fully
        *runs_of_blocks(end_of_full, end_of_seen, index, with_diagonal=True),  # queries, partly
        *runs_of_blocks(index + 1, end_of_full, index),  # queries, fully
    )


def make_mask(first: Tensor) -> tuple[Tensor, ...] | Tensor:
    """Return block_lists for compiled code on a GPU, else SDPA's mask (T, T), 0 or -inf:
    FlexAttention has no backward pass on a CPU, and uncompiled it would store T x T scores.
    UserError if that mask would fill the memory."""
    if first.is_cuda and compilation.allowed:
        return block_lists(first)
    if len(first) > 16384:
        raise UserError(f"{len(first)} tokens need a GPU and --compile on: try --record demo")
    position = torch.arange(len(first), device=first.device)
    hidden = (position > position[:, None]) | (position < first[:, None])
    return torch.zeros(hidden.shape, device=first.device).masked_fill_(hidden, -math.inf)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: tuple | Tensor, scale: float) -> Tensor:
    """Return the attention (1, H, T, D) of q, k and v under a mask by make_mask."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.type_as(q), scale=scale)
    first, *lists = mask
    block_mask = BlockMask(
        (len(first), len(first)),
        *lists,  # in the order of BlockMask's arguments
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=lambda b, h, q, kv: (kv <= q) & (kv >= first[q]),
    )
    options = {"bwd_num_warps": 8}  # other cards than an H100 would have 4, and spill registers
    return flex_attention(q, k, v, block_mask=block_mask, scale=scale, kernel_options=options)


def norm(x: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last axis, without gain."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rotary_frequencies(hp: Hyperparameters, device: torch.device) -> Tensor:
    """Return the angles (head_dim / 2,) by which pairs of channels rotate from token to token.
    "full" is RoPE (arXiv 2104.09864), with frequencies rope_base^(-2i / head_dim). With "half", the
    first half of the frequencies falls geometrically from 1 to 1/rope_base; the rest are 0
    (@YouJiacheng, 2024)."""
    pairs = hp.head_dim // 2
    if hp.rope == "full":
        return hp.rope_base ** -(torch.arange(pairs, device=device) / pairs)
    turning = pairs // 2
    exponent = torch.arange(turning, device=device) / max(turning - 1, 1)
    return F.pad(hp.rope_base**-exponent, (0, pairs - turning))


def rotary_table(position: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (..., 1, head_dim / 2), of channel pairs at positions (..., 1)."""
    angle = position[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate_normed(x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return norm(x) with each pair of channels d and d + D/2 rotated by a rotary_table, in the
    layout of attend: (1, T, H, D) becomes (1, H, T, D). The norm of q and k: @Grad62304977, 2024.
    Joining two halves by torch.cat, in place of the flip, would read x twice."""
    pairs = norm(x, eps).float().unflatten(-1, (2, -1))  # (1, T, H, 2, D / 2)
    sign = 1 - 2 * torch.arange(2, device=x.device)[:, None]  # 1 for channel d, -1 for d + D/2
    turned = pairs * cos[..., None, :] + pairs.flip(-2) * (sin[..., None, :] * sign)
    return turned.flatten(-2).type_as(x).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Attention with normalised, rotated q and k, and with extra values mixed into v."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.attend = attend  # tools/sample.py sets one that caches keys and values
        width = hp.num_heads * hp.head_dim
        self.head_shape = hp.num_heads, hp.head_dim
        self.scale = hp.attn_scale or hp.head_dim**-0.5
        self.eps = hp.norm_eps
        self.mixes_first = layer.values == "first"
        # q, k and v are one weight, so one matmul makes all three: @fernbear.bsky.social, 2025.
        qkv = CastedLinear(hp.model_dim, 3 * width).weight.detach() * hp.init_bound
        self.qkv_w = nn.Parameter(qkv.view(3, width, hp.model_dim))
        self.lambdas = nn.Parameter(torch.full((1 if self.mixes_first else 2,), 0.5))
        self.c_proj = CastedLinear(width, hp.model_dim)
        nn.init.zeros_(self.c_proj.weight)  # as in the MLP and the head: @Grad62304977, 2024

    def forward(self, x: Tensor, value: Tensor | None, rotary, mask):
        """Map x (1, T, C) to (1, T, C). `value` is rows (T, H * D) of a table, or the first layer's
        v (1, T, H, D). The first layer that mixes in v also returns it; others return None."""
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(1, -1, 3, *self.head_shape).unbind(2)  # (1, T, H, D)
        first_v = None
        if self.mixes_first:
            if value is None:
                value = first_v = v
            v = (1 - self.lambdas[0]) * v + self.lambdas[0] * value
        else:
            v = self.lambdas[0] * v
            if value is not None:
                v = v + self.lambdas[1] * value.view_as(v)
        q = rotate_normed(q, *rotary, self.eps)  # (1, H, T, D)
        k = rotate_normed(k, *rotary, self.eps)
        out = self.attend(q, k, v.transpose(1, 2), mask, self.scale)
        return self.c_proj(out.transpose(1, 2).flatten(2)), first_v


def relu_squared(x: Tensor) -> Tensor:
    """Return relu(x)^2 (So et al. 2021, arXiv 2109.08668)."""
    return F.relu(x).square()


def relu2_mlp(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Return relu(x @ w_in.T)^2 @ w_out.T of x (..., C), w_in (H, C) and w_out (C, H). Autograd
    would keep three tensors (..., H). The kernel and the formula keep one: for 2025-01-26, that is
    7 GB less."""
    if "relu2_mlp" in IN_USE:  # if the formula below is edited, gpu_kernels.py leaves it out
        return gpu_kernels.FusedMLP.apply(x, w_in, w_out)
    return F.linear(recomputed(relu_squared, F.linear(x, w_in)), w_out)


class MLP(nn.Module):
    """Two projections around ReLU squared."""

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.c_fc = CastedLinear(hp.model_dim, 4 * hp.model_dim)
        self.c_fc.weight.data *= hp.init_bound
        self.c_proj = CastedLinear(4 * hp.model_dim, hp.model_dim)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., C) to (..., C)."""
        return relu2_mlp(x, self.c_fc.weight.type_as(x), self.c_proj.weight.type_as(x))


class Block(nn.Module):
    """One layer: add an earlier output (@brendanh0gan, 2024) and the embeddings x0
    (2024-11-06_ShortcutsTweaks), apply attention and MLP."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.attn = None if layer.window == "none" else CausalSelfAttention(hp, layer)
        self.mlp = MLP(hp)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # of x and x0
        self.eps = hp.norm_eps

    @compiled
    def forward(self, x, x0, skip, skip_weight, value, rotary, mask):
        """Map x (1, T, C) to (1, T, C). `skip` is None or an earlier layer's output (1, T, C), to
        be added times its weight (). Also return first_v, as attention does."""
        first_v = None
        if skip is not None:
            x = x + skip_weight * skip
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.attn is not None:
            out, first_v = self.attn(norm(x, self.eps), value, rotary, mask)
            x = x + out
        return x + self.mlp(norm(x, self.eps)), first_v


class WithGradients(torch.autograd.Function):
    """A loss (), as a function of tensors whose gradients are known. backward() scales these in
    place, so it can be called once."""

    @staticmethod
    def forward(ctx, loss, gradients, *tensors):
        ctx.save_for_backward(*gradients)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, grad):
        return None, None, *(gradient.mul_(grad) for gradient in ctx.saved_tensors)


def leaves_below(result: Tensor) -> list[Tensor]:
    """Return the leaf tensors, such as parameters, that a result depends on."""
    nodes = [result.grad_fn]
    for node in nodes:  # nodes grows in the loop
        for below, _ in node.next_functions:
            if below is not None and below not in nodes:
                nodes.append(below)
    return [node.variable for node in nodes if hasattr(node, "variable")]


class Head(CastedLinear):
    """Turns the trunk's output into logits and their loss."""

    def __init__(self, hp: Hyperparameters):
        rows = -(-hp.vocab_size // 128) * 128
        super().__init__(hp.model_dim, rows, hp.fp8, hp.x_s, hp.w_s, hp.grad_s)
        nn.init.zeros_(self.weight)
        self.softcap = hp.logit_softcap
        self.grad_scale = None  # gradients are of so many times the summed loss; None: of the mean

    def loss(self, x: Tensor, targets: Tensor, *more) -> Tensor:
        """Return the mean loss () of x (T, C) and targets (T, ...), one chunk of tokens after
        another: the logits of a sequence take 9.9 GB in float32. In training, each chunk's backward
        pass also runs here, so the logits of only one chunk exist at a time. backward() on the
        result then passes these stored gradients to x and to the parameters. chunk_loss may use
        parameters, but nothing computed from them outside. `more` are its further arguments."""
        total, grads_x, grads = 0, [], {}  # grads of parameters
        size = self.chunk_len(x.device)
        scale = self.grad_scale or 1 / len(x)  # multiplies gradients; the mean is divided by it
        for chunk, chunk_targets in zip(x.split(size), targets.split(size), strict=True):
            # Apart from x, which also depends on the weight if embeddings are tied to it.
            chunk = chunk.detach().requires_grad_(torch.is_grad_enabled())
            loss = self.chunk_loss(chunk, chunk_targets, scale, *more)
            total = total + loss.detach()
            if loss.requires_grad:
                # From the graph, because chunk_loss may also read parameters of other modules.
                leaves = [leaf for leaf in leaves_below(loss) if leaf is not chunk]
                grad_x, *new = torch.autograd.grad(loss, [chunk, *leaves], materialize_grads=True)
                grads_x.append(grad_x)
                for leaf in leaves:  # no name keeps a gradient's memory until the next chunk
                    if leaf in grads:
                        grads[leaf] += new.pop(0)
                    else:
                        grads[leaf] = new.pop(0)
        mean = total / (scale * len(x))
        if not grads_x:
            return mean
        return WithGradients.apply(mean, [torch.cat(grads_x), *grads.values()], x, *grads)

    @compiled
    def chunk_loss(self, x: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Return scale times the summed loss () of a chunk x (T, C) and targets (T,) int64."""
        if "chunk_loss" in IN_USE:  # if the formula below is edited, gpu_kernels.py leaves it out
            return gpu_kernels.fused_chunk_loss(self, x, targets, scale)
        return scale * F.cross_entropy(self.logits(x), targets, reduction="sum")

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (T, padded vocabulary) of x (T, C) in float32, capped as in Gemma 2
        (arXiv 2408.00118; @Grad62304977, 2024): cap * tanh(logit / cap) + cap, computed as 2 cap *
        sigmoid(2 logit / cap) (@YouJiacheng, 2025). Softmax does not see the constant cap."""
        return 2 * self.softcap * self(x).float().div_(self.softcap / 2).sigmoid_()

    def chunk_len(self, device: torch.device) -> int:
        """Return the tokens in a chunk. Each chunk reads and writes the head's whole gradient, so
        larger ones are faster: 8192 tokens cost 1.3 % of a step. But with 16384, the newest fork
        does not fit 24 GB."""
        if device.type == "cpu":
            return 256
        return 8192 if memory_is_small(device) else 16384


def look_up(tokens: Tensor, table: Tensor) -> Tensor:
    """Return the rows (T, C) of tokens (T,) in a table (V, C). On a GPU, the table's gradient is
    summed in a fixed order. On a CPU it is sparse: the rows of a batch are few."""
    return F.embedding(tokens, table, sparse=not table.is_cuda)


class GPT(nn.Module):
    """The language model: embeddings, layers linked as a U-net, the head and its loss. Parameters
    are named as in 2025-01-26, so its published checkpoints load."""

    kernels = ("chunk_loss", "relu2_mlp")  # of gpu_kernels.py, if they agree
    numbers_in_pieces = 0  # elements that ranks share outside of parameters, as a fork's table

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.hp = hp
        self.layers = layer_table(hp)
        names = sorted({layer.values for layer in self.layers} - {None, "first"})
        width = hp.num_heads * hp.head_dim
        # Of an nn.Embedding only the weight is used, by look_up.
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim)
        tables = {name: nn.Embedding(hp.vocab_size, width) for name in names}
        self.value_embeds = nn.ModuleDict({"embed": nn.ModuleDict(tables)})
        self.blocks = nn.ModuleList(Block(hp, layer) for layer in self.layers)
        self.skip_weights = nn.Parameter(torch.ones(hp.num_layers // 2))
        self.lm_head = Head(hp)

    def forward(self, input_seq: Tensor, target_seq: Tensor, now: Moment) -> Tensor:
        """Return the mean loss () of tokens (T,), whole blocks, and targets (T,) int64."""
        return self.lm_head.loss(self.hidden(input_seq, now), target_seq)

    def hidden(self, input_seq: Tensor, now: Moment) -> Tensor:
        """Map tokens (T,), whole blocks, to the normalised output (T, C) of the last layer."""
        position = torch.arange(len(input_seq), device=input_seq.device)
        masks, rotary = self.context(input_seq, position, now)
        x, values = self.embedded(input_seq)
        return self.run_layers(x, values, rotary, masks)

    def context(self, input_seq: Tensor, position: Tensor, now: Moment) -> tuple[dict, tuple]:
        """Return what all layers share: the masks of tokens (T,), and the rotary table of tokens at
        positions (n,)."""
        # Windows are tensors, so that a new one recompiles nothing.
        masks = self.masks(input_seq, torch.tensor(now.window), torch.tensor(now.short))
        return masks, self.rotary(position)

    def run_layers(self, x: Tensor, values: dict[str, Tensor], rotary, masks: dict) -> Tensor:
        """Map embeddings (T, C) to the head's input (T, C), in the shape of a U-net: layer
        num_layers - 1 - i adds the output of layer i. `values` are rows of the value tables."""
        x = x0 = norm(x, self.hp.norm_eps)[None]
        half = len(self.blocks) // 2
        skip_weights = self.skip_weights.unbind()
        outputs, first_v = [], None  # outputs of the lower half that are not added yet
        for i, (layer, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            value = first_v if layer.values == "first" else values.get(layer.values)
            skip = skip_weight = None
            if i >= half:
                skip, skip_weight = outputs.pop(), skip_weights[i - half]
            x, v = block(x, x0, skip, skip_weight, value, rotary, masks.get(layer.mask))
            if v is not None:
                first_v = v
            if i < half:
                outputs.append(x)
        return norm(x, self.hp.norm_eps)[0]

    @torch.no_grad()
    @compiled
    def masks(self, input_seq: Tensor, long: Tensor, short: Tensor) -> dict:
        """Return the masks of input_seq (T,) for both windows (), by Layer.mask."""
        begins = input_seq == self.hp.end_of_text
        first_long = first_visible(begins, long, self.hp.window_rule)
        first_short = first_visible(begins, short, self.hp.window_rule)
        return {"long": make_mask(first_long), "short": make_mask(first_short)}

    @compiled
    def rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary_table of tokens at positions (T,)."""
        return rotary_table(position[:, None], rotary_frequencies(self.hp, position.device))

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the embeddings (T, C) of tokens (T,), and their rows of each value table."""
        x = look_up(input_seq, self.embed.weight)
        tables = self.value_embeds["embed"].items()
        return x, {name: look_up(input_seq, table.weight) for name, table in tables}

    def tables(self) -> list[nn.Module]:
        """Return the vocabulary tables that are bfloat16 on CUDA."""
        return [self.embed, self.value_embeds]

    def save_pieces(self, path: Path) -> None:
        """Save what a fork's ranks share out, beside this checkpoint. All ranks call this."""

    def load_pieces(self, path: Path | None, weights_only: bool) -> None:
        """Load what save_pieces has saved; without a path, reset it."""


# -----------------------------------------------------------------------------
# Optimizers: Muon and Adam as update rules, and how ranks share them


# (a, b, c) maps a singular value s to a s + b s^3 + c s^5. Most end between 0.7 and 1.2.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5


def zeropower_via_newtonschulz5(G, coefficients=None, margin=1.0, eps=1e-7):
    """Return G (..., rows, cols) with its singular values replaced by values near 1; zero stays
    zero. bfloat16 on CUDA, else G's own dtype. Sources: Jordan et al. 2024,
    kellerjordan.github.io/posts/muon; Bernstein and Newhouse 2024, arXiv 2409.20325. A step is
    X <- a X + (b A + c A^2) X with A = X X^T. Adding within the matmuls halves the rounding."""
    X = G.bfloat16() if G.is_cuda else G
    X = X.reshape(-1, *G.shape[-2:])
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X
    size = torch.linalg.matrix_norm(X, keepdim=True)  # Frobenius: >= the largest singular value
    X = X / (margin * size + eps)
    for a, b, c in coefficients or NEWTON_SCHULZ:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A.mT, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if tall else X).reshape(G.shape)


@compiled
def muon_updates(grad, buffer, momentum: Tensor, damped: bool, orthogonalise: Callable) -> Tensor:
    """Return the updates (..., rows, cols) of matrices: orthogonalised Nesterov momentum. The
    buffer, which changes in place, averages gradients if `damped`, else sums them."""
    if damped:
        buffer.lerp_(grad, 1 - momentum)
        direction = grad.lerp(buffer, momentum)
    else:
        buffer.mul_(momentum).add_(grad)
        direction = grad + momentum * buffer
    return orthogonalise(direction)


# An update rule is a function rule(bank, lr, now, hp). `bank` is a Bank (below): parameters of one
# group as items of one shape, of which each rank owns a shard. lr is the group's learning rate at
# the Moment `now`. The rule reads bank.shard_grad, the mean gradient of this rank's items, and
# changes bank.shard, their weights; both are (n, *item_shape). Tensors (n, ...) in the dict
# bank.state are saved and resumed. Ranks then send each other their shards. A whole rule:
#
#     def sign_descent(bank, lr, now, hp):
#         bank.shard.sub_(bank.shard_grad.sign(), alpha=lr)


def muon(bank, lr: float, now: Moment, hp) -> None:
    """Step by Muon. Tall matrices take larger steps."""
    if not bank.state:
        bank.state["momentum_buffer"] = torch.zeros_like(bank.shard_grad)
    buffer = bank.state["momentum_buffer"]
    momentum = torch.full((), now.momentum, device=buffer.device)  # a number would recompile
    updates = muon_updates(
        bank.shard_grad, buffer, momentum, hp.momentum_damped, zeropower_via_newtonschulz5
    )
    height, width = updates.shape[-2:]
    bank.shard.sub_(updates, alpha=lr * max(1, height / width) ** 0.5)


def adam(bank, lr: float, now: Moment, hp, betas=None, decay=0.0) -> None:
    """Step by torch's fused Adam (Kingma and Ba 2014, arXiv 1412.6980), for items of any shape.
    `betas` replace hp.adam_betas. `decay` is a decoupled weight decay (arXiv 1711.05101)."""
    beta1, beta2 = betas or hp.adam_betas
    if "step" not in bank.state:
        bank.state["step"] = torch.zeros(len(bank.shard), device=bank.shard.device)
        bank.state["exp_avg"] = torch.zeros_like(bank.shard)
        bank.state["exp_avg_sq"] = torch.zeros_like(bank.shard)
    bank.state["step"] += 1
    torch._fused_adamw_(
        [bank.shard],
        [bank.shard_grad.type_as(bank.shard)],
        [bank.state["exp_avg"]],
        [bank.state["exp_avg_sq"]],
        [],  # what amsgrad keeps
        [bank.state["step"][0]],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=hp.adam_eps,
        weight_decay=decay,
        amsgrad=False,
        maximize=False,
    )


@dataclass
class Group:
    """Parameters that learn alike. Their order must stay: saved state has the same."""

    name: str
    params: list[nn.Parameter]
    rule: Callable
    lr: float
    item_ndim: int  # what ranks share: matrices (2), rows of tables (1) or numbers (0)
    steps: int = 1  # the rule is called once in so many steps, with the sum of their gradients


class Bank:
    """Parameters of one group and item shape, which ranks share. An item is a matrix, a row of a
    table, or a number, by Group.item_ndim. Each rank owns n items: on 8 ranks, 6 of the 44 matrices
    of 2025-01-26 with 768 x 768 elements. What is left over is padding, which stays zero.

        weights (ranks, n, *item_shape)    of all ranks; the parameters are views of it
        shard (n, *item_shape)             this rank's part of the weights
        grads (ranks, n, *item_shape)      sums of this rank's gradients; backward passes add to it
        shard_grad (n, *item_shape)        the shard's gradient: this rank's until it is reduced,
                                           then the sum over ranks; a rule reads its mean
        state                              the update rule's tensors (n, ...), by their names

    When the last gradient of a step has arrived, ranks reduce-scatter `grads`: each gets the sum
    for its own items, `shard_grad`. When a rule has changed `shard`, launch_gather collects the
    shards of all ranks. All ranks must use the same parameters in a step, because they send in the
    order of their backward passes.

    Nothing may rebind a parameter's .data, as model.to() does: the parameter would no longer learn.
    A hook of your own that needs p.grad must be registered before this object is made, whose hook
    takes p.grad away.
    """

    def __init__(self, group: Group, params: list[nn.Parameter], rank, world_size, micro_batches):
        self.params, self.rank, self.world_size = params, rank, world_size
        self.state: dict[str, Tensor] = {}  # the update rule's
        self.works = []  # collectives that are under way
        item_shape = params[0].shape[params[0].ndim - group.item_ndim :]
        item_len = math.prod(item_shape)
        self.name = f"{group.name} {'x'.join(map(str, item_shape))}".rstrip()
        # Each parameter begins at a multiple of 16 bytes, because compiled code assumes that.
        spacing = 16 // math.gcd(16, item_len * params[0].element_size())
        starts = [0]
        for p in params:
            starts.append(starts[-1] + -(-p.numel() // (item_len * spacing)) * spacing)
        self.num_items = starts.pop()
        n = -(-self.num_items // (world_size * spacing)) * spacing
        self.backward_passes = group.steps * micro_batches  # that add to a gradient
        self.weights = params[0].detach().new_zeros(world_size, n, *item_shape)
        self.shard = self.weights[rank]
        dtype = torch.float32 if self.backward_passes > 1 else self.weights.dtype
        self.grads = torch.zeros_like(self.weights, dtype=dtype)
        self.grad_views = []  # the parameters' parts of grads
        for p, start in zip(params, starts, strict=True):
            stop = start + p.numel() // item_len
            p.data = self.weights.flatten(0, 1)[start:stop].view(p.shape).copy_(p.detach())
            self.grad_views.append(self.grads.flatten(0, 1)[start:stop].view(p.shape))
            if world_size > 1:
                p.register_post_accumulate_grad_hook(self.arrived)
        self.zero_grad()

    def zero_grad(self) -> None:
        """Begin a step: wait for what is under way, and forget all gradients."""
        self.wait()
        self.shard_grad = self.grads[self.rank]
        self.pending = self.backward_passes * len(self.params)  # gradients until they are reduced
        self.has_gradients = False  # False: `grads` still holds the previous step's
        for p in self.params:
            p.grad = None

    def arrived(self, p: nn.Parameter) -> None:
        """Count a gradient, within the backward pass, which calls this. The last one is sent."""
        self.pending -= 1
        if self.pending < 0:
            passes = self.backward_passes
            raise RuntimeError(f"{self.name}: over {passes} gradients a step, see Group.steps")
        if self.pending == 0:
            self.add_gradients()
            self.launch_reduce()

    def add_gradients(self) -> None:
        """Add p.grad to `grads`, and clear it. If only some parameters have a gradient, that of
        the others is zero."""
        if all(p.grad is None for p in self.params):
            return
        views, dense = [], []
        for p, view in zip(self.params, self.grad_views, strict=True):
            if not self.has_gradients and (p.grad is None or p.grad.is_sparse):
                view.zero_()
            if p.grad is not None and p.grad.is_sparse:
                view.add_(p.grad)
            elif p.grad is not None:
                views.append(view)
                dense.append(p.grad)
            p.grad = None
        if dense:
            write = torch._foreach_add_ if self.has_gradients else torch._foreach_copy_
            write(views, dense)
        self.has_gradients = True

    def launch_reduce(self) -> None:
        """Begin to sum the gradients over all ranks, in the weights' dtype. When that has ended,
        shard_grad is the sum for this rank's items."""
        self.pending = 0
        sent = self.grads.type_as(self.weights)
        self.shard_grad = sent[self.rank]
        self.works.append(reduce_scatter(self.shard_grad, sent.flatten(0, 1), async_op=True))

    def launch_gather(self, shard: Tensor) -> Tensor:
        """Begin to collect the parts (n, ...) of all ranks, of which this one is `shard`. Return
        what they become, (ranks, n, ...). Weights are collected in their place."""
        if self.world_size == 1:
            return shard[None]
        is_weights = shard is self.shard
        parts = self.weights if is_weights else shard.new_empty(self.world_size, *shard.shape)
        self.works.append(all_gather(parts.flatten(0, 1), shard.contiguous(), async_op=True))
        return parts

    def wait(self) -> None:
        """Wait for what is reduced and gathered. With NCCL, only the GPU waits."""
        for work in self.works:
            work.wait()
        self.works = []


class Optimizers:
    """Applies the update rules to all parameters. All ranks make a step in this order:

    1. The last backward pass reduces the gradients of a Bank when they are complete: the head's
       first, then those of the matrices, those of the embeddings at the end.
    2. In the order of parameter_groups, each rank updates its shard, and sends it. The matrices are
       orthogonalised while gradients of the tables are still on their way.
    3. Each rank waits until it has the shards of all.

    Keller Jordan let ranks share Muon's work (2024). @ryanyang0 and @vagrawal let them send within
    the backward pass (2025).
    """

    def __init__(self, model: GPT, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        self.model, self.hp, self.rank, self.world_size = model, hp, rank, world_size
        self.groups: list[tuple[Group, Bank]] = []
        groups = self.parameter_groups(model, hp)
        # A run saves and stops only at multiples of this, when no gradient waits for a later step.
        self.period = math.lcm(*(group.steps for group in groups))
        if hp.save_every % self.period:
            raise UserError(f"--save_every {hp.save_every}: must be a multiple of {self.period}")
        for name, p in model.named_parameters():
            count = sum(p is other for group in groups for other in group.params)
            if count != 1:
                raise ValueError(f"{name} is in {count} parameter_groups: it must be in one")
        for group in groups:
            by_shape = {}
            for p in group.params:
                if p.requires_grad:  # a frozen one stays as it is
                    shape = p.shape[p.ndim - group.item_ndim :]
                    by_shape.setdefault((shape, p.dtype), []).append(p)
            for params in by_shape.values():
                bank = Bank(group, params, rank, world_size, hp.batch_seqs // world_size)
                if any(bank.name == other.name for _, other in self.groups):
                    raise ValueError(f"two groups, or dtypes of a group, are named {bank.name}")
                self.groups.append((group, bank))

    @staticmethod
    def parameter_groups(model: GPT, hp: Hyperparameters) -> list[Group]:
        """Return the groups, in the order in which weights are updated."""
        matrices = [p for p in model.blocks.parameters() if p.ndim > 1]
        tables = list(model.value_embeds.parameters())
        scalars = [p for p in model.parameters() if p.ndim == 1]
        return [
            Group("head", [model.lm_head.weight], adam, hp.head_lr, item_ndim=1),
            Group("muon", matrices[::-1], muon, hp.muon_lr, item_ndim=2),
            Group("embed", [model.embed.weight], adam, hp.embed_lr, item_ndim=1),
            Group("values", tables, adam, hp.embed_lr, item_ndim=1),
            Group("scalar", scalars, adam, hp.scalar_lr, item_ndim=0),
        ]

    def add_gradients(self) -> None:
        """Add the gradients of a backward pass to those of the step."""
        for _, bank in self.groups:
            bank.add_gradients()

    @torch.no_grad()
    def step(self, now: Moment) -> dict[str, Tensor]:
        """Update all groups that learn at a moment, and clear their gradients. Return tensors () of
        the step: with grad_clip `grad_norm`, the mean gradient's global L2 norm."""
        self.add_gradients()
        learning = self.groups_that_learn(now)
        scale, results = 1 / self.hp.batch_seqs, {}
        if self.hp.grad_clip:
            results["grad_norm"] = self.grad_norm(learning) * scale
            scale = scale * (self.hp.grad_clip / (results["grad_norm"] + 1e-6)).clamp(max=1)
        for group, bank in learning:
            bank.wait()
            bank.shard_grad.mul_(scale)
            group.rule(bank, group.lr * now.lr, now, self.hp)
            bank.launch_gather(bank.shard)
        for _, bank in learning:
            bank.zero_grad()  # waits for all shards
        return results

    def groups_that_learn(self, now: Moment) -> list[tuple[Group, Bank]]:
        """Return those that are due and have gradients: other weights stay, as in torch's
        optimizers. Reduce a Bank that no backward pass has: some parameters had no gradient."""
        learning = []
        for group, bank in self.groups:
            if (now.step + 1) % group.steps == 0 and bank.has_gradients:
                learning.append((group, bank))
                if bank.pending and self.world_size > 1:
                    bank.launch_reduce()
        return learning

    def grad_norm(self, learning: list[tuple[Group, Bank]]) -> Tensor:
        """Return the L2 norm () of the gradients of these groups, summed over the batch."""
        squares = torch.zeros((), device=next(self.model.parameters()).device)
        for _, bank in learning:
            bank.wait()
            squares += torch.linalg.vector_norm(bank.shard_grad, dtype=torch.float32).square()
        return all_reduce_(squares).sqrt()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return all states, without padding, on rank 0's CPU. All ranks must call this."""
        saved = {}
        for _, bank in self.groups:
            saved[bank.name] = {}
            for key, value in bank.state.items():
                parts = bank.launch_gather(value)
                bank.wait()
                if self.rank == 0:
                    whole = parts.flatten(0, 1)[: bank.num_items]
                    saved[bank.name][key] = whole.to("cpu", copy=True)
        return saved

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Load state that any number of ranks saved, or begin anew with {}. Clear all gradients.
        KeyError or RuntimeError if it cannot be the state of these groups."""
        saved = {name.rstrip(): state for name, state in saved.items()}  # old ones had blanks
        if saved and saved.keys() != {bank.name for _, bank in self.groups}:
            raise RuntimeError(f"its groups are {', '.join(saved)}")
        for _, bank in self.groups:
            bank.zero_grad()
            before, bank.state = bank.state, {}
            shape = bank.weights.shape[:2]
            for key, value in (saved[bank.name] if saved else {}).items():
                like = before.get(key, value)  # what the rule made in the warm-up
                if value.shape != (bank.num_items, *like.shape[1:]):
                    raise RuntimeError(f"{bank.name}: {key} has the shape {[*value.shape]}")
                # Rules may keep another dtype on another device, or on another number of ranks.
                padded = value.new_zeros(math.prod(shape), *value.shape[1:], dtype=like.dtype)
                padded[: bank.num_items] = value
                part = padded.unflatten(0, shape)[self.rank]
                bank.state[key] = part.to(bank.weights.device, copy=True)

    def check(self) -> None:
        """UserError if a parameter was frozen or rebound after this object was made."""
        for _, bank in self.groups:
            storage = bank.weights.untyped_storage().data_ptr()
            for p in bank.params:
                if not p.requires_grad or p.untyped_storage().data_ptr() != storage:
                    reason = "was frozen, or its .data rebound, after Optimizers were made"
                    raise UserError(f"a parameter of {bank.name} {reason}")


# -----------------------------------------------------------------------------
# Training: steps, validation, warm-up and the timed loop: `train` is the whole program


def train_step(model: GPT, optimizers, inputs, targets, now: Moment, stop: float = 0) -> dict:
    """Make one step on this rank's inputs and targets (n, T), n micro-batches. Return tensors () of
    the step, equal on all ranks: the mean `loss` of the global batch, the sum of `stop`, and what
    Optimizers.step returns. logs/RUN_ID.jsonl has each of them: a fork that wants another one adds
    it to such a dict. Optimizers divide gradients by batch_seqs: grad_s is for one sequence."""
    loss = torch.zeros((), device=inputs.device)
    for input_seq, target_seq in zip(inputs, targets, strict=True):
        micro_loss = model(input_seq, target_seq, now)
        micro_loss.backward()
        optimizers.add_gradients()
        loss += micro_loss.detach()
        del micro_loss  # and its graph's memory, before the next one is made
    results = optimizers.step(now)
    sums = torch.stack([loss / model.hp.batch_seqs, torch.full_like(loss, stop)])
    results["loss"], results["stop"] = all_reduce_(sums)
    return results


@torch.no_grad()
def evaluate(model: GPT, batch: tuple[Tensor, Tensor], now: Moment, device) -> float:
    """Return the mean loss of all ranks' sequences. `batch` is this rank's, two tensors (n, T)."""
    model.eval()
    total = torch.zeros(2, device=device)  # losses, sequences
    for inputs, targets in zip(*batch, strict=True):
        total[0] += model(inputs, targets, now)
        total[1] += 1
    all_reduce_(total)
    model.train()
    return (total[0] / total[1]).item()


def validation_batch(hp, rank: int, world_size: int, device) -> tuple[Tensor, Tensor]:
    """Return this rank's inputs and targets (n, T) for `evaluate`: every world_size-th sequence."""
    of_val = replace(hp, seq_len=hp.val_seq_len, batch_seqs=1, epochs=1)
    batches = plan_batches(hp.val_files, of_val, hp.val_tokens // hp.val_seq_len, in_order)
    pairs = distributed_data_generator(batches, of_val, 0, 1, torch.device("cpu"))
    inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    return inputs[rank::world_size].to(device), targets[rank::world_size].to(device)


def warm_up(model: GPT, optimizers, moments: list[Moment], device) -> None:
    """Compile everything before the clock starts. Validate once, then train the last `period` steps
    on made-up tokens, so that every group has learned. Free what compilation leaves behind, cycles
    that hold gigabytes, and repeat with twice the steps, so that the allocator reserves what the
    run will use: steps and validations divide memory differently. The caller restores weights and
    state."""
    hp = model.hp
    if compilation.allowed and any(now.seq_len != hp.seq_len for now in moments):
        raise UserError("steps of several lengths: class Run needs warm_up, as functions_2026.py's")
    tokens = torch.arange(1, max(hp.seq_len, hp.val_seq_len) + 1, device=device)[None]
    val, x = (tokens[:, :size] % hp.vocab_size for size in (hp.val_seq_len, hp.seq_len))
    for count in (1, 2) if compilation.allowed else (1,):
        optimizers.load_state_dict({})
        gc.collect()
        torch.cuda.empty_cache()
        evaluate(model, (val.int(), val), moments[-1], device)  # first: its blocks are larger
        for now in moments[-count * optimizers.period :]:
            train_step(model, optimizers, x.int(), x, now)


def build(run, hp: Hyperparameters, device: torch.device) -> GPT:
    """Return a Run's model on its device, with initial weights. Decide what @compiled does."""
    compilation.allowed = hp.compile == "on" or (hp.compile == "auto" and device.type == "cuda")
    if compilation.allowed:  # the first mention of torch._dynamo imports it, which takes a second
        torch._dynamo.config.recompile_limit = 64  # kinds of layers, each in several shapes
        # Otherwise, layers with an autograd.Function would be compiled anew at each start.
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    # glibc gives the memory of each chunk of logits back to the system, and page faults fetch it
    # again. Let it keep what is freed: without this, a step of the demo takes 2 to 3 times as long.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt and device.type == "cpu":
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD, in bytes
    torch.manual_seed(hp.seed)
    model = run.GPT(hp).to(device)
    for table in model.tables():
        table.to(torch.bfloat16 if device.type == "cuda" else torch.float32)
    return model


def train(run, hp: Hyperparameters, record: str) -> None:
    """Train by a Run, from the beginning or from a checkpoint, until the last step or a signal.
    train_time leaves out warm-up, validation and saving. The host never waits for the GPU within a
    step: it reads a step's results during the next step. An .item() in a step would break this."""
    sources = sources_of(run)  # at once: they may be edited while the model is built
    refuse_assignments(run)
    device, rank, world_size = start_device(hp.device)
    on_gpu = device.type == "cuda"
    if world_size == 1:
        refuse_tasks()
    if hp.batch_seqs % world_size:
        raise UserError(f"{world_size} ranks cannot share --batch_seqs {hp.batch_seqs} evenly")

    # Data, model and weights come before the log: if they fail, the run's name is still free.
    moments = [run.Moment(step, hp) for step in range(hp.num_iterations + 1)]
    val_batch = validation_batch(hp, rank, world_size, device)
    batches = plan_batches(hp.train_files, hp, hp.num_iterations, run.plan, moments)
    model = build(run, hp, device)
    optimizers = run.Optimizers(model, hp, rank, world_size)
    saved = beginning(run, hp, model)
    log = Log(run, record, hp, rank, sources)
    first_step = saved.get("step", 0)
    progress = Progress(log, first_step, saved.get("seconds", 0.0))
    if not same_on_all_ranks(torch.tensor(first_step, device=device)):
        raise UserError("ranks found different checkpoints: logs/ must be one folder for all")
    newest = [saved["path"]] if first_step else []
    if rank == 0 and checkpoints(log.path.with_suffix(""))[:1] != newest:
        raise UserError(f"another process has trained {log.run_id} meanwhile: start again")
    if first_step == hp.num_iterations:
        return log(f"the run {log.run_id} is finished")

    introduce(log, model, batches, world_size)
    if compilation.allowed:
        log("compiling: this takes minutes at first, and less when the caches are full")
    start = clock(device)
    if gpu_kernels:
        gpu_kernels.choose_kernels(model, hp, device, all_reduce_, log)
    elif on_gpu:
        log("kernels: none, gpu_kernels.py or Triton is missing")
    run.warm_up(model, optimizers, moments, device)
    log(f"compilation and warm-up, not part of train_time: {clock(device) - start:.1f} s")
    restore(model, optimizers, saved)
    saved.clear()  # frees more than the model's size
    if first_step or hp.init_from:
        log(f"resumed at step {first_step}" if first_step else f"weights of {hp.init_from}")
    optimizers.check()
    check_equal_weights(model, first_step)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    train_loader = distributed_data_generator(batches, hp, rank, world_size, device, first_step)
    note_signals()
    gc.freeze()  # garbage collection skips what exists now: it stays to the end
    atexit.register(gc.unfreeze)  # else Triton's bindings list what is left
    progress.start_clock(device)
    for now in moments[first_step:]:
        step = now.step  # steps made so far
        leave = step == hp.num_iterations or (progress.stop and step % optimizers.period == 0)
        due = leave or (hp.save_every and step % hp.save_every == 0)
        saves = hp.keep and step > first_step and due
        if now.validate or saves or leave:
            progress.read_results()  # here the time of the last step ends
            check_equal_weights(model, step)
            if now.validate:
                validate(progress, model, val_batch, now, device)
            if saves:
                save(progress, model, optimizers, step)
            progress.start_clock(device)
        if leave:
            break

        batch = next(train_loader)  # while a GPU computes the step before
        results = train_step(model, optimizers, *batch, now, stop=bool(stop_signals))
        progress.step_queued(now, results)

    log.bar.close()
    all_reduce_(torch.zeros(1, device=device)).item()  # waits until rank 0 has saved
    if step < hp.num_iterations:  # a signal has stopped the run
        number = signal.Signals(stop_signals[0][0] if stop_signals else signal.SIGTERM)
        remedy = f"saved; {command_to_resume(log)}" if hp.keep else "not saved"
        log(f"stopped by {number.name} after step {step}: {remedy}")
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.exit(128 + number)
    if on_gpu:
        allocated = torch.cuda.max_memory_allocated() >> 20
        reserved = torch.cuda.max_memory_reserved() >> 20
        log(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")


# -----------------------------------------------------------------------------
# Machine: devices, ranks, errors, the log, checkpoints, flags


BYTES_PER_TOKEN = 0.8e6  # of a GPU's memory, for a sequence: 40 GB for 49152 tokens


def memory_is_small(device: torch.device, tokens: int = 49152) -> bool:
    """Say whether a GPU has less memory than BYTES_PER_TOKEN for so many tokens."""
    if device.type == "cpu":
        return False
    return torch.cuda.get_device_properties(device).total_memory < BYTES_PER_TOKEN * tokens


def fp8_supported(device: torch.device) -> bool:
    """Say whether a device has fast FP8 matmuls: NVIDIA's from Ada on. AMD's formats differ."""
    is_nvidia = device.type == "cuda" and not torch.version.hip
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


# Asked here, because torch.compile cannot trace it. ONEDNN_MAX_CPU_ISA can forbid oneDNN to use the
# instructions, and matmuls in bfloat16 then take 13 times as long.
CPU_HAS_BFLOAT16 = (
    torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
)


def bfloat16_is_fast(device: torch.device) -> bool:
    """Say whether a device is a CPU with instructions for matmuls in bfloat16."""
    return device.type == "cpu" and CPU_HAS_BFLOAT16


VISIBLE = r"\d|GPU-|MIG-"  # how CUDA_VISIBLE_DEVICES begins, unless it hides all GPUs


def start_device(wanted: str) -> tuple[torch.device, int, int]:
    """Join the other ranks; return this one's device, its rank, their number. UserError if that is
    impossible."""
    device, gpus = torch.device("cpu"), torch.cuda.device_count()
    hidden = not re.match(VISIBLE, os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    if wanted == "cuda" or (wanted == "auto" and gpus):
        local_rank = os.environ.get("LOCAL_RANK", "0")
        if not gpus:
            raise UserError("--device cuda: torch finds no GPU, ./run.sh setup says why")
        if int(local_rank) >= gpus:
            raise UserError(f"process {local_rank} finds {gpus} GPUs: start fewer, or --device cpu")
        device = torch.device("cuda", int(local_rank))
        if torch.cuda.get_device_capability(device) < (8, 0):
            raise UserError(f"GPU {local_rank} has no bfloat16, unlike an A100: try --device cpu")
        torch.cuda.set_device(device)
    elif wanted == "auto" and not hidden and "GPU 0" in subprocess.getoutput("nvidia-smi -L"):
        raise UserError("torch cannot use this machine's GPUs: ./run.sh setup says why")
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return device, 0, 1
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun's store keeps its keys over a restart, so each start has a prefix of its own.
    store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(minutes=10)  # gloo's own is half an hour
    dist.init_process_group(backend, None, timeout, world_size=world_size, rank=rank, store=store)
    return device, rank, world_size


def refuse_tasks() -> None:
    """Raise UserError if this process is one of several tasks of srun or mpirun."""
    tasks = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # the last: MPICH, Intel
    for name, alone in {"SLURM_PROCID": "0", **dict.fromkeys(tasks, "1")}.items():
        if os.environ.get(name, alone) != alone:
            remedy = f"let it start torchrun, or unset {name} for a run in each"
            raise UserError(f"each task of srun or mpirun would train alone: {remedy}")


def all_reduce_(tensor: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place, and return it. A value that decides a branch (a loss,
    a signal to stop, a kernel's fault) is summed first: all ranks must take the same branches."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def same_on_all_ranks(number: Tensor) -> bool:
    """Say whether all ranks have the same integer ()."""
    extremes = torch.stack([number, -number])
    if dist.is_initialized():
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return extremes.sum().item() == 0


def check_equal_weights(model: GPT, step: int) -> None:
    """UserError on all ranks if their weights differ, by the sums of the weights' bits. A rank that
    changes more than its shards drifts away from the others, which nothing else would show."""
    if not dist.is_initialized():
        return
    flat = [p.detach().flatten().view(torch.int16) for p in model.parameters()]
    # In parts, because a sum copies its int16 into int64: 2.3 GB of GPU memory for 2026-07-17.
    bits = sum(part.sum() for numbers in flat for part in numbers.split(2**24))
    if not same_on_all_ranks(bits):
        remedy = "seed what a model draws, and let a rule change bank.shard and its state alone"
        raise UserError(f"ranks hold different weights after step {step}: {remedy}")


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# Slurm's --signal and time limits send the last three.
STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU, signal.SIGQUIT
stop_signals: list[tuple[int, float]] = []  # signals so far, with their times


def note_signal(number: int, frame) -> None:
    """Note a signal to stop: `train` saves and ends. A SIGINT a second later ends the process. An
    earlier one may be a copy: a launcher passes on a Ctrl-C that the terminal also sends."""
    now = time.monotonic()
    if stop_signals and number == signal.SIGINT and now > stop_signals[0][1] + 1:
        os._exit(130)
    stop_signals.append((number, now))
    if len(stop_signals) == 1 and rank_here() == "0":
        with contextlib.suppress(OSError):  # no print(), which may be running
            os.write(2, b"\nstopping after this step; a second Ctrl-C ends at once\n")


def note_signals() -> None:
    """Let note_signal handle the signals to stop, but for those that are ignored, as by nohup."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python lets no other thread handle signals
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note_signal)


class Console(io.FileIO):
    """Standard output or error that never raises: when a terminal, pipe or disk is gone, what is
    written is dropped, and the run, which has its log, goes on."""

    def write(self, data) -> int:
        with contextlib.suppress(OSError):
            super().write(data)
        return len(data)  # also if the reader of a pipe is too slow


def open_console(rank: str) -> None:
    """Make Consoles of the standard streams. Only rank 0 has an output."""
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:  # in place of what `>&-` has closed
        pass
    os.close(null)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is getattr(sys, f"__{name}__"):  # not what a caller has put there
            buffer = io.BufferedWriter(Console(number, "w", closefd=False))
            console = io.TextIOWrapper(buffer, "utf-8", "backslashreplace", line_buffering=True)
            setattr(sys, name, console)
    if rank != "0":
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def printable(text: str) -> str:
    """Return text for a terminal: control characters are escaped, except \\n and \\t."""
    odd = r"[^\n\t -~\xa0-\ud7ff\ue000-\U0010ffff]"
    return re.sub(odd, lambda match: ascii(match[0])[1:-1], text)


def rank_here() -> str:
    """Return the RANK that torchrun has set; "0" if this process is alone."""
    return os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"


def as_program(name: str, work: Callable) -> None:
    """Call work() as a command: a user's error becomes one line and status 1. Rank 0 reports its
    error at once. Other ranks, and any that only lost another rank, wait ten seconds, so that the
    original error is shown first and torchrun ends them."""
    rank = rank_here()
    open_console(rank)
    try:
        work()
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt:
        sys.exit(130)
    except (UserError, ImportError, SyntaxError, OSError, RuntimeError, MemoryError) as error:
        message = " ".join(str(error).split())[:500]
        lost = isinstance(error, dist.DistError) or re.search("gloo/|pair clos", message)
        if lost:
            message = f"another rank has stopped or hangs: {message}"
        elif isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "t allocate" in message:
            sizes = "--seq_len, --val_seq_len, --vocab_size, --model_dim or --num_layers"
            message = f"out of memory, make the largest of {sizes} smaller: {message}"
        elif re.search(r"Failed to find C compiler|No working C\+\+ compiler", message):
            message = f"torch.compile needs gcc and g++, or set CC and CXX to others: {message}"
        elif isinstance(error, RuntimeError):
            raise
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which torchrun ends a waiting rank
        if lost and stop_signals:
            signal.raise_signal(signal.SIGTERM)  # torchrun has asked for it already
        time.sleep(10 if rank != "0" or lost else 0)
        tqdm.write(f"{name}: error: {printable(message)}", sys.stderr)  # clears a bar
        sys.exit(1)


def to_json(value, **options) -> str:
    """Return JSON of a value. NaN and infinity, which JSON lacks, become null. UserError for what
    JSON cannot hold, such as a tensor in a Moment."""
    try:
        text = json.dumps(value)
    except TypeError as error:
        remedy = "a Moment has numbers; tensors of a step are returned by train_step"
        raise UserError(f"{error}: {remedy}") from error
    return json.dumps(json.loads(text, parse_constant=lambda name: None), **options)


def new_name() -> str:
    """Return a name for a run: the time, and a random part for those that start together."""
    return time.strftime("%Y-%m-%d_%H-%M-%S_") + os.urandom(3).hex()


class Log:
    """What rank 0 writes: the log, which begins with `header`, the metrics, and the console.
    logs/RUN_ID.jsonl has an object for each step: `step`, the number of steps made, and the other
    fields of the step's Moment; train_loss, before the update; ms, from the arrival of the previous
    step's result to this one's; tokens_per_s; and what else train_step returns. Another object has
    a step's val_loss. If a step has several objects, the last value of a field counts."""

    def __init__(self, run, record: str, hp: Hyperparameters, rank: int, sources: list[str]):
        self.run, self.record, self.hp, self.rank, self.sources = run, record, hp, rank, sources
        names = [hp.run_id or new_name()]
        if dist.is_initialized():
            dist.broadcast_object_list(names)  # all ranks take that of rank 0
        self.run_id = names[0]
        self.path = Path("logs", f"{self.run_id}.txt")
        self.file = self.metrics = sys.stdout  # of other ranks it goes nowhere
        self.before = ""  # what earlier starts of the run have written
        if rank == 0:
            self.open_files()
        # A terminal that says that it has no columns gets lines, as a pipe does.
        has_bar = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns
        self.bar = tqdm(
            total=hp.num_iterations,
            file=sys.stdout,
            leave=False,
            disable=not has_bar,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
        )
        self.lost = False  # whether a line could not be written

    def open_files(self) -> None:
        """Open the log and the metrics, to append to them, without an incomplete last line. If
        there is no checkpoint to resume from, those of an earlier start are put aside. UserError if
        another process writes the log, or if a file of the run exists and --resume is off."""
        folder, metrics = self.path.with_suffix(""), self.path.with_suffix(".jsonl")
        (folder if self.hp.keep else folder.parent).mkdir(parents=True, exist_ok=True)
        saved = checkpoints(folder)
        begun = [f for f in (self.path, metrics, *saved) if f.exists() and f.stat().st_size]
        if begun and not self.hp.resume:
            raise UserError(f"{begun[0]} exists: choose another --run_id, or --resume on")
        self.open_locked()
        if begun and not saved:
            text = self.path.read_text("utf-8", errors="replace")
            if re.search(r"^step:(\d+)/\1 val_loss", text, re.M):
                reason = "is of a finished run, which has no checkpoint"
                raise UserError(f"{self.path} {reason}: choose another --run_id")
            suffix = f"_{new_name()}.unfinished"
            for file in begun:
                file.rename(f"{file}{suffix}")
            tqdm.write(f"an earlier start saved nothing: its log is now {self.path}{suffix}")
            self.open_locked()
        self.metrics = metrics.open("a", buffering=1)
        for file in (self.file, self.metrics):
            file.truncate(Path(file.name).read_bytes().rfind(b"\n") + 1)
        self.before = self.path.read_text("utf-8", errors="replace")

    def open_locked(self) -> None:
        """Open the log, and lock it while the process lives."""
        self.file = self.path.open("a", buffering=1, encoding="utf-8")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            reason = f"another process is writing {self.path}"
            raise UserError(f"{reason}: choose another --run_id") from error
        except OSError as error:
            tqdm.write(f"{self.path} cannot be locked ({error.strerror}): start this run only once")

    def __call__(self, line: str, row: dict | None = None, shown: bool = True) -> None:
        """Write a line to the log, and show it on the console. Write a row of the metrics. A full
        disk costs lines, not the run."""
        try:
            print(line, file=self.file)
            if row:
                print(to_json(row), file=self.metrics)
        except OSError as error:
            if not self.lost:
                self.bar.write(f"could not write {self.path}, the run continues: {error.strerror}")
            self.lost = True
        if shown:
            self.bar.write(line)


def check_loss(loss: float, step: int) -> None:
    """Raise UserError if a loss is not finite. All ranks have the same one."""
    if not math.isfinite(loss):
        remedy = "try lower rates, smaller initial weights or --fp8 off"
        raise UserError(f"the loss is {loss} at step {step}: {remedy}")


def has_diverged(loss: float, hp: Hyperparameters) -> bool:
    """Say whether a run's last loss is above that of a uniform guess."""
    return not loss <= math.log(hp.vocab_size)


class Progress:
    """The host's view of the run, one step late: it reads a step's results, which train_step
    returns, while a GPU computes the next step.

    A stop signal travels with the loss: any rank notes it, the next train_step sums it, and all
    ranks see `stop` when they read that result."""

    def __init__(self, log: Log, step: int, seconds: float):
        self.log, self.hp = log, log.hp
        self.step, self.seconds = step, seconds  # steps made, and their time
        self.ended = 0.0  # when the last one ended, or the clock was started
        self.now = self.arrival = None  # of the step whose results are not read
        self.results: dict[str, Tensor] = {}  # on the host when `arrival` is reached
        self.stop = False  # whether a rank had a signal to stop

    @property
    def times(self) -> str:
        """The time of all steps, as a line of the log says it."""
        ms = 1e3 * self.seconds
        return f"train_time:{ms:.0f}ms step_avg:{ms / max(self.step, 1):.2f}ms"

    def start_clock(self, device: torch.device) -> None:
        """Count the next step's time from here on."""
        self.ended = clock(device)

    def step_queued(self, now: Moment, results: dict[str, Tensor]) -> None:
        """Read the results of the step before, and start to copy this one's to the host."""
        self.read_results()
        values = torch.stack([*results.values()])
        self.now = now
        self.results = dict(zip(results, values.to("cpu", non_blocking=True), strict=True))
        if values.is_cuda:
            self.arrival = torch.cuda.current_stream().record_event()
        else:
            self.read_results()

    def read_results(self) -> None:
        """If a step's results are not read, wait until they are on the host, and write its line of
        the log and its row of the metrics. UserError if its loss is not finite."""
        if not self.results:
            return
        if self.arrival is not None:
            self.arrival.synchronize()
        seconds = time.perf_counter() - self.ended
        self.ended += seconds
        self.seconds += seconds
        results = {name: value.item() for name, value in self.results.items()}
        self.results = {}
        self.stop = results.pop("stop") > 0
        loss = results.pop("loss")
        self.step = self.now.step + 1
        rate = round(self.hp.batch_seqs * self.now.seq_len / seconds)
        row = vars(self.now) | {"step": self.step, "train_loss": loss}
        row |= {"ms": round(1e3 * seconds, 3), "tokens_per_s": rate} | results
        line = f"step:{self.step}/{self.hp.num_iterations} {self.times} train_loss:{loss:.4f}"
        bar = self.log.bar
        self.log(line, row, shown=bar.disable)  # else the bar shows it
        bar.update(self.step - bar.n)
        left = tqdm.format_interval((self.hp.num_iterations - self.step) * seconds)  # at this rate
        bar.set_postfix_str(f"loss {loss:.3f}, {rate / 1e3:.1f}k tokens/s, {left} left")
        check_loss(loss, self.step)


def introduce(log: Log, model: GPT, batches: list, ranks: int) -> None:
    """Write the header of a new log, and say what runs, and where."""
    hp, device = model.hp, next(model.parameters()).device
    on_gpu = device.type == "cuda"
    if log.rank == 0 and not log.before:
        log(header(log), shown=False)
        if log.lost:
            raise UserError(f"the header of {log.path} could not be written: is the disk full?")
    elif log.rank == 0:
        wanted = {"source": log.sources}
        for name in ("train_files", "val_files"):
            wanted[name] = [f"\n{name}: {show(getattr(hp, name))}\n"]
        for name, texts in wanted.items():
            if not all(text in log.before for text in texts):
                log(f"the {name} is not the one with which this run began")
    log(shlex.join(["record", log.record, *flags_of(hp, log.run.records[log.record])]))
    place = torch.cuda.get_device_name() if on_gpu else "CPU"
    log(f"on {ranks} x {place}, log in {log.path}, process {os.getpid()} on {os.uname().nodename}")
    if log.record == "demo" and hp.device == "auto" and not on_gpu:
        log("no GPU found: this is a small demonstration")
    if hp.end_of_text not in batches[0][0]:
        log(f"the first shard has no token {hp.end_of_text}: its text counts as one document")
    if hp.fp8 and not fp8_supported(device) and (on_gpu or bfloat16_is_fast(device)):
        log("there is no FP8 here: the head trains in bfloat16")
    pieces = f" and {n} that ranks share out" if (n := model.numbers_in_pieces) else ""
    log(f"parameters: {sum(p.numel() for p in model.parameters())}{pieces}")


def validate(progress: Progress, model: GPT, batch: tuple, now: Moment, device) -> None:
    """Write the validation loss of a moment. UserError if it is not finite."""
    hp, step, log = model.hp, now.step, progress.log
    log.bar.set_postfix_str("validating")
    loss = evaluate(model, batch, now, device)
    line = f"step:{step}/{hp.num_iterations} val_loss:{loss:.5f} {progress.times}"
    log(line, {"step": step, "val_loss": loss})
    check_loss(loss, step)
    if step == hp.num_iterations and has_diverged(loss, hp):
        log("the run has diverged: its last loss is above that of a uniform guess")


def save(progress: Progress, model: GPT, optimizers, step: int) -> None:
    """Save a checkpoint after a step. All ranks must call this. UserError if a weight is not
    finite, or if it cannot be written."""
    hp, log = model.hp, progress.log
    if not all(p.isfinite().all() for p in model.parameters()):
        raise UserError(f"a weight is not finite after step {step}: lower the rates")
    # No run resumes from the last step. All ranks must call state_dict.
    states = {} if step == hp.num_iterations else optimizers.state_dict()
    path = Path("logs", log.run_id, f"state_step{step:06}.pt")
    model.save_pieces(path)
    if optimizers.rank == 0:
        state = {
            "script": script_of(log.run).name,
            "record": log.record,
            "hyperparameters": dict(vars(hp)),
            "step": step,
            "seconds": progress.seconds,
            # Weights are views: torch.save would write all that they are views of.
            "model": {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()},
            "optimizers": states,
        }
        save_checkpoint(path, state, hp.keep)


def script_of(run) -> Path:
    """Return the file that defines a Run: train_gpt.py, or a fork. UserError if none does."""
    with contextlib.suppress(OSError, TypeError):  # a class of a notebook has no file
        if os.path.isfile(path := inspect.getfile(run)):
            return Path(path).resolve()
    raise UserError("save the class Run as a script, and start that: logs hold its source")


def sources_of(run) -> list[str]:
    """Return the source of the started script, and of the files that it imports: those of the
    project, and those beside it, packages included. Their names precede them."""
    script = script_of(run)
    folders = [script.parent, HERE, HERE / "forks", HERE / "forks" / "optimizers"]
    names = {script: ""}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        is_installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
        if is_installed or name.split(".")[0] in sys.stdlib_module_names:
            continue  # not a thousand of torch's, whose paths take time
        path = Path(file).resolve()
        in_package = "." in name or hasattr(module, "__path__")
        is_ours = path.parent in folders or (in_package and path.is_relative_to(script.parent))
        if is_ours and path.is_file():
            names.setdefault(path, f"{name.replace('.', '/')}.py:\n")
    texts = []
    for path, name in names.items():
        texts.append(name + (SOURCES.get(path) or path.read_text("utf-8", errors="replace")))
    return texts


def header(log: Log) -> str:
    """Return how a log begins: the source of the started script alone, then versions, machine,
    settings, and other sources. A RULE follows each part."""
    command = ["sh", "-c", "nvidia-smi || lscpu || sysctl machdep.cpu"]
    settings = [f"{name}: {show(value)}" for name, value in vars(log.hp).items()]
    sections = [
        log.sources[0],
        f"Python {sys.version}\ntorch {torch.__version__} CUDA {torch.version.cuda}",
        subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace").stdout,
        "\n".join([f"script: {script_of(log.run).name}", *settings]),
        *log.sources[1:],
    ]
    return "\n".join(f"{section}\n{RULE}" for section in sections)


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, newest first. Other names are not ours."""
    found = [path for path in folder.glob("*") if re.fullmatch(r"state_step\d{6,}\.pt", path.name)]
    return sorted(found, key=lambda path: int(path.stem.removeprefix("state_step")), reverse=True)


@contextlib.contextmanager
def written_whole(path: Path, unfinished: Path) -> Iterator:
    """Open a file to write. It gets its path when it is complete. An error leaves nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    except Exception as error:  # torch's writer turns the system's errors into RuntimeErrors
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise UserError(f"could not save {path}: {error.__context__ or error}") from error


def save_checkpoint(path: Path, state: dict, keep: int) -> None:
    """Save a checkpoint completely or not at all. Keep this one, and others of the highest steps.
    Pieces beside it, which a fork has saved before, are removed with their checkpoint. UserError if
    it cannot be saved there: it says whether the checkpoint is in TMPDIR or the like instead."""
    folder = path.parent
    try:
        with written_whole(path, folder / "unfinished.tmp") as file:
            torch.save(state, file)
    except UserError as error:
        remedy = ""
        with contextlib.suppress(OSError, UserError):
            name = f"{folder.name}_{os.urandom(3).hex()}_{path.name}"  # others may save there, too
            elsewhere = Path(tempfile.gettempdir(), name)
            with written_whole(elsewhere, elsewhere.with_suffix(".tmp")) as file:
                torch.save(state, file)
            remedy = f"; it is {elsewhere}: move it to {path}, and the run resumes"
        raise UserError(f"{error}{remedy}") from error
    before = [old for old in checkpoints(folder) if old != path]
    for old in before[keep - 1 :]:
        old.unlink(missing_ok=True)
    for piece in folder.glob("*"):
        is_ours = re.fullmatch(r"state_step\d{6,}\.pt\.\d+of\d+", piece.name)
        if is_ours and not piece.with_suffix("").exists():
            piece.unlink()


def load_checkpoint(path: str | Path, run, weights_alone: bool = False) -> dict:
    """Return a checkpoint, on the CPU: what `train` saves, or only `model` of a published one.
    UserError if the file is damaged, no checkpoint, or of a script with other settings, unless
    weights alone are wanted."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not notice flipped bytes
            if archive.testzip():
                raise zipfile.BadZipFile
        state = torch.load(path, map_location="cpu", weights_only=True)
        state["model"] = {k.removeprefix("_orig_mod."): v for k, v in state["model"].items()}
        if "hyperparameters" in state and not weights_alone:
            known = run.records.get(state["record"])
            if known is None or vars(known).keys() != state["hyperparameters"].keys():
                raise UserError(f"{path} is a checkpoint of another edition of {state['script']}")
            state["hyperparameters"] = replace(known, **state["hyperparameters"])
        return state
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:  # without its text: torch's own advice is an unsafe load
        raise UserError(f"{path} is not an intact checkpoint ({type(error).__name__})") from error


def restore(model: GPT, optimizers, saved: dict) -> None:
    """Load a checkpoint's weights and, into optimizers that are not None, its state. UserError if
    they do not fit."""
    try:
        model.load_state_dict(saved["model"])
        if optimizers is not None:
            optimizers.load_state_dict(saved["optimizers"])
            model.load_pieces(saved.get("path"), weights_only=not saved["optimizers"])
    except (KeyError, RuntimeError) as error:
        raise UserError(f"the checkpoint is not one of this model: {error}") from error


def beginning(run, hp: Hyperparameters, model: GPT) -> dict:
    """Return what a run begins from: its newest checkpoint, given weights, or those of the model.
    They are on the CPU. UserError for the checkpoint of another program."""
    paths = checkpoints(Path("logs", hp.run_id)) if hp.resume else []
    if not paths and hp.init_from:
        weights = load_checkpoint(hp.init_from, run, weights_alone=True)["model"]
        saved = {"model": weights, "optimizers": {}}
        restore(model, None, saved)
        return saved | {"path": Path(hp.init_from)}
    if not paths:  # a copy, because the warm-up changes the weights
        weights = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
        return {"model": weights, "optimizers": {}}
    path = paths[0]
    saved = load_checkpoint(path, run) | {"path": path}
    author = saved.get("script", "another program")
    may_change = {f.name: getattr(hp, f.name) for f in fields(RunSettings)}
    then = replace(saved.get("hyperparameters", hp), **may_change)
    changed = changed_flags(hp, then)
    if changed or author != script_of(run).name:
        theirs = f"{author} {shlex.join(changed_flags(then, hp))}".rstrip()
        yours = shlex.join([script_of(run).name, *changed])
        remedy = f"--run_id OTHER --init_from {path} begins a new run from its weights, if they fit"
        raise UserError(f"{path} was saved by {theirs}, and this is {yours}: {remedy}")
    return saved


def parse_args(argv: list[str] | None, run) -> tuple[Hyperparameters, str]:
    """Return the settings that flags ask for, and the record's name. UserError for a bad flag."""
    on_cpu = "demo" in run.records and not torch.cuda.is_available()
    usual = "demo" if on_cpu else run.default_record
    text = f"settings to start from, or a beginning of: {', '.join(run.records)} [{usual}]"
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--record", nargs="?", const="", default=usual, help=text)
    record = first.parse_known_args(argv)[0].record
    if record not in run.records:
        names = [n for n in run.records if n.replace("_", "").startswith(record.replace("_", ""))]
        if len(names) != 1:
            names = names or difflib.get_close_matches(record, run.records, 1) or run.records
            raise UserError(f"--record {record}: must be one of {', '.join(names)}")
        record = names[0]
    default = run.records[record]
    parser = argparse.ArgumentParser(
        usage=f"{script_of(run).name} [--record NAME] [--SETTING VALUE ...]",
        description=f"The values in brackets are those of {record}.",
        parents=[first],
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    comments = {}  # after the settings
    for cls in reversed(type(default).__mro__[:-1]):
        source = Path(inspect.getfile(cls)).read_text("utf-8")
        comments |= re.findall(r"^    (\w+): [^=\n]* = .*  # (.*)$", source, re.MULTILINE)
    for f in fields(default):
        value = getattr(default, f.name)
        options = {"type": type(value), "choices": get_args(f.type) or None}
        if isinstance(value, bool):
            options = {"type": str.lower, "choices": ("on", "off", "true", "false")}
        elif isinstance(value, tuple):
            options = {"type": float, "nargs": len(value)}
        text = f"{comments.get(f.name, '')} [{show(value)}]".replace("%", "%%")
        parser.add_argument(f"--{f.name}", help=text, **options)
    try:
        given, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(error) from error
    if unknown:
        word = unknown[0].strip("-").partition("=")[0]
        near = difflib.get_close_matches(word, vars(default), n=1, cutoff=0.7)
        near = near or [name for name in vars(default) if word in name.split("_")]
        remedy = f"is it --{' or --'.join(near)}? --help" if near else "--help"
        if unknown[0].endswith(".bin"):
            remedy = "a pattern must be quoted, as '*.bin'; --help"
        raise UserError(f"unknown words: {' '.join(unknown):.200}; {remedy} lists the flags")
    given = {name: value for name, value in vars(given).items() if name != "record"}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
        elif isinstance(getattr(default, name), bool):
            given[name] = value in ("on", "true")
    hp = replace(default, **given)
    run.check(hp)
    return hp, record


def show(value) -> str:
    """Return a setting's value as typed on the command line; paths are relative to this file."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(show(part) for part in value)
    return str(value).removeprefix(f"{HERE}/").removeprefix(f"{glob.escape(str(HERE))}/")


def check(hp: Hyperparameters) -> None:
    """Raise UserError for settings that are never valid."""
    if not re.fullmatch(r"(?!results$|.*\.(txt|jsonl)$)(\w[\w.,+=@:-]*)?", hp.run_id):
        raise UserError(f"--run_id {hp.run_id}: must be a plain name, not results or *.txt")
    if hp.resume and not hp.run_id:
        raise UserError("--resume on: say which run with --run_id NAME")
    for name, value in vars(hp).items():
        numbers = [] if isinstance(value, str) else np.ravel(value)
        if not all(0 <= number < math.inf for number in numbers):
            raise UserError(f"--{name} {show(value)}: must be at least 0, and finite")
    units = {"seq_len": BLOCK, "val_seq_len": BLOCK, "val_tokens": hp.val_seq_len, "head_dim": 4}
    positive = ("num_iterations", "momentum_warmup_steps", "window_step", "batch_seqs")
    for name in (*units, *positive, "num_layers", "num_heads", "model_dim", "vocab_size"):
        value, unit = getattr(hp, name), units.get(name, 1)
        if value == 0 or value % unit:
            raise UserError(f"--{name} {value}: must be a positive multiple of {unit}")
    used = hp.end_of_text + 1  # GPT-2's ids are 256 bytes, then merges in their order
    padded = -(-used // 128) * 128
    fits = 256 < used <= 50257 and used <= hp.vocab_size <= padded
    if hp.tokenizer == "gpt2" and not fits:
        found = f"--vocab_size {hp.vocab_size} contradicts --end_of_text {hp.end_of_text}"
        rule = "all of GPT-2's tokens need 50257 and 50256, the first N of them N + 1 and N"
        raise UserError(f"{found}: {rule}, and other tokens --tokenizer none")
    if hp.tokenizer not in ("gpt2", "none") and not os.path.isfile(hp.tokenizer):
        raise UserError(f"--tokenizer {hp.tokenizer}: must be gpt2, none, or a tokenizer.json")


def changed_flags(hp: Hyperparameters, then: Hyperparameters) -> list[str]:
    """Return the settings that are not as they were then, as words of a command line."""
    words = []
    for name, value in vars(hp).items():
        if value != getattr(then, name):
            words += [f"--{name}", *([value] if isinstance(value, str) else show(value).split())]
    return words


def flags_of(hp: Hyperparameters, usual: Hyperparameters) -> list[str]:
    """Return the flags that make these settings of the usual ones, without the run's name."""
    return changed_flags(replace(hp, run_id="", resume=False), usual)


def command_to_resume(log: Log) -> str:
    """Return the words of a message: the command that resumes this run."""
    words = [f"{HERE}/run.sh", str(script_of(log.run)), "--record", log.record]
    words += flags_of(log.hp, log.run.records[log.record])
    words += ["--run_id", log.run_id, "--resume", "on"]
    return f"resume with cd {shlex.quote(os.getcwd())} && {shlex.join(words)}"


class Run:
    """Parts that a fork can replace, as class attributes of its own Run: GPT = MyGPT. There is no
    object of this class. To replace anything else, assign it: train_gpt.muon = my_muon."""

    records = RECORDS
    default_record = "2025-01-26_BatchSize"  # without --record; on a CPU, the demo
    GPT = GPT
    Optimizers = Optimizers
    Moment = Moment
    check = staticmethod(check)
    plan = staticmethod(consecutive)
    warm_up = staticmethod(warm_up)

    def __init_subclass__(cls):
        unknown = [name for name in vars(cls) if name[0] != "_" and not hasattr(Run, name)]
        if unknown:
            raise UserError(f"{cls.__module__}.Run.{unknown[0]}: a Run has no such part to replace")


def refuse_assignments(run) -> None:
    """Raise UserError if a fork assigned what nothing reads, or trains another Run than its own."""
    own = getattr(sys.modules["__main__"], "Run", Run)
    if own not in (Run, run) and isinstance(own, type) and issubclass(own, Run):
        file = sys.modules["__main__"].__file__
        raise UserError(f"{file} has a class Run, which must be given: main(run=Run)")
    known = [n for n, value in AT_IMPORT.items() if getattr(value, "__module__", "") == __name__]
    for name, value in globals().items():
        if name not in AT_IMPORT and name[0] != "_":
            near = difflib.get_close_matches(name, known, 1, cutoff=0.4) or ["one of its names"]
            raise UserError(f"{name}: nothing reads this assignment; is it {near[0]}?")
        if name in IN_RUN and value is not AT_IMPORT[name]:
            raise UserError(f"{name}: nothing reads this assignment; set it in a class Run")


IN_RUN = {"GPT", "Optimizers", "Moment", "check", "consecutive", "warm_up", "RECORDS", "compiled"}
IN_RUN |= {"Hyperparameters", "RunSettings", "WINDOW_WARMUP", "LAYERS_2025", "FINEWEB", "SAMPLE"}


def main(argv: list[str] | None = None, run: type[Run] = Run) -> None:
    """Run the command line of this file, or of a fork whose Run is given."""
    file = getattr(sys.modules[run.__module__], "__file__", "notebook")
    as_program(Path(file).name, lambda: train(run, *parse_args(argv, run)))


AT_IMPORT = {}  # all names of this file
AT_IMPORT |= globals()

if __name__ == "__main__":
    main()
