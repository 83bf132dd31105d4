"""gpu.AATC, PALU, MetricKLT, KVTC: streams, states, errors and arrays as those of `reference`.

`encode` gives the reference's bytes but for the order in which coefficients are summed: one within rounding of a threshold may get the
neighbouring code (docs/stream-format.md allows both). So here the reference sums in the kernels' order (`sums_in_order`), and every byte is equal.
"""

import functools
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu
import reference
from kvtheory.layer import Layer
from reference import StateMismatch, stream
from reference.kept import Kept
from tests.kernels.codecs import check_same_outcome, decoded, of_decoded, outcome
from tests.kernels.strategies import ELEMENTS, KINDS, STRIDES, kernel_settings, numbers, orders, sizes, strided
from tests.kernels.transforms import sums_in_order
from tests.reference.strategies import text

VECTORS = Path(__file__).parents[1] / "vectors" / "valid"
HEADS, DIM, VALUE_DIM, INDICES = 2, 16, 12, (3, 5)
EVERY = (*ELEMENTS, np.dtype(np.float64))
OPTIONS = {
    "AATC tokenwise": ("AATC", {"bits": 3, "sinks": 2, "window": 5, "protected": 0}),
    "AATC channelwise": ("AATC", {"bits": 2.4, "scaling": "channelwise", "head_group": 1, "sinks": 0, "window": 0, "protected": 1}),
    "AATC factored": ("AATC", {"bits": 1.2, "scaling": "factored", "sinks": 1, "window": 0, "protected": 0}),
    "PALU minmax": ("PALU", {"bits": 3}),
    "PALU max": ("PALU", {"bits": 5, "scale": "max", "head_group": 1, "sinks": 3}),
    "MetricKLT fixed": ("MetricKLT", {"bits": 2, "coding": "fixed", "jensen": True}),
    "MetricKLT channelwise": ("MetricKLT", {"bits": 2, "coding": "fixed", "joint": "head", "scaling": "channelwise"}),
    "MetricKLT entropy": ("MetricKLT", {"bits": 2, "block": 16, "jensen": True}),
    "MetricKLT few classes": ("MetricKLT", {"bits": 3, "classes": 1, "joint": "none", "window": 3}),
    "KVTC": ("KVTC", {"bits": 3, "window": 4}),
}  # fmt: skip


@functools.cache
def fitted(name):
    """A codec of the reference, fitted, and that of the GPU."""
    codec, options = OPTIONS[name]
    own = getattr(reference, codec).fit(text("A", 96), **options)
    return own, getattr(gpu, codec).of(own)


@functools.cache
def rope():
    return text("A", 1)[0].rope


@st.composite
def like_the_fit(draw, tokens=99):
    """Layers of the heads and dimensions that all were fitted to, with numbers of any kind, in any strides and element types."""
    count = draw(st.one_of(st.just(0), sizes(tokens)))
    out = []
    for index in INDICES:
        arrays = []
        for dim in (DIM, VALUE_DIM):
            kind, how, seed = (
                draw(st.sampled_from(KINDS)),
                draw(st.sampled_from(STRIDES)),
                draw(st.integers(0, 1 << 30)),
            )
            arrays.append(strided(numbers(kind, (HEADS, count, dim), draw(st.sampled_from(EVERY)), seed), how))
        start = draw(st.sampled_from((0, 0, 1000, 1 << 40)))
        positions = (
            start + np.cumsum(np.random.default_rng(count).integers(0 if start else 1, 3, count))
            if start
            else np.arange(count)
        )
        out.append(Layer(*arrays, rope=rope(), index=index, positions=positions))
    return out


def same(found, wanted):
    """Whether two decoded layers are the same to the last bit."""
    return all(
        getattr(found, name).dtype == getattr(wanted, name).dtype
        and getattr(found, name).tobytes() == getattr(wanted, name).tobytes()
        for name in ("keys", "values", "log_weights", "positions", "kept")
    )


