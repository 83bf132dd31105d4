"""Entropies of languages that are written out: Theorem 1 of arXiv 2604.15356, its counterexample, what is left of it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flint import arb, fmpq

from proofs_checks.certified.balls import Certificate, ball, entropy, log2

Language = Mapping[Any, fmpq]
Map = Callable[[tuple[int, ...]], Any]


def of(law: Language, label: Callable[[tuple[int, ...]], Any]) -> arb:
    """H of a label of the string."""
    masses: dict[Any, fmpq] = defaultdict(lambda: fmpq(0))
    for string, p in law.items():
        masses[label(string)] += p
    return entropy(masses.values())


def given(law: Language, label: Callable[[tuple[int, ...]], Any], known: Callable[[tuple[int, ...]], Any]) -> arb:
    return of(law, lambda s: (label(s), known(s))) - of(law, known)


def caches(kv: Map, t: int) -> Callable[[tuple[int, ...]], Any]:
    return lambda s: tuple(kv(s[:i]) for i in range(1, t + 1))


def token(t: int) -> Callable[[tuple[int, ...]], int]:
    return lambda s: s[t - 1]


def before(t: int) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    return lambda s: s[: t - 1]


def drawn(seed: int, letters: int, length: int) -> Language:
    """A law with all strings possible, of small whole weights."""
    source = random.Random(seed)
    strings: list[tuple[int, ...]] = [()]
    for _ in range(length):
        strings = [(*s, a) for s in strings for a in range(letters)]
    weights = [source.randint(1, 40) for _ in strings]
    return {s: fmpq(w, sum(weights)) for s, w in zip(strings, weights)}


COIN = {(a, b): fmpq(1, 4) for a in (0, 1) for b in (0, 1)}


def ones(prefix: tuple[int, ...]) -> int:
    """A cache that forgets the order: the number of ones, and nothing after one token."""
    return sum(prefix) if len(prefix) > 1 else 0


def running(prefix: tuple[int, ...]) -> int:
    """A cache that the last one and the token decide: the number of ones."""
    return sum(prefix)


def certificates() -> Iterator[Certificate]:
    claim = "sequential/per-step-entropy"
    now, printed = given(COIN, caches(ones, 2), caches(ones, 1)), given(COIN, token(2), before(2))
    yield Certificate(
        claim, "counterexample: H(t_2 | t_1) < H(KV_2 | KV_1)", "two fair coins, KV = number of ones", printed, "<", now,
        {"entropy of the whole cache under both": (of(COIN, token(1)) + of(COIN, token(2)), of(COIN, caches(ones, 2)))},
    )  # fmt: skip
    yield Certificate(
        "sequential/per-step-entropy-corrected", "H(KV_2 | KV_1) < H(t_2 | t_1) + H(t_1 | KV_1)", "two fair coins, KV = number of ones",
        now, "<", printed + given(COIN, token(1), caches(ones, 1)), {"slack left out": (now, printed)},
    )  # fmt: skip
    uneven = {(0, 0): fmpq(9, 20), (0, 1): fmpq(9, 20), (1, 0): fmpq(1, 20), (1, 1): fmpq(1, 20)}
    first, second = of(uneven, token(1)), given(uneven, token(2), before(2))
    yield Certificate(
        "sequential/improves-with-context", "counterexample: H(t_1) < H(t_2 | t_1)", "first token 9:1, second a fair coin", first, "<", second,
        {"natural for binary in one of them": (first, arb(2).log() * second / 2)},
    )  # fmt: skip
    for seed, letters, length in ((1, 2, 3), (2, 3, 3), (3, 2, 5)):
        law = drawn(seed, letters, length)
        where = f"law {seed}: {letters}^{length} strings, rational weights"
        merged: Map = lambda s: sum(s) % 2  # noqa: E731
        yield Certificate(
            "sequential/total-entropy", "H(KV_<=n) < H(t_<=n), caches that merge", where,
            of(law, caches(ones, length)), "<", of(law, lambda s: s),
            {"nats for bits on the right": (of(law, caches(running, length)), of(law, lambda s: s) * arb(2).log())},
        )  # fmt: skip
        for t in range(2, length + 1):
            left = given(law, caches(ones, t), caches(ones, t - 1))
            right = given(law, token(t), before(t)) + given(law, before(t), caches(ones, t - 1))
            yield Certificate(
                "sequential/per-step-entropy-corrected", f"H(KV_{t} | KV_<{t}) <= H(t_{t} | t_<{t}) + H(t_<{t} | KV_<{t})", where, left, "<=",
                right, {"half of the right side": (right, right / 2)},
            )  # fmt: skip
            left = given(law, merged_step(t), caches(merged, t - 1))
            right = given(law, token(t), caches(merged, t - 1))
            if letters > 2:
                yield Certificate(
                    "sequential/per-step-entropy-decoded", f"H(KV_{t} | KV_<{t}) < H(t_{t} | KV_<{t}), KV_t a function of KV_t-1 and t_t", where,
                    left, "<", right, {"sides exchanged": (right, left)},
                )  # fmt: skip
    yield from _plateau()
    yield from _steps()


def merged_step(t: int) -> Callable[[tuple[int, ...]], Any]:
    return lambda s: sum(s[:t]) % 2


def _plateau() -> Iterator[Certificate]:
    """A stationary Markov source: bits a step fall to the entropy rate, which is above 0."""
    stay = {0: fmpq(3, 4), 1: fmpq(1, 2)}
    start = {0: fmpq(2, 3), 1: fmpq(1, 3)}
    law = {
        (a, b, c): start[a] * (stay[a] if b == a else 1 - stay[a]) * (stay[b] if c == b else 1 - stay[b])
        for a in (0, 1) for b in (0, 1) for c in (0, 1)
    }  # fmt: skip
    first, second, third = of(law, token(1)), given(law, token(2), before(2)), given(law, token(3), before(3))
    where = "stationary two-state chain, 3/4 and 1/2 to stay"
    yield Certificate(
        "sequential/context-plateau", "H(t_2 | t_1) < H(t_1)", where, second, "<", first, {"exchanged": (first, second)}
    )
    yield Certificate(
        "sequential/context-plateau", "0 < the plateau", where, arb(0), "<", third, {"sign": (arb(0), -third)}
    )
    yield Certificate(
        "sequential/context-plateau",
        "H(t_3 | t_1, t_2) = H(t_2 | t_1)",
        where,
        third,
        "=",
        second,
        {"conditioning lost": (first, second)},
    )


def _steps() -> Iterator[Certificate]:
    """Storing what recomputing misses: H(steps) = h2(s) + s H(steps | steps != 0)."""
    law = {0: fmpq(7, 10), 1: fmpq(1, 5), -1: fmpq(1, 10)}
    changed = 1 - law[0]
    whole, flag = entropy(law.values()), entropy((law[0], changed))
    rest = entropy(p / changed for k, p in law.items() if k)
    where = "steps 0, 1, -1 with 7/10, 1/5, 1/10"
    yield Certificate(
        "sequential/recompute-costs", "h2(s) < H(steps)", where, flag, "<", whole, {"exchanged": (whole, flag)}
    )
    yield Certificate(
        "sequential/recompute-costs", "H(steps) = h2(s) + s H(steps | steps != 0)", where, whole, "=", flag + ball(changed) * rest,
        {"s left out": (whole, flag + rest)},
    )  # fmt: skip
    for top, low in ((10, "3.32"), (20, "4.32")):
        yield Certificate(
            "sequential/perplexity-in-bits", f"|log2 {top} - {low}| < .005", f"perplexity {top}", abs(log2(top) - arb(low)), "<", arb("0.005"),
            {"natural logarithm": (abs(ball(top).log() - arb(low)), arb("0.005"))},
        )  # fmt: skip
