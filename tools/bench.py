"""How fast is this machine, and how fast is this change?

    ./run.sh tools/bench.py [SCRIPT.py] [--steps 20] [its flags]    time a record, or any flags
    ./run.sh tools/bench.py --vs "--fp8 off" [flags]                against a second configuration
    ./run.sh tools/bench.py --vs "my_fork.py --fp8 off" [flags]     of another script
    ./run.sh tools/bench.py --trace 2 [flags]                       profile two steps, too
    ./run.sh tools/bench.py --calibrate                             is my machine slow?
    torchrun --standalone --nproc_per_node=N tools/bench.py ...     on N GPUs; rank 0 prints

Model, optimizers, batches and steps are those of the script, which is train_gpt.py unless another
one is named. Nothing is logged. A step has the whole global batch; --micro_batches 1 is a quick
measurement with one sequence per process.

Keys of --json: machine, script, record, flags, data, batch, compiled, notes (chosen kernels),
start_s (seconds of the warm-up and, on one GPU, of a cold and a warm start), memory_gb (peaks of
training and validation, on a GPU), newton_schulz_tflop (per step, not part of tflop_per_s),
windows, vs, trace (path, table).

windows are measured at the first, the middle and the last step: step, window, ms_per_step,
ms_per_micro_batch, tokens_per_s, matmul_tflop, attention_tflop, tflop_per_s, ceiling (TFLOP/s of a
process's large matmuls), of_ceiling, blocks (their median is ms_per_step) and, if a profile shows
any, launches (of kernels) and collectives, per process and step. vs has the same keys for the
second configuration; its windows have ratio, lowest and highest, too.

With --calibrate: machine, rates (here, H100, share), estimated_minutes (published, and what they
become on this machine by_matmuls alone and by_memory alone; expect something in between).
"""

import argparse
import inspect
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.profiler import profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import records  # noqa: E402
import script  # noqa: E402

import train_gpt  # noqa: E402
from train_gpt import HERE, UserError, clock  # noqa: E402

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BLOCKS = 5  # of timed steps in a measurement; the median is reported
BATCHES = 32  # different ones; then they come again
# Counted are profiler events whose names begin so: calls of CUDA's runtime or driver that launch
# a kernel, and operations of torch.distributed.
EVENTS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchCooperativeKernel", "cuLaunchKernel"),
    "collectives": ("c10d::",),
}
# Measured on one H100 (bfloat16 matmuls, copies); the all-reduce rate is expected of 8 with NVLink.
H100 = {"matmul TFLOP/s": 790.0, "memory GB/s": 3000.0, "all-reduce GB/s": 370.0}
# Operations of all steps of the demo, divided by 0.6: the share of the matmul rate that the demo
# reaches on a CPU without fast bfloat16 (BENCHMARKS.md).
DEMO_TFLOP = 128 * 0.0897 / 0.6


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
    """Return the configuration of a new run. UserError for flags that cannot be timed."""
    run_class = script.load(path)
    hp, record = script.core(run_class).parse_args(flags, run_class)
    if hp.resume:
        raise UserError(f"--resume is for {path.name}: bench.py times a new run")
    return Configuration(path, flags, run_class, hp, record)


