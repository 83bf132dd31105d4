"""AATC (arXiv 2608.14191): attention-aware transform coding. PCA of keys and of values, and bits by what a channel's error costs.

For each group g of `head_group` KV heads of a layer, keys before RoPE and values apart; tokens x are the group's heads side by side:

    basis     E x x^T = U diag(sigma^2) U^T, uncentred;  z_c = u_c^T x / r_c,  r_c = sigma_c^{1/2} (split="even"), sigma_c or 1
    score     w_c s_c,  s_c = E z_c^2;  weights="attention":
                  keys     w_c = r_c^2 sum_h E (u_c^(k(h))^T q_h)^2               q_h before RoPE: every key at distance 0
                  values   w_c = r_c^2 sum_h ||u_c^(k(h))^T W_O^h||^2             h over the query heads of the group
              u_c^(k): the rows of KV head k, which query head h reads.  weights="variance": w_c = r_c^2, squared error of keys and values
    bits      argmin sum_c score_c 4^{-b_c},  sum_c b_c = budget, 0 <= b_c <= 16;  score_c = (w_c / p95(w)) (s_c / p95(s)), 95th percentiles over
              the layer; one budget for the keys of all layers and one for their values
    z^_c      alpha_c P_b(z_c / alpha_c), a uniform quantiser of 2^b levels on [-1, 1].  scaling, with p_c the 99th percentile of |z_c|:
                  "tokenwise"    alpha = max_c |z_c| of the token, over the group's coded channels
                  "channelwise"  alpha_c = p_c
                  "factored"     alpha_c = p_c max_c |z_c| / p_c

The paper's basis is a whitened SVD of the weights, W S = U Sigma V^T with S S^T = E h h^T of the layer's input h: as W S S^T W^T = E k k^T, its U
is that of PCA (kvtheory.transform.whitened_svd), so the keys alone are enough and no inputs or weights are needed here. Its "even split",
z = Sigma^{1/2} V^T S^{-1} h, is r_c = sigma_c^{1/2}. The scores do not depend on the split, but which channel overloads a token's scale does.

Layers of an index below `protected` have the average and one bit more for keys, the average for values, as even as can be; the other
layers pay for it as far as their bits go. `sinks` first and `window` last tokens are exact.

Against the authors' code: its key weight squares the sum over the KV heads of a group, (sum_k u_c^(k)^T q_k)^2, terms that occur in no head's logit,
here the sum of squares; its value weight reads the first columns of the output matrix, here all query heads; its quantiser has
the levels 2 q / 2^b with -2^(b-1) <= q < 2^(b-1), which is quantiser="midtread": {-1, 0} at one bit; its bisection with a top-up is the exact
minimum here. It recodes the window every 16 tokens; here a token is coded as it leaves the window.

Which quantiser is better depends on the scaling, so None takes "midtread" for "tokenwise" and "midrise" else. Where one alpha serves all
channels of a token most are far smaller, and without a level 0 each of their 1-bit codes is an error of alpha / 2: at 2 bits, midrise against
midtread, attention-output error .144 against .053 (SmolLM2-135M, 21 heads) and .237 against .057 (Qwen2.5-0.5B, 6 heads);
"factored" .044 against .050 and .035 against .059.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks, rate
from kvtheory.distortion import metrics
from kvtheory.layer import Layer
from reference import arguments
from reference import calibration as calibrations
from reference.codec import Layers
from reference.stream import Reader
from reference.transform_coding import fixed, stacked
from reference.transform_coding.basis import Basis, principal
from reference.transform_coding.codec import LayerCoder, LayerKind, StackedCoder, TransformCodec
from reference.transform_coding.fixed import FixedCoder, FixedUnit

__all__ = ["AATC"]

Float64 = NDArray[np.float64]

WEIGHTS = ("attention", "variance")
SCALINGS = ("tokenwise", "channelwise", "factored")
QUANTISERS = ("midrise", "midtread")
SPLITS = ("even", "uneven", "none")
MOST_BITS = 16
SIDES: tuple[Literal["keys", "values"], ...] = ("keys", "values")


@dataclass(frozen=True)
class AATC(TransformCodec):
    """Made by `AATC.fit`; a bare one encodes nothing.

    bits: of a key channel on average over layers, 0 < bits <= 16, in codes alone; value_bits: of a value channel, None: as many.
    weights, scaling, split: above. quantiser: "midrise" (2 code + 1) / 2^b - 1, "midtread", the authors' clamp, None: by scaling. head_group: KV heads coded
    together, at most; the last group may be smaller. protected, sinks, window: above. layers: what `fit` found, the codec's state.

    Held: `bits`; for each token and group 16 for keys and 16 for values, but for "channelwise" (head_dim 64, 3 heads: .083 a number);
    16 for each number of an exact token; a header. Every token takes the same.
    Pitfalls: "protected" layers are paid for by all others: over the 30 layers of SmolLM2-135M the geometric mean of errors at 2 bits is .044 with
    three, .034 with none ("factored"); Qwen2.5-0.5B .061, .034. Of few layers most
    are protected, and the rest pay: 2 bits on average leave 1 to the keys of one layer beside one protected; protected=0 then. "tokenwise" and "factored" clip nothing, "channelwise" a percent of all coefficients.
    """

    bits: float = 2.0
    value_bits: float | None = None
    weights: Literal["attention", "variance"] = "attention"
    scaling: Literal["tokenwise", "channelwise", "factored"] = "tokenwise"
    quantiser: Literal["midrise", "midtread"] | None = None
    split: Literal["even", "uneven", "none"] = "even"
    head_group: int = 4
    protected: int = 3
    sinks: int = 4
    window: int = 128
    layers: tuple[LayerCoder, ...] = field(default=(), repr=False, compare=False, metadata={"state": True})

    coder_parts = ("side", "codes")
    part_names = ("shape", "exact keys", "exact values", *coder_parts)

    def __post_init__(self) -> None:
        for name in ("bits", "value_bits"):
            value = getattr(self, name)
            if value is not None or name == "bits":
                object.__setattr__(self, name, arguments.number(name, value, 0, MOST_BITS))
        arguments.word("weights", self.weights, WEIGHTS)
        arguments.word("scaling", self.scaling, SCALINGS)
        if self.quantiser is not None:
            arguments.word("quantiser", self.quantiser, QUANTISERS)
        arguments.word("split", self.split, SPLITS)
        for name, least in (("head_group", 1), ("protected", 0), ("sinks", 0), ("window", 0)):
            arguments.whole(name, getattr(self, name), least, 1 << 20)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AATC) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)

    @classmethod
    def fit(cls, calibration: Layers, bits: float = 2.0, **options: Any) -> AATC:
        """Fitted to a Cache or a list of Layers; several layers of one index (texts) are pooled. One layer in memory at a time.

        Needs queries for weights="attention" (with rope also query_positions, else queries are taken as they are); output_proj None is concatenation.
        ValueError if a layer has no token behind the sinks or no queries. options: the other fields.
        """
        return cls.fit_rates(calibration, [bits], **options)[0]

    @classmethod
    def fit_rates(cls, calibration: Layers, bits: Sequence[float], **options: Any) -> list[AATC]:
        """`fit` at several rates, which share all but the allocation."""
        bare = [cls(b, **options) for b in bits]
        if not bare:
            return []
        fits, out = [bare[0]._fit(index, own) for index, own in calibrations.by_index(calibration)], []
        for codec in bare:
            for side in SIDES:
                codec._allot(fits, side)
            out.append(cls(codec.bits, **options, layers=tuple(one.coder(codec) for one in fits)))
        return out

    @property
    def levels(self) -> fixed.Levels:
        """The quantiser that is used."""
        return self.quantiser or ("midtread" if self.scaling == "tokenwise" else "midrise")

    def read_coder(self, reader: Reader, width: int) -> StackedCoder:
        return FixedCoder.read(reader, width)

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _fit(self, index: int | None, layers: list[Layer]) -> _Fit:
        one = layers[0]
        x = stacked.calibration(layers, self.sinks)
        prices = (
            None if self.weights == "variance" else {"keys": _query_moments(layers), "values": _projections(layers)}
        )
        out = _Fit(index, one, {side: [] for side in SIDES})
        for side in SIDES:
            for heads in stacked.head_groups(one.kv_heads, self.head_group):
                places = stacked.columns(one, side, heads)
                basis, variances = principal(x[:, places].T @ x[:, places] / len(x))
                sigma = np.sqrt(variances)
                r = {"even": np.sqrt(sigma), "uneven": sigma, "none": np.ones(len(sigma))}[self.split]
                r = np.where(r > 0, r, 1.0)
                w = r**2
                if prices is not None:
                    # row blocks of u_c, one for each KV head: (k, d, c)
                    u = basis.reshape(len(heads), -1, basis.shape[1])
                    w = w * np.einsum("kdc,kde,kec->c", u, prices[side][heads.start : heads.stop], u, optimize=True)
                z = x[:, places] @ basis / r
                percentiles = np.quantile(np.abs(z), 0.99, axis=0)
                out.groups[side].append(_Group(places, basis * r, percentiles, w, variances / r**2))
        return out

    def _allot(self, fits: list[_Fit], side: Literal["keys", "values"]) -> None:
        """Bits of every coefficient of the keys or the values of all layers."""
        bits = self.bits if side == "keys" or self.value_bits is None else self.value_bits
        scores = [fit.scores(side) for fit in fits]
        sizes = np.array([len(score) for score in scores])
        budget = int(np.floor(bits * int(sizes.sum()) + 1e-9))
        apart = np.array([fit.index is not None and fit.index < self.protected for fit in fits])
        protected, others = int(sizes[apart].sum()), int(sizes[~apart].sum())
        spent = int(np.floor(budget * protected / (protected + others) + 1e-9))
        if side == "keys":
            spent += min(protected, budget - spent) if others else 0
        spent = min(spent, MOST_BITS * protected)
        spent = max(spent, budget - MOST_BITS * others)
        for chosen, own, table in ((apart, spent, _even), (~apart, budget - spent, _optimal)):
            at = np.flatnonzero(chosen)
            if len(at):
                every = table(np.concatenate([scores[i] for i in at]), own)
                for i, part in zip(at, np.split(every, np.cumsum(sizes[at])[:-1])):
                    fits[i].bits[side] = part


@dataclass(frozen=True, eq=False)
class _Group:
    """synthesis (rows, c) of z; percentiles (c,) of |z_c|; w (c,), s (c,)."""

    places: NDArray[np.int64]
    synthesis: Float64
    percentiles: Float64
    w: Float64
    s: Float64


class _Fit:
    """What was found in one layer."""

    def __init__(self, index: int | None, layer: Layer, groups: dict[str, list[_Group]]) -> None:
        self.index, self.groups = index, groups
        self.kind = LayerKind.of(layer)
        self.bits: dict[str, NDArray[np.int64]] = {}

    def scores(self, side: str) -> Float64:
        w, s = (np.concatenate([getattr(group, name) for group in self.groups[side]]) for name in ("w", "s"))
        return w / _p95(w) * (s / _p95(s))

    def coder(self, codec: AATC) -> LayerCoder:
        units = []
        one = fixed.unit_of(codec.levels)
        for side in SIDES:
            groups = self.groups[side]
            ends = np.cumsum([len(group.w) for group in groups])[:-1]
            for group, bits in zip(groups, np.split(self.bits[side], ends)):
                alpha = np.ones(len(bits))
                if codec.scaling != "tokenwise":
                    # what never left 0 in calibration has a scale next to nothing; in a group that never did, none
                    alpha = np.maximum(group.percentiles, 1e-6 * float(group.percentiles.max(initial=0.0)))
                basis = Basis.of(group.places, group.synthesis * (alpha / one), np.zeros(len(group.places)))
                units.append(FixedUnit(basis, bits.astype(np.uint8)))
        coder = FixedCoder(tuple(units), "none" if codec.scaling == "channelwise" else "max", levels=codec.levels)
        return self.kind.with_coder(coder)


def _p95(x: Float64) -> float:
    """The 95th percentile; of a spectrum of few channels the largest, and 1 of one that is 0."""
    return float(np.quantile(x, 0.95)) or float(x.max()) or 1.0


def _even(scores: Float64, budget: int) -> NDArray[np.int64]:
    """Alike for all, and what is left to the largest scores."""
    bits, left = divmod(budget, len(scores))
    out = np.full(len(scores), bits, np.int64)
    out[np.argsort(-scores, kind="stable")[:left]] += 1
    return out


def _optimal(scores: Float64, budget: int) -> NDArray[np.int64]:
    """argmin sum_c score_c 4^{-b_c}: the law is convex, so greedy is exact. Scores of 0 get what the others cannot take."""
    return rate.greedy_bits(scores[:, None] * 4.0 ** -np.arange(MOST_BITS + 1), budget)


def _query_moments(layers: list[Layer]) -> Float64:
    """sum_h E[q_h q_h^T] before RoPE for each KV head, up to a factor, (kv_heads, d, d)."""
    for layer in layers:
        layer.require("queries", by="AATC")
        assert layer.queries is not None
        checks.finite("queries", layer.queries, ("head", "query", "channel"))
    # queries of unknown positions cannot be taken back before RoPE: query_metric refuses them
    return np.mean([metrics.query_metric(layer, pre_rope=layer.rope is not None) for layer in layers], axis=0)


def _projections(layers: list[Layer]) -> Float64:
    """sum_h W_O^h W_O^hT for each KV head, (kv_heads, dv, dv)."""
    out = []
    for layer in layers:
        if layer.output_proj is not None:
            checks.finite("output_proj", layer.output_proj, ("head", "value channel", "model channel"))
        w = np.stack([layer.projection(h) for h in range(layer.query_heads)])
        w = w.reshape(layer.kv_heads, layer.group, *w.shape[1:])
        out.append(np.einsum("kgvD,kgwD->kvw", w, w, optimize=True))
    return np.mean(out, axis=0)
