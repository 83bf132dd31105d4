"""What every codec must do, on layers that break codecs. One matrix: tests/reference/cases.py names the codecs."""

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from tests.reference.cases import EXACT, FEW, LOSSLESS, OBLIVIOUS, RECENT, TOGETHER
from tests.reference.strategies import DIMS, DTYPES, TOKENS, layer, layers

every = pytest.mark.parametrize("name", OBLIVIOUS)
few = pytest.mark.parametrize("name", FEW)


def same(a: kvtheory.Decoded, b: kvtheory.Decoded) -> bool:
    return all(
        getattr(a, field).dtype == getattr(b, field).dtype
        and getattr(a, field).tobytes() == getattr(b, field).tobytes()
        for field in ("keys", "values", "log_weights", "positions", "kept")
    )


@every
@settings(max_examples=10)
@given(layers())
def test_streams_come_back_whole(name, drawn):
    codec = OBLIVIOUS[name]
    data = codec.encode(drawn)
    decoded = reference.decode(data)
    assert same(decoded, codec.decode(data))
    for array, given_ in ((decoded.keys, drawn.keys), (decoded.values, drawn.values)):
        assert array.shape == given_.shape and array.dtype == given_.dtype
        by_channel = name in TOGETHER and given_ is drawn.keys
        zero = np.broadcast_to((given_ == 0).all(axis=1 if by_channel else -1, keepdims=True), array.shape)
        assert not array[zero].any()  # zero vectors (channels) exactly
        assert not np.signbit(array[zero].astype(np.float32)).any() or name in LOSSLESS + RECENT
    assert np.array_equal(decoded.positions, np.tile(drawn.positions, (drawn.kv_heads, 1)))
    assert (decoded.kept == drawn.tokens).all() and not decoded.log_weights.any()
    assert reference.inspect(data).shapes[0].index == drawn.index
    if name in LOSSLESS:
        assert decoded.keys.tobytes() == np.ascontiguousarray(drawn.keys).tobytes()
        assert decoded.values.tobytes() == np.ascontiguousarray(drawn.values).tobytes()


@few
@settings(max_examples=10)
@given(layers(), st.data())
def test_growing_token_by_token_is_encoding_at_once(name, drawn, data):
    codec = OBLIVIOUS[name]
    assert codec.streaming
    cut = data.draw(st.integers(0, drawn.tokens))

    def part(a, b):
        return drawn.replace(keys=drawn.keys[:, a:b], values=drawn.values[:, a:b], positions=drawn.positions[a:b])

    appender = codec.appender(part(0, cut))
    while appender.tokens < drawn.tokens:
        at = appender.tokens
        step = data.draw(st.integers(1, 3))
        chunk = part(at, at + step)
        appender.append(chunk.keys, chunk.values, chunk.positions)
        assert appender.stream() == codec.encode(part(0, at + step))
    assert appender.stream() == codec.encode(drawn)


def test_appended_tokens_follow_the_last_one():
    codec = reference.TurboQuant(2)
    whole = layer(1, tokens=9, positions=np.arange(100, 109))
    appender = codec.appender(
        whole.replace(keys=whole.keys[:, :4], values=whole.values[:, :4], positions=whole.positions[:4])
    )
    appender.append(whole.keys[:, 4:5], whole.values[:, 4:5])
    appender.append(whole.keys[:, 5:], whole.values[:, 5:])
    assert appender.stream() == codec.encode(whole)


@few
def test_appender_refuses_and_stays_as_it_was(name):
    base = layer(2, tokens=3, dim=5)
    appender = OBLIVIOUS[name].appender(base)
    before = appender.stream()
    keys, values = base.keys[:, :1], base.values[:, :1]
    for wrong, problem in (
        ((keys[:1], values[:1]), ValueError),
        ((keys, values[:, :, :2]), ValueError),
        ((keys.astype(np.float64), values), TypeError),
        ((keys, values * np.float32(np.nan)), ValueError),
        ((keys * np.float32(np.inf), values), ValueError),
        ((keys, values, [0]), ValueError),  # before the last one
        ((keys, values, [7, 8]), ValueError),
    ):
        with pytest.raises(problem), np.errstate(invalid="ignore"):
            appender.append(*wrong)
        assert appender.stream() == before and appender.tokens == 3


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_inf_are_refused_by_name_and_place(name, dtype):
    for wrong in (np.nan, np.inf, -np.inf):
        for side in ("keys", "values"):
            own = layer(3, heads=2, tokens=5, dim=8, dtype=dtype)
            getattr(own, side)[1, 3, 6] = wrong  # after the Layer was made
            with pytest.raises(ValueError, match=rf"{side}: .*head 1, token 3, channel 6") as raised:
                OBLIVIOUS[name].encode(own)
            assert str(wrong) in str(raised.value)


