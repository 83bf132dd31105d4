"""PredictiveDelta with every predictor on one text: held bits, attention error, passes of the model, seconds."""

import copy
import time
from dataclasses import replace

import numpy as np
import torch

import reference
from benchmarks.sequential.shared import digits, ids
from kvtheory import prediction
from kvtheory.distortion import attention_error
from kvtheory.layer import Cache
from kvtheory.models.capture import capture
from kvtheory.models.player import ModelPlayer

TEXT, POSITIONS = "hamlet", 40
CALIBRATION, CALIBRATED = "moby-dick", 1024
K = 4
BITS = 3


def measure(model, tokenizer):
    player = ModelPlayer(model)
    cache = capture(model, None, ids(tokenizer, TEXT, 0, POSITIONS))
    calibration = capture(model, None, ids(tokenizer, CALIBRATION, 0, CALIBRATED))
    at_bits = Cache(
        [
            layer.replace(keys=one.keys.astype(np.float32), values=one.values.astype(np.float32))
            for layer, one in zip(calibration, reference.decode_cache(reference.TurboQuant(BITS), reference.encode_cache(reference.TurboQuant(BITS), calibration)))
        ],
        calibration.tokens, calibration.surprisal_bits, calibration.meta,
    )  # fmt: skip
    its = prediction
    wanted = [
        ("mean of the calibration", lambda: its.Nothing.fit(calibration), None),
        ("previous position", lambda: its.PreviousToken.of(cache), None),
        ("token's own mean, token known", lambda: its.TokenTable.fit(calibration, player.vocabulary), None),
        (
            "linear map of the embedding, token known",
            lambda: its.EmbeddingLinear.fit(calibration, player, "token"),
            None,
        ),
        ("linear map of the expected embedding", lambda: its.EmbeddingLinear.fit(calibration, player), None),
        ("layer below, fitted to exact layers", lambda: its.LayerLinear.fit(calibration), None),
        ("layer below, fitted to layers at 3 bits", lambda: its.LayerLinear.fit(calibration, held=at_bits), None),
        ("a copy of the model with weights of 8 bits", lambda: smaller(model, calibration, 8), None),
        ("a copy of the model with weights of 4 bits", lambda: smaller(model, calibration, 4), None),
        (f"mean of the {K} likeliest", lambda: its.TopK(K), None),
        (f"mean of the {K} likeliest, the paper's adaptive bits", lambda: its.TopK(K), "paper"),
        ("the token that came", its.KnownToken, None),
    ]
    plain = [{"bits": bits, **asked(reference.TurboQuant(bits), cache)} for bits in range(1, 9)]
    rows = []
    for name, make, adaptive in wanted:
        predictor = make()
        codec = reference.PredictiveDelta(
            predictor, reference.TurboQuant(BITS), adaptive, player=player if "player" in predictor.needs else None
        )
        rows.append(
            {
                "predictor": name, "needs": sorted(predictor.needs), "target_passes_a_position": predictor.forwards,
                "state_bytes": predictor.state_bytes, **asked(codec, cache),
            }
        )  # fmt: skip
    return {
        "text": TEXT,
        "positions": POSITIONS,
        "calibration": f"{CALIBRATED} tokens of {CALIBRATION}",
        "inner": f"TurboQuant({BITS})",
        "surprisal_bits_a_token": digits(float(np.mean(cache.surprisal_bits[1:])), 4),
        "note": "error: attention output of all queries, geometric mean over the layers above the lowest, which a known token gives exactly; "
        "held bits a number with header and tokens, without the state; seconds on one thread of a shared machine",
        "turboquant": plain,
        "predictors": rows,
    }


def smaller(model, calibration, bits):
    """A copy of the model whose matrices are rounded to 2^bits levels, each row from its least to its largest. It reads the tokens itself, and its
    keys and values are the prediction as they are: the linear map is the identity."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in own.named_parameters():
            if weight.ndim == 2 and "embed" not in name and "lm_head" not in name:
                low, high = weight.min(dim=1, keepdim=True)[0], weight.max(dim=1, keepdim=True)[0]
                step = (high - low) / (2**bits - 1)
                weight.copy_(low + torch.round((weight - low) / step) * step)
    few = Cache(
        [layer.replace(keys=layer.keys[:, :8], values=layer.values[:, :8], positions=layer.positions[:8], queries=None, query_positions=None) for layer in calibration],
        calibration.tokens[:8], calibration.surprisal_bits[:8],
    )  # fmt: skip
    fitted = prediction.SmallerModel.fit(few, ModelPlayer(own), few[0].rope)
    numbers = fitted.small_numbers
    identity = np.concatenate([np.eye(numbers, dtype=np.float32), np.zeros((1, numbers), np.float32)]).reshape(-1)
    return replace(fitted, maps=np.tile(identity, len(few)))


def asked(codec, cache):
    start = time.perf_counter()
    data = reference.encode_cache(codec, cache)
    middle = time.perf_counter()
    decoded = reference.decode_cache(codec, data)
    end = time.perf_counter()
    errors = [attention_error(layer, its) for layer, its in list(zip(cache, decoded))[1:]]
    return {
        "held_bits": digits(reference.held_bits(data, cache), 5),
        "error": digits(float(np.exp(np.mean(np.log(np.maximum(errors, 1e-300)))))),
        "encode_seconds": digits(middle - start),
        "decode_seconds": digits(end - middle),
    }
