"""PolarQuant: every bit against plain integers, the laws of its angles, its 3.875 bits, and its exact distortion."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import kvtheory
import reference
from kvtheory import quantization, rate
from kvtheory.statistics import mean_interval
from reference import hadamard, polarquant, stream, vectors
from reference.polarquant import cosines, thresholds
from tests.reference import strangers
from tests.reference.independent import bits_of
from tests.reference.strategies import layer, layers

every_bits = st.one_of(
    st.just((4, 2, 2, 2)), st.lists(st.integers(1, 8), min_size=1, max_size=5).map(tuple), st.just((1,) * 10)
)


def raw(data):
    return [bytes(part.rest()) for part in stream.read(data)[1][0]]


# -- every bit ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(layers(most_numbers=600), every_bits, st.integers(0, 1 << 62))
def test_bytes_are_those_of_plain_integers(drawn, level_bits, seed):
    parts = raw(reference.PolarQuant(level_bits, seed).encode(drawn))
    tables = [[int(c) for c in cosines(level, bits)] for level, bits in enumerate(level_bits, 1)]
    assert parts[1] == b"".join(c.to_bytes(2, "little") for table in tables for c in table)
    for array, side, radius_part, angle_part in (
        (drawn.keys, "key", parts[2], parts[3]),
        (drawn.values, "value", parts[4], parts[5]),
    ):
        numbers = array.astype(np.float32)
        expected = [
            strangers.encode_polar([float(v) for v in numbers[h, t]], level_bits, tables, seed, side)
            for t in range(drawn.tokens)
            for h in range(drawn.kv_heads)
        ]
        assert b"".join(r.to_bytes(2, "little") for radii, _ in expected for r in radii) == radius_part
        at = 0
        for level, bits in enumerate(level_bits):
            own = [c for _, codes in expected for c in codes[level]]
            size = -(-len(own) * bits // 8)
            assert bits_of(angle_part[at : at + size], bits, len(own)) == own
            at += size
        assert at == len(angle_part)


@settings(max_examples=40)
@given(layers(most_numbers=600), every_bits)
def test_numbers_are_those_of_the_document(drawn, level_bits):
    wide = drawn.replace(keys=drawn.keys.astype(np.float32), values=drawn.values.astype(np.float32))
    data = reference.PolarQuant(level_bits, 3).encode(wide)
    decoded = reference.decode(data)
    for found, expected in zip(strangers.decode(data), (decoded.keys, decoded.values), strict=True):
        assert np.array_equal(np.array(found, np.float32).reshape(expected.shape), expected)


def test_cosines_are_frozen():
    """DO NOT CHANGE: other tables are other streams."""
    assert [cosines(level, bits).tolist() for level, bits in enumerate((4, 2, 2, 2), 1)] == [
        [32138, 27246, 18205, 6393],
        [31209, 26400, 19410, 9989],
        [29836, 25595, 20461, 13548],
        [28368, 24937, 21257, 16401],
    ]
    assert cosines(1, 1).size == 0 and cosines(1, 2).tolist() == [23170] and cosines(2, 1).tolist() == [28757, 15710]


def test_cosines_are_far_from_a_tie():
    """No machine's cosine rounds to another integer: all are 1e-4 from a half and known to 1e-7, in units of 2^-15."""
    for level in range(1, 11):
        for bits in range(1, 9):
            table = cosines(level, bits)
            if level == 1:
                angles = (np.arange(len(table)) + 0.5) * np.pi / 2 / max(len(table), 1)
            else:
                angles = rate.lloyd_max(quantization.PolarAngle(level), 1 << bits).points
            exact = 2**15 * np.cos(angles)
            assert np.abs(exact - np.floor(exact) - 0.5).min(initial=1) > 1e-4
            assert np.abs(exact - table).max(initial=0) <= 0.5
            assert (np.diff(table) < 0).all()
            t = thresholds(table)
            assert (np.diff(t) > 0).all() and (len(t) % 2 == 0 or t[len(t) // 2] == 1)


def test_thresholds_lie_half_way_between_points():
    for level, bits in ((1, 4), (2, 2), (4, 3)):
        table = cosines(level, bits) / 2**15
        angles = np.arccos(table)
        middles = np.arctan(np.sqrt(thresholds(cosines(level, bits)).astype(np.float64)))
        assert np.abs(middles - (angles[:-1] + angles[1:]) / 2).max() < 1e-4


# -- laws and distortion -----------------------------------------------------------------------------------------------


def angles_of(y, levels):
    """The angles of each level of vectors (n, d), straightforwardly."""
    out = [np.arctan2(y[:, 1::2], y[:, 0::2]) % (2 * np.pi)]
    norm = np.hypot(y[:, 0::2], y[:, 1::2])
    for _ in range(1, levels):
        out.append(np.arctan2(norm[:, 1::2], norm[:, 0::2]))
        norm = np.hypot(norm[:, 0::2], norm[:, 1::2])
    return out, norm


@pytest.mark.parametrize("level", range(1, 5))
def test_angles_of_gaussian_vectors_have_their_law(level):
    """Kolmogorov-Smirnov against the integrated density, one level of .1 % in all four."""
    y = np.random.default_rng(level).standard_normal((4000, 16))
    sample = angles_of(y, level)[0][-1].ravel()
    law = quantization.PolarAngle(level)
    grid = np.linspace(*law.support, 20001)
    mass = np.concatenate([[0], np.cumsum((law(grid)[1:] + law(grid)[:-1]) / 2 * np.diff(grid))])
    assert abs(mass[-1] - 1) < 1e-6
    found = stats.kstest(sample, lambda x: np.interp(x, grid, mass))
    assert found.pvalue > 0.001 / 4


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
def test_sparse_vectors_and_spikes_are_spread(dim):
    """Far from Gaussian: one coordinate in five, and one alone. The integer rotation is not a Haar one; it comes near its law."""
    rng, errors = np.random.default_rng(dim), []
    for seed in range(10):
        x = rng.standard_normal((1, 200, dim)) * (rng.random((1, 200, dim)) < 0.2)
        x[:, :, 0] += 0.01  # none is zero
        own = kvtheory.Layer(x.astype(np.float32), x[:, :, :1].astype(np.float32))
        decoded = reference.decode(reference.PolarQuant(seed=seed).encode(own)).keys
        errors.append((((decoded - x) ** 2).sum(axis=-1) / (x**2).sum(axis=-1)).mean())
    assert abs(np.mean(errors) / quantization.polar_distortion((4, 2, 2, 2)) - 1) < 0.05
    spikes = kvtheory.Layer(np.eye(dim, dtype=np.float32)[None], np.zeros((1, dim, 1), np.float32))
    decoded = reference.decode(reference.PolarQuant().encode(spikes)).keys
    assert ((decoded - spikes.keys) ** 2).sum(axis=-1).max() < 0.1


def straightforward(x, level_bits, tables):
    """PolarQuant in float64 with arctangents, exact radii and no rotation; the points of `tables` (angles)."""
    angles, norm = angles_of(x, len(level_bits))
    for level in range(len(level_bits), 0, -1):
        points = tables[level - 1]
        nearest = points[np.abs(angles[level - 1][..., None] - points).argmin(axis=-1)]
        norm = np.stack([norm * np.cos(nearest), norm * np.sin(nearest)], axis=-1).reshape(len(x), -1)
    return norm


@pytest.mark.parametrize("level_bits", [(4, 2, 2, 2), (3, 3), (8, 8, 8, 8), (2,), (1, 1, 1)])
def test_vectors_are_those_of_a_straightforward_coder(level_bits):
    """The same points, but rotated in float64: the same vectors, up to the radius's 8 bits, but where an angle is at a threshold."""
    dim, seed = 64, 5
    own = layer(6, heads=1, tokens=400, dim=dim)
    x = own.keys[0].astype(np.float64)
    matrix = hadamard.rotation(dim).matrix() / math.sqrt(dim)
    sign = hadamard.signs(seed, "reference.PolarQuant key signs", dim)
    tables = [rate.lloyd_max(quantization.PolarAngle(level), 2**b).points for level, b in enumerate(level_bits, 1)]
    expected = straightforward((x * sign) @ matrix, level_bits, tables) @ matrix * sign
    decoded = reference.decode(reference.PolarQuant(level_bits, seed).encode(own)).keys[0]
    off = np.linalg.norm(decoded - expected, axis=-1) / np.linalg.norm(x, axis=-1)
    # a radius is off by 2^-8 of itself at most; an angle of 8 bits is nearer to a threshold than the grid of 2^-14 now and then
    assert np.median(off) < 2**-8 and (off < 2**-7).mean() > 0.98
    errors = [((y - x) ** 2).sum() / (x**2).sum() for y in (decoded, expected)]
    assert abs(errors[0] / errors[1] - 1) < 0.01 + 2**-15 / errors[1]


@pytest.mark.parametrize("level_bits", [(4, 2, 2, 2), (3, 2), (5,), (2, 2, 2, 2, 2)])
def test_distortion_is_the_exact_product_within_one_percent(level_bits):
    """2 - 2 prod_l E cos(psi_l - psi_hat_l) (quantization.polar_distortion) on unit vectors at d = 128; 99.9 %."""
    rng = np.random.default_rng(len(level_bits))
    x = rng.standard_normal((1, 20000, 128))
    x = (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)
    theory = quantization.polar_distortion(level_bits)
    decoded = reference.decode(
        reference.PolarQuant(level_bits).encode(kvtheory.Layer(x, np.zeros((1, 20000, 1), np.float32)))
    )
    interval = mean_interval(((decoded.keys.astype(np.float64) - x) ** 2).sum(axis=-1).ravel(), 0.999)
    assert 0.99 * theory <= interval.low and interval.high <= 1.01 * theory
    if level_bits == (4, 2, 2, 2):
        assert abs(theory - 0.0321) < 5e-5


@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256, 576])
def test_distortion_at_other_dimensions(dim):
    own = layer(dim, heads=1, tokens=2000, dim=dim, value_dim=1)
    decoded = reference.decode(reference.PolarQuant().encode(own))
    error = ((decoded.keys - own.keys) ** 2).sum(axis=-1) / (own.keys**2).sum(axis=-1)
    assert abs(error.mean() / quantization.polar_distortion((4, 2, 2, 2)) - 1) < 0.03


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 7, 17, 30, 71])
def test_dimensions_that_the_block_does_not_divide(dim):
    """Shorter last blocks are coded with the same codebooks: hardly worse, and one coordinate alone is nearly exact."""
    own = layer(dim, heads=1, tokens=500, dim=dim, value_dim=1)
    codec = reference.PolarQuant((8, 8, 8, 8))
    decoded = reference.decode(codec.encode(own))
    error = ((decoded.keys - own.keys) ** 2).sum() / (own.keys**2).sum()
    assert error < 2e-3
    assert ((decoded.values - own.values) ** 2).sum() < 2e-5 * (own.values**2).sum()


