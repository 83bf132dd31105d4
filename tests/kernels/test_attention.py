"""gpu.DeviceCache as a whole: what the bound is worth, index arithmetic, partial results put together, arguments that do not fit, codecs refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu
import reference
from gpu.device_cache import DeviceCache, error_bound
from gpu.device_cache.bound import EXP, UNIT, gamma
from gpu.device_cache.segment import SOURCE, WEIGHTS, Partial, combined
from gpu.module import launch
from kvtheory import attention
from kvtheory.layer import Layer
from tests.kernels.attention_cases import EXAMPLES, compared
from tests.kernels.strategies import kernel_settings, orders
from tests.reference.strategies import layer, text

# -- the bound ---------------------------------------------------------------------------------------------------------


def asked_of(codec, data, xp=np, **fields):
    """A cache, what it decodes to, queries of two heads for each of the layer's."""
    stream = codec.encode(data)
    decoded = reference.decode(stream, codec.state)
    q = np.random.default_rng(5).standard_normal((2 * data.kv_heads, 3, data.head_dim)).astype(np.float32)
    return DeviceCache(stream, codec.state, xp, split=64, **fields), decoded, q


def test_it_is_exported_lazily():
    assert gpu.DeviceCache is DeviceCache and "DeviceCache" in gpu.__all__


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_the_bound_holds_and_says_something(backend, name):
    """Errors within it; and it is small: of float32 layers below a thousandth of what the output varies by."""
    codec, data = EXAMPLES[name]()
    with backend.running():
        cache, decoded, q = asked_of(codec, data, backend.xp)
    found, exact, bound = compared(backend, cache, decoded, q, None, 0)
    assert (np.abs(found - exact) <= bound).all()
    assert bound.max() < 1e-3 * np.abs(exact - exact.mean()).max()
    assert (np.abs(found - exact) / bound).max() > 1e-3


def _drop_log_weights(cache):
    for one in cache.segments:
        one._flags &= ~WEIGHTS


def _weights_times(by):
    def planted(cache):
        for one in cache.segments:
            one._weights = (one._weights * np.float32(by)).astype(np.float32)

    return planted


def _next(which, index):
    """One stored number, of the last vector or group, by its least bit larger."""

    def planted(cache):
        own = list(which(cache))
        array = own[index].copy()
        array.reshape(-1)[-1] += 1
        own[index] = array
        which(cache)[:] = own

    return planted


def _no_mean(cache):
    matrices, means = cache.segments[0]._frames[1]
    cache.segments[0]._frames = (cache.segments[0]._frames[0], (matrices, means * 0))


def _a_position_further(cache):
    cache.segments[0]._first += 1


def _one_outlier(cache):
    own = cache.segments[-1]._sides[1]
    own[3] = own[3].copy()
    own[3][0] *= 1.01


def _scale(cache):
    cache.scale *= 1 + 1e-4


#: codec of EXAMPLES -> (what is broken, how): each must show, or the bound would hide it
PLANTED = {
    "log-weights dropped": ("MergeReduce", _drop_log_weights),
    "log-weights a thousandth off": ("MergeReduce", _weights_times(1.001)),
    "jensen dropped": ("MetricKLT fixed", _drop_log_weights),
    "a norm of keys": ("TurboQuant", _next(lambda cache: cache.segments[0]._own, 0)),
    "a norm of values": ("TurboQuant", _next(lambda cache: cache.segments[0]._own, 3)),
    "a norm of a residual": ("TurboQuant prod", _next(lambda cache: cache.segments[0]._own, 3)),
    "a scale of keys": ("KIVI", _next(lambda cache: cache.segments[0]._own, 1)),
    "a scale of values": ("KIVI", _next(lambda cache: cache.segments[0]._own, 5)),
    "a scale of a vector": ("KVQuant", _next(lambda cache: cache.segments[-1]._ends, 1)),
    "an outlier": ("KVQuant", _one_outlier),
    "the angle of a position": ("MetricKLT fixed", _a_position_further),
    "the mean of values": ("AATC-like means", _no_mean),
    "the scale of logits": ("Full", _scale),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(PLANTED))
