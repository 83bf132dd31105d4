"""States of codecs that fit each layer by itself: one part, varint layers, then what was fitted for each, by ascending index (none first)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from kvtheory.layer import Rope
from reference.errors import CorruptStream
from reference.stream import MOST_LAYERS, Reader, varint

__all__ = ["Fitted", "read_layers", "write_layers"]


class Fitted(Protocol):
    """What was fitted for one layer. `write` is told the rope of the layer before it, which is written once."""

    @property
    def index(self) -> int | None: ...
    @property
    def rope(self) -> Rope | None: ...
    def write(self, before: Rope | None) -> bytes: ...


T = TypeVar("T", bound=Fitted)
C = TypeVar("C")


def write_layers(layers: Sequence[Fitted]) -> bytes:
    """varint layers, then each of them."""
    before = [None, *(layer.rope for layer in layers)]
    return b"".join([varint(len(layers)), *(layer.write(rope) for layer, rope in zip(layers, before))])


def read_layers(
    codec: Callable[..., C], arguments: dict[str, Any], parts: list[Reader], read: Callable[[C, Reader, Rope | None], T]
) -> tuple[T, ...]:
    """The layers that `write_layers` wrote, from a state's only part; read(bare codec, reader, rope before) gives one.

    CorruptStream for parameters that the codec refuses and for layers that do not ascend.
    """
    name = getattr(codec, "__name__", "codec")
    if len(parts) != 1:
        raise CorruptStream(f"state: expected 1 part, got {len(parts)}", parts[0].offset if parts else 0)
    reader = parts[0]
    start = reader.offset
    try:
        bare = codec(**arguments)
    except (TypeError, ValueError) as problem:
        reader.fail(f"parameters of {name}: {problem}", start)
    layers: list[T] = []
    for _ in range(reader.varint("number of layers", most=min(MOST_LAYERS, reader.remaining))):
        start = reader.offset
        layer = read(bare, reader, layers[-1].rope if layers else None)
        if layers and _order(layer.index) <= _order(layers[-1].index):
            reader.fail("state: expected layers of ascending index", start)
        layers.append(layer)
    reader.end("state")
    return tuple(layers)


def _order(index: int | None) -> int:
    return -1 if index is None else index
