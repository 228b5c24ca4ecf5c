"""Train a GPT-2-small-sized language model to 3.28 validation loss on FineWeb, fast.

    torchrun --standalone --nproc_per_node=8 train_gpt.py    # the record, on a node of 8 H100s
    python train_gpt.py                                      # one GPU; without one, a small demo
    python train_gpt.py --help                               # every setting is a flag

The default is the NanoGPT-speedrun record 2025-01-26_BatchSize; --record names others. Numbers and
ideas come from github.com/KellerJordan/modded-nanogpt and the people named there. BENCHMARKS.md
says what this implementation has reached, on what and with which torch.

The file reads like the life of a batch, and importing it does nothing:

    Configuration    every setting of a run, with its flag
    Numerics         FP8 matmuls, the linear layer that uses them, and what calls Triton twins
    Optimizers       Muon and Adam as update rules, and the table of which parameter has which
    Model            masks, attention, layers, and a head whose loss never stores the logits
    Schedules        learning rate, windows, batch and targets as functions of the step
    Run              checkpoints, the timed loop, main()

records.py has the records, as data: settings, layers, stages. loader.py cuts batches from shards.
kernels.py has Triton twins of three functions; where it or Triton is missing, the plain functions
do the same. program.py has what is not about training: flags, errors, ranks, logs.
"""

import argparse
import contextlib
import gc
import itertools
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

if __name__ == "__main__" and "OMP_WAIT_POLICY" not in os.environ:
    # Before torch loads OpenMP, whose threads spin while they wait for each other: where other work
    # shares the cores, a long spin makes a step several times as long (BENCHMARKS.md).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # GNU's; other libraries have other names

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.optim.adam import adam as torch_adam
from torch.utils.checkpoint import checkpoint

import program
import records
from loader import END_OF_TEXT, FINEWEB, distributed_data_generator, load_data_shard  # noqa: F401
from program import HERE, UserError, all_reduce_, clock, of_machine, of_run, setting, show
from records import (
    ADAM_FIELDS,
    Layer,
    Stage,
    adam_table,
    check_together,
    layer_table,
    padded_vocab,
    scheduled_steps,
    sigmoid_form,
    softcap_of,
    stage_table,
)

try:  # Triton comes with PyTorch's CUDA build
    from kernels import TWINS, fault, obstacle, shared_memory_is_small
except ImportError:  # then the plain functions of this file do it all
    TWINS, fault, shared_memory_is_small = {}, None, lambda device: False
    obstacle = "kernels.py or Triton is missing".format

BLOCK = 128  # tokens in a block of the attention mask; sequences are whole blocks


# -----------------------------------------------------------------------------
# Configuration: a setting is a row; records.py has rows of layers, stages and records

SWITCH, WINDOW_RULES = ("auto", "on", "off"), ("blocks", "tokens", "distance")
Pair, Triple = tuple[float, float], tuple[float, float, float]


@dataclass(frozen=True)
class Hyperparameters:
    """Every setting of a run; each is a flag of the same name. Defaults: 2025-01-26_BatchSize."""

    num_iterations: int = setting(1770, "training steps", group="schedule")
    warmup_steps: int = setting(0, "steps of linear learning-rate warm-up", 0)
    cooldown_frac: float = setting(0.4, "share of the steps in which the learning rate falls")
    lr_final: float = setting(0.1, "learning-rate multiplier at the last step")
    stages: str = setting("", "a row for each stage; empty: one stage")
    extension_frac: float = setting(0.0, "share of the steps that come after the schedule", 0, 0.9)
    exact_stages: bool = setting(False, "starts of stages are not rounded; learning rates follow")
    last_window: int = setting(0, "long window of the last validation, 0: as it is", 0)
    window_rule: str = setting("blocks", "what a window counts", choices=WINDOW_RULES)
    window_min: int = setting(128, "long attention window at step 0, in tokens")
    window_span: int = setting(1728, "blocks: final window; tokens: growth from window_min", 0)
    window_step: int = setting(128, "the window is a multiple of this many tokens")

    seq_len: int = setting(49152, "tokens in a training sequence", BLOCK, step=BLOCK, group="batch")
    batch_seqs: int = setting(8, "sequences in a global batch, shared by all ranks")
    val_seq_len: int = setting(262144, "tokens in a validation sequence", BLOCK, step=BLOCK)
    val_tokens: int = setting(10485760, "validation tokens, from the start of the stream")
    epochs: int = setting(1, "passes over the training shards at most, 0 for any number", 0)
    align_to_documents: bool = setting(False, "begin each training sequence with a document")
    max_document_tokens: int = setting(2048, "then longer documents are cut, 0: none is", 0)

    layers: str = setting(records.LAYERS_2025, "a row for each layer", group="model")
    num_layers: int = setting(12, "how many of them, half from either end", 2)
    num_heads: int = setting(6, "attention heads")
    head_dim: int = setting(128, "channels in a head", 4, step=4)
    model_dim: int = setting(768, "channels of the residual stream", 16, step=16)
    vocab_size: int = setting(50257, "token ids; the head is padded to a multiple of 128")
    init_bound: float = setting(0.75**0.5, "hidden weights begin within this / sqrt(fan_in)")
    qkv_init: float = setting(1.0, "factor on that for q, k and v", 0)
    out_init: float = setting(0.0, "factor on init_bound for attention's output, 0: zeros", 0)
    value_init: float = setting(1.0, "standard deviation of value embeddings at first", 0)
    head_init: float = setting(0.0, "standard deviation of the head at first", 0)
    tied_frac: float = setting(0.0, "share of scheduled steps with head and embedding tied", 0, 1)
    attn_scale: float = setting(0.12, "factor on the products of q and k, 0: head_dim**-0.5")
    rope: str = setting("half", "share of the channels that rotate", choices=("half", "full"))
    rope_base: float = setting(1024.0, "rotary frequencies fall from 1 to about 1/rope_base", 1)
    yarn: bool = setting(False, "fit rotary frequencies and attn_scale to growing windows")
    key_offset: bool = setting(False, "long, unpaired: half of a key is the token's before")
    paired_heads: bool = setting(False, "pair the heads of layers with the word pair")
    attention_gate: bool = setting(False, "gate each head's output")
    value_gate: bool = setting(False, "gate value embeddings for each head")
    gate_by_values: bool = setting(False, "unpaired, these gates read the value embedding, too")
    skip_gate: bool = setting(False, "gate skip connections")
    smear: bool = setting(False, "add a share of the token before to each embedding")
    bigram_rows: int = setting(0, "rows of the table of bigrams' embeddings, 0: no table", 0)
    bigram_lambda: float = setting(0.1, "factor on a bigram's embedding in each layer at first")
    scaled_projections: bool = setting(False, "attention's lambdas scale what enters and leaves")
    residual_lambda: float = setting(1.0, "factor on the residual stream at first", 0)
    sublayer_lambdas: bool = setting(False, "factors on the stream and the result, by sublayer")
    x0_apart: bool = setting(False, "the factors on x0 are a group of parameters of their own")
    # PyTorch's default for bfloat16 when the records ran (BENCHMARKS.md); now it is 2^-23.
    norm_eps: float = setting(2.0**-7, "RMSNorm's epsilon", 1e-12)
    logit_softcap: float = setting(15.0, "logits become cap * tanh(logit / cap)", 1e-3, 38)
    logit_sigmoid: Triple = setting((0.0, 0.0, 1.0), "a b c, a > 0: a sigmoid((logit + b) / c)", 0)
    loss_sum: bool = setting(False, "gradients are those of a sequence's sum, not of its mean")
    seed: int = setting(0, "seed of the initial weights", 0, 2**63 - 1)

    # So small that, while output projections are zero, scalars take full steps by rounding noise.
    adam_eps: float = setting(1e-10, "Adam's epsilon", group="optimizers")
    adam_betas: Pair = setting((0.8, 0.95), "Adam's betas", 0, 0.9999)
    adam_rule: str = setting("torch", "which Adam; see adam", choices=("torch", "cautious"))
    adam_groups: str = setting("", "rows of Adam's groups, where the following does not hold")
    adam_every: int = setting(1, "Adam takes so many steps' gradients at a time", 1, 2)
    embed_lr: float = setting(0.6, "Adam's learning rate for token and value embeddings")
    head_lr: float = setting(0.008, "Adam's learning rate for the head")
    scalar_lr: float = setting(0.04, "Adam's learning rate for scalars")
    muon_lr: float = setting(0.05, "Muon's learning rate for hidden matrices")
    muon_mul: Triple = setting((2.0, 1.0, 1.0), "factors for tall, wide, square matrices", 0)
    muon_beta2: float = setting(0.0, "NorMuon's beta2, 0: plain Muon", 0, 0.9999)
    muon_decay: float = setting(0.0, "Muon's cautious weight decay, times lr^2", 0)
    polar_express: bool = setting(False, "orthogonalise by Polar Express, not by Newton-Schulz")
    momentum_start: float = setting(0.85, "Muon's momentum at step 0")
    momentum_end: float = setting(0.95, "Muon's momentum after its ramp")
    momentum_warmup_steps: int = setting(300, "steps of that linear ramp")
    momentum_cooldown_steps: int = setting(0, "last steps, in which it falls again", 0)
    momentum_damped: bool = setting(True, "momentum averages gradients; off: it sums them")
    grad_clip: float = setting(0.0, "largest global L2 norm of the gradient, 0 for no limit")

    fp8: bool = setting(True, "train the head in FP8 on GPUs that can", group="FP8")
    x_s: float = setting(2.0, "scale of the head's input", 1e-6)
    w_s: float = setting(2.0**9, "scale of the head's weight", 1e-6)
    grad_s: float = setting(2.0**19, "scale of the logits' gradient", 1e-6)
    bfloat16_head: bool = setting(False, "train the head in bfloat16 on CPUs that can")

    train_files: str = of_run(f"{FINEWEB}_train_*.bin", "pattern of training shards", group="run")
    val_files: str = of_run(f"{FINEWEB}_val_*.bin", "pattern of validation shards")
    val_loss_every: int = of_run(125, "steps between validations, 0 for the last step only", 0)
    run_id: str = of_run("", "name of the log, logs/RUN_ID.txt; if empty, made from the time")
    save_every: int = of_run(0, "steps between checkpoints, one at the end too; 0 for none", 0)
    keep: int = of_run(2, "how many checkpoints of a run are kept, the newest ones")
    comm_timeout: int = of_run(600, "seconds after which ranks give up on each other")
    device: str = of_machine("auto", "auto: cuda if there is one", choices=("auto", "cuda", "cpu"))
    compile: str = of_machine("auto", "torch.compile; auto: on a GPU", choices=SWITCH)
    kernels: str = of_machine("auto", "use Triton's; auto: where they are right", choices=SWITCH)


LEARNING_FIELDS = program.names_of(Hyperparameters, "learning")
RECORDS = {name: Hyperparameters(**settings) for name, settings in records.ROWS.items()}


