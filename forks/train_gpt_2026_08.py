"""Train the NanoGPT-speedrun record of August 2026: a fork of forks/train_gpt_2026_07.py.

    torchrun --standalone --nproc_per_node=8 forks/train_gpt_2026_08.py    # number 92, 39.9 s
    ./run.sh forks/train_gpt_2026_08.py                                    # the same; or a demo

It imports train_gpt_2026_07.py, and overrides what the record changed. The numbers come from
github.com/KellerJordan/modded-nanogpt. Each technique is a setting or words of --layers:

    n-gram table     hashed bigrams and trigrams share 84.6 million rows: ngram_table.py
    sampled softmax  in training, the softmax covers a part of the vocabulary: sampled_softmax.py
    ANVIL            Muon with two momenta and other maps: anvil.py
    narrow heads     short attention has half the channels of q and k, some layers also of v
    fewer layers     some lack attention, one an MLP, one has two MLPs; mixers add x0 and n-grams
    groups           at the end, groups of channels mix the streams of earlier layers differently
    FP8              in attention's projections and in MLPs, also backward: fp8_layers.py
    averages         the run ends with averages of its last weights: tail_average.py
    mask             the last validation excludes tokens that cannot follow: canonical_mask.py
"""

import sys
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where train_gpt_2026_07.py lies
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tail_average
import train_gpt_2026 as base
import train_gpt_2026_07 as record_89
from anvil import anvil
from canonical_mask import CanonicalMask
from fp8_layers import FP8Projection, fp8_mlp
from ngram_table import NgramTable, ngram_hashes, remove_pieces, table_adam
from sampled_softmax import Head, plan
from train_gpt_2026 import UserError, t

# -----------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class Layer(record_89.Layer):
    """One layer of the model. Each of its new words is a field."""

    embed: bool = False  # a mixer adds a share of x0, after attention
    bigram: bool = False  # and a share of the n-grams' embedding; in layer 0, before attention
    narrow: bool = False  # heads' q and k have only the channels that rotate
    narrow_values: bool = False  # narrowv: heads' values have only the first half of the channels
    mlps: int = 1  # mlps0, mlps2: there is no MLP, or there are two

    words: ClassVar = record_89.Layer.words | {
        "embed": ("embed", bool),
        "bigram": ("bigram", bool),
        "narrow": ("narrow", bool),
        "narrowv": ("narrow_values", bool),
        "mlps": ("mlps", int),
    }

    @property
    def rotary(self) -> tuple[bool, bool]:  # overrides
        """The name of its tables, of those that GPT.rotary returns."""
        return self.narrow, self.paired

    @property
    def adds(self) -> tuple[str, ...]:  # overrides
        """Names of the streams that a mixer adds a share of, after attention."""
        return ("x0",) * self.embed + ("bigram",) * self.bigram

    def under(self, hp: "Hyperparameters") -> "Layer":  # overrides
        """Return the layer without what these settings turn off."""
        narrow, values = (on and hp.narrow_heads for on in (self.narrow, self.narrow_values))
        return replace(super().under(hp), narrow=narrow, narrow_values=values)


LAYERS = (
    "short+pair+narrow+embed+bigram,short+v0+xsa+narrow+narrowv+embed+bigram,"
    "short+v1+pair+narrow+embed,long+xsa+gate,none+mixer+embed+bigram,"
    "short+pair+narrow+embed+bigram,none+x3,none+mlps0+embed,"
    "short+v2+in7+narrow+narrowv+mlps2,none+bigram,long+v3+in7+gate+mudd"
)
LAYERS_DEMO = (
    "short+v0+pair+narrow+embed+bigram,long+v1+xsa+gate,none+mixer+mlps0+embed+bigram,"
    "short+x1+xsa+narrow+narrowv+mlps2+embed,long+v2+in2+gate+mudd"
)


@dataclass(frozen=True)
class Stage(base.Stage):
    """One stage of the run."""

    prefix: tuple[float, ...] = ()  # shares of --prefix, by equal parts of the stage
    candidates: tuple[float, ...] = ()  # tokens in the softmax, by equal parts of the stage


