"""TurboQuant: integer-exact against plain Python integers, and as good as the theory says it is."""

import hashlib
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from kvtheory import quantization
from kvtheory.statistics import mean_interval
from reference import hadamard, vectors
from reference.sketch import SIGMA
from reference.turboquant import _Plan, fraction_bits, norm_codes, norms, points
from tests.reference import independent
from tests.reference.strategies import DIMS, layer, layers


def unit_layer(seed, tokens, dim):
    """One head of random directions as keys, float32."""
    rng = np.random.Generator(np.random.Philox(seed))
    x = rng.standard_normal((1, tokens, dim))
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    return kvtheory.Layer(x.astype(np.float32), np.zeros((1, tokens, 1), np.float32))


# -- every bit, against integers ---------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(layers(most_numbers=600), st.integers(1, 8), st.integers(0, 1 << 62), st.sampled_from(["mse", "mse", "prod"]))
def test_bytes_are_those_of_plain_integers(drawn, bits, seed, kind):
    if kind == "prod":  # plain Python takes long for a sketch
        drawn = drawn.replace(keys=drawn.keys[:, :, :16], values=drawn.values[:, :, :16])
    codec = reference.TurboQuant(bits, seed, kind)
    s = independent.read(codec.encode(drawn))
    width = 2 if bits <= 6 else 4
    for array, side, norm_part, code_part in (
        (drawn.keys, "key", s["parts"][2], s["parts"][3]),
        (drawn.values, "value", s["parts"][4], s["parts"][5]),
    ):
        d = array.shape[-1]
        table = [int(p) for p in points(d, codec.mse_bits)]
        numbers = array.astype(np.float32)
        expected = [
            independent.encode_vector([float(v) for v in numbers[h, t]], bits, seed, side, table, kind)
            for t in range(drawn.tokens)
            for h in range(drawn.kv_heads)
        ]
        assert b"".join(norm.to_bytes(width, "little") for norms_, _ in expected for norm in norms_) == bytes(norm_part)
        assert independent.bits_of(code_part, bits, numbers.size) == [c for _, codes in expected for c in codes]


@settings(max_examples=40)
@given(layers(most_numbers=600), st.integers(1, 8), st.sampled_from(["mse", "mse", "prod"]))
def test_numbers_are_those_of_the_document(drawn, bits, kind):
    """independent.py has only docs/stream-format.md to go by; float32 in, so that nothing is rounded after it."""
    if kind == "prod":  # plain Python takes long for a sketch
        drawn = drawn.replace(keys=drawn.keys[:, :, :16], values=drawn.values[:, :, :16])
    wide = drawn.replace(keys=drawn.keys.astype(np.float32), values=drawn.values.astype(np.float32))
    decoded = reference.decode(reference.TurboQuant(bits, 3, kind).encode(wide))
    stranger = independent.decode(reference.TurboQuant(bits, 3, kind).encode(wide))
    for side in ("keys", "values"):
        found = np.array(stranger[side], np.float32).reshape(getattr(decoded, side).shape)
        assert np.array_equal(getattr(decoded, side), found)


