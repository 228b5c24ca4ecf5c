"""Triton kernels, forward and backward, for train_gpt.py and its forks, and the choice among them.

The scripts run without this file. A function there computes a formula, or calls a kernel of this
file if its name is in IN_USE. choose_kernels puts it there if the formula is not edited, and if the
kernel builds, agrees with the formula and is not slower. Kernels take floats as constants, because
torch.compile would pass them as float64.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import math
import sys
import textwrap
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

IN_USE = set()  # names of the functions that call a kernel in place of their formula
TIMES = {}  # by name: milliseconds of the formula and of the kernel, on this rank
LOG2_E = math.log2(math.e)


def card(device: torch.device) -> tuple[int, int]:
    """Return a GPU's multiprocessors, and the kilobytes of shared memory that a program may have:
    99 (RTX 3090, 4090, 5090, A6000), 163 (A100) or 227 (H100, B200, which copy whole tiles there,
    by TMA). A CPU, on which Triton only interprets, is taken for an A100."""
    if device.type == "cpu":
        return 108, 163
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin >> 10


# -----------------------------------------------------------------------------
# The head's loss, with the gradient of the logits in float8


@triton.jit
def softcap_grad_kernel(
    logits, targets, shares, sums, grads, grads_t, rows, vocab, A: tl.constexpr, B: tl.constexpr,
    C: tl.constexpr, SCALE: tl.constexpr, LARGEST: tl.constexpr, TARGETS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile, and stores it in grads, and its transpose in grads_t if there
    is one. Only the tile's corner is in int64, so that all numbers fit registers."""
    top, left = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS
    i, j = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None]
    inside = (top + i < rows) & (left + j < vocab)
    place = top.to(tl.int64) * vocab + left + (i * vocab + j)
    weight = tl.zeros([ROWS, 1], tl.float32)  # the sum of the shares of a row's targets
    wanted = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in tl.static_range(TARGETS):
        target = tl.load(targets + (top + i) * TARGETS + k, top + i < rows, -1).to(tl.int32)
        share = SCALE * (1.0 if shares is None else tl.load(shares + k))
        weight += tl.where(target >= 0, share, 0.0)
        wanted += tl.where(left + j == target, share, 0.0)
    weight /= tl.load(sums + top + i, top + i < rows, 1.0)
    logit = tl.load(logits + place, inside, 0.0).to(tl.float32)
    # Powers of two and reciprocal roots take one instruction, powers of e and quotients several.
    root = tl.rsqrt(1.0 + tl.exp2(logit * B + C))
    s = root * root  # the sigmoid
    grad = (tl.exp2(A * s - A) * weight - wanted) * (s - s * s)
    grad = tl.clamp(grad, -LARGEST, LARGEST).to(grads.dtype.element_ty)
    tl.store(grads + place, grad, inside)
    if grads_t is not None:
        # Read back, because Triton 3.6 would otherwise compute all again, in this store's order.
        tl.debug_barrier()
        grad = tl.load(grads + place, inside, 0.0, volatile=True)
        tl.store(grads_t + left.to(tl.int64) * rows + top + (j * rows + i), grad, inside)


