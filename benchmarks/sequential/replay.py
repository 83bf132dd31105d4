"""TokenReplay with checkpoints every B positions: bits, operations, seconds and error, from replay alone to storage alone."""

import time

import numpy as np

import reference
from benchmarks.sequential.shared import digits, ids
from kvtheory.distortion import attention_error
from kvtheory.models.capture import capture
from kvtheory.models.player import ModelPlayer
from reference.token_replay import TokenReplay

TEXT, TOKENS = "hamlet", 96
EVERY = (None, 32, 16, 8, 4, 2, 1)


def measure(model, tokenizer):
    tokens = ids(tokenizer, TEXT, 0, TOKENS)
    cache = capture(model, None, tokens)
    player = ModelPlayer(model)
    rows = []
    for every in EVERY:
        codec = TokenReplay.of(player, every)
        rows.append({"checkpoint_every": every, **asked(codec, cache)})
        parts = (
            {part.name: 8 * part.bytes for part in reference.inspect(codec.encode(cache)).parts}
            if every is None
            else {}
        )
        if parts:
            rows[-1]["payload_bits"] = parts["tokens"]
    plain = [{"bits": bits, **asked(reference.TurboQuant(bits), cache)} for bits in (2, 3, 4, 5)]
    return {
        "text": TEXT,
        "tokens": TOKENS,
        "numbers": cache[0].keys.size * 2 * len(cache),
        "surprisal_bits": digits(float(np.sum(cache.surprisal_bits)), 6),
        "note": "seconds of decoding on one thread of a shared machine; error: attention output, geometric mean over layers",
        "replay": rows,
        "turboquant": plain,
    }


def asked(codec, cache):
    data = reference.encode_cache(codec, cache)
    start = time.perf_counter()
    decoded = reference.decode_cache(codec, data)
    seconds = time.perf_counter() - start
    errors = [attention_error(layer, its) for layer, its in zip(cache, decoded)]
    flops = (
        codec.decode_flops(data)
        if codec.scope == "cache"
        else sum(codec.decode_flops(codec.encode(one)) for one in cache)
    )
    return {
        "stream_bits": 8 * len(data),
        "operations": int(flops),
        "seconds": digits(seconds),
        "error": digits(float(np.exp(np.mean(np.log(np.maximum(errors, 1e-300)))))),
    }
