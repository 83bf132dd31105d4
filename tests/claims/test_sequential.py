"""The claims of arXiv 2604.15356: verdicts, mutants, and that a wrong function in kvtheory turns them."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction

import numpy as np
import pytest

import kvtheory.accounting
import kvtheory.entropy
import kvtheory.trie
from kvtheory import synthetic
from kvtheory.layer import Cache
from kvtheory.tiny import RationalLayer, RationalTransformer
from proofs_checks import sequential
from proofs_checks.claim import Claim, Verdict
from proofs_checks.context import Context
from proofs_checks.ledger import plain
from proofs_checks.run import run_claim
from proofs_checks.sequential import instances

# those that read a model's weights: test_injectivity.py; of prediction: test_prediction.py; of a table that need not be there: test_measured.py
ELSEWHERE = ("injectivity", "prediction/", "three-layers")
CLAIMS = {v.id: v for v in vars(sequential).values() if isinstance(v, Claim) and not any(x in v.id for x in ELSEWHERE)}
EXPECTED = {
    "sequential/total-entropy": Verdict.HOLDS,
    "sequential/per-step-entropy": Verdict.FAILS,
    "sequential/per-step-entropy-corrected": Verdict.HOLDS,
    "sequential/per-step-entropy-decoded": Verdict.HOLDS_UNDER,
    "sequential/per-step-entropy-injective": Verdict.HOLDS_UNDER,
    "sequential/perplexity-in-bits": Verdict.HOLDS,
    "sequential/cache-of-80-gb": Verdict.FAILS,
    "sequential/cache-in-bytes": Verdict.HOLDS,
    "sequential/ratio-914000": Verdict.FAILS,
    "sequential/ratio-corrected": Verdict.HOLDS,
    "sequential/payload-is-surprisal": Verdict.HOLDS,
    "sequential/checkpoints": Verdict.HOLDS,
    "sequential/replay-cost": Verdict.HOLDS,
    "sequential/recompute-is-bit-exact": Verdict.FAILS,
    "sequential/recompute-costs": Verdict.HOLDS_UNDER,
    "sequential/improves-with-context": Verdict.FAILS,
    "sequential/context-plateau": Verdict.HOLDS_UNDER,
    "trie/metric": Verdict.FAILS,
    "trie/similarity-ultrametric": Verdict.HOLDS,
    "trie/tree-distance": Verdict.HOLDS_UNDER,
    "trie/retrieval-is-longest-prefix": Verdict.HOLDS_UNDER,
    "trie/swap-time": Verdict.FAILS,
    "trie/swap-time-corrected": Verdict.HOLDS,
    "sharing/prefix-lossless": Verdict.HOLDS_UNDER,
    "sharing/block-granularity": Verdict.HOLDS,
    "sharing/tenants-apart": Verdict.HOLDS,
    "sharing/layers-additive": Verdict.HOLDS,
    "sharing/storage-corollary": Verdict.FAILS,
    "sharing/storage-of-followers": Verdict.HOLDS,
    "sharing/groups-by-small-similarity": Verdict.FAILS,
    "sharing/groups-by-large-similarity": Verdict.HOLDS,
    "sharing/residual-after-divergence": Verdict.FAILS,
    "sharing/residual-of-aligned-tails": Verdict.HOLDS_UNDER,
    "sharing/paraphrases": Verdict.HOLDS,
    "sharing/meaning-beyond-the-prefix": Verdict.HOLDS_UNDER,
    "sharing/delta-after-divergence": Verdict.FAILS,
    "sharing/delta-at-divergence": Verdict.HOLDS_UNDER,
}


def verdict(name, **options):
    """Of the statement alone, mutants aside."""
    claim = CLAIMS[name]
    context = Context(claims=40, claim_id=name, **options)
    return claim.judge([e for e in claim.run(context) if hasattr(e, "agrees")])


def test_all_claims_are_here_in_order():
    assert list(CLAIMS) == list(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_and_mutants(name):
    claim = CLAIMS[name]
    outcome = run_claim(claim, Context(claims=40))
    assert outcome.error is None
    assert outcome.verdict == claim.expected == EXPECTED[name]
    assert len(outcome.mutants) >= 2
    assert [m.name for m in outcome.mutants if m.refuted is not True] == []
    assert {p.figure for p in outcome.pictures} == ({claim.figure} if claim.figure else set())
    if claim.expected is Verdict.FAILS:
        assert claim.correction in EXPECTED and EXPECTED[claim.correction] in (Verdict.HOLDS, Verdict.HOLDS_UNDER)
    for picture in outcome.pictures:
        json.dumps(plain(picture.data), allow_nan=False)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", EXPECTED)
def test_verdicts_do_not_hang_on_the_seed(name, seed):
    assert verdict(name, seed=seed) == EXPECTED[name]


def swapped(true):
    def wrong(language, kv_map):
        found = true(language, kv_map)
        per_step_kv, per_step_tokens = (
            (found.total_kv,) * language.length,
            (found.total_tokens,) * language.length,
        )
        return found._replace(
            kv_given_kv=per_step_kv,
            tokens=per_step_tokens,
            total_kv=found.kv_given_kv[-1],
            total_tokens=found.tokens[-1],
        )

    return wrong


@pytest.mark.parametrize("name", [n for n in EXPECTED if "entropy" in n])
def test_per_step_and_total_exchanged_in_kvtheory(monkeypatch, name):
    monkeypatch.setattr(kvtheory.entropy, "sequential", swapped(kvtheory.entropy.sequential))
    assert verdict(name) != EXPECTED[name]


@pytest.mark.parametrize(
    ("module", "function", "wrong", "turned"),
    [
        (
            "entropy",
            "tokens_given_kv",
            lambda t: lambda law, kv: (0.0,) * law.length,
            ["sequential/per-step-entropy-corrected"],
        ),
        ("entropy", "is_injective", lambda t: lambda law, kv: True, ["sequential/per-step-entropy-injective"]),
        (
            "entropy",
            "next_token_given_kv",
            lambda t: lambda law, kv: t(law, lambda prefix: prefix),
            ["sequential/per-step-entropy", "sequential/per-step-entropy-decoded"],
        ),
        (
            "accounting",
            "kv_components_per_token",
            lambda t: lambda layers, heads, head_dim: layers * heads * head_dim,
            ["sequential/ratio-914000", "sequential/ratio-corrected"],
        ),
        ("accounting", "bit_floor", lambda t: lambda *a: 0, ["sequential/ratio-914000"]),
        (
            "trie",
            "similarity_bits",
            lambda t: lambda law, s, u: t(law, s, u) / 2,
            ["trie/metric", "trie/similarity-ultrametric", "trie/retrieval-is-longest-prefix"],
        ),
        ("trie", "tree_distance_bits", lambda t: lambda law, s, u: t(law, s, s[:0]), ["trie/tree-distance"]),
        (
            "trie",
            "swap_time_tail",
            lambda t: lambda p, k, n: t(p, k, n + 1),
            ["trie/swap-time", "trie/swap-time-corrected"],
        ),
    ],
)
def test_a_wrong_function_in_kvtheory_turns_the_verdict(monkeypatch, module, function, wrong, turned):
    home = getattr(kvtheory, module)
    monkeypatch.setattr(home, function, wrong(getattr(home, function)))
    for name in turned:
        assert verdict(name) != EXPECTED[name], name


def change(**fields):
    """A `sequential` that gives other numbers: fields name what of (record, language, kv_map)."""

    def wrong(true):
        def mutated(language, kv_map):
            found = true(language, kv_map)
            return found._replace(**{name: tuple(make(found, language, kv_map)) for name, make in fields.items()})

        return mutated

    return wrong


def counted(pair):
    """H(X_t | Y_t) of (X_t, Y_t) = pair(string, t)."""
    return lambda f, language, kv: tuple(
        kvtheory.entropy.conditional_entropy_bits((*pair(s, t), p) for s, p in language.items())
        for t in range(language.length)
    )


STEP_BY_STEP = {
    "tokens x 2": change(tokens=lambda f, *_: (2 * x for x in f.tokens)),
    "tokens x 1/2": change(tokens=lambda f, *_: (x / 2 for x in f.tokens)),
    "tokens without their condition": change(tokens=counted(lambda s, t: (s[t], ()))),
    "tokens given the last token only": change(tokens=counted(lambda s, t: (s[t], s[:t][-1:]))),
    "KV capped at 1 bit": change(kv_given_kv=lambda f, *_: (min(1.0, x) for x in f.kv_given_kv)),
    "KV averaged over steps": change(kv_given_kv=lambda f, *_: [sum(f.kv_given_kv) / len(f.kv_given_kv)] * len(f.kv_given_kv)),
    "the lesser of the two": change(kv_given_kv=lambda f, *_: map(min, f.kv_given_kv, f.tokens)),
    "KV given the tokens": change(kv_given_kv=lambda f, *_: f.kv_given_tokens),
    "both reversed": change(kv_given_kv=lambda f, *_: f.kv_given_kv[::-1], tokens=lambda f, *_: f.tokens[::-1]),
}  # fmt: skip


@pytest.mark.parametrize("slip", STEP_BY_STEP)
@pytest.mark.parametrize("name", [n for n in EXPECTED if "entropy" in n])
def test_each_step_is_measured(monkeypatch, name, slip):
    """Slips that leave inequalities, or sums over steps, as they are."""
    monkeypatch.setattr(kvtheory.entropy, "sequential", STEP_BY_STEP[slip](kvtheory.entropy.sequential))
    assert decided(name)


@pytest.mark.parametrize("name", ["sequential/per-step-entropy", "sequential/per-step-entropy-decoded"])
def test_the_next_token_without_its_condition(monkeypatch, name):
    monkeypatch.setattr(
        kvtheory.entropy,
        "next_token_given_kv",
        lambda language, kv: counted(lambda s, t: (s[t], ()))(None, language, kv),
    )
    assert decided(name)


def decided(name):
    """Whether the evidence turns the verdict; stops where it does."""
    claim = CLAIMS[name]
    return any(claim.cannot_recover(e) for e in claim.run(Context(claims=40, claim_id=name)) if hasattr(e, "agrees"))


def evidence(name, **options):
    claim = CLAIMS[name]
    return [e for e in claim.run(Context(claims=40, claim_id=name, **options)) if hasattr(e, "agrees")]


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_compared_within_a_tolerance_is_not_called_exact(name):
    for e in evidence(name):
        assert e.kind != "exact" or ("within" not in e.what and "1e-1" not in e.what), e.what
        # a float that went in as the rational it is: a denominator of 2^30 and more is a rounded number's
        rational = [x for x in (e.observed, e.predicted) if isinstance(x, Fraction)]
        assert not any(x.denominator > 2**30 and x.denominator & (x.denominator - 1) == 0 for x in rational), e.what


def test_the_information_in_the_sharpened_bound_is_evaluated():
    found = [e for e in evidence("sequential/per-step-entropy-decoded") if "I(t_t; t_<t|KV_<t)" in e.what]
    assert len(found) >= 2 and all(e.agrees and e.role == "statement" for e in found)
    assert any("I > 0 at" in e.note and "I > 0 at 0" not in e.note for e in found)


class TestTwoTokens:
    """|V| = 2 breaks the per-step bound with an open-loop store, rotary keys, a BOS or a sink."""

    @pytest.mark.parametrize("example", instances.two_token_violations(), ids=lambda e: e.name)
    def test_fixed_models(self, example):
        law = kvtheory.entropy.FiniteLanguage(dict.fromkeys(example.strings, Fraction(1, 2)))
        caches, safe = example.model.caches(2), example.within.caches(2)
        assert len(example.model.embedding) == 2 and caches.margin > 0.01 and safe.margin > 0.01
        first, second = ((caches.kv(s[:1]), caches.kv(s)) for s in example.strings)
        assert first[0] == second[0] and first[1] != second[1]
        found = kvtheory.entropy.sequential(law, caches.kv)
        assert found.kv_given_kv == (0, 1) and found.tokens == (1, 0)
        within = kvtheory.entropy.sequential(law, safe.kv)
        assert all(a <= b for a, b in zip(within.kv_given_kv, within.tokens))

    def test_shares_are_reported_with_intervals_and_not_judged(self):
        found = evidence("sequential/per-step-entropy")
        shares = [e for e in found if "share of random models" in e.what]
        assert len(shares) == 6
        for e in shares:
            assert (
                e.role == "assumption" and e.kind == "statistical" and e.interval.low <= e.observed <= e.interval.high
            )
            assert e.agrees is (True if e.interval.low > 0 else None)  # none found says nothing
        assert not any("noise hides" in (e.note or "") for e in found)
        violated = [e for e in found if e.role == "statement" and "|V|=2" in e.what]
        assert len(violated) == 4 and not any(e.agrees for e in violated)


class TestInstances:
    """The claims' own truth, against what it is a second route to."""

    def test_powers_order_and_measure_entropies(self):
        for instance in (instances.COUNTEREXAMPLE, instances.MERGED):
            true = instances.truth(instance)
            found = kvtheory.entropy.sequential(instance.language, instance.kv)
            assert [p.bits() for p in true.kv_given_kv] == pytest.approx(found.kv_given_kv, abs=1e-15)
            assert true.total_kv.bits() == found.total_kv and true.total_tokens.bits() == found.total_tokens
            assert true.total_tokens.exceeds(true.total_kv) == (found.total_tokens > found.total_kv)
            assert not true.total_kv.exceeds(true.total_kv)

    def test_information_is_a_difference_of_entropies(self):
        """I(t_t; t_<t | KV_<t) = H(t_t|KV_<t) - H(t_t|t_<t), as the cache is a function of the tokens: as integers."""
        for instance, true in instances.arbitrary_caches(Context(claims=40)):
            for i, given, token in zip(instances.information(instance), true.next_token_given_kv, true.tokens):
                assert i.power() == given.power() / token.power()

    def test_order_where_floats_cannot_tell(self):
        """Entropies of (n, n) and (n - 1, n + 1) out of 2n, n = 30 000: 8e-10 bit apart."""
        n = 30_000
        even = instances.Power((2 * n) ** (2 * n), n**n * n**n, 2 * n)
        uneven = instances.Power((2 * n) ** (2 * n), (n - 1) ** (n - 1) * (n + 1) ** (n + 1), 2 * n)
        assert even.exceeds(uneven) and not uneven.exceeds(even)

    @pytest.mark.parametrize("length", [2, 3])
    def test_two_token_models_are_those_of_the_rational_transformer(self, length):
        prefixes = [p for t in range(1, length + 1) for p in itertools.product((0, 1), repeat=t)]
        expected = {}
        for a, b, q, k, v, o, top_k, top_v in itertools.product((-1, 1, 0), repeat=8):
            if hash((a, b, q, k, v, o, top_k, top_v)) % (9 if length == 2 else 40):
                continue
            layers = (
                RationalLayer(((q,),), ((k,),), ((v,),), ((o,),)),
                RationalLayer(((0,),), ((top_k,),), ((top_v,),), ((0,),)),
            )
            model = RationalTransformer({0: (a,), 1: (b,)}, layers)
            written = [model.kv(p) for p in prefixes]
            cells = tuple(written.index(x) for x in written)
            expected[cells] = expected.get(cells, 0) + 1
        found = instances.two_token_partitions(length, 1)
        assert sum(found.values()) == 3**8
        assert set(expected) <= set(found) and all(times <= found[cells] for cells, times in expected.items())

    def test_all_models_counted(self):
        """n = 1: KV(0) = KV(1) unless the tokens differ in e and some weight reads them. By hand, over all 3^8."""
        found = instances.two_token_partitions(1, 1)
        differing_pairs, readers = 6, 81 - 1  # (e_0, e_1); (W_K, W_V) of both layers, o = q = 0 included below
        apart = 0
        for a, b, k, v, o, top_k, top_v in itertools.product((-1, 0, 1), repeat=7):
            x0, x1 = a + v * a * o, b + v * b * o
            apart += ((k * a, v * a, top_k * x0, top_v * x0) != (k * b, v * b, top_k * x1, top_v * x1)) * 3
        assert found[0, 1] == apart and found[0, 0] == 3**8 - apart
        assert apart <= 9 * differing_pairs * readers

    def test_laws_on_a_grid(self):
        laws = list(instances.laws_on_a_grid(2, 4))
        assert len(laws) == math.comb(7, 3) == len({tuple(sorted(law.items())) for law in laws})

    def test_open_loop_example(self):
        for loop, apart in (("open", True), ("closed", False)):
            codes = instances.open_loop_model(loop).caches(2).codes
            assert codes[0,] == codes[1,]
            assert (codes[0, 2] != codes[1, 2]) is apart


