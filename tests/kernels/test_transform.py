"""transform.cu: stacked vectors, RoPE, rounding and the synthesis of a basis, to the last bit as the reference has them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu.transform_coding import basis as kernels
from gpu.transform_coding import stacked as stacks
from kvtheory.layer import Rope
from reference.transform_coding import stacked
from reference.transform_coding.basis import LARGEST, MOST_EXPONENT, Basis, project
from reference.vectors import norms as norms_of
from tests.kernels.strategies import ELEMENTS, KINDS, kernel_settings, layers, numbers, often, orders, sizes
from tests.kernels.transforms import InOrder

EVERY = (*ELEMENTS, np.dtype(np.float64))


def same_bits(found, wanted):
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and np.ascontiguousarray(found).tobytes() == np.ascontiguousarray(wanted).tobytes()
    )


@st.composite
def ropes(draw, dim):
    """A rope of keys with so many channels, or None."""
    if dim < 2 or draw(st.integers(0, 4)) == 0:
        return None
    pairs = draw(st.sampled_from(sorted({1, dim // 2, max(1, dim // 4), min(dim // 2, 33)})))
    frequencies = draw(st.sampled_from((1.0, 1e-6, 3e5))) * 10000.0 ** (-np.arange(pairs) / pairs)
    frequencies *= np.where(np.random.default_rng(draw(st.integers(0, 99))).random(pairs) < 0.2, -1, 1)
    return Rope(frequencies, draw(st.sampled_from(("half", "interleaved"))), draw(st.sampled_from((1.0, 0.8, 1.37))))


@st.composite
def placed(draw, heads, tokens):
    """Positions of all tokens, alike for all heads or not."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    most = draw(st.sampled_from((1, 40, 1 << 20, 1 << 50)))
    shape = (heads, tokens) if draw(st.booleans()) else (tokens,)
    return np.cumsum(rng.integers(0, most, shape), axis=-1)


@often
@given(layers(dtypes=EVERY), orders(), st.data())
def test_stack(backend, layer, order, data):
    keys, values = layer.keys, layer.values
    rope, positions = data.draw(ropes(layer.head_dim)), data.draw(placed(layer.kv_heads, layer.tokens))
    first = data.draw(st.integers(0, layer.tokens))
    last = data.draw(st.integers(first, layer.tokens))
    wanted = stacked.stack(keys, values, rope, positions)[first:last]
    with backend.running(order):
        found = stacks.stack(backend.put(keys), backend.put(values), rope, positions, first, last)
    assert same_bits(backend.get(found), wanted)


@kernel_settings
@given(
    st.integers(1, 3),
    sizes(99),
    sizes(99),
    sizes(129),
    st.sampled_from(EVERY),
    st.sampled_from(EVERY),
    st.sampled_from(KINDS),
    orders(),
    st.data(),
)
def test_unstack(backend, heads, count, dim, value_dim, key_type, value_type, kind, order, data):
    """The same numbers, rounded; what is beyond a type's largest number, below its least, or -0 among them. Other tokens are left alone."""
    scale = 2.0 ** data.draw(st.sampled_from((-1000, -140, -24, 0, 10, 130, 890)))
    x = numbers(kind, (count, heads * (dim + value_dim)), np.float32, data.draw(st.integers(0, 1 << 30))).astype(
        np.float64
    )
    x = np.clip(x * scale, -(2.0**900), 2.0**900)
    rope, before, behind = data.draw(ropes(dim)), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    tokens = before + count + behind
    positions = data.draw(placed(heads, tokens))
    wanted = stacked.unstack(
        x, heads, (dim, value_dim), (key_type, value_type), rope, positions[..., before : before + count]
    )
    out = [backend.put(np.full((heads, tokens, d), 7, t)) for d, t in ((dim, key_type), (value_dim, value_type))]
    with backend.running(order):
        stacks.unstack(backend.put(x), *out, rope, positions, before)
    for held, dtype, own in zip(out, (key_type, value_type), wanted):
        found = backend.get(held).view(dtype)
        assert same_bits(found[:, before : before + count], own)
        assert (found[:, :before] == 7).all() and (found[:, before + count :] == 7).all()


@st.composite
def bases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rows = draw(sizes(129))
    columns = draw(st.sampled_from(sorted({0, 1, min(rows, 31), min(rows, 33), rows})))
    small = draw(st.booleans())
    matrix = rng.integers(-LARGEST, LARGEST + 1, (rows, columns)) // (1 if small else 1 << 8)
    exponents = (
        rng.integers(-40, 40, rows)
        if draw(st.integers(0, 3))
        else rng.integers(-MOST_EXPONENT, MOST_EXPONENT + 1, rows)
    )
    places = np.sort(rng.choice(rows + draw(st.integers(0, 40)), rows, replace=False))
    mean = numbers(draw(st.sampled_from(KINDS)), (rows,), np.float32, draw(st.integers(0, 1 << 30)))
    return Basis(places.astype(np.int64), matrix.astype(np.int16), exponents.astype(np.int64), mean)


