"""Start a program in a process for each GPU; make a run of a script, and note its summary."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread

import numpy as np
import torch
from tqdm import tqdm

import console
import machine
import result
import script
from logfile import refuse_live
from result import End
from train_gpt import FINEWEB, HERE, STOPS, Hyperparameters, Run, UserError, new_name

SHARD_TOKENS = 10**8  # in a shard of FineWeb
ERROR = re.compile(r"\S+: error: |[\w.]*(Error|Exception|Failed|Interrupt)\b")  # begins a line
SIZE = re.compile(r"^parameters: (\d+)(?: and (\d+) that ranks share out)?$", re.M)  # in a log
PLACE = re.compile(r'File "(.+)", line (\d+)')  # in a traceback


# -----------------------------------------------------------------------------
# Processes


def gpus_for(hp: Hyperparameters) -> int:
    """Return the number of GPUs that a run with these settings may use. UserError if this machine
    has GPUs that torch cannot use, or none where one is asked for."""
    if hp.device == "cpu":
        return 0
    if reason := machine.fault():
        raise UserError(f"{reason}; --device cpu trains without them")
    if hp.device == "cuda" and not torch.cuda.device_count():
        raise UserError("--device cuda: torch finds no GPU here: leave it out to train on the CPU")
    return torch.cuda.device_count()


def processes(batch_seqs: int, gpus: int) -> int:
    """Return the number of processes: NPROC, or else the most that GPUs and equal shares of the
    batch allow. UserError for an NPROC that is impossible."""
    most = gpus or batch_seqs  # without a GPU, NPROC may be any number that divides the batch
    possible = [n for n in range(1, most + 1) if batch_seqs % n == 0]
    if wanted := os.environ.get("NPROC"):
        if wanted not in map(str, possible):
            numbers = ", ".join(map(str, possible))
            reason = f"{gpus} GPUs and --batch_seqs {batch_seqs} allow {numbers}"
            raise UserError(f"NPROC={wanted}: {reason}")
        return int(wanted)
    count = possible[-1] if gpus else 1
    if gpus > count:
        note = f"{gpus} GPUs cannot share {batch_seqs} sequences evenly: using {count}"
        print(f"run.sh: {note}", file=sys.stderr)
    return count


def shards_needed(hp: Hyperparameters, run_class: type[Run]) -> int:
    """Return the most shards of FineWeb that a run can read. Where sequences begin with documents,
    what lies between is skipped: for each token that trains, 1.03 are read or, if documents are
    cut, up to 1.6 (in the public logs, 424.7M tokens are read from 7 shards)."""
    moments = [run_class.Moment(step, hp) for step in range(hp.num_iterations)]
    read = 1.03 if getattr(hp, "align_to_documents", False) else 1.0
    cuts = any(getattr(now, "longest", 0) for now in moments)
    if cuts and getattr(hp, "align_to_documents", True):
        read = 1.6
    batches = hp.batch_seqs * read * np.array([now.seq_len for now in moments])
    # No batch spans two shards, so a part of each shard may be left over.
    return math.ceil(batches.sum() / (SHARD_TOKENS - 1 - batches.max()))


def fetch(hp: Hyperparameters, run_class: type[Run]) -> None:
    """Download the shards of FineWeb that a run on GPUs needs. UserError if that fails."""
    if gpus_for(hp) and hp.train_files.startswith(FINEWEB):
        command = [f"{HERE}/cached_fineweb.py", str(shards_needed(hp, run_class))]
        if subprocess.run([sys.executable, *command]).returncode:
            raise UserError("FineWeb could not be fetched: see above")


def start(
    hp: Hyperparameters, words: list[str], check: Callable[[], str] = lambda: "", **options
) -> End:
    """Run a Python program, the first of the words, on the GPUs for which the settings ask, and
    wait. `check` is called twice a second; if it returns a reason, the program is stopped.

    The first signal to stop is passed on as a SIGTERM, and a later SIGINT as it is: it ends a run
    that saves at once. A terminal also sends its signals to a single program, but not to torchrun
    and its ranks.
    """
    gpus = gpus_for(hp)
    count = processes(hp.batch_seqs, gpus)
    env, torchrun = dict(os.environ), []
    if count > 1:
        # On CPUs, processes share the cores of this job; on GPUs, one thread each is enough.
        threads = 1 if gpus else max(1, torch.get_num_threads() // count)
        env.setdefault("OMP_NUM_THREADS", str(threads))
        # Without an address, ranks look for this host's name, which containers may not resolve.
        torchrun = ["-P", f"{HERE}/tools/ranks.py", "--standalone", "--local_addr=127.0.0.1"]
        torchrun.append(f"--nproc_per_node={count}")
    command = [sys.executable, *torchrun, *words]
    child, signals, last, reason = None, [], deque(maxlen=200), ""

    def note(number: int, frame) -> None:
        signals.append(number)
        if child and len(signals) == 1:
            child.terminate()
        elif child and number == signal.SIGINT and torchrun:  # it would not pass on a SIGINT
            subprocess.run(f"pkill -INT -P {child.pid}", shell=True)
        elif child and number == signal.SIGINT:
            child.send_signal(number)

    def pass_on() -> None:
        for line in child.stderr:
            text = line.decode(errors="replace")
            print(text, end="", file=sys.stderr, flush=True)
            last.append(text.strip())

    before = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # as by nohup
            signal.signal(number, note)
    own_session = bool(torchrun)  # so does each of its ranks
    options |= {"env": env, "stderr": subprocess.PIPE, "start_new_session": own_session}
    child = subprocess.Popen(command, **options)
    if signals:  # that came before the child
        child.terminate()
    reader = Thread(target=pass_on, daemon=True)
    reader.start()
    while True:
        try:
            status = child.wait(timeout=0.5)
            break
        except subprocess.TimeoutExpired:
            if not reason and (reason := check()):
                print(f"run.sh: stopping: {reason}", file=sys.stderr, flush=True)
                child.terminate()
    if status and signals:
        status = 128 + signals[0]  # the program got a SIGTERM, and torchrun has its own status
    elif status < 0:
        status = 128 - status
    reader.join(timeout=10)  # a process that the program left running may keep the pipe open
    for number, handler in before.items():
        signal.signal(number, handler)
    if reason and not signals:
        return End(1, reason, diverged=True)
    if status > 128:
        return End(status, signal.Signals(status - 128).name)
    lines = [re.sub(r"^\[rank\d+\]: *", "", line) for line in last if line]
    named = [line for line in lines if ERROR.match(line)]
    places = [match.groups() for line in lines if (match := PLACE.match(line))]
    here = [place for place in places if "/site-packages/" not in place[0]] if status else []
    file, line = (here or [(None, None)])[-1]
    return End(status, (named or lines or [""])[-1], file, line and int(line))


# -----------------------------------------------------------------------------
# A run


def check_compiler(hp: Hyperparameters) -> None:
    """Say so if the run is to be compiled and this machine seems to lack what that needs. The run
    may find the compiled code in its cache, so it begins."""
    gpus, reason = gpus_for(hp), ""
    if hp.compile == "on" or (hp.compile == "auto" and gpus):
        reason = machine.lacks() if gpus else machine.compiler_fault()
    if reason:
        print(f"run.sh: {reason}", file=sys.stderr, flush=True)


def say_memory(path: Path, hp: Hyperparameters, record: str) -> None:
    """Say what a run on one GPU reserves, if that was counted."""
    gpus = gpus_for(hp)
    is_one = gpus > 0 and (os.environ.get("NPROC") or str(gpus)) == "1"
    if is_one and (text := machine.memory_of(path, hp, record)):
        print(f"run.sh: {text}", file=sys.stderr, flush=True)


def check_folder(hp: Hyperparameters) -> None:
    """OSError if the folder of a run's checkpoints cannot be written: the run would find that out
    after hours."""
    folder = Path("logs", hp.run_id)
    TemporaryFile(dir=folder if folder.is_dir() else folder.parent).close()


class Live:
    """A run that is being made, seen by its files. With a label, its own lines are not shown."""

    def __init__(self, path: Path, hp: Hyperparameters, label: str):
        self.name, self.label, self.steps = script.show(path), label, hp.num_iterations
        self.saves = hp.keep if hp.save_every else min(hp.keep, 1)  # checkpoints, at most
        self.log = Path("logs", f"{hp.run_id}.txt")
        self.metrics = None  # the open file of metrics
        self.last = {}  # the last values of the fields of the metrics
        self.first, self.above = math.inf, 0  # the first loss, and how many last ones are above it
        self.step, self.ms = 0, 0.0
        self.heard, self.told = 0.0, 0.0  # when the log was last written, and when before a notice
        self.pause = 0.0  # the longest between two such times
        self.columns = sys.stdout.isatty() and os.get_terminal_size(sys.stdout.fileno()).columns
        self.bar = tqdm(
            total=self.steps,
            desc=label,
            leave=False,
            disable=not (label and self.columns),
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}",
        )

    def check(self) -> str:
        """Read new metrics. Return why the run should be stopped, "" if it should go on: it has
        diverged if all of a tenth of its steps, or 20, have a loss above the first one."""
        if self.saves:
            self.say_room()
        path = self.log.with_suffix(".jsonl")
        if self.metrics is None and path.exists():
            self.metrics = path.open()
        while self.metrics and (line := self.metrics.readline()):
            if not line.endswith("\n"):  # it is being written
                self.metrics.seek(self.metrics.tell() - len(line))
                break
            try:
                row = json.loads(line)
            except ValueError:  # a line that another process cut off
                continue
            if not isinstance(row, dict):
                continue
            self.last |= row
            if "train_loss" in row:
                self.step, self.ms, loss = row["step"], row["ms"], row["train_loss"]
                loss = math.inf if loss is None else loss  # null: it was not finite
                self.first = min(self.first, loss) if self.step == 1 else self.first
                self.above = self.above + 1 if loss > self.first else 0
                rate = f"loss {loss:.3f}, {row.get('tokens_per_s', 0) / 1e3:.1f}k tokens/s"
                self.bar.set_postfix_str(f"{rate}, {self.time_left()}", refresh=False)
        self.bar.n = self.step
        self.bar.refresh()
        if self.above < max(20, self.steps // 10):
            return ""
        return f"{self.above} steps had a loss above {self.first:.4f}, the first one"

    def say_room(self) -> None:
        """Say so once if the disk has less room than the run's checkpoints may need. The log tells
        the size of its model: this process need not build one, which takes a second."""
        text = self.log.read_text("utf-8", errors="replace") if self.log.is_file() else ""
        if not (found := SIZE.search(text)):
            return
        numbers = sum(int(count or 0) for count in found.groups())
        size = self.saves * 3 * 4 * numbers  # weights, and at most two moments of each
        self.saves = 0
        free = shutil.disk_usage(self.log.parent).free
        if free < size:
            needs = f"checkpoints may need {size / 1e9:.1f} GB"
            text = f"{needs}, {self.log.parent} has {free / 1e9:.1f} GB free"
            print(f"run.sh: {text}", file=sys.stderr, flush=True)

    def time_left(self) -> str:
        """Return how long the other steps take, at the rate of the last one."""
        return f"{tqdm.format_interval((self.steps - self.step) * self.ms / 1e3)} left"

    def news(self) -> str:
        """Return what to say of a run whose own lines are hidden, or do not come."""
        if not self.bar.disable:  # it shows that time goes on
            return ""
        if not self.metrics and not self.log.exists():
            return f"{self.label or self.name}: starting, Python imports torch"
        if self.label:
            left = f", {self.time_left()}" if self.step else ""
            return f"{self.label}: step {self.step}/{self.steps}{left}"
        if self.columns or not self.log.exists():  # the run shows a bar of its own, or it was moved
            return ""
        written = self.log.stat().st_mtime
        if self.heard:
            self.pause = max(self.pause, written - self.heard)
        self.heard = written
        # Once a silence, and only if it is longer than this run's own pauses.
        if self.told == written or time.time() - written < max(7, 3 * self.pause):
            return ""
        self.told = written
        return f"{self.log} has no new line: compilation, validation and saving may take minutes"


def train(path: Path, flags: list[str], label: str = "", **known) -> dict:
    """Make a run of a script, note its summary, and return that. With a label, which says what run
    it is, only progress and errors are shown. `known` has keys of the summary. UserError for bad
    flags, or if the name is taken."""
    hp, record = script.parse(path, flags)
    run_class = script.load(path)
    check_compiler(hp)
    script.tokenizer_for(hp)  # the summary needs it
    if not label:
        say_memory(path, hp, record)
    fetch(hp, run_class)
    if not (hp.run_id or hp.resume):
        hp = replace(hp, run_id=new_name())
        flags = [*flags, "--run_id", hp.run_id]
    live, begin = Live(path, hp, label), result.Start(path, hp, record, known)
    refuse_live(live.log)
    if begin.log_size and not hp.resume:  # an empty log is of a run that was killed at once
        raise UserError(f"{live.log} exists: choose another --run_id, or --resume on")
    result.open_results().close()  # at its end, the run needs this, and what the next lines check
    vocabulary = script.core(run_class).HERE / "data/vocab.bpe"
    if getattr(hp, "canonical_mask", False) and not vocabulary.is_file():
        raise UserError(f"{vocabulary} is missing, from which --canonical_mask on makes its mask")
    if hp.keep:
        check_folder(hp)
    output = {"stdout": subprocess.DEVNULL} if label else {}
    with console.doing(live.news), live.bar:
        end = start(hp, [str(path), *flags], live.check, **output)
    live.check()  # its last lines
    found = result.result_of(begin, end, live.last)
    result.note(found)
    if found["exit"] and not end.status:
        print(f"run.sh: error: {found['reason']}", file=sys.stderr)
    if label:
        return found
    saved = script.core(run_class).checkpoints(Path("logs", hp.run_id))
    if saved and not found["exit"] and hp.tokenizer != "none":
        run_sh = "./run.sh" if Path.cwd() == HERE else f"{HERE}/run.sh"
        command = [run_sh, "tools/sample.py", str(saved[0])]
        if path.parent not in (HERE, HERE / "forks"):
            command += ["--script", str(path)]  # a checkpoint names no script elsewhere
        print("read what it writes:", shlex.join(command))
    result.print_result(found)
    return found
