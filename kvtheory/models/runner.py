"""Run a real causal language model on a compressed prefix: its own cache replaced by what a codec's receiver holds.

A text of n tokens is split into a prefix of p and a continuation of n - p. The plan is always the same:

    prefill       the prefix at once, in the plain model; its cache is what is compressed
    continuation  the rest, teacher-forced in blocks, each block reading the prefix's cache and the blocks before it

Where the prefill itself is to attend to compressed past, `compressed_prefill` computes it chunk by chunk instead: chunk j reads what a codec
leaves of all tokens before it, and itself exactly (causal).

The plain run and the replaced run differ in the tensors that stand for the prefix and in nothing else: same kernels, same blocks,
so that a lossless codec gives the plain model's logits bit for bit. Only where a layer's Decoded has dropped tokens, log-weights or
heads that keep different numbers is its attention mask rewritten, on the way into the model's own attention function:

    mask_h[i, s] = the model's mask [i, position of slot s in head h] + log_weight_h[s],      -inf for padding

The model's own mask at the original position: causal, sliding or full as the model has it. And since the replaced cache reports the
length of the original, continuation tokens keep their positions (rotary or absolute) however few tokens are kept.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory.layer import Decoded, Layer
from kvtheory.models import inside, watch
from kvtheory.models.capture import capture, plan
from kvtheory.models.inside import UnsupportedModel

if TYPE_CHECKING:
    from kvtheory.models.passkey import Compress, Passkey

__all__ = ["Evaluation", "Runner"]

Float = NDArray[np.float64]
#: one Decoded a layer (None: that layer stays exact), or those of some layers by index
Replaced = Sequence[Decoded | None] | Mapping[int, Decoded]
#: (index of a layer, its tokens so far with their queries) -> what later tokens read of it; None: all of it
CompressLayer = Callable[[int, Layer], Decoded | None]
#: told (steps done, steps in all, what is going on)
Progress = Callable[[int, int, str], None]

#: numbers of the logits of one block of the continuation: 32 MB in float32
_LOGITS_AT_ONCE = 1 << 23
#: numbers of the logits compared at once, in float64
_COMPARED_AT_ONCE = 1 << 20
#: numbers of plain logits kept between calls on one text
_LOGITS_KEPT = 1 << 26


@dataclass(frozen=True)
class Evaluation:
    """A replaced run against the plain one on one text; position i of the arrays is the token prefix + i. Logarithms are binary.

    kl_bits (q,): KL(plain || replaced) of the next-token laws, q = n - prefix. agrees (q,): whether both rank the same token first.
    plain_surprisal_bits, surprisal_bits (q - 1,): -log2 P(token prefix + i + 1 | all before it).
    """

    prefix: int
    kl_bits: Float
    agrees: NDArray[np.bool_]
    plain_surprisal_bits: Float
    surprisal_bits: Float

    @property
    def mean_kl_bits(self) -> float:
        return float(self.kl_bits.mean())

    @property
    def top1_agreement(self) -> float:
        return float(self.agrees.mean())

    @property
    def plain_perplexity(self) -> float:
        """2 to the mean surprisal, as all perplexities here."""
        return float(2 ** self.plain_surprisal_bits.mean())

    @property
    def perplexity(self) -> float:
        return float(2 ** self.surprisal_bits.mean())

    def summary(self) -> dict[str, Any]:
        """The four means and what they are over, as plain numbers."""
        return {
            "prefix": self.prefix,
            "positions": len(self.kl_bits),
            "mean_kl_bits": self.mean_kl_bits,
            "top1_agreement": self.top1_agreement,
            "plain_perplexity": self.plain_perplexity,
            "perplexity": self.perplexity,
        }


class Runner:
    """Teacher-forced runs of `model` whose cache of a prefix is replaced.

    model: a causal LM of transformers in evaluation mode (`kvtheory.models.load`), attention "sdpa" or "eager". tokenizer: its
    tokenizer, for `passkey` only. block: positions of the continuation in one forward pass, part of the plan; None: as many as keep
    the logits of a block at 32 MB. Memory beyond the model: the prefix's cache twice, the logits of a block, and the plain logits of
    the last text where they take at most 256 MB.

    Layers that read another layer's cache, and attention that does not go through transformers' attention interface, are refused
    with UnsupportedModel (a ValueError). Log-weights are added to logits in the model's element type.
    """

    def __init__(self, model: Any, tokenizer: Any = None, *, block: int | None = None) -> None:
        if model.training:
            raise ValueError("model: expected evaluation mode (dropout off), got training mode; call model.eval()")
        config = model.config.get_text_config()
        if config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(f'model: expected attention "sdpa" or "eager", got {config._attn_implementation!r}')
        self.model, self.tokenizer = model, tokenizer
        self.depth = len(inside.stack(model).layers)
        self.vocabulary = int(config.vocab_size)
        if block is not None and (not isinstance(block, (int, np.integer)) or block < 1):
            raise ValueError(f"block: expected an int >= 1 or None, got {block!r}")
        self.block = int(block or max(1, _LOGITS_AT_ONCE // self.vocabulary))
        # transformers renamed the argument; either name works for the models that have it
        known = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in known else "past_key_values"
        self._prefix: tuple[bytes, list[tuple[Any, Any]]] | None = None
        self._plain: tuple[bytes, NDArray[Any]] | None = None
        self._like: tuple[bytes, list[Layer]] | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """What the bits of a run depend on besides model and text; JSON can hold it."""
        return {
            **plan(self.model),
            "compute": str(self.model.dtype).removeprefix("torch."),
            "prefill": "whole prefix at once, batch of one",
            "continuation": f"teacher-forced in blocks of {self.block}",
        }

    def logits(self, tokens: ArrayLike, prefix: int, decoded: Replaced | None = None) -> NDArray[Any]:
        """Logits after each continuation token, (n - prefix, vocabulary), float32: row i is of the token after position prefix + i.

        tokens (n,): ids. prefix: how many of them are the prefix, 1 <= prefix < n. decoded: what stands for the prefix's cache;
        None: the cache itself. A Decoded has positions from 0 to prefix - 1, the model's KV heads and channels, any float type.

        Raises ValueError or TypeError for arguments that do not fit; UnsupportedModel.
        """
        ids = self._ids(tokens, prefix, 1)
        slots = self._slots(ids, prefix, decoded)
        return np.concatenate([_float32(logits) for _, logits in self._continue(ids, prefix, slots)])

    def evaluate(
        self, tokens: ArrayLike, prefix: int, decoded: Replaced, progress: Progress | None = None
    ) -> Evaluation:
        """The replaced run against the plain one; arguments as `logits`, with 1 <= prefix <= n - 2.

        The plain run is made once for several calls on one text.
        """
        ids = self._ids(tokens, prefix, 2)
        count = len(ids) - prefix
        tell = progress or (lambda done, total, what: None)
        slots = self._slots(ids, prefix, decoded)
        tell(0, count, "plain run" if self._known_plain(ids, prefix) is None else "replaced run")
        kl, agrees = np.zeros(count), np.zeros(count, dtype=bool)
        surprisal = np.zeros((2, count - 1))
        for start, true, replaced in self._both(ids, prefix, slots):
            stop = start + len(true)
            targets = ids[prefix + start + 1 : prefix + stop + 1]
            kl[start:stop], agrees[start:stop] = _compare(true, replaced)
            for row, logits in zip(surprisal, (true, replaced)):
                row[start : start + len(targets)] = _surprisal_bits(logits[: len(targets)], targets)
            tell(stop, count, "plain and replaced run")
        return Evaluation(prefix, kl, agrees, surprisal[0], surprisal[1])

    def passkey(
        self,
        compress: Compress | None,
        *,
        tokens: int = 1024,
        samples: int = 20,
        seed: int = 0,
        filler: str | None = None,
        form: str = "auto",
        progress: Progress | None = None,
    ) -> Passkey:
        """Is a five-digit key, said somewhere in the prefix, still found? See kvtheory.models.passkey."""
        from kvtheory.models import passkey

        return passkey.run(
            self, compress, tokens=tokens, samples=samples, seed=seed, filler=filler, form=form, progress=progress
        )

    def compressed_prefill(
        self, tokens: ArrayLike, chunk: int, compress: CompressLayer, progress: Progress | None = None
    ) -> list[Decoded]:
        """What stands for the prefix `tokens` (p,) where its own prefill attends to compressed past, a Decoded a layer, for `logits`, `evaluate`.

        In chunks of `chunk` tokens, with K_j, V_j, Q_j what a layer computes of chunk j from hidden states that went the same way:

            D_j = compress(layer, [K_1 .. K_j], [V_1 .. V_j], queries [Q_1 .. Q_j]),     chunk j + 1 attends to D_j and, causally, to itself

        and the last D is returned. This is a causal scan: what chunk j + 1 reads depends on tokens before it alone, and reading is
        compressed from the second chunk on. What compress is shown are all keys and values so far, each computed under compressed attention
        and none lost: a codec that evicts may take a token back later, which a cache in little memory could not. The layers that compress is
        shown have no extras; where it gives None they stay exact. With p <= chunk, all is exact but the result.

        Raises ValueError, TypeError for arguments and Decoded that do not fit; UnsupportedModel.
        """
        import torch

        ids = self._ids(tokens, np.size(tokens), 0)
        if not isinstance(chunk, (int, np.integer)) or isinstance(chunk, bool) or chunk < 1:
            raise ValueError(f"chunk: expected an int >= 1, got {chunk!r}")
        tell = progress or (lambda done, total, what: None)
        likes = self._likes(ids)
        parts: list[list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]]] = [[] for _ in range(self.depth)]
        found: list[Decoded] = []
        slots: list[_Slots] = []
        for start in range(0, len(ids), int(chunk)):
            tell(start, len(ids), "compressed prefill")
            block = ids[start : start + int(chunk)]
            cache = _cache(slots, start)
            queries: dict[int, Any] = {}
            with torch.no_grad(), _rewriting_masks(self.model, start, slots, queries):
                self.model.base_model(input_ids=self._tensor(block), use_cache=True, **{self._cache_argument: cache})
            if len(cache.layers) != self.depth or sorted(queries) != list(range(self.depth)):
                raise UnsupportedModel(
                    f"model: expected attention and a cache in {self.depth} layers, got {len(queries)} and {len(cache.layers)}"
                )
            found, slots = [], []
            stop = start + len(block)
            for i, (layer, like, own) in enumerate(zip(cache.layers, likes, parts)):
                keys, values = layer.keys[:, :, -len(block) :], layer.values[:, :, -len(block) :]
                own.append((_float32(keys[0]), _float32(values[0]), _float32(queries[i][0])))
                k, v, q = (np.concatenate(one, axis=1) for one in zip(*own))
                so_far = like.replace(
                    keys=k, values=v, queries=q, positions=np.arange(stop), query_positions=np.arange(stop)
                )
                entry = compress(i, so_far)
                entry = Decoded.exact(so_far) if entry is None else entry
                found.append(entry)
                like_cache = (x.new_empty((1, k.shape[0], stop, x.shape[3])) for x in (keys, values))
                slots.append(_Slots.of(i, entry, *like_cache))
        tell(len(ids), len(ids), "compressed prefill")
        return found

    # -- the runs ----------------------------------------------------------------------------------------------------------

    def _prefill(self, ids: NDArray[np.int64]) -> list[tuple[Any, Any]]:
        """Keys and values of the plain model on the prefix `ids`, (1, kv_heads, p, d) a layer; those of the last prefix are kept."""
        import torch
        from transformers import DynamicCache

        if self._prefix is not None and self._prefix[0] == ids.tobytes():
            return self._prefix[1]
        cache = DynamicCache()  # without a config it keeps all positions of sliding layers too
        with torch.no_grad():
            self.model.base_model(input_ids=self._tensor(ids), use_cache=True, **{self._cache_argument: cache})
        found = [(layer.keys, layer.values) for layer in cache.layers]
        whole = [keys is not None and keys.shape[-2] == len(ids) for keys, _ in found]
        if len(found) != self.depth or not all(whole):
            raise UnsupportedModel(
                f"model: expected a cache of {self.depth} layers with all {len(ids)} positions each, got {len(found)} layers, "
                f"{sum(whole)} of them whole"
            )
        self._prefix = ids.tobytes(), found
        return found

    def _likes(self, ids: NDArray[np.int64]) -> list[Layer]:
        """Scale, RoPE, output projection and window of each layer, as a capture of `ids` states them; those of the last ids are kept."""
        if self._like is None or self._like[0] != ids.tobytes():
            captured = capture(self.model, None, ids, query_positions=[0])
            self._like = ids.tobytes(), [layer.replace(extras={}) for layer in captured]
        return self._like[1]

    def _continue(self, ids: NDArray[np.int64], prefix: int, slots: list[_Slots]) -> Iterator[tuple[int, Any]]:
        """(start, logits (b, vocabulary)) of each block of the continuation, the prefix's cache being `slots`."""
        import torch

        cache = _cache(slots, prefix)
        for start in range(0, len(ids) - prefix, self.block):
            block = ids[prefix + start : prefix + start + self.block]
            with torch.no_grad(), _rewriting_masks(self.model, prefix, slots):
                out = self.model(input_ids=self._tensor(block), use_cache=True, **{self._cache_argument: cache})
            yield start, out.logits[0]

    def _both(
        self, ids: NDArray[np.int64], prefix: int, slots: list[_Slots]
    ) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """(start, plain logits, replaced logits) of each block, in lock step; the plain ones are taken from memory where they are there."""
        known = self._known_plain(ids, prefix)
        plain = None if known is not None else self._continue(ids, prefix, self._slots(ids, prefix, None))
        count = len(ids) - prefix
        keep = np.empty((count, self.vocabulary), np.float32) if count * self.vocabulary <= _LOGITS_KEPT else None
        for start, logits in self._continue(ids, prefix, slots):
            replaced = _float32(logits)
            if known is not None:
                true = known[start : start + len(replaced)]
            else:
                assert plain is not None
                true = _float32(next(plain)[1])
                if keep is not None:
                    keep[start : start + len(true)] = true
            yield start, true, replaced
        if known is None and keep is not None:
            self._plain = self._text(ids, prefix), keep

    def _known_plain(self, ids: NDArray[np.int64], prefix: int) -> NDArray[Any] | None:
        return self._plain[1] if self._plain is not None and self._plain[0] == self._text(ids, prefix) else None

    def _text(self, ids: NDArray[np.int64], prefix: int) -> bytes:
        return f"{prefix} {self.block} ".encode() + ids.tobytes()

    # -- arguments ---------------------------------------------------------------------------------------------------------

    def _tensor(self, ids: NDArray[np.int64]) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(ids))[None].to(self.model.device)

    def _ids(self, tokens: ArrayLike, prefix: int, rest: int) -> NDArray[np.int64]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"tokens: expected ids of shape (n,), got {ids.dtype} of shape {ids.shape}")
        if not isinstance(prefix, (int, np.integer)) or isinstance(prefix, bool) or not 1 <= prefix <= len(ids) - rest:
            raise ValueError(
                f"prefix: expected an int from 1 to {len(ids) - rest} of {len(ids)} tokens, got {prefix!r}"
            )
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            raise ValueError(f"tokens: expected ids from 0 to {self.vocabulary - 1}, got {ids.min()} to {ids.max()}")
        return ids.astype(np.int64)

    def _slots(self, ids: NDArray[np.int64], prefix: int, decoded: Replaced | None) -> list[_Slots]:
        """What stands for the prefix, layer by layer; the plain cache where `decoded` says nothing."""
        given: dict[int, Decoded | None] = {}
        if isinstance(decoded, Mapping):
            given.update(decoded)
        elif decoded is not None:
            if len(decoded) != self.depth:
                raise ValueError(
                    f"decoded: expected {self.depth} entries, one a layer (or a dict by layer), got {len(decoded)}"
                )
            given.update(enumerate(decoded))
        wrong = [i for i in given if not isinstance(i, (int, np.integer)) or not 0 <= i < self.depth]
        if wrong:
            raise ValueError(f"decoded: expected layers from 0 to {self.depth - 1}, got {wrong[0]!r}")
        slots = []
        for i, (keys, values) in enumerate(self._prefill(ids[:prefix])):
            entry = given.get(i)
            slots.append(_Slots(i, keys, values, None, None) if entry is None else _Slots.of(i, entry, keys, values))
        return slots


