"""Claims of arXiv 2604.15356 about its trie "metric", what does hold of it, and a lemma of its predecessor 2604.06228.

Floats of the statement's functions, exact where the law is dyadic; next to them the same comparisons between products of
probabilities, in integers: d(s,u) <= d(s,t) + d(t,u) says P(s^u) >= P(s^t) P(t^u), and 2^D(s,t) = P(s^t)^2 / (P(s) P(t)).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.entropy import FiniteLanguage, MarkovSource
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.sequential.instances import BECAUSE, ROUNDING, Power

PAPER = "2604.15356"
HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)
Result = Iterator[Evidence | Picture]
Prefix = tuple[Any, ...]

#: P(a) = P(b) = 1/2
COIN = FiniteLanguage({("a",): HALF, ("b",): HALF})
#: strictly positive, powers of two: all bits are integers
DYADIC = MarkovSource(
    {0: HALF, 1: QUARTER, 2: QUARTER},
    {0: {0: QUARTER, 1: HALF, 2: QUARTER}, 1: {0: HALF, 1: QUARTER, 2: QUARTER}, 2: {0: QUARTER, 1: QUARTER, 2: HALF}},
)
THIRDS = MarkovSource(
    {0: Fraction(1, 3), 1: Fraction(2, 7), 2: Fraction(8, 21)},
    {
        token: {token: Fraction(1, 7), (token + 1) % 3: Fraction(5, 7), (token + 2) % 3: Fraction(1, 7)}
        for token in range(3)
    },
)
#: strictly positive binary laws; the count of violated triples depends on the law
BINARY = {
    "P(0) = 3/5; 0 -> 0 w.p. 7/10, 1 -> 0 w.p. 2/5": MarkovSource(
        {0: Fraction(3, 5), 1: Fraction(2, 5)},
        {0: {0: Fraction(7, 10), 1: Fraction(3, 10)}, 1: {0: Fraction(2, 5), 1: Fraction(3, 5)}},
    ),
    "P(0) = 9/10; 0 -> 0 w.p. 9/10, 1 -> 0 w.p. 1/10": MarkovSource(
        {0: Fraction(9, 10), 1: Fraction(1, 10)},
        {0: {0: Fraction(9, 10), 1: Fraction(1, 10)}, 1: {0: Fraction(1, 10), 1: Fraction(9, 10)}},
    ),
}


def strings_up_to(alphabet: int, length: int) -> list[Prefix]:
    return [s for n in range(length + 1) for s in itertools.product(range(alphabet), repeat=n)]


def shared(s: Prefix, t: Prefix) -> Prefix:
    """The longest common prefix, as a string."""
    return tuple(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(s, t)))


def whole_numbers(source: MarkovSource, strings: list[Prefix]) -> tuple[dict[Prefix, int], int]:
    """P(s) times a common denominator, and that denominator: products down the trie, by this file's own hand."""
    exact_p: dict[Prefix, Fraction] = {(): Fraction(1)}
    for s in strings:
        if s:
            row = source.initial if len(s) == 1 else source.transitions[s[-2]]
            exact_p[s] = exact_p[s[:-1]] * row[s[-1]]
    scale = math.lcm(*(p.denominator for p in exact_p.values()))
    return {s: int(p * scale) for s, p in exact_p.items()}, scale


def matrix(function: Function, law: Any, strings: list[Prefix]) -> NDArray[np.float64]:
    return np.array([[function(law, s, t) for t in strings] for s in strings], float)


def triples(close: NDArray[np.bool_]) -> int:
    return int(close.sum())


def _lcp(change: Any) -> Any:
    """d_T with another string in the place of the longest common prefix."""

    def wrong(true: Function) -> Function:
        def mutated(law: Any, s: Prefix, t: Prefix) -> float:
            other = change(tuple(s), tuple(t))
            return float(true(law, other, other))

        return mutated

    return wrong


SIMILARITY_SLIPS = [
    *systematic.scales("similarity"), *systematic.natural_log("similarity"),
    Mutant("one token too few shared", "similarity", _lcp(lambda s, t: shared(s, t)[:-1])),
    Mutant("tokens that agree anywhere", "similarity", _lcp(lambda s, t: tuple(a for a, b in zip(s, t) if a == b))),
    Mutant("the longer string whole", "similarity", _lcp(lambda s, t: max(s, t, key=len))),
]  # fmt: skip


