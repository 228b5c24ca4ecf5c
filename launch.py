"""Start train_gpt.py as this machine allows: what run.sh calls when Python has what it needs.

    launch.py [flags of train_gpt.py]   a process for each GPU; before, FineWeb is fetched if needed
    launch.py --runs N [flags]          N runs with seeds from --seed on, then their statistics

NPROC=n uses n GPUs.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time

import numpy as np
import torch

import program
import train_gpt
from program import HERE, UserError

SHARD_TOKENS = 10**8  # of FineWeb's


def take_runs(flags: list[str]) -> tuple[int, list[str]]:
    """N of --runs N, or 0, and the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runs", nargs="?", const="(nothing)")
    args, others = parser.parse_known_args(flags)
    if args.runs is None:
        return 0, others
    if not (args.runs.isdecimal() and int(args.runs)):
        raise UserError(f"--runs {args.runs}: must be a number of runs")
    return int(args.runs), others


def processes(batch_seqs: int, gpus: int) -> int:
    """How many share a run: as NPROC says, or one for each GPU that can get an equal share."""
    wanted = os.environ.get("NPROC", "")
    if wanted and not wanted.isdecimal():
        raise UserError(f"NPROC={wanted}: must be a number of processes")
    if wanted:
        return max(1, int(wanted))
    count = max(n for n in range(1, max(gpus, 1) + 1) if batch_seqs % n == 0)
    if gpus > count:
        note = f"{gpus} GPUs cannot share {batch_seqs} sequences evenly: using {count}"
        print(f"run.sh: {note}", file=sys.stderr)
    return count


def shards_needed(hp: train_gpt.Hyperparameters) -> int:
    """How many shards of FineWeb a run reads, at most; a batch lies in one shard. Between documents
    with which sequences begin, 3 % of the tokens are skipped, or, where documents are cut at 2048
    tokens, up to 0.6 for each one that is read (the public logs: 424.7M tokens of 7 shards)."""
    read = hp.batch_seqs * np.array(
        [train_gpt.moment(step, hp).seq_len for step in range(hp.num_iterations)]
    )
    if hp.align_to_documents:
        read = read * (1.6 if hp.max_document_tokens else 1.03)
    shards, left = 0, 0.0
    for tokens in read:
        if tokens >= left:
            shards, left = shards + 1, SHARD_TOKENS
        left -= tokens
    return shards


def fetch_fineweb(shards: int) -> None:
    """Fetch what is missing; a Python that is used as it is may lack huggingface-hub."""
    folder = f"{HERE}/.venv/hub"
    environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    if not (importlib.util.find_spec("huggingface_hub") or os.path.exists(folder)):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
        if subprocess.run([*pip, "huggingface-hub"]).returncode:
            raise UserError("pip could not install huggingface-hub: see its message above")
    command = [sys.executable, f"{HERE}/cached_fineweb.py", str(shards)]
    if status := subprocess.run(command, env=environment).returncode:
        sys.exit(status)


def start(parsed, flags: list[str]) -> None:
    """Train in this process, or in several under torchrun, which takes its place."""
    hp, args = parsed
    only_print = bool({"list_records", "diff"} & vars(args).keys())
    gpus = 0 if only_print or hp.device == "cpu" else torch.cuda.device_count()
    if gpus and "eval" not in args and hp.train_files.startswith(train_gpt.FINEWEB):
        fetch_fineweb(shards_needed(hp))
    count = 1 if only_print else processes(hp.batch_seqs, gpus)
    if count == 1:
        train_gpt.work(parsed, None)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # start_device sets the threads itself
    torchrun = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"
    command = [sys.executable, *torchrun, f"{HERE}/train_gpt.py", *flags]
    os.execv(sys.executable, command)


def repeat(count: int, hp: train_gpt.Hyperparameters, flags: list[str]) -> None:
    """That many runs, a seed each, without checkpoints unless flags ask for them; then what the
    logs say together."""
    name = hp.run_id or time.strftime("%Y-%m-%d_%H-%M-%S")
    seeds = range(hp.seed, hp.seed + count)
    signal.signal(signal.SIGINT, lambda *_: None)  # it is the run's, which saves and ends
    print(f"run.sh: {count} runs, logs in logs/{name}_seed*.txt", file=sys.stderr)
    for seed in seeds:
        own = ["--seed", str(seed), "--run_id", f"{name}_seed{seed}"]
        command = [sys.executable, __file__, "--save_every", "0", *flags, *own]
        if status := subprocess.run(command).returncode:
            sys.exit(status)
    logs = [f"logs/{name}_seed{seed}.txt" for seed in seeds]
    sys.exit(subprocess.run([sys.executable, f"{HERE}/tools/leaderboard.py", *logs]).returncode)


def main() -> None:
    """As train_gpt.py's main."""
    count, flags = 0, []

    def parse():
        nonlocal count, flags
        count, flags = take_runs(sys.argv[1:])
        return train_gpt.parse_args(flags)

    def work(parsed, store):
        if count:
            repeat(count, parsed[0], flags)
        else:
            start(parsed, flags)

    program.as_program("train_gpt.py", parse, work)


if __name__ == "__main__":
    main()
