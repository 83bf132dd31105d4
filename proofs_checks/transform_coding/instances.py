"""What the claims run on, and one piece of evidence out of many comparisons.

`small`: every entry of the Jacobian can be moved by itself. `medium`: causal, for Monte Carlo. `real_heads`: all heads of the real cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Head, Layer
from kvtheory.statistics import Interval
from proofs_checks.claim import Function
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, statistical
from proofs_checks.transform_coding import noise

Float = NDArray[np.float64]
#: label, layer, the queries taken
Instance = tuple[str, Layer, NDArray[np.int64]]

PAPER = "2608.14191"
WHITE = "noise of zero mean, independent over tokens and channels, and of the cache (dither, not a centroid quantiser)"

#: mean logit variance at which the remainder of the first order is far below MARGIN: at most 7/2 of the variance where all logits have
#: the same (transform-coding/remainder), and single draws of a sink head whose sink has five times the mean go a hundred times higher
SMALL_NOISE, MARGIN = 1e-5, 0.02


def small(context: Context, kind: str) -> tuple[Layer, float | None]:
    """6 tokens, d = dv = 4, D = 5, 2 heads, 3 queries; every second kind with a scale of its own, else None (1/sqrt d)."""
    layer = context.synthetic(
        kind, kv_heads=1, query_heads=2, tokens=6, head_dim=4, value_dim=4, model_dim=5, queries=3
    )
    scale = 0.8 if context.synthetic_kinds.index(kind) % 2 else None
    return (layer if scale is None else layer.replace(scale=scale)), scale


def medium(context: Context, kind: str) -> Layer:
    """128 tokens, d = dv = 32, 2 heads, 8 causal queries."""
    layer = context.synthetic(kind, kv_heads=1, query_heads=2, tokens=128, head_dim=32, queries=8)
    return noise.causal(layer)


SMALL_SIZES = "n=6, d=dv=4, D=5, 2 heads, 3 queries"
MEDIUM_SIZES = "n=128, d=dv=32, 2 heads, 8 causal queries"


def uneven(rng: np.random.Generator, shape: tuple[int, ...]) -> Float:
    """Variances that differ by token and channel."""
    return 0.1 + rng.exponential(size=shape)


def spread(x: Float, rng: np.random.Generator) -> Float:
    """Noise deviations (n, d) in proportion to each channel's, times a factor for each token: no variance is like another."""
    return x.std(axis=0) * np.exp(0.3 * rng.standard_normal((len(x), 1)))


def _queries(context: Context, layers: Sequence[tuple[str, Layer]]) -> int:
    """Queries of each real head: 8, fewer where there are many heads, so that the quick budget holds on any cache."""
    heads = sum(layer.query_heads for _, layer in layers)
    return context.size(max(2, min(8, 160 // max(heads, 1))), 16)


def draws_each(context: Context, instances: Sequence[Instance], all_heads: int) -> int:
    """Pairs of draws for each real head: `all_heads` shared among the heads, at least 48; more at the full budget."""
    heads = sum(layer.query_heads for _, layer, _ in instances)
    return context.size(1, 4) * max(48, all_heads // max(heads, 1))


@dataclass
class Real:
    """A real layer at some of its queries: its groups, with key noise of mean logit variance 1 and value noise that costs as much."""

    label: str
    layer: Layer
    chosen: NDArray[np.int64]
    rng: np.random.Generator

    def groups(self) -> list[tuple[int, noise.Group, Float, Float]]:
        made = ((kv, noise.Group(self.layer, kv, self.chosen)) for kv in range(self.layer.kv_heads))
        return [(kv, group, *balanced(group, self.rng)) for kv, group in made]

    def ran_on(self, budget: str) -> str:
        return f"{self.label}, n={self.layer.tokens}, {self.layer.query_heads} heads, {len(self.chosen)} queries each, {budget}"


def real_heads(context: Context) -> list[Real]:
    layers = context.real()
    count = _queries(context, layers)
    return [Real(label, layer, noise.rows(layer, count), context.rng(label)) for label, layer in layers]


def balanced(group: noise.Group, rng: np.random.Generator) -> tuple[Float, Float]:
    """Deviations of key noise (mean logit variance 1) and of value noise (the same energy at the output), (n, d) and (n, dv)."""
    keys, values = spread(group.k, rng), spread(group.v, rng)
    keys = keys / np.sqrt(noise.mean_logit_variance(group.heads, keys**2))
    return keys, values * np.sqrt(group.key_part(keys).sum() / group.value_part(values).sum())


def stated_by(function: Function, group: noise.Group, sigma: Float) -> Float:
    """The statement's function on every head of a group, (G, m)."""
    return np.stack([function(h.q, h.k, h.v, h.w_o, sigma**2, h.scale, visible=h.visible) for h in group.heads])


def worst_ratio(truth: Mapping[str, Float], stated: Mapping[str, Float]) -> dict[str, Any]:
    """observed, predicted and worst_case at the query where they differ most."""
    label, j, _ = max(
        (
            (label, j, abs(t / s - 1) if s and np.isfinite(s) else np.inf)
            for label, row in truth.items()
            for j, (t, s) in enumerate(zip(row, stated[label]))
        ),
        key=lambda entry: entry[2],
    )
    return {"observed": truth[label][j], "predicted": stated[label][j], "worst_case": f"{label}, query {j}"}


def all_within(intervals: Mapping[str, Interval], *, predicted: float, margin: float, **more: Any) -> Evidence:
    """One equivalence test for many heads: the head that speaks most against it (all agree only if this one does)."""
    tests = {
        label: statistical(interval=interval, predicted=predicted, margin=margin, **more)
        for label, interval in intervals.items()
    }

    def against(label: str) -> tuple[int, float]:
        interval = intervals[label]
        far = max(abs(interval.low - predicted), abs(interval.high - predicted))
        return {True: 0, None: 1, False: 2}[tests[label].agrees], far

    worst = max(tests, key=against)
    counts = {
        name: sum(t.agrees is verdict for t in tests.values())
        for name, verdict in (("within", True), ("undecided", None), ("outside", False))
    }
    return replace(tests[worst], worst_case=worst, details=counts | tests[worst].details)


def curves_of(
    context: Context, label: str, layer: Layer, chosen: NDArray[np.int64], variances: Sequence[float], draws: int
) -> list[tuple[Head, Float, Float]]:
    """`noise.sample_logits` of every head: (head, linear, excess)."""
    rng = context.rng(f"range {label}")
    heads = [noise.at_rows(layer.head(h), chosen) for h in range(layer.query_heads)]
    return [(head, *noise.sample_logits(head, variances, draws, rng)) for head in heads]
