"""How many steps take --seconds N on this machine? Real steps of the schedule are timed.

run.sh's commands use this. The steps are timed as tools/bench.py times them, by this file as a
program, on as many GPUs as the run will have. The time of a step depends on its kind, which is its
compiled code and the length of its sequences, and on its window. So three steps of each kind are
timed: with the smallest, the middle and the largest window. Between them, time is interpolated.

A time is remembered in logs/times.json, by a digest of source, settings, torch and machine.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
import time
from bisect import bisect_left
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

import process
import result
import script
from bench import RANK, RANKS, Timed, configuration, time_block
from logfile import OF_ONE_RUN
from train_gpt import Hyperparameters, UserError, all_reduce_, as_program, start_device

TIMES = Path("logs", "times.json")
ROUNDS = 15  # at most; in each, a block of steps is timed at each window
BLOCK_S = 0.2  # least time of a block, so that waiting for the GPU at its ends does not count
LATE = 1.1  # a run that takes so many times the seconds asked for should be timed again


# -----------------------------------------------------------------------------
# The program: time the schedule of a script


def shares_of(run: Timed) -> dict[int, float]:
    """Return the steps of a run's schedule that are timed, each with its share: the mean time of
    all steps is the sum of share * time. Where Adam learns at every second step only, a step and
    the next one are timed together, and count as one."""
    moments = [run.run_class.moment(step, run.hp) for step in range(run.hp.num_iterations)]
    moments = moments[:: run.every]
    kinds = defaultdict(list)
    for now in moments:
        kinds[now.graph_key, now.seq_len].append(now)
    shares = {}
    for of_kind in kinds.values():
        step_at = {now.window: now.step for now in of_kind}
        windows = sorted(step_at)
        few = sorted({windows[0], windows[len(windows) // 2], windows[-1]})
        for window, corner in zip(few, np.eye(len(few)), strict=True):
            # How much of the time at this window is in the interpolated time of each step.
            parts = np.interp([now.window for now in of_kind], few, corner)
            shares[step_at[window]] = float(parts.sum()) / len(moments)
    return shares


def time_schedule(run: Timed, budget: float) -> float:
    """Return the mean ms of a step. Each kind is timed once, then in rounds, as long as the next
    round fits into `budget` seconds."""
    begin, shares = time.perf_counter(), shares_of(run)
    times = defaultdict(list)  # step -> ms of its blocks
    counts = {}  # step -> number of steps in a block
    round_s = 0.0
    for step in shares:
        time_block(run, step, 1)  # reads data for the first time
        ms, _ = time_block(run, step, run.every)
        ms = all_reduce_(torch.tensor(ms, device=run.device)).item() / RANKS  # all count alike
        counts[step] = run.every * math.ceil(1e3 * BLOCK_S / ms / run.every)
        round_s += ms * counts[step] / 1e3
        if counts[step] == run.every:
            times[step].append(ms)
    for _ in range(ROUNDS):
        is_over = time.perf_counter() - begin + round_s > budget
        is_over = all_reduce_(torch.tensor(float(is_over), device=run.device)).item()
        for step, count in counts.items():
            if not (is_over and times[step]):
                times[step].append(time_block(run, step, count)[0])
        if is_over:
            break
    return sum(share * median(times[step]) for step, share in shares.items())


# -----------------------------------------------------------------------------
# The flag: from seconds to steps


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
    """Start this file as a program, and return what `time_schedule` returns of a script with these
    flags. UserError if it fails."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "ms.json")
        request = json.dumps([str(path), flags, budget, str(out)])
        hp, _ = script.parse(path, flags)
        status, reason = process.start(hp, [__file__, request])
        if status in result.STOPPED:
            raise KeyboardInterrupt
        if status:
            raise UserError(f"steps could not be timed: {reason}")
        return json.loads(out.read_text())


