"""The arithmetic behind a printed compression ratio: numbers per token, bits per token, floors.

Every function is plain arithmetic and takes ints, floats, Fractions or intervals for the quantities that are not counts;
it gives back what their arithmetic gives, so that Fractions stay exact.  Source: arXiv 2604.15356, abstract and
adaptive bit rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational
from typing import Any

__all__ = [
    "adaptive_bits",
    "bit_floor",
    "cache_bytes",
    "effective_bits",
    "kv_components_per_token",
    "sequential_ratio",
    "token_bits",
]


def _count(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
    return value


def kv_components_per_token(layers: int, heads: int, head_dim: int) -> int:
    """2 L H d: the numbers that keys and values of one position have over all layers and KV heads."""
    return 2 * _count("layers", layers) * _count("heads", heads) * _count("head_dim", head_dim)


def sequential_ratio(components: int, bits_per_component: Any, bits_per_token: Any) -> Any:
    """components * bits_per_component / bits_per_token: a code of every number against a code of the position.

    The paper's 914,000 is sequential_ratio(2*80*64*128, 3, 4.3): 3 bits per number against the entropy of a token.
    Two ints give an exact Fraction.
    """
    whole = _count("components", components) * bits_per_component
    return (
        Fraction(whole, bits_per_token)
        if isinstance(whole, int) and isinstance(bits_per_token, int)
        else whole / bits_per_token
    )


def bit_floor(components: int, bits_per_component: int = 1) -> int:
    """Bits per token below which a code cannot go that gives each component at least `bits_per_component` bits.

    The paper's adaptive rule b_i = max(1, floor(b_0 h_i / hbar)) has the floor 1.
    """
    return _count("components", components) * _count("bits_per_component", bits_per_component)


def adaptive_bits(surprisal_bits: Sequence[Any], base_bits: int) -> list[int]:
    """b_i = max(1, floor(b_0 h_i / hbar)): bits PER COMPONENT at each position, hbar the mean surprisal (arXiv 2604.15356).

    surprisal_bits: h_i >= 0 in bits, one per position; a float counts as the rational that it is, so that the floor sees no
    rounding (equal h_i get b_0 each). Raises ValueError for an empty sequence, a negative or non-finite h_i, or hbar = 0.
    """
    surprisals = list(surprisal_bits)
    if not surprisals or not all(0 <= h < math.inf for h in surprisals) or not any(surprisals):
        raise ValueError("surprisal_bits: expected finite numbers >= 0, not all 0, at least one")
    exact = [
        Fraction(int(h.numerator), int(h.denominator)) if isinstance(h, Rational) else Fraction(float(h))
        for h in surprisals
    ]
    whole = _count("base_bits", base_bits) * len(exact)
    total = sum(exact)
    return [max(1, math.floor(whole * h / total)) for h in exact]


def token_bits(perplexity: float) -> float:
    """log2 of a perplexity, bits per token position. Raises ValueError below 1."""
    if not perplexity >= 1:
        raise ValueError(f"perplexity: expected a number >= 1, got {perplexity!r}")
    return math.log2(perplexity)


def cache_bytes(components: int, tokens: int, bits_per_component: int = 16) -> int:
    """Bytes of a cache of `tokens` positions, rounded up."""
    return -(
        -_count("components", components)
        * _count("tokens", tokens)
        * _count("bits_per_component", bits_per_component)
        // 8
    )


def effective_bits(
    index_bits: Any, tokens: int, exact_tokens: int = 0, side_bits: Any = 0, full_bits: Any = 16, *, exact_coded: bool = False
) -> Any:  # fmt: skip
    """Bits a number of a cache of `tokens` positions whose first and last ones, `exact_tokens` in all, are kept in full.

        ((n - e) (index + side) + e full) / n,   e = min(exact_tokens, n)                  exact_coded=False: each token held once
        index + side + e full / n                                                          exact_coded=True: exact ones are coded as well

    index_bits: codes alone, mean of all numbers. side_bits: scales and the like, a number: 16 bits for each of G groups of a token's
    H d numbers are 16 G / (H d). Fractions stay exact. The compression ratio is full_bits over this; it rises with the tokens.
    Source: the accounting of arXiv 2608.14191's authors' code, which is the second form (4 first and 128 last tokens).
    """
    n = _count("tokens", tokens)
    if isinstance(exact_tokens, bool) or not isinstance(exact_tokens, int) or exact_tokens < 0:
        raise ValueError(f"exact_tokens: expected an integer >= 0, got {exact_tokens!r}")
    share = Fraction(min(exact_tokens, n), n)
    coded = index_bits + side_bits
    if isinstance(coded, float) or isinstance(full_bits, float):
        share = float(share)  # type: ignore[assignment]
    return coded + share * full_bits if exact_coded else coded + share * (full_bits - coded)
