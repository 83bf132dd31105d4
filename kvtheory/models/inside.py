"""The parts of a transformers model that a capture needs: its layers, its projections split by head, its rotation.

Nothing here trusts a name alone. A name is a guess; `capture` checks each guess against what the forward pass showed (the
output projection reads exactly the attention output, the rotation turns the keys before it into the keys after it, the key
weight turns the layer's input into the keys), and refuses a model for which a guess fails.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Rope

Array = NDArray[Any]

OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")
KEY_NAMES = ("k_proj", "c_attn", "query_key_value", "qkv_proj")
NORM_NAMES = ("k_norm", "k_layernorm", "key_layernorm")


class UnsupportedModel(ValueError):
    """The model computes something that a Layer cannot state, or hides a part that was asked for; the message says what."""


@dataclass(frozen=True)
class Stack:
    """The list of decoder layers and where it hangs: `getattr(owner, name)` is the ModuleList."""

    owner: Any
    name: str

    @property
    def layers(self) -> Any:
        return getattr(self.owner, self.name)


def stack(model: Any) -> Stack:
    """The decoder layers of a causal LM: the outermost ModuleList as long as the config says there are layers."""
    from torch.nn import ModuleList

    wanted = model.config.get_text_config().num_hidden_layers
    found = [
        (path.count("."), path)
        for path, module in model.named_modules()
        if isinstance(module, ModuleList) and len(module) == wanted
    ]
    if not found:
        raise UnsupportedModel(f"model: no list of {wanted} layers in {type(model).__name__}")
    path = min(found)[1]
    owner, _, name = path.rpartition(".")
    return Stack(model.get_submodule(owner), name)


def child(module: Any, names: tuple[str, ...]) -> tuple[str, Any] | None:
    """The first of `names` that `module` has as a submodule, with it."""
    return next(((name, found) for name in names if (found := getattr(module, name, None)) is not None), None)


def output_projection(attention: Any) -> Any:
    """The module that multiplies the concatenated heads by W_O."""
    found = child(attention, OUTPUT_NAMES)
    if found is None:
        raise UnsupportedModel(f"model: no output projection ({', '.join(OUTPUT_NAMES)}) in {type(attention).__name__}")
    return found[1]


def matrix(projection: Any) -> Array:
    """The weight of a projection as (in, out), so that its output is x @ matrix (+ bias). float32."""
    kind = type(projection).__name__
    weight = getattr(projection, "weight", None)
    if weight is None or weight.dim() != 2 or not weight.is_floating_point() or kind not in ("Linear", "Conv1D"):
        raise UnsupportedModel(f"model: expected a plain Linear or Conv1D projection, got {kind}")
    array = weight.detach().float().cpu().numpy()
    return array if kind == "Conv1D" else array.T  # transformers' Conv1D stores (in, out), Linear (out, in)


def split_output(projection: Any, query_heads: int) -> Array:
    """W_O split by head, (query_heads, value_dim, model_dim): rows h*dv .. (h+1)*dv of the (in, out) matrix are head h."""
    weight = matrix(projection)
    return np.ascontiguousarray(weight.reshape(query_heads, -1, weight.shape[1]))


def split_key_value(attention: Any, query_heads: int, kv_heads: int, d: int, dv: int) -> dict[str, Array]:
    """key_weight (kv_heads, d, model_dim), value_weight (kv_heads, dv, model_dim), and key_bias, value_bias where there are any.

    Keys (before QK-norm and rotation) are inputs @ key_weight[h].T + key_bias[h], likewise values.
    """
    found = child(attention, KEY_NAMES)
    if found is None:
        raise UnsupportedModel(f"model: no key projection ({', '.join(KEY_NAMES)}) in {type(attention).__name__}")
    name, projection = found
    parts: dict[str, tuple[Any, Any]] = {"key": (projection, slice(None)), "value": (None, slice(None))}
    if name == "k_proj":
        parts["value"] = (attention.v_proj, slice(None))
    else:
        q, k, v = query_heads * d, kv_heads * d, kv_heads * dv
        rows = np.arange(q + k + v)
        if name == "query_key_value" and query_heads == kv_heads and d == dv:
            # GPT-NeoX: [head][q, k, v][channel]
            rows = rows.reshape(kv_heads, 3, d).transpose(1, 0, 2).reshape(-1)
        parts = {"key": (projection, rows[q : q + k]), "value": (projection, rows[q + k :])}
    out: dict[str, Array] = {}
    for part, (module, chosen) in parts.items():
        width = d if part == "key" else dv
        weight = matrix(module).T[chosen]
        if weight.shape[0] != kv_heads * width:
            raise UnsupportedModel(
                f"model: {part} weight has {weight.shape[0]} rows, expected {kv_heads} heads of {width}"
            )
        out[f"{part}_weight"] = np.ascontiguousarray(weight.reshape(kv_heads, width, -1))
        bias = getattr(module, "bias", None)
        if bias is not None:
            out[f"{part}_bias"] = bias.detach().float().cpu().numpy()[chosen].reshape(kv_heads, width).copy()
    return out


def rotations(model: Any, layer_type: str | None) -> list[tuple[Array, float]]:
    """Candidates (inv_freq, attention_scaling) from the model's rotary modules; those made for `layer_type` first.

    Read them after the forward pass: models that stretch their frequencies with the length have done so by then.
    """
    found: list[tuple[bool, Any, float]] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name:
                scaling = getattr(module, name.removesuffix("inv_freq") + "attention_scaling", 1.0)
                found.append((name != f"{layer_type}_inv_freq", buffer.detach().float().cpu().numpy(), float(scaling)))
    found.sort(key=lambda candidate: candidate[0])
    return [(inv_freq.astype(np.float64), scaling) for _, inv_freq, scaling in found]


def rope_sample(tokens: int) -> NDArray[np.int64]:
    """Up to 64 positions spread over the text: enough to tell one rotation from another, which differ at most of them."""
    return np.unique(np.linspace(0, tokens - 1, 64).astype(np.int64))


def find_rope(
    before: Array, after: Array, positions: Array, candidates: list[tuple[Array, float]], tolerance: float = 1e-3
) -> Rope:
    """The Rope that turns keys `before` (kv_heads, n, w) into the first w channels of `after` (kv_heads, n, d) at `positions` (n,).

    Models hand their rotation either the channels that turn, or all of them (w = d) and let the rest pass.

    tolerance: relative L2. Models take cosines of float32 angles, Rope of float64 ones; at position p the angle differs by
    p 2^-24 at most, 1e-3 at position 16,384. A wrong layout or frequency differs by about 1.
    """
    width = before.shape[2]
    target = after[..., :width].astype(np.float64)
    errors = []
    for inv_freq, scaling in candidates:
        if 2 * len(inv_freq) > width:
            continue
        for layout in ("half", "interleaved"):
            rope = Rope(inv_freq, layout, scaling)  # type: ignore[arg-type]
            error = float(
                np.linalg.norm(rope.apply(before, positions) - target) / max(float(np.linalg.norm(target)), 1e-30)
            )
            if error < tolerance:
                return rope
            errors.append(error)
    raise UnsupportedModel(
        f"model: none of its {len(candidates)} sets of rotary frequencies turns the keys before rotation into those after it "
        f"(relative errors {', '.join(f'{e:.2g}' for e in errors) or 'none: no set fits ' + str(width) + ' channels'})"
    )
