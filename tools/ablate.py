"""What is each technique worth? Trains a record without each of its techniques, one at a time.

    ./run.sh --ablate [SCRIPT.py] [--runs 3] [--only WORDS] [--judge loss] [flags of the script]
    ./run.sh --ablate forks/train_gpt_2026.py           the script with the most techniques
    ./run.sh --ablate forks/train_gpt_2026.py --list    print its techniques, and train nothing
    ./run.sh --ablate forks/train_gpt_2026.py --only smear,gate

For each seed, these runs take turns: the record, eight runs with one technique off each, the record
again, and so on. A run is compared with the last run of the record before it. --only takes the
techniques whose names contain one of the words. If a run without a technique fails, for example
because it diverges, the technique is left out. --list is about the script's default record, unless
--record names another.

If a technique helps, the loss is higher without it; a step without it may be faster. "to equal
loss" is how much longer training takes to the record's loss without the technique, as in
tools/compare.py. The verdict is on that number, or on the one that --judge names: a technique
"helps" or "hurts" if p < 0.01. Of a hundred techniques that do nothing, one gets such a verdict by
chance, if the number of seeds was fixed beforehand. Intervals are 95 % intervals. The worth of time
is taken as exact.

All techniques share one estimate of the standard deviation of a run: what remains when the mean of
each technique is subtracted, and that of each group which shares a run of the record. A single
technique has the deviation of its differences to the record. Intervals and verdicts need three
degrees of freedom: four seeds of a single technique, or two seeds of four techniques.

Below the table are Spearman's rank correlations with the published gains, with 95 % intervals.
Finished runs are not repeated: --run_id NAME continues an ablation, also with more --runs or with
another --judge.
"""

import difflib
import itertools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy import stats

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import compare  # noqa: E402
import script  # noqa: E402
from compare import Side  # noqa: E402
from leaderboard import ALPHA, FEWEST, Run, print_table, show, show_p  # noqa: E402
from techniques import TECHNIQUES, Technique, flags_without, is_of  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import Hyperparameters, UserError  # noqa: E402

BLOCK = 8  # techniques that share a run of the record
FEWEST_FREE = FEWEST - 1  # degrees of freedom; FEWEST pairs of runs have as many


# -----------------------------------------------------------------------------
# Statistics, and the runs


def pooled(values: np.ndarray) -> tuple[float, int]:
    """Return the standard deviation of a single run, and its degrees of freedom.

    `values` (techniques, seeds) are differences to the record's run. The mean of each technique is
    subtracted, and the mean of the techniques that share a run of the record. Rows with nan do not
    count. If no technique shares its run of the record, the deviation is that of the differences,
    whose variance is twice that of a run: the test of a single technique is the paired t-test.
    """
    squares, free = 0.0, 0
    alone = 0.0, 0  # the same for techniques that share no run
    for first in range(0, len(values), BLOCK):
        block = values[first : first + BLOCK]
        block = block[~np.isnan(block).any(1)]
        if not len(block):
            continue
        rest = block - block.mean(1, keepdims=True)
        if len(block) == 1:
            alone = alone[0] + (rest**2).sum() / 2, alone[1] + values.shape[1] - 1
        rest = rest - block.mean(0) + block.mean()
        squares += (rest**2).sum()
        free += (len(block) - 1) * (values.shape[1] - 1)
    if not free:
        squares, free = alone
    return (math.sqrt(squares / free) if free else math.nan), free


def fewest_seeds(techniques: int) -> int:
    """Return how many seeds so many techniques need for intervals and verdicts."""
    counts = itertools.count(2)
    return next(n for n in counts if pooled(np.zeros((techniques, n)))[1] >= FEWEST_FREE)


@dataclass(frozen=True)
class Effects:
    """What the absence of each technique changes, as means over seeds (techniques,): the loss, the
    logarithm of the time, and the logarithm of the time to equal loss, which is nan if the worth of
    time is not known. All techniques share the standard error of each of the three numbers."""

    loss: np.ndarray
    time: np.ndarray
    together: np.ndarray
    errors: dict[str, float]
    free: int  # degrees of freedom

    @classmethod
    def of(cls, losses: np.ndarray, times: np.ndarray, worth: float | None) -> "Effects":
        """Return effects from differences (techniques, seeds) to the record, of losses and of log
        times. The record's run has an error, too: the variance of a difference has a factor 2. The
        error of a loss is at least that of its rounding."""
        worth = worth or math.nan
        together, rounded = times + losses / worth, compare.rounding() / math.sqrt(losses.shape[1])
        errors = {}
        for name, values, least in (
            ("loss", losses, rounded),
            ("time", times, 0.0),
            ("together", together, rounded / worth),
        ):
            errors[name] = max(pooled(values)[0] * math.sqrt(2 / values.shape[1]), least)
        return cls(losses.mean(1), times.mean(1), together.mean(1), errors, pooled(losses)[1])

    def half(self, name: str) -> float:
        """Return half the width of the 95 % interval; nan if there are too few runs."""
        if self.free < FEWEST_FREE:
            return math.nan
        return float(stats.t.isf(0.025, self.free) * self.errors[name])

    def verdict(self, i: int, judge: str) -> tuple[str, float]:
        """Return whether technique i helps, judged by one of the three numbers, and p; "-" and nan
        if there are too few runs."""
        if self.free < FEWEST_FREE:
            return "-", math.nan
        value = getattr(self, judge)[i]
        p = 2 * stats.t.sf(abs(value) / self.errors[judge], self.free)
        if not p < ALPHA:
            return "not significant", p
        return ("helps" if value > 0 else "hurts"), p


