"""Record 92 (2026-08-30_ANVIL2) read from the published facts in plain float64, sharing no code
with it. Only what differs from record 89, which is in reference_2026_07.py, is here."""

from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from frontier import reference_2026 as exact
from frontier import reference_2026_07 as newest

# -----------------------------------------------------------------------------
# The model. Layers are numbered from 0.

PAIRED, NARROW, NARROW_VALUES, LONG = (0, 2, 5), (0, 1, 2, 5, 8), (1, 8), (3, 10)
TABLES = {1: 0, 2: 1, 8: 2, 10: 3}
LAYERS = [
    exact.Layer(
        "short" if i in NARROW else "long" if i in LONG else None,
        TABLES.get(i),
        shifted=i in LONG,
        paired=i in PAIRED,
        skip=3 if i == 6 else None,
        reads=7 if i == 8 else None,
        gate_reads_values=True,
        narrow=i in NARROW,
        narrow_values=i in NARROW_VALUES,
        mlps={7: 0, 8: 2}.get(i, 1),
    )
    for i in range(11)
]
MADE = {
    "0": "x0_0 bigram_0 x0_1 bigram_1 alpha_1 x0_2 alpha_3 gate_3",
    "4": "x0_4 bigram_4 x0_5 bigram_5 skip x0_7 bigram_9 gate_10",
    "last": newest.MADE["last"],
    "end": "nu0 nu1 nu2 nu3 nu4 nu5 nu6 nu7 nu8 nu9",
}


def ngrams(w: dict[str, Tensor], rows: Tensor, signs: Tensor) -> Tensor:
    """Of a bigram's and a trigram's row (2, T) of the table, with rows (2, T) of signs."""
    return sum(w["ngrams"][rows[k]] * w["signs"][signs[k]] for k in (0, 1))


def with_borders(tokens: Tensor, distance: int) -> Tensor:
    """Tokens (T,) of which a document, for attention, begins at each such distance."""
    out, age = tokens.clone(), 0
    for i, token in enumerate(tokens.tolist()):
        age = 0 if token == exact.END_OF_TEXT else age + (i > 0)
        if age % distance == 0:
            out[i] = exact.END_OF_TEXT
    return out


