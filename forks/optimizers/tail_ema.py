"""Tail-EMA: an average of late weights, towards which the weights move after the last step. Before
that, the gradients may be taken at other weights, away from it (the anchor)."""

import torch


def take_away(bank, now) -> None:
    """The anchor, before a step: move weights away from their average (see blend). The gradient is
    taken there, and Optimizers.step puts the weights back. Source: spectral_annealing.py."""
    bank.shard.add_(bank.shard - bank.state["tail average"], alpha=now.anchor)
    bank.launch_gather(bank.shard)


def share_of(name: str, ndim: int, hp) -> float:
    """Return how far a parameter moves to its average at the end, by hp.tail_shares."""
    first_block, blocks, head, vectors, embed = hp.tail_shares
    if ndim == 1:
        return vectors
    if name.startswith("blocks."):
        return first_block if name.startswith("blocks.0.") else blocks
    return head if name.startswith("lm_head") else embed


def own_shares(bank):
    """Return the shares of a rank's items: a number, or a number for each matrix (n, 1, 1)."""
    if len(set(bank.tail_shares)) == 1:
        return bank.tail_shares[0]
    n, of_each = len(bank.shard), bank.num_items // len(bank.params)
    number = torch.arange(bank.rank * n, (bank.rank + 1) * n) // of_each
    shares = torch.tensor(bank.tail_shares)[number.clamp(max=len(bank.params) - 1)]  # padding: any
    return shares.to(bank.shard.device)[:, None, None]


def blend(bank, now, hp) -> None:
    """Tail-EMA, after a step: let an average take in the weights; after the last step, move them
    towards it. hp.tail_ema is where it begins, and its horizon. Results 45 (pull request 325) and
    46, which leave out the embedding."""
    first, horizon = hp.tail_ema
    if not any(bank.tail_shares) and not hp.anchor[0]:
        return  # nothing would read it
    if now.step + 1 < round(first * hp.num_iterations):
        return
    if "tail average" not in bank.state:
        bank.state["tail average"] = bank.shard.clone()
    average = bank.state["tail average"].lerp_(bank.shard, 1 / max(horizon * hp.num_iterations, 1))
    if now.step + 1 == hp.num_iterations:
        bank.shard.add_((average - bank.shard) * own_shares(bank))
