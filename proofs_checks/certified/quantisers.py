"""TurboQuant's distortion to all digits asked for, its two bounds, the tables; QJL's variance.

The optimal quantiser of a coordinate is a stationary point c = G(c) of Lloyd's map. Newton's method finds it in balls, and Krawczyk's test
proves that a box around it holds exactly one: K(X) inside X. The coordinate's law is log-concave for d >= 3, as is the normal law, so a
stationary point is the optimum (Fleischer 1964; Kieffer 1983), and the distortion evaluated on the box encloses the least one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from flint import acb, arb, arb_mat, fmpq

from kvtheory import quantization, rate
from proofs_checks.certified.balls import Certificate, ball, log2

#: relative: what `kvtheory.quantization` promises of its float64 values, and the issue asks to be certified
DIGITS = arb(10) ** -12


@dataclass(frozen=True)
class Law:
    """One coordinate of a unit vector in R^dim times sqrt(dim) squared out: distortion is dim times that of the coordinate; dim 0: the standard normal law."""

    dim: int

    def density(self, t: arb) -> arb:
        if self.dim == 0:
            return (-t * t / 2).exp() / (2 * arb.pi()).sqrt()
        return self._constant() * self._power(t, arb(fmpq(self.dim - 3, 2)))

    def _constant(self) -> arb:
        d = self.dim
        return arb(fmpq(d, 2)).gamma() / (arb.pi().sqrt() * arb(fmpq(d - 1, 2)).gamma())

    @staticmethod
    def _power(t: arb, exponent: arb) -> arb:
        return arb(1) if exponent == 0 else (1 - t * t) ** exponent

    def mass(self, t: arb | None) -> arb:
        """P(0 < T < t); None: the end of the support."""
        if t is None:
            return arb(fmpq(1, 2))
        if self.dim == 0:
            return (t / arb(2).sqrt()).erf() / 2
        return (t * t).beta_lower(arb(fmpq(1, 2)), arb(fmpq(self.dim - 1, 2)), regularized=True) / 2

    def moment(self, t: arb | None) -> arb:
        """-int of t f up to t: int_a^b t f = moment(a) - moment(b)."""
        if t is None:
            return arb(0)
        if self.dim == 0:
            return self.density(t)
        return self._constant() * self._power(t, arb(fmpq(self.dim - 1, 2))) / (self.dim - 1)

    @property
    def scale(self) -> int:
        return self.dim or 1


def _cells(law: Law, c: list[arb]) -> tuple[list[arb | None], list[arb], list[arb]]:
    """(thresholds, masses, first moments) of the cells at positive points c."""
    t: list[arb | None] = [arb(0), *((a + b) / 2 for a, b in itertools.pairwise(c)), None]
    f, m = [law.mass(x) for x in t], [law.moment(x) for x in t]
    return t, [b - a for a, b in itertools.pairwise(f)], [a - b for a, b in itertools.pairwise(m)]


def _residual(law: Law, c: list[arb]) -> list[arb]:
    _, p, n = _cells(law, c)
    return [x - b / a for x, a, b in zip(c, p, n)]


def _jacobian(law: Law, c: list[arb]) -> arb_mat:
    """dF/dc of F = c - G(c); a threshold moves by half of each neighbour."""
    t, p, n = _cells(law, c)
    k = len(c)
    rows = [[arb(int(i == j)) for j in range(k)] for i in range(k)]
    for i in range(k):
        g = n[i] / p[i]
        if i > 0:
            left = law.density(t[i]) * (g - t[i]) / p[i] / 2  # type: ignore[operator]
            rows[i][i - 1] -= left
            rows[i][i] -= left
        if i < k - 1:
            right = law.density(t[i + 1]) * (t[i + 1] - g) / p[i] / 2  # type: ignore[operator]
            rows[i][i] -= right
            rows[i][i + 1] -= right
    return arb_mat(rows)


def _column(values: list[arb]) -> arb_mat:
    return arb_mat([[x] for x in values])


@lru_cache(maxsize=64)
def distortion(dim: int, bits: int) -> arb:
    """A ball around the least distortion of 2^bits points, times dim; ArithmeticError where Krawczyk's test proves nothing."""
    law = Law(dim)
    if bits == 0:
        return arb(1)
    source = quantization.Gaussian() if dim == 0 else quantization.SphereCoordinate(dim)
    c = [arb(float(x)) for x in rate.lloyd_max(source, 2**bits).points if x > 0]
    for _ in range(4):  # from 15 digits to all of them
        step = _jacobian(law, c).solve(_column(_residual(law, c)))
        c = [(x - step[i, 0]).mid() for i, x in enumerate(c)]
    radius = arb(2) ** -140
    box = [x + arb(0, radius) for x in c]
    inverse = _jacobian(law, c).inv().mid()
    k = len(c)
    eye = arb_mat([[int(i == j) for j in range(k)] for i in range(k)])
    image = (
        _column(c)
        - inverse * _column(_residual(law, c))
        + (eye - inverse * _jacobian(law, box)) * _column([x - m for x, m in zip(box, c)])
    )
    if not all(box[i].contains_interior(image[i, 0]) for i in range(k)):
        raise ArithmeticError(f"dim {dim}, {bits} bits: the box around the stationary point could not be verified")
    _, p, n = _cells(law, box)
    variance = arb(1) / law.scale
    cost = sum((x * x * a - 2 * x * b for x, a, b in zip(box, p, n)), arb(0))
    return law.scale * (variance + 2 * cost)


