"""KIVI (arXiv 2402.02750): keys by channel, values by token, and the newest tokens as they are. Nothing is fitted to data.

Keys have channels of large numbers, the same in all tokens, so each channel gets a scale of its own; values have none, and the tokens
that attention reads should not pay for the others. A group has its minimum (the "zero") and a scale, and each number a code of b bits:
asymmetric min/max quantisation, minmax.py.

    keys      group of one head, one channel, `group` tokens          G = group
    values    group of one head, one token, `group` channels, the last one shorter where `group` does not divide value_dim
    recent    the last tokens in full, bit for bit

Which tokens are recent, for T tokens and window R, a multiple of G (section 3.2 and Algorithm 1; R = 128, G = 32 in the paper):

    keys      the last T mod R                     the buffer of new keys is coded as a whole when it holds R of them, and starts anew
    values    the last min(T, R)                   a value is coded when it is R tokens old

so what is coded depends on nothing that comes after it, and appending tokens one by one gives the stream of all of them at once.

Bits: a number that is coded costs b + (16 + 16)/G for float16 and bfloat16 (zero and scale: 3 at the defaults), b + (32 + 16)/G for
float32 and float64, whose zeros are float32 (3.5); a recent one its 16, 32 or 64. So 8,192 tokens of float16 hold 3.10 bits a number
at the defaults, where no key is recent, and 8,319 tokens 3.20.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer
from reference import arguments, memory
from reference.codec import Appender, Codec
from reference.full import _numbers, _token_major
from reference.minmax import Groups, Piece, Stored
from reference.shape import Shape
from reference.stream import Part, Reader
from reference.vectors import largest, refuse

__all__ = ["KIVI"]

#: longer groups are refused
MOST_GROUP = 1 << 16
MOST_WINDOW = 1 << 40


@dataclass(frozen=True)
class KIVI(Codec):
    """KIVI with codes of `bits` bits, 1 to 8 (the paper: 2 and 4), groups of `group` numbers and a window of `window` tokens.

    window: a multiple of group, at least group. Groups never cross heads. Equal numbers in a group come back exactly, the newest
    tokens bit for bit; elsewhere a number is off by at most half its group's scale, (1 + 2^-8) (max - min) / (2^bits - 1) at most.

    Numbers are taken in float32 (the recent ones as they are) and come back in the element type they came in, at most its largest number.
    `encode` raises ValueError for NaN, inf, and float64 numbers that float32 cannot hold, with head, token and channel.

    Pitfalls: "2 bits" are 3 with scales and zeros, and more with the window; on float32 and float64 data the window costs 32 and 64
    bits a number, so compare rates on 16-bit data. For T <= window nothing of the values is coded, for T < window nothing at all.
    One outlying token spoils its channels for the `group` tokens around it.

    Parts, group by group resp. token by token, so that a growing stream grows at the ends of its parts:

        "shape"         reference.shape
        "key zeros"     for each group of tokens, head and channel the minimum, float16, bfloat16 (that of the keys) or else float32
        "key scales"    for each alike the scale, 2 bytes (minmax.py)
        "key codes"     for each alike `group` codes, one a token, packed densely
        "recent keys"   T mod window tokens x kv_heads x head_dim numbers in their element type
        "value zeros", "value scales"    for each token, head and group of channels
        "value codes"   tokens x kv_heads x value_dim codes, packed densely
        "recent values" min(T, window) tokens
    """

    bits: int = 2
    group: int = 32
    window: int = 128

    streaming = True
    part_names = (
        "shape", "key zeros", "key scales", "key codes", "recent keys", "value zeros", "value scales", "value codes", "recent values",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, most in (("bits", 8), ("group", MOST_GROUP), ("window", MOST_WINDOW)):
            arguments.whole(name, getattr(self, name), 1, most)
        if self.window % self.group:
            raise ValueError(f"window: expected a multiple of group = {self.group}, got {self.window}")

    def coded(self, tokens: int) -> tuple[int, int]:
        """(keys, values): how many of the first tokens are quantised where there are `tokens`; the others are recent."""
        return tokens - tokens % self.window, max(0, tokens - self.window)

    def encode_parts(self, data: Layer) -> list[Part]:
        return self.start(data).parts()

    def start(self, layer: Layer) -> Appender:
        appender = _KIVIAppender(self, Shape.of(layer))
        appender.take(layer.keys, layer.values)
        return appender

    def decode_parts(self, parts: list[Reader]) -> Decoded:
        shape = Shape.read(parts[0])
        heads = shape.kv_heads
        key_groups = Groups(self.group, self.group, self.bits, shape.key_dtype)
        value_groups = Groups(shape.value_dim, self.group, self.bits, shape.value_dtype)
        coded_keys, coded_values = self.coded(shape.tokens)
        key_rows, value_rows = coded_keys // self.group * heads * shape.head_dim, coded_values * heads
        # all sizes before anything is allocated
        Stored.check(key_groups, key_rows, parts[1:4], "key")
        Stored.check(value_groups, value_rows, parts[5:8], "value")
        new_keys = _recent(parts[4], "recent keys", shape, coded_keys, shape.head_dim, shape.key_dtype)
        new_values = _recent(parts[8], "recent values", shape, coded_values, shape.value_dim, shape.value_dtype)

        keys = memory.empty((heads, shape.tokens, shape.head_dim), shape.key_dtype)
        zeros, stored, rows = Stored.read(key_groups, key_rows, parts[1:4], "key")
        limit = largest(shape.key_dtype)
        key_groups.decode(zeros, stored, rows, limit, _key_rows(keys, coded_keys, self.group))
        keys[:, coded_keys:] = new_keys

        values = memory.empty((heads, shape.tokens, shape.value_dim), shape.value_dtype)
        zeros, stored, rows = Stored.read(value_groups, value_rows, parts[5:8], "value")
        value_groups.decode_tokens(zeros, stored, rows, largest(shape.value_dtype), values[:, :coded_values])
        values[:, coded_values:] = new_values
        return shape.decoded(keys, values, checked=True)

    def decode_flops(self, stream: bytes) -> int:
        """2 for each quantised number: c s, and + z. Recent ones are moved."""
        from reference.inspection import inspect

        total = 0
        for shape in inspect(stream).shapes:
            keys, values = self.coded(shape.tokens)
            total += 2 * shape.kv_heads * (keys * shape.head_dim + values * shape.value_dim)
        return total


def _key_rows(array: NDArray[Any], coded: int, group: int) -> NDArray[Any]:
    """The first `coded` tokens of array (heads, tokens, d), as rows (groups, heads, d, group); no copy."""
    heads, _, dim = array.shape
    return array[:, :coded].reshape(heads, coded // group, group, dim).transpose(1, 0, 3, 2)


def _recent(reader: Reader, what: str, shape: Shape, coded: int, dim: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The numbers of the tokens from `coded` on, (heads, recent, dim)."""
    return _numbers(reader, what, replace(shape, tokens=shape.tokens - coded), dim, dtype)


