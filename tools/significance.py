"""Is a difference significant? The statistics of all tools, and their words.

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
that ends the comparison. "Extended": false before or after an extension to 30 pairs. Other judges
may read an ended comparison: the shares of their columns hold.

    judge   loss   time   sooner  any    extended
    loss    .0087  .0024  .0029   .0127  .0169
    time    .0029  .0095  .0029   .0140  .0164
    sooner  .0031  .0022  .0107   .0146  .0183

`./run.sh test -k errs_as_rarely` tests parts of both tables.
"""

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats

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


def of_one(number: float, group: list[float]) -> Difference:
    """Return how much larger one more number is than the mean of a group, in standard deviations of
    the group. Its deviation is taken to be the group's."""
    deviation, n = float(np.std(group, ddof=1)), len(group)
    mean, error = (number - float(np.mean(group))) / deviation, (1 + 1 / n) ** 0.5
    p = 2 * stats.t.sf(abs(mean) / error, n - 1)
    return Difference(mean, float(stats.t.isf(0.025, n - 1) * error), float(p))


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
