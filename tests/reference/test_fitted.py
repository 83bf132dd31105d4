"""What every codec with a state must do. One matrix: tests/reference/cases.py names the codecs, a line each."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import time
import tracemalloc
import warnings

import numpy as np
import pytest

import kvtheory
import reference
from reference import CorruptStream, StateMismatch, stream
from tests.reference.alterations import altered, mutant
from tests.reference.cases import FITTED
from tests.reference.strategies import DTYPES, TOKENS
from tests.reference.test_codec import same

TRIES = int(os.environ.get("KVTHEORY_FUZZ", "5000")) // 25
SEED = int(os.environ.get("KVTHEORY_FUZZ_SEED", "0"))

every = pytest.mark.parametrize("name", FITTED)


def encode(codec, layers):
    """Streams of layers: of each one, or of scope "cache" of all together."""
    return [codec.encode(layers)] if codec.scope == "cache" else [codec.encode(layer) for layer in layers]


def decode(streams, state):
    decoded = [reference.decode(data, state) for data in streams]
    return [one for each in decoded for one in (each if isinstance(each, list) else [each])]


@every
def test_streams_come_back_whole_and_the_state_loads(name):
    case = FITTED[name]
    codec, layers = case.codec, case.layers()
    streams = encode(codec, layers)
    decoded = decode(streams, codec.state)
    assert len(decoded) == len(layers)
    for one, layer in zip(decoded, layers):
        assert one.keys.shape == layer.keys.shape and one.values.shape == layer.values.shape
        assert one.keys.dtype == layer.keys.dtype and one.values.dtype == layer.values.dtype
        assert np.array_equal(one.positions, np.tile(layer.positions, (layer.kv_heads, 1)))
        error = np.linalg.norm(one.values - layer.values) / np.linalg.norm(layer.values)
        assert error < 0.8  # of another text, at 1 bit
    loaded = reference.load(codec.state)
    assert type(loaded) is type(codec) and loaded.parameters == codec.parameters and loaded == codec
    assert loaded.state == codec.state and codec.state_bytes == len(codec.state) > 0
    assert encode(loaded, layers) == streams
    for data, again in zip(streams, (loaded.decode(data) for data in streams)):
        assert all(map(same, [*_list(again)], [*_list(codec.decode(data))]))
    found = reference.inspect(streams[0])
    assert found.digest == stream.digest(codec.state).hex()
    assert repr(found.parameters) == repr(codec.parameters)  # a stage in a stream has no state
    assert found.held_bits == reference.held_bits(streams[0], layers if codec.scope == "cache" else layers[0])
    assert reference.inspect(codec.state).kind == "state"
    cached = reference.encode_cache(codec, kvtheory.Cache(layers))
    assert all(map(same, reference.decode_cache(loaded, cached), decoded))


def _list(decoded):
    return decoded if isinstance(decoded, list) else [decoded]


@every
def test_a_fit_depends_on_its_calibration_and_on_nothing_else(name):
    case = FITTED[name]
    layers = case.layers("A")
    assert case.fit(layers).state == case.codec.state
    assert case.fit(kvtheory.Cache(layers)).state == case.codec.state
    assert case.fit(layers[::-1]).state == case.codec.state
    other = case.other
    assert stream.digest(other.state) != stream.digest(case.codec.state)


@every
def test_another_state_or_none_is_refused(name):
    case = FITTED[name]
    layers = case.layers()
    data = encode(case.codec, layers)[0]
    other = case.other
    with pytest.raises(StateMismatch, match="no state"):
        reference.decode(data)
    with pytest.raises(StateMismatch, match="was written with the state"):
        reference.decode(data, other.state)
    with pytest.raises(StateMismatch):
        other.decode(data)
    with pytest.raises(StateMismatch):
        reference.decode(reference.Full().encode(layers[0]), case.codec.state)
    with pytest.raises(CorruptStream):
        reference.load(data)


@every
def test_a_layer_that_was_not_fitted_is_refused(name):
    case = FITTED[name]
    layers = case.layers()
    for index in (4, 6, None):
        foreign = [layers[0], layers[1].replace(index=index)]
        with pytest.raises(StateMismatch, match=f"index {index}"):
            encode(case.codec, foreign)
    with pytest.raises(StateMismatch, match="fitted"):
        encode(case.codec, case.layers(heads=2 * layers[0].kv_heads))


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_element_types_and_refusal_of_nan_and_inf(name, dtype):
    case = FITTED[name]
    layers = case.layers(dtype=dtype)
    for one, layer in zip(decode(encode(case.codec, layers), case.codec.state), layers):
        assert one.keys.dtype == one.values.dtype == layer.keys.dtype
    for wrong in (np.nan, -np.inf):
        for side in ("keys", "values"):
            own = case.layers(dtype=dtype, tokens=7)
            getattr(own[1], side)[1, 3, 6] = wrong  # after the Layer was made
            with pytest.raises(ValueError, match=rf"{side}: .*head 1, token 3, channel 6") as raised:
                encode(case.codec, own)
            assert str(wrong) in str(raised.value)


@every
def test_every_number_of_tokens(name):
    case = FITTED[name]
    for tokens in TOKENS:
        layers = case.layers(tokens=tokens)
        for one, layer in zip(decode(encode(case.codec, layers), case.codec.state), layers):
            assert one.keys.shape == layer.keys.shape and one.values.shape == layer.values.shape


@every
def test_strided_and_foreign_arrays_are_the_same_data(name):
    case = FITTED[name]
    layers = case.layers()
    expected = encode(case.codec, layers)
    strided = []
    for layer in layers:
        wide = np.zeros((2 * layer.kv_heads, 3 * layer.tokens, 2 * layer.head_dim), np.float32)
        wide[::2, ::3, 1::2] = layer.keys
        turned = np.ascontiguousarray(layer.values.transpose(2, 0, 1)).transpose(1, 2, 0)
        strided.append(layer.replace(keys=wide[::2, ::3, 1::2], values=turned))
    assert encode(case.codec, strided) == expected
    foreign = [one.replace(keys=one.keys.astype(">f4"), values=one.values.astype(">f4")) for one in layers]
    assert encode(case.codec, foreign) == expected


@every
def test_growing_token_by_token_is_encoding_at_once(name):
    case = FITTED[name]
    if not case.codec.streaming:
        pytest.skip("appends nothing, or not the same bytes")
    layer = case.layers(tokens=40)[0].replace(
        positions=np.cumsum(np.arange(40) % 3), queries=None, query_positions=None
    )

    def part(a, b):
        return layer.replace(
            keys=layer.keys[:, a:b], values=layer.values[:, a:b], positions=layer.positions[a:b], extras={}
        )

    appender = case.codec.appender(part(0, 2))
    for a, b in ((2, 3), (3, 4), (4, 21), (21, 22), (22, 40)):
        chunk = part(a, b)
        appender.append(chunk.keys, chunk.values, chunk.positions)
        assert appender.stream() == case.codec.encode(part(0, b))
    before = appender.stream()
    with pytest.raises(ValueError, match="channel"), np.errstate(invalid="ignore"):
        appender.append(layer.keys[:, :1], layer.values[:, :1] * np.float32(np.nan))
    assert appender.stream() == before and appender.tokens == 40


def digests(states):
    """name -> SHA-256 of what a loaded codec writes."""
    out = {}
    for name, state in states.items():
        codec = reference.load(bytes.fromhex(state))
        out[name] = hashlib.sha256(b"".join(encode(codec, FITTED[name].layers()))).hexdigest()
    return out


def test_same_state_same_bytes_on_one_thread_and_on_four():
    states = {name: case.codec.state.hex() for name, case in FITTED.items()}
    expected = digests(states)
    script = "import json, sys; from tests.reference.test_fitted import digests; print(json.dumps(digests(json.load(sys.stdin))))"
    for threads in ("1", "4"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads, "PYTHONPATH": "."}
        done = subprocess.run(
            [sys.executable, "-c", script],
            input=json.dumps(states), capture_output=True, text=True, check=True, env=environment,
        )  # fmt: skip
        assert json.loads(done.stdout) == expected


# -- hostile bytes -----------------------------------------------------------------------------------------------------


def attempt(action, data):
    """What `action` gives, or None for one of the two promised errors; anything else, a warning included, escapes. Within a second."""
    began = time.process_time()
    result = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            result = action()
        except CorruptStream as problem:
            assert 0 <= problem.offset <= len(data), problem
        except StateMismatch:
            pass
    assert time.process_time() - began < 1.0
    return result


@every
def test_mutated_streams_raise_only_what_is_promised(name):
    case = FITTED[name]
    rng = np.random.default_rng(SEED)
    streams = []
    for tokens, dtype in ((0, "float32"), (1, "float16"), (5, "float32"), (6, "bfloat16"), (3, "float64")):
        layers = case.layers(tokens=tokens, dtype=dtype)
        streams += [*encode(case.codec, layers), reference.encode_cache(case.codec, layers)]
    decoded = 0
    for _ in range(TRIES):
        data = mutant(rng, streams)
        attempt(lambda data=data: reference.inspect(data), data)
        decoded += attempt(lambda data=data: case.codec.decode(data), data) is not None
    assert decoded > TRIES // 100


def _exchanged(part, written, claimed):
    """`part` with one shape in place of another, as the part itself or behind its length."""
    return claimed if part == written else part.replace(
        stream.varint(len(written)) + written, stream.varint(len(claimed)) + claimed
    )  # fmt: skip


@every
def test_promised_sizes_are_refused_before_allocation(name):
    """A shape that promises 2^40 tokens costs no memory beside what the state takes, nor does anything else that was altered."""
    case = FITTED[name]
    data = encode(case.codec, case.layers(tokens=3))[0]
    header, groups = stream.read(data)
    parts = [bytes(part.rest()) for part in groups[0]]
    shape = reference.inspect(data).shapes[0]
    written = shape.write()
    tracemalloc.start()
    try:
        case.codec.decode(data)  # tables are made once
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        case.codec.decode(data)
        honest = tracemalloc.get_traced_memory()[1] - before
        for tokens in (2, 4, 1 << 20, (1 << 40) - 1):
            claimed = dataclasses.replace(shape, tokens=tokens, positions=range(tokens)).write()
            # wherever the shape stands, and whatever says how long it is
            claim = stream.write(header, [[_exchanged(part, written, claimed) for part in parts]])
            assert claim != data
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            found = attempt(lambda claim=claim: case.codec.decode(claim), claim)
            # a pipeline's shape is of the layer before it was reduced: what is kept of it is said elsewhere
            assert found is None or _list(found)[0].keys.shape[1] == 3
            assert tracemalloc.get_traced_memory()[1] - before < honest + (1 << 18)
        rng = np.random.default_rng(SEED + 2)
        for _ in range(TRIES):
            claim = mutant(rng, [data])
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            attempt(lambda claim=claim: case.codec.decode(claim), claim)
            assert tracemalloc.get_traced_memory()[1] - before < honest + (1 << 19)
    finally:
        tracemalloc.stop()


@every
def test_mutated_states_raise_only_what_is_promised(name):
    """A state that loads is given a stream that claims to be written with it."""
    case = FITTED[name]
    rng = np.random.default_rng(SEED + 1)
    honest = case.codec.state
    layers = case.layers(tokens=5)
    streams = [stream.read(data) for data in encode(case.codec, layers)]
    bodies = [(header, [[bytes(part.rest()) for part in group] for group in groups]) for header, groups in streams]
    loaded = 0
    for _ in range(TRIES):
        header, (parts,) = stream.read(honest)
        raw = [bytes(part.rest()) for part in parts]
        if rng.random() < 0.7:
            place = int(rng.integers(len(raw)))
            raw[place] = nested(rng, raw[place])
            state = stream.write(header, [raw])
        else:
            state = stream.seal(altered(rng, stream.unseal(honest)))
        codec = attempt(lambda state=state: reference.load(state), state)
        if codec is None:
            continue
        loaded += 1
        for own, groups in bodies:
            claimed = stream.Header(own.kind, own.codec, own.parameters, stream.digest(state))
            data = stream.write(claimed, groups)
            attempt(lambda data=data, state=state: reference.decode(data, state), data)
    assert loaded > TRIES // 100


def nested(rng, part):
    """A part changed in place, anywhere; a state within a state behind its checksum."""
    if part[:4] == stream.MAGIC and rng.random() < 0.9:
        header, (parts,) = stream.read(part)
        raw = [bytes(one.rest()) for one in parts]
        place = int(rng.integers(len(raw)))
        raw[place] = nested(rng, raw[place])
        return stream.write(header, [raw])
    if rng.random() < 0.5 or not part:
        return altered(rng, part)
    data = bytearray(part)
    for at in rng.integers(len(data), size=int(rng.integers(1, 4))):
        data[at] = int(rng.integers(256))
    return bytes(data)


@every
def test_every_bit_of_a_state_is_guarded(name):
    state = bytearray(FITTED[name].codec.state)
    for at in np.random.default_rng(2).integers(len(state), size=60):
        state[at] ^= 1
        with pytest.raises(CorruptStream):
            reference.load(bytes(state))
        state[at] ^= 1
