"""Claims about the residual of a mean over the next token (arXiv 2604.15356, predicted KV): its energy, its entropy, its rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.entropy import FiniteLanguage
from kvtheory.tiny import RationalLayer, RationalTransformer, collision_model
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.sequential.instances import random_language

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]

ROUNDING = 1e-12
SUMS = "sums of some hundred float64 products"


def hadamard(order: int) -> NDArray[np.int64]:
    """Rows of +-1, order a power of two: any two differ in half of the places, so that their distance is sqrt(2 order)."""
    rows = np.ones((1, 1), np.int64)
    while len(rows) < order:
        rows = np.block([[rows, rows], [rows, -rows]])
    return rows


def fractions(numbers: Any) -> NDArray[Any]:
    """An object array of Fractions."""
    numbers = np.asarray(numbers)
    out = np.empty(numbers.shape, object)
    out.reshape(-1)[:] = [Fraction(int(x)) for x in numbers.reshape(-1)]
    return out


def rational_law(rng: np.random.Generator, size: int) -> NDArray[Any]:
    """Probabilities with a common denominator, some of them small, none 0; in a quarter of the laws one token is nearly certain."""
    weights = [int(x) for x in 1 + rng.integers(0, 50, size) ** int(rng.integers(1, 3))]
    if rng.random() < 0.25:
        weights[int(rng.integers(size))] *= 10**12
    return np.array([Fraction(w, sum(weights)) for w in weights], object)


@claim(
    id="prediction/residual-of-a-mixture", paper=PAPER, section="predicted KV; entropy-to-norm bound, with its constants",
    statement="What the mean over the next token leaves has half the mean squared distance of two candidates, at most Δ²/2 (1 − 2^−H) and Δ²/4 H "
    "for candidates no further apart than Δ; of the token that came, at most Δ (1 − p). All are attained.",
    formula="E‖R‖² = Σ_v p_v ‖f(v) − f̄‖² = ½ Σ_{u,v} p_u p_v ‖f(u) − f(v)‖² ≤ Δ²/2 (1 − Σ p²) ≤ Δ²/2 (1 − 2^−H), ≤ Δ²/4 H;  ‖R(v)‖ ≤ Δ (1 − p_v)",
    expected=Verdict.HOLDS,
    functions={
        "energy": "kvtheory.prediction.mixture.residual_energy",
        "pairs": "kvtheory.prediction.mixture.pair_energy",
        "by_collision": "kvtheory.prediction.mixture.collision_bound",
        "by_entropy": "kvtheory.prediction.mixture.entropy_bound",
        "linear": "kvtheory.prediction.mixture.linear_bound",
        "error": "kvtheory.prediction.mixture.error_bound",
        "entropy": "kvtheory.prediction.mixture.token_entropy",
    },
    mutants=[
        *systematic.scales("energy"), *systematic.scales("pairs"), *systematic.scales("by_collision"), *systematic.scales("by_entropy"),
        *systematic.scales("linear"), *systematic.scales("error"), *systematic.natural_log("entropy"),
        Mutant("energy about the likeliest candidate, not the mean", "energy", lambda true: _about_the_likeliest),
        Mutant("ln 2 / 2 where 1/4 does", "linear", lambda true: lambda bits, delta: true(bits, delta) * 2 * math.log(2)),
        Mutant("2^-2H", "by_entropy", lambda true: lambda bits, delta: true(2 * bits, delta)),
        Mutant("the square of the token's probability", "error", lambda true: lambda p, delta: true(p * p, delta)),
    ],
)  # fmt: skip
def residual_of_a_mixture(
    context: Context, *, energy: Function, pairs: Function, by_collision: Function, by_entropy: Function, linear: Function,
    error: Function, entropy: Function,
) -> Result:  # fmt: skip
    # attained
    for p in (Fraction(1, 2), Fraction(1, 3), Fraction(1, 100)):
        law, f = np.array([p, 1 - p], object), fractions([[0], [6]])
        where = f"two atoms 6 apart, p = {p}"
        yield exact(
            what="E‖R‖² = Δ²/2 (1 − Σ p²)",
            ran_on=where,
            observed=energy(law, f),
            predicted=by_collision(law, 6),
            tightness=1.0,
        )
        yield exact(what="E‖R‖² = 36 p (1 − p)", ran_on=where, observed=energy(law, f), predicted=36 * p * (1 - p))
        yield exact(
            what="½ Σ p p ‖f(u) − f(v)‖² = 36 p (1 − p)",
            ran_on=where,
            observed=pairs(law, f),
            predicted=36 * p * (1 - p),
        )
        yield exact(
            what="‖R(v)‖ = Δ (1 − p_v)", ran_on=where, observed=abs(f[0, 0] - (law @ f)[0]), predicted=error(p, 6), tightness=1.0
        )  # fmt: skip
    law, f = np.array([Fraction(1, 8)] * 8, object), fractions(hadamard(8))
    where = "8 corners of a simplex, 4 apart, each 1/8: H = 3"
    yield exact(what="E‖R‖² = 7", ran_on=where, observed=energy(law, f), predicted=7)
    yield exact(what="Δ²/2 (1 − Σ p²) = 7", ran_on=where, observed=by_collision(law, 4), predicted=7, tightness=1.0)
    yield numerical(
        what="Δ²/2 (1 − 2^−H) = 7", ran_on=where, observed=by_entropy(entropy(law), 4.0), predicted=7.0, tolerance=1e-14,
        because="one exponential", tightness=1.0,
    )  # fmt: skip
    yield numerical(
        what="Δ²/4 H = E‖R‖² = 1 for a fair coin of atoms 2 apart", ran_on="two atoms, H = 1", predicted=1.0, tolerance=1e-14, because="one logarithm",
        observed=linear(entropy([0.5, 0.5]), 2.0), tightness=1.0,
    )  # fmt: skip

    # at random: on the line in Fractions, in space in float64
    rng, number = context.rng("mixtures"), context.size(100, 2000)
    unequal = above = beyond = 0
    for _ in range(number):
        size = int(rng.integers(2, 9))
        law, f = rational_law(rng, size), fractions(rng.integers(-20, 21, (size, 1)))
        delta = max(f[:, 0]) - min(f[:, 0])
        unequal += energy(law, f) != pairs(law, f)
        above += energy(law, f) > by_collision(law, delta)
        mean = (law @ f)[0]
        beyond += sum(abs(x - mean) > error(p, delta) for x, p in zip(f[:, 0], law))
    where = f"{number} mixtures of 2 to 8 rational atoms on the line"
    yield exact(what="mixtures where the two energies differ", ran_on=where, observed=unequal, predicted=0)
    yield exact(what="mixtures with E‖R‖² > Δ²/2 (1 − Σ p²)", ran_on=where, observed=above, predicted=0)
    yield exact(what="candidates with ‖R(v)‖ > Δ (1 − p_v)", ran_on=where, observed=beyond, predicted=0)
    worst = {
        "E‖R‖² / (Δ²/2 (1 − Σ p²))": 0.0,
        "Δ²/2 (1 − Σ p²) / (Δ²/2 (1 − 2^−H))": 0.0,
        "E‖R‖² / (Δ²/4 H)": 0.0,
        "‖R(v)‖ / (Δ (1 − p_v))": 0.0,
    }
    for _ in range(number):
        size = int(rng.integers(2, 40))
        weights = rng.dirichlet(np.full(size, 10.0 ** rng.uniform(-1, 1)))
        # floats add up to 1 to 1e-16: 1 − p means something to 1e-12 where it is above 1e-3; nearly certain tokens are above, in Fractions
        weights = 0.99 * weights / weights.sum() + 0.01 / size
        g = rng.normal(size=(size, int(rng.integers(1, 12))))
        far = max(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(g, 2))
        found, h = float(energy(weights, g)), entropy(weights)
        # R(v) = Σ_u p_u (f(v) − f(u)): no difference of near numbers where p_v is near 1
        errors = np.linalg.norm(np.einsum("u,vud->vd", weights, g[:, None] - g[None]), axis=1)
        for name, ratio in zip(
            worst,
            (
                found / by_collision(weights, far), by_collision(weights, far) / by_entropy(h, far), found / linear(h, far),
                max(e / error(x, far) for e, x in zip(errors, weights)),
            ),
        ):  # fmt: skip
            worst[name] = max(worst[name], float(ratio))
    for name, ratio in worst.items():
        yield numerical(
            what=f"largest {name}", ran_on=f"{number} mixtures of 2 to 39 Gaussian atoms in 1 to 11 dimensions", observed=ratio, predicted=1.0,
            relation="<=", tolerance=ROUNDING, because=SUMS, tightness=ratio,
        )  # fmt: skip
    for bits, share in ((3.3, 0.898), (4.3, 0.949)):
        yield numerical(
            what=f"1 − 2^−{bits}: the share of Δ²/2 that the bound leaves at {bits} bits a token", ran_on="the paper's perplexities 10 and 20", role="control",
            observed=by_entropy(bits, math.sqrt(2)), predicted=share, tolerance=1e-3, because="printed to three digits",
            note="an upper bound: it guarantees next to nothing at the paper's own operating point, and proves no small gain either",
        )  # fmt: skip


def _about_the_likeliest(p: Any, f: Any) -> Any:
    p, f = np.asarray(p), np.asarray(f)
    residual = f - f[int(np.argmax(p))]
    return p @ (residual * residual).sum(axis=1)


# -- entropy of the residual -------------------------------------------------------------------------------------------


def rational_model(rng: np.random.Generator, vocabulary: int, dim: int) -> RationalTransformer:
    """Two layers with weights in -2..2."""

    def matrix(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(int(x) for x in row) for row in rng.integers(-2, 3, (rows, columns)))

    width = dim + 1
    layers = tuple(
        RationalLayer(matrix(width, dim), matrix(width, dim), matrix(width, dim), matrix(dim, width)) for _ in range(2)
    )
    return RationalTransformer(dict(enumerate(matrix(vocabulary, width))), layers)


def flat(model: RationalTransformer) -> Any:
    """kv of a prefix as one tuple of numbers."""
    return lambda prefix: tuple(x for pair in model.kv(prefix) for vector in pair for x in vector)


def _of_map(name: str, change: Any) -> Mutant:
    """The residual map, its values changed."""
    return Mutant(name, "residual", lambda true: lambda law, kv: lambda prefix: change(true(law, kv)(prefix)))


@claim(
    id="prediction/residual-entropy", paper=PAPER, section="predictive delta coding: entropy of the residual",
    statement="Given the past, the residual of a prediction that the past determines has the entropy of the new KV: at most the token's, and "
    "exactly the token's where different tokens write different KV. Subtracting saves no lossless bits.",
    formula="H(R_t | t_<t) = H(KV_t | t_<t) ≤ H(t_t | t_<t)",
    expected=Verdict.HOLDS,
    functions={"residual": "kvtheory.prediction.mixture.residual_map", "sequential": "kvtheory.entropy.sequential"},
    mutants=[
        _of_map("residual rounded to integers", lambda r: tuple(round(x) for x in r)),
        _of_map("lengths of the numbers, not the numbers", lambda r: tuple(abs(x) for x in r)),
        _of_map("first number only", lambda r: r[:1]),
        Mutant("the mean, not what it leaves", "residual", lambda true: lambda law, kv: (lambda s: tuple(a - b for a, b in zip(kv(s), true(law, kv)(s))))),
        *systematic.scales("sequential", fields=("kv_given_tokens",)),
        *systematic.scales("sequential", fields=("tokens",)),
    ],
)  # fmt: skip
def residual_entropy(context: Context, *, residual: Function, sequential: Function) -> Result:
    # two of three tokens write one KV: a third of the entropy is the token's alone
    model, law = collision_model(), FiniteLanguage({(token,): Fraction(1, 3) for token in "abc"})
    kv = flat(model)
    where = "the model with KV(a) = KV(b), tokens a, b, c each 1/3"
    found = sequential(law, residual(law, kv))
    yield numerical(
        what="H(R_1) = H(1/3), bits", ran_on=where, observed=found.kv_given_tokens[0], predicted=math.log2(3) - 2 / 3,
        tolerance=ROUNDING, because="two logarithms", note="less than log2 3, the token's",
    )  # fmt: skip
    yield numerical(
        what="H(t_1) = log2 3, bits", ran_on=where, observed=found.tokens[0], predicted=math.log2(3), tolerance=ROUNDING, because="one logarithm",
    )  # fmt: skip
    apart = FiniteLanguage({(a, b): Fraction(1, 4) for a in "ac" for b in "ac"})
    found = sequential(apart, residual(apart, kv))
    for t in (0, 1):
        yield exact(
            what=f"H(R_{t + 1} | past) = H(t_{t + 1} | past) = 1", ran_on="the same model, tokens a and c each 1/2: different KV",
            observed=found.kv_given_tokens[t], predicted=1, tightness=1.0,
        )  # fmt: skip
    rng, number = context.rng("models"), context.size(12, 150)
    cells = 0
    pairs: list[tuple[float, float]] = []
    bounds: list[tuple[float, float]] = []
    distinct: list[tuple[float, float]] = []
    for _ in range(number):
        size = int(rng.integers(2, 5))
        language = random_language(rng, size, 3)
        kv = flat(rational_model(rng, size, int(rng.integers(1, 3))))
        rest = residual(language, kv)
        by_kv, by_rest = sequential(language, kv), sequential(language, rest)
        pairs += zip(by_rest.kv_given_tokens, by_kv.kv_given_tokens)
        bounds += zip(by_rest.kv_given_tokens, by_rest.tokens)
        for t in range(3):
            pasts = [[(*past, v) for v in language.next(past)] for past in language.prefixes(t)]
            cells += sum(len({rest(s) for s in same}) != len({kv(s) for s in same}) for same in pasts)
            if all(len({kv(s) for s in same}) == len(same) for same in pasts):
                distinct.append((by_rest.kv_given_tokens[t], by_rest.tokens[t]))
    where = f"{number} random two-layer models in rational arithmetic, |V| 2..4, n = 3"
    yield exact(what="pasts after which residuals and KV differ in number", ran_on=where, observed=cells, predicted=0)
    for what, both, relation, note in (
        ("H(R_t | t_<t) = H(KV_t | t_<t)", pairs, "=", None),
        ("H(R_t | t_<t) ≤ H(t_t | t_<t)", bounds, "<=", None),
        ("H(R_t | t_<t) = H(t_t | t_<t) where different tokens write different KV", distinct, "=", f"{len(distinct)} of {3 * number} steps"),
    ):  # fmt: skip
        observed, predicted = _furthest(both, relation)
        yield numerical(
            what=what, ran_on=where, observed=observed, predicted=predicted, relation=relation, tolerance=ROUNDING,  # type: ignore[arg-type]
            because="logarithms of integers", note=note,
        )  # fmt: skip


def _furthest(pairs: Sequence[tuple[float, float]], relation: str) -> tuple[float, float]:
    return max(pairs, key=lambda pair: pair[0] - pair[1] if relation == "<=" else abs(pair[0] - pair[1]))


# -- rate against distortion -------------------------------------------------------------------------------------------


def coin_rate(distortion: float) -> float:
    """R(D) of a fair ±1 under squared error, real reproductions: 1 − h((1 + √(1 − D)) / 2).

    g(u) = 1 − h((1 + √u) / 2) is convex, so that E g(M²) ≥ g(E M²) for M = E[X|Y], E M² = 1 − D: two reproductions ±√(1 − D) attain it.
    """
    x = (1 + math.sqrt(max(0.0, 1 - distortion))) / 2
    return 1.0 if x >= 1 else 1 + x * math.log2(x) + (1 - x) * math.log2(1 - x)


def _at_the_atoms(true: Function) -> Function:
    """Blahut-Arimoto whose reproductions never move: more than R(D)."""

    def still(p: Any, f: Any, slope: float, iterations: int = 200) -> Any:
        p, f = np.asarray(p, np.float64), np.asarray(f, np.float64)
        squares = ((f[:, None] - f[None]) ** 2).sum(axis=2)
        q = np.full(len(f), 1 / len(f))
        for _ in range(iterations):
            channel = q * np.exp2(-slope * squares)
            channel /= channel.sum(axis=1, keepdims=True)
            q = p @ channel
        joint = p[:, None] * channel
        positive = joint > 0
        rate = float((joint[positive] * np.log2((channel / q)[positive])).sum())
        return true(p, f, slope, 1)._replace(rate=rate, distortion=float((joint * squares).sum()))

    return still


@claim(
    id="prediction/residual-rate-distortion", paper=PAPER, section="rate-distortion of the residual, with the cap that it lacks",
    statement="The residual's rate at distortion D is at most the Gaussian's of the same covariance, and at most the token's entropy, which is "
    "the rate at distortion 0; above E‖R‖² it is 0.",
    formula="R(D) ≤ min{ H(p), Σ_c ½ log2⁺(λ_c/θ) },  λ = eig Cov f,  Σ_c min(λ_c, θ) = D",
    expected=Verdict.HOLDS,
    functions={
        "bound": "kvtheory.prediction.mixture.rate_bound",
        "curve": "kvtheory.prediction.mixture.rate_distortion",
        "gaussian": "kvtheory.prediction.mixture.gaussian_rate",
    },
    mutants=[
        *systematic.scales("bound"), *systematic.natural_log("bound"), *systematic.scales("gaussian"),
        *systematic.scales("curve", fields=("rate",)), *systematic.scales("curve", fields=("distortion",)),
        *systematic.natural_log("curve", fields=("rate",)),
        Mutant("the entropy alone", "bound", lambda true: lambda p, f, d: true(p, f, 0.0)),
        Mutant("Gaussian alone, without the cap", "bound", lambda true: _gaussian_alone),
        Mutant("reproductions stay at the atoms", "curve", _at_the_atoms),
    ],
)  # fmt: skip
def residual_rate_distortion(context: Context, *, bound: Function, curve: Function, gaussian: Function) -> Result:
    for variances, distortion, bits in (
        ([1.0, 0.25], 0.5, 1.0),
        ([1.0, 0.25], 1.25, 0.0),
        ([1.0, 0.0], 0.25, 1.0),
        ([4.0, 4.0, 1.0], 0.75, 5.0),
    ):
        yield exact(
            what=f"Gaussian rate of variances {variances} at D = {distortion}", ran_on="reverse water-filling by hand", role="control",
            observed=gaussian(variances, distortion), predicted=bits,
        )  # fmt: skip
    coin = (np.array([0.5, 0.5]), np.array([[1.0], [-1.0]]))
    for slope in (0.8, 1.0, 1.5, 2.0, 4.0):
        found = curve(*coin, slope)
        yield numerical(
            what="R(D) of a fair ±1 is 1 − h((1 + √(1 − D))/2)", ran_on=f"slope {slope}: D = {found.distortion:.4g}", role="control", observed=found.rate,
            predicted=coin_rate(found.distortion), tolerance=1e-4, because="Blahut-Arimoto stops after 500 steps; slow near D = 1",
        )  # fmt: skip
    rng = context.rng("mixtures")
    sizes = context.size([(5, 3), (12, 6)], [(5, 3), (12, 6), (30, 4), (50, 16)])
    for atoms, dim in sizes:
        p, f = rng.dirichlet(np.ones(atoms)), rng.normal(size=(atoms, dim))
        residual = f - p @ f
        energy = float(p @ (residual**2).sum(axis=1))
        entropy = float(-(p * np.log2(p)).sum())
        where = f"{atoms} Gaussian atoms in R^{dim}, H = {entropy:.2f} bits"
        yield numerical(
            what="the bound at D = E‖R‖² is 0 bits", ran_on=where, observed=1 + bound(p, f, energy), predicted=1.0, tolerance=1e-9,
            because="eigenvalues of a Gram matrix add up to its trace",
        )  # fmt: skip
        fine = curve(p, f, 4000.0 / energy)
        yield numerical(
            what="R(D) → H(p) as D → 0: what Blahut-Arimoto finds", ran_on=f"{where}, D/E‖R‖² = {fine.distortion / energy:.1g}", observed=fine.rate,
            predicted=entropy, tolerance=1e-6, because="D is not 0",
        )  # fmt: skip
        yield numerical(
            what="the bound as D → 0 is H(p)", ran_on=where, observed=bound(p, f, fine.distortion), predicted=entropy, tolerance=1e-9, because=SUMS,
            note=f"the Gaussian rate is {gaussian(np.linalg.eigvalsh((residual * p[:, None]).T @ residual).clip(0), max(fine.distortion, 1e-12)):.3g} bits",
        )  # fmt: skip
        for relative in (1.0, 2.0, 4.0, 8.0, 20.0, 80.0):
            found = curve(p, f, relative / energy)
            limit = bound(p, f, found.distortion)
            yield numerical(
                what="R(D) ≤ bound, by a test channel that Blahut-Arimoto finds", ran_on=f"{where}, D/E‖R‖² = {found.distortion / energy:.3g}",
                observed=found.rate, predicted=limit, relation="<=", tolerance=1e-9, because="a channel's rate and distortion are measured, whatever the "
                "iteration did", tightness=found.rate / limit if limit else None,
            ) if limit > 1e-9 else numerical(
                what="R(D) = 0 at D = E‖R‖²", ran_on=where, observed=1 + found.rate, predicted=1.0, tolerance=1e-6, because="the channel's columns agree to 1e-9",
            )  # fmt: skip


def _gaussian_alone(p: Any, f: Any, distortion: float) -> float:
    from kvtheory.prediction.mixture import gaussian_rate

    residual = f - p @ f
    return gaussian_rate(np.linalg.eigvalsh((residual * p[:, None]).T @ residual).clip(0), max(distortion, 1e-12))
