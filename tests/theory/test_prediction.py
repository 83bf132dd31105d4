"""kvtheory.prediction: what each predictor expects, against sums written out, and what it says that it costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import kvtheory
from kvtheory.layer import Cache, Layer, Rope
from kvtheory.prediction import (
    EmbeddingLinear,
    FullVocabulary,
    Known,
    KnownToken,
    LayerLinear,
    Nothing,
    PreviousToken,
    SmallerModel,
    TokenKV,
    TokenTable,
    TopK,
    ToyPlayer,
    law_weights,
)
from kvtheory.prediction.by_model import likeliest
from kvtheory.prediction.fitted import embedding_of, fit_linear, text_rows
from kvtheory.randomness import generator

PLAYER = ToyPlayer(vocabulary=12, layers=3, kv_heads=2, head_dim=4, sharpness=0.6)
SIZES = (3, 2, 4, 4)


def cache_of(player, tokens):
    play = player.start()
    kv = [play.feed(int(t)) for t in tokens]
    layers = [
        Layer(
            *(np.stack([getattr(one[i], name) for one in kv], axis=1) for name in ("keys", "values")),
            rope=player.rope,
            index=i,
        )
        for i in range(player.layers)
    ]
    return Cache(layers, np.asarray(tokens))


TOKENS = generator(0, "tokens").integers(0, 12, 200)
TEXT = cache_of(PLAYER, TOKENS)


def bare(layer, t):
    return PLAYER.rope.undo(layer.keys[:, t : t + 1], np.array([t]))[:, 0]


def under_way(count):
    play = PLAYER.start()
    for token in TOKENS[:count]:
        play.feed(int(token))
    return play


def test_law_weights_are_a_law():
    w = law_weights([0.0, np.log(3.0), -np.inf])
    assert w.tolist() == [2**38, 3 * 2**38, 0] or np.abs(w - [2**38, 3 * 2**38, 0]).max() <= 1
    for wrong in ([np.nan, 0.0], [np.inf, 0.0], [-np.inf]):
        with pytest.raises(ValueError, match="logits"):
            law_weights(wrong)


def test_likeliest_breaks_ties_by_id_and_leaves_the_impossible_out():
    assert likeliest(np.array([3, 5, 5, 0, 1]), 3).tolist() == [1, 2, 0]
    assert likeliest(np.array([3, 5, 5, 0, 1]), 9).tolist() == [1, 2, 0, 4]


@pytest.mark.parametrize(("predictor", "k"), [(TopK(1), 1), (TopK(5), 5), (TopK(99), 12), (FullVocabulary(12), 12)])
def test_mean_over_the_law(predictor, k):
    play = under_way(7)
    law = law_weights(play.logits)
    found = predictor.start(PLAYER).predict(Known(7, SIZES, play=play, law=law))
    order = sorted(range(12), key=lambda v: (-law[v], v))[:k]
    total = sum(int(law[v]) for v in order)
    for i in range(3):
        for part, got in (("keys", found.keys(i, [])), ("values", found.values(i, [], None))):
            want = sum(int(law[v]) / total * getattr(play.candidates([v])[i], part)[0] for v in order)
            np.testing.assert_allclose(got, want, rtol=1e-12)
    at_start = predictor.start(PLAYER).predict(Known(0, SIZES))
    assert not at_start.keys(0, []).any() and not at_start.values(2, [], None).any()
    assert len(under_way(7).past) == len(play.past)


def test_known_token_is_exact_in_an_exact_past():
    play = under_way(7)
    found = KnownToken().start(PLAYER).predict(Known(7, SIZES, passed=play.feed(int(TOKENS[7])), token=int(TOKENS[7])))
    for i in range(3):
        np.testing.assert_array_equal(found.keys(i, []), TEXT[i].keys[:, 7])
        np.testing.assert_array_equal(found.values(i, [], None), TEXT[i].values[:, 7])


def test_nothing_is_the_mean_without_the_first_position():
    found = Nothing.fit(TEXT).predict(Known(150, SIZES))
    mean = np.mean([bare(TEXT[1], t) for t in range(1, 200)], axis=0)
    np.testing.assert_allclose(found.keys(1, []), PLAYER.rope.apply(mean[:, None], np.array([150]))[:, 0], atol=1e-6)
    np.testing.assert_allclose(found.values(2, [], None), TEXT[2].values[:, 1:].mean(axis=1), atol=1e-6)


def test_previous_token_turns_keys_on_by_one():
    predictor = PreviousToken.of(TEXT)
    previous = [TokenKV(layer.keys[:, 41], layer.values[:, 41]) for layer in TEXT]
    found = predictor.predict(Known(42, SIZES, previous))
    want = PLAYER.rope.apply(bare(TEXT[2], 41)[:, None], np.array([42]))[:, 0]
    np.testing.assert_allclose(found.keys(2, []), want, atol=1e-12)
    np.testing.assert_array_equal(found.values(0, [], None), TEXT[0].values[:, 41])


def test_previous_token_does_not_scale_twice():
    """YaRN's factor is in the key already."""
    rope = Rope(PLAYER.rope.inv_freq, attention_scaling=1.3)
    layer = Layer(np.ones((1, 3, 4)), np.ones((1, 3, 4)), rope=rope)
    found = PreviousToken.of([layer]).predict(Known(2, (1, 1, 4, 4), [TokenKV(np.ones((1, 4)), np.ones((1, 4)))]))
    assert np.linalg.norm(found.keys(0, [])) == pytest.approx(2.0)


