"""Train the NanoGPT-speedrun records of May to August 2026: a fork of forks/train_gpt_2026.py.

    torchrun --standalone --nproc_per_node=8 forks/train_gpt_2026_07.py    # the newest, number 89
    ./run.sh forks/train_gpt_2026_07.py                                    # the same; or a demo

It imports train_gpt_2026.py, and overrides what the records since then changed. The numbers come
from github.com/KellerJordan/modded-nanogpt. The techniques, in the order that a token meets them:

    signs            embeddings of bigrams are multiplied by random signs, chosen by another hash
    mixers           small MLPs turn each token's stream into gates and factors of the layers
    composed heads   heads also read a mixture of all heads' attention to the last 112 tokens
    xsa              a share of what attention finds along a token's own value is subtracted
    FP8 in MLPs      the forward matmuls of MLPs, by a kernel
    mudd             the last layer and the head mix streams of earlier layers, by token
    prefix loss      the longest token that begins the next token is also a target
    pairs in Muon    q and k are orthogonalised in pairs of heads
"""

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))  # where train_gpt_2026.py lies
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import train_gpt_2026 as base
from train_gpt_2026 import BLOCK, UserError, t

# -----------------------------------------------------------------------------
# Settings


@dataclass(frozen=True)
class Layer(base.Layer):
    """One layer of the model. Each of its new words is a field."""

    xsa: bool = False  # a share of attention's output along a token's own value is subtracted
    gate: bool = False  # each head's output is multiplied by a number of the token
    composed: bool = False  # heads also read a mixture of all heads
    mixer: bool = False  # a mixer makes gates and factors of this layer and later ones from here
    mudd: bool = False  # multiway dynamic dense: the last layer and the head mix earlier streams

    @property
    def adds(self) -> tuple[str, ...]:
        """Names of the streams that a mixer adds a share of, after attention."""
        return () if self.window == "none" or self.mudd else ("x0", "bigram")

    words: ClassVar = base.Layer.words | {
        word: (word, bool) for word in ("xsa", "gate", "composed", "mixer", "mudd")
    }


LAYERS = (
    "short+pair,short+v0+xsa,short+v1+pair,long+xsa+gate,short+xsa+mixer,short+pair,none+x3,"
    "short+xsa,short+v2+in7,short+v3+in7+pair,long+v4+in7+gate+composed+mudd"
)
LAYERS_DEMO = "short+v0+pair,long+v1+xsa+gate,short+x0+xsa+mixer,long+v2+in1+gate+composed+mudd"
# Adam's numbers for weights and biases of mixers; "mudd" are those of the last layer and the end.
ADAM = (
    "mixer+lr=8e-4+beta1=.9+beta2=.99+decay=.005,mixer_bias+lr=8e-4+beta1=.9+beta2=.99,"
    "mixer_scale+lr=8e-4+beta1=.9+beta2=.99,"
    "mudd+lr=.002+beta1=.9+beta2=.99+decay=.005,mudd_bias+lr=.002+beta1=.9+beta2=.99"
)


@dataclass(frozen=True)
class Hyperparameters(base.Hyperparameters):
    """train_gpt_2026.py's settings, and those of later records."""

    qk_pairs: bool = False  # Muon orthogonalises q and k in pairs of heads
    bigram_signs: int = 0  # rows of the table of random signs for bigrams, 0: no signs
    prefix: float = 0.0  # loss weight of the next GPT-2 token's prefix in stage 1; falls to 0 in 2
    mixer_width: int = 64  # hidden channels of the mixers, 0: the same numbers for all tokens
    mudd_width: int = 64  # hidden channels of the mixers of mudd, 0: the same for all tokens
    fp8_mlp: Literal["off", "up", "both"] = "off"  # matmuls of MLPs in FP8, in forward passes

    layer_class: ClassVar = Layer
    group_names: ClassVar = base.GROUPS | {
        "mixer": (r"mixers\.\d+\..*_w", "mixer"),
        "mixer_bias": (r"mixers\.\d+\.bias", "mixer_bias"),
        "mixer_scale": (r"mixer_scale", "scalar"),
        "mudd": (r"mixers\.(last|end)\..*_w", "mudd"),
        "mudd_bias": (r"mixers\.(last|end)\.bias", "mudd_bias"),
        "muon": (r"blocks\..*(weight|qkv_w|v_w)", "muon"),
        "pairs": (r"blocks\..*qk_w", "pairs"),  # wide matrices, but with factor 1
    }
    muon_groups: ClassVar = {"muon": None, "pairs": 1.0}

    @property
    def most_targets(self) -> int:  # overrides
        """The largest number of targets that a token has in any stage."""
        return super().most_targets + (self.prefix > 0)


