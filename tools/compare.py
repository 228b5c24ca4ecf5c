"""Does a change help? Trains with and without it, in turn, until the difference is significant.

    ./run.sh --compare "A" "B" [--runs 20] [flags of both]
    ./run.sh --compare "" "--muon_lr 0.06"                the recipe as it is against a changed flag
    ./run.sh --compare "" "my_fork.py --muon_lr 0.06"     against another script, with a flag

A and B are flags, which may follow the name of a script. The default script is train_gpt.py, or the
one before --compare. A script is a path, or the name of a file in the project, in forks/ or in the
current folder.

A pair is a run of A and a run of B with the same seed. The order alternates (A B, B A, A B, ...):
a machine that becomes slower affects both. There are at most --runs pairs. Each pair gives one
number, which says how much longer B trains to A's loss: ln(time of B / time of A) plus (loss of B -
loss of A) / worth. The worth of time is how much lower the loss is after e times the steps. One run
of A with a quarter more steps measures this worth, because the loss falls with the logarithm of the
steps. --judge loss or --judge time tests the loss or the time alone.

The test is sequential: it looks after each pair from the fourth on. After n of N pairs, the p of a
t-test of the n numbers must be below c n / N. The constant c is such that, if A and B do not
differ, all looks together call a difference significant in 1 % of the comparisons (--alpha). Looks
at p < 0.01 after each of 20 pairs would do so in 7 %. With at most 20 pairs, the test finds a
difference of one standard deviation of the pairs with a probability of 85 %, after 14.2 pairs on
average. A fixed t-test of that power needs 17 pairs. These figures are for normally distributed
differences. The worth of time is taken as exact: if B is faster but ends higher, or the other way
round, that uncertainty is not included.

--judge loss --deviation 0.0013 takes the standard deviation of a run's loss as known, as the
optimizer benchmark does. A z-test replaces the t-test, and needs fewer pairs.

--seconds N gives both sides the steps that take N seconds of training here. Both are timed six
times in alternating order, each time by a process of its own. They get different numbers of steps
only if their times differ significantly (p < 0.01): else, a noisy measurement would favour one of
two equal sides.

--judge loss --baseline NAME takes the runs of A from the comparison NAME, if nothing has changed
since then, and makes only runs of B. There are at most as many pairs as NAME has runs of A.

Finished runs are not repeated: --run_id NAME continues a comparison with the same flags.

    --runs N            largest number of pairs [20]
    --judge WHAT        what is tested: together (the time to equal loss), time or loss [together]
    --alpha P           probability that equal sides are called different [0.01]
    --deviation D       the standard deviation of a run's loss, if known; needs --judge loss
    --seed N            seed of the first pair [0]
    --seconds N         choose --num_iterations so that training takes N seconds here
    --baseline NAME     take the runs of A from the comparison NAME; needs --judge loss
    --run_id NAME       how names of logs begin [the time]
"""

import argparse
import fcntl
import json
import math
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

import numpy as np
import torch
from scipy import stats
from tqdm import tqdm

import launch
import leaderboard
import process
import result
import script
import seconds
from leaderboard import ALPHA, FEWEST, show_p
from logfile import OF_ONE_RUN, Run, read_log
from train_gpt import Hyperparameters, UserError, as_program

LONGER = 1.25  # times the steps, in the run that measures what a step is worth
# Runs neither save nor validate before the end, unless flags say so.
WITHOUT = ("--keep", "0", "--val_loss_every", "0")
REPEATS = 6  # pairs of measurements of the time of a step, for --seconds


# -----------------------------------------------------------------------------
# Statistics: each pair gives a number, and the numbers are normally distributed


def p_value(numbers, known: float | None = None) -> np.ndarray:
    """Return the two-sided p of Student's t-test that the mean is 0, of numbers (..., n). If the
    standard deviation is `known`, the test is a z-test."""
    mean, n = np.mean(numbers, axis=-1), np.shape(numbers)[-1]
    if known is not None:
        return 2 * stats.norm.sf(np.abs(mean) * n**0.5 / known)
    deviation = np.maximum(np.std(numbers, axis=-1, ddof=1), 1e-12)  # equal numbers: not 0 / 0
    return 2 * stats.t.sf(np.abs(mean) * n**0.5 / deviation, n - 1)


