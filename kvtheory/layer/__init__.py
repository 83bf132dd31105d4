"""The records that everything stands on: Layer, Cache, Decoded, Rope."""

from kvtheory.layer.decoded import Decoded
from kvtheory.layer.record import Head, Layer
from kvtheory.layer.rope import Rope
from kvtheory.layer.store import Cache

__all__ = ["Cache", "Decoded", "Head", "Layer", "Rope"]