def test_token_table():
    table = TokenTable.fit(TEXT, 13)
    at = [t for t in range(1, 200) if TOKENS[t] == TOKENS[20]]
    found = table.start(None).predict(Known(9, SIZES, token=int(TOKENS[20])))
    np.testing.assert_allclose(found.values(1, [], None), TEXT[1].values[:, at].mean(axis=1), atol=1e-6)
    unseen = table.predict(Known(9, SIZES, token=12))
    np.testing.assert_allclose(unseen.values(1, [], None), TEXT[1].values[:, 1:].mean(axis=1), atol=1e-6)
    # over the law: the sum of means, what is unseen by the mean of all
    law = np.arange(1, 14)
    by_law = TokenTable.fit(TEXT, 13, "law")
    got = by_law.predict(Known(9, SIZES, law=law)).values(1, [], None)
    want = sum(law[v] / 91 * table.predict(Known(9, SIZES, token=v)).values(1, [], None) for v in range(13))
    np.testing.assert_allclose(got, want, atol=1e-6)
    with pytest.raises(ValueError, match="vocabulary of 13"):
        by_law.start(PLAYER)
    with pytest.raises(ValueError, match="tokens: expected 0 to 3"):
        TokenTable.fit(TEXT, 4)


def test_embedding_linear_finds_a_linear_map():
    """In the lowest layer values are W_V of the normalised embedding: linear where all norms are alike."""
    player = ToyPlayer(vocabulary=12, layers=1, kv_heads=2, head_dim=4)
    player.embedding = player.embedding / np.sqrt((player.embedding**2).mean(axis=1, keepdims=True))
    text = cache_of(player, TOKENS)
    assert embedding_of(player) is player.embedding
    known = (
        EmbeddingLinear.fit(text, player, "token").start(player).predict(Known(5, (1, 2, 4, 4), token=int(TOKENS[5])))
    )
    # a ridge of 1e-3, and 12 tokens for 16 columns
    np.testing.assert_allclose(known.values(0, [], None), text[0].values[:, 5], atol=0.02)
    np.testing.assert_allclose(known.keys(0, []), text[0].keys[:, 5], atol=0.02)
    law = np.zeros(12, np.int64)
    law[[2, 3]] = 1, 3
    expected = EmbeddingLinear.fit(text, player).start(player)
    got = expected.predict(Known(5, (1, 2, 4, 4), law=law)).values(0, [], None)
    each = [
        EmbeddingLinear.fit(text, player, "token")
        .start(player)
        .predict(Known(5, (1, 2, 4, 4), token=v))
        .values(0, [], None)
        for v in (2, 3)
    ]
    np.testing.assert_allclose(got, 0.25 * each[0] + 0.75 * each[1], atol=1e-6)
    with pytest.raises(ValueError, match="none"):
        EmbeddingLinear.fit(text, player).start(None)
    with pytest.raises(TypeError, match="embedding table"):
        embedding_of(object())


