"""The risk of keeping K of n tokens, on caches whose attention weights are rational: every expectation is a sum over all subsets.

n tokens with values v, m queries with weights a (rows of sum 1), P uniform. Centred profile Gamma_i(q) = n a_i (v_i - A_P(q)); linear risk of
weights w: the mean over queries of |sum w_i Gamma_i|^2; true risk of a subset: that of its own softmax.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flint import arb, fmpq, fmpq_mat

from kvtheory import balancing
from proofs_checks.certified.balls import Certificate, ball, eigenvalues, matrix, rational

Vector = list[fmpq]


def _dot(a: Sequence[fmpq], b: Sequence[fmpq]) -> fmpq:
    return sum((x * y for x, y in zip(a, b)), fmpq(0))


def _mean(rows: Sequence[fmpq]) -> fmpq:
    return sum(rows, fmpq(0)) / len(rows)


@dataclass(frozen=True)
class Cache:
    """a (m, n) attention weights, v (n, dv); all rational."""

    name: str
    a: list[Vector]
    v: list[Vector]

    @property
    def n(self) -> int:
        return len(self.v)

    @cached_property
    def outputs(self) -> list[Vector]:
        return [[_dot(row, [x[c] for x in self.v]) for c in range(len(self.v[0]))] for row in self.a]

    @cached_property
    def profiles(self) -> list[Vector]:
        """(n, m dv), one row a token."""
        return [
            [self.n * row[i] * (x - o) for row, out in zip(self.a, self.outputs) for x, o in zip(self.v[i], out)]
            for i in range(self.n)
        ]

    @cached_property
    def gram(self) -> fmpq_mat:
        """<Gamma_i, Gamma_j>, mean over queries."""
        return matrix([[_dot(x, y) / len(self.a) for y in self.profiles] for x in self.profiles])

    @cached_property
    def trace(self) -> fmpq:
        return sum((self.gram[i, i] for i in range(self.n)), fmpq(0)) / self.n

    @cached_property
    def spectrum(self) -> list[arb]:
        """Eigenvalues of Sigma, those of gram / n."""
        return [x / self.n for x in eigenvalues(self.gram)]

    def tail(self, m: int) -> arb:
        return ball(self.trace) - sum(self.spectrum[:m], arb(0))

    def linear(self, weights: dict[int, fmpq]) -> fmpq:
        return sum((x * y * self.gram[i, j] for i, x in weights.items() for j, y in weights.items()), fmpq(0))

    def true(self, kept: Sequence[int], weights: Sequence[fmpq] | None = None) -> fmpq:
        """|A_S - A_P|^2, mean over queries, of tokens kept with equal or given weights."""
        w = [fmpq(1)] * len(kept) if weights is None else weights
        total = fmpq(0)
        for row, out in zip(self.a, self.outputs):
            mass = sum((x * row[i] for x, i in zip(w, kept)), fmpq(0))
            here = [sum((x * row[i] * self.v[i][c] for x, i in zip(w, kept)), fmpq(0)) / mass for c in range(len(out))]
            total += sum(((x - y) ** 2 for x, y in zip(here, out)), fmpq(0))
        return total / len(self.a)

    @property
    def concentration(self) -> fmpq:
        """rho = E n sum a^2."""
        return self.n * _mean([_dot(row, row) for row in self.a])

    @property
    def radius2(self) -> fmpq:
        """max |v_i - mean v|^2."""
        centre = [_mean([x[c] for x in self.v]) for c in range(len(self.v[0]))]
        return max(sum(((y - z) ** 2 for y, z in zip(x, centre)), fmpq(0)) for x in self.v)


def drawn(seed: int, n: int, m: int, dv: int) -> Cache:
    source = random.Random(seed)
    weights = [[source.randint(1, 20) for _ in range(n)] for _ in range(m)]
    a = [[fmpq(w, sum(row)) for w in row] for row in weights]
    return Cache(
        f"cache {seed}: {n} tokens, {m} queries",
        a,
        [[fmpq(source.randint(-6, 6)) for _ in range(dv)] for _ in range(n)],
    )


def needle(n: int, share: fmpq) -> Cache:
    """One token holds `share` of the attention and has the value n - 1; the others have -1."""
    a = [[share, *([(1 - share) / (n - 1)] * (n - 1))]]
    return Cache(f"needle: {n} tokens, one with {share}", a, [[fmpq(n - 1)], *([[fmpq(-1)]] * (n - 1))])


#: the last: profiles e_i - 1/n, where sampling, walk and optimum meet their bounds
SIMPLEX = Cache(
    "simplex: 6 tokens, even attention", [[fmpq(1, 6)] * 6], [[fmpq(int(i == j)) for j in range(6)] for i in range(6)]
)
CACHES = (drawn(1, 6, 2, 2), drawn(2, 7, 3, 2), drawn(3, 8, 1, 3), SIMPLEX)


def certificates() -> Iterator[Certificate]:
    for cache in CACHES:
        yield from _sampling(cache)
        yield from _spectral(cache)
        yield from _selection(cache)
    yield from _needles()
    yield from _lookup()
    yield from _dropping()
    yield from _tree()
    yield from _table()


def _sampling(cache: Cache) -> Iterator[Certificate]:
    n = cache.n
    for K in (2, 3):
        where = f"{cache.name}, K = {K}"
        subsets = list(itertools.combinations(range(n), K))
        srs = _mean([cache.linear({i: fmpq(1, K) for i in s}) for s in subsets])
        rate = cache.trace / K * fmpq(n - K, n - 1)
        yield Certificate(
            "risk/sampling-without-replacement", "E|int Gamma|^2 = (tr/K)(n-K)/(n-1)", f"{where}, all {len(subsets)} subsets", srs, "=", rate,
            {"(n-K)/n": (srs, cache.trace / K * fmpq(n - K, n))},
        )  # fmt: skip
        best = min(cache.linear({i: fmpq(1, K) for i in s}) for s in subsets)
        yield Certificate(
            "risk/minimax-trace",
            "min over P-hat <= (tr/K)(n-K)/(n-1)",
            where,
            best,
            "<=",
            rate,
            {"half of it": (best, rate / 2)} if cache is SIMPLEX else {},
        )
        true = _mean([cache.true(s) for s in subsets])
        safe = 4 * cache.radius2 * cache.concentration / K
        augmented = _augmented(cache, K)
        yield Certificate("risk/safe-bound", "E r <= 4 B^2 rho / K", where, true, "<=", safe)
        yield Certificate("risk/augmented-trace-bound", "E r <= 2 tr Sigma+ / K", where, true, "<=", augmented)
        yield Certificate(
            "risk/augmented-trace-bound",
            "2 tr Sigma+ / K <= 4 B^2 rho / K",
            where,
            augmented,
            "<=",
            safe,
            {"exchanged": (safe, augmented)} if augmented != safe else {},
        )
    iid = _mean([cache.linear(_counted(s)) for s in itertools.product(range(n), repeat=2)])
    yield Certificate(
        "risk/sampling-iid",
        "E|int Gamma|^2 = tr/K",
        f"{cache.name}, K = 2, all {n * n} draws",
        iid,
        "=",
        cache.trace / 2,
        {"K - 1": (iid, cache.trace)},
    )


def _counted(draws: Sequence[int]) -> dict[int, fmpq]:
    return {i: fmpq(draws.count(i), len(draws)) for i in set(draws)}


def _augmented(cache: Cache, K: int) -> fmpq:
    """2 tr Sigma+ / K, of values less their mean and c = B."""
    n, centre = cache.n, [_mean([x[c] for x in cache.v]) for c in range(len(cache.v[0]))]
    u = [[y - z for y, z in zip(x, centre)] for x in cache.v]
    total = fmpq(0)
    for row in cache.a:
        o = [_dot(row, [x[c] for x in u]) for c in range(len(centre))]
        total += (
            n * sum((w * w * _dot(x, x) for w, x in zip(row, u)), fmpq(0))
            - _dot(o, o)
            + cache.radius2 * (n * _dot(row, row) - 1)
        )
    return 2 * total / len(cache.a) / K


def _spectral(cache: Cache) -> Iterator[Certificate]:
    n = cache.n
    for K, m in ((3, 0), (3, 1), (5, 1), (5, 2)):
        if 2 * m >= K or n <= K:
            continue
        where = f"{cache.name}, K = {K}, m = {m}"
        bound = 2 * cache.tail(m) / (K - 2 * m)
        subsets = list(itertools.combinations(range(n), K))
        best = min(cache.linear({i: fmpq(1, K) for i in s}) for s in subsets)
        yield Certificate(
            "risk/minimax-sandwich",
            "min over P-hat <= 2 tail_m/(K - 2m)",
            where,
            best,
            "<=",
            bound,
            {"1/2 for 2": (best, bound / 4)} if cache is SIMPLEX and m == 0 else {},
        )
        profiles = np.array([[float(x.p) / float(x.q) for x in row] for row in cache.profiles])
        worst = fmpq(0)
        for seed in range(20):  # of every coin: the better end of each step is taken, the bound is sure
            index, weight = balancing.sample(profiles, K, "spectral", m, seed, derandomise=True)
            total = sum((rational(float(w)) for w in weight), fmpq(0))
            worst = max(worst, cache.linear({int(i): rational(float(w)) / total for i, w in zip(index, weight)}))
        for claim in ("risk/spectral-bound", "risk/protected-features"):
            yield Certificate(
                claim, "risk of the derandomised walk <= 2 tail_m/(K - 2m)", f"{where}, the worst of 20 seeds, weights as exact numbers", worst, "<=", bound,
                {"1/2 for 2": (worst, bound / 4)} if cache is SIMPLEX and m == 0 else {},
            )  # fmt: skip
    floor = n * cache.spectrum[n - 2]
    for K in (2, 3):
        least = min(_affine(cache, s) for s in itertools.combinations(range(n), K))
        right = floor * (arb(1) / K - arb(1) / n)
        if (
            cache.gram.rank() == n - 1 and cache is not SIMPLEX
        ):  # there both are the same number, which balls cannot tell
            yield Certificate(
                "risk/minimax-trace", "n lambda_(n-1) (1/K - 1/n) <= min over P-hat", f"{cache.name}, K = {K}, weights of any sign", right, "<=", least,
                {"mean eigenvalue for the least, all of them": (n * ball(cache.trace) * (arb(1) / K - arb(1) / n), least)},
            )  # fmt: skip
    covariance = _covariance(cache.outputs)
    spread = eigenvalues(covariance) if covariance.rank() else []
    for K in (1, 2):
        tail = sum(spread[K - 1 :], arb(0))
        kept = min(cache.true(s) for s in itertools.combinations(range(n), K))
        if len(cache.a) > K:
            yield Certificate(
                "risk/any-atoms-floor",
                "tail_(K-1)(Cov A_P) <= min over own tokens",
                f"{cache.name}, K = {K}",
                tail,
                "<=",
                kept,
                {"exchanged": (kept, tail)},
            )


def _covariance(outputs: list[Vector]) -> fmpq_mat:
    m = len(outputs)
    centre = [_mean([o[c] for o in outputs]) for c in range(len(outputs[0]))]
    rows = [[x - y for x, y in zip(o, centre)] for o in outputs]
    return matrix(
        [[sum((r[i] * r[j] for r in rows), fmpq(0)) / m for j in range(len(centre))] for i in range(len(centre))]
    )


def _affine(cache: Cache, kept: Sequence[int]) -> fmpq:
    """min w' G w over w of sum 1 on the kept tokens, whatever their sign: below every summary of these tokens."""
    g = matrix([[cache.gram[i, j] for j in kept] for i in kept])
    if g.det() == 0:
        return fmpq(0)
    x = g.solve(matrix([[1]] * len(kept)))
    return 1 / sum((x[i, 0] for i in range(len(kept))), fmpq(0))


