"""What is left when a position is predicted by its mean over the next token: bounds A8 and A9, on laws and vectors that are rational."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

from flint import arb, fmpq

from proofs_checks.certified.balls import Certificate, ball, entropy, log2, rational

Vectors = list[list[fmpq]]


def _squared(a: Sequence[fmpq], b: Sequence[fmpq]) -> fmpq:
    return sum(((x - y) ** 2 for x, y in zip(a, b)), fmpq(0))


def _mean(p: list[fmpq], f: Vectors) -> list[fmpq]:
    return [sum((w * row[c] for w, row in zip(p, f)), fmpq(0)) for c in range(len(f[0]))]


def _instances() -> Iterator[tuple[str, list[fmpq], Vectors]]:
    for seed, tokens, channels in ((1, 3, 2), (2, 5, 4), (3, 8, 3)):
        source = random.Random(seed)
        weights = [source.randint(1, 30) for _ in range(tokens)]
        f = [[fmpq(source.randint(-9, 9), 4) for _ in range(channels)] for _ in range(tokens)]
        yield f"law {seed}: {tokens} tokens, {channels} channels", [fmpq(w, sum(weights)) for w in weights], f
    yield (
        "simplex of 4, uniform (attained)",
        [fmpq(1, 4)] * 4,
        [[fmpq(int(i == j)) for j in range(4)] for i in range(4)],
    )
    yield "two atoms, 1/3 and 2/3 (attained)", [fmpq(1, 3), fmpq(2, 3)], [[fmpq(0)], [fmpq(5, 2)]]


def certificates() -> Iterator[Certificate]:
    claim = "prediction/residual-of-a-mixture"
    for where, p, f in _instances():
        mean = _mean(p, f)
        energy = sum((w * _squared(row, mean) for w, row in zip(p, f)), fmpq(0))
        pairs = sum((a * b * _squared(x, y) for a, x in zip(p, f) for b, y in zip(p, f)), fmpq(0)) / 2
        delta2 = max(_squared(x, y) for x in f for y in f)
        collision = delta2 / 2 * (1 - sum((w * w for w in p), fmpq(0)))
        bits = entropy(p)
        by_entropy = ball(delta2) / 2 * (1 - (-bits * arb(2).log()).exp())
        linear = ball(delta2) / 4 * bits
        yield Certificate(
            claim,
            "A8: sum p |f - fbar|^2 = 1/2 sum p p |f - f|^2",
            where,
            energy,
            "=",
            pairs,
            {"the half lost": (energy, 2 * pairs)},
        )
        yield Certificate(
            claim, "E|R|^2 <= D^2/2 (1 - sum p^2)", where, energy, "<=", collision,
            {"D^2/4 for D^2/2": (energy, collision / 2)} if "attained" in where else {},
        )  # fmt: skip
        if "simplex" not in where:  # there both sides are the same number, which balls cannot tell
            yield Certificate(
                claim, "D^2/2 (1 - sum p^2) < D^2/2 (1 - 2^-H)", where, collision, "<", by_entropy,
                {"D^2/4 for D^2/2": (collision, by_entropy / 2)},
            )  # fmt: skip
        yield Certificate(
            claim,
            "D^2/2 (1 - sum p^2) < D^2/4 H",
            where,
            collision,
            "<",
            linear,
            {"D^2/4 H in nats, halved": (collision, linear * arb(2).log() / 2)},
        )
        for i, (w, row) in enumerate(zip(p, f)):
            if i < 2:
                left, right = _squared(row, mean), delta2 * (1 - w) ** 2
                yield Certificate(
                    claim,
                    f"|R(v{i})|^2 <= D^2 (1 - p)^2",
                    where,
                    left,
                    "<=",
                    right,
                    {"p for 1 - p": (left, delta2 * w**2)} if left > delta2 * w**2 else {},
                )
    yield from _rates()
    yield from _repeated()


def _repeated() -> Iterator[Certificate]:
    """Two tokens that write the same: the residual tells less than the token."""
    p = [fmpq(1, 2), fmpq(1, 3), fmpq(1, 6)]
    residual, tokens = entropy([p[0], p[1] + p[2]]), entropy(p)
    yield Certificate(
        "prediction/residual-entropy", "H(R_t | t_<t) < H(t_t | t_<t)", "tokens 1/2, 1/3, 1/6, the last two write the same", residual, "<", tokens,
        {"the law of the residual for the token's": (tokens, residual)},
    )  # fmt: skip


def _rates() -> Iterator[Certificate]:
    """R(D) <= I of a test channel that is written down, and that below min{H, reverse water-filling of Cov f}."""
    claim = "prediction/residual-rate-distortion"
    p = [fmpq(1, 4)] * 4
    f = [[rational(a), rational(b)] for a in (-2, 2) for b in (-1, 1)]  # Cov f = diag(4, 1)
    for slope in (0.3, 0.6, 2.5):
        channel, y = _blahut(f, slope)
        rate, distortion = _measured(p, f, channel, y)
        variances = [fmpq(4), fmpq(1)]
        gaussian = _gaussian(variances, distortion)
        bits = entropy(p)
        right = gaussian if gaussian < bits else bits
        yield Certificate(
            claim, "I(channel) at D < min{H(p), sum 1/2 log2+(lambda/theta)}", f"four points, Cov diag(4, 1), D = {float(ball(distortion).mid()):.4f}",
            rate, "<", right, {"1/8 log2 for 1/2 log2": (rate, right / 4)},
        )  # fmt: skip


def _blahut(f: Vectors, slope: float) -> tuple[list[list[fmpq]], Vectors]:
    """A channel found by Blahut's steps in floats, then made rational with rows of sum 1: any channel gives an upper bound on R(D)."""
    points = [[float(x.p) / float(x.q) for x in row] for row in f]
    y = [*([0.8 * x for x in row] for row in points), [0.0, 0.0]]
    q = [1 / len(y)] * len(y)
    rows: list[list[float]] = []
    for _ in range(400):
        rows = []
        for row in points:
            w = [a * 2 ** (-slope * sum((r - s) ** 2 for r, s in zip(row, b))) for a, b in zip(q, y)]
            rows.append([x / math.fsum(w) for x in w])
        q = [math.fsum(row[j] for row in rows) / len(rows) for j in range(len(y))]
        y = [
            [
                math.fsum(row[j] * point[c] for row, point in zip(rows, points)) / (len(rows) * max(q[j], 1e-12))
                for c in range(2)
            ]
            for j in range(len(y))
        ]
    exact = [[fmpq(max(1, round(x * 10**9)), 10**9) for x in row] for row in rows]
    return [[x / sum(row, fmpq(0)) for x in row] for row in exact], [
        [fmpq(round(x * 10**9), 10**9) for x in row] for row in y
    ]


def _measured(p: list[fmpq], f: Vectors, channel: list[list[fmpq]], y: Vectors) -> tuple[arb, fmpq]:
    q = [sum((w * row[j] for w, row in zip(p, channel)), fmpq(0)) for j in range(len(y))]
    rate, distortion = arb(0), fmpq(0)
    for w, row, point in zip(p, channel, f):
        for j, share in enumerate(row):
            rate += ball(w * share) * log2(share / q[j])
            distortion += w * share * _squared(point, y[j])
    return rate, distortion


def _gaussian(variances: list[fmpq], distortion: fmpq) -> arb:
    s = sorted(variances, key=lambda x: float(x.p) / float(x.q))
    below = fmpq(0)
    for j, value in enumerate(s):
        theta = (distortion - below) / (len(s) - j)
        if theta <= value:
            return sum((log2(x / theta) / 2 for x in s[j:]), arb(0))
        below += value
    return arb(0)
