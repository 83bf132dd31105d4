"""TurboQuant (arXiv 2504.19874): a random rotation, then one scalar quantiser for every coordinate. Nothing is fitted to data.

The paper, for a unit vector x in R^d:     y = Pi x,   code_j = the nearest of 2^b points to y_j,   x_hat = Pi^T points[code]
with Pi a random rotation and the points Lloyd-Max for the law of one coordinate of a uniform unit vector,
f(t) = Gamma(d/2) / (sqrt(pi) Gamma((d-1)/2)) (1 - t^2)^{(d-3)/2}; the norm is kept apart. D_mse = .3609 .1160 .0340 .0093 at
d = 128 and 1, 2, 3, 4 bits (kvtheory.quantization.mse_distortion).

What is done here, in integers from the second line on, so that no rounding of a float decides a bit and NumPy, a simulator and any
GPU write the same bytes:

    2^{e-1} <= max_i |x_i| < 2^e                                     x in float32; e = 0 for x = 0
    n_i = round_half_even(x_i 2^{a-e})                               16-bit integers, |n_i| <= 2^a, a = 14 (hadamard.Rotation.bits)
    N   = sum_i n_i^2                                                the norm is 2^{e-a} sqrt(N)
    y   = M diag(s) n,   M M^T = m d I,   s random signs             hadamard.py: exact in float32, every partial sum <= 2^24
    R   = floor(4 sqrt(m N))
    T_k = floor((P_k + P_{k+1}) R / 2^{f+3}),   k = 1 .. 2^{b-1}-1   P_k: positive points of sqrt(d) y_j / ||y||, in units of 2^-f
    code_j = #{k : |y_j| > T_k} + 2^{b-1} [y_j < 0]

and back, exactly up to the last two roundings (G to float32, the product to float32, both as IEEE 754 rounds):

    x_hat_i = G s_i (M p)_i,   p_j = +-P_{code},   G = norm / (2^f d sqrt(m))                    a zero is +0

The norm is rounded to 8 significant bits and a 9-bit exponent (2 bytes; above 6 bits a code, to 24 and 4 bytes): its error adds
2.6e-6 ||x||^2 to the distortion (.03 % of D_mse at 4 bits, .4 % at 6). So a number costs b + 16/d bits and its share of a header of
about 50 bytes, which holds the points too: a decoder needs no Lloyd-Max solver.

kind "prod" (the paper's Theorem 2) spends one of the b bits on the signs of a Gaussian sketch S of what b-1 bits leave, in the
rotated frame, where S has the same law: r_j = 2^{f+2} y_j - R' p_j with R' = floor(4 sqrt(m) norm 2^{a-e}) from the *stored* norm, so
that rounding it leaves no bias; rounded to integers of 14 bits or fewer (sketch.py), bit b-1 of a code is [ (S r)_j < 0 ], and

    x_hat += sqrt(pi/2) / d ||residual|| Pi^T S^T sign(S r)          E <z, x_hat> = <z, x> for every z; another 16/d bits for ||residual||

It is unbiased and worse than "mse" for attention at equal bits; it is here to be compared with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory import rate
from kvtheory.layer import Decoded, Layer
from kvtheory.quantization import SphereCoordinate
from reference import arguments, haar, hadamard, memory, packing
from reference.codec import Appender, Codec
from reference.shape import Shape
from reference.sketch import SIGMA, Sketch, sketch
from reference.stream import Part, Reader
from reference.vectors import (
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

__all__ = ["TurboQuant", "norm_codes", "norms", "points"]

#: cells a unit of the grid on which a cell of many is guessed; in float32 a place below 2^13 is off by less than SLACK cells
GRID, SLACK = 256, 0.5
#: vectors whose float64 numbers are worked out at once: they stay in the cache
ROWS = 256


def fraction_bits(dim: int) -> int:
    """f: points are stored in units of 2^-f. 11, or as much less as keeps L max P <= 2^24 for points below 8."""
    return min(11, (hadamard.EXACT // hadamard.row_sum(dim)).bit_length() - 4)


@functools.lru_cache(maxsize=256)
def points(dim: int, bits: int) -> NDArray[np.int64]:
    """P_1 <= ... <= P_{2^{b-1}}: the positive Lloyd-Max points of sqrt(d) times a coordinate of a uniform unit vector, in units of 2^-f.

    Rounded to the nearest integer; none for 0 bits. The law is symmetric; in one dimension the coordinate is +-1 and all points are 1.
    """
    if bits == 0:
        return np.empty(0, np.int64)
    half, unit = 1 << (bits - 1), 1 << fraction_bits(dim)
    if dim == 1:
        positive = np.ones(half)
    else:
        positive = np.sqrt(dim) * rate.lloyd_max(SphereCoordinate(dim), 2 * half).points[half:]
    table = np.floor(positive * unit + 0.5).astype(np.int64)
    table.flags.writeable = False
    return table


class _Plan:
    """Everything about one side (keys or values) that no data decides, and the code of a block of its vectors."""

    def __init__(self, codec: TurboQuant, side: str, dim: int, table: NDArray[np.int64] | None = None) -> None:
        self.dim, self.bits = dim, codec.bits
        self.mse_bits = codec.mse_bits
        self.fraction_bits = fraction_bits(dim)
        self.points = points(dim, self.mse_bits) if table is None else table
        self.mantissa_bits = 7 if codec.bits <= 6 else 23
        self.norm_dtype = np.dtype("<u2" if codec.bits <= 6 else "<u4")
        self.norms_each = codec.norms_each
        self._exact = hadamard.rotation(dim)
        self._signs = hadamard.signs(codec.seed, f"reference.TurboQuant {side} signs", dim).astype(np.float32)
        self._haar: Float64 | None = None
        if codec.rotation == "haar":
            self._haar = haar.orthogonal(codec.seed, f"reference.TurboQuant {side} rotation", dim)
        self._sketch: Sketch | None = None
        if codec.kind == "prod":
            self._sketch = sketch(codec.seed, f"reference.TurboQuant {side} sketch", dim, dim)
        # codes without their sign bit are the positive points, those with it their opposites
        self._signed = np.concatenate([self.points, -self.points]).astype(np.float32)
        # two codes of neighbouring vectors, read as one number: looked up at once, in half the time
        few = codec.bits <= 4
        self._pairs = _pairs(self._signed) if few and self._signed.size else None
        # of "prod": the point that a code with its last bit names
        self._turned: Float32 | None = None
        self._with_last: tuple[Float32, NDArray[np.complex64] | None] | None = None
        if self._sketch is not None:
            if self.mse_bits > 1:
                named = np.tile(self._signed, 2)
                self._with_last = named, _pairs(named) if few else None
            self._turned = self._turned_sketch(self._sketch) if self._haar is None else None
        # no column of zeros: a sum of the sketch's numbers that is 0 is +0 (sketch.py)
        self._full = self._turned is not None and bool(self._turned.any(axis=0).all())
        # few thresholds are compared with one by one
        self._guess = self._fine_grid() if self.mse_bits >= 6 else None
        self._scratch = Scratch()
        #: whole codes fill whole bytes in each vector: planes can be packed as they are
        self.bytewise = dim % packing.group(codec.bits) == 0

    # -- vectors to codes ----------------------------------------------------------------------------------------------

    def encode(self, x: Float32) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Rows x (n, d) -> (norm codes (n, 1), with a sketch (n, 2); codes as planes (d, n)). FloatingPointError: x is not finite."""
        magnitude = self._scratch("n", x.shape, np.float32)
        largest = magnitudes(x, magnitude)
        n, exponent = integers(x, largest, self._exact.bits, axis=1, out=magnitude)
        wide = self._scratch("wide", n.shape, np.float64)
        np.copyto(wide, n)
        squares = np.vecdot(wide, wide)  # integers below 2^53, exact
        n *= self._signs
        y: NDArray[Any]
        if self._haar is None:
            y = self._exact.forward(n, self._scratch)
            # 16 m N <= 2^52, so that rounding the root passes no integer
            unit = np.floor(np.sqrt(16.0 * self._exact.m * squares)) / (8 << self.fraction_bits)
        else:
            y = self._haar @ wide.T
            unit = np.sqrt(squares / self.dim) / (2 << self.fraction_bits)
        stored = norm_codes(squares, exponent - self._exact.bits, self.mantissa_bits)
        # not signbit: a zero has no sign
        codes: NDArray[np.uint8] = np.less(y, 0, out=self._scratch("codes", y.shape, np.bool_)).view(np.uint8)
        if self.mse_bits:
            codes <<= self.mse_bits - 1
            codes += self._cells(np.abs(y, out=None if self._sketch else y), unit)
        if self._sketch is None:
            return stored[:, None].astype(self.norm_dtype), codes
        left, negative = self._residual(y, codes, norms(stored, self.mantissa_bits), exponent)
        sketched = np.left_shift(negative.view(np.uint8), self.bits - 1, dtype=np.uint8)
        codes = np.bitwise_or(codes, sketched) if self.mse_bits else sketched
        every = np.stack([stored, left], axis=1) if self.mse_bits else left[:, None]
        return every.astype(self.norm_dtype), codes

    def _cells(self, planes: NDArray[Any], unit: Float64) -> NDArray[np.uint8]:
        """#{k : |y| > T_k} of planes |y| (d, n), unit (n,): T_k = floor((P_k + P_{k+1}) unit), with unit = R / 2^{f+3}.

        (P_k + P_{k+1}) unit is exact in float64, and an integer is above T_k if and only if it is above that.
        """
        cells = self._scratch("cells", planes.shape, np.uint8)
        above = self._scratch("above", planes.shape, np.bool_)
        middles = self.points[:-1] + self.points[1:]
        guess = self._guess
        if guess is None:
            cells[:] = 0
            for middle in middles:
                threshold = middle * unit
                # below 2^24 as a float32, or above every |y|
                threshold = np.floor(threshold).astype(np.float32) if self._haar is None else threshold
                np.greater(planes, threshold, out=above)
                cells += above.view(np.uint8)
            return cells
        # at most one threshold lies in a cell of the fine grid, or within its rounding: one exact comparison settles it
        with np.errstate(divide="ignore"):
            inverse = np.where(unit > 0, 1 / unit, 0.0).astype(planes.dtype)
        place = self._scratch("place", planes.shape, planes.dtype)
        np.multiply(planes, inverse * planes.dtype.type(GRID / (2 << self.fraction_bits)), out=place)
        np.minimum(place, guess.size - 1, out=place)
        number = self._scratch("number", planes.shape, np.int16)
        np.copyto(number, place, casting="unsafe")
        np.take(guess, number, out=cells, mode="clip")
        threshold = self._scratch("threshold", planes.shape, np.float64)
        np.take(np.append(middles, 1 << 30).astype(np.float64), cells, out=threshold, mode="clip")
        threshold *= unit
        np.greater(planes, threshold, out=above)
        cells += above.view(np.uint8)
        return cells

    def _fine_grid(self) -> NDArray[np.uint8] | None:
        """How many thresholds surely lie below each cell of a grid of GRID cells a unit; None if a cell may hold two of them."""
        middles = (self.points[:-1] + self.points[1:]) / float(2 << self.fraction_bits) * GRID
        starts = np.arange(int(middles.max(initial=0)) + 4)
        below = np.searchsorted(middles, starts - SLACK, side="left")
        up_to = np.searchsorted(middles, starts + 1 + SLACK, side="right")
        return below.astype(np.uint8) if (up_to[:-1] - below[:-1]).max() <= 1 and below[-1] == middles.size else None

    def _residual(
        self, y: NDArray[Any], codes: NDArray[np.uint8], norm: Float64, exponent: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Norm codes (n,) of what the codes leave of y (d, n), and where its sketch is negative, (d, n)."""
        assert self._sketch is not None
        a, f = self._exact.bits, self.fraction_bits
        scaled = np.ldexp(norm, a - exponent)  # the stored norm in the units of n
        gain2 = 1.0 if self._haar is not None else float(self._exact.gain2)
        r, work = (self._scratch(name, y.shape, np.float64) for name in ("residual", "work"))
        np.copyto(r, y)
        if self.mse_bits:
            np.copyto(work, np.take(self._signed, codes, out=self._scratch("named", y.shape, np.float32), mode="clip"))
            if self._haar is None:
                r *= 4 << f
                work *= np.floor(4.0 * np.sqrt(float(self._exact.m)) * scaled)
                r -= work
            else:
                work *= scaled / (2.0**f * np.sqrt(self.dim))
                r -= work
                r *= 4 << f
            exponent = exponent - f - 2
        rho, shift = integers(r, np.abs(r, out=work).max(axis=0), self._sketch.bits, axis=0, out=r)
        squares = np.einsum("ij,ij->j", rho, rho) / gain2
        stored = norm_codes(squares, exponent - a + shift - self._sketch.bits, self.mantissa_bits)
        single = self._scratch("named", y.shape, np.float32)
        np.copyto(single, rho, casting="same_kind")
        signs = np.matmul(self._sketch.matrix, single, out=self._scratch("sketched", y.shape, np.float32))
        return stored, np.less(signs, 0, out=self._scratch("negative", y.shape, np.bool_))

    # -- codes to vectors ----------------------------------------------------------------------------------------------

    def _turned_sketch(self, sketch: Sketch) -> Float32 | None:
        """S M s, so that s M S^T q = (S M s)^T q is one product; None where float32 does not hold all its partial sums."""
        turned = self._exact.forward(sketch.matrix).T
        most = np.abs(turned).sum(axis=0, dtype=np.float64).max()
        return np.ascontiguousarray(turned * self._signs) if most <= hadamard.EXACT else None

    def _values(self, codes: NDArray[np.uint8]) -> Float32:
        """p of codes (d, n): the points they name, with their signs, in units of 2^-f."""
        return self._looked_up("planes", codes, self._signed, self._pairs)

    def _looked_up(
        self, name: str, codes: NDArray[np.uint8], table: Float32, pairs: NDArray[np.complex64] | None
    ) -> Float32:
        planes = self._scratch(name, codes.shape, np.float32)
        if pairs is not None and codes.shape[1] % 2 == 0 and codes.flags.c_contiguous:
            np.take(pairs, codes.view(np.uint16), out=planes.view(pairs.dtype), mode="clip")
        else:
            np.take(table, codes, out=planes, mode="clip")
        return planes

    def _plus_minus(self, name: str, codes: NDArray[np.uint8], bit: int) -> Float32:
        """1 where that bit of codes (d, n) is 0, else -1. Faster than looking it up: bytes are an eighth of what is moved there."""
        one = self._scratch("bit", codes.shape, np.uint8)
        np.right_shift(codes, bit, out=one)
        np.bitwise_and(one, 1, out=one)
        one <<= 1
        planes = self._scratch(name, codes.shape, np.float32)
        np.copyto(planes, np.subtract(np.int8(1), one.view(np.int8), out=one.view(np.int8)))
        return planes

    def _turned_points(self, codes: NDArray[np.uint8]) -> Float32:
        """s M p of codes (d, n) with the last bit of "prod", as rows (n, d): integers, a zero of either sign."""
        if self._with_last is not None:
            rows = self._exact.inverse(self._looked_up("planes", codes, *self._with_last), self._scratch)
            rows *= self._signs
        else:  # one point and its opposite
            rows = self._exact.inverse(self._plus_minus("planes", codes, 0), self._scratch)
            rows *= self._signs * self._signed[0]
        return rows

    def _turned_last(self, codes: NDArray[np.uint8], packed: NDArray[np.uint8] | None) -> NDArray[Any]:
        """s M S^T q of codes (d, n) and of the bytes (n, d bits / 8) they came in, as rows (n, d): integers."""
        assert self._sketch is not None
        if self._turned is None:
            # S^T q is below 2^24, M S^T q need not be
            q = self._plus_minus("planes", codes, self.bits - 1)
            wide: NDArray[Any] = (
                self._exact.inverse(np.matmul(self._sketch.matrix.T, q).astype(np.float64)) * self._signs
            )
            return wide
        shape = codes.shape[::-1]
        if packed is not None and 8 % self.bits == 0 and self.bits < 8:
            q = self._scratch("signs", shape, np.float32)
            packing.look_up(packed, tuple(1.0 - 2 * (code >> self.bits - 1) for code in range(1 << self.bits)), q)
        else:
            q = self._plus_minus("planes", codes, self.bits - 1).T
        return np.matmul(q, self._turned, out=self._scratch("turned", shape, np.float32))

    def decode(
        self,
        codes: NDArray[np.uint8],
        stored: NDArray[np.int64],
        limit: float,
        out: NDArray[Any],
        packed: NDArray[np.uint8] | None = None,
    ) -> None:
        """Planes of codes (d, n) and norm codes (n, 1 or 2) -> out (n / h, h, d): float32 numbers of magnitude <= limit (float64 for "haar").

        packed: the bytes that the codes came in, (n, d bits / 8), if they fill whole ones.
        """
        every = norms(stored, self.mantissa_bits)
        if self._sketch is not None:
            self._decode_prod(codes, packed, every, limit, out)
        elif self._haar is not None:
            gain = every[:, 0] / (2.0**self.fraction_bits * np.sqrt(self.dim))
            rows = (self._haar.T @ self._values(codes)).T * gain[:, None]
            out[...] = (np.clip(rows, -limit, limit) + 0.0).reshape(out.shape)
        else:
            self._decode_mse(codes, every[:, 0], limit, out)

    def _decode_mse(self, codes: NDArray[np.uint8], norm: Float64, limit: float, out: NDArray[Any]) -> None:
        """G s M p: exact in integers, then one product in float32, on the way out. A zero is +0, however its sum was ordered."""
        rows = self._exact.inverse(self._values(codes), self._scratch)
        rows *= self._signs
        gain = norm / (float(1 << self.fraction_bits) * self.dim * np.sqrt(float(self._exact.m)))
        gained(rows, gain, self._exact.row_sum * float(self.points[-1]), limit, out)

    def _decode_prod(
        self,
        codes: NDArray[np.uint8],
        packed: NDArray[np.uint8] | None,
        every: Float64,
        limit: float,
        out: NDArray[Any],
    ) -> None:
        """Both terms exact in integers, then each times its gain and their sum in float64; rounded once to float32. A zero is +0."""
        assert self._sketch is not None
        gains = [np.sqrt(np.pi / 2) / SIGMA / self.dim * every[:, -1]]
        if self.mse_bits:
            gains.insert(0, every[:, 0] / (2.0**self.fraction_bits * np.sqrt(float(self.dim))))
        if self._haar is not None:
            total = np.zeros((codes.shape[1], self.dim))
            terms = [np.matmul(self._sketch.matrix.T, self._plus_minus("planes", codes, self.bits - 1))]
            if self.mse_bits:
                terms.insert(0, self._named_with_last(codes))
            for planes, gain in zip(terms, gains):
                total += (self._haar.T @ planes).T * gain[:, None]
            out[...] = (np.clip(total, -limit, limit) + 0.0).reshape(out.shape)
            return
        turned = [self._turned_last(codes, packed)]
        if self.mse_bits:
            turned.insert(0, self._turned_points(codes))
        gains = [gain / np.sqrt(float(self._exact.gain2)) for gain in gains]
        # |M S^T q| <= 128 d L
        bounds = [self._exact.row_sum * float(self.points[-1])] if self.mse_bits else []
        bounds.append(128.0 * self.dim * self._exact.row_sum)
        beyond = sum(bound * float(gain.max(initial=0)) for bound, gain in zip(bounds, gains)) > limit
        # integers times gains of at least 2^-60 are multiples of 2^-113, and so is their sum: float32 rounds none to zero. And a sum
        # that is 0 is +0: the second term is never -0, having a gain above 0 and no column of zeros
        calm = self._full and not beyond and min(float(gain.min(initial=1)) for gain in gains) >= 2.0**-60
        heads = out.shape[1]
        step = max(1, ROWS // heads)
        for start in range(0, len(out), step):
            tokens = slice(start, start + step)
            target = out[tokens]
            rows = slice(start * heads, start * heads + len(target) * heads)
            total, term = (self._scratch(name, turned[0][rows].shape, np.float64) for name in ("total", "term"))
            for number, (integers_, gain) in enumerate(zip(turned, gains)):
                np.copyto(term, integers_[rows])
                np.multiply(term, gain[rows, None], out=term if number else total)
                if number:
                    total += term
            if calm and out.dtype == np.float32:
                np.copyto(target, total.reshape(target.shape), casting="same_kind")
                continue
            if beyond:
                np.clip(total, -limit, limit, out=total)
            single = self._scratch("x^", total.shape, np.float32)
            np.copyto(single, total, casting="same_kind")
            if beyond:  # a number may have been rounded up
                np.clip(single, -limit, limit, out=single)
            single += np.float32(0)
            target[...] = single.reshape(target.shape)

    def _named_with_last(self, codes: NDArray[np.uint8]) -> Float32:
        """`_values` of codes (d, n) with the last bit of "prod"."""
        if self._with_last is not None:
            return self._looked_up("points", codes, *self._with_last)
        planes = self._plus_minus("points", codes, 0)
        planes *= self._signed[0]
        return planes


def _pairs(values: Float32) -> NDArray[np.complex64]:
    """Two entries of `values`, one after the other in memory (that of a complex number), at the place that two uint8 numbers make as one uint16."""
    codes = np.arange(values.size << 8, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return values.take(codes, mode="clip").view(np.complex64)[:, 0]


@dataclass(frozen=True)
class _Coded:
    """One side of a stream: "key" or "value", channels, element type, points, norms and codes."""

    name: str
    dim: int
    dtype: np.dtype[Any]
    points: NDArray[np.int64]
    norms: Reader
    codes: Reader


@dataclass(frozen=True)
class TurboQuant(Codec):
    """TurboQuant with `bits` bits a coordinate, 1 to 8, data-oblivious. Head dimensions 1 to 1024, keys and values may differ.

    seed: of the signs, the Haar rotation and the sketch, 0 <= seed < 2^63; keys and values, and data drawn from the same seed, get
    other streams of random numbers. kind: "mse" (Theorem 1) or "prod" (Theorem 2: the last bit is a sign of the residual's sketch,
    QJL). rotation: "hadamard", integer-exact, for use; "haar", in floating point, for claims about random rotations: its bytes may
    differ between machines.

    Numbers are taken in float32 and come back in the element type they came in, at most its largest number. `encode` raises
    ValueError for NaN, inf, and float64 numbers that float32 cannot hold, with head, token and channel.

    Held: bits + 16/d a number ("prod" above 1 bit: 32/d; above 6 bits twice that), and a header. Parts, token-major, so that a
    growing stream grows at its end:

        "shape"        reference.shape
        "points"       2^{b-1} x uint16 P for the keys, then as many for the values; b = bits, in "prod" bits - 1 (b = 0: none)
        "key norms"    tokens x kv_heads x norms (module docstring), 2 bytes each, above 6 bits 4; "prod" above 1 bit: norm, residual norm
        "key codes"    tokens x kv_heads x head_dim codes, packed densely
        "value norms", "value codes"   alike
    """

    bits: int = 3
    seed: int = 0
    kind: Literal["mse", "prod"] = "mse"
    rotation: Literal["hadamard", "haar"] = "hadamard"

    streaming = True
    part_names = ("shape", "points", "key norms", "key codes", "value norms", "value codes")

    def __post_init__(self) -> None:
        arguments.whole("bits", self.bits, 1, 8)
        arguments.seed(self.seed)
        arguments.word("kind", self.kind, ("mse", "prod"))
        arguments.word("rotation", self.rotation, ("hadamard", "haar"))

    @property
    def mse_bits(self) -> int:
        """Bits of a code that name a point; "prod" has one less."""
        return self.bits - (self.kind == "prod")

    @property
    def norms_each(self) -> int:
        """Norms stored for a vector: of itself, and of its residual."""
        return 2 if self.kind == "prod" and self.bits > 1 else 1

    def encode_parts(self, data: Layer) -> list[Part]:
        return self.start(data).parts()

    def start(self, layer: Layer) -> Appender:
        for name, dim in (("keys", layer.head_dim), ("values", layer.value_dim)):
            if dim > hadamard.LARGEST:
                raise ValueError(f"{name}: TurboQuant takes up to {hadamard.LARGEST} channels, got {dim}")
        appender = _TurboAppender(self, Shape.of(layer))
        appender.take(layer.keys, layer.values)
        return appender

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        shape, sides = self._read_sides(parts)
        return shape.decoded(*(_decode_side(self, shape, side) for side in sides))

    def _read_sides(self, parts: list[Reader]) -> tuple[Shape, list[_Coded]]:
        """The shape, and keys and values as they were coded, their sizes checked."""
        shape = Shape.read(parts[0])
        half = 1 << (self.mse_bits - 1) if self.mse_bits else 0
        sides = []
        for side, dim, dtype, norm_part, code_part in (
            ("key", shape.head_dim, shape.key_dtype, parts[2], parts[3]),
            ("value", shape.value_dim, shape.value_dtype, parts[4], parts[5]),
        ):
            start = parts[1].offset
            table = parts[1].array("<u2", half, f"{side} points").astype(np.int64)
            if dim > hadamard.LARGEST:
                parts[0].fail(f"{side}s: expected at most {hadamard.LARGEST} channels, got {dim}")
            most = (8 << fraction_bits(dim)) - 1
            if (np.diff(table, append=most) < 0).any():
                parts[1].fail(f"{side} points: expected ascending numbers of at most {most}", start)
            size = packing.packed_size(shape.rows * dim, self.bits)
            norm_size = shape.rows * self.norms_each * (2 if self.bits <= 6 else 4)
            for reader, expected, what in ((norm_part, norm_size, "norms"), (code_part, size, "codes")):
                if reader.remaining != expected:
                    reader.fail(f"{side} {what}: expected {expected} bytes, got {reader.remaining}")
            sides.append(_Coded(side, dim, dtype, table, norm_part, code_part))
        parts[1].end("points")
        return shape, sides

    def decode_flops(self, stream: bytes) -> int:
        """Per vector the butterflies of the Hadamard blocks, d log2 B, the mixing of m blocks, 3 d, and the gain, d.

        "haar": 2 d^2 in place of butterflies and mixing; "prod": 2 d^2 + 2 d more for S^T q and adding it.
        """
        from reference.inspection import inspect

        total = 0
        for shape in inspect(stream).shapes:
            for dim in (shape.head_dim, shape.value_dim):
                block = dim & -dim
                turn = 2 * dim if self.rotation == "haar" else (block.bit_length() - 1) + (3 if block < dim else 0)
                # the sketch's term joins the points' before one common rotation
                total += shape.rows * dim * (turn + 1 + (2 * dim + 2 if self.kind == "prod" else 0))
        return total


class _TurboAppender(Appender):
    def __init__(self, codec: TurboQuant, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._sides = [
            _Side(_Plan(codec, "key", shape.head_dim), "keys"),
            _Side(_Plan(codec, "value", shape.value_dim), "values"),
        ]

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        # both are coded before either is kept: nothing changes if one is refused
        coded = [side.encode(array) for side, array in zip(self._sides, (keys, values))]
        for side, pieces in zip(self._sides, coded):
            side.keep(pieces)

    def parts(self) -> list[Part]:
        table = b"".join(side.plan.points.astype("<u2").tobytes() for side in self._sides)
        return [self.shape.write(), table, *(part for side in self._sides for part in side.parts())]


class _Side:
    """Norms and codes of all keys (or values) so far."""

    def __init__(self, plan: _Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self._norms: list[bytes] = []
        self._codes = packing.Packer(plan.bits)

    def encode(self, array: NDArray[Any]) -> list[tuple[bytes, Any]]:
        """array (kv_heads, tokens, d) -> a piece for each block: bytes of norms, and codes, packed where they fill whole bytes."""
        heads, tokens, dim = array.shape
        pieces: list[tuple[bytes, Any]] = []
        scratch = Scratch()
        for block in blocks(tokens, heads):
            x = take_block(array, block, scratch)
            try:
                norm_codes, codes = self.plan.encode(x)
            except FloatingPointError:
                refuse(self.name, array, "TurboQuant")
                raise
            if self.plan.bytewise:
                packed = np.empty((dim * self.plan.bits // 8, len(x)), np.uint8)
                packing.pack_planes(codes, self.plan.bits, packed)
                pieces.append((norm_codes.tobytes(), packed.T.tobytes()))
            else:
                pieces.append((norm_codes.tobytes(), codes.T.copy()))
        return pieces

    def keep(self, pieces: list[tuple[bytes, Any]]) -> None:
        for norm_bytes, codes in pieces:
            self._norms.append(norm_bytes)
            (self._codes.append_packed if self.plan.bytewise else self._codes.append)(codes)

    def parts(self) -> list[Part]:
        return [b"".join(self._norms), self._codes.bytes()]


def _decode_side(codec: TurboQuant, shape: Shape, coded: _Coded) -> NDArray[Any]:
    heads, tokens, dim = shape.kv_heads, shape.tokens, coded.dim
    if not shape.rows:  # no rotation is made for nothing: a header alone could ask for a large one
        return np.empty((heads, 0, dim), coded.dtype)
    plan = _Plan(codec, coded.name, dim, coded.points)
    stored = read_norms(coded.norms, shape.rows * plan.norms_each, plan.mantissa_bits, f"{coded.name} norms")
    stored = stored.reshape(shape.rows, plan.norms_each)
    packed = codes = None
    if plan.bytewise:
        packed = coded.codes.array(np.uint8, coded.codes.remaining, f"{coded.name} codes").reshape(
            shape.rows, dim * plan.bits // 8
        )
    else:
        codes = packing.unpack(coded.codes, shape.rows * dim, plan.bits).reshape(shape.rows, dim)
    limit = largest(coded.dtype)
    out = memory.empty((heads, tokens, dim), coded.dtype)
    scratch = Scratch()
    for block in blocks(tokens, heads):
        rows = slice(block.start * heads, block.stop * heads)
        planes = scratch("codes", (dim, rows.stop - rows.start), np.uint8)
        if packed is not None:
            bytes_ = scratch("bytes", packed[rows].T.shape, np.uint8)
            np.copyto(bytes_, packed[rows].T)
            packing.unpack_planes(bytes_, plan.bits, planes)
        else:
            assert codes is not None
            np.copyto(planes, codes[rows].T)
        own = None if packed is None else packed[rows]
        plan.decode(planes, stored[rows], limit, out[:, block].transpose(1, 0, 2), own)
    return out
