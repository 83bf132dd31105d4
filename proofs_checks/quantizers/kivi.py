"""KIVI: why keys are grouped by channel, and where that makes no difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvtheory import synthetic
from kvtheory.distortion import attention_error
from kvtheory.layer import Decoded, Layer
from kvtheory.statistics import geometric_mean_interval
from proofs_checks.claim import Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Relation, exact, numerical, statistical
from proofs_checks.quantizers.codec import _Altered, _unchanged

WINDOW = 128
SEEDS = 16


class _Sides:
    """A codec whose decoded keys and values are made of both of them."""

    def __init__(self, codec: Any, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self._codec, self._change = codec, change

    def encode(self, layer: Layer) -> bytes:
        data: bytes = self._codec.encode(layer)
        return data

    def decode(self, stream: bytes) -> Decoded:
        got = self._codec.decode(stream)
        return Decoded.of(*self._change(got.keys, got.values), np.arange(got.keys.shape[1]))


def _sides(change: Callable[[Any, Any], tuple[Any, Any]]) -> Callable[[Any], Any]:
    return lambda true: lambda **options: _Sides(true(**options), change)


@claim(
    id="quantizers/kivi-channels",
    paper="2402.02750",
    section="section 3.1 to 3.2: keys by channel",
    statement=(
        "At the same bits, groups of one channel instead of one token lower the squared error of keys more than fivefold where "
        "a few channels are "
        "large in all tokens, and change nothing where no channel differs from another; on the real cache they lower it, and "
        "that of the attention "
        "output."
    ),
    formula="E‖k − k̂‖² by channel / by token: ≤ 1/5 with outlier channels, = 1 for independent normal channels, < 1 on real keys",
    assumptions=("the kinds of kvtheory.synthetic; the layers of the cache; 2 and 4 bits, groups of 32",),
    expected=Verdict.HOLDS_UNDER,
    functions={"codec": "reference.KIVI"},
    mutants=[
        Mutant("keys by token", "codec", _sides(lambda k, v: (v, v))),
        Mutant("both by channel", "codec", _sides(lambda k, v: (k, k))),
        Mutant("keys by token, values by channel", "codec", _sides(lambda k, v: (v, k))),
        Mutant("one bit more for keys", "codec", lambda true: lambda *, bits: _Pair(true(bits=bits + 1), true(bits=bits))),
        Mutant("keys 5 % too long", "codec", lambda true: lambda **options: _Altered(true(**options), _unchanged, lambda x, side: x * (1.05 if side == "key" else 1))),
    ],
)  # fmt: skip
def kivi_channels(context: Context, *, codec: Any) -> Iterator[Evidence]:
    # One array as keys and as values: the codec itself groups it both ways. 128 tokens more, whose values stay in full.
    level = 1 - context.alpha(4)
    kinds = {kind: context.memo(kind, partial(_drawn, context, kind)) for kind in ("gaussian", "outlier_channels")}
    cases: list[tuple[str, Relation, float, float, str]] = [
        ("gaussian", "=", 1.0, 0.05, "= 1 where no channel differs, within 5 %"),
        ("outlier_channels", "<=", 0.2, 0.0, "≤ 1/5 where two channels of 64 have mean 20 and deviation 4"),
    ]
    for bits in (2, 4):
        for kind, relation, predicted, margin, what in cases:
            ratios = [_ratio(codec, x, bits) for x in kinds[kind]]
            yield statistical(
                what=f"squared error of keys by channel over by token {what}; geometric mean over layers",
                ran_on=f"{kind}, {bits} bits, {SEEDS} layers of 2 × 256 × 64",
                interval=geometric_mean_interval(ratios, level), predicted=predicted, relation=relation,
                margin=margin,
            )  # fmt: skip
    for label, layer in context.real():
        for bits in (2, 4):
            keys, keys_by_token = _both(codec, layer.keys, bits)
            values_by_channel, values = _both(codec, layer.values, bits)
            yield numerical(
                what="squared error of real keys by channel over by token < 1", ran_on=f"{label}, {bits} bits",
                observed=_error(keys, layer.keys) / _error(keys_by_token, layer.keys),
                predicted=1.0, relation="<", tolerance=0.0, because="errors measured in float64",
            )  # fmt: skip
            by_channel, by_token = (_attention(layer, k, layer.values) for k in (keys, keys_by_token))
            yield numerical(
                what="attention error with keys by channel over keys by token < 1, values exact", ran_on=f"{label}, {bits} bits",
                observed=by_channel / by_token,
                predicted=1.0, relation="<", tolerance=0.0, because="errors measured in float64",
                note=f"{by_channel:.4f} and {by_token:.4f}",
            )  # fmt: skip
            if bits == 2:
                by_channel, by_token = (_attention(layer, layer.keys, v) for v in (values_by_channel, values))
                yield numerical(
                    what="attention error with values by channel over values by token > 1, keys exact: the other half of KIVI's rule", ran_on=f"{label}, {bits} bits",
                    role="assumption", observed=by_channel / by_token, predicted=1.0, relation=">", tolerance=0.0,
                    because="errors measured in float64",
                    note="by channel is better where no token's values are large for all; with a sink, whose values are tiny, it is far worse",
                )  # fmt: skip
    held = codec(bits=2)
    x = np.concatenate([kinds["gaussian"][0]] * 2, axis=1)
    yield exact(
        what="tokens of 512 whose keys, and whose values, come back changed: all keys, and all values but the last 128",
        ran_on="gaussian, 2 bits",
        observed=" ".join(str(_changed(back, x)) for back in _decoded(held, x)), predicted="512 384", role="control",
    )  # fmt: skip


class _Pair:
    """Keys of one codec, values of another."""

    def __init__(self, keys: Any, values: Any) -> None:
        self._codecs = keys, values

    def encode(self, layer: Layer) -> list[bytes]:
        return [one.encode(layer) for one in self._codecs]

    def decode(self, streams: list[bytes]) -> Decoded:
        keys, values = (one.decode(data) for one, data in zip(self._codecs, streams))
        return Decoded.of(keys.keys, values.values, np.arange(keys.keys.shape[1]))


def _decoded(codec: Any, x: Any) -> tuple[Any, Any]:
    back = codec.decode(codec.encode(Layer(x, x)))
    return back.keys, back.values


def _both(codec: Any, x: Any, bits: int) -> tuple[Any, Any]:
    """x (heads, tokens, d) coded by channel and by token: filled up with zeros, so that none of it is recent."""
    tokens = x.shape[1]
    filled = np.zeros((x.shape[0], (-(-tokens // WINDOW) + 1) * WINDOW, x.shape[2]), x.dtype)
    filled[:, :tokens] = x
    keys, values = _decoded(codec(bits=bits), filled)
    return keys[:, :tokens], values[:, :tokens]


def _drawn(context: Context, kind: str) -> list[Any]:
    seeds = range(SEEDS * context.seed, SEEDS * (context.seed + 1))
    return [synthetic.make(kind, tokens=256, queries=0, seed=seed).keys.astype(np.float16) for seed in seeds]


def _ratio(codec: Any, x: Any, bits: int) -> float:
    by_channel, by_token = _both(codec, x, bits)
    return _error(by_channel, x) / _error(by_token, x)


def _attention(layer: Layer, keys: Any, values: Any) -> float:
    return attention_error(layer, Decoded.of(keys, values, layer.positions))


def _error(back: Any, x: Any) -> float:
    return float(((back.astype(np.float64) - x.astype(np.float64)) ** 2).sum())


def _changed(back: Any, x: Any) -> int:
    return int((back != x).any(axis=(0, 2)).sum())
