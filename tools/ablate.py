"""What is each technique worth? Trains a record without each of its techniques, one at a time.

    ./run.sh --ablate [SCRIPT.py] [--runs 3] [--only WORDS] [--judge loss] [flags of the script]
    ./run.sh --ablate forks/train_gpt_2026.py           the script with the most techniques
    ./run.sh --ablate forks/train_gpt_2026.py --list    print its techniques, and train nothing
    ./run.sh --ablate forks/train_gpt_2026.py --only smear,gate

For each seed, these runs take turns: the record, eight runs with one technique off each, the record
again, and so on. A run is compared with the last run of the record before it. --only takes the
techniques whose names contain one of the words. If a run without a technique fails, for example
because it diverges, the technique is left out. ./run.sh --compare measures a single technique.

If a technique helps, the loss is higher without it; a step without it may be faster. "to equal
loss" is how much longer training takes to the record's loss without the technique, as in
tools/compare.py. The verdict is on that number, or on the one that --judge names: a technique
"helps" or "hurts" if p < 0.01. Of a hundred techniques that do nothing, one gets such a verdict by
chance, if the number of seeds was fixed beforehand. Intervals are 95 % intervals. The worth of time
is taken as exact.

All techniques share one estimate of the standard deviation of a run: what remains when the mean of
each technique is subtracted, and that of each group which shares a run of the record. Intervals and
verdicts need three degrees of freedom: two seeds of four techniques, or four seeds of two.

The record is the one that is trained without --ablate: on a CPU a demo, unless --record names one.

--seconds N gives all runs the steps of the record that take N seconds of training here.

Finished runs are not repeated: --run_id NAME continues an ablation, also with more --runs or with
another --judge.

    --runs N            number of seeds [3]
    --only WORDS        only techniques whose names contain one of these words, with commas between
    --list              print the techniques, and train nothing
    --judge WHAT        what is tested: together (the time to equal loss), time or loss [together]
    --seconds N         choose --num_iterations so that training takes N seconds here
    --time_again        for --seconds, time steps again, not as remembered in logs/times.json
    --run_id NAME       how names of logs begin [the time]
"""

import math
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

import numpy as np
from scipy import stats

import compare
import script
import seconds
from compare import Side
from leaderboard import ALPHA, FEWEST, show, show_p
from logfile import print_table
from techniques import TECHNIQUES, Technique, flags_without
from train_gpt import UserError, as_program

BLOCK = 8  # techniques that share a run of the record
FEWEST_FREE = FEWEST - 1  # degrees of freedom; FEWEST pairs of runs have as many


# -----------------------------------------------------------------------------
# Statistics, and the runs


def pooled(values: np.ndarray) -> tuple[float, int]:
    """Return the standard deviation of a single run, and its degrees of freedom.

    `values` (techniques, seeds) are differences to the record's run. The mean of each technique is
    subtracted, and the mean of the techniques that share a run of the record. Rows with nan do not
    count.
    """
    squares, free = 0.0, 0
    for first in range(0, len(values), BLOCK):
        block = values[first : first + BLOCK]
        block = block[~np.isnan(block).any(axis=1)]
        if len(block) > 1:
            rest = block - block.mean(1, keepdims=True) - block.mean(0) + block.mean()
            squares += (rest**2).sum()
            free += (len(block) - 1) * (values.shape[1] - 1)
    return (math.sqrt(squares / free) if free else math.nan), free


def effects(values: np.ndarray) -> tuple[np.ndarray, float, np.ndarray]:
    """Return the mean over seeds of each technique (techniques,), half the width of its 95 %
    interval, and p that the true mean is 0 (techniques,). The last two are nan for too few runs."""
    means, (deviation, free) = values.mean(1), pooled(values)
    if free < FEWEST_FREE:
        return means, math.nan, np.full(len(means), math.nan)
    error = deviation * math.sqrt(2 / values.shape[1])  # the record's run has a deviation, too
    return means, stats.t.isf(0.025, free) * error, 2 * stats.t.sf(np.abs(means) / error, free)


def ablate(
    record: Side, techniques: list[Technique], sides: list[Side], args, seeds: range
) -> None:
    """Make the runs of each seed, and print the table after each seed. `sides` are the record
    without each technique. UserError if a run of the record fails, or if the worth of time is
    needed and cannot be measured."""
    name, judge = args.run_id, args.judge
    turns = []  # the runs of a seed: a side, and the row of its technique
    for row, side in enumerate(sides):
        if row % BLOCK == 0:
            turns.append((replace(record, name=f"record_{row // BLOCK}"), None))
        turns.append((side, row))
    logs = [side.log(name, seed) for seed in seeds for side, _ in turns]
    if judge == "together":
        logs.append(compare.longer(record, 1).log(name, seeds[0]))
    runs = {row: [] for _, row in turns}
    losses, times = np.zeros((2, len(techniques), len(seeds)))
    worth = None
    with compare.begin(name, [record, *sides], logs) as bar:
        for column, seed in enumerate(seeds):
            for side, row in turns:
                if row is not None and np.isnan(losses[row]).any():
                    continue
                try:
                    run = side.run(name, seed, bar)
                except UserError as error:
                    if row is None:
                        raise
                    bar.write(f"left out: {techniques[row].name}: {error}")
                    losses[row] = times[row] = math.nan
                    continue
                runs[row].append(run)
                compare.check_equal(runs[row])
                if row is not None:
                    losses[row, column] = run.loss - runs[None][-1].loss
                    times[row, column] = math.log(run.seconds / runs[None][-1].seconds)
                elif judge == "together" and worth is None:
                    worth = compare.worth_of_time(record, run, name, seed, bar)
            done = slice(column + 1)
            with bar.external_write_mode():
                print(f"\nafter {column + 1} of {len(seeds)} seeds:\n")
                print_effects(techniques, judge, losses[:, done], times[:, done], worth)


