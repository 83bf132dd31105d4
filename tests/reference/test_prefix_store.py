"""PrefixStore: bits out as they went in, bytes to the last one, tenants apart, room made by what nothing refers to; hostile bytes."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from kvtheory import workload
from kvtheory.layer import Cache, Layer
from kvtheory.prediction import ToyPlayer
from reference import CorruptStream, PrefixStore, stream
from reference.prefix_store.groups import Ranked, group, shared_bits
from reference.prefix_store.layout import End, session_bytes

EXACT = {
    "radix": PrefixStore("radix"),
    "blocks of 3": PrefixStore("blocks", block=3),
    "blocks of 16": PrefixStore("blocks"),
}
PLT = {
    "plt <=": PrefixStore("plt", delta=8, residual=False),
    "plt >=": PrefixStore("plt", delta=8, rule=">=", residual=False),
}
INNER = (None, reference.TurboQuant(4), reference.KIVI(4, group=4, window=4), reference.PolarQuant((4, 3)))


def fresh(store, **changes):
    return replace(store, **changes)


def cache(tokens, layers=2, dtype=np.float32, shift=0.0, heads=2, dim=8):
    """KV_t = F(t_1..t_t), of an irrational walk; 8 bits a token."""
    walk = np.cumsum(np.sin(np.arange(1, len(tokens) + 1) * (1.7 + np.asarray(tokens, float))))
    made = []
    for i in range(layers):
        angle = walk[None, :, None] * (1 + np.arange(dim)) + np.arange(heads)[:, None, None] + i
        made.append(Layer((np.sin(angle) + shift).astype(dtype), np.cos(1.3 * angle).astype(dtype), index=i))
    return Cache(made, tokens=np.array(tokens, np.int64), surprisal_bits=np.full(len(tokens), 8.0))


def same(decoded, given_):
    return len(decoded) == len(given_) and all(
        a.keys.dtype == b.keys.dtype and a.keys.tobytes() == b.keys.tobytes() and a.values.tobytes() == b.values.tobytes()
        for a, b in zip(decoded, given_)
    )  # fmt: skip


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=7)


@pytest.mark.parametrize("name", [*EXACT, *PLT])
@settings(max_examples=25)
@given(sessions=texts, tenants=st.integers(1, 2))
def test_bit_for_bit_and_bytes_to_the_last(name, sessions, tenants):
    store = fresh({**EXACT, **PLT}[name])
    caches = {f"{i}é": cache(tokens) for i, tokens in enumerate(sessions)}
    salts = {key: bytes([i % tenants]) for i, key in enumerate(caches)}
    for key, one in caches.items():
        store.put(key, one, salts[key])
    data = store.stream()
    assert len(data) == store.nbytes == store.stats().bytes_stored
    decoded = reference.decode(data)
    assert list(decoded) == sorted(caches) and len(decoded) == len(store)
    for key, one in caches.items():
        assert same(store.get(key), one) and same(decoded[key], one)
        assert (decoded.tokens(key) == one.tokens).all() and decoded.salt(key) == salts[key]
    assert store.encode({key: (one, salts[key]) for key, one in caches.items()}) == data


@settings(max_examples=25)
@given(sessions=texts, order=st.randoms(use_true_random=False))
def test_the_bytes_of_a_radix_tree_do_not_depend_on_the_order(sessions, order):
    caches = [(str(i), cache(tokens, layers=1)) for i, tokens in enumerate(sessions)]
    first = PrefixStore("radix").encode(dict(caches))
    order.shuffle(caches)
    assert PrefixStore("radix").encode(dict(caches)) == first


@settings(max_examples=25)
@given(sessions=texts)
def test_tokens_found_are_those_counted_by_hand(sessions):
    def literal(s, t):
        return next((i for i, (a, b) in enumerate(zip(s, t)) if a != b), min(len(s), len(t)))

    for block in (1, 3, 16):
        for store in (PrefixStore("blocks", block=block), PrefixStore("radix")):
            size = block if store.policy == "blocks" else 1
            lost = 0
            for i, tokens in enumerate(sessions):
                best = max((literal(tokens, other) for other in sessions[:i]), default=0)
                whole = max((literal(tokens, other) // size * size for other in sessions[:i]), default=0)
                assert store.put(str(i), cache(tokens, layers=1)) == whole
                assert best - whole < size
                lost += best - whole
            stats = store.stats()
            assert stats.lost_tokens == lost and stats.put_tokens == sum(map(len, sessions)) == stats.tokens
            assert stats.stored_tokens + stats.hit_tokens == stats.tokens
            assert stats.hit_rate == stats.hit_tokens / stats.tokens


@pytest.mark.parametrize("inner", INNER, ids=str)
@pytest.mark.parametrize("policy", ["radix", "blocks", "plt"])
def test_any_inner_codec_of_single_layers(policy, inner):
    store = PrefixStore(policy, block=4, inner=inner, delta=16, rule=">=")
    caches = {"a": cache(range(12)), "b": cache([*range(8), 50, 51]), "c": cache([*range(8), 50, 51, 52, 53, 54])}
    for key, one in caches.items():
        store.put(key, one)
    data = store.stream()
    assert len(data) == store.nbytes and reference.inspect(data).codec == "PrefixStore"
    decoded = reference.decode(data)
    for key, one in caches.items():
        assert all(
            np.array_equal(a.keys, b.keys) and np.array_equal(a.values, b.values)
            for a, b in zip(store.get(key), decoded[key])
        )
        for a, b in zip(decoded[key], one):
            assert a.keys.shape == b.keys.shape and float(np.mean((a.keys - b.keys) ** 2)) < 0.5 * float(
                np.mean(b.keys**2)
            )
    assert store.decode_flops(data) >= 0 and (inner is None or store.decode_flops(data) > 0)


def test_what_the_bytes_are():
    """Two sessions of 8 + 2 and 8 + 3 tokens, one head of dimension 1, float16: every byte by hand."""
    caches = {
        key: cache(tokens, 1, np.float16, heads=1, dim=1)
        for key, tokens in (("a", [*range(8), 300, 1]), ("b", [*range(8), 9, 9, 9]))
    }
    store = PrefixStore("radix")
    for key, one in caches.items():
        store.put(key, one)
    layer = {8: 14, 3: 14, 2: 14}  # group: number and lengths of 3 parts, shape of 10 bytes; then 4 bytes a token
    shape = 8 + 2  # four sizes, index, types, width, first position; positions are consecutive
    assert {n: 1 + 3 + (shape - 2) + 4 * n for n in layer} == {n: len(part) for n, part in _coded(store).items()}
    sizes = [part.remaining for part in stream.read(store.stream())[1][0]]
    segments = 3 * (4 + 1 + 1 + 1) + 1
    tokens = (1 + 8) + (1 + 3) + (1 + 2 * 2)
    payload = sum(1 + len(part) for part in _coded(store).values())
    assert sizes == [1 + 4 + 4, segments, tokens, payload, 2 * (1 + 1 + 4 + 1)]


def _coded(store):
    return {len(s.tokens): store._coded(s)[0] for s in store._tree.segments()}


def test_tenants_share_nothing_even_by_hash():
    one = cache(range(32))
    for policy in ("radix", "blocks"):
        store = PrefixStore(policy, verify=False)
        assert [store.put(name, one, salt) for name, salt in (("a", b"a"), ("b", b"b"), ("c", b""), ("d", b"a"))] == [
            0,
            0,
            0,
            32,
        ]
        assert store.stats().stored_tokens == 3 * 32
        assert [store.match(one.tokens, salt).length for salt in (b"a", b"ab", b"c")] == [32, 0, 0]


def test_other_numbers_for_the_same_tokens_are_refused_and_change_nothing():
    one, other = cache(range(8)), cache(range(8), shift=0.25)
    for store in map(fresh, (PrefixStore("radix"), PrefixStore("blocks", block=4))):
        store.put("a", one)
        before = store.stream()
        with pytest.raises(ValueError, match=r"layers\[0\]: expected the keys and values stored for the same 1 tokens"):
            store.put("b", other)
        assert store.stream() == before and "b" not in store
        assert store.put("b", other, salt=b"another plan") == 0 and same(store.get("b"), other)
    blind = PrefixStore("radix", verify=False)
    blind.put("a", one)
    assert blind.put("b", other) == 8 and same(blind.get("b"), one)


def test_a_hash_collision_gives_anothers_keys_unless_it_is_looked_at():
    sessions = [cache([i, *range(3)], layers=1) for i in range(300)]
    wrong = {}
    for verify in (True, False):
        store = PrefixStore("blocks", block=4, verify=verify, hash_bytes=1)
        for i, one in enumerate(sessions):
            store.put(str(i), one)
        wrong[verify] = sum(not same(store.get(str(i)), one) for i, one in enumerate(sessions))
    assert wrong[True] == 0 and wrong[False] >= 300 - 256
    store = PrefixStore("blocks", block=4)
    assert [store.put(str(i), one) for i, one in enumerate(sessions)] == [0] * 300


class TestRoom:
    """capacity, drop, match and their references."""

    @pytest.mark.parametrize("name", EXACT)
    def test_sessions_stay_and_what_was_dropped_goes_oldest_first(self, name):
        probe = fresh(EXACT[name])
        for i in range(3):
            probe.put(str(i), cache([i] * 32))
        store = fresh(EXACT[name], capacity=probe.nbytes)
        for i in range(3):
            store.put(str(i), cache([i] * 32))
        with pytest.raises(ValueError, match="capacity: expected room for"):
            store.put("3", cache([3] * 32))
        assert sorted(store._held.ends) == ["0", "1", "2"] and store.nbytes == probe.nbytes
        store.drop("0")
        store.drop("1")
        assert store.match([0] * 32).length == 32 - 32 % store.block if store.policy == "blocks" else 32
        store.match([0] * 32).release()
        store.put("3", cache([3] * 32))
        assert store.nbytes <= store.capacity and same(store.get("2"), cache([2] * 32))
        # 1 was used longer ago than 0, whose match was a use
        assert [len(store._tree.find(np.array([i] * 32), b"").segment.tokens) > 0 for i in (0, 2, 3)] == [True] * 3
        assert store.match([1] * 32).length < store.match([0] * 32).length
        assert store.stats().evicted_tokens > 0

    def test_a_lease_keeps_what_it_found(self):
        store = PrefixStore("radix")
        one = cache(range(12))
        store.put("a", one)
        store.drop("a")
        with store.match([*range(9), 77]) as lease:
            assert lease.length == 9 and all(
                np.array_equal(a.keys, b.keys[:, :9]) for a, b in zip(lease.decoded(), one)
            )
            assert store.evict(100) == 0
            store.put("b", cache([*range(4), 99]))  # splits what is held
            assert all(np.array_equal(a.values, b.values[:, :9]) for a, b in zip(lease.decoded(), one))
            assert store.evict(100) == 0
        assert store.evict(1) == 8 and store.evict(1) == 0  # tokens 4 to 11; the rest is b's
        assert same(store.get("b"), cache([*range(4), 99]))
        with pytest.raises(ValueError, match="released before"):
            lease.release()
        with pytest.raises(ValueError, match="released before"):
            lease.decoded()
        assert store.match([5]).decoded() == []

    @settings(max_examples=30)
    @given(
        policy=st.sampled_from(["radix", "blocks"]),
        actions=st.lists(
            st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), min_size=1, max_size=10), st.integers(0, 3)),
            max_size=12,
        ),
        room=st.integers(600, 3000),
    )
    def test_any_sequence_leaves_sessions_whole_and_bytes_below_the_capacity(self, policy, actions, room):
        store, model, leases = PrefixStore(policy, block=2, capacity=room), {}, []
        for name, tokens, action in actions:
            if action <= 1:
                one, before = cache(tokens, layers=1), store.stream()
                try:
                    store.put(str(name), one)
                    model[str(name)] = one
                except ValueError as problem:
                    assert "capacity: expected room" in str(problem) and store.stream() == before
            elif action == 2 and str(name) in model:
                store.drop(str(name))
                del model[str(name)]
            elif action == 3:
                leases.append((store.match(tokens), tokens))
            assert store.nbytes == len(store.stream()) <= room
            assert set(store._held.ends) == set(model)
            assert all(same(store.get(key), one) for key, one in model.items())
            for lease, found in leases:
                if lease.length:
                    assert np.array_equal(lease.decoded()[0].keys, cache(found, layers=1)[0].keys[:, : lease.length])
        for lease, _ in leases:
            lease.release()
        for key in list(model):
            store.drop(key)
        store.evict(10**6)
        assert not list(store._tree.segments()) and not getattr(store._tree, "_by_hash", {})

    def test_a_session_grows_by_being_put_again(self):
        for store in map(fresh, EXACT.values()):
            for n in (5, 17, 40):
                store.put("a", cache(range(n)))
                assert len(store) == 1 and same(store.get("a"), cache(range(n)))
            assert store.stats().tokens == 40 == store.stats().stored_tokens


class TestGroups:
    """The paper's: kept as it is printed, and turned round."""

    RANKED = tuple(Ranked(np.array(t), np.full(len(t), 8.0)) for t in ([1, 2], [1, 2, 3], [9, 9, 9]))

    def test_the_printed_rule_takes_what_shares_least(self):
        assert shared_bits(self.RANKED[0], self.RANKED[1]) == 16
        assert group(self.RANKED, 8) == [(0, [2], [0]), (1, [], [])]
        assert group(self.RANKED, 8, ">=") == [(0, [1], [2]), (2, [], [])]
        assert [one.centroid for one in group(self.RANKED, 1e9)] == [0]

    def test_similarity_is_that_of_the_trie(self):
        tokens = [[1, 2, 3, 1], [1, 2, 1], [2, 1]]
        row = {1: Fraction(1, 2), 2: Fraction(1, 4), 3: Fraction(1, 4)}
        law = kvtheory.entropy.MarkovSource(row, dict.fromkeys(row, row))
        ranked = [Ranked(np.array(t), -np.log2([float(row[x]) for x in t])) for t in tokens]
        for i, s in enumerate(tokens):
            for j, t in enumerate(tokens):
                assert shared_bits(ranked[i], ranked[j]) == kvtheory.trie.similarity_bits(law, tuple(s), tuple(t))

    def test_a_residual_is_exact_where_the_numbers_are_whole(self):
        whole = lambda t, shift: Cache(  # noqa: E731
            [Layer(*(np.array(t, np.float32)[None, :, None] * 8 + np.arange(4, dtype=np.float32) + shift for _ in range(2)))],
            tokens=np.array(t), surprisal_bits=np.full(len(t), 8.0),
        )  # fmt: skip
        store = PrefixStore("plt", delta=8, rule=">=")
        store.put("centre", whole([1, 2, 3], 0))
        store.put("longer", whole([1, 2, 5, 6, 7], 0))
        store.put("equal", whole([1, 2, 3], 0))
        decoded = reference.decode(store.stream())
        assert same(decoded["longer"], whole([1, 2, 5, 6, 7], 0)) and same(decoded["equal"], whole([1, 2, 3], 0))
        assert store.stats().stored_tokens == 3 + 3 and store.stats().lost_tokens == 0
        raw = stream.read(store.stream())[1][0][3].rest()
        assert (np.float32(5 * 8 - 3 * 8)).tobytes() in bytes(raw)

    def test_residuals_of_tails_that_agree_cost_less_error(self):
        tokens = list(range(40))
        other = [*tokens[:10], 99, *tokens[11:], 7]
        errors = []
        for residual in (True, False):
            store = PrefixStore("plt", delta=8, rule=">=", residual=residual, inner=reference.TurboQuant(2))
            base = _by_token(tokens)
            store.put("centre", base)
            store.put("edit", _by_token(other))
            errors.append(float(np.mean((store.get("edit")[0].keys - _by_token(other)[0].keys) ** 2)))
        assert errors[0] < 0.8 * errors[1]

    def test_no_room_to_make_and_nothing_to_match(self):
        with pytest.raises(ValueError, match="capacity: expected None for policy 'plt'"):
            PrefixStore("plt", capacity=1000)
        with pytest.raises(ValueError, match="match: policy 'plt'"):
            PrefixStore("plt").match([1])
        with pytest.raises(ValueError, match=r"needs cache\.surprisal_bits"):
            PrefixStore("plt").put("a", Cache(list(cache([1])), tokens=np.array([1])))
        store = PrefixStore("plt")
        store.put("a", cache([1, 2]))
        store.drop("a")
        assert len(store) == 0 and len(reference.decode(store.stream())) == 0


