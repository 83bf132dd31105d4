"""How kernels of a warp a vector are launched (kernels/vectors.cuh): arrays of any strides, registers, signs, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.casts import cast
from gpu.module import ELEMENT, element, namespace
from gpu.resident import host
from reference import hadamard, vectors
from reference.shape import Shape

__all__ = [
    "REGISTERS",
    "THREADS",
    "Vectors",
    "blank",
    "flips",
    "instances",
    "product_grid",
    "refusals",
    "registers",
    "stored_norms",
    "within",
]

#: of a block: four warps
THREADS, WARPS = 128, 4
#: E, the numbers that a lane may hold: vectors of up to 32 E
REGISTERS = (2, 4, 8, 32)
#: rows are divided by heads in 32 bits
MOST_ROWS = 1 << 31


def _wide(dim: int) -> bool:
    """Whether vectors take the largest E, which only float32 has: 2-byte elements are as exact in it, and they are rare."""
    return registers(dim) == REGISTERS[-1]


def registers(dim: int) -> int:
    """E of vectors of `dim` numbers, at most 1024."""
    return next(e for e in REGISTERS if dim <= 32 * e)


def instances(*kernels: str, by_registers: bool = True) -> list[str]:
    """The name expressions of kernels templated over the element type, and over E; the largest E takes float alone."""
    ends = [f", {e}>" for e in REGISTERS] if by_registers else [">"]
    every = [f"{kernel}<{name}{end}" for kernel in kernels for name in ELEMENT.values() for end in ends]
    return [name for name in every if "<float" in name or not name.endswith(f", {REGISTERS[-1]}>")]


@dataclass(frozen=True)
class Vectors:
    """An array (heads, tokens, dim) as kernels take it: `memory` is C-contiguous, in it head h, token t begin at strides[0] h + strides[1] t."""

    memory: Any
    heads: int
    tokens: int
    dim: int
    strides: tuple[int, int]

    def __post_init__(self) -> None:
        if self.rows >= MOST_ROWS:
            raise ValueError(
                f"tokens: expected fewer than {MOST_ROWS} vectors of all heads, got {self.tokens} x {self.heads}"
            )

    @classmethod
    def of(cls, array: Any, by_registers: bool = True) -> Vectors:
        """Of any strides and element type: copied only where the last axis has a stride or a kernel has no such type.

        float64 is rounded to float32, inf where that cannot hold it, as the reference takes it. by_registers: for kernels
        templated over E.
        """
        xp = namespace(array)
        wide = array.dtype == np.float64 or (by_registers and _wide(array.shape[2]))
        array = cast(array, np.float32 if wide else array.dtype.newbyteorder("="))
        heads, tokens, dim = array.shape
        token_major = array.transpose(1, 0, 2)
        if token_major.flags.c_contiguous and not array.flags.c_contiguous:
            return cls(token_major, heads, tokens, dim, (dim, heads * dim))
        return cls(xp.ascontiguousarray(array), heads, tokens, dim, (tokens * dim, dim))

    @classmethod
    def empty(cls, shape: tuple[int, int, int], dtype: np.dtype[Any], xp: Any, by_registers: bool = True) -> Vectors:
        """To be written by a kernel; of float32, then to be rounded to `dtype`, where `of` would make it so."""
        heads, tokens, dim = shape
        kind = np.dtype(np.float32) if dtype == np.float64 or (by_registers and _wide(dim)) else dtype
        return cls(xp.empty(shape, kind), heads, tokens, dim, (tokens * dim, dim))

    @property
    def rows(self) -> int:
        return self.heads * self.tokens

    @property
    def element(self) -> str:
        return element(self.memory.dtype)

    def instance(self, kernel: str) -> str:
        return f"{kernel}<{self.element}, {registers(self.dim)}>"

    @property
    def grid(self) -> int:
        """Blocks of WARPS vectors."""
        return -(-self.rows // WARPS)

    @property
    def sizes(self) -> tuple[np.int32, np.int64, np.int32]:
        """heads, rows, dim: as kernels have them one after the other."""
        return np.int32(self.heads), np.int64(self.rows), np.int32(self.dim)

    @property
    def source(self) -> tuple[Any, ...]:
        """x, head_stride, token_stride, heads, rows, dim."""
        return *self.target, *self.sizes

    @property
    def target(self) -> tuple[Any, np.int64, np.int64]:
        """x, head_stride, token_stride."""
        return self.memory, np.int64(self.strides[0]), np.int64(self.strides[1])


def within(shape: Shape, codec: str) -> None:
    """ValueError where a vector has more channels than the kernels, and the reference, take."""
    for name, dim in (("keys", shape.head_dim), ("values", shape.value_dim)):
        if dim > hadamard.LARGEST:
            raise ValueError(f"{name}: {codec} takes up to {hadamard.LARGEST} channels, got {dim}")


def flips(signs: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Signs +-1 (d,), d <= 1024, as 32 words: bit i of all, least significant first, is set where sign i is -1."""
    out = np.zeros(128, np.uint8)
    bits = np.packbits(signs < 0, bitorder="little")
    out[: bits.size] = bits
    return out.view("<u4").astype(np.uint32)


def stored_norms(codes: NDArray[np.int64], mantissa_bits: int) -> NDArray[np.uint16]:
    """Codes of norms, checked, as kernels read them: in 2 bytes with 7 bits of mantissa, in twice 2 with 23."""
    kind = "<u2" if mantissa_bits <= 7 else "<u4"
    return codes.astype(kind).reshape(-1).view("<u2").astype(np.uint16, copy=False)


def product_grid(rows: int, columns: int) -> tuple[int, int]:
    """Blocks of a product with a sketch (kernels/sketch.cuh): of 32 rows and 64 columns."""
    return -(-rows // 32), -(-columns // 64)


def blank(words: int, xp: Any) -> Any:
    """`words` 32-bit words of 0, at least one."""
    return xp.zeros(max(words, 1), np.uint32)


def refusals(refused: Any, name: str, array: Any, codec: str) -> None:
    """The reference's ValueError if a kernel has met a number that is not finite in float32."""
    if int(host(refused)[0]):
        vectors.refuse(name, host(array), codec)
        raise AssertionError(f"{name}: a kernel found a number that is not finite, and there is none")
