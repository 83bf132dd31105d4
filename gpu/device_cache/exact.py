"""Tokens as they are: a full cache, what a reducer kept, sinks, windows, tails. Kernel: gpu/kernels/attention_exact.cu."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu.device_cache.bound import Magnitudes
from gpu.device_cache.segment import POSITIONS, Segment
from gpu.module import ELEMENT, Kernel, Source, element
from gpu.resident import device
from reference.shape import Positions, in_order

__all__ = ["Exact", "plain_magnitudes", "single"]

_SOURCE = Source("attention_exact.cu", [f"attend_exact<{t}>" for t in ELEMENT.values()])


def single(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Numbers in an element type that kernels take: float64 as float32. ValueError for those that it cannot hold."""
    if array.dtype.newbyteorder("=") != np.float64:
        return array
    with np.errstate(over="ignore"):
        own = array.astype(np.float32)
    if not np.isfinite(own).all():
        raise ValueError(
            f"{name}: expected numbers that float32 can hold, got {array[tuple(np.argwhere(~np.isfinite(own))[0])]}"
        )
    return own


class Exact(Segment):
    """keys, values: flat arrays on the device; token t of head h is at starts[h] + t step."""

    def __init__(
        self, xp: Any, keys: Any, values: Any, starts: Any, steps: tuple[int, int], kv_heads: int, tokens: int,
        dims: tuple[int, int], positions: Positions, **others: Any,
    ) -> None:  # fmt: skip
        self._roundings = [int(one) for one in others.pop("roundings", (0, 0))]
        super().__init__(xp, kv_heads, tokens, dims, positions, **others)
        if keys.dtype != values.dtype:  # the kernel has one element type: float32 holds all others
            keys, values = keys.astype(np.float32), values.astype(np.float32)
        self._arrays, self._steps = (keys, values), steps
        self.starts = tuple(device(np.ascontiguousarray(one, np.int64), xp) for one in starts)

    @classmethod
    def token_major(
        cls, xp: Any, keys: NDArray[Any], values: NDArray[Any], positions: Positions, **others: Any
    ) -> Exact:
        """Of arrays (tokens, kv_heads, dim) on the host, as streams have them."""
        tokens, heads, dim = keys.shape
        value_dim = values.shape[2]
        starts = np.arange(heads) * np.array([[dim], [value_dim]])
        own = [device(single(name, one).reshape(-1), xp) for name, one in (("keys", keys), ("values", values))]
        others["roundings"] = [one.dtype == np.float64 for one in (keys, values)]
        return cls(
            xp,
            own[0],
            own[1],
            starts,
            (heads * dim, heads * value_dim),
            heads,
            tokens,
            (dim, value_dim),
            positions,
            **others,
        )

    @classmethod
    def ragged(
        cls, xp: Any, keys: list[NDArray[Any]], values: list[NDArray[Any]], positions: Positions, **others: Any
    ) -> Exact:
        """Of each head's own tokens (count, dim), on the host; `counts` among the others."""
        counts = np.array([len(one) for one in keys], np.int64)
        before = np.cumsum(counts) - counts
        dims = keys[0].shape[1], values[0].shape[1]
        own = [
            device(single(name, np.concatenate(one)).reshape(-1), xp)
            for name, one in (("keys", keys), ("values", values))
        ]
        starts = before * np.array(dims)[:, None]
        others["roundings"] = [one[0].dtype == np.float64 for one in (keys, values)]
        return cls(
            xp,
            own[0],
            own[1],
            starts,
            dims,
            len(counts),
            max(counts.tolist(), default=0),
            dims,
            positions,
            counts=counts,
            **others,
        )

    def kernel(self) -> Kernel:
        return _SOURCE[f"attend_exact<{element(self._arrays[0].dtype)}>"]

    def arguments(self) -> tuple[Any, ...]:
        return *self._arrays, *self.starts, *map(np.int64, self._steps)

    def arrays(self) -> list[Any]:
        return list(self._arrays)

    def grow(self, keys: Any, values: Any, positions: NDArray[np.int64]) -> None:
        """More tokens (n, kv_heads, dim) behind those of a `token_major` one, in arrays that double; on the device, of its element type."""
        xp, used, more = self.xp, self.tokens, len(keys)
        arrays = []
        for own, new, step in zip(self._arrays, (keys, values), self._steps):
            room = own.size // step
            if used + more > room:
                wider = xp.empty(max(used + more, 2 * room) * step, own.dtype)
                wider[: used * step] = own[: used * step]
                own = wider  # noqa: PLW2901
            own[used * step : (used + more) * step] = new.reshape(-1)
            arrays.append(own)
        self._arrays = (arrays[0], arrays[1])
        self._relocate(np.concatenate([np.asarray(self.positions), positions]).astype(np.int64), self.start)

    @property
    def start(self) -> int:
        assert isinstance(self.index, slice)
        return int(self.index.start)

    def cut(self, count: int) -> None:
        """Without the first `count` tokens, which move up."""
        left = self.tokens - count
        self._arrays = tuple(
            self.xp.ascontiguousarray(own[count * step : self.tokens * step])
            for own, step in zip(self._arrays, self._steps)
        )  # type: ignore[assignment]
        self._relocate(np.asarray(self.positions)[count:], self.start + count)
        assert self.tokens == left

    def taken(self, count: int) -> tuple[Any, Any]:
        """The first `count` tokens, (kv_heads, count, dim) each."""
        return tuple(
            own[: count * step].reshape(count, self.kv_heads, dim).transpose(1, 0, 2)
            for own, step, dim in zip(self._arrays, self._steps, self.dims)
        )  # type: ignore[return-value]

    def _relocate(self, positions: NDArray[np.int64], first: int) -> None:
        """These positions, of tokens `first` ... of a decoded cache."""
        self.tokens, self.index = len(positions), slice(first, first + len(positions))
        self.positions = in_order(positions)
        self._flags &= ~POSITIONS
        if isinstance(self.positions, range):
            self._first = self.positions.start
        else:
            self._positions, self._flags = device(self.positions, self.xp), self._flags | POSITIONS

    def magnitudes(self, q: Any, scale: float, keys: Any, values: Any) -> Magnitudes:
        return plain_magnitudes(q, scale, keys, values, *self._roundings)


def plain_magnitudes(
    q: Any, scale: float, keys: Any, values: Any, key_roundings: int = 0, value_roundings: int = 0
) -> Magnitudes:
    """Of keys and values in no frame."""
    owner = np.arange(len(q)) // (len(q) // len(keys))
    logits = scale * np.einsum("hqd,htd->hqt", np.abs(q), np.abs(keys)[owner])
    return Magnitudes(logits, np.abs(values), key_roundings, value_roundings)
