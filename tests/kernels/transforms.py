"""What the tests of the transform coders' kernels draw: bases and coders that no fit would make, so that each path of a kernel is gone."""

import contextlib
import unittest.mock

import numpy as np
from hypothesis import strategies as st

from reference import rans
from reference.stream import Reader
from reference.transform_coding import entropy, fixed, stacked
from reference.transform_coding.basis import Basis

__all__ = ["FREQUENCIES", "InOrder", "entropy_coders", "fixed_coders", "readers", "split", "sums_in_order"]


class InOrder(np.ndarray):
    """An array of which `@` sums from the first term to the last, as kernels do; BLAS has an order of its own."""

    def __matmul__(self, other):
        z, a = np.asarray(self), np.asarray(other)
        y = np.zeros((len(z), *a.shape[1:]))
        for k in range(z.shape[1]):
            y = y + z[:, k].reshape(-1, *[1] * (a.ndim - 1)) * a[k]
        return y.view(InOrder)


@contextlib.contextmanager
def sums_in_order():
    """The reference's transform coders encode inside the `with` with coefficients that are summed in order, and are else themselves."""
    stack = stacked.stack
    with unittest.mock.patch.object(stacked, "stack", lambda *args: stack(*args).view(InOrder)):
        yield


def readers(parts):
    """A decoder's view of parts, one behind the other in a stream."""
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    return [Reader(bytes(part), start) for part, start in zip(parts, starts)]


def split(rng, width, units):
    """The entries of a stacked vector among so many units, ascending within each; a unit may have none but the first."""
    owner = rng.integers(0, units, width)
    owner[0] = 0
    return [np.flatnonzero(owner == u) for u in range(units) if (owner == u).any()]


def _basis(rng, places, unit, scale):
    """A square or a tall basis of spectrum over some octaves, one column next to nothing at times."""
    rows = len(places)
    columns = rows if rng.random() < 0.6 else int(rng.integers(0, rows + 1))
    u = np.linalg.qr(rng.standard_normal((rows, rows)))[0][:, :columns]
    spread = scale * 2.0 ** rng.uniform(-4, 2, columns)
    return Basis.of(places, u * (spread / unit), rng.standard_normal(rows) * scale * (rng.random() < 0.7))


@st.composite
def fixed_coders(draw, widths):
    """A FixedCoder for stacked vectors of drawn width, with any scales, levels and bits that go together."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    width = draw(widths)
    gain = draw(st.sampled_from(fixed.GAINS))
    levels = "offset" if gain == "range" else draw(st.sampled_from(("listed", "midrise", "midtread")))
    scale = 2.0 ** draw(st.sampled_from((-30, -3, 0, 3, 30)))
    most = draw(st.sampled_from((1, 2, 3, 5, 8) if gain in ("log", "range") else (1, 2, 3, 8, 16)))
    units, books = [], {}
    for places in split(rng, width, draw(st.integers(1, 3))):
        basis = _basis(rng, places, fixed.unit_of(levels, gain), scale)
        bits = rng.integers(0, most + 1, basis.size)
        if levels == "offset":
            bits = np.where(rng.random(basis.size) < 0.8, most, 0)
        if draw(st.integers(0, 9)) == 9:
            bits[:] = 0
        units.append(fixed.FixedUnit(basis, bits.astype(np.uint8)))
    if levels == "listed":
        wild = draw(st.integers(0, 9)) == 9
        for b in sorted({int(b) for unit in units for b in unit.bits if b}):
            points = rng.standard_normal(1 << b) * (1 << 23 if wild else 3 << 12)
            books[b] = np.sort(np.clip(np.rint(points), -(1 << 24), 1 << 24)).astype(np.int32)
    return fixed.FixedCoder(tuple(units), gain, books, levels), width


def _frequencies(rng, rows, symbols):
    """Tables in which every symbol may occur."""
    counts = np.exp(-np.arange(symbols) / 2.0 ** rng.uniform(0, 5, (rows, 1))) * 1e6 + 1
    return np.stack([rans.frequencies(row) for row in np.rint(counts).astype(np.int64)])


#: 29 tables of 258 symbols are slow to make: the coders that are drawn take one of these sets
FREQUENCIES = [_frequencies(np.random.default_rng(seed), entropy.TABLES, entropy.SYMBOLS) for seed in range(2)]


@st.composite
def entropy_coders(draw, widths):
    """An EntropyCoder for stacked vectors of drawn width: coded, shifted, escaping and uncoded coefficients side by side."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    width, classes, scale = (
        draw(widths),
        draw(st.sampled_from((1, 2, 5, 16))),
        2.0 ** draw(st.sampled_from((-20, 0, 20))),
    )
    shifted = draw(st.sampled_from((0.0, 0.2, 1.0)))
    units = []
    for places in split(rng, width, draw(st.integers(1, 3))):
        basis = _basis(rng, places, entropy.UNIT, scale * 2.0 ** rng.uniform(-4, 0))
        if not units and basis.size == 0:  # a coder has a coefficient
            basis = Basis.of(places, np.eye(len(places)) * scale / entropy.UNIT, np.zeros(len(places)))
        shape = (classes, basis.size)
        tables = rng.integers(0, entropy.TABLES, shape)
        tables[rng.random(shape) < 0.2] = entropy.NOT_CODED
        shifts = np.where(rng.random(shape) < shifted, rng.integers(0, entropy.MOST_SHIFT + 1, shape), 0)
        thresholds = np.sort(rng.exponential(1.0, classes - 1))
        units.append(
            entropy.Unit(
                basis, rng.exponential(1.0, basis.size), thresholds, tables.astype(np.uint8), shifts.astype(np.uint8)
            )
        )
    class_tables = _frequencies(rng, len(units), classes)
    deltas = rng.integers(-127, 128, (entropy.TABLES, entropy.SYMBOLS)).astype(np.int8)
    block = draw(st.sampled_from((1, 3, 16, 128)))
    return (
        entropy.EntropyCoder(tuple(units), class_tables, draw(st.sampled_from(FREQUENCIES)), deltas, block),
        width,
        scale,
    )
