"""Spectral annealing: SOAP-Muon whose update shrinks along strong eigenvectors as the rate falls.
2540 steps, 3.2788 (14 runs), by Jesse Clark: the best open result, not among the benchmark's yet
(github.com/jn2clark/modded-nanogpt, commit 53c6312). It is 46 with these changes:

    annealing         once the rate falls, the update is scaled in SOAP's bases
    two momenta       a quick and a slow one from step 1000 on, and no gate of attn_proj
    head              Adam in eigenvectors of its gradient's covariance, from step 1000 on
    schedule_skip     rates skip 60 steps at step 1400
    anchor            late gradients are taken away from an average of the weights (tail_ema.py)
    tail_shares       each kind of weights takes its own share of that average at the end
    float32_embed     the embedding is float32; the source keeps it in bfloat16 until step 1000
"""

import torch
from muon import aspect_ratio_scale, average, nesterov
from norm_control import move, size
from soap import first_basis, grams
from soap_muon import gated, learn_bases, of_steps, polar, soap_direction

import train_gpt as t

SWITCH = 1000 / 2900  # share of the schedule at which momenta, gate and head change
QUICK, SLOW, SHARE_OF_QUICK = 0.85, 0.98, 0.4385
LEAST_RATIO = 0.3  # to the first rate, from which on annealing stays as it is
COVARIANCE_DECAY = 0.99
STRENGTH, MOST_DEVIATIONS = 0.25, 2.0  # of log eigenvalues
HEAD_DECAY, HEAD_FREQUENCY = 0.95, 8  # of the head's covariance, and steps between its bases
RECORDS = {
    "spectral_annealing": of_steps(2540, ahead_until=1890)
    | {"optimizer": "spectral_annealing", "floor_rows": True}
    | {"muon_decay": 0.025, "cautious_decay": True}
    | {"schedule_skip": (1400 / 2540, 60 / 2540), "head_eigenvectors": True, "float32_embed": True}
    | {"tail_ema": (2040 / 2540, 100 / 2540), "tail_shares": (0.8, 0.55, 0.5, 1.0, 0.0)}
    | {"anchor": (0.45, 2100 / 2540, 2200 / 2540)}
}


def has_switched(now) -> bool:
    """Say whether a moment is after the change of momenta, gate and head."""
    return now.step >= round(SWITCH * now.schedule_steps)


def two_momenta(bank, now, hp) -> torch.Tensor:
    """Return Nesterov's momentum (n, rows, cols). After the switch, it is a mean of two averages,
    which both begin as the one of before."""
    state = bank.state
    if "slow momentum" not in state:
        momentum = nesterov(bank, bank.shard_grad, now, hp)
        if has_switched(now):
            state["slow momentum"] = state["momentum"].clone()
        return momentum
    quick = average(bank, "momentum", bank.shard_grad, QUICK)
    slow = average(bank, "slow momentum", bank.shard_grad, SLOW)
    return bank.shard_grad.lerp(slow.lerp(quick, SHARE_OF_QUICK), now.momentum)


def annealed(bank, update: torch.Tensor, now, hp) -> torch.Tensor:
    """Return an update (n, rows, cols), as long as before, whose entries in SOAP's bases are
    multiplied by ratio^(z / 4). The ratio is that of the rate to its first value; z says by how
    many deviations an entry's log eigenvalue differs from the mean."""
    state, ratio = bank.state, max(now.matrix_lr, LEAST_RATIO)
    if ratio >= 1 or now.step < hp.warmup_steps or "left basis" not in state:
        return update
    logs = {}
    for side, gram in grams(bank.shard_grad).items():
        covariance, basis = state.setdefault(f"{side} covariance", gram), state[f"{side} basis"]
        covariance.lerp_(gram, 1 - COVARIANCE_DECAY)
        logs[side] = (basis * (covariance @ basis)).sum(-2).clamp(min=1e-30).log()
    z = logs["left"][..., :, None] + logs["right"][..., None, :]
    deviation, mean = torch.std_mean(z, (-2, -1), keepdim=True)
    z = ((z - mean) / deviation.clamp(min=1e-6)).clamp(-MOST_DEVIATIONS, MOST_DEVIATIONS)
    left, right = state["left basis"], state["right basis"]
    scaled = left @ (left.mT @ update @ right * ratio ** (STRENGTH * z)) @ right.mT
    return scaled * (size(update) / size(scaled).clamp(min=1e-30))


def spectral_annealing(bank, lr: float, now, hp) -> None:
    """Step by SOAP-Muon with two momenta and spectral annealing."""
    momentum = two_momenta(bank, now, hp)
    direction = soap_direction(bank, momentum, hp)
    if not has_switched(now):
        direction = gated(bank, direction, momentum, now)
    update = polar(direction).type_as(momentum)
    move(bank, annealed(bank, update * aspect_ratio_scale(update), now, hp), lr, hp)
    learn_bases(bank, now, hp)


def head_basis(bank, now) -> torch.Tensor | None:
    """Return eigenvectors (C, C) of the covariance of the head's gradients, those of all ranks, or
    None before the switch. When they change, the averages of gradients turn with them."""
    if not has_switched(now):
        return None
    state, shared = bank.state, bank.shared  # shared by all ranks
    gram = t.all_reduce_(bank.shard_grad.mT @ bank.shard_grad)
    covariance = shared.setdefault("covariance", gram).lerp_(gram, 1 - HEAD_DECAY)
    before, since = shared.get("basis"), now.step - round(SWITCH * now.schedule_steps)
    if before is not None and since % HEAD_FREQUENCY:
        return before
    basis = shared["basis"] = first_basis(covariance)
    rotation = basis if before is None else before.mT @ basis
    if "exp_avg" in state:
        state["exp_avg"] = state["exp_avg"] @ rotation
        state["exp_avg_sq"] = state["exp_avg_sq"] @ rotation.square()
    return basis


def head_adam(bank, lr: float, now, hp) -> None:
    """Step by Adam, in head_basis after the switch."""
    state, (beta1, beta2) = bank.state, hp.adam_betas
    if "step" not in state:
        state["step"] = torch.zeros(len(bank.shard), 1, device=bank.shard.device)
    state["step"] += 1
    basis = head_basis(bank, now)
    grad = bank.shard_grad if basis is None else bank.shard_grad @ basis
    first = average(bank, "exp_avg", grad, beta1) / (1 - beta1 ** state["step"])
    second = average(bank, "exp_avg_sq", grad.square(), beta2) / (1 - beta2 ** state["step"])
    update = first / (second.sqrt() + hp.adam_eps)
    if basis is not None:
        update = update @ basis.mT
    bank.shard.mul_(1 - lr * hp.adam_decay).sub_(lr * update)
