"""How is a run doing? Its losses, speed and time left, drawn in the terminal while it goes on.

    ./run.sh tools/watch.py                             the newest run under logs/, until it ends
    ./run.sh tools/watch.py logs/RUN.txt                a certain one, running or finished
    ./run.sh tools/watch.py logs/RUN.txt --png run.png  the same as a picture

Reads the log and, beside it, the .jsonl with a row for each step. Where the data is FineWeb, a
record's published curve is drawn too. If the output is no terminal, one view is printed.
"""

import argparse
import json
import shutil
import statistics
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import plotext
import records
from leaderboard import Run, read_log

RECENT = 25  # steps, for the speed


def look(path: Path) -> tuple[Run, list[dict]]:
    """Return the run of a log, and the rows of its .jsonl, if it has one; ValueError if nothing is
    there yet. What a resumed run will do again is left out."""
    run = read_log(path, whole=False)
    metrics = path.with_suffix(".jsonl")
    lines = metrics.read_text("utf-8").splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # one may be on its way
    if rows:
        run.curve = {step: at for step, at in run.curve.items() if step <= rows[-1]["step"]}
    elif not run.curve:
        raise ValueError("has no step yet")
    return run, rows


def published(run: Run) -> dict[int, float]:
    """Return the published losses of the run's record by step; none on other data."""
    if not run.on_fineweb or run.record not in records.published():
        return {}
    known = records.published()[run.record]["losses"]
    return {int(step): loss for step, loss in known.items()}


def curves(run: Run, rows: list[dict]) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and losses by name: training, validation, published; those that there are."""
    found = {
        "training": [(row["step"], row["train_loss"]) for row in rows if "train_loss" in row],
        "validation": [(step, loss) for step, (loss, _) in run.curve.items()],
        "published": published(run).items(),
    }
    return {name: tuple(zip(*points, strict=True)) for name, points in found.items() if points}


def limits(lines: dict[str, tuple[list[int], list[float]]], step: int) -> tuple[float, float]:
    """Return the range of losses to draw: without the first tenth of the steps so far."""
    points = [point for line in lines.values() for point in zip(*line, strict=True)]
    losses = [loss for at, loss in points if at >= step / 10]
    margin = 0.05 * (max(losses) - min(losses)) + 1e-3
    return min(losses) - margin, max(losses) + margin


def last_step(run: Run, rows: list[dict]) -> int:
    """Return the last step that is known."""
    return rows[-1]["step"] if rows else max(run.curve)


def summary(run: Run, rows: list[dict], idle: float) -> list[str]:
    """Say in two lines which run it is, where it is, how fast, and when it will be there."""
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
        parts += [f"{ms:.1f} ms/step", f"{tokens / 1e3:.1f}k tokens/s"]
        parts.append(f"{timed[-1]['memory_mib']} MiB")
    if run.steps in run.curve:
        parts.append(f"finished, {run.seconds:.1f} s of training")
    else:
        if timed:
            left = timedelta(seconds=round((run.steps - step) * ms / 1e3))
            parts.append(f"{left} of training left")
        parts.append(f"last heard of {idle:.0f} s ago")
    return [f"{run.path}: {run.name}", ", ".join(parts)]


def view(run: Run, rows: list[dict], idle: float, width: int, height: int) -> str:
    """Return the run as text of so many columns and lines."""
    text = [line for part in summary(run, rows, idle) for line in textwrap.wrap(part, width)]
    lines = curves(run, rows)
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, max(height - len(text) - 1, 8))
    for name, (steps, losses) in lines.items():
        colors = {"training": "gray", "validation": "red", "published": "blue"}
        plotext.plot(steps, losses, label=name, color=colors[name], marker="braille")
    plotext.xlim(0, run.steps)
    plotext.ylim(*limits(lines, last_step(run, rows)))
    plotext.xticks([run.steps * i // 4 for i in range(5)])
    return "\n".join([*text, plotext.build()])


def draw(run: Run, rows: list[dict], path: Path) -> None:
    """Draw the run into a file: losses, and ms/step, over steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    lines = curves(run, rows)
    looks = {
        "training": {"color": "0.7", "linewidth": 1},
        "validation": {"color": "C0", "marker": "o"},
        "published": {"color": "C3", "linestyle": "--"},
    }
    for name, line in lines.items():
        axes[0].plot(*line, label=name, **looks[name])
    axes[0].set(xlabel="step", ylabel="loss", ylim=limits(lines, last_step(run, rows)))
    axes[0].legend()
    timed = [row for row in rows if "ms" in row]
    axes[1].plot([row["step"] for row in timed], [row["ms"] for row in timed], linewidth=1)
    axes[1].set(xlabel="step", ylabel="ms/step", ylim=(0, None))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.suptitle(summary(run, rows, 0)[0], fontsize="medium")
    figure.savefig(path, dpi=110)
    print(f"wrote {path}")


def main(argv: list[str] | None = None) -> None:
    """Draw a run, on a terminal until it ends or Ctrl-C; status 1 and a line if it cannot be."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("log", nargs="?", type=Path, help="its log [the newest under logs/]")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw into this file instead")
    parser.add_argument("--interval", type=float, default=2, help="seconds between looks [2]")
    args = parser.parse_args(argv)
    if not args.interval > 0:
        parser.error("--interval: more than 0 seconds")
    logs = [args.log] if args.log else list(Path("logs").glob("*.txt"))
    if not logs:
        sys.exit("watch.py: no log under logs/: name one")
    path = max(logs, key=lambda log: log.stat().st_mtime) if len(logs) > 1 else logs[0]
    live = sys.stdout.isatty() and not args.png
    run = None
    while run is None or run.steps not in run.curve:
        try:
            run, rows = look(path)
            if args.png:
                return draw(run, rows, args.png)
            text = view(run, rows, time.time() - path.stat().st_mtime, *shutil.get_terminal_size())
        except (ValueError, OSError) as error:
            text = f"{path} {error}"
            if not live:
                sys.exit(f"watch.py: {text}")
        print(f"\x1b[H\x1b[J{text}" if live else plotext.uncolorize(text), flush=True)
        if not live:
            break
        time.sleep(args.interval)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        print()
