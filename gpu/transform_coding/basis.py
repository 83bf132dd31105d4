"""A basis on the GPU (`reference.transform_coding.basis`): analysis summed in one order everywhere, synthesis exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu.module import launch, namespace
from gpu.resident import kept
from gpu.transform_coding.stacked import SOURCE
from reference.transform_coding.basis import MOST_COEFFICIENT, Basis

__all__ = ["analyse", "padded", "products", "project", "synthesise"]

#: of transform.cu: tokens and rows of a block, and threads along each
TILE, SIDE = 64, 16


def padded(array: Any) -> Any:
    """The array flat, with one number more where it has none: kernels want memory to point at."""
    flat = np.ascontiguousarray(array).ravel()
    return flat if flat.size else np.zeros(1, flat.dtype)


def analyse(basis: Basis, x: Any) -> Any:
    """y (n, columns) of stacked vectors x (n, all entries), at most 2^400: `basis.analyse`, but for the order of its sums."""
    xp = namespace(x)
    places = kept(basis, "places", xp, lambda: basis.places)
    # in float64 from the start: CuPy would flush a subnormal float32
    mean = kept(basis, "mean", xp, lambda: basis.mean.astype(np.float64))
    return project(x[:, places] - mean, kept(basis, "analysis", xp, lambda: basis.analysis))


def project(z: Any, analysis: Any) -> Any:
    """z (n, rows) times analysis (columns, rows), float64: `reference.transform_coding.basis.project`, but for the order of its sums.

    A sum runs from the first row to the last, every operation rounded, so that every machine has the same bits (the reference's are those of
    its BLAS). |found - exact| <= 1.01 rows 2^-53 sum_k |z_k a_k| + rows 2^-1074, as for any order.
    """
    xp = namespace(z, analysis)
    if not z.size or not analysis.size:
        return xp.zeros((len(z), len(analysis)), np.float64)
    largest = float(xp.abs(analysis).max())
    if float(xp.abs(z).max()) * largest * max(1, z.shape[1]) < MOST_COEFFICIENT:
        return products(z, analysis)
    e = xp.frexp(xp.abs(z).max(axis=1))[1][:, None]
    f = int(np.frexp(largest)[1])
    y = products(xp.ldexp(z, -e), xp.ldexp(analysis, xp.full(1, -f, e.dtype)))
    with np.errstate(over="ignore"):
        return xp.clip(xp.ldexp(y, e + f), -MOST_COEFFICIENT, MOST_COEFFICIENT)


def products(z: Any, a: Any) -> Any:
    """y (n, columns) = z (n, depth) a^T, a (columns, depth), float64: summed from the first to the last, whatever comes of it."""
    xp, (count, depth), columns = namespace(z, a), z.shape, len(a)
    y = xp.empty((count, columns), np.float64)
    if y.size:
        launch(
            SOURCE["project"], (-(-count // TILE), -(-columns // TILE)), (SIDE * SIDE,),
            (xp.ascontiguousarray(z), xp.ascontiguousarray(a), y, np.uint64(count), np.uint32(columns), np.uint32(depth)),
        )  # fmt: skip
    return y


def synthesise(
    basis: Basis, y: Any, x: Any, norms: Any = None, unit: int = 0, rows: slice = slice(None), column: int | None = None, first: int = 0
) -> None:  # fmt: skip
    """basis.synthesise of integers y[:, first : first + columns], into its places of stacked vectors x (n, width): the same binary64 numbers.

    y: (n, any) int32, or int64 below 2^47 in magnitude. norms (n, units) uint16: stored scales of tokens, of which this basis has number `unit`.
    rows: of the basis, these alone, into columns `column`, column + 1, ... of x in place of its places.
    """
    xp = namespace(y, x)
    count, width = x.shape
    start, stop, _ = rows.indices(basis.rows)
    if not count or start >= stop:
        return
    own = f"{start} {stop} {column}"
    places = basis.places[start:stop] if column is None else column + np.arange(stop - start)
    tables = (
        kept(basis, f"matrix {own}", xp, lambda: padded(basis.matrix[start:stop])),
        kept(basis, f"exponents {own}", xp, lambda: basis.exponents[start:stop].astype(np.int32)),
        kept(basis, f"means {own}", xp, lambda: basis.mean[start:stop]),
        kept(basis, f"rows {own}", xp, lambda: places.astype(np.int32)),
    )
    launch(
        SOURCE["product<int>" if y.dtype == np.int32 else "product<long long>"],
        (-(-count // TILE), -(-(stop - start) // TILE)), (SIDE * SIDE,),
        (y, *tables, xp.zeros(1, np.uint16) if norms is None else norms, x, np.uint64(count),
         np.uint32(stop - start), np.uint32(basis.size), np.uint32(y.shape[1]), np.uint32(first), np.uint32(width), np.uint32(0 if norms is None else norms.shape[1]), np.uint32(unit)),
    )  # fmt: skip
