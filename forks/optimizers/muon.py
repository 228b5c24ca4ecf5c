"""Muon: momentum whose singular values are all replaced by 1 (kellerjordan.github.io/posts/muon).
Muon^2 first divides it by the root of the second moment (arXiv 2604.09967).

    36  muon               3250 steps, 3.2787 (10 runs), pull request 323: all rates tuned
    12  muon_untuned_adam  3325 steps, 3.2790 (20 runs): Adam has the benchmark's first rates
    37  muonh              3250 steps, 3.2786 (10 runs), pull request 324: on the hyperball
    22  spectral_descent   8225 steps, 3.2774 (4 runs): without momentum
     7  muon_squared       3325 steps, 3.2752 (1 run), pull request 266: Muon^2
    39  ema_nesterov       3125 steps, 3.2786 (20 runs), pull request 308: muon_untuned_adam within
                           EMA-Nesterov (around.py)
"""

import torch
from norm_control import move

import train_gpt as t

# Settings that several results share, as differences from `muon`'s.
UNTUNED_ADAM = {"embed_lr": 0.3, "head_lr": 1 / 320, "scalar_lr": 0.01, "adam_decay": 0.0}
TORCH = {"init": "torch", "float32_gains": True}
HYPERBALL = {
    "norm_control": "hyperball",
    "muon_lr": 0.018,
    "schedule": (1.0, 1.0, 1.0, 0.0),
    "adam_schedule": (1.0, 0.4, 1.0, 0.0),
    "init": "scaled_torch",
    "float32_gains": True,
}
SHORT_MOMENTUM = {"momentum_start": 0.9, "momentum_end": 0.9}
EPS = 1e-10  # of muon_squared


def steps(count: int, of: int) -> dict:
    """Return the settings of a result that makes so many steps `of` a longer schedule."""
    return {"num_iterations": count, "schedule": (of / count, 0.7, 1.0, 0.0)}


RECORDS = {
    "muon": {},
    "muon_untuned_adam": {"optimizer": "muon", "muon_lr": 0.035, "muon_decay": 0.025}
    | UNTUNED_ADAM
    | steps(3325, of=3350),
    "muonh": {"optimizer": "muon"}
    | HYPERBALL
    | {"adam_schedule": (1.0, 0.85, 1.0, 0.0), "init": "scaled_baseline", "float32_gains": False}
    | {"embed_lr": 0.91, "head_lr": 0.0064, "scalar_lr": 0.0195},
    "spectral_descent": {"optimizer": "muon", "muon_lr": 0.03, "muon_decay": 0.015}
    | UNTUNED_ADAM
    | steps(8225, of=8500)
    | {"momentum_start": 0.0, "momentum_end": 0.0},
    "muon_squared": {"num_iterations": 3325, "muon_lr": 0.1, "muon_decay": 0.0125}
    | UNTUNED_ADAM
    | TORCH,
}
RECORDS["ema_nesterov"] = RECORDS["muon_untuned_adam"] | steps(3125, of=3150)
RECORDS["ema_nesterov"]["ema_nesterov"] = (0.6, 500 / 3125, 2400 / 3125)


def average(bank, name: str, value: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the running average of a value (n, ...), which begins at zero and is kept
    by its name in bank.state."""
    if name not in bank.state:
        bank.state[name] = torch.zeros_like(value)
    return bank.state[name].lerp_(value, 1 - beta)


def noise(bank, seeds: tuple[int, ...], *shape: int) -> torch.Tensor:
    """Return standard normal numbers (n, *shape), so many for each matrix of this rank. A matrix
    draws the same on any number of ranks."""
    n, device = len(bank.shard), bank.shard.device
    drawn = []
    for number in range(bank.rank * n, (bank.rank + 1) * n):
        # A hash of numbers is the same in each process, unlike that of a text.
        seed = hash((*seeds, number, *bank.name.encode()))
        generator = torch.Generator(device).manual_seed(seed)
        drawn.append(torch.randn(shape, generator=generator, device=device))
    return torch.stack(drawn)


def nesterov(bank, gradient: torch.Tensor, now, hp, orthogonalise=torch.positive) -> torch.Tensor:
    """Return Nesterov's momentum of gradients (n, rows, cols), as train_gpt.py's Muon
    has it, orthogonalised if a function is given."""
    if "momentum" not in bank.state:
        bank.state["momentum"] = torch.zeros_like(gradient)
    momentum = torch.full((), now.momentum, device=gradient.device)  # a number would recompile
    damped = hp.momentum_damped
    return t.muon_updates(gradient, bank.state["momentum"], momentum, damped, orthogonalise)


def polar(x: torch.Tensor) -> torch.Tensor:
    """Orthogonalise (..., rows, cols) by twelve iterations, which bring singular values close to 1.
    In bfloat16 on a GPU."""
    return t.zeropower_via_newtonschulz5(x, ((2.0, -1.5, 0.5),) * 12)


def aspect_ratio_scale(x: torch.Tensor) -> float:
    """Return how much longer the update of a tall matrix (..., rows, cols) is."""
    return max(1, x.size(-2) / x.size(-1)) ** 0.5


def muon(bank, lr: float, now, hp) -> None:
    """Step by Muon."""
    update = nesterov(bank, bank.shard_grad, now, hp, polar)
    move(bank, update * aspect_ratio_scale(update), lr, hp)


def muon_squared(bank, lr: float, now, hp) -> None:
    """Step by Muon^2."""
    second = average(bank, "exp_avg_sq", bank.shard_grad.square(), hp.matrix_beta2)
    update = polar(nesterov(bank, bank.shard_grad, now, hp) / (second.sqrt() + EPS))
    move(bank, update * aspect_ratio_scale(update), lr, hp)