def rank_correlation(a, b) -> tuple[float, float, float]:
    """Return Spearman's rho of two lists, and both ends of its 95 % interval: Fisher's
    transformation with the variance of Bonett and Wright (Psychometrika 65, 2000)."""
    rho = float(stats.spearmanr(a, b).statistic)
    half = 1.96 * math.sqrt((1 + rho**2 / 2) / (len(a) - 3))
    z = math.atanh(min(max(rho, -0.999999), 0.999999))
    return rho, math.tanh(z - half), math.tanh(z + half)


def ablate(
    record: Side, without_each: dict[Technique, Side], name: str, seeds: range, judge: str
) -> None:
    """Make the runs of each seed, and print the table after each seed. UserError if a run of the
    record fails, or if the worth of time is needed and cannot be measured."""
    compare.begin(name, [record, *without_each.values()])
    techniques = list(without_each)
    logs = []
    for seed in seeds:
        logs.append(Side("record_longer").log(name, seed))
        for row, side in enumerate(without_each.values()):
            if row % BLOCK == 0:
                logs.append(record.log(f"{name}_{row // BLOCK}", seed))
            logs.append(side.log(name, seed))
    pace = compare.Pace(name, logs, f"{len(logs) // len(seeds)} runs a seed, {len(seeds)} seeds")
    if len(seeds) < fewest_seeds(len(techniques)):
        print(f"intervals and verdicts need --runs {fewest_seeds(len(techniques))} or more")
    made: dict[str, list[Run]] = {}
    losses, times = np.zeros((2, len(techniques), len(seeds)))
    worths: list[float] = []

    def make(side: Side, run_name: str, seed: int) -> Run:
        run = pace.run(side, run_name, seed)
        made.setdefault(side.name, []).append(run)
        return run

    for column, seed in enumerate(seeds):
        for row, technique in enumerate(techniques):
            if row % BLOCK == 0:
                own = make(record, f"{name}_{row // BLOCK}", seed)
            if row == 0:
                longer = make(compare.longer(record, own.steps), name, seed)
                worths.append(compare.worth_of_time(own, longer))
                worth = float(np.mean(worths)) if np.mean(worths) > 0 else None
                if judge == "together" and not worth:
                    raise compare.unmeasured(name, "record")
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
        done = slice(column + 1)
        print(f"\nafter {column + 1} of {len(seeds)} seeds:\n")
        print_effects(techniques, Effects.of(losses[:, done], times[:, done], worth), judge)
        if worth:
            print(f"\none step of {own.steps} is worth {worth / own.steps:.2g} of the loss\n")
        else:
            print("\nmore steps gave no lower loss: the worth of time cannot be measured here\n")
        sys.stdout.flush()


def print_effects(techniques: list[Technique], found: Effects, judge: str) -> None:
    """Print the table of the techniques, the most helpful ones first, and the rank correlations.
    "to equal loss" is left out if the worth of time is not known."""
    whole = [i for i in np.argsort(-getattr(found, judge)) if not math.isnan(found.loss[i])]
    ratios = {"time": "time without it", "together": "to equal loss"}
    if np.isnan(found.together[whole]).any():
        del ratios["together"]
    rows = [["technique", "loss without it", *ratios.values(), "p", "verdict", "gain_s"]]
    for i in whole:
        verdict, p = found.verdict(i, judge)
        cells = [techniques[i].name, f"{found.loss[i]:+.4f}{interval(found.half('loss'), '.4f')}"]
        for of in ratios:
            mean = getattr(found, of)[i]
            half = 100 * math.exp(mean) * found.half(of)
            cells.append(f"{100 * math.expm1(mean):+.1f} %{interval(half, '.1f')}")
        rows.append([*cells, show_p(p), verdict, show(techniques[i].gain, ".1f")])
    print_table(rows)
    if found.free < FEWEST_FREE:
        print("\ntoo few runs for intervals and verdicts")
    known = [i for i in whole if techniques[i].gain is not None]
    if len(known) > 3:
        gains = [techniques[i].gain for i in known]
        for of, words in (("together", "time to equal loss"), ("loss", "loss")):
            if of == "loss" or of in ratios:
                rho, low, high = rank_correlation(gains, getattr(found, of)[known])
                text = f"rank correlation of {words} with the gains of {len(known)} techniques"
                print(f"\n{text}: {rho:.2f}, from {low:.2f} to {high:.2f}")


