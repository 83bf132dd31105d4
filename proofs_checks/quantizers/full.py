"""The yardstick of every codec: numbers kept as they are, bit for bit, at the bits that they have."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

from kvtheory.layer import Decoded, Layer
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, exact
from proofs_checks.papers import OWN

#: bytes that a header may have: magic, version, codec, shape, sizes of the parts, checksum
_HEADER = 64


def _changed(decoded: Decoded, layer: Layer) -> int:
    """How many numbers differ in their bits (-0.0 and 0.0 do)."""
    count = 0
    for back, true in ((decoded.keys, layer.keys), (decoded.values, layer.values)):
        word = f"u{true.dtype.itemsize}"
        if back.dtype != true.dtype:
            return true.size
        count += int((np.ascontiguousarray(back).view(word) != np.ascontiguousarray(true).view(word)).sum())
    return count


class _Altered:
    """`Full` on a layer that something was done to first."""

    def __init__(self, full: Any, change: Any) -> None:
        self._full, self._change = full, change

    def encode(self, layer: Layer) -> bytes:
        data: bytes = self._full.encode(self._change(layer))
        return data

    def decode(self, stream: bytes) -> Any:
        return self._full.decode(stream)


def _first(change: Any) -> Function:
    return lambda true: lambda: _Altered(true(), change)


def _through_bfloat16(x: Any) -> Any:
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


@claim(
    id="quantizers/reference-full",
    paper=OWN,
    section="the uncompressed cache, which every rate is compared with",
    statement=(
        "reference.Full gives back keys and values bit for bit in every element type, −0.0 included, and its stream holds exactly the bits "
        "of the numbers and a header of at most 64 bytes that does not depend on them."
    ),
    formula="decode(encode(x)) = x in every bit;  8 len(stream) = (bits of the element type) · numbers + 8 · header",
    expected=Verdict.HOLDS,
    functions={"codec": "reference.Full", "held_bits": "reference.held_bits"},
    mutants=[
        Mutant("numbers rounded to bfloat16", "codec", _first(
            lambda layer: layer.replace(keys=_through_bfloat16(layer.keys), values=_through_bfloat16(layer.values)))),
        Mutant("−0.0 becomes 0.0", "codec", _first(lambda layer: layer.replace(keys=layer.keys + layer.keys.dtype.type(0)))),
        Mutant("keys and values swapped", "codec", _first(lambda layer: layer.replace(keys=layer.values, values=layer.keys))),
        *systematic.scales("held_bits"),
        Mutant("a rate over the keys alone", "held_bits", lambda true: lambda data, layer: 8 * len(data) / layer.keys.size),
        Mutant("a rate that forgets the header", "held_bits",
               lambda true: lambda data, layer: 8.0 * layer.keys.dtype.itemsize),
    ],
)  # fmt: skip
def reference_full(context: Context, *, codec: Any, held_bits: Any) -> Iterator[Evidence]:
    sizes = {"kv_heads": 2, "query_heads": 2, "tokens": 32, "head_dim": 16, "queries": 1}
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        headers = set()
        for kind in ("heavy_tail", "outlier_channels"):
            drawn = context.synthetic(kind, **sizes)
            keys, values = (np.array(x, dtype=dtype) for x in (drawn.keys, drawn.values))
            keys[0, 0, :2] = -0.0, 0.0
            layer = Layer(keys, values)
            data = codec().encode(layer)
            numbers = keys.size + values.size  # a power of two: the float is exact
            where = f"{kind}, {np.dtype(dtype).name}, {numbers} numbers, seed {context.seed}"
            yield exact(
                what="numbers whose bits a round trip changes", ran_on=where, observed=_changed(codec().decode(data), layer), predicted=0,
            )  # fmt: skip
            yield exact(
                what="bits held, times the numbers = 8 len(stream)", ran_on=where,
                observed=Fraction(float(held_bits(data, layer))) * numbers, predicted=8 * len(data),
            )  # fmt: skip
            headers.add(len(data) - np.dtype(dtype).itemsize * numbers)
        yield exact(
            what="bytes beside the numbers, the same for other numbers of that shape", ran_on=f"{np.dtype(dtype).name}, two kinds",
            observed=len(headers), predicted=1, note=f"{sorted(headers)} bytes",
        )  # fmt: skip
        yield exact(
            what="bytes beside the numbers",
            ran_on=np.dtype(dtype).name,
            observed=max(headers),
            predicted=_HEADER,
            relation="<=",
        )
    for name, layer in context.real():
        yield exact(
            what="numbers of the real cache whose bits a round trip changes", ran_on=name,
            observed=_changed(codec().decode(codec().encode(layer)), layer), predicted=0,
        )  # fmt: skip
