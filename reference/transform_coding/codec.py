"""The codec around a transform coder: state by layer, exact tokens at both ends, streams, appenders.

    part "shape"           reference.shape
    part "exact keys"      tokens kept as they are, the `sinks` first and the `window` last: as in Full, keys after RoPE
    part "exact values"    alike
    other parts            of the coder, for the tokens between

A token's codes depend on nothing but the token, so what leaves the window is coded as it would have been in one go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer, Rope
from reference import calibration as calibrations
from reference import layer_states
from reference.codec import Appender, Codec
from reference.errors import StateMismatch
from reference.full import _numbers, _token_major
from reference.kept import Kept
from reference.rotary import read_rope, write_rope
from reference.shape import MOST_CHANNELS, MOST_HEADS, Shape, _array
from reference.stream import Part, Reader, varint
from reference.transform_coding import stacked

__all__ = ["LayerCoder", "LayerKind", "StackedCoder", "TransformCodec"]

Float64 = NDArray[np.float64]
MOST_INDEX = 1 << 32
#: bytes of a basis for each of its rows, at least
LEAST_ROW = 1 + 4 + 2


class StackedCoder(Protocol):
    """Codes stacked vectors: EntropyCoder, FixedCoder."""

    def encode(self, x: Float64) -> list[Part]: ...
    def decode(self, parts: list[Reader], tokens: int, out: Float64) -> None: ...
    def flops(self, tokens: int) -> int: ...
    def write(self) -> bytes: ...


@dataclass(frozen=True, eq=False)
class LayerKind:
    """Which layer something was fitted to. rope None: keys are taken as they are."""

    index: int | None
    kv_heads: int
    head_dim: int
    value_dim: int
    rope: Rope | None

    @classmethod
    def of(cls, layer: Layer) -> Self:
        return cls(layer.index, layer.kv_heads, layer.head_dim, layer.value_dim, layer.rope)

    def with_coder(self, coder: StackedCoder) -> LayerCoder:
        """What was fitted for this layer, its coded tokens weighing as much as exact ones."""
        return LayerCoder(self.index, *self.sizes, self.rope, np.zeros(self.kv_heads, np.float32), coder)

    @property
    def order(self) -> int:
        """What layers are sorted by."""
        return -1 if self.index is None else self.index

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.kv_heads, self.head_dim, self.value_dim

    @property
    def width(self) -> int:
        """Entries of a stacked vector."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    def check(self, layer: Layer, codec: str) -> None:
        """StateMismatch unless the layer has these heads, dimensions and rope."""
        own = (layer.kv_heads, layer.head_dim, layer.value_dim)
        if own != self.sizes:
            raise StateMismatch(
                f"layer: {codec} was fitted to {self.kv_heads} heads of {self.head_dim} and {self.value_dim} channels in layer "
                f"{layer.index}, got {own[0]} of {own[1]} and {own[2]}"
            )
        if self.rope is not None and layer.rope != self.rope:
            raise StateMismatch(f"rope: {codec} was fitted to {self.rope} in layer {layer.index}, got {layer.rope}")

    def rope_flops(self) -> int:
        """Of one token: 3 for each rotated channel of its keys, 1 more where attention_scaling is not 1."""
        return 0 if self.rope is None else self.kv_heads * self.rope.rotated * (3 + (self.rope.attention_scaling != 1))

    def write_kind(self, before: Rope | None) -> bytes:
        """`before`: the rope of the layer before this one, written once."""
        turn = b"\x00"
        if self.rope is not None:
            turn = b"\x02" if self.rope == before else b"\x01" + write_rope(self.rope)
        return b"".join([*map(varint, (0 if self.index is None else self.index + 1, *self.sizes)), turn])

    @classmethod
    def read_kind(cls, reader: Reader, before: Rope | None) -> tuple[Any, ...]:
        """The fields in order."""
        start = reader.offset
        index = reader.varint("layer index", MOST_INDEX)
        heads, head_dim = reader.varint("kv_heads", MOST_HEADS), reader.varint("head_dim", MOST_CHANNELS)
        value_dim = reader.varint("value_dim", MOST_CHANNELS)
        if not (heads and head_dim and value_dim):
            reader.fail("state: expected heads and channels", start)
        start = reader.offset
        turn = reader.u8("kind of rope")
        if turn > 2 or (turn == 2 and (before is None or before.rotated > head_dim)):
            reader.fail(f"state: unexpected kind of rope {turn}", start)
        rope = (None, None, before)[turn] if turn != 1 else read_rope(reader, head_dim)
        return index - 1 if index else None, heads, head_dim, value_dim, rope