def interval(half: float, form: str) -> str:
    """Return what follows a mean: half its interval, or nothing if there is none."""
    return "" if math.isnan(half) else f" ± {half:{form}}"


# -----------------------------------------------------------------------------
# Flags


def print_list(
    techniques: list[Technique], record: str, hp: Hyperparameters, run_class: type[train_gpt.Run]
) -> None:
    """Print what techniques do, where they come from, where their code and their tests are, and the
    flags that turn them off in a record."""
    print(
        "record   the public record that brought the technique\n"
        "gain     seconds of training that it saved there on 8 H100s (not measured here)\n"
        "setting  the flag that controls the technique, or the word in a flag\n"
        "code     in forks/train_gpt_2026.py\n"
        "test     what tests/frontier/test_rows.py checks, or the name of another file\n"
        f"off by   the flags that turn the technique off in {record}"
    )
    for technique in techniques:
        off = " ".join(flags_without(technique, hp, run_class)) or f"not in {record}"
        if not technique.off:
            off = "stays on: other settings depend on it"
        gain = "" if technique.gain is None else f"{technique.gain} s"
        facts = {
            "record": technique.brought,
            "gain": "; ".join(text for text in (gain, technique.more) if text) or "not known",
            "setting": technique.switch,
            "code": technique.where,
            "test": technique.test,
            "off by": off,
        }
        print(f"\n{technique.name}: {technique.what}")
        for name, text in facts.items():
            print(f"    {name:<8} {text}")


def check_words(words: list[str], techniques: list[Technique]) -> None:
    """Raise UserError for a word that is in no technique's name; it tells the most similar name."""

    def likeness(word: str, technique: Technique) -> float:
        name = technique.name.casefold()
        parts = [name, *name.split()]
        return max(difflib.SequenceMatcher(None, word, part).ratio() for part in parts)

    for word in words:
        if not any(word in technique.name.casefold() for technique in techniques):
            nearest = max(techniques, key=lambda technique: likeness(word, technique))
            raise UserError(
                f"--only {word}: no technique here has this in its name; the nearest one is "
                f'"{nearest.name}", --list prints all'
            )


def parse_args(argv: list[str] | None) -> Callable[[], None]:
    """Return a function that does what the flags ask for; UserError for a bad value."""
    parser = compare.parser_of(__doc__)
    parser.add_argument("--ablate", action="store_true", required=True)
    parser.add_argument("--runs", type=int, default=3, help="number of seeds [3]")
    text = "only techniques whose names contain one of these words, separated by commas"
    parser.add_argument("--only", default="", metavar="WORDS", help=text)
    parser.add_argument(
        "--list", action="store_true", help="print the techniques, and train nothing"
    )
    args, others = parser.parse_known_args(argv)
    path, flags = script.take_script(others)
    run_class = script.load(path)
    if args.list and not any(word.split("=")[0] == "--record" for word in flags):
        flags = ["--record", run_class.default_record, *flags]
    hp, record = compare.new_run(path, flags)
    techniques = []
    for technique in TECHNIQUES:
        if flags_without(technique, hp, run_class) or (args.list and is_of(technique, run_class)):
            techniques.append(technique)
    if not techniques:
        fork = "forks/train_gpt_2026.py"
        raise UserError(
            f"{record} of {path.name} has no technique that --ablate knows; {fork} has many: "
            f"./run.sh --ablate {fork}"
        )
    if words := [word.strip().casefold() for word in args.only.split(",") if word.strip()]:
        check_words(words, techniques)
        techniques = [t for t in techniques if any(word in t.name.casefold() for word in words)]
    if args.list:
        return partial(print_list, techniques, record, hp, run_class)
    if args.runs < 1:
        raise UserError(f"--runs {args.runs}: --ablate needs 1 or more")
    without_each = {}
    for technique in techniques:
        more = flags_without(technique, hp, run_class)
        compare.new_run(path, [*flags, *more])
        name = re.sub(r"\W+", "_", technique.name)
        without_each[technique] = Side(name, (*flags, *more), path)
    seeds = range(hp.seed, hp.seed + args.runs)
    own = Side("record", tuple(flags), path)
    return partial(ablate, own, without_each, args.run_id, seeds, args.judge)


def main(argv: list[str] | None = None) -> None:
    """Ablate as the flags say; errors are those of train_gpt.py."""
    train_gpt.as_program("run.sh", lambda: parse_args(argv)())


if __name__ == "__main__":
    main()