@pytest.mark.parametrize("dim", [1, 2, 3, 5, 8, 12, 24, 80, 96, 127, 128, 192, 256, 576, 1024])
def test_rotations_are_exact_in_float32_over_seventeen_decades(dim):
    """A float32 GEMM gives the integers M n, whatever the scale of the rows, and M^T M = m d I."""
    rotation = hadamard.rotation(dim)
    matrix = rotation.matrix()
    assert np.array_equal(matrix @ matrix.T, rotation.gain2 * np.eye(dim, dtype=np.int64))
    assert rotation.row_sum == np.abs(matrix).sum(axis=1).max() and rotation.row_sum << rotation.bits <= 1 << 24
    assert dim > 128 or rotation.bits == independent.input_bits(dim)
    rng = np.random.default_rng(dim)
    rows = rng.standard_normal((40, dim)) * 10.0 ** rng.uniform(-9, 8, (40, 1))
    rows[0] = 1.0  # the largest partial sums there are
    rows[1] = matrix[min(1, dim - 1)]
    n, _ = vectors.integers(rows.astype(np.float32), np.abs(rows.astype(np.float32)).max(axis=1), rotation.bits, axis=1)
    integers = n.astype(np.int64)
    assert np.array_equal(integers, n) and np.abs(integers).max() <= 1 << rotation.bits
    planes = rotation.forward(n)
    assert np.array_equal(planes, (integers @ matrix).T)
    assert np.abs(planes).max() <= 1 << 24
    back = rotation.inverse(np.ascontiguousarray(planes / np.float32(rotation.gain2)))  # not integers: only near
    assert np.allclose(back, n, rtol=0, atol=np.abs(n).max() * 1e-5)


@pytest.mark.parametrize("dim", DIMS)
def test_decoding_sums_stay_exact(dim):
    """L max P <= 2^24 at every width: M p is exact as well."""
    for bits in range(1, 9):
        assert hadamard.rotation(dim).row_sum * int(points(dim, bits)[-1]) <= 1 << 24


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=8))
@example([2.0**-149, 0.0])
@example([float(np.finfo(np.float32).max), 1.0])
@example([32767.5, 0.5, 1.5, 2.5, -0.5])
def test_integers_are_rounded_half_to_even(numbers):
    x = np.array([numbers], np.float32)
    n, e = vectors.integers(x, np.abs(x).max(axis=1), 14, axis=1)
    largest = max(abs(v) for v in numbers)
    assert (largest == 0 and e[0] == 0) or 2.0 ** (int(e[0]) - 1) <= largest < 2.0 ** int(e[0])
    assert [int(v) for v in n[0]] == [round(Fraction(float(v)) * Fraction(2) ** (14 - int(e[0]))) for v in x[0]]


# -- norms -------------------------------------------------------------------------------------------------------------


@given(st.integers(1, (1 << 52) - 1), st.integers(-170, 120), st.sampled_from([7, 23]))
@example((1 << 16) - 1, 0, 7)  # rounds up into the next exponent
@example((255 << 8) ** 2 + 1, 0, 7)
def test_norms_are_rounded_to_their_mantissa(squares, exponent, mu):
    code = norm_codes(np.array([float(squares)]), np.array([exponent]), mu)
    value = float(norms(code, mu)[0])
    true = math.sqrt(squares) * 2.0**exponent
    assert abs(value / true - 1) <= 2.0 ** -(mu + 1) * (1 + 1e-9)
    assert int(code[0]) == independent.norm_code(squares, exponent, mu)
    assert value == independent.norm_of(int(code[0]), mu)


def test_norm_codes_are_in_the_order_of_norms():
    codes = np.arange(1 << 7, 390 << 7)
    assert (np.diff(norms(codes, 7)) > 0).all() and norms(np.array([0]), 7)[0] == 0


def test_stored_norms_cost_what_the_docstring_says():
    """E (norm_hat / norm - 1)^2 = 2.6e-6 for norms spread evenly over an octave on the logarithmic scale (mantissa law 1/m)."""
    true = 2.0 ** np.linspace(0, 1, 200001) * 2**20
    stored = norms(norm_codes(true**2, np.zeros(true.size, np.int64), 7), 7)
    assert abs(((stored / true - 1) ** 2).mean() / 2.6e-6 - 1) < 0.2


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_points_are_lloyd_max_far_from_a_tie(dim):
    """Rounding to 2^-f units: every unrounded point is 1e-6 units or more from a half, 10^3 times what a solver may be off."""
    for bits in range(1, 9):
        table = points(dim, bits)
        assert table.size == 1 << (bits - 1) and (np.diff(table) >= 0).all() and table[0] > 0
        assert int(table[-1]) < 8 << fraction_bits(dim)
        if dim > 1:
            law = quantization.SphereCoordinate(dim)
            exact = (
                np.sqrt(dim)
                * kvtheory.rate.lloyd_max(law, 2 * table.size).points[table.size :]
                * (1 << fraction_bits(dim))
            )
            assert np.abs(exact - table).max() < 0.5 - 1e-6
            assert dim > 128 or fraction_bits(dim) == independent.fraction_bits(dim)


