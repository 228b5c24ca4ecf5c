"""The model of 2025-01-26 read from its specification in plain float64, sharing no code with it."""

import math

import torch
from torch import Tensor

# window (blocks of the long one; "half" of them, at least one; or no attention) and value table
ENCODER = [("long", 0), ("half", 1), ("half", 2), ("half", None), ("long", None), ("half", None)]
DECODER = [("half", None), (None, None), ("half", None), ("half", 0), ("half", 1), ("long", 2)]


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 2.0**-23).sqrt()


def visible(tokens: Tensor, blocks: int) -> Tensor:
    """Causal, same document, and within the nearest blocks of 128, the query's own included."""
    t = len(tokens)
    document = (tokens == 50256).cumsum(0)
    i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
    return (j <= i) & (document[:, None] == document[None, :]) & (i // 128 - j // 128 < blocks)


def rope(x: Tensor) -> Tensor:
    """x (T, heads, D): half of the frequencies from 1 to 1/1024, both ends included, half zero."""
    t, _, d = x.shape
    quarter = d // 4
    frequencies = [1024.0 ** (-k / (quarter - 1)) for k in range(quarter)] + [0.0] * quarter
    out = torch.empty_like(x)
    position = torch.arange(t, dtype=torch.float64)[:, None]
    for k, frequency in enumerate(frequencies):
        cos, sin = torch.cos(position * frequency), torch.sin(position * frequency)
        out[:, :, k] = x[:, :, k] * cos + x[:, :, k + d // 2] * sin
        out[:, :, k + d // 2] = -x[:, :, k] * sin + x[:, :, k + d // 2] * cos
    return out


def softcapped_loss(logits: Tensor, targets: Tensor, cap: float) -> Tensor:
    capped = cap * torch.tanh(logits / cap)
    return (torch.logsumexp(capped, 1) - capped[torch.arange(len(targets)), targets]).mean()


def loss(w: dict[str, Tensor], tokens: Tensor, targets: Tensor, blocks: int, heads: int) -> Tensor:
    """Mean loss from published parameter names and float64 weights, long window in blocks."""
    masks = {"long": visible(tokens, blocks), "half": visible(tokens, max(blocks // 2, 1))}
    x = x0 = rms_norm(w["embed.weight"][tokens])
    t = len(tokens)
    skips = []
    for i, (window, table) in enumerate(ENCODER + DECODER):
        if i >= 6:
            x = x + w["skip_weights"][i - 6] * skips.pop()
        a, b = w[f"blocks.{i}.lambdas"]
        x = a * x + b * x0
        if window is not None:
            h = rms_norm(x)
            q, k, v = (torch.stack([h @ m.T for m in w[f"blocks.{i}.attn.qkv_w"]])).view(
                3, t, heads, -1
            )
            q, k = rope(rms_norm(q)), rope(rms_norm(k))
            c0, c1 = w[f"blocks.{i}.attn.lambdas"]
            v = c0 * v
            if table is not None:
                v = v + c1 * w[f"value_embeds.embed.{table}.weight"][tokens].view(t, heads, -1)
            outputs = []
            for head in range(heads):
                scores = 0.12 * q[:, head] @ k[:, head].T
                scores = scores.masked_fill(~masks[window], -math.inf)
                outputs.append(torch.softmax(scores, 1) @ v[:, head])
            x = x + torch.cat(outputs, 1) @ w[f"blocks.{i}.attn.c_proj.weight"].T
        h = rms_norm(x) @ w[f"blocks.{i}.mlp.c_fc.weight"].T
        x = x + h.clamp(min=0).pow(2) @ w[f"blocks.{i}.mlp.c_proj.weight"].T
        if i < 6:
            skips.append(x)
    return softcapped_loss(rms_norm(x) @ w["lm_head.weight"].T, targets, cap=15.0)
