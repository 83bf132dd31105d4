"""What all codecs share: bytes in, bytes out; the registry; states; growing streams.

A codec is a frozen dataclass whose fields are its parameters. It writes the numbers of a layer as *parts*, byte strings with
names, and reads them back; the container, its checksum, parameters, state and their checks are done here, once:

    class Halve(Codec):
        part_names = ("shape", "codes")
        def encode_parts(self, layer): ...      -> list of bytes, one for each name
        def decode_parts(self, parts): ...      -> Decoded, from one Reader for each name

A codec fitted to calibration data also overrides `state_parts` and `from_state`. `reference._CODECS` lists the names.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.layer import Cache, Decoded, Layer
from kvtheory.layer.record import as_array
from reference import parameters, stream
from reference.errors import CorruptStream, StateMismatch
from reference.shape import Shape
from reference.stream import Header, Kind, Part, Reader

__all__ = [
    "Appender",
    "Codec",
    "codec_class",
    "codecs",
    "decode",
    "decode_cache",
    "encode_cache",
    "load",
    "register",
]

Scope = Literal["layer", "cache", "sessions"]
Layers = Cache | Sequence[Layer]

_registered: dict[str, type[Codec]] = {}


class Codec(abc.ABC):
    """Base of all codecs.

    codec_id: its name in streams, the class's own. scope: "layer" (`encode` takes a Layer), "cache" (a Cache, layers or tokens
    coded together) or "sessions". needs: optional parts of a layer that `encode` requires, e.g. {"queries", "extras:key_fisher"}.
    streaming: whether an Appender's stream equals `encode` of all tokens at once, byte for byte. part_names: of one layer's parts.
    """

    codec_id: ClassVar[str]
    scope: ClassVar[Scope] = "layer"
    needs: ClassVar[frozenset[str]] = frozenset()
    streaming: ClassVar[bool] = False
    part_names: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.codec_id = cls.__name__

    # -- what a codec defines ------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def encode_parts(self, data: Any) -> list[Part]:
        """The parts of a Layer (or, of scope "cache", of a Cache); its arrays are of floating types, but may hold NaN or inf."""

    @abc.abstractmethod
    def decode_parts(self, parts: list[Reader]) -> Any:
        """Decoded (of scope "cache": list of Decoded) from as many Readers as part_names. Hostile bytes: CorruptStream only."""

    def state_parts(self) -> list[Part]:
        """What `fit` found, as bytes; none for a data-oblivious codec."""
        return []

    @classmethod
    def from_state(cls, arguments: dict[str, Any], parts: list[Reader]) -> Codec:
        """The codec with these parameters and the state that `state_parts` wrote."""
        raise CorruptStream(f"state: {cls.codec_id} has none", parts[0].offset if parts else 0)

    def decode_flops(self, stream: bytes) -> int:
        """Arithmetic operations (additions and multiplications) to decode a stream; comparisons, moves and unpacking are free."""
        raise NotImplementedError(f"decode_flops: {self.codec_id} does not say")

    def start(self, layer: Layer) -> Appender:
        """An Appender that has taken all of `layer`; codecs that can append override it."""
        raise TypeError(f"appender: {self.codec_id} cannot append to a stream")

    @classmethod
    def shapes_in(cls, parts: list[Reader]) -> list[Shape]:
        """Shapes of the layers that a group of parts holds; default: of the part named "shape". CorruptStream if one cannot be read."""
        named = [part for name, part in zip(cls.part_names, parts) if name == "shape"]
        return [Shape.read(part) for part in named]

    # -- how it composes: reference.Pipeline ---------------------------------------------------------------------------

    def reduce(self, layer: Layer) -> Decoded:
        """What a later stage is to code in place of `layer`; a codec that only selects or merges tokens says so without a stream."""
        decoded: Decoded = self.decode(self.encode(layer))
        return decoded

    def encode_at(self, data: Any, kept: Any) -> list[Part]:
        """`encode_parts` where each head has tokens of its own, at `kept.positions(tokens)` in place of the layer's positions.

        kept: a reference.kept.Kept; of scope "cache" a list of them beside the list of layers. Codecs that undo RoPE override
        this and `decode_at`; others need no positions.
        """
        return self.encode_parts(data)

    def decode_at(self, parts: list[Reader], kept: Any) -> Any:
        """`decode_parts` of what `encode_at` wrote; the positions in what it returns mean nothing.

        `kept` says how many tokens a head has, whatever `parts` say: call `kept.positions` when the sizes are checked.
        """
        return self.decode_parts(parts)

    # -- what follows from it ------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> dict[str, Any]:
        """Name and value of each constructor argument that is written into the stream."""
        return {name: getattr(self, name) for name in parameters.names(type(self))}

    @functools.cached_property
    def state(self) -> bytes:
        """What was fitted to calibration data, as a sealed byte string for `reference.load`; b"" if nothing was."""
        parts = self.state_parts()
        return stream.write(Header(Kind.STATE, self.codec_id, parameters.write(self)), [parts]) if parts else b""

    @property
    def state_bytes(self) -> int:
        return len(self.state)

    def encode(self, data: Any) -> bytes:
        """The stream of a Layer; of a Cache, for a codec of scope "cache".

        ValueError names a missing need or the first NaN or inf (head, token, channel); TypeError what is no Layer or Cache.
        """
        if self.scope == "cache":
            layers = layers_of(data)
            for layer in layers:
                self._require(layer)
            return stream.write(self._header(Kind.CACHE), [self.encode_parts(data)])
        if self.scope != "layer":
            raise TypeError(f"encode: {self.codec_id} has scope {self.scope!r} and no encode of a layer")
        return stream.write(self._header(Kind.LAYER), [self.encode_parts(self._require(data))])

    def decode(self, stream: bytes) -> Any:
        """What a stream of this codec holds: Decoded, or a list of them. Its parameters are taken from the stream, the state from self.

        CorruptStream for bytes that are no stream of this codec, StateMismatch for one written with another state.
        """
        header, groups = _read(stream)
        return self._decode(header, groups)

    def appender(self, layer_so_far: Layer) -> Appender:
        """A growing stream that holds `layer_so_far` already; TypeError if this codec cannot append."""
        return self.start(self._require(layer_so_far))

    def _header(self, kind: Kind) -> Header:
        return Header(kind, self.codec_id, parameters.write(self), self._digest)

    @functools.cached_property
    def _digest(self) -> bytes:
        return stream.digest(self.state)

    def _require(self, layer: Any) -> Layer:
        if not isinstance(layer, Layer):
            raise TypeError(f"layer: expected a kvtheory.Layer, got {type(layer).__name__}")
        layer.require(*sorted(self.needs), by=self.codec_id)
        return layer

    def _decode(self, header: Header, groups: list[list[Reader]]) -> Any:
        codec = self._like(header)
        if header.kind is Kind.LAYERS:
            return [codec.decode_parts(codec._named(group)) for group in groups]
        return codec.decode_parts(codec._named(groups[0]))

    def _like(self, header: Header) -> Codec:
        """This codec with a stream's parameters."""
        if header.codec != self.codec_id:
            raise CorruptStream(
                f"codec: expected a stream of {self.codec_id}, got one of {header.codec}", len(stream.MAGIC) + 2
            )
        if header.digest != self._digest:
            written, held = _state_name(header.digest), _state_name(self._digest)
            raise StateMismatch(f"{self.codec_id}: the stream was written with {written}, given is {held}")
        alone = {"cache": (Kind.CACHE,), "sessions": (Kind.SESSIONS,)}
        wanted = alone.get(self.scope, (Kind.LAYER, Kind.LAYERS))
        if header.kind not in wanted:
            raise CorruptStream(f"kind: expected {wanted[0].name}, got {header.kind.name}", len(stream.MAGIC) + 1)
        # a fitted codec's parameters are part of its state, whose digest matched
        return self if self._digest else from_parameters(type(self), header)

    def _named(self, group: list[Reader]) -> list[Reader]:
        if len(group) != len(self.part_names):
            offset = group[0].offset if group else 0
            raise CorruptStream(f"{self.codec_id}: expected {len(self.part_names)} parts, got {len(group)}", offset)
        return group


