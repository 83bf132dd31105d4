"""QJL: every bit against plain integers, an unbiased estimate of the exact variance, values between their minimum and maximum."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from kvtheory.statistics import mean_interval
from reference import minmax, stream
from reference.sketch import PAIR, SIGMA, Sketch, _edges, _entries, sketch
from reference.vectors import Scratch, gained
from tests.reference import strangers
from tests.reference.independent import bits_of
from tests.reference.strategies import layer, layers


def raw(data):
    return [bytes(part.rest()) for part in stream.read(data)[1][0]]


# -- every bit ---------------------------------------------------------------------------------------------------------


def small(drawn):
    """Plain Python takes long for a sketch."""
    return drawn.replace(keys=drawn.keys[:, :, :8], values=drawn.values[:, :, :16])


@settings(max_examples=40)
@given(layers(most_numbers=300), st.integers(1, 8), st.integers(0, 1 << 62))
def test_bytes_are_those_of_plain_integers(drawn, bits, seed):
    drawn = small(drawn)
    parts = raw(reference.QJL(bits, seed).encode(drawn))
    keys, values = drawn.keys.astype(np.float32), drawn.values.astype(np.float32)
    order = [(h, t) for t in range(drawn.tokens) for h in range(drawn.kv_heads)]
    expected = [strangers.encode_qjl_key([float(v) for v in keys[h, t]], bits, seed) for h, t in order]
    assert b"".join(norm.to_bytes(2, "little") for norm, _ in expected) == parts[1]
    assert bits_of(parts[2], 1, bits * keys.size) == [sign for _, signs in expected for sign in signs]
    coded = [strangers.encode_group([float(v) for v in values[h, t]], max(bits, 2)) for h, t in order]
    zeros = np.array([z for z, _, _ in coded], np.float32).astype(minmax.zero_dtype(drawn.values.dtype))
    assert zeros.tobytes() == parts[3]
    assert b"".join(code.to_bytes(2, "little") for _, code, _ in coded) == parts[4]
    assert bits_of(parts[5], max(bits, 2), values.size) == [c for _, _, codes in coded for c in codes]


@settings(max_examples=30)
@given(layers(most_numbers=300), st.integers(1, 8))
def test_numbers_are_those_of_the_document(drawn, bits):
    drawn = small(drawn)
    wide = drawn.replace(keys=drawn.keys.astype(np.float32), values=drawn.values.astype(np.float32))
    data = reference.QJL(bits, 3).encode(wide)
    decoded = reference.decode(data)
    for found, expected in zip(strangers.decode(data), (decoded.keys, decoded.values), strict=True):
        assert np.array_equal(np.array(found, np.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize("dim", [1, 3, 80, 128, 576, 1024])
def test_sketches_are_exact_in_float32(dim):
    """|S n| and |S^T q| stay below 2^24 at every dimension: no sum is rounded, in any order."""
    own = sketch(5, "reference.QJL key sketch", dim, dim)
    matrix = own.matrix.astype(np.int64)
    assert np.array_equal(matrix, own.matrix) and np.abs(matrix).max() <= 128
    assert int(np.abs(matrix).sum(axis=1).max()) << own.bits <= 1 << 24
    assert 8 * 1024 * 128 <= 1 << 24


def test_entries_looked_up_are_entries_searched_for():
    near = np.concatenate([_edges() + d for d in (-1, 0, 1)])
    words = np.concatenate([near[(near >= 0) & (near < 1 << 32)], np.arange(0, 1 << 32, 99991)])
    expected = np.searchsorted(_edges(), words, side="right") - 128
    assert np.array_equal(_entries(words.astype(np.uint32)), expected)


# -- the estimate ------------------------------------------------------------------------------------------------------


def estimates(key, queries, bits, seeds):
    """(seeds, queries): <q, k_hat> of one unit key under as many sketches, over the factor of its rounded norm."""
    own = kvtheory.Layer(key.astype(np.float32)[None, None], np.zeros((1, 1, 1), np.float32))
    out = []
    for seed in range(seeds):
        data = reference.QJL(bits, seed).encode(own)
        norm = strangers.norm_of(int.from_bytes(raw(data)[1], "little"), 7)
        assert abs(norm - 1) <= 2**-8
        out.append(reference.decode(data).keys[0, 0].astype(np.float64) @ queries.T / norm)
    return np.array(out)


@pytest.mark.parametrize("bits, dim", [(1, 16), (1, 48), (3, 16)])
def test_inner_products_are_unbiased_and_have_the_exact_variance(bits, dim):
    """Var <q, k_hat> = ((pi/2) ||q||^2 - <q, k>^2) / m for a unit key, q along k, across it, and between; over sketches.

    Six intervals at 99.99 % each.
    """
    rng = np.random.default_rng(100 * bits + dim)
    key, other = np.linalg.qr(rng.standard_normal((dim, 2)))[0].T
    queries = np.array([3 * key, other, 0.6 * key - 0.8 * other])
    found = estimates(key, queries, bits, 2000)
    m = bits * dim
    for i, q in enumerate(queries):
        error = found[:, i] - q @ key
        mean, square = mean_interval(error, 0.9999), mean_interval(error**2, 0.9999)
        variance = ((math.pi / 2) * (q @ q) - (q @ key) ** 2) / m
        assert mean.low <= 0 <= mean.high
        assert square.low <= variance <= square.high
        assert square.high - square.low < 0.6 * variance  # sharp enough to tell pi/2 from 1, and m from d


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_distortion_of_keys(bits):
    """E ||k - k_hat||^2 = ((pi/2) d - 1) / m ||k||^2, the variance summed over an orthonormal basis; 99.99 %."""
    dim = 64
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((1, 400, dim)).astype(np.float32)
    own = kvtheory.Layer(x, np.zeros((1, 400, 1), np.float32))
    wide = x.astype(np.float64)
    # keys under one sketch are not independent: a mean for each of many sketches
    means = []
    for seed in range(40):
        error = reference.decode(reference.QJL(bits, seed).encode(own)).keys - wide
        means.append(float(((error**2).sum(axis=-1) / (wide**2).sum(axis=-1)).mean()))
    interval = mean_interval(np.array(means), 0.9999)
    exact = (math.pi / 2 * dim - 1) / (bits * dim)
    assert interval.low <= exact <= interval.high
    assert interval.high - interval.low < 0.1 * exact


@pytest.mark.parametrize("bits", [1, 3])
def test_keys_are_those_of_a_straightforward_sketch(bits):
    """float64 throughout, from the same S: the same signs but where S k is within rounding of 0, and the same vectors."""
    dim = 32
    own = layer(3, heads=2, tokens=60, dim=dim)
    s = sketch(9, "reference.QJL key sketch", bits * dim, dim).matrix.astype(np.float64) / SIGMA
    x = own.keys.astype(np.float64)
    sketched = x @ s.T
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    expected = math.sqrt(math.pi / 2) / (bits * dim) * norm * (np.where(sketched < 0, -1, 1) @ s)
    decoded = reference.decode(reference.QJL(bits, 9).encode(own)).keys
    # coordinates are rounded to 2^-10 of the largest or finer, so that S k moves by less than 2^-10 ||k|| sqrt(d) * 4
    sure = (np.abs(sketched) > norm * 2**-10 * 4 * math.sqrt(dim)).all(axis=-1)
    assert sure.sum() > 10
    off = np.linalg.norm(decoded - expected, axis=-1)[sure] / np.linalg.norm(expected, axis=-1)[sure]
    assert off.max() < 2**-7  # the norm's 8 bits


def test_sketches_differ_by_seed_and_are_no_data():
    own = layer(0, heads=1, tokens=50, dim=64)
    assert reference.QJL(1, 0).encode(own) != reference.QJL(1, 1).encode(own)
    for seed in range(3):
        for rng in (np.random.default_rng(seed), kvtheory.randomness.generator(seed, "data")):
            x = rng.standard_normal((1, 1024, 64)).astype(np.float32)
            decoded = reference.decode(
                reference.QJL(1, seed).encode(kvtheory.Layer(x, np.zeros((1, 1024, 1), np.float32)))
            )
            error = ((decoded.keys - x) ** 2).sum(axis=-1) / (x**2).sum(axis=-1)
            assert abs(float(error.mean()) / (math.pi / 2 - 1 / 64) - 1) < 0.1


def test_more_bits_have_the_signs_of_fewer_first():
    """Row j of S is the same at every m, so that more bits are more rows."""
    one, three = (sketch(1, "reference.QJL key sketch", m, 32).matrix for m in (32, 96))
    assert np.array_equal(three[:32], one)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 3, 8])
def test_values_are_quantised_by_token(bits):
    own = layer(4, heads=2, tokens=40, dim=8, value_dim=24)
    codec = reference.QJL(bits)
    decoded = reference.decode(codec.encode(own)).values
    x = own.values.astype(np.float64)
    step = (x.max(axis=-1) - x.min(axis=-1)) / (2 ** max(bits, 2) - 1)
    assert (np.abs(decoded - x).max(axis=-1) <= step / 2 * (1 + 2**-7)).all()
    assert (decoded.min(axis=-1) == own.values.min(axis=-1)).all()  # the zero, exactly
    constant = own.replace(values=np.repeat(own.values[:, :, :1], 24, axis=2))
    assert np.array_equal(reference.decode(codec.encode(constant)).values, constant.values)


# -- rates and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, zero_bits", [("float16", 16), ("bfloat16", 16), ("float32", 32), ("float64", 32)])
def test_what_a_number_costs(dtype, zero_bits):
    for bits, dim, value_dim in ((1, 64, 64), (2, 3, 80), (3, 80, 5), (8, 16, 1)):
        own = layer(5, heads=3, tokens=50, dim=dim, value_dim=value_dim, dtype=dtype)
        payload = (
            150 * 2 + -(-150 * bits * dim // 8) + 150 * (zero_bits + 16) // 8 + -(-150 * value_dim * max(bits, 2) // 8)
        )
        assert 0 <= len(reference.QJL(bits).encode(own)) - payload <= 60


def test_wrong_arguments_are_refused():
    for wrong, problem, match in (
        ({"bits": 0}, ValueError, "bits: expected 1 to 8, got 0"),
        ({"bits": 9}, ValueError, "bits"),
        ({"bits": 2.5}, TypeError, "bits: expected an int, got float"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1 << 63}, ValueError, "seed"),
        ({"seed": True}, TypeError, "seed"),
    ):
        with pytest.raises(problem, match=match):
            reference.QJL(**wrong)
    with pytest.raises(ValueError, match="keys: QJL takes up to 1024 channels, got 1025"):
        reference.QJL().encode(layer(0, tokens=1, dim=1025))
    with pytest.raises(ValueError, match="values: QJL takes up to 1024 channels, got 1025"):
        reference.QJL().encode(layer(0, tokens=1, dim=3, value_dim=1025))
    for side in ("keys", "values"):
        own = layer(0, heads=2, tokens=3, dim=8, dtype="float64")
        getattr(own, side)[1, 2, 3] = 1e300
        problem = rf"{side}: .*float32 can hold, in which QJL.*1e\+300 at \(head 1, token 2, channel 3\)"
        with pytest.raises(ValueError, match=problem):
            reference.QJL().encode(own)


def test_decode_flops():
    own = layer(6, heads=2, tokens=5, dim=16, value_dim=12)
    codec = reference.QJL(2)
    assert codec.decode_flops(codec.encode(own)) == 10 * (2 * 32 * 16 + 16 + 2 * 12)


@pytest.mark.parametrize("bits", [1, 4])
def test_on_the_sample_cache(bits):
    for own in kvtheory.sample_cache():
        _, held, error = reference.roundtrip(reference.QJL(bits), own)
        assert bits < held < max(bits, 2) + 1 and np.isfinite(error)


# -- short cuts are short cuts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, dim", [(1, 1), (6, 3), (8, 2), (128, 128), (256, 128), (1024, 128), (24, 1), (1024, 1024)]
)
def test_two_sums_in_one_number_are_both_exact(rows, dim):
    s = sketch(5, "test_qjl back", rows, dim)
    rng = np.random.default_rng(rows)
    # the signs of each column of S, too: its sums are the largest
    q = np.concatenate([rng.choice([-1.0, 1.0], (50, rows)), np.where(s.matrix.T < 0, -1.0, 1.0)]).astype(np.float32)
    for count in (len(q), len(q) - 1, 2, 1):
        own = q[-count:]
        found = s.back(paired(own), np.full((count, dim), np.nan, np.float32), Scratch())
        assert np.array_equal(found, own.astype(np.float64) @ s.matrix.astype(np.float64))


def paired(q):
    """As `Sketch.back` takes signs: those of the second half in another unit."""
    own = q.copy()
    own[-(-len(q) // 2) :] *= PAIR
    return own


def test_rows_of_a_sketch_are_taken_so_that_no_sum_passes_its_place():
    s = Sketch.of(np.full((300, 4), 100, np.float32), 8)
    assert s.step * 100 < PAIR / 2 <= 2 * s.step * 100
    q = np.ones((2, 300), np.float32)
    assert np.array_equal(s.back(paired(q), np.empty((2, 4), np.float32), Scratch()), np.full((2, 4), 30000))


@pytest.mark.parametrize("hole", [None, (0, 1), (0, 0), (1, 1)])
def test_zeros_without_sign_are_known_beforehand(hole):
    """A column of zeros in a step may sum to -0, any other cannot."""
    matrix = np.full((40, 3), 100, np.float32)  # two steps of 20
    if hole is not None:
        matrix[20 * hole[0] : 20 * (hole[0] + 1), hole[1]] = 0
    s = Sketch.of(matrix, 8)
    assert s.step == 20 and s.full == (hole is None)


def test_no_zero_comes_back_with_a_sign():
    """One channel, one sign: S is a single number, and 0 for one seed in forty."""
    single = kvtheory.Layer(np.full((1, 3, 1), -1, np.float32), np.ones((1, 3, 1), np.float32))
    zeros = 0
    for seed in range(200):
        codec = reference.QJL(1, seed)
        keys = codec.decode(codec.encode(single)).keys
        zeros += not keys.any()
        assert not np.signbit(keys[keys == 0]).any()
    assert zeros


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("power", [-1000, -150, -127, -126, -125, -20, 0, 90, 102, 103, 104, 105, 200])
def test_gains_have_24_bits_and_products_are_rounded_once(power, dtype):
    """Around the least normal number, and around the largest, where another way is taken."""
    rng = np.random.default_rng(power + 1000)
    rows = rng.integers(-(1 << 24), (1 << 24) + 1, (6, 5)).astype(np.float32)
    rows[0, :2] = 0.0, -0.0
    gain = np.ldexp(1 + rng.random(6), power)
    limit = float(np.finfo(np.float16 if dtype == "float16" else np.float32).max)
    out = np.full((3, 2, 5), np.nan, dtype)
    expected = []
    for row, factor in zip(rows, gain, strict=True):
        numerator = round(Fraction(factor) / Fraction(2) ** (power - 23))  # half to even
        exact = [Fraction(numerator) * Fraction(2) ** (power - 23) * Fraction(float(n)) for n in row]
        with np.errstate(over="ignore"):
            near = [min(max(float(np.float32(float(p))), -limit), limit) for p in exact]
        expected.append([0.0 if p == 0 else p for p in near])
    with np.errstate(over="ignore"):
        wanted = np.array(expected, np.float32).astype(dtype).reshape(out.shape)
    gained(rows.copy(), gain, float(1 << 24), limit, out)
    assert np.array_equal(out, wanted)
    assert not np.signbit(out[0, 0, :2]).any()