@kernel_settings
@given(bases(), sizes(129), st.sampled_from((8, 20, 31, 36)), st.integers(0, 2), orders(), st.integers(0, 1 << 30))
def test_product(backend, basis, count, bits, units, order, seed):
    """Sums of integers, exact whatever their size; numbers without a gain, and with one of those that a stream may have."""
    rng = np.random.default_rng(seed)
    most = (1 << bits) - 1
    before, behind = (int(n) for n in rng.integers(0, 4, 2))
    y = rng.integers(-most, most + 1, (count, before + basis.size + behind)) >> rng.integers(0, bits, (count, 1))
    y = y.astype(np.int32 if bits <= 31 else np.int64)
    stored = rng.integers(1 << 7, 390 << 7, (count, max(units, 1))) * (rng.random((count, max(units, 1))) < 0.9)
    unit = int(rng.integers(0, max(units, 1)))
    own = y[:, before : before + basis.size].astype(np.int64)
    x = np.full((count, int(basis.places[-1]) + 3), 5.0)
    wanted = x.copy()
    wanted[:, basis.places] = basis.synthesise(own, norms_of(stored[:, unit], 7) if units else None)
    held = backend.put(x)
    with backend.running(order):
        norms = backend.put(stored.astype(np.uint16)) if units else None
        kernels.synthesise(basis, backend.put(y), held, norms, unit, first=before)
    assert same_bits(backend.get(held), wanted)


@kernel_settings
@given(bases(), sizes(65), orders(), st.data())
def test_product_of_some_rows(backend, basis, count, order, data):
    """A layer's rows of a basis of all layers, into columns of the layer's own."""
    start = data.draw(st.integers(0, basis.rows))
    stop = data.draw(st.integers(start, basis.rows))
    y = (
        np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
        .integers(-1000, 1000, (count, basis.size))
        .astype(np.int32)
    )
    wanted = np.full((count, stop - start + 5), 5.0)
    held = backend.put(wanted.copy())
    part = Basis(
        basis.places[start:stop], basis.matrix[start:stop], basis.exponents[start:stop], basis.mean[start:stop]
    )
    wanted[:, 2 : 2 + stop - start] = part.synthesise(y.astype(np.int64))
    with backend.running(order):
        kernels.synthesise(basis, backend.put(y), held, rows=slice(start, stop), column=2)
    assert same_bits(backend.get(held), wanted)


