"""What a stream says about a layer beside its numbers: sizes, element types, index in the model, positions of its tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer
from reference.stream import Reader, varint, zigzag

__all__ = ["DTYPES", "Shape", "in_order", "read_positions", "write_positions"]

#: element types in the order of their numbers in a stream
DTYPES = ("float16", "bfloat16", "float32", "float64")
#: more heads or channels are refused, so that a header alone makes no decoder allocate
MOST_HEADS, MOST_TOKENS, MOST_CHANNELS = 1 << 16, 1 << 40, 1 << 20
LAST_POSITION = 1 << 62

#: consecutive positions are a range (nothing is allocated for them), others an array (tokens,) int64
Positions = range | NDArray[np.int64]


def _dtype(number: int) -> np.dtype[Any]:
    if DTYPES[number] == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(DTYPES[number])


def _number(array: NDArray[Any]) -> int:
    return DTYPES.index(array.dtype.newbyteorder("=").name)


@dataclass(frozen=True, eq=False)
class Shape:
    """kv_heads, tokens, head_dim, value_dim; numbers of the element types in DTYPES; layer index or None; positions, ascending."""

    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int
    key_type: int
    value_type: int
    index: int | None
    positions: Positions

    @classmethod
    def of(cls, layer: Layer) -> Shape:
        """The shape of a layer. ValueError if its positions are not in time order from 0, as no `Decoded` could hold them."""
        sizes = (layer.kv_heads, layer.tokens, layer.head_dim, layer.value_dim)
        if layer.kv_heads > MOST_HEADS or max(layer.head_dim, layer.value_dim) > MOST_CHANNELS:
            raise ValueError(f"keys: expected at most {MOST_HEADS} heads and {MOST_CHANNELS} channels, got {layer}")
        return cls(*sizes, _number(layer.keys), _number(layer.values), layer.index, in_order(layer.positions))

    @property
    def key_dtype(self) -> np.dtype[Any]:
        return _dtype(self.key_type)

    @property
    def value_dtype(self) -> np.dtype[Any]:
        return _dtype(self.value_type)

    @property
    def rows(self) -> int:
        """kv_heads * tokens: how many key vectors, and how many value vectors."""
        return self.kv_heads * self.tokens

    @property
    def numbers(self) -> int:
        """Keys and values together, the denominator of the held rate."""
        return self.rows * (self.head_dim + self.value_dim)

    def extended(self, tokens: int, positions: NDArray[np.int64] | None) -> Shape:
        """With `tokens` more tokens, at `positions` (tokens,), default right behind the last one. ValueError: not in time order."""
        grown, after = self.tokens + tokens, int(self.positions[-1]) + 1 if self.tokens else 0
        if positions is None:
            positions = np.arange(after, after + tokens)
        follows = np.array_equal(positions, np.arange(after, after + tokens))
        if isinstance(self.positions, range) and self.tokens and follows:
            return replace(self, tokens=grown, positions=range(self.positions.start, self.positions.start + grown))
        return replace(self, tokens=grown, positions=in_order(np.concatenate([_array(self.positions), positions])))

    def decoded(self, keys: NDArray[Any], values: NDArray[Any], *, checked: bool = False) -> Decoded:
        """Every token kept, with weight 1. checked: the decoder has seen to it that all numbers are finite."""
        return Decoded.of(keys, values, _array(self.positions), checked=checked)

    def write(self) -> bytes:
        sizes = (self.kv_heads, self.tokens, self.head_dim, self.value_dim, 0 if self.index is None else self.index + 1)
        types = bytes([self.key_type | self.value_type << 4])
        return b"".join(varint(size) for size in sizes) + types + write_positions(self.positions)

    @classmethod
    def read(cls, reader: Reader) -> Shape:
        """From all of `reader`. What it says of the numbers of tokens and channels is yet to be held against the other parts."""

        def size(name: str, least: int, most: int) -> int:
            start = reader.offset
            value = reader.varint(name, most)
            if value < least:
                reader.fail(f"{name}: expected at least {least}, got {value}", start)
            return value

        heads, tokens = size("kv_heads", 1, MOST_HEADS), size("tokens", 0, MOST_TOKENS)
        head_dim, value_dim = size("head_dim", 1, MOST_CHANNELS), size("value_dim", 1, MOST_CHANNELS)
        index = size("layer index", 0, 1 << 32)
        start = reader.offset
        types = reader.u8("element types")
        if max(types & 15, types >> 4) >= len(DTYPES):
            reader.fail(f"element types: expected numbers below {len(DTYPES)}, got {types:#04x}", start)
        positions = read_positions(reader, tokens)
        reader.end("shape")
        return cls(heads, tokens, head_dim, value_dim, types & 15, types >> 4, index - 1 if index else None, positions)


def in_order(positions: NDArray[np.int64]) -> Positions:
    """Positions as a Shape holds them, one form for the same numbers; ValueError if they fall or start below 0."""
    steps = np.diff(positions)
    if (steps < 0).any():
        where = int(np.argmax(steps < 0))
        raise ValueError(f"positions: expected time order, got {positions[where]} before {positions[where + 1]}")
    first = int(positions[0]) if positions.size else 0
    if first < 0:
        raise ValueError(f"positions: expected numbers >= 0, got {first}; -1 is padding in a Decoded")
    if positions.size and int(positions[-1]) >= LAST_POSITION:
        raise ValueError(f"positions: expected numbers below 2^62, got {int(positions[-1])}")
    return range(first, first + positions.size) if (steps == 1).all() else positions


def _array(positions: Positions) -> NDArray[np.int64]:
    return np.arange(positions.start, positions.stop, dtype=np.int64) if isinstance(positions, range) else positions


def write_positions(positions: Positions) -> bytes:
    """Byte 0 and the first position, zigzag, for consecutive ones; else byte w = 1, 2, 4 or 8, the first, and w bytes a step."""
    if isinstance(positions, range):
        return b"\x00" + zigzag(positions.start if len(positions) else 0)
    steps = np.diff(positions)
    width = next(w for w in (1, 2, 4, 8) if w == 8 or int(steps.max(initial=0)) < 1 << 8 * w)
    return bytes([width]) + zigzag(int(positions[0])) + steps.astype(f"<u{width}").tobytes()


def read_positions(reader: Reader, count: int) -> Positions:
    """The positions of `count` tokens: ascending from 0 or above, below 2^62."""
    start = reader.offset
    width = reader.u8("width of the positions")
    if width not in (0, 1, 2, 4, 8):
        reader.fail(f"width of the positions: expected 0, 1, 2, 4 or 8, got {width}", start)
    first = reader.zigzag("first position")
    if first < 0 or first + count > LAST_POSITION:
        reader.fail(f"positions: expected 0 to 2^62 - 1, got {count} from {first} on", start)
    if width == 0:
        return range(first, first + count)
    if count == 0:
        reader.fail("positions: no tokens, but steps between them", start)
    steps = reader.array(f"<u{width}", count - 1, "steps of the positions")
    # first in floating point, where a sum of 64-bit steps does not wrap around
    if first + float(steps.sum(dtype=np.float64)) > 2.0**63 - 2.0**62:
        reader.fail("positions: expected less than 2^62", start)
    positions = np.concatenate([[first], first + np.cumsum(steps, dtype=np.int64)]).astype(np.int64)
    if int(positions[-1]) >= LAST_POSITION:
        reader.fail("positions: expected less than 2^62", start)
    return positions
