"""Does a change help? Runs with and without it, in turn, until the answer is settled.

    ./run.sh --compare "FLAGS A" "FLAGS B" [--runs 20] [flags of both]
    ./run.sh --compare "" "--muon_lr 0.06"              the recipe as it is against a changed flag
    ./run.sh --compare "" "../fork --muon_lr 0.06"      against a fork in another folder, with flags

A pair is a run of A and one of B with the same seed. Pairs take turns (A B, B A, A B, ...), so that
a machine that slows down slows both. --runs is how many pairs there are at most. What is judged is
a number of each pair: how much longer B takes to A's loss. It is ln(time of B / time of A) plus
(loss of B - loss of A) / worth. The worth of time is measured: a run of A with a quarter more steps
ends lower, and loss falls with the logarithm of the steps. It is then taken as exact: where B gains
in one and loses in the other, its error is not in p. --judge loss or --judge time judge one alone.

Runs whose logs are there are not made again: --run_id NAME goes on with a comparison, by the same
plan. A fork trains on the data in its own folder, unless --train_files and --val_files name others.

The answer is settled by a sequential test. After n of N pairs, a t-test of the n numbers must have
a p below c n / N. c is such that, where there is no difference, all looks together settle one with
the probability --alpha [0.01]. One look at p < 0.01 after each of 20 pairs would do so with 0.07.
"""

import argparse
import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import leaderboard  # noqa: E402
from leaderboard import Run, show_p  # noqa: E402

import program  # noqa: E402
import train_gpt  # noqa: E402
from program import HERE, UserError  # noqa: E402

LONGER = 1.25  # times the steps: the run that tells what a step is worth
ROUNDED = 1e-4 / 6**0.5  # deviation of the rounding in a difference of two losses of logs
WITHOUT = "--save_every", "0", "--val_loss_every", "0"  # unless flags say otherwise


# -----------------------------------------------------------------------------
# Statistics: of numbers of pairs, which are normal with any mean and deviation


