"""What goes around any optimizer of the benchmark, over all weights: a lookahead (EMA-Nesterov), an
outer loop (MuLoCo), and a blend at the end."""

import torch

import train_gpt as t

LOOKAHEAD_DECAY = 0.99  # of the average of moves
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5


def look_ahead(rows, now, hp) -> None:
    """EMA-Nesterov, before a step: move weights on along the average of their moves. The optimizer
    steps from there. hp.lookahead is a factor, and from where to where it acts. arXiv 2605.25395;
    results 39, and 44 to 46. In published runs of 39, all ranks but one begin with a wrong average;
    here, they begin alike."""
    factor, first, end = hp.lookahead
    if "previous weights" not in rows.state:
        rows.state["previous weights"] = rows.own.clone()
        rows.state["lookahead"] = torch.zeros_like(rows.own)
    if round(first * hp.num_iterations) <= now.step < round(end * hp.num_iterations):
        rows.own.add_(rows.state["lookahead"], alpha=factor * now.lr_before)
        rows.gather(rows.own)


def remember_move(rows) -> None:
    """EMA-Nesterov, after a step: let the average take in the move, with its lookahead."""
    move = rows.own - rows.state["previous weights"]
    rows.state["lookahead"].lerp_(move, 1 - LOOKAHEAD_DECAY)
    rows.state["previous weights"].copy_(rows.own)


def outer_step(rows) -> None:
    """MuLoCo: take the way back since the last such step for the gradient of a step of Nesterov's
    momentum. arXiv 2505.23725; result 13. In its published runs, ranks begin with different outer
    weights, and their embeddings part; here, they begin alike."""
    outer, momentum = rows.state["outer weights"], rows.state["outer momentum"]
    pseudo_gradient = outer - rows.own
    momentum.mul_(OUTER_MOMENTUM).add_(pseudo_gradient, alpha=OUTER_LR)
    outer.sub_(momentum, alpha=OUTER_MOMENTUM).sub_(pseudo_gradient, alpha=OUTER_LR)
    rows.own.copy_(outer)


def blend(rows, now, hp) -> None:
    """Tail-EMA: let an average take in the weights; after the last step, move them to it.
    hp.tail_ema is how far, where the average begins, and its horizon. Results 45 (pull request 325)
    and 46, where the embedding is left out."""
    share, first, horizon = hp.tail_ema
    if rows.name.startswith("embed") or now.step + 1 < round(first * hp.num_iterations):
        return
    if "tail average" not in rows.state:
        rows.state["tail average"] = rows.own.clone()
    rows.state["tail average"].lerp_(rows.own, 1 / max(horizon * hp.num_iterations, 1))
    if now.step + 1 == hp.num_iterations:
        rows.own.lerp_(rows.state["tail average"], share)


def with_pieces(rule, rows, lr: float, now, hp):
    """Call a rule that changes a rank's own weights, and then what goes around it. Return what the
    rule returns: without a piece, it may also be one that returns an update."""
    found = rule(rows, lr, now, hp)
    if hp.lookahead[0]:
        remember_move(rows)
    if hp.outer_period and (now.step + 1) % hp.outer_period == 0:
        outer_step(rows)
    if hp.tail_ema[0]:
        blend(rows, now, hp)
    return found


class Optimizers(t.Optimizers):
    """train_gpt.py's optimizers, and what comes before a step."""

    def __init__(self, model, hp, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        self.begun = False  # the first forward pass of a step has begun
        model.register_forward_pre_hook(self.begin)

    @torch.no_grad()
    def begin(self, model, args: tuple) -> None:
        """Before a training step's first forward pass, whose arguments end with the moment."""
        if not model.training or self.begun:
            return
        self.begun = True
        for _, rows in self.groups:
            if self.hp.outer_period and "outer weights" not in rows.state:
                rows.state["outer weights"] = rows.own.clone()
                rows.state["outer momentum"] = torch.zeros_like(rows.own)
            if self.hp.lookahead[0]:
                look_ahead(rows, args[-1], self.hp)
                rows.wait()

    def step(self, now) -> list[torch.Tensor]:  # overrides
        """Update all groups, and return what train_gpt.py's step does."""
        self.begun = False
        return super().step(now)
