"""Claims on longer contexts (arXiv 2604.15356, "compression improves with context"): when a position costs less than the one before, and where that ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from kvtheory import workload
from kvtheory.entropy import FiniteLanguage, MarkovSource, conditional_entropy_bits, entropy_bits
from kvtheory.statistics import Interval, mean_interval
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical, statistical
from proofs_checks.sequential import measured

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]
HALF = Fraction(1, 2)
WORDS = 20
#: resamples of windows for the fitted rate's interval
DRAWS = 200
ROUNDING, LOGARITHMS = 1e-12, "logarithms of integers"


def itself(prefix: tuple[Any, ...]) -> Any:
    """The cache of a model that loses nothing: KV_t tells t_t."""
    return prefix[-1]


def _steps(name: str, change: Any) -> Mutant:
    """`sequential` with its per-step numbers changed: change(language) -> numbers, for tokens and for KV alike."""

    def wrong(true: Function) -> Function:
        def mutated(language: FiniteLanguage, kv_map: Function) -> Any:
            numbers = tuple(change(true(language, kv_map), language))
            return true(language, kv_map)._replace(tokens=numbers, kv_given_kv=numbers)

        return mutated

    return Mutant(name, "sequential", wrong)


def _without_past(_: Any, language: FiniteLanguage) -> Iterator[float]:
    for t in range(language.length):
        yield conditional_entropy_bits((s[t], (), p) for s, p in language.items())


def _given_last(_: Any, language: FiniteLanguage) -> Iterator[float]:
    for t in range(language.length):
        yield conditional_entropy_bits((s[t], s[:t][-1:], p) for s, p in language.items())


@claim(
    id="sequential/improves-with-context", paper=PAPER, section="compression improves with context",
    statement="The more context a cache has, the fewer bits its next position costs.",
    formula="H(KV_t | KV_<t) ≤ H(KV_t−1 | KV_<t−1)",
    expected=Verdict.FAILS,
    functions={"sequential": "kvtheory.entropy.sequential"},
    mutants=[
        _steps("in descending order", lambda found, _: sorted(found.tokens, reverse=True)),
        _steps("the mean of all steps", lambda found, _: [sum(found.tokens) / len(found.tokens)] * len(found.tokens)),
    ],
    correction="sequential/context-plateau",
)  # fmt: skip
def improves(context: Context, *, sequential: Function) -> Result:
    """The paper says it of laws whose conditional entropy does not rise, which is the statement itself; no law need be so."""
    language = prompts(context)
    found = sequential(language, itself).kv_given_kv
    steps = [found[t] - found[t - 1] for t in range(1, WORDS)]
    yield exact(
        what="positions that cost more than the one before", ran_on=f"the first {WORDS} words of {len(list(language.values()))} sessions, each as likely: one of four system prompts, then a novel; "
        "a cache that loses nothing", observed=sum(step > ROUNDING for step in steps), predicted=0,
        note=f"largest rise {max(steps):.2f} bits, behind the prompt: what is alike costs nothing, what comes then does",
    )  # fmt: skip
    language = FiniteLanguage({("a", "a"): HALF, ("a", "b"): HALF})
    where = 'texts "aa" and "ab", each 1/2, a cache that loses nothing'
    for t, bits in enumerate((0, 1)):
        its = conditional_entropy_bits((string[t], string[:t], p) for string, p in language.items())
        yield exact(
            what=f"H(t_{t + 1} | t_<{t + 1}), bits, by counting",
            ran_on=where,
            observed=its,
            predicted=bits,
            role="control",
        )
    found = sequential(language, itself).kv_given_kv
    yield exact(what="H(KV_2 | KV_1) ≤ H(KV_1)", ran_on=where, observed=found[1], predicted=found[0], relation="<=")
    for table in context.memo("tables", lambda: measured.load("context")):
        rises = [sum(b > a for a, b in itertools.pairwise(w["bits"])) for w in table["windows"]]
        yield numerical(
            what="of the spans of positions that follow one another, each twice as long, those that cost more a token than the one before", role="assumption",
            ran_on=f"{table['title']}, {len(rises)} windows of {table['length']} tokens, saved table", observed=float(np.mean(rises)), predicted=0.0, tolerance=0.0,
            because="reported", note=f"of {len(table['spans']) - 2}, mean over windows; a realised text is no expectation",
        )  # fmt: skip


def prompts(context: Context) -> FiniteLanguage:
    """The law of the first WORDS words of a workload's sessions, each session as likely: English as a server sees it."""
    texts = [
        tuple(workload.words(s.text)[:WORDS])
        for s in workload.sessions(context.size(80, 400), context.seed)
        if s.kind == "prompt"
    ]
    weights: dict[tuple[str, ...], Fraction] = {}
    for text in texts:
        weights[text] = weights.get(text, Fraction(0)) + Fraction(1, len(texts))
    return FiniteLanguage(weights)


