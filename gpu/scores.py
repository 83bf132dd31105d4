"""SnapKV's and ScissorHands' scores on the host or a GPU: what queries pay each token, never as an array of queries x tokens.

    mass = attention_mass(queries, keys)                        # (kv_heads, tokens)
    kept = snapkv(reference.SnapKV(keep=2048), queries, keys)   # which tokens that leaves, and whether the reference surely agrees

Kernels: kernels/scores.cu. The law is that of reference.snapkv and reference.scissorhands, whose numbers are float64; here they are rounded
sums, and `error` bounds by how much they may differ. `certain` says that within that bound nothing else could have been kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

import reference
from gpu.module import ELEMENT, Source, launch, namespace
from gpu.resident import device, host
from gpu.tokens import gather
from gpu.vectors import blank
from kvtheory import checks
from reference.reducer import budget, split_budget
from reference.scissorhands import _without

__all__ = ["Decided", "Rows", "attention_mass", "error", "scissorhands", "snapkv"]

Index = NDArray[np.int64]
Precision = Literal["float32", "float64"]

THREADS, TOKENS = 256, 64
#: tokens whose sums one block makes
CHUNK = 512
#: rows of a tile, by precision (kernels/logits.cuh)
ROWS = {"float32": 128, "float64": 64}
_ACCUMULATOR = {"float32": "float", "float64": "double"}
_ELEMENTS = {**ELEMENT, np.dtype(np.float64): "double"}
PAIRS = [f"{t}, {a}" for t in _ELEMENTS.values() for a in ("float", "double") if (t, a) != ("double", "float")]
_SOURCE = Source(
    "scores.cu",
    [f"statistics<{pair}>" for pair in PAIRS]
    + [f"columns<{pair}, {count}>" for pair in PAIRS for count in ("false", "true")]
    + [f"norms<{t}>" for t in _ELEMENTS.values()],
)


class Decided(NamedTuple):
    """tokens: those that each KV head keeps, ascending, on the host. certain: the float64 reference keeps the same, rounding or not."""

    tokens: list[Index]
    certain: bool


def error(precision: Precision, dim: int, tokens: int, largest: float, scale: float) -> float:
    """E such that every attention a (query, token) computed here, a^, has |a^ - a| <= E a + 2^-123 (double: 2^-1019).

    largest: scale x the largest ||q|| x the largest ||k||, which no |logit| exceeds. With u the unit of rounding, first order written out:

        logit      `dim` fused operations, one product by the scale, the scale's own rounding: delta = gamma_(dim + 2) largest
        exp        of a rounded difference, at most T = min(2 largest, where exp is 0 anyway) below 0: u T, and 2 ulp = 4 u of the function
        L          numerators are rescaled when a larger logit comes: differences telescope to T at most, 4 u + u for each of at most
                   tiles + 4 + 1 times, and 4 additions a tile + 4 + those of chunks; numerator and L both move by delta
        a          1 / L rounded, the product rounded
    """
    u = 2.0**-24 if precision == "float32" else 2.0**-53
    n = (dim + 2) * u
    tiny = float(np.finfo(precision).smallest_subnormal)
    delta = n / (1 - n) * largest + (scale * dim + 2) * tiny
    reach = min(2 * largest, 104.0 if precision == "float32" else 746.0)
    tiles, chunks = CHUNK // TOKENS, -(-tokens // CHUNK)
    roundings = 3 * reach + 4 + 5 * (tiles + 5) + 4 * tiles + 4 + 4
    exponent = 2 * delta + u * roundings + 2.0**-53 * (reach + 8 + chunks)
    # second orders are far below a hundredth
    return 1.01 * math.expm1(exponent) if exponent < 700 else math.inf


@dataclass(frozen=True)
class Statistics:
    """M (tops) and 1 / L (inverses) of rows, (kv_heads, rows); 0 for a row that sees nothing."""

    tops: Any
    inverses: Any


class Rows:
    """Queries (query_heads, queries, head_dim) as rows beside keys (kv_heads, tokens, head_dim), checked, in one namespace.

    Raises: ValueError for shapes that do not fit, TypeError for elements that are no floats, or arrays of two namespaces.
    """

    def __init__(self, queries: Any, keys: Any, scale: float | None, precision: Precision) -> None:
        self.xp = namespace(queries, keys)
        if precision not in _ACCUMULATOR:
            raise ValueError(f"precision: expected one of {', '.join(_ACCUMULATOR)}, got {precision!r}")
        for name, array in (("queries", queries), ("keys", keys)):
            checks.floating(name, array)
        sizes = checks.shape("keys", keys, ("kv_heads", "tokens", "head_dim"))
        sizes = checks.shape("queries", queries, ("query_heads", "queries", "head_dim"), sizes)
        self.kv_heads, self.tokens, self.dim = (sizes[n] for n in ("kv_heads", "tokens", "head_dim"))
        self.query_heads, self.count = sizes["query_heads"], sizes["queries"]
        if not (self.kv_heads and self.query_heads and self.query_heads % self.kv_heads == 0 and self.dim):
            raise ValueError(
                f"queries: expected a positive multiple of {self.kv_heads} KV heads and head_dim >= 1, got shape {tuple(queries.shape)}"
            )
        self.group = self.query_heads // self.kv_heads
        self.scale = self.dim**-0.5 if scale is None else checks.positive("scale", scale)
        given = {array.dtype.newbyteorder("=") for array in (queries, keys)}
        double = np.dtype(np.float64) in given
        self.precision: Precision = "float64" if double else precision
        kind = np.dtype(np.float64 if double else np.float32) if len(given) > 1 or double else given.pop()
        self.queries, self.keys = (
            self.xp.ascontiguousarray(array.astype(kind, copy=False)) for array in (queries, keys)
        )
        self.pair = f"{_ELEMENTS[kind]}, {_ACCUMULATOR[self.precision]}"
        self.element = np.dtype(self.precision)

    def at(self, number: Any) -> np.generic:
        """A number as the kernels' accumulator has it."""
        return self.element.type(number)

    def largest(self) -> float:
        """scale x the largest ||q|| x the largest ||k||, rounded up: no |logit| is above it."""
        found = []
        for array in (self.queries, self.keys):
            out = self.xp.zeros(1, np.uint64)
            count = array.shape[0] * array.shape[1]
            if count:
                launch(
                    _SOURCE[f"norms<{_ELEMENTS[array.dtype]}>"], -(-count * 32 // THREADS), THREADS, (array, out, np.int64(count), np.int32(self.dim))
                )  # fmt: skip
            found.append(float(host(out).view(np.float64)[0]))
        return self.scale * math.sqrt(found[0]) * math.sqrt(found[1]) * (1 + 1e-9)

    def error(self, largest: float) -> float:
        return error(self.precision, self.dim, self.tokens, largest, self.scale)

    def chosen(self, queries: Any) -> Any:
        """Rows of these queries: (kv_heads, group x their number, head_dim)."""
        if len(queries) == self.count and (queries == np.arange(self.count)).all():
            own = self.queries
        else:
            own = self.xp.ascontiguousarray(self.xp.take(self.queries, device(queries, self.xp), axis=1))
        return own.reshape(self.kv_heads, self.group * len(queries), self.dim)

    def statistics(self, rows: Any, keys: Any, count: int, sight: Sight) -> Statistics:
        """Of rows (kv_heads, group x count, dim) over keys (kv_heads, tokens, dim). ValueError: NaN, inf, or a logit too large."""
        xp, heads, all_rows, tokens = self.xp, self.kv_heads, int(rows.shape[1]), int(keys.shape[1])
        chunks = -(-tokens // CHUNK)
        tops, totals = (xp.empty((heads, chunks, all_rows), self.element) for _ in range(2))
        refused = blank(1, xp)
        grid = chunks * -(-all_rows // ROWS[self.precision]) * heads
        sizes = (
            *map(np.int64, (all_rows, tokens, CHUNK, chunks)),
            np.int32(self.dim),
            np.int32(count),
            self.at(self.scale),
        )
        arguments = (rows, keys, *sight.arrays(xp), tops, totals, refused, *sizes, *sight.scalars)
        launch(_SOURCE[f"statistics<{self.pair}>"], grid, THREADS, arguments)
        if int(host(refused)[0]):
            self._refuse()
        tops, totals = tops.astype(np.float64), totals.astype(np.float64)
        top = tops.max(axis=1)
        with np.errstate(over="ignore"):  # the lowest number, of a chunk that nobody sees, less a large one
            total = (xp.exp(tops - top[:, None, :]) * totals).sum(axis=1)
        inverse = xp.where(total > 0, 1 / xp.where(total > 0, total, 1.0), 0.0)
        return Statistics(top.astype(self.element), inverse.astype(self.element))

    def columns(
        self, rows: Any, keys: Any, count: int, sight: Sight, known: Statistics, low: Any = None, near: float = 0
    ) -> Any:
        """Sums over rows, (kv_heads, tokens); or with thresholds low (count,) how many rows are below, and how many within `near`."""
        xp, heads, tokens = self.xp, self.kv_heads, int(keys.shape[1])
        counting = low is not None
        out = xp.empty((heads, tokens), np.int32 if counting else self.element)
        doubts = xp.empty((heads, tokens) if counting else 1, np.int32)
        threshold = device(low.astype(self.element), xp) if counting else xp.zeros(1, self.element)
        sizes = (
            np.int64(rows.shape[1]),
            np.int64(tokens),
            np.int32(self.dim),
            np.int32(count),
            self.at(self.scale),
            self.at(near),
        )
        arguments = (
            rows, keys, *sight.arrays(xp), known.tops, known.inverses, threshold, out, doubts, *sizes, *sight.scalars,
        )  # fmt: skip
        instance = f"columns<{self.pair}, {str(counting).lower()}>"
        launch(_SOURCE[instance], -(-tokens // TOKENS) * heads, THREADS, arguments)
        return (out, doubts) if counting else out

    def _refuse(self) -> None:
        for name, array, axes in (
            ("keys", self.keys, ("head", "token", "channel")),
            ("queries", self.queries, ("head", "query", "channel")),
        ):
            checks.finite(name, host(array), axes)
        raise ValueError(
            f"queries, keys: expected logits within {self.precision}, got one that overflows; "
            + ('ask for precision="float64"' if self.precision == "float32" else "no precision here holds it")
        )


@dataclass(frozen=True)
class Sight:
    """Who sees whom: positions of tokens (tokens,) or (kv_heads, tokens), of queries (queries,) or None: all see all; the latest `window`."""

    tokens: Index
    queries: Index | None
    window: int | None

    def arrays(self, xp: Any) -> tuple[Any, Any]:
        if self.queries is None:
            return xp.zeros(1, np.int64), xp.zeros(1, np.int64)
        return device(self.tokens, xp), device(self.queries, xp)

    @property
    def scalars(self) -> tuple[Any, ...]:
        window = np.iinfo(np.int64).max if self.window is None else self.window
        placed = self.queries is not None
        return np.int64(window), np.bool_(placed), np.bool_(placed and self.tokens.ndim == 2)


def _placed(rows: Rows, positions: Any, query_positions: Any) -> tuple[Index, Index | None]:
    own = np.arange(rows.tokens) if positions is None else _integers("positions", positions, rows.tokens)
    return own, None if query_positions is None else _integers("query_positions", query_positions, rows.count)


def _integers(name: str, value: Any, count: int) -> Index:
    found = np.asarray(host(value) if hasattr(value, "get") else value)
    if found.dtype.kind not in "iu" or found.shape != (count,):
        raise ValueError(f"{name}: expected {count} integers, got {found.dtype} of shape {found.shape}")
    return found.astype(np.int64)


def attention_mass(
    queries: Any,
    keys: Any,
    *,
    scale: float | None = None,
    positions: Any = None,
    query_positions: Any = None,
    window: int | None = None,
    precision: Precision = "float32",
) -> Any:
    """(kv_heads, tokens) of `precision`, in the arrays' namespace: attention that all queries pay each token, summed over queries and group.

    queries (query_heads, queries, head_dim) and keys (kv_heads, tokens, head_dim), both NumPy or both CuPy, any strides; float64 ones are
    summed in float64 whatever `precision` says. positions (tokens,), query_positions (queries,), window: as in a Layer, on the host. A query
    that sees nothing pays nothing. ValueError: shapes, NaN or inf, or a logit beyond `precision`.
    """
    rows = Rows(queries, keys, scale, precision)
    own, asked = _placed(rows, positions, query_positions)
    every = np.arange(rows.count)
    return _mass(rows, every, Sight(own, asked, window))


def _mass(rows: Rows, asked: Any, sight: Sight) -> Any:
    if not (rows.tokens and len(asked)):
        return rows.xp.zeros((rows.kv_heads, rows.tokens), rows.element)
    own = rows.chosen(asked)
    known = rows.statistics(own, rows.keys, len(asked), sight)
    return rows.columns(own, rows.keys, len(asked), sight, known)


def _latest(rows: Rows, query_positions: Index | None, count: int) -> Any:
    """As reference.snapkv.latest_queries."""
    if query_positions is None:
        return np.arange(max(0, rows.count - count), rows.count)
    return np.argsort(query_positions, kind="stable")[-count:]


def _pooled(scores: Any, kernel: int, pooling: str) -> Any:
    """As reference.snapkv.pooled, in float64."""
    xp, half, width = namespace(scores), kernel // 2, scores.shape[1]
    wide = xp.full((scores.shape[0], width + 2 * half), 0.0 if pooling == "mean" else -np.inf)
    wide[:, half : half + width] = scores
    out = wide[:, :width].copy()
    for shift in range(1, kernel):
        more = wide[:, shift : shift + width]
        out = out + more if pooling == "mean" else xp.maximum(out, more)
    return out / kernel if pooling == "mean" else out


def snapkv(
    codec: reference.SnapKV,
    queries: Any,
    keys: Any,
    *,
    scale: float | None = None,
    positions: Any = None,
    query_positions: Any = None,
    window: int | None = None,
    precision: Precision = "float32",
) -> Decided:
    """What `codec.places` keeps of a layer of these arrays; arguments and errors as for `attention_mass`. Only places leave the GPU."""
    rows = Rows(queries, keys, scale, precision)
    n, xp = rows.tokens, rows.xp
    total = budget(codec.keep, n)
    first, scored, last = split_budget(total, codec.sinks, codec.window)
    end = n - last
    if total == n or scored == 0:
        index = np.concatenate([np.arange(first), np.arange(end, n)])
        return Decided([np.arange(n) if total == n else index] * rows.kv_heads, True)
    own, placed = _placed(rows, positions, query_positions)
    asked = _latest(rows, placed, codec.window)
    mass = _mass(rows, asked, Sight(own, None if placed is None else placed[asked], window))
    scores = _pooled(mass[:, :end].astype(np.float64), codec.kernel, codec.pooling)[:, first:]
    order = xp.argsort(-scores, axis=-1, kind="stable")
    # the last that is kept and the first that is not
    edge = host(xp.take_along_axis(scores, order[:, scored - 1 : scored + 1], axis=1))
    chosen = np.sort(host(order[:, :scored]).astype(np.int64), axis=1) + first
    relative, absolute = _summed(rows, rows.error(rows.largest()), len(asked) * rows.group)
    certain = edge.shape[1] < 2 or bool(
        (edge[:, 0] * (1 - relative) - absolute > edge[:, 1] * (1 + relative) + absolute).all()
    )
    return Decided([np.concatenate([np.arange(first), one, np.arange(end, n)]) for one in chosen], certain)


def _summed(rows: Rows, attention: float, count: int) -> tuple[float, float]:
    """(E, F): a sum of `count` attentions, each within `attention`, and a mean of such sums, is within E of itself + F."""
    u = float(np.finfo(rows.element).eps) / 2
    tile = ROWS[rows.precision]
    additions = tile // 16 * -(-count // tile) + 16
    relative = 1.01 * (attention + additions * u + 2.0**-36)  # pooling: far fewer than 2^16 additions in float64
    tiny = 2.0**-123 if rows.precision == "float32" else 2.0**-1019
    return relative, count * tiny


def scissorhands(
    codec: reference.ScissorHands,
    queries: Any,
    keys: Any,
    *,
    scale: float | None = None,
    positions: Any = None,
    query_positions: Any = None,
    window: int | None = None,
    precision: Precision = "float32",
) -> Decided:
    """What `codec.places` keeps of a layer of these arrays; arguments and errors as for `attention_mass`.

    Between two evictions the buffer only grows, so all its queries are asked at once, of the tokens that had come by then; when some leave,
    the last `history` queries are asked again for their counts. Counts leave the GPU, B of them a head and eviction.
    """
    rows = Rows(queries, keys, scale, precision)
    total = budget(codec.keep, rows.tokens)
    if total == rows.tokens:
        return Decided([np.arange(total)] * rows.kv_heads, True)
    first, _, last = split_budget(total, codec.sinks, codec.window)
    own, placed = _placed(rows, positions, query_positions)
    near = rows.error(rows.largest()) if rows.count else 0.0
    u = float(np.finfo(rows.element).eps) / 2
    near = min(1.01 * (near + 4 * u) + rows.tokens * (2.0**-120 if rows.precision == "float32" else 2.0**-1000), 1e30)
    if placed is None:
        asked = _latest(rows, None, codec.history)
        held = np.broadcast_to(np.arange(rows.tokens), (rows.kv_heads, rows.tokens))
        low, doubts = np.zeros((2, rows.kv_heads, rows.tokens), np.int64)
        if len(asked):
            sight, chosen = Sight(own, None, None), rows.chosen(asked)
            known = rows.statistics(chosen, rows.keys, len(asked), sight)
            thresholds = np.full(len(asked), 1 / rows.tokens)
            counted = rows.columns(chosen, rows.keys, len(asked), sight, known, thresholds, near)
            low, doubts = (host(one) for one in counted)
        index = [_without(*pair, rows.tokens - total, first, last) for pair in zip(held, low)]
        return Decided(index, not doubts.any())
    return _one_by_one(codec, rows, Sight(own, placed, window), total, first, last, near)


def _one_by_one(
    codec: reference.ScissorHands, rows: Rows, sight: Sight, total: int, first: int, last: int, near: float
) -> Decided:
    assert sight.queries is not None
    positions, xp = sight.tokens, rows.xp
    order = np.argsort(sight.queries, kind="stable")
    places = sight.queries[order]
    # queries that come after token t and before the next one are asked once token t is in the buffer
    ends = np.append(np.searchsorted(places, positions[1:]), len(order))
    asked = int(np.searchsorted(places, positions[0]))
    held = np.empty((rows.kv_heads, 0), np.int64)
    past: list[tuple[Any, Any, Any, Any]] = []  # queries, thresholds, tops, inverses (kv_heads, group, queries)
    certain, t = True, 0
    while t < rows.tokens:
        start, count = t, held.shape[1]
        t = min(t + total - count + 1, rows.tokens)
        held = np.concatenate([held, np.broadcast_to(np.arange(start, t), (rows.kv_heads, t - start))], axis=1)
        end = max(asked, int(ends[t - 1]))
        numbers = np.arange(asked, end)
        latest = np.searchsorted(ends, numbers, side="right")  # the token after which each is asked
        seeing = (
            np.ones(len(numbers), bool) if sight.window is None else places[numbers] - positions[latest] < sight.window
        )
        own, sizes = order[numbers[seeing]], count + latest[seeing] - start + 1
        asked = end
        keys = gather(rows.keys, list(held)) if len(own) or (held.shape[1] > total and past) else None
        if len(own):
            here = Sight(positions[held], sight.queries[own], sight.window)
            known = rows.statistics(rows.chosen(own), keys, len(own), here)
            shape = (rows.kv_heads, rows.group, len(own))
            # attention to a token that is alone is 1, here and there: not below 1 / 1, and no doubt about it
            thresholds = np.where(sizes == 1, 0.0, 1 / sizes)
            past.append((own, thresholds, known.tops.reshape(shape), known.inverses.reshape(shape)))
        if held.shape[1] > total:
            low = np.zeros(held.shape, np.int64)
            if past:
                past = _last(past, codec.history, xp)
                asked_last, thresholds, tops, inverses = past[0]
                flat = (rows.kv_heads, rows.group * len(asked_last))
                known = Statistics(*(xp.ascontiguousarray(one).reshape(flat) for one in (tops, inverses)))
                here = Sight(positions[held], sight.queries[asked_last], sight.window)
                own_rows = rows.chosen(asked_last)
                counted, doubts = rows.columns(own_rows, keys, len(asked_last), here, known, thresholds, near)
                low, certain = host(counted), certain and not bool(host(doubts).any())
            gone = max(1, int(codec.drop * total))
            held = np.stack([_without(own_held, own_low, gone, first, last) for own_held, own_low in zip(held, low)])
    return Decided(list(held), certain)


def _last(past: Sequence[tuple[Any, Any, Any, Any]], history: int, xp: Any) -> list[tuple[Any, Any, Any, Any]]:
    """The last `history` queries of those asked, as one."""
    queries, thresholds = (np.concatenate([one[i] for one in past])[-history:] for i in (0, 1))
    tops, inverses = (xp.concatenate([one[i] for one in past], axis=2)[:, :, -history:] for i in (2, 3))
    return [(queries, thresholds, tops, inverses)]