def _by_token(tokens):
    """Keys and values of a token alone."""
    keys = np.stack([np.random.default_rng(t).normal(size=8) for t in tokens])[None].astype(np.float32)
    return Cache([Layer(keys, keys)], tokens=np.array(tokens), surprisal_bits=np.full(len(tokens), 8.0))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="policy: expected one of blocks, radix, plt"):
        PrefixStore("lru")
    with pytest.raises(ValueError, match="block: expected 1"):
        PrefixStore("blocks", block=0)
    with pytest.raises(ValueError, match="delta: expected a finite number"):
        PrefixStore("plt", delta=float("nan"))
    for inner in (
        reference.StreamingLLM(),
        reference.SnapKV(),
        reference.Pipeline([reference.StreamingLLM(), reference.Full()]),
        PrefixStore(),
    ):
        with pytest.raises(ValueError, match="inner: expected a data-oblivious codec"):
            PrefixStore(inner=inner)
    store = PrefixStore()
    with pytest.raises(TypeError, match="session_id: expected a str"):
        store.put(1, cache([1]))
    with pytest.raises(TypeError, match="salt: expected bytes"):
        store.put("a", cache([1]), salt="a")
    with pytest.raises(TypeError, match=r"cache: expected a kvtheory\.Cache"):
        store.put("a", list(cache([1])))
    with pytest.raises(ValueError, match="at least one layer, and the ids of at least one token"):
        store.put("a", Cache(list(cache([1]))))
    with pytest.raises(ValueError, match="tokens: expected ids >= 0"):
        store.put("a", cache([-1]))
    with pytest.raises(ValueError, match=r"layers\[0\]: expected 2 tokens at positions"):
        store.put("a", Cache(list(cache([1, 2, 3])), tokens=np.array([1, 2])))
    bad = cache([1, 2])[0].replace(positions=np.array([3, 4]))
    with pytest.raises(ValueError, match="at positions 0, 1, 2"):
        store.put("a", Cache([bad], tokens=np.array([1, 2])))
    store.put("a", cache([1]))
    with pytest.raises(ValueError, match="cache: expected 2 layers"):
        store.put("b", cache([1], layers=1))
    with pytest.raises(ValueError, match=r"layers\[0\]: expected 2 heads x \(8 float32 \+ 8 float32\) of layer 0"):
        store.put("b", cache([1], dtype=np.float16))
    with pytest.raises(KeyError):
        store.get("b")
    with pytest.raises(TypeError, match="sessions: expected a mapping"):
        store.encode(cache([1]))
    with pytest.raises(TypeError, match="scope 'sessions'"):
        reference.encode_cache(store, cache([1]))
    assert reference.codecs("sessions") == {"PrefixStore": PrefixStore}


