"""KVTC on the GPU: `reference.KVTC` with the same parameters, fit, state and streams, its quantiser by kernels (gpu/kernels/kvtc.cu).

DEFLATE stays on the host. Decoding is bit for bit the reference's; for encoding see gpu.transform_coding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import reference
from gpu.arrays import shape_of
from gpu.module import Source, launch, namespace, require_gpu
from gpu.resident import device, host, kept
from gpu.transform_coding import stacked
from gpu.transform_coding.basis import project, synthesise
from gpu.transform_coding.codec import between, exact_bytes
from gpu.transform_coding.stacked import warps
from kvtheory.layer import Decoded
from reference import codec, packing, stream
from reference.entropy_coding import deflate, inflate
from reference.errors import CorruptStream
from reference.kept import Kept
from reference.kvtc import Side, _positions
from reference.shape import Shape, _array
from reference.stream import Kind, Part, Reader
from reference.transform_coding.codec import LayerKind
from reference.vectors import read_norms

__all__ = ["KVTC"]

SOURCE = Source("kvtc.cu", ["quantise", "pack", "unpack"])
#: of kvtc.cu: tokens and components of a block of pack and unpack, and its threads
TOKENS, COMPONENTS, THREADS = 64, 32, 256


class KVTC(reference.KVTC):
    """`reference.KVTC`; `KVTC.of(codec)` takes one over that was fitted. Layers run in the simulator, CuPy arrays by `encode_arrays` on the GPU."""

    @classmethod
    def of(cls, fitted: reference.KVTC) -> Self:
        """This codec with the parameters and the state of the reference's `fitted`."""
        return cls(**{one.name: getattr(fitted, one.name) for one in dataclasses.fields(fitted)})

    def _shape(self, layer: Any) -> Shape:
        shape: Shape = layer.shape if isinstance(layer, SimpleNamespace) else Shape.of(layer)
        return shape

    def _stacked(self, layer: Any, kind: LayerKind, positions: NDArray[np.int64], first: int, last: int) -> Any:
        stacked.finite(layer.keys, layer.values, kind.rope)
        return stacked.stack(layer.keys, layer.values, kind.rope, positions, first, last)

    def _exact_bytes(self, array: Any, first: int, last: int) -> bytes:
        return exact_bytes(array, first, last)

    def _analysed(self, side: Side, x: Any, rows: slice) -> Any:
        return _analyse(side, x, rows)

    def _side_parts(self, side: Side, y: Any) -> list[Part]:
        return _encode(side, y)

    def _decoded(self, parts: list[Reader], kept: Sequence[Kept] | None) -> list[Decoded]:
        return [shape.decoded(keys, values) for shape, keys, values in self._arrays(parts, kept, np)]

    def _arrays(self, parts: list[Reader], kept: Sequence[Kept] | None, xp: Any) -> list[tuple[Shape, Any, Any]]:
        """Shape, keys and values of each layer, in namespace `xp`."""
        shapes, kinds, first, last, exact = self._opened(parts, kept)
        # both sides' bytes are held against the number of tokens before either is made into numbers
        read = [_read(side, parts[3 + 2 * s : 5 + 2 * s], last - first) for s, side in enumerate(self.sides)]
        y = [_decode(side, *one, last - first, xp) for side, one in zip(self.sides, read)]
        out = []
        for i, (shape, kind, both) in enumerate(zip(shapes, kinds, exact)):
            x = xp.empty((last - first, kind.width), np.float64)
            split = kind.kv_heads * kind.head_dim
            for side, own, rows, column in zip(self.sides, y, self._rows(kind), (0, split)):
                synthesise(side.basis, own, x, rows=rows, column=column)
            own_positions = _positions(kept, i, shape.tokens)
            positions = _array(shape.positions) if own_positions is None else own_positions
            keys, values = (between(array, first, shape.tokens, xp) for array in both)
            stacked.unstack(x, keys, values, kind.rope, positions, first)
            out.append((shape, keys, values))
        return out

    def encode_arrays(self, layers: Sequence[tuple[Any, Any]], indices: Sequence[int | None] | None = None) -> bytes:
        """The stream of keys (kv_heads, tokens, head_dim) and values (kv_heads, tokens, value_dim) of each layer, at positions 0, 1, 2, ...

        All NumPy or all CuPy, of any strides. indices: numbers of the layers in their model; default those that were fitted, ascending.
        ValueError, TypeError, StateMismatch as for layers and `encode`.
        """
        named = [kind.index for kind in self.kinds] if indices is None else list(indices)
        if len(named) != len(layers):
            raise ValueError(f"indices: expected {len(layers)}, one for each layer, got {len(named)}")
        kinds = {kind.index: kind for kind in self.kinds}
        every: list[Any] = []
        for (keys, values), index in zip(layers, named):
            shape, kind = shape_of(keys, values, index), kinds.get(index)
            every.append(
                SimpleNamespace(
                    keys=keys, values=values, shape=shape, index=index, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
                    value_dim=shape.value_dim, rope=kind and kind.rope, positions=_array(shape.positions),
                )
            )  # fmt: skip
        return stream.write(self._header(Kind.CACHE), [self._coded(every, None)])

    def decode_arrays(self, data: bytes, xp: Any = None) -> list[tuple[Any, Any]]:
        """Keys and values of each layer in a stream, in its order, as arrays of namespace `xp`: numpy or cupy; default cupy. Errors as for `decode`.

        gpu.Unavailable without CuPy or a GPU where `xp` is not given.
        """
        xp = require_gpu() if xp is None else xp
        header, groups = codec._read(data)
        own: Any = self._like(header)
        return [(keys, values) for _, keys, values in own._arrays(own._named(groups[0]), None, xp)]


