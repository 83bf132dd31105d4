"""What a reducer's stream says of the tokens it kept: how many in each head, at which positions, with which log-weights.

    u8 flags       bit 0: the heads keep the tokens of the layer that follows, all of them; bits 1 and 2: form of the log-weights
    positions      without bit 0, for each head: varint kept, then positions as in part "shape"
    log-weights    of all kept tokens, head by head: form 0: all are 0, nothing is written
                   form 1: varint n, n different ones as binary32, ascending, and indices of ceil(log2 n) bits, packed densely
                   form 2: binary32 each

Log-weights are rounded to binary32: a weight w changes by 6e-8 |ln w| of itself. The shorter form is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded
from reference import packing
from reference.shape import Positions, _array, in_order, read_positions, write_positions
from reference.stream import Reader, varint

__all__ = ["Kept"]

MOST_TOKENS = 1 << 40
#: indices have at most 16 bits
MOST_WEIGHTS = 1 << 16


@dataclass(frozen=True, eq=False)
class Kept:
    """Tokens kept of each head.

    places: positions of each head's tokens, ascending; None: all tokens of the layer that follows, at its positions.
    weights: log-weights of all kept tokens, head by head, float32; one number where all have the same; None: all are 0.
    """

    places: tuple[Positions, ...] | None
    weights: NDArray[np.float32] | None

    @classmethod
    def of(cls, decoded: Decoded) -> Kept:
        """ValueError for a log-weight that binary32 cannot hold."""
        kept, positions = decoded.kept, decoded.positions
        own = [positions[h, :n] for h, n in enumerate(kept)]
        alike = all(np.array_equal(own[0], other) for other in own)
        weights = np.concatenate([decoded.log_weights[h, :n] for h, n in enumerate(kept)])
        with np.errstate(over="ignore"):
            single = weights.astype(np.float32) + np.float32(0)
        if not np.isfinite(single).all():
            raise ValueError(f"log_weights: expected numbers that float32 can hold, got {np.abs(weights).max():g}")
        places = None if alike else tuple(in_order(one) for one in own)
        return cls(places, single if single.any() else None)

    def counts(self, heads: int, tokens: int) -> list[int]:
        """How many tokens each head keeps, where the layer that follows has `tokens`."""
        return [tokens] * heads if self.places is None else [len(place) for place in self.places]

    def positions(self, tokens: int) -> NDArray[np.int64]:
        """(kv_heads, tokens): those of each head, its last one (0 where it has none) repeated behind."""
        assert self.places is not None
        out = np.zeros((len(self.places), tokens), np.int64)
        for row, place in zip(out, self.places):
            if len(place):
                row[: len(place)] = _array(place)
                row[len(place) :] = place[-1]
        return out

    def restore(self, decoded: Decoded) -> Decoded:
        """What the receiver holds: `decoded`, what the layer that follows decodes to, with padding and weights. ValueError if it does not fit."""
        if self.places is None and self.weights is None:
            return decoded  # a last stage may itself have left fewer tokens
        heads, tokens = decoded.positions.shape
        counts = np.array(self.counts(heads, tokens), np.int64)
        if len(counts) != heads or (self.places is not None and counts.max() != tokens):
            raise ValueError(
                f"kept: {len(counts)} heads of at most {counts.max()} tokens, but {heads} of {tokens} follow"
            )
        total = int(counts.sum())
        if self.weights is not None and self.weights.size not in (1, total):
            raise ValueError(f"kept: {self.weights.size} log-weights for {total} tokens")
        padding = np.arange(tokens) >= counts[:, None]
        positions = decoded.positions if self.places is None else np.where(padding, -1, self.positions(tokens))
        log_weights = np.where(padding, -np.inf, 0.0)
        if self.weights is not None:
            log_weights[~padding] = self.weights
        keys, values = decoded.keys, decoded.values
        if padding.any():
            keys, values = keys.copy(), values.copy()
            keys[padding] = values[padding] = 0
        return Decoded(keys, values, log_weights, positions, counts)

    def write(self) -> bytes:
        form, weights = self._weights()
        pieces = [bytes([(self.places is None) | form << 1])]
        for place in self.places or ():
            pieces += [varint(len(place)), write_positions(place)]
        return b"".join([*pieces, weights])

    def _weights(self) -> tuple[int, bytes]:
        if self.weights is None:
            return 0, b""
        table, codes = np.unique(self.weights, return_inverse=True)
        plain = self.weights.astype("<f4").tobytes()
        if table.size > MOST_WEIGHTS:
            return 2, plain
        bits = (table.size - 1).bit_length()
        coded = varint(table.size) + table.astype("<f4").tobytes() + (packing.pack(codes, bits) if bits else b"")
        return (1, coded) if len(coded) < len(plain) else (2, plain)

    @classmethod
    def read(cls, reader: Reader, heads: int, tokens: int) -> Kept:
        """From all of `reader`, where a layer of `heads` heads and `tokens` tokens follows. Allocates no more than it reads."""
        start = reader.offset
        flags = reader.u8("kept: flags")
        form = flags >> 1
        if form > 2:
            reader.fail(f"kept: expected a form of log-weights below 3, got {form}", start)
        places: tuple[Positions, ...] | None = None
        if not flags & 1:
            if heads > reader.remaining:
                reader.fail(f"kept: {heads} heads, but {reader.remaining} bytes remain")
            places = tuple(
                _as_positions(read_positions(reader, reader.varint("kept tokens", most=tokens))) for _ in range(heads)
            )
        total = heads * tokens if places is None else sum(len(place) for place in places)
        weights = _read_weights(reader, form, total) if form else None
        reader.end("kept")
        return cls(places, weights)


def _as_positions(positions: Positions) -> Positions:
    return positions if isinstance(positions, range) else positions.astype(np.int64, copy=False)


def _read_weights(reader: Reader, form: int, total: int) -> NDArray[np.float32]:
    start = reader.offset
    if form == 2:
        weights: NDArray[Any] = reader.array("<f4", total, "log-weights").astype(np.float32)
    else:
        size = reader.varint("number of log-weights", most=min(MOST_WEIGHTS, total))
        table = reader.array("<f4", size, "table of log-weights").astype(np.float32)
        if not np.isfinite(table).all():
            reader.fail("table of log-weights: expected finite numbers", start)
        if not (np.diff(table) > 0).all() or not size:
            reader.fail("table of log-weights: expected at least one number, ascending", start)
        bits, weights = (size - 1).bit_length(), table
        if bits:
            at = reader.offset
            codes = packing.unpack(reader.part(packing.packed_size(total, bits), "indices of log-weights"), total, bits)
            if int(codes.max(initial=0)) >= size:
                reader.fail(f"indices of log-weights: expected numbers below {size}, got {int(codes.max())}", at)
            weights = table[codes]
    if not np.isfinite(weights).all():
        reader.fail("log-weights: expected finite numbers", start)
    return weights + np.float32(0)
