"""What goes around any optimizer of the benchmark: EMA-Nesterov and an outer loop (MuLoCo), and
calls of tail_ema.py and extrapolation.py."""

import tail_ema
import torch
from extrapolation import extrapolate

import train_gpt as t

EMA_NESTEROV_DECAY = 0.99  # of the average of moves
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5


def look_ahead(rows, now, hp) -> None:
    """EMA-Nesterov, before a step: move weights on along the average of their moves. The optimizer
    steps from there. hp.ema_nesterov is a factor, and from where to where it acts. arXiv
    2605.25395, which is not the Lookahead of 1907.08610; results 39, and 44 to 46. In published
    runs of 39, all ranks but one begin with a wrong average; here, they begin alike."""
    factor, first, end = hp.ema_nesterov
    if "previous weights" not in rows.state:
        rows.state["previous weights"] = rows.own.clone()
        rows.state["average move"] = torch.zeros_like(rows.own)
    if round(first * hp.num_iterations) <= now.step < round(end * hp.num_iterations):
        rows.own.add_(rows.state["average move"], alpha=factor * now.lr_before)
        rows.gather(rows.own)


def remember_move(rows) -> None:
    """EMA-Nesterov, after a step: let the average take in the move, with what look_ahead added."""
    move = rows.own - rows.state["previous weights"]
    rows.state["average move"].lerp_(move, 1 - EMA_NESTEROV_DECAY)
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


def with_pieces(rule, rows, lr: float, now, hp):
    """Call a rule, which changes a rank's own weights, and then what goes around it. Return what
    the rule returns, so that train_gpt.py refuses an update."""
    found = rule(rows, lr, now, hp)
    if hp.ema_nesterov[0]:
        remember_move(rows)
    if hp.outer_period and (now.step + 1) % hp.outer_period == 0:
        outer_step(rows)
    if hp.tail_ema[1]:
        tail_ema.blend(rows, now, hp)
    return found


class Optimizers(t.Optimizers):
    """train_gpt.py's optimizers, and what comes before and after a step. A rule's state that all
    ranks have alike is in `rows.shared`, and is saved and resumed as rows.state is."""

    changes_early = True  # `begin` moves weights

    def __init__(self, model, hp, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        self.begun = False  # the first forward pass of a step has begun
        self.taken_away: list[tuple] = []  # Rows, and their weights before take_away
        names = {p: name for name, p in model.named_parameters()}
        for _, rows in self.groups:
            rows.shared = {}
            rows.tail_shares = [tail_ema.share_of(names[p], p.ndim, hp) for p in rows.params]
        model.register_forward_pre_hook(self.begin)

    @torch.no_grad()
    def begin(self, model, args: tuple) -> None:
        """Before a training step's first forward pass, whose arguments end with the moment."""
        if not model.training or self.begun:
            return
        self.begun, now = True, args[-1]
        for _, rows in self.groups:
            if self.hp.outer_period and "outer weights" not in rows.state:
                rows.state["outer weights"] = rows.own.clone()
                rows.state["outer momentum"] = torch.zeros_like(rows.own)
            if self.hp.ema_nesterov[0]:
                look_ahead(rows, now, self.hp)
            if now.anchor and "tail average" in rows.state:
                rows.wait()
                self.taken_away.append((rows, rows.own.clone()))
                tail_ema.take_away(rows, now)
            rows.wait()

    @torch.no_grad()
    def step(self, now) -> list[torch.Tensor]:  # overrides
        """Update all groups, and return what train_gpt.py's step does."""
        self.begun = False
        for rows, weights in self.taken_away:
            rows.own.copy_(weights)
        self.taken_away = []
        norms = super().step(now)
        if self.hp.rre[1]:
            extrapolate([rows for group, rows in self.groups if group.row_ndim == 2], now, self.hp)
        return norms

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:  # overrides
        """Return all states, and what all ranks have alike, on the CPU. All ranks call this."""
        saved = super().state_dict()
        for _, rows in self.groups:
            if rows.shared:
                shared = {key: value.to("cpu", copy=True) for key, value in rows.shared.items()}
                saved[f"{rows.name}, shared"] = shared
        return saved

    def load_state_dict(self, saved: dict[str, dict[str, torch.Tensor]]) -> None:  # overrides
        """Load what state_dict returned, as train_gpt.py does, or begin anew with {}. What ranks
        share must be as the warm-up has made it."""
        shared = {f"{rows.name}, shared": rows for _, rows in self.groups}
        super().load_state_dict({key: saved[key] for key in saved if key not in shared})
        for name, rows in shared.items():
            made, rows.shared = rows.shared, {}
            for key, value in saved.get(name, {}).items():
                like = made.get(key)
                if like is None or (value.shape, value.dtype) != (like.shape, like.dtype):
                    raise RuntimeError(f"{name}: {key} is {value.dtype} {[*value.shape]}")
                rows.shared[key] = value.to(like.device, copy=True)
