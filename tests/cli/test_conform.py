"""`kvtheory conform` as a user runs it: what holds, the least input that breaks what does not, JSON, and exit status."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner

import proofs_checks
from kvtheory.cli import app

ZOO = Path(__file__).parents[1] / "conform" / "zoo.py"
SCHEMA = json.loads((Path(proofs_checks.__file__).parent / "conform" / "conform.schema.json").read_text())


def run(*arguments):
    done = CliRunner().invoke(app, ["conform", *map(str, arguments)])
    return done.exit_code, re.sub(r"[\s│]+", " ", done.output)


def test_a_sound_codec_has_status_0_and_json_of_the_schema(tmp_path):
    some = ["--property", "nan", "--property", "held-bits", "--property", "law", "--examples", "8"]
    code, said = run(
        "reference:TurboQuant",
        "--arg",
        "bits=2",
        "--arg",
        "kind=mse",
        "--claim",
        "turboquant-mse",
        *some,
        "--json",
        tmp_path / "x.json",
    )
    assert code == 0 and "holds nan" in said and "reference:TurboQuant: 3 holds" in said
    record = json.loads((tmp_path / "x.json").read_text())
    jsonschema.validate(record, SCHEMA)
    assert (
        record["conforms"]
        and record["codec"]["bits"] == 2
        and record["codec"]["arguments"] == {"bits": 2, "kind": "mse"}
    )
    assert 2.1 < record["measured"]["held_bits"] < 2.2
    assert record["measured"]["law"]["exact"] == pytest.approx(0.1160, abs=1e-4)


def test_a_faulty_codec_has_status_1_and_its_least_input(tmp_path):
    code, said = run(f"{ZOO}:NoNaN", "--property", "nan", "--json", tmp_path / "x.json")
    assert code == 1 and "FAILS nan accepted without a word" in said
    assert "least input: ones (1, 1, 1) float32, keys[0, 0, 0] = nan" in said
    record = json.loads((tmp_path / "x.json").read_text())
    jsonschema.validate(record, SCHEMA)
    (found,) = record["properties"]
    assert (
        found["verdict"] == "fails" and found["input"]["keys"] == [[["nan"]]] and found["input"]["values"] == [[[1.0]]]
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing_of_that_name:Codec"], "No module named 'nothing_of_that_name'"),
        (["reference:Nothing"], "load raised AttributeError"),
        (["reference"], "expected package.module:Name or file.py:Name"),
        (["none.py:Codec"], "no file none.py"),
        (["reference:Full", "--arg", "bits"], "expected NAME=VALUE"),
        (["reference:Full", "--claim", "perfect"], "expected some of turboquant-mse"),
        (["reference:Full", "--property", "speed"], "expected some of"),
        (["reference:Full", "--json", "no/such/folder/x.json"], "there is no folder"),
    ],
)
def test_what_cannot_be_asked_has_status_2(arguments, sentence):
    code, said = run(*arguments)
    assert code == 2 and sentence in said and "Traceback" not in said


def test_a_codec_that_codes_nothing_fails_by_what_it_said():
    code, said = run("reference:TurboQuant", "--arg", "bits=99")
    assert code == 1 and "FAILS codes" in said and "build raised ValueError: bits" in said


def test_a_module_of_the_folder_at_hand(tmp_path, monkeypatch):
    """Arrays in and out, as ten lines have it; claims that nobody knows are refused."""
    (tmp_path / "own_codec.py").write_text(
        "class Codec:\n    claims = ('lossless',)\n    def encode(self, x):\n        return x.copy()\n    def decode(self, held):\n        return held\n"
        "class Other(Codec):\n    claims = ('magic',)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, said = run(
        "own_codec:Codec", "--property", "law", "--property", "zeros", "--property", "nan", "--examples", 8
    )
    assert (
        code == 1 and "holds zeros exact" in said and "holds law bit for bit" in said and "FAILS nan accepted" in said
    )
    code, said = run("own_codec:Other", "--property", "law")
    assert code == 2 and "claims 'magic'; expected some of turboquant-mse" in said


def test_the_properties_are_listed():
    from proofs_checks.conform import PROPERTIES

    code, said = run("--list")
    assert code == 0 and all(name in said for name in PROPERTIES)


def test_without_hypothesis_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "hypothesis", None)
    code, said = run("reference:Full")
    assert code == 2 and "pip install 'kvtheory[conform]'" in said


def test_the_ledger_s_claims_run_on_foreign_codecs():
    """The same check refutes a dead sketch of somebody else's, and lets a sound one pass."""
    for name, verdict in (("Sketch", "holds"), ("DeadScale", "FAILS")):
        code, said = run(f"{ZOO}:{name}", "--bits", "3", "--property", "input", "--ledger")
        assert f"{verdict} ledger:quantizers/prod-unbiased" in said and code == (verdict == "FAILS"), said
