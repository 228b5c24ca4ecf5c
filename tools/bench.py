"""How fast is this machine, and how fast is this change?

    ./run.sh tools/bench.py [SCRIPT.py] [--steps 20] [its flags]    time a record, or any flags
    ./run.sh tools/bench.py --vs "--fp8 off" [flags]                against a second configuration
    ./run.sh tools/bench.py --vs "my_fork.py --fp8 off" [flags]     of another script
    ./run.sh tools/bench.py --trace 2 [flags]                       profile two steps, too
    torchrun --standalone --nproc_per_node=N tools/bench.py ...     on N GPUs; rank 0 prints

Model, optimizers, batches and steps are those of the script, which is train_gpt.py unless another
one is named. Nothing is logged. A step has the whole global batch; with --batch_seqs 1, one GPU is
measured quickly. Steps are timed at the first, the middle and the last step of the schedule. Steps
of two configurations take turns, so both models are in memory: the sum of both memory_gb.

--json prints one object at the end: machine, runs, windows, trace (path, table, and a step's
launches of kernels). A run has: script, record, flags, data, compiled, notes (chosen kernels),
warm_up_s (with compilation), memory_gb (the peak of a step and a validation, on a GPU). A window
has: run (its number), step, window, ms_per_step, tokens_per_s, matmul_tflop and attention_tflop of
a step, tflop_per_s, ceiling (TFLOP/s of a process's large matmuls: 790 on an H100), of_ceiling,
blocks (their median is ms_per_step) and, from the second run on, ratio, lowest and highest: its
time divided by the first run's, block by block.
"""

import argparse
import json
import os
import shlex
import time
from collections import Counter
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.profiler import profile, record_function

import script
import train_gpt
from train_gpt import UserError, clock

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ORIGINAL = dict(vars(train_gpt))  # before a fork replaces something
BLOCKS = 5  # of timed steps in a measurement; the median is reported
BATCHES = 32  # different ones; then they come again
# Profiler events whose names begin so are launches of kernels, by CUDA's runtime or driver.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel")


# -----------------------------------------------------------------------------
# A run, ready to be timed


@dataclass(frozen=True)
class Configuration:
    """A script, its flags, and the settings that they give."""

    script: Path
    flags: list[str]
    run_class: type[train_gpt.Run]
    hp: train_gpt.Hyperparameters
    record: str


def configuration(path: Path, flags: list[str]) -> Configuration:
    """Return the configuration of a script with these flags. UserError for bad flags."""
    return Configuration(path, flags, script.load(path), *script.parse(path, flags))