def check(hp: Hyperparameters) -> None:  # overrides
    """Raise UserError for settings that are not allowed, alone or together."""
    base.check(hp)
    layers = base.layer_table(hp)
    for layer in layers:
        for_heads = layer.xsa or layer.gate or layer.composed or layer.mudd
        if for_heads and (layer.paired or layer.window == "none"):
            raise UserError("--layers: xsa, gate, composed, mudd need attention without pairs")
        if layer.mudd and layer is not layers[-1]:
            raise UserError("--layers: mudd is for the last layer")
    if hp.num_heads % 2 or hp.num_heads * hp.head_dim != hp.model_dim:
        raise UserError(f"--num_heads {hp.num_heads}: must be even, and model_dim / head_dim")
    if hp.attention_gate or hp.skip_gate:
        raise UserError("--attention_gate and --skip_gate must be off: mixers make the gates")


def changed(hp: base.Hyperparameters, **settings) -> Hyperparameters:
    """Return a record of train_gpt_2026.py with what all records have here, and with settings."""
    settings |= {"attention_gate": False, "skip_gate": False, "qk_pairs": True, "muon_beta2": 0.9}
    return Hyperparameters(**vars(hp) | settings | {"adam_groups": f"{hp.adam_groups},{ADAM}"})


MUDD_GATED = changed(
    base.SIMPLIFY_HC,
    num_iterations=1290,
    extension_frac=15 / 1290,
    layers=LAYERS,
    bigram_rows=377280,
    bigram_signs=8192,
    fp8_mlp="up",
)
RECORDS = {
    "2026-05-27-MuddGatedAndDC": MUDD_GATED,  # as its folder's version this_pr_v3 has it
    # Record 89 as the public project's master has it, at commit f411b3d of 2026-08-01. The logs in
    # the folder of this name are of an older program, without composed heads and prefixes.
    "2026-07-17_FP8DownProjection": replace(
        MUDD_GATED, num_iterations=1285, extension_frac=15 / 1285, prefix=0.25, fp8_mlp="both"
    ),
    # The newest record at the size of train_gpt_2026.py's demo, with all its techniques.
    "demo": changed(
        base.RECORDS["demo"], prefix=0.25, layers=LAYERS_DEMO, bigram_signs=512, fp8_mlp="both"
    ),
}


# -----------------------------------------------------------------------------
# Schedules


class Moment(base.Moment):
    """All that is scheduled, at one step."""

    def __init__(self, step: int, hp: Hyperparameters):
        super().__init__(step, hp)
        stage = len(base.stages_until(self.step, hp))
        self.prefix = hp.prefix if stage == 1 else 0.0  # loss weight of the next token's prefix
        if stage == 2:
            self.prefix = hp.prefix * base.left_of_stage(self.step, hp)

    @property
    def graph_key(self) -> tuple:  # overrides
        """A prefix is one more target, for which the loss is compiled once more."""
        return *super().graph_key, self.prefix > 0


# -----------------------------------------------------------------------------
# Model


MIXER_SCALE = 0.1  # factor on what mixers make; those of the layers learn it
COMPOSED_WINDOW = 112  # tokens that composed heads attend to, a token itself among them


