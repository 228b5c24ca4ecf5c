"""Is a difference significant? The statistics of all tools, their words and their pictures.

Numbers are assumed normally distributed. Intervals are 95 % intervals, and p is two-sided: how
often chance alone makes a difference at least as large.

What the sequential test of --compare does, in 20,000 simulated comparisons of normal numbers whose
mean is d deviations. "Naive" is the share of false findings if one looks for p < alpha after each
pair; "fixed" is the number of pairs of one t-test at the end with equal power. For a one-sided
exponential, .072 are false (alpha 0.01, 20 pairs).

    alpha  pairs  false (d = 0)  naive  power (d = 1)  mean pairs  fixed  power (d = 2)
    0.01   12     .0097          .058   .496           10.67       10     .995
    0.01   20     .0084          .071   .849           14.23       17     1
    0.05   12     .0515          .215   .792            8.89       10     1
    0.05   20     .0492          .258   .969           10.86       17     1

False answers to each question, without any difference (alpha 0.01, at most 20 pairs), by the judge
that ends the comparison:

    judge   loss   time   sooner  any
    loss    .0087  .0024  .0029   .0127
    time    .0029  .0095  .0029   .0140
    sooner  .0031  .0022  .0107   .0146

`./run.sh test -k errs_as_rarely` tests parts of both tables.
"""

import colorsys
import math
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats

from logfile import Run, read_metrics
from train_gpt import UserError

ALPHA = 0.01  # a smaller p is significant, as on the public leaderboard

# An interval and a verdict need this many runs of each group, or pairs of runs. Half of a 95 %
# interval is 9.0 deviations of a number after two of them, 2.5 after three, and 1.6 after four.
FEWEST = 4


