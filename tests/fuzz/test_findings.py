"""What fuzzing found, one test each: all of these were accepted, took memory without bound, warned, or raised something else."""

import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest

import kvtheory
import reference
from kvtheory.layer.store import CorruptCache
from reference import CorruptStream, packing, stream
from reference.kept import Kept
from reference.shape import Shape
from reference.stream import Reader, varint
from tests.fuzz import seeds as seeds_
from tests.fuzz.messages import parse
from tests.vectors import make


def golden(name):
    case = json.loads((make.HERE / "valid" / f"{name}.json").read_text())
    return bytes.fromhex(case["stream"]), bytes.fromhex(case.get("state", ""))


def peak(call):
    call()  # tables made
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.filterwarnings("error")
def test_infinite_log_weights_of_a_table_are_refused_without_a_warning():
    two = np.array([np.inf, np.inf], "<f4").tobytes()
    part = bytes([1 | 1 << 1]) + varint(2) + two + packing.pack(np.zeros(3, np.uint8), 1)
    with pytest.raises(CorruptStream, match="table of log-weights: expected finite numbers"):
        Kept.read(Reader(part), 1, 3)


@pytest.mark.parametrize("name", ["aatc-2-layers", "metric-klt-2", "palu-4-max"])
def test_a_state_of_wide_layers_takes_no_memory(name):
    """2^20 channels a head, for a head or two: the width was allocated before any of its entries was seen."""
    message = parse(golden(name)[1])
    leaf = message.groups[0].children[0]
    # layers, index, kv_heads, head_dim, value_dim: all one byte here
    leaf.data = leaf.data[:3] + varint(1 << 20) + varint(1 << 20) + leaf.data[5:]
    state = message.join()

    def load():
        with pytest.raises(CorruptStream, match="in one unit"):
            reference.load(state)

    assert peak(load) < 1 << 18


def quiet(bare=False, block=1 << 16):
    codec = reference.load(golden("metric-klt-5-escapes")[1])
    return seeds_.silent(codec, bare, block)


