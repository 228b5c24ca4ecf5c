"""How fast is this machine, how fast is this change, and where does the time go?

    ./run.sh tools/bench.py [--steps 20] [flags of train_gpt.py]    time a record, or any flags
    ./run.sh tools/bench.py --vs "--fp8 off" [flags]                against a second configuration
    ./run.sh tools/bench.py --calibrate                             is my machine slow?
    torchrun --standalone --nproc_per_node=N tools/bench.py ...     on N GPUs; rank 0 prints

Model, optimizers, batches and steps are those of train_gpt.py; nothing is logged. A step is a whole
global batch; --micro_batches 1 is a quick look at one sequence a process.

Keys of --json: machine, record, flags, data, batch (sequences, tokens, micro_batches), windows (at
the first, middle and last step: step, window, ms, blocks, micro_ms, tokens_per_s, flops, tflops,
of_ceiling), newton_schulz_flops, ceiling (TFLOP/s before and after by shape, mean), memory_gb,
notes (kernels chosen), compiled, compile_s, profile (steps, window, ms, parts in ms/step, trace),
vs (flags, data, memory_gb, notes, windows with ratio and ratio_range). With --calibrate: machine,
rates, estimates (minutes).
"""

import argparse
import io
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from functools import wraps
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train_gpt  # noqa: E402
from train_gpt import HERE, PUBLISHED, RECORDS, Hyperparameters, UserError, clock  # noqa: E402

BLOCKS = 5  # timed pieces of a measurement, whose median counts
# Ceilings measured on one H100 (bfloat16 matmul, copies), and what is expected of 8 with NVLink.
H100 = {"matmul TFLOP/s": 790.0, "memory GB/s": 3000.0, "all-reduce GB/s": 370.0}
# What bounds a step of 2025-01-26_BatchSize on 8 H100s, an estimate in ms. Matmuls: QKV and output
# 12, MLP 26, head 12.5, attention 9.5, optimizers 6. Memory: softcap and cross-entropy 11, norms,
# rotation and residual 19, embeddings 2. The rest: all-reduce, masks, launches, data.
STEP_MS = {"matmul TFLOP/s": 66.0, "memory GB/s": 32.0, "rest": 6.5}
DEMO_EFFICIENCY = 0.6  # of the matmul rate, reached by the demo on two cores (BENCHMARKS.md)


def world() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# -----------------------------------------------------------------------------
# A run: what train() makes of flags, ready to be timed


def settings(flags: list[str], micro_batches: int) -> tuple[Hyperparameters, str]:
    """The settings of flags and their record's name; UserError for what cannot be timed."""
    hp, args = train_gpt.parse_args(flags)
    if other := {"eval", "resume", "list_records", "diff"} & vars(args).keys():
        raise UserError(f"--{other.pop()} is for train_gpt.py: bench.py times a new run")
    if micro_batches:
        hp = replace(hp, batch_seqs=micro_batches * int(os.environ.get("WORLD_SIZE", 1)))
    return hp, args.record


def endless(pattern: str, hp: Hyperparameters, device: torch.device) -> Iterator:
    """The run's batches, again from the first when they have been used up."""
    stream = pattern, hp.seq_len, hp.batch_seqs, *world()
    options = {"num_batches": hp.num_iterations, "epochs": 0, "device": device}
    options["vocab_size"] = min(hp.vocab_size, train_gpt.END_OF_TEXT + 1)
    options["longest"] = hp.max_document_tokens * hp.align_to_documents
    while True:
        yield from train_gpt.distributed_data_generator(*stream, **options)


