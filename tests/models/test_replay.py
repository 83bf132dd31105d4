"""TokenReplay on the real model: 128 tokens of English, under the recorded plan bit for bit, under another one the same or refused."""

import numpy as np
import pytest

import kvtheory
import reference
from kvtheory import models
from kvtheory.models.capture import encode
from kvtheory.models.player import ModelPlayer
from kvtheory.sample import sample_text
from reference.token_replay import TokenReplay

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real

COUNT = 128


@pytest.fixture(scope="module")
def smol():
    return models.load("smol")


@pytest.fixture(scope="module")
def encoded(smol):
    """(codec, cache as replayed, stream, surprisal in bits) at one thread."""
    tokenizer, model = smol
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        player = ModelPlayer(model)
        tokens = encode(tokenizer, sample_text(), COUNT)
        play, kv, bits = player.start(), [], []
        for token in tokens:
            if play.logits is None:
                bits.append(np.log2(player.vocabulary))
            else:
                z = play.logits.astype(np.float64)
                z -= z.max()
                bits.append((np.log(np.exp(z).sum()) - z[token]) / np.log(2))
            kv.append(play.feed(int(token)))
        layers = [
            kvtheory.Layer(
                *(np.stack([getattr(one[i], name) for one in kv], axis=1) for name in ("keys", "values")), index=i
            )
            for i in range(player.layers)
        ]
        cache = kvtheory.Cache(layers, tokens=tokens)
        codec = TokenReplay.of(player)
        yield codec, cache, codec.encode(cache), float(np.sum(bits))
    finally:
        torch.set_num_threads(threads)


def test_under_its_plan_tokens_and_cache_come_back(encoded):
    codec, cache, data, surprisal = encoded
    decoded = codec.decode(data)
    for its, layer in zip(decoded, cache):
        assert its.keys.tobytes() == layer.keys.tobytes() and its.values.tobytes() == layer.values.tobytes()
    payload = {part.name: 8 * part.bytes for part in reference.inspect(data).parts}["tokens"]
    assert surprisal <= payload <= 1.001 * surprisal + 64
    assert 8 * len(data) - payload <= 512


def test_under_two_threads_it_is_the_same_or_refused(encoded):
    codec, cache, data, _ = encoded
    torch.set_num_threads(2)
    try:
        decoded = codec.decode(data)
    except reference.CorruptStream as problem:
        assert "plan" in str(problem) or "range-coded" in str(problem)
    else:
        assert all(a.keys.tobytes() == b.keys.tobytes() for a, b in zip(decoded, cache))
    finally:
        torch.set_num_threads(1)


def test_the_cache_of_one_go_is_near_and_not_the_same(smol, encoded):
    """What recomputing in another way costs: float32 noise, in most numbers."""
    _, model = smol
    _, cache, _, _ = encoded
    with torch.inference_mode():
        out = model(input_ids=torch.tensor(np.asarray(cache.tokens))[None], use_cache=True)
    last = out.past_key_values.layers[-1].keys[0].numpy()
    replayed = cache[len(cache) - 1].keys
    assert 0 < np.abs(last - replayed).max() < 1e-3
    assert (last == replayed).mean() < 0.5


def test_candidates_are_what_would_be_fed(smol):
    play = ModelPlayer(smol[1]).start()
    for token in (11, 12, 13):
        play.feed(token)
    found = play.candidates([5, 6])
    fed = play.feed(6)
    for i in (0, 7, 29):
        assert np.array_equal(found[i].keys[1], fed[i].keys) and np.array_equal(found[i].values[1], fed[i].values)


def test_checkpoints_on_the_real_model(smol, encoded):
    """Every other position stored in 8 bits: later passes read what was stored, and decoder and encoder hold the same."""
    _, cache, _, _ = encoded
    count = 8
    short = kvtheory.Cache(
        [
            one.replace(keys=one.keys[:, :count], values=one.values[:, :count], positions=one.positions[:count])
            for one in cache
        ],
        tokens=cache.tokens[:count],
    )
    codec = TokenReplay.of(ModelPlayer(smol[1]), 2, reference.TurboQuant(8))
    data = codec.encode(short)
    assert codec.decode_tokens(data).tolist() == short.tokens.tolist()
    decoded = codec.decode(data)
    for i in (0, 15, 29):
        error = np.abs(decoded[i].keys - short[i].keys).max(axis=(0, 2)) / np.abs(short[i].keys).max()
        assert (error[1::2] > 1e-5).all() and error.max() < 0.1
    assert error[2] > 0  # the last layer at a position that was run, behind one that was stored
