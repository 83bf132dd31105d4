"""Golden vectors of codecs with a state, of pipelines, and of what the files beside it add; `tests.vectors.make` writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

import kvtheory
import reference
from kvtheory.layer import Decoded
from reference import stream
from tests.vectors import reducers, transform
from tests.vectors.make import layer


def ropes() -> dict[str, Any]:
    return {
        "half": kvtheory.Rope(0.5 ** np.arange(4)),
        "scaled": kvtheory.Rope(np.array([1.0, 0.125, 0.001]), "interleaved", 1.25),
    }


def valid() -> dict[str, tuple[Any, ...]]:
    """name -> (codec, layer or list of layers), and where there is a third item, a stream that is only decoded."""
    kvquant, pipeline, rope = reference.KVQuant, reference.Pipeline, ropes()
    half = kvquant.fit([layer(120 + 2 * i, 2, 24, 8, 6, index=i, rope=rope["half"]) for i in (2, 5)], 2, 0.1)
    scaled = kvquant.fit([layer(130, 1, 24, 8, 64, index=0, rope=rope["scaled"])], 4, sinks=0)
    plain = kvquant.fit([layer(132, 2, 24, 5, 3)], 3, 0.2, 2)
    own = layer(136, 2, 9, 8, 6, "float16", index=5, rope=rope["half"])
    reduced = kept(own.keys, own.values, [[0, 2, 3, 70000], [1, 8]], [[0, 0.5, 0.5, 2.5], [2.5, 0]])
    alike = kept(own.keys, own.values, [[0, 4, 5], [0, 4, 5]], [[1.5, 1.5, 1.5]] * 2)
    full, coded = pipeline([reference.Full(), reference.Full()]), pipeline([reference.Full(), half])
    out: dict[str, tuple[Any, ...]] = {
        "kvquant-2-rope-float16": (half, own),
        "kvquant-2-bfloat16": (
            half,
            layer(138, 2, 7, 8, 6, "bfloat16", index=2, rope=rope["half"], positions=np.arange(7) * 1000),
        ),
        "kvquant-4-rope-scaled": (scaled, layer(140, 1, 6, 8, 64, index=0, rope=rope["scaled"])),
        "kvquant-3-no-rope-float64": (plain, layer(142, 2, 9, 5, 3, "float64")),
        "kvquant-3-no-tokens": (plain, layer(144, 2, 0, 5, 3)),
        "kvquant-3-sinks-only": (plain, layer(144, 2, 2, 5, 3)),
        "kvquant-1-dense-uniform": (
            kvquant.fit([layer(146, 1, 9, 4, 4)], 1, 0.0, levels="uniform", q_norm=False, pre_rope=False),
            layer(148, 1, 6, 4, 4),
        ),
        "kvquant-2-layers": (half, [layer(150, 2, 3, 8, 6, index=i, rope=rope["half"]) for i in (2, 5)]),
        "pipeline-turboquant": (pipeline([reference.TurboQuant(2)]), layer(152, 2, 3, 8, 4)),
        "pipeline-kvquant": (coded, own),
    }
    for name, codec, left in (
        ("pipeline-kept-by-head", full, reduced),
        ("pipeline-kept-alike", full, alike),
        ("pipeline-kvquant-kept-by-head", coded, reduced),
    ):
        out[name] = (codec, own, stream.write(codec._header(stream.Kind.LAYER), [codec._parts([own], [left])]))
    return {**out, **transform.valid(), **reducers.valid()}


def kept(keys: Any, values: Any, positions: list[list[int]], log_weights: list[list[float]]) -> Decoded:
    """The first tokens of each head, said to be at these positions with these log-weights."""
    heads, tokens = len(keys), max(map(len, positions))
    counts = np.array([len(own) for own in positions])
    padding = np.arange(tokens) >= counts[:, None]
    places, weights = np.full((heads, tokens), -1), np.full((heads, tokens), -np.inf)
    places[~padding], weights[~padding] = np.concatenate(positions), np.concatenate(log_weights)
    own_keys, own_values = keys[:, :tokens].copy(), values[:, :tokens].copy()
    own_keys[padding] = own_values[padding] = 0
    return Decoded(own_keys, own_values, weights, places, counts)


def invalid() -> dict[str, tuple[bytes, str, bytes]]:
    """name -> (stream, why it must be refused, state)."""
    codec = reference.KVQuant.fit([layer(160, 1, 20, 4, 4, index=1)], 2, 0.2)
    good = codec.encode(layer(162, 1, 6, 4, 4, index=1))
    header, [parts] = stream.read(good)
    raw = [bytes(part.rest()) for part in parts]
    state_header, [[state_part]] = stream.read(codec.state)
    state = bytes(state_part.rest())
    piped = reference.Pipeline([reference.Full(), reference.Full()])
    own = layer(164, 2, 4, 2, 2)
    left = kept(own.keys, own.values, [[0, 2, 3], [1, 2]], [[0, 0.5, 0.5], [2.5, 0]])
    pipe_header = piped._header(stream.Kind.LAYER)
    pipe = [bytes(part) for part in piped._parts([own], [left])]

    def with_part(i: int, part: bytes) -> bytes:
        return stream.write(header, [[*raw[:i], part, *raw[i + 1 :]]])

    def with_state(changed: bytes) -> tuple[bytes, bytes]:
        """A state, and a stream that claims to be written with it."""
        wrong = stream.write(state_header, [[changed]])
        return stream.write(
            stream.Header(header.kind, header.codec, header.parameters, stream.digest(wrong)), [raw]
        ), wrong

    assert raw[4] and raw[9] and state[:8] == b"\x01\x02\x01\x04\x04\x00\x00" + state[7:8]
    first = sum(gap + (gap < 255) for gap in raw[4][: 1 + next(i for i, gap in enumerate(raw[4]) if gap < 255)]) - 1
    at, bit = first * 2 // 8, first * 2 % 8
    low, high = state[7:23], state[23:39]
    out = {
        "kvquant-no-state": (good, "the state is not given", b""),
        "kvquant-other-state": (
            good,
            "another state",
            reference.KVQuant.fit([layer(166, 1, 20, 4, 4, index=1)], 2, 0.2).state,
        ),
        "kvquant-index": (
            with_part(0, raw[0].replace(b"\x04\x04\x02", b"\x04\x04\x03")),
            "a layer that was not fitted",
            codec.state,
        ),
        "kvquant-places-end": (with_part(4, raw[4] + b"\xff"), "the last byte of the places names none", codec.state),
        "kvquant-places-beyond": (with_part(9, raw[9] + b"\xfe"), "a place behind the last number", codec.state),
        "kvquant-outliers": (with_part(5, raw[5] + b"\0\0\0\0"), "more outliers than places", codec.state),
        "kvquant-outlier-nan": (with_part(5, b"\x00\x00\xc0\x7f" + raw[5][4:]), "an outlier that is NaN", codec.state),
        "kvquant-outlier-code": (
            with_part(3, raw[3][:at] + bytes([raw[3][at] | 1 << bit]) + raw[3][at + 1 :]),
            "a code at an outlier",
            codec.state,
        ),
        "kvquant-sinks": (with_part(1, raw[1][:-4]), "too few numbers of the sink", codec.state),
        "kvquant-codes": (with_part(8, raw[8][:-1]), "too few codes", codec.state),
        **{
            name: (*with_state(changed)[:1], why, with_state(changed)[1])
            for name, changed, why in (
                (
                    "kvquant-state-thresholds",
                    state[:7] + high + low + state[39:],
                    "thresholds of key channels that fall",
                ),
                (
                    "kvquant-state-levels",
                    state[:39] + state[43:47] + state[39:43] + state[47:],
                    "thresholds of levels that fall",
                ),
                ("kvquant-state-twice", b"\x02" + state[1:] + state[1:], "a layer twice"),
                ("kvquant-state-cut", state[:-1], "a state cut short"),
                ("kvquant-state-rope", state[:6] + b"\x02" + state[7:], "the rope of the layer before the first"),
            )
        },
    }
    for name, part, why in (
        ("pipeline-kept-fewer", b"\x07\x00" + b"\x02\x00\x00" * 2, "fewer tokens in the fullest head than follow"),
        ("pipeline-kept-more", b"\x07\x00\x04\x00\x00\x02\x00\x02", "more tokens in a head than follow"),
        (
            "pipeline-weights-form",
            bytes([len(pipe[1]) - 1]) + bytes([pipe[1][1] | 6]) + pipe[1][2:],
            "an unknown form of log-weights",
        ),
        ("pipeline-weights-nan", pipe[1][:-4] + b"\x00\x00\xc0\x7f", "a log-weight that is NaN"),
    ):
        out[name] = (stream.write(pipe_header, [[pipe[0], part, pipe[2]]]), why, b"")
    out["pipeline-no-stages"] = (
        stream.write(stream.Header(pipe_header.kind, "Pipeline", b"\x00"), [pipe]),
        "no stages",
        b"",
    )
    out["pipeline-layers"] = (
        stream.write(pipe_header, [[pipe[0] * 2, *pipe[1:]]]),
        "two layers, where one follows",
        b"",
    )
    return {**out, **transform.invalid(), **reducers.invalid()}
