"""What is measured: operations on a layer of some tokens, each with its check against the reference and, where there is one, its array version."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import gpu
import kvtheory
import reference
from gpu.bench import plain
from gpu.resident import device, host
from kvtheory import attention

__all__ = ["Case", "Data", "Task", "Wrong", "cases", "same", "same_stream"]


class Wrong(AssertionError):
    """A kernel's result is not the reference's."""


@dataclass(frozen=True)
class Data:
    """A layer in `xp`: keys and values (heads, tokens, dim) float16, queries (heads x group, window, dim) float16.

    The first BLOCK tokens are drawn and repeated, so that a long layer needs no generator on the device.
    """

    xp: Any
    heads: int
    tokens: int
    dim: int
    group: int = 4
    window: int = 32

    BLOCK = 4096

    @functools.cached_property
    def _block(self) -> kvtheory.Layer:
        return drawn(self.heads, min(self.tokens, self.BLOCK), self.dim, self.group, self.window)

    def _long(self, block: Any) -> Any:
        own = device(np.ascontiguousarray(block), self.xp)
        if self.tokens == block.shape[1]:
            return own
        whole = -(-self.tokens // block.shape[1])
        return self.xp.ascontiguousarray(self.xp.tile(own, (1, whole, 1))[:, : self.tokens])

    @functools.cached_property
    def keys(self) -> Any:
        return self._long(self._block.keys)

    @functools.cached_property
    def values(self) -> Any:
        return self._long(self._block.values)

    @functools.cached_property
    def queries(self) -> Any:
        return device(np.asarray(self._block.queries), self.xp)

    @property
    def layer(self) -> kvtheory.Layer:
        """On the host, for the reference."""
        return kvtheory.Layer(host(self.keys), host(self.values), host(self.queries), index=0)

    @property
    def fp16_bytes(self) -> int:
        return 2 * 2 * self.heads * self.tokens * self.dim


def drawn(heads: int, tokens: int, dim: int, group: int, window: int, seed: int = 0) -> kvtheory.Layer:
    """Keys with some strong channels and a mean, as real ones; values and queries normal."""
    rng = np.random.default_rng(seed)
    scales = np.where(np.arange(dim) % 17 == 3, 6.0, 1.0)
    keys = rng.standard_normal((heads, tokens, dim)) * scales + rng.standard_normal((heads, 1, dim))
    values = rng.standard_normal((heads, tokens, dim))
    queries = rng.standard_normal((heads * group, window, dim)) / scales
    return kvtheory.Layer(*(x.astype(np.float16) for x in (keys, values, queries)), index=0)


@functools.lru_cache(maxsize=2)
def _calibration(heads: int, dim: int, tokens: int) -> tuple[kvtheory.Layer, ...]:
    return (drawn(heads, tokens, dim, 1, 16, seed=1),)


@dataclass
class Task:
    """run: the operation, all its kernels. check: raises Wrong where what `run` gives is not right. plain: the array version.

    note: why there is no array version, "" where there is one. nbytes: of the whole operation, where it is not the sum of its kernels'.
    """

    run: Callable[[], Any]
    check: Callable[[Any], None]
    plain: Callable[[], Any] | None = None
    note: str = "no array version"
    nbytes: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """name, and what makes it ready. most: of tokens it is measured at."""

    name: str
    make: Callable[[Data], Task]
    most: int = 1 << 20


def same(name: str, got: Any, want: Any) -> None:
    got, want = np.asarray(host(got)), np.asarray(want)
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Wrong(f"{name}: expected {want.dtype} {want.shape}, got {got.dtype} {got.shape}")
    differ = np.ascontiguousarray(got).view(np.uint8) != np.ascontiguousarray(want).view(np.uint8)
    if differ.any():
        raise Wrong(f"{name}: {int(differ.sum())} of {differ.size} bytes differ from the reference's")


def same_stream(got: bytes, want: bytes) -> None:
    if got != want:
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
        raise Wrong(f"the stream, {len(got)} bytes, differs from the reference's {len(want)} from byte {at} on")


# -- codecs -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Coded:
    """A codec by name: how it is made of `reference` or `gpu`, and its array versions."""

    name: str
    make: Callable[[Any, Data], Any]
    exact: bool = True
    encoder: Callable[[Data], Callable[[], Any]] | None = None
    decoder: Callable[[Data], Callable[[], Any]] | None = None

    def encode(self, data: Data) -> Task:
        codec = self.make(gpu, data)

        def check(stream: bytes) -> None:
            known = self.make(reference, data)
            want = known.encode(data.layer)
            if self.exact:
                same_stream(stream, want)
            else:
                _as_good(known, data, stream, want)

        task = Task(lambda: codec.encode_arrays(data.keys, data.values, index=0), check)
        if self.encoder is not None:
            task.plain, task.note = self.encoder(data), ""
        return task

    def decode(self, data: Data) -> Task:
        codec = self.make(gpu, data)
        stream = codec.encode_arrays(data.keys, data.values, index=0)

        def check(found: Any) -> None:
            known = self.make(reference, data).decode(stream)
            for name, got, want in zip(("keys", "values"), found, (known.keys, known.values)):
                same(name, got, want)

        task = Task(lambda: codec.decode_arrays(stream, xp=data.xp), check)
        task.facts["held bits"] = 8 * len(stream) / (2 * data.heads * data.tokens * data.dim)
        if self.decoder is not None:
            task.plain, task.note = self.decoder(data), ""
        return task

    def attend(self, data: Data) -> Task:
        """One query a head, a step of decoding."""
        codec = self.make(gpu if self.name != "Full" else reference, data)
        stream = (
            codec.encode(data.layer) if self.name == "Full" else codec.encode_arrays(data.keys, data.values, index=0)
        )
        cache = gpu.DeviceCache(stream, codec.state, data.xp)
        queries = data.xp.ascontiguousarray(data.queries[:, :1])

        def check(found: Any) -> None:
            from gpu.device_cache import error_bound

            known = (self.make(reference, data)).decode(stream)
            q = host(queries)
            want = attention.attend(q, known.keys, known.values, log_weights=known.log_weights)
            apart, limit = np.abs(host(found) - want), error_bound(cache, known, queries)
            if not (apart <= limit).all():
                raise Wrong(
                    f"attention is off by {float(apart.max()):.3g}, where the bound allows {float(limit.max()):.3g}"
                )

        task = Task(lambda: cache.attend(queries), check)
        task.nbytes = int(cache.nbytes + queries.nbytes + 4 * queries.size)
        task.facts["held bits"] = 8 * cache.nbytes / (2 * data.heads * data.tokens * data.dim)
        if self.name == "Full":
            reason = plain.blas(data.xp)
            task.note = reason
            if not reason:
                scale = data.dim**-0.5
                task.plain = lambda: plain.attend(queries, data.keys, data.values, scale, data.xp)
        else:
            task.note = "against the fp16 kernel (Full), and decompressing before it"
        return task


def _as_good(known: Any, data: Data, stream: bytes, want: bytes) -> None:
    """Streams whose coefficients were summed in another order: the same length but for a few codes, and the same error."""
    ours, theirs = known.decode(stream), known.decode(want)
    exact = (host(data.keys), host(data.values))
    errors = [
        sum(
            float(((a.astype(np.float64) - b.astype(np.float64)) ** 2).sum()) for a, b in zip((d.keys, d.values), exact)
        )
        for d in (ours, theirs)
    ]
    # a coefficient on a threshold may fall either way: the squared error is the same then, to a rounding
    if not abs(errors[0] - errors[1]) <= 1e-6 * errors[1] or abs(len(stream) - len(want)) > 64:
        raise Wrong(
            f"squared error {errors[0]!r} in {len(stream)} bytes, the reference's is {errors[1]!r} in {len(want)}"
        )


def _turbo(bits: int) -> tuple[Callable[[Data], Any], Callable[[Data], Any]]:
    def tables(data: Data) -> tuple[Any, Any]:
        rng = np.random.default_rng(0)
        # centroids of a Gaussian of variance 1 / d, near enough for a time: quantiles
        levels = np.sort(rng.standard_normal(1 << 14))[(1 << 14 >> bits) // 2 :: 1 << 14 >> bits] / math.sqrt(data.dim)
        return (
            device(rng.choice([-1, 1], data.dim).astype(np.float32), data.xp),
            device(levels.astype(np.float32), data.xp),
        )

    def encode(data: Data) -> Callable[[], Any]:
        signs, points = tables(data)
        return lambda: [
            plain.turboquant_encode(x.reshape(-1, data.dim), signs, points, bits, data.xp)
            for x in (data.keys, data.values)
        ]

    def decode(data: Data) -> Callable[[], Any]:
        signs, points = tables(data)
        coded = encode(data)()
        rows = data.heads * data.tokens
        return lambda: [plain.turboquant_decode(one, signs, points, bits, rows, data.xp) for one in coded]

    return encode, decode


def _kivi(bits: int, group: int) -> tuple[Callable[[Data], Any], Callable[[Data], Any]]:
    def sides(data: Data) -> list[tuple[Any, int]]:
        whole = data.tokens // group * group
        return [(data.keys[:, :whole], 1), (data.values[:, :whole], 2)]

    def encode(data: Data) -> Callable[[], Any]:
        return lambda: [plain.kivi_encode(x, bits, group, axis, data.xp) for x, axis in sides(data)]

    def decode(data: Data) -> Callable[[], Any]:
        coded = encode(data)()
        shapes = [x.shape for x, _ in sides(data)]
        return lambda: [
            plain.kivi_decode(one, bits, group, axis, shape, data.xp) for one, axis, shape in zip(coded, (1, 2), shapes)
        ]

    return encode, decode


def _fit(of: Any, name: str, data: Data, **how: Any) -> Any:
    return _fitted(of.__name__, name, data.heads, data.dim, tuple(how.items()))


@functools.lru_cache(maxsize=64)
def _fitted(package: str, name: str, heads: int, dim: int, how: tuple[tuple[str, Any], ...]) -> Any:
    if package == "gpu" and hasattr(own := getattr(gpu, name), "of"):
        return own.of(_fitted("reference", name, heads, dim, how))  # a fit takes seconds
    of = {"gpu": gpu, "reference": reference}[package]
    return getattr(of, name).fit(list(_calibration(heads, dim, 512)), **dict(how))


#: a basis for each head: one of all 1,024 channels takes minutes to fit, and no shared memory holds a tile of it
_HEADS = {"joint": "head", "metric": "variance"}
CODECS = (
    _Coded("TurboQuant 3", lambda of, data: of.TurboQuant(bits=3), True, *_turbo(3)),
    _Coded("TurboQuant 4", lambda of, data: of.TurboQuant(bits=4), True, *_turbo(4)),
    _Coded("TurboQuant prod 3", lambda of, data: of.TurboQuant(bits=3, kind="prod")),
    _Coded("QJL", lambda of, data: of.QJL()),
    _Coded("PolarQuant", lambda of, data: of.PolarQuant()),
    _Coded("KIVI 2", lambda of, data: of.KIVI(bits=2), True, *_kivi(2, 32)),
    _Coded("KIVI 4", lambda of, data: of.KIVI(bits=4), True, *_kivi(4, 32)),
    _Coded("KVQuant 3", lambda of, data: _fit(of, "KVQuant", data, bits=3)),
    _Coded("PALU 3", lambda of, data: _fit(of, "PALU", data, bits=3), False),
    _Coded("MetricKLT 2 fixed", lambda of, data: _fit(of, "MetricKLT", data, bits=2, coding="fixed", **_HEADS), False),
    _Coded("MetricKLT 2 entropy", lambda of, data: _fit(of, "MetricKLT", data, bits=2, coding="entropy", **_HEADS), False),
)  # fmt: skip
ATTENDED = (
    "TurboQuant 3", "TurboQuant 4", "TurboQuant prod 3", "KIVI 2", "KIVI 4", "KVQuant 3", "MetricKLT 2 fixed", "MetricKLT 2 entropy",
)  # fmt: skip
FULL = _Coded("Full", lambda of, data: of.Full())


def _kvtc(data: Data, decode: bool) -> Task:
    """Of a cache of one layer; the reference's DEFLATE is the host's."""
    codec = _fit(gpu, "KVTC", data, bits=2)
    layers = [(data.keys, data.values)]
    stream = codec.encode_arrays(layers)

    def check_stream(found: bytes) -> None:
        known = _fit(reference, "KVTC", data, bits=2)
        want = reference.encode_cache(known, kvtheory.Cache([data.layer]))
        one, other = (reference.decode_cache(known, each)[0] for each in (found, want))
        exact = host(data.keys), host(data.values)
        errors = [
            sum(float(((a.astype(float) - b.astype(float)) ** 2).sum()) for a, b in zip((d.keys, d.values), exact))
            for d in (one, other)
        ]
        if not abs(errors[0] - errors[1]) <= 1e-6 * errors[1]:
            raise Wrong(f"squared error {errors[0]!r}, the reference's is {errors[1]!r}")

    def check_arrays(found: Any) -> None:
        known = reference.decode_cache(_fit(reference, "KVTC", data, bits=2), stream)[0]
        for name, got, want in zip(("keys", "values"), found[0], (known.keys, known.values)):
            same(name, got, want)

    if decode:
        task = Task(lambda: codec.decode_arrays(stream, xp=data.xp), check_arrays)
        task.facts["held bits"] = 8 * len(stream) / (2 * data.heads * data.tokens * data.dim)
        return task
    return Task(lambda: codec.encode_arrays(layers), check_stream)


def cases() -> tuple[Case, ...]:
    """All, in the order of the table."""
    from gpu.bench import operations as other

    out = []
    for coded in CODECS:
        out += [Case(f"{coded.name} encode", coded.encode), Case(f"{coded.name} decode", coded.decode)]
    # DEFLATE of the host takes a minute for a million tokens
    out += [
        Case("KVTC 2 encode", lambda data: _kvtc(data, False), 1 << 15),
        Case("KVTC 2 decode", lambda data: _kvtc(data, True), 1 << 15),
    ]
    out.append(Case("Full attend", FULL.attend))
    by_name = {coded.name: coded for coded in CODECS}
    out += [Case(f"{name} attend", by_name[name].attend) for name in ATTENDED]
    out += [
        Case("pack 3", other.pack),
        Case("unpack 3", other.unpack),
        Case("gather a fifth", other.gather),
        Case("cast", other.cast),
    ]
    out.append(Case("merge pairs", other.merge, 1 << 15))  # its groups are lists on the host
    out += [
        Case("SnapKV mass", lambda data: other.mass(data, "float32")),
        Case("SnapKV mass float64", lambda data: other.mass(data, "float64")),
        Case("ScissorHands float64", other.counts),
        Case("profiles X^T X y", lambda data: other.sketch(data, "float32")),
        Case("profiles X^T X y float64", lambda data: other.sketch(data, "float64")),
        Case("profiles gram", other.gram, 8192),
    ]
    return tuple(out)
