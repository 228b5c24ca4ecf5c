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
# How far the last weights move to each average of their bank, first to the short one. 1: they are
# replaced.
SHARES = {
    "head": {"long": 0.65},
    "embed": {"long": 0.65},
    "values": {"short": 1.0},
    "qk": {"long": 0.55},
    "vo": {"short": 1.0, "long": 0.55 - LESS},
    "mlp": {"short": 1.0, "long": 0.55 - LESS},
}


def bank_of(group, rows) -> str:
    """Return the name in SHARES of a group's rows, or ""."""
    if group.name == "muon":
        height, width = rows.weights.shape[-2:]
        return "vo" if height == width else "mlp"
    name = "qk" if group.name == "pairs" else group.name
    return name if name in SHARES else ""


# An average takes in the weights of some steps, at a rate from 0 to 1. `left` is the number of
# steps after this one; `learns` says whether the bank's weights have changed in it.
#
#     average                    at each step that                        rate, of 1194 steps
#     short, of matrices         has left % 4 == 0                        4 / 53
#     short, of values           has changed them                         4 / 53
#     long, of matrices          has left % 4 == 0, and the last two      2 / 75
#     long, of head and embed    has changed them, the first, the last    2 / 299, once a step


def short_rate(bank: str, left: int, learns: bool, steps: int) -> float:
    """Return how far the short average moves to a bank's weights, in a run of so many steps."""
    is_time = learns if bank == "values" else left % 4 == 0
    return min(SHORT_RATE * (STEPS / steps), 1.0) if is_time else 0.0


def long_rate(bank: str, left: int, learns: bool, length: int, every: int) -> float:
    """Return how far the long average of so many steps moves to a bank's weights. Those of head and
    embed change once in `every` steps, so taking them in once counts for as many steps."""
    if bank not in ("head", "embed"):
        return 2 / (length // 4 + 1) if left % 4 == 0 or left <= 1 else 0.0
    of_one_step = 2 / (length + 1)
    if left == 0:
        return of_one_step
    return 1 - (1 - of_one_step) ** every if learns or left == length - 1 else 0.0


def rate(bank: str, average: str, now, hp, every: int) -> float:
    """Return how far an average moves to the weights that this step has made. A bank learns at each
    step whose number `every` divides, or with the n-gram table."""
    left = hp.num_iterations - 1 - now.step
    length = round(LENGTHS[average] / (STEPS / hp.num_iterations))
    if left >= length:
        return 0.0
    learns = (now.step + 1) % every == 0
    if average == "long":
        return long_rate(bank, left, learns, length, every)
    if bank == "values" and hp.ngram_rows:
        learns = now.ngrams
    return short_rate(bank, left, learns, hp.num_iterations)


def norms(banks: list[tuple]) -> dict[str, torch.Tensor]:
    """Return the Frobenius norm () of each bank's weights, on all ranks together."""
    squares = {}
    for bank, rows in banks:
        norm = torch.linalg.vector_norm(rows.own, dtype=torch.float32)
        squares[bank] = squares.get(bank, 0) + norm.square()
    return {bank: t.all_reduce_(square).sqrt() for bank, square in squares.items()}


def mix_(banks: list[tuple]) -> None:
    """Let the weights of each (bank, rows) be a mixture with their averages. All weights of a bank
    together keep their norm; those of value tables do not."""
    before = norms(banks)
    for bank, rows in banks:
        for name, share in SHARES[bank].items():
            if f"{name} average" in rows.state:
                rows.own.copy_(rows.own.float().lerp(rows.state[f"{name} average"], share))
    after = norms(banks)
    for bank, rows in banks:
        if bank != "values":
            rows.own.mul_(before[bank] / after[bank].clamp(min=1e-30))
        rows.gather(rows.own)
        rows.wait()


def average(groups: list[tuple], now, hp) -> None:
    """Let the averages of a rank's rows take in the weights that this step has made; after the last
    step, use them. An average is float32, begins with the first weights that it takes in, and is
    saved with rows.state. An embedding that is tied to the head has none; when they part, `split`
    copies the head's."""
    learning = []
    for group, rows in groups:
        bank = bank_of(group, rows)
        if not bank or (now.tied and bank == "embed"):
            continue
        learning.append((bank, rows))
        for name in SHARES[bank]:
            if share := rate(bank, name, now, hp, group.steps):
                weights = rows.own.float()
                if f"{name} average" not in rows.state:
                    rows.state[f"{name} average"] = weights.clone()
                rows.state[f"{name} average"].lerp_(weights, share)
    if now.step == hp.num_iterations - 1:
        mix_(learning)