def _four(bits: int) -> arb:
    return arb(4) ** -bits


def certificates() -> Iterator[Certificate]:
    root = arb(3).sqrt()
    for dim in (3, 8, 64, 128, 0):
        for bits in (1, 2, 3, 4):
            d = distortion(dim, bits)
            where = f"d = {dim or 'infinity'}, b = {bits}, 2^{bits} points"
            observed = quantization.mse_distortion(dim, bits) if dim else quantization.gaussian_distortion(bits)
            other = quantization.mse_distortion(dim + 1 if dim else 4096, bits)
            yield Certificate(
                "quantizers/turboquant-mse", "|float64 - D_mse| <= 1e-12 D_mse", where, abs(ball(observed) - d), "<=", DIGITS * d,
                {"another dimension": (abs(ball(other) - d), DIGITS * d)},
            )  # fmt: skip
            misprint = (
                {"sqrt(3 pi) for sqrt(3) pi": (d, (3 * arb.pi()).sqrt() / 2 * _four(bits))}
                if bits > 2 and dim != 3
                else {}
            )
            yield Certificate(
                "quantizers/turboquant-mse-bound",
                "D_mse < (sqrt 3 pi / 2) 4^-b",
                where,
                d,
                "<",
                root * arb.pi() / 2 * _four(bits),
                misprint,
            )
            if dim:
                below = (-2 * arb(2).log() * arb(fmpq(bits * dim, dim - 1))).exp()
                yield Certificate(
                    "quantizers/sphere-lower-bound", "4^(-b d/(d-1)) < D_mse", where, below, "<", d,
                    {"2 for 4": ((-arb(2).log() * arb(fmpq(bits * dim, dim - 1))).exp(), d)} if bits > 2 else {},
                )  # fmt: skip
                limit = distortion(0, bits)
                yield Certificate(
                    "quantizers/turboquant-table",
                    "D_mse(d, b) < D_mse(infinity, b)",
                    where,
                    d,
                    "<",
                    limit,
                    {"exchanged": (limit, d)},
                )
            worst = arb.pi() / 2 * distortion(dim, bits - 1)
            yield Certificate(
                "quantizers/prod-distortion", "(pi/2) D_mse(b-1) < sqrt 3 pi^2 4^-b", where, worst, "<", root * arb.pi() ** 2 * _four(bits),
                {"one bit more": (worst, root * arb.pi() ** 2 * _four(bits + 1))},
            )  # fmt: skip
            yield Certificate(
                "quantizers/q-norm-cost",
                "D < 2 - 2 sqrt(1 - D)",
                f"D = D_mse, {where}",
                d,
                "<",
                2 - 2 * (1 - d).sqrt(),
                {"2 - sqrt(1 - D) - 1": (d, 1 - (1 - d).sqrt())},
            )
    yield from _tables()
    yield from _sphere()
    yield from _constants()
    yield from _sketch()


