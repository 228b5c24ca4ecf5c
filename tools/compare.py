"""Does a change help? Trains with and without it, in turn, until the answer is clear.

    ./run.sh --compare "A" "B" [--runs 20] [flags of both]
    ./run.sh --compare "" "--muon_lr 0.06"                the recipe as it is against a changed flag
    ./run.sh --compare "" "my_fork.py --muon_lr 0.06"     against another script, with a flag

A and B are flags, which may follow the name of a script. The default script is train_gpt.py, or the
one before --compare. A script is a path, or the name of a file in the project, in forks/ or in the
current folder.

A pair is a run of A and a run of B with the same seed. The order alternates (A B, B A, A B, ...):
a machine that becomes slower affects both. There are at most --runs pairs. They answer three
questions, each with a 95 % interval and p:

    loss      Is B's last loss lower? The number of a pair is loss of B - loss of A.
    time      Is a step of B faster? The number is ln(step time of B / step time of A).
    sooner    Does B reach A's loss sooner? The number is ln(time of B / time of A) + (loss of B -
              loss of A) / worth. The worth of time is how much lower the loss is after e times the
              steps: one run of A with a quarter more steps measures it, because the loss falls with
              the logarithm of the steps. The test treats the worth as exact.

The comparison ends when the question of --judge has an answer, or when all losses are equal: then
the change does nothing. The test is sequential: it looks after each pair from the fourth on. After
n of N pairs, p must be below c n / N. The constant c is such that, if A and B do not differ, all
looks together call a difference significant in 1 % of the comparisons (--alpha). Looks at p < 0.01
after each of 20 pairs would do so in 7 %. Each question has the same limits and so the same alpha,
whichever question ends the comparison; three questions have at most three times as much. With at
most 20 pairs, the test finds a difference of one standard deviation of the pairs with a probability
of 85 %, after 14.2 pairs on average. A fixed t-test of equal power needs 17 pairs. These figures
are for normally distributed differences.

Finished runs are not repeated: the same command with --run_id NAME continues a comparison, or
prints its answers again. More pairs, or another judge, need a new comparison.

--judge loss --deviation 0.0013 takes the standard deviation of a run's loss as known, as the
optimizer benchmark does. A z-test replaces the t-test, and needs fewer pairs.

    --runs N            largest number of pairs [20]
    --judge WHAT        which question ends the comparison: loss, time or sooner [loss]
    --alpha P           probability that equal sides are called different [0.01]
    --deviation D       the standard deviation of a run's loss, if known; needs --judge loss
    --seed N            seed of the first pair [0]
    --seconds N         both sides make as many steps as A in N seconds here. `sooner` adds
                        what the saved time is worth; it is rough if times differ by a quarter
    --plot PNG          draw the pairs, and the narrowing intervals
    --run_id NAME       how names of logs begin [the time]

The answers are also an object of logs/results.jsonl: kind (comparison), run (its name), start, A, B
(script and flags), judge, alpha, runs (the most pairs), seconds, pairs, an object for each question
(mean, half, p, answer; time and sooner in per cent), verdict, logs.
"""

import argparse
import json
import math
import shlex
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

import numpy as np

import console
import launch
import result
import script
import significance
from logfile import Run, is_finished, read_log
from significance import ALPHA, FEWEST, Difference, show_p
from train_gpt import UserError, new_name, written_whole

LONGER = 1.25  # times the steps, in the run that measures what a step is worth
# Runs neither save nor validate before the end, unless flags say so.
WITHOUT = ("--keep", "0", "--val_loss_every", "0")
PLAN = "judge", "alpha", "seed", "deviation", "seconds", "runs"  # flags that a plan keeps
NOISY = 2.0  # per cent: times with a wider interval are too noisy to tell
# Each question: what it asks for, the words for less and for more, the unit, and a number's form.
QUESTIONS = {
    "loss": ("loss", ("lower", "higher"), "", ".4f"),
    "time": ("time of a step", ("shorter", "longer"), " %", ".1f"),
    "sooner": ("time to A's loss", ("shorter", "longer"), " %", ".1f"),
}
PLAIN = {  # answers in plain words
    "loss lower": "B's loss is lower",
    "loss higher": "B's loss is higher",
    "time shorter": "a step of B is faster",
    "time longer": "a step of B is slower",
    "sooner shorter": "B reaches A's loss sooner",
    "sooner longer": "B reaches A's loss later",
}