@claim(
    id="trie/metric", paper=PAPER, section="section on the trie metric",
    statement="d_T(s, t), the surprisal of the longest common prefix, is a metric, even an ultrametric, on token strings.",
    formula="d_T(s,t) = −log2 P(s∧t);  d_T(s,s) = 0,  d_T(s,u) ≤ max(d_T(s,t), d_T(t,u)) ≤ d_T(s,t) + d_T(t,u)",
    expected=Verdict.FAILS,
    functions={"similarity": "kvtheory.trie.similarity_bits"},
    mutants=[
        *SIMILARITY_SLIPS,
        Mutant("the diagonal put to 0", "similarity", lambda true: lambda law, s, t: 0.0 if tuple(s) == tuple(t) else true(law, s, t)),
        Mutant("probability for surprisal", "similarity", lambda true: lambda law, s, t: 2.0 ** -true(law, s, t)),
    ],
    figure="trie-distances", correction="trie/tree-distance",
)  # fmt: skip
def metric(context: Context, *, similarity: Function) -> Result:
    a, b = ("a",), ("b",)
    where = "P(a) = P(b) = 1/2"
    yield _dyadic("d_T(a, a), bits", where, similarity(COIN, a, a), 1)
    yield _dyadic("d_T(a, b), bits", where, similarity(COIN, a, b), 0)
    yield _dyadic("d_T(a, a) = 0", where, similarity(COIN, a, a), 0, "=", "statement")
    yield _dyadic(
        "d_T(a, a) ≤ d_T(a, b) + d_T(b, a)", where, similarity(COIN, a, a), similarity(COIN, a, b) + similarity(COIN, b, a), "<=", "statement",
        note="the smallest counterexample: two strings of one token",
    )  # fmt: skip
    yield exact(
        what="d_T(a, a) ≤ d_T(a, b) + d_T(b, a), as probabilities: P(a) ≥ P(a∧b) P(b∧a) = 1", ran_on=where, relation=">=",
        observed=COIN.probability(a), predicted=COIN.probability(shared(a, b)) * COIN.probability(shared(b, a)),
    )  # fmt: skip
    yield _dyadic(
        "d_T(a, b) > 0 for a ≠ b",
        where,
        similarity(COIN, a, b),
        0,
        ">",
        "statement",
        note="the rule {d_T ≤ δ} groups the strings that share least",
    )
    strings = strings_up_to(2, 4)
    for law_name, law in BINARY.items():
        where = f"{len(strings)} binary strings of length ≤ 4, {len(strings) ** 3} triples, {law_name}"
        d = matrix(similarity, law, strings)
        whole, scale = whole_numbers(law, strings)
        p = np.array(
            [[whole[shared(s, t)] for t in strings] for s in strings], object
        )  # Python integers: exact, no overflow
        triangle = _violated(p[:, None, :] * scale < p[:, :, None] * p[None, :, :])
        ultra = _violated(p[:, None, :] < np.minimum(p[:, :, None], p[None, :, :]))
        yield exact(
            what="triples (s, t, u) that violate the triangle inequality, counted in float64 = in exact integers", ran_on=where, role="control",
            observed=triples(d[:, None, :] > d[:, :, None] + d[None, :, :] + 1e-9), predicted=triangle,
        )  # fmt: skip
        yield exact(
            what="triples (s, t, u) that violate the triangle inequality, counted in exact integers",
            ran_on=where,
            observed=triangle,
            predicted=0,
        )
        yield exact(
            what="triples that violate the ultrametric inequality, counted in float64: 9,088 for every strictly positive law", ran_on=where, role="control",
            observed=triples(d[:, None, :] > np.maximum(d[:, :, None], d[None, :, :]) + 1e-9), predicted=9088,
        )  # fmt: skip
        yield exact(
            what="triples (s, t, u) that violate the ultrametric inequality, counted in exact integers",
            ran_on=where,
            observed=ultra,
            predicted=0,
        )
    from kvtheory.trie import tree_distance_bits

    law = next(iter(BINARY.values()))
    pairs = [(s, t) for s, t in itertools.combinations_with_replacement(strings, 2)]
    yield Picture(
        figure="trie-distances",
        data={
            "law": next(iter(BINARY)),
            "strings": ["".join(map(str, s)) for s in strings],
            "pairs": [["".join(map(str, s)), "".join(map(str, t))] for s, t in pairs],
            "similarity_bits": [similarity(law, s, t) for s, t in pairs],
            "tree_distance_bits": [tree_distance_bits(law, s, t) for s, t in pairs],
            "shared_tokens": [len(shared(s, t)) for s, t in pairs],
            "same": [s == t for s, t in pairs],
        },
    )  # fmt: skip


