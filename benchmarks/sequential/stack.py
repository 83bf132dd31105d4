"""The paper's three layers on sessions of a real model: prefixes shared, what is left predicted, the residual quantised; bytes and error of every subset."""

import time

import numpy as np

import reference
from benchmarks.sequential.shared import digits
from kvtheory import prediction, workload
from kvtheory.distortion import attention_error
from kvtheory.models.capture import capture, encode
from kvtheory.models.player import ModelPlayer
from reference.prefix_deltas import PrefixDeltas

COUNT, SENTENCES, SEED, K, BITS = 3, 1, 0, 2, 3


def measure(model, tokenizer):
    made = workload.sessions(COUNT, SEED, sentences=SENTENCES, tokenise=lambda text: encode(tokenizer, text))
    caches = {s.name: capture(model, None, s.tokens) for s in made}
    player = ModelPlayer(model)
    predictors = {
        "previous position": (prediction.PreviousToken.of(next(iter(caches.values()))), None),
        f"mean of the {K} likeliest": (prediction.TopK(K), player),
    }
    rows = [alone(caches, "TurboQuant", reference.TurboQuant(bits), bits=bits) for bits in range(1, 9)]
    rows += [shared(caches, reference.TurboQuant(bits), bits) for bits in range(1, 6)]
    rows.append(shared(caches, reference.Full(), None))
    for name, (predictor, its) in predictors.items():
        for bits in (2, 3, 4) if its is None else (BITS,):
            delta = reference.PredictiveDelta(predictor, reference.TurboQuant(bits), player=its)
            rows += both(caches, name, delta, bits)
        if its is None:
            delta = reference.PredictiveDelta(predictor, reference.Full(), player=its)
            rows += both(caches, name, delta, None)
    prefixes = {tuple(s.tokens[: i + 1].tolist()) for s in made for i in range(len(s.tokens))}
    numbers = sum(2 * layer.keys.size for cache in caches.values() for layer in cache)
    return {
        "workload": f"kvtheory.workload.sessions({COUNT}, {SEED}, sentences={SENTENCES}), the model's tokens",
        "sessions": COUNT,
        "tokens": sum(len(s.tokens) for s in made),
        "distinct_prefixes": len(prefixes),
        "numbers": numbers,
        "note": "bytes: of one stream of all sessions where they share, else of one for each; error: attention output, geometric mean over sessions and layers "
        "above the lowest; sharing: PrefixStore('radix', verify=False), with prediction PrefixDeltas; seconds of a shared machine. The error of prediction "
        "without sharing is that with it: a session reconstructs to the same numbers (keys and values of a shared prefix are those of the session that came first)",
        "rows": rows,
    }  # fmt: skip


def error(caches, decoded):
    found = [
        attention_error(layer, its)
        for name, cache in caches.items()
        for layer, its in list(zip(cache, decoded[name]))[1:]
    ]
    return digits(float(np.exp(np.mean(np.log(np.maximum(found, 1e-300))))), 4)


def row(layers, bits, size, found, seconds, predictor=None):
    return {
        "sharing": "sharing" in layers, "prediction": predictor, "bits": bits, "bytes": size, "error": found,
        "decode_seconds": digits(seconds),
    }  # fmt: skip


def alone(caches, name, codec, bits):
    streams = {one: reference.encode_cache(codec, cache) for one, cache in caches.items()}
    start = time.perf_counter()
    decoded = {one: reference.decode_cache(codec, data) for one, data in streams.items()}
    seconds = time.perf_counter() - start
    return row((), bits, sum(map(len, streams.values())), error(caches, decoded), seconds)


def shared(caches, inner, bits):
    store = reference.PrefixStore("radix", inner=inner, verify=False)
    for name, cache in caches.items():
        store.put(name, cache)
    data = store.stream()
    start = time.perf_counter()
    decoded = reference.decode(data)
    found = {name: decoded[name] for name in caches}
    return row(("sharing",), bits, len(data), error(caches, found), time.perf_counter() - start)


def both(caches, name, delta, bits):
    """With sharing, and without: there the streams are counted, and what they hold is what the shared one does."""
    stack = PrefixDeltas(delta)
    data = stack.encode(caches)
    start = time.perf_counter()
    decoded = stack.decode(data)
    seconds = time.perf_counter() - start
    found = error(caches, decoded)
    size = sum(len(delta.encode(cache)) for cache in caches.values())
    return [
        row(("sharing",), bits, len(data), found, seconds, name),
        row((), bits, size, found, seconds, name) | {"decode_seconds": None},
    ]