HOSTILE = {
    **EXACT,
    **PLT,
    "plt residual": PrefixStore("plt", delta=8, rule=">="),
    "quantised": PrefixStore(inner=reference.TurboQuant(3)),
}


class TestHostile:
    """Bytes that no store wrote."""

    @staticmethod
    def honest(store):
        store = fresh(store)
        for i, tokens in enumerate(([1, 2, 3, 4, 5], [1, 2, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8], [9])):
            store.put(str(i), cache(tokens, layers=1, heads=1, dim=4), bytes(i // 3))
        return store.stream()

    @pytest.mark.parametrize("name", HOSTILE)
    def test_mutants_are_refused_or_read(self, name):
        body, rng = stream.unseal(self.honest(HOSTILE[name])), random.Random(name)
        refused = 0
        for _ in range(400):
            data = bytearray(body)
            for _ in range(rng.randrange(1, 4)):
                at = rng.randrange(len(data))
                kind = rng.randrange(3)
                if kind == 0:
                    data[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
                elif kind == 1:
                    del data[at : at + rng.randrange(1, 9)]
                else:
                    data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 5)))
                if not data:
                    data = bytearray(b"\1")
            sealed = stream.seal(data)
            try:
                decoded = reference.decode(sealed)
                for key in list(decoded)[:8] if not isinstance(decoded, (list, kvtheory.Decoded)) else ():
                    assert all(np.isfinite(one.keys.astype(float)).all() for one in decoded[key])
            except CorruptStream as problem:
                refused += 1
                assert 0 <= problem.offset <= len(sealed)
            except reference.StateMismatch:
                refused += 1
        assert refused > 100

    def parts(self, name="radix"):
        header, groups = stream.read(self.honest(HOSTILE[name]))
        return header, [bytes(part.rest()) for part in groups[0]]

    @pytest.mark.parametrize(
        ("part", "change", "message"),
        [
            (0, lambda b: b"\x00" + b[1:], "layers: expected at least 1"),
            (0, lambda b: b[:1] + b"\xff\xff\xff\xff" + b[5:], "parent|expected 4 bytes"),
            (0, lambda b: b[:5] + b"\xff\xff\xff\xff", "session's id|expected"),
            (1, lambda b: b"\x09" + b[1:], "parent: expected a segment before 0"),
            (1, lambda b: b[:4] + b"\x01" + b[5:], "start: expected 0, got 1"),
            (1, lambda b: b[:5] + b"\x00" + b[6:], "tokens: expected at least 1"),
            (1, lambda b: b[:6] + b"\x01" + b[7:], "form: expected 0"),
            (1, lambda b: b + b"\x00", "segments: 1 bytes too many"),
            (2, lambda b: b"\x03" + b[1:], "width of the tokens"),
            (2, lambda b: b + b"\x00", "tokens: 1 bytes too many"),
            (3, lambda b: b[:-1], "expected"),
            (3, lambda b: b + b"\x00", "payload: 1 bytes too many"),
            (4, lambda b: b + b"\x00", "sessions: 1 bytes too many"),
            (4, lambda b: b[7:14] + b[:7] + b[14:], "ids in ascending order"),
            (4, lambda b: b[:1] + b"\xff" + b[2:], "UTF-8|ascending"),
            (4, lambda b: b[:2] + b"\x99" + b[3:], "segment of a session: expected a number below"),
            (4, lambda b: b[:6] + b"\x01" + b[7:], "tokens of a session"),
        ],
    )  # fmt: skip
    def test_each_field_is_checked(self, part, change, message):
        header, parts = self.parts()
        assert len(reference.decode(stream.write(header, [parts]))) == 4
        parts[part] = change(parts[part])
        with pytest.raises(CorruptStream, match=message):
            reference.decode(stream.write(header, [parts]))

    def test_segments_that_are_not_alike(self):
        header, parts = self.parts()
        other = PrefixStore()
        other.put("x", cache([1, 2, 3], layers=1, heads=1, dim=5))
        payload = bytes(stream.read(other.stream())[1][0][3].rest())
        size = 1 + parts[3][0]
        with pytest.raises(CorruptStream, match=r"heads, channels and element types|expected 3 tokens"):
            reference.decode(stream.write(header, [[*parts[:3], payload + parts[3][size:], parts[4]]]))

    def test_many_sessions_of_one_segment_take_no_room_until_they_are_read(self):
        """10^5 names for one segment of 1000 tokens: 100 GB if they were put together."""
        store = PrefixStore(inner=reference.Full())
        store.put("x", cache([0] * 1000, layers=1))
        header, groups = stream.read(store.stream())
        parts = [bytes(part.rest()) for part in groups[0]]
        count = 10**5
        parts[0] = parts[0][:5] + count.to_bytes(4, "little")
        parts[4] = b"".join(session_bytes(f"{i:06d}", End(0, 1000)) for i in range(count))
        decoded = reference.decode(stream.write(header, [parts]))
        assert len(decoded) == count and decoded["000007"][0].keys.shape == (2, 1000, 8)

    def test_a_stream_of_sessions_is_no_stream_of_layers(self):
        header, parts = self.parts()
        for kind in (stream.Kind.LAYER, stream.Kind.CACHE):
            other = stream.Header(kind, header.codec, header.parameters)
            with pytest.raises(CorruptStream, match="kind: expected SESSIONS"):
                reference.decode(stream.write(other, [parts]))
        full = stream.write(stream.Header(stream.Kind.SESSIONS, "Full"), [[b"", b"", b""]])
        with pytest.raises(CorruptStream, match="kind: expected LAYER, got SESSIONS"):
            reference.decode(full)


