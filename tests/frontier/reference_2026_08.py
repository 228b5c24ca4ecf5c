"""Record 92 (2026-08-30_ANVIL2) read from the published facts in plain float64, sharing no code
with it. Only what differs from record 89, which is in reference_2026_07.py, is here."""

import math
from fractions import Fraction

import torch
from torch import Tensor

import reference
from frontier import reference_2026 as exact
from frontier import reference_2026_07 as newest
from frontier.reference_2026 import rms_norm

# -----------------------------------------------------------------------------
# The model. Layers are numbered from 0.

PAIRED, NARROW, NARROW_VALUES, LONG = (0, 2, 5), (0, 1, 2, 5, 8), (1, 8), (3, 10)
TABLES = {1: 0, 2: 1, 8: 2, 10: 3}
XSA, GATED, LAST = (1, 3), (3, 10), 10
X0, NGRAMS = (0, 1, 2, 4, 5, 7), (1, 4, 5, 9)  # added behind attention, or in its place
MADE = {
    "0": "x0_0 bigram_0 x0_1 bigram_1 alpha_1 x0_2 alpha_3 gate_3",
    "4": "x0_4 bigram_4 x0_5 bigram_5 skip x0_7 bigram_9 gate_10",
    "last": newest.MADE["last"],
    "end": "nu0 nu1 nu2 nu3 nu4 nu5 nu6 nu7 nu8 nu9",
}
GROUPS = 12  # of channels, with numbers of their own at the end


def yarn(windows: list[int], scale: float, pairs: int) -> tuple[list[float], float]:
    """Of a kind of heads, after its window, in tokens, has been each of these."""
    frequencies = [1024.0 ** (-j / (pairs - 1)) for j in range(pairs)]
    for old, new in zip(windows, windows[1:], strict=False):
        for j, frequency in enumerate(frequencies):
            stays = min(max((old * frequency / (2 * math.pi) - 1) / 31, 0.0), 1.0)
            frequencies[j] = frequency * (stays + (1 - stays) * old / new)
        scale *= 1 + 0.2 * math.log(new / old)
    return frequencies, scale


