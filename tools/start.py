"""Make a run of a training script, or several. run.sh calls this when Python is set up.

    start.py [SCRIPT.py] [flags]            one process per GPU; FineWeb is fetched if needed
    start.py [SCRIPT.py] --runs N [flags]   N runs with seeds from --seed on, then their statistics
    start.py [SCRIPT.py] --seconds N [flags]    as many steps as take N seconds here (seconds.py)
    start.py [SCRIPT.py] --like NAME [flags]    with the steps and flags of earlier runs: of a run,
                                            or of the group that --runs --run_id NAME has made

SCRIPT.py is train_gpt.py if none is named. NPROC=n uses n GPUs. A run ends with its summary, which
is also a line of logs/results.jsonl; result.py lists its keys.
"""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the next imports: no traceback

import console
import launch
import result
import script
import seconds
from train_gpt import HERE, UserError


def flags_like(name: str) -> list[str]:
    """Return the flags of the last finished run of that name, or of that group, but for the seed.
    UserError if there is none."""
    runs = [r for r in result.noted() if r["kind"] == "run" and r["status"] == "finished"]
    found = [r for r in runs if name in (r["group"], r["run"])]
    if not found:
        known = ", ".join(sorted({r["group"] or r["run"] for r in runs})) or "none"
        raise UserError(f"--like {name}: no finished run or group has that name: there is {known}")
    words = ["--record", found[-1]["record"], *shlex.split(found[-1]["flags"])]
    if "--seed" in words:
        place = words.index("--seed")
        del words[place : place + 2]
    return words


def repeat(count: int, path: Path, flags: list[str], known: dict) -> int:
    """Make `count` runs with consecutive seeds, then print their statistics. Weights are saved only
    if the flags ask for it. Return the exit status; the first run that fails is the last one."""
    hp, _ = script.parse(path, flags)
    name = hp.run_id or script.new_name()
    logs = []
    for seed in range(hp.seed, hp.seed + count):
        own = ["--seed", str(seed), "--run_id", f"{name}_seed{seed}"]
        found = launch.train(path, ["--keep", "0", *flags, *own], group=name, **known)
        if found["exit"]:
            return found["exit"]
        logs.append(found["log"])
    return subprocess.run([sys.executable, f"{HERE}/tools/leaderboard.py", *logs]).returncode


@console.program("run.sh")
def main(words: list[str]) -> None:
    """Train, once or --runs times, and exit with the run's status."""
    path, words = script.take_script(words)
    parser = console.parser_of()
    parser.add_argument("--runs", type=int)
    parser.add_argument("--like")
    parser.add_argument("--seconds", type=float)
    args, flags = parser.parse_known_args(words)
    if args.runs is not None and args.runs < 1:
        raise UserError(f"--runs {args.runs}: must be 1 or more")
    known = {"like": args.like, "seconds_asked": args.seconds}
    if args.like:
        flags = [*flags_like(args.like), *flags]
    try:
        if args.seconds is not None:
            steps = seconds.steps_in(args.seconds, path, flags)
            flags = [*flags, *seconds.flags_for(path, flags, steps, script.show(path))]
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
