"""kvtc.cu: groups of components, the reference's scales and codes for the same coefficients, its integers for the same bytes."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import kvtc as kernels
from reference import CorruptStream, kvtc
from reference.transform_coding.basis import Basis
from reference.vectors import norms
from tests.kernels.strategies import KINDS, kernel_settings, numbers, often, orders, sizes
from tests.kernels.transforms import readers


@st.composite
def sides(draw):
    """A side of groups of 1 to 256 components and 1 to 8 bits."""
    sizes_ = draw(st.lists(st.sampled_from((1, 7, 16, 31, 64, 100)), min_size=1, max_size=4))
    bits = draw(st.lists(st.integers(1, 8), min_size=len(sizes_), max_size=len(sizes_)))
    columns = sum(sizes_)
    basis = Basis.of(np.arange(columns), np.eye(columns), np.zeros(columns))
    return kvtc.Side(basis, np.array(sizes_, np.int64), np.array(bits, np.int64))


def outcome(decode):
    try:
        return decode().tolist()
    except CorruptStream as error:
        return error.problem, error.offset


def by_the_reference(side, parts, tokens):
    return side.coefficients(*side.read_codes(readers(parts), tokens))


def by_kernels(backend, side, parts, tokens):
    return backend.get(kernels._decode(side, *kernels._read(side, readers(parts), tokens), tokens, backend.xp))


@often
@given(sides(), st.one_of(st.just(0), sizes(150)), st.sampled_from(KINDS), orders(), st.integers(0, 1 << 30))
def test_the_references_bytes_and_integers(backend, side, tokens, kind, order, seed):
    rng = np.random.default_rng(seed)
    y = numbers(kind, (tokens, side.basis.size), np.float32, seed).astype(np.float64) * 2.0 ** rng.integers(-3, 30)
    parts = side.encode(y)
    with backend.running(order):
        assert kernels._encode(side, backend.put(y)) == parts
        found = by_kernels(backend, side, parts, tokens)
    assert found.dtype == np.int32 and np.array_equal(found, by_the_reference(side, parts, tokens))


@kernel_settings
@given(st.integers(1, 8), st.integers(0, 1 << 30), orders())
def test_coefficients_on_thresholds(backend, bits, seed, order):
    """On a bound the upper cell; scales at powers of two, between stored ones, at both ends of their range."""
    rng = np.random.default_rng(seed)
    size, tokens = int(rng.integers(2, 40)), 23
    side = kvtc.Side(Basis.of(np.arange(size), np.eye(size), np.zeros(size)), np.array([size]), np.array([bits]))
    scale = norms(rng.integers(1, 390, tokens) * 128 + rng.integers(0, 128, tokens), 7)
    scale = np.where(rng.random(tokens) < 0.3, 2.0 ** rng.integers(-300, 300, tokens), scale)[:, None]
    y = (rng.integers(0, (1 << bits) + 1, (tokens, size)) / (1 << (bits - 1)) - 1) * scale
    y[:, :1] = scale * rng.choice([-1, 1], (tokens, 1))
    nudge = rng.integers(-1, 2, y.shape)
    y = np.where(nudge > 0, np.nextafter(y, np.inf), np.where(nudge < 0, np.nextafter(y, -np.inf), y))
    with backend.running(order):
        assert kernels._encode(side, backend.put(y)) == side.encode(y)


def test_scales_at_both_ends(backend):
    """Below 2^-250 a scale is 0, above 2^133 it is that; powers of two and their neighbours stand for themselves or the next one."""
    powers = np.ldexp(
        1.0, np.array([-1074, -1022, -300, -251, -250, -249, -126, -1, 0, 1, 127, 132, 133, 134, 300, 399])
    )
    y = np.concatenate([powers, np.nextafter(powers, 0), np.nextafter(powers, np.inf), [0.0]])[:, None] * [[1.0, -0.5]]
    side = kvtc.Side(Basis.of(np.arange(2), np.eye(2), np.zeros(2)), np.array([2]), np.array([4]))
    with backend.running(1):
        assert kernels._encode(side, backend.put(y)) == side.encode(y)


@kernel_settings
@given(sides(), sizes(150), orders(), st.integers(0, 1 << 30), st.data())
def test_any_bytes(backend, side, tokens, order, seed, data):
    """Scales and codes that no encoder chose, of any size: the reference's integers, cut off at 2^31 - 1 as there, or its error."""
    rng = np.random.default_rng(seed)
    groups, sizes_ = len(side.sizes), (tokens * side.widths + 7) // 8
    scales = rng.integers(1 << 7, 390 << 7, (tokens, groups)) * (rng.random((tokens, groups)) < 0.9)
    if data.draw(st.booleans()):
        scales = rng.integers(250 << 7, 290 << 7, (tokens, groups))
    codes = rng.integers(0, 256, int(sizes_.sum())).astype(np.uint8)
    if data.draw(st.integers(0, 3)):
        last, spare = np.cumsum(sizes_) - 1, -tokens * side.widths % 8
        codes[last] &= (255 >> spare).astype(np.uint8)
    raw = [scales.astype("<u2").tobytes(), codes.tobytes()]
    if data.draw(st.integers(0, 9)) == 9:
        at = data.draw(st.integers(0, 1))
        raw[at] = data.draw(st.sampled_from((raw[at][:-1], raw[at] + b"\0", b"\1\0" + raw[at][2:])))
    parts = [zlib.compress(part) for part in raw]
    wanted = outcome(lambda: by_the_reference(side, parts, tokens))
    with backend.running(order):
        found = outcome(lambda: by_kernels(backend, side, parts, tokens))
    assert found == wanted


@pytest.mark.parametrize("tokens", (1, 7, 8, 9, 63, 64, 65))
def test_bytes_at_the_ends_of_components(backend, tokens):
    """Components of fewer bytes than a thread could write, next to each other."""
    side = kvtc.Side(Basis.of(np.arange(33), np.eye(33), np.zeros(33)), np.array([16, 16, 1]), np.array([1, 3, 8]))
    y = np.random.default_rng(tokens).standard_normal((tokens, 33))
    parts = side.encode(y)
    with backend.running(tokens):
        assert kernels._encode(side, backend.put(y)) == parts
        assert np.array_equal(by_kernels(backend, side, parts, tokens), by_the_reference(side, parts, tokens))
