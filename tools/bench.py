"""How fast is this machine, and how fast is this change?

    ./run.sh tools/bench.py [--steps 20] [flags of train_gpt.py]    time a record, or any flags
    ./run.sh tools/bench.py --vs "--fp8 off" [flags]                against a second configuration
    ./run.sh tools/bench.py --trace 2 [flags]                       and profile two steps
    ./run.sh tools/bench.py --calibrate                             is my machine slow?
    torchrun --standalone --nproc_per_node=N tools/bench.py ...     on N GPUs; rank 0 prints

Model, optimizers, batches and steps are those of train_gpt.py; nothing is logged. A step is a whole
global batch; --micro_batches 1 is a quick look at one sequence a process.

Keys of --json: machine; record, flags, data, batch, compiled, notes (kernels chosen), start_s
(warm-up; on one GPU, whole cold and warm starts too), memory_gb (allocated at the peaks of training
and validation), newton_schulz_tflop (of a step, in no rate), windows (at the first, middle and last
step: step, window, ms_per_step, ms_per_micro_batch, tokens_per_s, matmul_tflop, attention_tflop,
tflop_per_s, ceiling of a process's matmuls, of_ceiling, blocks, whose median is ms_per_step); vs
(the same of the second configuration, whose windows have ratio, lowest and highest too); trace
(path, table). With --calibrate: machine, rates (here, H100, share), estimated_minutes (published,
and what that becomes here by_matmuls alone and by_memory alone: the estimate is between them).
"""

import argparse
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections import Counter
from glob import glob
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.profiler import profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import program  # noqa: E402
import train_gpt  # noqa: E402
from program import HERE, UserError, clock  # noqa: E402

RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
BLOCKS = 5  # timed pieces of a measurement, whose median counts
# Measured on one H100 (bfloat16 matmul, copies), and what is expected of 8 with NVLink.
H100 = {"matmul TFLOP/s": 790.0, "memory GB/s": 3000.0, "all-reduce GB/s": 370.0}
# All steps of the demo, over the share of the matmul rate that they reach on a CPU (BENCHMARKS.md).
DEMO_TFLOP = 180 * 0.0457 / 0.6


# -----------------------------------------------------------------------------
# A run: what train() makes of flags, ready to be timed


