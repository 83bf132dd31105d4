"""The metric of a stored head: coherent over the query heads that read it, which no sum over heads taken one by one is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Layer
from kvtheory.statistics import mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical
from proofs_checks.papers import OWN
from proofs_checks.transform_coding import noise
from proofs_checks.transform_coding.group_noise import Joint, key_quadratic, value_quadratic
from proofs_checks.transform_coding.instances import PAPER, WHITE, all_within
from proofs_checks.transform_coding.parts import Float, KVHead, real_kv_heads

#: mean square of the keys' noise in the logits: the remainder is at most 7/2 of the variance where all logits have the same
LEVEL = 1e-6
SIZES = {"kv_heads": 1, "query_heads": 3, "tokens": 6, "head_dim": 4, "value_dim": 3, "model_dim": 5, "queries": 4}
WHERE = "3 query heads, n=6, d=4, dv=3, D=5, 4 causal queries"


def small_layer(context: Context, kind: str) -> Layer:
    layer = context.synthetic(kind, **SIZES)
    return layer.replace(query_positions=[1, 3, 4, 5])


def worst_entry(stated: Float, truth: Float) -> dict[str, Any]:
    """The entry that differs most, relative to the root of its diagonal entries' product; as 1 + entry / root."""
    size = np.sqrt(np.outer(np.diag(truth), np.diag(truth)))
    at = np.unravel_index(int(np.argmax(np.abs(stated - truth) / size)), truth.shape)
    return {
        "observed": 1 + float(stated[at] / size[at]), "predicted": 1 + float(truth[at] / size[at]), "worst_case": f"entry {tuple(int(i) for i in at)}",
    }  # fmt: skip


def chosen_queries(head: KVHead, count: int) -> NDArray[np.int64]:
    return noise.rows(head.layer, count)


def at_queries(layer: Layer, chosen: NDArray[np.int64]) -> Layer:
    assert layer.queries is not None
    seen = None if layer.query_positions is None else layer.query_positions[chosen]
    return layer.replace(queries=layer.queries[:, chosen], query_positions=seen)


def one_head(head: KVHead, chosen: NDArray[np.int64]) -> Layer:
    """The layer reduced to one KV head, its query heads and some queries."""
    layer = at_queries(head.layer, chosen)
    assert layer.queries is not None
    own = slice(head.heads.start, head.heads.stop)
    return layer.replace(
        keys=layer.keys[head.kv : head.kv + 1], values=layer.values[head.kv : head.kv + 1], queries=layer.queries[own],
        output_proj=np.stack([head.layer.projection(h) for h in head.heads]),
    )  # fmt: skip


def roots(rng: np.random.Generator, deviation: Float) -> Float:
    """(d, 8): a square root of a noise covariance of rank 8, channels in proportion to `deviation`."""
    return deviation[:, None] * rng.standard_normal((len(deviation), 8))


def _by(change: Callable[[Float], Float]) -> Callable[[Function], Function]:
    return lambda true: lambda layer, **options: change(np.asarray(true(layer, **options)))


def _apart(true: Function) -> Function:
    return lambda layer, **options: true(layer, **(options | {"coherent": False}))


def _layer(**changes: Callable[[Layer], Any]) -> Callable[[Function], Function]:
    return lambda true: lambda layer, **options: true(layer.replace(**{k: f(layer) for k, f in changes.items()}), **options)  # fmt: skip


METRIC_MUTANTS = [
    *systematic.scales("key_metric"),
    *systematic.dimension("key_metric", lambda arguments: arguments["layer"].head_dim),
    Mutant("query heads one by one", "key_metric", _apart),
    Mutant("scale once, not squared", "key_metric", _layer(scale=lambda layer: np.sqrt(layer.scale))),
    Mutant("causality ignored", "key_metric", _layer(query_positions=lambda layer: None, window=lambda layer: None)),
    Mutant("W_O left out", "key_metric", _layer(output_proj=lambda layer: None)),
    Mutant("diagonal only", "key_metric", _by(lambda m: np.stack([np.diag(np.diag(x)) for x in m]))),
]
VALUE_METRIC_MUTANTS = [
    *systematic.scales("value_metric"),
    Mutant("value_metric: a norm for its square", "value_metric", _by(lambda m: m / np.sqrt(np.trace(m, axis1=1, axis2=2))[:, None, None])),
    Mutant("value_metric: query heads one by one", "value_metric", _apart),
    Mutant("value_metric: causality ignored", "value_metric", _layer(query_positions=lambda layer: None, window=lambda layer: None)),
    Mutant("value_metric: diagonal only", "value_metric", _by(lambda m: np.stack([np.diag(np.diag(x)) for x in m]))),
]  # fmt: skip


