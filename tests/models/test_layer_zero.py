"""The first layer's rows: what a capture of it shows, and equal rows found exactly."""

import dataclasses

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays

from kvtheory import models
from kvtheory.models.layer_zero import LayerZero, collisions, key_value_rows, read, stored, weights_folder


def by_pairs(rows):
    """Groups of equal rows, each pair compared."""
    groups = []
    for i, row in enumerate(rows):
        home = next((g for g in groups if all(a == b for a, b in zip(rows[g[0]], row))), None)
        groups.append([i]) if home is None else home.append(i)
    return groups


class TestCollisions:
    @given(
        arrays.arrays(
            st.sampled_from([np.float32, np.float16, np.float64, np.uint8, np.int64]),
            st.tuples(st.integers(1, 12), st.integers(1, 5)),
            elements=st.integers(0, 2),
        )
    )
    def test_are_those_of_all_pairs(self, rows):
        found, groups = collisions(rows), by_pairs(rows)
        assert [np.flatnonzero(found.group_of == g).tolist() for g in range(found.distinct)] == groups
        assert found.representatives.tolist() == [g[0] for g in groups]
        assert found.lost == len(rows) - len(groups) and found.shared == [g for g in groups if len(g) > 1]

    def test_floats_are_compared_as_numbers(self):
        rows = np.array([[0.0], [-0.0], [1], [1 + 2**-23]], np.float32)
        assert collisions(rows).shared == [[0, 1]]
        assert collisions(rows.astype(ml_dtypes.bfloat16)).shared == [[0, 1], [2, 3]]
        with pytest.raises(ValueError, match="rows: expected numbers, got NaN"):
            collisions(np.array([[np.nan]]))
        with pytest.raises(ValueError, match=r"rows: expected shape \(n, c\), got \(3,\)"):
            collisions(np.zeros(3))

    def test_rows_that_share_a_sum_are_told_apart(self):
        """The rows are first sorted by a sum with known factors; these two have the same one."""
        factors = np.random.Philox(key=2).random_raw(2) | np.uint64(1)
        rows = np.array([[factors[1], 0], [0, factors[0]], [factors[1], 0]], np.uint64)
        assert len(set((rows @ factors).tolist())) == 1
        assert collisions(rows).shared == [[0, 2]]

    def test_of_nothing(self):
        assert collisions(np.zeros((0, 4))).distinct == 0
        assert collisions(np.zeros((3, 0))).shared == [[0, 1, 2]]


class TestStored:
    @given(st.integers(1, 8), st.integers(0, 10**6))
    def test_codes_are_the_nearest_levels_of_each_channel(self, bits, seed):
        rows = np.random.default_rng(seed).normal(size=(40, 3)).astype(np.float32) * [1, 100, 0.01]
        codes = stored(rows, bits)
        assert codes.dtype == np.uint8 and codes.min() == 0 and codes.max() == 2**bits - 1
        for channel, own in zip(rows.T.astype(float), codes.T):
            levels = np.linspace(channel.min(), channel.max(), 2**bits)
            distance = np.abs(channel[:, None] - levels)
            np.testing.assert_allclose(distance[np.arange(40), own], distance.min(axis=1), rtol=1e-6, atol=1e-12)

    def test_a_constant_channel_and_bad_bits(self):
        assert not stored(np.ones((3, 2), np.float32), 4).any()
        for bits in (0, 9, "float8"):
            with pytest.raises(ValueError, match="bits: expected"):
                stored(np.ones((3, 2), np.float32), bits)


class TestRows:
    @pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3"])
    def test_are_the_keys_and_values_that_a_capture_shows(self, name, tmp_path):
        torch = pytest.importorskip("torch")
        from tests.models import tiny

        model = tiny.ARCHITECTURES[name]()
        with torch.no_grad():
            model.get_input_embeddings().weight[7] = model.get_input_embeddings().weight[5]
        model.save_pretrained(tmp_path)
        ids = np.r_[5, 7, tiny.tokens(20)]
        layer = models.capture(model, None, ids, layers=[0])[0] if name != "gemma3" else _gemma(model, ids)
        rows = key_value_rows(read(tmp_path))[ids]
        assert rows.dtype == np.float32 and (rows[0] == rows[1]).all()
        before = layer.rope.undo(layer.keys, layer.positions)
        expected = np.concatenate([before, layer.values], axis=2).transpose(1, 0, 2)
        keys = rows[:, : before.shape[0] * before.shape[2]].reshape(len(ids), *before.shape[::2])
        values = rows[:, before.shape[0] * before.shape[2] :].reshape(len(ids), before.shape[0], -1)
        np.testing.assert_allclose(np.concatenate([keys, values], axis=2), expected, rtol=1e-3, atol=1e-4)

    def test_equal_embeddings_give_equal_bits_at_any_place(self):
        rng = np.random.default_rng(0)
        table = rng.normal(size=(5, 24)).astype(np.float32)
        where = rng.integers(5, size=9001)
        first = LayerZero(table[where], np.ones(24), *rng.normal(size=(2, 2, 8, 24)), eps=1e-5)
        found = collisions(key_value_rows(first))
        assert found.distinct == 5
        np.testing.assert_array_equal(found.group_of, collisions(where[:, None]).group_of)

    def test_a_lost_direction_is_a_collision(self):
        weights = np.zeros((2, 1, 1, 4), np.float32)
        weights[..., 0] = 1
        embedding = np.array([[1, 2, 0, 0], [1, 0, 2, 0], [2, 1, 0, 0]], np.float32)
        first = LayerZero(embedding, np.ones(4, np.float32), *weights, eps=0.0)
        assert collisions(key_value_rows(first)).shared == [[0, 1]]
        louder = dataclasses.replace(first, embedding=embedding * 4)
        np.testing.assert_array_equal(
            key_value_rows(louder), key_value_rows(first)
        )  # a norm of 0 eps knows no loudness

    def test_models_of_another_formula_are_refused(self, tmp_path):
        pytest.importorskip("torch")
        from tests.models import tiny

        tiny.gpt2().save_pretrained(tmp_path)
        with pytest.raises(
            models.UnsupportedModel, match="expected one of llama, qwen2, mistral, gemma3_text, got gpt2"
        ):
            read(tmp_path)

    def test_absent_weights_are_unavailable(self, tmp_path, monkeypatch):
        monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path))
        with pytest.raises(models.ModelUnavailable, match="`kvtheory models fetch smol` puts them there"):
            weights_folder("smol")
        with pytest.raises(ValueError, match="no model 'gpt5'"):
            weights_folder("gpt5")


def _gemma(model, ids):
    return models.capture(model, None, ids, layers=[0])[0]


@pytest.mark.real
def test_rows_of_smol_are_its_cache():
    pytest.importorskip("torch")
    from kvtheory.sample import sample_text

    tokenizer, model = models.load("smol")
    cache = models.capture(model, tokenizer, sample_text(), tokens=40, layers=[0])
    layer = cache[0]
    rows = key_value_rows(read(weights_folder("smol")))[cache.tokens].reshape(40, 2, 3, 64)
    found = np.stack([layer.rope.undo(layer.keys, layer.positions), layer.values])
    assert np.linalg.norm(rows.transpose(1, 2, 0, 3) - found) < 1e-5 * np.linalg.norm(found)