def _violated(pairs: NDArray[Any]) -> int:
    return int(np.asarray(pairs, bool).sum())


def _dyadic(
    what: str, ran_on: str, observed: float, predicted: float, relation: Any = "=", role: Any = "control", **more: Any
) -> Evidence:
    """Floats of a law in powers of two, where no step rounds."""
    return numerical(
        what=what, ran_on=ran_on, observed=observed, predicted=predicted, relation=relation, role=role, tolerance=0.0,
        because="all probabilities are powers of two: no step rounds", **more,
    )  # fmt: skip


def _furthest(
    what: str, ran_on: str, left: Any, right: Any, relation: Any = "=", role: Any = "statement", dyadic: bool = False, **more: Any
) -> Evidence:  # fmt: skip
    """The entry of two arrays of bits that is furthest from the relation, relative to the larger; a NaN first of all."""
    left, right = np.broadcast_arrays(np.asarray(left, float), np.asarray(right, float))
    difference = np.abs(left - right) if relation == "=" else left - right
    larger = np.maximum(np.abs(left), np.abs(right))
    apart = np.divide(difference, larger, out=np.zeros(left.shape), where=larger > 0)
    at = np.unravel_index(np.argmax(np.where(np.isfinite(difference), apart, np.inf)), apart.shape)
    reason = (0.0, "all probabilities are powers of two: no step rounds") if dyadic else (ROUNDING, BECAUSE)
    return numerical(
        what=f"{what}, at the worst of {left.size} cases", ran_on=ran_on, observed=float(left[at]), predicted=float(right[at]), relation=relation,
        role=role, tolerance=reason[0], because=reason[1], **more,
    )  # fmt: skip


def _realised(context: Context) -> Result:
    """The assumption 0 < P < 1 on a real model: of the transitions of a real text, the only ones that a cache records."""
    if context.cache is None or context.cache.surprisal_bits is None:
        return
    # the first token has nothing before it: its entry is 0 or log2 |V| by convention, not a transition of the model
    bits = np.asarray(context.cache.surprisal_bits, np.float64)[1:]
    if not bits.size:
        return
    where = f"{context.cache.meta.get('model', context.cache_name)}, {len(bits)} transitions of its text"
    yield numerical(
        what="least surprisal of a transition is above 0 bits (P < 1)", ran_on=where, observed=float(bits.min()), predicted=0.0, relation=">", tolerance=0.0, role="assumption",
        because="computed in float64, it is 0 only where the probability rounds to 1",
        note=f"of the tokens that came; of those that did not it says nothing. P > 0 for all of them: the largest is {bits.max():.1f} bits",
    )  # fmt: skip
    yield exact(
        what="transitions of surprisal 0 (P = 1)",
        ran_on=where,
        observed=int((bits == 0).sum()),
        predicted=0,
        role="assumption",
    )


