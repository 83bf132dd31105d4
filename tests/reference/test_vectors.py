"""Golden vectors: streams of the past decode to the same bits, are written with the same bytes, and bad ones stay refused.

tests/vectors/make.py writes them, when the format is meant to change.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import reference
from reference import entropy_coding, packing, rans
from reference.rans import Tables
from reference.stream import Reader
from reference.vectors import largest
from tests.reference import independent, stranger_kvquant, stranger_transform, strangers
from tests.vectors import fitted, make

VALID = sorted((make.HERE / "valid").glob("*.json"))
INVALID = sorted((make.HERE / "invalid").glob("*.json"))


def load(path: Path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_valid_streams_decode_to_the_same_bits(path):
    case = load(path)
    decoded = reference.decode(bytes.fromhex(case["stream"]), bytes.fromhex(case.get("state", "")))
    every = decoded if isinstance(decoded, list) else [decoded]
    assert [make.decoded_record(one) for one in every] == case["decoded"]
    found = reference.inspect(bytes.fromhex(case["stream"]))
    # JSON has lists only
    assert found.codec == case["codec"] and json.loads(json.dumps(found.record()["parameters"])) == case["parameters"]


@pytest.mark.parametrize("path", VALID, ids=lambda p: p.stem)
def test_valid_streams_are_written_with_the_same_bytes(path):
    case = load(path)
    layers = [make.input_layer(one) for one in case["inputs"]]
    if "inputs_give" in case:
        pytest.skip("its stream was made another way")
    if "state" in case:
        codec = reference.load(bytes.fromhex(case["state"]))
    elif case["codec"] == "Pipeline":
        codec = fitted.valid()[path.stem][0]
    else:
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
        found = np.array(stranger[side], np.float32).reshape(golden.shape)
        found = np.clip(found, -largest(golden.dtype), largest(golden.dtype)).astype(golden.dtype)
        assert found.tobytes() == golden.tobytes()
    assert stranger["positions"] == make.unarray(case["decoded"][0]["positions"])[0].tolist()


@pytest.mark.parametrize(
    "path", [p for p in VALID if p.stem.startswith(("qjl-", "polarquant-", "kivi-"))], ids=lambda p: p.stem
)
def test_another_stranger_reads_the_same(path):
    """Plain Python numbers, tests/reference/strangers.py."""
    case = load(path)
    if len(case["decoded"]) > 1:
        return
    for side, numbers in zip(("keys", "values"), strangers.decode(bytes.fromhex(case["stream"])), strict=True):
        golden = make.unarray(case["decoded"][0][side])
        with np.errstate(over="ignore"):
            found = np.array(numbers, np.float64).reshape(golden.shape).astype(golden.dtype)
        assert found.tobytes() == golden.tobytes()


@pytest.mark.parametrize("path", [p for p in VALID if p.stem.startswith("kvquant-")], ids=lambda p: p.stem)
def test_a_stranger_reads_kvquant(path):
    """Plain Python numbers, tests/reference/stranger_kvquant.py; cosines included, to the last bit."""
    case = load(path)
    if len(case["decoded"]) > 1:
        return
    found = stranger_kvquant.decode(bytes.fromhex(case["stream"]), bytes.fromhex(case["state"]))
    for side, numbers in zip(("keys", "values"), found, strict=True):
        golden = make.unarray(case["decoded"][0][side])
        assert np.array(numbers, np.float64).reshape(golden.shape).astype(golden.dtype).tobytes() == golden.tobytes()


@pytest.mark.parametrize(
    "path", [p for p in VALID if p.stem.startswith(("aatc-", "palu-", "metric-klt-", "kvtc-"))], ids=lambda p: p.stem
)
def test_a_stranger_reads_transform_coders(path):
    """Plain Python numbers, tests/reference/stranger_transform.py; to the last bit."""
    case = load(path)
    if len(case["decoded"]) > 1 and case["codec"] != "KVTC":
        return
    layers = stranger_transform.decode(bytes.fromhex(case["stream"]), bytes.fromhex(case["state"]))
    for found, decoded in zip(layers, case["decoded"], strict=True):
        for side, read in zip(("keys", "values", "log_weights"), found, strict=True):
            golden = make.unarray(decoded[side])
            assert np.array(read, np.float64).reshape(golden.shape).astype(golden.dtype).tobytes() == golden.tobytes()


@pytest.mark.parametrize(
    "path",
    [p for p in VALID if p.stem.startswith(("streaming-", "snapkv-", "scissorhands-", "reduced-"))],
    ids=lambda p: p.stem,
)
def test_a_stranger_reads_reducers(path):
    """Plain Python numbers, tests/reference/strangers.py; positions and log-weights included."""
    case = load(path)
    if len(case["decoded"]) > 1:
        return
    found, (decoded,) = strangers.decode_reduced(bytes.fromhex(case["stream"])), case["decoded"]
    kept = make.unarray(decoded["kept"])
    assert [len(own) for own in found["positions"]] == kept.tolist()
    for field in ("keys", "values", "positions", "log_weights"):
        golden = make.unarray(decoded[field])
        for h, n in enumerate(kept):
            read = np.array(found[field][h], np.int64 if field == "positions" else np.float64).reshape(
                golden[h, :n].shape
            )
            assert read.astype(golden.dtype).tobytes() == golden[h, :n].tobytes()
            padding = {"positions": -1, "log_weights": -np.inf}.get(field, 0)
            assert (golden[h, n:] == padding).all()


def test_vectors_reach_what_they_are_for():
    """The largest number of binary32 in float64, and zeros of both signs in float16."""
    for stem, at_most in (("turboquant-2-float64-limits", True), ("turboquant-prod-2-float64-limits", True), ("turboquant-2-float16-underflow", False), ("turboquant-prod-3-float16-underflow", False)):  # fmt: skip
        keys = make.unarray(load(make.HERE / "valid" / f"{stem}.json")["decoded"][0]["keys"])
        if at_most:
            assert (keys == np.finfo(np.float32).max).any() and (np.abs(keys) <= np.finfo(np.float32).max).all()
            continue
        assert {bool(sign) for sign in np.signbit(keys[keys == 0])} == {False, True}
        assert (np.abs(keys) == 65504).any() and (np.abs(keys) == 2.0**-24).any()


@pytest.mark.parametrize("path", INVALID, ids=lambda p: p.stem)
def test_invalid_streams_stay_refused(path):
    case = load(path)
    with pytest.raises(getattr(reference, case["error"])) as raised:
        reference.decode(bytes.fromhex(case["stream"]), bytes.fromhex(case.get("state", "")))
    assert getattr(raised.value, "offset", None) == case["offset"]


def test_there_are_vectors_for_every_codec():
    assert {load(path)["codec"] for path in VALID} >= {
        "Full",
        "TurboQuant",
        "QJL",
        "PolarQuant",
        "KIVI",
        "KVQuant",
        "Pipeline",
        "AATC",
        "PALU",
        "MetricKLT",
        "KVTC",
        "StreamingLLM",
        "SnapKV",
        "ScissorHands",
    }
    assert len(VALID) == len(make.valid()) + len(fitted.valid())
    assert len(INVALID) == len(make.invalid()) + len(fitted.invalid())
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
