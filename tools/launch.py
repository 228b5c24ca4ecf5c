"""Start a training script on this machine's GPUs. run.sh calls this when Python is set up.

    launch.py [SCRIPT.py] [flags]            one process per GPU; FineWeb is fetched if needed
    launch.py [SCRIPT.py] --runs N [flags]   N runs with seeds from --seed on, then their statistics

SCRIPT.py is train_gpt.py if none is named. NPROC=n uses n GPUs.
"""

import argparse
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]  # tools, project
import script  # noqa: E402

from train_gpt import FINEWEB, HERE, Hyperparameters, Run, UserError, as_program  # noqa: E402

SHARD_TOKENS = 10**8  # in a shard of FineWeb


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


def call(command: list[str]) -> None:
    """Run a program of the project; if it fails, exit with its status."""
    if status := subprocess.run([sys.executable, *command]).returncode:
        sys.exit(status)


def train(path: Path, run_class: type[Run], flags: list[str]) -> None:
    """Train in this process, or replace it by torchrun if several are needed."""
    core = script.core(run_class)
    hp, record = core.parse_args(flags, run_class)
    gpus = 0 if hp.device == "cpu" else torch.cuda.device_count()
    count = processes(hp.batch_seqs, gpus)
    if gpus and hp.train_files.startswith(FINEWEB):
        call([f"{HERE}/cached_fineweb.py", str(shards_needed(hp, run_class))])
    if count > 1:
        # On CPUs, processes share the cores; on GPUs, one thread each is enough.
        threads = 1 if gpus else max(1, os.cpu_count() // count)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # A script in another folder must find the project's modules.
        os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
        os.execv(sys.executable, [sys.executable, *torchrun, str(path), *flags])
    if core.__name__ != "train_gpt":
        del sys.modules["train_gpt"]  # else the log of a copy would list it as imported
    if not (hp.run_id or hp.resume):
        hp = replace(hp, run_id=script.new_name())
    core.train(run_class, hp, record)
    if saved := core.checkpoints(Path("logs", hp.run_id)):
        run_sh = "./run.sh" if Path.cwd() == HERE else f"{HERE}/run.sh"
        print("read what it writes:", shlex.join([run_sh, "tools/sample.py", str(saved[0])]))


def repeat(count: int, path: Path, run_class: type[Run], flags: list[str]) -> None:
    """Make `count` runs with consecutive seeds, then print their statistics. Weights are saved only
    if the flags ask for it."""
    hp, _ = script.core(run_class).parse_args(flags, run_class)
    name = hp.run_id or time.strftime("%Y-%m-%d_%H-%M-%S")
    signal.signal(signal.SIGINT, lambda *_: None)  # the run handles Ctrl-C: it saves and ends
    logs = []
    for seed in range(hp.seed, hp.seed + count):
        run_id = f"{name}_seed{seed}"
        own = ["--seed", str(seed), "--run_id", run_id]
        call([__file__, str(path), "--keep", "0", *flags, *own])
        logs.append(f"logs/{run_id}.txt")
    call([f"{HERE}/tools/leaderboard.py", *logs])


def start(words: list[str]) -> None:
    """Train with these words of the command line, once or --runs times."""
    path, words = script.take_script(words)
    run_class = script.load(path)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = script.fail
    parser.add_argument("--runs", type=int)
    args, flags = parser.parse_known_args(words)
    if args.runs is None:
        train(path, run_class, flags)
    elif args.runs < 1:
        raise UserError(f"--runs {args.runs}: must be 1 or more")
    else:
        repeat(args.runs, path, run_class, flags)


def main() -> None:
    """Do what the command line says. An error is one line and status 1."""
    as_program("run.sh", lambda: start(sys.argv[1:]))


if __name__ == "__main__":
    main()
