"""SOAP-Muon: Muon's momentum, divided by the root of its second moment in SOAP's bases, and then
orthogonalised. nikhilvyas.github.io/SOAP_Muon.pdf. All three results have EMA-Nesterov, a floor and
a radius (around.py, norm_control.py). The first steps are as undetermined as SOAP's.

    44  soap_muon  2750 steps, 3.2789 (20 runs), pull request 321
    45  tail_ema   2720 steps, 3.2786 (10 runs), pull request 325: and a blend at the end
    46  row_floor  2690 steps, 3.2783 (8 runs), pull request 328: and a floor for each row, and
                   cautious weight decay. The record. Its log's source has the three new parts off;
                   its environment switched them on
"""

import torch
from muon import UNTUNED_ADAM, aspect_ratio_scale, average, nesterov
from norm_control import dot, move, schatten4
from soap import first_basis, grams, next_basis, refreshes

# How much of SOAP's direction attn_proj takes: at least and at most so much, until these shares of
# the schedule are done. Between them, the least share falls.
LEAST, MOST = 0.45, 0.85
LEAST_END, MOST_END = 1375 / 2900, 1625 / 2900
AGREEMENT = 0.2  # cosine of SOAP's direction and the momentum up to which it takes the least
SOAP_MUON = (
    UNTUNED_ADAM
    | {"optimizer": "soap_muon", "adam_betas": (0.8, 0.99), "bias_correction": False}
    | {"muon_lr": 0.0375, "norm_control": "radius", "update_floor": 0.3825, "muon_decay": 0.0}
    | {"matrix_beta2": 0.9, "momentum_start": 0.85, "init": "paired_rademacher"}
    | {"float32_gains": True}
)


def of_steps(count: int, ahead_until: int = 1950) -> dict:
    """Return the settings of a result that makes so many of the schedule's 2900 steps, with
    EMA-Nesterov until a step."""
    return SOAP_MUON | {
        "num_iterations": count,
        "schedule": (2900 / count, 2386.4 / 2900, 1.2, 0.0),
        "adam_schedule": (2900 / count, 1413 / 2900, 1.2, 0.0),
        "momentum_cooldown": (2700 / count, 2900 / count),
        "ema_nesterov": (0.3, 300 / count, ahead_until / count),
    }


RECORDS = {
    "soap_muon": of_steps(2750),
    "tail_ema": of_steps(2720) | {"tail_ema": (2000 / 2720, 150 / 2720)},
    "row_floor": of_steps(2690)
    | {"tail_ema": (2400 / 2690, 150 / 2690), "floor_rows": True}
    | {"muon_decay": 0.025, "cautious_decay": True},
}


def polar(x: torch.Tensor) -> torch.Tensor:
    """Orthogonalise (..., rows, cols) as Muon, but from matrices of Schatten norm 1: their singular
    values are larger than in those of Frobenius norm 1. In bfloat16 on a GPU."""
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / schatten4(x, 1e-7)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(12):
        gram = x @ x.mT
        x = 2 * x + (-1.5 * gram + 0.5 * gram @ gram) @ x
    return x.mT if tall else x


def soap_direction(bank, momentum, hp, least: float = 0.0, kept: float = 0.0) -> torch.Tensor:
    """Return the momentum, divided by the root of its second moment in the bases of the step
    before, with its own Schatten norm. In the first step, there are no bases yet. The root is at
    least `least` times its root mean square; a share of the momentum itself is `kept`."""
    state = bank.state
    if "left basis" not in state:
        return momentum
    left, right = state["left basis"], state["right basis"]
    rotated = left.mT @ momentum @ right
    second = state["exp_avg_sq"].lerp_(rotated.square(), 1 - hp.matrix_beta2)
    root = second.clamp(min=1e-16).sqrt()
    if least:
        smallest = least * root.square().mean((-2, -1), keepdim=True).sqrt()
        root = torch.maximum(root, smallest.clamp(min=1e-8))
    direction = (left @ (rotated / root) @ right.mT).lerp(momentum, kept)
    return direction * (schatten4(momentum, 1e-8) / schatten4(direction, 1e-8))


def learn_bases(bank, now, hp) -> None:
    """Let the factors take in the gradient, and the bases follow them. The largest eigenvalue comes
    first, and the second moments are sorted with it."""
    grad, state = bank.shard_grad, bank.state
    if "exp_avg_sq" not in state:
        state["exp_avg_sq"] = torch.zeros_like(grad)
    second = state["exp_avg_sq"]
    for side, gram in grams(grad).items():
        factor = average(bank, f"{side} factor", gram, hp.matrix_beta2)
        basis = state.get(f"{side} basis")
        if basis is None:
            state[f"{side} basis"] = first_basis(factor)
            continue
        if not refreshes(now, hp):
            continue
        values = (basis.mT @ factor @ basis).diagonal(dim1=-2, dim2=-1)
        order = values.argsort(-1, descending=True)
        state[f"{side} basis"] = next_basis(factor, basis.take_along_dim(order[..., None, :], -1))
        axis, order = (-2, order[..., None]) if side == "left" else (-1, order[..., None, :])
        second.copy_(second.take_along_dim(order, axis))


def trust(direction, momentum, gradient, now) -> torch.Tensor:
    """Return how much of SOAP's direction to take (..., 1, 1), by the cosines of the three."""

    def cosine(a, b):
        return dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().clamp(min=1e-8)

    agreement = ((cosine(direction, momentum) - AGREEMENT) / (1 - AGREEMENT)).clamp(0, 1)
    aligned = cosine(direction, gradient) / cosine(momentum, gradient).clamp(min=1e-8)
    falling = (MOST_END - now.step / now.schedule_steps) / (MOST_END - LEAST_END)
    least, most = LEAST * min(max(falling, 0), 1), MOST if falling > 0 else 1
    return (agreement * aligned.clamp(0, 1)).clamp(least, most)


def gated(bank, direction: torch.Tensor, momentum: torch.Tensor, now) -> torch.Tensor:
    """Return SOAP's direction. For the group attn_proj, a trust gate says how far the momentum
    moves to it."""
    if not bank.name.startswith("attn_proj"):
        return direction
    direction = momentum.lerp(direction, trust(direction, momentum, bank.shard_grad, now))
    return direction * (schatten4(momentum, 1e-8) / schatten4(direction, 1e-8))


def soap_muon(bank, lr: float, now, hp) -> None:
    """Step by SOAP-Muon."""
    momentum = nesterov(bank, bank.shard_grad, now, hp)
    direction = soap_direction(bank, momentum, hp)
    direction = gated(bank, direction, momentum, now)
    update = polar(direction)
    move(bank, update * aspect_ratio_scale(update), lr, hp)
    learn_bases(bank, now, hp)