def softcap_losses(logits, targets, shares, form, grad_scale, dtype):
    """Return the summed loss () of the next token, for logits (T, V) and targets (T,) or (T, K).
    With a dtype, also return in it the gradient (T, V) of all targets' losses times their shares
    (K,), times grad_scale; and its transpose: a copy in float8, else a view. The form (a, b, c)
    caps logits: a sigmoid((logit + b) / c) is at most a, so softmax subtracts a, no maximum."""
    (T, V), (a, b, c), targets = logits.shape, form, targets.reshape(len(targets), -1).contiguous()
    # In powers of two, the sigmoid is 1 / (1 + 2^(B logit + C)), and e^(a s - a) is 2^(A s - A).
    A, B, C = a * LOG2_E, -LOG2_E / c, -LOG2_E * b / c
    sigmoid = torch.rsqrt(1 + torch.exp2(logits.float() * B + C)).square()  # as in the kernel
    sums = torch.exp2(A * sigmoid - A).sum(1)
    of_target = torch.sigmoid((logits.gather(1, targets[:, :1]).float().flatten() + b) / c)
    loss = (sums.log() - a * (of_target - 1)).sum()
    if dtype is None:
        return loss, None, None
    grads = torch.empty_like(logits, dtype=dtype)
    grads_t = grads.new_empty(V, T) if dtype.itemsize == 1 else None
    softcap_grad_kernel[(-(-V // 128), -(-T // 64))](
        logits, targets, shares, sums, grads, grads_t, T, V, A, B, C, a / c * grad_scale,
        torch.finfo(dtype).max, targets.size(1), 64, 128, num_warps=8,
    )  # fmt: skip
    return loss, grads, grads.T if grads_t is None else grads_t


def scaled_matmul(a: Tensor, b: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a @ b of a (M, K) and b (K, N), times factor (): of float8 in dtype, else theirs."""
    if a.dtype.itemsize > 1:
        return a @ b * factor
    fast = a.dtype == b.dtype  # in forward passes, where both are float8_e4m3fn
    a, b = a.contiguous(), b.T.contiguous().T  # cuBLAS wants a row-major, b column-major
    return torch._scaled_mm(a, b, factor, torch.ones_like(factor), None, None, dtype, fast)


class FusedLoss(torch.autograd.Function):
    """Compute chunk_loss. The forward pass also makes the logits' gradient, for FP8 in float8."""

    @staticmethod
    def forward(ctx, x, w, targets, shares, form, scale, fp8_scales):
        x_s, w_s, grad_s = ctx.scales = fp8_scales or (1.0, 1.0, 1.0)
        if fp8_scales is None:
            w, grad_dtype = w.type_as(x), x.dtype
            logits = x @ w.T
        else:
            e4m3, grad_dtype = torch.float8_e4m3fn, torch.float8_e5m2  # e4m3 ends at 448
            x, w = (x * x_s).clamp(-448, 448).to(e4m3), (w * w_s).clamp(-448, 448).to(e4m3)
            factor = torch.full((), 1 / (x_s * w_s), device=x.device)
            logits = scaled_matmul(x, w.T, factor, torch.bfloat16)
        if not ctx.needs_input_grad[0]:
            grad_dtype = None
        loss, *grads = softcap_losses(logits, targets, shares, form, scale * grad_s, grad_dtype)
        ctx.save_for_backward(x, w, *grads)
        return loss * scale

    @staticmethod
    def backward(ctx, grad):
        x, w, grads, grads_t = ctx.saved_tensors
        x_s, w_s, grad_s = ctx.scales
        grad_x = scaled_matmul(grads, w, grad / (grad_s * w_s), torch.bfloat16)
        grad_w = scaled_matmul(grads_t, x, grad / (grad_s * x_s), torch.float32)
        return grad_x, grad_w, None, None, None, None, None  # autograd casts to the inputs' dtypes


def has_fp8(device: torch.device) -> bool:
    """Say whether a device has FP8 matmuls, as an NVIDIA GPU from Ada on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def fused_chunk_loss(head, x, targets, scale, shares=None, weight=None):
    """Compute chunk_loss of a head of train_gpt.py, or of the forks of 2026 with its form. cap *
    tanh(logit / cap) is the sigmoid form (2 cap, 0, cap / 2) minus the constant cap."""
    weight = head.weight if weight is None else weight
    form = getattr(head, "form", (2 * head.softcap, 0.0, head.softcap / 2))
    fp8_scales = head.fp8_scales if head.use_fp8 and head.training and has_fp8(x.device) else None
    return FusedLoss.apply(x, weight, targets, shares, form, scale, fp8_scales)


# -----------------------------------------------------------------------------
# The MLP, with ReLU squared inside its matmuls


@triton.jit
def relu2_kernel(
    a, b, post, out, factor, narrow, scale, largest, M, N, K, stride_k, stride_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program computes one tile. Eight rows of tiles run together, to share the cache. If they
    are given, products are multiplied by factor (), results / scale () are stored in `narrow` in
    float8, and `largest` () grows to the largest result. Without `out`, only these are stored."""
    rows, columns = tl.num_programs(1), tl.num_programs(0)
    row, column = tl.swizzle2d(tl.program_id(1), tl.program_id(0), rows, columns, 8)
    m = (row * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
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
    if factor is not None:
        total *= tl.load(factor)
    if post is None:
        total = tl.maximum(total, 0.0)
        total *= total
    else:
        total *= 2 * tl.sqrt(tl.load(post + place, inside, 0.0).to(tl.float32))
    if out is not None:
        tl.store(out + place, total.to(out.dtype.element_ty), inside)
    if narrow is not None:
        small = tl.minimum(total / tl.load(scale), 448.0)
        tl.store(narrow + place, small.to(narrow.dtype.element_ty), inside)
    if largest is not None:
        tl.atomic_max(largest, tl.max(total))


@triton.jit
def relu2_forward_kernel(a, b, out, M, N, K, BLOCK_K: tl.constexpr):
    """Compute relu(a @ b.T)^2 of descriptors, which load zeros beyond the end, and store nothing
    there. Each program computes many tiles of 128 x 256. While it stores one, it loads the next; it
    stores halves, because the shared memory has no place for more in float32."""
    columns = tl.cdiv(N, 256)
    tiles = tl.cdiv(M, 128) * columns
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        row, column = tile // columns * 128, tile % columns * 256
        total = tl.zeros([128, 256], tl.float32)
        for k in range(0, K, BLOCK_K):
            total = tl.dot(a.load([row, k]), b.load([column, k]).T, total, input_precision="ieee")
        total = tl.maximum(total, 0.0)
        left, right = (total * total).reshape(128, 2, 128).permute(0, 2, 1).split()
        out.store([row, column], left.to(out.dtype))
        out.store([row, column + 128], right.to(out.dtype))


@triton.jit
def relu2_backward_kernel(a, b, post, out, M, N, K, BLOCK_K: tl.constexpr):
    """Compute (a @ b) * 2 sqrt(post), as relu2_kernel, by tiles of 128 x 128; a, b and out are
    descriptors. post is loaded first: it arrives during the loop."""
    rows, columns = tl.num_programs(1), tl.num_programs(0)
    row, column = tl.swizzle2d(tl.program_id(1), tl.program_id(0), rows, columns, 8)
    row, column = row * 128, column * 128
    m, n = row + tl.arange(0, 128)[:, None], column + tl.arange(0, 128)[None]
    square = tl.load(post + m.to(tl.int64) * N + n, (m < M) & (n < N), 0.0)
    total = tl.zeros([128, 128], tl.float32)
    for k in range(0, K, BLOCK_K):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total, input_precision="ieee")
    total *= 2 * tl.sqrt(square.to(tl.float32))
    out.store([row, column], total.to(out.dtype))


def matmul_relu2(
    a: Tensor, b: Tensor, post=None, dtype=None, factor=None, narrow=None, scale=None, largest=None
) -> Tensor | None:
    """Return relu(a @ b)^2 of a (M, K) and b (K, N) in dtype, or in that of a; or with post, which
    is such a square, (a @ b) times the square's derivative. relu2_kernel explains the others; with
    `narrow` and no dtype, nothing is returned. With TMA, sizes of tiles and numbers of warps are
    those that an H200 is fastest with."""
    (M, K), N = a.shape, b.size(1)
    processors, kilobytes = card(a.device)
    out = None if narrow is not None and dtype is None else a.new_empty(M, N, dtype=dtype)
    block_k = 128 // a.element_size()  # in bytes, for the shared memory
    tma = kilobytes > 200 and factor is None
    block_n = 128 if tma or kilobytes < 160 else 256
    grid = -(-N // block_n), -(-M // 128)
    if not tma:
        inputs = a, b, post, out, factor, narrow, scale, largest, M, N, K, *b.stride()
        relu2_kernel[grid](*inputs, 128, block_n, block_k, num_warps=8, num_stages=3)
        return out
    described = TensorDescriptor.from_tensor
    of_a, of_out = described(a, [128, block_k]), described(out, [128, 128])
    sizes = M, N, K, block_k
    if post is None:
        of_b = described(b.T, [256, block_k])
        relu2_forward_kernel[processors,](of_a, of_b, of_out, *sizes, num_warps=8, num_stages=3)
    else:
        of_b = described(b, [block_k, 128])
        relu2_backward_kernel[grid](of_a, of_b, post, of_out, *sizes, num_warps=4, num_stages=3)
    return out


class FusedMLP(torch.autograd.Function):
    """Compute relu2_mlp, with ReLU squared inside two of the six matmuls. For the backward pass,
    which FusedFP8MLP inherits, it keeps only the squares: the derivative is twice their roots."""

    @staticmethod
    def forward(ctx, x, w_in, w_out):
        rows = x.flatten(0, -2).contiguous()
        post = matmul_relu2(rows, w_in.T)
        ctx.save_for_backward(rows, w_in, w_out, post)
        return (post @ w_out.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad, *_):
        rows, w_in, w_out, post = ctx.saved_tensors
        grad_rows = grad.flatten(0, -2).contiguous()
        grad_pre = matmul_relu2(grad_rows, w_out, post)
        grads = (grad_pre @ w_in).view(grad.shape), grad_pre.T @ rows, grad_rows.T @ post
        return *grads, None  # for FusedFP8MLP's scale; without one, torch ignores it


def as_float8(x: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return x / factor in float8, clamped."""
    largest = torch.finfo(dtype).max
    return (x.float() / factor).clamp(-largest, largest).to(dtype)


def largest_as_448(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x in float8_e4m3fn, whose largest number is 448, and the factor () back to x."""
    factor = x.abs().max().float().clamp(min=1e-12) / 448
    return as_float8(x, factor, torch.float8_e4m3fn), factor


class FusedFP8MLP(FusedMLP):
    """Compute fp8_relu2_mlp of forks/fp8_layers.py, with FusedMLP's backward pass."""

    @staticmethod
    def forward(ctx, x, w_in, w_out, scale):
        rows = x.flatten(0, -2).contiguous()
        (x8, x_back), (w8, w_back) = largest_as_448(rows), largest_as_448(w_in)
        largest = torch.zeros((), device=x.device)
        narrow = None if scale is None else x8.new_empty(len(rows), len(w_in))
        post = matmul_relu2(x8, w8.T, None, x.dtype, x_back * w_back, narrow, scale, largest)
        if scale is None:
            out = post @ w_out.T
        else:
            w8, w_back = largest_as_448(w_out)
            out = torch._scaled_mm(narrow, w8.T, scale, w_back, None, None, x.dtype, True)
        ctx.save_for_backward(rows, w_in, w_out, post)
        ctx.mark_non_differentiable(largest)
        return out.view(x.shape), largest


class AllFP8MLP(torch.autograd.Function):
    """Compute fp8_mlp of forks/fp8_layers.py: all six matmuls in float8, of inputs / 2^-4, weights
    by their largest number, squares / scale (), gradients of the output / 2^-6, and gradients
    before the square by their largest number. The backward pass has the squares in float8 alone."""

    @staticmethod
    def forward(ctx, x, w_in, w_out, scale):
        x8 = as_float8(x.flatten(0, -2), 2.0**-4, torch.float8_e4m3fn)
        (in8, in_back), (out8, out_back) = largest_as_448(w_in), largest_as_448(w_out)
        largest, post8 = torch.zeros((), device=x.device), x8.new_empty(len(x8), len(w_in))
        matmul_relu2(x8, in8.T, None, None, in_back * 2.0**-4, post8, scale, largest)
        out = scaled_matmul(post8, out8.T, scale * out_back, x.dtype)
        ctx.save_for_backward(x8, in8, in_back, out8, out_back, post8, scale)
        ctx.mark_non_differentiable(largest)
        return out.view(x.shape), largest

    @staticmethod
    def backward(ctx, grad, _):
        x8, in8, in_back, out8, out_back, post8, scale = ctx.saved_tensors
        e5m2, dtype = torch.float8_e5m2, grad.dtype
        grad8 = as_float8(grad.flatten(0, -2), 2.0**-6, e5m2)
        factor = scale.sqrt() * out_back * 2.0**-6
        pre = matmul_relu2(grad8, out8, post8, dtype, factor)
        pre_back = pre.abs().max().float().clamp(min=1e-12) / torch.finfo(e5m2).max
        pre8 = as_float8(pre, pre_back, e5m2)
        grad_x = scaled_matmul(pre8, in8, pre_back * in_back, dtype).view(grad.shape)
        grad_in = scaled_matmul(pre8.T, x8, pre_back * 2.0**-4, dtype)
        grad_out = scaled_matmul(grad8.T, post8, scale * 2.0**-6, dtype)
        return grad_x, grad_in, grad_out, None


# -----------------------------------------------------------------------------
# The choice of kernels

# By a function's name: digests of the formulas that its kernel computes. An edit may change a
# formula by less than `fault` detects: the kernel is then not used.
WRITTEN_FOR = {
    "chunk_loss": ("7581495fe147", "a82b631b1953"),
    "fp8_mlp": ("51daf5709561",),
    "fp8_relu2_mlp": ("03b166ce6ca3",),
    "relu2_mlp": ("2b97618fcd17",),
}


def functions(model, name: str) -> list:
    """Return the functions that go by a name in a model's head and its classes, and in the files of
    the classes of both, with the methods of a class, but none of torch's. The first is called."""
    head, classes = model.lm_head, [*type(model).__mro__, *type(model.lm_head).__mro__]
    files = [sys.modules[cls.__module__] for cls in classes]
    values = [vars(scope).get(name) for scope in (head, *type(head).__mro__, *files)]
    values += [v for value in values if inspect.isclass(value) for v in vars(value).values()]
    found = [f for f in map(inspect.unwrap, values) if inspect.isfunction(f)]
    return [f for f in dict.fromkeys(found) if f.__module__.split(".")[0] != "torch"]


def digest(model, name: str) -> str:
    """Return a digest of the code of the functions that go by a name in a model, and by the names
    in their code, and so on. Calling a head calls its forward. Comments, docstrings and white space
    do not count."""
    names, code = [name, "forward"] if hasattr(model.lm_head, name) else [name], []
    for known in names:  # names grow in the loop
        for function in functions(model, known):
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
                    node.body = node.body[1:]
            code.append(ast.unparse(tree))
            names += [n for n in function.__code__.co_names if n not in names]
    return hashlib.sha256("\n".join(code).encode()).hexdigest()[:12]


def example(name: str, model, hp, device, dtype, rows: int) -> tuple:
    """Return example arguments of a function, for so many tokens, or for a chunk of them."""
    drawn = functools.partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
    C, V, count = hp.model_dim, hp.vocab_size, getattr(hp, "most_targets", 1)
    width = getattr(hp, "mlp_width", 4 * C)
    if name == "relu2_mlp":
        return drawn(rows, C), drawn(width, C), drawn(C, width)
    if name == "fp8_relu2_mlp":
        scale = torch.full((), C / 10, device=device) if hp.fp8_mlp == "both" else None
        return *example("relu2_mlp", model, hp, device, dtype, rows), scale
    if name == "fp8_mlp":  # weights as in a model, for which its constant scales are made
        x, w_in, w_out = example("relu2_mlp", model, hp, device, dtype, rows)
        with torch.no_grad():
            w_in *= C**-0.5
            w_out *= width**-0.5
        return x, w_in, w_out, torch.full((), 0.1, device=device)
    head = type(model.lm_head)(hp)
    head.to(device, torch.promote_types(dtype, model.lm_head.weight.dtype))
    head.weight.data.normal_(std=4 * C**-0.5)
    rows = min(rows, head.chunk_len(device))
    targets = torch.randint(V, (rows, count), device=device)
    targets[-1, 1:] = -1
    scale = head.grad_scale or 1 / hp.seq_len
    shares = [torch.linspace(1, 0.25, count, device=device)] if count > 1 else []
    return head, drawn(rows, C), targets.squeeze(1), scale, *shares


def outcome(function, arguments, in_use: set[str]) -> list[Tensor]:
    """Return the results of a call, and the gradients of its arguments, or of their weight, with
    these kernels in use."""
    IN_USE.clear()
    IN_USE.update(in_use)
    leaves = [a.weight if isinstance(a, nn.Module) else a for a in arguments]
    leaves = [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.requires_grad]
    results = function(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    made = [r for r in results if r.requires_grad]
    # Equal gradients would hide a permutation of the rows.
    seeds = [r.detach() if r.ndim else torch.ones_like(r) for r in made]
    grads = torch.autograd.grad(made, leaves, seeds) if made else ()
    return [t.detach() for t in (*results, *grads)]


def fault(name: str, model, hp, device: torch.device) -> str:
    """Return why a model's function cannot call its kernel, or "" if it can. Formula and kernel are
    compiled as the run compiles them, and compared at the run's widths: in float32, which shows
    small errors, and on a GPU also as the run computes. There both are timed, unless memory is
    small: formulas, which keep more, might then not fit beside a run."""
    on_gpu = device.type == "cuda"
    in_fp8 = name.startswith("fp8")  # numbers with three bits, of which the formula has none
    cases = [] if in_fp8 else [(replace(hp, fp8=False), torch.float32, 1e-4)]
    if on_gpu:
        cases.append((hp, torch.bfloat16, 0.15 if in_fp8 else 0.02))
    try:
        if in_fp8 and on_gpu and not has_fp8(device):
            return "this GPU has no FP8"
        if digest(model, name) not in WRITTEN_FOR[name]:
            return "the formula was edited: change the kernel and its digest in gpu_kernels.py"
        function = functions(model, "compiled")[0](functions(model, name)[0])
        for settings, dtype, limit in cases:
            arguments = example(name, model, settings, device, dtype, 2048)
            both = [outcome(function, arguments, in_use) for in_use in (set(), {name})]
            pairs = [(a.float(), b.float()) for a, b in zip(*both, strict=True)]
            deviation = torch.stack([(b - a).norm() / a.norm() for a, b in pairs]).max().item()
            if not deviation < limit:  # it is NaN, if one is
                return f"in {dtype} it deviates from the formula by {deviation:.1e}"
        if on_gpu and not functions(model, "memory_is_small")[0](device):
            with contextlib.suppress(torch.OutOfMemoryError):
                arguments = example(name, model, hp, device, torch.bfloat16, hp.seq_len)
                call = functools.partial(outcome, function, arguments)
                calls = [functools.partial(call, in_use) for in_use in (set(), {name})]
                times = [[triton.testing.do_bench(call) for call in calls] for _ in range(3)]
                TIMES[name] = torch.tensor(times).median(0).values.tolist()
    except Exception as error:  # any error of a compiler or a driver
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


def choose_kernels(model, hp, device: torch.device, all_reduce_, log=print) -> None:
    """Use those of model.kernels that have no `fault` on any rank and are not slower in all ranks'
    times: all ranks must compute the same. Log what is used, and why others are not."""
    IN_USE.clear()
    # AMD's cards have other instructions and formats of numbers, with which nobody has tried them.
    on_nvidia = device.type == "cuda" and not torch.version.hip
    runs = on_nvidia or triton.knobs.runtime.interpret
    if not (runs and hp.kernels and model.kernels):
        if device.type == "cuda":  # nobody expects kernels on a CPU
            log("kernels: none")
        return
    TIMES.clear()
    faults = {name: fault(name, model, hp, device) for name in model.kernels}
    IN_USE.clear()
    # By how much a kernel is slower, where noise of 10 % does not decide; or infinity for a fault.
    slower = []
    for name in model.kernels:
        plain, fused = TIMES.get(name, (0.0, 0.0))
        slower.append(math.inf if faults[name] else fused - 1.1 * plain)
        if fused:
            log(f"kernel {name}: {fused:.2f} ms, plain {plain:.2f} ms")
    slower = all_reduce_(torch.tensor(slower, device=device)).tolist()
    for name, ms in zip(model.kernels, slower, strict=True):
        if ms <= 0:
            IN_USE.add(name)
        else:
            elsewhere = "another rank cannot use it" if ms == math.inf else "plain is faster"
            log(f"kernel {name} is off: {faults[name] or elsewhere}")
    log(f"kernels: {' '.join(sorted(IN_USE)) or 'none'}")
