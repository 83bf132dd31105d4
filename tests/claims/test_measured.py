"""The claims on trained models and their saved tables: the tables are whole, what is computed from them is what it says, a wrong function turns the verdict."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from importlib import resources

import numpy as np
import pytest
from scipy import stats

import kvtheory
import kvtheory.accounting
import kvtheory.entropy
import kvtheory.rate
import kvtheory.sample
import reference
from kvtheory.prediction import ToyPlayer, mixture
from proofs_checks import sequential
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.run import run_claim
from proofs_checks.sequential import groups, growth, measured, parting, recomputing, replaying, stacked, surprise

CLAIMS = {v.id: v for v in vars(sequential).values() if isinstance(v, Claim)}
KINDS = ("residual", "recompute", "context", "divergence", "replay", "thousand", "predictors", "paraphrases")
#: measured where a machine had the time; a claim that rests on one alone says that it was not run
LATER = ("smaller", "stack", "vocabulary")


def need(name):
    if name == "sharing/three-layers-on-real-models" and not measured.load("stack"):
        pytest.skip("no table of the stack was saved")


def evidence(name, **options):
    claim = CLAIMS[name]
    return [e for e in claim.run(Context(claims=40, claim_id=name, **options)) if hasattr(e, "agrees")]


class TestTables:
    @pytest.mark.parametrize("kind", [*KINDS, *LATER])
    def test_each_says_how_it_was_made(self, kind):
        tables = measured.load(kind)
        assert kind in LATER or (tables and tables[0]["model"] == "smol")
        for table in tables:
            assert table["command"] == f"python -m benchmarks.sequential {kind} --model {table['model']}"
            assert table["plan"]["threads"] == 1 and table["plan"]["versions"]["torch"]
            text = json.dumps(table, allow_nan=False)
            assert len(text) < 1e6 and "/root" not in text and "/home" not in text and "/work" not in text

    def test_none_where_nothing_was_saved(self):
        assert measured.load("no such thing") == []

    def test_no_other_file_lies_there(self):
        names = {f.name for f in resources.files(measured.__name__).iterdir() if f.name.endswith(".json")}
        assert names <= {f"{kind}-{model}.json" for kind in (*KINDS, *LATER) for model in measured.MODELS}

    def test_laws_add_up_and_keep_the_small(self):
        for table in measured.load("residual"):
            for text in table["texts"]:
                q = surprise.law(text)
                assert q.shape == (table["positions"], table["top"])
                np.testing.assert_allclose(q.sum(axis=1), 1, atol=1e-12)
                assert (q[:, 0] >= q[:, 1] - 1e-3).all() and (np.diff(q[:, 1:], axis=1) <= 0).all()
                less = np.asarray(text["top_less_what_came"])
                # what came is one of the sixteen, or it is none and has all the others against it
                near = np.abs(1 - less[:, None] - q).min(axis=1)
                assert ((near < 1e-3) | (np.abs(less - 1) < 1e-3)).all()

    def test_a_candidate_that_came_is_the_cache(self):
        for table in measured.load("residual"):
            assert all(text["candidate_of_the_token_against_the_cache"] < 1e-3 for text in table["texts"])


class TestArithmetic:
    def test_ranks(self):
        x = np.array([3.0, 1, 3, 2, 7, 7, 7])
        np.testing.assert_array_equal(surprise.ranks(x), stats.rankdata(x))

    def test_rank_correlations_are_spearman_s_by_segment(self):
        rng = np.random.default_rng(0)
        bits, residual = rng.normal(size=40), rng.normal(size=40)
        table = {"texts": [{"surprisal_bits": bits, "layers": [{"keys": {"residual": residual}}]}]}
        found = surprise.rank_correlations(table, 0, "keys", lambda x: x)
        expected = [stats.spearmanr(bits[i : i + 16], residual[i : i + 16])[0] for i in (0, 16)]
        np.testing.assert_allclose(found, expected, atol=1e-12)
        assert all(math.isnan(x) for x in surprise.rank_correlations(table, 0, "keys", lambda x: 1.0))

    def test_distortion_stays_rational(self):
        assert surprise.distortion([Fraction(1), Fraction(2)], [2, 4]) == Fraction(1, 16) + Fraction(2, 256)
        assert surprise.distortion([1.0, 2.0], [0.5, 1]) == 1.0

    def test_order_of_addition(self):
        x = np.array([[2.0**24, 1, 1], [1, 1, 2.0**24]], np.float32)
        assert recomputing.summed(x, "forwards").tolist() == [2.0**24, 2.0**24 + 2]
        assert recomputing.summed(x, "backwards").tolist() == [2.0**24 + 2, 2.0**24]
        long = np.zeros((1, 32), np.float32)
        long[0, [0, 16, 17]] = 2.0**24, 1, 1
        assert recomputing.summed(long, "forwards")[0] == 2.0**24
        assert recomputing.summed(long, "chunks of 16")[0] == 2.0**24 + 2
        assert recomputing.summed(long, "chunks of 16").dtype == np.float32

    def test_histogram_as_counts(self):
        layer = {"steps": [90, 4, 3], "spectrum": [[1, 2], [5, 1]]}
        assert recomputing.counts_of(layer) == [90, 4, 3, 1, 1, 5]

    def test_bits_of_float16(self):
        x = np.array([1.5, -2.0, 65504, -0.0], np.float16)
        assert recomputing.as_float16(x.view(np.int16).tolist()).tobytes() == x.tobytes()

    def test_squared_stays_rational(self):
        texts = [[[[Fraction(1, 2)], [Fraction(1), Fraction(3)]]], [[[Fraction(1)], [Fraction(0), Fraction(5)]]]]
        assert parting.squared(texts, 0, 0) == Fraction(1, 4) and parting.squared(texts, 0, 1) == 5

    def test_bytes_at_an_error_between_two_rates(self):
        assert stacked.bytes_at([(100, 0.25), (200, 0.0625)], 0.125) == 150

    def test_a_bootstrap_finds_the_rate_of_equal_windows(self):
        spans = [1, 2, 4, 8, 16, 32, 64]
        t = np.sqrt(np.array(spans[:-1]) * np.array(spans[1:]))
        bits = np.tile(3 + 5 * t**-0.5, (4, 1))
        found = growth._rate(Context(), spans, bits, 0.99)
        assert found.low == pytest.approx(found.high) == pytest.approx(3 / bits[0, -1])

    @pytest.mark.parametrize(("share", "bits"), [(0.0, 0.0), (1.0, 0.0), (0.5, 1.0), (0.25, 2 - 0.75 * math.log2(3))])
    def test_binary_entropy(self, share, bits):
        assert recomputing.binary_entropy(share) == pytest.approx(bits, abs=1e-15)

    def test_stationary_law(self):
        chain = {0: {0: Fraction(1, 2), 1: Fraction(1, 2)}, 1: {0: Fraction(1, 4), 1: Fraction(3, 4)}}
        assert growth.stationary(chain) == {0: Fraction(1, 3), 1: Fraction(2, 3)}
        chain = growth.random_chain(np.random.default_rng(1), 4)
        pi = growth.stationary(chain)
        assert sum(pi.values()) == 1
        assert all(sum(pi[s] * chain[s][t] for s in chain) == pi[t] for t in chain)

    def test_fit_finds_its_own_curve(self):
        spans = [1, 2, 4, 8, 16, 32, 64]
        t = np.sqrt(np.array(spans[:-1]) * np.array(spans[1:]))
        assert growth.fitted(spans, 3 + 5 * t**-0.5) == pytest.approx((3, 5, 0.5), abs=1e-9)
        # what falls for ever is fitted by no rate below 0
        assert growth.fitted(spans, 10 - 2 * np.log2(t))[0] >= 0

    def test_stretch_of_a_line_is_its_norm(self):
        matrix = np.array([[3.0, 0], [4, 0]])
        found = parting.stretch(lambda x: x @ matrix, np.zeros(2), np.ones(2))
        assert found == pytest.approx(5, rel=1e-9)
        # the largest on the segment, not at its ends: x -> sin x from -2 to 2 is steepest in the middle
        assert parting.stretch(np.sin, np.array([-2.0]), np.array([2.0])) > 0.98

    def test_the_toy_s_layers_written_anew_are_the_toy_s(self):
        player = ToyPlayer(vocabulary=16, layers=3, kv_heads=2, head_dim=4, seed=3)
        play = player.start()
        past = [play.feed(t) for t in (1, 2, 3)]
        x = player.embedding[[5, 6]]
        kv = play.candidates([5, 6])
        for i in range(3):
            own = parting.toy_kv(player, i, x)
            turned = player.rope.apply(own[:, :8].reshape(4, 1, 4), np.array([3])).reshape(2, 2, 4)
            np.testing.assert_allclose(turned, kv[i].keys, atol=1e-12)
            np.testing.assert_allclose(own[:, 8:].reshape(2, 2, 4), kv[i].values, atol=1e-12)
            x = parting.toy_layer(player, i, past, x)
        play.feed(5)
        last = x[0] / np.sqrt((x[0] ** 2).mean() + 1e-6)
        np.testing.assert_allclose(
            player.sharpness * last @ player.embedding.T / np.sqrt(len(last)), play.logits, atol=1e-9
        )


@pytest.mark.parametrize(
    ("home", "function", "wrong", "turned"),
    [
        (mixture, "error_bound", lambda t: lambda p, d: t(p, d) / 2, "prediction/residual-bounds-on-real-models"),
        (mixture, "entropy_bound", lambda t: lambda h, d: t(h / 2, d), "prediction/residual-bounds-on-real-models"),
        (kvtheory.entropy, "surprisal_bits", lambda t: lambda p: -t(p), "prediction/residual-grows-with-surprisal"),
        (kvtheory.accounting, "adaptive_bits", lambda t: lambda h, b: [b] * len(h), "prediction/adaptive-bits"),
        (kvtheory.rate, "reverse_waterfill", lambda t: lambda e, r: t(e, r) / 2, "prediction/adaptive-bits-corrected"),
        (kvtheory.sample, "ulps", lambda t: lambda a, b: t(a, a), "sequential/recompute-is-bit-exact"),
        (kvtheory.entropy, "entropy_bits", lambda t: lambda w: t(w) / 2, "sequential/recompute-costs"),
        (reference.TokenReplay, "of", lambda t: lambda player, *a: t(replaying.Twisted(player, lambda z, _: z / 2), *a), "sequential/payload-is-surprisal"),
        (reference.TokenReplay, "of", lambda t: lambda player, *a: t(player), "sequential/checkpoints"),
        (parting, "squared", lambda t: lambda x, layer, at: 0 * t(x, layer, at), "sharing/delta-after-divergence"),
        (replaying, "replay_operations", lambda t: lambda w, n, la, d: t(w, n, la, 2 * d), "sequential/replay-cost"),
        (groups, "nearer", lambda t: lambda a, b: -t(a, b), "sharing/meaning-beyond-the-prefix"),
        (stacked, "bytes_at", lambda t: lambda c, e: t(c, e) / 3, "sharing/three-layers-on-real-models"),
        (parting, "stretched", lambda t: lambda s, d: t(s[:-1], d), "sharing/delta-at-divergence"),
    ],
)  # fmt: skip
def test_a_wrong_function_turns_the_verdict(monkeypatch, home, function, wrong, turned):
    need(turned)
    monkeypatch.setattr(home, function, wrong(getattr(home, function)))
    claim = CLAIMS[turned]
    found = [e for e in claim.run(Context(claims=40, claim_id=turned)) if hasattr(e, "agrees")]
    assert claim.judge(found) != claim.expected


@pytest.mark.parametrize("name", ["sequential/recompute-is-bit-exact", "sequential/recompute-costs"])
def test_real_logits_are_compared_where_there_is_a_cache(name):
    found = evidence(name, cache=kvtheory.sample_cache(), cache_name="sample")
    logits = [e for e in found if "logits of one head" in e.ran_on]
    assert len(logits) == 4 and CLAIMS[name].judge(found) == CLAIMS[name].expected
    assert any(e.observed for e in logits)


def test_the_same_call_gives_the_same_bits_and_that_is_a_statement():
    found = [e for e in evidence("sequential/recompute-costs") if "the same call again" in e.what]
    assert found and all(e.observed == 0 and e.role == "statement" for e in found)


def test_a_table_that_says_otherwise_turns_the_verdict(monkeypatch):
    """Residuals that exceed the bound at one position of one layer; a call that does not repeat itself."""
    true = measured.load

    def spoiled(kind):
        tables = true(kind)
        if kind == "residual":
            layer = tables[0]["texts"][0]["layers"][3]["values"]
            layer["residual"][17] = 1.1 * layer["squared_diameter"][17]
        if kind == "recompute":
            tables[0]["runs"][0]["plans"][0]["stored"]["float32"]["differing"][5] = 1e-5
        return tables

    monkeypatch.setattr(measured, "load", spoiled)
    for name in ("prediction/residual-bounds-on-real-models", "sequential/recompute-costs"):
        assert CLAIMS[name].judge(evidence(name)) is Verdict.FAILS


def _spoiled(monkeypatch, kind, change):
    true = measured.load

    def load(name):
        tables = true(name)
        for table in tables if name == kind else []:
            change(table)
        return tables

    monkeypatch.setattr(measured, "load", load)


def _exchanged(table):
    for part in ("keys", "values"):
        own = table[part]
        own["paraphrase"], own["unrelated"] = own["unrelated"], own["paraphrase"]


def _ever_cheaper(table):
    for window in table["windows"]:
        window["bits"][-1] = 0.3 * window["bits"][-2]


def _beyond_the_stretches(table):
    for one in table.get("segments", []):
        table["at"][one["pair"]][0] *= 1e3


def _longer_payload(table):
    table["payload_bits"] += 64


def _dearer(table):
    for row in table["rows"]:
        row["bytes"] *= 1 if row["prediction"] is None else 3


def _useless(table):
    for text in table["texts"]:
        for row in text["predictors"]:
            if row["predictor"] == "mean of the 4 likeliest":
                row["held_bits"] += 2


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        ("paraphrases", _exchanged, "sharing/meaning-beyond-the-prefix"),
        ("context", _ever_cheaper, "sequential/context-plateau"),
        ("divergence", _beyond_the_stretches, "sharing/delta-at-divergence"),
        ("thousand", _longer_payload, "sequential/payload-is-surprisal"),
        ("stack", _dearer, "sharing/three-layers-on-real-models"),
        ("predictors", _useless, "prediction/gains-on-real-models"),
    ],
)
def test_what_a_real_model_did_decides(monkeypatch, kind, change, name):
    """Had the model done otherwise, the verdict would be another one: what is measured is judged, not reported."""
    need(name)
    assert CLAIMS[name].judge(evidence(name)) == CLAIMS[name].expected
    _spoiled(monkeypatch, kind, change)
    assert CLAIMS[name].judge(evidence(name)) != CLAIMS[name].expected


@pytest.mark.parametrize(
    "name",
    [
        "sequential/recompute-is-bit-exact", "sequential/recompute-costs", "sequential/improves-with-context", "sharing/delta-after-divergence", "prediction/adaptive-bits",
        "prediction/gains-on-real-models", "sharing/meaning-beyond-the-prefix", "sharing/three-layers-on-real-models",
    ],
)  # fmt: skip
def test_mutants_are_refuted_by_what_was_measured(name):
    """Without any value known by hand (no control but those on tables), each mutant still changes the verdict."""
    need(name)
    claim = CLAIMS[name]
    for mutant in claim.mutants:
        functions = claim.look_up()
        functions[mutant.role] = mutant.wrong(functions[mutant.role])
        found = [e for e in claim.run(Context(claims=40, claim_id=name), functions) if hasattr(e, "agrees")]
        kept = [e for e in found if e.role != "control" or "saved table" in e.ran_on]
        assert claim.judge(kept) != claim.expected, mutant.name


def test_without_a_table_the_stack_is_not_run_and_says_how(monkeypatch):
    true = measured.load
    monkeypatch.setattr(measured, "load", lambda kind: [] if kind == "stack" else true(kind))
    claim = CLAIMS["sharing/three-layers-on-real-models"]
    outcome = run_claim(claim, Context(claims=40))
    assert outcome.verdict is Verdict.NOT_RUN and outcome.as_expected
    assert "benchmarks.sequential stack" in outcome.not_run[0].how
