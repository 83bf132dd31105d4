"""Laws and distortions of the TurboQuant family (arXiv 2504.19874).

A unit vector x in R^d, rotated by a Haar-random rotation, is uniform on the sphere whatever x was; one of its coordinates has
the density f of `SphereCoordinate`. TurboQuant_mse codes every coordinate with the Lloyd-Max quantiser of f, so that

    D_mse = E ||x - x_hat||^2 = d * min_q int (t - q(t))^2 f(t) dt                        (`mse_distortion`)

and TurboQuant_prod spends one of the b bits per coordinate on the signs of a Gaussian sketch of the residual.
Bits are per coordinate. Theory in float64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from kvtheory import rate
from kvtheory.checks import finite, positive
from kvtheory.rate.density import NODES, WEIGHTS, Array, Density

# Theorem 1, second item: "For small bit-widths, specifically b = 1, 2, 3, 4 the MSE exhibits finer-grained distortion values:
# D_mse ≈ 0.36, 0.117, 0.03, 0.009".
PRINTED_MSE: Mapping[int, float] = MappingProxyType({1: 0.36, 2: 0.117, 3: 0.03, 4: 0.009})
# Theorem 2, third item: "D_prod ≈ 1.57/d, 0.56/d, 0.18/d, 0.047/d"; here without the 1/d.
PRINTED_PROD: Mapping[int, float] = MappingProxyType({1: 1.57, 2: 0.56, 3: 0.18, 4: 0.047})
# Our tables, upper bounds for every dimension: the Gaussian limits .363380, .117482, .034548, .009501 and pi/2 times the same one
# bit lower, rounded up in the last digit shown.
ROUNDED_UP_MSE: Mapping[int, float] = MappingProxyType({1: 0.3634, 2: 0.1175, 3: 0.0346, 4: 0.0096})
ROUNDED_UP_PROD: Mapping[int, float] = MappingProxyType({1: 1.5708, 2: 0.5708, 3: 0.1846, 4: 0.0543})


@dataclass(frozen=True)
class Gaussian(Density):
    """Normal law with the given mean and standard deviation sigma > 0."""

    mean: float = 0.0
    sigma: float = 1.0
    log_concave = True
    support = (-np.inf, np.inf)

    def __post_init__(self) -> None:
        positive("sigma", self.sigma)
        # Beyond 38 sigma the density underflows; one panel per sigma.
        object.__setattr__(self, "panels", np.arange(-38.0, 39.0))
        object.__setattr__(self, "centre", float(self.mean))

    def __call__(self, x: ArrayLike) -> Array:
        z = (np.asarray(x, dtype=np.float64) - self.mean) / self.sigma
        return np.exp(-0.5 * z * z) / (self.sigma * np.sqrt(2 * np.pi))

    def chart(self, u: Array) -> tuple[Array, Array, Array]:
        return self.mean + self.sigma * u, np.full(u.shape, self.sigma), np.exp(-0.5 * u * u) / np.sqrt(2 * np.pi)

    def to_chart(self, x: Array) -> Array:
        return np.clip((x - self.mean) / self.sigma, -38.0, 38.0)


@dataclass(frozen=True)
class Laplace(Density):
    """Double exponential law exp(-|x - mean| / scale) / (2 scale), scale > 0; its variance is 2 scale^2."""

    mean: float = 0.0
    scale: float = 1.0
    log_concave = True
    support = (-np.inf, np.inf)

    def __post_init__(self) -> None:
        positive("scale", self.scale)
        # Panels of two scales to exp(-200), with an edge at the kink.
        object.__setattr__(self, "panels", np.arange(-200.0, 201.0, 2.0))
        object.__setattr__(self, "centre", float(self.mean))

    def __call__(self, x: ArrayLike) -> Array:
        return np.exp(-np.abs(np.asarray(x, dtype=np.float64) - self.mean) / self.scale) / (2 * self.scale)

    def chart(self, u: Array) -> tuple[Array, Array, Array]:
        return self.mean + self.scale * u, np.full(u.shape, self.scale), 0.5 * np.exp(-np.abs(u))

    def to_chart(self, x: Array) -> Array:
        return np.clip((x - self.mean) / self.scale, -200.0, 200.0)


@dataclass(frozen=True)
class SphereCoordinate(Density):
    """One coordinate of a uniform unit vector in R^dim (paper, Lemma 1): mean 0, variance 1/dim.

        f(x) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) (1 - x^2)^{(d-3)/2},   |x| < 1

    Charted by the angle: x = sin u, f dx = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) cos^{d-2} u du, smooth to the poles.
    dim = 1: no density but two atoms, -1 and 1, of mass 1/2 (`atoms`); dim = 2: the arcsine law, not log-concave; dim = 3:
    uniform, where the optimal quantiser is the uniform one.
    """

    dim: int
    support = (-1.0, 1.0)
    centre = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, (int, np.integer)):
            raise TypeError(f"dim: expected an int, got {type(self.dim).__name__}")
        if self.dim < 1:
            raise ValueError(f"dim: expected at least 1, got {self.dim}")
        # One panel per standard deviation, at least 8.
        panels = np.linspace(-np.pi / 2, np.pi / 2, 2 * max(4, int(np.ceil(np.pi / 2 * np.sqrt(self.dim)))) + 1)
        object.__setattr__(self, "panels", panels)
        object.__setattr__(self, "log_concave", self.dim >= 3)

    @property
    def atoms(self) -> tuple[Array, Array] | None:
        """(values, probabilities) in one dimension, None in more."""
        return (np.array([-1.0, 1.0]), np.array([0.5, 0.5])) if self.dim == 1 else None

    @property
    def _constant(self) -> float:
        return float(np.exp(special.gammaln(self.dim / 2) - special.gammaln((self.dim - 1) / 2)) / np.sqrt(np.pi))

    def _no_atoms(self) -> None:
        if self.dim == 1:
            raise ValueError("dim: one coordinate of a unit vector in R^1 has two atoms and no density")

    def __call__(self, x: ArrayLike) -> Array:
        self._no_atoms()
        points = np.asarray(x, dtype=np.float64)
        inside = np.abs(points) < 1
        room = np.where(inside, (1 - points) * (1 + points), 1.0)
        return np.where(inside, self._constant * room ** ((self.dim - 3) / 2), 0.0)

    def chart(self, u: Array) -> tuple[Array, Array, Array]:
        self._no_atoms()
        cosine = np.cos(u)
        return np.sin(u), cosine, self._constant * cosine ** (self.dim - 2)

    def to_chart(self, x: Array) -> Array:
        return np.arcsin(np.clip(x, -1.0, 1.0))

    def optimal_points(self, size: int) -> Array | None:
        # dim 3, Archimedes: the coordinate is uniform on [-1, 1], and the optimal cells are equal.
        return (2 * np.arange(size) + 1 - size) / size if self.dim == 3 else None


@dataclass(frozen=True)
class PolarAngle(Density):
    """An angle of the recursive polar transformation of a Gaussian vector, or of any vector after a random rotation (PolarQuant, Lemma 2).

    Level 1, psi = atan2(x_2, x_1) of two coordinates: uniform on [0, 2 pi). Level l >= 2, psi = atan(r_b / r_a) of the norms of two
    neighbouring blocks of n = 2^{l-1} coordinates each:

        f(psi) = 2^{2-n} Gamma(n) / Gamma(n/2)^2 sin^{n-1}(2 psi),   0 <= psi <= pi/2

    log-concave and symmetric about pi/4. The angles are independent of each other and of the norm. Radians; levels 1 to 16.
    Source: arXiv 2502.02617.
    """

    level: int
    log_concave = True

    def __post_init__(self) -> None:
        if isinstance(self.level, bool) or not isinstance(self.level, (int, np.integer)):
            raise TypeError(f"level: expected an int, got {type(self.level).__name__}")
        if not 1 <= self.level <= 16:
            raise ValueError(f"level: expected 1 to 16, got {self.level}")
        end = 2 * np.pi if self.level == 1 else np.pi / 2
        object.__setattr__(self, "support", (0.0, end))
        object.__setattr__(self, "centre", end / 2)
        # The standard deviation is about 1 / (2 sqrt(n)); 12 of them either side, a panel each, hold all but 1e-30.
        width = min(end / 2, 6 / np.sqrt(2.0 ** (self.level - 1)))
        object.__setattr__(self, "panels", np.linspace(end / 2 - width, end / 2 + width, 25))

    def __call__(self, x: ArrayLike) -> Array:
        psi = np.asarray(x, dtype=np.float64)
        low, high = self.support
        inside = (psi >= low) & (psi <= high)
        if self.level == 1:
            return np.where(inside, 1 / (2 * np.pi), 0.0)
        n = 2.0 ** (self.level - 1)
        log_c = (2 - n) * np.log(2) + special.gammaln(n) - 2 * special.gammaln(n / 2)
        sine = np.sin(2 * np.where(inside, psi, np.pi / 4))
        return np.where(inside & (sine > 0), np.exp(log_c + (n - 1) * np.log(np.where(sine > 0, sine, 1.0))), 0.0)

    def chart(self, u: Array) -> tuple[Array, Array, Array]:
        return u, np.ones_like(u), self(u)

    def to_chart(self, x: Array) -> Array:
        return np.clip(x, self.panels[0], self.panels[-1])

    def optimal_points(self, size: int) -> Array | None:
        return (np.arange(size, dtype=np.float64) + 0.5) * (2 * np.pi / size) if self.level == 1 else None


def mse_distortion(dim: int, bits: int) -> float:
    """D_mse of TurboQuant_mse for any unit vector in R^dim, exact: dim times the least distortion of a 2^bits-point quantiser.

        D_mse = d * min_q int (t - q(t))^2 f(t) dt                  (paper, proof of Theorem 1: D_mse = d C(f_X, b))

    dim >= 1, bits >= 0 ints; 0 bits give 1. The expectation is over the rotation. Raises ValueError, TypeError.
    """
    law = SphereCoordinate(dim)
    return dim * rate.lloyd_max(law, 2 ** _bits(bits)).distortion(law)


def gaussian_distortion(bits: int) -> float:
    """Least distortion of a 2^bits-point scalar quantiser for a standard normal: the limit of `mse_distortion` as dim grows."""
    law = Gaussian()
    return rate.lloyd_max(law, 2 ** _bits(bits)).distortion(law)


def mse_bound(bits: ArrayLike) -> Array:
    """(sqrt(3) pi / 2) 4^{-bits}: the paper's upper bound on D_mse (Theorem 1). bits real >= 0, any shape; float64.

    The constant 2.7207 is Panter and Dite's for the normal law, (1/12) (int f^{1/3})^3; some copies misprint sqrt(3 pi)/2.
    Raises ValueError for negative bits, NaN or inf.
    """
    return np.sqrt(3.0) * np.pi / 2 * 4.0 ** -_real_bits(bits)


def mse_lower_bound(bits: ArrayLike) -> Array:
    """4^{-bits}: the paper's lower bound on the D_mse of any quantiser with `bits` per coordinate (Theorem 3). Any shape.

    It is the Gaussian distortion-rate function, and false as a lower bound on the sphere: see `sphere_code_bound`.
    """
    return 4.0 ** -_real_bits(bits)


def printed_mse(bits: int) -> float:
    """D_mse as the paper prints it for 1, 2, 3 and 4 bits (Theorem 1); KeyError for other bits."""
    return PRINTED_MSE[bits]


def printed_prod(bits: int) -> float:
    """d * D_prod as the paper prints it for 1, 2, 3 and 4 bits and unit y (Theorem 2); KeyError for other bits."""
    return PRINTED_PROD[bits]


def rounded_up_mse(bits: int) -> float:
    """What the paper's table would be as an upper bound on D_mse for every dimension; 1 to 4 bits, KeyError for others."""
    return ROUNDED_UP_MSE[bits]