def check(hp: Hyperparameters) -> None:
    """Raise UserError for values that no run can have."""
    program.check_ranges(hp)
    check_together(hp)
    layer_table(hp)
    parameter_table(hp)


# -----------------------------------------------------------------------------
# Numerics: FP8 matmuls, the linear layer that uses them, and what calls Triton twins


def activation_dtype(device: torch.device) -> torch.dtype:
    """Of embeddings and activations: bfloat16 on CUDA, float32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fp8_supported(device: torch.device) -> bool:
    """torch's scaled matmul runs on GPUs from Ada and Hopper on, and, slowly, on a CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (8, 9)


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
    """A linear layer without bias whose weight is cast to its input's dtype at use.

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


def as_is(function):
    """What takes the place of torch.compile where nothing is compiled."""
    return function


KERNELS: dict[str, "Kernel"] = {}


def kernels_in_use() -> list[str]:
    return [name for name, kernel in KERNELS.items() if kernel.use]


class Kernel:
    """A plain function whose twin in kernels.py is called while choose_kernels has set `use`."""

    def __init__(self, plain):
        self.plain, self.fused, self.use = plain, TWINS.get(plain.__name__), False
        KERNELS[plain.__name__] = self

    def __call__(self, *arguments):
        return (self.fused if self.use else self.plain)(*arguments)


# -----------------------------------------------------------------------------
# Optimizers: Muon and Adam as update rules, and the table that says which parameter has which


@Kernel
def symmetric_matmul(a: Tensor, c: Tensor | None = None, alpha=1.0, beta=1.0) -> Tensor:
    """a a^T (B, n, n) of a (B, n, k), or with a symmetric c (B, n, n), alpha a a^T + beta c."""
    return a @ a.mT if c is None else torch.baddbmm(c, a, a.mT, beta=beta, alpha=alpha)


# Coefficients (a, b, c) of a step, which takes singular values s to a s + b s^3 + c s^5. Those of
# Newton-Schulz bring most of them to between 0.7 and 1.2, fast rather than exactly; those of Polar
# Express (arXiv 2505.16932), with its margins for rounding, change from step to step.
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 5
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5, polar_express=False) -> Tensor:
    """G (..., rows, cols) with its singular vectors kept and its singular values near 1; zero stays
    zero. bfloat16 on CUDA, else G's own dtype. Source: kellerjordan.github.io/posts/muon."""
    in_bfloat16 = activation_dtype(G.device) == torch.bfloat16
    X = (G.bfloat16() if in_bfloat16 else G).reshape(-1, *G.shape[-2:])
    tall = X.size(-2) > X.size(-1)
    X = X.mT if tall else X
    size = torch.linalg.matrix_norm(X, keepdim=True)  # Frobenius: >= the largest singular value
    X = X / (1.02 * size + 1e-6 if polar_express else size + 1e-7)
    coefficients = POLAR_EXPRESS if polar_express else NEWTON_SCHULZ
    for a, b, c in coefficients[:steps]:
        A = symmetric_matmul(X)  # sums inside the matmuls: in bfloat16, half the rounding error
        B = symmetric_matmul(A, A, c, b)
        X = torch.baddbmm(X, B, X, beta=a)
    return (X.mT if tall else X).reshape(G.shape)


def muon_updates(grads, momenta, momentum: Tensor, damped=True, polar_express=False) -> Tensor:
    """The updates (n, rows, cols) of n matrices; mean gradients and momenta are lists of parts.

    Momenta change in place. Damped, they take up a share of 1 - momentum of each gradient, else all
    of it: while the momentum is constant, that is only another scale. Compiled, all but the matmuls
    is one pass over them; momentum () is a tensor, so that a new value compiles nothing.
    """
    directions = []
    for grad, buffer in zip(grads, momenta, strict=True):
        if damped:
            buffer.lerp_(grad, 1 - momentum)
            directions.append(grad.lerp(buffer, momentum))
        else:
            buffer.mul_(momentum).add_(grad)
            directions.append(grad + momentum * buffer)
    return zeropower_via_newtonschulz5(torch.cat(directions), polar_express=polar_express)


