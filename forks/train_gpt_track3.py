"""Train for the speedrun's optimizer benchmark: reach a validation loss of 3.28 in few steps.

    ./run.sh forks/train_gpt_track3.py                    # Muon, 3250 steps; on a CPU, a demo
    ./run.sh forks/train_gpt_track3.py --record adamw     # AdamW, 5625 steps

The benchmark fixes the model, the data, the batch and one backward pass a step. Optimizer, schedule
and initial weights are free. The records here are results 36 (muon) and 2 (adamw) of
github.com/KellerJordan/modded-nanogpt, records/track_3_optimization. forks/README.md shows how to
add an optimizer.
"""

import math
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where train_gpt.py lies
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt as t
from train_gpt import Group, UserError

# -----------------------------------------------------------------------------
# Settings and data. What train_gpt.py calls a sequence is a micro-batch of several contexts here


@dataclass(frozen=True)
class Hyperparameters(t.Hyperparameters):
    """train_gpt.py's settings, and those of the benchmark."""

    muon_lr: float = 0.025  # learning rate of hidden matrices (Muon or AdamW)
    muon_decay: float = 0.05  # weight decay of matrices, times muon_lr
    adam_decay: float = 0.001  # weight decay of other parameters, times their rate
    all_adamw: bool = False  # train hidden matrices with AdamW, not Muon
    matrix_betas: tuple[float, float] = (0.9, 0.95)  # AdamW's betas for hidden matrices
    init_std: float = 0.33**0.5  # q, k, v, fc: initial std * sqrt(fan_in); 0: torch's
    float32_gains: bool = False  # apply RMSNorm's gains in float32
    context_len: int = 1024  # tokens in an attention context, whole blocks of 128


MUON = Hyperparameters(
    num_iterations=3250,
    cooldown_frac=0.7,
    lr_final=0.0,
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
# The settings that make train_gpt.py's demo small: sizes, steps and data.
DEMO = vars(t.RECORDS["demo"]).items()
SMALL = {name: value for name, value in DEMO if value != getattr(t.Hyperparameters(), name)}
RECORDS = {
    "muon": MUON,
    "adamw": replace(
        MUON,
        num_iterations=5625,
        warmup_steps=250,
        muon_lr=0.0015,
        muon_decay=0.1,
        all_adamw=True,
        adam_decay=0.0,
        embed_lr=0.3,
        head_lr=1 / 320,
        scalar_lr=0.01,
        init_std=0.0,
        float32_gains=True,
    ),
    "demo": replace(MUON, context_len=256, muon_lr=0.05, head_lr=0.024, **SMALL),
}


def check(hp: Hyperparameters) -> None:
    """Raise UserError for illegal settings, and for settings that have no effect here."""
    t.check(hp)
    for name in ("layers", "window_rule", "window_min", "window_step", "init_bound", "fp8"):
        if getattr(hp, name) != getattr(MUON, name):
            raise UserError(f"--{name}: the benchmark's model does not have it, leave it out")
    units = {"context_len": t.BLOCK, "seq_len": hp.context_len, "val_seq_len": hp.context_len}
    for name, unit in units.items():
        if getattr(hp, name) == 0 or getattr(hp, name) % unit:
            raise UserError(f"--{name} {getattr(hp, name)}: must be a positive multiple of {unit}")


class Moment(t.Moment):
    """train_gpt.py's scheduled values, with five times as many validations in the last tenth."""

    def __init__(self, step: int, hp: Hyperparameters):
        super().__init__(step, hp)
        if self.step >= 0.9 * hp.num_iterations and hp.val_loss_every:
            self.validate = self.validate or self.step % -(-hp.val_loss_every // 5) == 0


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

    attend = t.Late(lambda: t.attend)  # as in train_gpt.py

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
    """train_gpt.py's head with a bias. The benchmark's gradients are of the loss summed over the
    batch. Optimizers divides gradients by batch_seqs, so grad_scale multiplies them by it."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        self.bias = nn.Parameter(torch.zeros(self.out_features))
        self.grad_scale = hp.batch_seqs

    def logits(self, x: Tensor) -> Tensor:
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
        for name, p in self.blocks.named_parameters():
            if "proj" in name or (hp.init_std and name.endswith("bias")):
                p.data.zero_()
            elif hp.init_std and p.ndim == 2:
                p.data.normal_(std=hp.init_std / math.sqrt(p.size(1)))

    @torch.no_grad()
    @t.compiled
    def masks(self, input_seq: Tensor, now: t.Moment) -> dict:
        """Return the mask of input_seq (T,): causal, and within each context."""
        position = torch.arange(len(input_seq), device=input_seq.device, dtype=torch.int32)
        return {"long": t.make_mask(position - position % self.hp.context_len)}

    @t.compiled
    def rotary(self, position: Tensor, now: t.Moment) -> tuple[Tensor, Tensor]:
        """Return the rotary_table of tokens at positions (T,); each context begins at 0."""
        return super().rotary(position % self.hp.context_len, now)

    def trunk(self, x: Tensor, values: dict[str, Tensor], rotary, masks: dict) -> Tensor:
        """Map embeddings (T, C) to the head's input (T, C)."""
        x = self.norm1(x)[None]  # (1, T, C): attention wants a batch axis
        for block in self.blocks:
            x = block(x, rotary, masks["long"])
        return self.norm2(x)[0]


# -----------------------------------------------------------------------------
# Optimizers and run


def polar(G: Tensor) -> Tensor:
    """Orthogonalise by twelve iterations, which bring singular values close to 1."""
    return t.zeropower_via_newtonschulz5(G, 12, ((2.0, -1.5, 0.5),) * 12)


def muon(rows, lr: float, now: t.Moment, hp: Hyperparameters):
    """Muon with decoupled weight decay."""
    rows.weights.mul_(1 - lr * hp.muon_decay)  # all ranks do the same
    return t.muon(rows, lr, now, hp, polar)


def parameter_groups(model: GPT, hp: Hyperparameters) -> list[Group]:
    """Return the groups, in the order in which weights are updated."""
    matrices = [p for p in model.blocks.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    adamw = partial(t.adam, decay=hp.adam_decay)
    rule = partial(t.adam, betas=hp.matrix_betas, decay=hp.muon_decay) if hp.all_adamw else muon
    return [
        Group("head", [model.lm_head.weight], adamw, hp.head_lr, 1, complete="forward"),
        Group("muon", matrices[::-1], rule, hp.muon_lr, 2, complete="layer"),
        Group("embed", [model.embed.weight], adamw, hp.embed_lr, 1),
        Group("vector", vectors, adamw, hp.scalar_lr, 0),
    ]


class Optimizers(t.Optimizers):
    """train_gpt.py's optimizers: Muon or AdamW for hidden matrices, AdamW for the rest."""

    groups_of = t.Late(lambda: parameter_groups)


class Run(t.Run):
    """A run of the benchmark."""

    records, default_record = RECORDS, "muon"
    model_class = t.Late(lambda: GPT)
    optimizers_class = t.Late(lambda: Optimizers)
    moment = t.Late(lambda: Moment)
    check = t.Late(lambda: check)


if __name__ == "__main__":
    t.main(run=Run)
