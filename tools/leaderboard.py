"""Which run was better, and is the difference significant? Reads logs, ours and the public ones.

    ./run.sh tools/leaderboard.py logs/*.txt                    a row for each run and each group
    ./run.sh tools/leaderboard.py logs/*.txt --plot curves.png  loss over time and over steps
    ./run.sh tools/leaderboard.py --diff logs/A.txt logs/B.txt  settings and source that differ

Runs with the same source, flags (except the seed and the like), kernels, torch and GPUs are a
group. The p of a group is that of the public leaderboard: a one-sided t-test that the mean loss is
at most the target. A group has a letter. If its logs are those of one side of a --compare, it has
the name of that side; the longer runs of --compare come last.

Each other group is compared with the first one, by Welch's t-test of the losses, with 95 %
intervals. Losses are not compared if the numbers of steps differ. The test holds for numbers of
runs that were fixed beforehand. Whoever adds runs until p is low will find a difference where there
is none. ./run.sh --compare may look after every pair.

For logs of the optimizer benchmark, public ones and those of forks/train_gpt_track3.py, the tool
also prints the benchmark's own statistic, which takes the standard deviation as known. If such a
log has several trials, each one is a run. A result may be claimed at a step before the last (--at),
or for another loss in the log (--field val_ema_loss).
"""

import argparse
import difflib
import itertools
import math
import re
import shlex
import signal
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from records import on_fineweb, published
from scipy import stats

RULE = "=" * 100  # separates the parts of a log: script, machine, settings, other files, steps
FILE = re.compile(r"(\w+\.py):(\n|$)")  # the first line of another file's part
STEP = re.compile(
    r"step:(\d+)/(\d+)(?: (val|train)_loss:(\S+))?((?: val_\w+:\S+)*) "
    r"train_time:(?:(\d+)ms|([\d.]+)s) step_avg:(nan|[\d.]+)ms(?: \w+:\S+)*"
)  # logs of the optimizer benchmark have seconds and other fields
# Runs of one group may differ in these.
OF_ONE_RUN = {"seed", "run_id", "resume", "val_loss_every", "save_every", "keep", "device"}
ALPHA = 0.01  # a smaller p is significant, as on the public leaderboard

# The optimizer benchmark takes the standard deviation of a loss as 0.0013. For a result of n runs,
# (target - mean) * sqrt(n) must be at least 3.09 deviations: p < 0.001. For two results, the
# difference over sqrt(1/n1 + 1/n2) must be. By its README, 100 steps are worth 0.0045 of loss.
BENCHMARK_MARGIN = 0.004
LOSS_OF_A_STEP = 0.0045 / 100

# An interval and a verdict need this many runs of each group, or pairs of runs. Half of a 95 %
# interval is 9.0 deviations of a number after two of them, 2.5 after three, 1.6 after four, and 1.2
# after five. In a sequential test of at most 20 pairs, a look after two pairs finds a difference of
# 1300 deviations every second time, a look after three pairs one of 25, after four one of 7.
FEWEST = 4

# Names of the logs of --compare: NAME_A_seed0, NAME_B_seed0, and NAME_A_longer_seed0, which
# measures what a step is worth.
OF_COMPARE = re.compile(r"(.+_(?:A|B|A_longer))_seed\d+")


@dataclass
class Run:
    """What a log tells about a run; None for what is missing."""

    path: Path
    source: str  # of the script; in some older logs, of all files
    steps: int  # of the whole run
    curve: dict[int, tuple[float, float]]  # step: validation loss, train_time in seconds
    step_ms: float | None
    skips_ten: bool  # the clock begins at step 10, as in early public logs
    record: str | None
    files: dict[str, str] = field(default_factory=dict)  # sources of other files by name
    machine: str = ""  # software and hardware, as in the log
    settings: dict[str, str] = field(default_factory=dict)
    flags: str = ""
    kernels: str = ""  # names of the kernels in use
    torch: str | None = None
    gpu: str | None = None
    memory: str | None = None  # MiB allocated/reserved
    digits: int = 4  # of a loss: 5 in our logs, and in public ones of the optimizer benchmark

    @property
    def name(self) -> str:
        return f"{self.record or self.path.stem}{self.flags}"

    @property
    def loss(self) -> float:
        return self.curve[self.steps][0]

    @property
    def seconds(self) -> float:
        return self.curve[self.steps][1]

    @property
    def group(self) -> tuple:
        settings = tuple((k, v) for k, v in self.settings.items() if k not in OF_ONE_RUN)
        files = tuple(sorted(self.files.items()))
        return self.source, files, settings, self.kernels, self.torch, self.gpu

    @property
    def on_fineweb(self) -> bool:
        """Whether the data is FineWeb. Public logs have no settings: their data is FineWeb."""
        files = [self.settings.get(name, "fineweb_") for name in ("train_files", "val_files")]
        return on_fineweb(*files)

    @property
    def of_benchmark(self) -> bool:
        """Whether it is of the optimizer benchmark. Our logs then have a setting that only
        forks/train_gpt_track3.py has; public logs, which have no settings, five digits of a
        loss."""
        return "context_len" in self.settings if self.settings else self.digits == 5


