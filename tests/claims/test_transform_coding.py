"""The claims of arXiv 2608.14191: verdicts, mutants, that a wrong term in kvtheory turns them, and the instruments they measure with."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvtheory
import kvtheory.distortion
from kvtheory import attention, synthetic
from kvtheory.layer import Cache, Head
from kvtheory.randomness import generator
from kvtheory.statistics import Interval, mean_interval
from proofs_checks import transform_coding
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture
from proofs_checks.ledger import plain
from proofs_checks.papers import OWN
from proofs_checks.run import run_claim
from proofs_checks.transform_coding import noise
from proofs_checks.transform_coding.instances import all_within, worst_ratio
from proofs_checks.transform_coding.next_order import _without
from proofs_checks.transform_coding.validity import _crossing, two_tokens
from proofs_checks.transform_coding.wrong_terms import rewritten, right_key_term, right_value_term

CLAIMS = {value.id: value for value in vars(transform_coding).values() if isinstance(value, Claim)}
EXPECTED = {
    "transform-coding/key-distortion": Verdict.HOLDS_UNDER,
    "transform-coding/value-distortion": Verdict.HOLDS_UNDER,
    "transform-coding/additivity": Verdict.HOLDS_UNDER,
    "transform-coding/validity-range": Verdict.FAILS,
    "transform-coding/remainder": Verdict.HOLDS_UNDER,
    "transform-coding/grouped-heads": Verdict.HOLDS,
}
#: as in a whole run: the error level is shared among this many claims
SHARED = 40


@functools.cache
def sample_cache() -> Cache:
    return kvtheory.sample_cache()


def evidence(name, functions=None, **options):
    """Of the statement alone, mutants aside; `functions` replaces some of the statement's."""
    claim = CLAIMS[name]
    context = Context(claims=SHARED, claim_id=name, **options)
    looked_up = claim.look_up() | (functions or {})
    return [e for e in claim.run(context, looked_up) if isinstance(e, Evidence)]


def verdict(name, functions=None, **options):
    return CLAIMS[name].judge(evidence(name, functions, **options))


def test_all_claims_are_here_in_order():
    assert list(CLAIMS) == list(EXPECTED)
    assert CLAIMS["transform-coding/validity-range"].correction in CLAIMS


def test_statements_of_our_own_are_not_the_papers():
    """The rule of 0.1 and the closed form of the next order are ours: no verdict on the paper."""
    own = {name for name, claim in CLAIMS.items() if claim.paper == OWN}
    assert own == {"transform-coding/validity-range", "transform-coding/remainder", "transform-coding/grouped-heads"}
    assert all(CLAIMS[name].paper == "2608.14191" for name in set(CLAIMS) - own)
    rule, order = CLAIMS["transform-coding/validity-range"], CLAIMS["transform-coding/remainder"]
    assert "rule of thumb of our own" in rule.section and rule.statement.startswith("Our rule")
    assert "derived here" in order.section
    assert not any(c.section.startswith("Theorem 1") for c in (rule, order))


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_and_mutants(name):
    outcome = run_claim(CLAIMS[name], Context(claims=SHARED))
    assert outcome.error is None
    assert outcome.verdict == EXPECTED[name] == CLAIMS[name].expected
    assert [m.name for m in outcome.mutants if m.refuted is not True] == []
    plain([e.details for e in outcome.evidence])  # what goes into the ledger is plain
    plain([p.data for p in outcome.pictures])


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("seed", [1, 2])
def test_verdict_on_the_real_cache(name, seed):
    """Another seed, so that a verdict does not hang on the draws of seed 0."""
    found = evidence(name, cache=sample_cache(), seed=seed)
    assert CLAIMS[name].judge(found) == EXPECTED[name]
    assert any("layer 18" in e.ran_on or "real heads" in e.ran_on for e in found)


def one_over_d_dropped(true):
    def wrong(q, *arguments, **options):
        return true(q, *arguments, **options) * q.shape[1]

    return wrong


def one_token_factor(true):
    return rewritten(lambda p: (p.a * p.u2 * p.scale**2 * (p.q**2 @ p.sigma2.T)).sum(axis=1))(true)


@pytest.mark.parametrize("wrong", [one_over_d_dropped, one_token_factor])
@pytest.mark.parametrize("name", [n for n, c in CLAIMS.items() if "key_term" in c.functions])
def test_a_wrong_key_term_in_kvtheory_turns_the_verdict(monkeypatch, name, wrong):
    monkeypatch.setattr(kvtheory.distortion, "key_term", wrong(kvtheory.distortion.key_term))
    assert verdict(name) != EXPECTED[name]


@pytest.mark.parametrize("name", [n for n, c in CLAIMS.items() if "value_term" in c.functions])
def test_a_wrong_value_term_in_kvtheory_turns_the_verdict(monkeypatch, name):
    true = kvtheory.distortion.value_term
    monkeypatch.setattr(kvtheory.distortion, "value_term", lambda *x, **y: np.sqrt(true(*x, **y)))
    assert verdict(name) != EXPECTED[name]