def test_a_workload_by_a_toy_model():
    sessions = workload.sessions(8, tenants=2)
    player = ToyPlayer(vocabulary=workload.vocabulary(sessions), layers=1)
    caches = {s.name: (workload.play(player, s.tokens), s.tenant.encode()) for s in sessions}
    decoded = reference.decode(PrefixStore("blocks", block=8).encode(caches))
    assert all(same(decoded[name], one) for name, (one, _) in caches.items())
    radix = PrefixStore()
    for name, (one, salt) in caches.items():
        radix.put(name, one, salt)
    stats = radix.stats()
    assert stats.bytes_stored < stats.bytes_unshared and 0 < stats.hit_rate < 1


#: the sessions of `whole` below; frozen
GOLDEN = {
    "radix": (
        "934b565301040b50726566697853746f72650d012000000000000020400001000005091f0d5e150104000000030000000000"
        "00000002000001000000020200010000000201000000000000020001740105060207002c0101090105061803080804010202"
        "0105000000004500468049004a00c580c918030808040102020105000004804cc04cf85cfc5c80ccf8dc1203080402010102"
        "0105000004004d404d00cd18030808040102020105000000004500468049004a00c580c90161020000000301620100000004"
        "01630300000002861146f8"
    ),
    "blocks": (
        "934b565301040b50726566697853746f72650d000400000000000020400001000005091f0d5e150104000000030000000000"
        "00000002000001000000020200010000000201000000000000020001740105060207002c0101090105061803080804010202"
        "0105000000004500468049004a00c580c918030808040102020105000004804cc04cf85cfc5c80ccf8dc1203080402010102"
        "0105000004004d404d00cd18030808040102020105000000004500468049004a00c580c90161020000000301620100000004"
        "01630300000002664144fa"
    ),
    "plt": (
        "934b565301040b50726566697853746f72650d02200000000000003040010100000509180c51150103000000030000000000"
        "00000003000001000000020201000000000002000174010506090207002c010105061e03080c060103020105000000004500"
        "468049004a004d404d00c580c900cd1803080804010202010500000400c000c0f85cfc5c0040f8dc18030808040102020105"
        "000000004500468049004a00c580c9016100000000030162010000000401630200000002608e2833"
    ),
}


