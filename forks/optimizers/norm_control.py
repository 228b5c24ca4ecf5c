"""What a step along an update does to a matrix, and what keeps it from growing: weight decay, the
hyperball, a floor under the update, or a radius. --norm_control names one of the four. The field
calls the floor u/w floor, and RowFloor by rows; the radius, radial brake and radius pin."""

import torch

OUTWARD = 0.5  # share that is left of the part of an update that would make the matrix grow


def size(x: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm (..., 1, 1) of matrices x (..., rows, cols)."""
    return torch.linalg.matrix_norm(x, keepdim=True)


def schatten4(x: torch.Tensor, least: float = 0.0) -> torch.Tensor:
    """Return the root of the norm of x x', (..., 1, 1): the fourth root of the sum of the singular
    values' fourth powers, for matrices (..., rows, cols). It is at least `least`."""
    gram = x.mT @ x if x.size(-2) > x.size(-1) else x @ x.mT
    return torch.linalg.matrix_norm(gram, keepdim=True).sqrt().clamp(min=least)


def row_norms(x: torch.Tensor) -> torch.Tensor:
    """Return the lengths (..., rows, 1), at least 1e-12, of the rows of x (..., rows, cols)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-12)


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the inner product (..., 1, 1) of matrices (..., rows, cols)."""
    return (a * b).sum((-2, -1), keepdim=True)


def floored(update: torch.Tensor, weights: torch.Tensor, least: float, rows: bool) -> torch.Tensor:
    """Return the update, longer where its norm is below `least` times that of the weights. Norms
    are of matrices (..., rows, cols), or of their rows. Source: result 9; by rows: result 46."""
    dims = -1 if rows else (-2, -1)
    weights = torch.linalg.vector_norm(weights, dim=dims, keepdim=True).clamp(min=1e-8)
    length = torch.linalg.vector_norm(update, dim=dims, keepdim=True).clamp(min=1e-8)
    return update * (least * weights / length).clamp(min=1)


def hyperball_step(weights: torch.Tensor, update: torch.Tensor, lr: float) -> None:
    """Step by lr times the weights' norm, then restore that norm: a matrix stays on its sphere,
    and the length of the update does not matter. Source: results 4 and 5, by Kaiyue Wen."""
    radius = size(weights)
    moved = weights - lr * radius / size(update).clamp(min=1e-10) * update
    weights.copy_(moved * (radius / size(moved).clamp(min=1e-10)))


def kept_by_decay(weights: torch.Tensor, update: torch.Tensor, lr: float, hp):
    """Return the share of weights that weight decay leaves: a number, or with hp.cautious_decay a
    tensor, as only weights decay whose update has their sign. arXiv 2510.12402; result 46."""
    if hp.cautious_decay:
        return 1 - lr * hp.muon_decay * (update * weights > 0)
    return 1 - lr * hp.muon_decay


def radius_step(weights: torch.Tensor, update: torch.Tensor, lr: float, hp) -> None:
    """Step, then give the weights the norm that the radial part of the update alone would give.
    Where that part points outward, it is halved. Weight decay comes last. Source: results 29 (pull
    request 294), 44 and 46."""
    radial = dot(update, weights) / dot(weights, weights).clamp(min=1e-12)
    update = update - (1 - OUTWARD) * radial.clamp(max=0) * weights
    update = floored(update, weights, hp.update_floor, hp.floor_rows)
    radius = size(weights).clamp(min=1e-8)
    radius = (radius - lr * dot(update, weights) / radius).clamp(min=1e-8)
    kept = kept_by_decay(weights, update, lr, hp)
    weights.sub_(lr * update)
    weights.mul_(radius / size(weights).clamp(min=1e-8)).mul_(kept)


def move(bank, update: torch.Tensor, lr: float, hp) -> None:
    """Let a rank's own matrices make a step along -update, (n, rows, cols) as they."""
    update = update.type_as(bank.shard)
    if hp.norm_control == "hyperball":
        hyperball_step(bank.shard, update, lr)
    elif hp.norm_control == "radius":
        radius_step(bank.shard, update, lr, hp)
    elif hp.norm_control == "floor":
        bank.shard.sub_(lr * floored(update, bank.shard, hp.update_floor, hp.floor_rows))
    else:
        bank.shard.mul_(kept_by_decay(bank.shard, update, lr, hp)).sub_(lr * update)
