"""TokenReplay on a toy model: exact under its plan, refused or the same under another, bits counted."""

import hashlib
import json
import zlib

import numpy as np
import pytest

import kvtheory
import reference
from kvtheory.prediction import ToyPlayer, law_weights
from reference import stream
from reference.token_replay import CHECK_BITS, CHECK_EVERY, TokenReplay

PLAYER = ToyPlayer(sharpness=1.0)


def played(player, tokens):
    """(cache as the player writes it, surprisal in bits of each token)."""
    play, kv, bits = player.start(), [], []
    for token in tokens:
        if play.logits is None:
            bits.append(np.log2(player.vocabulary))
        else:
            z = play.logits - play.logits.max()
            bits.append((np.log(np.exp(z).sum()) - z[token]) / np.log(2))
        kv.append(play.feed(int(token)))
    layers = [
        kvtheory.Layer(
            *(
                np.stack([getattr(one[i], name) for one in kv], axis=1) if kv else np.zeros((2, 0, 8))
                for name in ("keys", "values")
            ),
            index=i,
        )
        for i in range(player.layers)
    ]
    return kvtheory.Cache(layers, tokens=np.asarray(tokens, np.int64)), np.array(bits)


def written(player, count, seed=0):
    """Tokens drawn from the player's own law."""
    rng, play, out = np.random.default_rng(seed), player.start(), []
    for _ in range(count):
        p = None if play.logits is None else law_weights(play.logits) / law_weights(play.logits).sum()
        out.append(int(rng.choice(player.vocabulary, p=p)))
        play.feed(out[-1])
    return out


TOKENS = written(PLAYER, 300)
CACHE, BITS = played(PLAYER, TOKENS)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 300])
def test_tokens_keys_and_values_come_back_bit_for_bit(count):
    cache, _ = played(PLAYER, TOKENS[:count])
    codec = TokenReplay.of(PLAYER)
    data = codec.encode(cache)
    decoded = codec.decode(data)
    assert codec.decode_tokens(data).tolist() == TOKENS[:count]
    for layer, its in zip(cache, decoded):
        assert its.keys.dtype == layer.keys.dtype and its.keys.tobytes() == layer.keys.tobytes()
        assert its.values.tobytes() == layer.values.tobytes() and its.positions.tolist() == [list(range(count))] * 2


