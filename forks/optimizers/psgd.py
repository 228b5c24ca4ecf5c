"""PSGD with Kronecker-factored whitening: two triangular factors of a preconditioner, fitted by
descent on random probes so that whitened gradients look like noise. arXiv 2402.04553. Result 33:
3375 steps, 3.2779 (5 runs), pull request 316, on the hyperball.

Published runs do not seed the probes. Here a probe depends on the seed, the step and the matrix
(its group, and its number there), so it is the same on any number of ranks.
"""

import torch
from muon import HYPERBALL, UNTUNED_ADAM, average, noise
from norm_control import move

FACTOR_LR = 1.0  # of the preconditioner
DAMPING = 2.0**-23  # noise on the gradient, relative
RECORDS = {
    "psgd": UNTUNED_ADAM
    | HYPERBALL
    | {"num_iterations": 3375, "muon_lr": 0.025, "mean_loss": True}
    | {"schedule": (3400 / 3375, 1.0, 1.0, 0.0), "adam_schedule": (3400 / 3375, 0.5, 1.0, 0.1)}
    | {"init": "psgd", "float32_gains": False}
}


def spectral_norm(matrix: torch.Tensor) -> torch.Tensor:
    """Return an estimate (..., 1, 1) of the largest singular value of symmetric matrices
    (..., d, d), from below: one and a half steps of power iteration from the largest column."""
    largest = matrix.abs().amax((-2, -1), keepdim=True).clamp(min=1e-30)
    matrix = matrix / largest
    column = matrix.square().sum(-2, keepdim=True).argmax(-1, keepdim=True)
    x = matrix @ matrix.take_along_dim(column, -1)
    x = x / torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return largest * torch.linalg.vector_norm(matrix @ x, dim=-2, keepdim=True)


def fit(factor: torch.Tensor, gradient: torch.Tensor, probe: torch.Tensor) -> None:
    """Let a triangular factor (..., d, d) learn from the Gram matrices (..., d, d) of the whitened
    gradient and probe, which should be equal."""
    step = FACTOR_LR / spectral_norm(gradient + probe) * (gradient - probe).triu()
    factor.sub_(step @ factor)


def psgd(bank, lr: float, now, hp) -> None:
    """Step by PSGD. The factors learn from this step's momentum before they precondition it."""
    grad, state = bank.shard_grad, bank.state
    if "left" not in state:
        scale = grad.pow(4).mean((-2, -1), keepdim=True).clamp(min=1e-24) ** (-1 / 32)
        for side, length in (("left", grad.size(-2)), ("right", grad.size(-1))):
            state[side] = scale * torch.eye(length, device=grad.device)
    momentum = average(bank, "exp_avg", grad, now.momentum) / (1 - now.momentum ** (now.step + 1))
    left, right = state["left"], state["right"]  # upper triangular
    largest = [factor.abs().amax((-2, -1), keepdim=True) for factor in (left, right)]
    balance = (largest[1] / largest[0]).sqrt()
    left.mul_(balance)
    right.div_(balance)

    probe, damping = noise(bank, (hp.seed, now.step), 2, *grad.shape[1:]).unbind(1)
    whitened = left @ (momentum + DAMPING * momentum.abs() * damping) @ right.mT
    probe = torch.linalg.solve_triangular(left.mT, probe, upper=False)
    probe = torch.linalg.solve_triangular(right, probe, upper=True, left=False)
    fit(left, whitened @ whitened.mT, probe @ probe.mT)
    fit(right, whitened.mT @ whitened, probe.mT @ probe)
    move(bank, left.mT @ left @ momentum @ (right.mT @ right), lr, hp)