@claim(
    id="trie/similarity-ultrametric", paper=PAPER, section="section on the trie metric, corrected",
    statement="d_T is a similarity that obeys the reversed ultrametric inequality: two strings share at least the lesser of what each shares "
    "with a third. With the diagonal put to 0, 2^(−d_T) is an ultrametric where every prefix has positive probability.",
    formula="d_T(s,u) ≥ min(d_T(s,t), d_T(t,u));   P(s∧u) ≤ max(P(s∧t), P(t∧u))",
    expected=Verdict.HOLDS,
    functions={"similarity": "kvtheory.trie.similarity_bits"},
    mutants=[
        *SIMILARITY_SLIPS,
        Mutant("the inequality of a metric: d_T turned to a distance by a sign", "similarity", lambda true: lambda law, s, t: -true(law, s, t)),
        Mutant("diagonal put to 0 before, not after, the exponential", "similarity", lambda true: lambda law, s, t: 0.0 if tuple(s) == tuple(t) else true(law, s, t)),
    ],
)  # fmt: skip
def similarity_ultrametric(context: Context, *, similarity: Function) -> Result:
    for strings, law, name in (
        (strings_up_to(3, 3), DYADIC, "Markov law in powers of two on 3 tokens: all bits are integers"),
        *((strings_up_to(2, 4), law, name) for name, law in BINARY.items()),
    ):
        where = f"{len(strings)} strings, {len(strings) ** 3} triples, {name}"
        whole, scale = whole_numbers(law, strings)
        p = np.array([[whole[shared(s, t)] for t in strings] for s in strings], object)
        d = matrix(similarity, law, strings)
        true = [[Power(scale, x, 1).bits() for x in row] for row in p]
        yield _furthest(
            "d_T(s,t) in float64 = −log2 of the exact P(s∧t)", where, d, true, role="control", dyadic=law is DYADIC
        )
        yield exact(
            what="triples with d_T(s,u) < min(d_T(s,t), d_T(t,u)), counted in float64 without tolerance", ran_on=where, predicted=0,
            observed=triples(d[:, None, :] < np.minimum(d[:, :, None], d[None, :, :])),
        )  # fmt: skip
        yield exact(
            what="triples with P(s∧u) > max(P(s∧t), P(t∧u)), counted in exact integers", ran_on=where, predicted=0,
            observed=_violated(p[:, None, :] > np.maximum(p[:, :, None], p[None, :, :])),
        )  # fmt: skip
        yield exact(what="pairs with d_T(s,t) ≠ d_T(t,s)", ran_on=where, observed=int((d != d.T).sum()), predicted=0)
        off = p.copy()
        np.fill_diagonal(off, 0)
        yield exact(
            what="triples that violate the ultrametric inequality of 2^(−d_T) with diagonal 0, and distinct pairs at distance 0", ran_on=where,
            observed=_violated(off[:, None, :] > np.maximum(off[:, :, None], off[None, :, :])) + int((off == 0).sum()) - len(strings), predicted=0,
        )  # fmt: skip
        yield exact(
            what="strings s at distance 2^(−d_T(s,s)) = P(s) = 0 from themselves where the diagonal is not put to 0", ran_on=where, observed=int((np.diag(p) == 0).sum()), predicted=0,
            role="control", note="so 2^(−d_T) itself is a partial ultrametric",
        )  # fmt: skip
    deep = (0,) * 1200
    yield _dyadic(
        "d_T of a string of 1200 fair bits with itself, where 2^(−d_T) is 0 in float64",
        "fair coin",
        similarity(_Coin(), deep, deep),
        1200,
    )


class _Coin:
    """Two tokens, 1/2 each, for ever."""

    def next(self, prefix: Prefix, /) -> dict[Any, Fraction]:
        return {0: HALF, 1: HALF}


class _NearlyCertain:
    """A fair coin for 1200 tokens, then token 0 with probability 1 - 2^-60."""

    def next(self, prefix: Prefix, /) -> dict[Any, Fraction]:
        rare = Fraction(1, 2**60)
        return {0: HALF, 1: HALF} if len(prefix) < 1200 else {0: 1 - rare, 1: rare}


def _from_similarity(weight: float) -> Any:
    """-log2 P(s) - log2 P(t) - weight d_T, with d_T = -log2 P(s^t), from cumulated logs."""
    from kvtheory.trie import similarity_bits

    return lambda true: (
        lambda law, s, t: similarity_bits(law, s, s) + similarity_bits(law, t, t) - weight * similarity_bits(law, s, t)
    )