class Mixer(nn.Module):
    """A small MLP that turns each token's stream into named numbers (MUDD, arXiv 2502.12170). They
    begin as the same constants for all tokens, from `bias`."""

    def __init__(self, hp: Hyperparameters, width: int, constants: dict[str, list[float]]):
        super().__init__()
        self.names = list(constants)
        self.sizes = [len(numbers) for numbers in constants.values()]
        self.bias = nn.Parameter(torch.tensor(sum(constants.values(), [])) / MIXER_SCALE)
        self.hidden_w = self.out_w = None
        if width:
            self.hidden_w = nn.Parameter(t.CastedLinear(hp.model_dim, width).weight.detach())
            self.out_w = nn.Parameter(torch.zeros(len(self.bias), width))

    def forward(self, x: Tensor, scale: float | Tensor = MIXER_SCALE) -> Tensor:
        """Map x (1, T, C) to all numbers (1, T, n), times a scale (1,)."""
        bias = self.bias.type_as(x)
        if self.hidden_w is None:
            return (scale * bias).type_as(x).expand(1, x.size(1), -1)
        hidden = self.hidden(x)
        return (scale * F.linear(hidden, self.out_w.type_as(x), bias)).type_as(x)

    def hidden(self, x: Tensor) -> Tensor:
        """Map x (1, T, C) to the hidden channels (1, T, width)."""
        return F.gelu(F.linear(x, self.hidden_w.type_as(x)))

    def named(self, numbers: Tensor) -> dict[str, Tensor]:
        """Return numbers (1, T, n) by their names."""
        return dict(zip(self.names, numbers.split(self.sizes, dim=-1), strict=True))


def with_block_before(x: Tensor) -> Tensor:
    """Cut x (..., (n + 1) BLOCK, D) into n pieces of two blocks, (..., n, 2 BLOCK, D)."""
    blocks = x.unflatten(-2, (-1, BLOCK))
    return torch.cat([blocks[..., :-1, :, :], blocks[..., 1:, :, :]], dim=-2)


def composed(w1: Tensor, w2: Tensor, q: Tensor, k: Tensor, v: Tensor, mask, scale: float) -> Tensor:
    """Return what composed heads add to attention, (1, H, n, D): w2[h] * sum over g of w1[g] *
    P[g] @ v[h], where P[g] is head g's softmax over the last 112 tokens, or fewer if the mask shows
    fewer (arXiv 2405.08553). q is (1, H, n, D), k and v are (1, H, T, D), of which q's are the last
    n tokens; w1 and w2 are (1, n, H). Each block of queries reads the keys of two blocks."""
    heads, tokens, before = q.size(1), q.size(2), k.size(2) - q.size(2)
    row = torch.arange(tokens, device=q.device)
    first = row + 1 - (mask == 0).sum(-1) if torch.is_tensor(mask) else mask[0] - before
    first = torch.maximum(first, row - (COMPOSED_WINDOW - 1))
    rest = -tokens % BLOCK  # of the last block
    q, w1 = F.pad(q, (0, 0, 0, rest)), F.pad(w1, (0, 0, 0, rest))
    k, v = (F.pad(part, (0, 0, BLOCK - before, rest)) for part in (k, v))

    row = F.pad(row, (0, rest)).view(-1, BLOCK, 1)
    column = with_block_before(torch.arange(-BLOCK, tokens + rest, device=q.device)[:, None]).mT
    visible = (column <= row) & (column >= F.pad(first, (0, rest)).view_as(row))
    scores = (q * scale).unflatten(2, (-1, BLOCK)) @ with_block_before(k).mT
    maps = scores.float().masked_fill(~visible, -1e30).softmax(-1)
    shares = w1.mT.unflatten(2, (-1, BLOCK))[..., None]  # (1, H, blocks, BLOCK, 1)
    mixture = (maps * shares).sum(1).type_as(v)
    out = mixture @ with_block_before(v.transpose(1, 2).flatten(2))  # of all heads' values
    out = out.flatten(1, 2)[:, :tokens].unflatten(-1, (heads, -1))
    return (w2[..., None] * out).transpose(1, 2)


