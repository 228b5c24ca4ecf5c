"""Averages of the last steps' weights, with which forks/train_gpt_2026_08.py ends. The numbers come
from record 92 of github.com/KellerJordan/modded-nanogpt, for its 1194 steps. Other runs use the
same shares of their own steps."""

import torch

import train_gpt as t

STEPS = 1194
# Length of each average, in steps, counted from the end.
LENGTHS = {"short": 250, "long": 298}
SHORT_RATE = 4 / 53  # of the short average, at each fourth step
BACK = 0.2007  # share of the long average that a bank with a short one takes less
# How far the last weights move to the averages, by bank. 1: they are replaced. First to the short
# one, then to the long one.
SHARES = {
    "head": (0.0, 0.65),
    "embed": (0.0, 0.65),
    "values": (1.0, 0.0),
    "qk": (0.0, 0.55),
    "vo": (1.0, 0.55 - BACK),
    "mlp": (1.0, 0.55 - BACK),
}


def bank_of(group, rows) -> str:
    """Return the name in SHARES of a group's rows, or ""."""
    if group.name == "muon":
        height, width = rows.weights.shape[-2:]
        return "vo" if height == width else "mlp"
    name = "qk" if group.name == "pairs" else group.name
    return name if name in SHARES else ""


def rate(bank: str, average: str, now, hp, every: int) -> float:
    """Return how far an average moves to the weights that this step has made, from 0 to 1. Each
    average has a rhythm: most are of each fourth step, those of Adam's groups of its steps, which
    are `every` so many."""
    learns = (now.step + 1) % every == 0
    longer = STEPS / hp.num_iterations
    left = hp.num_iterations - 1 - now.step  # steps after this one
    if not SHARES[bank][average == "long"] or left >= round(LENGTHS[average] / longer):
        return 0.0
    if average == "short":
        ticks = left % 4 == 0
        if bank == "values":  # when they learn
            ticks = now.ngrams if hp.ngram_rows else learns
        return min(SHORT_RATE * longer, 1.0) * ticks
    length = round(LENGTHS["long"] / longer)
    if bank in ("head", "embed"):
        of_one_step = 2 / (length + 1)
        if left == 0:
            return of_one_step
        return (1 - (1 - of_one_step) ** every) * (learns or left == length - 1)
    return 2 / (length // 4 + 1) * (left % 4 == 0 or left <= 1)


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
        for name, share in zip(LENGTHS, SHARES[bank], strict=True):
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
    saved with rows.state. A tied embedding, a copy of the head, has none. When it parts from the
    head, it gets a copy of the head's."""
    learning = []
    for group, rows in groups:
        bank = bank_of(group, rows)
        if not bank or (now.tied and bank == "embed"):
            continue
        learning.append((bank, rows))
        for name in LENGTHS:
            if share := rate(bank, name, now, hp, group.steps):
                weights = rows.own.float()
                if f"{name} average" not in rows.state:
                    rows.state[f"{name} average"] = weights.clone()
                rows.state[f"{name} average"].lerp_(weights, share)
    if now.step == hp.num_iterations - 1:
        mix_(learning)
        rows_of = {group.name: rows for group, rows in groups}
        if now.tied and {"head", "embed"} <= rows_of.keys():
            rows_of["embed"].weights.copy_(rows_of["head"].weights)
