"""QJL: one bit for each coordinate of a Gaussian sketch; its variance, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy.integrate import quad

from kvtheory.layer import Layer
from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical, statistical
from proofs_checks.quantizers.codec import _Altered, _normal, _unchanged
from proofs_checks.quantizers.instruments import worst

SEEDS, KEYS, DIM = 48, 256, 64
#: lengths of queries and keys: not 1, so that their squares show
QUERY, KEY = 3.0, 2.0


def _gain(factor: float) -> Any:
    return lambda true: lambda **options: _Altered(true(**options), _unchanged, lambda x, side: factor * x)


def _one_sketch(true: Any) -> Any:
    return lambda *, bits, seed: true(bits=bits, seed=0)


@claim(
    id="quantizers/qjl-variance",
    paper="2406.03482",
    section="Lemma 3.2, unbiased, and the variance as an equality (derived here)",
    statement=(
        "QJL's estimate of ⟨q, k⟩ from m signs is unbiased, and its variance is ((π/2)‖q‖²‖k‖² − ⟨q, k⟩²)/m exactly: least for "
        "a query along "
        "the key, largest across it. So what is decoded is off by (π d/2 − 1)/m of the key's squared length: more than the key "
        "itself until "
        "m = 1.57 d."
    ),
    formula="E est = ⟨q, k⟩;  Var est = ((π/2)‖q‖²‖k‖² − ⟨q, k⟩²)/m;  E‖k − k̂‖² = ((π/2) d − 1)/m ‖k‖²",
    expected=Verdict.HOLDS,
    functions={
        "variance": "kvtheory.quantization.qjl_variance",
        "distortion": "kvtheory.quantization.qjl_distortion",
        "codec": "reference.QJL",
    },
    mutants=[
        *systematic.scales("variance"),
        *systematic.scales("distortion"),
        Mutant("the bound (π/2)‖q‖²‖k‖²/m for the variance", "variance", lambda true: lambda q, k, m: np.pi / 2 / m * (q * q).sum(-1) * (k * k).sum(-1)),
        Mutant("(π/2 − 1)‖q‖²‖k‖²/m, the least for every query", "variance", lambda true: lambda q, k, m: (np.pi / 2 - 1) / m * (q * q).sum(-1) * (k * k).sum(-1)),
        Mutant("⟨q, k⟩ for its square", "variance", lambda true: lambda q, k, m: true(q, k, m) + ((q * k).sum(-1) ** 2 - abs((q * k).sum(-1))) / m),
        Mutant("π d/2 without −1", "distortion", lambda true: lambda dim, signs: np.pi / 2 * dim / signs),
        Mutant("the gain √(2/π) for √(π/2)", "codec", _gain(2 / np.pi)),
        Mutant("a hundredth too long", "codec", _gain(1.01)),
        Mutant("one sketch for all seeds", "codec", _one_sketch),
        Mutant("twice as many signs", "codec", lambda true: lambda *, bits, seed: true(bits=2 * bits, seed=seed)),
    ],
)  # fmt: skip
def qjl_variance(context: Context, *, variance: Any, distortion: Any, codec: Any) -> Iterator[Evidence]:
    # One row S_j in the plane of q and k is r (cos t, sin t), r² of mean 2, t uniform; k at angle 0, q at angle a:
    # a term of the estimate is √(π/2) r cos(t − a) sign cos t.
    rows = []
    for angle in (0.0, 0.4, 1.2, np.pi / 2, 2.5):
        first, second = (_around(angle, power) for power in (1, 2))
        mean = np.sqrt(np.pi / 2) * np.sqrt(np.pi / 2) * first  # E r = √(π/2)
        square = np.pi / 2 * 2 * second
        q, k = QUERY * np.array([np.cos(angle), np.sin(angle)]), KEY * np.array([1.0, 0.0])
        own = (QUERY * KEY) ** 2 * (square - mean**2) / 5
        rows.append((f"angle {angle:.2f}", float(variance(q, k, 5)), own))
    case, seen, true = worst(rows)
    yield numerical(
        what="the variance = E X² − (E X)² of one term by quadrature over the angle of its row, over m",
        ran_on=f"‖q‖ = {QUERY:g}, ‖k‖ = {KEY:g}, five angles between them, m = 5", observed=seen, predicted=true, tolerance=1e-9,
        because="quad asked for 1e-12", worst_case=case,
    )  # fmt: skip
    k = context.rng("axes").standard_normal(DIM)
    k /= np.linalg.norm(k)
    yield numerical(
        what="E‖k − k̂‖² = the variances of the estimates of ⟨e_i, k⟩, summed", ran_on=f"d = {DIM}, m = 96",
        observed=distortion(DIM, 96),
        predicted=float(variance(np.eye(DIM), k, 96).sum()), tolerance=1e-12, because="64 terms in float64",
    )  # fmt: skip
    # A sample is one seed, as all keys under it share a sketch. Its mean over 256 keys deviates by 1.3 % (estimates), 10 % (their
    # squares) and 3.5 % (vectors): of 48 a half-width of .8 times that.
    level = 1 - context.alpha(6)
    draws = context.memo("draws", partial(_normal, context, "keys", (2, 1, KEYS, DIM)))
    keys = KEY * draws[0] / np.linalg.norm(draws[0], axis=-1, keepdims=True)
    across = draws[1] - (draws[1] * keys).sum(axis=-1, keepdims=True) * keys / KEY**2
    across *= QUERY / np.linalg.norm(across, axis=-1, keepdims=True)
    along = keys * (QUERY / KEY)
    queries = {"along": along, "across": across, "at cos = .6 to": np.float32(0.6) * along + np.float32(0.8) * across}
    layer = Layer(keys, keys)
    errors: dict[str, list[float]] = {name: [] for name in ("kept", "all", *queries)}
    for seed in range(SEEDS * context.seed, SEEDS * (context.seed + 1)):
        one = codec(bits=1, seed=seed)
        off = one.decode(one.encode(layer)).keys.astype(np.float64) - keys
        errors["kept"].append(1 + float((off * keys).sum(axis=-1).mean()) / KEY**2)
        errors["all"].append(float((off * off).sum(axis=-1).mean()) / KEY**2)
        for name, query in queries.items():
            errors[name].append(float(((off * query).sum(axis=-1) ** 2).mean()))
    where = f"d = m = {DIM}, {SEEDS} seeds of {KEYS} random keys"
    yield statistical(
        what="mean of the codec's ⟨k, k̂⟩/‖k‖² = 1, within 2 %", ran_on=where, interval=mean_interval(errors["kept"], level),
        predicted=1.0, margin=0.02,
    )  # fmt: skip
    for name, query in queries.items():
        yield statistical(
            what=f"mean square of the codec's error in ⟨q, k⟩, q {name} k, = the variance, within 15 %", ran_on=where,
            interval=mean_interval(errors[name], level), predicted=float(np.mean(variance(query, keys, DIM))), margin=0.15,
        )  # fmt: skip
    yield statistical(
        what="the codec's E‖k − k̂‖²/‖k‖² = (π d/2 − 1)/m, within 5 %", ran_on=where,
        interval=mean_interval(errors["all"], level),
        predicted=distortion(DIM, DIM), margin=0.05,
    )  # fmt: skip


def _around(angle: float, power: int) -> float:
    """Mean over t, uniform on the circle, of (cos(t - angle) sign cos t)^power."""

    def term(t: float) -> float:
        return float((np.cos(t - angle) * np.sign(np.cos(t))) ** power)

    value, _ = quad(term, -np.pi / 2, 3 * np.pi / 2, points=[np.pi / 2], epsabs=1e-12, epsrel=1e-12)
    return value / (2 * np.pi)
