"""What a program of this project does besides its work: flags for settings, errors for people,
ranks and signals, the log, and files that are whole or not there.

train_gpt.py and the tools use it. What a run learns, its clock, and what a checkpoint holds are in
train_gpt.py alone.
"""

import argparse
import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import field, fields
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

HERE = Path(__file__).resolve().parent


class UserError(ValueError):
    """What is wrong, where, and what to do about it: one line for people, without a traceback."""


def fail(message: str):
    raise UserError(message)


# -----------------------------------------------------------------------------
# Settings: fields of a dataclass, each with its legal range and a flag


def setting(default, meaning: str, least=None, most=math.inf, step=None, **metadata):
    """A row of Hyperparameters with its legal range; `group` begins a group of --help.

    With about="run" it changes nothing that is learned, and may differ when a run is resumed; with
    about="machine" checkpoints forget it, too.
    """
    legal = int(type(default) is int) if least is None else least, most, step
    metadata = {"help": meaning, "legal": legal, "about": "learning", **metadata}
    return field(default=default, metadata=metadata)


of_run, of_machine = partial(setting, about="run"), partial(setting, about="machine")


def names_of(settings, *about: str) -> list[str]:
    """The names of the settings that are about learning, the run or the machine."""
    return [f.name for f in fields(settings) if f.metadata["about"] in about]


def check_ranges(settings) -> None:
    """Raise UserError for a value outside its legal range."""
    for f in fields(settings):
        value, (least, most, step) = getattr(settings, f.name), f.metadata["legal"]
        in_range = f.type is str or least <= np.min(value) <= np.max(value) <= most
        if not in_range or (step and value % step):
            rule = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            rule += f", a multiple of {step}" * bool(step)
            raise UserError(f"--{f.name} {show(value)}: must be {rule}")


def show(value) -> str:
    """A setting as it is typed on the command line; a path relative to this file."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(show, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value).removeprefix(f"{HERE}/")


def number_rows(text: str, name: str, known: tuple[str, ...], lists=()) -> list[tuple[str, dict]]:
    """The rows of a setting such as "head+lr=.008+beta1=.5,embed+lr=.6": of each row its name, if
    it begins with one, and its numbers by known fields. Of fields in `lists` it is a tuple, written
    1/2/3. UserError for what is no such row."""
    rows = []
    for row in text.split(",") if text else ():
        words = re.split(r"\+(?=[a-z])", row)  # not within 8e+5
        first = "" if "=" in words[0] else words.pop(0)
        numbers = {}
        try:
            for word in words:
                field_name, value = word.split("=")
                values = tuple(map(float, value.split("/")))
                if field_name not in known or field_name in numbers:
                    raise ValueError
                if not all(0 <= v < math.inf for v in values):
                    raise ValueError
                if field_name not in lists:
                    (values,) = values
                numbers[field_name] = values
        except ValueError as error:
            forms = " ".join(f"{key}=NUMBER" for key in known)
            raise UserError(f"--{name}: {row!r} is not of {forms}, joined by +") from error
        rows.append((first, numbers))
    names = [first for first, _ in rows if first]
    if len(set(names)) < len(names):
        raise UserError(f"--{name} {text}: a row comes twice")
    return rows


def flag_parser(name: str, usage: str) -> argparse.ArgumentParser:
    """A parser that raises UserError, and says nothing of flags that were not given."""
    parser = argparse.ArgumentParser(
        prog=name,
        usage=f"{name} {usage}",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.error = fail
    return parser


def add_flags(parser: argparse.ArgumentParser, settings_class) -> None:
    """A flag for each setting; help shows its default, which is left to the caller."""
    for f in fields(settings_class):
        words = ("on", "off") if f.type is bool else f.metadata.get("choices")
        options = {"choices": words} if words else {"type": f.type, "metavar": f.type.__name__}
        if isinstance(f.default, tuple):
            options = {"type": float, "nargs": len(f.default), "metavar": "float"}
        if "group" in f.metadata:
            group = parser.add_argument_group(f.metadata["group"])
        text = f"{f.metadata['help']} [{show(f.default)}]"
        group.add_argument(f"--{f.name}", help=text, **options)


def given(settings, args: argparse.Namespace) -> dict:
    """What add_flags' flags say: the settings that were given, in their types."""
    values = {name: vars(args)[name] for name in vars(settings).keys() & vars(args).keys()}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
        elif type(vars(settings)[name]) is bool:
            values[name] = value == "on"
    return values


