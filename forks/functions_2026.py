"""What train_gpt_2026.py and train_gpt_2026_08.py share: settings that are written in rows,
attention, embeddings, a head with several targets, its tie to the embedding, and the warm-up of
several kinds of steps."""

import gc
import itertools
import math
import re
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

import train_gpt as t
from train_gpt import BLOCK, UserError

# -----------------------------------------------------------------------------
# Settings


def read_layer(row: str, layer_class: type):
    """Return the layer that a row of --layers describes, such as long+v0+x5: a window, then words
    of layer_class.numbered or layer_class.plain. UserError if a row is of another form."""
    window, *words = row.split("+")
    given, is_layer = {}, window in ("long", "short", "none")
    for word in words:
        name = word.rstrip("0123456789")
        number = word[len(name) :]
        field = (layer_class.numbered if number else layer_class.plain).get(name)
        is_layer = is_layer and field is not None and field not in given
        given[field] = True
        if number:  # value tables go by their names
            given[field] = number if field == "values" else int(number)
    if not is_layer:
        words = " ".join([*(f"{name}1" for name in layer_class.numbered), *layer_class.plain])
        rule = f"a layer is long, short or none, then any of {words}, each after a +"
        raise UserError(f"--layers: {row!r} is not a layer; {rule}")
    return layer_class(window, **given)


def number_rows(text: str, name: str, known: dict) -> list[tuple[str, dict]]:
    """Parse a setting such as "head+lr=.008+beta1=.5,embed+lr=.6". Return each row's name ("" if it
    has none) and its numbers by field. `known` are fields, with an example of each: of a tuple, the
    numbers are a tuple, written 1/2/3. UserError for an unknown field or a wrong number."""
    rows = []
    for row in text.split(",") if text else []:
        words = re.split(r"\+(?=[a-z])", row)  # not within 8e+5
        first = "" if "=" in words[0] else words.pop(0)
        numbers = {}
        try:
            for word in words:
                key, value = word.split("=")
                is_tuple = isinstance(known.get(key), tuple)
                parts = value.split("/") if is_tuple else [value]
                values = tuple(float(part) for part in parts)
                if key not in known or not all(0 <= value < 1e9 for value in values):
                    raise ValueError
                numbers[key] = values if is_tuple else values[0]
        except ValueError:
            forms = " ".join(f"{key}=NUMBER" for key in known)
            raise UserError(f"--{name}: {row!r} is not of {forms}, joined by +") from None
        rows.append((first, numbers))
    return rows


@cache
def read_stages(text: str, stage_class: type, seq_len: int) -> tuple:
    """Return the stages that --stages describes, one if it is empty. UserError for a wrong row."""
    table, usual = [], stage_class()
    for first, numbers in number_rows(text, "stages", vars(usual)):
        for name, value in numbers.items():
            if isinstance(getattr(usual, name), int):
                if value % 1:
                    raise UserError(f"--stages {text}: {name} must be a whole number")
                numbers[name] = int(value)
        stage = stage_class(**numbers)
        if first or not numbers or stage.length < 1 or stage.share == 0:
            rule = "a row has no name, and a length from 1; STAGES in the script shows the form"
            raise UserError(f"--stages {text}: {rule}")
        if seq_len * stage.length % BLOCK:
            rule = f"must make sequences of a multiple of {BLOCK} tokens"
            raise UserError(f"--stages {text}: length={stage.length:g} {rule}")
        table.append(stage)
    return tuple(table) or (usual,)


# -----------------------------------------------------------------------------
# Attention


def recomputed_if_small(function, x: Tensor, *more):
    """Return function(x, *more) of x (1, T, ...), recomputed where memory is small."""
    recompute = t.memory_is_small(x.device, x.size(1))
    return t.recomputed(function, x, *more) if recompute else function(x, *more)