# The last but one stage tapers. A sequence of 49152 tokens has about 11000 different ones.
STAGES = (
    "share=320+length=1+window=384+short=128+lr=1+cap=896+targets=1/.5/.25+prefix=1"
    "+candidates=10240,"
    "share=361+length=2+window=896+short=384+lr=1.52+cap=2048+targets=1/.5+prefix=.8/.6/.4/.2"
    "+candidates=10240,"
    "share=426+length=3+window=1408+short=640+lr=1.73+cap=3072+candidates=14336/14336/24576,"
    f"share=67+length=2.5+window=1408+short=640+lr={1.73 * (20 / 24) ** 0.5}+cap=3072,"
    "length=1+window=1664+short=768+lr=1+cap=3072"
)
STAGES_DEMO = (
    "share=48+length=1+window=256+lr=1+targets=1/.5/.25+prefix=1+candidates=10240,"
    "share=54+length=2+window=256+lr=1.52+targets=1/.5+prefix=.8/.6/.4/.2+candidates=10240,"
    "share=64+length=3+window=384+lr=1.73+candidates=14336/14336/24576,"
    "share=10+length=2+window=384+lr=1.4,length=1+window=384+lr=1"
)


@dataclass(frozen=True)
class Hyperparameters(record_89.Hyperparameters):
    """train_gpt_2026_07.py's settings, and those of record 92."""

    attention_border: int = 0  # in training, attention ends at multiples of this in a document
    narrow_heads: bool = True  # heads are narrow in layers with the words narrow and narrowv
    narrow_scale: float = 0.13  # initial factor on the products of narrow q and k
    mlp_width: int = 0  # hidden channels of an MLP, 0: 4 model_dim
    mudd_groups: int = 0  # groups of channels with mixers of their own at the end, 0: one mixer
    canonical_mask: bool = False  # the last validation excludes tokens that GPT-2's tokenizer does
    sampled_softmax: bool = False  # train with the candidates that --stages names
    ngram_rows: int = 0  # rows of the table of bigrams and trigrams, 0: only bigram_rows
    ngram_lr: float = 0.56  # learning rate of the n-gram table
    ngram_beta2: float = 0.95  # the n-gram table's beta2 in two steps
    ngram_decay: float = 0.025  # cautious weight decay of the table, times lr^2, in two steps
    ngram_slow_from: int = 336  # first step from which it learns at each fourth, not second, step
    fp8_mlp: Literal["off", "up", "both", "all"] = "off"  # FP8 in MLPs; all: backward, too
    fp8_attention: bool = False  # matmuls that make q, k and v in FP8, forward and backward
    optimizer: Literal["muon", "anvil"] = "muon"  # of matrices
    slow_momentum: float = 0.98  # ANVIL's second momentum
    fast_momentum: float = 0.85  # its first one, where it mixes them; before, it is Muon's
    anvil_from: int = 514  # step from which ANVIL mixes its two momenta
    anvil_share: float = 0.4385  # share of the first momentum in this mixture
    tail_average: bool = False  # end with averages of the last weights

    layer_class: ClassVar = Layer
    stage_class: ClassVar = Stage


def check(hp: Hyperparameters) -> None:  # overrides
    """Raise UserError for settings that are not allowed, alone or together."""
    if hp.ngram_rows:
        check_ngrams(hp)  # first: what other checks ask for, such as --adam_every 1, it may forbid
    record_89.check(hp)
    layers = base.layer_table(hp)
    counts = [count for stage in base.stage_table(hp) for count in stage.candidates]
    size = hp.vocab_size
    narrow = [layer for layer in layers if layer.narrow or layer.narrow_values]
    other_tokens = hp.canonical_mask and not 50257 <= size <= 50304
    bad_groups = hp.mudd_groups and (hp.model_dim % hp.mudd_groups or not hp.mudd_width)
    no_prefix = hp.prefix and not any(stage.prefix for stage in base.stage_table(hp))
    mean_in_fp8 = (hp.fp8_attention or hp.fp8_mlp == "all") and not hp.loss_sum
    bad_counts = hp.sampled_softmax and any(count % 16 or not 0 < count <= size for count in counts)
    for name, wrong, rule in (
        ("layers", any(row.window != "short" for row in narrow), "narrow heads are short"),
        ("layers", max(row.mlps for row in layers) > 2, "a layer has at most two MLPs"),
        ("layers", layers[-1].mudd and layers[-1].mlps != 1, "the layer of mudd has one MLP"),
        ("scaled_projections", not hp.scaled_projections, "must be on"),
        ("loss_sum", mean_in_fp8, "FP8 in all layers needs it, on a CPU, too"),
        ("mlp_width", hp.mlp_width > 4 * hp.model_dim, "must be at most 4 model_dim"),
        ("mudd_groups", bad_groups, "must divide model_dim, and needs --mudd_width above 0"),
        ("canonical_mask", other_tokens, "is for GPT-2's tokens: try --vocab_size 50304"),
        ("stages", bad_counts, f"candidates must be multiples of 16, from 16 to {size}"),
        ("sampled_softmax", hp.sampled_softmax and not counts, "needs candidates in --stages"),
        (
            "sampled_softmax",
            hp.sampled_softmax and size % 128,
            "needs vocab_size a multiple of 128",
        ),
        ("prefix", no_prefix, "needs prefix in --stages, which says its shares"),
    ):
        if wrong:
            raise UserError(f"--{name} {t.show(getattr(hp, name))}: {rule}")