@pytest.mark.parametrize("seed", range(4))
def test_the_payload_is_the_surprisal(seed):
    tokens = written(PLAYER, 400, seed)
    cache, bits = played(PLAYER, tokens)
    data = TokenReplay.of(PLAYER).encode(cache)
    payload = {part.name: 8 * part.bytes for part in reference.inspect(data).parts}
    surprisal = float(bits.sum())
    assert surprisal <= payload["tokens"] <= 1.001 * surprisal + 64, (payload, surprisal)
    assert 8 * len(data) - payload["tokens"] <= 512
    assert payload["tokens"] - surprisal >= CHECK_BITS * (len(tokens) // CHECK_EVERY)


def test_unlikely_tokens_cost_what_they_cost():
    tokens = np.random.default_rng(1).integers(0, 64, 200).tolist()
    sharp = ToyPlayer(sharpness=6.0)
    cache, _ = played(sharp, tokens)
    codec = TokenReplay.of(sharp)
    data = codec.encode(cache)
    assert codec.decode_tokens(data).tolist() == tokens
    assert 8 * len(data) <= 24.5 * len(tokens) + 600  # at most 24 bits a token


@pytest.mark.parametrize("noise", [1e-7, 1e-3])
def test_another_plan_is_the_same_or_refused(noise):
    data = TokenReplay.of(PLAYER).encode(CACHE)
    refused = 0
    for _ in range(12):
        other = TokenReplay.of(PLAYER).with_player(ToyPlayer(sharpness=1.0, noise=noise))
        try:
            decoded = other.decode(data)
        except reference.CorruptStream as problem:
            refused += 1
            assert "plan" in str(problem) or "range-coded" in str(problem)
        else:
            assert all(np.array_equal(a.keys, b.keys) for a, b in zip(decoded, CACHE))
    assert refused >= 10  # what the noise does to 300 tokens; none of it silently


def test_another_model_is_refused():
    codec, other = TokenReplay.of(PLAYER), ToyPlayer(sharpness=1.0, seed=1)
    data = codec.encode(CACHE)
    with pytest.raises(reference.StateMismatch, match="the model"):
        codec.with_player(other)
    with pytest.raises(reference.StateMismatch, match="written with"):
        TokenReplay.of(other).decode(data)
    with pytest.raises(reference.StateMismatch, match="written with"):
        reference.decode(data)
    loaded = reference.load(codec.state)
    with pytest.raises(reference.StateMismatch, match="needs the model"):
        loaded.decode(data)
    assert np.array_equal(loaded.with_player(PLAYER).decode(data)[1].keys, CACHE[1].keys)
    with pytest.raises(reference.StateMismatch, match="needs the model"):
        TokenReplay().encode(CACHE)


@pytest.mark.parametrize("every", [1, 2, 7, 300, 301])
@pytest.mark.parametrize("inner", [reference.Full(), reference.TurboQuant(4), reference.QJL(8), reference.PolarQuant()])
def test_checkpoints_are_read_by_what_comes_later(every, inner):
    cache, _ = played(PLAYER, TOKENS[:40]) if every < 40 else (CACHE, None)
    codec = TokenReplay.of(PLAYER, every, inner)
    data = codec.encode(cache)
    decoded = codec.decode(data)
    assert codec.decode_tokens(data).tolist() == cache.tokens.tolist()
    stored = np.arange(every - 1, cache[0].tokens, every)
    run = np.setdiff1d(np.arange(cache[0].tokens), stored)
    if isinstance(inner, reference.Full):
        # checkpoints are float32, what is replayed behind them is near
        assert np.abs(decoded[1].keys - cache[1].keys).max() < 1e-4
    elif len(stored):
        assert np.abs(decoded[0].keys[:, stored] - cache[0].keys[:, stored]).max() > 1e-3
        # the first layer's keys depend on the token alone: those of positions that were run are exact
        assert np.array_equal(decoded[0].keys[:, run], cache[0].keys[:, run])
        later = run[run > stored[0]]
        if len(later):
            assert not np.array_equal(decoded[1].keys[:, later], cache[1].keys[:, later])


def test_the_frontier_trades_bits_for_passes():
    held, flops = [], []
    cache, _ = played(PLAYER, TOKENS[:100])
    for every in (None, 16, 4, 2, 1):
        codec = TokenReplay.of(PLAYER, every)
        data = codec.encode(cache)
        held.append(len(data))
        flops.append(codec.decode_flops(data))
    assert held == sorted(held) and flops == sorted(flops, reverse=True)
    passes = sum(PLAYER.flops + PLAYER.attention_flops(t + 1) for t in range(100))
    assert flops[0] == passes and flops[-1] < 0.2 * passes


def test_the_head_is_that_of_the_document():
    """Sizes, element type, digest of the plan, and a CRC-32 that runs over every token, key and value."""
    cache, _ = played(PLAYER, TOKENS[:70])
    _, groups = stream.read(TokenReplay.of(PLAYER).encode(cache))
    head = bytes(groups[0][0].rest())
    crc = 0
    for t in range(70):
        crc = zlib.crc32(int(cache.tokens[t]).to_bytes(4, "little"), crc)
        for one in cache:
            crc = zlib.crc32(one.keys[:, t].astype("<f8").tobytes(), crc)
            crc = zlib.crc32(one.values[:, t].astype("<f8").tobytes(), crc)
    plan = hashlib.sha256(json.dumps(dict(PLAYER.plan), sort_keys=True).encode()).digest()[:4]
    assert head == bytes([70, 2, 2, 8, 8, 3]) + plan + crc.to_bytes(4, "little")


@pytest.mark.parametrize("more", [4, 8, 40])
def test_words_behind_the_last_token_are_refused(more):
    codec = TokenReplay.of(PLAYER)
    cache, _ = played(PLAYER, TOKENS[:70])
    header, groups = stream.read(codec.encode(cache))
    parts = [bytes(part.rest()) for part in groups[0]]
    with pytest.raises(reference.CorruptStream, match="left over"):
        codec.decode(stream.write(header, [[parts[0], parts[1] + b"\x5a" * more, parts[2]]]))


@pytest.mark.parametrize("every", [1, 2])
def test_behind_a_checkpoint_there_is_no_law(every):
    """No pass was made there, so the next token costs log2 of the vocabulary: 6 bits of 64 tokens."""
    cache, bits = played(PLAYER, TOKENS[:200])
    data = TokenReplay.of(PLAYER, every, reference.Full()).encode(cache)
    payload = {part.name: 8 * part.bytes for part in reference.inspect(data).parts}["tokens"]
    uniform = np.arange(200) % every == 0
    expected = 6.0 * uniform.sum() + bits[~uniform].sum()
    # Full stores float32, so laws differ in their last places
    assert expected - 1 <= payload <= 1.001 * expected + 64


def test_an_inner_codec_that_mixes_tokens_is_refused():
    with pytest.raises(ValueError, match=r"inner: .*each token alone"):
        TokenReplay.of(PLAYER, 4, reference.KIVI(2, group=2, window=2)).encode(CACHE)
    with pytest.raises(ValueError, match="inner"):
        TokenReplay(4)
    with pytest.raises(ValueError, match="inner"):
        TokenReplay(None, reference.Full())


def test_hostile_bytes():
    codec = TokenReplay.of(PLAYER, 8)
    cache, _ = played(PLAYER, TOKENS[:70])
    body = bytearray(stream.unseal(codec.encode(cache)))
    rng, clean = np.random.default_rng(2), codec.decode(stream.seal(bytes(body)))
    outcomes = set()
    for _ in range(80):
        own = bytearray(body)
        own[int(rng.integers(len(own)))] ^= 1 << int(rng.integers(8))
        try:
            decoded = codec.decode(stream.seal(bytes(own)))
        except (reference.CorruptStream, reference.StateMismatch):
            outcomes.add("refused")
        else:
            outcomes.add("same")
            # a bit that only the plan's digest holds
            assert all(np.array_equal(a.keys, b.keys) for a, b in zip(decoded, clean))
    assert "refused" in outcomes


def test_counts_are_refused_before_the_model_runs():
    codec = TokenReplay.of(PLAYER)
    header, groups = stream.read(codec.encode(CACHE))
    parts = [bytes(part.rest()) for part in groups[0]]
    head = stream.varint(1 << 24) + parts[0][2:]
    with pytest.raises(reference.CorruptStream, match="cannot hold"):
        codec.decode(stream.write(header, [[head, *parts[1:]]]))


def test_what_it_needs_is_asked_for():
    codec = TokenReplay.of(PLAYER)
    with pytest.raises(ValueError, match=r"cache\.tokens"):
        codec.encode(list(CACHE))
    with pytest.raises(ValueError, match="2 layers"):
        codec.encode(kvtheory.Cache([CACHE[0]], tokens=CACHE.tokens))
    with pytest.raises(ValueError, match="0 to 63"):
        codec.encode(kvtheory.Cache(list(CACHE), tokens=np.full(300, 64)))


def test_laws_are_integers():
    weights = law_weights(np.array([0.0, np.log(3), -np.inf, -1000.0]))
    assert weights.dtype == np.int64 and weights.tolist()[2:] == [0, 0]
    assert abs(weights[1] / weights[0] - 3) < 1e-11 and 2**40 - 4 <= weights.sum() <= 2**40
    for wrong in ([np.nan, 0.0], [np.inf, 0.0], [-np.inf, -np.inf]):
        with pytest.raises(ValueError, match="logits"):
            law_weights(np.array(wrong))
