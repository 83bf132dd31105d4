"""AATC, PALU, KVTC: their bases, weights and allocations by other routes, degenerate spectra, and what their core promises."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from kvtheory import rate, transform
from reference import AATC, KVTC, PALU, CorruptStream, MetricKLT, StateMismatch, kvtc, palu
from reference.kept import Kept
from reference.stream import Reader
from reference.transform_coding import fixed, stacked
from reference.transform_coding.basis import Basis, project
from reference.transform_coding.fixed import FixedCoder, FixedUnit
from tests.reference.strategies import text


def bits_of(codec, side):
    """Bits of all coefficients of the keys or the values of each layer."""
    out = []
    for layer in codec.layers:
        split = layer.kv_heads * layer.head_dim
        out.append(
            np.concatenate([u.bits for u in layer.coder.units if (u.basis.places[0] >= split) == (side == "values")])
        )
    return out


def coded(codec, layers):
    """What a codec makes of layers, of either scope."""
    if codec.scope == "cache":
        return codec.decode(codec.encode(layers))
    return [codec.decode(codec.encode(layer)) for layer in layers]


def bare(layer, **changes):
    return layer.replace(queries=None, query_positions=None, output_proj=None, extras={}, **changes)


# -- AATC --------------------------------------------------------------------------------------------------------------


@given(st.floats(0.05, 5), st.sampled_from((None, 0.7, 3.25)), st.integers(0, 4), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_aatc_spends_its_budget_to_the_bit(bits, value_bits, protected, head_group):
    layers = text(tokens=24, indices=(0, 2, 3, 5), heads=3, dim=6, value_dim=5)
    codec = AATC.fit(layers, bits, value_bits=value_bits, protected=protected, head_group=head_group, window=0)
    for side, width, wanted in (("keys", 18, bits), ("values", 15, bits if value_bits is None else value_bits)):
        own = bits_of(codec, side)
        assert sum(int(b.sum()) for b in own) == int(np.floor(wanted * 4 * width + 1e-9))
        apart = sum(index < protected for index in (0, 2, 3, 5))
        if 0 < apart < 4:
            share = np.concatenate(own[:apart])
            assert share.max() - share.min() <= 1
            budget = int(np.floor(wanted * 4 * width + 1e-9))
            average = int(np.floor(budget * apart / 4 + 1e-9))
            extra = min(width * apart, budget - average) if side == "keys" else 0
            assert share.sum() == average + extra
    stream = codec.encode(bare(layers[0]))
    assert len(stream) and codec.decode(stream).keys.shape == layers[0].keys.shape


def test_aatc_takes_the_bits_of_least_weighted_error():
    """Weights and variances by loops over heads, tokens and channels; bits by dynamic programming."""
    layers = text(tokens=60, indices=(4, 7), heads=3, dim=4, value_dim=3)
    codec = AATC.fit(layers, 1.75, head_group=2, sinks=3)
    for side, d in (("keys", 4), ("values", 3)):
        scores = []
        for layer in layers:
            w, s = [], []
            x = (layer.keys_pre_rope() if side == "keys" else layer.values.astype(float))[:, 3:]
            q = layer.rope.undo(layer.queries, layer.query_positions)
            for heads in ((0, 1), (2,)):
                tokens = np.concatenate([x[k] for k in heads], axis=1)
                moment = sum(np.outer(row, row) for row in tokens) / len(tokens)
                values, vectors = np.linalg.eigh(moment)
                for c in range(len(values))[::-1]:
                    r2 = np.sqrt(values[c])  # (sigma^{1/2})^2
                    weight = 0.0
                    for i, k in enumerate(heads):
                        u = vectors[i * d : (i + 1) * d, c]
                        for h in (2 * k, 2 * k + 1):  # its query heads
                            if side == "keys":
                                weight += float(np.mean([(u @ q[h, j]) ** 2 for j in range(q.shape[1])]))
                            else:
                                weight += float(((u @ layer.output_proj[h]) ** 2).sum())
                    w.append(r2 * weight)
                    s.append(values[c] / r2)
            scores.append(np.array(w) / np.quantile(w, 0.95) * np.array(s) / np.quantile(s, 0.95))
        every = np.concatenate(scores)
        own = np.concatenate(bits_of(codec, side)).astype(int)
        table = every[:, None] * 4.0 ** -np.arange(17)
        best = rate.integer_bits(table, int(own.sum()))
        assert (every * 4.0**-own).sum() == pytest.approx((every * 4.0**-best).sum(), rel=1e-9)
        assert np.array_equal(own, best)


def test_aatc_leaves_out_terms_that_no_head_has():
    """Where queries of different KV heads are equal and opposite, the authors' sum over KV heads before squaring sees nothing."""
    layer = text(tokens=40, heads=2, dim=4, value_dim=4)[0]
    keys = np.repeat(layer.keys_pre_rope()[:1], 2, axis=0)
    q = layer.rope.undo(layer.queries, layer.query_positions)
    q[2:] = -q[:2]
    own = layer.replace(
        keys=layer.rope.apply(keys, layer.positions),
        queries=layer.rope.apply(q, layer.query_positions),
        values=layer.values,
    )
    codec = AATC.fit([own], 2, window=0, sinks=0)
    # coefficients of both heads' sum have all the variance, and cost
    assert sorted(bits_of(codec, "keys")[0][4:].tolist()) == [0, 0, 0, 0] and bits_of(codec, "keys")[0][:4].min() > 0


