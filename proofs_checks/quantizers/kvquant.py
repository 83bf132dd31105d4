"""KVQuant: what each of its stages is worth, measured without it; and what Q-Norm costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from scipy import special

import reference
from kvtheory import synthetic
from kvtheory.distortion import attention_error
from kvtheory.layer import Layer, Rope
from kvtheory.statistics import geometric_mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, Relation, exact, numerical, statistical
from proofs_checks.papers import OWN
from proofs_checks.quantizers.instruments import PRINTED_BITS, Array, worst

PAPER = "2401.18079"


class _Fit:
    """KVQuant whose options `change` alters before it is fitted."""

    def __init__(self, true: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self._true, self._change = true, change

    def fit(self, calibration: Any, bits: int, **options: Any) -> Any:
        return self._true.fit(calibration, bits, **self._change(options))


def _ignored(name: str, value: Any) -> Callable[[Any], Any]:
    """The option `name` is `value` whatever is asked for."""
    return lambda true: _Fit(true, lambda options: {**options, name: value})


def _turned(true: Any) -> Any:
    return _Fit(true, lambda options: {**options, "pre_rope": not options.get("pre_rope", True)})


class _OtherRope:
    """KVQuant that takes another rope for the layer's."""

    def __init__(self, true: Any, rope: Callable[[Rope], Rope], fitted: Any = None) -> None:
        self._true, self._rope, self._fitted = true, rope, fitted

    def _seen(self, layer: Layer) -> Layer:
        return layer if layer.rope is None else layer.replace(rope=self._rope(layer.rope))

    def fit(self, calibration: list[Layer], bits: int, **options: Any) -> Any:
        return _OtherRope(self._true, self._rope, self._true.fit([self._seen(x) for x in calibration], bits, **options))

    def encode(self, layer: Layer) -> bytes:
        data: bytes = self._fitted.encode(self._seen(layer))
        return data

    def decode(self, stream: bytes) -> Any:
        return self._fitted.decode(stream)


def _seen_with(rope: Callable[[Rope], Rope]) -> Callable[[Any], Any]:
    return lambda true: _OtherRope(true, rope)


def _first_half(layer: Layer) -> Layer:
    n = layer.tokens // 2
    return layer.replace(
        keys=layer.keys[:, :n], values=layer.values[:, :n], positions=layer.positions[:n], queries=None, query_positions=None,
    )  # fmt: skip


def _key_errors(codec: Any, layer: Layer, bits: int, **options: Any) -> Array:
    """Squared errors of the keys of each head, fitted to the first half of the layer."""
    fitted = codec.fit([_first_half(layer)], bits, q_norm=False, **options)
    back = fitted.decode(fitted.encode(layer)).keys.astype(np.float64)
    return np.asarray(((back - layer.keys.astype(np.float64)) ** 2).sum(axis=(1, 2)))


def _with_channels(context: Context, heads: int, spread: bool) -> Layer:
    """Keys (heads, 256, 32), rotated; `spread`: before RoPE channels have means of deviation 3, else none differs from another."""
    rng = context.rng("channels")
    x = rng.standard_normal((heads, 256, 32)) + (3 * rng.standard_normal((heads, 1, 32)) if spread else 0)
    rope = Rope(10_000.0 ** (-np.arange(16) / 16))
    keys = rope.apply(x, np.arange(256)).astype(np.float32)
    return Layer(keys, rng.standard_normal(keys.shape, dtype=np.float32), rope=rope)


