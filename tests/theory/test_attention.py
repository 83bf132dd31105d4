"""Attention against a loop over queries and tokens, its Jacobians against complex steps, and what it refuses."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtheory import attention
from kvtheory.layer import Decoded, Layer, Rope
from kvtheory.randomness import generator

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float32 big-endian": np.dtype(">f4"),
    "float16 big-endian": np.dtype(">f2"),
}


def naive(q, k, v, scale, log_weights, positions, query_positions):
    """The definition, one number at a time; math.fsum sums without rounding error that matters."""
    heads, queries, _ = q.shape
    group = heads // len(k)
    out = np.zeros((heads, queries, v.shape[2]))
    for h in range(heads):
        kv = h // group
        for j in range(queries):
            seen = [
                i
                for i in range(k.shape[1])
                if (query_positions is None or positions[kv][i] <= query_positions[j]) and log_weights[kv][i] > -np.inf
            ]
            z = {i: scale * math.fsum(q[h, j] * k[kv, i]) + log_weights[kv][i] for i in seen}
            top = max(z.values())
            w = {i: math.exp(x - top) for i, x in z.items()}
            total = math.fsum(w.values())
            for c in range(v.shape[2]):
                out[h, j, c] = math.fsum(w[i] / total * v[kv, i, c] for i in seen)
    return out


@st.composite
def caches(draw):
    """Sizes, and the random arrays of them: (q, k, v, scale, log_weights, positions, query_positions) with every query seeing one."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    tokens, queries = draw(st.integers(1, 7)), draw(st.integers(0, 4))
    d, dv = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rng = generator(draw(st.integers(0, 2**32)), "caches")
    q = rng.standard_normal((kv_heads * group, queries, d)) * draw(st.sampled_from([0.1, 1.0, 30.0]))
    k, v = rng.standard_normal((kv_heads, tokens, d)), rng.standard_normal((kv_heads, tokens, dv))
    scale = draw(st.sampled_from([None, 0.3, 2.0]))
    log_weights = np.zeros((kv_heads, tokens))
    if draw(st.booleans()):
        log_weights = np.log(rng.uniform(0.1, 5, (kv_heads, tokens)))
        log_weights[:, 1:][rng.random((kv_heads, tokens - 1)) < 0.3] = -np.inf
    positions = np.sort(rng.integers(0, 12, (kv_heads, tokens)), axis=1)
    positions[:, 0] = 0
    query_positions = rng.integers(0, 12, queries) if draw(st.booleans()) else None
    return q, k, v, scale, log_weights, positions, query_positions


@given(caches())
def test_attend_is_the_definition(cache):
    q, k, v, scale, log_weights, positions, query_positions = cache
    got = attention.attend(
        q, k, v, scale=scale, log_weights=log_weights, positions=positions, query_positions=query_positions
    )
    expected = naive(q, k, v, q.shape[2] ** -0.5 if scale is None else scale, log_weights, positions, query_positions)
    assert got.shape == expected.shape and got.dtype == np.float64
    # a weight's relative error is about eps times its logit (up to 200 here)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@given(caches())
def test_any_float_is_taken_at_its_exact_value(dtype, cache):
    q, k, v, scale, log_weights, positions, query_positions = cache
    low = [x.astype(dtype) for x in (q, k, v)]
    options = {"scale": scale, "log_weights": log_weights, "positions": positions, "query_positions": query_positions}
    np.testing.assert_array_equal(
        attention.attend(*low, **options), attention.attend(*(x.astype(np.float64) for x in low), **options)
    )


@given(caches())
def test_memory_layout_does_not_matter(cache):
    q, k, v, scale, log_weights, positions, query_positions = cache
    odd = [
        np.asfortranarray(q),
        np.repeat(k, 2, axis=1)[:, ::2],
        np.ascontiguousarray(v[..., ::-1])[..., ::-1],
    ]
    options = {"scale": scale, "log_weights": log_weights, "positions": positions, "query_positions": query_positions}
    np.testing.assert_allclose(
        attention.attend(*odd, **options), attention.attend(q, k, v, **options), rtol=0, atol=1e-13
    )


