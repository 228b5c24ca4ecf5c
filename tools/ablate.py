"""What is each technique worth? A record with one technique off, for each that it has.

    ./run.sh --ablate [--runs 3] [--only WORD] [--judge loss] [flags of train_gpt.py]

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
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import compare  # noqa: E402
from compare import Side  # noqa: E402
from leaderboard import SETTLED, Run, print_table, show, show_p  # noqa: E402

import program  # noqa: E402
import train_gpt  # noqa: E402
from program import UserError  # noqa: E402

BLOCK = 8  # techniques that share a run of the record


# -----------------------------------------------------------------------------
# Techniques: how to do without them


@dataclass(frozen=True)
class Technique:
    """Its name, what the public record that brought it gained (seconds on 8 H100s; None where the
    record brought another technique here, too), and settings that do without it."""

    name: str
    gain: float | None
    off: Callable[[train_gpt.Hyperparameters], dict]


def turned_off(**settings) -> Callable:
    return lambda hp: settings


def without(setting: str, *words: str) -> Callable:
    """Rows of a setting without those words, which are patterns."""
    pattern = re.compile("".join(rf"|\+(?:{word})(?=[+,]|$)" for word in words)[1:])
    return lambda hp: {setting: pattern.sub("", getattr(hp, setting))}


def one_stage(hp) -> dict:
    """One stage as long as the mean one: as many tokens, but for rounding. Its learning rate and
    targets are those of the stage whose length is nearest, its window is the last one."""
    table = train_gpt.stage_table(hp.stages)
    if len(table) == 1:
        return {}
    begun = [train_gpt.stages_until(step, hp)[-1] for step in range(hp.num_iterations)]
    length = round(sum(stage.length for stage in begun) / len(begun))
    middle = min(table, key=lambda stage: abs(stage.length - length))
    stage = f"length={length}+window={table[-1].window}+lr={middle.lr:g}"
    stage += f"+cap={middle.cap}" * bool(middle.cap)
    stage += f"+targets={'/'.join(f'{t:g}' for t in middle.targets)}"
    return {"stages": stage}


NUMBER = r"[\d./e+-]+"
TECHNIQUES = (
    Technique("attention gate", 0.3, turned_off(attention_gate=False)),
    Technique(
        "whole documents",
        2.0,
        lambda hp: {"align_to_documents": False, **without("stages", f"cap={NUMBER}")(hp)},
    ),
    Technique("stages of the batch", 2.7, one_stage),
    Technique("extension, wide last window", 1.2, turned_off(extension_frac=0.0, last_window=0)),
    Technique("YaRN", 3.7, turned_off(yarn=False)),
    Technique(
        "windows as distances",
        None,
        lambda hp: {"window_rule": hp.window_rule.replace("distance", "blocks")},
    ),
    Technique("smear", 1.1, turned_off(smear=False)),
    Technique("backout", 5.3, without("layers", "backout")),
    Technique("skip connection", 1.3, without("layers", r"x\d+")),
    Technique("factors by sublayer", None, turned_off(sublayer_lambdas=False)),
    Technique("residual factor above 1", None, turned_off(residual_lambda=1.0)),
    Technique("late attention reads earlier", None, without("layers", r"in\d+")),
    Technique("lambda on attention's weights", 0.6, turned_off(scaled_projections=False)),
    Technique("key offset", 1.4, turned_off(key_offset=False)),
    Technique("paired heads", 3.5, turned_off(paired_heads=False)),
    Technique("table of bigrams", 5.6, turned_off(bigram_rows=0)),
    Technique("value embeddings", None, without("layers", r"v\d")),
    Technique("value gates", None, turned_off(value_gate=False, gate_by_values=False)),
    Technique("value gates read values", None, turned_off(gate_by_values=False)),
    Technique(
        "value tables from small numbers",
        None,
        lambda hp: {"value_init": 0.0 if hp.value_init < 1 else 1.0},
    ),
    Technique("wider q, k and v at first", None, turned_off(qkv_init=1.0)),
    Technique("attention's output from non-zero", 1.2, turned_off(out_init=0.0)),
    Technique("tied head", 3.2, turned_off(tied_frac=0.0)),
    Technique("several targets a token", 2.9, without("stages", f"targets={NUMBER}")),
    Technique("logit rescale", 2.9, turned_off(logit_sigmoid=(0.0, 0.0, 1.0))),
    Technique("Polar Express", 0.4, turned_off(polar_express=False)),
    Technique("NorMuon", 4.1, turned_off(muon_beta2=0.0)),
    Technique("momentum falls at the end", None, turned_off(momentum_cooldown_steps=0)),
    Technique("cautious decay of matrices", 1.7, turned_off(muon_decay=0.0)),
    Technique("cautious decay of Adam's", 1.1, without("adam_groups", f"decay={NUMBER}")),
    Technique("Adam at every second step", 1.7, turned_off(adam_every=1)),
    Technique("betas by group", 2.3, without("adam_groups", f"beta[12]={NUMBER}")),
    Technique(
        "shorter documents, higher last rate",
        1.2,
        lambda hp: {"lr_final": min(hp.lr_final, 0.1), **without("stages", f"cap={NUMBER}")(hp)},
    ),
)


def flags_without(technique: Technique, hp) -> list[str]:
    """Flags that turn a technique off; none where the settings do without it already."""
    changed = {k: v for k, v in technique.off(hp).items() if v != getattr(hp, k)}
    flags = []
    for name, value in changed.items():
        words = map(program.show, value) if isinstance(value, tuple) else [program.show(value)]
        flags += [f"--{name}", *words]
    return flags


# -----------------------------------------------------------------------------
# Rounds, and what they say


def pooled(values: np.ndarray) -> tuple[float, int]:
    """Of values (techniques, seeds) the deviation of one of them, after the means of techniques and
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
    """Of each technique, the mean over seeds (techniques,) of what its absence changes: the loss,
    the logarithm of the time, and that of the time to equal loss; and the standard error of each,
    which is one for all techniques, with its degrees of freedom."""

    loss: np.ndarray
    time: np.ndarray
    together: np.ndarray
    errors: dict[str, float]
    free: int

    @classmethod
    def of(cls, losses: np.ndarray, times: np.ndarray, worth: float) -> "Effects":
        """From differences (techniques, seeds) to the record: of losses, and of log times. The
        record's own runs err, too: hence the factor 2 in a difference's variance."""
        together, errors = times + losses / worth, {}
        for name, values in (("loss", losses), ("time", times), ("together", together)):
            deviation, free = pooled(values)
            errors[name] = deviation * math.sqrt(2 / values.shape[1])
        return cls(losses.mean(1), times.mean(1), together.mean(1), errors, free)

    def half(self, name: str) -> float:
        """Half of a 95 % interval."""
        return float(stats.t.isf(0.025, self.free) * self.errors[name])

    def verdict(self, i: int, judge: str) -> tuple[str, float]:
        """Whether technique i helps, by one of the three numbers, and p."""
        value = getattr(self, judge)[i]
        p = 2 * stats.t.sf(abs(value) / self.errors[judge], self.free)
        if not p < SETTLED:
            return "not settled", p
        return ("helps" if value > 0 else "hurts"), p


