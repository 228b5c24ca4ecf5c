"""Averages of the last steps' weights, with which forks/train_gpt_2026_08.py ends. The numbers come
from record 92 of github.com/KellerJordan/modded-nanogpt, for its 1194 steps. Other runs use the
same shares of their own steps."""

import torch

import train_gpt as t

STEPS = 1194
# Length of each average, in steps, counted from the end.
LENGTHS = {"short": 250, "long": 298}
SHORT_RATE = 4 / 53  # of the short average, at each fourth step
LESS = 0.2007  # subtracted from the long share of banks that also have a short one
# How far the last weights move to each average of their kind, first to the short one. 1: they are
# replaced.
SHARES = {
    "head": {"long": 0.65},
    "embed": {"long": 0.65},
    "values": {"short": 1.0},
    "qk": {"long": 0.55},
    "vo": {"short": 1.0, "long": 0.55 - LESS},
    "mlp": {"short": 1.0, "long": 0.55 - LESS},
}


def kind_of(group, bank) -> str:
    """Return the name in SHARES of a group's bank, or ""."""
    if group.name == "muon":
        height, width = bank.weights.shape[-2:]
        return "vo" if height == width else "mlp"
    name = "qk" if group.name == "pairs" else group.name
    return name if name in SHARES else ""


# An average takes in the weights of some steps, at a rate from 0 to 1. `left` is the number of
# steps after this one; `learns` says whether the kind's weights have changed in it.
#
#     average                    at each step that                        rate, of 1194 steps
#     short, of matrices         has left % 4 == 0                        4 / 53
#     short, of values           has changed them                         4 / 53
#     long, of matrices          has left % 4 == 0, and the last two      2 / 75
#     long, of head and embed    has changed them, the first, the last    2 / 299, once a step


def short_rate(kind: str, left: int, learns: bool, steps: int) -> float:
    """Return how far the short average moves to a kind's weights, in a run of so many steps."""
    is_time = learns if kind == "values" else left % 4 == 0
    return min(SHORT_RATE * (STEPS / steps), 1.0) if is_time else 0.0


def long_rate(kind: str, left: int, learns: bool, length: int, every: int) -> float:
    """Return how far the long average of so many steps moves to a kind's weights. Those of head and
    embed change once in `every` steps, so taking them in once counts for as many steps."""
    if kind not in ("head", "embed"):
        return 2 / (length // 4 + 1) if left % 4 == 0 or left <= 1 else 0.0
    of_one_step = 2 / (length + 1)
    if left in (0, length - 1):
        return of_one_step
    return 1 - (1 - of_one_step) ** every if learns else 0.0


def rate(kind: str, average: str, now, hp, every: int) -> float:
    """Return how far an average moves to the weights that this step has made. A kind learns at each
    step whose number `every` divides, or with the n-gram table."""
    left = hp.num_iterations - 1 - now.step
    length = round(LENGTHS[average] / (STEPS / hp.num_iterations))
    if left >= length:
        return 0.0
    learns = (now.step + 1) % every == 0
    if average == "long":
        return long_rate(kind, left, learns, length, every)
    if kind == "values" and hp.ngram_rows:
        learns = now.ngrams
    return short_rate(kind, left, learns, hp.num_iterations)


def norms(banks: list[tuple]) -> dict[str, torch.Tensor]:
    """Return the Frobenius norm () of each kind's weights, on all ranks together."""
    squares = {}
    for kind, bank in banks:
        norm = torch.linalg.vector_norm(bank.shard, dtype=torch.float32)
        squares[kind] = squares.get(kind, 0) + norm.square()
    return {kind: t.all_reduce_(square).sqrt() for kind, square in squares.items()}


def mix_(banks: list[tuple]) -> None:
    """Let the weights of each (kind, bank) be a mixture with their averages. All weights of a kind
    together keep their norm; those of value tables do not."""
    before = norms(banks)
    for kind, bank in banks:
        for name, share in SHARES[kind].items():
            if f"{name} average" in bank.state:
                bank.shard.copy_(bank.shard.float().lerp(bank.state[f"{name} average"], share))
    after = norms(banks)
    for kind, bank in banks:
        if kind != "values":
            bank.shard.mul_(before[kind] / after[kind].clamp(min=1e-30))
        bank.launch_gather(bank.shard)
        bank.wait()


def average(groups: list[tuple], now, hp) -> None:
    """Let the averages of a rank's items take in the weights that this step made; after the last
    step, use them. An average is float32, begins with the first weights that it takes in, and is
    saved with bank.state. An embedding that is tied to the head has none; when they part, `split`
    copies the head's."""
    learning = []
    for group, bank in groups:
        kind = kind_of(group, bank)
        if not kind or (now.tied and kind == "embed"):
            continue
        learning.append((kind, bank))
        for name in SHARES[kind]:
            if share := rate(kind, name, now, hp, group.steps):
                weights = bank.shard.float()
                if f"{name} average" not in bank.state:
                    bank.state[f"{name} average"] = weights.clone()
                bank.state[f"{name} average"].lerp_(weights, share)
    if now.step == hp.num_iterations - 1:
        mix_(learning)
