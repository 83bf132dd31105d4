"""kvtheory.entropy and kvtheory.tiny against a second, slower way of counting."""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtheory import entropy, tiny
from kvtheory.entropy import FiniteLanguage, MarkovSource, sequential, tokens_given_kv

HALF = Fraction(1, 2)


def plain_entropy(weights):
    """-sum p log2 p, in NumPy."""
    p = np.array([float(w) for w in weights if w]) / float(sum(weights))
    return float(-(p * np.log2(p)).sum())


def joint_entropy(language, reading):
    """H of `reading(string)` under the language, from sums over whole strings (the module goes through prefixes)."""
    weights = Counter()
    for string, p in language.items():
        weights[reading(string)] += p
    return plain_entropy(list(weights.values()))


@st.composite
def languages(draw, max_vocabulary=3, max_length=3):
    vocabulary = draw(st.integers(1, max_vocabulary))
    length = draw(st.integers(1, max_length))
    strings = st.tuples(*[st.integers(0, vocabulary - 1)] * length)
    return FiniteLanguage.from_counts(draw(st.dictionaries(strings, st.integers(1, 9), min_size=1)))


@st.composite
def language_and_cache(draw, **sizes):
    """A language and an arbitrary deterministic cache: any function of the prefix, with collisions."""
    language = draw(languages(**sizes))
    values = draw(st.integers(1, 4))
    table = {p: draw(st.integers(0, values - 1)) for t in range(1, language.length + 1) for p in language.prefixes(t)}
    return language, table


class TestSurprisal:
    @pytest.mark.parametrize("k", [0, 1, 10, 52, 60, 1074, 5000])
    def test_powers_of_two_are_exact(self, k):
        assert entropy.surprisal_bits(Fraction(1, 2**k)) == k

    def test_ends(self):
        assert math.copysign(1, entropy.surprisal_bits(1.0)) == 1 and entropy.surprisal_bits(1.0) == 0
        assert entropy.surprisal_bits(0) == math.inf

    @given(st.integers(1, 2**200), st.integers(0, 2**200))
    @example(2**60, 1)
    @example(1, 2**199)
    @example(3, 1)
    def test_precision(self, part, more):
        """Within a few units of the last place of the true value, at both ends; by 400-bit integer logarithms."""
        flint = pytest.importorskip("flint")
        with flint.ctx.workprec(400):
            truth = (flint.arb(part + more) / part).log() / flint.arb(2).log()
            error = abs((truth - flint.arb(entropy.surprisal_bits(Fraction(part, part + more)))) / truth) if more else 0
        assert float(error) < 1e-15

    @pytest.mark.parametrize("bad", [-0.1, 1.5, math.nan, Fraction(3, 2), Fraction(-1, 2), 2, math.inf])
    def test_not_a_probability(self, bad):
        with pytest.raises(ValueError, match="probability"):
            entropy.surprisal_bits(bad)


class TestFiniteLanguage:
    def test_next_is_the_exact_conditional_law(self):
        language = FiniteLanguage({(0, 0): Fraction(1, 3), (0, 1): Fraction(1, 6), (1, 1): HALF})
        assert language.length == 2 and language.denominator == 6
        assert language.next(()) == {0: HALF, 1: HALF}
        assert language.next((0,)) == {0: Fraction(2, 3), 1: Fraction(1, 3)}
        assert language.next((1,)) == {1: 1}
        assert language.next((1, 1)) == {}
        with pytest.raises(ValueError, match="probability 0"):
            language.next((1, 0))

    @given(languages())
    def test_the_chain_rule_gives_the_strings_back(self, language):
        assert FiniteLanguage.from_law(language, language.length) == language
        assert sum(language.values()) == 1
        for string, p in language.items():
            assert language.probability(string) == p
        assert isinstance(language, entropy.Law)

    def test_impossible_strings_leave_the_support(self):
        language = FiniteLanguage({("a",): 1, ("b",): 0})
        assert (
            list(language) == [("a",)] and language.probability(("b",)) == 0 and language.probability(("a", "a")) == 0
        )

    @pytest.mark.parametrize(
        ("law", "error", "says"),
        [
            ({(0,): HALF}, ValueError, "sum 1, got 1/2"),
            ({}, ValueError, "sum 1, got 0"),
            ({(0,): Fraction(3, 2), (1,): -HALF}, ValueError, r"\(1,\)"),
            ({(0,): HALF, (0, 1): HALF}, ValueError, r"\[1, 2\]"),
            ({(0,): 0.5, (1,): 0.5}, TypeError, "Fraction"),
            ({"a": 1}, TypeError, "tuples"),
        ],
    )
    def test_refusals(self, law, error, says):
        with pytest.raises(error, match=says):
            FiniteLanguage(law)

    def test_no_counts(self):
        with pytest.raises(ValueError, match="positive sum"):
            FiniteLanguage.from_counts({(0,): 0})


