"""The records of 2025-08-23 (row A) and 2026-01-04 (row B) read from the published facts in plain
float64, sharing no code with them: model and loss, update rules, schedules, batches.

The model of 2025-01-26, from which both descend, is in reference.py.
"""

import math
import re
from fractions import Fraction

import reference
import torch
from torch import Tensor

END_OF_TEXT = 50256
EPSILON = 2.0**-23  # of RMSNorm: float32's machine epsilon
GATE_CHANNELS = 12  # every gate reads the first 12 channels of its input

# -----------------------------------------------------------------------------
# Parts of both models


def rms_norm(x: Tensor, eps: float = EPSILON) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def gate(x: Tensor, weight: Tensor) -> Tensor:
    """x (T, C), weight (n, 12): n numbers between 0 and 1 for each token, (T, n)."""
    return torch.sigmoid(x[:, :GATE_CHANNELS] @ weight.T)


def yarn(windows: list[int], head_dim: int) -> tuple[list[float], float]:
    """Frequencies of the D/4 channel pairs that turn, and attention's scale, after the long window
    has been each of `windows` (in blocks of 128) in turn.

    They begin from 1 to 1/1024, both ends included, and .1. As the window grows from a to b,
    frequencies of less than one turn in the old window fall to a/b of what they were, those of more
    than 32 turns stay, those between are interpolated; the scale grows with the logarithm.
    """
    pairs = head_dim // 4
    frequencies = [1024.0 ** (-j / (pairs - 1)) for j in range(pairs)]
    scale = 0.1
    for old, new in zip(windows, windows[1:], strict=False):
        for j, frequency in enumerate(frequencies):
            turns = 128 * old * frequency / (2 * math.pi)
            stays = min(max((turns - 1) / (32 - 1), 0.0), 1.0)
            frequencies[j] = frequency * (stays + (1 - stays) * old / new)
        scale *= 1 + 0.2 * math.log(new / old)
    return frequencies, scale


def rope(x: Tensor, frequencies: list[float]) -> Tensor:
    """x (T, heads, D): channels d and d + D/2 turn as a pair, the first D/4 of each half."""
    half = x.shape[-1] // 2
    position = torch.arange(len(x), dtype=torch.float64)[:, None]
    out = x.clone()
    for d, frequency in enumerate(frequencies):
        cos, sin = torch.cos(position * frequency), torch.sin(position * frequency)
        out[:, :, d] = x[:, :, d] * cos + x[:, :, d + half] * sin
        out[:, :, d + half] = -x[:, :, d] * sin + x[:, :, d + half] * cos
    return out


def keys_of_the_token_before(k: Tensor) -> Tensor:
    """k (T, heads, D) with the channels that never turn taken from position t - 1, of whatever
    document it is; position 0 keeps its own."""
    quarter = k.shape[-1] // 4
    out = k.clone()
    for t in range(1, len(k)):
        for start in (quarter, 3 * quarter):
            out[t, :, start : start + quarter] = k[t - 1, :, start : start + quarter]
    return out