class Appender(abc.ABC):
    """A growing stream of one layer."""

    def __init__(self, codec: Codec, shape: Shape) -> None:
        self.codec, self.shape = codec, shape

    @property
    def tokens(self) -> int:
        return self.shape.tokens

    def append(self, keys: Any, values: Any, positions: Any = None) -> None:
        """More tokens: keys (kv_heads, n, head_dim), values (kv_heads, n, value_dim), of the layer's element types.

        positions (n,) ascending, default right behind the last one. Nothing changes if an argument is refused.
        """
        keys, values = as_array("keys", keys), as_array("values", values)
        shape = self.shape
        sizes = {"kv_heads": shape.kv_heads, "head_dim": shape.head_dim, "value_dim": shape.value_dim}
        sizes = checks.shape("keys", keys, ("kv_heads", "n", "head_dim"), sizes)
        checks.shape("values", values, ("kv_heads", "n", "value_dim"), sizes)
        for name, array, dtype in (("keys", keys, shape.key_dtype), ("values", values, shape.value_dtype)):
            if array.dtype.newbyteorder("=") != dtype:
                raise TypeError(f"{name}: expected elements of {dtype} like the tokens before, got {array.dtype}")
            checks.finite(name, array, ("head", "token", "channel"))
        if positions is not None:
            positions = as_array("positions", positions).astype(np.int64)
            checks.shape("positions", positions, ("n",), sizes)
        grown = shape.extended(sizes["n"], positions)
        self.take_at(keys, values, np.asarray(grown.positions[shape.tokens :], np.int64))
        self.shape = grown

    def take_at(self, keys: NDArray[Any], values: NDArray[Any], positions: NDArray[np.int64]) -> None:
        """`take`, for codecs that undo RoPE: positions (n,) of the tokens."""
        self.take(keys, values)

    @abc.abstractmethod
    def take(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        """Take the checked tokens in."""

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """The parts of all tokens so far."""

    def stream(self) -> bytes:
        """The stream of all tokens so far."""
        return stream.write(self.codec._header(Kind.LAYER), [self.parts()])


def _state_name(digest: bytes) -> str:
    return f"the state {digest.hex()}" if digest else "no state"


# -- registry ----------------------------------------------------------------------------------------------------------


def register(codec: type[Codec]) -> type[Codec]:
    """Make streams of a codec of one's own readable by `reference.decode`; a class decorator. ValueError for a taken name."""
    from reference import _CODECS

    if codec.codec_id in _CODECS or _registered.get(codec.codec_id, codec) is not codec:
        raise ValueError(f"codec: the name {codec.codec_id!r} is taken")
    _registered[codec.codec_id] = codec
    return codec


def codec_class(name: str) -> type[Codec]:
    """The codec class of that name; LookupError for an unknown one."""
    import importlib

    from reference import _CODECS

    if name in _CODECS:
        return getattr(importlib.import_module(_CODECS[name]), name)  # type: ignore[no-any-return]
    if name in _registered:
        return _registered[name]
    raise LookupError(f"no codec {name!r}; there are {', '.join([*_CODECS, *_registered])}")


def codecs(scope: Scope | None = None) -> dict[str, type[Codec]]:
    """Name and class of every codec (of one scope: "layer", "cache" or "sessions")."""
    from reference import _CODECS

    if scope not in (None, "layer", "cache", "sessions"):
        raise ValueError(f'scope: expected "layer", "cache", "sessions" or None, got {scope!r}')
    every = {name: codec_class(name) for name in (*_CODECS, *_registered)}
    return {name: codec for name, codec in every.items() if scope in (None, codec.scope)}


def from_parameters(codec: type[Codec], header: Header) -> Codec:
    """A data-oblivious codec from the parameters in a stream's header."""
    offset = len(stream.MAGIC) + 3 + len(header.codec)
    arguments = arguments_of(codec, header)
    try:
        return codec(**arguments)
    except (TypeError, ValueError) as problem:
        raise CorruptStream(f"parameters of {codec.codec_id}: {problem}", offset) from None


def arguments_of(codec: type[Codec], header: Header) -> dict[str, Any]:
    offset = len(stream.MAGIC) + 3 + len(header.codec)
    reader = Reader(header.parameters, offset + len(stream.varint(len(header.parameters))))
    arguments = parameters.read(codec, reader, codec_class)
    reader.end(f"parameters of {codec.codec_id}")
    return arguments


def _read(data: bytes) -> tuple[Header, list[list[Reader]]]:
    header, groups = stream.read(data)
    if header.kind is Kind.STATE:
        raise CorruptStream("a codec's state, not a stream: give it to reference.load", len(stream.MAGIC) + 1)
    return header, groups


def class_of(header: Header) -> type[Codec]:
    try:
        return codec_class(header.codec)
    except LookupError as problem:
        raise CorruptStream(f"codec: {problem.args[0]}", len(stream.MAGIC) + 2) from None


def load(state: bytes) -> Codec:
    """The codec whose `state` this is. CorruptStream for bytes that are none."""
    header, groups = stream.read(state)
    if header.kind is not Kind.STATE:
        raise CorruptStream("a stream, not a codec's state: give it to reference.decode", len(stream.MAGIC) + 1)
    codec = class_of(header)
    return codec.from_state(arguments_of(codec, header), groups[0])


def from_state_bytes(state: Reader, like: Codec) -> Codec:
    """The codec whose state is all of `state`, of the class and the parameters of `like`; CorruptStream if it is another's."""
    start = state.offset
    data = bytes(state.rest())
    try:
        header, groups = stream.read(data)
        if (header.kind, header.codec, header.parameters) != (Kind.STATE, like.codec_id, parameters.write(like)):
            raise CorruptStream(f"state: expected one of {like}, got one of {header.codec}", 0)
        return type(like).from_state(like.parameters, groups[0])
    except CorruptStream as problem:
        raise CorruptStream(problem.problem, start + problem.offset) from None


# -- streams of any codec ----------------------------------------------------------------------------------------------


def decode(data: bytes, state: bytes = b"") -> Any:
    """Any stream: Decoded, or a list of them for a cache. `state`: that of the codec that wrote it, if it has one.

    CorruptStream or StateMismatch (both ValueErrors) for anything that cannot be read.
    """
    header, groups = _read(data)
    given = stream.digest(state)
    if given != header.digest:
        raise StateMismatch(
            f"{header.codec}: the stream was written with {_state_name(header.digest)}, given is {_state_name(given)}"
        )
    codec = load(state) if len(state) else from_parameters(class_of(header), header)
    return codec._decode(header, groups)


def encode_cache(codec: Codec, cache: Layers) -> bytes:
    """One stream of all layers, each coded alone (scope "layer") or together (scope "cache"); one layer in memory at a time."""
    if codec.scope == "cache":
        return codec.encode(cache)
    if codec.scope != "layer":
        raise TypeError(f"codec: {codec.codec_id} has scope {codec.scope!r}; expected layer or cache")
    groups = [codec.encode_parts(codec._require(layer)) for layer in layers_of(cache)]
    return stream.write(codec._header(Kind.LAYERS), groups)


def decode_cache(codec: Codec, data: bytes) -> list[Decoded]:
    """The layers of a stream of `encode_cache`."""
    decoded = codec.decode(data)
    if not isinstance(decoded, list):
        raise CorruptStream("kind: expected the stream of a cache, got one layer's", len(stream.MAGIC) + 1)
    return decoded


def layers_of(cache: Any) -> Iterable[Layer]:
    if isinstance(cache, Cache):
        return cache
    if isinstance(cache, (list, tuple)) and all(isinstance(layer, Layer) for layer in cache):
        return cache
    raise TypeError(f"cache: expected a kvtheory.Cache or a list of Layers, got {type(cache).__name__}")
