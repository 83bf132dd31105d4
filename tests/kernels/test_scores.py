"""gpu.scores against reference.snapkv and reference.scissorhands: within the derived bound, and the same kept tokens where it says so."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu
import kvtheory
import reference
from gpu import scores
from gpu.module import simulator, sources
from kvtheory import attention
from reference import snapkv as numpy_snapkv
from tests.kernels import fake_cupy
from tests.kernels.strategies import ELEMENTS, KINDS, STRIDES, kernel_settings, numbers, orders, sizes, strided

PRECISIONS = ("float32", "float64")
#: logits of "huge" numbers overflow float32, which has a test of its own
TAME = tuple(kind for kind in KINDS if kind != "huge")


@dataclass
class Case:
    layer: kvtheory.Layer
    precision: Any

    @property
    def arguments(self) -> dict[str, Any]:
        of = self.layer
        placed = {} if of.query_positions is None else {"query_positions": of.query_positions, "window": of.window}
        return {"scale": of.scale, "positions": of.positions, "precision": self.precision, **placed}


@st.composite
def cases(draw: st.DrawFn, tokens: int = 150, least_tokens: int = 1) -> Case:
    """A layer with queries: head_dim, group, positions with gaps, a sliding window, queries before the first token, float64, any strides."""
    kind = draw(st.sampled_from([*ELEMENTS, np.dtype(np.float64)]))
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n, m, d = draw(sizes(tokens, least_tokens)), draw(sizes(33)), draw(sizes(65))
    keys, queries = (
        strided(
            numbers(draw(st.sampled_from(TAME)), shape, kind, draw(st.integers(0, 2**32 - 1))),
            draw(st.sampled_from(STRIDES)),
        )
        for shape in ((kv_heads, n, d), (kv_heads * group, m, d))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placed: dict[str, Any] = {}
    if draw(st.booleans()):
        positions = np.cumsum(rng.integers(1, 3, n))
        placed = {"positions": positions, "query_positions": rng.integers(-1, positions[-1] + 3, m)}
        if draw(st.booleans()):
            placed["window"] = int(rng.integers(1, 2 * n + 1))
    layer = kvtheory.Layer(keys, keys, queries, **placed)
    return Case(layer, draw(st.sampled_from(PRECISIONS)))


def bound(case: Case, count: int) -> tuple[float, float]:
    rows = scores.Rows(case.layer.queries, case.layer.keys, case.layer.scale, case.precision)
    return scores._summed(rows, rows.error(rows.largest()), count * case.layer.group)


@kernel_settings
@given(case=cases(), order=orders())
def test_mass_is_the_references_within_the_bound(backend, case, order) -> None:
    of = case.layer
    with backend.running(order):
        mass = scores.attention_mass(backend.put(of.queries), backend.put(of.keys), **case.arguments)
        relative, absolute = bound(case, of.queries.shape[1])
    mass = backend.get(mass)
    want = numpy_snapkv.attention_mass(of, np.arange(of.queries.shape[1]))
    assert mass.dtype == np.dtype("float64" if of.keys.dtype == np.float64 else case.precision)
    # 2^-40: the reference's own roundings, of 150 x 99 numbers and logits below 2^10
    assert (np.abs(mass - want) <= want * (relative + 2.0**-40) + absolute).all()


def test_the_bound_is_no_excuse() -> None:
    """Where logits are ordinary it is a few hundred roundings, and a sum of 99 queries' attention is within it."""
    assert scores.error("float32", 128, 1 << 15, 10.0, 128**-0.5) < 4e-4
    assert scores.error("float64", 128, 1 << 20, 100.0, 128**-0.5) < 1e-10
    assert scores.error("float32", 128, 1 << 15, 1e7, 1.0) == np.inf or scores.error("float32", 128, 1, 1e7, 1.0) > 1


