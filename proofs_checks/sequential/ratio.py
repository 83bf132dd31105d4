"""Claims of arXiv 2604.15356 about its printed ratio: what 914,000 divides by what, and what the paper's own coder can reach."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, certified, exact

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]

#: the paper's "70B" and its rates
LAYERS, HEADS, HEAD_DIM = 80, 64, 128
TURBOQUANT_BITS = 3
TOKEN_BITS = Fraction(43, 10)
OVERHEAD = 1000
VOCABULARY = 128_256
#: positions of the context that the paper's text speaks of; an arithmetic code of so many tokens spends at most 2 bits more than they have
POSITIONS = 128_000
#: KV heads that a 70B model of the Llama class has
GQA_HEADS = 8


def ball(number: Any) -> Any:
    """A Fraction, an int or a float as a flint ball; a ball as it is."""
    import flint

    if isinstance(number, flint.arb):
        return number
    return flint.arb(flint.fmpq(*Fraction(number).as_integer_ratio()))


def enclosure(number: Any) -> tuple[float, float]:
    """Floats that enclose a number or a ball."""
    return math.nextafter(float(ball(number).lower()), -math.inf), math.nextafter(float(ball(number).upper()), math.inf)


def rounds_to(printed: int, unit: float = 1.0) -> tuple[float, float]:
    """The numbers that a printed figure stands for."""
    return printed - unit / 2, printed + unit / 2


def log2(number: int) -> Any:
    """log2 as a flint ball."""
    import flint

    return flint.arb(number).log() / flint.arb(2).log()


FUNCTIONS = {
    "components": "kvtheory.accounting.kv_components_per_token",
    "ratio": "kvtheory.accounting.sequential_ratio",
    "floor": "kvtheory.accounting.bit_floor",
}
SLIPS = [
    *systematic.scales("components"), *systematic.scales("ratio"), *systematic.scales("floor"), *systematic.natural_log("ratio"),
    Mutant("keys without values", "components", lambda true: lambda layers, heads, head_dim: true(layers, heads, head_dim) // 2),
    Mutant("8 KV heads where the paper counts 64", "components", lambda true: lambda layers, heads, head_dim: true(layers, min(heads, 8), head_dim)),
    Mutant("turned over", "ratio", lambda true: lambda components, bits, token_bits: 1 / true(components, bits, token_bits)),
    Mutant("bits per number left out", "ratio", lambda true: lambda components, bits, token_bits: true(components, 1, token_bits)),
]  # fmt: skip


@claim(
    id="sequential/ratio-914000", paper=PAPER, section="abstract: theoretical limit and 1000x overhead; the adaptive bit rule",
    statement="The theoretical limit for the KV cache of a 70B model is 4.3 bits a position, 914,000 times less than TurboQuant at 3 bits a "
    "number, and the paper's adaptive residual coder stays within 1000 times that limit, 914 times less.",
    formula="limit: 2 L H d · 3 / 4.3 ≈ 914,000;  adaptive residual coder: Σ_c b_c ≤ 1000 · 4.3 bits a position, with b_c = max(1, ⌊b_0 h_i / h̄⌋)",
    expected=Verdict.FAILS,
    functions=FUNCTIONS,
    mutants=[
        *SLIPS,
        Mutant("zero bits allowed", "floor", lambda true: lambda components, bits_per_component=1: 0),
        Mutant("one bit a position, not a number", "floor", lambda true: lambda components, bits_per_component=1: bits_per_component),
    ],
    figure="ratio-914000", correction="sequential/ratio-corrected",
)  # fmt: skip
def ratio_914000(context: Context, *, components: Function, ratio: Function, floor: Function) -> Result:
    """The limit and its arithmetic are right, and replaying the tokens reaches it, with the model as decoder.

    What fails is that the adaptive residual coder comes anywhere near: its rule spends a bit on every number.
    """
    paper = components(LAYERS, HEADS, HEAD_DIM)
    size = f"L={LAYERS}, H={HEADS}, d={HEAD_DIM}"
    yield exact(
        what="numbers a position, 2·80·64·128", ran_on=size, observed=paper, predicted=1_310_720, role="control"
    )
    yield certified(
        what="3-bit TurboQuant against 4.3 bits a position: 3,932,160 / 4.3 = 914,456", ran_on=size, role="control",
        observed=enclosure(ratio(paper, TURBOQUANT_BITS, TOKEN_BITS)), predicted=rounds_to(914_456),
    )  # fmt: skip
    yield certified(
        what="printed for the theoretical limit, to three digits: 914,000", ran_on=size, observed=enclosure(ratio(paper, TURBOQUANT_BITS, TOKEN_BITS)),
        predicted=rounds_to(914_000, 1000), note="the division is right",
    )  # fmt: skip
    yield certified(
        what="printed for 1000 times the limit: 914", ran_on=size, observed=enclosure(ratio(paper, TURBOQUANT_BITS, OVERHEAD * TOKEN_BITS)),
        predicted=rounds_to(914), note="the division is right",
    )  # fmt: skip
    replay = TOKEN_BITS + Fraction(2, POSITIONS)
    yield certified(
        what="an ideal arithmetic code of the tokens, at most 2 bits over their entropy in all: 914,452", role="control",
        ran_on=f"{size}, {POSITIONS:,} positions", observed=enclosure(ratio(paper, TURBOQUANT_BITS, replay)), predicted=rounds_to(914_452),
        note="the limit is reached; the decoder is the model, which computes every position of the cache anew from the tokens",
    )  # fmt: skip
    checked = TOKEN_BITS + Fraction(2, 64)
    yield certified(
        what="token replay as it is built, 2 bits more for every 64 tokens, to check them: 907,858", role="control",
        ran_on=size, observed=enclosure(ratio(paper, TURBOQUANT_BITS, checked)), predicted=rounds_to(907_858),
        note="the same decoder: the model, for as long as a prefill takes",
    )  # fmt: skip
    least = floor(paper, 1)
    yield exact(
        what="least bits a position where every number gets max(1, ·) bits",
        ran_on=size,
        observed=least,
        predicted=1_310_720,
        role="control",
    )
    yield certified(
        what="one bit a number, 1,310,720 bits a position, over 4.3 bits: 304,819 times the entropy", ran_on=size, observed=enclosure(ratio(paper, 1, TOKEN_BITS)),
        predicted=rounds_to(304_819), role="control",
    )  # fmt: skip
    yield exact(
        what="bits a position that the paper's adaptive residual coder spends at least ≤ 1000 times the entropy", ran_on=size, observed=least,
        predicted=OVERHEAD * TOKEN_BITS, relation="<=", note="914 times less would need 0.0033 bit a number; the rule gives each at least 1",
    )  # fmt: skip
    yield exact(
        what="the largest ratio to 3 bits a number that the paper's adaptive residual coder can reach ≥ 914", ran_on=size,
        observed=Fraction(ratio(paper, TURBOQUANT_BITS, max(least, 1))), predicted=914, relation=">=",
    )  # fmt: skip

    token_id = math.ceil(math.log2(VOCABULARY))
    steps: list[dict[str, Any]] = [
        {
            "label": "printed limit: 4.3 bits a position against 3 bits a number",
            "ratio": float(ratio(paper, TURBOQUANT_BITS, TOKEN_BITS)),
        },
        {
            "label": "an ideal arithmetic code of the tokens; its decoder is the model",
            "ratio": float(ratio(paper, TURBOQUANT_BITS, replay)),
        },
        {
            "label": "token replay as built, 2 bits for every 64 tokens to check them",
            "ratio": float(ratio(paper, TURBOQUANT_BITS, checked)),
        },
    ]
    for label, observed, printed, note in (
        (
            "perplexity 20, log2 20 = 4.32 bits",
            ratio(paper, TURBOQUANT_BITS, log2(20)),
            909_816,
            "4.3 bits are a perplexity of 19.7",
        ),
        ("perplexity 10, log2 10 = 3.32 bits", ratio(paper, TURBOQUANT_BITS, log2(10)), 1_183_698, ""),
        (
            f"{GQA_HEADS} KV heads, as 70B models have",
            ratio(components(LAYERS, GQA_HEADS, HEAD_DIM), TURBOQUANT_BITS, TOKEN_BITS),
            114_307,
            "",
        ),
        (
            f"raw token ids of {token_id} bits, no model",
            ratio(paper, TURBOQUANT_BITS, token_id),
            231_304,
            "a list of tokens, no prediction",
        ),
        (
            "raw token ids of log2 128256 bits, no model",
            ratio(paper, TURBOQUANT_BITS, log2(VOCABULARY)),
            231_731,
            "231,730.64 before rounding",
        ),
    ):
        yield certified(
            what=f"ratio to 3 bits a number, rounded: {printed:,} for {label}",
            ran_on=size,
            observed=enclosure(observed),
            predicted=rounds_to(printed),
            role="control",
            note=note or None,
        )
        steps.append({"label": label, "ratio": float(ball(observed))})
    gain = ball(ratio(paper, TURBOQUANT_BITS, TOKEN_BITS)) / ball(ratio(paper, TURBOQUANT_BITS, log2(VOCABULARY)))
    yield certified(
        what="factor of the 914,000 that prediction buys over raw token ids, log2 128256 / 4.3 = 3.95",
        ran_on=size,
        observed=enclosure(gain),
        predicted=(3.945, 3.955),
        role="control",
    )
    steps.append({"label": "bought by prediction", "ratio": float(gain)})
    for heads, kilobytes in ((64, 335_544_320), (16, 83_886_080), (8, 41_943_040)):
        # 16 bits a number, 128,000 positions
        yield exact(
            what=f"kB of a 16-bit cache of 128,000 positions with {heads} KV heads", ran_on=f"L={LAYERS}, d={HEAD_DIM}",
            observed=Fraction(components(LAYERS, heads, HEAD_DIM) * 2 * 128_000, 1000), predicted=kilobytes, role="control",
            note="the text's 80 GB takes 16 heads, not 64" if heads == 16 else None,
        )  # fmt: skip
    steps.append(
        {
            "label": "the paper's adaptive residual coder, at most",
            "ratio": float(ratio(paper, TURBOQUANT_BITS, max(least, 1))),
        }
    )
    yield Picture(figure="ratio-914000", data={"model": size, "against": "TurboQuant, 3 bits a number", "steps": steps})


def _listed(numbers: Any) -> str:
    return " ".join(map(str, numbers))


@claim(
    id="sequential/ratio-corrected", paper=PAPER, section="abstract, corrected",
    statement="Against b_0 bits a number, a coder with at least one bit a number gains at most b_0. Storing token indices gains the printed "
    "order without any model; prediction multiplies that by index bits over entropy, whatever the size of the model.",
    formula="N b_0 / Σ_c max(1, ·) ≤ b_0;   (N b_0 / h̄) / (N b_0 / log2|V|) = log2|V| / h̄",
    expected=Verdict.HOLDS,
    functions={**FUNCTIONS, "adaptive_bits": "kvtheory.accounting.adaptive_bits"},
    mutants=[
        *systematic.scales("ratio"), *systematic.scales("floor"), *systematic.scales("components"),
        Mutant("turned over", "ratio", lambda true: lambda components, bits, token_bits: 1 / true(components, bits, token_bits)),
        Mutant("zero bits allowed", "adaptive_bits", lambda true: lambda h, base_bits: [math.floor(base_bits * len(h) * x / sum(h)) for x in h]),
        Mutant("rounded up", "adaptive_bits", lambda true: lambda h, base_bits: [max(1, math.ceil(base_bits * len(h) * x / sum(h))) for x in h]),
    ],
)  # fmt: skip
def ratio_corrected(
    context: Context, *, components: Function, ratio: Function, floor: Function, adaptive_bits: Function
) -> Result:
    # half the positions certain, half 8 bits: mean 4; b = max(1, floor(3 * 0 / 4)), floor(3 * 8 / 4)
    surprisals = [Fraction(0), Fraction(8)] * 3
    yield exact(
        what="bits a number that the adaptive rule gives to surprisals 0 8 0 8 0 8 at b_0 = 3", ran_on="max(1, ⌊3 h / 4⌋)", role="control",
        observed=_listed(adaptive_bits(surprisals, 3)), predicted=_listed([1, 6] * 3),
    )  # fmt: skip
    yield exact(
        what="bits a number that the adaptive rule gives to surprisals 1 2 3 at b_0 = 3", ran_on="max(1, ⌊3 h / 2⌋)", role="control",
        observed=_listed(adaptive_bits([1, 2, 3], 3)), predicted=_listed([1, 3, 4]),
    )  # fmt: skip
    rng = context.rng("surprisals")
    rates = []
    for _ in range(context.size(50, 1000)):
        h = [Fraction(int(x), 16) for x in rng.integers(0, 200, int(rng.integers(1, 60)))]
        if any(h):
            rates.append(Fraction(sum(adaptive_bits(h, TURBOQUANT_BITS)), len(h)))
    yield exact(
        what="largest gain of the adaptive rule over 3 bits a number", ran_on=f"{len(rates)} random surprisal sequences", observed=TURBOQUANT_BITS / min(rates),
        predicted=TURBOQUANT_BITS, relation="<=", tightness=float(1 / min(rates)),
    )  # fmt: skip
    sizes = [(80, 64, 128), (80, 8, 128), (32, 8, 64), (1, 1, 1)]
    for layers, heads, head_dim in sizes:
        n = components(layers, heads, head_dim)
        where = f"L={layers}, H={heads}, d={head_dim}"
        yield exact(
            what="numbers a position",
            ran_on=where,
            observed=n,
            predicted=sum(layers * heads * head_dim for _ in "kv"),
            role="control",
        )
        yield exact(
            what="gain over 3 bits a number of a coder that gives every number one bit", ran_on=where, observed=Fraction(ratio(n, TURBOQUANT_BITS, floor(n))),
            predicted=TURBOQUANT_BITS, note="attained when every number gets one bit",
        )  # fmt: skip
        yield exact(
            what="gain of an entropy code of the tokens, at 4.3 bits each, over token ids of 17 bits", ran_on=where, predicted=17 / TOKEN_BITS,
            observed=Fraction(ratio(n, TURBOQUANT_BITS, TOKEN_BITS)) / Fraction(ratio(n, TURBOQUANT_BITS, 17)),
        )  # fmt: skip
    n = components(*sizes[0])
    yield certified(
        what="gain over 3 bits a number of storing token ids of 17 bits, without any model: 231,304", ran_on="L=80, H=64, d=128", observed=enclosure(ratio(n, TURBOQUANT_BITS, 17)),
        predicted=rounds_to(231_304),
    )  # fmt: skip
    if context.cache is not None and context.cache.surprisal_bits is not None:
        real = [float(x) for x in context.cache.surprisal_bits]
        if any(real):
            spent = adaptive_bits(real, TURBOQUANT_BITS)
            yield exact(
                what="gain of the adaptive rule over 3 bits a number, on real surprisals", observed=Fraction(TURBOQUANT_BITS * len(real), sum(spent)),
                predicted=TURBOQUANT_BITS, relation="<=", ran_on=f"{context.cache.meta.get('model', context.cache_name)}, {len(real)} positions",
                note=f"{spent.count(1)} positions at the floor; mean surprisal {sum(real) / len(real):.2f} bits",
            )  # fmt: skip
