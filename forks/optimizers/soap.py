"""SOAP: Adam in the eigenbases of Shampoo's two factors, the averages of G G' and G' G. A step of
orthogonal iteration follows the eigenbases. KL-SOAP whitens each factor by the other one.

    27  soap              3125 steps, 3.2782 (6 runs), pull request 302: on the hyperball; SOAP is
                          arXiv 2409.11321
    19  klsoap            3125 steps, 3.2780 (6 runs), pull request 290: on the hyperball; KL-SOAP
                          is arXiv 2509.03378
    25  klsoap_powercool  3040 steps, 3.2781 (5 runs), pull request 293: 19, whose rates fall by a
                          power (PowerCool), and not to 0

Neither corrects the bias of its averages. In the first steps, a factor of a tall or wide matrix has
too low a rank. Then rounding chooses a part of its basis, and such runs differ.
"""

import torch
from muon import HYPERBALL, UNTUNED_ADAM, average
from norm_control import move

EPS = 1e-8
FIRST_EIGENVALUE = 0.1  # of KL-SOAP's estimates
LARGEST_ROOT = 4000.0  # of 1 / sqrt(eigenvalue)
KLSOAP = {"num_iterations": 3125, "matrix_beta2": 0.9, "float32_gains": False}
RECORDS = {"klsoap": UNTUNED_ADAM | HYPERBALL | KLSOAP}
RECORDS["klsoap_powercool"] = RECORDS["klsoap"] | {
    "optimizer": "klsoap",
    "num_iterations": 3040,
    "schedule": (3125 / 3040, 1.0, 1.5, 0.017),
    "adam_schedule": (3125 / 3040, 0.4, 1.5, 0.04),
}
RECORDS["soap"] = RECORDS["klsoap"] | {"schedule": (3200 / 3125, 1.0, 1.25, 0.0)}


def grams(grad: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what a gradient (..., rows, cols) adds to the left factor (..., rows, rows) and to the
    right one (..., cols, cols)."""
    return {"left": grad @ grad.mT, "right": grad.mT @ grad}


def eigh(factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eigenvalues (..., d) and eigenvectors of symmetric matrices (..., d, d). If the method
    does not converge, as with factors of low rank, it is repeated in float64, as in the results."""
    try:
        return torch.linalg.eigh(factor)
    except torch.linalg.LinAlgError:
        return tuple(found.type_as(factor) for found in torch.linalg.eigh(factor.double()))


def first_basis(factor: torch.Tensor) -> torch.Tensor:
    """Return the eigenvectors of symmetric matrices (..., d, d), the largest eigenvalue's first."""
    jitter = 1e-30 * torch.eye(factor.size(-1), device=factor.device)
    return eigh((factor + factor.mT) / 2 + jitter)[1].flip(-1).contiguous()


def next_basis(factor: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """Return a basis nearer to the factor's eigenvectors, by a step of orthogonal iteration."""
    return torch.linalg.qr(factor @ basis)[0].contiguous()


def refreshes(now, hp) -> bool:
    """Say whether this step refreshes bases, or roots."""
    return now.step % hp.precondition_frequency == 0


def soap(bank, lr: float, now, hp) -> None:
    """Step by SOAP. The update uses the bases of the step before."""
    grad, state, beta2 = bank.shard_grad, bank.state, hp.matrix_beta2
    if "left basis" not in state:
        for side, gram in grams(grad).items():
            state[f"{side} basis"] = first_basis(gram)
    left, right = state["left basis"], state["right basis"]
    momentum = average(bank, "exp_avg", grad, now.momentum)
    second = average(bank, "exp_avg_sq", (left.mT @ grad @ right).square(), beta2)
    update = left @ (left.mT @ momentum @ right / (second.sqrt() + EPS)) @ right.mT
    for side, gram in grams(grad).items():
        factor = average(bank, f"{side} factor", gram, beta2)
        if refreshes(now, hp):
            state[f"{side} basis"] = next_basis(factor, state[f"{side} basis"])
    move(bank, update, lr, hp)


def klsoap(bank, lr: float, now, hp) -> None:
    """Step by KL-SOAP. Its momentum is in the bases. A side's `root` is 1 / sqrt of its estimated
    eigenvalues. The first step only makes factors and bases."""
    grad, state, beta2 = bank.shard_grad, bank.state, hp.matrix_beta2
    height, width = grad.shape[-2:]
    counts = {"left": width, "right": height}
    if "left basis" not in state:
        for side, gram in grams(grad).items():
            state[f"{side} factor"] = gram / counts[side]
            state[f"{side} basis"] = first_basis(gram / counts[side])
            state[f"{side} root"] = torch.full_like(gram[..., 0], FIRST_EIGENVALUE**-0.5)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        return
    left, right = state["left basis"], state["right basis"]
    of_rows, of_columns = state["left root"][..., :, None], state["right root"][..., None, :]
    rotated = left.mT @ grad @ right
    momentum = average(bank, "exp_avg", rotated, now.momentum)
    second = average(bank, "exp_avg_sq", rotated.square(), beta2)
    update = left @ (momentum / (second.sqrt() + EPS)) @ right.mT
    momentum = left @ momentum @ right.mT

    # Each side's factor and eigenvalues are those of gradients that the other side whitens.
    whitened = {"left": grad @ right * of_columns, "right": (of_rows * (left.mT @ grad)).mT}
    squares = {
        "left": (rotated * of_columns).square().mean(-1),
        "right": (rotated * of_rows).square().mean(-2),
    }
    for side, x in whitened.items():
        factor = average(bank, f"{side} factor", x @ x.mT / counts[side], beta2)
        eigenvalue = state[f"{side} root"].pow(-2).lerp(squares[side], 1 - beta2)
        state[f"{side} root"] = eigenvalue.clamp(min=1e-30).rsqrt().clamp(max=LARGEST_ROOT)
        if refreshes(now, hp):
            state[f"{side} basis"] = next_basis(factor, state[f"{side} basis"])
    state["exp_avg"] = state["left basis"].mT @ momentum @ state["right basis"]
    move(bank, update, lr, hp)
