"""Does a change help? Trains with and without it, in turn, until the difference is significant.

    ./run.sh --compare "A" "B" [--runs 20] [flags of both]
    ./run.sh --compare "" "--muon_lr 0.06"                the recipe as it is against a changed flag
    ./run.sh --compare "" "my_fork.py --muon_lr 0.06"     against another script, with a flag

A and B are flags, which may follow the name of a script. The default script is train_gpt.py, or the
one before --compare. A script is a path, or the name of a file in the project, in forks/ or in the
current folder. A script in another project, such as another checkout, is started by that project.

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

Finished runs are not repeated: --run_id NAME continues a comparison with the same flags. Only
--judge may change, if nothing was tested yet because the longer run had no lower loss. A copy of
train_gpt.py in another folder looks for data there, unless --train_files and --val_files name
others.
"""

import argparse
import fcntl
import json
import math
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import leaderboard  # noqa: E402
import script  # noqa: E402
from leaderboard import FEWEST, Run, show_p  # noqa: E402

from train_gpt import HERE, Hyperparameters, UserError, as_program  # noqa: E402

LAUNCH = HERE / "tools" / "launch.py"
LONGER = 1.25  # times the steps, in the run that measures what a step is worth
# Runs neither save nor validate before the end, unless flags say so. A script of another project
# may not know --keep 0.
WITHOUT = ("--keep", "0", "--val_loss_every", "0")
OTHERS_WITHOUT = ("--save_every", "0", "--val_loss_every", "0")


# -----------------------------------------------------------------------------
# Statistics: each pair gives a number, and the numbers are normally distributed


def p_values(numbers: np.ndarray, least: float = 0.0, known: float | None = None) -> np.ndarray:
    """Return the two-sided p of Student's t-test that the mean is 0, of numbers (..., N), after the
    first 2, 3, ... N of them (..., N - 1).

    The standard deviation is taken as at least `least`, which is that of rounding. If `least` is 0,
    equal numbers have a p of 1 if they are 0, and a p of 0 otherwise. If the deviation is `known`,
    the test is a z-test.
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
    """Return the p below which a difference is significant, after pair 2, 3, ... `most`
    (most - 1,); 0 before pair FEWEST, because the test does not look there.

    The limit grows with the number of pairs. If there is no difference, all looks together call one
    significant with the probability alpha. The limit is simulated with a standard deviation of 1,
    which does not matter to a t-test; for a z-test `known` is 1.
    """
    numbers = np.random.default_rng(2026).standard_normal((paths, most))
    before = FEWEST - 2  # numbers of pairs that have a p, but no look
    growth = np.arange(FEWEST, most + 1) / most
    p = p_values(numbers, known=known)[:, before:]
    c = np.quantile((p / growth).min(axis=1), alpha)
    return np.concatenate([np.zeros(before), c * growth])


def rounding(digits: int = 5) -> float:
    """Return the deviation of the rounding in a difference of two losses of so many digits."""
    return 10.0**-digits / 6**0.5


def half_width(numbers: list[float], known: float | None = None) -> float:
    """Return half the width of the 95 % interval of the mean; the deviation may be known."""
    if known is not None:
        return float(stats.norm.isf(0.025) * known / len(numbers) ** 0.5)
    sem = np.std(numbers, ddof=1) / len(numbers) ** 0.5
    return float(stats.t.isf(0.025, len(numbers) - 1) * sem)


# -----------------------------------------------------------------------------
# Runs, in turn


@dataclass(frozen=True)
class Side:
    """A or B: a script and its flags."""

    name: str
    flags: tuple[str, ...] = ()
    path: Path = script.OWN  # the script's

    @classmethod
    def of(cls, name: str, text: str, common: list[str], own: Path = script.OWN) -> "Side":
        """Return a side, given "[SCRIPT.py] FLAGS" and the flags of both; UserError if they are
        wrong."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--compare: {name} is {text}: {error}") from error
        if words and not words[0].startswith("-"):
            own = script.find(words.pop(0))
        for word in words:
            if word.split("=")[0] in ("--seed", "--run_id"):
                flag = word.split("=")[0]
                raise UserError(f"--compare: {flag} is for both sides: leave it out of {text!r}")
        return cls(name, (*common, *words), own)

    @property
    def launcher(self) -> Path:
        """The program that starts the script: that of the script's own project, or this one."""
        for folder in self.path.parents[:2]:
            if (folder / "tools" / "launch.py").exists():
                return folder / "tools" / "launch.py"
        return LAUNCH

    def check(self, seed: int) -> None:
        """Raise UserError for bad flags. A script of another project is not checked."""
        if self.launcher == LAUNCH:
            new_run(self.path, [*self.flags, "--seed", str(seed)])

    def log(self, name: str, seed: int) -> Path:
        """Return the path of a run's log; leaderboard.OF_COMPARE matches its name."""
        return Path("logs", f"{name}_{self.name}_seed{seed}.txt")

    def run(self, name: str, seed: int) -> Run:
        """Return the run with that seed: read from its log if the run is finished, or made now.
        UserError if the run fails."""
        log = self.log(name, seed)
        run_id = log.stem
        if not is_finished(log):
            delete_run(log)
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
        except ValueError as error:  # although the run ended with status 0
            raise UserError(f"{log} {error}") from error
        loss = f"{found.loss:.{found.digits}f}"
        print(f"{self.name} seed {seed}: loss {loss} in {found.seconds:.1f} s")
        sys.stdout.flush()
        return found


