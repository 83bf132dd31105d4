"""kvtheory.distortion.tokens: the token factor against complex steps, eviction against attention without the tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtheory import attention
from kvtheory.distortion import (
    eviction_error,
    eviction_surrogate,
    key_term,
    logit_variance,
    single_eviction_error,
    token_factor,
)
from kvtheory.distortion import head as head_module
from kvtheory.randomness import generator


@st.composite
def heads(draw, least=1):
    """(q, k, v, w_o), scale, visible of one head; every query sees tokens 0 to least - 1 at least."""
    m, n = draw(st.integers(1, 3)), draw(st.integers(least, 7))
    d, dv, model_dim = (draw(st.integers(1, 4)) for _ in range(3))
    rng = generator(draw(st.integers(0, 2**32)), "heads")
    head = tuple(rng.standard_normal(s) for s in ((m, d), (n, d), (n, dv), (dv, model_dim)))
    scale = draw(st.sampled_from([None, 0.3, 3.0]))
    visible = None
    if draw(st.booleans()):
        visible = rng.random((m, n)) < 0.7
        visible[:, :least] = True
    return head, scale, visible


@st.composite
def evictions(draw):
    """A head with a set to remove, one for all queries or one each, that leaves every query token 0."""
    head, scale, visible = draw(heads())
    shape = (len(head[0]), len(head[1])) if draw(st.booleans()) else (len(head[1]),)
    removed = generator(draw(st.integers(0, 2**32)), "removed").random(shape) < draw(st.floats(0, 1))
    removed[..., 0] = False
    return head, scale, visible, removed


def outputs(q, k, v, w_o, scale, visible):
    """(m, D) by attention.attend, each query over the tokens it sees and no others."""
    seen = np.ones((len(q), len(k)), bool) if visible is None else visible
    return np.stack(
        [
            attention.attend(q[None, j : j + 1], k[None, s], v[None, s], scale=scale)[0, 0] @ w_o
            for j, s in enumerate(seen)
        ]
    )


@given(heads())
def test_token_factor_is_the_squared_derivative(case):
    (q, k, v, w_o), scale, visible = case
    got = token_factor(q, k, v, w_o, scale, visible=visible)
    z = attention.logits(q, k, q.shape[1] ** -0.5 if scale is None else scale)
    for j in range(len(q)):
        seen = np.ones(len(k), bool) if visible is None else visible[j]
        for i in range(len(k)):
            e = np.exp(z[j] - z[j].max() + 1e-30j * (np.arange(len(k)) == i)) * seen
            derivative = ((e / e.sum()) @ v @ w_o).imag / 1e-30
            # the derivative adds up numbers of size a_i |v W_O|
            rounding = 1e-14 * np.linalg.norm(np.abs(v) @ np.abs(w_o))
            assert np.sqrt(got[j, i]) == pytest.approx(np.linalg.norm(derivative), rel=1e-9, abs=rounding)


@given(heads(), st.integers(0, 2**32))
def test_times_the_variance_of_the_logits_it_is_the_key_term(case, seed):
    head, scale, visible = case
    variance = generator(seed, "variance").exponential(size=head[1].shape)
    s2 = logit_variance(head[0], np.stack([np.diag(x) for x in variance]), scale)
    d_k = key_term(*head, variance, scale, visible=visible)
    np.testing.assert_allclose(
        (token_factor(*head, scale, visible=visible) * s2).sum(axis=1), d_k, rtol=1e-10, atol=1e-28
    )


@given(evictions())
def test_eviction_is_attention_without_the_tokens(case):
    (q, k, v, w_o), scale, visible, removed = case
    got = eviction_error(q, k, v, w_o, removed, scale, visible=visible)
    kept = np.broadcast_to(~removed, (len(q), len(k))) & (True if visible is None else visible)
    change = outputs(q, k, v, w_o, scale, kept) - outputs(q, k, v, w_o, scale, visible)
    size = ((np.abs(v) @ np.abs(w_o)) ** 2).sum(axis=1).max()
    np.testing.assert_allclose(np.sqrt(got), np.linalg.norm(change, axis=1), rtol=1e-9, atol=1e-14 * np.sqrt(size))


@given(evictions())
def test_the_two_forms_agree(case):
    """A_E (o' - o_E) = -sum_E a_i u_i / (1 - A_E), of which the latter loses digits as 1 - A_E falls."""
    (q, k, v, w_o), scale, visible, removed = case
    a = attention.weights(q, k, q.shape[1] ** -0.5 if scale is None else scale, visible=visible)
    vw = v @ w_o
    gone = np.where(removed, a, 0.0)
    kept = np.where(removed, 0.0, a).sum(axis=1)
    change = np.linalg.norm(gone @ vw - gone.sum(axis=1, keepdims=True) * (a @ vw), axis=1) / kept
    got = np.sqrt(eviction_error(q, k, v, w_o, removed, scale, visible=visible))
    assert (np.abs(got - change) <= 1e-14 * np.linalg.norm(np.abs(v) @ np.abs(w_o)) / kept).all()


@given(heads(least=2))
def test_one_token_alone(case):
    (q, k, v, w_o), scale, visible = case
    got = single_eviction_error(q, k, v, w_o, scale, visible=visible)
    one_by_one = np.stack(
        [eviction_error(q, k, v, w_o, np.arange(len(k)) == j, scale, visible=visible) for j in range(len(k))], 1
    )
    size = ((np.abs(v) @ np.abs(w_o)) ** 2).sum()
    np.testing.assert_allclose(got, one_by_one, rtol=1e-9, atol=1e-28 * size)
    a = attention.weights(q, k, q.shape[1] ** -0.5 if scale is None else scale, visible=visible)
    factor = token_factor(q, k, v, w_o, scale, visible=visible)
    # 1 - a is right to 2e-16, not to so many digits of its own
    rounding = 1e-15 * np.sqrt(got) + 1e-14 * np.sqrt(size)
    assert (np.abs(np.sqrt(got) * (1 - a) - np.sqrt(factor)) <= 1e-9 * np.sqrt(factor) + rounding).all()


@pytest.mark.parametrize("lead", [5.0, 30.0, 300.0, 2000.0])
@pytest.mark.parametrize("offset", [0.0, 1e9])
def test_a_sink_keeps_its_digits(lead, offset):
    """Two tokens: removing either moves the output by its own attention times ||v_1 - v_0||, be that attention 1 or e^{-300}."""
    q, k = np.ones((1, 1)), np.array([[lead], [0.0]])
    v, w_o = np.array([[offset], [offset + 2.0]]), np.array([[3.0, 4.0]])
    small = np.exp(-lead) / (1 + np.exp(-lead))
    expected = np.array([[(1 - small) ** 2, small**2]]) * 100
    np.testing.assert_allclose(single_eviction_error(q, k, v, w_o, 1.0), expected, rtol=1e-9)
    for j in (0, 1):
        np.testing.assert_allclose(eviction_error(q, k, v, w_o, np.arange(2) == j, 1.0), expected[:, j], rtol=1e-9)


def test_nothing_removed_and_what_is_not_seen_cost_nothing():
    rng = generator(0, "nothing")
    head = tuple(rng.standard_normal(s) for s in ((2, 3), (4, 3), (4, 2), (2, 5)))
    visible = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], bool)
    assert (eviction_error(*head, np.zeros(4, bool), visible=visible) == 0).all()
    error = eviction_error(*head, np.array([0, 0, 1, 1], bool), visible=visible)
    assert error[0] == 0 and error[1] > 0
    assert (single_eviction_error(*head, visible=visible)[0, 2:] == 0).all()
    assert (token_factor(*head, visible=visible)[0, 2:] == 0).all()


