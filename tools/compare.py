"""Does a change help? Runs with and without it, in turn, until the answer is settled.

    ./run.sh --compare "A" "B" [--runs 20] [flags of both]
    ./run.sh --compare "" "--muon_lr 0.06"                the recipe as it is against a changed flag
    ./run.sh --compare "" "my_fork.py --muon_lr 0.06"     against another script, with a flag

A and B are flags, perhaps behind a script; without one it is train_gpt.py, or what stands before
--compare. A script is a path or the name of a file in the project, in forks/ or in the current
folder. If it lies in a project of its own, such as another checkout, that one starts it.

A pair is a run of A and one of B with the same seed. Pairs take turns (A B, B A, A B, ...), so that
a machine that slows down slows both. --runs is how many pairs there are at most. What is judged is
a number of each pair: how much longer B takes to A's loss. It is ln(time of B / time of A) plus
(loss of B - loss of A) / worth. The worth of time is measured: a run of A with a quarter more steps
ends lower, and loss falls with the logarithm of the steps. It is then taken as exact: where B gains
in one and loses in the other, its error is not in p. --judge loss or --judge time judge one alone.

Runs whose logs are there are not made again: --run_id NAME goes on with a comparison, by the same
plan. --judge may change in one case: where the longer run ends no lower, nothing was judged yet.
A copy of train_gpt.py in another folder looks for data there, unless --train_files and --val_files
name others.

The answer is settled by a sequential test. After n of N pairs, from the fourth one on, a t-test of
the n numbers must have a p below c n / N. c is such that, where there is no difference, all looks
together settle one with the probability --alpha [0.01]. One look at p < 0.01 after each of 20 pairs
would do so with 0.07. Fewer than four pairs have no interval and no verdict.

--judge loss --deviation 0.0013 takes the deviation of a run's loss as known, as the optimizer
benchmark does, and the test is that of a normal mean: few pairs then say more.
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

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import leaderboard  # noqa: E402
import script  # noqa: E402
from leaderboard import FEWEST, Run, show_p  # noqa: E402

from train_gpt import HERE, Hyperparameters, UserError, as_program, fail  # noqa: E402

LAUNCH = HERE / "tools" / "launch.py"
LONGER = 1.25  # times the steps: the run that tells what a step is worth
ROUNDED = 1e-4 / 6**0.5  # deviation of the rounding in a difference of two losses of logs
# What runs leave out unless flags say otherwise. Another project's script may be older than
# --save_last.
WITHOUT = ("--save_last", "off", "--val_loss_every", "0")
OTHERS_WITHOUT = ("--save_every", "0", "--val_loss_every", "0")


# -----------------------------------------------------------------------------
# Statistics: of numbers of pairs, which are normal with any mean and deviation


def p_values(numbers: np.ndarray, least: float = 0.0, known: float | None = None) -> np.ndarray:
    """Return the two-sided p of Student's t-test that the mean is 0: of numbers (..., N), after the
    first 2, 3, ... N of them (..., N - 1).

    The numbers' deviation is taken as `least` at least, which is that of rounding. Where `least` is
    0, equal numbers have a p of 1 if they are 0, and else of 0. If the deviation is `known`, p is
    that of the normal distribution.
    """
    numbers = np.asarray(numbers, float)
    count = np.arange(1, numbers.shape[-1] + 1)
    mean = numbers.cumsum(-1) / count
    if known is not None:
        return 2 * stats.norm.sf(np.abs(mean) * np.sqrt(count) / known)[..., 1:]
    squares = (numbers**2).cumsum(-1) - count * mean**2
    equal = np.maximum.accumulate(numbers, -1) == np.minimum.accumulate(numbers, -1)
    squares = np.where(equal, 0.0, np.maximum(squares, 0.0))[..., 1:]
    mean, count = mean[..., 1:], count[1:]
    squares = np.maximum(squares, (count - 1) * least**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / np.sqrt(squares / (count - 1) / count)
    return np.where(mean == 0, 1.0, 2 * stats.t.sf(t, count - 1))


@cache
def thresholds(
    alpha: float, most: int, paths: int = 100_000, known: float | None = None
) -> np.ndarray:
    """Return the p below which the look after pair 2, 3, ... `most` settles a difference,
    (most - 1,); 0 before pair FEWEST, where there is no look.

    It grows with the pair's number, and all looks together settle a difference that is not there
    with probability alpha. It is simulated, with a deviation of 1: t does not depend on that. Where
    p is of a known deviation, `known` is 1.
    """
    numbers = np.random.default_rng(2026).standard_normal((paths, most))
    before = FEWEST - 2  # pairs with a p, and without a look
    growth = np.arange(FEWEST, most + 1) / most
    p = p_values(numbers, known=known)[:, before:]
    c = np.quantile((p / growth).min(axis=1), alpha)
    return np.concatenate([np.zeros(before), c * growth])


def half_width(numbers: list[float], known: float | None = None) -> float:
    """Return half of the 95 % interval of the mean; their deviation may be known."""
    if known is not None:
        return float(stats.norm.isf(0.025) * known / len(numbers) ** 0.5)
    sem = np.std(numbers, ddof=1) / len(numbers) ** 0.5
    return float(stats.t.isf(0.025, len(numbers) - 1) * sem)


# -----------------------------------------------------------------------------
# Runs, in turn


@dataclass(frozen=True)
class Side:
    """What is compared: a script, and flags for it."""

    name: str
    flags: tuple[str, ...] = ()
    path: Path = script.OWN  # the script's

    @classmethod
    def of(cls, name: str, text: str, common: list[str], own: Path = script.OWN) -> "Side":
        """Return a side from "[SCRIPT.py] FLAGS" and the flags of both; UserError for what cannot
        be."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--compare: {name} is {text}: {error}") from error
        if words and not words[0].startswith("-"):
            own = script.find(words.pop(0))
        for word in words:
            if word.split("=")[0] in ("--seed", "--run_id"):
                flag = word.split("=")[0]
                raise UserError(f"--compare: {flag} is for A and B: leave it out of {text!r}")
        return cls(name, (*common, *words), own)

    @property
    def launcher(self) -> Path:
        """The program that starts the script: that of the project in which it lies, or this one."""
        for folder in self.path.parents[:2]:
            if (folder / "tools" / "launch.py").exists():
                return folder / "tools" / "launch.py"
        return LAUNCH

    def check(self, seed: int) -> None:
        """Raise UserError for bad flags, if the script can be imported beside this project's."""
        if self.launcher == LAUNCH:
            new_run(self.path, [*self.flags, "--seed", str(seed)])

    def log(self, name: str, seed: int) -> Path:
        """Return the path of a run's log; leaderboard.OF_COMPARE knows its form."""
        return Path("logs", f"{name}_{self.name}_seed{seed}.txt")

    def run(self, name: str, seed: int) -> Run:
        """Return the run with that seed: of its log, if that is whole, or made now. UserError."""
        log = self.log(name, seed)
        run_id = log.stem
        if not whole(log):
            for path in (log, log.with_suffix(".jsonl")):  # of a run that was interrupted
                path.unlink(missing_ok=True)
            shutil.rmtree(log.with_suffix(""), ignore_errors=True)  # its checkpoints
            without = WITHOUT if self.launcher == LAUNCH else OTHERS_WITHOUT
            flags = [*without, *self.flags, "--seed", str(seed), "--run_id", run_id]
            command = [sys.executable, str(self.launcher), str(self.path), *flags]
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
    """Note flags and plan beside the logs, and leave interrupts to the runs. UserError if logs of
    that name had others: a test that is planned anew after a look errs more often than it says."""
    signal.signal(signal.SIGINT, lambda *_: None)  # it is the run's, which saves and ends
    known = noted(name)
    no_look = "worth" in known and known["worth"] is None  # at p, which needs the worth
    if no_look and plan.get("judge") in ("loss", "time"):
        del known["worth"], known["judge"]  # so the judge may change, once
    for side in sides:
        plan[side.name] = [str(side.path), *side.flags]
    for key, value in plan.items():
        if known.setdefault(key, value) != value:
            path = plan_of(name)
            raise UserError(f"{path}: {key} was {known[key]}: choose another --run_id")
    plan_of(name).parent.mkdir(exist_ok=True)
    plan_of(name).write_text(json.dumps(known))


