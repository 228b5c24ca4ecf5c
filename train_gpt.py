"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # the record, on a node of 8 H100s
    python train_gpt.py                                      # one GPU; without one, a small demo
    python train_gpt.py --help                               # every setting is a flag

The default is the NanoGPT-speedrun record 2025-01-26_BatchSize: 3.28 after 1770 steps of 393216
tokens, published as 2.93 minutes on 8 H100s. --record selects others: two of 2024, and the demo.
forks/train_gpt_2026.py has later records. Settings and ideas come from
github.com/KellerJordan/modded-nanogpt and the people named there. BENCHMARKS.md lists what was
measured with this implementation.

Importing this file starts nothing. Its sections, in order:

    Settings         every setting of a run, with its flag; the records; the table of layers
    Data             shards of tokens, and batches as a function of the step
    Schedules        learning rate, window and momentum as functions of the step
    Numerics         FP8 matmuls, the linear layer that uses them, functions with a Triton version
    Model            masks, attention, layers, and a head whose loss never stores the logits
    Optimizers       Muon and Adam as update rules, and how ranks share them
    Machine          errors, devices, ranks, signals, the log
    Run              flags, checkpoints, warm-up, the timed loop

kernels.py has the Triton versions ("twins"). Without it, plain functions compute the same.
"""

import argparse
import contextlib
import ctypes
import difflib
import fcntl
import gc
import glob
import inspect
import itertools
import json
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import TextIO

if "OMP_WAIT_POLICY" not in os.environ and os.path.exists("/proc/loadavg"):
    # OpenMP threads spin while they wait for each other. On a busy machine, a long spin makes a
    # step several times as long; on an idle one, a short spin costs a little (BENCHMARKS.md). GNU
    # OpenMP reads GOMP_SPINCOUNT when torch loads it. The fourth field of /proc/loadavg, such as
    # "2/80", says that 2 of 80 threads can run now. The load averages, the first three fields,
    # still count a program that has just ended.
    runnable = []
    for _ in range(3):
        runnable.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]))
        time.sleep(0.01)
    if min(runnable) > 1:  # each time, more threads than this one
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.optim.adam import adam as torch_adam
from tqdm import tqdm

try:
    # PyPI has another package `kernels`. It lacks these names, so importing them fails, too.
    from kernels import TWINS, fault, obstacle
except ImportError:
    TWINS, fault = {}, None  # fault is never called: obstacle() always gives a reason

    def obstacle(device: torch.device) -> str:
        """Say why Triton cannot run."""
        return "kernels.py or Triton is missing"


HERE = Path(__file__).resolve().parent
FINEWEB = f"{HERE}/data/fineweb10B/fineweb"
SAMPLE = f"{HERE}/data/kjv"  # the King James Bible
BLOCK = 128  # tokens in a block of the attention mask; sequences are whole blocks
END_OF_TEXT = 50256  # the GPT-2 token that begins every document


class UserError(ValueError):
    """An error shown in one line, without a traceback: what is wrong, where, and what to do."""


class OtherScriptError(UserError):
    """Another script saved the checkpoint."""


# -----------------------------------------------------------------------------
# Settings: each has a legal range and a flag; a record has a value for each setting


def setting(
    default,
    meaning: str,
    least: float | None = None,
    most: float = math.inf,
    *,
    multiple_of: int | None = None,
    choices: tuple[str, ...] | None = None,
    group: str | None = None,
    about: str = "learning",
):
    """Return a field of Hyperparameters with its help text and legal range.

    `least` defaults to 1 for an integer and 0 for another number. `group` begins a group of --help.
    A setting about "learning" must stay the same when a run is resumed. One about the "run" may
    change. One about the "machine" is not saved in checkpoints.
    """
    if least is None:
        least = 1 if type(default) is int else 0
    metadata = {
        "help": meaning,
        "legal": (least, most, multiple_of),
        "choices": choices,
        "group": group,
        "about": about,
    }
    return field(default=default, metadata=metadata)


of_run = partial(setting, about="run")
of_machine = partial(setting, about="machine")
SWITCH = ("auto", "on", "off")
Pair = tuple[float, float]

# Values of `layers`: a row for each layer. layer_table explains them.
LAYERS_2024 = ",".join(["long+vfirst"] * 12)
LAYERS_2025 = (
    "long+v0,short+v1,short+v2,short,long,short,short,none,short,short+v0,short+v1,long+v2"
)


@dataclass(frozen=True)
class Hyperparameters:
    """Every setting of a run; each is a flag of the same name. Defaults: 2025-01-26_BatchSize."""

    num_iterations: int = setting(1770, "training steps", group="schedule")
    warmup_steps: int = setting(0, "steps of linear learning-rate warm-up", 0)
    cooldown_frac: float = setting(0.4, "share of the steps in which the learning rate falls")
    lr_final: float = setting(0.1, "learning-rate multiplier at the last step")
    window_rule: str = setting("blocks", "unit of attention windows", choices=("blocks", "tokens"))
    window_min: int = setting(128, "long attention window at step 0, in tokens")
    window_span: int = setting(1728, "rule blocks: final window; tokens: growth from window_min", 0)
    window_step: int = setting(128, "the window is a multiple of this many tokens")

    batch_seqs: int = setting(8, "sequences in a batch of all ranks together", group="batch")
    seq_len: int = setting(49152, "tokens in a training sequence", BLOCK, multiple_of=BLOCK)
    val_seq_len: int = setting(262144, "tokens in a validation sequence", BLOCK, multiple_of=BLOCK)
    val_tokens: int = setting(10485760, "validation tokens, from the start of the stream")
    epochs: int = setting(1, "largest number of passes over the training shards, 0 for no limit", 0)

    layers: str = setting(LAYERS_2025, "window and extra values of each layer", group="model")
    num_layers: int = setting(12, "layers in use: the first and last num_layers/2 of `layers`", 2)
    num_heads: int = setting(6, "attention heads")
    head_dim: int = setting(128, "channels in a head", 4, multiple_of=4)
    model_dim: int = setting(768, "channels of the residual stream", 16, multiple_of=16)
    vocab_size: int = setting(50257, "token ids; the head is padded to a multiple of 128")
    init_bound: float = setting(0.75**0.5, "initial hidden weights are within this / sqrt(fan_in)")
    attn_scale: float = setting(0.12, "factor on the products of q and k; 0: head_dim**-0.5")
    rope: str = setting("half", "share of the channels that rotate", choices=("half", "full"))
    rope_base: float = setting(1024.0, "rotary frequencies fall from 1 to about 1/rope_base", 1)
    # F.rms_norm's default for bfloat16 when the records ran (BENCHMARKS.md); now it is 2^-23.
    norm_eps: float = setting(2.0**-7, "RMSNorm's epsilon", 1e-12)
    logit_softcap: float = setting(15.0, "logits become cap * tanh(logit / cap)", 1e-3, 38)
    seed: int = setting(0, "seed of the initial weights", 0, 2**63 - 1)

    # Output projections begin at zero. Until they grow, the gradients of scalars are rounding
    # noise, and with so small an epsilon Adam takes full steps along that noise.
    adam_eps: float = setting(1e-10, "Adam's epsilon", group="optimizers")
    adam_betas: Pair = setting((0.8, 0.95), "Adam's betas", 0, 0.9999)
    embed_lr: float = setting(0.6, "Adam's learning rate for token and value embeddings")
    head_lr: float = setting(0.008, "Adam's learning rate for the head")
    scalar_lr: float = setting(0.04, "Adam's learning rate for scalars")
    muon_lr: float = setting(0.05, "Muon's learning rate for hidden matrices")
    momentum_start: float = setting(0.85, "Muon's momentum at step 0")
    momentum_end: float = setting(0.95, "Muon's momentum after its ramp")
    momentum_warmup_steps: int = setting(300, "steps of the momentum's linear ramp")
    momentum_damped: bool = setting(True, "momentum is an average of gradients; off: a sum")
    grad_clip: float = setting(0.0, "largest global L2 norm of the gradient, 0 for no limit")

    fp8: bool = setting(True, "train the head in FP8 on GPUs with FP8", group="FP8")
    x_s: float = setting(2.0, "scale of the head's input", 1e-6)
    w_s: float = setting(2.0**9, "scale of the head's weight", 1e-6)
    grad_s: float = setting(2.0**19, "scale of the logits' gradient", 1e-6)
    bfloat16_head: bool = setting(False, "train the head in bfloat16 on CPUs with AVX512-BF16")

    train_files: str = of_run(f"{FINEWEB}_train_*.bin", "glob for training shards", group="run")
    val_files: str = of_run(f"{FINEWEB}_val_*.bin", "glob for validation shards")
    val_loss_every: int = of_run(125, "steps between validations, 0 for the last step only", 0)
    run_id: str = of_run("", "name of the log, logs/RUN_ID.txt; if empty, made from the time")
    save_every: int = of_run(0, "steps between checkpoints, 0 for none before the end", 0)
    save_last: bool = of_run(True, "save the weights at the end, even if save_every is 0")
    keep: int = of_run(2, "newest checkpoints of a run to keep")
    comm_timeout: int = of_run(600, "seconds after which ranks stop waiting for each other")
    device: str = of_machine("auto", "auto: cuda if available", choices=("auto", "cuda", "cpu"))
    compile: str = of_machine("auto", "torch.compile; auto: on a GPU", choices=SWITCH)
    kernels: str = of_machine(
        "auto", "Triton kernels; auto: those that pass a check", choices=SWITCH
    )

    @property
    def padded_vocab(self) -> int:
        """The rows of the head: vocab_size, rounded up to a multiple of 128."""
        return -(-self.vocab_size // 128) * 128


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
    layers=LAYERS_2024,
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
    # 2025-01-26 at a size that two CPU cores train in a few minutes, on the sample corpus.
    "demo": Hyperparameters(
        num_iterations=128,
        window_span=256,
        seq_len=256,
        val_seq_len=1024,
        val_tokens=65536,
        num_layers=4,
        num_heads=2,
        head_dim=64,
        model_dim=128,
        norm_eps=2.0**-23,
        bfloat16_head=True,
        train_files=f"{SAMPLE}_train_*.bin",
        val_files=f"{SAMPLE}_val_*.bin",
        val_loss_every=64,
    ),
}


@dataclass(frozen=True)
class Layer:
    """One row of `layers`: a layer's attention window and extra values."""

    window: str  # "long", "short" (half of the long one), or "none": no attention
    values: str | None = None  # mixed into v: embedding table "0" to "9", or "first": the first v


def layer_table(hp: Hyperparameters) -> tuple[Layer, ...]:
    """Return the layers in use: the first and the last num_layers / 2 rows of hp.layers.

    A row is a window; then perhaps +v0 to +v9 (values from that embedding table) or +vfirst (the
    first layer's values). Both are from arXiv 2410.17897. UserError for other rows.
    """
    rows = hp.layers.split(",")
    table = []
    for row in rows:
        found = re.fullmatch(r"(long|short)(\+v(\d|first))?|none", row)
        if not found:
            form = "a row is long, short or none; after long or short, +v0 to +v9 or +vfirst"
            raise UserError(f"--layers: {row!r} is not a layer; {form}")
        table.append(Layer(window=row.split("+")[0], values=found[3]))
    if hp.num_layers > len(rows) or hp.num_layers % 2:
        rule = f"must be even, and at most the {len(rows)} rows of --layers"
        raise UserError(f"--num_layers {hp.num_layers}: {rule}")
    half = hp.num_layers // 2
    return tuple(table[:half] + table[len(rows) - half :])


def names_about(settings_class, *about: str) -> list[str]:
    """Return the names of the settings that are about "learning", the "run" or the "machine"."""
    return [f.name for f in fields(settings_class) if f.metadata["about"] in about]


def show(value) -> str:
    """Return a setting's value as typed on the command line; paths are relative to this file."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(show(part) for part in value)
    if isinstance(value, float):
        return f"{value:.10g}"
    return str(value).removeprefix(f"{HERE}/")


def check_ranges(hp: Hyperparameters) -> None:
    """Raise UserError for a setting outside its legal range."""
    for f in fields(hp):
        value = getattr(hp, f.name)
        if isinstance(value, str):
            continue  # argparse checks its choices
        least, most, multiple_of = f.metadata["legal"]
        numbers = value if isinstance(value, tuple) else (value,)
        in_range = all(least <= number <= most for number in numbers)
        if in_range and (multiple_of is None or value % multiple_of == 0):
            continue
        rule = f"at least {least}" if most == math.inf else f"from {least} to {most}"
        if multiple_of is not None:
            rule += f", a multiple of {multiple_of}"
        raise UserError(f"--{f.name} {show(value)}: must be {rule}")


def check(hp: Hyperparameters) -> None:
    """Raise UserError for invalid settings."""
    layer_table(hp)
    check_ranges(hp)
    if hp.val_tokens % hp.val_seq_len:
        raise UserError(f"--val_tokens {hp.val_tokens}: must be a multiple of val_seq_len")


# -----------------------------------------------------------------------------
# Data: shards of GPT-2 tokens, and batches that depend on the step alone


def load_data_shard(path: str | Path) -> Tensor:
    """Return the tokens of a shard, (n,) uint16, memory-mapped.

    The format is llm.c's: 256 little-endian int32 (20240520, version 1, n, zeros), then n uint16.
    UserError if the file has another format.
    """
    size = os.path.getsize(path)
    header = np.fromfile(path, "<i4", 256).tolist()
    expected = [20240520, 1, (size - 1024) // 2]  # magic, version, tokens
    if size <= 1024 or size % 2 or header[:3] != expected:
        found = f"its {size} bytes begin with {header[:3]}, expected {expected}"
        raise UserError(f"{path} is not an intact token shard: {found}; fetch or make it again")
    return torch.from_numpy(np.memmap(path, "<u2", mode="c", offset=1024))


class Shard:
    """A shard's file and its tokens (n,), uint16."""

    def __init__(self, path: str):
        self.path, self.tokens = path, load_data_shard(path).numpy()

    def check(self, vocab_size: int) -> None:
        """Raise UserError for a token outside the vocabulary."""
        worst = self.tokens.max()
        if worst >= vocab_size:
            where = f"{self.path}: token {worst} at position {self.tokens.argmax()}"
            raise UserError(f"{where} is outside the vocabulary of {vocab_size}")


