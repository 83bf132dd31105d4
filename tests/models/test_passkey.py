"""Passkey: the prompt that is asked, what of it is scored, and that full and replaced cache meet the same samples."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvtheory import models  # noqa: E402
from kvtheory.layer import Decoded  # noqa: E402
from kvtheory.models import passkey  # noqa: E402
from kvtheory.models.runner import Runner  # noqa: E402
from tests.models import tiny  # noqa: E402

FILLER = "It is so. They came late! Was he there? Nobody had seen the dog. Rain fell all day."
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def letters():
    """A tokenizer of single characters; numbers are split into digits, as the small models' tokenizers do."""
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as parts

    characters = [chr(c) for c in range(32, 127)] + ["\n"]
    made = Tokenizer(parts.WordLevel({c: i for i, c in enumerate(characters)}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    made.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture(scope="module")
def runner(letters):
    return Runner(tiny.llama(), letters)


def exact(cache):
    return [Decoded.exact(layer) for layer in cache]


def forgetful(cache):
    return [Decoded.of(layer.keys[:, :8], layer.values[:, :8], np.arange(8)) for layer in cache]


def test_a_lossless_cache_loses_nothing_and_a_forgetful_one_something(runner):
    found = runner.passkey(exact, tokens=200, samples=3, filler=FILLER)
    assert found.form == "plain" and len(found.samples) == 3
    for sample in found.samples:
        assert sample.right == sample.full_right and sample.log2_p == sample.full_log2_p < 0
    lossy = runner.passkey(forgetful, tokens=200, samples=3, filler=FILLER)
    assert [s.full_log2_p for s in lossy.samples] == [s.full_log2_p for s in found.samples]
    assert (np.abs(lossy.loss_bits) > 0.1).all()
    np.testing.assert_array_equal(lossy.loss_bits, [s.full_log2_p - s.log2_p for s in lossy.samples])
    assert runner.passkey(None, tokens=200, samples=3, filler=FILLER) == found
    assert found.summary() == {
        "form": "plain", "samples": 3, "tokens": np.mean([s.tokens for s in found.samples]), "full_accuracy": found.full_accuracy,
        "accuracy": found.accuracy, "full_log2_p": np.mean([s.full_log2_p for s in found.samples]),
        "log2_p": np.mean([s.log2_p for s in found.samples]),
    }  # fmt: skip


def test_the_space_is_fed_and_the_digits_are_scored(runner, letters, monkeypatch):
    """Against the plain model on the whole prompt with its answer; and the compressed prefix is the prompt, the space not in it."""
    prompts, prefixes = [], []
    true = passkey._prompt
    monkeypatch.setattr(passkey, "_prompt", lambda *arguments: prompts.append(true(*arguments)) or prompts[-1])
    found = runner.passkey(lambda cache: prefixes.append(cache) or exact(cache), tokens=220, samples=2, filler=FILLER)
    for sample, (prompt, key, _), prefix in zip(found.samples, prompts, prefixes, strict=True):
        text = letters.decode(prompt)
        assert text.count(f"The pass key is {key}. Remember it. {key} is the pass key.") == 1
        assert text.endswith("\n\nWhat is the pass key? The pass key is") and len(prompt) == sample.tokens <= 220
        np.testing.assert_array_equal(prefix.tokens, prompt)
        assert prefix[0].queries.shape[1] == len(prompt)
        whole = np.concatenate([prompt, letters(" " + key)["input_ids"]])
        with torch.no_grad():
            logits = runner.model(input_ids=torch.from_numpy(whole)[None]).logits[0].double()
        digits = torch.log_softmax(logits, -1)[len(prompt) : -1].gather(1, torch.from_numpy(whole[-5:])[:, None])
        assert len(digits) == 5 and sample.full_log2_p == pytest.approx(float(digits.sum()) / np.log(2), rel=1e-4)


def test_accuracy_asks_for_every_digit(runner, letters, monkeypatch):
    sure = np.full((5, tiny.VOCABULARY), -50.0)

    def logits(self, tokens, prefix, decoded=None):
        out = sure.copy()
        key = np.asarray(letters(" " + keys[-1])["input_ids"])[1:]
        np.testing.assert_array_equal(tokens[prefix:], [0, *key[:-1]])
        out[np.arange(5), key] = 50
        if decoded is not None:  # the fourth digit is lost
            out[3] = -50
            out[3, 90] = 50
        return out

    keys = []
    true = passkey._prompt
    monkeypatch.setattr(passkey, "_prompt", lambda *a: (found := true(*a), keys.append(found[1]))[0])
    monkeypatch.setattr(Runner, "logits", logits)
    found = runner.passkey(exact, tokens=200, samples=2, filler=FILLER)
    assert (found.full_accuracy, found.accuracy) == (1.0, 0.0)
    np.testing.assert_allclose(found.loss_bits, 100 / np.log(2))


def test_chat_goes_through_the_template_with_the_answer_opened(letters, monkeypatch):
    runner = Runner(tiny.llama(), letters)
    monkeypatch.setattr(letters, "chat_template", TEMPLATE)
    prompt, _, _ = passkey._prompt(letters, "chat", 300, FILLER.split(". "), np.random.default_rng(0))
    text = letters.decode(prompt)
    assert text.startswith("<user>") and text.endswith("mentioned in the text above?</user><assistant>The pass key is")
    assert runner.passkey(None, tokens=300, samples=1, filler=FILLER).form == "chat"
    assert runner.passkey(None, tokens=300, samples=1, filler=FILLER, form="plain").form == "plain"


def test_samples_depend_on_seed_and_number_only(runner):
    few, many = (runner.passkey(None, tokens=180, samples=n, filler=FILLER, seed=3).samples for n in (1, 4))
    assert few == many[:1]
    assert len({s.key for s in many}) == 4 and len({s.depth for s in many}) > 1
    other = runner.passkey(None, tokens=180, samples=4, filler=FILLER, seed=4).samples
    assert [s.key for s in other] != [s.key for s in many]


def test_prompts_fill_the_room_they_have(letters):
    sentences = FILLER.split(". ")
    longest = max(map(len, sentences)) + 1
    for tokens in range(125, 330, 17):
        prompt, _, depth = passkey._prompt(letters, "plain", tokens, sentences, np.random.default_rng(tokens))
        assert tokens - longest < len(prompt) <= tokens and 0 <= depth <= 1


def test_refusals(runner, letters):
    for options, message in (
        ({"form": "poem"}, "form: expected one of auto, chat, plain"),
        ({"form": "chat"}, "form: this tokenizer has no chat template"),
        ({"samples": 0}, "samples: expected at least 1"),
        ({"tokens": 50}, "tokens: expected at least 9[0-9] for the question and its key, got 50"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.passkey(None, filler=FILLER, **options)
    with pytest.raises(ValueError, match="tokenizer: passkey needs one"):
        Runner(tiny.llama()).passkey(None, filler=FILLER)


@pytest.fixture(scope="module")
def smol():
    tokenizer, model = models.load("smol")
    return Runner(model, tokenizer)


@pytest.mark.real
class TestSmol:
    def test_full_gives_the_plain_model_bit_for_bit(self, smol):
        from kvtheory.sample import sample_text
        from reference import Full

        ids = models.encode(smol.tokenizer, sample_text(), 144)
        codec = Full()
        decoded = [codec.decode(codec.encode(layer)) for layer in models.capture(smol.model, None, ids[:96])]
        found = smol.evaluate(ids, 96, decoded)
        assert not found.kl_bits.any() and found.top1_agreement == 1
        lossy = [Decoded.of(x.keys.astype(np.float16), x.values.astype(np.float16)) for x in decoded]
        half = smol.evaluate(ids, 96, lossy)
        assert 0 < half.mean_kl_bits < 1e-3 and half.perplexity == pytest.approx(found.perplexity, rel=1e-2)
        sinks = np.r_[0:4, 64:96]
        evicted = smol.evaluate(ids, 96, [Decoded.of(x.keys[:, sinks], x.values[:, sinks], sinks) for x in decoded])
        assert evicted.mean_kl_bits > 0.01

    def test_it_finds_its_key(self, smol):
        from kvtheory.models.texts import text

        found = smol.passkey(forgetful, tokens=200, samples=1, filler=text("python-docs"))
        assert found.form == "chat" and found.full_accuracy == 1.0 and found.accuracy == 0.0
        assert (found.loss_bits > 5).all()
