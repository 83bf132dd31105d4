"""Capture the true KV cache of a real model on a text, with the queries that read it, as a `kvtheory.Cache`.

One teacher-forced prefill in float32, watched from inside (models/watch.py); layers are handed on as the pass reaches them, so
that `capture_to` holds one at a time. Logits are formed in blocks of tokens, never all at once. The Fisher diagonals take a second
walk, backwards, one layer at a time: each layer is run again from its stored input, and the gradient is carried on to the one
before, so that memory stays that of one layer however deep the model.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory.layer import Cache, Layer, Rope
from kvtheory.models import inside, watch
from kvtheory.models.inside import UnsupportedModel
from kvtheory.models.load import origin

__all__ = ["UnsupportedModel", "capture", "capture_to", "encode", "plan"]

Array = NDArray[Any]
#: told (steps done, steps in all, what is going on)
Progress = Callable[[int, int, str], None]

#: numbers of a block of logits: 32 MB in float32, twice that in float64
_LOGITS_AT_ONCE = 1 << 23


def capture(
    model: Any,
    tokenizer: Any,
    source: str | ArrayLike,
    *,
    tokens: int | None = None,
    layers: Sequence[int] | None = None,
    query_positions: ArrayLike | None = None,
    inputs: bool = False,
    fisher: bool = False,
    progress: Progress | None = None,
    text_name: str | None = None,
) -> Cache:
    """The cache of `model` on `source`, in memory. Arrays are float32.

    model: a causal LM of transformers in float32 (`kvtheory.models.load`). tokenizer: its tokenizer, or None if `source` is ids.
    source: a text, or its token ids (n,). tokens: how many to take from its start; None: all. layers: which (negative from the
    end); None: all. query_positions: (queries,) positions whose queries are kept, in the order given; None: all.

    Each Layer has keys (after RoPE; `layer.rope.undo(keys, positions)` gives them before), values, queries, query_positions,
    output_proj, rope, scale and index. The output projection's bias, if any, is left out: it is the same for every cache.
    A layer with a sliding window shorter than the text holds all tokens, and its `window` says how many of them a query sees.

    inputs: extras "inputs" (tokens, model_dim), what the key projection reads, "key_weight" (kv_heads, d, model_dim), "value_weight"
    (kv_heads, dv, model_dim), and "key_bias", "value_bias" (kv_heads, d or dv) where the model has them: before QK-norm and rotation
    keys are inputs @ key_weight[h].T + key_bias[h].
    fisher: extras "key_fisher", "key_fisher_pre_rope" (kv_heads, d) and "value_fisher" (kv_heads, dv): the mean over tokens of the
    squared derivative of L = -sum_t ln P(token t | before t) (nats, this one text) by the keys as cached, the keys before rotation,
    and the values.

    The Cache has token ids and surprisal_bits[t] = -log2 P(token t | before t), float64 from float32 logits; surprisal_bits[0] is 0 when
    token 0 is the tokenizer's BOS token (it says nothing), else log2(vocabulary). meta: model, weights, plan, text.

    Raises UnsupportedModel (a ValueError) for attention that no Layer can state, ValueError for bad arguments.
    """
    with _Capture(
        model, tokenizer, source, tokens, layers, query_positions, inputs, fisher, progress, text_name
    ) as job:
        job.run(spill=None)
        return job.cache()


def capture_to(
    path: str | os.PathLike[str],
    model: Any,
    tokenizer: Any,
    source: str | ArrayLike,
    *,
    tokens: int | None = None,
    layers: Sequence[int] | None = None,
    query_positions: ArrayLike | None = None,
    inputs: bool = False,
    fisher: bool = False,
    progress: Progress | None = None,
    text_name: str | None = None,
) -> Cache:
    """`capture` straight into the file `path` (atomic), with one layer in memory at a time; returns the cache read lazily from it.

    Arguments as `capture`. Needs twice the cache's size on the disk of `path` while it runs.
    """
    path = Path(path)
    with (
        tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as spill,
        _Capture(model, tokenizer, source, tokens, layers, query_positions, inputs, fisher, progress, text_name) as job,
    ):
        job.run(spill=Path(spill))
        job.cache().save(path)
    return Cache.load(path)


def encode(tokenizer: Any, text: str, tokens: int | None = None) -> NDArray[np.int64]:
    """The first `tokens` token ids of `text`, with the special tokens that the tokenizer itself puts in front. (n,) int64.

    ValueError if the text is too short.
    """
    if tokens is not None and len(text) > 16 * tokens + 64:
        # a token is seldom 16 characters: cut first, tokenise little; the last tokens before the cut are not taken
        head = np.asarray(tokenizer(text[: 16 * tokens + 64])["input_ids"], dtype=np.int64)
        if len(head) >= tokens + 16:
            return head[:tokens]
    ids = np.asarray(tokenizer(text)["input_ids"], dtype=np.int64)
    if tokens is not None and len(ids) < tokens:
        raise ValueError(f"source: expected at least {tokens} tokens, the text has {len(ids)}")
    return ids[:tokens]


def plan(model: Any) -> dict[str, Any]:
    """What the bits of a capture depend on besides model and text: versions, threads, kernels, CPU. For meta and for comparison."""
    import platform
    from importlib.metadata import version

    import torch

    return {
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": str(model.device),
        "threads": torch.get_num_threads(),
        "attention": model.config.get_text_config()._attn_implementation,
        "compute": "float32",
        "prefill": "whole text at once, no cache, batch of one",
    }


class _Capture:
    """One capture under way: what was asked, and what the passes have shown so far."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        source: Any,
        tokens: int | None,
        layers: Sequence[int] | None,
        query_positions: Any,
        inputs: bool,
        fisher: bool,
        progress: Progress | None,
        text_name: str | None,
    ) -> None:
        import torch

        self.model, self.tokenizer, self.inputs, self.fisher, self.text_name = (
            model,
            tokenizer,
            inputs,
            fisher,
            text_name,
        )
        wrong = {str(p.dtype) for p in model.parameters() if p.is_floating_point()} - {"torch.float32"}
        if wrong:
            raise ValueError(f"model: expected float32 weights (load(..., dtype='float32')), got {sorted(wrong)[0]}")
        if model.training:
            raise ValueError("model: expected evaluation mode (dropout off), got training mode; call model.eval()")
        self.stack = inside.stack(model)
        self.depth = len(self.stack.layers)
        self.ids = _ids(tokenizer, source, tokens, model.config.get_text_config().vocab_size)
        self.input_ids = torch.from_numpy(self.ids)[None].to(model.device)
        self.wanted = _wanted(layers, self.depth)
        self.query_positions = _query_positions(query_positions, len(self.ids))
        self.shown: dict[int, dict[str, Any]] = {}  # per layer: what becomes its Layer; arrays, or files that hold them
        self.passed: set[int] = set()  # layers whose output projection was seen to read the attention output
        self.windows: dict[int, int] = {}
        self.bits = np.zeros(len(self.ids))
        self.spill: Path | None = None
        self.steps = self.depth * (2 if fisher else 1) + 1
        self.report: Progress = progress or (lambda done, total, what: None)

    def __enter__(self) -> _Capture:
        self._free = contextlib.ExitStack()
        for parameter in self.model.parameters():  # gradients by the cache are wanted, never by the weights
            self._free.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        return self

    def __exit__(self, *failure: Any) -> None:
        self._free.close()

    def run(self, spill: Path | None) -> None:
        import torch

        self.spill = spill
        hooks = contextlib.ExitStack()
        entries: dict[int, tuple[Any, dict[str, Any]]] = {}  # how each decoder layer was called
        with hooks, torch.no_grad(), watch.watching(self.model, self._see):
            for i, layer in enumerate(self.stack.layers):
                hooks.callback(layer.register_forward_hook(partial(self._left, i)).remove)
                if self.fisher:
                    hook = layer.register_forward_pre_hook(partial(_note_call, entries, i), with_kwargs=True)
                    hooks.callback(hook.remove)
            self.model.base_model(input_ids=self.input_ids, use_cache=False)
        missing = sorted(set(self.wanted) - set(self.shown))
        if missing:
            raise UnsupportedModel(
                f"model: layer {missing[0]} of {type(self.model).__name__} showed no attention call; it has none, or does not go "
                f"through transformers' attention interface"
            )
        unchecked = sorted(set(self.wanted) - self.passed)
        if unchecked:
            raise UnsupportedModel(f"model: the output projection of layer {unchecked[0]} never ran")
        self._settle_rope()
        gradient = self._head()
        if self.fisher:
            self._backward(entries, gradient)

    def _see(self, seen: watch.Seen) -> None:
        """Note one layer of the prefill."""
        if seen.index not in self.wanted:
            return
        watch.check_output(seen, self.passed)
        heads = int(seen.query.shape[1])
        arrays = {
            "keys": _numpy(seen.key[0]),
            "values": _numpy(seen.value[0]),
            "queries": _numpy(seen.query[0][:, self.query_positions]),
            "output_proj": inside.split_output(inside.output_projection(seen.module), heads),
        }
        kv_heads, _, d = arrays["keys"].shape
        extras: dict[str, Array] = {}
        if seen.window is not None:
            self.windows[seen.index] = seen.window
        before = None if seen.key_pre_rope is None else _numpy(seen.key_pre_rope[0])
        sample = inside.rope_sample(len(self.ids))
        if self.inputs:
            if seen.inputs is None:
                raise UnsupportedModel(f"model: inputs of layer {seen.index}: its key projection was not seen")
            extras["inputs"] = _numpy(seen.inputs[0])
            extras |= inside.split_key_value(seen.module, heads, kv_heads, d, arrays["values"].shape[2])
            if not seen.normed:
                _check_weights(seen.index, extras, arrays["keys"] if before is None else before, arrays["values"])
        self.shown[seen.index] = {
            "scale": seen.scale,
            # frequencies may be known only after the pass, so some keys are kept till then to tell the rotation by
            "turned": None if before is None else (before[:, sample], arrays["keys"][:, sample], sample),
            "type": _layer_type(self.model, seen.index),
            "extras": {},
        }
        self._keep(seen.index, arrays, extras)

    def _left(self, i: int, layer: Any, arguments: Any, output: Any) -> None:
        self.report(i + 1, self.steps, f"layer {i}")
        if i == self.depth - 1:
            self.last = output

    def _settle_rope(self) -> None:
        """Find each layer's rotation from what was seen before and after it."""
        rotates = any(entry["turned"] is not None for entry in self.shown.values())
        for i, entry in sorted(self.shown.items()):
            candidates = inside.rotations(self.model, entry["type"])
            turned = entry.pop("turned")
            if turned is not None:
                before, after, where = turned
                entry["rope"] = inside.find_rope(before, after, where, candidates)
            elif candidates and not rotates:
                raise UnsupportedModel(
                    f"model: layer {i} has rotary frequencies, but how {type(self.model).__name__} turns its keys was not seen"
                )
            else:
                entry["rope"] = None

    def _head(self) -> Any:
        """Surprisal of every token from the last layer's output; with fisher also dL/d(that output), (1, tokens, model_dim)."""
        import torch

        states = self.last[0] if isinstance(self.last, tuple) else self.last
        gradient = torch.zeros_like(states) if self.fisher else None
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        step = max(1, _LOGITS_AT_ONCE // vocabulary)
        count = len(self.ids) - 1
        for start in range(0, count, step):
            block = slice(start, min(start + step, count))
            chunk = states[:, block].detach().requires_grad_(self.fisher)
            with torch.set_grad_enabled(self.fisher), self._only_head(chunk):
                logits = self.model(input_ids=self.input_ids[:, block], use_cache=False).logits[0]
            target = self.input_ids[0, block.start + 1 : block.stop + 1]
            # ln P = logit of the token - log sum exp, in float64: at 0.001 bits float32 would keep two digits
            with torch.no_grad():
                wide = logits.detach().double()
                nats = torch.logsumexp(wide, -1) - wide.gather(1, target[:, None])[:, 0]
            self.bits[block.start + 1 : block.stop + 1] = nats.cpu().numpy() / np.log(2)
            if gradient is not None:
                loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum")
                gradient[:, block] = torch.autograd.grad(loss, chunk)[0]
            self.report(self.depth, self.steps, f"surprisal of token {block.stop} of {count}")
        begins = getattr(self.tokenizer, "bos_token_id", None)
        self.bits[0] = 0.0 if begins is not None and self.ids[0] == begins else np.log2(vocabulary)
        self.report(self.depth + 1, self.steps, "surprisal")
        return gradient

    @contextlib.contextmanager
    def _only_head(self, states: Any) -> Iterator[None]:
        """While open, the model's layers give `states` whatever goes in: what is left is its own way from there to the logits."""
        import torch

        last, like = self.last, self.stack.layers[self.depth - 1]

        class Injector(torch.nn.Module):
            def forward(self, *arguments: Any, **options: Any) -> Any:
                return (states, *last[1:]) if isinstance(last, tuple) else states

            def __getattr__(self, name: str) -> Any:  # some models ask a layer for its kind before they call it
                return getattr(like, name)

        layers = self.stack.layers
        setattr(self.stack.owner, self.stack.name, torch.nn.ModuleList([Injector()]))
        try:
            yield
        finally:
            setattr(self.stack.owner, self.stack.name, layers)

    def _backward(self, entries: dict[int, tuple[Any, dict[str, Any]]], gradient: Any) -> None:
        """Carry dL/d(output of a layer) down the stack; on the way, square dL/d(keys, values) of each wanted layer."""
        import torch

        for i in reversed(range(self.depth)):
            arguments, options = entries[i]
            state = arguments[0].detach().requires_grad_(True)
            seen: list[watch.Seen] = []
            with torch.enable_grad(), watch.watching(self.model, seen.append):
                output = self.stack.layers[i](state, *arguments[1:], **options)
            output = output[0] if isinstance(output, tuple) else output
            following = entries.pop(i + 1)[0][0] if i + 1 < self.depth else output.detach()
            if not (output.detach() - following).norm() <= 1e-4 * following.norm():
                raise UnsupportedModel(
                    f"model: layer {i + 1} does not start where layer {i} ends, so gradients cannot be carried layer by layer"
                )
            sources, names = [state], []
            if i in self.wanted:
                (attention,) = seen
                sources += [attention.key, attention.value]
                names = ["key_fisher", "value_fisher"]
                if attention.key_pre_rope is not None:
                    sources.append(attention.key_pre_rope)
                    names.append("key_fisher_pre_rope")
            gradient, *by_cache = torch.autograd.grad(output, sources, gradient)
            extras = {name: _numpy(g[0].square().mean(1)) for name, g in zip(names, by_cache)}
            if extras:
                # channels that are not rotated, and layers that rotate nothing: before is after
                before = extras.get("key_fisher_pre_rope", extras["key_fisher"][:, :0])
                rest = extras["key_fisher"][:, before.shape[1] :]
                extras["key_fisher_pre_rope"] = np.concatenate([before, rest], axis=1)
                self._keep(i, {}, extras)
            self.report(self.steps - i, self.steps, f"gradients of layer {i}")

    def _keep(self, index: int, arrays: dict[str, Array], extras: dict[str, Array]) -> None:
        """Hold arrays of a layer in memory, or in one file each under `spill`."""
        for where, group in ((self.shown[index], arrays), (self.shown[index]["extras"], extras)):
            for name, array in group.items():
                where[name] = array if self.spill is None else _spilled(self.spill / f"{index}.{name}.npy", array)

    def layer(self, index: int) -> Layer:
        entry = self.shown[index]
        get = {name: _read(entry[name]) for name in ("keys", "values", "queries", "output_proj")}
        rope: Rope | None = entry["rope"]
        extras = {name: _read(array) for name, array in entry["extras"].items()}
        positions = np.asarray(self.query_positions, dtype=np.int64)
        return Layer(
            **get,
            rope=rope,
            scale=entry["scale"],
            index=index,
            query_positions=positions,
            window=self.windows.get(index),
            extras=extras,
        )

    def cache(self) -> Cache:
        text = getattr(self.model.config, "get_text_config", lambda: self.model.config)()
        meta = {
            **origin(self.model),
            "architecture": text.model_type,
            "plan": plan(self.model),
            "text": self.text_name,
            "tokens": len(self.ids),
        }
        layers = [self.layer(i) if self.spill is None else partial(self.layer, i) for i in self.wanted]
        return Cache(layers, self.ids, self.bits, meta)


def _note_call(
    entries: dict[int, tuple[Any, dict[str, Any]]], i: int, layer: Any, arguments: Any, options: Any
) -> None:
    entries[i] = (arguments, options)


def _ids(tokenizer: Any, source: Any, tokens: int | None, vocabulary: int) -> NDArray[np.int64]:
    if tokens is not None and (not isinstance(tokens, (int, np.integer)) or tokens < 1):
        raise ValueError(f"tokens: expected an int >= 1 or None, got {tokens!r}")
    if isinstance(source, str):
        if tokenizer is None:
            raise ValueError("tokenizer: expected one for a text, got None")
        ids = encode(tokenizer, source, tokens)
    else:
        ids = np.asarray(source)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(
                f"source: expected a text or token ids of shape (n,), got {ids.dtype} of shape {ids.shape}"
            )
        if tokens is not None and len(ids) < tokens:
            raise ValueError(f"source: expected at least {tokens} tokens, got {len(ids)}")
        ids = ids[:tokens].astype(np.int64)
    if len(ids) == 0:
        raise ValueError("source: expected at least 1 token, got 0")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"source: expected token ids from 0 to {vocabulary - 1}, got {ids.min()} to {ids.max()}")
    return ids