def trials_of(results: str) -> list[str]:
    """Return the lines of each trial. If the step decreases, another trial begins in a public log,
    but a resumed run in one of ours."""
    if re.search(r"^record ", results, re.M):
        return [results]
    trials, last = [""], -1
    for line in results.splitlines(keepends=True):
        if match := re.match(r"step:(\d+)/", line):
            if int(match[1]) < last:
                trials.append("")
            last = int(match[1])
        trials[-1] += line
    return trials


@dataclass
class Progress:
    """What the lines of a log that begin with "step:" tell."""

    steps: int
    curve: dict[int, tuple[float, float]]
    step_ms: float | None
    skips_ten: bool
    digits: int


def progress_of(results: str, whole: bool, at: int | None, name: str) -> Progress:
    """Return what the lines of steps tell. `at` is a step that counts as the last one, and `name`
    is the field with the loss. ValueError as for read_log."""
    curve, steps, step = {}, None, 0
    step_ms, skips_ten, digits = None, False, 4
    for line in results.splitlines():
        if not line.startswith("step:"):
            continue
        match = STEP.fullmatch(line)
        if not match:
            raise ValueError(f"has a malformed line: {line[:80]!r}")
        step, steps, average = int(match[1]), int(match[2]), float(match[8])
        seconds = float(match[7]) if match[7] else int(match[6]) / 1000
        if at is not None and step > at:
            continue  # not break: a resumed run repeats steps
        skips_ten |= step > 0 and math.isnan(average)
        if match[3] != "val":
            continue
        losses = {"val_loss": match[4]}
        for word in match[5].split():
            field_name, _, value = word.partition(":")
            losses[field_name] = value
        if name not in losses:
            raise ValueError(f"has no {name} at step {step}, but {', '.join(losses)}")
        try:
            loss, digits = float(losses[name]), len(losses[name].partition(".")[2])
        except ValueError:
            raise ValueError(f"has a malformed line: {line[:80]!r}") from None
        if not math.isfinite(loss):
            raise ValueError(f"has a loss of {loss} at step {step}")
        curve = {k: v for k, v in curve.items() if k < step}  # the resumed run replaces them
        curve[step] = loss, seconds
        step_ms = average if math.isfinite(average) else None
    if steps is None:
        raise ValueError("has no line of a step: this is no log, or a truncated one")
    if at is not None:
        steps = at
    if whole and steps not in curve:
        if at is not None:
            raise ValueError(f"has no validation at step {at}")
        what = "has no last validation" if step == steps else "is truncated"
        raise ValueError(f"{what}: it ends at step {step} of {steps}")
    return Progress(steps, curve, step_ms, skips_ten, digits)


def read_log(path: Path, whole: bool = True) -> Run:
    """Return the run of a log, or its last trial. ValueError if the file is no log, or, with
    `whole`, if the run is not finished."""
    return read_trials(path, whole)[-1]


def read_trials(
    path: Path, whole: bool = True, at: int | None = None, name: str = "val_loss"
) -> list[Run]:
    """Return the runs of a log: some public logs have several. `at` is a step that counts as the
    last one, and `name` is the field with the loss. ValueError as for read_log."""
    text = path.read_bytes().decode("utf-8")  # UnicodeDecodeError is a ValueError
    if not text.strip():
        raise ValueError("is empty")
    parts = [part.strip("\n") for part in re.split(f"^{RULE}$", text, flags=re.M)]
    parts = [part for part in parts if part]  # logs of 2024 begin with a rule
    source = ""
    if parts and not parts[0].startswith("step:"):  # some public logs have no source
        source, *parts = parts
    if not parts and re.search(r"^step:\d", source, re.M):  # and no rule
        source, parts = "", [source]
    if not parts:
        raise ValueError("has no line of a step: this is no log, or a truncated one")
    results = parts.pop()
    trials = [progress_of(trial, whole, at, name) for trial in trials_of(results)]
    return [run_of(path, source, list(parts), results, trial) for trial in trials]