def test_the_right_terms_written_another_way_are_not_refuted():
    """So a mutant made by `rewritten` is refuted for what it changes, and not for how it is written."""
    right = {"key_term": rewritten(right_key_term)(None), "value_term": rewritten(right_value_term)(None)}
    for name, claim in CLAIMS.items():
        functions = {role: f for role, f in right.items() if role in claim.functions}
        if functions:
            assert verdict(name, functions) == EXPECTED[name]
    assert verdict("transform-coding/remainder", {"remainder_term": _without("nothing")(None)}) == Verdict.HOLDS_UNDER


@pytest.mark.parametrize(
    "name", [name for name in EXPECTED if name != "transform-coding/grouped-heads"]
)  # no statistics there
def test_error_level_is_shared_among_all_comparisons(name, monkeypatch):
    """As many intervals are made as `context.alpha` was told of, or fewer."""
    told, made = [], []
    true_alpha = Context.alpha
    monkeypatch.setattr(Context, "alpha", lambda self, n: told.append(n) or true_alpha(self, n))
    for e in evidence(name, cache=sample_cache()):
        if e.kind == "statistical":
            counts = [e.details.get(k, 0) for k in ("within", "undecided", "outside")]
            made.append(sum(counts) or 1)
            assert e.interval.level >= 1 - 1e-3 / (SHARED * max(told))
    assert len(told) == 1 and 0 < sum(made) <= told[0]


def test_pictures():
    context = Context(claims=SHARED, claim_id="transform-coding/validity-range", cache=sample_cache())
    (picture,) = [p for p in CLAIMS["transform-coding/validity-range"].run(context) if isinstance(p, Picture)]
    assert picture.figure == "distortion-prediction"
    sources = [c["source"] for c in picture.data["curves"]]
    assert sources.count("synthetic") == 2 * len(synthetic.KINDS) and sources.count("real") == 18
    for curve in picture.data["curves"]:
        sizes = {len(curve[k]) for k in ("mean_logit_variance", "ratio", "low", "high")}
        assert len(sizes) == 1 and all(
            low <= r <= high for low, r, high in zip(curve["low"], curve["ratio"], curve["high"])
        )


# ---- instruments


def _two_tokens(lead):
    return Head(
        np.array([[2.0]]),
        np.array([[lead / 2], [0.0]]),
        np.array([[0.0], [3.0]]),
        np.array([[2.0]]),
        np.ones((1, 2), bool),
        1.0,
    )


def test_key_energy_by_hand():
    """do/dk_i = -+ a_1 a_2 q (v_2 - v_1) W_O."""
    head = _two_tokens(0.8)
    a = 1 / (1 + np.exp(0.8))
    expected = (a * (1 - a) * 2 * 6) ** 2 * (0.5 + 0.25)
    assert noise.key_energy(head, np.array([[0.5], [0.25]]))[0] == pytest.approx(expected, rel=1e-10)


def test_value_energy_by_hand():
    head = _two_tokens(0.8)
    a = 1 / (1 + np.exp(0.8))
    expected = 4 * ((1 - a) ** 2 * 0.5 + a**2 * 0.25)
    assert noise.value_energy(head, np.array([[0.5], [0.25]]))[0] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("variance", [1e-3, 0.1, 0.3])
def test_quadrature_and_closed_form_agree(variance):
    """One of two tokens with all attention: E||do||^2 / D_K in closed form."""
    head = Head(
        np.ones((1, 1)), np.array([[20.0], [0.0]]), np.array([[0.0], [1.0]]), np.eye(1), np.ones((1, 2), bool), 1.0
    )
    energy = noise.gaussian_energy(head, np.full((2, 1), variance), nodes=30)[0]
    a = 1 / (1 + np.exp(20.0))
    assert energy == pytest.approx(two_tokens(variance) * 2 * variance * (a * (1 - a)) ** 2, rel=1e-7, abs=0)


def test_quadrature_with_noisy_values():
    """Two equal tokens with logit variance s^2 each: sum_i E a_i'^2 = 1/2 + 2 Var(sigmoid), and E||do||^2 of the keys is their part."""
    head = Head(np.ones((1, 1)), np.zeros((2, 1)), np.array([[0.0], [1.0]]), np.eye(1), np.ones((1, 2), bool), 1.0)
    both = noise.gaussian_energy(head, np.full((2, 1), 0.05), np.full((2, 1), 7.0), nodes=30)[0]
    keys = noise.gaussian_energy(head, np.full((2, 1), 0.05), nodes=30)[0]
    assert both == pytest.approx(keys + 7 * (0.5 + 2 * keys), rel=1e-12)


def _group(**sizes):
    layer = noise.causal(synthetic.make("gaussian", 2, 4, **({"tokens": 20, "head_dim": 8, "queries": 6} | sizes)))
    return layer, noise.Group(layer, 1, noise.rows(layer, 5))


