"""Tiny random models of nine architectures generate through compressed caches: Full is the plain cache bit for bit, every other codec the Runner's."""

import copy
import functools
import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

import reference  # noqa: E402
from kvtheory.layer import Decoded  # noqa: E402
from kvtheory.models import Runner, capture  # noqa: E402
from reference import hf  # noqa: E402
from tests.models import tiny  # noqa: E402

PROMPT, NEW = 16, 12
IDS = torch.from_numpy(tiny.tokens(PROMPT))[None]
EVERY = sorted(tiny.ARCHITECTURES)


def shape(kv_heads, head_dim, **changes):
    """A llama of a shape that no other model here has."""
    options = {**tiny._LLAMA, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return tiny._build("Llama", **tiny._COMMON, **options, **changes)


SHAPES = {
    "full heads of 64": functools.partial(shape, 4, 64),
    "grouped heads of 128": functools.partial(shape, 2, 128),
    "one KV head of 256": functools.partial(shape, 1, 256),
}
MODELS = {**tiny.ARCHITECTURES, **SHAPES}


@functools.cache
def plain(name, attention="sdpa"):
    return MODELS[name](attention=attention)


@functools.cache
def attached(name, attention="sdpa"):
    """The same weights again, reading compressed caches."""
    return hf.attach(MODELS[name](attention=attention))


def generate(model, ids, cache, *, mask=None, new=NEW, **options):
    given = {"cache": cache} if "cache" in inspect.signature(model.forward).parameters else {"past_key_values": cache}
    return model.generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=new, pad_token_id=0, eos_token_id=None,
        return_dict_in_generate=True, output_logits=True, **{"do_sample": False} | options, **given,
    )  # fmt: skip


def run(model, ids, cache, mask=None):
    """Logits of a pass, (batch, tokens, vocabulary)."""
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions, use_cache=True, **{name: cache}).logits


def same(a, b):
    assert torch.equal(a.sequences, b.sequences)
    assert len(a.logits) == len(b.logits) and all(torch.equal(x, y) for x, y in zip(a.logits, b.logits))


def full(**options):
    return hf.CompressedCache(reference.Full(), **{"sinks": 2, "window": 3} | options)


# -- Full is the plain cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_full_is_the_plain_cache_bit_for_bit(name, attention):
    expected = generate(plain(name, attention), IDS, DynamicCache())
    cache = full()
    same(expected, generate(attached(name, attention), IDS, cache))
    same(expected, generate(attached(name, attention), IDS, DynamicCache()))  # other caches are read as before
    tokens = PROMPT + NEW - 1
    numbers = (
        sum(layer.facts.kv_heads * (layer.facts.head_dim + layer.facts.value_dim) for layer in cache.layers) * tokens
    )
    assert cache.held().numbers == numbers and cache.held_bits() > 32 * numbers
    assert all(len(streams) == 1 for streams in cache.streams())


@pytest.mark.parametrize("name", EVERY)
def test_full_is_the_plain_cache_in_a_batch_with_padding(name):
    ids = torch.from_numpy(tiny.tokens(3 * PROMPT)).reshape(3, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :5] = mask[2, :9] = 0
    ids = ids * mask
    expected = generate(plain(name), ids, DynamicCache(), mask=mask)
    same(expected, generate(attached(name), ids, full(), mask=mask))


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 5},
    ],
    ids=" ".join,
)
def test_full_is_the_plain_cache_in_every_search(options):
    """Beams reorder rows, sampling draws the same numbers from the same logits, lookup takes rejected tokens back, chunks come one by one."""
    ids = torch.cat([IDS, IDS], dim=1)  # so that there is something to look up
    found = []
    for model, cache in ((plain("llama"), DynamicCache()), (attached("llama"), full())):
        torch.manual_seed(0)
        found.append(generate(model, ids, cache, **options))
    same(*found)


def test_a_prefix_is_continued_and_left_as_it_was():
    """Deep copies of a cached prefix go on each by itself, with more tokens of a prompt, and crop goes back to it."""
    text = torch.from_numpy(tiny.tokens(40))[None]
    prefix, ends = text[:, :20], (text[:, 20:30], text[:, 30:])
    caches = {}
    for kind, model, empty in (("plain", plain("llama"), DynamicCache()), ("full", attached("llama"), full())):
        run(model, prefix, empty)
        caches[kind] = (model, empty)
    for end in ends:
        found = []
        for model, cache in caches.values():
            found.append(generate(model, torch.cat([prefix, end], dim=1), copy.deepcopy(cache)))
        same(*found)
    model, cache = caches["full"]
    assert cache.get_seq_length() == 20
    generate(model, torch.cat([prefix, ends[0]], dim=1), cache)
    cache.crop(20 - cache.get_seq_length())
    same(generate(model, torch.cat([prefix, ends[1]], dim=1), cache), found[0])


