"""Pictures of runs, and of a comparison's pairs."""

import colorsys
import math
import textwrap
from pathlib import Path

import numpy as np

import significance
from logfile import Run, read_metrics
from train_gpt import UserError


def new_figure(panels: int, **options):
    """Return a figure with panels side by side. Only pictures import matplotlib: it is slow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, panels, layout="constrained", **options)


def color_of(i: int) -> tuple[float, float, float]:
    """Return the color of a curve: hues far apart, for any number of curves."""
    return colorsys.hsv_to_rgb((0.58 + i * 0.618) % 1, 0.9, 0.8 if i % 2 == 0 else 0.55)


def save(figure, path: Path) -> None:
    """Write a picture. UserError if the file cannot be written, or its kind is unknown."""
    try:
        figure.savefig(path, dpi=100)
    except (ValueError, OSError) as error:
        raise UserError(f"could not plot {path}: {error}") from error
    print(f"\nwrote {path}")


def smoothed(rows: list[dict]) -> tuple[list[int], list[float]]:
    """Return steps and training losses: each is a mean of the last fortieth of all steps."""
    losses = [row["train_loss"] for row in rows if "train_loss" in row]
    width = max(1, len(losses) // 40)
    sums = np.cumsum([0.0, *losses])
    means = (sums[width:] - sums[:-width]) / width
    return list(range(width, len(losses) + 1)), means.tolist()


def draw_runs(groups: dict[str, list[Run]], path: Path) -> None:
    """Plot the losses of groups of runs over train_time and over steps: validations as points,
    training losses (smoothed) as thin lines, published validations dashed."""
    figure, (by_time, by_step) = new_figure(2, sharey=True)
    shown, named = [], {}
    for i, (letter, runs) in enumerate(groups.items()):
        name = f"{letter}: {runs[0].name}, n = {len(runs)}"
        curves = [(name, ".-", run.curve) for run in runs]
        known, title = runs[0].published, f"{runs[0].record}, published"
        if known and runs[0].on_fineweb and title not in named:
            curve = {int(s): (loss, known["seconds"][s]) for s, loss in known["losses"].items()}
            curves.append((title, "--", curve))
        for title, style, curve in curves:
            losses, seconds = zip(*curve.values(), strict=True)
            look = {"color": color_of(i), "linewidth": 1, "markersize": 5}
            named[title] = by_time.plot(seconds, losses, style, **look)[0]
            by_step.plot(list(curve), losses, style, **look)
            shown += [loss for step, (loss, _) in curve.items() if step >= 0.1 * max(curve)]
        for run in runs:
            rows = read_metrics(run.path.with_suffix(".jsonl"))
            if not rows:  # as beside a public log
                continue
            steps, losses = smoothed(rows)
            at = np.cumsum([row["ms"] / 1e3 for row in rows if "train_loss" in row])
            for axes, x in ((by_step, steps), (by_time, [at[step - 1] for step in steps])):
                axes.plot(x, losses, color=color_of(i), linewidth=0.7, alpha=0.6)
            shown += [
                loss for step, loss in zip(steps, losses, strict=True) if step > 0.1 * run.steps
            ]
    by_time.set_ylim(min(shown) - 0.02, max(shown) + 0.02)
    by_time.set(xlabel="training time (s)", ylabel="loss (points: validation, thin: training)")
    by_step.set(xlabel="step")
    by_time.grid(alpha=0.3)
    by_step.grid(alpha=0.3)
    names = ["\n".join(textwrap.wrap(name, 110)) for name in named]
    lines = sum(name.count("\n") + 1 for name in names)
    figure.set_size_inches(9, 4.2 + 0.2 * lines)  # the legend lies below the axes
    figure.legend(named.values(), names, loc="outside lower left", fontsize="small")
    save(figure, path)


def draw_pairs(numbers: dict[str, list[float]], path: Path) -> None:
    """Plot a comparison's numbers, as points by pair, and the mean with its 95 % interval after
    each pair."""
    titles = {
        "loss": "loss of B - loss of A",
        "time": "time of a step, B to A (%)",
        "sooner": "time to A's loss, B to A (%)",
    }
    figure, panels = new_figure(len(numbers))
    for axes, (question, values) in zip(panels, numbers.items(), strict=True):
        scale = [100 * math.expm1(v) for v in values] if question != "loss" else values
        pairs = range(1, len(values) + 1)
        after = range(2, len(values) + 1)
        found = [significance.of_pairs(values[:n]) for n in after]
        found = [of.in_percent() if question != "loss" else of for of in found]
        low, high = ([of.mean + sign * of.half for of in found] for sign in (-1, 1))
        axes.plot(pairs, scale, "o", color="C0", markersize=4, label="a pair")
        axes.plot(after, [of.mean for of in found], color="C1", label="mean, 95 % interval")
        axes.fill_between(after, low, high, color="C1", alpha=0.25)
        axes.axhline(0, color="black", linewidth=0.8)
        spread = max(map(abs, [*scale, low[-1], high[-1]])) or 1.0
        axes.set_ylim(-1.6 * spread, 1.6 * spread)  # the first intervals are very wide
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(xlabel="pair", title=titles[question])
    panels[0].legend(loc="best", fontsize="small")
    figure.set_size_inches(3.6 * len(numbers), 3.6)
    save(figure, path)
