"""Rates are lengths of streams, and comparisons are made where they are equal."""

from dataclasses import dataclass

import numpy as np
import pytest

import kvtheory
import reference
from kvtheory import distortion
from reference import rates
from reference.codec import Codec
from reference.shape import Shape
from tests.reference.strategies import layer


@dataclass(frozen=True)
class Padded(Codec):
    """Toy with a real-valued nominal rate: Full's parts and padding up to `bits` bits a number."""

    bits: float = 4.0
    part_names = ("shape", "padding")

    def encode_parts(self, data):
        return [Shape.of(data).write(), bytes(int(self.bits * (data.keys.size + data.values.size) / 8))]

    def decode_parts(self, parts):
        raise NotImplementedError


def test_held_bits_are_the_length_over_the_numbers():
    own = layer(0, heads=2, tokens=10, dim=8, value_dim=4)
    data = reference.Full().encode(own)
    assert reference.held_bits(data, own) == 8 * len(data) / (2 * 10 * (8 + 4))
    assert reference.held_bits(data, own) > 32
    assert reference.held_bits(data, [own, own]) == reference.held_bits(data, own) / 2
    assert reference.held_bits(data, kvtheory.Cache([own])) == reference.held_bits(data, own)
    with pytest.raises(ValueError, match="at least one token"):
        reference.held_bits(data, layer(0, tokens=0))
    with pytest.raises(TypeError, match="cache"):
        reference.held_bits(data, [1, 2])


def test_roundtrip_scores_through_bytes():
    own = kvtheory.synthetic.make("gaussian", tokens=64, head_dim=32, queries=16)
    decoded, held, error = reference.roundtrip(reference.Full(), own)
    assert error == 0 and held > 64 and decoded.keys.dtype == np.float64
    decoded, held, error = reference.roundtrip(reference.TurboQuant(4), own)
    assert error == distortion.attention_error(own, decoded) and 4 < held < 5 and 0 < error < 0.1
    every, held_all, mean = reference.roundtrip(reference.TurboQuant(4), [own, own])
    assert len(every) == 2 and mean == pytest.approx(error) and held_all < held
    with pytest.raises(ValueError, match="queries"):
        reference.roundtrip(reference.Full(), layer(0))


@pytest.mark.parametrize("target", [0.5, 2.2, 3.0, 7.9, 15.0])
def test_real_nominal_rates_are_found(target):
    own = layer(1, heads=2, tokens=200, dim=16)
    made = []

    def make(nominal):
        made.append(nominal)
        return Padded(nominal)

    found = reference.at_rate(make, own, target, tolerance=0.002)
    assert abs(found.held_bits / target - 1) <= 0.002
    assert reference.held_bits(found.codec.encode(own), own) == found.held_bits
    assert found.codec == Padded(found.nominal) and len(made) <= 12


def test_curved_rates_are_found_as_well():
    own = layer(1, heads=2, tokens=200, dim=16)
    found = reference.at_rate(lambda nominal: Padded(nominal**2 / 4), own, 3.0, tolerance=0.001)
    assert abs(found.held_bits / 3.0 - 1) <= 0.001


def test_whole_nominal_rates_are_found_or_their_neighbours_named():
    own = layer(2, heads=4, tokens=200, dim=128)
    held = {b: reference.held_bits(reference.TurboQuant(b).encode(own), own) for b in (3, 4)}
    found = reference.at_rate(reference.TurboQuant, own, held[3])
    assert found.codec == reference.TurboQuant(3) and found.nominal == 3 and found.held_bits == held[3]
    assert reference.at_rate(reference.TurboQuant, [own, own], 3.13, tolerance=0.01).nominal == 3
    with pytest.raises(ValueError) as raised:
        reference.at_rate(reference.TurboQuant, own, 3.6)
    assert f"the nearest hold {held[3]} and {held[4]}" in str(raised.value)


def test_impossible_rates_are_refused():
    own = layer(1, heads=2, tokens=200, dim=16)
    with pytest.raises(ValueError, match="the nearest hold None and"):
        reference.at_rate(Padded, own, 0.01, tolerance=0.01)
    with pytest.raises(ValueError, match="and None"):
        reference.at_rate(Padded, own, 40.0)
    with pytest.raises(ValueError, match="held_bits: expected a finite number above 0"):
        reference.at_rate(Padded, own, 0)
    assert rates.AtRate(Padded(1.0), 1.0, 2.0).held_bits == 2.0
