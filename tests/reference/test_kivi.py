"""KIVI: every bit against plain numbers, which tokens are recent, and whose scale a number shares."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from reference import minmax, packing, stream
from tests.reference import strangers
from tests.reference.independent import bits_of
from tests.reference.strategies import layer, layers

LARGEST = float(np.finfo(np.float32).max)
shapes = st.tuples(st.integers(1, 8), st.integers(1, 3), st.integers(1, 2)).map(lambda s: (s[0], s[1], s[1] * s[2]))


def raw(data):
    return [bytes(part.rest()) for part in stream.read(data)[1][0]]


# -- every bit ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(layers(most_numbers=600), shapes)
def test_bytes_are_those_of_plain_numbers(drawn, parameters):
    bits, group, window = parameters
    parts = raw(reference.KIVI(*parameters).encode(drawn))
    keys, values = drawn.keys.astype(np.float32), drawn.values.astype(np.float32)
    coded_keys, coded_values = drawn.tokens - drawn.tokens % window, max(0, drawn.tokens - window)
    cut = {
        1: [
            keys[h, t : t + group, c]
            for t in range(0, coded_keys, group)
            for h in range(drawn.kv_heads)
            for c in range(drawn.head_dim)
        ],
        5: [
            values[h, t, c : c + group]
            for t in range(coded_values)
            for h in range(drawn.kv_heads)
            for c in range(0, drawn.value_dim, group)
        ],
    }
    for at, groups in cut.items():
        expected = [strangers.encode_group([float(v) for v in own], bits) for own in groups]
        kind = minmax.zero_dtype((drawn.keys if at == 1 else drawn.values).dtype)
        zeros = np.array([z for z, _, _ in expected], np.float32).astype(kind)
        assert zeros.tobytes() == parts[at]
        assert b"".join(code.to_bytes(2, "little") for _, code, _ in expected) == parts[at + 1]
        every = [c for _, _, codes in expected for c in codes]
        assert bits_of(parts[at + 2], bits, len(every)) == every
    assert parts[4] == np.ascontiguousarray(drawn.keys[:, coded_keys:].transpose(1, 0, 2)).tobytes()
    assert parts[8] == np.ascontiguousarray(drawn.values[:, coded_values:].transpose(1, 0, 2)).tobytes()


@settings(max_examples=40)
@given(layers(most_numbers=600), shapes)
def test_numbers_are_those_of_the_document(drawn, parameters):
    wide = drawn.replace(keys=drawn.keys.astype(np.float32), values=drawn.values.astype(np.float32))
    data = reference.KIVI(*parameters).encode(wide)
    for found, expected in zip(strangers.decode(data), _sides(reference.decode(data)), strict=True):
        assert np.array_equal(np.array(found, np.float32).reshape(expected.shape), expected)


def _sides(decoded):
    return decoded.keys, decoded.values


@given(st.floats(2.0**-149, 2 * LARGEST), st.integers(1, 8))
@example(0.0, 2)
@example(2 * LARGEST, 1)
@example(2 * LARGEST, 2)
@example(2.0**-149, 8)
@example(3.0, 2)
@example(511 / 256 * 3, 2)
@example(512.5 / 256 * 3, 2)
@example(3 * (1 + 2.0**-40), 2)
@example(1 + 2.0**-52, 1)
def test_scales_are_the_least_that_reach(size, bits):
    code = minmax.scale_codes(np.array([size]), bits)
    scale, wanted = Fraction(float(minmax.scales(code)[0])), Fraction(size / (2**bits - 1))
    assert scale == Fraction(strangers.scale_of(int(code[0])))
    if wanted == 0:
        assert scale == 0
    elif code[0] == 65279:  # nothing above it
        assert wanted < scale * Fraction(512, 511)
    else:
        assert scale >= wanted
        assert code[0] == 256 or Fraction(strangers.scale_of(int(code[0]) - 1)) < wanted


@given(
    st.lists(st.floats(-LARGEST, LARGEST, width=32), min_size=1, max_size=9),
    st.integers(1, 8),
    st.sampled_from([1.0, 2.0**-60, 2.0**-120]),
)
@example([LARGEST, -LARGEST, 0.0], 1, 1.0)
@example([LARGEST, -LARGEST, 0.0], 8, 1.0)
@example([2.0**125, 2.0**125 + 2.0**102], 3, 1.0)
@example([-0.0, 0.0, -0.0], 2, 1.0)
def test_groups_are_within_half_a_scale_and_equal_numbers_exact(numbers, bits, factor):
    x = (np.array(numbers) * factor).astype(np.float32)
    piece = minmax.Groups(x.size, x.size, bits, x.dtype).encode(x[None])
    zeros, stored = np.frombuffer(piece.zeros, "<f4"), np.frombuffer(piece.scales, "<u2").astype(np.uint16)
    codes = np.array(
        bits_of(piece.codes.tobytes(), bits, x.size) if x.size * bits % 8 == 0 else piece.codes[0], np.uint8
    )[:, None]
    assert codes.max() < 2**bits
    out = np.empty((x.size, 1), np.float32)
    back = minmax.decode(codes, zeros, stored, bits, LARGEST, out)[:, 0]
    scale = Fraction(float(minmax.scales(stored)[0]))
    off = max(abs(Fraction(float(a)) - Fraction(float(b))) for a, b in zip(x, back, strict=True))
    # three roundings to float32 of numbers up to the range on the way there, one of the result on the way back
    most = Fraction(float(np.abs(x).max()))
    slack = (scale * 2**bits * 4 + 2 * most) / 2**24
    if stored[0] == minmax.LARGEST_CODE:
        slack += scale / 256
    assert off <= scale / 2 + slack
    if (x == x[0]).all():
        assert off == 0 and scale == 0 and not np.signbit(back[back == 0]).any()
    assert [strangers.encode_group([float(v) for v in x], bits)] == [
        (float(zeros[0]), int(stored[0]), codes[:, 0].tolist())
    ]


def test_constant_channels_and_zero_layers_come_back_exactly():
    for dtype in ("float16", "bfloat16", "float32"):
        own = layer(1, heads=2, tokens=80, dim=5, value_dim=40, dtype=dtype)
        keys = np.repeat(own.keys[:, :1], 80, axis=1)  # each channel constant in time
        values = np.repeat(own.values[:, :, :1], 40, axis=2)  # each token constant over channels
        for bits in (1, 2, 8):
            decoded = reference.decode(reference.KIVI(bits, 32, 32).encode(own.replace(keys=keys, values=values)))
            assert np.array_equal(decoded.keys, keys) and np.array_equal(decoded.values, values)
    nothing = own.replace(keys=0 * own.keys, values=0 * own.values)
    decoded = reference.decode(reference.KIVI(2, 8, 8).encode(nothing))
    assert not decoded.keys.any() and not decoded.values.any()


def test_from_1e_minus_30_to_1e30():
    """Any factor: the same relative error; powers of two: the same codes (tests/reference/test_codec.py)."""
    own = layer(2, heads=1, tokens=64, dim=8)
    codec = reference.KIVI(3, 16, 16)
    errors = []
    for factor in (1e-30, 1e-10, 1.0, 1e10, 1e30):
        x = (own.keys.astype(np.float64) * factor).astype(np.float32)
        decoded = reference.decode(codec.encode(own.replace(keys=x, values=x)))
        for back in (decoded.keys, decoded.values):
            errors.append(float(np.linalg.norm((back / factor - x / factor).astype(np.float64))))
    assert np.ptp(errors[::2]) < 0.02 * errors[0] and np.ptp(errors[1::2]) < 0.02 * errors[1]


# -- recent tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group, window", [(1, 1), (2, 4), (4, 4), (8, 24)])
def test_which_tokens_are_recent(group, window):
    """Keys: whole windows are coded; values: each when it is `window` tokens old. Nothing that is coded changes later."""
    codec = reference.KIVI(1, group, window)
    own = layer(3, heads=2, tokens=3 * window + 2, dim=4, value_dim=3)
    before = None
    for tokens in range(own.tokens + 1):
        cut = own.replace(keys=own.keys[:, :tokens], values=own.values[:, :tokens], positions=own.positions[:tokens])
        decoded = reference.decode(codec.encode(cut))
        keys, values = codec.coded(tokens)
        assert keys == tokens // window * window and values == max(0, tokens - window)
        exact_keys = (decoded.keys == cut.keys).all(axis=(0, 2))
        exact_values = (decoded.values == cut.values).all(axis=(0, 2))
        assert exact_keys[keys:].all() and exact_values[values:].all()
        if group > 4:  # a token that no group has as its minimum in every channel and head
            assert not exact_keys[:keys].any()
        if before is not None:
            old_keys, old_values = codec.coded(tokens - 1)
            assert np.array_equal(decoded.keys[:, :old_keys], before.keys[:, :old_keys])
            assert np.array_equal(decoded.values[:, :old_values], before.values[:, :old_values])
        before = decoded


def test_appending_one_by_one_and_in_pieces():
    own = layer(4, heads=2, tokens=70, dim=6, value_dim=5, dtype="float16")
    codec = reference.KIVI(2, 4, 12)
    for steps in ([1] * 70, [0, 13, 12, 40, 5], [70]):
        appender = codec.appender(own.replace(keys=own.keys[:, :0], values=own.values[:, :0], positions=None))
        at = 0
        for step in steps:
            appender.append(own.keys[:, at : at + step], own.values[:, at : at + step])
            at += step
            cut = own.replace(keys=own.keys[:, :at], values=own.values[:, :at], positions=own.positions[:at])
            assert appender.stream() == codec.encode(cut)


def test_the_appender_holds_no_view_of_its_input():
    own = layer(5, tokens=5, dim=4)
    codec = reference.KIVI(2, 2, 4)
    appender = codec.appender(own)
    expected = codec.encode(own)
    own.keys[...] = 7
    own.values[...] = 7
    assert appender.stream() == expected


def test_nan_is_refused_wherever_it_is():
    codec = reference.KIVI(2, 2, 4)
    for token in range(11):  # coded and recent ones
        for side in ("keys", "values"):
            own = layer(6, heads=2, tokens=11, dim=4)
            getattr(own, side)[1, token, 2] = np.nan
            with pytest.raises(ValueError, match=rf"{side}: .*nan at \(head 1, token {token}, channel 2\)"):
                codec.encode(own)
            own = layer(6, heads=2, tokens=11, dim=4, dtype="float64")
            getattr(own, side)[1, token, 2] = 1e300
            problem = rf"{side}: .*float32 can hold, in which KIVI.*1e\+300 at \(head 1, token {token}, channel 2\)"
            with pytest.raises(ValueError, match=problem):
                codec.encode(own)
            appender = codec.appender(layer(6, heads=2, tokens=0, dim=4, dtype="float64"))
            before = appender.stream()
            with pytest.raises(ValueError, match=problem):
                appender.append(own.keys, own.values)
            assert appender.stream() == before and appender.tokens == 0


# -- whose scale -------------------------------------------------------------------------------------------------------


def test_a_key_shares_its_scale_with_its_channel_and_a_value_with_its_token():
    own = layer(7, heads=2, tokens=48, dim=8)
    codec = reference.KIVI(2, 16, 16)
    plain = reference.decode(codec.encode(own))
    loud = own.keys.copy()
    loud[:, :, 3] *= 1000
    decoded = reference.decode(codec.encode(own.replace(keys=loud))).keys
    others = [c for c in range(8) if c != 3]
    assert np.array_equal(decoded[:, :, others], plain.keys[:, :, others])
    loud = own.keys.copy()
    loud[0, 20] *= 1000  # one token: its group of 16, and no other head
    decoded = reference.decode(codec.encode(own.replace(keys=loud))).keys
    same = (decoded == plain.keys).all(axis=2)
    assert same[1].all() and same[0, :16].all() and same[0, 32:].all() and not same[0, 16:32].any()
    loud = own.values.copy()
    loud[0, 20] *= 1000
    decoded = reference.decode(codec.encode(own.replace(values=loud))).values
    same = (decoded == plain.values).all(axis=2)
    assert same[1].all() and same[0].sum() == 47 and not same[0, 20]


@pytest.mark.parametrize("bits", [2, 4])
def test_outlier_channels_are_why_keys_go_by_channel(bits):
    """Ablation: the same numbers coded as values (by token) lose the channels that share a group with the loud one."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((1, 512, 64)).astype(np.float32)
    x[:, :, 5] = 50 + x[:, :, 5]
    decoded = reference.decode(reference.KIVI(bits, 32, 32).encode(kvtheory.Layer(x, x)))
    quiet = [c for c in range(32) if c != 5]  # the group of channel 5
    by_channel, by_token = (((side - x)[:, :480, quiet] ** 2).mean() for side in (decoded.keys, decoded.values))
    assert by_token > 20 * by_channel