# A sequence is a list of pieces (start, stop) of a shard's tokens: here one piece, in a fork
# several. A cut is a function of a shard, a position in it and a step. It returns the sequences of
# the batch that begins there and the next batch's position, or None if too few tokens are left.


def cut_consecutive(shard: Shard, position: int, step: int, seq_len: int, batch_seqs: int):
    """Cut consecutive sequences of seq_len + 1 tokens. The last token is only a target, and the
    next sequence begins with it."""
    end = position + batch_seqs * seq_len
    if end >= len(shard.tokens):
        return None
    starts = range(position, end, seq_len)
    return [[(start, start + seq_len + 1)] for start in starts], end


def plan_batches(shards: list[Shard], cut: Callable, vocab_size: int, epochs: int) -> Iterator:
    """Yield the shard and the sequences of each step's batch, from step 0 on.

    Batches are cut from the shards in order, `epochs` times (0: without end). An epoch without a
    batch ends the plan. A shard is checked when the first epoch reaches it.
    """
    step = 0
    for epoch in range(epochs) if epochs else itertools.count():
        first = step
        for shard in shards:
            if epoch == 0:
                shard.check(vocab_size)
            found = cut(shard, 0, step)
            while found is not None:
                sequences, position = found
                yield shard, sequences
                step += 1
                found = cut(shard, position, step)
        if step == first:
            return


