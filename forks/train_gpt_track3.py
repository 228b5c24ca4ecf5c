"""Train for the speedrun's optimizer benchmark: reach a validation loss of 3.28 in few steps.

    ./run.sh forks/train_gpt_track3.py --record soap         # on GPUs: result 27 of the benchmark
    ./run.sh forks/train_gpt_track3.py --record soap-demo    # the same optimizer, small, on a CPU

The benchmark fixes the model, the data, the batch and one backward pass a step. Optimizer, schedule
and initial weights are free. The records are results of github.com/KellerJordan/modded-nanogpt,
records/track_3_optimization. Their optimizers and settings are in forks/optimizers; forks/README.md
lists them, and shows how to add one.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train_gpt.py lies
sys.path.insert(0, str(Path(__file__).resolve().parent / "optimizers"))
import adam
import around
import catalog
import first_weights
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt as t
from train_gpt import Group, UserError

# -----------------------------------------------------------------------------
# Settings and schedules. What train_gpt.py calls a sequence is several contexts here


@dataclass(frozen=True)
class Hyperparameters(t.Hyperparameters):
    """train_gpt.py's settings, and those of the benchmark. A schedule is four numbers: its length
    in num_iterations, the share of it in which rates fall, the fall's power, the last factor.
    Begins, ends and horizons of other settings are shares of num_iterations."""

    optimizer: str = "muon"  # of hidden matrices, a name in catalog.OPTIMIZERS
    schedule: tuple[float, float, float, float] = (1.0, 0.7, 1.0, 0.0)  # of learning rates
    adam_schedule: tuple[float, float, float, float] = (0.0,) * 4  # not of muon_lr; zeros: the same
    schedule_skip: tuple[float, float] = (0.0, 0.0)  # where all rates skip ahead, and how far
    muon_lr: float = 0.025  # learning rate of hidden matrices, whatever the optimizer
    norm_control: Literal["decay", "hyperball", "floor", "radius"] = "decay"  # of hidden matrices
    muon_decay: float = 0.05  # weight decay of hidden matrices, times muon_lr
    cautious_decay: bool = False  # decay only weights whose update has their sign
    update_floor: float = 0.0  # least norm of an update, as a share of the weights' norm
    floor_rows: bool = False  # the norms are those of rows, not of matrices
    matrix_beta2: float = 0.95  # average of squares, in optimizers of hidden matrices
    precondition_frequency: int = 1  # steps between refreshes of bases or roots
    momentum_cooldown: tuple[float, float] = (0.0, 0.0)  # from where to where momentum falls again
    adam_decay: float = 0.001  # weight decay of other parameters, times their rate
    bias_correction: bool = True  # in Adam of gains and biases; off: as results 44 to 46
    ema_nesterov: tuple[float, float, float] = (0.0, 0.0, 0.0)  # factor, begin, end
    outer_period: int = 0  # MuLoCo: steps between steps of the outer optimizer; 0: none
    tail_ema: tuple[float, float] = (0.0, 0.0)  # begin and horizon of an average of weights
    tail_shares: tuple = (0.6,) * 4 + (0.0,)  # way to it: first block, others, head, vectors, embed
    anchor: tuple = (0.0,) * 3  # gradients are taken away from it: factor, begin, end of rise
    head_eigenvectors: bool = False  # Adam of the head in eigenvectors, from step 1000 of 2900
    float32_embed: bool = False  # keep the embedding in float32 on a GPU
    rre: tuple[float, float, float] = (0.0, 0.0, 0.0)  # extrapolation: begin, factor, longest
    mean_loss: bool = False  # gradients are of the mean loss; off: of the summed loss
    init: Literal[first_weights.KINDS] = "baseline"  # forks/optimizers/first_weights.py
    float32_gains: bool = False  # apply RMSNorm's gains in float32
    context_len: int = 1024  # tokens in an attention context, whole blocks of 128


MUON = Hyperparameters(
    num_iterations=3250,
    window_min=65536,  # constant, and unused: masks follow contexts instead
    seq_len=65536,
    val_seq_len=65536,
    vocab_size=50304,
    norm_eps=2.0**-23,
    embed_lr=0.7,
    head_lr=0.004,
    scalar_lr=0.015,
    momentum_start=0.95,
    fp8=False,
)
RECORDS = {name: replace(MUON, **settings) for name, settings in catalog.RESULTS.items()}
# The settings that make train_gpt.py's demo small: sizes, steps and data.
SMALL = {k: v for k, v in vars(t.RECORDS["demo"]).items() if v != getattr(t.Hyperparameters(), k)}
for name, hp in list(RECORDS.items()):
    steps = {key: value for key, value in vars(hp).items() if key.endswith("_steps") and value}
    for key, value in steps.items():
        steps[key] = -(-value * SMALL["num_iterations"] // hp.num_iterations)
    RECORDS[f"{name}-demo"] = replace(hp, context_len=256, **SMALL, **steps)
RECORDS["demo"] = replace(RECORDS["muon-demo"], muon_lr=0.05, head_lr=0.024)


def rate(step: int, schedule: tuple, hp: Hyperparameters) -> float:
    """Return the multiplier on a learning rate: a linear rise, flat, then a fall. From one step on,
    it may be that of a later step."""
    length, share, power, final = schedule
    begin, skipped = (share * hp.num_iterations for share in hp.schedule_skip)
    if skipped and step >= round(begin):
        step = step + skipped
    rise = min((step + 1) / hp.warmup_steps, 1.0) if hp.warmup_steps else 1.0
    left = max(1 - step / (length * hp.num_iterations), 0)
    fall = min(left / share, 1.0) ** power if share else 1.0
    return rise * (fall + (1 - fall) * final)


class Moment(t.Moment):
    """All scheduled values at a step. The last tenth has five times as many validations."""

    def __init__(self, step: int, hp: Hyperparameters):
        super().__init__(step, hp)
        adam_schedule = hp.adam_schedule if any(hp.adam_schedule) else hp.schedule
        self.matrix_lr = rate(self.step, hp.schedule, hp)  # multiplier on muon_lr
        self.lr = rate(self.step, adam_schedule, hp)  # multiplier on the other rates
        self.lr_before = rate(max(self.step - 1, 0), adam_schedule, hp)  # at the step before
        self.schedule_steps = hp.schedule[0] * hp.num_iterations
        begin, end = (share * hp.num_iterations for share in hp.momentum_cooldown)
        if end:
            left = min(max((end - self.step) / (end - begin), 0), 1)
            highest = hp.momentum_start + (hp.momentum_end - hp.momentum_start) * left
            self.momentum = min(self.momentum, highest)
        factor, begin, end = hp.anchor
        rise = self.step / hp.num_iterations - begin
        self.anchor = factor * min(max(rise / (end - begin), 0), 1) if factor else 0
        if self.step >= 0.9 * hp.num_iterations and hp.val_loss_every:
            self.validate = self.validate or self.step % -(-hp.val_loss_every // 5) == 0


# The numbers of settings that are off if all of them are 0.
PARTS = {
    "schedule_skip": ("begin", "length"),
    "momentum_cooldown": ("begin", "end"),
    "ema_nesterov": ("factor", "begin", "end"),
    "tail_ema": ("begin", "horizon"),
    "anchor": ("factor", "begin", "end"),
    "rre": ("begin", "factor", "longest"),
}


def without_effect(hp: Hyperparameters) -> list[tuple[str, str]]:
    """Return settings that have no effect beside others, and a reason for each."""
    needs = [
        ("cautious_decay", hp.muon_decay, "--muon_decay"),
        ("norm_control", hp.update_floor or hp.norm_control != "floor", "--update_floor"),
        ("floor_rows", hp.update_floor, "--update_floor"),
        ("momentum_cooldown", hp.momentum_start != hp.momentum_end, "another --momentum_start"),
        ("outer_period", hp.outer_period <= 10**4, "a run of more steps than any record has"),
        ("tail_shares", any(hp.tail_ema), "--tail_ema"),
        ("anchor", any(hp.tail_ema), "--tail_ema"),
        ("tail_ema", any(hp.tail_shares) or any(hp.anchor), "--tail_shares or --anchor"),
    ]
    found = [(name, f"without {what}") for name, has_it, what in needs if not has_it]
    for name, optimizers in catalog.UNREAD.items():
        if hp.optimizer in optimizers:
            found.append((name, f"with --optimizer {hp.optimizer}"))
    for name, ways in catalog.READ_WITH.items():
        if hp.norm_control not in ways:
            found.append((name, f"with --norm_control {hp.norm_control}"))
    return found


def check(hp: Hyperparameters) -> None:  # overrides
    """Raise UserError for illegal settings, and for settings that have no effect here."""
    t.check(hp)
    if hp.optimizer not in (known := catalog.OPTIMIZERS):
        raise UserError(f"--optimizer {hp.optimizer}: must be one of {', '.join(known)}")
    absent = "layers", "window_rule", "window_min", "window_step", "init_bound", "fp8"
    for name in (*absent, "cooldown_frac", "lr_final"):
        if getattr(hp, name) != getattr(MUON, name):
            raise UserError(f"--{name}: the benchmark's model does not have it, leave it out")
    units = {"context_len": t.BLOCK, "seq_len": hp.context_len, "val_seq_len": hp.context_len}
    for name, unit in {**units, "precondition_frequency": 1}.items():
        if getattr(hp, name) == 0 or getattr(hp, name) % unit:
            raise UserError(f"--{name} {getattr(hp, name)}: must be a positive multiple of {unit}")
    if not hp.schedule[0] or (any(hp.adam_schedule) and not hp.adam_schedule[0]):
        raise UserError("--schedule, --adam_schedule: the first number must be positive")
    for name, parts in PARTS.items():
        value = getattr(hp, name)
        others = dict(zip(parts, value, strict=True))
        begin = others.pop("begin")
        if any(value) and not (all(others.values()) and begin < others.get("end", 1)):
            rule = "begin must be below end, or else below 1, and all others above 0; zeros: off"
            raise UserError(f"--{name} {t.show(value)} ({', '.join(parts)}): {rule}")
    for name, reason in without_effect(hp):
        usual, value = (t.show(getattr(one, name)) for one in (MUON, hp))
        if value != usual:
            raise UserError(f"--{name} {value}: has no effect {reason}: leave it at {usual}")
    if (hp.anchor[0] or hp.tail_shares[-1]) and not hp.float32_embed:
        raise UserError("--float32_embed off: a bfloat16 average of the embedding stands still")
    trains = hasattr(sys.modules["__main__"], "Run") and hp.device == "auto"  # it is no tool
    tokens = hp.batch_seqs * hp.seq_len
    if trains and tokens > 10**5 and not torch.cuda.is_available():
        size = f"{hp.num_iterations} steps of {tokens} tokens need a GPU"
        raise UserError(f"{size}: put -demo behind the record's name, as in --record soap-demo")


# -----------------------------------------------------------------------------
# Model: norms have gains, linear layers biases


class Linear(nn.Linear):
    """A linear layer whose weight and bias are cast to its input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.type_as(x), self.bias.type_as(x))


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, with gains."""

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        self.gains = nn.Parameter(torch.ones(hp.model_dim))
        self.eps, self.in_float32 = hp.norm_eps, hp.float32_gains

    def forward(self, x: Tensor) -> Tensor:
        if self.in_float32:
            return (t.norm(x.float(), self.eps) * self.gains).type_as(x)
        return F.rms_norm(x, self.gains.shape, self.gains.type_as(x), self.eps)


class Block(nn.Module):
    """One layer: attention with normalised, rotated q and k, then an MLP with ReLU squared."""

    attend = staticmethod(lambda *arguments: t.attend(*arguments))

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        dim, width = hp.model_dim, hp.num_heads * hp.head_dim
        self.head_shape, self.eps = (hp.num_heads, hp.head_dim), hp.norm_eps
        self.scale = hp.attn_scale or hp.head_dim**-0.5
        self.norm1, self.norm2 = RMSNorm(hp), RMSNorm(hp)
        self.q, self.k, self.v = (Linear(dim, width) for _ in range(3))
        self.attn_proj = Linear(width, dim)
        self.fc, self.mlp_proj = Linear(dim, 4 * dim), Linear(4 * dim, dim)

    @t.compiled
    def forward(self, x: Tensor, rotary, mask) -> Tensor:
        """Map x (1, T, C) to (1, T, C)."""
        h = self.norm1(x)
        q, k, v = (layer(h).view(1, -1, *self.head_shape) for layer in (self.q, self.k, self.v))
        q = t.rotate_normed(q, *rotary, self.eps)  # (1, H, T, D)
        k = t.rotate_normed(k, *rotary, self.eps)
        out = self.attend(q, k, v.transpose(1, 2), mask, self.scale)
        x = x + self.attn_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.relu(self.fc(self.norm2(x))).square())


def capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * l / sqrt(l^2 + cap^2) of logits l, in float32."""
    logits = logits.float()
    return cap * logits * (logits.square() + cap**2).rsqrt()