@claim(
    id="quantizers/kvquant-pre-rope",
    paper=PAPER,
    section="section 3.2, keys before RoPE",
    statement=(
        "Keys quantised by channel before RoPE err less than half as much in the square as after it where channels have means "
        "of their own before "
        "it; as much where no channel differs from another; and less on the real cache, in keys and attention output, at no "
        "more bits."
    ),
    formula="E‖k − k̂‖² before / after RoPE: < 1/2 with channel means, = 1 for independent normal channels, < 1 on real keys",
    assumptions=("the synthetic layers named; the layers of the cache, fitted to the first half of their tokens; 2 and 3 bits",),
    expected=Verdict.HOLDS_UNDER,
    functions={"codec": "reference.KVQuant", "attention_error": "kvtheory.distortion.attention_error"},
    mutants=[
        Mutant("always before RoPE", "codec", _ignored("pre_rope", True)),
        Mutant("always after RoPE", "codec", _ignored("pre_rope", False)),
        Mutant("before and after exchanged", "codec", _turned),
        Mutant("RoPE undone in the wrong direction", "codec", _seen_with(lambda rope: Rope(-rope.inv_freq))),
        Mutant("neighbouring channels taken for pairs", "codec", _seen_with(lambda rope: Rope(rope.inv_freq, "interleaved"))),
    ],
)  # fmt: skip
def kvquant_pre_rope(context: Context, *, codec: Any, attention_error: Any) -> Iterator[Evidence]:
    level = 1 - context.alpha(2)
    heads = 24
    cases: list[tuple[bool, Relation, float, float, str]] = [
        (True, "<=", 0.5, 0.0, "≤ 1/2 where channels have means of deviation 3"),
        (False, "=", 1.0, 0.05, "= 1 where no channel differs, within 5 %"),
    ]
    for spread, relation, predicted, margin, what in cases:
        layer = context.memo(("channels", spread), partial(_with_channels, context, heads, spread))
        ratios = _key_errors(codec, layer, 3, pre_rope=True) / _key_errors(codec, layer, 3, pre_rope=False)
        yield statistical(
            what=f"squared error of keys quantised before over after RoPE {what}; geometric mean over heads",
            ran_on=f"3 bits, {heads} heads of 256 tokens of 32",
            interval=geometric_mean_interval(ratios, level), predicted=predicted, relation=relation,
            margin=margin,
        )  # fmt: skip
    for label, layer in context.real():
        for bits in (2, 3):
            errors, lengths, keys = [], [], []
            for pre in (True, False):
                fitted = codec.fit([_first_half(layer)], bits, q_norm=False, pre_rope=pre)
                data = fitted.encode(layer)
                back = fitted.decode(data)
                lengths.append(len(data))
                errors.append(attention_error(layer, back))
                keys.append(float(((back.keys.astype(np.float64) - layer.keys) ** 2).sum()))
            yield exact(
                what="bytes of the stream with keys before RoPE ≤ after it: fewer outliers", ran_on=f"{label}, {bits} bits",
                observed=lengths[0],
                predicted=lengths[1], relation="<=",
            )  # fmt: skip
            for what, (before, after) in (("squared error of real keys", keys), ("attention error", errors)):
                yield numerical(
                    what=f"{what} with keys quantised before RoPE over after it < 1", ran_on=f"{label}, {bits} bits",
                    observed=before / after, predicted=1.0,
                    relation="<", tolerance=0.0, because="errors measured in float64", note=f"{before:.4g} and {after:.4g}",
                )  # fmt: skip


#: stage -> the option that takes it away
WITHOUT: dict[str, dict[str, Any]] = {
    "non-uniform levels": {"levels": "uniform"},
    "outliers apart": {"outliers": 0.0},
    "sink in full": {"sinks": 0},
    "keys before RoPE": {"pre_rope": False},
}


def _measured(codec: Any, layer: Layer, bits: int, **options: Any) -> tuple[float, float]:
    """(attention error, bits held), fitted to the first half of the layer's tokens."""
    fitted = codec.fit([_first_half(layer)], bits, **{"q_norm": False, **options})
    data = fitted.encode(layer)
    return attention_error(layer, fitted.decode(data)), reference.held_bits(data, layer)


def _by_head(codec: Any, layer: Layer, bits: int, **options: Any) -> Array:
    """(kv_heads,) attention errors, fitted to the first half of the layer's tokens."""
    fitted = codec.fit([_first_half(layer)], bits, **{"q_norm": False, **options})
    return np.asarray(attention_error(layer, fitted.decode(fitted.encode(layer)), by="kv_head"))


def _small(context: Context, kind: str) -> Layer:
    return _half_precision(context.synthetic(kind, kv_heads=1, query_heads=2, tokens=256, head_dim=64, queries=32))


def _half_precision(layer: Layer) -> Layer:
    return layer.replace(keys=layer.keys.astype(np.float16), values=layer.values.astype(np.float16))


