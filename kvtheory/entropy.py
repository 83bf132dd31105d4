"""Entropies of a token source and of the cache that a deterministic model writes for it, by exact enumeration.

    t_1 .. t_n    tokens, drawn from a law on strings of one length
    KV_t          what the model writes at position t: a function of t_1 .. t_t

Weights stay integers over one common denominator from the law to the last step, so that two caches are equal or
different, never nearly equal; only w/W * log2(W/w) is floating point.  Where all probabilities are powers of two every
number here is exact.  The plug-in entropy of a sample is biased down; nothing here samples.

Source: arXiv 2604.15356, theorem 1, which bounds each step; what holds of it without its assumption is derived here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from fractions import Fraction
from numbers import Rational, Real
from typing import Any, NamedTuple, Protocol, runtime_checkable

__all__ = [
    "FiniteLanguage",
    "Law",
    "MarkovSource",
    "SequentialEntropies",
    "conditional_entropy_bits",
    "entropy_bits",
    "is_injective",
    "next_token_given_kv",
    "sequential",
    "surprisal_bits",
    "tokens_given_kv",
]

Token = Hashable
Prefix = tuple[Any, ...]
KVMap = Callable[[Prefix], Hashable]


@runtime_checkable
class Law(Protocol):
    """A law on token strings, given by what comes next: a `FiniteLanguage`, a `MarkovSource`, a wrapped causal LM."""

    def next(self, prefix: Prefix, /) -> Mapping[Any, Any]:
        """{token: P(token | prefix)} for a prefix of positive probability; a token left out has probability 0."""
        ...


def _log2_of_ratio(whole: int, part: int) -> float:
    """log2(whole / part) for integers whole >= part >= 1, exact when the ratio is a power of two."""
    quotient, rest = divmod(whole, part)
    if rest == 0 and quotient & (quotient - 1) == 0:
        return float(quotient.bit_length() - 1)
    gap = whole - part
    if 4 * gap < whole:  # near 1 the logarithm of the rounded ratio loses its digits; that of the exact gap does not
        return -math.log1p(-(gap / whole)) / math.log(2.0)
    if whole.bit_length() - part.bit_length() < 1000:
        return math.log2(whole / part)
    return math.log2(whole) - math.log2(part)  # beyond the range of a float; math.log2 takes any integer


def surprisal_bits(probability: Fraction | float) -> float:
    """-log2 p in bits: 0 for p = 1, inf for p = 0, exact for a power of two, full precision next to 1.

    Raises ValueError unless 0 <= p <= 1 (NaN included).
    """
    if isinstance(probability, Rational):
        part, whole = int(probability.numerator), int(probability.denominator)
    else:
        value = float(probability)
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"probability: expected a number in [0, 1], got {probability!r}")
        part, whole = value.as_integer_ratio()
    if not 0 <= part <= whole:
        raise ValueError(f"probability: expected a number in [0, 1], got {probability!r}")
    return math.inf if part == 0 else _log2_of_ratio(whole, part)


class FiniteLanguage(Mapping[Prefix, Fraction]):
    """A law on strings of one length, in exact rationals: `FiniteLanguage({(0, 2): Fraction(1, 2), ...})`.

    A mapping from the strings of positive probability to their probabilities.  Strings are tuples of hashable tokens;
    probabilities are ints or Fractions, not floats (Fraction(x) turns a float into the rational that it is).

    Raises TypeError for strings or probabilities of another type; ValueError when lengths differ, a probability is
    negative, or the sum is not exactly 1.
    """

    def __init__(self, probabilities: Mapping[Prefix, Fraction | int]) -> None:
        exact: dict[Prefix, Fraction] = {}
        lengths = set()
        for string, probability in probabilities.items():
            if not isinstance(string, tuple):
                raise TypeError(f"probabilities: strings are tuples of tokens, got {string!r}")
            if not isinstance(probability, Rational):
                raise TypeError(f"probabilities[{string!r}]: expected an int or a Fraction, got {probability!r}")
            if probability < 0:
                raise ValueError(f"probabilities[{string!r}]: expected a number >= 0, got {probability}")
            lengths.add(len(string))
            if probability > 0:
                exact[string] = Fraction(probability)
        if len(lengths) > 1:
            raise ValueError(f"probabilities: strings must have one length, got lengths {sorted(lengths)}")
        total = sum(exact.values(), Fraction(0))
        if total != 1:
            raise ValueError(f"probabilities: expected the sum 1, got {total}")
        self.length: int = lengths.pop()
        self.denominator: int = math.lcm(*(p.denominator for p in exact.values()))
        self._exact = exact
        # weight of every prefix of positive probability, P(prefix) * denominator; shorter prefixes first
        self._weight: dict[Prefix, int] = {}
        self._following: dict[Prefix, list[Any]] = {}
        weights = {s: p.numerator * (self.denominator // p.denominator) for s, p in exact.items()}
        for end in range(self.length + 1):
            for string, weight in weights.items():
                prefix = string[:end]
                if end and prefix not in self._weight:
                    self._following.setdefault(prefix[:-1], []).append(prefix[-1])
                self._weight[prefix] = self._weight.get(prefix, 0) + weight

    @classmethod
    def from_counts(cls, counts: Mapping[Prefix, int]) -> FiniteLanguage:
        """The law proportional to non-negative integer counts. Raises ValueError when they sum to 0."""
        total = sum(counts.values())
        if total <= 0:
            raise ValueError(f"counts: expected a positive sum, got {total}")
        return cls({string: Fraction(count, total) for string, count in counts.items()})

    @classmethod
    def from_law(cls, law: Law, length: int) -> FiniteLanguage:
        """All strings of `length` tokens under an exact law (its probabilities are ints or Fractions)."""
        probabilities: dict[Prefix, Fraction] = {(): Fraction(1)}
        for _ in range(length):
            longer = {}
            for prefix, probability in probabilities.items():
                for token, given in law.next(prefix).items():
                    if not isinstance(given, Rational):
                        raise TypeError(f"law: expected ints or Fractions, got P({token!r} | {prefix!r}) = {given!r}")
                    if given != 0:
                        longer[(*prefix, token)] = probability * Fraction(given)
            probabilities = longer
        return cls(probabilities)

    def __getitem__(self, string: Prefix) -> Fraction:
        return self._exact[string]

    def __iter__(self) -> Iterator[Prefix]:
        return iter(self._exact)

    def __len__(self) -> int:
        return len(self._exact)

    def __repr__(self) -> str:
        return f"FiniteLanguage({len(self)} strings of length {self.length})"

    def prefixes(self, length: int) -> list[Prefix]:
        """The prefixes of `length` tokens that have positive probability, in the order of the strings."""
        return list(dict.fromkeys(string[:length] for string in self._exact))

    def weight(self, prefix: Prefix) -> int:
        """P(string starts with prefix) * denominator, an integer; 0 where that is impossible."""
        return self._weight.get(prefix, 0)

    def probability(self, prefix: Prefix) -> Fraction:
        """P(string starts with prefix), exact; 0 where that is impossible."""
        return Fraction(self.weight(prefix), self.denominator)

    def next(self, prefix: Prefix, /) -> dict[Any, Fraction]:
        """{token: P(token | prefix)}, exact, tokens of positive probability only; {} after a whole string.

        Raises ValueError for a prefix of probability 0, given which nothing has a probability.
        """
        prefix = tuple(prefix)
        whole = self.weight(prefix)
        if whole == 0:
            raise ValueError(f"prefix: {prefix!r} has probability 0")
        return {token: Fraction(self.weight((*prefix, token)), whole) for token in self._following.get(prefix, ())}


class MarkovSource:
    """A first-order Markov law in exact rationals: P(t_1) = initial[t_1], P(t_i | t_<i) = transitions[t_(i-1)][t_i].

    Raises ValueError where a row does not sum to exactly 1 or a reachable token has no row; TypeError for floats.
    """

    def __init__(self, initial: Mapping[Any, Fraction], transitions: Mapping[Any, Mapping[Any, Fraction]]) -> None:
        for name, row in (("initial", initial), *((f"transitions[{t!r}]", r) for t, r in transitions.items())):
            if not all(isinstance(p, Rational) for p in row.values()):
                raise TypeError(f"{name}: expected ints or Fractions, got {dict(row)!r}")
            if any(p < 0 for p in row.values()) or sum(row.values(), Fraction(0)) != 1:
                raise ValueError(f"{name}: expected non-negative probabilities with the sum 1, got {dict(row)!r}")
            for token, probability in row.items():
                if probability > 0 and token not in transitions:
                    raise ValueError(f"transitions: no row for token {token!r}, which {name} reaches")
        self.initial = dict(initial)
        self.transitions = {token: dict(row) for token, row in transitions.items()}

    def next(self, prefix: Prefix, /) -> dict[Any, Fraction]:
        """{token: P(token | prefix)}, which depends on the last token only."""
        return dict(self.transitions[prefix[-1]] if prefix else self.initial)

    def language(self, length: int) -> FiniteLanguage:
        """The law of the first `length` tokens."""
        return FiniteLanguage.from_law(self, length)


def conditional_entropy_bits(outcomes: Iterable[tuple[Hashable, Hashable, Fraction | int]]) -> float:
    """H(X | Y) in bits from (x, y, weight) triples; weights are exact, need not be normalised, and add up per (x, y).

        H(X|Y) = sum_(x,y) w(x,y)/W * log2( w(y) / w(x,y) ),   every term >= 0

    Raises TypeError for float weights, ValueError for negative ones or a total of 0.
    """
    cells: dict[tuple[Hashable, Hashable], Any] = {}
    for x, y, weight in outcomes:
        if not isinstance(weight, Rational):
            raise TypeError(f"weight: expected an int or a Fraction, got {weight!r}")
        if weight < 0:
            raise ValueError(f"weight: expected a number >= 0, got {weight}")
        if weight:
            cells[x, y] = cells.get((x, y), 0) + weight
    scale = math.lcm(*(weight.denominator for weight in cells.values()))
    return _conditional({cell: int(weight * scale) for cell, weight in cells.items()})


def _conditional(cells: Mapping[tuple[Hashable, Hashable], int]) -> float:
    """H(X | Y) in bits from positive integer weights {(x, y): w}."""
    given: dict[Hashable, int] = {}
    for (_, y), weight in cells.items():
        given[y] = given.get(y, 0) + weight
    total = sum(given.values())
    if total == 0:
        raise ValueError("weight: expected a positive total, got 0")
    return math.fsum((weight / total) * _log2_of_ratio(given[y], weight) for (_, y), weight in cells.items())


def entropy_bits(weights: Iterable[Fraction | int]) -> float:
    """H in bits of the law proportional to exact weights, one weight per outcome."""
    return conditional_entropy_bits((i, (), weight) for i, weight in enumerate(weights))


class SequentialEntropies(NamedTuple):
    """Entropies in bits: one number per step t = 1..n, and the two totals."""

    kv_given_kv: tuple[float, ...]
    """H(KV_t | KV_<t)"""
    kv_given_tokens: tuple[float, ...]
    """H(KV_t | t_<t)"""
    tokens: tuple[float, ...]
    """H(t_t | t_<t)"""
    total_kv: float
    """H(KV_<=n)"""
    total_tokens: float
    """H(t_<=n)"""


class _Step(NamedTuple):
    """One prefix of positive probability; histories of KV are numbered, equal numbers exactly for equal histories."""

    weight: int
    before: Prefix  # t_<t
    token: Any  # t_t
    kv: int  # number of KV_t
    kv_before: int  # number of the history KV_<t


def _gather(pairs: Iterable[tuple[Hashable, Hashable, int]]) -> dict[tuple[Hashable, Hashable], int]:
    """Add up the weights of equal (x, y)."""
    cells: dict[tuple[Hashable, Hashable], int] = {}
    for x, y, weight in pairs:
        cells[x, y] = cells.get((x, y), 0) + weight
    return cells


def _steps(language: FiniteLanguage, kv_map: KVMap) -> Iterator[list[_Step]]:
    """Level t of the prefix tree, for t = 1..n; kv_map is called once for each prefix of positive probability."""
    numbers: dict[Hashable, int] = {}
    histories: dict[tuple[int, int], int] = {}
    history_of: dict[Prefix, int] = {(): 0}
    for t in range(1, language.length + 1):
        level = []
        for prefix in language.prefixes(t):
            value = kv_map(prefix)
            _refuse_nan(prefix, value)
            try:
                kv = numbers.setdefault(value, len(numbers))
            except TypeError as error:
                raise TypeError(
                    f"kv_map: expected a hashable value, got {type(value).__name__} for prefix {prefix!r}; "
                    "use tuples of numbers, or bytes once -0.0 and 0.0 are made one"
                ) from error
            before = history_of[prefix[:-1]]
            history_of[prefix] = histories.setdefault((before, kv), len(histories) + 1)
            level.append(_Step(language.weight(prefix), prefix[:-1], prefix[-1], kv, before))
        yield level


def _refuse_nan(prefix: Prefix, value: Any) -> None:
    """A NaN equals nothing, itself included, so that a cache holding one would look injective."""
    if isinstance(value, tuple):
        for part in value:
            _refuse_nan(prefix, part)
    elif isinstance(value, Real) and value != value:  # noqa: PLR0124  (math.isnan fails on large ints)
        raise ValueError(f"kv_map: NaN in the KV of prefix {prefix!r}")


def sequential(language: FiniteLanguage, kv_map: KVMap) -> SequentialEntropies:
    """All entropies of the sequential bound, per step and in total, in bits.

        always          sum_t H(KV_t|KV_<t) = H(KV_<=n) <= H(t_<=n)       and   H(KV_t|t_<t) <= H(t_t|t_<t)
        not always      H(KV_t|KV_<t) <= H(t_t|t_<t)                            (arXiv 2604.15356, theorem 1)

    language: a `FiniteLanguage` of length n.
    kv_map(prefix): the KV written at the prefix's last position, any hashable value; compared with ==, so mind tolerances.
        Called once for each prefix of length 1..n that has positive probability, never for another.

    Raises TypeError for a kv_map whose values are not hashable, ValueError for NaN in them.
    Source: arXiv 2604.15356, theorem 1; the chain rule and data processing.
    """
    kv_given_kv, kv_given_tokens, tokens = [], [], []
    histories: dict[tuple[Hashable, Hashable], int] = {((), ()): language.denominator}
    for level in _steps(language, kv_map):
        histories = _gather((s.kv, s.kv_before, s.weight) for s in level)
        kv_given_kv.append(_conditional(histories))
        kv_given_tokens.append(_conditional(_gather((s.kv, s.before, s.weight) for s in level)))
        tokens.append(_conditional(_gather((s.token, s.before, s.weight) for s in level)))
    total_kv = _conditional({(history, ()): weight for history, weight in histories.items()})
    total_tokens = _conditional({(string, ()): language.weight(string) for string in language})
    return SequentialEntropies(tuple(kv_given_kv), tuple(kv_given_tokens), tuple(tokens), total_kv, total_tokens)


def tokens_given_kv(language: FiniteLanguage, kv_map: KVMap) -> tuple[float, ...]:
    """H(t_<t | KV_<t) for t = 1..n in bits: what the cache so far leaves open about the tokens so far.

    It is the slack of the per-step bound, H(KV_t|KV_<t) <= H(t_t|t_<t) + H(t_<t|KV_<t).
    Zero at every step exactly when KV_<t determines t_<t.  Arguments and errors as in `sequential`.
    """
    return tuple(
        _conditional(_gather((s.before, s.kv_before, s.weight) for s in level)) for level in _steps(language, kv_map)
    )


def next_token_given_kv(language: FiniteLanguage, kv_map: KVMap) -> tuple[float, ...]:
    """H(t_t | KV_<t) for t = 1..n in bits: the cost of the next token for a coder that sees the cache only.

    H(KV_t|KV_<t) <= H(t_t|KV_<t) where decoding makes KV_t a function of (KV_<t, t_t), as it does for an exact or
    closed-loop cache.  Arguments and errors as in `sequential`.
    """
    return tuple(
        _conditional(_gather((s.token, s.kv_before, s.weight) for s in level)) for level in _steps(language, kv_map)
    )


def is_injective(language: FiniteLanguage, kv_map: KVMap) -> bool:
    """Whether KV_<=t determines t_<=t on the support, for every t = 1..n. Arguments and errors as in `sequential`."""
    return all(len({(s.kv_before, s.kv) for s in level}) == len(level) for level in _steps(language, kv_map))
