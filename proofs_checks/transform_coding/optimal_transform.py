"""The optimal transform: what it makes of the weighted error, and that no other transform does better where the theory says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.stats import ortho_group

from kvtheory import rate
from kvtheory.transform import Transform
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical, search
from proofs_checks.papers import OWN
from proofs_checks.transform_coding.parts import (
    Float,
    definite,
    hadamard,
    queries_of,
    random_pairs,
    real_kv_heads,
    real_parts,
)


def _built(make: Callable[[Float, Float], tuple[Float, Float]]) -> Callable[[Function], Function]:
    """metric_klt replaced by y = analysis x from `make(covariance, metric) -> (analysis, variances)`, its inverse as decoder."""

    def wrong(true: Function) -> Function:
        def mutated(covariance: Float, metric: Float) -> Transform:
            analysis, variances = make(covariance, metric)
            return Transform(analysis, np.asarray(np.linalg.inv(analysis), dtype=np.float64), variances)

        return mutated

    return wrong


def _eigen(a: Float) -> tuple[Float, Float]:
    values, vectors = np.linalg.eigh(a)
    return values[::-1], vectors[:, ::-1]


def _by_factor(factor: Callable[[Float], Float]) -> Callable[[Float, Float], tuple[Float, Float]]:
    """The construction with another factor F of the metric: F^T Sigma F = U diag U^T, analysis U^T F^T."""

    def make(covariance: Float, metric: Float) -> tuple[Float, Float]:
        f = factor(metric)
        values, u = _eigen(f.T @ covariance @ f)
        return u.T @ f.T, values

    return make


def _pca_only(covariance: Float, metric: Float) -> tuple[Float, Float]:
    """PCA's basis, rows scaled by the square roots of their weights: AATC's choice."""
    values, u = _eigen(covariance)
    w = np.einsum("ic,ij,jc->c", u, metric, u)
    return np.sqrt(w)[:, None] * u.T, w * values


def _metric_only(covariance: Float, metric: Float) -> tuple[Float, Float]:
    values, u = _eigen(metric)
    analysis = np.sqrt(values)[:, None] * u.T
    return analysis, np.diag(analysis @ covariance @ analysis.T).copy()


def _root_of_inverse(metric: Float) -> Float:
    return np.asarray(np.linalg.cholesky(np.linalg.inv(metric)), dtype=np.float64)


KLT_MUTANTS = [
    Mutant(
        "Lᵀ for L in M = LLᵀ",
        "metric_klt",
        _built(_by_factor(lambda m: np.asarray(np.linalg.cholesky(m).T, dtype=np.float64))),
    ),
    Mutant("M for its square root", "metric_klt", _built(_by_factor(lambda m: m))),
    Mutant("M⁻¹ for M", "metric_klt", _built(_by_factor(_root_of_inverse))),
    Mutant("diagonal of M only", "metric_klt", _built(_by_factor(lambda m: np.diag(np.sqrt(np.diag(m)))))),
    Mutant("PCA's basis with weights (AATC)", "metric_klt", _built(_pca_only)),
    Mutant("M's basis alone", "metric_klt", _built(_metric_only)),
    *systematic.swapped("metric_klt", "covariance", "metric"),
]


@claim(
    id="transform-coding/parseval",
    paper=OWN,
    section="the transform that arXiv 2608.14191 does not take; compare NOVA-KV, arXiv 2608.04074",
    statement="Generalised Parseval identity: in the coefficients of the metric KLT the weighted error is the plain squared error; for the"
    " metric of the queries it is the mean square error of the logits. The coefficients are uncorrelated.",
    formula="M = LLᵀ, LᵀΣL = UΛUᵀ, T = UᵀLᵀ:  eᵀMe = ‖Te‖²,  T Σ Tᵀ = Λ,  T⁻¹ = L⁻ᵀU",
    expected=Verdict.HOLDS,
    functions={"metric_klt": "kvtheory.transform.metric_klt"},
    mutants=[
        *(m for m in KLT_MUTANTS if "PCA" not in m.name),
        Mutant("PCA's basis with weights (AATC)", "metric_klt", _built(_pca_only)),
        *systematic.scales("metric_klt", fields=("analysis",)),
        *systematic.scales("metric_klt", fields=("variances",)),
        *systematic.square_dropped("metric_klt", fields=("variances",)),
    ],
)
def parseval(context: Context, *, metric_klt: Function) -> Iterator[Evidence]:
    rng = context.rng("instances")
    for d in (1, 2, 5, 16, 64):
        queries, vectors, errors = rng.standard_normal((3, 4 * d, d)) * np.exp(rng.standard_normal((3, 1, d)) / 2)
        metric = queries.T @ queries / (d * len(queries))
        where = f"d={d}, {4 * d} queries, vectors and errors at random, seed {context.seed}"
        square = ((queries @ errors.T / np.sqrt(d)) ** 2).mean(axis=0)
        yield from _identity(metric_klt, where, vectors, metric, errors, square)
    for head in real_kv_heads(context):
        part = next(p for p in real_parts(context) if p.label == f"{head.label} keys")
        q = queries_of(head, pre_rope=True)
        shrunk = definite(part.metric)
        step = np.ptp(part.x, axis=0) / 8
        errors = step * np.round(part.x / step) - part.x  # of three-bit keys
        square = head.layer.scale**2 * ((q @ errors.T) ** 2).mean(axis=1).sum(axis=0)
        square += (np.trace(shrunk) - np.trace(part.metric)) / len(shrunk) * (errors**2).sum(axis=1)
        where = f"{part.label}, 1 % of the metric's mean eigenvalue added, errors of rounding to 3 bits"
        yield from _identity(metric_klt, where, part.x - part.x.mean(axis=0), shrunk, errors, square)


def _identity(
    metric_klt: Function, where: str, vectors: Float, metric: Float, errors: Float, square: Float
) -> Iterator[Evidence]:
    """square (n,): the mean square logit error of each error, straight from the queries."""
    found = metric_klt(vectors.T @ vectors / len(vectors), metric)
    coefficients = (errors @ found.analysis.T) ** 2
    d = len(metric)
    room = 1e-14 * d * float(np.linalg.cond(metric))
    because = "the factor of a metric of that condition is known to so many digits; an error may lie along its least direction"
    i = int(np.argmax(np.abs(coefficients.sum(axis=1) / square - 1)))
    yield numerical(
        what="‖Te‖² = mean square logit error over the queries, worst error",
        ran_on=where, observed=coefficients[i].sum(), predicted=square[i], tolerance=room, because=because,
    )  # fmt: skip
    # coefficients of the vectors themselves, so that Sigma is not used twice
    y = vectors @ found.analysis.T
    gram = y.T @ y / len(y)
    size = np.sqrt(np.outer(np.diag(gram), np.diag(gram)))
    yield numerical(
        what="largest correlation of two coefficients of the vectors",
        ran_on=where, observed=np.abs(gram / size - np.eye(d)).max(), predicted=1e3 * room, relation="<=", tolerance=0.0,
        because="rounding of the largest variance, seen from the smallest: their ratio is below the metric's condition times 1e3",
    )  # fmt: skip
    worst = int(np.argmax(np.abs(np.diag(gram) / found.variances - 1)))
    yield numerical(
        what="variance of a coefficient of the vectors = the eigenvalue stated, worst component",
        ran_on=where, observed=gram[worst, worst], predicted=found.variances[worst], tolerance=1e3 * room, because="as above",
    )  # fmt: skip
    back = y @ found.synthesis.T
    yield numerical(
        what="largest difference of T⁻¹Tx from x, relative to the largest entry",
        ran_on=where, observed=np.abs(back - vectors).max() / np.abs(vectors).max(), predicted=room, relation="<=", tolerance=0.0,
        because=because,
    )  # fmt: skip


def log_product(t: Float, covariance: Float, metric: Float) -> tuple[float, Float]:
    """(f, df/dT): f = (1/2d) log2 prod_c (T Sigma T^T)_cc (T^{-T} M T^{-1})_cc, which the adversary lowers."""
    inverse = np.linalg.inv(t)
    left, right = t @ covariance, metric @ inverse
    s, w = np.einsum("ci,ci->c", left, t), np.einsum("ic,ic->c", right, inverse)
    # d w_c = -2 (T^{-T} M T^{-1} dT T^{-1})_cc
    gradient = left / s[:, None] - (inverse @ np.diag(1 / w) @ (inverse.T @ right).T).T
    scale = 1 / (len(t) * np.log(2))
    return 0.5 * scale * float(np.log(s).sum() + np.log(w).sum()), scale * gradient


def attack(start: Float, covariance: Float, metric: Float, iterations: int) -> Float:
    """The transform that gradient descent (L-BFGS) reaches from `start`."""
    d = len(covariance)

    def loss(flat: Float) -> tuple[float, Float]:
        value, gradient = log_product(flat.reshape(d, d), covariance, metric)
        return value, gradient.ravel()

    found = minimize(loss, start.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return np.asarray(found.x.reshape(d, d))


@claim(
    id="transform-coding/metric-klt",
    paper=OWN,
    section="optimal transform, Hadamard's inequality twice; NOVA-KV (arXiv 2608.04074) announces the same transform",
    statement="The transform that diagonalises covariance and metric together never loses: at high rate against any invertible transform;"
    " at every rate, with any one quantiser law, against any rotation of the metric's square root; and for Gaussian vectors it attains"
    " the rate-distortion function of the weighted error, zero-rate coefficients included.",
    formula="D(T) ∝ [∏_c (TΣTᵀ)_cc (T⁻ᵀMT⁻¹)_cc]^{1/d} ≥ (det Σ det M)^{1/d};  min_b Σ_c s_c g(b_c) is Schur-concave in s;"
    "  R(D) = Σ_c ½ log₂⁺(λ_c/θ)",
    assumptions=(
        "high rate: error variance proportional to var(y_c) 4^{−b_c}, errors uncorrelated",
        "every rate: T = QLᵀ with Q orthogonal, one law g for all coefficients (Gaussian vectors)",
    ),
    expected=Verdict.HOLDS_UNDER,
    functions={
        "metric_klt": "kvtheory.transform.metric_klt",
        "coded_distortion": "kvtheory.transform.coded_distortion",
        "basis_loss_bits": "kvtheory.transform.basis_loss_bits",
    },
    mutants=[
        *KLT_MUTANTS,
        *systematic.scales("metric_klt", fields=("variances",)),
        *systematic.scales("coded_distortion"),
        *systematic.scales("basis_loss_bits"),
        *systematic.natural_log("basis_loss_bits"),
        Mutant(
            "the metric's half left out", "basis_loss_bits",
            lambda true: lambda covariance, metric, basis: true(covariance, np.eye(len(metric)), basis),
        ),
        Mutant(
            "no inverse: weights of the rows for those of T⁻¹'s columns", "coded_distortion",
            lambda true: lambda basis, covariance, metric, bits, law=None: _rows_for_columns(basis, covariance, metric, bits, law),
        ),
    ],
)  # fmt: skip
def metric_klt(
    context: Context, *, metric_klt: Function, coded_distortion: Function, basis_loss_bits: Function
) -> Iterator[Evidence]:
    rng = context.rng("pairs")
    pairs = [
        (f"d={d}, random Σ and M, pair {i}, seed {context.seed}", s, m)
        for i, (d, s, m) in enumerate(random_pairs(rng, (2, 3, 5), context.size(2, 6)))
    ]
    parts = real_parts(context, 2)
    real = [
        (f"{p.label}, shrunk by 1 %", definite(p.covariance, 1e-4), definite(p.metric))
        for p in parts[:: len(parts) - 1]
    ]

    for where, covariance, metric in (*pairs, *real):
        d = len(metric)
        best = metric_klt(covariance, metric)
        bound = d * np.exp((np.linalg.slogdet(covariance)[1] + np.linalg.slogdet(metric)[1]) / d) * 4.0**-6
        level = np.log2(best.variances)
        bits = np.maximum(6 + 0.5 * (level - level.mean()), 0)
        condition = float(np.linalg.cond(metric))
        yield numerical(
            what="D of the metric KLT at equal slopes, 6 bits a component = d (det Σ det M)^{1/d} 4⁻⁶",
            ran_on=where, observed=coded_distortion(best, covariance, metric, bits), predicted=bound, tolerance=1e-13 * condition,
            because=f"rounding of the metric's factor, condition {condition:.1e}",
        )  # fmt: skip

        def start(
            i: int, d: int = d, covariance: Float = covariance, metric: Float = metric, where: str = where
        ) -> Float:
            named = [np.eye(d), hadamard(d), _eigen(covariance)[1].T, _eigen(metric)[1].T]
            return named[i] if i < len(named) else context.rng(f"{where} {i}").standard_normal((d, d))

        def fought(
            start: Any = start, d: int = d, covariance: Float = covariance, metric: Float = metric
        ) -> list[Float]:
            tries = context.size(7, 40) if d < 8 else 4
            return [attack(start(i), covariance, metric, 300 if d < 8 else context.size(25, 300)) for i in range(tries)]

        found = context.memo(("attack", where), fought)
        excess = [basis_loss_bits(covariance, metric, t) for t in found]
        by_hand = [log_product(t, covariance, metric)[0] for t in found]
        floor = log_product(best.analysis, covariance, metric)[0]
        yield search(
            what="bits per component that an adversary's transform saves against the metric KLT, at high rate: none",
            ran_on=where, worst=floor - min(by_hand), bound=1e-11 * condition, tries=len(found),
            optimiser="L-BFGS over all invertible transforms, from identity, Hadamard, PCA, M's basis and random ones",
            note=f"it comes within {min(by_hand) - floor:.1e} bit; largest left {max(by_hand) - floor:.2f}",
        )  # fmt: skip
        first = [start(i) for i in range(4)]
        observed = np.array([basis_loss_bits(covariance, metric, t) for t in first] + excess)
        truth = np.array([log_product(t, covariance, metric)[0] for t in first] + by_hand) - floor
        worst = int(np.argmax(np.abs(observed - truth)))
        yield numerical(
            what="1 + loss in bits of the adversary's transforms and of identity, Hadamard, PCA, M's basis = 1 + the logarithm of the ratio of"
            " products, worst of them",
            ran_on=where, observed=1 + observed[worst], predicted=1 + truth[worst], tolerance=1e-11 * condition,
            because="two logarithms of determinants of that condition, divided by d",
        )  # fmt: skip

    table = rate.gaussian_table(8)
    for where, covariance, metric in (*pairs, *real):
        d = len(metric)
        best = metric_klt(covariance, metric)
        root = np.linalg.cholesky(metric).T
        rotations = context.memo(
            ("rotations", where),
            lambda d=d, where=where: _rotations(d, context.size(8, 100), context.rng(f"rotations {where}")),  # type: ignore[misc]
        )  # type: ignore[misc]
        names = {"Lloyd-Max": table, "4⁻ᵇ": 4.0 ** -np.arange(8.0)}
        worst_ratio, tries = np.inf, 0
        for name, law in names.items():
            for budget in sorted({d // 2 + 1, 2 * d}):
                least = coded_distortion(
                    best, covariance, metric, _best_bits(best.analysis, covariance, metric, budget, law), law
                )
                # the bits of the others do not depend on the statement's functions
                given = context.memo(
                    ("bits", where, budget, name),
                    lambda b=budget, g=law, c=covariance, m=metric, r=root, every=rotations: [_best_bits(q @ r, c, m, b, g) for q in every],  # type: ignore[misc]
                )  # fmt: skip
                near = _near(rotations[0], best.analysis, root) @ root
                others = [
                    *zip((q @ root for q in rotations), given),
                    (near, _best_bits(near, covariance, metric, budget, law)),
                ]
                for t, bits in others:
                    other = coded_distortion(t, covariance, metric, bits, law)
                    worst_ratio, tries = min(worst_ratio, other / least), tries + 1
        yield search(
            what="D of a rotation QLᵀ over D of the metric KLT, integer bits, both allocated best, least of all: at least 1",
            ran_on=f"{where}; {' and '.join(names)}; ½ to 2 bits",
            worst=worst_ratio, bound=1 - 1e-10, relation=">=", tries=tries, optimiser="random rotations, and ones next to the KLT",
        )  # fmt: skip

    for where, covariance, metric in pairs[: context.size(4, 9)]:
        if len(metric) > 3:
            continue
        best = metric_klt(covariance, metric)
        for share in (0.1, 0.6):
            target = share * float(np.trace(covariance @ metric))
            theta, shannon = _water(best.variances, target)
            by_program = context.memo(
                ("program", where, share),
                lambda c=covariance, m=metric, t=target, w=where: _rate_by_program(  # type: ignore[misc]
                    c, m, t, context.rng(f"program {w}")
                ),
            )  # type: ignore[misc]
            dead = int((best.variances <= theta).sum())
            yield numerical(
                what="R(D) of a Gaussian under the M-weighted error, by minimising the mutual information over error covariances ="
                " reverse water-filling of the metric KLT",
                ran_on=f"{where}; D = {share} tr(ΣM), {dead} of {len(metric)} coefficients without bits",
                observed=1 + by_program, predicted=1 + shannon, tolerance=1e-7,
                because="SLSQP stops where a step gains less than 1e-12; the optimum is flat, or on a bound that it meets to the last digits",
            )  # fmt: skip


def _rows_for_columns(basis: Any, covariance: Float, metric: Float, bits: Float, law: Any) -> float:
    t = basis.analysis if isinstance(basis, Transform) else np.asarray(basis)
    g = 4.0 ** -np.asarray(bits, dtype=float) if law is None else np.asarray(law)[bits]
    return float((np.diag(t @ covariance @ t.T) * np.diag(t @ metric @ t.T) * g).sum())


def _rotations(d: int, count: int, rng: np.random.Generator) -> list[Float]:
    return [np.asarray(ortho_group.rvs(d, random_state=rng)) for _ in range(count)]


def _near(rotation: Float, analysis: Float, root: Float) -> Float:
    """The rotation Q of the KLT itself, T = Q L^T, turned by a hundredth towards another."""
    q = analysis @ np.linalg.inv(root)
    return np.asarray(np.linalg.qr(q + 0.01 * rotation)[0])


def _best_bits(t: Float, covariance: Float, metric: Float, budget: int, law: Float) -> Any:
    """The best integer bits of a basis, priced by hand, so that a wrong `coded_distortion` cannot help itself."""
    inverse = np.linalg.inv(t)
    scores = np.diag(t @ covariance @ t.T) * np.diag(inverse.T @ metric @ inverse)
    return rate.integer_bits(scores[:, None] * law, budget)


def _water(variances: Float, target: float) -> tuple[float, float]:
    """(theta, R in bits a vector) with sum min(lambda, theta) = target, by bisection."""
    low, high = 0.0, float(variances.max())
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(variances, middle).sum() < target else (low, middle)
    return high, float(0.5 * np.log2(np.maximum(variances / high, 1)).sum())


def _rate_by_program(covariance: Float, metric: Float, target: float, rng: np.random.Generator) -> float:
    """min 1/2 log2 det Sigma / det E over error covariances 0 < E <= Sigma with tr(M E) <= target, no eigenvectors of Sigma M used.

    E = C V diag(p) V^T C^T with Sigma = C C^T, V any rotation (Cayley transform of a skew matrix), 0 < p <= 1: rate -1/2 sum log2 p.
    """
    d = len(metric)
    c = np.linalg.cholesky(covariance)
    inner = c.T @ metric @ c
    upper = np.triu_indices(d, 1)

    def cost(z: Float) -> Float:
        skew = np.zeros((d, d))
        skew[upper] = z[d:]
        skew -= skew.T
        v = np.linalg.solve(np.eye(d) + skew, np.eye(d) - skew)
        return np.asarray(np.einsum("ic,ij,jc->c", v, inner, v))

    options: Any = {"maxiter": 500, "ftol": 1e-12}
    within: Any = {"type": "ineq", "fun": lambda z: (target - cost(z) @ z[:d]) / target}
    found = [
        minimize(  # type: ignore[call-overload]
            lambda z: -0.5 * np.log2(z[:d]).sum(),
            np.concatenate([np.full(d, target / np.trace(inner)), rng.standard_normal(len(upper[0]))]),
            method="SLSQP", bounds=[(1e-9, 1.0)] * d + [(-20, 20)] * len(upper[0]),
            constraints=within,
            options=options,
        )
        for _ in range(4)
    ]  # fmt: skip
    return min((float(f.fun) for f in found if f.success), default=np.nan)