def _selection(cache: Cache) -> Iterator[Certificate]:
    """The heaviest K by mean attention: what is lost is in proportion to the attention lost."""
    n, m = cache.n, len(cache.a)
    heavy = sorted(range(n), key=lambda i: -sum((row[i] for row in cache.a), fmpq(0)))
    for K in (2, 4):
        kept, gone = heavy[:K], heavy[K:]
        lost = [sum((row[i] for i in gone), fmpq(0)) for row in cache.a]
        right = 4 * cache.radius2 * _mean([x * x for x in lost])
        left = cache.true(kept)
        where = f"{cache.name}, the {K} heaviest"
        yield Certificate(
            "risk/selection-bound",
            "r(S) <= 4 R^2 E(1 - a(S))^2",
            where,
            left,
            "<=",
            right,
            {"a(S) for 1 - a(S), 4 lost": (left, cache.radius2 * _mean([(1 - x) ** 2 for x in lost]))}
            if left > cache.radius2 * _mean([(1 - x) ** 2 for x in lost])
            else {},
        )
        direct, by_parts = fmpq(0), fmpq(0)
        for row, out in zip(cache.a, cache.outputs):
            mass = 1 - sum((row[i] for i in gone), fmpq(0))
            for c, o in enumerate(out):
                here = sum((row[i] * cache.v[i][c] for i in kept), fmpq(0)) / mass
                direct += (here - o) ** 2
                by_parts += (sum((row[i] * (cache.v[i][c] - o) for i in gone), fmpq(0)) / mass) ** 2
        yield Certificate(
            "transform-coding/eviction-error", "|o' - o|^2 = |sum a (v - o)|^2 / (1 - A)^2", where, direct / m, "=", by_parts / m,
            {"1 - A lost": (direct / m, _surrogate(cache, gone, lost))},
        )  # fmt: skip


