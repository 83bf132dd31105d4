"""What a codec must know of a model's layers beside their keys and values: rotation, scale, output projection, window.

Found by one short forward pass that is watched from inside, as a capture is (kvtheory/models/watch.py): no name is trusted alone, and
a model for which a guess fails is refused. In 16 bits a model's own rotation is rounded, hence the wider tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvtheory.layer import Rope
from kvtheory.models import inside, watch
from kvtheory.models.inside import UnsupportedModel

__all__ = ["LayerFacts", "find"]

#: tokens of the pass; frequencies of one model differ within a few of them
PROBE = 64
#: rotations that change with the length of the text, so that keys of one cache would have been turned by several
_GROWING = ("dynamic", "longrope")


@dataclass(frozen=True, eq=False)
class LayerFacts:
    """Of layer `index`: sizes, scale of the logits, rotation of the keys or None, W_O (query_heads, value_dim, model_dim) float32,
    and how many last tokens a query sees, itself included (None: all)."""

    index: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    rope: Rope | None
    output_proj: NDArray[np.float32]
    window: int | None

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerFacts:
        return self


def find(model: Any) -> tuple[LayerFacts, ...]:
    """The facts of every layer of `model`, in order. UnsupportedModel for one whose attention a Layer cannot state."""
    from transformers import DynamicCache

    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"model: expected a decoder alone, got the encoder and decoder of {type(model).__name__}"
        )
    growing = _rope_types(getattr(config, "rope_parameters", None)) & set(_GROWING)
    if growing:
        raise UnsupportedModel(f"model: its rotation ({growing.pop()}) changes with the length of the text")
    depth = len(inside.stack(model).layers)
    tokens = min(PROBE, getattr(config, "max_position_embeddings", None) or PROBE)
    ids = (torch.arange(tokens, device=model.device) * 7 + 3) % int(config.vocab_size)
    seen: dict[int, watch.Seen] = {}
    cache = DynamicCache()
    training = model.training
    try:
        with torch.no_grad(), watch.watching(model, lambda one: seen.update({one.index: one})):
            model.eval()
            model.base_model(ids[None], use_cache=True, **{cache_argument(model.base_model): cache})
    finally:
        model.train(training)
    if sorted(seen) != list(range(depth)):
        raise UnsupportedModel(
            f"model: {len(seen)} of {depth} layers of {type(model).__name__} showed an attention call; the others have none, or do not "
            f"go through transformers' attention interface"
        )
    if len(cache.layers) != depth or any(layer.get_seq_length() != tokens for layer in cache.layers):
        raise UnsupportedModel(f"model: expected {depth} layers with a cache of their own, got {len(cache.layers)}")
    rotates = any(one.key_pre_rope is not None for one in seen.values())
    return tuple(_of(model, config, i, seen[i], rotates, tokens) for i in range(depth))


def cache_argument(module: Any) -> str:
    """The name under which `module.forward` takes its cache: transformers renamed it in 5.24."""
    import inspect

    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


def _of(model: Any, config: Any, index: int, one: watch.Seen, rotates: bool, tokens: int) -> LayerFacts:
    types = getattr(config, "layer_types", None)
    candidates = inside.rotations(model, str(types[index]) if types else None)
    key, value, query = one.key[0], one.value[0], one.query[0]
    rope = None
    if one.key_pre_rope is not None:
        where = inside.rope_sample(tokens)
        before, after = (x.float().cpu().numpy()[:, where] for x in (one.key_pre_rope[0], key))
        tolerance = 1e-3 + 8 * torch.finfo(key.dtype).eps * (key.dtype != torch.float32)
        rope = inside.find_rope(before, after, where, candidates, tolerance)
    elif candidates and not rotates:
        raise UnsupportedModel(
            f"model: layer {index} has rotary frequencies, but how {type(model).__name__} turns its keys was not seen"
        )
    heads = int(query.shape[0])
    return LayerFacts(
        index,
        query_heads=heads,
        kv_heads=int(key.shape[0]),
        head_dim=int(key.shape[2]),
        value_dim=int(value.shape[2]),
        scale=one.scale,
        rope=rope,
        output_proj=inside.split_output(inside.output_projection(one.module), heads),
        window=one.window or _window(config, types, index),
    )


def _window(config: Any, types: Any, index: int) -> int | None:
    """A window longer than the pass, which its mask does not show."""
    if types and types[index] == "chunked_attention":
        raise UnsupportedModel(f"model: layer {index} attends in chunks; a Layer cannot state that")
    if types and types[index] != "sliding_attention":
        return None
    window = getattr(config, "sliding_window", None)
    return None if window is None else int(window)


def _rope_types(parameters: Any) -> set[str]:
    """Every rope_type in a config's parameters, which may have one set for each kind of layer."""
    if not isinstance(parameters, Mapping):
        return set()
    own = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return own.union(*(_rope_types(value) for value in parameters.values()))
