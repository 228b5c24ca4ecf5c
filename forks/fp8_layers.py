"""Attention's projections and MLPs of forks/train_gpt_2026_08.py in FP8, on GPUs that have it. The
scales come from records 89 and 92 of github.com/KellerJordan/modded-nanogpt, for gradients of a
sequence's summed loss."""

import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt as t


def narrowed(x: Tensor, largest: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return x in float8_e4m3fn, of which `largest` is the largest number, and the factor () back
    to x. Larger ones are clamped."""
    factor = torch.as_tensor(largest, dtype=torch.float32, device=x.device) / 448
    return t.to_fp8(x.float(), 1 / factor, torch.float8_e4m3fn), factor


def product(a: Tensor, b: Tensor, factors: tuple[Tensor, Tensor], fast: bool) -> Tensor:
    """Return a @ b in bfloat16, of float8 a (M, K) and b (K, N), times both factors ()."""
    a, b = a.contiguous(), b.T.contiguous().T  # cuBLAS wants a row-major, b column-major
    return torch._scaled_mm(a, b, *factors, out_dtype=torch.bfloat16, use_fast_accum=fast)


class FP8Projection(torch.autograd.Function):
    """x @ w.T in bfloat16 of x (T, C) and w (N, C). The matmuls read in float8_e4m3fn: x up to 8, w
    up to its largest number, and the output's gradient up to 1."""

    @staticmethod
    def forward(ctx, x, w):
        x8, x_back = narrowed(x, 8.0)
        w8, w_back = narrowed(w, w.abs().max().float().clamp(min=1e-12))
        ctx.save_for_backward(x8, x_back, w8, w_back)
        return product(x8, w8.T, (x_back, w_back), fast=True)

    @staticmethod
    def backward(ctx, grad):
        x8, x_back, w8, w_back = ctx.saved_tensors
        grad8, grad_back = narrowed(grad, 1.0)
        grad_x = product(grad8, w8, (grad_back, w_back), fast=False)
        return grad_x, product(grad8.T, x8, (grad_back, x_back), fast=False)


def fp8_mlp(x: Tensor, w_in: Tensor, w_out: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return relu2_mlp of x (..., C), w_in (H, C) and w_out (C, H), and the largest square (). The
    kernel makes all six matmuls in FP8, for which it divides the squares by scale (). The formula
    is in x's own dtype."""
    if "fp8_mlp" in t.IN_USE:
        return t.gpu_kernels.AllFP8MLP.apply(x, w_in, w_out, scale)
    post = t.recomputed(t.relu_squared, F.linear(x, w_in))
    return F.linear(post, w_out), post.detach().max().float()


def fp8_relu2_mlp(x, w_in, w_out, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return relu2_mlp of x (..., C), w_in (H, C) and w_out (C, H), and the largest square (). The
    kernel makes the forward matmuls in FP8, for which it divides the squares by scale (); without a
    scale, only the first one. The formula is in x's own dtype."""
    if "fp8_relu2_mlp" in t.IN_USE:
        return t.gpu_kernels.FusedFP8MLP.apply(x, w_in, w_out, scale)
    post = t.recomputed(t.relu_squared, F.linear(x, w_in))
    return F.linear(post, w_out), post.detach().max().float()