def test_torch_and_dlpack_arrays_are_taken():
    torch = pytest.importorskip("torch")
    rng = generator(0, "torch")
    q, k, v = (torch.tensor(rng.standard_normal((2, 3, 4)), dtype=torch.bfloat16) for _ in range(3))
    np.testing.assert_array_equal(attention.attend(q, k, v), attention.attend(q.double(), k.double(), v.double()))


@given(caches(), st.integers(0, 2**32))
def test_order_of_tokens_does_not_matter(cache, seed):
    q, k, v, scale, log_weights, positions, query_positions = cache
    order = generator(seed, "order").permutation(k.shape[1])
    np.testing.assert_allclose(
        attention.attend(
            q, k[:, order], v[:, order], scale=scale, log_weights=log_weights[:, order],
            positions=positions[:, order], query_positions=query_positions,
        ),
        attention.attend(
            q, k, v, scale=scale, log_weights=log_weights, positions=positions, query_positions=query_positions
        ),
        rtol=0, atol=1e-12,
    )  # fmt: skip


@given(caches())
def test_weight_minus_infinity_is_a_token_removed(cache):
    q, k, v, scale, _, positions, query_positions = cache
    padded = [np.concatenate([x, np.full((len(x), 2, x.shape[2]), 7.0)], axis=1) for x in (k, v)]
    log_weights = np.concatenate([np.zeros(k.shape[:2]), np.full((len(k), 2), -np.inf)], axis=1)
    where = np.concatenate([positions, np.full((len(k), 2), -1)], axis=1)
    np.testing.assert_allclose(
        attention.attend(
            q, *padded, scale=scale, log_weights=log_weights, positions=where, query_positions=query_positions
        ),
        attention.attend(q, k, v, scale=scale, positions=positions, query_positions=query_positions),
        rtol=0,
        atol=1e-14,  # BLAS may sum in another order
    )


@given(caches())
def test_identical_tokens_merge_with_weight_ln_2(cache):
    q, k, v, scale, log_weights, positions, query_positions = cache
    two = [np.concatenate([x, x[:, :1]], axis=1) for x in (k, v, log_weights, positions)]
    merged = log_weights.copy()
    merged[:, 0] += math.log(2)
    np.testing.assert_allclose(
        attention.attend(
            q, k, v, scale=scale, log_weights=merged, positions=positions, query_positions=query_positions
        ),
        attention.attend(
            q, two[0], two[1], scale=scale, log_weights=two[2], positions=two[3], query_positions=query_positions
        ),
        rtol=0,
        atol=1e-12,
    )


@given(caches(), st.floats(-50, 50))
def test_shifts_and_the_convex_hull(cache, shift):
    """A shift of all log-weights, or of all keys by one vector, changes nothing; outputs are means of values."""
    q, k, v, scale, log_weights, positions, query_positions = cache
    options = {"scale": scale, "positions": positions, "query_positions": query_positions}
    o = attention.attend(q, k, v, log_weights=log_weights, **options)
    np.testing.assert_allclose(
        attention.attend(q, k, v, log_weights=log_weights + shift, **options), o, rtol=0, atol=1e-11
    )
    np.testing.assert_allclose(
        attention.attend(q, k + shift / 10, v, log_weights=log_weights, **options), o, rtol=0, atol=1e-10
    )
    low, high = v.min(axis=1), v.max(axis=1)
    group = len(q) // len(k)
    assert (o >= np.repeat(low, group, axis=0)[:, None] - 1e-12).all()
    assert (o <= np.repeat(high, group, axis=0)[:, None] + 1e-12).all()


def test_large_logits_do_not_overflow():
    q, k, v = np.full((1, 1, 1), 1e6), np.array([[[1.0], [-1.0]]]), np.array([[[3.0], [5.0]]])
    assert attention.attend(q, k, v).item() == 3.0


