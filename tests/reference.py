"""The published models, written from their specification in plain float64; no code is shared.

`year` is 2024 for the records of 2024-11-19 and 2024-11-24, whose models are the same, and 2025 for
2025-01-26, and for 2025-08-23, which has gates and another epsilon.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

# The window (long, "half" of it but at least a block, or None: no attention), what is mixed into v,
# and the earlier layer whose output is added to the input.
FIRST = [("long", 0), ("half", 1), ("half", 2), ("half", None), ("long", None), ("half", None)]
SECOND = [("half", None), (None, None), ("half", None), ("half", 0), ("half", 1), ("long", 2)]
SKIPS = [None] * 6 + [5, 4, 3, 2, 1, 0]
LAYERS = {
    2024: [("long", "first", skip) for skip in SKIPS],
    2025: [(*row, skip) for row, skip in zip(FIRST + SECOND, SKIPS, strict=True)],
}
# GPT-2 medium has another table; all else is as in 2025.
LOWER = FIRST[:4] + [("long", None), ("half", None), ("half", None), (None, None)]
UPPER = [("half", None)] * 3 + [
    ("long", None),
    ("half", None),
    ("half", 0),
    ("half", 1),
    ("long", 2),
]
MEDIUM_SKIPS = [None] * 8 + [7, 6, 5, 4, 3, 2, 1, 0]
MEDIUM = [(*row, skip) for row, skip in zip(LOWER + UPPER, MEDIUM_SKIPS, strict=True)]
CAP = {2024: 30.0, 2025: 15.0}
END_OF_TEXT = 50256


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return ((found - expected).norm() / expected.norm()).item()


def rms_norm(x: Tensor, epsilon: float = 2.0**-7) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()


def visible(tokens: Tensor, window: int, year: int) -> Tensor:
    """Causal, same document, and fewer than `window` tokens back; in 2025 within the nearest
    window / 128 blocks of 128, the query's own included."""
    t = len(tokens)
    document = (tokens == END_OF_TEXT).cumsum(0)
    i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
    near = i - j < window if year == 2024 else i // 128 - j // 128 < window // 128
    return (j <= i) & (document[:, None] == document[None, :]) & near


def frequencies_of(year: int, width: int) -> list[float]:
    """10000^(-k / (D/2)) in 2024; in 2025 a half of them, from 1 to 1/1024, both ends included."""
    if year == 2024:
        return [10000.0 ** (-k / (width // 2)) for k in range(width // 2)]
    return [1024.0 ** (-k / (width // 4 - 1)) for k in range(width // 4)]


def rope(x: Tensor, frequencies: list[float], position: Tensor | None = None) -> Tensor:
    """x (T, heads, D): channels d and d + D/2 turn as a pair, as many pairs as frequencies, by
    `position` (T, heads), which is the token's in every head if it is not given."""
    half = x.shape[-1] // 2
    position = torch.arange(len(x))[:, None] if position is None else position
    out = x.clone()
    for d, frequency in enumerate(frequencies):
        cos = torch.cos(position.double() * frequency)
        sin = torch.sin(position.double() * frequency)
        out[:, :, d] = x[:, :, d] * cos + x[:, :, d + half] * sin
        out[:, :, d + half] = -x[:, :, d] * sin + x[:, :, d + half] * cos
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q, k, v (T, heads, D) to (T, heads, D)."""
    scores = scale * torch.einsum("ihd,jhd->hij", q, k)
    chances = torch.softmax(scores.masked_fill(~mask, -math.inf), 2)
    return torch.einsum("hij,jhd->ihd", chances, v)


def soft_capped(logits: Tensor, cap) -> Tensor:
    """cap * tanh(logit / cap), or of three numbers a / (1 + e^(-(logit + b) / c))."""
    if isinstance(cap, tuple):
        a, b, c = cap
        return a / (1 + torch.exp(-(logits + b) / c))
    return cap * torch.tanh(logits / cap)


def softcapped_loss(logits: Tensor, targets: Tensor, cap) -> Tensor:
    return F.cross_entropy(soft_capped(logits, cap), targets)


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, C), weight (n, 12) or (n, 16): n numbers between 0 and 1 for each token, (T, n), of its
    first 12 or 16 channels."""
    return torch.sigmoid(x[:, : weight.shape[1]] @ weight.T)


def mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    hidden = (x @ w[f"{name}.c_fc.weight"].T).clamp(min=0).pow(2)
    return hidden @ w[f"{name}.c_proj.weight"].T


def loss(
    w: dict[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    window: int,
    heads: int,
    year: int,
    layers: list[tuple] | None = None,
    epsilon: float = 2.0**-7,
) -> Tensor:
    """Mean loss from float64 weights by their names; the long window is in tokens. Other layers
    than the year's are rows as in LAYERS."""
    masks = {"long": visible(tokens, window, year)}
    masks["half"] = visible(tokens, max(window // 2, 128), year)
    norm = partial(rms_norm, epsilon=epsilon)
    x = x0 = norm(w["embed.weight"][tokens])
    outputs, first_v, layers = [], None, layers or LAYERS[year]
    for i, (kind, mixed, skip) in enumerate(layers):
        if skip is not None:
            x = x + w["skip_weights"][i - len(layers) // 2] * outputs[skip]
        a, b = w[f"blocks.{i}.lambdas"]
        x = a * x + b * x0
        if kind is not None:
            h = norm(x)
            q, k, v = ((h @ m.T).view(len(h), heads, -1) for m in w[f"blocks.{i}.attn.qkv_w"])
            frequencies = frequencies_of(year, q.shape[-1])
            q, k = rope(norm(q), frequencies), rope(norm(k), frequencies)
            c = w[f"blocks.{i}.attn.lambdas"]
            if mixed == "first":
                first_v = v if first_v is None else first_v
                v = (1 - c[0]) * v + c[0] * first_v
            elif mixed is not None:
                table = w[f"value_embeds.embed.{mixed}.weight"]
                v = c[0] * v + c[1] * table[tokens].view(v.shape)
            else:
                v = c[0] * v
            scale = 0.12 if year == 2025 else 1 / math.sqrt(q.shape[-1])
            attended = attend(q, k, v, masks[kind], scale)
            if f"blocks.{i}.attn.gate" in w:
                attended = attended * gate(h, w[f"blocks.{i}.attn.gate"])[:, :, None]
            x = x + attended.flatten(1) @ w[f"blocks.{i}.attn.c_proj.weight"].T
        x = x + mlp(norm(x), w, f"blocks.{i}.mlp")
        outputs.append(x)
    return softcapped_loss(norm(x) @ w["lm_head.weight"].T, targets, CAP[year])
