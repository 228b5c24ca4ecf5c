"""The weights that a run of the benchmark begins with. The embedding is always standard normal, and
gains are 1 where nothing else is said.

    baseline           normal with variance 0.33 / fan_in; projections, head and biases are zero
    torch              as torch draws them, uniform with bound 1 / sqrt(fan_in); projections, their
                       biases and the head are zero
    scaled_baseline    as baseline, but no weights are zero, and those in FACTORS are larger
    scaled_torch       as torch draws them, but those in FACTORS are larger; biases of projections,
                       and the head, are zero
    psgd               normal with variance 1 / (3 fan_in), but those in FACTORS are larger; head
                       and biases as torch draws them
    rademacher         as torch; fc is smaller in later layers. Each channel of a block draws a
                       sign: the gains of its two norms are 1 - 0.14 and 1 + 0.14 times the sign
    paired_rademacher  the same with 0.125, and signs are balanced by heads and layers
"""

import torch
from torch import nn

FACTORS = {"attn_proj": 1.25, "fc": 1.5, "mlp_proj": 3.0}
SPLIT = {"rademacher": 0.14, "paired_rademacher": 0.125}  # distance of gains from 1
KINDS = "baseline", "torch", "scaled_baseline", "scaled_torch", "psgd", *SPLIT
LAST_FC = 0.7  # factor on the last layer's fc, where gains are split


def independent_signs(hp) -> list[torch.Tensor]:
    """Return a random sign (model_dim,) for each channel, by layer."""
    return [torch.randint(2, (hp.model_dim,)) * 2.0 - 1 for _ in range(hp.num_layers)]


def paired_signs(hp) -> list[torch.Tensor]:
    """Return a random sign (model_dim,) for each channel, by layer. From the middle on, layers are
    pairs: in each head_dim channels, the second has as many of one sign as the first of the other,
    about half of them."""
    half, found, plus_before = hp.num_layers // 2, [], None
    size = hp.head_dim if hp.model_dim % hp.head_dim == 0 else hp.model_dim
    for layer in range(hp.num_layers):
        channels = torch.rand(hp.model_dim // size, size)
        plus = (channels < 0.5).sum(-1)
        if layer >= half and (layer - half) % 2 == 0:
            plus = (size / 2 + 0.5 * (plus - size / 2)).round()  # half as far from half of them
        elif layer >= half:
            plus = size - plus_before
        order = channels.argsort(-1).argsort(-1)
        found.append(torch.where(order < plus[:, None], 1.0, -1.0).flatten())
        plus_before = plus
    return found


def split_gains(model, kind: str) -> None:
    """Scale fc, and let a block's first norm have the gains that its second one mirrors."""
    last = max(len(model.blocks) - 1, 1)
    draws = {"rademacher": independent_signs, "paired_rademacher": paired_signs}
    signs = draws[kind](model.hp)
    for i, (block, sign) in enumerate(zip(model.blocks, signs, strict=True)):
        block.fc.weight.mul_(1 - (1 - LAST_FC) * i / last)
        block.norm1.gains.sub_(SPLIT[kind] * sign)
        block.norm2.gains.add_(SPLIT[kind] * sign)


@torch.no_grad()
def draw(model, kind: str) -> None:
    """Give a model, whose linear layers are as torch draws them and whose head is zero, the weights
    of a kind."""
    for name, layer in model.blocks.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        name, fan_in = name.split(".")[-1], layer.in_features
        if "baseline" in kind:
            layer.weight.normal_(std=(0.33 / fan_in) ** 0.5)
            layer.bias.zero_()
        elif kind == "psgd":
            layer.weight.normal_(std=(3 * fan_in) ** -0.5)
        if kind in ("scaled_baseline", "scaled_torch", "psgd"):
            layer.weight.mul_(FACTORS.get(name, 1))
        elif "proj" in name:
            layer.weight.zero_()
        if "proj" in name and kind != "psgd":
            layer.bias.zero_()
    bound = model.hp.model_dim**-0.5
    if kind == "scaled_baseline":
        model.lm_head.weight.normal_(std=0.33**0.5 * bound)
    elif kind == "psgd":
        model.lm_head.weight.uniform_(-bound, bound)
        model.lm_head.bias.uniform_(-bound, bound)
    elif kind in SPLIT:
        split_gains(model, kind)
