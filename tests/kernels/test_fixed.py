"""fixed.cu: so many bits for each coefficient, the reference's bytes for the same coefficients, its integers for the same bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.transform_coding import fixed as kernels
from reference import CorruptStream
from reference.transform_coding import fixed
from reference.transform_coding.basis import Basis
from reference.vectors import norms
from tests.kernels.strategies import KINDS, kernel_settings, numbers, orders, sizes
from tests.kernels.transforms import fixed_coders, readers

WIDTHS = sizes(150)


def coefficients_of(coder, x):
    return [unit.basis.analyse(x) for unit in coder.units]


def wanted_of(coder, parts, tokens, width):
    out = np.zeros((tokens, width))
    coder.decode(readers(parts), tokens, out)
    return out


def outcome(decode):
    try:
        return decode().tobytes()
    except CorruptStream as error:
        return error.problem, error.offset


@kernel_settings
@given(
    fixed_coders(WIDTHS), st.one_of(st.just(0), sizes(99)), st.sampled_from(KINDS), orders(), st.integers(0, 1 << 30)
)
def test_the_references_bytes_and_numbers(backend, drawn, tokens, kind, order, seed):
    coder, width = drawn
    x = numbers(kind, (tokens, width), np.float32, seed).astype(np.float64) * 2.0 ** np.random.default_rng(
        seed
    ).integers(-3, 4)
    parts = coder.encode(x)
    with backend.running(order):
        found = kernels.quantised(coder, [backend.put(y) for y in coefficients_of(coder, x)])
        if backend.name == "simulator":
            assert kernels.encode(coder, x) == found
        decoded = kernels.decode(coder, readers(parts), tokens, width, backend.xp)
    assert found == parts
    assert backend.get(decoded).tobytes() == wanted_of(coder, parts, tokens, width).tobytes()


@kernel_settings
@given(fixed_coders(WIDTHS), sizes(65), orders(), st.integers(0, 1 << 30), st.data())
def test_any_bytes(backend, drawn, tokens, order, seed, data):
    """Codes and scales that no encoder chose, cut or too long: the reference's numbers, or its error where it has one."""
    coder, width = drawn
    rng = np.random.default_rng(seed)
    parts = [
        bytearray(rng.integers(0, 256, len(part)).astype(np.uint8).tobytes())
        for part in coder.encode(np.zeros((tokens, width)))
    ]
    if coder.gain in ("max", "range") and data.draw(st.booleans()):
        scales = tokens * len(coder.units)
        parts[0][: 2 * scales] = rng.integers(1 << 7, 390 << 7, scales).astype("<u2").tobytes()
        if coder.gain == "range":
            most = np.resize([(1 << int(unit.bits.max(initial=0))) - 1 for unit in coder.units], scales)
            parts[0][2 * scales :] = rng.integers(0, most + 1).astype(np.uint8).tobytes()
    if tokens * coder.token_bits % 8 and data.draw(st.booleans()):
        parts[1][-1] &= (1 << tokens * coder.token_bits % 8) - 1
    if data.draw(st.integers(0, 9)) == 9:
        parts[data.draw(st.integers(0, 1))] += b"\0"
    wanted = outcome(lambda: wanted_of(coder, parts, tokens, width))
    with backend.running(order):
        found = outcome(lambda: backend.get(kernels.decode(coder, readers(parts), tokens, width, backend.xp)))
    assert found == wanted


