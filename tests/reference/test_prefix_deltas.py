"""PrefixDeltas: the three layers as one stream; what it holds is what each layer alone promises, and hostile bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from kvtheory import workload
from kvtheory.layer import Cache
from kvtheory.prediction import KnownToken, LayerLinear, PreviousToken, TopK, ToyPlayer
from reference import CorruptStream, StateMismatch, stream
from reference.prefix_deltas import PrefixDeltas

PLAYER = ToyPlayer(vocabulary=12, layers=2, kv_heads=1, head_dim=4, seed=5)


def sessions(texts, dtype=np.float32):
    return {name: workload.play(PLAYER, np.array(tokens), dtype) for name, tokens in texts.items()}


TEXTS = {"a": [1, 2, 3, 4, 5], "b": [1, 2, 3, 6], "c": [7, 2], "d": [1, 2, 3], "e": [1, 2, 3, 6, 6, 8, 0]}


def predictors():
    made = sessions(TEXTS)
    return {
        "previous": lambda: (PreviousToken.of(made["a"]), None),
        "layer": lambda: (LayerLinear.fit(list(made.values())), None),
        "top": lambda: (TopK(3), PLAYER),
        "known": lambda: (KnownToken(), PLAYER),
    }


def codec(kind, inner=None):
    predictor, player = predictors()[kind]()
    return PrefixDeltas(reference.PredictiveDelta(predictor, inner or reference.TurboQuant(3), player=player))


@pytest.mark.parametrize("kind", ["previous", "layer", "top", "known"])
def test_a_session_alone_is_what_predictive_delta_holds(kind):
    """One session has no prefix to share: keys and values are those of layers 2 and 3."""
    its, made = codec(kind), sessions({"a": TEXTS["a"]})
    (found,) = its.decode(its.encode(made)).values()
    for one, other in zip(found, its.delta.decode(its.delta.encode(made["a"])), strict=True):
        np.testing.assert_array_equal(one.keys, other.keys)
        np.testing.assert_array_equal(one.values, other.values)


@pytest.mark.parametrize("kind", ["previous", "layer", "top", "known"])
def test_a_shared_prefix_is_held_once_and_alike(kind):
    its, made = codec(kind), sessions(TEXTS)
    data = its.encode(made)
    found = its.decode(data)
    assert list(found) == sorted(TEXTS)
    for name, tokens in TEXTS.items():
        # each session is what it would be had it been stored alone: what is reconstructed is a function of the tokens and the past
        alone = its.delta.decode(its.delta.encode(made[name]))
        for one, other in zip(found[name], alone, strict=True):
            assert one.keys.shape[1] == len(tokens)
            np.testing.assert_array_equal(one.keys, other.keys)
            np.testing.assert_array_equal(one.values, other.values)
    assert its.encode(made) == data
    # of "d" nothing is held that "a" does not hold
    assert len(its.encode(sessions({"a": TEXTS["a"], "d": TEXTS["d"]}))) < len(
        its.encode(sessions({"a": TEXTS["a"]}))
    ) + len(its.delta.encode(made["d"]))


def test_lossless_inside_is_lossless():
    its, made = codec("top", reference.Full()), sessions(TEXTS)
    for name, layers in its.decode(its.encode(made)).items():
        for one, layer in zip(layers, made[name], strict=True):
            # the residual is coded in float32: one rounding of it is left
            np.testing.assert_allclose(one.keys, layer.keys, rtol=0, atol=4e-7 * float(np.abs(layer.keys).max()))


def test_salts_share_nothing():
    its, made = codec("previous"), sessions({"a": TEXTS["a"], "d": TEXTS["d"]})
    together = its.encode(made)
    apart = its.encode({"a": (made["a"], b"x"), "d": (made["d"], b"y")})
    assert len(apart) > len(together)
    for name in made:
        for one, other in zip(its.decode(apart)[name], its.decode(together)[name], strict=True):
            np.testing.assert_array_equal(one.keys, other.keys)


@settings(max_examples=15, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("pqrst"), st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=4
    )
)
def test_any_sessions_come_back(texts):
    its, made = codec("known"), sessions(texts)
    found = its.decode(its.encode(made))
    assert {name: layers[0].keys.shape[1] for name, layers in found.items()} == {n: len(t) for n, t in texts.items()}
    for name, layers in found.items():
        for one, layer in zip(layers, made[name], strict=True):
            assert np.isfinite(one.keys).all()
            # keys of a known token come back up to what the quantised past changed
            assert float(np.abs(np.asarray(one.keys) - layer.keys).max()) < 1.0


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_hostile_bytes_are_corrupt_streams(data):
    its = codec("previous")
    _, groups = stream.read(its.encode(sessions(TEXTS)))
    parts = [bytearray(part.rest()) for part in its._named(groups[0])]
    where = data.draw(st.integers(0, len(parts) - 1))
    if parts[where]:
        at = data.draw(st.integers(0, len(parts[where]) - 1))
        cut = data.draw(st.booleans())
        if cut:
            del parts[where][at:]
        else:
            parts[where][at] ^= data.draw(st.integers(1, 255))
    forged = stream.write(its._header(stream.Kind.SESSIONS), [[bytes(part) for part in parts]])
    try:
        found = its.decode(forged)
    except CorruptStream:
        return
    assert all(np.isfinite(one.keys).all() for layers in found.values() for one in layers)


def test_another_model_is_refused():
    its = codec("top")
    data = its.encode(sessions({"a": TEXTS["a"]}))
    other = ToyPlayer(vocabulary=12, layers=2, kv_heads=1, head_dim=4, seed=6)
    with pytest.raises(StateMismatch):
        PrefixDeltas(reference.PredictiveDelta(TopK(3), reference.TurboQuant(3), player=other)).decode(data)


def test_what_it_does_not_take():
    with pytest.raises(TypeError, match="PredictiveDelta"):
        PrefixDeltas(reference.TurboQuant(3))
    with pytest.raises(ValueError, match="fixed bits"):
        PrefixDeltas(reference.PredictiveDelta(TopK(3), reference.TurboQuant(3), "paper", player=PLAYER))
    its, made = codec("previous"), sessions({"a": TEXTS["a"]})
    with pytest.raises(TypeError, match="mapping"):
        its.encode(made["a"])
    with pytest.raises(ValueError, match="at least one"):
        its.encode({})
    with pytest.raises(ValueError, match=r"cache\.tokens"):
        its.encode({"a": Cache(list(made["a"]))})
    with pytest.raises(ValueError, match="like the sessions before"):
        its.encode({**made, "b": workload.play(PLAYER, np.array([1, 2]), np.float16)})