def test_assumptions_are_measured_on_a_real_cache():
    """Two tokens with one value row collide at every width; a third that is near collides once rounded."""
    layer = synthetic.make("gaussian", kv_heads=1, query_heads=1, tokens=4, head_dim=4, queries=1)
    values = np.zeros((1, 4, 4))
    values[0] = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1.01, 2, 3], [3, 2, 1, 0]]
    layer = layer.replace(values=values.astype(layer.values.dtype), index=0)
    cache = Cache(
        [layer],
        tokens=np.array([5, 6, 7, 8]),
        surprisal_bits=np.array([17.0, 0.1, 2.0, 3.0]),
        meta={"model": "made up"},
    )
    claim = CLAIMS["sequential/per-step-entropy-injective"]
    outcome = run_claim(claim, Context(claims=40, cache=cache))
    assert outcome.as_expected
    collisions = [e.observed for e in outcome.evidence if e.role == "assumption"]
    assert collisions == [1, 2, 2, 2]
    outcome = run_claim(CLAIMS["sequential/ratio-corrected"], Context(claims=40, cache=cache))
    assert outcome.as_expected
    # mean 22.1 / 4: floor(3 h / mean) = 9, 0, 1, 1 -> 9 + 1 + 1 + 1 = 12 bits on 4 positions
    assert [e.observed for e in outcome.evidence if "real surprisals" in e.what] == [Fraction(1)]


