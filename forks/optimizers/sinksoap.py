"""SinkSOAP: the momentum in SOAP's bases, balanced there by Sinkhorn's iterations, so that all rows
and all columns have equal energy. Matrices that are not square are equalised as by NorMuon. Result
26: 3090 steps, 3.2785 (10 runs), pull request 298."""

import torch
from muon import UNTUNED_ADAM, average, nesterov, steps
from norm_control import move, size
from normuon import equalised
from soap import first_basis, grams

EPS = 1e-8  # on energies: the rule depends on the gradient's scale
ITERATIONS = 10
RECORDS = {"sinksoap": UNTUNED_ADAM | steps(3090, of=3125) | {"muon_lr": 0.04, "muon_decay": 0.025}}


def balanced(x: torch.Tensor) -> torch.Tensor:
    """Return x (..., rows, cols) with rows and columns scaled so that each row has about the energy
    1 / rows, and each column 1 / cols."""
    energy = x.square() + EPS
    of_columns = torch.ones_like(x[..., :1, :])
    for _ in range(ITERATIONS):
        of_rows = 1 / x.size(-2) / ((energy * of_columns).sum(-1, keepdim=True) + EPS)
        of_columns = 1 / x.size(-1) / ((energy * of_rows).sum(-2, keepdim=True) + EPS)
    return of_rows.sqrt() * x * of_columns.sqrt()


def sinksoap(bank, lr: float, now, hp) -> None:
    """Step by SinkSOAP. The bases are those of this step."""
    momentum = nesterov(bank, bank.shard_grad, now, hp)
    bases = []
    for side, gram in grams(bank.shard_grad).items():
        bases.append(first_basis(average(bank, f"{side} factor", gram, hp.matrix_beta2)))
    left, right = bases
    update = left @ balanced(left.mT @ momentum @ right) @ right.mT
    height, width = update.shape[-2:]
    update = update * (height**0.5 / size(update).clamp(min=EPS))
    if height != width:
        update = equalised(bank, update, hp, least=1e-20)
    move(bank, update, lr, hp)
