"""See what a forward pass of a transformers model does inside its attention, without changing a bit of it.

transformers looks its attention function up in a table by name. While `watching`, the entry of the model's own implementation is
a function that notes its arguments (queries and keys after rotation, values, scale, mask) and calls the original. The rotation
function of the model's module is wrapped likewise, which shows the keys before it; a hook on the key projection shows its input.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvtheory.models.inside import KEY_NAMES, NORM_NAMES, UnsupportedModel, child, output_projection

_LOCK = threading.RLock()  # the tables that are wrapped belong to the process


@dataclass
class Seen:
    """One attention call. The tensors are the model's own, so that gradients can be asked of them; their first axis is a batch of 1.

    query (1, query_heads, tokens, d), key (1, kv_heads, tokens, d), value (1, kv_heads, tokens, dv).
    """

    index: int
    module: Any
    query: Any
    key: Any
    value: Any
    scale: float
    window: int | None  # a query sees this many last tokens, itself included; None: all
    key_pre_rope: Any | None  # (1, kv_heads, tokens, r), what the rotation was given; None: the layer rotates nothing
    inputs: Any | None  # (1, tokens, model_dim), what the key projection read
    normed: bool  # whether a norm stands between the key projection and the keys
    output: Any  # (1, tokens, query_heads, value_dim): what the output projection must read


@contextlib.contextmanager
def watching(model: Any, see: Callable[[Seen], None]) -> Iterator[None]:
    """While open, `see` is called for each attention call of `model` on a batch of one, right after it was computed."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = model.config.get_text_config()._attn_implementation
    original = None if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
    inputs: list[Any] = []  # what the key projection of the layer under way read
    rotated: list[Any] = []  # its keys before rotation
    count = 0

    def attention(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *args: Any, **options: Any
    ) -> Any:
        nonlocal count
        compute = original or sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        result = compute(module, query, key, value, attention_mask, *args, **options)
        index = getattr(module, "layer_idx", None)
        index = count if index is None else int(index)
        count += 1
        refuse_unspeakable(module, index, query, options)
        scale = options.get("scaling")
        see(
            Seen(
                index=index,
                module=module,
                query=query,
                key=key,
                value=value,
                scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
                window=window_of(attention_mask, query.shape[-2], index),
                key_pre_rope=rotated.pop() if rotated else None,
                inputs=inputs.pop() if inputs else None,
                normed=child(module, NORM_NAMES) is not None,
                output=result[0],
            )
        )
        inputs.clear()
        rotated.clear()
        return result

    def note_inputs(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        inputs[:] = [arguments[0] if arguments else next(iter(options.values()))]

    def note_rotation(function: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(function)

        def rotate(*args: Any, **options: Any) -> Any:
            bound = parameters.bind(*args, **options)
            bound.apply_defaults()
            if "k" in bound.arguments:
                key = bound.arguments["k"]
                heads_second = bound.arguments.get("unsqueeze_dim", 1) == 1
                rotated[:] = [key if heads_second else key.transpose(1, 2)]
            return function(*args, **options)

        return rotate

    with _LOCK, contextlib.ExitStack() as stack:
        # the table has entries of its own before those of the library; ours goes there, and what was there comes back
        own = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
        stack.callback(setattr, ALL_ATTENTION_FUNCTIONS, "_local_mapping", own)
        ALL_ATTENTION_FUNCTIONS[name] = attention
        for path, module in model.named_modules():
            if path.rpartition(".")[2] in KEY_NAMES:
                stack.callback(module.register_forward_pre_hook(note_inputs, with_kwargs=True).remove)
        for home in {type(module).__module__ for module in model.modules()}:
            names: Any = sys.modules[home]
            function = getattr(names, "apply_rotary_pos_emb", None)
            if callable(function):
                names.apply_rotary_pos_emb = note_rotation(function)
                stack.callback(setattr, names, "apply_rotary_pos_emb", function)
        yield


def refuse_unspeakable(module: Any, index: int, query: Any, options: dict[str, Any]) -> None:
    """UnsupportedModel for attention that is not softmax(scale q.k) over visible tokens, so that no Layer could state it."""
    if query.shape[0] != 1:
        raise ValueError(f"model: expected a batch of one sequence, got {query.shape[0]}")
    for option, what in (
        ("softcap", "caps its logits"),
        ("position_bias", "adds a position bias"),
        ("s_aux", "has sink logits"),
    ):
        if options.get(option) is not None:
            raise UnsupportedModel(f"model: attention of layer {index} {what} ({option}); a Layer cannot state that")
    causal = options.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise UnsupportedModel(f"model: attention of layer {index} is not causal")


def window_of(mask: Any, tokens: int, index: int) -> int | None:
    """How many last tokens a query sees by this attention mask; None if all. A mask that is neither is refused."""
    if mask is None:
        return None
    import torch

    allowed = mask[0, 0, :, :tokens]
    if allowed.dtype != torch.bool:
        allowed = allowed == 0
    window = int(allowed.sum(-1).max())
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    if not torch.equal(allowed.cpu(), (age >= 0) & (age < window)):
        raise UnsupportedModel(f"model: the attention mask of layer {index} is neither causal nor a sliding window")
    return None if window >= tokens else window


def check_output(seen: Seen, passed: set[int]) -> None:
    """Arm a check that the output projection reads exactly the attention output, so that W_O is the whole way out.

    The projection runs right after `seen` was shown; its index is then in `passed`.
    """
    import torch

    def check(module: Any, arguments: tuple[Any, ...]) -> None:
        hook.remove()
        if not torch.equal(arguments[0].reshape(-1), seen.output.reshape(-1)):
            raise UnsupportedModel(
                f"model: layer {seen.index} changes the attention output before its output projection; W_O alone cannot state it"
            )
        passed.add(seen.index)

    hook = output_projection(seen.module).register_forward_pre_hook(check)
