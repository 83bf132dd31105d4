"""The tasks of a comparison: a codec on a layer, from numbers through bytes to the error of attention."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Decoded, Layer
from kvtheory.sweep import Task, stage
from reference.codec import Codec, decode, encode_cache
from reference.compare import versions
from reference.compare.fitted import FittedCodec, nominal
from reference.compare.sources import Source, Split, divide, open_cache
from reference.compare.specs import Spec, named, options_at, specs

__all__ = ["LAWS", "Coded", "carried", "codecs_at", "kept_shares", "measure", "plan", "task_key", "through_bytes"]

#: whose queries a codec is given
LAWS = ("prompt", "held-out")

Row = dict[str, Any]
Float = NDArray[np.float64]


def codecs_at(
    names: str | Iterable[str | Spec], bits: Sequence[float] = (), seeds: Sequence[int] = (0,)
) -> list[Codec]:
    """Data-oblivious codecs by name or spec ("TurboQuant(rotation=haar)"): one for each nominal rate and seed, where they take `bits` and `seed`.

    One that is fitted to calibration data is made by `compare.fit`, or by its own `fit`, and handed to `plan` beside these; ValueError for a
    name whose class has `fit`, for an unknown one and for a rate or option that the codec refuses.
    """
    found: list[Codec] = []
    for one in [names] if isinstance(names, str) else names:
        for spec in [one] if isinstance(one, Spec) else specs(one):
            if spec.fitted:
                raise ValueError(
                    f"codecs: {spec.name} is fitted to calibration data first; give `plan` the fitted codec"
                )
            for given in options_at(spec, bits, seeds):
                try:
                    found.append(spec.make(**given))
                except (TypeError, ValueError, NotImplementedError) as problem:
                    raise ValueError(f"codecs: {Spec(spec.name, given)}: {problem}") from None
    return found


def plan(
    sources: Sequence[Source],
    codecs: Sequence[Codec | FittedCodec],
    *,
    layers: Sequence[int] | None = None,
    split: Split | None = None,
    law: str = "prompt",
) -> list[Task]:
    """One task for each codec and layer of each source (for a codec of scope "cache": for all layers together), layer by layer.

    layers: indices in the model, default all. split: default Split(), shortened to what a source has (`Split.within`).
    law: the queries that a codec is given: "prompt", those of the tokens that it codes; "held-out", the very ones that it is judged by, which
    no receiver has: an oracle, to see what better queries could bring.
    ValueError for codecs of scope "sessions", equal codecs, layers that are not there, layers without queries to hold out, and needs of a
    codec that a layer cannot meet.
    """
    if law not in LAWS:
        raise ValueError(f"law: expected one of {', '.join(LAWS)}, got {law!r}")
    if not sources or not codecs:
        raise ValueError("sources, codecs: expected at least one of each")
    for codec in codecs:
        if codec.scope not in ("layer", "cache"):
            raise ValueError(
                f"codecs: {codec.codec_id} has scope {codec.scope!r}, which has no single cache to compare on"
            )
    tasks = []
    for one in sources:
        its = (split or Split()).within(one.tokens)
        wanted = list(one.layers) if layers is None else list(layers)
        for index in wanted:
            if index not in one.layers:
                have = ", ".join(map(str, one.layers))
                raise ValueError(f"layers: {one.label} has no layer {index}; there are {have}")
        _check(one, wanted, codecs, its)
        units: list[tuple[Codec | FittedCodec, tuple[int, ...]]] = [
            *((codec, (index,)) for index in wanted for codec in codecs if codec.scope == "layer"),
            *((codec, tuple(wanted)) for codec in codecs if codec.scope == "cache"),
        ]
        tasks += [
            Task(
                {**task_key(one, codec, indices, its), "law": law},
                measure,
                (one.path, one.digest, {i: one.layers[i] for i in indices}, carried(codec, indices), its, law),
                versions.of_codec(codec, measure),
            )
            for codec, indices in units
        ]
    return tasks


def carried(codec: Codec | FittedCodec, indices: Sequence[int]) -> Codec | FittedCodec:
    """The codec as a task of these layers carries it."""
    return codec.only(indices) if isinstance(codec, FittedCodec) else codec


def _check(one: Source, wanted: Sequence[int], codecs: Sequence[Codec | FittedCodec], split: Split) -> None:
    cache = open_cache(one.path)
    for index in wanted:
        layer = cache[one.layers[index]]
        try:
            coded, judged = divide(layer, split)
        except ValueError as problem:
            raise ValueError(f"{one.label}, layer {index}: {problem}") from None
        assert judged.queries is not None
        if judged.queries.shape[1] < split.segments:
            raise ValueError(
                f"{one.label}, layer {index}: queries: expected at least {split.segments} at positions {split.prefix} to "
                f"{split.prefix + split.held - 1}, got {judged.queries.shape[1]}"
            )
        for codec in codecs:
            try:
                coded.require(*sorted(codec.needs), by=codec.codec_id)
            except ValueError as problem:
                raise ValueError(f"{one.label}, layer {index}: {problem}") from None


def task_key(one: Source, codec: Codec | FittedCodec, indices: tuple[int, ...], split: Split) -> Row:
    """What a task is: the columns that head its rows."""
    said: Mapping[str, Any]
    if isinstance(codec, FittedCodec):
        state, its, said = codec.state, codec.calibration, codec.parameters
    else:
        said = named(codec)
        state, its = hashlib.sha256(codec.state).hexdigest()[:16] if codec.state_bytes else "", ""
    return {
        "model": one.model,
        "text": one.text,
        "cache": one.id,
        "prefix": split.prefix,
        "held": split.held,
        "segments": split.segments,
        "dtype": split.dtype,
        "codec": codec.codec_id,
        "parameters": json.dumps(said, sort_keys=True, default=repr),
        "state": state,
        "calibration": its,
        "bits": nominal(said),
        "seed": said.get("seed"),
        "layers": ",".join(map(str, indices)),
    }


class _Prepared(NamedTuple):
    coded: Layer
    judged: Layer
    outputs: Float
    energies: Float
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    window: int | None


@functools.lru_cache(maxsize=1)  # tasks come layer by layer: the next codec finds the exact outputs there
def _prepared(path: str, digest: str, number: int, split: Split) -> _Prepared:
    layer = open_cache(path)[number]
    coded, judged = divide(layer, split)
    assert judged.queries is not None
    outputs = attention.head_outputs(judged)
    queries = judged.queries.shape[1]
    edges = np.arange(split.segments + 1) * queries // split.segments
    return _Prepared(
        coded, judged, outputs, _energies(judged, outputs), edges[:-1], np.diff(edges),
        layer.window,
    )  # fmt: skip


def _energies(layer: Layer, outputs: Float) -> Float:
    """||sum_h o_h W_O^h||^2 of each query, (1 + kv_heads, queries): over all heads, then over each KV head's own query heads."""
    parts = []
    for kv in range(layer.kv_heads):
        own = range(kv * layer.group, (kv + 1) * layer.group)
        parts.append(sum(outputs[h] @ layer.projection(h) for h in own))
    every = np.stack([np.sum(parts, axis=0), *parts])
    return np.einsum("pmD,pmD->pm", every, every)


