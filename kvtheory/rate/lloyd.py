"""The optimal scalar quantiser (Lloyd-Max) of a density or of samples.

Stationarity, for points c_1 < ... < c_n and thresholds t_i = (c_i + c_{i+1}) / 2:

    g_i = int_{cell i} (x - c_i) f(x) dx = 0            (each point the centroid of its cell)

The Jacobian of g is tridiagonal, so Newton costs O(n) a step. For a log-concave density the stationary quantiser is unique
(Kieffer 1983, "Uniqueness of locally optimal quantizer for log-concave density and convex error weighting function"), hence
optimal; for other laws the start is the exact optimum of a fine discretisation (1-d k-means by dynamic programming).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import solve_banded

from kvtheory.checks import finite, shape
from kvtheory.rate.density import NODES, WEIGHTS, Array, Density, cell_integrals, density_of

# Samples are clustered exactly up to this many distinct values; beyond, the start is the exact optimum of so many groups.
EXACT = 4096
# A density's stationarity is met to this fraction of its spread, or lloyd_max raises.
CERTIFIED = 1e-12


@dataclass(frozen=True)
class Certificate:
    """How far a quantiser is from the two conditions of optimality, in the units of x.

    `centroid`: max_i |c_i - E[x | cell i]| over cells of positive mass; `neighbour`: max_i |t_i - (c_i + c_{i+1})/2|.
    """

    centroid: float
    neighbour: float


@dataclass(frozen=True, eq=False)
class Quantizer:
    """A scalar quantiser: code i stands for points[i] and covers thresholds[i-1] <= x < thresholds[i].

    points (n,) and thresholds (n-1,) float64, ascending, read-only copies. Raises ValueError when they are not.
    """

    points: Array
    thresholds: Array

    def __post_init__(self) -> None:
        points, thresholds = (np.array(a, dtype=np.float64) for a in (self.points, self.thresholds))
        shape("points", points, ("n",))
        if points.size == 0:
            raise ValueError("points: expected at least one, got none")
        shape("thresholds", thresholds, (points.size - 1,))
        for name, values in (("points", points), ("thresholds", thresholds)):
            finite(name, values, (name[:-1],))
            if (np.diff(values) < 0).any():
                fall = int(np.argmax(np.diff(values) < 0))
                raise ValueError(
                    f"{name}: expected ascending numbers, got {values[fall]} before {values[fall + 1]} at {fall}"
                )
            values.flags.writeable = False
            object.__setattr__(self, name, values)

    @classmethod
    def nearest(cls, points: ArrayLike) -> Quantizer:
        """The quantiser that sends x to the nearest of `points` (n,), given in any order; a tie goes to the larger."""
        c = np.sort(np.asarray(points, dtype=np.float64))
        return cls(c, 0.5 * (c[:-1] + c[1:]))

    @property
    def size(self) -> int:
        return int(self.points.size)

    def encode(self, x: ArrayLike) -> NDArray[np.int64]:
        """Codes of x, int64 in 0..size-1, any shape. Raises ValueError on NaN or inf."""
        values = finite("x", np.asarray(x, dtype=np.float64))
        return np.searchsorted(self.thresholds, values, side="right").astype(np.int64, copy=False)

    def decode(self, codes: ArrayLike) -> Array:
        """points[codes], float64. Raises TypeError for codes that are no integers, ValueError for codes outside 0..size-1."""
        index = np.asarray(codes)
        if index.dtype.kind not in "iu":
            raise TypeError(f"codes: expected integers, got {index.dtype}")
        if index.size and (int(index.min()) < 0 or int(index.max()) >= self.size):
            raise ValueError(f"codes: expected 0..{self.size - 1}, got {int(index.min())}..{int(index.max())}")
        return self.points[index]

    def distortion(self, source: Any, weights: ArrayLike | None = None) -> float:
        """E (x - decode(encode(x)))^2, exact: the integral under a density, or the (weighted) mean over samples (n,)."""
        law = _law(source, weights)
        if isinstance(law, Density):
            return float(cell_integrals(law, _edges(self.thresholds), self.points)[2].sum())
        values, mass = law
        return float(np.dot(mass, (values - self.decode(self.encode(values))) ** 2))

    def certificate(self, source: Any, weights: ArrayLike | None = None) -> Certificate:
        """Residuals of the centroid and nearest-neighbour conditions under a density or samples (n,)."""
        law = _law(source, weights)
        if isinstance(law, Density):
            mass, first, _ = cell_integrals(law, _edges(self.thresholds), self.points)
        else:
            code, values = self.encode(law[0]), law[0]
            mass = np.bincount(code, law[1], minlength=self.size).astype(np.float64, copy=False)
            offset = law[1] * (values - self.points[code])
            first = np.bincount(code, offset, minlength=self.size).astype(np.float64, copy=False)
        held = mass > 0
        off = self.thresholds - 0.5 * (self.points[:-1] + self.points[1:])
        centroid = np.abs(first[held] / mass[held]).max(initial=0.0)
        return Certificate(float(centroid), float(np.abs(off).max(initial=0.0)))


def lloyd_max(
    source: Density | Callable[[Array], Any] | ArrayLike, size: int, weights: ArrayLike | None = None
) -> Quantizer:
    """The quantiser with `size` points that minimises E (x - x_hat)^2.

    source: a Density (kvtheory.quantization has Gaussian, Laplace, SphereCoordinate), a callable density x -> f(x) with an
    attribute `support` = (low, high), or samples (n,), float; weights (n,) >= 0 for samples only, default equal.

    Density: stationary to 1e-12 of its spread, `Quantizer.certificate` says how near; the global optimum for log-concave
    densities, for others the stationary point next to the optimum of a 2048-cell discretisation. A density symmetric about a
    centre gets an exactly symmetric quantiser when it is log-concave.
    Samples: the global optimum for up to 4096 distinct values; beyond, the optimum of 4096 groups of equal weight, then Lloyd
    steps on all samples to a fixed point. Fewer distinct values than points: every value is a point, the largest repeated.

    Raises ValueError (size < 1, NaN, inf, no samples, no convergence), TypeError (source or size of a wrong kind).
    Source: Lloyd 1982, Max 1960.
    """
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)):
        raise TypeError(f"size: expected an int, got {type(size).__name__}")
    if size < 1:
        raise ValueError(f"size: expected at least 1 point, got {size}")
    law = _law(source, weights)
    if not isinstance(law, Density):
        return Quantizer.nearest(_cluster(*law, int(size)))
    points = law.optimal_points(int(size))
    if points is None:
        start = _companded(law, int(size)) if law.log_concave else _discretised(law, int(size))
        points = _polish(law, start)
    return Quantizer.nearest(points)


def _law(source: Any, weights: ArrayLike | None) -> Density | tuple[Array, Array]:
    """A Density, or samples as (ascending distinct values, their probabilities)."""
    atoms = getattr(source, "atoms", None)
    if atoms is not None:  # a law on finitely many values, such as one coordinate of a unit vector in one dimension
        source, weights = atoms
    if isinstance(source, Density) or callable(source):
        if weights is not None:
            raise TypeError("weights: expected none with a density; they belong to samples")
        return density_of(source)
    try:
        samples = np.asarray(source, dtype=np.float64)
    except (TypeError, ValueError):
        return density_of(source)  # raises the TypeError that lists what is taken
    shape("source", samples, ("samples",))
    if samples.size == 0:
        raise ValueError("source: expected at least one sample, got none")
    finite("source", samples, ("sample",))
    if weights is None:
        values, counts = np.unique(samples, return_counts=True)
        return values, counts / samples.size
    w = np.asarray(weights, dtype=np.float64)
    shape("weights", w, (samples.size,))
    finite("weights", w, ("sample",))
    if (w < 0).any() or not w.sum() > 0:
        raise ValueError(f"weights: expected numbers >= 0, not all 0; got minimum {w.min()} and sum {w.sum()}")
    values, place = np.unique(samples, return_inverse=True)
    mass = np.bincount(place.ravel(), w, minlength=values.size)
    return values[mass > 0], mass[mass > 0] / w.sum()


def _edges(thresholds: Array) -> Array:
    return np.concatenate([[-np.inf], thresholds, [np.inf]])


def _grid(law: Density) -> tuple[Array, Array, Array]:
    """(x, probability, f^{1/3} dx) at all quadrature nodes of the density's panels, ascending."""
    half = 0.5 * np.diff(law.panels)[:, None]
    u = 0.5 * (law.panels[:-1] + law.panels[1:])[:, None] + half * NODES
    x, dx, weight = law.chart(u)
    return x.ravel(), (weight * half * WEIGHTS).ravel(), (np.cbrt(weight) * np.cbrt(dx) ** 2 * half * WEIGHTS).ravel()