def without_own_value(out: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Subtract from attention `out` (1, T, H, D) a share tanh(alpha) (1, T, H) of its part along
    the token's own value v (1, T, H, D): exclusive attention, XSA (arXiv 2603.09078;
    2026-04-29_XSAGatedLayers)."""
    along = (out * v).sum(-1, keepdim=True) / v.square().sum(-1, keepdim=True).clamp(min=1e-8)
    return out - torch.tanh(alpha)[..., None] * along * v


class CausalSelfAttention(base.CausalSelfAttention):
    """train_gpt_2026.py's attention, with what a mixer says of each token and head."""

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__(hp, layer)
        self.layer = layer
        self.gates_by_values = hp.gate_by_values  # of pairs, too
        if layer.mudd:
            self.value_gate = None
        weights = self.qkv_w.detach()
        del self.qkv_w
        # Muon orthogonalises each of these matrices (pairs: 2026-04-08_PairedHeadMuon).
        rows = weights.size(1) if not hp.qk_pairs else 2 * hp.head_dim
        self.qk_w = nn.Parameter(weights[:2].reshape(-1, rows, hp.model_dim))
        self.v_w = nn.Parameter(weights[2])

    def qkv_weights(self) -> Tensor:  # overrides
        """Return the weights of q, k and v, (3, H * D, C)."""
        return torch.cat([self.qk_w.view(2, *self.v_w.shape), self.v_w[None]])

    def attend(self, q, k, v, mask: tuple | Tensor, scale: float, *shares) -> Tensor:  # overrides
        """Attend. With `shares`, w1 and w2 of `composed`, heads are composed, too."""
        k = base.offset_keys(k) if self.offsets_keys else k
        out = t.attend(q, k, v, mask, scale)
        if shares:
            out = out + base.recomputed_if_small(composed, *shares, q, k, v, mask, scale)
        return out

    def forward(self, x, value, rotary, mask, post, numbers) -> Tensor:  # overrides
        """Map x (1, T, C) to (1, T, C), as train_gpt_2026.py's. `numbers` (1, T, H) are a mixer's:
        alpha, gate, and w1 and w2 of composed heads."""
        q, k, v = self.projected(x, value)
        shares = ()
        if self.layer.composed:
            w1 = F.rms_norm(numbers["w1"].float(), numbers["w1"].shape[-1:], eps=1e-6)
            shares = w1, numbers["w2"]
        out = self.attended(q, k, v, rotary, mask, *shares)
        if self.layer.xsa:
            out = without_own_value(out, v, numbers["alpha"])
        if self.layer.gate:
            out = out * numbers["gate"][..., None]
        return self.output(out, post)