def test_layer_linear_reads_what_is_below():
    """Layers made linear of the ones below: found again."""
    rng = generator(1, "maps")
    k0, v0 = rng.normal(size=(2, 80, 4)), rng.normal(size=(2, 80, 3))
    a, b, c = rng.normal(size=(8, 8)), rng.normal(size=(6, 6)), rng.normal(size=(8, 6))

    def rows(x):
        return x.transpose(1, 0, 2).reshape(80, -1)

    def heads(x, d):
        return x.reshape(80, 2, d).transpose(1, 0, 2)

    k1 = heads(rows(k0) @ a + 1, 4)
    v1 = heads(rows(v0) @ b + rows(k1) @ c - 2, 3)
    rope = PLAYER.rope
    turned = [rope.apply(k, np.arange(80)) for k in (k0, k1)]
    text = [Layer(turned[0], v0, rope=rope, index=4), Layer(turned[1], v1, rope=rope, index=9)]
    predictor = LayerLinear.fit(text)
    assert predictor == LayerLinear.fit(text[::-1]) and predictor.indices == (4, 9)
    assert predictor != LayerLinear.fit(text_of_one_more := [one.replace(index=one.index + 1) for one in text])
    assert hash(LayerLinear.fit(text_of_one_more)) != hash(predictor)
    found = predictor.start(None).predict(Known(30, (2, 2, 4, 3)))
    below = [TokenKV(turned[0][:, 30], v0[:, 30])]
    np.testing.assert_allclose(found.keys(1, below), turned[1][:, 30], atol=0.05)
    np.testing.assert_allclose(found.values(1, below, turned[1][:, 30]), v1[:, 30], atol=0.05)
    # other keys below, other keys above
    assert np.abs(found.keys(1, [TokenKV(2 * turned[0][:, 30], v0[:, 30])]) - turned[1][:, 30]).max() > 0.5
    assert predictor.maps.size == sum((p + 1) * q for p, q in predictor.shapes(predictor.sizes))
    assert predictor.flops == 2 * predictor.maps.size and predictor.state_bytes == 4 * predictor.maps.size


def test_maps_of_noisy_layers_shrink():
    """What is read with errors of its own variance is worth half: least squares says so, maps fitted to the exact layers do not."""
    rng = generator(3, "noise")
    keys, values = rng.normal(size=(1, 3000, 2)), rng.normal(size=(1, 3000, 2))
    text = [Layer(keys, values, index=0), Layer(keys, keys, index=1)]
    noisy = [
        one.replace(keys=one.keys + rng.normal(size=keys.shape), values=one.values + rng.normal(size=keys.shape))
        for one in text
    ]
    shapes = LayerLinear.shapes((2, 1, 2, 2))
    start = sum((p + 1) * q for p, q in shapes[:2])
    exact, shrunk = (LayerLinear.fit(text, held).maps[start : start + 4].reshape(2, 2) for held in (None, noisy))
    np.testing.assert_allclose(exact, np.eye(2), atol=0.01)
    np.testing.assert_allclose(shrunk, np.eye(2) / 2, atol=0.05)
    with pytest.raises(ValueError, match="held: expected the same"):
        LayerLinear.fit(text, text[:1])


