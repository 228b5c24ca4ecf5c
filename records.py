"""The records as data: rows of layers, of stages and of settings, and what such rows may be.

A record holds what it sets otherwise than train_gpt.py's Hyperparameters, whose defaults are
2025-01-26_BatchSize. Numbers are those of the sources in the public logs, in
github.com/KellerJordan/modded-nanogpt; tools/published.json has what the records reached.
"""

from dataclasses import dataclass, fields, replace
from functools import cache

from program import HERE, UserError, number_rows, show

# -----------------------------------------------------------------------------
# What rows may be: of layers, of stages, of Adam's groups


@dataclass(frozen=True)
class Layer:
    """One row of the model: what this layer attends with and what is added to it."""

    window: str  # "long", "short" (half of the stage's long one), or "none": no attention
    values: str | None = None  # mixed into v: a value-embedding table, or the "first" layer's v
    skip_from: int | None = None  # which earlier layer's output is added to the input
    source: int | None = None  # which earlier layer's output attention reads, if not the input
    paired: bool = False  # two heads attend as one of twice as many positions
    backout: bool = False  # a share of its output is subtracted before the last norm

    @property
    def mask(self) -> str:
        """The name of the mask that it attends with."""
        return f"{self.window}+pair" if self.paired else self.window


# A layer is written as its window and words, joined by "+": long+v0+x5. A word sets a field. Values
# of embedding tables (v0) and of the first layer (vfirst): arXiv 2410.17897.
LAYER_WORDS = {"vfirst": ("values", "first"), "backout": ("backout", True)}
LAYER_WORDS |= {"pair": ("paired", True)}  # 2026-01-07_PairedHeadAttention
LAYER_WORDS |= {f"v{i}": ("values", str(i)) for i in range(10)}
LAYER_WORDS |= {f"x{i}": ("skip_from", i) for i in range(100)}
LAYER_WORDS |= {f"in{i}": ("source", i) for i in range(100)}
NAMING = {"backout", "source"}  # fields that tie a table to its length


@dataclass(frozen=True)
class Stage:
    """One row of the schedule: what holds in a part of the run."""

    length: int = 1  # tokens in a training sequence, in seq_lens
    window: int = 0  # the long window in tokens; 0: as window_rule has it
    lr: float = 1.0  # multiplies every learning rate
    cap: int = 0  # longer documents are cut; 0: at max_document_tokens
    targets: tuple[float, ...] = (1.0,)  # loss weights of the next token and of those after it;
    # the last of several falls to 0 within the stage


def layer_fields(text: str) -> dict:
    """The fields of Layer that a row's window and words set; {} for what is no row."""
    window, *words = text.split("+")
    found = dict(LAYER_WORDS.get(word, ("unknown", word)) for word in words)
    legal = window in ("long", "short", "none") and len(found) == len(words)
    legal &= "unknown" not in found
    legal &= window != "none" or not found.keys() & {"values", "source", "paired"}
    return {"window": window, **found} if legal else {}


def layer_table(hp) -> tuple[Layer, ...]:
    """The rows in use: num_layers of them from both ends, each skip connection between what are
    mirror images then. A table that names other layers by their numbers is used whole."""
    rows, table = hp.layers.split(","), []
    n, half, last = hp.num_layers, hp.num_layers // 2, len(rows) - 1
    if n > len(rows):
        raise UserError(f"--num_layers {n}: --layers has {len(rows)}")
    places = [*range(n - half), *range(len(rows) - half, len(rows))]
    for place, text in enumerate(rows):
        row = layer_fields(text)
        named = row.get("skip_from", last - place) != last - place or row.keys() & NAMING
        if named and n < len(rows):
            reason = f"{text!r} is of --layers that name each other: give a shorter --layers"
            raise UserError(f"--num_layers {n}: {reason}")
    for i, place in enumerate(places):
        row = layer_fields(rows[place])
        if row and n < len(rows) and "skip_from" in row:
            row["skip_from"] = n - 1 - i
        skip, source = row.get("skip_from"), row.get("source", -1)
        if not row or source >= i or (skip is not None and (i < n - half or skip >= i)):
            shown = "LAYERS_2025 shows the form"
            raise UserError(f"--layers: {rows[place]!r} cannot be layer {i}; {shown}")
        row["paired"] = hp.paired_heads and "paired" in row
        table.append(Layer(**row))
    if sum(row.backout for row in table) > 1:
        raise UserError("--layers: only one layer can have the word backout")
    return tuple(table)


