"""gpu.profiles: products of response profiles within derived bounds of float64's on the same numbers, and spectra with the reference's meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import gpu
import kvtheory
from gpu import scores
from gpu.module import simulator, sources
from gpu.profiles import Profiles, gram
from kvtheory.risk import spectra
from kvtheory.risk.gram import centred_gram
from tests.kernels import fake_cupy
from tests.kernels.strategies import ELEMENTS, STRIDES, kernel_settings, numbers, orders, sizes, strided

Float = NDArray[np.float64]
#: no subnormal and no huge ones: bounds below are relative to sums of magnitudes, and their underflow term is crude
TAME = ("normal", "zeros", "constant", "outliers", "ties", "sparse", "negative zeros", "mixed scales")


def gamma(count: float, precision: Any) -> float:
    """count roundings of relative u: n u / (1 - n u)."""
    nu = count * float(np.finfo(precision).eps) / 2
    return nu / (1 - nu)


@st.composite
def heads(draw: st.DrawFn, tokens: int = 130) -> dict[str, Any]:
    dtype = draw(st.sampled_from([*ELEMENTS, np.dtype(np.float64)]))
    n, m, d, dv = draw(sizes(tokens)), draw(sizes(9)), draw(sizes(33)), draw(sizes(17))
    q, k, v = (
        strided(
            numbers(draw(st.sampled_from(TAME)), shape, dtype, draw(st.integers(0, 2**32 - 1))),
            draw(st.sampled_from(STRIDES)),
        )
        for shape in ((m, d), (n, d), (n, dv))
    )
    weights = None
    if draw(st.booleans()):
        weights = np.random.default_rng(draw(st.integers(0, 2**32 - 1))).uniform(0.1, 1, n)
        weights /= weights.sum()
    # logits of outliers would leave one token in 130 with all of the attention, and exp at its ends
    scale = None if not q.size else min(d**-0.5, 8 / max(1e-30, _peak(q) * _peak(k) * d))
    return {
        "q": q, "k": k, "v": v, "weights": weights, "scale": scale, "kind": draw(st.sampled_from(["centred", "augmented"])),
        "precision": draw(st.sampled_from(["float32", "float64"])),
    }  # fmt: skip


def _peak(x: Any) -> float:
    return float(np.abs(x.astype(np.float64)).max(initial=0.0))


def dense(head: Profiles, get: Any) -> tuple[Float, Float]:
    """X (n, m channels) from the numbers that the kernels get, and the magnitudes that its rounding is relative to."""
    b, v, o, roots = (get(x).astype(np.float64) for x in (head.b, head.v, head.o, head.roots))
    if head.kind == "centred":
        x = b[:, :, None] * (v[:, None] - o)
        size = np.abs(x)
    else:
        x = b[:, :, None] * v[:, None] - o
        size = b[:, :, None] * np.abs(v)[:, None] + np.abs(o)
    return tuple((roots[:, None, None] * one).reshape(len(b), -1) for one in (x, size))  # type: ignore[return-value]


@kernel_settings
@given(given_=heads(), columns=sizes(70), order=orders(), seed=st.integers(0, 2**32 - 1))
def test_products_are_float64s_within_the_bound(backend, given_, columns, order, seed) -> None:
    how = {**given_, **{name: backend.put(given_[name]) for name in "qkv"}}
    with backend.running(order):
        head = Profiles(how.pop("q"), how.pop("k"), how.pop("v"), **how)
        x, size = dense(head, backend.get)
        rng = np.random.default_rng(seed)
        y, w = (rng.standard_normal((rows, columns)).astype(head.element) for rows in (x.shape[1], x.shape[0]))
        forward, adjoint = head.forward(backend.put(y)), head.adjoint(backend.put(w))
    # three roundings make an element of X, one adds each term; beside them, products below the smallest normal number
    for got, left, magnitude, right in ((forward, x, size, y), (adjoint, x.T, size.T, w)):
        terms = left.shape[1]
        limit = gamma(terms + 4, head.element) * (magnitude @ np.abs(right)) + terms * float(
            np.finfo(head.element).tiny
        )
        exact = left @ right.astype(np.float64)
        # twice: where both sums are float64, the one they are held against rounds as they do
        assert (np.abs(backend.get(got).astype(np.float64) - exact) <= 2 * limit).all()


@kernel_settings
@given(
    n=sizes(140), m=sizes(40), dv=sizes(35), kind=st.sampled_from(TAME), order=orders(), seed=st.integers(0, 2**32 - 1),
    precision=st.sampled_from([np.float32, np.float64]), c2=st.sampled_from([0.0, 0.75]),
)  # fmt: skip
def test_gram_is_float64s_within_the_bound(backend, n, m, dv, kind, order, seed, precision, c2) -> None:
    rng = np.random.default_rng(seed)
    b = rng.exponential(size=(n, m)).astype(precision)
    v, o = numbers(kind, (n, dv), np.float32, seed).astype(precision), rng.standard_normal((m, dv)).astype(precision)
    with backend.running(order):
        got = backend.get(gram(*(backend.put(x) for x in (b, v, o)), c2=c2))
    np.testing.assert_array_equal(got, got.T)
    b, v, o = (x.astype(np.float64) for x in (b, v, o))
    size_v, size_o = np.abs(v), np.abs(o)
    mixed = b * (size_v @ size_o.T)
    magnitude = (b @ b.T) * (size_v @ size_v.T + c2) + mixed @ b.T + b @ mixed.T + (b * (o**2).sum(axis=1)) @ b.T
    # u and |o|^2 are sums of dv terms, three products and additions go into e, the sums over queries have 2 m terms
    limit = gamma(2 * m + 2 * dv + 12, precision) * magnitude / m + m * float(np.finfo(precision).tiny)
    assert (np.abs(got - centred_gram(b, v, o, c2)) <= 2 * limit).all()


@kernel_settings
@given(given_=heads(tokens=99), order=orders())
def test_densities_and_outputs_are_the_references(backend, given_, order) -> None:
    how = {**given_, **{name: backend.put(given_[name]) for name in "qkv"}}
    with backend.running(order):
        head = Profiles(how.pop("q"), how.pop("k"), how.pop("v"), **how)
        rows = scores.Rows(
            backend.put(given_["q"][None]), backend.put(given_["k"][None]), given_["scale"], given_["precision"]
        )
        each = rows.error(rows.largest())
    q, k, v = (given_[name].astype(np.float64) for name in "qkv")
    n = len(k)
    want = kvtheory.risk.profiles.density(q, k, given_["weights"], given_["scale"])
    # with weights, Z is a sum of n products, each of a rounded attention and a rounded p; factors of p_min = 0.1 / n at worst
    limit = 3 * (each + gamma(n + 8, head.element)) + 2.0**-45
    got = backend.get(head.b).astype(np.float64)
    assert (np.abs(got - want) <= want * limit + n * 2.0**-100).all()
    p = np.full(n, 1 / n) if given_["weights"] is None else given_["weights"]
    a = want * p[:, None]
    o = backend.get(head.o).astype(np.float64)[:, : v.shape[1]]
    assert (np.abs(o - a.T @ v) <= (a.T @ np.abs(v)) * 2 * limit + n * 2.0**-100).all()


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["centred", "augmented"])
@pytest.mark.parametrize(("tokens", "queries"), [(230, 5), (60, 20)])
@pytest.mark.parametrize("weighted", [False, True])
def test_spectra_mean_what_the_references_mean(backend, precision, kind, tokens, queries, weighted) -> None:
    made = kvtheory.synthetic.make(
        "clustered", kv_heads=1, query_heads=1, tokens=tokens, head_dim=16, queries=queries, seed=3
    )
    q, k, v = (np.asarray(x[0], np.float64) for x in (made.queries, made.keys, made.values))
    weights = np.linspace(1, 2, tokens) / np.linspace(1, 2, tokens).sum() if weighted else None
    exact = kvtheory.risk.spectrum(q, k, v, weights=weights, kind=kind)
    with backend.running(4):
        head = Profiles(
            *(backend.put(x.astype(precision)) for x in (q, k, v)), weights=weights, kind=kind, precision=precision
        )
        found, features = head.spectrum(4), head.features(3)
        grams = backend.get(head.gram()) if kind == "centred" else None
    # densities are off by `each` as a factor, so X is by twice that (its outputs move too), and its squares by four times
    rows = scores.Rows(q[None].astype(precision), k[None].astype(precision), None, precision)
    with backend.running():
        each = rows.error(rows.largest())
    rounded = 2 * gamma(4, precision) * float(np.linalg.norm(q, axis=1).max() * np.linalg.norm(k, axis=1).max()) / 4
    slack = (
        (8 * (each + rounded) + head._slack() + gamma(tokens + 8, precision))
        * exact.trace
        * (4 if kind == "augmented" else 1)
    )
    assert abs(found.trace - exact.trace) <= slack
    for m in range(5):
        assert exact.tail(m) - slack <= found.tail(m) <= exact.tail(m) + found.error + slack
    known = spectra.profile_features(q, k, v, 3, weights=weights, kind=kind)
    p = np.full(tokens, 1 / tokens) if weights is None else weights
    total = (p * (features.missing + (features.coordinates**2).sum(axis=1))).sum()
    assert abs(total - exact.trace) <= slack
    # the same directions: what they leave, over all tokens, is the reference's
    assert abs((p * features.missing).sum() - (p * known.missing).sum()) <= slack + found.error
    if grams is not None:
        g = kvtheory.risk.response_profiles(q, k, v, weights=weights)
        x = (g * np.sqrt(p / queries)[:, None, None]).reshape(tokens, -1)
        assert np.abs(grams - x @ x.T).max() <= slack


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = np.ones((3, 4)), np.ones((5, 4)), np.ones((5, 2))
    for slip, match in (
        (lambda: Profiles(q, k, v[:4]), "v: expected"),
        (lambda: Profiles(q[:, :3], k, v), "q: expected"),
        (lambda: Profiles(q[:0], k, v), "q: expected m >= 1"),
        (lambda: Profiles(q, k, v, kind="other"), "kind: expected"),
        (lambda: Profiles(q, k, v * np.nan), "v: expected finite numbers, got nan"),
        (lambda: Profiles(q, k * np.nan, v), "keys: expected finite"),
        (lambda: Profiles(q, k, v, weights=np.zeros(5)), "weights: expected"),
        (lambda: Profiles(q, k, v).forward(np.ones((5, 1))), r"y: expected shape \(6, columns\)"),
        (lambda: Profiles(q, k, v).spectrum(0), "rank: expected"),
        (lambda: Profiles(q, k, v, kind="augmented").gram(), "gram: expected a centred"),
        (lambda: gram(np.ones((0, 3)), np.ones((0, 2)), np.ones((3, 2))), "at least one"),
    ):
        with pytest.raises(ValueError, match=match), simulator("check"):
            slip()
    with pytest.raises(TypeError, match="all float32 or all float64"):
        gram(np.ones((2, 3)), np.ones((2, 2), np.float32), np.ones((3, 2)))


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    gpu.codecs()
    yield fake_cupy.install(monkeypatch)
    for source in sources():
        source._modules.clear()


@pytest.mark.parametrize("kind", ["centred", "augmented"])
def test_heads_on_the_gpu_are_alike(cupy: Any, kind: Any) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal(shape) for shape in ((6, 8), (90, 8), (90, 5)))
    weights = np.linspace(1, 2, 90) / np.linspace(1, 2, 90).sum()
    with simulator("check", seed=9):
        here, there = (
            Profiles(*arrays, weights=weights, kind=kind)
            for arrays in ((q, k, v), [cupy.asarray(x) for x in (q, k, v)])
        )
        assert type(there.b) is cupy.ndarray
        y = rng.standard_normal((here.shape[1], 4))
        np.testing.assert_array_equal(there.normal(cupy.asarray(y)).get(), here.normal(y))
        one, other = there.spectrum(3), here.spectrum(3)
        np.testing.assert_array_equal(one.eigenvalues, other.eigenvalues)
        assert (one.trace, one.error) == (other.trace, other.error)
        np.testing.assert_array_equal(there.features(3).missing, here.features(3).missing)
        if kind == "centred":
            np.testing.assert_array_equal(there.gram().get(), here.gram())


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_tokens_of_several_parts_are_summed(backend, precision) -> None:
    """Beyond 4,096 tokens `adjoint` writes sums of parts."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal(shape).astype(precision) for shape in ((2, 4), (8200, 4), (8200, 3)))
    with backend.running(3, build="fast"):
        head = Profiles(*(backend.put(x) for x in (q, k, v)), precision=precision)
        x, size = dense(head, backend.get)
        y = rng.standard_normal((8200, 2)).astype(precision)
        got = backend.get(head.adjoint(backend.put(y)))
    limit = 2 * gamma(8206, precision) * (size.T @ np.abs(y.astype(np.float64)))
    assert (np.abs(got - x.T @ y.astype(np.float64)) <= limit).all()
    # and these outputs are the reference's
    want = kvtheory.attention.attend(q[None], k[None], v[None])[0]
    assert np.abs(backend.get(head.o) - want).max() < 100 * gamma(100, precision)
