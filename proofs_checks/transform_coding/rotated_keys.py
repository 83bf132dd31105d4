"""The metric of keys stored before RoPE: queries turned back by their distance to each key, not by their own position."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvtheory.layer import Layer, Rope
from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, NotRun, numerical
from proofs_checks.papers import OWN
from proofs_checks.transform_coding.group_noise import Joint, key_quadratic
from proofs_checks.transform_coding.grouped_metrics import (
    LEVEL,
    WHERE,
    _apart,
    _layer,
    chosen_queries,
    one_head,
    roots,
    small_layer,
    worst_entry,
)
from proofs_checks.transform_coding.instances import PAPER, WHITE, all_within
from proofs_checks.transform_coding.parts import Float, KVHead, real_kv_heads

ROPES = {
    "halves paired, angles 1 and 0.3": Rope(np.array([1.0, 0.3])),
    "neighbours paired, angles 2 and 0.1": Rope(np.array([2.0, 0.1]), layout="interleaved"),
    "one pair of two turned, angle 0.7": Rope(np.array([0.7])),
    "scaled by 1.3, angles 1 and 0.3": Rope(np.array([1.0, 0.3]), attention_scaling=1.3),
}


def _turned(layer: Layer, rope: Rope) -> tuple[Layer, Float]:
    """(the layer with its keys and queries turned by their positions, the keys before that)."""
    stored = np.asarray(layer.keys, dtype=np.float64)
    assert layer.queries is not None and layer.query_positions is not None
    return (
        layer.replace(
            keys=rope.apply(stored, layer.positions),
            queries=rope.apply(np.asarray(layer.queries, dtype=float), layer.query_positions),
            rope=rope,
        ),
        stored[0],
    )


def _replaced(by: Callable[[Layer, Function], Float]) -> Callable[[Function], Function]:
    """key_metric(layer, pre_rope=True) replaced; without pre_rope it stays."""

    def wrong(true: Function) -> Function:
        def mutated(layer: Layer, **options: Any) -> Float:
            return by(layer, true) if options.get("pre_rope") else np.asarray(true(layer, **options))

        return mutated

    return wrong


def _against(layer: Layer, true: Function) -> Float:
    """Distances of the wrong sign: positions of keys and queries turned round."""
    assert layer.rope is not None
    back = Rope(-layer.rope.inv_freq, layer.rope.layout, layer.rope.attention_scaling)
    return np.asarray(true(layer.replace(rope=back), pre_rope=True))


def _no_distance(layer: Layer, true: Function) -> Float:
    """Queries before RoPE, turned by nothing: the metric after RoPE with the queries' own rotation undone (attention as it is)."""
    m = np.asarray(true(layer))
    out = np.zeros_like(m)
    assert layer.rope is not None and layer.queries is not None and layer.query_positions is not None
    for j in range(layer.queries.shape[1]):
        one = layer.replace(queries=layer.queries[:, j : j + 1], query_positions=layer.query_positions[j : j + 1])
        here = np.asarray(true(one))
        turn = layer.rope.undo(np.eye(layer.head_dim)[:, None], layer.query_positions[j : j + 1])[:, 0]
        out += turn.T @ here @ turn / layer.queries.shape[1]
    return out


def _evenly(layer: Layer, true: Function) -> Float:
    """Every distance of a token that a query sees counted alike, in place of by a_i^2 ||u_i||^2."""
    assert layer.rope is not None
    m = np.asarray(true(layer))
    total = np.zeros_like(m)
    for i in range(layer.tokens):
        turn = layer.rope.apply(np.eye(layer.head_dim)[:, None], layer.positions[i : i + 1])[:, 0]
        total += turn @ m @ turn.T
    return total / layer.tokens


def _without_factor(layer: Layer) -> Rope:
    assert layer.rope is not None
    return Rope(layer.rope.inv_freq, layer.rope.layout)


def _other_pairs(layer: Layer) -> Rope:
    assert layer.rope is not None
    return Rope(
        layer.rope.inv_freq,
        "half" if layer.rope.layout == "interleaved" else "interleaved",
        layer.rope.attention_scaling,
    )


