"""Means over a whole vocabulary are taken some tokens at a time: the same mean, whatever the block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtheory.prediction import FullVocabulary, Known, SmallerModel, ToyPlayer, by_model, fitted, law_weights, smaller

PLAYER = ToyPlayer(vocabulary=11, layers=2, kv_heads=2, head_dim=4, seed=2)


def predicted(block):
    play = PLAYER.start()
    for token in (3, 1, 4):
        play.feed(token)
    running = FullVocabulary(PLAYER.vocabulary).start(PLAYER)
    sizes = (PLAYER.layers, PLAYER.kv_heads, PLAYER.head_dim, PLAYER.head_dim)
    found = running.predict(Known(3, sizes, play=play, law=law_weights(play.logits)))
    return np.concatenate(
        [np.concatenate([found.keys(i, []), found.values(i, [], None)]) for i in range(PLAYER.layers)]
    )


@pytest.mark.parametrize("block", [1, 2, 10, 11, 12])
def test_of_candidates(monkeypatch, block):
    play = PLAYER.start()
    for token in (3, 1, 4):
        play.feed(token)
    p = np.exp(play.logits - np.logaddexp.reduce(play.logits))
    by_hand = np.concatenate(
        [
            np.concatenate([np.tensordot(p, keys, 1), np.tensordot(p, values, 1)])
            for keys, values in play.candidates(np.arange(PLAYER.vocabulary))
        ]
    )
    monkeypatch.setattr(by_model, "AT_ONCE", block)
    # weights of 40 bits
    np.testing.assert_allclose(predicted(block), by_hand, rtol=0, atol=1e-9 * float(np.abs(by_hand).max()))


@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 1 << 30))
def test_of_embeddings(rows, block, seed):
    rng = np.random.default_rng(seed)
    p, table = rng.random(rows), rng.normal(size=(rows, 3)).astype(np.float32)
    found = fitted._mean(p, table, block)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, p @ table.astype(np.float64), rtol=0, atol=1e-12 * rows)


def test_a_ridge_is_chosen_where_rows_are_few():
    """With fewer rows than columns the least ridge fits noise; what predicts held-out rows shrinks."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 60))
    y = x[:, :1] + 3 * rng.normal(size=(40, 1))
    assert smaller._best(x, y, (1e-6, 10.0)) == 10.0
    many = rng.normal(size=(4000, 4))
    assert smaller._best(many, many @ rng.normal(size=(4, 2)), (1e-6, 10.0)) == 1e-6
    assert smaller._best(x, y, (0.5,)) == 0.5
    with pytest.raises(ValueError, match="ridges"):
        SmallerModel.fit([], PLAYER, ridges=())
