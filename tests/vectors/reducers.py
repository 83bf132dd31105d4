"""Golden vectors of codecs that leave fewer tokens; `tests.vectors.fitted` has them among its own."""

from __future__ import annotations

from typing import Any

import numpy as np

import reference
from reference import stream
from reference.reducer import chosen, parts_of
from reference.shape import Shape
from tests.vectors.make import layer
from tests.vectors.transform import HALF, TURNED, seen


def valid() -> dict[str, tuple[Any, ...]]:
    """name -> (codec, layer or list of layers), and where there is a third item, a stream that is only decoded."""
    streaming, snapkv, scissorhands, pipeline = (
        reference.StreamingLLM, reference.SnapKV, reference.ScissorHands, reference.Pipeline,
    )  # fmt: skip
    gaps = np.cumsum(np.arange(12) % 4) * 90
    three = layer(310, 3, 9, 2, 3, "float16", index=2)
    uneven = chosen(
        three, [np.array([0, 4, 8]), np.arange(0), np.array([7])], [np.array([0.5, 0.5, 2]), np.zeros(0), np.zeros(1)]
    )
    weighed = chosen(three, [np.array([1, 2])] * 3, [np.arange(2) + h / 4 for h in range(3)])
    alike = chosen(three, [np.array([1, 2, 8])] * 3, [np.full(3, 1.5)] * 3)
    header = snapkv()._header(stream.Kind.LAYER)
    merged = reference.MergeReduce(6, "spectral", 1, 1, 2, 4, 64, 7)
    given = {
        name: stream.write(header, [parts_of(Shape.of(three), left)])
        for name, left in (("uneven", uneven), ("weighed", weighed), ("alike", alike))
    }
    # which tokens a walk keeps is floating point: decoded only
    summary = stream.write(merged._header(stream.Kind.LAYER), [parts_of(Shape.of(three), weighed)])
    whole = reference.Full().encode(layer(306, 1, 4, 2, 2))
    own, [[shape, *rest]] = stream.read(whole)
    wide = bytes(shape.rest())[:-2] + b"\x04\x00" + 3 * b"\x01\x00\x00\x00"
    return {
        "streaming-llm-6-rope-float16": (streaming(6, 2), layer(300, 2, 12, 8, 6, "float16", index=5, rope=HALF)),
        "streaming-llm-6-rope-scaled": (streaming(6, 3), layer(302, 1, 12, 7, 5, rope=TURNED, positions=gaps)),
        "streaming-llm-6-original-bfloat16": (
            streaming(6, 2, 3, "original"), layer(304, 2, 12, 8, 6, "bfloat16", rope=HALF),
        ),
        "streaming-llm-all": (streaming(), layer(306, 2, 3, 8, 2, rope=HALF)),
        "streaming-llm-none": (streaming(0), layer(306, 2, 3, 4, 2)),
        "streaming-llm-no-tokens": (streaming(0.5), layer(306, 2, 0, 4, 2)),
        "snapkv-6": (snapkv(6, 1, 2), seen(320, 2, 20, 8, 6)),
        "snapkv-share-max-gaps-float64": (
            snapkv(0.5, 0, 2, 3, "max"), seen(324, 2, 12, 4, 3, dtype="float64", positions=gaps).replace(query_positions=gaps),
        ),
        "snapkv-layers": (snapkv(4, 0, 1, 1), [seen(328 + i, 1 + i, 9, 4, 2, index=i) for i in range(2)]),
        "scissorhands-8": (scissorhands(8, 1, 2, 5), seen(332, 3, 24, 8, 6, dtype="float16", index=1)),
        "scissorhands-at-once": (scissorhands(8, 0, 0), seen(336, 2, 24, 8, 6).replace(query_positions=None)),
        "reduced-uneven-weighed": (snapkv(), three.replace(queries=np.zeros((3, 1, 2))), given["uneven"]),
        "reduced-weights-each": (snapkv(), three.replace(queries=np.zeros((3, 1, 2))), given["weighed"]),
        "reduced-weights-alike": (snapkv(), three.replace(queries=np.zeros((3, 1, 2))), given["alike"]),
        "merge-reduce-6": (merged, three.replace(queries=np.zeros((3, 1, 2))), summary),
        "merge-reduce-all": (reference.MergeReduce(20, "random"), layer(306, 2, 3, 8, 2)),
        "pipeline-streaming-llm-kivi": (
            pipeline([streaming(8, 2), reference.KIVI(2, 2, 4)]), layer(340, 2, 20, 8, 6, "float16", rope=HALF),
        ),
        "pipeline-snapkv-turboquant": (
            pipeline([snapkv(6, 1, 2), reference.TurboQuant(3)]), seen(344, 2, 20, 8, 6, index=3),
        ),
        "full-wide-positions": (reference.Full(), layer(306, 1, 4, 2, 2), stream.write(own, [[wide, *(bytes(r.rest()) for r in rest)]])),
    }  # fmt: skip