# -----------------------------------------------------------------------------
# Runs, in turn


@dataclass(frozen=True)
class Side:
    """A or B: a script and its flags."""

    name: str
    flags: tuple[str, ...]
    path: Path  # of the script

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
        script.parse(path, [*common, *words])
        return cls(name, (*common, *words), path)

    def log(self, name: str, seed: int) -> Path:
        """Return the path of a run's log, in the comparison of that name."""
        return Path("logs", f"{name}_{self.name}_seed{seed}.txt")

    def run(self, name: str, seed: int, label: str) -> Run:
        """Return the run with that seed: read from its log if the run is finished, or made now. The
        label says which one of the comparison it is. UserError if the run fails."""
        log = self.log(name, seed)
        if not is_finished(log):
            own = ["--seed", str(seed), "--run_id", log.stem]
            own += ["--resume", "on"] if log.exists() else []
            flags = [*WITHOUT, *self.flags, *own]
            found = launch.train(self.path, flags, f"{label}, {self.name}", group=name)
            if found["exit"] in result.STOPPED:
                print(f"stopped; the same command with --run_id {name} resumes it", flush=True)
                raise KeyboardInterrupt
            if found["exit"]:
                raise UserError(f"the run {log.stem} {found['status']}: {found['reason']}")
        found = read_log(log)
        text = f"{self.name} seed {seed}: loss {found.loss:.5f} in {found.seconds:.1f} s"
        print(f"{label}, {text}", flush=True)
        return found


def check_equal(runs: list[Run]) -> None:
    """Raise UserError if runs of one side differ in more than the seed."""
    for run in runs:
        if run.group != runs[0].group:
            raise UserError(
                f"{runs[0].path} and {run.path} differ in source, settings, kernels, torch or "
                "machine: change nothing until a comparison ends, or choose another --run_id"
            )


def worth_of_time(side: Side, run: Run, name: str, seed: int) -> float | None:
    """Return how much lower the loss would be after e times the steps, by a run of the side and one
    with a quarter more steps; None if the longer one has no lower loss."""
    steps = max(run.steps + 1, round(LONGER * run.steps))
    flags = (*side.flags, "--num_iterations", str(steps))
    longer = Side(f"{side.name}_longer", flags, side.path)
    more = longer.run(name, seed, "the worth of time")
    worth = (run.loss - more.loss) / math.log(more.steps / run.steps)
    if worth <= 0:
        print(f"{more.path} has more steps, but no lower loss: the worth of time is unknown")
        return None
    step = f"one step more or less of {run.steps}"
    print(f"{step} is worth {worth / run.steps:.2g} of the loss of {side.name}", flush=True)
    return worth


# -----------------------------------------------------------------------------
# Answers


def numbers_of(pairs: list[tuple[Run, Run]], worth: float | None) -> dict[str, list[float]]:
    """Return the number of each pair, for each question that can be answered."""
    numbers = {
        "loss": [b.loss - a.loss for a, b in pairs],
        "time": [math.log(b.seconds / b.steps * a.steps / a.seconds) for a, b in pairs],
    }
    if worth:
        both = [(math.log(b.seconds / a.seconds), b.loss - a.loss) for a, b in pairs]
        numbers["sooner"] = [time + loss / worth for time, loss in both]
    return numbers


def answers_of(numbers: dict, known: float | None, limit: float) -> dict[str, dict]:
    """Return for each question the difference between the sides, and the answer: a word of
    QUESTIONS or, if p is not below the limit, "open". `known` is the deviation of a difference in
    loss."""
    answers = {}
    for question, values in numbers.items():
        found = significance.of_pairs(values, known if question == "loss" else None)
        _, words, unit, _ = QUESTIONS[question]
        answer = words[int(found.mean > 0)] if found.p < limit else "open"
        found = found.in_percent() if unit else found
        answers[question] = {**vars(found), "answer": answer}
    return answers


