"""A really smaller model as predictor: Qwen2.5-Coder-0.5B reads the tokens of Qwen2.5-Coder-1.5B (one vocabulary), its cache is mapped to the larger one's."""

import numpy as np

import reference
from benchmarks.sequential.predictors import BITS, RIDGES, asked, line
from benchmarks.sequential.shared import digits, ids
from kvtheory import models, prediction
from kvtheory.models.capture import capture
from kvtheory.models.player import ModelPlayer

SMALL = "qwen"
TEXT, POSITIONS = "hamlet", 24
CALIBRATION, CALIBRATED = "moby-dick", 192


def measure(model, tokenizer):
    other, small = models.load(SMALL)
    tokens = ids(tokenizer, CALIBRATION, 0, CALIBRATED)
    assert (tokens == ids(other, CALIBRATION, 0, CALIBRATED)).all(), "the two models' tokens differ"
    player, its = ModelPlayer(model), ModelPlayer(small)
    calibration = capture(model, None, tokens, query_positions=[0])
    cache = capture(model, None, ids(tokenizer, TEXT, 0, POSITIONS))
    rope = capture(small, None, tokens[:8], query_positions=[0])[0].rope
    law = asked_law(its, cache.tokens)
    rows = [
        ("mean of the calibration", lambda: prediction.Nothing.fit(calibration)),
        ("previous position", lambda: prediction.PreviousToken.of(cache)),
        ("a smaller model", lambda: prediction.SmallerModel.fit(calibration, its, rope, RIDGES)),
        ("the token that came", prediction.KnownToken),
    ]  # fmt: skip
    return {
        "smaller_model": models.MODELS[SMALL].title,
        "parameters": [models.MODELS[SMALL].parameters, int(sum(p.numel() for p in model.parameters()))],
        "calibration": f"{CALIBRATED} tokens of {CALIBRATION}",
        "inner": f"TurboQuant({BITS})",
        "layers": player.layers,
        "note": "as in `predictors`; the smaller model's law codes the tokens; its weights are no part of the state",
        "texts": [
            {
                "text": TEXT, "positions": POSITIONS,
                "surprisal_bits_a_token": digits(float(np.mean(cache.surprisal_bits[1:])), 4),
                "surprisal_bits_a_token_of_the_smaller": digits(law, 4),
                "turboquant": [{"bits": bits, **asked(reference.TurboQuant(bits), cache)} for bits in range(1, 9)],
                "predictors": [line(cache, player, name, make, None) for name, make in rows],
            }
        ],
    }  # fmt: skip


def asked_law(player, tokens):
    """Mean surprisal of all tokens but the first under a player's law, bits."""
    play, total = player.start(), 0.0
    play.feed(int(tokens[0]))
    for token in tokens[1:]:
        weights = prediction.law_weights(play.logits)
        total += float(np.log2(weights.sum()) - np.log2(max(int(weights[int(token)]), 1)))
        play.feed(int(token))
    return total / (len(tokens) - 1)
