"""The wrapped coders: constriction is refused what it would accept, and DEFLATE cannot blow up."""

import contextlib
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import CorruptStream, rans
from reference.entropy_coding import deflate, inflate, range_decode, range_encode
from reference.rans import Tables
from tests.reference.test_rans import messages, tables


@given(messages())
def test_range_coded_symbols_come_back(message):
    symbols, own, contexts, _, _ = message
    used = np.resize(contexts, max(symbols.size, 1))
    rng = np.random.default_rng(0)
    f = own.frequencies[used[: symbols.size]]
    symbols = np.array([rng.choice(np.flatnonzero(row)) for row in f], np.int64)
    coded = range_encode(symbols, own, contexts)
    assert np.array_equal(range_decode(coded, symbols.size, own, contexts), symbols)


def test_range_code_length_is_the_ideal_one():
    own = Tables(rans.frequencies([1000, 300, 20, 1]))
    symbols = np.random.default_rng(0).choice(4, 20000, p=own.frequencies[0] / rans.TOTAL)
    bits = 8 * len(range_encode(symbols, own))
    assert 0 <= bits - own.ideal_bits(symbols) < 0.001 * own.ideal_bits(symbols) + 32 + 64


@given(messages(), st.data())
def test_altered_words_are_found_out(message, data):
    symbols, own, contexts, _, _ = message
    try:
        coded = bytearray(range_encode(symbols, own, contexts))
    except ValueError:  # drawn for another period
        return
    coded[data.draw(st.integers(0, len(coded) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = range_decode(bytes(coded), symbols.size, own, contexts)
    except CorruptStream:
        return
    assert np.array_equal(found, symbols)  # the last word may hold spare bits


@given(st.binary(max_size=64), st.integers(0, 60), tables())
def test_any_bytes_are_symbols_or_corrupt(data, count, own):
    with contextlib.suppress(CorruptStream):
        range_decode(data, count, own)


def test_impossible_symbols_are_refused():
    own = Tables(rans.frequencies([1, 0, 1]))
    with pytest.raises(ValueError, match="frequency 0"):
        range_encode([1], own)
    with pytest.raises(ValueError, match="symbols"):
        range_encode([-1], own)


@given(st.binary(max_size=500))
def test_deflated_bytes_come_back(data):
    assert inflate(deflate(data), len(data)) == data


@given(st.binary(max_size=100), st.integers(0, 200))
def test_any_bytes_inflate_or_are_corrupt(data, size):
    with contextlib.suppress(CorruptStream):
        inflate(data, size)


def test_bombs_are_stopped_at_the_size_that_is_expected():
    bomb = zlib.compress(bytes(1 << 24), 9)
    tracemalloc.start()
    with pytest.raises(CorruptStream, match="expected exactly 100 bytes"):
        inflate(bomb, 100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18
    with pytest.raises(CorruptStream, match="cannot hold"):
        inflate(bomb, 1 << 40)
    with pytest.raises(CorruptStream):
        inflate(deflate(b"abc") + b"x", 3)