def show(value: float | None, form: str) -> str:
    """Return a number, or a dash if it is unknown."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def show_p(p: float) -> str:
    """Return a p; a significant one has an exponent."""
    return show(p, ".2e" if p < ALPHA else ".3f")


@dataclass(frozen=True)
class Difference:
    """How much larger a number of B is than one of A: the mean, half the width of its interval, and
    p. The last two are nan if there are too few numbers, or only equal ones."""

    mean: float
    half: float
    p: float

    def in_percent(self) -> "Difference":
        """Return a difference of logarithms as a change in per cent."""
        factor = 100 * math.exp(self.mean)
        return Difference(100 * math.expm1(self.mean), factor * self.half, self.p)

    def in_words(self, form: str, words: tuple[str, str], unit: str = "") -> str:
        """Return the difference in words; `words` are those for a mean below and above 0."""
        interval = "" if math.isnan(self.half) else f" ± {self.half:{form}}{unit}"
        word = words[int(self.mean > 0)] if float(f"{self.mean:{form}}") else "different"
        return f"{abs(self.mean):{form}}{unit}{interval} {word}"


def p_value(numbers, known: float | None = None) -> np.ndarray:
    """Return the p of Student's t-test that the mean is 0, of numbers (..., n). If the standard
    deviation is `known`, the test is a z-test."""
    mean, n = np.mean(numbers, axis=-1), np.shape(numbers)[-1]
    if known is not None:
        return 2 * stats.norm.sf(np.abs(mean) * n**0.5 / known)
    deviation = np.maximum(np.std(numbers, axis=-1, ddof=1), 1e-12)  # equal numbers: not 0 / 0
    return 2 * stats.t.sf(np.abs(mean) * n**0.5 / deviation, n - 1)


def of_pairs(numbers: list[float], known: float | None = None) -> Difference:
    """Return the difference that pairs show, each by one number; the deviation may be known."""
    if known is not None:
        half = stats.norm.isf(0.025) * known / len(numbers) ** 0.5
    else:
        half = stats.t.isf(0.025, len(numbers) - 1) * stats.sem(numbers)
    return Difference(float(np.mean(numbers)), float(half), float(p_value(numbers, known)))


def of_groups(a: list[float], b: list[float], known: float | None = None) -> Difference:
    """Return the difference between two groups, by Welch's t-test; if the standard deviation of a
    number is `known`, by a z-test, for which one number of each is enough."""
    difference = float(np.mean(b) - np.mean(a))
    if known is not None:
        error = known * (1 / len(a) + 1 / len(b)) ** 0.5
        p = 2 * stats.norm.sf(abs(difference) / error)
        return Difference(difference, float(stats.norm.isf(0.025) * error), float(p))
    if min(len(a), len(b)) < FEWEST or np.ptp(a) + np.ptp(b) == 0:
        return Difference(difference, math.nan, math.nan)
    test = stats.ttest_ind(b, a, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return Difference(difference, float(high - low) / 2, float(test.pvalue))


# -----------------------------------------------------------------------------
# The sequential test: it may look after each pair


def p_values(numbers: np.ndarray, known: float | None = None) -> np.ndarray:
    """Return p after each look at numbers (..., N): after FEWEST of them, one more, ... N."""
    looks = range(FEWEST, numbers.shape[-1] + 1)
    return np.stack([p_value(numbers[..., :n], known) for n in looks], axis=-1)


@cache
def thresholds(alpha: float, most: int, known: bool = False) -> np.ndarray:
    """Return the p below which a difference is significant, at the looks of p_values for `most`
    pairs. The limit grows with the number of pairs. Without a difference, all looks together call
    one significant with the probability alpha. `known` says whether the deviation is: the limit is
    simulated with a deviation of 1, which does not matter to a t-test.
    """
    numbers = np.random.default_rng(2026).standard_normal((100_000, most))
    growth = np.arange(FEWEST, most + 1) / most
    p = p_values(numbers, known=1.0 if known else None)
    return np.quantile((p / growth).min(axis=1), alpha) * growth


# -----------------------------------------------------------------------------
# Pictures of runs, and of a comparison's pairs


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


def smoothed(losses: list[float]) -> tuple[list[int], list[float]]:
    """Return steps and the training losses there: each is a mean of the last fortieth of all."""
    width = max(1, len(losses) // 40)
    sums = np.cumsum([0.0, *losses])
    means = (sums[width:] - sums[:-width]) / width
    return list(range(width, len(losses) + 1)), means.tolist()


def draw_runs(groups: dict[str, list[Run]], target: float | None, path: Path) -> None:
    """Plot the losses of groups of runs over train_time and over steps: validations as points,
    training losses (smoothed) as thin lines, published validations dashed, the loss to reach
    dotted. `target` is the loss to reach; None: those of the records."""
    figure, panels = new_figure(2)
    by_time, by_step = panels
    shown, named = [], {}  # losses after the first tenth of the steps; curves by name
    for i, (letter, runs) in enumerate(groups.items()):
        look = {"color": color_of(i), "linewidth": 1, "markersize": 5}
        name = f"{letter}: {runs[0].name}, n = {len(runs)}"
        curves = [(name, ".-", run.curve) for run in runs]
        known, title = runs[0].published, f"{runs[0].record}, published"
        if known and runs[0].on_fineweb and title not in named:
            curve = {int(s): (loss, known["seconds"][s]) for s, loss in known["losses"].items()}
            curves.append((title, "--", curve))
        for title, style, curve in curves:
            losses, seconds = zip(*curve.values(), strict=True)
            by_time.plot(seconds, losses, style, **look)
            named[title] = by_step.plot([*curve], losses, style, **look)[0]
            shown += [loss for step, (loss, _) in curve.items() if step >= 0.1 * max(curve)]
        for run in runs:
            rows = read_metrics(run.path.with_suffix(".jsonl"))
            rows = [row for row in rows if "train_loss" in row]
            if not rows:  # as beside a public log
                continue
            steps, losses = smoothed([row["train_loss"] for row in rows])
            seconds = np.cumsum([row["ms"] / 1e3 for row in rows])[steps[0] - 1 :]
            for axes, x in ((by_time, seconds), (by_step, steps)):
                axes.plot(x, losses, color=color_of(i), linewidth=0.7, alpha=0.6)
            shown += losses[len(losses) // 10 :]
    for aim in {target or runs[0].target for runs in groups.values()}:
        for axes in panels:
            named[f"target, {aim:g}"] = axes.axhline(aim, color="black", linestyle=":")
    by_time.set(xlabel="training time (s)", ylabel="loss (points: validation, thin: training)")
    by_step.set(xlabel="step")
    margin = 0.05 * (max(shown) - min(shown)) + 0.001
    for axes in panels:
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
        axes.grid(alpha=0.3)
    names = ["\n".join(textwrap.wrap(name, 110)) for name in named]
    lines = sum(name.count("\n") + 1 for name in names)
    figure.set_size_inches(12, 4.2 + 0.2 * lines)  # the legend lies below the axes
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
        found = [of_pairs(values[:n]) for n in after]
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
