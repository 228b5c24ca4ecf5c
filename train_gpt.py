"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # the record, on a node of 8 H100s
    python train_gpt.py                                      # one GPU; without one, a small demo
    python train_gpt.py --help                               # every setting is a flag

The default is the NanoGPT-speedrun record 2025-01-26_BatchSize: 1770 steps of 393216 tokens,
published at a mean validation loss of 3.2787 (81 runs) in 2.997 minutes of training on 8 H100s.
Its numbers and ideas come from github.com/KellerJordan/modded-nanogpt and the people named there.
What this implementation has reached, on what and with which torch, stands in BENCHMARKS.md.

The file reads like the life of a batch, and importing it does nothing:

    Configuration    what a run is, as data: layer table, settings, records, command line
    Numerics         FP8 matmuls, and the linear layer that uses them
    Kernels          three functions in Triton, each with the plain twin that it must beat
    Optimizers       Muon for the hidden matrices, Adam for the rest, a share of both for each rank
    Model            masks, attention, layers, and a loss that never stores its logits
    Data             shards, and batches that depend on the step alone
    Schedules        learning rate, momentum and window as functions of the step
    Training         devices and ranks, log, metrics, checkpoints, signals, the timed loop, main()
"""

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import glob
import hashlib
import itertools
import json
import math
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__" and "OMP_WAIT_POLICY" not in os.environ:
    # Before torch loads OpenMP, whose threads spin while they wait for each other: where other work
    # shares the cores, a long spin makes a step several times as long (BENCHMARKS.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # GNU's; other libraries have other names

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

try:  # PyTorch brings it along where there is CUDA
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=None)

HERE = Path(__file__).resolve().parent
FINEWEB = f"{HERE}/data/fineweb10B/fineweb"
BLOCK = 128  # tokens in a block of the attention mask; sequences are whole blocks
END_OF_TEXT = 50256  # the GPT-2 token that begins every document


class UserError(ValueError):
    """What is wrong, where, and what to do about it: one line for people, without a traceback."""


def fail(message: str):
    raise UserError(message)


# -----------------------------------------------------------------------------
# Configuration: a layer is a row, a setting is a row, a record is a row


# A layer is what it attends with: the long window, the short one that is half of it, or none. Then
# +v0, +v1, ...: values from that embedding table are mixed into its own, or +vfirst: the first
# layer's values (arXiv 2410.17897); and +x5: the output of layer 5 is added to its input.
LAYERS_2024 = ",".join(["long+vfirst"] * 6 + [f"long+vfirst+x{i}" for i in range(5, -1, -1)])
LAYERS_2025 = (
    "long+v0,short+v1,short+v2,short,long,short,"
    "short+x5,none+x4,short+x3,short+v0+x2,short+v1+x1,long+v2+x0"
)


SWITCH = ("auto", "on", "off")  # auto: by what the machine has


def setting(default, meaning: str, least=None, most=math.inf, step=None, **metadata):
    """A row of Hyperparameters with its legal range; `group` begins a group of --help.

    With about="run" it changes nothing that is learned, and may differ when a run is resumed; with
    about="machine" checkpoints forget it, too.
    """
    legal = int(type(default) is int) if least is None else least, most, step
    metadata = {"help": meaning, "legal": legal, "about": "learning", **metadata}
    return field(default=default, metadata=metadata)


of_run, of_machine = partial(setting, about="run"), partial(setting, about="machine")


@dataclass(frozen=True)
class Hyperparameters:
    """Every setting of a run; each is a flag of the same name. Defaults: 2025-01-26_BatchSize."""

    num_iterations: int = setting(1770, "training steps", group="schedule")
    warmup_steps: int = setting(0, "steps of linear learning-rate warm-up", 0)
    cooldown_frac: float = setting(0.4, "share of the steps in which the learning rate falls")
    lr_final: float = setting(0.1, "learning-rate multiplier at the last step")
    window_rule: str = setting("blocks", "unit of the window", choices=("blocks", "tokens"))
    window_min: int = setting(128, "long attention window at step 0, in tokens")
    window_span: int = setting(1728, "blocks: it at the last step; tokens: its growth till then", 0)
    window_step: int = setting(128, "it is a multiple of this many tokens")

    seq_len: int = setting(49152, "tokens in a training sequence", BLOCK, step=BLOCK, group="batch")
    batch_seqs: int = setting(8, "sequences in a global batch, shared by all ranks")
    val_seq_len: int = setting(262144, "tokens in a validation sequence", BLOCK, step=BLOCK)
    val_tokens: int = setting(10485760, "validation tokens, from the start of the stream")
    epochs: int = setting(1, "passes over the training shards at most, 0 for any number", 0)
    align_to_documents: bool = setting(False, "begin each training sequence with a document")
    max_document_tokens: int = setting(2048, "then longer documents are cut")

    layers: str = setting(LAYERS_2025, "a layer each, as described in train_gpt.py", group="model")
    num_layers: int = setting(12, "how many of them, half from either end", 2, step=2)
    num_heads: int = setting(6, "attention heads")
    head_dim: int = setting(128, "channels in a head", 4, step=4)
    model_dim: int = setting(768, "channels of the residual stream", 16, step=16)
    vocab_size: int = setting(50257, "token ids; the head is padded to a multiple of 128")
    init_bound: float = setting(0.75**0.5, "hidden weights begin within this / sqrt(fan_in)")
    attn_scale: float = setting(0.12, "factor on the products of q and k, 0: head_dim**-0.5")
    rope: str = setting("half", "share of the channels that rotate", choices=("half", "full"))
    rope_base: float = setting(1024.0, "rotary frequencies fall from 1 to about 1/rope_base", 1)
    # PyTorch's default for bfloat16 when the records ran (BENCHMARKS.md); now it is 2^-23.
    norm_eps: float = setting(2.0**-7, "RMSNorm's epsilon", 1e-12)
    logit_softcap: float = setting(15.0, "logits become cap * tanh(logit / cap)", 1e-3, 38)
    seed: int = setting(0, "seed of the initial weights", 0, 2**63 - 1)

    adam_eps: float = setting(1e-10, "Adam's epsilon", group="optimizers")
    adam_betas: tuple[float, float] = setting((0.8, 0.95), "Adam's betas", 0, 0.9999)
    embed_lr: float = setting(0.6, "Adam's learning rate for token and value embeddings")
    head_lr: float = setting(0.008, "Adam's learning rate for the head")
    scalar_lr: float = setting(0.04, "Adam's learning rate for scalars")
    muon_lr: float = setting(0.05, "Muon's learning rate for hidden matrices")
    momentum_start: float = setting(0.85, "Muon's momentum at step 0")
    momentum_end: float = setting(0.95, "Muon's momentum after its ramp")
    momentum_warmup_steps: int = setting(300, "steps of that linear ramp")
    momentum_damped: bool = setting(True, "it averages gradients; off: it sums them")
    grad_clip: float = setting(0.0, "largest global L2 norm of the gradient, 0 for no limit")
    comm_dtype: str = setting("auto", "of what ranks send", choices=("auto", "float32"))

    fp8: bool = setting(True, "train the head in FP8 on GPUs that can", group="FP8")
    x_s: float = setting(2.0, "scale of the head's input", 1e-6)
    w_s: float = setting(2.0**9, "scale of the head's weight", 1e-6)
    grad_s: float = setting(2.0**19, "scale of the logits' gradient", 1e-6)

    train_files: str = of_run(f"{FINEWEB}_train_*.bin", "pattern of training shards", group="run")
    val_files: str = of_run(f"{FINEWEB}_val_*.bin", "pattern of validation shards")
    verify_data: bool = of_run(False, "compare all shards with the SHA256SUMS beside them first")
    val_loss_every: int = of_run(125, "steps between validations, 0 for the last step only", 0)
    run_id: str = of_run("", "name of the log, logs/RUN_ID.txt; if empty, made from the time")
    save_every: int = of_run(0, "steps between checkpoints, one at the end too; 0 for none", 0)
    keep: int = of_run(2, "how many checkpoints of a run are kept, the newest ones")
    comm_timeout: int = of_run(600, "seconds after which ranks give up on each other")
    device: str = of_machine("auto", "auto: cuda if there is one", choices=("auto", "cuda", "cpu"))
    compile: str = of_machine(
        "auto", "torch.compile by layers, or whole", choices=(*SWITCH, "whole")
    )
    kernels: str = of_machine("auto", "use Triton's; auto: where better", choices=SWITCH)


FIELDS = dataclasses.fields(Hyperparameters)
LEARNING_FIELDS = [f.name for f in FIELDS if f.metadata["about"] == "learning"]
SAVED_FIELDS = [f.name for f in FIELDS if f.metadata["about"] != "machine"]

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
    # The same recipe, sized for two CPU cores and a few minutes.
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
        train_files=f"{HERE}/data/kjv_train_*.bin",
        val_files=f"{HERE}/data/kjv_val_*.bin",
        val_loss_every=64,
        save_every=128,
    ),
}


@dataclass(frozen=True)
class Published:
    """What a record reached on 8 H100s; its run logs are in the public project's records/."""

    minutes: float  # train_time by the clock of its day
    step_ms: tuple[float, float]  # at the first steps and at the last
    mean: float  # of the last validation loss over several runs (2024-11-19: one), and its
    deviation: float  # standard deviation
    steps: int
    losses: tuple[float, ...]  # of one run: at steps 0, 125, 250, ... and at the last

    @property
    def curve(self) -> dict[int, float]:
        """The published validation losses by step."""
        return dict(zip([*range(0, self.steps, 125), self.steps], self.losses, strict=True))


# fmt: off
PUBLISHED = {
    "2024-11-19_FlexAttention": Published(5.03, (160, 160), 3.2783, 0.005, 1875, (
        10.8258, 4.4503, 4.0085, 3.8399, 3.7415, 3.6656, 3.6068, 3.5596, 3.5195, 3.4905, 3.4625,
        3.4321, 3.3823, 3.3383, 3.2997, 3.2783)),
    "2024-11-24_WindowWarmup": Published(4.66, (148, 171), 3.2770, 0.0039, 1750, (
        10.8258, 4.4538, 4.0346, 3.8523, 3.7289, 3.6466, 3.5915, 3.5470, 3.5074, 3.4790, 3.4248,
        3.3778, 3.3332, 3.2972, 3.2759)),
    "2025-01-26_BatchSize": Published(2.933, (95, 105), 3.2787, 0.0019, 1770, (
        10.8258, 4.6549, 4.1014, 3.9027, 3.7540, 3.6688, 3.6031, 3.5542, 3.5147, 3.4749, 3.4266,
        3.3835, 3.3452, 3.3110, 3.2838, 3.2808)),
}
# fmt: on


def on_fineweb(*patterns: str) -> bool:
    """Whether patterns of shards name FineWeb's, on which losses are published."""
    return all(Path(pattern).name.startswith("fineweb_") for pattern in patterns)


def against_published(record: str, hp: Hyperparameters, step: int, loss: float) -> str:
    """How a validation loss on FineWeb compares with the published ones; empty on other data."""
    published, lines = PUBLISHED.get(record), []
    if published is None or not on_fineweb(hp.train_files, hp.val_files):
        return ""
    if expected := published.curve.get(step):
        lines.append(f"    published: {expected:.4f}, difference {loss - expected:+.4f}")
    if step == hp.num_iterations:
        place = "in" if abs(loss - published.mean) <= 2 * published.deviation else "out"
        spread = f"{published.mean:.4f} +- 2 x {published.deviation:.4f}"
        lines.append(f"    {place}side the published spread, {spread}")
        own, names = RECORDS[record], set(LEARNING_FIELDS) - {"seed"}
        if changed := sorted(n for n in names if getattr(hp, n) != getattr(own, n)):
            lines[-1] += f"; other than the record's: {', '.join(changed)}"
    return "\n".join(lines)


@dataclass(frozen=True)
class Layer:
    """One row of the model: what this layer attends with and what is added to it."""

    window: str  # "long", "short" (half of long), or "none": no attention
    values: str | None = None  # mixed into v: a value-embedding table, or the "first" layer's v
    skip_from: int | None = None  # which earlier layer's output is added to the input


def layer_table(hp: Hyperparameters) -> tuple[Layer, ...]:
    """The rows in use: num_layers of them from both ends, layer i linked to layer n-1-i."""
    rows, table = hp.layers.split(","), []
    n, half = hp.num_layers, hp.num_layers // 2
    if n > len(rows):
        raise UserError(f"--num_layers {n}: --layers has {len(rows)}")
    for i, text in enumerate(rows[:half] + rows[-half:]):
        row = re.fullmatch(r"(long|short|none)(?:(?<!none)\+v(first|\d))?(?:\+x(\d+))?", text)
        skip_from = row and row[3] and (int(row[3]) if n == len(rows) else n - 1 - i)
        if row is None or (row[3] and not skip_from < i >= half):
            raise UserError(f"--layers: {text!r} cannot be layer {i}; LAYERS_2025 shows the form")
        table.append(Layer(row[1], row[2], skip_from))
    return tuple(table)


