"""Statistical properties: what no codec can do, what each law says, and streams of random numbers that meet.

Every comparison is an interval at level 1 - ALPHA; "fails" and "holds" are said only where the whole interval lies on one side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvtheory.randomness import generator
from kvtheory.statistics import Interval, mean_interval
from proofs_checks.conform.instances import DTYPES
from proofs_checks.conform.registry import ALPHA, Asked, NotSettled, prop
from proofs_checks.conform.search import Skip, Violation
from proofs_checks.conform.subject import ForeignError

Array = NDArray[Any]
#: what a law's mean may be off by: rounding of norms to 16 bits costs less than a thousandth, a wrong codebook a tenth
MARGIN = 0.02
#: the same where rotation or sketch cannot be drawn anew: one sketch of d rows errs by about 1/sqrt(2 d) of its rows' lengths
ONE_SKETCH = 0.1
SEEDS = 24
#: of independent numbers, beside those of a seed
DRAWS = 8


def _dtype(asked: Asked) -> Any:
    return DTYPES["float32" if "float32" in asked.sizes.dtypes else asked.sizes.dtypes[0]]


def _normal(asked: Asked, purpose: str, tokens: int, *, unit: bool = False) -> tuple[Array, Array]:
    """Keys and values (1, tokens, d) in float64; of unit length with `unit`."""
    rng = generator(0, f"conform {purpose}")
    d, h = asked.sizes.usual, asked.sizes.heads[0]
    out = []
    for _ in range(2):
        x = rng.standard_normal((h, max(1, tokens // h), d))
        out.append(x / np.linalg.norm(x, axis=-1, keepdims=True) if unit else x)
    return out[0], out[1]


def _sides(asked: Asked, through: Any, keys: Array, values: Array) -> list[tuple[Array, Array]]:
    """(true, decoded) rows in float64 of the sides that a claim is about."""
    pairs = [(keys, through.keys), (values, through.values)]
    return [
        (x.reshape(-1, x.shape[-1]), y.astype(np.float64).reshape(-1, x.shape[-1])) for x, y in pairs[: 1 if "qjl" in asked.claims else 2]
    ]  # fmt: skip


def _errors(asked: Asked, keys: Array, values: Array, what: str, **options: Any) -> tuple[Array, Array]:
    """Of each vector: ||x - x'||^2 / ||x||^2, and <x, x'> / ||x||^2."""
    dtype = _dtype(asked)
    through = asked.run(keys.astype(dtype), values.astype(dtype), what, **options)
    errors, along = [], []
    for x, y in _sides(asked, through, keys, values):
        squares = (x**2).sum(axis=-1)
        errors.append(((y - x) ** 2).sum(axis=-1) / squares)
        along.append((y * x).sum(axis=-1) / squares)
    return np.concatenate(errors), np.concatenate(along)


def _judge(interval: Interval, predicted: float, margin: float, what: str, said: str) -> str:
    """Equivalence: `said` if the interval lies within `margin` (relative), Violation if all of it lies outside."""
    low, high = predicted * (1 - margin), predicted * (1 + margin)
    text = f"{said}: {interval.estimate:.5g} ({interval.low:.5g} to {interval.high:.5g}), exact {predicted:.5g}"
    if interval.high < low or interval.low > high:
        raise Violation(text, what)
    if interval.low < low or interval.high > high:
        raise NotSettled(text)
    return text


@prop(
    "rate-bound",
    "no codec errs by less than 4^-R on Gaussian numbers with the R bits a number that it holds (Shannon): else it holds more than it shows",
)
def rate_bound(asked: Asked) -> str:
    keys, values = _normal(asked, "rate bound", 1024)
    dtype = _dtype(asked)
    what = f"Gaussian {keys.shape} {np.dtype(dtype).name}"
    through = asked.run(keys.astype(dtype), values.astype(dtype), what, fresh=False)
    # against the numbers before they were rounded to their type: a Markov chain, so that the bound holds whatever their type
    error = np.concatenate(
        [
            np.square(y.astype(np.float64) - x).mean(axis=-1).ravel()
            for x, y in ((keys, through.keys), (values, through.values))
        ]
    )
    rate = (8 * through.held + 64) / (keys.size + values.size)  # 64 bits for the length of what is held
    asked.measured |= {"distortion": float(error.mean()), "rate": rate}
    bound = 4.0**-rate
    high = mean_interval(error, 1 - 2 * ALPHA).high
    text = f"distortion {error.mean():.4g} at {rate:.3f} bits a number, 4^-R = {bound:.4g}"
    if high < bound:
        raise Violation(f"{text}: what decodes is not all in what is held", what)
    return text


@prop("useful", "the error is less than that of decoding zeros (an unbiased codec may err by more)")
def useful(asked: Asked) -> str:
    if asked.unbiased:
        raise Skip("unbiased codecs err by more than zeros at few bits, and by right")
    keys, values = _normal(asked, "useful", 512)
    what = f"Gaussian {keys.shape}"
    errors, _ = _errors(asked, keys, values, what)
    interval = mean_interval(errors, 1 - ALPHA)
    if interval.low > 1:
        raise Violation(f"the error is {interval.estimate:.3g} of the mean square of the numbers themselves", what)
    return f"{interval.estimate:.4g} of the mean square of the numbers"


@prop("widths", "one bit more leaves less error, from 1 to 4 bits, as far as these are taken")
def widths(asked: Asked) -> str:
    if not asked.widths:
        raise Skip("the codec is not built from bits")
    keys, values = _normal(asked, "widths", 512)
    found: dict[int, float] = {}
    refused = []
    for bits in (1, 2, 3, 4):
        what = f"Gaussian {keys.shape}, bits = {bits}"
        try:
            asked.subject.ask(
                "through", [x[:, :64].astype(_dtype(asked)) for x in (keys, values)], options={"bits": bits}
            )
        except ForeignError as problem:
            refusal = problem.stage == "build" or ("ValueError" in problem.kinds and "bit" in problem.message.lower())
            if not refusal:
                raise Violation(f"at {bits} bits: {problem}", what) from None
            refused.append(bits)
            continue
        errors, _ = _errors(asked, keys, values, what, bits=bits)
        found[bits] = float(errors.mean())
        below = [b for b in found if b < bits]
        if below and not found[bits] < found[max(below)]:
            raise Violation(f"{found[max(below)]:.4g} at {max(below)} bits, {found[bits]:.4g} at {bits}", what)
    if len(found) < 2:
        raise Skip(f"it takes {', '.join(map(str, found)) or 'none'} of 1 to 4 bits")
    listed = ", ".join(f"{error:.4g} at {b}" for b, error in found.items())
    return listed + (f"; {', '.join(map(str, refused))} refused" if refused else "")


def _by_seed(asked: Asked, purpose: str, rows: int) -> tuple[Array, Array]:
    """(errors, shares of the length) each a mean over `rows` unit vectors under one seed; of one seed by vectors where there is no seed."""
    if not asked.seeded:
        keys, values = _normal(asked, purpose, 4096, unit=True)
        return _errors(asked, keys, values, f"{purpose}, unit vectors {keys.shape}")
    errors, along = [], []
    for seed in range(SEEDS):
        keys, values = _normal(asked, f"{purpose} {seed}", rows, unit=True)
        one = _errors(asked, keys, values, f"{purpose}, unit vectors {keys.shape}, seed {seed}", seed=seed)
        errors.append(one[0].mean())
        along.append(one[1].mean())
    return np.array(errors), np.array(along)


def _bits(asked: Asked) -> int:
    if asked.bits is None or asked.bits != int(asked.bits) or asked.bits < 1:
        raise Skip("the law is that of whole bits, and none are claimed")
    return int(asked.bits)


@prop(
    "law",
    "the error on random unit vectors is that of the algorithm that the codec claims to be, computed exactly, within 2 %",
)
def law(asked: Asked) -> str:
    from kvtheory import quantization

    d = asked.sizes.usual
    for claim, exact in (
        ("turboquant-mse", quantization.mse_distortion),
        ("turboquant-prod", quantization.prod_distortion),
        ("qjl", lambda dim, bits: quantization.qjl_distortion(dim, bits * dim)),
    ):
        if claim not in asked.claims:
            continue
        predicted = exact(d, _bits(asked))
        if claim == "turboquant-mse":
            # exact for any one rotation: the vectors are uniform on the sphere
            keys, values = _normal(asked, "law", 12_000, unit=True)
            what = f"unit vectors {keys.shape}"
            samples, margin = _errors(asked, keys, values, what)[0], MARGIN
        else:
            what = f"unit vectors, {SEEDS} seeds" if asked.seeded else "unit vectors, one sketch"
            samples = _by_seed(asked, "law", 512)[0]
            margin = MARGIN if asked.seeded else ONE_SKETCH
        asked.measured["law"] = {"claim": claim, "observed": float(samples.mean()), "exact": predicted}
        return _judge(
            mean_interval(samples, 1 - ALPHA), predicted, margin, what, f"{claim} at {_bits(asked)} bits, d = {d}"
        )
    if "lossless" in asked.claims:
        keys, values = (x.astype(_dtype(asked)) for x in _normal(asked, "law", 256))
        through = asked.run(keys, values, "Gaussian numbers")
        if through.keys.tobytes() != keys.tobytes() or through.values.tobytes() != values.tobytes():
            raise Violation("lossless is claimed, other numbers are decoded", f"Gaussian {keys.shape} {keys.dtype}")
        return "bit for bit"
    raise Skip("the codec claims no law")


@prop(
    "unbiased",
    "a codec that claims it decodes to the vector in the mean over its sketches: E <x, x'> = ||x||^2 within 1 %; a dead sketch is biased",
)
def unbiased(asked: Asked) -> str:
    if not asked.unbiased:
        raise Skip("the codec does not claim it")
    along = _by_seed(asked, "bias", 512)[1]
    what = f"unit vectors, {SEEDS} seeds" if asked.seeded else "unit vectors, one sketch"
    interval = mean_interval(along, 1 - ALPHA)
    asked.measured["bias"] = interval.estimate - 1
    return _judge(interval, 1.0, 0.01 if asked.seeded else ONE_SKETCH, what, "E <x, x'> / ||x||^2")


@prop("seed-collision", "numbers that the codec's user draws from the integer that seeds the codec err like any others")
def seed_collision(asked: Asked) -> str:
    d = asked.sizes.usual
    h, dtype = asked.sizes.heads[0], _dtype(asked)
    rng = generator(0, "conform collision")
    # of the same shape: errors of codecs with a window or groups depend on it
    others = (rng.standard_normal((1, d, d)).repeat(h, axis=0).astype(dtype).astype(np.float64) for _ in range(DRAWS))
    drawn_errors = [_errors(asked, x, x, "Gaussian numbers")[0] for x in others]
    independent = np.concatenate(drawn_errors)
    if not independent.any():
        return "no error at all"
    # vectors of one draw may err together, as under one scale for all: what one more draw may have, by Student's t of the logarithms
    logs = np.log([one.mean() or 1e-300 for one in drawn_errors])
    reach = stats.t.isf(ALPHA / 2, DRAWS - 1) * logs.std(ddof=1) * np.sqrt(1 + 1 / DRAWS)
    seeds = (0, 1) if asked.seeded else (0, 42)
    worst, text = 1.0, ""
    for seed in seeds:
        options = {"seed": seed} if asked.seeded else {}
        for library in ("default_rng", "RandomState", "torch"):
            if library == "torch" and not asked.subject.about.get("torch"):
                continue
            try:
                (drawn,) = asked.subject.ask("seeded", library=library, shape=[1, d, d], seed=seed)[1]
            except ForeignError:
                continue
            for x, how in ((drawn, "rows"), (drawn.transpose(0, 2, 1), "columns")):
                name = f"{'codec seed' if asked.seeded else 'seed'} {seed}, the {how} of standard_normal(({d}, {d})) of {library}({seed})"
                same = x.repeat(h, axis=0).astype(dtype).astype(np.float64)
                met = _errors(asked, same, same, name, **options)[0]
                level = 1 - ALPHA / 2
                a, b = mean_interval(met, level), mean_interval(independent, level)
                ratio = a.estimate / b.estimate if b.estimate else 1.0
                if abs(np.log(max(ratio, 1e-9))) > abs(np.log(worst)):
                    worst, text = ratio, name
                unlike = abs(np.log(max(a.estimate, 1e-300)) - logs.mean()) > reach
                if unlike and (a.low > 1.1 * b.high or a.high < 0.9 * b.low):
                    raise Violation(f"{name} err by {ratio:.3g} times what others do", name)
    return f"{worst:.3f} times the error of others at the worst ({text})"
