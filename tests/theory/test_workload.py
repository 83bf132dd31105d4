"""The workload of sessions: what it promises of prefixes, and that it repeats itself."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest

from kvtheory import workload
from kvtheory.prediction import ToyPlayer
from kvtheory.trie import common_prefix

SESSIONS = workload.sessions(200)
BY_NAME = {s.name: s for s in SESSIONS}


def shared(s, t):
    return common_prefix(tuple(s.tokens.tolist()), tuple(t.tokens.tolist()))


def test_two_hundred_sessions_of_all_kinds():
    assert len(SESSIONS) == len(BY_NAME) == 200
    assert [s.kind for s in SESSIONS[:4]] == list(workload.KINDS)
    assert {kind: sum(s.kind == kind for s in SESSIONS) for kind in workload.KINDS} == dict.fromkeys(workload.KINDS, 50)
    for s in SESSIONS:
        assert (s.source is None) == (s.kind == "prompt") and s.tokens.dtype == np.int64
        assert len(s.tokens) == len(workload.words(s.text)) > 20
    # as numbered, so read: one number a word
    number = {}
    for s in SESSIONS:
        for word, token in zip(workload.words(s.text), s.tokens.tolist()):
            assert number.setdefault(word, token) == token
    assert sorted(number.values()) == list(range(workload.vocabulary(SESSIONS)))


def test_what_is_made_from_a_prompt():
    pairs = dict(workload.PARAPHRASES)
    for s in SESSIONS:
        if s.source is None:
            continue
        source = BY_NAME[s.source]
        if s.kind == "fork":
            system = next(first for first in pairs if source.text.startswith(first))
            assert shared(s, source) > len(workload.words(system))
        elif s.kind == "edit":
            assert len(s.tokens) == len(source.tokens)
            at = np.flatnonzero(s.tokens != source.tokens)
            assert len(at) == 1 and len(s.tokens) // 3 <= at[0] < 2 * len(s.tokens) / 3
        else:
            first, second = next(pair for pair in workload.PARAPHRASES if source.text.startswith(pair[0]))
            assert s.text == source.text.replace(first, second, 1)
            assert shared(s, source) < min(len(workload.words(first)), len(workload.words(second)))


def test_same_seed_same_sessions():
    again = workload.sessions(200)
    assert all(a.text == b.text and (a.tokens == b.tokens).all() for a, b in zip(SESSIONS, again))
    assert [s.text for s in workload.sessions(40)] == [s.text for s in SESSIONS[:40]]
    assert [s.text for s in workload.sessions(40, seed=1)] != [s.text for s in SESSIONS[:40]]
    # raw words only: the same on every machine and in every NumPy
    digest = hashlib.sha256("\n".join(s.text for s in SESSIONS).encode()).hexdigest()
    assert digest.startswith("f9eab0cec6cbc5f0")


def test_tenants_sentences_and_a_tokeniser_of_ones_own():
    made = workload.sessions(24, tenants=3, sentences=1, tokenise=lambda text: [len(word) for word in text.split()])
    assert [s.tenant for s in made[::4]] == [f"tenant-{i % 3}" for i in range(6)]
    for s in made:
        assert s.tokens.tolist() == [len(word) for word in s.text.split()]
        assert s.source is None or BY_NAME[s.source].kind == "prompt"
    for name in ("count", "tenants", "sentences"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            workload.sessions(**{name: 0})
    with pytest.raises(ValueError, match="sentences: expected at most"):
        workload.sessions(4, sentences=1000)


def test_play_is_the_players_own_run():
    tokens = SESSIONS[0].tokens[:9] % 16
    player = ToyPlayer(vocabulary=16)
    cache = workload.play(player, tokens, np.float64)
    run, bits = player.start(), [4.0]
    for t, token in enumerate(tokens.tolist()):
        for layer, kv in zip(cache, run.feed(token), strict=True):
            assert (layer.keys[:, t] == kv.keys).all() and (layer.values[:, t] == kv.values).all()
        p = np.exp(run.logits - run.logits.max())
        if t + 1 < len(tokens):
            bits.append(-np.log2((p / p.sum())[tokens[t + 1]]))
    assert (cache.tokens == tokens).all() and [layer.index for layer in cache] == [0, 1]
    assert np.allclose(cache.surprisal_bits, bits, rtol=1e-12)
    assert workload.play(player, tokens)[0].keys.dtype == np.float16


def test_remaining_cost():
    assert workload.remaining_cost(Fraction(1, 2), 1, 4) == Fraction(5, 8)
    assert workload.remaining_cost(0, 3, 4) == 1 and workload.remaining_cost(1, 0, 4) == 0
    for arguments in ((2, 1, 2), (-0.1, 1, 2), (0.5, 3, 2), (0.5, 0, 0), (float("nan"), 1, 2)):
        with pytest.raises(ValueError, match="expected 0 <= f <= 1"):
            workload.remaining_cost(*arguments)
