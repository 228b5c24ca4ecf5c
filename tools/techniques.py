"""The techniques of the records, and how to turn each one off.

./run.sh tools/records.py forks/train_gpt_2026.py --techniques    prints them
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import script
import train_gpt
from train_gpt import Hyperparameters, UserError


@dataclass(frozen=True)
class Technique:
    """A technique of the public records."""

    name: str
    record: str  # the date of the record that brought it
    # Seconds that the record saved on 8 H100s. If it brought several techniques: a share of them,
    # by the losses in its README or in logs, or None.
    gain: float | None
    # For each setting its value without the technique, or a function that returns that value, given
    # the value with it.
    off: dict[str, Any]


def without(word: str) -> Callable[[str], str]:
    """Return a function that removes a word, given as a pattern, from the rows of a setting."""
    return lambda rows: re.sub(rf"\+{word}", "", rows)


def one_stage(stages: str) -> str:
    """Return the middle row of the stages, with the window of the last row. In the records, a run
    of it has as many tokens, but for rounding."""
    rows = stages.split(",")
    windows = re.findall(r"window=[^+,]*", stages)
    middle = rows[(len(rows) - 1) // 2]
    return re.sub(r"window=[^+]*", windows[-1], middle) if windows else middle


UNCUT = without("cap=[^+,]*")
TECHNIQUES = (
    Technique("attention gate", "2025-08-23", 0.3, {"attention_gate": False}),
    Technique("whole documents", "2025-07-12", 2.0, {"align_to_documents": False, "stages": UNCUT}),
    Technique("stages of the batch", "2025-11-29", 2.7, {"stages": one_stage}),
    Technique(
        "extension, wide last window", "2025-09-21", 1.2, {"extension_frac": 0.0, "last_window": 0}
    ),
    Technique("YaRN", "2025-09-10", 3.7, {"yarn": False}),
    Technique("windows as distances", "2025-09-03", None, {"window_rule": "blocks"}),
    Technique("smear", "2025-09-18", 1.1, {"smear": False}),
    Technique("backout", "2025-10-04", 5.3, {"layers": without("backout")}),
    Technique("skip connection", "2025-11-18", 1.3, {"layers": without(r"x\d+")}),
    Technique("factors by sublayer", "2026-03-06", None, {"sublayer_lambdas": False}),
    Technique("residual factor above 1", "2025-11-18", None, {"residual_lambda": 1.0}),
    Technique("late attention reads earlier", "2026-03-06", None, {"layers": without(r"in\d+")}),
    Technique("lambda on attention's weights", "2025-12-10", 0.6, {"scaled_projections": False}),
    Technique("key offset", "2025-12-14", 1.4, {"key_offset": False}),
    Technique("paired heads", "2026-01-07", 3.5, {"paired_heads": False}),
    Technique("table of bigrams", "2026-01-19", 5.6, {"bigram_rows": 0}),
    Technique("value embeddings", "2024-12-04", None, {"layers": without(r"v\d")}),
    Technique("value gates", "2025-12-29", None, {"value_gate": False, "gate_by_values": False}),
    Technique("value gates read values", "2026-02-03", None, {"gate_by_values": False}),
    Technique("value tables from small numbers", "2026-02-03", None, {"value_init": 0.0}),
    Technique("wider q, k and v at first", "2025-12-22", None, {"qkv_init": 1.0}),
    Technique("attention's output from non-zero", "2026-01-30", 1.2, {"out_init": 0.0}),
    Technique("tied head", "2025-12-19", 3.2, {"tied_frac": 0.0}),
    Technique("several targets a token", "2025-12-22", 2.9, {"stages": without("targets=[^+,]*")}),
    Technique("logit rescale", "2025-12-26", 2.9, {"logit_sigmoid": (0.0, 0.0, 1.0)}),
    Technique("Polar Express", "2025-09-29", 0.4, {"polar_express": False}),
    Technique("NorMuon", "2025-10-24", 4.1, {"muon_beta2": 0.0}),
    Technique("momentum falls at the end", "2025-09-30", None, {"momentum_cooldown_steps": 0}),
    Technique("cautious decay of matrices", "2025-11-10", 1.7, {"muon_decay": 0.0}),
    Technique(
        "cautious decay of Adam's", "2025-12-18", 1.1, {"adam_groups": without("decay=[^+,]*")}
    ),
    Technique("Adam at every second step", "2025-09-30", 1.7, {"adam_every": 1}),
    Technique("betas by group", "2025-12-21", 2.3, {"adam_groups": without("beta[12]=[^+,]*")}),
    Technique("q and k in pairs of heads", "2026-04-08", 0.4, {"qk_pairs": False}),
    Technique("mudd", "2026-04-22", 2.8, {"layers": without("mudd")}),
    Technique("mudd by token", "2026-04-22", None, {"mudd_width": 0}),
    Technique("exclusive attention", "2026-04-29", 0.6, {"layers": without("xsa")}),
    Technique("signs of bigrams", "2026-05-20", 0.5, {"bigram_signs": 0}),
    Technique("gates and factors by token", "2026-05-27", 1.3, {"mixer_width": 0}),
    Technique("a second mixer", "2026-05-27", None, {"layers": without("mixer")}),
    Technique("gated heads", "2026-05-27", None, {"layers": without("gate")}),
    Technique("composed heads", "2026-05-27", 1.9, {"layers": without("composed")}),
    Technique("prefix loss", "2026-07-13", 0.8, {"prefix": 0.0}),
    Technique("MLPs in FP8", "2026-07-17", 1.6, {"fp8_mlp": "off"}),
    Technique(
        "shorter documents, higher last rate", "2026-02-10", 1.2, {"lr_final": 0.1, "stages": UNCUT}
    ),
)


def flags_without(technique: Technique, hp: Hyperparameters) -> list[str]:
    """Return the flags that turn a technique off; [] if the settings are without it."""
    if not technique.off.keys() <= vars(hp).keys():
        return []
    settings = {name: getattr(hp, name) for name in technique.off}
    for name, off in technique.off.items():
        settings[name] = off(settings[name]) if callable(off) else off
    return train_gpt.changed_flags(replace(hp, **settings), hp)


def techniques_of(path: Path, flags: list[str]) -> list[tuple[Technique, list[str]]]:
    """Return the techniques of a script's record with these flags, and what turns each off. They
    are at most as new as the record, or as the script's newest one, and the script takes their
    flags: otherwise, a setting of that name is something else."""
    hp, record = script.parse(path, flags)
    names = [name for cls in script.load(path).__mro__ for name in getattr(cls, "records", {})]
    date = r"\d{4}-\d\d-\d\d"
    newest = max(re.findall(date, record) or re.findall(date, " ".join(names)), default="")
    found = []
    for technique in TECHNIQUES:
        off = flags_without(technique, hp)
        with suppress(UserError):
            script.parse(path, [*flags, *off])
            if off and technique.record <= newest:
                found.append((technique, off))
    return found
