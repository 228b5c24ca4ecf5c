"""Tail-EMA: an average of late weights, towards which the weights move after the last step. Before
that, the gradients may be taken at other weights, away from it (the anchor)."""

import torch


def take_away(rows, now) -> None:
    """The anchor, before a step: move weights away from their average (see blend). The gradient is
    taken there, and Optimizers.step puts the weights back. Source: spectral_annealing.py."""
    rows.own.add_(rows.own - rows.state["tail average"], alpha=now.anchor)
    rows.gather(rows.own)


def share_of(name: str, ndim: int, hp) -> float:
    """Return how far a parameter moves to its average at the end, by hp.tail_shares."""
    first_block, blocks, head, vectors, embed = hp.tail_shares
    if ndim == 1:
        return vectors
    if name.startswith("blocks."):
        return first_block if name.startswith("blocks.0.") else blocks
    return head if name.startswith("lm_head") else embed


def own_shares(rows):
    """Return the shares of a rank's own rows: a number, or a number for each matrix (n, 1, 1)."""
    if len(set(rows.tail_shares)) == 1:
        return rows.tail_shares[0]
    n, of_each = len(rows.own), rows.total // len(rows.params)
    number = torch.arange(rows.rank * n, (rows.rank + 1) * n) // of_each
    shares = torch.tensor(rows.tail_shares)[number.clamp(max=len(rows.params) - 1)]  # padding: any
    return shares.to(rows.own.device)[:, None, None]


def blend(rows, now, hp) -> None:
    """Tail-EMA, after a step: let an average take in the weights; after the last step, move them
    towards it. hp.tail_ema is where it begins, and its horizon. Results 45 (pull request 325) and
    46, which leave out the embedding."""
    first, horizon = hp.tail_ema
    if not any(rows.tail_shares) and not hp.anchor[0]:
        return  # nothing would read it
    if now.step + 1 < round(first * hp.num_iterations):
        return
    if "tail average" not in rows.state:
        rows.state["tail average"] = rows.own.clone()
    average = rows.state["tail average"].lerp_(rows.own, 1 / max(horizon * hp.num_iterations, 1))
    if now.step + 1 == hp.num_iterations:
        rows.own.add_((average - rows.own) * own_shares(rows))