@kernel_settings
@given(case=cases(least_tokens=2), order=orders(), data=st.data())
def test_snapkv_keeps_the_references_tokens(backend, case, order, data) -> None:
    of = case.layer
    codec = reference.SnapKV(
        keep=data.draw(st.integers(0, of.tokens)), sinks=data.draw(st.integers(0, 4)), window=data.draw(st.integers(1, 20)),
        kernel=data.draw(st.sampled_from([1, 3, 5, 7])), pooling=data.draw(st.sampled_from(["mean", "max"])),
    )  # fmt: skip
    with backend.running(order):
        got = scores.snapkv(codec, backend.put(of.queries), backend.put(of.keys), **case.arguments)
        relative, absolute = bound(case, codec.window)
    want = codec.places(of)
    assert [len(one) for one in got.tokens] == [len(one) for one in want]
    same = all((one == other).all() for one, other in zip(got.tokens, want))
    assert same or not got.certain
    if same:
        return
    # else what differs is a tie: scores within the bound of each other
    last = min(codec.window, codec.keep - min(codec.sinks, codec.keep))
    mass = numpy_snapkv.attention_mass(of, numpy_snapkv.latest_queries(of, codec.window))[:, : of.tokens - last]
    exact = numpy_snapkv.pooled(mass, codec.kernel, codec.pooling)
    for one, other, score in zip(got.tokens, want, exact):
        mine, theirs = score[np.setdiff1d(one, other)], score[np.setdiff1d(other, one)]
        if not mine.size:  # this head keeps the same; another does not
            continue
        assert theirs.max() - mine.min() <= (theirs.max() + mine.min()) * (relative + 2.0**-40) + 2 * absolute


@kernel_settings
@given(case=cases(tokens=65), order=orders(), data=st.data())
def test_scissorhands_keeps_the_references_tokens(backend, case, order, data) -> None:
    of = case.layer
    codec = reference.ScissorHands(
        keep=data.draw(st.integers(0, of.tokens)), sinks=data.draw(st.integers(0, 3)), window=data.draw(st.integers(0, 9)),
        history=data.draw(st.integers(1, 40)), drop=data.draw(st.sampled_from([0.1, 0.3, 0.5, 1.0])),
    )  # fmt: skip
    with backend.running(order):
        got = scores.scissorhands(codec, backend.put(of.queries), backend.put(of.keys), **case.arguments)
    want = codec.places(of)
    assert [len(one) for one in got.tokens] == [len(one) for one in want]
    if got.certain:
        for one, other in zip(got.tokens, want):
            np.testing.assert_array_equal(one, other)


@kernel_settings
@given(case=cases(tokens=99), order=orders())
def test_counts_differ_from_the_references_only_where_in_doubt(backend, case, order) -> None:
    of = case.layer
    rows = scores.Rows(backend.put(of.queries), backend.put(of.keys), of.scale, case.precision)
    asked = np.arange(rows.count)
    with backend.running(order):
        near = min(1.01 * (rows.error(rows.largest()) + 4 * float(np.finfo(rows.element).eps)), 1e30)
        sight, own = scores.Sight(np.arange(of.tokens), None, None), rows.chosen(asked)
        known = rows.statistics(own, rows.keys, rows.count, sight)
        threshold = np.full(rows.count, 1 / of.tokens)
        low, doubts = map(backend.get, rows.columns(own, rows.keys, rows.count, sight, known, threshold, near))
    for kv in range(of.kv_heads):
        heads = [of.head(h) for h in range(kv * of.group, (kv + 1) * of.group)]
        exact = sum((attention.weights(h.q, h.k, h.scale) < 1 / of.tokens).sum(axis=0) for h in heads)
        assert (np.abs(low[kv] - exact) <= doubts[kv]).all()


def ordinary(seed: int, dtype: Any = np.float32, tokens: int = 700, placed: bool = True) -> kvtheory.Layer:
    made = kvtheory.synthetic.make(
        "clustered", kv_heads=2, query_heads=4, tokens=tokens, head_dim=16, queries=90, seed=seed
    )
    keys, queries = (np.asarray(x).astype(dtype) for x in (made.keys, made.queries))
    places = np.sort(np.random.default_rng(seed).integers(0, tokens, 90)) if placed else None
    return kvtheory.Layer(keys, keys, queries, query_positions=places)


