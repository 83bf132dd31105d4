"""Are the errors of a quantiser independent over tokens? The paper's noise model assumes it; a deterministic code repeats itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from scipy.special import ndtr

from kvtheory import rate
from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical, statistical
from proofs_checks.papers import OWN
from proofs_checks.transform_coding.instances import PAPER
from proofs_checks.transform_coding.parts import Float, real_parts
from proofs_checks.transform_coding.quantiser_noise import code_of, dithered

#: nodes per cell of the outer integral; the integrand is smooth there
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)


def correlation_of_errors(code: rate.Quantizer, rho: float) -> float:
    """corr(e_1, e_2), e = Q(x) - x, of two standard normal numbers of correlation rho: inner expectation closed, outer by quadrature.

    E[Q(x_2) | x_1] = sum_j y_j P(cell j | x_1) with x_2 | x_1 ~ N(rho x_1, 1 - rho^2).
    """
    edges = np.concatenate([[-10.0], code.thresholds, [10.0]])
    half = 0.5 * np.diff(edges)[:, None]
    x = ((0.5 * (edges[:-1] + edges[1:]))[:, None] + half * _NODES).ravel()
    mass = (half * _WEIGHTS).ravel() * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi)
    e = code.decode(code.encode(x)) - x
    below = ndtr((code.thresholds[None] - rho * x[:, None]) / np.sqrt(1 - rho**2))
    cells = np.diff(below, axis=1, prepend=0.0, append=1.0)
    return float(mass @ (e * (cells @ code.points - rho * x)) / (mass @ e**2))


def neighbours(e: Float) -> float:
    """Correlation of the errors (n, d) of neighbouring tokens, all channels together; e has channel means 0."""
    return float((e[1:] * e[:-1]).sum() / (e**2).sum())


def _drift(rng: np.random.Generator, tokens: int, channels: int, rho: float) -> Float:
    """Normal channels whose neighbouring tokens correlate by rho (autoregressive)."""
    x = rng.standard_normal((tokens, channels))
    for i in range(1, tokens):
        x[i] = rho * x[i - 1] + np.sqrt(1 - rho**2) * x[i]
    return x


def _errors(x: Float, bits: int) -> Float:
    code = code_of(bits)
    return np.asarray(code.decode(code.encode(x)) - x)


#: correlation of neighbouring tokens in the synthetic caches
RHO = 0.5


def _dithering(true: Function) -> Function:
    """A code with a random shift of its own for every number: what the model assumes."""

    class Dithered:
        def __init__(self, code: rate.Quantizer) -> None:
            self.points, self.thresholds, self._code = code.points, code.thresholds, code
            self._rng = np.random.default_rng(0)

        def encode(self, x: Float) -> Float:
            x = np.asarray(x, dtype=float)
            return np.asarray(x + dithered(self._rng, x, np.full(x.shape, 0.3)))

        def decode(self, coded: Float) -> Float:
            return coded

    return lambda source, size: Dithered(true(source, size))


def _changed(points: Callable[[Float], Float]) -> Callable[[Function], Function]:
    return lambda true: lambda source, size: rate.Quantizer.nearest(points(true(source, size).points))


@claim(
    id="transform-coding/token-independence",
    paper=PAPER,
    section="Theorem 1, the noise model",
    statement="The errors that a quantiser makes on the keys are independent from token to token.",
    formula="corr(e_ic, e_jc) = 0 for i ≠ j",
    expected=Verdict.FAILS,
    functions={"lloyd_max": "kvtheory.rate.lloyd_max"},
    mutants=[
        Mutant("with dither", "lloyd_max", _dithering),
        Mutant("points twice as far", "lloyd_max", _changed(lambda p: 2 * p)),
        Mutant("equal steps", "lloyd_max", _changed(lambda p: np.linspace(p[0], p[-1], len(p)) if len(p) > 2 else 1.3 * p)),
        Mutant("one bit more", "lloyd_max", lambda true: lambda source, size: true(source, 2 * size)),
    ],
    correction="transform-coding/error-correlation",
)  # fmt: skip
def token_independence(context: Context, *, lloyd_max: Function) -> Iterator[Evidence]:
    from kvtheory.quantization import Gaussian

    codes = {bits: lloyd_max(Gaussian(), 2**bits) for bits in (1, 2, 3, 4)}
    level = 1 - context.alpha(4)
    tokens, channels = context.size((1024, 512), (4096, 512))

    def correlations(e: Float) -> Float:
        """One estimate a group of 16 channels."""
        return np.array([neighbours(part) for part in np.array_split(e, channels // 16, axis=1)])

    x = context.memo("drift", lambda: _drift(context.rng("drift"), tokens, channels, RHO))
    dither = context.memo("dither", lambda: correlations(dithered(context.rng("dither"), x, np.full(channels, 0.5))))
    yield statistical(
        role="control", what="1 + correlation of the errors of neighbouring tokens under subtractive dither = 1 within 2 %",
        ran_on=f"{tokens} tokens, {channels} normal channels, neighbours correlated by {RHO}, seed {context.seed}", interval=mean_interval(1 + dither, level),
        predicted=1.0, margin=0.02,
    )  # fmt: skip
    # one bit, two tokens: cov(sign x1, sign x2) = (2/pi) arcsin rho
    exact_1 = float((4 / np.pi**2 * np.arcsin(RHO) - 2 * (2 / np.pi) * RHO + RHO) / (1 - 2 / np.pi))
    for bits in (1, 2, 3):
        found = correlations(codes[bits].decode(codes[bits].encode(x)) - x)
        truth = (
            exact_1
            if bits == 1
            else context.memo(("exact", bits), lambda bits=bits: correlation_of_errors(code_of(bits), RHO))  # type: ignore[misc]
        )  # type: ignore[misc]
        yield statistical(
            role="control",
            what=f"1 + correlation of the errors of neighbouring tokens, {bits} bits, = 1 + that of a normal pair ("
            + ("closed form: (4/π² arcsin ρ + ρ − 4ρ/π)/(1 − 2/π)" if bits == 1 else "by quadrature") + "), within 2 %",
            ran_on=f"{tokens} tokens, {channels} normal channels, neighbours correlated by {RHO}, seed {context.seed}", interval=mean_interval(1 + found, level),
            predicted=1 + truth, margin=0.02,
        )  # fmt: skip
    yield numerical(
        what="1 + correlation of the errors of neighbouring tokens, 1 bit, = 1",
        ran_on=f"{tokens} tokens, {channels} normal channels, neighbours correlated by {RHO}, seed {context.seed}",
        observed=1 + neighbours(codes[1].decode(codes[1].encode(x)) - x), predicted=1.0, tolerance=5 / np.sqrt(tokens * channels),
        because="five standard deviations of the correlation of independent errors, 1/√(n d)",
        note="two equal tokens make the same error twice, whatever the number of bits",
    )  # fmt: skip

    keys = [p for p in real_parts(context) if p.kind == "keys"]
    for bits in (1, 2, 3, 4) if keys else ():
        found_of: dict[str, float] = {}
        unlike: dict[str, float] = {}
        rounds = []
        for part in keys:
            scaled = (part.x - part.x.mean(axis=0)) / part.x.std(axis=0)
            e = codes[bits].decode(codes[bits].encode(scaled)) - scaled
            e -= e.mean(axis=0)
            found_of[part.label] = neighbours(e)
            # the same errors in another order of the tokens: what chance makes of them
            rng = context.rng(f"{part.label} {bits}")
            rounds.append([neighbours(e[rng.permutation(len(e))]) for _ in range(20)])
            unlike[part.label] = neighbours(scaled)
        spread = float(np.std(rounds))
        worst = max(found_of, key=lambda label: found_of[label])
        yield numerical(
            what=f"1 + correlation of the errors of neighbouring tokens, {bits} bits, largest of all heads, = 1",
            ran_on=f"keys before RoPE of {len(keys)} KV heads (real heads), Gaussian Lloyd-Max at each channel's deviation",
            observed=1 + found_of[worst], predicted=1.0, tolerance=5 * spread, because=f"five standard deviations of the same errors with tokens permuted, {spread:.4f}",
            worst_case=worst, note=f"{min(found_of.values()):.3f} to {found_of[worst]:.3f}, where neighbouring keys correlate by {min(unlike.values()):.2f} to {max(unlike.values()):.2f}",
            details=found_of,
        )  # fmt: skip


@claim(
    id="transform-coding/error-correlation",
    paper=OWN,
    section="the noise model of arXiv 2608.14191 for centroid codes",
    statement="The errors of two tokens under a Lloyd-Max code correlate by D(b) times the correlation of what is coded, plus terms of"
    " its third power: independence comes with bits, or with dither, and not by itself.",
    formula="corr(e_i, e_j) = D(b) ρ + O(ρ³)",
    assumptions=("normal pairs of correlation ρ",),
    expected=Verdict.HOLDS_UNDER,
    functions={"gaussian_table": "kvtheory.rate.gaussian_table"},
    mutants=[
        Mutant("4⁻ᵇ for D(b)", "gaussian_table", lambda true: lambda levels: 4.0 ** -np.arange(levels)),
        Mutant("no correlation", "gaussian_table", lambda true: np.zeros),
        Mutant("D(b)² for D(b)", "gaussian_table", lambda true: lambda levels: true(levels) ** 2),
        *systematic.scales("gaussian_table"),
        *systematic.square_dropped("gaussian_table"),
    ],
)  # fmt: skip
def error_correlation(context: Context, *, gaussian_table: Function) -> Iterator[Evidence]:
    table = gaussian_table(6)
    for bits in range(1, 6):
        small = context.memo(
            bits,
            lambda bits=bits: [correlation_of_errors(code_of(bits), rho) for rho in (0.02, 0.04)],  # type: ignore[misc]
        )  # type: ignore[misc]
        # the slope at 0 of a ρ + c ρ³, from two correlations
        slope = (8 * small[0] / 0.02 - 2 * small[1] / 0.04) / 6
        yield numerical(
            what=f"slope of corr(e₁, e₂) in ρ at 0, {bits} bits, = D(b)", ran_on="normal pairs, by quadrature at ρ = .02 and .04, ρ³ eliminated",
            observed=slope, predicted=table[bits], tolerance=1e-4,
            because="the term in ρ⁵ is left: 4 ρ⁴ of it at ρ = .02, and its coefficient is at most 1/D(b) of the slope",
        )  # fmt: skip
    if keys := [p for p in real_parts(context) if p.kind == "keys"]:
        slopes = {}
        for bits in (1, 2):
            pairs = []
            for part in keys:
                x = (part.x - part.x.mean(axis=0)) / part.x.std(axis=0)
                e = _errors(x, bits)
                e -= e.mean(axis=0)
                rho = (x[1:] * x[:-1]).mean(axis=0)
                pairs.append(np.stack([rho, (e[1:] * e[:-1]).sum(axis=0) / (e**2).sum(axis=0)]))
            rho, r = np.concatenate(pairs, axis=1)
            slopes[bits] = (float(rho @ r / (rho @ rho)), float(np.corrcoef(rho, r)[0, 1]), float(np.abs(rho).max()))
        yield numerical(
            role="assumption",
            what="slope of the errors' correlation on the keys', neighbouring tokens, channel by channel, 2 bits, over D(2)",
            ran_on=f"keys before RoPE of {len(keys)} KV heads (real heads)", observed=slopes[2][0] / table[2], predicted=1.0, tolerance=0.5,
            because="a measurement, not a comparison: channels correlate by up to "
            f"{slopes[2][2]:.2f}, where the cube counts, and are not normal",
            note=f"1 bit: slope {slopes[1][0]:.3f} for D(1) = {table[1]:.3f}; correlation over channels {slopes[1][1]:.2f} and {slopes[2][1]:.2f}",
        )  # fmt: skip