def command_line(about: str, records: dict, settings_class) -> argparse.ArgumentParser:
    """train_gpt.py's: a flag for each setting, and those that say what to do."""
    parser = flag_parser("train_gpt.py", "[--record NAME] [--SETTING VALUE ...]")
    parser.description = about
    parser.add_argument("--record", choices=records, help="row to start from; on a CPU [demo]")
    parser.add_argument("--list_records", action="store_true", help="print all rows and exit")
    diff = {"nargs": 2, "choices": records, "metavar": "NAME"}
    parser.add_argument("--diff", help="print where two rows differ and exit", **diff)
    parser.add_argument("--eval", metavar="auto|PATH", help="print a checkpoint's loss and exit")
    parser.add_argument("--resume", metavar="auto|PATH", help="go on from a checkpoint, the newest")
    parser.add_argument("--resume_force", action="store_true", help="even under other settings")
    add_flags(parser, settings_class)
    return parser


def where_to_start(args: argparse.Namespace, load: Callable) -> tuple[str | Path | None, dict]:
    """The checkpoint that the flags name, or that `auto` finds, and what it holds; or None, {}."""
    wanted = getattr(args, "eval", getattr(args, "resume", None))
    if wanted != "auto":
        return wanted, {} if wanted is None else load(wanted)
    path, saved = newest_checkpoint(getattr(args, "run_id", "*"), load)
    if not saved and "eval" in args:
        raise UserError("no checkpoint under logs/: train with --save_every, or name one")
    if not saved:
        print("--resume auto: no checkpoint under logs/, a new run begins")
    return path, saved


# -----------------------------------------------------------------------------
# Records: what is published of them, and their tables


@cache
def published() -> dict[str, dict]:
    """What records reached on 8 H100s: minutes by the clock of their day, mean and deviation of the
    last validation loss over so many runs (2024-11-19: of one, and about), and by step losses and
    seconds of training. Where all runs have public logs these are means, and losses have
    deviations; else they are one run's. `one_h100` has what a run on one of them reached, where
    there is such a log. {} without the file."""
    path = HERE / "tools" / "published.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else {}


def on_fineweb(*patterns: str) -> bool:
    """Whether patterns of shards name FineWeb's, on which losses are published."""
    return all(Path(pattern).name.startswith("fineweb_") for pattern in patterns)


def against_published(
    records: dict, record: str, hp, step: int, loss: float, seconds: float, gpus: int
) -> str:
    """How a validation loss of settings hp on FineWeb compares with a record's published ones; on
    one GPU, also how seconds of training compare with a run's on one H100. Empty on other data."""
    known, lines = published().get(record), []
    if known is None or not on_fineweb(hp.train_files, hp.val_files):
        return ""
    if expected := known["losses"].get(str(step)):
        text = f"    published: {expected:.4f}"
        if "deviations" in known:
            text += f" +- {known['deviations'][str(step)]:.4f} ({known['runs']} runs)"
        lines.append(f"{text}, difference {loss - expected:+.4f}")
    one_run = known.get("one_h100") if gpus == 1 else None
    if one_run and (expected := one_run["losses"].get(str(step))):
        then = one_run["seconds"][str(step)]
        text = f"    published on one H100: {expected:.4f} after {then:.1f} s"
        lines.append(f"{text}, difference {seconds - then:+.1f} s")
    if step == hp.num_iterations:
        mean, deviation = known["mean"], known["deviation"]
        place = "in" if abs(loss - mean) <= 2 * deviation else "out"
        lines.append(f"    {place}side the published spread, {mean:.4f} +- 2 x {deviation:.4f}")
        own, names = records[record], set(names_of(hp, "learning")) - {"seed"}
        if changed := sorted(n for n in names if getattr(hp, n) != getattr(own, n)):
            lines[-1] += f"; other than the record's: {', '.join(changed)}"
    return "\n".join(lines)


