"""One layer of a CompressedCache: what attention reads, and when tokens become bytes.

    tokens of a request     0 .. s-1     s .. e-1            e .. n-1
    held as                 exact        streams             exact
                            the sinks    coded, then decoded the newest: at least `window`, fewer than window + every

`keys` and `values` are what attention reads, side by side: the sinks, what a receiver decodes from the streams, the newest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import CacheLayerMixin

from kvtheory.layer import Layer
from kvtheory.models.inside import UnsupportedModel
from reference.hf.attention import MARK
from reference.hf.coded import Coded
from reference.hf.facts import LayerFacts
from reference.hf.tensors import to_array, to_tensor

if TYPE_CHECKING:
    from reference.hf.cache import CompressedCache

__all__ = ["CompressedLayer"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CompressedLayer(CacheLayerMixin):
    """See the module. `columns`, `log_weights`: of the slots of `keys`, as `reference.hf.attention.rewritten` takes them."""

    is_compileable = False
    is_croppable = True
    is_sliding = False  # a sliding layer's mask hides what its window has passed
    supports_early_init = False

    def __init__(self, cache: CompressedCache, facts: LayerFacts) -> None:
        super().__init__()
        self.cache, self.facts = cache, facts
        self.record_past = False
        self._clear()

    def _clear(self) -> None:
        self.keys: Any = None
        self.values: Any = None
        self.columns: Any = None
        self.log_weights: Any = None
        self.queries: Any = None  # (batch, query_heads, m, d), of the last m columns
        self.rows: list[Coded] = []
        self.length = 0
        self.waiting = self.pending = False
        self.is_initialized = False

    # -- a forward pass --------------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        self.device = key_states.device
        # as DynamicLayer has it: what is concatenated is contiguous
        self.keys = torch.tensor([], dtype=key_states.dtype, device=self.device)
        self.values = torch.tensor([], dtype=value_states.dtype, device=self.device)
        self.rows = [Coded() for _ in range(key_states.shape[0])]
        self.is_initialized = True

    def update(self, key_states: Any, value_states: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Take in (batch, kv_heads, q, d) and (batch, kv_heads, q, dv); gives all that attention is to read."""
        self._check(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        new = key_states.shape[-2]
        if self.columns is not None:
            columns = np.arange(self.length, self.length + new)
            own = np.where(self.cache.valid[:, -new:], columns, -1)
            behind = torch.from_numpy(own).to(self.device)[:, None].expand(-1, self.columns.shape[1], -1)
            self.columns = torch.cat([self.columns, behind], dim=-1)
        if self.log_weights is not None:
            self.log_weights = torch.nn.functional.pad(self.log_weights, (0, new))
        self.length += new
        self.waiting = True
        setattr(self.keys, MARK, self)
        return self.keys, self.values

    def attended(self, query: Any) -> None:
        """Told by the attention function when it has read: query (batch, query_heads, q, d), after RoPE."""
        self.waiting = False
        if self.cache.needs_queries:
            known = [] if self.queries is None else [self.queries]
            self.queries = torch.cat([*known, query.detach()], dim=-2)
        self.pending = True
        if not self.record_past:
            self.settle()

    def settle(self) -> None:
        """Code what is due, and lay out anew what attention reads."""
        self.pending = False
        changed = False
        for r, coded in enumerate(self.rows):
            tokens = len(self.cache.requests[r])
            first = coded.end or min(self.cache.sinks, tokens)
            aged = tokens - self.cache.window - first
            # a prompt is coded when it ends; what comes later, every so many tokens
            if aged >= (1 if self.cache.at_prompt else self.cache.every):
                self._code(r, coded, first, first + aged)
                changed = True
        if changed:
            self._lay_out()
        self._forget_queries()

    def _code(self, r: int, coded: Coded, first: int, end: int) -> None:
        """Code the tokens first .. end - 1 of request r."""
        request, cache = self.cache.requests[r], self.cache
        keys, values = (to_array(x) for x in self._exact(r, coded))
        start = coded.end
        queries = query_positions = None
        if self.queries is not None:
            held = self.length - self.queries.shape[2]
            # other requests may have older tokens that are exact; of this one's queries those of its own count
            asked = start + np.flatnonzero(request.columns[start:] >= held)
            where = torch.from_numpy(request.columns[asked] - held).to(self.queries.device)
            queries, query_positions = to_array(self.queries[r, :, where]), request.positions[asked]
        layer = Layer(
            keys[:, first - start : end - start],
            values[:, first - start : end - start],
            queries,
            self.facts.output_proj,
            rope=self.facts.rope,
            scale=self.facts.scale,
            index=self.facts.index,
            positions=request.positions[first:end],
            query_positions=query_positions,
            window=None if queries is None else self.facts.window,
        )
        sinks = (keys[:, :first].copy(), values[:, :first].copy()) if start == 0 else None
        coded.end = first
        try:
            coded.take(cache.codec, layer)
        except Exception:
            coded.end = start
            raise
        if sinks is not None:
            coded.sink_keys, coded.sink_values = sinks

    def _exact(self, r: int, coded: Coded) -> tuple[Any, Any]:
        """Keys and values (kv_heads, n, .) of the exact tokens of request r, from coded.end on, where they now are."""
        own = self.cache.requests[r].columns[coded.end :]
        if not len(own):
            return self.keys[r, :, :0], self.values[r, :, :0]
        if self.columns is None:
            slots = torch.from_numpy(own).to(self.device)
        else:
            at = self.columns[r, 0]
            slots = torch.nonzero((at >= int(own[0])) & (at <= int(own[-1])))[:, 0]
        return self.keys[r][:, slots], self.values[r][:, slots]

    def _forget_queries(self) -> None:
        """Keep those of exact tokens: older ones nobody asks for again."""
        if self.queries is None:
            return
        # where nothing is coded yet, the prompt's own are still to be asked
        ends = [
            int(request.columns[coded.end]) if coded.end < len(request) else self.length
            for request, coded in zip(self.cache.requests, self.rows)
        ]
        wanted = self.length - min(ends)
        if wanted < self.queries.shape[2]:
            self.queries = self.queries[:, :, self.queries.shape[2] - wanted :].clone()

    # -- what attention reads ---------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Sinks, decoded tokens and exact ones of all requests as tensors, from `rows` and the exact tokens in the tensors so far."""
        exact = [self._exact(r, coded) for r, coded in enumerate(self.rows)]
        if all(coded.whole for coded in self.rows):
            self._in_place(exact)
        else:
            self._packed(exact)

    def _in_place(self, exact: list[tuple[Any, Any]]) -> None:
        """Every token at its own column, zeros in the columns of padding: as the plain cache lays them out."""
        batch, heads = len(self.rows), self.facts.kv_heads
        keys = self.keys.new_zeros((batch, heads, self.length, self.keys.shape[3]))
        values = self.values.new_zeros((batch, heads, self.length, self.values.shape[3]))
        weights = torch.zeros((batch, heads, self.length), dtype=torch.float64, device=self.device)
        for r, coded in enumerate(self.rows):
            columns = torch.from_numpy(self.cache.requests[r].columns).to(self.device)
            for first, k, v, w in self._pieces(coded):
                there = columns[first : first + k.shape[1]]
                keys[r][:, there], values[r][:, there] = k, v
                if w is not None:
                    weights[r][:, there] = w
            keys[r][:, columns[coded.end :]], values[r][:, columns[coded.end :]] = exact[r]
        self.keys, self.values, self.columns = keys, values, None
        self.log_weights = weights.to(keys.dtype) if bool(weights.any()) else None

    def _pieces(self, coded: Coded) -> list[tuple[int, Any, Any, Any]]:
        """(first token, keys, values, log-weights or None) of the sinks and of streams that keep every token."""
        pieces = []
        if coded.sinks:
            pieces.append((0, to_tensor(coded.sink_keys, self.keys), to_tensor(coded.sink_values, self.values), None))  # type: ignore[arg-type]
        for segment in coded.segments:
            n, decoded = segment.visible, segment.decoded
            weights = decoded.log_weights[:, :n]
            pieces.append(
                (
                    segment.first,
                    to_tensor(decoded.keys[:, :n], self.keys),
                    to_tensor(decoded.values[:, :n], self.values),
                    torch.from_numpy(np.array(weights)).to(self.device) if weights.any() else None,
                )
            )
        return pieces

    def _packed(self, exact: list[tuple[Any, Any]]) -> None:
        """Tokens that are left side by side: padding of the request in front, padding of a head behind its decoded tokens."""
        batch, heads = len(self.rows), self.facts.kv_heads
        left = [[self._left(r, coded, h) for h in range(heads)] for r, coded in enumerate(self.rows)]
        widths = [
            coded.sinks + max(len(own[2]) for own in left[r]) + exact[r][0].shape[1]
            for r, coded in enumerate(self.rows)
        ]
        size = max(widths)
        keys = self.keys.new_zeros((batch, heads, size, self.keys.shape[3]))
        values = self.values.new_zeros((batch, heads, size, self.values.shape[3]))
        columns = np.full((batch, heads, size), -1, np.int64)
        weights = np.zeros((batch, heads, size))
        for r, coded in enumerate(self.rows):
            own = self.cache.requests[r].columns
            start, s, n = size - widths[r], coded.sinks, exact[r][0].shape[1]
            if s:
                keys[r, :, start : start + s] = to_tensor(coded.sink_keys, self.keys)  # type: ignore[arg-type]
                values[r, :, start : start + s] = to_tensor(coded.sink_values, self.values)  # type: ignore[arg-type]
                columns[r, :, start : start + s] = own[:s]
            for h, (k, v, where, w) in enumerate(left[r]):
                there = slice(start + s, start + s + len(where))
                keys[r, h, there], values[r, h, there] = to_tensor(k, self.keys), to_tensor(v, self.values)
                columns[r, h, there], weights[r, h, there] = own[where], w
            if n:
                keys[r, :, size - n :], values[r, :, size - n :] = exact[r]
                columns[r, :, size - n :] = own[coded.end :]
        alike = bool((columns == columns[:, :1]).all())
        self.keys, self.values = keys, values
        self.columns = torch.from_numpy(columns[:, :1] if alike else columns).to(self.device)
        self.log_weights = torch.from_numpy(weights).to(self.device, keys.dtype) if weights.any() else None

    def _left(self, r: int, coded: Coded, h: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64], NDArray[Any]]:
        """Keys, values, numbers in the request, and log-weights of the decoded tokens of head h that are still there."""
        positions = self.cache.requests[r].positions
        found = []
        for segment in coded.segments:
            one, n = segment.decoded, int(segment.decoded.kept[h])
            n = int(np.searchsorted(one.positions[h, :n], positions[segment.first + segment.visible - 1], side="right"))
            found.append((one.keys[h, :n], one.values[h, :n], one.positions[h, :n], one.log_weights[h, :n]))
        if not found:
            empty = to_array(self.keys[r, h, :0]), to_array(self.values[r, h, :0])
            return *empty, np.zeros(0, np.int64), np.zeros(0)
        k, v, where, w = (np.concatenate(parts) for parts in zip(*found))
        return k, v, np.searchsorted(positions, where), w

    # -- batches and time -------------------------------------------------------------------------------------------------

    def select(self, rows: Sequence[int]) -> None:
        """Requests `rows` of those so far, in this order; one may come several times."""
        if not self.is_initialized:
            return
        index = torch.as_tensor(list(rows), device=self.device)
        self.rows = [self.rows[r].forked(again=list(rows).count(r) > 1) for r in rows]
        for name in ("keys", "values", "columns", "log_weights", "queries"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor.index_select(0, index.to(tensor.device)))

    def check_cut(self, tokens: Sequence[int]) -> None:
        """ValueError where tokens[r] tokens of request r cannot be left alone; nothing changes."""
        for coded, n in zip(self.rows, tokens):
            if coded.sinks < n < coded.end:
                coded.forked(again=False).cut(n)

    def cut(self, columns: int, tokens: Sequence[int]) -> None:
        """Leave the first `columns` columns, which hold tokens[r] tokens of request r, as the cache's requests say by now."""
        if not self.is_initialized or columns >= self.length:
            return
        if self.queries is not None:
            self.queries = self.queries[:, :, : max(0, self.queries.shape[2] - (self.length - columns))]
        deep = False
        for r, (coded, n) in enumerate(zip(self.rows, tokens)):
            if n < coded.end:
                deep = True
                if n <= coded.sinks:  # all that is left is exact
                    self.rows[r] = Coded()
                else:
                    coded.cut(n)
        self.length = columns
        if deep or self.columns is not None:
            self._lay_out()
            return
        self.keys, self.values = self.keys[..., :columns, :], self.values[..., :columns, :]
        if self.log_weights is not None:
            self.log_weights = self.log_weights[..., :columns]

    def reset(self) -> None:
        self._clear()

    def reorder_cache(self, beam_idx: Any) -> None:
        raise UnsupportedModel("cache: reorder the CompressedCache, not one of its layers")

    def crop(self, tokens_to_remove: int) -> None:
        raise UnsupportedModel("cache: crop the CompressedCache, not one of its layers")

    # -- sizes ------------------------------------------------------------------------------------------------------------

    def get_seq_length(self) -> int:
        """Columns so far, padding and tokens that are left out included: masks and positions follow it."""
        return self.length

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        # the number of queries, or in older versions their positions
        return self.length + (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        return -1

    def activate_past_recording(self) -> None:
        """From now on nothing is coded before the next `crop`, so that what it takes back leaves no trace."""
        self.record_past = True

    def _check(self, keys: Any, values: Any) -> None:
        facts = self.facts
        if keys.requires_grad or values.requires_grad:
            raise ValueError(
                "model: expected a pass without gradients (torch.no_grad(), model.generate); a compressed cache passes none on"
            )
        expected = (len(self.cache.requests), facts.kv_heads, self.cache.passing, facts.head_dim)
        if tuple(keys.shape) != expected or tuple(values.shape) != (*expected[:3], facts.value_dim):
            raise ValueError(
                f"key_states: expected shape {expected} in layer {facts.index}, got {tuple(keys.shape)} (values {tuple(values.shape)})"
            )
        if keys.dtype not in _FLOATS or values.dtype not in _FLOATS:
            raise TypeError(f"key_states: expected floating elements, got {keys.dtype} and {values.dtype}")
        if self.is_initialized and (keys.dtype != self.keys.dtype or values.dtype != self.values.dtype):
            raise TypeError(f"key_states: expected elements of {self.keys.dtype} as before, got {keys.dtype}")
