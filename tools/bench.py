"""How fast is this machine, and how fast is this change?

    ./run.sh tools/bench.py [SCRIPT.py] [--steps 20] [its flags]    time a record, or any flags
    ./run.sh tools/bench.py --vs "--fp8 off" [flags]                against a second configuration
    ./run.sh tools/bench.py --vs "my_fork.py --fp8 off" [flags]     of another script
    ./run.sh tools/bench.py --trace 2 [flags]                       also profile two steps
    ./run.sh tools/bench.py --mean 20 [flags]                       only the mean ms of a step
    NPROC=N ./run.sh tools/bench.py ...                             on N GPUs; the default is all

It times steps of the script (train_gpt.py if none is named) as a run makes them, at the first, the
middle and the last step of its schedule. Nothing is logged. A step takes the whole global batch;
--batch_seqs 1 measures one GPU quickly. Two configurations take turns, so both models are in
memory. `ratio` is the second one's time divided by the first one's, block by block: the median, the
lowest and the highest. `ceiling` are the TFLOP/s of a process's large matmuls: 790 on an H100.
warm_up_s has the compilation, and memory_gb is the peak of a step and a validation.

--mean N times the middle step of each ninth of the schedule, for about N seconds in all: the time
of a step depends on its window, its length and its compiled code. --seconds of run.sh uses it.
"""

import argparse
import os
import shlex
import sys
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from glob import glob
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

import console
import launch
import script
import train_gpt
from train_gpt import Moment, UserError, clock

ORIGINAL = dict(vars(train_gpt))  # before a fork replaces something
BLOCKS = 5  # of timed steps in a measurement; the median is reported
# Profiler events whose names begin so are launches of kernels, by CUDA's runtime or driver.
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel")
RANKS = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if RANKS > 1 else 0  # other programs may set RANK alone
BATCHES = 32  # different ones; then they repeat
PARTS = 9  # of the schedule
ROUNDS = 15  # at most; in each, a block of steps is timed in each part
BLOCK_S = 0.2  # least time of a block, so that waiting for the GPU at its ends does not count


class Timed:
    """A compiled and warmed-up model of a script with these flags, its optimizers and batches, and
    what to say of it. UserError for bad flags."""

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
        self.steps = 0, hp.num_iterations // 2, hp.num_iterations - 1  # those that are timed
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


