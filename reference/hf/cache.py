"""`CompressedCache`: a transformers Cache whose older tokens are held as the streams of a reference codec."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers.cache_utils import Cache

from kvtheory.models.inside import UnsupportedModel
from reference.arguments import whole
from reference.codec import Codec
from reference.hf.facts import LayerFacts
from reference.hf.layer import CompressedLayer

__all__ = ["CompressedCache", "Held", "Request"]

MOST_TOKENS = 1 << 40


@dataclass(frozen=True, eq=False)
class Request:
    """The tokens of one row of a batch, padding left out. columns (n,): where each stands in the batch; positions (n,): as the model counts."""

    columns: NDArray[np.int64]
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.columns)


@dataclass(frozen=True)
class Held:
    """Bits that a receiver of a cache holds, summed over requests and layers.

    streams: 8 times the bytes of all streams. exact: sinks and newest tokens, 16, 32 or 64 a number. side: 128 for each request (its tokens,
    its first position; 64 more for each exact token where positions are not consecutive) and 128 for each stream (its length, its tokens in
    use). numbers: of keys and values of all tokens, dropped ones too. state: bits of the codec's state, which are in no other number: one
    state serves all caches of a model.
    """

    streams: int
    exact: int
    side: int
    numbers: int
    state: int

    @property
    def bits(self) -> int:
        return self.streams + self.exact + self.side

    @property
    def per_number(self) -> float:
        """Bits per number of the plain cache. ValueError where no token is held."""
        if not self.numbers:
            raise ValueError("cache: expected at least one token, got none")
        return self.bits / self.numbers


class CompressedCache(Cache):
    """A cache for `model.generate(..., past_key_values=cache)` and `model(...)`, of a model given to `reference.hf.attach`.

        model = reference.hf.attach(model)
        cache = reference.hf.CompressedCache(reference.TurboQuant(bits=3), sinks=4, window=64)
        model.generate(**tokenizer(prompt, return_tensors="pt"), past_key_values=cache)
        cache.held_bits()

    codec: any of `reference.codecs(scope="layer")`, fitted to this model if it has a state. sinks: the first tokens of each request, window:
    its newest ones, kept exact beside what the codec keeps exact of its own. every: how many tokens beyond the window are waited for before
    they are coded together, default max(window, 1).

    A prompt is read exactly by its own pass and coded when that ends, up to its last `window` tokens; from then on, whenever window + every
    tokens are exact, all but the last `window` are coded. A codec that can append lengthens its stream, one that cannot begins another for
    each piece; eviction (SnapKV, ScissorHands) is decided once, on the first piece, with the queries of all tokens so far, and later tokens
    are all kept. What attention reads is what `reference.decode` gives for the bytes, and each row of a batch is a request of its own.

    This shows what a codec does to a model. It saves no memory here: what is decoded lies beside the bytes, and time is NumPy's.

    Refused with ValueError or TypeError: a codec of another scope or in need of `extras`; a model that is not attached, is in training mode,
    or is another than before; gradients; a batch or a mask of padding that has changed. UnsupportedModel is a ValueError.
    """

    def __init__(self, codec: Codec, *, sinks: int = 4, window: int = 64, every: int | None = None) -> None:
        if not isinstance(codec, Codec):
            raise TypeError(f"codec: expected a codec of reference.codecs(scope='layer'), got {type(codec).__name__}")
        if codec.scope != "layer":
            raise ValueError(f'codec: expected scope "layer", got {codec.codec_id} of scope {codec.scope!r}')
        extras = sorted(need for need in codec.needs if need.startswith("extras:"))
        if extras:
            raise ValueError(f"codec: {codec.codec_id} needs {extras[0]}, which a generating model does not show")
        whole("sinks", sinks, 0, MOST_TOKENS)
        whole("window", window, 0, MOST_TOKENS)
        if every is not None:
            whole("every", every, 1, MOST_TOKENS)
        super().__init__(layers=[])
        self.codec, self.sinks, self.window = codec, sinks, window
        self.every = max(window, 1) if every is None else every
        self.needs_queries = "queries" in codec.needs
        self._model: weakref.ref[Any] | None = None
        self._start()

    def _start(self) -> None:
        self.layers: list[CompressedLayer] = []
        self.requests: list[Request] = []
        self.valid = np.zeros((0, 0), bool)  # (batch, columns): which are tokens
        self.passing = 0  # columns of the pass under way
        self.recording = False  # asked for before there were layers
        self.at_prompt = True

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedCache:
        """A cache that goes on alone from here; the codec, which never changes, is shared."""
        import copy

        memo[id(self.codec)] = self.codec
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in vars(self).items():
            setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    # -- a forward pass --------------------------------------------------------------------------------------------------

    def begin(
        self, model: Any, facts: Sequence[LayerFacts], batch: int, columns: int, mask: Any, positions: Any
    ) -> None:
        """Told by `attach` before each pass of `model`: batch rows of `columns` new columns.

        mask: (batch, columns so far and new), nonzero for tokens, or None: all are. positions: (1 or batch, columns), or None: the columns.
        """
        if self._model is not None and self._model() is not model:
            raise ValueError("model: the cache holds tokens of another model; reset() it or make a new one")
        if any(layer.waiting or layer.length != self.length for layer in self.layers):
            raise ValueError("cache: a pass broke off in the middle of the model; reset() it or make a new one")
        if self.layers and batch != len(self.requests):
            raise ValueError(
                f"input_ids: expected {len(self.requests)} rows, the requests that the cache holds, got {batch}"
            )
        for layer in self.layers:
            if layer.pending:  # it was not taken back
                layer.settle()
        before = self.length
        valid = self._valid(mask, batch, before, columns)
        where = _positions(positions, batch, before, columns)
        requests = []
        for r in range(batch):
            new = np.flatnonzero(valid[r, before:])
            old = self.requests[r] if self.layers else Request(np.zeros(0, np.int64), np.zeros(0, np.int64))
            both = np.concatenate([old.positions, where[r, new]])
            if (np.diff(both) <= 0).any() or (both[:1] < 0).any():
                raise ValueError(
                    f"position_ids: expected ascending numbers >= 0 in row {r}, got {both[max(0, len(old) - 1) :][:8].tolist()}"
                )
            requests.append(Request(np.concatenate([old.columns, before + new]), both))
        if not self.layers:
            self.layers = [CompressedLayer(self, one) for one in facts]
            for layer in self.layers:
                layer.record_past = self.recording
            self._model = weakref.ref(model)
        self.requests, self.valid, self.passing = requests, valid, columns
        self.at_prompt = before == 0

    def _valid(self, mask: Any, batch: int, before: int, columns: int) -> NDArray[np.bool_]:
        if mask is None:
            valid = np.ones((batch, before + columns), bool)
        else:
            if not hasattr(mask, "dim") or mask.dim() != 2:
                raise ValueError(
                    "attention_mask: expected one of shape (batch, tokens), the mask of padding, or None; other masks cannot be told from it"
                )
            valid = mask.detach().cpu().numpy() != 0
            if valid.shape != (batch, before + columns):
                raise ValueError(f"attention_mask: expected shape {(batch, before + columns)}, got {valid.shape}")
        if before and not np.array_equal(valid[:, :before], self.valid):
            raise ValueError("attention_mask: expected the same padding as before in the columns that the cache holds")
        return valid

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Keys and values of the tokens of a pass in one layer; gives what its attention is to read."""
        if not self.layers or self.layers[layer_idx].length == self.length:
            raise ValueError(
                "model: expected one that was given to reference.hf.attach, and its own forward pass; a compressed cache needs "
                "to be told of the mask, the positions and the queries"
            )
        waiting = [layer.facts.index for layer in self.layers if layer.waiting]
        if waiting:
            raise UnsupportedModel(
                f"model: attention of layer {waiting[0]} did not read what its cache gave, through transformers' attention interface"
            )
        keys, values = self.layers[layer_idx].update(key_states, value_states)
        return keys, values

    # -- what is held -----------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Columns of the batch so far: what get_seq_length says."""
        return int(self.valid.shape[1])

    @property
    def batch_size(self) -> int:
        return len(self.requests) if self.layers else -1

    def streams(self, row: int = 0) -> list[tuple[bytes, ...]]:
        """The streams of request `row`, of each layer those in time order. Some tokens at a stream's end may be cropped (`in_use`)."""
        return [tuple(segment.stream for segment in layer.rows[row].segments) for layer in self.layers]

    def in_use(self, row: int = 0) -> list[tuple[tuple[int, int], ...]]:
        """Of each stream in `streams`: (number of its first token in the request, how many tokens from it on are in use)."""
        return [
            tuple((segment.first, segment.visible) for segment in layer.rows[row].segments) for layer in self.layers
        ]

    def held(self) -> Held:
        """What a receiver of the whole cache holds, by kind."""
        streams = exact = numbers = 0
        side = 128 * len(self.requests) if self.layers else 0
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            facts = layer.facts
            per_token = facts.kv_heads * (
                facts.head_dim * layer.keys.element_size() + facts.value_dim * layer.values.element_size()
            )
            for request, coded in zip(self.requests, layer.rows):
                streams += sum(8 * len(segment.stream) for segment in coded.segments)
                side += 128 * len(coded.segments)
                exact += 8 * per_token * (coded.sinks + len(request) - coded.end)
                if (np.diff(request.positions) != 1).any():
                    side += 64 * (coded.sinks + len(request) - coded.end)
                numbers += facts.kv_heads * (facts.head_dim + facts.value_dim) * len(request)
        return Held(streams, exact, side, numbers, 8 * self.codec.state_bytes)

    def held_bits(self) -> int:
        """Bits of all streams, exact tokens and side information; the codec's state is beside it (`held().state`)."""
        return self.held().bits

    # -- time and batches -------------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last columns back: -n for n of them. Then code what is due, where coding was put off (`activate_past_recording`).

        Exact tokens come back exactly. Of a stream the last tokens are no longer read, but still held, and what comes later begins another
        stream. ValueError for a number above 0, for more columns than there are, and where a token stands, with a weight, for some that
        would go.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove: expected -n to remove n tokens, got {tokens_to_remove}")
        left = self.length + int(tokens_to_remove)
        if left < 0:
            raise ValueError(f"tokens_to_remove: expected at least -{self.length}, got {tokens_to_remove}")
        if left == 0:
            self.reset()
            return
        if tokens_to_remove:
            tokens = [int(np.searchsorted(request.columns, left)) for request in self.requests]
            for layer in self.layers:
                layer.check_cut(tokens)
            self.requests = [Request(one.columns[:n], one.positions[:n]) for one, n in zip(self.requests, tokens)]
            self.valid = self.valid[:, :left]
            for layer in self.layers:
                layer.cut(left, tokens)
        for layer in self.layers:
            if layer.pending:
                layer.settle()

    def activate_past_recording(self) -> None:
        """From now on nothing is coded before the next `crop`; transformers ends it by the layers' `record_past`."""
        self.recording = True
        for layer in self.layers:
            layer.activate_past_recording()

    def reset(self) -> None:
        """Forget everything, the model too."""
        self._model = None
        self._start()

    def reorder_cache(self, beam_idx: Any) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(np.repeat(np.arange(len(self.requests)), repeats))

    def batch_select_indices(self, indices: Any) -> None:
        if getattr(indices, "dtype", None) is not None and str(indices.dtype).endswith("bool"):
            indices = np.flatnonzero(np.asarray(indices.cpu() if hasattr(indices, "cpu") else indices))
        self._select(indices)

    def _select(self, rows: Any) -> None:
        if not self.layers:
            return
        order = [int(r) for r in rows]
        wrong = [r for r in order if not 0 <= r < len(self.requests)]
        if wrong or not order:
            raise ValueError(f"rows: expected numbers from 0 to {len(self.requests) - 1}, got {wrong[:1] or 'none'}")
        for layer in self.layers:
            layer.select(order)
        self.requests = [self.requests[r] for r in order]
        self.valid = self.valid[order]


def _positions(positions: Any, batch: int, before: int, columns: int) -> NDArray[np.int64]:
    """(batch, columns) int64."""
    if positions is None:
        return np.broadcast_to(np.arange(before, before + columns), (batch, columns))
    if positions.dim() != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != columns:
        raise ValueError(
            f"position_ids: expected shape {(batch, columns)} or {(1, columns)}, got {tuple(positions.shape)}"
        )
    return np.broadcast_to(positions.detach().cpu().numpy().astype(np.int64), (batch, columns))