class Timed:
    """A compiled and warmed-up model, its optimizers and batches, and its report for --json."""

    def __init__(self, chosen: Configuration, device: torch.device):
        self.hp, self.device = chosen.hp, device
        self.run_class = run_class = chosen.run_class
        self.core = core = script.core(run_class)
        hp = chosen.hp
        self.steps = 0, hp.num_iterations // 2, hp.num_iterations - 1
        self.data = hp.train_files
        if not glob(self.data):
            self.data = train_gpt.RECORDS["demo"].train_files  # if no FineWeb has been fetched
        self.every = getattr(hp, "adam_every", 1)  # a setting of forks/train_gpt_2026.py
        self.batches, self.made = {}, 0
        notes = []
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start = clock(device)
        # What gpu_kernels.py knows by name may be of the other run's script.
        kernels = core.choose_kernels.__globals__
        self.in_use, plain = kernels.get("IN_USE", {}), kernels.get("PLAIN", {})
        plain |= {name: inspect.unwrap(vars(core)[name]) for name in plain if name in vars(core)}
        self.model = model = core.build(run_class, hp, device)
        self.compiled = core.compiled.allowed
        self.optimizers = run_class.optimizers_class(model, hp, RANK, RANKS)
        moments = [run_class.moment(step, hp) for step in range(hp.num_iterations + 1)]
        core.warm_up(model, self.optimizers, moments, device, log=notes.append)
        seconds = clock(device) - start
        self.kernels = dict(self.in_use)
        lengths = sorted({moments[step].seq_len for step in self.steps})
        sizes = " or ".join(str(length) for length in lengths)
        self.report = {
            "script": script.show(chosen.script),
            "record": chosen.record,
            "flags": shlex.join(chosen.flags),
            "data": self.data,
            "batch": f"{hp.batch_seqs} x {sizes} tokens, {hp.batch_seqs // RANKS} a process",
            "compiled": self.compiled,
            "notes": "\n".join(notes),
            "start_s": {"warm-up": seconds},
            "memory_gb": {name: (peak - before) / 1e9 for name, peak in self.peaks().items()},
            "newton_schulz_tflop": 1e-12 * newton_schulz_flops(run_class, model),
            "windows": [],
        }

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
        hp = self.hp
        planned = self.core.plan_batches(
            self.data,
            now.seq_len,
            hp.batch_seqs,
            BATCHES,
            epochs=0,
            vocab_size=hp.vocab_size,
            plan=self.run_class.planner([now] * (BATCHES + 1), hp),
        )
        while True:
            yield from self.core.distributed_data_generator(planned, RANK, RANKS, self.device)

    def peaks(self) -> dict[str, int]:
        """Return the peaks of allocated bytes at the last window; {} on a CPU."""
        hp, device = self.hp, self.device
        found = {}
        for name in ("training", "validation") if device.type == "cuda" else ():
            torch.cuda.reset_peak_memory_stats()
            if name == "training":
                self.step(self.steps[-1])
            else:
                tokens = torch.arange(hp.val_seq_len, device=device)[None] % hp.vocab_size
                now = self.run_class.moment(hp.num_iterations, hp)
                self.core.evaluate(self.model, (tokens.int(), tokens), now, device)
            found[name] = torch.cuda.max_memory_allocated()
        return found

    def row(self, step: int, blocks: list[float], inputs: list[Tensor], ceiling: float) -> dict:
        """Return a row of `windows` from the blocks' ms/step and the inputs of all timed steps."""
        hp, ms = self.hp, median(blocks)
        now = self.run_class.moment(step, hp)
        flops = model_flops(self.run_class, self.model, torch.cat(inputs), now)
        total = torch.tensor(flops, dtype=torch.float64, device=self.device)
        train_gpt.all_reduce_(total)
        matmul, attention = (1e-12 * total / len(inputs)).tolist()
        rate = 1e3 * (matmul + attention) / ms
        return {
            "step": step,
            "window": now.window,
            "ms_per_step": ms,
            "ms_per_micro_batch": ms * RANKS / hp.batch_seqs,
            "tokens_per_s": 1e3 * hp.batch_seqs * now.seq_len / ms,
            "matmul_tflop": matmul,
            "attention_tflop": attention,
            "tflop_per_s": rate,
            "ceiling": ceiling,
            "of_ceiling": rate / RANKS / ceiling,
            "blocks": blocks,
        }


