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

#: Two float entropies of at most 12 bits, each a sum of at most 256 terms with a relative error of a few 2^-53, differ from
#: the true ones by less than 1e-13. Below this gap floats do not decide; integers do.
GAP = 1e-9


class Power(NamedTuple):
    """The number log2(top / bottom) / size, exact; of one size only numbers of one language are compared."""

    top: int
    bottom: int
    size: int

    def __add__(self, other: Power) -> Power:  # type: ignore[override]
        return Power(self.top * other.top, self.bottom * other.bottom, self.size)

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


def conditional(joint: Counter[Hashable], given: Counter[Hashable]) -> Power:
    """H(X|Y) from the weights of (x, y) and of y."""
    return Power(power_product(given), power_product(joint), sum(given.values()))


def power_product(weights: Counter[Hashable]) -> int:
    """prod w^w, equal weights taken together."""
    return math.prod(w ** (w * times) for w, times in Counter(weights.values()).items())


def truth(instance: Instance) -> Truth:
    """Every entropy of an instance, exact, from whole strings."""
    language, length = instance.language, instance.language.length
    rows = [(s, tuple(instance.kv(s[: t + 1]) for t in range(length)), language.weight(s)) for s in language]
    one: Counter[Hashable] = Counter({(): language.denominator})
    total_kv = conditional(weigh((kv, w) for _, kv, w in rows), one)
    total_tokens = conditional(weigh((s, w) for s, _, w in rows), one)
    found = Truth([], [], [], [], total_kv, total_tokens)
    for t in range(length):
        kv_before = weigh((kv[:t], w) for _, kv, w in rows)
        tokens_before = weigh((s[:t], w) for s, _, w in rows)
        found.kv_given_kv.append(conditional(weigh((kv[: t + 1], w) for _, kv, w in rows), kv_before))
        found.tokens.append(conditional(weigh((s[: t + 1], w) for s, _, w in rows), tokens_before))
        found.tokens_given_kv.append(conditional(weigh(((s[:t], kv[:t]), w) for s, kv, w in rows), kv_before))
        found.next_token_given_kv.append(conditional(weigh(((s[t], kv[:t]), w) for s, kv, w in rows), kv_before))
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


COUNTEREXAMPLE = Instance(
    FiniteLanguage({("a", "c"): HALF, ("b", "a"): HALF}), collision_model().kv, "ac, ba; KV(a) = KV(b)"
)
#: four strings, each 1/4; the cache keeps the number of ones, so that two strings in the middle merge: 1/4, 1/2, 1/4
MERGED = Instance(
    FiniteLanguage({s: Fraction(1, 4) for s in itertools.product((0, 1), repeat=2)}),
    lambda prefix: sum(prefix) * (len(prefix) == 2),
    "number of ones",
)


def of_float(bits: float) -> Fraction | str:
    """The rational that a float is, for exact comparison."""
    return Fraction(bits) if math.isfinite(bits) else str(bits)


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
