"""What all codecs share that keep fewer tokens: SnapKV, ScissorHands, StreamingLLM, MergeReduce.

A reducer says which tokens of each KV head are left, with which log-weights (`reduce`), and computes nothing else; the tokens that are
left keep their element type. Alone it writes them as they are; behind it, in a `Pipeline`, a quantiser codes them.

part "shape"      of the layer as it came, with positions 0, 1, 2, ... (the rate is over its numbers); a reader checks them
part "positions"  where all heads keep the same tokens: varint how many, then their positions as in part "shape"; else empty
part "kept"       reference.kept
part "keys"       head by head, the kept tokens of the head x head_dim numbers, little-endian
part "values"     the same, value_dim numbers

What is decoded is rectangular. A few bytes could ask for a large rectangle, so heads x most kept <= MOST_PADDING x all kept; up to 64 heads
cannot break that.
"""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer import Decoded, Layer
from reference.arguments import number, whole
from reference.codec import Appender, Codec
from reference.full import flat_numbers
from reference.kept import MOST_TOKENS, Kept
from reference.shape import Positions, Shape, in_order, read_positions, write_positions
from reference.stream import Part, Reader, varint

__all__ = [
    "Reducer",
    "Selector",
    "budget",
    "check_finite",
    "check_keep",
    "chosen",
    "joined",
    "parts_of",
    "split_budget",
]

MOST_PADDING = 64

Index = NDArray[np.int64]


def check_keep(keep: Any) -> None:
    """TypeError, ValueError unless keep is a number of tokens (int >= 0) or a share of them (float, above 0, at most 1).

    Other floating types than Python's are refused: streams have integers and binary64, and a float32 would be neither.
    """
    if isinstance(keep, float):
        number("keep", keep, 0, 1)
    elif isinstance(keep, np.floating):
        raise TypeError(f"keep: expected an int or a float, got {type(keep).__name__}")
    else:
        whole("keep", keep, 0, MOST_TOKENS)


def check_finite(layer: Layer) -> None:
    """ValueError naming head, token and channel of a NaN or inf. First thing in `reduce`: behind it token numbers are others."""
    for name, array in (("keys", layer.keys), ("values", layer.values)):
        checks.finite(name, array, ("head", "token", "channel"))


def budget(keep: int | float, tokens: int) -> int:
    """How many tokens of a head may be left: at most keep, or that share of them, rounded half up."""
    return min(tokens, int(np.floor(keep * tokens + 0.5)) if isinstance(keep, float) else int(keep))


def split_budget(total: int, sinks: int, window: int) -> tuple[int, int, int]:
    """(first tokens, other tokens, last tokens) that a budget pays for: sinks before recent tokens, those before the rest."""
    first = min(sinks, total)
    last = min(window, total - first)
    return first, total - first - last, last


def chosen(layer: Layer, index: list[Index], log_weights: list[NDArray[np.float64]] | None = None) -> Decoded:
    """The tokens index[h] (ascending) of each head h, with log-weights (default 0); copies, in the machine's byte order."""
    kept = np.array([len(one) for one in index], np.int64)
    width = int(kept.max(initial=0))
    keys = np.zeros((layer.kv_heads, width, layer.head_dim), layer.keys.dtype.newbyteorder("="))
    values = np.zeros((layer.kv_heads, width, layer.value_dim), layer.values.dtype.newbyteorder("="))
    weights = np.full((layer.kv_heads, width), -np.inf)
    positions = np.full((layer.kv_heads, width), -1, np.int64)
    for h, one in enumerate(index):
        keys[h, : len(one)], values[h, : len(one)] = layer.keys[h, one], layer.values[h, one]
        weights[h, : len(one)] = 0.0 if log_weights is None else log_weights[h]
        positions[h, : len(one)] = layer.positions[one]
    return Decoded(keys, values, weights, positions, kept)


class Reducer(Codec):
    """A codec that leaves fewer tokens. Subclasses define `reduce`; their `encode` writes what it leaves, without further loss."""

    part_names = ("shape", "positions", "kept", "keys", "values")

    @abc.abstractmethod
    def reduce(self, layer: Layer) -> Decoded:
        """The tokens that are left of each head, in the layer's element types."""

    def encode_parts(self, data: Layer) -> list[Part]:
        shape = Shape.of(data)
        check_finite(data)
        return parts_of(shape, self.reduce(data))

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        start = parts[0].offset
        shape = Shape.read(parts[0])
        if not _from_zero(shape.positions):
            parts[0].fail("shape: expected the positions 0, 1, 2, ... of a layer whose tokens part kept names", start)
        start = parts[1].offset
        common = None
        if parts[1].remaining:
            common = read_positions(parts[1], parts[1].varint("tokens kept", most=MOST_TOKENS))
            parts[1].end("positions")
        base = parts[2].offset
        kept = Kept.read(parts[2], shape.kv_heads, shape.tokens if common is None else len(common))
        if (kept.places is None) != (common is not None):
            parts[1].fail("positions: expected them here or in part kept, and not in both", start)
        counts = kept.counts(shape.kv_heads, 0 if common is None else len(common))
        if max(counts) > shape.tokens:
            parts[2].fail(f"kept: expected at most the {shape.tokens} tokens of the layer, got {max(counts)}", base)
        rows = sum(counts)
        if not _fits(counts):
            parts[2].fail(f"kept: expected heads of at most {MOST_PADDING} times their mean, got {max(counts)}", base)
        # the sizes are those of the parts before anything is made of them
        keys = flat_numbers(parts[3], "keys", rows * shape.head_dim, shape.key_dtype)
        values = flat_numbers(parts[4], "values", rows * shape.value_dim, shape.value_dtype)
        width = max(counts)
        left = replace(shape, tokens=width, positions=range(width) if common is None else common)
        padded = [
            _padded(array.reshape(rows, dim), counts, width)
            for array, dim in ((keys, shape.head_dim), (values, shape.value_dim))
        ]
        return kept.restore(left.decoded(padded[0], padded[1]))

    def encode_at(self, data: Layer, kept: Kept) -> list[Part]:
        if kept.places is not None or kept.weights is not None:
            raise ValueError(
                f"stages: {self} cannot follow a stage that keeps other tokens in each head, or weighs them"
            )
        return self.encode_parts(data)

    def decode_at(self, parts: list[Reader], kept: Kept) -> Decoded:
        if kept.places is not None or kept.weights is not None:
            parts[0].fail(
                f"kept: {self.codec_id} cannot follow a stage that keeps other tokens in each head, or weighs them"
            )
        return self.decode_parts(parts)

    def decode_flops(self, stream: bytes) -> int:
        """0: nothing is computed."""
        return 0

    def start(self, layer: Layer) -> Appender:
        return _Behind(self, layer)