def fp8_relu2_mlp(x, w_in, w_out, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return relu2_mlp of x (..., C), w_in (H, C) and w_out (C, H), and the largest square (). The
    kernel makes the forward matmuls in FP8, for which it divides the squares by scale (); without a
    scale, only the first one. The formula is in x's own dtype."""
    if "fp8_relu2_mlp" in t.IN_USE:
        return t.gpu_kernels.FusedFP8MLP.apply(x, w_in, w_out, scale)
    post = t.recomputed(t.relu_squared, F.linear(x, w_in))
    return F.linear(post, w_out), post.detach().max().float()


class MLP(base.MLP):
    """train_gpt_2026.py's MLP. In training, forward matmuls are in FP8 if the kernel is in use."""

    fp8_product = staticmethod(fp8_relu2_mlp)
    room = 1.8  # for the largest square to grow in the next step

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        self.squares_in_fp8 = hp.fp8_mlp != "up"
        self.register_buffer("scale", torch.ones(()))  # of squares, in FP8
        self.register_buffer("largest", torch.zeros(()), persistent=False)  # one in this step

    def product(self, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:  # overrides
        """Return relu2_mlp of x (..., C)."""
        if not (self.training and self.fp8_product.__name__ in t.IN_USE):
            return super().product(x, w_in, w_out)
        out, largest = self.fp8_product(x, w_in, w_out, self.scale if self.squares_in_fp8 else None)
        self.largest.copy_(torch.maximum(self.largest, largest))
        return out


class Block(base.Block):
    """train_gpt_2026.py's layer, without factors on x0 and bigrams: mixers make them. In the layer
    of mudd, a mixer makes all factors. Without sublayer_lambdas, those of other layers are 1."""

    attention_class = CausalSelfAttention
    mlp_class = MLP

    def __init__(self, hp: Hyperparameters, layer: Layer):
        super().__init__(hp, layer)
        self.lambdas = self.x0_lambda = self.bigram_lambda = None
        if layer.mudd:
            self.residual_lambda = self.post_lambda = None

    def forward(self, x, added, value, rotary, mask, source, numbers) -> Tensor:  # overrides
        """Map x (1, T, C) to (1, T, C). `numbers` are a mixer's."""
        if "keep" not in numbers:
            return super().forward(x, added, value, rotary, mask, source, numbers)
        read = t.norm(x, self.eps) if source is None else source
        out = self.attn(read, value, rotary, mask, None, numbers)
        x = numbers["keep"] * x + numbers["attention"] * out + added
        out = self.mlp(base.recomputed_if_small(t.norm, x, self.eps))
        return numbers["keep mlp"] * x + numbers["mlp"] * out


@cache
def gpt2_tokens() -> tuple[list[str], list[list[str]]]:
    """Return GPT-2's tokens, in which a character stands for each byte, and its merges. Tokens are
    the 256 bytes, in the order of the characters for them, then what each merge joins."""
    plain = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256))]
    others = [chr(256 + i) for i in range(256 - len(plain))]
    lines = (t.HERE / "data/vocab.bpe").read_text("utf-8").splitlines()[1:]
    merges = [line.split(" ") for line in lines]
    return [*plain, *others, *(left + right for left, right in merges)], merges


@cache
def token_prefixes(vocab_size: int) -> list[int]:
    """Return for each token the longest other one that its bytes begin with, or -1."""
    tokens, _ = gpt2_tokens()
    numbers = {token: number for number, token in enumerate(tokens)}
    prefixes = [-1] * vocab_size
    for number, token in enumerate(tokens[:vocab_size]):
        shorter = [numbers.get(token[:size], vocab_size) for size in range(1, len(token))]
        prefixes[number] = [-1, *(found for found in shorter if found < vocab_size)][-1]
    return prefixes


class Head(base.Head):
    """train_gpt_2026.py's Head, with the next token's prefix as a target (2026-07-13's record)."""

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        self.vocab_size, self.prefixes = hp.vocab_size, None

    def loss(self, x, targets: Tensor, shares=(1.0,), prefix: float = 0.0) -> Tensor:  # overrides
        """Return what train_gpt_2026.py's returns. `prefix` is the share of the prefix's loss."""
        if not prefix:
            return super().loss(x, targets, shares)
        return self.weighted_loss(x, self.with_prefixes(targets, len(shares)), (*shares, prefix))

    def with_prefixes(self, targets: Tensor, count: int) -> Tensor:
        """Return the next `count` targets of each token, and the next one's prefix or -1, (T, count
        + 1), from targets (T,)."""
        if self.prefixes is None:
            self.prefixes = torch.tensor(token_prefixes(self.vocab_size), device=targets.device)
        columns = base.next_targets(targets, count)
        return torch.cat([columns, self.prefixes[targets][:, None]], dim=1)


