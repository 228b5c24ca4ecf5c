"""How long does a step take, and how many steps take --seconds N? Times steps as a run makes them.

`steps_in` starts this file as a program, on as many GPUs as the run will use:

    timing.py FILE SECONDS SCRIPT.py [flags]    write the mean ms of a step of the schedule to FILE

The time of a step depends on its window, its length and its compiled code. So the middle step of
each ninth of the schedule is timed. Times differ from one call to the next: runs that need equal
steps take the flags that the first one has printed.
"""

import math
import os
import shlex
import sys
from dataclasses import replace
from glob import glob
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import console
import launch
import result
import script
import train_gpt
from train_gpt import Moment, UserError, clock

RANKS = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if RANKS > 1 else 0  # other programs may set RANK alone
BATCHES = 32  # different ones; then they repeat
PARTS = 9  # of the schedule
ROUNDS = 15  # at most; in each, a block of steps is timed in each part
BLOCK_S = 0.2  # least time of a block, so that waiting for the GPU at its ends does not count


class Timed:
    """A compiled and warmed-up model of a script with these flags, its optimizers and batches, and
    its report for bench.py. UserError for bad flags."""

    def __init__(self, path: Path, flags: list[str], device: torch.device):
        hp, record = script.parse(path, flags)
        if not glob(hp.train_files):  # no FineWeb has been fetched: the sample corpus is read
            demo = train_gpt.RECORDS["demo"]
            hp = replace(hp, train_files=demo.train_files, end_of_text=demo.end_of_text)
        self.data = hp.train_files
        run_class = script.load(path)
        self.core = core = script.core(run_class)
        self.hp, self.run_class, self.device = hp, run_class, device
        self.batches, self.made = {}, 0
        self.moments = [run_class.Moment(step, hp) for step in range(hp.num_iterations + 1)]
        self.steps = 0, hp.num_iterations // 2, hp.num_iterations - 1  # those that bench.py times
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start, notes = clock(device), []
        self.model = core.build(run_class, hp, device)
        self.compiled = core.compilation.allowed
        begins_from = core.beginning(run_class, replace(hp, resume=False), self.model)
        self.optimizers = run_class.Optimizers(self.model, hp, RANK, RANKS)
        self.every = min(self.optimizers.period, hp.num_iterations)
        if core.gpu_kernels:
            core.gpu_kernels.choose_kernels(self.model, hp, device, core.all_reduce_, notes.append)
        run_class.warm_up(self.model, self.optimizers, self.moments, device)
        core.restore(self.model, self.optimizers, begins_from)
        self.kernels = set(core.IN_USE)
        self.report = {"script": script.show(path), "record": record, "flags": shlex.join(flags)}
        self.report |= {"data": self.data, "compiled": self.compiled, "notes": "; ".join(notes)}
        self.report["warm_up_s"] = clock(device) - start
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step(self.steps[-1])
            tokens = torch.arange(hp.val_seq_len, device=device)[None] % hp.vocab_size
            core.evaluate(self.model, (tokens.int(), tokens), self.moments[-1], device)
            self.report["memory_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9

    def step(self, step: int) -> Tensor:
        """Train on the next batch as a run does at this step, and return the inputs (n, T). If
        Adam learns only at every second step, it learns in every second call."""
        self.core.IN_USE.clear()  # of kernels of another model in this process
        self.core.IN_USE.update(self.kernels)
        self.core.compilation.allowed = self.compiled
        if step not in self.batches:
            self.batches[step] = self.batches_of(self.moments[step])
        inputs, targets = next(self.batches[step])
        self.made += 1
        cycle = self.moments[step - step % self.every :][: self.every]
        now = cycle[self.made % len(cycle)]
        self.core.train_step(self.model, self.optimizers, inputs, targets, now)
        return inputs

    def batches_of(self, now: Moment):
        """Yield batches without end, all as long as at this moment."""
        hp, plan = replace(self.hp, epochs=0), self.run_class.plan
        batches = self.core.plan_batches(self.data, hp, BATCHES, plan, [now] * (BATCHES + 1))
        while True:
            yield from self.core.distributed_data_generator(batches, hp, RANK, RANKS, self.device)


def time_in_turn(blocks: list[tuple[Timed, int, int]], rounds: int) -> list[list[tuple]]:
    """Make blocks of steps in turn (A B A B): each is a model, a step of its schedule, and a count.
    Return for each of them, by rounds, the ms per step and the inputs (n, T)."""
    for run, step, _ in blocks:
        if step not in run.batches:
            run.step(step)  # reads data for the first time
    timed = [[] for _ in blocks]
    for _ in range(rounds):
        for (run, step, count), found in zip(blocks, timed, strict=True):
            start = clock(run.device)
            inputs = [run.step(step) for _ in range(count)]
            found.append((1e3 * (clock(run.device) - start) / count, torch.cat(inputs)))
    return timed


def time_schedule(run: Timed, budget: float) -> float:
    """Return the mean ms of a step, from the medians of as many rounds as fit into `budget` seconds
    beside a first, short one. Steps are timed in whole cycles."""
    cycles = (len(run.moments) - 1) // run.every
    steps = sorted({run.every * int((i + 0.5) / PARTS * cycles) for i in range(PARTS)})
    first = time_in_turn([(run, step, run.every) for step in steps], 1)
    ms = torch.tensor([blocks[0][0] for blocks in first], device=run.device)
    ms = (train_gpt.all_reduce_(ms) / RANKS).cpu().numpy()  # so all ranks make the same steps
    counts = run.every * np.ceil(1e3 * BLOCK_S / ms / run.every).astype(int)
    rounds = (1e3 * budget - (1 + run.every) * ms.sum()) // (counts @ ms)
    blocks = [(run, *block) for block in zip(steps, counts, strict=True)]
    timed = time_in_turn(blocks, int(np.clip(rounds, 0, ROUNDS)))
    timed = [one + more for one, more in zip(first, timed, strict=True)]
    return float(np.mean([np.median([ms for ms, _ in of_step]) for of_step in timed]))


# -----------------------------------------------------------------------------
# --seconds N, as a number of steps


def is_given(name: str, flags: list[str]) -> bool:
    """Return whether a setting is among the flags."""
    return any(word.split("=")[0] == f"--{name}" for word in flags)


def ms_per_step(path: Path, flags: list[str], budget: float) -> float:
    """Return the mean ms of a step of a script with these flags, timed for about `budget` seconds.
    UserError if that fails."""
    hp, _ = script.parse(path, flags)
    what = f"timing steps of {script.show(path)}, up to {budget:.0f} s after compilation"
    with NamedTemporaryFile("r") as out, console.doing(what):
        words = [__file__, out.name, str(budget), str(path), *flags]
        end = launch.start(hp, words)
        if end.status in result.STOPPED:
            raise KeyboardInterrupt
        if end.status:
            raise UserError(f"steps could not be timed: {end.reason}")
        return float(out.read())


def steps_in(seconds: float, path: Path, flags: list[str]) -> int:
    """Return how many steps of a script with these flags take so many seconds of training; print
    that, and flags_for ends the line. UserError for a number that cannot be met."""
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds {seconds:g}: must be a finite number above 0")
    for name in ("num_iterations", "resume"):
        if is_given(name, flags):
            raise UserError(f"--seconds chooses the number of steps anew: leave it or --{name} out")
    ms = ms_per_step(path, flags, min(max(seconds / 10, 20.0), 5 * seconds))
    steps = max(1, round(1e3 * seconds / ms))
    print(f"--seconds {seconds:g}: {steps} steps of about {ms:.0f} ms", end="; ", flush=True)
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


@console.program("timing.py")
def main(words: list[str]) -> None:
    """Time the schedule of a script, and write the ms of a step into a file."""
    if len(words) < 3:
        raise UserError("--seconds starts this: timing.py FILE SECONDS SCRIPT.py [flags]")
    out, budget, path, *flags = words
    path = script.find(path)
    device, _, _ = train_gpt.start_device(script.parse(path, flags)[0].device)
    ms = time_schedule(Timed(path, flags, device), float(budget))
    if RANK == 0:
        Path(out).write_text(str(ms))


if __name__ == "__main__":
    main()