@claim(
    id="quantizers/kvquant-stages",
    paper=PAPER,
    section="section 3, ablation: levels, dense-and-sparse, sink, keys before RoPE",
    statement=(
        "Taking one stage away (non-uniform levels, outliers apart, the sink in full, keys before RoPE) raises the error: on "
        "synthetic layers made for the "
        "stage, of the sink in the mean over heads; and that of the attention output on the real cache, for each of them."
    ),
    formula="error without the stage / error with all of them > 1",
    assumptions=("the layers named; fitted to the first half of their tokens, without Q-Norm; 2 and 3 bits a code, the bits held are as they come",),
    expected=Verdict.HOLDS_UNDER,
    functions={"codec": "reference.KVQuant"},
    mutants=[
        Mutant("levels always uniform", "codec", _ignored("levels", "uniform")),
        Mutant("levels always fitted", "codec", _ignored("levels", "nuq")),
        Mutant("outliers never apart", "codec", _ignored("outliers", 0.0)),
        Mutant("outliers always apart", "codec", _ignored("outliers", 0.01)),
        Mutant("no sink in full", "codec", _ignored("sinks", 0)),
        Mutant("a sink always in full", "codec", _ignored("sinks", 1)),
        Mutant("keys never before RoPE", "codec", _ignored("pre_rope", False)),
    ],
    figure="kvquant-ablation",
)  # fmt: skip
def kvquant_stages(context: Context, *, codec: Any) -> Iterator[Evidence | Picture]:
    level = 1 - context.alpha(2)
    layer = _small(context, "heavy_tail")
    whole, held = _measured(codec, layer, 2)
    for stage in ("non-uniform levels", "outliers apart"):
        without, less = _measured(codec, layer, 2, **WITHOUT[stage])
        yield _dearer(stage, without, whole, "heavy_tail, 2 bits", less, held)
    layer = context.memo("channels", partial(_with_channels, context, 24, True))
    after, before = (_key_errors(codec, layer, 2, **options) for options in (WITHOUT["keys before RoPE"], {}))
    yield statistical(
        what="squared error of keys without keys before RoPE over that with all stages ≥ 1.1, geometric mean over heads",
        relation=">=",
        ran_on="2 bits, 24 heads of 256 tokens of 32, channels with means of deviation 3 before RoPE", predicted=1.1,
        interval=geometric_mean_interval(after / before, level),
    )  # fmt: skip
    # A sink's key is an outlier in most channels, and so in full already: what the stage is worth varies from head to head, by a factor of 2
    # either way. 192 heads make a half-width of a third at 5.3 deviations.
    layer = context.memo("sinks", partial(_half_precision, synthetic.make(
        "attention_sink", kv_heads=192, query_heads=192, tokens=128, head_dim=16, model_dim=16, queries=8, seed=context.seed)))  # fmt: skip
    by_head = _by_head(codec, layer, 2, **WITHOUT["sink in full"]) / _by_head(codec, layer, 2)
    yield statistical(
        what="attention error without sink in full over that with all stages ≥ 1.1, geometric mean over heads",
        ran_on="attention_sink, 2 bits, 192 heads",
        interval=geometric_mean_interval(by_head, level), predicted=1.1, relation=">=",
        note=f"less than 1 in {int((by_head < 1).sum())} heads",
    )  # fmt: skip
    found: dict[tuple[str, int, str], tuple[float, float]] = {}
    for label, layer in context.real():
        for bits in (2, 3):
            found[label, bits, "all"] = whole, held = _measured(codec, layer, bits)
            for stage, options in WITHOUT.items():
                found[label, bits, stage] = without, less = _measured(codec, layer, bits, **options)
                yield _dearer(stage, without, whole, f"{label}, {bits} bits", less, held)
        (few, few_bits), (more, more_bits) = (found[label, bits, "outliers apart"] for bits in (2, 3))
        whole, held = found[label, 2, "all"]
        at = few * (more / few) ** ((held - few_bits) / (more_bits - few_bits))
        yield numerical(
            what="attention error without outliers apart at the same bits held (log error interpolated between 2 and 3 bits), over that with them, > 1",
            ran_on=f"{label}, {held:.2f} bits held", role="assumption", observed=at / whole, predicted=1.0, relation=">",
            tolerance=0.0,
            because="errors measured in float64; where outliers are dear (1.6 % of 64 channels) they are not worth their bits",
        )  # fmt: skip
        for bits in (2, 3):
            found[label, bits, "Q-Norm"] = _measured(codec, layer, bits, q_norm=True)
    if found:
        yield Picture("kvquant-ablation", _picture(found))


def _dearer(stage: str, without: float, whole: float, where: str, less: float, held: float) -> Evidence:
    return numerical(
        what=f"attention error without {stage} over that with all stages > 1", ran_on=where, observed=without / whole,
        predicted=1.0, relation=">", tolerance=0.0,
        because="errors measured in float64", note=f"{without:.4f} at {less:.2f} bits held, {whole:.4f} at {held:.2f}",
    )  # fmt: skip