def whole(tokens):
    """One layer: key (x, x + 1) and value -x, x the sum of the tokens so far."""
    x = np.cumsum(tokens).astype(np.float16)[None, :, None] + np.arange(2, dtype=np.float16)
    surprisal = np.full(len(tokens), 8.0)
    return Cache([Layer(x, -x[..., :1], index=4)], tokens=np.array(tokens), surprisal_bits=surprisal)


def read_by_the_document(data):
    """A reader of docs/stream-format.md in plain Python, for Full, one layer of one head in float16 with two channels and one."""
    at = 4

    def u(size):
        nonlocal at
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def varint():
        low = u(1)
        return low if low < 128 else low - 128 + (varint() << 7)

    def take(size):
        nonlocal at
        at += size
        return data[at - size : at]

    assert (u(1), u(1), take(u(1))) == (1, 4, b"PrefixStore")
    take(varint())
    assert u(1) == 0 and varint() == 5
    sizes = [varint() for _ in range(5)]
    starts = [at + sum(sizes[:i]) for i in range(5)]
    at = starts[0]
    assert varint() == 1
    count, sessions = u(4), u(4)
    segments, found = [], {}
    for part in range(1, 4):
        at = starts[part]
        for i in range(count):
            if part == 1:
                segments.append({"parent": u(4), "start": varint(), "n": varint(), "form": u(1)})
                segments[i]["salt"] = (
                    segments[segments[i]["parent"] - 1]["salt"] if segments[i]["parent"] else take(varint())
                )
            elif part == 2:
                width = u(1)
                segments[i]["tokens"] = [u(width) for _ in range(segments[i]["n"])]
            else:
                end = varint() + at
                assert varint() == 3
                lengths = [varint() for _ in range(3)]
                shape = take(lengths[0])
                assert shape == bytes([1, segments[i]["n"], 2, 1, 5, 0, 0, 2 * segments[i]["start"]])
                segments[i]["kv"] = [
                    list(struct.iter_unpack(f"<{dim}e", take(size))) for dim, size in zip((2, 1), lengths[1:])
                ]
                assert at == end
        assert at == starts[part] + sizes[part]
    for segment in segments:
        before = segments[segment["parent"] - 1] if segment["parent"] else {"tokens": [], "kv": [[], []]}
        start = segment["start"]
        if segment["form"]:
            for own, base in zip(segment["kv"], before["kv"]):
                both = range(min(len(own), len(base) - start))
                own[: len(both)] = [tuple(a + b for a, b in zip(own[i], base[start + i])) for i in both]
        segment["tokens"] = before["tokens"][:start] + segment["tokens"]
        segment["kv"] = [base[:start] + own for own, base in zip(segment["kv"], before["kv"])]
    for _ in range(sessions):
        name = take(varint()).decode()
        segment, n = segments[u(4)], varint()
        found[name] = (segment["salt"], segment["tokens"][:n], [one[:n] for one in segment["kv"]])
    assert at == len(data) - 4 == starts[4] + sizes[4]
    return found


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name):
    options = {"radix": {}, "blocks": {"block": 2}, "plt": {"delta": 16, "rule": ">="}}[name]
    given_ = {"b": (whole([5, 6, 7, 300]), b""), "a": (whole([5, 6, 9]), b""), "c": (whole([5, 6]), b"t")}
    data = bytes.fromhex(GOLDEN[name])
    assert PrefixStore(name, **options).encode(given_) == data
    decoded, by_document = reference.decode(data), read_by_the_document(data)
    assert list(decoded) == list(by_document) == ["a", "b", "c"]
    for key, (one, salt) in given_.items():
        assert same(decoded[key], one) and decoded[key][0].positions.tolist() == [list(range(len(one.tokens)))]
        found_salt, tokens, (keys, values) = by_document[key]
        assert (found_salt, tokens) == (salt, one.tokens.tolist())
        assert np.array_equal(keys, one[0].keys[0]) and np.array_equal(values, one[0].values[0])