def rotating(width: int) -> list[int]:
    """The channels of a head that turn: in both halves the first half."""
    return [d for d in range(width) if d % (width // 2) < width // 4]


def attention(i, w, tokens, mask, turns, heads, x, c, table=None, extra=None) -> Tensor:
    """Of layer i with the MLPs' numbers c: x (T, C) to (T, C)."""
    name, u, (frequencies, scale) = f"blocks.{i}.attn", rms_norm(x), turns
    on_qkv, on_o = w[f"{name}.lambdas"]
    pairs = w[f"{name}.qk_w"]
    found = torch.cat([u @ (on_qkv * matrix).T for matrix in (*pairs, w[f"{name}.v_w"])], 1)
    q, k, v = found.view(len(u), 3, heads, -1).unbind(1)
    width = v.shape[2]
    o = (on_o * w[f"{name}.c_proj.weight"]).view(-1, heads, width)
    if i in NARROW:
        q, k = q[:, :, rotating(width)], k[:, :, rotating(width)]
    position = exact.turns_of_pairs(len(u), heads) if i in PAIRED else None
    q, k = (exact.rope(rms_norm(part), frequencies, position) for part in (q, k))
    if i in LONG:
        k = exact.keys_of_the_token_before(k)
    if i == LAST:
        factor = torch.cat([c["mu6"].expand(-1, heads // 2), c["mu7"].expand(-1, heads // 2)], 1)
        v = v + factor[:, :, None] * table.view(v.shape) + extra.view(v.shape)
    elif table is not None:
        read = torch.cat([u[:, :6], table[:, :6]], 1)
        v = v + 2 * exact.gate(read, w[f"{name}.value_gate"])[:, :, None] * table.view(v.shape)
    if i in NARROW_VALUES:
        v, o = v[:, :, : width // 2], o[:, :, : width // 2]
    if i in PAIRED:
        y = exact.attend(*(exact.interleaved(part) for part in (q, k, v)), mask, scale)
        y = [of_pair[::2] for of_pair in y] + [of_pair[1::2] for of_pair in y]
    else:
        y = exact.attend(q, k, v, mask, scale)
    y = torch.stack(y, 1)
    if i in XSA:
        along = (y * v).sum(2) / v.pow(2).sum(2).clamp(min=1e-8)
        y = y - (torch.tanh(c[f"alpha_{i}"]) * along)[:, :, None] * v
    if i in GATED:
        y = y * c[f"gate_{i}"][:, :, None]
    return torch.einsum("thd,chd->tc", y, o)


def mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    hidden = (x @ w[f"{name}.c_fc.weight"].T).clamp(min=0).pow(2)
    return hidden @ w[f"{name}.c_proj.weight"].T


def made_by(name: str, w: dict[str, Tensor], x: Tensor, heads: int) -> dict[str, Tensor]:
    hidden = x @ w[f"mixers.{name}.hidden_w"].T
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    scale, words = w["mixer_scale"] if name.isdigit() else 0.1, MADE[name].split()
    rows = scale * (hidden @ w[f"mixers.{name}.out_w"].T + w[f"mixers.{name}.bias"])
    parts = rows.split([heads if made[0] in "ag" else 1 for made in words], 1)
    return dict(zip(words, parts, strict=True))


def differences(w: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """What is added to each nu of the end for each channel, (T, C)."""
    hidden = x @ w["mixers.end.hidden_w"].T
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    size = x.shape[1] // GROUPS
    found = []
    for matrix in w["mixers.end.group_w"]:  # (groups, hidden) of a source
        groups = [0.1 * hidden @ matrix[g] for g in range(GROUPS) for _ in range(size)]
        found.append(torch.stack(groups, 1))
    return found


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
    e, c = w["embed.weight"][tokens], {}
    seen = with_borders(tokens, border) if border else tokens
    short, long = windows(step)
    width = w["blocks.0.attn.v_w"].shape[0] // heads
    turns = {False: turns_of(step, 1, 0.085, width), True: turns_of(step, 0, 0.13, width)}
    x0 = rms_norm(exact.smear(e, w["smear_gate"], w["smear_lambda"]))
    tables = [w[f"value_embeds.embed.{k}.weight"][tokens] for k in range(4)]
    c, outputs = made_by("0", w, x0, heads), []
    x = start = x0 + c["bigram_0"] * b
    for i in range(11):
        c |= made_by("4", w, x, heads) if i == 4 else {}
        keep, post = (None, None) if i == LAST else (
            w[f"blocks.{i}.residual_lambda"], w[f"blocks.{i}.post_lambda"],
        )  # fmt: skip
        if i in NARROW + LONG:
            mask = exact.visible_places(seen, long if i in LONG else short, 1 + (i in PAIRED))
            read = outputs[7] if i in (8, 10) else x
            case = i, w, tokens, mask, turns[i in NARROW], heads, read
        if i == 6:
            x = x + torch.sigmoid(w["skip_weights"][0]) * c["skip"] * outputs[3]
        elif i == LAST:
            x9, out7, mu = x, outputs[7], made_by("last", w, x, heads)
            extra = mu["mu0"] * start + mu["mu1"] * out7 + mu["mu2"] * x
            x = (1 + mu["mu5"]) * x + mu["mu3"] * start + mu["mu4"] * out7
            x = mu["mu8"] * x + mu["mu9"] * attention(*case, c | mu, tables[3], extra)
            x = x + mu["mu10"] * start + mu["mu11"] * b
            last_read = rms_norm(x)
            x = mu["mu12"] * x + mu["mu13"] * mlp(last_read, w, f"blocks.{i}.mlp")
            continue
        else:
            x = keep[0] * x
            if i in NARROW + LONG:
                of_table = tables[TABLES[i]] if i in TABLES else None
                x = x + post[0] * attention(*case, c, of_table)
            x = (
                x
                + (c[f"x0_{i}"] * x0 if i in X0 else 0)
                + (c[f"bigram_{i}"] * b if i in NGRAMS else 0)
            )
        read, x = rms_norm(x), keep[1] * x
        if i != 7:
            x = x + post[1] * mlp(read, w, f"blocks.{i}.mlp")
        if i == 8:
            x = x + post[1] * mlp(read, w, "blocks.8.second_mlp")
        outputs.append(x)
    sources = (start, out7, x9, tables[0], outputs[3], *tables[1:], last_read, rms_norm(out7))
    factors = zip(made_by("end", w, x, heads).values(), differences(w, x), sources, strict=True)
    x = x + sum((number + of_channel) * source for number, of_channel, source in factors)
    return reference.soft_capped(rms_norm(x) @ w["lm_head.weight"].T, (23.0, 5.0, 7.5))


def loss(capped: Tensor, targets: Tensor, before: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """What is trained at a step from logits (T, n) of which targets (T,) and prefixes `before` (V,)
    are columns, -1 if they are none; and the mean loss of the next token."""
    trained = 0.0
    for k, weight in enumerate(target_weights(step)):
        losses = exact.cross_entropies(capped[: len(targets) - k], targets[k:])
        trained = trained + float(weight) * losses.sum()
    prefixes = before[targets]
    known = prefixes >= 0
    of_prefixes = exact.cross_entropies(capped[known], prefixes[known]).sum()
    return trained + prefix_share(step) * of_prefixes, exact.cross_entropies(capped, targets).mean()


# -----------------------------------------------------------------------------
# Schedules: 320, 361, 426 steps, a taper of 67, and an extension of 20

ENDS = [320, 681, 1107, 1174]
STEPS = 1194
WINDOWS = [(1, 3), (3, 7), (5, 11), (5, 11), (6, 13)]  # short and long, in blocks of 128
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
    short, long = WINDOWS[stage(step)]
    return 128 * short, 128 * (20 if step == STEPS else long)


def turns_of(step: int, which: int, scale: float, width: int) -> tuple[list[float], float]:
    return yarn([128 * row[which] for row in WINDOWS[: stage(step) + 1]], scale, width // 4)


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
    return [0.25, quarters[int(4 * of_stage(step))], 0.0][min(stage(step), 2)]


def candidates(step: int) -> int:
    thirds = [14336, 14336, 24576]
    return [10240, 10240, thirds[int(3 * of_stage(step))], 0, 0][stage(step)]


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
    """One matrix. A neuron is along the longer side."""
    beta = momentum(step) if step < 514 else 0.85
    fast = state["fast"] = state.get("fast", 0 * g) * beta + (1 - beta) * g
    slow = state["slow"] = state.get("slow", 0 * g) * 0.98 + 0.02 * g
    blend = fast if step < 514 else 0.4385 * fast + 0.5615 * slow
    x = (1 - momentum(step)) * g + momentum(step) * blend
    x = exact.quintics(x / (1.05 * x.norm() + 1e-6), MAPS)
    square = x.pow(2).mean(0 if x.shape[0] < x.shape[1] else 1, keepdim=True)
    state["square"] = state.get("square", 0 * square) * 0.9 + square * 0.1
    v = x / state["square"].clamp(min=1e-10).sqrt()
    v = v * x.norm() / v.norm().clamp(min=1e-10)
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
        return {"long": r if step == 1193 else 1 - (1 - r) ** 2}
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
    return "vo" if name.endswith(("v_w", "attn.c_proj.weight")) else name.split(".")[-1] if (
        name.endswith("qk_w")
    ) else name  # fmt: skip


def with_averages(w: dict[str, Tensor], averages: dict[str, dict[str, Tensor]]) -> None:
    """The weights that a run ends with."""
    before, after = {}, {}
    for name, p in w.items():
        key, of = exact.without_numbers(name), averages.get(name, {})
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


def play(w: dict[str, Tensor], gradients: list[dict[str, Tensor]], first: int) -> None:
    """The steps first, first + 1, ... as reference_2026.play, which says when head and embedding
    are one. Value tables wait for their cycle's end."""
    states, waiting, averages = {}, {}, {}
    for step, of_step in enumerate(gradients, first):
        lr = 0.008 * multiplier(step)
        for name, p in w.items():
            key = exact.without_numbers(name)
            if key in FACTOR:
                for place, matrix, g in newest.matrices(name, p, of_step[name]):
                    anvil_step(matrix, g, states.setdefault(place, {}), step, FACTOR[key])
                continue
            waiting[name] = waiting.get(name, 0) + of_step[name]
        tied = is_tied(step)
        for name in list(waiting):
            factor, betas, decay = ADAM[exact.without_numbers(name)]
            if name.startswith("value_embeds"):
                if not learns(step):
                    continue
                if step >= 336:
                    betas, decay = (betas[0] ** 2, betas[1] ** 2), 2 * decay
            elif step % 2 == 0 or (tied and name == "embed.weight"):
                continue
            g = waiting.pop(name)
            if tied and name == "lm_head.weight":
                g = g + waiting.pop("embed.weight")
            exact.adam_step(
                w[name], g, states.setdefault(name, {}), lr * factor, betas, 0.005 * decay
            )
        if tied and step % 2 == 1:
            w["embed.weight"].copy_(w["lm_head.weight"])
        for name, p in w.items():
            if tied and name == "embed.weight":
                continue
            for kind, rate in tail(exact.without_numbers(name), step).items():
                of = averages.setdefault(name, {})
                of[kind] = of[kind] + rate * (p - of[kind]) if kind in of else p.clone()
        if step == 1175:
            head = states["lm_head.weight"]
            states["embed.weight"] = {"t": head["t"], "m": head["m"] + 0, "v": head["v"] + 0}
            averages["embed.weight"] = {k: v + 0 for k, v in averages["lm_head.weight"].items()}
        if step == STEPS - 1:
            with_averages(w, averages)
