"""Bits by weight times variance against bits by variance alone: what attention-aware weights gain, and on which heads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from kvtheory import attention, rate
from kvtheory.layer import Layer
from kvtheory.statistics import Interval, geometric_mean_interval
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact, numerical, statistical
from proofs_checks.papers import OWN
from proofs_checks.transform_coding.instances import PAPER
from proofs_checks.transform_coding.klt_limits import _rows_for_columns
from proofs_checks.transform_coding.optimal_transform import _eigen
from proofs_checks.transform_coding.parts import SINKS, Float, KVHead, definite, random_pairs, real_kv_heads, real_parts
from proofs_checks.transform_coding.quantiser_noise import code_of

BITS = (2, 3, 4)
#: parts of the held-out queries, in order of position
SEGMENTS = 8
#: most bits of a coefficient
LEVELS = 9


@claim(
    id="transform-coding/weights-gain",
    paper=OWN,
    section="the gain of weights inside one basis",
    statement="Inside one basis, bits by weight times variance leave less weighted error than bits by variance by the arithmetic over the"
    " geometric mean of the weights, at high rate: nothing where all coefficients have one price, however anisotropic the data.",
    formula="D_var / D_att = (1/d) Σ_c w_c / (∏_c w_c)^{1/d} ≥ 1",
    assumptions=("high rate", "weights that are the prices of the errors to come"),
    expected=Verdict.HOLDS_UNDER,
    functions={"coded_distortion": "kvtheory.transform.coded_distortion", "reverse_waterfill": "kvtheory.rate.reverse_waterfill"},
    mutants=[
        *(Mutant(f"reverse_waterfill: {name}", "reverse_waterfill", by) for name, by in (
            ("equal bits", lambda true: lambda variances, rate: np.full(len(variances), float(rate))),
            ("log₂ for ½ log₂", lambda true: lambda variances, rate: true(np.asarray(variances) ** 2, rate)),
        )),
        *systematic.natural_log("reverse_waterfill"),
        Mutant(
            "no inverse: weights of the rows for those of T⁻¹'s columns", "coded_distortion",
            lambda true: lambda basis, covariance, metric, bits, law=None: _rows_for_columns(basis, covariance, metric, bits, law),
        ),
        Mutant("weights left out of D", "coded_distortion", lambda true: lambda basis, covariance, metric, bits, law=None: true(basis, covariance, np.eye(len(metric)), bits, law)),
        *systematic.square_dropped("coded_distortion"),
    ],
)  # fmt: skip
def weights_gain(context: Context, *, coded_distortion: Function, reverse_waterfill: Function) -> Iterator[Evidence]:
    pairs = [
        (f"d={d}, random Σ and M, pair {i}, seed {context.seed}", s, m)
        for i, (d, s, m) in enumerate(random_pairs(context.rng("pairs"), (2, 5, 16), context.size(2, 6)))
    ]
    pairs.append(("d=3, one price for all, Σ = diag(100, 1, 1/100)", np.diag([100.0, 1.0, 0.01]), 2 * np.eye(3)))
    parts = real_parts(context)
    pairs += [(p.label, definite(p.covariance, 1e-6), definite(p.metric)) for p in parts]
    for where, covariance, metric in pairs:
        values, u = _eigen(covariance)
        rows = u.T * np.exp(np.linspace(-1, 1, len(values)))[:, None]  # not orthogonal, so that T and T^{-T} differ
        s = values * np.exp(2 * np.linspace(-1, 1, len(values)))
        w = np.einsum("ic,ij,jc->c", u, metric, u) * np.exp(-2 * np.linspace(-1, 1, len(values)))
        by_variance = coded_distortion(rows, covariance, metric, reverse_waterfill(s, 14.0))
        by_weight = coded_distortion(rows, covariance, metric, reverse_waterfill(w * s, 14.0))
        yield numerical(
            what="D with bits by variance over D with bits by weight times variance = arithmetic over geometric mean of the weights, 14 bits, PCA's"
            " basis with rows scaled",
            ran_on=where, observed=by_variance / by_weight, predicted=float(w.mean() / np.exp(np.log(w).mean())), tolerance=1e-9,
            because="high rate: at 14 bits no coefficient is without; eigenvectors of condition up to 1e6",
        )  # fmt: skip
    if parts:
        gains: dict[str, list[float]] = {"keys": [], "values": []}
        for p in parts:
            w = np.einsum("ic,ij,jc->c", *((u := _eigen(p.covariance)[1]), p.metric, u))
            gains[p.kind].append(float(0.5 * np.log2(w.mean() / np.exp(np.log(w).mean()))))
        yield numerical(
            role="assumption",
            what="bits a component that weights save in PCA's basis of values at high rate, by the measured metric, largest of all heads",
            ran_on=f"{len(parts)} parts of real heads", observed=max(gains["values"]), predicted=0.1, relation="<=", tolerance=0.0,
            because="a measurement, not a comparison", note=f"keys {min(gains['keys']):.2f} to {max(gains['keys']):.2f} bit: W_O prices a value's channels nearly"
            " alike, queries do not price a key's so",
            details=gains,
        )  # fmt: skip


class _Coded(NamedTuple):
    """Held-out squared output errors of one part of one KV head, (segments,), by method and bits."""

    head: str
    kind: str
    errors: dict[tuple[str, int], Float]


def _halves(layer: Layer) -> tuple[Layer, Layer, int]:
    """(calibration, test, first token of the second half): queries by position, or in order where they see every token."""
    assert layer.queries is not None
    middle = layer.tokens // 2
    if layer.query_positions is None:
        early = np.arange(layer.queries.shape[1]) < layer.queries.shape[1] // 2
    else:
        early = layer.query_positions < layer.positions[middle]
    found = []
    for kept in (early, ~early):
        seen = None if layer.query_positions is None else layer.query_positions[kept]
        found.append(layer.replace(queries=layer.queries[:, kept], query_positions=seen))
    return found[0], found[1], middle


@functools.cache
def _table() -> Float:
    return rate.gaussian_table(LEVELS)


def coder(calibration: Float, metric: Float, weighted: bool, bits: int) -> Callable[[Float], Float]:
    """PCA of the calibration rows, integer bits by w s or s under the Gaussian table, Gaussian Lloyd-Max at their deviations."""
    mean = calibration.mean(axis=0)
    centred = calibration - mean
    u = _eigen(centred.T @ centred / len(centred))[1]
    s = ((centred @ u) ** 2).mean(axis=0)
    w = np.einsum("ic,ij,jc->c", u, metric, u) if weighted else np.ones(len(s))
    given = rate.integer_bits((w * s)[:, None] * _table(), bits * len(s))
    deviation = np.sqrt(s)

    def code(x: Float) -> Float:
        y = (x - mean) @ u
        held = np.zeros_like(y)
        for b in np.unique(given[given > 0]):
            own = given == b
            q = code_of(int(b))
            held[:, own] = deviation[own] * q.decode(q.encode(y[:, own] / deviation[own]))
        return held @ u.T + mean

    return code


def _measure(head: KVHead, metrics: dict[str, Float], bits_of: tuple[int, ...]) -> list[_Coded]:
    """Errors on the second half of the queries, coders fitted on the first half of the tokens."""
    layer = head.layer
    _, test, middle = _halves(layer)
    exact_keys, exact_values = (np.asarray(x[head.kv], dtype=np.float64) for x in (layer.keys, layer.values))
    stored = exact_keys if layer.rope is None else layer.rope.undo(exact_keys[None], layer.positions)[0]
    heads = [test.head(h) for h in head.heads]
    stacked = np.concatenate([h.w_o for h in heads])
    lengths = np.asarray(np.linalg.qr(stacked.T, mode="r")).T.reshape(len(heads), heads[0].w_o.shape[0], -1)
    weights = [attention.weights(h.q, exact_keys, h.scale, visible=h.visible) for h in heads]
    truth = sum(a @ exact_values @ w for a, w in zip(weights, lengths))
    found = []
    for kind, rows in (("keys", stored), ("values", exact_values)):
        errors = {}
        for bits in bits_of:
            for method in ("variance", "attention"):
                held = rows.copy()
                held[SINKS:] = coder(rows[SINKS:middle], metrics[kind], method == "attention", bits)(rows[SINKS:])
                if kind == "keys":
                    keys = held if layer.rope is None else layer.rope.apply(held[None], layer.positions)[0]
                    now = sum(
                        attention.weights(h.q, keys, h.scale, visible=h.visible) @ exact_values @ w
                        for h, w in zip(heads, lengths)
                    )
                else:
                    now = sum(a @ held @ w for a, w in zip(weights, lengths))
                square = ((np.asarray(now) - np.asarray(truth)) ** 2).sum(axis=1)
                errors[method, bits] = np.array([x.sum() for x in np.array_split(square, SEGMENTS)])
        found.append(_Coded(head.label, kind, errors))
    return found


#: calibration and test prices of two channels of equal variance: the queries of one half look at the other channel
PRICES = ((Fraction(16), Fraction(1)), (Fraction(1), Fraction(16)))


@claim(
    id="transform-coding/attention-weights",
    paper=PAPER,
    section="bits by attention-aware weight times variance, against variance alone",
    statement="At equal bits, attention-aware weights lower the error of the attention output on every head, for keys and for values.",
    formula="bits by w_c σ_c²:  error ≤ that of bits by σ_c²",
    expected=Verdict.FAILS,
    functions={
        "query_metric": "kvtheory.distortion.query_metric", "value_metric": "kvtheory.distortion.value_metric",
        "integer_bits": "kvtheory.rate.integer_bits",
    },
    mutants=[
        *systematic.scales("query_metric"),
        Mutant("one price for all", "query_metric", lambda true: lambda layer, **options: np.stack([np.eye(layer.head_dim)] * layer.kv_heads)),
        Mutant("one price for all values", "value_metric", lambda true: lambda layer, **options: np.stack([np.eye(layer.value_dim)] * layer.kv_heads)),
        *systematic.scales("value_metric"),
        Mutant("equal bits", "integer_bits", lambda true: lambda tables, budget: np.full(len(tables), budget // len(tables))),
        Mutant("components in the wrong order", "integer_bits", lambda true: lambda tables, budget: true(np.asarray(tables)[::-1], budget)),
    ],
    correction="transform-coding/weights-gain",
)  # fmt: skip
def attention_weights(
    context: Context, *, query_metric: Function, value_metric: Function, integer_bits: Function
) -> Iterator[Evidence]:
    where = "two channels of variance 1, prices 16 and 1 in calibration, 1 and 16 in use; 4 bits, law 4⁻ᵇ"
    law = [[float(p) * 4.0**-b for b in range(5)] for p in PRICES[0]]
    given = [int(b) for b in integer_bits(np.array(law), 4)]
    yield exact(role="control", what="bits by weight: 3 and 1", ran_on=where, observed=given, predicted=[3, 1])
    loss = sum(p * Fraction(1, 4**b) for p, b in zip(PRICES[1], given)) / sum(p * Fraction(1, 16) for p in PRICES[1])
    yield exact(
        what="error of bits by weight over that of 2 and 2, at most 1", ran_on=f"smallest counterexample: {where}", observed=loss, predicted=1, relation="<=",
        note="weights are a forecast: of queries that look elsewhere they make the errors larger",
    )  # fmt: skip
    layer = _known_layer()
    q, v = (np.asarray(f(layer))[0] for f in (query_metric, value_metric))
    yield numerical(
        role="control", what="price of channel 1 over that of channel 2 by queries (2, 0), (0, 1): 4", ran_on="2 queries, d=2, one head",
        observed=q[0, 0] / q[1, 1], predicted=4.0, tolerance=1e-12, because="sums of two squares",
    )  # fmt: skip
    yield numerical(
        role="control", what="trace of E qqᵀ/d: 5/4", ran_on="2 queries, d=2, one head", observed=float(np.trace(q)), predicted=1.25, tolerance=1e-12,
        because="sums of two squares",
    )  # fmt: skip
    yield numerical(
        role="control", what="trace of M_V with W_O = diag(3, 1), two equal keys: 10/2", ran_on="2 queries, d=2, one head", observed=float(np.trace(v)),
        predicted=5.0, tolerance=1e-12, because="sums of two squares",
    )  # fmt: skip
    yield numerical(
        role="control", what="price of a value's channel 1 over that of channel 2: 9", ran_on="2 queries, d=2, one head", observed=v[0, 0] / v[1, 1], predicted=9.0,
        tolerance=1e-12, because="sums of two squares",
    )  # fmt: skip

    heads = real_kv_heads(context)
    if not heads:
        return
    metrics = {}
    for head in heads:
        calibration = _halves(head.layer)[0]
        if id(head.layer) not in metrics:
            rope = head.layer.rope is not None and head.layer.query_positions is not None
            metrics[id(head.layer)] = (
                np.asarray(query_metric(calibration, pre_rope=rope)),
                np.asarray(value_metric(calibration)),
            )
    found = [
        coded
        for head in heads
        for coded in _measure(head, dict(zip(("keys", "values"), (m[head.kv] for m in metrics[id(head.layer)]))), BITS)
    ]
    level = 1 - context.alpha(2 * len(BITS))
    for kind in ("keys", "values"):
        own = [c for c in found if c.kind == kind]
        for bits in BITS:
            logs = np.array(
                [np.log(c.errors["attention", bits] / c.errors["variance", bits]) for c in own]
            )  # (heads, segments)
            per_segment = np.exp(logs.mean(axis=0))
            whole = {c.head: float(c.errors["attention", bits].sum() / c.errors["variance", bits].sum()) for c in own}
            better = [h.rsplit("layer ", 1)[-1] for h, x in whole.items() if x < 1]
            usual: Interval = geometric_mean_interval(per_segment, 0.95)
            yield statistical(
                what=f"output error with weights over without, {bits} bits, {kind} alone coded: geometric mean over heads, paired over held-out segments,"
                " at most 1",
                ran_on=f"{len(own)} real heads (KV), PCA and Gaussian Lloyd-Max fitted on the first half, {SEGMENTS} segments of the second half's queries",
                interval=geometric_mean_interval(per_segment, level), predicted=1.0, relation="<=",
                note=f"at 95 %: {usual.low:.3f} to {usual.high:.3f}. By head " + ", ".join(f"{x:.2f}" for x in whole.values())
                + f"; better on {len(better)}" + (f" (layer {', '.join(better)})" if better else ""),
                details=whole,
            )  # fmt: skip
            if kind == "values":
                yield exact(
                    what=f"heads whose output error weights raise, values, {bits} bits: none", ran_on=f"{len(own)} real heads (KV), second half of the text",
                    observed=sum(x > 1 for x in whole.values()), predicted=0,
                )  # fmt: skip


def _known_layer() -> Layer:
    """One head, two queries (2, 0) and (0, 1), two equal keys, W_O = diag(3, 1)."""
    return Layer(
        np.zeros((1, 2, 2)), np.array([[[1.0, 0.0], [0.0, 1.0]]]), np.array([[[2.0, 0.0], [0.0, 1.0]]]), np.array([[[3.0, 0.0], [0.0, 1.0]]]),
    )  # fmt: skip