@few
@pytest.mark.parametrize("dim", DIMS)
def test_every_head_dimension_and_token_count(name, dim):
    codec = OBLIVIOUS[name]
    for tokens in TOKENS:
        own = layer(dim + tokens, heads=1, tokens=tokens, dim=dim, value_dim=max(1, dim // 2))
        data = codec.encode(own)
        decoded = reference.decode(data)
        assert decoded.keys.shape == own.keys.shape and decoded.values.shape == own.values.shape
        if tokens:
            assert reference.held_bits(data, own) == 8 * len(data) / (own.keys.size + own.values.size)


@every
def test_strided_and_foreign_arrays_are_the_same_data(name):
    codec = OBLIVIOUS[name]
    own = layer(4, heads=2, tokens=6, dim=16)
    expected = codec.encode(own)
    wide = np.zeros((4, 12, 48), np.float32)
    wide[::2, ::2, ::3] = own.keys
    turned = np.ascontiguousarray(own.values.transpose(2, 0, 1)).transpose(1, 2, 0)
    assert codec.encode(own.replace(keys=wide[::2, ::2, ::3], values=turned)) == expected
    assert codec.encode(own.replace(keys=own.keys.astype(">f4"), values=own.values.astype(">f4"))) == expected
    backwards = own.replace(keys=own.keys[:, :, ::-1], values=own.values[:, :, ::-1])
    assert codec.encode(backwards) == codec.encode(
        backwards.replace(keys=backwards.keys.copy(), values=backwards.values.copy())
    )


@every
def test_heads_are_coded_apart(name):
    """Permuting heads permutes what is decoded, and a head alone decodes as it does among others."""
    codec = OBLIVIOUS[name]
    own = layer(5, heads=3, tokens=5, dim=12)
    decoded = reference.decode(codec.encode(own))
    order = [2, 0, 1]
    permuted = reference.decode(codec.encode(own.replace(keys=own.keys[order], values=own.values[order])))
    assert np.array_equal(permuted.keys, decoded.keys[order]) and np.array_equal(permuted.values, decoded.values[order])
    alone = reference.decode(codec.encode(own.replace(keys=own.keys[1:2], values=own.values[1:2])))
    assert np.array_equal(alone.keys[0], decoded.keys[1])


@every
def test_precision_of_the_container_does_not_matter(name):
    """The same numbers in float16, float32 and float64 decode to the same numbers, up to the last rounding to the element type."""
    codec = OBLIVIOUS[name]
    half = layer(6, heads=1, tokens=4, dim=24, dtype="float16")
    decoded = {}
    for dtype in (np.float16, np.float32, np.float64):
        own = half.replace(keys=half.keys.astype(dtype), values=half.values.astype(dtype))
        decoded[dtype] = reference.decode(codec.encode(own)).keys
        assert decoded[dtype].dtype == dtype
    assert np.array_equal(decoded[np.float32].astype(np.float16), decoded[np.float16])
    if name in EXACT:
        assert np.array_equal(decoded[np.float64].astype(np.float32), decoded[np.float32])


@every
@pytest.mark.parametrize("power", [-100, -60, -10, 1, 60, 99])
def test_powers_of_two_pass_through(name, power):
    """2^p x decodes to 2^p times what x decodes to, from 1e-30 to 1e30."""
    codec = OBLIVIOUS[name]
    own = layer(7, heads=1, tokens=5, dim=24)
    factor = np.float32(2.0) ** np.float32(power)
    scaled = own.replace(keys=own.keys * factor, values=own.values * factor)
    plain, large = reference.decode(codec.encode(own)), reference.decode(codec.encode(scaled))
    assert np.array_equal(large.keys, plain.keys * factor) and np.array_equal(large.values, plain.values * factor)


@every
def test_extreme_numbers_stay_finite(name):
    codec = OBLIVIOUS[name]
    for dtype in DTYPES:
        import ml_dtypes

        most = float(ml_dtypes.finfo(DTYPES[dtype]).max if dtype == "bfloat16" else np.finfo(DTYPES[dtype]).max)
        most = min(most, float(np.finfo(np.float32).max))
        own = layer(8, heads=1, tokens=3, dim=16, dtype=dtype)
        keys = np.sign(own.keys.astype(np.float64)) * most
        decoded = reference.decode(codec.encode(own.replace(keys=keys.astype(DTYPES[dtype]))))
        assert np.isfinite(decoded.keys.astype(np.float64)).all()
    outlier = own.keys.copy()
    outlier[0, 1, 5] = -70000
    decoded = reference.decode(codec.encode(own.replace(keys=outlier)))
    norm = np.linalg.norm(outlier[0, 1].astype(np.float64))
    assert np.linalg.norm((decoded.keys[0, 1] - outlier[0, 1]).astype(np.float64)) <= 1.5 * norm
    # its neighbours are coded as they were without it
    others = np.delete(np.arange(16), 5) if name in TOGETHER else np.arange(16)
    without = reference.decode(codec.encode(own)).keys
    assert np.array_equal(decoded.keys[0, [0, 2]][:, others], without[0, [0, 2]][:, others])


def digests():
    """name -> SHA-256 of what each exact codec writes of one layer."""
    own = layer(9, heads=2, tokens=5, dim=80)
    return {name: hashlib.sha256(OBLIVIOUS[name].encode(own)).hexdigest() for name in EXACT}


def test_same_arguments_same_bytes_on_one_thread_and_on_four():
    expected = digests()
    assert digests() == expected
    script = "import json; from tests.reference.test_codec import digests; print(json.dumps(digests()))"
    for threads in ("1", "4"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": "."}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
        )
        assert json.loads(done.stdout) == expected


def test_codecs_are_listed_by_scope():
    assert list(reference.codecs())[:2] == ["Full", "TurboQuant"]
    assert reference.codecs()["TurboQuant"] is reference.TurboQuant
    assert set(reference.codecs("layer")) >= {"Full", "TurboQuant"}
    with pytest.raises(ValueError, match="scope"):
        reference.codecs("tensor")
    for codec in reference.codecs().values():
        assert codec.scope in ("layer", "cache", "sessions") and codec.codec_id == codec.__name__


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match=r"layer: expected a kvtheory.Layer, got ndarray"):
        reference.Full().encode(np.zeros((1, 2, 3)))
    with pytest.raises(ValueError, match="positions: expected time order"):
        reference.Full().encode(layer(0, tokens=2, positions=np.array([5, 3])))
    with pytest.raises(ValueError, match="positions: expected numbers >= 0"):
        reference.Full().encode(layer(0, tokens=2, positions=np.array([-1, 3])))
    with pytest.raises(reference.CorruptStream, match="expected a stream of Full, got one of TurboQuant"):
        reference.Full().decode(reference.TurboQuant().encode(layer(0)))
    with pytest.raises(TypeError, match="expected bytes"):
        reference.decode(np.zeros(3))  # type: ignore[arg-type]


def test_caches_are_streams_of_layers():
    own = [layer(i, heads=1 + i, tokens=3 + i, dim=8, index=i) for i in range(3)]
    for codec in (reference.Full(), reference.TurboQuant(4)):
        for cache in (own, kvtheory.Cache(own), kvtheory.Cache([lambda one=one: one for one in own])):
            data = reference.encode_cache(codec, cache)
            decoded = reference.decode_cache(codec, data)
            assert all(same(a, codec.decode(codec.encode(b))) for a, b in zip(decoded, own, strict=True))
            assert all(same(a, b) for a, b in zip(reference.decode(data), decoded, strict=True))
            assert reference.inspect(data).layers == 3
            assert reference.held_bits(data, cache) == 8 * len(data) / sum(x.keys.size + x.values.size for x in own)
            # what the layers share is written once
            assert len(data) < sum(len(codec.encode(one)) for one in own)
    with pytest.raises(reference.CorruptStream, match="expected the stream of a cache"):
        reference.decode_cache(codec, codec.encode(own[0]))
    with pytest.raises(TypeError, match="cache: expected"):
        reference.encode_cache(codec, own[0])


def test_import_is_light():
    code = "import sys, reference; print(sorted(m for m in ('scipy', 'torch', 'constriction', 'numpy.random') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout and "constriction" not in done.stdout and "scipy" not in done.stdout


def test_every_public_name_is_reachable():
    for name in (*reference.__all__, *reference._MODULES):
        assert getattr(reference, name) is not None
    assert set(reference.__all__) <= set(dir(reference))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        reference.nothing  # noqa: B018
