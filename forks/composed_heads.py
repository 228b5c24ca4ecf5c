"""Composed heads, of the records of May and July 2026 in forks/train_gpt_2026_08.py: a head also
reads a mixture of all heads' attention to the last 112 tokens (arXiv 2405.08553). The numbers come
from github.com/KellerJordan/modded-nanogpt."""

import torch
import torch.nn.functional as F
from torch import Tensor

from train_gpt import BLOCK

WINDOW = 112  # tokens that composed heads attend to, a token itself among them


def with_block_before(x: Tensor) -> Tensor:
    """Cut x (..., (n + 1) BLOCK, D) into n pieces of two blocks, (..., n, 2 BLOCK, D)."""
    blocks = x.unflatten(-2, (-1, BLOCK))
    return torch.cat([blocks[..., :-1, :, :], blocks[..., 1:, :, :]], dim=-2)


def composed(w1: Tensor, w2: Tensor, q: Tensor, k: Tensor, v: Tensor, mask, scale: float) -> Tensor:
    """Return what composed heads add to attention, (1, H, n, D): w2[h] * sum over g of w1[g] *
    P[g] @ v[h], where P[g] is head g's softmax over the last 112 tokens, or fewer if the mask shows
    fewer. q is (1, H, n, D), k and v are (1, H, T, D), of which q's are the last n tokens; w1 and
    w2 are (1, n, H). Each block of queries reads the keys of two blocks."""
    heads, tokens, before = q.size(1), q.size(2), k.size(2) - q.size(2)
    row = torch.arange(tokens, device=q.device)
    first = row + 1 - (mask == 0).sum(-1) if torch.is_tensor(mask) else mask[0] - before
    first = torch.maximum(first, row - (WINDOW - 1))
    rest = -tokens % BLOCK  # of the last block
    q, w1 = F.pad(q, (0, 0, 0, rest)), F.pad(w1, (0, 0, 0, rest))
    k, v = (F.pad(part, (0, 0, BLOCK - before, rest)) for part in (k, v))

    row = F.pad(row, (0, rest)).view(-1, BLOCK, 1)
    column = with_block_before(torch.arange(-BLOCK, tokens + rest, device=q.device)[:, None]).mT
    visible = (column <= row) & (column >= F.pad(first, (0, rest)).view_as(row))
    scores = (q * scale).unflatten(2, (-1, BLOCK)) @ with_block_before(k).mT
    maps = scores.float().masked_fill(~visible, -1e30).softmax(-1)
    shares = w1.mT.unflatten(2, (-1, BLOCK))[..., None]  # (1, H, blocks, BLOCK, 1)
    mixture = (maps * shares).sum(1).type_as(v)
    out = mixture @ with_block_before(v.transpose(1, 2).flatten(2))  # of all heads' values
    out = out.flatten(1, 2)[:, :tokens].unflatten(-1, (heads, -1))
    return (w2[..., None] * out).transpose(1, 2)
