"""Loading: a saved folder comes back as it was; what cannot be had is said plainly."""

import importlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvtheory.models import ModelUnavailable, capture, load  # noqa: E402
from tests.models import tiny  # noqa: E402

loading = importlib.import_module("kvtheory.models.load")  # kvtheory.models.load is the function


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    tiny.llama().save_pretrained(path)
    return path


def test_a_local_folder_is_loaded(folder):
    tokenizer, model = load(folder)
    assert not model.training and model.dtype == torch.float32
    for ours, saved in zip(model.parameters(), tiny.llama().parameters(), strict=True):
        assert torch.equal(ours, saved)
    cache = capture(model, tokenizer, "w5 w9 w11 w5")
    assert cache.tokens.tolist() == [5, 9, 11, 5]
    assert cache.meta["model"] == str(folder)


def test_dtype_and_attention_are_passed_on(folder):
    _, model = load(str(folder), dtype="bfloat16", attention="eager")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="dtype: expected"):
        load(folder, dtype="float8")


def test_what_is_not_there_is_unavailable(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelUnavailable,
        match=r"nobody/nothing.*expected one of smol, gemma, qwen, qwen-1.5b, a local path, or a hub id",
    ):
        load("nobody/nothing")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="got file"):
        load(tmp_path / "notes.txt")


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match=r"kvtheory\[real\]"):
        load("smol")


def test_origin_of_an_ordinary_model_is_its_path(folder):
    assert loading.origin(load(folder)[1]) == {"model": str(folder)}
    assert loading.origin(tiny.llama()) == {"model": "LlamaForCausalLM"}