def stationary(transitions: Mapping[Any, Mapping[Any, Fraction]]) -> dict[Any, Fraction]:
    """The law that a Markov chain keeps, exact, by elimination; the chain has one."""
    states = list(transitions)
    n = len(states)
    # pi (P - 1) = 0, sum pi = 1: the last equation is replaced by the sum
    rows = [[transitions[s].get(t, Fraction(0)) - (s == t) for s in states] + [Fraction(0)] for t in states[:-1]]
    rows.append([Fraction(1)] * n + [Fraction(1)])
    for i in range(n):
        pivot = next(r for r in range(i, n) if rows[r][i] != 0)
        rows[i], rows[pivot] = rows[pivot], rows[i]
        rows[i] = [x / rows[i][i] for x in rows[i]]
        for r in range(n):
            if r != i and rows[r][i] != 0:
                rows[r] = [x - rows[r][i] * y for x, y in zip(rows[r], rows[i])]
    return {s: rows[i][n] for i, s in enumerate(states)}


def random_chain(rng: np.random.Generator, states: int) -> dict[int, dict[int, Fraction]]:
    """Transitions in twelfths and the like, none 0."""
    return {
        s: {t: Fraction(int(w), int(weights.sum())) for t, w in enumerate(weights)}
        for s, weights in enumerate(rng.integers(1, 8, (states, states)))
    }


def hidden(chain: Mapping[int, Mapping[int, Fraction]], letter: Mapping[int, str], length: int) -> FiniteLanguage:
    """The law of letters(states) of a stationary chain: no Markov law itself, so that every further token tells something of the state."""
    weights: dict[tuple[str, ...], Fraction] = {}
    states = MarkovSource(stationary(chain), chain).language(length)
    for string, p in states.items():
        text = tuple(letter[s] for s in string)
        weights[text] = weights.get(text, Fraction(0)) + p
    return FiniteLanguage(weights)