@cache
def stage_table(stages: str) -> tuple[Stage, ...]:
    """The rows of the setting; UserError for what is no stage."""
    table, names = [], tuple(f.name for f in fields(Stage))
    for first, numbers in number_rows(stages, "stages", names, lists=("targets",)):
        stage = Stage(**numbers)
        whole = stage.length, stage.window, stage.cap
        wrong = first or not numbers or stage.length < 1 or len(stage.targets) > 3
        if wrong or any(number % 1 for number in whole):
            rule = "whole numbers for length (from 1), window and cap; at most 3 targets"
            raise UserError(f"--stages {stages}: a row is of {rule}; STAGES_2026 shows the form")
        table.append(replace(stage, length=int(whole[0]), window=int(whole[1]), cap=int(whole[2])))
    return tuple(table) or (Stage(),)


ADAM_FIELDS = "lr", "beta1", "beta2", "decay"


def adam_table(hp, known) -> dict[str, dict[str, float]]:
    """Of the groups in the setting adam_groups, by their names, the numbers that are theirs alone.
    UserError for a name that is not known, or what cannot be."""
    table = dict(number_rows(hp.adam_groups, "adam_groups", ADAM_FIELDS))
    for name, row in table.items():
        rule = ""
        if name not in known:
            rule = f"a row begins with one of {' '.join(sorted(known))}"
        elif max(row.get("beta1", 0), row.get("beta2", 0)) >= 1:
            rule = "a beta must be below 1"
        elif "decay" in row and hp.adam_rule != "cautious":
            rule = "decay wants --adam_rule cautious"
        if rule:
            raise UserError(f"--adam_groups {hp.adam_groups}: {rule}")
    return table


def scheduled_steps(hp) -> int:
    """Steps but for the extension, which comes after them at the last learning rate."""
    return hp.num_iterations - round(hp.num_iterations * hp.extension_frac)


def check_together(hp) -> None:
    """UserError for settings that no run can have together."""
    every, (a, _, c), stages = hp.adam_every, hp.logit_sigmoid, stage_table(hp.stages)
    caps = any(stage.cap for stage in stages)
    own_windows = len(stages) == 1 or min(stage.window for stage in stages) > 0
    by_sublayer = hp.sublayer_lambdas
    for name, wrong, rule in (
        ("val_tokens", hp.val_tokens % hp.val_seq_len, "must be a multiple of val_seq_len"),
        ("extension_frac", scheduled_steps(hp) < 1, "leaves no step before the extension"),
        ("stages", caps and not hp.align_to_documents, "cap wants --align_to_documents on"),
        ("save_every", hp.save_every % every, f"must be a multiple of --adam_every {every}"),
        ("grad_clip", hp.grad_clip and every > 1, f"cannot be with --adam_every {every}"),
        ("tied_frac", hp.tied_frac and hp.vocab_size % 128, "wants a vocab_size of whole 128s"),
        ("yarn", hp.yarn and not own_windows, "wants a window in each of --stages"),
        ("key_offset", hp.key_offset and hp.rope != "half", "wants --rope half"),
        ("paired_heads", hp.paired_heads and hp.num_heads % 2, "wants an even --num_heads"),
        ("gate_by_values", hp.gate_by_values and not hp.value_gate, "wants --value_gate on"),
        ("bigram_rows", hp.bigram_rows == 1, "one row stands for no bigram: 0, or 2 and more"),
        ("sublayer_lambdas", by_sublayer and not hp.x0_apart, "wants --x0_apart on"),
        (
            "layers",
            by_sublayer and hp.layers[:4] == "none",
            "--sublayer_lambdas on wants attention",
        ),
        ("logit_sigmoid", a and not c, "its third number must be above 0"),
    ):
        if wrong:
            raise UserError(f"--{name} {show(getattr(hp, name))}: {rule}")


