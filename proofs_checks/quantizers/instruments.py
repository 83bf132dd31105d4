"""What the checks of this package measure with; nothing here is shared with kvtheory.quantization.

Cell moments of the Beta law in incomplete beta functions (the library integrates in the angle), adaptive quadrature of the
density as printed, plain Lloyd iteration (the library runs Newton), random codes by order statistics.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.integrate import quad
from scipy.optimize import brentq

Array = NDArray[np.float64]
PRINTED_BITS = (1, 2, 3, 4)


def beta_moments(dim: int, thresholds: Array) -> tuple[Array, Array, Array]:
    """Integrals of f, x f and x^2 f over the cells cut by `thresholds`, f = C (1 - x^2)^{(d-3)/2}, in closed form.

    int_0^x f = I_{x^2}(1/2, (d-1)/2) / 2,   int_x^1 t f = C/(d-1) (1 - x^2)^{(d-1)/2},   int_0^x t^2 f = I_{x^2}(3/2, (d-1)/2) / (2d)
    """
    x = np.concatenate([[-1.0], thresholds, [1.0]])
    c = np.exp(special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2)) / np.sqrt(np.pi)
    mass = 0.5 * np.sign(x) * special.betainc(0.5, (dim - 1) / 2, x * x)
    first = -c / (dim - 1) * ((1 - x) * (1 + x)) ** ((dim - 1) / 2)
    second = np.sign(x) / (2 * dim) * special.betainc(1.5, (dim - 1) / 2, x * x)
    return np.diff(mass), np.diff(first), np.diff(second)


def beta_distortion(dim: int, points: Array) -> tuple[float, float]:
    """(d E (x - q(x))^2, largest |point - centroid| sqrt d) of the nearest-point quantiser, by `beta_moments`."""
    mass, first, second = beta_moments(dim, 0.5 * (points[:-1] + points[1:]))
    held = mass > 0
    off = np.abs(points[held] - first[held] / mass[held]).max() * np.sqrt(dim)
    return float(dim * (second - 2 * points * first + points**2 * mass).sum()), float(off)


def beta_distortion_by_quad(dim: int, points: Array) -> float:
    """The same distortion, cell by cell, by adaptive quadrature of the density as the paper prints it."""
    c = special.gamma(dim / 2) / (np.sqrt(np.pi) * special.gamma((dim - 1) / 2))
    edges = np.concatenate([[-1.0], 0.5 * (points[:-1] + points[1:]), [1.0]])

    def cell(low: float, high: float, point: float) -> float:
        # beyond 12 standard deviations there is nothing for quad to find
        low, high = (float(np.clip(end, -12 / np.sqrt(dim), 12 / np.sqrt(dim))) for end in (low, high))
        square, _ = quad(
            lambda x: (x - point) ** 2 * c * (1 - x * x) ** ((dim - 3) / 2), low, high, epsabs=0, epsrel=1e-11
        )
        return float(square)

    return dim * sum(cell(*ends) for ends in zip(edges[:-1], edges[1:], points))


def best_by_lloyd(dim: int, size: int, rng: np.random.Generator, starts: int) -> float:
    """Least d E (x - q(x))^2 that plain Lloyd iteration reaches from random starts."""
    best = np.inf
    for _ in range(starts):
        points = np.sort(rng.standard_normal(size)) / np.sqrt(dim)
        for _ in range(1500):
            mass, first, _ = beta_moments(dim, 0.5 * (points[:-1] + points[1:]))
            moved = np.where(mass > 1e-300, first / np.maximum(mass, 1e-300), points)
            if np.abs(moved - points).max() < 1e-13:
                break
            points = moved
        best = min(best, beta_distortion(dim, points)[0])
    return best


def random_code(dim: int, bits: float) -> float:
    """E ||x - r c||^2 for the nearest of N = 2^{dim bits} independent uniform points c of the sphere, r = E max cos; any unit x.

    The nearest cap's probability p has P(p > t) = (1-t)^N: -N ln(1-p) = e is standard exponential, exactly. With e = exp(s) the
    mean of 1 - cos v(p) is int exp(s - exp(s)) (...) ds, for the trapezoidal rule. D = 1 - r^2.
    """
    s, step = np.linspace(-45.0, 4.5, 2001, retstep=True)
    a = (dim - 1) / 2
    p = -np.expm1(-np.exp(s) * 2.0 ** (-dim * bits))
    short = 2 * special.betaincinv(a, a, p)
    loss = float((np.exp(s - np.exp(s)) * short).sum() * step)
    return loss * (2 - loss)


def richardson(values: Array) -> tuple[float, float]:
    """Limit of n^2 D_n = C - c/n + ..., values at n, 2n, 4n; and the change from the step before, which bounds the error left.

    (The changes fall by a factor of 2.7 from b to b+1 for the Gaussian, so that the sum of all later ones is below the last.)
    """
    first, second = 2 * values[-2] - values[-3], 2 * values[-1] - values[-2]
    return float(second), float(abs(second - first))


def _finite_or(value: float) -> float:
    return value if np.isfinite(value) else np.inf


def worst(pairs: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    """Of (label, observed, predicted), the one with the largest relative difference; one that is no number is worse than any."""
    return max(pairs, key=lambda row: _finite_or(abs(row[1] - row[2]) / max(abs(row[1]), abs(row[2]), 5e-324)))


def highest(pairs: list[tuple[str, float, float]]) -> tuple[str, float, float]:
    """Of (label, observed, bound), the one with the largest observed/bound; one that is no number is higher than any."""
    return max(pairs, key=lambda row: _finite_or(row[1] / row[2] if row[2] else np.inf))


def farthest_from_digits(values: list[tuple[str, float, str]]) -> tuple[str, float, float]:
    """Of (label, value, printed decimal), the one most half units of its last printed digit away: (label, |value - printed|, half a unit)."""
    rows = [(label, abs(value - float(text)), half_a_unit(text)) for label, value, text in values]
    return highest(rows)


def half_a_unit(text: str) -> float:
    """Of the last printed digit of a decimal: ".36" -> .005."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


