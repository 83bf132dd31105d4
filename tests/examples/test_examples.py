"""The two examples in a small setting: the real commands, on a cache of some kB and two codecs."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

import kvtheory

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_verify_your_model_on_a_cache_of_its_own_and_again(tmp_path, capfd):
    example = load("verify_your_model")
    layer = kvtheory.synthetic.make("attention_sink", tokens=48, queries=12, head_dim=16)
    mine = kvtheory.Layer(layer.keys, layer.values, layer.queries, layer.output_proj, index=3)
    kvtheory.Cache([mine], meta={"model": "mine"}).save(tmp_path / "mine.safetensors")
    words = [
        "--cache",
        str(tmp_path / "mine.safetensors"),
        "--claims",
        "transform-coding/eviction-error",
        "--jobs",
        "1",
    ]
    words += ["--out", str(tmp_path / "out")]
    example.main(words)
    said = capfd.readouterr().out
    assert re.search(r"1 of 1 claims looked at mine; 0 of them end otherwise", said)
    part, whole = map(int, re.search(r"eviction-error +(\d+) of +(\d+) comparisons on it agree", said).groups())
    assert part == whole > 0 and "\nholds:\n" in said
    assert (tmp_path / "out" / "verify" / "index.html").is_file()
    # what an interrupted run has finished is not done again
    again = example.verify
    ran = []
    example.kvtheory = lambda *words: ran.append(words) or 0
    ledger = again(example.argparse.Namespace(out=tmp_path / "out", claims="a", budget="quick", jobs=1), "mine")
    assert ["--resume" in words for words in ran] == [True] and ledger["claims"][0]["verdict"] == "holds"
    # a folder of another cache cannot be gone on with: begun anew
    example.kvtheory = lambda *words: ran.append(words) or 2
    again(example.argparse.Namespace(out=tmp_path / "out", claims="a", budget="quick", jobs=1), "mine")
    assert ["--resume" in words for words in ran] == [True, True, False]


def test_a_verdict_that_differs_is_told_first():
    told = load("verify_your_model").told
    evidence = [{"ran_on": "mine layer 3, n=4", "agrees": True}, {"ran_on": "mine layer 3, n=4", "agrees": False}]
    claim = {"id": "a/b", "expected": "holds", "statement": "One. Two.", "evidence": evidence}
    lines = told(
        {
            "claims": [
                {**claim, "verdict": "fails as stated"},
                {**claim, "id": "c/d", "verdict": "holds", "evidence": []},
            ]
        },
        "mine",
    )
    assert lines[0].startswith("1 of 2 claims looked at mine; 1 of them")
    assert lines[1] == "  FINDING  a/b: fails as stated, expected holds"
    assert "a/b" in lines[3] and "  1 of   2" in lines[3]


def test_choose_codec_on_the_embedded_cache(tmp_path, capfd):
    pytest.importorskip("pyarrow")
    words = [
        "--cache",
        "sample",
        "--codecs",
        "QJL(bits=2|3),TurboQuant(bits=2|3)",
        "--jobs",
        "1",
        "--out",
        str(tmp_path),
    ]
    load("choose_codec").main(words)
    said = capfd.readouterr().out
    assert "all at 2.5 held bits a number" in said and "\nchoice: TurboQuant\n" in said
    table = {line.split()[0]: line for line in said.splitlines() if line.startswith(("TurboQuant  ", "QJL  "))}
    assert "1.00 [1.00, 1.00]" in table["TurboQuant"] and "2.25 and 3.26" in table["TurboQuant"]
    low = float(re.search(r"\[([\d.]+), [\d.]+\] +2\.38", table["QJL"])[1])
    assert low > 5  # 9.9 where it was measured; the choice is told apart
    (rows,) = [json.loads((tmp_path / "equal-rate.json").read_text())]
    assert {row["baseline"] for row in rows} == {"TurboQuant"}


def test_choose_codec_names_what_cannot_be_told_apart():
    told = load("choose_codec").told
    row = {
        "model": "m",
        "text": "t",
        "layers": "2",
        "prefix": 9,
        "target_bits": 2.5,
        "error": 0.1,
        "error_low": 0.05,
        "error_high": 0.2,
        "below_bits": 2.0,
        "above_bits": 3.0,
    }
    rows = [
        {**row, "label": "SnapKV > TurboQuant", "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0},
        {**row, "label": "TurboQuant", "error": 0.12, "ratio": 1.2, "ratio_low": 0.9, "ratio_high": 1.5},
        {**row, "label": "QJL", "error": 1.0, "ratio": 10.0, "ratio_low": 8.0, "ratio_high": 12.0},
        {**row, "label": "KIVI", "error": None, "why": "was measured from 3 to 5"},
    ]
    said = "\n".join(told(rows, "SnapKV > TurboQuant"))
    assert "not told apart from it on this text: TurboQuant\n" in said + "\n"
    assert "its error is 0.10 of the next that can be told from it, QJL" in said
    assert "if every token must stay: TurboQuant, 1.2 times its error" in said
    assert "was measured from 3 to 5" in said


@pytest.mark.parametrize("bits", [1.5, 2.5, 4])
def test_candidates_have_rates_on_both_sides(bits):
    from reference.compare.specs import specs

    found = specs(load("choose_codec").candidates(bits, fitted=True))
    assert len({spec.name for spec in found}) >= 7
    turbo = [spec.options["bits"] for spec in found if spec.name == "TurboQuant"]
    assert min(turbo) + 0.25 < bits < max(turbo) + 0.25
