"""The records 2026-05-27 and 2026-07-17 read from the published facts in plain float64, sharing no
code with them. Only what differs from 2026-03-06, which is row D of reference_2026.py, is here."""

from fractions import Fraction

import torch
from torch import Tensor

import reference
from frontier import reference_2026 as exact
from frontier.reference_2026 import rms_norm

# Layers, from 0. The last one mixes streams by token, and its heads are composed.
XSA, GATED, LAST = (1, 3, 4, 7), (3, 10), 10
# What small MLPs make, in the order of their rows, and what it is at first. Numbers of `mu` and
# `nu` are those of the facts.
MADE = {
    "0": "x0_0 bigram_0 x0_1 bigram_1 alpha_1 x0_2 bigram_2 x0_3 bigram_3 alpha_3 gate_3",
    "4": "x0_4 bigram_4 alpha_4 x0_5 bigram_5 skip x0_7 bigram_7 alpha_7 "
    "x0_8 bigram_8 x0_9 bigram_9 gate_10 w1 w2",
    "last": "mu0 mu1 mu2 mu3 mu4 mu5 mu6 mu7 mu10 mu11 mu8 mu9 mu12 mu13",
    "end": "nu0 nu1 nu2 nu3 nu4",
}
FIRST = {"bigram": 0.05, "gate": 0.25, "skip": 0.5, "w1": 1.0, "mu6": 2.0, "mu7": 2.0}
FIRST |= {"mu8": 1.1**0.5, "mu12": 1.1**0.5, "mu9": 1.0, "mu13": 1.0, "mu11": 0.05, "nu1": -0.5}


def sizes(name: str, heads: int) -> list[int]:
    return [heads if made[0] in "agw" else 1 for made in MADE[name].split()]  # alpha, gate, w1, w2


def made_by(name: str, w: dict[str, Tensor], x: Tensor, heads: int) -> dict[str, Tensor]:
    """x (T, C) to the numbers of an MLP, (T, 1) or (T, heads), by their names."""
    hidden = x @ w[f"mixers.{name}.hidden_w"].T
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    scale = w["mixer_scale"] if name.isdigit() else 0.1
    rows = scale * (hidden @ w[f"mixers.{name}.out_w"].T + w[f"mixers.{name}.bias"])
    return dict(zip(MADE[name].split(), rows.split(sizes(name, heads), 1), strict=True))


def sign_rows(tokens: list[int], rows: int) -> list[int]:
    return [0] + [(a ^ b) % rows for a, b in zip(tokens, tokens[1:], strict=False)]


def composed(q, k, v, tokens: Tensor, scale: float, w1: Tensor, w2: Tensor) -> Tensor:
    """All 36 pairs of a head g that attends and a head h whose values are read: (T, H, D)."""
    i, j, allowed = exact.same_document_before(tokens)
    all_values = v.flatten(1)[:, None].expand(-1, q.shape[1], -1)
    read = exact.attend(q, k, all_values, allowed & (i - j < 112), scale)
    w1 = w1 / (w1.pow(2).mean(1, keepdim=True) + 1e-6).sqrt()
    return w2[:, :, None] * sum(w1[:, g, None] * y for g, y in enumerate(read)).view(v.shape)


