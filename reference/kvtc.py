"""KVTC (arXiv 2511.01815, ICLR 2026): PCA across all layers and heads, bits by dynamic programming, DEFLATE. For storage and transfer.

    x         the keys of a token before RoPE, of all layers and heads, as one vector; its values as another. Each on its own:
    basis     x = V z + mean,  V the first `rank` principal components of at most 4,096 calibration tokens, evenly spaced
    groups    runs of 16, 64 or 256 components of descending variance, b bits each, 0 <= b <= 8; for each token and group with b > 0
              16 bits of scale alpha = max |z_c|, and z^_c = alpha ((2 code + 1) / 2^b - 1)
    bits      dynamic programming over where groups end and their b:  min sum of squared errors of z^ on 512 calibration tokens,
              sum (b size + 16) <= bits x numbers;  components behind the last group are not coded
    DEFLATE   of the codes, component by component, all tokens of one together; scales, token by token, alike

`sinks` first and `window` last tokens are exact. A DEFLATE stream has no random access: all tokens are decoded at once.

Against the paper: PCA is exact instead of a randomised SVD, as at most 4,096 tokens are taken; scales are symmetric, without a shift, as z is
centred; errors are measured on samples, of uniform quantisers with levels at +-1/2 and no level 0; its groups may also have 1 or 1,024 components.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer
from reference import arguments, packing, stream
from reference import calibration as calibrations
from reference.codec import Codec, Layers, layers_of
from reference.entropy_coding import deflate, inflate
from reference.errors import CorruptStream, StateMismatch
from reference.full import _numbers, _token_major
from reference.kept import Kept
from reference.shape import Shape, _array
from reference.stream import Part, Reader, varint
from reference.transform_coding import stacked
from reference.transform_coding.basis import Basis, project
from reference.transform_coding.codec import LayerKind
from reference.transform_coding.fixed import UNIFORM_UNIT, rounded_up, uniform_points
from reference.vectors import norms, read_norms

__all__ = ["KVTC"]

Float64 = NDArray[np.float64]
Integers = NDArray[np.int64]

#: components of the smallest group, and sizes of groups in these
UNIT = 16
SIZES = (1, 4, 16)
MOST_BITS = 8
SCALE_BITS = 16
#: calibration tokens that the basis, and that the errors of groups are taken from
TOKENS, SAMPLES = 4096, 512
#: of a coefficient as the basis takes it
MOST_CODE = (1 << 31) - 1
MOST_RANK = 1 << 14
MOST_GROUP = UNIT * SIZES[-1]


@dataclass(frozen=True)
class KVTC(Codec):
    """Made by `KVTC.fit`; a bare one encodes nothing. Encodes a Cache, or a list of layers, with exactly the layers it was fitted to.

    bits: of a number, before DEFLATE, scales included; value_bits: of values, None: as many. rank: components at most. sinks, window: tokens kept exact at
    the start and the end. kinds, sides: what `fit` found, the codec's state.

    Layers must have the same number of tokens (ValueError); missing, foreign or other layers are StateMismatch; layers come back in the order they came in.

    Held: at most `bits`, near it where the spectrum is flat; 16 for each number of an exact token; a header for each layer.
    Pitfalls: what lies outside the first `rank` components is lost at any number of bits, and PCA knows no more than the calibration has tokens:
    SmolLM2-135M (5,760 key dimensions), another book: attention-output error .056 at 2 bits with rank 2048, .036 with 4096. The state is large:
    2 bytes for each entry and coded component (67 MB there).
    """

    bits: float = 2.0
    value_bits: float | None = None
    rank: int = 4096
    sinks: int = 4
    window: int = 128
    kinds: tuple[LayerKind, ...] = field(default=(), repr=False, compare=False, metadata={"state": True})
    sides: tuple[Side, ...] = field(default=(), repr=False, compare=False, metadata={"state": True})

    scope = "cache"
    part_names = ("shapes", "exact keys", "exact values", "key scales", "key codes", "value scales", "value codes")

    def __post_init__(self) -> None:
        for name in ("bits", "value_bits"):
            value = getattr(self, name)
            if value is not None or name == "bits":
                object.__setattr__(self, name, arguments.number(name, value, 0, 16))
        for name, least, most in (("rank", 1, MOST_RANK), ("sinks", 0, 1 << 20), ("window", 0, 1 << 20)):
            arguments.whole(name, getattr(self, name), least, most)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVTC) and self.state == other.state

    def __hash__(self) -> int:
        return hash(self.state)

    @classmethod
    def fit(cls, calibration: Layers, bits: float = 2.0, **options: Any) -> KVTC:
        """Fitted to a Cache or a list of Layers; several layers of one index (texts, in the same order for each index) are pooled.

        One layer in memory at a time, and 4,096 tokens of all. ValueError if layers differ in tokens, if there is no token behind the sinks,
        or if `bits` are too few for one group of keys and one of values. options: the other fields.
        """
        return cls.fit_rates(calibration, [bits], **options)[0]

    @classmethod
    def fit_rates(cls, calibration: Layers, bits: Sequence[float], **options: Any) -> list[KVTC]:
        """`fit` at several rates, which share the principal components."""
        bare = [cls(b, **options) for b in bits]
        if not bare:
            return []
        kinds, keys, values = [], [], []
        lengths: list[int] | None = None
        for _, own in calibrations.by_index(calibration):
            now = [layer.tokens for layer in own]
            if lengths is not None and now != lengths:
                raise ValueError(f"calibration: expected layers of {lengths} tokens, got {now} in layer {own[0].index}")
            lengths = now
            kinds.append(LayerKind.of(own[0]))
            x = _sampled(own, bare[0].sinks)
            split = own[0].kv_heads * own[0].head_dim
            keys.append(x[:, :split])
            values.append(x[:, split:])
        found = []
        for side in (keys, values):
            x = np.concatenate(side, axis=1)
            side.clear()
            found.append(_Spectrum(x, bare[0].rank))
        return [
            cls(
                codec.bits,
                **options,
                kinds=tuple(kinds),
                sides=(
                    found[0].side(codec.bits),
                    found[1].side(codec.bits if codec.value_bits is None else codec.value_bits),
                ),
            )
            for codec in bare
        ]

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_parts(self) -> list[Part]:
        pieces, before = [varint(len(self.kinds))], None
        for kind in self.kinds:
            pieces.append(kind.write_kind(before))
            before = kind.rope
        return [b"".join([*pieces, *(side.write() for side in self.sides)])]

    @classmethod
    def from_state(cls, arguments: dict[str, Any], parts: list[Reader]) -> KVTC:
        if len(parts) != 1:
            raise CorruptStream(f"state: expected 1 part, got {len(parts)}", parts[0].offset if parts else 0)
        reader = parts[0]
        start = reader.offset
        try:
            cls(**arguments)
        except (TypeError, ValueError) as problem:
            reader.fail(f"parameters of {cls.codec_id}: {problem}", start)
        kinds: list[LayerKind] = []
        for _ in range(reader.varint("number of layers", most=min(stream.MOST_LAYERS, reader.remaining))):
            start = reader.offset
            kind = LayerKind(*LayerKind.read_kind(reader, kinds[-1].rope if kinds else None))
            if kinds and kind.order <= kinds[-1].order:
                reader.fail("state: expected layers of ascending index", start)
            kinds.append(kind)
        if not kinds:
            reader.fail("state: expected a layer")
        widths = [
            sum(kind.kv_heads * dim for kind, dim in zip(kinds, dims))
            for dims in zip(*(kind.sizes[1:] for kind in kinds))
        ]
        sides = tuple(Side.read(reader, width) for width in widths)
        reader.end("state")
        return cls(**arguments, kinds=tuple(kinds), sides=sides)

    # -- streams -------------------------------------------------------------------------------------------------------

    def encode_parts(self, data: Any) -> list[Part]:
        return self._coded(layers_of(data), None)

    def encode_at(self, data: Any, kept: Sequence[Kept]) -> list[Part]:
        return self._coded(layers_of(data), kept)

    def _coded(self, layers: Any, kept: Sequence[Kept] | None) -> list[Part]:
        kinds = {kind.index: kind for kind in self.kinds}
        seen: list[Shape] = []
        exact: tuple[list[bytes], list[bytes]] = ([], [])
        totals: list[Any] = [0.0, 0.0]
        for i, layer in enumerate(layers):
            kind: LayerKind = calibrations.fitted(kinds, layer, self.codec_id)
            kind.check(layer, self.codec_id)
            shape = self._shape(layer)
            if any(shape.index == other.index for other in seen):
                raise ValueError(f"layers[{i}]: expected an index of its own, got {shape.index} as before")
            if seen and shape.tokens != seen[0].tokens:
                raise ValueError(
                    f"layers[{i}]: expected {seen[0].tokens} tokens as in the layers before, got {shape.tokens}"
                )
            seen.append(shape)
            own_positions = _positions(kept, i, shape.tokens)
            first, last = stacked.exact_tokens(shape.tokens, self.sinks, self.window)
            x = self._stacked(layer, kind, layer.positions if own_positions is None else own_positions, first, last)
            for held, array in zip(exact, (layer.keys, layer.values)):
                held.append(self._exact_bytes(array, first, last))
            split = kind.kv_heads * kind.head_dim
            for s, (own, rows) in enumerate(zip((x[:, :split], x[:, split:]), self._rows(kind))):
                totals[s] = totals[s] + self._analysed(self.sides[s], own, rows)
        if len(seen) != len(kinds):
            held_by = ", ".join(str(shape.index) for shape in seen)
            raise StateMismatch(
                f"layers: KVTC was fitted to layers of index {', '.join(map(str, kinds))}, got {held_by or 'none'}"
            )
        shapes = b"".join(piece for shape in seen for piece in (varint(len(shape.write())), shape.write()))
        coded = [part for side, y in zip(self.sides, totals) for part in self._side_parts(side, y)]
        return [shapes, *(b"".join(held) for held in exact), *coded]

    # What `_coded` does with numbers, apart from what it asks of layers: kernels do the same elsewhere (gpu/kvtc.py).

    def _shape(self, layer: Any) -> Shape:
        return Shape.of(layer)

    def _stacked(self, layer: Any, kind: LayerKind, positions: NDArray[np.int64], first: int, last: int) -> Any:
        """Stacked vectors of tokens first ... last - 1, all tokens having been looked at."""
        return stacked.stack(layer.keys, layer.values, kind.rope, positions)[first:last]

    def _exact_bytes(self, array: Any, first: int, last: int) -> bytes:
        return _token_major(np.concatenate([array[:, :first], array[:, last:]], axis=1))

    def _analysed(self, side: Side, x: Any, rows: slice) -> Any:
        return side.analyse(x, rows)

    def _side_parts(self, side: Side, y: Any) -> list[Part]:
        return side.encode(y)

    def _rows(self, kind: LayerKind) -> tuple[slice, slice]:
        """Where a layer's keys stand in the keys of all layers, and its values."""
        starts, out = [0, 0], []
        for other in self.kinds:
            sizes = [other.kv_heads * dim for dim in other.sizes[1:]]
            if other.index == kind.index:
                out = [slice(start, start + size) for start, size in zip(starts, sizes)]
            starts = [start + size for start, size in zip(starts, sizes)]
        return out[0], out[1]

    @classmethod
    def shapes_in(cls, parts: list[Reader]) -> list[Shape]:
        shapes: list[Shape] = []
        reader = parts[0] if parts else Reader(b"")
        while reader.remaining:
            shapes.append(Shape.read(reader.part(reader.varint("length of a shape", most=reader.remaining))))
            if len(shapes) > stream.MOST_LAYERS:
                reader.fail(f"shapes: expected at most {stream.MOST_LAYERS} layers")
        return shapes

    def decode_parts(self, parts: list[Reader]) -> list[Decoded]:
        return self._decoded(parts, None)

    def decode_at(self, parts: list[Reader], kept: Sequence[Kept]) -> list[Decoded]:
        return self._decoded(parts, kept)

    def _opened(
        self, parts: list[Reader], kept: Sequence[Kept] | None
    ) -> tuple[list[Shape], list[LayerKind], int, int, list[tuple[NDArray[Any], NDArray[Any]]]]:
        """Shapes and kinds of the layers, first and last coded token, exact keys and values; scales and codes are yet to be read."""
        start = parts[0].offset
        shapes = self.shapes_in(parts)
        kinds = {kind.index: kind for kind in self.kinds}
        if {shape.index for shape in shapes} != set(kinds) or len(shapes) != len(kinds):
            parts[0].fail(f"shapes: expected the layers that {self.codec_id} was fitted to, each once", start)
        if any((shape.kv_heads, shape.head_dim, shape.value_dim) != kinds[shape.index].sizes for shape in shapes):
            parts[0].fail(f"shapes: expected the heads and dimensions that {self.codec_id} was fitted to", start)
        tokens = shapes[0].tokens
        if any(shape.tokens != tokens for shape in shapes):
            parts[0].fail("shapes: expected layers of as many tokens", start)
        if kept is not None and any(
            one.places is not None and (len(one.places) != shape.kv_heads or max(one.counts(0, 0)) > tokens)
            for one, shape in zip(kept, shapes)
        ):
            parts[0].fail("shapes: expected the heads and tokens that were kept", start)
        first, last = stacked.exact_tokens(tokens, self.sinks, self.window)
        apart = tokens - (last - first)
        exact = []
        for shape in shapes:
            one = Shape(
                shape.kv_heads,
                apart,
                *kinds[shape.index].sizes[1:],
                shape.key_type,
                shape.value_type,
                None,
                range(apart),
            )
            sizes = [
                one.rows * dim * dtype.itemsize
                for dim, dtype in ((one.head_dim, one.key_dtype), (one.value_dim, one.value_dtype))
            ]
            exact.append(
                (
                    _numbers(parts[1].part(sizes[0], "exact keys"), "exact keys", one, one.head_dim, one.key_dtype),
                    _numbers(
                        parts[2].part(sizes[1], "exact values"), "exact values", one, one.value_dim, one.value_dtype
                    ),
                )
            )
        for part, what in zip(parts[1:3], self.part_names[1:3]):
            part.end(what)
        return shapes, [kinds[shape.index] for shape in shapes], first, last, exact

    def _decoded(self, parts: list[Reader], kept: Sequence[Kept] | None) -> list[Decoded]:
        shapes, kinds, first, last, exact = self._opened(parts, kept)
        # both sides' bytes are held against the number of tokens before either is made into numbers
        read = [side.read_codes(parts[3 + 2 * s : 5 + 2 * s], last - first) for s, side in enumerate(self.sides)]
        y = [side.coefficients(*one) for side, one in zip(self.sides, read)]
        out = []
        for i, (shape, kind, (keys, values)) in enumerate(zip(shapes, kinds, exact)):
            x = np.concatenate(
                [side.synthesise(own, rows) for side, own, rows in zip(self.sides, y, self._rows(kind))], axis=1
            )
            own_positions = _positions(kept, i, shape.tokens)
            positions = _array(shape.positions) if own_positions is None else own_positions
            k, v = stacked.unstack(
                x,
                shape.kv_heads,
                kind.sizes[1:],
                (shape.key_dtype, shape.value_dtype),
                kind.rope,
                positions[..., first:last],
            )
            out.append(
                shape.decoded(
                    *(
                        np.concatenate([e[:, :first], coded, e[:, first:]], axis=1)
                        for e, coded in ((keys, k), (values, v))
                    )
                )
            )
        return out

    def decode_flops(self, stream: bytes) -> int:
        """Of a coded token: for each coefficient its scale, with each row a product and a sum, the mean among the sums; of each row one by 2^e; RoPE."""
        from reference.inspection import inspect

        shapes = inspect(stream).shapes
        first, last = stacked.exact_tokens(shapes[0].tokens, self.sinks, self.window)
        each = sum(side.basis.size + side.basis.rows * (2 * side.basis.size + 1) for side in self.sides)
        return (last - first) * (each + sum(kind.rope_flops() for kind in self.kinds))


