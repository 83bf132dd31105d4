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

__all__ = ["adaptive_bits", "bit_floor", "cache_bytes", "kv_components_per_token", "sequential_ratio", "token_bits"]


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
