"""What goes around any optimizer of the benchmark: EMA-Nesterov and an outer loop (MuLoCo), and
calls of tail_ema.py and extrapolation.py."""

import tail_ema
import torch
from extrapolation import extrapolate

import train_gpt as t

EMA_NESTEROV_DECAY = 0.99  # of the average of moves
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.5


def look_ahead(bank, now, hp) -> None:
    """EMA-Nesterov, before a step: move weights on along the average of their moves. The optimizer
    steps from there. hp.ema_nesterov is a factor, and from where to where it acts. arXiv
    2605.25395, which is not the Lookahead of 1907.08610; results 39, and 44 to 46. In published
    runs of 39, all ranks but one begin with a wrong average; here, they begin alike."""
    factor, first, end = hp.ema_nesterov
    if "previous weights" not in bank.state:
        bank.state["previous weights"] = bank.shard.clone()
        bank.state["average move"] = torch.zeros_like(bank.shard)
    if round(first * hp.num_iterations) <= now.step < round(end * hp.num_iterations):
        bank.shard.add_(bank.state["average move"], alpha=factor * now.lr_before)
        bank.launch_gather(bank.shard)


def remember_move(bank) -> None:
    """EMA-Nesterov, after a step: let the average take in the move, with what look_ahead added."""
    move = bank.shard - bank.state["previous weights"]
    bank.state["average move"].lerp_(move, 1 - EMA_NESTEROV_DECAY)
    bank.state["previous weights"].copy_(bank.shard)


def outer_step(bank) -> None:
    """MuLoCo: take the way back since the last such step for the gradient of a step of Nesterov's
    momentum. arXiv 2505.23725; result 13. In its published runs, ranks begin with different outer
    weights, and their embeddings part; here, they begin alike."""
    outer, momentum = bank.state["outer weights"], bank.state["outer momentum"]
    pseudo_gradient = outer - bank.shard
    momentum.mul_(OUTER_MOMENTUM).add_(pseudo_gradient, alpha=OUTER_LR)
    outer.sub_(momentum, alpha=OUTER_MOMENTUM).sub_(pseudo_gradient, alpha=OUTER_LR)
    bank.shard.copy_(outer)


def with_pieces(rule, bank, lr: float, now, hp) -> None:
    """Call a rule, and then what goes around it."""
    rule(bank, lr, now, hp)
    if hp.ema_nesterov[0]:
        remember_move(bank)
    if hp.outer_period and (now.step + 1) % hp.outer_period == 0:
        outer_step(bank)
    if hp.tail_ema[1]:
        tail_ema.blend(bank, now, hp)


class Optimizers(t.Optimizers):
    """train_gpt.py's optimizers, and what comes before and after a step. A rule's state that all
    ranks have alike is in `bank.shared`, and is saved and resumed as bank.state is."""

    def __init__(self, model, hp, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        self.begun = False  # the first forward pass of a step has begun
        self.taken_away: list[tuple] = []  # banks, and their shards before take_away
        names = {p: name for name, p in model.named_parameters()}
        for _, bank in self.groups:
            bank.shared = {}
            bank.tail_shares = [tail_ema.share_of(names[p], p.ndim, hp) for p in bank.params]
        model.register_forward_pre_hook(self.begin)

    @torch.no_grad()
    def begin(self, model, args: tuple) -> None:
        """Before a training step's first forward pass, whose arguments end with the moment."""
        if not model.training or self.begun:
            return
        self.begun, now = True, args[-1]
        for _, bank in self.groups:
            if self.hp.outer_period and "outer weights" not in bank.state:
                bank.state["outer weights"] = bank.shard.clone()
                bank.state["outer momentum"] = torch.zeros_like(bank.shard)
            if self.hp.ema_nesterov[0]:
                look_ahead(bank, now, self.hp)
            if now.anchor and "tail average" in bank.state:
                bank.wait()
                self.taken_away.append((bank, bank.shard.clone()))
                tail_ema.take_away(bank, now)
            bank.wait()

    @torch.no_grad()
    def step(self, now) -> dict[str, torch.Tensor]:  # overrides
        """Update all groups, and return what train_gpt.py's step does."""
        self.begun = False
        for bank, weights in self.taken_away:
            bank.shard.copy_(weights)
        self.taken_away = []
        results = super().step(now)
        if self.hp.rre[1]:
            extrapolate([bank for group, bank in self.groups if group.item_ndim == 2], now, self.hp)
        return results

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:  # overrides
        """Return all states, and what all ranks have alike, on the CPU. All ranks call this."""
        saved = super().state_dict()
        for _, bank in self.groups:
            if bank.shared:
                shared = {key: value.to("cpu", copy=True) for key, value in bank.shared.items()}
                saved[f"{bank.name}, shared"] = shared
        return saved

    def load_state_dict(self, saved: dict[str, dict[str, torch.Tensor]]) -> None:  # overrides
        """Load what state_dict returned, as train_gpt.py does, or begin anew with {}. What ranks
        share must be as the warm-up has made it."""
        shared = {f"{bank.name}, shared": bank for _, bank in self.groups}
        super().load_state_dict({key: saved[key] for key in saved if key not in shared})
        for name, bank in shared.items():
            made, bank.shared = bank.shared, {}
            for key, value in saved.get(name, {}).items():
                like = made.get(key)
                if like is None or (value.shape, value.dtype) != (like.shape, like.dtype):
                    raise RuntimeError(f"{name}: {key} is {value.dtype} {[*value.shape]}")
                bank.shared[key] = value.to(like.device, copy=True)