def test_inputs_may_be_embeddings_and_modes_may_change():
    model = attached("llama")
    with torch.no_grad():
        embedded = model.get_input_embeddings()(IDS)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        first = model(inputs_embeds=embedded, **{name: (cache := full())}).logits
    with torch.inference_mode():
        second = model(IDS, **{name: (other := full())}).logits
    assert torch.equal(first, second)
    with torch.no_grad():  # tensors of inference mode go on
        assert torch.equal(run(model, IDS[:, :1], cache), run(model, IDS[:, :1], other))


# -- every codec -------------------------------------------------------------------------------------------------------------


@functools.cache
def calibration(name):
    return list(capture(plain(name), None, tiny.tokens(60, seed=7)))


FIT = {
    "KVQuant": {"bits": 3},
    "AATC": {"bits": 3, "sinks": 1, "window": 2},
    "PALU": {"ratio": 0.9, "search": "energy"},
    "MetricKLT": {"bits": 3},
}
MADE = {
    "KIVI": lambda: reference.KIVI(2, group=2, window=4),
    "StreamingLLM": lambda: reference.StreamingLLM(8, sinks=2),
    "SnapKV": lambda: reference.SnapKV(8, sinks=1, window=3),
    "ScissorHands": lambda: reference.ScissorHands(8, sinks=1, window=3),
    "MergeReduce": lambda: reference.MergeReduce(8, "refit", sinks=1, window=3),
    "Pipeline": lambda: reference.Pipeline([reference.SnapKV(8, sinks=1, window=3), reference.TurboQuant(4)]),
}


@functools.cache
def made(name, model):
    kind = reference.codecs(scope="layer")[name]
    if name in FIT:
        return kind.fit(calibration(model), **FIT[name])
    return MADE.get(name, kind)()


CODECS = sorted(reference.codecs(scope="layer"))