def p_values(numbers: np.ndarray, known: float | None = None) -> np.ndarray:
    """Return p after each look at numbers (..., N): after FEWEST of them, one more, ... N."""
    looks = range(FEWEST, numbers.shape[-1] + 1)
    return np.stack([p_value(numbers[..., :n], known) for n in looks], axis=-1)


@cache
def thresholds(alpha: float, most: int, known: bool = False) -> np.ndarray:
    """Return the p below which a difference is significant, at the looks of p_values for `most`
    pairs. The limit grows with the number of pairs. Without a difference, all looks together call
    one significant with the probability alpha. `known` says whether the deviation is: the limit is
    simulated with a deviation of 1, which does not matter to a t-test.
    """
    numbers = np.random.default_rng(2026).standard_normal((100_000, most))
    growth = np.arange(FEWEST, most + 1) / most
    p = p_values(numbers, known=1.0 if known else None)
    return np.quantile((p / growth).min(axis=1), alpha) * growth


def half_width(numbers: list[float], known: float | None = None) -> float:
    """Return half the width of the 95 % interval of the mean; the deviation may be known."""
    if known is not None:
        return float(stats.norm.isf(0.025) * known / len(numbers) ** 0.5)
    return float(stats.t.isf(0.025, len(numbers) - 1) * stats.sem(numbers))


# -----------------------------------------------------------------------------
# Runs, in turn


@dataclass(frozen=True)
class Side:
    """A or B: a script and its flags."""

    name: str
    flags: tuple[str, ...]
    path: Path  # of the script
    kept: str = ""  # the comparison whose runs are taken, if not its own

    @classmethod
    def of(cls, name: str, text: str, common: list[str], path: Path) -> "Side":
        """Return a side, given "[SCRIPT.py] FLAGS", the flags of both and the default script;
        UserError if they are wrong."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--compare: {name} is {text}: {error}") from error
        if words and not words[0].startswith("-"):
            path = script.find(words.pop(0))
        for flag in ("--seed", "--run_id"):
            if any(word.split("=")[0] == flag for word in words):
                raise UserError(f"--compare: {flag} is for both sides: leave it out of {text!r}")
        side = cls(name, (*common, *words), path)
        side.settings()
        return side

    def settings(self) -> Hyperparameters:
        """Return the settings of its runs. UserError for bad flags."""
        return script.parse(self.path, list(self.flags))[0]

    def log(self, name: str, seed: int) -> Path:
        """Return the path of a run's log, in the comparison of that name."""
        return Path("logs", f"{self.kept or name}_{self.name}_seed{seed}.txt")

    def run(self, name: str, seed: int, bar: tqdm) -> Run:
        """Return the run with that seed: read from its log if the run is finished, or made now.
        UserError if the run fails."""
        log = self.log(name, seed)
        if not is_finished(log):
            delete_unfinished(log)
            own = ["--seed", str(seed), "--run_id", log.stem]
            status = launch.train(self.path, [*WITHOUT, *self.flags, *own], quiet=True)
            if status in result.STOPPED:
                raise KeyboardInterrupt
            if status:
                raise UserError(f"the run {log.stem} failed (status {status}): see above")
            bar.update()
        found = read_log(log)
        bar.write(f"{self.name} seed {seed}: loss {found.loss:.5f} in {found.seconds:.1f} s")
        sys.stdout.flush()
        return found


def is_finished(log: Path) -> bool:
    """Return whether a log is that of a finished run."""
    try:
        return bool(read_log(log))
    except (OSError, ValueError):
        return False


def delete_unfinished(log: Path) -> None:
    """Delete the log of a run that has not finished. UserError if its process still lives."""
    with log.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a run locks its log
        except BlockingIOError as error:
            raise UserError(f"another process is writing {log}: choose another --run_id") from error
    log.unlink()


def plan_of(name: str) -> dict:
    """Return the plan of a comparison of that name; {} if there is none."""
    path = Path("logs", f"{name}.json")
    return json.loads(path.read_text()) if path.exists() else {}