@kernel_settings
@given(layers(dtypes=EVERY, least_tokens=1), st.booleans(), orders(), st.data())
def test_what_is_refused_is_refused_in_the_references_words(backend, layer, turned, order, data):
    """NaN and inf, and with a rope float64 keys from which it could not be undone: the first of them, with its place; none: no error."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    arrays = [np.array(layer.keys), np.array(layer.values)]
    if layer.keys.dtype == np.float64:
        arrays = [np.clip(array, -(2.0**1010), 2.0**1010) for array in arrays]
    wrong = (
        np.nan,
        np.inf,
        -np.inf,
        *((2.0**1011, -1.7e308, np.nextafter(2.0**1010, 0), 2.0**1010) if layer.keys.dtype == np.float64 else ()),
    )
    for array in arrays:
        for _ in range(data.draw(st.integers(0, 2))):
            array.flat[rng.integers(array.size)] = data.draw(st.sampled_from(wrong))
    rope = Rope(np.ones(1)) if turned else None
    given_arrays = [backend.put(array) for array in arrays]
    try:
        stacked.finite(*arrays, rope)
    except ValueError as error:
        with backend.running(order), pytest.raises(ValueError) as found:
            stacks.finite(*given_arrays, rope)
        assert str(found.value) == str(error)
    else:
        with backend.running(order):
            stacks.finite(*given_arrays, rope)


def test_the_largest_keys_of_which_a_rope_is_undone(backend):
    """2^1010 is taken, the next number is not, and without a rope any is."""
    keys, values = np.full((1, 2, 2), 2.0**1010), np.full((1, 2, 2), -1.7e308)
    rope = Rope(np.ones(1))
    with backend.running():
        stacks.finite(backend.put(keys), backend.put(values), rope)
        keys[0, 1, 1] = -np.nextafter(2.0**1010, np.inf)
        stacks.finite(backend.put(keys), backend.put(values))
        with pytest.raises(ValueError, match=r"keys: expected at most 2\^1010 .* \(head 0, token 1, channel 1\)"):
            stacks.finite(backend.put(keys), backend.put(values), rope)


@pytest.mark.parametrize("scaling", (2.0**-20, 0.5, 1.0, 4.0))
def test_the_largest_keys_come_back_finite(backend, scaling):
    """Undoing a rope of a small scaling makes keys larger: the limit is that of what comes out."""
    most = stacked.most_key(Rope(np.ones(1), attention_scaling=scaling))
    assert most == 2.0**1010 * min(1.0, scaling)
    rope, positions = Rope(np.ones(1), attention_scaling=scaling), np.arange(3)
    keys, values = np.full((1, 3, 2), most), np.zeros((1, 3, 1))
    wanted = stacked.stack(keys, values, rope, positions)
    assert np.isfinite(wanted).all() and np.abs(wanted).max() <= 2.0**1011
    with backend.running():
        found = stacks.stack(backend.put(keys), backend.put(values), rope, positions, 0, 3)
        assert same_bits(backend.get(found), wanted)
        with pytest.raises(ValueError, match="keys: expected at most"):
            stacks.finite(backend.put(keys * 1.01), backend.put(values), rope)


@pytest.mark.parametrize("count", (1, 16 * 256, 16 * 256 + 1, 70_000))
def test_the_last_number_is_looked_at(backend, count):
    keys = np.zeros((1, count, 1), np.float16)
    with backend.running():
        stacks.finite(backend.put(keys), backend.put(np.zeros((1, 0, 1), np.float16)))
        keys[0, -1, 0] = np.inf
        with pytest.raises(ValueError, match=f"token {count - 1}"):
            stacks.finite(backend.put(keys), backend.put(np.zeros((1, 0, 1), np.float16)))


@kernel_settings
@given(
    st.integers(0, 1 << 30), st.integers(-300, 300), st.integers(-300, 300), st.integers(0, 5), sizes(129), sizes(129), st.sampled_from(KINDS), orders()
)  # fmt: skip
def test_project(backend, seed, a, b, count, rows, columns, kind, order):
    """The reference's projection, summed in order, to the last bit; as it sums, to rounding. Also where a product would overflow."""
    rng = np.random.default_rng(seed)
    z = numbers(kind, (count, rows), np.float32, seed).astype(np.float64) * 10.0 ** (a if abs(a) < 260 else a // 2)
    analysis = rng.standard_normal((columns, rows)) * 10.0**b
    wanted, exact = project(z.view(InOrder), analysis), project(z, analysis)
    with backend.running(order):
        found = backend.get(kernels.project(backend.put(z), backend.put(analysis)))
    assert same_bits(found, np.asarray(wanted))
    with np.errstate(over="ignore"):
        room = np.minimum(np.abs(z), 1e300) @ np.minimum(np.abs(analysis), 1e300).T
    # either sum is within rows 2^-53 of the terms' magnitudes of the exact one, and what is below 2^-1022 within 2^-1074 a term
    assert (np.abs(found - exact) <= 2.02 * rows * 2.0**-53 * room + rows * 2.0**-1073).all()


@pytest.mark.parametrize("count", (63, 64, 65, 130))
def test_project_many(backend, count):
    """Tiles of tokens and of columns, full and not."""
    rng = np.random.default_rng(count)
    z, analysis = rng.standard_normal((count, 33)), rng.standard_normal((count + 1, 33))
    with backend.running(count):
        found = backend.get(kernels.project(backend.put(z), backend.put(analysis)))
    assert same_bits(found, np.asarray(project(z.view(InOrder), analysis)))


def test_nothing_to_project(backend):
    for shapes in (((0, 3), (2, 3)), ((4, 3), (0, 3)), ((4, 0), (2, 0))):
        z, analysis = (np.zeros(shape) for shape in shapes)
        with backend.running():
            found = backend.get(kernels.project(backend.put(z), backend.put(analysis)))
        assert same_bits(found, z @ analysis.T)


def test_rounding_of_every_half(backend):
    """float16 and bfloat16 by way of binary32: all their numbers, the middles between neighbours, and what is next to these."""
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        numbers_ = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        with np.errstate(invalid="ignore"):  # signalling NaNs
            every = np.sort(numbers_[np.isfinite(numbers_)].astype(np.float64))
        middles = (every[1:] + every[:-1]) / 2
        flat = np.concatenate([every, middles, np.nextafter(middles, np.inf), np.nextafter(middles, -np.inf)])
        x = np.resize(flat, (-(-flat.size // 256), 256))
        wanted = stacked.unstack(x, 1, (128, 128), (dtype, dtype), None, np.arange(len(x)))
        out = [backend.put(np.zeros((1, len(x), 128), dtype)) for _ in range(2)]
        with backend.running(build="fast"):
            stacks.unstack(backend.put(x), *out, None, np.arange(len(x)), 0)
        for found, own in zip(out, wanted):
            assert same_bits(backend.get(found).view(dtype), own)
