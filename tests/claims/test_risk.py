"""The claims of arXiv 2607.01520: expected verdicts, every mutant refuted, and wrong functions in kvtheory turn the verdict."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import numpy as np
import pytest

import kvtheory
from kvtheory import balancing, risk
from kvtheory.balancing import walks
from kvtheory.layer import Layer
from proofs_checks import ledger
from proofs_checks import risk as claims_of_risk
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture
from proofs_checks.risk import heads
from proofs_checks.run import run_claim

CLAIMS: dict[str, Claim] = {c.id: c for c in vars(claims_of_risk).values() if isinstance(c, Claim)}


def context(claim: Claim, cache=None, **changes) -> Context:
    return Context(cache=cache, cache_name="sample" if cache else "none", claims=20, claim_id=claim.id, **changes)


@pytest.fixture(scope="module")
def real():
    return kvtheory.sample_cache()


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_verdict_and_mutants(claim):
    outcome = run_claim(claim, context(claim))
    assert outcome.error is None
    assert outcome.verdict is claim.expected, [e for e in outcome.evidence if e.agrees is not True]
    assert [m.name for m in outcome.mutants if not m.refuted] == []


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_verdict_on_the_real_cache(claim, real):
    found = list(claim.run(context(claim, real)))
    assert claim.judge([e for e in found if isinstance(e, Evidence)]) is claim.expected
    for item in found:
        if isinstance(item, Picture):
            json.dumps(item.data, allow_nan=False)
        else:
            json.dumps(ledger.plain(item.observed), allow_nan=False)


def test_ids_and_corrections():
    assert set(CLAIMS) >= {
        "risk/error-identity", "risk/sampling-iid", "risk/sampling-without-replacement", "risk/spectral-bound",
        "risk/plain-cube-bound", "risk/retrieval-regime", "risk/safe-bound", "risk/augmented-trace-bound",
        "risk/minimax-trace", "risk/minimax-sandwich", "risk/aware-agnostic-separation", "risk/search-lower-bound",
        "risk/search-lower-bound-any-atoms", "risk/any-atoms-floor", "risk/own-tokens-floor", "risk/weights-beat-dropping",
        "risk/merge-reduce-accumulation", "risk/query-knowledge", "risk/sinks", "risk/sinks-kept", "risk/spectral-decay",
        "risk/assumption-5-1", "risk/protected-features", "risk/selection-beats-balance", "risk/selection-bound",
        "risk/longbench-table", "risk/sampling-rate",
    }  # fmt: skip
    ours = {
        "risk/plain-cube-bound", "risk/augmented-trace-bound", "risk/any-atoms-floor", "risk/own-tokens-floor",
        "risk/weights-beat-dropping", "risk/sinks", "risk/sinks-kept", "risk/protected-features", "risk/selection-beats-balance",
        "risk/selection-bound",
    }  # fmt: skip
    for claim in CLAIMS.values():
        assert claim.paper == ("kvtheory" if claim.id in ours else "2607.01520") and len(claim.mutants) >= 2
        if claim.expected is Verdict.FAILS:
            assert claim.correction in CLAIMS


def _record(**fields):
    """A spectrum with some fields changed: fields name -> function of the spectrum."""

    def wrong(true):
        def spectrum(q, *a, **k):
            s = true(q, *a, **k)
            return dataclasses.replace(s, **{name: change(s, q) for name, change in fields.items()})

        return spectrum

    return wrong


def _fair(true):
    return lambda pi, leading, tail, coin, *a: true(pi, leading, tail, lambda up: coin(0.5), *a)


def _forward(true):
    return lambda pi, leading, tail, coin, *a: true(pi, leading, tail, lambda up: True, *a)


def _equal_r(true):
    def walk(pi, leading, tail, coin, derandomise=False):
        return true(pi, leading, tail / np.linalg.norm(tail, axis=1, keepdims=True).clip(1e-300), coin, derandomise)

    return walk


def _shifted(true):
    """Never token 0."""

    def sample(x, K, *a, **k):
        index, weight = true(x[1:], min(K, len(x) - 1), *a, **k)
        return index + 1, weight

    return sample


def _heavier_half(true):
    def sample(x, K, *a, **k):
        index, weight = true(x, K, *a, **k)
        weight = weight * np.where(index < len(x) // 2, 1.1, 1)
        return index, weight / weight.sum()

    return sample


def _budget(change):
    return lambda true: lambda x, K, *a, **k: true(x, min(max(K + change, 1), len(x) - 1), *a, **k)


def _safe(change):
    """safe_bound from densities b (n, m), squared radii r2 (n,), n and K."""

    def wrong(true):
        def bound(q, k, v, K, scale=None):
            r2 = ((v - v.mean(axis=0)) ** 2).sum(axis=1)
            return float(change(risk.density(q, k, scale=scale), r2, len(v), K))

        return bound

    return wrong


SAMPLING = ["risk/sampling-iid", "risk/sampling-without-replacement"]

#: what a hostile reviewer's mutants got past the claims before
SURVIVED = [
    (balancing, "sample", lambda true: lambda x, K, *a, **k: true(x, len(x), *a, **k), ["risk/spectral-bound"]),
    (walks, "spectral_walk", _fair, ["risk/spectral-bound"]),
    (walks, "spectral_walk", _forward, ["risk/spectral-bound"]),
    (
        balancing,
        "sample",
        lambda true: lambda x, K, method, m=0, seed=0, derandomise=False, **k: true(x, K, method, m, seed, **k),
        ["risk/spectral-bound"],
    ),
    (walks, "spectral_walk", _equal_r, ["risk/spectral-bound"]),
    (
        risk,
        "spectrum",
        lambda true: lambda q, k, v, w=None, scale=None, *a, **more: true(q, k, v, w, scale, "augmented"),
        ["risk/spectral-bound", "risk/plain-cube-bound"],
    ),
    (
        risk,
        "spectrum",
        _record(eigenvalues=lambda s, q: s.eigenvalues * len(q), trace=lambda s, q: s.trace * len(q)),
        ["risk/spectral-bound", "risk/plain-cube-bound"],
    ),
    (
        risk,
        "spectrum",
        lambda true: lambda q, k, v, w=None, scale=None, *a, **more: true(q, k, v, w, 1.0, *a, **more),
        ["risk/plain-cube-bound"],
    ),
    *((balancing, "sample", _budget(change), SAMPLING) for change in (-3, -1, 1)),
    (balancing, "sample", _heavier_half, SAMPLING),
    (balancing, "sample", _shifted, SAMPLING),
    *(
        (risk, "safe_bound", lambda true, c=c: lambda *a, **k: c / 4 * true(*a, **k), ["risk/safe-bound"])
        for c in (3, 2, 1.6, 1.4, 1.2)
    ),
    (risk, "safe_bound", _safe(lambda b, r2, n, K: 4 * r2.max() * (b**2).mean() / K**1.5), ["risk/safe-bound"]),
    (risk, "safe_bound", _safe(lambda b, r2, n, K: 4 * r2.max() * (b**2).mean() / n**0.5 / K), ["risk/safe-bound"]),
    (risk, "safe_bound", _safe(lambda b, r2, n, K: 4 * r2.mean() * (b**2).mean() / K), ["risk/safe-bound"]),
    (
        risk,
        "safe_bound",
        _safe(lambda b, r2, n, K: 4 * r2.max() * (b**2).mean() / K * (n - K) / (n - 1)),
        ["risk/safe-bound"],
    ),
    (risk, "safe_bound", _safe(lambda b, r2, n, K: 4 * r2.max() * (b**2).mean(axis=0).min() / K), ["risk/safe-bound"]),
]

WRONG = [
    (risk, "response_profiles", lambda true: lambda *a, **k: 1.01 * true(*a, **k), ["risk/error-identity"]),
    (risk, "density", lambda true: lambda *a, **k: 1.01 * true(*a, **k), ["risk/error-identity"]),
    (
        risk,
        "trace_bound",
        lambda true: lambda s, K, replace=True: 1.01 * true(s, K, replace),
        ["risk/sampling-iid", "risk/sampling-without-replacement", "risk/retrieval-regime"],
    ),
    (risk, "attention_risk", lambda true: lambda *a, **k: 1.01 * true(*a, **k), ["risk/retrieval-regime"]),
    (risk, "spectral_bound", lambda true: lambda s, K, m=None: 0.99 * true(s, K, m), ["risk/spectral-bound"]),
    (risk, "cube_bound", lambda true: lambda s, K, m: 1.01 * true(s, K, m), ["risk/plain-cube-bound"]),
    (risk, "safe_bound", lambda true: lambda q, k, v, K, scale=None: true(q, k, v, K, scale) / 5, ["risk/safe-bound"]),
    (risk, "search_floor", lambda true: lambda n, K, mass=0.5: 0.99 * true(n, K, mass), ["risk/search-lower-bound"]),
    (
        risk,
        "spectrum",
        lambda true: (
            lambda q, k, v, *a, **more: (
                true(q, k, v - 0.01, *a, **more) if len(q) != 1 else true(q, k, 1.01 * v, *a, **more)
            )
        ),
        ["risk/spectral-bound", "risk/plain-cube-bound"],
    ),
    (
        balancing,
        "sample",
        lambda true: lambda x, K, method, *a, **k: true(x, max(K - 2, 1), method, *a, **k),
        ["risk/sampling-without-replacement", "risk/spectral-bound", "risk/plain-cube-bound"],
    ),
]


def _stated(factor):
    """A result that states `factor` times the risk of its summary."""

    def wrong(true):
        def function(*args, **kwargs):
            found = true(*args, **kwargs)
            return dataclasses.replace(found, risk=factor * found.risk)

        return function

    return wrong


def _all_but_one(true):
    """The last token is never kept."""

    def wrong(profiles, K, *args, **kwargs):
        return true(np.asarray(profiles)[:-1], K, *args, **kwargs)

    return wrong


#: kvtheory.risk.minimax and .atoms made wrong
EXACT = [
    (
        risk,
        "best_summary",
        _stated(0.99),
        ["risk/minimax-trace", "risk/minimax-sandwich", "risk/weights-beat-dropping"],
    ),
    (risk, "best_summary", _all_but_one, ["risk/minimax-trace", "risk/minimax-sandwich", "risk/weights-beat-dropping"]),
    (risk, "best_mixture", _stated(0.99), ["risk/aware-agnostic-separation"]),
    (risk, "best_mixture", _all_but_one, ["risk/aware-agnostic-separation"]),
    (risk, "best_for_laws", _stated(1.01), ["risk/aware-agnostic-separation"]),
    (risk, "best_for_laws", _all_but_one, ["risk/aware-agnostic-separation"]),
    (risk, "best_attended", _stated(0.99), ["risk/own-tokens-floor", "risk/weights-beat-dropping"]),
    (risk, "hull_floor", lambda true: lambda *a, **k: 1.01 * true(*a, **k), ["risk/own-tokens-floor"]),
    (risk, "spectral_floor", lambda true: lambda s, K: 1.01 * true(s, K), ["risk/minimax-trace"]),
    (risk, "any_atoms_floor", lambda true: lambda *a, **k: 1.01 * true(*a, **k), ["risk/any-atoms-floor"]),
    (
        risk,
        "refitted_atoms",
        lambda true: lambda q, o, K, law=None, scale=None: true(q, 1.01 * o, K, law, scale),
        ["risk/any-atoms-floor", "risk/search-lower-bound-any-atoms"],
    ),
    (risk, "hidden_needles_risk", lambda true: lambda *a: true(*a) * 99 / 100, ["risk/aware-agnostic-separation"]),
    (risk, "hidden_needles_floor", lambda true: lambda *a: true(*a) * 101 / 100, ["risk/aware-agnostic-separation"]),
]


@pytest.mark.parametrize(
    ("module", "name", "wrong", "ids"), WRONG + SURVIVED + EXACT, ids=[f"{name} {i}" for i, (_, name, *_) in enumerate(WRONG + SURVIVED + EXACT)]
)  # fmt: skip
def test_a_wrong_function_turns_the_verdict(module, name, wrong, ids, monkeypatch):
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    for claim in (CLAIMS[i] for i in ids):
        found, evidence = claim.run(context(claim)), []
        for e in found:
            if isinstance(e, Evidence):
                evidence.append(e)
                if claim.cannot_recover(e):
                    break
        assert claim.judge(evidence) is not claim.expected, claim.id


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=list(CLAIMS))
def test_rounded_comparisons_are_not_called_exact(claim):
    for e in claim.run(context(claim)):
        if isinstance(e, Evidence) and e.kind == "exact":
            for side in (e.observed, e.predicted):
                parts = side if isinstance(side, list) else [side]
                assert all(isinstance(x, int | Fraction) and not isinstance(x, bool) for x in parts), e.what


def test_the_augmented_profile_is_reported_where_the_centred_one_fails():
    claim = CLAIMS["risk/retrieval-regime"]
    assert "if Σ is built from" in claim.statement and "could not be established" in claim.statement
    found = [
        e for e in claim.run(context(claim)) if isinstance(e, Evidence) and "Σ⁺" in e.what and e.role == "assumption"
    ]
    assert found[0].observed == Fraction(13, 50) and found[0].predicted == Fraction(9, 50) and found[0].agrees is False
    assert len(found) == 6 and all(e.agrees for e in found[1:])


def test_causal_layers_give_only_tokens_that_every_query_used_sees():
    rng = np.random.default_rng(0)
    layer = Layer(
        rng.standard_normal((1, 40, 4)), rng.standard_normal((1, 40, 4)), rng.standard_normal((2, 10, 4)),
        query_positions=np.arange(30, 40),
    )  # fmt: skip
    for one in heads.of_layer("x", layer, tokens=100, queries=4):
        assert len(one.q) == 4 and one.n == 36  # queries 35, 36 or 37, 38, 39: tokens 0..35
        np.testing.assert_array_equal(one.k, layer.keys[0, :36])
    kept = heads.of_layer("x", layer, tokens=9, queries=4)[1]
    assert kept.n == 9 and (kept.k[0] == layer.keys[0, 0]).all()


def test_deviations_are_the_profiles_mean_by_another_route():
    one = heads.synthetic(context(CLAIMS["risk/error-identity"]), 12, 5)[2]
    rng = np.random.default_rng(0)
    p, w = rng.dirichlet(np.ones(12)), rng.dirichlet(np.ones(12), size=3)
    expected = np.tensordot(w, risk.response_profiles(one.q, one.k, one.v, p, one.scale), 1)
    np.testing.assert_allclose(heads.deviations(one, w, p), expected, atol=1e-12)