def _companded(law: Density, size: int) -> Array:
    """Points spread with density proportional to f^{1/3}: optimal as size grows (Panter and Dite 1951)."""
    x, _, third = _grid(law)
    share = (np.cumsum(third) - 0.5 * third) / third.sum()
    return np.interp((np.arange(size) + 0.5) / size, share, x)


def _discretised(law: Density, size: int) -> Array:
    """The optimal points of the law collapsed onto the centroids of 2048 cells of equal share of f^{1/3}."""
    x, _, third = _grid(law)
    share = (np.cumsum(third) - 0.5 * third) / third.sum()
    edges = np.interp(np.linspace(0.0, 1.0, max(2048, 4 * size) + 1)[1:-1], share, x)
    about = np.interp((np.arange(edges.size + 1) + 0.5) / (edges.size + 1), share, x)
    mass, first, _ = cell_integrals(law, _edges(edges), about)
    held = mass > 0
    return _cluster(about[held] + first[held] / mass[held], mass[held], size)


def _polish(law: Density, points: Array) -> Array:
    """Stationary points near `points`: Newton on g, a Lloyd step wherever Newton would break the order or not help."""
    x, mass, _ = _grid(law)
    mean = float(np.dot(mass, x))
    spread = float(np.sqrt(np.dot(mass, (x - mean) ** 2)))
    symmetric = law.log_concave and law.centre is not None

    def balance(c: Array) -> Array:
        # The unique optimum of a symmetric law is symmetric: rounding should not say otherwise.
        return law.centre + 0.5 * ((c - law.centre) - (c - law.centre)[::-1]) if symmetric else c  # type: ignore[operator]

    def lloyd(c: Array) -> tuple[Array, Array, Array]:
        mass, first, _ = cell_integrals(law, _edges(0.5 * (c[:-1] + c[1:])), c)
        return mass, first, np.where(mass > 0, first / np.where(mass > 0, mass, 1.0), 0.0)

    points = balance(points)
    mass, first, shift = lloyd(points)
    best, least, stalled = points, np.abs(shift).max(), 0
    for _ in range(500):
        # -d first_i/dc_i = mass_i - p_i - p_{i-1},  -d first_i/dc_{i+1} = -p_i,  p_i = f(t_i) (c_{i+1} - c_i) / 4
        gap = np.diff(points)
        pull = 0.25 * law(points[:-1] + 0.5 * gap) * gap
        bands = np.zeros((3, points.size))
        bands[0, 1:] = bands[2, :-1] = -pull
        bands[1] = mass
        bands[1, :-1] -= pull
        bands[1, 1:] -= pull
        try:
            newton = balance(points + solve_banded((1, 1), bands, first))
        except np.linalg.LinAlgError:
            newton = np.full(points.size, np.nan)
        ordered = np.isfinite(newton).all() and (np.diff(newton) > 0).all()
        if ordered and law.support[0] <= newton[0] and newton[-1] <= law.support[1]:
            trial = lloyd(newton)
            helps = np.abs(trial[2]).max() < np.abs(shift).max()
        else:
            helps = False
        if not helps:
            newton = balance(points + shift)
            trial = lloyd(newton)
        points, (mass, first, shift) = newton, trial
        now = np.abs(shift).max()
        stalled = stalled + 1 if now > 0.5 * least else 0
        if now < least:
            best, least = points, now
        if least == 0.0 or (least < CERTIFIED * spread and stalled >= 2):
            break
    if not least <= CERTIFIED * spread:
        raise ValueError(
            f"source: no stationary quantiser with {best.size} points found to {CERTIFIED:g} of the spread, "
            f"only to {least / spread:.3g}"
        )
    return best