@claim(
    id="trie/tree-distance", paper=PAPER, section="section on the trie metric, corrected",
    statement="The number of bits that encode both tails given the common prefix is a metric on token strings.",
    formula="D(s,t) = −log2 P(s) − log2 P(t) − 2 d_T(s,t) = −log2 P(s | s∧t) − log2 P(t | s∧t)",
    assumptions=("every transition has probability strictly between 0 and 1",),
    expected=Verdict.HOLDS_UNDER,
    functions={"distance": "kvtheory.trie.tree_distance_bits"},
    mutants=[
        *systematic.scales("distance"), *systematic.natural_log("distance"),
        Mutant("d_T taken off once, not twice", "distance", _from_similarity(1.0)),
        Mutant("from cumulated logs, not from tails", "distance", _from_similarity(2.0)),
        Mutant("the longer tail only", "distance", lambda true: lambda law, s, t: max(true(law, s, shared(s, t)), true(law, t, shared(s, t)))),
        Mutant("one tail only", "distance", lambda true: lambda law, s, t: true(law, s, shared(s, t))),
        Mutant("squared", "distance", lambda true: lambda law, s, t: true(law, s, t) ** 2),
    ],
)  # fmt: skip
def tree_distance(context: Context, *, distance: Function) -> Result:
    a, b = ("a",), ("b",)
    yield _dyadic("D(a, b), bits", "P(a) = P(b) = 1/2", distance(COIN, a, b), 2)
    deep = (0,) * 1200
    yield numerical(
        what="D over one edge of probability 1 − 2^−60 behind 1200 fair bits = 2^−60 / ln 2, bits", ran_on="binary strings of 1200 and 1201",
        observed=distance(_NearlyCertain(), deep, (*deep, 0)), predicted=2.0**-60 / math.log(2), role="control", tolerance=ROUNDING, because=BECAUSE,
        note="P underflows, cumulated logs absorb the edge",
    )  # fmt: skip
    for strings, law, name in (
        (strings_up_to(3, 3), DYADIC, "Markov law in powers of two on 3 tokens: all bits are integers"),
        *((strings_up_to(2, 4), law, name) for name, law in BINARY.items()),
    ):
        where = f"{len(strings)} strings, {len(strings) ** 3} triples, {name}"
        dyadic = law is DYADIC
        d = matrix(distance, law, strings)
        whole, _ = whole_numbers(law, strings)
        # 2^D = top / bottom
        top = np.array([[whole[shared(s, t)] ** 2 for t in strings] for s in strings], object)
        bottom = np.array([[whole[s] * whole[t] for t in strings] for s in strings], object)
        true = [[Power(x, y, 1).bits() for x, y in zip(*rows)] for rows in zip(top, bottom)]
        yield _furthest(
            "D(s,t) in float64 = log2 of the exact P(s∧t)² / (P(s) P(t))", where, d, true, role="control", dyadic=dyadic
        )
        yield exact(what="strings with D(s,s) ≠ 0", ran_on=where, observed=int((np.diag(d) != 0).sum()), predicted=0)
        yield exact(
            what="pairs s ≠ t with D(s,t) ≤ 0",
            ran_on=where,
            observed=int((d <= 0).sum()) - int((np.diag(d) <= 0).sum()),
            predicted=0,
        )
        yield _furthest("D(s,t) = D(t,s)", where, d, d.T, dyadic=dyadic)
        left = top[:, None, :] * (bottom[:, :, None] * bottom[None, :, :])
        right = bottom[:, None, :] * (top[:, :, None] * top[None, :, :])
        yield _furthest(
            "D(s,u) ≤ D(s,t) + D(t,u)", where, d[:, None, :], d[:, :, None] + d[None, :, :], "<=", dyadic=dyadic, tightness=1.0,
            note=f"attained by {triples(left == right)} triples: t on the path from s to u",
        )  # fmt: skip
        yield exact(
            what="triples with D(s,u) > D(s,t) + D(t,u), counted in exact integers",
            ran_on=where,
            observed=_violated(left > right),
            predicted=0,
        )
    certain = FiniteLanguage({("a", "a"): HALF, ("b", "a"): HALF})
    yield _dyadic(
        "D(a, aa) where a is always followed by a", "aa, ba, each 1/2", distance(certain, a, ("a", "a")), 0,
        note="a pseudo-metric only: the assumption is needed",
    )  # fmt: skip
    yield from _realised(context)


def _matches(change: Any) -> Any:
    """A trie whose `longest_match` is tampered with."""

    def wrong(true: Any) -> Any:
        class Tampered(true):  # type: ignore[misc, valid-type]
            def longest_match(self, tokens: Prefix, touch: bool = True) -> Any:
                return change(super().longest_match(tokens, touch))

        return Tampered

    return wrong


