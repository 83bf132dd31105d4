"""Uniform quantisers with an entropy code against Lloyd-Max at equal squared error: the classical quarter bit, and what few bits do to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy import special
from scipy.optimize import brentq

from kvtheory.quantization import Gaussian, Laplace
from proofs_checks import mutants as systematic
from proofs_checks.claim import Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical
from proofs_checks.papers import OWN
from proofs_checks.quantizers.instruments import (
    PRINTED_BITS,
    Array,
    farthest_from_digits,
    highest,
    normal_constant,
    richardson,
    worst,
)

#: bits that the entropy-coded one needs less than b at the error of 2^b Lloyd-Max points, to four digits
SAVED = {"normal": ("0.0335", "0.2009", "0.3178", "0.3865"), "Laplace": ("0.5196", "0.6719", "0.7741", "0.8448")}
LAWS: dict[str, Any] = {"normal": Gaussian(), "Laplace": Laplace(scale=2**-0.5)}
#: differential entropies at variance 1, in bits
ENTROPY = {"normal": 0.5 * np.log2(2 * np.pi * np.e), "Laplace": 0.5 * np.log2(2 * np.e**2)}
#: (1/12) (int f^{1/3})^3 = 4.5: int f^{1/3} = 3 (4 s^2)^{1/3} at s = 2^{-1/2}
LAPLACE_CONSTANT = 4.5
#: log2(pi e / 6) / 2, in decibels of squared error 10 log10(pi e / 6) = 1.533
QUARTER = 0.5 * np.log2(np.pi * np.e / 6)


def _below(name: str, x: Array) -> tuple[Array, Array, Array]:
    """Integrals of f, t f and t^2 f up to x, in closed form."""
    if name == "normal":
        density = np.exp(-0.5 * x * x) / np.sqrt(2 * np.pi)
        return special.ndtr(x), -density, special.ndtr(x) - np.where(np.isfinite(x), x, 0.0) * density
    s, a = 2**-0.5, np.minimum(np.abs(x), 600.0)
    tail = 0.5 * np.exp(-a / s)
    square = (a * a + 2 * a * s + 2 * s * s) * tail
    return np.where(x < 0, tail, 1 - tail), -(a + s) * tail, np.where(x < 0, square, 2 * s * s - square)


def _cells(name: str, edges: Array) -> tuple[Array, Array, Array]:
    """The same over the cells between ascending edges. Both laws are symmetric: cells right of 0 are taken from their mirror, without 1 - tail."""
    low, high = edges[:-1], edges[1:]
    right = low >= 0
    a, b = np.where(right, -high, low), np.where(right, -low, high)
    mass, first, second = (y - x for x, y in zip(_below(name, a), _below(name, b)))
    return mass, np.where(right, -first, first), second


def _own_entropy_coded(name: str, step: float) -> tuple[float, float]:
    reach = 38.0 if name == "normal" else 60.0
    count = int(np.ceil(reach / step))
    mass, first, second = _cells(name, step * (np.arange(-count, count + 2, dtype=np.float64) - 0.5))
    mass, first, second = (x[mass > 1e-300] for x in (mass, first, second))
    return float(-(mass * np.log2(mass)).sum()), float((second - first**2 / mass).sum())


def _own_lloyd(name: str, size: int) -> float:
    """Least distortion of `size` points by plain Lloyd iteration."""
    points = special.ndtri((np.arange(size) + 0.5) / size)
    for _ in range(20_000):
        edges = np.concatenate([[-np.inf], 0.5 * (points[:-1] + points[1:]), [np.inf]])
        mass, first, second = _cells(name, edges)
        moved = first / mass
        if np.abs(moved - points).max() < 1e-13:
            break
        points = moved
    return float((second - 2 * points * first + points**2 * mass).sum())


def _own_bits(name: str, distortion: float) -> float:
    start = np.sqrt(12 * distortion)
    step = brentq(lambda x: _own_entropy_coded(name, x)[1] - distortion, start, 4 * start, xtol=1e-14, rtol=1e-14)
    return _own_entropy_coded(name, float(step))[0]


def _middles(true: Callable[..., Any]) -> Callable[..., Any]:
    """Cells decoded to their middles: D is that much more."""

    def wrong(law: Any, step: float, offset: float = 0.0) -> tuple[float, float]:
        from kvtheory.rate import cell_integrals

        bits, _ = true(law, step, offset)
        edges = step * (np.arange(-int(40 / step), int(40 / step) + 2, dtype=np.float64) - 0.5)
        return bits, float(cell_integrals(law, edges, 0.5 * (edges[:-1] + edges[1:]))[2].sum())

    return wrong


@claim(
    id="quantizers/entropy-coded-uniform",
    paper=OWN,
    section="scalar quantisation: Panter and Dite (1951), Gish and Pierce (1968), with exact numbers at few bits",
    statement=(
        "At the squared error of 2^b Lloyd-Max points a uniform quantiser with centroids and ideal code lengths needs .0335, "
        ".2009, .3178, .3865 bits "
        "less than b for the normal law at b = 1, 2, 3, 4, and .4674 in the limit; for the Laplace law .5196, .6719, .7741, "
        ".8448, and .9347. For the "
        "normal law it stays within half log2(π e/6) = .2546 bit, 1.53 dB, of the distortion-rate function at every step, and "
        "tends to that."
    ),
    formula="R(D) − h + ½ log2(2π e D) → ½ log2(π e/6);  saved in the limit: ½ log2(√3 π/2) − that = .4674;  Laplace: ½ log2(4.5 · 6/e²) = .9347",
    expected=Verdict.HOLDS,
    functions={
        "entropy_coded": "kvtheory.rate.entropy_coded",
        "bits_at": "kvtheory.rate.entropy_coded_bits",
        "lloyd_max": "kvtheory.rate.lloyd_max",
    },
    mutants=[
        *systematic.scales("bits_at"),
        *systematic.natural_log("bits_at"),
        *systematic.scales("entropy_coded"),
        Mutant("cells decoded to their middles", "entropy_coded", _middles),
        Mutant("an edge at the centre, where the mass is", "bits_at", lambda true: lambda law, distortion: true(law, distortion, 0.5)),
        Mutant("Δ²/12 for the squared error at every step", "bits_at", lambda true: lambda law, distortion: _entropy_alone(law, np.sqrt(12 * distortion))),
        Mutant("one point more for Lloyd-Max", "lloyd_max", lambda true: lambda law, size: true(law, size + 1)),
    ],
)  # fmt: skip
def entropy_coded_uniform(context: Context, *, entropy_coded: Any, bits_at: Any, lloyd_max: Any) -> Iterator[Evidence]:
    steps = (0.1, 0.5, 1.0, 2.0, 3.0)
    for which, place in (("bits", 0), ("squared error", 1)):
        own = context.memo("own", lambda: {(n, x): _own_entropy_coded(n, x) for n in LAWS for x in steps})
        case, seen, true = worst(
            [(f"{n}, step {x}", entropy_coded(LAWS[n], x)[place], got[place]) for (n, x), got in own.items()]
        )
        yield numerical(
            what=f"{which} of the uniform quantiser = its value from closed-form cells", ran_on="both laws, steps .1 to 3",
            observed=seen, predicted=true,
            tolerance=1e-9, because="second moments of order 10 subtracted to 1e-3: 1e-11", worst_case=case,
        )  # fmt: skip
    for name, law in LAWS.items():
        errors = context.memo(("lloyd", name), partial(_all_errors, name))
        case, seen, true = worst([(f"b={b}", lloyd_max(law, 2**b).distortion(law), errors[b]) for b in PRINTED_BITS])
        yield numerical(
            what=f"squared error of 2^b Lloyd-Max points, {name} law, = its value by Lloyd iteration", ran_on="b = 1..4",
            observed=seen, predicted=true,
            tolerance=1e-9, because="Lloyd iteration run to 1e-13", worst_case=case,
        )  # fmt: skip
        own_bits = context.memo(("bits", name), partial(_all_bits, name, errors))
        needed = {b: bits_at(law, errors[b]) for b in PRINTED_BITS}
        case, seen, true = worst([(f"b={b}", needed[b], own_bits[b]) for b in PRINTED_BITS])
        yield numerical(
            what=f"bits needed at that squared error, {name} law, = their value from closed-form cells", ran_on="b = 1..4",
            observed=seen, predicted=true,
            tolerance=1e-8, because="a root found to 1e-14; D is exact to 1e-11", worst_case=case,
        )  # fmt: skip
        printed = zip(PRINTED_BITS, SAVED[name])
        case, seen, unit = farthest_from_digits([(f"b={b}", b - needed[b], text) for b, text in printed])
        yield numerical(
            what=f"bits saved, {name} law, are {' '.join(SAVED[name])} to four digits: |difference| within half a unit of the last",
            ran_on="b = 1..4", observed=seen, predicted=unit, relation="<=", tolerance=1e-9, because="both exact to 1e-8",
            worst_case=case,
        )  # fmt: skip
        saved = np.array([b - bits_at(law, lloyd_max(law, 2**b).distortion(law)) for b in (6, 7, 8)])
        limit, left = richardson(saved)
        constant = normal_constant() if name == "normal" else LAPLACE_CONSTANT
        yield numerical(
            what=f"limit of the bits saved, {name} law, = ½ log2 of Panter and Dite's constant over 2^(2h)/12",
            ran_on="b = 6..8, Richardson", observed=limit,
            predicted=0.5 * np.log2(12 * constant) - ENTROPY[name], tolerance=2 * left / limit,
            because="twice the last change of the extrapolated value",
        )  # fmt: skip
        bits, error = entropy_coded(law, 0.02)
        yield numerical(
            what=f"small steps, {name} law: R − h + ½ log2(2π e D) = ½ log2(π e/6) = .2546", ran_on="step .02",
            observed=bits - ENTROPY[name] + 0.5 * np.log2(2 * np.pi * np.e * error), predicted=QUARTER, tolerance=1e-3,
            because="the Laplace law's kink in one cell: of order step²", note=f"{10 * np.log10(np.pi * np.e / 6):.3f} dB",
        )  # fmt: skip
    gaps = []
    for step in np.geomspace(0.05, 5, 60):
        bits, error = entropy_coded(LAWS["normal"], float(step))
        gaps.append((f"step {step:.2f}", bits + 0.5 * np.log2(error), QUARTER))
    case, seen, bound = highest(gaps)
    yield numerical(
        what="R − ½ log2(1/D) ≤ .2546 for the normal law at every step, where it comes nearest", ran_on="60 steps from .05 to 5",
        observed=seen,
        predicted=bound, relation="<=", tolerance=1e-9, because="R and D exact to 1e-12", tightness=seen / bound, worst_case=case,
    )  # fmt: skip


def _all_errors(name: str) -> dict[int, float]:
    return {b: _own_lloyd(name, 2**b) for b in PRINTED_BITS}


def _all_bits(name: str, errors: dict[int, float]) -> dict[int, float]:
    return {b: _own_bits(name, error) for b, error in errors.items()}


def _entropy_alone(law: Any, step: float) -> float:
    from kvtheory.rate import entropy_coded

    return entropy_coded(law, step)[0]
