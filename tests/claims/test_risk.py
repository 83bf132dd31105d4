"""The claims of arXiv 2607.01520: expected verdicts, every mutant refuted, and wrong functions in kvtheory turn the verdict."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvtheory
from kvtheory import balancing, risk
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
        "risk/plain-cube-bound", "risk/retrieval-regime",
    }  # fmt: skip
    for claim in CLAIMS.values():
        assert claim.paper == "2607.01520" and len(claim.mutants) >= 2
        if claim.expected is Verdict.FAILS:
            assert claim.correction in CLAIMS


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


@pytest.mark.parametrize(("module", "name", "wrong", "ids"), WRONG, ids=[name for _, name, *_ in WRONG])
def test_a_wrong_function_turns_the_verdict(module, name, wrong, ids, monkeypatch):
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    for claim in (CLAIMS[i] for i in ids):
        evidence = [e for e in claim.run(context(claim)) if isinstance(e, Evidence)]
        assert claim.judge(evidence) is not claim.expected, claim.id


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
