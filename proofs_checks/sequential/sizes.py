"""Claims of arXiv 2604.15356 about its starting figures: bits a position from a perplexity, and the size of a long context's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, certified, exact, numerical
from proofs_checks.sequential.ratio import (
    GQA_HEADS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    PAPER,
    POSITIONS,
    enclosure,
    log2,
)

Result = Iterator[Evidence]


def to_a_tenth(printed: float) -> tuple[float, float]:
    """The numbers that a figure printed with one decimal stands for."""
    return printed - 0.05, printed + 0.05


#: weights of the paper's model, 16 bits each
WEIGHTS = 70_000_000_000


@claim(
    id="sequential/perplexity-in-bits", paper=PAPER, section="abstract: perplexities 10 to 20 are 3.3 to 4.3 bits a position",
    statement="A model of perplexity 10 to 20 leaves 3.3 to 4.3 bits a token position: the perplexity is 2 to the mean surprisal.",
    formula="H = log2 PPL;  log2 10 = 3.32, log2 20 = 4.32",
    expected=Verdict.HOLDS,
    functions={"token_bits": "kvtheory.accounting.token_bits"},
    mutants=[
        *systematic.scales("token_bits"), *systematic.natural_log("token_bits"),
        Mutant("decimal digits", "token_bits", lambda true: math.log10),
        Mutant("bits of an index among so many", "token_bits", lambda true: lambda perplexity: float(math.ceil(true(perplexity)))),
    ],
)  # fmt: skip
def perplexity_in_bits(context: Context, *, token_bits: Function) -> Result:
    for perplexity, printed in ((10, 3.3), (20, 4.3)):
        bits = enclosure(token_bits(perplexity))
        yield certified(
            what=f"bits a position at perplexity {perplexity}, to the digit printed", ran_on="log2, in intervals", observed=bits, predicted=to_a_tenth(printed)
        )  # fmt: skip
        # two roundings of a logarithm that is right to half a unit in the last place, doubled
        yield numerical(
            what=f"the same against log2 {perplexity} in interval arithmetic", ran_on="log2, in intervals", observed=sum(bits) / 2,
            predicted=float(log2(perplexity)), tolerance=2**-51, because="one rounding of log2, one of the midpoint, doubled", role="control",
        )  # fmt: skip
    for probabilities in ((Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)), (Fraction(1, 16),) * 16):
        # entropies of dyadic laws are rational: 7/4 and 4 bits
        entropy = sum((p * (p.denominator.bit_length() - 1) for p in probabilities), Fraction(0))
        yield numerical(
            what="bits of a law from its perplexity, 2 to the entropy", ran_on=f"dyadic law on {len(probabilities)} tokens", observed=token_bits(2.0 ** float(entropy)),
            predicted=float(entropy), tolerance=2**-50, because="an exponential, a logarithm, half a unit in the last place each, times the condition 1/H < 1",
        )  # fmt: skip


FUNCTIONS = {
    "components": "kvtheory.accounting.kv_components_per_token",
    "size": "kvtheory.accounting.cache_bytes",
}
SLIPS = [
    *systematic.scales("size"),
    Mutant("keys without values", "components", lambda true: lambda layers, heads, head_dim: true(layers, heads, head_dim) // 2),
    Mutant("bits for bytes", "size", lambda true: lambda components, tokens, bits=16: 8 * true(components, tokens, bits)),
    Mutant("one layer's heads, of all layers", "components", lambda true: lambda layers, heads, head_dim: true(1, heads, head_dim)),
]  # fmt: skip


@claim(
    id="sequential/cache-of-80-gb", paper=PAPER, section="introduction: a 70B model at 128k tokens",
    statement="The cache of a 70B model over 128,000 tokens takes about 80 GB, with the 64 heads that the ratio counts; more than its weights may take.",
    formula="2 L H d · 2 bytes · 128,000 ≈ 80 GB",
    expected=Verdict.FAILS, functions=FUNCTIONS, mutants=SLIPS, correction="sequential/cache-in-bytes",
)  # fmt: skip
def cache_of_80_gb(context: Context, *, components: Function, size: Function) -> Result:
    """80 GB, to the digit printed, takes 16 KV heads. The ratio of the same paper counts 64, and models of this class have 8."""
    for heads, exactly in ((64, 335_544_320_000), (16, 83_886_080_000), (8, 41_943_040_000)):
        yield exact(
            what=f"bytes of a 16-bit cache of 128,000 positions with {heads} KV heads", ran_on=f"L={LAYERS}, d={HEAD_DIM}", role="control",
            observed=size(components(LAYERS, heads, HEAD_DIM), POSITIONS), predicted=exactly,
        )  # fmt: skip
    paper = size(components(LAYERS, HEADS, HEAD_DIM), POSITIONS)
    yield exact(
        what="printed GB, read as at most 90, against the 64 heads of the printed ratio", ran_on=f"L={LAYERS}, H={HEADS}, d={HEAD_DIM}",
        observed=Fraction(paper) / 10**9, predicted=90, relation="<=",
    )  # fmt: skip
    yield exact(
        what="GB of the cache with the 8 KV heads of such models against those of the weights (140)", ran_on=f"L={LAYERS}, H={GQA_HEADS}, d={HEAD_DIM}",
        observed=Fraction(size(components(LAYERS, GQA_HEADS, HEAD_DIM), POSITIONS)) / 10**9, predicted=Fraction(2 * WEIGHTS, 10**9), relation=">=",
    )  # fmt: skip


@claim(
    id="sequential/cache-in-bytes", paper=PAPER, section="introduction: a 70B model at 128k tokens, corrected",
    statement="A cache takes 2 L H d numbers a position: over 128,000 positions of 16 bits a number, 335.5 GB with 64 KV heads, 41.9 GB with the 8 that models of "
    "this class have, which pass 140 GB of weights behind 427,000 positions; 80 GB take 16 heads.",
    formula="bytes = 2 L H d · n · bits / 8",
    expected=Verdict.HOLDS, functions=FUNCTIONS, mutants=SLIPS,
)  # fmt: skip
def cache_in_bytes(context: Context, *, components: Function, size: Function) -> Result:
    for heads, printed in ((64, 335.5), (16, 83.9), (8, 41.9)):
        yield certified(
            what=f"GB of a 16-bit cache of 128,000 positions with {heads} KV heads: {printed}", ran_on=f"L={LAYERS}, d={HEAD_DIM}",
            observed=enclosure(Fraction(size(components(LAYERS, heads, HEAD_DIM), POSITIONS)) / 10**9), predicted=to_a_tenth(printed),
        )  # fmt: skip
    one = components(LAYERS, GQA_HEADS, HEAD_DIM)
    last = 427_246  # 140e9 bytes / 327,680 a position = 427,246.09
    yield exact(
        what=f"bytes of {last:,} positions against 140 GB of weights", ran_on=f"L={LAYERS}, H={GQA_HEADS}, d={HEAD_DIM}", observed=size(one, last),
        predicted=2 * WEIGHTS, relation="<=",
    )  # fmt: skip
    yield exact(
        what=f"bytes of {last + 1:,} positions against 140 GB of weights", ran_on=f"L={LAYERS}, H={GQA_HEADS}, d={HEAD_DIM}", observed=size(one, last + 1),
        predicted=2 * WEIGHTS, relation=">=",
    )  # fmt: skip
    rng = context.rng("sizes of caches")
    for layers, heads, head_dim, n in rng.integers(1, 40, (context.size(20, 200), 4)).tolist():
        # counted one by one, as an array of that shape would be
        numbers = sum(heads * n * head_dim for _ in range(layers) for _ in "kv")
        yield exact(
            what="bytes of a cache, against its numbers counted layer by layer", ran_on=f"L={layers}, H={heads}, d={head_dim}, n={n}",
            observed=size(components(layers, heads, head_dim), n), predicted=2 * numbers, role="control",
        )  # fmt: skip