def _picture(found: dict[tuple[str, int, str], tuple[float, float]]) -> dict[str, Any]:
    return {
        "rows": [
            {"layer": label, "bits": bits, "stage": stage, "error": error, "held_bits": held} for (label, bits, stage), (error, held) in found.items()
        ],
        "without": list(WITHOUT),
    }  # fmt: skip


# -- Q-Norm --------------------------------------------------------------------------------------------------------------


def _gaussian_centroids(size: int) -> tuple[Array, Array, float]:
    """Points and masses of the optimal quantiser of the normal law by Lloyd iteration, and its distortion 1 - sum p c^2."""
    points = special.ndtri((np.arange(size) + 0.5) / size)
    for _ in range(5000):
        edges = np.concatenate([[-np.inf], 0.5 * (points[:-1] + points[1:]), [np.inf]])
        mass = np.diff(special.ndtr(edges))
        moved = -np.diff(np.exp(-0.5 * edges**2)) / np.sqrt(2 * np.pi) / mass
        if np.abs(moved - points).max() < 1e-13:
            break
        points = moved
    return points, mass, float(1 - (mass * points**2).sum())


def _numbers(context: Context) -> Array:
    """Normal numbers scaled into [-1, 1]: 4 deviations are 1."""
    x = context.rng("numbers").standard_normal(20_000) / 4
    return np.asarray(np.clip(x, -1, 1))


def _quantised(fit: Any, numbers: Array, bits: int, q_norm: bool) -> Array:
    levels = fit(numbers, np.ones(numbers.size), bits, True, q_norm)
    return np.asarray(levels.numbers(levels.codes(numbers)))


def _points_scaled(factor: float) -> Callable[[Any], Any]:
    def make(true: Any) -> Any:
        def wrong(numbers: Any, weights: Any, bits: int, optimal: bool, q_norm: bool) -> Any:
            levels = true(numbers, weights, bits, optimal, q_norm)
            return type(levels)(levels.thresholds, (levels.points * factor).astype(np.float32)) if q_norm else levels

        return wrong

    return make


def _fit_without(true: Any) -> Any:
    return lambda numbers, weights, bits, optimal, q_norm: true(numbers, weights, bits, optimal, False)


@claim(
    id="quantizers/q-norm-cost",
    paper=OWN,
    section="KVQuant's Q-Norm (arXiv 2401.18079, section 3) in squared error, derived here",
    statement=(
        "Giving the points of a quantiser with centroids the spread of its numbers raises its mean squared error, from D to 2 "
        "− 2√(1 − D) at unit "
        "variance: by 3.2 % for the normal law at 2 bits. Mean and spread of what is decoded are then those of the numbers."
    ),
    formula="D' = 2 − 2 √(1 − D) = D + D²/4 + …",
    expected=Verdict.HOLDS,
    functions={"cost": "kvtheory.quantization.q_norm_distortion", "fit": "reference.nuq.fit"},
    mutants=[
        *systematic.scales("cost"),
        Mutant("D itself", "cost", lambda true: lambda distortion: distortion),
        Mutant("2 − 2 (1 − D)", "cost", lambda true: lambda distortion: 2 * distortion),
        Mutant("D + D²", "cost", lambda true: lambda distortion: distortion + distortion**2),
        Mutant("no Q-Norm", "fit", _fit_without),
        Mutant("points a hundredth too wide", "fit", _points_scaled(1.01)),
    ],
)  # fmt: skip
def q_norm_cost(context: Context, *, cost: Any, fit: Any) -> Iterator[Evidence]:
    rows = []
    for b in PRINTED_BITS:
        points, mass, error = context.memo(("centroids", b), partial(_gaussian_centroids, 2**b))
        wide = points / np.sqrt((mass * points**2).sum())
        # E x q = sum p c wide, as E[x | cell] = c
        own = float(1 - 2 * (mass * points * wide).sum() + (mass * wide**2).sum())
        rows.append((f"b={b}", float(cost(error)), own))
    case, seen, true = worst(rows)
    yield numerical(
        what="2 − 2√(1 − D) = E (x − q)² of the normal law with its Lloyd-Max points widened to variance 1", ran_on="b = 1..4",
        observed=seen, predicted=true,
        tolerance=1e-11, because="1 − 1 + D to 1e-15, over D ≥ .0095", worst_case=case,
    )  # fmt: skip
    x = context.memo("numbers", partial(_numbers, context))
    for b in (1, 2, 3):
        plain, normed = (_quantised(fit, x, b, q) for q in (False, True))
        for what, function in (("mean", np.mean), ("spread", np.std)):
            yield numerical(
                what=f"{what} of what is decoded with Q-Norm = that of the numbers, in spreads of the numbers",
                ran_on=f"{b} bits, 20,000 normal numbers",
                observed=1 + float((function(normed) - function(x)) / x.std()), predicted=1.0, tolerance=1e-6,
                because="points are float32",
            )  # fmt: skip
        error = float(((plain - x) ** 2).mean() / x.var())
        yield numerical(
            what="mean squared error of the codec's levels with Q-Norm = 2 − 2√(1 − D), D that without it",
            ran_on=f"{b} bits, 20,000 normal numbers",
            observed=float(((normed - x) ** 2).mean() / x.var()), predicted=cost(error), tolerance=1e-3,
            because="levels are centroids of 4096 bins, not of the numbers: a threshold lies within a bin",
        )  # fmt: skip