@claim(
    id="transform-coding/group-metric",
    paper=OWN,
    section="Theorem 1 of arXiv 2608.14191 for grouped queries and any noise covariance",
    statement="Noise of covariance S on the keys of a KV head, alike for all tokens, moves the summed output of its query heads by tr(M_K S) to"
    " first order; on the values by tr(M_V S). The heads that read one stored vector add up before they are squared.",
    formula="M_K = (1/d) E Σ_i Σ_{h,h'} a_hi a_h'i ⟨u_hi, u_h'i⟩ q_h q_h'ᵀ,  M_V = E Σ_i A_i A_iᵀ,  A_i = Σ_h a_hi W_O^h",
    assumptions=(WHITE.replace("channels", "not over channels, where it may correlate"), "first order in the keys' noise"),
    expected=Verdict.HOLDS_UNDER,
    functions={"key_metric": "kvtheory.distortion.key_metric", "value_metric": "kvtheory.distortion.value_metric"},
    mutants=[*METRIC_MUTANTS, *VALUE_METRIC_MUTANTS],
)  # fmt: skip
def group_metric(context: Context, *, key_metric: Function, value_metric: Function) -> Iterator[Evidence]:
    for kind in context.synthetic_kinds:
        layer = small_layer(context, kind)
        keys = np.asarray(layer.keys[0], dtype=np.float64)
        truth = context.memo(("keys", kind), lambda layer=layer, keys=keys: key_quadratic(layer, 0, lambda k: k, keys))  # type: ignore[misc]
        yield numerical(
            what="M_K = mean over queries of Σ_i J_iᵀJ_i, J the derivative of the heads' summed output by differences in every key, worst entry",
            ran_on=f"{kind}, {WHERE}, seed {context.seed}", **worst_entry(key_metric(layer)[0], truth), tolerance=1e-7,
            because="sixth-order differences at 0.015 logits: 1e-9 of an entry, in a sum of 24 that may cancel to a hundredth",
        )  # fmt: skip
        truth = context.memo(("values", kind), lambda layer=layer: value_quadratic(layer, 0))  # type: ignore[misc]
        yield numerical(
            what="M_V = mean over queries of Σ_i J_iᵀJ_i, J exact: the heads' summed output for unit values, worst entry",
            ran_on=f"{kind}, {WHERE}, seed {context.seed}", **worst_entry(value_metric(layer)[0], truth), tolerance=1e-12, because="sums of 24 products",
        )  # fmt: skip
    heads = real_kv_heads(context)
    if heads:
        level = 1 - context.alpha(len(heads))
        found = context.memo("real", lambda: [measured(context, h, context.size(6, 24)) for h in heads])
        intervals, ratios = {}, {}
        for head, (part, ((key_root, energies), (value_root, energy))) in zip(heads, found):
            intervals[head.label] = mean_interval(energies / _stated(key_metric(part), key_root), level)
            ratios[head.label] = energy / _stated(value_metric(part), value_root)
        ran_on = f"{len(heads)} real KV heads (real heads), S of rank 8 in proportion to the channels, {context.size(6, 24)} queries"
        yield all_within(
            intervals,
            what="measured E‖do‖² / tr(MS), noise common to the query heads on the keys, worst KV head: 1 within 2%",
            ran_on=ran_on, predicted=1.0, margin=0.02,
        )  # fmt: skip
        worst = max(ratios, key=lambda label: abs(ratios[label] - 1))
        yield numerical(
            what="E‖do‖² / tr(MS), noise common to the query heads on the values, token by token, worst KV head", ran_on=ran_on,
            observed=ratios[worst], predicted=1.0, tolerance=1e-10, because="sums of as many squares as tokens", worst_case=worst,
        )  # fmt: skip


def _stated(metric: Float, root: Float) -> float:
    """tr(M S) of S = root root^T."""
    return float(np.einsum("ic,ij,jc->", root, np.asarray(metric)[0], root))


Samples = tuple[tuple[Float, Float], tuple[Float, float]]


def measured(context: Context, head: KVHead, queries: int) -> tuple[Layer, Samples]:
    """(the layer reduced to the head, ((root of S, draws of E||do||^2) of the keys, (root, E||do||^2) of the values))."""
    rng = context.rng(f"noise {head.label}")
    chosen = chosen_queries(head, queries)
    joint = Joint.of(head, chosen)
    keys, values = (np.asarray(x[head.kv], dtype=np.float64).std(axis=0) for x in (head.layer.keys, head.layer.values))
    key_root, value_root = roots(rng, keys), roots(rng, values)
    variance = float(np.mean((head.layer.scale * joint.q @ key_root) ** 2) * 8)
    key_root /= np.sqrt(variance)  # mean logit variance 1, times the level
    by_keys = joint.keys_energy(key_root, np.asarray, context.size(4, 16), rng, LEVEL)
    by_values = joint.values_energy(value_root)
    return one_head(head, chosen), ((key_root, by_keys), (value_root, by_values))


