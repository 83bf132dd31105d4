"""Layer and Decoded: what is taken, what is refused and in which words."""

import pickle

import hypothesis.extra.numpy as hnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtheory
from kvtheory import Decoded, Layer, Rope
from kvtheory.attention import layer_outputs
from kvtheory.synthetic import make

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def arrays(kv=2, heads=4, n=5, d=3, dv=2, m=6, model=7):
    rng = np.random.default_rng(1)
    shapes = {"keys": (kv, n, d), "values": (kv, n, dv), "queries": (heads, m, d), "output_proj": (heads, dv, model)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def test_arrays_are_kept_as_given():
    given_arrays = arrays()
    layer = Layer(**given_arrays)
    for name, array in given_arrays.items():
        assert getattr(layer, name) is array
    assert layer.positions.dtype == np.int64 and layer.positions.tolist() == [0, 1, 2, 3, 4]
    assert layer.scale == 3**-0.5 and layer.query_positions is None and layer.index is None
    assert (layer.kv_heads, layer.query_heads, layer.group, layer.tokens, layer.head_dim, layer.value_dim) == (
        2,
        4,
        2,
        5,
        3,
        2,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_gives_the_outputs_of_its_float64_copy(dtype):
    low = {name: a.astype(dtype) for name, a in arrays().items()}
    high = {name: a.astype(np.float64) for name, a in low.items()}
    assert Layer(**low).keys.dtype == dtype
    np.testing.assert_array_equal(layer_outputs(Layer(**low)), layer_outputs(Layer(**high)))


def test_strides_and_byte_order_do_not_change_the_outputs():
    plain = arrays()
    expected = layer_outputs(Layer(**plain))
    big = {name: a.astype(">f8") for name, a in plain.items()}
    strided = {name: np.repeat(a, 2, axis=1)[:, ::2] for name, a in plain.items()}
    fortran = {name: np.asfortranarray(a) for name, a in plain.items()}
    for variant in (big, strided, fortran):
        np.testing.assert_allclose(layer_outputs(Layer(**variant)), expected, rtol=1e-13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"values": np.zeros((3, 5, 2))},
            r"values: expected shape \(kv_heads=2, tokens=5, value_dim\), got \(3, 5, 2\)",
        ),
        ({"values": np.zeros((2, 4, 2))}, r"values: expected shape .*tokens=5.*got \(2, 4, 2\)"),
        (
            {"queries": np.zeros((3, 6, 3))},
            "queries: expected query_heads to be a positive multiple of kv_heads = 2, got 3",
        ),
        ({"queries": np.zeros((4, 6, 2))}, r"queries: expected shape .*head_dim=3.*got \(4, 6, 2\)"),
        ({"output_proj": np.zeros((2, 2, 7))}, r"output_proj: expected shape \(query_heads=4, .*got \(2, 2, 7\)"),
        ({"keys": np.zeros((2, 5))}, r"keys: expected shape .*got \(2, 5\)"),
        ({"keys": np.zeros((0, 5, 3)), "values": np.zeros((0, 5, 2))}, "keys: expected kv_heads >= 1, got 0"),
        ({"keys": np.zeros((2, 5, 0))}, "keys: expected head_dim >= 1, got 0"),
        ({"positions": [0, 1]}, r"positions: expected shape \(tokens=5\), got \(2,\)"),
        ({"query_positions": [0, 1]}, r"query_positions: expected shape \(queries=6\), got \(2,\)"),
        ({"scale": 0.0}, "scale: expected a finite number above 0, got 0.0"),
        ({"scale": float("nan")}, "scale: expected a finite number above 0"),
        ({"index": -1}, "index: expected an int >= 0 or None, got -1"),
        ({"rope": Rope([0.1, 0.2])}, "rope: expected at most head_dim = 3 rotated channels, got 4"),
        ({"extras": {"inputs": np.zeros((4, 8))}}, r"extras\['inputs'\]: expected shape \(tokens=5, .*got \(4, 8\)"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        Layer(**(arrays() | change))


@pytest.mark.parametrize("name", ["keys", "values", "queries", "output_proj"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_refused_with_their_place(name, value):
    bad = arrays()
    bad[name] = bad[name].copy()
    bad[name][1, 1, 1] = value
    with pytest.raises(ValueError, match=rf"{name}: expected finite numbers, got {value} at \(head 1, .* 1, .* 1\)"):
        Layer(**bad)


def test_float16_overflow_is_an_inf_and_refused():
    with np.errstate(over="ignore"):
        keys = np.full((1, 2, 3), -70000.0).astype(np.float16)
    with pytest.raises(ValueError, match="keys: expected finite numbers, got -inf at"):
        Layer(keys, np.zeros((1, 2, 3)))


@pytest.mark.parametrize("dtype", [np.int32, np.complex128, bool])
def test_elements_that_are_not_floats_are_refused(dtype):
    with pytest.raises(TypeError, match="keys: expected elements of bfloat16, float16, float32, float64, got"):
        Layer(np.zeros((1, 2, 3), dtype=dtype), np.zeros((1, 2, 3)))
    with pytest.raises(TypeError, match=r"keys: expected an array .* got str"):
        Layer("keys", np.zeros((1, 2, 3)))
    with pytest.raises(TypeError, match="positions: expected integers, got float64"):
        Layer(np.zeros((1, 2, 3)), np.zeros((1, 2, 3)), positions=[0.0, 1.0])


def test_frozen_and_picklable():
    layer = Layer(
        **arrays(), rope=Rope([0.5]), query_positions=np.arange(6), extras={"key_fisher": np.ones((2, 3))}, index=7
    )
    with pytest.raises(AttributeError, match="Layer is frozen"):
        layer.keys = None
    with pytest.raises(AttributeError, match="Layer is frozen"):
        del layer.keys
    copy = pickle.loads(pickle.dumps(layer))
    assert copy.index == 7 and copy.rope == layer.rope and "key_fisher" in copy.extras
    np.testing.assert_array_equal(layer_outputs(copy), layer_outputs(layer))
    with pytest.raises(TypeError, match="no field 'colour'"):
        layer.replace(colour=1)
    assert layer.replace(index=8).index == 8 and layer.index == 7


def test_what_a_method_needs_and_lacks_is_said():
    bare = Layer(np.zeros((1, 2, 3)), np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="queries: layer_outputs needs it, and this layer has none"):
        layer_outputs(bare)
    with pytest.raises(ValueError, match="extras:key_fisher: KVQuant needs it"):
        bare.require("extras:key_fisher", by="KVQuant")


def test_no_token_and_one_token():
    empty = Layer(np.zeros((1, 0, 3)), np.zeros((1, 0, 3)), np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="query 0 of head 0 sees none"):
        layer_outputs(empty)
    one = arrays(n=1)
    layer = Layer(**one)
    expected = sum(one["values"][h // 2, 0] @ one["output_proj"][h] for h in range(4))
    np.testing.assert_allclose(layer_outputs(layer), np.tile(expected, (6, 1)), rtol=1e-13)


def test_head_maps_by_division_and_knows_its_visibility():
    layer = Layer(**arrays(), positions=[3, 5, 7, 9, 11], query_positions=[2, 3, 4, 5, 100, 7])
    head = layer.head(2)
    np.testing.assert_array_equal(head.k, layer.keys[1])
    np.testing.assert_array_equal(layer.head(1).k, layer.keys[0])
    assert head.visible.sum(axis=1).tolist() == [0, 1, 1, 2, 5, 3]
    with pytest.raises(IndexError, match="0 <= query_head < 4, got 4"):
        layer.head(4)


def test_a_window_hides_what_lies_further_back():
    layer = Layer(**arrays(n=6, m=4), positions=[0, 1, 2, 3, 4, 9], query_positions=[0, 3, 4, 10], window=2)
    assert layer.visible().astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    out = layer_outputs(layer)
    for j, keep in enumerate(layer.visible()):
        alone = Layer(
            layer.keys[:, keep],
            layer.values[:, keep],
            layer.queries[:, j : j + 1],
            layer.output_proj,
            scale=layer.scale,
        )
        np.testing.assert_allclose(layer_outputs(alone)[0], out[j], rtol=1e-12)
    assert pickle.loads(pickle.dumps(layer)).window == 2
    for bad, message in (
        ({"window": 0}, "window: expected an int >= 1"),
        ({"query_positions": None}, "window: expected None where"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.replace(**bad)


def test_without_output_proj_heads_lie_side_by_side():
    parts = arrays()
    parts.pop("output_proj")
    layer = Layer(**parts)
    out = layer_outputs(layer)
    assert out.shape == (6, 8)
    projected = Layer(**parts, output_proj=np.stack([layer.projection(h) for h in range(4)]))
    np.testing.assert_allclose(layer_outputs(projected), out, rtol=1e-13)


def test_torch_tensors_are_taken():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=torch.bfloat16).reshape(1, 4, 3)
    layer = Layer(tensor, torch.zeros(1, 4, 2, requires_grad=True))
    assert layer.keys.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(layer.keys.astype(np.float64).ravel(), np.arange(12))


def test_from_hf_takes_layers_and_pairs():
    keys, values = np.random.default_rng(0).standard_normal((2, 3, 2, 5, 4))
    layer = Layer.from_hf([(keys, values)], 0, batch=1)
    np.testing.assert_array_equal(layer.keys, keys[1])
    assert layer.index == 0
    with pytest.raises(ValueError, match="expected a cache with a layer 3"):
        Layer.from_hf([(keys, values)], 3)
    with pytest.raises(ValueError, match="batch: expected 0 <= batch < 3, got 3"):
        Layer.from_hf([(keys, values)], 0, batch=3)


class TestDecoded:
    def padded(self, **change):
        fields = {
            "keys": np.ones((2, 3, 2)), "values": np.ones((2, 3, 1)), "log_weights": np.zeros((2, 3)),
            "positions": np.array([[0, 4, 9], [1, 2, -1]]), "kept": np.array([3, 2]),
        }  # fmt: skip
        fields["keys"][1, 2] = fields["values"][1, 2] = 0
        fields["log_weights"][1, 2] = -np.inf
        return Decoded(**(fields | change))

    def test_heads_may_keep_different_numbers(self):
        assert self.padded().kept.tolist() == [3, 2]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"log_weights": np.zeros((2, 3))}, "log_weights: expected -inf exactly at the padding"),
            ({"positions": np.array([[0, 4, 9], [1, 2, 3]])}, "positions: expected -1 exactly at the padding"),
            ({"positions": np.array([[4, 0, 9], [1, 2, -1]])}, "positions: expected time order"),
            ({"keys": np.ones((2, 3, 2))}, "keys, values: expected 0 at the padding"),
            ({"kept": np.array([4, 2])}, r"kept: expected numbers from 0 to 3, got \[4, 2\]"),
            ({"log_weights": np.full((2, 3), np.nan)}, "log_weights: expected finite numbers"),
        ],
    )
    def test_what_contradicts_itself_is_refused(self, change, message):
        with pytest.raises(ValueError, match=message):
            self.padded(**change)

    def test_padding_is_invisible(self):
        layer = make("gaussian", kv_heads=1, query_heads=1, tokens=4, head_dim=3, queries=5)
        whole = Decoded.exact(layer)
        pad = lambda a, value: np.concatenate([a, np.full((1, 2, *a.shape[2:]), value)], axis=1)  # noqa: E731
        padded = Decoded(
            pad(whole.keys, 0.0), pad(whole.values, 0.0), pad(whole.log_weights, -np.inf), pad(whole.positions, -1), whole.kept
        )  # fmt: skip
        np.testing.assert_array_equal(layer_outputs(layer, padded), layer_outputs(layer))


@given(hnp.array_shapes(min_dims=3, max_dims=3, max_side=5), st.data())
def test_replace_and_head_agree_with_slices(shape, data):
    kv, n, d = shape
    group = data.draw(st.integers(1, 3))
    layer = make(
        "gaussian",
        kv_heads=kv,
        query_heads=kv * group,
        tokens=n,
        head_dim=d,
        queries=2,
        seed=data.draw(st.integers(0, 9)),
    )
    h = data.draw(st.integers(0, kv * group - 1))
    np.testing.assert_array_equal(layer.head(h).v, layer.values[h // group])
    assert kvtheory.Layer is Layer