def check_ngrams(hp: Hyperparameters) -> None:
    """Raise UserError for settings that the n-gram table does not allow."""
    rows = hp.ngram_rows
    if hp.grad_clip:
        rule = "is not possible with the n-gram table, which --ngram_rows 0 turns off"
        raise UserError(f"--grad_clip {hp.grad_clip}: {rule}")
    if rows % 2 or not 6 <= rows <= 2**31:
        raise UserError(f"--ngram_rows {rows}: must be even, and from 6 to 2^31")
    if hp.bigram_rows or not hp.bigram_signs:
        raise UserError(f"--ngram_rows {rows}: needs --bigram_rows 0 and --bigram_signs above 0")
    if hp.ngram_slow_from % 4 or hp.adam_every != 2:
        rule = "needs --ngram_slow_from a multiple of 4, --adam_every 2"
        raise UserError(f"--ngram_rows {rows}: {rule}")


def changed(hp: record_89.Hyperparameters, **settings) -> Hyperparameters:
    """Return a record of train_gpt_2026_07.py with all techniques of record 92, and settings."""
    techniques = {
        "bigram_rows": 0,
        "attn_scale": 0.085,
        "sampled_softmax": True,
        "fp8_mlp": "all",
        "fp8_attention": True,
        "optimizer": "anvil",
        "muon_decay": 2.25,
        "tail_average": True,
        "canonical_mask": True,
        "lr_final": 0.3,
        "momentum_end": 0.93,
        "adam_groups": hp.adam_groups.replace("values+lr=.6", "values+lr=.56"),
    }
    return Hyperparameters(**vars(hp) | techniques | settings)


RECORDS = {
    "2026-08-30_ANVIL2": changed(
        record_89.RECORDS["2026-07-17_FP8DownProjection"],
        num_iterations=1194,
        cooldown_frac=940 / 1174,
        stages=STAGES,
        extension_frac=20 / 1194,
        tied_frac=0.9999,  # until the extension; with 1, to the end
        layers=LAYERS,
        attention_border=2560,
        mlp_width=2816,
        mudd_groups=12,
        ngram_rows=84602880,
        muon_mul=((2816 / 768) ** 0.5, 2 * (2816 / 768) ** 0.5, 1.0),
        momentum_warmup_steps=240,
        x_s=448 / 100,
        w_s=448 / 2,
        grad_s=8 * 448 / 0.75,
        val_loss_every=0,
    ),
    # For the time of train_gpt_2026_07.py's demo. Fewer candidates end higher (BENCHMARKS.md).
    "demo": changed(
        record_89.RECORDS["demo"],
        num_iterations=240,
        stages=STAGES_DEMO,
        layers=LAYERS_DEMO,
        num_layers=5,
        mlp_width=480,
        mudd_groups=4,
        ngram_rows=200000,
        ngram_slow_from=68,
        anvil_from=104,
        muon_mul=(3.75**0.5, 2 * 3.75**0.5, 1.0),
        val_loss_every=120,
    ),
}


# -----------------------------------------------------------------------------
# Schedules