def same_document_before(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Positions i (T, 1) and j (1, T), and whether j is not after i and in its document."""
    document = (tokens == END_OF_TEXT).cumsum(0)
    i, j = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None, :]
    return i, j, (j <= i) & (document[:, None] == document[None, :])


def visible_blocks(tokens: Tensor, window: int) -> Tensor:
    """Row A: the nearest window / 128 blocks of 128, the query's own included."""
    i, j, allowed = same_document_before(tokens)
    return allowed & (i // 128 - j // 128 < window // 128)


def visible_tokens(tokens: Tensor, window: int) -> Tensor:
    """Row B: a token and the `window` tokens before it."""
    i, j, allowed = same_document_before(tokens)
    return allowed & (i - j <= window)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> list[Tensor]:
    """q, k, v (T, heads, D) to a (T, D) for each head."""
    heads = []
    for h in range(q.shape[1]):
        scores = scale * q[:, h] @ k[:, h].T
        heads.append(torch.softmax(scores.masked_fill(~mask, -math.inf), 1) @ v[:, h])
    return heads


def project(x: Tensor, qkv: Tensor, heads: int) -> list[Tensor]:
    return [(x @ matrix.T).view(len(x), heads, -1) for matrix in qkv]


def mlp(x: Tensor, w: dict[str, Tensor], layer: int) -> Tensor:
    hidden = (x @ w[f"blocks.{layer}.mlp.c_fc.weight"].T).clamp(min=0).pow(2)
    return hidden @ w[f"blocks.{layer}.mlp.c_proj.weight"].T


def cross_entropies(capped: Tensor, targets: Tensor) -> Tensor:
    return torch.logsumexp(capped, 1) - capped[torch.arange(len(targets)), targets]


# -----------------------------------------------------------------------------
# Row A: the 2025-01-26 model with a gate on the output of each head

LAYERS_A = reference.LAYERS[2025]  # window, value table, skip from


def loss_a(
    w: dict[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    window: int,
    heads: int,
    layers: list[tuple] = LAYERS_A,
    eps: float = EPSILON,
) -> tuple[Tensor, Tensor]:
    """What is trained, the sum over the sequence's tokens, and the mean loss. The long window is in
    tokens, the short one is half its blocks and at least one."""
    masks = {"long": visible_blocks(tokens, window)}
    masks["half"] = visible_blocks(tokens, max(window // 128 // 2, 1) * 128)
    x = x0 = rms_norm(w["embed.weight"][tokens], eps)
    n, outputs = len(layers), []
    for i, (kind, table, skip) in enumerate(layers):
        if skip is not None:
            x = x + w["skip_weights"][i - (n - n // 2)] * outputs[skip]
        a, b = w[f"blocks.{i}.lambdas"]
        x = a * x + b * x0
        if kind is not None:
            u = rms_norm(x, eps)
            q, k, v = project(u, w[f"blocks.{i}.attn.qkv_w"], heads)
            frequencies, _ = yarn([], q.shape[-1])
            q, k = rope(rms_norm(q, eps), frequencies), rope(rms_norm(k, eps), frequencies)
            own, from_table = w[f"blocks.{i}.attn.lambdas"]
            v = own * v
            if table is not None:
                values = w[f"value_embeds.embed.{table}.weight"][tokens]
                v = v + from_table * values.view(v.shape)
            y = attend(q, k, v, masks[kind], scale=0.12)
            # Each head's output times the sigmoid of 12 channels of the layer's normed input.
            open_ = gate(u, w[f"blocks.{i}.attn.gate"])
            y = torch.cat([open_[:, h, None] * y[h] for h in range(heads)], 1)
            x = x + y @ w[f"blocks.{i}.attn.c_proj.weight"].T
        x = x + mlp(rms_norm(x, eps), w, i)
        outputs.append(x)
    # 30 * sigmoid(x / 7.5) is 15 * tanh(x / 15) + 15.
    capped = reference.soft_capped(rms_norm(x, eps) @ w["lm_head.weight"].T, 15.0)
    losses = cross_entropies(capped, targets)
    return losses.sum(), losses.mean()


# -----------------------------------------------------------------------------
# Row B

LAYERS_B = [  # window, value table, skip from, unturned half of k from the token before
    ("short", 1, None, False),
    ("short", 2, None, False),
    ("short", None, None, False),
    ("long", None, None, True),
    ("short", None, None, False),
    ("short", None, None, False),
    (None, None, 3, False),
    ("short", None, None, False),
    ("short", 0, None, False),
    ("short", 1, None, False),
    ("long", 2, None, True),
]
BACKOUT_B = 7  # the layer whose output is taken out again at the end


def smear(e: Tensor, weight: Tensor, smear_lambda: Tensor) -> Tensor:
    """To each raw embedding but the first, a gated part of the one before: across documents, and
    from the embeddings as they were."""
    rows = [e[0]]
    for t in range(1, len(e)):
        rows.append(e[t] + smear_lambda[0] * gate(e[t : t + 1], weight)[0, 0] * e[t - 1])
    return torch.stack(rows)


def loss_b(
    w: dict[str, Tensor],
    tokens: Tensor,
    targets: Tensor,
    long: int,
    short: int,
    target_weights: list[float],
    frequencies: list[float],
    scale: float,
    heads: int,
    layers: list[tuple] = LAYERS_B,
    backout: int | None = BACKOUT_B,
    eps: float = EPSILON,
) -> tuple[Tensor, Tensor]:
    """What is trained, the sum over tokens t and k of weight k * CE(logits t, target t + k), and
    the mean loss of the next token. Windows are in tokens; frequencies and scale are yarn's."""
    masks = {"long": visible_tokens(tokens, long), "short": visible_tokens(tokens, short)}
    e = smear(w["embed.weight"][tokens], w["smear_gate"], w["smear_lambda"])
    x = x0 = rms_norm(e, eps)
    n, outputs = len(layers), []
    for i, (kind, table, skip, shifted) in enumerate(layers):
        if skip is not None:
            entry = i - (n - n // 2)
            per_token = 2 * gate(x0, w["skip_gates"][entry : entry + 1])
            x = x + torch.sigmoid(w["skip_weights"][entry]) * per_token * outputs[skip]
        x = w[f"blocks.{i}.lambdas"] * x + w[f"blocks.{i}.x0_lambda"] * x0
        if kind is not None:
            u = rms_norm(x, eps)
            on_qkv, on_o = w[f"blocks.{i}.attn.lambdas"]
            q, k, v = project(u, on_qkv * w[f"blocks.{i}.attn.qkv_w"], heads)
            q, k = rope(rms_norm(q, eps), frequencies), rope(rms_norm(k, eps), frequencies)
            if shifted:
                k = keys_of_the_token_before(k)
            if table is not None:
                values = w[f"value_embeds.embed.{table}.weight"][tokens].view(v.shape)
                v = v + 2 * gate(u, w[f"blocks.{i}.attn.value_gate"])[:, :, None] * values
            y = attend(q, k, v, masks[kind], scale)
            open_ = gate(u, w[f"blocks.{i}.attn.gate"])
            y = torch.cat([open_[:, h, None] * y[h] for h in range(heads)], 1)
            x = x + y @ (on_o * w[f"blocks.{i}.attn.c_proj.weight"]).T
        x = x + mlp(rms_norm(x, eps), w, i)
        outputs.append(x)
    if backout is not None:
        x = x - w["backout_lambda"] * outputs[backout]
    capped = reference.soft_capped(rms_norm(x, eps) @ w["lm_head.weight"].T, (23.0, 5.0, 7.5))
    trained = torch.zeros((), dtype=torch.float64)
    for k, weight in enumerate(target_weights):
        trained = trained + weight * cross_entropies(capped[: len(targets) - k], targets[k:]).sum()
    return trained, cross_entropies(capped, targets).mean()


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


def newton_schulz(x: Tensor) -> Tensor:
    return quintics(x / (x.pow(2).sum().sqrt() + 1e-7), QUINTIC_A)


def polar_express(x: Tensor) -> Tensor:
    return quintics(x / (1.02 * x.pow(2).sum().sqrt() + 1e-6), POLAR_EXPRESS)


def nesterov(g: Tensor, state: dict, momentum: float) -> Tensor:
    """The damped form: a running mean, and a direction between it and the gradient."""
    mean = state.get("momentum", torch.zeros_like(g))
    state["momentum"] = momentum * mean + (1 - momentum) * g
    return (1 - momentum) * g + momentum * state["momentum"]


def muon_step(p: Tensor, g: Tensor, state: dict, lr: float, momentum: float) -> None:
    """Row A, one matrix: no decay, and no factor for its shape."""
    p -= lr * newton_schulz(nesterov(g, state, momentum))


def normuon_step(
    p: Tensor,
    g: Tensor,
    state: dict,
    lr: float,
    lr_factor: float,
    momentum: float,
    decay: float = 1.2,
    beta2: float = 0.95,
) -> None:
    """Row B, one matrix. Each neuron, a row of the matrix stood upright, is divided by the running
    root mean square of its updates (from 0, not corrected), and the whole brought back to its old
    norm. Decay is of the learning rate squared, once with the matrix's factor, where update and
    weight do not disagree: a zero update decays."""
    x = polar_express(nesterov(g, state, momentum))
    short_side = 1 if x.shape[0] >= x.shape[1] else 0
    square = x.pow(2).mean(short_side, keepdim=True)
    state["square"] = beta2 * state.get("square", torch.zeros_like(square)) + (1 - beta2) * square
    v = x / state["square"].clamp(min=1e-10).sqrt()
    v = v * x.pow(2).sum().sqrt() / v.pow(2).sum().sqrt().clamp(min=1e-10)
    agrees = (v * p >= 0).double()
    p -= lr_factor * lr * v + lr_factor * lr * decay * lr * p * agrees


def adam_step(
    p: Tensor,
    g: Tensor,
    state: dict,
    lr: float,
    betas: tuple[float, float],
    eps: float = 1e-10,
    decay: float = 0.0,
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
# sequence's tokens, averaged over the sequences); w changes in place, and the states are returned.

ADAM_A = {  # learning rate; all other parameters, the gates too, are Muon's
    "embed.weight": 0.6,
    "value_embeds.embed.weight": 0.6,
    "lm_head.weight": 0.008,
    "skip_weights": 0.04,
    "blocks.lambdas": 0.04,
    "blocks.attn.lambdas": 0.04,
}
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
NORMUON_B = {  # times the learning rate .023; q, k, v and o lie in one tall matrix and get its 2
    "blocks.attn.qkv_w": 2,
    "blocks.attn.c_proj.weight": 2,
    "blocks.mlp.c_fc.weight": 2,
    "blocks.mlp.c_proj.weight": 4,
}


def without_numbers(name: str) -> str:
    return re.sub(r"\.\d+", "", name)


def matrices(name: str, *tensors: Tensor) -> list[tuple]:
    """A key and the single matrices of the tensors: q, k and v are one parameter but three."""
    if not name.endswith("qkv_w"):
        return [(name, *tensors)]
    return [(f"{name}[{part}]", *(x[part] for x in tensors)) for part in range(3)]


def play_a(
    w: dict[str, Tensor],
    gradients: list[dict[str, Tensor]],
    first: int = 0,
    states: dict | None = None,
    eps: float = 1e-10,
) -> dict:
    """The steps first, first + 1, ... of row A."""
    states = {} if states is None else states
    for step, of_step in enumerate(gradients, first):
        m, momentum = float(multiplier_a(step)), float(momentum_a(step))
        for name, p in w.items():
            if without_numbers(name) in ADAM_A:
                lr, state = m * ADAM_A[without_numbers(name)], states.setdefault(name, {})
                adam_step(p, of_step[name], state, lr, (0.8, 0.95), eps)
                continue
            for key, matrix, g in matrices(name, p, of_step[name]):
                muon_step(matrix, g, states.setdefault(key, {}), 0.05 * m, momentum)
    return states


def play_b(
    w: dict[str, Tensor],
    gradients: list[dict[str, Tensor]],
    first: int = 0,
    states: dict | None = None,
    split: int = 1201,
    eps: float = 1e-10,
) -> dict:
    """The steps first, first + 1, ... of row B. NorMuon acts on every step, Adam on odd ones with
    the sum of two gradients. Up to `split` (an odd step) the embedding is the head: its gradient is
    added to the head's, it is copied from the head after each update, and after the last such it
    gets a copy of the head's moments and of their count."""
    states = {"waiting": {}} if states is None else states
    for step, of_step in enumerate(gradients, first):
        m, momentum = float(multiplier_b(step)), float(momentum_b(step))
        for name, p in w.items():
            if without_numbers(name) in NORMUON_B:
                factor = NORMUON_B[without_numbers(name)]
                for key, matrix, g in matrices(name, p, of_step[name]):
                    state = states.setdefault(key, {})
                    normuon_step(matrix, g, state, 0.023 * m, factor, momentum)
        if step % 2 == 0:
            states["waiting"] = {name: g.clone() for name, g in of_step.items()}
            continue
        summed = dict(of_step)
        for name, g in states["waiting"].items():
            summed[name] = g + of_step[name]
        states["waiting"] = {}
        tied = step <= split
        if tied:
            summed["lm_head.weight"] = summed["lm_head.weight"] + summed["embed.weight"]
        for name, p in w.items():
            if without_numbers(name) in ADAM_B and not (tied and name == "embed.weight"):
                lr_factor, betas, decay_factor = ADAM_B[without_numbers(name)]
                lr, state = 0.008 * m * lr_factor, states.setdefault(name, {})
                adam_step(p, summed[name], state, lr, betas, eps, 0.005 * decay_factor)
        if tied:
            w["embed.weight"].copy_(w["lm_head.weight"])
        if step == split:
            head = states["lm_head.weight"]
            states["embed.weight"] = {"t": head["t"], "m": head["m"] + 0, "v": head["v"] + 0}
    return states


# -----------------------------------------------------------------------------
# Schedules of row A: 1695 steps of 8 sequences of 49152 tokens, documents of any length

STEPS_A = 1695
TOKENS_A = 49152


def multiplier_a(step: int) -> Fraction:
    """Of all learning rates: 1, then to .1 over the last 45 %."""
    w = min((1 - Fraction(step, STEPS_A)) / Fraction(45, 100), Fraction(1))
    return w + (1 - w) * Fraction(1, 10)


def ramp(step: int) -> Fraction:
    """Muon's momentum from .85 to .95 over 300 steps."""
    return Fraction(85, 100) + Fraction(10, 100) * min(Fraction(step, 300), Fraction(1))


def momentum_a(step: int) -> Fraction:
    return ramp(step)


def windows_a(step: int) -> tuple[int, int]:
    """Long and short in tokens: the blocks that cover 1728 * step / steps, and half of them, each
    at least one."""
    blocks = max(math.ceil(Fraction(1728 * step, STEPS_A * 128)), 1)
    return 128 * blocks, 128 * max(blocks // 2, 1)


# -----------------------------------------------------------------------------
# Schedules of row B: three stages of 600 steps and 40 steps more

STEPS_B = 1800
EXTENSION_B = 40
BLOCKS_B = [(3, 1), (7, 3), (11, 5), (13, 6)]  # long and short windows by stage
DOCUMENT_CAP_B = 2048
SPLIT_B = 1201  # the first odd step from two thirds on


def stage_b(step: int) -> int:
    """0, 1, 2, and 3 for the extension."""
    return min(3 * step // STEPS_B, 3)


def tokens_b(step: int) -> int:
    """A sequence's; the extension's are the last stage's."""
    return 16384 * (min(stage_b(step), 2) + 1)


def multiplier_b(step: int) -> Fraction:
    """Of all learning rates: it grows with the batch, a step after it, and falls to .1 over the
    second half of the 1800 steps."""
    x = Fraction(step, STEPS_B)
    m = Fraction(1)
    if x > Fraction(1, 3):
        m = Fraction(152, 100)
    if x > Fraction(2, 3):
        m = Fraction(173, 100)
    w = min(max((1 - x) / Fraction(1, 2), Fraction(0)), Fraction(1))
    return m * w + Fraction(1, 10) * (1 - w) if x >= Fraction(1, 2) else m


def momentum_b(step: int) -> Fraction:
    """As in row A, and back to .85 over the last 50 of all 1840 steps."""
    left = Fraction(STEPS_B + EXTENSION_B - step, 50)
    return ramp(step) - Fraction(10, 100) * (1 - min(left, Fraction(1)))


def windows_b(step: int) -> tuple[int, int]:
    """Long and short in tokens; step 1840 is the last validation, with a long window of its own."""
    long, short = BLOCKS_B[stage_b(step)]
    if step >= STEPS_B + EXTENSION_B:
        long = 20
    return 128 * long, 128 * short


def rotary_b(step: int, head_dim: int = 128) -> tuple[list[float], float]:
    """Frequencies and attention's scale; the last validation's window does not change them."""
    return yarn([long for long, _ in BLOCKS_B[: stage_b(step) + 1]], head_dim)


def target_weights_b(step: int) -> list[Fraction]:
    """Of the next token and those after it; the last of each stage fades to 0 within it, and is
    gone in the next."""
    x = Fraction(step, STEPS_B)
    if stage_b(step) == 0:
        return [Fraction(1), Fraction(1, 2), Fraction(1, 4) * (1 - 3 * x)]
    if stage_b(step) == 1:
        return [Fraction(1), Fraction(1, 2) * (2 - 3 * x)]
    return [Fraction(1)]


def tied_b(step: int) -> bool:
    """Whether the forward pass of `step` has one matrix as embedding and head."""
    return step <= SPLIT_B


# -----------------------------------------------------------------------------
# Batches of one shard, a list of tokens: for each step a list of (inputs, targets)

Batch = list[tuple[list[int], list[int]]]


def document_starts(tokens: list[int]) -> list[int]:
    return [i for i, token in enumerate(tokens) if token == END_OF_TEXT]


def batches_a(tokens: list[int], seq_len: int, batch_seqs: int) -> list[Batch]:
    """A sequence begins with a document and is what follows, cut nowhere; the next begins with the
    first document `seq_len` tokens later or more. The shard is left when no more than two batches
    and a token are ahead of the position, where the next batch begins, or no document follows."""
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
    """A sequence is the beginnings of whole documents, each up to the step's cap, until they are
    the step's length and one token; what is left of a document is dropped, and the next step goes
    on at the next document whatever its length. An unfinished batch is dropped with the shard: the
    next shard begins with that step."""
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