def test_planted_errors_exceed_the_bound(backend, what):
    name, planted = PLANTED[what]
    codec, data = EXAMPLES[name]()
    with backend.running():
        cache, decoded, q = asked_of(codec, data, backend.xp)
    found, exact, bound = compared(backend, cache, decoded, q, None, 0)
    assert (np.abs(found - exact) <= bound).all()
    planted(cache)
    with backend.running():
        wrong = backend.get(cache.attend(backend.put(q)))
    assert (np.abs(wrong - exact) > bound).any(), f"{what}: {np.abs(wrong - exact).max():.3g} within {bound.max():.3g}"


def test_shares_of_the_bound_add_up():
    codec, data = EXAMPLES["TurboQuant"]()
    cache, decoded, q = asked_of(codec, data)
    total, shares = error_bound(cache, decoded, q, parts=True)
    assert set(shares) == {"logits", "decoder", "values", "sums"} and all(
        (share >= 0).all() for share in shares.values()
    )
    assert (sum(shares.values()) <= total).all() and (total <= 1.01 * sum(shares.values()) + 1e-6).all()


@pytest.mark.parametrize("group", (1, 2))
def test_no_term_of_the_bound_is_missing(group):
    """The formula of docs/attention.md in plain loops, to first order: every share is at least that, and hardly more."""
    rng, tokens, dim, scale = np.random.default_rng(group), 40, 12, 0.3
    keys, values = (rng.standard_normal((2, tokens, d)).astype(np.float32) for d in (dim, 7))
    layer = Layer(keys, values, scale=scale)
    q = rng.standard_normal((2 * group, 3, dim)).astype(np.float32)
    stream = reference.Full().encode(layer)
    cache = DeviceCache(stream, xp=np, scale=scale)
    total, shares = error_bound(cache, reference.decode(stream), q, parts=True)
    (segment,) = cache.segments
    longest, tiles, slots = segment.work(3 * group, cache.split)
    assert longest > 0 and tiles > 0 and slots > 0
    g_logit = gamma(dim + 13)
    g_above, g_below = (
        gamma(longest + tiles + slots + 7 + EXP * (tiles + 3)),
        gamma(6 + tiles + slots + EXP * (tiles + 3)),
    )
    for h in range(2 * group):
        k, v = keys[h // group].astype(float), values[h // group].astype(float)
        for j, one in enumerate(q[h].astype(float)):
            z = scale * (k @ one)
            a = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
            o = a @ v
            asked = scale * (np.abs(k) @ np.abs(one))
            eta = (g_logit + 3 * UNIT) * asked
            eta += UNIT * (z.max() - z + 2 * eta.max())
            logits = sum(a[t] * eta[t] * abs(v[t] - o) for t in range(tokens))
            made = sum(a[t] * UNIT * abs(v[t]) for t in range(tokens))
            sums = sum(a[t] * g_above * abs(v[t]) for t in range(tokens)) + g_below * abs(o)
            for name, own in (("logits", logits), ("values", made), ("sums", sums)):
                assert (shares[name][h, j] >= own).all() and (shares[name][h, j] <= 1.001 * own + 1e-12).all(), name
            assert (total[h, j] >= logits + made + sums + UNIT * abs(o)).all()


# -- index arithmetic --------------------------------------------------------------------------------------------------


@kernel_settings
@given(
    token=st.integers(0, (1 << 40) - 1), head=st.integers(0, 7), dim=st.integers(1, 1 << 11), bits=st.integers(1, 8), order=orders()
)  # fmt: skip
def test_places_beyond_32_bits(backend, token, head, dim, bits, order):
    """Where kernels look for a token of a cache that no machine holds: rows, first bits of codes, partial results."""
    heads = 8
    starts = np.arange(heads, dtype=np.int64) * dim * (1 << 33)
    wanted = (
        int(starts[head]) + token * heads * dim,
        (token * heads + head) * dim * bits,
        (head * (1 << 20) + token % (1 << 20)) * dim,
    )
    each = (heads * dim, dim * bits, 1 << 20)
    for kind in range(3):
        out = backend.put(np.zeros(2, np.int64))
        own = token % (1 << 20) if kind == 2 else token
        with backend.running(order):
            launch(
                SOURCE["places"], (1,), (256,),
                (backend.put(np.array([own, own])), backend.put(np.array([head, head], np.int32)), backend.put(starts), out, np.int64(2),
                 np.int64(each[kind]), np.int32(heads), np.int32(dim), np.int32(kind)),
            )  # fmt: skip
        assert backend.get(out).tolist() == [wanted[kind]] * 2


# -- partial results ---------------------------------------------------------------------------------------------------


@kernel_settings
@given(
    slots=st.integers(1, 9),
    rows=st.integers(1, 5),
    width=st.sampled_from((1, 31, 33, 128, 129, 300)),
    seed=st.integers(0, 1 << 30),
    order=orders(),
)
def test_combine(backend, slots, rows, width, seed, order):
    """Slots that saw nothing among them; against the same in float64."""
    rng = np.random.default_rng(seed)
    maxima = np.where(rng.random((slots, rows)) < 0.3, -np.inf, rng.normal(0, 10, (slots, rows))).astype(np.float32)
    maxima[int(rng.integers(slots))] = 1.5
    sums = np.where(np.isneginf(maxima), 0, rng.uniform(1, 50, (slots, rows))).astype(np.float32)
    out = np.where(np.isneginf(maxima)[..., None], 0, rng.standard_normal((slots, rows, width))).astype(np.float32)
    with backend.running(order):
        one = combined(Partial(*map(backend.put, (maxima, sums, out))), backend.xp, divide=True)
    top = maxima.max(axis=0)
    factors = np.exp(maxima.astype(np.float64) - top)
    total = (factors * sums).sum(axis=0)
    np.testing.assert_array_equal(backend.get(one.maxima)[0], top)
    np.testing.assert_allclose(backend.get(one.sums)[0], total, rtol=(slots + 6 + 20) * 2.0**-24)
    magnitude = np.einsum("sr,srw->rw", factors, np.abs(out)) / total[:, None]
    error = np.abs(backend.get(one.out)[0] - np.einsum("sr,srw->rw", factors, out.astype(np.float64)) / total[:, None])
    assert (error <= (2 * slots + 60) * 2.0**-24 * magnitude).all()


# -- arguments ---------------------------------------------------------------------------------------------------------


def cache_of(backend, tokens=5, **fields):
    return DeviceCache(reference.Full().encode(layer(1, 2, tokens, 4, 3, **fields)), xp=backend.xp)


def test_arguments_that_do_not_fit(backend):
    cache = cache_of(backend)
    ok = backend.put(np.zeros((4, 2, 4), np.float32))
    with backend.running():
        for wrong, error, match in (
            (np.zeros((3, 2, 4), np.float32), ValueError, "positive multiple of kv_heads = 2, got 3"),
            (np.zeros((4, 2, 5), np.float32), ValueError, "queries"),
            (np.zeros((4, 2, 4), np.int32), TypeError, "queries"),
        ):
            with pytest.raises(error, match=match):
                cache.attend(backend.put(wrong))
        with pytest.raises(TypeError, match="query_positions: expected integers"):
            cache.attend(ok, np.array([0.5, 1]))
        with pytest.raises(ValueError, match="query_positions"):
            cache.attend(ok, np.array([1, 2, 3]))
        with pytest.raises(ValueError, match="query 1 sees no token of KV head 0"):
            cache.attend(ok, np.array([1, -1]))
        with pytest.raises(TypeError):
            cache.attend([[1.0]])
        assert cache.attend(backend.put(np.zeros((4, 0, 4), np.float32))).shape == (4, 0, 3)
        with pytest.raises(ValueError, match="sees no token"):
            cache_of(backend, 0).attend(ok)
    for scale in (0.0, np.nan):
        with pytest.raises(ValueError, match="scale"):
            DeviceCache(reference.Full().encode(layer(1)), xp=backend.xp, scale=scale)


def test_scale_is_taken(backend):
    data = layer(1, 2, 9, 4, 3)
    q = np.random.default_rng(0).standard_normal((2, 2, 4)).astype(np.float32)
    with backend.running():
        found = DeviceCache(reference.Full().encode(data), xp=backend.xp, scale=1.5).attend(backend.put(q))
    np.testing.assert_allclose(backend.get(found), attention.attend(q, data.keys, data.values, scale=1.5), rtol=1e-5)


def test_bytes_are_those_of_codes_and_scales(backend):
    """What is held on the device is what attention reads: the parts of the stream, but for the stream's own header and padding to words."""
    for name in ("Full", "TurboQuant", "KIVI", "MetricKLT fixed", "AATC-like means"):
        codec, data = EXAMPLES[name]()
        stream = codec.encode(data)
        with backend.running():
            cache = DeviceCache(stream, codec.state, backend.xp)
        parts = sum(part.remaining for part in reference.stream.read(stream)[1][0])
        assert abs(cache.nbytes - parts) < 64, name


@pytest.mark.parametrize("name", ["QJL", "PolarQuant"])
def test_codecs_that_attention_cannot_read_are_named(backend, name):
    stream = getattr(reference, name)().encode(layer(1, tokens=9, dim=16))
    with pytest.raises(NotImplementedError, match=f"cannot read the codes of {name}"):
        DeviceCache(stream, xp=backend.xp)


def test_streams_that_are_none(backend):
    stream = reference.Full().encode(layer(1))
    with pytest.raises(reference.CorruptStream):
        DeviceCache(stream[:-1], xp=backend.xp)
    with pytest.raises(reference.StateMismatch):
        DeviceCache(stream, reference.KVQuant.fit(text("A", 20), 2).state, backend.xp)
    codec = reference.KVTC.fit(text("A", 40), bits=3)
    with pytest.raises(NotImplementedError, match="KVTC"):
        DeviceCache(codec.encode(text("B", 40)), codec.state, backend.xp)


@pytest.mark.parametrize("name", ["Full", "TurboQuant", "KIVI", "KVQuant", "MergeReduce", "MetricKLT fixed"])
def test_hostile_bytes(name):
    """Parts overwritten in places, cut and lengthened: CorruptStream where the reference says so, never another error; no kernel is asked."""
    codec, data = EXAMPLES[name]()
    header, groups = reference.stream.read(codec.encode(data))
    parts = [bytes(one.rest()) for one in groups[0]]
    refused = read = 0
    for part, own in enumerate(parts):
        places = sorted({0, len(own) // 2 // 4 * 4, max(0, len(own) - 4)})
        changed = [own[:at] + bad + own[at + 4 :] for at in places for bad in (b"\xff" * 4, b"\1\0\1\0", b"\0" * 4)]
        for body in (*changed, own[:-1], own + b"\0"):
            altered = reference.stream.write(header, [[*parts[:part], body, *parts[part + 1 :]]])
            try:
                reference.decode(altered, codec.state)
            except reference.CorruptStream:
                refused += 1
                with pytest.raises(reference.CorruptStream):
                    DeviceCache(altered, codec.state, np)
                    pytest.fail(f"part {codec.part_names[part]} of {body[:8].hex()} ... is read")
            else:
                read += 1
                DeviceCache(altered, codec.state, np)
    assert refused and read


def test_wide_vectors_take_smaller_tiles_and_too_wide_ones_are_refused(backend):
    wide = layer(2, 1, 3, 1024, 1024)
    q = np.random.default_rng(0).standard_normal((1, 1, 1024)).astype(np.float32)
    with backend.running():
        cache = DeviceCache(reference.Full().encode(wide), xp=backend.xp)
        assert cache.segments[0].plan(1)[1] < 32
        np.testing.assert_allclose(
            backend.get(cache.attend(backend.put(q))), attention.attend(q, wide.keys, wide.values), rtol=1e-4, atol=1e-5
        )
        cache = DeviceCache(reference.Full().encode(layer(2, 1, 1, 1 << 15, 4)), xp=backend.xp)
        with pytest.raises(ValueError, match="does not fit into 101376 bytes of shared memory"):
            cache.attend(backend.put(np.zeros((1, 1, 1 << 15), np.float32)))
