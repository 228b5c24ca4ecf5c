"""Six records read from the published facts in plain float64, sharing no code with them:
2025-08-23 (row A, whose model is in reference.py), GPT-2 medium of 2025-12-31 (M), 2026-01-04 (B),
2026-01-19 (C), 2026-01-26 (C5, which is C with five value tables) and 2026-03-06 (D)."""

import math
import re
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import reference
from reference import attend, gate, mlp, rope

END_OF_TEXT = 50256
EPSILON = 2.0**-23  # of RMSNorm: float32's machine epsilon

# -----------------------------------------------------------------------------
# Parts of the models


def rms_norm(x: Tensor) -> Tensor:
    return reference.rms_norm(x, EPSILON)


def yarn(windows: list[int], pairs: int, scale: float = 0.1) -> tuple[list[float], float]:
    """Frequencies of the channel pairs that turn, and attention's scale, after these windows, in
    blocks of 128. At first frequencies go from 1 to 1/1024. As the window grows from a to b, those
    of less than one turn in the old window fall to a/b of what they were, those of more than 32
    turns stay, those between are interpolated."""
    frequencies = [1024.0 ** (-j / (pairs - 1)) for j in range(pairs)]
    for old, new in zip(windows, windows[1:], strict=False):
        for j, frequency in enumerate(frequencies):
            turns = 128 * old * frequency / (2 * math.pi)
            stays = min(max((turns - 1) / (32 - 1), 0.0), 1.0)
            frequencies[j] = frequency * (stays + (1 - stays) * old / new)
        scale *= 1 + 0.2 * math.log(new / old)
    return frequencies, scale


def keys_of_the_token_before(k: Tensor) -> Tensor:
    """k (T, heads, D) with the channels that never turn taken from position t - 1, of whatever
    document it is; position 0 keeps its own."""
    quarter = k.shape[-1] // 4
    out = k.clone()
    for start in (quarter, 3 * quarter):
        still = slice(start, start + quarter)
        out[1:, :, still] = k[:-1, :, still]
    return out


def visible_places(tokens: Tensor, window: int, places: int = 1) -> Tensor:
    """From row B on: a place and the `window` places before it in its document. A token is one, or
    two in a layer of paired heads."""
    document = (tokens == END_OF_TEXT).cumsum(0).repeat_interleave(places)
    i, j = torch.arange(len(document))[:, None], torch.arange(len(document))[None, :]
    return (j <= i) & (i - j <= window) & (document[:, None] == document[None, :])


def project(x: Tensor, matrices, heads: int) -> list[Tensor]:
    """q, k and v, each (T, heads, D), of x (T, C) and matrices that together make them."""
    found = torch.cat([x @ matrix.T for matrix in matrices], 1)
    return found.view(len(x), 3, heads, -1).unbind(1)


def loss(capped: Tensor, targets: Tensor, weights, before=None, share=0.0) -> tuple[Tensor, Tensor]:
    """What is trained, the sum over tokens t and k of weight k * CE(logits t, target t + k), and
    the mean loss of the next token. Logits (T, n) have columns for targets (T,). With prefixes of
    targets, `before` (n,), of which -1 is none, a share of their loss is trained, too."""
    trained = torch.zeros((), dtype=torch.float64)
    for k, weight in enumerate(weights):
        losses = F.cross_entropy(capped[: len(targets) - k], targets[k:], reduction="sum")
        trained = trained + float(weight) * losses
    if before is not None:
        known = before[targets] >= 0
        of_prefixes = F.cross_entropy(capped[known], before[targets][known], reduction="sum")
        trained = trained + float(share) * of_prefixes
    return trained, F.cross_entropy(capped, targets)


# -----------------------------------------------------------------------------
# Rows M, B, C, C5 and D: what differs between them


