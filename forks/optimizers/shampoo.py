"""Shampoo (arXiv 1802.09568, 2002.09018): the momentum between the inverse fourth roots of two
factors, the averages of G G' and G' G. Its length is that of Adam's update (grafting). Result 35:
3375 steps, 3.2767 (2 runs), by Rohan Anil. The table of results calls it one-sided. The source in
its log sets both sides; it imports Meta's distributed_shampoo from the folder of result 21.
"""

import torch
from muon import SHORT_MOMENTUM, UNTUNED_ADAM, average
from norm_control import move, size
from soap import eigh, grams, refreshes

GRAFT_EPS = 1e-15  # Adam's
RECORDS = {
    "shampoo": UNTUNED_ADAM
    | SHORT_MOMENTUM
    | {"num_iterations": 3375, "muon_lr": 0.01, "muon_decay": 0.1, "matrix_beta2": 0.9}
}


def pseudoinverse_root(factor: torch.Tensor) -> torch.Tensor:
    """Return factor^(-1/4) of symmetric matrices (..., d, d), without eigenvalues that are not
    positive."""
    values, vectors = eigh(factor)
    values = torch.where(values > 0, values, torch.inf)
    return vectors * values[..., None, :] ** -0.25 @ vectors.mT


def shampoo(bank, lr: float, now, hp) -> None:
    """Step by Shampoo."""
    grad, beta1, beta2 = bank.shard_grad, now.momentum, hp.matrix_beta2
    for side, gram in grams(grad).items():
        factor = average(bank, f"{side} factor", gram, beta2) / (1 - beta2 ** (now.step + 1))
        if refreshes(now, hp) or f"{side} root" not in bank.state:
            bank.state[f"{side} root"] = pseudoinverse_root(factor)
    first = average(bank, "exp_avg", grad, beta1) / (1 - beta1 ** (now.step + 1))
    second = average(bank, "exp_avg_sq", grad.square(), beta2) / (1 - beta2 ** (now.step + 1))
    update = bank.state["left root"] @ first @ bank.state["right root"]
    length = size(first / (second.sqrt() + GRAFT_EPS))
    move(bank, update * (length / (size(update) + 1e-16)), lr, hp)
