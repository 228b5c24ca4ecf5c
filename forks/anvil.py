"""ANVIL, the optimizer of matrices in forks/train_gpt_2026_08.py: Muon with two momenta, and with
weight decay where the slow one agrees. The numbers come from record 92 (2026-08-30_ANVIL2) of
github.com/KellerJordan/modded-nanogpt, by Deven Pietrzak, pull request 360."""

import torch
from torch import Tensor

import train_gpt as t
from cautious import decayed_step_, new_second_moment, normuon, numbers, shape_factor

# (a, b, c) of each iteration X <- a X + (b A + c A^2) X, with A = X X^T. They differ, as in Polar
# Express.
COEFFICIENTS = (
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)


def orthogonalise(G: Tensor) -> Tensor:
    """Orthogonalise as zeropower_via_newtonschulz5, by these iterations."""
    return t.zeropower_via_newtonschulz5(G, COEFFICIENTS, margin=1.05, eps=1e-6)


@t.compiled
def anvil_updates(grad, fast, slow, momentum, fast_beta, fast_share, slow_beta: float) -> Tensor:
    """Return orthogonal updates (..., rows, cols): of Nesterov's mixture of the gradient with two
    averages of gradients, which change in place. All numbers but slow_beta are tensors ()."""
    fast.lerp_(grad, 1 - fast_beta)
    slow.lerp_(grad, 1 - slow_beta)
    return orthogonalise(grad.lerp(slow.lerp(fast, fast_share), momentum))


def anvil(bank, lr: float, now, hp, factors: tuple[float, float, float]) -> None:
    """Step by ANVIL. now.fast_beta and now.fast_share are scheduled; the momentum of the mixture is
    Muon's. The factor on lr is that of the matrices' shape. Weights decay where the slow momentum
    also shrinks them. Only the owner of a row has its slow momentum, so ranks send each other
    weights, not updates as in Muon."""
    if not bank.state:
        bank.state["fast"] = torch.zeros_like(bank.shard_grad)
        bank.state["slow"] = torch.zeros_like(bank.shard_grad)
        bank.state["second_moment"] = new_second_moment(bank.shard_grad)
    fast, slow, second = (bank.state[name] for name in ("fast", "slow", "second_moment"))
    mixture = numbers(now.momentum, now.fast_beta, now.fast_share)
    update = anvil_updates(bank.shard_grad, fast, slow, *mixture, hp.slow_momentum)
    update = normuon(update, second, hp.muon_beta2)
    rates = numbers(lr * shape_factor(update.shape, factors), lr * hp.muon_decay)
    decayed_step_(bank.shard, update, slow, *rates)