def _surrogate(cache: Cache, gone: Sequence[int], lost: Sequence[fmpq]) -> fmpq:
    total = fmpq(0)
    for row, out in zip(cache.a, cache.outputs):
        total += sum(
            (sum((row[i] * (cache.v[i][c] - o) for i in gone), fmpq(0)) ** 2 for c, o in enumerate(out)), fmpq(0)
        )
    return total / len(cache.a)


def _needles() -> Iterator[Certificate]:
    """A token that all attention goes to: the centred trace is no bound on the true risk, the others are."""
    cache = needle(8, fmpq(9, 10))
    for K in (2, 4):
        true = _mean([cache.true(s) for s in itertools.combinations(range(8), K)])
        trace = cache.trace / K * fmpq(8 - K, 7)
        yield Certificate(
            "risk/retrieval-regime",
            "counterexample: (tr/K)(n-K)/(n-1) < E r",
            f"{cache.name}, K = {K}",
            trace,
            "<",
            true,
            {"the augmented trace": (_augmented(cache, K), true)},
        )
        yield Certificate(
            "risk/safe-bound",
            "E r <= 4 B^2 rho / K",
            f"{cache.name}, K = {K}",
            true,
            "<=",
            4 * cache.radius2 * cache.concentration / K,
            {"the centred trace": (true, trace)},
        )
        yield Certificate(
            "risk/augmented-trace-bound",
            "E r <= 2 tr Sigma+ / K",
            f"{cache.name}, K = {K}",
            true,
            "<=",
            _augmented(cache, K),
            {"the centred trace": (true, trace)},
        )