def normuon_(updates: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """NorMuon (arXiv 2510.05491): updates (n, rows, cols) whose neurons, the longer side, have
    equal sizes in the mean over steps; each matrix keeps its Frobenius norm. The second moments
    (n, rows, 1) or (n, 1, cols) change in place."""
    old, neuron = updates.float(), -1 if second_moment.size(-1) == 1 else -2
    second_moment.lerp_(old.square().mean(dim=neuron, keepdim=True), 1 - beta2)
    new = old * second_moment.clamp(min=1e-10).rsqrt()
    before, after = (torch.linalg.matrix_norm(t, keepdim=True) for t in (old, new))
    return (new * (before / after.clamp(min=1e-10))).type_as(updates)


def cautious_step_(weights, updates, lr: Tensor, decay: Tensor) -> None:
    """weights -= lr * updates, and where an update makes a weight smaller anyway, or is 0, also
    lr * decay * weights: cautious weight decay (arXiv 2510.12402)."""
    for weight, update in zip(weights, updates, strict=True):
        weight.sub_(lr * (update + decay * weight * (update * weight >= 0)))


def cautious_adam_(weights, grads, state, lr: Tensor, betas, eps: float, decay: float) -> None:
    """A step of Adam in place, in float32, on lists of weights, gradients and state. Epsilon is
    added to the root of the uncorrected second moment. Where an update makes a weight smaller, the
    weight decays by lr^2 * decay, too. On a CPU, rows of 65536 numbers stay in the cache."""
    for weight, grad, kept in zip(weights, grads, state, strict=True):
        step, (beta1, beta2) = kept["step"].add_(1), betas
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


MUON_STEPS = muon_updates, normuon_, cautious_step_


def number(value: float, like: Tensor) -> Tensor:
    """It as a tensor (): compiled functions are not compiled anew for another value."""
    return torch.full((), value, device=like.device)


# An update rule is rule(buckets, lr, now, ...): of buckets (see Bucket) whose rows have one shape,
# with the group's learning rate `lr` at this moment, and the Moment `now`. It reads bucket.grads,
# the mean gradient (n, ...) of this rank's n rows. What it keeps in bucket.state is saved and
# resumed: tensors (n, ...) of any further shape, or () and equal in all buckets. The rule answers
# with what each bucket sends, (n, ...), and how all ranks change their weights by what was sent:
# take(weights, sent), two lists.


def muon(buckets, lr: float, now, hp: Hyperparameters, steps=MUON_STEPS):
    """Nesterov momentum whose update is orthogonalised, for matrices (n, rows, cols). With a
    muon_beta2 it is NorMuon; with a muon_decay, weights decay cautiously, by lr^2. `steps` are the
    compiled MUON_STEPS."""
    (rows, cols), (updates_of, norm_, step_) = buckets[0].row_shape, steps
    for bucket in buckets:
        if "momentum_buffer" not in bucket.state:
            bucket.state["momentum_buffer"] = torch.zeros_like(bucket.grads)
        if hp.muon_beta2 and "second_moment" not in bucket.state:
            shape = (rows, 1) if rows >= cols else (1, cols)
            bucket.state["second_moment"] = bucket.grads.new_zeros(len(bucket.grads), *shape)
    grads = [bucket.grads for bucket in buckets]
    momenta = [bucket.state["momentum_buffer"] for bucket in buckets]
    options = number(now.momentum, grads[0]), hp.momentum_damped, hp.polar_express
    updates = updates_of(grads, momenta, *options).split([len(grad) for grad in grads])
    if hp.muon_beta2:
        pairs = zip(updates, [bucket.state["second_moment"] for bucket in buckets], strict=True)
        updates = [norm_(update, second, hp.muon_beta2) for update, second in pairs]
    tall, wide, square = hp.muon_mul
    own_lr = lr * (tall if rows > cols else wide if rows < cols else square)
    if not hp.muon_decay:
        return updates, partial(torch._foreach_add_, alpha=-own_lr)
    numbers = number(own_lr, grads[0]), number(lr * hp.muon_decay, grads[0])
    return updates, lambda weights, sent: step_(weights, sent, *numbers)


def copy_new(weights: list[Tensor], sent: list[Tensor]) -> None:
    """Take over what was sent as the new weights."""
    for weight, new in zip(weights, sent, strict=True):
        if weight.data_ptr() != new.data_ptr():  # one rank's share of a table is the table
            weight.copy_(new)


def adam(buckets, lr: float, now, betas, eps: float, decay=0.0, step_=None):
    """Adam, for rows of any shape: with a (compiled) cautious_adam_ and moments in float32; else
    torch's fused one, without decay."""
    weights, states = [bucket.weights() for bucket in buckets], [bucket.state for bucket in buckets]
    for state, weight in zip(states, weights, strict=True):
        if "step" not in state:
            state["step"] = torch.zeros((), device=weight.device)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(weight, dtype=torch.float32 if step_ else None)
    grads, (beta1, beta2) = [bucket.grads for bucket in buckets], betas
    if step_:
        step_(weights, grads, states, number(lr, weights[0]), betas, eps, decay)
    else:
        kept = ([state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step"))
        moments, squares, steps = kept
        options = {"amsgrad": False, "maximize": False, "fused": True, "weight_decay": 0.0}
        options |= {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
        grads = [grad.type_as(weight) for grad, weight in zip(grads, weights, strict=True)]
        torch_adam(weights, grads, moments, squares, [], steps, **options)
    return weights, copy_new


@dataclass(frozen=True)
class Group:
    """A row of the table of parameters: which parameters these are, and how they learn."""

    name: str  # its gradient's norm is in the metrics as grad_norm_NAME
    patterns: tuple[str, ...]  # of names of parameters, as fnmatch reads them
    rule: Callable
    lr: float
    row_ndim: int  # a rank owns whole rows: matrices (2), rows of a table (1), or numbers (0)
    least_rows: float  # a bucket has at least so many rows, and one for each rank
    complete: str = "backward"  # gradients are there in the last backward pass, or at its "end", or
    # since the "forward" pass
    every: int = 1  # it learns from the sum of so many steps' gradients

    def learns(self, now: "Moment") -> bool:
        """Whether it does at a moment. An embedding that is the head learns as the head."""
        return (now.step + 1) % self.every == 0 and not (now.tied and self.name == "embed")


# The parameters of each group, in the order of a step. Those of a group in ELSEWHERE belong to the
# group that is named there, unless hp.adam_groups has a row for their own.
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
ELSEWHERE = {"gates": "muon", "x0": "scalar", "bigram": "scalar", "residual": "scalar"}
ELSEWHERE |= {"post": "scalar", "smear": "scalar", "skip": "scalar"}


def adam_group(name: str, patterns, hp: Hyperparameters, compile_, **own: float) -> Group:
    """A group that learns by Adam, by the numbers of its own row of hp.adam_groups or the usual."""
    tables = {"head": hp.head_lr, "embed": hp.embed_lr, "values": hp.embed_lr}
    usual = tables.get(name, hp.scalar_lr), *hp.adam_betas, 0.0
    lr, *betas, decay = (dict(zip(ADAM_FIELDS, usual, strict=True)) | own).values()
    step_ = compile_(cautious_adam_) if hp.adam_rule == "cautious" else None
    rule = partial(adam, betas=betas, eps=hp.adam_eps, decay=decay, step_=step_)
    if name not in tables:
        return Group(name, patterns, rule, lr, 0, math.inf, every=hp.adam_every)
    complete = "forward" if name == "head" and not hp.tied_frac else "end"
    return Group(name, patterns, rule, lr, 1, 1, complete, hp.adam_every)


def parameter_table(hp: Hyperparameters, compile_=as_is) -> tuple[Group, ...]:
    """The groups, in the order in which their gradients leave and their weights are updated."""
    own, patterns = adam_table(hp, PATTERNS.keys() - {"muon"}), dict(PATTERNS)
    for name, other in ELSEWHERE.items():
        if name not in own:
            patterns[other] += patterns.pop(name)
    rule = partial(muon, hp=hp, steps=tuple(map(compile_, MUON_STEPS)))
    matrices = Group("muon", patterns.pop("muon"), rule, hp.muon_lr, 2, 8)
    groups = [adam_group(n, p, hp, compile_, **own.get(n, {})) for n, p in patterns.items()]
    # A tied head waits for the embedding's gradient; then matrices do not wait for the head.
    groups.insert(0 if hp.tied_frac else 1, matrices)
    return tuple(groups)


def members(model: nn.Module, table: tuple[Group, ...] = ()) -> dict[str, dict[str, nn.Parameter]]:
    """Of each group's name, its parameters by their names. ValueError for a parameter that does not
    match exactly one row of the table."""
    table = table or parameter_table(model.hp)
    found = {group.name: {} for group in table}
    for name, p in model.named_parameters():
        rows = [g for g in table if any(fnmatchcase(name, text) for text in g.patterns)]
        if len(rows) != 1 or p.ndim < rows[0].row_ndim:
            names = " and ".join(g.name for g in rows) or "no row"
            wanted = f"it wants exactly one, for its shape {tuple(p.shape)}"
            raise ValueError(f"{name} matches {names} of parameter_table: {wanted}")
        found[rows[0].name][name] = p
    return found


reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gradient_buffer(weight: Tensor) -> Tensor:
    """Where the gradient of a vocabulary table is summed in place: weight.grad, made once.

    For a bfloat16 table it is weight.grad32: a common token adds thousands of small terms. Buffers
    of tables that are joined (see ValueEmbeds) are made together, and are parts of one.
    """
    name = "grad32" if weight.dtype == torch.bfloat16 else "grad"
    if getattr(weight, name, None) is None:
        whole, parts = getattr(weight, "joined", (weight, []))
        buffer = torch.zeros_like(whole, dtype=torch.float32)
        setattr(whole, name, buffer)
        for i, part in enumerate(parts):
            setattr(part, name, buffer.chunk(len(parts))[i])
    return getattr(weight, name)


class Bucket:
    """Parameters whose gradients travel together, in their dtype, as rows of one shape. Each rank
    owns a share: one of world_size equal parts of the rows, to the last of which zeros are added.
    """

    def __init__(self, params: list[Tensor], row_ndim: int, rank=0, world_size=1):
        self.params, self.rank, self.world_size = params, rank, world_size
        self.row_shape = params[0].shape[params[0].ndim - row_ndim :]
        self.counts = [p.numel() // math.prod(self.row_shape) for p in params]
        self.share_len = -(-sum(self.counts) // world_size)
        self.state: dict[str, Tensor] = {}  # what the update rule keeps of this rank's share
        self.grads = self.sent = self.work = None

    def share(self, tensors: list[Tensor], whole: bool = False) -> Tensor:
        """This rank's rows, (share_len, ...), of tensors shaped like the parameters, or of state
        whose rows have another shape; or the rows of all ranks."""
        pairs = zip(tensors, self.params, strict=True)
        rows = [t.reshape(-1, *self.row_shape) if t.shape == p.shape else t for t, p in pairs]
        rows = torch.cat(rows) if len(rows) > 1 else rows[0]
        if not whole:
            rows = rows[self.rank * self.share_len :][: self.share_len]
        missing = self.share_len * (self.world_size if whole else 1) - len(rows)
        return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows

    def weights(self) -> Tensor:
        """This rank's rows of the parameters: of one parameter its own memory, unless padded."""
        return self.share([p.detach() for p in self.params])

    def launch(self) -> None:
        """Begin to sum the gradients over all ranks. They travel in the parameters' dtype."""
        grads = [gradient_buffer(p) for p in self.params]  # on one rank, a table's is used as it is
        if self.world_size > 1:
            grads = [grad.type_as(p) for grad, p in zip(grads, self.params, strict=True)]
        self.grads = self.sent = self.share(grads, whole=True)
        if self.world_size > 1:
            self.grads = self.sent.new_empty(self.share_len, *self.row_shape)
            self.work = reduce_scatter(self.grads, self.sent, async_op=True)

    def wait(self) -> Tensor:
        """This rank's share of the summed gradients, which are in self.grads from now on."""
        if self.grads is None:
            self.launch()
        if self.work is not None:
            self.work.wait()
        self.sent = self.work = None
        return self.grads

    def gather(self, share: Tensor) -> Callable[[], list[Tensor]]:
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


class Optimizers:
    """The update rules at work on all parameters. The order of a step is that of all ranks:

    1. Gradients leave in the order of the table, each bucket as soon as it is complete and those
       before it have left: the head's before the last backward pass begins (a tied one's at its
       end), the matrices' while it runs, from the last layer to the first, the others' at its end.
    2. In the same order each rank updates its share, and sends what has changed: while gradients of
       the tables travel, it orthogonalises its matrices.
    3. At last all ranks take over what was sent.
    """

    def __init__(self, model: nn.Module, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        self.hp, self.names = hp, {p: name for name, p in model.named_parameters()}
        self.groups: list[tuple[Group, list[Bucket]]] = []
        table = parameter_table(hp, model.compile_)
        for group, params in zip(table, members(model, table).values(), strict=True):
            buckets, unfilled = [], {}
            for p in reversed(params.values()):  # as backward meets them
                shape = p.shape[p.ndim - group.row_ndim :]
                bucket = unfilled.setdefault(shape, [])
                bucket.insert(0, p)
                enough = max(group.least_rows, world_size)
                if world_size == 1 and enough > 1:  # nothing is sent: all of a shape together
                    enough = math.inf
                if sum(p.numel() for p in bucket) >= enough * shape.numel():
                    buckets.append(unfilled.pop(shape))
            buckets = [*buckets, *unfilled.values()]
            ranks = group.row_ndim, rank, world_size
            self.groups.append((group, [Bucket(bucket, *ranks) for bucket in buckets]))
        self.order = [bucket for _, buckets in self.groups for bucket in buckets]
        self.missing: dict[Bucket, int] = {}  # gradients still to come, in the last backward pass
        for p in self.names:
            gradient_buffer(p)  # also of what this model does not use
        for group, buckets in self.groups if world_size > 1 else ():
            for bucket in buckets if group.complete == "backward" else ():
                for p in bucket.params:
                    p.register_post_accumulate_grad_hook(lambda _, b=bucket: self.arrived(b))

    def begin_last_backward(self, now: "Moment") -> None:
        """From now on, gradients are complete when they arrive; some are complete already. Groups
        that do not learn at this moment keep theirs."""
        for group, buckets in self.groups:
            for bucket in buckets if group.learns(now) else ():
                self.missing[bucket] = 0 if group.complete == "forward" else len(bucket.params)
        self.launch_complete()

    def arrived(self, bucket: Bucket) -> None:
        """One of the bucket's gradients is there: complete, if this is the last backward pass."""
        if bucket in self.missing:
            self.missing[bucket] -= 1
            self.launch_complete()

    def launch_complete(self) -> None:
        """Launch what is next in order, as far as that is complete."""
        for bucket in list(self.missing):
            if self.missing[bucket]:
                break
            del self.missing[bucket]
            bucket.launch()

    def grad_norms(self, now: "Moment") -> Tensor:
        """L2 norms (groups,) of the summed gradients of each group that learns; of others, 0."""
        length = partial(torch.linalg.vector_norm, dtype=torch.float32)
        squares = torch.zeros(len(self.groups), device=self.order[0].params[0].device)
        for square, (group, buckets) in zip(squares, self.groups, strict=True):
            for bucket in buckets if group.learns(now) else ():
                square += length(bucket.wait()).square()
        all_reduce_([squares])
        return squares.sqrt()

    @torch.no_grad()
    def step(self, now: "Moment") -> list[Tensor]:
        """Update all groups that learn at a moment, and empty their gradients. Every 25 of Adam's
        steps, and to clip, the answer holds the norms (groups,) of the mean gradient."""
        for bucket in self.missing:
            bucket.launch()
        self.missing = {}
        grad_scale, norms = 1 / self.hp.batch_seqs, []
        if (now.step + 1) % (25 * self.hp.adam_every) == 0 or self.hp.grad_clip:
            norms = [self.grad_norms(now) * grad_scale]
        if self.hp.grad_clip:
            grad_scale = grad_scale * (self.hp.grad_clip / (norms[0].norm() + 1e-6)).clamp(max=1)
        if self.hp.tied_frac and not now.tied:  # the embedding goes on with the head's state
            buckets_of = {group.name: buckets for group, buckets in self.groups}
            for head, embed in zip(buckets_of["head"], buckets_of["embed"], strict=True):
                embed.state = embed.state or {k: v.clone() for k, v in head.state.items()}
        pending, learning = [], [row for row in self.groups if row[0].learns(now)]
        for group, buckets in learning:
            for shape in dict.fromkeys(bucket.row_shape for bucket in buckets):
                same = [bucket for bucket in buckets if bucket.row_shape == shape]
                torch._foreach_mul_([bucket.wait() for bucket in same], grad_scale)
                shares, take = group.rule(same, group.lr * now.lr, now)
                for bucket, share in zip(same, shares, strict=True):
                    pending.append((bucket, bucket.gather(share), take))
                    bucket.grads = None
        for bucket, sent, take in pending:
            take(bucket.params, sent())
        params = [p for _, buckets in learning for bucket in buckets for p in bucket.params]
        torch._foreach_zero_([gradient_buffer(p) for p in params])
        return norms

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """All ranks' state by parameter name, on rank 0's CPU; others only help."""
        saved = {name: {} for name in self.names.values()}
        for bucket in self.order:
            for key, value in bucket.state.items():
                values = bucket.gather(value)() if value.ndim else [value] * len(bucket.params)
                for p, v in zip(bucket.params, values, strict=True) if bucket.rank == 0 else ():
                    saved[self.names[p]][key] = v.to("cpu", copy=True)
        return saved

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:
        """Take over such a state of any number of ranks; of {}, begin anew."""
        for bucket in self.order:
            rows = [saved.get(self.names[p], {}) for p in bucket.params]
            bucket.state.clear()
            for key, value in rows[0].items():
                share = bucket.share([row[key] for row in rows]) if value.ndim else value
                bucket.state[key] = share.to(bucket.params[0].device, copy=True)


# -----------------------------------------------------------------------------
# Model: masks, attention, layers, and a head whose loss never stores the logits


def first_visible(input_seq: Tensor, window: Tensor, rule: str) -> Tensor:
    """The attention mask as one integer a token: position i sees j when first[i] <= j <= i.

    A mask is causal, within a document (END_OF_TEXT begins it) and within a window, so what a token
    sees is one run that ends at itself. A window is in tokens; by the rule "blocks" its whole
    blocks count, the token's own first and always; by the rule "distance", too, but they lie before
    the token. Tokens (T,) and windows () or (W,) to (T,) or (W, T) int32, never decreasing.
    """
    position = torch.arange(len(input_seq), device=input_seq.device, dtype=torch.int32)
    document = torch.where(input_seq == END_OF_TEXT, position, 0).cummax(0).values
    window = window[..., None].clamp(max=len(input_seq) + BLOCK).int()  # more is no different
    if rule == "blocks":
        in_window = (position // BLOCK + 1 - (window // BLOCK).clamp(min=1)) * BLOCK
    elif rule == "distance":
        in_window = position - (window // BLOCK).clamp(min=1) * BLOCK
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
    """The same (T, T), or its last rows, 0 or -inf, for scaled_dot_product_attention."""
    position = torch.arange(len(first), device=first.device)
    hidden = (position > position[-rows:, None]) | (position < first[-rows:, None])
    return torch.zeros(hidden.shape, device=first.device).masked_fill_(hidden, -math.inf)


# PyTorch's own choice on an H100. On other cards its choice is 4 warps, with which the backward
# kernel spills registers; with 8 it does not (BENCHMARKS.md). No such card has timed it yet.
FLEX_OPTIONS = {"bwd_num_warps": 8}


def offset_keys(k: Tensor) -> Tensor:
    """Keys (1, H, T, D) whose channels that half RoPE does not turn are those of the token before,
    in whatever document that is (2025-12-14_PartialKeyOffset)."""
    before, half = torch.cat([k[:, :, :1], k[:, :, :-1]], dim=2), k.size(-1) // 2
    still = torch.arange(k.size(-1), device=k.device) % half >= half // 2
    return torch.where(still, before, k)


def attend(q: Tensor, k: Tensor, v: Tensor, mask, scale: float, key_offset=False) -> Tensor:
    """Attention of (1, H, T, D) under a flex_mask (CUDA, compiled) or a dense_mask (a CPU, where
    FlexAttention has no backward pass); they agree."""
    k = offset_keys(k) if key_offset else k
    if isinstance(mask, BlockMask):
        outer = torch.compiler.is_compiling()  # else alone: uncompiled, it makes all T x T scores
        flex = flex_attention if outer else torch.compile(flex_attention, dynamic=False)
        return flex(q, k, v, block_mask=mask, scale=scale, kernel_options=FLEX_OPTIONS)
    return F.scaled_dot_product_attention(q, k, v, mask.type_as(q), scale=scale)


@torch.compiler.assume_constant_result
def memory_is_small(device: torch.device, tokens: int = 49152) -> bool:
    """Whether a GPU has less than 0.8 MB for each token of a sequence: 40 GB for the record's. Then
    memory is worth more than a few milliseconds."""
    if device.type == "cpu":
        return False
    return torch.cuda.get_device_properties(device).total_memory < 0.8e6 * tokens


def recomputed(function, x: Tensor, *more):
    """function(x, *more) of x (1, T, ...), for what costs little time and much memory: where memory
    is small, compiled code makes the result again in the backward pass instead of keeping it."""
    training = torch.is_grad_enabled() and torch.compiler.is_compiling()
    if training and memory_is_small(x.device, x.size(1)):
        return checkpoint(function, x, *more, use_reentrant=False, preserve_rng_state=False)
    return function(x, *more)


def norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis, without gain."""
    return F.rms_norm(x, (x.size(-1),), eps=eps)


def yarn(frequency: Tensor, windows: tuple[int, ...]) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): rotary frequencies, and the factor on attention's scale, after the
    long window has had these sizes. What turns less than once in the old window slows down with its
    growth; what turns more than 32 times stays as it is."""
    factor = 1.0
    for old, new in itertools.pairwise(windows):
        turns = old * frequency / (2 * math.pi)
        fast = ((turns - 1) / 31).clamp(0, 1)
        frequency = frequency * (old / new + fast * (1 - old / new))
        factor *= 1 + 0.2 * math.log(new / old)
    return frequency, factor


def rotary_table(length: int, hp: Hyperparameters, device, start=0, windows=(), pair=1) -> tuple:
    """cos and sin (T, 1, head_dim), float32, of the tokens from start on, for rotate_normed: of
    each angle (cos, cos) and (sin, -sin). With hp.yarn also a factor () on q, for long windows that
    have had these sizes. With pair=2 a token has two positions, for paired heads: (T, 2, head_dim).

    "full" RoPE (arXiv 2104.09864) has frequencies rope_base^(-2i / head_dim). Of "half", the first
    half of them falls geometrically from 1 to 1/rope_base and the rest are 0.
    """
    full = hp.rope == "full"
    turning = hp.head_dim // (2 if full else 4)
    exponent = torch.arange(turning, device=device) / (turning if full else max(turning - 1, 1))
    frequency = F.pad(hp.rope_base**-exponent, (0, hp.head_dim // 2 - turning))
    frequency, factor = yarn(frequency, windows if hp.yarn else ())
    position = torch.arange(pair * start, pair * (start + length), device=device)
    angle = position.view(length, pair, 1) * frequency
    cos, sin = angle.cos(), angle.sin()
    of_q = number(factor, angle) if hp.yarn else None
    return torch.cat([cos, cos], dim=-1), torch.cat([sin, -sin], dim=-1), of_q


def rotate_normed(x: Tensor, cos: Tensor, sin: Tensor, eps: float, factor=None) -> Tensor:
    """norm(x) with channels d and d + D/2 turned by a rotary_table's angles, as attend wants it.

    (1, T, H, D) to (1, H, T, D). The halves change places by a flip: compiled code then reads them
    in another order, where a cat would read everything twice.
    """
    normed = norm(x, eps).float()
    swapped = normed.unflatten(-1, (2, -1)).flip(-2).flatten(-2)
    turned = normed * cos + swapped * sin
    return (turned if factor is None else turned * factor).type_as(x).transpose(1, 2)


GATE_CHANNELS = 12  # of its input, of which a gate is made


def gate_of(x: Tensor, weight: Tensor) -> Tensor:
    """Between 0 and 1, (..., n), by the first channels of x (..., C) and a weight (n, 12)."""
    return torch.sigmoid(F.linear(x[..., :GATE_CHANNELS], weight.type_as(x)))


class CausalSelfAttention(nn.Module):
    """Attention with normalised, rotated q and k, and with values from elsewhere mixed into v."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.heads, width = (hp.num_heads, hp.head_dim), hp.num_heads * hp.head_dim
        self.scale, self.eps = hp.attn_scale or hp.head_dim**-0.5, hp.norm_eps
        qkv, bound = CastedLinear(hp.model_dim, 3 * width), hp.init_bound * hp.qkv_init
        self.qkv_w = nn.Parameter(qkv.weight.detach().view(3, width, -1) * bound)
        self.mixes_first = layer.values == "first"  # values of the first layer; there, its own
        self.scales_projections = hp.scaled_projections
        of_v = [0.5] if self.mixes_first else [] if hp.scaled_projections else [0.5, 0.5]
        lambdas = [0.5, 1.0, *of_v] if hp.scaled_projections else of_v
        self.lambdas = nn.Parameter(torch.tensor(lambdas))
        self.c_proj = CastedLinear(width, hp.model_dim)
        self.c_proj.weight.data *= hp.init_bound * hp.out_init
        if not hp.out_init:
            nn.init.zeros_(self.c_proj.weight)  # as bits: a product has negative zeros
        self.paired, self.key_offset = layer.paired, hp.key_offset and layer.mask == "long"
        gates_values = hp.value_gate and layer.values not in (None, "first")
        self.gates_by_values = hp.gate_by_values and not layer.paired
        zeros = partial(torch.zeros, hp.num_heads, GATE_CHANNELS)
        self.gate = nn.Parameter(zeros()) if hp.attention_gate else None
        self.value_gate = nn.Parameter(zeros()) if gates_values else None

    def forward(self, x: Tensor, value: Tensor | None, rotary, mask, attend=attend, post=None):
        """x (1, T, C), and a value of its size, which is mixed into v, to the result, times post if
        there is one, and v as it was. Factors on projections multiply weights: then nothing more is
        kept for their gradients."""
        (cos, sin, factor), scales = rotary, self.scales_projections
        qkv_w, out_w = self.qkv_w, self.c_proj.weight
        if scales:
            qkv_w, out_w = self.lambdas[0] * qkv_w, self.lambdas[1] * out_w
        if post is not None:
            out_w = post * out_w
        qkv = F.linear(x, qkv_w.flatten(0, 1).type_as(x))
        q, k, v = qkv.view(1, -1, 3, *self.heads).unbind(2)  # (1, T, H, D)
        own, table = v, None if value is None else value.view_as(v)
        if self.value_gate is not None:
            half, read = GATE_CHANNELS // 2, x
            if self.gates_by_values:
                read = torch.cat([x[..., :half], table.flatten(2)[..., :half]], dim=-1)
            table = 2 * gate_of(read, self.value_gate)[..., None] * table
        if self.mixes_first:
            share = self.lambdas[-1]
            v = (1 - share) * v + share * (v if table is None else table)
        elif scales:
            v = v if table is None else v + table
        else:
            v = self.lambdas[0] * v
            v = v if table is None else v + self.lambdas[1] * table
        if self.paired:  # half of the heads at either position; even heads turn by the first
            pairs, turn = self.heads[0] // 2, torch.arange(self.heads[0], device=x.device) % 2
            q, k, v = (t.reshape(1, -1, pairs, t.size(3)) for t in (q, k, v))
            cos, sin = (t[:, turn].view(-1, pairs, t.size(2)) for t in (cos, sin))
        q = recomputed(rotate_normed, q, cos, sin, self.eps, factor)  # (1, H, T, D)
        k = recomputed(rotate_normed, k, cos, sin, self.eps)
        out = attend(q, k, v.transpose(1, 2), mask, self.scale, self.key_offset).transpose(1, 2)
        out = out.reshape(own.shape)
        if self.gate is not None:
            out = out * gate_of(x, self.gate)[..., None]
        return F.linear(out.flatten(2), out_w.type_as(x)), own


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


@Kernel
def relu2_mlp(x: Tensor, w_in: Tensor, w_out: Tensor, narrow=False) -> Tensor:
    """relu(x @ w_in.T)^2 @ w_out.T of x (..., C), w_in (H, C) and w_out (C, H), of one dtype.

    The twin in Triton takes narrow tiles on GPUs with little shared memory.
    """
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

    def forward(self, x: Tensor, post: Tensor | None = None) -> Tensor:
        """x (..., C) to (..., C), times post if there is one."""
        w_out = self.c_proj.weight if post is None else post * self.c_proj.weight
        weights = self.c_fc.weight.type_as(x), w_out.type_as(x)
        return relu2_mlp(x, *weights, shared_memory_is_small(x.device))


class Block(nn.Module):
    """One layer: attention, then the MLP. Before, an earlier output, x0 and bigrams may be added.

    All that differs from layer to layer comes as an argument, so equal ones are compiled once.
    """

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__()
        self.attn = None if layer.window == "none" else CausalSelfAttention(hp, layer)
        self.mlp, self.eps = MLP(hp), hp.norm_eps
        # Factors on the layer's input and on x0. Or, by sublayer, on the stream beside attention
        # and MLP, and on their results: a layer without attention then adds no x0 and no bigrams.
        first, each = hp.residual_lambda, hp.sublayer_lambdas
        mixes, sublayers = self.attn is not None or not each, 1 if self.attn is None else 2
        of_input = torch.tensor([first] if hp.x0_apart else [first, 0.0])
        self.lambdas = None if each else nn.Parameter(of_input)
        self.residual_lambda = nn.Parameter(torch.full((sublayers,), first)) if each else None
        self.post_lambda = nn.Parameter(torch.ones(sublayers)) if each else None
        self.x0_lambda = nn.Parameter(torch.zeros(1)) if mixes and hp.x0_apart else None
        of_bigram = torch.tensor([hp.bigram_lambda])
        self.bigram_lambda = nn.Parameter(of_bigram) if mixes and hp.bigram_rows else None

    def kept(self, x: Tensor, sublayer: int) -> Tensor:
        """What goes on beside attention (0) or the MLP (-1)."""
        return x if self.residual_lambda is None else self.residual_lambda[sublayer] * x

    def mixed(self, x: Tensor, x0: Tensor, bigram: Tensor | None) -> Tensor:
        """x, and shares of x0 and of a bigram's embedding."""
        x = x + (self.lambdas[1] if self.x0_lambda is None else self.x0_lambda[0]) * x0
        return x if bigram is None else x + self.bigram_lambda[0] * bigram

    def forward(
        self, x, x0, value, skip, rotary, mask, give_v, attend=attend, bigram=None, source=None
    ):
        """x (1, T, C) to (1, T, C), and the v that attention made, if wanted: its gradient is made
        of zeros where nothing uses it. skip is (weight, output). Attention reads `source`, an
        earlier output after its norm, or else x."""
        v, post = None, (None, None) if self.post_lambda is None else self.post_lambda
        if skip is not None:
            x = x + skip[0] * skip[1]
        if self.lambdas is not None:
            x = self.mixed(self.lambdas[0] * x, x0, bigram)
        if self.attn is not None:
            read = recomputed(norm, x, self.eps) if source is None else source
            out, v = self.attn(read, value, rotary, mask, attend, post[0])
            x = self.kept(x, 0) + out
            if self.lambdas is None:
                x = self.mixed(x, x0, bigram)
        out = self.mlp(recomputed(norm, x, self.eps), post[-1])
        return self.kept(x, -1) + out, v if give_v else None


def lookup(table: nn.Embedding, tokens: Tensor) -> Tensor:
    """Rows (T, C) of a table; their gradient is summed in place, no dense one is made anew."""
    rows = F.embedding(tokens, table.weight.detach())

    def accumulate(grad: Tensor) -> None:
        gradient_buffer(table.weight).index_add_(0, tokens, grad.float())

    if torch.is_grad_enabled():
        rows.requires_grad_().register_hook(accumulate)
    return rows


class ValueEmbeds(nn.ModuleDict):
    """Tables (V, C) by their names whose weights are parts of one, so that one lookup reads them
    all. They are joined again whenever they move to a device or change their dtype."""

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.join()
        return self

    def join(self) -> None:
        """Make one tensor of all weights, of which each is a part from now on."""
        parts = [table.weight for table in self.values()]
        if parts:
            self.weight = torch.cat([part.detach() for part in parts])
            for part, rows in zip(parts, self.weight.chunk(len(parts)), strict=True):
                part.data = rows
                part.joined = self.weight.joined = self.weight, parts

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Of tokens (T,), the rows (T, C) of each table."""
        first = torch.arange(len(self), device=tokens.device, dtype=tokens.dtype)
        rows = lookup(self, (tokens + self.weight.size(0) // len(self) * first[:, None]).flatten())
        return dict(zip(self, rows.view(len(self), len(tokens), -1).unbind(), strict=True))


def bigram_hash(tokens: Tensor, rows: int) -> Tensor:
    """The row (T,), int32, of a table that each token (T,) and the one before it select. The first
    token selects the last row, and the second one reads that row's number in place of the first
    token. Products of int32 wrap (2026-01-19_BigramHashEmbedding)."""
    first = torch.full_like(tokens[:1], rows - 1, dtype=torch.int32)
    tokens = torch.cat([first, tokens[1:].int()])
    return torch.cat([first, (36313 * tokens[1:] ^ 27191 * tokens[:-1]) % (rows - 1)])


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


def trains_in_fp8(wanted: bool, device: torch.device) -> bool:
    """Whether a head that shall train in FP8 does: on a CPU it does not."""
    return wanted and device.type == "cuda" and fp8_supported(device)


def trains_in_bfloat16(wanted: bool, device: torch.device) -> bool:
    """Whether a head that shall train in bfloat16 on a CPU does: where the CPU multiplies such
    numbers, which takes less than half of the time. On a GPU, what is not FP8 is bfloat16."""
    fast = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return wanted and device.type == "cpu" and fast()


def next_targets(targets: Tensor, count: int) -> Tensor:
    """Of targets (T,) the next one, the one after it, ...: (T, count); -1 beyond the end."""
    return F.pad(targets, (0, count - 1), value=-1).unfold(0, count, 1).contiguous()


@Kernel
def softcapped_cross_entropy(logits, targets, softcap, shares=None, grad_scale=None, grads=None):
    """Summed loss () of logits (T, V), which may be overwritten, and targets (T,) int64.

    The logits first become z of sigmoid_form. The gradient of the logits * grad_scale goes to grads
    (T, V): the logits' own memory, or float8_e5m2. dz/dlogit is (z - z^2 / a) / c. z is at most a,
    so softmax may subtract a instead of the row's maximum.

    With shares (K,) and targets (T, K) of next_targets, the gradient is that of the losses of all K
    targets times their shares, and the loss returned is that of the next token alone.
    """
    (a, b, c), targets = softcap, targets.view(len(targets), -1)
    share = (targets >= 0) * (1.0 if shares is None else shares)  # (T, K)
    if torch.compiler.is_compiling():  # two passes over the logits; only the result is stored
        z = a * torch.sigmoid(1 / c * (logits.float() + b))
        z_of_target = a * torch.sigmoid(1 / c * (logits.gather(1, targets[:, :1]).float() + b))
        p = torch.exp(z - a)
        total = p.sum(dim=1, keepdim=True)
        loss = (total.log() + a - z_of_target).sum()
        column, p = torch.arange(p.size(1), device=p.device), p / total * share.sum(1, keepdim=True)
        for k in range(share.size(1)):
            p = p - share[:, k, None] * (column == targets[:, k, None])
    else:  # z and p are stored, and overwritten where that is possible
        z = logits.float()
        z = torch.add(z.new_full((), b / c), z, alpha=1 / c, out=z).sigmoid_().mul_(a)
        p = torch.softmax(z, dim=-1)
        loss = -p.gather(1, targets[:, :1]).log().sum()
        p = p if shares is None else p.mul_(share.sum(1, keepdim=True))
        p.scatter_add_(1, targets.clamp(min=0), -share)
    if grads is not None:
        grad = z.addcmul_(z, z, value=-1 / a).mul_(p).mul_(1 / c * grad_scale)
        grads.copy_(grad if grads.dtype != torch.float8_e5m2 else to_fp8(grad, 1.0, grads.dtype))
    return loss


def head_in_fp8(weight: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A head's weight (V, K) * scale in float8_e4m3fn: stored by rows, and by columns."""
    w = to_fp8(weight, scale, torch.float8_e4m3fn)
    return w, w.T.contiguous().T


def logits_loss(x, w, targets, softcap, shares, grad_scale, scales):
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
    options = softcap, shares, grad_scale
    loss = sum(softcapped_cross_entropy(*part[:2], *options, part[2]) for part in parts)
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


def loss_chunk(x, w, targets, softcap, grad_scale, grad_w, scales, steps=HEAD_STEPS, shares=None):
    """Summed loss () of x (C, K) under the head w (V, K), and its gradient * grad_scale of x. That
    of w is added into grad_w (V, K). Without grad_scale there are no gradients. With FP8 scales (of
    x, w and the logits' gradient) w is what head_in_fp8 makes of it. For shares see HeadLoss."""
    _, forward, backward = steps
    loss, x, grads = forward(x, w, targets, sigmoid_form(softcap), shares, grad_scale, scales)
    return loss, None if grads is None else backward(x, w, grads, grad_w, scales)


class HeadLoss(torch.autograd.Function):
    """Mean soft-capped cross-entropy of x (T, K) and targets (T,) under a head's weight (V, K).

    If x wants a gradient, the forward pass keeps it, and adds the weight's into gradient_buffer: so
    such a loss wants exactly one backward(), of itself and not of a multiple. `summed`, gradients
    are those of the sum over the sequence; with shares (K,), those of K targets for each token.
    """

    @staticmethod
    def forward(
        ctx, x, weight, targets, softcap, scales=None, steps=HEAD_STEPS, shares=None, summed=False
    ):
        w = steps[0](weight, scales[1]) if scales else weight.type_as(x)
        with_grad, size, grads = ctx.needs_input_grad[0], loss_chunk_len(x.device), (None, None)
        if with_grad:
            grads = 1.0 if summed else 1 / len(x), gradient_buffer(weight)
        if shares is not None:
            targets = next_targets(targets, len(shares))
        chunks = zip(x.split(size), targets.split(size), strict=True)
        more = *grads, scales, steps, shares
        results = [loss_chunk(part, w, t, softcap, *more) for part, t in chunks]
        if with_grad:
            ctx.save_for_backward(torch.cat([grad for _, grad in results]).type_as(x))
        return sum(loss for loss, _ in results) / len(x)

    @staticmethod
    def backward(ctx, grad):
        torch._assert_async(grad == 1, "call backward() on the loss itself; scale gradients after")
        return *ctx.saved_tensors, *[None] * 7


class Head(CastedLinear):
    """Makes logits and their loss of the trunk's output; `steps` are the compiled HEAD_STEPS."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp.model_dim, padded_vocab(hp), hp.fp8, hp.x_s, hp.w_s, hp.grad_s)
        self.weight.data.normal_(std=hp.head_init) if hp.head_init else nn.init.zeros_(self.weight)
        self.softcap, self.steps, self.summed = softcap_of(hp), HEAD_STEPS, hp.loss_sum
        self.use_bfloat16 = hp.bfloat16_head

    def loss(self, x: Tensor, targets: Tensor, shares: tuple[float, ...] = (1.0,)) -> Tensor:
        """Mean loss () of x (T, C) and targets (T,) int64; for its gradients see HeadLoss."""
        fp8 = x.requires_grad and trains_in_fp8(self.use_fp8, x.device)
        if x.requires_grad and trains_in_bfloat16(self.use_bfloat16, x.device):
            x = x.bfloat16()
        several = torch.stack([number(s, x) for s in shares]) if shares != (1.0,) else None
        options = self.scales if fp8 else None, self.steps, several, self.summed
        return HeadLoss.apply(x, self.weight, targets, self.softcap, *options)

    def logits(self, x: Tensor) -> Tensor:
        """x (T, C) to logits (T, padded vocabulary) between 0 and a, in float32, never from FP8."""
        a, b, c = self.softcap
        return a * torch.sigmoid((F.linear(x, self.weight.type_as(x)).float() + b) / c)


class GPT(nn.Module):
    """The language model: embeddings, layers linked as a U-net, the head and its loss.

    Parameters have the names of 2025-01-26, whose published checkpoints load. On a CPU all is
    float32; on CUDA embeddings, a tied head and activations are bfloat16.
    """

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.hp, self.layers = hp, layer_table(hp)
        tables = sorted({row.values for row in self.layers} - {None, "first"})
        new_table = partial(nn.Embedding, hp.vocab_size)
        self.embed, width = new_table(hp.model_dim), hp.num_heads * hp.head_dim
        value_embeds = ValueEmbeds({i: new_table(width) for i in tables})
        self.value_embeds = nn.ModuleDict({"embed": value_embeds})
        for table in value_embeds.values():
            table.weight.data *= hp.value_init
        value_embeds.join()
        zeros, backs_out = torch.zeros, any(row.backout for row in self.layers)
        bigrams = nn.Embedding.from_pretrained(zeros(hp.bigram_rows, hp.model_dim), freeze=False)
        self.bigram_embed = bigrams if hp.bigram_rows else None
        self.blocks = nn.ModuleList(Block(hp, row) for row in self.layers)
        skips = hp.num_layers // 2  # the upper layers may have a skip connection
        self.skip_weights = nn.Parameter(torch.full((skips,), -1.5 if hp.skip_gate else 1.0))
        self.skip_gates = nn.Parameter(zeros(skips, GATE_CHANNELS)) if hp.skip_gate else None
        self.smear_gate = nn.Parameter(zeros(1, GATE_CHANNELS)) if hp.smear else None
        self.smear_lambda = nn.Parameter(zeros(1)) if hp.smear else None
        self.backout_lambda = nn.Parameter(torch.tensor([0.5])) if backs_out else None
        self.lm_head = Head(hp)
        if hp.tied_frac:
            self.embed.weight.data.copy_(self.lm_head.weight.data)
        self.use_flex, self.compiled, self.compile_, self.tied = False, False, as_is, False
        self.rotary: dict[tuple, dict] = {}  # the last of rotary_of, by its arguments

    def to_device(self, device: torch.device, compiled: bool) -> "GPT":
        """Move there in the dtypes of the place; compile the functions in which time is spent.

        Layers are compiled one at a time, equal ones once. As one they would take longer, and all
        gradients would come at the end, while other ranks wait for them.
        """
        self.to(device)
        self.use_flex = device.type == "cuda"
        for table in (self.embed, self.value_embeds, self.bigram_embed, self.lm_head):
            if table is not None and (table is not self.lm_head or self.hp.tied_frac):
                table.to(activation_dtype(device))
        if compiled:
            self.compiled, self.compile_ = True, partial(torch.compile, dynamic=False)
            torch._dynamo.config.recompile_limit = 64  # kinds of layers, each in several shapes
            with contextlib.suppress(AttributeError):  # of a torch that has no such setting
                # Else layers are compiled anew at each start, because of their autograd.Functions.
                torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
            self.lm_head.steps = tuple(map(self.compile_, HEAD_STEPS))
            for block in self.blocks:
                block.compile(dynamic=False)
        return self

    def tie(self, tied: bool) -> None:
        """Let embedding and head be one table, with one gradient, or two."""
        embed, head = self.embed.weight, self.lm_head.weight
        if tied != self.tied:
            embed.data = head.data if tied else head.data.clone()
            gradient_buffer(head)
            for name in ("grad", "grad32"):  # one of them is the buffer
                setattr(embed, name, getattr(head, name, None) if tied else None)
        self.tied = tied

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The tokens' (T,) embeddings (T, C), smeared, and what else layers add: the rows of each
        value table, and of the table of bigrams, by the name "bigram"."""
        x, tables = lookup(self.embed, input_seq), self.value_embeds["embed"]
        more = tables(input_seq) if len(tables) else {}
        if self.smear_gate is not None:  # in whatever document the token before is
            share = self.smear_lambda * gate_of(x[1:], self.smear_gate)
            x = torch.cat([x[:1], x[1:] + (share * x[:-1]).type_as(x)])
        if self.bigram_embed is not None:
            rows = bigram_hash(input_seq, self.hp.bigram_rows)
            more["bigram"] = lookup(self.bigram_embed, rows)
        return x, more

    def at(self, when: "Moment | int | Tensor") -> "Moment":
        """A moment; of a long window in tokens, the moment after training, with this window."""
        if isinstance(when, Moment):
            return when
        return replace(moment(self.hp.num_iterations, self.hp), window=when, short=when // 2)

    def masks(self, input_seq: Tensor, now: "Moment", make_mask) -> dict:
        """Those that the layers of input_seq (T,) attend with, by the names of Layer.mask. Where
        heads are paired, a token has two positions: a document begins at the first of them, and
        windows count positions."""
        is_short = torch.arange(2, device=input_seq.device)  # nothing is copied from the host
        windows = now.window + (now.short - now.window) * is_short
        used, firsts = {row.mask for row in self.layers}, {}
        for paired in sorted({row.paired for row in self.layers}):
            tokens, names = input_seq, ("long", "short")
            if paired:
                second = torch.full_like(tokens, -1)
                tokens, names = torch.stack([tokens, second], dim=1), ("long+pair", "short+pair")
            first = first_visible(tokens.flatten(), windows, self.hp.window_rule)
            firsts |= zip(names, first, strict=True)
        return {name: make_mask(first) for name, first in firsts.items() if name in used}

    def rotary_of(self, length: int, now: "Moment", device, start=0) -> dict[bool, tuple]:
        """The rotary_tables of a moment, for heads that are paired or not; the last are kept."""
        windows = tuple(stage.window for stage in stages_until(now.step, self.hp))
        key = length, start, windows, device
        if key not in self.rotary:
            table = partial(rotary_table, length, self.hp, device, start, windows)
            kinds = {row.paired for row in self.layers}
            self.rotary = {key: {paired: table(pair=1 + paired) for paired in kinds}}
        return self.rotary[key]

    def hidden(self, input_seq: Tensor, when: "Moment | int | Tensor") -> Tensor:
        """Tokens (T,), whole blocks, at a moment or with a long window, to (T, C), after a norm.
        Masks and rotary angles are made here, once for all layers."""
        if not self.use_flex and len(input_seq) > 16384:
            raise UserError(f"{len(input_seq)} tokens a sequence need a GPU; try --record demo")
        now = self.at(when)
        masks = self.masks(input_seq, now, flex_mask if self.use_flex else dense_mask)
        rotary = self.rotary_of(len(input_seq), now, input_seq.device)
        return self.trunk(*self.embedded(input_seq), rotary, masks)

    def trunk(self, x: Tensor, more: dict[str, Tensor], rotary, masks, attend=attend):
        """From embeddings (T, C), and what `embedded` gives besides, to what the head reads (T, C).
        Masks come by their names, rotary tables as rotary_of gives them."""
        x0 = norm(x, self.hp.norm_eps)[None]  # (1, T, C): attention wants a batch axis
        x = x0.view(x0.shape)  # where two arguments are one tensor, a layer is compiled once more
        values, outputs, sources, weights = dict(more), {}, {}, self.skip_weights.unbind()
        bigram = more.get("bigram")
        first_skip = len(self.layers) - len(weights)  # the first layer that may have one
        mixes_first = any(row.values == "first" for row in self.layers)
        if bigram is not None and self.hp.sublayer_lambdas:  # here, as layer 0's attention reads it
            x = x + self.blocks[0].bigram_lambda[0] * bigram
        for i, (row, block) in enumerate(zip(self.layers, self.blocks, strict=True)):
            skip, source = None, sources.get(row.source)
            if row.skip_from is not None:
                weight = weights[i - first_skip]
                if self.skip_gates is not None:
                    gate = 2 * gate_of(x0, self.skip_gates[i - first_skip, None])
                    weight = torch.sigmoid(weight) * gate
                skip = weight, outputs[row.skip_from]
            give_v = mixes_first and "first" not in values
            of_row = values.get(row.values), skip, rotary[row.paired], masks.get(row.mask), give_v
            own_bigram = None if i == 0 and self.hp.sublayer_lambdas else bigram
            x, v = block(x, x0, *of_row, attend, bigram=own_bigram, source=source)
            if v is not None:
                values["first"] = v
            if any(later.skip_from == i for later in self.layers):
                outputs[i] = x.view(x.shape)
            if any(later.source == i for later in self.layers):
                sources[i] = norm(x, self.hp.norm_eps)
            if row.backout:
                backout = x
        x = x if self.backout_lambda is None else x - self.backout_lambda[0] * backout
        return norm(x, self.hp.norm_eps)[0]

    def logits(self, input_seq: Tensor, when: "Moment | int | Tensor") -> Tensor:
        """Of tokens (T,) as in `hidden`, the head's logits (T, padded vocabulary)."""
        return self.lm_head.logits(self.hidden(input_seq, when))

    def forward(self, input_seq, target_seq, when: "Moment | int | Tensor") -> Tensor:
        """Mean loss () of tokens (T,) and targets (T,) int64, of the next token alone. In training,
        its gradients are those of all targets of the moment: see HeadLoss."""
        shares = self.at(when).targets if self.training else (1.0,)
        return self.lm_head.loss(self.hidden(input_seq, when), target_seq, shares)


# -----------------------------------------------------------------------------
# Schedules: functions of the step alone, whatever machine it runs on


def stage_starts(hp: Hyperparameters) -> list[float]:
    """Where each row of the stage table begins. Stages are equal shares of the scheduled steps, in
    whole steps unless hp.exact_stages; if there is an extension, the last row is its own."""
    rows, steps = len(stage_table(hp.stages)), scheduled_steps(hp)
    shares = rows - (hp.extension_frac > 0 and rows > 1)
    starts = [steps * k / shares for k in range(rows)]
    return starts if hp.exact_stages else [round(start) for start in starts]


def stages_until(step: int, hp: Hyperparameters) -> tuple[Stage, ...]:
    """The rows of the stage table that have begun; the last one holds."""
    return stage_table(hp.stages)[: sum(step >= start for start in stage_starts(hp))]


def get_lr(step: int, hp: Hyperparameters) -> float:
    """Multiplier on every learning rate: a linear rise, that of the stage, a linear fall to
    lr_final. An exact stage's holds from the first step after its start."""
    rise = min((step + 1) / hp.warmup_steps, 1.0) if hp.warmup_steps else 1.0
    left = max(1 - step / scheduled_steps(hp), 0.0)
    w = min(left / hp.cooldown_frac, 1.0) if hp.cooldown_frac else 1.0
    waits = hp.exact_stages and step in stage_starts(hp)
    stage = stages_until(max(step - waits, 0), hp)[-1]
    return rise * (w * stage.lr + (1 - w) * hp.lr_final)


def get_window_size(step: int, hp: Hyperparameters) -> int:
    """The long window in tokens: the stage's, or it grows, in window_steps rounded up ("blocks") or
    down."""
    if window := stages_until(step, hp)[-1].window:
        return window
    grown, unit = hp.window_span * step, hp.num_iterations * hp.window_step  # exact in integers
    if hp.window_rule == "tokens":
        return (hp.window_min * hp.num_iterations + grown) // unit * hp.window_step
    return max(-(-grown // unit) * hp.window_step, hp.window_min)


def get_muon_momentum(step: int, hp: Hyperparameters) -> float:
    """Muon's momentum at the step: a linear ramp, then flat, and perhaps the ramp back."""
    ramp = min(step / hp.momentum_warmup_steps, 1.0)
    if cooldown := hp.momentum_cooldown_steps:
        ramp = min(ramp, (hp.num_iterations - step) / cooldown)
    return (1 - ramp) * hp.momentum_start + ramp * hp.momentum_end


def get_targets(step: int, hp: Hyperparameters) -> tuple[float, ...]:
    """Loss weights of the next token and of those after it; the last of several falls to 0."""
    begun, starts = stages_until(step, hp), [*stage_starts(hp), hp.num_iterations]
    start, end = starts[len(begun) - 1 : len(begun) + 1]
    *first, last = begun[-1].targets
    return *first, last * (end - step) / max(end - start, 1) if first else last


def is_tied(step: int, hp: Hyperparameters) -> bool:
    """Whether head and embedding are one: for a share of the scheduled steps, and on to a step of
    Adam's; with a share of 1 always."""
    steps, every = math.ceil(scheduled_steps(hp) * hp.tied_frac), hp.adam_every
    last = math.ceil((steps + 1) / every) * every - 1
    return hp.tied_frac == 1 or (hp.tied_frac > 0 and step <= last)


@dataclass(frozen=True)
class Moment:
    """All that is scheduled, at one step."""

    step: int
    lr: float  # multiplier on every learning rate
    momentum: float  # Muon's
    window: int  # the long one, in tokens
    short: int  # the short one
    seq_len: int  # tokens in a training sequence
    longest: int  # where documents are cut, if batches are aligned to them
    targets: tuple[float, ...]  # loss weights of the next token, the one after it, ...
    tied: bool  # whether the embedding is the head


def moment(step: int, hp: Hyperparameters) -> Moment:
    """What holds at a step, from 0 to num_iterations; beyond, what holds after the last one."""
    step = min(step, hp.num_iterations)
    stage, window = stages_until(step, hp)[-1], get_window_size(step, hp)
    last = step == hp.num_iterations and hp.last_window
    return Moment(
        step,
        lr=get_lr(step, hp),
        momentum=get_muon_momentum(step, hp),
        window=last or window,
        short=window // 2,
        seq_len=hp.seq_len * stage.length,
        longest=stage.cap or hp.max_document_tokens,
        targets=get_targets(step, hp),
        tied=is_tied(step, hp),
    )


# -----------------------------------------------------------------------------
# Run: checkpoints, the timed loop, main()

# Of older checkpoints: what was so before it was a setting, and settings that are ignored (lr_lag:
# the record's exact_stages has its place).
BEFORE_SETTINGS = {"norm_eps": 2.0**-23, "momentum_damped": True}
FORMER_SETTINGS = {"comm_dtype", "verify_data", "lr_lag"}


def load_checkpoint(path: str | Path) -> dict:
    """A checkpoint on the CPU: `model`, its names without _orig_mod., and, unless it is a published
    one, what Run.save saves. UserError if the file is not a whole checkpoint."""
    try:
        state, whole = program.load_whole(path)
        state["model"] = {k.removeprefix("_orig_mod."): v for k, v in state["model"].items()}
        if "hyperparameters" in state:
            if not whole:
                raise ValueError("its checksum is missing")
            settings = BEFORE_SETTINGS | state["hyperparameters"]
            settings = {k: v for k, v in settings.items() if k not in FORMER_SETTINGS}
            state["hyperparameters"] = hp = replace(RECORDS[state["record"]], **settings)
            check(hp)
        return state
    except (OSError, MemoryError):
        raise
    except Exception as error:  # torch's own advice is to load it unsafely
        reason = error if isinstance(error, (ValueError, TypeError)) else type(error).__name__
        raise UserError(f"{path} is not a whole checkpoint of this program ({reason})") from error


def parse_args(argv: list[str] | None) -> tuple[Hyperparameters, argparse.Namespace]:
    """The settings (flags over the record's, or over a checkpoint's own) and the flags given, with
    `record`, its name, `checkpoint`, the path, and `saved`, what the checkpoint holds. UserError
    for an unknown flag or a bad value."""
    about = f"{__doc__.splitlines()[0]} In brackets: values of 2025-01-26_BatchSize."
    args = program.command_line(about, RECORDS, Hyperparameters).parse_args(argv)
    args.checkpoint, args.saved = program.where_to_start(args, load_checkpoint)
    on_cpu = getattr(args, "device", "auto") == "cpu" or not torch.cuda.is_available()
    remembered = "record" not in args and args.saved.get("hyperparameters")
    if remembered:
        args.record = args.saved["record"]
    elif "record" not in args:
        args.record = "demo" if on_cpu else "2025-01-26_BatchSize"
    hp = replace(remembered or RECORDS[args.record], run_id=args.saved.get("run_id", ""))
    if "layers" in args and "num_layers" not in args:
        args.num_layers = args.layers.count(",") + 1
    hp = replace(hp, **program.given(hp, args))
    check(hp)
    if "resume" in args and args.saved:
        if not (saved := vars(args.saved.get("hyperparameters", argparse.Namespace()))):
            raise UserError(f"--resume {args.checkpoint}: it holds weights only, for --eval")
        changed = [n for n in LEARNING_FIELDS if vars(hp)[n] != saved[n]]
        if changed and "resume_force" not in args:
            text = ", ".join(f"{n} {show(saved[n])} -> {show(vars(hp)[n])}" for n in changed)
            raise UserError(f"the checkpoint is of other hyperparameters: {text}; --resume_force?")
    return hp, args


def choose_kernels(hp: Hyperparameters, device: torch.device, compile_=as_is, log=print) -> None:
    """Use each kernel that works on all ranks, or what --kernels says, and log their names;
    UserError for --kernels on where Triton cannot run."""
    reason = "--kernels off" if hp.kernels == "off" else obstacle(device)
    if hp.kernels == "on" and reason:
        raise UserError(f"--kernels on: {reason}")
    for kernel in KERNELS.values():
        kernel.use = not reason and kernel.fused is not None
    if hp.kernels == "auto":
        example = hp, device, activation_dtype(device), trains_in_fp8(hp.fp8, device)
        faults = [reason or fault(kernel.plain, compile_, *example) for kernel in KERNELS.values()]
        votes = torch.tensor([float(bool(text)) for text in faults], device=device)
        all_reduce_([votes])
        for name, text, against in zip(KERNELS, faults, votes.tolist(), strict=True):
            KERNELS[name].use = not against
            if against and not reason:
                log(f"kernel {name} is off: {text or 'another rank cannot use it'}")
    log(f"kernels: {' '.join(kernels_in_use()) or 'none'}{reason and f', {reason}'}")


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
    compiled = hp.compile == "on" or (hp.compile == "auto" and device.type == "cuda")
    return model.to_device(device, compiled)


@torch.no_grad()
def evaluate(model: GPT, batches: list[Tensor], when, device: torch.device) -> float:
    """Mean loss of all ranks' validation sequences, at a moment or with a long window; this rank's
    are (n, T) on its device, and n may be 0."""
    model.eval()
    total = torch.zeros(2, device=device)  # losses, sequences
    for inputs, targets in zip(*batches, strict=True):
        loss = model(inputs, targets, when)
        total += torch.stack([loss, torch.ones_like(loss)])
    all_reduce_([total])
    model.train()
    return (total[0] / total[1]).item()


def train_step(model: GPT, optimizers, inputs: Tensor, targets: Tensor, step: int, stop=0):
    """One step on this rank's (n, T) micro-batches.

    Returns, of all ranks, the mean loss of the global batch, the sum of `stop`, and the norms of
    the groups' gradients if the optimizers made them: (2,) or (2 + groups,). Gradients are summed,
    and divided only then: each micro-batch's FP8 gradient keeps its scale.
    """
    loss, now = torch.zeros((), device=inputs.device), moment(step, model.hp)
    model.tie(now.tied)
    for i, (input_seq, target_seq) in enumerate(zip(inputs, targets, strict=True), 1):
        micro_loss = model(input_seq, target_seq, now)
        if i == len(inputs):
            optimizers.begin_last_backward(now)
        micro_loss.backward()
        loss += micro_loss.detach()
        del micro_loss  # with what its graph holds, before the next one is made
    norms = optimizers.step(now)
    result = torch.stack([loss / model.hp.batch_seqs, torch.full_like(loss, stop)])
    all_reduce_([result])
    return torch.cat([result, *norms])


def warm_up(model: GPT, optimizers: Optimizers, device: torch.device, log=print) -> None:
    """Choose kernels, then run the shapes and windows of the run on made-up tokens.

    The weights end as they began. Uncompiled, the longest will do. Compilation leaves cycles of
    Python objects, which hold gigabytes of a GPU's memory: they are collected, and one more round
    then takes the memory that the run will need.
    """
    hp, initial = model.hp, {k: v.to("cpu", copy=True) for k, v in model.state_dict().items()}
    choose_kernels(hp, device, model.compile_, log)
    kinds = {}  # the last of the moments that look alike, of the run and after it
    for step in range(hp.num_iterations + 1):
        now = moment(step, hp)
        kinds[now.window, now.seq_len, len(now.targets), now.tied] = now
    longest = max(reversed(kinds.values()), key=lambda now: now.seq_len)  # the last one of these
    size = max(longest.seq_len, hp.val_seq_len)
    tokens = torch.arange(1, size + 1, device=device) % hp.vocab_size
    val = tokens[None, : hp.val_seq_len]

    def once(now: Moment) -> None:
        evaluate(model, [val.int(), val], now, device)  # first: its blocks of memory are larger
        x, every = tokens[None, : now.seq_len], hp.adam_every
        first = min(now.step, hp.num_iterations - 1) // every * every
        for step in range(first, first + every):  # until no gradient waits for a step of Adam's
            train_step(model, optimizers, x.int(), x, step)

    for now in kinds.values() if model.compiled else [longest]:
        once(now)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        once(longest)
    model.load_state_dict(initial)
    optimizers.load_state_dict({})


class Run:
    """A run: where it starts, its loop, and what it writes."""

    def __init__(self, hp: Hyperparameters, args: argparse.Namespace, store: dist.Store | None):
        """Find the device, read the validation data, make the model."""
        self.hp, self.record = hp, args.record
        self.device = device = program.start_device(hp.device, store, hp.comm_timeout)
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if store else (0, 1)
        # Validation is one global batch, of which a rank may get nothing.
        stream = hp.val_files, hp.val_seq_len, hp.val_tokens // hp.val_seq_len, 0, 1
        batch = next(distributed_data_generator(*stream, num_batches=1, vocab_size=hp.vocab_size))
        self.val_batch = [t[self.rank :: self.world_size].to(device) for t in batch]
        self.model = build(hp, device, args.saved.get("model"))

    def begin(self, saved: dict, going_on: bool) -> None:
        """Start the log, warm up, and take over what a checkpoint saved, if there is one."""
        hp, device, on_gpu = self.hp, self.device, self.device.type == "cuda"
        self.first_step, self.seconds = saved.get("step", 0), saved.get("seconds", 0.0)
        ranks = self.rank, self.world_size
        longest = (lambda step: moment(step, hp).longest) if hp.align_to_documents else None
        stream = hp.train_files, (lambda step: moment(step, hp).seq_len), hp.batch_seqs, *ranks
        more = self.first_step, hp.num_iterations, hp.epochs, hp.vocab_size, longest, device
        self.batches = distributed_data_generator(*stream, *more)
        self.optimizers = Optimizers(self.model, hp, *ranks)
        self.log = log = program.Logger(hp, device, self.rank, self.first_step, going_on)
        self.folder = Path("logs", log.run_id)
        for unfinished in self.folder.glob("*.tmp") if self.rank == 0 else ():
            unfinished.unlink()  # of a run that was killed while it saved
        place, own = torch.cuda.get_device_name() if on_gpu else "CPU", vars(RECORDS[self.record])
        flags = "".join(f" --{name} {show(v)}" for name, v in vars(hp).items() if v != own[name])
        log(f"record {self.record}{flags}\non {self.world_size} x {place}, log in {log.path}")
        if self.record == "demo" and hp.device == "auto" and not on_gpu:
            log("no GPU found: this is a small demonstration, on the sample corpus in data/")
        if hp.fp8 and not trains_in_fp8(hp.fp8, device):
            bfloat16 = on_gpu or trains_in_bfloat16(hp.bfloat16_head, device)
            log(f"no FP8 here: the head trains in {'bfloat16' if bfloat16 else 'float32'}")
        total = torch.tensor([float(self.first_step)], device=device)
        all_reduce_([total])
        if total.item() != self.first_step * self.world_size:
            raise UserError("ranks found different checkpoints: logs/ must be one folder for all")
        start = clock(device)
        warm_up(self.model, self.optimizers, device, log)
        log(f"compilation and warm-up, not part of train_time: {clock(device) - start:.1f} s")
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        if saved:
            changed = "" if program.source() == saved["code"] else "; the source has changed since"
            if (former := saved.get("kernels", kernels_in_use())) != kernels_in_use():
                changed += f"; its kernels were: {' '.join(former) or 'none'}"
            log(f"resumed at step {self.first_step}{changed}")
            self.optimizers.load_state_dict(saved["optimizers"])
            torch.set_rng_state(saved["random"])
            saved.clear()  # as large as the model and more
        path = log.path.with_suffix(".jsonl") if self.rank == 0 else log.path
        norms = [f"grad_norm_{group.name}" for group in parameter_table(hp)]
        tokens = hp.batch_seqs * sum(moment(step, hp).seq_len for step in range(self.first_step))
        self.metrics = program.Metrics(path, norms, self.first_step, tokens)

    def loop(self) -> None:
        """Train to the last step, or until a signal comes. The clock stands still meanwhile where
        the run validates or saves."""
        hp, metrics, stop = self.hp, self.metrics, 0.0
        # Batches arrive in one place: nothing is allocated for them in a step.
        most = hp.seq_len * max(stage.length for stage in stage_table(hp.stages))
        size, dtypes = hp.batch_seqs // self.world_size * most, (torch.int32, torch.int64)
        places = [torch.empty(size, dtype=dtype, device=self.device) for dtype in dtypes]
        gc.freeze()  # what is there by now stays: no collection need walk through it
        with program.stop_signals(alone=self.world_size == 1) as signals:
            start = clock(self.device)
            for step in range(self.first_step, hp.num_iterations + 1):
                last, new = step == hp.num_iterations, step > self.first_step
                validate = last or (hp.val_loss_every and step % hp.val_loss_every == 0)
                validate = validate and (new or step == 0)  # else it was done before
                stop = stop and not last
                leave = stop and step % hp.adam_every == 0  # else gradients wait for the next step
                save = hp.save_every and (last or step % hp.save_every == 0)
                save = new and (leave or save)
                if validate or save:
                    self.check_loss(metrics.fetch(start)[0], step)
                    self.seconds += clock(self.device) - start
                    metrics.write(**self.validate(step) if validate else {})
                    path = save and self.save(step)
                    if leave:
                        self.leave(step, signals)
                    start = clock(self.device)
                if last:
                    break
                now, batch = moment(step, hp), []
                for place, arrived in zip(places, next(self.batches), strict=True):
                    batch.append(place[: arrived.numel()].view_as(arrived))
                    batch[-1].copy_(arrived, non_blocking=True)
                result = train_step(self.model, self.optimizers, *batch, step, stop=bool(signals))
                loss, stop = metrics.fetch(start)  # of the step before: no waiting
                self.check_loss(loss, step)
                metrics.write()
                row = vars(now) | {"step": step + 1}
                metrics.begin(row, hp.batch_seqs * now.seq_len, result)
                ms = 1e3 * (self.seconds + time.perf_counter() - start)
                rate = metrics.tokens / ms
                progress = f"loss {loss:.3f}, {ms / (step + 1):.0f} ms/step, {rate:.1f}k tokens/s"
                self.log.step(self.line(step + 1, ms), progress)
        self.log.bar.close()
        allocated, reserved = (size >> 20 for size in program.peak_memory(self.device))
        self.log(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
        if save:
            command = "./run.sh" if Path.cwd() == HERE else f"{HERE}/run.sh"
            print("read what it writes:", shlex.join([command, "tools/sample.py", str(path)]))

    def line(self, step: int, ms: float, loss: str = "") -> str:
        """A line as the community's scripts parse it."""
        times = f"train_time:{ms:.0f}ms step_avg:{ms / max(step, 1):.2f}ms"
        return f"step:{step}/{self.hp.num_iterations} {loss}{times}"

    def check_loss(self, loss: float, step: int) -> None:  # equal on all ranks: all stop together
        if not math.isfinite(loss):
            kept = next(iter(program.checkpoints(self.folder)), "none")
            remedy = f"try lower learning rates, or --fp8 off; the last checkpoint is {kept}"
            raise UserError(f"the loss is {loss} at step {step}: {remedy}")

    def validate(self, step: int) -> dict:
        """Log the validation loss; what the metrics' row shall have of it."""
        loss = evaluate(self.model, self.val_batch, moment(step, self.hp), self.device)
        self.log(self.line(step, 1e3 * self.seconds, f"val_loss:{loss:.4f} "))
        self.check_loss(loss, step)
        reached = step, loss, self.seconds, self.world_size * (self.device.type == "cuda")
        if note := program.against_published(RECORDS, self.record, self.hp, *reached):
            self.log.bar.write(note)
        return {"step": step, "val_loss": loss}

    def save(self, step: int) -> Path:
        """Save all that it takes to go on after the step."""
        if not all(p.isfinite().all() for p in self.model.parameters()):
            self.check_loss(math.nan, step)
        names = program.names_of(Hyperparameters, "learning", "run")
        settings = {name: getattr(self.hp, name) for name in names}
        state = {"record": self.record, "hyperparameters": settings, "run_id": self.log.run_id}
        state |= {"step": step, "seconds": self.seconds, "random": torch.get_rng_state()}
        state |= {"code": program.source(), "kernels": kernels_in_use()}
        state |= {"model": self.model.state_dict(), "optimizers": self.optimizers.state_dict()}
        path = self.folder / f"state_step{step:06}.pt"
        if self.rank == 0:
            program.save_whole(path, state)
            for old in program.checkpoints(self.folder)[self.hp.keep :]:
                old.unlink()
        return path

    def leave(self, step: int, signals: list[int]) -> None:
        """End the process as the signal would have, after rank 0 has saved."""
        program.wait_for_all_ranks(self.device)
        number = signal.Signals(signals[0] if signals else signal.SIGTERM)
        self.log(f"stopped by {number.name} and saved; --resume auto goes on after step {step}")
        sys.exit(128 + number)


def train(hp: Hyperparameters, args: argparse.Namespace, store: dist.Store | None) -> None:
    """A run, from finding the device to the last line of the log; with --eval, one validation."""
    step = args.saved.get("step", hp.num_iterations if args.saved else 0)
    if "resume" in args and step >= hp.num_iterations:
        print(f"the run had finished: step {step} of {hp.num_iterations} is saved")
        return
    run = Run(hp, args, store)
    if "eval" in args:
        choose_kernels(hp, run.device, run.model.compile_)
        loss = evaluate(run.model, run.val_batch, moment(step, hp), run.device)
        print(f"val_loss:{loss:.4f} over {hp.val_tokens} tokens, {args.checkpoint}")
        return
    run.begin(args.saved, going_on="resume" in args)
    run.loop()


def work(parsed: tuple[Hyperparameters, argparse.Namespace], store: dist.Store | None) -> None:
    """Print records or train, as parse_args found."""
    hp, args = parsed
    if "list_records" in args or "diff" in args:
        names = getattr(args, "diff", list(RECORDS))
        program.print_records(RECORDS, names, differing="diff" in args)
    else:
        train(hp, args, store)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    program.as_program("train_gpt.py", lambda: parse_args(argv), work)


if __name__ == "__main__":
    main()