def windows_of(runs: list[Timed], moment: int, steps: int) -> list[dict]:
    """Return the window of each run at the first (0), middle (1) or last (2) step of its schedule.
    The runs take turns after a block of steps, `steps` in all blocks together."""
    ceiling = matmul_tflops(runs[0].device)
    timed = time_in_turn([(run, run.steps[moment], steps // BLOCKS) for run in runs], BLOCKS)
    rows = []
    for i, run in enumerate(runs):
        hp, now = run.hp, run.moments[run.steps[moment]]
        blocks, inputs = zip(*timed[i], strict=True)
        ms, inputs = median(blocks), torch.cat(inputs)
        groups = run.optimizers.parameter_groups(run.model, hp)
        flops = model_flops(run.model, groups, inputs, now)
        flops = torch.tensor(flops, dtype=torch.float64, device=run.device)
        flops = train_gpt.all_reduce_(flops) * hp.batch_seqs / (RANKS * len(inputs))  # of a step
        matmul, attention = (1e-12 * flops).tolist()
        rate = 1e3 * (matmul + attention) / ms
        row = {"run": i, "step": now.step, "window": now.window, "ms_per_step": ms}
        row |= {"tokens_per_s": 1e3 * hp.batch_seqs * now.seq_len / ms}
        row |= {"matmul_tflop": matmul, "attention_tflop": attention, "tflop_per_s": rate}
        row |= {"ceiling": ceiling, "of_ceiling": rate / RANKS / ceiling, "blocks": blocks}
        rows.append(row)
        if i:
            ratios = [a / b for a, b in zip(blocks, rows[0]["blocks"], strict=True)]
            row |= {"ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
    return rows


def matmul_tflops(device: torch.device) -> float:
    """Return TFLOP/s of a process's large matmuls: in bfloat16 on a GPU, in float32 on a CPU. It is
    the median of measurements in a second."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    count = 10 if device.type == "cuda" else 1  # at once, so that launch overhead does not count
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    code, threads = "for _ in range(count): a @ b", torch.get_num_threads()
    measured = Timer(code, globals=locals(), num_threads=threads).blocked_autorange(min_run_time=1)
    return 2e-12 * n**3 * count / measured.median


def model_flops(
    model: train_gpt.GPT, groups: list[train_gpt.Group], inputs: Tensor, now: train_gpt.Moment
) -> tuple[float, float]:
    """Return the operations in matmuls and in attention that a step on inputs (n, T) requires,
    whatever the kernels compute. `groups` are of the model's parameters.

    Matmuls: 6 per token and matrix element (2 forward, 4 backward), with the padded head, without
    embeddings. Attention: 12 * heads * head_dim per pair of a query and a key that is visible to it
    under the layer's mask; paired heads share one of two positions for each token. Masked pairs,
    recomputation, norms, Newton-Schulz and the like are not counted.
    """
    pairs = Counter()
    long, short = torch.tensor(now.window), torch.tensor(now.short)
    for row in inputs:
        for name, mask in model.masks(row, long, short).items():
            if isinstance(mask, Tensor):
                visible = (mask == 0).sum(1)  # to each position
            else:  # block_lists, which begin with the first key that each position sees
                visible = 1 + torch.arange(len(mask[0]), device=row.device) - mask[0]
            pairs[name] += visible.sum().item() * len(row) / len(visible)
    seen = sum(pairs[layer.mask] for layer in model.layers)
    kinds = "head", "muon", "v", "attn_proj"
    matrices = [p for group in groups if group.name in kinds for p in group.params]
    matmul = 6.0 * inputs.numel() * sum(p.numel() for p in matrices)
    return matmul, 12.0 * model.hp.num_heads * model.hp.head_dim * seen


def trace_steps(run: Timed, count: int) -> dict:
    """Profile steps at the middle window, on all ranks; rank 0 writes its trace into logs/."""
    from torch.profiler import profile, record_function

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no log lines from the profiler
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
# The command line


def show(value) -> str:
    """Return a value as text: numbers have four digits, or all digits before the point."""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
    return str(value)


def tell(part: dict) -> None:
    """Print a part of the report, a value in each line."""
    print(*(f"{key:12}{show(value)}" for key, value in part.items()), "", sep="\n")


def work(args: argparse.Namespace) -> None:
    """Time the scripts, and print each part of the report when it is known. Rank 0 alone speaks."""
    doing = nullcontext if RANK or args.mean else console.doing
    device, _, _ = train_gpt.start_device(args.settings[0].device)
    if args.mean:
        return print(time_schedule(Timed(*args.sides[0], device), args.mean))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    machine = f"{RANKS} x {name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    tell({"machine": machine})
    runs, windows = [], []
    for path, flags in args.sides:
        with doing(f"compiling and warming up {shlex.join([script.show(path), *flags])}"):
            runs.append(Timed(path, flags, device))
        tell({"run": len(runs) - 1, **runs[-1].report})
    for moment in range(3):
        with doing(f"timing step {runs[0].steps[moment]}"):
            windows += windows_of(runs, moment, args.steps)
    keys = [key for key in windows[-1] if key != "blocks"]
    console.print_table([keys, *([show(row.get(key, "-")) for key in keys] for row in windows)])
    if args.trace:
        with doing("profiling, and writing the trace"):
            trace = trace_steps(runs[0], args.trace)
        tell(trace)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Return bench.py's flags, the scripts with theirs, and settings. UserError for bad ones."""
    parser = console.parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="timed at each window")
    parser.add_argument("--vs", metavar="FLAGS", type=shlex.split, help="also time these flags")
    parser.add_argument("--trace", type=int, default=0, metavar="N", help="also profile N steps")
    parser.add_argument("--mean", type=float, metavar="SECONDS", help="time the whole schedule")
    args, flags = parser.parse_known_args(argv)
    if args.steps < BLOCKS or args.trace < 0:
        parser.error(f"--steps must be at least {BLOCKS}, and --trace 0 or more")
    path, flags = script.take_script(flags)
    args.sides = [(path, flags)]
    if args.vs is not None:
        if args.vs and args.vs[0].endswith(".py"):
            path = script.find(args.vs.pop(0))
        args.sides.append((path, flags + args.vs))
    args.settings = [script.parse(*side)[0] for side in args.sides]
    if len({hp.device for hp in args.settings}) > 1:
        parser.error("--vs cannot change --device: run bench.py once for each")
    replaced = [name for name in ORIGINAL if vars(train_gpt)[name] is not ORIGINAL[name]]
    if replaced and len({path for path, _ in args.sides}) > 1:
        found = f"a fork replaces train_gpt.{replaced[0]}, here for both"
        parser.error(f"--vs: {found}: use ./run.sh --compare A B --judge time")
    return args


@console.program("bench.py")
def main(words: list[str]) -> None:
    """Time what the flags name, in a process for each GPU, of which this may be one."""
    args = parse_args(words)
    if RANKS == 1:
        counts = {launch.processes(hp.batch_seqs, launch.gpus_for(hp)) for hp in args.settings}
        if len(counts) > 1:
            raise UserError("--vs: the two run on different numbers of GPUs: set NPROC")
        if counts != {1}:
            print(f"bench.py: starting {min(counts)} processes", file=sys.stderr, flush=True)
            sys.exit(launch.start(args.settings[0], [__file__, *words]).status)
    work(args)


if __name__ == "__main__":
    main()