@claim(
    id="trie/retrieval-is-longest-prefix", paper=PAPER, section="section 7.3, retrieval from the trie",
    statement="The stored string of largest d_T with a query is one with the longest exact common prefix: retrieval by d_T is prefix reuse, "
    "whatever the law.",
    formula="argmax_t d_T(s,t) ⊆ argmax_t |s∧t|",
    assumptions=("every transition has probability strictly between 0 and 1 (else ties)",),
    expected=Verdict.HOLDS_UNDER,
    functions={"similarity": "kvtheory.trie.similarity_bits", "trie": "kvtheory.trie.ProbabilisticTrie"},
    mutants=[
        Mutant("smallest d_T (clusters {d_T ≤ δ})", "similarity", lambda true: lambda law, s, t: -true(law, s, t)),
        Mutant("probability for surprisal", "similarity", lambda true: lambda law, s, t: 2.0 ** -true(law, s, t)),
        Mutant("d_T of the longest string", "similarity", lambda true: lambda law, s, t: true(law, t, t)),
        Mutant("tokens that agree anywhere", "similarity", _lcp(lambda s, t: tuple(a for a, b in zip(s, t) if a == b))),
        Mutant("whole nodes only", "trie", _matches(lambda m: m._replace(length=m.length - m.length % 2))),
        Mutant("bits of the parent", "trie", _matches(lambda m: m._replace(bits=m.bits / 2))),
    ],
)  # fmt: skip
def retrieval(context: Context, *, similarity: Function, trie: Function) -> Result:
    for law, name in ((DYADIC, "dyadic law"), (THIRDS, "law in thirds and sevenths")):
        rng = context.rng(f"strings, {name}")
        queries = wrong_set = wrong_length = 0
        bits = []
        for _ in range(context.size(12, 200)):
            stored = [tuple(int(x) for x in rng.integers(0, 3, int(rng.integers(0, 7)))) for _ in range(8)]
            index = trie(law)
            for s in stored:
                index.insert(s)
            for _ in range(4):
                query = tuple(int(x) for x in rng.integers(0, 3, 6))
                queries += 1
                d = [similarity(law, query, s) for s in stored]
                lengths = [len(shared(query, s)) for s in stored]
                wrong_set += {s for s, x in zip(stored, d) if x == max(d)} != {
                    s for s, n in zip(stored, lengths) if n == max(lengths)
                }
                match = index.longest_match(query)
                wrong_length += match.length != max(lengths)
                bits.append((match.bits, max(d)))
        where = f"{queries} queries of 6 tokens against stores of 8 strings of 0..6 tokens, {name}"
        yield exact(
            what="queries where argmax d_T is not the set of longest common prefixes",
            ran_on=where,
            observed=int(wrong_set),
            predicted=0,
        )
        yield exact(
            what="queries where the trie returns a match shorter or longer than the longest common prefix",
            ran_on=where,
            observed=int(wrong_length),
            predicted=0,
        )
        yield _furthest(
            "bits of the match that the trie returns = largest d_T of the stored strings",
            where,
            [a for a, _ in bits],
            [b for _, b in bits],
            dyadic=law is DYADIC,
        )
    certain = FiniteLanguage({("a", "a"): HALF, ("b", "a"): HALF})
    yield _dyadic(
        "d_T(aa, aa) = d_T(aa, a): a tie, though one shares more", "aa, ba, each 1/2: a transition of probability 1",
        similarity(certain, ("a", "a"), ("a", "a")), similarity(certain, ("a", "a"), ("a",)), note="the assumption is needed",
    )  # fmt: skip
    yield from _realised(context)


@claim(
    id="trie/swap-time", paper="2604.06228", section="Lemma 2",
    statement="Items are drawn independently with probabilities p_1 ≥ p_2 ≥ …; T_swap is the number of draws until each of the K most probable "
    "has been drawn at least once. Then P(T_swap > T) ≥ 1 − T p_K / K for T ≤ K / (2 p_K).",
    formula="P(T_swap > T) ≥ 1 − T p_K / K",
    expected=Verdict.FAILS,
    functions={"tail": "kvtheory.trie.swap_time_tail"},
    mutants=[
        *systematic.scales("tail"),
        Mutant("one draw fewer", "tail", lambda true: lambda probabilities, top, draws: true(probabilities, top, max(0, draws - 1))),
        Mutant("the complement", "tail", lambda true: lambda probabilities, top, draws: 1 - true(probabilities, top, draws)),
        Mutant("the union bound", "tail", lambda true: lambda probabilities, top, draws: sum((1 - p) ** draws for p in sorted(probabilities)[-top:])),
    ],
    correction="trie/swap-time-corrected",
)  # fmt: skip
def swap_time(context: Context, *, tail: Function) -> Result:
    law = [Fraction(80, 100), Fraction(15, 100), Fraction(5, 100)]
    where = "K = 2, p = (.80, .15, .05), T = 3 ≤ K / (2 p_K) = 6.7"
    yield exact(
        what="P(T_swap > 3) by the function = the sum over all 27 outcomes of three draws",
        ran_on=where,
        observed=tail(law, 2, 3),
        predicted=brute_force_tail(law, 2, 3),
        role="control",
    )
    yield exact(
        what="P(T_swap > 3) = .2³ + .85³ − .05³",
        ran_on=where,
        observed=tail(law, 2, 3),
        predicted=Fraction(622, 1000),
        role="control",
    )
    yield exact(
        what="P(T_swap > T) ≥ 1 − T p_K / K at T = 3",
        ran_on=where,
        observed=tail(law, 2, 3),
        predicted=1 - 3 * law[1] / 2,
        relation=">=",
    )