def capped_logits(w, tokens: Tensor, b: Tensor, step: int, heads: int, border: int = 0) -> Tensor:
    """(T, vocabulary), before the update of `step`; b (T, C) is of `ngrams`."""
    seen = with_borders(tokens, border) if border else tokens
    reach = dict(zip(("long", "short"), windows(step), strict=True))
    turns = rotary(step, w["blocks.0.attn.v_w"].shape[0] // heads // 4)
    return newest.mixed_logits(LAYERS, MADE, w, tokens, b, reach, turns, heads, seen)


def chosen_by_rule(targets: list[int], offset: int, count: int, vocab_size: int) -> tuple:
    """The sorted candidates, from a walk along the sweep token by token, and the next offset."""
    members = set(targets)
    needed = count - len(members)
    if not needed:
        return sorted(members), offset
    looked_at = min(vocab_size, int(1.7 * needed) + 256)
    window = [20011 * (offset + i) % vocab_size for i in range(looked_at)]
    others = [token for token in window if token not in members]
    if len(others) < needed:
        rest = [token for token in range(vocab_size) if token not in members]
        others = rest[:: max(1, len(rest) // needed)]
    return sorted([*members, *others[:needed]]), (offset + looked_at) % vocab_size


# -----------------------------------------------------------------------------
# Schedules: 320, 361, 426 steps, a taper of 67, and an extension of 20

ENDS = [320, 681, 1107, 1174]
STEPS = 1194
WINDOWS = [(3, 1), (7, 3), (11, 5), (11, 5), (13, 6)]  # long and short, in blocks of 128
LENGTHS = [8, 16, 24, 20, 8]  # 16384 tokens of all ranks
CAPS = [896, 2048, 3072, 3072, 3072]
FACTORS = [1.0, 1.52, 1.73, 1.73 * (20 / 24) ** 0.5, 1.0]


def stage(step: int) -> int:
    return sum(step >= end for end in ENDS)


def of_stage(step: int) -> Fraction:
    """The share of the stage that is over."""
    starts = [0, *ENDS, STEPS]
    first, end = starts[stage(step) : stage(step) + 2]
    return Fraction(step - first, end - first)


def windows(step: int) -> tuple[int, int]:
    long, short = WINDOWS[stage(step)]
    return 128 * (20 if step == STEPS else long), 128 * short


def rotary(step: int, pairs: int = 32) -> dict[bool, tuple[list[float], float]]:
    """As reference_2026.py's, of wide heads and of narrow ones, which follow short windows."""
    wide, narrow = zip(*WINDOWS[: stage(step) + 1], strict=True)
    return {False: exact.yarn(wide, pairs, 0.085), True: exact.yarn(narrow, pairs, 0.13)}


def multiplier(step: int) -> float:
    gone = min(max((step - 234) / 940, 0.0), 1.0)
    return FACTORS[stage(step)] * (1 - gone) + 0.3 * gone


def momentum(step: int) -> float:
    """From .85 to .93 over 240 steps, and back over the last 50."""
    back = max((step - 1144) / 50, 0.0)
    return 0.85 + 0.08 * min(step / 240, 1.0) * (1 - back)


def target_weights(step: int) -> list[float]:
    gone = float(of_stage(step))
    return [[1.0, 0.5, 0.25 * (1 - gone)], [1.0, 0.5 * (1 - gone)], [1.0]][min(stage(step), 2)]


def prefix_share(step: int) -> float:
    quarters = [0.20, 0.15, 0.10, 0.05]
    return [0.25, quarters[min(int(4 * of_stage(step)), 3)], 0.0][min(stage(step), 2)]


def candidates(step: int) -> int:
    thirds = [14336, 14336, 24576]
    return [10240, 10240, thirds[min(int(3 * of_stage(step)), 2)], 0, 0][stage(step)]


def is_tied(step: int) -> bool:
    return step <= 1175


def learns(step: int) -> bool:
    """Whether the tables of n-grams and of values do, at the end of a cycle of 2 or 4 steps."""
    return step % 2 == 1 if step < 336 else step % 4 == 3


# -----------------------------------------------------------------------------
# Updates

ADAM = dict(newest.ADAM)
ADAM["value_embeds.embed.weight"] = (70, (0.75, 0.95), 5)
ADAM["mixers.end.group_w"] = ADAM["mixers.end.out_w"]
del ADAM["bigram_embed.weight"]
TALL = (2816 / 768) ** 0.5
FACTOR = {f"blocks.attn.{name}": 1.0 for name in ("qk_w", "v_w", "c_proj.weight")}
for one in ("mlp", "second_mlp"):
    FACTOR |= {f"blocks.{one}.c_fc.weight": TALL, f"blocks.{one}.c_proj.weight": 2 * TALL}
MAPS = [
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
]


def anvil_step(p: Tensor, g: Tensor, state: dict, step: int, factor: float) -> None:
    """One matrix."""
    beta = momentum(step) if step < 514 else 0.85
    fast = state["fast"] = state.get("fast", 0 * g) * beta + (1 - beta) * g
    slow = state["slow"] = state.get("slow", 0 * g) * 0.98 + 0.02 * g
    blend = fast if step < 514 else 0.4385 * fast + 0.5615 * slow
    x = (1 - momentum(step)) * g + momentum(step) * blend
    x = exact.quintics(x / (1.05 * x.norm() + 1e-6), MAPS)
    v = exact.equal_neurons(x, state, 0.9)
    lr = 0.023 * multiplier(step)
    decayed = torch.where(slow * p >= 0, p, 0.0) * (2.25 * lr) * (lr * factor)
    p -= decayed + v * lr * factor


def tail(name: str, step: int) -> dict[str, float]:
    """Averages of a parameter that take in the weights after a step, and by how much. `name` has no
    numbers. The last 298 steps are 896 to 1193, the last 250 are 944 to 1193."""
    if name in ("lm_head.weight", "embed.weight"):
        if step < 896 or not (step % 2 == 1 or step == 896):
            return {}
        r = 2 / 299
        return {"long": r if step in (896, 1193) else 1 - (1 - r) ** 2}
    if name.startswith("value_embeds"):
        return {"short": 4 / 53} if step >= 944 and step % 4 == 3 else {}
    if name not in FACTOR:
        return {}
    found = {}
    if not name.endswith("qk_w") and step >= 944 and (1193 - step) % 4 == 0:
        found["short"] = 4 / 53
    if step >= 896 and (step % 4 == 1 or step >= 1192):
        found["long"] = 2 / 75
    return found


def bank(name: str) -> str:
    """Weights whose norm is kept together."""
    if "mlp" in name:
        return "mlp"
    return "vo" if name.endswith(("v_w", "attn.c_proj.weight")) else name


def with_averages(w: dict[str, Tensor], averages: dict[str, dict[str, Tensor]]) -> None:
    """The weights that a run ends with."""
    before, after = {}, {}
    for name, p in w.items():
        key, of = exact.without_numbers(name), averages[name]
        before[bank(key)] = before.get(bank(key), 0) + p.pow(2).sum()
        if "short" in of:
            p.copy_(of["short"])
        if "long" in of:
            share = 0.65 if key in ("lm_head.weight", "embed.weight") else 0.55
            share -= 0.2007 * (bank(key) in ("vo", "mlp"))
            p += share * (of["long"] - p)
        after[bank(key)] = after.get(bank(key), 0) + p.pow(2).sum()
    for name, p in w.items():
        key = exact.without_numbers(name)
        if key in FACTOR or key in ("lm_head.weight", "embed.weight"):
            p *= (before[bank(key)] / after[bank(key)]).sqrt()


def rule(name: str, step: int) -> partial | None:
    """Value tables wait for their cycle's end, all else that is Adam's for odd steps."""
    if name in FACTOR:
        return partial(anvil_step, step=step, factor=FACTOR[name])
    factor, betas, decay = ADAM[name]
    is_table = name.startswith("value_embeds")
    if is_table and step >= 336:
        betas, decay = (betas[0] ** 2, betas[1] ** 2), 2 * decay
    lr = 0.008 * multiplier(step) * factor
    adam = partial(exact.adam_step, lr=lr, betas=betas, decay=0.005 * decay)
    return adam if (learns(step) if is_table else step % 2 == 1) else None


def play(w: dict[str, Tensor], gradients: list[dict[str, Tensor]], first: int) -> None:
    """The steps first, first + 1, ... as in reference_2026.py, and averages of weights. That of the
    embedding is the head's until they part."""
    averages = {name: {} for name in w}

    def average(w, step: int) -> None:
        for name, of in averages.items():
            rates = tail(exact.without_numbers(name), step)
            if is_tied(step) and name == "embed.weight":
                rates = {}
            for kind, rate in rates.items():
                of[kind] = of[kind] + rate * (w[name] - of[kind]) if kind in of else w[name].clone()
        if step == 1175:
            averages["embed.weight"] |= averages["lm_head.weight"]
        if step == STEPS - 1:
            with_averages(w, averages)

    exact.play(w, gradients, first, rule, is_tied, average)