def prod_distortion(dim: int, bits: int) -> float:
    """d * D_prod of TurboQuant_prod, averaged over a uniform direction y of unit length: E <y, x - x_hat>^2 times dim. Exact.

    With r the residual after bits-1 bits and S in R^{d x d} Gaussian, given r the estimate has variance
    ((pi/2) ||r||^2 ||y||^2 - <y, r>^2) / d, and E_y <y, r>^2 = ||r||^2 / d:

        d D_prod = (pi/2 - 1/d) D_mse(b - 1)                     (derived here; the paper bounds it by (pi/2) D_mse(b-1))

    dim >= 1, bits >= 1 ints.
    """
    if _bits(bits) < 1:
        raise ValueError(f"bits: expected at least 1, got {bits}")
    return (np.pi / 2 - 1 / dim) * mse_distortion(dim, bits - 1)


def prod_worst(dim: int, bits: int) -> float:
    """(pi/2) D_mse(b-1): d * D_prod of TurboQuant_prod is at most this for all unit vectors x and y, the worst ones included.

    E <y, r>^2 >= 0 in `prod_distortion`, and its mean over y is D_mse/d: sup_y d D_prod lies in [(pi/2 - 1/d) D_mse, (pi/2) D_mse].
    For a y of another length times ||y||^2, as Theorem 2 has it. dim >= 1, bits >= 1 ints.
    """
    if _bits(bits) < 1:
        raise ValueError(f"bits: expected at least 1, got {bits}")
    return np.pi / 2 * mse_distortion(dim, bits - 1)


