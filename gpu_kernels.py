"""Triton kernels, forward and backward, for train_gpt.py and its forks, and the choice among them.

The scripts run without this file. Each kernel here is the twin of a plain function or method, which
is marked @has_twin there and says what is computed. A run uses a twin if the twin builds and agrees
with the plain function (choose_kernels). Kernels take floats as constants, because torch.compile
would pass them as float64.
"""

import functools
import hashlib
import inspect
import itertools
import sys
import types
from dataclasses import replace
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

IN_USE = {}  # by name: the twins that are called in place of plain functions


def has_twin(plain):
    """Decorate a plain function or method: its twin, the function of its name in TWINS, is called
    in its place where choose_kernels allows it."""
    name = plain.__name__

    @functools.wraps(plain)
    def call(*args):
        return IN_USE.get(name, plain)(*args)

    return call


def obstacle(device: torch.device) -> str:
    """Return why Triton cannot run on a device, or "" if it can."""
    if device.type == "cuda":
        old = torch.cuda.get_device_capability(device) < (8, 0)
        return "Triton wants a GPU with bfloat16, from Ampere on" if old else ""
    if triton.knobs.runtime.interpret:
        return ""
    return "Triton wants a CUDA GPU (or, to try the kernels, TRITON_INTERPRET=1)"


@torch.compiler.assume_constant_result
def shared_memory_is_small(device: torch.device) -> bool:
    """Say whether a program has only 99 KB of shared memory (RTX 3090, 4090, 5090, A6000): an A100
    has 163, an H100 227."""
    if device.type == "cpu":
        return False
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin < 160_000


def fp8_supported(device: torch.device) -> bool:
    """Say whether a device has fast FP8 matmuls: GPUs do, from Ada on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


# -----------------------------------------------------------------------------
# The head's loss, with the gradient of the logits in float8


@triton.jit
def softcap_kernel(
    logits, targets, shares, losses, grads, vocab, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, WITH_GRAD: tl.constexpr,
    TARGETS: tl.constexpr, WITH_SHARES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program reads one row twice: from memory for the sum, then from the cache.

    z = A sigmoid((logit + B) / C) is at most A, so softmax subtracts A, not the maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    targets += row * TARGETS
    total = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, vocab, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        logit = tl.load(logits + column, column < vocab, 0.0).to(tl.float32)
        term = tl.exp(A * (tl.sigmoid((logit + B) * (1 / C)) - 1))
        total += tl.where(column < vocab, term, 0.0)
    total = tl.sum(total)
    of_target = tl.sigmoid((tl.load(logits + tl.load(targets)).to(tl.float32) + B) * (1 / C))
    tl.store(losses + row, tl.log(total) - A * (of_target - 1))
    if WITH_GRAD:
        weight = 1.0
        if WITH_SHARES:  # the softmax is weighted by the sum of the shares of the row's targets
            weight = 0.0
            for k in tl.static_range(TARGETS):
                weight += tl.where(tl.load(targets + k) >= 0, tl.load(shares + k), 0.0)
        for start in range(0, vocab, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            logit = tl.load(logits + column, column < vocab, 0.0).to(tl.float32)
            s = tl.sigmoid((logit + B) * (1 / C))
            p = tl.exp(A * (s - 1)) * (weight / total)
            for k in tl.static_range(TARGETS):
                share = tl.load(shares + k) if WITH_SHARES else 1.0
                p -= tl.where(column == tl.load(targets + k), share, 0.0)
            grad = tl.clamp(A / C * SCALE * p * s * (1 - s), -LARGEST, LARGEST)
            tl.store(grads + row * vocab + column, grad.to(grads.dtype.element_ty), column < vocab)


def softcap_losses(logits, targets, shares, form, grad_scale, dtype):
    """Return the summed loss () of the next token, for logits (T, V) capped by the sigmoid form
    (a, b, c) and targets (T,) or (T, K). With a dtype, also return in it the gradient (T, V) of all
    targets' losses times their shares (K,), times grad_scale."""
    losses = torch.empty(len(logits), device=logits.device)
    a, b, c = form
    with_grad = dtype is not None
    grads = torch.empty_like(logits, dtype=dtype) if with_grad else logits  # any tensor will do
    softcap_kernel[(len(logits),)](
        logits, targets.contiguous(), losses if shares is None else shares, losses, grads,
        logits.size(1), A=a, B=b, C=c, SCALE=grad_scale, LARGEST=torch.finfo(grads.dtype).max,
        WITH_GRAD=with_grad, TARGETS=targets.numel() // len(targets),
        WITH_SHARES=shares is not None, COLUMNS=8192, num_warps=16,
    )  # fmt: skip
    return losses.sum(), grads if with_grad else None


