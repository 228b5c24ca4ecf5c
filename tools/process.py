"""Start a program in a process for each GPU, and wait for it."""

import math
import os
import re
import signal
import subprocess
import sys
from collections import deque
from threading import Thread

import numpy as np
import torch

import machine
from train_gpt import FINEWEB, HERE, Hyperparameters, Run, UserError

SHARD_TOKENS = 10**8  # in a shard of FineWeb
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
ERROR = re.compile(r"\S+: error: |[\w.]*(Error|Exception|Failed|Interrupt)\b")  # begins a line


def gpus_for(hp: Hyperparameters) -> int:
    """Return the number of GPUs that a run with these settings may use. UserError if this machine
    has GPUs that torch cannot use."""
    if hp.device == "cpu":
        return 0
    if reason := machine.fault():
        raise UserError(f"{reason}; --device cpu trains without them")
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
    """Return the most shards of FineWeb that a run can read."""
    lengths = [run_class.moment(step, hp).seq_len for step in range(hp.num_iterations)]
    batches = hp.batch_seqs * np.array(lengths)
    # In a fork, sequences may begin where documents begin. Tokens between them are skipped: 3 % of
    # those read or, where documents are cut at 2048 tokens, up to 60 % (in the public logs, 424.7M
    # tokens are read from 7 shards).
    if getattr(hp, "align_to_documents", False):
        batches = batches * (1.6 if hp.max_document_tokens else 1.03)
    # No batch spans two shards, so a part of each shard may be left over.
    return math.ceil(batches.sum() / (SHARD_TOKENS - 1 - batches.max()))


def fetch(hp: Hyperparameters, run_class: type[Run]) -> None:
    """Download the shards of FineWeb that a run on GPUs needs. UserError if that fails."""
    if gpus_for(hp) and hp.train_files.startswith(FINEWEB):
        command = [f"{HERE}/cached_fineweb.py", str(shards_needed(hp, run_class))]
        if subprocess.run([sys.executable, *command]).returncode:
            raise UserError("FineWeb could not be fetched: see above")


def start(hp: Hyperparameters, words: list[str], **options) -> tuple[int, str]:
    """Run a Python program, the first of the words, on the GPUs for which the settings ask, and
    wait. Return its exit status (128 + n after signal n), and the signal or the error.

    The first signal to stop is passed on as a SIGTERM, and a later SIGINT as it is: it ends a run
    that saves at once. A terminal sends its signals to a single program, too, but not to torchrun
    and its ranks.
    """
    gpus = gpus_for(hp)
    count = processes(hp.batch_seqs, gpus)
    env, torchrun = dict(os.environ), []
    if count > 1:
        # On CPUs, processes share the cores; on GPUs, one thread each is enough.
        env.setdefault("OMP_NUM_THREADS", str(1 if gpus else max(1, os.cpu_count() // count)))
        torchrun = [
            "-P",
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={count}",
        ]
    command = [sys.executable, *torchrun, *words]
    child, signals, last = None, [], deque(maxlen=200)

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
    own_session = bool(torchrun)  # each of its ranks has one, too
    options |= {"env": env, "stderr": subprocess.PIPE, "start_new_session": own_session}
    child = subprocess.Popen(command, **options)
    if signals:  # that came before the child
        child.terminate()
    reader = Thread(target=pass_on, daemon=True)
    reader.start()
    status = child.wait()
    if status and signals:
        status = 128 + signals[0]  # the program has had a SIGTERM, and torchrun has its own status
    elif status < 0:
        status = 128 - status
    reader.join(timeout=10)  # a process that the program left behind may keep the pipe open
    for number, handler in before.items():
        signal.signal(number, handler)
    if status > 128:
        return status, signal.Signals(status - 128).name
    lines = [re.sub(r"^\[rank\d+\]: ", "", line) for line in last if line]
    named = [line for line in lines if ERROR.match(line) and "ChildFailedError" not in line]
    return status, (named or lines or [""])[-1]
