"""What a certificate is: two sides known exactly or as balls, and a relation that is decided only where it is decided for the whole balls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import flint
from flint import acb_mat, arb, fmpq, fmpq_mat

#: bits of all ball arithmetic: 60 digits, so that the 12 that are asked for survive a long sum
PRECISION = 200

Relation = Literal["<=", "<", "="]
Side = Any  # arb | fmpq | int


@dataclass(frozen=True)
class Certificate:
    """`left relation right` on one instance. controls: wrong formulas of the same inequality, {name: (left, right)}, that must be refuted."""

    claim: str
    what: str
    instance: str
    left: Side
    relation: Relation
    right: Side
    controls: Mapping[str, tuple[Side, Side]] = field(default_factory=dict)


def rational(x: Any) -> fmpq:
    """An int, Fraction or float (its exact value) as a rational."""
    if isinstance(x, fmpq):
        return x
    return fmpq(*Fraction(x).as_integer_ratio())


def ball(x: Any) -> arb:
    """A rational as the smallest ball; a ball as it is."""
    return x if isinstance(x, arb) else arb(rational(x) if isinstance(x, (float, Fraction)) else x)


def exact(x: Side) -> bool:
    return isinstance(x, (int, fmpq, flint.fmpz))


def decide(left: Side, relation: Relation, right: Side) -> bool | None:
    """True where it holds for every point of the balls, False where it holds for none, None where they do not decide.

    "=" of balls cannot be proved by balls: it is True where they overlap and both are known to 1e-40, absolutely; exact sides are compared.
    """
    if exact(left) and exact(right):
        a, b = fmpq(left), fmpq(right)
        return bool(a <= b if relation == "<=" else a < b if relation == "<" else a == b)
    a, b = ball(left), ball(right)
    if relation == "=":
        if not a.overlaps(b):
            return False
        return True if max(float(a.rad()), float(b.rad())) < 1e-40 else None
    if relation == "<=":
        return True if a <= b else (False if a > b else None)
    return True if a < b else (False if a >= b else None)


def margin(certificate: Certificate) -> Side:
    return certificate.right - certificate.left


def shown(x: Side, digits: int = 15) -> str:
    """A rational as it is when short, otherwise digits and radius."""
    if exact(x):
        text = str(x)
        return text if len(text) <= 24 else f"{ball(x).str(digits, radius=False)} (exact)"
    return str(x.str(digits, more=False))


# -- linear algebra ----------------------------------------------------------------------------------------------------


def matrix(rows: Sequence[Sequence[Any]]) -> fmpq_mat:
    return fmpq_mat([[rational(x) for x in row] for row in rows])


def eigenvalues(symmetric: fmpq_mat) -> list[arb]:
    """Balls around the eigenvalues of a rational symmetric matrix, descending; those that are 0 by its rank are exactly 0."""
    n, rank = symmetric.nrows(), symmetric.rank()
    try:
        found = [x.real for x in acb_mat(symmetric).eig(multiple=rank < n - 1)]
    except ValueError:  # several alike
        found = [x.real for x in acb_mat(symmetric).eig(multiple=True)]
    found.sort(key=lambda x: -float(x.mid()))
    zero = found[rank:]
    if not all(x.contains(0) for x in zero):
        raise ValueError("eigenvalues: the smallest ones should enclose 0")
    return found[:rank] + [arb(0)] * (n - rank)


def log2(x: Any) -> arb:
    return ball(x).log() / arb(2).log()


def entropy(probabilities: Iterable[Any]) -> arb:
    """H in bits of rational probabilities."""
    total = arb(0)
    for p in probabilities:
        if p != 0:
            total -= ball(p) * log2(p)
    return total