class GPT(base.GPT):
    """The language model of these records."""

    block_class = Block
    head_class = Head

    def __init__(self, hp: Hyperparameters):
        super().__init__(hp)
        nn.init.constant_(self.skip_weights, -1.5)
        signs = torch.randn(hp.bigram_signs, hp.model_dim).sign()
        self.register_buffer("signs", signs.bfloat16())
        if hp.fp8_mlp != "off":
            mlps = [part for part in self.modules() if isinstance(part, MLP)]
            self.kernels = (*self.kernels, *{mlp.fp8_product.__name__ for mlp in mlps})
        self.mixer_scale = nn.Parameter(torch.tensor([MIXER_SCALE]))
        self.outputs_read |= {layer.source for layer in self.layers if layer.mudd}
        self.mixers = nn.ModuleDict()
        for name, constants in self.mixer_constants().items():
            width = hp.mudd_width if name in ("last", "end") else hp.mixer_width
            self.mixers[name] = Mixer(hp, width, constants)

    def mixer_constants(self) -> dict[str, dict[str, list[float]]]:
        """Return the first numbers that each mixer makes. By the number of the layer before which
        it reads x: those of the layers up to the next mixer, each with its layer behind it. Of the
        "last" layer with mudd and the "end" (2026-04-22_MuddFormer): a stream's number has its
        name, in the last layer behind "v" if it goes into the values, "x" into the input."""
        heads, keep, last, made = self.hp.num_heads, self.hp.residual_lambda, self.layers[-1], {}
        for i, layer in enumerate(self.layers):
            if i == 0 or layer.mixer:
                numbers = made[f"{i}"] = {}
            if layer.skip_from is not None:
                numbers[f"skip {i}"] = [0.5]
            for name in layer.adds:
                numbers[f"{name} {i}"] = [0.0 if name == "x0" else self.hp.bigram_lambda]
            if layer.xsa:
                numbers[f"alpha {i}"] = [0.0] * heads
            if layer.gate:
                numbers[f"gate {i}"] = [0.25] * heads
            if layer.composed:
                numbers |= {f"w1 {i}": [1.0] * heads, f"w2 {i}": [0.0] * heads}
        if last.mudd:
            late = [] if last.source is None else [f"output {last.source}"]
            skips = [f"output {row.skip_from}" for row in self.layers if row.skip_from is not None]
            tables = [row.values for row in self.layers if row.values is not None]
            numbers = {f"{use} {name}": [0.0] for use in "vx" for name in ("start", *late, "x")}
            numbers |= {"tables": [2.0, 2.0], "start": [0.0], "bigram": [self.hp.bigram_lambda]}
            numbers |= {"keep": [keep], "attention": [1.0], "keep mlp": [keep], "mlp": [1.0]}
            made["last"] = numbers
            made["end"] = dict.fromkeys(("start", *late, "input", *tables[:1], *skips), [0.0])
            made["end"] |= dict.fromkeys(late, [-0.5])
        return {name: numbers for name, numbers in made.items() if numbers}

    def tables(self) -> list[nn.Module]:  # overrides
        """Return what is bfloat16 on CUDA. There, as in the public records, a mixer's constants of
        2 and more never move: Adam's steps are smaller than half of their last bit."""
        return [*super().tables(), self.mixers]

    def embedded(self, input_seq: Tensor) -> tuple[Tensor, dict[str, Tensor]]:  # overrides
        """Return what train_gpt_2026.py's returns, with signs on the rows of bigrams."""
        x, more = super().embedded(input_seq)
        if self.hp.bigram_signs and "bigram" in more:
            more["bigram"] = self.signed(more["bigram"], input_seq)
        return x, more

    @t.compiled
    def signed(self, bigram: Tensor, input_seq: Tensor) -> Tensor:
        """Return rows of bigrams (T, C) times signs, chosen by another hash of the tokens (T,) and
        those before them. The first one has those of row 0 (2026-05-20_BigramsSignTrick)."""
        row = F.pad((input_seq[1:] ^ input_seq[:-1]) % len(self.signs), (1, 0))
        return bigram * self.signs[row].type_as(bigram)

    def layer_output(self, i, streams, more, rotary, masks) -> Tensor:  # overrides
        """Return the output (1, T, C) of layer i. It makes the streams "start", the sum of x0 and
        bigrams; "numbers 0" and so on, by mixers; and "input", that of the layer of mudd."""
        layer, bigram = self.layers[i], more.get("bigram", 0)
        value = more.get(layer.values)
        if f"{i}" in self.mixers:
            streams[f"numbers {i}"] = self.mixers[f"{i}"](streams["x"], self.mixer_scale)
        numbers = self.numbers(i, streams)
        if i == 0:
            streams["x"] = streams["start"] = streams["x"] + numbers.pop("bigram", 0) * bigram
        x, added = self.with_skip(i, streams), None
        if layer.mudd:
            streams["input"] = x
            numbers |= self.mixers["last"].named(self.mixers["last"](x))
            added = numbers["start"] * streams["start"] + numbers["bigram"] * bigram
            gate = numbers["tables"].repeat_interleave(x.size(-1) // 2, dim=-1)
            value = 0 if value is None else gate * value
            for name in ("start", f"output {layer.source}", "x"):
                if name in streams:
                    value = value + numbers[f"v {name}"] * streams[name]
                    x = x + numbers[f"x {name}"] * streams[name]
        else:
            for name, stream in (("x0", streams["x0"]), ("bigram", bigram)):
                if name in numbers:
                    share = numbers[name] * stream
                    added = share if added is None else added + share
        mask, source = masks.get(layer.mask), streams.get(f"source {layer.source}")
        return self.blocks[i](x, added, value, rotary[layer.rotary], mask, source, numbers)

    def skip_factor(self, i: int, streams: dict[str, Tensor]) -> Tensor:  # overrides
        """Return the factor (1, T, 1) on layer i's skip connection."""
        return torch.sigmoid(super().skip_factor(i, streams)) * self.numbers(i, streams)["skip"]

    def numbers(self, i: int, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the numbers (1, T, n) that a mixer has made for layer i, by name."""
        # Not max() of a generator, at which torch.compile would begin another graph.
        made = [k for k in range(i + 1) if f"{k}" in self.mixers]
        if not made:
            return {}
        named = self.mixers[f"{made[-1]}"].named(streams[f"numbers {made[-1]}"])
        return {name.split()[0]: part for name, part in named.items() if name.split()[1] == f"{i}"}

    def end(self, streams: dict[str, Tensor], more: dict[str, Tensor]) -> Tensor:  # overrides
        """Return x (1, T, C) before the last norm."""
        x = super().end(streams, more)
        if "end" in self.mixers:
            for name, number in self.mixers["end"].named(self.mixers["end"](x)).items():
                x = x + number * (streams[name] if name in streams else more[name])
        return x

    def forward(self, input_seq: Tensor, target_seq: Tensor, now: Moment) -> Tensor:  # overrides
        """Return what train_gpt_2026.py's returns. In training, prefixes are targets, too."""
        if not self.training:
            return super().forward(input_seq, target_seq, now)
        self.tied = now.tied
        return self.lm_head.loss(self.hidden(input_seq, now), target_seq, now.targets, now.prefix)


# -----------------------------------------------------------------------------
# Optimizers, and the class that tools use


class Optimizers(base.Optimizers):
    """train_gpt_2026.py's Optimizers, which also set the FP8 scales of squares by the largest one
    of a step on all ranks. (Public ranks each take that of their last sequence.)"""

    @torch.no_grad()
    def step(self, now: Moment) -> list[Tensor]:  # overrides
        """Update all groups that learn at a moment, and the scales of squares in FP8."""
        norms = super().step(now)
        mlps = [part for part in self.model.modules() if isinstance(part, MLP)]
        if mlps and self.hp.fp8_mlp not in ("off", "up"):
            largest = torch.stack([mlp.largest for mlp in mlps])
            if self.world_size > 1:
                dist.all_reduce(largest, dist.ReduceOp.MAX)
            scales = torch.stack([mlp.scale for mlp in mlps])
            scales = torch.where(largest > 0, mlps[0].room / 448 * largest, scales)
            torch._foreach_copy_([mlp.scale for mlp in mlps], list(scales))
            torch._foreach_zero_([mlp.largest for mlp in mlps])
        return norms


class Run(base.Run):
    """A run of these records."""

    records = RECORDS
    default_record = "2026-07-17_FP8DownProjection"
    GPT = GPT
    Optimizers = Optimizers
    Moment = Moment
    check = staticmethod(check)


if __name__ == "__main__":
    t.main(run=Run)
