"""Transform coders: their exact tokens as one segment, their coded ones as another. Kernels: attention_fixed.cu, attention_entropy.cu."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device_cache.bound import Magnitudes, rounding
from gpu.device_cache.exact import Exact
from gpu.device_cache.segment import Frame, Segment
from gpu.device_cache.where import Where
from gpu.resident import device
from kvtheory.layer import Rope
from reference.kept import Kept
from reference.rotary import rotary
from reference.shape import Shape
from reference.stream import Reader
from reference.transform_coding.codec import LayerCoder, TransformCodec
from reference.transform_coding.entropy import NOT_CODED, EntropyCoder
from reference.transform_coding.fixed import FixedCoder, FixedUnit

#: roundings of a number that RoPE turns: its cosine and sine are within 6 units of the exact ones, then products, their sum, the scaling
TURN = 10

__all__ = ["TURN", "Pairs", "Stacked", "exact_ends", "segments"]


def segments(codec: TransformCodec, parts: list[Reader], kept: Kept | None, xp: Any) -> tuple[Shape, list[Segment]]:
    """Coded tokens first: their parts are checked before anything is put on the device."""
    from gpu.device_cache import entropy, fixed

    apart = kept is not None and kept.places is not None
    shape, fitted, first, last, keys, values = codec._opened(parts, kept if apart else None)
    where = Where.of(shape, kept)
    plain = kept is None or (kept.places is None and kept.weights is None)
    own = (where.weighed(fitted.log_weights) if plain else where).at(slice(first, last))
    dtypes = shape.key_dtype, shape.value_dtype
    coded: Segment
    if isinstance(fitted.coder, FixedCoder):
        coded = fixed.segment(fitted, fitted.coder, parts[3:], last - first, own, dtypes, xp)
    elif isinstance(fitted.coder, EntropyCoder):
        coded = entropy.segment(fitted, fitted.coder, parts[3:], last - first, own, dtypes, xp)
    else:
        raise NotImplementedError(f"stream: no kernel reads the codes of {type(fitted.coder).__name__}")
    return shape, [coded, *exact_ends(keys, values, first, last, shape.tokens, where, xp)]


def exact_ends(
    keys: NDArray[Any], values: NDArray[Any], first: int, last: int, tokens: int, where: Where, xp: Any
) -> list[Segment]:
    """Tokens before `first` and from `last` on as one segment, of arrays (kv_heads, both, dim)."""
    index = np.concatenate([np.arange(first), np.arange(last, tokens)]).astype(np.int64)
    if not index.size:
        return []
    own = where.at(slice(0, first) if index.size == first else index)
    return [Exact.token_major(xp, keys.transpose(1, 0, 2), values.transpose(1, 0, 2), **own)]


@dataclass(frozen=True)
class Pairs:
    """A rope as kernels take it."""

    frequencies: Any
    pairs: int
    interleaved: bool
    scaling: float

    @classmethod
    def of(cls, rope: Rope | None, xp: Any) -> Pairs:
        if rope is None:
            return cls(xp.zeros(1, np.uint64), 0, False, 1.0)
        turn = rotary(rope)
        frequencies = turn.turns if turn.turns.size else np.zeros(1, np.uint64)
        return cls(device(frequencies, xp), len(turn.turns), rope.layout == "interleaved", turn.scaling)


@dataclass(frozen=True)
class Stacked:
    """Where a layer's keys and values are in its units: of each unit its synthesis, mean, and the places of a stacked vector that it makes."""

    fitted: LayerCoder
    units: list[Any]

    def rows(self, unit: int, head: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(rows of the unit, channels) that make keys (side 0) or values (1) of a head."""
        heads, dim, value_dim = self.fitted.sizes
        start, size = (head * dim, dim) if side == 0 else (heads * dim + head * value_dim, value_dim)
        places = self.units[unit].basis.places
        rows = np.flatnonzero((places >= start) & (places < start + size))
        return rows, places[rows] - start

    def frame(self, side: int, columns: list[list[tuple[int, int]]], width: int) -> Frame:
        """columns[head]: (unit, column of it) of each column of the head's frame, of which `width` are made."""
        heads, *dims = self.fitted.sizes
        matrices, means = np.zeros((heads, dims[side], width)), np.zeros((heads, dims[side]))
        for head in range(heads):
            for unit in range(len(self.units)):
                rows, channels = self.rows(unit, head, side)
                if not rows.size:
                    continue
                basis = self.units[unit].basis
                means[head, channels] = basis.mean[rows].astype(np.float64)
                own = [(j, c) for j, (u, c) in enumerate(columns[head][:width]) if u == unit]
                if own:
                    at, of = np.array(own).T
                    matrices[head][np.ix_(channels, at)] = basis.synthesis[np.ix_(rows, of)]
        return Frame(matrices, means)

    def touched(self, head: int, side: int) -> list[int]:
        """Units that make any of it."""
        return [unit for unit in range(len(self.units)) if self.rows(unit, head, side)[0].size]

    def coefficients(
        self, keys: NDArray[np.float64], values: NDArray[np.float64], positions: NDArray[np.int64], dtypes: Any
    ) -> list[NDArray[np.float64]]:
        """At least the magnitudes of each unit's coefficients (tokens, columns), of what tokens decode to; positions (tokens,) or (heads, tokens).

        y = S^+ (x - mean) where S has independent columns; a decoder's rounding of x to an element type moves y by |S^+| times it at most.
        """
        heads, tokens, _ = keys.shape
        errors = [unit * np.abs(x) + least for x, (unit, least) in zip((keys, values), map(rounding, dtypes))]
        rope = self.fitted.rope
        if rope is not None:
            turn = rotary(rope)
            keys = turn.undo(keys, np.broadcast_to(positions, (heads, tokens)))
            both = errors[0][..., turn.first] + errors[0][..., turn.second]
            errors[0][..., turn.first] = errors[0][..., turn.second] = both / turn.scaling
        x, dx = (
            np.concatenate([part.transpose(1, 0, 2).reshape(tokens, -1) for part in pair], axis=1)
            for pair in ((keys, values), errors)
        )
        out = []
        for unit in self.units:
            basis = unit.basis
            live = unit.bits > 0 if isinstance(unit, FixedUnit) else (unit.tables != NOT_CODED).any(axis=0)
            y = np.zeros((tokens, basis.size))
            own = basis.synthesis[:, live]
            norms = np.linalg.norm(own, axis=0)
            norms = np.where(norms > 0, norms, 1.0)
            inverse = np.linalg.pinv(own / norms, rcond=1e-12) / norms[:, None]
            places = basis.places
            y[:, live] = (
                np.abs((x[:, places] - basis.mean.astype(np.float64)) @ inverse.T) + dx[:, places] @ np.abs(inverse).T
            )
            out.append(y)
        return out

    def magnitudes(self, q: NDArray[np.float64], scale: float, keys: NDArray[np.float64], values: NDArray[np.float64], positions: NDArray[np.int64],
                   dtypes: Any) -> Magnitudes:  # fmt: skip
        """Of coefficients, which are rounded 4 times at most; with RoPE, of keys that are made of them."""
        heads, dim, value_dim = self.fitted.sizes
        y, owner, tokens = (
            self.coefficients(keys, values, positions, dtypes),
            np.arange(len(q)) // (len(q) // heads),
            keys.shape[1],
        )
        logits = np.zeros((len(q), q.shape[1], tokens))
        sides = [np.zeros((heads, tokens, size)) for size in (dim, value_dim)]
        most = 0
        for head in range(heads):
            for unit, own in enumerate(self.units):
                basis = own.basis
                for side, made in enumerate(sides):
                    rows, channels = self.rows(unit, head, side)
                    made[head][:, channels] += y[unit] @ np.abs(basis.synthesis[rows]).T + np.abs(
                        basis.mean[rows].astype(np.float64)
                    )
                rows, channels = self.rows(unit, head, 0)
                if rows.size:
                    most += basis.size
                    for h in np.flatnonzero(owner == head):
                        turned = np.abs(q[h][:, channels] @ basis.synthesis[rows])
                        offset = np.abs(q[h][:, channels] @ basis.mean[rows].astype(np.float64))
                        logits[h] += scale * (turned @ y[unit].T + offset[:, None])
        rope = self.fitted.rope
        if rope is None:
            return Magnitudes(logits, sides[1], 4, 4)
        turn, wide = rotary(rope), sides[0]
        both = (wide[..., turn.first] + wide[..., turn.second]) * turn.scaling
        wide[..., turn.first] = wide[..., turn.second] = both
        logits = scale * np.einsum("hqd,htd->hqt", np.abs(q), wide[owner])
        return Magnitudes(logits, sides[1], TURN + 6 + most, 4)
