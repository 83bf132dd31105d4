"""Tell a model to read compressed caches: its attention function is a registered one, and a hook tells the cache of each pass.

The cache itself is shown keys and values alone. Which columns of a batch are padding and where tokens stand is an argument of the model,
and reaches the cache by a hook before the forward of the module that holds the layers; queries reach it from the attention function (reference.hf.attention).
"""

from __future__ import annotations

import inspect
import weakref
from dataclasses import dataclass
from typing import Any

from kvtheory.models import inside
from kvtheory.models.inside import UnsupportedModel
from reference.hf import attention, facts
from reference.hf.cache import CompressedCache

__all__ = ["attach", "detach"]


@dataclass(eq=False)
class _Attached:
    facts: tuple[facts.LayerFacts, ...]
    hook: Any
    plain: str


_attached: weakref.WeakKeyDictionary[Any, _Attached] = weakref.WeakKeyDictionary()


def attach(model: Any) -> Any:
    """`model`, a decoder-only causal LM of transformers with attention "sdpa" or "eager", ready for a CompressedCache. Cheap when repeated.

    Its attention implementation becomes "kvtheory_sdpa" or "kvtheory_eager", which on other caches computes the same bits as before. One
    short forward pass shows how it turns and reads its keys. Raises UnsupportedModel (a ValueError) for attention that a Layer cannot
    state: caps, sinks, biases, chunks, shared caches, rotations that change with the length.
    """
    if not hasattr(model, "base_model") or not hasattr(model, "config"):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    base = _base(model)
    attention.register()
    name = model.config.get_text_config()._attn_implementation
    if base in _attached and name in attention.NAMES.values():
        return model
    plain = next((plain for plain, own in attention.NAMES.items() if name in (plain, own)), None)
    if plain is None:
        raise ValueError(f'model: expected attention "sdpa" or "eager", got {name!r}')
    found = facts.find(model)
    _switch(model, attention.NAMES[plain])
    if base in _attached:
        _attached[base].hook.remove()
    hook = base.register_forward_pre_hook(_before_pass, with_kwargs=True)
    _attached[base] = _Attached(found, hook, plain)
    return model


def detach(model: Any) -> Any:
    """`model` as it was before `attach`."""
    entry = _attached.pop(_base(model), None)
    if entry is not None:
        entry.hook.remove()
        _switch(model, entry.plain)
    return model


def _base(model: Any) -> Any:
    """The module that holds the list of layers: whoever runs them goes through its forward."""
    return inside.stack(model).owner


def _switch(model: Any, name: str) -> None:
    model.set_attn_implementation(name)
    config = model.config.get_text_config()
    if config._attn_implementation != name:
        raise UnsupportedModel(
            f"model: {type(model).__name__} does not let its attention function be chosen; log-weights cannot reach it"
        )


def _before_pass(base: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    cache = next((options[name] for name in ("cache", "past_key_values") if options.get(name) is not None), None)
    given = dict(options)
    if args:
        given |= inspect.signature(base.forward).bind_partial(*args).arguments
        cache = cache or given.get("cache", given.get("past_key_values"))
    if not isinstance(cache, CompressedCache):
        return
    if base.training:
        raise ValueError("model: expected evaluation mode (dropout off), got training mode; call model.eval()")
    entry = _attached[base]
    name = base.config.get_text_config()._attn_implementation
    if name != attention.NAMES[entry.plain]:
        raise ValueError(
            f"model: expected attention {attention.NAMES[entry.plain]!r}, got {name!r}; call reference.hf.attach again"
        )
    tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    if tokens is None:
        raise ValueError("input_ids: expected them or inputs_embeds, got neither")
    batch, columns = tokens.shape[:2]
    cache.begin(base, entry.facts, int(batch), int(columns), given.get("attention_mask"), given.get("position_ids"))
