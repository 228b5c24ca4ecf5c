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
import train_gpt as t  # before torch, because it configures OpenMP
from train_gpt import Group, UserError, main, setting

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

# -----------------------------------------------------------------------------
# Settings and data. What train_gpt.py calls a sequence is a micro-batch of several contexts here


@dataclass(frozen=True)
class Hyperparameters(t.Hyperparameters):
    """train_gpt.py's settings, and those of the benchmark."""

    muon_lr: float = setting(0.025, "learning rate of hidden matrices (Muon or AdamW)")
    muon_decay: float = setting(0.05, "weight decay of matrices, times muon_lr", group="benchmark")
    adam_decay: float = setting(0.001, "weight decay of other parameters, times their rate")
    all_adamw: bool = setting(False, "train hidden matrices with AdamW, not Muon")
    matrix_betas: t.Pair = setting((0.9, 0.95), "AdamW's betas for hidden matrices", 0, 0.9999)
    init_std: float = setting(0.33**0.5, "q, k, v, fc: initial std * sqrt(fan_in); 0: torch's")
    float32_gains: bool = setting(False, "apply RMSNorm's gains in float32")
    context_len: int = setting(1024, "tokens in an attention context", 128, multiple_of=128)


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
    for name in ("seq_len", "val_seq_len"):
        if getattr(hp, name) % hp.context_len:
            raise UserError(f"--{name} {getattr(hp, name)}: must be a multiple of context_len")


def cut(shard: t.Shard, position: int, now: t.Moment, hp: Hyperparameters):
    """Cut one step's batch. As published, a token must be left in the shard after it."""
    if position + hp.batch_seqs * now.seq_len + 1 >= len(shard.tokens):
        return None
    return t.cut_consecutive(shard, position, now.step, now.seq_len, hp.batch_seqs)


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

    def __init__(self, hp: Hyperparameters):
        super().__init__()
        dim, width = hp.model_dim, hp.num_heads * hp.head_dim
        self.head_shape, self.eps = (hp.num_heads, hp.head_dim), hp.norm_eps
        self.scale = hp.attn_scale or hp.head_dim**-0.5
        self.norm1, self.norm2 = RMSNorm(hp), RMSNorm(hp)
        self.q, self.k, self.v = (Linear(dim, width) for _ in range(3))
        self.attn_proj = Linear(width, dim)
        self.fc, self.mlp_proj = Linear(dim, 4 * dim), Linear(4 * dim, dim)

    def forward(self, x: Tensor, rotary, mask, attend) -> Tensor:
        """Map x (1, T, C) to (1, T, C)."""
        h = self.norm1(x)
        q, k, v = (layer(h).view(1, -1, *self.head_shape) for layer in (self.q, self.k, self.v))
        q = t.rotate_normed(q, *rotary, self.eps)  # (1, H, T, D)
        k = t.rotate_normed(k, *rotary, self.eps)
        out = attend(q, k, v.transpose(1, 2), mask, self.scale)
        x = x + self.attn_proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp_proj(F.relu(self.fc(self.norm2(x))).square())