def verdict(answers: dict[str, dict]) -> str:
    """Return one sentence that follows from the answers."""
    loss, time = answers["loss"], answers["time"]
    noise = f"± {time['half']:.1f} %"
    too_noisy = f"the times are too noisy to tell ({noise})"
    equal = f"a step takes equally long ({time['mean']:+.1f} {noise})"
    unless_known = {
        "loss": f"no difference in loss is shown (± {loss['half']:.4f})",
        "time": too_noisy if time["half"] > NOISY else equal,
        "sooner": "whether B reaches A's loss sooner is open",
    }
    if not loss["mean"] and not loss["half"]:  # all losses are equal
        unless_known["loss"] = "the change does nothing to the loss, which is equal in all pairs"
        unless_known.pop("sooner")
    words = {q: PLAIN.get(f"{q} {of['answer']}", unless_known.get(q)) for q, of in answers.items()}
    return "; ".join(text for text in words.values() if text)


def print_answers(answers: dict[str, dict], when: str, limit: float, text: str) -> None:
    """Print a line for each question, and the verdict."""
    print(f"{when}, with an answer if p < {limit:.2g}:")
    for question, (name, words, unit, form) in QUESTIONS.items():
        found = "not known, because more steps did not lower A's loss"
        if question in answers:
            mean, half, p, _ = answers[question].values()
            found = (
                f"B's is {Difference(mean, half, p).in_words(form, words, unit)}, p = {show_p(p)}"
            )
        print(f"  {name}: {found}")
    print(f"  {text}\n", flush=True)


# -----------------------------------------------------------------------------
# The comparison


def plan_of(name: str) -> dict:
    """Return the plan of a comparison of that name; {} if there is none."""
    path = Path("logs", f"{name}.json")
    try:
        return dict(json.loads(path.read_bytes())) if path.exists() else {}
    except (TypeError, ValueError) as error:
        remedy = "remove it, and the same command reads the runs that are finished"
        raise UserError(f"{path} is not a whole plan of a comparison: {remedy}") from error


def keep_plan(name: str, plan: dict) -> None:
    """Write the plan of a comparison beside its logs. UserError if it has another one: a plan that
    changes after a look makes false answers likelier."""
    path, before = Path("logs", f"{name}.json"), plan_of(name) or plan
    for key, value in plan.items():
        if before.get(key) != value:
            raise UserError(f"{path}: {key} was {before.get(key)}: choose another --run_id")
    with written_whole(path, path.with_suffix(".json.tmp")) as file:
        file.write(json.dumps(plan).encode())


def pairs_of(a: Side, b: Side, name: str, seeds: list[int]) -> Iterator[tuple[Run, Run]]:
    """Make the pairs, or read those that are finished. UserError if a run fails, or differs from
    earlier ones of its side in more than the seed."""
    before, times = [], []
    for number, seed in enumerate(seeds):
        label = f"pair {number + 1} of {len(seeds)}"
        if times:
            label += f" ({np.mean(times) * (len(seeds) - number) / 60:.0f} min left)"
        since = time.monotonic()
        first, second = (a, b) if number % 2 == 0 else (b, a)
        runs = {side: side.run(name, seed, label) for side in (first, second)}
        times.append(time.monotonic() - since)
        before.append((runs[a], runs[b]))
        for of_a_side in zip(*before, strict=True):
            check_equal(of_a_side)
        yield before[-1]