def rank_correlation(a, b) -> tuple[float, float, float]:
    """Spearman's rho of two lists, and the ends of its 95 % interval, by Fisher's transformation
    with the variance of Bonett and Wright (Psychometrika 65, 2000)."""
    rho = float(stats.spearmanr(a, b).statistic)
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(a) - 3))
    z = math.atanh(min(max(rho, -0.999999), 0.999999))
    return rho, math.tanh(z - half), math.tanh(z + half)


def ablate(
    record: Side, without_each: dict[Technique, Side], name: str, seeds: range, judge: str
) -> None:
    """Make the rounds, and print the table after each but the first."""
    compare.begin(name, [record, *without_each.values()])
    techniques, made = list(without_each), {}
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
            worth, done = float(np.mean(worths)), slice(column + 1)
            print(f"\nafter {column + 1} of {len(seeds)} seeds:\n")
            print_effects(techniques, Effects.of(losses[:, done], times[:, done], worth), judge)
            print(f"\none step of {own.steps} is worth {worth / own.steps:.2g} of the loss\n")


def print_effects(techniques: list[Technique], found: Effects, judge: str) -> None:
    """The table of the techniques, those that help most first, and the rank correlations."""
    rows = [["technique", "loss without it", "time without it", "to equal loss"]]
    rows[0] += ["p", "verdict", "gain_s"]
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


def parse_args(argv: list[str] | None) -> tuple:
    """The arguments of `ablate`; UserError for a bad value."""

    parser = compare.parser_of(__doc__)
    parser.add_argument("--ablate", action="store_true", required=True)
    parser.add_argument("--runs", type=int, default=3, help="seeds [3]")
    parser.add_argument("--judge", choices=("together", "time", "loss"), default="together")
    parser.add_argument("--only", default="", metavar="WORD", help="of techniques' names")
    args, flags = parser.parse_known_args(argv)
    hp, without_each = compare.new_run(flags), {}
    for technique in TECHNIQUES:
        more = flags_without(technique, hp)
        if more and args.only.casefold() in technique.name.casefold():
            compare.new_run([*flags, *more])
            name = re.sub(r"\W+", "_", technique.name)
            without_each[technique] = Side(name, (*flags, *more))
    if args.runs < 2 or len(without_each) < 2:
        names = ", ".join(technique.name for technique in without_each) or "none"
        raise UserError(f"--ablate wants 2 or more --runs and techniques; it found {names}")
    seeds = range(hp.seed, hp.seed + args.runs)
    return Side("record", tuple(flags)), without_each, args.run_id, seeds, args.judge


def main(argv: list[str] | None = None) -> None:
    """Ablate as the flags say; errors are those of train_gpt.py."""
    program.as_program("run.sh", lambda: parse_args(argv), lambda args, store: ablate(*args))


if __name__ == "__main__":
    main()
