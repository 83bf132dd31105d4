"""kvtheory.accounting: plain arithmetic, exact where its inputs are."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
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