@dataclass(frozen=True, eq=False)
class Side:
    """The keys or the values of all layers. sizes, bits (groups,): components of each group, in the order of the basis, and their bits."""

    basis: Basis
    sizes: Integers
    bits: Integers

    @cached_property
    def widths(self) -> Integers:
        """(columns,): bits of each component."""
        return np.repeat(self.bits, self.sizes)

    @cached_property
    def ends(self) -> Integers:
        return np.cumsum(self.sizes)

    @cached_property
    def analysis(self) -> Float64:
        """The pseudo-inverse of S, (columns, rows), by its normal equations: its columns are next to orthogonal."""
        s = self.basis.synthesis
        norms_ = np.linalg.norm(s, axis=0)
        norms_ = np.where(norms_ > 0, norms_, 1.0)
        s = s / norms_
        try:
            return np.linalg.solve(s.T @ s, s.T) / norms_[:, None]
        except np.linalg.LinAlgError:
            return self.basis.analysis

    def analyse(self, x: Float64, rows: slice) -> Float64:
        """What x (n, rows) of one layer adds to the coefficients (n, columns)."""
        return project(x - self.basis.mean[rows], self.analysis[:, rows])

    def encode(self, y: Float64) -> list[Part]:
        """Coefficients (n, columns) -> scales, codes."""
        stored, codes = quantised(y, self.sizes, self.bits)
        return [deflate(stored.astype("<u2").tobytes()), deflate(_pack(codes, self.widths))]

    def read_codes(self, parts: list[Reader], tokens: int) -> tuple[Float64, list[Integers]]:
        """Scales (tokens, groups) and codes (tokens,) of each component. CorruptStream for parts that do not fit."""
        start = parts[0].offset
        scales = inflate(parts[0], 2 * tokens * len(self.sizes))
        codes = inflate(parts[1], sum(packing.packed_size(tokens, int(b)) for b in self.widths))
        stored = read_norms(Reader(scales, start), tokens * len(self.sizes), 7, "scales")
        return norms(stored, 7).reshape(tokens, len(self.sizes)), _unpack(codes, self.widths, tokens, start)

    def coefficients(self, scales: Float64, codes: list[Integers]) -> Integers:
        """y (tokens, columns), in the integers that the basis takes."""
        y = np.empty((len(scales), self.basis.size), np.int64)
        group = np.repeat(np.arange(len(self.sizes)), self.sizes)
        for c, (own, b) in enumerate(zip(codes, self.widths.tolist())):
            # exact but for one rounding to an integer
            z = np.rint(scales[:, group[c]] * uniform_points("midrise", b)[own] / UNIFORM_UNIT)
            y[:, c] = np.clip(z, -MOST_CODE, MOST_CODE)
        return y

    def synthesise(self, y: Integers, rows: slice) -> Float64:
        """x (tokens, rows) of one layer."""
        b = self.basis
        return Basis(b.places[rows], b.matrix[rows], b.exponents[rows], b.mean[rows]).synthesise(y)

    def write(self) -> bytes:
        groups = b"".join(varint(int(size)) + bytes([int(b)]) for size, b in zip(self.sizes, self.bits))
        return self.basis.write() + varint(len(self.sizes)) + groups

    @classmethod
    def read(cls, reader: Reader, width: int) -> Side:
        start = reader.offset
        basis = Basis.read(reader, width)
        if basis.rows != width:
            reader.fail(f"basis: expected {width} rows, got {basis.rows}", start)
        start = reader.offset
        sizes, bits = [], []
        for _ in range(reader.varint("groups", basis.size)):
            sizes.append(reader.varint("components of a group", MOST_GROUP))
            bits.append(reader.u8("bits of a group"))
        # a token without a scale would cost nothing
        if not sizes or min(sizes) < 1 or sum(sizes) != basis.size or not 1 <= min(bits) <= max(bits) <= MOST_BITS:
            reader.fail(
                f"groups: expected one at least, {basis.size} components in all, and 1 to {MOST_BITS} bits each", start
            )
        return cls(basis, np.array(sizes, np.int64), np.array(bits, np.int64))


