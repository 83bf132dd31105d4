"""Non-uniform levels for numbers in [-1, 1]: KVQuant's "nuq" datatype (arXiv 2401.18079, section 3), and its Q-Norm.

    levels      L = argmin sum_i w_i min_k (a_i - L_k)^2                1-d k-means, its optimum on 4096 bins of the numbers
    code        #{k : T_k < a},   T_k = (L_k + L_{k+1}) / 2             the nearest level; halfway, the lower one
    Q-Norm      L^_k = (L_k - mu_q) sigma / sigma_q + mu                what a code decodes to: mean and standard deviation of the
                                                                        quantised numbers (mu_q, sigma_q) become those of the numbers
The paper's k-means (Lloyd steps from a seeded start) need not find the optimum; a dynamic program does. T and L^ are kept as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtheory import rate
from reference.stream import Reader

__all__ = ["Levels", "fit", "read", "uniform"]

BINS = 4096
#: larger numbers in a state are refused, so that nothing overflows
MOST_LEVEL = 2.0**64
#: quantised numbers whose spread is below this share of the numbers' own are left as they are: there is nothing to scale
LEAST_SPREAD = 1e-6

Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Levels:
    """thresholds (2^b - 1,), between which a code lies, and points (2^b,), what it stands for; float32, ascending."""

    thresholds: NDArray[np.float32]
    points: NDArray[np.float32]

    def codes(self, numbers: Float64) -> NDArray[np.uint8]:
        """Codes of numbers of any shape."""
        flat = np.searchsorted(self.thresholds.astype(np.float64), numbers.reshape(-1), side="left")
        return flat.astype(np.uint8).reshape(numbers.shape)

    def numbers(self, codes: NDArray[np.uint8]) -> Float64:
        """What codes stand for."""
        return self.points.astype(np.float64)[codes]

    def write(self) -> bytes:
        return self.thresholds.astype("<f4").tobytes() + self.points.astype("<f4").tobytes()


def read(reader: Reader, bits: int, what: str) -> Levels:
    """Levels of `bits` bits; CorruptStream unless thresholds and points ascend and are of sane size."""
    out = []
    for name, size in (("thresholds", (1 << bits) - 1), ("points", 1 << bits)):
        start = reader.offset
        table = reader.array("<f4", size, f"{what} {name}").astype(np.float32)
        if not ((np.abs(table) <= MOST_LEVEL).all() and (np.diff(table) >= 0).all()):
            reader.fail(f"{what} {name}: expected ascending numbers of magnitude at most 2^64", start)
        out.append(table)
    return Levels(*out)


def uniform(bits: int) -> Levels:
    """-1 ... 1 in equal steps: what min/max quantisation has."""
    return _levels(np.linspace(-1, 1, 1 << bits))


def fit(numbers: Float64, weights: Float64, bits: int, optimal: bool, q_norm: bool) -> Levels:
    """Levels for numbers (n,) in [-1, 1] with weights (n,) >= 0.

    optimal: k-means, else uniform ones; uniform too where nothing weighs. q_norm: of the points; it counts each number once.
    """
    levels = uniform(bits)
    if optimal and numbers.size:
        # sums by bincount, in the order of the numbers: the same on any number of threads
        place = np.clip(np.floor((numbers + 1) * (BINS / 2)), 0, BINS - 1).astype(np.int64)
        mass = np.bincount(place, weights, minlength=BINS)
        first = np.bincount(place, weights * numbers, minlength=BINS)
        held = mass > 0
        if held.any():
            levels = _levels(rate.lloyd_max(first[held] / mass[held], 1 << bits, weights=mass[held]).points)
    return _normalised(levels, numbers) if q_norm and numbers.size else levels


def _levels(points: Float64) -> Levels:
    return Levels((0.5 * (points[:-1] + points[1:])).astype(np.float32), points.astype(np.float32))


def _normalised(levels: Levels, numbers: Float64) -> Levels:
    quantised = levels.numbers(levels.codes(numbers))
    mean, spread, own_mean, own_spread = quantised.mean(), quantised.std(), numbers.mean(), numbers.std()
    gain = own_spread / spread if spread > LEAST_SPREAD * own_spread else 1.0
    points = (levels.points.astype(np.float64) - mean) * gain + own_mean
    return Levels(levels.thresholds, points.astype(np.float32))