@claim(
    id="sequential/context-plateau", paper=PAPER, section="compression improves with context, corrected",
    statement="Under a stationary law, with a cache that loses nothing, the bits of a position do not rise, and fall to the entropy rate, no further: of a Markov law they stay "
    "where they are from the second position on. The whole cache costs its length times the rate, and a constant. On real text the bits of trained models level off as well: the "
    "last doubling of the context measured costs more than half as much a token as the one before, and so does the fitted rate.",
    formula="H(KV_t | KV_<t) = H(t_t | t_<t) ↓ h̄ > 0;   Markov: Σ_t = H(t_1) + (n − 1) h̄",
    assumptions=("stationary law", "the cache determines the tokens", "windows of texts count as independent samples"),
    expected=Verdict.HOLDS_UNDER,
    functions={"sequential": "kvtheory.entropy.sequential"},
    mutants=[
        _steps("without the past", _without_past),
        _steps("reversed", lambda found, _: found.tokens[::-1]),
        _steps("given the last token only", _given_last),
        _steps("half of each step saved over the one before", lambda found, _: [found.tokens[0] / 2**t for t in range(len(found.tokens))]),
    ],
    figure="context-growth",
)  # fmt: skip
def plateau(context: Context, *, sequential: Function) -> Result:
    # states 0, 1 with P(stay) = 3/4: H(t_1) = 1, rate h_2(1/4)
    chain = {0: {0: Fraction(3, 4), 1: Fraction(1, 4)}, 1: {0: Fraction(1, 4), 1: Fraction(3, 4)}}
    yield exact(
        what="stationary law of P(stay) = 3/4", ran_on="two states", observed=list(stationary(chain).values()), predicted=[HALF, HALF], role="control"
    )  # fmt: skip
    rate = entropy_bits([3, 1])
    length = 6
    found = sequential(MarkovSource(stationary(chain), chain).language(length), itself)
    where = f"two tokens, P(stay) = 3/4, {length} positions"
    for t in range(1, length):
        yield numerical(
            what=f"H(KV_{t + 1} | KV_<{t + 1}) = h_2(1/4) = .8113", ran_on=where, observed=found.kv_given_kv[t], predicted=rate, tolerance=ROUNDING, because=LOGARITHMS
        )  # fmt: skip
    yield numerical(
        what="total = 1 + 5 h_2(1/4), bits", ran_on=where, observed=sum(found.kv_given_kv), predicted=1 + (length - 1) * rate, tolerance=ROUNDING, because=LOGARITHMS
    )  # fmt: skip
    # three states, two of which write the same letter
    slow = {
        0: {0: Fraction(1, 2), 1: Fraction(1, 4), 2: Fraction(1, 4)},
        1: {0: Fraction(1, 8), 1: Fraction(3, 4), 2: Fraction(1, 8)},
        2: {0: Fraction(3, 4), 1: Fraction(1, 8), 2: Fraction(1, 8)},
    }
    rng, number = context.rng("chains"), context.size(6, 60)
    rising = below = 0
    drop, sums = [], []
    for i in range(number + 1):
        states = slow if i == 0 else random_chain(rng, 3)
        language = hidden(states, {0: "a", 1: "a", 2: "b"}, length)
        bits = sequential(language, itself).kv_given_kv
        rising += any(b > a + ROUNDING for a, b in itertools.pairwise(bits))
        # the rate is at least what is left when the state before the first token is known as well (chain rule, data processing)
        floor = _given_state(states, {0: "a", 1: "a", 2: "b"}, length)
        below += bits[-1] < floor - ROUNDING
        sums.append((sum(bits), entropy_bits(language.values())))
        drop.append((bits[0] - bits[1], bits[-2] - bits[-1], floor, bits[-1]))
    where = f"{number + 1} hidden Markov laws of three states and two letters, {length} positions"
    yield exact(
        what="laws of which a position costs more than the one before", ran_on=where, observed=rising, predicted=0
    )
    yield exact(
        what="laws that fall below H(t_n | t_<n, the first state), which is at most the rate", ran_on=where, observed=below, predicted=0,
        note=f"the first law: falls by {drop[0][0]:.4f} from position 1 to 2, by {drop[0][1]:.1e} from {length - 1} to {length}; the rate lies in [{drop[0][2]:.4f}, {drop[0][3]:.4f}]",
    )  # fmt: skip
    observed, predicted = max(sums, key=lambda pair: abs(pair[0] - pair[1]))
    yield numerical(
        what="sum over positions = entropy of the text, the furthest", ran_on=where, observed=observed, predicted=predicted, tolerance=ROUNDING, because=LOGARITHMS
    )  # fmt: skip
    curves = []
    tables = context.memo("tables", lambda: measured.load("context"))
    for table in tables:
        bits = np.array([w["bits"] for w in table["windows"]], float)
        where = f"{table['title']}, {len(bits)} windows of {table['length']} tokens, saved table"
        level = 1 - context.alpha(2 * len(tables))
        yield statistical(
            what=f"bits a token of positions {table['spans'][-2]} to {table['spans'][-1] - 1} over those of the {table['spans'][-2] - table['spans'][-3]} before: at least a half",
            ran_on=where, interval=mean_interval(bits[:, -1] / bits[:, -2], level), predicted=0.5, relation=">=",
            note="a total that stopped growing would have a half at most",
        )  # fmt: skip
        limit, size, power = fitted(table["spans"], bits.mean(axis=0))
        yield statistical(
            what="rate to which surprisal falls, fitted h(t) = h̄ + a t^−b, over the bits a token of the last span: at least a half", ran_on=where,
            interval=context.memo(("rate", table["title"]), lambda b=bits, t=table, at=level: _rate(context, t["spans"], b, at)), predicted=0.5, relation=">=",  # type: ignore[misc]
            note=f"h̄ = {limit:.2f}, a = {size:.2f}, b = {power:.2f}; percentiles of {DRAWS} resamples of the windows",
        )  # fmt: skip
        bands = [mean_interval(column, 0.95)._asdict() for column in bits.T]
        curves.append(
            {
                "model": table["title"], "spans": table["spans"], "bands": bands, "fit": [limit, size, power], "windows": len(bits),
                "by_text": {
                    name: np.mean([w["bits"] for w in table["windows"] if w["text"] == name], axis=0).tolist()
                    for name in dict.fromkeys(w["text"] for w in table["windows"])
                },
            }
        )  # fmt: skip
    exact_curve = list(sequential(hidden(slow, {0: "a", 1: "a", 2: "b"}, length), itself).kv_given_kv)
    yield Picture(figure="context-growth", data={"curves": curves, "hidden_markov_bits": exact_curve})