def delete_run(log: Path) -> None:
    """Delete what an interrupted run has left. UserError if the run still lives: it holds a lock on
    its log."""
    if log.exists():
        with log.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                remedy = "wait for its end, or choose another --run_id"
                raise UserError(f"another process is writing {log}: {remedy}") from error
            except OSError:  # a disk without locks
                pass
            log.unlink()
    log.with_suffix(".jsonl").unlink(missing_ok=True)
    shutil.rmtree(log.with_suffix(""), ignore_errors=True)  # its checkpoints


def begin(name: str, sides: list[Side], **plan) -> None:
    """Write flags and plan to a file beside the logs, and leave interrupts to the runs. UserError
    if the file has other ones: a plan that changes after a look makes false positives likelier."""
    signal.signal(signal.SIGINT, lambda *_: None)  # the run saves and ends
    known = noted(name)
    no_look = "worth" in known and known["worth"] is None  # p needs the worth
    if no_look and plan.get("judge") in ("loss", "time"):
        del known["worth"], known["judge"]  # the judge may change once
    for side in sides:
        plan[side.name] = [str(side.path), *side.flags]
    for key, value in plan.items():
        if known.setdefault(key, value) != value:
            path = plan_of(name)
            raise UserError(f"{path}: {key} was {known[key]}: choose another --run_id")
    plan_of(name).parent.mkdir(exist_ok=True)
    plan_of(name).write_text(json.dumps(known))


def plan_of(name: str) -> Path:
    """Return the path of the file with the plan and the notes, beside the logs."""
    return Path("logs", f"{name}.json")


def noted(name: str) -> dict:
    """Return plan and notes; {} if there are none yet."""
    return json.loads(plan_of(name).read_text()) if plan_of(name).exists() else {}


def note(name: str, **more) -> None:
    """Add notes to the file with the plan."""
    plan_of(name).write_text(json.dumps(noted(name) | more))


class Pace:
    """Prints how many runs there will be, and estimates from the first one how long they take."""

    def __init__(self, name: str, logs: list[Path], what: str):
        """`logs` are those of all runs that may be made; `what` describes them in words."""
        self.name, self.left = name, {log for log in logs if not is_finished(log)}
        self.seconds = noted(name).get("run_seconds")  # of the first run, from start to end
        text = f"{what}: {len(logs)} runs"
        if len(self.left) < len(logs):
            text += f", {len(self.left)} of them not made yet"
        if self.left and self.seconds:
            text += f", in about {duration(self.seconds * len(self.left))}"
        print(text)
        logs = f"logs are logs/{name}_*.txt, tools/watch.py plots the newest"
        print(f"{logs}; --run_id {name} continues after a stop", flush=True)

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
            left = f"{len(self.left)} more runs: about {left}, if all are like the first"
            print(left, flush=True)
        return found


def duration(seconds: float) -> str:
    """Return a time in words, with about two digits."""
    if seconds < 100:
        return f"{seconds:.0f} seconds"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def is_finished(log: Path) -> bool:
    """Return whether a log is that of a finished run."""
    try:
        return bool(leaderboard.read_log(log))
    except (OSError, ValueError):
        return False


def check_equal(runs: list[Run]) -> None:
    """Raise UserError if runs of one side differ in more than the seed."""
    for run in runs:
        if run.group != runs[0].group:
            raise UserError(
                f"{runs[0].path} and {run.path} differ in source, settings, kernels, torch or "
                "machine: change nothing until a comparison ends, or choose another --run_id"
            )


def worth_of_time(run: Run, longer: Run) -> float:
    """Return how much lower the loss would be after e times the steps, from a run and a longer one.
    A worth of 0 or less is no measurement."""
    return (run.loss - longer.loss) / math.log(longer.steps / run.steps)


def unmeasured(name: str, side: str) -> UserError:
    """Return the error of a comparison or an ablation whose longer run had no lower loss."""
    return UserError(
        f"the worth of time cannot be measured here: logs/{name}_{side}_longer_*.txt has more "
        f"steps, but no lower loss; to compare losses, continue with --run_id {name} --judge loss"
    )


def longer(side: Side, steps: int) -> Side:
    """Return the side with a quarter more steps than it has, and at least one more."""
    flags = (*side.flags, "--num_iterations", str(max(steps + 1, round(LONGER * steps))))
    return Side(f"{side.name}_longer", flags, side.path)


