"""Shampoo (arXiv 1802.09568): the momentum between the inverse fourth roots of two factors, the
averages of G G' and G' G. arXiv 2002.09018. Its length is that of Adam's update (grafting).

    21  shampoo       4100 steps, 3.2776 (4 runs): roots are refreshed at each fifth step, before
                      which Adam steps
    35  shampoo_pinv  3375 steps, 3.2767 (2 runs), by Rohan Anil: pseudoinverse roots, at each step

Both logs import Meta's distributed_shampoo, from a folder of result 21; so does this. The table of
results calls 35 one-sided; the source in its log sets both sides.
"""

from functools import partial

import torch
from muon import FIRST_RATES, SHORT_MOMENTUM, average, steps
from norm_control import move, size
from soap import eigh, grams, refreshes

SMALLEST = 1e-12  # added to a factor, and the smallest of its eigenvalues
RECORDS = {
    "shampoo": FIRST_RATES
    | SHORT_MOMENTUM
    | steps(4100, of=4150)
    | {"muon_lr": 0.0015, "muon_decay": 0.2, "precondition_frequency": 5},
    "shampoo_pinv": FIRST_RATES
    | SHORT_MOMENTUM
    | {"num_iterations": 3375, "muon_lr": 0.01, "muon_decay": 0.1, "matrix_beta2": 0.9},
}


def root(factor: torch.Tensor) -> torch.Tensor:
    """Return factor^(-1/4) of symmetric matrices (..., d, d), whose eigenvalues are first moved up
    until all are positive."""
    identity = torch.eye(factor.size(-1), device=factor.device)
    values, vectors = eigh(factor + SMALLEST * identity)
    smallest = values[..., :1]
    values = torch.where(smallest < SMALLEST, values - smallest + SMALLEST, values)
    return vectors * values[..., None, :] ** -0.25 @ vectors.mT


def pseudoinverse_root(factor: torch.Tensor) -> torch.Tensor:
    """Return factor^(-1/4) of symmetric matrices (..., d, d), without eigenvalues that are not
    positive."""
    values, vectors = eigh(factor)
    values = torch.where(values > 0, values, torch.inf)
    return vectors * values[..., None, :] ** -0.25 @ vectors.mT


def shampoo(rows, lr: float, now, hp, root=root, graft_eps: float = 1e-10) -> None:
    """Step by Shampoo, with a function that returns roots, and Adam's epsilon."""
    grad, beta1, beta2 = rows.grad, now.momentum, hp.matrix_beta2
    for side, gram in grams(grad).items():
        factor = average(rows, f"{side} factor", gram, beta2)
        if refreshes(now, hp):
            rows.state[f"{side} root"] = root(factor / (1 - beta2 ** (now.step + 1)))
    first = average(rows, "exp_avg", grad, beta1) / (1 - beta1 ** (now.step + 1))
    second = average(rows, "exp_avg_sq", grad.square(), beta2) / (1 - beta2 ** (now.step + 1))
    update = first / (second.sqrt() + graft_eps)
    if "left root" in rows.state:
        length = size(update)
        update = rows.state["left root"] @ first @ rows.state["right root"]
        update = update * (length / (size(update) + 1e-16))
    move(rows, update, lr, hp)


shampoo_pinv = partial(shampoo, root=pseudoinverse_root, graft_eps=1e-15)