def print_effects(
    techniques: list[Technique],
    judge: str,
    losses: np.ndarray,
    times: np.ndarray,
    worth: float | None,
) -> None:
    """Print the table of the techniques, the most helpful ones first, from differences
    (techniques, seeds) to the record: of losses, and of log times. A row of nan is left out."""
    names = {"loss": "loss without it", "time": "time without it"}
    found = {"loss": effects(losses), "time": effects(times)}
    if worth:
        names["together"] = "to equal loss"
        found["together"] = effects(times + losses / worth)
    judged, _, ps = found[judge]
    rows = [["technique", *names.values(), "p", "verdict", "gain_s"]]
    for i in np.argsort(-judged):
        if math.isnan(judged[i]):
            continue
        cells = [techniques[i].name]
        for of, (means, half, _) in found.items():
            if of == "loss":
                cells.append(with_interval(means[i], half, ".4f", ""))
            else:  # logs of ratios
                ratio = math.exp(means[i])
                cells.append(with_interval(100 * (ratio - 1), 100 * ratio * half, ".1f", " %"))
        verdict = "helps" if judged[i] > 0 else "hurts"
        if not ps[i] < ALPHA:
            verdict = "-" if math.isnan(ps[i]) else "not significant"
        rows.append([*cells, show_p(ps[i]), verdict, show(techniques[i].gain, ".1f")])
    print_table(rows)
    print(flush=True)


def with_interval(mean: float, half: float, form: str, unit: str) -> str:
    """Return a change and half its interval, without an interval if there are too few runs."""
    text = f"{mean:+{form}}{unit}"
    return text if math.isnan(half) else f"{text} ± {half:{form}}"


# -----------------------------------------------------------------------------
# Flags


def techniques_of(path: Path, flags: list[str]) -> list[tuple[Technique, list[str]]]:
    """Return the techniques of a script's run with these flags, and what turns each off. They are
    at most as new as the record, or as the script's newest one, and the script takes their flags:
    otherwise, a setting of that name is something else."""
    hp, record = script.parse(path, flags)
    names = [name for cls in script.load(path).__mro__ for name in getattr(cls, "records", {})]
    date = r"\d{4}-\d\d-\d\d"
    dates = re.findall(date, record) or re.findall(date, " ".join(names))
    found = []
    for technique in TECHNIQUES:
        off = flags_without(technique, hp)
        if not off or technique.record > max(dates, default=""):
            continue
        try:
            script.parse(path, [*flags, *off])
        except UserError:
            continue
        found.append((technique, off))
    return found


def choose(argv: list[str] | None) -> None:
    """Do what the flags ask for. UserError for a bad value."""
    parser = compare.parser_of()
    parser.add_argument("--ablate", action="store_true", required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    args, others = parser.parse_known_args(argv)
    path, flags = script.take_script(others)
    hp, record = script.parse(path, flags)
    found = techniques_of(path, flags)
    words = args.only.casefold().split(",")
    found = [(t, off) for t, off in found if any(word in t.name.casefold() for word in words)]
    if args.list:
        rows = [["technique", "record", "gain_s", f"what turns it off in {record}"]]
        for technique, off in found:
            gain = show(technique.gain, ".1f")
            rows.append([technique.name, technique.record, gain, shlex.join(off)])
        return print_table(rows)
    if args.runs < 1:
        raise UserError(f"--runs {args.runs}: --ablate needs 1 or more")
    if len(found) < 2:
        remedy = "forks/train_gpt_2026.py has the most, --list prints them, --compare measures one"
        raise UserError(f"{record} has {len(found)} such techniques, two are needed: {remedy}")
    if args.seconds is not None:
        longer = compare.more_steps if args.judge == "together" else None
        flags = seconds.with_steps(path, flags, args, longer)
    own = Side("record", tuple(flags), path)
    sides = [
        Side(re.sub(r"\W+", "_", technique.name), (*flags, *off), path) for technique, off in found
    ]
    seeds = range(hp.seed, hp.seed + args.runs)
    ablate(own, [technique for technique, _ in found], sides, args, seeds)


def main(argv: list[str] | None = None) -> None:
    """Ablate as the flags say; errors are those of train_gpt.py."""
    as_program("run.sh", lambda: choose(argv))


if __name__ == "__main__":
    main()