def _analyse(side: Side, x: Any, rows: slice) -> Any:
    """side.analyse, but for the order of its sums."""
    xp = namespace(x)
    # in float64 from the start: CuPy would flush a subnormal float32
    mean = kept(side, "mean", xp, lambda: side.basis.mean.astype(np.float64))
    return project(x - mean[rows], kept(side, "analysis", xp, lambda: side.analysis)[:, rows])


def _components(side: Side, tokens: int, xp: Any) -> tuple[Any, Any, int]:
    """Bits of each component (columns,), the byte in which it begins, and bytes of all."""
    sizes = (tokens * side.widths + 7) // 8
    starts = np.cumsum(sizes) - sizes
    widths = kept(side, "widths", xp, lambda: side.widths.astype(np.uint8))
    return widths, device(starts.astype(np.uint64), xp), int(sizes.sum())


def _tiles(tokens: int, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (-(-tokens // TOKENS), -(-columns // COMPONENTS)), (THREADS,)


def _encode(side: Side, y: Any) -> list[Part]:
    """Coefficients (n, columns) -> scales, codes: side.encode."""
    xp, (n, columns), groups = namespace(y), y.shape, len(side.sizes)
    widths, starts, size = _components(side, n, xp)
    norms, codes, packed = xp.empty((n, groups), np.uint16), xp.empty((n, columns), np.uint8), xp.empty(size, np.uint8)
    if n:
        ends = kept(side, "ends", xp, lambda: side.ends.astype(np.int32))
        bits = kept(side, "bits", xp, lambda: side.bits.astype(np.uint8))
        launch(
            SOURCE["quantise"], *warps(n * groups),
            (xp.ascontiguousarray(y), ends, bits, norms, codes, np.uint64(n), np.uint32(columns), np.uint32(groups)),
        )  # fmt: skip
        launch(SOURCE["pack"], *_tiles(n, columns), (codes, widths, starts, packed, np.uint64(n), np.uint32(columns)))
    return [deflate(host(norms).astype("<u2").tobytes()), deflate(host(packed).tobytes())]


def _read(side: Side, parts: list[Reader], tokens: int) -> tuple[NDArray[np.uint16], NDArray[np.uint8]]:
    """Stored scales (tokens, groups) and packed codes; CorruptStream for parts that do not fit, as side.read_codes."""
    start = parts[0].offset
    scales = inflate(parts[0], 2 * tokens * len(side.sizes))
    codes = inflate(parts[1], sum(packing.packed_size(tokens, int(b)) for b in side.widths))
    stored = read_norms(Reader(scales, start), tokens * len(side.sizes), 7, "scales")
    packed = np.frombuffer(codes, np.uint8)
    spare = -tokens * side.widths % 8
    last = np.cumsum((tokens * side.widths + 7) // 8) - 1
    if tokens and (wrong := packed[last] >> (8 - spare).astype(np.uint8)).any():
        bad = int(np.flatnonzero(wrong)[0])
        # an offset in what was inflated says nothing
        raise CorruptStream(f"packed codes: the {spare[bad]} bits behind the last code are not 0", start)
    return stored.astype(np.uint16).reshape(tokens, len(side.sizes)), packed


def _decode(side: Side, stored: NDArray[np.uint16], packed: NDArray[np.uint8], tokens: int, xp: Any) -> Any:
    """y (tokens, columns) int32, in the integers that the basis takes: side.coefficients."""
    columns = side.basis.size
    y = xp.empty((tokens, columns), np.int32)
    if not tokens:
        return y
    widths, starts, _ = _components(side, tokens, xp)
    group_of = kept(side, "group of", xp, lambda: np.repeat(np.arange(len(side.sizes), dtype=np.int32), side.sizes))
    launch(
        SOURCE["unpack"], *_tiles(tokens, columns),
        (device(packed, xp), widths, starts, group_of, device(stored, xp), y, np.uint64(tokens), np.uint32(columns), np.uint32(len(side.sizes))),
    )  # fmt: skip
    return y