def start_seconds(chosen: Configuration) -> dict[str, float]:
    """Return the seconds of a process that compiles and makes its first steps: with empty caches,
    then with full ones."""
    seconds = {}
    command = [sys.executable, __file__, str(chosen.script), "--only_start", *chosen.flags]
    with TemporaryDirectory() as folder:
        caches = {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
        for name in ("cold start", "warm start"):
            start = time.perf_counter()
            if subprocess.run(command, env=os.environ | caches).returncode:
                raise UserError(f"the {name} failed; --no_compile_times skips it")
            seconds[name] = time.perf_counter() - start
    return seconds


def time_in_turn(runs: list[Timed], steps: int) -> None:
    """Time the windows of each run; several runs take turns (A B A B) after a block of steps."""
    count = max(1, steps // BLOCKS)
    for moment in range(3):
        ceiling = matmul_tflops(runs[0].device, 1.0)
        timed = [(run, run.steps[moment], [], []) for run in runs]
        for run, step, _, _ in timed:
            run.step(step)  # before the clock starts
        for _ in range(BLOCKS):
            for run, step, ms, inputs in timed:
                start = clock(run.device)
                inputs += [run.step(step) for _ in range(count)]
                ms.append(1e3 * (clock(run.device) - start) / count)
        for run, step, ms, inputs in timed:
            row = run.row(step, ms, inputs, ceiling)
            if run is not runs[0]:
                ratios = [here / first for here, first in zip(ms, timed[0][2], strict=True)]
                row["ratio"] = median(ratios)
                row["lowest"], row["highest"] = min(ratios), max(ratios)
            run.report["windows"].append(row)


def profile_steps(run: Timed, step: int, count: int) -> profile:
    """Return a profile of `count` steps like this one."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no log lines of the profiler
    with profile() as profiled:
        for _ in range(count):
            with record_function("step"):
                run.step(step)
        clock(run.device)  # waits for the GPU
    return profiled


def count_events(run: Timed, step: int) -> dict[str, float]:
    """Return this process's kernel launches and collectives per step; a count of 0 is left out.
    Steps with and without Adam are averaged, as in the times."""
    counts = {name: [] for name in EVENTS}
    for _ in range(run.every):
        profiled = profile_steps(run, step, 1)
        # profiled.events() would take seconds.
        events = [event.name() for event in profiled.profiler.kineto_results.events()]
        for name, beginnings in EVENTS.items():
            counts[name].append(sum(event.startswith(beginnings) for event in events))
    return {name: mean(found) for name, found in counts.items() if any(found)}


def trace_steps(run: Timed, count: int) -> dict:
    """Profile steps at the middle window, on all ranks; rank 0 writes its trace into logs/."""
    profiled = profile_steps(run, run.steps[1], count)
    path = Path("logs", time.strftime("trace_%Y-%m-%d_%H-%M-%S.json"))
    if RANK == 0:
        path.parent.mkdir(exist_ok=True)
        profiled.export_chrome_trace(str(path))
    table = profiled.key_averages().table(f"self_{run.device.type}_time_total", row_limit=12)
    return {"path": str(path), "table": table}


# -----------------------------------------------------------------------------
# Counted operations, and measured rates


def parameters_of(run_class: type[train_gpt.Run], model: train_gpt.GPT, *groups: str) -> list:
    """Return the parameters of some groups of a model."""
    found = run_class.optimizers_class.groups_of(model, model.hp)
    return [p for group in found if group.name in groups for p in group.params]


def visible_pairs(mask: tuple | Tensor) -> int:
    """Return the pairs of a token and a key that a mask of make_mask leaves visible."""
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
    under the layer's window. Masked pairs, recomputation, norms and the like are not counted.
    Paired heads attend as one, to two positions per token: they count half.
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
    elements = sum(p.numel() for p in parameters_of(run_class, model, "head", "muon"))
    matmul = 6.0 * inputs.numel() * elements
    return matmul, 12.0 * model.hp.num_heads * model.hp.head_dim * seen


def newton_schulz_flops(
    run_class: type[train_gpt.Run], model: train_gpt.GPT, iterations: int = 5
) -> float:
    """Return the operations of Muon's orthogonalisation in a step, on all ranks together.
    model_flops does not include them.

    For an m x n matrix, m <= n, an iteration is X X^T (2 m m n), its square (2 m m m) and B X.
    """
    once = 0
    for p in parameters_of(run_class, model, "muon"):
        m, n = sorted(p.shape[-2:])
        once += p.numel() // (m * n) * (4 * m * m * n + 2 * m**3)
    return float(iterations * once)


def median_rate(work, device: torch.device, seconds: float) -> float:
    """Return how often per second `work()` runs: the median of at least 3 measurements in about
    `seconds`."""
    count = 10 if device.type == "cuda" else 1  # at once, so that launch overhead does not count
    times = []
    end = clock(device) + seconds
    work()
    while len(times) < 3 or clock(device) < end:
        start = clock(device)
        for _ in range(count):
            work()
        times.append(clock(device) - start)
    return count / median(times)


def matmul_tflops(device: torch.device, seconds: float) -> float:
    """Return TFLOP/s of a process's large matmuls: in bfloat16 on a GPU, in float32 on a CPU."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    return 2e-12 * n**3 * median_rate(lambda: a @ b, device, seconds)


def estimate(matmuls: float, memory: float) -> dict[str, dict[str, float]]:
    """Return the minutes of each record on RANKS GPUs that reach these shares of an H100's rates,
    by either rate alone."""
    found = {}
    for name, reached in records.published().items():
        then, now = reached["minutes"], reached["minutes"] * 8 / RANKS
        found[name] = {"published": then, "by_matmuls": now / matmuls, "by_memory": now / memory}
    return found


def calibrate(device: torch.device, seconds: float) -> dict:
    """Measure this machine's rates for about `seconds`; return them, and the minutes of training
    estimated from them."""
    on_gpu = device.type == "cuda"
    found = {"matmul TFLOP/s": matmul_tflops(device, seconds / 2)}
    source = torch.zeros(2**30 if on_gpu else 2**27, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copies = median_rate(lambda: target.copy_(source), device, seconds / 2)
    found["memory GB/s"] = 2e-9 * source.nbytes * copies  # read and written
    if RANKS > 1:  # bus bandwidth: what each rank sends and receives in a ring
        buffer = torch.zeros(2**28 if on_gpu else 2**22, device=device)
        reduces = median_rate(lambda: train_gpt.all_reduce_(buffer), device, 0)  # 3 on each rank
        found["all-reduce GB/s"] = 2e-9 * (RANKS - 1) / RANKS * buffer.nbytes * reduces
    rates = {k: {"here": v, "H100": H100[k], "share": v / H100[k]} for k, v in found.items()}
    shares = [rates[name]["share"] for name in ("matmul TFLOP/s", "memory GB/s")]
    demo = {"demo": {"by_matmuls": DEMO_TFLOP / RANKS / found["matmul TFLOP/s"] / 60}}
    return {"rates": rates, "estimated_minutes": estimate(*shares) if on_gpu else demo}


# -----------------------------------------------------------------------------
# The command line


def show(value) -> str:
    """Return a value as text: numbers have four digits, or all digits before the point."""
    if isinstance(value, dict):
        return ", ".join(f"{k.replace('_', ' ')} {show(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
    return str(value)


def print_report(report: dict) -> None:
    """Print a report for people: `windows` as a table, anything else as lines."""
    for name, value in report.items():
        if name == "windows":
            titles = {k: k.replace("_per_", "/").replace("_", " ") for k in value[0]}
            del titles["blocks"]
            print("\n" + "  ".join(titles.values()))
            for row in value:
                print("  ".join(show(row[k]).rjust(len(title)) for k, title in titles.items()))
        elif name == "vs":
            print("\ntimed in turn with the following; ratio: its time divided by the first's")
            print_report(value)
        elif name == "trace":
            print(f"\n{value['table']}\nwrote {value['path']}")
        elif name in ("rates", "estimated_minutes"):
            lines = [f"{key:26}{show(part)}" for key, part in value.items()]
            print("\n".join(["", name.replace("_", " "), *lines]))
        else:
            print(f"{name:20}{show(value)}")


def bench(args: argparse.Namespace, device: torch.device) -> dict:
    """Time a run, in turn with that of --vs; return the report."""
    fresh = device.type == "cuda" and RANKS == 1 and not args.no_compile_times
    starts = start_seconds(args.configurations[0]) if fresh else {}  # while GPU memory is free
    runs = [Timed(chosen, device) for chosen in args.configurations]
    report = runs[0].report
    report["start_s"] |= starts
    time_in_turn(runs, args.steps)
    if device.type == "cuda" or RANKS > 1:
        for run in runs:  # at the end: a profiler slows steps down
            for row in run.report["windows"]:
                row |= count_events(run, row["step"])
    if len(runs) > 1:
        report["vs"] = runs[1].report
    if args.trace:
        report["trace"] = trace_steps(runs[0], args.trace)
    return report


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Return bench.py's own flags, and the configurations to time; UserError for a bad value."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.error = script.fail
    add_count = partial(parser.add_argument, type=int, metavar="N")
    add_count("--steps", default=20, help="timed steps per window, at least 5 [20]")
    add_count("--micro_batches", help="sequences per process [the record's]")
    parser.add_argument("--vs", metavar="FLAGS", type=shlex.split, help="also time these flags")
    add_count("--trace", help="profile N steps and write a trace")
    help_ = "measure this machine's rates [for 30]"
    add_count("--calibrate", metavar="SECONDS", nargs="?", const=30, help=help_)
    parser.add_argument("--json", action="store_true", help="print one JSON object, no tables")
    parser.add_argument("--no_compile_times", action="store_true", help="skip both fresh starts")
    parser.add_argument("--only_start", action="store_true", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args(argv)
    counts = args.steps, args.micro_batches, args.trace, args.calibrate
    if any(n is not None and n < 1 for n in counts):
        parser.error("--steps, --micro_batches, --trace and --calibrate must be at least 1")
    if args.micro_batches:
        flags += ["--batch_seqs", str(args.micro_batches * RANKS)]
    path, flags = script.take_script(flags)
    args.configurations = [configuration(path, flags)]
    if args.vs is not None:
        if args.vs and args.vs[0].endswith(".py"):
            path = script.find(args.vs.pop(0))
        args.configurations.append(configuration(path, flags + args.vs))
    args.hp = args.configurations[0].hp
    if any(chosen.hp.device != args.hp.device for chosen in args.configurations):
        parser.error("--vs cannot change --device: run bench.py once for each")
    return args


def work(args: argparse.Namespace) -> None:
    """Measure what the flags ask for, and print it."""
    device, _, _ = train_gpt.start_device(args.hp.device)
    if args.only_start:
        Timed(args.configurations[0], device)
        return
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    git = f"git -C '{HERE}' describe --always --dirty --exclude='*' || echo unknown"
    commit = subprocess.run(git, shell=True, capture_output=True, text=True).stdout.strip()
    threads = torch.get_num_threads()
    machine = f"{RANKS} x {name}, {threads} threads, torch {torch.__version__}, commit {commit}"
    found = calibrate(device, args.calibrate) if args.calibrate else bench(args, device)
    report = {"machine": machine, **found}
    print(json.dumps(report, indent=1)) if args.json else print_report(report)


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors are one line, as in train_gpt.py."""
    train_gpt.as_program("bench.py", lambda: work(parse_args(argv)))


if __name__ == "__main__":
    main()