def _lookup() -> Iterator[Certificate]:
    """n queries, each gives half its attention to its own token; values orthonormal: own tokens cannot do better than a quarter of what is dropped."""
    n = 5
    a = [[fmpq(1, 2) if i == j else fmpq(1, 2 * (n - 1)) for i in range(n)] for j in range(n)]
    cache = Cache("look-up of 5", a, [[fmpq(int(i == j)) for j in range(n)] for i in range(n)])
    for K in (1, 2, 3):
        floor = fmpq(1, 4) * fmpq(n - K, n)
        least = min(cache.true(s) for s in itertools.combinations(range(n), K))
        yield Certificate(
            "risk/search-lower-bound",
            "mass^2 (1 - K/n) <= min over own tokens",
            f"{cache.name}, K = {K}, equal weights",
            floor,
            "<=",
            least,
            {"mass^2 (1 - K/n) doubled twice": (4 * floor, least)} if 4 * floor > least else {},
        )
    centre = [_mean([o[c] for o in cache.outputs]) for c in range(n)]
    one = _mean([sum(((x - y) ** 2 for x, y in zip(o, centre)), fmpq(0)) for o in cache.outputs])
    spread = (fmpq(1, 2) - fmpq(1, 2 * (n - 1))) ** 2 * (1 - fmpq(1, n))
    yield Certificate(
        "risk/any-atoms-floor",
        "one atom anywhere attains the spread of the outputs",
        cache.name,
        one,
        "=",
        spread,
        {"own tokens' floor": (one, fmpq(1, 4) * fmpq(n - 1, n))},
    )
    yield Certificate(
        "risk/search-lower-bound-any-atoms",
        "counterexample: r < mass^2 (1 - K/n)",
        f"{cache.name}, K = 1 atom at the mean output",
        one,
        "<",
        fmpq(1, 4) * fmpq(n - 1, n),
        {"own tokens": (min(cache.true([i]) for i in range(n)), fmpq(1, 4) * fmpq(n - 1, n))},
    )