def prod_bound(bits: ArrayLike) -> Array:
    """sqrt(3) pi^2 4^{-bits}: the paper's upper bound on d * D_prod for unit y (Theorem 2). Any shape."""
    return np.sqrt(3.0) * np.pi**2 * 4.0 ** -_real_bits(bits)


def panter_dite(density: Density) -> float:
    """(1/12) (int f^{1/3})^3: the limit of n^2 D_n over the optimal n-point quantisers (Panter and Dite 1951), by quadrature.

    In the units of x^2. For a density with endpoint singularities (SphereCoordinate(2)) only to about 1e-4; see
    `sphere_panter_dite` for its closed form.
    """
    half = 0.5 * np.diff(density.panels)[:, None]
    u = 0.5 * (density.panels[:-1] + density.panels[1:])[:, None] + half * NODES
    _, dx, weight = density.chart(u)
    return float((np.cbrt(weight) * np.cbrt(dx) ** 2 * half * WEIGHTS).sum() ** 3 / 12)


def sphere_panter_dite(dim: int) -> float:
    """lim_b 4^b D_mse(dim, b) = dim (1/12) (int f^{1/3})^3 in closed form, dim >= 2; it rises to sqrt(3) pi / 2 as dim grows.

        int f^{1/3} = C^{1/3} B(1/2, (d+3)/6),   C = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2))

    Raises ValueError for dim < 2.
    """
    if dim < 2:
        raise ValueError(f"dim: expected at least 2, where the coordinate has a density, got {dim}")
    log_c = special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2) - 0.5 * np.log(np.pi)
    return float(dim / 12 * np.exp(log_c + 3 * special.betaln(0.5, (dim + 3) / 6)))