def _cluster(values: Array, mass: Array, size: int) -> Array:
    """Optimal points (size,) for the law with `mass` on ascending distinct `values`: 1-d k-means."""
    if values.size <= size:
        return np.concatenate([values, np.full(size - values.size, values[-1])])
    if values.size <= EXACT:
        return _centroids(values, mass, _starts(values, mass, size))
    # Groups of equal mass, each replaced by its mean.
    group = np.unique(np.searchsorted(np.cumsum(mass), np.arange(EXACT) / EXACT * mass.sum(), side="right"))
    group = group[group < values.size]
    coarse_mass = np.add.reduceat(mass, group)
    coarse = np.add.reduceat(mass * values, group) / coarse_mass
    if group.size <= size:
        starts = np.unique(np.concatenate([group, np.arange(size)]))[:size]
    else:
        starts = group[_starts(coarse, coarse_mass, size)]
    points = _centroids(values, mass, starts)
    for _ in range(10_000):  # each step lowers the distortion, and there are finitely many partitions
        moved = np.searchsorted(values, 0.5 * (points[:-1] + points[1:]), side="left")
        moved = np.concatenate([[0], moved])
        if np.array_equal(moved, starts) or (np.diff(moved) <= 0).any():
            break
        starts = moved
        points = _centroids(values, mass, starts)
    return points