@pytest.mark.parametrize("level", range(4))
def test_every_bit_of_every_level_counts(level):
    own = layer(7, heads=1, tokens=500, dim=64, value_dim=1)
    bits = [4, 2, 2, 2]
    bits[level] += 1
    errors = [
        ((reference.decode(reference.PolarQuant(b).encode(own)).keys - own.keys) ** 2).sum()
        for b in ((4, 2, 2, 2), tuple(bits))
    ]
    expected = quantization.polar_distortion(bits) / quantization.polar_distortion((4, 2, 2, 2))
    assert abs(errors[1] / errors[0] - expected) < 0.05 and errors[1] < errors[0]


def test_without_its_rotation_it_would_fail():
    """Ablation: vectors with one channel of large numbers, coded as they are, lose 16 times what they lose rotated."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((1, 1000, 64)).astype(np.float32)
    x[:, :, 5] += 30
    decoded = reference.decode(reference.PolarQuant().encode(kvtheory.Layer(x, x[:, :, :1])))
    tables = [rate.lloyd_max(quantization.PolarAngle(n), 2**b).points for n, b in enumerate((4, 2, 2, 2), 1)]
    rotated = ((decoded.keys - x) ** 2).sum() / (x**2).sum()
    plain = ((straightforward(x[0].astype(np.float64), (4, 2, 2, 2), tables) - x[0]) ** 2).sum() / (x**2).sum()
    assert plain > 10 * rotated


def test_codec_and_data_of_one_seed_share_nothing():
    for seed in range(3):
        for rng in (np.random.default_rng(seed), kvtheory.randomness.generator(seed, "data")):
            x = rng.standard_normal((1, 2048, 128)).astype(np.float32)
            decoded = reference.decode(reference.PolarQuant(seed=seed).encode(kvtheory.Layer(x, x[:, :, :1])))
            error = ((decoded.keys - x) ** 2).sum(axis=-1) / (x**2).sum(axis=-1)
            assert abs(float(error.mean()) / quantization.polar_distortion((4, 2, 2, 2)) - 1) < 0.02


def test_radii_keep_norms():
    """The decoded vector has the stored norms of its blocks: at full resolution, within the radius's 2^-8."""
    own = layer(9, heads=1, tokens=300, dim=64, value_dim=1)
    for bits in ((4, 2, 2, 2), (1, 1)):
        decoded = reference.decode(reference.PolarQuant(bits).encode(own)).keys
        ratio = np.linalg.norm(decoded, axis=-1) / np.linalg.norm(own.keys, axis=-1)
        assert np.abs(ratio - 1).max() < 2**-8 * 1.1