class Run:
    """Model, optimizers and batches, compiled and warmed up, and what --json says of them."""

    def __init__(self, flags: list[str], device: torch.device):
        hp, args = train_gpt.parse_args(flags)
        self.hp, self.device = hp, device
        self.steps = 0, hp.num_iterations // 2, hp.num_iterations - 1
        sample = train_gpt.RECORDS["demo"].train_files  # where nothing has been fetched
        self.data = hp.train_files if glob(hp.train_files) else sample
        self.batches, self.made = {}, 0
        notes, before = [], torch.cuda.memory_allocated() if device.type == "cuda" else 0
        start = clock(device)
        self.model = model = train_gpt.build(hp, device)
        self.optimizers = train_gpt.Optimizers(model, hp, RANK, RANKS)
        train_gpt.warm_up(model, self.optimizers, device, log=notes.append)
        seconds = {"warm-up": clock(device) - start}
        self.kernels = [(kernel, kernel.use) for kernel in train_gpt.KERNELS.values()]
        lengths = sorted({train_gpt.moment(step, hp).seq_len for step in self.steps})
        sizes = " or ".join(map(str, lengths))
        batch = f"{hp.batch_seqs} x {sizes} tokens, {hp.batch_seqs // RANKS} a process"
        self.report = {"record": args.record, "flags": shlex.join(flags), "data": self.data}
        self.report |= {"batch": batch, "compiled": model.compiled}
        self.report |= {"notes": "\n".join(notes), "start_s": seconds}
        self.report |= {"memory_gb": {k: (v - before) / 1e9 for k, v in self.peaks().items()}}
        self.report |= {"newton_schulz_tflop": 1e-12 * newton_schulz_flops(model), "windows": []}

    def step(self, step: int) -> Tensor:
        """A step of training as train() makes it, on the next batch of its size; its inputs (n, T).
        Where Adam learns at each second step only, every second call makes such a step."""
        for kernel, use in self.kernels:  # another run may have chosen otherwise
            kernel.use = use
        if step not in self.batches:
            again = map(self.batches_of, itertools.repeat(train_gpt.moment(step, self.hp)))
            self.batches[step] = itertools.chain.from_iterable(again)
        every, self.made = self.hp.adam_every, self.made + 1
        inputs, targets = (t.to(self.device, non_blocking=True) for t in next(self.batches[step]))
        step += self.made % every - step % every
        train_gpt.train_step(self.model, self.optimizers, inputs, targets, step)
        return inputs

    def batches_of(self, now: train_gpt.Moment):
        """As many batches as a run has, all as they are at a moment."""
        hp = self.hp
        sizes = now.seq_len, hp.batch_seqs, RANK, RANKS
        limits = {"num_batches": hp.num_iterations, "epochs": 0, "vocab_size": hp.vocab_size}
        limits["longest"] = now.longest if hp.align_to_documents else None
        return train_gpt.distributed_data_generator(self.data, *sizes, **limits, device=self.device)

    def peaks(self) -> dict[str, int]:
        """Bytes allocated at the last window; on a CPU, those of the process so far."""
        hp, device, last, found = self.hp, self.device, self.steps[-1], {}
        tokens = torch.arange(hp.val_seq_len, device=device)[None] % hp.vocab_size
        now = train_gpt.moment(hp.num_iterations, hp)
        validation = self.model, (tokens.int(), tokens), now, device
        for name in ("training", "validation"):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.step(last) if name == "training" else train_gpt.evaluate(*validation)
            found[name] = program.peak_memory(device)[0]
        return found

    def row(self, step: int, blocks: list[float], inputs: list[Tensor], ceiling: float) -> dict:
        """A window of the report; blocks are of ms/step, inputs those of all timed steps."""
        hp, ms, now = self.hp, median(blocks), train_gpt.moment(step, self.hp)
        flops = model_flops(self.model, torch.cat(inputs), now)
        total = torch.tensor(flops, dtype=torch.float64, device=self.device)
        program.all_reduce_([total])
        matmul, attention = (1e-12 * total / len(inputs)).tolist()
        rate = 1e3 * (matmul + attention) / ms
        row = {"step": step, "window": now.window, "ms_per_step": ms}
        row |= {"ms_per_micro_batch": ms * RANKS / hp.batch_seqs}
        row |= {"tokens_per_s": 1e3 * hp.batch_seqs * now.seq_len / ms}
        row |= {"matmul_tflop": matmul, "attention_tflop": attention, "tflop_per_s": rate}
        return row | {"ceiling": ceiling, "of_ceiling": rate / RANKS / ceiling, "blocks": blocks}


