"""Codecs fitted to data: their state is bytes, its digest is in the stream, and another state is refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

import reference
from kvtheory.layer import Decoded, Layer
from reference import CorruptStream, StateMismatch
from reference.codec import Codec, codec_class, register
from reference.shape import Shape
from tests.reference.strategies import layer


@register
@dataclass(frozen=True)
class MeanShift(Codec):
    """Toy: keys and values as float16 differences from means that were fitted to calibration data."""

    scale: float = 1.0
    means: np.ndarray = field(default=None, metadata={"state": True}, repr=False, compare=False)  # type: ignore[assignment]

    part_names = ("shape", "differences")

    @classmethod
    def fit(cls, calibration: list[Layer], scale: float = 1.0) -> MeanShift:
        mean = np.mean([one.keys.astype(np.float64).mean() for one in calibration])
        return cls(scale, np.array([mean, 0.0]))

    def encode_parts(self, data):
        both = np.concatenate([data.keys.ravel() - self.means[0], data.values.ravel()]) / self.scale
        return [Shape.of(data).write(), both.astype("<f2").tobytes()]

    def decode_parts(self, parts):
        shape = Shape.read(parts[0])
        n = shape.rows * shape.head_dim
        numbers = parts[1].array("<f2", shape.numbers, "differences").astype(np.float64) * self.scale
        if not np.isfinite(numbers).all():
            parts[1].fail("differences: expected finite numbers")
        keys = (numbers[:n] + self.means[0]).reshape(shape.kv_heads, shape.tokens, -1)
        return shape.decoded(
            keys.astype(shape.key_dtype),
            numbers[n:].reshape(shape.kv_heads, shape.tokens, -1).astype(shape.value_dtype),
        )

    def state_parts(self):
        return [self.means.astype("<f8").tobytes()]

    @classmethod
    def from_state(cls, arguments, parts):
        (only,) = parts
        means = only.array("<f8", 2, "means").astype(np.float64)
        only.end("means")
        return cls(**arguments, means=means)


@register
@dataclass(frozen=True)
class Nested(Codec):
    """Toy: another codec's stream as its only part."""

    inner: Codec
    turns: tuple[int, ...] = (1, -2)
    level: int | float = 0.5
    name: bool | None = None

    part_names = ("shape", "inner")

    def encode_parts(self, data):
        return [Shape.of(data).write(), self.inner.encode(data)]

    def decode_parts(self, parts):
        Shape.read(parts[0])
        return self.inner.decode(bytes(parts[1].rest()))


fitted = MeanShift.fit([layer(1)], 0.5)
other = MeanShift.fit([layer(2)], 0.5)


def test_state_is_bytes_that_load():
    assert fitted.state_bytes == len(fitted.state) > 0
    again = reference.load(fitted.state)
    assert isinstance(again, MeanShift) and again.scale == 0.5 and np.array_equal(again.means, fitted.means)
    assert again.state == fitted.state
    assert reference.Full().state == b"" and reference.Full().state_bytes == 0


def test_streams_need_the_state_that_wrote_them():
    own = layer(3)
    data = fitted.encode(own)
    expected = fitted.decode(data)
    assert isinstance(expected, Decoded)
    assert np.abs(expected.keys - own.keys).max() < 0.01
    assert np.array_equal(reference.decode(data, fitted.state).keys, expected.keys)
    assert np.array_equal(reference.load(fitted.state).decode(data).keys, expected.keys)
    with pytest.raises(StateMismatch, match="no state"):
        reference.decode(data)
    with pytest.raises(StateMismatch, match="MeanShift: the stream was written with the state"):
        reference.decode(data, other.state)
    with pytest.raises(StateMismatch):
        other.decode(data)
    with pytest.raises(StateMismatch):
        reference.decode(reference.Full().encode(own), fitted.state)
    assert reference.inspect(data).digest == reference.stream.digest(fitted.state).hex()


def test_states_and_streams_are_told_apart():
    data = fitted.encode(layer(3))
    with pytest.raises(CorruptStream, match=r"give it to reference\.load"):
        reference.decode(fitted.state, fitted.state)
    with pytest.raises(CorruptStream, match=r"give it to reference\.decode"):
        reference.load(data)
    with pytest.raises(CorruptStream):
        reference.load(b"")
    assert reference.inspect(fitted.state).kind == "state"


def test_altered_states_are_refused():
    state = bytearray(fitted.state)
    for at in range(len(state)):
        state[at] ^= 1
        with pytest.raises(CorruptStream):
            reference.load(bytes(state))
        state[at] ^= 1
    body = reference.stream.unseal(fitted.state)
    with pytest.raises(CorruptStream):
        reference.load(reference.stream.seal(body[:-1]))
    full = reference.stream.write(reference.stream.Header(reference.stream.Kind.STATE, "Full"), [[b"abc"]])
    with pytest.raises(CorruptStream, match="Full has none"):
        reference.load(full)


def test_appending_is_refused_by_codecs_that_cannot():
    with pytest.raises(TypeError, match="MeanShift cannot append"):
        fitted.appender(layer(3))
    with pytest.raises(NotImplementedError, match="MeanShift"):
        fitted.decode_flops(fitted.encode(layer(3)))


def test_parameters_of_every_kind_are_written():
    own = layer(4)
    for codec in (
        Nested(reference.TurboQuant(2, seed=5, kind="prod")),
        Nested(Nested(reference.Full(), (), 3, True), (0, 1 << 40), -1.5, False),
    ):
        data = codec.encode(own)
        found = reference.inspect(data)
        assert found.parameters == codec.parameters
        assert np.array_equal(reference.decode(data).keys, codec.inner.decode(codec.inner.encode(own)).keys)


def test_nesting_has_an_end():
    codec = reference.Full()
    for _ in range(8):
        codec = Nested(codec)
    with pytest.raises(CorruptStream, match="nested"):
        reference.decode(codec.encode(layer(4)))


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="'Full' is taken"):
        register(type("Full", (MeanShift,), {}))
    assert codec_class("MeanShift") is MeanShift
    unknown = reference.stream.write(reference.stream.Header(reference.stream.Kind.LAYER, "Nobody"), [[b""]])
    with pytest.raises(CorruptStream, match="no codec 'Nobody'"):
        reference.decode(unknown)


@dataclass(frozen=True)
class Demanding(Codec):
    """Toy: needs what a layer may lack."""

    needs = frozenset({"queries", "extras:inputs"})

    def encode_parts(self, data):
        return []

    def decode_parts(self, parts):
        return None


def test_missing_needs_are_named():
    with pytest.raises(ValueError, match="extras:inputs: Demanding needs it"):
        Demanding().encode(layer(5))