def sphere_code_bound(dim: int, bits: float) -> float:
    """No code of N = 2^{dim bits} codewords, random or not, has a worst-case D_mse on the unit sphere of R^dim below this.

    With m(p) the mean cosine over the cap of probability p, that is the length of its centroid,

        D >= 1 - m(1/N)^2,   p = I_x(a, a),   m = 1 / 2F1(1, 2a; a+1; x),   a = (d-1)/2,   x = (1 - cos v)/2, v the cap's angle

    Attained for dim <= 2 (N equal arcs); for dim 3 it is 2/N - 1/N^2. The corrected form of the paper's Theorem 3, and
    stronger than `sphere_distortion_rate`, which lets codes work on many vectors at once. bits real, dim * bits >= 1.

    Proof, for every d >= 2 and real N >= 2. Write n = d-1, s = sin v, t = cos v, C the constant of the density C sin^{n-1} v of
    the angle, so that p = C int_0^v sin^{n-1} and p m = C s^n / n; G(p) = p m^2.

    1. The worst vector does no better than a uniform one. Of all sets of probability p the cap has the longest centroid
       (bathtub), so cells p_1..p_k, k <= N, have D >= 1 - sum G(p_i). It remains to show that G lies below its tangent at
       p0 = 1/N <= 1/2: then sum G(p_i) <= k (G - p0 G')(p0) + G'(p0), which rises with k, as G - p0 G' = 2 p0 m (m - t) >= 0,
       and is m(1/N)^2 at k = N.
    2. G is concave on [0, 1/2]. dt/dp = -s^{2-n}/C gives G' = m (2t - m), G'' = (2/p) ((m - t)^2 - s^2/n): to show is
       m <= t + s/sqrt(n), that is s^n / E <= int_0^v sin^{n-1} with E = n t + sqrt(n) s. Both are 0 at v = 0, and the
       derivative of the left is s^{n-1} (n t E - s E')/E^2 <= s^{n-1}, as E^2 - n t E + s E' = sqrt(n) (n+1) s t >= 0.
    3. On [1/2, 1] the tangent at p0 is, by 2, above that at 1/2, which is m(1/2)^2 (1 - p) with m(1/2) = 2C/n. G is below this
       one if and only if s^{2n} <= 4 p (1-p). With v = pi/2 + u, W(u) = cos^{2n} u + (2p - 1)^2 is 1 at u = 0 and u = pi/2, and
       W' = 2 cos^{n-1} u K, K(0) = 0, K' = cos^{n-1} u (4 C^2 - n + n (n+1) sin^2 u). The bracket rises, so K changes
       its sign at most once, from - to +, and W falls, then rises: W <= 1.

    Also checked in numbers, on a grid: d = 2..256, b = 1..8 (claim quantizers/sphere-lower-bound).
    """
    from scipy.optimize import brentq

    SphereCoordinate(dim)  # refuses what is no dimension
    log_n = dim * positive("bits", bits) * np.log(2)
    if log_n < np.log(2) * (1 - 1e-12):
        raise ValueError(f"bits: expected dim * bits >= 1, two codewords at least, got dim {dim} and {bits} bits")
    if dim == 1:
        return 0.0
    a = (dim - 1) / 2
    log_a_beta = np.log(a) + special.betaln(a, a)

    def log_probability(log_x: float) -> float:
        x = np.exp(log_x)
        return float(a * (log_x + np.log1p(-x)) - log_a_beta + np.log1p(_excess(a, x)))

    # p <= 1/2 is x <= 1/2, and there p = int_0^x (t (1-t))^{a-1} dt / B <= sqrt(2) x^a / (a B), worst for a = 1/2.
    low = (log_a_beta - log_n - 0.5 * np.log(2)) / a
    log_x = brentq(lambda t: log_probability(t) + log_n, low, np.log(0.5) + 1e-12, xtol=1e-15, rtol=1e-15)
    excess = _excess(a, float(np.exp(log_x)))
    return float(excess * (2 + excess) / (1 + excess) ** 2)