@claim(
    id="quantizers/kvquant-q-norm",
    paper=PAPER,
    section="section 3, Q-Norm at 2 bits, read as a statement about errors (our reading: the paper reports perplexity)",
    statement=(
        "Read as a statement about errors, which is our reading, Q-Norm at 2 bits lowers them everywhere: the squared error of "
        "the numbers, and that of the attention output of every layer. It does not: that of normal numbers rises, and that of single "
        "layers, of which layer 18 here is the worst of SmolLM2's thirty. On the whole model it does help: .80 of the attention error "
        "over all layers, less in 26 of 30 (docs/codecs/kvquant.md). The paper reports perplexities, which this does not test."
    ),
    formula="our reading: error with Q-Norm ≤ error without, at 2 bits, for every source and layer",
    expected=Verdict.FAILS,
    correction="quantizers/q-norm-cost",
    functions={"codec": "reference.KVQuant", "fit": "reference.nuq.fit"},
    mutants=[
        Mutant("no Q-Norm in the levels", "fit", _fit_without),
        Mutant("points a hundredth narrower", "fit", _points_scaled(0.99)),
        Mutant("never Q-Norm", "codec", _ignored("q_norm", False)),
        Mutant("always Q-Norm", "codec", _ignored("q_norm", True)),
    ],
)  # fmt: skip
def kvquant_q_norm(context: Context, *, codec: Any, fit: Any) -> Iterator[Evidence]:
    x = context.memo("numbers", partial(_numbers, context))
    plain, normed = (_quantised(fit, x, 2, q) for q in (False, True))
    yield numerical(
        what="spread of what is decoded with Q-Norm = that of the numbers: it does what it is for",
        ran_on="2 bits, 20,000 normal numbers", role="control",
        observed=float(normed.std()), predicted=float(x.std()), tolerance=1e-6, because="points are float32",
    )  # fmt: skip
    layer = _small(context, "gaussian")
    states = {q: codec.fit([layer], 2, q_norm=q).state for q in (None, True, False)}
    yield exact(
        what="the codec's default at 2 bits has the levels of Q-Norm, and those are others than without", ran_on="gaussian",
        role="control",
        observed=f"{_levels_alike(states, None, True)} {_levels_alike(states, True, False)}", predicted="True False",
    )  # fmt: skip
    errors = [float(((back - x) ** 2).mean()) for back in (plain, normed)]
    yield numerical(
        what="mean squared error of the codec's levels with Q-Norm over that without ≤ 1", ran_on="2 bits, 20,000 normal numbers",
        observed=errors[1] / errors[0],
        predicted=1.0, relation="<=", tolerance=1e-3, because="levels are centroids of 4096 bins",
    )  # fmt: skip
    for label, real in context.real():
        (without, _), (with_, _) = (_measured(codec, real, 2, q_norm=q) for q in (False, True))
        yield numerical(
            what="attention error with Q-Norm over that without ≤ 1",
            ran_on=f"{label}, 2 bits, fitted to the first half of its tokens", observed=with_ / without,
            predicted=1.0, relation="<=", tolerance=0.0, because="errors measured in float64",
            note=f"{with_:.4f} and {without:.4f}",
        )  # fmt: skip


def _levels_alike(states: dict[bool | None, bytes], one: bool | None, other: bool | None) -> bool:
    levels = []
    for key in (one, other):
        fitted: Any = reference.load(states[key])
        table = fitted.tables[0]
        levels.append((table.key_levels.points.tobytes(), table.value_levels.points.tobytes()))
    return levels[0] == levels[1]
