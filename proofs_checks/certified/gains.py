"""Transform coding: Hadamard's inequality, the arithmetic and the geometric mean, reverse water-filling, the Jensen bias, the next order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

from flint import acb, arb, fmpq, fmpq_mat

from proofs_checks.certified.balls import Certificate, ball, log2, matrix


def _definite(source: random.Random, n: int) -> fmpq_mat:
    """An integer positive definite matrix."""
    a = matrix([[source.randint(-3, 3) for _ in range(n)] for _ in range(n)])
    return a * a.transpose() + matrix([[int(i == j) for j in range(n)] for i in range(n)])


def _diagonal(m: fmpq_mat) -> fmpq:
    out = fmpq(1)
    for i in range(m.nrows()):
        out *= m[i, i]
    return out


def certificates() -> Iterator[Certificate]:
    source = random.Random(12)
    for n in (2, 3, 5, 8):
        sigma, metric = _definite(source, n), _definite(source, n)
        where = f"integer matrices of {n} rows"
        yield Certificate(
            "transform-coding/metric-klt", "Hadamard: det M < prod M_cc", where, metric.det(), "<", _diagonal(metric),
            {"sides exchanged": (_diagonal(metric), metric.det())},
        )  # fmt: skip
        t = matrix([[source.randint(-2, 2) + (3 if i == j else 0) for j in range(n)] for i in range(n)])
        inverse = t.inv()
        coded = _diagonal(t * sigma * t.transpose()) * _diagonal(inverse.transpose() * metric * inverse)
        whole = sigma.det() * metric.det()
        small = fmpq(1, 10)  # T / 10 is as good a transform; T^T M T is no decoder's metric
        slip = (
            _diagonal(t * sigma * t.transpose())
            * small ** (2 * n)
            * _diagonal(t.transpose() * metric * t)
            * small ** (2 * n)
        )
        yield Certificate(
            "transform-coding/metric-klt", "det S det M < prod (TST')_cc (T^-T M T^-1)_cc", where, whole, "<", coded,
            {"T'MT for T^-T M T^-1, T scaled by 1/10": (whole, slip)},
        )  # fmt: skip
    turn = matrix([[fmpq(3, 5), fmpq(-4, 5)], [fmpq(4, 5), fmpq(3, 5)]])
    metric = matrix([[7, 3], [3, 2]])
    rotated = turn.transpose() * metric * turn
    loss = log2(_diagonal(rotated) / metric.det()) / 4
    yield Certificate(
        "transform-coding/pca-weights-loss", "0 < 1/(2d) log2(prod (U'MU)_cc / det M)", "U: 3-4-5 rotation, M = [7 3; 3 2]", arb(0), "<", loss,
        {"det M over the product": (arb(0), -loss)},
    )  # fmt: skip
    w = [fmpq(9), fmpq(4), fmpq(1, 2), fmpq(2)]
    product = w[0] * w[1] * w[2] * w[3]
    mean = sum(w, fmpq(0)) / 4
    gain = ball(mean) / ball(product).root(4)
    yield Certificate(
        "transform-coding/weights-gain",
        "1 < mean w / (prod w)^(1/d)",
        "w = 9, 4, 1/2, 2",
        arb(1),
        "<",
        gain,
        {"upside down": (arb(1), 1 / gain)},
    )
    yield from _filling()
    yield from _rules()
    yield from _jensen()
    yield from _remainder()


def _halves(components: int, total: int) -> Iterator[tuple[int, ...]]:
    """All half-bits >= 0 of a given sum."""
    for head in itertools.product(range(total + 1), repeat=components - 1):
        if sum(head) <= total:
            yield (*head, total - sum(head))


def _filling() -> Iterator[Certificate]:
    """min(s, theta) against every other split of the same bits into halves: variances 4^j have a rational optimum."""
    for s, theta in (([64, 16, 4, 1], 4), ([256, 64, 16, 16], 4), ([1024, 4, 1, 1], 2)):
        best = sum((min(fmpq(x), fmpq(theta)) for x in s), fmpq(0))
        halves = [0 if x <= theta else (x // theta).bit_length() - 1 for x in s]  # 2 b_c = log2(s/theta)
        others = [o for o in _halves(len(s), sum(halves)) if list(o) != halves]
        least = min(sum((fmpq(x) / 2**h for x, h in zip(s, o)), fmpq(0)) for o in others)
        where = f"variances {s}, theta {theta}, against {len(others)} other splits of {sum(halves)} half bits"
        for claim in ("transform-coding/water-filling", "prediction/adaptive-bits-corrected"):
            yield Certificate(
                claim,
                "sum min(s, theta) < sum s 4^-b'",
                where,
                best,
                "<",
                least,
                {"max for min": (sum((max(fmpq(x), fmpq(theta)) for x in s), fmpq(0)), least)},
            )


def _rules() -> Iterator[Certificate]:
    energy, surprisal = [fmpq(16), fmpq(1)], [1, 3]
    rule = [max(1, 4 * h // 4) for h in surprisal]  # b = max(1, floor(b0 h / mean h)), b0 = 2: 1 and 3 bits
    spent = sum((e / 4**b for e, b in zip(energy, rule)), fmpq(0))
    flat = sum((e / fmpq(16) for e in energy), fmpq(0))
    yield Certificate(
        "prediction/adaptive-bits", "counterexample: sum E 4^-mean < sum E 4^-b, b by surprisal", "E = 16, 1; surprisal 1, 3 bits; 2 bits on average",
        flat, "<", spent, {"bits the other way round": (flat, sum((e / 4**b for e, b in zip(energy, reversed(rule))), fmpq(0)))},
    )  # fmt: skip
    tables = [[10, 9, 0], [8, 5, 4]]  # distortion with 0, 1, 2 bits: the first falls late
    greedy = 9 + 5  # two single bits: 3 first, then the better of 1 and 1
    best = min(tables[0][a] + tables[1][2 - a] for a in range(3))
    yield Certificate(
        "transform-coding/greedy-allocation", "counterexample: the least of all splits < bit by bit", "tables 10 9 0 and 8 5 4, two bits", best, "<", greedy,
        {"both the greedy split": (greedy, greedy)},
    )  # fmt: skip
    bits, copies = fmpq(3), fmpq(1024)
    floor = max(fmpq(1), fmpq(0)) * copies
    yield Certificate(
        "sequential/ratio-corrected", "N b0 / sum max(1, .) <= b0", "1024 numbers, b0 = 3, every position at the floor", copies * bits / floor, "<=", bits,
        {"floor of 1/2 a bit": (copies * bits / (floor / 2), bits)},
    )  # fmt: skip


def _gauss(f: Callable[[acb], acb], span: int) -> arb:
    """int f(x) phi(x) dx over [-span, span] by certified quadrature."""
    root = (2 * arb.pi()).sqrt()
    return acb.integral(
        lambda x, _: f(x) * (-x * x / 2).exp() / root,
        acb(-span),
        acb(span),
        rel_tol=arb(2) ** -120,
        abs_tol=arb(2) ** -120,
    ).real


def _noisy(a: arb, b: arb, width: arb) -> Callable[[acb], acb]:
    """m / (m + (1 - m) e^(s x)) for a = m, b = 1 - m."""
    return lambda x: 1 / (acb(a) + acb(b) * (acb(width) * x).exp()) * acb(a)


def _jensen() -> Iterator[Certificate]:
    """One token with a noisy logit: E m/(m + (1 - m) e^eps) is above m/(m + (1 - m) e^(s^2/2))."""
    for m, s in ((fmpq(1, 3), fmpq(1, 2)), (fmpq(9, 10), fmpq(1)), (fmpq(1, 100), fmpq(2))):
        a, b, width = ball(m), ball(1 - m), ball(s)
        inside = _gauss(_noisy(a, b, width), 12)
        tail = (arb(12) / arb(2).sqrt()).erfc()  # the integrand lies in [0, 1]
        noisy = inside + arb(0).union(tail)
        limit = a / (a + b * (width**2 / 2).exp())
        where = f"m = {m}, s = {s}"
        yield Certificate(
            "transform-coding/noisy-mass", "m/(m + (1 - m) e^(s^2/2)) < E m/(m + (1 - m) e^eps)", where, limit, "<", noisy,
            {"the sign of s^2/2": (a / (a + b * (-(width**2) / 2).exp()), noisy)},
        )  # fmt: skip


def _remainder() -> Iterator[Certificate]:
    """c = 1/2 + 3 sum a^2 - 6 Var_a(a u) / sum |a u|^2 stays within -7/4 and 7/2; u = v - o."""
    for seed, n in ((1, 2), (2, 4), (3, 7)):
        source = random.Random(seed)
        weights = [source.randint(1, 12) for _ in range(n)]
        a = [fmpq(w, sum(weights)) for w in weights]
        v = [[fmpq(source.randint(-5, 5)) for _ in range(2)] for _ in range(n)]
        o = [sum((w * x[c] for w, x in zip(a, v)), fmpq(0)) for c in range(2)]
        u = [[w * (x[c] - o[c]) for c in range(2)] for w, x in zip(a, v)]
        centre = [sum((w * x[c] for w, x in zip(a, u)), fmpq(0)) for c in range(2)]
        spread = sum((w * sum(((x[c] - centre[c]) ** 2 for c in range(2)), fmpq(0)) for w, x in zip(a, u)), fmpq(0))
        energy = sum((x[c] ** 2 for x in u for c in range(2)), fmpq(0))
        squares = sum((w * w for w in a), fmpq(0))
        c = fmpq(1, 2) + 3 * squares - 6 * spread / energy
        where = f"{n} tokens, rational weights (seed {seed})"
        yield Certificate(
            "transform-coding/remainder",
            "-7/4 <= c",
            where,
            fmpq(-7, 4),
            "<=",
            c,
            {"60 for 6": (fmpq(-7, 4), fmpq(1, 2) + 3 * squares - 60 * spread / energy)},
        )
        yield Certificate(
            "transform-coding/remainder",
            "c <= 7/2",
            where,
            c,
            "<=",
            fmpq(7, 2),
            {"30 for 3": (fmpq(1, 2) + 30 * squares - 6 * spread / energy, fmpq(7, 2))},
        )