def _excess(a: float, x: float) -> float:
    """2F1(1, 2a; a+1; x) - 1 = sum_{n>=1} x^n (2a)_n / (a+1)_n for 0 < x <= 1/2: all terms positive, no cancellation."""
    total, term, n = 0.0, 1.0, 0
    while term > 1e-17 * (1 + total) or total == 0.0:
        term *= x * (2 * a + n) / (a + 1 + n)
        total += term
        n += 1
    return total


def sphere_distortion_rate(dim: int, bits: float) -> float:
    """D(R) of a uniform unit vector in R^dim: no code with `bits` > 0 per coordinate, random or not, has a smaller worst D_mse.

    The optimal backward channel is von Mises-Fisher with some concentration k: given the code, x has a mean of length A(k), so

        D = 1 - A^2,   dim R ln 2 = k A - ln Phi(k),   Phi(k) = E exp(k <e, x>) = 0F1(; d/2; k^2/4),   A = (ln Phi)'

    Between 4^{-bits d/(d-1)} and 4^{-bits} (`mse_lower_bound`), strictly below the latter. In one dimension 0 from 1 bit on.
    Source: Dytso and Cardone, arXiv 2401.04248. Raises TypeError or ValueError for dim < 1 or bits <= 0.
    """
    from scipy.optimize import brentq

    SphereCoordinate(dim)  # refuses what is no dimension
    target = positive("bits", bits)
    if dim == 1 and target >= 1:
        return 0.0
    # R rises with k, from k^2/(2d) nats at 0; at the upper end D, nearly (d-1)/k, is below 4^{-bits d/(d-1)} already.
    low = np.log(dim) - 15.0
    high = np.log(40.0) if dim == 1 else np.log(8.0 * dim) + np.log(4.0) * target * dim / (dim - 1)
    log_k = brentq(lambda t: von_mises_fisher(dim, float(np.exp(t)))[0] - target, low, high, xtol=1e-15, rtol=1e-15)
    return von_mises_fisher(dim, float(np.exp(log_k)))[1]