def _positions(kept: Sequence[Kept] | None, i: int, tokens: int) -> Integers | None:
    """(kv_heads, tokens): those of layer i where its heads have tokens of their own, else None."""
    return None if kept is None or kept[i].places is None else kept[i].positions(tokens)


def quantised(y: Float64, sizes: Integers, bits: Integers) -> tuple[Integers, list[Integers]]:
    """Stored scales (n, groups) and codes (n,) of each component of y (n, columns)."""
    stored = np.empty((len(y), len(sizes)), np.int64)
    codes: list[Integers] = []
    for g, (end, size, b) in enumerate(zip(np.cumsum(sizes).tolist(), sizes.tolist(), bits.tolist())):
        own = y[:, end - size : end]
        stored[:, g], alpha = rounded_up(np.abs(own).max(axis=1, initial=0.0))
        ratio = own / np.where(alpha > 0, alpha, 1.0)[:, None]
        codes += list(np.clip(np.floor((ratio + 1) * (1 << (b - 1))), 0, (1 << b) - 1).astype(np.int64).T)
    return stored, codes


def _pack(codes: list[Integers], widths: Integers) -> bytes:
    return b"".join(packing.pack(own, int(b)) for own, b in zip(codes, widths))


def _unpack(data: bytes, widths: Integers, tokens: int, offset: int) -> list[Integers]:
    reader, out = Reader(data), []
    for b in widths.tolist():
        try:
            out.append(packing.unpack(reader.part(packing.packed_size(tokens, b)), tokens, b).astype(np.int64))
        except CorruptStream as problem:  # an offset in what was inflated says nothing
            raise CorruptStream(problem.problem, offset) from None
    return out