def _asked(layer: _Prepared, law: str) -> Layer:
    """What a codec is given, with the queries of `law`."""
    if law == "prompt":
        return layer.coded
    return layer.coded.replace(queries=layer.judged.queries, query_positions=None)


def kept_shares(decoded: Decoded, tokens: int) -> list[float]:
    """Share of a layer's tokens that is left: mean over its KV heads, then of each."""
    shares = decoded.kept / tokens
    return [float(shares.mean()), *shares.tolist()]


class Coded(NamedTuple):
    """A layer after its way through bytes, with the size of the stream that holds it and the numbers in that stream.

    decode_flops: of decoding that stream, as `Codec.decode_flops` counts; None where the codec does not say.
    """

    decoded: Decoded
    stream_bytes: int
    stream_numbers: int
    decode_flops: int | None


def through_bytes(codec: Codec | FittedCodec, layers: Sequence[Layer]) -> list[Coded]:
    """Each layer encoded and decoded: alone, or for a codec of scope "cache" all in one stream.

    What is decoded are the bytes alone, by `reference.decode`, with the codec's state.
    """
    if codec.scope == "cache":
        codec = codec.of(None) if isinstance(codec, FittedCodec) else codec
        with stage("encode"):
            data = encode_cache(codec, layers)
        numbers = sum(layer.keys.size + layer.values.size for layer in layers)
        with stage("decode"):
            every = decode(data, codec.state)
        return [Coded(decoded, len(data), numbers, _flops(codec, data)) for decoded in every]
    found = []
    for layer in layers:
        own = codec.of(layer.index) if isinstance(codec, FittedCodec) else codec
        with stage("encode"):
            data = own.encode(layer)
        with stage("decode"):
            decoded = decode(data, own.state)
        found.append(Coded(decoded, len(data), layer.keys.size + layer.values.size, _flops(own, data)))
    return found


def _flops(codec: Codec, data: bytes) -> int | None:
    try:
        return int(codec.decode_flops(data))
    except NotImplementedError:
        return None


def measure(
    path: str, digest: str, layers: Mapping[int, int], codec: Codec | FittedCodec, split: Split, law: str = "prompt"
) -> list[Row]:
    """Encode, decode, measure: a row for each layer (index -> number in the cache), part (the layer, its KV heads) and segment."""
    prepared = [_prepared(path, digest, number, split) for number in layers.values()]
    coded = through_bytes(codec, [_asked(layer, law) for layer in prepared])
    rows = []
    for index, layer, its in zip(layers, prepared, coded, strict=True):
        wrong = _energies(layer.judged, attention.head_outputs(layer.judged, its.decoded) - layer.outputs)
        numerators = np.add.reduceat(wrong, layer.starts, axis=1)
        denominators = np.add.reduceat(layer.energies, layer.starts, axis=1)
        if not denominators.all():
            raise ValueError(f"layer {index}: expected attention outputs that are not all 0 in every segment")
        kept = kept_shares(its.decoded, layer.coded.tokens)
        rows += [
            {
                "layer": index,
                "head": part - 1 if part else None,
                "segment": segment,
                "queries": int(layer.sizes[segment]),
                "numerator": float(numerators[part, segment]),
                "denominator": float(denominators[part, segment]),
                "numbers": layer.coded.keys.size + layer.coded.values.size,
                "stream_bytes": its.stream_bytes,
                "stream_numbers": its.stream_numbers,
                "decode_flops": its.decode_flops,
                "held_bits": 8 * its.stream_bytes / its.stream_numbers,
                "state_bytes": codec.state_bytes,
                "window": layer.window,
                "kept": kept[part],
            }
            for part in range(numerators.shape[0])
            for segment in range(split.segments)
        ]
    return rows
