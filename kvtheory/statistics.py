"""Intervals: every statistical statement of the ledger is one of these, at a level that is said.

The intervals for means rest on the central limit theorem (Student t); the one for a proportion is exact (Clopper-Pearson).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["Interval", "geometric_mean_interval", "mean_interval", "proportion_interval", "slope_interval"]


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
