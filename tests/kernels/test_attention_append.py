"""DeviceCache.append: exact tails, chunks that become codes, and all of it asked within the bound of what a decoder of each part holds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from gpu.device_cache import DeviceCache
from kvtheory.layer import Decoded, Layer
from tests.kernels.attention_cases import EXAMPLES, asked, compared, queries
from tests.kernels.strategies import orders
from tests.reference.strategies import DTYPES, layer, text

CODED = sorted(set(EXAMPLES) - {"Full", "MergeReduce"})


def chunk_decoded(codec, part):
    """What a decoder holds of a layer that `codec` codes without sinks and window."""
    if isinstance(codec, reference.KIVI):
        # a window of one group: the values of a group behind it are what stays exact
        longer = part.replace(
            keys=np.concatenate([part.keys, part.keys[:, -codec.group :]], axis=1),
            values=np.concatenate([part.values, part.values[:, -codec.group :]], axis=1), positions=None,
        )  # fmt: skip
        one = reference.decode(reference.KIVI(codec.bits, codec.group, codec.group).encode(longer))
        return one.keys[:, : part.tokens], one.values[:, : part.tokens], np.zeros((part.kv_heads, part.tokens))
    if isinstance(codec, reference.KVQuant):
        codec = dataclasses.replace(codec, sinks=0)
    elif not isinstance(codec, reference.TurboQuant):
        codec = dataclasses.replace(codec, sinks=0, window=0)
    one = codec.decode(codec.encode(part))
    return one.keys, one.values, one.log_weights


def expected(codec, decoded, more, positions, fold):
    """`decoded`, then chunks of `fold` tokens while twice as many are left, then the rest as they are."""
    pieces = [(decoded.keys, decoded.values, decoded.log_weights)]
    at = 0
    while fold and more.tokens - at >= 2 * fold:
        part = more.replace(
            keys=more.keys[:, at : at + fold], values=more.values[:, at : at + fold], positions=positions[at : at + fold], extras={}, queries=None,
            query_positions=None, output_proj=None,
        )  # fmt: skip
        pieces.append(chunk_decoded(codec, part))
        at += fold
    rest = more.keys[:, at:], more.values[:, at:]
    pieces.append((*rest, np.zeros(rest[0].shape[:2])))
    keys, values, weights = (np.concatenate([piece[k] for piece in pieces], axis=1) for k in range(3))
    where = np.concatenate([decoded.positions, np.tile(positions, (len(keys), 1))], axis=1)
    return (
        Decoded.of(keys, values, where[0])
        if not weights.any()
        else Decoded(keys, values, weights, where, np.full(len(keys), keys.shape[1]))
    )


def appended(backend, name, dtype, sizes, fold, gap, order, how):
    codec, data = EXAMPLES[name]()
    kind = DTYPES[dtype]
    data = data.replace(keys=data.keys.astype(kind), values=data.values.astype(kind))
    more = text("C", sum(sizes), dtype=dtype)[0].replace(rope=data.rope, index=data.index)
    stream = codec.encode(data)
    decoded = reference.decode(stream, codec.state)
    positions = data.tokens + gap + np.arange(more.tokens)
    with backend.running(order):
        cache = DeviceCache(stream, codec.state, backend.xp, split=how["split"], fold=fold)
        at = 0
        for n in sizes:
            own = slice(at, at + n)
            where = positions[own] if gap else None
            cache.append(backend.put(more.keys[:, own]), backend.put(more.values[:, own]), where)
            at += n
    return cache, expected(codec, decoded, more, positions, cache.fold)


@settings(max_examples=60)
@given(
    name=st.sampled_from(CODED), dtype=st.sampled_from(sorted(DTYPES)), sizes=st.lists(st.sampled_from((1, 5, 32, 33, 70)), min_size=1, max_size=6),
    gap=st.sampled_from((0, 0, 3)), how=asked(3, 3), order=orders(),
)  # fmt: skip
def test_codes_and_tail(backend, name, dtype, sizes, gap, how, order):
    cache, decoded = appended(backend, name, dtype, sizes, 32, gap, order, how)
    exact = cache.segments[-1]
    assert exact.tokens < 2 * cache.fold and (sum(sizes) < 2 * cache.fold or exact.tokens >= cache.fold)
    assert cache.tokens == decoded.keys.shape[1]
    q, where = queries(how, cache.kv_heads, cache.head_dim, decoded)
    found, wanted, bound = compared(backend, cache, decoded, q, where, order)
    assert (np.abs(found - wanted) <= bound).all()


@pytest.mark.parametrize("name", CODED)
def test_many_chunks(backend, name):
    """Chunks behind chunks: offsets into what was there before."""
    how = {"group": 2, "count": 2, "dtype": "float32", "kind": "normal", "seed": 1, "causal": False, "split": None}
    cache, decoded = appended(backend, name, "float32", [70] * 3, 32, 0, 0, how)
    q, where = queries(how, cache.kv_heads, cache.head_dim, decoded)
    found, wanted, bound = compared(backend, cache, decoded, q, where, 0)
    assert (np.abs(found - wanted) <= bound).all()


@settings(max_examples=15)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), how=asked(3, 3), order=orders())
def test_tokens_behind_a_full_or_a_reduced_cache_stay_exact(backend, sizes, how, order):
    for name in ("Full", "MergeReduce"):
        codec, data = EXAMPLES[name]()
        more = text("C", sum(sizes))[0]
        decoded = reference.decode(codec.encode(data))
        with backend.running(order):
            cache = DeviceCache(codec.encode(data), xp=backend.xp, split=how["split"], fold=32)
            for at, n in zip(np.cumsum([0, *sizes]), sizes):
                cache.append(backend.put(more.keys[:, at : at + n]), backend.put(more.values[:, at : at + n]))
        start = int(decoded.positions.max()) + 1
        width = decoded.keys.shape[1] + more.tokens
        pads = [np.concatenate([a, b], axis=1) for a, b in ((decoded.keys, more.keys), (decoded.values, more.values))]
        weights = np.concatenate([decoded.log_weights, np.zeros((2, more.tokens))], axis=1)
        where = np.concatenate([decoded.positions, np.tile(start + np.arange(more.tokens), (2, 1))], axis=1)
        whole = _Rectangle(*pads, weights, where)
        assert cache.tokens == width and cache.fold == 0 and len(cache.segments) == 2
        q, at = queries(how, 2, 16, whole)
        found, wanted, bound = compared(backend, cache, whole, q, at, order)
        assert (np.abs(found - wanted) <= bound).all()


@dataclasses.dataclass
class _Rectangle:
    """A decoded cache with padding between tokens, which Decoded has at the end only."""

    keys: np.ndarray
    values: np.ndarray
    log_weights: np.ndarray
    positions: np.ndarray


def test_chunks_share_arrays_where_codes_end_at_words(backend):
    cache, _ = appended(backend, "TurboQuant", "float16", [70] * 5, 32, 0, 0, {"split": None})
    assert [type(one).__name__ for one in cache.segments] == ["TurboQuant", "TurboQuant", "Exact"]
    assert cache.segments[1].tokens == 288 and cache.segments[1].positions == range(77, 365)


def test_what_is_refused_changes_nothing(backend):
    data = layer(1, 2, 5, 4, 3, "float16")
    with backend.running():
        cache = DeviceCache(reference.TurboQuant().encode(data), xp=backend.xp)
        keys, values = np.zeros((2, 3, 4), np.float16), np.zeros((2, 3, 3), np.float16)
        nan = values.copy()
        nan[1, 2, 0] = np.nan
        for k, v, at, error, match in (
            (keys[:1], values, None, ValueError, "keys"),
            (keys, values[:, :2], None, ValueError, "values"),
            (keys.astype(np.float32), values, None, TypeError, "expected elements of float16"),
            (keys, nan, None, ValueError, "head 1, token 2, channel 0"),
            (keys, values, np.array([7, 6, 8]), ValueError, "ascending"),
            (keys, values, np.array([1, 2, 3]), ValueError, "from 4 on"),
            (keys, values, np.array([5.0, 6, 7]), ValueError, "integers"),
        ):
            with pytest.raises(error, match=match):
                cache.append(backend.put(k), backend.put(v), at)
        assert cache.tokens == 5
        cache.append(backend.put(keys[:, :0]), backend.put(values[:, :0]))
        assert cache.tokens == 5
    with pytest.raises(ValueError, match="float32 can hold"):
        wide = Layer(np.zeros((1, 1, 1)), np.zeros((1, 1, 1)))
        DeviceCache(reference.Full().encode(wide), xp=backend.xp).append(
            backend.put(np.full((1, 1, 1), 1e39)), backend.put(np.zeros((1, 1, 1)))
        )