# -- fitting -----------------------------------------------------------------------------------------------------------


def _sampled(layers: list[Layer], sinks: int) -> Float64:
    """Stacked vectors of TOKENS of the tokens behind the sinks, evenly spaced over all texts."""
    places = [(i, t) for i, layer in enumerate(layers) for t in range(min(sinks, layer.tokens), layer.tokens)]
    if not places:
        raise ValueError(f"calibration: expected a token behind the {sinks} sinks in layer {layers[0].index}, got none")
    taken = np.array(places)[np.unique(np.linspace(0, len(places) - 1, min(len(places), TOKENS)).round().astype(int))]
    out = []
    for i, layer in enumerate(layers):
        stacked.finite(layer.keys, layer.values, layer.rope)
        at = taken[taken[:, 0] == i, 1]
        out.append(stacked.stack(layer.keys[:, at], layer.values[:, at], layer.rope, layer.positions[at]))
    return np.concatenate(out)


class _Spectrum:
    """Principal components V (entries, r) and coefficients z (n, r) of x (n, entries), the keys or the values of all layers."""

    def __init__(self, x: Float64, rank: int) -> None:
        self.mean = x.mean(axis=0)
        centred = x - self.mean
        self.v = _components(centred, rank)
        self.z = centred @ self.v
        rows = np.unique(np.linspace(0, len(x) - 1, min(len(x), SAMPLES)).round().astype(int))
        self.groups = Groups(self.z[rows])

    def side(self, bits: float) -> Side:
        columns, sizes, widths = self.groups.allot(int(np.floor(bits * len(self.v) + 1e-9)))
        v, z = self.v[:, columns], self.z[:, columns]
        spread = np.sqrt((z**2).mean(axis=0))
        least, most = float(spread[spread > 0].min(initial=np.inf)), float(np.abs(z).max(initial=0.0))
        # fine beside the smallest step, and room for eight times the largest coefficient
        unit = max(least * 2.0**-10, most * 2.0**-28) if most > 0 else 1.0
        return Side(Basis.of(np.arange(len(v)), v * unit, self.mean), sizes, widths)