def test_a_group_is_the_layers_own():
    layer, group = _group()
    o = attention.head_outputs(layer)[2:, noise.rows(layer, 5)]
    np.testing.assert_allclose(group.attend(group.k[None], group.heads[0].v[None])[0], o, atol=1e-14)
    # the group's own values are shifted, which moves all outputs alike
    shift = group.heads[0].v - group.v
    np.testing.assert_allclose(group.attend(group.k[None], group.v[None])[0], o - shift[0], atol=1e-14)
    assert np.ptp(shift, axis=0).max() < 1e-14
    energy = np.einsum("gmr,gmr->gm", *[o @ group.lengths] * 2)
    for g, h in enumerate((2, 3)):
        np.testing.assert_allclose(energy[g], ((o[g] @ layer.projection(h)) ** 2).sum(axis=1))


def test_the_estimate_is_unbiased_whatever_the_control_variate(monkeypatch):
    """With a wrong Jacobian the interval is wide, and still around the truth; with the right one it is narrow."""
    _, group = _group()
    rng = generator(0, "unbiased")
    sigma = np.full(group.k.shape, 0.3)
    truth = mean_interval(
        group.sample(sigma, None, [1.0], 2000, rng).ratios(group.key_part(sigma))[:, 0].mean(axis=1), 0.999
    )
    scale = group.key_part(sigma)
    group.by_logit = group.by_logit[:, :, ::-1] * 1.5
    wrong = mean_interval(group.sample(sigma, None, [1.0], 2000, rng).ratios(scale)[:, 0].mean(axis=1), 0.999)
    assert wrong.low < truth.estimate < wrong.high
    assert wrong.high - wrong.low > 2 * (truth.high - truth.low)
    assert wrong.high - wrong.low < 0.2


def test_both_samplers_measure_the_same():
    """White keys of one variance: noise on the keys, and noise on the logits, at a level where the remainder shows."""
    layer = synthetic.make("attention_sink", 1, 1, tokens=12, head_dim=4, queries=3)
    head = layer.head(0)
    chosen = noise.rows(layer, 3)
    sigma = np.full((12, 4), np.sqrt(0.3 / noise.mean_logit_variance([head], np.ones((12, 4)))))
    group = noise.Group(layer, 0, chosen)
    by_keys = group.sample(sigma, None, [1.0], 3000, generator(0, "keys")).ratios(group.key_part(sigma))[:, 0, 0]
    linear, excess = noise.sample_logits(head, [0.3], 3000, generator(0, "logits"))
    by_logits = (linear[0].sum() + excess[:, 0].sum(axis=1)) / linear[0].sum()
    np.testing.assert_allclose(linear[0], group.key_part(sigma)[0], rtol=1e-10)
    keys, logits = mean_interval(by_keys, 0.999), mean_interval(by_logits, 0.999)
    assert max(keys.low, logits.low) < min(keys.high, logits.high)
    assert keys.low > 1.05  # far from first order, so that agreement means something


def test_uniform_quantiser():
    k = generator(0, "quantised").standard_normal((70, 5))
    k[:, 4] = 2.5
    coded, variance, extreme = noise.uniform_quantised(k, 3)
    step = np.sqrt(12 * variance)
    assert (np.abs(coded - k) <= step / 2 + 1e-12).all()
    np.testing.assert_allclose(coded[extreme], k[extreme], rtol=1e-14)
    assert (coded[:, 4] == 2.5).all() and (variance[:, 4] == 0).all()
    # one minimum and one maximum a channel and group of 32 tokens: 3 groups
    assert extreme[:, :4].sum() == 4 * 3 * 2
    assert len(np.unique(coded[:32, 0])) <= 8


def test_rows_and_causality():
    layer = synthetic.make("gaussian", 1, 1, tokens=10, head_dim=4, queries=6)
    assert noise.rows(layer, 3).tolist() == [0, 2, 5] and noise.rows(layer, 99).tolist() == list(range(6))
    seen = noise.causal(layer).visible().sum(axis=1)
    assert seen[0] == 6 and seen[-1] == 10 and (np.diff(seen) >= 0).all()


def test_worst_of_many():
    narrow, wide, far = Interval(1.0, 0.99, 1.01, 0.9), Interval(1.0, 0.5, 1.5, 0.9), Interval(2.0, 1.9, 2.1, 0.9)
    options = {"what": "x", "ran_on": "y", "predicted": 1.0, "margin": 0.1}
    assert all_within({"a": narrow, "b": narrow}, **options).agrees is True
    undecided = all_within({"a": narrow, "b": wide}, **options)
    assert undecided.agrees is None and undecided.worst_case == "b"
    outside = all_within({"a": wide, "b": far, "c": narrow}, **options)
    assert outside.agrees is False and outside.worst_case == "b"
    assert outside.details == {"within": 1, "undecided": 1, "outside": 1}


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, 1.4])
def test_worst_ratio_finds_the_worst_query(bad):
    found = worst_ratio({"a": np.ones(3), "b": np.ones(2)}, {"a": np.ones(3), "b": np.array([1.0, bad])})
    assert found["worst_case"] == "b, query 1"
    np.testing.assert_equal(found["predicted"], bad)


def test_crossing():
    assert _crossing([0.01, 0.1], [1.01, 1.05]) is None
    assert _crossing([0.01, 0.1], [1.0, 1.2]) == pytest.approx(np.sqrt(0.001))
    assert _crossing([0.02, 0.1], [0.8, 0.5]) == pytest.approx(0.01)
