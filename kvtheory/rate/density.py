"""Laws on the line, and their integrals over the cells of a quantiser, to the last digits of float64.

A density f is integrated in a chart x = x(u), u in a bounded interval, in which it is smooth on each of a list of panels: then
16-point Gauss-Legendre per panel is exact to rounding, tails included, and moments are taken *about the cell's own point*, so
that neither the distortion nor a centroid's offset is a small difference of large numbers.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# 16 nodes integrate polynomials of degree 31: on a panel one standard deviation long, exp(-x^2/2) to below 1e-17.
NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)


class Density(abc.ABC):
    """A probability density on the line.

    `support`     (low, high), may be infinite
    `panels`      ascending chart coordinates, first and last are the ends of the chart; smooth in between
    `log_concave` True: at most one locally optimal quantiser of each size exists (Kieffer 1983), so a stationary one is the best
    `centre`      centre of symmetry, or None
    """

    support: tuple[float, float]
    panels: Array
    log_concave: bool = False
    centre: float | None = None

    @abc.abstractmethod
    def __call__(self, x: ArrayLike) -> Array:
        """f(x), zero outside the support; shape of x, float64."""

    @abc.abstractmethod
    def chart(self, u: Array) -> tuple[Array, Array, Array]:
        """(x(u), dx/du, f(x(u)) dx/du), each of u's shape."""

    @abc.abstractmethod
    def to_chart(self, x: Array) -> Array:
        """u with x(u) = x, for x in the support, its ends included."""

    def optimal_points(self, size: int) -> Array | None:
        """The optimal quantiser's points (size,) where a closed form is known, else None."""
        return None


def cell_integrals(density: Density, edges: Array, about: Array) -> tuple[Array, Array, Array]:
    """Mass, first and second moment of f over each cell [edges[i], edges[i+1]], moments about[i]: three arrays (cells,).

    edges (cells + 1,) ascending, clipped to the support; about (cells,).
    """
    low, high = density.support
    u_edges = density.to_chart(np.clip(edges, low, high))
    inside = density.panels[(density.panels > u_edges[0]) & (density.panels < u_edges[-1])]
    breaks = np.concatenate([u_edges, inside])
    order = np.argsort(breaks, kind="stable")
    breaks = breaks[order]
    # Which cell each piece belongs to: the number of edges at or left of it, less one. Empty pieces weigh nothing.
    cell = np.cumsum(order < u_edges.size)[:-1] - 1
    half = 0.5 * np.diff(breaks)
    u = (0.5 * (breaks[:-1] + breaks[1:]))[:, None] + half[:, None] * NODES
    x, _, weight = density.chart(u)
    weight = weight * (half[:, None] * WEIGHTS)
    offset = x - about[cell][:, None]
    sums = [(weight * power).sum(axis=1) for power in (1.0, offset, offset * offset)]
    mass, first, second = (np.bincount(cell, s, minlength=about.size).astype(np.float64, copy=False) for s in sums)
    return mass, first, second


class _Callable(Density):
    """A density given as a function f(x) with its support; panels are found by bisection until the integrals settle."""

    def __init__(self, function: Callable[[Array], Any], support: tuple[float, float]) -> None:
        low, high = (float(end) for end in support)
        if not low < high:
            raise ValueError(f"source.support: expected low < high, got ({low}, {high})")
        self._function = function
        self.support = (low, high)
        self.log_concave = bool(getattr(function, "log_concave", False))
        self._ends = (-1.0 if np.isinf(low) else 0.0, 1.0 if np.isinf(high) or np.isfinite(low) else 0.0)
        self.panels = self._settle()

    def __call__(self, x: ArrayLike) -> Array:
        points = np.asarray(x, dtype=np.float64)
        low, high = self.support
        inside = (points >= low) & (points <= high)
        values = np.zeros(points.shape)
        values[inside] = np.asarray(self._function(points[inside]), dtype=np.float64)
        return values

    # Charts on u: [low, high] -> [0, 1]; [low, inf) -> [0, 1) by u/(1-u); (-inf, high] -> (-1, 0] by u/(1+u); R -> (-1, 1) by u/(1-|u|).
    def chart(self, u: Array) -> tuple[Array, Array, Array]:
        low, high = self.support
        if np.isfinite(low) and np.isfinite(high):
            x, dx = low + (high - low) * u, np.full(u.shape, high - low)
        else:
            anchor = low if np.isfinite(low) else high if np.isfinite(high) else 0.0
            room = np.maximum(1.0 - np.abs(u), np.finfo(np.float64).tiny)
            x, dx = anchor + u / room, 1.0 / room**2
        value = np.asarray(self._function(x), dtype=np.float64)
        if not (np.isfinite(value).all() and (value >= 0).all()):
            raise ValueError(
                "source: expected a density, finite and >= 0 in its support; got NaN, inf or a negative value"
            )
        return x, dx, value * dx

    def to_chart(self, x: Array) -> Array:
        low, high = self.support
        if np.isfinite(low) and np.isfinite(high):
            return (x - low) / (high - low)
        anchor = low if np.isfinite(low) else high if np.isfinite(high) else 0.0
        y = x - anchor
        with np.errstate(invalid="ignore"):
            return np.where(np.isinf(y), np.sign(y), y / (1.0 + np.abs(y)))

    def _settle(self) -> Array:
        start, end = self._ends
        panels = np.linspace(start, end, 17)
        for _ in range(60):
            left, right = panels[:-1], panels[1:]
            middle = 0.5 * (left + right)
            whole = self._panel_integrals(left, right)
            halves = self._panel_integrals(left, middle) + self._panel_integrals(middle, right)
            total = np.abs(halves).sum(axis=1, keepdims=True)
            wrong = (np.abs(whole - halves) > 1e-14 * total).any(axis=0)
            if not wrong.any() or panels.size > 4096:
                break
            panels = np.sort(np.concatenate([panels, middle[wrong]]))
        mass = float(self._panel_integrals(panels[:-1], panels[1:])[0].sum())
        if not abs(mass - 1.0) < 1e-6:
            raise ValueError(f"source: expected a density of mass 1 on its support {self.support}, got {mass:.9g}")
        return panels

    def _panel_integrals(self, left: Array, right: Array) -> Array:
        half = 0.5 * (right - left)
        u = (0.5 * (left + right))[:, None] + half[:, None] * NODES
        x, _, weight = self.chart(u)
        weight = weight * (half[:, None] * WEIGHTS)
        # Refined on bounded functions of x, so that a law with heavy tails does not keep the bisection busy at infinity.
        squash = 1.0 + x * x
        return np.stack([weight.sum(axis=1), (weight * x / squash).sum(axis=1), (weight / squash).sum(axis=1)])


def density_of(source: Density | Callable[[Array], Any]) -> Density:
    """`source` itself if it is a Density; else the callable x -> f(x) with an attribute `support` = (low, high), wrapped.

    Raises TypeError when it is neither, ValueError when it is not a density of mass 1 on its support.
    """
    if isinstance(source, Density):
        return source
    support = getattr(source, "support", None)
    if not callable(source) or not isinstance(support, tuple) or len(support) != 2:
        raise TypeError(
            f"source: expected a Density, a callable density with an attribute support = (low, high), or 1-d samples, "
            f"got {type(source).__name__}"
        )
    return _Callable(source, support)
