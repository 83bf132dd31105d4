"""KVQuant: what it is made of (places, exact RoPE, levels), and what the paper says of it."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvtheory
import reference
from reference import CorruptStream, StateMismatch, nuq, rotary, stream
from reference.places import Places, read_places
from reference.stream import Reader
from tests.reference.strategies import DTYPES, layer, text

fit = reference.KVQuant.fit


def rms(a, b):
    """Root mean square error over that of b."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return float(np.sqrt(((a - b) ** 2).mean() / (b**2).mean()))


def through(codec, own):
    return reference.decode(codec.encode(own), codec.state)


def sizes(data):
    return {part.name: part.bytes for part in reference.inspect(data).parts}


# -- places ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 700), max_size=30), st.integers(0, 600), st.lists(st.integers(0, 9000), max_size=4))
def test_places_come_back_however_they_grew(gaps, rest, cuts):
    at = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    chosen = np.zeros(int(at[-1]) + 1 + rest if at.size else rest, np.bool_)
    chosen[at] = True
    whole, grown = Places(), Places()
    whole.append(chosen)
    for piece in np.split(chosen, sorted(min(cut, chosen.size) for cut in cuts)):
        grown.append(piece)
    data = whole.bytes()
    assert grown.bytes() == data and len(data) == sum(1 + gap // 255 for gap in gaps)
    assert np.array_equal(read_places(Reader(data), chosen.size, "places"), at)
    if at.size:
        with pytest.raises(CorruptStream, match="expected places below"):
            read_places(Reader(data), int(at[-1]), "places")
        with pytest.raises(CorruptStream, match="names no number"):
            read_places(Reader(data + b"\xff"), 1 << 20, "places")


# -- RoPE --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_is_that_of_the_theory(layout):
    rope = kvtheory.Rope(10000.0 ** (-np.arange(24) / 24), layout, 1.25)
    turn = rotary.Rotary(rope)
    own = layer(1, tokens=40, dim=64).keys
    positions = np.cumsum(np.arange(40) % 7) * 100
    applied = turn.apply(own, positions)
    assert np.abs(applied - rope.apply(own, positions)).max() < 1e-11
    assert np.abs(turn.undo(applied, positions) - own).max() < 1e-14
    assert np.array_equal(applied[..., 48:], own[..., 48:])
    by_head = turn.apply(own, np.stack([positions, positions + 5]))
    assert np.array_equal(by_head[0], applied[0])
    assert np.array_equal(by_head[1], turn.apply(own[1], positions + 5))


def test_angles_are_right_to_the_last_bits():
    flint = pytest.importorskip("flint")
    rng = np.random.default_rng(0)
    frequencies = np.concatenate(
        [10.0 ** rng.uniform(-6, 2, 30), -(10.0 ** rng.uniform(-3, 0, 4)), [0.0, 1.0, np.pi / 2]]
    )
    positions = np.array([0, 1, 2, 17, 4095, 131072, 1 << 30])
    cos, sin = rotary.Rotary(kvtheory.Rope(frequencies)).tables(positions)
    with flint.ctx.workprec(200):
        for i, p in enumerate(positions.tolist()):
            for j, frequency in enumerate(frequencies.tolist()):
                angle = flint.arb(p) * flint.arb(frequency)
                # of the angle position 2^-65 turns, of the polynomials two roundings
                most = p * 2 * np.pi * 2.0**-65 + 2.0**-52
                assert abs(float(angle.cos() - cos[i, j])) <= most and abs(float(angle.sin() - sin[i, j])) <= most


def test_extreme_ropes_are_refused():
    for rope in (kvtheory.Rope([2.0**33]), kvtheory.Rope([1.0], attention_scaling=1e-12)):
        with pytest.raises(ValueError, match="rope: expected"):
            fit([layer(1, tokens=5, dim=4, rope=rope)])
    good = rotary.write_rope(kvtheory.Rope([0.5, 0.25], "interleaved", 2.0))
    assert rotary.read_rope(Reader(good), 4) == kvtheory.Rope([0.5, 0.25], "interleaved", 2.0)
    for wrong in (
        b"\x02" + good[1:],
        good[:1] + b"\xff" * 8 + good[9:],
        good[:9] + b"\0" + good[10:],
        good[:-8] + b"\xff" * 8,
    ):
        with pytest.raises(CorruptStream):
            rotary.read_rope(Reader(wrong), 4)
    with pytest.raises(CorruptStream, match="pairs of the rope"):
        rotary.read_rope(Reader(good), 3)


# -- levels ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 1 << 20), st.integers(1, 4))
def test_q_norm_restores_mean_and_spread(seed, bits):
    rng = np.random.default_rng(seed)
    numbers = np.clip(rng.standard_t(4, 3000) / 5 + rng.uniform(-0.2, 0.2), -1, 1)
    weights = rng.uniform(0, 4, 3000)
    for q_norm in (False, True):
        levels = nuq.fit(numbers, weights, bits, True, q_norm)
        quantised = levels.numbers(levels.codes(numbers))
        if q_norm:
            assert quantised.mean() == pytest.approx(numbers.mean(), abs=1e-6)
            assert quantised.std() == pytest.approx(numbers.std(), rel=1e-5)
        elif bits <= 3:  # centroids: the spread shrinks
            weighted = np.average((quantised - np.average(quantised, weights=weights)) ** 2, weights=weights)
            assert weighted < np.average((numbers - np.average(numbers, weights=weights)) ** 2, weights=weights)


def test_levels_are_the_weighted_optimum():
    rng = np.random.default_rng(3)
    numbers, weights = rng.uniform(-1, 1, 2000), rng.uniform(0, 1, 2000)
    levels = nuq.fit(numbers, weights, 3, True, False)
    exact = kvtheory.rate.lloyd_max(numbers, 8, weights=weights)
    assert np.abs(levels.points - exact.points).max() < 5e-3
    ours = np.average((numbers - levels.numbers(levels.codes(numbers))) ** 2, weights=weights)
    assert ours <= exact.distortion(numbers, weights) * (1 + 1e-3)
    # every code is the nearest level, the lower one halfway
    nearest = np.argmin(np.abs(numbers[:, None] - levels.points.astype(np.float64)), axis=1)
    assert np.array_equal(levels.codes(numbers), nearest)
    assert nuq.uniform(2).points.tolist() == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    assert nuq.uniform(1).codes(np.array([-0.1, 0.0, 0.1])).tolist() == [0, 0, 1]


# -- what the paper says -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_nuq_beats_uniform_on_heavy_tails(bits):
    """At the same bits: the streams have the same length but for outliers, which are the same."""
    make = kvtheory.synthetic.make
    calibration, own = ([make("heavy_tail", tokens=512, seed=s).replace(index=0)] for s in (1, 2))
    for outliers in (0.0, 0.01):
        error = {}
        for levels in ("nuq", "uniform"):
            codec = fit(calibration, bits, outliers, levels=levels, q_norm=False)
            data = codec.encode(own[0])
            decoded = reference.decode(data, codec.state)
            error[levels] = rms(decoded.keys, own[0].keys), rms(decoded.values, own[0].values), len(data)
        assert error["nuq"][2] == error["uniform"][2]
        assert error["nuq"][0] < error["uniform"][0] and error["nuq"][1] < error["uniform"][1]


def test_keys_before_rope_are_better_where_channels_are_outlying():
    """One channel of each head has a mean of 20: RoPE turns it into its pair, and both range over 40 where 99 % of the others range over 5.

    So squared errors, which go as ranges squared, rise from 16 x 5^2 to 14 x 5^2 + 2 x 40^2: nine times.
    """
    rope = kvtheory.Rope(100.0 ** (-np.arange(8) / 8))

    def rotated(seed):
        own = layer(seed, heads=2, tokens=300, dim=16)
        keys = own.keys.astype(np.float64)
        keys[:, :, 1] += 20
        return own.replace(keys=rope.apply(keys, own.positions).astype(np.float32), rope=rope)

    error = {}
    for pre in (True, False):
        codec = fit([rotated(1)], 3, pre_rope=pre)
        error[pre] = rms(through(codec, rotated(2)).keys, rotated(2).keys)
    assert 2 < error[False] / error[True] < 4
    # without a rope there is nothing to undo: the same stream but for the parameter
    plain = layer(3, tokens=50)
    before, after = (fit([plain], pre_rope=pre) for pre in (True, False))
    assert np.array_equal(through(before, plain).keys, through(after, plain).keys)


def test_every_stage_helps_on_the_real_cache():
    """On the second half of a text, fitted to its first half: levels, RoPE, outliers, sinks; Q-Norm is another matter (below)."""
    cache = kvtheory.sample_cache()
    half = [
        one.replace(
            keys=one.keys[:, :192],
            values=one.values[:, :192],
            positions=one.positions[:192],
            queries=None,
            query_positions=None,
        )
        for one in cache
    ]
    for bits in (2, 3):
        errors = {}
        for name, change in (
            ("all", {}), ("levels", {"levels": "uniform"}), ("rope", {"pre_rope": False}),
            ("outliers", {"outliers": 0.0}), ("sinks", {"sinks": 0}),
        ):  # fmt: skip
            codec = fit(half, bits, q_norm=False, **change)
            errors[name] = [reference.roundtrip(codec, one)[2] for one in cache]
        for name in ("levels", "rope", "outliers", "sinks"):
            assert all(worse > best for worse, best in zip(errors[name], errors["all"])), (bits, name, errors)


def test_true_counts_of_outliers_are_held():
    layers = text("A", tokens=120)
    own = text("B", tokens=90)[0]
    for outliers, sinks in ((0.01, 1), (0.1, 4), (0.3, 0), (0.0, 1)):
        codec = fit(layers, 2, outliers, sinks)
        data = codec.encode(own)
        table = codec.tables[0]
        before = rotary.rotary(own.rope).undo(own.keys.transpose(1, 0, 2), own.positions[:, None])[sinks:]
        keys = int(((before < table.low) | (before > table.high)).sum()) if outliers else 0
        values = sum(_left_out(row, outliers) for row in own.values[:, sinks:].reshape(-1, own.value_dim))
        held = sizes(data)
        assert held["key outliers"] == 4 * keys and held["value outliers"] == 4 * values
        counts = [sum(byte < 255 for byte in stream.read(data)[1][0][i].rest()) for i in (4, 9)]
        assert counts == [keys, values]
        assert values <= np.floor(outliers * own.value_dim + 0.5) * 2 * (90 - sinks)
        # and the decoder is given these numbers: of values exactly, of keys before RoPE in float32
        decoded = reference.decode(data, codec.state)
        back = rotary.rotary(own.rope).undo(decoded.keys.transpose(1, 0, 2), own.positions[:, None])[sinks:]
        outside = ((before < table.low) | (before > table.high)) & (outliers > 0)
        assert np.abs(back - before)[outside].max(initial=0) <= 1e-6 * np.abs(before).max()


def _left_out(row, outliers):
    """Numbers outside of the narrowest range that leaves at most m out, by trying all of them."""
    x, m = np.sort(row), int(np.floor(outliers * row.size + 0.5))
    spans = [(float(x[row.size - 1 - m + j]) - float(x[j]), j) for j in range(m + 1)]
    j = min(spans)[1]
    return int(((row < x[j]) | (row > x[row.size - 1 - m + j])).sum())


def test_outliers_of_values_come_back_exactly():
    for dtype in ("float16", "bfloat16", "float32"):
        layers = [layer(s, tokens=60, dim=8, value_dim=100, dtype=dtype, index=0) for s in (1, 2)]
        own = layers[1]
        own.values[1, 7, 3] = -7000
        decoded = through(fit(layers[:1], 2, 0.02), own)
        # the largest or the least number of a row is left out, if not both
        exact = decoded.values == own.values
        assert exact[1, 7, 3]
        ends = np.stack(
            [np.argmin(own.values.astype(np.float32), -1), np.argmax(own.values.astype(np.float32), -1)], -1
        )
        assert np.take_along_axis(exact, ends, axis=-1).any(axis=-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_come_back_bit_for_bit(dtype):
    calibration = text("A")
    for sinks in (0, 1, 5, 200):
        codec = fit(calibration, 2, sinks=sinks) if sinks < 96 else fit(text("A", tokens=300), 2, sinks=sinks)
        own = text("B", tokens=40, dtype=dtype)[1]
        own.keys[0, 0, 0], own.values[1, 0, 2] = -0.0, -0.0
        decoded = through(codec, own)
        first = min(sinks, 40)
        for side in ("keys", "values"):
            exact, found = getattr(own, side)[:, :first], getattr(decoded, side)
            assert np.ascontiguousarray(exact).tobytes() == np.ascontiguousarray(found[:, :first]).tobytes()
            assert first == 40 or not np.array_equal(getattr(own, side)[:, first], found[:, first])


def test_held_bits_by_hand():
    own = text("B", tokens=65, dtype="float16", dim=16, value_dim=64)[0]
    codec = fit(text("A", dim=16, value_dim=64), 3, sinks=1)
    data = codec.encode(own)
    held = sizes(data)
    rows = 2 * 64
    counts = held["key outliers"] // 2, held["value outliers"] // 2
    assert held["key codes"] == rows * 16 * 3 // 8 and held["value codes"] == rows * 64 * 3 // 8
    assert held["value zeros"] == held["value scales"] == 2 * rows
    assert held["key sinks"] == 2 * 2 * 16 and held["value sinks"] == 2 * 2 * 64
    assert counts[1] == rows  # 1 % of 64 channels is .64, one number
    assert held["value places"] >= counts[1] and held["key places"] >= counts[0]
    # 8 varints and a byte of types and positions; magic, version, kind, name, parameters, digest, 11 lengths, checksum
    assert held["shape"] == 5 + 1 + 2 and sum(held.values()) == len(data)
    numbers = 2 * 65 * (16 + 64)
    rate = 8 * len(data) / numbers
    assert reference.held_bits(data, own) == rate
    by_hand = 8 * (held["container"] + 8) + 16 * 2 * 80  # header and sinks
    by_hand += rows * (16 * 3 + 64 * 3 + 32) + sum(counts) * 16 + 8 * (held["key places"] + held["value places"])
    assert rate == by_hand / numbers


def test_errors_of_numbers_inside_are_within_half_a_gap():
    codec = fit([layer(1, tokens=80, dim=8, value_dim=6, index=0)], 3, 0.05, 2, q_norm=False)
    own = layer(2, tokens=50, dim=8, value_dim=6, index=0)
    decoded, table = through(codec, own), codec.tables[0]
    inside = (own.keys >= table.low[:, None]) & (own.keys <= table.high[:, None])
    points = np.concatenate([[-1], table.key_levels.points.astype(np.float64), [1]])
    widest = np.max(np.append(np.diff(points[1:-1]) / 2, [points[1] - points[0], points[-1] - points[-2]]))
    most = table.half_range[:, None] * widest * (1 + 1e-5)
    assert (np.abs(decoded.keys - own.keys)[inside] <= np.broadcast_to(most, own.keys.shape)[inside]).all()


def test_fisher_information_weighs_the_levels():
    layers = text("A")
    codec = fit(layers, 3)
    assert codec.fisher == {3: (True, True), 5: (True, True)}
    assert "fisher" not in repr(codec)
    without = [one.replace(extras={}) for one in layers]
    assert fit(without, 3).fisher == {3: (False, False), 5: (False, False)}
    mixed = [layers[0].replace(extras={k: v for k, v in layers[0].extras.items() if k != "value_fisher"}), layers[1]]
    assert fit(mixed, 3).fisher == {3: (True, False), 5: (True, True)}
    # pooled texts: only where all have it
    assert fit([layers[0], without[0].replace(keys=layers[0].keys / 2)], 3).fisher == {3: (False, False)}
    # all the information in one channel: the levels are the best for it
    extras = {"key_fisher_pre_rope": np.full((2, 16), 1e-6)}
    extras["key_fisher_pre_rope"][0, 11] = 1
    wise = fit([without[0].replace(extras=extras)], 2, 0.0, q_norm=False)
    blind = fit(without[:1], 2, 0.0, q_norm=False)
    turn = rotary.rotary(layers[0].rope)

    def error(codec):
        own = layers[0]
        off = through(codec, own).keys.astype(np.float64) - own.keys
        return np.square(turn.undo(off, own.positions)[0, :, 11]).mean()

    assert error(wise) < error(blind)
    # after RoPE only: averaged over the pairs that it mixes
    after = {"key_fisher": np.arange(32.0).reshape(2, 16)}
    pairs = (after["key_fisher"] + np.roll(after["key_fisher"], 8, axis=1)) / 2
    one, other = (fit([without[0].replace(extras=e)], 3) for e in (after, {"key_fisher_pre_rope": pairs}))
    assert one.state == other.state
    # the scale of the information does not matter, zeros are no harm
    scaled = fit([layers[0].replace(extras={k: v * 2.0**-60 for k, v in layers[0].extras.items()})], 3)
    assert np.array_equal(scaled.tables[0].key_levels.points, codec.tables[0].key_levels.points)
    nothing = fit([without[0].replace(extras={"key_fisher_pre_rope": np.zeros((2, 16))})], 2, q_norm=False)
    assert np.array_equal(nothing.tables[0].key_levels.points, nuq.uniform(2).points)


def test_q_norm_is_on_at_two_bits():
    layers = text("A")
    for bits, on in ((1, True), (2, True), (3, False), (4, False)):
        points = [fit(layers, bits, q_norm=q).tables[0].value_levels.points for q in (None, on, not on)]
        assert np.array_equal(points[0], points[1]) and not np.array_equal(points[0], points[2])


# -- data that breaks codecs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-100, -40, 40, 96])
def test_powers_of_two_pass_through(power):
    """Calibrated at that scale, 2^p x decodes to 2^p times what x decodes to, from 1e-30 to 1e29."""
    factor = np.float32(2.0) ** np.float32(power)
    codecs = [fit(text("A", scale=s), 3, 0.05) for s in (1.0, float(factor))]
    plain, large = (through(codec, text("B", scale=s)[0]) for codec, s in zip(codecs, (1.0, float(factor))))
    assert np.array_equal(large.keys, plain.keys * factor) and np.array_equal(large.values, plain.values * factor)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e30])