class Caps(NamedTuple):
    """Of caps of the sphere: log of the probability p, 1 - m with m the mean cosine, 1 - t with t the cosine of the edge, m - t."""

    log_p: Array
    short: Array
    edge: Array
    gap: Array


def caps(dim: int, angles: Array) -> Caps:
    """Caps of angle v in (0, pi/2], by Gauss-Legendre in the angle; relative accuracy near 1e-13 in each of the four, down to small v.

    Weights (sin u / sin v)^{d-2} on panels that halve towards u = v: at d = 256 the mass lies within v/255 of the edge.
    """
    nodes, weights = np.polynomial.legendre.leggauss(20)
    ends = np.concatenate([1 - 2.0 ** -np.arange(14.0), [1.0]])
    half = 0.5 * np.diff(ends)[:, None]
    share = (0.5 * (ends[:-1] + ends[1:])[:, None] + half * nodes).ravel()
    v = np.asarray(angles, dtype=np.float64)[:, None]
    u = v * share
    weight = (half * weights).ravel() * (np.sin(u) / np.sin(v)) ** (dim - 2)
    total = weight.sum(axis=1)
    log_c = special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2) - 0.5 * np.log(np.pi)
    v = v[:, 0]
    short = (weight * 2 * np.sin(u / 2) ** 2).sum(axis=1) / total
    gap = (weight * 2 * np.sin((v[:, None] + u) / 2) * np.sin((v[:, None] - u) / 2)).sum(axis=1) / total
    log_p = log_c + (dim - 2) * np.log(np.sin(v)) + np.log(v * total)
    return Caps(log_p, short, 2 * np.sin(v / 2) ** 2, gap)