def padded_vocab(hp) -> int:
    """Rows of the head: whole blocks of 128."""
    return -(-hp.vocab_size // 128) * 128


def sigmoid_form(softcap: float | tuple[float, float, float]) -> tuple[float, float, float]:
    """(a, b, c) of logits that become a * sigmoid((logit + b) / c). A number stands for the form
    softcap * tanh(logit / softcap), which is that less a constant: softmax does not see it."""
    return softcap if isinstance(softcap, tuple) else (2 * softcap, 0.0, softcap / 2)


def softcap_of(hp) -> tuple[float, float, float]:
    """The sigmoid_form of logit_sigmoid, if it is set, or else of logit_softcap."""
    return sigmoid_form(hp.logit_sigmoid if hp.logit_sigmoid[0] else hp.logit_softcap)


# -----------------------------------------------------------------------------
# The records

LAYERS_2024 = ",".join(["long+vfirst"] * 6 + [f"long+vfirst+x{i}" for i in range(5, -1, -1)])
LAYERS_2025 = (
    "long+v0,short+v1,short+v2,short,long,short,"
    "short+x5,none+x4,short+x3,short+v0+x2,short+v1+x1,long+v2+x0"
)
LAYERS_2026 = (
    "short+v1+pair,short+v2,short+pair,long,short,short+pair,none+x3,"
    "short+backout,short+v0,short+v1+pair,long+v2"
)
LAYERS_UNTIED = (
    "short+v0+pair,short+v1,short+pair,long,short,short+pair,none+x3,"
    "short+backout,short+v2,short+v3+pair,long+v4"
)
LAYERS_HC = (  # late attention reads the output of layer 7
    "short+pair,short+v0,short+v1+pair,long,short,short+pair,none+x3,"
    "short+backout,short+v2+in7,short+v3+in7+pair,long+v4+in7"
)
LAYERS_DEMO = "short+v0+pair,long+v1,short+pair+x0+backout,long+v2"

# Stages, and the groups of parameters that learn by Adam, as program.number_rows reads them.
LATER_STAGES = (
    "length=2+window=896+lr=1.52+targets=1/.5,length=3+window=1408+lr=1.73,"
    "length=3+window=1664+lr=1.73"
)
STAGES_2026 = f"length=1+window=384+lr=1+targets=1/.5/.25,{LATER_STAGES}"
STAGES_HC = f"length=1+window=384+lr=1+cap=896+targets=1/.5/.25,{LATER_STAGES}"
STAGES_DEMO = (
    "length=1+window=256+lr=1+targets=1/.5/.25,length=2+window=256+lr=1.52+targets=1/.5,"
    "length=3+window=384+lr=1.73,length=3+window=384+lr=1.73"
)
ADAM_SHARED = (
    "head+lr=.008+beta1=.5+decay=.75,embed+lr=.008+beta1=.5+decay=.75,"
    "values+lr=.6+beta1=.75+decay=.025,scalar+lr=.04+beta1=.9+beta2=.99,"
    "gates+lr=.008+beta1=.9+beta2=.99+decay=.005,smear+lr=8e-5+beta1=.9+beta2=.99,"
    "skip+lr=4e-4+beta1=.9+beta2=.99"
)
ADAM_2026 = f"{ADAM_SHARED},x0+lr=.04+beta1=.65"
ADAM_HC = (
    f"{ADAM_SHARED},x0+lr=.008+beta1=.9,bigram+lr=.008+beta1=.9,residual+lr=.04+beta1=.9,"
    "post+lr=.008+beta1=.9"
)

WINDOW_WARMUP = dict(
    num_iterations=1750,
    cooldown_frac=640 / 1750,
    lr_final=0.0,
    window_rule="tokens",
    window_min=64,
    window_step=64,
    seq_len=65536,
    val_seq_len=65536,
    layers=LAYERS_2024,
    vocab_size=50304,
    init_bound=1.0,
    attn_scale=0.0,
    rope="full",
    rope_base=10000.0,
    logit_softcap=30.0,
    adam_eps=1e-8,
    momentum_damped=False,
    fp8=False,
)
BIGRAM_HASH = dict(
    num_iterations=1600,
    cooldown_frac=0.55,
    stages=STAGES_2026,
    extension_frac=40 / 1600,
    exact_stages=True,
    last_window=2560,
    window_rule="distance",
    seq_len=16384,
    align_to_documents=True,
    layers=LAYERS_2026,
    num_layers=11,
    vocab_size=50304,
    qkv_init=2.0,
    value_init=0.0,
    head_init=0.005,
    tied_frac=2 / 3,
    attn_scale=0.1,
    yarn=True,
    key_offset=True,
    paired_heads=True,
    attention_gate=True,
    value_gate=True,
    skip_gate=True,
    smear=True,
    bigram_rows=5 * 50304,
    scaled_projections=True,
    residual_lambda=1.1,
    x0_apart=True,
    norm_eps=2.0**-23,
    logit_sigmoid=(23.0, 5.0, 7.5),
    loss_sum=True,
    adam_rule="cautious",
    adam_groups=ADAM_2026,
    adam_every=2,
    muon_lr=0.023,
    muon_mul=(2.0, 4.0, 1.0),
    muon_beta2=0.95,
    muon_decay=1.2,
    polar_express=True,
    momentum_cooldown_steps=50,
    x_s=448 / 100,
    w_s=448 / 1.6,
    grad_s=448 / 0.75,
    val_loss_every=250,
)
SIMPLIFY_HC = BIGRAM_HASH | dict(
    num_iterations=1490,
    cooldown_frac=0.6,
    lr_final=0.15,
    stages=STAGES_HC,
    extension_frac=40 / 1490,
    exact_stages=False,
    layers=LAYERS_HC,
    qkv_init=1.0,
    out_init=1.0,
    value_init=0.01,
    gate_by_values=True,
    bigram_lambda=0.05,
    sublayer_lambdas=True,
    residual_lambda=1.1**0.5,
    adam_groups=ADAM_HC,
)
ROWS = {
    "2024-11-19_FlexAttention": WINDOW_WARMUP
    | dict(
        num_iterations=1875,
        cooldown_frac=562 / 1875,
        window_min=1024,
        window_span=0,
        adam_betas=(0.9, 0.95),
        muon_lr=0.04,
        momentum_warmup_steps=500,
    ),
    "2024-11-24_WindowWarmup": WINDOW_WARMUP,
    "2025-01-26_BatchSize": {},
    "2025-08-23_SparseAttnGate": dict(
        num_iterations=1695,
        cooldown_frac=0.45,
        align_to_documents=True,
        max_document_tokens=0,
        vocab_size=50304,
        attention_gate=True,
        loss_sum=True,
        adam_rule="cautious",
        norm_eps=2.0**-23,
        muon_mul=(1.0, 1.0, 1.0),
        x_s=448 / 768**0.5,
        grad_s=448.0,
    ),
    # 2026-01-19 without two of its techniques. The source of 2026-01-04 stores q, k, v and output
    # as one tall matrix.
    "2026-01-04_MixedPrecisionInterweavedOptimizer": BIGRAM_HASH
    | dict(
        paired_heads=False,
        bigram_rows=0,
        num_iterations=1840,
        cooldown_frac=0.5,
        extension_frac=40 / 1840,
        muon_mul=(2.0, 4.0, 2.0),
    ),
    "2026-01-19_BigramHashEmbedding": BIGRAM_HASH,
    "2026-01-26-UntieValueEmbeddings": BIGRAM_HASH
    | dict(num_iterations=1575, extension_frac=40 / 1575, layers=LAYERS_UNTIED),
    "2026-03-06_SimplifyHC": SIMPLIFY_HC,
    # 2025-01-26, sized for two CPU cores and a few minutes: the demo before 2026-03-06 was there.
    "demo_2025-01-26": dict(
        num_iterations=128,
        window_span=256,
        seq_len=256,
        val_seq_len=1024,
        val_tokens=65536,
        num_layers=4,
        num_heads=2,
        head_dim=64,
        model_dim=128,
        norm_eps=2.0**-23,
        train_files=f"{HERE}/data/kjv_train_*.bin",
        val_files=f"{HERE}/data/kjv_val_*.bin",
        val_loss_every=64,
        save_every=128,
    ),
    # 2026-03-06, sized for two CPU cores and a minute or two (BENCHMARKS.md). Sequences are short
    # and begin with documents: a run reads the beginnings of the first 761 of 1090 chapters. Head
    # and embedding learn faster by the ratio of the widths, 768 / 128.
    "demo": SIMPLIFY_HC
    | dict(
        num_iterations=180,
        cooldown_frac=0.8,
        stages=STAGES_DEMO,
        extension_frac=4 / 180,
        last_window=512,
        seq_len=128,
        batch_seqs=4,
        val_seq_len=1024,
        val_tokens=16384,
        epochs=0,
        layers=LAYERS_DEMO,
        num_layers=4,
        num_heads=2,
        head_dim=64,
        model_dim=128,
        bigram_rows=50304,
        adam_groups=ADAM_HC.replace("lr=.008+beta1=.5", "lr=.048+beta1=.5"),
        bfloat16_head=True,
        train_files=f"{HERE}/data/kjv_train_*.bin",
        val_files=f"{HERE}/data/kjv_val_*.bin",
        val_loss_every=90,
        save_every=180,
    ),
}