def visible_by_distance(begins: Tensor, window: Tensor) -> Tensor:
    """Return the first token (T,) that each token sees, as train_gpt.py's first_visible: so many
    tokens before itself, rounded down to whole blocks."""
    blocks = (window // BLOCK).clamp(min=1)
    return t.first_visible(begins, blocks * BLOCK + 1, "tokens")


def two_places(begins: Tensor) -> Tensor:
    """Return `begins` (2 T,) of the places of paired heads, which have two for each of T tokens: a
    document begins at the first. A window counts places, so it sees half as many tokens."""
    return torch.stack([begins, torch.zeros_like(begins)], dim=1).flatten()


def offset_keys(k: Tensor) -> Tensor:
    """Return keys (1, H, T, D) in which the channels that half RoPE does not rotate come from the
    previous token, even if it is in another document (2025-12-14_PartialKeyOffset)."""
    before = torch.cat([k[:, :, :1], k[:, :, :-1]], dim=2)
    half = k.size(-1) // 2
    still = torch.arange(k.size(-1), device=k.device) % half >= half // 2
    return torch.where(still, before, k)


def yarn(frequency: Tensor, windows: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return rotary frequencies, and the factor () on attention's scale, after the window has had
    these sizes: YaRN (arXiv 2309.00071). Each time it grows, frequencies that turn less than once
    in the old window are divided by its growth. Those that turn more than 32 times are unchanged;
    those between are interpolated."""
    factor = 1.0
    for old, new in itertools.pairwise(windows):
        turns = old * frequency / (2 * math.pi)
        fast = ((turns - 1) / 31).clamp(0, 1)
        frequency = frequency * (old / new + fast * (1 - old / new))
        factor *= 1 + 0.2 * math.log(new / old)
    return frequency, torch.full((), factor, device=frequency.device)


def rotate_scaled(x: Tensor, cos: Tensor, sin: Tensor, eps: float, factor: Tensor) -> Tensor:
    """Return train_gpt.py's rotate_normed, times a factor ()."""
    return t.rotate_normed(x, cos, sin, eps) * factor


def rotated(q: Tensor, k: Tensor, rotary: tuple, eps: float) -> tuple[Tensor, Tensor]:
    """Return q and k (1, T, H, D) normed and rotated, each (1, H, T, D). `rotary` are cos, sin and
    YaRN's factor on q."""
    cos, sin, factor = rotary
    q = recomputed_if_small(rotate_scaled, q, cos, sin, eps, factor)
    return q, recomputed_if_small(t.rotate_normed, k, cos, sin, eps)


def as_pairs(parts: list[Tensor], rotary: tuple) -> tuple:
    """Return q, k and v (1, T, H, D) as those of paired heads, (1, 2 T, H / 2, D), and their rotary
    tables. A token has two places: its first half of the heads attends at place 2 t, the second at
    2 t + 1. Even heads rotate as at place 2 t, odd ones as at 2 t + 1 (2026-01-07's record)."""
    cos, sin, factor = rotary
    heads = parts[-1].size(2)
    turn = torch.arange(heads, device=cos.device) % 2
    parts = [part.reshape(1, -1, heads // 2, part.size(-1)) for part in parts]
    cos, sin = (part[:, turn].unflatten(1, (2, -1)).flatten(0, 1) for part in (cos, sin))
    return *parts, (cos, sin, factor)


GATE_CHANNELS = 12  # channels of its input that a gate reads, if a record sets no other number


def gate_of(x: Tensor, weight: Tensor) -> Tensor:
    """Return gates (..., n) between 0 and 1, from the first channels of x (..., C), as many as a
    weight (n, channels) has."""
    return torch.sigmoid(F.linear(x[..., : weight.size(-1)], weight.type_as(x)))


# -----------------------------------------------------------------------------
# Embeddings


@t.compiled
def smeared(x: Tensor, gate_w: Tensor, factor: Tensor) -> Tensor:
    """Return embeddings (T, C), each with a gated share of the previous one, even if that is in
    another document; gate_w is (1, channels), factor (1,)."""
    share = factor * gate_of(x[1:], gate_w)
    return torch.cat([x[:1], x[1:] + (share * x[:-1]).type_as(x)])


def bigram_hash(tokens: Tensor, rows: int) -> Tensor:
    """Return, for each token (T,), the row of the bigram table that the token and the previous one
    select, (T,) int32. The first token selects the last row; for the second token, that row's
    number stands for the first token. Products of int32 wrap (2026-01-19_BigramHashEmbedding)."""
    first = torch.full_like(tokens[:1], rows - 1, dtype=torch.int32)
    tokens = torch.cat([first, tokens[1:].int()])
    return torch.cat([first, (36313 * tokens[1:] ^ 27191 * tokens[:-1]) % (rows - 1)])


# -----------------------------------------------------------------------------
# The head, and its tie to the embedding


def next_targets(targets: Tensor, count: int) -> Tensor:
    """Return the next `count` targets of each token, (T, count), from targets (T,). Beyond the end
    they are -1."""
    return F.pad(targets, (0, count - 1), value=-1).unfold(0, count, 1).contiguous()


def weighted_loss(logits: Tensor, targets: Tensor, shares: Tensor, scale: float) -> Tensor:
    """Return scale times the summed loss () of the first of K targets (T, K), under logits (T, V).
    Its gradient is that of the losses of all targets, times their shares (K,); a target of -1 has
    no share."""
    chances = torch.log_softmax(logits, dim=-1).gather(1, targets.clamp(min=0))
    learned = -scale * (chances * shares * (targets >= 0)).sum()
    shown = -scale * chances[:, 0].sum()
    return learned + (shown - learned).detach()


class Head(t.Head):
    """train_gpt.py's Head, with logits capped by a sigmoid, and several targets for each token."""

    def __init__(self, hp, form: tuple[float, float, float], std: float):
        super().__init__(hp)
        if std:
            self.weight.data.normal_(std=std)
        self.form = form
        # FP8 scales and Adam's epsilon of these records expect the gradient of a sum.
        self.grad_scale = 1.0
        self.weight.grad_dtype = torch.float32  # that of a tied head, too, which is bfloat16

    def logits(self, x: Tensor, weight: Tensor | None = None) -> Tensor:  # overrides
        """Return the logits (T, V) of x (T, C), between 0 and a, in float32: by the head's weight,
        whose vocabulary is padded, or by another (V, C)."""
        a, b, c = self.form
        return a * self(x, weight).float().add_(b).div_(c).sigmoid_()

    @t.compiled
    def chunk_loss(self, x: Tensor, targets: Tensor, scale, shares=None, weight=None) -> Tensor:
        """Return scale times the summed loss () of the next token, by a weight as in `logits`. With
        shares (K,), it is weighted_loss of targets (T, K)."""
        if shares is None:
            return super().chunk_loss(x, targets, scale)
        if "chunk_loss" in t.IN_USE:  # if the formula below is edited, it is left out
            return t.gpu_kernels.fused_chunk_loss(self, x, targets, scale, shares, weight)
        return weighted_loss(self.logits(x, weight), targets, shares, scale)

    def shares_loss(self, x: Tensor, targets: Tensor, shares: tuple, weight=None) -> Tensor:
        """Return the mean loss () of the next token, of x (T, C) and targets (T, K). Its gradients
        are those of the losses of all K targets, times their shares."""
        if shares == (1.0,) and weight is None:
            return self.loss(x, targets[:, 0])
        shares = torch.stack([torch.full((), share, device=x.device) for share in shares])
        return self.loss(x, targets, shares, weight)


# For the first part of a run (Moment.tied), head and embedding are one table: tokens are looked up
# in the head's weight, which gets the gradients of both. The embedding gets none, and is a copy. At
# the split it begins to learn, with a copy of the head's state.


def tied_pair(groups: list[tuple], hp) -> tuple | None:
    """Return the head's Group and Bank and the embedding's Bank, which have one shape; None if they
    are never tied, or one is frozen."""
    found = {group.name: (group, bank) for group, bank in groups}
    if not hp.tied_frac or not {"head", "embed"} <= found.keys():
        return None
    return *found["head"], found["embed"][1]


def split(groups: list[tuple], now, hp) -> None:
    """Before the first step without a tie: copy the head's state to the embedding."""
    if not now.tied and (pair := tied_pair(groups, hp)):
        _, head, embed = pair
        if not embed.state:
            embed.state = {key: value.clone() for key, value in head.state.items()}


def tie(groups: list[tuple], now, hp) -> None:
    """After a step that has changed a tied head, as the last one may: copy its weights to the
    embedding."""
    if now.tied and (pair := tied_pair(groups, hp)):
        group, head, embed = pair
        if (now.step + 1) % group.steps == 0 or now.step + 1 == hp.num_iterations:
            embed.weights.copy_(head.weights)


# -----------------------------------------------------------------------------
# Warm-up


def warm_up(model, optimizers, moments: list, device: torch.device) -> None:
    """Warm up as train_gpt.py does. Steps are of several kinds, which differ in graph_key: each
    kind has compiled code of its own, and one step of each is made, of one micro-batch."""
    hp = model.hp
    kinds = {now.graph_key: now for now in moments}  # the last moment of each kind
    longest = max(reversed(kinds.values()), key=lambda now: now.seq_len)  # the last of several
    size = max(longest.seq_len, hp.val_seq_len)
    tokens = torch.arange(1, size + 1, device=device)[None] % hp.vocab_size
    # Then some of the longest steps in a row reserve memory, and let all groups learn. They have as
    # many micro-batches as the run's, because the gradients of a step's n-grams wait together.
    micro_batches = hp.batch_seqs // optimizers.world_size
    count = optimizers.period * (2 if t.compilation.allowed else 1)
    in_a_row = moments[max(longest.step + 1 - count, 0) : longest.step + 1]
    alone = [[now] for now in kinds.values()] if t.compilation.allowed else []
    for steps in [*alone, in_a_row]:
        optimizers.load_state_dict({})  # in a run, other steps come before these
        gc.collect()
        torch.cuda.empty_cache()
        val = tokens[:, : hp.val_seq_len]
        t.evaluate(model, (val.int(), val), steps[-1], device)
        for now in steps:
            x = tokens[:, : now.seq_len].expand(micro_batches if steps is in_a_row else 1, -1)
            t.train_step(model, optimizers, x.int(), x, now)
