"""The attention functions that read a compressed cache: transformers' own ones, with a mask that fits what is left of each head.

Registered under the names "kvtheory_sdpa" and "kvtheory_eager" in transformers' AttentionInterface, with the mask functions of "sdpa"
and "eager". Called on any other cache they are those two and nothing else. On the keys of a CompressedLayer the mask becomes

    mask_h[i, s] = the model's mask [i, column of slot s in head h] + log_weight_h[s],      -inf for padding

where a column is a token's place in the padded batch. Where every token is left in its place with weight 1, the mask is not touched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from kvtheory.models.inside import UnsupportedModel

__all__ = ["MARK", "NAMES", "register", "rewritten"]

#: attribute of the keys that a CompressedLayer hands to attention: the layer itself
MARK = "kvtheory_layer"
#: implementation of a plain model -> the one that also reads compressed caches
NAMES = {"sdpa": "kvtheory_sdpa", "eager": "kvtheory_eager"}


def register() -> None:
    """Make both names known to transformers; cheap when repeated."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

    for plain, mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        AttentionInterface.register(NAMES[plain], _function(plain))
        AttentionMaskInterface.register(NAMES[plain], mask)


def _function(plain: str) -> Callable[..., Any]:
    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        layer = getattr(key, MARK, None)
        if layer is not None:
            delattr(key, MARK)  # a layer holds its keys, and they would hold it
            attention_mask = rewritten(
                attention_mask, query, layer.columns, layer.log_weights, layer.length, plain == "eager"
            )
        result = _compute(plain, module)(module, query, key, value, attention_mask, *args, **options)
        if layer is not None:
            layer.attended(query)
        return result

    return attention


def _compute(plain: str, module: Any) -> Callable[..., Any]:
    """What the plain model would have called."""
    if plain == "eager":
        home: Any = sys.modules[type(module).__module__]
        return home.eager_attention_forward  # type: ignore[no-any-return]
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"]  # type: ignore[no-any-return]


def rewritten(mask: Any, query: Any, columns: Any, log_weights: Any, length: int, needs_floats: bool) -> Any:
    """The mask over the slots of a layer, from the model's own `mask` over its `length` columns.

    mask: (1 or batch, 1, q, length), True or 0 where a query looks; None: it looks everywhere. columns: (batch, kv_heads, s) int64, -1 for
    padding; (batch, 1, s) where the heads have the same; None: slot s is column s. log_weights: (batch, kv_heads, s), or None where all
    are 0. Gives (batch, 1 or query_heads, q, s): one for all heads where they have the same. UnsupportedModel for another kind of mask.
    """
    if columns is None and log_weights is None:
        return mask
    batch, heads, queries, _ = query.shape
    if mask is None:
        # with one query there is nothing to hide; with more, causality would be left to the kernel, which knows no columns
        if queries != 1:
            raise UnsupportedModel(f"model: no attention mask for {queries} queries over a cache")
        looks = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=query.device)
    else:
        if mask.dim() != 4 or mask.shape[1] != 1 or mask.shape[3] < length:
            raise UnsupportedModel(
                f"model: expected one attention mask over {length} tokens for all heads, got shape {tuple(mask.shape)}"
            )
        looks = mask[..., :length]
        looks = (looks if looks.dtype == torch.bool else looks == 0).expand(batch, 1, queries, length)
    visible = looks
    if columns is not None:
        own = columns.shape[1]
        index = columns.clamp(min=0)[:, :, None].expand(-1, -1, queries, -1)
        visible = looks.expand(-1, own, -1, -1).gather(3, index) & (columns >= 0)[:, :, None]
    # a query of a padding token sees nothing; what it reads is never used, but must not be NaN
    visible = visible | ~visible.any(dim=-1, keepdim=True)
    if log_weights is not None and visible.shape[1] != log_weights.shape[1]:
        visible = visible.expand(-1, log_weights.shape[1], -1, -1)
    if visible.shape[1] != 1:
        visible = visible.repeat_interleave(heads // visible.shape[1], dim=1)
    elif log_weights is not None:
        visible = visible.expand(-1, heads, -1, -1)
    if log_weights is None and not needs_floats:
        return visible
    added = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
    if log_weights is not None:
        weights = log_weights.repeat_interleave(heads // log_weights.shape[1], dim=1)
        added = weights[:, :, None].to(query.dtype).expand(visible.shape)
    return added.masked_fill(~visible, -torch.inf)
