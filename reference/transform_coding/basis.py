"""A basis whose decoder is exact: x = S y + mean, S = m 2^e with 16-bit integers m and an exponent e for each row.

A coder gives integers y; sum_c m_ic y_c is then an integer, summed in float64 without rounding while it stays below 2^53, whatever the
order of its terms; times 2^{e_i} exact, plus mean_i rounded once. So any decoder has the same numbers. The encoder's direction is the
pseudo-inverse of S in floating point: two encoders may choose other codes where a coefficient lies on a threshold, and both are right.

    written:  varint rows, varint columns, columns' places (varint each), mean binary32 (rows), exponents int16 (rows), m int16 (rows, columns)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reference.stream import Reader, varint

__all__ = ["Basis", "principal", "project"]

Float64 = NDArray[np.float64]

LARGEST = 32767
MOST_ROWS = 1 << 16
#: exponents beyond are no basis of float64 numbers
MOST_EXPONENT = 1000
MOST_COEFFICIENT = 2.0**400
#: of a decoded number before RoPE, in magnitude
MOST = 2.0**900


@dataclass(frozen=True, eq=False)
class Basis:
    """places (rows,): which entries of a stacked vector it makes. matrix (rows, columns) int16, exponents (rows,), mean (rows,) float32."""

    places: NDArray[np.int64]
    matrix: NDArray[np.int16]
    exponents: NDArray[np.int64]
    mean: NDArray[np.float32]

    @classmethod
    def of(cls, places: NDArray[np.int64], synthesis: Float64, mean: Float64) -> Basis:
        """The nearest basis to synthesis (rows, columns): each entry within 2^-16 of its row's largest."""
        with np.errstate(over="ignore"):
            single = np.clip(mean, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32)
        largest = np.abs(synthesis).max(axis=1, initial=0.0)
        # 2^e >= largest / 32767, with m rounded to at most 32767
        exponents = np.where(largest > 0, np.ceil(np.log2(np.where(largest > 0, largest, 1.0) / LARGEST)), 0.0).astype(
            np.int64
        )
        m = np.clip(np.rint(np.ldexp(synthesis, -exponents[:, None])), -LARGEST, LARGEST).astype(np.int16)
        return cls(places, m, exponents, single)

    @property
    def rows(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def size(self) -> int:
        """Columns: coefficients."""
        return int(self.matrix.shape[1])

    @cached_property
    def synthesis(self) -> Float64:
        """S, (rows, columns)."""
        return np.ldexp(self.matrix.astype(np.float64), self.exponents[:, None])

    @cached_property
    def energies(self) -> Float64:
        """(columns,): the squared norms of S's columns, up to one power of 4: they do not overflow."""
        e = np.frexp(np.abs(self.synthesis).max(initial=0.0))[1]
        return (np.ldexp(self.synthesis, -e) ** 2).sum(axis=0)

    @cached_property
    def analysis(self) -> Float64:
        """The pseudo-inverse of S, (columns, rows); columns scaled alike first, so that none is taken for noise."""
        norms = np.linalg.norm(self.synthesis, axis=0)
        norms = np.where(norms > 0, norms, 1.0)
        return np.linalg.pinv(self.synthesis / norms, rcond=1e-12) / norms[:, None]

    def analyse(self, x: Float64) -> Float64:
        """y (n, columns) of stacked vectors x (n, all entries); at most 2^400."""
        return project(x[:, self.places] - self.mean, self.analysis)

    def synthesise(self, y: NDArray[np.int64], gain: Float64 | None = None) -> Float64:
        """x (n, rows) of integers y (n, columns), |y| < 2^31; gain (n,): y counts so many times, a float64 of at most 8 bits' mantissa."""
        m = self.matrix.astype(np.float64).T
        most = float(np.abs(m).sum(axis=0).max(initial=0.0))
        if float(np.abs(y).max(initial=0)) * most < 2.0**52:
            total = y.astype(np.float64) @ m
        else:  # both halves are exact, their sum rounds once
            low = y & 0xFFFF
            total = ((y - low) >> 16).astype(np.float64) @ m * 65536.0 + low.astype(np.float64) @ m
        if gain is not None:
            total = total * gain[:, None]
        with np.errstate(over="ignore"):
            x = np.ldexp(total, self.exponents)
        # no encoder comes near it (its numbers stay below 2^500); a hostile gain would, and RoPE then makes NaN of inf
        return np.clip(x, -MOST, MOST) + self.mean.astype(np.float64)

    def write(self) -> bytes:
        return b"".join(
            [
                varint(self.rows), varint(self.size), *(varint(int(p)) for p in self.places),
                self.mean.astype("<f4").tobytes(), self.exponents.astype("<i2").tobytes(), self.matrix.astype("<i2").tobytes(),
            ]
        )  # fmt: skip

    @classmethod
    def read(cls, reader: Reader, width: int) -> Basis:
        """A basis of entries below `width`. CorruptStream for places that repeat or fall, means that are no numbers, wild exponents."""
        start = reader.offset
        rows = reader.varint("rows of a basis", min(width, MOST_ROWS))
        size = reader.varint("columns of a basis", rows)
        places = np.array([reader.varint("place of a row", width - 1) for _ in range(rows)], np.int64)
        if (np.diff(places) <= 0).any():
            reader.fail("places of a basis: expected ascending ones", start)
        mean: Any = reader.array("<f4", rows, "mean").astype(np.float32)
        exponents = reader.array("<i2", rows, "exponents").astype(np.int64)
        matrix = reader.array("<i2", rows * size, "matrix of a basis").reshape(rows, size).astype(np.int16)
        if not np.isfinite(mean).all() or (np.abs(exponents) > MOST_EXPONENT).any() or (matrix == -32768).any():
            reader.fail("basis: expected finite means, exponents of at most 1000 and entries above -32768", start)
        return cls(places, matrix, exponents, mean)


def project(z: Float64, analysis: Float64) -> Float64:
    """z (n, rows) times analysis (columns, rows), (n, columns), cut off at 2^400: nothing overflows, here or in a square."""
    most = float(np.abs(z).max(initial=0.0)) * float(np.abs(analysis).max(initial=0.0)) * max(1, z.shape[1])
    if most < MOST_COEFFICIENT:
        return z @ analysis.T
    e = np.frexp(np.abs(z).max(axis=1, initial=0.0))[1][:, None]
    f = np.frexp(np.abs(analysis).max(initial=0.0))[1]
    y = np.ldexp(z, -e) @ np.ldexp(analysis, -f).T
    with np.errstate(over="ignore"):
        return np.clip(np.ldexp(y, e + f), -MOST_COEFFICIENT, MOST_COEFFICIENT)


def principal(moment: Float64) -> tuple[Float64, Float64]:
    """(U, variances), moment (d, d) = U diag(variances) U^T, descending; what rounding leaves of no variance is 0."""
    d = len(moment)
    values, vectors = np.linalg.eigh(moment)
    values, vectors = values[::-1], vectors[:, ::-1]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    return vectors * np.where(largest < 0, -1.0, 1.0), np.where(
        values > d * np.finfo(np.float64).eps * values[0], values, 0.0
    )