def parameters_with(codec: reference.Codec, at: int, byte: bytes) -> bytes:
    """A codec's parameters with one byte replaced."""
    own = codec._header(stream.Kind.LAYER).parameters
    return own[:at] + byte + own[at + 1 :]


def invalid() -> dict[str, tuple[bytes, str, bytes]]:
    """name -> (stream, why it must be refused, state)."""
    snapkv = reference.SnapKV(4, 0, 1, 1)
    header, [parts] = stream.read(snapkv.encode(seen(350, 2, 9, 2, 2)))
    apart = [bytes(part.rest()) for part in parts]
    common, [parts] = stream.read(reference.StreamingLLM(4, 1).encode(layer(354, 2, 9, 2, 2)))
    alike = [bytes(part.rest()) for part in parts]
    assert apart[1] == b"" and apart[2][:2] == b"\x00\x04" and alike[1][:1] == b"\x04" and alike[2] == b"\x01"

    def with_part(i: int, part: bytes, of: list[bytes] = apart) -> bytes:
        return stream.write(header if of is apart else common, [[*of[:i], part, *of[i + 1 :]]])

    heads = 130
    shape = b"".join(stream.varint(v) for v in (heads, 9, 1, 1, 0)) + b"\x00\x00\x00"
    uneven = b"\x00\x01\x00\x00" + (heads - 1) * b"\x00\x00\x00"
    merge = reference.MergeReduce(4, "random", sinks=0, window=0)
    # a place that no list of words will grow to
    wrong = parameters_with(merge, 2, b"\xff")
    zero = common.parameters.replace(b"\x00\x08", b"\x00\x07", 1)
    cases = {
        "reducer-shape-positions": (with_part(0, apart[0][:-1] + b"\x02"), "a shape with positions that do not start at 0"),
        "reducer-positions-twice": (with_part(1, alike[1]), "positions for all heads, and for each"),
        "reducer-positions-nowhere": (with_part(1, b"", alike), "no positions"),
        "reducer-kept-more": (with_part(1, b"\x0a\x00\x00", alike), "more tokens kept than the layer had"),
        "reducer-head-more": (with_part(2, b"\x00\x0a\x00\x00" + b"\x00\x00\x00"), "more tokens kept in a head than the layer had"),
        "reducer-positions-fall": (with_part(1, b"\x02\x00\x01", alike), "a first position below 0"),
        "reducer-kept-cut": (with_part(2, apart[2][:-1]), "positions of the last head cut short"),
        "reducer-kept-form": (with_part(2, bytes([6]) + apart[2][1:]), "an unknown form of log-weights"),
        "reducer-weight-nan": (with_part(2, b"\x03\x01\x00\x00\xc0\x7f", alike), "a log-weight that is NaN"),
        "reducer-keys": (with_part(3, apart[3][:-4]), "too few keys"),
        "reducer-values": (with_part(4, apart[4] + bytes(4)), "too many values"),
        "reducer-nan": (with_part(3, b"\x00\x00\xc0\x7f" + apart[3][4:]), "a key that is NaN"),
        "reducer-uneven": (
            stream.write(header, [[shape, b"", uneven, bytes(2), bytes(2)]]),
            "one of 130 heads keeps more than 64 times their mean",
        ),
        "reducer-parts": (stream.write(header, [apart[:-1]]), "a part is missing"),
        "merge-reduce-reducer": (
            stream.write(stream.Header(common.kind, merge.codec_id, wrong), [alike]), "an unknown reducer",
        ),
        "streaming-llm-keep": (stream.write(stream.Header(common.kind, common.codec, zero), [alike]), "a negative budget"),
    }  # fmt: skip
    assert zero != common.parameters
    return {name: (data, why, b"") for name, (data, why) in cases.items()}
