"""kvtheory.accounting: plain arithmetic, exact where its inputs are."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtheory import accounting


def test_the_printed_numbers():
    components = accounting.kv_components_per_token(80, 64, 128)
    assert components == 1_310_720 == accounting.bit_floor(components)
    assert round(accounting.sequential_ratio(components, 3, Fraction("4.3"))) == 914_456
    assert accounting.sequential_ratio(components, 16, 4.3) == pytest.approx(4.88e6, rel=1e-3)
    assert accounting.sequential_ratio(components, 3, 17) == Fraction(3_932_160, 17)
    assert accounting.cache_bytes(components, 128_000) == 335_544_320_000
    assert accounting.cache_bytes(3, 1, 3) == 2  # 9 bits
    assert accounting.token_bits(16) == 4


@given(st.lists(st.integers(0, 50), min_size=1).filter(any), st.integers(1, 8))
def test_adaptive_bits(surprisals, base):
    """Against exact rationals; the floor(s) lose at most one bit each, the floor at 1 never goes below 1."""
    mean = Fraction(sum(surprisals), len(surprisals))
    bits = accounting.adaptive_bits([Fraction(h) for h in surprisals], base)
    assert bits == [max(1, base * h // mean) for h in surprisals] and min(bits) >= 1
    assert len(bits) <= sum(bits) <= (base + 1) * len(bits)


@given(st.floats(1e-300, 1e300), st.integers(1, 60), st.integers(1, 8))
@example(4.3, 7, 3)  # 3 * 7 * 4.3 / 30.1 is 2.9999999999999996 in float64
@example(0.1, 3, 3)
def test_constant_surprisal_gets_base_bits_everywhere(surprisal, positions, base):
    assert accounting.adaptive_bits([surprisal] * positions, base) == [base] * positions


@given(st.lists(st.floats(0, 50), min_size=1, max_size=20).filter(any), st.integers(1, 8))
def test_adaptive_bits_of_floats_are_those_of_the_rationals_that_they_are(surprisals, base):
    assert accounting.adaptive_bits(surprisals, base) == accounting.adaptive_bits(
        [Fraction(h) for h in surprisals], base
    )


def test_adaptive_bits_of_numpy_numbers():
    assert accounting.adaptive_bits(np.array([0.1, 0.1, 0.1], np.float32), 3) == [3, 3, 3]
    assert accounting.adaptive_bits(np.array([3, 1]), 3) == [4, 1]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: accounting.kv_components_per_token(0, 1, 1), "layers"),
        (lambda: accounting.kv_components_per_token(1, 1.0, 1), "heads"),
        (lambda: accounting.kv_components_per_token(1, 1, True), "head_dim"),
        (lambda: accounting.sequential_ratio(0, 3, 4.3), "components"),
        (lambda: accounting.bit_floor(8, 0), "bits_per_component"),
        (lambda: accounting.cache_bytes(8, -1), "tokens"),
        (lambda: accounting.token_bits(0.5), "perplexity"),
        (lambda: accounting.token_bits(float("nan")), "perplexity"),
        (lambda: accounting.adaptive_bits([], 3), "surprisal_bits"),
        (lambda: accounting.adaptive_bits([0, 0], 3), "surprisal_bits"),
        (lambda: accounting.adaptive_bits([1, float("inf")], 3), "surprisal_bits"),
        (lambda: accounting.adaptive_bits([1, -1], 3), "surprisal_bits"),
        (lambda: accounting.adaptive_bits([1], 0), "base_bits"),
    ],
)
def test_refusals(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@given(st.fractions(0, 16), st.fractions(0, 2), st.integers(1, 10**6), st.integers(0, 200))
def test_effective_bits(index, side, tokens, exact):
    """Bits counted token by token; the authors' form counts the exact ones twice, and is larger by their share of the codes."""
    held = accounting.effective_bits(index, tokens, exact, side)
    full = min(exact, tokens)
    assert held * tokens == (tokens - full) * (index + side) + 16 * full
    twice = accounting.effective_bits(index, tokens, exact, side, exact_coded=True)
    assert twice - held == Fraction(full, tokens) * (index + side)


def test_effective_bits_of_floats_and_of_all_tokens_exact():
    assert accounting.effective_bits(2.5, 8192, 132, 1 / 32) == pytest.approx(180111 / 65536, rel=1e-15)
    assert accounting.effective_bits(2, 100, 132) == 16
    assert accounting.effective_bits(2, 100) == 2


@pytest.mark.parametrize("exact", [-1, True, 1.0])
def test_effective_bits_refuses(exact):
    with pytest.raises(ValueError, match="exact_tokens: expected an integer >= 0"):
        accounting.effective_bits(2, 100, exact)
    with pytest.raises(ValueError, match="tokens: expected an integer >= 1"):
        accounting.effective_bits(2, 0)
