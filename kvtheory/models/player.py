"""A real causal language model as a `kvtheory.prediction.Player`: one token a forward pass, so that encoder and decoder run the same plan."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory.models import inside
from kvtheory.models.capture import plan
from kvtheory.prediction.player import TokenKV

__all__ = ["ModelPlayer"]


class ModelPlayer:
    """model: a causal LM of transformers in evaluation mode (`kvtheory.models.load`), float32 for caches that are to be trusted."""

    def __init__(self, model: Any) -> None:
        if model.training:
            raise ValueError("model: expected evaluation mode (dropout off), got training mode; call model.eval()")
        config = model.config.get_text_config()
        self.model = model
        self.vocabulary = int(config.vocab_size)
        self.layers = len(inside.stack(model).layers)
        known = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in known else "past_key_values"
        self.digest = _digest(model)
        #: weights that a token's pass reads; of an embedding table it reads a row
        self._weights = sum(int(p.numel()) for name, p in model.named_parameters() if "embed_tokens" not in name)
        if config.tie_word_embeddings:
            self._weights += self.vocabulary * int(config.hidden_size)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._attention = 4 * self.layers * int(config.num_attention_heads) * int(head_dim)

    @property
    def plan(self) -> Mapping[str, Any]:
        its = plan(self.model)
        return {
            **its,
            "compute": str(self.model.dtype).removeprefix("torch."),
            "prefill": "token by token, batch of one",
        }

    @property
    def flops(self) -> int:
        return 2 * self._weights

    def attention_flops(self, tokens: int) -> int:
        return self._attention * tokens

    def start(self) -> _ModelPlay:
        return _ModelPlay(self)


class _ModelPlay:
    def __init__(self, player: ModelPlayer) -> None:
        from transformers import DynamicCache

        self.player = player
        self.cache: Any = DynamicCache()
        self.logits: NDArray[Any] | None = None

    def _run(self, token: int, cache: Any) -> Any:
        import torch

        with torch.inference_mode():
            return self.player.model(
                input_ids=torch.tensor([[int(token)]]),
                use_cache=True,
                logits_to_keep=1,
                **{self.player.cache_argument: cache},
            )

    def feed(self, token: int) -> list[TokenKV]:
        out = self._run(token, self.cache)
        self.logits = out.logits[0, -1].float().numpy()
        return [TokenKV(_array(layer.keys[0, :, -1]), _array(layer.values[0, :, -1])) for layer in self.cache.layers]

    def put(self, kv: Sequence[TokenKV]) -> None:
        import torch

        with torch.inference_mode():
            for i, one in enumerate(kv):
                self.cache.update(self._tensor(one.keys), self._tensor(one.values), i)
        self.logits = None

    def revise(self, kv: Sequence[TokenKV]) -> None:
        import torch

        with torch.inference_mode():  # the cache's tensors were made in it
            for layer, one in zip(self.cache.layers, kv):
                layer.keys[:, :, -1:] = self._tensor(one.keys)
                layer.values[:, :, -1:] = self._tensor(one.values)

    def candidates(self, tokens: ArrayLike) -> list[TokenKV]:
        found = []
        length = self.cache.get_seq_length()
        for token in np.asarray(tokens):
            out = self._run(int(token), self.cache)
            found.append(
                [(layer.keys[0, :, -1].clone(), layer.values[0, :, -1].clone()) for layer in self.cache.layers]
            )
            del out
            for layer in self.cache.layers:  # one step back
                layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]
        return [
            TokenKV(
                np.stack([_array(one[i][0]) for one in found]),
                np.stack([_array(one[i][1]) for one in found]),
            )
            for i in range(self.player.layers)
        ]

    def _tensor(self, array: NDArray[Any]) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(self.player.model.dtype)[None, :, None]


def _array(tensor: Any) -> NDArray[Any]:
    return tensor.float().numpy().copy()


def _digest(model: Any) -> bytes:
    """The first 16 bytes of the SHA-256 of names, shapes, element types and bytes of all weights."""
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        total.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        total.update(tensor.detach().contiguous().view(torch.uint8).numpy().data)
    return total.digest()[:16]
