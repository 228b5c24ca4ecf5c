"""Plot a live run in the terminal: its losses, speed and time left.

    ./run.sh tools/watch.py                             the newest run under logs/, until it ends
    ./run.sh tools/watch.py logs/RUN.txt                a certain run, live or finished

Reads the log and the .jsonl beside it, which has a row per step. On FineWeb, the record's published
losses are plotted, too. A run that ended early is followed by the command that goes on with it. If
the output is not a terminal, the plot is printed once. Pictures of runs are made by
tools/leaderboard.py --plot.
"""

import argparse
import fcntl
import json
import shutil
import statistics
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import plotext

import logfile
from logfile import RULE, Run, read_log

RECENT = 25  # steps whose median is the speed


def look(path: Path) -> tuple[Run, list[dict]]:
    """Return the run of a log, and the rows of its .jsonl, if it has one. Steps that a resumed run
    will repeat are left out. ValueError if there is no step yet."""
    run = read_log(path, whole=False)
    rows = read_metrics(path.with_suffix(".jsonl"))
    if rows:
        run.curve = {step: at for step, at in run.curve.items() if step <= rows[-1]["step"]}
    elif not run.curve:
        raise ValueError("has no step yet")
    return run, rows


def read_metrics(path: Path) -> list[dict]:
    """Return a row for each step up to the last one that was written; [] if there is no file. A
    step may have several objects: later fields count. Blank and torn lines are skipped."""
    rows, last = {}, 0
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            last = row["step"]
        except (ValueError, TypeError, KeyError):
            continue
        rows[last] = rows.get(last, {}) | row
    return [rows[step] for step in sorted(rows) if step <= last]


def is_written(path: Path) -> bool:
    """Return whether a process may be writing a log: a run locks its log while it lives."""
    with path.open() as log:
        try:
            fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def early_end(run: Run) -> str:
    """Return what a log says of the stop of its run, or how to go on with a run that says nothing;
    "" if the run is finished."""
    if run.steps in run.curve:
        return ""
    lines = run.path.read_text("utf-8").split(f"\n{RULE}\n")[-1].splitlines()
    if lines[-1].startswith("stopped by "):
        return lines[-1]
    text = "the run failed or was killed"
    for record in [line for line in lines if line.startswith("record ")][-1:]:
        command = f"./run.sh {run.settings.get('script', '')} --{record} --run_id {run.path.stem}"
        text += f"; go on with {command} --resume on"
    return text


def published(run: Run) -> dict[int, float]:
    """Return the published losses of the run's record by step; none on other data."""
    if not run.on_fineweb or run.record not in logfile.published():
        return {}
    known = logfile.published()[run.record]["losses"]
    return {int(step): loss for step, loss in known.items()}


def curves(run: Run, rows: list[dict]) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and losses of the curves that are known: training, published, validation. A loss
    of 0 is left out, because the axis is logarithmic."""
    found = {
        "training": [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row],
        "published": published(run).items(),
        "validation": [(step, loss) for step, (loss, _) in run.curve.items()],
    }
    lines = {}
    for name, points in found.items():
        points = [(step, loss) for step, loss in points if loss > 0]
        if points:
            lines[name] = tuple(zip(*points, strict=True))
    return lines


def last_step(run: Run, rows: list[dict]) -> int:
    """Return the last step that the run has reported."""
    return rows[-1]["step"] if rows else max(run.curve)


def summary(run: Run, rows: list[dict], idle: float) -> list[str]:
    """Return the run's name, and its progress, losses, speed and time left."""
    step = last_step(run, rows)
    timed = [row for row in rows if "ms" in row]
    parts = [f"step {step}/{run.steps}"]
    if timed:
        parts.append(f"train loss {timed[-1]['train_loss']:.4f}")
    if run.curve:
        at = max(run.curve)
        parts.append(f"val loss {run.curve[at][0]:.4f} at step {at}")
        if expected := published(run).get(at):
            parts[-1] += f" (published: {expected:.4f})"
    if timed:
        ms = statistics.median(row["ms"] for row in timed[-RECENT:])
        tokens = statistics.median(row["tokens_per_s"] for row in timed[-RECENT:])
        parts += [f"lately {ms:.1f} ms/step", f"{tokens / 1e3:.1f}k tokens/s"]
    if run.steps in run.curve:
        parts.append(f"finished, {run.seconds:.1f} s of training")
    else:
        if timed:
            left = timedelta(seconds=round((run.steps - step) * ms / 1e3))
            parts.append(f"{left} of training left")
        parts.append(f"last written {idle:.0f} s ago")
    return [f"{run.path}: {run.name}", ", ".join(parts)]


def view(run: Run, rows: list[dict], idle: float, width: int, height: int) -> str:
    """Return summary, legend and plot as text of so many columns and lines."""
    text = [line for part in summary(run, rows, idle) for line in textwrap.wrap(part, width)]
    lines = curves(run, rows)
    looks = {"training": ("⠒", "gray"), "published": ("○", "blue"), "validation": ("●", "red")}
    text.append("   ".join(f"{looks[name][0]} {name} loss" for name in lines))
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, max(height - len(text) - 1, 8))
    plotext.yscale("log")  # the last losses lie close together, far below the first ones
    for name, (steps, losses) in lines.items():
        mark, color = looks[name]
        if name == "training":
            plotext.plot(steps, losses, color=color, marker="braille")
        else:
            plotext.scatter(steps, losses, color=color, marker=mark)
    plotext.xlim(0, run.steps)
    plotext.xticks([run.steps * i // 4 for i in range(5)])
    return "\n".join([*text, plotext.build()])


def main(argv: list[str] | None = None) -> None:
    """Plot a run: on a terminal, until it ends or Ctrl-C. An error is one line and status 1."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("log", nargs="?", type=Path, help="the run's log [the newest under logs/]")
    parser.add_argument("--interval", type=float, default=2, help="seconds between updates [2]")
    args = parser.parse_args(argv)
    if not args.interval > 0:
        parser.error("--interval: must be more than 0 seconds")
    logs = [args.log] if args.log else list(Path("logs").glob("*.txt"))
    if not logs:
        sys.exit("watch.py: no log under logs/: name one")
    path = max(logs, key=lambda log: log.stat().st_mtime) if len(logs) > 1 else logs[0]
    live, written = sys.stdout.isatty(), True
    while written:
        try:
            written = is_written(path)  # before it is read: otherwise, the end could be missed
            run, rows = look(path)
            text = view(run, rows, time.time() - path.stat().st_mtime, *shutil.get_terminal_size())
            if not written:
                text = f"{text}\n{early_end(run)}".rstrip("\n")
        except (ValueError, OSError) as error:
            text = f"{path}: {getattr(error, 'strerror', None) or error}"
            if not (live and written):
                sys.exit(f"watch.py: {text}")
        print(f"\x1b[H\x1b[J{text}" if live else plotext.uncolorize(text), flush=True)
        if not live:
            break
        if written:
            time.sleep(args.interval)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print()
