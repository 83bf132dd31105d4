"""What a predictor is: from what a decoder holds at position t, the expected keys and values of that position, layer by layer.

A decoder holds the past as it was reconstructed (never the exact one: closed loop), perhaps the law of the next token, perhaps the token.
What it has to run or be sent for that is the predictor's price: `needs`, `forwards`, `flops`, `state_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtheory.prediction.player import Play, Player, TokenKV

__all__ = ["Fixed", "Known", "Prediction", "Predictor", "Running"]

Float = NDArray[np.float64]


@dataclass(frozen=True)
class Known:
    """What the decoder knows at `position`.

    sizes: layers, kv_heads, head_dim, value_dim. previous: the reconstructed position before, of each layer; None at the start.
    play, law: the model with the reconstructed past, and integer weights (vocabulary,) of the next token (`law_weights`); None where the
    predictor did not ask for them, and the law at the start. token: this position's, where it was asked for. passed: F(past, token), where
    that was: what the model's pass of the token wrote.
    """

    position: int
    sizes: tuple[int, int, int, int]
    previous: Sequence[TokenKV] | None = None
    play: Play | None = None
    law: NDArray[np.int64] | None = None
    token: int | None = None
    passed: Sequence[TokenKV] | None = None


class Prediction(Protocol):
    """One position's. Layers come in order, and of each layer the keys first: a prediction may look at what was reconstructed so far."""

    def keys(self, layer: int, below: Sequence[TokenKV]) -> NDArray[Any]:
        """(kv_heads, head_dim) expected, after RoPE. below: this position's reconstructed layers 0 to layer - 1."""

    def values(self, layer: int, below: Sequence[TokenKV], keys: NDArray[Any]) -> NDArray[Any]:
        """(kv_heads, value_dim) expected. keys: this layer's, reconstructed."""


class Running(Protocol):
    """A predictor at work on one text."""

    @property
    def law(self) -> NDArray[np.int64] | None:
        """Weights of the next token under a model of the predictor's own; None: it has none, or nothing to say yet."""

    def predict(self, known: Known) -> Prediction: ...

    def took(self, token: int | None) -> None:
        """The position is done; its token, where the stream has tokens."""


class Predictor(Protocol):
    """needs: of "law" (the model is run on every token, and the tokens are in the stream), "token" (the tokens are in the stream, each before
    its position), "pass" (the model is run on the token before its position is predicted), "player" (the model itself, its tables). ahead: whether values are predicted from this position's reconstructed keys.
    """

    name: ClassVar[str]
    needs: frozenset[str]
    ahead: bool

    @property
    def forwards(self) -> int:
        """Forward passes of the target model that a decoder runs for one position, the pass that yields the law included."""

    @property
    def candidates(self) -> int:
        """Those of them that are F(past, v) for a token v that need not be the text's."""

    @property
    def flops(self) -> int:
        """Additions and multiplications a position beside those passes: maps, means, passes of a smaller model."""

    @property
    def state_bytes(self) -> int:
        """Bytes of what was fitted, as `arrays` has it."""

    @property
    def arguments(self) -> tuple[int, ...]:
        """Whole numbers >= 0 that say which predictor of its kind it is."""

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """What was fitted: float32 and int32 arrays by name. `predictors.restore` makes the predictor of them."""

    def start(self, player: Player | None) -> Running:
        """ValueError where "player" or "law" is needed and there is none."""


@dataclass(frozen=True)
class Fixed:
    """A prediction that looks at nothing reconstructed at this position."""

    kv: Sequence[TokenKV]

    def keys(self, layer: int, below: Sequence[TokenKV]) -> NDArray[Any]:
        return np.asarray(self.kv[layer].keys)

    def values(self, layer: int, below: Sequence[TokenKV], keys: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(self.kv[layer].values)

    @classmethod
    def zero(cls, sizes: tuple[int, int, int, int]) -> Fixed:
        """Nothing is expected, e.g. at the start."""
        layers, heads, d, dv = sizes
        return cls([TokenKV(np.zeros((heads, d)), np.zeros((heads, dv)))] * layers)