def certain(tokens, last=1 << 16, block=1 << 16):
    """A stream of `quiet` of so many tokens, in blocks as long as can be of 40 bytes each; the first leads nowhere if last is not 2^16."""
    codec = quiet(block=block)
    header, [parts] = stream.read(codec.encode(make.layer(302, 2, 1, 4, 3)))
    raw = [bytes(part.rest()) for part in parts]
    coefficients = 14
    block = min(block, (1 << 16) // coefficients) * coefficients
    blocks = -(-tokens * coefficients // block)
    states = [1 << 16] * (8 * blocks)
    states[0] = last
    payload = (
        bytes([8])
        + varint(tokens * coefficients)
        + varint(block)
        + bytes(4 * blocks)
        + np.array(states, "<u4").tobytes()
    )
    shape = Shape(2, tokens, 4, 3, 2, 2, None, range(tokens)).write()
    return codec, stream.write(header, [[shape, *raw[1:4], payload, bytes(4 * blocks), b""]])


def test_certain_symbols_take_memory_near_what_they_decode_to():
    """Nine times as much it was, as all codes of a layer were made into numbers at once."""
    codec, data = certain(1 << 14, block=1 << 10)
    decoded = codec.decode(data)
    assert decoded.keys.shape == (2, 1 << 14, 4)
    size = sum(getattr(decoded, name).nbytes for name in ("keys", "values", "log_weights", "positions", "kept"))
    assert peak(lambda: codec.decode(data)) < 6 * size


def test_a_wrong_block_is_found_before_those_behind_it_are_decoded():
    """2^17 tokens in 5.2 kB, the first block wrong: 60 MB it was."""
    codec, data = certain(1 << 17, last=1 << 17, block=1 << 10)

    def decode():
        with pytest.raises(CorruptStream, match="rANS block 0"):
            codec.decode(data)

    assert len(data) < 5400 and peak(decode) < 2 << 20


def test_runs_of_blocks_grow_no_faster_than_what_is_decoded():
    tables = reference.rans.Tables(np.stack([reference.rans.frequencies(f) for f in ([1, 1], [1, 0])]))
    symbols = (np.arange(64 * 1792) % 4 == 0).astype(np.int64)
    for table, expected in ((0, [(0, 64)]), (1, [(0, 1), (1, 8), (8, 64)])):
        own = symbols * (1 - table)
        payload = reference.rans.encode(own, tables, [table], block=1792, lanes=8)
        coded = reference.rans.parse(payload, own.size)
        runs = list(coded.growing())
        # one bit a symbol, or none
        assert runs == expected
        assert np.array_equal(reference.rans.decode(payload, own.size, tables, [table]), own)
        wrong = bytearray(payload)
        wrong[-1 if not table else 1 + 3 + 2 + 4 * 64] ^= 1
        with pytest.raises(CorruptStream):
            reference.rans.decode(bytes(wrong), own.size, tables, [table])


def test_a_state_without_coefficients_is_refused():
    """Its streams would say 2^16 tokens in 4 bytes; no encoder writes one."""
    with pytest.raises(CorruptStream, match="state: expected a coefficient"):
        reference.load(quiet(bare=True).state)


# -- cache files -------------------------------------------------------------------------------------------------------


def cache_file(tmp_path, change):
    """A cache file whose kvtheory header is changed."""
    path = tmp_path / "cache"
    kvtheory.Cache([make.layer(310, 1, 2, 2, 2, "bfloat16")]).save(path)
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    about = json.loads(header["__metadata__"]["kvtheory"])
    changed = change(header, about, body)
    header["__metadata__"]["kvtheory"] = json.dumps(about) if changed is None else changed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path


@pytest.mark.parametrize("wrong", [[], None, 1, 1.5, "x", True])
def test_checksums_of_a_cache_file_are_an_object(tmp_path, wrong):
    """AttributeError when a layer was read."""
    path = cache_file(tmp_path, lambda header, about, body: about.update(crc32=wrong))
    with pytest.raises(CorruptCache, match="crc32: expected an object"):
        kvtheory.Cache.load(path)


def test_deeply_nested_headers_of_a_cache_file_are_refused(tmp_path):
    """RecursionError."""
    path = cache_file(tmp_path, lambda header, about, body: "[" * 100000)
    with pytest.raises(CorruptCache):
        kvtheory.Cache.load(path)


@pytest.mark.filterwarnings("error")
def test_a_signalling_nan_of_a_cache_file_is_refused_without_a_warning(tmp_path):
    def change(header, about, body):
        start, end = header["0.keys"]["data_offsets"]
        body[start : start + 2] = b"\x81\x7f"
        about["crc32"]["0.keys"] = zlib.crc32(body[start:end])

    with pytest.raises(CorruptCache, match="keys: expected finite numbers"):
        kvtheory.Cache.load(cache_file(tmp_path, change))[0]


@pytest.mark.filterwarnings("error")
def test_extreme_gains_do_not_overflow():
    """Exponents of a basis at their limit under a scale at its own: 2^1023 and more, then RoPE of inf."""
    from reference.transform_coding.basis import MOST, Basis

    basis = Basis(np.arange(2), np.eye(2, dtype=np.int16), np.full(2, 1000), np.zeros(2, np.float32))
    out = basis.synthesise(np.full((1, 2), 1 << 20), np.array([2.0**300]))
    assert out.tolist() == [[MOST, MOST]]


def test_a_stream_without_parts_is_corrupt():
    from reference.stream import Header, Kind

    for name in reference._CODECS:  # not what other tests have registered
        data = stream.write(Header(Kind.LAYER, name), [[]])
        with pytest.raises((CorruptStream, reference.StateMismatch)):
            reference.inspect(data)
            reference.decode(data)