@pytest.mark.parametrize("index", [2, None])
def test_a_layer_with_context_says_nothing_of_injectivity(index):
    layer = synthetic.make("gaussian", kv_heads=1, query_heads=1, tokens=4, head_dim=4, queries=1).replace(index=index)
    cache = Cache([layer], tokens=np.array([5, 6, 7, 8]), meta={"model": "made up"})
    assert not [e for e in evidence("sequential/per-step-entropy-injective", cache=cache) if e.role == "assumption"]


@pytest.mark.parametrize("name", ["trie/tree-distance", "trie/retrieval-is-longest-prefix"])
@pytest.mark.parametrize(("surprisals", "certain"), [([0, 0.25, 9], 0), ([16, 0, 0, 3], 2)])
def test_transitions_of_a_real_text(name, surprisals, certain):
    """0 < P < 1 is an assumption of both; the first entry has no token before it."""
    layer = synthetic.make("gaussian", kv_heads=1, query_heads=1, tokens=len(surprisals), head_dim=4, queries=1)
    cache = Cache([layer], tokens=np.arange(len(surprisals)), surprisal_bits=np.array(surprisals, float))
    found = [e for e in evidence(name, cache=cache) if e.role == "assumption"]
    assert [e.observed for e in found if e.kind == "exact"] == [certain]
    assert [e.observed for e in found if e.kind == "numerical"] == [min(surprisals[1:])]
    assert CLAIMS[name].judge(evidence(name, cache=cache)) == EXPECTED[name]
    assert not [e for e in evidence(name) if e.role == "assumption"]


def test_ratio_914000_names_what_fails():
    """The limit and its arithmetic agree, an arithmetic code of the tokens reaches it; what fails is the paper's own coder."""
    claim = CLAIMS["sequential/ratio-914000"]
    assert "adaptive residual coder" in claim.statement and "theoretical limit" in claim.statement
    found = evidence(claim.id)
    assert all(e.agrees for e in found if e.what.startswith("printed for"))
    assert sum(e.what.startswith("printed for") for e in found) == 2
    replay = next(e for e in found if e.what.startswith("an ideal arithmetic code"))
    assert replay.agrees and "decoder is the model" in replay.note
    failing = [e.what for e in found if e.role == "statement" and not e.agrees]
    assert failing and all("adaptive residual coder" in what for what in failing)


@pytest.mark.parametrize(
    "name", ["sequential/ratio-914000", "sequential/ratio-corrected", "trie/metric", "trie/swap-time-corrected"]
)
def test_full_budget(name):
    assert verdict(name, budget="full") == EXPECTED[name]