def _two_heads(second: float) -> Layer:
    """Two query heads of one KV head with the same queries, W_O of the second `second` times that of the first; 3 tokens."""
    q = np.array([[[1.0, 0.5], [-0.3, 0.8]]])
    w = np.array([[[1.0, 0.2], [0.0, 1.0]]])
    k = np.array([[[0.4, 0.1], [-0.2, 0.3], [0.1, -0.6]]])
    v = np.array([[[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]])
    return Layer(k, v, np.concatenate([q, q]), np.concatenate([w, second * w]))


@claim(
    id="transform-coding/separate-heads",
    paper=PAPER,
    section="Theorem 1, which is about one query head, summed over the heads of a group",
    statement="The metric of a stored KV head is the sum of the metrics of the query heads that read it, each taken by itself.",
    formula="M_K = Σ_h (1/d) E Σ_i a_hi² ‖u_hi‖² q_h q_hᵀ,  M_V = Σ_h E Σ_i a_hi² W_O^h W_O^hᵀ",
    expected=Verdict.FAILS,
    functions={"key_metric": "kvtheory.distortion.key_metric", "value_metric": "kvtheory.distortion.value_metric"},
    mutants=[
        Mutant("coherent whatever is asked", "key_metric", lambda true: lambda layer, **options: true(layer)),
        *systematic.scales("key_metric"),
        *systematic.dimension("key_metric", lambda arguments: arguments["layer"].head_dim),
        Mutant("W_O left out", "key_metric", _layer(output_proj=lambda layer: None)),
        Mutant("value_metric: coherent whatever is asked", "value_metric", lambda true: lambda layer, **options: true(layer)),
        *systematic.scales("value_metric"),
        Mutant("value_metric: a norm for its square", "value_metric", _by(lambda m: m / np.sqrt(np.trace(m, axis1=1, axis2=2))[:, None, None])),
    ],
    correction="transform-coding/group-metric",
)  # fmt: skip
def separate_heads(context: Context, *, key_metric: Function, value_metric: Function) -> Iterator[Evidence]:
    because = "sums of six products"
    for second, together in ((1.0, 4), (-1.0, 0), (0.0, 1)):
        layer, alone = _two_heads(second), _two_heads(0.0)
        where = (
            f"2 query heads with the same queries, W_O of the second {second:g} times that of the first, 3 tokens, d=2"
        )
        for name, metric, quadratic in (
            ("M_K", key_metric, _keys_by_differences),
            ("M_V", value_metric, value_quadratic),
        ):
            one = float(np.trace(quadratic(alone, 0)))
            truth = float(np.trace(quadratic(layer, 0)))
            yield numerical(
                role="control", what=f"1 + trace of {name} by derivatives, over that of one head: {1 + together}", ran_on=where,
                observed=1 + truth / one, predicted=1 + together, tolerance=1e-8, because="sixth-order differences, or exact",
            )  # fmt: skip
            yield numerical(
                role="control", what=f"trace of {name} with coherent=False over that of one head: {1 + second**2:g}", ran_on=where,
                observed=float(np.trace(metric(layer, coherent=False)[0])) / one, predicted=1 + second**2, tolerance=1e-8, because=because,
            )  # fmt: skip
            if second:
                yield numerical(
                    what=f"trace of the heads' {name} added up = that of the group, both over that of one head",
                    ran_on=f"smallest counterexample: {where}", observed=float(np.trace(metric(layer, coherent=False)[0])) / one, predicted=truth / one,
                    tolerance=1e-8, because=because,
                )  # fmt: skip
    heads = real_kv_heads(context)
    if heads:
        level = 1 - context.alpha(len(heads))
        found = context.memo("real", lambda: [measured(context, h, context.size(6, 24)) for h in heads])
        intervals, ratios = {}, {}
        for head, (part, ((key_root, energies), (value_root, energy))) in zip(heads, found):
            intervals[head.label] = mean_interval(energies / _stated(key_metric(part, coherent=False), key_root), level)
            ratios[head.label] = energy / _stated(value_metric(part, coherent=False), value_root)
        ran_on = f"{len(heads)} real KV heads (real heads), S of rank 8 in proportion to the channels"
        estimates = sorted(i.estimate for i in intervals.values())
        yield all_within(
            intervals,
            what="measured E‖do‖² / tr(MS) with the heads' metrics added up, noise on the keys, worst KV head: 1 within 2%",
            ran_on=ran_on, predicted=1.0, margin=0.02, note=f"from {estimates[0]:.2f} to {estimates[-1]:.2f}",
        )  # fmt: skip
        worst = max(ratios, key=lambda label: abs(ratios[label] - 1))
        yield numerical(
            what="E‖do‖² / tr(MS) with the heads' metrics added up, noise on the values, worst KV head", ran_on=ran_on,
            observed=ratios[worst], predicted=1.0, tolerance=1e-10, because="sums of as many squares as tokens", worst_case=worst,
            note=f"from {min(ratios.values()):.2f} to {max(ratios.values()):.2f}",
        )  # fmt: skip


def _keys_by_differences(layer: Layer, kv: int) -> Float:
    return key_quadratic(layer, kv, lambda k: k, np.asarray(layer.keys[kv], dtype=np.float64))
