"""What is left when a position is predicted by its mean over the next token: energy, bounds by the token's entropy, rate against distortion.

The next token v has the law p, writes f(v) = F(past, v), and is predicted by fbar = sum_v p_v f(v); the residual is R(v) = f(v) - fbar. Then

    E||R||^2 = sum_v p_v ||f(v) - fbar||^2 = 1/2 sum_{u,v} p_u p_v ||f(u) - f(v)||^2                                    (theory A8)
            <= Delta^2/2 (1 - sum_v p_v^2) <= Delta^2/2 (1 - 2^-H)   and   <= Delta^2/4 H       Delta = max ||f(u) - f(v)||, H in bits
    ||R(v)|| <= Delta (1 - p_v) = Delta (1 - 2^-h),   h = -log2 p_v
    R(D)     <= min{ H, sum_c 1/2 log2^+(lambda_c / theta) },   lambda = eig Cov f, sum_c min(lambda_c, theta) = D       (theory A9)

An upper bound proves no small gain: 1 - 2^-H is .90 at 3.3 bits and .95 at 4.3, and nothing says that it is attained.
Source: arXiv 2604.15356, predicted KV and the entropy-to-norm bound, whose constants it leaves open; sharpened here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory import checks
from kvtheory.entropy import Law

__all__ = [
    "RatePoint",
    "collision_bound",
    "diameter",
    "entropy_bound",
    "error_bound",
    "gaussian_rate",
    "linear_bound",
    "pair_energy",
    "rate_bound",
    "rate_distortion",
    "residual_energy",
    "residual_map",
    "token_entropy",
]


def _law(p: Any) -> Any:
    """p as an array (v,): floats as float64, whole numbers and Fractions as they are."""
    p = np.asarray(p)
    p = p if p.dtype == object else p.astype(np.float64)
    checks.shape("p", p, ("v",))
    if p.size == 0 or not (p >= 0).all() or abs(float(p.sum()) - 1) > 1e-9:
        raise ValueError("p: expected probabilities >= 0 of sum 1, at least one")
    return p


def _mixture(p: ArrayLike, f: ArrayLike) -> tuple[Any, Any]:
    law = _law(p)
    atoms = np.asarray(f)
    atoms = atoms if atoms.dtype == object else atoms.astype(np.float64)
    if atoms.ndim < 1 or len(atoms) != law.size:
        raise ValueError(f"f: expected {law.size} vectors, one for each probability, got shape {atoms.shape}")
    return law, atoms.reshape(law.size, -1)


def residual_energy(p: ArrayLike, f: ArrayLike) -> Any:
    """E||R||^2 = sum_v p_v ||f(v) - fbar||^2. p (v,) of sum 1, f (v, ...); Fractions (object arrays) stay exact. ValueError for other shapes."""
    law, atoms = _mixture(p, f)
    residual = atoms - law @ atoms
    return law @ (residual * residual).sum(axis=1)


def pair_energy(p: ArrayLike, f: ArrayLike) -> Any:
    """1/2 sum_{u,v} p_u p_v ||f(u) - f(v)||^2, the same number by another route; arguments as in `residual_energy`."""
    law, atoms = _mixture(p, f)
    apart = atoms[:, None] - atoms[None]
    return law @ (apart * apart).sum(axis=2) @ law / 2


def diameter(f: ArrayLike) -> float:
    """Delta = max_{u,v} ||f(u) - f(v)|| of f (v, ...), float."""
    atoms = np.asarray(f, np.float64)
    atoms = atoms.reshape(len(atoms), -1)
    return max((float(np.linalg.norm(atoms - one, axis=1).max()) for one in atoms), default=0.0)


def token_entropy(p: ArrayLike) -> float:
    """H(p) in bits, of p (v,)."""
    law = _law(p).astype(np.float64)
    law = law[law > 0]
    return float(-(law * np.log2(law)).sum()) + 0.0


def collision_bound(p: ArrayLike, delta: Any) -> Any:
    """Delta^2/2 (1 - sum_v p_v^2): attained by any two atoms, and by a simplex."""
    law = _law(p)
    # 1 - sum p^2 = sum p (1 - p), which keeps its digits where one token is nearly certain
    return delta * delta * (law * (1 - law)).sum() / 2


def entropy_bound(entropy_bits: float, delta: float) -> float:
    """Delta^2/2 (1 - 2^-H): attained by a simplex under the uniform law. Jensen: sum p^2 = E 2^(log2 p) >= 2^-H."""
    return delta * delta / 2 * -math.expm1(-math.log(2) * entropy_bits)


def linear_bound(entropy_bits: float, delta: float) -> float:
    """Delta^2/4 H: attained by a fair coin; below `entropy_bound` for H < 1. From 1 - sum p^2 <= H/2, by the grouping rule."""
    return delta * delta / 4 * entropy_bits


def error_bound(probability: Any, delta: Any) -> Any:
    """||R(v)|| <= Delta (1 - p_v), of the token that came: attained by two atoms."""
    return delta * (1 - probability)


def residual_map(law: Law, kv_map: Callable[[tuple[Any, ...]], Any]) -> Callable[[tuple[Any, ...]], Any]:
    """R_t of a prefix, as a map of prefixes: kv_map(prefix) - sum_v P(v | prefix[:-1]) kv_map(prefix[:-1] + v).

    kv_map gives a flat tuple of exact numbers (ints, Fractions), hashable, for `kvtheory.entropy.sequential`; the residual is one alike.
    """

    def residual(prefix: tuple[Any, ...]) -> tuple[Any, ...]:
        past = prefix[:-1]
        mean: list[Any] = [0] * len(kv_map(prefix))
        following: Mapping[Any, Any] = law.next(past)
        for token, probability in following.items():
            mean = [m + probability * x for m, x in zip(mean, kv_map((*past, token)), strict=True)]
        return tuple(x - m for x, m in zip(kv_map(prefix), mean, strict=True))

    return residual


# -- rate against distortion -------------------------------------------------------------------------------------------


def gaussian_rate(variances: ArrayLike, distortion: float) -> float:
    """Bits a vector: sum_c 1/2 log2^+(s_c / theta) with sum_c min(s_c, theta) = D: reverse water-filling, read from the distortion's side.

    variances (components,) >= 0; distortion: of the whole vector, >= 0. inf at D = 0 where a variance is positive; 0 for D >= sum s_c.
    """
    s = np.sort(np.asarray(variances, np.float64))
    checks.finite("variances", s, ("component",))
    if (s < 0).any() or not distortion >= 0:
        raise ValueError(
            f"distortion, variances: expected numbers >= 0, got {distortion} and a smallest variance of {s.min(initial=0)}"
        )
    if distortion >= s.sum():
        return 0.0
    if distortion == 0:
        return math.inf
    # the j smallest lie below theta: D = sum of them + (n - j) theta; the first j for which theta does not exceed the next one
    below = np.concatenate([[0.0], np.cumsum(s)[:-1]])
    theta = (distortion - below) / np.arange(s.size, 0, -1)
    j = int(np.argmax(theta <= s))
    return float(0.5 * np.log2(s[j:] / theta[j]).sum())


def rate_bound(p: ArrayLike, f: ArrayLike, distortion: float) -> float:
    """min{H(p), reverse water-filling of Cov f at D}, bits a vector, of p (v,) and f (v, ...)."""
    law, atoms = (array.astype(np.float64) for array in _mixture(p, f))
    # the covariance's nonzero eigenvalues are those of the Gram matrix of sqrt(p_v) R(v): at most |V| - 1 of them
    rows = np.sqrt(law)[:, None] * (atoms - law @ atoms)
    gram = rows @ rows.T if len(atoms) < atoms.shape[1] else rows.T @ rows
    return min(token_entropy(law), gaussian_rate(np.maximum(np.linalg.eigvalsh(gram), 0.0), distortion))


class RatePoint(NamedTuple):
    """A test channel: rate I in bits a vector, distortion E||f - y||^2; R(distortion) <= rate."""

    rate: float
    distortion: float


def rate_distortion(
    p: ArrayLike, f: ArrayLike, slope: float, iterations: int = 500, reproductions: ArrayLike | None = None
) -> RatePoint:
    """A point on or above R(D), where the tangent's slope is -slope bits per unit of distortion: Blahut-Arimoto with MOVING reproductions.

        Q(j|v) ~ q_j 2^(-slope ||f(v) - y_j||^2),   q_j = sum_v p_v Q(j|v),   y_j = sum_v p_v Q(j|v) f(v) / q_j

    Each step lowers I + slope D. Reproductions that stay at the atoms give more than R(D), at coarse distortion more than the Gaussian bound:
    no refutation. p (v,), f (v, ...); reproductions (j, ...): where they start, default the atoms, halfway to the mean, and the mean.
    """
    law, atoms = (array.astype(np.float64) for array in _mixture(p, f))
    checks.positive("slope", slope)
    if iterations < 1:
        raise ValueError(f"iterations: expected at least 1, got {iterations}")
    mean = law @ atoms
    y = (
        np.concatenate([atoms, 0.5 * (atoms + mean), mean[None]])
        if reproductions is None
        else np.asarray(reproductions, np.float64).reshape(-1, atoms.shape[1])
    )
    q = np.full(len(y), 1.0 / len(y))
    for _ in range(iterations):
        squares = ((atoms[:, None] - y[None]) ** 2).sum(axis=2)
        channel = _channel(q, squares, slope)
        q = law @ channel
        used = q > 1e-300
        y, q, channel = y[used], q[used], channel[:, used]
        y = (channel * law[:, None]).T @ atoms / q[:, None]
    # the channel that was found, measured: I and D belong to each other, whatever the iteration did
    squares = ((atoms[:, None] - y[None]) ** 2).sum(axis=2)
    joint = law[:, None] * channel
    positive = joint > 0
    rate = float((joint[positive] * np.log2((channel / q)[positive])).sum())
    return RatePoint(max(rate, 0.0), float((joint * squares).sum()))


def _channel(q: NDArray[np.float64], squares: NDArray[np.float64], slope: float) -> NDArray[np.float64]:
    log2 = np.log2(q) - slope * squares
    channel = np.exp2(log2 - log2.max(axis=1, keepdims=True))
    normed: NDArray[np.float64] = channel / channel.sum(axis=1, keepdims=True)
    return normed
