"""Hostile bytes: only CorruptStream and StateMismatch come out of a decoder, quickly, and memory stays near the honest size.

Mutants are made three ways: bytes of the body, fields of one part with its length mended, and parts swapped between streams. Nine in
ten are sealed with a right checksum, so that they get behind it. KVTHEORY_FUZZ=100000 runs more; KVTHEORY_FUZZ_SEED another seed.
"""

import os
import time
import tracemalloc
import warnings

import numpy as np
import pytest

import reference
from reference import CorruptStream, StateMismatch, stream
from tests.reference.cases import FEW, OBLIVIOUS
from tests.reference.strategies import layer

TRIES = int(os.environ.get("KVTHEORY_FUZZ", "5000"))
SEED = int(os.environ.get("KVTHEORY_FUZZ_SEED", "0"))


def honest():
    """(stream, bytes that decoding it may take): small streams of all codecs, types and shapes."""
    shapes = [
        {"heads": 2, "tokens": 5, "dim": 16, "value_dim": 8},
        {"heads": 1, "tokens": 0, "dim": 4},
        {"heads": 3, "tokens": 4, "dim": 3, "value_dim": 1, "dtype": "float16"},
        {"heads": 1, "tokens": 3, "dim": 8, "value_dim": 24, "dtype": "bfloat16", "positions": np.array([1, 5, 700])},
        {"heads": 1, "tokens": 2, "dim": 8, "dtype": "float64", "index": 3},
    ]
    out = []
    for codec in OBLIVIOUS.values():
        out += [codec.encode(layer(i, **shape)) for i, shape in enumerate(shapes)]
        out.append(reference.encode_cache(codec, [layer(7, heads=1, tokens=2), layer(8, tokens=1, dim=4)]))
    return out


def altered(rng, data):
    """One to three local changes of a byte string."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not data:
            break
        at = int(rng.integers(len(data) if rng.random() < 0.3 else min(len(data), 64)))
        kind = int(rng.integers(6))
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at] = int(rng.integers(256))
        elif kind == 2:
            data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == 3:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 4:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        else:
            del data[at:]
    return bytes(data)


def mutant(rng, streams):
    data = streams[int(rng.integers(len(streams)))]
    kind = rng.random()
    if kind < 0.4:
        body = altered(rng, stream.unseal(data))
        return stream.seal(body) if rng.random() < 0.9 else stream.seal(body)[: int(rng.integers(8 + len(body)))]
    if kind < 0.5:
        return altered(rng, data)
    header, groups = stream.read(data)
    parts = [[bytes(part.rest()) for part in group] for group in groups]
    own = parts[int(rng.integers(len(parts)))]
    place = int(rng.integers(len(own)))
    if kind < 0.9:
        own[place] = altered(rng, own[place])
    else:
        others = stream.read(streams[int(rng.integers(len(streams)))])[1][0]
        own[place] = bytes(others[int(rng.integers(len(others)))].rest())
    return stream.write(header, parts)


def run(data):
    """Decode and inspect a mutant; whether it decoded. Anything but the two promised errors, a warning included, escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            reference.inspect(data)
        except CorruptStream as problem:
            assert 0 <= problem.offset <= len(data), problem
        try:
            reference.decode(data)
        except CorruptStream as problem:
            assert 0 <= problem.offset <= len(data), problem
        except StateMismatch:
            pass
        else:
            return True
    return False


def test_mutated_streams_raise_only_what_is_promised():
    rng = np.random.default_rng(SEED)
    streams = honest()
    # time of this process: other work on the machine is not counted
    start, slowest, decoded = time.process_time(), 0.0, 0
    for _ in range(TRIES):
        data = mutant(rng, streams)
        began = time.process_time()
        decoded += run(data)
        slowest = max(slowest, time.process_time() - began)
    assert decoded > TRIES // 100  # the fuzzer gets behind the checks
    assert slowest < 1.0
    assert time.process_time() - start < 15 * max(1, TRIES / 5000)


def test_mutated_streams_take_little_memory():
    rng = np.random.default_rng(SEED + 1)
    streams = honest()
    for data in streams:  # tables and rotations are made once
        reference.decode(data)
    tracemalloc.start()
    try:
        for _ in range(TRIES // 5):
            data = mutant(rng, streams)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            run(data)
            # honest streams of this size take up to 70 kB; the rest is for rotations of dimensions not seen before
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 19
    finally:
        tracemalloc.stop()


# two tokens of KIVI(2) are in its window, whatever its bits and groups
@pytest.mark.parametrize("name", [name for name in FEW if name != "KIVI 2"])
def test_every_byte_of_a_stream_matters(name):
    """Each single byte changed, resealed: another result or CorruptStream, never the same layer from other bytes of the payload."""
    codec = OBLIVIOUS[name]
    data = codec.encode(layer(1, heads=1, tokens=2, dim=8, value_dim=3))
    honest_ = reference.decode(data)
    body = stream.unseal(data)
    skipped = set()
    if isinstance(codec, (reference.TurboQuant, reference.PolarQuant)):  # 8 + 3 coordinates do not use all points
        points = stream.read(data)[1][0][1]
        skipped = set(range(points.offset - 4, points.offset - 4 + points.remaining))
    same = 0
    for at in set(range(len(body))) - skipped:
        changed = stream.seal(body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :])
        try:
            decoded = reference.decode(changed)
        except CorruptStream:
            continue
        same += all(
            np.array_equal(getattr(decoded, field), getattr(honest_, field))
            and getattr(decoded, field).dtype == getattr(honest_, field).dtype
            for field in ("keys", "values", "positions")
        )
    assert same <= 1  # the layer's index, which is not part of what is decoded


