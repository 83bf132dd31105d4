"""Evidence: one comparison that a check made, with all that a reviewer needs to judge it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from kvtheory.statistics import Interval

Kind = Literal["exact", "certified", "numerical", "statistical", "search"]
Role = Literal["statement", "control", "assumption"]
Relation = Literal["=", "<=", ">=", "<", ">", "!="]

_HOLDS = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """`observed` `relation` `predicted`, and whether that is so.

    agrees: True, False, or None where the evidence cannot tell. role "statement" counts for or against the claim; "control" is a
    value known independently, and says that the instrument measures right; "assumption" is measured and reported, not judged.
    tightness: observed / bound where a bound is claimed (1 = attained).
    """

    kind: Kind
    role: Role
    what: str
    ran_on: str
    observed: Any
    relation: Relation
    predicted: Any
    agrees: bool | None
    tolerance: float | None = None
    because: str | None = None
    interval: Interval | None = None
    margin: float | None = None
    tightness: float | None = None
    worst_case: str | None = None
    note: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def exact(
    *,
    what: str,
    ran_on: str,
    observed: Any,
    predicted: Any,
    relation: Relation = "=",
    role: Role = "statement",
    **more: Any,
) -> Evidence:
    """Rational, symbolic, integer or logical comparison, without rounding."""
    for value in (observed, predicted):
        if isinstance(value, float) and not value.is_integer() and Fraction(value).denominator > 2**40:
            raise TypeError(f"exact: {what}: {value!r} is a rounded float; use a Fraction, an int or numerical(...)")
    return Evidence(
        kind="exact", role=role, what=what, ran_on=ran_on, observed=observed, relation=relation, predicted=predicted,
        agrees=bool(_HOLDS[relation](observed, predicted)), **more,
    )  # fmt: skip


def certified(
    *, what: str, ran_on: str, observed: tuple[float, float], predicted: float | tuple[float, float], relation: Relation = "=",
    role: Role = "statement", **more: Any,
) -> Evidence:  # fmt: skip
    """Comparison of enclosures from interval arithmetic: decided only where the enclosures decide it.

    relation "=" agrees when the enclosures overlap and `observed` is no wider than `predicted` where that is an interval
    (a printed rounded figure), or tighter than 1e-9 relative where it is a number.
    """
    low, high = (float(x) for x in observed)
    lower, upper = predicted if isinstance(predicted, tuple) else (predicted, predicted)
    agrees: bool | None
    if relation == "=":
        disjoint = high < lower or low > upper
        inside = (
            lower <= low and high <= upper
            if isinstance(predicted, tuple)
            else high - low <= 1e-9 * max(abs(low), abs(high))
        )
        agrees = False if disjoint else (True if inside else None)
    elif relation in ("<=", "<", ">=", ">"):
        below = relation in ("<=", "<")
        sure = _HOLDS[relation](high, lower) if below else _HOLDS[relation](low, upper)
        impossible = not _HOLDS[relation](low, upper) if below else not _HOLDS[relation](high, lower)
        agrees = True if sure else (False if impossible else None)
    else:
        agrees = True if high < lower or low > upper else None
    return Evidence(
        kind="certified", role=role, what=what, ran_on=ran_on, observed=[low, high], relation=relation, predicted=predicted,
        agrees=agrees, **more,
    )  # fmt: skip


def numerical(
    *, what: str, ran_on: str, observed: float, predicted: float, relation: Relation = "=", tolerance: float, because: str,
    role: Role = "statement", **more: Any,
) -> Evidence:  # fmt: skip
    """Float64 comparison: "=" within `tolerance` relative to the larger side; "<=" and ">=" with that much room.

    `because` says where the tolerance comes from (conditioning, sizes, a quadrature's error estimate). NaN or inf cannot tell.
    """
    observed, predicted, tolerance = float(observed), float(predicted), float(tolerance)
    room = tolerance * max(abs(observed), abs(predicted))
    difference = observed - predicted
    agrees: bool | None = {
        "=": abs(difference) <= room, "!=": abs(difference) > room, "<=": difference <= room, ">=": difference >= -room,
        "<": difference < -room, ">": difference > room,
    }[relation]  # fmt: skip
    if not (math.isfinite(observed) and math.isfinite(predicted)):
        agrees = None  # a NaN supports no verdict, least of all "fails as stated"
    return Evidence(
        kind="numerical", role=role, what=what, ran_on=ran_on, observed=observed, relation=relation, predicted=predicted,
        agrees=agrees, tolerance=tolerance, because=because, **more,
    )  # fmt: skip


def statistical(
    *, what: str, ran_on: str, interval: Interval, predicted: float, relation: Relation = "=", margin: float = 0.0,
    role: Role = "statement", **more: Any,
) -> Evidence:  # fmt: skip
    """Comparison of a confidence interval with a prediction.

    "=": an equivalence test: agrees when the whole interval lies within predicted (1 +- margin), disagrees when it lies
    outside that band altogether, and cannot tell otherwise. "<=" agrees when the whole interval lies at or below predicted
    (1 + margin), disagrees when it lies above it; ">=" likewise. A wide interval never counts as agreement.
    """
    if relation == "=" and margin <= 0:
        raise ValueError(f"statistical: {what}: an equivalence test needs a margin above 0")
    low, high = interval.low, interval.high
    band = sorted((predicted * (1 - margin), predicted * (1 + margin)))
    agrees: bool | None
    if relation == "=":
        agrees = True if band[0] <= low and high <= band[1] else (False if high < band[0] or low > band[1] else None)
    elif relation in ("<=", "<"):
        agrees = True if high <= band[1] else (False if low > band[1] else None)
    elif relation in (">=", ">"):
        agrees = True if low >= band[0] else (False if high < band[0] else None)
    else:
        agrees = True if high < band[0] or low > band[1] else None
    return Evidence(
        kind="statistical", role=role, what=what, ran_on=ran_on, observed=interval.estimate, relation=relation,
        predicted=float(predicted), agrees=agrees, interval=interval, margin=margin or None, **more,
    )  # fmt: skip


def search(
    *, what: str, ran_on: str, worst: float, bound: float, relation: Relation = "<=", tries: int, optimiser: str,
    role: Role = "statement", **more: Any,
) -> Evidence:  # fmt: skip
    """The worst value an adversary found in `tries` tries. Disagreement is a counterexample; agreement proves nothing and says so."""
    return Evidence(
        kind="search", role=role, what=what, ran_on=f"{ran_on}; {tries} tries, {optimiser}", observed=float(worst),
        relation=relation, predicted=float(bound), agrees=bool(_HOLDS[relation](worst, bound)), **more,
    )  # fmt: skip


@dataclass(frozen=True)
class Picture:
    """Data of a figure: plain lists, numbers and strings, saved as JSON; figures/<figure>.py draws it."""

    figure: str
    data: dict[str, Any]


@dataclass(frozen=True)
class NotRun:
    """What a check needs is absent: what it is and how to get it."""

    missing: str
    how: str
