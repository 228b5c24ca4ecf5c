"""Aurora: Muon whose update also has rows of equal length in tall matrices, columns in wide ones.
Orthogonalising alone gives some neurons long rows and others short ones. arXiv 2606.27715,
github.com/tilde-research/aurora-release.

    17  aurora       3175 steps, 3.2788 (20 runs), pull request 284: with Contra-Muon and a floor.
                     The table calls it 11 and Aurora, but it has no second moment, and other first
                     weights
    30  aurora_soap  2930 steps, 3.2784 (16 runs), pull request 300: SOAP before it in fc, mlp_proj
                     and v, Aurora in mlp_proj alone, and a radius
    34  rre          2925 steps, 3.2781 (8 runs), pull request 305: 30, extrapolated at the end
                     (extrapolation.py). Its log's source has that off; its runs had it on
"""

import torch
from muon import UNTUNED_ADAM, aspect_ratio_scale, nesterov, steps
from muon import polar as muon_polar
from norm_control import move, row_norms, schatten4
from normuon import CONTRA, FLOOR, contra, largest_singular_value
from soap_muon import SOAP_MUON, learn_bases, polar, soap_direction

CONTRA_END = 2500 / 3050  # share of aurora_soap's schedule in which the contra share falls to 0
# Of SOAP's direction in v: its denominator is at least this share of its root mean square, and this
# share of the momentum stays.
LEAST_OF_V, KEPT_OF_V = 0.55, 0.05
RECORDS = {"aurora": UNTUNED_ADAM | steps(3175, of=3200) | FLOOR}


def aurora_soap_settings(count: int) -> dict:
    """Return the settings of a result that makes so many of the schedule's 3050 steps."""
    return SOAP_MUON | {
        "optimizer": "aurora_soap",
        "num_iterations": count,
        "schedule": (3050 / count, 2386.4 / 3050, 1.2, 0.0),
        "adam_schedule": (3050 / count, 1413 / 3050, 1.2, 0.0),
        "bias_correction": True,
        "precondition_frequency": 10,
        "momentum_cooldown": (2920 / count, 3020 / count),
        "init": "rademacher",
    }


RECORDS["aurora_soap"] = aurora_soap_settings(2930)
RECORDS["rre"] = aurora_soap_settings(2925) | {"rre": (2820 / 2925, 0.875, 0.001)}


def balanced_polar(x: torch.Tensor, polar, corrections: int, exponent: float) -> torch.Tensor:
    """Return the polar factor of D x for tall x (..., rows, cols), and of x D for a wide one. D
    first gives the rows of x the length 1. Then each correction makes D larger where rows of the
    polar factor are short."""
    tall = x if x.size(-2) > x.size(-1) else x.mT
    mean_square = tall.size(-1) / tall.size(-2)  # of a row of an orthogonal matrix
    scale = 1 / row_norms(tall).clamp(min=1e-7)
    factor = polar(scale * tall).type_as(x)
    for _ in range(corrections):
        square = row_norms(factor).square().clamp(min=1e-14)
        scale = scale * (mean_square / square) ** exponent
        factor = polar(scale * tall).type_as(x)
    return factor if tall is x else factor.mT


def aurora(bank, lr: float, now, hp) -> None:
    """Step by Aurora and Contra-Muon."""
    momentum = nesterov(bank, bank.shard_grad, now, hp)
    if momentum.size(-2) == momentum.size(-1):
        whole = muon_polar(momentum).type_as(momentum)
    else:
        whole = balanced_polar(momentum, muon_polar, corrections=1, exponent=0.5)
    update = contra(whole, momentum / largest_singular_value(momentum), CONTRA)
    move(bank, update * aspect_ratio_scale(update), lr, hp)


def aurora_soap(bank, lr: float, now, hp) -> None:
    """Step by SOAP-Muon in v and matrices that are not square, by Muon in others, all of them with
    Contra-Muon, and wide ones with Aurora."""
    momentum = nesterov(bank, bank.shard_grad, now, hp)
    height, width = momentum.shape[-2:]
    is_v = bank.name.startswith("v ")
    if is_v:
        momentum = soap_direction(bank, momentum, hp, LEAST_OF_V, KEPT_OF_V)
    elif height != width:
        momentum = soap_direction(bank, momentum, hp)
    if height < width:
        whole = balanced_polar(momentum, polar, corrections=2, exponent=0.25)
    else:
        whole = polar(momentum).type_as(momentum)
    share = CONTRA * max(1 - now.step / (CONTRA_END * now.schedule_steps), 0)
    update = contra(whole, momentum / schatten4(momentum, 1e-10), share, schatten4)
    move(bank, update * aspect_ratio_scale(update), lr, hp)
    if is_v or height != width:
        learn_bases(bank, now, hp)