def p_values(numbers: np.ndarray, least: float = 0.0) -> np.ndarray:
    """Two-sided p of Student's t-test that the mean is 0: of numbers (..., N), after the first 2,
    3, ... N of them (..., N - 1). Their deviation is taken as `least` at least, which is that of
    rounding. Where `least` is 0, equal numbers have a p of 1 if they are 0, and else of 0."""
    numbers = np.asarray(numbers, float)
    count = np.arange(1, numbers.shape[-1] + 1)
    mean = numbers.cumsum(-1) / count
    squares = (numbers**2).cumsum(-1) - count * mean**2
    equal = np.maximum.accumulate(numbers, -1) == np.minimum.accumulate(numbers, -1)
    squares = np.where(equal, 0.0, np.maximum(squares, 0.0))[..., 1:]
    mean, count = mean[..., 1:], count[1:]
    squares = np.maximum(squares, (count - 1) * least**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / np.sqrt(squares / (count - 1) / count)
    return np.where(mean == 0, 1.0, 2 * stats.t.sf(t, count - 1))


@cache
def thresholds(alpha: float, most: int, paths: int = 100_000) -> np.ndarray:
    """The p below which the look after pair 2, 3, ... `most` settles a difference (most - 1,).

    They grow with the pair's number, and all looks together settle a difference that is not there
    with probability alpha. Simulated: t does not depend on the numbers' deviation."""
    numbers = np.random.default_rng(2026).standard_normal((paths, most))
    growth = np.arange(2, most + 1) / most
    return np.quantile((p_values(numbers) / growth).min(axis=1), alpha) * growth


def half_width(numbers: list[float]) -> float:
    """Half of the 95 % interval of the mean; nan for fewer than two numbers."""
    if len(numbers) < 2:
        return math.nan
    sem = np.std(numbers, ddof=1) / len(numbers) ** 0.5
    return float(stats.t.isf(0.025, len(numbers) - 1) * sem)


# -----------------------------------------------------------------------------
# Runs, in turn


@dataclass(frozen=True)
class Side:
    """What is compared: flags, for the launch.py of a folder."""

    name: str
    flags: tuple[str, ...] = ()
    folder: Path = HERE

    @classmethod
    def of(cls, name: str, text: str, common: list[str]) -> "Side":
        """From "[FOLDER] FLAGS"; UserError for what cannot be."""
        try:
            words, folder = shlex.split(text), HERE
        except ValueError as error:
            raise UserError(f"--compare: {name} is {text}: {error}") from error
        if words and not words[0].startswith("-"):
            folder = Path(words.pop(0)).expanduser().resolve()
            if not (folder / "launch.py").exists():
                raise UserError(f"--compare: {folder} is no fork of this project, no launch.py")
        if of_both := {"--seed", "--run_id"} & {word.split("=")[0] for word in words}:
            raise UserError(f"--compare: {of_both.pop()} is for A and B: leave it out of {text!r}")
        return cls(name, (*common, *words), folder)

    def run(self, name: str, seed: int) -> Run:
        """The run with that seed: of its log, if that is whole, or made now. UserError."""
        run_id = f"{name}_{self.name}_seed{seed}"
        log = Path("logs", f"{run_id}.txt")
        if not whole(log):
            for path in (log, log.with_suffix(".jsonl")):  # of a run that was interrupted
                path.unlink(missing_ok=True)
            shutil.rmtree(log.with_suffix(""), ignore_errors=True)  # its checkpoints
            flags = *WITHOUT, *self.flags, "--seed", str(seed), "--run_id", run_id
            command = [sys.executable, f"{self.folder}/launch.py", *flags]
            status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
            if status in (130, -signal.SIGINT):
                raise KeyboardInterrupt
            if status:
                raise UserError(f"the run {run_id} failed (status {status}): see above")
        try:
            found = leaderboard.read_log(log)
        except ValueError as error:  # it ended with status 0, though
            raise UserError(f"{log} {error}") from error
        print(f"{self.name} seed {seed}: loss {found.loss:.4f} in {found.seconds:.1f} s")
        sys.stdout.flush()
        return found


def begin(name: str, sides: list[Side], **plan) -> None:
    """Say what begins, and note flags and plan beside the logs; UserError if those of that name had
    others: a test that is planned anew after a look errs more often than it says."""
    signal.signal(signal.SIGINT, lambda *_: None)  # it is the run's, which saves and ends
    path = Path("logs", f"{name}.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    plan |= {side.name: [str(side.folder), *side.flags] for side in sides}
    for key, value in plan.items():
        if known.setdefault(key, value) != value:
            raise UserError(f"{path}: {key} was {known[key]}: choose another --run_id")
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(known))
    print(f"logs are logs/{name}_*.txt; after a stop, --run_id {name} goes on", flush=True)


def whole(log: Path) -> bool:
    """Whether it is the log of a finished run."""
    try:
        return bool(leaderboard.read_log(log))
    except (OSError, ValueError):
        return False


def check_equal(runs: list[Run]) -> None:
    """UserError if runs of one side differ in more than the seed: then they are no sample."""
    for run in runs:
        if run.group != runs[0].group:
            raise UserError(
                f"{runs[0].path} and {run.path} differ in source, settings, kernels, torch or "
                "machine: change nothing until a comparison ends, or choose another --run_id"
            )


def worth_of_time(run: Run, longer: Run) -> float:
    """How much lower the loss of a run would be with e times the steps (nats), by a longer one."""
    gain = run.loss - longer.loss
    if gain <= 0:
        raise UserError(
            f"{longer.path} has more steps than {run.path}, and no lower loss: what time is worth "
            "cannot be measured here; use --judge loss or --judge time"
        )
    return gain / math.log(longer.steps / run.steps)


def longer(side: Side, steps: int) -> Side:
    """The side's recipe, which has so many steps, with a quarter more."""
    flags = *side.flags, "--num_iterations", str(round(LONGER * steps))
    return Side(f"{side.name}_longer", flags, side.folder)


# -----------------------------------------------------------------------------
# The comparison


@dataclass
class Comparison:
    """Pairs so far, and what they say; `worth` is worth_of_time, or None where none is judged."""

    judge: str
    alpha: float
    most: int
    worth: float | None = None
    pairs: list[tuple[Run, Run]] = field(default_factory=list)

    def numbers(self, of: str) -> list[float]:
        """A number a pair: log of the times' ratio, difference of losses, or log of the ratio of
        the times to equal loss."""
        times = [math.log(b.seconds / a.seconds) for a, b in self.pairs]
        losses = [b.loss - a.loss for a, b in self.pairs]
        if of == "together":
            return [t + loss / self.worth for t, loss in zip(times, losses, strict=True)]
        return times if of == "time" else losses

    @property
    def p(self) -> float:
        """Of the last look; nan after the first pair."""
        if len(self.pairs) < 2:
            return math.nan
        least = {"time": 0.0, "loss": ROUNDED, "together": ROUNDED / (self.worth or 1)}[self.judge]
        return float(p_values(self.numbers(self.judge), least)[-1])

    @property
    def needed(self) -> float:
        """The p that settles a difference after so many pairs."""
        return float(thresholds(self.alpha, self.most)[max(0, len(self.pairs) - 2)])

    @property
    def settled(self) -> bool:
        return self.p < self.needed

    def sentence(self) -> str:
        """In plain words: how B compares with A, how sure that is, and whether it is settled."""
        found = {}
        for of in ("time", "loss", "together"):
            if of != "together" or self.worth:
                found[of] = np.mean(self.numbers(of)), half_width(self.numbers(of))
        text = f"B is {percent(*found['time'], ('faster', 'slower'))} than A; "
        text += f"its loss is {leaderboard.amount(*found['loss'], '.4f', ('lower', 'higher'))}; "
        if self.worth:
            mean, by = found["together"]
            text += f"to A's loss it takes {percent(mean, by, ('less', 'more'))} time, "
            at_equal_time = self.worth * mean, self.worth * by
            amount = leaderboard.amount(*at_equal_time, ".4f", ("lower", "higher"))
            text += f"and at equal time its loss is {amount}; "
        of_all = f"{len(self.pairs)} of at most {self.most} pairs"
        if len(self.pairs) < 2:
            return text + f"one pair settles nothing ({of_all})"
        state = "that is settled" if self.settled else "that is not settled"
        return text + f"{state} after {of_all} (p = {show_p(self.p)}, below {self.needed:.2g} is)"


def percent(mean: float, by: float, words: tuple[str, str]) -> str:
    """The mean logarithm of a ratio, and half its interval, in per cent of that ratio's change."""
    return leaderboard.amount(100 * math.expm1(mean), 100 * math.exp(mean) * by, ".1f", words, " %")


def compare(a: Side, b: Side, name: str, seed: int, judge: str, alpha: float, most: int) -> None:
    """Make pairs until the answer is settled, and print what they say after each."""
    begin(name, [a, b], judge=judge, alpha=alpha, runs=most, seed=seed)
    found = Comparison(judge, alpha, most)
    for i in range(most):
        sides = (a, b) if i % 2 == 0 else (b, a)
        runs = {side.name: side.run(name, seed + i) for side in sides}
        found.pairs.append((runs["A"], runs["B"]))
        for side in zip(*found.pairs, strict=True):
            check_equal(list(side))
        if judge == "together" and found.worth is None:
            found.worth = worth_of_time(runs["A"], longer(a, runs["A"].steps).run(name, seed))
            step = found.worth / runs["A"].steps
            print(f"one step more or less of {runs['A'].steps} is worth {step:.2g} of A's loss")
        print(f"{found.sentence()}\n", flush=True)
        if found.settled:
            break


def parser_of(about: str) -> argparse.ArgumentParser:
    """A parser for a program that makes runs in turn; other flags are those of the runs."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form, allow_abbrev=False)
    parser.error = program.fail
    name = time.strftime("%Y-%m-%d_%H-%M-%S_") + uuid.uuid4().hex[:6]
    parser.add_argument("--run_id", default=name, help="first part of logs' names [by the time]")
    return parser


def new_run(flags: list[str]) -> train_gpt.Hyperparameters:
    """The settings that flags say; UserError for bad ones, and those that make no new run."""
    hp, given = train_gpt.parse_args(flags)
    if other := {"eval", "resume", "list_records", "diff"} & vars(given).keys():
        raise UserError(f"--{other.pop()} is for train_gpt.py: here runs are new")
    return hp


def parse_args(argv: list[str] | None) -> tuple:
    """The arguments of `compare`; UserError for a bad value."""
    argv, texts = list(sys.argv[1:] if argv is None else argv), []
    asks_for_help = {"-h", "--help"} & set(argv)
    if "--compare" in argv and not asks_for_help:  # argparse would take "--fp8=off" for its own
        place = argv.index("--compare")
        texts, argv = argv[place + 1 : place + 3], argv[:place] + argv[place + 3 :]
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="pairs at most [20]")
    parser.add_argument("--judge", choices=("together", "time", "loss"), default="together")
    text = "how often no difference is taken for one [0.01]"
    parser.add_argument("--alpha", type=float, default=leaderboard.SETTLED, help=text)
    args, common = parser.parse_known_args(argv)
    if len(texts) < 2:
        parser.error('--compare wants the flags of A and those of B, each in quotes, or ""')
    if not (2 <= args.runs <= 200 and 0.001 <= args.alpha <= 0.5):
        parser.error("--runs wants from 2 to 200 pairs, and --alpha from 0.001 to 0.5")
    a, b = (Side.of(*side, common) for side in zip("AB", texts, strict=True))
    for side in (a, b):
        if side.folder == HERE:
            new_run(list(side.flags))
    return a, b, args.run_id, new_run(common).seed, args.judge, args.alpha, args.runs


def main(argv: list[str] | None = None) -> None:
    """Compare as the flags say; errors are those of train_gpt.py."""
    program.as_program("run.sh", lambda: parse_args(argv), lambda args, store: compare(*args))


if __name__ == "__main__":
    main()