def begin(name: str, sides: list[Side], logs: list[Path], **plan) -> tqdm:
    """Return a bar that counts the runs with these logs. The plan and the flags are kept in a file
    beside the logs. UserError if the file has other ones: a plan that changes after a look makes
    false positives likelier."""
    path = Path("logs", f"{name}.json")
    known = plan_of(name)
    for side in sides:
        plan[side.name] = [str(side.path), *side.flags]
    for key, value in plan.items():
        if known.setdefault(key, value) != value:
            raise UserError(f"{path}: {key} was {known[key]}: choose another --run_id")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known))
    finished = sum(is_finished(log) for log in logs)
    text = f"at most {len(logs)} runs, {finished} of them finished; logs are logs/{name}_*.txt"
    print(f"{text}; --run_id {name} continues after a stop", flush=True)
    return tqdm(total=len(logs), initial=finished, unit="run", leave=False, disable=None)


def check_equal(runs: list[Run]) -> None:
    """Raise UserError if runs of one side differ in more than the seed."""
    for run in runs:
        if run.group != runs[0].group:
            raise UserError(
                f"{runs[0].path} and {run.path} differ in source, settings, kernels, torch or "
                "machine: change nothing until a comparison ends, or choose another --run_id"
            )


def steps_of(a: Side, b: Side, args: argparse.Namespace) -> list[int]:
    """Return the numbers of steps of A and B that take args.seconds. If A's runs are kept, its
    number is theirs. UserError if the steps cannot be timed."""
    if known := plan_of(args.run_id).get("steps"):
        return known
    both = a.settings(), b.settings()
    if len({process.processes(hp.batch_seqs, process.gpus_for(hp)) for hp in both}) > 1:
        raise UserError("--seconds: A and B run on different numbers of GPUs: set NPROC")
    budget = seconds.budget(args.seconds) / REPEATS
    text = f"{REPEATS} times for {budget:.0f} s, and the time to start"
    print(f"timing steps of A and B, each {text}", flush=True)
    ms = {a: [], b: []}
    for repeat in range(REPEATS):
        for side in (a, b) if repeat % 2 == 0 else (b, a):
            ms[side].append(seconds.ms_per_step(side.path, list(side.flags), budget))
            print(f"a step of {side.name} takes {ms[side][-1]:.2f} ms", flush=True)
    ratios = np.log(ms[b]) - np.log(ms[a])
    of_a, of_b = (np.exp(np.log(ms[side]).mean()) for side in (a, b))
    p = float(p_value(ratios))
    if p >= ALPHA:
        of_a = of_b = (of_a * of_b) ** 0.5
    kept = plan_of(a.kept).get("steps") if a.kept else None
    steps_a = kept[0] if kept else max(1, round(1e3 * args.seconds / of_a))
    steps = [steps_a, max(1, round(steps_a * of_a / of_b))]
    text = f"a step of B takes {change(ratios, ('less', 'more'))} time than one of A"
    text += f" (p = {show_p(p)}, the limit is {ALPHA})"
    print(f"--seconds {args.seconds:g}: A makes {steps[0]} steps, B {steps[1]}: {text}", flush=True)
    return steps


def more_steps(steps: int) -> int:
    """Return the steps of the longer run, which measures what a step is worth."""
    return max(steps + 1, round(LONGER * steps))


def losses_of_kernels(a: Run, b: Run) -> str:
    """Return which kernels two runs could not use, and why; "" if there are none."""
    text = ""
    for name, run in (("A", a), ("B", b)):
        for kernel, reason in run.kernels_off.items():
            text += f"{name} ran without the kernel {kernel} ({reason}); "
    return text


def longer(side: Side, steps: int) -> Side:
    """Return the side with a quarter more steps than it has, and at least one more."""
    flags = (*side.flags, "--num_iterations", str(more_steps(steps)))
    return Side(f"{side.name}_longer", flags, side.path)


