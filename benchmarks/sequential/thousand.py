"""TokenReplay of 1,000 tokens: payload, header, operations and seconds, against TurboQuant of the same cache."""

import time

import numpy as np

import reference
from benchmarks.sequential.shared import digits, ids
from kvtheory.models.capture import capture
from kvtheory.models.player import ModelPlayer
from reference.token_replay import TokenReplay

TEXT, TOKENS, BITS = "persuasion", 1000, (2, 3, 4)


def measure(model, tokenizer):
    cache = capture(model, None, ids(tokenizer, TEXT, 0, TOKENS))
    player = ModelPlayer(model)
    codec = TokenReplay.of(player)
    start = time.perf_counter()
    data = codec.encode(cache)
    middle = time.perf_counter()
    decoded = codec.decode(data)
    end = time.perf_counter()
    # the stream has a checksum of all keys and values that the encoder's run wrote: another bit is CorruptStream
    assert len(decoded) == len(cache) and all(one.keys.shape == own.keys.shape for one, own in zip(decoded, cache))
    parts = {part.name: 8 * part.bytes for part in reference.inspect(data).parts}
    bits = np.asarray(cache.surprisal_bits, float)
    return {
        "text": TEXT,
        "tokens": TOKENS,
        "numbers": cache[0].keys.size * 2 * len(cache),
        "surprisal_bits": digits(float(bits.sum()), 8),
        "surprisal_of_the_first": digits(float(bits[0]), 6),
        "payload_bits": parts["tokens"],
        "header_bits": 8 * len(data) - parts["tokens"],
        "operations": int(codec.decode_flops(data)),
        "weights_read_a_pass": player.flops // 2,
        "layers_times_width": player.attention_flops(1) // 4,
        "encode_seconds": digits(middle - start),
        "decode_seconds": digits(end - middle),
        "note": "surprisal: of one pass of the whole text, not of the token by token run that the coder sees; seconds on one thread of a shared machine",
        "turboquant": [asked(reference.TurboQuant(b), cache) for b in BITS],
    }


def asked(codec, cache):
    data = reference.encode_cache(codec, cache)
    start = time.perf_counter()
    reference.decode_cache(codec, data)
    return {
        "bits": codec.bits,
        "stream_bits": 8 * len(data),
        "decode_seconds": digits(time.perf_counter() - start),
        "operations": int(sum(codec.decode_flops(codec.encode(one)) for one in cache)),
    }
