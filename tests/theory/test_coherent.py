"""`distortion.coherent_term`: errors of all keys together, as the derivative of the output along them."""

import numpy as np
import pytest

from kvtheory import attention
from kvtheory.distortion import coherent_term, key_term
from kvtheory.randomness import generator


def _head(seed=0, n=7, m=3, d=4, dv=3, width=5):
    rng = generator(seed, "coherent")
    return [rng.standard_normal(shape) for shape in ((m, d), (n, d), (n, dv), (dv, width), (n, d))]


def test_is_the_squared_derivative_along_the_error():
    q, k, v, w, e = _head()
    visible = np.arange(7)[None, :] < np.array([3, 5, 7])[:, None]
    step = 1e-5
    moved = [attention.weights(q, k + s * step * e, 0.7, visible=visible) @ v @ w for s in (1, -1)]
    expected = (((moved[0] - moved[1]) / (2 * step)) ** 2).sum(axis=1)
    np.testing.assert_allclose(coherent_term(q, k, v, w, e, 0.7, visible=visible), expected, rtol=1e-8)


def test_one_noisy_token_costs_its_key_term():
    """One token alone: coherent or not is the same, with the square of the error for its variance where one channel errs."""
    q, k, v, w, _ = _head(1)
    e = np.zeros_like(k)
    e[2, 1] = 0.3
    np.testing.assert_allclose(coherent_term(q, k, v, w, e), key_term(q, k, v, w, e**2), rtol=1e-12)


def test_signs_count_and_a_common_shift_does_not():
    q, k, v, w, e = _head(2)
    term = coherent_term(q, k, v, w, e)
    np.testing.assert_allclose(coherent_term(q, k, v, w, -3 * e), 9 * term, rtol=1e-12)
    np.testing.assert_allclose(coherent_term(q, k, v, w, e + np.array([1.0, -2.0, 0.5, 4.0])), term, rtol=1e-9)
    # two equal tokens with opposite errors leave the output where it was
    k[1], v[1] = k[0], v[0]
    opposed = np.zeros_like(k)
    opposed[0], opposed[1] = e[0], -e[0]
    assert coherent_term(q, k, v, w, opposed).max() < 1e-25
    assert key_term(q, k, v, w, opposed**2).min() > 1e-6


def test_refusals():
    q, k, v, w, e = _head()
    with pytest.raises(ValueError, match="key_error: expected shape"):
        coherent_term(q, k, v, w, e[:, :2])
    e[1, 1] = np.nan
    with pytest.raises(ValueError, match="key_error: expected finite numbers"):
        coherent_term(q, k, v, w, e)