def straightforward(x, bits):
    """Min/max quantisation along the last axis in float64, scale and zero exact."""
    low, high = x.min(axis=-1, keepdims=True), x.max(axis=-1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    return np.round((x - low) / np.where(scale > 0, scale, 1)) * scale + low


@pytest.mark.parametrize("bits", range(1, 9))
def test_distortion_is_that_of_a_straightforward_quantiser(bits):
    """A stored scale is larger by at most 2^-8, and a group's maximum then off by at most min(L 2^-8, 1/2) of it, in place of 0.

    30 other numbers have s^2 / 12 each, so that the mean square grows by at most the sum of both.
    """
    rng = np.random.default_rng(bits)
    x = rng.standard_normal((2, 1024, 64)).astype(np.float32)
    decoded = reference.decode(reference.KIVI(bits, 32, 32).encode(kvtheory.Layer(x, x)))
    wide = x.astype(np.float64)
    keys = straightforward(wide.reshape(2, 32, 32, 64).swapaxes(2, 3), bits).swapaxes(2, 3).reshape(x.shape)
    values = straightforward(wide.reshape(2, 1024, 2, 32), bits).reshape(x.shape)
    for found, expected, tokens in ((decoded.keys, keys, 1024), (decoded.values, values, 992)):
        ratio = ((found - wide)[:, :tokens] ** 2).sum() / ((expected - wide)[:, :tokens] ** 2).sum()
        assert 1 < ratio < (1 + 2**-8) ** 2 + 12 / 30 * min((2**bits - 1) / 256, 0.5) ** 2


def test_every_bit_more_is_less_error():
    own = layer(9, heads=1, tokens=512, dim=32)
    errors = []
    for bits in range(1, 9):
        decoded = reference.decode(reference.KIVI(bits, 32, 32).encode(own))
        errors.append(float(((decoded.keys - own.keys) ** 2).sum()))
    assert all(a / b > 3.5 for a, b in itertools.pairwise(errors))


# -- rates and refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, zero_bits, full_bits", [("float16", 16, 16), ("bfloat16", 16, 16), ("float32", 32, 32), ("float64", 32, 64)])  # fmt: skip
def test_what_a_number_costs(dtype, zero_bits, full_bits):
    for bits, group, window, tokens, dim, value_dim in (
        (2, 32, 128, 300, 64, 64),
        (4, 32, 128, 256, 24, 80),
        (3, 8, 16, 45, 3, 5),
        (1, 3, 6, 40, 5, 7),
    ):
        own = layer(10, heads=3, tokens=tokens, dim=dim, value_dim=value_dim, dtype=dtype)
        keys, values = tokens // window * window, max(0, tokens - window)
        key_groups, value_groups = keys // group * 3 * dim, values * 3 * -(-value_dim // group)
        payload = (
            (key_groups + value_groups) * (zero_bits + 16) // 8
            + -(-keys * 3 * dim * bits // 8)
            + -(-values * 3 * value_dim * bits // 8)
            + 3 * ((tokens - keys) * dim + (tokens - values) * value_dim) * full_bits // 8
        )
        data = reference.KIVI(bits, group, window).encode(own)
        assert 0 <= len(data) - payload <= 60


def test_two_bits_are_three_and_more():
    """The defaults on float16 at 8,192 tokens: 2 + 32/32, and 128 values of 16 bits in place of 3."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((1, 8192, 128)).astype(np.float16)
    own = kvtheory.Layer(x, x)
    held = reference.held_bits(reference.KIVI().encode(own), own)
    assert abs(held - (3 + 0.5 * 13 * 128 / 8192)) < 1e-3


def test_wrong_arguments_are_refused():
    for wrong, problem, match in (
        ({"bits": 0}, ValueError, "bits: expected 1 to 8, got 0"),
        ({"bits": 9}, ValueError, "bits"),
        ({"bits": 2.0}, TypeError, "bits: expected an int, got float"),
        ({"group": 0}, ValueError, "group: expected 1 to 65536, got 0"),
        ({"group": True}, TypeError, "group"),
        ({"window": 0}, ValueError, "window"),
        ({"window": 100}, ValueError, "window: expected a multiple of group = 32, got 100"),
    ):
        with pytest.raises(problem, match=match):
            reference.KIVI(**wrong)


def test_decode_flops_counts_coded_numbers():
    own = layer(12, heads=2, tokens=300, dim=8, value_dim=5)
    codec = reference.KIVI()
    assert codec.decode_flops(codec.encode(own)) == 2 * 2 * (256 * 8 + 172 * 5)


def test_on_the_sample_cache():
    for own in kvtheory.sample_cache():
        errors = []
        for bits in (2, 4):
            _, held, error = reference.roundtrip(reference.KIVI(bits), own)
            errors.append(error)
            assert bits + 1 < held < bits + 1 + 13 / 4
        assert errors[0] > 4 * errors[1] > 0


# -- short cuts are short cuts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("tokens", [3, 300])
@pytest.mark.parametrize(("dim", "group"), [(64, 32), (64, 64), (40, 16), (24, 8), (12, 4), (4, 4)])
@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_are_decoded_as_the_formula_has_it(bits, dim, group, tokens, dtype):
    # c s has at most 17 bits, so that one rounding is all there is, here and there
    rng = np.random.default_rng(bits)
    heads, groups = 3, minmax.Groups(dim, group, bits, np.dtype(dtype))
    zeros = rng.standard_normal((tokens * heads, groups.each)).astype(np.float32)
    stored = minmax.scale_codes(1 + 2 * rng.exponential(size=zeros.shape), bits)
    codes = rng.integers(0, 1 << bits, (tokens * heads, dim), np.uint8)
    rows = codes
    if groups.bytewise:
        rows = np.frombuffer(packing.pack(codes, bits), np.uint8).reshape(tokens * heads, -1)
    out = np.full((heads, tokens, dim), np.nan, dtype)
    groups.decode_tokens(zeros, stored, rows, 2.5, out)  # some numbers are beyond
    free = np.full_like(out, np.nan)
    groups.decode_tokens(zeros, stored, rows, 1e4, free)
    place = np.arange(dim) // group
    exact = codes * minmax.scales(stored)[:, place] + zeros[:, place].astype(np.float64)
    expected = exact.astype(np.float32).reshape(tokens, heads, dim).transpose(1, 0, 2)
    assert np.abs(expected).max() > 2.5
    assert np.array_equal(free, expected.astype(dtype))
    assert np.array_equal(out, np.clip(expected, -2.5, 2.5).astype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("dim", "value_dim", "group"), [(8, 32, 16), (5, 24, 8), (3, 21, 6), (1, 1, 4), (12, 10, 1), (16, 7, 24)]
)
@pytest.mark.parametrize("bits", range(1, 9))
def test_blocks_and_memory_change_nothing(monkeypatch, bits, dim, value_dim, group, dtype):
    own = layer(bits, heads=3, tokens=7 * group + 1, dim=dim, value_dim=value_dim, dtype=dtype)
    own.keys[2, 3 * group :] *= 1000  # one head, and some groups, unlike the others
    codec = reference.KIVI(bits, group, group)
    data = codec.encode(own)
    whole = codec.decode(data)

    def everywhere(change):
        return own.replace(keys=change(own.keys), values=change(own.values))

    def apart(x):
        out = np.zeros(tuple(3 * n for n in x.shape), x.dtype)[::3, ::3, ::3]
        out[...] = x
        return out

    for change in (np.asfortranarray, lambda x: x[:, ::-1].copy()[:, ::-1], apart):
        assert codec.encode(everywhere(change)) == data
    for numbers in (1, 3 * group * dim, 5 * 3 * group * dim):
        monkeypatch.setattr(minmax, "NUMBERS", numbers)
        assert codec.encode(own) == data
        found = codec.decode(data)
        assert np.array_equal(found.keys, whole.keys) and np.array_equal(found.values, whole.values)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_one_huge_group_takes_its_block_off_the_short_cut(bits):
    rng = np.random.default_rng(bits)
    keys = rng.standard_normal((2, 600, 16)).astype(np.float32)
    huge = keys.copy()
    huge[1, 300, :8] = np.linspace(-LARGEST, LARGEST, 8)
    codec = reference.KIVI(bits, group=8, window=8)
    plain, found = (codec.decode(codec.encode(kvtheory.Layer(keys, values))).values for values in (keys, huge))
    assert np.abs(found[1, 300, :8] - huge[1, 300, :8].astype(np.float64)).max() <= 1.01 * LARGEST / ((1 << bits) - 1)
    found[1, 300, :8] = plain[1, 300, :8]
    assert np.array_equal(found, plain)