def von_mises_fisher(dim: int, concentration: float) -> tuple[float, float]:
    """(R in bits per coordinate, D) of the channel above at concentration k > 0, by quadrature over the angle v from the mean.

        Phi = C int_0^pi sin^{d-2} v exp(k cos v) dv,   1 - A = E[1 - cos v],   D = (1 - A)(1 + A),   dim R ln 2 = k A - ln Phi

    Raises ValueError unless k is finite and above 0.
    """
    k = positive("concentration", concentration)
    if dim == 1:
        a = np.tanh(k)
        return float((k * a - np.logaddexp(k, -k) + np.log(2)) / np.log(2)), float((1 - a) * (1 + a))
    # The integrand peaks at the angle with cosine c, with curvature (d-2)/sin^2 v + k cos v; 14 widths either way hold it all.
    c = 2 * k / (dim - 2 + np.hypot(dim - 2, 2 * k))
    sine = np.sqrt((dim - 2) * c / k)
    peak = float(np.arctan2(sine, c))
    width = 1 / np.sqrt(((dim - 2) / sine**2 if dim > 2 else 0.0) + k * c)
    start, end = max(0.0, peak - 14 * width), min(np.pi, peak + 14 * width)
    edges = np.linspace(start, end, 1 + int(np.ceil((end - start) / min(width, 0.25))))
    half = 0.5 * np.diff(edges)[:, None]
    v = 0.5 * (edges[:-1] + edges[1:])[:, None] + half * NODES
    short = 2 * np.sin(v / 2) ** 2  # 1 - cos v
    log_weight = (dim - 2) * np.log(np.sin(v)) - k * short
    top = log_weight.max()
    weight = np.exp(log_weight - top) * half * WEIGHTS
    total = weight.sum()
    loss = float((weight * short).sum() / total)  # 1 - A
    log_c = special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2) - 0.5 * np.log(np.pi)
    nats = -k * loss - (log_c + top + np.log(total))  # k A - ln Phi, with k taken out of both
    return float(nats / (dim * np.log(2))), loss * (2 - loss)


def polar_cosine(level: int, bits: int) -> float:
    """E cos(psi - psi_hat) of a `PolarAngle` of that level and its Lloyd-Max quantiser of 2^bits points, by quadrature. bits >= 0 int."""
    law = PolarAngle(level)
    code = rate.lloyd_max(law, 2 ** _bits(bits))
    edges = np.unique(np.concatenate([law.panels, np.clip(code.thresholds, law.panels[0], law.panels[-1])]))
    half = 0.5 * np.diff(edges)[:, None]
    psi = 0.5 * (edges[:-1] + edges[1:])[:, None] + half * NODES
    # 1 - cos = 2 sin^2(./2): no difference of nearly equal numbers
    return 1 - float((2 * np.sin(0.5 * (psi - code.decode(code.encode(psi)))) ** 2 * law(psi) * half * WEIGHTS).sum())


