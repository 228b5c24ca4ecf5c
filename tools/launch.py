"""Start a training script on this machine's GPUs. run.sh calls this when Python is set up.

    launch.py [SCRIPT.py] [flags]            one process per GPU; FineWeb is fetched if needed
    launch.py [SCRIPT.py] --runs N [flags]   N runs with seeds from --seed on, then their statistics
    launch.py [SCRIPT.py] --seconds N [flags]   as many steps as take N seconds here (seconds.py)

SCRIPT.py is train_gpt.py if none is named. NPROC=n uses n GPUs. A run ends with its summary, which
is also a line of logs/results.jsonl; result.py lists its keys.
"""

import argparse
import math
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

import process
import result
import script
import seconds
from train_gpt import HERE, UserError, as_program


def train(path: Path, flags: list[str], quiet: bool = False, asked: float = math.inf) -> int:
    """Make a run of a script, note its result, and return its exit status. With `quiet`, only
    errors are printed. `asked` is the number of seconds that training should take. UserError for
    bad flags."""
    hp, record = script.parse(path, flags)
    run_class = script.load(path)
    process.fetch(hp, run_class)
    if not (hp.run_id or hp.resume):
        hp = replace(hp, run_id=script.new_name())
        flags = [*flags, "--run_id", hp.run_id]
    begin = result.Start(path, hp, record)
    output = {"stdout": subprocess.DEVNULL} if quiet else {}
    status, reason = process.start(hp, [str(path), *flags], **output)
    found = result.result_of(begin, status, reason)
    result.note(found)
    if found["status"] == "failed" and not status:
        print(f"run.sh: error: {found['reason']}", file=sys.stderr)
        return 1
    saved = script.core(run_class).checkpoints(Path("logs", hp.run_id))
    if saved and not (status or quiet):
        run_sh = "./run.sh" if Path.cwd() == HERE else f"{HERE}/run.sh"
        command = [run_sh, "tools/sample.py", str(saved[0])]
        if path.parent not in (HERE, HERE / "forks"):
            command += ["--script", str(path)]  # a checkpoint names no script elsewhere
        print("read what it writes:", shlex.join(command))
    if found["train_time_s"] > seconds.LATE * asked:
        late = f"training took {found['train_time_s']:.0f} s instead of {asked:g}"
        print(f"{late}: --time_again times the steps again", flush=True)
    if not quiet:
        result.print_result(found)
    return status


def repeat(count: int, path: Path, flags: list[str], asked: float) -> int:
    """Make `count` runs with consecutive seeds, then print their statistics. Weights are saved only
    if the flags ask for it. Return the exit status; the first run that fails is the last one."""
    hp, _ = script.parse(path, flags)
    name = hp.run_id or time.strftime("%Y-%m-%d_%H-%M-%S")
    logs = []
    for seed in range(hp.seed, hp.seed + count):
        run_id = f"{name}_seed{seed}"
        own = ["--seed", str(seed), "--run_id", run_id]
        if status := train(path, ["--keep", "0", *flags, *own], asked=asked):
            return status
        logs.append(f"logs/{run_id}.txt")
    return subprocess.run([sys.executable, f"{HERE}/tools/leaderboard.py", *logs]).returncode


def start(words: list[str]) -> None:
    """Train with these words of the command line, once or --runs times, and exit with the run's
    status."""
    path, words = script.take_script(words)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = script.fail
    parser.add_argument("--runs", type=int)
    seconds.add_flags(parser)
    args, flags = parser.parse_known_args(words)
    if args.runs is not None and args.runs < 1:
        raise UserError(f"--runs {args.runs}: must be 1 or more")
    try:
        asked = math.inf
        if args.seconds is not None:
            flags, asked = seconds.with_steps(path, flags, args), args.seconds
        if args.runs:
            status = repeat(args.runs, path, flags, asked)
        else:
            status = train(path, flags, asked=asked)
    except (Exception, KeyboardInterrupt) as error:  # also of the script, which is imported here
        result.note(result.not_begun(path, flags, error))
        raise
    sys.exit(status)


def main() -> None:
    """Do what the command line says. An error is one line and status 1."""
    as_program("run.sh", lambda: start(sys.argv[1:]))


if __name__ == "__main__":
    main()
