"""The techniques of the records: what each one does, which record brought it, how to turn it off.

./run.sh --ablate forks/train_gpt_2026.py --list    prints them
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the project
import train_gpt  # noqa: E402
from train_gpt import Hyperparameters  # noqa: E402


@dataclass(frozen=True, eq=False)  # a technique equals only itself
class Technique:
    """A technique of the public records."""

    name: str
    what: str  # it does
    brought: str  # the date of the public record that brought it
    gain: float | None  # seconds on 8 H100s; None if that record brought several techniques
    switch: str  # its settings, and the words in the rows of such a setting
    where: str  # its functions and classes in forks/train_gpt_2026.py
    test: str  # what tests/frontier/test_rows.py checks, or the name of another file
    # For each setting its value without the technique, or a function that returns that value. If a
    # script lacks one of the settings, its records lack the technique. {}: the technique cannot be
    # turned off alone, because other settings of the record depend on it.
    off: dict[str, Any] = field(default_factory=dict)
    more: str = ""  # a note on the gain


def without(setting: str, *words: str) -> Callable:
    """Return a function that removes words, given as patterns, from the rows of a setting."""
    pattern = re.compile("|".join(rf"\+(?:{word})(?=[+,]|$)" for word in words))
    return lambda hp, run_class: pattern.sub("", getattr(hp, setting))


def one_stage(hp: Hyperparameters, run_class: type[train_gpt.Run]) -> str:
    """Return `stages` with a single row. Its length is the mean length, rounded, so that a run has
    as many tokens. Its window is that of the last row. Its other values are those of the row with
    the nearest length."""
    rows = [
        dict(word.split("=") for word in re.split(r"\+(?=[a-z])", row))
        for row in hp.stages.split(",")
        if row
    ]
    if len(rows) < 2:
        return hp.stages
    lengths = [run_class.moment(step, hp).seq_len for step in range(hp.num_iterations)]
    length = round(sum(lengths) / len(lengths) / hp.seq_len)
    nearest = min(rows, key=lambda row: abs(float(row.get("length", 1)) - length))
    row = nearest | {"length": length, "window": rows[-1].get("window", 0)}
    return "+".join(f"{name}={value}" for name, value in row.items())


def window_in_blocks(hp: Hyperparameters, run_class: type[train_gpt.Run]) -> str:
    """Return the window rule that "distance" replaced."""
    return "blocks" if hp.window_rule == "distance" else hp.window_rule


def value_init(hp: Hyperparameters, run_class: type[train_gpt.Run]) -> float:
    """Return the initial deviation of value tables before they began small: 0. Tables of 2025 begin
    with 1, and keep it."""
    return 0.0 if hp.value_init < 1 else 1.0


def low_lr_final(hp: Hyperparameters, run_class: type[train_gpt.Run]) -> float:
    """Return a last learning rate of at most 0.1, as in 2025."""
    return min(hp.lr_final, 0.1)


NUMBER = r"[\d./e+-]+"
TECHNIQUES = (
    Technique(
        "attention gate",
        "a learned gate scales the output of each attention head",
        "2025-08-23",
        0.3,
        "--attention_gate",
        "gate_of, CausalSelfAttention",
        "loss and gradients",
        {"attention_gate": False},
    ),
    Technique(
        "whole documents",
        "training sequences begin with a document, and long documents are cut",
        "2025-07-12",
        2.0,
        "--align_to_documents, --max_document_tokens; cap of --stages",
        "whole_documents, beginnings",
        "batches: test_data.py",
        {"align_to_documents": False, "stages": without("stages", f"cap={NUMBER}")},
    ),
    Technique(
        "sum loss, and FP8 scales for it",
        "the loss of a sequence is the sum over its tokens, not the mean",
        "2025-08-23",
        None,
        "--loss_sum, --x_s, --w_s, --grad_s",
        "Head.loss",
        "loss and gradients; FP8: tests/gpu",
        more="published with an earlier record",
    ),
    Technique(
        "stages of the batch",
        "batch size, window and learning rate change in stages",
        "2025-11-29",
        2.7,
        "--stages, --exact_stages",
        "Stage, stages_until, get_lr",
        "schedules",
        {"stages": one_stage},
    ),
    Technique(
        "extension, wide last window",
        "more steps at the last learning rate, and a wider window for validation",
        "2025-09-21",
        1.2,
        "--extension_frac, --last_window",
        "Hyperparameters.scheduled_steps, Moment",
        "schedules",
        {"extension_frac": 0.0, "last_window": 0},
    ),
    Technique(
        "YaRN",
        "rotary frequencies and the attention scale follow the growing windows",
        "2025-09-10",
        3.7,
        "--yarn",
        "yarn",
        "rotary tables",
        {"yarn": False},
    ),
    Technique(
        "windows as distances",
        "a window is a distance to the token, not a number of blocks",
        "2025-09-03",
        None,
        "--window_rule",
        "first_visible",
        "loss and gradients",
        {"window_rule": window_in_blocks},
    ),
    Technique(
        "smear",
        "each token's embedding gets a share of the previous token's",
        "2025-09-18",
        1.1,
        "--smear",
        "GPT.embedded",
        "loss and gradients; sampling: test_tools.py",
        {"smear": False},
    ),
    Technique(
        "backout",
        "a share of a middle layer's output is subtracted before the head",
        "2025-10-04",
        5.3,
        "backout of --layers",
        "GPT.trunk",
        "loss and gradients",
        {"layers": without("layers", "backout")},
    ),
    Technique(
        "skip connection",
        "an early layer's output is added to the input of a later layer",
        "2025-11-18",
        1.3,
        "--skip_gate; x3 of --layers",
        "GPT.trunk, GPT.skip_factor",
        "loss and gradients",
        {"layers": without("layers", r"x\d+")},
        more="its gate came in 2025-12-29",
    ),
    Technique(
        "11 layers, one without attention",
        "11 layers in place of 12; one has no attention",
        "2025-09-05",
        0.8,
        "--layers, --num_layers",
        "layer_table",
        "loss and gradients",
        more="also in 2025-09-21",
    ),
    Technique(
        "factors by sublayer",
        "attention and MLP have their own factors on the residual stream",
        "2026-03-06",
        None,
        "--sublayer_lambdas",
        "Block",
        "loss and gradients",
        {"sublayer_lambdas": False},
        more="0.7 s with late attention",
    ),
    Technique(
        "residual factor above 1",
        "the learned factor on the residual stream begins above 1",
        "2025-11-18",
        None,
        "--residual_lambda",
        "Block",
        "loss and gradients",
        {"residual_lambda": 1.0},
        more="with the skip connection",
    ),
    Technique(
        "factors on x0 learn apart",
        "factors on the embedding x0 are a parameter group of their own",
        "2025-12-21",
        None,
        "--x0_apart",
        "Block",
        "loss and gradients",
        more="with betas by group",
    ),
    Technique(
        "late attention reads earlier",
        "attention in the last layers reads the output of an earlier layer",
        "2026-03-06",
        None,
        "in7 of --layers",
        "GPT.trunk",
        "loss and gradients",
        {"layers": without("layers", r"in\d+")},
        more="0.7 s with factors by sublayer",
    ),
    Technique(
        "lambda on attention's weights",
        "learned factors scale the weights of q, k, v and of the output",
        "2025-12-10",
        0.6,
        "--scaled_projections",
        "CausalSelfAttention",
        "loss and gradients",
        {"scaled_projections": False},
    ),
    Technique(
        "key offset",
        "half of the channels of a key are those of the previous token",
        "2025-12-14",
        1.4,
        "--key_offset",
        "attend_with_offset",
        "loss and gradients; sampling: test_tools.py",
        {"key_offset": False},
    ),
    Technique(
        "paired heads",
        "two heads attend as one head with twice as many positions",
        "2026-01-07",
        3.5,
        "--paired_heads; pair of --layers",
        "CausalSelfAttention, GPT.rotary, GPT.masks",
        "loss and gradients; masks; sampling: test_tools.py",
        {"paired_heads": False},
    ),
    Technique(
        "table of bigrams",
        "a hash of two tokens selects an embedding that layers add",
        "2026-01-19",
        5.6,
        "--bigram_rows, --bigram_lambda",
        "bigram_hash, Block.mixed",
        "loss and gradients; hash; sampling: test_tools.py",
        {"bigram_rows": 0},
    ),
    Technique(
        "value embeddings",
        "a second embedding of the token is mixed into the values of attention",
        "2024-12-04",
        None,
        "v0 to v4 of --layers",
        "CausalSelfAttention",
        "loss and gradients",
        {"layers": without("layers", r"v\d")},
    ),
    Technique(
        "five value tables, in other layers",
        "five tables of value embeddings in place of three",
        "2026-01-26",
        0.3,
        "v0 to v4 of --layers",
        "LAYERS_HC",
        "loss and gradients",
        more="0.4 s more in 2026-02-03",
    ),
    Technique(
        "value gates",
        "a learned gate scales the value embedding for each head",
        "2025-12-29",
        None,
        "--value_gate, --gate_by_values",
        "CausalSelfAttention",
        "loss and gradients",
        {"value_gate": False, "gate_by_values": False},
        more="1.3 s with the gate of skip connections",
    ),
    Technique(
        "value gates read values",
        "the gate of a value embedding also reads that embedding",
        "2026-02-03",
        None,
        "--gate_by_values",
        "CausalSelfAttention",
        "loss and gradients",
        {"gate_by_values": False},
        more="0.4 s with five value tables",
    ),
    Technique(
        "value embeddings from zero",
        "value embeddings are zero at first",
        "2025-12-14",
        None,
        "--value_init",
        "GPT.__init__",
        "first weights",
        more="with the key offset",
    ),
    Technique(
        "value tables from small numbers",
        "value embeddings are small random numbers at first",
        "2026-02-03",
        None,
        "--value_init",
        "GPT.__init__",
        "first weights",
        {"value_init": value_init},
        more="0.4 s with five value tables",
    ),
    Technique(
        "wider q, k and v at first",
        "the first weights of q, k and v are larger",
        "2025-12-22",
        None,
        "--qkv_init",
        "CausalSelfAttention",
        "first weights",
        {"qkv_init": 1.0},
        more="with several targets",
    ),
    Technique(
        "attention's output from non-zero",
        "the first weights of attention's output are random, not zero",
        "2026-01-30",
        1.2,
        "--out_init",
        "CausalSelfAttention",
        "first weights",
        {"out_init": 0.0},
    ),
    Technique(
        "tied head",
        "head and embedding share their weights at first",
        "2025-12-19",
        3.2,
        "--tied_frac, --head_init",
        "is_tied, Optimizers.step",
        "whole steps",
        {"tied_frac": 0.0},
        more="untied after two thirds of the steps since 2025-12-22",
    ),
    Technique(
        "several targets a token",
        "the loss also counts the tokens after the next one",
        "2025-12-22",
        2.9,
        "targets of --stages",
        "next_targets, weighted_cross_entropy",
        "loss and gradients; test_kernels.py",
        {"stages": without("stages", f"targets={NUMBER}")},
        more="with the head untied after two thirds of the steps",
    ),
    Technique(
        "logit rescale",
        "a sigmoid bounds the logits, in place of a tanh",
        "2025-12-26",
        2.9,
        "--logit_sigmoid",
        "Hyperparameters.sigmoid_form",
        "loss and gradients",
        {"logit_sigmoid": (0.0, 0.0, 1.0)},
    ),
    Technique(
        "Polar Express",
        "Polar Express orthogonalizes Muon's updates, not Newton-Schulz",
        "2025-09-29",
        0.4,
        "--polar_express",
        "polar_express",
        "whole steps",
        {"polar_express": False},
    ),
    Technique(
        "NorMuon",
        "Muon's updates have the same size for each neuron",
        "2025-10-24",
        4.1,
        "--muon_beta2, --muon_mul",
        "normuon, muon",
        "whole steps",
        {"muon_beta2": 0.0},
        more="also in 2025-10-27 and 2025-12-11",
    ),
    Technique(
        "momentum falls at the end",
        "Muon's momentum falls in the last steps",
        "2025-09-30",
        None,
        "--momentum_cooldown_steps",
        "get_muon_momentum",
        "schedules",
        {"momentum_cooldown_steps": 0},
        more="with Adam at every second step",
    ),
    Technique(
        "cautious decay of matrices",
        "Muon's weight decay acts only where the update shrinks the weight",
        "2025-11-10",
        1.7,
        "--muon_decay",
        "cautious_step_",
        "whole steps",
        {"muon_decay": 0.0},
    ),
    Technique(
        "cautious decay of Adam's",
        "Adam's weight decay acts only where the update shrinks the weight",
        "2025-12-18",
        1.1,
        "decay of --adam_groups",
        "cautious_adam_",
        "whole steps",
        {"adam_groups": without("adam_groups", f"decay={NUMBER}")},
    ),
    Technique(
        "Adam at every second step",
        "Adam makes one step with the gradients of two steps",
        "2025-09-30",
        1.7,
        "--adam_every",
        "Optimizers.learning",
        "whole steps",
        {"adam_every": 1},
    ),
    Technique(
        "betas by group",
        "each group of Adam's parameters has its own betas",
        "2025-12-21",
        2.3,
        "--adam_rule, --adam_groups",
        "parameter_groups",
        "whole steps",
        {"adam_groups": without("adam_groups", f"beta[12]={NUMBER}")},
        more="decay by group in 2025-12-31: 1.4 s",
    ),
    Technique(
        "shorter documents, higher last rate",
        "documents are cut shorter at first, and the last learning rate is higher",
        "2026-02-10",
        1.2,
        "cap of --stages; --lr_final",
        "beginnings, get_lr",
        "schedules; batches: test_data.py",
        {"lr_final": low_lr_final, "stages": without("stages", f"cap={NUMBER}")},
    ),
)


def flags_without(
    technique: Technique, hp: Hyperparameters, run_class: type[train_gpt.Run]
) -> list[str]:
    """Return the flags that turn a technique off. There are none if the settings lack the
    technique, or if it cannot be turned off alone."""
    if not technique.off.keys() <= vars(hp).keys():
        return []
    flags = []
    for name, off in technique.off.items():
        value = off(hp, run_class) if callable(off) else off
        if value != getattr(hp, name):
            words = value if isinstance(value, tuple) else (value,)
            flags += [f"--{name}", *(train_gpt.show(word) for word in words)]
    return flags


def is_of(technique: Technique, run_class: type[train_gpt.Run]) -> bool:
    """Return whether one of the script's records has the technique. A technique that cannot be
    turned off is in every script with records as new as it."""
    if technique.off:
        records = run_class.records.values()
        return any(flags_without(technique, hp, run_class) for hp in records)
    dates = [name[:10] for name in run_class.records if re.match(r"\d{4}-\d\d-\d\d", name)]
    return technique.brought <= max(dates, default="")