class Selector(Reducer):
    """A reducer that leaves tokens as they are, of weight 1. Subclasses define `places`."""

    @abc.abstractmethod
    def places(self, layer: Layer) -> list[Index]:
        """Which tokens of each KV head are left, ascending. ValueError for a NaN or inf, with its place."""

    def reduce(self, layer: Layer) -> Decoded:
        return chosen(layer, self.places(layer))


def parts_of(shape: Shape, decoded: Decoded) -> list[Part]:
    """The parts of what a reducer left of a layer. ValueError where one of more than 64 heads keeps 64 times their mean."""
    if not _fits(decoded.kept.tolist()):
        raise ValueError(f"kept: expected heads of at most {MOST_PADDING} times their mean, got {decoded.kept.max()}")
    kept = Kept.of(decoded)
    width = int(decoded.kept.max(initial=0))
    positions = b""
    if kept.places is None:
        positions = varint(width) + write_positions(in_order(decoded.positions[0, :width]))
    return [
        replace(shape, positions=range(shape.tokens)).write(),
        positions,
        kept.write(),
        _rows(decoded.keys, decoded.kept),
        _rows(decoded.values, decoded.kept),
    ]


def _from_zero(positions: Positions) -> bool:
    if isinstance(positions, range):
        return positions.start == 0
    return np.array_equal(positions, np.arange(len(positions)))


def _fits(counts: list[int]) -> bool:
    return len(counts) * max(counts) <= MOST_PADDING * sum(counts)


def _rows(array: NDArray[Any], kept: Index) -> bytes:
    little = array.dtype.newbyteorder("<")
    return b"".join(np.ascontiguousarray(own[:n], dtype=little).tobytes() for own, n in zip(array, kept))


def _padded(rows: NDArray[Any], counts: list[int], width: int) -> NDArray[Any]:
    out = np.zeros((len(counts), width, rows.shape[1]), rows.dtype)
    start = 0
    for own, n in zip(out, counts):
        own[:n] = rows[start : start + n]
        start += n
    return out


class _Behind(Appender):
    """The prompt is reduced once, when it ends; tokens that come later are all kept."""

    def __init__(self, codec: Reducer, layer: Layer) -> None:
        super().__init__(codec, Shape.of(layer))
        check_finite(layer)
        self._prompt = codec.reduce(layer)
        self._later: list[tuple[NDArray[Any], NDArray[Any], Index]] = []

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        raise NotImplementedError  # take_at is what is called

    def take_at(self, keys: NDArray[Any], values: NDArray[Any], positions: Index) -> None:
        self._later.append((keys.copy(), values.copy(), positions))

    def decoded(self) -> Decoded:
        """The reduced prompt and the later tokens behind it."""
        return joined(self._prompt, self._later)

    def parts(self) -> list[Part]:
        return parts_of(self.shape, self.decoded())


def joined(prompt: Decoded, later: list[tuple[NDArray[Any], NDArray[Any], Index]]) -> Decoded:
    """`prompt` with later tokens, (keys, values, positions) each, of weight 1 behind those of each head."""
    more = sum(len(positions) for _, _, positions in later)
    if not more:
        return prompt
    kept = prompt.kept + more
    width = int(kept.max())
    heads = len(kept)
    keys = np.zeros((heads, width, prompt.keys.shape[2]), prompt.keys.dtype)
    values = np.zeros((heads, width, prompt.values.shape[2]), prompt.values.dtype)
    weights, positions = np.full((heads, width), -np.inf), np.full((heads, width), -1, np.int64)
    for h in range(heads):
        n = int(prompt.kept[h])
        behind = slice(n, n + more)
        keys[h, :n], values[h, :n] = prompt.keys[h, :n], prompt.values[h, :n]
        weights[h, :n], positions[h, :n] = prompt.log_weights[h, :n], prompt.positions[h, :n]
        keys[h, behind] = np.concatenate([k[h] for k, _, _ in later])
        values[h, behind] = np.concatenate([v[h] for _, v, _ in later])
        weights[h, behind] = 0.0
        positions[h, behind] = np.concatenate([where for _, _, where in later])
    return Decoded(keys, values, weights, positions, kept)
