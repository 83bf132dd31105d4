"""The claims of arXiv 2604.15356 about predictive delta coding: verdicts, mutants, and that a wrong function turns them."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvtheory.distortion
import kvtheory.prediction
import reference
from kvtheory.prediction import mixture
from proofs_checks import sequential
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.ledger import plain
from proofs_checks.run import run_claim
from proofs_checks.sequential import residual, toy_texts

CLAIMS = {v.id: v for v in vars(sequential).values() if isinstance(v, Claim) and v.id.startswith("prediction/")}
EXPECTED = {
    "prediction/residual-of-a-mixture": Verdict.HOLDS,
    "prediction/residual-entropy": Verdict.HOLDS,
    "prediction/residual-rate-distortion": Verdict.HOLDS,
    "prediction/speculative-predictor-free": Verdict.FAILS,
    "prediction/speculative-predictor-cost": Verdict.HOLDS,
    "prediction/closed-loop-error": Verdict.HOLDS_UNDER,
    "prediction/known-token-beats-mean": Verdict.HOLDS_UNDER,
    "prediction/residual-bounds-on-real-models": Verdict.HOLDS,
    "prediction/residual-grows-with-surprisal": Verdict.HOLDS_UNDER,
    "prediction/adaptive-bits": Verdict.FAILS,
    "prediction/adaptive-bits-corrected": Verdict.HOLDS,
    "prediction/gains-on-real-models": Verdict.HOLDS_UNDER,
}


def evidence(name, **options):
    claim = CLAIMS[name]
    return [e for e in claim.run(Context(claims=40, claim_id=name, **options)) if hasattr(e, "agrees")]


def test_all_claims_are_here_in_order():
    assert list(CLAIMS) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_and_mutants(name):
    claim = CLAIMS[name]
    outcome = run_claim(claim, Context(claims=40))
    assert outcome.error is None
    assert outcome.verdict == claim.expected == EXPECTED[name]
    assert [m.name for m in outcome.mutants if m.refuted is not True] == [] and len(outcome.mutants) >= 2
    json.dumps(plain([e.observed for e in outcome.evidence]), allow_nan=False)
    if claim.expected is Verdict.FAILS:
        assert EXPECTED[claim.correction] is Verdict.HOLDS


@pytest.mark.parametrize("name", [n for n in EXPECTED if "known-token" not in n])
def test_verdicts_do_not_hang_on_the_seed(name):
    assert CLAIMS[name].judge(evidence(name, seed=1)) == EXPECTED[name]


@pytest.mark.parametrize(
    "name",
    [
        "prediction/residual-of-a-mixture",
        "prediction/residual-rate-distortion",
        "prediction/speculative-predictor-cost",
    ],
)
def test_full_budget(name):
    assert CLAIMS[name].judge(evidence(name, budget="full")) == EXPECTED[name]


@pytest.mark.parametrize(
    ("home", "function", "wrong", "turned"),
    [
        (mixture, "residual_energy", lambda t: lambda p, f: 2 * t(p, f), "prediction/residual-of-a-mixture"),
        (mixture, "residual_map", lambda t: lambda law, kv: lambda s: (), "prediction/residual-entropy"),
        (mixture, "rate_bound", lambda t: lambda p, f, d: t(p, f, 2 * d), "prediction/residual-rate-distortion"),
        (kvtheory.prediction, "TopK", lambda t: residual._Free, "prediction/speculative-predictor-free"),
        (kvtheory.prediction, "KnownToken", lambda t: lambda: kvtheory.prediction.TopK(1), "prediction/known-token-beats-mean"),
    ],
)  # fmt: skip
def test_a_wrong_function_turns_the_verdict(monkeypatch, home, function, wrong, turned):
    monkeypatch.setattr(home, function, wrong(getattr(home, function)))
    claim = CLAIMS[turned]
    some = (e for e in claim.run(Context(claims=40, claim_id=turned)) if hasattr(e, "agrees"))
    if claim.expected is Verdict.FAILS:
        assert claim.judge(list(some)) != claim.expected
    else:
        assert any(claim.cannot_recover(e) for e in some)


def test_the_toys_cache_is_what_the_player_writes_and_its_queries_are_its_own():
    """Attention over the noted queries, through W_O, is what the player adds to its residual stream."""
    player = toy_texts.player_of(2)
    cache = toy_texts.text(player, 6, np.random.default_rng(0))
    play = player.start()
    for t, token in enumerate(cache.tokens):
        kv = play.feed(int(token))
        for i, layer in enumerate(cache):
            np.testing.assert_array_equal(layer.keys[:, t], kv[i].keys.astype(np.float32))
    x = player.embedding[cache.tokens]
    for layer in cache:
        x = x + kvtheory.attention.layer_outputs(layer)
    last = x[-1] / np.sqrt((x[-1] ** 2).mean() + 1e-6)
    logits = player.sharpness * last @ player.embedding.T / np.sqrt(len(last))
    np.testing.assert_allclose(logits, play.logits, rtol=1e-4, atol=1e-4)
    again = toy_texts.write(player, cache.tokens, 6)
    np.testing.assert_array_equal(again.surprisal_bits, cache.surprisal_bits)
    assert again.surprisal_bits[0] == 6.0


def test_bits_saved_by_interpolation():
    plain_points = [(1.0, 2.0**-2), (2.0, 2.0**-4)]
    assert residual.saved(plain_points, 1.0, 2.0**-3) == (0.5, True)
    assert residual.saved(plain_points, 1.0, 2.0**-9) == (1.0, False)


def test_every_predictor_has_its_line():
    found = [e for e in evidence("prediction/known-token-beats-mean") if e.role == "assumption"]
    assert len(found) == 12 and all("target passes a position" in e.note for e in found)
    assert all(("nil" in e.note) == (e.observed <= 0) for e in found)


def test_the_lowest_layer_is_left_out_of_the_mean():
    """Exact in the lowest layer alone: counted, that layer would make any gain."""
    player = toy_texts.player_of(2)
    cache = toy_texts.text(player, 12, np.random.default_rng(0))
    bits, error = residual.above_the_lowest(reference.TurboQuant(3), cache)
    one = reference.TurboQuant(3)
    assert bits == reference.held_bits(reference.encode_cache(one, cache), cache)
    assert error == pytest.approx(kvtheory.distortion.attention_error(cache[1], one.decode(one.encode(cache[1]))))
