"""What is each technique worth? A record with one technique off, for each that it has.

    ./run.sh --ablate [SCRIPT.py] [--runs 3] [--only WORD] [--judge loss] [flags of the script]
    ./run.sh --ablate forks/train_gpt_2026.py           of the script with most techniques
    ./run.sh --ablate forks/train_gpt_2026.py --list    what would be turned off, and how

Each seed is a round: the record, eight runs with a technique off each, the record again, and so on;
a run is compared with the record's run before it. --only takes techniques whose names have a word.
A technique whose run fails, because it diverges or for other reasons, is left out.

If a technique helps, the loss is higher without it; a step may be faster. "to equal loss" is how
much longer the run without it takes to the record's loss, as in tools/compare.py. The verdict is on
that number, or on the one that --judge names: a technique helps or hurts at p < 0.01. Of a hundred
techniques that do nothing one gets such a verdict by luck. Intervals are of 95 %. The deviation of
a run is that of all techniques together, after the means of techniques, and of those that share a
run of the record, are subtracted. What a step is worth is taken as exact.

Below the table are rank correlations (Spearman's rho, with its 95 % interval) with the published
gains. Runs whose logs are there are not made again: --run_id NAME goes on.
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import compare  # noqa: E402
import script  # noqa: E402
from compare import Side  # noqa: E402
from leaderboard import SETTLED, Run, print_table, show, show_p  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import Hyperparameters, UserError  # noqa: E402

BLOCK = 8  # techniques that share a run of the record


# -----------------------------------------------------------------------------
# Techniques: how to do without them


@dataclass(frozen=True, eq=False)  # a technique equals itself alone
class Technique:
    """A technique, and how to do without it."""

    name: str
    brought: str  # the date of the public record that brought it
    gain: float | None  # seconds on 8 H100s; None where that record brought another one here, too
    # By setting, a value without the technique, or a function that makes one of the settings. Where
    # a script has no such setting, its records lack the technique.
    off: dict[str, Any]


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
    Technique("attention gate", "2025-08-23", 0.3, {"attention_gate": False}),
    Technique(
        "whole documents",
        "2025-07-12",
        2.0,
        {"align_to_documents": False, "stages": without("stages", f"cap={NUMBER}")},
    ),
    Technique("stages of the batch", "2025-11-29", 2.7, {"stages": one_stage}),
    Technique(
        "extension, wide last window", "2025-09-21", 1.2, {"extension_frac": 0.0, "last_window": 0}
    ),
    Technique("YaRN", "2025-09-10", 3.7, {"yarn": False}),
    Technique("windows as distances", "2025-09-03", None, {"window_rule": window_in_blocks}),
    Technique("smear", "2025-09-18", 1.1, {"smear": False}),
    Technique("backout", "2025-10-04", 5.3, {"layers": without("layers", "backout")}),
    Technique("skip connection", "2025-11-18", 1.3, {"layers": without("layers", r"x\d+")}),
    Technique("factors by sublayer", "2026-03-06", None, {"sublayer_lambdas": False}),
    Technique("residual factor above 1", "2025-11-18", None, {"residual_lambda": 1.0}),
    Technique(
        "late attention reads earlier", "2026-03-06", None, {"layers": without("layers", r"in\d+")}
    ),
    Technique("lambda on attention's weights", "2025-12-10", 0.6, {"scaled_projections": False}),
    Technique("key offset", "2025-12-14", 1.4, {"key_offset": False}),
    Technique("paired heads", "2026-01-07", 3.5, {"paired_heads": False}),
    Technique("table of bigrams", "2026-01-19", 5.6, {"bigram_rows": 0}),
    Technique("value embeddings", "2024-12-04", None, {"layers": without("layers", r"v\d")}),
    Technique("value gates", "2025-12-29", None, {"value_gate": False, "gate_by_values": False}),
    Technique("value gates read values", "2026-02-03", None, {"gate_by_values": False}),
    Technique("value tables from small numbers", "2026-02-03", None, {"value_init": value_init}),
    Technique("wider q, k and v at first", "2025-12-22", None, {"qkv_init": 1.0}),
    Technique("attention's output from non-zero", "2026-01-30", 1.2, {"out_init": 0.0}),
    Technique("tied head", "2025-12-19", 3.2, {"tied_frac": 0.0}),
    Technique(
        "several targets a token",
        "2025-12-22",
        2.9,
        {"stages": without("stages", f"targets={NUMBER}")},
    ),
    Technique("logit rescale", "2025-12-26", 2.9, {"logit_sigmoid": (0.0, 0.0, 1.0)}),
    Technique("Polar Express", "2025-09-29", 0.4, {"polar_express": False}),
    Technique("NorMuon", "2025-10-24", 4.1, {"muon_beta2": 0.0}),
    Technique("momentum falls at the end", "2025-09-30", None, {"momentum_cooldown_steps": 0}),
    Technique("cautious decay of matrices", "2025-11-10", 1.7, {"muon_decay": 0.0}),
    Technique(
        "cautious decay of Adam's",
        "2025-12-18",
        1.1,
        {"adam_groups": without("adam_groups", f"decay={NUMBER}")},
    ),
    Technique("Adam at every second step", "2025-09-30", 1.7, {"adam_every": 1}),
    Technique(
        "betas by group",
        "2025-12-21",
        2.3,
        {"adam_groups": without("adam_groups", f"beta[12]={NUMBER}")},
    ),
    Technique(
        "shorter documents, higher last rate",
        "2026-02-10",
        1.2,
        {"lr_final": low_lr_final, "stages": without("stages", f"cap={NUMBER}")},
    ),
)


def flags_without(
    technique: Technique, hp: Hyperparameters, run_class: type[train_gpt.Run]
) -> list[str]:
    """Return flags that turn a technique off; none where the settings do without it already."""
    if not technique.off.keys() <= vars(hp).keys():
        return []
    flags = []
    for name, off in technique.off.items():
        value = off(hp, run_class) if callable(off) else off
        if value != getattr(hp, name):
            words = value if isinstance(value, tuple) else (value,)
            flags += [f"--{name}", *(train_gpt.show(word) for word in words)]
    return flags


# -----------------------------------------------------------------------------
# Rounds, and what they say


def pooled(values: np.ndarray) -> tuple[float, int]:
    """Return the deviation of one of values (techniques, seeds), after the means of techniques and
    of those that share a run of the record, and its degrees of freedom. Rows with nan do not count.
    """
    squares, free = 0.0, 0
    for first in range(0, len(values), BLOCK):
        block = values[first : first + BLOCK]
        block = block[~np.isnan(block).any(1)]
        if not len(block):
            continue
        rest = block - block.mean(1, keepdims=True) - block.mean(0) + block.mean()
        squares += (rest**2).sum()
        free += (len(block) - 1) * (values.shape[1] - 1)
    return (math.sqrt(squares / free) if free else math.nan), free


@dataclass(frozen=True)
class Effects:
    """What the absence of each technique changes, as means over seeds (techniques,): the loss, the
    logarithm of the time, and that of the time to equal loss. The standard error of each of these
    three is one for all techniques."""

    loss: np.ndarray
    time: np.ndarray
    together: np.ndarray
    errors: dict[str, float]
    free: int  # degrees of freedom

    @classmethod
    def of(cls, losses: np.ndarray, times: np.ndarray, worth: float) -> "Effects":
        """Return effects from differences (techniques, seeds) to the record: of losses, and of log
        times. The record's own runs err, too: hence the factor 2 in a difference's variance."""
        together = times + losses / worth
        errors = {}
        for name, values in (("loss", losses), ("time", times), ("together", together)):
            deviation, free = pooled(values)
            errors[name] = deviation * math.sqrt(2 / values.shape[1])
        return cls(losses.mean(1), times.mean(1), together.mean(1), errors, free)

    def half(self, name: str) -> float:
        """Return half of a 95 % interval."""
        return float(stats.t.isf(0.025, self.free) * self.errors[name])

    def verdict(self, i: int, judge: str) -> tuple[str, float]:
        """Say whether technique i helps, by one of the three numbers; and return p."""
        value = getattr(self, judge)[i]
        p = 2 * stats.t.sf(abs(value) / self.errors[judge], self.free)
        if not p < SETTLED:
            return "not settled", p
        return ("helps" if value > 0 else "hurts"), p


def rank_correlation(a, b) -> tuple[float, float, float]:
    """Return Spearman's rho of two lists, and the ends of its 95 % interval, by Fisher's
    transformation with the variance of Bonett and Wright (Psychometrika 65, 2000)."""
    rho = float(stats.spearmanr(a, b).statistic)
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(a) - 3))
    z = math.atanh(min(max(rho, -0.999999), 0.999999))
    return rho, math.tanh(z - half), math.tanh(z + half)


def ablate(
    record: Side, without_each: dict[Technique, Side], name: str, seeds: range, judge: str
) -> None:
    """Make the rounds, and print the table after each but the first."""
    compare.begin(name, [record, *without_each.values()])
    techniques = list(without_each)
    made: dict[str, list[Run]] = {}
    losses, times = np.zeros((2, len(techniques), len(seeds)))
    worths: list[float] = []

    def make(side: Side, run_name: str, seed: int) -> Run:
        run = side.run(run_name, seed)
        made.setdefault(side.name, []).append(run)
        return run

    for column, seed in enumerate(seeds):
        for row, technique in enumerate(techniques):
            if row % BLOCK == 0:
                own = make(record, f"{name}_{row // BLOCK}", seed)
            if row == 0:
                longer = make(compare.longer(record, own.steps), name, seed)
                worths.append(compare.worth_of_time(own, longer))
            if np.isnan(losses[row]).any():
                continue
            try:
                run = make(without_each[technique], name, seed)
            except UserError as error:
                print(f"left out: {technique.name}: {error}")
                losses[row] = math.nan
                continue
            losses[row, column] = run.loss - own.loss
            times[row, column] = math.log(run.seconds / own.seconds)
        for runs in made.values():
            compare.check_equal(runs)
        if column:
            worth = float(np.mean(worths))
            done = slice(column + 1)
            print(f"\nafter {column + 1} of {len(seeds)} seeds:\n")
            print_effects(techniques, Effects.of(losses[:, done], times[:, done], worth), judge)
            print(f"\none step of {own.steps} is worth {worth / own.steps:.2g} of the loss\n")


def print_effects(techniques: list[Technique], found: Effects, judge: str) -> None:
    """Print the table of the techniques, those that help most first, and the rank correlations."""
    header = ["technique", "loss without it", "time without it", "to equal loss"]
    rows = [[*header, "p", "verdict", "gain_s"]]
    whole = [i for i in np.argsort(-getattr(found, judge)) if not math.isnan(found.loss[i])]
    for i in whole:
        verdict, p = found.verdict(i, judge)
        cells = [techniques[i].name, f"{found.loss[i]:+.4f} ± {found.half('loss'):.4f}"]
        for of in ("time", "together"):
            mean = getattr(found, of)[i]
            half = math.exp(mean) * found.half(of)
            cells.append(f"{100 * math.expm1(mean):+.1f} % ± {100 * half:.1f}")
        rows.append([*cells, show_p(p), verdict, show(techniques[i].gain, ".1f")])
    print_table(rows)
    known = [i for i in whole if techniques[i].gain is not None]
    if len(known) > 3:
        gains = [techniques[i].gain for i in known]
        for of, words in (("together", "time to equal loss"), ("loss", "loss")):
            rho, low, high = rank_correlation(gains, getattr(found, of)[known])
            text = f"rank correlation of {words} with the gains of {len(known)} techniques"
            print(f"\n{text}: {rho:.2f}, from {low:.2f} to {high:.2f}")


def print_list(record: Side, without_each: dict[Technique, Side]) -> None:
    """Print the techniques, when they were brought, and the flags that turn them off."""
    rows = [["technique", "brought", "gain_s", "without it"]]
    for technique, side in without_each.items():
        flags = " ".join(side.flags[len(record.flags) :])
        rows.append([technique.name, technique.brought, show(technique.gain, ".1f"), flags])
    print_table(rows)


def parse_args(argv: list[str] | None) -> Callable[[], None]:
    """Return what the flags ask for, as a function to be called; UserError for a bad value."""
    parser = compare.parser_of(__doc__)
    parser.add_argument("--ablate", action="store_true", required=True)
    parser.add_argument("--runs", type=int, default=3, help="seeds [3]")
    parser.add_argument("--judge", choices=("together", "time", "loss"), default="together")
    parser.add_argument("--only", default="", metavar="WORD", help="of techniques' names")
    parser.add_argument("--list", action="store_true", help="print the techniques and exit")
    args, others = parser.parse_known_args(argv)
    path, flags = script.take_script(others)
    hp = compare.new_run(path, flags)
    run_class = script.load(path)
    without_each = {}
    for technique in TECHNIQUES:
        more = flags_without(technique, hp, run_class)
        if more and args.only.casefold() in technique.name.casefold():
            compare.new_run(path, [*flags, *more])
            name = re.sub(r"\W+", "_", technique.name)
            without_each[technique] = Side(name, (*flags, *more), path)
    if args.runs < 2 or len(without_each) < 2:
        names = ", ".join(technique.name for technique in without_each) or "none"
        raise UserError(
            f"--ablate wants 2 or more --runs and techniques; it found {names}; "
            "forks/train_gpt_2026.py has many: ./run.sh --ablate forks/train_gpt_2026.py"
        )
    record = Side("record", tuple(flags), path)
    if args.list:
        return partial(print_list, record, without_each)
    seeds = range(hp.seed, hp.seed + args.runs)
    return partial(ablate, record, without_each, args.run_id, seeds, args.judge)


def main(argv: list[str] | None = None) -> None:
    """Ablate as the flags say; errors are those of train_gpt.py."""
    train_gpt.as_program("run.sh", lambda: parse_args(argv), lambda asked: asked())


if __name__ == "__main__":
    main()