def check(hp: Hyperparameters) -> None:
    """Raise UserError for values that no run can have."""
    for f in FIELDS:
        value, (least, most, step) = getattr(hp, f.name), f.metadata["legal"]
        in_range = f.type is str or least <= np.min(value) <= np.max(value) <= most
        if not in_range or (step and value % step):
            rule = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            rule += f", a multiple of {step}" * bool(step)
            raise UserError(f"--{f.name} {show(value)}: must be {rule}")
    if hp.val_tokens % hp.val_seq_len:
        raise UserError(f"--val_tokens {hp.val_tokens}: must be a multiple of val_seq_len")
    layer_table(hp)


def show(value) -> str:
    """A setting as it is typed on the command line; a path relative to this file."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(show, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value).removeprefix(f"{HERE}/")


def print_records(names: list[str], differing: bool = False) -> None:
    """Print records with their numbers, a column each; or only the numbers that differ."""
    rows = {f.name: [show(getattr(RECORDS[name], f.name)) for name in names] for f in FIELDS}
    tables = itertools.zip_longest(*(cell.split(",") for cell in rows.pop("layers")), fillvalue="-")
    rows |= {f"layer {i}": cells for i, cells in enumerate(tables)}
    minutes = {name: published.minutes for name, published in PUBLISHED.items()}
    rows["published minutes"] = [str(minutes.get(name, "-")) for name in names]
    rows = {k: cells for k, cells in rows.items() if not differing or len(set(cells)) > 1}
    for name, cells in [("", names), *rows.items()]:
        print(f"{name:<24}" + "".join(f"{cell:<40}" for cell in cells).rstrip())


def parse_args(argv: list[str] | None) -> tuple[Hyperparameters, argparse.Namespace]:
    """The settings (flags over the record's, or over a checkpoint's own) and the flags given.

    Raises UserError for an unknown flag or a bad value; --help prints and exits.
    """
    default = "2025-01-26_BatchSize"
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        usage="train_gpt.py [--record NAME] [--SETTING VALUE ...]",
        description=f"{__doc__.splitlines()[0]} In brackets: the values of {default}.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.error = fail
    parser.add_argument("--record", choices=RECORDS, help="row to start from; on a CPU [demo]")
    parser.add_argument("--list_records", action="store_true", help="print all rows and exit")
    diff = {"nargs": 2, "choices": RECORDS, "metavar": "NAME"}
    parser.add_argument("--diff", help="print where two rows differ and exit", **diff)
    parser.add_argument("--eval", metavar="auto|PATH", help="print a checkpoint's loss and exit")
    parser.add_argument("--resume", metavar="auto|PATH", help="go on from a checkpoint, the newest")
    parser.add_argument("--resume_force", action="store_true", help="even under other settings")
    for f in FIELDS:
        words = ("on", "off") if f.type is bool else f.metadata.get("choices")
        options = {"choices": words} if words else {"type": f.type, "metavar": f.type.__name__}
        if isinstance(f.default, tuple):
            options = {"type": float, "nargs": len(f.default), "metavar": "float"}
        if "group" in f.metadata:
            group = parser.add_argument_group(f.metadata["group"])
        text = f"{f.metadata['help']} [{show(f.default)}]"
        group.add_argument(f"--{f.name}", help=text, **options)
    args = parser.parse_args(argv)
    on_cpu = getattr(args, "device", "auto") == "cpu" or not torch.cuda.is_available()
    args.checkpoint, args.saved = getattr(args, "eval", getattr(args, "resume", None)), {}
    if args.checkpoint == "auto":
        args.checkpoint, args.saved = newest_checkpoint(getattr(args, "run_id", "*"))
        if not args.saved and "eval" in args:
            raise UserError("no checkpoint under logs/: train with --save_every, or name one")
        if not args.saved:
            print("--resume auto: no checkpoint under logs/, a new run begins")
    elif args.checkpoint is not None:
        args.saved = load_checkpoint(args.checkpoint)
    remembered = "record" not in args and args.saved.get("hyperparameters")
    args.record = getattr(args, "record", "demo" if on_cpu else default)
    if remembered:
        args.record = args.saved["record"]
    hp = remembered or RECORDS[args.record]
    hp = replace(hp, run_id=args.saved.get("run_id", ""))
    if "layers" in args and "num_layers" not in args:
        args.num_layers = args.layers.count(",") + 1
    for name in vars(args).keys() & vars(hp).keys():
        value = getattr(args, name)
        value = tuple(value) if isinstance(value, list) else value
        hp = replace(hp, **{name: value == "on" if type(vars(hp)[name]) is bool else value})
    check(hp)
    if "resume" in args and args.saved:
        if not (saved := vars(args.saved.get("hyperparameters", argparse.Namespace()))):
            raise UserError(f"--resume {args.checkpoint}: it holds weights only, for --eval")
        changed = [n for n in LEARNING_FIELDS if vars(hp)[n] != saved[n]]
        if changed and "resume_force" not in args:
            text = ", ".join(f"{n} {show(saved[n])} -> {show(vars(hp)[n])}" for n in changed)
            raise UserError(f"the checkpoint is of other hyperparameters: {text}; --resume_force?")
    return hp, args


# -----------------------------------------------------------------------------
# Numerics: FP8 matmuls, and the linear layer that uses them


def fp8_supported(device: torch.device) -> bool:
    """torch's scaled matmul runs on GPUs from Ada and Hopper on, and, slowly, on a CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


def trains_in_fp8(hp: Hyperparameters, device: torch.device) -> bool:
    """Whether a model's head does: on a CPU it does not."""
    return hp.fp8 and device.type == "cuda" and fp8_supported(device)


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x * scale in float8, clamped to its range: the cast to float8_e5m2 alone would give inf."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


def scaled_mm(a: Tensor, b: Tensor, scale: float, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """(M, K) @ (K, N) of float8, over scale, in dtype; cuBLAS wants a by rows and b by columns."""
    inverse, one = (torch.full((), s, device=a.device) for s in (1.0 / scale, 1.0))
    a, b = a.contiguous(), b.T.contiguous().T
    return torch._scaled_mm(a, b, inverse, one, out_dtype=dtype, use_fast_accum=fast_accum)


def fp8_forward(x_f8: Tensor, w_f8: Tensor, x_s: float, w_s: float) -> Tensor:
    """x @ w.T (T, N) in bfloat16, from x (T, K) and w (N, K) in float8_e4m3fn."""
    return scaled_mm(x_f8, w_f8.T, x_s * w_s, torch.bfloat16, fast_accum=True)


def fp8_grad_x(grad_f8: Tensor, w_f8: Tensor, grad_s: float, w_s: float) -> Tensor:
    """grad @ w (T, K) in bfloat16, from grad (T, N) in float8_e5m2 and w (N, K)."""
    return scaled_mm(grad_f8, w_f8, grad_s * w_s, torch.bfloat16, fast_accum=False)


def fp8_grad_w(grad_f8: Tensor, x_f8: Tensor, grad_s: float, x_s: float) -> Tensor:
    """grad.T @ x (N, K) in float32, from grad (T, N) in float8_e5m2 and x (T, K)."""
    return scaled_mm(grad_f8.T, x_f8, grad_s * x_s, torch.float32, fast_accum=False)


class FP8Linear(torch.autograd.Function):
    """x @ w.T in bfloat16 for x (T, K) and w (N, K); keeps both in float8 for its backward pass."""

    @staticmethod
    def forward(ctx, x, w, x_s, w_s, grad_s):
        x_f8, w_f8 = to_fp8(x, x_s, torch.float8_e4m3fn), to_fp8(w, w_s, torch.float8_e4m3fn)
        ctx.save_for_backward(x_f8, w_f8)
        ctx.scales = x_s, w_s, grad_s
        return fp8_forward(x_f8, w_f8, x_s, w_s)

    @staticmethod
    def backward(ctx, grad):
        (x_f8, w_f8), (x_s, w_s, grad_s) = ctx.saved_tensors, ctx.scales
        grad_f8 = to_fp8(grad, grad_s, torch.float8_e5m2)  # autograd casts to the inputs' dtypes
        grads = fp8_grad_x(grad_f8, w_f8, grad_s, w_s), fp8_grad_w(grad_f8, x_f8, grad_s, x_s)
        return *grads, None, None, None


class CastedLinear(nn.Linear):
    """A linear layer without bias whose float32 weight is cast to its input's dtype at use.

    With use_fp8, in training, and where the hardware can: x * x_s and w * w_s enter the matmul as
    float8_e4m3fn, and the output's gradient * grad_s enters the backward ones as float8_e5m2.
    """

    def __init__(self, in_features, out_features, use_fp8=False, x_s=1.0, w_s=1.0, grad_s=1.0):
        super().__init__(in_features, out_features, bias=False)
        self.use_fp8, self.scales = use_fp8, (float(x_s), float(w_s), float(grad_s))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features), in bfloat16 with FP8, else in x's dtype."""
        if self.use_fp8 and self.training and fp8_supported(x.device):
            out = FP8Linear.apply(x.flatten(0, -2), self.weight, *self.scales)
            return out.view(*x.shape[:-1], -1)
        return F.linear(x, self.weight.type_as(x))


@torch.compiler.assume_constant_result
def memory_is_small(device: torch.device, tokens: int = 49152) -> bool:
    """Whether a GPU has less than 0.8 MB for each token of a sequence: 40 GB for the record's. Then
    memory is worth more than a few milliseconds."""
    if device.type == "cpu":
        return False
    return torch.cuda.get_device_properties(device).total_memory < 0.8e6 * tokens


def recomputed(function, x: Tensor, *more):
    """function(x, *more) of x (1, T, ...); where memory is small, compiled code makes the result
    again in the backward pass instead of keeping it.

    For what costs little time and much memory: BENCHMARKS.md counts both.
    """
    training = torch.is_grad_enabled() and torch.compiler.is_compiling()
    if training and memory_is_small(x.device, x.size(1)):
        return checkpoint(function, x, *more, use_reentrant=False, preserve_rng_state=False)
    return function(x, *more)


# -----------------------------------------------------------------------------
# Kernels: what Triton may do faster, beside the plain PyTorch that says what it is

KERNELS: dict[str, "Kernel"] = {}


class Kernel:
    """A plain function whose `fused` twin in Triton is called while `use` is set: choose_kernels.

    example(hp, device) makes arguments of a run's shapes, to compare the two and to time them.
    """

    def __init__(self, plain, fused, example):
        self.plain, self.fused, self.example, self.use = plain, fused, example, False
        KERNELS[plain.__name__] = self

    def __call__(self, *arguments):
        return (self.fused if self.use else self.plain)(*arguments)


def jit(function):
    """Triton's compiler; without Triton, a function that nothing calls."""
    return triton.jit(function) if triton else function


@torch.compiler.assume_constant_result
def shared_memory_is_small(device: torch.device) -> bool:
    """Whether a program has 99 KB of it (RTX 3090, 4090, 5090, A6000), not 163 or 227."""
    if device.type == "cpu":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 160_000