def test_tables_are_frozen():
    """DO NOT CHANGE: other tables are other streams."""
    assert points(128, 1).tolist() == [1637]  # units of 2^-11
    assert points(128, 2).tolist() == [927, 3083]
    assert points(128, 3).tolist() == [501, 1543, 2737, 4365]
    assert points(64, 4).tolist() == [261, 788, 1332, 1909, 2538, 3258, 4144, 5420]
    assert points(3, 3).tolist() == [443, 1330, 2217, 3104]  # uniform on [-1, 1]: (2 k + 1) / 8 sqrt(3)
    assert points(1, 2).tolist() == [2048, 2048]
    frozen = {
        1: "c2ec72154e6fe352", 3: "dbd25ac0231df366", 64: "0dddc4ab54ac6939", 80: "fabc46865faeb9c7", 96: "f2bd720854fce89d",
        128: "6ff2f0f625ca6c8f", 192: "af194d900cabadfc", 256: "3c0427f19f0181f1", 576: "a55fedf13dccd408",
    }  # fmt: skip
    for dim, digest in frozen.items():
        table = b"".join(points(dim, bits).astype("<u2").tobytes() for bits in range(1, 9))
        assert hashlib.sha256(table).hexdigest()[:16] == digest


# -- quality -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, exact", [(1, 0.3609), (2, 0.1160), (3, 0.0340), (4, 0.0093)])
def test_distortion_is_the_exact_integral_within_one_percent(bits, exact):
    """On unit vectors at d = 128 (theory.md section 4), both rotations; the interval is 99.9 %."""
    theory = quantization.mse_distortion(128, bits)
    assert abs(theory - exact) < 6e-5
    own = unit_layer(100 + bits, 40000, 128)
    for rotation in ("hadamard", "haar"):
        decoded = reference.decode(reference.TurboQuant(bits, rotation=rotation).encode(own))
        error = ((decoded.keys.astype(np.float64) - own.keys) ** 2).sum(axis=-1).ravel()
        interval = mean_interval(error, 0.999)
        assert 0.99 * theory <= interval.low and interval.high <= 1.01 * theory


@pytest.mark.parametrize("dim", [64, 80, 96, 192, 256, 576])
def test_distortion_at_other_dimensions(dim):
    own = unit_layer(dim, 4000, dim)
    for bits in (2, 4):
        decoded = reference.decode(reference.TurboQuant(bits).encode(own))
        error = ((decoded.keys.astype(np.float64) - own.keys) ** 2).sum(axis=-1).mean()
        assert abs(error / quantization.mse_distortion(dim, bits) - 1) < 0.02


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
def test_more_bits_stay_near_the_exact_integral(bits):
    """Rounding norms (2.6e-6) and points is all that is added; above 6 bits norms have 24 bits."""
    own = unit_layer(200 + bits, 4000, 128)
    decoded = reference.decode(reference.TurboQuant(bits).encode(own))
    error = ((decoded.keys.astype(np.float64) - own.keys) ** 2).sum(axis=-1).mean()
    assert abs(error / quantization.mse_distortion(128, bits) - 1) < 0.02


def test_every_bit_more_is_less_error():
    own = unit_layer(1, 500, 96)
    errors = []
    for bits in range(1, 9):
        decoded = reference.decode(reference.TurboQuant(bits).encode(own))
        errors.append(float(((decoded.keys - own.keys) ** 2).sum()))
    assert all(4.6 > a / b > 2.9 for a, b in itertools.pairwise(errors))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
