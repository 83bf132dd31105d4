"""Codecs that leave fewer tokens: cases.REDUCERS, whatever they do; cases.EVICTORS, which keep tokens as they are; then each by its formula.

Their golden vectors are seeds of tests/fuzz.
"""

import math
import tracemalloc
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import kvtheory
import reference
from kvtheory import attention
from kvtheory.layer import Decoded
from reference import CorruptStream, stream
from reference.kept import Kept
from reference.reducer import budget, chosen, joined, parts_of, split_budget
from reference.scissorhands import _without
from reference.shape import Shape
from reference.snapkv import attention_mass, latest_queries, pooled
from tests.reference import strangers
from tests.reference.cases import EVICTORS, OBLIVIOUS, REDUCERS
from tests.reference.strategies import DTYPES, layer
from tests.reference.test_codec import same

every = pytest.mark.parametrize("name", REDUCERS)
evictors = pytest.mark.parametrize("name", EVICTORS)
FLOAT16 = np.finfo(np.float16)


def asked(
    seed=1,
    heads=2,
    tokens=40,
    dim=8,
    value_dim=6,
    dtype="float32",
    group=2,
    causal=True,
    window=None,
    positions=None,
    queries=None,
):
    """A layer with RoPE and `group` queries a KV head at each position (causal), or as many without positions."""
    rng = np.random.Generator(np.random.Philox(seed + 1000))
    q = rng.standard_normal((heads * group, tokens if queries is None else queries, dim)) * 2
    where = np.arange(tokens) if positions is None else np.asarray(positions)
    return layer(
        seed, heads, tokens, dim, value_dim, dtype, queries=q, positions=where, window=window,
        query_positions=where if causal else None, rope=kvtheory.Rope(0.3 ** np.arange(dim // 2)),
    )  # fmt: skip


def cut(own, a, b):
    """Tokens a to b; the queries stay."""
    return own.replace(keys=own.keys[:, a:b], values=own.values[:, a:b], positions=own.positions[a:b])


def written(decoded):
    """What a stream holds of it: weights in binary32, no columns that no head fills."""
    width = int(decoded.kept.max())
    weights = decoded.log_weights.astype(np.float32).astype(np.float64)
    return Decoded(*(x[:, :width] for x in (decoded.keys, decoded.values, weights, decoded.positions)), decoded.kept)


def kept_places(own, decoded):
    """Of each head, the numbers of the tokens kept, by their positions (which must differ)."""
    return [np.searchsorted(own.positions, row[:n]).tolist() for row, n in zip(decoded.positions, decoded.kept)]


def parts(data):
    header, [group] = stream.read(data)
    return header, [bytes(part.rest()) for part in group]


# -- every reducer -------------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("dtype", DTYPES)
def test_streams_hold_what_reduce_leaves(name, dtype):
    codec = REDUCERS[name]
    for tokens in (0, 1, 2, 11, 12, 13, 40):
        own = asked(tokens, tokens=tokens, dtype=dtype, positions=7 + np.arange(tokens) ** 2)
        data = codec.encode(own)
        decoded = reference.decode(data)
        assert same(decoded, written(codec.reduce(own))) and same(decoded, codec.decode(data))
        assert decoded.keys.dtype == own.keys.dtype and decoded.values.dtype == own.values.dtype
        found = reference.inspect(data)
        assert found.shapes[0].tokens == tokens and found.parameters == codec.parameters
        assert codec.decode_flops(data) >= 0
        stranger = strangers.decode_reduced(data)
        for side in ("keys", "values", "positions", "log_weights"):
            for h, n in enumerate(decoded.kept):
                assert np.array_equal(getattr(decoded, side)[h, :n].astype(np.float64), np.array(stranger[side][h], np.float64).reshape(getattr(decoded, side)[h, :n].shape))  # fmt: skip
        if tokens:
            assert reference.held_bits(data, own) == 8 * len(data) / (own.keys.size + own.values.size)


@every
@pytest.mark.parametrize("causal", [True, False])
def test_budgets(name, causal):
    codec, own = REDUCERS[name], asked(3, tokens=21, causal=causal)
    for keep in (0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 1 << 40, 1e-9, 0.024, 0.5, 0.98, 1.0):
        reducer = replace(codec, keep=keep)
        decoded = reference.decode(reducer.encode(own))
        most = budget(keep, 21)
        assert most == min(21, math.floor(keep * 21 + 0.5) if isinstance(keep, float) else keep)
        assert (decoded.kept <= most).all()
        if most == 21:
            assert same(decoded, Decoded.exact(own)) or getattr(codec, "window", None) is not None
        for row, n in zip(decoded.positions, decoded.kept):
            assert (np.diff(row[:n]) >= 0).all() and (n == 0 or most > 0)


@every
def test_sinks_and_latest_tokens_stay(name):
    codec, own = REDUCERS[name], asked(4)
    for keep in (1, 2, 4, 8, 12):
        reducer = replace(codec, keep=keep)
        last = keep if isinstance(codec, reference.StreamingLLM) and codec.window is None else codec.window
        first, rest, last = split_budget(keep, reducer.sinks, last)
        assert first + rest + last == keep and first == min(keep, reducer.sinks) and rest >= 0
        for places in kept_places(own, reducer.reduce(own)):
            assert places[:first] == list(range(first))
            assert last == 0 or places[-last:] == list(range(40 - last, 40))


@every
def test_arguments_are_refused(name):
    codec = REDUCERS[name]
    for wrong, problem in (
        ({"keep": -1}, ValueError), ({"keep": 0.0}, ValueError), ({"keep": 1.5}, ValueError), ({"keep": float("nan")}, ValueError),
        ({"keep": True}, TypeError), ({"keep": "4"}, TypeError), ({"keep": np.float32(0.5)}, TypeError), ({"sinks": -1}, ValueError),
        ({"sinks": 1.0}, TypeError), ({"window": -1}, ValueError), ({"window": 2.0}, TypeError),
    ):  # fmt: skip
        with pytest.raises(problem, match=next(iter(wrong))):
            replace(codec, **wrong)


@every
@pytest.mark.parametrize("piped", [False, True])
def test_nan_and_inf_are_refused_by_name_and_place(name, piped):
    codec = reference.Pipeline([REDUCERS[name], reference.Full()]) if piped else REDUCERS[name]
    for wrong in (np.nan, np.inf):
        for side in ("keys", "values"):
            own = asked(5)
            getattr(own, side)[1, 17, 3] = wrong  # after the Layer was made; token 17 does not stay in a window
            with pytest.raises(ValueError, match=rf"{side}: .*head 1, token 17, channel 3"):
                codec.encode(own)
            if not piped and codec.streaming:
                with pytest.raises(ValueError, match=rf"{side}: .*head 1, token 17, channel 3"):
                    codec.appender(own)


@every
def test_layers_without_what_is_needed_are_refused(name):
    codec = REDUCERS[name]
    bare = layer(6, tokens=20)
    if "queries" not in codec.needs:
        codec.encode(bare)
        return
    with pytest.raises(ValueError, match=r"queries: .* needs it"):
        codec.encode(bare)
    with pytest.raises(ValueError, match=r"queries: .* needs it"):
        reference.Pipeline([codec, reference.Full()]).encode(bare)


@every
@pytest.mark.parametrize("last", ["TurboQuant 3", "KIVI 2 groups of 2", "Full", "QJL 1", "PolarQuant"])
def test_a_quantiser_codes_what_is_left(name, last):
    """A pipeline decodes to what the last stage makes of the tokens left: head by head, as of a layer of these alone."""
    codec, quantiser, own = REDUCERS[name], OBLIVIOUS[last], asked(7)
    piped = reference.Pipeline([codec, quantiser])
    decoded, left = reference.decode(piped.encode(own)), written(codec.reduce(own))
    for field in ("positions", "log_weights", "kept"):
        assert np.array_equal(getattr(decoded, field), getattr(left, field))
    for h, n in enumerate(left.kept):
        if n == left.kept.max():
            alone = own.replace(keys=left.keys[h : h + 1, :n], values=left.values[h : h + 1, :n], positions=np.arange(n), queries=None, query_positions=None, output_proj=None)  # fmt: skip
            coded = reference.decode(quantiser.encode(alone))
            assert np.array_equal(coded.keys[0], decoded.keys[h, :n]) and np.array_equal(coded.values[0], decoded.values[h, :n])  # fmt: skip
    assert len(piped.encode(own)) < len(codec.encode(own)) + 400


@every
def test_a_reducer_may_be_the_last_stage(name):
    """Behind a stage that keeps the same tokens in all heads; it reads their positions. Behind any other it is refused."""
    codec, own = REDUCERS[name], asked(7, positions=7 + np.arange(40) * 2)
    lossless = reference.Pipeline([reference.Full(), codec])
    assert same(reference.decode(lossless.encode(own)), reference.decode(codec.encode(own)))
    first = reference.StreamingLLM(20, 1, positions="original")
    left = cut(own, 20, 40).replace(
        keys=own.keys[:, [0, *range(21, 40)]], values=own.values[:, [0, *range(21, 40)]], positions=own.positions[[0, *range(21, 40)]]
    )  # fmt: skip
    behind = reference.Pipeline([first, codec])
    assert same(reference.decode(behind.encode(own)), reference.decode(codec.encode(left)))
    for uneven in (REDUCERS["SnapKV 12"], reference.ScissorHands(20, 0, 0)):
        with pytest.raises(ValueError, match="other tokens in each head"):
            reference.Pipeline([uneven, codec]).encode(own)


@every
def test_appenders_keep_what_comes_later(name):
    codec = REDUCERS[name]
    own = asked(8, tokens=50, positions=np.arange(50) * 3)
    prompt = cut(own, 0, 40)
    if isinstance(codec.keep, float) and type(codec).streaming:
        return  # it cannot append: test_a_share_cannot_append
    appender = codec.appender(prompt)
    assert appender.stream() == codec.encode(prompt) and appender.tokens == 40
    for a, b in ((40, 41), (41, 41), (41, 48), (48, 50)):
        appender.append(own.keys[:, a:b], own.values[:, a:b], own.positions[a:b])
        assert not codec.streaming or appender.stream() == codec.encode(cut(own, 0, b))
    if codec.streaming:
        return
    before, decoded = written(codec.reduce(prompt)), reference.decode(appender.stream())
    assert same(decoded, codec.decode(appender.stream())) and appender.tokens == 50
    for h, n in enumerate(before.kept):
        assert decoded.kept[h] == n + 10
        for side in ("keys", "values"):
            assert np.array_equal(getattr(decoded, side)[h, :n], getattr(before, side)[h, :n])
            assert np.array_equal(getattr(decoded, side)[h, n : n + 10], getattr(own, side)[h, 40:])
        assert decoded.positions[h, n : n + 10].tolist() == own.positions[40:].tolist()
        assert np.array_equal(decoded.log_weights[h, :n], before.log_weights[h, :n])
        assert not decoded.log_weights[h, n : n + 10].any()
    assert reference.inspect(appender.stream()).shapes[0].tokens == 50
    with pytest.raises(ValueError, match="positions"):
        appender.append(own.keys[:, :1], own.values[:, :1], [0])


@every
def test_appenders_hold_copies(name):
    codec = replace(REDUCERS[name], keep=64)  # all tokens stay
    own = asked(9, tokens=6)
    appender = codec.appender(own)
    later = own.keys[:, :2].copy(), own.values[:, :2].copy()
    appender.append(*later)
    before = appender.stream()
    for array in (own.keys, own.values, *later):
        array[:] = 0
    assert appender.stream() == before


@every
def test_strided_and_foreign_arrays_are_the_same_data(name):
    codec, own = REDUCERS[name], asked(10)
    expected = codec.encode(own)
    swapped = own.replace(keys=own.keys.astype(">f4"), values=own.values.astype(">f4"))
    assert codec.encode(swapped) == expected
    assert codec.reduce(swapped).keys.dtype == np.dtype(np.float32)
    wide = np.zeros((4, 80, 24), np.float32)
    wide[::2, ::2, ::3] = own.keys
    assert codec.encode(own.replace(keys=wide[::2, ::2, ::3])) == expected
    assert codec.encode(own) == expected


@every
def test_caches_are_streams_of_layers(name):
    codec = REDUCERS[name]
    own = [asked(i, heads=1 + i, tokens=20 + i).replace(index=i) for i in range(3)]
    decoded = reference.decode(reference.encode_cache(codec, own))
    assert all(same(a, reference.decode(codec.encode(b))) for a, b in zip(decoded, own, strict=True))


# -- tokens as they are --------------------------------------------------------------------------------------------------


@evictors
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spread", ["gaps", "repeated", "alike"])
def test_tokens_come_back_as_they_were(name, causal, spread):
    codec = REDUCERS[name]
    positions = {"gaps": 5 + 3 * np.arange(40), "repeated": np.arange(40) // 3, "alike": np.full(40, 9)}[spread]
    own = asked(11, positions=positions, causal=causal)
    decoded = codec.reduce(own)
    assert not decoded.log_weights[decoded.positions >= 0].any()
    turned = codec.sinks if isinstance(codec, reference.StreamingLLM) and codec.positions == "cache" else 0
    for h, n in enumerate(decoded.kept):
        rows = {row.tobytes(): t for t, row in enumerate(own.values[h])}
        tokens = [rows[row.tobytes()] for row in decoded.values[h, :n]]
        assert tokens == sorted(set(tokens))
        assert np.array_equal(own.keys[h, tokens][turned:], decoded.keys[h, turned:n])
        assert np.array_equal(own.positions[tokens], decoded.positions[h, :n])


@evictors
def test_heads_are_reduced_apart(name):
    codec, own = REDUCERS[name], asked(12, heads=3, group=2)
    decoded = codec.reduce(own)
    order = np.array([2, 0, 1])
    queries = own.queries.reshape(3, 2, 40, 8)
    permuted = codec.reduce(
        own.replace(keys=own.keys[order], values=own.values[order], queries=queries[order].reshape(6, 40, 8))
    )
    alone = codec.reduce(own.replace(keys=own.keys[1:2], values=own.values[1:2], queries=queries[1]))
    for field in ("keys", "values", "positions", "kept"):
        assert np.array_equal(getattr(permuted, field), getattr(decoded, field)[order])
    n = int(decoded.kept[1])
    assert alone.kept.tolist() == [n] and np.array_equal(alone.keys[0, :n], decoded.keys[1, :n])
    # heads ask for other tokens: else this says nothing. A drop of all that is free leaves nothing to choose
    if codec.needs and getattr(codec, "drop", 0) < 1:
        assert len({tuple(row) for row in decoded.positions.tolist()}) == 3


@evictors
def test_grouped_queries_add_up(name):
    """Two query heads of one KV head, in either order; and twice the same one is as good as one."""
    codec, own = REDUCERS[name], asked(13, heads=1, group=2)
    swapped, twice = own.replace(queries=own.queries[::-1]), own.replace(queries=own.queries[[0, 0]])
    assert same(codec.reduce(swapped), codec.reduce(own))
    assert same(codec.reduce(twice), codec.reduce(own.replace(queries=own.queries[:1])))


@evictors
def test_duplicates_are_kept_by_age(name):
    """All tokens and queries alike: only age is left to decide, and no two runs differ."""
    codec, own = REDUCERS[name], asked(14, causal=False)
    keys, values = (np.broadcast_to(x[:, :1], x.shape).copy() for x in (own.keys, own.values))
    own = own.replace(keys=keys, values=values, queries=np.ones_like(own.queries))
    places = kept_places(own, codec.reduce(own))
    assert places[0] == places[1]
    if isinstance(codec, reference.SnapKV) and codec.pooling == "max":
        assert places[0] == [*range(8), *range(36, 40)]
    if isinstance(codec, reference.ScissorHands) and codec.drop == 0.1:
        # no attention is below the mean: the oldest leave
        assert places[0] == list(range(28, 40))


def test_heads_may_keep_different_numbers():
    own = asked(15, heads=3, tokens=9)
    index = [np.array([0, 2, 5]), np.arange(0), np.array([8])]
    left = chosen(own, index, [np.array([0.5, 0, -1.0]), np.zeros(0), np.array([2.0])])
    assert left.kept.tolist() == [3, 0, 1] and left.positions[1].tolist() == [-1] * 3
    header = reference.SnapKV()._header(stream.Kind.LAYER)
    data = stream.write(header, [parts_of(Shape.of(own), left)])
    assert same(reference.decode(data), left)
    more = joined(left, [(own.keys[:, :2], own.values[:, :2], np.array([20, 22]))])
    assert more.kept.tolist() == [5, 2, 3]
    assert more.positions.tolist() == [[0, 2, 5, 20, 22], [20, 22, -1, -1, -1], [8, 20, 22, -1, -1]]
    assert np.array_equal(more.keys[1, :2], own.keys[1, :2]) and np.array_equal(more.keys[2, 1:3], own.keys[2, :2])
    assert more.log_weights[0].tolist() == [0.5, 0, -1, 0, 0] and np.isneginf(more.log_weights[2, 3:]).all()
    assert same(reference.decode(stream.write(header, [parts_of(Shape.of(own), more)])), more)


def test_scissorhands_leaves_different_numbers_in_each_head():
    own, codec = asked(16, heads=4, tokens=64), reference.ScissorHands(20, sinks=0, window=0, drop=1.0)
    kept = codec.reduce(own).kept
    assert (kept <= 20).all()
    data = codec.encode(own)
    assert same(reference.decode(data), codec.reduce(own))


# -- SnapKV --------------------------------------------------------------------------------------------------------------


def attention_by_hand(own, h, j, tokens=None):
    """{token: attention} of query j of query head h over `tokens` that it sees; plain numbers."""
    q, k = own.queries[h, j].astype(float).tolist(), own.keys[h // own.group].astype(float).tolist()
    seen = []
    for i in range(own.tokens) if tokens is None else tokens:
        before = math.inf if own.query_positions is None else int(own.query_positions[j] - own.positions[i])
        if own.query_positions is None or 0 <= before < (own.window or math.inf):
            seen.append(i)
    z = [own.scale * sum(a * b for a, b in zip(q, k[i])) for i in seen]
    total = sum(math.exp(v) for v in z)
    return {i: math.exp(v) / total for i, v in zip(seen, z)}


def snapkv_by_hand(own, codec):
    n, out = own.tokens, []
    total = min(n, codec.keep)
    if total == n:
        return [list(range(n))] * own.kv_heads
    first, last = min(codec.sinks, total), min(codec.window, max(0, total - codec.sinks))
    asking = range(own.queries.shape[1])
    if own.query_positions is not None:
        asking = sorted(asking, key=lambda j: (own.query_positions[j], j))
    for kv in range(own.kv_heads):
        mass = [0.0] * (n - last)
        for h in range(kv * own.group, (kv + 1) * own.group):
            for j in list(asking)[-codec.window :]:
                for i, a in attention_by_hand(own, h, j).items():
                    if i < n - last:
                        mass[i] += a
        scores = []
        for i in range(n - last):
            around = [
                mass[i + step]
                for step in range(-(codec.kernel // 2), codec.kernel // 2 + 1)
                if 0 <= i + step < n - last
            ]
            scores.append(sum(around) / codec.kernel if codec.pooling == "mean" else max(around))
        ranked = sorted(range(first, n - last), key=lambda i: (-scores[i], i))
        out.append([*range(first), *sorted(ranked[: total - first - last]), *range(n - last, n)])
    return out


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("case", ["causal", "future", "window", "gaps", "few queries", "shuffled"])
def test_snapkv_is_its_formula(pooling, kernel, case):
    own = asked(
        17, heads=2, tokens=30, group=3, causal=case != "future", window=6 if case == "window" else None,
        positions=np.arange(30) * 5 if case == "gaps" else None,
    )  # fmt: skip
    if case == "few queries":
        own = own.replace(queries=own.queries[:, 1::4], query_positions=own.query_positions[1::4])
    if case == "shuffled":
        order = np.random.default_rng(0).permutation(30)
        own = own.replace(queries=own.queries[:, order], query_positions=own.query_positions[order])
    for keep in (2, 5, 9, 29):
        for sinks, window in ((0, 4), (2, 3), (4, 1), (0, 40)):
            codec = reference.SnapKV(keep, sinks, window, kernel, pooling)
            assert kept_places(own, codec.reduce(own)) == snapkv_by_hand(own, codec), (keep, sinks, window)


def test_pooling_at_the_ends():
    scores = np.array([[6.0, 0, 3, 9, 0]])
    assert pooled(scores, 3, "mean").tolist() == [[2.0, 3.0, 4.0, 4.0, 3.0]]
    assert pooled(scores, 3, "max").tolist() == [[6.0, 6.0, 9.0, 9.0, 9.0]]
    assert np.array_equal(pooled(scores, 1, "mean"), scores)
    assert pooled(np.array([[5.0]]), 7, "mean").tolist() == [[5 / 7]]


def test_snapkv_asks_the_latest_queries():
    """A needle that only query number n - window asks for is kept, one that only the query before it asks for is not."""
    n, window = 24, 4
    keys = np.zeros((1, n, 8), np.float32)
    keys[0, 5, 0] = keys[0, 12, 1] = 30
    queries = np.zeros((1, n, 8))
    queries[0, n - window, 0] = queries[0, n - window - 1, 1] = 3
    own = kvtheory.Layer(keys, np.ones((1, n, 2), np.float32), queries, query_positions=np.arange(n))
    places = kept_places(own, reference.SnapKV(window + 3, 0, window, 1).reduce(own))[0]
    assert 5 in places and 12 not in places
    assert latest_queries(own, window).tolist() == [20, 21, 22, 23]
    assert latest_queries(own.replace(query_positions=None), window).tolist() == [20, 21, 22, 23]
    assert latest_queries(own, 99).tolist() == list(range(n))


def test_queries_that_see_nothing_pay_nothing():
    own = asked(18, tokens=20, positions=np.arange(20) + 100)
    early = own.query_positions.copy()
    early[:15] = 3
    own = own.replace(query_positions=early)
    with np.errstate(all="raise"):
        mass = attention_mass(own, np.arange(20))
        assert np.allclose(mass.sum(axis=1), 5 * 2)
        for name in EVICTORS:
            decoded = REDUCERS[name].reduce(own)
            assert np.isfinite(decoded.keys).all()
    nobody = own.replace(query_positions=np.full(20, 3))
    assert kept_places(nobody, reference.SnapKV(6, 0, 2, 1).reduce(nobody))[0] == [0, 1, 2, 3, 18, 19]


# -- ScissorHands --------------------------------------------------------------------------------------------------------


def weighted(numbers):
    """One head whose every query gives token i attention proportional to numbers[i]."""
    keys = np.log(np.array(numbers, float))[None, :, None]
    return kvtheory.Layer(
        keys, np.ones_like(keys), np.ones_like(keys), scale=1.0, query_positions=np.arange(len(numbers))
    )


def test_scissorhands_worked_by_hand():
    """B = 4, history 2, drop half, the latest token stays.

    after token 4: attention 6 1 2 3.6 1 of 13.6; below 1/5 are 1, 2, 4, in the query before 1, 2: counts 0 2 2 0 1, so 1 and 2 leave.
    after token 6: 0 3 4 5 6 have 6 3.6 1 9 2 of 21.6; below 1/5 are 3, 4, 6, in the query before 3, 4: so 3 and 4 leave.
    """
    own = weighted([6, 1, 2, 3.6, 1, 9, 2])
    codec = reference.ScissorHands(4, 0, 1, 2, 0.5)
    assert kept_places(own, codec.reduce(own)) == [[0, 5, 6]]
    assert kept_places(own, codec.reduce(cut(own, 0, 5).replace(queries=own.queries[:, :5], query_positions=np.arange(5)))) == [[0, 3, 4]]  # fmt: skip
    # without positions every query has seen all: 1, 2, 4, 6 are below 24.6 / 7, and 6, the latest, stays
    assert kept_places(own, codec.reduce(own.replace(query_positions=None))) == [[0, 3, 5, 6]]
    # two sinks leave two free tokens each time, and both leave: 2 and 3, then 4 and 5
    assert kept_places(own, reference.ScissorHands(4, 2, 1, 2, 0.5).reduce(own)) == [[0, 1, 6]]


def test_scissorhands_counts_age_with_history():
    """A token that was unimportant long ago, and no more: only a long history remembers it."""
    q = np.array([[1.0, -1.0]] * 9 + [[-1.0, 1.0]] * 3)
    keys = np.zeros((1, 12, 2))
    keys[0, 1] = [-3.0, 3.0]  # nothing to the first nine queries, all that there is to the others
    own = kvtheory.Layer(keys, keys, q[None], scale=1.0, query_positions=np.arange(12))
    short, long = (reference.ScissorHands(11, 0, 0, history, 0.01).reduce(own) for history in (3, 12))
    assert 1 in kept_places(own, short)[0] and 1 not in kept_places(own, long)[0]


def scissorhands_by_hand(own, codec):
    n, out = own.tokens, []
    total = min(n, codec.keep)
    if total == n:
        return [list(range(n))] * own.kv_heads
    first, last = min(codec.sinks, total), min(codec.window, max(0, total - codec.sinks))
    for kv in range(own.kv_heads):
        held, past = [], []
        heads = range(kv * own.group, (kv + 1) * own.group)
        for t in range(n):
            held.append(t)
            following = own.positions[t + 1] if t + 1 < n else math.inf
            here = [j for j in range(own.queries.shape[1]) if own.positions[t] <= own.query_positions[j] < following]
            for j in sorted(here, key=lambda j: (own.query_positions[j], j)):
                each = [attention_by_hand(own, h, j, held) for h in heads]
                if each[0]:
                    past.append([i for a in each for i in held if a.get(i, 0.0) < 1 / len(held)])
            if len(held) > total:
                counts = {i: sum(low.count(i) for low in past[-codec.history :]) for i in held}
                free = [i for i in held[: len(held) - last] if i >= first]
                gone = sorted(free, key=lambda i: (-counts[i], i))[: max(1, int(codec.drop * total))]
                held = [i for i in held if i not in gone]
        out.append(held)
    return out


@pytest.mark.parametrize("case", ["causal", "window", "gaps", "few queries", "repeated"])
def test_scissorhands_is_its_formula(case):
    own = asked(
        19, heads=2, tokens=30, group=3, window=6 if case == "window" else None,
        positions={"gaps": np.arange(30) * 5, "repeated": np.arange(30) // 3}.get(case),
    )  # fmt: skip
    if case == "few queries":
        own = own.replace(queries=own.queries[:, 1::4], query_positions=own.query_positions[1::4])
    for keep in (1, 6, 11, 29):
        for sinks, window, history, drop in ((0, 0, 400, 0.5), (2, 3, 5, 0.3), (1, 0, 2, 1.0), (3, 40, 9, 0.5)):
            codec = reference.ScissorHands(keep, sinks, window, history, drop)
            found = [
                [own.values[h].tolist().index(row) for row in decoded[:n].tolist()]
                for h, (decoded, n) in enumerate(zip(codec.reduce(own).values, codec.reduce(own).kept))
            ]
            assert found == scissorhands_by_hand(own, codec), codec


def test_what_a_sliding_window_has_left_is_unimportant():
    """Attention behind the window is 0, which is below any mean: those tokens leave first."""
    own = asked(20, tokens=40, window=8)
    places = kept_places(own, reference.ScissorHands(16, 0, 0, 400, 0.01).reduce(own))
    assert all(set(range(33, 40)) <= set(row) for row in places)


def test_eviction_spares_sinks_and_latest():
    held, low = np.array([0, 1, 4, 5, 8, 9]), np.array([9, 9, 1, 3, 3, 9])
    assert _without(held, low, 2, first=2, last=1).tolist() == [0, 1, 4, 9]
    assert _without(held, low, 1, first=2, last=1).tolist() == [0, 1, 4, 8, 9]
    assert _without(held, low, 9, first=2, last=1).tolist() == [0, 1, 9]


# -- StreamingLLM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep, sinks, window", [(12, 4, None), (3, 4, None), (12, 4, 0), (12, 2, 5), (5, 0, None), (0, 4, None), (60, 4, 7)])  # fmt: skip
@pytest.mark.parametrize("pieces", ["ones", "random", "whole prompt first"])
def test_streaming_is_encoding_at_once(keep, sinks, window, pieces):
    rng = np.random.default_rng(1)
    own = asked(21, tokens=45, dtype="float16", positions=np.cumsum(rng.integers(0, 3, 45)))
    codec = reference.StreamingLLM(keep, sinks, window)
    assert codec.streaming
    appender = codec.appender(cut(own, 0, 30 if pieces == "whole prompt first" else 0))
    while appender.tokens < 45:
        a = appender.tokens
        b = min(45, a + (1 if pieces == "ones" else int(rng.integers(0, 20))))
        appender.append(own.keys[:, a:b], own.values[:, a:b], own.positions[a:b])
        assert appender.stream() == codec.encode(cut(own, 0, b))


def test_a_share_cannot_append():
    codec = reference.StreamingLLM(0.5)
    assert not codec.streaming
    with pytest.raises(TypeError, match="keep: expected a number of tokens to append to"):
        codec.appender(asked(22))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("start", [0, 1000])
def test_logits_are_those_of_places_in_the_cache(layout, scaling, start):
    """A query right behind the window meets every kept key as in a cache rotated by places 0, 1, ..., whatever was dropped between."""
    n, sinks, keep = 40, 4, 12
    rope = kvtheory.Rope(0.3 ** np.arange(4), layout, scaling)
    rng = np.random.default_rng(2)
    bare, q = rng.standard_normal((1, n, 10)), rng.standard_normal((1, 1, 10))
    positions = start + np.arange(n)
    own = kvtheory.Layer(rope.apply(bare, positions), bare, rope=rope, positions=positions)
    left = reference.StreamingLLM(keep, sinks).reduce(own)
    query = rope.apply(q, np.array([start + n]))[0, 0]
    in_cache = rope.apply(bare[:, [*range(sinks), *range(n - keep + sinks, n)]], np.arange(keep))[0]
    expected = in_cache @ rope.apply(q, np.array([keep]))[0, 0]
    assert np.allclose(left.keys[0] @ query, expected, rtol=0, atol=1e-11)
    original = reference.StreamingLLM(keep, sinks, positions="original").reduce(own)
    assert not np.allclose(original.keys[0, :sinks] @ query, expected[:sinks], rtol=0, atol=0.01)
    assert np.array_equal(original.keys[0], own.keys[0, kept_places(own, original)[0]])
    assert np.array_equal(left.positions, original.positions)
    # a window that is empty ends where the next token comes
    alone = reference.StreamingLLM(sinks, sinks).reduce(own)
    places = rope.apply(bare[:, :sinks], np.arange(sinks))[0] @ rope.apply(q, np.array([sinks]))[0, 0]
    assert np.allclose(alone.keys[0] @ query, places, rtol=0, atol=1e-11)


def test_nothing_is_turned_where_nothing_is_gone():
    own = asked(23, tokens=12)
    for codec in (reference.StreamingLLM(12), reference.StreamingLLM(40, 4, 8), reference.StreamingLLM(1.0)):
        assert same(codec.reduce(own), Decoded.exact(own))
    free = asked(23, tokens=40).replace(rope=None)
    assert np.array_equal(reference.StreamingLLM(12).reduce(free).keys[:, :4], free.keys[:, :4])


@pytest.mark.parametrize("dtype", DTYPES)
def test_turned_sinks_stay_finite(dtype):
    """A rotation can lengthen one number of a pair by sqrt 2: at most the largest number of the type is kept."""
    own = asked(24, dtype=dtype)
    kind = DTYPES[dtype]
    most = ml_dtypes.finfo(kind).max if dtype == "bfloat16" else np.finfo(kind).max
    keys = own.keys.copy()
    keys[:, :4] = most
    codec = reference.StreamingLLM(12)
    with np.errstate(invalid="raise"):
        decoded = reference.decode(codec.encode(own.replace(keys=keys)))
    assert np.isfinite(decoded.keys.astype(np.float64)).all() and (decoded.keys == most).any()
    appender = codec.appender(own.replace(keys=keys))
    assert appender.stream() == codec.encode(own.replace(keys=keys))


def test_without_sinks_attention_breaks_down():
    """On the sample's layer 18, which rests on token 0; the same tokens and sinks but for four."""
    own = kvtheory.sample_cache()[1]
    n, late = 256, own.query_positions >= 256
    prompt = cut(own, 0, n)
    future = prompt.replace(queries=own.queries[:, late][:, :8], query_positions=own.query_positions[late][:8])
    with_, without = (
        kvtheory.distortion.attention_error(
            future, reference.StreamingLLM(64, sinks, positions="original").reduce(prompt)
        )
        for sinks in (4, 0)
    )
    assert without > 100 * with_


# -- streams -------------------------------------------------------------------------------------------------------------


@every
def test_every_byte_of_the_parts_matters(name):
    """Each single byte behind the parameters changed, resealed: another result or CorruptStream."""
    data = REDUCERS[name].encode(asked(25, heads=2, tokens=16, dim=2, value_dim=1))
    header, _ = stream.read(data)
    honest, body = reference.decode(data), stream.unseal(data)
    start = 3 + len(header.codec) + 1 + len(header.parameters)
    equal = 0
    for at in range(start, len(body)):
        try:
            decoded = reference.decode(stream.seal(body[:at] + bytes([body[at] ^ 0x10]) + body[at + 1 :]))
        except (CorruptStream, reference.StateMismatch):
            continue
        equal += same(decoded, honest)
    # the index, and how many tokens the layer had
    assert equal <= 2


@evictors
def test_parts_that_contradict_are_refused(name):
    codec = REDUCERS[name]
    header, raw = parts(codec.encode(asked(26, tokens=16, dim=2, value_dim=1)))
    own = bytes([0, 0])  # two consecutive positions from 0
    common, apart = b"\x02" + own, b"\x00" + 2 * (b"\x02" + own)
    rows = [bytes(2 * 2 * 2 * 4), bytes(2 * 2 * 1 * 4)]

    def made(shape=raw[0], positions=b"", kept=apart, keys=rows[0], values=rows[1]):
        return stream.write(header, [[shape, positions, kept, keys, values]])

    # a writer takes the least width, a reader any
    wide = raw[0][:-2] + b"\x02\x00" + 15 * b"\x01\x00"
    for good in (made(), made(positions=common, kept=b"\x01"), made(shape=wide)):
        assert reference.decode(good).positions.tolist() == [[0, 1], [0, 1]]
    for wrong, problem in (
        (made(positions=common), "not in both"),
        (made(kept=b"\x01"), "not in both"),
        (made(positions=b"\x11" + own, kept=b"\x01"), "expected at most the 16 tokens"),
        (made(kept=b"\x00" + 2 * (b"\x11" + own)), "expected at most 16"),
        (made(positions=common + b"\0", kept=b"\x01"), "positions: 1 bytes too many"),
        (made(kept=apart + b"\0"), "kept: 1 bytes too many"),
        (made(kept=apart[:-3]), "remain"),
        (made(kept=b"\x08" + apart[1:]), "form"),
        (made(keys=rows[0][:-1]), "keys"),
        (made(keys=rows[0] + b"\0" * 4), "keys"),
        (made(values=rows[1] + b"\0"), "values"),
        (made(values=b"\x00\x00\xc0\x7f" + rows[1][4:]), "values: expected finite"),
        (made(shape=raw[0][:-1] + b"\x02"), "expected the positions 0, 1, 2"),
        (made(shape=wide[:-1] + b"\x01"), "expected the positions 0, 1, 2"),
        (stream.write(header, [raw[:-1]]), "expected 5 parts, got 4"),
    ):
        with pytest.raises(CorruptStream, match=problem):
            reference.decode(wrong)


def test_many_heads_of_which_one_keeps_much_are_refused_before_allocation():
    """4096 heads of which one keeps 4096 tokens would be 2^24 rows, in 50 kB."""
    header = reference.SnapKV()._header(stream.Kind.LAYER)
    heads, tokens = 4096, 4096
    shape = b"".join(stream.varint(v) for v in (heads, tokens, 1, 1, 0)) + b"\x00\x00\x00"
    kept = b"\x00" + stream.varint(tokens) + b"\x00\x00" + (heads - 1) * b"\x00\x00\x00"
    data = stream.write(header, [[shape, b"", kept, bytes(2 * tokens), bytes(2 * tokens)]])
    tracemalloc.start()
    try:
        with pytest.raises(CorruptStream, match="64 times their mean"):
            reference.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 22
    finally:
        tracemalloc.stop()
    own = layer(1, heads=65, tokens=2, dim=1)
    one = chosen(own, [np.arange(1), *[np.arange(0)] * 64])
    with pytest.raises(ValueError, match="64 times their mean"):
        parts_of(Shape.of(own), one)
    own = layer(1, heads=64, tokens=2, dim=1)
    left = chosen(own, [np.arange(1), *[np.arange(0)] * 63])
    assert same(reference.decode(stream.write(header, [parts_of(Shape.of(own), left)])), left)


def test_huge_sizes_are_refused_before_allocation():
    header = reference.ScissorHands()._header(stream.Kind.LAYER)
    tracemalloc.start()
    try:
        for sizes in ((1, 1 << 39, 4, 4), (1 << 16, 1 << 24, 4, 4), (1 << 16, 0, 1 << 20, 1 << 20), (1, 1, 1 << 20, 1)):
            shape = b"".join(stream.varint(v) for v in (*sizes, 0)) + b"\x22\x00\x00"
            for positions, kept in (
                (stream.varint(sizes[1]) + b"\x00\x00", b"\x01"),
                (stream.varint(sizes[1]) + b"\x00\x00", b"\x03\x01" + bytes(4)),
                (b"", b"\x00" + stream.varint(sizes[1]) + b"\x00\x00"),
            ):
                if sizes[0] * sizes[1] == 0:
                    continue
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                with pytest.raises(CorruptStream):
                    reference.decode(stream.write(header, [[shape, positions, kept, b"", b""]]))
                assert tracemalloc.get_traced_memory()[1] - before < 1 << 21
    finally:
        tracemalloc.stop()


def test_weights_travel_with_the_tokens():
    """parts_of and joined are what MergeReduce writes with: weights in binary32, forms of reference.kept."""
    own = asked(27, tokens=9)
    index = [np.array([0, 3, 4])] * 2
    for weights in ([np.log([2.0, 3, 4])] * 2, [np.array([1.0, 1, 1])] * 2, [np.zeros(3), np.array([0, 0, -7.5])]):
        left = chosen(own, index, weights)
        data = stream.write(reference.SnapKV()._header(stream.Kind.LAYER), [parts_of(Shape.of(own), left)])
        decoded = reference.decode(data)
        assert same(decoded, written(left)) and Kept.of(left).places is None
        stranger = strangers.decode_reduced(data)
        assert np.array_equal(np.array(stranger["log_weights"]), decoded.log_weights)


def test_attention_over_what_is_left_is_attention_without_the_others():
    """A query's outputs over the decoded layer are those over the original with the dropped tokens hidden."""
    own = asked(28, heads=2, group=2)
    codec = REDUCERS["SnapKV 12"]
    decoded = reference.decode(codec.encode(own))
    hidden = np.full((2, 40), -np.inf)
    for h, places in enumerate(kept_places(own, decoded)):
        hidden[h, places] = 0
    queries = own.queries[:, -1:]
    full = attention.attend(queries, own.keys, own.values, scale=own.scale, log_weights=hidden)
    found = attention.attend(queries, decoded.keys, decoded.values, scale=own.scale, log_weights=decoded.log_weights)
    assert np.allclose(full, found, rtol=0, atol=1e-12)
