"""The printed ratio: what 5.82 divides by what, and what it is at other context lengths."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact
from proofs_checks.transform_coding.instances import PAPER

#: Llama-3.1-8B: layers, KV heads, head dimension; positions of the printed figure; tokens in full; groups that have a scale
LAYERS, HEADS, DIM, TOKENS, WINDOW, GROUPS = 32, 8, 128, 8192, 4 + 128, 2
SIDE = Fraction(16 * GROUPS, HEADS * DIM)
#: bits of a code on average
NOMINAL = Fraction(5, 2)
WHERE = f"Llama-3.1-8B: {LAYERS} layers, {HEADS} KV heads of {DIM}, {TOKENS:,} positions, 16 bits; {WINDOW} tokens in full, {GROUPS} scales of 16 bits a token"


def rounded(x: Fraction, digits: int = 2) -> Fraction:
    """To so many decimals, exactly."""
    return Fraction(round(x * 10**digits), 10**digits)


FUNCTIONS = {
    "effective_bits": "kvtheory.accounting.effective_bits", "cache_bytes": "kvtheory.accounting.cache_bytes",
    "components": "kvtheory.accounting.kv_components_per_token",
}  # fmt: skip
MUTANTS = [
    *systematic.scales("effective_bits"),
    *systematic.scales("cache_bytes"),
    Mutant("the window left out", "effective_bits", lambda true: lambda index, tokens, exact=0, side=0, full=16, *, exact_coded=False: index + side),
    Mutant("scales left out", "effective_bits", lambda true: lambda index, tokens, exact=0, side=0, full=16, *, exact_coded=False: true(index, tokens, exact, 0, full, exact_coded=exact_coded)),
    Mutant("the last 128 tokens alone", "effective_bits", lambda true: lambda index, tokens, exact=0, side=0, full=16, *, exact_coded=False: true(index, tokens, exact - 4, side, full, exact_coded=exact_coded)),
    Mutant("exact tokens coded as well, or not: the other way round", "effective_bits", lambda true: lambda index, tokens, exact=0, side=0, full=16, *, exact_coded=False: true(index, tokens, exact, side, full, exact_coded=not exact_coded)),
    Mutant("keys without values", "components", lambda true: lambda layers, heads, dim: true(layers, heads, dim) // 2),
    Mutant("query heads for KV heads", "components", lambda true: lambda layers, heads, dim: true(layers, 4 * heads, dim)),
]  # fmt: skip


@claim(
    id="transform-coding/ratio-5.82",
    paper=PAPER,
    section="Table II: 5.82 times less, 1.07 GB to 184 MB",
    statement="At 8,192 positions of Llama-3.1-8B, 2.5 bits a code, scales and the tokens in full make 5.82 times less than 16 bits:"
    " 1.07 GB become 184 MB.",
    formula="16 / ((1 − e/n)(b + 16 G/(H d)) + 16 e/n) = 5.82,  e = 4 + 128,  b = 2.5",
    assumptions=("2.5 bits a code and tokens in full counted once: inferred from the printed figures, not printed",),
    expected=Verdict.HOLDS_UNDER,
    functions=FUNCTIONS,
    mutants=MUTANTS,
)
def ratio_582(
    context: Context, *, effective_bits: Function, cache_bytes: Function, components: Function
) -> Iterator[Evidence]:
    whole = cache_bytes(components(LAYERS, HEADS, DIM), TOKENS)
    yield exact(
        what="bytes of the cache, 2·32·8·128·2·8192",
        ran_on=WHERE,
        observed=whole,
        predicted=1_073_741_824,
        role="control",
    )
    yield exact(what="in GB, to two decimals: 1.07", ran_on=WHERE, observed=rounded(Fraction(whole, 10**9)), predicted=Fraction(107, 100))  # fmt: skip
    yield exact(what="scales, bits a number: 1/32", ran_on=WHERE, observed=SIDE, predicted=Fraction(1, 32), role="control")  # fmt: skip
    held = Fraction(effective_bits(NOMINAL, TOKENS, WINDOW, SIDE))
    yield exact(
        what="bits a number at 2.5 a code, tokens in full held once: ((8192 − 132)(5/2 + 1/32) + 132·16)/8192", ran_on=WHERE, observed=held,
        predicted=Fraction((8192 - 132) * 81, 32 * 8192) + Fraction(132 * 16, 8192), role="control",
    )  # fmt: skip
    ratio = 16 / held
    yield exact(
        what="ratio to two decimals: 5.82", ran_on=WHERE, observed=rounded(ratio), predicted=Fraction(582, 100), note=f"{float(ratio):.4f} with {float(held):.4f} bits a number"
    )  # fmt: skip
    yield exact(
        what="MB, rounded: 184", ran_on=WHERE, observed=rounded(whole / ratio / 10**6, 0), predicted=Fraction(184), note=f"{float(whole / ratio / 10**6):.2f} MB; printed 5.82 alone"
        f" would give {whole / 5.82 / 10**6:.2f}",
    )  # fmt: skip
    twice = Fraction(effective_bits(NOMINAL, TOKENS, WINDOW, SIDE, exact_coded=True))
    yield exact(
        role="control", what="bits a number with the tokens in full coded as well, the authors' model: 5/2 + 1/32 + 132·16/8192", ran_on=WHERE, observed=twice,
        predicted=Fraction(5, 2) + Fraction(1, 32) + Fraction(33, 128), note=f"{float(16 / twice):.2f} times less; for 5.82 that model needs {16 / 5.82 - float(twice - NOMINAL):.3f} bits"
        " a code, which is no round number",
    )  # fmt: skip


@claim(
    id="transform-coding/ratio-any-context",
    paper=PAPER,
    section="abstract and Table II, the ratio without its context length",
    statement="The method compresses 5.8 times, whatever the context length.",
    formula="16 / bits a number = 5.8 for every n",
    expected=Verdict.FAILS,
    functions=FUNCTIONS,
    mutants=[
        *MUTANTS,
        Mutant("the share of 8,192 positions at every length", "effective_bits", lambda true: lambda index, tokens, exact=0, side=0, full=16, *, exact_coded=False: true(index, 8192, exact, side, full, exact_coded=exact_coded)),
    ],
    correction="transform-coding/ratio-5.82",
)  # fmt: skip
def ratio_any_context(
    context: Context, *, effective_bits: Function, cache_bytes: Function, components: Function
) -> Iterator[Evidence]:
    yield exact(
        role="control", what="bytes of the cache at 8,192 positions", ran_on=WHERE, observed=cache_bytes(components(LAYERS, HEADS, DIM), TOKENS), predicted=1_073_741_824
    )  # fmt: skip
    pinned = {132: "1.00", 1024: "3.75", 8192: "5.82", 32768: "6.19", 131072: "6.29"}
    for tokens, text in pinned.items():
        ratio = 16 / Fraction(effective_bits(NOMINAL, tokens, WINDOW, SIDE))
        yield exact(
            role="control", what=f"ratio at {tokens:,} positions to two decimals: {text}", ran_on=WHERE.replace(f"{TOKENS:,}", f"{tokens:,}"), observed=rounded(ratio),
            predicted=Fraction(text),
        )  # fmt: skip
    twice = 16 / Fraction(effective_bits(Fraction(246, 100), 1024, WINDOW, SIDE, exact_coded=True))
    yield exact(
        role="control", what="ratio at 1,024 positions, 2.46 bits a code, tokens in full coded as well: 3.51", ran_on=WHERE.replace(f"{TOKENS:,}", "1,024"), observed=rounded(twice),
        predicted=Fraction(351, 100),
    )  # fmt: skip
    for tokens in (1024, 32768):
        ratio = 16 / Fraction(effective_bits(NOMINAL, tokens, WINDOW, SIDE))
        yield exact(
            what="ratio to one decimal: 5.8", ran_on=WHERE.replace(f"{TOKENS:,}", f"{tokens:,}"), observed=rounded(ratio, 1), predicted=Fraction(58, 10),
            note="the tokens in full weigh less in a longer context; the limit is 16/(5/2 + 1/32) = 6.32",
        )  # fmt: skip