def machine_key(path: Path, hp: Hyperparameters) -> str:
    """Return a digest of all that the time of a step depends on."""
    settings = {name: value for name, value in vars(hp).items() if name not in OF_ONE_RUN}
    gpus = subprocess.run("nvidia-smi -L", shell=True, capture_output=True, text=True).stdout
    own = process.gpus_for(hp)
    count = process.processes(hp.batch_seqs, own)
    chosen = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")]
    machine = [platform.node(), gpus, own, count, chosen, os.cpu_count(), torch.__version__]
    text = json.dumps([result.digest(path), settings, machine])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def epochs_for(path: Path, flags: list[str]) -> int:
    """Return how often a run with these flags has to read its data: as often as the flags allow, or
    more often if the data is too short."""
    run_class = script.load(path)
    core, (hp, _) = script.core(run_class), script.parse(path, flags)
    process.fetch(hp, run_class)
    moments = [run_class.moment(step, hp) for step in range(hp.num_iterations + 1)]
    plan, steps = run_class.plan, hp.num_iterations

    def are_enough(epochs: int) -> bool:
        try:
            core.plan_batches(hp.train_files, replace(hp, epochs=epochs), steps, plan, moments)
        except UserError:
            return False
        return True

    if not are_enough(0):  # without a limit: the run will say what is wrong
        return hp.epochs
    possible = range(hp.epochs, hp.num_iterations + hp.epochs + 1)
    return possible[bisect_left(possible, True, key=are_enough)]


def flags_for(path: Path, flags: list[str], steps: int, most: int = 0) -> list[str]:
    """Return the flags that make so many steps. Lengths in steps are scaled, and the data is read
    more often if it is short for `most` steps (0: for `steps`). Flags that were given stay."""
    hp, _ = script.parse(path, flags)
    more = []
    for name, value in vars(hp).items():
        if name.endswith("_steps") and value and not is_given(name, flags):
            more += [f"--{name}", str(max(1, round(value * steps / hp.num_iterations)))]
    if not is_given("epochs", flags):
        epochs = epochs_for(path, [*flags, *more, "--num_iterations", str(most or steps)])
        if epochs != hp.epochs:
            more += ["--epochs", str(epochs)]
    return ["--num_iterations", str(steps), *more]


def remembered() -> dict[str, float]:
    """Return the known times of a step in ms, by machine_key."""
    return json.loads(TIMES.read_text()) if TIMES.exists() else {}


def with_steps(path: Path, flags: list[str], args: argparse.Namespace, longer=None) -> list[str]:
    """Return the flags with those that make a run take args.seconds; print them. `longer` returns
    for the number of steps that of the longest run, which needs data, too."""
    check(args.seconds, flags)
    key = machine_key(path, script.parse(path, flags)[0])
    ms = None if args.time_again else remembered().get(key)
    if ms is None:
        most = budget(args.seconds)
        print(f"timing steps: this takes about {most:.0f} s, and the time to compile", flush=True)
        ms = ms_per_step(path, flags, most)
        TIMES.parent.mkdir(exist_ok=True)
        unfinished = TIMES.with_suffix(".tmp")
        unfinished.write_text(json.dumps(remembered() | {key: ms}))
        unfinished.rename(TIMES)
    steps = max(1, round(1e3 * args.seconds / ms))
    more = flags_for(path, flags, steps, longer(steps) if longer else 0)
    text = f"--seconds {args.seconds:g}: {steps} steps of about {ms:.0f} ms:"
    print(text, *more, flush=True)
    return [*flags, *more]


def work() -> None:
    """Do what a request asks for, and write the ms into its file."""
    path, flags, budget, out = json.loads(sys.argv[1])
    chosen = configuration(Path(path), flags)
    device, _, _ = start_device(chosen.hp.device)
    ms = time_schedule(Timed(chosen, device), budget)
    if RANK == 0:
        Path(out).write_text(json.dumps(ms))


if __name__ == "__main__":
    as_program("run.sh", work)
