"""Golden vectors of the transform coders; `tests.vectors.fitted` has them among its own."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np

import kvtheory
import reference
from reference import stream
from tests.vectors.make import layer, numbers

HALF = kvtheory.Rope(0.5 ** np.arange(4))
TURNED = kvtheory.Rope(np.array([1.0, 0.125, 0.001]), "interleaved", 1.25)


def seen(seed: int, heads: int, tokens: int, dim: int, value_dim: int, **fields: Any) -> Any:
    """A layer with queries of two heads each."""
    queries = numbers(seed + 3, 2 * heads, tokens, dim)
    return layer(
        seed, heads, tokens, dim, value_dim, queries=queries, query_positions=np.arange(tokens), **fields
    )  # fmt: skip


def valid() -> dict[str, tuple[Any, ...]]:
    """name -> (codec, layer or list of layers), and where there is a third item, a stream that is only decoded."""
    aatc, palu, klt = reference.AATC, reference.PALU, reference.MetricKLT
    two = [seen(200 + 10 * i, 3, 40, 8, 6, index=i, rope=HALF) for i in (2, 5)]
    one = [seen(230, 1, 40, 7, 5, index=0, rope=TURNED)]
    plain = [seen(240, 2, 40, 4, 3)]
    half = aatc.fit(two, 2, head_group=2, sinks=1, window=2)
    low = palu.fit(two, 3)
    entropy = klt.fit(plain, 2, sinks=1, block=3, classes=2, jensen=True)
    own = layer(250, 3, 9, 8, 6, "float16", index=5, rope=HALF)
    kvtc = reference.KVTC.fit(two, 3, sinks=1, window=2)
    together = [layer(260 + i, 3, 9, 8, 6, dtype, index=i, rope=HALF) for i, dtype in ((5, "bfloat16"), (2, "float32"))]
    flat = reference.KVTC.fit(plain, 6, window=0)
    return {
        "aatc-2-rope-float16": (half, own),
        "aatc-2-layers": (half, [layer(252 + i, 3, 5, 8, 6, index=i, rope=HALF) for i in (2, 5)]),
        "aatc-2-exact-only": (half, layer(254, 3, 3, 8, 6, index=2, rope=HALF)),
        "aatc-1.5-factored-rope-scaled": (
            aatc.fit(one, 1.5, value_bits=3, scaling="factored", split="uneven", window=0, sinks=0),
            layer(256, 1, 6, 7, 5, index=0, rope=TURNED, positions=np.arange(6) * 1000),
        ),
        "aatc-16-channelwise-float64": (
            aatc.fit(plain, 16, scaling="channelwise", weights="variance", window=0),
            layer(258, 2, 9, 4, 3, "float64"),
        ),
        "aatc-no-bits": (
            aatc.fit(plain, 0.01, scaling="channelwise", quantiser="midtread", window=0, sinks=0),
            layer(262, 2, 11, 4, 3),
        ),
        "palu-3-rope-bfloat16": (low, layer(264, 3, 7, 8, 6, "bfloat16", index=2, rope=HALF)),
        "palu-3-no-tokens": (low, layer(264, 3, 0, 8, 6, index=2, rope=HALF)),
        "palu-4-max": (palu.fit(plain, 4, 1.0, scale="max", sinks=2, window=1), layer(266, 2, 7, 4, 3)),
        "metric-klt-2": (entropy, layer(268, 2, 9, 4, 3)),
        "metric-klt-5-escapes": (klt.fit(plain, 5, sinks=0, classes=1), layer(270, 2, 5, 4, 3).replace(keys=40 * numbers(1, 2, 5, 4))),
        "metric-klt-9-low-bits": (klt.fit(plain, 9, sinks=0, classes=1), layer(271, 2, 5, 4, 3)),
        "metric-klt-fixed-float64": (klt.fit(plain, 2.5, coding="fixed"), layer(272, 2, 9, 4, 3, "float64")),
        "metric-klt-fixed-channelwise": (
            klt.fit(one, 3, coding="fixed", joint="none", scaling="channelwise", tables="model", window=2),
            layer(274, 1, 8, 7, 5, index=0, rope=TURNED),
        ),
        # what DEFLATE makes of the same codes depends on the build of zlib
        "kvtc-3-layers": (kvtc, together, kvtc.encode(together)),
        "kvtc-6": (flat, [layer(276, 2, 6, 4, 3)], flat.encode([layer(276, 2, 6, 4, 3)])),
    }  # fmt: skip


def invalid() -> dict[str, tuple[bytes, str, bytes]]:
    """name -> (stream, why it must be refused, state)."""
    plain = [seen(240, 2, 40, 4, 3, index=1)]
    data = layer(280, 2, 5, 4, 3, index=1)
    aatc = reference.AATC.fit(plain, 2, sinks=1, window=1)
    palu = reference.PALU.fit(plain, 3)
    klt = reference.MetricKLT.fit(plain, 2, sinks=1, block=3, classes=2)
    nine, given_nine = reference.MetricKLT.fit(plain, 9, sinks=0, classes=1), layer(281, 2, 5, 4, 3, index=1)
    fixed = reference.MetricKLT.fit(plain, 2, sinks=1, coding="fixed")
    kvtc = reference.KVTC.fit(plain, 6, sinks=1, window=1)

    def parts_of(codec: Any, given: Any) -> tuple[stream.Header, list[bytes]]:
        header, [parts] = stream.read(codec.encode(given))
        return header, [bytes(part.rest()) for part in parts]

    def with_part(codec: Any, given: Any, i: int, change: Any) -> bytes:
        header, raw = parts_of(codec, given)
        return stream.write(header, [[*raw[:i], change(raw[i]), *raw[i + 1 :]]])

    def with_state(codec: Any, given: Any, change: Any) -> tuple[bytes, bytes]:
        """A stream that claims to be written with a changed state, and that state."""
        header, raw = parts_of(codec, given)
        state_header, [[part]] = stream.read(codec.state)
        wrong = stream.write(state_header, [[change(bytes(part.rest()))]])
        return stream.write(
            stream.Header(header.kind, header.codec, header.parameters, stream.digest(wrong)), [raw]
        ), wrong

    def put(at: int, new: bytes) -> Any:
        return lambda old: old[:at] + new + old[at + len(new) :]

    # one layer of index 1: count, index, three sizes, no rope, two log-weights, then the coder
    coder = 6 + 8
    basis = coder + 2  # kinds and number of units
    spare = 5 - 2
    assert aatc.layers[0].coder.token_bits * spare % 8
    out: dict[str, tuple[bytes, str, bytes]] = {
        "aatc-no-state": (aatc.encode(data), "the state is not given", b""),
        "aatc-index": (with_part(aatc, data, 0, put(4, b"\x03")), "a layer that was not fitted", aatc.state),
        "aatc-heads": (with_part(aatc, data, 0, put(0, b"\x03")), "more heads than were fitted", aatc.state),
        "aatc-tokens": (with_part(aatc, data, 0, put(1, b"\x06")), "more tokens than codes", aatc.state),
        "aatc-exact": (with_part(aatc, data, 1, lambda b: b[:-4]), "too few numbers of the exact tokens", aatc.state),
        "aatc-scale": (with_part(aatc, data, 3, put(0, b"\xff\xff")), "a scale that no norm is", aatc.state),
        "aatc-scales": (with_part(aatc, data, 3, lambda b: b + b"\0\0"), "too many scales", aatc.state),
        "aatc-codes": (with_part(aatc, data, 4, lambda b: b[:-1]), "too few codes", aatc.state),
        "aatc-spare-bits": (with_part(aatc, data, 4, lambda b: b[:-1] + bytes([b[-1] | 128])), "a spare bit that is set", aatc.state),
        "palu-offset": (with_part(palu, data, 3, lambda b: b[:-1] + b"\x08"), "an offset of 2^b", palu.state),
        "metric-klt-classes": (with_part(klt, data, 3, lambda b: b[:-1]), "a payload of classes cut short", klt.state),
        "metric-klt-codes": (with_part(klt, data, 4, lambda b: b + b"\0"), "a payload of symbols with a byte too many", klt.state),
        "metric-klt-escapes": (with_part(klt, data, 5, put(0, b"\x01")), "more escapes than follow", klt.state),
        "metric-klt-escapes-none": (
            with_part(klt, data, 5, lambda b: b"\x01" + b[1:] + b"\0\0\0\0"), "an escape that no symbol is", klt.state
        ),
        "metric-klt-low-bits": (with_part(klt, data, 6, lambda b: b + b"\0"), "too many low bits", klt.state),
        "metric-klt-low-bits-spare": (
            with_part(nine, given_nine, 6, lambda b: b[:-1] + bytes([b[-1] | 128])), "a spare low bit that is set", nine.state
        ),
        "metric-klt-fixed-parts": (with_part(fixed, data, 5, lambda b: b"\0"), "escapes of a fixed rate", fixed.state),
    }  # fmt: skip
    for name, codec, change, why in (
        ("aatc-state-cut", aatc, lambda b: b[:-1], "a state cut short"),
        ("aatc-state-twice", aatc, lambda b: b"\x02" + b[1:] + b[1:], "a layer twice"),
        ("aatc-state-weight", aatc, put(6, struct.pack("<f", np.nan)), "a log-weight that is NaN"),
        ("aatc-state-kinds", aatc, put(coder, b"\x32"), "offsets without ranges"),
        ("aatc-state-places", aatc, put(basis + 3, b"\x00"), "places that do not ascend"),
        ("aatc-state-mean", aatc, put(basis + 2 + 8, struct.pack("<f", np.inf)), "a mean that is infinite"),
        ("aatc-state-exponent", aatc, put(basis + 2 + 8 + 32, struct.pack("<h", 1001)), "an exponent of 1001"),
        ("aatc-state-entry", aatc, put(basis + 2 + 8 + 32 + 16, struct.pack("<h", -32768)), "an entry of -32768"),
        ("aatc-state-bits", aatc, put(basis + 2 + 8 + 32 + 16 + 128, b"\x11"), "a coefficient of 17 bits"),
        ("palu-state-bits", palu, lambda b: b[:-1] + b"\x04", "different bits under one range"),
    ):
        changed, state = with_state(codec, data, change)
        out[name] = (changed, why, state)
    one, raw = [data], parts_of(kvtc, [data])[1]
    scales, codes = zlib.decompress(raw[3]), zlib.decompress(raw[4])
    for name, i, part, why in (
        ("kvtc-twice", 0, raw[0] * 2, "a layer twice"),
        ("kvtc-none", 0, b"", "no layer"),
        ("kvtc-exact", 2, raw[2] + b"\0", "a byte too many among the exact values"),
        ("kvtc-zlib", 3, raw[3][:-1], "zlib data cut short"),
        ("kvtc-scales", 3, zlib.compress(scales + b"\0\0"), "a scale too many"),
        ("kvtc-scale", 3, zlib.compress(b"\xff\xff" + scales[2:]), "a scale that no norm is"),
        ("kvtc-codes", 4, zlib.compress(codes[:-1]), "too few codes"),
        ("kvtc-spare-bits", 4, zlib.compress(codes[:-1] + bytes([codes[-1] | 128])), "a spare bit that is set"),
    ):
        out[name] = (with_part(kvtc, one, i, lambda _, part=part: part), why, kvtc.state)
    for name, change, why in (
        ("kvtc-state-groups", lambda b: b[:-2] + b"\x07" + b[-1:], "groups of more components than there are"),
        ("kvtc-state-bits", lambda b: b[:-1] + b"\x09", "a group of 9 bits"),
        ("kvtc-state-none", lambda b: b"\x00" + b[6:], "a state of no layer"),
    ):
        changed, state = with_state(kvtc, one, change)
        out[name] = (changed, why, state)
    return out