def test_huge_sizes_are_refused_before_allocation():
    """A header that promises 2^40 numbers over a few bytes costs no memory."""
    tracemalloc.start()
    try:
        for codec in (
            reference.Full(),
            reference.TurboQuant(1),
            reference.TurboQuant(1, kind="prod"),
            reference.TurboQuant(2, rotation="haar"),
            reference.QJL(8),
            reference.PolarQuant((8,) * 10),
            reference.KIVI(1, group=1, window=1),
            reference.KIVI(2),
        ):
            header, [parts] = stream.read(codec.encode(layer(1, heads=1, tokens=1, dim=4)))
            rest = [bytes(p.rest()) for p in parts[1:]]
            for sizes in (
                (1, 1 << 39, 4, 4), (1 << 16, 1 << 24, 4, 4), (1 << 16, 0, 1 << 20, 1 << 20), (1, 1, 1 << 20, 1), (1 << 16, 1, 1024, 1024),
                (1, 0, 1023, 1023), (1, 1, 1023, 1023),
            ):  # fmt: skip
                for positions in (b"\x00\x00", b"\x01\x00", b"\x08\x00"):
                    shape = b"".join(stream.varint(v) for v in (*sizes, 0)) + bytes([0x22]) + positions
                    before = tracemalloc.get_traced_memory()[0]
                    tracemalloc.reset_peak()
                    with pytest.raises(CorruptStream):
                        reference.decode(stream.write(header, [[shape, *rest]]))
                    assert tracemalloc.get_traced_memory()[1] - before < 1 << 18
    finally:
        tracemalloc.stop()


def test_norms_and_points_that_no_encoder_writes_are_refused():
    codec = reference.TurboQuant(2)
    header, [parts] = stream.read(codec.encode(layer(1, heads=1, tokens=1, dim=4)))
    raw = [bytes(p.rest()) for p in parts]

    def with_part(i, part):
        return stream.write(header, [[*raw[:i], part, *raw[i + 1 :]]])

    for norm in (1, 0x7F, 0xFFFF, (134 + 256) << 7):
        with pytest.raises(CorruptStream, match="is no norm of float32 numbers"):
            reference.decode(with_part(2, norm.to_bytes(2, "little")))
    reference.decode(with_part(2, ((133 + 256) << 7 | 0x7F).to_bytes(2, "little")))
    for table in ([5, 4, 1, 1], [0, 8 << 11, 1, 1], [1, 2, 1, 0]):
        with pytest.raises(CorruptStream, match="points: expected ascending"):
            reference.decode(with_part(1, np.array(table, "<u2").tobytes()))
    with pytest.raises(CorruptStream, match="points: 2 bytes too many"):
        reference.decode(with_part(1, raw[1] + b"\0\0"))
    with pytest.raises(CorruptStream, match="expected 1 bytes, got 2"):
        reference.decode(with_part(3, raw[3] + b"\0"))


def test_full_refuses_nan_and_inf():
    header, [parts] = stream.read(reference.Full().encode(layer(1, heads=1, tokens=2, dim=4)))
    raw = [bytes(p.rest()) for p in parts]
    offset = parts[2].offset - parts[2].remaining  # the reader has moved to its end
    for wrong in (np.nan, np.inf):
        numbers = np.frombuffer(raw[2], "<f4").copy()
        numbers[3] = wrong
        with pytest.raises(CorruptStream, match=f"values: expected finite numbers, got {wrong}") as raised:
            reference.decode(stream.write(header, [[raw[0], raw[1], numbers.tobytes()]]))
        assert raised.value.offset == offset - len(raw[2]) + 12


def test_positions_out_of_order_or_range_are_refused():
    header, [parts] = stream.read(reference.Full().encode(layer(1, heads=1, tokens=3, dim=2)))
    raw = [bytes(p.rest()) for p in parts]
    sizes = b"".join(stream.varint(v) for v in (1, 3, 2, 2, 0)) + bytes([0x22])
    for positions, problem in (
        (b"\x00\x01", "expected 0 to"),  # zigzag of -1
        (b"\x00" + stream.zigzag((1 << 62) - 2), "expected 0 to"),
        (b"\x03\x00", "width of the positions"),
        (b"\x08\x00" + b"\xff" * 16, "less than 2"),
        (b"\x08" + stream.zigzag((1 << 62) - 4) + b"\x04" + bytes(15), "less than 2"),
        (b"\x01\x00\x01", "expected 2 bytes"),
        (b"\x01\x00\x01\x01\x01", "1 bytes too many"),
    ):
        with pytest.raises(CorruptStream, match=problem):
            reference.decode(stream.write(header, [[sizes + positions, *raw[1:]]]))
    decoded = reference.decode(stream.write(header, [[sizes + b"\x02\x04\x00\x01\x00\x00", *raw[1:]]]))
    assert decoded.positions[0].tolist() == [2, 258, 258]