class TestMarkovSource:
    SOURCE = MarkovSource({0: Fraction(1)}, {0: {0: Fraction(3, 4), 1: Fraction(1, 4)}, 1: {0: HALF, 1: HALF}})

    def test_language(self):
        assert self.SOURCE.language(3)[0, 1, 0] == Fraction(1, 8)
        assert (1, 0, 0) not in self.SOURCE.language(3)

    def test_entropy_rate(self):
        """Started in its stationary law (2/3, 1/3), a Markov source has the same entropy at every later step."""
        source = MarkovSource({0: Fraction(2, 3), 1: Fraction(1, 3)}, self.SOURCE.transitions)
        rate = 2 / 3 * plain_entropy([3, 1]) + 1 / 3
        steps = sequential(source.language(5), lambda prefix: prefix).tokens
        assert steps[1:] == pytest.approx([rate] * 4, rel=1e-14)

    @pytest.mark.parametrize(
        ("initial", "transitions", "error", "says"),
        [
            ({0: HALF}, {0: {0: 1}}, ValueError, "initial"),
            ({0: 1}, {0: {0: HALF}}, ValueError, r"transitions\[0\]"),
            ({0: 1}, {0: {1: 1}}, ValueError, "no row for token 1"),
            ({0: 1.0}, {0: {0: 1}}, TypeError, "initial"),
        ],
    )
    def test_refusals(self, initial, transitions, error, says):
        with pytest.raises(error, match=says):
            MarkovSource(initial, transitions)

    def test_from_law_refuses_floats(self):
        class Floats:
            def next(self, prefix):
                return {0: 0.5, 1: 0.5}

        with pytest.raises(TypeError, match="Fractions"):
            FiniteLanguage.from_law(Floats(), 2)


class TestConditionalEntropy:
    def test_known_values(self):
        assert entropy.entropy_bits([1, 1, 1, 1]) == 2
        assert entropy.entropy_bits([Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)]) == 1.75
        assert entropy.entropy_bits([7]) == 0
        # X = Y: nothing left; X independent of Y: all left
        assert entropy.conditional_entropy_bits((x, x, 1) for x in range(5)) == 0
        assert entropy.conditional_entropy_bits((x, y, 1) for x in range(4) for y in range(3)) == pytest.approx(
            2, rel=1e-15
        )

    def test_repeated_cells_add_up(self):
        assert entropy.conditional_entropy_bits([("x", 0, 1), ("x", 0, 1), ("y", 0, 2)]) == 1

    @pytest.mark.parametrize(("weight", "error"), [(0.5, TypeError), (-1, ValueError), (0, ValueError)])
    def test_refusals(self, weight, error):
        with pytest.raises(error, match="weight"):
            entropy.conditional_entropy_bits([(0, 0, weight)])