def _given_state(chain: Mapping[int, Mapping[int, Fraction]], letter: Mapping[int, str], length: int) -> float:
    """H(letter_n | letters before, first state)."""
    states = MarkovSource(stationary(chain), chain).language(length)
    return conditional_entropy_bits(
        (letter[s[-1]], (s[0], tuple(letter[x] for x in s[:-1])), p) for s, p in states.items()
    )


def _rate(context: Context, spans: list[int], bits: Any, level: float) -> Interval:
    """Of the fitted rate over the last span's bits, by resampling whole windows."""
    rng, found = context.rng("resampled windows"), []
    for _ in range(DRAWS):
        mean = bits[rng.integers(0, len(bits), len(bits))].mean(axis=0)
        found.append(fitted(spans, mean)[0] / float(mean[-1]))
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    mean = bits.mean(axis=0)
    return Interval(fitted(spans, mean)[0] / float(mean[-1]), float(low), float(high), level)


def fitted(spans: list[int], bits: Any) -> tuple[float, float, float]:
    """(h, a, b) of h + a t^-b at the geometric means of the spans, by least squares over a grid of b, h and a solved for with h >= 0."""
    t = np.sqrt(np.array(spans[:-1], float) * np.array(spans[1:], float))
    weights = np.sqrt(np.diff(np.asarray(spans, float)))
    best: tuple[float, float, float, float] | None = None
    for power in np.linspace(0.02, 2.0, 199):
        design = np.stack([np.ones(len(t)), t**-power], axis=1)
        (h, a), *_ = np.linalg.lstsq(design * weights[:, None], np.asarray(bits, float) * weights, rcond=None)
        if h < 0:
            h, a = 0.0, float((weights**2 * bits * t**-power).sum() / (weights**2 * t ** (-2 * power)).sum())
        loss = float((weights**2 * (h + a * t**-power - bits) ** 2).sum())
        if best is None or loss < best[0]:
            best = loss, float(h), float(a), float(power)
    assert best is not None
    return best[1:]