def runs_kept(a: Side, args: argparse.Namespace) -> list[int]:
    """Return the seeds of the finished runs of A that can be taken from the comparison a.kept.
    UserError if source, settings or torch have changed since then, or if there are too few."""
    seeds = [args.seed + i for i in range(args.runs)]
    seeds = [seed for seed in seeds if is_finished(a.log("", seed))]
    if len(seeds) < FEWEST:
        found = f"logs/{a.kept}_A_seed*.txt are {len(seeds)} finished runs"
        remedy = f"name a comparison that has {FEWEST} or more of these seeds"
        raise UserError(f"--baseline {a.kept}: {found}: {remedy}")
    core = script.core(script.load(a.path))
    now = {name: core.show(value) for name, value in vars(a.settings()).items()}
    texts = {path.name: path.read_text("utf-8").strip("\n") for path in script.sources(a.path)}
    for seed in seeds:
        then = read_log(a.log("", seed))
        changed = [name for name in now if now[name] != then.settings.get(name, now[name])]
        changed = [f"--{name}" for name in changed if name not in OF_ONE_RUN]
        if then.source != texts[a.path.name]:
            changed.append(a.path.name)
        changed += [name for name, text in then.files.items() if texts.get(name, text) != text]
        if then.torch != torch.__version__:
            changed.append(f"torch (it was {then.torch})")
        if changed:
            found = f"since {then.path}, these have changed: {', '.join(changed)}"
            raise UserError(f"--baseline {a.kept}: {found}; compare without --baseline")
    return seeds


def worth_of_time(side: Side, run: Run, name: str, seed: int, bar: tqdm) -> float:
    """Return how much lower the loss would be after e times the steps, by a run of the side and a
    longer one. UserError if the longer one has no lower loss."""
    more = longer(side, run.steps).run(name, seed, bar)
    worth = (run.loss - more.loss) / math.log(more.steps / run.steps)
    if worth <= 0:
        found = f"{more.path} has more steps, but no lower loss"
        raise UserError(f"the worth of time cannot be measured: {found}; --judge loss needs none")
    step = f"one step more or less of {run.steps}"
    bar.write(f"{step} is worth {worth / run.steps:.2g} of the loss of {side.name}")
    return worth


# -----------------------------------------------------------------------------
# The comparison


def numbers_of(pairs: list[tuple[Run, Run]], worth: float | None) -> dict[str, list[float]]:
    """Return for each pair the log of the ratio of times ("time"), the difference of losses
    ("loss"), and the log of the ratio of times to equal loss ("together") if the worth is known."""
    numbers = {
        "time": [math.log(b.seconds / a.seconds) for a, b in pairs],
        "loss": [b.loss - a.loss for a, b in pairs],
    }
    if worth:
        both = zip(*numbers.values(), strict=True)
        numbers["together"] = [time + loss / worth for time, loss in both]
    return numbers


def change(numbers: list[float], words: tuple[str, str]) -> str:
    """Return in words the change in per cent that logs of ratios tell, with its 95 % interval."""
    mean = np.mean(numbers)
    by = 100 * math.exp(mean) * half_width(numbers)
    return leaderboard.amount(100 * math.expm1(mean), by, ".1f", words, " %")


def difference(numbers: list[float], known: float | None = None) -> str:
    """Return in words a difference of losses, with its 95 % interval."""
    by = half_width(numbers, known)
    return leaderboard.amount(np.mean(numbers), by, ".4f", ("lower", "higher"))


def sentence(numbers: dict, worth: float | None, known: float | None) -> str:
    """Return in words how B compares with A. `known` is the deviation of a difference in loss."""
    text = f"B is {change(numbers['time'], ('faster', 'slower'))} than A; "
    text += f"its loss is {difference(numbers['loss'], known)}; "
    if worth:
        text += f"to A's loss it takes {change(numbers['together'], ('less', 'more'))} time, "
        at_equal_time = [worth * number for number in numbers["together"]]
        text += f"and at equal time its loss is {difference(at_equal_time)}; "
    return text


