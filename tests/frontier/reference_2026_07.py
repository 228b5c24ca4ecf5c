"""The records 2026-05-27 and 2026-07-17 read from the published facts in plain float64, sharing no
code with them. Only what differs from 2026-03-06, which is row D of reference_2026.py, is here."""

from fractions import Fraction

import torch
from torch import Tensor

import reference
from frontier import reference_2026 as exact
from frontier.reference_2026 import rms_norm

LAST = 10  # the layer, from 0, that mixes streams by token, and whose heads are composed
# What small MLPs make, in the order of their rows, and what it is at first. Numbers of `mu` and
# `nu` are those of the facts.
MADE = {
    "0": "x0_0 bigram_0 x0_1 bigram_1 alpha_1 x0_2 bigram_2 x0_3 bigram_3 alpha_3 gate_3",
    "4": "x0_4 bigram_4 alpha_4 x0_5 bigram_5 skip x0_7 bigram_7 alpha_7 "
    "x0_8 bigram_8 x0_9 bigram_9 gate_10 w1_10 w2_10",
    "last": "mu0 mu1 mu2 mu3 mu4 mu5 mu6 mu7 mu10 mu11 mu8 mu9 mu12 mu13",
    "end": "nu0 nu1 nu2 nu3 nu4",
}
FIRST = {"bigram": 0.05, "gate": 0.25, "skip": 0.5, "w1": 1.0, "mu6": 2.0, "mu7": 2.0}
FIRST |= {"mu8": 1.1**0.5, "mu12": 1.1**0.5, "mu9": 1.0, "mu13": 1.0, "mu11": 0.05, "nu1": -0.5}


LAYERS = [layer._replace(gate_reads_values=True) for layer in exact.LAYERS_D]


def sizes(names: str, heads: int) -> list[int]:
    return [heads if made[0] in "agw" else 1 for made in names.split()]  # alpha, gate, w1, w2


def made_by(name: str, names: str, w: dict[str, Tensor], x: Tensor, heads: int) -> dict:
    """x (T, C) to the numbers of an MLP by their names, (T, 1), (T, heads), or (T, C) if groups of
    channels have different ones."""
    hidden = x @ w[f"mixers.{name}.hidden_w"].T
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    scale = w["mixer_scale"] if name.isdigit() else 0.1
    rows = scale * (hidden @ w[f"mixers.{name}.out_w"].T + w[f"mixers.{name}.bias"])
    parts = rows.split(sizes(names, heads), 1)
    if f"mixers.{name}.group_w" in w:
        groups = [[hidden @ row for row in matrix] for matrix in w[f"mixers.{name}.group_w"]]
        size = x.shape[1] // len(groups[0])
        groups = [torch.stack([row for row in of for _ in range(size)], 1) for of in groups]
        parts = [part + scale * of for part, of in zip(parts, groups, strict=True)]
    return dict(zip(names.split(), parts, strict=True))


def signed_bigrams(w: dict[str, Tensor], tokens: list[int]) -> Tensor:
    table, signs = w["bigram_embed.weight"], w["signs"]
    rows = [0] + [(a ^ b) % len(signs) for a, b in zip(tokens, tokens[1:], strict=False)]
    return table[exact.bigram_rows(tokens, len(table))] * signs[rows]