def plan_of(name: str) -> Path:
    """Return the file beside the logs that has the plan, and what is noted later."""
    return Path("logs", f"{name}.json")


def noted(name: str) -> dict:
    """Return plan and notes; {} before a plan's first run."""
    return json.loads(plan_of(name).read_text()) if plan_of(name).exists() else {}


def note(name: str, **more) -> None:
    """Note something beside the plan."""
    plan_of(name).write_text(json.dumps(noted(name) | more))


class Pace:
    """Says how many runs are to be made, and, by the first one, how long that takes."""

    def __init__(self, name: str, logs: list[Path], what: str):
        """`logs` are those of all runs, at most; `what` says in words what they are."""
        self.name, self.left = name, {log for log in logs if not whole(log)}
        self.seconds = noted(name).get("run_seconds")  # of the first run, with its start
        text = f"{what}: {len(logs)} runs"
        if len(self.left) < len(logs):
            text += f", {len(self.left)} of them to make"
        if self.left and self.seconds:
            text += f", in about {duration(self.seconds * len(self.left))}"
        print(text)
        logs = f"logs are logs/{name}_*.txt, tools/watch.py draws the newest"
        print(f"{logs}; after a stop, --run_id {name} goes on", flush=True)

    def run(self, side: Side, name: str, seed: int) -> Run:
        """Return side.run(name, seed)."""
        is_new = side.log(name, seed) in self.left
        begin = time.monotonic()
        found = side.run(name, seed)
        seconds = time.monotonic() - begin
        self.left.discard(side.log(name, seed))
        if is_new and self.seconds is None:
            self.seconds = seconds
            note(self.name, run_seconds=round(seconds, 1))
            left = duration(seconds * len(self.left))
            print(f"all {len(self.left)} others: about {left}, by the first run", flush=True)
        return found


