"""entropy.cu: symbols, escapes and low bits, the reference's bytes for the same coefficients, its integers for the same bytes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gpu.transform_coding import entropy as kernels
from reference import CorruptStream, rans
from reference.transform_coding import entropy
from reference.transform_coding.basis import Basis
from tests.kernels.strategies import KINDS, kernel_settings, numbers, often, orders, sizes
from tests.kernels.transforms import FREQUENCIES, entropy_coders, readers

WIDTHS = sizes(70)


def wanted_of(coder, parts, tokens, width):
    out = np.zeros((tokens, width))
    coder.decode(readers(parts), tokens, out)
    return out


def outcome(decode):
    try:
        return decode().tobytes()
    except CorruptStream as error:
        return error.problem, error.offset


def tokens_of(kind, tokens, width, scale, seed):
    """Tokens of a drawn kind; some leave what tables were made for, so that coefficients escape, up to where codes are cut off."""
    rng = np.random.default_rng(seed)
    x = numbers(kind, (tokens, width), np.float32, seed).astype(np.float64) * scale
    return x * 2.0 ** np.where(rng.random((tokens, 1)) < 0.2, rng.integers(0, 40, (tokens, 1)), 0)


@often
@given(
    entropy_coders(WIDTHS), st.one_of(st.just(0), sizes(99)), st.sampled_from(KINDS), orders(), st.integers(0, 1 << 30)
)
def test_the_references_bytes_and_numbers(backend, drawn, tokens, kind, order, seed):
    coder, width, scale = drawn
    x = tokens_of(kind, tokens, width, scale, seed)
    parts = coder.encode(x)
    coefficients = [unit.basis.analyse(x) / entropy.UNIT for unit in coder.units]
    classes = [unit.classes(y) for unit, y in zip(coder.units, coefficients)]
    with backend.running(order):
        found = kernels.coded(coder, [backend.put(y) for y in coefficients], [backend.put(k) for k in classes])
        if backend.name == "simulator":
            assert kernels.encode(coder, x) == found
        decoded = kernels.decode(coder, readers(parts), tokens, width, backend.xp)
    assert found == parts
    assert backend.get(decoded).tobytes() == wanted_of(coder, parts, tokens, width).tobytes()


@kernel_settings
@given(entropy_coders(WIDTHS), sizes(65), orders(), st.integers(0, 1 << 30), st.data())
def test_altered_parts_are_the_references_errors(backend, drawn, tokens, order, seed, data):
    """Bits turned, bytes cut or put in, other escapes: what the reference makes of it, numbers or error, and never a lane astray."""
    coder, width, scale = drawn
    rng = np.random.default_rng(seed)
    parts = [bytearray(part) for part in coder.encode(tokens_of("normal", tokens, width, scale, seed))]
    for _ in range(data.draw(st.integers(1, 3))):
        part = parts[data.draw(st.integers(0, 3))]
        way = data.draw(st.sampled_from(("bit", "bit", "cut", "longer", "random")))
        at = int(rng.integers(len(part))) if part else 0
        if way == "bit" and part:
            part[at] ^= 1 << rng.integers(8)
        elif way == "cut":
            del part[at:]
        elif way == "longer":
            part += bytes(rng.integers(0, 256, int(rng.integers(1, 9))).astype(np.uint8))
        elif way == "random" and part:
            part[at:] = rng.integers(0, 256, len(part) - at).astype(np.uint8).tobytes()
    wanted = outcome(lambda: wanted_of(coder, parts, tokens, width))
    with backend.running(order):
        found = outcome(lambda: backend.get(kernels.decode(coder, readers(parts), tokens, width, backend.xp)))
    assert found == wanted


@kernel_settings
@given(entropy_coders(WIDTHS), sizes(40), orders(), st.integers(0, 1 << 30))
def test_any_symbols(backend, drawn, tokens, order, seed):
    """Symbols, escapes and low bits at random, within what a decoder takes: escapes up to 2^27 need more than 32 bits, and get them."""
    coder, width, _ = drawn
    rng = np.random.default_rng(seed)
    units, size = len(coder.units), coder.coefficients
    classes = rng.integers(0, coder.classes, (tokens, units))
    tables, shifts = coder._contexts(classes)
    coded = tables != entropy.NOT_CODED
    symbols = np.where(coded, rng.integers(0, entropy.SYMBOLS, tables.shape), 0)
    symbols[coded & (rng.random(tables.shape) < 0.1)] = entropy.ESCAPE
    step = entropy.block_tokens(coder.block, size)
    escaped = (symbols == entropy.ESCAPE) & coded
    counts = np.add.reduceat(escaped.sum(axis=1), np.arange(0, tokens, step))
    most = int(rng.choice([1 << 10, (1 << 23) - 1, entropy.MOST_CODE]))
    values = rng.integers(-most, most + 1, int(counts.sum()))
    side = (
        rans.encode(classes.ravel(), coder._rans[0], np.arange(units), block=step * units, lanes=8)
        if coder.classes > 1
        else b""
    )
    used = np.where(coded, tables, entropy.TABLES)
    payload = rans.encode(symbols.ravel(), coder._with_certain, used.ravel(), block=step * size, lanes=8, own=True)
    low = np.packbits(
        rng.integers(0, 2, int(shifts[coded].sum(dtype=np.int64)), dtype=np.uint8), bitorder="little"
    ).tobytes()
    parts = [side, payload, counts.astype("<u4").tobytes() + values.astype("<i4").tobytes(), low]
    with backend.running(order):
        decoded = kernels.decode(coder, readers(parts), tokens, width, backend.xp)
    assert backend.get(decoded).tobytes() == wanted_of(coder, parts, tokens, width).tobytes()


def test_a_spare_bit_behind_the_low_bits_is_refused(backend):
    basis = Basis.of(np.arange(3), np.eye(3) / entropy.UNIT, np.zeros(3))
    unit = entropy.Unit(basis, np.ones(3), np.zeros(0), np.full((1, 3), 12, np.uint8), np.full((1, 3), 2, np.uint8))
    deltas = np.zeros((entropy.TABLES, entropy.SYMBOLS), np.int8)
    coder = entropy.EntropyCoder((unit,), np.array([[rans.TOTAL]]), FREQUENCIES[0], deltas, 3)
    *parts, low = coder.encode(np.random.default_rng(0).standard_normal((1, 3)))
    assert len(low) == 1 and low[0] < 64
    for spare in (64, 128):
        wrong = [*parts, bytes([low[0] | spare])]
        wanted = outcome(lambda wrong=wrong: wanted_of(coder, wrong, 1, 3))
        with backend.running(0):
            found = outcome(lambda wrong=wrong: backend.get(kernels.decode(coder, readers(wrong), 1, 3, backend.xp)))
        assert found == wanted and "the 2 bits behind the last code are not 0" in wanted[0]


def test_escapes_that_do_not_fit_are_refused(backend):
    """One counted in a block that has none of it, one beyond what an encoder writes, and one too few: each the reference's error."""
    basis = Basis.of(np.arange(5), np.eye(5) / entropy.UNIT, np.zeros(5))
    tables, none = np.full((1, 5), 12, np.uint8), np.zeros((1, 5), np.uint8)
    unit = entropy.Unit(basis, np.ones(5), np.zeros(0), tables, none)
    deltas = np.zeros((entropy.TABLES, entropy.SYMBOLS), np.int8)
    coder = entropy.EntropyCoder((unit,), np.array([[rans.TOTAL]]), FREQUENCIES[0], deltas, 3)
    x = np.random.default_rng(0).standard_normal((10, 5))
    x[::2, 1] = 1e5
    side, codes, escapes, low = coder.encode(x)
    counts, values = np.frombuffer(escapes[:16], "<u4").copy(), np.frombuffer(escapes[16:], "<i4").copy()
    assert counts.tolist() == [2, 1, 2, 0] and low == b""
    moved, beyond = counts.astype(np.int64) + [-1, 1, 0, 0], values.copy()
    beyond[3] = entropy.MOST_CODE + 1
    for own_counts, own_values, message in (
        (moved, values, "the symbols hold other numbers of them"),
        (counts, beyond, "expected at most 134217728, got 134217729"),
        (counts, values[1:], "expected 5 of 4 bytes, got 16 bytes"),
    ):
        parts = [side, codes, own_counts.astype("<u4").tobytes() + own_values.tobytes(), low]
        wanted = outcome(lambda parts=parts: wanted_of(coder, parts, 10, 5))
        with backend.running(1):
            found = outcome(lambda parts=parts: backend.get(kernels.decode(coder, readers(parts), 10, 5, backend.xp)))
        assert found == wanted and message in wanted[0]