def polar_distortion(level_bits: Sequence[int]) -> float:
    """E ||x - x_hat||^2 / ||x||^2 of PolarQuant with these bits for the angles of levels 1, 2, ... and exact norms.

    With u, u_hat the directions of a block of 2^L coordinates, <u, u_hat> = cos psi cos psi_hat A + sin psi sin psi_hat B at the top,
    A and B alike for its halves, independent of psi and equal in the mean, so that

        E <u, u_hat> = prod_l E cos(psi_l - psi_hat_l),   D = 2 - 2 prod_l E cos(psi_l - psi_hat_l)           (derived here)

    The expectation is over the rotation; dimensions that 2^L divides. level_bits: ints >= 0.
    """
    return 2 - 2 * float(np.prod([polar_cosine(level, bits) for level, bits in enumerate(level_bits, 1)]))


def qjl_variance(query: ArrayLike, key: ArrayLike, signs: int) -> Array:
    """Variance of QJL's estimate of <q, k> from `signs` = m signs (arXiv 2406.03482, Definition 3.1), exact; the estimate is unbiased.

        est = sqrt(pi/2)/m ||k|| sum_j <S_j, q> sign <S_j, k>,      Var = ((pi/2) ||q||^2 ||k||^2 - <q, k>^2) / m

    the rows S_j independent standard normal (derived here: one term's square has mean (pi/2) ||q||^2 ||k||^2, its mean is <q, k>). So the
    noise is least for a query along the key, and largest across it. query, key (..., d), which broadcast; signs >= 1 int.
    """
    q, k = (finite(name, np.asarray(x, dtype=np.float64)) for name, x in (("query", query), ("key", key)))
    m = _signs(signs)
    product = (q * k).sum(axis=-1)
    return np.asarray((np.pi / 2 * (q * q).sum(axis=-1) * (k * k).sum(axis=-1) - product**2) / m)


def qjl_distortion(dim: int, signs: int) -> float:
    """E ||k - k_hat||^2 / ||k||^2 of QJL's k_hat = sqrt(pi/2)/m ||k|| S^T sign(S k): `qjl_variance` summed over the axes as queries.

    ((pi/2) d - 1)/m: 1 is passed only from m = 1.57 d signs on. dim, signs ints >= 1.
    """
    SphereCoordinate(dim)  # refuses what is no dimension
    return float((np.pi / 2 * dim - 1) / _signs(signs))


def q_norm_distortion(distortion: float) -> float:
    """Mean squared error of a quantiser with centroids and this distortion D, per unit variance, after its points are given variance 1.

        E (x - q)^2 = D and E[x | q] = q give Var q = 1 - D, E x q = 1 - D;  with points q / sqrt(1 - D):   2 - 2 sqrt(1 - D) = D + D^2/4 + ...

    What KVQuant's Q-Norm (arXiv 2401.18079, section 3) costs in mean squared error (derived here). 0 <= D < 1, ValueError otherwise.
    """
    if not 0 <= distortion < 1:
        raise ValueError(f"distortion: expected 0 <= D < 1, got {distortion}")
    return float(2 * distortion / (1 + np.sqrt(1 - distortion)))


def _signs(signs: int) -> int:
    if isinstance(signs, bool) or not isinstance(signs, (int, np.integer)):
        raise TypeError(f"signs: expected an int, got {type(signs).__name__}")
    if signs < 1:
        raise ValueError(f"signs: expected at least 1, got {signs}")
    return int(signs)


def _real_bits(bits: ArrayLike) -> Array:
    values = finite("bits", np.asarray(bits, dtype=np.float64))
    if (values < 0).any():
        raise ValueError(f"bits: expected numbers >= 0, got {values.min()}")
    return values


def _bits(bits: int) -> int:
    if isinstance(bits, bool) or not isinstance(bits, (int, np.integer)):
        raise TypeError(f"bits: expected an int, got {type(bits).__name__}")
    if bits < 0:
        raise ValueError(f"bits: expected at least 0, got {bits}")
    return int(bits)