def part_of_stage(values: tuple, step: int, hp: Hyperparameters):
    """Return which of a stage's values holds at a step: each for an equal part of the stage."""
    if len(values) == 1:
        return values[0]
    gone = 1 - base.left_of_stage(step, hp)
    return values[min(int(gone * len(values) + 1e-9), len(values) - 1)]


class Moment(record_89.Moment):
    """All that is scheduled, at one step."""

    def __init__(self, step: int, hp: Hyperparameters):
        super().__init__(step, hp)
        stage = base.stages_until(self.step, hp)[-1]
        self.prefix = hp.prefix * part_of_stage(stage.prefix or (0.0,), self.step, hp)
        self.candidates = 0  # tokens in the softmax, 0: all
        if hp.sampled_softmax and stage.candidates:
            self.candidates = int(part_of_stage(stage.candidates, self.step, hp))
        self.ngram_cycle = 2 if self.step < hp.ngram_slow_from else 4  # steps between updates
        self.ngrams = (self.step + 1) % self.ngram_cycle == 0  # whether the n-gram table learns
        mixes = self.step >= hp.anvil_from
        self.fast_beta = hp.fast_momentum if mixes else self.momentum  # of ANVIL's fast momentum
        self.fast_share = hp.anvil_share if mixes else 1.0  # of it, in the mixture

    @property
    def graph_key(self) -> tuple:  # overrides
        """The loss is compiled once more for each number of candidates, and Adam of the value
        tables for each cycle."""
        cycle = self.ngram_cycle if self.ngrams else 0
        return *super().graph_key, self.candidates, cycle


# -----------------------------------------------------------------------------
# Model