def test_the_only_token_cannot_go():
    q, k, v, w_o = np.ones((2, 1)), np.array([[1.0], [2.0]]), np.array([[3.0], [5.0]]), np.eye(1)
    visible = np.array([[0, 1], [1, 1]], bool)
    got = single_eviction_error(q, k, v, w_o, visible=visible)
    assert got[0].tolist() == [0, np.inf] and np.isfinite(got[1]).all()
    with pytest.raises(ValueError, match="removed: expected every query to keep a token, query 0 keeps none"):
        eviction_error(q, k, v, w_o, np.array([False, True]), visible=visible)
    assert single_eviction_error(q[:1], k[:1], v[:1], w_o).tolist() == [[np.inf]]


@given(st.integers(1, 6), st.floats(-4, 4))
def test_surrogate_by_hand(copies, lead):
    """c equal tokens of value 1 beside one of value 0 with logit `lead`: a each, do = c a exactly; the surrogate is c a^2 (1 - c a)^2."""
    q, k = np.ones((1, 1)), np.append(lead, np.zeros(copies))[:, None]
    v, removed = np.append(0.0, np.ones(copies))[:, None], np.append(False, np.ones(copies, bool))
    a = 1 / (copies + np.exp(lead))
    assert eviction_error(q, k, v, np.eye(1), removed, 1.0)[0] == pytest.approx((copies * a) ** 2, rel=1e-9)
    surrogate = eviction_surrogate(q, k, v, np.eye(1), removed, 1.0)[0]
    assert surrogate == pytest.approx(copies * a**2 * (1 - copies * a) ** 2, rel=1e-7)


def test_surrogate_is_no_bound():
    """Equal values add up (the surrogate is too small); opposite ones cancel (it is too large)."""
    q, w_o, removed = np.ones((1, 1)), np.eye(1), np.array([0, 1, 1], bool)
    k = np.zeros((3, 1))
    for v, below in (([0.0, 1.0, 1.0], True), ([0.0, 1.0, -1.0], False)):
        head = q, k, np.array(v)[:, None], w_o
        assert (eviction_surrogate(*head, removed) < eviction_error(*head, removed)) == [below]
        np.testing.assert_allclose(
            eviction_surrogate(*head, removed), token_factor(*head)[:, removed].sum(axis=1), rtol=1e-15
        )


def test_blocks_of_queries_give_the_same(monkeypatch):
    rng = generator(1, "blocks")
    head = tuple(rng.standard_normal(s) for s in ((9, 3), (12, 3), (12, 4), (4, 6)))
    whole = token_factor(*head), single_eviction_error(*head)
    for size in (1, 100, 10**6):
        monkeypatch.setattr(head_module, "BLOCK_ELEMENTS", size)
        for got, expected in zip((token_factor(*head), single_eviction_error(*head)), whole):
            np.testing.assert_allclose(got, expected, rtol=1e-11)


def test_refusals():
    head = np.ones((2, 3)), np.ones((4, 3)), np.ones((4, 2)), np.ones((2, 5))
    with pytest.raises(TypeError, match="removed: expected booleans, got int64"):
        eviction_error(*head, np.array([1, 2]))
    with pytest.raises(ValueError, match=r"removed: expected shape \(n=4\), got \(3,\)"):
        eviction_error(*head, np.zeros(3, bool))
    with pytest.raises(ValueError, match=r"removed: expected shape \(m=2, n=4\), got \(4, 2\)"):
        eviction_surrogate(*head, np.zeros((4, 2), bool))
    with pytest.raises(ValueError, match="k: expected at least one token"):
        token_factor(head[0], head[1][:0], head[2][:0], head[3])
    with pytest.raises(ValueError, match="v: expected finite"):
        single_eviction_error(head[0], head[1], np.full((4, 2), np.nan), head[3])