def on_layers(backend):
    """For tests of what only layers have, which hold NumPy arrays: appenders, what other stages kept, ropes that are not the fitted one."""
    if backend.name == "gpu":
        pytest.skip("of layers, which are NumPy arrays")


def encode(backend, kernels, data, order):
    """The stream of a layer, or of a cache's, as layers or as arrays; call it where the backend is running."""
    if backend.with_layers(order):
        return kernels.encode(data)
    if isinstance(data, list):
        return kernels.encode_arrays([(backend.put(layer.keys), backend.put(layer.values)) for layer in data])
    return kernels.encode_arrays(backend.put(data.keys), backend.put(data.values), data.index, data.positions)


def every(decoded_):
    """Decoded layers, of one or of a cache."""
    return decoded_ if isinstance(decoded_, list) else [decoded_]


@kernel_settings
@given(st.sampled_from(sorted(OPTIONS)), like_the_fit(), orders())
def test_streams_are_the_references(backend, name, layers, order):
    own, kernels = fitted(name)
    assert kernels.state == own.state
    data = layers if own.scope == "cache" else layers[order // 2 % 2]
    if own.scope == "cache" and not backend.with_layers(order):
        data = [layer.replace(positions=None) for layer in layers]
    with sums_in_order():
        wanted = own.encode(data)
    with backend.running(order):
        assert encode(backend, kernels, data, order) == wanted
        assert decoded(backend, kernels, wanted, order) == of_decoded(own.decode(wanted))
        if backend.with_layers(order):
            pairs = zip(every(kernels.decode(wanted)), every(own.decode(wanted)), strict=True)
            assert all(same(*pair) for pair in pairs)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_as_the_reference_sums_next_to_no_code_is_another(backend, name):
    """60 tokens of text: rounding moves a coefficient across a threshold rarely, and then to the code next to it."""
    own, kernels = fitted(name)
    data = text("B", 60) if own.scope == "cache" else text("B", 60)[0]
    with backend.running(1):
        found = encode(backend, kernels, data, 1)
    wanted = own.encode(data)
    for one, other in zip(every(own.decode(found)), every(own.decode(wanted)), strict=True):
        for array, known in ((one.keys, other.keys), (one.values, other.values)):
            changed = (array != known).any(axis=(0, 2))  # tokens
            assert changed.mean() <= 0.05


@kernel_settings
@given(st.sampled_from(sorted(OPTIONS)), st.integers(1, 60), orders(), st.integers(0, 1 << 30))
def test_altered_streams(backend, name, tokens, order, seed):
    """Resealed behind a changed byte: the reference's numbers or its error, message and offset."""
    own, kernels = fitted(name)
    rng = np.random.default_rng(seed)
    body = bytearray(stream.unseal(_encoded(name, tokens)))
    for _ in range(int(rng.integers(1, 3))):
        body[rng.integers(len(body))] ^= 1 << rng.integers(8)
    data = stream.seal(bytes(body))
    check_same_outcome(backend, kernels, own, data, order)


@functools.cache
def _encoded(name, tokens):
    own = fitted(name)[0]
    layers = text("B", tokens, "float16")
    return own.encode(layers if own.scope == "cache" else layers[0])


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_arrays(backend, name, dtype):
    """Bare arrays, of any strides: the stream of the layer at these positions."""
    own, kernels = fitted(name)
    layers = text("B", 47, dtype)
    cache = own.scope == "cache"
    pairs = [
        tuple(strided(a, how) for a, how in zip((layer.keys, layer.values), ("transposed", "spaced")))
        for layer in layers
    ]
    pairs = [tuple(map(backend.put, pair)) for pair in pairs]
    with sums_in_order():
        wanted = own.encode(layers if cache else layers[1])
    with backend.running(2):
        found = kernels.encode_arrays(pairs) if cache else kernels.encode_arrays(*pairs[1], INDICES[1])
        assert decoded(backend, kernels, wanted, 1) == of_decoded(own.decode(wanted))
    assert found == wanted


def test_arrays_at_positions(backend):
    own, kernels = fitted("AATC tokenwise")
    layer = text("B", 20)[0]
    moved = layer.replace(positions=layer.positions * 3 + 7, queries=None, query_positions=None)
    with backend.running():
        found = kernels.encode_arrays(backend.put(layer.keys), backend.put(layer.values), 3, moved.positions)
        arrays = [backend.get(a) for a in kernels.decode_arrays(found, backend.xp)]
        assert [a.tobytes() for a in arrays] == [own.decode(found).keys.tobytes(), own.decode(found).values.tobytes()]
        with sums_in_order():
            assert found == own.encode(moved)
        with pytest.raises(ValueError, match=r"positions: expected shape \(tokens=20,\), got \(19,\)"):
            kernels.encode_arrays(backend.put(layer.keys), backend.put(layer.values), 3, moved.positions[1:])
        with pytest.raises(StateMismatch, match="index 3, 5, got one of index 4"):
            kernels.encode_arrays(backend.put(layer.keys), backend.put(layer.values), 4)
        with pytest.raises(StateMismatch, match="fitted to 2 heads of 16 and 12"):
            kernels.encode_arrays(backend.put(layer.values), backend.put(layer.keys), 3)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_errors_are_the_references(backend, name):
    on_layers(backend)
    own, kernels = fitted(name)
    cache, layers = own.scope == "cache", text("B", 9)

    def refusals(codecs, layer):
        data = [layer, layers[1]] if cache else layer
        return [outcome(functools.partial(codec.encode, data)) for codec in codecs]

    bare = [getattr(module, type(own).__name__)(own.bits) for module in (gpu, reference)]
    with backend.running():
        for layer in (layers[0].replace(index=4), layers[0].replace(rope=None), text("B", 9, dim=8)[0]):
            found, wanted = refusals((kernels, own), layer)
            assert isinstance(wanted, tuple) and found == wanted
        found, wanted = refusals(bare, layers[0])
        assert isinstance(wanted, tuple) and found == wanted
        if cache:
            one = [
                outcome(functools.partial(codec.encode, [layers[0]] * n)) for n in (1, 2) for codec in (kernels, own)
            ]
            assert isinstance(one[0], tuple) and one[0] == one[1] and isinstance(one[2], tuple) and one[2] == one[3]


@pytest.mark.parametrize("name", sorted(OPTIONS))
@pytest.mark.parametrize("side", ("keys", "values"))
def test_nan_and_inf_are_refused_with_their_places(backend, name, side):
    """In exact tokens too, which no coder reads."""
    own, kernels = fitted(name)
    pairs = [{"keys": layer.keys.copy(), "values": layer.values.copy()} for layer in text("B", 9)]
    pairs[0][side][1, 8, 2], pairs[0][side][1, 8, 5] = np.nan, np.inf
    given_pairs = [tuple(backend.put(array) for array in pair.values()) for pair in pairs]
    message = rf"{side}: expected finite numbers, got nan at \(head 1, token 8, channel 2\); 2 such in all"
    with backend.running(), pytest.raises(ValueError, match=message):
        kernels.encode_arrays(given_pairs) if own.scope == "cache" else kernels.encode_arrays(
            *given_pairs[0], INDICES[0]
        )


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_keys_of_which_rope_cannot_be_undone_are_refused(backend, name):
    """Turned they could overflow, and were then decoded as 0; at the limit they are coded, without a warning."""
    own, kernels = fitted(name)
    layers = [layer.replace(queries=None, query_positions=None, extras={}) for layer in text("B", 20, "float64")]
    keys = layers[0].keys.copy()
    keys[1, 4, 3] = 1.7e308
    cache = own.scope == "cache"
    message = r"keys: expected at most 2\^1010 in magnitude, .* got 1.7e\+308 at \(head 1, token 4, channel 3\)"
    for order in (0, 1):
        with backend.running(order), pytest.raises(ValueError, match=message):
            data = [layers[0].replace(keys=keys), layers[1]] if cache else layers[0].replace(keys=keys)
            encode(backend, kernels, data, order)
    with pytest.raises(ValueError, match=message):
        own.encode(data)
    with pytest.raises(ValueError, match=message):
        type(own).fit([layers[0].replace(keys=keys), layers[1]], 3)
    if not cache:
        growing = own.appender(layers[0])
        with pytest.raises(ValueError, match=message):
            growing.append(keys[:, :9], layers[0].values[:, :9])
        assert growing.stream() == own.encode(layers[0]), "nothing changed"
    keys[1, 4, 3], keys[0, 5] = 2.0**1010, -(2.0**1010)
    data = [layers[0].replace(keys=keys), layers[1]] if cache else layers[0].replace(keys=keys)
    with warnings.catch_warnings(), backend.running():
        warnings.simplefilter("error")
        assert all(np.isfinite(one.keys).all() for one in every(own.decode(own.encode(data))))
        assert decoded(backend, kernels, encode(backend, kernels, data, 1), 1)


@pytest.mark.parametrize("name", ["AATC tokenwise", "MetricKLT entropy"])
def test_appenders_and_kept_tokens(backend, name):
    """What grows token by token, and what other stages left of a head, goes through the kernels as well."""
    on_layers(backend)
    own, kernels = fitted(name)
    layer = text("B", 40)[0].replace(queries=None, query_positions=None, extras={})
    start = layer.replace(keys=layer.keys[:, :11], values=layer.values[:, :11], positions=layer.positions[:11])
    places = [
        np.sort(np.random.default_rng(h).choice(200, 40 - 3 * h, replace=False)).astype(np.int64) for h in range(HEADS)
    ]
    kept = Kept(tuple(places), None)
    with backend.running(5):
        growing = kernels.appender(start)
        for t in range(11, 40, 7):
            growing.append(layer.keys[:, t : t + 7], layer.values[:, t : t + 7])
        parts = kernels.encode_at(layer, kept)
        with sums_in_order():
            assert growing.stream() == own.encode(layer)
            assert parts == own.encode_at(layer, kept)
        found, wanted = (c.decode_at([stream.Reader(part) for part in parts], kept) for c in (kernels, own))
    assert found.keys.tobytes() == wanted.keys.tobytes() and found.values.tobytes() == wanted.values.tobytes()


@pytest.mark.parametrize("path", [p for p in sorted(VECTORS.glob("*.json")) if p.stem.split("-")[0] in ("aatc", "palu", "metric", "kvtc")], ids=lambda p: p.stem)  # fmt: skip
def test_golden_vectors(backend, path):
    case = json.loads(path.read_text())
    data, state = bytes.fromhex(case["stream"]), bytes.fromhex(case["state"])
    own = reference.load(state)
    kernels = getattr(gpu, type(own).__name__).of(own)
    wanted = own.decode(data)
    several = isinstance(wanted, list) and own.scope == "layer"
    if several:  # arrays come of streams of one layer
        on_layers(backend)
    with backend.running(build="fast"):
        for order in (0,) if several else (0, 1):
            assert decoded(backend, kernels, data, order) == of_decoded(wanted)


def test_codecs_are_listed_and_fit_themselves(backend):
    names = {"AATC", "KVTC", "MetricKLT", "PALU"}
    assert names <= set(gpu.codecs()) and all(gpu.codecs()[name].codec_id == name for name in names)
    layers = text("A", 40)
    for name in names:
        own, kernels = getattr(reference, name).fit(layers, 3), getattr(gpu, name).fit(layers, 3)
        assert isinstance(kernels, getattr(gpu, name)) and kernels == own and kernels.state == own.state