class Layer(NamedTuple):
    """What attention sees and reads, and what is added."""

    window: str | None = "short"  # None: no attention
    table: int | None = None  # of value embeddings, added to v
    shifted: bool = False  # the unturned half of k is that of the token before
    paired: bool = False  # the heads of a pair attend as one of twice the length
    skip: int | None = None  # the layer whose gated output is added to the input
    reads: int | None = None  # the layer whose output attention reads instead of the input
    gate_reads_values: bool = False  # that of a value embedding
    narrow: bool = False  # q and k have only the channels that turn
    narrow_values: bool = False  # v has only the first half of its channels
    mlps: int = 1


LAYERS_B = [
    Layer(table=1),
    Layer(table=2),
    Layer(),
    Layer("long", shifted=True),
    Layer(),
    Layer(),
    Layer(None, skip=3),
    Layer(),
    Layer(table=0),
    Layer(table=1),
    Layer("long", table=2, shifted=True),
]
TABLES_C5 = {0: 0, 1: 1, 8: 2, 9: 3, 10: 4}  # by layer
TABLES_D = {1: 0, 2: 1, 8: 2, 9: 3, 10: 4}
LAYERS_C = [layer._replace(paired=i in (0, 2, 5, 9)) for i, layer in enumerate(LAYERS_B)]
LAYERS_C5 = [layer._replace(table=TABLES_C5.get(i)) for i, layer in enumerate(LAYERS_C)]
LAYERS_D = [
    layer._replace(
        table=TABLES_D.get(i), reads=7 if i > 7 else None, gate_reads_values=not layer.paired
    )
    for i, layer in enumerate(LAYERS_C)
]
LONG_M, TABLES_M, SKIPS_M = (0, 4, 11, 15), [*range(5)] + [None] * 6 + [*range(5)], [6, 4, 2]
LAYERS_M = [
    Layer("long" if i in LONG_M else "short", TABLES_M[i], shifted=i in LONG_M) for i in range(16)
]
for i, below in enumerate(SKIPS_M, 9):
    LAYERS_M[i] = LAYERS_M[i]._replace(skip=below)

ADAM_B = {  # times the learning rate .008, betas, times the decay .005
    "lm_head.weight": (1, (0.5, 0.95), 150),
    "embed.weight": (1, (0.5, 0.95), 150),
    "value_embeds.embed.weight": (75, (0.75, 0.95), 5),
    "blocks.lambdas": (5, (0.9, 0.99), 0),
    "blocks.attn.lambdas": (5, (0.9, 0.99), 0),
    "smear_lambda": (5, (0.9, 0.99), 0),
    "backout_lambda": (5, (0.9, 0.99), 0),
    "skip_weights": (5, (0.9, 0.99), 0),
    "blocks.x0_lambda": (5, (0.65, 0.95), 0),
    "blocks.attn.gate": (1, (0.9, 0.99), 1),
    "blocks.attn.value_gate": (1, (0.9, 0.99), 1),
    "smear_gate": (0.01, (0.9, 0.99), 0),
    "skip_gates": (0.05, (0.9, 0.99), 0),
}
ADAM_C = ADAM_B | {
    "bigram_embed.weight": (75, (0.75, 0.95), 5),
    "blocks.bigram_lambda": (5, (0.9, 0.99), 0),
}
ADAM_D = ADAM_C | {
    "blocks.residual_lambda": (5, (0.9, 0.95), 0),
    "blocks.post_lambda": (1, (0.9, 0.95), 0),
    "blocks.x0_lambda": (1, (0.9, 0.95), 0),
    "blocks.bigram_lambda": (1, (0.9, 0.95), 0),
}
del ADAM_D["blocks.lambdas"]
ADAM_M = {  # times .004; only decays are as above
    "lm_head.weight": (1, (0.8, 0.95), 150),
    "embed.weight": (1, (0.8, 0.95), 150),
    "value_embeds.embed.weight": (75, (0.8, 0.95), 5),
    "second_embed.weight": (75, (0.8, 0.95), 5),
    "blocks.x0_lambda": (5, (0.8, 0.95), 0),
    "blocks.second_lambda": (5, (0.8, 0.95), 0),
    "smear_gate": (0.01, (0.8, 0.95), 0),
    "skip_gates": (0.01, (0.8, 0.95), 0),
}
SCALARS_M = ("blocks.lambdas", "blocks.attn.lambdas", "smear_lambda", "backout_lambda")
for name in (*SCALARS_M, "skip_weights"):
    ADAM_M[name] = (10, (0.9, 0.99), 0)
