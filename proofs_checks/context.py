"""What a check runs on: caches, sizes, seeds, and its share of the one family-wise error level of the whole run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from kvtheory import synthetic
from kvtheory.layer import Cache, Layer
from kvtheory.randomness import generator

#: Probability that any statistical comparison of a whole run of true statements is wrong. Stated once, divided (Bonferroni)
#: among all registered claims and inside a claim among its comparisons, so it holds whatever their dependence.
FAMILY_LEVEL = 1e-3

T = TypeVar("T")


@dataclass
class Context:
    """seed: of all randomness. budget: "quick" or "full". cache: the real cache or None. claims: how many share FAMILY_LEVEL."""

    seed: int = 0
    budget: Literal["quick", "full"] = "quick"
    cache: Cache | None = None
    cache_name: str = "none"
    claims: int = 1
    claim_id: str = ""
    _memory: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    #: the kinds of kvtheory.synthetic
    synthetic_kinds = tuple(synthetic.KINDS)

    def size(self, quick: T, full: T) -> T:
        """A size by budget."""
        return quick if self.budget == "quick" else full

    def rng(self, purpose: str) -> np.random.Generator:
        """A generator of its own for each claim and purpose; the same each time it is asked for, mutants included."""
        return generator(self.seed, f"{self.claim_id} {purpose}")

    def alpha(self, comparisons: int) -> float:
        """Error level of one of `comparisons` statistical comparisons of this claim; an interval's level is 1 - alpha."""
        return FAMILY_LEVEL / (self.claims * comparisons)

    def memo(self, key: Hashable, compute: Callable[[], T]) -> T:
        """`compute()`, once for this claim and its mutants: for the truth a check compares with, never for the statement's functions."""
        full_key = (self.claim_id, key)
        if full_key not in self._memory:
            self._memory[full_key] = compute()
        return self._memory[full_key]  # type: ignore[no-any-return]

    def forget(self) -> None:
        """Drop what `memo` kept."""
        self._memory.clear()

    def synthetic(self, kind: str, **sizes: int) -> Layer:
        """kvtheory.synthetic.make with the run's seed."""
        key = ("synthetic", kind, *sorted(sizes.items()))
        if key not in self._memory:
            self._memory[key] = synthetic.make(kind, seed=self.seed, **sizes)
        return self._memory[key]  # type: ignore[no-any-return]

    def real(self) -> list[tuple[str, Layer]]:
        """(label, layer) of each layer of the real cache; empty with --cache none."""
        if self.cache is None:
            return []
        if "real" not in self._memory:
            model = self.cache.meta.get("model", self.cache_name)
            self._memory["real"] = [
                (f"{model} layer {i if layer.index is None else layer.index}", layer)
                for i, layer in enumerate(self.cache)
            ]
        return self._memory["real"]  # type: ignore[no-any-return]
