"""PolarQuant (arXiv 2502.02617): a random rotation, then angles of angles. Nothing is fitted to data.

The paper, for blocks of 2^L coordinates of the rotated vector (L = 4): at level 1 each pair of coordinates becomes its norm and its
angle in [0, 2 pi); at level l each pair of norms of level l - 1 becomes its norm and an angle in [0, pi/2]; what remains is one norm
a block, the radius, kept in 16 bits. The angles are independent, of known laws (kvtheory.quantization.PolarAngle): level 1 uniform,
level l of density ~ sin^{2^{l-1} - 1}(2 psi). Each level has one Lloyd-Max codebook for its angles: bits 4, 2, 2, 2 and

    (16 + 8*4 + 4*2 + 2*2 + 1*2) / 16 = 3.875 bits a number,   E ||x - x_hat||^2 = .0321 ||x||^2   (quantization.polar_distortion)

What is done here without an arctangent, so that no rounding of a library function decides a bit:

    2^{e-1} <= max_i |x_i| < 2^e,   n_i = round_half_even(x_i 2^{a-e}),   y = M diag(s) n,   M M^T = m d I     as TurboQuant, exact
    Q^0_j = fl(y_j^2),   Q^l_j = fl(Q^{l-1}_{2j} + Q^{l-1}_{2j+1})                        float32, each operation rounded
    code of level l >= 2:  #{k : Q^{l-1}_{2j+1} > fl(t_k Q^{l-1}_{2j})}                   tan psi against tan of the threshold, squared
    code of level 1:       the same among the angles of the first quadrant, and two bits for the signs of y_{2j}, y_{2j+1}
    radius                 2^{e-a} sqrt(Q^L / (m d)), rounded to 8 significant bits (vectors.py), 2 bytes

Points are stored as C_k = round(2^15 cos psi_k), psi_0 < psi_1 < ...; the codebooks are symmetric about pi/4, so that the sine
of one point is the cosine of another, S_k = C_{K-1-k}. Thresholds lie half way between points: t_k = ((S_k + S_{k+1}) / (C_k + C_{k+1}))^2.

And back: radii in units of 2^{E-a}, the largest of the vector below 2^E, times C 2^-15 and S 2^-15 from the top down, each product rounded
to float32; the leaves are rounded to integers p, |p_j| <= 2^a; then exactly up to the last two roundings

    x_hat_i = G s_i (M p)_i,   G = 2^{E-a} / sqrt(m d)

Where 2^L does not divide d the last block is shorter: a norm without a partner goes up a level as it is, with no code; a
coordinate without a partner has a code of which only the sign bit is used. The laws of its angles are others: for the last d mod 2^L
coordinates the codebooks are not the best.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtheory import rate
from kvtheory.layer import Decoded, Layer
from kvtheory.quantization import PolarAngle
from reference import arguments, hadamard, memory, packing
from reference.codec import Appender, Codec
from reference.shape import Shape
from reference.stream import Part, Reader
from reference.vectors import (
    BIAS,
    Float32,
    Float64,
    Scratch,
    blocks,
    gained,
    integers,
    largest,
    magnitudes,
    norm_codes,
    norms,
    read_norms,
    refuse,
    take_block,
)

__all__ = ["PolarQuant", "cosines"]

MANTISSA_BITS = 7
#: cosines are stored in units of 2^-15
UNIT = 1 << 15
MOST_LEVELS = 10


@functools.lru_cache(maxsize=256)
def cosines(level: int, bits: int) -> NDArray[np.int64]:
    """C_0 > C_1 > ...: cosines of the points of a level, in units of 2^-15, rounded to the nearest integer. Read-only.

    Level 1: of the 2^(bits-2) points in the first quadrant (none for 1 bit, whose points are +-pi/2); other levels: of all 2^bits.
    """
    if level == 1:
        size = 1 << bits >> 2
        angles = (np.arange(size) + 0.5) * (np.pi / 2 / max(size, 1))
    else:
        angles = rate.lloyd_max(PolarAngle(level), 1 << bits).points
    table = np.floor(UNIT * np.cos(angles) + 0.5).astype(np.int64)
    table.flags.writeable = False
    return table


def thresholds(table: NDArray[np.int64]) -> Float32:
    """t_k, (points - 1,): squared tangents half way between neighbouring points, quotient and square in float64, then float32."""
    sines = table[::-1]
    tangents = (sines[:-1] + sines[1:]) / (table[:-1] + table[1:])
    return (tangents * tangents).astype(np.float32)


def factors(table: NDArray[np.int64], level: int, bits: int) -> tuple[Float32, Float32]:
    """(2^bits,) what a code of this level multiplies a norm by, for the first and the second of the pair; of the level's cosines."""
    first = table.astype(np.float32) / np.float32(UNIT)
    second = np.ascontiguousarray(first[::-1])
    if level > 1:
        return first, second
    if bits == 1:
        return np.zeros(2, np.float32), np.array([1, -1], np.float32)
    return (
        np.concatenate([first, -first, first, -first]),
        np.concatenate([second, second, -second, -second]),
    )