def to_fp8(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return x * scale in float8, clamped: a plain cast to float8_e5m2 overflows to inf."""
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


def scaled_matmul(a: Tensor, b: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b of a (M, K) and b (K, N), times factor () float32. If they are float8, it is in
    dtype, else in theirs."""
    if a.dtype.itemsize > 1:
        return a @ b * factor
    fast = a.dtype == b.dtype  # in forward passes, where both are float8_e4m3fn
    a, b = a.contiguous(), b.T.contiguous().T  # cuBLAS wants a row-major, b column-major
    return torch._scaled_mm(a, b, factor, torch.ones_like(factor), None, None, dtype, fast)


class FusedLoss(torch.autograd.Function):
    """Compute chunk_loss. The forward pass also makes the logits' gradient, for FP8 in float8. FP8
    wants that transposed, too, which is left to the backward pass: where torch.compile makes both
    at once, it writes each byte of the transpose far from the one before."""

    @staticmethod
    def forward(ctx, x, w, targets, shares, form, scale, fp8_scales):
        grad_dtype, ctx.fp8_scales = x.dtype, fp8_scales
        if fp8_scales is None:
            w = w.type_as(x)
            logits, grad_s = x @ w.T, 1.0
        else:
            x_s, w_s, grad_s = fp8_scales
            x, w = to_fp8(x, x_s, torch.float8_e4m3fn), to_fp8(w, w_s, torch.float8_e4m3fn)
            factor = torch.full((), 1 / (x_s * w_s), device=x.device)
            logits = scaled_matmul(x, w.T, factor, torch.bfloat16)
            grad_dtype = torch.float8_e5m2
        if not ctx.needs_input_grad[0]:
            grad_dtype = None
        loss, grads = softcap_losses(logits, targets, shares, form, scale * grad_s, grad_dtype)
        ctx.save_for_backward(x, w, grads)
        return loss * scale

    @staticmethod
    def backward(ctx, grad):
        x, w, grads = ctx.saved_tensors
        x_s, w_s, grad_s = ctx.fp8_scales or (1.0, 1.0, 1.0)
        grad_x = scaled_matmul(grads, w, grad / (grad_s * w_s), torch.bfloat16)
        grad_w = scaled_matmul(grads.T, x, grad / (grad_s * x_s), torch.float32)
        return grad_x, grad_w, None, None, None, None, None  # autograd casts to the inputs' dtypes


def fused_chunk_loss(head, x, targets, scale, shares=None):
    """Compute chunk_loss of a head of train_gpt.py, or of forks/train_gpt_2026.py with its form.

    cap * tanh(logit / cap) is the sigmoid form (2 cap, 0, cap / 2) minus the constant cap.
    """
    form = getattr(head, "form", (2 * head.softcap, 0.0, head.softcap / 2))
    in_fp8 = head.use_fp8 and head.training and fp8_supported(x.device)
    fp8_scales = (head.x_s, head.w_s, head.grad_s) if in_fp8 else None
    return FusedLoss.apply(x, head.weight, targets, shares, form, scale, fp8_scales)


def loss_example(model, hp, device, dtype):
    """Return example arguments of fused_chunk_loss: a head like the model's, rows of the trunk's
    output, and targets, as many a row as hp ever has."""
    rows, count = 1024, getattr(hp, "most_targets", 1)
    weight_dtype = torch.promote_types(dtype, model.lm_head.weight.dtype)
    head = type(model.lm_head)(hp).to(device, weight_dtype)
    head.weight.data.normal_(std=4 * hp.model_dim**-0.5)
    x = torch.randn(rows, hp.model_dim, device=device, dtype=dtype, requires_grad=True)
    scale = head.grad_scale(hp.seq_len)
    targets = torch.randint(hp.vocab_size, (rows, count), device=device)
    targets[-1, 1:] = -1
    if count == 1:
        return head, x, targets[:, 0], scale
    return head, x, targets, scale, torch.linspace(1, 0.25, count, device=device)


# -----------------------------------------------------------------------------
# The MLP, with ReLU squared inside its matmuls


@triton.jit
def relu2_kernel(
    a, b, post, out, M, N, K, stride_k, stride_n, BACKWARD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile. Eight rows of tiles run together, to share the cache."""
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
    """Return relu(a @ b)^2 of a (M, K) and b (K, N).

    With post, which is such a square, return (a @ b) times the square's derivative instead. Tiles
    are narrow where a program has little shared memory.
    """
    (M, K), N, backward = a.shape, b.size(1), post is not None
    block_m, block_n = 128, 128 if shared_memory_is_small(a.device) else 256
    tiles, out = -(-M // block_m) * -(-N // block_n), a.new_empty(M, N)
    inputs = a, b, post if backward else out, out, M, N, K, *b.stride(), backward
    block_k = 128 // a.element_size()  # in bytes, for the shared memory
    relu2_kernel[(tiles,)](*inputs, block_m, block_n, block_k, num_warps=8, num_stages=3)
    return out


class FusedMLP(torch.autograd.Function):
    """Compute relu2_mlp. For the backward pass it keeps only the squares: the derivative is twice
    their roots."""

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


def fused_mlp(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """Compute relu2_mlp, with ReLU squared inside two of the six matmuls."""
    return FusedMLP.apply(x, w_in, w_out)


def mlp_example(model, hp, device, dtype):
    """Return example arguments of fused_mlp: rows of activations, and a layer's weights."""
    C, H, rows = hp.model_dim, 4 * hp.model_dim, min(hp.seq_len, 4096)
    shapes = (rows, C), (H, C), (C, H)
    tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    return tuple(t.mul_(C**-0.5).requires_grad_() for t in tensors)


# -----------------------------------------------------------------------------
# Symmetric products of matrices, for Muon


@triton.jit
def symmetric_kernel(
    a, c, out, n, K, ALPHA: tl.constexpr, BETA: tl.constexpr,
    WITH_C: tl.constexpr, TILE: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile on or below the diagonal, and stores it and its transpose."""
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
    """Compute symmetric_matmul from half of the tiles. c must be contiguous."""
    a = a.contiguous()
    count, n, K = a.shape
    out, tiles, tile_k = a.new_empty(count, n, n), -(-n // 128), 128 // a.element_size()
    inputs = a, out if c is None else c, out, n, K, alpha, beta, c is not None
    symmetric_kernel[(tiles, tiles, count)](*inputs, 128, tile_k, num_warps=8, num_stages=3)
    return out


def symmetric_example(model, hp, device, dtype):
    """Return example arguments of fused_symmetric: square matrices, and their products."""
    a = torch.randn(4, hp.model_dim, hp.model_dim, device=device).to(dtype) * hp.model_dim**-0.5
    return a, a @ a.mT, 2.0315, -4.7750


# -----------------------------------------------------------------------------
# The twins, and the choice among them

# By the plain function's name: the twin, an example of arguments, and digests of the plain
# functions for which the twin was written. A fork may edit these by less than the comparison in
# `fault` can detect; its twin is then not used.
TWINS = {
    "chunk_loss": (fused_chunk_loss, loss_example, ("8eb9ac313145", "708cfc0dbb50")),
    "relu2_mlp": (fused_mlp, mlp_example, ("ddbad9ebf2b5",)),
    "symmetric_matmul": (fused_symmetric, symmetric_example, ("f18e34256c4e",)),
}


def plain_function(model, name: str):
    """Return what a model calls by the name of a twin: a method of its head, or a function of the
    file that has it, the model's own or one that this imports."""
    if hasattr(model.lm_head, name):
        return getattr(model.lm_head, name)
    modules = [vars(sys.modules[cls.__module__]) for cls in type(model).__mro__]
    return next(module[name] for module in modules if name in module)


def functions_of(value) -> list:
    """Return the function that a value is, or those that a class has, but none of torch's."""
    values = vars(value).values() if inspect.isclass(value) else [value]
    functions = [inspect.unwrap(getattr(v, "__func__", v)) for v in values]
    functions = [f for f in functions if isinstance(f, types.FunctionType)]
    folder = Path(torch.__file__).parent
    return [f for f in functions if folder not in Path(f.__code__.co_filename).parents]


def digest(plain) -> str:
    """Return a digest of the source of a function or bound method, and of the functions, classes
    and methods that it calls by name, ignoring white space."""
    owner, found = getattr(plain, "__self__", None), functions_of(plain)
    owners = [] if owner is None else [owner, *type(owner).__mro__]  # all, because of super()
    for function in found:  # found grows in the loop
        names = [*function.__code__.co_names, "forward"]  # which calling a module calls
        known = function.__globals__
        modules = [known[n] for n in names if isinstance(known.get(n), types.ModuleType)]
        scopes = [known, *(vars(scope) for scope in (*modules, *owners))]
        for scope, name in itertools.product(scopes, names):
            found += [f for f in functions_of(scope.get(name)) if f not in found]
    words = " ".join(inspect.getsource(function) for function in found).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]


def was_edited(name: str, model) -> bool:
    """Say whether what a model calls by the name of a twin is not what that was written for."""
    return digest(plain_function(model, name)) not in TWINS[name][2]


def outcome(function, arguments) -> list[Tensor]:
    """Return the result of a call, and the gradients of the arguments that require them, or of
    their weight."""
    leaves = [a.weight if isinstance(a, nn.Module) else a for a in arguments]
    leaves = [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]
    result = function(*arguments)
    # Equal gradients would hide a permutation of the rows.
    seed = result.detach() if result.ndim else torch.ones_like(result)
    grads = torch.autograd.grad(result, leaves, seed) if leaves else ()
    return [t.detach().float() for t in (result, *grads)]


def fault(name: str, model, hp, device: torch.device) -> str:
    """Return why a twin cannot replace the plain function that a model calls, or "" if it can.

    Both are compiled as the run compiles them, and compared on examples of the run's widths: in
    float32, which shows small errors, and on a GPU also as the run computes.
    """
    twin, example, _ = TWINS[name]
    on_gpu = device.type == "cuda"
    cases = [(replace(hp, fp8=False), torch.float32, 1e-4)]
    if on_gpu:
        cases.append((hp, torch.bfloat16, 0.02))
    try:
        if was_edited(name, model):
            return "the plain function was edited: change its twin and its digest in gpu_kernels.py"
        both = inspect.unwrap(plain_function(model, name)), twin
        if on_gpu and hp.compile != "off":
            both = [torch.compile(function, dynamic=False) for function in both]
        for settings, dtype, limit in cases:
            arguments = example(model, settings, device, dtype)
            plains, twins = [outcome(function, arguments) for function in both]
            deviations = [(b - a).norm() / a.norm() for a, b in zip(plains, twins, strict=True)]
            deviation = torch.stack(deviations).max().item()  # NaN, if one is
            if not deviation < limit:
                return f"in {dtype} it deviates from the plain function by {deviation:.1e}"
    except Exception as error:  # any error of a compiler or a driver
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


def choose_kernels(model, hp, device: torch.device, all_reduce_, log=print) -> None:
    """Use the twins of model.kernels that have no `fault` on any rank, because all ranks must
    compute the same. Log what is used, and why others are not."""
    IN_USE.clear()
    reason = obstacle(device) if hp.kernels else "--kernels off"
    faults = [reason or fault(name, model, hp, device) for name in model.kernels]
    votes = torch.tensor([float(bool(text)) for text in faults], device=device)
    all_reduce_(votes)
    for name, text, against in zip(model.kernels, faults, votes.tolist(), strict=True):
        if not against:
            IN_USE[name] = TWINS[name][0]
        elif not reason:
            log(f"kernel {name} is off: {text or 'another rank cannot use it'}")
    if device.type == "cuda" or IN_USE:  # nobody expects kernels on a CPU
        log(f"kernels: {' '.join(IN_USE) or 'none'}" + (f", {reason}" if reason else ""))
