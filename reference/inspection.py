"""Where each bit of a stream went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reference import stream
from reference.codec import arguments_of, class_of
from reference.shape import Shape
from reference.stream import Kind

__all__ = ["Inspection", "PartSize", "inspect"]


@dataclass(frozen=True)
class PartSize:
    """A part of a stream: its name, its bytes, and bits per number of the whole stream (None where the stream has no numbers)."""

    name: str
    bytes: int
    bits_per_number: float | None


@dataclass(frozen=True)
class Inspection:
    """What a stream says of itself. The bytes of `parts` add up to `total_bytes`: "container" is everything around them.

    shapes: of each layer, where the codec writes one; numbers: keys and values in all; parts: one line a name, summed over layers.
    """

    kind: str
    version: int
    codec: str
    parameters: dict[str, Any]
    digest: str
    layers: int
    shapes: tuple[Shape, ...]
    numbers: int
    parts: tuple[PartSize, ...]
    total_bytes: int

    @property
    def held_bits(self) -> float | None:
        """8 total_bytes / numbers; None without numbers."""
        return 8 * self.total_bytes / self.numbers if self.numbers else None

    def record(self) -> dict[str, Any]:
        """The same as plain dictionaries, lists and numbers, for JSON and tables."""
        return {
            "kind": self.kind,
            "version": self.version,
            "codec": self.codec,
            "parameters": {name: value if _plain(value) else repr(value) for name, value in self.parameters.items()},
            "state_digest": self.digest,
            "layers": [
                {
                    "index": shape.index,
                    "kv_heads": shape.kv_heads,
                    "tokens": shape.tokens,
                    "head_dim": shape.head_dim,
                    "value_dim": shape.value_dim,
                    "key_dtype": shape.key_dtype.name,
                    "value_dtype": shape.value_dtype.name,
                }
                for shape in self.shapes
            ],
            "numbers": self.numbers,
            "parts": [{"name": p.name, "bytes": p.bytes, "bits_per_number": p.bits_per_number} for p in self.parts],
            "total_bytes": self.total_bytes,
            "held_bits": self.held_bits,
        }


def _plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, (bool, int, float, str))
        or (isinstance(value, tuple) and all(map(_plain, value)))
    )


def inspect(data: bytes) -> Inspection:
    """Header and parts of a stream or a state, without decoding its numbers and without its state.

    CorruptStream if the container, the parameters or a shape cannot be read; the numbers themselves are not looked at.
    """
    header, groups = stream.read(data)
    codec = class_of(header)
    names = codec.part_names if header.kind is not Kind.STATE else ()
    sizes: dict[str, int] = {}
    shapes: list[Shape] = []
    for group in groups:
        for i, part in enumerate(group):
            name = names[i] if i < len(names) else f"part {i}"
            sizes[name] = sizes.get(name, 0) + part.remaining
        if header.kind is not Kind.STATE:
            shapes += codec.shapes_in(group)
    numbers = sum(shape.numbers for shape in shapes)
    sizes["container"] = len(data) - sum(sizes.values())
    return Inspection(
        header.kind.name.lower(),
        stream.VERSION,
        header.codec,
        arguments_of(codec, header),
        header.digest.hex(),
        len(groups),
        tuple(shapes),
        numbers,
        tuple(PartSize(name, size, 8 * size / numbers if numbers else None) for name, size in sizes.items()),
        len(data),
    )