def run_of(path: Path, source: str, parts: list[str], results: str, found: Progress) -> Run:
    """Return a run, from a log's source, the parts after the source, the lines of steps, and what
    these lines tell."""
    files = {}
    while parts and (match := FILE.match(parts[-1])):
        files[match[1]] = parts.pop()[match.end() :]
    settings = parts[-1] if parts else ""  # in our logs
    machine = "\n".join([*parts, results])
    run = Run(path=path, source=source, files=files, machine=machine, record=None, **vars(found))
    for folder in path.resolve().parts:  # a record's folder may hold runs of the previous record
        if str(found.steps) in published().get(folder, {"losses": {}})["losses"]:
            run.record = folder
    if match := re.search(r"^record (\S+)(.*)$", results, re.M):
        run.record, flags = match[1], {}
        for word in shlex.split(match[2]):
            if word.startswith("--"):
                values = flags.setdefault(word[2:], [])
            else:
                values.append(word)
        of_all = {name: values or [""] for name, values in flags.items() if name not in OF_ONE_RUN}
        run.flags = "".join(f" --{name} {shlex.join(values)}" for name, values in of_all.items())
        run.settings = dict(re.findall(r"^(\w+): (.*)$", settings, re.M))
    # A resumed run names its kernels again; they may have changed.
    run.kernels = "; ".join(dict.fromkeys(re.findall(r"^kernels: ([\w ]+)", results, re.M)))
    if match := re.search(r"^(?:Running )?(?:Py)?torch (\S+)", machine, re.M | re.I):
        run.torch = match[1]
    if match := re.search(r"^on (\d+ x .+), log in ", results, re.M):
        cpu = re.search(r"^(?:Model name|machdep.cpu.brand_string): +(.+)$", machine, re.M)
        run.gpu = match[1].replace("CPU", cpu[1]) if cpu else match[1]
    elif names := re.findall(r"^\|\s+\d+\s+(NVIDIA .+?)\s+(?:On|Off)\s", machine, re.M):
        run.gpu = f"{len(names)} x {names[0]}"
    elif match := re.search(r" on (NVIDIA .+) with world_size (\d+)$", machine, re.M):
        run.gpu = f"{match[2]} x {match[1]}"
    if match := re.search(r"^peak memory allocated: (\d+) MiB reserved: (\d+) MiB", results, re.M):
        run.memory = f"{match[1]}/{match[2]}"
    return run


def aligned(rows: list[list[str]]) -> list[str]:
    """Return a line for each row: aligned columns, words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    number = re.compile(r"[-+]?[\d.]+(e[-+]\d+)?(/\d+)?|-")
    right = [all(number.fullmatch(row[i]) for row in rows[1:]) for i in range(len(rows[0]))]
    table = [zip(row, widths, right, strict=True) for row in rows]
    lines = ["  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in row) for row in table]
    return [line.rstrip() for line in lines]


def print_table(rows: list[list[str]]) -> None:
    """Print rows in columns."""
    print("\n".join(aligned(rows)))


def show(value: float | None, form: str) -> str:
    """Return a number, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def show_p(p: float) -> str:
    """Return a p; a significant one has an exponent."""
    return show(p, ".2e" if p < ALPHA else ".3f")