def start_seconds(flags: list[str]) -> dict[str, float]:
    """How long a process takes that ends after its first step: with empty caches, then full."""
    seconds, command = {}, [sys.executable, __file__, "--only_start", *flags]
    with TemporaryDirectory() as folder:
        caches = {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
        for name in ("cold start", "warm start"):
            start = time.perf_counter()
            if subprocess.run(command, env=os.environ | caches).returncode:
                raise UserError(f"the {name} failed; --no_compile_times leaves such starts out")
            seconds[name] = time.perf_counter() - start
    return seconds


def time_in_turn(runs: list[Run], steps: int) -> None:
    """Report the windows of each run; several runs take turns (A B A B) by blocks of steps."""
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
                row |= {"ratio": median(ratios), "lowest": min(ratios), "highest": max(ratios)}
            run.report["windows"].append(row)


def trace_steps(run: Run, count: int) -> dict:
    """Profile steps at the middle window, on all ranks; rank 0 writes its trace into logs/."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines of its own
    with profile() as profiled:
        for _ in range(count):
            with record_function("step"):
                run.step(run.steps[1])
        clock(run.device)  # until the GPU has done them
    path = Path("logs", time.strftime("trace_%Y-%m-%d_%H-%M-%S.json"))
    if RANK == 0:
        path.parent.mkdir(exist_ok=True)
        profiled.export_chrome_trace(str(path))
    table = profiled.key_averages().table(f"self_{run.device.type}_time_total", row_limit=12)
    return {"path": str(path), "table": table}


# -----------------------------------------------------------------------------
# Arithmetic on paper, and rates


def model_flops(model: train_gpt.GPT, inputs: Tensor, now) -> tuple[float, float]:
    """Operations that a step on inputs (n, T) needs in matmuls and in attention, whatever is run,
    at a moment or with a long window.

    Matmuls: 6 for each token and matrix element (2 forward, 4 backward), with the padded head and
    without embeddings, which are looked up. Attention: 12 * heads * head_dim for each pair of a
    token and a key that it sees, in each layer that attends, under that layer's window. Masked
    pairs, recomputation, norms and the like are not counted. Paired heads are half as many.
    """
    hp, groups, pairs, now = model.hp, train_gpt.members(model), Counter(), model.at(now)
    for row in inputs:
        for name, first in model.masks(row, now, lambda first: first).items():
            own = torch.arange(1, len(first) + 1, device=first.device)
            pairs[name] += (own - first).sum().item()
    elements = sum(p.numel() for group in ("head", "muon") for p in groups[group].values())
    seen = sum(pairs[layer.mask] / (1 + layer.paired) for layer in model.layers)
    return 6.0 * inputs.numel() * elements, 12.0 * hp.num_heads * hp.head_dim * seen


def newton_schulz_flops(model: train_gpt.GPT, iterations: int = 5) -> float:
    """Operations of Muon's orthogonalisation in a step, of all ranks; no part of model_flops.

    For an m x n matrix, m <= n, an iteration is X X^T (2 m m n), its square (2 m m m) and B X.
    """
    sizes = [(p.numel(), *sorted(p.shape[-2:])) for p in train_gpt.members(model)["muon"].values()]
    once = [size // (m * n) * (4 * m * m * n + 2 * m**3) for size, m, n in sizes]
    return float(iterations * sum(once))


def median_rate(work, device: torch.device, seconds: float) -> float:
    """How often a second `work()` is done, tried for that long: the median of at least 3 times."""
    count = 10 if device.type == "cuda" else 1  # together, so that launching them does not count
    times, end = [], clock(device) + seconds
    work()
    while len(times) < 3 or clock(device) < end:
        start = clock(device)
        for _ in range(count):
            work()
        times.append(clock(device) - start)
    return count / median(times)


def matmul_tflops(device: torch.device, seconds: float) -> float:
    """TFLOP/s of one process's large matmuls: in bfloat16 on a GPU, in float32 on a CPU."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b = torch.randn(2, n, n, device=device, dtype=dtype)
    return 2e-12 * n**3 * median_rate(lambda: a @ b, device, seconds)


def estimate(matmuls: float, memory: float) -> dict[str, dict[str, float]]:
    """Minutes that RANKS GPUs with these shares of an H100's rates need, by either rate alone."""
    found = {}
    for name, reached in program.published().items():
        then, now = reached["minutes"], reached["minutes"] * 8 / RANKS
        found[name] = {"published": then, "by_matmuls": now / matmuls, "by_memory": now / memory}
    return found


def calibrate(device: torch.device, seconds: float) -> dict:
    """Rates of this machine, measured for about that many seconds, and the minutes they promise."""
    on_gpu = device.type == "cuda"
    found = {"matmul TFLOP/s": matmul_tflops(device, seconds / 2)}
    source = torch.zeros(2**30 if on_gpu else 2**27, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copies = median_rate(lambda: target.copy_(source), device, seconds / 2)
    found["memory GB/s"] = 2e-9 * source.nbytes * copies  # read and written
    if RANKS > 1:  # bus bandwidth: what each rank sends and receives in a ring
        buffer = torch.zeros(2**28 if on_gpu else 2**22, device=device)
        reduces = median_rate(lambda: program.all_reduce_([buffer]), device, 0)  # as often on all
        found["all-reduce GB/s"] = 2e-9 * (RANKS - 1) / RANKS * buffer.nbytes * reduces
    rates = {k: {"here": v, "H100": H100[k], "share": v / H100[k]} for k, v in found.items()}
    shares = [rates[name]["share"] for name in ("matmul TFLOP/s", "memory GB/s")]
    demo = {"demo": {"by_matmuls": DEMO_TFLOP / RANKS / found["matmul TFLOP/s"] / 60}}
    return {"rates": rates, "estimated_minutes": estimate(*shares) if on_gpu else demo}


# -----------------------------------------------------------------------------
# The command line


def show(value) -> str:
    """A value of the report in words: numbers with four digits, or all before the point."""
    if isinstance(value, dict):
        return ", ".join(f"{k.replace('_', ' ')} {show(v)}" for k, v in value.items())
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip(".")
    return str(value)


def print_report(report: dict) -> None:
    """The report of --json for people: windows are a table, anything else a line or some."""
    for name, value in report.items():
        if name == "windows":
            titles = {k: k.replace("_per_", "/").replace("_", " ") for k in value[0]}
            del titles["blocks"]
            print("\n" + "  ".join(titles.values()))
            for row in value:
                print("  ".join(show(row[k]).rjust(len(title)) for k, title in titles.items()))
        elif name == "vs":
            print("\nin turn with the following; ratio: its time over the first's")
            print_report(value)
        elif name == "trace":
            print(f"\n{value['table']}\nwrote {value['path']}")
        elif name in ("rates", "estimated_minutes"):
            lines = [f"{key:26}{show(part)}" for key, part in value.items()]
            print("\n".join(["", name.replace("_", " "), *lines]))
        else:
            print(f"{name:20}{show(value)}")


def bench(args: argparse.Namespace, device: torch.device) -> dict:
    """Time a run, and that of --vs in turn with it; the answer is what --json prints."""
    fresh = device.type == "cuda" and RANKS == 1 and not args.no_compile_times
    starts = start_seconds(args.configurations[0]) if fresh else {}  # while the GPU has room
    runs = [Run(flags, device) for flags in args.configurations]
    report = runs[0].report
    report["start_s"] |= starts
    time_in_turn(runs, args.steps)
    if len(runs) > 1:
        report["vs"] = runs[1].report
    if args.trace:
        report["trace"] = trace_steps(runs[0], args.trace)
    return report


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """bench.py's own flags, and the configurations to time; UserError for a bad value."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.error = program.fail
    count = {"type": int, "metavar": "N"}
    seconds = {"type": int, "metavar": "SECONDS", "nargs": "?", "const": 30}
    parser.add_argument("--steps", default=20, help="timed at a window, 5 at least [20]", **count)
    parser.add_argument("--micro_batches", help="a process [the record's]", **count)
    parser.add_argument("--vs", metavar="FLAGS", type=shlex.split, help="time these too, in turn")
    parser.add_argument("--trace", help="profile N steps, write a trace", **count)
    parser.add_argument("--calibrate", help="is my machine slow? [30]", **seconds)
    parser.add_argument("--json", action="store_true", help="one JSON object, no tables")
    parser.add_argument("--no_compile_times", action="store_true", help="no two fresh starts")
    parser.add_argument("--only_start", action="store_true", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args(argv)
    counts = args.steps, args.micro_batches, args.trace, args.calibrate
    if any(n is not None and n < 1 for n in counts):
        parser.error("--steps, --micro_batches, --trace and --calibrate want 1 or more")
    if args.micro_batches:
        flags += ["--batch_seqs", str(args.micro_batches * RANKS)]
    args.configurations = [flags] if args.vs is None else [flags, flags + args.vs]
    parsed = [train_gpt.parse_args(flags) for flags in args.configurations]
    for hp, given in parsed:
        if other := {"eval", "resume", "list_records", "diff"} & vars(given).keys():
            parser.error(f"--{other.pop()} is for train_gpt.py: bench.py times a new run")
        if hp.device != parsed[0][0].device:
            parser.error("--vs cannot change --device: run bench.py once for each")
    args.hp = parsed[0][0]
    return args


def main(argv: list[str] | None = None) -> None:
    """Do what the flags say; errors and ranks are those of train_gpt.py."""

    def work(args, store):
        device = program.start_device(args.hp.device, store, args.hp.comm_timeout)
        if args.only_start:
            Run(args.configurations[0], device)
            return
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        git = f"git -C '{HERE}' describe --always --dirty --exclude='*' || echo unknown"
        commit = subprocess.run(git, shell=True, capture_output=True, text=True).stdout.strip()
        machine = f"{RANKS} x {name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        seconds, report = args.calibrate, {"machine": f"{machine}, commit {commit}"}
        report |= calibrate(device, seconds) if seconds else bench(args, device)
        print(json.dumps(report, indent=1)) if args.json else print_report(report)

    program.as_program("bench.py", lambda: parse_args(argv), work)


if __name__ == "__main__":
    main()