class Head(t.Head):
    """train_gpt.py's head with a bias. Most results' gradients are of the loss summed over the
    batch. Optimizers divides gradients by batch_seqs, so grad_scale multiplies them by it."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        self.bias = nn.Parameter(torch.zeros(self.out_features))
        self.grad_scale = None if hp.mean_loss else hp.batch_seqs

    def logits(self, x: Tensor) -> Tensor:  # overrides
        """Return the logits (T, padded vocabulary) of x (T, C), in float32."""
        return capped(self(x) + self.bias, self.softcap)


class GPT(t.GPT):
    """The benchmark's language model."""

    kernels = ()  # none fits this head, or these MLPs

    def __init__(self, hp: Hyperparameters):
        nn.Module.__init__(self)  # skip t.GPT's, which makes other layers
        self.hp, self.layers = hp, (t.Layer("long"),) * hp.num_layers
        self.embed = nn.Embedding(hp.vocab_size, hp.model_dim)
        self.lm_head = Head(hp)
        self.value_embeds = nn.ModuleDict({"embed": nn.ModuleDict()})  # this model has none
        self.norm1, self.norm2 = RMSNorm(hp), RMSNorm(hp)
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        first_weights.draw(self, hp.init)

    def tables(self) -> list[nn.Module]:  # overrides
        """Return the vocabulary tables that are bfloat16 on CUDA."""
        return [] if self.hp.float32_embed else super().tables()

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # overrides
        """Return the embeddings (T, C) of tokens (T,), bfloat16 on CUDA, and no others."""
        x, values = super().embedded(input_seq)
        return x.bfloat16() if x.is_cuda else x, values

    @torch.no_grad()
    @t.compiled
    def masks(self, input_seq: Tensor, *windows: Tensor) -> dict:  # overrides
        """Return the mask of input_seq (T,): causal, and within each context."""
        position = torch.arange(len(input_seq), device=input_seq.device, dtype=torch.int32)
        return {"long": t.make_mask(position - position % self.hp.context_len)}

    @t.compiled
    def rotary(self, position: Tensor) -> tuple[Tensor, Tensor]:  # overrides
        """Return the rotary_table of tokens at positions (T,); each context begins at 0."""
        return super().rotary(position % self.hp.context_len)

    def run_layers(self, x: Tensor, values, rotary, masks: dict) -> Tensor:  # overrides
        """Map embeddings (T, C) to the head's input (T, C)."""
        x = self.norm1(x)[None]
        for block in self.blocks:
            x = block(x, rotary, masks["long"])
        return self.norm2(x)[0]


