"""MetricKLT: our own transform coder. The basis in which the loss of attention is plain squared error, for keys and values together.

    x     a token before RoPE: keys and values of all heads of a layer (joint="layer"), of one KV head ("head"), or of one side ("none")
    M     block diagonal: what noise on each head's keys, before RoPE, and values costs at the output (kvtheory.distortion.metrics)
    S     covariance of x in calibration;  M = L L^T,  L^T S L = U Lambda U^T,  y = U^T L^T (x - mean)        (transform.metric_klt)

Errors of all y_c cost alike, so one step for all coefficients of a layer is reverse water-filling over channels, heads, and keys and
values at once. Keys and values are both linear in the layer's input: given all keys, values of real layers hold .3 to .9 bit a component less
(benchmarks/keys_tell_values.py), which joint="layer" takes; their errors stay uncorrelated, as the error of y is white and M block diagonal.

    coding="entropy"   transform_coding.entropy: rANS under tables by spread, tokens in classes by scale, blocks for random access
    coding="fixed"     transform_coding.fixed: Lloyd-Max codebooks of measured coefficients, tables D_c(b), exact allocation

M_K is estimated from few queries and noisy: metric="mixed" is half of it and half the queries' second moment, of the same cost, and
`shrinkage` tr(M)/d I is added. Theory: generalised KLT, theory of arXiv 2608.14191 carried on; derived in kvtheory's docs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from kvtheory import rate, transform
from kvtheory.distortion import metrics
from kvtheory.layer import Layer
from reference import arguments, hadamard
from reference import calibration as calibrations
from reference.codec import Layers
from reference.stream import Reader
from reference.transform_coding import fixed, stacked
from reference.transform_coding.basis import Basis
from reference.transform_coding.codec import LayerCoder, StackedCoder, TransformCodec
from reference.transform_coding.entropy import MOST_CLASSES, EntropyCoder, fit_entropy
from reference.transform_coding.fixed import FixedCoder, FixedUnit

__all__ = ["MetricKLT"]

Float64 = NDArray[np.float64]
Unit = tuple[NDArray[np.int64], Float64, Float64]

CODINGS = ("entropy", "fixed")
JOINTS = ("layer", "head", "none")
BASES = ("klt", "pca", "hadamard", "identity")
METRICS = ("mixed", "coherent", "incoherent", "queries", "variance")
DISTANCES = ("met", "zero")
#: queries of a layer that its key metric is estimated from, and tokens of each
QUERIES, TOKENS = 256, 16
MOST_FIXED_BITS = 8
#: tokens that tables of fixed rates are measured on
FIXED_TOKENS = 2048
#: of coefficients, at even ranks, that codebooks are fitted to
SAMPLES = 1024
#: of values' metrics, which are known well
VALUE_SHRINKAGE = 1e-3


@dataclass(frozen=True)
class MetricKLT(TransformCodec):
    """Made by `MetricKLT.fit`; a bare one encodes nothing.

    bits: nominal bits a number over keys and values together: the ideal code length of the calibration text ("entropy"; any number above 0),
    what a token takes ("fixed"). sinks, window: tokens at the start and end kept exact. block: tokens decoded at once.
    classes: of tokens by scale (entropy; 1: none). jensen: log-weights that undo the shift between exact and coded tokens.
    For ablations: joint; basis ("pca": the covariance's, "hadamard", "identity", each with the metric's diagonal in it as weights, which
    for "pca" are the paper's); metric ("mixed"; "coherent" M_K alone; "incoherent": heads of a group added apart; "queries": E[q q^T] before
    RoPE; "variance": I), distances ("met": M_K at the distances at which queries meet keys; "zero": as if at none), shrinkage; of "fixed":
    tables ("measured" or the "model" 4^-b) and scaling ("factored": a scale for each token; "channelwise": none).
    layers: what `fit` found, the codec's state.

    Held: near `bits` and 16 for each number of an exact token, blocks and header. Texts unlike the calibration's take more in "entropy".
    Pitfalls: a cache of another scale than the calibration's is not clipped in "entropy" but dear, and clipped in "fixed".
    """

    bits: float = 2.0
    coding: Literal["entropy", "fixed"] = "entropy"
    sinks: int = 4
    window: int = 0
    block: int = 128
    classes: int = 8
    joint: Literal["layer", "head", "none"] = "layer"
    basis: Literal["klt", "pca", "hadamard", "identity"] = "klt"
    metric: Literal["mixed", "coherent", "incoherent", "queries", "variance"] = "mixed"
    distances: Literal["met", "zero"] = "met"
    shrinkage: float = 0.05
    tables: Literal["measured", "model"] = "measured"
    scaling: Literal["factored", "channelwise"] = "factored"
    jensen: bool = False
    layers: tuple[LayerCoder, ...] = field(default=(), repr=False, compare=False, metadata={"state": True})

    coder_parts = ("side", "codes", "escapes", "low bits")
    part_names = ("shape", "exact keys", "exact values", *coder_parts)

    def __post_init__(self) -> None:
        # bits and shrinkage as a stream says them
        object.__setattr__(self, "bits", arguments.number("bits", self.bits, 0, 16))
        if not 0 <= self.shrinkage < np.inf:
            raise ValueError(f"shrinkage: expected a finite number >= 0, got {self.shrinkage}")
        object.__setattr__(self, "shrinkage", float(self.shrinkage))
        for name, least, most in (
            ("sinks", 0, 1 << 20), ("window", 0, 1 << 20), ("block", 1, 1 << 16), ("classes", 1, MOST_CLASSES)
        ):  # fmt: skip
            arguments.whole(name, getattr(self, name), least, most)
        for name, known in (
            ("coding", CODINGS), ("joint", JOINTS), ("basis", BASES), ("metric", METRICS), ("distances", DISTANCES),
            ("tables", ("measured", "model")), ("scaling", ("factored", "channelwise")),
        ):  # fmt: skip
            arguments.word(name, getattr(self, name), known)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MetricKLT) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)

    @classmethod
    def fit(cls, calibration: Layers, bits: float = 2.0, **options: Any) -> MetricKLT:
        """Fitted to a Cache or a list of Layers, each with queries; several layers of one index (texts) are pooled. options: the fields.

        ValueError if a layer has no token behind the sinks, no queries (unless metric="variance"), or if a fixed rate cannot be spent.
        """
        return cls.fit_rates(calibration, [bits], **options)[0]

    @classmethod
    def fit_rates(cls, calibration: Layers, bits: Sequence[float], **options: Any) -> list[MetricKLT]:
        """`fit` at several rates, which share metrics and bases."""
        bare = [cls(b, **options) for b in bits]
        found: list[list[LayerCoder]] = [[] for _ in bare]
        for index, own in calibrations.by_index(calibration):
            if bare:
                x, units = bare[0]._prepare(index, own)
            for codec, layers in zip(bare, found):
                layers.append(codec._fit(index, own, x, units))
        return [cls(b, **options, layers=tuple(layers)) for b, layers in zip(bits, found)]

    def read_coder(self, reader: Reader, width: int) -> StackedCoder:
        return EntropyCoder.read(reader, width) if self.coding == "entropy" else FixedCoder.read(reader, width)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _prepare(self, index: int | None, layers: list[Layer]) -> tuple[Float64, list[Unit]]:
        """Stacked vectors of the calibration behind the sinks, and the bases."""
        x = stacked.calibration(layers, self.sinks)
        return x, self._units(layers, x)

    def _fit(self, index: int | None, layers: list[Layer], x: Float64, units: list[Unit]) -> LayerCoder:
        one = layers[0]
        coder: Any
        if self.coding == "entropy":
            coder = fit_entropy(units, x, self.bits, self.classes, self.block)
        else:
            coder = self._fixed(units, x)
        log_weights = np.zeros(one.kv_heads, np.float32)
        if self.jensen:
            log_weights = self._jensen(layers, x, coder)
        return LayerCoder(index, one.kv_heads, one.head_dim, one.value_dim, one.rope, log_weights, coder)

    def _units(self, layers: list[Layer], x: Float64) -> list[Unit]:
        """Places, synthesis and mean of each unit, with errors of all coefficients of the layer at the same cost."""
        one = layers[0]
        mean = x.mean(axis=0)
        centred = x - mean
        covariance = centred.T @ centred / len(x)
        key_metrics, value_metrics = _metrics(layers, self.metric, self.distances, covariance)
        key_metrics, value_metrics = _definite(
            transform.shrink(key_metrics, self.shrinkage), transform.shrink(value_metrics, VALUE_SHRINKAGE)
        )
        heads = range(one.kv_heads)
        key = [stacked.columns(one, "keys", [h]) for h in heads]
        value = [stacked.columns(one, "values", [h]) for h in heads]
        groups = {
            "layer": [
                [
                    *((k, key_metrics[h]) for h, k in enumerate(key)),
                    *((v, value_metrics[h]) for h, v in enumerate(value)),
                ]
            ],
            "head": [[(key[h], key_metrics[h]), (value[h], value_metrics[h])] for h in heads],
            "none": [*([(key[h], key_metrics[h])] for h in heads), *([(value[h], value_metrics[h])] for h in heads)],
        }[self.joint]
        units = []
        for group in groups:
            places = np.concatenate([p for p, _ in group])
            metric = np.zeros((len(places), len(places)))
            at = 0
            for p, m in group:
                metric[at : at + len(p), at : at + len(p)] = m
                at += len(p)
            units.append((places, self._synthesis(covariance[np.ix_(places, places)], metric), mean[places]))
        return units

    def _synthesis(self, covariance: Float64, metric: Float64) -> Float64:
        """(d, d) with errors of all coefficients at unit cost: exactly so for "klt", by the metric's diagonal alone for other bases."""
        if self.basis == "klt":
            return transform.metric_klt(covariance, metric).synthesis
        d = len(covariance)
        if self.basis == "pca":
            basis = transform.pca(covariance).synthesis
        elif self.basis == "hadamard":
            # M and its gain 1/sqrt(m d), with M M^T = m d I
            matrix = hadamard.rotation(d).matrix().astype(np.float64)
            basis = matrix / np.sqrt(float(matrix[0] @ matrix[0]))
        else:
            basis = np.eye(d)
        return basis / np.sqrt(np.einsum("ic,ij,jc->c", basis, metric, basis, optimize=True))

    def _fixed(self, units: list[Unit], x: Float64) -> FixedCoder:
        gain: fixed.Gain = "log" if self.scaling == "factored" else "none"
        budget = int(np.floor(self.bits * x.shape[1] + 1e-9))
        if budget > MOST_FIXED_BITS * x.shape[1]:
            raise ValueError(f"bits: expected at most {MOST_FIXED_BITS} for coding='fixed', got {self.bits}")
        rows = np.linspace(0, len(x) - 1, min(len(x), FIXED_TOKENS)).astype(int)
        sides = [
            _Side((x[rows][:, places] - mean) @ np.linalg.pinv(synthesis).T, gain) for places, synthesis, mean in units
        ]
        codebooks = _gaussian()
        self._allot(sides, codebooks, budget)
        for side in sides:
            side.scale_tokens(codebooks)
        codebooks = _codebooks(np.concatenate([side.normalised[:, side.live].ravel() for side in sides]))
        for side in sides:
            side.scale_tokens(codebooks)
        self._allot(sides, codebooks, budget)
        coded = []
        for (places, synthesis, mean), side in zip(units, sides):
            basis = Basis.of(places, synthesis * (side.sigma / fixed.unit_of("listed", gain)), mean)
            coded.append(FixedUnit(basis, side.bits.astype(np.uint8)))
        used = {int(b) for side in sides for b in side.bits if b}
        return FixedCoder(tuple(coded), gain, {b: codebooks[b] for b in sorted(used)})

    def _allot(self, sides: list[_Side], codebooks: dict[int, NDArray[np.int32]], budget: int) -> None:
        """Bits of every coefficient, of least summed distortion with these codebooks; with the scales of tokens they spend the budget.

        A coefficient that lost its bits does not get them back, so the number of scales, which its group has or not, settles.
        """
        tables = np.concatenate([side.table(codebooks, self.tables == "measured") for side in sides])
        edges = np.cumsum([len(side.sigma) for side in sides])[:-1]
        live = np.concatenate([side.live for side in sides])
        while True:
            scales = sum(
                fixed.gain_bits(side.gain) * fixed.groups_of(int(own.sum()))
                for side, own in zip(sides, np.split(live, edges))
            )
            if MOST_FIXED_BITS * int(live.sum()) + scales < budget:
                bits = self._allot_zeros(sides, live, budget - scales)
                break
            allowed = np.where(live[:, None] | (np.arange(MOST_FIXED_BITS + 1) == 0), tables, np.inf)
            bits = rate.integer_bits(allowed, max(0, budget - scales))
            if ((bits > 0) == live).all():
                break
            coded = np.array([fixed.groups_of(int((own > 0).sum())) for own in np.split(bits, edges)])
            before = np.array([fixed.groups_of(int(own.sum())) for own in np.split(live, edges)])
            live = bits > 0
            if (coded == before).all():
                break
        for side, own in zip(sides, np.split(bits, edges)):
            side.bits = own

    @staticmethod
    def _allot_zeros(sides: list[_Side], live: NDArray[np.bool_], budget: int) -> NDArray[np.int64]:
        """Where what is alive cannot take all bits: it has all it can take, and the others, in order, the rest, scales of theirs included."""
        bits = MOST_FIXED_BITS * live.astype(np.int64)
        left, first = budget - int(bits.sum()), 0
        for side in sides:
            own = slice(first, first + len(side.sigma))
            first = own.stop
            for c in range(own.start, own.stop):
                coded = int((bits[own] > 0).sum())
                opens = fixed.gain_bits(side.gain) * (fixed.groups_of(coded + 1) - fixed.groups_of(coded))
                if bits[c] or left <= 0:
                    continue
                if (short := opens + 1 - left) > 0:
                    # less is left than a new scale takes: the last one before gives some of its bits back
                    givers = np.flatnonzero(bits[:c] > short)
                    if not givers.size:
                        continue
                    bits[givers[-1]] -= short
                    left += short
                bits[c] = min(MOST_FIXED_BITS, left - opens)
                left -= opens + int(bits[c])
        return bits

    def _jensen(self, layers: list[Layer], x: Float64, coder: StackedCoder) -> NDArray[np.float32]:
        """+ s^2 / 2 for each KV head: centroids shrink, E[k | k^] = k^, so exact tokens gain mass (theory B-L1)."""
        one = layers[0]
        rows = x[np.linspace(0, len(x) - 1, min(len(x), 1024)).astype(int)]
        out = np.zeros(rows.shape)
        coder.decode([Reader(part) for part in coder.encode(rows)], len(rows), out)
        error = rows - out
        moments = np.mean([metrics.query_metric(layer, pre_rope=layer.rope is not None) for layer in layers], axis=0)
        s2 = []
        for h in range(one.kv_heads):
            e = error[:, stacked.columns(one, "keys", [h])]
            s2.append(np.einsum("nd,de,ne->", e, moments[h], e) / len(e) / one.group)
        return (0.5 * np.array(s2)).astype(np.float32)