def attention(i, w, tokens, mask, turns, heads, x, c, table=None, extra=None) -> Tensor:
    """Of layer i with the MLPs' numbers c: x (T, C) to (T, C)."""
    layer, name, u, (frequencies, scale) = exact.LAYERS_D[i], f"blocks.{i}.attn", rms_norm(x), turns
    on_qkv, on_o = w[f"{name}.lambdas"]
    pairs = w[f"{name}.qk_w"]  # of two heads' rows: first those of q, then those of k
    found = torch.cat([u @ (on_qkv * matrix).T for matrix in (*pairs, w[f"{name}.v_w"])], 1)
    q, k, v = found.view(len(u), 3, heads, -1).unbind(1)
    position = exact.turns_of_pairs(len(u), heads) if layer.paired else None
    q, k = (exact.rope(rms_norm(part), frequencies, position) for part in (q, k))
    if layer.shifted:
        k = exact.keys_of_the_token_before(k)
    if i == LAST:
        factor = torch.cat([c["mu6"].expand(-1, heads // 2), c["mu7"].expand(-1, heads // 2)], 1)
        v = v + factor[:, :, None] * table.view(v.shape) + extra.view(v.shape)
    elif table is not None:
        read = torch.cat([u[:, :6], table[:, :6]], 1)
        v = v + 2 * exact.gate(read, w[f"{name}.value_gate"])[:, :, None] * table.view(v.shape)
    if layer.paired:
        y = exact.attend(*(exact.interleaved(part) for part in (q, k, v)), mask, scale)
        y = [of_pair[::2] for of_pair in y] + [of_pair[1::2] for of_pair in y]
    else:
        y = exact.attend(q, k, v, mask, scale)
    y = torch.stack(y, 1)
    if i == LAST:
        y = y + composed(q, k, v, tokens, scale, c["w1"], c["w2"])
    if i in XSA:
        along = (y * v).sum(2) / v.pow(2).sum(2).clamp(min=1e-8)
        y = y - (torch.tanh(c[f"alpha_{i}"]) * along)[:, :, None] * v
    if i in GATED:
        y = y * c[f"gate_{i}"][:, :, None]
    return y.flatten(1) @ (on_o * w[f"{name}.c_proj.weight"]).T


def capped_logits(row, w: dict[str, Tensor], tokens: Tensor, step: int, heads: int) -> Tensor:
    """(T, vocabulary), before the update of `step`. w has the signs, too."""
    reach = dict(zip(("long", "short"), exact.windows(row, step), strict=True))
    turns = exact.rotary(row, step, len(w["blocks.0.attn.v_w"]) // heads)
    e, table, words = w["embed.weight"][tokens], w["bigram_embed.weight"], tokens.tolist()
    x0 = rms_norm(exact.smear(e, w["smear_gate"], w["smear_lambda"]))
    signs = w["signs"][sign_rows(words, len(w["signs"]))]
    b = table[exact.bigram_rows(words, len(table))] * signs
    tables = [w[f"value_embeds.embed.{k}.weight"][tokens] for k in range(5)]
    c, outputs = made_by("0", w, x0, heads), []
    x = start = x0 + c["bigram_0"] * b
    for i, layer in enumerate(exact.LAYERS_D):
        c |= made_by("4", w, x, heads) if i == 4 else {}
        if i == 6:
            x = x + torch.sigmoid(w["skip_weights"][0]) * c["skip"] * outputs[3]
        else:
            mask = exact.visible_places(tokens, reach[layer.window], 1 + layer.paired)
            case = i, w, tokens, mask, turns, heads, x if i < 8 else outputs[7]
        if i == LAST:
            x9, out7, mu = x, outputs[7], made_by("last", w, x, heads)
            extra = mu["mu0"] * start + mu["mu1"] * out7 + mu["mu2"] * x
            x = (1 + mu["mu5"]) * x + mu["mu3"] * start + mu["mu4"] * out7
            x = mu["mu8"] * x + mu["mu9"] * attention(*case, c | mu, tables[4], extra)
            x = x + mu["mu10"] * start + mu["mu11"] * b
            x = mu["mu12"] * x + mu["mu13"] * exact.mlp(rms_norm(x), w, i)
            continue
        residual, post = w[f"blocks.{i}.residual_lambda"], w[f"blocks.{i}.post_lambda"]
        if i != 6:
            of_table = None if layer.table is None else tables[layer.table]
            x = residual[0] * x + post[0] * attention(*case, c, of_table) + c[f"x0_{i}"] * x0
            x = x + (c[f"bigram_{i}"] * b if i > 0 else 0)
        x = residual[-1] * x + post[-1] * exact.mlp(rms_norm(x), w, i)
        outputs.append(x)
    nu = made_by("end", w, x, heads)
    x = x + nu["nu0"] * start + nu["nu1"] * out7 + nu["nu2"] * x9 + nu["nu3"] * tables[0]
    logits = rms_norm(x + nu["nu4"] * outputs[3]) @ w["lm_head.weight"].T
    return reference.soft_capped(logits, (23.0, 5.0, 7.5))


def prefixes(words: list[bytes]) -> list[int]:
    """Of each word the longest other one that it begins with, or -1: in sorted order, words that
    begin it are among those which began the word before."""
    found, begun = [-1] * len(words), []
    for word, number in sorted(zip(words, range(len(words)), strict=True)):
        while begun and not word.startswith(words[begun[-1]]):
            begun.pop()
        found[number] = begun[-1] if begun else -1
        begun.append(number)
    return found


def loss(row, w: dict, tokens, targets, before: Tensor, step: int, heads: int) -> tuple:
    """What is trained at a step, with a share of the loss of targets' prefixes, which are `before`
    (V,), and the mean loss of the next token."""
    capped, trained = capped_logits(row, w, tokens, step, heads), 0.0
    for k, weight in enumerate(exact.target_weights(row, step)):
        losses = exact.cross_entropies(capped[: len(targets) - k], targets[k:])
        trained = trained + float(weight) * losses.sum()
    known = before[targets] >= 0
    of_prefixes = exact.cross_entropies(capped[known], before[targets][known]).sum()
    trained = trained + float(prefix_share(row, step)) * of_prefixes
    return trained, exact.cross_entropies(capped, targets).mean()


# -----------------------------------------------------------------------------
# Whole steps, and what is scheduled. reference_2026.py's functions compute these with the following
# in place of their own EXTENSION, matrices and normuon_step.

EXTENSION = 15


def matrices(name: str, *tensors: Tensor) -> list[tuple]:
    """A key and the single matrices: of q and k each pair of heads is one."""
    each = zip(*tensors, strict=True) if name.endswith("qk_w") else [tensors]
    return [(f"{name}[{i}]", *parts) for i, parts in enumerate(each)]


def normuon_step(p, g, state: dict, lr: float, lr_factor: float, momentum: float) -> None:
    """With a running mean over ten steps. Wide matrices have a mean square for each column."""
    x = exact.polar_express(exact.nesterov(g, state, momentum))
    square = x.pow(2).mean(0 if x.shape[0] < x.shape[1] else 1, keepdim=True)
    state["square"] = state.get("square", 0 * square) * 0.9 + square * 0.1
    v = x / state["square"].clamp(min=1e-10).sqrt()
    v = v * x.norm() / v.norm().clamp(min=1e-10)
    p -= lr_factor * lr * (v + 1.2 * lr * torch.where(v * p >= 0, p, 0.0))


GONE = ("backout_lambda", "skip_gates", "attn.gate", "x0_lambda", "bigram_lambda")
ADAM = {name: row for name, row in exact.ADAM_D.items() if not name.endswith(GONE)}
ADAM["mixer_scale"] = (0.1, (0.9, 0.99), 0)
for of, factor in (("mixers", 0.1), ("mixers.last", 0.25), ("mixers.end", 0.25)):
    for part, decay in (("hidden_w", 1), ("out_w", 1), ("bias", 0)):
        ADAM[f"{of}.{part}"] = (factor, (0.9, 0.99), decay)
NORMUON = {f"blocks.attn.{name}": 1 for name in ("qk_w", "v_w", "c_proj.weight")}
NORMUON |= {"blocks.mlp.c_fc.weight": 2, "blocks.mlp.c_proj.weight": 4}
ROW = exact.D._replace(adam=ADAM, normuon=NORMUON)
HEAD = ROW._replace(steps=1270, ends=[423, 847, 1270], split=847)
V3 = ROW._replace(steps=1275, ends=[425, 850, 1275], split=851)


def prefix_share(row: exact.Row, step: int) -> Fraction:
    """Of the loss of prefixes: a quarter in stage 1, which fades to 0 in stage 2."""
    left = Fraction(row.ends[1] - step, row.ends[1] - row.ends[0])
    return Fraction(row is HEAD, 4) * min(max(left, 0), 1)