def _tables() -> Iterator[Certificate]:
    for bits, upper in ((1, "0.3634"), (2, "0.1175"), (3, "0.0346"), (4, "0.0096")):
        limit = distortion(0, bits)
        yield Certificate(
            "quantizers/turboquant-table", f"D_mse(infinity, {bits}) < {upper}", "the normal law", limit, "<", arb(upper),
            {"rounded down": (limit, arb(upper) - arb("0.0001"))},
        )  # fmt: skip
    for bits, printed in ((1, "0.36"), (2, "0.117"), (3, "0.03"), (4, "0.009")):
        d = distortion(4096, bits)
        yield Certificate(
            "quantizers/turboquant-printed-table", f"counterexample: {printed} < D_mse(4096, {bits})", "d = 4096", arb(printed), "<", d,
            {"our table, rounded up": (arb({1: "0.3634", 2: "0.1175", 3: "0.0346", 4: "0.0096"}[bits]), d)},
        )  # fmt: skip
    d = (arb.pi() / 2 - arb(fmpq(1, 4096))) * distortion(4096, 1)
    yield Certificate(
        "quantizers/prod-table",
        "counterexample: .56 + .01 < d D_prod at 2 bits",
        "d = 4096",
        arb("0.57"),
        "<",
        d,
        {"1 for pi/2": (arb("0.57"), distortion(4096, 1))},
    )


def _sphere() -> Iterator[Certificate]:
    """Codes on a circle and on S^2, where all is in closed form."""
    circle = 1 - 8 / arb.pi() ** 2
    yield Certificate(
        "quantizers/lower-bound", "counterexample: 1 - (sin(pi/4)/(pi/4))^2 < 4^-1", "d = 2, b = 1: four equal arcs, their centroids", circle, "<", fmpq(1, 4),
        {"points on the circle": (2 - 4 * arb(2).sqrt() / arb.pi(), fmpq(1, 4) / 2)},
    )  # fmt: skip
    for bits in (1, 2):
        size = 2 ** (3 * bits)
        code = fmpq(2, size) - fmpq(1, size * size)
        d = distortion(3, bits)
        yield Certificate(
            "quantizers/sphere-lower-bound",
            "1 - m(1/N)^2 < D_mse",
            f"d = 3, b = {bits}: caps of 1/{size}",
            code,
            "<",
            d,
            {"1 - m": (fmpq(2), d)},
        )
        low, high = fmpq(1, 1000), fmpq(400)
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if _vmf(middle)[0] < bits else (low, middle)
        (below, worse), (above, better) = _vmf(low), _vmf(high)
        if not (below < bits and above > bits):
            raise ArithmeticError(f"the rate {bits} could not be bracketed")
        at = better.union(worse)
        yield Certificate(
            "quantizers/sphere-lower-bound",
            "D_sphere(b) < 1 - m(1/N)^2",
            f"d = 3, b = {bits}",
            at,
            "<",
            code,
            {"exchanged": (code, at)},
        )
        floor = (-2 * arb(2).log() * arb(fmpq(3 * bits, 2))).exp()
        yield Certificate(
            "quantizers/sphere-lower-bound",
            "4^(-b d/(d-1)) < D_sphere(b)",
            f"d = 3, b = {bits}",
            floor,
            "<",
            at,
            {"4^-b": (_four(bits), at)},
        )


def _vmf(concentration: fmpq) -> tuple[arb, arb]:
    """(bits a coordinate, D) of von Mises and Fisher's channel on S^2: A = coth k - 1/k, Phi = sinh k / k."""
    k = ball(concentration)
    a = k.coth() - 1 / k
    return (k * a - (k.sinh() / k).log()) / (3 * arb(2).log()), 1 - a * a


