"""Make a run of a training script, or several. run.sh calls this when Python is set up.

    start.py [SCRIPT.py] [flags]            one process per GPU; FineWeb is fetched if needed
    start.py [SCRIPT.py] --runs N [flags]   N runs with seeds from --seed on, then their statistics
    start.py [SCRIPT.py] --seconds N [flags]    as many steps as take N seconds here (timing.py)

SCRIPT.py is train_gpt.py if none is named. NPROC=n uses n GPUs. A run ends with its summary, which
is also a line of logs/results.jsonl; result.py lists its keys.
"""

import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import console
import launch
import logfile
import result
import script
import timing
from train_gpt import HERE, Hyperparameters, UserError, new_name


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
    own = {name: getattr(hp, name) for name in logfile.OF_ONE_RUN & vars(hp).keys()}
    changed = script.core(script.load(path)).changed_flags(hp, replace(then, **own))
    return f"was made without {shlex.join(changed)}" if changed else ""


def words_to_make(path: Path, flags: list[str]) -> list[str]:
    """Return the flags that make, or finish, a run with these; [] if it is finished. UserError if
    it was made in another way, or is being made."""
    hp, _ = script.parse(path, flags)
    log = Path("logs", f"{hp.run_id}.txt")
    if logfile.is_finished(log):
        if reason := difference(path, hp):
            raise UserError(f"{log} {reason}: choose another --run_id")
        return []
    if script.core(script.load(path)).checkpoints(log.with_suffix("")):
        return [*flags, "--resume", "on"]
    if log.exists():
        logfile.put_aside(log)
    return flags


def repeat(count: int, path: Path, flags: list[str], known: dict) -> int:
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
        elif status := launch.train(path, words, group=name, **known)["exit"]:
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
    known = {"seconds_asked": args.seconds}
    try:
        if args.seconds is not None:
            steps = timing.steps_in(args.seconds, path, flags)
            flags = [*flags, *timing.flags_for(path, flags, steps, script.show(path))]
        if args.runs:
            status = repeat(args.runs, path, flags, known)
        else:
            status = launch.train(path, flags, **known)["exit"]
    except Exception as error:
        if not isinstance(error, UserError):  # it is of the script, which is imported here
            result.note(result.not_begun(path, flags, error, known))
        raise
    sys.exit(status)


if __name__ == "__main__":
    main()
