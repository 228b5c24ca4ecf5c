"""NorMuon: Muon whose neurons all move equally far: a second moment for each row of an update, or
each column of a wide one, divides it. arXiv 2510.05491. Contra-Muon first subtracts a share of the
momentum itself (github.com/nilin/contra-muon).

    10  normuon        3250 steps, 3.2789 (20 runs), pull request 276
     9  normuon_floor  3250 steps, 3.2771 (8 runs), pull request 274: a floor under the update
    11  contra_muon    3225 steps, 3.2785 (16 runs), pull request 275: also with the floor. Four of
                       its runs have 0.04 in place of 0.0375
    13  muloco         3210 steps, 3.2785 (10 runs), pull request 277: on the hyperball, with an
                       outer loop around all weights (around.py)
"""

import torch
from muon import FIRST_RATES, HYPERBALL, TORCH, average, nesterov, polar, shape_factor, steps
from norm_control import move, size

CONTRA = 0.2  # share of the momentum, divided by its largest singular value, that is taken off
POWER_STEPS = 5  # of power iteration, for that singular value
FLOOR = {"norm_control": "floor", "update_floor": 0.35, "muon_lr": 0.0375}
RECORDS = {
    "normuon": FIRST_RATES | steps(3250, of=3300) | {"muon_lr": 0.035, "muon_decay": 0.025},
    "normuon_floor": {"optimizer": "normuon"}
    | FIRST_RATES
    | TORCH
    | FLOOR
    | {"num_iterations": 3250},
    "contra_muon": FIRST_RATES | TORCH | FLOOR | {"num_iterations": 3225},
    "muloco": {"optimizer": "normuon", "num_iterations": 3210, "outer_period": 30}
    | FIRST_RATES
    | HYPERBALL,
}


def equalised(rows, update: torch.Tensor, hp) -> torch.Tensor:
    """Return the update with rows (of a wide matrix: columns) divided by the roots of their second
    moments, as long as before."""
    update = update.type_as(rows.own)
    square = update.square().mean(-1 if update.size(-2) >= update.size(-1) else -2, keepdim=True)
    second = average(rows, "second_moment", square, hp.matrix_beta2)
    divided = update * second.clamp(min=1e-10).rsqrt()
    return divided * (size(update) / size(divided).clamp(min=1e-10))


def normuon(rows, lr: float, now, hp) -> None:
    """Step by NorMuon."""
    update = nesterov(rows, rows.grad, now, hp, polar)
    move(rows, equalised(rows, update * shape_factor(update), hp), lr, hp)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors (..., d, 1) with the length 1."""
    return x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp(min=1e-10)


def contra_muon(rows, lr: float, now, hp) -> None:
    """Step by Contra-Muon, equalised as NorMuon."""
    momentum = nesterov(rows, rows.grad, now, hp)
    right = unit(torch.ones_like(momentum[..., :1, :].mT))
    for _ in range(POWER_STEPS):
        left = unit(momentum @ right)
        right = unit(momentum.mT @ left)
    largest = torch.linalg.vector_norm(momentum @ right, dim=-2, keepdim=True).clamp(min=1e-10)
    whole = polar(momentum).type_as(momentum)
    update = whole - CONTRA * momentum / largest
    update = update * (size(whole) / size(update).clamp(min=1e-10)) * shape_factor(update)
    move(rows, equalised(rows, update, hp), lr, hp)
