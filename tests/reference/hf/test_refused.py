"""What a compressed cache cannot do right is refused, with what was expected and what came."""

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import reference  # noqa: E402
from kvtheory.models import UnsupportedModel  # noqa: E402
from reference import hf  # noqa: E402
from tests.models import tiny  # noqa: E402
from tests.reference.hf.driven import Driven  # noqa: E402
from tests.reference.hf.test_generate import IDS, attached, full, made, run  # noqa: E402

KVQUANT = reference.KVQuant  # a bare one was fitted to nothing


def named(cache, model=None):
    """The argument that takes a cache, which transformers renamed."""
    known = inspect.signature((model or attached("llama")).forward).parameters
    return {"cache" if "cache" in known else "past_key_values": cache}


def cache_of(codec=None, **options):
    return hf.CompressedCache(codec or reference.TurboQuant(3), **{"sinks": 1, "window": 2} | options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((reference.KVTC(),), "codec: expected scope \"layer\", got KVTC of scope 'cache'"),
        (("TurboQuant",), "codec: expected a codec of reference.codecs"),
        ((reference.TurboQuant,), "codec: expected a codec of reference.codecs"),
    ],
)
def test_no_codec_of_layers(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message.replace("(", r"\(")):
        hf.CompressedCache(*arguments)


@pytest.mark.parametrize(
    ("name", "value"), [("sinks", -1), ("window", -1), ("window", 1.5), ("every", 0), ("sinks", True)]
)
def test_numbers_of_tokens(name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: expected"):
        hf.CompressedCache(reference.Full(), **{name: value})


def test_a_codec_that_needs_what_is_not_shown():
    class Informed(reference.Codec):
        needs = frozenset({"extras:key_fisher"})

        def encode_parts(self, data):
            raise NotImplementedError

        def decode_parts(self, parts):
            raise NotImplementedError

    with pytest.raises(ValueError, match="codec: Informed needs extras:key_fisher"):
        hf.CompressedCache(Informed())


def test_a_model_that_is_not_attached():
    with pytest.raises(ValueError, match=r"expected one that was given to reference\.hf\.attach"):
        run(tiny.llama(), IDS, cache_of())
    model = hf.detach(hf.attach(tiny.llama()))
    assert model.config._attn_implementation == "sdpa" and not hf.detach(model)._forward_pre_hooks
    with pytest.raises(ValueError, match=r"reference\.hf\.attach"):
        run(model, IDS, cache_of())


def test_a_model_whose_attention_was_set_back():
    model = hf.attach(tiny.llama())
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="expected attention 'kvtheory_sdpa', got 'sdpa'"):
        run(model, IDS, cache_of())
    run(hf.attach(model), IDS, cache_of())


def test_another_model():
    cache = cache_of()
    run(attached("llama"), IDS, cache)
    with pytest.raises(ValueError, match="the cache holds tokens of another model"):
        run(attached("yarn"), IDS[:, :1], cache)
    cache.reset()
    run(attached("yarn"), IDS, cache)


def test_a_codec_of_another_model():
    with pytest.raises(reference.StateMismatch, match="rope: KVQuant was fitted to"):
        run(attached("yarn"), IDS, cache_of(made("KVQuant", "llama")))
    with pytest.raises(reference.StateMismatch, match="was fitted to 2 heads of 16"):
        run(attached("full heads of 64"), IDS, cache_of(made("MetricKLT", "llama")))
    with pytest.raises(reference.StateMismatch, match="fitted to layers of index no layer at all"):
        run(attached("llama"), IDS, cache_of(KVQUANT()))


def test_a_pass_that_broke_off():
    cache = cache_of(KVQUANT())
    with pytest.raises(reference.StateMismatch):
        run(attached("llama"), IDS, cache)
    with pytest.raises(ValueError, match="a pass broke off in the middle"):
        run(attached("llama"), IDS[:, :1], cache)


def test_training_and_gradients():
    model = hf.attach(tiny.llama())
    model.train()
    with pytest.raises(ValueError, match="expected evaluation mode"):
        run(model, IDS, cache_of())
    model.eval()
    with pytest.raises(ValueError, match="expected a pass without gradients"):
        model(IDS, **named(cache_of()))