def deviation(values: list[float]) -> float:
    """Return the standard deviation of a sample; NaN for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def p_at_most(target: float, losses: list[float]) -> float:
    """Return the p of a one-sided t-test: the probability of so low a mean loss if the true mean is
    the target."""
    if len(losses) < 2 or np.ptp(losses) == 0:
        return math.nan
    return float(stats.ttest_1samp(losses, target, alternative="less").pvalue)


def welch(a: list[float], b: list[float]) -> tuple[float, float, float]:
    """Return the mean of b minus the mean of a, half the width of its 95 % interval, and the
    two-sided p. The last two are nan for fewer than FEWEST numbers, or equal ones."""
    difference = float(np.mean(b) - np.mean(a))
    if min(len(a), len(b)) < FEWEST or np.ptp(a) + np.ptp(b) == 0:
        return difference, math.nan, math.nan
    test = stats.ttest_ind(b, a, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return difference, float(high - low) / 2, float(test.pvalue)


def columns(runs: list[Run]) -> tuple[list[float], list[float]]:
    """Return the times in seconds and the last losses of some runs."""
    return [r.seconds for r in runs], [r.loss for r in runs]


def amount(value: float, by: float, form: str, words: tuple[str, str], unit: str = "") -> str:
    """Return a difference in words; `words` are those for a number below and above 0."""
    interval = "" if math.isnan(by) else f" ± {by:{form}}{unit}"
    word = words[int(value > 0)] if float(f"{value:{form}}") else "different"
    return f"{abs(value):{form}}{unit}{interval} {word}"


def sentence(a: list[Run], b: list[Run], names: tuple[str, str]) -> str:
    """Return in words how b compares with a, and whether the difference is significant."""
    a_times, a_losses = columns(a)
    b_times, b_losses = columns(b)
    percent = 100 / np.mean(a_times) if any(a_times) else math.nan
    slower, slower_by, _ = (percent * x for x in welch(a_times, b_times))
    higher, higher_by, p = welch(a_losses, b_losses)

    text = f"{names[1]} is {amount(slower, slower_by, '.1f', ('faster', 'slower'), ' %')}"
    text += f" than {names[0]}"
    if a[0].skips_ten != b[0].skips_ten:
        text += " (but one of the clocks does not count the first ten steps)"
    if a[0].steps != b[0].steps:
        lengths = f"{names[1]} has {b[0].steps} steps, {names[0]} {a[0].steps}"
        return f"{lengths}: their losses are not compared; {text}"
    text += f"; its loss is {amount(higher, higher_by, '.4f', ('lower', 'higher'))}; "
    if min(len(a), len(b)) < FEWEST:
        counts = f"{len(a)} and {len(b)} runs"
        return text + f"{counts} are too few for an interval and a verdict: each needs {FEWEST}"
    if math.isnan(p):
        return text + "the losses in each group are all equal: there is no p"
    if p < ALPHA:
        planned = "if the numbers of runs were fixed beforehand"
        return text + f"the difference in loss is significant (p = {show_p(p)}), {planned}"
    return text + (
        f"the difference in loss is not significant (p = {show_p(p)}); --compare "
        "tests after each pair of runs"
    )


def groups_of(runs: list[Run]) -> list[list[Run]]:
    """Return the groups of runs; the longer runs of --compare come last."""
    groups: dict[tuple, list[Run]] = {}
    for r in runs:
        groups.setdefault(r.group, []).append(r)
    return sorted(groups.values(), key=lambda runs: (side_of(runs) or "").endswith("_longer"))


def side_of(runs: list[Run]) -> str | None:
    """Return NAME_A, NAME_B or NAME_A_longer if all runs are that side of a --compare."""
    matches = [OF_COMPARE.fullmatch(r.path.stem) for r in runs]
    sides = {match and match[1] for match in matches}
    return sides.pop() if len(sides) == 1 else None


def letters_of(groups: list[list[Run]]) -> list[str]:
    """Return a short name for each group: a letter, or the name of its side of a --compare if no
    other group has that name."""
    sides = [side_of(runs) for runs in groups]
    names = []
    for i, side in enumerate(sides):
        letter = chr(ord("A") + i) if i < 26 else f"G{i}"
        names.append(side if side and sides.count(side) == 1 else letter)
    return names


def seed_twice(name: str, runs: list[Run]) -> str:
    """Return a note if several runs have the same seed, or "" otherwise."""
    seeds = [r.settings["seed"] for r in runs if "seed" in r.settings]
    note = f"{name} has a seed twice: on a CPU, such runs are equal and count as one"
    return note if len(set(seeds)) < len(seeds) else ""


def print_leaderboard(groups: list[list[Run]], target: float) -> None:
    """Print a row for each run and each group, and compare each group with the first one."""
    letters = letters_of(groups)
    rows = [["group", "run", "torch", "GPU", "steps", "loss", "time_s", "ms/step", "MiB", "log"]]
    for letter, runs in zip(letters, groups, strict=True):
        for r in runs:
            known = [letter, r.record or r.path.stem, r.torch or "-", r.gpu or "-", str(r.steps)]
            loss = show(r.loss, f".{r.digits}f")
            numbers = loss, show(r.seconds, ".1f"), show(r.step_ms, ".2f")
            rows.append([*known, *numbers, r.memory or "-", str(r.path)])
    print_table(rows)
    print()
    rows = [["group", "n", "loss", "sd", f"p(<={target:g})", "time_s", "sd", "what"]]
    for letter, runs in zip(letters, groups, strict=True):
        times, losses = columns(runs)
        form = f".{runs[0].digits}f"
        loss = show(np.mean(losses), form), show(deviation(losses), form)
        p, seconds = show_p(p_at_most(target, losses)), show(np.mean(times), ".1f")
        sd = show(deviation(times), ".1f")
        rows.append([letter, str(len(runs)), *loss, p, seconds, sd, runs[0].name])
    print_table(rows)
    for letter, runs in zip(letters, groups, strict=True):
        if note := seed_twice(letter, runs):
            print(f"\n{note}")
    for letter, runs in zip(letters[1:], groups[1:], strict=True):
        print(f"\n{sentence(groups[0], runs, (letters[0], letter))}")
    print_benchmark(dict(zip(letters, groups, strict=True)), target)


def of_benchmark(runs: list[Run]) -> bool:
    """Return whether runs are those of the optimizer benchmark."""
    return all(r.of_benchmark for r in runs)


def margin(losses: list[float], target: float) -> float:
    """Return the optimizer benchmark's statistic of a result. It is rounded, because a sum of
    decimals is inexact and a result may lie exactly on the limit."""
    return round(float((target - np.mean(losses)) * len(losses) ** 0.5), 9)


def margin_over(old: list[Run], new: list[Run]) -> float:
    """Return the benchmark's statistic of a new result against an old one. A lower loss and fewer
    steps make the statistic larger."""
    before, now = (
        np.mean([r.loss + LOSS_OF_A_STEP * r.steps for r in runs]) for runs in (old, new)
    )
    return round(float((before - now) / (1 / len(old) + 1 / len(new)) ** 0.5), 9)


def print_benchmark(groups: dict[str, list[Run]], target: float) -> None:
    """Print the optimizer benchmark's statistic of each group of its logs; `groups` are by name."""
    own = {name: runs for name, runs in groups.items() if of_benchmark(runs)}
    if not own:
        return
    least = f"must be at least {BENCHMARK_MARGIN}, for a number of runs fixed beforehand"
    print(f"\nthe optimizer benchmark's statistic ({least}):")
    first = next(iter(own))
    rows = [["group", "n", "steps", "loss", f"({target:g} - loss) sqrt(n)", f"against {first}"]]
    for name, runs in own.items():
        losses, steps = columns(runs)[1], sorted({r.steps for r in runs})
        over = "-" if name == first else f"{margin_over(own[first], runs):+.5f}"
        known = [name, str(len(runs)), "/".join(map(str, steps)), show(np.mean(losses), ".5f")]
        rows.append([*known, f"{margin(losses, target):+.5f}", over])
    print_table(rows)


