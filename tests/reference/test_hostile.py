"""Hostile bytes, made by hand: each byte matters, huge claims cost nothing, and what no encoder writes is refused.

Random ones are in tests/fuzz: one engine, of which 20,000 mutants are checked with the tests and millions by `python -m tests.fuzz.run`.
"""

import tracemalloc

import numpy as np
import pytest

import reference
from reference import CorruptStream, stream
from tests.reference.cases import FEW, OBLIVIOUS
from tests.reference.strategies import layer


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
