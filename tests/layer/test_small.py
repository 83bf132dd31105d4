"""Random streams and intervals: keyed apart, covering what they say."""

import numpy as np
import pytest

from kvtheory.randomness import generator, raw_words
from kvtheory.statistics import geometric_mean_interval, mean_interval, proportion_interval, slope_interval


def test_streams_are_keyed_by_seed_and_purpose():
    words = raw_words(0, "rotation", 4)
    assert words.dtype == np.uint64 and words.tolist() == raw_words(0, "rotation", 4).tolist()
    assert not set(words.tolist()) & set(raw_words(0, "data", 4).tolist()) & set(raw_words(1, "rotation", 4).tolist())
    assert generator(0, "a").random() != generator(0, "b").random()
    # frozen: bytes of streams depend on these words
    assert [hex(w) for w in words] == FROZEN
    with pytest.raises(TypeError, match="seed: expected an int, got float"):
        generator(0.5, "x")


FROZEN = ["0x77dd94413b146295", "0xf6128244af740a2e", "0x8024aa30d6aad1f7", "0xb608dd7969cd580d"]


@pytest.mark.parametrize("make", [lambda rng: rng.standard_normal(200) + 3, lambda rng: rng.exponential(3, 200)])
def test_mean_interval_covers_at_its_level(make):
    rng = np.random.default_rng(0)
    hits = [i.low <= 3 <= i.high for i in (mean_interval(make(rng), 0.9) for _ in range(2000))]
    assert 0.87 < np.mean(hits) < 0.93


def test_slope_interval_recovers_a_slope_from_dependent_points():
    rng = np.random.default_rng(1)
    x = np.linspace(0, 1, 5)
    curves = 2 * x + rng.standard_normal((300, 1)) + 0.1 * rng.standard_normal((300, 5))
    found = slope_interval(x, curves, 0.999)
    assert found.low < 2 < found.high and found.high - found.low < 0.1


def test_proportion_interval_is_exact():
    zero = proportion_interval(20, 20, 0.95)
    assert zero.high == 1 and zero.low == pytest.approx(0.025 ** (1 / 20), rel=1e-9)
    assert proportion_interval(0, 10, 0.95).low == 0
    p, n, rng = 0.1, 30, np.random.default_rng(2)
    intervals = [proportion_interval(int(k), n, 0.9) for k in rng.binomial(n, p, 3000)]
    assert np.mean([i.low <= p <= i.high for i in intervals]) >= 0.9


def test_geometric_mean_and_bad_arguments():
    assert geometric_mean_interval([1.0, 4.0, 2.0], 0.5).estimate == pytest.approx(2)
    for call in (
        lambda: mean_interval([1.0], 0.9),
        lambda: mean_interval([1, 2], 1.0),
        lambda: geometric_mean_interval([0.0, 1], 0.9),
    ):
        with pytest.raises(ValueError, match=r"samples|level"):
            call()
    assert mean_interval([2.0, 2.0, 2.0], 0.9).low == 2.0 and mean_interval([1, 2], 0.9).scaled(2).estimate == 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", ">f4"])
def test_finite_finds_every_nan_and_inf_and_nothing_else(dtype):
    from ml_dtypes import bfloat16

    from kvtheory.checks import finite

    dtype = np.dtype(bfloat16 if dtype == "bfloat16" else dtype)
    # numbers whose sum overflows are finite all the same
    huge = np.full((3, 50), 60000.0 if dtype == np.float16 else 1e38).astype(dtype)
    assert finite("x", huge) is huge and finite("x", np.zeros((0, 3), dtype)).size == 0
    for bad in (np.nan, np.inf, -np.inf):
        for where in ((0, 0), (2, 49), (1, 7)):
            x = huge.copy()
            x[where] = bad
            with pytest.raises(
                ValueError,
                match=rf"x: expected finite numbers, got {bad} at \(row {where[0]}, axis 1 {where[1]}\)|at \(row {where[0]}\)",
            ):
                finite("x", x, ("row",))
    both = huge.copy()
    both[0, 0], both[0, 1] = np.inf, -np.inf
    with pytest.raises(ValueError, match="2 such in all"):
        finite("x", both)