NORMUON_B = {  # times the learning rate .023; q, k, v and o lie in one tall matrix and get its 2
    "blocks.attn.qkv_w": 2,
    "blocks.attn.c_proj.weight": 2,
    "blocks.mlp.c_fc.weight": 2,
    "blocks.mlp.c_proj.weight": 4,
}
NORMUON_M = NORMUON_B | {"blocks.attn.gate": 0.1, "blocks.attn.value_gate": 0.1}  # times .015
NORMUON_C = NORMUON_B | {"blocks.attn.qkv_w": 1, "blocks.attn.c_proj.weight": 1}


BLOCKS = [(3, 1), (7, 3), (11, 5), (13, 6)]  # long and short windows by stage


class Row(NamedTuple):
    """A later record. It has `steps` in stages, three but in row M, and an extension."""

    layers: list[Layer]
    steps: int
    ends: list  # of the stages: a stage begins with the first step from there on
    lr_is_late: bool  # the learning rate changes with the first step after there
    cooldown: Fraction  # the share of `steps` in which the learning rate falls
    floor: Fraction  # what it falls to
    split: int  # after this step, embedding and head are two matrices
    adam: dict
    normuon: dict
    caps: tuple[int, int, int] = (2048, 2048, 2048)  # longest part of a document, by stage
    bigrams: bool = True
    sublayer_lambdas: bool = False
    extension: int = 40  # steps
    beta2: float = 0.95  # NorMuon's
    backout: int = 7  # the layer whose output is taken out again at the end
    blocks: list[tuple[int, int]] = BLOCKS
    last_window: int = 20  # in blocks
    longest_turned: int = 999  # YaRN ends with this window, in blocks
    largest: int = 3  # the largest batch, as a multiple of the first one
    rates: tuple[Fraction, ...] = (Fraction(1), Fraction(152, 100), Fraction(173, 100))
    adam_lr: float = 0.008
    adam_eps: float = 1e-10
    muon_lr: float = 0.023


def thirds(steps: int) -> list[Fraction]:
    return [Fraction(k * steps, 3) for k in (1, 2, 3)]


