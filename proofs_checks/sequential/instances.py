"""What the claims on entropy run on, and the exact truth about it: integers instead of floats.

With integer weights w of sum D,

    D H(X) = D log2 D - sum_x w_x log2 w_x,     so     2^(D H(X|Y)) = prod_y w_y^(w_y) / prod_(x,y) w_xy^(w_xy)

is rational, and which of two entropies is larger is a comparison of integers, without rounding or tolerance. This is a
second route: kvtheory.entropy goes through prefixes and adds up floats, this goes through whole strings and multiplies.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from kvtheory.entropy import FiniteLanguage, MarkovSource
from kvtheory.tiny import TernaryCaches, TernaryTransformer, collision_model
from proofs_checks.context import Context

HALF = Fraction(1, 2)

#: A float entropy is a sum of terms of one sign, each off by a division, a logarithm, a product and its share of a sum: 2e-15
#: of itself (tests/theory/test_entropy.py measures the logarithm), so the whole sum is. Two sides of a comparison: 4e-15.
ROUNDING = 5e-15
BECAUSE = "terms of one sign, each within 2e-15 of itself (division, logarithm, product), so is their sum; two sides and one addition"
#: Entropies here are below 12 bits, so floats are off by less than 1e-13. Below this gap they do not decide; integers do.
GAP = 1e-9


class Power(NamedTuple):
    """The number log2(top / bottom) / size, exact; of one size only numbers of one language are compared."""

    top: int
    bottom: int
    size: int

    def __add__(self, other: Power) -> Power:  # type: ignore[override]
        return Power(self.top * other.top, self.bottom * other.bottom, self.size)

    def power(self) -> Fraction:
        """2^(size * bits), exact."""
        return Fraction(self.top, self.bottom)

    def exceeds(self, other: Power) -> bool:
        return self.top * other.bottom > other.top * self.bottom

    def bits(self) -> float:
        """Correct to float64, by 200-bit interval arithmetic."""
        import flint

        with flint.ctx.workprec(200):
            return float((flint.arb(self.top).log() - flint.arb(self.bottom).log()) / (flint.arb(2).log() * self.size))


class Truth(NamedTuple):
    """Exact entropies, per step, and the two totals."""

    kv_given_kv: list[Power]
    tokens: list[Power]
    tokens_given_kv: list[Power]
    next_token_given_kv: list[Power]
    total_kv: Power
    total_tokens: Power


class Instance(NamedTuple):
    """A language and a deterministic cache."""

    language: FiniteLanguage
    kv: Callable[[tuple[Any, ...]], Any]
    label: str


def weigh(outcomes: Iterable[tuple[Hashable, int]]) -> Counter[Hashable]:
    """Add up the weights of equal outcomes."""
    found: Counter[Hashable] = Counter()
    for outcome, weight in outcomes:
        found[outcome] += weight
    return found


def power_product(weights: Counter[Hashable]) -> int:
    """prod w^w, equal weights taken together."""
    return math.prod(w ** (w * times) for w, times in Counter(weights.values()).items())


Row = tuple[tuple[Any, ...], tuple[Any, ...], int]


def _rows(instance: Instance) -> list[Row]:
    """(string, its whole cache, its weight)"""
    language, length = instance.language, instance.language.length
    return [(s, tuple(instance.kv(s[: t + 1]) for t in range(length)), language.weight(s)) for s in language]


def _product(rows: list[Row], part: Callable[[tuple[Any, ...], tuple[Any, ...]], Hashable]) -> int:
    """prod w^w over the values of part(string, cache)."""
    return power_product(weigh((part(s, kv), w) for s, kv, w in rows))


def truth(instance: Instance) -> Truth:
    """Every entropy of an instance, exact, from whole strings."""
    size, steps = instance.language.denominator, range(instance.language.length)
    rows = _rows(instance)
    kv = [_product(rows, lambda s, kv, t=t: kv[:t]) for t in (*steps, len(steps))]  # type: ignore[misc]
    tokens = [_product(rows, lambda s, kv, t=t: s[:t]) for t in (*steps, len(steps))]  # type: ignore[misc]
    return Truth(
        [Power(kv[t], kv[t + 1], size) for t in steps],
        [Power(tokens[t], tokens[t + 1], size) for t in steps],
        [Power(kv[t], _product(rows, lambda s, kv, t=t: (s[:t], kv[:t])), size) for t in steps],  # type: ignore[misc]
        [Power(kv[t], _product(rows, lambda s, kv, t=t: (s[t], kv[:t])), size) for t in steps],  # type: ignore[misc]
        Power(kv[0], kv[-1], size),
        Power(tokens[0], tokens[-1], size),
    )


def information(instance: Instance) -> list[Power]:
    """I(t_t; t_<t | KV_<t) for t = 1..n, exact, by its definition and not as a difference of entropies that a claim compares:

    D I(X;Y|Z) = log2 prod_z w^w prod_xyz w^w / (prod_xz w^w prod_yz w^w)
    """
    rows = _rows(instance)
    found = []
    for t in range(instance.language.length):
        z, xz, yz, xyz = (
            _product(rows, part)
            for part in (
                lambda s, kv, t=t: kv[:t],  # type: ignore[misc]
                lambda s, kv, t=t: (s[t], kv[:t]),  # type: ignore[misc]
                lambda s, kv, t=t: (s[:t], kv[:t]),  # type: ignore[misc]
                lambda s, kv, t=t: (s[t], s[:t], kv[:t]),  # type: ignore[misc]
            )
        )
        found.append(Power(z * xyz, xz * yz, instance.language.denominator))
    return found


def random_language(rng: np.random.Generator, vocabulary: int, length: int, floor: int = 0) -> FiniteLanguage:
    """Markov, every probability a multiple of 1/8 and at least floor/8; rows from a Dirichlet(1/2), rounded."""

    def row() -> dict[int, Fraction]:
        eighths = floor + rng.multinomial(8 - floor * vocabulary, rng.dirichlet(np.full(vocabulary, 0.5)))
        return {token: Fraction(int(n), 8) for token, n in enumerate(eighths) if n}

    return MarkovSource(row(), {token: row() for token in range(vocabulary)}).language(length)


def arbitrary_caches(context: Context) -> list[tuple[Instance, Truth]]:
    """Deterministic caches without any structure: any function of the prefix, collisions included; integer laws.

    Every fourth keeps the token too, so that it is injective.
    """

    def compute() -> list[tuple[Instance, Truth]]:
        rng = context.rng("arbitrary caches")
        found = []
        for i in range(context.size(40, 400)):
            vocabulary, length, values = (int(rng.integers(*sizes)) for sizes in ((2, 4), (2, 5), (1, 5)))
            strings = list(itertools.product(range(vocabulary), repeat=length))
            chosen = rng.permutation(len(strings))[: int(rng.integers(2, min(len(strings), 12) + 1))]
            language = FiniteLanguage.from_counts({strings[j]: int(rng.integers(1, 9)) for j in chosen})
            table = {
                p: (int(rng.integers(values)), p[-1] if i % 4 == 0 else None)
                for t in range(1, length + 1)
                for p in language.prefixes(t)
            }
            instance = Instance(
                language, table.__getitem__, f"|V|={vocabulary} n={length}, {len(language)} strings, {values} KV values"
            )
            found.append((instance, truth(instance)))
        return found

    return context.memo("arbitrary caches", compute)


def ternary_models(
    context: Context,
    number: int,
    vocabulary: int = 4,
    length: int = 4,
    floor: int = 0,
    head_dim: int = 1,
    **options: Any,
) -> list[tuple[Instance, Truth]]:
    """Random two-layer softmax transformers with ternary caches (m = 2d), each on a random Markov language."""

    def compute() -> list[tuple[Instance, Truth]]:
        rng = context.rng(f"ternary {vocabulary} {length} {floor} {head_dim} {sorted(options)}")
        found = []
        for _ in range(number):
            more = {
                name: rng.standard_normal(2 * head_dim) if name == "start" else value for name, value in options.items()
            }
            caches: TernaryCaches = TernaryTransformer.random(
                rng, vocabulary, 2, 2 * head_dim, head_dim, **more
            ).caches(length)
            language = random_language(rng, vocabulary, length, floor)
            # the codes are those of real arithmetic: float64 errs by some 1e-15 on numbers of size 1 to 10
            assert caches.margin > 1e-12
            instance = Instance(language, caches.kv, f"|V|={vocabulary} n={length}")
            found.append((instance, truth(instance)))
        return found

    key = (
        "ternary",
        number,
        vocabulary,
        length,
        floor,
        head_dim,
        *sorted((name, str(value)) for name, value in options.items()),
    )
    return context.memo(key, compute)


def open_loop_model(loop: str) -> TernaryTransformer:
    """Tokens a, b, c: one KV is stored for a and b, and, in open loop, c after a writes another KV than c after b.

    m = 2, d = 1, uniform attention (W_Q = W_K = 0). Layer 1: v(a) = .3, v(b) = .4, v(c) = 0, o goes to channel 0. Layer 2:
    v = x . (1, .325), so a and b write .6 and .8, both 1, and c after them .15 + .325 -> 0 or .20 + .325 -> 1.
    """
    none = np.zeros((2, 2, 1))
    value = np.array([[[1.0], [0.0]], [[1.0], [0.325]]])
    output = np.array([[[1.0, 0.0]], [[0.0, 0.0]]])
    return TernaryTransformer(np.array([[0.3, 0.0], [0.4, 0.0], [0.0, 1.0]]), none, none, value, output, loop)


class TwoTokens(NamedTuple):
    """A model of two tokens outside the class for which |V| = 2 is safe, and what it becomes within that class."""

    name: str
    model: TernaryTransformer
    within: TernaryTransformer
    strings: tuple[tuple[int, int], tuple[int, int]]  # each 1/2
    weights: str


def two_token_violations() -> list[TwoTokens]:
    """By hand, one for each feature with which two tokens can break the per-step bound: tokens a = 0 and b = 1 write one KV at position 1,
    the second token follows from the first, and its KV, all the same, differs by what came first.

    m = d = 1 and uniform attention (W_Q = W_K = 0) wherever nothing else is said; every number is a rational but for cos 1, sin 1.
    """

    def deep(embedding: list[float], first: float, out: float, top: float, **more: Any) -> TernaryTransformer:
        none, end = np.zeros((2, 1, 1)), 0.0
        value, output = np.array([[[first]], [[top]]]), np.array([[[out]], [[end]]])
        return TernaryTransformer(np.array(embedding)[:, None], none, none, value, output, **more)

    # layer 1 stores 0 for .3 and .4 but attention reads them; layer 2 reads .8 (x_0 + x_1): .48 for a and b at first, then
    # a after a: .8 (.3 + .3) = .48 -> 0, a after b: .8 (.3 + .35) = .52 -> 1
    none = np.zeros((2, 2, 1))
    open_loop = (
        np.array([[0.3, 0.0], [0.4, -0.2]]), none, none,
        np.array([[[1.0], [0.0]], [[0.8], [0.8]]]), np.array([[[1.0, 0.0]], [[0.0, 0.0]]]),
    )  # fmt: skip
    # keys (.7, 0) and (1.3, -.3) are both stored as (1, 0); turned by 1 they are (.378, .589) and (.955, .932)
    turned = (
        np.array([[0.7, 0.0], [1.3, -0.3]]), np.zeros((1, 2, 2)), np.eye(2)[None], np.zeros((1, 2, 2)), np.zeros((1, 2, 2)),
    )  # fmt: skip
    # both tokens store 0 in layer 1, so attention gives 1/2 of the BOS value 1 at the first token and 1/3 at the second; layer 2
    # reads .54 and .64 at the first, then a .46 and b .56
    start = np.array([1.0])
    # both store 1 in layer 1, so attention with a sink gives 1/2 at the first position and 2/3 at the second; layer 2 reads
    # .54 and .90 at the first, then a .48 and b .84
    return [
        TwoTokens(
            "open loop", TernaryTransformer(*open_loop, loop="open"), TernaryTransformer(*open_loop), ((0, 0), (1, 0)),
            "e = (.3, 0), (.4, -.2); W_V = (1, 0), (.8, .8); W_O = (1, 0); aa, ba",
        ),
        TwoTokens(
            "rotary keys rounded after rotation", TernaryTransformer(*turned, rotation=1.0), TernaryTransformer(*turned), ((0, 1), (1, 0)),
            "one layer, d = m = 2, angle 1; e = (.7, 0), (1.3, -.3); W_K = 1; ab, ba",
        ),
        TwoTokens(
            "BOS", deep([0.3, 0.4], 1, 0.48, 1, start=start), deep([0.3, 0.4], 1, 0.48, 1), ((0, 1), (1, 0)),
            "e = .3, .4, BOS 1; W_V = 1, 1; W_O = .48; ab, ba",
        ),
        TwoTokens(
            "attention sink", deep([0.6, 0.9], 1, -0.3, 1.2, sink=0.0), deep([0.6, 0.9], 1, -0.3, 1.2), ((0, 1), (1, 0)),
            "e = .6, .9; sink logit 0; W_V = 1, 1.2; W_O = -.3; ab, ba",
        ),
    ]  # fmt: skip


COUNTEREXAMPLE = Instance(
    FiniteLanguage({("a", "c"): HALF, ("b", "a"): HALF}),
    collision_model().kv,
    "texts ac and ba, each 1/2; KV(a) = KV(b)",
)
#: four strings, each 1/4; the cache keeps the number of ones, so that two strings in the middle merge: 1/4, 1/2, 1/4
MERGED = Instance(
    FiniteLanguage({s: Fraction(1, 4) for s in itertools.product((0, 1), repeat=2)}),
    lambda prefix: sum(prefix) * (len(prefix) == 2),
    "number of ones",
)


def ternary_label(number: int, rest: str = "closed loop") -> str:
    return f"{number} random 2-layer softmax transformers, ternary KV, {rest}, |V|=4, n=4, d=1, m=2, Markov laws in eighths"


def two_token_partitions(length: int, largest: int) -> Counter[tuple[int, ...]]:
    """Which prefixes of 1..length <= 4 tokens write equal KV, for all two-token models of two layers; how many models do so.

    m = d = 1, all weights in -largest..largest, hard attention, exact: everything is 12 times a number, an integer. A model is
    (e_0, e_1, W_Q, W_K, W_V, W_O) of the bottom layer and (W_K, W_V) of the top one, whose W_Q, W_O are never read. That
    pair makes the top KV a one-to-one function of the layer's input unless both are 0: `top` 0 and 1 stand for all of them.
    """
    weights = range(-largest, largest + 1)
    grid = np.array(list(itertools.product(weights, repeat=6)))
    e, q, k, v, o = grid[:, :2], *grid[:, 2:].T
    zeros = sum(a == 0 for a in weights) ** 2
    found: Counter[tuple[int, ...]] = Counter()
    written = []
    for t in range(1, length + 1):
        for prefix in itertools.product((0, 1), repeat=t):
            x = e[:, prefix]
            logits = (q * x[:, -1])[:, None] * (k[:, None] * x)
            chosen = logits == logits.max(axis=1, keepdims=True)
            mean = 12 * (chosen * v[:, None] * x).sum(axis=1) // chosen.sum(axis=1)
            written.append(np.stack([k * x[:, -1], v * x[:, -1], 12 * x[:, -1] + mean * o], axis=1))
    for top, models in ((0, zeros), (1, len(weights) ** 2 - zeros)):
        kv = np.stack(written, axis=1) * np.array([1, 1, top])
        equal = (kv[:, :, None] == kv[:, None]).all(axis=3)
        labels = equal.argmax(axis=2)  # the first prefix with the same KV
        for cells, times in zip(*np.unique(labels, axis=0, return_counts=True)):
            found[tuple(cells.tolist())] += int(times) * models
    return found


def laws_on_a_grid(length: int, parts: int) -> Iterator[FiniteLanguage]:
    """All laws on binary strings whose probabilities are multiples of 1/parts."""
    strings = list(itertools.product((0, 1), repeat=length))
    for bars in itertools.combinations(range(parts + len(strings) - 1), len(strings) - 1):
        counts = [b - a - 1 for a, b in zip((-1, *bars), (*bars, parts + len(strings) - 1))]
        yield FiniteLanguage.from_counts(dict(zip(strings, counts)))