def test_every_scale_is_as_good(scale):
    error = rms(
        through(fit(text("A", scale=scale), 3), text("B", scale=scale)[0]).values, text("B", scale=scale)[0].values
    )
    assert error == pytest.approx(rms(through(fit(text("A"), 3), text("B")[0]).values, text("B")[0].values), rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_constant_and_zero_data_come_back_exactly(dtype, bits):
    base = layer(1, heads=2, tokens=20, dim=6, value_dim=5, dtype=dtype)
    for number in (0.0, -3.0, 0.15625):
        own = base.replace(keys=np.full_like(base.keys, number), values=np.full_like(base.values, number))
        codec = fit([own], bits)
        decoded = through(codec, own)
        assert np.array_equal(decoded.keys, own.keys) and np.array_equal(decoded.values, own.values)
        assert not np.signbit(decoded.keys.astype(np.float32)).any() or number
        # another layer makes an outlier of every key: right, and dear
        other = through(codec, base)
        single = base.keys.astype(np.float32) if dtype == "float64" else base.keys
        assert np.array_equal(other.keys[:, 1:], single[:, 1:])
    # one constant channel among others
    keys = base.keys.copy()
    keys[:, :, 2] = 7
    own = base.replace(keys=keys)
    assert np.array_equal(through(fit([own], bits, sinks=0), own).keys[:, :, 2], keys[:, :, 2])


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_fewer_calibration_tokens_than_levels(tokens, bits):
    few, own = text("A", tokens=tokens)[:1], text("B", tokens=30)[0]
    for outliers in (0.0, 0.01):
        decoded = through(fit(few, bits, outliers, sinks=0), own)
        assert np.isfinite(decoded.keys).all() and rms(decoded.values, own.values) < 1
    assert rms(through(fit(few, 8, 0.0, sinks=0), few[0]).keys, few[0].keys) < 0.05


def test_outliers_and_extremes_stay_finite():
    calibration = text("A", tokens=60)
    for dtype in DTYPES:
        own = text("B", tokens=9, dtype=dtype)[0]
        most = float(np.float32(kvtheory_max(dtype)))
        for number in (-70000.0 if dtype != "float16" else -65504.0, most, -most):
            keys, values = own.keys.copy(), own.values.copy()
            keys[1, 4, 5] = values[0, 3, 2] = number
            spoilt = own.replace(keys=keys, values=values)
            for codec in (fit(calibration, 2), fit(calibration, 2, 0.1), fit(calibration, 2, 0.0)):
                decoded = through(codec, spoilt)
                assert np.isfinite(decoded.keys.astype(np.float64)).all()
                assert np.isfinite(decoded.values.astype(np.float64)).all()
                # the other tokens are coded as they were without it
                plain = through(codec, own)
                assert np.array_equal(np.delete(decoded.keys, 4, 1), np.delete(plain.keys, 4, 1))
                assert np.array_equal(np.delete(decoded.values, 3, 1), np.delete(plain.values, 3, 1))
            # 10 % of 12 values is one number: exactly this one
            assert through(fit(calibration, 2, 0.1), spoilt).values[0, 3, 2] == own.values.dtype.type(number)
            if abs(number) < 1e5:
                found = float(through(fit(calibration, 2, 0.1), spoilt).keys[1, 4, 5])
                assert found == pytest.approx(number, rel=0.01)
    tiny = calibration[0].replace(
        keys=calibration[0].keys * np.float32(2.0**-140), values=calibration[0].values * np.float32(2.0**-140)
    )
    assert rms(through(fit([tiny], 4), tiny).keys, tiny.keys) < 0.2


def kvtheory_max(dtype):
    from reference.vectors import largest

    return largest(np.dtype(DTYPES[dtype]))


def test_permuting_heads_permutes_what_is_decoded():
    order = [1, 0]

    def turned(one):
        return one.replace(
            keys=one.keys[order],
            values=one.values[order],
            queries=None,
            query_positions=None,
            output_proj=None,
            extras={},
        )

    plain = [one.replace(extras={}) for one in text("A")]
    a, b = through(fit(plain), text("B")[0]), through(fit([turned(one) for one in plain]), turned(text("B")[0]))
    assert np.array_equal(a.keys[order], b.keys) and np.array_equal(a.values[order], b.values)


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_was_not_fitted_is_refused():
    codec, own = fit(text("A")), text("B")[0]
    with pytest.raises(StateMismatch, match="rope: KVQuant was fitted to"):
        codec.encode(own.replace(rope=None))
    with pytest.raises(StateMismatch, match="2 heads of 16 and 12 channels in layer 3, got 2 of 8 and 12"):
        codec.encode(text("B", dim=8)[0])
    with pytest.raises(StateMismatch, match="no layer at all"):
        reference.KVQuant().encode(own)
    assert fit(text("A"), pre_rope=False).encode(own.replace(rope=None))
    assert codec != fit(text("B")) and codec == fit(text("A")) and hash(codec) == hash(fit(text("A")))


def test_calibration_is_checked():
    layers = text("A", tokens=9)
    for wrong, problem, match in (
        ([], ValueError, "calibration: expected at least one layer"),
        (kvtheory.Cache([]), ValueError, "calibration: expected at least one layer"),
        (layers[0], TypeError, "cache: expected a kvtheory.Cache or a list of Layers"),
        ([one.replace(index=None) for one in layers], ValueError, r"calibration\[1\]: expected an index"),
        (
            [layers[0], layers[1].replace(index=3, rope=None)],
            ValueError,
            r"calibration\[1\]: expected .* like the layer of index 3",
        ),
        (kvtheory.Cache([layers[0], layers[0]]), ValueError, "expected an index of its own"),
        (text("A", tokens=1), ValueError, "expected a token behind the 1 sinks in layer 3"),
        (
            [layers[0].replace(extras={"value_fisher": -np.ones((2, 12))})],
            ValueError,
            "expected Fisher information >= 0",
        ),
        ([layers[0].replace(keys=layers[0].keys.astype(np.float64) * 1e300)], ValueError, "that float32 can hold"),
    ):
        with pytest.raises(problem, match=match):
            fit(wrong)
    layers[1].keys[1, 2, 3] = np.nan
    with pytest.raises(ValueError, match=r"keys: .*head 1, token 2, channel 3"):
        fit(layers)
    pooled = fit([layers[0], text("B", tokens=30)[0]])
    assert len(pooled.tables) == 1 and pooled.state != fit(text("A", tokens=9)[:1]).state


def test_arguments_are_checked():
    for arguments, problem in (
        ({"bits": 0}, ValueError), ({"bits": 9}, ValueError), ({"bits": 2.0}, TypeError), ({"outliers": 0.5}, ValueError),
        ({"outliers": -0.1}, ValueError), ({"outliers": float("nan")}, ValueError), ({"sinks": -1}, ValueError),
        ({"sinks": True}, TypeError), ({"levels": "lloyd"}, ValueError),
    ):  # fmt: skip
        with pytest.raises(problem, match=next(iter(arguments))):
            reference.KVQuant(**arguments)


def test_flops_are_counted_by_hand():
    own = text("B", tokens=10)[0]
    codec = fit(text("A"), 3, sinks=2)
    rows = 2 * 8
    assert codec.decode_flops(codec.encode(own)) == rows * (2 * (16 + 12) + 3 * 16)
    flat = fit(text("A"), 3, sinks=2, pre_rope=False)
    assert flat.decode_flops(flat.encode(own)) == rows * 2 * (16 + 12)


def fitted_digest():
    return hashlib.sha256(fit(text("A", tokens=3000, dim=32, value_dim=32), 4).state).hexdigest()


def test_a_fit_does_not_depend_on_threads():
    script = "from tests.reference.test_kvquant import fitted_digest; print(fitted_digest())"
    environment = {**os.environ, "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4", "PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == fitted_digest()
