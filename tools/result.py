"""The summary of a run: the last lines on the console, and an object in logs/results.jsonl.

run              name of the run; logs/RUN.txt is its log
status           finished, stopped (by a signal, and a checkpoint was saved) or failed
reason           the signal, or the error
script, digest   the script, and a digest of its source and of the project's files that it imports
record, flags    its settings
machine          GPUs
steps, tokens    made and read, since step 0
val_loss         of the last step, in nats per token, if the run has come so far
bits_per_byte    val_loss / ln 2 * tokens / bytes, of the text that validation reads
train_time_s     without warm-up, validation and saving, since step 0
warm_up_s        compilation and warm-up of this start
total_s          from the start of the processes to their end
ms_per_step, tokens_per_s    train_time_s by step, and tokens by train_time_s
parameters       numbers that the run learns
peak_memory_mib  allocated on the GPU of rank 0
kernels          Triton kernels in use
kernels_off      those that could not be used, and why

What is unknown is null in the file, and not printed.
"""

import hashlib
import json
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import process
import script
from gpt2 import bits_per_byte
from logfile import RULE
from train_gpt import END_OF_TEXT, Hyperparameters, Run, UserError

RESULTS = Path("logs", "results.jsonl")
STOPPED = [128 + number for number in process.STOPS]  # exit statuses
KEYS = re.findall(r"^([a-z]\w+)(?:, (\w+))?  ", __doc__, re.MULTILINE)


def digest(path: Path) -> str:
    """Return a digest of the sources of a script, and of the files of the project that it uses."""
    sources = b"".join(source.read_bytes() for source in script.sources(path))
    return hashlib.sha256(sources).hexdigest()[:12]


def bits_of(val_loss: float, hp: Hyperparameters, run_class: type[Run]) -> float | None:
    """Return a validation loss as bits per byte; None if the tokens are not GPT-2's."""
    if hp.vocab_size <= END_OF_TEXT:
        return None
    batch = script.core(run_class).validation_batch(hp, 0, 1, torch.device("cpu"))
    return bits_per_byte(val_loss, batch[1].numpy())


def log_of(run_id: str) -> str:
    """Return the log of a run, "" if there is none."""
    path = Path("logs", f"{run_id}.txt")
    return path.read_text("utf-8") if path.exists() else ""


@dataclass
class Start:
    """What is known of a run when it starts."""

    path: Path  # of the script
    hp: Hyperparameters
    record: str

    def __post_init__(self):
        self.time, self.digest = time.time(), digest(self.path)
        self.log_size = len(log_of(self.hp.run_id))


def result_of(start: Start, status: int, reason: str) -> dict:
    """Return the summary of a run that has ended with an exit status, for this reason."""
    hp, run_class = start.hp, script.load(start.path)
    lines = log_of(hp.run_id)[start.log_size :].split(f"\n{RULE}\n")[-1]  # without the settings
    if "\nrecord " not in f"\n{lines}" and "is finished" not in lines:
        lines = ""  # what another process has written
        status, reason = status or 1, reason or "the script has started no run: has it a main()?"

    def last(pattern: str, text: str = lines) -> str | None:
        return (re.findall(f"^{pattern}", text, re.MULTILINE) or [None])[-1]

    # Of a run that goes on, or is finished already, older lines count, too.
    whole = log_of(hp.run_id).split(f"\n{RULE}\n")[-1] if lines else ""
    steps = int(last(r"step:(\d+)/", whole) or 0)
    ms = int(last(r"step:.* train_time:(\d+)ms", whole) or 0)
    tokens = hp.batch_seqs * sum(run_class.moment(step, hp).seq_len for step in range(steps))
    val_loss = last(rf"step:{hp.num_iterations}/.* val_loss:(\S+)", whole)
    val_loss = val_loss and float(val_loss)
    bits = val_loss and bits_of(val_loss, hp, run_class)
    saved = "; go on with" in (last(r"stopped by .* after step .*") or "")
    if status in STOPPED and not saved:
        reason += ": no checkpoint was saved"
    warm_up, parameters = last(r"compilation and warm-up.*: (.*) s$"), last(r"parameters: (.*)")
    memory = last(r"peak memory allocated: (\d+) MiB")
    off = dict(re.findall(r"^kernel (\w+) is off: (.*)$", lines, re.MULTILINE))
    default = run_class.records[start.record]
    flags = script.core(run_class).changed_flags(replace(hp, run_id="", resume=False), default)
    return {
        "run": hp.run_id,
        "status": "stopped" if saved else "failed" if status else "finished",
        "reason": reason if status else None,
        "script": script.show(start.path),
        "digest": start.digest,
        "record": start.record,
        "flags": shlex.join(flags),
        "machine": last(r"on (\d+ x .*), log in "),
        "steps": steps,
        "tokens": tokens,
        "val_loss": val_loss,
        "bits_per_byte": bits and round(bits, 5),
        "train_time_s": ms / 1000,
        "warm_up_s": warm_up and float(warm_up),
        "total_s": round(time.time() - start.time, 1),
        "ms_per_step": round(ms / steps, 2) if steps else None,
        "tokens_per_s": round(1000 * tokens / ms) if ms else None,
        "parameters": parameters and int(parameters),
        "peak_memory_mib": memory and int(memory),
        "kernels": last(r"kernels: (.*)"),
        "kernels_off": off or None,
    }


def not_begun(path: Path, flags: list[str], error: BaseException) -> dict:
    """Return the summary of a run that an error, or a signal, has kept from beginning."""
    reason = f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        reason = "SIGINT: the run had not begun"
    known = {
        "status": "failed",
        "reason": reason,
        "script": script.show(path),
        "digest": digest(path),
        "flags": shlex.join(flags),
    }
    return dict.fromkeys(key for keys in KEYS for key in keys if key) | known


def note(result: dict) -> None:
    """Append a summary to logs/results.jsonl, in one write: runs may end at the same time. A line
    that a full disk has cut is ended first."""
    RESULTS.parent.mkdir(exist_ok=True)
    line = json.dumps(result).encode() + b"\n"
    try:
        with RESULTS.open("ab+") as file:
            file.seek(-1 if file.tell() else 0, os.SEEK_END)
            if file.read(1) not in (b"", b"\n"):
                line = b"\n" + line
            file.write(line)
    except OSError as error:
        raise UserError(f"could not write {RESULTS}: {error.strerror}") from error


def print_result(result: dict) -> None:
    """Print a summary, a line for each key that has a value."""
    print()
    for key, value in result.items():
        if isinstance(value, dict):
            value = "; ".join(f"{name}: {reason}" for name, reason in value.items())
        if value not in (None, ""):
            print(f"{key}: {value}")
    sys.stdout.flush()