def test_blocks_of_queries_give_the_same(monkeypatch):
    rng = generator(1, "blocks")
    q, k, v = rng.standard_normal((4, 9, 3)), rng.standard_normal((2, 5, 3)), rng.standard_normal((2, 5, 2))
    whole = attention.attend(q, k, v, query_positions=np.arange(9))
    monkeypatch.setattr(attention, "_QUERY_BLOCK_ELEMENTS", 10)
    np.testing.assert_allclose(attention.attend(q, k, v, query_positions=np.arange(9)), whole, rtol=0, atol=1e-15)


# ---- Jacobians: complex steps of an attention written here, exact to rounding


def complex_output(q, k, v, w_o, scale):
    z = scale * (k @ q)
    e = np.exp(z - z.real.max())
    return (e / e.sum()) @ v @ w_o


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**32))
def test_jacobians_are_complex_steps(n, d, dv, model_dim, seed):
    rng = generator(seed, "jacobians")
    q, k, v, w_o = (rng.standard_normal(s) for s in ((d,), (n, d), (n, dv), (dv, model_dim)))
    scale, h = 0.7, 1e-30
    a = attention.weights(q[None], k, scale)[0]
    by_key, by_value, by_logit = np.empty((n, model_dim, d)), np.empty((n, model_dim, dv)), np.empty((n, model_dim))
    for i in range(n):
        for c in range(d):
            step = np.zeros((n, d), complex)
            step[i, c] = 1j * h
            by_key[i, :, c] = complex_output(q, k + step, v, w_o, scale).imag / h
        for c in range(dv):
            step = np.zeros((n, dv), complex)
            step[i, c] = 1j * h
            by_value[i, :, c] = complex_output(q, k, v + step, w_o, scale).imag / h
        # a logit is moved by a key along q / (scale |q|^2)
        step = np.zeros((n, d), complex)
        step[i] = 1j * h * q / (scale * (q @ q))
        by_logit[i] = complex_output(q, k + step, v, w_o, scale).imag / h
    np.testing.assert_allclose(attention.key_jacobian(q, a, v @ w_o, scale), by_key, atol=1e-13)
    np.testing.assert_allclose(attention.value_jacobian(a, w_o), by_value, atol=1e-13)
    np.testing.assert_allclose(attention.logit_jacobian(a, v @ w_o), by_logit, atol=1e-13)


# ---- rotary position embedding


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@given(st.integers(0, 3000), st.integers(0, 3000), st.floats(0.5, 2), st.integers(0, 2**32))
def test_a_logit_depends_on_the_distance_alone(layout, m, i, scaling, seed):
    """(s R_m q) . (s R_i k) = s^2 (R_{m-i} q) . k on the rotated channels, q . k on the others."""
    rng = generator(seed, "rope")
    rope = Rope(1e4 ** (-np.arange(3) / 3), layout, scaling)
    q, k = rng.standard_normal((1, 8)), rng.standard_normal((1, 8))
    both = (rope.apply(q, [m]) @ rope.apply(k, [i]).T).item()
    plain = Rope(rope.inv_freq, layout)
    distance = plain.apply(q, [m - i]) * k
    expected = scaling**2 * distance[:, :6].sum() + distance[:, 6:].sum()
    # an angle of up to 3000 radians is known to 3000 eps
    assert both == pytest.approx(expected, abs=1e-11)


def test_the_sign_of_the_distance_matters():
    """B7: a pre-RoPE key meets R_{m-i} q; with R_{i-m} q the logit is another."""
    rope = Rope(np.array([1.0]))
    q, k = np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])
    logit = (rope.apply(q, [2]) @ rope.apply(k, [1]).T).item()
    assert logit == pytest.approx((rope.apply(q, [1]) @ k.T).item())
    assert logit == pytest.approx(-(rope.apply(q, [-1]) @ k.T).item())


# ---- a whole layer