# -----------------------------------------------------------------------------
# The comparison


@dataclass
class Comparison:
    """The pairs so far, and the test. `worth` is worth_of_time, or None if it is not needed."""

    judge: str
    alpha: float
    most: int
    worth: float | None = None
    pairs: list[tuple[Run, Run]] = field(default_factory=list)
    deviation: float | None = None  # of a run's loss, if known

    @property
    def known(self) -> float | None:
        """The deviation of a difference of two losses, if known."""
        return None if self.deviation is None else 2**0.5 * self.deviation

    def numbers(self, of: str) -> list[float]:
        """Return a number for each pair: the log of the ratio of times ("time"), the difference of
        losses ("loss"), or the log of the ratio of times to equal loss ("together")."""
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
        least = 0.0  # times are hardly rounded
        if self.judge != "time":
            least = rounding(min(run.digits for pair in self.pairs for run in pair))
        if self.judge == "together":
            least /= self.worth
        return float(p_values(self.numbers(self.judge), least, self.known)[-1])

    @property
    def needed(self) -> float:
        """The p below which the difference is significant after so many pairs."""
        known = None if self.deviation is None else 1.0
        return float(thresholds(self.alpha, self.most, known=known)[len(self.pairs) - 2])

    @property
    def significant(self) -> bool:
        """Whether the difference is significant at the last look."""
        return self.p < self.needed

    def sentence(self) -> str:
        """Return in words how B compares with A, and whether the difference is significant."""
        of_all = f"{len(self.pairs)} of at most {self.most} pairs"
        if len(self.pairs) < FEWEST:
            return f"{of_all}: the first result comes after pair {FEWEST}"
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
        state = "significant" if self.significant else "not significant"
        text += f"the difference is {state} after {of_all} "
        limit = f"the limit is {self.needed:.2g}"
        return text + f"(p = {show_p(self.p)}, {limit})"


def percent(mean: float, by: float, words: tuple[str, str]) -> str:
    """Return the change in per cent, in words. `mean` is of a log ratio, `by` half its interval."""
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
    """Make pairs until the difference is significant, and print the result after each. UserError if
    a run fails, or if the worth of time is needed and cannot be measured."""
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
            # None if the worth was never measured: nothing was tested, and the judge may change.
            note(name, worth=worth if worth > 0 else noted(name).get("worth"))
            if worth <= 0:
                raise unmeasured(name, "A")
            found.worth = worth
            print(f"one step more or less of {steps} is worth {worth / steps:.2g} of A's loss")
        print(f"{found.sentence()}\n", flush=True)
        if found.significant:
            break


def parser_of(about: str) -> argparse.ArgumentParser:
    """Return the parser that --compare and --ablate share; other flags are for the runs."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=form, allow_abbrev=False)
    parser.error = script.fail
    name = script.new_name()
    parser.add_argument("--run_id", default=name, help="how names of logs begin [the time]")
    text = "what is tested: the loss, the time, or both, which is the time to equal loss [together]"
    parser.add_argument(
        "--judge", choices=("together", "time", "loss"), default="together", help=text
    )
    return parser


def new_run(path: Path, flags: list[str]) -> tuple[Hyperparameters, str]:
    """Return the settings of a script with these flags, and the record's name. UserError for bad
    flags, and for those of old runs."""
    run_class = script.load(path)
    hp, record = script.core(run_class).parse_args(flags, run_class)
    if hp.resume:
        raise UserError(f"--resume is for {path.name}: here runs are new")
    return hp, record


def parse_args(argv: list[str] | None) -> tuple:
    """Return the arguments of `compare`; UserError for a bad value."""
    argv, texts = list(sys.argv[1:] if argv is None else argv), []
    asks_for_help = {"-h", "--help"} & set(argv)
    if "--compare" in argv and not asks_for_help:  # argparse would read "--fp8=off" as its own flag
        place = argv.index("--compare")
        texts, argv = argv[place + 1 : place + 3], argv[:place] + argv[place + 3 :]
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="largest number of pairs [20]")
    text = "the standard deviation of a run's loss, if known; needs --judge loss"
    parser.add_argument("--deviation", type=float, help=text)
    text = "probability that a difference is called significant if there is none [0.01]"
    parser.add_argument("--alpha", type=float, default=leaderboard.ALPHA, help=text)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first pair [0]")
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
    path, common = script.take_script(others)
    a, b = (Side.of(name, text, common, path) for name, text in zip("AB", texts, strict=True))
    a.check(args.seed)
    b.check(args.seed)
    return a, b, args.run_id, args.seed, args.judge, args.alpha, args.runs, args.deviation


def main(argv: list[str] | None = None) -> None:
    """Compare as the flags say; errors are those of train_gpt.py."""
    as_program("run.sh", lambda: compare(*parse_args(argv)))


if __name__ == "__main__":
    main()
