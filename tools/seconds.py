"""How many steps take --seconds N on this machine? run.sh's commands use this.

tools/timing.py times steps of the schedule, on as many GPUs as the run will use. Times differ from
one call to the next: runs that need equal steps take them from the first one, by --like.
"""

import math
from pathlib import Path
from tempfile import NamedTemporaryFile

import console
import launch
import result
import script
from train_gpt import HERE, UserError


def is_given(name: str, flags: list[str]) -> bool:
    """Return whether a setting is among the flags."""
    return any(word.split("=")[0] == f"--{name}" for word in flags)


def ms_per_step(path: Path, flags: list[str], budget: float) -> float:
    """Return the mean ms of a step of a script with these flags, timed for about `budget` seconds.
    UserError if that fails."""
    hp, _ = script.parse(path, flags)
    with NamedTemporaryFile("r") as out, console.doing(f"timing steps of {script.show(path)}"):
        words = [f"{HERE}/tools/timing.py", out.name, str(budget), str(path), *flags]
        end = launch.start(hp, words)
        if end.status in result.STOPPED:
            raise KeyboardInterrupt
        if end.status:
            raise UserError(f"steps could not be timed: {end.reason}")
        return float(out.read())


def steps_in(seconds: float, path: Path, flags: list[str]) -> int:
    """Return how many steps of a script with these flags take so many seconds of training; print
    that. UserError for a number that cannot be met."""
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds {seconds:g}: must be a finite number above 0")
    for name in ("num_iterations", "resume"):
        if is_given(name, flags):
            raise UserError(f"--seconds chooses the number of steps anew: leave it or --{name} out")
    budget = max(seconds / 10, 20.0)
    print(f"timing steps: up to {budget:.0f} s, after the time to compile", flush=True)
    ms = ms_per_step(path, flags, budget)
    steps = max(1, round(1e3 * seconds / ms))
    print(f"--seconds {seconds:g}: {steps} steps of about {ms:.0f} ms", flush=True)
    return steps


def flags_for(path: Path, flags: list[str], steps: int, label: str) -> list[str]:
    """Return the flags that make so many steps; print them with a label. Steps at which something
    begins, and lengths in steps, are scaled; data that is too short is read again. Flags that were
    given stay."""
    hp, _ = script.parse(path, flags)
    more = ["--num_iterations", str(steps)]
    for name, value in vars(hp).items():
        if name.endswith(("_steps", "_from")) and value and not is_given(name, flags):
            unit = 4 if name.endswith("_from") else 1  # as the n-gram table's ngram_slow_from needs
            scaled = value * steps / hp.num_iterations
            more += [f"--{name}", str(unit * max(1, round(scaled / unit)))]
    if not is_given("epochs", flags):
        more += ["--epochs", "0"]
    print(f"{label}:", *more, flush=True)
    return more