@pytest.mark.parametrize("head_group", (1, 2))
def test_aatcs_basis_is_that_of_the_papers_whitened_svd(head_group):
    layers = text(tokens=80, heads=2, dim=6, value_dim=5)
    codec = AATC.fit(layers, 3, head_group=head_group, sinks=0, window=0)
    for layer, fitted in zip(layers, codec.layers):
        inputs = layer.extras["inputs"]
        moment = inputs.T @ inputs / len(inputs)
        for unit in fitted.coder.units:
            side = "keys" if unit.basis.places[0] < 12 else "values"
            d = 6 if side == "keys" else 5
            first = (unit.basis.places[0] - (0 if side == "keys" else 12)) // d
            weight = layer.extras["key_weight" if side == "keys" else "value_weight"][first : first + head_group]
            theirs = transform.whitened_svd(weight.reshape(-1, weight.shape[-1]), moment)
            ours = unit.basis.synthesis * fixed.UNIFORM_UNIT
            # B = U sigma^{1/2}, up to signs and 16 bits (float32 keys)
            scale = np.abs(theirs.reconstruct).max()
            assert np.allclose(np.abs(ours), np.abs(theirs.reconstruct), atol=1e-3 * scale)
            assert np.allclose(unit.basis.mean, 0)


def test_aatc_options_change_what_they_say():
    layers, test = text(tokens=200), bare(text("B", tokens=60)[0])
    found = set()
    for scaling, quantiser in itertools.product(("tokenwise", "channelwise", "factored"), ("midrise", "midtread")):
        codec = AATC.fit(layers, 3, scaling=scaling, quantiser=quantiser, window=0)
        assert codec.levels == quantiser
        found.add(codec.decode(codec.encode(test)).values.tobytes())
        scales = len(reference.stream.read(codec.encode(test))[1][0][3].rest())
        assert scales == (0 if scaling == "channelwise" else 2 * 2 * 56)
    assert len(found) == 6
    assert (
        AATC().levels == "midtread"
        and AATC(scaling="factored").levels == AATC(scaling="channelwise").levels == "midrise"
    )
    plain = AATC.fit([bare(layer) for layer in layers], 2, weights="variance")
    assert plain == AATC.fit(layers, 2, weights="variance") != AATC.fit(layers, 2)
    with pytest.raises(ValueError, match="queries: AATC needs it"):
        AATC.fit([bare(layer) for layer in layers], 2)


def test_aatc_reads_one_layer_at_a_time():
    alive = []

    def lazy(layer):
        def make():
            import gc
            import weakref

            gc.collect()
            alive[:] = [one for one in alive if one() is not None]
            assert len(alive) <= 2
            keys = layer.keys.copy()
            alive.append(weakref.ref(keys))
            return layer.replace(keys=keys)

        return make

    layers = text(indices=range(6), tokens=30)
    cache = kvtheory.Cache([lazy(layer) for layer in layers])
    assert AATC.fit(cache, 2) == AATC.fit(layers, 2)
    assert PALU.fit(cache, 3) == PALU.fit(layers, 3)


# -- PALU --------------------------------------------------------------------------------------------------------------


