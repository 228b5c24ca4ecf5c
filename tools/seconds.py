"""How many steps take --seconds N on this machine? run.sh's commands use this.

tools/timing.py times steps of the schedule, on as many GPUs as the run will have. The time of a
step is remembered in logs/times.json, by a digest of source, settings, torch and machine.
"""

import argparse
import hashlib
import json
import math
import os
import platform
from pathlib import Path
from tempfile import NamedTemporaryFile

import torch

import console
import launch
import machine
import result
import script
from logfile import OF_ONE_RUN
from train_gpt import HERE, Hyperparameters, UserError

TIMES = Path("logs", "times.json")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add --seconds and --time_again to a command's flags."""
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--time_again", action="store_true")  # --compare always does


def is_given(name: str, flags: list[str]) -> bool:
    """Return whether a setting is among the flags."""
    return any(word.split("=")[0] == f"--{name}" for word in flags)


def check(seconds: float, flags: list[str]) -> None:
    """Raise UserError for a number of seconds that cannot be met."""
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds {seconds:g}: must be a finite number above 0")
    if is_given("num_iterations", flags):
        raise UserError("--seconds chooses --num_iterations: leave one of them out")


def budget(seconds: float) -> float:
    """Return for how many seconds steps are timed, if a run is to take `seconds`."""
    return max(seconds / 10, 20.0)


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


def machine_key(path: Path, hp: Hyperparameters) -> str:
    """Return a digest of all that the time of a step depends on."""
    settings = {name: value for name, value in vars(hp).items() if name not in OF_ONE_RUN}
    own = launch.gpus_for(hp)
    count = launch.processes(hp.batch_seqs, own)
    chosen = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    here = [platform.node(), machine.nvidia_smi("-L"), os.cpu_count(), torch.__version__]
    text = json.dumps([result.digest(path), settings, own, count, chosen, here])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def flags_for(path: Path, flags: list[str], steps: int, most: int = 0) -> list[str]:
    """Return the flags that make so many steps. Lengths in steps are scaled, and data that is short
    for `most` steps (0: for `steps`) is read without a limit. Flags that were given stay."""
    hp, _ = script.parse(path, flags)
    more = []
    for name, value in vars(hp).items():
        if name.endswith("_steps") and value and not is_given(name, flags):
            more += [f"--{name}", str(max(1, round(value * steps / hp.num_iterations)))]
    if not is_given("epochs", flags):
        hp, _ = script.parse(path, [*flags, *more, "--num_iterations", str(most or steps)])
        run_class = script.load(path)
        launch.fetch(hp, run_class)
        moments = [run_class.moment(step, hp) for step in range(hp.num_iterations + 1)]
        plan_batches = script.core(run_class).plan_batches
        try:
            plan_batches(hp.train_files, hp, hp.num_iterations, run_class.plan, moments)
        except UserError:  # if it is another one, the run will say so
            more += ["--epochs", "0"]
    return ["--num_iterations", str(steps), *more]


def with_steps(path: Path, flags: list[str], args: argparse.Namespace) -> list[str]:
    """Return the flags with those that make a run take args.seconds; print them."""
    check(args.seconds, flags)
    key = machine_key(path, script.parse(path, flags)[0])
    times = json.loads(TIMES.read_text()) if TIMES.exists() else {}
    if args.time_again or key not in times:
        most = budget(args.seconds)
        print(f"timing steps: up to {most:.0f} s, after the time to compile", flush=True)
        times[key] = ms_per_step(path, flags, most)
        TIMES.parent.mkdir(exist_ok=True)
        unfinished = TIMES.with_suffix(".tmp")
        unfinished.write_text(json.dumps(times))
        unfinished.rename(TIMES)
    steps = max(1, round(1e3 * args.seconds / times[key]))
    more = flags_for(path, flags, steps)
    text = f"--seconds {args.seconds:g}: {steps} steps of about {times[key]:.0f} ms:"
    print(text, *more, flush=True)
    return [*flags, *more]