class Run:
    """Model, optimizers and batches, compiled and warmed up; its peak memory is known by then."""

    def __init__(self, flags: list[str], args: argparse.Namespace, device, compile_times: bool):
        self.flags, self.device = flags, device
        self.hp, self.record = hp, _ = settings(flags, args.micro_batches)
        pattern = hp.train_files if glob(hp.train_files) else RECORDS["demo"].train_files
        self.data = train_gpt.show(pattern)
        if pattern != hp.train_files:
            self.data += f", other documents than {train_gpt.show(hp.train_files)}: there are none"
        n = hp.num_iterations
        self.moments = {"first": 0, "middle": n // 2, "last": n - 1}
        self.windows = {k: train_gpt.get_window_size(v, hp) for k, v in self.moments.items()}
        base = self.memory(reset=True)
        self.model, self.compile_s = train_gpt.build(hp, device), {}
        if compile_times and self.model.compiled:  # now, while there is room for another run
            self.compile_s = compile_seconds(flags, args.micro_batches)
        start = clock(device)
        self.optimizers = train_gpt.Optimizers(self.model, hp, *world())
        with redirect_stdout(io.StringIO()) as said:
            train_gpt.warm_up(self.model, self.optimizers, device)
        self.notes = said.getvalue().splitlines()  # which kernels it chose
        self.kernels = [(kernel, kernel.use) for kernel in train_gpt.KERNELS.values()]
        self.compile_s["warm-up"], self.ready = clock(device) - start, time.time()
        self.batches = endless(pattern, hp, device)
        tokens = torch.arange(1, hp.val_seq_len + 1, device=device)[None] % hp.vocab_size
        validation = self.model, [tokens.int(), tokens], self.windows["last"], device
        works = {"training": lambda: self.step("last")}
        works["validation"] = lambda: train_gpt.evaluate(*validation)
        self.memory_gb = {}
        for name, work in works.items():
            self.memory(reset=True)
            work()
            peaks = zip(("allocated", "reserved"), self.memory(), base, strict=True)
            self.memory_gb |= {f"{name}, {kind}": (peak - was) / 1e9 for kind, peak, was in peaks}
        if device.type == "cpu":
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
            self.memory_gb = {"process": peak / 1e9}

    def memory(self, reset: bool = False) -> tuple[int, int]:
        """Peak bytes allocated and reserved on the GPU, or zeros; with reset, from now on."""
        if self.device.type == "cpu":
            return 0, 0
        if reset:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return train_gpt.peak_memory(self.device)

    def step(self, moment: str) -> Tensor:
        """One step of training as train() makes it, and its inputs (n, T)."""
        for kernel, use in self.kernels:  # another run may have chosen otherwise
            kernel.use = use
        with record_function("part:data"):
            batch = next(self.batches)
            inputs, targets = (t.to(self.device, non_blocking=True) for t in batch)
        train_gpt.train_step(self.model, self.optimizers, inputs, targets, self.moments[moment])
        return inputs


def compile_seconds(flags: list[str], micro_batches: int) -> dict[str, float]:
    """Seconds from launch to the first step, and of its warm-up: with empty caches, then full."""
    times = {}
    with TemporaryDirectory() as folder:
        caches = {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}
        for state in ("cold", "warm"):
            command = [sys.executable, __file__, "--only_warm_up", str(time.time()), *flags]
            command += ["--micro_batches", str(micro_batches)] if micro_batches else []
            child = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
            if child.returncode:
                reason = (child.stderr.strip() or "no message").splitlines()[-1]
                raise UserError(f"compile times: {reason}; --no_compile_times leaves them out")
            first_step, warm_up = json.loads(child.stdout.splitlines()[-1])
            times |= {f"{state}, launch to first step": first_step, f"{state}, warm-up": warm_up}
    return times


# -----------------------------------------------------------------------------
# Arithmetic on paper, and rates


def visible_keys(inputs: Tensor, window: int, rule: str) -> int:
    """How many pairs of a token and a key it sees the sequences (n, T) have, by first_visible."""
    size = torch.tensor(window, device=inputs.device)
    own = torch.arange(1, inputs.size(1) + 1, device=inputs.device)
    return sum((own - train_gpt.first_visible(row, size, rule)).sum().item() for row in inputs)


def model_flops(model: train_gpt.GPT, inputs: Tensor, window: int) -> dict[str, float]:
    """Floating-point operations that a step on inputs (n, T) needs, whatever is run for it.

    matmul: 6 for each token and matrix element (2 forward, 4 backward), with the padded head and
    without embeddings, which are looked up. attention: 12 * heads * head_dim for each pair of a
    token and a key that it sees, in each layer that attends, under that layer's window. Masked
    pairs, recomputation, norms and the like are not counted.
    """
    hp = model.hp
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "embed" not in n]
    windows = {"long": window, "short": window // 2}
    keys = {name: visible_keys(inputs, size, hp.window_rule) for name, size in windows.items()}
    pairs = sum(keys.get(layer.window, 0) for layer in model.layers)
    matmul = 6.0 * inputs.numel() * sum(p.numel() for p in matrices)
    return {"matmul": matmul, "attention": 12.0 * hp.num_heads * hp.head_dim * pairs}


def newton_schulz_flops(model: train_gpt.GPT, iterations: int = 5) -> float:
    """Operations of Muon's orthogonalisation in a step, of all ranks; no part of model_flops.

    For an m x n matrix, m <= n, an iteration is X X^T (2 m m n), its square (2 m m m) and B X.
    """
    matrices = [p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim >= 2]
    sizes = [(*sorted(p.shape[-2:]), p.numel() // p.shape[-2:].numel()) for p in matrices]
    return float(sum(iterations * (4 * m * m * n + 2 * m**3) * count for m, n, count in sizes))


def median_rate(work, device: torch.device, seconds: float) -> float:
    """How often a second `work()` is done, tried for that long: the median of at least 3 times."""
    work()
    count = 10 if device.type == "cuda" else 1  # together, so that launching them does not count
    times, end = [], clock(device) + seconds
    while len(times) < 3 or times[-1][1] < end:
        start = clock(device)
        for _ in range(count):
            work()
        times.append((start, clock(device)))
    return count / statistics.median(end - start for start, end in times)


def matmul_rates(device: torch.device, mlp: tuple[int, int, int], seconds: float) -> dict:
    """Median TFLOP/s by shape m x k x n: bfloat16 on CUDA (a cube, the MLP's), else float32."""
    dtype, shapes = torch.float32, [(2048, 2048, 2048)]
    if device.type == "cuda":
        dtype, shapes = torch.bfloat16, [(8192, 8192, 8192), mlp]
    rates = {}
    for m, k, n in shapes:
        a, b = (torch.randn(size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
        rate = median_rate(lambda a=a, b=b: a @ b, device, seconds / len(shapes))
        rates[f"{m} x {k} x {n}"] = 2e-12 * m * k * n * rate
    return rates


def time_steps(runs: list[Run], steps: int) -> list[list[dict]]:
    """Rows of each run, one a window; several runs take turns (A B A B) by blocks of steps."""
    blocks = BLOCKS if len(runs) > 1 else min(BLOCKS, steps)
    count, tables, ranks = max(1, steps // blocks), [[] for _ in runs], world()[1]
    for moment in runs[0].moments:
        for run, table in zip(runs, tables, strict=True):
            run.step(moment)
            table.append({"step": run.moments[moment], "window": run.windows[moment], "blocks": []})
        seen = [[] for _ in runs]
        for _ in range(blocks):
            for run, table, inputs in zip(runs, tables, seen, strict=True):
                start = clock(run.device)
                inputs += [run.step(moment) for _ in range(count)]
                table[-1]["blocks"].append(1e3 * (clock(run.device) - start) / count)
        for run, table, inputs in zip(runs, tables, seen, strict=True):
            row, hp = table[-1], run.hp
            flops = model_flops(run.model, torch.cat(inputs), row["window"])
            total = torch.tensor([*flops.values()], dtype=torch.float64, device=run.device)
            train_gpt.all_reduce_([total])
            ms, total = statistics.median(row["blocks"]), total / len(inputs)
            row |= {"ms": ms, "micro_ms": ms * ranks / hp.batch_seqs}
            row["tokens_per_s"] = 1e3 * hp.batch_seqs * hp.seq_len / ms
            row["flops"] = dict(zip(flops, total.tolist(), strict=True))
            row["tflops"] = total.sum().item() / ms / 1e9
    return tables


# -----------------------------------------------------------------------------
# Where the time goes

LAYERS, REST, IDLE = "layers, fused", "norms, masks, residual", "GPU idle"
PARTS = ["embedding", "attention", "MLP", REST, LAYERS, "head and loss", "optimizer"]
PARTS += ["communication", "data", "other", IDLE]
ON_CPU = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}


def labelled(run: Run) -> ExitStack:
    """Until it is closed, the functions of train_gpt.py in which time is spent label it."""

    def label(part: str, function):
        @wraps(function)
        def call(*args, **kwargs):
            with record_function(f"part:{part}"):
                return function(*args, **kwargs)

        return call

    bucket, several = train_gpt.Bucket, world()[1] > 1
    places = [(train_gpt.GPT, "hidden", REST), (train_gpt, "lookup", "embedding")]
    places += [(train_gpt.Optimizers, "step", "optimizer")]
    places += [(bucket, "launch", "communication" if several else "optimizer")]
    if several:
        places += [(train_gpt, "all_reduce_", "communication"), (bucket, "wait", "communication")]
    if run.model.compiled:  # to change what is inside would compile it again
        places += [(run.model, "trunk", LAYERS)]
    else:
        places += [(train_gpt.CausalSelfAttention, "forward", "attention")]
        places += [(train_gpt.MLP, "forward", "MLP")]
    patches = [(owner, name, label(part, getattr(owner, name))) for owner, name, part in places]
    if several:  # what gather answers waits when it is called
        gather = bucket.gather
        patches += [(bucket, "gather", lambda *args: label("communication", gather(*args)))]
    stack = ExitStack()
    for owner, name, function in patches:
        stack.enter_context(patch.object(owner, name, function))
    return stack


def part_of_layers(name: str, dims: list, hp: Hyperparameters) -> str:
    """Of which part a compiled layer's matmul is, by its shapes, or a fused kernel, by its name."""
    words = set(name.split("_"))
    if name in ("aten::mm", "aten::addmm"):
        first = int(name == "aten::addmm")  # its first argument is what is added
        (m, k), (_, n) = dims[first : first + 2]
        sizes = [hp.model_dim, 4 * hp.model_dim, hp.seq_len]
        return "MLP" if sorted((m, k, n)) == sorted(sizes) else "attention"
    if "attention" in words:
        return "attention"
    if any(word.startswith(("relu", "threshold")) for word in words):
        return "MLP"
    if words & {"split", "unbind", "cat", "slice", "neg"}:  # q and k are split and turned
        return "attention"
    return REST if words & {"rms", "rsqrt", "mean", "pow"} else LAYERS


def split_by_part(trace: list[dict], hp: Hyperparameters) -> dict[str, float]:
    """Milliseconds by part of a chrome trace's events, within its annotation part:other.

    On a CPU, each call's own time on the training thread. With a GPU, each moment goes to the
    kernel that runs then, and so to the part of the call that launched it; communication and
    waiting for data count where nothing else runs. Either way the sum is the whole time.

    A call belongs to the innermost label around it. A backward call has the sequence number of the
    forward one that it answers, and its part.
    """
    calls = [e for e in trace if e.get("ph") == "X" and e.get("cat") in ON_CPU]
    calls.sort(key=lambda e: (e["ts"], -e["dur"]))
    root = next(e for e in calls if e["name"] == "part:other")
    stacks, answered, launched, spans = defaultdict(list), {}, {}, []
    last = defaultdict(lambda: "other")  # backward part of a thread: its gradients are added next
    parts = Counter()
    for e in calls:
        name, details, stack = e["name"], e.get("args", {}), stacks[e["tid"]]
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= e["ts"]:
            stack.pop()
        around, number = stack[-1][1] if stack else "other", details.get("Sequence number")
        part = around
        if name.startswith("part:"):
            part = name.removeprefix("part:")
        elif name.startswith("autograd::engine::evaluate_function"):
            part = last[e["tid"]] = answered.get(number, last[e["tid"]])
        elif name in ("aten::embedding", "aten::index_add_"):
            part = "embedding"
        elif name == "HeadLoss":
            part = "head and loss"
        elif around == LAYERS:
            part = part_of_layers(name, details.get("Input Dims", []), hp)
        if number is not None:  # of equal numbers the last is the one that has a backward
            answered[number] = part
        if "correlation" in details:
            launched[details["correlation"]] = part
        if name == "part:data":
            spans.append((e["ts"], e["dur"], (2, part)))
        if e is root or (stack and stack[0][0] is root):
            parts[part] += e["dur"] / 1e3
            parts[around] -= e["dur"] / 1e3 * (e is not root)
        stack.append((e, part))
    kernels = [e for e in trace if e.get("ph") == "X" and e.get("cat") in ON_GPU]
    for e in kernels:
        part = launched.get(e["args"].get("correlation"), "other")
        if part == LAYERS:
            part = part_of_layers(e["name"], [], hp)
        part = "communication" if "nccl" in e["name"].lower() else part
        spans.append((e["ts"], e["dur"], (int(part == "communication"), part)))
    return exposed(spans, root["ts"], root["ts"] + root["dur"]) if kernels else dict(parts)


def exposed(spans: list[tuple], start: float, end: float) -> dict[str, float]:
    """Milliseconds by part from start to end (us): of the spans that run, the lowest rank counts.

    A span is its start and duration (us), and (rank, part).
    """
    edges = [(min(max(ts, start), end), 1, key) for ts, _, key in spans]
    edges += [(min(max(ts + dur, start), end), -1, key) for ts, dur, key in spans]
    running, parts, before, idle = Counter(), Counter(), start, (3, IDLE)
    for now, change, key in [*sorted(edges), (end, 0, idle)]:
        parts[min(+running, default=idle)[1]] += (now - before) / 1e3
        running[key] += change
        before = now
    return dict(parts)


def profile_steps(run: Run, count: int, keep: bool) -> dict:
    """Profile steps at the middle window, on all ranks alike: ms per step, whole and by part."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes lines of its own
    run.step("middle")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA][: 1 + (run.device.type == "cuda")]
    with labelled(run), profile(activities=activities, record_shapes=True) as profiled:
        start = clock(run.device)
        with record_function("part:other"):
            for _ in range(count):
                with record_function("step"):
                    run.step("middle")
            ms = 1e3 * (clock(run.device) - start) / count
    found = {"steps": count, "window": run.windows["middle"], "ms": ms}
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        if keep and world()[0] == 0:
            path = Path("logs", time.strftime("trace_%Y-%m-%d_%H-%M-%S.json"))
            path.parent.mkdir(exist_ok=True)
            found["trace"] = str(path)
        profiled.export_chrome_trace(str(path))
        parts = split_by_part(json.loads(path.read_text("utf-8"))["traceEvents"], run.hp)
    return found | {"parts": {part: parts.get(part, 0.0) / count for part in PARTS}}


# -----------------------------------------------------------------------------
# Calibration: this machine against an H100


def all_reduce_gbps(device: torch.device, seconds: float) -> float | None:
    """Bus bandwidth in GB/s: what each rank sends and receives in a ring; None for one process."""
    ranks = world()[1]
    if ranks == 1:
        return None
    buffer = torch.zeros(2**28 if device.type == "cuda" else 2**22, device=device)
    rate = median_rate(lambda: train_gpt.all_reduce_([buffer]), device, 0)
    count = torch.tensor(max(3, int(seconds * rate)), device=device)
    dist.broadcast(count, 0)  # all do equally many
    start = clock(device)
    for _ in range(count.item()):
        train_gpt.all_reduce_([buffer])
    sent = 2 * (ranks - 1) / ranks * buffer.nbytes * count.item()
    return sent / (clock(device) - start) / 1e9


def estimate_minutes(record: str, rates: dict[str, float | None], ranks: int) -> float:
    """Minutes of train_time that a published record should take on `ranks` GPUs like this: a guess.

    The published time is divided as STEP_MS divides a step. What matmuls bound grows as this GPU's
    matmul rate is below an H100's, what memory bounds as its copies are slower, the rest stays; all
    grow with the sequences that a GPU has, 8 / ranks. A GPU without FP8 takes longer.
    """
    slower = {name: H100[name] / rates[name] if name in rates else 1.0 for name in STEP_MS}
    here = sum(ms * slower[name] for name, ms in STEP_MS.items())
    return PUBLISHED[record].minutes * here / sum(STEP_MS.values()) * 8 / ranks


def demo_minutes(tflops: float) -> float:
    """Minutes of train_time of the demo on a CPU: its operations at DEMO_EFFICIENCY of the rate."""
    hp = RECORDS["demo"]
    middle = train_gpt.get_window_size(hp.num_iterations // 2, hp)
    inputs, _ = next(endless(hp.train_files, hp, torch.device("cpu")))
    flops = hp.num_iterations * sum(model_flops(train_gpt.GPT(hp), inputs, middle).values())
    return flops / (DEMO_EFFICIENCY * tflops * 1e12) / 60


def calibrate(device: torch.device, seconds: float) -> dict:
    """Rates of this machine, measured for about that many seconds, and what they promise."""
    on_gpu, ranks = device.type == "cuda", world()[1]
    rates = {"matmul TFLOP/s": max(matmul_rates(device, (49152, 768, 3072), seconds / 2).values())}
    source = torch.zeros(2**30 if on_gpu else 2**27, dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copies = median_rate(lambda: target.copy_(source), device, seconds / 4)
    rates["memory GB/s"] = 2e-9 * source.nbytes * copies  # read and written
    rates["all-reduce GB/s"] = all_reduce_gbps(device, seconds / 4)
    estimates = {}
    for name in RECORDS:
        minutes = PUBLISHED[name].minutes if name in PUBLISHED else None
        estimates[name] = {"published": minutes, "here": None}
        if on_gpu and minutes:
            estimates[name]["here"] = estimate_minutes(name, rates, ranks)
        elif not on_gpu and not minutes:
            estimates[name]["here"] = demo_minutes(rates["matmul TFLOP/s"] * ranks)
    return {"rates": rates, "estimates": estimates}


# -----------------------------------------------------------------------------
# What is printed


def print_table(rows: list[list[str]]) -> None:
    """Columns as wide as they need be: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    print()


def show(value: float | None) -> str:
    """A number with three digits or all before its point; a dash for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".rstrip(".")


def machine(device: torch.device) -> dict:
    """Device, processes, torch, and the commit, if this is a git checkout."""
    name = f"CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name() if device.type == "cuda" else name
    git = f"git -C '{HERE}' describe --always --dirty --exclude='*'"
    commit = subprocess.run(git, shell=True, capture_output=True, text=True).stdout.strip()
    found = {"device": name, "processes": world()[1], "torch": torch.__version__}
    return found | {"commit": commit or None}


def print_calibration(report: dict) -> None:
    rows = [["", "here", "an H100", "share"]]
    for name, rate in report["rates"].items():
        share = "-" if rate is None else f"{100 * rate / H100[name]:.3g} %"
        rows.append([name, show(rate), show(H100[name]), share])
    print_table(rows)
    if report["rates"]["all-reduce GB/s"] is None:
        print("one process: no all-reduce")
    print("all-reduce: bus bandwidth; the H100's is what is expected of 8 of them")
    print("estimate: the published time scaled by these rates; the demo's, from its arithmetic\n")
    rows = [["record", "minutes on 8 H100s, published", "minutes here, estimate"]]
    rows += [[name, *map(show, both.values())] for name, both in report["estimates"].items()]
    print_table(rows)


def print_windows(rows: list[dict]) -> None:
    names = "step", "window", "ms/step", "ms/micro-batch", "tokens/s", "TFLOP/s", "of ceiling"
    ratio = ["ratio", "lowest", "highest"] if "ratio" in rows[0] else []
    table = [[*names, *ratio]]
    for row in rows:
        cells = [show(row[name]) for name in ("ms", "micro_ms", "tokens_per_s", "tflops")]
        cells += [f"{100 * row['of_ceiling']:.1f} %"]
        cells += [f"{x:.3f}" for x in (row["ratio"], *row["ratio_range"])] if ratio else []
        table.append([str(row["step"]), str(row["window"]), *cells])
    print_table(table)


def print_report(report: dict) -> None:
    profile, ceiling, middle = report["profile"], report["ceiling"], report["windows"][1]
    sizes = "{sequences} sequences, {tokens} tokens; {micro_batches} micro-batches a process"
    print(f"record  {report['record']}\nflags   {' '.join(report['flags']) or 'none'}")
    print(f"data    {report['data']}\nstep    {sizes.format(**report['batch'])}\n")
    print_windows(report["windows"])
    if vs := report.get("vs"):
        flags = " ".join(vs["flags"]) or "the same flags"
        print(f"in turn with {flags}; ratio: its time over the first's\n")
        print_windows(vs["windows"])
    for when in ("before", "after"):
        rates = [f"{show(rate)} TFLOP/s ({shape})" for shape, rate in ceiling[when].items()]
        print(f"matmul ceiling {when}, a process: {', '.join(rates)}")
    flops = middle["flops"] | {"Newton-Schulz (not counted)": report["newton_schulz_flops"]}
    print("TFLOP in the middle step:", ", ".join(f"{k} {v / 1e12:.3g}" for k, v in flops.items()))
    memory = ", ".join(f"{name} {gb:.2f} GB" for name, gb in report["memory_gb"].items())
    seconds = ", ".join(f"{name} {s:.1f} s" for name, s in report["compile_s"].items())
    print(f"peak memory: {memory}\n{'' if report['compiled'] else 'not compiled; '}{seconds}")
    print("\n".join([*report["notes"], ""]))
    rows = [["part", "ms/step", "share"]]
    for part, ms in [*profile["parts"].items(), ("sum", sum(profile["parts"].values()))]:
        if ms:
            rows.append([part, show(ms), f"{100 * ms / profile['ms']:.1f} %"])
    print_table(rows)
    mean = f"profiled at window {profile['window']}: {show(profile['ms'])} ms/step, mean of "
    print(f"{mean}{profile['steps']}; unprofiled {show(middle['ms'])} ms/step")
    if report["compiled"]:
        print("compiled layers are split by shapes of matmuls and names of fused kernels: a kernel")
        print(f"that serves two parts counts for one, what cannot be told for '{LAYERS}'")
    if "trace" in profile:
        print(f"wrote {profile['trace']}")


# -----------------------------------------------------------------------------
# The command line


def bench(flags: list[str], args: argparse.Namespace, device: torch.device) -> dict:
    """Time a run, and that of --vs in turn with it; the answer is what --json prints."""
    ranks = world()[1]
    runs = [Run(flags, args, device, ranks == 1 and not args.no_compile_times)]
    if args.vs is not None:
        runs.append(Run(flags + args.vs, args, device, compile_times=False))
    hp, model = runs[0].hp, runs[0].model
    mlp = hp.seq_len, hp.model_dim, 4 * hp.model_dim
    before = matmul_rates(device, mlp, 1.0)
    tables = time_steps(runs, args.steps)
    after = matmul_rates(device, mlp, 1.0)
    mean = statistics.mean(max(rates.values()) for rates in (before, after))
    for row in sum(tables, []):
        row["of_ceiling"] = row["tflops"] / (mean * ranks)
    sizes = {"sequences": hp.batch_seqs, "tokens": hp.batch_seqs * hp.seq_len}
    report = {"record": runs[0].record, "flags": flags, "data": runs[0].data}
    report |= {"batch": sizes | {"micro_batches": hp.batch_seqs // ranks}, "windows": tables[0]}
    report["newton_schulz_flops"] = newton_schulz_flops(model)
    report["ceiling"] = {"before": before, "after": after, "mean": mean}
    report |= {"memory_gb": runs[0].memory_gb, "notes": runs[0].notes}
    report |= {"compiled": model.compiled, "compile_s": runs[0].compile_s}
    report["profile"] = profile_steps(runs[0], args.trace or min(3, args.steps), bool(args.trace))
    if args.vs is not None:
        for a, b in zip(*tables, strict=True):
            ratios = [y / x for x, y in zip(a["blocks"], b["blocks"], strict=True)]
            b |= {"ratio": statistics.median(ratios), "ratio_range": [min(ratios), max(ratios)]}
        report["vs"] = {"flags": args.vs, "data": runs[1].data, "memory_gb": runs[1].memory_gb}
        report["vs"] |= {"notes": runs[1].notes, "windows": tables[1]}
    return report


def parse_args(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """bench.py's own flags, and those of train_gpt.py; UserError for a bad value."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.epilog = "Other flags are those of train_gpt.py: see its --help."

    def fail(message: str):
        raise UserError(message)

    def positive(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    parser.error = fail
    count = {"type": positive, "metavar": "N"}
    seconds = {"type": positive, "metavar": "SECONDS", "nargs": "?", "const": 0}
    parser.add_argument("--steps", default=20, help="timed at each window [20]", **count)
    parser.add_argument("--micro_batches", default=0, help="a process [the record's]", **count)
    parser.add_argument("--vs", metavar="FLAGS", type=shlex.split, help="time these too, in turn")
    parser.add_argument("--trace", default=0, help="write a trace of N steps", **count)
    parser.add_argument("--calibrate", help="is my machine slow? [60, on a CPU 20]", **seconds)
    parser.add_argument("--json", action="store_true", help="one JSON object, no tables")
    parser.add_argument("--no_compile_times", action="store_true", help="no two fresh starts")
    parser.add_argument("--only_warm_up", type=float, help=argparse.SUPPRESS)
    return parser.parse_known_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Do what the flags say; errors and ranks are those of train_gpt.py."""

    def parse():
        args, flags = parse_args(argv)
        hp, _ = settings(flags, args.micro_batches)
        if args.vs and settings(flags + args.vs, args.micro_batches)[0].device != hp.device:
            raise UserError("--vs cannot change --device: run bench.py once for each")
        return args, flags, hp

    def work(parsed, store):
        args, flags, hp = parsed
        device = train_gpt.start_device(hp.device, store, hp.comm_timeout)
        if args.only_warm_up:
            run = Run(flags, args, device, compile_times=False)
            print([run.ready - args.only_warm_up, run.compile_s["warm-up"]])
            return
        report = {"machine": machine(device)}
        if args.calibrate is not None:
            report |= calibrate(device, args.calibrate or (60 if device.type == "cuda" else 20))
        else:
            report |= bench(flags, args, device)
        if args.json:
            print(json.dumps(report, indent=1))
        else:
            words = "{processes} x {device}, torch {torch}, commit {commit}"
            print("machine", words.format(**report["machine"]))
            (print_report if args.calibrate is None else print_calibration)(report)

    train_gpt.as_program("bench.py", parse, work)


if __name__ == "__main__":
    main()
