"""From the parts of a stream to segments, codec by codec."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from gpu.device_cache.exact import Exact
from gpu.device_cache.segment import Segment
from gpu.device_cache.where import Where
from reference import stream
from reference.codec import Codec
from reference.errors import CorruptStream
from reference.full import Full, flat_numbers
from reference.kept import Kept
from reference.pipeline import Pipeline, _sizes, _split_lengths
from reference.reducer import Reducer
from reference.shape import Shape, in_order
from reference.stream import Reader

__all__ = ["opened", "refused"]

#: codec -> module with `segments(codec, parts, kept, xp)`
_CODED = {
    "AATC": "gpu.device_cache.transform",
    "KIVI": "gpu.device_cache.kivi",
    "KVQuant": "gpu.device_cache.kvquant",
    "MetricKLT": "gpu.device_cache.transform",
    "PALU": "gpu.device_cache.transform",
    "TurboQuant": "gpu.device_cache.turboquant",
}
_REASONS = {
    "KVTC": "its codes are DEFLATEd, and of several layers",
    "PolarQuant": "a number is a product of cosines of coded angles",
    "PrefixStore": "it holds many sessions",
    "PredictiveDelta": "each token is decoded from those before it",
    "TokenReplay": "the model makes its cache again",
}


def refused(name: str) -> NotImplementedError:
    why = _REASONS.get(name, "no kernel reads them")
    return NotImplementedError(
        f"stream: attention cannot read the codes of {name} ({why}); give what it decodes to, coded by Full, say"
    )


def opened(codec: Codec, parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, list[Segment]]:
    """The shape of the layer that was coded, and its segments. kept: what was left of each head, ahead of this codec.

    CorruptStream as for `decode`; NotImplementedError for a codec whose codes no kernel reads.
    """
    if isinstance(codec, Pipeline):
        return _pipeline(codec, parts, xp)
    if isinstance(codec, Full):
        return _full(parts, kept, xp)
    if isinstance(codec, Reducer):
        return _reduced(codec, parts, kept, xp)
    if codec.codec_id not in _CODED:
        raise refused(codec.codec_id)
    found: tuple[Shape, list[Segment]] = importlib.import_module(_CODED[codec.codec_id]).segments(
        codec, parts, kept, xp
    )
    return found


def _full(parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, list[Segment]]:
    shape = Shape.read(parts[0])
    sides = (("keys", shape.head_dim, shape.key_dtype), ("values", shape.value_dim, shape.value_dtype))
    arrays = [
        flat_numbers(part, name, shape.rows * dim, dtype).reshape(shape.tokens, shape.kv_heads, dim)
        for part, (name, dim, dtype) in zip(parts[1:], sides)
    ]
    where = Where.of(shape, kept)
    return shape, [Exact.token_major(xp, *arrays, **where.at(slice(0, shape.tokens)))] if shape.tokens else []


def _reduced(codec: Reducer, parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, list[Segment]]:
    if kept is not None and (kept.places is not None or kept.weights is not None):
        parts[0].fail(
            f"kept: {codec.codec_id} cannot follow a stage that keeps other tokens in each head, or weighs them"
        )
    start, body = parts[0].offset, parts[0].rest()
    shape = Shape.read(Reader(body, start))
    decoded = codec.decode_parts([Reader(body, start), *parts[1:]])
    if not int(decoded.kept.sum()):
        return shape, []
    keys, values = (
        [own[:n] for own, n in zip(array, decoded.kept.tolist())] for array in (decoded.keys, decoded.values)
    )
    width = int(decoded.kept.max())
    positions = decoded.positions[:, :width]
    same = decoded.kept.min() == width and (positions == positions[0]).all()
    weights = decoded.log_weights[:, :width]
    own = np.where(np.isneginf(weights), 0.0, weights)
    return shape, [
        Exact.ragged(
            xp, keys, values, in_order(positions[0]) if same else positions,
            log_weights=own.astype(np.float32) if own.any() else None,
        )
    ]  # fmt: skip


def _pipeline(codec: Pipeline, parts: list[Reader], xp: Any) -> tuple[Shape, list[Segment]]:
    """As `Pipeline.decode_parts`, whose checks these are."""
    if codec.scope != "layer":
        raise refused(codec.last.codec_id)
    start = parts[0].offset
    shapes = codec.shapes_in([Reader(parts[0].rest(), start)])
    base = parts[1].offset
    own = _split_lengths(parts[1], len(shapes), "kept")
    start, body = parts[2].offset, parts[2].rest()
    inner = codec.last._named(stream.split(Reader(body, start)))
    left = codec.last.shapes_in(stream.split(Reader(body, start)))
    if len(left) != 1 or len(shapes) != 1 or _sizes(shapes[0]) != _sizes(left[0]):
        raise CorruptStream("last: expected the layer that the first stages left", start)
    kept = Kept.read(own[0], shapes[0].kv_heads, left[0].tokens)
    if max(kept.counts(1, left[0].tokens)) != left[0].tokens:
        raise CorruptStream(f"kept: expected a head that keeps {left[0].tokens} tokens", base)
    counts = kept.counts(shapes[0].kv_heads, left[0].tokens)
    if len(counts) != shapes[0].kv_heads or (kept.weights is not None and kept.weights.size not in (1, sum(counts))):
        raise CorruptStream(f"kept: expected {shapes[0].kv_heads} heads, and a log-weight for each token", base)
    return opened(codec.last, inner, kept, xp)