def test_spikes_are_spread(dim):
    """One-hot vectors: without a rotation they would be the worst case; the integer rotation brings them near the law."""
    own = kvtheory.Layer(np.eye(dim, dtype=np.float32)[None], np.zeros((1, dim, 1), np.float32))
    decoded = reference.decode(reference.TurboQuant(3).encode(own))
    error = ((decoded.keys - own.keys) ** 2).sum(axis=-1)
    assert error.max() < 0.2


def test_codec_and_data_of_one_seed_share_nothing():
    """A package whose rotation is the first Gaussian matrix of its seed is aligned with data drawn likewise; ours is not."""
    for seed in range(3):
        for rng in (
            np.random.default_rng(seed),
            np.random.Generator(np.random.Philox(seed)),
            kvtheory.randomness.generator(seed, "data"),
        ):
            x = rng.standard_normal((1, 2048, 128)).astype(np.float32)
            own = kvtheory.Layer(x, np.zeros((1, 2048, 1), np.float32))
            for rotation in ("hadamard", "haar"):
                decoded = reference.decode(reference.TurboQuant(2, seed, rotation=rotation).encode(own))
                error = ((decoded.keys - x) ** 2).sum(axis=-1) / (x**2).sum(axis=-1)
                assert abs(float(error.mean()) / quantization.mse_distortion(128, 2) - 1) < 0.02


