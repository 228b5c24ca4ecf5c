"""Adam for hidden matrices (arXiv 1412.6980), and Adam without correction of the bias, for gains
and biases in results 44 to 46.

    2  adamw  5625 steps, 3.2790 (1 run)
    4  adamh  4875 steps, 3.2741 (5 runs), pull request 272: Adam on the hyperball
"""

from muon import HYPERBALL, SHORT_MOMENTUM, TORCH, UNTUNED_ADAM, average
from norm_control import move

import train_gpt as t

EPS = 1e-8  # of adamh
WARMUP = 250 / 4875  # share of the steps in which adamh's rate rises
BETA2_OF_ATTN_PROJ, BETA2_OF_BIASES = 0.9965, 0.997  # of their vectors, without bias correction
RECORDS = {
    "adamw": UNTUNED_ADAM
    | TORCH
    | SHORT_MOMENTUM
    | {"num_iterations": 5625, "warmup_steps": 250, "muon_lr": 0.0015, "muon_decay": 0.1},
    "adamh": UNTUNED_ADAM | HYPERBALL | SHORT_MOMENTUM | {"num_iterations": 4875},
}


def adamw(bank, lr: float, now, hp) -> None:
    """Step by Adam with decoupled weight decay."""
    t.adam(bank, lr, now, hp, (now.momentum, hp.matrix_beta2), hp.muon_decay)


def adamh(bank, lr: float, now, hp) -> None:
    """Step by Adam. The rate rises from 0, and then jumps down to its schedule, as published."""
    warmup = round(WARMUP * hp.num_iterations)
    if now.step < warmup:
        lr = hp.muon_lr * now.step / warmup
    beta1, beta2, count = now.momentum, hp.matrix_beta2, now.step + 1
    first = average(bank, "exp_avg", bank.shard_grad, beta1) / (1 - beta1**count)
    second = average(bank, "exp_avg_sq", bank.shard_grad.square(), beta2) / (1 - beta2**count)
    move(bank, first / (second.sqrt() + EPS), lr, hp)


def uncorrected_adam(bank, lr: float, now, hp, beta2: float) -> None:
    """Step by Adam without correction of the bias: its first steps are 2 to 4 times as long."""
    first = average(bank, "exp_avg", bank.shard_grad, hp.adam_betas[0])
    second = average(bank, "exp_avg_sq", bank.shard_grad.square(), beta2)
    bank.shard.sub_(lr * first / (second.sqrt() + hp.adam_eps))


def beta2_of(name: str, hp) -> float:
    """Return the beta2 of a gain or a bias; hp.bias_correction off: that of results 44 to 46."""
    if hp.bias_correction or name.endswith("gains"):
        return hp.adam_betas[1]
    return BETA2_OF_ATTN_PROJ if "attn_proj" in name else BETA2_OF_BIASES
