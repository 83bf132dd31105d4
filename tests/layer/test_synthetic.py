"""Each synthetic kind has the property it is there for, and the others do not."""

import numpy as np
import pytest

from kvtheory.synthetic import KINDS, attention_mass, make


def mass(kind, **sizes):
    layer = make(kind, **sizes)
    return np.stack([attention_mass(layer, h) for h in range(layer.query_heads)])


def rank_share(x, rank):
    s = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2
    return s[:rank].sum() / s.sum()


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_seeds_and_finiteness(kind):
    a, b, c = make(kind, seed=3), make(kind, seed=3), make(kind, seed=4)
    np.testing.assert_array_equal(a.keys, b.keys)
    np.testing.assert_array_equal(a.queries, b.queries)
    assert not np.array_equal(a.keys, c.keys)
    assert a.keys.shape == (2, 256, 64) and a.queries.shape == (4, 128, 64) and a.output_proj.shape == (4, 64, 256)
    assert a.query_positions is None
    odd = make(kind, kv_heads=3, query_heads=3, tokens=7, head_dim=5, value_dim=2, model_dim=9, queries=4)
    assert odd.values.shape == (3, 7, 2) and odd.output_proj.shape == (3, 2, 9)


def test_gaussian_is_white_and_diffuse():
    layer = make("gaussian", tokens=4096)
    np.testing.assert_allclose(np.cov(layer.keys[0].T), np.eye(64), atol=0.1)
    assert mass("gaussian").max() < 0.5


def test_low_rank_has_a_cliff_in_its_spectrum():
    layer = make("low_rank")
    for array in (layer.keys, layer.values):
        assert rank_share(array[0], 8) > 0.999 > rank_share(make("gaussian").keys[0], 8)
        assert rank_share(array[0], 7) < 0.999


def test_outlier_channels_stand_out_in_mean_and_scale():
    for head in make("outlier_channels").keys:
        outliers = np.abs(head.mean(axis=0)) > 10
        assert outliers.sum() == 2
        assert head[:, outliers].std(axis=0).min() > 3
        assert head[:, ~outliers].std(axis=0).max() < 1.5


def test_attention_sink_takes_most_mass_and_adds_little():
    a = mass("attention_sink")
    assert a[:, :, 0].mean() > 0.6
    values = make("attention_sink").values
    assert np.linalg.norm(values[:, 0], axis=-1).max() < 0.05 * np.linalg.norm(values[:, 1:], axis=-1).mean()


def test_clustered_scatter_is_small_against_the_distance_of_centres():
    for array in (make("clustered").keys, make("clustered").values):
        distances = np.linalg.norm(array[0][:, None] - array[0][None], axis=-1)
        near = distances < 2
        assert near.sum(axis=1).min() >= 2 and near.mean() < 0.2
        assert distances[~near].min() > 6


def test_search_puts_exactly_half_on_its_own_token():
    a = mass("search")
    own = a[:, np.arange(128), np.arange(128)]
    np.testing.assert_allclose(own, 0.5, rtol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(make("search").values, axis=-1), 1, rtol=1e-12)


def test_needle_is_rare_and_critical():
    top = mass("needle", queries=256)
    hits = (top.max(axis=2) > 0.85).mean()
    assert 0.1 < hits < 0.15
    layer = make("needle", queries=256)
    for h in range(layer.query_heads):
        a = attention_mass(layer, h)
        hidden = np.unique(a[::8].argmax(axis=1))
        assert hidden.size == 1
        assert a[np.arange(256) % 8 != 0, hidden[0]].max() < 0.01


def test_heavy_tails_are_heavy():
    def kurtosis(x):
        x = x - x.mean()
        return (x**4).mean() / (x**2).mean() ** 2

    assert kurtosis(make("heavy_tail", tokens=4096).keys) > 6
    assert kurtosis(make("gaussian", tokens=4096).keys) < 3.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "pink"}, "kind: expected one of gaussian, .* got 'pink'"),
        ({"kind": "gaussian", "query_heads": 3}, "query_heads: expected a multiple of kv_heads = 2, got 3"),
        ({"kind": "gaussian", "head_dim": 0}, "head_dim: expected an int >= 1, got 0"),
        ({"kind": "gaussian", "tokens": 2.5}, "tokens: expected an int >= 0, got 2.5"),
        ({"kind": "search", "tokens": 1}, "kind 'search' expects at least 2 of each, got 1 and 64"),
        ({"kind": "needle", "head_dim": 1}, "kind 'needle' expects tokens >= 1 and head_dim >= 2"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
