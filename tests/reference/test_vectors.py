"""Golden vectors: streams of the past decode to the same bits, are written with the same bytes, and bad ones stay refused.

tests/vectors/make.py writes them, when the format is meant to change.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import reference
from kvtheory.layer import Layer
from reference import entropy_coding, packing, rans
from reference.rans import Tables
from reference.stream import Reader
from tests.reference import independent
from tests.vectors import make

VALID = sorted((make.HERE / "valid").glob("*.json"))
INVALID = sorted((make.HERE / "invalid").glob("*.json"))


def load(path: Path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_valid_streams_decode_to_the_same_bits(path):
    case = load(path)
    decoded = reference.decode(bytes.fromhex(case["stream"]))
    every = decoded if isinstance(decoded, list) else [decoded]
    assert [make.decoded_record(one) for one in every] == case["decoded"]
    found = reference.inspect(bytes.fromhex(case["stream"]))
    assert found.codec == case["codec"] and found.parameters == case["parameters"]


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_valid_streams_are_written_with_the_same_bytes(path):
    case = load(path)
    layers = [
        Layer(
            make.unarray(one["keys"]),
            make.unarray(one["values"]),
            positions=make.unarray(one["positions"]),
            index=one["index"],
        )
        for one in case["inputs"]
    ]
    codec = reference.codecs()[case["codec"]](**case["parameters"])
    made = codec.encode(layers[0]) if len(layers) == 1 else reference.encode_cache(codec, layers)
    assert made.hex() == case["stream"]


@pytest.mark.parametrize("path", [p for p in VALID if p.stem.startswith("turboquant-")], ids=lambda p: p.stem)
def test_a_stranger_with_the_document_reads_the_same(path):
    """Plain Python integers, tests/reference/independent.py, against the vectors themselves."""
    case = load(path)
    if len(case["decoded"]) > 1:
        return
    stranger = independent.decode(bytes.fromhex(case["stream"]))
    for side in ("keys", "values"):
        golden = make.unarray(case["decoded"][0][side])
        with np.errstate(over="ignore"):
            found = np.array(stranger[side], np.float32).reshape(golden.shape).astype(golden.dtype)
        assert found.tobytes() == golden.tobytes()
    assert stranger["positions"] == make.unarray(case["decoded"][0]["positions"])[0].tolist()


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_invalid_streams_stay_refused(path):
    case = load(path)
    with pytest.raises(getattr(reference, case["error"])) as raised:
        reference.decode(bytes.fromhex(case["stream"]))
    assert getattr(raised.value, "offset", None) == case["offset"]


def test_there_are_vectors_for_every_codec():
    assert {load(path)["codec"] for path in VALID} >= {"Full", "TurboQuant"}
    assert len(VALID) == len(make.valid()) and len(INVALID) == len(make.invalid())
    assert {load(path)["error"] for path in INVALID} == {"CorruptStream", "StateMismatch"}


def test_rans_payloads():
    for case in load(make.HERE / "rans.json"):
        tables = Tables(np.array(case["frequencies"]))
        symbols, payload = np.array(case["symbols"], np.int64), bytes.fromhex(case["payload"])
        assert tables.write().hex() == case["tables"]
        assert np.array_equal(Tables.read(Reader(bytes.fromhex(case["tables"])), 2).frequencies, tables.frequencies)
        assert np.array_equal(rans.decode(payload, symbols.size, tables, case["contexts"]), symbols)
        assert rans.encode(symbols, tables, case["contexts"], block=case["block"], lanes=case["lanes"]) == payload
        if case["range"] is not None:
            contexts = np.resize(case["contexts"], case["block"])
            assert entropy_coding.range_encode(symbols, tables, contexts).hex() == case["range"]
            assert np.array_equal(
                entropy_coding.range_decode(bytes.fromhex(case["range"]), symbols.size, tables, contexts), symbols
            )


def test_packed_codes():
    for case in load(make.HERE / "packing.json"):
        codes, packed = np.array(case["codes"]), bytes.fromhex(case["packed"])
        assert packing.pack(codes, case["bits"]) == packed
        assert packing.unpack(packed, codes.size, case["bits"]).tolist() == case["codes"]
