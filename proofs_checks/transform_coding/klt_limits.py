"""Where the optimal transform stops being optimal, and the formula that ranks transforms stops being an error."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from scipy.integrate import quad

from kvtheory import rate
from kvtheory.quantization import Gaussian
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical, search
from proofs_checks.papers import OWN
from proofs_checks.transform_coding.optimal_transform import KLT_MUTANTS, _eigen, _rows_for_columns
from proofs_checks.transform_coding.parts import Float, definite, hadamard, real_parts

#: the sources are mixed by [[1, MIX], [MIX, 1]], which makes the KLT the sum and the difference
MIX = 0.01


def laplace_sum(x: Float, a: float, b: float) -> Float:
    """P(a s1 + b s2 > x), x >= 0, of independent Laplace s1, s2 of scale 1: (a^2 e^{-x/a} - b^2 e^{-x/b}) / (2 (a^2 - b^2))."""
    a, b = sorted((abs(a), abs(b)), reverse=True)
    if b == 0:
        return np.exp(-x / a) / 2
    if a - b < 1e-6 * a:  # the limit of equal scales
        return (2 + x / a) * np.exp(-x / a) / 4
    return (a**2 * np.exp(-x / a) - b**2 * np.exp(-x / b)) / (2 * (a**2 - b**2))


def quantised_entropy(row: Float, step: float) -> float:
    """Bits of round(y / step) for y = row . (s1, s2); exact cell masses."""
    edges = step * (np.arange(int(60 * np.abs(row).sum() / step)) + 0.5)
    tail = laplace_sum(np.asarray(edges, dtype=np.float64), *row)
    mass = np.concatenate([[1 - 2 * tail[0]], tail[:-1] - tail[1:]])
    weight = np.concatenate([[1.0], np.full(len(mass) - 1, 2.0)])
    kept = mass > 0
    return float(-(weight * mass)[kept] @ np.log2(mass[kept]))


def rate_of(analysis: Float, mixing: Float, metric: Float, step: float) -> float:
    """Bits a component of uniform quantisers and entropy codes, steps step / sqrt(w_c): each weighted error is step^2 / 12."""
    inverse = np.linalg.inv(analysis)
    steps = step / np.sqrt(np.diag(inverse.T @ metric @ inverse))
    return float(np.mean([quantised_entropy(row, s) for row, s in zip(analysis @ mixing, steps)]))


def _entropy(density: object) -> float:
    return float(quad(lambda x: -2 * density(x) * np.log2(density(x)), 0, 60, epsabs=1e-13, limit=200)[0])  # type: ignore[operator]


@claim(
    id="transform-coding/klt-any-law",
    paper=OWN,
    section="the KLT beyond Gaussian vectors",
    statement="At high rate no transform needs fewer bits than the metric KLT, whatever the law of the vectors.",
    formula="Σ_c h(y_c) + ½ log₂ w_c is least for the KLT",
    expected=Verdict.FAILS,
    functions={"metric_klt": "kvtheory.transform.metric_klt"},
    mutants=[
        *KLT_MUTANTS,
        *systematic.scales("metric_klt", fields=("variances",)),
        Mutant("identity for the KLT", "metric_klt", lambda true: lambda covariance, metric: true(np.eye(len(metric)), np.eye(len(metric)))),
    ],
    correction="transform-coding/metric-klt",
)  # fmt: skip
def klt_any_law(context: Context, *, metric_klt: Function) -> Iterator[Evidence]:
    metric = np.array([[4.0, 1.0], [1.0, 1.0]])
    root = np.linalg.cholesky(metric).T
    mixing = np.linalg.solve(root, np.array([[1.0, MIX], [MIX, 1.0]]))
    covariance = 2 * mixing @ mixing.T
    found = metric_klt(covariance, metric)
    step = 1 / 64
    inverse = np.linalg.inv(found.analysis)
    yield numerical(
        role="control",
        what="largest entry of T⁻ᵀMT⁻¹ − I: steps of one size in all coefficients",
        ran_on="M = [[4, 1], [1, 1]]", observed=float(np.abs(inverse.T @ metric @ inverse - np.eye(2)).max()), predicted=1e-13, relation="<=",
        tolerance=0.0, because="2 by 2 matrices of condition below 6",
    )  # fmt: skip
    where = f"x = L⁻ᵀ[[1, {MIX}], [{MIX}, 1]](s₁, s₂), s Laplace and independent, M = LLᵀ = [[4, 1], [1, 1]]; steps 1/64, exact cell masses"
    best, other = (rate_of(t, mixing, metric, step) for t in (found.analysis, root))

    def truth() -> float:
        klt = _entropy(lambda x: (1 + x) * np.exp(-x) / 4)
        one = _entropy(lambda x: np.exp(-x) / 2)
        # the KLT's coefficients are (1 +- MIX)(s1 +- s2)/sqrt 2; of x1 = s1 + MIX s2 the density is known too
        mixed = _entropy(lambda x: (np.exp(-x) - MIX * np.exp(-x / MIX)) / (2 * (1 - MIX**2)))
        assert abs(one - np.log2(2 * np.e)) < 1e-10
        return float(klt - 0.5 + 0.5 * np.log2(1 - MIX**2) - mixed)

    loss = context.memo("loss", truth)
    yield numerical(
        role="control",
        what="bits a component of the KLT less those of Lᵀ, uniform quantisers and entropy codes = difference of differential entropies",
        ran_on=where, observed=1 + best - other, predicted=1 + loss, tolerance=2e-5,
        because="H(round(y/Δ)) + log₂ Δ exceeds h by Δ²/24 of the Fisher information, at most 2Δ²/24 = 2e-5 bits here",
        note=f"{loss:.4f} bit a component to Lᵀ, which keeps the sources apart; the KLT adds and subtracts them, and sums look more Gaussian",
    )  # fmt: skip
    yield numerical(
        role="control",
        what="variances of the metric KLT of that pair, product of both = det(ΣM)",
        ran_on=where, observed=float(np.prod(found.variances)), predicted=float(np.linalg.det(covariance) * np.linalg.det(metric)), tolerance=1e-13,
        because="2 by 2 matrices of condition below 6",
    )  # fmt: skip
    yield numerical(
        what="bits a component of the KLT are at most those of Lᵀ",
        ran_on=f"smallest counterexample: {where}", observed=best, predicted=other, relation="<=", tolerance=2e-5 / other,
        because="cells of 1/64", note=f"variances alone would give the KLT a lead of {-0.25 * np.log2(1 - (2 * MIX / (1 + MIX**2)) ** 2):.4f} bit",
    )  # fmt: skip
    parts = real_parts(context)
    if parts:
        losses = {}
        for part in parts:
            m, s = definite(part.metric), definite(part.covariance, 1e-6)
            x = part.x - part.x.mean(axis=0)
            rates = {
                name: _spacing_rate(x, t, m)
                for name, t in (
                    ("KLT", metric_klt(s, m).analysis),
                    ("identity", np.eye(len(m))),
                    ("Hadamard", hadamard(len(m))),
                    ("PCA", _eigen(s)[1].T),
                )
            }
            least = min((r, name) for name, r in rates.items() if name != "KLT")
            losses[part.label] = (rates["KLT"] - least[0], least[1])
        worst = max(losses, key=lambda label: losses[label][0])
        yield numerical(
            role="assumption",
            what="bits a component of the KLT less those of the best of identity, Hadamard and PCA, by entropies of the coefficients as measured"
            " (spacings), largest of all heads",
            ran_on=f"{len(parts)} parts of real heads", observed=losses[worst][0], predicted=0.0, relation="<=", tolerance=0.0,
            because="a measurement, not a comparison", worst_case=f"{worst}, against {losses[worst][1]}",
            note=f"from {min(v for v, _ in losses.values()):.3f} to {losses[worst][0]:.3f} bit: where the basis matters, covariance decides, not shape",
            details={label: value for label, (value, _) in losses.items()},
        )  # fmt: skip


def _spacing_rate(x: Float, analysis: Float, metric: Float) -> float:
    """Mean over components of h(y_c) + 1/2 log2 w_c, h by spacings of order sqrt n (Vasicek); its bias is common to all bases."""
    inverse = np.linalg.inv(analysis)
    y = np.sort(x @ analysis.T, axis=0)
    n = len(y)
    m = int(np.sqrt(n))
    gaps = np.maximum(y[2 * m :] - y[: -2 * m], 1e-12 * np.ptp(y, axis=0))
    h = np.log2(gaps * n / (2 * m)).mean(axis=0)
    return float((h + 0.5 * np.log2(np.diag(inverse.T @ metric @ inverse))).mean())


#: the smallest counterexample: variances, and the slope of the two columns of T^{-1}
SPREAD, SLOPE = Fraction(1, 10_000), Fraction(1, 10)


@claim(
    id="transform-coding/product-model",
    paper=OWN,
    section="the model behind weights times variances, w_c σ_c²",
    statement="Σ_c w_c s_c g(b_c) is the weighted error of coding y = Tx, whatever the transform T and the bits.",
    formula="E eᵀMe = Σ_c (T⁻ᵀMT⁻¹)_cc (TΣTᵀ)_cc g(b_c)",
    expected=Verdict.FAILS,
    functions={"coded_distortion": "kvtheory.transform.coded_distortion"},
    mutants=[
        *systematic.scales("coded_distortion"),
        *systematic.square_dropped("coded_distortion"),
        *systematic.swapped("coded_distortion", "covariance", "metric"),
        Mutant(
            "no inverse: weights of the rows for those of T⁻¹'s columns", "coded_distortion",
            lambda true: lambda basis, covariance, metric, bits, law=None: _rows_for_columns(basis, covariance, metric, bits, law),
        ),
        Mutant(
            "bits ignored", "coded_distortion",
            lambda true: lambda basis, covariance, metric, bits, law=None: true(basis, covariance, metric, 0 * np.asarray(bits), law),
        ),
    ],
    correction="transform-coding/metric-klt",
)  # fmt: skip
def product_model(context: Context, *, coded_distortion: Function) -> Iterator[Evidence]:
    columns = np.array([[1.0, 1.0], [float(SLOPE), -float(SLOPE)]])
    t = np.linalg.inv(columns)
    covariance, metric = np.diag([1.0, float(SPREAD)]), np.eye(2)
    where = f"Σ = diag(1, {SPREAD}), M = I, columns of T⁻¹ (1, ±{SLOPE})"
    # by hand: w = 1 + a^2 and s = (1 + e/a^2)/4 for both
    by_hand = 2 * (1 + SLOPE**2) * (1 + SPREAD / SLOPE**2) / 4
    rounding = "2 by 2 matrices of condition 1e4"
    yield numerical(
        role="control",
        what=f"the model at 0 bits = (1 + a²)(1 + ε/a²)/2 = {by_hand}",
        ran_on=where, observed=coded_distortion(t, covariance, metric, np.array([0, 0])), predicted=float(by_hand), tolerance=1e-13, because=rounding,
    )  # fmt: skip
    table = rate.gaussian_table(5)
    g = table[3]
    second = coded_distortion(t, covariance, metric, np.array([3, 0]), table)
    # given 3 bits on y_1, e_1 = -g y_1 + r, and e_2 = -y_2: E e_1 e_2 = g E y_1 y_2
    square = float((1 + SPREAD / SLOPE**2) / 4)
    product = float((1 - SPREAD / SLOPE**2) / 4)
    errors = np.array([[g * square, g * product], [g * product, square]])
    weight = columns.T @ columns
    yield numerical(
        role="control",
        what="the model at 3 and 0 bits = w s (g(3) + 1)",
        ran_on=f"{where}, Lloyd-Max", observed=second, predicted=float(weight[0, 0]) * square * (g + 1), tolerance=1e-13, because=rounding,
    )  # fmt: skip
    truth = float(np.trace(weight @ errors))
    drawn = context.memo(
        "drawn", lambda: _coded_pairs(columns, covariance, context.size(200_000, 2_000_000), context.rng("pairs"))
    )
    yield numerical(
        role="control",
        what="E‖e‖² at 3 and 0 bits by the errors' correlation, E e₁e₂ = g E y₁y₂ = measured on Gaussian vectors",
        ran_on=f"{where}, Lloyd-Max, seed {context.seed}", observed=drawn[0], predicted=truth, tolerance=6 * drawn[1] / truth,
        because="six standard errors of the mean of the draws",
    )  # fmt: skip
    yield numerical(
        what="the model at 0 bits is tr(ΣM): nothing is coded, the error is the vector",
        ran_on=f"smallest counterexample: {where}", observed=coded_distortion(t, covariance, metric, np.array([0, 0])), predicted=float(1 + SPREAD),
        tolerance=1e-9, because=rounding, note=f"{float(by_hand)} for {float(1 + SPREAD)}: errors of coefficients without bits are the coefficients, and as correlated",
    )  # fmt: skip
    yield numerical(
        what="the model at 3 and 0 bits is the error",
        ran_on=f"{where}, Lloyd-Max", observed=second, predicted=truth, tolerance=1e-9, because=rounding,
    )  # fmt: skip

    worst, tries = 1.0, 0
    for d in (2, 3, 5, 8):
        spread = np.diag([1.0, *np.full(d - 1, 1e-6)])
        for _ in range(context.size(20, 400)):
            # columns that all but coincide: each carries a share of the same direction, and the shares are squared before they are added
            p = np.vstack([np.ones(d), 1e-2 * context.rng(f"columns {d} {tries}").standard_normal((d - 1, d))])
            worst = min(
                worst, coded_distortion(np.linalg.inv(p), spread, np.eye(d), np.zeros(d, int)) / np.trace(spread)
            )
            tries += 1
    yield search(
        what="the model at 0 bits over tr(ΣM), least found: at least 1, since no code of no bits does better",
        ran_on="d = 2, 3, 5, 8, one direction with nearly all the variance", worst=worst, bound=1 - 1e-9, relation=">=", tries=tries,
        optimiser="columns of T⁻¹ near one line", note="1/d is the infimum there: d equal shares of one error, squared before they are added",
    )  # fmt: skip

    parts = real_parts(context)
    codes = [rate.lloyd_max(Gaussian(), 2**b) for b in range(7)]
    levels = rate.gaussian_table(7)
    ratios, own = {}, {}
    for part in parts:
        x = part.x - part.x.mean(axis=0)
        s = part.covariance
        bits = rate.integer_bits((np.diag(s) * np.diag(part.metric))[:, None] * levels, len(s))
        deviation = np.sqrt(np.diag(s))
        coded = np.column_stack(
            [deviation[c] * codes[b].decode(codes[b].encode(x[:, c] / deviation[c])) for c, b in enumerate(bits)]
        )
        e = coded - x
        true = np.einsum("ni,ij,nj->", e, part.metric, e) / len(e)
        ratios[part.label] = true / coded_distortion(np.eye(len(s)), s, part.metric, bits, levels)
        # with the errors' own variances for g, so that only their correlation is left
        own[part.label] = true / float(((e**2).mean(axis=0) * np.diag(part.metric)).sum())
    if parts:
        far = max(ratios, key=lambda label: abs(np.log(own[label])))
        yield numerical(
            what="weighted error as measured over the model's, channels as they are (T = I), 1 bit a channel, farthest of all heads: 1 within 10 %",
            ran_on=f"{len(parts)} parts of real heads", observed=ratios[far], predicted=1.0, tolerance=0.1,
            because="the statement is one of equality; 10 % is what a shape that is not Gaussian may add", worst_case=far,
            note=f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}; with each channel's own error as measured for s g, {min(own.values()):.2f} to {max(own.values()):.2f}:"
            " that is correlation alone",
            details=ratios,
        )  # fmt: skip


def _coded_pairs(columns: Float, covariance: Float, count: int, rng: np.random.Generator) -> tuple[float, float]:
    """Mean of ||x_hat - x||^2 and its standard error: y_1 by the 8-point Lloyd-Max quantiser, y_2 dropped."""
    code = rate.lloyd_max(Gaussian(), 8)
    x = rng.standard_normal((count, 2)) * np.sqrt(np.diag(covariance))
    y = x @ np.linalg.inv(columns).T
    s = np.linalg.inv(columns) @ covariance @ np.linalg.inv(columns).T
    deviation = np.sqrt(s[0, 0])
    kept = np.column_stack([deviation * code.decode(code.encode(y[:, 0] / deviation)), np.zeros(count)])
    squares = ((kept @ columns.T - x) ** 2).sum(axis=1)
    return float(squares.mean()), float(squares.std() / np.sqrt(count))