def cap_angle(dim: int, log_p: float) -> float:
    """Angle of the cap of probability exp(log_p) <= 1/2."""
    # p <= C v^{d-1} / (d-1) and p >= that times (2/pi)^{d-2}
    log_c = special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2) - 0.5 * np.log(np.pi)
    low = (log_p - log_c + np.log(dim - 1)) / (dim - 1)
    high = min(low + np.log(np.pi / 2), np.log(np.pi / 2))
    root = brentq(lambda x: caps(dim, np.exp([x])).log_p[0] - log_p, low - 1e-9, high + 1e-9, xtol=1e-15, rtol=1e-15)
    return float(np.exp(root))


def gaussian_distortion_of(points: Array) -> float:
    t = np.concatenate([[-np.inf], 0.5 * (points[:-1] + points[1:]), [np.inf]])
    density = np.exp(-0.5 * t * t) / np.sqrt(2 * np.pi)
    mass, first = np.diff(special.ndtr(t)), -np.diff(density)
    second = mass - np.diff(np.where(np.isfinite(t), t, 0.0) * density)
    return float((second - 2 * points * first + points**2 * mass).sum())


def gaussian_by_lloyd(size: int) -> float:
    points = special.ndtri((np.arange(size) + 0.5) / size)
    for _ in range(5000):
        t = np.concatenate([[-np.inf], 0.5 * (points[:-1] + points[1:]), [np.inf]])
        moved = -np.diff(np.exp(-0.5 * t * t)) / np.sqrt(2 * np.pi) / np.diff(special.ndtr(t))
        if np.abs(moved - points).max() < 1e-12:
            break
        points = moved
    return gaussian_distortion_of(points)


def beta_by_lloyd(dim: int, size: int) -> Array:
    points = special.ndtri((np.arange(size) + 0.5) / size) / np.sqrt(dim)
    for _ in range(5000):
        mass, first, _ = beta_moments(dim, 0.5 * (points[:-1] + points[1:]))
        moved = first / mass
        if np.abs(moved - points).max() < 1e-13:
            break
        points = moved
    return points


def optimal_distortion(dim: int, bits: int) -> float:
    """d E (x - q(x))^2 of the optimal 2^bits-point quantiser, dim >= 3, integrated in incomplete beta functions.

    Points from the library, which need not be trusted: where each is its cell's centroid (to 1e-9 deviations, else NaN), the density
    being log-concave, there is no better quantiser.
    """
    from kvtheory.quantization import SphereCoordinate
    from kvtheory.rate import lloyd_max

    value, off = beta_distortion(dim, lloyd_max(SphereCoordinate(dim), 2**bits).points)
    return value if off < 1e-9 else np.nan


def normal_constant() -> float:
    """(1/12) (int phi^(1/3))^3 by quadrature."""
    third, _ = quad(
        lambda x: (np.exp(-x * x / 2) / np.sqrt(2 * np.pi)) ** (1 / 3), 0, 40, epsabs=0, epsrel=1e-12, limit=200
    )
    return float((2 * third) ** 3 / 12)


def errors_of(unit: Any, points: Array) -> Array:
    """Squared error of each row under the nearest point, with a codebook search of the check's own."""
    thresholds = (0.5 * (points[:-1] + points[1:])).astype(unit.dtype)
    return np.sum((unit - points.astype(unit.dtype)[np.searchsorted(thresholds, unit)]) ** 2, axis=1, dtype=np.float64)


def binomial_distortion(dim: int, points: Array) -> float:
    """d E (t - q(t))^2 for t = (sum of d independent signs) / d, q the nearest of `points`: exact sum over the binomial law."""
    k = np.arange(dim + 1)
    mass = np.exp(special.gammaln(dim + 1) - special.gammaln(k + 1) - special.gammaln(dim - k + 1) - dim * np.log(2))
    t = (2 * k - dim) / dim
    return float(dim * (mass * np.abs(t[:, None] - points).min(axis=1) ** 2).sum())