@dataclass(frozen=True, eq=False)
class LayerCoder(LayerKind):
    """What was fitted for one layer. log_weights (kv_heads,): of coded tokens beside exact ones."""

    log_weights: NDArray[np.float32]
    coder: StackedCoder

    def flops(self, tokens: int) -> int:
        """Additions and multiplications of decoding so many tokens."""
        return self.coder.flops(tokens) + tokens * self.rope_flops()

    def write(self, before: Rope | None) -> bytes:
        """`before`: the rope of the layer before this one, written once."""
        return b"".join([self.write_kind(before), self.log_weights.astype("<f4").tobytes(), self.coder.write()])

    @classmethod
    def read(cls, reader: Reader, read_coder: Any, before: Rope | None) -> LayerCoder:
        kind = cls.read_kind(reader, before)
        start = reader.offset
        log_weights = reader.array("<f4", kind[1], "log-weights").astype(np.float32)
        if not np.isfinite(log_weights).all():
            reader.fail("log-weights: expected finite numbers", start)
        index, heads, head_dim, value_dim, rope = kind
        width = heads * (head_dim + value_dim)
        # a coder has every entry in a basis, with its place, mean and exponent: before anything of that width is made
        if width * LEAST_ROW > reader.remaining:
            reader.fail(
                f"state: expected every entry of {width} in one unit, but {reader.remaining} bytes remain", start
            )
        coder = read_coder(reader, width)
        return cls(index, heads, head_dim, value_dim, rope, log_weights, coder)


