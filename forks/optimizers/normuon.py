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
from muon import HYPERBALL, TORCH, UNTUNED_ADAM, aspect_ratio_scale, average, nesterov, polar, steps
from norm_control import move, size

CONTRA = 0.2  # share of the momentum, divided by its largest singular value, that is taken off
POWER_STEPS = 5  # of power iteration, for that singular value
FLOOR = {"norm_control": "floor", "update_floor": 0.35, "muon_lr": 0.0375}
RECORDS = {
    "normuon": UNTUNED_ADAM | steps(3250, of=3300) | {"muon_lr": 0.035, "muon_decay": 0.025},
    "contra_muon": UNTUNED_ADAM | TORCH | FLOOR | {"num_iterations": 3225},
    "muloco": {"optimizer": "normuon", "num_iterations": 3210, "outer_period": 30}
    | UNTUNED_ADAM
    | HYPERBALL,
}
RECORDS["normuon_floor"] = RECORDS["contra_muon"] | {"optimizer": "normuon", "num_iterations": 3250}


def equalised(bank, update: torch.Tensor, hp, least: float = 1e-10) -> torch.Tensor:
    """Return the update with rows (of a wide matrix: columns) divided by the roots of their second
    moments, which are at least `least`, as long as before."""
    update = update.type_as(bank.shard)
    square = update.square().mean(-1 if update.size(-2) >= update.size(-1) else -2, keepdim=True)
    second = average(bank, "second_moment", square, hp.matrix_beta2)
    divided = update * second.clamp(min=least).rsqrt()
    return divided * (size(update) / size(divided).clamp(min=1e-10))


def normuon(bank, lr: float, now, hp) -> None:
    """Step by NorMuon."""
    update = nesterov(bank, bank.shard_grad, now, hp, polar)
    move(bank, equalised(bank, update * aspect_ratio_scale(update), hp), lr, hp)


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors (..., d, 1) with the length 1."""
    return x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp(min=1e-10)


def largest_singular_value(x: torch.Tensor) -> torch.Tensor:
    """Return an estimate (..., 1, 1) for x (..., rows, cols), from below, by power iteration."""
    right = unit(torch.ones_like(x[..., :1, :].mT))
    for _ in range(POWER_STEPS):
        left = unit(x @ right)
        right = unit(x.mT @ left)
    return torch.linalg.vector_norm(x @ right, dim=-2, keepdim=True).clamp(min=1e-10)


def contra(whole, momentum: torch.Tensor, share: float, norm=size) -> torch.Tensor:
    """Return the orthogonalised momentum, `whole` (..., rows, cols), minus a share of the momentum,
    with the norm of before."""
    update = whole - share * momentum
    return update * (norm(whole) / norm(update).clamp(min=1e-10))


def contra_muon(bank, lr: float, now, hp) -> None:
    """Step by Contra-Muon, equalised as NorMuon."""
    momentum = nesterov(bank, bank.shard_grad, now, hp)
    whole = polar(momentum).type_as(momentum)
    update = contra(whole, momentum / largest_singular_value(momentum), CONTRA)
    move(bank, equalised(bank, update * aspect_ratio_scale(update), hp), lr, hp)
