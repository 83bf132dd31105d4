"""Metrics of noise against sums written out, and what their estimate keeps. Their truth, by differences in the keys, is in the ledger."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtheory
from kvtheory import attention
from kvtheory.distortion import key_metric, query_metric, value_metric

ROPE = kvtheory.Rope(np.array([1.0, 0.3]), attention_scaling=1.25)


def layer(seed, kv_heads=2, group=2, tokens=7, queries=5, dim=6, positions=True):
    r = np.random.default_rng(seed)
    heads = kv_heads * group
    at = np.sort(r.choice(np.arange(2, tokens + 3), queries, replace=False))
    return kvtheory.Layer(
        r.standard_normal((kv_heads, tokens, dim)), r.standard_normal((kv_heads, tokens, 3)), r.standard_normal((heads, queries, dim)),
        r.standard_normal((heads, 3, 5)), rope=ROPE, query_positions=at if positions else None,
    )  # fmt: skip


def by_loops(one, kv, turn):
    """scale^2 mean_q sum_i sum_{h,h'} a a' <u, u'> r r'^T with r = turn(q_h, position of token i, position of the query)."""
    out = 0
    queries = one.queries.shape[1]
    for j in range(queries):
        for i in range(one.tokens):
            total = 0
            for h in range(kv * one.group, (kv + 1) * one.group):
                head = one.head(h)
                a = attention.weights(head.q[j : j + 1], head.k, head.scale, visible=head.visible[j : j + 1])[0]
                u = head.v[i] @ head.w_o - a @ head.v @ head.w_o
                place = None if one.query_positions is None else one.query_positions[j]
                total = total + np.outer(turn(head.q[j], one.positions[i], place), a[i] * u)
            out = out + total @ total.T
    return one.scale**2 * out / queries


def back(q, position):
    """The vector r with r . k = q . (s R_p k) for every key k before RoPE."""
    return np.array([q @ ROPE.apply(e[None], [position])[0] for e in np.eye(len(q))])


@given(st.integers(0, 10**6), st.booleans())
def test_key_metric_is_its_sum_after_and_before_rope(seed, causal):
    one = layer(seed, positions=causal)
    for kv in range(one.kv_heads):
        after = by_loops(one, kv, lambda q, i, m: q)
        before = by_loops(one, kv, lambda q, i, m: back(q, i))
        np.testing.assert_allclose(key_metric(one)[kv], after, rtol=1e-9, atol=1e-12 * np.trace(after))
        np.testing.assert_allclose(key_metric(one, pre_rope=True)[kv], before, rtol=1e-9, atol=1e-12 * np.trace(before))


@given(st.integers(0, 10**6))
def test_key_metric_at_the_querys_own_position_is_distance_zero(seed):
    one = layer(seed)
    truth = by_loops(one, 1, lambda q, i, m: back(q, m))
    np.testing.assert_allclose(key_metric(one, pre_rope="own")[1], truth, rtol=1e-9, atol=1e-12 * np.trace(truth))


@given(st.integers(0, 10**6), st.integers(1, 7))
def test_few_tokens_keep_the_weight_of_all(seed, tokens):
    """One query head and no RoPE: M_K = scale^2 E (sum_i a_i^2 |u_i|^2) q q^T, and the estimate keeps that sum, whichever tokens it takes."""
    one = layer(seed, group=1)
    exact = key_metric(one)
    np.testing.assert_allclose(key_metric(one, tokens=tokens), exact, rtol=1e-9, atol=1e-12 * np.abs(exact).max())


def test_the_tokens_taken_are_the_heaviest():
    one = layer(3, tokens=40, queries=5)
    exact = key_metric(one, pre_rope=True)
    errors = [
        np.linalg.norm(key_metric(one, pre_rope=True, tokens=t) - exact) / np.linalg.norm(exact) for t in (4, 16, 40)
    ]
    assert errors[2] < 1e-9 < errors[1] < errors[0]
    # the 16 heaviest of 40 tokens have most of the weight, so little is left to guess
    assert errors[1] < 0.1


@given(st.integers(0, 10**6))
def test_query_metric_adds_the_heads_of_a_group(seed):
    one = layer(seed)
    for kv in range(one.kv_heads):
        after = before = 0
        for h in range(kv * one.group, (kv + 1) * one.group):
            for q, m in zip(one.queries[h], one.query_positions):
                after = after + np.outer(q, q)
                before = before + np.outer(back(q, m), back(q, m))
        factor = one.scale**2 / one.queries.shape[1]
        np.testing.assert_allclose(query_metric(one)[kv], factor * after, rtol=1e-10)
        np.testing.assert_allclose(query_metric(one, pre_rope=True)[kv], factor * before, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 10**6))
def test_value_metric_is_its_sum(seed):
    one = layer(seed)
    for kv in range(one.kv_heads):
        out = apart = 0
        for j in range(one.queries.shape[1]):
            for i in range(one.tokens):
                parts = []
                for h in range(kv * one.group, (kv + 1) * one.group):
                    head = one.head(h)
                    a = attention.weights(head.q[j : j + 1], head.k, head.scale, visible=head.visible[j : j + 1])[0]
                    parts.append(a[i] * head.w_o)
                out = out + sum(parts) @ sum(parts).T
                apart = apart + sum(p @ p.T for p in parts)
        np.testing.assert_allclose(value_metric(one)[kv], out / one.queries.shape[1], rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(
            value_metric(one, coherent=False)[kv], apart / one.queries.shape[1], rtol=1e-9, atol=1e-12
        )


def test_what_is_missing_is_named():
    one = layer(0, positions=False)
    with pytest.raises(ValueError, match="query_positions"):
        query_metric(one, pre_rope=True)
    with pytest.raises(ValueError, match="query_positions"):
        key_metric(one, pre_rope="own")
    with pytest.raises(ValueError, match="rope"):
        key_metric(one.replace(rope=None), pre_rope=True)
    with pytest.raises(ValueError, match="queries"):
        value_metric(one.replace(queries=None, query_positions=None))
    with pytest.raises(ValueError, match="tokens: expected at least 1"):
        key_metric(one, tokens=0)