class TransformCodec(Codec):
    """Base of the layer-wise transform coders: a frozen dataclass with fields `sinks`, `window` and `layers` (the state).

    coder_parts: names of the coder's parts. read_coder(reader, width): a coder from a state.
    """

    streaming: ClassVar[bool] = True
    coder_parts: ClassVar[tuple[str, ...]] = ()
    sinks: int
    window: int
    layers: tuple[LayerCoder, ...]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.part_names = ("shape", "exact keys", "exact values", *cls.coder_parts)

    def read_coder(self, reader: Reader, width: int) -> StackedCoder:
        raise NotImplementedError

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_parts(self) -> list[Part]:
        return [layer_states.write_layers(self.layers)]

    @classmethod
    def from_state(cls, arguments: dict[str, Any], parts: list[Reader]) -> Self:
        def read(bare: Self, reader: Reader, before: Rope | None) -> LayerCoder:
            return LayerCoder.read(reader, bare.read_coder, before)

        return cls(**arguments, layers=layer_states.read_layers(cls, arguments, parts, read))  # type: ignore[call-arg, arg-type]

    def _fitted(self, layer: Layer) -> LayerCoder:
        one: LayerCoder = calibrations.fitted({one.index: one for one in self.layers}, layer, self.codec_id)
        one.check(layer, self.codec_id)
        return one

    # -- streams -------------------------------------------------------------------------------------------------------

    def encode_parts(self, data: Layer) -> list[Part]:
        return self._coded(Shape.of(data), data.keys, data.values, self._fitted(data), data.positions)

    def encode_at(self, data: Layer, kept: Kept) -> list[Part]:
        positions = data.positions if kept.places is None else kept.positions(data.tokens)
        return self._coded(Shape.of(data), data.keys, data.values, self._fitted(data), positions)

    def _coded(
        self, shape: Shape, keys: NDArray[Any], values: NDArray[Any], fitted: LayerCoder, positions: NDArray[np.int64]
    ) -> list[Part]:
        x = stacked.stack(keys, values, fitted.rope, positions)
        first, last = stacked.exact_tokens(shape.tokens, self.sinks, self.window)
        exact = [_token_major(np.concatenate([array[:, :first], array[:, last:]], axis=1)) for array in (keys, values)]
        parts = fitted.coder.encode(x[first:last])
        return [shape.write(), *exact, *parts, *[b""] * (len(self.coder_parts) - len(parts))]

    def decode_flops(self, stream: bytes) -> int:
        """Of the coded tokens: the coder's, and 3 for each rotated channel of a key, 1 more where attention_scaling is not 1.

        KeyError for a layer that was not fitted.
        """
        from reference.inspection import inspect

        fitted = {one.index: one for one in self.layers}
        total = 0
        for shape in inspect(stream).shapes:
            first, last = stacked.exact_tokens(shape.tokens, self.sinks, self.window)
            total += fitted[shape.index].flops(last - first)
        return total

    def start(self, layer: Layer) -> Appender:
        return _TransformAppender(self, layer)

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        return self._decoded(parts, None)

    def decode_at(self, parts: list[Reader], kept: Kept) -> Decoded:
        return self._decoded(parts, None if kept.places is None else kept)

    def _decoded(self, parts: list[Reader], kept: Kept | None) -> Decoded:
        shape, fitted, first, last, keys, values = self._opened(parts, kept)
        # a coder has held its bytes against the number of tokens before this is touched
        x = _Lazy(last - first, fitted.width)
        fitted.coder.decode(parts[3:], last - first, x)  # type: ignore[arg-type]
        positions = _array(shape.positions) if kept is None else kept.positions(shape.tokens)
        k, v = stacked.unstack(
            x.array,
            shape.kv_heads,
            fitted.sizes[1:],
            (shape.key_dtype, shape.value_dtype),
            fitted.rope,
            positions[..., first:last],
        )
        both = [np.concatenate([e[:, :first], coded, e[:, first:]], axis=1) for e, coded in ((keys, k), (values, v))]
        return self._weighed(shape, fitted, first, last, *both)

    def _opened(
        self, parts: list[Reader], kept: Kept | None
    ) -> tuple[Shape, LayerCoder, int, int, NDArray[Any], NDArray[Any]]:
        """Shape, what was fitted, first and last coded token, exact keys and values; the coder's parts are yet to be read."""
        shape = Shape.read(parts[0])
        fitted = next((one for one in self.layers if one.index == shape.index), None)
        if fitted is None:
            parts[0].fail(f"shape: {self.codec_id} was not fitted to a layer of index {shape.index}")
        own = (shape.kv_heads, shape.head_dim, shape.value_dim)
        if own != fitted.sizes or (
            kept is not None and (len(kept.places or ()) != shape.kv_heads or max(kept.counts(0, 0)) > shape.tokens)
        ):
            parts[0].fail(f"shape: expected the heads and dimensions that {self.codec_id} was fitted to")
        first, last = stacked.exact_tokens(shape.tokens, self.sinks, self.window)
        apart = shape.tokens - (last - first)
        exact = Shape(shape.kv_heads, apart, *own[1:], shape.key_type, shape.value_type, None, range(apart))
        keys = _numbers(parts[1], "exact keys", exact, shape.head_dim, shape.key_dtype)
        values = _numbers(parts[2], "exact values", exact, shape.value_dim, shape.value_dtype)
        return shape, fitted, first, last, keys, values

    def _weighed(
        self, shape: Shape, fitted: LayerCoder, first: int, last: int, keys: NDArray[Any], values: NDArray[Any]
    ) -> Decoded:
        """All tokens, the coded ones with the log-weights that were fitted."""
        decoded = shape.decoded(keys, values)
        if not fitted.log_weights.any():
            return decoded
        log_weights = decoded.log_weights.copy()
        log_weights[:, first:last] = fitted.log_weights[:, None]
        return Decoded(decoded.keys, decoded.values, log_weights, decoded.positions, decoded.kept)


class _Lazy:
    """An array (tokens, width) that is allocated when it is first written to."""

    def __init__(self, tokens: int, width: int) -> None:
        self._shape = tokens, width
        self._array: Float64 | None = None

    @property
    def array(self) -> Float64:
        if self._array is None:
            self._array = np.zeros(self._shape)
        return self._array

    def __setitem__(self, key: Any, value: Any) -> None:
        self.array[key] = value


class _TransformAppender(Appender):
    """Holds the tokens themselves: blocks and the window end elsewhere when more come."""

    codec: TransformCodec

    def __init__(self, codec: TransformCodec, layer: Layer) -> None:
        super().__init__(codec, Shape.of(layer))
        self._fitted = codec._fitted(layer)
        stacked.finite(layer.keys, layer.values, self._fitted.rope)
        self._keys, self._values = [layer.keys], [layer.values]

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        stacked.finite(keys, values, self._fitted.rope)
        self._keys.append(keys.copy())
        self._values.append(values.copy())

    def parts(self) -> list[Part]:
        self._keys, self._values = [np.concatenate(self._keys, axis=1)], [np.concatenate(self._values, axis=1)]
        positions = _array(self.shape.positions)
        return self.codec._coded(self.shape, self._keys[0], self._values[0], self._fitted, positions)
