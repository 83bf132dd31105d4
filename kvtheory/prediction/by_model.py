"""Predictors that run the model itself: the mean over the law's likeliest tokens, over all tokens, or the token that came."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvtheory.prediction.player import Player, TokenKV
from kvtheory.prediction.predictor import Fixed, Known, Prediction

__all__ = ["FullVocabulary", "KnownToken", "TopK", "likeliest"]


#: candidates that are asked for together
AT_ONCE = 1024


def likeliest(law: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The k tokens of largest weight, largest first, ties by id; all tokens of weight > 0 where they are fewer."""
    order = np.argsort(-law, kind="stable")[:k]
    return np.asarray(order[law[order] > 0])


@dataclass(frozen=True)
class TopK:
    """KVhat_t = sum_{v in top-k} p_v F(past, v) / sum p_v: the k likeliest tokens, renormalised. Nothing (zero) at the first position.

    A decoder runs k + 1 forward passes a position: one of each candidate, and one of the token itself, which yields the law of the next.
    Source: arXiv 2604.15356, predicted KV (k about 20, cost printed as O(k d_model); theory A6).
    """

    k: int = 16

    name: ClassVar[str] = "TopK"
    needs = frozenset({"player", "law"})
    ahead = False
    state_bytes = 0

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"k: expected an int >= 1, got {self.k!r}")

    @property
    def candidates(self) -> int:
        return self.k

    @property
    def forwards(self) -> int:
        return self.k + 1

    @property
    def flops(self) -> int:
        return 0  # 2 k a number for the mean: nothing beside the passes

    @property
    def arguments(self) -> tuple[int, ...]:
        return (self.k,)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def start(self, player: Player | None) -> _OfLaw:
        return _OfLaw(_given(player, self.name), self.k)


@dataclass(frozen=True)
class FullVocabulary:
    """KVhat_t = E[F(past, t)], the paper's definition (A-D4): a forward pass for each token of the vocabulary.

    For toys; on a model of 135 million weights a position takes minutes (benchmarks/sequential/vocabulary.py).
    """

    vocabulary: int

    name: ClassVar[str] = "FullVocabulary"
    needs = frozenset({"player", "law"})
    ahead = False
    state_bytes = 0
    flops = 0

    @property
    def candidates(self) -> int:
        return self.vocabulary

    @property
    def forwards(self) -> int:
        return self.vocabulary + 1

    @property
    def arguments(self) -> tuple[int, ...]:
        return (self.vocabulary,)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def start(self, player: Player | None) -> _OfLaw:
        its = _given(player, self.name)
        if its.vocabulary != self.vocabulary:
            raise ValueError(f"player: expected a vocabulary of {self.vocabulary}, got {its.vocabulary}")
        return _OfLaw(its, self.vocabulary)


@dataclass(frozen=True)
class KnownToken:
    """F(past, t) of the token that came, which the stream has anyway where it has the law: the rival that every mean has to beat.

    One forward pass a position. Exact up to what the past lost; then what is left to code is the drift alone.
    """

    name: ClassVar[str] = "KnownToken"
    needs = frozenset({"player", "law", "token", "pass"})
    ahead = False
    state_bytes = 0
    flops = 0
    #: the pass of the token itself is the prediction: it yields the next law as well
    candidates = 0
    forwards = 1
    arguments: ClassVar[tuple[int, ...]] = ()

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        return {}

    def start(self, player: Player | None) -> _OfToken:
        _given(player, self.name)
        return _OfToken()


def _given(player: Player | None, name: str) -> Player:
    if player is None:
        raise ValueError(f"player: {name} runs the model, got none")
    return player


class _OfLaw:
    law = None

    def __init__(self, player: Player, k: int) -> None:
        self._k = min(k, player.vocabulary)

    def predict(self, known: Known) -> Prediction:
        if known.law is None:
            return Fixed.zero(known.sizes)
        assert known.play is not None
        tokens = likeliest(known.law, self._k)
        p = known.law[tokens] / int(known.law[tokens].sum())
        # a whole vocabulary's keys and values at once are gigabytes
        total: list[TokenKV] = []
        for start in range(0, len(tokens), AT_ONCE):
            some = slice(start, start + AT_ONCE)
            part = [
                TokenKV(*(np.tensordot(p[some], np.asarray(a, np.float64), 1) for a in one))
                for one in known.play.candidates(tokens[some])
            ]
            total = [TokenKV(*(a + b for a, b in zip(one, two))) for one, two in zip(total, part)] if total else part
        return Fixed(total)

    def took(self, token: int | None) -> None:
        pass


class _OfToken:
    law = None

    def predict(self, known: Known) -> Prediction:
        assert known.passed is not None
        return Fixed(known.passed)

    def took(self, token: int | None) -> None:
        pass
