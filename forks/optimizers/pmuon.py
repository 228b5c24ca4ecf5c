"""PMuon: Muon whose momentum is first multiplied, from both sides, by powers of its running
covariances, so that large singular values become smaller. Result 18: 3225 steps, 3.2776 (9 runs),
pull request 285. We follow its source: covariances are the momentum's, not the gradient's.

Published runs do not seed the first bases. Here they depend on the seed and the matrix.
"""

import torch
from muon import UNTUNED_ADAM, aspect_ratio_scale, nesterov, noise, polar, steps
from norm_control import move
from soap import next_basis

POWER = -0.3  # of a covariance
EPS = 1e-6
RECORDS = {"pmuon": UNTUNED_ADAM | steps(3225, of=3250) | {"muon_lr": 0.035, "muon_decay": 0.025}}


def powered(bank, side: str, gram: torch.Tensor, hp) -> torch.Tensor:
    """Let a side's covariance take in a Gram matrix (n, d, d), and its basis follow. Return about
    its power, whose eigenvalues have the root mean square 1."""
    state, beta, size = bank.state, hp.matrix_beta2, gram.size(-1)
    if f"{side} sum" not in state:
        state[f"{side} sum"] = torch.zeros_like(gram)
        drawn = noise(bank, (hp.seed, side == "left"), size, size)
        state[f"{side} basis"] = torch.linalg.qr(drawn)[0]
    total = state[f"{side} sum"].mul_(beta).add_(gram)
    covariance = gram + beta * total + EPS * torch.eye(size, device=gram.device)  # as Nesterov's
    basis = state[f"{side} basis"] = next_basis(covariance, state[f"{side} basis"])
    values = (basis * (covariance @ basis)).sum(-2, keepdim=True).clamp(min=EPS) ** POWER
    values = values * size**0.5 / (torch.linalg.vector_norm(values, dim=-1, keepdim=True) + EPS)
    return basis * values @ basis.mT


def pmuon(bank, lr: float, now, hp) -> None:
    """Step by PMuon."""
    momentum = nesterov(bank, bank.shard_grad, now, hp)
    right = powered(bank, "right", momentum.mT @ momentum, hp)
    left = powered(bank, "left", momentum @ momentum.mT, hp)
    update = polar(left @ momentum @ right)
    move(bank, update * aspect_ratio_scale(update), lr, hp)