def _layer(**changes):
    rng = generator(3, "layer")
    parts = {
        "keys": rng.standard_normal((2, 6, 4)), "values": rng.standard_normal((2, 6, 3)), "queries": rng.standard_normal((4, 5, 4)),
        "output_proj": rng.standard_normal((4, 3, 7)), "scale": 0.6, "query_positions": np.array([0, 2, 3, 5, 5]),
    } | changes  # fmt: skip
    return Layer(parts.pop("keys"), parts.pop("values"), parts.pop("queries"), parts.pop("output_proj"), **parts)


def test_layer_outputs_sum_the_heads():
    layer = _layer()
    expected = np.zeros((5, 7))
    for h in range(4):
        head = layer.head(h)
        z = np.where(head.visible, 0.6 * head.q @ head.k.T, -np.inf)
        a = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        expected += a @ head.v @ head.w_o
    np.testing.assert_allclose(attention.layer_outputs(layer), expected, atol=1e-13)
    np.testing.assert_array_equal(attention.layer_outputs(layer, Decoded.exact(layer)), attention.layer_outputs(layer))


def test_without_projection_heads_stand_side_by_side():
    layer = _layer(output_proj=None)
    o = attention.layer_outputs(layer)
    heads = attention.head_outputs(layer)
    for h in range(4):
        np.testing.assert_array_equal(o[:, 3 * h : 3 * h + 3], heads[h])
    blocks = np.stack([layer.projection(h) for h in range(4)])
    np.testing.assert_allclose(attention.layer_outputs(layer.replace(output_proj=blocks)), o, atol=1e-14)


def test_reduced_cache_is_read_with_its_weights_and_positions():
    """Head 0 keeps tokens 0 and 3, token 3 with the weight of three; head 1 keeps all: the padding is invisible."""
    layer = _layer()
    keys, values = np.zeros((2, 6, 4)), np.zeros((2, 6, 3))
    weights, positions = np.full((2, 6), -np.inf), np.full((2, 6), -1)
    for head, kept, log_weight in ((0, [0, 3], [0, math.log(3)]), (1, [0, 1, 2, 3, 4, 5], 0)):
        keys[head, : len(kept)], values[head, : len(kept)] = layer.keys[head][kept], layer.values[head][kept]
        weights[head, : len(kept)], positions[head, : len(kept)] = log_weight, kept
    decoded = Decoded(keys, values, weights, positions, np.array([2, 6]))
    o = attention.head_outputs(layer, decoded)
    np.testing.assert_allclose(o[2:], attention.head_outputs(layer)[2:], atol=1e-14)
    for h in (0, 1):
        head = layer.head(h)
        for j, last in enumerate(layer.query_positions):
            w = np.array([1.0, 3.0 if last >= 3 else 0.0]) * np.exp(0.6 * head.k[[0, 3]] @ head.q[j])
            np.testing.assert_allclose(o[h, j], w @ head.v[[0, 3]] / w.sum(), atol=1e-14)


# ---- refusals


def _arrays(**changes):
    return {"queries": np.ones((4, 2, 3)), "keys": np.ones((2, 5, 3)), "values": np.ones((2, 5, 2))} | changes


