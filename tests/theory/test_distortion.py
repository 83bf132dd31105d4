"""D_K, D_V and the order after them against complex steps and closed forms; attention_error against direct computation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvtheory import attention, synthetic
from kvtheory.distortion import attention_error, key_term, remainder_term, value_term
from kvtheory.distortion import head as head_module
from kvtheory.layer import Decoded, Layer
from kvtheory.randomness import generator


@st.composite
def heads(draw, same_dims=False):
    """(q, k, v, w_o, key variance, value variance, scale, visible) of one head, each query seeing token 0 at least."""
    m, n, d, dv, model_dim = (draw(st.integers(1, top)) for top in (3, 6, 4, 4, 5))
    rng = generator(draw(st.integers(0, 2**32)), "heads")
    dv = d if same_dims else dv
    q, k, v, w_o = (rng.standard_normal(s) for s in ((m, d), (n, d), (n, dv), (dv, model_dim)))
    q *= draw(st.sampled_from([0.1, 1.0, 5.0]))
    variances = rng.exponential(size=(n, d)), rng.exponential(size=(n, dv))
    scale = draw(st.sampled_from([None, 0.3, 1.7]))
    visible = None
    if draw(st.booleans()):
        visible = rng.random((m, n)) < 0.6
        visible[:, 0] = True
    return q, k, v, w_o, *variances, scale, visible


def one_output(q, k, v, w_o, scale, seen):
    z = scale * (k[seen] @ q)
    e = np.exp(z - z.real.max())
    return (e / e.sum()) @ v[seen] @ w_o


def by_complex_steps(head, part):
    """sum_ic sigma_ic^2 ||do/dx_ic||^2 of each query, x the keys or the values, exact to rounding."""
    q, k, v, w_o, key_variance, value_variance, scale, visible = head
    scale = q.shape[1] ** -0.5 if scale is None else scale
    visible = np.ones((len(q), len(k)), bool) if visible is None else visible
    x, variance = (k, key_variance) if part == "keys" else (v, value_variance)
    out = np.zeros(len(q))
    for j in range(len(q)):
        for i, c in np.ndindex(x.shape):
            step = np.zeros(x.shape, complex)
            step[i, c] = 1e-30j
            moved = (k + step, v) if part == "keys" else (k, v + step)
            derivative = one_output(q[j], *moved, w_o, scale, visible[j]).imag / 1e-30
            out[j] += variance[i, c] * (derivative**2).sum()
    return out


@given(heads())
def test_key_term_is_the_energy_of_the_jacobian(head):
    q, k, v, w_o, variance, _, scale, visible = head
    got = key_term(q, k, v, w_o, variance, scale, visible=visible)
    assert got.shape == (len(q),) and got.dtype == np.float64
    np.testing.assert_allclose(got, by_complex_steps(head, "keys"), rtol=1e-9, atol=1e-14)


@given(heads())
def test_value_term_is_the_energy_of_the_jacobian(head):
    q, k, v, w_o, _, variance, scale, visible = head
    got = value_term(q, k, v, w_o, variance, scale, visible=visible)
    np.testing.assert_allclose(got, by_complex_steps(head, "values"), rtol=1e-12)


def all_terms(q, k, v, w_o, key_variance, value_variance, scale, visible):
    return np.stack(
        [
            key_term(q, k, v, w_o, key_variance, scale, visible=visible),
            value_term(q, k, v, w_o, value_variance, scale, visible=visible),
            remainder_term(q, k, v, w_o, key_variance, None, scale, visible=visible),
            remainder_term(q, k, v, w_o, key_variance, value_variance, scale, visible=visible),
        ]
    )


def close(a, b, size=1.0, rtol=1e-9):
    """Relative to the largest of the four terms: R is a difference of parts as large as they are."""
    np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * max(size, float(np.abs(b).max())))


@given(heads(), st.floats(-5, 5), st.floats(-3, 3))
def test_what_leaves_the_terms_alone(head, shift, angle):
    q, k, v, w_o, kv, vv, scale, visible = head
    terms = all_terms(*head)
    # every u_i = v_i W_O - o is a difference of values; D_V does not look at them at all
    close(all_terms(q, k, v + shift, w_o, kv, vv, scale, visible), terms)
    # a vector added to all keys shifts all logits of a query
    close(all_terms(q, k + shift, v, w_o, kv, vv, scale, visible), terms)
    # lengths after W_O do not change under a rotation of the model's space, nor under more columns of zeros
    rotation = np.linalg.qr(generator(0, "rotation").standard_normal((w_o.shape[1],) * 2))[0]
    close(all_terms(q, k, v, w_o @ rotation, kv, vv, scale, visible), terms)
    close(all_terms(q, k, v, np.pad(w_o, ((0, 0), (0, 3))), kv, vv, scale, visible), terms)
    # order of tokens, and of channels of queries and keys together
    order = generator(1, "order").permutation(len(k))
    close(
        all_terms(
            q, k[order], v[order], w_o, kv[order], vv[order], scale, None if visible is None else visible[:, order]
        ),
        terms,
    )
    swap = slice(None, None, -1)
    close(all_terms(q[:, swap], k[:, swap], v, w_o, kv[:, swap], vv, scale, visible), terms)
    # scale q.k is all that there is of scale
    given_scale = q.shape[1] ** -0.5 if scale is None else scale
    close(all_terms(q * given_scale, k, v, w_o, kv, vv, 1.0, visible), terms)


@given(heads(), st.floats(0.1, 10))
def test_how_the_terms_grow(head, t):
    q, k, v, w_o, kv, vv, scale, visible = head
    d_k, d_v, r, joint = all_terms(*head)
    size = np.abs([d_k, d_v, r, joint]).max()
    close(
        np.stack(all_terms(q, k, v, w_o, t * kv, t * vv, scale, visible)),
        [t * d_k, t * d_v, t**2 * r, t**2 * joint],
        t**2 * size,
    )
    close(
        np.stack(all_terms(q, k, v, t * w_o, kv, vv, scale, visible)),
        t**2 * np.stack([d_k, d_v, r, joint]),
        t**2 * size,
    )
    # D_K and R_K see the values, D_V does not
    close(np.stack(all_terms(q, k, t * v, w_o, kv, vv, scale, visible))[:3], [t**2 * d_k, d_v, t**2 * r], t**2 * size)


@given(heads(same_dims=True))
def test_the_same_noise_rotated_costs_the_same_only_if_white(head):
    """Equal variances: rotating q and k together changes nothing. Unequal ones: it does (the channel factor q_c^2 sigma_c^2)."""
    q, k, v, w_o, kv, _, scale, visible = head
    rotation = np.linalg.qr(generator(2, "rotation").standard_normal((q.shape[1],) * 2))[0]
    white = np.broadcast_to(kv[:, :1], kv.shape)
    close(
        key_term(q @ rotation, k @ rotation, v, w_o, white, scale, visible=visible),
        key_term(q, k, v, w_o, white, scale, visible=visible),
    )


def test_unequal_noise_does_change_when_rotated():
    q, k, v = np.array([[1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[0.0], [1.0]])
    variance = np.array([[1.0, 0.0], [1.0, 0.0]])
    swap = np.array([[0.0, 1.0], [1.0, 0.0]])
    assert key_term(q, k, v, np.eye(1), variance)[0] > 0
    assert key_term(q @ swap, k @ swap, v, np.eye(1), variance)[0] == 0


def test_hidden_tokens_and_silent_channels_cost_nothing():
    rng = generator(3, "hidden")
    q, k, v, w_o = (rng.standard_normal(s) for s in ((2, 3), (4, 3), (4, 2), (2, 5)))
    visible = np.array([[1, 1, 0, 0], [1, 1, 1, 0]], bool)
    variance = np.zeros((4, 3))
    variance[2:] = 1e6
    assert key_term(q, k, v, w_o, variance, visible=visible)[0] == 0
    np.testing.assert_allclose(
        key_term(q, k, v, w_o, np.ones((4, 3)), visible=visible)[1],
        key_term(q[1:], k[:3], v[:3], w_o, np.ones((3, 3)))[0],
    )
    np.testing.assert_array_equal(all_terms(q, k, v, w_o, np.zeros((4, 3)), np.zeros((4, 2)), None, visible), 0)


def test_one_token_is_the_whole_output():
    """Its key can do nothing; its values pass through W_O unweighted."""
    w_o, variance = np.array([[3.0, 4.0], [0.0, 2.0]]), np.array([[1.0, 10.0]])
    q = np.ones((1, 2))
    assert key_term(q, q, np.array([[1.0, 7.0]]), w_o, variance)[0] == 0
    assert value_term(q, q, q, w_o, variance)[0] == 1 * 25 + 10 * 4
    assert remainder_term(q, q, q, w_o, variance, variance)[0] == 0


def test_two_equal_tokens_by_hand():
    """a = 1/2, u = -+ w/2 with w = (v_2 - v_1) W_O: D_K = |w|^2/16 scale^2 sum_c q_c^2 (sigma_1c^2 + sigma_2c^2)."""
    q, k = np.array([[2.0, 3.0]]), np.zeros((2, 2))
    v, w_o = np.array([[1.0], [5.0]]), np.array([[3.0, 4.0]])
    variance = np.array([[1.0, 10.0], [100.0, 1000.0]])
    expected = 400 / 16 * 0.25 * (4 * 101 + 9 * 1010)
    assert key_term(q, k, v, w_o, variance, 0.5)[0] == pytest.approx(expected, rel=1e-14)
    assert value_term(q, k, v, w_o, variance[:, :1], 0.5)[0] == pytest.approx((1 + 100) / 4 * 25, rel=1e-14)


@pytest.mark.parametrize("lead", [5.0, 20.0, 30.0])
@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_a_sink_keeps_its_digits(lead, offset):
    """a_0 = 1 - e with e down to 1e-13: u_0 = v_0 W_O - o is of size e, and must not drown in ||v||^2 - 2 v.o + ||o||^2.

    The truth is taken relative to v_0 throughout, where no digits are lost: o - v_0 W_O = sum_{i>0} a_i (v_i - v_0) W_O.
    """
    rng = generator(4, "sink")
    q, k = np.ones((1, 1)), np.append(lead, rng.uniform(-1, 1, 4))[:, None]
    v, w_o, variance = rng.standard_normal((5, 2)) + offset, rng.standard_normal((2, 3)), rng.exponential(size=(5, 1))
    odds = np.exp(k[:, 0] - lead)
    a = odds / (1 + odds[1:].sum())
    apart = (v - v[0]) @ w_o
    u = apart - a[1:] @ apart[1:]
    expected = a**2 * (u**2).sum(axis=1) @ variance[:, 0]
    assert key_term(q, k, v, w_o, variance, 1.0)[0] == pytest.approx(expected, rel=1e-9, abs=0)


def test_blocks_of_queries_give_the_same(monkeypatch):
    head = synthetic.make("gaussian", 1, 1, tokens=20, head_dim=4, queries=8).head(0)
    rest = head.k, head.v, head.w_o, np.ones((20, 4))
    for term in (key_term, remainder_term):
        whole = [term(q[None], *rest)[0] for q in head.q]
        for size in (1, 250, 10**6):
            monkeypatch.setattr(head_module, "BLOCK_ELEMENTS", size)
            np.testing.assert_allclose(term(head.q, *rest), whole, rtol=1e-12, atol=1e-15)


# ---- the next order


def two_token_energy(lead, variance):
    """E (a'_2 - a_2)^2 for logits lead and 0, each with Gaussian noise: their difference has variance 2 variance."""
    x, w = np.polynomial.hermite_e.hermegauss(60)
    sigmoid = 1 / (1 + np.exp(lead + np.sqrt(2 * variance) * x))
    return w @ (sigmoid - 1 / (1 + np.exp(lead))) ** 2 / w.sum()


@pytest.mark.parametrize("lead", [0.0, 0.7, 3.0, 12.0])
def test_remainder_is_the_next_order_for_two_tokens(lead):
    """What is left after D_K + R is of the order D_K s^4: over that it has a limit (an error of R would grow as 1/s^2)."""
    q, k, v = np.ones((1, 1)), np.array([[lead], [0.0]]), np.array([[0.0], [1.0]])
    left = []
    for variance in (0.005, 0.0025):
        same = np.full((2, 1), variance)
        d_k = key_term(q, k, v, np.eye(1), same, 1.0)[0]
        r = remainder_term(q, k, v, np.eye(1), same, None, 1.0)[0]
        left.append((two_token_energy(lead, variance) - d_k - r) / (d_k * variance**2))
    assert abs(left[0] - left[1]) < 0.02 and abs(left[1]) < 6


@given(st.floats(-4, 4), st.floats(0, 1), st.integers(0, 2**32))
def test_of_two_tokens_only_the_difference_of_logits_counts(lead, share, seed):
    """So the two variances count by their sum alone, in both orders, however it is split."""
    rng = generator(seed, "two tokens")
    q, k, v = np.ones((1, 1)), np.array([[lead], [0.0]]), rng.standard_normal((2, 3))
    split, even = 2 * np.array([[share], [1 - share]]), np.ones((2, 1))
    values = rng.exponential(size=(1, 3)) * np.ones((2, 1))
    assert key_term(q, k, v, np.eye(3), split) == pytest.approx(key_term(q, k, v, np.eye(3), even), rel=1e-9)
    size = key_term(q, k, v, np.eye(3), even)[0] + value_term(q, k, v, np.eye(3), values)[0]
    for tau2 in (None, values):
        r = [remainder_term(q, k, v, np.eye(3), variance, tau2)[0] for variance in (split, even)]
        assert r[0] == pytest.approx(r[1], abs=1e-9 * size)


def test_remainder_of_the_values_by_hand():
    """Equal tokens, keys and values noisy: sum_i E a_i'^2 t^2 with E a'^2 = 1/4 + Var(sigmoid) = 1/4 + s^2/8 to first order."""
    q, k, v = np.ones((1, 1)), np.zeros((2, 1)), np.zeros((2, 1))
    s2, t2 = 1e-3, 5.0
    joint = remainder_term(q, k, v, np.eye(1), np.full((2, 1), s2), np.full((2, 1), t2), 1.0)[0]
    assert joint == pytest.approx(2 * t2 * s2 / 8, rel=1e-12)


def coefficient(a, v, seed=0):
    """c = R / (s^2 D_K) at attention a (m, n), logit variance 1 on all tokens."""
    n = a.shape[1]
    q, same = np.log(a), np.ones((n, n))
    w_o = np.eye(v.shape[1])
    d_k = key_term(q, np.eye(n), v, w_o, same, 1.0)
    return remainder_term(q, np.eye(n), v, w_o, same, None, 1.0) / (d_k * (q**2).sum(axis=1))


@given(st.integers(2, 8), st.sampled_from([0.05, 0.5, 5.0]), st.integers(0, 2**32))
def test_equal_variances_bound_the_remainder(n, concentration, seed):
    """-7/4 <= c <= 7/2, and c is the formula of the docstring."""
    rng = generator(seed, "coefficients")
    a = np.maximum(rng.dirichlet(np.full(n, concentration), size=4), 1e-6)
    a /= a.sum(axis=1, keepdims=True)
    v = rng.standard_normal((n, 3))
    c = coefficient(a, v)
    assert (c <= 3.5 + 1e-6).all() and (c >= -1.75 - 1e-6).all()
    x = a[:, :, None] * (v - (a @ v)[:, None])
    mean = np.einsum("mn,mnr->mr", a, x)
    spread = np.einsum("mn,mnr->m", a, x**2) - (mean**2).sum(axis=1)
    np.testing.assert_allclose(
        c, 0.5 + 3 * (a**2).sum(axis=1) - 6 * spread / (x**2).sum(axis=(1, 2)), rtol=1e-5, atol=1e-5
    )


def test_where_the_bounds_are_tight():
    """7/2 for a sink, 1/2 for diffuse attention, -1 (the lowest known) for two equal tokens."""
    n = 400
    sink = np.full((1, n), 1e-6 / (n - 1))
    sink[0, 0] = 1 - 1e-6
    v = generator(5, "tight").standard_normal((n, 3))
    assert coefficient(sink, v)[0] == pytest.approx(3.5, abs=1e-4)
    assert coefficient(np.full((1, n), 1 / n), v)[0] == pytest.approx(0.5, abs=0.02)
    assert coefficient(np.full((1, 2), 0.5), v[:2])[0] == pytest.approx(-1, abs=1e-12)


def test_unequal_variances_break_the_bound():
    """Half the tokens noisy and of other values than the rest: their mass grows coherently (Jensen), far beyond 7/2 s^2 D_K."""
    n = 2000
    q, k, v = np.ones((1, 1)), np.zeros((n, 1)), np.repeat([[0.0], [1.0]], n // 2, axis=0)
    variance = np.repeat([[0.0], [0.02]], n // 2, axis=0)
    d_k = key_term(q, k, v, np.eye(1), variance, 1.0)[0]
    r = remainder_term(q, k, v, np.eye(1), variance, None, 1.0)[0]
    assert r > 10 * 3.5 * 0.02 * d_k
    # B-L1: o moves from 1/2 to e^{s^2/2} / (1 + e^{s^2/2}); its square is the coherent part of R
    jensen = (1 / (1 + math.exp(-0.01)) - 0.5) ** 2
    assert r == pytest.approx(jensen, rel=0.05)


# ---- refusals of the terms


def _arguments(**changes):
    return {
        "q": np.ones((2, 3)), "k": np.ones((4, 3)), "v": np.ones((4, 2)), "w_o": np.ones((2, 5)), "variance": np.ones((4, 3)),
    } | changes  # fmt: skip


BAD = {
    "keys": (_arguments(k=np.ones((4, 2))), r"k: expected shape \(n, d=3\), got \(4, 2\)"),
    "values": (_arguments(v=np.ones((5, 2))), r"v: expected shape \(n=4, dv\), got \(5, 2\)"),
    "w_o": (_arguments(w_o=np.ones((3, 5))), r"w_o: expected shape \(dv=2, D\), got \(3, 5\)"),
    "variance": (_arguments(variance=np.ones(3)), r"variance: expected shape \(n=4, d=3\), got \(3,\)"),
    "negative": (_arguments(variance=np.full((4, 3), -1.0)), r"variance: expected numbers >= 0, got -1.0"),
    "NaN": (_arguments(v=np.full((4, 2), np.nan)), r"v: expected finite numbers, got nan"),
    "infinite variance": (_arguments(variance=np.full((4, 3), np.inf)), r"variance: expected finite numbers, got inf"),
    "no channels": (_arguments(q=np.ones((2, 0)), k=np.ones((4, 0)), variance=np.ones((4, 0))), r"q: expected d >= 1 channels, got 0"),
    "no tokens": (_arguments(k=np.ones((0, 3)), v=np.ones((0, 2)), variance=np.ones((0, 3))), r"k: expected at least one token, got none"),
    "visible": (_arguments(visible=np.ones((4, 2), bool)), r"visible: expected shape \(m=2, n=4\), got \(4, 2\)"),
    "sees none": (_arguments(visible=np.array([[1, 0, 0, 0], [0, 0, 0, 0]], bool)), r"visible: .*query 1 sees none"),
    "scale": (_arguments(scale=-1.0), r"scale: expected a finite number above 0, got -1.0"),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("term", [key_term, remainder_term])
def test_what_is_wrong_is_said(term, arguments, message):
    arguments = dict(arguments)
    one_head = [arguments.pop(name) for name in ("q", "k", "v", "w_o", "variance")]
    with pytest.raises(ValueError, match=message):
        term(*one_head, **arguments)


def test_value_variance_has_the_shape_of_the_values():
    with pytest.raises(ValueError, match=r"variance: expected shape \(n=4, dv=2\), got \(4, 3\)"):
        value_term(**_arguments())
    with pytest.raises(ValueError, match=r"variance: expected shape \(n=4, dv=2\), got \(4, 3\)"):
        remainder_term(*_arguments().values(), np.ones((4, 3)))


# ---- attention_error


def _pair(seed=0, output_proj=True, causal=True):
    """A layer of 2 KV heads and 4 query heads, and a noisy copy of its cache."""
    layer = synthetic.make("gaussian", 2, 4, tokens=12, head_dim=6, value_dim=5, model_dim=7, queries=8, seed=seed)
    layer = layer.replace(
        scale=0.5,
        query_positions=np.array([0, 1, 3, 4, 6, 8, 10, 11]) if causal else None,
        output_proj=layer.output_proj if output_proj else None,
    )
    rng = generator(seed, "noisy copy")
    decoded = Decoded.of(
        layer.keys + 0.3 * rng.standard_normal(layer.keys.shape),
        layer.values + 0.3 * rng.standard_normal(layer.values.shape),
    )
    return layer, decoded


def direct(layer, decoded, own):
    """sum ||o_hat - o||^2 / sum ||o||^2 with o the sum over the query heads `own`, from the definition."""
    exact, error = 0, 0
    for h in own:
        head, kv = layer.head(h), h // layer.group
        o = attention.weights(head.q, head.k, head.scale, visible=head.visible) @ head.v
        a_hat = attention.weights(head.q, decoded.keys[kv], head.scale, visible=head.visible)
        exact = exact + o @ head.w_o
        error = error + (a_hat @ decoded.values[kv] - o) @ head.w_o
    return (error**2).sum() / (exact**2).sum()


@pytest.mark.parametrize("output_proj", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_error_is_the_definition(output_proj, causal):
    layer, decoded = _pair(output_proj=output_proj, causal=causal)
    assert attention_error(layer, decoded) == pytest.approx(direct(layer, decoded, range(4)), rel=1e-12)
    by_head = attention_error(layer, decoded, by="kv_head")
    assert by_head.shape == (2,) and by_head.dtype == np.float64
    np.testing.assert_allclose(by_head, [direct(layer, decoded, (0, 1)), direct(layer, decoded, (2, 3))], rtol=1e-12)


def test_errors_of_a_group_are_summed_before_squaring():
    """B2: two query heads that read the same KV head and undo each other after W_O make no error, however wrong each is."""
    layer, decoded = _pair()
    queries, w_o = np.array(layer.queries), np.array(layer.output_proj)
    queries[1] = queries[0]
    w_o[1] = 1e-9 - w_o[0]
    layer = layer.replace(queries=queries, output_proj=w_o)
    both = direct(layer, decoded, (0, 1))
    assert attention_error(layer, decoded, by="kv_head")[0] == pytest.approx(both, rel=1e-6)
    o = attention.head_outputs(layer, decoded) - attention.head_outputs(layer)
    alone = sum(((o[h] @ w_o[h]) ** 2).sum() for h in (0, 1))
    together = ((o[0] @ w_o[0] + o[1] @ w_o[1]) ** 2).sum()
    assert together < 1e-12 * alone


def test_each_head_counts_for_itself():
    layer, decoded = _pair()
    keys = np.array(layer.keys)
    keys[1] = decoded.keys[1]
    only_second = attention_error(layer, Decoded.of(keys, layer.values), by="kv_head")
    assert only_second[0] == 0 and only_second[1] > 0


@given(st.floats(0.01, 100), st.integers(0, 1000))
def test_attention_error_has_no_unit(t, seed):
    """Values and W_O in other units, keys and queries in inverse ones: the same error. The exact cache: none."""
    layer, decoded = _pair(seed)
    error = attention_error(layer, decoded)
    other = Layer(
        t * layer.keys, t * layer.values, layer.queries / t, 3 * layer.output_proj, scale=layer.scale,
        query_positions=layer.query_positions,
    )  # fmt: skip
    assert attention_error(other, Decoded.of(t * decoded.keys, t * decoded.values)) == pytest.approx(error, rel=1e-9)
    assert attention_error(layer, Decoded.exact(layer)) == 0


def test_given_queries_are_future_queries():
    layer, decoded = _pair()
    future = generator(9, "future").standard_normal((4, 3, 6))
    assert attention_error(layer, decoded, future) == pytest.approx(
        direct(layer.replace(queries=future, query_positions=None), decoded, range(4)), rel=1e-12
    )


def test_small_noise_costs_what_the_terms_say():
    """One query head a group: mean of attention_error over noises = (D_K + D_V) / ||o||^2, within its standard error."""
    layer = synthetic.make("gaussian", 1, 1, tokens=40, head_dim=16, queries=20)
    head = layer.head(0)
    keys, values = np.full((40, 16), 1e-4), np.full((40, 16), 2e-4)
    predicted = key_term(head.q, head.k, head.v, head.w_o, keys) + value_term(head.q, head.k, head.v, head.w_o, values)
    rng = generator(0, "small noise")
    measured = [
        attention_error(
            layer,
            Decoded.of(
                layer.keys + 1e-2 * rng.standard_normal(layer.keys.shape),
                layer.values + np.sqrt(2) * 1e-2 * rng.standard_normal(layer.values.shape),
            ),
        )
        for _ in range(400)
    ]
    expected = predicted.sum() / (attention.layer_outputs(layer) ** 2).sum()
    spread = np.std(measured) / 20
    assert spread < 0.02 * expected
    assert abs(np.mean(measured) - expected) < 5 * spread


def test_attention_error_refuses():
    layer, decoded = _pair()
    with pytest.raises(ValueError, match='by: expected "layer" or "kv_head", got \'head\''):
        attention_error(layer, decoded, by="head")
    with pytest.raises(ValueError, match=r"queries: .* needs it, and this layer has none"):
        attention_error(layer.replace(queries=None, query_positions=None), decoded)
    with pytest.raises(ValueError, match="queries: expected shape"):
        attention_error(layer, decoded, np.ones((4, 3, 5)))
    with pytest.raises(ValueError, match="decoded: expected"):
        attention_error(layer, Decoded.of(np.ones((2, 12, 6)), np.ones((2, 12, 4))))
    with pytest.raises(ValueError, match=r"non-zero attention output .* got sum \|\|o\|\|\^2 = 0"):
        attention_error(layer.replace(values=np.zeros((2, 12, 5))), decoded)
    # one head that says nothing has no error of its own to be relative to
    silent = np.array(layer.values)
    silent[0] = 0
    with pytest.raises(ValueError, match="non-zero attention output"):
        attention_error(layer.replace(values=silent), decoded, by="kv_head")


@given(st.integers(0, 1000))
def test_a_query_that_the_reducer_left_without_tokens_is_named(seed):
    """A causal query may come before every kept token: its softmax has nothing to sum over."""
    layer, decoded = _pair(seed)
    assume(layer.query_positions is not None)
    late = Decoded(
        decoded.keys[:, 6:],
        decoded.values[:, 6:],
        np.zeros((2, 6)),
        np.tile(np.arange(6, 12), (2, 1)),
        np.array([6, 6]),
    )
    with pytest.raises(ValueError, match="query 0 of head 0 sees none"):
        attention_error(layer, late)
