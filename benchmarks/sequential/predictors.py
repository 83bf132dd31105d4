"""PredictiveDelta with every predictor on several texts: held bits, attention error, passes of the model, seconds."""

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

TEXTS, POSITIONS = ("hamlet", "persuasion", "state-of-the-union", "python-code"), 40
CALIBRATION, CALIBRATED = "moby-dick", 1024
#: positions of the calibration that a smaller model reads, token by token
READ = 384
#: of its maps, by what they leave of a held-out quarter
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
K = 4
BITS = 3
#: what is measured on every text; all the rest on the first two, of a model with more than LARGE parameters on the first alone
EVERYWHERE = (
    "previous position", "layer below, fitted to layers at 3 bits", f"mean of the {K} likeliest", "the token that came",
    "the lower third of the model's own layers",
)  # fmt: skip
LARGE = 300e6


def measure(model, tokenizer):
    player = ModelPlayer(model)
    calibration = capture(model, None, ids(tokenizer, CALIBRATION, 0, CALIBRATED))
    wanted = makers(model, player, calibration)
    parameters = sum(p.numel() for p in model.parameters())
    texts = []
    for number, name in enumerate(TEXTS):
        cache = capture(model, None, ids(tokenizer, name, 0, POSITIONS))
        whole = number < (1 if parameters > LARGE else 2)
        if not whole and parameters > LARGE and number > 1:
            break
        chosen = [row for row in wanted if whole or row[0] in EVERYWHERE]
        texts.append(
            {
                "text": name, "positions": POSITIONS,
                "surprisal_bits_a_token": digits(float(np.mean(cache.surprisal_bits[1:])), 4),
                "turboquant": [{"bits": bits, **asked(reference.TurboQuant(bits), cache)} for bits in range(1, 9)],
                "predictors": [line(cache, player, *row) for row in chosen],
            }
        )  # fmt: skip
    return {
        "calibration": f"{CALIBRATED} tokens of {CALIBRATION}, of the smaller model {READ}",
        "inner": f"TurboQuant({BITS})",
        "layers": player.layers,
        "note": "error: attention output of all queries, geometric mean over the layers above the lowest, which a known token gives exactly; "
        "error_of_the_upper_layers: over the upper two thirds alone, which the lower third does not give exactly; held bits a number with header and tokens, without the state; own_pass: operations of a pass of the predictor's own model over those of the target's; "
        "seconds on one thread of a shared machine",
        "texts": texts,
    }


def makers(model, player, calibration):
    """(name, maker of the predictor, adaptive rule) of all; each is fitted once."""
    its, made = prediction, {}

    def once(name, make):
        def get():
            if name not in made:
                made[name] = make()
            return made[name]

        return get

    rows = [
        ("mean of the calibration", lambda: its.Nothing.fit(calibration), None),
        ("previous position", lambda: its.PreviousToken.of(calibration), None),
        ("token's own mean, token known", lambda: its.TokenTable.fit(calibration, player.vocabulary), None),
        ("linear map of the embedding, token known", lambda: its.EmbeddingLinear.fit(calibration, player, "token"), None),
        ("linear map of the expected embedding", lambda: its.EmbeddingLinear.fit(calibration, player), None),
        ("layer below, fitted to exact layers", lambda: its.LayerLinear.fit(calibration), None),
        ("layer below, fitted to layers at 3 bits", lambda: its.LayerLinear.fit(calibration, held=at_bits(calibration)), None),
        ("the lower third of the model's own layers", lambda: lower(model, first(calibration, READ), player.layers // 3), None),
        ("a copy of the model with weights of 8 bits", lambda: smaller(model, calibration, 8), None),
        ("a copy of the model with weights of 4 bits", lambda: smaller(model, calibration, 4), None),
        (f"mean of the {K} likeliest", lambda: its.TopK(K), None),
        (f"mean of the {K} likeliest, the paper's adaptive bits", lambda: its.TopK(K), "paper"),
        ("the token that came", its.KnownToken, None),
    ]  # fmt: skip
    return [(name, once(name, make), adaptive) for name, make, adaptive in rows]


def line(cache, player, name, make, adaptive):
    predictor = make()
    own = getattr(predictor, "player", None)
    codec = reference.PredictiveDelta(
        predictor, reference.TurboQuant(BITS), adaptive, player=player if "player" in predictor.needs else None
    )
    return {
        "predictor": name, "needs": sorted(predictor.needs), "target_passes_a_position": predictor.forwards,
        "own_pass": digits(own.flops / player.flops) if own is not None else 0, "state_bytes": predictor.state_bytes,
        **asked(codec, cache),
    }  # fmt: skip


def at_bits(cache):
    """The cache as a decoder of TurboQuant(BITS) holds it."""
    codec = reference.TurboQuant(BITS)
    held = reference.decode_cache(codec, reference.encode_cache(codec, cache))
    layers = [
        layer.replace(keys=one.keys.astype(np.float32), values=one.values.astype(np.float32))
        for layer, one in zip(cache, held)
    ]
    return Cache(layers, cache.tokens, cache.surprisal_bits, cache.meta)


def first(cache, count):
    """Its first `count` positions, without queries."""
    layers = [
        layer.replace(
            keys=layer.keys[:, :count], values=layer.values[:, :count], positions=layer.positions[:count], queries=None,
            query_positions=None,
        )
        for layer in cache
    ]  # fmt: skip
    return Cache(layers, cache.tokens[:count], cache.surprisal_bits[:count])


class Repeated(ModelPlayer):
    """A model that stops early: what its highest layer writes stands for the layers that it does not have, so that each is predicted from the nearest."""

    def __init__(self, model, layers):
        super().__init__(model)
        self.own, self.layers = self.layers, layers

    def start(self):
        play, count = super().start(), self.layers
        feed = play.feed

        def padded(token):
            kv = feed(token)
            return [*kv, *[kv[-1]] * (count - len(kv))]

        play.feed = padded
        return play


def lower(model, calibration, layers):
    """The model's first `layers` layers with its own norm and head: a smaller model of the same tokens, whose lower layers write exactly what the target's do."""
    own = copy.deepcopy(model)
    base = own.base_model
    base.layers = base.layers[:layers]
    for config in {id(c): c for c in (own.config, own.config.get_text_config(), base.config)}.values():
        config.num_hidden_layers = layers
    predictor = prediction.SmallerModel.fit(calibration, Repeated(own, len(calibration)), calibration[0].rope, RIDGES)
    return exact_below(predictor, layers)


def exact_below(predictor, layers):
    """The maps of the layers that both have, which least squares finds up to its ridge: the identity."""
    q = predictor.numbers // predictor.sizes[0]
    maps = predictor.maps.reshape(predictor.sizes[0], -1).copy()
    identity = np.concatenate([np.eye(q, dtype=np.float32), np.zeros((1, q), np.float32)]).reshape(-1)
    maps[:layers] = identity
    return replace(predictor, maps=maps.reshape(-1))


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
    few = first(calibration, 8)
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
    errors = np.log(np.maximum([attention_error(layer, its) for layer, its in zip(cache, decoded)], 1e-300))
    return {
        "held_bits": digits(reference.held_bits(data, cache), 5),
        "error": digits(float(np.exp(errors[1:].mean()))),
        "error_of_the_upper_layers": digits(float(np.exp(errors[len(errors) // 3 :].mean()))),
        "encode_seconds": digits(middle - start),
        "decode_seconds": digits(end - middle),
    }