@pytest.mark.parametrize("placed", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_on_ordinary_data_float64_is_certain(backend, dtype, placed) -> None:
    """That `certain` is of use: of several chunks of tokens, and all evictions, nothing was in doubt."""
    of = ordinary(1, dtype, placed=placed)
    how = {"query_positions": of.query_positions, "precision": "float64"}
    with backend.running(2):
        arrays = backend.put(of.queries), backend.put(of.keys)
        for decide, codec in (
            (scores.snapkv, reference.SnapKV(keep=120)),
            (scores.scissorhands, reference.ScissorHands(keep=0.2, history=50)),
        ):
            got = decide(codec, *arrays, **how)
            assert got.certain, codec
            for one, other in zip(got.tokens, codec.places(of)):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_attention_that_equals_the_threshold_is_not_below_it(backend, precision) -> None:
    """64 equal tokens: exp(0) / 64 is exact, and so is 1 / 64. With one more of a smaller logit, that one alone is below."""
    equal = np.ones((1, 64, 4), np.float32)
    smaller = np.concatenate([np.zeros((1, 1, 4), np.float32), equal], axis=1)
    for keys, want in ((equal, [0] * 64), (smaller, [3] + [0] * 64)):
        rows = scores.Rows(backend.put(equal[:, :3]), backend.put(keys), 1.0, precision)
        sight = scores.Sight(np.arange(len(want)), None, None)
        with backend.running():
            known = rows.statistics(rows.queries, rows.keys, 3, sight)
            low, _ = rows.columns(rows.queries, rows.keys, 3, sight, known, np.full(3, 1 / len(want)))
        np.testing.assert_array_equal(backend.get(low), [want])


def test_an_exact_tie_is_not_certain(backend) -> None:
    of = kvtheory.Layer(
        np.ones((1, 40, 4), np.float32), np.ones((1, 40, 4), np.float32), np.ones((1, 3, 4), np.float32)
    )
    with backend.running():
        arrays = backend.put(of.queries), backend.put(of.keys)
        assert not scores.snapkv(reference.SnapKV(keep=20, window=4), *arrays).certain
        assert not scores.scissorhands(reference.ScissorHands(keep=20, window=4), *arrays).certain


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_named(backend, bad) -> None:
    keys, queries = np.ones((2, 70, 9), np.float32), np.ones((4, 5, 9), np.float32)
    keys[1, 66, 3] = bad
    with backend.running(), pytest.raises(ValueError, match=r"keys: expected finite.*head 1, token 66, channel 3"):
        scores.attention_mass(backend.put(queries), backend.put(keys))
    keys[1, 66, 3], queries[2, 4, 8] = 1, bad
    with backend.running(), pytest.raises(ValueError, match=r"queries: expected finite.*head 2, query 4, channel 8"):
        scores.attention_mass(backend.put(queries), backend.put(keys))


def test_logits_beyond_float32_are_refused_and_float64_holds_them(backend) -> None:
    keys = np.zeros((1, 3, 2), np.float32)
    keys[0, 1] = 1e30
    queries = np.full((1, 1, 2), 1e30, np.float32)
    with backend.running():
        with pytest.raises(ValueError, match=r'logits within float32.*precision="float64"'):
            scores.attention_mass(backend.put(queries), backend.put(keys))
        mass = backend.get(scores.attention_mass(backend.put(queries), backend.put(keys), precision="float64"))
    np.testing.assert_array_equal(mass, [[0, 1, 0]])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"queries": np.ones((3, 4, 8), np.float32)}, ValueError, "multiple of 2 KV heads"),
        ({"queries": np.ones((2, 4, 7), np.float32)}, ValueError, "queries: expected"),
        ({"keys": np.ones((2, 8), np.float32)}, ValueError, "keys: expected"),
        ({"keys": np.ones((2, 5, 8), np.int32)}, TypeError, "keys: expected elements of bfloat16"),
        ({"positions": np.arange(4)}, ValueError, "positions: expected 5 integers"),
        ({"query_positions": np.ones(4)}, ValueError, "query_positions: expected 4 integers"),
        ({"precision": "float16"}, ValueError, "precision: expected one of float32, float64"),
        ({"scale": -1.0}, ValueError, "scale"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, match) -> None:
    given = {"queries": np.ones((4, 4, 8), np.float32), "keys": np.ones((2, 5, 8), np.float32), **change}
    with pytest.raises(error, match=match):
        scores.attention_mass(given.pop("queries"), given.pop("keys"), **given)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    gpu.codecs()
    yield fake_cupy.install(monkeypatch)
    for source in sources():
        source._modules.clear()


@pytest.mark.parametrize("placed", [True, False])
def test_arrays_on_the_gpu_are_scored_alike(cupy: Any, placed: bool) -> None:
    of = ordinary(4, tokens=150, placed=placed)
    there = [cupy.asarray(x) for x in (of.queries, of.keys)]
    how = {"query_positions": of.query_positions}
    with simulator("check", seed=3):
        mass = scores.attention_mass(*there, **how)
        assert type(mass) is cupy.ndarray
        np.testing.assert_array_equal(mass.get(), scores.attention_mass(of.queries, of.keys, **how))
        for decide, codec in (
            (scores.snapkv, reference.SnapKV(keep=50, pooling="max")),
            (scores.scissorhands, reference.ScissorHands(keep=40)),
        ):
            got, want = decide(codec, *there, **how), decide(codec, of.queries, of.keys, **how)
            assert got.certain == want.certain
            for one, other in zip(got.tokens, want.tokens):
                np.testing.assert_array_equal(one, other)
