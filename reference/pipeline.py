"""Codecs one behind another: the tokens that the first ones leave are coded by the last. One stream, one state.

    reference.Pipeline([reducer, ..., quantiser])

Every stage but the last turns a layer into what the next one is to code (`Codec.reduce`): a reducer selects or merges tokens, of each
head its own, and gives them log-weights; any other codec gives what it decodes to. The last stage codes the tokens that are left, as
a layer of as many tokens as the fullest head keeps; a head that keeps fewer has its last token repeated there, so heads that keep very
different numbers waste bits, and they are counted. Where the heads keep the same tokens the last stage writes their positions; else
they are written here, and given to the last stage, so that one that undoes RoPE undoes it right.

One layer's parts (of a pipeline whose last stage has scope "cache", all layers'):

    "shapes"     for each layer: varint length, part "shape" of the layer as it came, with positions 0, 1, 2, ...
    "kept"       for each layer: varint length, what was kept (kept.py)
    "last"       the parts of the last stage: their varint number, their varint lengths, themselves
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer
from reference import parameters, stream
from reference.codec import Codec, from_state_bytes, layers_of
from reference.errors import CorruptStream
from reference.kept import Kept
from reference.shape import Shape
from reference.stream import Kind, Part, Reader, varint

__all__ = ["Pipeline"]

MOST_STAGES = 8


@dataclass(frozen=True)
class Pipeline(Codec):
    """The stages in order, at least one. scope and needs are those of the stages; only the last may have scope "cache".

    A pipeline at the end is taken apart into its stages. Rates are over the numbers of the layer as it came. What is decoded has the element types of that layer. State: the states of its
    stages. It cannot append.

    `encode` raises what its stages raise, and ValueError where a stage in the middle keeps other tokens in each head, or weighs
    them, and so leaves nothing that a Layer could state to the reducer behind it. TypeError or ValueError for stages that do not compose.
    """

    stages: tuple[Codec, ...]

    part_names = ("shapes", "kept", "last")

    def __post_init__(self) -> None:
        stages = tuple(self.stages)
        while stages and isinstance(stages[-1], Pipeline):
            stages = (*stages[:-1], *stages[-1].stages)
        if not 1 <= len(stages) <= MOST_STAGES:
            raise ValueError(f"stages: expected 1 to {MOST_STAGES} codecs, got {len(stages)}")
        for i, stage in enumerate(stages):
            if not isinstance(stage, Codec):
                raise TypeError(f"stages[{i}]: expected a codec, got {type(stage).__name__}")
            if stage.scope != "layer" and (stage.scope != "cache" or i + 1 < len(stages)):
                raise ValueError(f'stages[{i}]: expected scope "layer" (the last one: or "cache"), got {stage.scope!r}')
        for name, value in (
            ("stages", stages),
            ("scope", stages[-1].scope),
            ("needs", frozenset().union(*(stage.needs for stage in stages))),
        ):
            object.__setattr__(self, name, value)

    @property
    def last(self) -> Codec:
        return self.stages[-1]

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_parts(self) -> list[Part]:
        states = [stage.state for stage in self.stages]
        return list(states) if any(states) else []

    @classmethod
    def from_state(cls, arguments: dict[str, Any], parts: list[Reader]) -> Pipeline:
        bare: Sequence[Codec] = arguments["stages"]
        if len(parts) != len(bare) or not any(part.remaining for part in parts):
            raise CorruptStream(
                f"state: expected the states of {len(bare)} stages, got {len(parts)}", parts[0].offset if parts else 0
            )
        stages = [from_state_bytes(part, stage) if part.remaining else stage for stage, part in zip(bare, parts)]
        try:
            return cls(tuple(stages))
        except (TypeError, ValueError) as problem:
            raise CorruptStream(f"state: {problem}", parts[0].offset) from None

    # -- streams -------------------------------------------------------------------------------------------------------

    def encode_parts(self, data: Any) -> list[Part]:
        layers = [data] if self.scope == "layer" else list(layers_of(data))
        return self._parts(layers, [self._reduced(layer) for layer in layers])

    def _parts(self, layers: list[Layer], reduced: list[Decoded]) -> list[Part]:
        """The parts of layers of which all stages but the last left `reduced`."""
        kept = [Kept.of(decoded) for decoded in reduced]
        left = [_layer(layer, decoded, one) for layer, decoded, one in zip(layers, reduced, kept)]
        shapes = [replace(Shape.of(layer), positions=range(layer.tokens)).write() for layer in layers]
        together = self.scope == "cache"
        last = self.last.encode_at(left if together else left[0], kept if together else kept[0])
        return [_lengths(shapes), _lengths([one.write() for one in kept]), stream.join(last)]

    def _reduced(self, layer: Layer) -> Decoded:
        """What the last stage is to code of a layer, which all stages but the last have reduced."""
        decoded = Decoded.exact(layer)
        for i, stage in enumerate(self.stages[:-1]):
            if i:
                kept = Kept.of(decoded)
                if kept.places is not None or kept.weights is not None:
                    raise ValueError(
                        f"stages[{i}]: expected the same tokens in all heads, without weights, from {self.stages[i - 1]}; "
                        f"a Layer can state nothing else to {stage}"
                    )
                layer = _layer(layer, decoded, kept)
            decoded = stage.reduce(stage._require(layer))
        return decoded

    def decode_parts(self, parts: list[Reader]) -> Any:
        start = parts[0].offset
        shapes = self.shapes_in([Reader(parts[0].rest(), start), *parts[1:]])
        base = parts[1].offset
        own = _split_lengths(parts[1], len(shapes), "kept")
        start = parts[2].offset
        body = parts[2].rest()
        inner = self.last._named(stream.split(Reader(body, start)))
        left = self.last.shapes_in(stream.split(Reader(body, start)))
        if len(left) != len(shapes) or (self.scope == "layer" and len(shapes) != 1):
            raise CorruptStream(f"shapes: expected {len(left)} layers, got {len(shapes)}", start)
        for before, after in zip(shapes, left):
            if _sizes(before) != _sizes(after):
                raise CorruptStream(f"last: expected a layer of {_sizes(before)}, got one of {_sizes(after)}", start)
        kept = [Kept.read(reader, shape.kv_heads, shape.tokens) for reader, shape in zip(own, left)]
        for one, shape in zip(kept, left):
            if max(one.counts(1, shape.tokens)) != shape.tokens:
                raise CorruptStream(f"kept: expected a head that keeps {shape.tokens} tokens", base)
        decoded = self.last.decode_at(inner, kept[0] if self.scope == "layer" else kept)
        try:
            held = [one.restore(each) for one, each in zip(kept, [decoded] if self.scope == "layer" else decoded)]
        except ValueError as problem:
            raise CorruptStream(str(problem), base) from None
        return held[0] if self.scope == "layer" else held

    @classmethod
    def shapes_in(cls, parts: list[Reader]) -> list[Shape]:
        shapes: list[Shape] = []
        reader = parts[0] if parts else Reader(b"")
        while reader.remaining:
            shapes.append(Shape.read(reader.part(reader.varint("length of a shape", most=reader.remaining))))
            if len(shapes) > stream.MOST_LAYERS:
                reader.fail(f"shapes: expected at most {stream.MOST_LAYERS} layers")
        return shapes

    def decode_flops(self, stream_: bytes) -> int:
        """Those of the last stage."""
        _, groups = stream.read(stream_)
        kind = Kind.CACHE if self.scope == "cache" else Kind.LAYER
        inner = stream.Header(kind, self.last.codec_id, parameters.write(self.last), self.last._digest)
        total = 0
        for group in groups:
            parts = [bytes(part.rest()) for part in stream.split(self._named(group)[2])]
            total += self.last.decode_flops(stream.write(inner, [parts]))
        return total


def _sizes(shape: Shape) -> tuple[Any, ...]:
    """What reduction leaves as it is."""
    return shape.kv_heads, shape.head_dim, shape.value_dim, shape.key_type, shape.value_type, shape.index


def _lengths(parts: Sequence[bytes]) -> bytes:
    return b"".join(piece for part in parts for piece in (varint(len(part)), part))


def _split_lengths(reader: Reader, count: int, what: str) -> list[Reader]:
    out = [reader.part(reader.varint(f"length of {what}", most=reader.remaining), what) for _ in range(count)]
    reader.end(what)
    return out


def _layer(layer: Layer, decoded: Decoded, kept: Kept) -> Layer:
    """What is left of a layer, as a Layer: rectangular, the last token of a head repeated; positions only where all heads have the same."""
    arrays: list[NDArray[Any]] = []
    # padding may be wider than what any head keeps
    width = max(decoded.kept.tolist())
    last = np.minimum(np.arange(width), np.maximum(decoded.kept[:, None] - 1, 0))
    for array, like in ((decoded.keys, layer.keys), (decoded.values, layer.values)):
        taken = np.take_along_axis(array, last[..., None], axis=1) if width else array[:, :0]
        arrays.append(taken.astype(like.dtype.newbyteorder("="), copy=False))
    positions = decoded.positions[0, :width] if kept.places is None else np.arange(width)
    whole = kept.places is None and np.array_equal(positions, layer.positions)
    # what a reducer made of tokens has no inputs of its own
    extras = {name: value for name, value in layer.extras.items() if name != "inputs" or whole}
    return layer.replace(keys=arrays[0], values=arrays[1], positions=positions, extras=extras)
