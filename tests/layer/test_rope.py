"""RoPE: rotations that undo, keep norms, and make a logit depend on the distance alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtheory import Rope

ropes = st.builds(
    Rope,
    st.integers(1, 4).flatmap(lambda n: st.lists(st.floats(1e-4, 2.0), min_size=n, max_size=n)),
    layout=st.sampled_from(["half", "interleaved"]),
    attention_scaling=st.sampled_from([1.0, 1.3]),
)


@given(ropes, st.integers(0, 10**6), st.integers(0, 3))
def test_undo_inverts_apply(rope, start, seed):
    x = np.random.default_rng(seed).standard_normal((2, 5, rope.rotated + 3))
    positions = start + np.arange(5)
    np.testing.assert_allclose(rope.undo(rope.apply(x, positions), positions), x, atol=1e-12)
    np.testing.assert_array_equal(rope.apply(x, positions)[..., rope.rotated :], x[..., rope.rotated :])
    assert rope == Rope.from_json(rope.to_json()) and hash(rope) == hash(Rope.from_json(rope.to_json()))


@given(ropes, st.integers(0, 500), st.integers(0, 500))
def test_logit_depends_on_the_distance_in_the_right_direction(rope, m, i):
    rng = np.random.default_rng(7)
    q, k = rng.standard_normal((2, 1, rope.rotated))
    logit = (rope.apply(q, [m]) @ rope.apply(k, [i]).T).item()
    moved = (rope.apply(q, [m - i]) @ k.T).item() * rope.attention_scaling
    assert logit == pytest.approx(moved, abs=1e-9)


def test_against_complex_multiplication():
    rope = Rope([0.3, 0.07], layout="interleaved")
    x = np.random.default_rng(0).standard_normal((6, 4))
    positions = np.array([0, 1, 5, 9, 100, 4096])
    z = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * positions[:, None] * rope.inv_freq)
    got = rope.apply(x, positions)
    np.testing.assert_allclose(got[:, 0::2] + 1j * got[:, 1::2], z, atol=1e-12)
    half = Rope([0.3, 0.07])
    permuted = half.apply(x[:, [0, 2, 1, 3]], positions)[:, [0, 2, 1, 3]]
    np.testing.assert_allclose(permuted, got, atol=1e-12)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Rope([]), "inv_freq: expected at least one frequency"),
        (lambda: Rope([[0.1]]), "inv_freq: expected shape"),
        (lambda: Rope([np.inf]), "inv_freq: expected finite"),
        (lambda: Rope([0.1], layout="quarter"), 'layout: expected "half" or "interleaved"'),
        (lambda: Rope([0.1], attention_scaling=0), "attention_scaling: expected a finite number above 0"),
        (lambda: Rope([0.1, 0.2]).apply(np.zeros((2, 3)), [0, 1]), "x: expected shape .* d >= 4"),
        (lambda: Rope([0.1]).apply(np.zeros((2, 3)), [0]), r"positions: expected shape \(..., 2\)"),
    ],
)
def test_bad_input_is_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