# -- rates and refusals ------------------------------------------------------------------------------------------------


def test_three_and_seven_eighths_bits():
    own = layer(10, heads=1, tokens=4096, dim=128)
    held = reference.held_bits(reference.PolarQuant().encode(own), own)
    assert 0 < held - 3.875 < 1e-3
    parts = {p.name: p.bytes for p in reference.inspect(reference.PolarQuant().encode(own)).parts}
    assert (
        parts["key radii"] == 4096 * 8 * 2
        and parts["key angles"] == 4096 * 128 * (8 * 4 + 4 * 2 + 2 * 2 + 2) // 16 // 8
    )


@pytest.mark.parametrize("level_bits", [(4, 2, 2, 2), (3,), (8, 1, 5), (2,) * 10])
def test_what_a_number_costs(level_bits):
    for dim, value_dim in ((64, 64), (80, 24), (3, 1), (17, 33)):
        own = layer(11, heads=3, tokens=50, dim=dim, value_dim=value_dim)
        payload = 2 * sum(2**b // (4 if i == 0 else 1) for i, b in enumerate(level_bits))
        for d in (dim, value_dim):
            nodes = -(-d // 2)
            payload += -(-150 * nodes * level_bits[0] // 8)
            for bits in level_bits[1:]:
                payload += -(-150 * (nodes // 2) * bits // 8)
                nodes = -(-nodes // 2)
            payload += 2 * 150 * nodes
        assert 0 <= len(reference.PolarQuant(level_bits).encode(own)) - payload <= 70


def test_wrong_arguments_are_refused():
    for wrong, problem, match in (
        ({"level_bits": ()}, ValueError, "level_bits: expected 1 to 10 levels, got 0"),
        ({"level_bits": (1,) * 11}, ValueError, "level_bits: expected 1 to 10 levels, got 11"),
        ({"level_bits": (4, 0)}, ValueError, "level_bits: expected 1 to 8, got 0"),
        ({"level_bits": (9,)}, ValueError, "level_bits"),
        ({"level_bits": 4}, TypeError, "level_bits: expected a tuple of ints, got int"),
        ({"level_bits": (4, 2.0)}, TypeError, "level_bits: expected an int, got float"),
        ({"level_bits": (True,)}, TypeError, "level_bits"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1 << 63}, ValueError, "seed"),
        ({"seed": 1.0}, TypeError, "seed"),
    ):
        with pytest.raises(problem, match=match):
            reference.PolarQuant(**wrong)
    assert reference.PolarQuant([4, 2]) == reference.PolarQuant((4, 2))
    with pytest.raises(ValueError, match="values: PolarQuant takes up to 1024 channels, got 1025"):
        reference.PolarQuant().encode(layer(0, tokens=1, dim=3, value_dim=1025))
    own = layer(0, heads=2, tokens=3, dim=8, dtype="float64")
    own.values[1, 2, 3] = 1e300
    with pytest.raises(
        ValueError, match=r"values: .*float32 can hold, in which PolarQuant.*\(head 1, token 2, channel 3\)"
    ):
        reference.PolarQuant().encode(own)


def test_leaves_stay_where_sums_are_exact():
    """The largest leaves a stream can hold, hostile cosines of 1 included: |p| <= 2^a, so that M p is exact."""
    for dim in (3, 64, 80, 576, 1023):
        rotation = hadamard.rotation(dim)
        codec = reference.PolarQuant((2, 1))
        plan = polarquant._Plan(codec, "key", dim, [np.full(1, 1 << 15), np.full(2, 1 << 15)])
        radii = np.full((1, plan.radii_each), (300 << 7) + 127)
        planes = [np.zeros((n, 1), np.uint8) for n in plan.codes_each]
        out = np.empty((1, 1, dim), np.float64)
        plan.decode(radii, planes, vectors.largest(np.dtype(np.float32)), out)
        assert np.isfinite(out).all() and rotation.row_sum << rotation.bits <= 1 << 24


def test_decode_flops():
    own = layer(12, heads=2, tokens=5, dim=128, value_dim=96)
    codec = reference.PolarQuant()
    expected = 10 * (2 * (64 + 32 + 16 + 8) + 128 * 8) + 10 * (2 * (48 + 24 + 12 + 6) + 96 * 9)
    assert codec.decode_flops(codec.encode(own)) == expected


def test_on_the_sample_cache():
    for own in kvtheory.sample_cache():
        _, held, error = reference.roundtrip(reference.PolarQuant(), own)
        assert 3.875 < held < 3.9 and 0 < error < 0.5