def _dropping() -> Iterator[Certificate]:
    """Two tokens of three with weights 1/3 and 2/3 give the mean exactly; no subset with equal weights does."""
    third = [fmpq(1, 3)] * 3
    cache = Cache("values -1, -1, 2 spread evenly", [third], [[fmpq(-1)], [fmpq(-1)], [fmpq(2)]])
    weighted = cache.true([0, 2], [fmpq(2, 3), fmpq(1, 3)])
    dropped = min(cache.true(s) for K in (1, 2) for s in itertools.combinations(range(3), K))
    yield Certificate(
        "risk/weights-beat-dropping",
        "0 = risk of weights < 1/4 = of any subset",
        cache.name,
        weighted,
        "<",
        dropped,
        {"weights exchanged": (cache.true([0, 2], [fmpq(1, 3), fmpq(2, 3)]), dropped)},
    )
    yield Certificate(
        "risk/weights-beat-dropping",
        "risk of the best subset = 1/4",
        cache.name,
        dropped,
        "=",
        fmpq(1, 4),
        {"1/2": (dropped, fmpq(1, 2))},
    )


def _tree() -> Iterator[Certificate]:
    """Merge-reduce, unbiased: every tree of two-to-one coin merges, enumerated, against sum 2^(l-L) V_l."""
    values, level = [fmpq(3), fmpq(-1), fmpq(4), fmpq(0), fmpq(2), fmpq(2), fmpq(7), fmpq(-5)], 0
    laws = [{v: fmpq(1)} for v in values]
    variances: list[fmpq] = []
    while len(laws) > 1:
        merged, noise = [], []
        for left, right in zip(laws[::2], laws[1::2]):
            law: dict[fmpq, fmpq] = {}
            squared = fmpq(0)
            for x, p in left.items():
                for y, q in right.items():
                    squared += p * q * ((x - y) / 2) ** 2
                    for kept in (x, y):
                        law[kept] = law.get(kept, fmpq(0)) + p * q / 2
            merged.append(law)
            noise.append(squared)
        laws, level = merged, level + 1
        variances.append(_mean(noise))
    mean = _mean(values)
    root = sum((p * (x - mean) ** 2 for x, p in laws[0].items()), fmpq(0))
    total = sum((v / 2 ** (level - 1 - i) for i, v in enumerate(variances)), fmpq(0))
    where = "8 leaves, a fair coin a merge, all outcomes"
    yield Certificate(
        "risk/merge-reduce-accumulation",
        "E|total|^2 = sum 2^(l-L) V_l",
        where,
        root,
        "=",
        total,
        {"levels alike": (root, sum(variances, fmpq(0)))},
    )
    yield Certificate(
        "risk/merge-reduce-accumulation",
        "E|total|^2 <= 2 max V",
        where,
        root,
        "<=",
        2 * max(variances),
        {"max V / 2": (root, max(variances) / 2)},
    )
    roots = sum((ball(v).sqrt() for v in variances), arb(0)) ** 2
    yield Certificate(
        "risk/merge-reduce-accumulation",
        "E|total|^2 < (sum sqrt V)^2",
        where,
        root,
        "<",
        roots,
        {"mean of sqrt V, squared": (root, roots / level**2 / 2)},
    )


def _table() -> Iterator[Certificate]:
    """Discordant pairs that differ by at most 3: the exact sign test."""
    least = fmpq(1)
    for total in range(1, 121):
        for difference in (x for x in range(4) if (total - x) % 2 == 0 and x <= total):
            low = (total - difference) // 2
            p = fmpq(2 * sum(math.comb(total, i) for i in range(low + 1)), 2**total)
            least = min(least, p, fmpq(1))
    yield Certificate(
        "risk/longbench-table",
        "2 * 2^-3 <= p",
        "b + c <= 120, |b - c| <= 3",
        fmpq(1, 4),
        "<=",
        least,
        {"4 * 2^-3": (fmpq(1, 2), least)},
    )