def compare(a: Side, b: Side, args: argparse.Namespace) -> None:
    """Make pairs until the difference is significant, and print the result after each. UserError if
    a run fails, or if the worth of time is needed and cannot be measured."""
    name, judge = args.run_id, args.judge
    plan = {key: getattr(args, key) for key in ("judge", "alpha", "runs", "seed", "deviation")}
    if args.seconds is not None:
        plan["seconds"], plan["steps"] = args.seconds, steps_of(a, b, args)
        of_a, of_b = plan["steps"]
        most = more_steps(of_a) if judge == "together" else of_a
        more_a = seconds.flags_for(a.path, list(a.flags), of_a, most)
        more_b = seconds.flags_for(b.path, list(b.flags), of_b)
        print("A:", *more_a, "\nB:", *more_b, flush=True)
        a, b = replace(a, flags=(*a.flags, *more_a)), replace(b, flags=(*b.flags, *more_b))
    seeds = list(range(args.seed, args.seed + args.runs))
    if a.kept:
        seeds = runs_kept(a, args)
        plan |= {"baseline": a.kept, "seeds": seeds}
    most = len(seeds)
    logs = [side.log(name, seed) for seed in seeds for side in (a, b)]
    if judge == "together":
        logs.append(longer(a, 1).log(name, args.seed))
    known = None if args.deviation is None else 2**0.5 * args.deviation  # of a difference
    limits = thresholds(args.alpha, most, known is not None)
    pairs, worth = [], None
    with begin(name, [a, b], logs, **plan) as bar:
        for seed in seeds:
            first, second = (a, b) if len(pairs) % 2 == 0 else (b, a)
            runs = {side: side.run(name, seed, bar) for side in (first, second)}
            pairs.append((runs[a], runs[b]))
            for of_a_side in zip(*pairs, strict=True):
                check_equal(of_a_side)
            if a.kept and runs[a].gpu != runs[b].gpu:
                found = f"A's machine was {runs[a].gpu}, this is {runs[b].gpu}"
                raise UserError(f"--baseline {a.kept}: {found}: compare without --baseline")
            if judge == "together" and worth is None:
                worth = worth_of_time(a, runs[a], name, seed, bar)
            of_all, lost = f"{len(pairs)} of at most {most} pairs", losses_of_kernels(*pairs[0])
            if len(pairs) < FEWEST:
                bar.write(f"{lost}{of_all}: the first result comes after pair {FEWEST}\n")
                continue
            numbers = numbers_of(pairs, worth)
            p = p_value(numbers[judge], known)
            limit = limits[len(pairs) - FEWEST]
            state = "significant" if p < limit else "not significant"
            text = sentence(numbers, worth, known) + lost
            if a.kept:
                text += f"the runs of A are those of {a.kept}, so A and B were not made in turn; "
            text = f"{text}the difference is {state} after {of_all} "
            bar.write(f"{text}(p = {show_p(p)}, the limit is {limit:.2g})\n")
            if p < limit:
                break


def parser_of() -> argparse.ArgumentParser:
    """Return the parser that --compare and --ablate share; other flags are for the runs. It has no
    help: run.sh prints the docstring for --help, before packages are installed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = script.fail
    parser.add_argument("--run_id", default=script.new_name())
    parser.add_argument("--judge", choices=("together", "time", "loss"), default="together")
    seconds.add_flags(parser)
    return parser


def parse_args(argv: list[str] | None) -> tuple[Side, Side, argparse.Namespace]:
    """Return A, B and the flags of the comparison; UserError for a bad value."""
    argv, texts = list(sys.argv[1:] if argv is None else argv), []
    if "--compare" in argv:  # argparse would read "--fp8=off" as its own flag
        place = argv.index("--compare")
        texts, argv = argv[place + 1 : place + 3], argv[:place] + argv[place + 3 :]
    parser = parser_of()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--deviation", type=float)
    parser.add_argument("--alpha", type=float, default=ALPHA)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--baseline", default="")
    args, others = parser.parse_known_args(argv)
    if len(texts) < 2:
        parser.error('--compare needs the flags of A and those of B, each in quotes, or ""')
    if not FEWEST <= args.runs <= 200:
        parser.error(f"--runs must be from {FEWEST} to 200 pairs")
    if not 0.001 <= args.alpha <= 0.5:
        parser.error("--alpha must be from 0.001 to 0.5")
    known = args.deviation
    if known is not None and (args.judge != "loss" or not 0 < known < math.inf):
        parser.error("--deviation needs a finite number above 0, and --judge loss")
    if args.baseline and args.judge != "loss":
        parser.error("--baseline needs --judge loss: times of other days do not compare")
    path, common = script.take_script(others)
    a, b = (Side.of(name, text, common, path) for name, text in zip("AB", texts, strict=True))
    for side in (a, b):
        if args.seconds is not None:
            seconds.check(args.seconds, list(side.flags))
    a = replace(a, kept=args.baseline)
    return a, b, args


def main(argv: list[str] | None = None) -> None:
    """Compare as the flags say; errors are those of train_gpt.py."""
    as_program("run.sh", lambda: compare(*parse_args(argv)))


if __name__ == "__main__":
    main()
