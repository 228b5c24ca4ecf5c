"""Which run was better, and is the difference significant? Reads logs, ours and the public ones.

    ./run.sh tools/leaderboard.py logs/*.txt                    a row for each run and each group
    ./run.sh tools/leaderboard.py logs/*.txt --plot curves.png  loss over time and over steps
    diff logs/A.txt logs/B.txt | less                           source and settings that differ

Runs with the same source, flags (except the seed and the like), kernels, torch and GPUs form a
group, named by a letter; the first lines say what each is. A group's p is the public leaderboard's:
a one-sided t-test that the mean loss is at most the target, which is 3.28, and 2.92 for GPT-2
medium.

A group is compared with the first group that has as many steps, by Welch's t-test of the losses,
with 95 % intervals. Of k comparisons, each is significant if p < 0.01 / k (Bonferroni). The test
holds for numbers of runs that were fixed beforehand. Whoever adds runs until p is low will find a
difference where there is none; --compare may look at every pair.

(3.28 - loss) sqrt(n) is the statistic of the optimizer benchmark (forks/train_gpt_track3.py), which
takes the standard deviation as known: 0.004 is enough, for a number of runs fixed beforehand. For
logs of that fork, and with --deviation 0.0013 for public ones, all tests are z-tests. If a log
has several trials, each one is a run. A result may be claimed at a step before the last (--at), or
for another loss in the log (--field val_ema_loss).
"""

import math
import signal
import sys
from pathlib import Path

import numpy as np

import console
import significance
from console import print_table
from logfile import Run, read_trials
from significance import ALPHA, FEWEST, show, show_p
from train_gpt import UserError

# -----------------------------------------------------------------------------
# Statistics, as numbers and in words


def deviation(values: list[float]) -> float:
    """Return the standard deviation of a sample; NaN for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def p_at_most(target: float, losses: list[float], known: float | None = None) -> float:
    """Return the p of a one-sided t-test: the probability of so low a mean loss if the true mean is
    the target. If the deviation of a loss is `known`, the test is a z-test."""
    if known is None and (len(losses) < 2 or np.ptp(losses) == 0):
        return math.nan
    half = float(significance.p_value(np.subtract(losses, target), known)) / 2  # it has two sides
    return half if np.mean(losses) < target else 1 - half


def margin(target: float, losses: list[float]) -> float:
    """Return the statistic of the optimizer benchmark, (target - mean loss) sqrt(n)."""
    return (target - np.mean(losses)) * len(losses) ** 0.5


def columns(runs: list[Run]) -> tuple[list[float], list[float]]:
    """Return the times in seconds and the last losses of some runs."""
    return [r.seconds for r in runs], [r.loss for r in runs]


def sentence(
    a: list[Run], b: list[Run], names: tuple[str, str], known: float | None, alpha: float
) -> str:
    """Return in words how b compares with a, and whether p is below alpha: then the difference is
    significant. `known` is the deviation of a loss, if it is."""
    a_times, a_losses = columns(a)
    b_times, b_losses = columns(b)
    percent = 100 / np.mean(a_times) if any(a_times) else math.nan
    times = [[percent * seconds for seconds in of] for of in (a_times, b_times)]
    loss = significance.of_groups(a_losses, b_losses, known)
    text = significance.of_groups(*times).in_words(".1f", ("faster", "slower"), " %")
    text = f"{names[1]} is {text} than {names[0]}"
    if a[0].skips_ten != b[0].skips_ten:
        text += " (but one of the clocks does not count the first ten steps)"
    text += f"; its loss is {loss.in_words('.4f', ('lower', 'higher'))}; "
    if math.isnan(loss.p):
        return text + f"an interval and p need {FEWEST} runs of each group, and unequal losses"
    if loss.p < alpha:
        planned = "if the numbers of runs were fixed beforehand"
        found = f"the difference in loss is significant (p = {show_p(loss.p)} < {alpha:.2g})"
        return text + f"{found}, {planned}"
    text += f"the difference in loss is not significant (p = {show_p(loss.p)} > {alpha:.2g}); "
    return text + "--compare tests after each pair of runs"


# -----------------------------------------------------------------------------
# What is printed and plotted


def groups_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the groups of runs by their letters."""
    groups: dict[tuple, list[Run]] = {}
    for r in runs:
        groups.setdefault(r.group, []).append(r)
    letters = [chr(ord("A") + i) if i < 26 else f"G{i}" for i in range(len(groups))]
    return dict(zip(letters, groups.values(), strict=True))