def test_seeds_and_sides_have_signs_of_their_own():
    signs = {
        (seed, side): hadamard.signs(seed, f"reference.TurboQuant {side} signs", 128).tobytes()
        for seed in range(4)
        for side in ("key", "value")
    }
    assert len(set(signs.values())) == 8
    own = layer(0, dim=128)
    assert reference.TurboQuant(3, 0).encode(own) != reference.TurboQuant(3, 1).encode(own)
    plus = hadamard.signs(0, "x", 100000 // 64 * 64)
    assert abs(int(plus.sum())) < 4 * math.sqrt(plus.size) and set(np.unique(plus)) == {-1, 1}


# -- prod --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 3])
def test_prod_is_unbiased_and_mse_is_not(bits):
    """E <y, x_hat> = <y, x> over seeds for a fixed x and y along it; "mse" shrinks by D (theory.md section 4)."""
    dim = 32
    x = np.random.default_rng(bits).standard_normal(dim)
    x /= np.linalg.norm(x)
    own = kvtheory.Layer(x.astype(np.float32)[None, None], np.zeros((1, 1, 1), np.float32))
    seen = {
        kind: np.array(
            [reference.decode(reference.TurboQuant(bits, seed, kind).encode(own)).keys[0, 0] @ x for seed in range(300)]
        )
        for kind in ("mse", "prod")
    }
    prod, mse = (mean_interval(seen[kind], 0.9999) for kind in ("prod", "mse"))
    assert prod.low <= 1 <= prod.high
    shrunk = 1 - quantization.mse_distortion(dim, bits)
    assert mse.high < 1 and mse.low - 0.01 <= shrunk <= mse.high + 0.01


@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_prod_inner_products_have_the_exact_variance(bits, rotation):
    """d E <y, x - x_hat>^2 = (pi/2 - 1/d) D_mse(b - 1) for random y (quantization.prod_distortion), over seeds."""
    dim, own = 64, unit_layer(300 + bits, 40, 64)
    rng = np.random.default_rng(bits)
    squares = []
    for seed in range(60):
        decoded = reference.decode(reference.TurboQuant(bits, seed, "prod", rotation).encode(own))
        y = rng.standard_normal((dim, 8))
        y /= np.linalg.norm(y, axis=0)
        squares.append(dim * ((((decoded.keys - own.keys)[0].astype(np.float64)) @ y) ** 2).mean())
    interval = mean_interval(np.array(squares), 0.9999)
    assert interval.low <= quantization.prod_distortion(dim, bits) <= interval.high
    assert interval.high - interval.low < 0.2 * quantization.prod_distortion(dim, bits)


def test_every_stage_of_prod_does_something():
    """Ablation: the sketch's bit changes the numbers, lowers the error of inner products over mse at b - 1 bits of bias, costs a bit."""
    own = unit_layer(9, 200, 64)
    low, prod = reference.TurboQuant(2), reference.TurboQuant(3, kind="prod")
    a, b = (reference.decode(codec.encode(own)).keys for codec in (low, prod))
    correlated = [float((k * own.keys).sum() / (own.keys**2).sum()) for k in (a, b)]
    assert correlated[0] < 0.9 and abs(correlated[1] - 1) < 0.02
    assert not np.array_equal(a, b)


def test_sketch_entries_are_rounded_normals():
    from scipy import special

    from reference.sketch import SIGMA, _edges, sketch

    s = sketch(0, "test", 256, 256)
    entries = s.matrix.ravel().astype(np.int64)
    assert abs(entries.mean()) < 4 * 16 / 256 and abs(entries.std() / SIGMA - 1) < 0.02
    assert np.abs(s.matrix).sum(axis=1).max() * 2**s.bits <= 1 << 24
    edges = 2.0**32 * special.ndtr((np.arange(-128, 128) + 0.5) / 16)
    assert np.abs(edges - _edges()).max() < 0.5 - 1e-3  # far from a tie
    assert sketch(0, "test", 256, 256) is s and not np.array_equal(sketch(1, "test", 256, 256).matrix, s.matrix)


# -- rates and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
def test_a_number_costs_its_bits_its_share_of_a_norm_and_a_header(bits):
    for dim, value_dim in ((64, 64), (80, 128), (3, 1)):
        own = layer(1, heads=3, tokens=50, dim=dim, value_dim=value_dim)
        for kind in ("mse", "prod"):
            data = reference.TurboQuant(bits, kind=kind).encode(own)
            norm_bits = (16 if bits <= 6 else 32) * (2 if kind == "prod" and bits > 1 else 1)
            payload = sum(
                -(-own.kv_heads * own.tokens * d * bits // 8) + own.kv_heads * own.tokens * norm_bits // 8
                for d in (dim, value_dim)
            )
            table = 2 * 2 * (1 << (bits - 1 - (kind == "prod")) if bits - (kind == "prod") else 0)
            assert 0 <= len(data) - payload - table <= 60


def test_wrong_arguments_are_refused():
    for wrong, problem, match in (
        ({"bits": 0}, ValueError, "bits: expected 1 to 8, got 0"),
        ({"bits": 9}, ValueError, "bits"),
        ({"bits": 2.5}, TypeError, "bits: expected an int, got float"),
        ({"bits": True}, TypeError, "bits"),
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1 << 63}, ValueError, "seed"),
        ({"seed": 1.0}, TypeError, "seed"),
        ({"kind": "qjl"}, ValueError, "kind"),
        ({"rotation": "fft"}, ValueError, "rotation"),
    ):
        with pytest.raises(problem, match=match):
            reference.TurboQuant(**wrong)
    with pytest.raises(ValueError, match="keys: TurboQuant takes up to 1024 channels, got 1025"):
        reference.TurboQuant().encode(layer(0, tokens=1, dim=1025))
    own = layer(0, heads=2, tokens=3, dim=8, dtype="float64")
    own.values[1, 2, 3] = 1e300
    with pytest.raises(ValueError, match=r"values: .*float32 can hold.*1e\+300 at \(head 1, token 2, channel 3\)"):
        reference.TurboQuant().encode(own)


def test_decode_flops_counts_butterflies():
    own = layer(0, heads=2, tokens=5, dim=128, value_dim=96)
    codec = reference.TurboQuant(3)
    rows = 10
    assert codec.decode_flops(codec.encode(own)) == rows * 128 * (7 + 1) + rows * 96 * (5 + 3 + 1)
    haar = reference.TurboQuant(3, rotation="haar")
    assert haar.decode_flops(haar.encode(own)) == rows * (128 * (256 + 1) + 96 * (192 + 1))
    assert reference.Full().decode_flops(reference.Full().encode(own)) == 0