class TestSequential:
    @given(language_and_cache())
    def test_against_entropies_of_whole_strings(self, case):
        language, table = case
        found = sequential(language, table.__getitem__)

        def kv(s, t):
            return tuple(table[s[:i]] for i in range(1, t + 1))

        for t in range(1, language.length + 1):
            history = joint_entropy(language, lambda s, t=t: kv(s, t - 1))
            tokens_before = joint_entropy(language, lambda s, t=t: s[: t - 1])
            close = {"rel": 1e-12, "abs": 1e-12}
            assert found.kv_given_kv[t - 1] == pytest.approx(
                joint_entropy(language, lambda s, t=t: kv(s, t)) - history, **close
            )
            assert found.tokens[t - 1] == pytest.approx(
                joint_entropy(language, lambda s, t=t: s[:t]) - tokens_before, **close
            )
            both = joint_entropy(language, lambda s, t=t: (s[: t - 1], table[s[:t]]))
            assert found.kv_given_tokens[t - 1] == pytest.approx(both - tokens_before, **close)
            both = joint_entropy(language, lambda s, t=t: (s[: t - 1], kv(s, t - 1)))
            assert tokens_given_kv(language, table.__getitem__)[t - 1] == pytest.approx(both - history, **close)
            both = joint_entropy(language, lambda s, t=t: (s[t - 1], kv(s, t - 1)))
            assert entropy.next_token_given_kv(language, table.__getitem__)[t - 1] == pytest.approx(
                both - history, **close
            )
        assert found.total_kv == pytest.approx(joint_entropy(language, lambda s: kv(s, language.length)), **close)
        assert found.total_tokens == pytest.approx(joint_entropy(language, lambda s: s), **close)

    @given(language_and_cache())
    def test_what_always_holds(self, case):
        language, table = case
        found = sequential(language, table.__getitem__)
        room = 1e-12
        assert sum(found.kv_given_kv) == pytest.approx(found.total_kv, abs=room)
        assert sum(found.tokens) == pytest.approx(found.total_tokens, abs=room)
        assert found.total_kv <= found.total_tokens + room
        slack = tokens_given_kv(language, table.__getitem__)
        for kv, kv_by_tokens, token, open_ in zip(found.kv_given_kv, found.kv_given_tokens, found.tokens, slack):
            assert kv_by_tokens <= token + room  # (i)
            assert kv <= token + open_ + room  # (ii)

    @given(language_and_cache())
    def test_injective_caches_cost_what_tokens_cost(self, case):
        """With an injective cache every entropy is that of the tokens, bit for bit: the same integers are summed."""
        language, _ = case
        for injective in (lambda prefix: prefix, lambda prefix: prefix[-1]):
            found = sequential(language, injective)
            assert found.kv_given_kv == found.kv_given_tokens == found.tokens
            assert found.total_kv == found.total_tokens
            assert entropy.is_injective(language, injective)
            assert tokens_given_kv(language, injective) == (0,) * language.length

    @given(language_and_cache())
    def test_is_injective(self, case):
        language, table = case
        by_hand = all(
            len({tuple(table[s[:i]] for i in range(1, t + 1)) for s in language}) == len(language.prefixes(t))
            for t in range(1, language.length + 1)
        )
        assert entropy.is_injective(language, table.__getitem__) == by_hand

    @given(language_and_cache())
    def test_asks_once_for_each_possible_prefix(self, case):
        language, table = case
        for function in (sequential, tokens_given_kv, entropy.next_token_given_kv):
            asked = Counter()

            def kv(prefix, asked=asked):
                asked[prefix] += 1
                return table[prefix]

            function(language, kv)
            assert asked == dict.fromkeys(table, 1)

    def test_dyadic_laws_are_exact(self):
        language = FiniteLanguage(
            {(0, 0): HALF, (0, 1): Fraction(1, 4), (1, 0): Fraction(1, 8), (1, 1): Fraction(1, 8)}
        )
        found = sequential(language, lambda prefix: prefix[-1])
        assert found.total_kv == found.total_tokens == 1.75
        merged = sequential(
            language, lambda prefix: len(set(prefix))
        )  # (0,0)~(1,1): not powers of two; strings stay apart
        assert merged.kv_given_kv[0] == 0

    def test_constant_cache(self):
        found = sequential(FiniteLanguage({(0,): HALF, (1,): HALF}), lambda prefix: 0)
        assert found == ((0.0,), (0.0,), (1.0,), 0.0, 1.0)

    def test_minus_zero_is_zero(self):
        found = sequential(FiniteLanguage({(0,): HALF, (1,): HALF}), {(0,): 0.0, (1,): -0.0}.__getitem__)
        assert found.total_kv == 0

    @pytest.mark.parametrize(
        ("value", "error", "says"), [(np.zeros(2), TypeError, "ndarray"), ([0], TypeError, "list")]
    )
    def test_unhashable_caches(self, value, error, says):
        with pytest.raises(error, match=f"kv_map.*{says}"):
            sequential(FiniteLanguage({(0,): 1}), lambda prefix: value)

    @pytest.mark.parametrize("value", [math.nan, (1, (math.nan,)), np.float32("nan")])
    def test_nan_is_refused(self, value):
        with pytest.raises(ValueError, match=r"NaN in the KV of prefix \(0,\)"):
            sequential(FiniteLanguage({(0,): 1}), lambda prefix: value)