@claim(
    id="transform-coding/rope-metric",
    paper=OWN,
    section="Theorem 1 of arXiv 2608.14191 for keys stored before RoPE",
    statement="Noise of covariance S on keys before RoPE moves the summed output of the query heads by tr(M S), where every key meets the"
    " query turned back by their distance m − i ≥ 0, distances weighted as the attention weights them. The direction of the turn matters.",
    formula="logit = (R_{m−i} q)ᵀ k_i/√d;  M = (1/d) E Σ_i Σ_{h,h'} a_hi a_h'i ⟨u_hi, u_h'i⟩ (R_{m−i}q_h)(R_{m−i}q_h')ᵀ",
    assumptions=(WHITE.replace("channels", "not over channels, where it may correlate"), "first order in the noise"),
    expected=Verdict.HOLDS_UNDER,
    functions={"key_metric": "kvtheory.distortion.key_metric"},
    mutants=[
        Mutant("turned the other way", "key_metric", _replaced(_against)),
        Mutant("distance 0: queries before RoPE", "key_metric", _replaced(_no_distance)),
        Mutant("the metric of keys after RoPE", "key_metric", _replaced(lambda layer, true: np.asarray(true(layer)))),
        Mutant("all distances alike", "key_metric", _replaced(_evenly)),
        Mutant("query heads one by one", "key_metric", _apart),
        Mutant("RoPE's factor left out", "key_metric", _layer(rope=_without_factor)),
        Mutant("the other pairs of channels", "key_metric", _layer(rope=_other_pairs)),
        *systematic.scales("key_metric"),
    ],
)  # fmt: skip
def rope_metric(context: Context, *, key_metric: Function) -> Iterator[Evidence | NotRun]:
    for kind, (what, rope) in zip(("gaussian", "outlier_channels", "heavy_tail", "clustered"), ROPES.items()):
        layer, stored = _turned(small_layer(context, kind), rope)
        truth = context.memo(
            kind,
            lambda layer=layer, rope=rope, stored=stored: key_quadratic(  # type: ignore[misc]
                layer, 0, lambda k: rope.apply(k, layer.positions), stored
            ),
        )  # type: ignore[misc]
        yield numerical(
            what="M = mean over queries of Σ_i J_iᵀJ_i, J the derivative of the heads' summed output by differences in every key before RoPE,"
            " worst entry",
            ran_on=f"{kind}, {what}, {WHERE}, seed {context.seed}", **worst_entry(np.asarray(key_metric(layer, pre_rope=True))[0], truth), tolerance=1e-7,
            because="sixth-order differences at 0.015 logits: 1e-9 of an entry, in a sum of 24 that may cancel to a hundredth",
        )  # fmt: skip
    heads = _with_rope(context)
    if heads:
        level = 1 - context.alpha(len(heads))
        found = context.memo("real", lambda: [_measured(context, h, context.size(4, 16)) for h in heads])
        intervals, others = {}, []
        for head, (part, root, energies) in zip(heads, found):
            stated = float(np.einsum("ic,ij,jc->", root, np.asarray(key_metric(part, pre_rope=True))[0], root))
            intervals[head.label] = mean_interval(energies / stated, level)
            wrong = context.memo(("turned", head.label), lambda part=part: _against(part, context_metric()))[0]  # type: ignore[misc]
            others.append(float(np.einsum("ic,ij,jc->", root, wrong, root)) / float(energies.mean()))
        yield all_within(
            intervals,
            what="measured E‖do‖² / tr(MS), noise common to the query heads on keys before RoPE, worst KV head: 1 within 2 %",
            ran_on=f"{len(heads)} real KV heads (real heads), S of rank 8 in proportion to the channels, 4 queries", predicted=1.0, margin=0.02,
            note=f"turned the other way the metric states {min(others):.2f} to {max(others):.2f} of the damage",
        )  # fmt: skip


def context_metric() -> Function:
    """key_metric itself, for a measurement that is reported and not judged."""
    from kvtheory.distortion import key_metric

    return key_metric


def _with_rope(context: Context) -> list[KVHead]:
    return [h for h in real_kv_heads(context) if h.layer.rope is not None and h.layer.query_positions is not None]


def _measured(context: Context, head: KVHead, queries: int) -> tuple[Layer, Float, Float]:
    """(the layer reduced to the head, root of S, E||do||^2 over the level)."""
    rng = context.rng(f"noise {head.label}")
    chosen = chosen_queries(head, queries)
    joint = Joint.of(head, chosen)
    rope = head.layer.rope
    assert rope is not None
    stored = rope.undo(head.layer.keys[head.kv : head.kv + 1], head.layer.positions)[0]
    root = roots(rng, stored.std(axis=0))
    root /= np.sqrt(float(np.mean((head.layer.scale * joint.q @ root) ** 2) * 8))
    energies = joint.keys_energy(root, lambda x: rope.apply(x, head.layer.positions), context.size(4, 16), rng, LEVEL)
    return one_head(head, chosen), root, energies