@dataclass(frozen=True)
class _Slots:
    """What one layer's attention reads in place of the prefix. keys (1, kv_heads, s, d), values (1, kv_heads, s, dv): tensors.

    positions (kv_heads, s): where each slot comes from, -1 for padding; None where slot i is simply token i, with weight 1. log_weights
    (kv_heads, s), or None where all are 0.
    """

    index: int
    keys: Any
    values: Any
    positions: Any
    log_weights: Any

    @classmethod
    def of(cls, index: int, decoded: Decoded, keys: Any, values: Any) -> _Slots:
        """`decoded` in the place, type and device of the plain cache's `keys` and `values`; ValueError where it does not fit."""
        import torch

        if not isinstance(decoded, Decoded):
            raise TypeError(f"decoded[{index}]: expected a Decoded or None, got {type(decoded).__name__}")
        heads, tokens = keys.shape[1:3]
        expected = (heads, keys.shape[3], values.shape[3])
        actual = (decoded.keys.shape[0], decoded.keys.shape[2], decoded.values.shape[2])
        if expected != actual:
            raise ValueError(f"decoded[{index}]: expected (kv_heads, head_dim, value_dim) = {expected}, got {actual}")
        if decoded.positions.size and decoded.positions.max() >= tokens:
            raise ValueError(
                f"decoded[{index}]: expected positions in the prefix, below {tokens}, got {decoded.positions.max()}"
            )
        size = int(decoded.kept.max())

        def tensor(array: NDArray[Any], like: Any) -> Any:
            return torch.from_numpy(np.array(array[:, :size], dtype=np.float32)).to(like.device, like.dtype)[None]

        positions = decoded.positions[:, :size]
        padded = positions < 0
        weighted = bool(np.where(padded, 0.0, decoded.log_weights[:, :size]).any())
        as_it_was = size == tokens and not weighted and bool((positions == np.arange(tokens)).all())
        return cls(
            index,
            tensor(decoded.keys, keys),
            tensor(decoded.values, values),
            None if as_it_was else torch.from_numpy(np.array(positions)).to(keys.device),
            tensor(decoded.log_weights, keys)[0] if weighted else None,
        )

    def mask(self, mask: Any, query: Any, tokens: int, prefix: int, needs_floats: bool) -> Any:
        """The mask over these slots and the `tokens` - slots continuation tokens behind them, from the model's own `mask`.

        mask: (1, 1, q, prefix + continuation), True or 0 where a query looks; None: it looks everywhere. Gives (1, 1 or query_heads, q,
        tokens): one for all heads where they keep the same positions.
        """
        import torch

        heads, size = self.positions.shape
        queries = query.shape[2]
        new = tokens - size
        if mask is None:
            # with one query there is nothing to hide; with more, causality would be left to the kernel, which knows no slots
            if queries != 1:
                raise UnsupportedModel(f"model: layer {self.index} has no attention mask for {queries} queries")
            looks = torch.ones(1, prefix + new, dtype=torch.bool, device=query.device)
        else:
            if mask.shape[1] != 1 or mask.shape[3] < prefix + new:
                raise UnsupportedModel(
                    f"model: expected one attention mask of layer {self.index} over {prefix + new} tokens for all heads, "
                    f"got shape {tuple(mask.shape)}"
                )
            looks = mask[0, 0, :, : prefix + new]
            looks = looks if looks.dtype == torch.bool else looks == 0
        past = looks[:, self.positions.clamp(min=0)].transpose(0, 1) & (self.positions >= 0)[:, None]
        visible = torch.cat([past, looks[None, :, prefix:].expand(heads, -1, -1)], dim=-1)  # (kv_heads, q, tokens)
        if self.log_weights is None and bool((self.positions == self.positions[:1]).all()):
            visible = visible[:1]
        else:
            visible = visible.repeat_interleave(query.shape[1] // heads, dim=0)
        if self.log_weights is None and not needs_floats:
            return visible[None]
        added = torch.zeros(visible.shape, dtype=query.dtype, device=query.device)
        if self.log_weights is not None:
            weights = self.log_weights.repeat_interleave(query.shape[1] // heads, dim=0)
            added[:, :, :size] = weights[:, None]
        return added.masked_fill(~visible, -torch.inf)[None]


def _cache(slots: list[_Slots], prefix: int) -> Any:
    """A transformers cache that holds `slots` and says that it has seen `prefix` tokens: masks and positions follow that length."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class Held(DynamicLayer):
        def __init__(self, entry: _Slots) -> None:
            super().__init__()
            self.lazy_initialization(entry.keys, entry.values)
            self.keys, self.values = entry.keys, entry.values
            self.unseen = prefix - entry.keys.shape[-2]

        def get_seq_length(self) -> int:
            return int(self.keys.shape[-2]) + self.unseen

        def get_mask_sizes(self, query: Any) -> tuple[int, int]:
            # the number of queries, or in older versions their positions
            return self.get_seq_length() + (query if isinstance(query, int) else len(query)), 0

    cache = DynamicCache()
    cache.layers = [Held(entry) for entry in slots]
    return cache


@contextlib.contextmanager
def _rewriting_masks(
    model: Any, prefix: int, slots: list[_Slots], queries: dict[int, Any] | None = None
) -> Iterator[None]:
    """While open, attention of the layers whose slots are not simply the prefix's tokens gets a mask that fits their slots.

    queries: filled with those that each layer asks, layer -> (1, query_heads, q, d). The model's attention function is wrapped in transformers' table of them, as in models/watch.py; with nothing to rewrite, nothing is.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    rewritten = {entry.index: entry for entry in slots if entry.positions is not None}
    if not rewritten and queries is None:
        yield
        return
    name = model.config.get_text_config()._attn_implementation
    original = None
    done: set[int] = set()

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, *args: Any, **options: Any) -> Any:
        compute = original or sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        index = getattr(module, "layer_idx", None)
        if queries is not None and index is not None:
            queries[int(index)] = query
        entry = rewritten.get(index)  # type: ignore[arg-type]
        if entry is not None:
            mask = entry.mask(mask, query, key.shape[2], prefix, needs_floats=name == "eager")
            done.add(entry.index)
        return compute(module, query, key, value, mask, *args, **options)

    with watch._LOCK, contextlib.ExitStack() as stack:
        original = None if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        stack.callback(setattr, ALL_ATTENTION_FUNCTIONS, "_local_mapping", dict(ALL_ATTENTION_FUNCTIONS._local_mapping))
        ALL_ATTENTION_FUNCTIONS[name] = attention
        yield
    missing = sorted(set(rewritten) - done)
    if missing:
        raise UnsupportedModel(
            f"model: attention of layer {missing[0]} of {type(model).__name__} does not go through transformers' attention interface, "
            f"so its dropped or weighted tokens cannot be stated"
        )


# -- comparing two runs ----------------------------------------------------------------------------------------------------


def _float32(logits: Any) -> NDArray[Any]:
    array: NDArray[Any] = logits.float().cpu().numpy()
    return array


def log_softmax_bits(logits: NDArray[Any]) -> Float:
    """log2 softmax along the last axis, float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide / np.log(2)


def _surprisal_bits(logits: NDArray[Any], targets: NDArray[np.int64]) -> Float:
    """-log2 softmax(logits)[target] of each row, (b,)."""
    found = np.empty(len(targets))
    for rows in _blocks(logits, len(targets)):
        found[rows] = -np.take_along_axis(log_softmax_bits(logits[rows]), targets[rows, None], axis=1)[:, 0]
    return found


def _compare(true: NDArray[Any], replaced: NDArray[Any]) -> tuple[Float, NDArray[np.bool_]]:
    """sum_x P(x) log2 P(x)/Q(x) of each row of logits, and whether both have the same largest entry. Equal rows give exactly 0."""
    kl = np.empty(len(true))
    for rows in _blocks(true, len(true)):
        p, q = log_softmax_bits(true[rows]), log_softmax_bits(replaced[rows])
        kl[rows] = (np.exp2(p) * (p - q)).sum(axis=1)
    return kl, true.argmax(axis=1) == replaced.argmax(axis=1)


def _blocks(logits: NDArray[Any], count: int) -> Iterator[slice]:
    step = max(1, _COMPARED_AT_ONCE // logits.shape[1])
    return (slice(start, min(start + step, count)) for start in range(0, count, step))