def mixed_logits(layers, made, w, tokens, b, reach: dict, turns: dict, heads, seen=None) -> Tensor:
    """(T, vocabulary), of `layers` and what small MLPs have `made`; b (T, C) are embeddings of
    bigrams. Windows reach so far by their names; heads turn, by whether they are narrow. Documents
    for attention are those of tokens `seen`, if they are other ones."""
    seen, c = tokens if seen is None else seen, {}
    e = w["embed.weight"][tokens]
    x = x0 = rms_norm(exact.smear(e, w["smear_gate"], w["smear_lambda"]))
    tables = [w[name][tokens] for name in w if name.startswith("value_embeds")]
    outputs = []
    for i, layer in enumerate(layers):
        name = f"blocks.{i}"
        if f"{i}" in made:
            c |= made_by(f"{i}", made[f"{i}"], w, x, heads)
        if i == 0:
            x = start = x0 + c["bigram_0"] * b
        if layer.window:
            mask = exact.visible_places(seen, reach[layer.window], 1 + layer.paired)
            case = layer, i, w, tokens, mask, turns[layer.narrow], heads, c
        if i == LAST:
            x9, out7, mu = x, outputs[7], made_by("last", made["last"], w, x, heads)
            half = [1, tables[-1].shape[1] // 2]
            added = torch.cat([mu["mu6"].repeat(half), mu["mu7"].repeat(half)], 1) * tables[-1]
            added = added + mu["mu0"] * start + mu["mu1"] * out7 + mu["mu2"] * x
            x = (1 + mu["mu5"]) * x + mu["mu3"] * start + mu["mu4"] * out7
            x = mu["mu8"] * x + mu["mu9"] * exact.attention(*case, out7, added)
            read = rms_norm(x + mu["mu10"] * start + mu["mu11"] * b)
            x = mu["mu12"] * (x + mu["mu10"] * start + mu["mu11"] * b)
            x = x + mu["mu13"] * exact.mlp(read, w, f"{name}.mlp")
            break
        residual, post = w[f"{name}.residual_lambda"], w[f"{name}.post_lambda"]
        if layer.skip is not None:
            x = x + torch.sigmoid(w["skip_weights"][0]) * c["skip"] * outputs[layer.skip]
        else:
            source = x if layer.reads is None else outputs[layer.reads]
            x = residual[0] * x
            if layer.window:
                x = x + post[0] * exact.attention(*case, source)
            x = x + (c[f"x0_{i}"] * x0 if f"x0_{i}" in c else 0)
            x = x + (c[f"bigram_{i}"] * b if f"bigram_{i}" in c and i > 0 else 0)
        read, x = rms_norm(x), residual[-1] * x
        for mlp in ("mlp", "second_mlp")[: layer.mlps]:
            x = x + post[-1] * exact.mlp(read, w, f"{name}.{mlp}")
        outputs.append(x)
    sources = start, out7, x9, tables[0], outputs[3], *tables[1:], read, rms_norm(out7)
    factors = made_by("end", made["end"], w, x, heads).values()
    x = x + sum(factor * source for factor, source in zip(factors, sources, strict=False))
    return reference.soft_capped(rms_norm(x) @ w["lm_head.weight"].T, (23.0, 5.0, 7.5))


def capped_logits(row, w: dict[str, Tensor], tokens: Tensor, step: int, heads: int) -> Tensor:
    """(T, vocabulary), before the update of `step`. w has the signs, too."""
    reach = dict(zip(("long", "short"), exact.windows(row, step), strict=True))
    turns = {False: exact.rotary(row, step, len(w["blocks.0.attn.v_w"]) // heads // 4)}
    b = signed_bigrams(w, tokens.tolist())
    return mixed_logits(LAYERS, MADE, w, tokens, b, reach, turns, heads)


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


# -----------------------------------------------------------------------------
# Numbers of whole steps, and what is scheduled, for the functions of reference_2026.py

GONE = ("backout_lambda", "skip_gates", "attn.gate", "x0_lambda", "bigram_lambda")
ADAM = {name: row for name, row in exact.ADAM_D.items() if not name.endswith(GONE)}
ADAM["mixer_scale"] = (0.1, (0.9, 0.99), 0)
for of, factor in (("mixers", 0.1), ("mixers.last", 0.25), ("mixers.end", 0.25)):
    for part, decay in (("hidden_w", 1), ("out_w", 1), ("bias", 0)):
        ADAM[f"{of}.{part}"] = (factor, (0.9, 0.99), decay)
NORMUON = {f"blocks.attn.{name}": 1 for name in ("qk_w", "v_w", "c_proj.weight")}
NORMUON |= {"blocks.mlp.c_fc.weight": 2, "blocks.mlp.c_proj.weight": 4}
ROW = exact.D._replace(adam=ADAM, normuon=NORMUON, extension=15, beta2=0.9)
HEAD = ROW._replace(steps=1270, ends=[423, 847, 1270], split=847)
V3 = ROW._replace(steps=1275, ends=[425, 850, 1275], split=851)


def prefix_share(row: exact.Row, step: int) -> Fraction:
    """Of the loss of prefixes: a quarter in stage 1, which fades to 0 in stage 2."""
    left = Fraction(row.ends[1] - step, row.ends[1] - row.ends[0])
    return Fraction(row is HEAD, 4) * min(max(left, 0), 1)