def activation_dtype(device: torch.device) -> torch.dtype:
    """Of embeddings and activations: bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@jit
def softcap_kernel(
    logits, targets, losses, grads, vocab, CAP: tl.constexpr, SCALE: tl.constexpr,
    LARGEST: tl.constexpr, WITH_GRAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A program takes a row, twice: from memory for the sum, then from the cache.

    The cap bounds the logits, so softmax subtracts the cap instead of the row's maximum. Floats are
    constants of the kernel, because torch.compile would pass them as float64.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    target = tl.load(targets + row)
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        logit = tl.load(logits + column, column < vocab, 0.0).to(tl.float32)
        term = tl.exp(2 * CAP * (tl.sigmoid(2 / CAP * logit) - 1))
        total += tl.where(column < vocab, term, 0.0)
    total = tl.sum(total)
    of_target = tl.sigmoid(2 / CAP * tl.load(logits + target).to(tl.float32))
    tl.store(losses + row, tl.log(total) - 2 * CAP * (of_target - 1))
    if WITH_GRAD:
        for start in range(0, vocab, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            logit = tl.load(logits + column, column < vocab, 0.0).to(tl.float32)
            s = tl.sigmoid(2 / CAP * logit)
            p = tl.exp(2 * CAP * (s - 1)) / total - tl.where(column == target, 1.0, 0.0)
            grad = tl.clamp(4 * SCALE * p * s * (1 - s), -LARGEST, LARGEST)
            tl.store(grads + row * vocab + column, grad.to(grads.dtype.element_ty), column < vocab)


# Head and loss are one piece that takes the tokens in chunks, so that the float32 logits of a whole
# sequence never exist (49152 x 50304 of them: 9.9 GB). It makes its gradients in the forward pass,
# while a chunk's logits are at hand. On a CPU the softmax then takes a few rows of a chunk at a
# time, which stay in the cache (BENCHMARKS.md).
LOSS_ROWS = 16


def loss_chunk_len(device: torch.device) -> int:
    """Tokens in a chunk: enough for fast matmuls. The fewer chunks there are, the fewer times the
    whole gradient of the head is read and written."""
    if device.type == "cpu":
        return 256
    return 8192 if memory_is_small(device) else 16384


def padded_vocab(hp: Hyperparameters) -> int:
    """Rows of the head: whole blocks of 128."""
    return -(-hp.vocab_size // 128) * 128


def fused_loss(logits, targets, cap, grad_scale=None, grads=None):
    """softcapped_cross_entropy in one kernel."""
    losses, with_grad = torch.empty(len(logits), device=logits.device), grads is not None
    out, scale = (grads, grad_scale) if with_grad else (logits, 0.0)
    sizes = logits.size(1), cap, scale, torch.finfo(out.dtype).max
    softcap_kernel[(len(logits),)](
        logits, targets, losses, out, *sizes, WITH_GRAD=with_grad, COLUMNS=8192, num_warps=16
    )
    return losses.sum()


def loss_example(hp, device):
    """A chunk of logits and where their gradient goes."""
    fp8 = trains_in_fp8(hp, device)
    shape = min(loss_chunk_len(device), hp.seq_len), padded_vocab(hp)
    logits = 4 * torch.randn(shape, device=device, dtype=activation_dtype(device))
    grads = torch.zeros_like(logits, dtype=torch.float8_e5m2 if fp8 else None)
    targets = torch.randint(hp.vocab_size, shape[:1], device=device)
    return logits, targets, hp.logit_softcap, (hp.grad_s if fp8 else 1.0) / hp.seq_len, grads


@partial(Kernel, fused=fused_loss, example=loss_example)
def softcapped_cross_entropy(logits, targets, cap, grad_scale=None, grads=None):
    """Summed loss () of logits (T, V), which may be overwritten, and targets (T,) int64.

    Their gradient * grad_scale goes to grads (T, V): the logits themselves, or float8_e5m2. With
    z = 2 cap sigmoid(2 logit / cap), cap * tanh(logit / cap) is z less a constant, which softmax
    does not see; its derivative is 2 / cap (z - z^2 / 2 cap). The cap keeps softmax above 0.
    """
    target = targets[:, None]
    if torch.compiler.is_compiling():  # two passes over the logits; only the result is stored
        z = 2 * cap * torch.sigmoid(2 / cap * logits.float())
        z_of_target = 2 * cap * torch.sigmoid(2 / cap * logits.gather(1, target).float())
        p = torch.exp(z - 2 * cap)
        total = p.sum(dim=1, keepdim=True)
        loss = (total.log() + 2 * cap - z_of_target).sum()
        p = p / total - (torch.arange(p.size(1), device=p.device) == target).float()
    else:  # z and p are stored, and overwritten where that is possible
        z = logits.float().mul_(2 / cap).sigmoid_().mul_(2 * cap)
        p = torch.softmax(z, dim=-1)
        loss = -p.gather(1, target).log().sum()
        p.scatter_add_(1, target, p.new_full((len(p), 1), -1.0))
    if grads is not None:
        grad = z.addcmul_(z, z, value=-0.5 / cap).mul_(p).mul_(2 / cap * grad_scale)
        grads.copy_(grad if grads.dtype != torch.float8_e5m2 else to_fp8(grad, 1.0, grads.dtype))
    return loss


@jit
def relu2_kernel(
    a, b, post, out, M, N, K, stride_k, stride_n, BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program computes a tile; eight rows of tiles run together and share the cache."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (8 * tiles_n) * 8
    height = min(tiles_m - first, 8)
    place = tl.program_id(0) % (8 * tiles_n)
    m = ((first + place % height) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = place // height * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a += (m % M)[:, None] * K + k[None]
    b += k[:, None] * stride_k + (n % N)[None] * stride_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        a_tile = tl.load(a, k[None] < K - start, 0.0)
        b_tile = tl.load(b, k[:, None] < K - start, 0.0)
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee")
        a += BLOCK_K
        b += BLOCK_K * stride_k
    place = m[:, None] * N + n[None]
    inside = (m[:, None] < M) & (n[None] < N)
    if BACKWARD:
        total *= 2 * tl.sqrt(tl.load(post + place, inside, 0.0).to(tl.float32))
    else:
        total = tl.maximum(total, 0.0)
        total *= total
    tl.store(out + place, total.to(out.dtype.element_ty), inside)


def matmul_relu2(a: Tensor, b: Tensor, post: Tensor | None = None) -> Tensor:
    """relu(a @ b)^2 of (M, K) and (K, N); or of such a post, (a @ b) times its derivative."""
    (M, K), N, backward = a.shape, b.size(1), post is not None
    block_m, block_n = 128, 128 if shared_memory_is_small(a.device) else 256
    tiles, out = -(-M // block_m) * -(-N // block_n), a.new_empty(M, N)
    inputs = a, b, post if backward else out, out, M, N, K, *b.stride(), backward
    relu2_kernel[(tiles,)](*inputs, block_m, block_n, BLOCK_K=64, num_warps=8, num_stages=3)
    return out


class FusedMLP(torch.autograd.Function):
    """relu2_mlp with ReLU squared inside the matmuls, forward and backward. Between them it keeps
    the squares alone: their roots are what the derivative needs."""

    @staticmethod
    def forward(ctx, x, w_in, w_out):
        rows = x.flatten(0, -2).contiguous()
        post = matmul_relu2(rows, w_in.T)
        ctx.save_for_backward(rows, w_in, w_out, post)
        return (post @ w_out.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        rows, w_in, w_out, post = ctx.saved_tensors
        grad_rows = grad.flatten(0, -2).contiguous()
        grad_pre = matmul_relu2(grad_rows, w_out, post)
        return (grad_pre @ w_in).view(grad.shape), grad_pre.T @ rows, grad_rows.T @ post


def mlp_example(hp, device):
    """A sequence and a layer's weights."""
    C, H, options = hp.model_dim, 4 * hp.model_dim, {"dtype": activation_dtype(device)}
    shapes = (hp.seq_len, C), (H, C), (C, H)
    tensors = [torch.randn(shape, device=device, **options) for shape in shapes]
    return [t.mul_(C**-0.5).requires_grad_() for t in tensors]


class ReLUSquared(torch.autograd.Function):
    """relu(x)^2, which keeps its result alone, as the matmul behind it does. The derivative needs
    the result's root, which is relu(x) but for the rounding of the square."""

    @staticmethod
    def forward(ctx, x):
        post = F.relu(x).square()
        ctx.save_for_backward(post)
        return post

    @staticmethod
    def backward(ctx, grad):
        return grad * (2 * ctx.saved_tensors[0].sqrt())


