"""KVQuant (arXiv 2401.18079): keys by channel before RoPE, values by token, non-uniform levels, outliers and sinks apart.

Fitted offline, for each layer (index) of the calibration, without its first `sinks` tokens; o is the share of outliers:

    keys      x = R_p^T k, RoPE undone (rotary.py).  For each head and channel c:  low_c, high_c = quantiles o/2 and 1 - o/2 of x_c,
              rounded outward to float32;   z_c, s_c = (high_c +- low_c) / 2;   a = (x - z_c) / s_c in [-1, 1] but for outliers
    levels    L = argmin sum_i F_i s_i^2 min_k (a_i - L_k)^2, one table of 2^b for the keys of a layer and one for its values (nuq.py):
              s_i a_i is the number itself, so this is the paper's sum_i F_i (x_i - x^_i)^2

F is the Fisher information of channel c, from the extras "key_fisher_pre_rope" ("key_fisher", averaged over the channels that a
rotation mixes) and "value_fisher" where all calibration layers of that index hold them; else F = 1, and the squared error counts as
it is: large channels and tokens weigh as their squared range. `fisher` says which. Section 3 of the paper.

Online, for keys, and for the values of one token and head:

    keys      outlier: x < low_c or x > high_c;        code of (x - z_c) / s_c;           x^ = z_c + s_c L^[code], then R_p
    values    outliers: at most m = floor(o d + 1/2) numbers are left out, as many large ones as small ones or as makes the range of
              the others the least; then zero = min, scale >= max - min as minmax.py stores them;
              code of (x - zero) / (scale/2) - 1;      x^ = zero + (scale/2) (1 + L^[code])

Outliers are kept in the element type (float64: in float32), keys before RoPE; their places as gaps (places.py). The first `sinks`
tokens are kept as they are, bit for bit. All arithmetic is elementwise in float64, in the order written, from float32 numbers: any
machine that rounds as IEEE 754 says has the same codes and the same x^.

Against the paper: values are grouped by token *and head* (heads are coded apart), so their outliers are m of each head's vector and
the ranges are narrower than over all heads of a token; k-means is optimal; the released code (SqueezeAILab/KVQuant) weighs a_i by F_i
without s_i^2.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer, Rope
from reference import arguments, layer_states, memory, minmax, nuq, packing
from reference import calibration as calibrations
from reference.codec import Appender, Codec, Layers
from reference.errors import StateMismatch
from reference.full import _numbers, _token_major
from reference.kept import Kept
from reference.places import Places, read_places
from reference.rotary import Rotary, read_rope, rotary, write_rope
from reference.shape import MOST_CHANNELS, MOST_HEADS, Shape, _array
from reference.stream import Part, Reader, varint
from reference.vectors import Float32, Float64, blocks, largest, refuse

__all__ = ["KVQuant", "LayerTables"]

MOST_SINKS = 1 << 20
MOST_INDEX = 1 << 32


@dataclass(frozen=True, eq=False)
class LayerTables:
    """What was fitted for one layer. low, high: (kv_heads, head_dim) float32, of keys before RoPE; rope: as the layers had it.

    key_levels, value_levels: tables of all heads. fisher: whether they were weighted by the Fisher information of keys, of values.
    """

    index: int | None
    value_dim: int
    rope: Rope | None
    low: Float32
    high: Float32
    key_levels: nuq.Levels
    value_levels: nuq.Levels
    fisher: tuple[bool, bool]

    @property
    def kv_heads(self) -> int:
        return int(self.low.shape[0])

    @property
    def head_dim(self) -> int:
        return int(self.low.shape[1])

    @functools.cached_property
    def rotary(self) -> Rotary | None:
        return None if self.rope is None else rotary(self.rope)

    @functools.cached_property
    def centre(self) -> Float64:
        """z (kv_heads, head_dim)."""
        return (self.high.astype(np.float64) + self.low) / 2

    @functools.cached_property
    def half_range(self) -> Float64:
        """s (kv_heads, head_dim)."""
        return (self.high.astype(np.float64) - self.low) / 2

    def write(self, before: Rope | None) -> bytes:
        """`before`: the rope of the layer before this one, written once."""
        sizes = (0 if self.index is None else self.index + 1, self.kv_heads, self.head_dim, self.value_dim)
        flags = bytes([self.fisher[0] | self.fisher[1] << 1])
        turn = b"\x00"
        if self.rope is not None:
            turn = b"\x02" if self.rope == before else b"\x01" + write_rope(self.rope)
        ends = self.low.astype("<f4").tobytes() + self.high.astype("<f4").tobytes()
        return b"".join([*map(varint, sizes), flags, turn, ends, self.key_levels.write(), self.value_levels.write()])

    @classmethod
    def read(cls, reader: Reader, bits: int, before: Rope | None) -> LayerTables:
        start = reader.offset
        index = reader.varint("layer index", MOST_INDEX)
        heads, head_dim = reader.varint("kv_heads", MOST_HEADS), reader.varint("head_dim", MOST_CHANNELS)
        value_dim = reader.varint("value_dim", MOST_CHANNELS)
        if not (heads and head_dim and value_dim):
            reader.fail("state: expected heads and channels", start)
        start = reader.offset
        flags, turn = reader.u8("flags"), reader.u8("kind of rope")
        if flags > 3 or turn > 2 or (turn == 2 and (before is None or before.rotated > head_dim)):
            reader.fail(f"state: unexpected flags {flags} or kind of rope {turn}", start)
        rope = (None, None, before)[turn] if turn != 1 else read_rope(reader, head_dim)
        start = reader.offset
        ends = reader.array("<f4", 2 * heads * head_dim, "thresholds of key channels").astype(np.float32)
        low, high = ends.reshape(2, heads, head_dim)
        if not (np.isfinite(ends).all() and (low <= high).all()):
            reader.fail("thresholds of key channels: expected finite numbers, low <= high", start)
        levels = [nuq.read(reader, bits, f"levels of {side}") for side in ("keys", "values")]
        fisher = (bool(flags & 1), bool(flags & 2))
        return cls(index - 1 if index else None, value_dim, rope, low, high, levels[0], levels[1], fisher)


@dataclass(frozen=True)
class KVQuant(Codec):
    """KVQuant with codes of `bits` bits, 1 to 8 (the paper: 2, 3, 4). Made by `KVQuant.fit`; a bare one encodes nothing.

    outliers: share of numbers kept apart, 0 <= outliers < 1/2 (the paper: .01). sinks: tokens at the start kept as they are (1).
    levels: "nuq", or "uniform" for min/max quantisation. q_norm: mean and spread of quantised numbers restored; None: at 2 bits and
    fewer. pre_rope: keys before RoPE, or as they are, for comparison; a layer whose rope is None carries no rotation, and its keys are taken as
    they are.
    tables: what `fit` found, by layer; the codec's state.

    Numbers are taken in float32 and come back in the element type they came in, at most its largest number; sinks bit for bit, outliers
    of values exactly, those of keys to the precision of the element type. `encode` raises ValueError for NaN, inf, and float64 numbers that
    float32 cannot hold, with head, token and channel; StateMismatch for a layer of an index, of heads, dimensions or a rope that it was not
    fitted to.

    Held, in bits: b for each number of the tokens behind the sinks; for each value vector 32 (zero and scale; float32 and float64: 48);
    about 8.7 + 16 (or 32) for each outlier there really is; sinks; a header. At b = 2 and 16-bit elements keys of the calibrated kind hold
    2.25, values of 128 channels 2.44, of 64 channels, whose one outlier is 1.6 %, 2.88. The state is apart: `state_bytes`.

    Pitfalls: key thresholds are those of the calibration; other texts may have more outliers, and pay for them. A key channel that was
    constant in calibration makes an outlier of every other number. Without a rope on the layer, keys are not taken before RoPE.
    """

    bits: int = 3
    outliers: float = 0.01
    sinks: int = 1
    levels: Literal["nuq", "uniform"] = "nuq"
    q_norm: bool | None = None
    pre_rope: bool = True
    tables: tuple[LayerTables, ...] = field(default=(), repr=False, compare=False, metadata={"state": True})

    streaming = True
    part_names = (
        "shape", "key sinks", "value sinks", "key codes", "key places", "key outliers",
        "value zeros", "value scales", "value codes", "value places", "value outliers",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, least, most in (("bits", 1, 8), ("sinks", 0, MOST_SINKS)):
            arguments.whole(name, getattr(self, name), least, most)
        if not 0 <= self.outliers < 0.5:
            raise ValueError(f"outliers: expected 0 <= outliers < 1/2, got {self.outliers}")
        arguments.word("levels", self.levels, ("nuq", "uniform"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVQuant) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)

    @classmethod
    def fit(
        cls,
        calibration: Layers,
        bits: int = 3,
        outliers: float = 0.01,
        sinks: int = 1,
        *,
        levels: Literal["nuq", "uniform"] = "nuq",
        q_norm: bool | None = None,
        pre_rope: bool = True,
    ) -> KVQuant:
        """Fitted to a Cache or a list of Layers; several layers of one index (texts) are pooled. Layers without index: one at most.

        ValueError if a layer has no token behind the sinks, for numbers that float32 cannot hold, and for a negative Fisher information.
        """
        bare = cls(bits, outliers, sinks, levels, q_norm, pre_rope)
        tables = tuple(bare._fit(index, layers) for index, layers in calibrations.by_index(calibration))
        return cls(bits, outliers, sinks, levels, q_norm, pre_rope, tables)

    @property
    def fisher(self) -> dict[int | None, tuple[bool, bool]]:
        """Layer index -> whether the levels of its keys and of its values were weighted by their Fisher information."""
        return {table.index: table.fisher for table in self.tables}

    # -- fitting -------------------------------------------------------------------------------------------------------

    def _fit(self, index: int | None, layers: list[Layer]) -> LayerTables:
        first = layers[0]
        rope = first.rope if self.pre_rope else None
        turn = None if rope is None else rotary(rope)
        keys, values = [], []
        for layer in layers:
            for name in ("keys", "values"):
                refuse(name, getattr(layer, name), "KVQuant")
            x = _single(layer.keys[:, self.sinks :])
            positions = layer.positions[self.sinks :, None]
            keys.append(x.astype(np.float64) if turn is None else turn.undo(x, positions))
            values.append(_single(layer.values[:, self.sinks :]))
        every_key, every_value = np.concatenate(keys), np.concatenate(values)
        if len(every_key) == 0:
            raise ValueError(f"calibration: expected a token behind the {self.sinks} sinks in layer {index}, got none")
        low, high = _outward(every_key, self.outliers)
        # levels are fitted to what the encoder will see: the same code, with any table
        draft = nuq.uniform(self.bits)
        tables = LayerTables(index, first.value_dim, rope, low, high, draft, draft, (False, False))
        key_fisher, value_fisher = (
            calibrations.key_fisher(layers, rope),
            calibrations.mean_extra(layers, "value_fisher"),
        )
        side = _Keys(self, tables)
        inside = ~side.outside(every_key)
        key_levels = self._levels(side.normalised(every_key), tables.half_range[None], key_fisher, inside)
        a, outside, _, stored = _Values(self, tables).normalised(every_value)
        value_levels = self._levels(a, minmax.scales(stored) / 2, value_fisher, ~outside)
        fisher = (key_fisher is not None, value_fisher is not None)
        return LayerTables(index, first.value_dim, rope, low, high, key_levels, value_levels, fisher)

    def _levels(self, a: Float64, half_range: Float64, fisher: Float64 | None, inside: NDArray[np.bool_]) -> nuq.Levels:
        """Levels for numbers a (n, heads, d), their half ranges and Fisher information broadcast against them; constant groups say nothing."""
        inside = inside & (half_range > 0)
        unit = half_range / max(float(half_range.max()), np.finfo(np.float64).tiny)
        weights = (
            unit * unit * (1.0 if fisher is None else fisher / max(float(fisher.max()), np.finfo(np.float64).tiny))
        )
        weights = np.broadcast_to(weights, a.shape)[inside]
        q_norm = self.bits <= 2 if self.q_norm is None else self.q_norm
        return nuq.fit(np.clip(a[inside], -1, 1), weights, self.bits, self.levels == "nuq", q_norm)

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_parts(self) -> list[Part]:
        return [layer_states.write_layers(self.tables)]

    @classmethod
    def from_state(cls, arguments: dict[str, Any], parts: list[Reader]) -> KVQuant:
        def read(bare: KVQuant, reader: Reader, before: Rope | None) -> LayerTables:
            return LayerTables.read(reader, bare.bits, before)

        return cls(**arguments, tables=layer_states.read_layers(cls, arguments, parts, read))

    # -- streams -------------------------------------------------------------------------------------------------------

    def encode_parts(self, data: Layer) -> list[Part]:
        return self.start(data).parts()

    def encode_at(self, data: Layer, kept: Kept) -> list[Part]:
        own = None if kept.places is None else kept.positions(data.tokens)
        return self._start(data, own).parts()

    def start(self, layer: Layer) -> Appender:
        return self._start(layer, None)

    def _start(self, layer: Layer, positions: NDArray[np.int64] | None) -> _KVQuantAppender:
        table = self.fitted_to(layer)
        appender = _KVQuantAppender(self, Shape.of(layer), table)
        appender.take_at(layer.keys, layer.values, layer.positions if positions is None else positions)
        return appender

    def fitted_to(self, layer: Layer) -> LayerTables:
        """What was fitted for the layer; StateMismatch for an index, heads, dimensions or a rope that nothing was fitted to."""
        table: LayerTables = calibrations.fitted({one.index: one for one in self.tables}, layer, "KVQuant")
        own = (layer.kv_heads, layer.head_dim, layer.value_dim)
        if own != (table.kv_heads, table.head_dim, table.value_dim):
            raise StateMismatch(
                f"layer: KVQuant was fitted to {table.kv_heads} heads of {table.head_dim} and {table.value_dim} channels "
                f"in layer {layer.index}, got {own[0]} of {own[1]} and {own[2]}"
            )
        if self.pre_rope and layer.rope != table.rope:
            raise StateMismatch(f"rope: KVQuant was fitted to {table.rope} in layer {layer.index}, got {layer.rope}")
        return table

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        return self._restored(parts, None)

    def decode_at(self, parts: list[Reader], kept: Kept) -> Decoded:
        return self._restored(parts, None if kept.places is None else kept)

    def _restored(self, parts: list[Reader], kept: Kept | None) -> Decoded:
        opened = self._opened(parts, kept)
        shape, table = opened.shape, opened.table
        sides: list[tuple[_Keys | _Values, int, list[Reader], np.dtype[Any], NDArray[Any]]] = [
            (_Keys(self, table), shape.head_dim, parts[3:6], shape.key_dtype, opened.key_sinks),
            (_Values(self, table), shape.value_dim, parts[8:11], shape.value_dtype, opened.value_sinks),
        ]
        arrays = []
        for side, dim, readers, dtype, exact in sides:
            read = _read_codes(side.name, readers, opened.rows, dim, self.bits, dtype)
            out = memory.empty((shape.kv_heads, shape.tokens, dim), dtype)
            out[:, : opened.sinks] = exact
            own_ends = (opened.positions,) if isinstance(side, _Keys) else opened.ends
            _decode_side(side, read, own_ends, largest(dtype), out[:, opened.sinks :])
            arrays.append(out)
        return shape.decoded(*arrays)

    def _opened(self, parts: list[Reader], kept: Kept | None) -> _Opened:
        """All but codes, places and outliers, whose Readers are left at their starts; the sizes of the codes are right."""
        shape = Shape.read(parts[0])
        table = next((one for one in self.tables if one.index == shape.index), None)
        if table is None:
            parts[0].fail(f"shape: KVQuant was not fitted to a layer of index {shape.index}")
        own = (shape.kv_heads, shape.head_dim, shape.value_dim)
        if own != (table.kv_heads, table.head_dim, table.value_dim) or (
            kept is not None and (len(kept.places or ()) != shape.kv_heads or max(kept.counts(0, 0)) > shape.tokens)
        ):
            parts[0].fail("shape: expected the heads and dimensions that KVQuant was fitted to")
        sinks = min(self.sinks, shape.tokens)
        rows = shape.kv_heads * (shape.tokens - sinks)
        first = Shape(shape.kv_heads, sinks, *own[1:], shape.key_type, shape.value_type, None, range(sinks))
        key_sinks = _numbers(parts[1], "key sinks", first, shape.head_dim, shape.key_dtype)
        value_sinks = _numbers(parts[2], "value sinks", first, shape.value_dim, shape.value_dtype)
        for name, dim, codes in (("key", shape.head_dim, parts[3]), ("value", shape.value_dim, parts[8])):
            if codes.remaining != (expected := packing.packed_size(rows * dim, self.bits)):
                codes.fail(f"{name} codes: expected {expected} bytes, got {codes.remaining}")
        ends = _Values.read_ends(parts[6], parts[7], rows, shape.value_dtype)
        positions = (_array(shape.positions) if kept is None else kept.positions(shape.tokens))[..., sinks:]
        return _Opened(shape, table, sinks, rows, key_sinks, value_sinks, ends, positions)

    def decode_flops(self, stream: bytes) -> int:
        """A product and a sum for each number behind the sinks; 3 more for each rotated channel, 1 more where attention_scaling is not 1."""
        from reference.inspection import inspect

        ropes = {table.index: table.rope for table in self.tables}
        total = 0
        for shape in inspect(stream).shapes:
            rope = ropes.get(shape.index)
            turned = 0 if rope is None else rope.rotated * (3 + (rope.attention_scaling != 1))
            rows = shape.kv_heads * max(0, shape.tokens - self.sinks)
            total += rows * (2 * (shape.head_dim + shape.value_dim) + turned)
        return total


@dataclass(frozen=True)
class _Opened:
    """A stream but for its codes and outliers. sinks: tokens kept exact; rows: vectors behind them.

    ends: zeros and half scales of the values, (rows,) each. positions: of the tokens behind the sinks, (n,) or by head (kv_heads, n).
    """

    shape: Shape
    table: LayerTables
    sinks: int
    rows: int
    key_sinks: NDArray[Any]
    value_sinks: NDArray[Any]
    ends: tuple[Float64, Float64]
    positions: NDArray[np.int64]


def _outward(x: Float64, outliers: float) -> tuple[Float32, Float32]:
    """Quantiles outliers/2 and 1 - outliers/2 of x (n, heads, d) over its first axis, in float32, none inside of the true one."""
    ends = np.quantile(x, [outliers / 2, 1 - outliers / 2], axis=0)
    out = []
    for end, towards in zip(ends, (-np.inf, np.inf)):
        near = end.astype(np.float32)
        short = near > end if towards < 0 else near < end
        out.append(np.where(short, np.nextafter(near, np.float32(towards)), near) + np.float32(0))
    limit = np.finfo(np.float32).max
    return np.clip(out[0], -limit, limit), np.clip(out[1], -limit, limit)


# -- one side: numbers (tokens, kv_heads, d) in float64 to codes, and back ------------------------------------------------


class _Keys:
    """Keys of a layer, with the thresholds of its channels."""

    name = "key"

    def __init__(self, codec: KVQuant, tables: LayerTables) -> None:
        self.tables, self.levels, self._sparse = tables, tables.key_levels, codec.outliers > 0

    def outside(self, x: Float64) -> NDArray[np.bool_]:
        """Which of x (n, heads, d), before RoPE, are outliers."""
        if not self._sparse:
            return np.zeros(x.shape, np.bool_)
        return np.asarray((x < self.tables.low) | (x > self.tables.high))

    def normalised(self, x: Float64) -> Float64:
        """a = (x - z) / s, 0 where s = 0."""
        s = self.tables.half_range
        return np.asarray((x - self.tables.centre) / np.where(s > 0, s, 1.0) * (s > 0))

    def encode(self, x: Float32, positions: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.bool_], Float64]:
        """Keys (n, heads, d) at positions (n, heads or 1) -> codes, outliers, and the keys before RoPE."""
        turn = self.tables.rotary
        before = x.astype(np.float64) if turn is None else turn.undo(x, positions)
        return self.levels.codes(self.normalised(before)), self.outside(before), before

    def decode(self, codes: NDArray[np.uint8], places: NDArray[np.int64], outliers: Float32, positions: Any) -> Float64:
        """Codes (n, heads, d), outliers at places in them, positions (n, heads or 1) -> keys (n, heads, d)."""
        x = self.tables.centre + self.tables.half_range * self.levels.numbers(codes)
        x.reshape(-1)[places] = outliers
        turn = self.tables.rotary
        return x if turn is None else turn.apply(x, positions)


class _Values:
    """Values of a layer: each vector has a zero and a scale of its own."""

    name = "value"

    def __init__(self, codec: KVQuant, tables: LayerTables) -> None:
        self.tables, self.levels = tables, tables.value_levels
        #: m, numbers of a vector that may be left out
        self.most = int(np.floor(codec.outliers * tables.value_dim + 0.5))

    def normalised(self, x: Float32) -> tuple[Float64, NDArray[np.bool_], Float32, NDArray[np.uint16]]:
        """Values (n, heads, d) -> a, outliers, and of each vector its zero and the code of its scale, (n, heads, 1)."""
        if self.most:
            d, m = x.shape[-1], self.most
            ordered = np.sort(x, axis=-1)
            lows, highs = ordered[..., : m + 1], ordered[..., d - 1 - m :]
            # j small and m - j large numbers are left out; the first of equal ranges
            j = np.argmin(highs.astype(np.float64) - lows, axis=-1)[..., None]
            low, high = np.take_along_axis(lows, j, axis=-1), np.take_along_axis(highs, j, axis=-1)
        else:
            low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
        outside = (x < low) | (x > high)
        low = low + np.float32(0)
        stored = minmax.scale_codes(high.astype(np.float64) - low, 1)
        half = minmax.scales(stored) / 2
        return (x.astype(np.float64) - low) / np.where(half > 0, half, 1.0) - 1.0, outside, low, stored

    def encode(self, x: Float32) -> tuple[NDArray[np.uint8], NDArray[np.bool_], Float32, NDArray[np.uint16]]:
        """Values (n, heads, d) -> codes, outliers, zeros, codes of scales."""
        a, outside, low, stored = self.normalised(x)
        return self.levels.codes(a), outside, low, stored

    @staticmethod
    def read_ends(zeros: Reader, scales: Reader, rows: int, dtype: np.dtype[Any]) -> tuple[Float64, Float64]:
        """Zeros and half scales (rows,) in float64, from all of both readers."""
        low = minmax.read_zeros(zeros, rows, dtype, "value zeros").astype(np.float64)
        half = minmax.scales(minmax.read_scales(scales, rows, "value scales")) / 2
        zeros.end("value zeros")
        scales.end("value scales")
        return low, half

    def decode(
        self, codes: NDArray[np.uint8], places: NDArray[np.int64], outliers: Float32, low: Float64, half: Float64
    ) -> Float64:
        """Codes (n, heads, d), outliers at places in them, zeros and half scales (n, heads, 1) -> values."""
        x = low + half * (1.0 + self.levels.numbers(codes))
        x.reshape(-1)[places] = outliers
        return x


# -- streams -----------------------------------------------------------------------------------------------------------


class _Coded:
    """Codes, places and outliers of one side so far."""

    def __init__(self, bits: int, dtype: np.dtype[Any]) -> None:
        self.kind = minmax.zero_dtype(dtype)
        self._codes, self._places = packing.Packer(bits), Places()
        self._outliers: list[bytes] = []

    def keep(self, codes: NDArray[np.uint8], outside: NDArray[np.bool_], numbers: NDArray[Any]) -> None:
        self._codes.append(np.where(outside, 0, codes))
        self._places.append(outside)
        with np.errstate(over="ignore"):  # keys before RoPE may be longer than any float32: limited below
            apart = numbers[outside].astype(np.float32)
        limit = largest(self.kind)
        apart = np.clip(apart, -limit, limit) + np.float32(0)
        self._outliers.append(apart.astype(self.kind).astype(self.kind.newbyteorder("<")).tobytes())

    def parts(self) -> list[Part]:
        return [self._codes.bytes(), self._places.bytes(), b"".join(self._outliers)]


class _KVQuantAppender(Appender):
    def __init__(self, codec: KVQuant, shape: Shape, tables: LayerTables) -> None:
        super().__init__(codec, shape)
        self._sinks_left = codec.sinks
        self._sinks: tuple[list[bytes], list[bytes]] = ([], [])
        self._sides = _Keys(codec, tables), _Values(codec, tables)
        self._coded = _Coded(codec.bits, shape.key_dtype), _Coded(codec.bits, shape.value_dtype)
        self._zeros: list[bytes] = []
        self._scales: list[bytes] = []

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        raise NotImplementedError  # take_at needs the positions

    def take_at(self, keys: NDArray[Any], values: NDArray[Any], positions: NDArray[np.int64]) -> None:
        """positions (n,), or by head (kv_heads, n)."""
        for name, array in (("keys", keys), ("values", values)):
            refuse(name, array, "KVQuant")
        heads, tokens = keys.shape[:2]
        exact = min(self._sinks_left, tokens)
        self._sinks_left -= exact
        for held, array in zip(self._sinks, (keys, values)):
            held.append(_token_major(array[:, :exact]))
        by_token = positions[:, None] if positions.ndim == 1 else positions.T
        kind = self._coded[1].kind
        for block in _behind(exact, tokens, heads):
            x, y = (_single(array[:, block]) for array in (keys, values))
            self._coded[0].keep(*self._sides[0].encode(x, by_token[block]))
            codes, outside, zeros, scales = self._sides[1].encode(y)
            self._coded[1].keep(codes, outside, y)
            self._zeros.append(zeros.astype(kind).astype(kind.newbyteorder("<")).tobytes())
            self._scales.append(scales.astype("<u2").tobytes())

    def parts(self) -> list[Part]:
        sinks = [b"".join(held) for held in self._sinks]
        ends = [b"".join(self._zeros), b"".join(self._scales)]
        return [self.shape.write(), *sinks, *self._coded[0].parts(), *ends, *self._coded[1].parts()]


def _single(array: NDArray[Any]) -> Float32:
    """(heads, n, d) -> (n, heads, d) float32."""
    return np.ascontiguousarray(array.transpose(1, 0, 2), dtype=np.float32)


def _behind(first: int, tokens: int, heads: int) -> Iterable[slice]:
    return (slice(first + b.start, first + b.stop) for b in blocks(tokens - first, heads))


def _read_codes(
    name: str, readers: list[Reader], rows: int, dim: int, bits: int, dtype: np.dtype[Any]
) -> tuple[NDArray[np.uint8], NDArray[np.int64], Float32]:
    """Codes (rows, dim), places of outliers among them, the outliers; CorruptStream unless they fit together."""
    places = read_places(readers[1], rows * dim, f"{name} places")
    outliers = minmax.read_zeros(readers[2], places.size, dtype, f"{name} outliers")
    readers[2].end(f"{name} outliers")
    start = readers[0].offset
    codes = packing.unpack(readers[0], rows * dim, bits)
    named = codes[places] != 0
    if named.any():
        at = int(places[int(np.argmax(named))])
        readers[0].fail(f"{name} codes: expected 0 at outlier {at}, got {codes[at]}", start + at * bits // 8)
    return codes.reshape(rows, dim), places, outliers


def _decode_side(
    side: _Keys | _Values,
    read: tuple[NDArray[np.uint8], NDArray[np.int64], Float32],
    ends: tuple[Any, ...],
    limit: float,
    out: NDArray[Any],
) -> None:
    """-> out (heads, n, d). ends: positions (n,) or (heads, n) of keys; zeros and half scales (n heads,) of values."""
    codes, places, outliers = read
    heads, tokens, dim = out.shape
    for block in blocks(tokens, heads):
        rows = slice(block.start * heads, block.stop * heads)
        first, last = np.searchsorted(places, (rows.start * dim, rows.stop * dim))
        own = codes[rows].reshape(-1, heads, dim), places[first:last] - rows.start * dim, outliers[first:last]
        if isinstance(side, _Keys):
            (positions,) = ends
            x = side.decode(*own, positions[block, None] if positions.ndim == 1 else positions[:, block].T)
        else:
            x = side.decode(*own, *(end[rows].reshape(-1, heads, 1) for end in ends))
        single = np.clip(x, -limit, limit).astype(np.float32) + np.float32(0)
        out[:, block] = single.transpose(1, 0, 2)
