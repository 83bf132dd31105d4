"""Gram and sketch products of a head's response profiles on the host or a GPU: X y, X^T y and X X^T, X never in memory.

    head = Profiles(q, k, v)                      # NumPy or CuPy; as kvtheory.risk.spectrum takes them
    head.spectrum(rank=32)                        # the Spectrum that kvtheory.risk.spectrum gives
    head.normal(y)                                # X^T X y

Kernels: kernels/profiles.cu, kernels/scores.cu. The law is kvtheory.risk.profiles, .spectra and .gram; those run on CuPy arrays too, but their
products are cuBLAS's, which the extra `gpu` does not bring. What is small (a basis of Krylov vectors, eigenvalues) is the host's.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gpu.module import Source, launch, namespace
from gpu.resident import device, host
from gpu.scores import PAIRS, Precision, Rows, Sight
from kvtheory import checks
from kvtheory.risk import krylov
from kvtheory.risk.profiles import Kind, probabilities
from kvtheory.risk.spectra import LARGEST_GRAM, Features, Spectrum, _rank

__all__ = ["Profiles", "gram"]

THREADS, SIZE = 256, 64
#: tokens whose products one block of `adjoint` sums
PART = 4096
_SOURCE = Source(
    "profiles.cu",
    [f"densities<{pair}>" for pair in PAIRS] + [f"{do}<{a}>" for do in ("forward", "adjoint", "gram") for a in ("float", "double")],
)  # fmt: skip


def _c(dtype: Any) -> str:
    return "double" if np.dtype(dtype) == np.float64 else "float"


class Profiles:
    """X[i, (j, c)] = sqrt(p_i / m) Gamma_i(q_j)_c of one head, to be multiplied by; as in kvtheory.risk.spectra.

    q (m, d), k (n, d), v (n, dv), all NumPy or all CuPy; weights: P's probabilities (n,), on the host, default uniform; scale: default
    1/sqrt(d); kind "centred" or "augmented". precision: of all sums. The densities b (n, m) are kept, of that precision. ValueError, TypeError: shapes, NaN, inf.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        weights: Any = None,
        scale: float | None = None,
        kind: Kind = "centred",
        precision: Precision = "float64",
    ) -> None:
        if kind not in ("centred", "augmented"):
            raise ValueError(f'kind: expected "centred" or "augmented", got {kind!r}')
        xp = self.xp = namespace(q, k, v)
        checks.floating("v", v)
        sizes = checks.shape("k", k, ("n", "d"))
        sizes = checks.shape("q", q, ("m", "d"), sizes)
        sizes = checks.shape("v", v, ("n", "dv"), sizes)
        for name, axis in (("q", "m"), ("k", "n"), ("v", "dv"), ("q", "d")):
            if sizes[axis] == 0:
                raise ValueError(f"{name}: expected {axis} >= 1, got 0")
        rows = Rows(q[None], k[None], scale, precision)
        self.kind, self.element = kind, rows.element
        n, m = self.tokens, self.queries = rows.tokens, rows.count
        p = probabilities(weights, n)
        if not bool(xp.isfinite(v).all()):
            checks.finite("v", host(v), ("token", "channel"))
        asked = rows.chosen(np.arange(m))
        factors, known = self._weighted(rows, asked, p)
        self.b = xp.empty((n, m), self.element)
        arguments = (
            asked, rows.keys, known[0], known[1], factors, self.b, np.int64(m), np.int64(n), np.int32(rows.dim), rows.at(rows.scale),
        )  # fmt: skip
        launch(_SOURCE[f"densities<{rows.pair}>"], -(-n // 64), THREADS, arguments)
        own = xp.ascontiguousarray(v.astype(self.element, copy=False))
        p_there = device(p.astype(self.element), xp)
        # o = A_P = sum_i p_i b_ij v_i
        ones = xp.ones(n, self.element)
        o = _adjoint(self.b, ones[:, None], xp.zeros((m, 1), self.element), p_there, own, True)
        roots = device(np.sqrt(p / m).astype(self.element), xp)
        if kind == "augmented":
            v64 = own.astype(np.float64)
            c = float(np.sqrt(float((device(p, xp) * (v64 * v64).sum(axis=1)).sum()))) or 1.0
            own = xp.concatenate([own, xp.full((n, 1), c, self.element)], axis=1)
            o = xp.concatenate([o, xp.full((m, 1), c, self.element)], axis=1)
        self.v, self.o, self.roots = own, xp.ascontiguousarray(o), roots

    def _weighted(self, rows: Rows, asked: Any, p: Any) -> tuple[Any, tuple[Any, Any]]:
        """Factors (n,) and (M, 1/L) such that exp(z - M) / L x factor are densities b = a / p."""
        xp, n = self.xp, rows.tokens
        known = rows.statistics(asked, rows.keys, rows.count, Sight(np.arange(n), None, None))
        top, inverse = known.tops.reshape(-1), known.inverses.reshape(-1)
        if (p == p[0]).all():
            return xp.full(n, n, rows.element), (top, inverse)
        # Z / exp(M) = sum_i p_i exp(z_i - M): one more product, by p
        raw = xp.empty((n, rows.count), rows.element)
        ones = xp.ones(n, rows.element)
        arguments = (
            asked, rows.keys, top, xp.ones(rows.count, rows.element), ones, raw, np.int64(rows.count), np.int64(n), np.int32(rows.dim),
            rows.at(rows.scale),
        )  # fmt: skip
        launch(_SOURCE[f"densities<{rows.pair}>"], -(-n // 64), THREADS, arguments)
        mass = _adjoint(
            raw,
            ones[:, None],
            xp.zeros((rows.count, 1), rows.element),
            device(p.astype(rows.element), xp),
            ones[:, None],
            True,
        )
        return ones, (top, xp.ascontiguousarray((1 / mass).reshape(-1).astype(rows.element)))

    @property
    def channels(self) -> int:
        return int(self.v.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.queries * self.channels

    def forward(self, y: Any) -> Any:
        """X y, (n, r), of y (m channels, r) in the namespace; of `precision`."""
        y = self._columns("y", y, self.shape[1])
        out = self.xp.empty((self.tokens, y.shape[1]), self.element)
        if out.size:
            sizes = np.int64(self.tokens), *map(np.int32, (self.queries, self.channels, y.shape[1]))
            arguments = (self.b, self.v, self.o, self.roots, y, out, *sizes, np.bool_(self.kind == "centred"))
            grid = -(-self.tokens // SIZE), -(-y.shape[1] // SIZE)
            launch(_SOURCE[f"forward<{_c(self.element)}>"], grid, THREADS, arguments)
        return out

    def adjoint(self, y: Any) -> Any:
        """X^T y, (m channels, r), of y (n, r) in the namespace; of `precision`."""
        y = self._columns("y", y, self.tokens)
        return _adjoint(self.b, self.v, self.o, self.roots, y, self.kind == "centred")

    def normal(self, y: Any) -> Any:
        """X^T X y, (m channels, r)."""
        return self.adjoint(self.forward(y))

    def _columns(self, name: str, y: Any, rows: int) -> Any:
        if y.ndim != 2 or y.shape[0] != rows:
            raise ValueError(f"{name}: expected shape ({rows}, columns), got {tuple(y.shape)}")
        return self.xp.ascontiguousarray(y.astype(self.element, copy=False))

    def trace(self) -> float:
        """||X||_F^2 = tr Sigma, from blocks of X, one of some tokens at a time: |v_i|^2 - 2 v_i.o_j + |o_j|^2 would cancel."""
        total = 0.0
        step = max(1, (1 << 22) // self.shape[1])
        for start in range(0, self.tokens, step):
            part = slice(start, start + step)
            b, v = self.b[part, :, None], self.v[part, None, :]
            x = b * (v - self.o) if self.kind == "centred" else b * v - self.o
            x = (x * self.roots[part, None, None]).astype(np.float64)
            total += float((x * x).sum())
        return total

    def gram(self) -> Any:
        """X X^T, (n, n), for n <= 8192, the centred kind only. ValueError beyond."""
        if self.kind != "centred" or self.tokens > LARGEST_GRAM:
            raise ValueError(
                f"gram: expected a centred kind of at most {LARGEST_GRAM} tokens, got {self.kind} of {self.tokens}"
            )
        # sqrt(p) goes into b, and 1 / m is the kernel's
        b = self.b * (self.roots * math.sqrt(self.queries))[:, None]
        return gram(b, self.v, self.o)

    def spectrum(self, rank: int) -> Spectrum:
        """The `rank` leading eigenvalues by block Krylov, as kvtheory.risk.spectrum(..., rank): its products here, its small matrices on the host.

        That function computes all eigenvalues where a Krylov space would be no smaller; this one never does, and `error` says what it misses.
        """
        rank, width, trace = _rank(rank), self.shape[1], self.trace()
        smaller = min(self.shape)
        if width < self.tokens:
            found = krylov.symmetric(lambda y: self._host(self.normal, y), width, rank, trace * (1 + self._slack()))
        else:
            found = krylov.leading(
                lambda y: self._host(self.forward, y),
                lambda y: self._host(self.adjoint, y),
                self.shape,
                rank,
                trace * (1 + self._slack()),
            )
        eigenvalues = np.zeros(min(rank, smaller))
        eigenvalues[: len(found.eigenvalues)] = found.eigenvalues
        rounding = (krylov.columns(rank) * float(np.finfo(np.float64).eps) + self._slack()) * trace
        return Spectrum(trace, eigenvalues, self.tokens, max(trace - found.captured, 0.0) + rounding, complete=False)

    def features(self, rank: int) -> Features:
        """Coordinates and what they leave, as kvtheory.risk.spectra.profile_features."""
        rank, width = _rank(rank), self.shape[1]
        directions = (
            np.eye(width)
            if rank >= width
            else krylov.symmetric(lambda y: self._host(self.normal, y), width, rank).vectors
        )
        root = host(self.roots).astype(np.float64)[:, None]
        coordinates = self._host(self.forward, directions) / (root * math.sqrt(self.queries))
        # ||F_i||^2 <= ||Gamma_i||^2 = (1/m) sum_jc Gamma_jc^2
        squares = np.empty(self.tokens)
        step = max(1, (1 << 22) // width)
        for start in range(0, self.tokens, step):
            part = slice(start, start + step)
            b, v = self.b[part, :, None], self.v[part, None, :]
            x = (b * (v - self.o) if self.kind == "centred" else b * v - self.o).astype(np.float64)
            squares[part] = host((x * x).sum(axis=(1, 2))) / self.queries
        return Features(coordinates, np.maximum(squares - (coordinates**2).sum(axis=1), 0))

    def _slack(self) -> float:
        """By how much products of X may exceed exact ones, relative to the trace: as many roundings as terms."""
        return 4 * sum(self.shape) * float(np.finfo(self.element).eps)

    def _host(self, do: Any, y: Any) -> Any:
        return host(do(device(np.asarray(y, self.element), self.xp))).astype(np.float64)


def _adjoint(b: Any, v: Any, o: Any, roots: Any, y: Any, centred: bool) -> Any:
    """sum_i X_i y_i over tokens, in parts that are summed afterwards."""
    xp = namespace(b)
    (tokens, queries), channels, columns = b.shape, int(v.shape[1]), int(y.shape[1])
    width, parts = queries * channels, -(-tokens // PART)
    out = xp.empty((parts, width, columns), b.dtype)
    if out.size:
        sizes = np.int64(tokens), np.int64(PART), *map(np.int32, (queries, channels, columns))
        grid = -(-width // SIZE), -(-columns // SIZE), parts
        arguments = (b, xp.ascontiguousarray(v), o, roots, xp.ascontiguousarray(y), out, *sizes, np.bool_(centred))
        launch(_SOURCE[f"adjoint<{_c(b.dtype)}>"], grid, THREADS, arguments)
    return out.sum(axis=0)


def gram(b: Any, v: Any, o: Any, c2: float = 0.0) -> Any:
    """mean_j b_i b_l ((v_i - o_j).(v_l - o_j) + c2), (n, n), as kvtheory.risk.gram.centred_gram, of b's element type, symmetric to the bit.

    b (n, m), v (n, dv), o (m, dv): NumPy or CuPy, all float32 or all float64. ValueError: shapes, n of 0.
    """
    xp = namespace(b, v, o)
    sizes = checks.shape("b", b, ("n", "m"))
    sizes = checks.shape("v", v, ("n", "dv"), sizes)
    sizes = checks.shape("o", o, ("m", "dv"), sizes)
    if not {b.dtype, v.dtype, o.dtype} <= {np.dtype(np.float32)} and not {b.dtype, v.dtype, o.dtype} <= {
        np.dtype(np.float64)
    }:
        raise TypeError(f"b, v, o: expected all float32 or all float64, got {b.dtype}, {v.dtype}, {o.dtype}")
    n, m, channels = (sizes[axis] for axis in ("n", "m", "dv"))
    if 0 in (n, m, channels):
        raise ValueError(
            f"b, v: expected at least one token, query and channel, got {tuple(b.shape)} and {tuple(v.shape)}"
        )
    b, v, o = (xp.ascontiguousarray(one) for one in (b, v, o))
    # v_i.o_j as X y with X = v, y = o^T
    u = xp.empty((n, m), b.dtype)
    ones = xp.ones(n, b.dtype)
    arguments = (
        v, xp.ones((n, 1), b.dtype), xp.zeros((channels, 1), b.dtype), ones, xp.ascontiguousarray(o.T), u, np.int64(n), np.int32(channels),
        np.int32(1), np.int32(m), np.bool_(True),
    )  # fmt: skip
    launch(_SOURCE[f"forward<{_c(b.dtype)}>"], (-(-n // SIZE), -(-m // SIZE)), THREADS, arguments)
    u = b * u
    e = b * (o * o).sum(axis=1) - u
    out = xp.empty((n, n), b.dtype)
    tiles = -(-n // SIZE)
    of_gram = (b, e, u, v, out, np.int64(n), np.int32(m), np.int32(channels), b.dtype.type(c2))
    launch(_SOURCE[f"gram<{_c(b.dtype)}>"], (tiles, tiles), THREADS, of_gram)
    return out
