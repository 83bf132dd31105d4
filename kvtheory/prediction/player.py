"""A model that is played token by token: what it writes into its cache, and what it says of the next token.

KV_t = F(KV_<t, t_t) and P(t_{t+1} | t_<=t) = softmax(logits): the decoder of the entropy bound *is* this function, so a codec that relies on
it says which model it was (`digest`) and how it was run (`plan`); floats differ between plans (theory A10).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Play", "Player", "TokenKV", "law_weights"]

#: weights of a law sum to about this; a token below 2^-40 of the whole has weight 0 and is left to the coder's own smallest probability
WEIGHT_BITS = 40


class TokenKV(NamedTuple):
    """What one position holds in one layer: keys (kv_heads, head_dim), values (kv_heads, value_dim)."""

    keys: NDArray[Any]
    values: NDArray[Any]


class Play(Protocol):
    """One text under way."""

    @property
    def logits(self) -> NDArray[Any] | None:
        """(vocabulary,) of the next token; None at the start, and behind a position that was `put`."""

    def feed(self, token: int) -> list[TokenKV]:
        """One forward pass: the token's keys and values, of each layer, as its cache holds them from now on."""

    def put(self, kv: Sequence[TokenKV]) -> None:
        """A position whose keys and values are given, without a forward pass."""

    def revise(self, kv: Sequence[TokenKV]) -> None:
        """Other keys and values for the latest position, e.g. what a quantiser left of them."""

    def candidates(self, tokens: ArrayLike) -> list[TokenKV]:
        """F(past, v) for each of several tokens v, nothing kept: of each layer keys (c, kv_heads, head_dim), values alike. c forward passes."""


class Player(Protocol):
    """A model, run in a fixed way."""

    vocabulary: int
    digest: bytes
    layers: int

    @property
    def plan(self) -> Mapping[str, Any]:
        """What the bits of a run depend on beside model and tokens: threads, element type, kernels, versions. JSON can hold it."""

    @property
    def flops(self) -> int:
        """Additions and multiplications of one forward pass of one token, without attention: 2 x the weights that it reads."""

    def attention_flops(self, tokens: int) -> int:
        """Those of attention to so many tokens."""

    def start(self) -> Play: ...


def law_weights(logits: ArrayLike) -> NDArray[np.int64]:
    """The next-token law as integers: floor(2^40 exp(z - max z) / sum), (vocabulary,). A coder sees these, never a float.

    ValueError for NaN or +inf, and where every token is impossible.
    """
    z = np.asarray(logits, np.float64)
    if np.isnan(z).any() or np.isposinf(z).any() or not np.isfinite(z).any():
        raise ValueError("logits: expected finite numbers or -inf, at least one of them finite")
    e = np.exp(z - z.max())
    return np.floor(e / e.sum() * 2.0**WEIGHT_BITS).astype(np.int64)
