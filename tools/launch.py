"""Start a training script on this machine's GPUs. run.sh calls this when Python is set up.

    launch.py [SCRIPT.py] [flags]            one process per GPU; FineWeb is fetched if needed
    launch.py [SCRIPT.py] --runs N [flags]   N runs with seeds from --seed on, then their statistics

SCRIPT.py is train_gpt.py if none is named. NPROC=n uses n GPUs.
"""

import argparse
import importlib.util
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


def take_runs(flags: list[str]) -> tuple[int, list[str]]:
    """Return N of --runs N (0 without that flag), and the other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runs", nargs="?", const="(nothing)")
    args, others = parser.parse_known_args(flags)
    if args.runs is None:
        return 0, others
    if not (args.runs.isdecimal() and int(args.runs)):
        raise UserError(f"--runs {args.runs}: must be a number of runs")
    return int(args.runs), others


def processes(batch_seqs: int, gpus: int) -> int:
    """Return the number of processes: NPROC, or else the most that GPUs and equal shares of the
    batch allow. UserError for an NPROC that is impossible."""
    shares = [n for n in range(1, batch_seqs + 1) if batch_seqs % n == 0]
    wanted = os.environ.get("NPROC", "")
    if wanted:
        if not (wanted.isdecimal() and int(wanted) in shares):
            reason = f"{batch_seqs} sequences can be shared by {', '.join(map(str, shares))}"
            raise UserError(f"NPROC={wanted}: {reason} processes")
        if gpus and int(wanted) > gpus:
            raise UserError(f"NPROC={wanted}: this machine has {gpus} GPUs")
        return int(wanted)
    count = max(n for n in shares if n <= max(gpus, 1))
    if gpus > count:
        note = f"{gpus} GPUs cannot share {batch_seqs} sequences evenly: using {count}"
        print(f"run.sh: {note}", file=sys.stderr)
    return count


def shards_needed(hp: Hyperparameters, run_class: type[Run]) -> int:
    """Return the most shards of FineWeb that a run can read. No batch spans two shards."""
    lengths = [run_class.moment(step, hp).seq_len for step in range(hp.num_iterations)]
    read = hp.batch_seqs * np.array(lengths)
    # In a fork, sequences may begin where documents begin. Tokens between them are skipped: 3 % of
    # those read or, where documents are cut at 2048 tokens, up to 60 % (in the public logs, 424.7M
    # tokens are read from 7 shards).
    if getattr(hp, "align_to_documents", False):
        read = read * (1.6 if hp.max_document_tokens else 1.03)
    shards, left = 0, 0.0
    for tokens in read:
        if tokens + 1 >= left:
            shards, left = shards + 1, SHARD_TOKENS
        left -= tokens
    return shards


def fetch_fineweb(shards: int) -> None:
    """Fetch the missing shards; install huggingface-hub first if this Python lacks it."""
    folder = f"{HERE}/.venv/hub"
    environment = os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
    if not (importlib.util.find_spec("huggingface_hub") or os.path.exists(folder)):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder]
        if subprocess.run([*pip, "huggingface-hub"]).returncode:
            raise UserError("pip could not install huggingface-hub: see its message above")
    command = [sys.executable, f"{HERE}/cached_fineweb.py", str(shards)]
    if status := subprocess.run(command, env=environment).returncode:
        sys.exit(status)


def train(
    hp: Hyperparameters, record: str, flags: list[str], path: Path, run_class: type[Run]
) -> None:
    """Train in this process, or replace it by torchrun if several are needed."""
    gpus = 0 if hp.device == "cpu" else torch.cuda.device_count()
    count = processes(hp.batch_seqs, gpus)
    if gpus and hp.train_files.startswith(FINEWEB):
        fetch_fineweb(shards_needed(hp, run_class))
    if count == 1:
        core = script.core(run_class)
        if core.__name__ != "train_gpt":
            del sys.modules["train_gpt"]  # else the log of a copy would list it as imported
        if not (hp.run_id or hp.resume):
            hp = replace(hp, run_id=script.new_name())
        core.train(run_class, hp, record)
        say_what_next(hp, core.checkpoints(Path("logs", hp.run_id)))
        return
    # On CPUs, processes share the cores; on GPUs, one thread each is enough.
    threads = 1 if gpus else max(1, os.cpu_count() // count)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # A script in another folder must find the project's modules.
    os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    os.execv(sys.executable, [sys.executable, *torchrun, str(path), *flags])


def say_what_next(hp: Hyperparameters, saved: list[Path]) -> None:
    """Print commands to try after a run that has saved checkpoints."""
    run_sh = "./run.sh" if Path.cwd() == HERE else f"{HERE}/run.sh"
    if saved:
        print("read what it writes:", shlex.join([run_sh, "tools/sample.py", str(saved[0])]))
    if saved and hp.train_files.startswith(FINEWEB):
        log = f"logs/{hp.run_id}.txt"
        print("compare with published runs:", shlex.join([run_sh, "tools/records.py", log]))


def repeat(count: int, hp: Hyperparameters, flags: list[str], path: Path) -> None:
    """Make `count` runs with consecutive seeds, then print their statistics. Weights are saved only
    if the flags ask for it."""
    name = hp.run_id or time.strftime("%Y-%m-%d_%H-%M-%S")
    seeds = range(hp.seed, hp.seed + count)
    signal.signal(signal.SIGINT, lambda *_: None)  # the run handles Ctrl-C: it saves and ends
    print(f"run.sh: {count} runs, logs in logs/{name}_seed*.txt", file=sys.stderr)
    for seed in seeds:
        own = ["--seed", str(seed), "--run_id", f"{name}_seed{seed}"]
        command = [sys.executable, __file__, str(path), "--keep", "0", *flags, *own]
        if status := subprocess.run(command).returncode:
            sys.exit(status)
    logs = [f"logs/{name}_seed{seed}.txt" for seed in seeds]
    sys.exit(subprocess.run([sys.executable, f"{HERE}/tools/leaderboard.py", *logs]).returncode)


def start(words: list[str], path: Path, run_class: type[Run]) -> None:
    """Run a script with these words of the command line."""
    count, flags = take_runs(words)
    hp, record = script.core(run_class).parse_args(flags, run_class)
    if count:
        repeat(count, hp, flags, path)
    else:
        train(hp, record, flags, path, run_class)


def find_and_start() -> None:
    """Find the script and start it. Its errors name it."""
    path, words = script.take_script(sys.argv[1:])
    run_class = script.load(path)
    script.core(run_class).as_program(path.name, lambda: start(words, path, run_class))


def main() -> None:
    """Run the command line."""
    as_program("run.sh", find_and_start)


if __name__ == "__main__":
    main()
