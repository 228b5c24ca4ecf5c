"""Muown: each row of a matrix is a length times a direction, which learn apart. Directions learn by
Muon, and lengths by Adam. arXiv 2605.10797. Result 23: 3075 steps, 3.2790 (30 runs), pull request
288. We follow the result's log; the README in its folder describes an older run."""

import torch
from muon import average, nesterov
from norm_control import row_norms

import train_gpt as t

DIRECTION_SCALE = 0.2
BETAS, EPS = (0.9, 0.95), 1e-8  # of the Adam of the lengths
ZERO_ROW = 0.33**0.5  # first length of a row of zeros
# Muon sees a row's direction times a norm. From a row's first length it goes to these last norms,
# so that a step turns directions less and less.
LAST_NORM, NORM_POWER = 2.496, 1.2
WIDE_FACTOR = 3.33333333333  # on the last norms of wide matrices, mlp_proj
# Coefficients of Polar Express (arXiv 2505.16932) for twelve iterations.
POLAR_EXPRESS = (
    (8.2051, -22.9019, 16.4607),
    (4.0664, -2.8612, 0.5184),
    (3.9096, -2.8234, 0.5250),
    (3.2856, -2.4153, 0.4853),
    (2.2779, -1.6198, 0.3985),
    (1.8726, -1.2307, 0.3585),
    (1.8564, -1.2132, 0.3568),
    *((1.875, -1.25, 0.375),) * 5,
)
RECORDS = {
    "muown": {
        "num_iterations": 3075,
        "schedule": (3165 / 3075, 0.7, 0.9, 0.0),
        "muon_lr": 0.00325,
        "momentum_damped": False,
    }
    | {"embed_lr": 0.6, "head_lr": 0.009375, "scalar_lr": 0.03, "adam_decay": 0.0}
}


def muown(bank, lr: float, now, hp) -> None:
    """Step by Muown. Weights are lengths * directions; `length` may become negative."""
    state, (height, width) = bank.state, bank.shard.shape[-2:]
    if "length" not in state:
        found = row_norms(bank.shard)
        found[found <= 1e-12] = ZERO_ROW
        state["length"], state["first length"] = found.clone(), found
    length = state["length"]

    last = LAST_NORM * (WIDE_FACTOR if width > height else 1)
    share = min(max(now.step - 1, 0) / max(now.schedule_steps - 1, 1), 1) ** NORM_POWER
    norm = state["first length"].lerp(torch.full_like(length, last), share)
    direction = bank.shard / length
    of_length = (bank.shard_grad * direction).sum(-1, keepdim=True)  # the gradient of the length
    of_direction = length / norm * (bank.shard_grad - direction * of_length)
    momentum = nesterov(bank, of_direction, now, hp)
    update = t.zeropower_via_newtonschulz5(momentum, POLAR_EXPRESS)
    scale = DIRECTION_SCALE * max(height, width) ** 0.5
    direction = direction * norm - lr * scale * update

    count = now.step + 1
    first = average(bank, "exp_avg", of_length, BETAS[0]) / (1 - BETAS[0] ** count)
    second = average(bank, "exp_avg_sq", of_length.square(), BETAS[1]) / (1 - BETAS[1] ** count)
    length.sub_(lr * first / (second.sqrt() + EPS))
    bank.shard.copy_(length * direction / row_norms(direction))
