"""The summary of a run: the last lines on the console, and an object in logs/results.jsonl.

kind             run; an object of a comparison has the kind comparison (compare.py)
run, group       name of the run, and of the command that made several
start            when it began: ISO 8601, with the offset to UTC
status           finished, stopped (by a signal), failed, or diverged
                 (its last loss is not finite, or is above ln(vocabulary))
exit             exit status
reason           the signal, or the error
file, line       where a failure was
script, digest   the script, and a digest of its source and of the project's files that it imports
record, flags    its settings
seed             of the initial weights
data             files of training, files and number of tokens of validation
machine, host    GPUs, and the computer's name
torch            its version
steps, tokens    made and read, since step 0
train_loss       of the last step
val_loss         of the last step, in nats per token, if the run got so far
bits_per_byte    val_loss / ln 2 * tokens / bytes, of the text that validation reads
train_time_s     without warm-up, validation and saving, since step 0
total_s          from the start of the processes to their end
ms_per_step, tokens_per_s    train_time_s by step, and tokens by train_time_s
parameters       numbers that the run learns
peak_memory_mib  allocated on the GPU of rank 0
kernels          Triton kernels in use
kernels_off      those that could not be used, and why
log              the path of its log
resume           the command that resumes it, if it was saved and not finished

The console shows the most important ones. What is unknown is null in the file, and not printed. Of
several objects of a run, the last counts.
"""

import hashlib
import math
import platform
import re
import shlex
import time
import traceback
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch

import logfile
import script
from tokenizer import bits_per_byte
from train_gpt import STOPS, Hyperparameters, Run, UserError, has_diverged, to_json

RESULTS = Path("logs", "results.jsonl")

STOPPED = [128 + number for number in STOPS]  # exit statuses
KEYS = re.findall(r"^([a-z]\w+)(?:, (\w+))?  ", __doc__, re.MULTILINE)
NOTHING = dict.fromkeys(key for keys in KEYS for key in keys if key)
SHOWN = "log", "status", "reason", "steps", "train_loss", "val_loss", "bits_per_byte"
SHOWN += "train_time_s", "ms_per_step", "tokens_per_s", "peak_memory_mib", "resume"


@dataclass(frozen=True)
class End:
    """How a program ended: its exit status, the signal or the error, and where that was."""

    status: int
    reason: str = ""
    file: str | None = None
    line: int | None = None


def digest(path: Path) -> str:
    """Return a digest of the sources of a script, and of the project's files that it uses."""
    sources = b"".join(source.read_bytes() for source in script.sources(path))
    return hashlib.sha256(sources).hexdigest()[:12]


def bits_of(val_loss: float, hp: Hyperparameters, run_class: type[Run]) -> float | None:
    """Return a validation loss as bits per byte; None if the tokens have no text."""
    tokenizer = script.tokenizer_for(hp)
    if tokenizer is None:
        return None
    _, targets = script.core(run_class).validation_batch(hp, 0, 1, torch.device("cpu"))
    return round(bits_per_byte(val_loss, targets.numpy().ravel(), tokenizer), 5)


