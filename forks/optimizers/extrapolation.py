"""RRE, reduced-rank extrapolation: after late steps, a combination of the last moves is added to
the hidden matrices. Result 34, pull request 305."""

import torch

import train_gpt as t

EVERY = 5  # steps, up to the last one
REGULAR = 1e-6  # added to the diagonal of the moves' Gram matrix, relative to its mean


def keep_past(matrices: list, left: int) -> None:
    """Keep the weights for the extrapolation that `left` steps (1 to 3) from now makes."""
    for bank in matrices:
        bank.state[f"weights {left} before"] = bank.shard.clone()


def factors_of(gram: torch.Tensor, square: torch.Tensor, damping: float, longest: float):
    """Return the factors (3,) of the last three moves, oldest first, from their Gram matrix (3, 3)
    and the weights' squared norm (). As published: sums over the shares begin at the other end
    than RRE's, so that weights step back."""
    identity = torch.eye(3, device=gram.device)
    regular = gram + (REGULAR * gram.trace() / 3 + 1e-10) * identity
    shares = torch.linalg.solve_ex(regular, identity.sum(0))[0]  # solve waits for the GPU
    shares = shares / shares.sum()
    factors = -damping * torch.stack([shares.sum(), shares[1] + shares[2], shares[2]])
    length = (factors @ gram @ factors).sqrt() / square.sqrt().clamp(min=1e-12)
    return factors * (longest / length).clamp(max=1)


def extrapolate(matrices: list, now, hp) -> None:
    """After a step, extrapolate all hidden matrices of all ranks as one vector, if it is time.
    hp.rre is where this begins, a factor, and the longest addition, relative to the weights."""
    first, damping, longest = hp.rre
    begin, done = round(first * hp.num_iterations), now.step + 1
    left = (hp.num_iterations - done) % EVERY
    if done >= begin and left in (1, 2, 3):
        keep_past(matrices, left)
    if left or not all("weights 3 before" in bank.state for bank in matrices):
        return  # it is not time, or the last steps are not all there, as in the warm-up
    gram, square, moves = 0, 0, []
    for bank in matrices:
        past = [bank.state[f"weights {i} before"] for i in (3, 2, 1)]
        moves.append(torch.stack([*past, bank.shard]).diff(dim=0))
        count = max(bank.num_items - bank.rank * len(bank.shard), 0)  # what follows is padding
        own_moves = moves[-1][:, :count].flatten(1)
        gram = gram + own_moves @ own_moves.T
        square = square + bank.shard[:count].square().sum()
    factors = factors_of(t.all_reduce_(gram), t.all_reduce_(square), damping, longest)
    for bank, own_moves in zip(matrices, moves, strict=True):
        bank.shard.add_(torch.tensordot(factors, own_moves, 1))
        bank.launch_gather(bank.shard)
    for bank in matrices:
        bank.wait()