def brute_force_tail(law: list[Fraction], top: int, draws: int) -> Fraction:
    """P(not all of items 0..top-1 appear in `draws` draws), by listing all outcomes."""
    return sum(
        (
            math.prod((law[i] for i in outcome), start=Fraction(1))
            for outcome in itertools.product(range(len(law)), repeat=draws)
            if not set(range(top)) <= set(outcome)
        ),
        Fraction(0),
    )


@claim(
    id="trie/swap-time-corrected", paper="2604.06228", section="Lemma 2, corrected",
    statement="Items are drawn independently with probabilities p_1 ≥ p_2 ≥ …; T_swap is the number of draws until each of the K most probable "
    "has been drawn at least once. Then P(T_swap > T) ≥ (1 − p_K)^T ≥ 1 − T p_K for every T.",
    formula="P(T_swap > T) ≥ (1 − p_K)^T ≥ 1 − T p_K",
    expected=Verdict.HOLDS,
    functions={"tail": "kvtheory.trie.swap_time_tail"},
    mutants=[
        *systematic.scales("tail"),
        Mutant("one draw more", "tail", lambda true: lambda probabilities, top, draws: true(probabilities, top, draws + 1)),
        Mutant("the complement", "tail", lambda true: lambda probabilities, top, draws: 1 - true(probabilities, top, draws)),
        Mutant("the most probable item alone", "tail", lambda true: lambda probabilities, top, draws: true(probabilities, 1, draws)),
    ],
)  # fmt: skip
def swap_time_corrected(context: Context, *, tail: Function) -> Result:
    rng = context.rng("laws")
    worst = Fraction(0)
    laws = broken = false_bound = unlike = 0
    for _ in range(context.size(25, 400)):
        counts = sorted((int(x) for x in 1 + rng.integers(0, 30, int(rng.integers(2, 5)))), reverse=True)
        law = [Fraction(n, sum(counts)) for n in counts]
        top, draws = int(rng.integers(1, len(law) + 1)), int(rng.integers(0, 5))
        value, bound = tail(law, top, draws), (1 - law[top - 1]) ** draws
        laws += 1
        broken += value < bound or bound < 1 - draws * law[top - 1]
        unlike += value != brute_force_tail(law, top, draws)
        worst = max(worst, bound / value) if value > 0 else worst
        false_bound += draws <= top / (2 * law[top - 1]) and value < 1 - draws * law[top - 1] / top
    where = f"{laws} random laws on 2..4 items, K 1..4, T 0..4"
    yield exact(
        what="laws where P(T_swap > T) by the function differs from the sum over all outcomes",
        ran_on=where,
        observed=int(unlike),
        predicted=0,
        role="control",
    )
    yield exact(
        what="laws with P(T_swap > T) < (1 − p_K)^T or (1 − p_K)^T < 1 − T p_K",
        ran_on=where,
        observed=int(broken),
        predicted=0,
        tightness=float(worst),
    )
    yield exact(
        what="laws with P(T_swap > T) < 1 − T p_K / K, the bound as printed",
        ran_on=where,
        observed=int(false_bound),
        predicted=0,
        role="assumption",
    )
    one = [Fraction(3, 4), QUARTER]
    yield exact(
        what="K = 1: P(T_swap > T) = (1 − p_1)^T, attained",
        ran_on="p = (3/4, 1/4), T = 3",
        observed=tail(one, 1, 3),
        predicted=Fraction(1, 64),
        tightness=1.0,
    )
