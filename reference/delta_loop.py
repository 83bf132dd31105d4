"""What encoder and decoder of PredictiveDelta share: the loop over positions, the store of residuals, the head of the stream."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer import Decoded, Layer
from kvtheory.prediction import Known, Prediction, TokenKV, law_weights
from reference import stream
from reference.predictors import MOST_SIZE
from reference.shape import Shape, _dtype
from reference.stream import Part, Reader, varint
from reference.token_replay import MOST_TOKENS
from reference.vectors import largest

if TYPE_CHECKING:
    from reference.predictive_delta import PredictiveDelta

__all__ = [
    "Allocation",
    "Head",
    "Loop",
    "Pair",
    "Sizes",
    "Store",
    "alike",
    "ascending",
    "at_position",
    "decoded_layers",
    "read_shapes",
    "rebuilt",
    "refuse",
    "cast",
    "surprisal",
]

Sizes = tuple[int, int, int, int]
#: keys and values of one layer at one position
Pair = tuple[NDArray[Any], NDArray[Any]]
#: the smallest probability of a token that the coder knows, in bits
LEAST_LIKELY = 24.0


class Loop:
    """A predictor at work on a past: the reconstructed one, or (the encoder's, in open loop) the exact one."""

    def __init__(self, codec: PredictiveDelta, sizes: Sizes, fail: Callable[[str], NoReturn]) -> None:
        assert codec.predictor is not None
        self._codec, self._sizes, self._fail = codec, sizes, fail
        self._needs = codec.predictor.needs
        self._running = codec.predictor.start(codec.player)
        self._play = codec.player.start() if codec._runs("law", "pass") and codec.player is not None else None
        self._law: NDArray[np.int64] | None = None
        self._previous: Sequence[TokenKV] | None = None
        self._passed: list[TokenKV] | None = None
        self._position = 0
        self.checksum = 0

    @property
    def coding_law(self) -> NDArray[np.int64] | None:
        """Of the next token, for its code; None: uniform."""
        return self._law if self._play is not None else self._running.law

    def predict(self, token: int | None) -> Prediction:
        if "pass" in self._needs:
            self._passed = self._feed(token)
        return self._running.predict(
            Known(
                self._position, self._sizes, self._previous,
                play=self._play if "law" in self._needs else None,
                law=self._law if "law" in self._needs else None,
                token=token if "token" in self._needs else None,
                passed=self._passed if "pass" in self._needs else None,
            )
        )  # fmt: skip

    def took(self, token: int | None, kept: Sequence[TokenKV]) -> None:
        """What the position holds from now on."""
        if self._play is not None:
            if "pass" not in self._needs:
                self._feed(token)
            self._play.revise([TokenKV(*(np.asarray(a, np.float64) for a in one)) for one in kept])
            self._law = None if self._play.logits is None else law_weights(self._play.logits)
        self._running.took(token)
        self._previous, self._passed = kept, None
        self._position += 1
        if token is not None:
            self.checksum = zlib.crc32(token.to_bytes(4, "little"), self.checksum)
        if self._play is not None:
            for one in kept:
                for array in one:
                    self.checksum = zlib.crc32(np.ascontiguousarray(array, "<f8").tobytes(), self.checksum)

    def _feed(self, token: int | None) -> list[TokenKV]:
        assert self._play is not None and token is not None
        kv = self._play.feed(token)
        found = (len(kv), *kv[0].keys.shape, kv[0].values.shape[-1])
        if found != self._sizes:
            self._fail(f"sizes: expected layers, kv_heads, head_dim, value_dim {found} of the model, got {self._sizes}")
        return kv


class Store:
    """Residuals as the inner codec takes them: one by one while the loop runs, in the end together, with the same result."""

    def __init__(self, codec: PredictiveDelta, sizes: Sizes) -> None:
        self._codec, self._sizes = codec, sizes
        self.codes: list[int] = []
        self._kept: dict[tuple[int, int], list[Any]] = {}

    def quantise(self, residuals: Sequence[Pair], bits: int) -> list[Pair]:
        """What `bits` bits a component leave of each (keys, values)."""
        if bits == 0 and self._codec.adaptive is not None:
            return [(np.zeros_like(keys), np.zeros_like(values)) for keys, values in residuals]
        inner = self._codec._inner(bits)
        parts = inner.encode_parts(as_layer(residuals))
        decoded = inner.decode_parts([Reader(part) for part in parts])
        keys, values = (np.asarray(a, np.float64) for a in (decoded.keys, decoded.values))
        return [(keys[:, j], values[:, j]) for j in range(len(residuals))]

    def keep(self, position: int, layers: Sequence[int], residuals: Sequence[Pair], bits: int) -> list[Pair]:
        coded = self.quantise(residuals, bits)
        adaptive, count = self._codec.adaptive, self._sizes[0]
        if adaptive == "corrected":
            self.codes += [0] * ((position + 1) * count - len(self.codes))
            for i in layers:
                self.codes[position * count + i] = bits
        elif adaptive == "paper" and len(self.codes) == position:
            self.codes.append(bits)
        if bits or adaptive is None:
            for i, residual, its in zip(layers, residuals, coded):
                self._kept.setdefault((i, bits), []).append((residual, its))
        return coded

    def parts(self) -> bytes:
        """Layer by layer, of each the levels in ascending order: varint length, the inner codec's parts. Positions: by `codes`."""
        pieces: list[Part] = []
        for (_, bits), kept in sorted(self._kept.items()):
            inner = self._codec._inner(bits)
            body = stream.join(inner.encode_parts(as_layer([residual for residual, _ in kept])))
            decoded = inner.decode_parts(inner._named(stream.split(Reader(body))))
            alone = [np.stack([its[side] for _, its in kept], axis=1) for side in (0, 1)]
            if not (np.array_equal(decoded.keys, alone[0]) and np.array_equal(decoded.values, alone[1])):
                raise ValueError(f"inner: expected a codec that codes each vector alone, got {inner}")
            pieces += [varint(len(body)), body]
        return b"".join(pieces)


@dataclass(frozen=True)
class Allocation:
    """bits (tokens,) of "paper"; level theta of "corrected"; scale (layers, 2): mean square of a key's and a value's number."""

    bits: NDArray[np.int64]
    level: float
    scale: NDArray[np.float64]

    def relative(self, layer: int, keys: NDArray[Any], values: NDArray[Any]) -> float:
        """Mean square of a residual's number over that of the layer's, mean of keys and values."""
        energies = [float((np.asarray(a, np.float64) ** 2).mean()) for a in (keys, values)]
        return float(np.mean(energies / self.scale[layer]))


def ascending(shapes: Sequence[Shape]) -> list[int]:
    """Places of the layers by index, none first: the order in which they are coded."""
    return sorted(range(len(shapes)), key=lambda i: -1 if shapes[i].index is None else int(shapes[i].index))  # type: ignore[arg-type]


def read_shapes(reader: Reader) -> list[Shape]:
    """Of all layers, in the order of the cache."""
    count = reader.varint("number of layers", most=min(MOST_SIZE, reader.remaining))
    shapes = [
        Shape.read(reader.part(reader.varint("length of a shape", most=reader.remaining), "shape"))
        for _ in range(count)
    ]
    reader.end("shapes")
    return shapes


@dataclass(frozen=True)
class Head:
    """shapes: in the order of the cache; sizes, indices: of the layers as they are coded."""

    shapes: list[Shape]
    tokens: int
    sizes: Sizes
    indices: tuple[int | None, ...]
    dtype: np.dtype[Any]
    plan: bytes
    checksum: int

    @classmethod
    def read(cls, parts: list[Reader]) -> Head:
        start = parts[0].offset
        shapes = read_shapes(parts[0])
        kinds = {(s.kv_heads, s.head_dim, s.value_dim, s.tokens, s.key_type, s.value_type) for s in shapes}
        if len(kinds) != 1 or len({s.key_type for s in shapes} | {s.value_type for s in shapes}) != 1:
            parts[0].fail("shapes: expected layers of one shape and element type, at least one", start)
        first = shapes[0]
        if first.tokens > MOST_TOKENS or max(first.kv_heads, first.head_dim, first.value_dim) > MOST_SIZE:
            parts[0].fail(f"shapes: expected at most {MOST_TOKENS} tokens and sizes of {MOST_SIZE}, got {first}", start)
        if any(s.positions != range(s.tokens) for s in shapes):
            parts[0].fail("shapes: expected positions 0, 1, ...", start)
        indices = tuple(shapes[i].index for i in ascending(shapes))
        plan = bytes(parts[1].take(4, "digest of the plan"))
        checksum = int.from_bytes(parts[1].take(4, "checksum of what is rebuilt"), "little")
        parts[1].end("head")
        sizes = (len(shapes), first.kv_heads, first.head_dim, first.value_dim)
        return cls(shapes, first.tokens, sizes, indices, _dtype(first.key_type), plan, checksum)


def refuse(problem: str) -> NoReturn:
    raise ValueError(f"cache: {problem}")


def alike(layers: list[Layer]) -> tuple[Sizes, np.dtype[Any]]:
    if not layers:
        raise ValueError("cache: expected at least one layer, got none")
    kinds = {
        (
            one.kv_heads,
            one.head_dim,
            one.value_dim,
            one.keys.dtype.newbyteorder("="),
            one.values.dtype.newbyteorder("="),
            one.tokens,
        )
        for one in layers
    }
    if len(kinds) > 1:
        raise ValueError(f"cache: expected layers of one shape and element type, got {len(kinds)}")
    heads, d, dv, key_type, value_type, tokens = kinds.pop()
    if key_type != value_type:
        raise ValueError(f"cache: expected keys and values of one element type, got {key_type} and {value_type}")
    if tokens > MOST_TOKENS or max(len(layers), heads, d, dv) > MOST_SIZE:
        raise ValueError(f"cache: expected at most {MOST_TOKENS} tokens and sizes of {MOST_SIZE}")
    for one in layers:
        if not np.array_equal(one.positions, np.arange(tokens)):
            raise ValueError("positions: PredictiveDelta expects 0, 1, ..., got others")
        for name, array in (("keys", one.keys), ("values", one.values)):
            checks.finite(name, array, ("head", "token", "channel"))
    return (len(layers), heads, d, dv), np.dtype(key_type)


def at_position(layers: list[Layer], position: int) -> list[TokenKV]:
    return [TokenKV(*(np.asarray(a[:, position], np.float64) for a in (one.keys, one.values))) for one in layers]


def rebuilt(expected: Prediction, residuals: Sequence[Pair], dtype: np.dtype[Any]) -> list[TokenKV]:
    kept: list[TokenKV] = []
    for i, (key_residual, value_residual) in enumerate(residuals):
        keys = cast(expected.keys(i, kept) + key_residual, dtype)
        kept.append(TokenKV(keys, cast(expected.values(i, kept, keys) + value_residual, dtype)))
    return kept


def cast(x: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    most = largest(dtype)
    return np.clip(np.asarray(x, np.float64), -most, most).astype(dtype)


def surprisal(law: NDArray[np.int64] | None, token: int, vocabulary: int) -> float:
    if law is None:
        return math.log2(vocabulary)
    weight = int(law[token])
    return min(LEAST_LIKELY, math.log2(int(law.sum()) / weight)) if weight else LEAST_LIKELY


def as_layer(residuals: Sequence[Pair]) -> Layer:
    return Layer(*(np.stack([np.asarray(pair[side], np.float32) for pair in residuals], axis=1) for side in (0, 1)))


def decoded_layers(held: list[list[TokenKV]], head: Head) -> list[Decoded]:
    _, heads, d, dv = head.sizes
    out: list[Decoded | None] = [None] * len(head.shapes)
    for i, place in enumerate(ascending(head.shapes)):
        keys, values = (
            np.stack([getattr(kv[i], name) for kv in held], axis=1) if held else np.zeros((heads, 0, dim), head.dtype)
            for name, dim in (("keys", d), ("values", dv))
        )
        out[place] = head.shapes[place].decoded(keys, values)
    return [one for one in out if one is not None]
