"""kvtheory.trie: d_T and D against exact probabilities, and the index against a dictionary of all prefixes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from kvtheory.entropy import FiniteLanguage, MarkovSource, surprisal_bits
from kvtheory.trie import Lease, ProbabilisticTrie, common_prefix, similarity_bits, tree_distance_bits

HALF, QUARTER = Fraction(1, 2), Fraction(1, 4)
#: dyadic, so that sums of bits are exact
DYADIC = MarkovSource(
    {0: HALF, 1: QUARTER, 2: QUARTER}, {0: {0: QUARTER, 1: HALF, 2: QUARTER}, 1: {0: HALF, 1: HALF}, 2: {2: 1}}
)
POSITIVE = MarkovSource(
    {0: Fraction(2, 3), 1: Fraction(1, 3)}, {0: {0: Fraction(1, 5), 1: Fraction(4, 5)}, 1: {0: HALF, 1: HALF}}
)
STRINGS = [s for n in range(4) for s in itertools.product((0, 1), repeat=n)]


def probability(law, string):
    p = Fraction(1)
    for i, token in enumerate(string):
        p *= law.next(string[:i]).get(token, 0)
        if not p:
            break
    return p


class CountingLaw:
    def __init__(self, law):
        self.law, self.asked = law, []

    def next(self, prefix):
        self.asked.append(prefix)
        return self.law.next(prefix)


class TestDistances:
    @pytest.mark.parametrize(
        ("s", "t", "length"), [((), (), 0), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((1,), (2,), 0)]
    )
    def test_common_prefix(self, s, t, length):
        assert common_prefix(s, t) == common_prefix(t, s) == length

    def test_against_exact_probabilities(self):
        for s, t in itertools.product(STRINGS, repeat=2):
            shared = probability(POSITIVE, s[: common_prefix(s, t)])
            assert similarity_bits(POSITIVE, s, t) == pytest.approx(surprisal_bits(shared), rel=1e-14)
            ratio = shared**2 / (probability(POSITIVE, s) * probability(POSITIVE, t))
            assert tree_distance_bits(POSITIVE, s, t) == pytest.approx(math.log2(ratio), rel=1e-14, abs=1e-14)

    def test_similarity_is_no_distance(self):
        """P(a) = P(b) = 1/2: a is at 1 bit from itself, at 0 bits from b."""
        law = FiniteLanguage({("a",): HALF, ("b",): HALF})
        assert similarity_bits(law, ("a",), ("a",)) == 1
        assert similarity_bits(law, ("a",), ("b",)) == 0
        assert tree_distance_bits(law, ("a",), ("a",)) == 0
        assert tree_distance_bits(law, ("a",), ("b",)) == 2

    def test_edges_next_to_one_are_not_absorbed(self):
        """A distance of 1e-15 bit behind a prefix of 4 000 bits: a difference of cumulated logs gives 0 or 2^-41."""
        tiny = Fraction(1, 10**15)

        class Law:
            def next(self, prefix):
                return {0: HALF, 1: HALF} if len(prefix) < 4000 else {0: 1 - tiny, 1: tiny}

        s = (0,) * 4000
        assert tree_distance_bits(Law(), s, (*s, 0)) == pytest.approx(1e-15 / math.log(2), rel=1e-9)
        assert similarity_bits(Law(), s, s) == 4000  # 2^-4000 is no float64

    def test_impossible_strings(self):
        law = FiniteLanguage({(0, 0): HALF, (0, 1): HALF})
        assert similarity_bits(law, (1, 0), (1, 1)) == math.inf
        assert similarity_bits(law, (1, 0), (0, 0)) == 0
        for s, t in [((1,), (0,)), ((1, 0), (1, 1)), ((0, 0), (1, 1)), ((0, 0), (0, 0, 0))]:
            assert tree_distance_bits(law, s, t) == tree_distance_bits(law, t, s) == math.inf
        assert tree_distance_bits(law, (1, 1), (1, 1)) == 0

    def test_certain_edges_make_a_pseudo_metric(self):
        assert tree_distance_bits(DYADIC, (2,), (2, 2, 2)) == 0

    def test_float_laws(self):
        class Model:
            def next(self, prefix):
                return {0: 0.75, 1: 0.25}

        assert similarity_bits(Model(), (1, 0), (1, 1)) == 2
        assert tree_distance_bits(Model(), (1, 0), (1, 1)) == pytest.approx(2 - math.log2(0.75))

    def test_only_what_is_shared_is_asked_for(self):
        law = CountingLaw(POSITIVE)
        similarity_bits(law, (0, 1, 0), (0, 1, 1))
        assert law.asked == [(), (0,)]


class TestTrie:
    def test_nodes_split_where_strings_diverge(self):
        trie = ProbabilisticTrie(DYADIC)
        end = trie.insert((0, 1, 1, 0))
        trie.insert((0, 1, 0))
        runs = {node.prefix: node for node in trie.nodes()}
        assert set(runs) == {(0, 1), (0, 1, 1, 0), (0, 1, 0)} and runs[0, 1, 1, 0] is end
        assert runs[0, 1].log2_probability == -2 and runs[0, 1].count == 2 and end.run == (1, 0)
        assert end.log2_probability == -4 and end.count == 1 and trie.root.count == 2 and trie.size == 5
        assert sorted(trie.strings()) == [(0, 1, 0), (0, 1, 1, 0)]
        assert "log2_probability=-4" in repr(end)

    def test_match(self):
        trie = ProbabilisticTrie(DYADIC)
        trie.insert((0, 1, 1, 0))
        for query, length in [((), 0), ((1,), 0), ((0, 1, 1), 3), ((0, 1, 1, 0, 0), 4), ((0, 1, 0), 2)]:
            for touch in (False, True):
                match = trie.longest_match(query, touch)
                assert (match.length, match.bits) == (length, similarity_bits(DYADIC, query, (0, 1, 1, 0)))
                assert match.bits == surprisal_bits(probability(DYADIC, query[:length]))
        assert (0, 1) in trie and (0, 1, 0) not in trie and () in trie

    def test_the_law_is_asked_once_for_each_new_token(self):
        law = CountingLaw(POSITIVE)
        trie = ProbabilisticTrie(law)
        trie.insert((0, 1, 1))
        trie.insert((0, 1, 0, 0))
        trie.longest_match((0, 1, 0))
        trie.insert((0, 1))
        assert law.asked == [(), (0,), (0, 1), (0, 1), (0, 1, 0)]

    def test_impossible_strings_are_stored(self):
        law = CountingLaw(FiniteLanguage({(0, 0): 1}))
        trie = ProbabilisticTrie(law)
        node = trie.insert((1, 0, 1))
        assert node.log2_probability == -math.inf and trie.longest_match((1, 0, 1)).bits == math.inf
        assert trie.insert((1, 0, 1, 1)).log2_probability == -math.inf and law.asked == [()]

    def test_held_tokens_stay(self):
        trie = ProbabilisticTrie(POSITIVE, capacity=4)
        trie.insert((0, 0, 0, 0))
        with trie.hold((0, 0, 1)) as match:
            assert match.length == 2 and trie.pinned == 2
            with pytest.raises(ValueError, match="3 more tokens do not fit into 4: 2 are held"):
                trie.insert((1, 1, 1))
            assert (0, 0, 0, 0) in trie  # nothing was evicted for the string that does not fit
            trie.insert((1, 1))
            assert (0, 0) in trie and (0, 0, 0) not in trie
            assert trie.evict(99) == 2
        assert trie.pinned == 0 and trie.evict(99) == 2 and trie.size == 0 and not list(trie.nodes())

    def test_a_held_string_is_extended(self):
        trie = ProbabilisticTrie(POSITIVE, capacity=4)
        trie.insert((0, 0))
        trie.insert((1, 1))
        with trie.hold((0, 0)):
            trie.insert((0, 0, 1, 1))
        assert trie.strings() == [(0, 0, 1, 1)]

    def test_a_string_makes_no_room_in_itself(self):
        trie = ProbabilisticTrie(POSITIVE, capacity=3)
        trie.insert((0, 0, 0))
        with pytest.raises(ValueError, match="2 more tokens do not fit into 3: 2 are held or shared"):
            trie.insert((0, 0, 1, 1))
        trie.insert((0, 0, 1))
        assert trie.strings() == [(0, 0, 1)]

    def test_probability_policy_keeps_the_likely(self):
        trie = ProbabilisticTrie(POSITIVE, capacity=4, policy="probability")
        trie.insert((0, 1))  # P = 8/15
        trie.insert((1, 0))  # P = 1/6, used later
        trie.insert((0, 1, 1))
        assert sorted(trie.strings()) == [(0, 1, 1), (1,)]
        lru = ProbabilisticTrie(POSITIVE, capacity=4)
        for string in [(0, 1), (1, 0), (1, 1)]:
            lru.insert(string)
        assert sorted(lru.strings()) == [(0,), (1, 0), (1, 1)]

    def test_values_stay_at_their_end(self):
        trie = ProbabilisticTrie(POSITIVE)
        trie.insert((0, 0, 1)).value = "blocks"
        trie.insert((0, 1))
        node = trie.longest_match((0, 0, 1)).node
        assert node.value == "blocks" and node.prefix == (0, 0, 1)
        trie.longest_match((0, 1))
        assert trie.evict(1) == 1  # the whole leaf (0, 0, 1) has the run (0, 1): trimmed to (0,)
        assert trie.longest_match((0, 0, 1)).node.value is None

    def test_refusals(self):
        with pytest.raises(ValueError, match="capacity"):
            ProbabilisticTrie(POSITIVE, capacity=-1)
        with pytest.raises(ValueError, match="policy"):
            ProbabilisticTrie(POSITIVE, policy="fifo")
        lease = ProbabilisticTrie(POSITIVE).hold((0,))
        lease.release()
        with pytest.raises(ValueError, match="released before"):
            lease.release()

    @given(
        st.lists(st.lists(st.integers(0, 1), max_size=6).map(tuple), min_size=1, max_size=6),
        st.lists(st.integers(0, 1), max_size=6),
    )
    def test_retrieval_is_the_longest_exact_prefix(self, stored, query):
        trie = ProbabilisticTrie(POSITIVE)
        for string in stored:
            trie.insert(string)
        longest = max(common_prefix(query, s) for s in stored)
        assert trie.longest_match(query).length == longest
        similarity = [similarity_bits(POSITIVE, query, s) for s in stored]
        assert all(common_prefix(query, s) == longest for s, d in zip(stored, similarity) if d == max(similarity))


class TrieMachine(RuleBasedStateMachine):
    """The trie against {prefix: [insertions, last use, holds]} for every stored prefix; eviction removes the worst leaf."""

    leases = Bundle("leases")
    policy = "lru"
    capacity: int | None = 7
    strings = st.lists(st.integers(0, 2), max_size=6).map(tuple)

    def __init__(self):
        super().__init__()
        self.trie = ProbabilisticTrie(DYADIC, self.capacity, self.policy)
        self.model = {(): [0, 0, 0]}
        self.time = 0

    def prefixes(self, tokens):
        return [tokens[:i] for i in range(len(tokens) + 1) if tokens[:i] in self.model]

    def use(self, tokens):
        self.time += 1
        for prefix in self.prefixes(tokens):
            self.model[prefix][1] = self.time

    def evict_from_model(self, tokens, kept=()):
        freed = 0
        while freed < tokens:
            inner = {p[:-1] for p in self.model if p}
            leaves = [p for p in self.model if p and p not in inner and not self.model[p][2] and p not in kept]
            if not leaves:
                break
            rank = probability if self.policy == "probability" else lambda law, p: 0
            del self.model[min(leaves, key=lambda p: (rank(DYADIC, p), self.model[p][1]))]
            freed += 1
        return freed

    @rule(tokens=strings)
    def insert(self, tokens):
        path = self.prefixes(tokens)
        missing = len(tokens) + 1 - len(path)
        excess = len(self.model) - 1 + missing - (self.capacity if self.capacity is not None else 99)
        kept = {p for p, (_, _, holds) in self.model.items() if holds} | set(path)
        if self.capacity is not None and len(kept - {()}) + missing > self.capacity:
            with pytest.raises(ValueError, match="do not fit"):
                self.trie.insert(tokens)
            return
        assert self.trie.insert(tokens).prefix == tokens
        if excess > 0:
            assert self.evict_from_model(excess, set(path)) == excess
        for i in range(len(tokens) + 1):
            self.model.setdefault(tokens[:i], [0, 0, 0])[0] += 1
        self.use(tokens)

    @rule(tokens=strings, touch=st.booleans())
    def match(self, tokens, touch):
        longest = self.prefixes(tokens)[-1]
        match = self.trie.longest_match(tokens, touch)
        assert match.length == len(longest)
        assert match.bits == surprisal_bits(probability(DYADIC, longest))
        if touch:
            assert match.node.prefix == longest
            self.use(tokens)

    @rule(target=leases, tokens=strings)
    def hold(self, tokens):
        self.use(tokens)
        for prefix in self.prefixes(tokens):
            self.model[prefix][2] += 1
        return self.trie.hold(tokens), self.prefixes(tokens)[-1]

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[Lease, tuple]):
        lease[0].release()
        for prefix in self.prefixes(lease[1]):
            self.model[prefix][2] -= 1

    @precondition(lambda self: len(self.model) > 1)
    @rule(tokens=st.integers(0, 5))
    def evict(self, tokens):
        assert self.trie.evict(tokens) == self.evict_from_model(tokens)

    @invariant()
    def same(self):
        stored = {(): (self.trie.root.count, self.trie.root.last_use, self.trie.root.pins)}
        for node in self.trie.nodes():
            end = node.prefix
            assert node.run and len(node.edge_bits) == len(node.run) and node.parent.children[node.run[0]] is node
            assert node.log2_probability == -surprisal_bits(probability(DYADIC, end))
            for i in range(len(end) - len(node.run) + 1, len(end) + 1):
                stored[end[:i]] = (node.count, node.last_use, node.pins)
        assert stored == {prefix: tuple(numbers) for prefix, numbers in self.model.items()}
        assert self.trie.size == len(stored) - 1
        assert self.trie.pinned == sum(1 for p, (_, _, holds) in stored.items() if p and holds)
        assert self.capacity is None or self.trie.size <= self.capacity


class ProbabilityMachine(TrieMachine):
    policy = "probability"


class UnlimitedMachine(TrieMachine):
    capacity = None


TestLru = TrieMachine.TestCase
TestProbability = ProbabilityMachine.TestCase
TestUnlimited = UnlimitedMachine.TestCase
for machine in (TestLru, TestProbability, TestUnlimited):
    machine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
del machine  # or it would be collected once more