def capped(logits: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return cap * l / sqrt(l^2 + cap^2) of logits l in float32, and the cube root of its slope."""
    ratio = cap * (logits.float().square() + cap**2).rsqrt()
    return logits.float() * ratio, ratio


def capped_cross_entropy(logits, targets, cap, bias, bias_grad, grad_scale=None, grads=None):
    """Return the summed loss () of capped logits (T, V) + bias (V,) for targets (T,).

    The gradient of the logits, times grad_scale, is written to grads (T, V), which may be the same
    tensor as logits. Its sum over T is added to bias_grad (V,). Softmax subtracts cap, the upper
    bound of capped logits, in place of their maximum.
    """
    targets = targets[:, None]
    right, _ = capped(logits.gather(1, targets) + bias[targets], cap)
    z, ratio = capped(logits + bias, cap)
    p = torch.exp(z - cap)
    total = p.sum(dim=1, keepdim=True)
    if grads is not None:
        hit = torch.arange(p.size(1), device=p.device) == targets
        grads.copy_((p / total - hit.float()) * ratio**3 * grad_scale)
        bias_grad.add_(grads.sum(dim=0, dtype=bias_grad.dtype))
    return (total.log() + cap - right).sum()


class Head(t.Head):
    """train_gpt.py's head with a bias. The benchmark's gradients are of the loss summed over the
    batch. Optimizers divides gradients by batch_seqs, so the loss multiplies them by it."""

    cross_entropy = staticmethod(capped_cross_entropy)

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        self.bias = nn.Parameter(torch.zeros(hp.padded_vocab))
        self.batch_seqs = hp.batch_seqs

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss () of x (T, C) and targets (T,) int64."""
        options = self.softcap, self.bias.detach(), t.gradient_buffer(self.bias)
        return self.loss_of(x, targets, options, grad_scale=self.batch_seqs)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits (T, padded vocabulary) of x (T, C), in float32."""
        return capped(F.linear(x, self.weight.type_as(x)) + self.bias, self.softcap)[0]


class GPT(t.GPT):
    """The benchmark's language model."""

    def __init__(self, hp: Hyperparameters):
        nn.Module.__init__(self)  # skip t.GPT's, which makes other layers
        self.hp, self.layers = hp, (t.Layer("long"),) * hp.num_layers
        self.kernels = (t.symmetric_matmul,)
        self.embed, self.lm_head = nn.Embedding(hp.vocab_size, hp.model_dim), Head(hp)
        self.value_embeds = nn.ModuleDict({"embed": nn.ModuleDict()})  # this model has none
        self.norm1, self.norm2 = RMSNorm(hp), RMSNorm(hp)
        self.blocks = nn.ModuleList(Block(hp) for _ in range(hp.num_layers))
        self.use_flex, self.compiled, self.compile_, self.rotary = False, False, t.as_is, {}
        for name, p in self.blocks.named_parameters():
            if "proj" in name or (hp.init_std and name.endswith("bias")):
                p.data.zero_()
            elif hp.init_std and p.ndim == 2:
                p.data.normal_(std=hp.init_std / math.sqrt(p.size(1)))

    def make_masks(self, input_seq: Tensor, windows: dict, make_mask) -> dict:
        """Return the mask of input_seq (T,): causal, and within each context."""
        position = torch.arange(len(input_seq), device=input_seq.device, dtype=torch.int32)
        return {"long": make_mask(position - position % self.hp.context_len)}

    def rotary_of(self, length: int, when, device: torch.device, start: int = 0):
        """Return the rotary_table of `length` tokens from `start` on; each context begins at 0."""
        places = torch.arange(start, start + length, device=device) % self.hp.context_len
        return [table[places] for table in super().rotary_of(self.hp.context_len, when, device)]

    def trunk(self, x: Tensor, values: dict[str, Tensor], rotary, masks: dict, attend) -> Tensor:
        """Map embeddings (T, C) to the head's input (T, C)."""
        x = self.norm1(x)[None]  # (1, T, C): attention wants a batch axis
        for block in self.blocks:
            x = block(x, rotary, masks["long"], attend)
        return self.norm2(x)[0]


# -----------------------------------------------------------------------------
# Optimizers and run


def muon(buckets, lr: float, now: t.Moment, hp: Hyperparameters):
    """Muon with decoupled weight decay. Twelve iterations bring singular values close to 1."""
    polar = partial(t.zeropower_via_newtonschulz5, steps=12, coefficients=((2.0, -1.5, 0.5),) * 12)
    updates, add = t.muon(buckets, lr, now, hp, orthogonalise=polar)

    def take(weights: list[Tensor], sent: list[Tensor]) -> None:
        torch._foreach_mul_(weights, 1 - lr * hp.muon_decay)
        add(weights, sent)

    return updates, take


class Optimizers(t.Optimizers):
    """train_gpt.py's optimizers: Muon or AdamW for hidden matrices, AdamW for the rest."""

    @staticmethod
    def table(hp: Hyperparameters, compile_=t.as_is) -> tuple[Group, ...]:
        """Return the groups, in the order in which gradients are sent. No rule here is compiled."""
        adamw = partial(t.adam, eps=hp.adam_eps)
        rest = partial(adamw, betas=hp.adam_betas, decay=hp.adam_decay)
        matrices = partial(muon, hp=hp)
        if hp.all_adamw:
            matrices = partial(adamw, betas=hp.matrix_betas, decay=hp.muon_decay)
        return (
            Group("head", ("lm_head.weight",), rest, hp.head_lr, 1, complete="forward"),
            Group("muon", ("blocks.*.weight",), matrices, hp.muon_lr, 2, least_rows=8),
            Group("embed", ("embed.weight",), rest, hp.embed_lr, 1, complete="end"),
            Group("vector", ("*.bias", "*.gains"), rest, hp.scalar_lr, 0, math.inf, complete="end"),
        )


class Run(t.Run):
    """A run of the benchmark."""

    records, default_record, settings = RECORDS, "muon", Hyperparameters
    model_class, optimizers_class, loss_digits = GPT, Optimizers, 5
    check, cut = staticmethod(check), staticmethod(cut)

    def validates(self, step: int) -> bool:
        """Return whether the run validates after a step: five times as often in the last tenth."""
        every = self.hp.val_loss_every
        if step >= 0.9 * self.hp.num_iterations:
            every = -(-every // 5)
        return bool(every) and step % every == 0


if __name__ == "__main__":
    main(run_class=Run)
