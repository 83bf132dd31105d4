"""reference.merging: the definition, summed in its order, and what attention makes of a merged token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtheory
from reference.merging import merge
from tests.reference.strategies import DTYPES


@st.composite
def cases(draw):
    """An array (heads, tokens, d), groups of some tokens of each head, and weights."""
    heads, tokens, dim = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.sampled_from((1, 3, 8)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    dtype = np.dtype(DTYPES[draw(st.sampled_from(sorted(DTYPES)))])
    array = (rng.standard_normal((heads, tokens, dim)) * 2.0 ** rng.integers(-20, 12, (heads, tokens, 1))).astype(dtype)
    sizes = [rng.integers(1, 6, rng.integers(0, 4)) for _ in range(heads)]
    groups = [[rng.integers(0, tokens, n) for n in own] for own in sizes]
    return array, groups, [[np.exp(rng.normal(0, 3, n)) for n in own] for own in sizes]


@given(cases())
def test_it_is_the_weighted_mean_in_order(case):
    array, groups, weights = case
    merged = merge(array, groups, weights)
    width = max(map(len, groups))
    assert merged.tokens.shape == (len(array), width, array.shape[2]) and merged.tokens.dtype == array.dtype
    assert merged.log_weights.shape == (len(array), width)
    for h, (own, own_weights) in enumerate(zip(groups, weights)):
        for k, (group, weight) in enumerate(zip(own, own_weights)):
            total, mass = np.zeros(array.shape[2]), 0.0
            for w, x in zip(weight, array[h, group].astype(np.float64)):
                total, mass = total + w * x, mass + w
            assert merged.tokens[h, k].tobytes() == (total / mass).astype(array.dtype).tobytes()
            assert merged.log_weights[h, k] == np.log(mass)
        assert not merged.tokens[h, len(own) :].any() and np.isneginf(merged.log_weights[h, len(own) :]).all()


@given(st.integers(0, 1 << 32))
def test_tokens_of_equal_keys_merge_without_loss(seed):
    """Attention over merged tokens is attention over all of them, for any query, where the keys of a group are equal: to rounding."""
    rng = np.random.default_rng(seed)
    kinds, tokens = rng.standard_normal((4, 6)), 20
    of = np.sort(np.concatenate([np.arange(4), rng.integers(0, 4, tokens - 4)]))
    keys, values = kinds[of][None], rng.standard_normal((1, tokens, 5))
    log_weights = rng.normal(0, 1, tokens)
    groups = [[np.flatnonzero(of == kind) for kind in range(4)]]
    weights = [[np.exp(log_weights[group]) for group in groups[0]]]
    queries = rng.standard_normal((1, 7, 6))
    every = kvtheory.attention.attend(queries, keys, values, log_weights=log_weights[None])
    few, own = merge(keys, groups, weights)
    found = kvtheory.attention.attend(queries, few, merge(values, groups, weights).tokens, log_weights=own)
    # weights are off by (|logit| + 2 tokens) 2^-53 of themselves, logits below 60, values below 10
    np.testing.assert_allclose(found, every, rtol=0, atol=2 * 10 * (60 + 2 * tokens) * 2.0**-53)


def test_no_group_at_all():
    merged = merge(np.ones((2, 3, 4), np.float16), [[], []], [[], []])
    assert merged.tokens.shape == (2, 0, 4) and merged.log_weights.shape == (2, 0)


def test_what_does_not_fit_is_refused():
    x = np.zeros((2, 3, 4), np.float32)
    for weight in (np.array([0.0]), np.array([np.nan]), np.array([1.0, 1.0]), np.array([-1.0])):
        with pytest.raises(ValueError, match="weights: expected 1 finite numbers above 0 for group 0 of head 1"):
            merge(x, [[], [np.array([2])]], [[], [weight]])
    with pytest.raises(ValueError, match="weights: expected 0 finite"):
        merge(x, [[], [np.zeros(0, int)]], [[], [np.zeros(0)]])
    with pytest.raises(ValueError, match="weights: expected those of 1 groups of head 0, got 0"):
        merge(x, [[np.array([0])], []], [[], []])
    with pytest.raises(ValueError, match="groups: expected one for each of 2 heads, got 1"):
        merge(x, [[]], [[], []])
    with pytest.raises(IndexError, match="groups: expected tokens from 0 to 2 for head 1, got 3 to 3"):
        merge(x, [[], [np.array([3])]], [[], [np.array([1.0])]])