def facts(path: Path) -> dict:
    """Return the summary of a run that begins now, without its settings."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    found = {"kind": "run", "start": now, "script": script.show(path), "digest": digest(path)}
    return NOTHING | found | {"host": platform.node(), "torch": torch.__version__}


class Start:
    """What is known of a run when it starts."""

    def __init__(self, path: Path, hp: Hyperparameters, record: str, group: str | None = None):
        self.path, self.hp, self.record = path, hp, record
        self.facts = facts(path) | {"group": group}
        self.clock = time.monotonic()
        self.log = Path("logs", f"{hp.run_id}.txt")
        self.log_size = self.log.stat().st_size if self.log.exists() else 0


def result_of(start: Start, end: End) -> dict:
    """Return the summary of a run that has ended, or of a script that has started none."""
    hp, run_class = start.hp, script.load(start.path)
    flags = script.core(run_class).flags_of(hp, run_class.records[start.record])
    ended = "stopped" if end.status in STOPPED else "failed"
    found = start.facts | {
        "run": hp.run_id,
        "status": ended if end.status else "finished",
        "exit": end.status,
        "reason": end.reason if end.status else None,
        "file": end.file,
        "line": end.line,
        "record": start.record,
        "flags": shlex.join(flags),
        "seed": hp.seed,
        "data": f"{hp.train_files}; {hp.val_tokens} tokens of {hp.val_files}",
        "total_s": round(time.monotonic() - start.clock, 1),
    }
    try:
        is_other_s = "choose another --run_id" in (end.reason or "")  # which may be writing
        if is_other_s or start.log.stat().st_size == start.log_size:
            raise ValueError("this start has written nothing")
        run = logfile.read_log(start.log, whole=False)
    except (OSError, ValueError):
        if not end.status:
            reason = "the script has started no run: has it a main()?"
            found |= {"status": "failed", "exit": 1, "reason": reason}
        return found
    rows = logfile.read_metrics(start.log.with_suffix(".jsonl"))
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    steps, seconds = run.last
    tokens = hp.batch_seqs * sum(run_class.Moment(step, hp).seq_len for step in range(steps))
    val_loss, _ = run.curve.get(hp.num_iterations, (None, None))
    went_up = val_loss is not None and has_diverged(val_loss, hp)
    if went_up or not all(map(math.isfinite, losses[-1:])):
        found["status"] = "diverged"
    elif found["status"] == "stopped" and not run.resume:
        found["reason"] += ": no checkpoint was saved"
    return found | {
        "machine": run.devices,
        "steps": steps,
        "tokens": tokens,
        "train_loss": round(losses[-1], 4) if losses else None,
        "val_loss": val_loss,
        "bits_per_byte": val_loss and bits_of(val_loss, hp, run_class),
        "train_time_s": seconds,
        "ms_per_step": round(1e3 * seconds / steps, 2) if steps else None,
        "tokens_per_s": round(tokens / seconds) if seconds else None,
        "parameters": run.parameters,
        "peak_memory_mib": run.memory and int(run.memory.split("/")[0]),
        "kernels": run.kernels or None,
        "kernels_off": run.kernels_off or None,
        "log": str(start.log),
        "resume": run.resume or None,
    }


def not_begun(path: Path, flags: list[str], error: Exception) -> dict:
    """Return the summary of a run that an error in its script kept from starting."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames if frame.filename == str(path)]
    if isinstance(error, SyntaxError):
        places.append((error.filename, error.lineno))
    file, line = (places or [(None, None)])[-1]
    found = {"status": "failed", "exit": 1, "reason": f"{type(error).__name__}: {error}"}
    found |= {"file": file, "line": line, "flags": shlex.join(flags)}
    return facts(path) | found


def note(*objects: dict) -> None:
    """Append objects to logs/results.jsonl, each in one write: runs may end at the same time.
    UserError if the file cannot be written: a run asks before it begins, with no object."""
    try:
        RESULTS.parent.mkdir(exist_ok=True)
        with RESULTS.open("ab", buffering=0) as file:
            for found in objects:
                file.write(to_json(found).encode() + b"\n")
    except OSError as error:
        place = error.filename or RESULTS
        remedy = "make room, move it away, or start in another folder"
        raise UserError(f"could not write {place}: {error.strerror}: {remedy}") from error


def noted() -> list[dict]:
    """Return the objects of logs/results.jsonl, with None for the keys that they lack."""
    return [NOTHING | row for row in logfile.objects_in(RESULTS)]


def runs_noted() -> list[dict]:
    """Return the runs among the objects. If a run has several, its last one with a log counts, in
    the group of the earlier ones."""
    found = {}
    for number, run in enumerate(row for row in noted() if row["kind"] == "run"):
        name = run["run"] or number  # one that has not begun may have no name
        before = found.get(name)
        if before and run["log"] is None:
            continue  # it was refused
        if before:
            run["group"] = run["group"] or before["group"]
        found.pop(name, None)
        found[name] = run
    return list(found.values())


def print_result(result: dict) -> None:
    """Print the most important keys that have a value: a line each, or one line for a run of a
    group. The command that resumes the run is the last of all."""
    shown = [f"{key}: {result[key]}" for key in SHOWN if result[key] not in (None, "")]
    if result["group"]:
        print(", ".join(shown))
    else:
        print("", *shown, sep="\n")