def compare(a: Side, b: Side, args: argparse.Namespace) -> None:
    """Make pairs until the judge has an answer, and print all answers after each. UserError if a
    run fails, or if the worth of time is needed and cannot be measured."""
    name, judge, began = args.run_id, args.judge, datetime.now().astimezone()
    plan = {key: getattr(args, key) for key in PLAN}
    if args.seconds is not None:
        before = plan_of(name) or {"steps": launch.steps_in(args.seconds, a.path, list(a.flags))}
        plan["steps"] = steps = before.get("steps", 1)  # a plan without steps is refused below
        more = {s: launch.flags_for(s.path, list(s.flags), steps, s.name) for s in (a, b)}
        a, b = (replace(side, flags=(*side.flags, *flags)) for side, flags in more.items())
    plan |= {side.name: [str(side.path), *side.flags] for side in (a, b)}
    keep_plan(name, plan)
    print(f"logs are logs/{name}_*.txt; --run_id {name} continues after a stop", flush=True)
    known = None if args.deviation is None else 2**0.5 * args.deviation  # of a difference
    limits = significance.thresholds(args.alpha, args.runs, known is not None)
    pairs, worth = [], None
    for pair in pairs_of(a, b, name, [args.seed + i for i in range(args.runs)]):
        pairs.append(pair)
        if len(pairs) == 1:
            worth = worth_of_time(a, pair[0], name, args.seed)
            if judge == "sooner" and not worth:
                raise UserError("--judge sooner needs the worth of time: use --judge loss")
        if len(pairs) < FEWEST:
            continue
        limit = limits[len(pairs) - FEWEST]
        numbers = numbers_of(pairs, worth)
        answers = answers_of(numbers, known, limit)
        text = verdict(answers)
        for kernel in sorted(pair[1].kernels_off.keys() - pair[0].kernels_off.keys()):
            text += f"; B ran without the kernel {kernel} ({pair[1].kernels_off[kernel]})"
        print_answers(answers, f"after {len(pairs)} pairs, of at most {args.runs}", limit, text)
        same = not any(numbers["loss"])
        if answers[judge]["answer"] != "open" or (same and judge == "loss"):
            break
    found = {"kind": "comparison", "run": name, "start": began.isoformat(timespec="seconds")}
    found |= {side: shlex.join(plan[side]) for side in "AB"} | {"pairs": len(pairs)}
    found |= {key: plan[key] for key in ("judge", "alpha", "runs", "seconds")}
    logs = [str(run.path) for pair in pairs for run in pair]
    result.note({**found, **answers, "verdict": text, "logs": logs})
    if args.plot:
        significance.draw_pairs(numbers, args.plot)


@console.program("run.sh")
def main(words: list[str]) -> None:
    """Compare as the flags say. UserError for a bad value."""
    if words == ["--help"]:
        return print(__doc__)
    texts = []
    if "--compare" in words:  # argparse would read "--fp8=off" as its own flag
        place = words.index("--compare")
        texts, words = words[place + 1 : place + 3], words[:place] + words[place + 3 :]
    # No help: run.sh prints the docstring itself, before packages are installed.
    parser = console.parser_of()
    parser.add_argument("--run_id", default=new_name())
    parser.add_argument("--judge", choices=tuple(QUESTIONS), default="loss")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--deviation", type=float)
    parser.add_argument("--alpha", type=float, default=ALPHA)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path)
    args, others = parser.parse_known_args(words)
    if len(texts) < 2:
        parser.error('--compare needs the flags of A and the flags of B, each in quotes, or ""')
    if not FEWEST <= args.runs <= 200:
        parser.error(f"--runs must be from {FEWEST} to 200 pairs")
    if not 0.001 <= args.alpha <= 0.5:
        parser.error("--alpha must be from 0.001 to 0.5")
    known = args.deviation
    if known is not None and (args.judge != "loss" or not 0 < known < math.inf):
        parser.error("--deviation needs a finite number above 0, and --judge loss")
    script.check_name(args.run_id)
    path, common = script.take_script(others)
    a, b = (Side.of(name, text, common, path) for name, text in zip("AB", texts, strict=True))
    if args.seconds is not None and launch.is_given("num_iterations", list(b.flags)):
        parser.error("--seconds chooses the number of steps: leave it or --num_iterations out")
    compare(a, b, args)


if __name__ == "__main__":
    main()