def test_smaller_model_maps_its_own_layers():
    """The target itself as its smaller model predicts itself, up to the ridge."""
    predictor = SmallerModel.fit([TEXT, TEXT], PLAYER)
    running = predictor.start(None)
    assert running.law is None
    for t in range(4):
        found = running.predict(Known(t, SIZES, token=int(TOKENS[t])))
        assert np.array_equal(running.law, law_weights(under_way(t + 1).logits))
    np.testing.assert_allclose(found.values(2, [], None), TEXT[2].values[:, 3], atol=0.05)
    np.testing.assert_allclose(found.keys(2, []), TEXT[2].keys[:, 3], atol=0.05)
    with pytest.raises(ValueError, match="expected the model"):
        predictor.with_player(ToyPlayer(seed=5))
    with pytest.raises(ValueError, match="needs the smaller model"):
        dataclasses.replace(predictor, player=None).start(None)


@pytest.mark.parametrize(
    ("predictor", "needs", "forwards", "candidates"),
    [
        (TopK(7), {"player", "law"}, 8, 7),
        (FullVocabulary(12), {"player", "law"}, 13, 12),
        (KnownToken(), {"player", "law", "token", "pass"}, 1, 0),
        (Nothing.fit(TEXT), set(), 0, 0),
        (PreviousToken.of(TEXT), set(), 0, 0),
        (LayerLinear.fit(TEXT), set(), 0, 0),
        (TokenTable.fit(TEXT, 12), {"token"}, 0, 0),
        (TokenTable.fit(TEXT, 12, "law"), {"player", "law"}, 1, 0),
        (EmbeddingLinear.fit(TEXT, PLAYER), {"player", "law"}, 1, 0),
        (EmbeddingLinear.fit(TEXT, PLAYER, "token"), {"player", "token"}, 0, 0),
        (SmallerModel.fit(TEXT, PLAYER), {"token"}, 0, 0),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_what_they_say_that_they_cost(predictor, needs, forwards, candidates):
    assert (predictor.needs, predictor.forwards, predictor.candidates) == (needs, forwards, candidates)
    assert predictor.state_bytes == sum(a.nbytes for a in predictor.arrays().values())
    assert all(a.dtype in (np.float32, np.int32) for a in predictor.arrays().values())


class TestFit:
    def test_least_squares(self):
        rng = generator(2, "fit")
        x, a, b = rng.normal(size=(50, 4)), rng.normal(size=(4, 3)), rng.normal(size=3)
        found, offset = fit_linear(x, x @ a + b, ridge=1e-9)
        np.testing.assert_allclose(found, a, atol=1e-5)
        np.testing.assert_allclose(offset, b, atol=1e-5)

    def test_a_column_that_never_moves_is_no_trouble(self):
        a, b = fit_linear(np.ones((5, 1)), np.full((5, 2), 3.0))
        assert not a.any() and b.tolist() == [3, 3]

    def test_refusals(self):
        with pytest.raises(ValueError, match="x, y"):
            fit_linear(np.ones((3, 2)), np.ones((4, 2)))
        with pytest.raises(ValueError, match="at least 2 tokens"):
            text_rows(cache_of(PLAYER, TOKENS[:1]))
        with pytest.raises(ValueError, match="one model"):
            text_rows([TEXT, cache_of(ToyPlayer(12, 2, 2, 4), TOKENS[:9])])
        with pytest.raises(ValueError, match="each index once"):
            text_rows([TEXT[0], TEXT[0]])
        bare_layers = [layer.replace(rope=None) for layer in TEXT]
        assert text_rows(bare_layers).tokens is None
        for kind in (lambda t: TokenTable.fit(t, 12), lambda t: EmbeddingLinear.fit(t, PLAYER)):
            with pytest.raises(ValueError, match="needs cache"):
                kind(bare_layers)
        for wrong in (0, True, 2.0):
            with pytest.raises(ValueError, match="k: expected"):
                TopK(wrong)
        with pytest.raises(ValueError, match="given"):
            TokenTable.fit(TEXT, 12, "both")
        with pytest.raises(ValueError, match="got none"):
            TopK(2).start(None)
        with pytest.raises(ValueError, match="vocabulary of 13"):
            FullVocabulary(13).start(PLAYER)


def test_the_package_is_reached_lazily():
    assert kvtheory.prediction.TopK is TopK