def test_another_batch():
    cache = cache_of()
    run(attached("llama"), IDS, cache)
    with pytest.raises(ValueError, match="expected 1 rows, the requests that the cache holds, got 2"):
        run(attached("llama"), IDS[:, :1].expand(2, 1), cache)
    with pytest.raises(ValueError, match="rows: expected numbers from 0 to 0, got"):
        cache.reorder_cache(torch.tensor([1]))


def test_another_padding():
    mask = torch.ones_like(IDS)
    mask[:, :3] = 0
    cache = cache_of()
    run(attached("llama"), IDS, cache, mask)
    more = torch.ones(1, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected the same padding as before"):
        run(attached("llama"), IDS[:, :1], cache, more)
    with pytest.raises(ValueError, match="expected the same padding as before"):
        run(attached("llama"), IDS[:, :1], cache)
    with pytest.raises(ValueError, match=r"attention_mask: expected shape \(1, 17\), got \(1, 16\)"):
        run(attached("llama"), IDS[:, :1], cache, mask)
    expected = pytest.raises(ValueError, match=r"attention_mask: expected one of shape \(batch, tokens\)")
    with expected, torch.no_grad():
        attached("llama")(IDS[:, :1], attention_mask=torch.ones(1, 1, 1, 17).bool(), **named(cache))


def test_positions_that_fall():
    model, cache = attached("llama"), cache_of()
    run(model, IDS, cache)
    with pytest.raises(ValueError, match="position_ids: expected ascending numbers"), torch.no_grad():
        model(IDS[:, :1], position_ids=torch.tensor([[3]]), **named(cache))


def test_layers_are_no_caches():
    driven = Driven(reference.Full())
    driven.run(5)
    layer = driven.cache.layers[0]
    for refused in (lambda: layer.crop(-1), lambda: layer.reorder_cache(torch.tensor([0]))):
        with pytest.raises(UnsupportedModel, match="CompressedCache, not one of its layers"):
            refused()
    with pytest.raises(ValueError, match="expected one that was given"):
        driven.cache.update(layer.keys, layer.values, 0)  # no pass was begun
    for count, message in ((1, "expected -n to remove n tokens, got 1"), (-6, "expected at least -5, got -6")):
        with pytest.raises(ValueError, match=message):
            driven.cache.crop(count)


def test_merged_tokens_are_not_taken_back():
    driven = Driven(reference.MergeReduce(6, "random", sinks=1, window=1), sinks=0, window=2)
    driven.run(20)
    before = [layer.keys.clone() for layer in driven.cache.layers]
    with pytest.raises(ValueError, match="tokens before stand, with weights, for some behind them"):
        driven.cache.crop(-5)
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, driven.cache.layers))
    driven.run(1)
    driven.check()


def test_models_that_no_layer_can_state():
    growing = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedModel, match="changes with the length"):
        hf.attach(tiny.llama(rope_parameters=growing))
    capped = tiny._build("Gemma2", **tiny._COMMON, **tiny._LLAMA, attention="eager", query_pre_attn_scalar=16)
    with pytest.raises(UnsupportedModel, match="softcap"):
        hf.attach(capped)
    with pytest.raises(TypeError, match="model: expected a model of transformers, got Linear"):
        hf.attach(torch.nn.Linear(1, 1))


def test_attention_that_does_not_read_its_cache():
    model = hf.attach(tiny.llama())
    for layer in model.model.layers:  # as a model would that copies what its cache gives
        layer.self_attn.register_forward_pre_hook(_copying, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="attention of layer 0 did not read what its cache gave"):
        run(model, IDS, cache_of())


def _copying(module, arguments, options):
    name = "cache" if "cache" in options else "past_key_values"

    class Copies:
        def __init__(self, cache):
            self.cache = cache

        def update(self, *args, **kwargs):
            return tuple(x.clone() for x in self.cache.update(*args, **kwargs))

    return arguments, {**options, name: Copies(options[name])}


def test_torch_is_imported_by_this_module_alone():
    code = "import sys, reference; dir(reference); reference.codecs(); assert 'torch' not in sys.modules; reference.hf; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_full_needs_no_queries_and_keeps_none():
    cache = full()
    run(attached("llama"), IDS, cache)
    assert all(layer.queries is None for layer in cache.layers)
    cache = cache_of(reference.SnapKV(8, sinks=1, window=3))
    run(attached("llama"), IDS, cache)
    assert all(layer.queries.shape[2] == cache.window for layer in cache.layers)  # of exact tokens