BAD = {
    "heads of values": (_arrays(values=np.ones((3, 5, 2))), ValueError, r"values: expected shape \(kv_heads=2, tokens=5, value_dim\), got \(3, 5, 2\)"),
    "tokens of values": (_arrays(values=np.ones((2, 4, 2))), ValueError, r"values: expected shape .*tokens=5.*got \(2, 4, 2\)"),
    "head_dim of queries": (_arrays(queries=np.ones((4, 2, 2))), ValueError, r"queries: expected shape .*head_dim=3.*got \(4, 2, 2\)"),
    "not a multiple": (_arrays(queries=np.ones((3, 2, 3))), ValueError, r"queries: expected query_heads to be a positive multiple of kv_heads = 2, got 3"),
    "no heads": (_arrays(queries=np.ones((0, 2, 3))), ValueError, r"positive multiple of kv_heads = 2, got 0"),
    "two axes": (_arrays(keys=np.ones((5, 3))), ValueError, r"keys: expected shape \(kv_heads, tokens, head_dim\), got \(5, 3\)"),
    "no channels": (_arrays(queries=np.ones((4, 2, 0)), keys=np.ones((2, 5, 0))), ValueError, r"keys: expected head_dim >= 1, got 0"),
    "NaN": (_arrays(keys=np.where(np.arange(30).reshape(2, 5, 3) == 22, np.nan, 1.0)), ValueError, r"keys: expected finite numbers, got nan at \(head 1, token 2, channel 1\)"),
    "inf": (_arrays(queries=np.where(np.arange(24).reshape(4, 2, 3) == 5, np.inf, 1.0)), ValueError, r"queries: expected finite numbers, got inf at \(head 0, query 1, channel 2\)"),
    "integers": (_arrays(values=np.ones((2, 5, 2), int)), TypeError, r"values: expected elements of .*got int64"),
    "no array": (_arrays(keys="keys"), TypeError, r"keys: expected an array"),
    "no tokens": (_arrays(keys=np.ones((2, 0, 3)), values=np.ones((2, 0, 2))), ValueError, r"query 0 of head 0 sees none"),
    "sees none": (_arrays(positions=np.arange(5) + 3, query_positions=np.array([3, 2])), ValueError, r"query 1 of head 0 sees none"),
    "all hidden in head 1": (_arrays(log_weights=np.array([[0.0] * 5, [-np.inf] * 5])), ValueError, r"query 0 of head 2 sees none"),
    "log_weights shape": (_arrays(log_weights=np.zeros(5)), ValueError, r"log_weights: expected shape \(kv_heads=2, tokens=5\), got \(5,\)"),
    "log_weights NaN": (_arrays(log_weights=np.full((2, 5), np.nan)), ValueError, r"log_weights: expected finite numbers or -inf"),
    "log_weights inf": (_arrays(log_weights=np.full((2, 5), np.inf)), ValueError, r"log_weights: expected finite numbers or -inf"),
    "positions shape": (_arrays(positions=np.arange(4)), ValueError, r"positions: expected shape \(tokens=5\), got \(4,\)"),
    "positions no integers": (_arrays(positions=np.ones(5)), TypeError, r"positions: expected integers, got float64"),
    "query_positions shape": (_arrays(query_positions=np.arange(3)), ValueError, r"query_positions: expected shape \(queries=2\), got \(3,\)"),
    "query_positions no integers": (_arrays(query_positions=np.ones(2)), TypeError, r"query_positions: expected integers, got float64"),
    "scale 0": (_arrays(scale=0.0), ValueError, r"scale: expected a finite number above 0, got 0.0"),
    "scale NaN": (_arrays(scale=math.nan), ValueError, r"scale: expected a finite number above 0"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD.keys())
def test_what_is_wrong_is_said(arguments, error, message):
    with pytest.raises(error, match=message):
        attention.attend(**arguments)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_logits_beyond_float64_are_refused():
    huge = np.full((1, 1, 2), 1e200)
    with pytest.raises(ValueError, match="logits of query 0 of head 0 overflow float64"):
        attention.attend(huge, huge, np.ones((1, 1, 1)))


def test_no_queries_give_no_outputs():
    assert attention.attend(np.ones((4, 0, 3)), np.ones((2, 5, 3)), np.ones((2, 5, 2))).shape == (4, 0, 2)


def test_layer_outputs_says_what_it_lacks():
    with pytest.raises(ValueError, match="queries: layer_outputs needs it, and this layer has none"):
        attention.layer_outputs(_layer(queries=None, query_positions=None))
    other = Decoded.of(np.ones((2, 6, 5)), np.ones((2, 6, 3)))
    with pytest.raises(
        ValueError, match=r"decoded: expected \(kv_heads, head_dim, value_dim\) = \(2, 4, 3\), got \(2, 5, 3\)"
    ):
        attention.layer_outputs(_layer(), other)