def _centroids(values: Array, mass: Array, starts: NDArray[np.int64]) -> Array:
    origin = values[starts]
    members = np.diff(np.concatenate([starts, [values.size]]))
    offset = values - np.repeat(origin, members)
    return origin + np.add.reduceat(mass * offset, starts) / np.add.reduceat(mass, starts)


def _starts(values: Array, mass: Array, size: int) -> NDArray[np.int64]:
    """First index of each of `size` clusters of least summed squared error; size < len(values).

    best_k(j) = min_i best_{k-1}(i-1) + cost(i, j); the minimising i rises with j, so it is found for the middle j first and
    bounds the search on both sides (divide and conquer, all intervals of one level at once): O(size n log n).
    """
    n = values.size
    x = values - np.dot(mass, values)  # centred: the cost below is a difference of sums
    x = x / np.abs(x).max()
    w0, w1, w2 = (np.concatenate([[0.0], np.cumsum(mass * x**p)]) for p in range(3))

    def cost(i: NDArray[np.int64], j: NDArray[np.int64]) -> Array:
        m0, m1 = w0[j + 1] - w0[i], w1[j + 1] - w1[i]
        return np.maximum(w2[j + 1] - w2[i] - m1 * m1 / m0, 0.0)

    every = np.arange(n)
    best = cost(np.zeros(n, dtype=np.int64), every)
    choices = np.zeros((size, n), dtype=np.int64)
    for k in range(1, size):
        new = np.full(n, np.inf)  # fewer than k+1 values cannot fill k+1 clusters
        choice = choices[k]
        choice[:k] = k
        step = 1 << (n - k).bit_length()
        while step >= 1:
            j = np.arange(k + step - 1, n, 2 * step)
            if j.size:
                low = np.where(j - step >= k, choice[np.maximum(j - step, 0)], k)
                high = np.where(j + step < n, np.minimum(choice[np.minimum(j + step, n - 1)], j), j)
                counts = high - low + 1
                first = np.concatenate([[0], np.cumsum(counts)[:-1]])
                owner = np.repeat(np.arange(j.size), counts)
                i = np.arange(counts.sum()) - first[owner] + low[owner]
                total = best[i - 1] + cost(i, j[owner])
                least = np.minimum.reduceat(total, first)
                where = np.flatnonzero(total == least[owner])
                taken = where[np.searchsorted(where, first, side="left")]
                choice[j], new[j] = i[taken], least
            step >>= 1
        best = new
    starts = np.zeros(size, dtype=np.int64)
    last = n - 1
    for k in range(size - 1, 0, -1):
        starts[k] = choices[k, last]
        last = int(starts[k]) - 1
    return starts