def print_records(records: dict, names: list[str], differing: bool = False) -> None:
    """Print some of the records with their numbers, a column each; or only those that differ."""
    numbers = [vars(records[name]) for name in names]
    rows = {key: [show(settings[key]) for settings in numbers] for key in numbers[0]}
    for setting_name, title in (("layers", "layer"), ("stages", "stage"), ("adam_groups", "adam")):
        parts = [cell.split(",") for cell in rows.pop(setting_name)]
        tables = itertools.zip_longest(*parts, fillvalue="-")
        rows |= {f"{title} {i}": [c or "-" for c in cells] for i, cells in enumerate(tables)}
    rows["published minutes"] = [str(published().get(n, {}).get("minutes", "-")) for n in names]
    rows = {k: cells for k, cells in rows.items() if not differing or len(set(cells)) > 1}
    widths = [2 + max(map(len, column)) for column in zip(names, *rows.values(), strict=True)]
    for name, cells in [("", names), *rows.items()]:
        columns = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        print(f"{name:<24}" + "".join(columns).rstrip())


# -----------------------------------------------------------------------------
# Devices and ranks


def start_device(wanted: str, store: dist.Store | None, timeout: int = 600) -> torch.device:
    """This process's device; with a store, joins its process group over it."""
    device, gpus = torch.device("cpu"), torch.cuda.device_count()
    if wanted == "cuda" or (wanted == "auto" and gpus):
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if local_rank >= gpus:
            remedy = f"start {gpus} processes a node" if gpus else "use --device cpu"
            raise UserError(f"process {local_rank} finds {gpus} GPUs on its machine: {remedy}")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        if store:  # torchrun gives each process one thread
            processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            torch.set_num_threads(max(1, os.cpu_count() // processes))
        with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
            # Keep freed memory. Else each chunk of logits comes anew from the system, page by page:
            # a tenth to a fifth of the demo's time.
            mallopt, M_MMAP_MAX, M_TRIM_THRESHOLD = ctypes.CDLL(None).mallopt, -4, -1
            mallopt(M_MMAP_MAX, 0)
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ and os.access(HERE, os.W_OK):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{HERE}/.cache/inductor"  # outlasts a reboot
        os.environ.setdefault("TRITON_CACHE_DIR", f"{HERE}/.cache/triton")
    if store:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        backend = "nccl" if device.type == "cuda" else "gloo"
        limits = {"timeout": timedelta(seconds=timeout), "store": store}
        dist.init_process_group(backend, rank=rank, world_size=world_size, **limits)
    return device


def all_reduce_(tensors: list[Tensor]) -> None:
    """Sum each tensor over all ranks, in place; one process has nothing to do."""
    if dist.is_initialized():
        for work in [dist.all_reduce(t, async_op=True) for t in tensors]:
            work.wait()


def wait_for_all_ranks(device: torch.device) -> None:
    """Return when all of them have come here."""
    count = torch.ones(1, device=device)
    all_reduce_([count])
    count.item()  # on a GPU, only this waits


def clock(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Peak bytes allocated and reserved on a GPU; without one, what the process had, twice."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats()  # empty until something was allocated
        return tuple(stats.get(f"{kind}_bytes.all.peak", 0) for kind in ("allocated", "reserved"))
    unit = 1 if sys.platform == "darwin" else 1024
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,) * 2


def to_host(values: Tensor) -> Callable[[], tuple[list[float], float]]:
    """Start copying from the device; the answer, when called, waits for that copy only, and gives
    the values and the time when the host saw that they were there."""
    if values.device.type == "cpu":
        found = values.tolist(), time.perf_counter()
        return lambda: found
    host, copied = torch.empty(values.shape, pin_memory=True), torch.cuda.Event()
    host.copy_(values, non_blocking=True)
    copied.record()
    return lambda: (copied.synchronize() or host.tolist(), time.perf_counter())


# -----------------------------------------------------------------------------
# What a run writes


def source() -> str:
    """The files that train, as logs and checkpoints keep them; kernels.py may be missing."""
    names = "train_gpt.py", "records.py", "loader.py", "program.py", "kernels.py"
    files = [HERE / name for name in names]
    return "\n\n".join(path.read_text("utf-8") for path in files if path.exists())


class Logger:
    """Rank 0's log file, and the console: plain lines, on a terminal a bar for the steps."""

    def __init__(self, hp, device: torch.device, rank: int, first_step: int, going_on: bool):
        """Begin logs/<run_id>.txt with what it takes to believe and to repeat the run, or go on."""
        self.run_id = hp.run_id or time.strftime("%Y-%m-%d_%H-%M-%S_") + uuid.uuid4().hex[:6]
        self.path = Path("logs", f"{self.run_id}.txt") if rank == 0 else Path(os.devnull)
        if rank == 0 and self.path.exists() and not going_on:
            raise UserError(f"{self.path} is there already: choose another --run_id, or --resume")
        self.path.parent.mkdir(exist_ok=True)
        self.file = self.path.open("a", buffering=1, encoding="utf-8")
        options = {"total": hp.num_iterations, "file": sys.stdout, "leave": False}
        options["bar_format"] = "{n}/{total} {bar}{postfix}, {remaining} left"
        # None: no bar where there is no terminal.
        self.bar = tqdm(disable=None, initial=first_step, **options)
        if rank or self.path.stat().st_size:
            return
        command = "nvidia-smi" if device.type == "cuda" else "lscpu || sysctl machdep.cpu"
        machine = subprocess.run(command, shell=True, capture_output=True, text=True).stdout
        software = f"Python {sys.version}\ntorch {torch.__version__} CUDA {torch.version.cuda}"
        settings = "\n".join(f"{name}: {show(value)}" for name, value in vars(hp).items())
        for part in (source(), software, machine, settings):
            print(part, "=" * 100, sep="\n", file=self.file)

    def __call__(self, line: str, console: bool = True) -> None:
        print(line, file=self.file)
        if console:
            self.bar.write(line)
            sys.stdout.flush()

    def step(self, line: str, progress: str) -> None:
        """The line of one training step; on a terminal the bar moves instead."""
        self(line, console=self.bar.disable)
        self.bar.set_postfix_str(progress, refresh=False)
        self.bar.update()


class Metrics:
    """A run as data: logs/<run_id>.jsonl has an object for each step, as pandas reads it.

    step; tokens so far; train_loss, of the step's batch before its update; val_loss after the step,
    where it was measured; the fields of train_gpt.py's Moment; ms, from the step before to when the
    host sees this one's result; tokens_per_s; memory_mib, the peak so far; and where the optimizers
    make them, grad_norm_head and its like, before clipping. A row is written when the next step is
    under way: that costs no waiting.
    """

    def __init__(self, path: Path, norms: list[str], first_step: int, tokens: int = 0):
        """Begin, or go on after a checkpoint's step, and its tokens: rows of later steps will come
        again."""
        self.norms, self.row, self.result = norms, {}, None
        self.tokens, self.step_tokens = tokens, 0
        self.last, self.ended, kept = (0.0, 0.0), 0.0, 0
        self.file = path.open("ab", buffering=0)
        if path.is_file():
            with contextlib.suppress(ValueError):  # from a row that a kill or a full disk cut
                for row in path.read_bytes().splitlines(keepends=True) if first_step else ():
                    if not row.endswith(b"\n") or json.loads(row)["step"] > first_step:
                        break
                    kept += len(row)
            self.file.truncate(kept)

    def begin(self, row: dict, step_tokens: int, result: Tensor) -> None:
        """A step is under way: what is known of its row, and loss, `stop` and norms to come."""
        self.tokens, self.step_tokens = self.tokens + step_tokens, step_tokens
        memory = peak_memory(result.device)[0] >> 20
        self.row = row | {"tokens": self.tokens, "memory_mib": memory}
        self.result = to_host(result)

    def fetch(self, since: float) -> tuple[float, float]:
        """Loss and `stop` of the last step begun, whose row is complete then but for a validation;
        `since` is the time when training began or went on."""
        if self.result:
            (loss, stop, *norms), ended = self.result()
            seconds = ended - max(self.ended, since)
            self.last, self.ended, self.result = (loss, stop), ended, None
            self.row |= {"train_loss": loss, "ms": round(1e3 * seconds, 3)}
            self.row |= {"tokens_per_s": round(self.step_tokens / seconds)}
            self.row |= zip(self.norms, norms, strict=False)
        return self.last

    def write(self, **more) -> None:
        """Append the row, if there is one, in one write."""
        if row := self.row | more:
            self.file.write(json.dumps(row).encode() + b"\n")
        self.row = {}


CHECKSUM = b"SHA-256:"  # ends a file of save_whole, before the digest of all bytes that precede it


def save_whole(path: Path, state: dict) -> None:
    """torch.save to a whole file or none, with its checksum at the end; UserError."""
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with temporary.open("w+b") as file:
            torch.save(state, file)
            file.flush()
            file.seek(0)
            file.write(CHECKSUM + hashlib.file_digest(file, "sha256").digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except Exception as error:  # torch's writer makes everything a RuntimeError
        temporary.unlink(missing_ok=True)
        raise UserError(f"could not save {path}: is the disk full? ({error})") from error


def load_whole(path: str | Path) -> tuple[dict, bool]:
    """What save_whole saved, on the CPU, and whether its checksum is there. ValueError if that is
    wrong, which is seen before anything is unpickled: torch.load does not notice flipped bytes."""
    data = np.memmap(path, mode="r") if os.path.getsize(path) else np.zeros(0, np.uint8)
    body, ending = data[: -len(CHECKSUM) - 32], bytes(data[-len(CHECKSUM) - 32 :])
    whole = ending == CHECKSUM + hashlib.sha256(body).digest()
    if ending.startswith(CHECKSUM) and not whole:
        raise ValueError("its checksum is wrong")
    return torch.load(path, map_location="cpu", weights_only=True), whole


def checkpoints(folder: Path, pattern: str = "state_step*.pt") -> list[Path]:
    """Those in a folder, the newest first."""
    return sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def newest_checkpoint(run_id: str, load: Callable) -> tuple[Path | None, dict]:
    """The newest whole one under logs/ and what `load` finds in it, of one run or any ("*"); or
    None, {}."""
    found = checkpoints(Path("logs"), f"{run_id}/state_step*.pt")
    for path in found:
        try:
            return path, load(path)
        except UserError as error:
            print(f"{error}; trying the one before", file=sys.stderr)
    if found:
        raise UserError(f"none of {len(found)} checkpoints under logs/ is whole; remove them")
    return None, {}


# -----------------------------------------------------------------------------
# Signals and errors

PATIENCE = 25.0  # seconds; torchrun kills after 30


@contextlib.contextmanager
def stop_signals(alone: bool):
    """A list of the SIGTERMs and SIGINTs that come: the step ends, and a checkpoint is saved.

    A thread watches, because a rank that waits for a dead one runs no Python: unless alone, it
    leaves when its patience ends. A second SIGINT leaves at once; but torchrun repeats to its
    workers what the terminal sends them, hence it counts only after a second.
    """
    seen, (reader, writer), poll = [], os.pipe(), select.poll()
    poll.register(reader, select.POLLIN)

    def watch() -> None:
        first = milliseconds = None
        while poll.poll(milliseconds):
            number = os.read(reader, 1)
            if not number:  # the writer is closed: the run is over
                os.close(reader)
                return
            now = time.monotonic()
            if not seen:
                first = now
            elif number[0] == signal.SIGINT and now > first + 1:
                os._exit(130)
            seen.append(number[0])
            milliseconds = None if alone else 1e3 * max(0.0, first + PATIENCE - now)
        os._exit(128 + seen[0])

    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    threading.Thread(target=watch, daemon=True).start()
    try:
        yield seen
    finally:
        signal.set_wakeup_fd(-1)
        os.close(writer)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def as_program(name: str, parse: Callable, work: Callable) -> None:
    """work(parse(), store) as a command; an error of the user's becomes one line and a status.

    That is 2 while parsing, else 1. Rank 0 alone writes on the console. Of ranks that fail, the
    lowest reports: others wait for it.
    """
    status, store, rank = 2, None, int(os.environ.get("RANK", 0))
    if rank:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            store = next(dist.rendezvous("env://"))[0]
        parsed = parse()
        status = 1
        work(parsed, store)
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt:
        print(f"\n{name}: interrupted", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError, RuntimeError) as error:
        message = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            message = f"out of GPU memory, make --seq_len and --val_seq_len smaller: {error}"
        elif store and (isinstance(error, dist.DistError) or re.search("gloo|pair clos", message)):
            message = f"another rank has stopped, or hangs: {error}"
        elif isinstance(error, RuntimeError):
            raise
        time.sleep(min(rank, 40) / 4)
        if store is None or store.add("reports", 1) == 1:
            print(f"{name}: error:", " ".join(message.split())[:500], file=sys.stderr)
        sys.exit(status)
    finally:
        gc.unfreeze()  # see Run.loop