def print_groups(groups: dict[str, list[Run]], target: float, known: float | None) -> None:
    """Print a row for each group, of which all have this target. `known` is as in
    print_leaderboard."""
    statistic = f"({target:g} - loss) sqrt(n)"
    rows = [["group", "n", "loss", "sd", f"p(<={target:g})", "time_s", "sd", statistic]]
    for letter, runs in groups.items():
        times, losses = columns(runs)
        form = f".{runs[0].digits}f"
        row = [letter, str(len(runs)), show(np.mean(losses), form), show(deviation(losses), form)]
        row += [show_p(p_at_most(target, losses, known or runs[0].known_deviation))]
        row += [show(np.mean(times), ".2f"), show(deviation(times), ".2f")]
        rows.append([*row, f"{margin(target, losses):+.5f}"])
    print()
    print_table(rows)


def print_leaderboard(
    groups: dict[str, list[Run]], target: float | None = None, known: float | None = None
) -> None:
    """Print what each group is, a row for each run and each group, and compare groups of equal
    steps and targets. `target` is the loss to reach, and `known` the deviation of a loss; None:
    what logs imply."""
    rows = [["group", "steps", "loss", "time_s", "ms/step", "MiB", "log"]]
    for letter, runs in groups.items():
        machine = [f"torch {runs[0].torch}" if runs[0].torch else "", runs[0].gpu or ""]
        print(f"{letter}: {', '.join(word for word in (runs[0].name, *machine) if word)}")
        for r in runs:
            numbers = show(r.loss, f".{r.digits}f"), show(r.seconds, ".2f"), show(r.step_ms, ".2f")
            place = str(Path(*r.path.parts[-2:]))  # the whole path may be longer than a line
            rows.append([letter, str(r.steps), *numbers, r.memory or "-", place])
    print()
    print_table(rows)
    for r in [r for runs in groups.values() for r in runs if r.replaced]:
        print(f"{r.path.name} was resumed with another {' and '.join(r.replaced)}")

    aims = {letter: target or runs[0].target for letter, runs in groups.items()}
    for aim in dict.fromkeys(aims.values()):
        of_aim = {letter: runs for letter, runs in groups.items() if aims[letter] == aim}
        print_groups(of_aim, aim, known)
    compared = []  # groups, each with the first one of its kind
    for letter, runs in groups.items():
        seeds = [r.settings["seed"] for r in runs if "seed" in r.settings]
        if len(set(seeds)) < len(seeds):
            print(f"\n{letter} has a seed twice: such runs may be equal: leave one of them out")
        same = (runs[0].steps, aims[letter])
        like = next(name for name in groups if (groups[name][0].steps, aims[name]) == same)
        if like != letter:
            compared.append((like, letter))
    for names in compared:
        a, b = (groups[name] for name in names)
        z_test = known or b[0].known_deviation
        print(f"\n{sentence(a, b, names, z_test, ALPHA / len(compared))}")


def read_logs(
    paths: list[Path], program: str, at: int | None = None, name: str = "val_loss"
) -> tuple[list[Run], int]:
    """Return the runs of logs, and how many logs were skipped; a line on stderr says why. A log
    that is named twice is read once. `at` and `name` go to read_trials."""
    if at is not None and at < 1:
        raise UserError(f"--at {at}: must be 1 or more")
    runs, skipped = [], 0
    for path in {path.resolve(): path for path in paths}.values():
        try:
            runs += read_trials(path, at=at, name=name)
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"{program}: skipped {path}: {reason}", file=sys.stderr)
            skipped += 1
    return runs, skipped


@console.program("leaderboard.py")
def main(words: list[str]) -> None:
    """Print what the logs show; exit status 1 if a log could not be used. UserError for a bad
    flag."""
    parser = console.parser_of(__doc__)
    parser.add_argument("logs", nargs="+", type=Path, metavar="LOG", help="logs to read")
    parser.add_argument("--target", type=float, help="loss to reach [the record's]")
    parser.add_argument("--at", type=int, metavar="STEP", help="use this step's loss [the last]")
    parser.add_argument("--field", default="val_loss", help="name of the loss [val_loss]")
    parser.add_argument("--deviation", type=float, metavar="D", help="of a loss, if it is known")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="plot the runs into this file")
    args = parser.parse_args(words)
    for name in ("target", "deviation"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} must be a finite number above 0")
    runs, skipped = read_logs(args.logs, "leaderboard.py", args.at, args.field)
    groups = groups_of(runs)
    if groups:
        print_leaderboard(groups, args.target, args.deviation)
    if groups and args.plot:
        significance.draw_runs(groups, args.target, args.plot)
    sys.exit(1 if skipped else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    main()