class _KIVIAppender(Appender):
    def __init__(self, codec: KIVI, shape: Shape) -> None:
        super().__init__(codec, shape)
        self._window, self._group = codec.window, codec.group
        self._keys = Stored(Groups(codec.group, codec.group, codec.bits, shape.key_dtype))
        self._values = Stored(Groups(shape.value_dim, codec.group, codec.bits, shape.value_dtype))
        self._recent_keys = np.empty((shape.kv_heads, 0, shape.head_dim), shape.key_dtype)
        self._recent_values = np.empty((shape.kv_heads, 0, shape.value_dim), shape.value_dtype)

    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        # both are coded before either is kept: nothing changes if one is refused
        all_keys, all_values = _joined(self._recent_keys, keys), _joined(self._recent_values, values)
        coded_keys = all_keys.shape[1] - all_keys.shape[1] % self._window
        coded_values = max(0, all_values.shape[1] - self._window)
        key_rows, value_rows = (
            _key_rows(all_keys, coded_keys, self._group),
            all_values[:, :coded_values].transpose(1, 0, 2),
        )
        key_piece = self._code("keys", keys, self._keys.groups, key_rows)
        new_keys = _kept("keys", keys, all_keys[:, coded_keys:])
        value_piece = self._code("values", values, self._values.groups, value_rows)
        new_values = _kept("values", values, all_values[:, coded_values:])
        self._keys.keep(key_piece)
        self._values.keep(value_piece)
        self._recent_keys, self._recent_values = new_keys, new_values

    @staticmethod
    def _code(name: str, given: NDArray[Any], groups: Groups, rows: NDArray[Any]) -> Piece:
        try:
            return groups.encode(rows)
        except FloatingPointError:
            refuse(name, given, "KIVI")  # what was taken before is sound
            raise

    def parts(self) -> list[Part]:
        keys, values = _token_major(self._recent_keys), _token_major(self._recent_values)
        return [self.shape.write(), *self._keys.parts(), keys, *self._values.parts(), values]


def _joined(before: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    return np.concatenate([before, new.astype(before.dtype, copy=False)], axis=1) if before.shape[1] else new


def _kept(name: str, given: NDArray[Any], recent: NDArray[Any]) -> NDArray[Any]:
    """A copy of the recent tokens; ValueError, with the place in `given`, for what no later coding could take."""
    try:
        refuse(name, recent, "KIVI")
    except ValueError:
        refuse(name, given, "KIVI")
        raise
    return recent.astype(recent.dtype.newbyteorder("="))
