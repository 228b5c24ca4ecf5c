"""Triton kernels, forward and backward, for train_gpt.py and its forks, and the choice among them.

The scripts run without this file. Each kernel here is the twin of a plain function, which is marked
@has_twin there and says what is computed. A run uses a twin if the twin builds and agrees with the
plain function (choose_kernels). Kernels take floats as constants, because torch.compile would pass
them as float64.
"""

import functools
import hashlib
import inspect
import itertools
import types
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

PLAIN = {}  # by name: the functions marked @has_twin
IN_USE = {}  # by name: the twins that are called in their place


def has_twin(plain):
    """Decorate a plain function: its twin, the function of its name in TWINS, is called in its
    place where choose_kernels allows it."""
    name = plain.__name__
    PLAIN[name] = plain

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


# -----------------------------------------------------------------------------
# Soft-capped cross-entropy, with the gradient of the logits


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


def fused_losses(logits, targets, sigmoid_form, shares=None, grad_scale=None, dtype=None):
    """Compute the fork's weighted_cross_entropy in one kernel."""
    losses = torch.empty(len(logits), device=logits.device)
    a, b, c = sigmoid_form
    with_grad = grad_scale is not None
    # A kernel takes a tensor even if it does not write it.
    grads = torch.empty_like(logits, dtype=dtype) if with_grad else logits
    softcap_kernel[(len(logits),)](
        logits,
        targets,
        losses if shares is None else shares,
        losses,
        grads,
        logits.size(1),
        A=a,
        B=b,
        C=c,
        SCALE=grad_scale if with_grad else 0.0,
        LARGEST=torch.finfo(grads.dtype).max,
        WITH_GRAD=with_grad,
        TARGETS=targets.numel() // len(targets),
        WITH_SHARES=shares is not None,
        COLUMNS=8192,
        num_warps=16,
    )
    return losses.sum(), grads if with_grad else None


def fused_loss(logits, targets, softcap, grad_scale=None, dtype=None):
    """Compute softcapped_cross_entropy in one kernel.

    cap * tanh(logit / cap) is the sigmoid form (2 cap, 0, cap / 2) minus the constant cap.
    """
    sigmoid_form = 2 * softcap, 0.0, softcap / 2
    return fused_losses(logits, targets, sigmoid_form, None, grad_scale, dtype)


def loss_example(hp, device, dtype, fp8):
    """Return example arguments of fused_loss."""
    logits = 4 * torch.randn(1024, hp.padded_vocab, device=device, dtype=dtype)
    targets = torch.randint(hp.vocab_size, (1024,), device=device)
    grad_scale = (hp.grad_s if fp8 else 1.0) / hp.seq_len
    return logits, targets, hp.logit_softcap, grad_scale, torch.float8_e5m2 if fp8 else dtype


def losses_example(hp, device, dtype, fp8):
    """Return example arguments of fused_losses, with the most targets a row that hp ever has."""
    logits, _, _, grad_scale, dtype = loss_example(hp, device, dtype, fp8)
    count = hp.most_targets
    targets = torch.randint(hp.vocab_size, (1024, count), device=device)
    targets[-1, 1:] = -1
    shares = torch.linspace(1, 0.25, count, device=device) if count > 1 else None
    if hp.loss_sum:
        grad_scale = grad_scale * hp.seq_len
    return logits, targets, hp.sigmoid_form, shares, grad_scale, dtype


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
    relu2_kernel[(tiles,)](*inputs, block_m, block_n, BLOCK_K=64, num_warps=8, num_stages=3)
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