class CausalSelfAttention(record_89.CausalSelfAttention):
    """train_gpt_2026_07.py's attention, whose heads may be narrow. A narrow head is a part of a
    whole one: the rest of the weights exists, as in the public record, and never learns."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__(hp, layer)
        self.fp8 = hp.fp8_attention
        if layer.narrow:
            self.scale = hp.narrow_scale

    def qkv_weights(self) -> list[Tensor]:  # overrides
        """Return the weights of q, k and v, each (H, D, C) or narrower. Of q and k, the channels
        that rotate are the first half of both halves, with half RoPE."""
        *qk, v = super().qkv_weights().unflatten(1, self.head_shape)
        if self.layer.narrow:
            qk = [part.unflatten(1, (4, -1))[:, ::2].flatten(1, 2) for part in qk]
        if self.layer.narrow_values:
            v = v[:, : v.size(1) // 2]
        return [*qk, v]

    def projected(self, x: Tensor, value: Tensor | None) -> tuple[Tensor, ...]:  # overrides
        """Return q, k and v, each (1, T, H, D) or narrower, of x (1, T, C) and a table's rows."""
        parts = self.qkv_weights()
        qkv_w = self.lambdas[0] * torch.cat([part.flatten(0, 1) for part in parts])
        if self.fp8 and self.training and t.fp8_supported(x.device):
            qkv = FP8Projection.apply(x.flatten(0, -2), qkv_w.type_as(x))[None]
        else:
            qkv = F.linear(x, qkv_w.type_as(x))
        qkv = qkv.split([len(p) * p.size(1) for p in parts], dim=-1)
        q, k, v = (part.unflatten(-1, (len(p), -1)) for part, p in zip(qkv, parts, strict=True))
        if value is not None:
            value = self.gated(x, value.view(1, -1, *self.head_shape))
            v = v + value[..., : v.size(-1)]
        return q, k, v

    def output_weights(self) -> Tensor:  # overrides
        """Return the weights of the output, (C, H * D), for as many channels as values have."""
        weights = super().output_weights()
        if self.layer.narrow_values:
            heads = weights.unflatten(1, self.head_shape)
            weights = heads[:, :, : heads.size(2) // 2].flatten(1)
        return weights


class MLP(record_89.MLP):
    """train_gpt_2026_07.py's MLP, of another width, and with backward matmuls in FP8, too."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        if hp.fp8_mlp == "all":
            self.fp8_product, self.room = fp8_mlp, 1.03
        if hp.mlp_width:
            up, down = self.c_fc.weight.detach(), self.c_proj.weight.detach()
            self.c_fc.weight = nn.Parameter(up[: hp.mlp_width].clone())
            self.c_proj.weight = nn.Parameter(down[:, : hp.mlp_width].clone())


class Block(record_89.Block):
    """train_gpt_2026_07.py's layer, which may lack attention or the MLP, or have two MLPs. x0 and
    n-grams are also added in layers without attention. It also returns what the MLPs read."""

    attention_class = CausalSelfAttention
    mlp_class = MLP

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__(hp, layer)
        if layer.mlps == 0:
            self.mlp = None
        self.second_mlp = self.mlp_class(hp) if layer.mlps == 2 else None
        if not layer.mudd:
            self.residual_lambda = nn.Parameter(torch.full((2,), hp.residual_lambda))
            self.post_lambda = nn.Parameter(torch.ones(2))

    def forward(self, x, added, value, rotary, mask, source, numbers) -> tuple:  # overrides
        """Map x (1, T, C) to (1, T, C), twice."""
        keep, post, out = self.residual_lambda, self.post_lambda, None
        if self.attn is not None:
            read = base.recomputed_if_small(t.norm, x, self.eps) if source is None else source
            of_weights = None if post is None else post[0]
            out = self.attn(read, value, rotary, mask, of_weights, numbers)
        if post is None:  # the layer of mudd
            x = numbers["keep"] * x + numbers["attention"] * out + added
            read = base.recomputed_if_small(t.norm, x, self.eps)
            return numbers["keep mlp"] * x + numbers["mlp"] * self.mlp(read), read
        if out is not None or added is not None:
            x = keep[0] * x
        for part in (out, added):
            if part is not None:
                x = x + part
        read = base.recomputed_if_small(t.norm, x, self.eps)
        x = keep[1] * x
        for mlp in (self.mlp, self.second_mlp):
            if mlp is not None:
                x = x + mlp(read, post[1])
        return x, read


class GroupMixer(record_89.Mixer):
    """A Mixer whose numbers also differ between groups of adjacent channels."""

    def __init__(self, hp: Hyperparameters, width: int, constants: dict[str, list[float]]):
        super().__init__(hp, width, constants)
        self.group_size = hp.model_dim // hp.mudd_groups
        self.group_w = nn.Parameter(torch.zeros(len(self.bias), hp.mudd_groups, width))

    def forward(self, x: Tensor, scale: float = record_89.MIXER_SCALE) -> Tensor:  # overrides
        """Map x (1, T, C) to all numbers of all channels, (1, T, n * C)."""
        of_groups = F.linear(self.hidden(x), self.group_w.flatten(0, 1).type_as(x))
        of_groups = (scale * of_groups).type_as(x).unflatten(-1, self.group_w.shape[:2])
        numbers = super().forward(x, scale)[..., None] + of_groups
        return numbers.flatten(2).repeat_interleave(self.group_size, dim=-1)

    def named(self, numbers: Tensor) -> dict[str, Tensor]:  # overrides
        """Return the numbers (1, T, C) of all channels by their names."""
        return dict(zip(self.names, numbers.chunk(len(self.names), dim=-1), strict=True))


@t.compiled
def with_borders(tokens: Tensor, distance: int) -> Tensor:
    """Return tokens (T,) with END_OF_TEXT at each such distance from a document's beginning: for
    masks alone, in which a document then begins there."""
    position = torch.arange(len(tokens), device=tokens.device)
    start = torch.where(tokens == t.END_OF_TEXT, position, 0).cummax(0).values
    return torch.where((position - start) % distance == 0, t.END_OF_TEXT, tokens)


class GPT(record_89.GPT):
    """The language model of record 92."""

    block_class = Block
    head_class = Head

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        self.ngrams = NgramTable(hp) if hp.ngram_rows else None
        if hp.mudd_groups and "end" in self.mixers:
            constants = self.mixer_constants()["end"]
            self.mixers["end"] = GroupMixer(hp, hp.mudd_width, constants)

    @cached_property
    def canonical(self) -> CanonicalMask:
        """The mask of the last validation, which is made when it is needed first."""
        return CanonicalMask(len(self.lm_head.weight))

    def mixer_constants(self) -> dict[str, dict[str, list[float]]]:  # overrides
        """Return what train_gpt_2026_07.py's returns. The end mixes all value tables' rows, what
        the last MLP reads, and what late attention does, too."""
        made = super().mixer_constants()
        if "end" in made:
            tables = [layer.values for layer in self.layers if layer.values is not None]
            names = [*tables, "read"]
            if self.layers[-1].source is not None:
                names.append(f"source {self.layers[-1].source}")
            made["end"] |= dict.fromkeys(names, [0.0])
        return made

    def masks(self, input_seq: Tensor, long: Tensor, short: Tensor) -> dict:  # overrides
        """Return the masks of input_seq (T,), by Layer.mask."""
        if self.training and self.hp.attention_border:
            input_seq = with_borders(input_seq, self.hp.attention_border)
        return super().masks(input_seq, long, short)

    def rotary(self, position: Tensor, now: Moment) -> dict[tuple[bool, bool], tuple]:  # overrides
        """Return the rotary tables of tokens at positions (T,), by Layer.rotary. Those of narrow
        heads follow the short window."""
        tables = {}
        for narrow in sorted({layer.narrow for layer in self.layers}):
            stages = base.stages_until(now.step, self.hp) if self.hp.yarn else ()
            windows = tuple(stage.window for stage in stages)
            if narrow:
                windows = tuple(stage.short or stage.window // 2 for stage in stages)
            if (narrow, windows) not in self.frequencies:
                frequency = t.rotary_frequencies(self.hp, position.device)
                frequency, factor = base.yarn(frequency, windows)
                frequency = frequency[: len(frequency) // (1 + narrow)]
                self.frequencies[narrow, windows] = frequency, base.number(factor, frequency)
            made = self.rotary_tables(position, *self.frequencies[narrow, windows])
            tables |= {(narrow, paired): table for paired, table in made.items()}
        return tables

    def layer_output(self, i: int, streams: dict[str, Tensor], *more) -> Tensor:  # overrides
        """Return the output (1, T, C) of layer i, and make the stream "read": what the last MLP
        reads."""
        x, read = super().layer_output(i, streams, *more)
        if i == len(self.layers) - 1:
            streams["read"] = read
        return x

    def share_ngrams(self, rank: int = 0, parts: int = 1) -> None:
        """Make this rank's part of the n-gram table, if it is not made yet."""
        if self.ngrams is not None and self.ngrams.rows is None:
            table = self.embed.weight
            self.ngrams.share(rank, parts, table.device, table.dtype)

    @property
    def bytes_of_pieces(self) -> int:
        """The bytes of what save_pieces saves on all ranks. Gradients that wait for the table's
        next update add a few per cent."""
        if self.ngrams is None:
            return 0
        return self.hp.ngram_rows * self.ngrams.row_bytes(self.embed.weight.dtype)

    def save_pieces(self, path: Path) -> None:  # overrides
        """Save this rank's piece of the n-gram table. No rank begins before what another save has
        left is removed, and none goes on, to save the checkpoint, before all pieces are saved."""
        if self.ngrams is None:
            return
        if self.ngrams.rank == 0:
            remove_pieces(path)
        self.wait_for_ranks()
        self.ngrams.save(path)
        self.wait_for_ranks()

    def wait_for_ranks(self) -> None:
        """Wait until all ranks call this."""
        t.all_reduce_(torch.zeros(1, device=self.embed.weight.device)).item()

    def load_pieces(self, path: Path | None, weights_only: bool) -> None:  # overrides
        """Load this rank's rows of the n-gram table; without a path, zeros."""
        if self.ngrams is not None:
            self.share_ngrams()
            if path is None:
                self.ngrams.clear()
            else:
                self.ngrams.load(path, weights_only)

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # overrides
        """Return what train_gpt_2026_07.py's returns. "bigram" is the sum of a bigram's and a
        trigram's row of the n-gram table, each with signs."""
        x, more = super().embedded(input_seq)
        if self.ngrams is not None:
            self.share_ngrams()
            rows, signs = ngram_hashes(input_seq, self.hp.ngram_rows, len(self.signs))
            found = self.ngrams.look_up(rows.flatten())
            more["bigram"] = self.signed_sum(found.view(*rows.shape, -1), signs)
        return x, more

    @t.compiled
    def signed_sum(self, rows: Tensor, signs: Tensor) -> Tensor:
        """Return the sum (T, C) of rows (2, T, C) times those rows (2, T) of the table of signs."""
        return (rows * self.signs[signs.long()].type_as(rows)).sum(0)

    def forward(self, input_seq: Tensor, target_seq: Tensor, now: Moment) -> Tensor:  # overrides
        """Return what train_gpt_2026_07.py's returns. In training, of a sampled softmax; in the
        last validation, without tokens that cannot follow."""
        if not self.training:
            if not self.hp.canonical_mask or now.step < self.hp.num_iterations:
                return super().forward(input_seq, target_seq, now)
            hidden = self.hidden(input_seq, now)
            return self.canonical.loss(self.lm_head, hidden, target_seq, input_seq)
        self.tied = now.tied
        hidden = self.hidden(input_seq, now)
        return self.lm_head.loss(hidden, target_seq, now.targets, now.prefix, now.candidates)


# -----------------------------------------------------------------------------
# Optimizers, and the class that tools use


class Optimizers(record_89.Optimizers):
    """train_gpt_2026_07.py's Optimizers, which also let the n-gram table learn, average the last
    weights, and keep where the sweeps of sequences stand. A sequence of the batch has a sweep of
    its own, so it does not matter how many ranks there are."""

    @staticmethod
    def parameter_groups(model: GPT, hp: Hyperparameters) -> list:  # overrides
        """Return the groups, in the order in which weights are updated: matrices learn by ANVIL,
        value tables in the rhythm of the n-gram table."""
        groups = base.Optimizers.parameter_groups(model, hp)
        for group in groups:
            if group.name in hp.muon_groups and hp.optimizer == "anvil":
                group.rule = partial(anvil, factor=hp.muon_groups[group.name])
            if group.name == "values" and hp.ngram_rows:
                group.rule = partial(table_adam, **group.rule.keywords)
        return groups

    def __init__(self, model: GPT, hp: Hyperparameters, rank: int = 0, world_size: int = 1):
        super().__init__(model, hp, rank, world_size)
        if hp.ngram_rows and hp.val_tokens // hp.val_seq_len % world_size:
            rule = "val_tokens / val_seq_len must be a multiple of the ranks"
            raise UserError(f"--ngram_rows, on {world_size} ranks: {rule}")
        model.share_ngrams(rank, world_size)
        self.set_offsets(model.lm_head.first_offsets(hp.batch_seqs))

    def set_offsets(self, offsets: Tensor) -> None:
        """Give the head those of this rank's sequences, of all (batch_seqs,)."""
        head = self.model.lm_head
        head.offsets = offsets.chunk(self.world_size)[self.rank].to(head.weight.device, copy=True)

    @torch.no_grad()
    def step(self, now: Moment) -> list[Tensor]:  # overrides
        """Update all groups that learn at a moment, and the n-gram table when its cycle ends."""
        norms = super().step(now)
        ngrams = self.model.ngrams
        if ngrams is not None:
            ngrams.collect()
            if now.ngrams:
                ngrams.learn(now)
        if self.hp.tail_average:
            tail_average.average(self.groups, now, self.hp)
        return norms

    def state_dict(self) -> dict[str, dict[str, Tensor]]:  # overrides
        """Return all states, and the offsets of all sequences, on rank 0's CPU."""
        saved, offsets = super().state_dict(), self.model.lm_head.offsets
        if self.world_size > 1:
            own, offsets = offsets, offsets.new_empty(self.hp.batch_seqs)
            t.all_gather(offsets, own)
        return saved | {"sampled softmax": {"offsets": offsets.cpu()}}

    def load_state_dict(self, saved: dict[str, dict[str, Tensor]]) -> None:  # overrides
        """Load state that any number of ranks saved, or begin anew with {}."""
        super().load_state_dict(saved)
        first = {"offsets": self.model.lm_head.first_offsets(self.hp.batch_seqs)}
        self.set_offsets(saved.get("sampled softmax", first)["offsets"])


class Run(record_89.Run):
    """A run of this record."""

    records = RECORDS
    default_record = "2026-08-30_ANVIL2"
    GPT = GPT
    Optimizers = Optimizers
    Moment = Moment
    check = staticmethod(check)
    plan = staticmethod(plan)


if __name__ == "__main__":
    t.main(run=Run)