B = Row(
    LAYERS_B,
    steps=1800,
    ends=thirds(1800),
    lr_is_late=True,
    cooldown=Fraction(50, 100),
    floor=Fraction(10, 100),
    split=1201,
    adam=ADAM_B,
    normuon=NORMUON_B,
    bigrams=False,
)
ALL_M = [3, 7, 11, 13, 15, 17, 19, 21, 23, 23, 23, 23, 23]  # by twelfths, and in the extension
M = B._replace(
    layers=LAYERS_M,
    steps=4700,
    ends=[Fraction(k * 4700, 12) for k in range(1, 13)],
    cooldown=Fraction(70, 100),
    split=785,
    adam=ADAM_M,
    normuon=NORMUON_M,
    caps=(4096, 4096, 4096),
    backout=11,
    blocks=[(long, min(11, long // 2)) for long in ALL_M],
    last_window=27,
    longest_turned=13,
    largest=4,
    rates=(*B.rates, Fraction(2)),
    adam_lr=0.004,
    adam_eps=1e-8,
    muon_lr=0.015,
)
C = B._replace(
    layers=LAYERS_C,
    steps=1560,
    ends=thirds(1560),
    cooldown=Fraction(55, 100),
    split=1041,
    adam=ADAM_C,
    normuon=NORMUON_C,
    bigrams=True,
)
C5 = C._replace(layers=LAYERS_C5, steps=1535, ends=thirds(1535), split=1025)
D = C._replace(
    layers=LAYERS_D,
    steps=1450,
    ends=[483, 967, 1450],
    lr_is_late=False,
    cooldown=Fraction(60, 100),
    floor=Fraction(15, 100),
    split=967,
    adam=ADAM_D,
    caps=(896, 2048, 2048),
    sublayer_lambdas=True,
)

# -----------------------------------------------------------------------------
# Their model


def smear(e: Tensor, weight: Tensor, smear_lambda: Tensor) -> Tensor:
    """To each raw embedding but the first, a gated part of the one before: across documents, and
    from the embeddings as they were."""
    return torch.cat([e[:1], e[1:] + smear_lambda * gate(e[1:], weight) * e[:-1]])


def int32(n: int) -> int:
    """What is left of a product of whole numbers in 32 bits with a sign."""
    return (n + 2**31) % 2**32 - 2**31


def bigram_rows(tokens: list[int], rows: int) -> list[int]:
    """Of a table of `rows` rows, the one for each token and the token before it, of whatever
    document. The first token has the last row, and is that number for the second one."""
    last = rows - 1
    known = [last, *tokens[1:]]
    found = [last]
    for before, token in zip(known, known[1:], strict=False):
        found.append((int32(36313 * token) ^ int32(27191 * before)) % last)
    return found


def interleaved(x: Tensor) -> Tensor:
    """(T, heads, D) to (2T, heads / 2, D): a token's first half of the heads, then its second."""
    return torch.stack(x.chunk(2, 1), 1).flatten(0, 1)


def turns_of_pairs(tokens: int, heads: int) -> Tensor:
    """(T, heads): head 0 turns by the token's first place, head 1 by its second, head 2 by its
    first, ... (not by the place where `interleaved` has it)."""
    return torch.tensor([[2 * t + h % 2 for h in range(heads)] for t in range(tokens)])


def rotating(width: int) -> list[int]:
    """The channels of a head that turn: in both halves the first half."""
    return [d for d in range(width) if d % (width // 2) < width // 4]


def composed(q, k, v, tokens: Tensor, scale: float, w1: Tensor, w2: Tensor) -> Tensor:
    """All 36 pairs of a head g that attends and a head h whose values are read: (T, H, D)."""
    all_values = v.flatten(1)[:, None].expand(-1, q.shape[1], -1)
    read = attend(q, k, all_values, visible_places(tokens, 111), scale)
    w1 = reference.rms_norm(w1, 1e-6)
    return w2[:, :, None] * (w1[:, :, None] * read).sum(1).view(v.shape)


def attention(layer: Layer, i, w, tokens, mask, turns, heads, c, x, added=None) -> Tensor:
    """Of layer i: x (T, C) to (T, C). c are numbers of tokens, (T, 1) or (T, heads), that MLPs make
    from May 2026 on, by their names, which end with the layer. `added` (T, C) goes to v."""
    name, u, (frequencies, scale) = f"blocks.{i}.attn", rms_norm(x), turns
    on_qkv, on_o = w[f"{name}.lambdas"]
    if f"{name}.qkv_w" in w:
        matrices = w[f"{name}.qkv_w"]
    else:  # of two heads each: first those of q, then those of k
        matrices = [*w[f"{name}.qk_w"], w[f"{name}.v_w"]]
    q, k, v = project(u, [on_qkv * matrix for matrix in matrices], heads)
    width = v.shape[2]
    o = (on_o * w[f"{name}.c_proj.weight"]).view(-1, heads, width)
    if layer.narrow:
        q, k = q[:, :, rotating(width)], k[:, :, rotating(width)]
    position = turns_of_pairs(len(u), heads) if layer.paired else None
    q, k = (rope(rms_norm(part), frequencies, position) for part in (q, k))
    if layer.shifted:
        k = keys_of_the_token_before(k)
    if added is not None:
        v = v + added.view(v.shape)
    elif layer.table is not None:
        values, read = w[f"value_embeds.embed.{layer.table}.weight"][tokens], u
        if layer.gate_reads_values:
            read = torch.cat([u[:, :6], values[:, :6]], 1)
        v = v + 2 * gate(read, w[f"{name}.value_gate"])[:, :, None] * values.view(v.shape)
    if layer.narrow_values:
        v, o = v[:, :, : width // 2], o[:, :, : width // 2]
    if layer.paired:
        y = attend(interleaved(q), interleaved(k), interleaved(v), mask, scale)
        y = torch.cat([y[::2], y[1::2]], 1)
    else:
        y = attend(q, k, v, mask, scale)
    if f"w1_{i}" in c:
        y = y + composed(q, k, v, tokens, scale, c[f"w1_{i}"], c[f"w2_{i}"])
    if f"alpha_{i}" in c:
        along = (y * v).sum(2) / v.pow(2).sum(2).clamp(min=1e-8)
        y = y - (torch.tanh(c[f"alpha_{i}"]) * along)[:, :, None] * v
    if f"{name}.gate" in w:
        y = y * gate(u, w[f"{name}.gate"])[:, :, None]
    elif f"gate_{i}" in c:
        y = y * c[f"gate_{i}"][:, :, None]
    return torch.einsum("thd,chd->tc", y, o)


def capped_logits(row: Row, w: dict[str, Tensor], tokens: Tensor, step: int, heads: int) -> Tensor:
    """(T, vocabulary), before the update of `step`."""
    reach = dict(zip(("long", "short"), windows(row, step), strict=True))
    kinds = {(layer.window, layer.paired) for layer in row.layers if layer.window}
    masks = {kind: visible_places(tokens, reach[kind[0]], 1 + kind[1]) for kind in kinds}
    turns = rotary(row, step, w["blocks.0.attn.qkv_w"].shape[1] // heads // 4)

    x = x0 = rms_norm(smear(w["embed.weight"][tokens], w["smear_gate"], w["smear_lambda"]))
    if "second_embed.weight" in w:
        second = rms_norm(w["second_embed.weight"][tokens])
    if row.bigrams:
        table = w["bigram_embed.weight"]
        bigram = table[bigram_rows(tokens.tolist(), len(table))]
    if row.sublayer_lambdas:
        x = x + w["blocks.0.bigram_lambda"] * bigram
    outputs = []
    for i, layer in enumerate(row.layers):
        name = f"blocks.{i}"
        if layer.skip is not None:
            k = i - len(row.layers)
            open_ = torch.sigmoid(w["skip_weights"][k]) * 2 * gate(x0, w["skip_gates"][k, None])
            x = x + open_ * outputs[layer.skip]
        if layer.window:
            mask = masks[layer.window, layer.paired]
            attended = partial(attention, layer, i, w, tokens, mask, turns, heads, {})

        if not row.sublayer_lambdas:
            x = w[f"{name}.lambdas"] * x + w[f"{name}.x0_lambda"] * x0
            if "second_embed.weight" in w:
                x = x + w[f"{name}.second_lambda"] * second
            if row.bigrams:
                x = x + w[f"{name}.bigram_lambda"] * bigram
            if layer.window:
                x = x + attended(x)
            x = x + mlp(rms_norm(x), w, f"{name}.mlp")
        else:
            residual, post = w[f"{name}.residual_lambda"], w[f"{name}.post_lambda"]
            if layer.window:
                read = x if layer.reads is None else outputs[layer.reads]
                x = residual[0] * x + post[0] * attended(read) + w[f"{name}.x0_lambda"] * x0
                if i > 0:
                    x = x + w[f"{name}.bigram_lambda"] * bigram
            x = residual[-1] * x + post[-1] * mlp(rms_norm(x), w, f"{name}.mlp")
        outputs.append(x)
    x = rms_norm(x - w["backout_lambda"] * outputs[row.backout])
    return reference.soft_capped(x @ w["lm_head.weight"].T, (23.0, 5.0, 7.5))


# -----------------------------------------------------------------------------
# Update rules. p changes in place; `state` is a dict that is empty before the first step.

QUINTIC_A = [(3.4445, -4.7750, 2.0315)] * 5
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def quintics(x: Tensor, coefficients: list[tuple]) -> Tensor:
    """X <- aX + b(XXt)X + c(XXt)(XXt)X for each (a, b, c); of a tall X this is the same transposed,
    with less work."""
    if x.shape[0] > x.shape[1]:
        return quintics(x.T, coefficients).T
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + b * (gram @ x) + c * (gram @ gram @ x)
    return x


def nesterov(g: Tensor, state: dict, momentum: float) -> Tensor:
    """The damped form: a running mean, and a direction between it and the gradient."""
    mean = state.get("momentum", torch.zeros_like(g))
    state["momentum"] = momentum * mean + (1 - momentum) * g
    return (1 - momentum) * g + momentum * state["momentum"]


def muon_step(p: Tensor, g: Tensor, state: dict, lr: float, momentum: float) -> None:
    """Row A, one matrix: no decay, and no factor for its shape."""
    x = nesterov(g, state, momentum)
    p -= lr * quintics(x / (x.norm() + 1e-7), QUINTIC_A)


def equal_neurons(x: Tensor, state: dict, beta2: float, rows: bool = False) -> Tensor:
    """Each neuron, a row of the matrix stood upright (of gates, a row), is divided by the running
    root mean square of its updates (from 0, not corrected), and the whole brought back to its old
    norm."""
    square = x.pow(2).mean(1 if rows or x.shape[0] >= x.shape[1] else 0, keepdim=True)
    state["square"] = beta2 * state.get("square", 0 * square) + (1 - beta2) * square
    v = x / state["square"].clamp(min=1e-10).sqrt()
    return v * x.pow(2).sum().sqrt() / v.pow(2).sum().sqrt().clamp(min=1e-10)


def normuon_step(
    p, g, state: dict, lr: float, lr_factor, momentum: float, beta2: float, rows: bool = False
) -> None:
    """From row B on, one matrix. Decay is of the learning rate squared, once with the matrix's
    factor, where update and weight do not disagree: a zero update decays."""
    x = nesterov(g, state, momentum)
    x = quintics(x / (1.02 * x.norm() + 1e-6), POLAR_EXPRESS)
    v = equal_neurons(x, state, beta2, rows)
    agrees = (v * p >= 0).double()
    p -= lr_factor * lr * v + lr_factor * lr * 1.2 * lr * p * agrees


def adam_step(
    p: Tensor, g: Tensor, state: dict, lr: float, betas: tuple[float, float], decay, eps=1e-10
) -> None:
    """Epsilon is added to the root before the correction of the bias. Decay is lr squared * decay,
    where update and weight have one sign; `lr` has the parameter's own factor in it."""
    beta1, beta2 = betas
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = beta1 * state.get("m", torch.zeros_like(g)) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", torch.zeros_like(g)) + (1 - beta2) * g * g
    corrected_lr = lr * math.sqrt(1 - beta2**t) / (1 - beta1**t)
    update = corrected_lr * state["m"] / (state["v"].sqrt() + eps)
    agrees = (update * p > 0).double()
    p -= update + lr * lr * decay * p * agrees


# -----------------------------------------------------------------------------
# Whole steps. w has all weights by name, gradients one dict by name for each step (sums over a
# sequence's tokens, averaged over the sequences); w changes in place.

ADAM_A = {  # learning rate; all other parameters, the gates too, are Muon's
    "embed.weight": 0.6,
    "value_embeds.embed.weight": 0.6,
    "lm_head.weight": 0.008,
    "skip_weights": 0.04,
    "blocks.lambdas": 0.04,
    "blocks.attn.lambdas": 0.04,
}


def without_numbers(name: str) -> str:
    return re.sub(r"\.\d+", "", name)


def rule_a(name: str, step: int) -> partial:
    """Of row A, for a parameter at a step."""
    m, momentum = float(multiplier_a(step)), float(ramp(step))
    if name in ADAM_A:
        return partial(adam_step, lr=m * ADAM_A[name], betas=(0.8, 0.95), decay=0.0)
    return partial(muon_step, lr=0.05 * m, momentum=momentum)


def rule(row: Row, name: str, step: int) -> partial | None:
    """From row B on: NorMuon acts on every step, Adam on odd ones with the sum of two gradients."""
    m, momentum = float(multiplier(row, step)), float(momentum_of(row, step))
    if name in row.normuon:
        numbers = {"lr_factor": row.normuon[name], "momentum": momentum, "beta2": row.beta2}
        return partial(normuon_step, lr=row.muon_lr * m, rows="gate" in name, **numbers)
    factor, betas, decay = row.adam[name]
    numbers = {"betas": betas, "decay": 0.005 * decay, "eps": row.adam_eps}
    adam = partial(adam_step, lr=row.adam_lr * m * factor, **numbers)
    return None if step % 2 == 0 else adam


def play(w: dict[str, Tensor], gradients: list[dict], first: int, rule, tied, after=None) -> None:
    """The steps first, first + 1, ... rule(name, step) is that of a parameter by its name without
    numbers; without one, gradients wait. While tied(step) holds, to an odd step, the embedding is
    the head: its gradient is added to the head's, it is copied from the head after each update, and
    after the last such it gets a copy of the head's moments and of their count."""
    states, waiting = {}, {}
    for step, of_step in enumerate(gradients, first):
        for name, g in of_step.items():
            waiting[name] = waiting.get(name, 0) + g
        for name in list(waiting):
            update = rule(without_numbers(name), step)
            if update is None or (tied(step) and name == "embed.weight"):
                continue
            g = waiting.pop(name)
            if tied(step) and name == "lm_head.weight":
                g = g + waiting.pop("embed.weight")
            # q, k and v, or q and k of pairs of heads, are one parameter but several matrices.
            parts = zip(w[name], g, strict=True) if g.ndim == 3 else [(w[name], g)]
            for k, (matrix, of_matrix) in enumerate(parts):
                update(matrix, of_matrix, states.setdefault(f"{name} {k}", {}))
        if tied(step) and step % 2 == 1:
            w["embed.weight"].copy_(w["lm_head.weight"])
        if after:
            after(w, step)
        if tied(step) and not tied(step + 1):
            states["embed.weight 0"] = {k: v + 0 for k, v in states["lm_head.weight 0"].items()}


# -----------------------------------------------------------------------------
# Schedules of row A: 1695 steps of 8 sequences of 49152 tokens, documents of any length

STEPS_A = 1695


def multiplier_a(step: int) -> Fraction:
    """Of all learning rates: 1, then to .1 over the last 45 %."""
    w = min((1 - Fraction(step, STEPS_A)) / Fraction(45, 100), Fraction(1))
    return w + (1 - w) * Fraction(1, 10)


def ramp(step: int) -> Fraction:
    """Muon's momentum from .85 to .95 over 300 steps."""
    return Fraction(85, 100) + Fraction(10, 100) * min(Fraction(step, 300), Fraction(1))


def windows_a(step: int) -> tuple[int, int]:
    """Long and short in tokens: the blocks that cover 1728 * step / steps, and half of them, each
    at least one."""
    blocks = max(math.ceil(Fraction(1728 * step, STEPS_A * 128)), 1)
    return 128 * blocks, 128 * max(blocks // 2, 1)


# -----------------------------------------------------------------------------
# Schedules of all other rows: stages, and an extension


def stage(row: Row, step: int) -> int:
    """0, 1, 2, ..., and the last number for the extension."""
    return sum(step >= end for end in row.ends)


def tokens_of(row: Row, step: int) -> int:
    """A sequence's; the extension's are the last stage's."""
    return 16384 * (min(stage(row, step), row.largest - 1) + 1)


def document_cap(row: Row, step: int) -> int:
    return row.caps[min(stage(row, step), 2)]


def multiplier(row: Row, step: int) -> Fraction:
    """Of all learning rates: it grows with the batch, with it or a step after it, and falls to the
    floor over the last steps before the extension."""
    changes = row.ends[: len(row.rates) - 1]
    m = row.rates[sum(step > end if row.lr_is_late else step >= end for end in changes)]
    left = (1 - Fraction(step, row.steps)) / row.cooldown
    left = min(max(left, Fraction(0)), Fraction(1))
    return m * left + row.floor * (1 - left)


def momentum_of(row: Row, step: int) -> Fraction:
    """As in row A, and back to .85 over the last 50 of all steps."""
    left = Fraction(row.steps + row.extension - step, 50)
    return ramp(step) - Fraction(10, 100) * (1 - min(left, Fraction(1)))


def windows(row: Row, step: int) -> tuple[int, int]:
    """Long and short in tokens, or in places. The step after all is the last validation, with a
    long window of its own."""
    long, short = row.blocks[stage(row, step)]
    if step >= row.steps + row.extension:
        long = row.last_window
    return 128 * long, 128 * short


def rotary(row: Row, step: int, pairs: int = 32) -> tuple[list[float], float]:
    """Frequencies and attention's scale; the last validation's window does not change them."""
    begun = [long for long, _ in row.blocks[: stage(row, step) + 1]]
    return yarn([long for long in begun if long <= row.longest_turned], pairs)


def target_weights(row: Row, step: int) -> list[Fraction]:
    """Of the next token and those after it; the last of each stage fades to 0 within it, and is
    gone in the next."""
    first, second, *_ = row.ends
    if stage(row, step) == 0:
        return [Fraction(1), Fraction(1, 2), Fraction(1, 4) * (1 - Fraction(step) / first)]
    if stage(row, step) == 1:
        return [Fraction(1), Fraction(1, 2) * (second - step) / (second - first)]
    return [Fraction(1)]


def is_tied(row: Row, step: int) -> bool:
    """Whether the forward pass of `step` has one matrix as embedding and head."""
    return step <= row.split


# -----------------------------------------------------------------------------
# Batches of one shard, a list of tokens: for each step a list of (inputs, targets)

Batch = list[tuple[list[int], list[int]]]


def document_starts(tokens: list[int]) -> list[int]:
    return [i for i, token in enumerate(tokens) if token == END_OF_TEXT]


def batches_a(tokens: list[int], seq_len: int, batch_seqs: int) -> list[Batch]:
    """A sequence begins with a document; the next one begins with the first document `seq_len`
    tokens later or more. The shard is left when no more than two batches and a token are ahead of
    the next batch, or no document follows."""
    starts = document_starts(tokens)
    batches, position = [], 0
    while position + 2 * batch_seqs * seq_len + 1 < len(tokens):
        batch, at_least = [], position
        while len(batch) < batch_seqs:
            start = min([s for s in starts if s >= at_least], default=len(tokens))
            at_least = start + seq_len
            batch.append((tokens[start:at_least], tokens[start + 1 : at_least + 1]))
        position = min([s for s in starts if s >= at_least], default=len(tokens))
        if position == len(tokens):
            break
        batches.append(batch)
    return batches


def batches_b(
    tokens: list[int], lengths_by_step: list[int], cap_by_step: list[int], batch_seqs: int
) -> list[Batch]:
    """A sequence is the beginnings of documents, each up to the step's cap, until they are the
    step's length and one token. What is left of a document is dropped, as is an unfinished batch:
    the next shard begins with that step."""
    starts = document_starts(tokens)
    ends = starts[1:] + [len(tokens)]
    documents = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
    batches, taken = [], 0
    for length, cap in zip(lengths_by_step, cap_by_step, strict=True):
        batch = []
        while len(batch) < batch_seqs:
            sequence = []
            while len(sequence) < length + 1:
                if taken == len(documents):
                    return batches
                sequence += documents[taken][:cap]
                taken += 1
            batch.append((sequence[:length], sequence[1 : length + 1]))
        batches.append(batch)
    return batches