@partial(Kernel, fused=lambda *arguments: FusedMLP.apply(*arguments), example=mlp_example)
def relu2_mlp(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """relu(x @ w_in.T)^2 @ w_out.T of x (..., C), w_in (H, C) and w_out (C, H), of one dtype."""
    h = F.linear(x, w_in)
    post = ReLUSquared.apply(h) if torch.compiler.is_compiling() else F.relu(h).square()
    return F.linear(post, w_out)


@jit
def symmetric_kernel(
    a, c, out, n, K, ALPHA: tl.constexpr, BETA: tl.constexpr,
    WITH_C: tl.constexpr, TILE: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A program computes a tile on or below the diagonal, and stores it and its mirror image."""
    if tl.program_id(0) < tl.program_id(1):
        return
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    matrix = tl.program_id(2).to(tl.int64)
    k = tl.arange(0, TILE_K)
    left = a + matrix * n * K + (row % n)[:, None] * K + k[None]
    right = a + matrix * n * K + (column % n)[None] * K + k[:, None]
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K, TILE_K):
        left_tile = tl.load(left, k[None] < K - start, 0.0)
        right_tile = tl.load(right, k[:, None] < K - start, 0.0)
        total = tl.dot(left_tile, right_tile, total, input_precision="ieee")
        left += TILE_K
        right += TILE_K
    inside = (row[:, None] < n) & (column[None] < n)
    place = matrix * n * n + row[:, None] * n + column[None]
    if WITH_C:
        total = ALPHA * total + BETA * tl.load(c + place, inside, 0.0).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    tl.store(out + place, total, inside)
    mirrored = matrix * n * n + column[None] * n + row[:, None]
    tl.store(out + mirrored, total, inside & (row[:, None] > column[None]))


def fused_symmetric(a, c=None, alpha=1.0, beta=1.0):
    """symmetric_matmul that computes half of the tiles; c is contiguous."""
    a = a.contiguous()
    count, n, K = a.shape
    out, tiles, block = a.new_empty(count, n, n), -(-n // 128), {"TILE": 128, "TILE_K": 64}
    inputs = a, out if c is None else c, out, n, K, alpha, beta, c is not None
    symmetric_kernel[(tiles, tiles, count)](*inputs, **block, num_warps=8, num_stages=3)
    return out


def symmetric_example(hp, device):
    """A rank's square matrices, and their products."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    shape = -(-4 * hp.num_layers // ranks), hp.model_dim, hp.model_dim
    a = torch.randn(shape, device=device).to(activation_dtype(device)) * hp.model_dim**-0.5
    return a, a @ a.mT, 2.0315, -4.7750


@partial(Kernel, fused=fused_symmetric, example=symmetric_example)
def symmetric_matmul(a: Tensor, c: Tensor | None = None, alpha=1.0, beta=1.0) -> Tensor:
    """a a^T (B, n, n) of a (B, n, k), or with a symmetric c (B, n, n), alpha a a^T + beta c."""
    return a @ a.mT if c is None else torch.baddbmm(c, a, a.mT, beta=beta, alpha=alpha)


# -----------------------------------------------------------------------------
# Optimizers: Muon for the hidden matrices; Adam for embeddings, head and scalars; both sharded

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Bucket:
    """Parameters whose gradients travel together, as rows of one shape; each rank owns a share.

    That is one of world_size equal parts of the rows, to the last of which zeros are added. The
    gradients travel in the parameters' dtype, or in `wire`. One rank sends nothing.
    """

    def __init__(self, params: list[Tensor], row_ndim: int, rank=0, world_size=1, wire=None):
        self.params, self.rank, self.world_size, self.wire = params, rank, world_size, wire
        self.row_shape = params[0].shape[params[0].ndim - row_ndim :]
        self.counts = [p.numel() // math.prod(self.row_shape) for p in params]
        self.share_len = -(-sum(self.counts) // world_size)
        self.grads = self.sent = self.work = None

    def share(self, tensors: list[Tensor], whole: bool = False) -> Tensor:
        """This rank's rows, (share_len, ...), of tensors shaped like the parameters, or of state
        that has other sizes in the place of row_shape."""
        ndim = len(self.row_shape)
        counted = zip(tensors, self.counts, strict=True)
        rows = [t.reshape(count, *t.shape[t.ndim - ndim :]) for t, count in counted]
        rows = torch.cat(rows) if len(rows) > 1 else rows[0]
        padding = self.share_len * self.world_size - len(rows)
        if padding:
            rows = F.pad(rows, (0, 0) * ndim + (0, padding))
        return rows if whole else rows[self.rank * self.share_len :][: self.share_len]

    def launch(self) -> None:
        """Begin to sum the gradients over all ranks; of a bfloat16 table, see gradient_buffer."""
        grads = [getattr(p, "grad32", p.grad).to(self.wire or p.dtype) for p in self.params]
        self.grads = self.sent = self.share(grads, whole=True)
        if self.world_size > 1:
            self.grads = self.sent.new_empty(self.share_len, *self.row_shape)
            self.work = reduce_scatter(self.grads, self.sent, async_op=True)

    def wait(self) -> Tensor:
        """This rank's share of the summed gradients; the bucket is empty then."""
        if self.grads is None:
            self.launch()
        if self.work is not None:
            self.work.wait()
        grads, self.grads, self.sent, self.work = self.grads, None, None, None
        return grads

    def gather(self, share: Tensor):
        """Begin to collect all shares; the answer waits for them: a tensor for each parameter, in
        its shape or, of state with rows of another shape, as rows."""
        rows, work = share, None
        if self.world_size > 1:
            rows = share.new_empty(self.world_size * self.share_len, *share.shape[1:])
            work = all_gather(rows, share.contiguous(), async_op=True)

        def collected() -> list[Tensor]:
            if work is not None:
                work.wait()
            parts = rows[: sum(self.counts)].split(self.counts)
            like_params = rows.shape[1:] == self.row_shape
            pairs = zip(parts, self.params, strict=True)
            return [t.view(p.shape) if like_params else t for t, p in pairs]

        return collected


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:
    """G (..., rows, cols) with its singular vectors kept and its singular values near 1.

    Each step takes singular values s to 3.4445 s - 4.7750 s^3 + 2.0315 s^5, which brings most of
    them to between 0.7 and 1.2, fast rather than exactly; zero stays zero. bfloat16 on CUDA, else
    G's own dtype. Source: Keller Jordan's Muon, kellerjordan.github.io/posts/muon.
    """
    in_bfloat16 = activation_dtype(G.device) == torch.bfloat16
    X = (G.bfloat16() if in_bfloat16 else G).reshape(-1, *G.shape[-2:])
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X
    X = X / (torch.linalg.matrix_norm(X, keepdim=True) + 1e-7)  # Frobenius: >= the largest
    for _ in range(steps):  # sums inside the matmuls: in bfloat16, half the rounding error
        A = symmetric_matmul(X)
        B = symmetric_matmul(A, A, 2.0315, -4.7750)
        X = torch.baddbmm(X, B, X, beta=3.4445)
    return (X.mT if tall else X).reshape(G.shape)


def muon_updates(grads, momenta, momentum: Tensor, grad_scale: float | Tensor, damped=True):
    """The updates (n, rows, cols) of n matrices; grads and momenta are lists of a part of n each.

    Momenta change in place. Damped, they take up a share of 1 - momentum of each gradient, else all
    of it: while the momentum is constant, that is only another scale. Compiled, all but the matmuls
    is one pass over them; momentum () is a tensor, so that a new value compiles nothing.
    """
    directions = []
    for grad, buffer in zip(grads, momenta, strict=True):
        grad = grad.float() * grad_scale
        if damped:
            buffer.lerp_(grad, 1 - momentum)
            directions.append(grad.lerp(buffer, momentum))
        else:
            buffer.mul_(momentum).add_(grad)
            directions.append(grad + momentum * buffer)
    return zeropower_via_newtonschulz5(torch.cat(directions))


class Muon(torch.optim.Optimizer):
    """Nesterov momentum whose update is orthogonalised, for matrices; (n, rows, cols) is n of them.

    Matrices of one shape form one batch, of which each rank keeps the momentum of its share and
    orthogonalises that: equal gradients on all ranks give equal weights. With several ranks, a
    bucket has at least 8 matrices, and one for each rank, from the last parameter to the first, as
    backward meets them.
    """

    def __init__(
        self, params, lr: float, momentum=0.95, rank=0, world_size=1, wire=None, damped=True
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "damped": damped})
        self.updates, filled, unfilled = muon_updates, [], {}
        enough = max(8, world_size) if world_size > 1 else math.inf
        for p in reversed(self.param_groups[0]["params"]):
            bucket = unfilled.setdefault(p.shape[-2:], [])
            bucket.append(p)
            if sum(p.numel() for p in bucket) >= enough * p.shape[-2:].numel():
                filled.append(unfilled.pop(p.shape[-2:]))
        filled += unfilled.values()
        self.buckets = [Bucket(bucket, 2, rank, world_size, wire) for bucket in filled]

    @torch.no_grad()
    def begin(self, grad_scale: float | Tensor) -> list[tuple]:
        """Begin to send what the summed gradients * grad_scale change; see finish."""
        pending, group = [], self.param_groups[0]
        for rows, cols in dict.fromkeys(bucket.row_shape for bucket in self.buckets):
            buckets = [b for b in self.buckets if b.row_shape == (rows, cols)]
            grads, states = [b.wait() for b in buckets], [self.state[b.params[0]] for b in buckets]
            for grad, state in zip(grads, states, strict=True):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(grad, dtype=torch.float32)
            momenta = [state["momentum_buffer"] for state in states]
            momentum = torch.full((), group["momentum"], device=grads[0].device)
            updates = self.updates(grads, momenta, momentum, grad_scale, group["damped"])
            rate = -group["lr"] * max(1, rows / cols) ** 0.5
            shares = updates.split([bucket.share_len for bucket in buckets])
            for bucket, share in zip(buckets, shares, strict=True):
                sent = bucket.gather(share.to(bucket.wire or share.dtype))
                pending.append((bucket.params, sent, rate))
        return pending

    def step(self) -> None:
        """Update all ranks' weights from the sums of their gradients."""
        finish(self.begin(1.0))


class ShardedAdam(torch.optim.Adam):
    """torch's Adam on this rank's share of each bucket; a group has `buckets` for `params`."""

    def __init__(self, groups: list[dict], **options):
        self.buckets = [bucket for group in groups for bucket in group["buckets"]]
        self.owned = [nn.Parameter(b.share([p.detach() for p in b.params])) for b in self.buckets]
        owned = iter(self.owned)
        groups = [{"lr": g["lr"], "params": [next(owned) for _ in g["buckets"]]} for g in groups]
        super().__init__(groups, fused=True, **options)

    def begin(self, grad_scale: float | Tensor) -> list[tuple]:
        """Begin to send what the summed gradients * grad_scale change; see finish."""
        pairs = list(zip(self.buckets, self.owned, strict=True))
        for bucket, owned in pairs:
            owned.grad = bucket.wait().mul_(grad_scale).to(owned.dtype)
        self.step()
        self.zero_grad()
        return [(bucket.params, bucket.gather(owned.data), None) for bucket, owned in pairs]


@torch.no_grad()
def finish(pending: list[tuple]) -> None:
    """Wait for what was sent: new values of parameters, or with a rate, what is added to them."""
    for params, sent, rate in pending:
        for p, value in zip(params, sent(), strict=True):
            if rate is not None:
                p.add_(value, alpha=rate)
            elif p.data_ptr() != value.data_ptr():  # one rank's share of a table is the table
                p.copy_(value)


GRAD_NORMS = [f"grad_norm_{name}" for name in ("head", "embed", "scalar", "muon")]


class Optimizers:
    """Adam and Muon over all parameters of a GPT. The order of a step is that of all ranks:

    1. Gradients leave in the order of `order`, each bucket as soon as it is complete and those
       before it have left: the head's before the last backward pass begins, the layers' while it
       runs, from the last to the first, those of tables and scalars at its end.
    2. While the last of them travel, each rank orthogonalises its share of the matrices, and sends
       the updates, shape by shape (Muon).
    3. Meanwhile it updates its rows of head, tables and scalars, and sends their values (Adam).
    """

    def __init__(self, model: nn.Module, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        named = list(model.named_parameters())
        self.names, self.hp = {p: name for name, p in named}, hp
        ranks = rank, world_size, torch.float32 if hp.comm_dtype == "float32" else None
        tables = [Bucket([p], 1, *ranks) for n, p in named if "embed" in n]
        head = Bucket([model.lm_head.weight], 1, *ranks)
        scalars = Bucket([p for _, p in named if p.ndim < 2], 0, *ranks)
        rates = (hp.head_lr, [head]), (hp.embed_lr, tables), (hp.scalar_lr, [scalars])
        groups = [{"lr": lr, "buckets": buckets} for lr, buckets in rates]
        self.adam = ShardedAdam(groups, betas=hp.adam_betas, eps=hp.adam_eps)
        matrices = [p for n, p in named if n.startswith("blocks.") and p.ndim >= 2]
        self.muon = Muon(matrices, hp.muon_lr, 0.95, *ranks, hp.momentum_damped)
        if model.compiled:
            self.muon.updates = torch.compile(muon_updates, dynamic=False)
        self.order = [head, *self.muon.buckets, *tables, scalars]
        buckets_of = Counter(p for bucket in self.order for p in bucket.params)
        for p, name in self.names.items():
            if buckets_of[p] != 1:
                raise ValueError(f"{name} is in {buckets_of[p]} groups of Optimizers: it wants one")
        self.groups = [head], tables, [scalars], self.muon.buckets  # as in GRAD_NORMS
        self.base_lr = [(g, g["lr"]) for g in self.adam.param_groups + self.muon.param_groups]
        self.missing: dict[Bucket, int] = {}  # gradients still to come, in the last backward pass
        for p in self.names:
            gradient_buffer(p)  # also of what this model does not use
        for bucket in self.muon.buckets if world_size > 1 else ():
            for p in bucket.params:
                p.register_post_accumulate_grad_hook(lambda _, b=bucket: self.arrived(b))

    def begin_last_backward(self) -> None:
        """From now on, gradients are complete when they arrive; that of the head is."""
        self.missing = {bucket: len(bucket.params) for bucket in self.order}
        self.arrived(self.order[0])

    def arrived(self, bucket: Bucket) -> None:
        """One of the bucket's gradients is complete: launch what is next in order and complete."""
        if not self.missing:  # not the last pass
            return
        self.missing[bucket] -= 1
        for first in list(self.missing):
            if self.missing[first]:
                break
            del self.missing[first]
            first.launch()

    def grad_norms(self) -> Tensor:
        """L2 norms (4,) of the summed gradients of each of GRAD_NORMS; all must have arrived."""
        for bucket in self.order:
            bucket.grads = bucket.wait()
        norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
        squares = [sum(norm(b.grads).square() for b in buckets) for buckets in self.groups]
        squares = torch.stack(squares)
        all_reduce_([squares])
        return squares.sqrt()

    @torch.no_grad()
    def step(self, step: int) -> list[Tensor]:
        """Update all weights with the rates of a step, then empty the gradients.

        Every 25 steps, and to clip, the answer holds GRAD_NORMS (4,) of the mean loss.
        """
        for bucket in self.missing:
            bucket.launch()
        self.missing = {}
        grad_scale, norms = 1 / self.hp.batch_seqs, []
        if (step + 1) % 25 == 0 or self.hp.grad_clip:
            norms = [self.grad_norms() * grad_scale]
        if self.hp.grad_clip:
            grad_scale = grad_scale * (self.hp.grad_clip / (norms[0].norm() + 1e-6)).clamp(max=1)
        for group, base in self.base_lr:
            group["lr"] = base * get_lr(step, self.hp)
            if "momentum" in group:
                group["momentum"] = get_muon_momentum(step, self.hp)
        finish(self.muon.begin(grad_scale) + self.adam.begin(grad_scale))
        torch._foreach_zero_([getattr(p, "grad32", p.grad) for p in self.names])
        return norms

    def states(self) -> list[tuple[Bucket, dict[str, Tensor]]]:
        """Each bucket with what its optimizer keeps of this rank's share."""
        states = [self.adam.state[owned] for owned in self.adam.owned]
        states += [self.muon.state[bucket.params[0]] for bucket in self.muon.buckets]
        return list(zip(self.adam.buckets + self.muon.buckets, states, strict=True))

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """All ranks' state by parameter name, on rank 0's CPU; others only help."""
        saved = {name: {} for name in self.names.values()}
        for bucket, state in self.states():
            for key, value in state.items():
                values = bucket.gather(value)() if value.ndim else [value] * len(bucket.params)
                for p, v in zip(bucket.params, values, strict=True) if bucket.rank == 0 else ():
                    saved[self.names[p]][key] = v.to("cpu", copy=True)
        return saved

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Take over such a state of any number of ranks, and the parameters as they are."""
        for bucket, owned in zip(self.adam.buckets, self.adam.owned, strict=True):
            owned.data.copy_(bucket.share([p.data for p in bucket.params]))
        for bucket, state in self.states():
            rows = [saved.get(self.names[p], {}) for p in bucket.params]
            state.clear()
            for key, value in rows[0].items():
                share = bucket.share([row[key] for row in rows]) if value.ndim else value
                state[key] = share.to(bucket.params[0].device, copy=True)


# -----------------------------------------------------------------------------
# Model: masks, attention, layers, and a loss that never stores its logits


def first_visible(input_seq: Tensor, window: Tensor, rule: str) -> Tensor:
    """The attention mask as one integer a token: position i sees j when first[i] <= j <= i.

    A mask is causal, within a document (END_OF_TEXT begins it) and within a window, so what a token
    sees is one run that ends at itself. A window is in tokens; by the rule "blocks" its whole
    blocks count, the token's own first and always. Tokens (T,) and windows () or (W,) to (T,) or
    (W, T) int32, never decreasing.
    """
    position = torch.arange(len(input_seq), device=input_seq.device, dtype=torch.int32)
    document = torch.where(input_seq == END_OF_TEXT, position, 0).cummax(0).values
    window = window[..., None].clamp(max=len(input_seq) + BLOCK).int()  # more is no different
    if rule == "blocks":
        in_window = (position // BLOCK + 1 - (window // BLOCK).clamp(min=1)) * BLOCK
    else:
        in_window = position + 1 - window.clamp(min=1)
    return torch.maximum(document, in_window)


def flex_mask(first: Tensor) -> BlockMask:
    """A mask of first_visible, (T,), for FlexAttention, from integers: nothing of size T x T.

    FlexAttention wants, of each query block, the key blocks of which it sees something and those of
    which it sees everything (full), and the same of each key block. `first` never decreases, so the
    blocks in each of these lists are one run. The diagonal block is never full, for causality: it
    is in both partial lists, behind the run.
    """
    own = torch.arange(len(first) // BLOCK, device=first.device, dtype=torch.int32)  # the diagonal
    # Of each query block: the first key block of which it sees anything, and everything.
    some = first[::BLOCK] // BLOCK
    whole = torch.minimum((first[BLOCK - 1 :: BLOCK] + BLOCK - 1) // BLOCK, own)
    # Of each key block: the first query block beyond it that does not see everything, or anything.
    search = partial(torch.searchsorted, right=True, out_int32=True)
    whole_end, some_end = search(whole, own), search(some, own)
    runs = {
        "kv": (some, whole),
        "full_kv": (whole, own),
        "q": (whole_end, some_end),
        "full_q": (own + 1, whole_end),
    }
    lists = {}
    for name, (start, end) in runs.items():
        blocks = start[:, None] + own
        blocks = torch.where(blocks < end[:, None], blocks, own[:, None])
        count = end - start if name.startswith("full") else end - start + 1
        lists |= {f"{name}_num_blocks": count[None, None], f"{name}_indices": blocks[None, None]}
    return BlockMask(
        seq_lengths=(len(first), len(first)),
        **lists,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=lambda b, h, q, kv: (kv <= q) & (kv >= first[q]),
    )


def dense_mask(first: Tensor, rows: int = 0) -> Tensor:
    """The same (T, T), or its last rows, 0 or -inf, for scaled_dot_product_attention and a CPU's
    short sequences."""
    position = torch.arange(len(first), device=first.device)
    hidden = (position > position[-rows:, None]) | (position < first[-rows:, None])
    return torch.zeros(hidden.shape, device=first.device).masked_fill_(hidden, -math.inf)


# PyTorch's own choice on an H100. On other cards its choice is 4 warps, with which the backward
# kernel spills registers; with 8 it does not (BENCHMARKS.md). No such card has timed it yet.
FLEX_OPTIONS = {"bwd_num_warps": 8}


def attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | Tensor, scale: float) -> Tensor:
    """Attention of (1, H, T, D) under a flex_mask (CUDA, compiled) or a dense_mask; they agree."""
    if isinstance(mask, BlockMask):
        outer = torch.compiler.is_compiling()  # else alone: uncompiled, it makes all T x T scores
        flex = flex_attention if outer else torch.compile(flex_attention, dynamic=False)
        return flex(q, k, v, block_mask=mask, scale=scale, kernel_options=FLEX_OPTIONS)
    return F.scaled_dot_product_attention(q, k, v, mask.type_as(q), scale=scale)


def norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, without gain."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def rotary_table(length: int, hp: Hyperparameters, device, start=0) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 1, head_dim), float32, of the positions from start on, for rotate_normed.

    Each angle stands there twice: as (cos, cos) and as (sin, -sin).

    "full" RoPE (arXiv 2104.09864) has frequencies rope_base^(-2i / head_dim). Of "half", the first
    half of them falls geometrically from 1 to 1/rope_base and the rest are 0.
    """
    full = hp.rope == "full"
    turning = hp.head_dim // (2 if full else 4)
    exponent = torch.arange(turning, device=device) / (turning if full else max(turning - 1, 1))
    frequency = F.pad(hp.rope_base**-exponent, (0, hp.head_dim // 2 - turning))
    angle = torch.arange(start, start + length, device=device)[:, None, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1)


def rotate_normed(x: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """norm(x) with channels d and d + D/2 turned by a rotary_table's angles, as attend wants it.

    (1, T, H, D) to (1, H, T, D). The halves change places by a flip: compiled code then reads them
    in another order, where a cat would read everything twice.
    """
    normed = norm(x, eps).float()
    swapped = normed.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    return (normed * cos + swapped * sin).type_as(x).transpose(1, 2)


class CausalSelfAttention(nn.Module):
    """Attention with normalised, rotated q and k, and with values from elsewhere mixed into v."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.heads, width = (hp.num_heads, hp.head_dim), hp.num_heads * hp.head_dim
        self.scale, self.attend = hp.attn_scale or hp.head_dim**-0.5, attend
        self.eps = hp.norm_eps
        qkv = CastedLinear(hp.model_dim, 3 * width)
        self.qkv_w = nn.Parameter(qkv.weight.detach().view(3, width, -1) * hp.init_bound)
        self.lambdas = nn.Parameter(torch.tensor([0.5] if layer.values == "first" else [0.5, 0.5]))
        self.c_proj = CastedLinear(width, hp.model_dim)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x: Tensor, value: Tensor | None, rotary, mask) -> tuple[Tensor, Tensor]:
        """x (1, T, C), and what is mixed into v, of its size, to the result and v as it was."""
        qkv = F.linear(x, self.qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(1, -1, 3, *self.heads).unbind(2)  # (1, T, H, D)
        q, k = (recomputed(rotate_normed, t, *rotary, self.eps) for t in (q, k))  # (1, H, T, D)
        own = v
        if self.lambdas.numel() == 1:  # of the first layer's v; there, of its own
            v = (1 - self.lambdas[0]) * v + self.lambdas[0] * (v if value is None else value)
        else:
            v = self.lambdas[0] * v
            if value is not None:
                v = v + self.lambdas[1] * value.view_as(v)
        out = self.attend(q, k, v.transpose(1, 2), mask, self.scale).transpose(1, 2).flatten(2)
        return self.c_proj(out), own


class MLP(nn.Module):
    """Two projections around ReLU squared (arXiv 2109.08668)."""

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.c_fc = CastedLinear(hp.model_dim, 4 * hp.model_dim)
        self.c_fc.weight.data *= hp.init_bound
        self.c_proj = CastedLinear(4 * hp.model_dim, hp.model_dim)
        nn.init.zeros_(self.c_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return relu2_mlp(x, self.c_fc.weight.type_as(x), self.c_proj.weight.type_as(x))


class Block(nn.Module):
    """One layer: an earlier output, a learned mix with x0, then attention, then the MLP.

    All that differs from layer to layer comes as an argument, so equal ones are compiled once.
    """

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.attn = None if layer.window == "none" else CausalSelfAttention(hp, layer)
        self.mlp, self.eps = MLP(hp), hp.norm_eps
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, x0: Tensor, value: Tensor | None, skip, rotary, mask, give_v):
        """x (1, T, C) to (1, T, C), and the v that attention made, if wanted: its gradient is made
        of zeros where nothing uses it. skip is (weight, output)."""
        if skip is not None:
            x = x + skip[0] * skip[1]
        x, v = self.lambdas[0] * x + self.lambdas[1] * x0, None
        if self.attn is not None:
            out, v = self.attn(recomputed(norm, x, self.eps), value, rotary, mask)
            x = x + out
        return x + self.mlp(recomputed(norm, x, self.eps)), v if give_v else None


def gradient_buffer(weight: Tensor) -> Tensor:
    """Where the gradient of a vocabulary table is summed in place: weight.grad, made once.

    For a bfloat16 table it is weight.grad32: a common token adds thousands of small terms.
    """
    name = "grad32" if weight.dtype == torch.bfloat16 else "grad"
    if getattr(weight, name, None) is None:
        setattr(weight, name, torch.zeros_like(weight, dtype=torch.float32))
    return getattr(weight, name)


def lookup(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Rows (T, C) of a table; their gradient is summed in place, no dense one is made anew."""
    rows = F.embedding(tokens, table.weight.detach())

    def accumulate(grad: Tensor) -> None:
        gradient_buffer(table.weight).index_add_(0, tokens, grad.float())

    if torch.is_grad_enabled():
        rows.requires_grad_().register_hook(accumulate)
    return rows


def head_in_fp8(weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A head's weight (V, K) * scale in float8_e4m3fn: stored by rows, and by columns."""
    w = to_fp8(weight, scale, torch.float8_e4m3fn)
    return w, w.T.contiguous().T


def logits_loss(x, w, targets, cap, grad_scale, scales):
    """Summed loss () of x (C, K) under the head w (V, K); x as it entered the matmul; and the
    logits' gradient * grad_scale (C, V), or None without grad_scale."""
    if scales:
        x = to_fp8(x, scales[0], torch.float8_e4m3fn)
        logits, grad_scale = fp8_forward(x, w[0], *scales[:2]), grad_scale * scales[2]
        grads = torch.empty_like(logits, dtype=torch.float8_e5m2)
    else:
        logits, grads = x @ w.T, None
        if grad_scale is not None:  # in place, but where torch.compile would copy them first
            grads = torch.empty_like(logits) if torch.compiler.is_compiling() else logits
    parts = [(logits, targets, grads)]
    if not x.is_cuda:
        pieces = itertools.repeat(None) if grads is None else grads.split(LOSS_ROWS)
        parts = zip(logits.split(LOSS_ROWS), targets.split(LOSS_ROWS), pieces, strict=False)
    loss = sum(softcapped_cross_entropy(a, b, cap, grad_scale, c) for a, b, c in parts)
    return loss, x, grads


def logits_backward(x, w, grads, grad_w, scales) -> Tensor:
    """The gradient of x (C, K), from logits_loss's; that of w is added into grad_w (V, K)."""
    if scales:
        x_s, w_s, grad_s = scales
        grad_w.add_(fp8_grad_w(grads, x, grad_s, x_s))
        return fp8_grad_x(grads, w[1], grad_s, w_s)
    if x.dtype == grad_w.dtype:
        grad_w.addmm_(grads.T, x)
    else:
        grad_w.add_(grads.T @ x)
    return grads @ w


# They are compiled one by one. In one graph, the kernel of the loss would also write the transposed
# gradients that FP8 wants, each byte far from the last, and the logits would stay allocated.
HEAD_STEPS = head_in_fp8, logits_loss, logits_backward


def loss_chunk(x, w, targets, cap, grad_scale, grad_w, scales, steps=HEAD_STEPS):
    """Summed loss () of x (C, K) under the head w (V, K), and its gradient * grad_scale of x.

    That of w is added into grad_w (V, K). Without grad_scale there are no gradients. With FP8
    scales (of x, w and the logits' gradient) w is what head_in_fp8 makes of it.
    """
    _, forward, backward = steps
    loss, x, grads = forward(x, w, targets, cap, grad_scale, scales)
    return loss, None if grads is None else backward(x, w, grads, grad_w, scales)


class HeadLoss(torch.autograd.Function):
    """Mean soft-capped cross-entropy of x (T, K) and targets (T,) under a head's weight (V, K).

    If x wants a gradient, the forward pass keeps it, and adds the weight's into gradient_buffer: so
    such a loss wants exactly one backward(), of itself and not of a multiple.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, cap, scales=None, steps=HEAD_STEPS):
        w = steps[0](weight, scales[1]) if scales else weight.type_as(x)
        with_grad = ctx.needs_input_grad[0]
        grads = (1 / len(x), gradient_buffer(weight)) if with_grad else (None, None)
        size = loss_chunk_len(x.device)
        chunks = zip(x.split(size), targets.split(size), strict=True)
        results = [loss_chunk(part, w, t, cap, *grads, scales, steps) for part, t in chunks]
        if with_grad:
            ctx.save_for_backward(torch.cat([grad for _, grad in results]).type_as(x))
        return sum(loss for loss, _ in results) / len(x)

    @staticmethod
    def backward(ctx, grad):
        torch._assert_async(grad == 1, "call backward() on the loss itself; scale gradients after")
        return *ctx.saved_tensors, *[None] * 5


class GPT(nn.Module):
    """The language model: embeddings, layers linked as a U-net, the head and its loss.

    Parameters have their published names, so published checkpoints load. On a CPU all is float32;
    on CUDA embeddings and activations are bfloat16, matrices float32 and cast at use.
    """

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.hp, self.layers = hp, layer_table(hp)
        tables = sorted({row.values for row in self.layers} - {None, "first"})
        table = partial(nn.Embedding, hp.vocab_size)
        self.embed, width = table(hp.model_dim), hp.num_heads * hp.head_dim
        value_embeds = nn.ModuleDict({i: table(width) for i in tables})
        self.value_embeds = nn.ModuleDict({"embed": value_embeds})
        self.blocks = nn.ModuleList(Block(hp, row) for row in self.layers)
        self.skip_weights = nn.Parameter(torch.ones(hp.num_layers // 2))
        scales = hp.x_s, hp.w_s, hp.grad_s
        self.lm_head = CastedLinear(hp.model_dim, padded_vocab(hp), hp.fp8, *scales)
        nn.init.zeros_(self.lm_head.weight)
        self.head_steps, self.use_flex, self.compiled = HEAD_STEPS, False, False

    def to_device(self, device: torch.device, compiled: bool) -> "GPT":
        """Move there in the dtypes of the place; compile the functions in which time is spent.

        Layers are compiled one at a time, equal ones once; or, --compile whole, as one: that takes
        longer, and their gradients then come at the end, while other ranks wait for them.
        """
        self.to(device)
        self.use_flex = device.type == "cuda"
        for embeddings in (self.embed, self.value_embeds):
            embeddings.to(activation_dtype(device))
        if compiled:
            self.compiled, compile_ = True, partial(torch.compile, dynamic=False)
            torch._dynamo.config.recompile_limit = 64  # kinds of layers, each in several shapes
            with contextlib.suppress(AttributeError):  # of a torch that has no such setting
                # Else layers are compiled anew at each start, because of their autograd.Functions.
                torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
            self.head_steps = tuple(map(compile_, HEAD_STEPS))
            if self.hp.compile == "whole":
                self.trunk = compile_(self.trunk)
            else:
                for block in self.blocks:
                    block.forward = compile_(block.forward)
        return self

    def trunk(self, x: Tensor, value_embeds: dict[str, Tensor], rotary, masks: dict) -> Tensor:
        """The layers, from embeddings (T, C) to what the head reads (T, C)."""
        x0 = norm(x, self.hp.norm_eps)[None]  # (1, T, C): attention wants a batch axis
        x = x0.view(x0.shape)  # where two arguments are one tensor, a layer is compiled once more
        values, outputs, half = dict(value_embeds), {}, len(self.layers) // 2
        weights = (None,) * half + self.skip_weights.unbind()
        mixed = {row.values for row in self.layers}
        last_use = {row.skip_from: i for i, row in enumerate(self.layers)}  # then memory is freed
        for i, (row, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            skip = None
            if row.skip_from is not None:
                take = outputs.pop if last_use[row.skip_from] == i else outputs.get
                skip = weights[i], take(row.skip_from)
            value, mask = values.get(row.values), masks.get(row.window)
            give_v = "first" in mixed and "first" not in values
            x, v = block(x, x0, value, skip, rotary, mask, give_v)
            if v is not None:
                values["first"] = v
            if i in last_use:
                outputs[i] = x.view(x.shape)
        return norm(x, self.hp.norm_eps)[0]

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The tokens' (T,) embeddings (T, C), and those of each value table."""
        tables = self.value_embeds["embed"].items()
        values = {name: lookup(table, input_seq) for name, table in tables}
        return lookup(self.embed, input_seq), values

    def masks(self, input_seq: Tensor, window: int | Tensor, make_mask) -> dict:
        """Those that the layers of input_seq (T,) attend with, by the names of their windows."""
        divisors = torch.arange(1, 3, device=input_seq.device)  # short is half of long
        first = first_visible(input_seq, window // divisors, self.hp.window_rule)
        used = {row.window for row in self.layers}
        rows = zip(("long", "short"), first, strict=True)
        return {name: make_mask(row) for name, row in rows if name in used}

    def hidden(self, input_seq: Tensor, window: int | Tensor) -> Tensor:
        """Tokens (T,), T whole blocks, and the long window in tokens to (T, C) after the last norm.

        Masks and rotary angles depend on the tokens alone: they are made here, once for all layers.
        """
        if not self.use_flex and len(input_seq) > 16384:
            raise UserError(f"{len(input_seq)} tokens a sequence need a GPU; try --record demo")
        masks = self.masks(input_seq, window, flex_mask if self.use_flex else dense_mask)
        rotary = rotary_table(len(input_seq), self.hp, input_seq.device)
        return self.trunk(*self.embedded(input_seq), rotary, masks)

    def readout(self, x: Tensor) -> Tensor:
        """What `hidden` gives (T, C) to soft-capped logits (T, padded vocabulary), in float32 and
        never from FP8."""
        cap = self.hp.logit_softcap
        return cap * torch.tanh(F.linear(x, self.lm_head.weight.type_as(x)).float() / cap)

    def logits(self, input_seq: Tensor, window: int | Tensor) -> Tensor:
        """Of tokens (T,) as in `hidden`, what `readout` gives."""
        return self.readout(self.hidden(input_seq, window))

    def forward(self, input_seq: Tensor, target_seq: Tensor, window: int | Tensor) -> Tensor:
        """Mean loss () of tokens (T,) and targets (T,) int64; for its gradients see HeadLoss."""
        x = self.hidden(input_seq, window)
        head, cap = self.lm_head, self.hp.logit_softcap
        scales = head.scales if x.requires_grad and trains_in_fp8(self.hp, x.device) else None
        return HeadLoss.apply(x, head.weight, target_seq, cap, scales, self.head_steps)


# -----------------------------------------------------------------------------
# Data: shards of GPT-2 tokens, and batches that depend on the step alone


def load_data_shard(path: str | Path) -> Tensor:
    """The tokens of a shard, (n,) uint16, mapped from the file.

    A shard is 256 little-endian int32 (20240520, version 1, n, zeros), then n uint16: llm.c's
    format. Raises UserError with what was found and what was expected.
    """
    size, header = os.path.getsize(path), np.fromfile(path, "<i4", 256).tolist()
    expected = [20240520, 1, (size - 1024) // 2]  # magic, version, tokens
    if size <= 1024 or size % 2 or header[:3] != expected:
        found = f"its {size} bytes begin with {header[:3]}, expected {expected}"
        raise UserError(f"{path} is not a whole token shard: {found}; fetch or make it again")
    return torch.from_numpy(np.memmap(path, "<u2", mode="c", offset=1024))


def verify_shards(pattern: str) -> None:
    """Compare each shard with the file SHA256SUMS beside it, in sha256sum's form; UserError."""
    for path in sorted(Path(p) for p in glob.glob(pattern)):
        manifest = path.with_name("SHA256SUMS")
        if not manifest.exists():
            raise UserError(f"{manifest} is missing: cached_fineweb.py or sha256sum makes one")
        words = [line.split() for line in manifest.read_text().splitlines()]
        sums = {name.lstrip("*"): digest for digest, *rest in filter(None, words) for name in rest}
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sums.get(path.name):
            expected = sums.get(path.name, "no checksum of it")
            raise UserError(f"{path} has SHA-256 {found}, {manifest} {expected}; fetch it again")


def cut_sequences(tokens: np.ndarray, seq_len: int, longest: int) -> tuple[np.ndarray, ...]:
    """Where in a shard's tokens (n,) its sequences of seq_len + 1 are: (starts, stops, bounds).

    Sequence i is the pieces starts[j]:stops[j] for j from bounds[i] to bounds[i + 1]. Without
    `longest`, one piece, and the next sequence begins with its last token. Otherwise a piece is a
    document's first tokens, at most `longest`; what the last one has left is dropped, so that each
    sequence begins with a document, as on the leaderboard since July 2025.
    """
    if not longest:
        starts = np.arange(0, len(tokens) - seq_len, seq_len)
        return starts, starts + seq_len + 1, np.arange(len(starts) + 1)
    starts = np.flatnonzero(tokens == END_OF_TEXT)
    lengths = np.minimum(np.diff(starts, append=len(tokens)), longest)
    stops, ends, end, bounds = starts + lengths, lengths.cumsum(), 0, [0]
    while (last := np.searchsorted(ends, end + seq_len + 1)) < len(ends):
        stops[last] -= ends[last] - (end + seq_len + 1)
        end = ends[last]
        bounds.append(last + 1)
    return starts, stops, np.array(bounds)


def distributed_data_generator(
    pattern,
    seq_len,
    batch_seqs,
    rank,
    world_size,
    start_step=0,
    num_batches=0,
    epochs=1,
    vocab_size=2**16,
    longest=0,
    device=None,
):
    """This rank's part of each global batch from start_step on, read ahead by a thread.

    Yields inputs (int32) and targets (int64), both (batch_seqs / world_size, seq_len), pinned for a
    CUDA device; targets are the sequence shifted by one. A batch is batch_seqs consecutive
    sequences of one shard (a tail too short for one is dropped); rank r has the r-th part. It ends
    after num_batches, or else after `epochs` passes over the shards (0: never). For `longest` see
    cut_sequences.

    Raises UserError at once: for shards that are missing, damaged, too short for num_batches (0:
    for one) or hold a token outside the vocabulary, and for a world size that does not divide the
    batch. That reads all the shards of the run, which brings them into the page cache too.
    """
    if batch_seqs % world_size:
        raise UserError(f"{world_size} ranks cannot share {batch_seqs} sequences: use a divisor")
    shards = [(path, load_data_shard(path).numpy()) for path in sorted(glob.glob(pattern))]
    if not shards:
        remedy = f"; fetch FineWeb with {HERE}/cached_fineweb.py" * pattern.startswith(FINEWEB)
        raise UserError(f"no shard matches {pattern}{remedy}")
    plan = []  # of each batch: the shard, its pieces, and the bounds of batch_seqs sequences
    for path, tokens in shards:
        if (worst := tokens.max()) >= vocab_size:
            where = f"{path}: token {worst} at position {tokens.argmax()}"
            raise UserError(f"{where} is outside the vocabulary of {vocab_size}")
        starts, stops, bounds = cut_sequences(tokens, seq_len, longest)
        batches = range(0, len(bounds) - batch_seqs, batch_seqs)
        plan += [(tokens, starts, stops, bounds[i : i + batch_seqs + 1]) for i in batches]
        if num_batches and len(plan) >= num_batches:
            break
    if not plan:
        found, need = max(len(tokens) for _, tokens in shards), seq_len * batch_seqs + 1
        raise UserError(f"{pattern}: a shard has at most {found} tokens, a batch needs {need}")
    if epochs and len(plan) * epochs < num_batches:
        found = f"{pattern} holds {len(plan)} batches, the run reads {num_batches}"
        raise UserError(f"{found}: add shards, or read them again with --epochs")
    share = batch_seqs // world_size

    def read(step: int) -> tuple[Tensor, Tensor]:
        tokens, starts, stops, bounds = plan[step % len(plan)]
        rows = []
        for i, j in itertools.pairwise(bounds[rank * share :][: share + 1]):
            pieces = zip(starts[i:j], stops[i:j], strict=True)
            rows.append(np.concatenate([tokens[start:stop] for start, stop in pieces]))
        rows = np.stack(rows)
        both = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int64)
        both = tuple(map(torch.from_numpy, both))
        if device is None or device.type == "cpu":
            return both
        torch.cuda.set_device(device)  # else a thread's pinned memory is that of GPU 0
        return tuple(t.pin_memory() for t in both)

    def batches():
        last = num_batches or (epochs * len(plan) if epochs else sys.maxsize)
        with ThreadPoolExecutor(1) as reader:
            ahead = deque()
            for step in range(start_step, last):
                ahead.append(reader.submit(read, step))
                if len(ahead) > 4:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    return batches()


# -----------------------------------------------------------------------------
# Schedules: functions of the step alone, whatever machine it runs on


def get_lr(step: int, hp: Hyperparameters) -> float:
    """Multiplier on every learning rate: a linear rise, 1, a linear fall to lr_final."""
    rise = min((step + 1) / hp.warmup_steps, 1.0) if hp.warmup_steps else 1.0
    w = min((1 - step / hp.num_iterations) / hp.cooldown_frac, 1.0) if hp.cooldown_frac else 1.0
    return rise * (w + (1 - w) * hp.lr_final)


def get_window_size(step: int, hp: Hyperparameters) -> int:
    """The long window in tokens; it grows, in window_steps rounded up ("blocks") or down."""
    grown, unit = hp.window_span * step, hp.num_iterations * hp.window_step  # exact in integers
    if hp.window_rule == "blocks":
        return max(-(-grown // unit) * hp.window_step, hp.window_min)
    return (hp.window_min * hp.num_iterations + grown) // unit * hp.window_step


def last_window(saved: dict, hp: Hyperparameters) -> int:
    """A checkpoint's window in tokens: that of its step, or of the last one if it names none."""
    return get_window_size(min(saved.get("step", hp.num_iterations), hp.num_iterations), hp)


def get_muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Muon's momentum at the step: a linear ramp, then flat."""
    ramp = min(step / hp.momentum_warmup_steps, 1.0)
    return (1 - ramp) * hp.momentum_start + ramp * hp.momentum_end


# -----------------------------------------------------------------------------
# Training: devices and ranks, log, checkpoints, signals, the timed loop


def start_device(wanted: str, store: dist.Store | None, timeout: int = 600) -> torch.device:
    """This process's device; with a store, joins its process group over it."""
    device, gpus = torch.device("cpu"), torch.cuda.device_count()
    if wanted == "cuda" or (wanted == "auto" and gpus):
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= gpus:
            remedy = f"start {gpus} processes a node" if gpus else "use --device cpu"
            raise UserError(f"process {local_rank} finds {gpus} GPUs on its machine: {remedy}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        if store:  # torchrun gives each process one thread
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, os.cpu_count() // processes))
        with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
            # Keep freed memory. Else each chunk of logits comes anew from the system, page by page:
            # a tenth to a fifth of the demo's time.
            mallopt, M_MMAP_MAX, M_TRIM_THRESHOLD = ctypes.CDLL(None).mallopt, -4, -1
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if store:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = "nccl" if device.type == "cuda" else "gloo"
        limits = {"timeout": timedelta(seconds=timeout), "store": store}
        dist.init_process_group(backend, rank=rank, world_size=world_size, **limits)
    return device


def all_reduce_(tensors: list[Tensor]) -> None:
    """Sum each tensor over all ranks, in place; one process has nothing to do."""
    if dist.is_initialized():
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()


def wait_for_all_ranks(device: torch.device) -> None:
    """Return when all of them have come here."""
    count = torch.ones(1, device=device)
    all_reduce_([count])
    count.item()  # on a GPU, only this waits


class Logger:
    """Rank 0's log file, and the console: plain lines, on a terminal a bar for the steps."""

    def __init__(self, hp: Hyperparameters, device: torch.device, rank: int, go_on: bool):
        """Begin logs/<run_id>.txt with what it takes to believe and to repeat the run, or go on."""
        self.run_id = hp.run_id or time.strftime("%Y-%m-%d_%H-%M-%S_") + uuid.uuid4().hex[:6]
        self.path = Path("logs", f"{self.run_id}.txt") if rank == 0 else Path(os.devnull)
        if rank == 0 and self.path.exists() and not go_on:
            raise UserError(f"{self.path} is there already: choose another --run_id, or --resume")
        self.path.parent.mkdir(exist_ok=True)
        self.file = self.path.open("a", buffering=1, encoding="utf-8")
        options = {"total": hp.num_iterations, "file": sys.stdout, "leave": False}
        options["bar_format"] = "{n}/{total} {bar}{postfix}, {remaining} left"
        self.bar = tqdm(disable=None, **options)  # None: no bar where there is no terminal
        if rank or self.path.stat().st_size:
            return
        command = "nvidia-smi" if device.type == "cuda" else "lscpu || sysctl machdep.cpu"
        machine = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        software = f"Python {sys.version}\ntorch {torch.__version__} CUDA {torch.version.cuda}"
        settings = "\n".join(f"{name}: {show(value)}" for name, value in vars(hp).items())
        for part in (Path(__file__).read_text("utf-8"), software, machine, settings):
            print(part, "=" * 100, sep="\n", file=self.file)

    def __call__(self, line: str, console: bool = True) -> None:
        print(line, file=self.file)
        if console:
            self.bar.write(line)
            sys.stdout.flush()

    def step(self, line: str, progress: str) -> None:
        """The line of one training step; on a terminal the bar moves instead."""
        self(line, console=self.bar.disable)
        self.bar.set_postfix_str(progress, refresh=False)
        self.bar.update()


class Metrics:
    """A run as data: logs/<run_id>.jsonl has an object for each step, as pandas reads it.

    A step's result is fetched when the next step is under way, or when the device has been waited
    for anyway; its row is written then.
    """

    def __init__(self, path: Path, hp: Hyperparameters, first_step: int):
        """Begin, or go on after a checkpoint's step: rows of later ones will come again."""
        self.hp, self.row, self.result, self.since = hp, {}, None, 0.0
        self.last, kept = (math.log(hp.vocab_size), 0.0), 0
        self.file = path.open("ab", buffering=0)
        if path.is_file():
            with contextlib.suppress(ValueError):  # from a row that a full disk cut
                for row in path.read_bytes().splitlines(keepends=True) if first_step else ():
                    if not row.endswith(b"\n") or json.loads(row)["step"] > first_step:
                        break
                    kept += len(row)
            self.file.truncate(kept)

    def begin(self, step: int, result: Tensor) -> None:
        """The step is under way; its result is train_step's."""
        hp, memory = self.hp, peak_memory(result.device)[0] >> 20
        self.row = {"step": step + 1, "window": get_window_size(step, hp), "memory_mib": memory}
        self.row |= {"lr": get_lr(step, hp), "momentum": get_muon_momentum(step, hp)}
        self.result = to_host(result)

    def fetch(self) -> tuple[float, float]:
        """Loss and `stop` of the last step begun; its row is complete but for a validation."""
        if self.result:
            (loss, stop, *norms), ended = self.result()
            self.last = loss, stop
            seconds, self.since, self.result = ended - self.since, ended, None
            self.row |= {"train_loss": loss, "ms": round(1e3 * seconds, 3)}
            self.row |= {"tokens_per_s": round(self.hp.batch_seqs * self.hp.seq_len / seconds)}
            self.row |= zip(GRAD_NORMS, norms, strict=False)
        return self.last

    def write(self) -> None:
        """Append the row, if there is one. A SIGKILL can cut a write where a page of memory begins:
        blanks keep rows clear of that."""
        if self.row:
            line, size = json.dumps(self.row).encode(), self.file.seek(0, os.SEEK_END)
            room = -(size + len(line) + 1) % 4096
            self.file.write(line + b" " * (room if room < 1024 else 0) + b"\n")
            self.row = {}


# What was so before it was a setting; a checkpoint that does not name it was trained with that.
BEFORE_SETTINGS = {"norm_eps": 2.0**-23, "momentum_damped": True}

CHECKSUM = b"SHA-256:"  # ends a checkpoint, before the digest of all bytes that precede it


def save_checkpoint(path: Path, state: dict, keep: int) -> None:
    """Write a whole checkpoint or none, then remove all but the `keep` newest of the run."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with temporary.open("w+b") as file:
            torch.save(state, file)
            file.flush()
            file.seek(0)
            file.write(CHECKSUM + hashlib.file_digest(file, "sha256").digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except Exception as error:  # torch's writer makes everything a RuntimeError
        temporary.unlink(missing_ok=True)
        raise UserError(f"could not save {path}: is the disk full? ({error})") from error
    for old in checkpoints(path.parent)[keep:]:
        old.unlink()


def checkpoints(folder: Path, pattern: str = "state_step*.pt") -> list[Path]:
    """Those in a folder, the newest first."""
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint on the CPU: `model`, its names without _orig_mod., and, unless it is a published
    one, what train() saves. UserError if the file is not a whole checkpoint; its checksum is
    compared before anything in it is read."""
    data = np.memmap(path, mode="r") if os.path.getsize(path) else np.zeros(0, np.uint8)
    body, ending = data[: -len(CHECKSUM) - 32], bytes(data[-len(CHECKSUM) - 32 :])
    whole = ending == CHECKSUM + hashlib.sha256(body).digest()
    try:
        if ending.startswith(CHECKSUM) and not whole:
            raise ValueError("its checksum is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
        state["model"] = {k.removeprefix("_orig_mod."): v for k, v in state["model"].items()}
        if "hyperparameters" in state:
            if not whole:
                raise ValueError("its checksum is missing")
            settings = BEFORE_SETTINGS | state["hyperparameters"]
            hp = replace(RECORDS[state["record"]], **settings)
            check(hp)
            state["hyperparameters"] = hp
        return state
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch's own advice is to load it unsafely
        reason = error if isinstance(error, ValueError) else type(error).__name__
        raise UserError(f"{path} is not a whole checkpoint of this program ({reason})") from error


def newest_checkpoint(run_id: str) -> tuple[Path | None, dict]:
    """The newest whole one under logs/ and what it holds, of one run or any ("*"); or None, {}."""
    found = checkpoints(Path("logs"), f"{run_id}/state_step*.pt")
    for path in found:
        try:
            return path, load_checkpoint(path)
        except UserError as error:
            print(f"{error}; trying the one before", file=sys.stderr)
    if found:
        raise UserError(f"none of {len(found)} checkpoints under logs/ is whole; remove them")
    return None, {}


class Signals:
    """SIGTERM and SIGINT let the step finish and a checkpoint be saved; a second SIGINT does not.

    A thread watches, because a rank that waits for a dead one runs no Python: unless alone, it
    leaves when what it does takes longer than was expected. torchrun repeats to its workers what
    the terminal sends them, hence a second SIGINT counts only after a second.
    """

    def __init__(self, alone: bool):
        self.number, self.alone = 0, alone
        self.expect(6)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self.watch, args=[reader], daemon=True).start()

    def expect(self, seconds: float) -> None:
        """What comes next takes no longer than this, if all ranks are alive."""
        self.deadline = math.inf if self.alone else time.monotonic() + seconds

    def watch(self, reader: socket.socket) -> None:
        first = math.inf
        reader.settimeout(0.5)
        while True:
            try:
                if not (byte := reader.recv(1)):  # see forget
                    return
                number = byte[0]
            except TimeoutError:
                number = 0
            if number in (signal.SIGTERM, signal.SIGINT):
                if number == signal.SIGINT and time.monotonic() - first > 1:
                    os._exit(130)
                self.number = self.number or number
                first = min(first, time.monotonic())
            if self.number and time.monotonic() > max(self.deadline, first + 6):
                os._exit(128 + self.number)

    @staticmethod
    def forget() -> None:
        """Python's own answers to signals again; the thread ends."""
        if (writer := signal.set_wakeup_fd(-1)) != -1:  # there were others
            os.close(writer)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)


def clock(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trial(function, arguments: list, device: torch.device) -> tuple[list[Tensor], float]:
    """What a call gives, and its median ms with a backward pass, on a GPU by the GPU's clock.

    That is its result, and gradients of the arguments that want them or else what it left in the
    last tensor among them.
    """
    given = [
        a.detach().clone().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a
        for a in arguments
    ]
    tensors = [a for a in given if torch.is_tensor(a)]
    leaves = [t for t in tensors if t.requires_grad]

    def call() -> list[Tensor]:
        for t in leaves:
            t.grad = None
        out = function(*given)
        if leaves:
            out.backward(out.detach())  # of ones, it would hide rows that change places
        return [out, *(t.grad for t in leaves)] if leaves else [out, tensors[-1]]

    found = [t.detach().clone() for t in call()]
    if device.type == "cuda":
        return found, triton.testing.do_bench(call, return_mode="median")
    times = []
    for _ in range(9):
        start = clock(device)
        call()
        times.append(clock(device) - start)
    return found, 1e3 * sorted(times)[4]


def compare_twins(kernel: Kernel, hp, device, compiled: bool) -> tuple[bool, str]:
    """Whether a kernel can be built, agrees with its plain twin and is faster; what was seen."""
    try:
        arguments = list(kernel.example(hp, device))
        twins = [kernel.plain, kernel.fused]
        if compiled:
            twins = [torch.compile(twin, dynamic=False) for twin in twins]
        (plain, plain_ms), (fused, fused_ms) = (trial(twin, arguments, device) for twin in twins)
        pairs = ((a.float(), b.float()) for a, b in zip(plain, fused, strict=True))
        deviations = [(b - a).norm() / a.norm() for a, b in pairs]
        deviation = torch.stack(deviations).max().item()  # NaN, if one is
    except Exception as error:  # whatever a compiler or a driver does not like
        return False, " ".join(f"{type(error).__name__}: {error}".split())[:200]
    seen = f"{fused_ms:.3f} ms, plain {plain_ms:.3f} ms, deviation {deviation:.1e}"
    return fused_ms < plain_ms and deviation < 0.02, seen


def choose_kernels(hp: Hyperparameters, device: torch.device, compiled: bool, log=print) -> None:
    """Use each kernel that is better on all ranks, with a line of the log; or as --kernels says.

    Raises UserError where Triton cannot run.
    """
    possible = triton and (device.type == "cuda" or triton.knobs.runtime.interpret)
    if hp.kernels == "on" and not possible:
        raise UserError("--kernels on: Triton wants a CUDA GPU (or, to try it, TRITON_INTERPRET=1)")
    for kernel in KERNELS.values():
        kernel.use = hp.kernels == "on"
    if hp.kernels == "auto" and device.type == "cuda" and not possible:
        log("no kernels: Triton is not installed")
    if hp.kernels != "auto" or not possible:
        return
    findings = [compare_twins(kernel, hp, device, compiled) for kernel in KERNELS.values()]
    votes = torch.tensor([float(better) for better, _ in findings], device=device)
    all_reduce_([votes])
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for name, (_, seen), count in zip(KERNELS, findings, votes.tolist(), strict=True):
        KERNELS[name].use = count == ranks
        of_ranks = f", better on {count:.0f} of {ranks} ranks" * (0 < count < ranks)
        log(f"kernel {name}: {seen}: {'on' if count == ranks else 'off'}" + of_ranks)
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def evaluate(model: GPT, batches: list[Tensor], window: int, device: torch.device) -> float:
    """Mean loss of all ranks' validation sequences; this rank's are (n, T) on its device, and n may
    be 0."""
    model.eval()
    total = torch.zeros(2, device=device)  # losses, sequences
    for inputs, targets in zip(*batches, strict=True):
        loss = model(inputs, targets, window)
        total += torch.stack([loss, torch.ones_like(loss)])
    all_reduce_([total])
    model.train()
    return (total[0] / total[1]).item()


def train_step(model: GPT, optimizers, inputs: Tensor, targets: Tensor, step: int, stop=0):
    """One step on this rank's (n, T) micro-batches.

    Returns, of all ranks, the mean loss of the global batch, the sum of `stop`, and GRAD_NORMS if
    the optimizers made them: (2,) or (6,).

    Gradients are summed, and divided only then: each micro-batch's FP8 gradient keeps its scale.
    """
    loss, window = torch.zeros((), device=inputs.device), get_window_size(step, model.hp)
    for i, (input_seq, target_seq) in enumerate(zip(inputs, targets, strict=True), 1):
        micro_loss = model(input_seq, target_seq, window)
        if i == len(inputs):
            optimizers.begin_last_backward()
        micro_loss.backward()
        loss += micro_loss.detach()
        del micro_loss  # with what its graph holds, before the next one is made
    norms = optimizers.step(step)
    result = torch.stack([loss / model.hp.batch_seqs, torch.full_like(loss, stop)])
    all_reduce_([result])
    return torch.cat([result, *norms])


def build(hp: Hyperparameters, device: torch.device, weights=None) -> GPT:
    """The model of a run, with its initial weights or these, where and how it will train."""
    torch.manual_seed(hp.seed)
    model = GPT(hp)
    if weights:
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            reason = f"is of other hyperparameters: {error}"
            if any(name.endswith("attn.c_q.weight") for name in weights):
                reason = "is a published one of 2024, whose q, k and v are apart: not read here"
            raise UserError(f"the checkpoint {reason}") from error
    compiled = hp.compile in ("on", "whole") or (hp.compile == "auto" and device.type == "cuda")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and os.access(HERE, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{HERE}/.cache/inductor"  # outlasts a reboot
        os.environ.setdefault("TRITON_CACHE_DIR", f"{HERE}/.cache/triton")
    return model.to_device(device, compiled)


def warm_up(model: GPT, optimizers: Optimizers, device: torch.device, log=print) -> None:
    """Choose kernels, then run the shapes and windows of the run on made-up tokens.

    The weights end as they began. Uncompiled, the last window will do. Compilation leaves cycles of
    Python objects, which hold gigabytes of a GPU's memory: they are collected, and one more round
    then takes the memory that the run will need.
    """
    hp, initial = model.hp, {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()}
    choose_kernels(hp, device, model.compiled, log)
    windows = {get_window_size(step, hp): step for step in range(hp.num_iterations + 1)}
    tokens = torch.arange(1, max(hp.seq_len, hp.val_seq_len) + 1, device=device) % hp.vocab_size
    x, val = tokens[None, : hp.seq_len], tokens[None, : hp.val_seq_len]

    def once(window: int, step: int) -> None:
        evaluate(model, [val.int(), val], window, device)  # first: its blocks of memory are larger
        train_step(model, optimizers, x.int(), x, step)

    for window, step in list(windows.items())[0 if model.compiled else -1 :]:
        once(window, step)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        once(window, step)
    model.load_state_dict(initial)
    optimizers.load_state_dict({})


def to_host(values: Tensor):
    """Start copying from the device; the answer, when called, waits for that copy only, and gives
    the values and the time when the host saw that they were there."""
    if values.device.type == "cpu":
        found = values.tolist(), time.perf_counter()
        return lambda: found
    host, copied = torch.empty(values.shape, pin_memory=True), torch.cuda.Event()
    host.copy_(values, non_blocking=True)
    copied.record()
    return lambda: (copied.synchronize() or host.tolist(), time.perf_counter())


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Peak bytes allocated and reserved on a GPU; without one, what the process had, twice."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()  # empty until something was allocated
        return tuple(stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
    unit = 1 if sys.platform == "darwin" else 1024
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,) * 2


def train(hp: Hyperparameters, args: argparse.Namespace, store: dist.Store | None) -> None:
    """A run, from finding the device to the last line of the log; with --eval, one validation."""
    if args.saved.get("step", 0) >= hp.num_iterations and "resume" in args:
        print(f"the run had finished: step {args.saved['step']} of {hp.num_iterations} is saved")
        return
    device = start_device(hp.device, store, hp.comm_timeout)
    on_gpu = device.type == "cuda"
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if store else (0, 1)
    count = hp.val_tokens // hp.val_seq_len  # validation is one global batch; a rank may get none
    if hp.verify_data:
        for pattern in (hp.val_files, hp.train_files)[: 1 if "eval" in args else 2]:
            verify_shards(pattern)
    options = {"vocab_size": min(hp.vocab_size, END_OF_TEXT + 1)}  # GPT-2's; a table may be padded
    stream = hp.val_files, hp.val_seq_len, count, 0, 1
    val_batch = next(distributed_data_generator(*stream, num_batches=1, **options))
    val_batches = [t[rank::world_size].to(device) for t in val_batch]
    model = build(hp, device, args.saved.get("model"))
    if "eval" in args:
        choose_kernels(hp, device, model.compiled)
        loss = evaluate(model, val_batches, last_window(args.saved, hp), device)
        print(f"val_loss:{loss:.4f} over {hp.val_tokens} tokens, {args.checkpoint}")
        return
    first_step, seconds = args.saved.get("step", 0), args.saved.get("seconds", 0.0)
    stream = hp.train_files, hp.seq_len, hp.batch_seqs, rank, world_size, first_step
    options |= {"num_batches": hp.num_iterations, "epochs": hp.epochs, "device": device}
    options["longest"] = hp.max_document_tokens * hp.align_to_documents
    batches = distributed_data_generator(*stream, **options)
    optimizers = Optimizers(model, hp, rank, world_size)

    def check_loss(loss: float, step: int) -> float:  # equal on all ranks, so all stop together
        if not math.isfinite(loss):
            kept = next(iter(checkpoints(folder)), "none")
            remedy = f"try lower learning rates, or --fp8 off; the last checkpoint is {kept}"
            raise UserError(f"the loss is {loss} at step {step}: {remedy}")
        return loss

    log = Logger(hp, device, rank, go_on="resume" in args)
    folder, code = Path("logs", log.run_id), Path(__file__).read_text("utf-8")
    if rank == 0:
        for unfinished in folder.glob("*.tmp"):  # of a run that was killed while it saved
            unfinished.unlink()
    place = torch.cuda.get_device_name() if on_gpu else "CPU"
    record = vars(RECORDS[args.record])
    flags = "".join(f" --{name} {show(v)}" for name, v in vars(hp).items() if v != record[name])
    log(f"record {args.record}{flags}\non {world_size} x {place}, log in {log.path}")
    if args.record == "demo" and hp.device == "auto" and not on_gpu:
        log("no GPU found: this is a small demonstration, on the sample corpus in data/")
    if hp.fp8 and not trains_in_fp8(hp, device):
        log(f"no FP8 here: the head trains in {'bfloat16' if on_gpu else 'float32'}")
    total = torch.tensor([float(first_step)], device=device)
    all_reduce_([total])
    if total.item() != first_step * world_size:
        raise UserError("ranks found different checkpoints: logs/ must be one folder for all")
    if first_step:
        changed = "" if code == args.saved["code"] else "; the source has changed since"
        log(f"resumed at step {first_step}{changed}")
        log.bar.initial = log.bar.n = first_step
    start = clock(device)
    warm_up(model, optimizers, device, log)
    log(f"compilation and warm-up, not part of train_time: {clock(device) - start:.1f} s")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()

    if args.saved:
        optimizers.load_state_dict(args.saved["optimizers"])
        torch.set_rng_state(args.saved["random"])
        args.saved.clear()  # as large as the model and more
    signals, stop = Signals(alone=world_size == 1), 0.0
    metrics = Metrics(log.path.with_suffix(".jsonl") if rank == 0 else log.path, hp, first_step)
    # Batches arrive in one place: nothing is allocated for them in a step.
    shape = hp.batch_seqs // world_size, hp.seq_len
    inputs, targets = (
        torch.empty(shape, dtype=d, device=device) for d in (torch.int32, torch.int64)
    )
    gc.freeze()  # what is there by now stays: no collection need walk through it
    start = metrics.since = clock(device)
    for step in range(first_step, hp.num_iterations + 1):
        last, new = step == hp.num_iterations, step > first_step  # else it was done before
        validate = last or (hp.val_loss_every and step % hp.val_loss_every == 0)
        validate = validate and (new or step == 0)
        stop = stop and not last
        save = new and (stop or (hp.save_every and (last or step % hp.save_every == 0)))
        if validate or save:
            signals.expect(20)
            seconds += clock(device) - start
            check_loss(metrics.fetch()[0], step)
            ms = 1e3 * seconds
            if validate:
                loss = evaluate(model, val_batches, get_window_size(step, hp), device)
                times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
                log(f"step:{step}/{hp.num_iterations} val_loss:{loss:.4f} {times}")
                metrics.row |= {"step": step, "val_loss": check_loss(loss, step)}
                if note := against_published(args.record, hp, step, loss):
                    log.bar.write(note)
            metrics.write()
            if save:
                if not all(p.isfinite().all() for p in model.parameters()):
                    check_loss(math.nan, step)
                settings = {name: getattr(hp, name) for name in SAVED_FIELDS}
                state = {"record": args.record, "hyperparameters": settings, "code": code}
                state |= {"run_id": log.run_id, "step": step, "seconds": seconds}
                state |= {"model": model.state_dict(), "optimizers": optimizers.state_dict()}
                state |= {"random": torch.get_rng_state()}
                path = folder / f"state_step{step:06}.pt"
                if rank == 0:
                    save_checkpoint(path, state, hp.keep)
            if stop:
                wait_for_all_ranks(device)  # until rank 0 has written
                number = signal.Signals(signals.number or signal.SIGTERM)
                log(f"stopped by {number.name} and saved; --resume auto goes on after step {step}")
                sys.exit(128 + number)
            start = metrics.since = clock(device)
        if last:
            break
        signals.expect(6)
        for place, arrived in zip((inputs, targets), next(batches), strict=True):
            place.copy_(arrived, non_blocking=True)
        now = train_step(model, optimizers, inputs, targets, step, stop=bool(signals.number))
        loss, stop = metrics.fetch()  # of the step before: no waiting
        check_loss(loss, step)
        metrics.write()
        metrics.begin(step, now)
        ms = 1e3 * (seconds + time.perf_counter() - start)
        times = f"train_time:{ms:.0f}ms step_avg:{ms / (step + 1):.2f}ms"
        line = f"step:{step + 1}/{hp.num_iterations} {times}"
        rate = hp.batch_seqs * hp.seq_len * (step + 1) / ms
        log.step(line, f"loss {loss:.3f}, {ms / (step + 1):.0f} ms/step, {rate:.1f}k tokens/s")
    log.bar.close()
    sizes = (size >> 20 for size in peak_memory(device))
    log("peak memory allocated: {} MiB reserved: {} MiB".format(*sizes))
    if save:
        program = "./run.sh" if Path.cwd() == HERE else f"{HERE}/run.sh"
        command = shlex.join([program, "tools/sample.py", str(path)])
        print(f"read what it writes: {command}")


def as_program(name: str, parse, work) -> None:
    """work(parse(), store) as a command; an error of the user's becomes one line and a status.

    That is 2 while parsing, else 1. Rank 0 alone writes on the console. Of ranks that fail, the
    lowest reports: others wait for it.
    """
    status, store, rank = 2, None, int(os.environ.get("RANK", 0))
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            store = next(dist.rendezvous("env://"))[0]
        parsed = parse()
        status = 1
        work(parsed, store)
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError, RuntimeError) as error:
        message = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            message = f"out of GPU memory, make --seq_len and --val_seq_len smaller: {error}"
        elif store and (isinstance(error, dist.DistError) or re.search("gloo|pair clos", message)):
            message = f"another rank has stopped, or hangs: {error}"
        elif isinstance(error, RuntimeError):
            raise
        time.sleep(min(rank, 40) / 4)
        if store is None or store.add("reports", 1) == 1:
            print(f"{name}: error:", " ".join(message.split())[:500], file=sys.stderr)
        sys.exit(status)
    finally:
        Signals.forget()
        gc.unfreeze()  # see train


def main(argv: list[str] | None = None) -> None:
    """Parse the command line, and print records or train."""

    def work(parsed, store):
        hp, args = parsed
        if "list_records" in args or "diff" in args:
            print_records(getattr(args, "diff", list(RECORDS)), differing="diff" in args)
        else:
            train(hp, args, store)

    as_program("train_gpt.py", lambda: parse_args(argv), work)


if __name__ == "__main__":
    main()
