"""What a property is, and what is known of the codec when it is asked for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from proofs_checks.conform.instances import Instance, Sizes
from proofs_checks.conform.search import Violation, least
from proofs_checks.conform.subject import Died, ForeignError, Subject, Through

#: Probability that any statistical comparison of one run fails a codec that is right; divided among COMPARISONS (Bonferroni).
FAMILY_LEVEL = 1e-3
#: Statistical comparisons a run can make: the rate bound, usefulness, a law, a bias, and collisions of two seeds with three libraries, by rows and columns.
COMPARISONS = 4 + 2 * 3 * 2
ALPHA = FAMILY_LEVEL / COMPARISONS
#: Claims that a codec may make, and that are then checked.
CLAIMS = ("turboquant-mse", "turboquant-prod", "qjl", "unbiased", "lossless")


@dataclass(frozen=True)
class Property:
    """name; statement: what must hold; check(asked) -> what was seen, or raises Violation, Skip or NotSettled."""

    name: str
    statement: str
    check: Callable[[Asked], str]


class NotSettled(Exception):
    """A statistical comparison that the largest sample does not decide."""


@dataclass
class Asked:
    """One codec under test. bits: a number that it claims, or None; claims: of CLAIMS; examples, seconds: of one search."""

    subject: Subject
    sizes: Sizes
    bits: float | None
    claims: tuple[str, ...]
    takes: str
    state_bytes: int
    says_bits: bool
    refused: dict[str, str] = field(default_factory=dict)  # sizes that it does not code, and what it said
    examples: int = 40
    seconds: float = 20.0
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def seeded(self) -> bool:
        return "seed" in self.subject.about.get("parameters", ())

    @property
    def widths(self) -> bool:
        return "bits" in self.subject.about.get("parameters", ())

    @property
    def calibrated(self) -> bool:
        return self.subject.fit

    @property
    def unbiased(self) -> bool:
        return bool({"unbiased", "qjl", "turboquant-prod"} & set(self.claims))

    def through(self, instance: Instance, **options: Any) -> Through:
        """The round trip; any failure of the codec is a Violation."""
        keys, values = instance.arrays()
        return self.run(keys, values, instance, **options)

    def run(self, keys: Any, values: Any, what: Any, **options: Any) -> Through:
        try:
            through = self.subject.through(keys, values, **options)
        except ForeignError as problem:
            raise Violation(str(problem), what) from None
        for name, x, back in (("keys", keys, through.keys), ("values", values, through.values)):
            if back.shape != x.shape:
                raise Violation(f"{name} of shape {x.shape} came back as {back.shape}", what)
        return through

    def search(self, strategy: Any, check: Callable[[Instance], None]) -> None:
        least(strategy, check, order=lambda i: i.order(), examples=self.examples, seconds=self.seconds)


PROPERTIES: dict[str, Property] = {}


def prop(name: str, statement: str) -> Callable[[Callable[[Asked], str]], Callable[[Asked], str]]:
    """Register a property under `name`."""

    def make(check: Callable[[Asked], str]) -> Callable[[Asked], str]:
        if name in PROPERTIES:
            raise ValueError(f"name: two properties are called {name!r}")
        PROPERTIES[name] = Property(name, statement, check)
        return check

    return make


__all__ = [
    "ALPHA", "CLAIMS", "COMPARISONS", "FAMILY_LEVEL", "PROPERTIES", "Asked", "Died", "NotSettled", "Property", "prop",
]  # fmt: skip