def _quarter_turn() -> tuple[Layer, Float]:
    """One channel pair that turns by an eighth of pi a position, query (1, 0) at 22, keys at 2 and 18: both a quarter turn away."""
    rope = Rope(np.array([np.pi / 8]))
    stored = np.array([[0.0, 0.4], [0.0, -0.4]])
    positions, at = np.array([2, 18]), np.array([22])
    query = np.array([[[1.0, 0.0]]])
    layer = Layer(
        rope.apply(stored[None], positions), np.array([[[1.0], [-1.0]]]), rope.apply(query, at), np.ones((1, 1, 1)), rope=rope,
        positions=positions, query_positions=at,
    )  # fmt: skip
    return layer, stored


@claim(
    id="transform-coding/rope-distance-zero",
    paper=PAPER,
    section="channel weights from queries before RoPE, as in the authors' code",
    statement="Queries before RoPE, at distance 0 to every key, price the channels of keys before RoPE up to a common factor.",
    formula="M ∝ E q qᵀ with q before RoPE",
    expected=Verdict.FAILS,
    functions={"key_metric": "kvtheory.distortion.key_metric", "query_metric": "kvtheory.distortion.query_metric"},
    mutants=[
        Mutant("distance 0 in the metric as well", "key_metric", _replaced(_no_distance)),
        Mutant("the metric of keys after RoPE", "key_metric", _replaced(lambda layer, true: np.asarray(true(layer)))),
        *systematic.scales("key_metric"),
        Mutant("queries after RoPE", "query_metric", lambda true: lambda layer, **options: true(layer)),
        *systematic.scales("query_metric"),
        Mutant("queries turned twice", "query_metric", lambda true: lambda layer, **options: true(layer.replace(rope=Rope(2 * layer.rope.inv_freq, layer.rope.layout)), **options)),
    ],
    correction="transform-coding/rope-metric",
)  # fmt: skip
def rope_distance_zero(context: Context, *, key_metric: Function, query_metric: Function) -> Iterator[Evidence]:
    layer, stored = _quarter_turn()
    where = "d=2, an eighth of π a position, query (1, 0) at 22, keys at 2 and 18, both a quarter turn away"
    rope = layer.rope
    assert rope is not None
    truth = context.memo("turn", lambda: key_quadratic(layer, 0, lambda k: rope.apply(k, layer.positions), stored))
    total = float(np.trace(truth))
    metric = np.asarray(key_metric(layer, pre_rope=True))[0]
    yield numerical(
        role="control", what="trace of M = that of the derivatives by differences in the keys before RoPE", ran_on=where, observed=float(np.trace(metric)),
        predicted=total, tolerance=1e-8, because="sixth-order differences",
    )  # fmt: skip
    yield numerical(
        role="control", what="1 + share of channel 2 in the damage, by derivatives: all of it", ran_on=where, observed=1 + truth[1, 1] / total, predicted=2.0,
        tolerance=1e-8, because="sixth-order differences",
    )  # fmt: skip
    yield numerical(
        role="control", what="1 + share of channel 2 in M", ran_on=where, observed=1 + metric[1, 1] / total, predicted=2.0, tolerance=1e-8, because="a turn known to rounding",
    )  # fmt: skip
    before = np.asarray(query_metric(layer, pre_rope=True))[0]
    yield numerical(
        role="control", what="trace of E qqᵀ/d = 1/2, all of it in channel 1", ran_on=where, observed=before[0, 0], predicted=0.5, tolerance=1e-12, because="one product",
    )  # fmt: skip
    yield numerical(
        what="1 + share of channel 2 by queries before RoPE = 1 + its share in the damage", ran_on=f"smallest counterexample: {where}",
        observed=1 + before[1, 1] / np.trace(before), predicted=1 + truth[1, 1] / total, tolerance=1e-8, because="sixth-order differences",
        note="the channel without any price takes all the damage",
    )  # fmt: skip
    heads = _with_rope(context)
    if heads:
        spreads, cosines = {}, []
        for head in heads:
            part = one_head(head, chosen_queries(head, context.size(4, 16)))
            m, q = np.asarray(key_metric(part, pre_rope=True))[0], np.asarray(query_metric(part, pre_rope=True))[0]
            prices = np.diag(q) / np.diag(m)
            spreads[head.label] = float(prices.max() / prices.min())
            cosines.append(float((m * q).sum() / np.sqrt((m**2).sum() * (q**2).sum())))
        worst = max(spreads, key=lambda label: spreads[label])
        yield numerical(
            what="price of a channel by queries before RoPE over its price in M, largest over least channel, worst head: 1 within 10 %",
            ran_on=f"{len(heads)} real KV heads (real heads), the same 4 queries in both", observed=spreads[worst], predicted=1.0, tolerance=0.1,
            because="the statement is one of proportion; both are exact for these queries", worst_case=worst,
            note=f"{min(spreads.values()):.1f} to {spreads[worst]:.1f}; cosine of the two matrices {min(cosines):.2f} to {max(cosines):.2f}",
            details=spreads,
        )  # fmt: skip
