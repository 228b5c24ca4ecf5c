"""Optimizers that the records of 2026 share: Polar Express, NorMuon, and cautious weight decay, by
which a weight decays only where its update shrinks it, too."""

import torch
from torch import Tensor

import train_gpt as t


def numbers(*values: float) -> tuple[Tensor, ...]:
    """Return numbers as tensors (), so that other numbers recompile nothing. They are on the CPU,
    from where a kernel takes them as arguments."""
    return tuple(torch.tensor(value) for value in values)


# Coefficients of each step of Polar Express (arXiv 2505.16932), with a margin for rounding.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(G: Tensor) -> Tensor:
    """Orthogonalise as zeropower_via_newtonschulz5, with singular values nearer to 1."""
    return t.zeropower_via_newtonschulz5(G, POLAR_EXPRESS, margin=1.02, eps=1e-6)


def muon_update(bank, now, hp, orthogonalise) -> Tensor:
    """Return Muon's update (n, rows, cols): Nesterov's momentum, orthogonalised by a function."""
    if "momentum_buffer" not in bank.state:
        bank.state["momentum_buffer"] = torch.zeros_like(bank.shard_grad)
    buffer = bank.state["momentum_buffer"]
    momentum = torch.full((), now.momentum, device=buffer.device)  # a number would recompile
    return t.muon_updates(bank.shard_grad, buffer, momentum, hp.momentum_damped, orthogonalise)


@t.compiled
def normuon(update: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Return the update (..., rows, cols) with each neuron (a row or a column) divided by the root
    of its second moment; each matrix keeps its Frobenius norm: NorMuon (arXiv 2510.05491; in a
    record since @li_zichong, 2025). The second moment, (..., rows, 1) or (..., 1, cols), changes in
    place."""
    old = update.float()
    neuron = -1 if second_moment.size(-1) == 1 else -2
    second_moment.lerp_(old.square().mean(dim=neuron, keepdim=True), 1 - beta2)
    new = old * second_moment.clamp(min=1e-10).rsqrt()
    before = torch.linalg.matrix_norm(old, keepdim=True)
    after = torch.linalg.matrix_norm(new, keepdim=True)
    return (new * (before / after.clamp(min=1e-10))).type_as(update)


def new_second_moment(grad: Tensor, by_row: bool = False) -> Tensor:
    """Return the zeros that normuon begins with, for gradients (..., rows, cols). Neurons are rows
    if so said, or if there are no fewer of them than columns."""
    height, width = grad.shape[-2:]
    neurons = (height, 1) if by_row or height >= width else (1, width)
    return grad.new_zeros(*grad.shape[:-2], *neurons)


def shape_factor(shape: torch.Size, factors: tuple[float, float, float]) -> float:
    """Return the factor on the learning rate of matrices (..., rows, cols), of those of tall, wide
    and square ones."""
    height, width = shape[-2:]
    tall, wide, square = factors
    if height == width:
        return square
    return tall if height > width else wide


@t.compiled
def decayed_step_(weights: Tensor, update: Tensor, like: Tensor, lr: Tensor, decay: Tensor):
    """Subtract lr * update. Where `like`, such as the update itself, also shrinks the weight, or is
    0, subtract lr * decay * weight, too (arXiv 2510.12402; in a record since @varunneal, 2025)."""
    weights.sub_(lr * (update + decay * weights * (like * weights >= 0)))


@t.compiled
def cautious_adam_(weight, grad, first, second, step, lr, betas, shares, eps, decay) -> None:
    """Make step number `step` () of Adam in place, in float32, on a weight, its gradient and its
    first and second moment (n,), whose `shares` of what is new are 1 - betas. Epsilon is added to
    the root of the uncorrected second moment. Where an update shrinks a weight, the weight also
    decays by lr^2 * decay. All numbers are tensors ()."""
    step_size = lr * (1 - betas[1] ** step).sqrt() / (1 - betas[0] ** step)
    first.lerp_(grad.float(), shares[0])
    second.lerp_(grad.float().square(), shares[1])
    update, old = step_size * first / (second.sqrt() + eps), weight.float()
    weight.copy_(old - update - lr * lr * decay * old * (update * old > 0))


def adam(bank, lr: float, betas: tuple[float, float], eps: float, decay: float) -> None:
    """Step by cautious_adam_. On a CPU, parts of 65536 numbers are updated one after the other,
    because they stay in the cache."""
    if "step" not in bank.state:
        bank.state["step"] = torch.zeros(len(bank.shard), device=bank.shard.device)
        bank.state["exp_avg"] = torch.zeros_like(bank.shard, dtype=torch.float32)
        bank.state["exp_avg_sq"] = torch.zeros_like(bank.shard, dtype=torch.float32)
    step = bank.state["step"].add_(1)[0]
    betas, shares = numbers(*betas), numbers(*(1 - beta for beta in betas))
    lr, eps, decay = numbers(lr, eps, decay)
    size = bank.shard.numel() if bank.shard.is_cuda else 65536
    tensors = bank.shard, bank.shard_grad, bank.state["exp_avg"], bank.state["exp_avg_sq"]
    for parts in zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True):
        for part in parts if t.compilation.allowed else ():
            torch._dynamo.mark_dynamic(part, 0)  # one graph for groups of any size
        cautious_adam_(*parts, step, lr, betas, shares, eps, decay)