class Timed:
    """A compiled and warmed-up model, its optimizers and batches, and its report for --json."""

    def __init__(self, chosen: Configuration, device: torch.device):
        self.hp, self.device = chosen.hp, device
        self.run_class = run_class = chosen.run_class
        self.core = core = script.core(run_class)
        hp = chosen.hp
        self.data = hp.train_files
        if not glob(self.data):
            self.data = train_gpt.RECORDS["demo"].train_files  # if no FineWeb has been fetched
        self.every = getattr(hp, "adam_every", 1)  # a setting of forks/train_gpt_2026.py
        self.batches, self.made = {}, 0
        notes = []
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start = clock(device)
        self.in_use = core.choose_kernels.__globals__.get("IN_USE", {})
        self.model = core.build(run_class, hp, device)
        self.compiled = core.compiled.allowed
        self.optimizers = run_class.optimizers_class(self.model, hp, RANK, RANKS)
        moments = [run_class.moment(step, hp) for step in range(hp.num_iterations + 1)]
        core.warm_up(self.model, self.optimizers, moments, device, log=notes.append)
        self.report = {
            "script": script.show(chosen.script),
            "record": chosen.record,
            "flags": shlex.join(chosen.flags),
            "data": self.data,
            "compiled": self.compiled,
            "notes": "; ".join(notes),
            "warm_up_s": clock(device) - start,
        }
        self.kernels = dict(self.in_use)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.step(self.steps[-1])
            tokens = torch.arange(hp.val_seq_len, device=device)[None] % hp.vocab_size
            core.evaluate(self.model, (tokens.int(), tokens), moments[-1], device)
            self.report["memory_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9

    @property
    def steps(self) -> tuple[int, int, int]:
        """The first, the middle and the last step of the schedule."""
        return 0, self.hp.num_iterations // 2, self.hp.num_iterations - 1

    def step(self, step: int) -> Tensor:
        """Train on the next batch as a run does at this step, and return the inputs (n, T). Where
        Adam steps only every second time, so it does in every second call."""
        if self.in_use != self.kernels:  # those of the other run
            self.in_use.clear()
            self.in_use.update(self.kernels)
        self.core.compiled.allowed = self.compiled
        if step not in self.batches:
            self.batches[step] = self.batches_of(self.run_class.moment(step, self.hp))
        inputs, targets = next(self.batches[step])
        self.made += 1
        now = self.run_class.moment(step - step % self.every + self.made % self.every, self.hp)
        self.core.train_step(self.model, self.optimizers, inputs, targets, now)
        return inputs

    def batches_of(self, now: train_gpt.Moment):
        """Yield batches without end, all as long as at this moment."""
        hp, plan = replace(self.hp, epochs=0), self.run_class.plan
        planned = self.core.plan_batches(self.data, hp, BATCHES, plan, [now] * (BATCHES + 1))
        while True:
            yield from self.core.distributed_data_generator(planned, RANK, RANKS, self.device)


def time_block(run: Timed, step: int, count: int) -> tuple[float, list[Tensor]]:
    """Train `count` times as at a step of the schedule. Return ms per step, and all inputs."""
    start = clock(run.device)
    inputs = [run.step(step) for _ in range(count)]
    return 1e3 * (clock(run.device) - start) / count, inputs


def time_in_turn(runs: list[Timed], moment: int, steps: int) -> list[dict]:
    """Return the window of each run at the first (0), middle (1) or last (2) step of its schedule.
    The runs take turns (A B A B) after a block of steps, `steps` in all blocks together."""
    ceiling = matmul_tflops(runs[0].device, 1.0)
    blocks, inputs = [[] for _ in runs], [[] for _ in runs]
    for run in runs:
        run.step(run.steps[moment])  # before the clock starts
    for _ in range(BLOCKS):
        for i, run in enumerate(runs):
            ms, read = time_block(run, run.steps[moment], steps // BLOCKS)
            blocks[i].append(ms)
            inputs[i] += read
    rows = []
    for i, run in enumerate(runs):
        row = {"run": i, **window_of(run, run.steps[moment], blocks[i], inputs[i], ceiling)}
        if i:
            ratios = [here / first for here, first in zip(blocks[i], blocks[0], strict=True)]
            row |= {"ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
        rows.append(row)
    return rows


def window_of(run: Timed, step: int, blocks: list[float], inputs: list, ceiling: float) -> dict:
    """Return a row of `windows` from the blocks' ms/step and the inputs of all timed steps."""
    hp, ms = run.hp, median(blocks)
    now = run.run_class.moment(step, hp)
    flops = model_flops(run.run_class, run.model, torch.cat(inputs), now)
    total = train_gpt.all_reduce_(torch.tensor(flops, dtype=torch.float64, device=run.device))
    matmul, attention = (1e-12 * total / len(inputs)).tolist()
    rate = 1e3 * (matmul + attention) / ms
    return {
        "step": step,
        "window": now.window,
        "ms_per_step": ms,
        "tokens_per_s": 1e3 * hp.batch_seqs * now.seq_len / ms,
        "matmul_tflop": matmul,
        "attention_tflop": attention,
        "tflop_per_s": rate,
        "ceiling": ceiling,
        "of_ceiling": rate / RANKS / ceiling,
        "blocks": blocks,
    }


def trace_steps(run: Timed, count: int) -> dict:
    """Profile steps at the middle window, on all ranks; rank 0 writes its trace into logs/."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no log lines of the profiler
    with profile() as profiled:
        for _ in range(count):
            with record_function("step"):
                run.step(run.steps[1])
        clock(run.device)  # waits for the GPU
    path = Path("logs", time.strftime("trace_%Y-%m-%d_%H-%M-%S.json"))
    if RANK == 0:
        path.parent.mkdir(exist_ok=True)
        profiled.export_chrome_trace(str(path))
    averages = profiled.key_averages()
    launches = sum(e.count for e in averages if e.key.startswith(LAUNCHES)) / count
    table = "\n" + averages.table(f"self_{run.device.type}_time_total", row_limit=12)
    return {"path": str(path), "launches": launches, "table": table}


# -----------------------------------------------------------------------------
# Counted operations, and measured rates


def visible_pairs(mask: tuple | Tensor) -> int:
    """Return the pairs of a token and a key that a mask of model.masks leaves visible."""
    if isinstance(mask, Tensor):
        return (mask == 0).sum().item()
    first = mask[0]  # of block_lists: the first key that each token sees
    return (torch.arange(1, len(first) + 1, device=first.device) - first).sum().item()


def model_flops(
    run_class: type[train_gpt.Run], model: train_gpt.GPT, inputs: Tensor, now: train_gpt.Moment
) -> tuple[float, float]:
    """Return the operations in matmuls and in attention that a step on inputs (n, T) requires,
    whatever the kernels compute.

    Matmuls: 6 per token and matrix element (2 forward, 4 backward), with the padded head, without
    embeddings. Attention: 12 * heads * head_dim per pair of a token and a key that is visible to it
    under the layer's window. Masked pairs, recomputation, norms, Newton-Schulz and the like are not
    counted. Paired heads attend as one, to two positions per token: they count half.
    """
    pairs = Counter()
    for row in inputs:
        for name, mask in model.masks(row, now).items():
            pairs[name] += visible_pairs(mask)
    seen = 0
    for layer in model.layers:
        # Only layers of forks have a mask of their own and paired heads.
        count = pairs[getattr(layer, "mask", layer.window)]
        seen += count / 2 if getattr(layer, "paired", False) else count
    elements = 0
    for group in run_class.optimizers_class.groups_of(model, model.hp):
        if group.name in ("head", "muon"):
            elements += sum(p.numel() for p in group.params)
    matmul = 6.0 * inputs.numel() * elements
    return matmul, 12.0 * model.hp.num_heads * model.hp.head_dim * seen


def matmul_tflops(device: torch.device, seconds: float) -> float:
    """Return TFLOP/s of a process's large matmuls: in bfloat16 on a GPU, in float32 on a CPU. It is
    the median of at least 3 measurements in about `seconds`."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    count = 10 if device.type == "cuda" else 1  # at once, so that launch overhead does not count
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    a @ b
    times = []
    end = clock(device) + seconds
    while len(times) < 3 or clock(device) < end:
        start = clock(device)
        for _ in range(count):
            a @ b
        times.append(clock(device) - start)
    return 2e-12 * n**3 * count / median(times)


# -----------------------------------------------------------------------------
# The command line


def show(value) -> str:
    """Return a value as text: numbers have four digits, or all digits before the point."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
    return str(value)


def print_part(part: dict | str) -> None:
    """Print a line, or a line for each key."""
    lines = [part]
    if isinstance(part, dict):
        lines = [f"{name:12}{show(value)}" for name, value in part.items()] + [""]
    print("\n".join(lines), flush=True)


def work(args: argparse.Namespace) -> None:
    """Time the configurations, and print each part of the report when it is known."""
    device, _, _ = train_gpt.start_device(args.configurations[0].hp.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    machine = f"{RANKS} x {name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    tell = (lambda _: None) if args.json else print_part
    tell({"machine": machine})
    runs, windows = [], []
    for i, chosen in enumerate(args.configurations):
        runs.append(Timed(chosen, device))
        tell({"run": i, **runs[i].report})
    for moment in range(3):
        rows = time_in_turn(runs, moment, args.steps)
        windows += rows
        titles = [title for title in rows[-1] if title != "blocks"]
        if moment == 0:
            tell("  ".join(titles))
        for row in rows:
            tell("  ".join(show(row.get(title, "")).rjust(len(title)) for title in titles))
    report = {"machine": machine, "runs": [run.report for run in runs], "windows": windows}
    if args.trace:
        report["trace"] = trace_steps(runs[0], args.trace)
        tell(report["trace"])
    if args.json:
        print(json.dumps(report, indent=1))


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Return bench.py's own flags, and the configurations to time; UserError for a bad value."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.error = script.fail
    text = f"timed steps per window, at least {BLOCKS} [20]"
    parser.add_argument("--steps", type=int, default=20, metavar="N", help=text)
    parser.add_argument("--vs", metavar="FLAGS", type=shlex.split, help="also time these flags")
    text = "profile N steps and write a trace [0]"
    parser.add_argument("--trace", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    args, flags = parser.parse_known_args(argv)
    if args.steps < BLOCKS or args.trace < 0:
        parser.error(f"--steps must be at least {BLOCKS}, and --trace 0 or more")
    path, flags = script.take_script(flags)
    args.configurations = [configuration(path, flags)]
    if args.vs is not None:
        if args.vs and args.vs[0].endswith(".py"):
            path = script.find(args.vs.pop(0))
        args.configurations.append(configuration(path, flags + args.vs))
        if len({chosen.hp.device for chosen in args.configurations}) > 1:
            parser.error("--vs cannot change --device: run bench.py once for each")
        replaced = [name for name in ORIGINAL if vars(train_gpt)[name] is not ORIGINAL[name]]
        if replaced and len({chosen.script for chosen in args.configurations}) > 1:
            found = f"a fork replaces train_gpt.{replaced[0]}, here for both scripts"
            parser.error(f"--vs: {found}: use ./run.sh --compare A B --judge time")
    return args


def bench(argv: list[str] | None) -> None:
    """Time what the flags name; UserError if two models do not fit into a GPU."""
    args = parse_args(argv)
    try:
        work(args)
    except torch.OutOfMemoryError as error:
        if args.vs is None:
            raise
        reason = "out of GPU memory, which held the models of both configurations"
        raise UserError(f"{reason}: time each of them without --vs") from error


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors are one line, as in train_gpt.py."""
    train_gpt.as_program("bench.py", lambda: bench(argv))


if __name__ == "__main__":
    main()