class TestTiny:
    def test_the_counterexample(self):
        """theory.md A2: nothing is left to say about the second token, one bit about its KV; totals agree."""
        model = tiny.collision_model()
        language = FiniteLanguage({("a", "c"): HALF, ("b", "a"): HALF})
        assert model.kv(("a",)) == model.kv(("b",)) == (((0,), (0,)),)
        assert model.kv(("a", "c")) == (((1,), (1,)),)
        found = sequential(language, model.kv)
        assert found.tokens == (1, 0) and found.kv_given_kv == (0, 1) and found.kv_given_tokens == (0, 0)
        assert found.total_kv == found.total_tokens == 1
        assert tokens_given_kv(language, model.kv) == (0, 1)

    def test_rational_attention_is_the_limit_of_softmax(self):
        """Two layers against NumPy with logits times 1000, generic integers, so that no two logits are near."""
        rng = np.random.default_rng(3)
        e = rng.integers(-3, 4, (3, 2))
        w = rng.integers(-3, 4, (2, 3, 2, 2))
        o = rng.integers(-3, 4, (2, 2, 2))

        def rows(matrix):
            return tuple(tuple(int(x) for x in row) for row in matrix)

        layers = tuple(tiny.RationalLayer(*(rows(m) for m in w[i]), rows(o[i])) for i in range(2))
        model = tiny.RationalTransformer(dict(enumerate(rows(e))), layers)
        for prefix in [(0, 1, 2), (2, 2, 1), (1, 0, 0)]:
            x = e[list(prefix)].astype(float)
            for i in range(2):
                q, k, v = (x @ w[i, j] for j in range(3))
                assert np.allclose(np.array(model.kv(prefix)[i], float), [k[-1], v[-1]], atol=1e-9)
                logits = np.where(np.tri(3, dtype=bool), 1000 * q @ k.T, -np.inf)
                a = np.exp(logits - logits.max(1, keepdims=True))
                x = x + (a / a.sum(1, keepdims=True)) @ v @ o[i]

    @pytest.mark.parametrize("options", [{}, {"loop": "open"}, {"rotation": 0.7}, {"start": np.ones(4)}, {"sink": 0.3}])
    def test_ternary_codes_one_prefix_at_a_time(self, options):
        """Against a decoder that appends one token at a time to a stored cache."""
        model = tiny.TernaryTransformer.random(np.random.default_rng(5), 3, **options)
        caches = model.caches(3)
        assert len(caches.codes) == 3 + 9 + 27 and caches.margin > 0
        first = 0 if model.start is None else 1
        sink = 0 if model.sink is None else np.exp(model.sink)

        def turn(z, angle):
            return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ z

        for string in [(0, 1, 2), (2, 2, 0), (1, 1, 1)]:
            store = [([], []) for _ in range(2)]
            for i, embedded in enumerate([model.start][:first] + [model.embedding[t] for t in string]):
                x, written = embedded, []
                for layer, (keys, values) in enumerate(store):
                    angle = model.rotation * i
                    q, k = turn(x @ model.query[layer], angle), turn(x @ model.key[layer], angle)
                    v = x @ model.value[layer]
                    codes = np.clip(np.rint([k, v]), -1, 1)
                    written.append(codes)
                    keys.append(k if model.loop == "open" else codes[0])
                    values.append(v if model.loop == "open" else codes[1])
                    w = np.exp(np.array(keys) @ q / np.sqrt(2))
                    x = x + w @ np.array(values) / (w.sum() + sink) @ model.output[layer]
                if i >= first:
                    codes = np.concatenate(written).ravel().astype(np.int8)
                    assert caches.kv(string[: i + 1 - first]) == codes.tobytes()

    def test_refusals(self):
        rng = np.random.default_rng(0)
        with pytest.raises(ValueError, match="loop"):
            tiny.TernaryTransformer.random(rng, 2, loop="half")
        with pytest.raises(ValueError, match="head dimension 2"):
            tiny.TernaryTransformer.random(rng, 2, head_dim=3, rotation=0.1)