def _wanted(layers: Sequence[int] | None, depth: int) -> list[int]:
    chosen = list(range(depth)) if layers is None else [int(i) for i in layers]
    if any(not -depth <= i < depth for i in chosen):
        raise ValueError(f"layers: expected numbers from {-depth} to {depth - 1}, got {chosen}")
    chosen = [i % depth for i in chosen]
    if len(set(chosen)) != len(chosen) or not chosen:
        raise ValueError(f"layers: expected at least one layer and none twice, got {chosen}")
    return chosen


def _query_positions(positions: Any, tokens: int) -> NDArray[np.int64]:
    if positions is None:
        return np.arange(tokens)
    array = np.asarray(positions)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"query_positions: expected integers of shape (queries,), got {array.dtype} of shape {array.shape}"
        )
    if len(array) and (array.min() < 0 or array.max() >= tokens):
        raise ValueError(
            f"query_positions: expected numbers from 0 to {tokens - 1}, got {array.min()} to {array.max()}"
        )
    return array.astype(np.int64)


def _layer_type(model: Any, index: int) -> str | None:
    types = getattr(model.config.get_text_config(), "layer_types", None)
    return None if not types else str(types[index])


def _check_weights(index: int, extras: dict[str, Array], keys: Array, values: Array) -> None:
    """The weights split by head must turn the inputs into the keys (before rotation; its channels only) and values seen."""
    for part, seen in (("key", keys), ("value", values)):
        made = np.einsum("td,hcd->htc", extras["inputs"], extras[f"{part}_weight"], optimize=True)
        if f"{part}_bias" in extras:
            made += extras[f"{part}_bias"][:, None, :]
        made = made[..., : seen.shape[-1]]
        error = np.linalg.norm(made - seen) / max(float(np.linalg.norm(seen)), 1e-30)
        if not error < 1e-3:
            raise UnsupportedModel(
                f"model: the {part} weight of layer {index}, split by head, does not turn its inputs into its {part}s "
                f"(relative error {error:.2g}); inputs=True cannot be given for this model"
            )


def _numpy(tensor: Any) -> Array:
    return np.ascontiguousarray(tensor.detach().cpu().numpy())


def _spilled(path: Path, array: Array) -> Path:
    np.save(path, array)
    return path


def _read(array: Array | Path) -> Array:
    return np.load(array) if isinstance(array, Path) else array