def fail_lone(reader: Reader, side: str, at: int) -> NoReturn:
    """CorruptStream of a lone coordinate whose code no encoder writes."""
    reader.fail(f"{side} angles: a lone coordinate has a code with more than a sign", at)


@dataclass(frozen=True)
class _Coded:
    """One side of a stream: "key" or "value", channels, element type, radii, the angles of each level."""

    name: str
    dim: int
    dtype: np.dtype[Any]
    radii: Reader
    angles: list[Reader]


@dataclass(frozen=True)
class PolarQuant(Codec):
    """PolarQuant with level_bits[l-1] bits for the angles of level l. Dimensions 1 to 1024, keys and values may differ.

    level_bits: a tuple of 1 to 10 ints, 1 to 8 each. seed: of the signs of the rotation, 0 <= seed < 2^63; keys and values, and data drawn from the same
    seed, get other streams of random numbers.

    Numbers are taken in float32 and come back in the element type they came in, at most its largest number. `encode` raises
    ValueError for NaN, inf, and float64 numbers that float32 cannot hold, with head, token and channel.

    Held: 16 bits for each block of 2^L coordinates, bits_1 for each pair, bits_2 for each pair of pairs, ... (3.875 a number at the
    defaults), and a header. Parts, token-major, so that a growing stream grows at the ends of its parts (angles: level by level):

        "shape"         reference.shape
        "cosines"       uint16 C of level 1, then of level 2, ...; the same for keys and values
        "key radii"     tokens x kv_heads x ceil(head_dim / 2^L) norms, 2 bytes each
        "key angles"    for each level tokens x kv_heads x pairs codes, packed densely
        "value radii", "value angles"   alike

    Pitfalls: at 3.875 bits the error, .0321, is that of TurboQuant at a little over 3 bits (.0340 at 3, .0093 at 4): a radius alone
    costs 1 bit a number, and 16 directions at level 1 leave .0128 whatever the others have.
    """

    level_bits: tuple[int, ...] = (4, 2, 2, 2)
    seed: int = 0

    streaming = True
    part_names = ("shape", "cosines", "key radii", "key angles", "value radii", "value angles")

    def __post_init__(self) -> None:
        if not isinstance(self.level_bits, (tuple, list)):
            raise TypeError(f"level_bits: expected a tuple of ints, got {type(self.level_bits).__name__}")
        object.__setattr__(self, "level_bits", tuple(self.level_bits))
        if not 1 <= len(self.level_bits) <= MOST_LEVELS:
            raise ValueError(f"level_bits: expected 1 to {MOST_LEVELS} levels, got {len(self.level_bits)}")
        for bits in self.level_bits:
            arguments.whole("level_bits", bits, 1, 8)
        arguments.seed(self.seed)

    def encode_parts(self, data: Layer) -> list[Part]:
        return self.start(data).parts()

    def start(self, layer: Layer) -> Appender:
        for name, dim in (("keys", layer.head_dim), ("values", layer.value_dim)):
            if dim > hadamard.LARGEST:
                raise ValueError(f"{name}: PolarQuant takes up to {hadamard.LARGEST} channels, got {dim}")
        appender = _PolarAppender(self, Shape.of(layer))
        appender.take(layer.keys, layer.values)
        return appender

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        shape, tables, sides = self._read_sides(parts)
        return shape.decoded(*(_decode_side(self, tables, shape, side) for side in sides))

    def _read_sides(self, parts: list[Reader]) -> tuple[Shape, list[NDArray[np.int64]], list[_Coded]]:
        """The shape, the cosines of each level, and keys and values as they were coded, their sizes checked."""
        shape = Shape.read(parts[0])
        tables = self._read_cosines(parts[1])
        sides = []
        for side, dim, dtype, radius_part, angle_part in (
            ("key", shape.head_dim, shape.key_dtype, parts[2], parts[3]),
            ("value", shape.value_dim, shape.value_dtype, parts[4], parts[5]),
        ):
            if dim > hadamard.LARGEST:
                parts[0].fail(f"{side}s: expected at most {hadamard.LARGEST} channels, got {dim}")
            pairs, radii = tree(dim, len(self.level_bits))
            sizes = [packing.packed_size(shape.rows * n, bits) for n, bits in zip(pairs, self.level_bits, strict=True)]
            for reader, expected, what in (
                (radius_part, 2 * shape.rows * radii, "radii"),
                (angle_part, sum(sizes), "angles"),
            ):
                if reader.remaining != expected:
                    reader.fail(f"{side} {what}: expected {expected} bytes, got {reader.remaining}")
            angles = [angle_part.part(size, f"{side} angles") for size in sizes]
            sides.append(_Coded(side, dim, dtype, radius_part, angles))
        return shape, tables, sides

    def _read_cosines(self, reader: Reader) -> list[NDArray[np.int64]]:
        tables = []
        for level, bits in enumerate(self.level_bits, 1):
            start = reader.offset
            table = reader.array("<u2", 1 << bits >> (2 if level == 1 else 0), f"cosines of level {level}").astype(
                np.int64
            )
            if (np.diff(table, prepend=UNIT) > 0).any():
                reader.fail(f"cosines of level {level}: expected descending numbers of at most {UNIT}", start)
            tables.append(table)
        reader.end("cosines")
        return tables

    def decode_flops(self, stream: bytes) -> int:
        """Per vector 2 for each angle, the butterflies d log2 B, the mixing of m blocks, 3 d, and the gain, d."""
        from reference.inspection import inspect

        total = 0
        for shape in inspect(stream).shapes:
            for dim in (shape.head_dim, shape.value_dim):
                block = dim & -dim
                turn = (block.bit_length() - 1) + (3 if block < dim else 0)
                total += shape.rows * (2 * sum(tree(dim, len(self.level_bits))[0]) + dim * (turn + 1))
        return total