def duration(seconds: float) -> str:
    """Return a time in words, of two digits or so."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def whole(log: Path) -> bool:
    """Say whether a log is that of a finished run."""
    try:
        return bool(leaderboard.read_log(log))
    except (OSError, ValueError):
        return False


def check_equal(runs: list[Run]) -> None:
    """Raise UserError if runs of one side differ in more than the seed: then they are no sample."""
    for run in runs:
        if run.group != runs[0].group:
            raise UserError(
                f"{runs[0].path} and {run.path} differ in source, settings, kernels, torch or "
                "machine: change nothing until a comparison ends, or choose another --run_id"
            )


def worth_of_time(run: Run, longer: Run) -> float:
    """Return how much lower a run's loss would be with e times the steps (nats), from both. What is
    not above 0 is no measurement."""
    return (run.loss - longer.loss) / math.log(longer.steps / run.steps)


def unmeasured(name: str, side: str) -> UserError:
    """Return the error of a comparison, or an ablation, where more steps gave no lower loss."""
    return UserError(
        f"what time is worth cannot be measured here: logs/{name}_{side}_longer_*.txt has more "
        f"steps, and no lower loss; go on with these runs by --run_id {name} --judge loss"
    )


def longer(side: Side, steps: int) -> Side:
    """Return the side's recipe, which has so many steps, with a quarter more, or one at least."""
    flags = (*side.flags, "--num_iterations", str(max(steps + 1, round(LONGER * steps))))
    return Side(f"{side.name}_longer", flags, side.path)


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
    deviation: float | None = None  # of a run's loss, if it is taken as known

    @property
    def known(self) -> float | None:
        """The deviation of a difference of two losses, if it is known."""
        return None if self.deviation is None else 2**0.5 * self.deviation

    def numbers(self, of: str) -> list[float]:
        """Return a number for each pair: the log of the times' ratio, the difference of losses, or
        the log of the ratio of the times to equal loss."""
        times = [math.log(b.seconds / a.seconds) for a, b in self.pairs]
        losses = [b.loss - a.loss for a, b in self.pairs]
        if of == "together":
            return [t + loss / self.worth for t, loss in zip(times, losses, strict=True)]
        return times if of == "time" else losses

    @property
    def p(self) -> float:
        """The p of the last look; nan before the first one."""
        if len(self.pairs) < FEWEST:
            return math.nan
        least = 0.0  # of times, which are not rounded much
        if self.judge == "loss":
            least = ROUNDED
        elif self.judge == "together":
            least = ROUNDED / self.worth
        return float(p_values(self.numbers(self.judge), least, self.known)[-1])

    @property
    def needed(self) -> float:
        """The p that settles a difference after so many pairs."""
        known = None if self.deviation is None else 1.0
        return float(thresholds(self.alpha, self.most, known=known)[len(self.pairs) - 2])

    @property
    def settled(self) -> bool:
        """Whether the last look settles a difference."""
        return self.p < self.needed

    def sentence(self) -> str:
        """Return in plain words how B compares with A, how sure that is, and if it is settled."""
        of_all = f"{len(self.pairs)} of at most {self.most} pairs"
        if len(self.pairs) < FEWEST:
            return f"{of_all}: how B compares with A is said from pair {FEWEST} on"
        found = {}
        for of in ("time", "loss", "together"):
            if of != "together" or self.worth:
                known = self.known if of == "loss" else None
                found[of] = np.mean(self.numbers(of)), half_width(self.numbers(of), known)
        text = f"B is {percent(*found['time'], ('faster', 'slower'))} than A; "
        text += f"its loss is {leaderboard.amount(*found['loss'], '.4f', ('lower', 'higher'))}; "
        if self.worth:
            mean, by = found["together"]
            text += f"to A's loss it takes {percent(mean, by, ('less', 'more'))} time, "
            at_equal_time = self.worth * mean, self.worth * by
            amount = leaderboard.amount(*at_equal_time, ".4f", ("lower", "higher"))
            text += f"and at equal time its loss is {amount}; "
        state = "that is settled" if self.settled else "that is not settled"
        return text + f"{state} after {of_all} (p = {show_p(self.p)}, below {self.needed:.2g} is)"