def _constants() -> Iterator[Certificate]:
    third = acb.integral(
        lambda x, _: (-x * x / 6).exp(), acb(-60), acb(60), rel_tol=arb(2) ** -150, abs_tol=arb(2) ** -150
    ).real / (2 * arb.pi()).root(6)
    tail = 2 * (arb(60) / arb(6).sqrt()).erfc() * (6 * arb.pi()).sqrt()
    constant = (third + arb(0).union(tail)) ** 3 / 12
    yield Certificate(
        "quantizers/turboquant-mse-bound", "(1/12) (int phi^(1/3))^3 = sqrt 3 pi / 2", "certified quadrature", constant, "=", arb(3).sqrt() * arb.pi() / 2,
        {"sqrt(3 pi) / 2": (constant, (3 * arb.pi()).sqrt() / 2)},
    )  # fmt: skip
    e = arb(1).exp()
    shaping = log2(arb.pi() * e / 6) / 2
    for what, value, printed in (
        ("1/2 log2(sqrt 3 pi/2) - 1/2 log2(pi e/6)", log2(arb(3).sqrt() * arb.pi() / 2) / 2 - shaping, "0.4674"),
        ("1/2 log2(4.5 * 6 / e^2)", log2(ball(27) / (e * e)) / 2, "0.9347"),
    ):
        yield Certificate(
            "quantizers/entropy-coded-uniform", f"|{what} - {printed}| < .00005", "closed form", abs(value - arb(printed)), "<", arb("0.00005"),
            {"nats": (abs(value * arb(2).log() - arb(printed)), arb("0.00005"))},
        )  # fmt: skip


def _sketch() -> Iterator[Certificate]:
    """One row of QJL in the plane of q and k: g = r (cos, sin), E r = sqrt(pi/2), E r^2 = 2, the angle by certified quadrature."""
    for q, k in (((3, 4), 2), ((1, 0), 1), ((0, 5), 3), ((-2, 1), 1)):
        pi = arb.pi()

        def along(x: acb, q: tuple[int, int] = q) -> acb:
            return q[0] * x.cos() + q[1] * x.sin()

        half = acb(pi / 2)
        tol = {"rel_tol": arb(2) ** -150, "abs_tol": arb(2) ** -150}
        first = (
            acb.integral(lambda x, _: along(x), -half, half, **tol)
            - acb.integral(lambda x, _: along(x), half, 3 * half, **tol)
        ).real / (2 * pi)
        second = acb.integral(lambda x, _: along(x) ** 2, -half, 3 * half, **tol).real / (2 * pi)
        mean = (pi / 2).sqrt() * k * (pi / 2).sqrt() * first
        variance = pi / 2 * k * k * 2 * second - mean * mean  # ** of a ball around 0 is none
        squares, inner = q[0] ** 2 + q[1] ** 2, q[0] * k
        where = f"q = {q}, k = ({k}, 0), one row"
        claim = "quantizers/qjl-variance"
        yield Certificate(
            claim,
            "E est = <q, k>",
            where,
            mean,
            "=",
            fmpq(inner),
            {"sqrt(pi/2) lost": (mean / (pi / 2).sqrt(), fmpq(inner))} if inner else {},
        )
        exact = pi / 2 * squares * k * k - inner**2
        yield Certificate(
            claim,
            "Var est = (pi/2) |q|^2 |k|^2 - <q, k>^2",
            where,
            variance,
            "=",
            exact,
            {"pi/2 lost": (variance, ball(squares * k * k - inner * inner))},
        )
        if inner:
            bound = pi / 2 * squares * k * k
            yield Certificate(
                claim, "Var est < (pi/2) |q|^2 |k|^2", where, variance, "<", bound, {"exchanged": (bound, variance)}
            )
        observed = float(quantization.qjl_variance([float(x) for x in q], [float(k), 0.0], 1))
        yield Certificate(
            claim, "|float64 - Var est| <= 1e-12 Var est", where, abs(ball(observed) - variance), "<=", DIGITS * variance,
            {"two rows": (abs(ball(observed / 2) - variance), DIGITS * variance)},
        )  # fmt: skip
