"""DynMuon: Muon whose update has the singular values of the momentum to a power p, not to the
power 0. p falls from above 0 to -0.25 early in the run, so that weak directions later move further
than strong ones. arXiv 2605.17109. Result 28: 3175 steps, 3.2790 (25 runs), pull request 304."""

import math

import torch
from muon import FIRST_RATES, nesterov, polar, shape_factor, steps
from norm_control import move, size

P_FIRST, P_LAST = 0.25, -0.25
MIDDLE, WIDTH = 0.04, 0.04  # where p is 0, and how slowly it falls, as shares of the schedule
RECORDS = {
    "dynmuon": FIRST_RATES
    | steps(3175, of=3200)
    | {"muon_lr": 0.02, "muon_decay": 0.025, "momentum_damped": False}
}


def exponent(share: float) -> float:
    """Return p, when this share of the schedule is done."""
    return P_LAST + (P_FIRST - P_LAST) / (1 + math.exp((share - MIDDLE) / WIDTH))


def spectral_power(x: torch.Tensor, p: float) -> torch.Tensor:
    """Return x (..., rows, cols) with its singular values s replaced by about s^p. With x = USV',
    polar(x) = UV'. A series of two terms for (xx')^(p/2) around the identity makes it US^pV'."""
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    length = size(x) + 1e-7
    x = x / length
    powered = polar(x)
    if abs(p) > 1e-12:
        identity = torch.eye(x.size(-2), device=x.device)
        rest = x @ x.mT - identity
        half = p / 2
        series = identity + half * rest + half * (half - 1) / 2 * rest @ rest
        powered = series @ powered.type_as(series) * length**p
    return powered.mT if tall else powered


def dynmuon(rows, lr: float, now, hp) -> None:
    """Step by DynMuon. Gradients are of the mean loss, because s^p is not linear in them."""
    gradient = rows.grad if hp.mean_loss else rows.grad / (hp.batch_seqs * hp.seq_len)
    direction = nesterov(rows, gradient, now, hp)
    update = spectral_power(direction, exponent(now.step / now.schedule_steps))
    move(rows, update * shape_factor(update), lr, hp)