def _components(x: Float64, rank: int) -> Float64:
    """V (entries, r): the first principal components of centred x (n, entries), r <= rank; at least one column, whatever x is."""
    from scipy.linalg import eigh

    n, p = x.shape
    dual = n < p
    moment = (x @ x.T if dual else x.T @ x) / n
    most = min(rank, len(moment))
    values, vectors = eigh(moment, subset_by_index=[len(moment) - most, len(moment) - 1], overwrite_a=True)
    values, vectors = values[::-1], vectors[:, ::-1]
    live = values > max(n, p) * np.finfo(np.float64).eps * values[0]
    if not live.any():
        return np.eye(p, 1)
    v = vectors[:, live]
    if dual:
        v = x.T @ v
        v /= np.linalg.norm(v, axis=0)
    largest = np.take_along_axis(v, np.abs(v).argmax(axis=0)[None], axis=0)
    return v * np.where(largest < 0, -1.0, 1.0)


class Groups:
    """Groups of components z (n, c), c >= 1, n calibration tokens; they end at multiples of 16 components, the last one at c."""

    def __init__(self, z: Float64) -> None:
        c = z.shape[1]
        self.ends = np.minimum(np.arange(-(-c // UNIT) + 1) * UNIT, c)
        self.errors = _errors(z, self.ends)

    def allot(self, budget: int) -> tuple[Integers, Integers, Integers]:
        """(columns, sizes, bits): the components that are coded, ascending, and their groups, at least one.

        Of least summed squared error with sum (bits size + 16) <= budget, a last unit of fewer than 16 components counted whole: dynamic
        programming over units. ValueError if the budget holds no group.
        """
        units, ends = len(self.ends) - 1, self.ends
        # in units of UNIT bits: b bits for each unit of components, and a scale
        total, scale = budget // UNIT, SCALE_BITS // UNIT
        if total < 1 + scale:
            raise ValueError(
                f"bits: expected at least {UNIT + SCALE_BITS} for a token's keys, and for its values, got {budget}"
            )
        best = np.full((units + 1, total + 1), np.inf)
        choice = np.zeros((units + 1, total + 1), np.int16)
        best[0] = 0.0
        for u in range(units):
            for s, size in enumerate(SIZES):
                if u + size > units:
                    continue
                # what is not coded has groups of one unit
                for b in range(MOST_BITS + 1) if size == 1 else range(1, MOST_BITS + 1):
                    cost = size * b + scale if b else 0
                    if cost > total:
                        break
                    candidates = best[u, : total + 1 - cost] + self.errors[u, s, b]
                    better = candidates < best[u + size, cost:]
                    best[u + size, cost:][better] = candidates[better]
                    choice[u + size, cost:][better] = s * (MOST_BITS + 1) + b
        groups = []
        u, left = units, total
        while u:
            s, b = divmod(int(choice[u, left]), MOST_BITS + 1)
            if b:
                groups.append((int(ends[u - SIZES[s]]), int(ends[u]), b))
                left -= SIZES[s] * b + scale
            u -= SIZES[s]
        # a token without a scale would cost nothing
        first, last, bits = np.array(groups[::-1] or [(0, int(ends[1]), 1)], np.int64).T
        return np.concatenate([np.arange(a, b) for a, b in zip(first, last)]), last - first, bits


def _errors(z: Float64, ends: Integers) -> Float64:
    """[u, s, b]: squared error, summed over components and averaged over tokens, of a group of SIZES[s] units from u on with b bits."""
    units = len(ends) - 1
    out = np.full((units, len(SIZES), MOST_BITS + 1), np.inf)
    for u in range(units):
        for s, size in enumerate(SIZES):
            if u + size > units:
                continue
            own = z[:, ends[u] : ends[u + size]]
            out[u, s, 0] = (own**2).sum() / len(z)
            _, alpha = rounded_up(np.abs(own).max(axis=1, initial=0.0))
            ratio = (own / np.where(alpha > 0, alpha, 1.0)[:, None] + 1) / 2
            for b in range(1, MOST_BITS + 1):
                cell = np.minimum(np.floor(ratio * (1 << b)), (1 << b) - 1)
                error = ratio - (cell + 0.5) / (1 << b)
                out[u, s, b] = 4 * (alpha[:, None] ** 2 * error**2).sum() / len(z)
    return out