def plot(groups: list[list[Run]], path: Path) -> None:
    """Plot the validation loss over train_time and over steps; published curves are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, sharey=True, layout="constrained")
    shown, drawn = [], set()
    for i, (letter, runs) in enumerate(zip(letters_of(groups), groups, strict=True)):
        color = f"C{i % 10}"
        number = f"{len(runs)} runs" if len(runs) > 1 else "1 run"
        name = f"{letter}: {runs[0].name}, {number}"
        for j, r in enumerate(runs):
            steps, (losses, seconds) = list(r.curve), zip(*r.curve.values(), strict=True)
            label = name if j == 0 else None
            for axis, x in zip(axes, (seconds, steps), strict=True):
                axis.plot(x, losses, color=color, linewidth=1, marker=".", ms=4, label=label)
            shown += [loss for s, (loss, _) in r.curve.items() if s >= 0.1 * r.steps]
        record = runs[0].record
        if record in published() and runs[0].on_fineweb and record not in drawn:
            drawn.add(record)
            known = published()[record]
            losses, seconds = list(known["losses"].values()), list(known["seconds"].values())
            steps = [int(step) for step in known["losses"]]
            style = {"color": color, "linestyle": "--", "linewidth": 2}
            for axis, x in zip(axes, (seconds, steps), strict=True):
                axis.plot(x, losses, label=f"{record}, published", **style)
    margin = 0.05 * (max(shown) - min(shown)) + 1e-3
    axes[0].set_ylim(min(shown) - margin, max(shown) + margin)
    axes[0].set(xlabel="train_time (s)", ylabel="validation loss")
    axes[1].set(xlabel="step")
    for axis in axes:
        axis.grid(alpha=0.3)
    # The legend lies below the axes. The picture grows with it: names with many flags are long.
    lines, names = axes[1].get_legend_handles_labels()
    names = [textwrap.fill(name, 130, break_on_hyphens=False) for name in names]
    rows = sum(name.count("\n") + 1 for name in names)
    figure.set_size_inches(11, 4.4 + 0.2 * rows)
    figure.legend(lines, names, loc="outside lower center", fontsize="small")
    figure.savefig(path, dpi=110)
    print(f"\nwrote {path}")


def differing_settings(a: Run, b: Run) -> list[list[str]]:
    """Return the name and both values of each setting in which two runs differ."""
    names = dict.fromkeys([*a.settings, *b.settings])
    rows = [[name, a.settings.get(name, "-"), b.settings.get(name, "-")] for name in names]
    return [row for row in rows if row[1] != row[2]]


def source_diffs(a: Run, b: Run, names: tuple[str, str]) -> list[list[str]]:
    """Return the lines of a unified diff from a's source to b's, for each file that differs."""
    diffs = []
    pairs = {"": (a.source, b.source)}  # by the file's name; "" is the script
    for name in dict.fromkeys([*a.files, *b.files]):
        pairs[f"/{name}"] = a.files.get(name, ""), b.files.get(name, "")
    for name, (old, new) in pairs.items():
        diff = difflib.unified_diff(
            old.splitlines(),
            new.splitlines(),
            fromfile=names[0] + name,
            tofile=names[1] + name,
            lineterm="",
            n=2,
        )
        diffs.append(list(diff))
    return [diff for diff in diffs if diff]


def print_diff(a: Run, b: Run) -> None:
    """Print the settings and the lines of source that differ between two runs."""
    if rows := differing_settings(a, b):
        print_table([["setting", a.path.name, b.path.name], *rows])
    else:
        print("the settings are equal" if a.settings else "these logs hold no settings")
    lines = list(itertools.chain(*source_diffs(a, b, (str(a.path), str(b.path)))))
    print("\n".join(["", *(lines or ["the sources are equal"])]))


def read_logs(
    paths: list[Path], program: str, at: int | None = None, name: str = "val_loss"
) -> tuple[list[Run], int]:
    """Return the runs of logs, and how many logs were skipped; a line on stderr tells why. A log
    that is named twice is read once. `at` and `name` are those of read_trials."""
    runs, skipped = [], 0
    for path in {path.resolve(): path for path in paths}.values():
        try:
            runs += read_trials(path, at=at, name=name)
        except (ValueError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"{program}: skipped {path}: {reason}", file=sys.stderr)
            skipped += 1
    return runs, skipped


def main(argv: list[str] | None = None) -> None:
    """Print what the logs tell; exit status 1 if a log could not be used, 2 for bad flags."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "leaderboard.py", description=__doc__, formatter_class=form, allow_abbrev=False
    )
    parser.add_argument("logs", nargs="*", type=Path, metavar="LOG", help="logs to read")
    parser.add_argument("--target", type=float, default=3.28, help="loss to reach [3.28]")
    parser.add_argument("--at", type=int, metavar="STEP", help="use this step's loss [the last]")
    parser.add_argument("--field", default="val_loss", help="name of the loss [val_loss]")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="plot the runs into this file")
    parser.add_argument("--diff", type=Path, nargs=2, metavar="LOG", help="print what differs")
    args = parser.parse_intermixed_args(argv)
    if args.at is not None and args.at < 1:
        parser.error("--at must be 1 or more")
    if not args.logs and (args.plot or not args.diff):
        parser.error("name at least one log")

    lacking = 0
    if args.diff:
        (a, a_lacking), (b, b_lacking) = (read_logs([path], parser.prog) for path in args.diff)
        lacking = a_lacking + b_lacking
        if not lacking:
            print_diff(a[-1], b[-1])
    runs, skipped = read_logs(args.logs, parser.prog, args.at, args.field)
    if runs:
        groups = groups_of(runs)
        print_leaderboard(groups, args.target)
        if args.plot:
            try:
                plot(groups, args.plot)
            except (ValueError, OSError) as error:  # an unknown suffix, no such folder
                sys.exit(f"leaderboard.py: could not plot {args.plot}: {error}")
    sys.exit(1 if lacking + skipped else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" is no error
    main()