# -- short cuts are short cuts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [float(np.finfo(np.float32).max), 1.0])
@pytest.mark.parametrize("bits", [1, 2, 4, 5, 7])
@pytest.mark.parametrize("dim", [1, 6, 48, 128])
def test_prod_is_decoded_as_the_formula_has_it(dim, bits, limit):
    plan = _Plan(reference.TurboQuant(bits, kind="prod"), "key", dim)
    rng = np.random.default_rng(dim)
    vectors_ = 301 if bits == 2 else 300
    codes = rng.integers(0, 1 << bits, (dim, vectors_)).astype(np.uint8)
    stored = rng.integers(250 << plan.mantissa_bits, 262 << plan.mantissa_bits, (vectors_, plan.norms_each))
    m, s = plan._exact.matrix(), plan._sketch.matrix.astype(np.float64)
    q = np.where(codes >> (bits - 1), -1.0, 1.0)
    every = norms(stored, plan.mantissa_bits)
    root = np.sqrt(float(plan._exact.gain2))
    expected = (m.T @ (s.T @ q)).T * (np.sqrt(np.pi / 2) / SIGMA / dim * every[:, -1] / root)[:, None]
    if bits > 1:
        p = plan._signed[codes & ((1 << (bits - 1)) - 1)].astype(np.float64)
        gain = every[:, 0] / (2.0**plan.fraction_bits * np.sqrt(float(dim))) / root
        expected = (m.T @ p).T * gain[:, None] + expected
    expected = np.clip(expected * plan._signs, -limit, limit).astype(np.float32)
    out = np.full((vectors_, 1, dim), np.nan, np.float32)
    plan.decode(codes, stored, limit, out)
    assert np.array_equal(out[:, 0], expected)
    assert plan._turned is not None
    plan._turned = None  # as where S M has too large sums
    again = np.full_like(out, np.nan)
    plan.decode(codes, stored, limit, again)
    assert np.array_equal(again, out)


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("scale", [0.0, 2.0**-149, 2.0**-140, 1.0])
def test_no_zero_of_prod_comes_back_with_a_sign(bits, scale):
    """Of vectors that are 0, both terms are zeros of any sign; of tiny ones, float32 rounds their sum to a zero of any sign."""
    rng = np.random.default_rng(bits)
    keys = (scale * rng.integers(-3, 4, (2, 40, 16))).astype(np.float32)
    codec = reference.TurboQuant(bits=bits, kind="prod")
    found = codec.decode(codec.encode(kvtheory.Layer(keys, np.ones((2, 40, 4), np.float32)))).keys
    assert not np.signbit(found[found == 0]).any()
    if scale == 0:
        assert not found.any()
    elif scale < 2.0**-145:  # or nothing was rounded to zero
        assert (found == 0).any()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_prod_decodes_the_same_in_blocks_of_any_heads_and_from_any_rows(bits):
    """Codes that fill whole bytes are read from these; one key more, and a head number that no block is a multiple of, change no number."""
    rng = np.random.default_rng(bits)
    keys = rng.standard_normal((3, 700, 16)).astype(np.float32)
    codec = reference.TurboQuant(bits=bits, kind="prod")
    found = codec.decode(codec.encode(kvtheory.Layer(keys, keys)))
    for head in range(3):
        alone = codec.decode(codec.encode(kvtheory.Layer(keys[head : head + 1], keys[head : head + 1])))
        assert np.array_equal(alone.keys[0], found.keys[head]) and np.array_equal(alone.values[0], found.values[head])
    wide = codec.decode(codec.encode(kvtheory.Layer(keys.astype(np.float64), keys.astype(np.float64))))
    # float64 takes the way that is not short
    assert np.array_equal(wide.keys, found.keys.astype(np.float64))
