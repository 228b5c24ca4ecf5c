"""The techniques of the records: what each is, where it is from, and how to do without it.

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


@dataclass(frozen=True, eq=False)  # a technique equals itself alone
class Technique:
    """A technique: where it is from, where it is, and how to do without it."""

    name: str
    brought: str  # the date of the public record that brought it
    gain: float | None  # seconds on 8 H100s; None where that record brought another one here, too
    switch: str  # the settings that it is, and words of their rows
    where: str  # its functions and classes in forks/train_gpt_2026.py
    test: str  # what tests/frontier/test_rows.py compares of it, or another file
    # By setting, a value without the technique, or a function that makes one of the settings. Where
    # a script has no such setting, its records lack the technique. {}: other numbers of a record
    # belong to it, so it is not turned off alone.
    off: dict[str, Any] = field(default_factory=dict)
    more: str = ""  # on the gain


def without(setting: str, *words: str) -> Callable:
    """Return a function that takes those words, which are patterns, out of a setting's rows."""
    pattern = re.compile("|".join(rf"\+(?:{word})(?=[+,]|$)" for word in words))
    return lambda hp, run_class: pattern.sub("", getattr(hp, setting))


def one_stage(hp: Hyperparameters, run_class: type[train_gpt.Run]) -> str:
    """Return stages of one row, which is as long as the mean one: as many tokens, but for rounding.
    Its window is the last one's; the rest is of the row whose length is nearest."""
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
    """Return the rule by which windows were counted before they were distances."""
    return "blocks" if hp.window_rule == "distance" else hp.window_rule


def value_init(hp: Hyperparameters, run_class: type[train_gpt.Run]) -> float:
    """Return the deviation of value tables before: 0, or, of those that begin with 1, that."""
    return 0.0 if hp.value_init < 1 else 1.0


def low_lr_final(hp: Hyperparameters, run_class: type[train_gpt.Run]) -> float:
    """Return a last learning rate that is no higher than that of 2025."""
    return min(hp.lr_final, 0.1)


