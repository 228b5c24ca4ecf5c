"""Plot a live run in the terminal: its losses, speed and time left.

    ./run.sh tools/watch.py                             the newest run under logs/, until it ends
    ./run.sh tools/watch.py logs/RUN.txt                a certain run, live or finished

Reads the log and the .jsonl beside it, which has a row per step. On FineWeb, the record's published
losses are plotted, too. A run that ended early is followed by the command that goes on with it. If
the output is not a terminal, the plot is printed once. Pictures of runs are made by
tools/leaderboard.py --plot.
"""

import shutil
import statistics
import textwrap
import time
from datetime import timedelta
from os.path import getmtime
from pathlib import Path

import plotext

from console import has_terminal, parser_of, program
from logfile import Run, is_live, published, read_log, read_metrics
from train_gpt import UserError

INTERVAL = 2  # seconds between updates
RECENT = 25  # steps whose median is the speed


def summary(run: Run, rows: list[dict], known: dict[str, float]) -> str:
    """Return the run's name, and its progress, losses, speed and time left. `known` are published
    losses by step."""
    parts = [f"{run.path}: {run.name}", f"step {run.last[0]}/{run.steps}"]
    if timed := [row for row in rows if "ms" in row][-RECENT:]:
        parts.append(f"train loss {timed[-1]['train_loss']:.4f}")
    if run.curve:
        step, (loss, seconds) = max(run.curve.items())
        parts.append(f"val loss {loss:.4f} at step {step}")
        if str(step) in known:
            parts[-1] += f" (published: {known[str(step)]:.4f})"
    if run.steps in run.curve:
        parts.append(f"finished, {seconds:.1f} s of training")
    elif timed:
        ms = statistics.median(row["ms"] for row in timed)
        rate = statistics.median(row["tokens_per_s"] for row in timed)
        left = timedelta(seconds=round((run.steps - run.last[0]) * ms / 1e3))
        parts.append(f"lately {ms:.1f} ms/step, {rate / 1e3:.1f}k tokens/s, {left} left")
    return ", ".join(parts)


def view(run: Run, rows: list[dict]) -> str:
    """Return the summary and a plot of the losses, which fill a terminal. ValueError if there is no
    step yet. Validations that a resumed run will repeat are left out."""
    if not run.steps:
        raise ValueError("has no step yet")
    run.curve = {step: found for step, found in run.curve.items() if step <= run.last[0]}
    columns, lines = shutil.get_terminal_size()
    known = published().get(run.record, {}).get("losses", {}) if run.on_fineweb else {}
    text = textwrap.fill(summary(run, rows, known), columns)
    curves = {
        ("braille", "gray"): [(row["step"], row.get("train_loss", 0)) for row in rows],
        ("○", "blue"): [(int(step), loss) for step, loss in known.items()],
        ("●", "red"): [(step, loss) for step, (loss, _) in run.curve.items()],
    }
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(columns, max(lines - text.count("\n") - 2, 8))
    plotext.yscale("log")  # the last losses lie close together, far below the first ones
    for (marker, color), points in curves.items():
        points = [(step, loss) for step, loss in points if loss > 0]
        if points:
            plotext.scatter(*zip(*points, strict=True), marker=marker, color=color)
    plotext.title("losses: ⠒ training, ○ published, ● validation")
    plotext.xlim(0, run.steps)
    plotext.xticks([run.steps * i // 4 for i in range(5)])
    return f"{text}\n{plotext.build()}"


def early_end(run: Run) -> str:
    """Return what a log says of its run's stop, or else how to go on with the run."""
    lines = run.path.read_text("utf-8").splitlines()
    record = [line for line in lines if line.startswith("record ")][-1]
    command = f"./run.sh {run.settings['script']} --{record} --run_id {run.path.stem} --resume on"
    return run.stop or f"the run failed or was killed; go on with {command}"


@program("watch.py")
def main(words: list[str]) -> None:
    """Plot a run: on a terminal, until it ends or Ctrl-C. UserError if there is nothing to plot."""
    parser = parser_of(__doc__)
    parser.add_argument("log", nargs="?", type=Path, help="the run's log [the newest under logs/]")
    newest = max(Path("logs").glob("*.txt"), key=getmtime, default=None)
    path = parser.parse_args(words).log or newest
    if path is None:
        raise UserError("no log under logs/: name one")
    on_terminal = has_terminal()
    while True:
        live = is_live(path)  # before it is read: otherwise, the end could be missed
        try:
            run, rows = read_log(path, whole=False), read_metrics(path.with_suffix(".jsonl"))
            text = view(run, rows)
        except ValueError as error:
            text = f"{path}: {error}"
            if not (live and on_terminal):
                raise UserError(text) from error
        print(f"\x1b[H\x1b[J{text}" if on_terminal else plotext.uncolorize(text), flush=True)
        if not (live and on_terminal):
            break
        time.sleep(INTERVAL)
    if not live and run.settings and run.steps not in run.curve:  # public logs have no settings
        print(early_end(run))


if __name__ == "__main__":
    main()
