"""Operations beside codecs: packing, tokens, scores, profiles; each with its check and, where there is one, its array version."""

from __future__ import annotations

from typing import Any

import numpy as np

import reference
from gpu.bench import plain
from gpu.bench.cases import Data, Task, Wrong, same, same_stream
from gpu.resident import device, host
from reference import snapkv as numpy_snapkv

# -- packing, tokens ---------------------------------------------------------------------------------------------


def _codes(data: Data, bits: int) -> Any:
    n = min(data.tokens, Data.BLOCK) * data.heads * data.dim
    block = np.random.default_rng(3).integers(0, 1 << bits, n).astype(np.uint8)
    whole = data.heads * data.tokens * data.dim
    return data.xp.ascontiguousarray(data.xp.tile(device(block, data.xp), -(-whole // n))[:whole])


def pack(data: Data) -> Task:
    from gpu import packing

    codes = _codes(data, 3)

    def check(found: Any) -> None:
        want = reference.packing.pack(host(codes), 3)
        same_stream(host(found).astype("<u4").tobytes()[: len(want)], want)

    task = Task(lambda: packing.pack_words(codes, 3), check, note="")
    task.plain = lambda: plain.pack(codes, 3, data.xp)
    return task


def unpack(data: Data) -> Task:
    from gpu import packing

    codes = _codes(data, 3)
    packed, count = packing.pack(codes, 3), int(codes.size)

    def check(found: Any) -> None:
        same("codes", found, host(codes))

    there = device(np.frombuffer(packed, np.uint8), data.xp)
    task = Task(lambda: packing.unpack(packed, count, 3, data.xp), check, note="")
    task.plain = lambda: plain.unpack(there, count, 3, data.xp)
    return task


def gather(data: Data) -> Task:
    from gpu import tokens

    rng = np.random.default_rng(5)
    keep = max(1, data.tokens // 5)
    index = [np.sort(rng.choice(data.tokens, keep, replace=False)) for _ in range(data.heads)]
    there = [device(one, data.xp) for one in index]

    def check(found: Any) -> None:
        keys = host(data.keys)
        same("tokens", found, np.stack([keys[h, one] for h, one in enumerate(index)]))

    task = Task(lambda: tokens.gather(data.keys, index), check, note="")
    task.plain = lambda: data.xp.stack([data.keys[h][one] for h, one in enumerate(there)])
    return task


def merge(data: Data) -> Task:
    """Neighbours, two at a time, with weights 1 and 2."""
    from gpu import tokens

    pairs = [np.array([2 * i, 2 * i + 1]) for i in range(data.tokens // 2)]
    weights = [np.array([1.0, 2.0])] * len(pairs)

    def check(found: Any) -> None:
        keys = host(data.keys)[:, : 2 * len(pairs)].astype(np.float64).reshape(data.heads, len(pairs), 2, data.dim)
        same("means", found[0], ((keys[:, :, 0] + 2.0 * keys[:, :, 1]) / 3.0).astype(np.float16))

    return Task(lambda: tokens.merge(data.keys, [pairs] * data.heads, [weights] * data.heads), check)


def cast(data: Data) -> Task:
    from gpu.casts import cast

    def check(found: Any) -> None:
        same("float32", found, host(data.keys).astype(np.float32))

    task = Task(lambda: cast(data.keys, np.float32), check, note="")
    task.plain = lambda: data.keys.astype(np.float32)
    return task


# -- scores and profiles -----------------------------------------------------------------------------------------------------


def mass(data: Data, precision: Any) -> Task:
    from gpu import scores

    def check(found: Any) -> None:
        want = numpy_snapkv.attention_mass(data.layer, np.arange(data.window))
        rows = scores.Rows(data.queries, data.keys, None, precision)
        relative, absolute = scores._summed(rows, rows.error(rows.largest()), data.window * data.group)
        apart = np.abs(host(found).astype(np.float64) - want)
        if not (apart <= want * (relative + 2.0**-40) + absolute).all():
            raise Wrong(
                f"attention mass is off by {float((apart / np.maximum(want, 1e-300)).max()):.3g}, bound {relative:.3g}"
            )

    task = Task(lambda: scores.attention_mass(data.queries, data.keys, precision=precision), check)
    task.note = plain.blas(data.xp)
    if not task.note:
        task.plain = lambda: plain.mass(data.queries, data.keys, data.dim**-0.5, data.xp)
    return task


def counts(data: Data) -> Task:
    from gpu import scores

    codec = reference.ScissorHands(keep=0.2, history=data.window)

    def check(found: Any) -> None:
        want = codec.places(data.layer)
        if [len(one) for one in found.tokens] != [len(one) for one in want]:
            raise Wrong("another number of tokens is kept")
        if found.certain and any((a != b).any() for a, b in zip(found.tokens, want)):
            raise Wrong("certain of other tokens than the reference's")

    return Task(lambda: scores.scissorhands(codec, data.queries, data.keys, precision="float64"), check)


def _head(data: Data, precision: Any, tokens: int | None = None) -> tuple[Any, Any]:
    from gpu.profiles import Profiles

    # one head of few queries; float32, that the accumulators have
    arrays = [
        data.xp.ascontiguousarray(x).astype(np.float32)
        for x in (data.queries[0, :8], data.keys[0][:tokens], data.values[0][:tokens])
    ]
    return Profiles(arrays[0], arrays[1], arrays[2], precision=precision), arrays


def sketch(data: Data, precision: Any) -> Task:
    head, _ = _head(data, precision)
    y = np.random.default_rng(6).standard_normal((head.shape[1], 16)).astype(head.element)
    there = device(y, data.xp)

    def check(found: Any) -> None:
        b, v, o, roots = (host(x).astype(np.float64) for x in (head.b, head.v, head.o, head.roots))
        x = (roots[:, None, None] * b[:, :, None] * (v[:, None] - o)).reshape(len(b), -1)
        size = np.abs(x).T @ (np.abs(x) @ np.abs(y.astype(np.float64)))
        terms = sum(x.shape) + 12
        limit = 2 * terms * float(np.finfo(head.element).eps) * size + 1e-30
        if not (np.abs(host(found) - x.T @ (x @ y.astype(np.float64))) <= limit).all():
            raise Wrong("X^T X y is beyond its bound")

    return Task(lambda: head.normal(there), check)


def gram(data: Data) -> Task:
    head, _ = _head(data, "float32", min(data.tokens, 8192))

    def check(found: Any) -> None:
        b, v, o, roots = (host(x).astype(np.float64) for x in (head.b, head.v, head.o, head.roots))
        x = (roots[:, None, None] * b[:, :, None] * (v[:, None] - o)).reshape(len(b), -1)
        r = roots[:, None] * b
        sizes = [np.abs(v) @ np.abs(o).T, np.abs(v) @ np.abs(v).T]
        size = (r @ r.T) * sizes[1] + (r * sizes[0]) @ r.T + r @ (r * sizes[0]).T + (r * (o**2).sum(axis=1)) @ r.T
        limit = 4 * (2 * b.shape[1] + 2 * v.shape[1] + 20) * 2.0**-24 * size + 1e-30
        if not (np.abs(host(found) - x @ x.T) <= limit).all():
            raise Wrong("X X^T is beyond its bound")

    return Task(head.gram, check)