def tree(dim: int, levels: int) -> tuple[list[int], int]:
    """(codes of each level, radii) of one vector: at level 1 ceil(d/2) codes, a lone coordinate's sign among them; then whole pairs."""
    codes, nodes = [-(-dim // 2)], -(-dim // 2)
    for _ in range(1, levels):
        codes.append(nodes // 2)
        nodes = -(-nodes // 2)
    return codes, nodes


class _Plan:
    """Everything about one side (keys or values) that no data decides, and the codes of a block of its vectors."""

    def __init__(
        self, codec: PolarQuant, side: str, dim: int, tables: Sequence[NDArray[np.int64]] | None = None
    ) -> None:
        self.dim, self.level_bits = dim, codec.level_bits
        self.tables = tables or [cosines(level, bits) for level, bits in enumerate(codec.level_bits, 1)]
        self.codes_each, self.radii_each = tree(dim, len(codec.level_bits))
        self._exact = hadamard.rotation(dim)
        self._signs = hadamard.signs(codec.seed, f"reference.PolarQuant {side} signs", dim).astype(np.float32)
        #: of each level: whole codes fill whole bytes in each vector, so that planes can be packed as they are
        self.bytewise = [n % packing.group(bits) == 0 for n, bits in zip(self.codes_each, self.level_bits, strict=True)]
        self._scratch = Scratch()

    # -- vectors to codes ----------------------------------------------------------------------------------------------

    def encode(self, x: Float32) -> tuple[NDArray[np.int64], list[NDArray[np.uint8]]]:
        """Rows x (n, d) -> (codes of radii (n, radii_each), for each level its codes as planes (codes_each, n)).

        FloatingPointError: x is not finite.
        """
        magnitude = self._scratch("n", x.shape, np.float32)
        most = magnitudes(x, magnitude)
        n, exponent = integers(x, most, self._exact.bits, axis=1, out=magnitude)
        n *= self._signs
        y = self._exact.forward(n, self._scratch)
        squares = np.multiply(y, y, out=self._scratch("level 0", y.shape, np.float32))
        planes = []
        for level, bits in enumerate(self.level_bits, 1):
            whole = len(squares) // 2 * 2
            even, odd = squares[0:whole:2], squares[1:whole:2]
            codes = self._scratch(f"codes {level}", (self.codes_each[level - 1], len(x)), np.uint8)
            codes[...] = 0
            self._compare(codes[: whole // 2], even, odd, thresholds(self.tables[level - 1]))
            if level == 1:
                self._add_signs(codes, y, bits)
            planes.append(codes)
            above = self._scratch(f"level {level}", (-(-len(squares) // 2), len(x)), np.float32)
            np.add(even, odd, out=above[: whole // 2])
            above[whole // 2 :] = squares[whole:]
            squares = above
        ratio = squares.T.astype(np.float64) / float(self._exact.gain2)
        radii = norm_codes(ratio, (exponent - self._exact.bits)[:, None], MANTISSA_BITS)
        return radii, planes

    def _compare(self, codes: NDArray[np.uint8], even: Float32, odd: Float32, squared: Float32) -> None:
        """codes += #{k : odd > t_k even}."""
        bound = self._scratch("bound", even.shape, np.float32)
        above = self._scratch("above", even.shape, np.bool_)
        for t in squared:
            np.greater(odd, np.multiply(even, t, out=bound), out=above)
            codes += above.view(np.uint8)

    def _add_signs(self, codes: NDArray[np.uint8], y: Float32, bits: int) -> None:
        """Bit `bits` - 1: the second coordinate is negative; bit `bits` - 2, if there is one: the first is."""
        negative = self._scratch("above", codes.shape, np.bool_)
        whole = len(y) // 2
        np.less(y[1::2], 0, out=negative[:whole])
        if len(y) % 2:  # a lone coordinate has its own sign in the highest bit, no other
            np.less(y[-1], 0, out=negative[-1])
        flags = negative.view(np.uint8)
        flags <<= bits - 1
        codes |= flags
        if bits > 1:
            np.less(y[0 : 2 * whole : 2], 0, out=negative[:whole])
            flags = negative.view(np.uint8)[:whole]
            flags <<= bits - 2
            codes[:whole] |= flags

    # -- codes to vectors ----------------------------------------------------------------------------------------------

    def decode(
        self, radii: NDArray[np.int64], planes: list[NDArray[np.uint8]], limit: float, out: NDArray[Any]
    ) -> None:
        """Codes of radii (n, radii_each) and planes of codes -> out (n / h, h, d), numbers of magnitude <= limit."""
        count, a = len(radii), self._exact.bits
        # the largest radius of a vector is below 2^top; any power does for a zero vector
        most = radii.max(axis=1)
        top = np.where(most > 0, (most >> MANTISSA_BITS) - BIAS + 1, 0)
        scaled: Float64 = np.ldexp(norms(radii, MANTISSA_BITS), (a - top)[:, None])
        values = np.ascontiguousarray(scaled.T, np.float32)
        for level in range(len(self.level_bits), 0, -1):
            codes, bits = planes[level - 1], self.level_bits[level - 1]
            nodes = -(-self.dim >> (level - 1))  # rounded up
            below = self._scratch(f"level {level}", (nodes, count), np.float32)
            whole = nodes // 2
            factor = self._scratch("factor", (whole, count), np.float32)
            for place, table in enumerate(factors(self.tables[level - 1], level, bits)):
                np.take(table, codes[:whole], out=factor, mode="clip")
                np.multiply(values[:whole], factor, out=below[place : 2 * whole : 2])
            if nodes % 2:
                below[-1] = values[-1]
                if level == 1:
                    below[-1] *= np.where(codes[-1] >> (bits - 1), np.float32(-1), np.float32(1))
            values = below
        rows = self._exact.inverse(np.rint(values, out=values), self._scratch)
        rows *= self._signs
        gain = np.ldexp(1 / np.sqrt(float(self._exact.gain2)), top - a)
        gained(rows, gain, float(self._exact.row_sum << a), limit, out)


class _PolarAppender(Appender):
    def __init__(self, codec: PolarQuant, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._sides = [
            _Side(_Plan(codec, "key", shape.head_dim), "keys"),
            _Side(_Plan(codec, "value", shape.value_dim), "values"),
        ]

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        # both are coded before either is kept: nothing changes if one is refused
        coded = [side.encode(array) for side, array in zip(self._sides, (keys, values), strict=True)]
        for side, pieces in zip(self._sides, coded, strict=True):
            side.keep(pieces)

    def parts(self) -> list[Part]:
        table = b"".join(table.astype("<u2").tobytes() for table in self._sides[0].plan.tables)
        return [self.shape.write(), table, *(part for side in self._sides for part in side.parts())]


class _Side:
    """Radii and angles of all keys (or values) so far."""

    def __init__(self, plan: _Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self._radii: list[bytes] = []
        self._angles = [packing.Packer(bits) for bits in plan.level_bits]

    def encode(self, array: NDArray[Any]) -> list[tuple[bytes, list[NDArray[np.uint8]]]]:
        """array (kv_heads, tokens, d) -> for each block the bytes of its radii, and its codes, packed where they fill whole bytes."""
        pieces = []
        scratch = Scratch()
        for block in blocks(array.shape[1], len(array)):
            try:
                radii, planes = self.plan.encode(take_block(array, block, scratch))
            except FloatingPointError:
                refuse(self.name, array, "PolarQuant")
                raise
            angles = []
            for codes, bits, bytewise in zip(planes, self.plan.level_bits, self.plan.bytewise, strict=True):
                if bytewise:
                    packed = np.empty((len(codes) * bits // 8, codes.shape[1]), np.uint8)
                    packing.pack_planes(codes, bits, packed)
                    angles.append(packed.T.copy())
                else:
                    angles.append(codes.T.copy())
            pieces.append((radii.astype("<u2").tobytes(), angles))
        return pieces

    def keep(self, pieces: list[tuple[bytes, list[NDArray[np.uint8]]]]) -> None:
        for radii, angles in pieces:
            self._radii.append(radii)
            for packer, codes, bytewise in zip(self._angles, angles, self.plan.bytewise, strict=True):
                if bytewise:
                    packer.append_packed(codes.tobytes())
                else:
                    packer.append(codes)

    def parts(self) -> list[Part]:
        return [b"".join(self._radii), b"".join(packer.bytes() for packer in self._angles)]


def _decode_side(codec: PolarQuant, tables: Sequence[NDArray[np.int64]], shape: Shape, coded: _Coded) -> NDArray[Any]:
    heads, tokens, side, sections = shape.kv_heads, shape.tokens, coded.name, coded.angles
    if not shape.rows:  # no rotation is made for nothing: a header alone could ask for a large one
        return np.empty((heads, 0, coded.dim), coded.dtype)
    plan = _Plan(codec, side, coded.dim, tables)
    radii = read_norms(coded.radii, shape.rows * plan.radii_each, MANTISSA_BITS, f"{side} radii")
    radii = radii.reshape(shape.rows, plan.radii_each)
    start, rows_of_codes = sections[0].offset, []
    for section, each, bits, bytewise in zip(sections, plan.codes_each, plan.level_bits, plan.bytewise, strict=True):
        if bytewise:
            codes = section.array(np.uint8, section.remaining, f"{side} angles").reshape(shape.rows, each * bits // 8)
        else:
            codes = packing.unpack(section, shape.rows * each, bits).reshape(shape.rows, each)
        rows_of_codes.append(codes)
    limit = largest(coded.dtype)
    out = memory.empty((heads, tokens, plan.dim), coded.dtype)
    scratch = Scratch()
    for block in blocks(tokens, heads):
        own = slice(block.start * heads, block.stop * heads)
        planes = []
        for level, codes in enumerate(rows_of_codes, 1):
            each, bits = plan.codes_each[level - 1], plan.level_bits[level - 1]
            plane = scratch(f"codes {level}", (each, own.stop - own.start), np.uint8)
            if plan.bytewise[level - 1]:
                packed = scratch("packed", codes[own].T.shape, np.uint8)
                np.copyto(packed, codes[own].T)
                packing.unpack_planes(packed, bits, plane)
            else:
                np.copyto(plane, codes[own].T)
            planes.append(plane)
        if plan.dim % 2 and (planes[0][-1] & ((1 << (plan.level_bits[0] - 1)) - 1)).any():
            fail_lone(sections[0], side, start)
        plan.decode(radii[own], planes, limit, out[:, block].transpose(1, 0, 2))
    return out
