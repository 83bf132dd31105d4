"""The part of one request in one layer that is held as bytes: streams, and what a receiver decodes from them.

A codec that can append has one stream, which grows; one that cannot begins another for each piece of the text that it is given. A beam
search may give two requests the same past: streams are shared until one of them grows.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import ChainMap
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.layer import Decoded, Layer
from reference.codec import Appender, Codec

__all__ = ["Coded", "Segment"]

Array = NDArray[Any]


@dataclass
class Segment:
    """A stream of the tokens first .. first + count - 1 of a request, of which the first `visible` are still there.

    appender: what makes it longer, None where nothing does; shared: whether another request may hold the same appender.
    """

    first: int
    count: int
    visible: int
    stream: bytes
    decoded: Decoded
    appender: Appender | None
    shared: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Segment:
        """The same for another cache: streams never change, and an appender is copied by who first appends."""
        self.shared = True
        return replace(self)

    @property
    def whole(self) -> bool:
        """Whether each head holds every token, at its place."""
        return bool((self.decoded.kept == self.count).all())

    def merged(self) -> bool:
        """Whether tokens stand for others: fewer of them, with weights."""
        return not self.whole and bool(self.decoded.log_weights[self.decoded.log_weights > -np.inf].any())


@dataclass
class Coded:
    """sink_keys (kv_heads, sinks, d), sink_values (kv_heads, sinks, dv): the first tokens, exact. segments: in time order.

    end: tokens before it are sinks or coded, those from it on are exact and lie elsewhere. 0: nothing is coded, and there are no sinks yet.
    """

    sink_keys: Array | None = None
    sink_values: Array | None = None
    segments: list[Segment] = field(default_factory=list)
    end: int = 0

    @property
    def sinks(self) -> int:
        return 0 if self.sink_keys is None else int(self.sink_keys.shape[1])

    @property
    def whole(self) -> bool:
        """Whether every token is still there in every head."""
        return all(segment.whole for segment in self.segments)

    def take(self, codec: Codec, layer: Layer) -> None:
        """Code the tokens of `layer`, which follow those before. Where the codec refuses them nothing changes."""
        last = self.segments[-1] if self.segments else None
        if last is not None and last.appender is not None:
            appender = last.appender
            if last.shared:
                appender = _copied(appender)
            appender.append(layer.keys, layer.values, layer.positions)
            stream = appender.stream()
            count = last.count + layer.tokens
            self.segments[-1] = Segment(
                last.first, count, count, stream, decoded_of(codec, stream), appender, shared=False
            )
        else:
            try:
                appender = codec.appender(layer)
                stream = appender.stream()
            except TypeError:  # it cannot append; what else may be wrong with the layer, encode says again
                appender, stream = None, codec.encode(layer)
            self.segments.append(
                Segment(self.end, layer.tokens, layer.tokens, stream, decoded_of(codec, stream), appender)
            )
        self.end += layer.tokens

    def cut(self, tokens: int) -> None:
        """Leave the first `tokens` of the request, sinks < tokens < end. ValueError where a token stands for some that would go."""
        kept: list[Segment] = []
        for segment in self.segments:
            left = min(segment.visible, tokens - segment.first)
            if left == segment.visible:
                kept.append(segment)
            elif left > 0:
                if segment.merged():
                    raise ValueError(
                        f"tokens_to_remove: the first {tokens} tokens are to stay, but tokens before stand, with weights, for some behind them"
                    )
                # what an appender holds cannot be taken out of it
                kept.append(replace(segment, visible=left, appender=None))
        self.segments, self.end = kept, tokens

    def forked(self, again: bool) -> Coded:
        """The same for another request; again: more than one goes on from here."""
        segments = [replace(segment, shared=segment.shared or again) for segment in self.segments]
        return replace(self, segments=segments)


def _copied(appender: Appender) -> Appender:
    """An appender that goes on alone, of the same codec. By pickling within the process: some hold memoryviews, which copy.deepcopy refuses."""
    codec = appender.codec
    written = io.BytesIO()
    pickler = pickle.Pickler(written)
    pickler.dispatch_table = ChainMap({memoryview: lambda view: (bytes, (bytes(view),))}, copyreg.dispatch_table)  # type: ignore[arg-type]
    pickler.persistent_id = lambda one: "codec" if one is codec else None  # type: ignore[method-assign, assignment]
    pickler.dump(appender)
    reader = pickle.Unpickler(io.BytesIO(written.getvalue()))
    reader.persistent_load = lambda name: codec  # type: ignore[method-assign, assignment]
    twin: Appender = reader.load()
    return twin


def decoded_of(codec: Codec, stream: bytes) -> Decoded:
    """What a receiver who has the codec's state decodes."""
    decoded: Decoded = codec.decode(stream)
    return decoded
