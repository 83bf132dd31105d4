"""Small real models: fetch the weights, load the model, capture its cache on a text, run it on a replaced cache. torch is imported only where it is used."""

from __future__ import annotations

from kvtheory.models.capture import UnsupportedModel, capture, capture_to, encode
from kvtheory.models.fetch import MODELS, Model, ModelUnavailable, WrongWeights, available, cache_folder, fetch
from kvtheory.models.load import load
from kvtheory.models.runner import Evaluation, Runner

__all__ = [
    "MODELS",
    "Evaluation",
    "Model",
    "ModelUnavailable",
    "Runner",
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
