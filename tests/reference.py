"""The published models, written from their specification in plain float64; no code is shared.

`year` is 2024 for the records of 2024-11-19 and 2024-11-24, whose models are the same, and 2025 for
2025-01-26.
"""

import math

import torch
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
CAP = {2024: 30.0, 2025: 15.0}
END_OF_TEXT = 50256


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm()).item()


def rms_norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 2.0**-7).sqrt()


def visible(tokens: Tensor, window: int, year: int) -> Tensor:
    """Causal, same document, and fewer than `window` tokens back; in 2025 within the nearest
    window / 128 blocks of 128, the query's own included."""
    t = len(tokens)
    document = (tokens == END_OF_TEXT).cumsum(0)
    i, j = torch.arange(t)[:, None], torch.arange(t)[None, :]
    near = i - j < window if year == 2024 else i // 128 - j // 128 < window // 128
    return (j <= i) & (document[:, None] == document[None, :]) & near


def rope(x: Tensor, year: int) -> Tensor:
    """x (T, heads, D). 2024: frequencies 10000^(-k / (D/2)); 2025: half of them from 1 to 1/1024,
    both ends included, and half zero."""
    t, _, d = x.shape
    quarter = d // 4
    frequencies = [1024.0 ** (-k / (quarter - 1)) for k in range(quarter)] + [0.0] * quarter
    if year == 2024:
        frequencies = [10000.0 ** (-k / (d // 2)) for k in range(d // 2)]
    out = torch.empty_like(x)
    position = torch.arange(t, dtype=torch.float64)[:, None]
    for k, frequency in enumerate(frequencies):
        cos, sin = torch.cos(position * frequency), torch.sin(position * frequency)
        out[:, :, k] = x[:, :, k] * cos + x[:, :, k + d // 2] * sin
        out[:, :, k + d // 2] = -x[:, :, k] * sin + x[:, :, k + d // 2] * cos
    return out


def soft_capped(logits: Tensor, cap) -> Tensor:
    """cap * tanh(logit / cap), or of three numbers a / (1 + e^(-(logit + b) / c))."""
    if isinstance(cap, tuple):
        a, b, c = cap
        return a / (1 + torch.exp(-(logits + b) / c))
    return cap * torch.tanh(logits / cap)


def softcapped_loss(logits: Tensor, targets: Tensor, cap) -> Tensor:
    capped = soft_capped(logits, cap)
    return (torch.logsumexp(capped, 1) - capped[torch.arange(len(targets)), targets]).mean()


def loss(
    w: dict[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    window: int,
    heads: int,
    year: int,
    layers: list[tuple] | None = None,
) -> Tensor:
    """Mean loss from float64 weights by their names; the long window is in tokens. Other layers
    than the year's are rows as in LAYERS."""
    masks = {"long": visible(tokens, window, year)}
    masks["half"] = visible(tokens, max(window // 2, 128), year)
    x = x0 = rms_norm(w["embed.weight"][tokens])
    t = len(tokens)
    outputs, first_v, layers = [], None, layers or LAYERS[year]
    for i, (kind, mixed, skip) in enumerate(layers):
        if skip is not None:
            x = x + w["skip_weights"][i - len(layers) // 2] * outputs[skip]
        a, b = w[f"blocks.{i}.lambdas"]
        x = a * x + b * x0
        if kind is not None:
            h = rms_norm(x)
            q, k, v = (torch.stack([h @ m.T for m in w[f"blocks.{i}.attn.qkv_w"]])).view(
                3, t, heads, -1
            )
            q, k = rope(rms_norm(q), year), rope(rms_norm(k), year)
            c = w[f"blocks.{i}.attn.lambdas"]
            if mixed == "first":
                first_v = v if first_v is None else first_v
                v = (1 - c[0]) * v + c[0] * first_v
            elif mixed is not None:
                table = w[f"value_embeds.embed.{mixed}.weight"]
                v = c[0] * v + c[1] * table[tokens].view(t, heads, -1)
            else:
                v = c[0] * v
            scale = 0.12 if year == 2025 else 1 / math.sqrt(q.shape[-1])
            attended = []
            for head in range(heads):
                scores = scale * q[:, head] @ k[:, head].T
                scores = scores.masked_fill(~masks[kind], -math.inf)
                attended.append(torch.softmax(scores, 1) @ v[:, head])
            x = x + torch.cat(attended, 1) @ w[f"blocks.{i}.attn.c_proj.weight"].T
        h = rms_norm(x) @ w[f"blocks.{i}.mlp.c_fc.weight"].T
        x = x + h.clamp(min=0).pow(2) @ w[f"blocks.{i}.mlp.c_proj.weight"].T
        outputs.append(x)
    return softcapped_loss(rms_norm(x) @ w["lm_head.weight"].T, targets, CAP[year])