NUMBER = r"[\d./e+-]+"
TECHNIQUES = (
    Technique(
        "attention gate",
        "2025-08-23",
        0.3,
        "--attention_gate",
        "gate_of, CausalSelfAttention",
        "loss and gradients",
        {"attention_gate": False},
    ),
    Technique(
        "whole documents",
        "2025-07-12",
        2.0,
        "--align_to_documents, --max_document_tokens; cap of --stages",
        "cut_whole, cut_pieces",
        "batches",
        {"align_to_documents": False, "stages": without("stages", f"cap={NUMBER}")},
    ),
    Technique(
        "sum loss, and FP8 scales for it",
        "2025-08-23",
        None,
        "--loss_sum, --x_s, --w_s, --grad_s",
        "Head.loss",
        "loss and gradients; FP8: tests/gpu",
        more="from an earlier record",
    ),
    Technique(
        "stages of the batch",
        "2025-11-29",
        2.7,
        "--stages, --exact_stages",
        "Stage, stages_until, get_lr",
        "schedules",
        {"stages": one_stage},
    ),
    Technique(
        "extension, wide last window",
        "2025-09-21",
        1.2,
        "--extension_frac, --last_window",
        "Hyperparameters.scheduled_steps, moment",
        "schedules",
        {"extension_frac": 0.0, "last_window": 0},
    ),
    Technique("YaRN", "2025-09-10", 3.7, "--yarn", "yarn", "rotary tables", {"yarn": False}),
    Technique(
        "windows as distances",
        "2025-09-03",
        None,
        "--window_rule",
        "first_visible",
        "loss and gradients",
        {"window_rule": window_in_blocks},
    ),
    Technique(
        "smear",
        "2025-09-18",
        1.1,
        "--smear",
        "GPT.embedded",
        "loss and gradients; sampling: test_tools.py",
        {"smear": False},
    ),
    Technique(
        "backout",
        "2025-10-04",
        5.3,
        "backout of --layers",
        "GPT.trunk",
        "loss and gradients",
        {"layers": without("layers", "backout")},
    ),
    Technique(
        "skip connection",
        "2025-11-18",
        1.3,
        "--skip_gate; x3 of --layers",
        "GPT.trunk, GPT.skip_factor",
        "loss and gradients",
        {"layers": without("layers", r"x\d+")},
        more="its gate: 2025-12-29",
    ),
    Technique(
        "11 layers, one without attention",
        "2025-09-05",
        0.8,
        "--layers, --num_layers",
        "layer_table",
        "loss and gradients",
        more="and 2025-09-21",
    ),
    Technique(
        "factors by sublayer",
        "2026-03-06",
        None,
        "--sublayer_lambdas",
        "Block",
        "loss and gradients",
        {"sublayer_lambdas": False},
        more="0.7 with late attention",
    ),
    Technique(
        "residual factor above 1",
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
        "2025-12-21",
        None,
        "--x0_apart",
        "Block",
        "loss and gradients",
        more="with betas by group",
    ),
    Technique(
        "late attention reads earlier",
        "2026-03-06",
        None,
        "in7 of --layers",
        "GPT.trunk",
        "loss and gradients",
        {"layers": without("layers", r"in\d+")},
        more="0.7 with factors by sublayer",
    ),
    Technique(
        "lambda on attention's weights",
        "2025-12-10",
        0.6,
        "--scaled_projections",
        "CausalSelfAttention",
        "loss and gradients",
        {"scaled_projections": False},
    ),
    Technique(
        "key offset",
        "2025-12-14",
        1.4,
        "--key_offset",
        "offset_keys",
        "loss and gradients; sampling: test_tools.py",
        {"key_offset": False},
    ),
    Technique(
        "paired heads",
        "2026-01-07",
        3.5,
        "--paired_heads; pair of --layers",
        "CausalSelfAttention, GPT.rotary_of, GPT.masks",
        "loss and gradients; masks; sampling: test_tools.py",
        {"paired_heads": False},
    ),
    Technique(
        "table of bigrams",
        "2026-01-19",
        5.6,
        "--bigram_rows, --bigram_lambda",
        "bigram_hash, Block.mixed",
        "loss and gradients; hash; sampling: test_tools.py",
        {"bigram_rows": 0},
    ),
    Technique(
        "value embeddings",
        "2024-12-04",
        None,
        "v0 to v4 of --layers",
        "CausalSelfAttention",
        "loss and gradients",
        {"layers": without("layers", r"v\d")},
    ),
    Technique(
        "five value tables, in other layers",
        "2026-01-26",
        0.3,
        "v0 to v4 of --layers",
        "LAYERS_HC",
        "loss and gradients",
        more="2026-02-03: 0.4",
    ),
    Technique(
        "value gates",
        "2025-12-29",
        None,
        "--value_gate, --gate_by_values",
        "CausalSelfAttention",
        "loss and gradients",
        {"value_gate": False, "gate_by_values": False},
        more="1.3 with the gate of skips",
    ),
    Technique(
        "value gates read values",
        "2026-02-03",
        None,
        "--gate_by_values",
        "CausalSelfAttention",
        "loss and gradients",
        {"gate_by_values": False},
        more="0.4 with five value tables",
    ),
    Technique(
        "value embeddings from zero",
        "2025-12-14",
        None,
        "--value_init",
        "GPT.__init__",
        "first weights",
        more="with the key offset",
    ),
    Technique(
        "value tables from small numbers",
        "2026-02-03",
        None,
        "--value_init",
        "GPT.__init__",
        "first weights",
        {"value_init": value_init},
        more="0.4 with five value tables",
    ),
    Technique(
        "wider q, k and v at first",
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
        "2026-01-30",
        1.2,
        "--out_init",
        "CausalSelfAttention",
        "first weights",
        {"out_init": 0.0},
    ),
    Technique(
        "tied head",
        "2025-12-19",
        3.2,
        "--tied_frac, --head_init",
        "GPT.tie, Optimizers.learning",
        "whole steps",
        {"tied_frac": 0.0},
        more="untied at two thirds: 2025-12-22",
    ),
    Technique(
        "several targets a token",
        "2025-12-22",
        2.9,
        "targets of --stages",
        "next_targets, weighted_cross_entropy",
        "loss and gradients; test_kernels.py",
        {"stages": without("stages", f"targets={NUMBER}")},
        more="with the head untied at two thirds",
    ),
    Technique(
        "logit rescale",
        "2025-12-26",
        2.9,
        "--logit_sigmoid",
        "Hyperparameters.sigmoid_form",
        "loss and gradients",
        {"logit_sigmoid": (0.0, 0.0, 1.0)},
    ),
    Technique(
        "Polar Express",
        "2025-09-29",
        0.4,
        "--polar_express",
        "polar_express",
        "whole steps",
        {"polar_express": False},
    ),
    Technique(
        "NorMuon",
        "2025-10-24",
        4.1,
        "--muon_beta2, --muon_mul",
        "normuon_, muon",
        "whole steps",
        {"muon_beta2": 0.0},
        more="also 2025-10-27 and 2025-12-11",
    ),
    Technique(
        "momentum falls at the end",
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
        "2025-11-10",
        1.7,
        "--muon_decay",
        "cautious_step_",
        "whole steps",
        {"muon_decay": 0.0},
    ),
    Technique(
        "cautious decay of Adam's",
        "2025-12-18",
        1.1,
        "decay of --adam_groups",
        "cautious_adam_",
        "whole steps",
        {"adam_groups": without("adam_groups", f"decay={NUMBER}")},
    ),
    Technique(
        "Adam at every second step",
        "2025-09-30",
        1.7,
        "--adam_every",
        "Optimizers.learning",
        "whole steps",
        {"adam_every": 1},
    ),
    Technique(
        "betas by group",
        "2025-12-21",
        2.3,
        "--adam_rule, --adam_groups",
        "parameter_table",
        "whole steps",
        {"adam_groups": without("adam_groups", f"beta[12]={NUMBER}")},
        more="and decay by group, 2025-12-31: 1.4",
    ),
    Technique(
        "shorter documents, higher last rate",
        "2026-02-10",
        1.2,
        "cap of --stages; --lr_final",
        "cut_pieces, get_lr",
        "batches; schedules",
        {"lr_final": low_lr_final, "stages": without("stages", f"cap={NUMBER}")},
    ),
)


def flags_without(
    technique: Technique, hp: Hyperparameters, run_class: type[train_gpt.Run]
) -> list[str]:
    """Return flags that turn a technique off; none where the settings do without it already, or
    where it is not turned off alone."""
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
    """Say whether a record of a script has the technique. If the technique is not turned off, the
    script must have records as new as the technique."""
    if technique.off:
        records = run_class.records.values()
        return any(flags_without(technique, hp, run_class) for hp in records)
    dates = [name[:10] for name in run_class.records if re.match(r"\d{4}-\d\d-\d\d", name)]
    return technique.brought <= max(dates, default="")
