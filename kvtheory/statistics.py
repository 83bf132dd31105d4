"""Intervals: every statistical statement of the ledger is one of these, at a level that is said.

The intervals for means rest on the central limit theorem (Student t); the one for a proportion is exact (Clopper-Pearson);
those for geometric means of ratios of sums are bootstrap intervals, paired across what is compared.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "Interval",
    "RatioBootstrap",
    "bootstrap_ratios",
    "expanded_percentiles",
    "geometric_mean_interval",
    "mean_interval",
    "paired_p_range",
    "paired_p_value",
    "proportion_interval",
    "slope_interval",
]


class Interval(NamedTuple):
    """low <= the quantity <= high with probability `level`; `estimate` is the point estimate."""

    estimate: float
    low: float
    high: float
    level: float

    def scaled(self, factor: float) -> Interval:
        """The interval of `factor` (> 0) times the quantity."""
        return Interval(factor * self.estimate, factor * self.low, factor * self.high, self.level)


def _level(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
    return float(level)


def mean_interval(samples: ArrayLike, level: float) -> Interval:
    """Two-sided Student t interval of the mean of independent samples (N,), N >= 2. Constant samples give a point."""
    from scipy.special import stdtrit

    x = np.asarray(samples, dtype=np.float64).ravel()
    if x.size < 2:
        raise ValueError(f"samples: expected at least 2, got {x.size}")
    mean = float(x.mean())
    half = float(stdtrit(x.size - 1, 0.5 + _level(level) / 2)) * float(x.std(ddof=1)) / np.sqrt(x.size)
    return Interval(mean, mean - half, mean + half, level)


def geometric_mean_interval(samples: ArrayLike, level: float) -> Interval:
    """exp of the t interval of the mean logarithm, for positive samples: the interval of a geometric mean."""
    x = np.asarray(samples, dtype=np.float64)
    if not (x > 0).all():
        raise ValueError("samples: expected numbers above 0 for a geometric mean")
    logs = mean_interval(np.log(x), level)
    return Interval(float(np.exp(logs.estimate)), float(np.exp(logs.low)), float(np.exp(logs.high)), level)


def slope_interval(x: ArrayLike, samples: ArrayLike, level: float) -> Interval:
    """Interval of the least-squares slope of a curve measured N times: x (p,), samples (N, p), one whole curve a row.

    The slope is linear in the curve, so each row gives one slope and the rows are independent: a t interval over them.
    Points of one row may be dependent (paired draws), which a regression's own standard error would ignore.
    """
    x = np.asarray(x, dtype=np.float64)
    curves = np.asarray(samples, dtype=np.float64)
    if curves.ndim != 2 or curves.shape[1] != x.size or x.size < 2:
        raise ValueError(f"samples: expected shape (curves, {x.size}) with at least 2 points, got {curves.shape}")
    centred = x - x.mean()
    return mean_interval(curves @ centred / (centred @ centred), level)


def proportion_interval(successes: int, trials: int, level: float) -> Interval:
    """Clopper-Pearson interval of a probability from `successes` out of `trials` independent trials; exact coverage."""
    from scipy.special import betaincinv

    if not (0 <= successes <= trials and trials > 0):
        raise ValueError(f"successes: expected 0 <= successes <= trials with trials > 0, got {successes} of {trials}")
    tail = (1 - _level(level)) / 2
    low = 0.0 if successes == 0 else float(betaincinv(successes, trials - successes + 1, tail))
    high = 1.0 if successes == trials else float(betaincinv(successes + 1, trials - successes, 1 - tail))
    return Interval(successes / trials, low, high, level)


def paired_p_value(only_first: int, only_second: int) -> Fraction:
    """Exact two-sided p of McNemar's test: of only_first + only_second pairs that differ, as uneven or more so if either side is as likely.

    p = min(1, 2 P(X <= min(b, c))),   X ~ Binomial(b + c, 1/2);   1 where no pair differs.
    """
    for name, count in (("only_first", only_first), ("only_second", only_second)):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
            raise ValueError(f"{name}: expected an int >= 0, got {count!r}")
    differing = int(only_first) + int(only_second)
    tail = sum(comb(differing, i) for i in range(min(int(only_first), int(only_second)) + 1))
    return min(Fraction(1), Fraction(2 * tail, 2**differing))


def paired_p_range(first: int, second: int, trials: int) -> tuple[Fraction, Fraction]:
    """Least and greatest `paired_p_value` that two counts of successes on the same `trials` allow, whichever trials they succeeded on.

    Of first = both + b and second = both + c, b - c is known and b + c is not: from |first - second| (one's successes are all the other's)
    to min(first + second, 2 trials - first - second).
    """
    for name, count in (("first", first), ("second", second)):
        if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or not 0 <= count <= trials:
            raise ValueError(f"{name}: expected an int from 0 to trials = {trials}, got {count!r}")
    low, high = sorted((int(first), int(second)))
    most = min(low, int(trials) - high)  # pairs of the lower count alone
    values = [paired_p_value(high - low + c, c) for c in range(most + 1)]
    return min(values), max(values)


class RatioBootstrap(NamedTuple):
    """Geometric means of ratios for several points, with replicates drawn together, so that points may be compared.

    log_estimates (points,), log_replicates (points, draws): natural logarithms; -inf where a numerator is 0. segments: how many.
    """

    log_estimates: NDArray[np.float64]
    log_replicates: NDArray[np.float64]
    segments: int
    level: float

    def interval(self, point: int) -> Interval:
        """Of the geometric mean of one point."""
        return self._of(self.log_estimates[point], self.log_replicates[point])

    def contrast(self, point: int, against: int) -> Interval:
        """Of the ratio of two geometric means; paired, so that what both share (hard segments) does not widen it."""
        if not np.isfinite(self.log_replicates[[point, against]]).all():
            raise ValueError("point, against: expected points whose ratios are above 0")
        return self._of(
            self.log_estimates[point] - self.log_estimates[against],
            self.log_replicates[point] - self.log_replicates[against],
        )

    def _of(self, log_estimate: float, log_replicates: NDArray[np.float64]) -> Interval:
        low, high = expanded_percentiles(log_replicates, self.segments, self.level)
        return Interval(float(np.exp(log_estimate)), float(np.exp(low)), float(np.exp(high)), self.level)


def expanded_percentiles(replicates: NDArray[np.float64], samples: int, level: float) -> tuple[float, float]:
    """The expanded percentile interval of bootstrap replicates (draws,) from `samples` independent samples.

    Resampling n values understates their variance by (n-1)/n and knows no Student t; for a mean of normal samples both are undone by
    taking the percentiles Phi(-+ sqrt(n/(n-1)) t_{n-1}) (Hesterberg 2015, section 4.2: at n = 8 and 95%, those at .6 and 99.4).
    The percentiles are order statistics: -inf among the replicates is in order.
    """
    from scipy.special import ndtr, stdtrit

    tail = float(ndtr(-np.sqrt(samples / (samples - 1)) * stdtrit(samples - 1, 0.5 + _level(level) / 2)))
    ordered = np.sort(replicates)
    skipped = int(np.floor(tail * ordered.size))
    return float(ordered[skipped]), float(ordered[ordered.size - 1 - skipped])


def bootstrap_ratios(
    numerators: ArrayLike, denominators: ArrayLike, level: float, *, seed: int = 0, draws: int = 5000
) -> RatioBootstrap:
    """Paired bootstrap of G_p = (prod_u sum_s N_pus / sum_s D_us)^{1/units}, the geometric mean over units of a ratio of sums.

    numerators (points, units, segments) >= 0; denominators, of that shape or one that broadcasts to it, > 0. Segments are resampled
    with replacement; each draw takes the same segments for every point and every unit, as all were measured on the same ones. With
    multiplicities w_s of a draw, log G_p = mean_u (log sum_s w_s N_pus - log sum_s w_s D_us).

    The interval (`expanded_percentiles`) is over segments, taken as independent; fewer than 6 cannot carry 95%.
    ValueError for other shapes, fewer than 2 segments, negative numerators and denominators that are not above 0.
    """
    from kvtheory.randomness import generator

    over = np.asarray(numerators, dtype=np.float64)
    if over.ndim != 3 or 0 in over.shape or over.shape[2] < 2:
        raise ValueError(
            f"numerators: expected shape (points, units, segments) with at least 2 segments, got {over.shape}"
        )
    under = np.asarray(denominators, dtype=np.float64)
    try:
        under = np.broadcast_to(under, over.shape)
    except ValueError:
        raise ValueError(f"denominators: expected a shape that broadcasts to {over.shape}, got {under.shape}") from None
    if not (np.isfinite(over) & (over >= 0)).all():
        raise ValueError("numerators: expected finite numbers >= 0")
    if not (np.isfinite(under) & (under > 0)).all():
        raise ValueError("denominators: expected finite numbers above 0")
    if draws < 1:
        raise ValueError(f"draws: expected at least 1, got {draws}")
    segments = over.shape[2]
    multiplicities = generator(seed, "kvtheory.statistics.bootstrap_ratios").multinomial(
        segments, np.full(segments, 1 / segments), size=draws
    )
    weights = np.vstack([np.ones(segments), multiplicities]).T  # the first column is the sample itself
    with np.errstate(divide="ignore"):  # a numerator of 0 is a geometric mean of 0
        logs = (np.log(over @ weights) - np.log(under @ weights)).mean(axis=1)
    return RatioBootstrap(logs[:, 0], logs[:, 1:], segments, _level(level))