class _Side:
    """Coefficients of one unit while bits are allotted: y (n, size) = gain sigma_c normalised."""

    def __init__(self, y: Float64, gain: fixed.Gain) -> None:
        self.y, self.gain = y, gain
        spread = np.sqrt((y**2).mean(axis=0))
        self.live = spread > 1e-9 * spread.max(initial=0.0)
        self.sigma = np.where(self.live, spread, 0.0)
        self.bits = np.zeros(y.shape[1], np.int64)
        self.gains = np.ones(y.shape)

    @property
    def normalised(self) -> Float64:
        return np.where(self.live, self.y / (self.gains * np.where(self.live, self.sigma, 1.0)), 0.0)

    def scale_tokens(self, codebooks: dict[int, NDArray[np.int32]]) -> None:
        """Scales of tokens as the encoder will choose them, and only what has bits stays in play."""
        coded = self.bits > 0
        if self.gain == "none" or not coded.any():
            return
        self.live &= coded
        at = np.flatnonzero(self.live)
        points = [codebooks[int(b)] / fixed.UNIT for b in self.bits[at]]
        chosen, _ = fixed.least_error(self.y[:, at] / self.sigma[at], points, self.sigma[at] ** 2)
        self.gains = np.ones(self.y.shape)
        for i, c in enumerate(at):
            self.gains[:, c] = fixed.LOG_GAINS[chosen[i // fixed.GROUP]] / fixed.GAIN_UNIT

    def table(self, codebooks: dict[int, NDArray[np.int32]], measured: bool) -> Float64:
        """D_c(b), (size, 1 + MOST_FIXED_BITS): mean squared error of y_c with b bits."""
        variance = (self.y**2).mean(axis=0)
        if not measured:
            return variance[:, None] * 4.0 ** -np.arange(MOST_FIXED_BITS + 1)
        out = np.repeat(variance[:, None], MOST_FIXED_BITS + 1, axis=1)
        flat = self.normalised[:, self.live]
        weight = (self.gains[:, self.live] * self.sigma[self.live]) ** 2
        for b, points in codebooks.items():
            p = points / fixed.UNIT
            decoded = p[np.searchsorted(0.5 * (p[1:] + p[:-1]), flat, side="right")]
            out[self.live, b] = (weight * (flat - decoded) ** 2).mean(axis=0)
        return out


def _codebooks(normalised: Float64) -> dict[int, NDArray[np.int32]]:
    """Lloyd-Max points of 1 ... MOST_FIXED_BITS bits for these coefficients, in units of 2^-12; Gaussian ones where they are too few."""
    ordered = np.sort(normalised)
    some = ordered[((np.arange(SAMPLES) + 0.5) / SAMPLES * len(ordered)).astype(int)] if len(ordered) else ordered
    out = dict(_gaussian())
    for b in range(1, MOST_FIXED_BITS + 1):
        if np.unique(some).size > 1 << b:
            out[b] = _integers(rate.lloyd_max(some, 1 << b).points)
    return out


@functools.cache
def _gaussian() -> dict[int, NDArray[np.int32]]:
    law = ndtri((np.arange(SAMPLES) + 0.5) / SAMPLES)
    return {b: _integers(rate.lloyd_max(law, 1 << b).points) for b in range(1, MOST_FIXED_BITS + 1)}


def _integers(points: Float64) -> NDArray[np.int32]:
    return np.clip(np.rint(points * fixed.UNIT), -(1 << 24), 1 << 24).astype(np.int32)


def _metrics(layers: list[Layer], kind: str, distances: str, covariance: Float64) -> tuple[Float64, Float64]:
    """M_K before RoPE and M_V of each KV head, means over the texts; of the cost of a squared number where kind is "variance"."""
    one = layers[0]
    if kind == "variance":
        return (
            np.broadcast_to(np.eye(one.head_dim), (one.kv_heads, one.head_dim, one.head_dim)),
            np.broadcast_to(np.eye(one.value_dim), (one.kv_heads, one.value_dim, one.value_dim)),
        )
    key_metrics, query_metrics, value_metrics = [], [], []
    for layer in layers:
        layer.require("queries", by="MetricKLT")
        some = _some_queries(layer)
        turned = layer.rope is not None
        if kind != "queries":
            pre: bool | Literal["own"] = ("own" if distances == "zero" else True) if turned else False
            key_metrics.append(metrics.key_metric(some, pre_rope=pre, coherent=kind != "incoherent", tokens=TOKENS))
        if kind in ("mixed", "queries"):
            # queries of unknown positions cannot be taken back before RoPE: query_metric refuses them
            query_metrics.append(metrics.query_metric(layer, pre_rope=turned))
        value_metrics.append(metrics.value_metric(some, coherent=kind != "incoherent"))
    value = np.mean(value_metrics, axis=0)
    if kind == "queries":
        # only its direction is known: what it costs is set by M_K
        full = [
            metrics.key_metric(_some_queries(layer), pre_rope=layer.rope is not None, tokens=TOKENS) for layer in layers
        ]
        return _as_dear(np.mean(query_metrics, axis=0), np.mean(full, axis=0), covariance, one), value
    key = np.mean(key_metrics, axis=0)
    if kind == "mixed":
        key = 0.5 * key + 0.5 * _as_dear(np.mean(query_metrics, axis=0), key, covariance, one)
    return key, value


def _definite(keys: Float64, values: Float64) -> tuple[Float64, Float64]:
    """Metrics that may be factored: a head whose errors cost next to nothing, or nothing, is coded as if they cost a little."""
    costs = np.concatenate([np.trace(m, axis1=1, axis2=2) / m.shape[-1] for m in (keys, values)])
    least = 1e-9 * float(costs.max()) or 1.0
    return tuple(m + least * np.eye(m.shape[-1]) for m in (keys, values))  # type: ignore[return-value]


def _as_dear(metric: Float64, like: Float64, covariance: Float64, one: Layer) -> Float64:
    """`metric` times what gives it tr(M S) of `like`, head by head."""
    out = metric.copy()
    for h in range(one.kv_heads):
        at = stacked.columns(one, "keys", [h])
        s = covariance[np.ix_(at, at)]
        cost = float(np.sum(metric[h] * s))
        out[h] *= float(np.sum(like[h] * s)) / cost if cost > 0 else 0.0
    return out


def _some_queries(layer: Layer) -> Layer:
    """The layer with QUERIES of its queries, evenly spaced; causal ones of the first tokens see next to nothing and are left out."""
    assert layer.queries is not None
    have = layer.queries.shape[1]
    at = np.unique(np.linspace(min(64, have // 8), have - 1, min(QUERIES, have)).round().astype(int))
    positions = None if layer.query_positions is None else layer.query_positions[at]
    return layer.replace(queries=layer.queries[:, at], query_positions=positions)