def mlp_example(hp, device, dtype, fp8):
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
    out, tiles, block = a.new_empty(count, n, n), -(-n // 128), {"TILE": 128, "TILE_K": 64}
    inputs = a, out if c is None else c, out, n, K, alpha, beta, c is not None
    symmetric_kernel[(tiles, tiles, count)](*inputs, **block, num_warps=8, num_stages=3)
    return out


def symmetric_example(hp, device, dtype, fp8):
    """Return example arguments of fused_symmetric: square matrices, and their products."""
    a = torch.randn(4, hp.model_dim, hp.model_dim, device=device).to(dtype) * hp.model_dim**-0.5
    return a, a @ a.mT, 2.0315, -4.7750


# -----------------------------------------------------------------------------
# The twins, and the choice among them

# By the plain function's name: the twin, an example of arguments, and a digest of the plain
# function for which the twin was written. A fork may edit that by less than the comparison in
# `fault` can detect; its twin is then not used.
TWINS = {
    "softcapped_cross_entropy": (fused_loss, loss_example, "1ef1da5ee077"),
    "weighted_cross_entropy": (fused_losses, losses_example, "3f9592bcbd15"),
    "relu2_mlp": (fused_mlp, mlp_example, "ddbad9ebf2b5"),
    "symmetric_matmul": (fused_symmetric, symmetric_example, "f18e34256c4e"),
}


def digest(plain) -> str:
    """Return a digest of the source of a function, and of the project's functions that it calls,
    ignoring white space."""
    found = [inspect.unwrap(plain)]
    files = __file__, found[0].__code__.co_filename
    folders = [Path(file).resolve().parent for file in files]
    for function in found:  # found grows in the loop
        names, scopes = function.__code__.co_names, [function.__globals__]
        modules = [scopes[0].get(name) for name in names]
        scopes += [vars(module) for module in modules if isinstance(module, types.ModuleType)]
        for scope, name in itertools.product(scopes, names):
            called = inspect.unwrap(scope.get(name))
            if not isinstance(called, types.FunctionType) or called in found:
                continue
            if Path(called.__code__.co_filename).resolve().parent in folders:
                found.append(called)
    words = " ".join(inspect.getsource(function) for function in found).split()
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]


def outcome(function, arguments) -> list[Tensor]:
    """Return the results of a call, and the gradients of the arguments that require them."""
    given = [
        a.detach().clone().requires_grad_(a.requires_grad) if torch.is_tensor(a) else a
        for a in arguments
    ]
    found = function(*given)
    found = list(found) if isinstance(found, tuple) else [found]
    leaves = [a for a in given if torch.is_tensor(a) and a.requires_grad]
    if leaves:
        found[0].backward(found[0].detach())  # equal gradients would hide a permutation of the rows
    return [t.detach().float() for t in found + [leaf.grad for leaf in leaves]]


def fault(name: str, hp, device: torch.device) -> str:
    """Return why a twin cannot replace its plain function here, or "" if it can.

    Both are compiled as the run compiles them, and compared on an example of the run's widths, in
    the dtype of activations. With FP8, the loss's gradient is in float8.
    """
    on_gpu = device.type == "cuda"
    fp8 = hp.fp8 and on_gpu and torch.cuda.get_device_capability(device) >= (8, 9)
    plain = PLAIN[name]
    twin, example, written_for = TWINS[name]
    if digest(plain) != written_for:
        return "the plain function was edited: change its twin and its digest in gpu_kernels.py"
    try:
        arguments = example(hp, device, torch.bfloat16 if on_gpu else torch.float32, fp8)
        both = plain, twin
        if on_gpu and hp.compile != "off":
            both = [torch.compile(function, dynamic=False) for function in both]
        plains, twins = [outcome(function, arguments) for function in both]
        deviations = [(b - a).norm() / a.norm() for a, b in zip(plains, twins, strict=True)]
        deviation = torch.stack(deviations).max().item()  # NaN, if one is
    except Exception as error:  # any error of a compiler or a driver
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return "" if deviation < 0.02 else f"it deviates from the plain function by {deviation:.1e}"


def choose_kernels(model, hp, device: torch.device, all_reduce_, log=print) -> None:
    """Use the twins of model.kernels that have no `fault` on any rank, because all ranks must
    compute the same. Log what is used, and why others are not."""
    IN_USE.clear()
    reason = obstacle(device) if hp.kernels else "--kernels off"
    faults = [reason or fault(name, hp, device) for name in model.kernels]
    votes = torch.tensor([float(bool(text)) for text in faults], device=device)
    all_reduce_(votes)
    for name, text, against in zip(model.kernels, faults, votes.tolist(), strict=True):
        if not against:
            IN_USE[name] = TWINS[name][0]
        elif not reason:
            log(f"kernel {name} is off: {text or 'another rank cannot use it'}")
    if device.type == "cuda" or IN_USE:  # nobody expects kernels on a CPU
        log(f"kernels: {' '.join(IN_USE) or 'none'}" + (f", {reason}" if reason else ""))