def test_inspect_says_where_the_bytes_went(tmp_path):
    from typer.testing import CliRunner

    from kvtheory.cli import app

    data = bytes.fromhex(GOLDEN["radix"])
    (tmp_path / "x.kvs").write_bytes(data)
    found = reference.inspect(data)
    assert found.kind == "sessions" and sum(part.bytes for part in found.parts) == len(data) and found.held_bits is None
    said = CliRunner().invoke(app, ["inspect", str(tmp_path / "x.kvs")])
    assert said.exit_code == 0 and "sessions stored together" in said.output and "payload" in said.output


def test_colliding_hashes_share_within_a_salt_alone():
    """Hashes of one byte, nothing verified: sessions collide all the time, and never with those of another tenant."""
    rng = np.random.default_rng(0)
    store = reference.PrefixStore(policy="blocks", block=2, hash_bytes=1, verify=False)
    keys, salts = {}, {}
    for i in range(200):
        name = f"s{i}"
        keys[name], salts[name] = rng.normal(size=(1, 2, 4)).astype(np.float32), bytes([i % 7])
        own = Layer(keys[name], keys[name])
        store.put(name, Cache([own], tokens=rng.integers(0, 9, 2)), salt=salts[name])
    wrong = [
        (name, other)
        for name in keys
        for other in keys
        if other != name and np.array_equal(store.get(name)[0].keys, keys[other])
    ]
    assert wrong  # it does collide
    assert all(salts[name] == salts[other] for name, other in wrong)


def test_a_blocks_hash_is_that_of_all_before_it():
    """H(H(block before), tokens), from H(salt) on, written out; the same block behind another prefix or salt has another one."""
    from hashlib import sha256

    from reference.prefix_store.blocks import Blocks

    blocks, tokens = Blocks(2), np.array([5, 6, 5, 6, 7])
    chain, expected = sha256(b"tenant").digest(), []
    for pair in ((5, 6), (5, 6)):
        chain = sha256(chain + struct.pack("<2q", *pair)).digest()
        expected.append(chain)
    assert blocks.hashes(tokens, b"tenant") == expected and expected[0] != expected[1]
    assert blocks.hashes(tokens, b"another")[0] != expected[0]
