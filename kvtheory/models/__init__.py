"""Small real models: fetch the weights, load the model, capture its cache on a text. torch is imported only where it is used."""

from __future__ import annotations

from kvtheory.models.capture import UnsupportedModel, capture, capture_to, encode
from kvtheory.models.fetch import MODELS, Model, ModelUnavailable, WrongWeights, available, cache_folder, fetch
from kvtheory.models.load import load

__all__ = [
    "MODELS",
    "Model",
    "ModelUnavailable",
    "UnsupportedModel",
    "WrongWeights",
    "available",
    "cache_folder",
    "capture",
    "capture_to",
    "encode",
    "fetch",
    "load",
]
