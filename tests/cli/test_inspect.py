"""`kvtheory inspect`: where each bit of a stream went, as a user sees it."""

import json
import re

import pytest
from typer.testing import CliRunner

import kvtheory
import reference
from kvtheory.cli import app


def inspect(*arguments):
    found = CliRunner().invoke(app, ["inspect", *map(str, arguments)])
    return found.exit_code, found.output if found.exit_code == 0 else re.sub(r"[\s│]+", " ", found.output)


@pytest.fixture
def stream(tmp_path):
    path = tmp_path / "x.kvs"
    path.write_bytes(reference.TurboQuant(bits=3, seed=7).encode(kvtheory.sample_cache()[0]))
    return path


def test_every_byte_is_in_one_part(stream):
    code, said = inspect(stream)
    assert code == 0
    assert "TurboQuant(bits=3, seed=7, kind='mse', rotation='hadamard')" in said
    assert "3 KV heads x 384 tokens x (64 + 64), float16" in said and "data-oblivious" in said
    rows = {
        m[1].strip(): (int(m[2].replace(",", "")), float(m[3]))
        for m in re.finditer(r"^(\D+?) +([\d,]+) +(\d\.\d{4}) +[\d.]+%$", said, re.M)
    }
    total, held = rows.pop("total")
    assert total == len(stream.read_bytes()) == sum(size for size, _ in rows.values())
    assert (
        abs(held - 8 * total / (2 * 3 * 384 * 64)) < 1e-4 and abs(sum(rate for _, rate in rows.values()) - held) < 1e-3
    )
    assert rows["key codes"] == (3 * 384 * 64 * 3 // 8, 1.5) and rows["key norms"][0] == 3 * 384 * 2


def test_json_is_the_record(stream):
    code, said = inspect(stream, "--json")
    assert code == 0
    assert json.loads(said) == json.loads(json.dumps(reference.inspect(stream.read_bytes()).record()))


def test_a_cache_of_several_layers(tmp_path):
    path = tmp_path / "cache.kvs"
    path.write_bytes(reference.encode_cache(reference.Full(), kvtheory.sample_cache()))
    code, said = inspect(path)
    assert code == 0 and "2 layers, each coded alone" in said and "2, 18" in said and "Full()" in said


def test_a_state_is_said_to_be_one(tmp_path, monkeypatch):
    from reference import codec
    from tests.sweep.test_compare import Mean, captured

    monkeypatch.setitem(codec._registered, "Mean", Mean)
    state = Mean.fit([captured(0)]).state
    (tmp_path / "state.kvs").write_bytes(state)
    code, said = inspect(tmp_path / "state.kvs")
    assert code == 0 and "the fitted state of a codec" in said and "Mean(bits=1)" in said
    assert re.search(rf"total +{len(state)} +- +100.00%", said)


def test_what_is_no_stream_is_said(tmp_path, stream):
    code, said = inspect(tmp_path / "absent")
    assert code == 2 and "No such file" in said
    data = bytearray(stream.read_bytes())
    data[40] ^= 1
    (tmp_path / "bad.kvs").write_bytes(data)
    code, said = inspect(tmp_path / "bad.kvs")
    assert code == 2 and "checksum" in said
    (tmp_path / "text").write_text("hello there")
    code, said = inspect(tmp_path / "text")
    assert code == 2 and "magic" in said
