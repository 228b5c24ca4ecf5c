"""Make a run of a training script, or several; run.sh starts this when Python is set up.

    launch.py [SCRIPT.py] [flags]              one process per GPU; FineWeb is fetched if needed
    launch.py [SCRIPT.py] --runs N [flags]     N runs with seeds from --seed on, then statistics
    launch.py [SCRIPT.py] --seconds N [flags]  as many steps as take N seconds here

SCRIPT.py is train_gpt.py if none is named. NPROC=n uses n GPUs. A run ends with its summary, which
is also a line of logs/results.jsonl; result.py lists its keys.
"""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from threading import Thread

import numpy as np
import torch
from tqdm import tqdm

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

import console
import machine
import result
import script
from logfile import OF_ONE_RUN, is_finished, read_metrics
from result import End
from train_gpt import FINEWEB, HERE, STOPS, Hyperparameters, Run, UserError, new_name

SHARD_TOKENS = 10**8  # in a shard of FineWeb
ERROR = re.compile(r"\S+: error: |[\w.]*(Error|Exception|Failed|Interrupt)\b")  # begins a line
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


def start(hp: Hyperparameters, words: list[str], **options) -> End:
    """Run a Python program, the first of the words, on the GPUs for which the settings ask, and
    wait.

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
    own_session = bool(torchrun)  # so does each of its ranks
    options |= {"env": env, "stderr": subprocess.PIPE, "start_new_session": own_session}
    child = subprocess.Popen(command, **options)
    if signals:  # that came before the child
        child.terminate()
    reader = Thread(target=pass_on, daemon=True)
    reader.start()
    status = child.wait()
    if status and signals:
        status = 128 + signals[0]  # the program got a SIGTERM, and torchrun has its own status
    elif status < 0:
        status = 128 - status
    reader.join(timeout=10)  # a process that the program left running may keep the pipe open
    for number, handler in before.items():
        signal.signal(number, handler)
    if status > 128:
        name = signal.Signals(status - 128).name
        of_rank = [line for line in last if re.fullmatch(rf"{name} ended rank \d+", line)]
        return End(status, (of_rank or [name])[-1])
    lines = [re.sub(r"^\[rank\d+\]: *", "", line) for line in last if line]
    named = [line for line in lines if ERROR.match(line)]
    places = [match.groups() for line in lines if (match := PLACE.match(line))]
    here = [place for place in places if "/site-packages/" not in place[0]] if status else []
    file, line = (here or [(None, None)])[-1]
    return End(status, (named or lines or [""])[-1], file, line and int(line))


# -----------------------------------------------------------------------------
# A run


def check_compiler(hp: Hyperparameters) -> None:
    """Say so if the run is to be compiled and there seems to be no compiler. The run may find the
    compiled code in its cache, so it begins."""
    compiles = hp.compile == "on" or (hp.compile == "auto" and gpus_for(hp))
    if compiles and (reason := machine.compiler_fault()):
        print(f"run.sh: {reason}", file=sys.stderr, flush=True)


def say_memory(path: Path, hp: Hyperparameters, record: str) -> None:
    """Say what the record of a run on one GPU reserves, if that was counted."""
    gpus = gpus_for(hp)
    is_one = gpus > 0 and (os.environ.get("NPROC") or str(gpus)) == "1"
    if is_one and (text := machine.memory_of(path, record)):
        print(f"run.sh: {text}", file=sys.stderr, flush=True)


def check_folder(hp: Hyperparameters) -> None:
    """OSError if the folder of a run's checkpoints cannot be written: the run would find that out
    after hours."""
    folder = Path("logs", hp.run_id)
    TemporaryFile(dir=folder if folder.is_dir() else folder.parent).close()


def news_of(hp: Hyperparameters, name: str, label: str) -> str:
    """Return what to say of a run that starts, or whose lines are hidden: that one has a label."""
    log = Path("logs", f"{hp.run_id}.txt")
    if not log.exists():
        return f"{label or name}: starting, Python imports torch"
    if not label:  # then the run speaks for itself
        return ""
    rows = read_metrics(log.with_suffix(".jsonl")) or [{"step": 0}]
    step, ms = rows[-1]["step"], rows[-1].get("ms", 0.0)
    left = tqdm.format_interval((hp.num_iterations - step) * ms / 1e3)  # at this step's rate
    return f"{label}: step {step}/{hp.num_iterations}, {left} left"


def train(path: Path, flags: list[str], label: str = "", group: str | None = None) -> dict:
    """Make a run of a script, note its summary, and return that. With a label, which says what run
    it is, only progress and errors are shown. `group` names the command that makes several runs.
    UserError for bad flags, or if the name is taken."""
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
    begin = result.Start(path, hp, record, group)
    if begin.log_size and not hp.resume:  # an empty log is of a run that was killed at once
        raise UserError(f"{begin.log} exists: choose another --run_id, or --resume on")
    result.note()  # at its end, the run needs this, and what the next lines check
    vocabulary = script.core(run_class).HERE / "data/vocab.bpe"
    if getattr(hp, "canonical_mask", False) and not vocabulary.is_file():
        raise UserError(f"{vocabulary} is missing, from which --canonical_mask on makes its mask")
    if hp.keep:
        check_folder(hp)
    output = {"stdout": subprocess.DEVNULL} if label else {}
    with console.doing(lambda: news_of(hp, script.show(path), label), in_place=bool(label)):
        end = start(hp, [str(path), *flags], **output)
    found = result.result_of(begin, end)
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


# -----------------------------------------------------------------------------
# --seconds N, as a number of steps


def is_given(name: str, flags: list[str]) -> bool:
    """Return whether a setting is among the flags."""
    return any(word.split("=")[0] == f"--{name}" for word in flags)


def ms_per_step(path: Path, flags: list[str], budget: float) -> float:
    """Return the mean ms of a step of a script with these flags, timed for about `budget` seconds.
    UserError if that fails."""
    hp, _ = script.parse(path, flags)
    what = f"timing steps of {script.show(path)}, up to {budget:.0f} s after compilation"
    with TemporaryFile("w+") as out, console.doing(what):
        words = [f"{HERE}/tools/bench.py", str(path), "--mean", str(budget), *flags]
        end = start(hp, words, stdout=out)
        if end.status in result.STOPPED:
            raise KeyboardInterrupt
        if end.status:
            raise UserError(f"steps could not be timed: {end.reason}")
        out.seek(0)
        return float(out.read().split()[-1])


def steps_in(seconds: float, path: Path, flags: list[str]) -> int:
    """Return how many steps of a script with these flags take so many seconds of training; print
    that, and flags_for ends the line. UserError for a number that cannot be met."""
    if not 0 < seconds < math.inf:
        raise UserError(f"--seconds {seconds:g}: must be a finite number above 0")
    for name in ("num_iterations", "resume"):
        if is_given(name, flags):
            raise UserError(f"--seconds chooses the number of steps anew: leave it or --{name} out")
    ms = ms_per_step(path, flags, min(max(seconds / 10, 20.0), 5 * seconds))
    steps = max(1, round(1e3 * seconds / ms))
    print(f"--seconds {seconds:g}: {steps} steps of about {ms:.0f} ms", end="; ", flush=True)
    return steps


def flags_for(path: Path, flags: list[str], steps: int, label: str) -> list[str]:
    """Return the flags that make so many steps; print them with a label. Steps at which something
    begins, and lengths in steps, are scaled; data that is too short is read again. Flags that were
    given stay."""
    hp, _ = script.parse(path, flags)
    more = ["--num_iterations", str(steps)]
    for name, value in vars(hp).items():
        if name.endswith(("_steps", "_from")) and value and not is_given(name, flags):
            unit = 4 if name.endswith("_from") else 1  # as the n-gram table's ngram_slow_from needs
            scaled = value * steps / hp.num_iterations
            more += [f"--{name}", str(unit * max(1, round(scaled / unit)))]
    if not is_given("epochs", flags):
        more += ["--epochs", "0"]
    print(f"{label}:", *more, flush=True)
    return more


# -----------------------------------------------------------------------------
# Several runs, and the command line


def difference(path: Path, hp: Hyperparameters) -> str:
    """Return how the finished run of this name differs from what would be made, apart from what
    each run may choose for itself; "" if it does not."""
    before = [run for run in result.runs_noted() if run["run"] == hp.run_id]
    if not before or before[-1]["flags"] is None:
        return f"is not in {result.RESULTS}"
    if before[-1]["digest"] != result.digest(path):
        return "was made by another source"
    words = ["--record", before[-1]["record"], *shlex.split(before[-1]["flags"])]
    then, _ = script.parse(path, words)
    own = {name: getattr(hp, name) for name in OF_ONE_RUN & vars(hp).keys()}
    changed = script.core(script.load(path)).changed_flags(hp, replace(then, **own))
    return f"was made without {shlex.join(changed)}" if changed else ""


def words_to_make(path: Path, flags: list[str]) -> list[str]:
    """Return the flags that make, or finish, a run with these; [] if it is finished. UserError if
    it was made in another way."""
    hp, _ = script.parse(path, flags)
    log = Path("logs", f"{hp.run_id}.txt")
    if is_finished(log):
        if reason := difference(path, hp):
            raise UserError(f"{log} {reason}: choose another --run_id")
        return []
    return [*flags, "--resume", "on"] if log.exists() else flags


def repeat(count: int, path: Path, flags: list[str]) -> int:
    """Make `count` runs with consecutive seeds, then print their statistics. Finished runs
    of this name are not made again. Weights are saved only if the flags ask for it. Return the
    exit status; the first run that fails is the last one."""
    hp, _ = script.parse(path, flags)
    name = hp.run_id or new_name()
    logs = []
    for seed in range(hp.seed, hp.seed + count):
        own = ["--seed", str(seed), "--run_id", f"{name}_seed{seed}"]
        logs.append(f"logs/{name}_seed{seed}.txt")
        words = words_to_make(path, ["--keep", "0", *flags, *own])
        if not words:
            print(f"{logs[-1]} is finished", flush=True)
        elif status := train(path, words, group=name)["exit"]:
            return status
    return subprocess.run([sys.executable, f"{HERE}/tools/leaderboard.py", *logs]).returncode


@console.program("run.sh")
def main(words: list[str]) -> None:
    """Train, once or --runs times, and exit with the run's status."""
    path, words = script.take_script(words)
    parser = console.parser_of()
    parser.add_argument("--runs", type=int)
    parser.add_argument("--seconds", type=float)
    args, flags = parser.parse_known_args(words)
    if args.runs is not None and args.runs < 1:
        raise UserError(f"--runs {args.runs}: must be 1 or more")
    try:
        if args.seconds is not None:
            steps = steps_in(args.seconds, path, flags)
            flags = [*flags, *flags_for(path, flags, steps, script.show(path))]
        status = repeat(args.runs, path, flags) if args.runs else train(path, flags)["exit"]
    except Exception as error:
        if not isinstance(error, UserError):  # it is of the script, which is imported here
            result.note(result.not_begun(path, flags, error))
        raise
    sys.exit(status)


if __name__ == "__main__":
    main()
