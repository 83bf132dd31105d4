"""Where each bit went: the parts of an inspection add up to the stream, whatever it is."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from tests.reference.cases import OBLIVIOUS
from tests.reference.strategies import layer, layers


@settings(max_examples=40)
@given(layers(), st.sampled_from(sorted(OBLIVIOUS)))
def test_parts_add_up(drawn, name):
    codec = OBLIVIOUS[name]
    data = codec.encode(drawn)
    found = reference.inspect(data)
    assert sum(part.bytes for part in found.parts) == found.total_bytes == len(data)
    assert found.codec == codec.codec_id and found.parameters == codec.parameters and found.kind == "layer"
    assert [part.name for part in found.parts] == [*codec.part_names, "container"]
    (shape,) = found.shapes
    assert (shape.kv_heads, shape.tokens, shape.head_dim, shape.value_dim) == (*drawn.keys.shape, drawn.value_dim)
    assert found.numbers == drawn.keys.size + drawn.values.size
    if found.numbers:
        assert found.held_bits == reference.held_bits(data, drawn)
        assert abs(sum(part.bits_per_number for part in found.parts) - found.held_bits) < 1e-9 * found.held_bits
    json.dumps(found.record(), allow_nan=False)


def test_parts_of_a_cache_are_summed_over_its_layers():
    own = [layer(i, heads=1, tokens=4 + i, dim=16) for i in range(3)]
    data = reference.encode_cache(reference.TurboQuant(2), own)
    found = reference.inspect(data)
    assert found.kind == "layers" and found.layers == 3 and len(found.shapes) == 3
    codes = next(part for part in found.parts if part.name == "key codes")
    assert codes.bytes == sum(one.keys.size * 2 // 8 for one in own)
    assert sum(part.bytes for part in found.parts) == len(data)
    record = found.record()
    assert [one["tokens"] for one in record["layers"]] == [4, 5, 6] and record["held_bits"] == found.held_bits