@kernel_settings
@given(st.sampled_from(("max", "range", "none")), st.integers(1, 16), st.integers(0, 1 << 30), orders())
def test_coefficients_on_thresholds(backend, gain, bits, seed, order):
    """On a bound the upper level, next to it the nearer one; scales at powers of two, between stored ones, at both ends of their range."""
    rng = np.random.default_rng(seed)
    levels = "offset" if gain == "range" else rng.choice(["midrise", "midtread"])
    bits = min(bits, fixed.MOST_OFFSET_BITS) if gain == "range" else bits
    tokens, size = 23, int(rng.integers(1, 40))
    basis = Basis.of(np.arange(size), np.eye(size), np.zeros(size))
    coder = fixed.FixedCoder((fixed.FixedUnit(basis, np.full(size, bits, np.uint8)),), gain, levels=str(levels))
    points = fixed.uniform_points(levels, bits)
    bounds = (points[1:] + points[:-1]) / 2
    # most_c |y_c| is a stored norm, or next to one
    stored = norms(rng.integers(1, 390, tokens) * 128 + rng.integers(0, 128, tokens), 7)
    stored = np.where(rng.random(tokens) < 0.2, 2.0 ** rng.integers(-300, 300, tokens), stored)
    y = rng.choice(bounds if bounds.size else [0], (tokens, size)) * 1.0 + (
        rng.integers(-2, 3, (tokens, size)) if gain == "range" else 0
    )
    nudge = rng.integers(-1, 2, (tokens, size))
    scale = stored if gain != "none" else np.ones(tokens)
    y *= scale[:, None]
    y[:, 0] = rng.choice([-1, 1], tokens) * scale * (fixed.unit_of(levels) if gain != "range" else (1 << bits) - 1)
    y = np.where(nudge > 0, np.nextafter(y, np.inf), np.where(nudge < 0, np.nextafter(y, -np.inf), y))
    wanted = quantised_by_the_reference(coder, [y])
    with backend.running(order):
        assert kernels.quantised(coder, [backend.put(y)]) == wanted


@kernel_settings
@given(st.integers(1, 6), sizes(130), orders(), st.integers(0, 1 << 30))
def test_of_equally_good_scales_the_first(backend, bits, size, order, seed):
    """Coefficients that several scales hit exactly, 0 above all, which "midtread" has a level for under every scale."""
    rng = np.random.default_rng(seed)
    tokens = 9
    basis = Basis.of(np.arange(size), np.diag(2.0 ** rng.integers(-2, 3, size)), np.zeros(size))
    coder = fixed.FixedCoder((fixed.FixedUnit(basis, np.full(size, bits, np.uint8)),), "log", levels="midtread")
    points = fixed.uniform_points("midtread", bits)
    y = rng.choice(points, (tokens, size)) * 2.0 ** rng.integers(1, 6, (tokens, 1)) * (rng.random((tokens, 1)) < 0.7)
    wanted = quantised_by_the_reference(coder, [y])
    with backend.running(order):
        assert kernels.quantised(coder, [backend.put(y)]) == wanted


def quantised_by_the_reference(coder, coefficients):
    """The reference's encoder from coefficients on: bases whose analysis is what is given."""

    class Given:
        def __init__(self, basis, y):
            self.basis, self.y, self.size, self.energies = basis, y, basis.size, basis.energies

        def analyse(self, x):
            return self.y

    units = tuple(fixed.FixedUnit(Given(unit.basis, y), unit.bits) for unit, y in zip(coder.units, coefficients))
    return fixed.FixedCoder(units, coder.gain, coder.codebooks, coder.levels).encode(coefficients[0])


@pytest.mark.parametrize("gain", ("none", "log", "max"))
def test_wild_codebooks(backend, gain):
    """Numbers of up to 2^24 times 384 do not fit in 32 bits, and need not."""
    books = {2: np.array([-(1 << 24), -5, 7, 1 << 24], np.int32)}
    basis = Basis.of(np.arange(3), np.eye(3) * 2.0**-12, np.zeros(3))
    coder = fixed.FixedCoder((fixed.FixedUnit(basis, np.array([2, 0, 2], np.uint8)),), gain, books)
    x = np.random.default_rng(0).standard_normal((37, 3)) * 2.0 ** np.linspace(-20, 30, 37)[:, None]
    parts = coder.encode(x)
    with backend.running(3):
        decoded = kernels.decode(coder, readers(parts), 37, 3, backend.xp)
    wanted = wanted_of(coder, parts, 37, 3)
    assert gain != "log" or np.abs(wanted).max() > 2.0**31 * 2.0**-12
    assert backend.get(decoded).tobytes() == wanted.tobytes()