def read_batch(shard: Shard, sequences: list, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Return inputs (n, T) int32 and targets (n, T) int64, in pinned memory for a GPU."""
    rows = [np.concatenate([shard.tokens[i:j] for i, j in pieces]) for pieces in sequences]
    tokens = np.stack(rows)
    inputs = torch.from_numpy(tokens[:, :-1].astype(np.int32))
    targets = torch.from_numpy(tokens[:, 1:].astype(np.int64))
    if device is None or device.type == "cpu":
        return inputs, targets
    torch.cuda.set_device(device)  # otherwise this thread pins memory for GPU 0
    return inputs.pin_memory(), targets.pin_memory()


def distributed_data_generator(
    pattern: str,
    seq_len: int,
    batch_seqs: int,
    rank: int,
    world_size: int,
    start_step: int = 0,
    num_batches: int = 0,
    epochs: int = 1,
    vocab_size: int = END_OF_TEXT + 1,
    device: torch.device | None = None,
    cut: Callable | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of each global batch from start_step on, read ahead by a thread.

    Inputs and targets are (batch_seqs / world_size, seq_len), as read_batch returns them. Rank r
    has the r-th part of a batch's sequences. A batch lies in one shard; the rest of a shard is
    dropped. The generator ends before step num_batches, or if that is 0, after `epochs` passes over
    the shards (0: never). `cut` replaces cut_consecutive. UserError at once if shards are
    missing, damaged, too short for num_batches (0: for one) or hold a token outside the vocabulary.
    """
    if batch_seqs % world_size:
        raise UserError(f"{world_size} ranks cannot share {batch_seqs} sequences: use a divisor")
    paths = sorted(glob.glob(pattern))
    if not paths:
        text = f"no shard matches {pattern}"
        if pattern.startswith(FINEWEB):
            text += f"; fetch FineWeb with {sys.executable} {HERE}/cached_fineweb.py"
        raise UserError(text)
    shards = [Shard(path) for path in paths]
    if cut is None:
        cut = partial(cut_consecutive, seq_len=seq_len, batch_seqs=batch_seqs)
    plan = partial(plan_batches, shards, cut, min(vocab_size, END_OF_TEXT + 1))

    # Plan all batches now, or those of one epoch: this checks the shards before training.
    planned = list(itertools.islice(plan(epochs if num_batches else 1), num_batches or None))
    if len(planned) < max(num_batches, 1):
        # More epochs help only if some shard has room for the next batch.
        step = len(planned)
        if step and any(cut(shard, 0, step) for shard in shards):
            passes = f" in {epochs} epochs" if epochs > 1 else ""
            found = f"{pattern} holds {step} batches{passes}"
            raise UserError(f"{found}, the run reads {num_batches}: add shards, or raise --epochs")
        most = max(len(shard.tokens) for shard in shards)
        need = batch_seqs * seq_len + 1
        raise UserError(f"{pattern}: a shard has at most {most} tokens, a batch needs {need}")
    share = batch_seqs // world_size

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        ahead = deque()
        with ThreadPoolExecutor(1) as reader:
            steps = planned if num_batches else plan(epochs)
            for shard, sequences in itertools.islice(steps, start_step, None):
                own = sequences[rank * share : (rank + 1) * share]
                ahead.append(reader.submit(read_batch, shard, own, device))
                if len(ahead) > 4:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    return batches()


# -----------------------------------------------------------------------------
# Schedules: functions of the step alone, so a resumed run repeats an uninterrupted one


def get_lr(step: int, hp: Hyperparameters) -> float:
    """Return the multiplier on every learning rate: a linear rise, 1, a linear fall to lr_final."""
    rise = min((step + 1) / hp.warmup_steps, 1.0) if hp.warmup_steps else 1.0
    left = 1 - step / hp.num_iterations
    fall = min(left / hp.cooldown_frac, 1.0) if hp.cooldown_frac else 1.0
    return rise * (fall + (1 - fall) * hp.lr_final)


def get_window_size(step: int, hp: Hyperparameters) -> int:
    """Return the long window in tokens, rounded to window_step: up ("blocks") or down."""
    # The window has grown by grown / unit * window_step. Integers make the rounding exact.
    grown = hp.window_span * step
    unit = hp.num_iterations * hp.window_step
    if hp.window_rule == "tokens":
        return (hp.window_min * hp.num_iterations + grown) // unit * hp.window_step
    rounded_up = -(-grown // unit) * hp.window_step
    return max(rounded_up, hp.window_min)


def get_muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Return Muon's momentum at the step: a linear ramp, then flat."""
    ramp = min(step / hp.momentum_warmup_steps, 1.0)
    return (1 - ramp) * hp.momentum_start + ramp * hp.momentum_end


@dataclass(frozen=True)
class Moment:
    """All scheduled values at one step."""

    step: int
    lr: float  # multiplier on every learning rate
    momentum: float  # Muon's
    window: int  # the long one, in tokens
    short: int  # the short one
    seq_len: int  # tokens in a training sequence

    @property
    def kind(self) -> tuple:
        """Steps of one kind compile alike and take equal memory: warm_up makes one of each. Here
        there is one kind, because windows are tensors."""
        return ()


def moment(step: int, hp: Hyperparameters) -> Moment:
    """Return the Moment of a step, from 0 to num_iterations. A variable that holds a Moment is
    mostly named `now`. A fork that schedules more overrides this function."""
    step = min(step, hp.num_iterations)
    window = get_window_size(step, hp)
    return Moment(
        step=step,
        lr=get_lr(step, hp),
        momentum=get_muon_momentum(step, hp),
        window=window,
        short=window // 2,
        seq_len=hp.seq_len,
    )


# -----------------------------------------------------------------------------
# Numerics: FP8 matmuls, the linear layer that uses them, functions with a Triton version


def activation_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of embeddings and activations: bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fp8_supported(device: torch.device) -> bool:
    """Say whether torch's scaled matmul runs: on GPUs from Ada on, and, slowly, on a CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return x * scale in float8, clamped: a plain cast to float8_e5m2 overflows to inf."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


def scaled_mm(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Return a @ b / scale in dtype, for float8 a (M, K) and b (K, N)."""
    inverse = torch.full((), 1.0 / scale, device=a.device)
    one = torch.full((), 1.0, device=a.device)
    a, b = a.contiguous(), b.T.contiguous().T  # cuBLAS wants a row-major, b column-major
    return torch._scaled_mm(a, b, inverse, one, out_dtype=dtype, use_fast_accum=fast_accum)


def fp8_forward(x_f8: Tensor, w_f8: Tensor, x_s: float, w_s: float) -> Tensor:
    """Return x @ w.T (T, N) in bfloat16, from x (T, K) and w (N, K) in float8_e4m3fn."""
    return scaled_mm(x_f8, w_f8.T, x_s * w_s, torch.bfloat16, fast_accum=True)


def fp8_grad_x(grad_f8: Tensor, w_f8: Tensor, grad_s: float, w_s: float) -> Tensor:
    """Return grad @ w (T, K) in bfloat16, from grad (T, N) in float8_e5m2 and w (N, K)."""
    return scaled_mm(grad_f8, w_f8, grad_s * w_s, torch.bfloat16, fast_accum=False)


def fp8_grad_w(grad_f8: Tensor, x_f8: Tensor, grad_s: float, x_s: float) -> Tensor:
    """Return grad.T @ x (N, K) in float32, from grad (T, N) in float8_e5m2 and x (T, K)."""
    return scaled_mm(grad_f8.T, x_f8, grad_s * x_s, torch.float32, fast_accum=False)


class FP8Linear(torch.autograd.Function):
    """x @ w.T in bfloat16 for x (T, K) and w (N, K); keeps both in float8 for its backward pass."""

    @staticmethod
    def forward(ctx, x, w, x_s, w_s, grad_s):
        x_f8 = to_fp8(x, x_s, torch.float8_e4m3fn)
        w_f8 = to_fp8(w, w_s, torch.float8_e4m3fn)
        ctx.save_for_backward(x_f8, w_f8)
        ctx.scales = x_s, w_s, grad_s
        return fp8_forward(x_f8, w_f8, x_s, w_s)

    @staticmethod
    def backward(ctx, grad):
        x_f8, w_f8 = ctx.saved_tensors
        x_s, w_s, grad_s = ctx.scales
        grad_f8 = to_fp8(grad, grad_s, torch.float8_e5m2)
        grad_x = fp8_grad_x(grad_f8, w_f8, grad_s, w_s)  # autograd casts to the inputs' dtypes
        grad_w = fp8_grad_w(grad_f8, x_f8, grad_s, x_s)
        return grad_x, grad_w, None, None, None


class CastedLinear(nn.Linear):
    """A linear layer without bias whose weight is cast to its input's dtype when used.

    With use_fp8, in training, on hardware with FP8: the matmul reads x * x_s and w * w_s as
    float8_e4m3fn, and the backward matmuls read the output's gradient * grad_s as float8_e5m2. The
    head does the same inside its loss (HeadLoss), chunk by chunk; this forward pass is for forks
    with FP8 in other layers.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        use_fp8: bool = False,
        x_s: float = 1.0,
        w_s: float = 1.0,
        grad_s: float = 1.0,
    ):
        # nn.Linear draws weights within 1 / sqrt(in_features). Callers scale them by init_bound.
        super().__init__(in_features, out_features, bias=False)
        self.scales = (x_s, w_s, grad_s) if use_fp8 else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features), in bfloat16 with FP8, else x's dtype."""
        if self.scales is None or not self.training or not fp8_supported(x.device):
            return F.linear(x, self.weight.type_as(x))
        out = FP8Linear.apply(x.flatten(0, -2), self.weight, *self.scales)
        return out.view(*x.shape[:-1], -1)


def as_is(function):
    """Return the function unchanged, in place of torch.compile."""
    return function


class Kernel:
    """A plain function, and its twin if kernels.py has one: a Triton function of the same name.
    choose_kernels decides which of the two is called."""

    def __init__(self, plain: Callable):
        self.plain = plain
        self.name = plain.__name__
        self.fused = TWINS.get(self.name)
        self.use = False

    def __call__(self, *arguments):
        function = self.fused if self.use else self.plain
        return function(*arguments)


def names_in_use(kernels: tuple[Kernel, ...]) -> list[str]:
    """Return the names of the kernels whose twins are called."""
    return [kernel.name for kernel in kernels if kernel.use]


# -----------------------------------------------------------------------------
# Model: masks, attention, layers, and a head whose loss never stores the logits


def first_visible(input_seq: Tensor, window: int | Tensor, rule: str) -> Tensor:
    """Return the first token that each token sees: token i sees j when first[i] <= j <= i.

    The mask is causal, and stays within a document (END_OF_TEXT begins one) and within a window.
    `window` is in tokens, the token itself among them. By the rule "blocks" it is rounded down to
    whole blocks, the token's own block among them, which is always seen. Maps (T,) to (T,) int32,
    never decreasing.
    """
    position = torch.arange(len(input_seq), device=input_seq.device, dtype=torch.int32)
    document_start = torch.where(input_seq == END_OF_TEXT, position, 0).cummax(0).values
    # A window wider than all tokens hides nothing, but may overflow.
    window = torch.as_tensor(window).clamp(1, len(input_seq) + BLOCK)
    if rule == "blocks":
        blocks = (window // BLOCK).clamp(min=1)
        window_start = (position // BLOCK + (1 - blocks)) * BLOCK
    else:
        window_start = position + (1 - window)
    return torch.maximum(document_start, window_start)


def block_lists(first: Tensor) -> tuple[Tensor, ...]:
    """Return nine tensors: `first` (T,), of first_visible, and four lists for FlexAttention.

    The lists are: for each query block, the key blocks that it sees partly, and those that it sees
    fully; for each key block, the query blocks that see it partly, and those that see it fully.
    Each list is two int32 tensors: the count of blocks, (1, 1, T / BLOCK), and their numbers,
    (1, 1, T / BLOCK, T / BLOCK), of which only the first `count` are used. `first` never decreases,
    so each list is one run of blocks. The mask is causal, so a block on the diagonal is seen
    partly: it follows the run in both partial lists.
    """
    index = torch.arange(len(first) // BLOCK, device=first.device, dtype=torch.int32)  # of blocks
    # For each query block: the first key block that it sees, and the first one that it sees fully.
    seen = first[::BLOCK] // BLOCK
    full = torch.minimum((first[BLOCK - 1 :: BLOCK] + (BLOCK - 1)) // BLOCK, index)
    # For each key block: the first query block that no longer sees it fully, or no longer at all.
    full_end = torch.searchsorted(full, index, right=True, out_int32=True)
    seen_end = torch.searchsorted(seen, index, right=True, out_int32=True)

    lists = []
    for start, end, partial_list in (
        (seen, full, True),
        (full, index, False),
        (full_end, seen_end, True),
        (index + 1, full_end, False),
    ):
        counts = end - start + int(partial_list)
        blocks = start[:, None] + index  # start, start + 1, ..., then the diagonal from end on
        blocks = torch.where(blocks < end[:, None], blocks, index[:, None])
        lists += [counts[None, None], blocks[None, None]]
    return first, *lists


def flex_mask(first: Tensor, *lists: Tensor) -> BlockMask:
    """Return FlexAttention's mask, of the tensors that block_lists returns."""
    return BlockMask(
        (len(first), len(first)),
        *lists,  # in the order of BlockMask's arguments
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=lambda b, h, q, kv: (kv <= q) & (kv >= first[q]),
    )


def dense_mask(first: Tensor, rows: int = 0) -> Tensor:
    """Return SDPA's mask, 0 or -inf: (T, T), or its last `rows` rows if that is not 0."""
    position = torch.arange(len(first), device=first.device)
    hidden = (position > position[-rows:, None]) | (position < first[-rows:, None])
    return torch.zeros(hidden.shape, device=first.device).masked_fill_(hidden, -math.inf)


# PyTorch's default is 8 warps on an H100 and 4 on other cards. With 4, the backward kernel spills
# registers (BENCHMARKS.md). 8 have not been timed on such cards.
FLEX_OPTIONS = {"bwd_num_warps": 8}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: tuple | Tensor, scale: float) -> Tensor:
    """Return the attention (1, H, T, D) of q, k and v. The mask is block_lists on CUDA, and a
    dense_mask on a CPU, where FlexAttention has no backward pass."""
    if isinstance(mask, Tensor):
        return F.scaled_dot_product_attention(q, k, v, mask.type_as(q), scale=scale)
    flex = flex_attention
    if not torch.compiler.is_compiling():  # uncompiled, it would store T x T scores
        flex = torch.compile(flex_attention, dynamic=False)
    return flex(q, k, v, block_mask=flex_mask(*mask), scale=scale, kernel_options=FLEX_OPTIONS)


def norm(x: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm over the last axis, without gain."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rotary_frequencies(hp: Hyperparameters, device: torch.device) -> Tensor:
    """Return the angles (head_dim / 2,) by which pairs of channels rotate from token to token.

    "full" is RoPE (arXiv 2104.09864), with frequencies rope_base^(-2i / head_dim). With "half", the
    first half of the frequencies falls geometrically from 1 to 1/rope_base; the rest are 0.
    """
    pairs = hp.head_dim // 2
    if hp.rope == "full":
        return hp.rope_base ** -(torch.arange(pairs, device=device) / pairs)
    turning = pairs // 2
    exponent = torch.arange(turning, device=device) / max(turning - 1, 1)
    return F.pad(hp.rope_base**-exponent, (0, pairs - turning))


def rotary_table(position: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles at positions (..., 1), each (..., 1, head_dim) in float32.
    Both channels of a pair have an entry: (cos, cos) and (sin, -sin)."""
    angle = position[..., None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1)


def rotate_normed(x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Return norm(x) with each pair of channels d and d + D/2 rotated, by a rotary_table.

    Maps (1, T, H, D) to (1, H, T, D), as attend wants it. A flip swaps the halves: compiled, it
    only changes the order of reading, where a cat would read everything twice.
    """
    normed = norm(x, eps).float()
    swapped = normed.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (normed * cos + swapped * sin).type_as(x).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Attention with normalised, rotated q and k, and with extra values mixed into v."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        width = hp.num_heads * hp.head_dim
        self.head_shape = hp.num_heads, hp.head_dim
        self.scale = hp.attn_scale or hp.head_dim**-0.5
        self.eps = hp.norm_eps
        self.mixes_first = layer.values == "first"
        # q, k and v are one weight: one matmul makes all three.
        qkv = CastedLinear(hp.model_dim, 3 * width).weight.detach() * hp.init_bound
        self.qkv_w = nn.Parameter(qkv.view(3, width, hp.model_dim))
        self.lambdas = nn.Parameter(torch.full((1 if self.mixes_first else 2,), 0.5))
        self.c_proj = CastedLinear(width, hp.model_dim)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x: Tensor, value: Tensor | None, rotary, mask, attend):
        """Map x (1, T, C) to (1, T, C). Return v (1, T, H, D), too, before `value` is mixed into
        it. `value` is rows (T, H * D) of a table, or the first layer's v."""
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(1, -1, 3, *self.head_shape).unbind(2)  # (1, T, H, D)
        own = v
        if value is not None:
            value = value.view_as(v)
        if self.mixes_first:
            if value is None:
                value = v  # this is the first layer
            share = self.lambdas[0]
            v = (1 - share) * v + share * value
        else:
            v = self.lambdas[0] * v
            if value is not None:
                v = v + self.lambdas[1] * value
        cos, sin = rotary
        q = rotate_normed(q, cos, sin, self.eps)  # (1, H, T, D)
        k = rotate_normed(k, cos, sin, self.eps)
        out = attend(q, k, v.transpose(1, 2), mask, self.scale)
        return self.c_proj(out.transpose(1, 2).flatten(2)), own


class ReLUSquared(torch.autograd.Function):
    """relu(x)^2. Only the result is saved, which the next matmul saves anyway. The derivative,
    2 relu(x), is twice the square root of the result, up to rounding."""

    @staticmethod
    def forward(ctx, x):
        post = F.relu(x).square()
        ctx.save_for_backward(post)
        return post

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 * ctx.saved_tensors[0].sqrt())


@Kernel
def relu2_mlp(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Return relu(x @ w_in.T)^2 @ w_out.T of x (..., C), w_in (H, C) and w_out (C, H), of one
    dtype."""
    h = F.linear(x, w_in)
    post = ReLUSquared.apply(h) if torch.compiler.is_compiling() else F.relu(h).square()
    return F.linear(post, w_out)


class MLP(nn.Module):
    """Two projections around ReLU squared (arXiv 2109.08668)."""

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
    """One layer: add an earlier layer's output and x0, the embeddings, to the input; then apply
    attention and the MLP.

    All that differs between layers or steps is an argument, so equal layers are compiled once.
    """

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.attn = None if layer.window == "none" else CausalSelfAttention(hp, layer)
        self.mlp = MLP(hp)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))  # of x and x0
        self.eps = hp.norm_eps

    def forward(self, x, x0, value, skip, rotary, mask, attend, give_v: bool):
        """Map x (1, T, C) to (1, T, C). Return attention's v, too, with give_v, else None: an
        unused v would get a gradient of zeros. skip is None, or (weight, earlier output)."""
        v = None
        if skip is not None:
            x = x + skip[0] * skip[1]
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        if self.attn is not None:
            out, v = self.attn(norm(x, self.eps), value, rotary, mask, attend)
            x = x + out
        x = x + self.mlp(norm(x, self.eps))
        return x, (v if give_v else None)


def gradient_buffer(weight: Tensor) -> Tensor:
    """Return the tensor in which a weight's gradient is summed: weight.grad, made if missing.

    For a bfloat16 table it is weight.grad32, in float32: a common token adds many small terms.
    """
    name = "grad32" if weight.dtype == torch.bfloat16 else "grad"
    if getattr(weight, name, None) is None:
        setattr(weight, name, torch.zeros_like(weight, dtype=torch.float32))
    return getattr(weight, name)


def lookup(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Return rows (T, C) of a table. Backward adds their gradient to gradient_buffer directly."""
    rows = F.embedding(tokens, table.weight.detach())

    def accumulate(grad: Tensor) -> None:
        gradient_buffer(table.weight).index_add_(0, tokens, grad.float())

    if torch.is_grad_enabled():
        rows.requires_grad_().register_hook(accumulate)
    return rows


# The head and its loss take the tokens in chunks, so the float32 logits of a whole sequence (49152
# x 50304: 9.9 GB) never exist. Gradients are made in the forward pass, while a chunk's logits
# exist. On a CPU the softmax takes LOSS_ROWS rows of a chunk at a time, which stay in the cache
# (BENCHMARKS.md).
LOSS_ROWS = 16


def trains_in_fp8(wanted: bool, device: torch.device) -> bool:
    """Say whether the head trains in FP8: if wanted, and on a GPU with FP8."""
    return wanted and device.type == "cuda" and fp8_supported(device)


def trains_in_bfloat16(wanted: bool, device: torch.device) -> bool:
    """Say whether the head trains in bfloat16 on a CPU: if wanted, and with AVX512-BF16, which more
    than halves the time. On a GPU, a head without FP8 is bfloat16 anyway."""
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return wanted and device.type == "cpu" and fast()


@Kernel
def softcapped_cross_entropy(logits, targets, softcap, grad_scale=None, grads=None):
    """Return the summed loss () of logits (T, V), which may be overwritten, and targets (T,) int64.

    The logits first become cap * tanh(logit / cap). The code uses z = 2 cap * sigmoid(2 logit /
    cap), which is larger by cap: softmax does not see a constant. z is at most 2 cap, so softmax
    may subtract that instead of the row's maximum. The gradient of the logits * grad_scale goes to
    grads (T, V): the logits' own memory, or float8_e5m2. dz/dlogit is (z - z^2 / (2 cap)) 2 / cap.
    """
    most, slope = 2 * softcap, 2 / softcap
    targets = targets[:, None]
    if torch.compiler.is_compiling():  # two passes over the logits; only the result is stored
        z = most * torch.sigmoid(slope * logits.float())
        z_of_target = most * torch.sigmoid(slope * logits.gather(1, targets).float())
        p = torch.exp(z - most)
        total = p.sum(dim=1, keepdim=True)
        loss = (total.log() + most - z_of_target).sum()
        column = torch.arange(p.size(1), device=p.device)
        p = p / total - (column == targets).float()
    else:  # z and p are stored, and overwritten where that is possible
        z = logits.float().mul_(slope).sigmoid_().mul_(most)
        p = torch.softmax(z, dim=-1)
        loss = -p.gather(1, targets).log().sum()
        p.scatter_add_(1, targets, p.new_full(targets.shape, -1.0))
    if grads is not None:
        grad = z.addcmul_(z, z, value=-1 / most).mul_(p).mul_(slope * grad_scale)
        grads.copy_(to_fp8(grad, 1.0, grads.dtype) if grads.dtype == torch.float8_e5m2 else grad)
    return loss


def head_in_fp8(weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return a head's weight (V, K) * scale in float8_e4m3fn: row-major and column-major."""
    w = to_fp8(weight, scale, torch.float8_e4m3fn)
    return w, w.T.contiguous().T


def logits_loss(x, w, targets, cross_entropy, options, grad_scale, scales):
    """Return three things for a chunk x (C, K) and the head's weight w (V, K): the summed loss ();
    x in the dtype of the matmul; and the logits' gradient (C, V) times grad_scale, or None if
    grad_scale is None.

    cross_entropy is called as softcapped_cross_entropy is, with `options` after the targets. With
    FP8 scales, w is what head_in_fp8 returns.
    """
    grads = None
    if scales is not None:
        x_s, w_s, grad_s = scales
        x = to_fp8(x, x_s, torch.float8_e4m3fn)
        logits = fp8_forward(x, w[0], x_s, w_s)
        grad_scale = grad_scale * grad_s
        grads = torch.empty_like(logits, dtype=torch.float8_e5m2)
    else:
        logits = x @ w.T
        if grad_scale is not None:  # in place, unless torch.compile would copy the logits
            grads = torch.empty_like(logits) if torch.compiler.is_compiling() else logits
    if x.is_cuda:
        return cross_entropy(logits, targets, *options, grad_scale, grads), x, grads
    loss = 0
    for start in range(0, len(x), LOSS_ROWS):
        rows = slice(start, start + LOSS_ROWS)
        rows_grads = None if grads is None else grads[rows]
        loss = loss + cross_entropy(logits[rows], targets[rows], *options, grad_scale, rows_grads)
    return loss, x, grads


def logits_backward(x, w, grads, grad_w, scales) -> Tensor:
    """Return the gradient of x (C, K), and add the gradient of w to grad_w. x and grads are what
    logits_loss returned."""
    if scales is not None:
        x_s, w_s, grad_s = scales
        grad_w.add_(fp8_grad_w(grads, x, grad_s, x_s))
        return fp8_grad_x(grads, w[1], grad_s, w_s)
    if x.dtype == grad_w.dtype:
        grad_w.addmm_(grads.T, x)
    else:
        grad_w.add_(grads.T @ x)
    return grads @ w


# Each is compiled alone. In one graph, the loss kernel would also write the transposed gradient
# that FP8 wants, each byte far from the one before, and the logits would stay allocated.
HEAD_STEPS = head_in_fp8, logits_loss, logits_backward


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of x (T, K) and targets (T, ...) under the weight (V, K) of a Head.

    If x requires a gradient, the forward pass makes it, times grad_scale, and adds the weight's
    gradient to gradient_buffer. Call backward() exactly once, on the loss itself.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, head, options, grad_scale, scales):
        in_fp8, loss_step, backward_step = head.steps
        w = weight.type_as(x) if scales is None else in_fp8(weight, scales[1])
        with_grad = ctx.needs_input_grad[0]
        if not with_grad:
            grad_scale = None
        size = head.chunk_len(x.device)
        total, grads = 0, []
        for part, part_targets in zip(x.split(size), targets.split(size), strict=True):
            loss, part, grad_logits = loss_step(
                part, w, part_targets, head.cross_entropy, options, grad_scale, scales
            )
            total = total + loss
            if with_grad:
                grad_w = gradient_buffer(weight)
                grads.append(backward_step(part, w, grad_logits, grad_w, scales))
            del part, grad_logits  # 0.8 GB, freed before the next chunk's
        if with_grad:
            ctx.save_for_backward(torch.cat(grads).type_as(x))
        return total / len(x)

    @staticmethod
    def backward(ctx, grad):
        torch._assert_async(grad == 1, "call backward() on the loss itself; scale gradients after")
        (grad_x,) = ctx.saved_tensors
        return grad_x, None, None, None, None, None, None


class Head(CastedLinear):
    """Turns the trunk's output into logits and their loss. GPT.to_device may compile `steps`."""

    cross_entropy = softcapped_cross_entropy  # a Kernel, which is not bound as a method

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp.model_dim, hp.padded_vocab, hp.fp8, hp.x_s, hp.w_s, hp.grad_s)
        nn.init.zeros_(self.weight)
        self.softcap = hp.logit_softcap
        self.use_bfloat16 = hp.bfloat16_head
        self.steps = HEAD_STEPS

    def chunk_len(self, device: torch.device) -> int:
        """Return the tokens in a chunk: enough for fast matmuls. Each chunk reads and writes the
        head's whole gradient, so fewer chunks are faster."""
        return 256 if device.type == "cpu" else 16384

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss () of x (T, C) and targets (T,) int64."""
        return self.loss_of(x, targets, (self.softcap,), grad_scale=1 / len(x))

    def loss_of(self, x: Tensor, targets: Tensor, options: tuple, grad_scale: float) -> Tensor:
        """Return the mean loss () of cross_entropy with `options`. Only training uses FP8, or on a
        CPU bfloat16, if wanted and supported."""
        scales = None
        if x.requires_grad:
            if trains_in_bfloat16(self.use_bfloat16, x.device):
                x = x.bfloat16()
            if trains_in_fp8(self.scales is not None, x.device):
                scales = self.scales
        return HeadLoss.apply(x, self.weight, targets, self, options, grad_scale, scales)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (T, padded vocabulary) of x (T, C), in float32, never from FP8. They
        are between 0 and 2 cap, as z in softcapped_cross_entropy."""
        logits = F.linear(x, self.weight.type_as(x)).float()
        return 2 * self.softcap * torch.sigmoid(logits / (self.softcap / 2))


class GPT(nn.Module):
    """The language model: embeddings, layers linked as a U-net, the head and its loss.

    Parameters are named as in 2025-01-26, so its published checkpoints load. On a CPU everything is
    float32; on CUDA embeddings and activations are bfloat16.
    """

    attend = staticmethod(attend)  # tools/sample.py adds a KV cache
    # How many END_OF_TEXT isolate a document from the text before it (tools/hellaswag.py).
    context_tokens = 0

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.hp = hp
        self.layers = layer_table(hp)
        self.kernels = softcapped_cross_entropy, relu2_mlp, symmetric_matmul
        names = sorted({layer.values for layer in self.layers} - {None, "first"})
        width = hp.num_heads * hp.head_dim
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim)
        tables = {name: nn.Embedding(hp.vocab_size, width) for name in names}
        self.value_embeds = nn.ModuleDict({"embed": nn.ModuleDict(tables)})
        self.blocks = nn.ModuleList(Block(hp, layer) for layer in self.layers)
        self.skip_weights = nn.Parameter(torch.ones(hp.num_layers // 2))
        self.lm_head = Head(hp)
        self.use_flex = False
        self.compiled, self.compile_ = False, as_is
        self.rotary: dict[tuple, tuple[Tensor, Tensor]] = {}  # rotary_of's last result

    def tables(self) -> list[nn.Module]:
        """Return the vocabulary tables that are bfloat16 on CUDA."""
        return [self.embed, self.value_embeds]

    def to_device(self, device: torch.device, compiled: bool) -> "GPT":
        """Move the model to a device, in the device's dtypes. If `compiled`, compile masks, layers
        and head."""
        self.to(device)
        self.use_flex = device.type == "cuda"
        for table in self.tables():
            table.to(activation_dtype(device))
        if compiled:
            self.compiled, self.compile_ = True, partial(torch.compile, dynamic=False)
            torch._dynamo.config.recompile_limit = 64  # kinds of layers, each in several shapes
            with contextlib.suppress(AttributeError):  # not every torch has this setting
                # Without it, layers with an autograd.Function are compiled anew at each start.
                torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
            self.lm_head.steps = tuple(self.compile_(step) for step in self.lm_head.steps)
            self.make_masks = self.compile_(self.make_masks)
            self.compile_layers()
        return self

    def compile_layers(self) -> None:
        """Compile layers one at a time, and equal layers once. One graph of all layers would take
        longer to compile, and give all gradients at its end, too late to overlap their sending."""
        for block in self.blocks:
            block.compile(dynamic=False)

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the embeddings (T, C) of tokens (T,), and their rows of each value table."""
        tables = self.value_embeds["embed"].items()
        values = {name: lookup(table, input_seq) for name, table in tables}
        return lookup(self.embed, input_seq), values

    def windows(self, when: Moment | int) -> dict[str, int]:
        """Return the windows that layers use, by name, in tokens. `when` is a Moment, or a long
        window in tokens."""
        if isinstance(when, Moment):
            windows = {"long": when.window, "short": when.short}
        else:
            windows = {"long": int(when), "short": int(when) // 2}
        used = {layer.window for layer in self.layers}
        return {name: window for name, window in windows.items() if name in used}

    @torch.no_grad()
    def masks(self, input_seq: Tensor, when: Moment | int, make_mask: Callable) -> dict:
        """Return the masks of input_seq (T,), by the names of `windows`."""
        # Windows are tensors, so that a new window recompiles nothing.
        windows = {name: torch.tensor(window) for name, window in self.windows(when).items()}
        return self.make_masks(input_seq, windows, make_mask)

    def make_masks(self, input_seq: Tensor, windows: dict[str, Tensor], make_mask) -> dict:
        """Return the masks of input_seq (T,) for windows, by name."""
        rule = self.hp.window_rule
        return {n: make_mask(first_visible(input_seq, w, rule)) for n, w in windows.items()}

    def rotary_of(self, length: int, when: Moment | int, device: torch.device, start: int = 0):
        """Return the rotary_table of `length` tokens from `start` on. The last one is cached."""
        key = length, start, device
        if key not in self.rotary:
            position = torch.arange(start, start + length, device=device)[:, None]
            self.rotary = {key: rotary_table(position, rotary_frequencies(self.hp, device))}
        return self.rotary[key]

    def hidden(self, input_seq: Tensor, when: Moment | int | Tensor) -> Tensor:
        """Map tokens (T,), whole blocks, to the normalised output (T, C) of the last layer. `when`
        is as in `windows`. Masks and rotary angles are made here, once for all layers."""
        if not self.use_flex and len(input_seq) > 16384:
            raise UserError(f"a sequence of {len(input_seq)} tokens needs a GPU; try --record demo")
        masks = self.masks(input_seq, when, block_lists if self.use_flex else dense_mask)
        rotary = self.rotary_of(len(input_seq), when, input_seq.device)
        x, values = self.embedded(input_seq)
        return self.trunk(x, values, rotary, masks, self.attend)

    def trunk(self, x: Tensor, values: dict[str, Tensor], rotary, masks: dict, attend) -> Tensor:
        """Map embeddings (T, C), and the rows of value tables by name, to the head's input (T, C).
        In the second half, layer num_layers - 1 - i adds a skip weight times the output of layer i.
        """
        x0 = norm(x, self.hp.norm_eps)[None]  # (1, T, C): attention wants a batch axis
        x = x0.view(x0.shape)  # if two arguments were one tensor, a layer would be compiled again
        weights = self.skip_weights.unbind()
        half = len(weights)
        outputs = []
        wants_first = any(layer.values == "first" for layer in self.layers)
        first_v = None  # of the first layer that attends
        for i, (layer, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            skip = None
            if i >= half:
                skip = weights[i - half], outputs.pop()
            value = first_v if layer.values == "first" else values.get(layer.values)
            give_v = wants_first and first_v is None
            mask = masks.get(layer.window)
            x, v = block(x, x0, value, skip, rotary, mask, attend, give_v)
            if v is not None:
                first_v = v
            if i < half:
                outputs.append(x.view(x.shape))
        return norm(x, self.hp.norm_eps)[0]

    def logits(self, input_seq: Tensor, when: Moment | int | Tensor) -> Tensor:
        """Return the head's logits (T, padded vocabulary) of tokens (T,), as in `hidden`."""
        return self.lm_head.logits(self.hidden(input_seq, when))

    def forward(self, input_seq: Tensor, target_seq: Tensor, when: Moment | int | Tensor) -> Tensor:
        """Return the mean loss () of tokens (T,) and targets (T,) int64; `when` as in `windows`."""
        return self.lm_head.loss(self.hidden(input_seq, when), target_seq)


# -----------------------------------------------------------------------------
# Optimizers: Muon and Adam as update rules, and how ranks share them


@Kernel
def symmetric_matmul(a: Tensor, c: Tensor | None = None, alpha=1.0, beta=1.0) -> Tensor:
    """Return a a^T (B, n, n) of a (B, n, k), or with a symmetric c, alpha a a^T + beta c."""
    return a @ a.mT if c is None else torch.baddbmm(c, a, a.mT, beta=beta, alpha=alpha)


# Coefficients (a, b, c) of each step, which maps a singular value s to a s + b s^3 + c s^5. After
# five steps most singular values are between 0.7 and 1.2: fast rather than exact.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5


def zeropower_via_newtonschulz5(
    G: Tensor, steps: int = 5, coefficients=NEWTON_SCHULZ, margin: float = 1.0, eps: float = 1e-7
) -> Tensor:
    """Return G (..., rows, cols) with its singular values replaced by values near 1; zero stays
    zero. bfloat16 on CUDA, else G's own dtype. Source: kellerjordan.github.io/posts/muon.

    G is divided by margin * its Frobenius norm + eps. Then each (a, b, c) makes a step
    X <- a X + (b A + c A^2) X with A = X X^T. The matmuls add the terms themselves, which halves
    the rounding error in bfloat16.
    """
    X = G.bfloat16() if activation_dtype(G.device) == torch.bfloat16 else G
    X = X.reshape(-1, *G.shape[-2:])
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X
    size = torch.linalg.matrix_norm(X, keepdim=True)  # Frobenius: >= the largest singular value
    X = X / (margin * size + eps)
    for a, b, c in coefficients[:steps]:
        A = symmetric_matmul(X)
        B = symmetric_matmul(A, A, c, b)
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if tall else X).reshape(G.shape)


def muon_updates(
    grads, momenta, momentum: Tensor, damped: bool, orthogonalise=zeropower_via_newtonschulz5
) -> Tensor:
    """Return the updates (n, rows, cols) of n matrices: orthogonalised Nesterov momentum.

    grads (mean gradients) and momenta (momentum buffers, changed in place) are lists of tensors. A
    buffer is multiplied by momentum; then (1 - momentum) * gradient is added if `damped`, else the
    gradient. With a constant momentum, the two differ only in scale. momentum () is a tensor, so
    that a new value recompiles nothing.
    """
    directions = []
    for grad, buffer in zip(grads, momenta, strict=True):
        if damped:
            buffer.lerp_(grad, 1 - momentum)
            directions.append(grad.lerp(buffer, momentum))
        else:
            buffer.mul_(momentum).add_(grad)
            directions.append(grad + momentum * buffer)
    return orthogonalise(torch.cat(directions))


def subtract_(weights: list[Tensor], updates: list[Tensor], lr: Tensor) -> None:
    """Subtract lr * updates from the weights, in place. Updates may have another dtype; lr () is on
    the CPU. Compiled, this is one kernel launch. Uncompiled, lr * update is not rounded."""
    if torch.compiler.is_compiling():
        torch._foreach_sub_(weights, [lr * update.float() for update in updates])
    else:
        torch._foreach_add_(weights, updates, alpha=-lr.item())


MUON_STEPS = muon_updates, subtract_


def number(value: float, like: Tensor) -> Tensor:
    """Return a number as a tensor (), so that another number recompiles nothing."""
    return torch.full((), value, device=like.device)


# An update rule is a function rule(buckets, lr, now). A Bucket (below) holds parameters as rows;
# all rows in `buckets` have one shape. lr is the group's learning rate at the Moment `now`.
# bucket.grads is the mean gradient (n, ...) of this rank's n rows. bucket.state is saved and
# resumed: tensors (n, ...), or tensors () that are equal in all buckets. The rule returns two
# things: for each bucket a tensor (n, ...) to send to all ranks, and a function take(weights,
# sent) of two lists, by which each rank changes the weights.


def muon(
    buckets,
    lr: float,
    now: Moment,
    hp: Hyperparameters,
    steps=MUON_STEPS,
    orthogonalise=zeropower_via_newtonschulz5,
):
    """Step by Muon, for matrices (n, rows, cols). `steps` are the compiled MUON_STEPS."""
    make_updates, subtract = steps
    for bucket in buckets:
        if not bucket.state:
            bucket.state["momentum_buffer"] = torch.zeros_like(bucket.grads)
    grads = [bucket.grads for bucket in buckets]
    momenta = [bucket.state["momentum_buffer"] for bucket in buckets]
    momentum = number(now.momentum, grads[0])
    updates = make_updates(grads, momenta, momentum, hp.momentum_damped, orthogonalise)
    rows, cols = buckets[0].row_shape
    scaled_lr = torch.tensor(lr * max(1, rows / cols) ** 0.5, dtype=torch.float64)
    updates = updates.split([len(grad) for grad in grads])
    return updates, partial(subtract, lr=scaled_lr)


def copy_new(weights: list[Tensor], sent: list[Tensor]) -> None:
    """Copy what was sent into the weights, unless it arrived in the weights themselves."""
    elsewhere, news = [], []
    for weight, new in zip(weights, sent, strict=True):
        if weight.data_ptr() != new.data_ptr():
            elsewhere.append(weight)
            news.append(new)
    if elsewhere:
        torch._foreach_copy_(elsewhere, news)


def adam(buckets, lr: float, now: Moment, betas: Pair, eps: float, decay: float = 0.0):
    """Step by torch's fused Adam, for rows of any shape, with decoupled weight decay (arXiv
    1711.05101)."""
    for bucket in buckets:
        if not bucket.state:
            weight = bucket.weights()
            bucket.state["step"] = torch.zeros((), device=weight.device)
            bucket.state["exp_avg"] = torch.zeros_like(weight)
            bucket.state["exp_avg_sq"] = torch.zeros_like(weight)
    weights = [bucket.weights() for bucket in buckets]
    torch_adam(
        weights,
        [bucket.grads.type_as(weight) for bucket, weight in zip(buckets, weights, strict=True)],
        [bucket.state["exp_avg"] for bucket in buckets],
        [bucket.state["exp_avg_sq"] for bucket in buckets],
        max_exp_avg_sqs=[],
        state_steps=[bucket.state["step"] for bucket in buckets],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=lr,
        weight_decay=decay,
        decoupled_weight_decay=True,
        eps=eps,
        maximize=False,
    )
    return weights, copy_new


@dataclass(frozen=True)
class Group:
    """A row of parameter_table: which parameters these are, and how they learn."""

    name: str  # the metrics call its gradient's norm grad_norm_NAME
    patterns: tuple[str, ...]  # of the parameters' names; "*" matches dots, too
    rule: Callable
    lr: float
    row_ndim: int  # ranks own rows: matrices (2), rows of a table (1) or scalars (0)
    least_rows: float = 1  # a full bucket has so many rows, and at least one for each rank
    # When gradients are complete, in the last micro-batch: during the "backward" pass, at the "end"
    # of that pass, or after the "forward" pass.
    complete: str = "backward"


def parameter_table(hp: Hyperparameters, compile_: Callable = as_is) -> tuple[Group, ...]:
    """Return the groups, in the order in which gradients are sent and weights are updated. Each
    parameter's name, which is its key in a checkpoint, matches exactly one group."""
    by_muon = partial(muon, hp=hp, steps=tuple(compile_(step) for step in MUON_STEPS))
    by_adam = partial(adam, betas=hp.adam_betas, eps=hp.adam_eps)
    matrices = ("blocks.*.weight", "blocks.*.qkv_w")
    scalars = ("skip_weights", "blocks.*lambdas")
    return (
        Group("head", ("lm_head.weight",), by_adam, hp.head_lr, 1, complete="forward"),
        Group("muon", matrices, by_muon, hp.muon_lr, 2, least_rows=8),
        Group("embed", ("embed.weight",), by_adam, hp.embed_lr, 1, complete="end"),
        Group("values", ("value_embeds.*",), by_adam, hp.embed_lr, 1, complete="end"),
        Group("scalar", scalars, by_adam, hp.scalar_lr, 0, least_rows=math.inf),
    )


def members(model: nn.Module, table: tuple[Group, ...]) -> dict[str, dict[str, nn.Parameter]]:
    """Return {group's name: {parameter's name: parameter}}. ValueError for a parameter that does
    not match exactly one row of the table."""
    found = {group.name: {} for group in table}
    for name, p in model.named_parameters():
        rows = [g for g in table if any(fnmatchcase(name, text) for text in g.patterns)]
        if len(rows) != 1 or p.ndim < rows[0].row_ndim:
            names = " and ".join(g.name for g in rows) or "no row"
            wanted = f"it needs exactly one row, for its shape {tuple(p.shape)}"
            raise ValueError(f"{name} matches {names} of parameter_table: {wanted}")
        found[rows[0].name][name] = p
    return found


reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """Parameters whose gradients are sent together, in the parameters' dtype, as rows of one shape.

    The rows, padded with zeros, are divided into world_size equal shares, and each rank owns one.
    Scalars are too few to divide: each rank owns all of them and makes the same step, so their
    buckets have a world_size of 1.
    """

    def __init__(self, params: list[Tensor], row_ndim: int, rank: int = 0, world_size: int = 1):
        self.params, self.rank, self.world_size = params, rank, world_size
        self.row_shape = params[0].shape[params[0].ndim - row_ndim :]
        self.counts = [p.numel() // math.prod(self.row_shape) for p in params]
        self.share_len = -(-sum(self.counts) // world_size)
        self.unpadded = self.counts == [world_size * self.share_len]  # one parameter, no padding
        self.state: dict[str, Tensor] = {}  # the update rule's, for this rank's share
        self.grads = self.sent = self.work = None

    def share(self, tensors: list[Tensor]) -> Tensor:
        """Return this rank's rows, (share_len, ...), of tensors shaped like the parameters, or of
        state whose rows have another shape."""
        rows = []
        for tensor, p in zip(tensors, self.params, strict=True):
            like_p = tensor.shape == p.shape
            rows.append(tensor.reshape(-1, *self.row_shape) if like_p else tensor)
        rows = torch.cat(rows) if len(rows) > 1 else rows[0]
        rows = rows[self.rank * self.share_len : (self.rank + 1) * self.share_len]
        missing = self.share_len - len(rows)
        return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows

    def weights(self) -> Tensor:
        """Return this rank's rows of the parameters: of one parameter a view, unless padded."""
        return self.share([p.detach() for p in self.params])

    def launch(self) -> None:
        """Begin to sum the gradients over all ranks. They are copied into one tensor of the
        parameters' dtype, unless a single gradient can be sent as it is."""
        grads = [gradient_buffer(p) for p in self.params]
        if self.world_size == 1:  # nothing is sent: a table's stay in float32
            self.grads = self.share(grads)
            return
        if self.unpadded and grads[0].dtype == self.params[0].dtype:
            self.sent = grads[0].view(-1, *self.row_shape)
        else:
            total = self.world_size * self.share_len
            self.sent = self.params[0].new_empty(total, *self.row_shape)
            *parts, padding = self.sent.split([*self.counts, total - sum(self.counts)])
            torch._foreach_copy_(parts, [grad.view(-1, *self.row_shape) for grad in grads])
            padding.zero_()
        self.grads = self.sent.new_empty(self.share_len, *self.row_shape)
        self.work = reduce_scatter(self.grads, self.sent, async_op=True)

    def wait(self) -> Tensor:
        """Wait for the summed gradients, and return this rank's share of them, self.grads."""
        if self.grads is None:
            self.launch()
        if self.work is not None:
            self.work.wait()
        self.sent = self.work = None
        return self.grads

    def gather(self, share: Tensor) -> Callable[[], list[Tensor]]:
        """Begin to collect the shares of all ranks. Return a function that waits for them, and
        returns a tensor for each parameter: in its shape, or as rows if rows of state have another
        shape. If `share` is a view of the only parameter, the other shares arrive in that one."""
        rows, work = share, None
        if self.world_size > 1:
            if self.unpadded and share.data_ptr() == self.weights().data_ptr():
                rows = self.params[0].detach().view(-1, *self.row_shape)
            else:
                rows = share.new_empty(self.world_size * self.share_len, *share.shape[1:])
            work = all_gather(rows, share.contiguous(), async_op=True)

        def collected() -> list[Tensor]:
            if work is not None:
                work.wait()
            parts = rows[: sum(self.counts)].split(self.counts)
            if rows.shape[1:] != self.row_shape:
                return list(parts)
            return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]

        return collected


class Optimizers:
    """Applies the update rules to all parameters. All ranks make a step in this order:

    1. Gradients are sent in the order of the table, each bucket once it and all before it are
       complete: the head's before the last backward pass begins, the matrices' during that pass,
       from the last layer to the first, the others' at its end. The gradients of all scalars are
       one message, the last one.
    2. In the same order each rank updates its share, and sends the result. The matrices are
       orthogonalised while gradients of the tables are still on their way.
    3. Each rank changes its weights by what was sent.
    """

    table = staticmethod(parameter_table)
    norms_every = 25  # steps between gradient norms

    def __init__(self, model: GPT, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        self.hp, self.rank, self.world_size = hp, rank, world_size
        self.names = {p: name for name, p in model.named_parameters()}
        self.groups: list[tuple[Group, list[Bucket]]] = []
        table = self.table(hp, model.compile_)
        for group, params in zip(table, members(model, table).values(), strict=True):
            parts = self.bucket_params(group, list(params.values()))
            place = (rank, world_size)
            if group.row_ndim == 0:
                place = (0, 1)  # each rank has all scalars
            buckets = [Bucket(part, group.row_ndim, *place) for part in parts]
            self.groups.append((group, buckets))
        self.order = [bucket for _, buckets in self.groups for bucket in buckets]
        self.several = hp.batch_seqs > world_size  # micro-batches in a step, on each rank
        self.zero_grad(self.groups)  # makes gradient buffers, also of unused parameters
        self.missing: dict[Bucket, int] = {}  # gradients still to come, in the last backward pass
        for group, buckets in self.groups:
            if world_size == 1 or group.complete != "backward":
                continue
            for bucket in buckets:
                for p in bucket.params:
                    p.register_post_accumulate_grad_hook(lambda _, b=bucket: self.arrived(b))

    def bucket_params(self, group: Group, params: list[Tensor]) -> list[list[Tensor]]:
        """Divide a group's parameters into buckets, in the order in which backward reaches them. A
        full bucket has least_rows rows, and at least one for each rank."""
        least_rows = max(group.least_rows, self.world_size)
        if self.world_size == 1 and least_rows > 1:  # nothing is sent: a bucket for each shape
            least_rows = math.inf
        full, unfilled = [], {}
        for p in reversed(params):
            shape = p.shape[p.ndim - group.row_ndim :]
            bucket = unfilled.setdefault(shape, [])
            bucket.insert(0, p)
            if sum(q.numel() for q in bucket) >= least_rows * shape.numel():
                full.append(unfilled.pop(shape))
        return [*full, *unfilled.values()]

    def learning(self, now: Moment) -> list[tuple[Group, list[Bucket]]]:
        """Return the groups that learn at a moment, with their buckets. A fork may leave some out:
        their gradients accumulate."""
        return self.groups

    def begin_last_backward(self, now: Moment) -> None:
        """Begin to count arriving gradients; launch the buckets that are complete already."""
        for group, buckets in self.learning(now):
            for bucket in buckets:
                self.missing[bucket] = 0 if group.complete == "forward" else len(bucket.params)
        self.launch_complete()

    def arrived(self, bucket: Bucket) -> None:
        """Count an arrived gradient, in the last backward pass, and launch complete buckets."""
        if bucket in self.missing:
            self.missing[bucket] -= 1
            self.launch_complete()

    def launch_complete(self) -> None:
        """Launch the buckets that are next in order, up to the first incomplete one."""
        for bucket in list(self.missing):
            if self.missing[bucket]:
                break
            del self.missing[bucket]
            bucket.launch()

    def grad_norms(self, now: Moment) -> Tensor:
        """Return L2 norms (groups,) of the summed gradients, 0 for groups that do not learn now."""
        learning = [group for group, _ in self.learning(now)]
        squares = torch.zeros(len(self.groups), device=self.order[0].params[0].device)
        for square, (group, buckets) in zip(squares, self.groups, strict=True):  # views of squares
            if group not in learning:
                continue
            for bucket in buckets:
                length = torch.linalg.vector_norm(bucket.wait(), dtype=torch.float32)
                weight = bucket.world_size / self.world_size  # every rank counts all scalars
                square += length.square() * weight
        all_reduce_([squares])
        return squares.sqrt()

    @torch.no_grad()
    def step(self, now: Moment) -> list[Tensor]:
        """Update all groups that learn at a moment, and clear their gradients. Return a list. Every
        norms_every steps, and with grad_clip, it holds the mean gradient's norms (groups,)."""
        for bucket in self.missing:
            bucket.launch()
        self.missing = {}
        self.sum_scalars(now)
        grad_scale, norms = 1 / self.hp.batch_seqs, []
        if (now.step + 1) % self.norms_every == 0 or self.hp.grad_clip:
            norms = [self.grad_norms(now) * grad_scale]
        if self.hp.grad_clip:
            grad_scale = grad_scale * (self.hp.grad_clip / (norms[0].norm() + 1e-6)).clamp(max=1)
        pending = []
        for group, buckets in self.learning(now):
            for shape in dict.fromkeys(bucket.row_shape for bucket in buckets):
                same = [bucket for bucket in buckets if bucket.row_shape == shape]
                torch._foreach_mul_([bucket.wait() for bucket in same], grad_scale)
                shares, take = group.rule(same, group.lr * now.lr, now)
                arriving = []
                for bucket, share in zip(same, shares, strict=True):
                    arriving.append(bucket.gather(share))
                    bucket.grads = None
                pending.append((same, arriving, take))
        for same, arriving, take in pending:
            weights, sent = [], []
            for bucket, collected in zip(same, arriving, strict=True):
                weights += bucket.params
                sent += collected()
            take(weights, sent)
        self.zero_grad(self.learning(now))
        return norms

    def sum_scalars(self, now: Moment) -> None:
        """Begin to sum the gradients of scalars over all ranks, all in one message."""
        scalars = []
        for group, buckets in self.learning(now):
            if group.row_ndim == 0:
                scalars += buckets
        if scalars and self.world_size > 1:
            grads = torch.cat([bucket.wait() for bucket in scalars])
            work = dist.all_reduce(grads, async_op=True)
            parts = grads.split([bucket.share_len for bucket in scalars])
            for bucket, part in zip(scalars, parts, strict=True):
                bucket.grads, bucket.work = part, work

    def zero_grad(self, groups: list[tuple[Group, list[Bucket]]]) -> None:
        """Clear the gradients of groups. A table's gradient is filled with zeros. So are the others
        if a step has several micro-batches: new tensors in the first one would fragment the memory
        that the next one needs. With one micro-batch, they are dropped: backward then makes new
        tensors, and adds nothing. ValueError if two parameters share a gradient tensor: compiled
        code does that if their gradients are always equal."""
        sums, dropped = [], {}
        for group, buckets in groups:
            for p in itertools.chain.from_iterable(bucket.params for bucket in buckets):
                if group.row_ndim == 1 or self.several:
                    sums.append(gradient_buffer(p))
                elif p.grad is not None:
                    other = dropped.setdefault(p.grad.data_ptr(), p)
                    if other is not p:
                        both = f"{self.names[other]} and {self.names[p]}"
                        raise ValueError(f"{both} always have equal gradients: leave one out")
                    p.grad = None
        if sums:
            torch._foreach_zero_(sums)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return all ranks' state by parameter name, on the CPU of rank 0. All ranks must call
        this; the others return empty state."""
        saved = {name: {} for name in self.names.values()}
        for bucket in self.order:
            for key, value in bucket.state.items():
                values = bucket.gather(value)() if value.ndim else [value] * len(bucket.params)
                if self.rank:
                    continue
                for p, v in zip(bucket.params, values, strict=True):
                    saved[self.names[p]][key] = v.to("cpu", copy=True)
        return saved

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Load state that any number of ranks saved, or begin anew with {}. Clear all gradients."""
        self.zero_grad(self.groups)
        for bucket in self.order:
            rows = [saved.get(self.names[p], {}) for p in bucket.params]
            bucket.state.clear()
            for key, value in rows[0].items():
                share = bucket.share([row[key] for row in rows]) if value.ndim else value
                bucket.state[key] = share.to(bucket.params[0].device, copy=True)


# -----------------------------------------------------------------------------
# Machine: errors, devices, ranks, signals, the log


def all_reduce_(tensors: list[Tensor]) -> None:
    """Sum each tensor over all ranks, in place; one process has nothing to do.

    All ranks must take the same branches. A value that decides a branch (a loss, a signal to stop,
    a kernel's fault) is summed first: a rank that decided alone would leave the others waiting.
    """
    if dist.is_initialized():
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()


def wait_for_all_ranks(device: torch.device) -> None:
    """Return when all ranks have called this."""
    count = torch.ones(1, device=device)
    all_reduce_([count])
    count.item()  # on a GPU, all_reduce_ does not wait


def keep_freed_memory() -> None:
    """Let glibc, if it is the C library, keep freed memory. Otherwise each chunk of logits takes
    new pages from the system, which costs a tenth to a fifth of the demo's time."""
    M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1
    with contextlib.suppress(AttributeError, OSError):
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def start_device(wanted: str, timeout: int = 600) -> torch.device:
    """Return this process's device. Under torchrun, join the other ranks first; a rank waits at
    most `timeout` seconds for another. UserError if there is no such GPU."""
    device, gpus = torch.device("cpu"), torch.cuda.device_count()
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if wanted == "cuda" or (wanted == "auto" and gpus):
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= gpus:
            remedy = f"start {gpus} processes per node" if gpus else "use --device cpu"
            raise UserError(f"process {local_rank} finds {gpus} GPUs on its machine: {remedy}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        if several:  # torchrun gives each process one thread
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, os.cpu_count() // processes))
        keep_freed_memory()
    if several:
        patience = timedelta(seconds=timeout)
        rank_store().set_timeout(patience)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=rank_store(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=patience,
        )
    return device


@cache
def rank_store() -> "dist.Store":
    """Return the store through which torchrun's ranks meet. The store keeps its keys over a
    restart, so each start has a prefix of its own."""
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)


def chosen_by_rank_0(choose: Callable[[], str]) -> str:
    """Return on all ranks what rank 0 chooses. A UserError of rank 0 is raised on all ranks."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return choose()
    if os.environ["RANK"] == "0":
        try:
            rank_store().set("chosen", json.dumps({"choice": choose()}))
        except UserError as error:
            rank_store().set("chosen", json.dumps({"error": str(error)}))
    found = json.loads(rank_store().get("chosen"))
    if "error" in found:
        raise UserError(found["error"])
    return found["choice"]


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def clock(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Return the peak bytes allocated and reserved on a GPU; on a CPU, the process's, twice."""
    if device.type == "cuda":
        # Each step reads this: torch.cuda.memory_stats, which flattens it, takes ten times as long.
        stats = torch.cuda.memory_stats_as_nested_dict()  # empty until something was allocated
        counts = stats.get("allocated_bytes"), stats.get("reserved_bytes")
        return tuple(count["all"]["peak"] if count else 0 for count in counts)
    unit = 1 if sys.platform == "darwin" else 1024
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,) * 2


def to_host(values: Tensor) -> Callable[[], tuple[list[float], float]]:
    """Start copying from the device. Return a function that waits for this copy only, and returns
    the values and the time at which they arrived."""
    if values.device.type == "cpu":
        found = values.tolist(), time.perf_counter()
        return lambda: found
    host, copied = torch.empty(values.shape, pin_memory=True), torch.cuda.Event()
    host.copy_(values, non_blocking=True)
    copied.record()

    def arrived() -> tuple[list[float], float]:
        copied.synchronize()
        return host.tolist(), time.perf_counter()

    return arrived


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the SIGTERMs and SIGINTs that come. Run.loop then saves a checkpoint and exits.

    A SIGINT more than a second after the first signal ends the process at once. One within that
    second may be a copy: the terminal and torchrun both send a Ctrl-C to torchrun's workers.
    """
    seen: list[int] = []
    first = 0.0

    def note(number: int, frame) -> None:
        nonlocal first
        if not seen:
            first = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > first + 1:
            os._exit(130)
        seen.append(number)

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def script_of(run_class: type["Run"]) -> Path:
    """Return the file that defines a Run: train_gpt.py, or a fork."""
    return Path(inspect.getfile(run_class)).resolve()


def project_files(script: Path) -> list[Path]:
    """Return a script, and the files beside it or beside this one that it imports, directly or
    indirectly."""
    found = [script]
    for path in found:  # found grows in the loop
        names = re.findall(r"^ *(?:import|from) (\w+)", path.read_text("utf-8"), re.MULTILINE)
        for name in sorted(set(names)):
            if getattr(sys.modules.get(name), "__file__", None) == str(script):
                continue  # the script brings this module with it: see tools/bundle.py
            for other in (script.with_name(f"{name}.py"), HERE / f"{name}.py"):
                if other.exists():
                    if other not in found:
                        found.append(other)
                    break
    return found


def lock_run(run_id: str) -> TextIO:
    """Lock a run for this process, and return the lock's open file. Closing the file, or the end of
    the process, unlocks the run. UserError if another process holds the lock.

    After a restart by torchrun, the earlier processes get a minute to end.
    """
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    deadline = time.monotonic() + (60 if restarted else 1)
    try:
        Path("logs").mkdir(exist_ok=True)
        file = open(f"logs/{run_id}.lock", "a+", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        reason = f"cannot write logs/{run_id}.lock in {Path.cwd()}: {error.strerror}"
        raise UserError(f"{reason}; start in a folder that you can write to") from error
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                reason = f"the run {run_id} is in use by {file.read()}"
                raise UserError(f"{reason}: wait for its end, or choose another --run_id") from None
            time.sleep(0.1)
        except OSError as error:
            print(f"note: cannot lock {file.name} ({error.strerror}): do not start a run twice")
            break
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


class Log:
    """What rank 0 writes about a run: its log, its metrics, and the console.

    logs/<run_id>.txt begins with all that it takes to reproduce the run: the started script, then a
    line of 100 "="; then versions, machine, settings, and the files that the script imports.

    logs/<run_id>.lock is locked while the run's process lives, so no other process writes the run.

    logs/<run_id>.jsonl has an object for each step: step; tokens so far; train_loss, before the
    update; val_loss after the step, where it was measured; the fields of Moment; ms, between the
    arrivals of the previous step's result and this one's on the host; tokens_per_s; memory_mib, the
    peak so far; and every norms_every steps, grad_norm_<group>, before clipping. A row is written
    during the next step, so that the host does not wait for the GPU.

    The console has a line for each step, or on a terminal a progress bar.
    """

    def __init__(self, run: "Run", resumed: bool):
        """Begin log and metrics, or continue them without rows of steps after run.first_step."""
        hp, rank = run.hp, run.rank
        self.run_id = hp.run_id or time.strftime("%Y-%m-%d_%H-%M-%S_") + uuid.uuid4().hex[:6]
        self.path = Path("logs", f"{self.run_id}.txt") if rank == 0 else Path(os.devnull)
        if rank == 0 and self.path.exists() and not resumed:
            raise UserError(f"{self.path} exists: choose another --run_id, or --resume")
        self.lock = lock_run(self.run_id) if rank == 0 else None
        self.file = self.path.open("a", buffering=1, encoding="utf-8")
        self.bar = tqdm(
            total=hp.num_iterations,
            initial=run.first_step,
            file=sys.stdout,
            leave=False,
            disable=None,  # no bar where there is no terminal
            bar_format="{n}/{total} {bar}{postfix}, {remaining} left",
        )
        self.norms = [f"grad_norm_{group.name}" for group, _ in run.optimizers.groups]
        self.tokens = hp.batch_seqs * sum(now.seq_len for now in run.moments[: run.first_step])
        self.row, self.row_tokens, self.result = {}, 0, None
        self.last, self.ended = (0.0, 0.0), 0.0  # the last step's (loss, stop), and its time
        metrics = self.path.with_suffix(".jsonl") if rank == 0 else self.path
        self.metrics = metrics.open("ab", buffering=0)
        if rank == 0:
            self.metrics.truncate(self.bytes_until(metrics, run.first_step))
            if self.path.stat().st_size == 0:
                self.write_header(run)

    def bytes_until(self, path: Path, step: int) -> int:
        """Return the bytes of the metrics' rows up to a step, without an incomplete row."""
        size = 0
        with contextlib.suppress(ValueError):
            for row in path.read_bytes().splitlines(keepends=True):
                if not row.endswith(b"\n") or json.loads(row)["step"] > step:
                    break
                size += len(row)
        return size if step else 0

    def write_header(self, run: "Run") -> None:
        """Write source, software, machine and settings."""
        script, *others = project_files(script_of(type(run)))
        command = "nvidia-smi" if run.device.type == "cuda" else "lscpu || sysctl machdep.cpu"
        machine = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        parts = [
            script.read_text("utf-8"),
            f"Python {sys.version}\ntorch {torch.__version__} CUDA {torch.version.cuda}",
            machine,
            "\n".join(f"{name}: {show(value)}" for name, value in vars(run.hp).items()),
        ]
        parts += [f"{path.name}:\n{path.read_text('utf-8')}" for path in others]
        for part in parts:
            print(part, "=" * 100, sep="\n", file=self.file)

    def __call__(self, line: str, console: bool = True) -> None:
        """Write a line to the log and, with `console`, to the console."""
        print(line, file=self.file)
        if console:
            self.bar.write(line)
            sys.stdout.flush()

    def step(self, line: str, progress: str) -> None:
        """Write the line of one training step; on a terminal the bar moves instead."""
        self(line, console=self.bar.disable)
        self.bar.set_postfix_str(progress, refresh=False)
        self.bar.update()

    def close(self) -> None:
        """Close the files, and release the lock."""
        self.file.close()
        self.metrics.close()
        if self.lock is not None:
            self.lock.close()

    def begin_row(self, now: Moment, tokens: int, result: Tensor) -> None:
        """Begin the row of a step whose `result`, of train_step, the GPU may still be computing."""
        self.tokens += tokens
        self.row_tokens = tokens
        self.row = vars(now) | {"step": now.step + 1, "tokens": self.tokens}
        self.row["memory_mib"] = peak_memory(result.device)[0] >> 20
        self.result = to_host(result)

    def finish_row(self, since: float) -> tuple[float, float]:
        """Complete the last step's row, and return its loss and `stop`. `since` is the time at
        which training began, or continued after a validation."""
        if self.result is not None:
            (loss, stop, *norms), ended = self.result()
            seconds = ended - max(self.ended, since)
            self.last, self.ended, self.result = (loss, stop), ended, None
            self.row["train_loss"] = loss
            self.row["ms"] = round(1e3 * seconds, 3)
            self.row["tokens_per_s"] = round(self.row_tokens / seconds)
            self.row |= zip(self.norms, norms, strict=False)
        return self.last

    def write_row(self, **more) -> None:
        """Append the row and the fields `more`, if there are any, in one write."""
        row = self.row | more
        if row:
            self.metrics.write(json.dumps(row).encode() + b"\n")
        self.row = {}


def as_program(name: str, parse: Callable, work: Callable) -> None:
    """Call work(parse()) as a command; a user's error becomes one line and an exit status.

    The status is 2 while parsing, else 1. Only rank 0 writes to the console. If several ranks fail,
    the lowest one reports: torchrun ends all ranks when one ends, so higher ranks wait before they
    report. A rank that lost another rank waits, too: the lost one knows better what happened.
    """
    status, rank = 2, int(os.environ.get("RANK", 0))
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        parsed = parse()
        status = 1
        work(parsed)
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError, RuntimeError) as error:
        message = str(error)
        patience = 0  # seconds
        if rank:
            patience = 10 + min(rank, 40) / 4
        if isinstance(error, torch.OutOfMemoryError):
            message = f"out of GPU memory, make --seq_len and --val_seq_len smaller: {error}"
        elif isinstance(error, RuntimeError):
            if not (isinstance(error, dist.DistError) or re.search("gloo|pair clos", message)):
                raise
            message = f"another rank has stopped or hangs: {error}"
            patience = max(patience, 5)
        time.sleep(patience)
        print(f"{name}: error:", " ".join(message.split())[:500], file=sys.stderr)
        sys.exit(status)
    finally:
        gc.unfreeze()  # see Run.loop


# -----------------------------------------------------------------------------
# Run: flags, checkpoints, warm-up, the timed loop


def save_atomically(path: Path, state: dict) -> None:
    """Save a checkpoint completely or not at all. UserError if that fails."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except Exception as error:  # torch's writer turns all errors into RuntimeError
        temporary.unlink(missing_ok=True)
        raise UserError(f"could not save {path}: is the disk full? ({error})") from error


def load_checkpoint(path: str | Path, run_class: type["Run"], verify: bool = True) -> dict:
    """Return a checkpoint, on the CPU: `model`, with names without _orig_mod., and unless it is a
    published one, all else that Run.save saves. UserError if the file is damaged, no checkpoint, or
    another script's. Without `verify`, weights are mapped but not read, which is quick."""
    if not Path(path).is_file():
        raise UserError(f"there is no checkpoint {path}: name a file, or auto for the newest one")
    try:
        if verify:
            with zipfile.ZipFile(path) as archive:  # torch.load does not notice flipped bytes
                if damaged := archive.testzip():
                    raise ValueError(f"its part {damaged} is damaged")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=not verify)
        state["model"] = {k.removeprefix("_orig_mod."): v for k, v in state["model"].items()}
        saved = state.get("hyperparameters")
        if saved is None:
            return state
        known = run_class.records.get(state["record"])
        names = set(names_about(run_class.settings, "learning", "run"))
        # Settings that a checkpoint of this script lacks are new ones: the record has their values.
        # A checkpoint of another script must have exactly this script's settings.
        own = state["script"] == script_of(run_class).name
        if known is None or saved.keys() - names or (names - saved.keys() and not own):
            other = f"{state['record']} of {state['script']}"
            remedy = "start that script, or a tool with --script"
            raise OtherScriptError(f"{path} is a checkpoint of {other}: {remedy}")
        state["hyperparameters"] = replace(known, **saved)
        run_class.check(state["hyperparameters"])
        return state
    except (OSError, MemoryError, UserError):
        raise
    except Exception as error:  # torch's own advice is an unsafe load
        reason = error if isinstance(error, (ValueError, TypeError)) else type(error).__name__
        raise UserError(f"{path} is not an intact checkpoint of this program ({reason})") from error


def checkpoints(folder: Path, pattern: str = "state_step*.pt") -> list[Path]:
    """Return the checkpoints in a folder, newest first."""
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def newest_checkpoint(run_id: str, run_class: type["Run"], verify: bool = True) -> tuple[str, dict]:
    """Return path and content of the script's newest intact checkpoint under logs/, of a run or of
    any run ("*"); "" and {} if there is no checkpoint. UserError if there are some, none intact."""
    found = checkpoints(Path("logs"), f"{run_id}/state_step*.pt")
    own = script_of(run_class).name
    for path in found:
        try:
            saved = load_checkpoint(path, run_class, verify)
            if saved.get("script", own) == own:
                return str(path), saved
        except OtherScriptError:
            continue
        except UserError as error:
            print(f"{error}; trying an older one")
    if found:
        raise UserError(f"no intact checkpoint of {own} is among {len(found)} under logs/")
    return "", {}


def can_resume(run_id: str, args: argparse.Namespace, run_class: type["Run"]) -> bool:
    """Say whether `--resume auto` may resume a run: no process holds its lock, it is unfinished,
    and it has the settings that the flags ask for, or no flag is about learning."""
    try:
        lock_run(run_id).close()
    except UserError as error:
        print(f"--resume auto: {error}")
        return False
    try:
        _, saved = newest_checkpoint(run_id, run_class, verify=False)
    except UserError:
        return False  # another script's, or damaged, as was printed
    if "hyperparameters" not in saved:
        return False  # a published one
    own = asked = saved["hyperparameters"]
    if vars(args).keys() & {"record", *names_about(own, "learning")}:
        asked = with_flags(run_class.records[record_asked(args, run_class)], args)
    if differences(own, asked) and "resume_force" not in args:
        return False
    return saved["step"] < with_flags(own, args).num_iterations


def automatic_checkpoint(args: argparse.Namespace, run_class: type["Run"]) -> str:
    """Return the path of the checkpoint that "auto" means: the newest one under logs/, of --run_id
    if that is given. For --resume without --run_id, only runs that can_resume count. "" if there is
    none. UserError if another process holds the lock of --run_id."""
    run_id = getattr(args, "run_id", "")
    if "eval" in args:
        return newest_checkpoint(run_id or "*", run_class)[0]
    if run_id:
        lock_run(run_id).close()
    else:
        found = checkpoints(Path("logs"), "*/state_step*.pt")
        for name in dict.fromkeys(path.parent.name for path in found):
            if can_resume(name, args, run_class):
                run_id = name
                break
    path = newest_checkpoint(run_id, run_class)[0] if run_id else ""
    if not path:
        print("--resume auto: there is no unfinished run with these settings; a new one begins")
    return path


def fail(message: str):
    """Raise UserError: argparse calls this for a bad flag."""
    raise UserError(message)


def switch(text: str) -> bool:
    """Return the bool of "on", "true", "off" or "false"."""
    values = {"on": True, "true": True, "off": False, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text} is neither on nor off")
    return values[text.lower()]


def flag_parser(run_class: type["Run"], record: str) -> argparse.ArgumentParser:
    """Return a parser of the flags: one for each setting, and --record, --eval, --resume and such.
    Its namespace has only the flags that were given. Its help shows the record's values."""
    script = script_of(run_class)
    about = (sys.modules[run_class.__module__].__doc__ or script.name).strip().splitlines()[0]
    parser = argparse.ArgumentParser(
        prog=script.name,
        usage=f"{script.name} [--record NAME] [--SETTING VALUE ...]",
        description=f"{about} In brackets: the values of {record}.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    parser.error = fail
    names = ", ".join(run_class.records)
    parser.add_argument("-h", "--help", action="store_true", help="print this and exit")
    parser.add_argument("--record", help=f"settings to start from [{record}]: {names}")
    parser.add_argument("--eval", metavar="auto|PATH", help="print a checkpoint's loss and exit")
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="resume from a checkpoint; auto: the newest"
    )
    parser.add_argument(
        "--resume_force", action="store_true", help="resume even with other settings"
    )
    group = parser
    for f in fields(run_class.settings):
        if f.metadata["group"]:
            group = parser.add_argument_group(f.metadata["group"])
        value = show(getattr(run_class.records[record], f.name)).replace("%", "%%")
        flag, text = f"--{f.name}", f"{f.metadata['help']} [{value}]"
        kind = type(f.default)
        if f.metadata["choices"]:
            group.add_argument(flag, help=text, choices=f.metadata["choices"])
        elif kind is bool:
            group.add_argument(
                flag, help=text, type=switch, nargs="?", const=True, metavar="on|off"
            )
        elif kind is tuple:
            group.add_argument(flag, help=text, type=float, nargs=len(f.default), metavar="float")
        else:
            group.add_argument(flag, help=text, type=kind, metavar=kind.__name__)
    return parser


def parse_flags(argv: list[str] | None, run_class: type["Run"]) -> argparse.Namespace:
    """Return the flags that were given, or print the help asked for. UserError for a bad flag."""
    parser = flag_parser(run_class, run_class.default_record)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        names = ["record", "eval", "resume", *(f.name for f in fields(run_class.settings))]
        name = unknown[0].split("=")[0]
        near = difflib.get_close_matches(name, [f"--{n}" for n in names], 1, cutoff=0.7)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"unrecognized arguments: {' '.join(unknown)}{meant}")
    if "help" in args:
        flag_parser(run_class, record_asked(args, run_class)).print_help()
        sys.exit(0)
    return args


def find_record(name: str, run_class: type["Run"]) -> str:
    """Return the record's full name: `name`, or the only one that begins with `name`. UserError if
    there is none, or more than one."""
    records = list(run_class.records)
    found = [name] if name in records else [known for known in records if known.startswith(name)]
    if len(found) == 1:
        return found[0]
    for path in sorted(HERE.glob("forks/*.py")):  # read, not imported
        table = re.search(r"^RECORDS = \{\n(.*?)^\}", path.read_text("utf-8"), re.M | re.S)
        others = re.findall(r'^    "([^"]*)": ', table[1], re.M) if table else []
        if not found and any(other.startswith(name) for other in others):
            where = path.relative_to(HERE)
            raise UserError(f"record {name} is in {where}: ./run.sh {where} --record {name}")
    near = found or difflib.get_close_matches(name, records, 1) or records
    raise UserError(f"there is no record {name}: did you mean {' or '.join(near)}?")


def record_asked(args: argparse.Namespace, run_class: type["Run"]) -> str:
    """Return the name of the record that flags ask for."""
    if "record" in args:
        return find_record(args.record, run_class)
    on_cpu = getattr(args, "device", "auto") == "cpu" or not torch.cuda.is_available()
    return "demo" if on_cpu and "demo" in run_class.records else run_class.default_record


def with_flags(hp: Hyperparameters, args: argparse.Namespace) -> Hyperparameters:
    """Return the settings, changed by the flags."""
    given = {name: value for name, value in vars(args).items() if name in vars(hp)}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = tuple(value)
    if "layers" in given and "num_layers" not in given:
        given["num_layers"] = given["layers"].count(",") + 1
    return replace(hp, **given)


def differences(then: Hyperparameters, now: Hyperparameters) -> list[str]:
    """Return the settings about learning that differ, as "name value -> value"."""
    changed = []
    for name in names_about(now, "learning"):
        before, after = getattr(then, name), getattr(now, name)
        if before != after:
            changed.append(f"{name} {show(before)} -> {show(after)}")
    return changed


def parse_args(
    argv: list[str] | None, run_class: type["Run"]
) -> tuple[Hyperparameters, argparse.Namespace]:
    """Return the settings (a record's or a checkpoint's, changed by flags), and the given flags,
    with `record` (a name), `checkpoint` (its path or None) and `saved` (its content, or {}) added.

    UserError for an unknown flag or a bad value.
    """
    args = parse_flags(argv, run_class)
    asked = record_asked(args, run_class)
    args.checkpoint = getattr(args, "eval", getattr(args, "resume", None))
    args.saved = {}
    if args.checkpoint == "auto":
        args.checkpoint = chosen_by_rank_0(lambda: automatic_checkpoint(args, run_class)) or None
        if "eval" in args and args.checkpoint is None:
            raise UserError("no checkpoint under logs/: train a model first, or name one")
        if args.checkpoint and not Path(args.checkpoint).is_file():
            reason = f"rank 0 chose {args.checkpoint}, which this rank cannot find"
            raise UserError(f"{reason}: logs/ must be one folder for all ranks")
    if args.checkpoint is not None:
        args.saved = load_checkpoint(args.checkpoint, run_class)

    # Settings: those of a checkpoint, unless --record asks for others; then the flags.
    hp = args.saved.get("hyperparameters")
    if hp is not None and "record" not in args:
        args.record = args.saved["record"]
    else:
        args.record, hp = asked, run_class.records[asked]
    hp = with_flags(replace(hp, run_id=args.saved.get("run_id", "")), args)
    run_class.check(hp)
    own = script_of(run_class).name
    if "resume" in args and args.saved:
        check_resumed(hp, args, own)
    elif args.saved.get("script", own) != own:
        print(f"note: {args.saved['script']} saved {args.checkpoint}; {own} evaluates it")
    return hp, args


def check_resumed(hp: Hyperparameters, args: argparse.Namespace, own: str) -> None:
    """Raise UserError if the script `own` with these settings cannot resume from args.saved."""
    saved = args.saved.get("hyperparameters")
    if saved is None:
        raise UserError(f"--resume {args.checkpoint}: the file has only weights, for --eval")
    changed = differences(saved, hp)
    if args.saved["script"] != own:
        changed.insert(0, f"script {args.saved['script']} -> {own}")
    if changed and "resume_force" not in args:
        remedy = "--resume_force accepts them"
        text = ", ".join(changed)
        raise UserError(f"the checkpoint has other hyperparameters: {text}; {remedy}")
    if args.saved["step"] < hp.num_iterations and not args.saved["optimizers"]:
        reason = "it is the last one of a finished run, without the optimizers' state"
        raise UserError(f"--resume {args.checkpoint}: {reason}; name an earlier one")


def build(
    model_class: type[GPT], hp: Hyperparameters, device: torch.device, weights: dict | None = None
) -> GPT:
    """Return the model on its device, compiled if the settings say so, with initial weights or the
    given ones."""
    torch.manual_seed(hp.seed)
    model = model_class(hp)
    if weights:
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = f"has other hyperparameters: {error}"
            if any(name.endswith("attn.c_q.weight") for name in weights):
                reason = "is a published one of 2024, with separate q, k and v: not supported"
            raise UserError(f"the checkpoint {reason}") from error
    compiled = hp.compile == "on" or (hp.compile == "auto" and device.type == "cuda")
    return model.to_device(device, compiled)


@torch.no_grad()
def evaluate(model: GPT, batch: list[Tensor], when: Moment | int, device: torch.device) -> float:
    """Return the mean loss of all ranks' validation sequences. `when` is as in GPT.windows.

    This rank's inputs and targets are (n, T), on its device, and n may be 0.
    """
    model.eval()
    total = torch.zeros(2, device=device)  # losses, sequences
    for inputs, targets in zip(*batch, strict=True):
        loss = model(inputs, targets, when)
        total += torch.stack([loss, torch.ones_like(loss)])
    all_reduce_([total])
    model.train()
    return (total[0] / total[1]).item()


def train_step(
    model: GPT,
    optimizers: Optimizers,
    inputs: Tensor,
    targets: Tensor,
    now: Moment,
    stop: float = 0,
) -> Tensor:
    """Make one step on this rank's (n, T) micro-batches.

    Return one tensor (2,) or (2 + groups,), equal on all ranks: the mean loss of the global batch,
    the sum of `stop`, and the groups' gradient norms if the optimizers made them. Gradients are
    summed first and divided last, so that each micro-batch's FP8 gradient keeps its scale.
    """
    loss = torch.zeros((), device=inputs.device)
    for i, (input_seq, target_seq) in enumerate(zip(inputs, targets, strict=True), 1):
        micro_loss = model(input_seq, target_seq, now)
        if i == len(inputs):
            optimizers.begin_last_backward(now)
        micro_loss.backward()
        loss += micro_loss.detach()
        del micro_loss  # and its graph's memory, before the next one is made
    norms = optimizers.step(now)
    result = torch.stack([loss / model.hp.batch_seqs, torch.full_like(loss, stop)])
    all_reduce_([result])
    return torch.cat([result, *norms])


def choose_kernels(model: "GPT", hp: Hyperparameters, device: torch.device, log=print) -> None:
    """Decide which Triton kernels are used, and log their names. --kernels auto uses those that
    agree with their plain functions on all ranks. UserError for --kernels on where Triton cannot
    run.
    """
    reason = "--kernels off" if hp.kernels == "off" else obstacle(device)
    if hp.kernels == "on" and reason:
        raise UserError(f"--kernels on: {reason}")
    for kernel in model.kernels:
        kernel.use = not reason and kernel.fused is not None
    if hp.kernels == "auto":
        in_fp8 = trains_in_fp8(hp.fp8, device)
        dtype = activation_dtype(device)
        faults = [
            reason or fault(kernel.plain, model.compile_, hp, device, dtype, in_fp8)
            for kernel in model.kernels
        ]
        # A kernel is used if no rank has a fault: all ranks must compute the same.
        votes = torch.tensor([float(bool(text)) for text in faults], device=device)
        all_reduce_([votes])
        for kernel, text, against in zip(model.kernels, faults, votes.tolist(), strict=True):
            kernel.use = not against
            if against and not reason:
                log(f"kernel {kernel.name} is off: {text or 'another rank cannot use it'}")
    names = " ".join(names_in_use(model.kernels)) or "none"
    if device.type == "cuda" or names != "none":  # a CPU has none
        log(f"kernels: {names}, {reason}" if reason else f"kernels: {names}")


def warm_up(
    model: GPT, optimizers: Optimizers, moments: list[Moment], device: torch.device, log=print
) -> None:
    """Choose kernels, then make a step of each kind in `moments`, on made-up tokens.

    The initial weights are restored at the end. Without compilation, one step of the longest kind
    is enough. Compilation leaves cycles of Python objects, which hold gigabytes of GPU memory: they
    are collected, and one more step then reserves the memory that the run will need.
    """
    hp = model.hp
    initial = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
    choose_kernels(model, hp, device, log)
    kinds = {now.kind: now for now in moments}  # the last moment of each kind
    longest = max(reversed(kinds.values()), key=lambda now: now.seq_len)  # the last of several
    size = max(longest.seq_len, hp.val_seq_len)
    tokens = torch.arange(1, size + 1, device=device)[None] % hp.vocab_size

    def once(now: Moment) -> None:
        val = tokens[:, : hp.val_seq_len]
        evaluate(model, [val.int(), val], now, device)  # first: its blocks of memory are larger
        x = tokens[:, : now.seq_len]
        train_step(model, optimizers, x.int(), x, now)

    for now in kinds.values() if model.compiled else [longest]:
        once(now)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        once(longest)
    model.load_state_dict(initial)
    optimizers.load_state_dict({})


class Run:
    """A run: where it starts, its loop, and what it writes.

    A fork that imports this file has a subclass, which overrides names and methods from `records`
    to can_stop. Tools read no others.
    """

    records: dict[str, Hyperparameters] = RECORDS
    default_record = "2025-01-26_BatchSize"  # without --record; on a CPU, the demo
    settings = Hyperparameters
    model_class = GPT
    optimizers_class = Optimizers
    loss_digits = 4  # of a validation loss in the log
    check = staticmethod(check)
    moment = staticmethod(moment)

    @staticmethod
    def cut(shard: Shard, position: int, now: Moment, hp: Hyperparameters):
        """Cut the batch of a moment: see cut_consecutive."""
        return cut_consecutive(shard, position, now.step, now.seq_len, hp.batch_seqs)

    def validates(self, step: int) -> bool:
        """Say whether the run validates after a step. After the last step it always does."""
        every = self.hp.val_loss_every
        return bool(every) and step % every == 0

    def can_stop(self, step: int) -> bool:
        """Say whether a checkpoint after a step holds all that the next step needs."""
        return True

    def __init__(self, hp: Hyperparameters, args: argparse.Namespace):
        """Find the device, read the validation data, make the model."""
        self.hp, self.record, self.log = hp, args.record, None
        self.device = start_device(hp.device, hp.comm_timeout)
        self.rank, self.world_size = ranks()
        # Validation is one global batch. A rank may get none of its sequences.
        validation = distributed_data_generator(
            hp.val_files,
            hp.val_seq_len,
            batch_seqs=hp.val_tokens // hp.val_seq_len,
            rank=0,
            world_size=1,
            num_batches=1,
            vocab_size=hp.vocab_size,
        )
        self.val_batch = [t[self.rank :: self.world_size].to(self.device) for t in next(validation)]
        self.model = build(self.model_class, hp, self.device, args.saved.get("model"))

    def new_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of the steps from first_step on."""
        hp = self.hp

        def cut_step(shard: Shard, position: int, step: int):
            return self.cut(shard, position, self.moments[step], hp)

        return distributed_data_generator(
            hp.train_files,
            hp.seq_len,
            hp.batch_seqs,
            self.rank,
            self.world_size,
            start_step=self.first_step,
            num_batches=hp.num_iterations,
            epochs=hp.epochs,
            vocab_size=hp.vocab_size,
            device=self.device,
            cut=cut_step,
        )

    def begin(self, saved: dict, resumed: bool) -> None:
        """Start the log, warm up, and load the rest of a checkpoint, if there is one."""
        hp, device = self.hp, self.device
        on_gpu = device.type == "cuda"
        self.first_step, self.seconds = saved.get("step", 0), saved.get("seconds", 0.0)
        self.moments = [self.moment(step, hp) for step in range(hp.num_iterations + 1)]
        self.batches = self.new_batches()
        self.optimizers = self.optimizers_class(self.model, hp, self.rank, self.world_size)
        self.log = log = Log(self, resumed)
        self.folder = Path("logs", log.run_id)
        if self.rank == 0:
            for unfinished in self.folder.glob("*.tmp"):  # of a run that was killed while it saved
                unfinished.unlink()
        own = self.records[self.record]
        changed = [n for n in vars(hp) if getattr(hp, n) != getattr(own, n)]
        flags = "".join(f" --{name} {show(getattr(hp, name))}" for name in changed)
        place = torch.cuda.get_device_name() if on_gpu else "CPU"
        log(f"record {self.record}{flags}\non {self.world_size} x {place}, log in {log.path}")
        if self.record == "demo" and hp.device == "auto" and not on_gpu:
            log("no GPU found: this is a small demonstration, on the sample corpus in data/")
        if on_gpu and hp.fp8 and not trains_in_fp8(hp.fp8, device):
            log("this GPU has no FP8: the head trains in bfloat16")
        start = clock(device)
        warm_up(self.model, self.optimizers, self.moments, device, log)
        # Each step copies its inputs and targets to these tensors, so no step allocates any.
        most = hp.batch_seqs // self.world_size * max(now.seq_len for now in self.moments)
        dtypes = (torch.int32, torch.int64)
        self.batch_buffers = [torch.empty(most, dtype=dtype, device=device) for dtype in dtypes]
        log(f"compilation and warm-up, not part of train_time: {clock(device) - start:.1f} s")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if saved:
            self.restore(saved)

    def restore(self, saved: dict) -> None:
        """Restore all of a checkpoint but the weights, which the model has already."""
        text = f"resumed at step {self.first_step}"
        if script_of(type(self)).read_text("utf-8") != saved["code"]:
            text += "; the source has changed since"
        if names_in_use(self.model.kernels) != saved["kernels"]:
            text += f"; the kernels then were: {' '.join(saved['kernels']) or 'none'}"
        self.log(text)
        self.optimizers.load_state_dict(saved["optimizers"])
        torch.set_rng_state(saved["random"])
        if self.device.type == "cuda" and saved["cuda_random"] is not None:
            torch.cuda.set_rng_state(saved["cuda_random"])
        saved.clear()  # frees more than the model's size

    def loop(self) -> None:
        """Train to the last step, or until a signal comes. Validation and saving are not timed.

        The host never waits for the GPU within a step: it reads a step's loss during the next step.
        An .item() anywhere in a step would break this, and tests/gpu would notice.
        """
        hp, log, stop, path = self.hp, self.log, 0.0, None
        gc.freeze()  # garbage collection skips what exists now: it stays to the end
        with stop_signals() as signals:
            start = clock(self.device)
            for step in range(self.first_step, hp.num_iterations + 1):  # steps made so far
                last, new = step == hp.num_iterations, step > self.first_step
                # A resumed run does not repeat the validation at the step where it was saved.
                validate = (last or self.validates(step)) and (new or step == 0)
                leave = stop and not last and new and self.can_stop(step)
                # With save_every, the last step is saved, too, which marks the run as finished.
                due = hp.save_every and (last or step % hp.save_every == 0)
                save = new and (due or (last and hp.save_last))
                if validate or save or leave:
                    self.check_loss(log.finish_row(start)[0], step)
                    self.seconds += clock(self.device) - start
                    log.write_row(**(self.validate(step) if validate else {}))
                    if save or leave:
                        path = self.save(step)
                    if leave:
                        self.leave(step, signals)
                    start = clock(self.device)
                if last:
                    break
                now = self.moments[step]
                batch = self.next_batch()
                result = train_step(self.model, self.optimizers, *batch, now, stop=bool(signals))
                loss, stop = log.finish_row(start)  # of the step before, so no waiting
                self.check_loss(loss, step)
                log.write_row()
                log.begin_row(now, hp.batch_seqs * now.seq_len, result)
                ms = 1e3 * (self.seconds + time.perf_counter() - start)
                rate = f"{ms / (step + 1):.0f} ms/step, {log.tokens / ms:.1f}k tokens/s"
                log.step(self.line(step + 1, ms), f"loss {loss:.3f}, {rate}")
        self.end(path)

    def next_batch(self) -> list[Tensor]:
        """Return inputs and targets (n, T) of the next step, on the device."""
        batch = []
        for buffer, arrived in zip(self.batch_buffers, next(self.batches), strict=True):
            batch.append(buffer[: arrived.numel()].view_as(arrived))
            batch[-1].copy_(arrived, non_blocking=True)
        return batch

    def line(self, step: int, ms: float, loss: str = "") -> str:
        """Return a line of the log, in the format that the community's scripts parse."""
        times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        return f"step:{step}/{self.hp.num_iterations} {loss}{times}"

    def check_loss(self, loss: float, step: int) -> None:
        """Raise UserError if the loss is not finite. All ranks have the same loss, and all stop."""
        if not math.isfinite(loss):
            self.diverged(f"the loss is {loss} at step {step}")

    def diverged(self, what: str) -> None:
        """Raise UserError with `what`, advice, and the last checkpoint's name."""
        kept = next(iter(checkpoints(self.folder)), "none")
        remedy = f"try lower learning rates, or --fp8 off; the last checkpoint is {kept}"
        raise UserError(f"{what}: {remedy}")

    def validate(self, step: int) -> dict:
        """Log the validation loss, and return fields for the metrics' row."""
        if step == 0:
            self.log(f"validating on {self.hp.val_tokens} tokens")
        loss = evaluate(self.model, self.val_batch, self.moments[step], self.device)
        text = f"val_loss:{loss:.{self.loss_digits}f} "
        self.log(self.line(step, 1e3 * self.seconds, text))
        self.check_loss(loss, step)
        return {"step": step, "val_loss": loss}

    def save(self, step: int) -> Path:
        """Save what is needed to resume after a step, and return the file's path. After the last
        step, the optimizers' state is left out."""
        if not all(p.isfinite().all() for p in self.model.parameters()):
            self.diverged(f"a weight is not finite after step {step}")
        script = script_of(type(self))
        names = names_about(self.hp, "learning", "run")
        finished = step == self.hp.num_iterations
        state = {
            "script": script.name,
            "code": script.read_text("utf-8"),
            "record": self.record,
            "hyperparameters": {name: getattr(self.hp, name) for name in names},
            "run_id": self.log.run_id,
            "step": step,
            "seconds": self.seconds,
            "random": torch.get_rng_state(),
            "cuda_random": torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
            "kernels": names_in_use(self.model.kernels),
            "model": self.model.state_dict(),
            "optimizers": {} if finished else self.optimizers.state_dict(),
        }
        path = self.folder / f"state_step{step:06}.pt"
        if self.rank == 0:
            save_atomically(path, state)
            for old in checkpoints(self.folder)[self.hp.keep :]:
                old.unlink()
        return path

    def leave(self, step: int, signals: list[int]) -> None:
        """End the process with the signal's exit status, after rank 0 has saved."""
        wait_for_all_ranks(self.device)
        number = signal.Signals(signals[0] if signals else signal.SIGTERM)
        self.log(f"stopped by {number.name} and saved; --resume auto continues after step {step}")
        sys.exit(128 + number)

    def end(self, path: Path | None) -> None:
        """Log the peak memory, and print commands to try next."""
        self.log.bar.close()
        allocated, reserved = (size >> 20 for size in peak_memory(self.device))
        self.log(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
        run_sh = HERE / "run.sh"
        if not run_sh.exists():
            return  # this file alone
        command = "./run.sh" if Path.cwd() == HERE else str(run_sh)
        if path is not None:
            print("read what it writes:", shlex.join([command, "tools/sample.py", str(path)]))
        if self.hp.train_files.startswith(FINEWEB):
            log = str(self.log.path)
            print("compare with published runs:", shlex.join([command, "tools/records.py", log]))


def work(parsed: tuple[Hyperparameters, argparse.Namespace], run_class: type[Run]) -> None:
    """Train with what parse_args returned; with --eval, validate once."""
    hp, args = parsed
    step = args.saved.get("step", hp.num_iterations if args.saved else 0)
    if "resume" in args and args.saved and step >= hp.num_iterations:
        print(f"the run is finished: step {step} of {hp.num_iterations} is saved")
        return
    run = run_class(hp, args)
    if "eval" in args:
        choose_kernels(run.model, hp, run.device)
        loss = evaluate(run.model, run.val_batch, run.moment(step, hp), run.device)
        print(f"val_loss:{loss:.4f} over {hp.val_tokens} tokens, {args.checkpoint}")
        return
    try:
        run.begin(args.saved, resumed="resume" in args)
        run.loop()
    finally:
        if run.log is not None:
            run.log.close()


def main(argv: list[str] | None = None, run_class: type[Run] = Run) -> None:
    """Run the command line of this file, or of a fork whose Run is given."""
    as_program(
        script_of(run_class).name,
        parse=lambda: parse_args(argv, run_class),
        work=lambda parsed: work(parsed, run_class),
    )


if __name__ == "__main__":
    main()