@pytest.mark.parametrize("model", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("name", CODECS)
def test_every_codec_is_read_as_the_runner_reads_it(name, model):
    """The prompt's streams are those of a capture of it, and the logits behind them the replaced-prefix ones of `kvtheory compare`: same bits."""
    codec = made(name, model)
    ids = tiny.tokens(PROMPT + 8)
    layers = list(capture(plain(model), None, ids[:PROMPT]))
    streams = [codec.encode(layer) for layer in layers]
    expected = Runner(plain(model), block=8).logits(ids, PROMPT, [codec.decode(stream) for stream in streams])
    cache = hf.CompressedCache(codec, sinks=0, window=0, every=100)
    run(attached(model), torch.from_numpy(ids)[None, :PROMPT], cache)
    assert [list(one) for one in cache.streams()] == [[stream] for stream in streams]
    found = run(attached(model), torch.from_numpy(ids)[None, PROMPT:], cache)[0].numpy()
    np.testing.assert_array_equal(found, expected)
    if name != "Full":
        whole = Runner(plain(model), block=8).logits(ids, PROMPT)
        assert np.abs(found - whole).max() > 1e-6  # it does change something


@pytest.mark.parametrize("name", CODECS)
def test_exact_tokens_beside_the_codec(name):
    """Sinks and window exact, the rest decoded: what the Runner makes of the two put together."""
    codec = made(name, "llama")
    ids = tiny.tokens(PROMPT + 8)
    sinks, window = 2, 4
    decoded = []
    for layer in capture(plain("llama"), None, ids[:PROMPT]):
        inner = layer.replace(
            keys=layer.keys[:, sinks:-window],
            values=layer.values[:, sinks:-window],
            positions=layer.positions[sinks:-window],
            extras={},
        )
        coded = codec.decode(codec.encode(inner))
        heads = []
        for h in range(layer.kv_heads):
            n = int(coded.kept[h])
            around = [(layer, slice(0, sinks)), (layer, slice(PROMPT - window, PROMPT))]
            pieces = [
                [one.keys[h, s], one.values[h, s], np.zeros(len(one.positions[s])), one.positions[s]]
                for one, s in around
            ]
            pieces.insert(1, [coded.keys[h, :n], coded.values[h, :n], coded.log_weights[h, :n], coded.positions[h, :n]])
            heads.append([np.concatenate(parts) for parts in zip(*pieces)])
        size = max(len(head[3]) for head in heads)
        padded = [
            np.stack(
                [np.concatenate([head[j], np.full((size - len(head[j]), *head[j].shape[1:]), fill)]) for head in heads]
            )
            for j, fill in enumerate((0, 0, -np.inf, -1))
        ]
        kept = np.array([len(head[3]) for head in heads])
        decoded.append(
            Decoded(
                padded[0].astype(np.float32), padded[1].astype(np.float32), padded[2], padded[3].astype(np.int64), kept
            )
        )
    expected = Runner(plain("llama"), block=8).logits(ids, PROMPT, decoded)
    cache = hf.CompressedCache(codec, sinks=sinks, window=window, every=100)
    run(attached("llama"), torch.from_numpy(ids)[None, :PROMPT], cache)
    found = run(attached("llama"), torch.from_numpy(ids)[None, PROMPT:], cache)[0].numpy()
    # where heads keep different numbers the padding lies elsewhere, and float32 adds in another order: 24 terms, two layers
    np.testing.assert_allclose(found, expected, atol=100 * 2.0**-24 * np.abs(expected).max())


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("search", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_every_codec_generates_in_a_batch(name, search):
    """Prompts of different lengths, coding under way, beams that part: every row holds what its own tokens are worth."""
    ids = torch.from_numpy(tiny.tokens(2 * PROMPT)).reshape(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    cache = hf.CompressedCache(made(name, "llama"), sinks=1, window=4, every=3)
    found = generate(attached("llama"), ids * mask, cache, mask=mask, new=20, **search)
    assert found.sequences.shape == (2, PROMPT + 20)
    assert all(torch.isfinite(logits).all() for logits in found.logits)
    beams = search.get("num_beams", 1)
    tokens = [len(request) for request in cache.requests]
    assert tokens == [PROMPT + 19] * beams + [PROMPT + 13] * beams
    for r, count in enumerate(tokens):
        for layer, streams, used in zip(cache.layers, cache.streams(r), cache.in_use(r)):
            coded = sum(n for _, n in used)
            assert streams and count - 1 - (4 + 3) < coded <= count - 1 - 4, layer.facts.index
            for stream in streams:
                assert isinstance(reference.decode(stream, cache.codec.state), Decoded)
    assert cache.held().per_number > 0


def test_a_row_of_a_batch_is_the_row_alone():
    """A prompt with padding in front: the same text, and logits but for float32's rounding in other kernels."""
    ids = torch.from_numpy(tiny.tokens(2 * PROMPT)).reshape(2, PROMPT)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    for name in ("Full", "SnapKV", "MergeReduce"):
        codec = made(name, "llama")
        options = {"sinks": 1, "window": 4, "every": 3}
        both = generate(attached("llama"), ids * mask, hf.CompressedCache(codec, **options), mask=mask)
        alone = generate(attached("llama"), ids[1:, 6:], hf.CompressedCache(codec, **options))
        assert torch.equal(both.sequences[1, PROMPT:], alone.sequences[0, PROMPT - 6 :])
        for a, b in zip(both.logits, alone.logits):
            # sums of at most 40 terms in another order, twice a layer, in two layers
            torch.testing.assert_close(a[1], b[0], rtol=0, atol=float(200 * 2.0**-24 * b.abs().max()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_in_16_bits(dtype):
    """Rotations are found in rounded keys, arrays are ml_dtypes', and Full is still the plain cache."""
    half = {name: tiny.llama() for name in ("plain", "attached")}
    for model in half.values():
        for parameter in model.parameters():  # from_pretrained, too, leaves the frequencies in float32
            parameter.data = parameter.data.to(getattr(torch, dtype))
    hf.attach(half["attached"])
    same(generate(half["plain"], IDS, DynamicCache()), generate(half["attached"], IDS, full()))
    cache = hf.CompressedCache(made("KVQuant", "llama"), sinks=1, window=2)
    run(half["attached"], IDS, cache)
    assert [layer.facts.rope for layer in cache.layers] == [layer.rope for layer in calibration("llama")]
    assert reference.decode(cache.streams()[0][0], cache.codec.state).keys.dtype.name == dtype
