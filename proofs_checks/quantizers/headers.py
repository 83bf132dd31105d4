"""Bytes of a stream that are no codes, counted from docs/stream-format.md; nothing here is shared with reference."""

from __future__ import annotations

from collections.abc import Sequence


def varint(value: int) -> int:
    """Bytes of an unsigned LEB128."""
    return max(1, -(-value.bit_length() // 7))


def shape(heads: int, tokens: int, key_dim: int, value_dim: int) -> int:
    """Of a part "shape" without a layer index, at positions 0, 1, 2, ...: index, element types, width and first are a byte each."""
    return sum(map(varint, (heads, tokens, key_dim, value_dim))) + 4


def container(codec: str, parameters: int, parts: Sequence[int], digest: int = 0) -> int:
    """Of all that is around the parts of one layer; `parameters`, `digest`: their bytes; `parts`: those of each part."""
    magic, checksum, version_and_kind = 4, 4, 2
    name = 1 + len(codec)
    return (
        magic + checksum + version_and_kind + name + varint(parameters) + parameters + 1 + digest
        + varint(len(parts)) + sum(map(varint, parts))
    )  # fmt: skip
