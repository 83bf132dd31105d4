"""TurboQuant by kernels, the bytes of `reference.TurboQuant`. Kernels: kernels/turboquant.cu ("mse") and turboquant_prod.cu ("prod").

Everything that decides a bit is an integer, or an operation of IEEE 754 a vector, so a GPU, the simulator and NumPy agree. That is not so
for rotation="haar", which the reference has for claims about random rotations: its products of float64 matrices depend on the order
of summation. Layers are then coded by the reference's NumPy, and CuPy arrays are refused.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.arrays import ArrayCodec, little
from gpu.casts import cast
from gpu.module import Source, launch, namespace
from gpu.packing import Bits, pack_words, read_words
from gpu.resident import device, kept
from gpu.vectors import THREADS, Vectors, blank, flips, instances, product_grid, refusals, stored_norms, within
from kvtheory.layer import Layer
from reference import hadamard
from reference import turboquant as numpy_turboquant
from reference.codec import Appender
from reference.shape import Shape
from reference.sketch import SIGMA, Sketch, sketch
from reference.stream import Part, Reader
from reference.turboquant import fraction_bits, points
from reference.vectors import largest, read_norms

__all__ = ["TurboQuant"]

_MSE = Source("turboquant.cu", instances("encode", "decode"))
_PROD = Source("turboquant_prod.cu", [*instances("residuals", "decode"), "add_signs", "sketched"])


class _Plan:
    """Everything about one side (keys or values) that no data decides, and what its kernels are given."""

    def __init__(self, codec: TurboQuant, side: str, dim: int) -> None:
        self.dim, self.bits, self.mse_bits = dim, codec.bits, codec.mse_bits
        self.norms_each = codec.norms_each
        self.mantissa_bits = 7 if codec.bits <= 6 else 23
        self.fraction_bits = fraction_bits(dim)
        self.rotation = hadamard.rotation(dim)
        self.sketch: Sketch | None = None
        if codec.kind == "prod":
            self.sketch = sketch(codec.seed, f"reference.TurboQuant {side} sketch", dim, dim)
        self._flips = flips(hadamard.signs(codec.seed, f"reference.TurboQuant {side} signs", dim))

    def flips(self, xp: Any) -> Any:
        return kept(self, "flips", xp, lambda: self._flips)

    def points(self, xp: Any) -> Any:
        return kept(self, "points", xp, lambda: _table(points(self.dim, self.mse_bits)))

    def matrix(self, xp: Any) -> Any:
        """S, its entries within 127, where the signs are multiplied by its rows."""
        assert self.sketch is not None
        own = self.sketch.matrix
        return kept(self, "sketch", xp, lambda: own.astype(np.int8))

    def transposed(self, xp: Any) -> Any:
        assert self.sketch is not None
        own = self.sketch.matrix
        return kept(self, "transposed sketch", xp, lambda: own.T.astype(np.int8))

    # -- vectors to codes ----------------------------------------------------------------------------------------------

    def encode(self, name: str, array: Any, phase: int) -> tuple[bytes, bytes]:
        """Norms of array (heads, tokens, d) and codes from bit `phase` on, token by token. ValueError: not finite."""
        xp, vectors = namespace(array), Vectors.of(array)
        if not vectors.rows:
            return b"", b""
        halves = vectors.rows * self.norms_each * (1 if self.mantissa_bits <= 7 else 2)
        norms, refused = xp.empty(halves, np.uint16), blank(1, xp)
        own = (self.flips(xp), self.points(xp), np.int32(self.mse_bits), np.int32(self.fraction_bits))
        if self.sketch is None:
            codes = blank(-(-(phase + vectors.rows * self.dim * self.bits) // 32), xp)
            precision = (np.int32(self.rotation.bits), np.int32(self.mantissa_bits))
            args: tuple[Any, ...] = (*vectors.source, *own, *precision, np.uint32(phase), norms, codes, refused)
            launch(_MSE[vectors.instance("encode")], vectors.grid, THREADS, args)
            refusals(refused, name, array, "TurboQuant")
            return little(norms), little(codes)
        each = xp.empty((vectors.rows, self.dim), np.uint8)
        rho = xp.empty((vectors.rows, self.dim), np.int16)
        root, gain2 = np.float64(4.0 * np.sqrt(float(self.rotation.m))), np.float64(self.rotation.gain2)
        within_bits = (np.int32(self.rotation.bits), np.int32(self.sketch.bits), np.int32(self.mantissa_bits))
        args = (*vectors.source, *own, *within_bits, root, gain2, norms, each, rho, refused)
        launch(_PROD[vectors.instance("residuals")], vectors.grid, THREADS, args)
        refusals(refused, name, array, "TurboQuant")
        highest = np.int32(1 << (self.bits - 1))
        signs = (rho, self.transposed(xp), np.int64(vectors.rows), np.int32(self.dim), highest, each)
        launch(_PROD["add_signs"], product_grid(vectors.rows, self.dim), THREADS, signs)
        return little(norms), little(pack_words(each, self.bits, phase))

    # -- codes to vectors ----------------------------------------------------------------------------------------------

    def decode(
        self,
        shape: Shape,
        dtype: np.dtype[Any],
        table: NDArray[np.int64],
        norms: NDArray[np.uint16],
        codes: Any,
        xp: Any,
    ) -> Any:
        """norms (rows, each, 1 or 2 halves) and words of codes -> (kv_heads, tokens, d) of `dtype`."""
        out = Vectors.empty((shape.kv_heads, shape.tokens, self.dim), dtype, xp)
        stored, codes, points_ = (device(a, xp) for a in (norms, codes, _table(table)))
        limit, m = np.float32(largest(dtype)), float(self.rotation.m)
        own = (*out.sizes, self.flips(xp), points_, np.int32(self.bits), np.int32(self.mantissa_bits))
        if self.sketch is None:
            unit = np.float64(float(1 << self.fraction_bits) * self.dim * np.sqrt(m))
            launch(_MSE[out.instance("decode")], out.grid, THREADS, (stored, codes, *own, unit, limit, *out.target))
        else:
            back = xp.empty((out.rows, self.dim), np.int32)
            signs = (codes, self.matrix(xp), np.int64(out.rows), np.int32(self.dim), np.int32(self.bits), back)
            launch(_PROD["sketched"], product_grid(out.rows, self.dim), THREADS, signs)
            gains = (
                np.float64(2.0**self.fraction_bits * np.sqrt(float(self.dim))),
                np.float64(np.sqrt(np.pi / 2) / SIGMA / self.dim),
                np.float64(np.sqrt(float(self.rotation.gain2))),
            )
            args = (stored, codes, back, *own, *gains, limit, *out.target)
            launch(_PROD[out.instance("decode")], out.grid, THREADS, args)
        return cast(out.memory, dtype)


def _table(points_: NDArray[np.int64]) -> NDArray[np.int32]:
    """Points as kernels read them; a kernel of none is given one that it does not look at."""
    return points_.astype(np.int32) if points_.size else np.zeros(1, np.int32)


@functools.lru_cache(maxsize=64)
def _plan(codec: TurboQuant, side: str, dim: int) -> _Plan:
    return _Plan(codec, side, dim)


class TurboQuant(ArrayCodec, numpy_turboquant.TurboQuant):
    __doc__ = numpy_turboquant.TurboQuant.__doc__

    def start(self, layer: Layer) -> Appender:
        if self.rotation == "haar":
            return numpy_turboquant.TurboQuant.start(self, layer)
        shape = Shape.of(layer)
        within(shape, "TurboQuant")
        appender = _Appender(self, shape)
        appender.take(layer.keys, layer.values)
        return appender

    def _encoded(self, shape: Shape, keys: Any, values: Any) -> list[Part]:
        within(shape, "TurboQuant")
        self._on(namespace(keys, values))
        appender = (numpy_turboquant._TurboAppender if self.rotation == "haar" else _Appender)(self, shape)
        appender.take(keys, values)
        return appender.parts()

    def _decoded(self, parts: list[Reader], xp: Any) -> tuple[Shape, Any, Any]:
        self._on(xp)
        shape, sides = self._read_sides(parts)
        if self.rotation == "haar":
            keys, values = (numpy_turboquant._decode_side(self, shape, side) for side in sides)
            return shape, keys, values
        out = []
        for side in sides:
            if not shape.rows:
                out.append(xp.empty((shape.kv_heads, 0, side.dim), side.dtype))
                continue
            plan = _plan(self, side.name, side.dim)
            stored = read_norms(side.norms, shape.rows * plan.norms_each, plan.mantissa_bits, f"{side.name} norms")
            codes = read_words(side.codes, shape.rows * side.dim, self.bits)
            out.append(plan.decode(shape, side.dtype, side.points, stored_norms(stored, plan.mantissa_bits), codes, xp))
        return shape, *out

    def _on(self, xp: Any) -> None:
        if self.rotation == "haar" and xp is not np:
            raise ValueError(
                "rotation: expected 'hadamard' for arrays on a GPU, got 'haar', whose bytes depend on the order of summation"
            )


class _Appender(Appender):
    def __init__(self, codec: TurboQuant, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._plans = [_plan(codec, "key", shape.head_dim), _plan(codec, "value", shape.value_dim)]
        self._norms: tuple[list[bytes], ...] = ([], [])
        self._codes = (Bits(), Bits())

    def take(self, keys: Any, values: Any) -> None:
        # both are coded before either is kept: nothing changes if one is refused
        given = list(zip(self._plans, ("keys", "values"), (keys, values), self._codes))
        coded = [plan.encode(name, array, codes.phase) for plan, name, array, codes in given]
        for plan, array, held, codes, (norms, packed) in zip(
            self._plans, (keys, values), self._norms, self._codes, coded
        ):
            held.append(norms)
            codes.append(packed, array.size * plan.bits)

    def parts(self) -> list[Part]:
        table = b"".join(points(plan.dim, plan.mse_bits).astype("<u2").tobytes() for plan in self._plans)
        sides = [part for norms, codes in zip(self._norms, self._codes) for part in (b"".join(norms), codes.bytes())]
        return [self.shape.write(), table, *sides]
