"""Tail-EMA: an average of late weights, towards which the weights move after the last step. Before
that, the gradients may be taken at other weights, away from it (the anchor)."""

import torch


def take_away(rows, now) -> None:
    """The anchor, before a step: move weights away from their average (see blend). The gradient is
    taken there, and Optimizers.step puts the weights back. Source: spectral_annealing.py."""
    rows.own.add_(rows.own - rows.state["tail average"], alpha=now.anchor)
    rows.gather(rows.own)


def share_of_average(rows, hp):
    """Return how far weights move to their average at the end, by hp.tail_shares: a number, or a
    number for each matrix (n, 1, 1) if those of the first block have their own."""
    first_block, blocks, head, vectors, embed = hp.tail_shares
    kinds = {"head": head, "vector": vectors, "embed": embed}
    if rows.own.ndim < 3 or first_block == blocks:
        return kinds.get(rows.name.split()[0], blocks)
    n = len(rows.own)
    number = torch.arange(rows.rank * n, (rows.rank + 1) * n, device=rows.own.device)
    is_of_first = number >= rows.total - rows.total // hp.num_layers  # they come last
    return torch.where(is_of_first, first_block, blocks)[:, None, None]


def blend(rows, now, hp) -> None:
    """Tail-EMA, after a step: let an average take in the weights; after the last step, move them
    towards it. hp.tail_ema is where it begins, and its horizon. Results 45 (pull request 325) and
    46, which leave out the embedding."""
    first, horizon = hp.tail_ema
    if rows.name.startswith("embed") and not hp.tail_shares[-1] and not hp.anchor[0]:
        return  # nothing would read it
    if now.step + 1 < round(first * hp.num_iterations):
        return
    if "tail average" not in rows.state:
        rows.state["tail average"] = rows.own.clone()
    average = rows.state["tail average"].lerp_(rows.own, 1 / max(horizon * hp.num_iterations, 1))
    if now.step + 1 == hp.num_iterations:
        rows.own.add_((average - rows.own) * share_of_average(rows, hp))