# -----------------------------------------------------------------------------
# Optimizers and run


def at_matrix_rate(rule, bank, lr: float, now: Moment, hp: Hyperparameters) -> None:
    """Call the rule of hidden matrices with the rate of their own schedule. Padding of theirs may
    become NaN, as 0 / 0: no parameter has it."""
    rule(bank, hp.muon_lr * now.matrix_lr, now, hp)


class Optimizers(around.Optimizers):
    """train_gpt.py's optimizers, with those of the benchmark."""

    @staticmethod
    def parameter_groups(model: GPT, hp: Hyperparameters) -> list[Group]:  # overrides
        """Return the groups, in the order in which weights are updated. Some rules treat the
        matrices of v or attn_proj in their own way: bank.name begins with the group's name."""
        of_matrices = partial(at_matrix_rate, catalog.OPTIMIZERS[hp.optimizer])
        adamw = partial(t.adam, decay=hp.adam_decay)
        of_head = catalog.spectral_annealing.head_adam if hp.head_eigenvectors else adamw
        matrices, vectors = {"muon": [], "v": [], "attn_proj": []}, {}
        for name, p in reversed(list(model.named_parameters())):
            if p.ndim == 1:
                vectors.setdefault(adam.beta2_of(name, hp), []).append(p)
            elif name.startswith("blocks"):
                layer = name.split(".")[-2]
                matrices[layer if layer in matrices else "muon"].append(p)
        groups = [Group("head", [model.lm_head.weight], of_head, hp.head_lr, 1)]
        for name, params in matrices.items():
            groups.append(Group(name, params, of_matrices, hp.muon_lr, 2))
        groups.append(Group("embed", [model.embed.weight], adamw, hp.embed_lr, 1))
        for beta2, params in vectors.items():
            uncorrected = partial(adam.uncorrected_adam, beta2=beta2)
            rule = adamw if hp.bias_correction else uncorrected
            groups.append(Group(f"vector {beta2}", params, rule, hp.scalar_lr, 0))
        for group in groups:
            group.rule = partial(around.with_pieces, group.rule)
        return groups


class Run(t.Run):
    """A run of the benchmark."""

    records, default_record = RECORDS, "muon"
    GPT = GPT
    Optimizers = Optimizers
    Moment = Moment
    check = staticmethod(check)


if __name__ == "__main__":
    t.main(run=Run)