def ranks(codec):
    return [unit.basis.size for layer in codec.layers for unit in layer.coder.units]


@given(
    st.floats(0.05, 1),
    st.sampled_from(("fisher", "energy", "uniform")),
    st.sampled_from(("minmax", "max")),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_palu_keeps_as_many_latents_as_it_says(ratio, search, scale, hadamard):
    layers = text(tokens=30, heads=3, dim=6, value_dim=5)
    codec = PALU.fit(layers, 4, ratio, search=search, scale=scale, hadamard=hadamard, head_group=2)
    groups = [12, 6, 10, 5] * 2
    if search == "uniform":
        assert ranks(codec) == [round(ratio * g) for g in groups]
    else:
        assert sum(ranks(codec)) == round(ratio * sum(groups))
    assert all((unit.bits == 4).all() for layer in codec.layers for unit in layer.coder.units)
    layer = bare(layers[0])
    _, [parts] = reference.stream.read(codec.encode(layer))
    assert len(parts[3].rest()) == 30 * 4 * (3 if scale == "minmax" else 2)
    assert len(parts[4].rest()) == -(-30 * max(1, 4 * sum(ranks(codec)[:4])) // 8) or sum(ranks(codec)[:4]) == 0


def test_palu_says_which_ranks_it_searched():
    layers = text()
    assert PALU.fit(layers).search == "fisher"
    some = [layers[0], layers[1].replace(extras={})]
    assert PALU.fit(some).search == "energy" and PALU.fit(some) == PALU.fit(layers, search="energy")
    with pytest.raises(ValueError, match="needs the extras"):
        PALU.fit(some, search="fisher")
    # what costs more gets more: values of one layer
    dear = [
        layers[0].replace(extras={**layers[0].extras, "value_fisher": 1e6 * layers[0].extras["value_fisher"]}),
        layers[1],
    ]
    assert ranks(PALU.fit(dear))[1] == 24 > ranks(PALU.fit(layers))[1]


def test_palu_without_coding_is_the_best_low_rank_approximation():
    """8 bits are next to none lost; what is lost is the tail of the spectrum."""
    layer = text(tokens=100)[0]
    for ratio in (0.25, 0.5, 0.75):
        codec = PALU.fit([layer], 16, ratio, search="uniform", scale="max")
        decoded = codec.decode(codec.encode(layer))
        x = layer.values.transpose(1, 0, 2).reshape(100, -1).astype(float)
        tail = (np.linalg.svd(x, compute_uv=False)[round(ratio * 24) :] ** 2).sum()
        assert np.square(decoded.values - layer.values).sum() == pytest.approx(tail, rel=1e-3)


@pytest.mark.parametrize("r", (0, 1, 2, 3, 8, 11, 45, 64, 134))
def test_rotations_are_orthogonal_and_spread(r):
    h = palu.rotation(r)
    assert np.allclose(h @ h.T, np.eye(r), atol=1e-12)
    assert r == 0 or np.abs(h).max() <= np.sqrt(2 / r) + 1e-12


# -- KVTC --------------------------------------------------------------------------------------------------------------


def brute(z, budget):
    """Least squared error of groups of whole units, by trying all."""
    n, c = z.shape
    units = -(-c // 16)

    def error(a, b, bits):
        own = z[:, 16 * a : 16 * b]
        if bits == 0:
            return (own**2).sum() / n, 0
        stored, codes = kvtc.quantised(own, np.array([own.shape[1]]), np.array([bits]))
        alpha = kvtc.norms(stored, 7)
        found = alpha * ((2 * np.stack(codes, axis=1) + 1) / 2**bits - 1)
        return ((own - found) ** 2).sum() / n, 16 * bits * (b - a) + 16

    best = np.inf
    for cuts in itertools.product((1, 4), repeat=units):
        ends, spans = 0, []
        for size in cuts:
            if ends == units:
                break
            spans.append((ends, ends + size))
            ends += size
        if ends != units:
            continue
        for bits in itertools.product(range(9), repeat=len(spans)):
            found = [error(a, b, k) for (a, b), k in zip(spans, bits)]
            if sum(cost for _, cost in found) <= budget:
                best = min(best, sum(e for e, _ in found))
    return best


@pytest.mark.parametrize("columns,budget", ((48, 150), (48, 333), (40, 200), (17, 64), (64, 420)))
def test_kvtc_allots_as_well_as_any_allocation(columns, budget):
    rng = np.random.default_rng(columns)
    z = rng.standard_normal((20, columns)) * 0.9 ** np.arange(columns)
    chosen, sizes, bits = kvtc.Groups(z).allot(budget)
    assert (sizes * bits + 16).sum() <= budget and sizes.sum() == len(chosen) and (np.diff(chosen) > 0).all()
    stored, codes = kvtc.quantised(z[:, chosen], sizes, bits)
    alpha = np.repeat(kvtc.norms(stored, 7), sizes, axis=1)
    out = np.zeros_like(z)
    out[:, chosen] = alpha * ((2 * np.stack(codes, axis=1) + 1) / 2.0 ** np.repeat(bits, sizes) - 1)
    found = ((z - out) ** 2).sum() / len(z)
    if columns == 64:  # 9^4 allocations of four units would take long
        assert found <= ((z[:, 32:]) ** 2).sum() / len(z)
    else:
        assert found == pytest.approx(brute(z, budget), rel=1e-9)


def test_kvtc_takes_all_its_layers_in_any_order_and_no_others():
    layers = text(indices=(1, 4, 6))
    codec = KVTC.fit(layers, 3, window=2)
    test = [bare(layer) for layer in text("B", indices=(1, 4, 6), tokens=20)]
    there, back = coded(codec, test), coded(codec, test[::-1])
    for a, b in zip(there, back[::-1]):
        assert a.keys.tobytes() == b.keys.tobytes() and a.values.tobytes() == b.values.tobytes()
    for wrong in (test[:2], [*test[:2], test[2].replace(index=5)], []):
        with pytest.raises(StateMismatch, match="fitted to layers of index 1, 4, 6"):
            codec.encode(wrong)
    with pytest.raises(ValueError, match="index of its own"):
        codec.encode([*test, test[0]])
    shorter = bare(text("B", indices=(6,), tokens=19)[0])
    with pytest.raises(ValueError, match="expected 20 tokens"):
        codec.encode([*test[:2], shorter])
    with pytest.raises(ValueError, match=r"expected layers of \[96\] tokens"):
        KVTC.fit([*layers[:2], text(indices=(6,), tokens=95)[0]])
    with pytest.raises(StateMismatch, match="rope"):
        codec.encode([*test[:2], test[2].replace(rope=kvtheory.Rope(test[2].rope.inv_freq * 2))])
    with pytest.raises(ValueError, match="at least 32"):
        KVTC.fit(layers, 0.2)
    assert codec.encode(kvtheory.Cache(test)) == codec.encode(test)


def test_kvtc_takes_layers_together():
    """Layers that are linear in one input cost together what one of them costs alone."""
    one = text(indices=(0,), tokens=300, dim=8, value_dim=8)[0]
    layers = [bare(one.replace(index=i)) for i in range(4)]
    alone, together = KVTC.fit(layers[:1], 4, window=0), KVTC.fit(layers, 1, window=0)
    sizes = [
        sum(int((side.sizes * side.bits).sum()) + 16 * len(side.sizes) for side in codec.sides)
        for codec in (alone, together)
    ]
    assert sizes[0] == pytest.approx(sizes[1], abs=64)
    errors = [np.square(coded(codec, layers[:n])[0].keys - one.keys).sum() for codec, n in ((alone, 1), (together, 4))]
    assert errors[1] == pytest.approx(errors[0], rel=0.05)


@pytest.mark.parametrize("texts", (1, 2))
def test_kvtc_with_more_tokens_than_it_takes(monkeypatch, texts):
    monkeypatch.setattr(kvtc, "TOKENS", 64)
    layers = [layer for name in "AC"[:texts] for layer in text(name, tokens=90)]
    codec = KVTC.fit(layers, 4, window=0)
    (decoded, _), test = coded(codec, text("B")), text("B")[0]
    assert np.linalg.norm(decoded.keys - test.keys) < 0.3 * np.linalg.norm(test.keys)


# -- spectra and scales that break codecs --------------------------------------------------------------------------------

FITS = {
    "AATC": lambda layers: AATC.fit(layers, 2, window=0, protected=0),
    "AATC factored": lambda layers: AATC.fit(layers, 2, window=0, scaling="factored", split="uneven"),
    "AATC channelwise": lambda layers: AATC.fit(
        layers, 2, window=0, scaling="channelwise", weights="variance", split="none"
    ),
    "PALU": lambda layers: PALU.fit(layers, 3),
    "PALU max": lambda layers: PALU.fit(layers, 3, search="energy", scale="max", hadamard=False),
    "KVTC": lambda layers: KVTC.fit(layers, 2, window=0),
    "MetricKLT": lambda layers: MetricKLT.fit(layers, 2),
    "MetricKLT head": lambda layers: MetricKLT.fit(layers, 2, metric="variance", joint="head"),
    "MetricKLT fixed": lambda layers: MetricKLT.fit(layers, 2, coding="fixed"),
    "MetricKLT model": lambda layers: MetricKLT.fit(
        layers, 2, coding="fixed", joint="none", tables="model", scaling="channelwise"
    ),
}
SPECTRA = (
    "zero", "one channel", "rank deficient", "duplicated", "constant", "one head", "huge", "tiny", "fewer tokens", "one token", "no queries",
)  # fmt: skip


def degenerate(kind):
    out = []
    for layer in text(tokens=40):
        keys, values = layer.keys_pre_rope(), layer.values.astype(np.float64)
        unit = {"huge": 1e150, "tiny": 1e-150}.get(kind, 1)
        for x in (keys, values):
            x[:] *= unit
            if kind == "zero":
                x[:] = 0
            if kind == "one channel":
                x[:, :, :2] = x[:, :, 3:] = 0
            if kind == "rank deficient":
                x[:, :, 3:] = x[:, :, :1]
            if kind == "duplicated":
                x[:] = x[:, :, :1]
            if kind == "constant":
                x[:] = x[:, :1]
            if kind == "one head":
                x[1:] = 0
        tokens = {"fewer tokens": 9, "one token": 5}.get(kind, 40)
        queries = 0 * layer.queries if kind == "no queries" else layer.queries
        keys = layer.rope.apply(keys, layer.positions)[:, :tokens]
        out.append(
            layer.replace(
                keys=keys, values=values[:, :tokens], positions=layer.positions[:tokens], queries=queries, extras={}
            )
        )
    return out


@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("name", FITS)
@pytest.mark.filterwarnings("error")
def test_degenerate_spectra(name, kind):
    layers = degenerate(kind)
    codec = FITS[name](layers)
    assert reference.load(codec.state) == codec
    for scale in (1, 1e300, 1e-300):
        test = [bare(layer) for layer in text("B", tokens=12, dtype="float64", scale=scale)]
        for decoded in coded(codec, test):
            assert np.isfinite(decoded.keys).all() and np.isfinite(decoded.values).all()
    for decoded, layer in zip(coded(codec, [bare(layer) for layer in layers]), layers):
        for found, array in ((decoded.keys, layer.keys), (decoded.values, layer.values)):
            unit = float(np.abs(array).max())
            assert np.isfinite(found).all() and (unit > 0 or not found.any())
            assert unit == 0 or np.square((found - array) / unit).mean() < 0.3
    numbers = 2 * (16 + 12)
    for layer in getattr(codec, "layers", ()):
        if isinstance(layer.coder, FixedCoder) and "PALU" not in name:
            spent = layer.coder.token_bits + (0 if layer.coder.gain != "log" else sum(
                4 * fixed.groups_of(int((unit.bits > 0).sum())) for unit in layer.coder.units
            ))  # fmt: skip
            if "MetricKLT" in name:
                assert spent == 2 * numbers
    if "AATC" in name:
        assert sum(int(bits_of(codec, side)[i].sum()) for side in ("keys", "values") for i in (0, 1)) == 2 * 2 * numbers
    if "PALU" in name:
        assert sum(ranks(codec)) == round(0.7 * 2 * numbers)
    if name == "KVTC":
        for side, width in zip(codec.sides, (64, 48)):
            assert 16 < (side.sizes * side.bits + 16).sum() <= 2 * width


# -- the core ------------------------------------------------------------------------------------------------------------


def orthogonal(rng, n):
    return np.linalg.qr(rng.standard_normal((n, n)))[0]


@given(
    st.integers(0, 1 << 16),
    st.sampled_from(("max", "range", "none")),
    st.sampled_from(("midrise", "midtread")),
    st.integers(1, 8),
)
@settings(max_examples=40, deadline=None)
def test_fixed_coder_keeps_within_half_a_step(seed, gain, levels, bits):
    rng = np.random.default_rng(seed)
    own = "offset" if gain == "range" else levels
    size, tokens = int(rng.integers(1, 9)), int(rng.integers(0, 20))
    u = orthogonal(rng, size)
    basis = Basis.of(np.arange(size), u / fixed.unit_of(own), rng.standard_normal(size))
    coder = FixedCoder((FixedUnit(basis, np.full(size, bits, np.uint8)),), gain, levels=own)
    z = rng.standard_normal((tokens, size)) * np.exp(3 * rng.standard_normal((tokens, 1)))
    if gain == "none":
        z = np.clip(z, -1, 1)
    x = z @ u.T + basis.mean
    out = np.zeros(x.shape)
    parts = coder.encode(x)
    coder.decode([Reader(part) for part in parts], tokens, out)
    found = (out - basis.mean) @ u
    if gain == "range":
        step = (np.maximum(z.max(axis=1), 0) - np.minimum(z.min(axis=1), 0)) / (2**bits - 1)
        bound = step  # half for rounding, half for that of z
    else:
        alpha = np.abs(z).max(axis=1) if gain == "max" else np.ones(tokens)
        bound = alpha * 2 / 2**bits
        if levels == "midrise":
            bound = bound / 2
        # the highest of the authors' levels is a step below alpha
    slack = 1 + 2.0**-6
    assert (
        np.abs(found - z) <= slack * bound[:, None] + 1e-3 * np.abs(z).max(axis=1, initial=0)[:, None] + 1e-12
    ).all()
    assert 8 * len(parts[0]) == tokens * fixed.gain_bits(gain) and len(parts[1]) == -(-tokens * size * bits // 8)


def test_levels():
    assert fixed.uniform_points("midtread", 1).tolist() == [-65536, 0]
    assert fixed.uniform_points("midtread", 2).tolist() == [-65536, -32768, 0, 32768]
    assert fixed.uniform_points("midrise", 1).tolist() == [-32768, 32768]
    assert fixed.uniform_points("midrise", 16)[[0, -1]].tolist() == [-65535, 65535]
    assert fixed.uniform_points("offset", 2).tolist() == [0, 1, 2, 3]


def test_a_coder_of_no_bits_takes_one_for_each_token():
    basis = Basis.of(np.arange(3), np.eye(3), np.arange(3.0))
    coder = FixedCoder((FixedUnit(basis, np.zeros(3, np.uint8)),), "none", levels="midrise")
    parts = coder.encode(np.ones((11, 3)))
    assert parts == [b"", b"\0\0"]
    out = np.zeros((11, 3))
    coder.decode([Reader(part) for part in parts], 11, out)
    assert (out == np.arange(3)).all()
    for codes in (b"", b"\0", b"\0\x08"):
        with pytest.raises(CorruptStream):
            coder.decode([Reader(b""), Reader(codes)], 11, out)


@given(st.integers(0, 1 << 16), st.integers(-300, 300), st.integers(-300, 300))
@settings(max_examples=40, deadline=None)
def test_projections_do_not_overflow(seed, a, b):
    rng = np.random.default_rng(seed)
    z, analysis = rng.standard_normal((4, 3)) * 10.0**a, rng.standard_normal((2, 3)) * 10.0**b
    with np.errstate(all="raise", under="ignore"):
        y = project(z, analysis)
    exact = (rng := z / 10.0**a) @ (analysis / 10.0**b).T
    assert rng.shape == (4, 3) and np.isfinite(y).all()
    if a + b < 100:
        assert np.allclose(
            y, exact * 10.0 ** max(a + b, -290) if a + b > -290 else 0, rtol=1e-9, atol=1e-280 if a + b < -250 else 0
        )
    if a + b > 130:
        assert (np.abs(y[np.abs(exact) > 1e-3]) == 2.0**400).all() and (np.sign(y) == np.sign(exact)).all()


def test_a_tokens_codes_depend_on_no_other():
    layers = text(tokens=200)
    layer = bare(text("B", tokens=33)[1])
    for codec in (AATC.fit(layers, 2, window=0, sinks=0), PALU.fit(layers, 3), MetricKLT.fit(layers, 2, sinks=0)):
        whole = codec.decode(codec.encode(layer))
        for t in (0, 7, 32):
            one = layer.replace(
                keys=layer.keys[:, t : t + 1], values=layer.values[:, t : t + 1], positions=layer.positions[t : t + 1]
            )
            alone = codec.decode(codec.encode(one))
            assert np.array_equal(alone.keys[:, 0], whole.keys[:, t]) and np.array_equal(
                alone.values[:, 0], whole.values[:, t]
            )


def test_decode_flops():
    layers = text(tokens=50)
    layer = bare(layers[0])
    heads, d, dv, tokens = 2, 16, 12, 50 - 4 - 10
    turn = 3 * heads * d
    aatc = AATC.fit(layers, 2, window=10)
    bits = [unit.bits for unit in aatc.layers[0].coder.units]
    each = sum(rows * (2 * int((b > 0).sum()) + 2) for rows, b in zip((heads * d, heads * dv), bits))
    assert aatc.decode_flops(aatc.encode(layer)) == tokens * (each + turn)
    assert aatc.decode_flops(reference.encode_cache(aatc, layers)) > aatc.decode_flops(aatc.encode(layer))
    low = PALU.fit(layers, 3, search="uniform", ratio=0.5, sinks=4, window=10)
    assert low.decode_flops(low.encode(layer)) == tokens * (32 * (2 * 16 + 2) + 16 + 24 * (2 * 12 + 2) + 12 + turn)
    whole = KVTC.fit(layers, 2, window=10)
    each = sum(side.basis.size + rows * (2 * side.basis.size + 1) for side, rows in zip(whole.sides, (64, 48)))
    assert whole.decode_flops(whole.encode(layers)) == tokens * (each + 2 * turn)
    klt = MetricKLT.fit(layers, 2, window=10)
    (unit,) = klt.layers[0].coder.units
    counted = int((unit.tables != 255).any(axis=0).sum())
    assert klt.decode_flops(klt.encode(layer)) == tokens * (4 * counted + 56 * (2 * counted + 1) + turn)


def test_parameters_are_refused():
    for make, match in (
        (lambda: AATC(0), "bits"), (lambda: AATC("2"), "bits"), (lambda: AATC(True), "bits"), (lambda: AATC(2, value_bits=17), "value_bits"),
        (lambda: AATC(weights="none"), "weights"), (lambda: AATC(scaling="kvtc"), "scaling"), (lambda: AATC(quantiser="x"), "quantiser"),
        (lambda: AATC(split="odd"), "split"), (lambda: AATC(head_group=0), "head_group"), (lambda: AATC(sinks=1.5), "sinks"),
        (lambda: PALU(9), "bits"), (lambda: PALU(2.5), "bits"), (lambda: PALU(ratio=0), "ratio"), (lambda: PALU(search="x"), "search"),
        (lambda: PALU(hadamard=1), "hadamard"), (lambda: PALU(scale="x"), "scale"), (lambda: KVTC(rank=0), "rank"), (lambda: KVTC(0), "bits"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=match):
            make()
    layers = text(tokens=4)
    for fit in (AATC.fit, KVTC.fit, MetricKLT.fit):
        with pytest.raises(ValueError, match="behind the 4 sinks in layer 3"):
            fit(layers)
    for codec in (AATC(), PALU(), MetricKLT()):
        with pytest.raises(StateMismatch, match="no layer at all"):
            codec.encode(layers[0])
    with pytest.raises(StateMismatch, match="no layer at all"):
        KVTC().encode(layers)


def test_stacks_and_back():
    layer = text(tokens=9)[0]
    x = stacked.stack(layer.keys, layer.values, layer.rope, layer.positions)
    assert np.allclose(x[:, :32], layer.keys_pre_rope().transpose(1, 0, 2).reshape(9, 32), atol=1e-12)
    keys, values = stacked.unstack(x, 2, (16, 12), (np.dtype(np.float32),) * 2, layer.rope, layer.positions)
    assert np.allclose(keys, layer.keys, atol=1e-6) and np.array_equal(values, layer.values)
    assert stacked.head_groups(5, 2) == [range(0, 2), range(2, 4), range(4, 5)]


@pytest.mark.parametrize("make", (AATC, PALU, KVTC, MetricKLT), ids=lambda c: c.__name__)
def test_several_rates_are_each_fitted_as_alone(make):
    layers = text(tokens=60)
    rates = [3, 2, 5]
    assert make.fit_rates(layers, rates) == [make.fit(layers, bits) for bits in rates]
    assert make.fit_rates(layers, []) == []


def test_keys_are_turned_back_where_each_head_has_them():
    """A Pipeline's last stage is told the positions of each head's tokens, and takes those."""
    layers = text(tokens=60)
    places = (np.array([3, 4, 9, 30, 31, 50]), np.array([0, 2, 7, 8, 40, 59]))
    kept = Kept(places, None)
    # few bits: with many, any rotation of a key is coded well
    for codec in (
        AATC.fit(layers, 2, window=1, sinks=1),
        PALU.fit(layers, 8, 0.25, search="uniform"),
        MetricKLT.fit(layers, 2, sinks=1),
        KVTC.fit(layers, 2, window=1, sinks=1),
    ):
        left = [
            bare(
                layer,
                keys=np.stack([layer.keys[h, own] for h, own in enumerate(places)]),
                values=np.stack([layer.values[h, own] for h, own in enumerate(places)]),
                positions=np.arange(6),
            )
            for layer in layers
        ]
        if codec.scope == "cache":
            own = codec.decode_at([Reader(part) for part in codec.encode_at(left, [kept] * 2)], [kept] * 2)
        else:
            own = [codec.decode_at([Reader(part) for part in codec.encode_at(layer, kept)], kept) for layer in left]
        wrong = coded(codec, left)
        for found, other, layer in zip(own, wrong, left):
            error = [np.square(one.keys - layer.keys).sum() / np.square(layer.keys).sum() for one in (found, other)]
            assert error[0] < 0.7 * error[1]
        with pytest.raises(CorruptStream):
            long = Kept((np.arange(7), np.arange(6)), None)
            given = [
                Reader(part)
                for part in (
                    codec.encode_at(left, [kept] * 2) if codec.scope == "cache" else codec.encode_at(left[0], kept)
                )
            ]
            codec.decode_at(given, [long] * 2 if codec.scope == "cache" else long)


def test_aatc_weighs_layers_alike_whatever_their_scale():
    """Scores are relative to each layer's 95th percentile, so a layer of large numbers takes no bits from the others."""
    layers = text(indices=(3, 4))
    louder = [layers[0], layers[1].replace(keys=layers[1].keys * 64, values=layers[1].values * 64)]
    quiet, loud = (AATC.fit(own, 2.0, protected=0, window=0) for own in (layers, louder))
    for side in ("keys", "values"):
        np.testing.assert_array_equal(np.concatenate(bits_of(quiet, side)), np.concatenate(bits_of(loud, side)))


def test_aatc_channelwise_clips_at_the_99th_percentile():
    """One channel has one coefficient, so its largest decoded number is the static scale, half a step below."""
    r = np.random.default_rng(0)
    k, v = r.standard_normal((2, 1, 4000, 1))
    layer = kvtheory.Layer(k, v, r.standard_normal((1, 9, 1)), index=0)
    decoded = coded(AATC.fit([layer], 8.0, scaling="channelwise", protected=0, sinks=0, window=0), [layer])[0]
    for number, found in ((k, decoded.keys), (v, decoded.values)):
        assert np.abs(found).max() == pytest.approx(np.quantile(np.abs(number), 0.99) * (1 - 2.0**-8), rel=1e-4)


@pytest.mark.parametrize("hadamard", [True, False])
def test_palu_rotates_latents_to_one_spread(hadamard):
    """Latents of principal axes are uncorrelated, so each row of +-1/sqrt(r) gives the mean of their variances."""
    layers = text(indices=(3,))
    codec = PALU.fit(layers, 3, 1.0, search="uniform", hadamard=hadamard)
    x = stacked.stack(layers[0].keys, layers[0].values, layers[0].rope, layers[0].positions)
    spreads = []
    for unit in codec.layers[0].coder.units:
        y = unit.basis.analyse(x)
        if not y.shape[1] & (y.shape[1] - 1):  # a power of two
            second = (y**2).mean(axis=0)
            spreads.append(second.max() / second.min())
    assert spreads
    assert max(spreads) < 1.01 if hadamard else max(spreads) > 4