def percent(mean: float, by: float, words: tuple[str, str]) -> str:
    """Return the mean logarithm of a ratio, and half its interval, in per cent of its change."""
    return leaderboard.amount(100 * math.expm1(mean), 100 * math.exp(mean) * by, ".1f", words, " %")


def compare(
    a: Side,
    b: Side,
    name: str,
    seed: int,
    judge: str,
    alpha: float,
    most: int,
    deviation: float | None = None,
) -> None:
    """Make pairs until the answer is settled, and print what they say after each. UserError if a
    run fails, or if what time is worth is judged and cannot be measured."""
    plan = {"judge": judge, "alpha": alpha, "runs": most, "seed": seed, "deviation": deviation}
    begin(name, [a, b], **plan)
    logs = [side.log(name, seed + i) for i in range(most) for side in (a, b)]
    what = f"at most {most} pairs"
    if judge == "together":
        logs.append(Side("A_longer").log(name, seed))
        what += " and a longer run"
    pace = Pace(name, logs, what)
    found = Comparison(judge, alpha, most, deviation=deviation)
    for i in range(most):
        sides = (a, b) if i % 2 == 0 else (b, a)
        runs = {side.name: pace.run(side, name, seed + i) for side in sides}
        found.pairs.append((runs["A"], runs["B"]))
        for side in zip(*found.pairs, strict=True):
            check_equal(list(side))
        if judge == "together" and found.worth is None:
            steps = runs["A"].steps
            worth = worth_of_time(runs["A"], pace.run(longer(a, steps), name, seed))
            # None if it was never measured: then there was no look, and the judge may change.
            note(name, worth=worth if worth > 0 else noted(name).get("worth"))
            if worth <= 0:
                raise unmeasured(name, "A")
            found.worth = worth
            print(f"one step more or less of {steps} is worth {worth / steps:.2g} of A's loss")
        print(f"{found.sentence()}\n", flush=True)
        if found.settled:
            break


def parser_of(about: str) -> argparse.ArgumentParser:
    """Return a parser for a program that makes runs in turn; other flags are those of the runs."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form, allow_abbrev=False)
    parser.error = fail
    name = time.strftime("%Y-%m-%d_%H-%M-%S_") + uuid.uuid4().hex[:6]
    parser.add_argument("--run_id", default=name, help="first part of logs' names [by the time]")
    return parser


def new_run(path: Path, flags: list[str]) -> tuple[Hyperparameters, str]:
    """Return the settings that flags of a script say, and the record's name; UserError for bad
    ones, and for those that make no new run."""
    run_class = script.load(path)
    hp, given = script.core(run_class).parse_args(flags, run_class)
    for name in ("eval", "resume"):
        if name in given:
            raise UserError(f"--{name} is for {path.name}: here runs are new")
    return hp, given.record


def parse_args(argv: list[str] | None) -> tuple:
    """Return the arguments of `compare`; UserError for a bad value."""
    argv, texts = list(sys.argv[1:] if argv is None else argv), []
    asks_for_help = {"-h", "--help"} & set(argv)
    if "--compare" in argv and not asks_for_help:  # argparse would take "--fp8=off" for its own
        place = argv.index("--compare")
        texts, argv = argv[place + 1 : place + 3], argv[:place] + argv[place + 3 :]
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="pairs at most [20]")
    parser.add_argument("--judge", choices=("together", "time", "loss"), default="together")
    text = "of a run's loss, if it is known: with --judge loss"
    parser.add_argument("--deviation", type=float, help=text)
    text = "how often no difference is taken for one [0.01]"
    parser.add_argument("--alpha", type=float, default=leaderboard.ALPHA, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first pair [0]")
    args, others = parser.parse_known_args(argv)
    if len(texts) < 2:
        parser.error('--compare wants the flags of A and those of B, each in quotes, or ""')
    if not FEWEST <= args.runs <= 200:
        parser.error(f"--runs wants from {FEWEST} to 200 pairs: fewer settle nothing")
    if not 0.001 <= args.alpha <= 0.5:
        parser.error("--alpha wants from 0.001 to 0.5")
    known = args.deviation
    if known is not None and (args.judge != "loss" or not 0 < known < math.inf):
        parser.error("--deviation wants a finite number above 0, and --judge loss")
    path, common = script.take_script(others)
    a, b = (Side.of(name, text, common, path) for name, text in zip("AB", texts, strict=True))
    a.check(args.seed)
    b.check(args.seed)
    return a, b, args.run_id, args.seed, args.judge, args.alpha, args.runs, args.deviation


def main(argv: list[str] | None = None) -> None:
    """Compare as the flags say; errors are those of train_gpt.py."""
    as_program("run.sh", lambda: parse_args(argv), lambda arguments: compare(*arguments))


if __name__ == "__main__":
    main()
