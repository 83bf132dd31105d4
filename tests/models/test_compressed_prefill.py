"""Prefill over compressed past, against the plain model on the whole text at once under masks that say who reads what."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvtheory import attention, models  # noqa: E402
from kvtheory.layer import Decoded  # noqa: E402
from kvtheory.models.runner import Runner  # noqa: E402
from tests.models import tiny  # noqa: E402
from tests.models.test_runner import _masked_by  # noqa: E402

TOKENS, CHUNK = 20, 6
IDS = tiny.tokens(TOKENS)


def sinks_and_window(index, layer):
    """Head h keeps tokens 0 .. h and the last 3 + h, the last of them with log-weight 1/2: ragged, weighted, of positions alone."""
    n, heads = layer.tokens, layer.kv_heads
    picks = [np.unique(np.r_[0 : h + 1, max(0, n - 3 - h) : n]) for h in range(heads)]
    kept = np.array([len(pick) for pick in picks])
    width = kept.max() + 1
    keys, values = (np.zeros((heads, width, x.shape[2]), np.float32) for x in (layer.keys, layer.values))
    weights, positions = np.full((heads, width), -np.inf), np.full((heads, width), -1)
    for h, pick in enumerate(picks):
        keys[h, : len(pick)], values[h, : len(pick)] = layer.keys[h, pick], layer.values[h, pick]
        positions[h, : len(pick)] = pick
        weights[h, : len(pick)] = 0.0
        weights[h, len(pick) - 1] = 0.5
    return Decoded(keys, values, weights, positions, kept)


def mask_of(model, count, index):
    """(query_heads, count, count): what each token adds to the logits of each other one under `sinks_and_window` in chunks of CHUNK."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", heads)
    types = getattr(config, "layer_types", None) or ["full_attention"] * 2
    age = np.arange(count)[:, None] - np.arange(count)
    window = config.sliding_window if types[index] == "sliding_attention" else count
    mask = np.where((age >= 0) & (age < window), 0.0, -np.inf)
    mask = np.repeat(mask[None], heads, axis=0)
    for start in range(CHUNK, count, CHUNK):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            added = np.full(start, -np.inf)
            pick = np.unique(np.r_[0 : kv + 1, max(0, start - 3 - kv) : start])
            added[pick] = 0.0
            added[pick[-1]] = 0.5
            mask[h, start : start + CHUNK, :start] += added
    return torch.from_numpy(mask).float()[None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen2"])
def test_keys_and_values_are_those_of_the_model_under_masks(name, attention):
    model = tiny.ARCHITECTURES[name](attention=attention)
    seen = []

    def compress(index, layer):
        if layer.tokens == TOKENS:
            seen.append((index, layer))
        return sinks_and_window(index, layer)

    found = Runner(model).compressed_prefill(IDS, CHUNK, compress)
    hooks = [
        module.register_forward_pre_hook(_masked_by(mask_of(model, TOKENS, module.layer_idx)), with_kwargs=True)
        for module in model.modules()
        if getattr(module, "layer_idx", None) is not None
    ]
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model.base_model(input_ids=torch.from_numpy(IDS)[None], **{tiny.CACHE: cache}, use_cache=True)
    for hook in hooks:
        hook.remove()
    assert [index for index, _ in seen] == [0, 1] and len(found) == 2
    plain = list(models.capture(model, None, IDS))
    for (_, layer), true, entry in zip(seen, cache.layers, found, strict=True):
        np.testing.assert_allclose(layer.keys, true.keys[0].numpy(), rtol=1e-3, atol=2e-4)
        np.testing.assert_allclose(layer.values, true.values[0].numpy(), rtol=1e-3, atol=2e-4)
        like = plain[layer.index]
        assert (layer.scale, layer.rope, layer.window) == (like.scale, like.rope, like.window)
        np.testing.assert_array_equal(layer.query_positions, np.arange(TOKENS))
        np.testing.assert_array_equal(entry.keys, sinks_and_window(0, layer).keys)
    # the second layer bears what the first one lost: the check could fail
    assert np.abs(seen[1][1].keys - plain[1].keys).max() > 1e-2
    np.testing.assert_allclose(seen[0][1].queries, plain[0].queries, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_exact_chunks_are_the_plain_prefill(name):
    model = tiny.ARCHITECTURES[name]()
    plain = list(models.capture(model, None, IDS))
    runner = Runner(model)
    for chunk in (1, 7, TOKENS, 99):
        found = runner.compressed_prefill(IDS, chunk, lambda index, layer: None)
        for entry, like in zip(found, plain, strict=True):
            np.testing.assert_allclose(entry.keys, like.keys, rtol=1e-3, atol=2e-4)
            np.testing.assert_array_equal(entry.positions, np.tile(np.arange(TOKENS), (like.kv_heads, 1)))


def test_what_a_chunk_reads_depends_on_tokens_before_it_alone():
    model = tiny.llama()
    other = IDS.copy()
    other[2 * CHUNK :] = tiny.tokens(TOKENS, seed=5)[2 * CHUNK :]
    calls = []
    for ids in (IDS, other):
        own = {}

        def compress(index, layer, own=own):
            own[index, layer.tokens] = layer
            return sinks_and_window(index, layer)

        Runner(model).compressed_prefill(ids, CHUNK, compress)
        calls.append(own)
    assert [n for i, n in calls[0] if i == 0] == [6, 12, 18, 20]
    for key in ((0, 6), (1, 6), (0, 12), (1, 12)):
        np.testing.assert_array_equal(calls[0][key].keys, calls[1][key].keys)
    assert not np.array_equal(calls[0][1, 20].keys, calls[1][1, 20].keys)


def test_a_reducer_s_summary_is_what_the_first_layer_attends_to():
    """MergeReduce at layer 0, by hand: kvtheory.attention.attend over summary and chunk is what enters the output projection."""
    from reference import MergeReduce

    model = tiny.llama()
    codec = MergeReduce(keep=8, reducer="spectral", sinks=1, window=2, block=4, queries=8)
    shown = {}

    def compress(index, layer):
        if index:
            return None
        shown[layer.tokens] = layer, codec.decode(codec.encode(layer))
        return shown[layer.tokens][1]

    read = []
    hook = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, arguments: read.append(arguments[0][0].numpy())
    )
    runner = Runner(model)
    runner._likes(IDS)
    read.clear()
    runner.compressed_prefill(IDS, 10, compress)
    hook.remove()
    before, summary = shown[10]
    after = shown[20][0]
    assert summary.kept.max() < 10 and np.abs(summary.log_weights[summary.positions >= 0]).max() > 0.1
    for h in range(after.query_heads):
        kv = h // after.group
        n, late = summary.kept[kv], np.arange(10, 20)
        expected = attention.attend(
            after.queries[h : h + 1, 10:],
            np.concatenate([summary.keys[kv : kv + 1, :n], after.keys[kv : kv + 1, 10:]], axis=1),
            np.concatenate([summary.values[kv : kv + 1, :n], after.values[kv : kv + 1, 10:]], axis=1),
            scale=after.scale,
            log_weights=np.pad(summary.log_weights[kv : kv + 1, :n], ((0, 0), (0, 10))),
            positions=np.concatenate([summary.positions[kv, :n], late]),
            query_positions=late,
        )
        dv = after.value_dim
        np.testing.assert_allclose(read[1][:, h * dv : (h + 1) * dv], expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(before.keys, after.keys[:, :10])


def test_what_is_left_stands_for_the_prefix():
    runner = Runner(tiny.llama())
    ids = np.concatenate([IDS, tiny.tokens(5, seed=3)])
    decoded = runner.compressed_prefill(IDS, CHUNK, sinks_and_window)
    found = runner.evaluate(ids, TOKENS, decoded)
    assert found.mean_kl_bits > 0.01
    # one chunk: the prefill is exact, and only its result is compressed
    once = runner.compressed_prefill(IDS, TOKENS, sinks_and_window)
    by_capture = [sinks_and_window(i, layer) for i, layer in enumerate(models.capture(runner.model, None, IDS))]
    np.testing.assert_allclose(
        runner.logits(ids, TOKENS, once), runner.logits(ids, TOKENS, by_capture), rtol=1e-3, atol=2e-4
    )
    assert runner.evaluate(ids, TOKENS, once).mean_kl_bits != found.mean_kl_bits


def test_refusals():
    runner = Runner(tiny.llama())
    for chunk in (0, 1.5, True):
        with pytest.raises(ValueError, match="chunk: expected an int >= 1"):
            runner.compressed_prefill(IDS, chunk, sinks_and_window)
    with pytest.raises(TypeError, match=r"decoded\[0\]: expected a Decoded"):
        runner.compressed_prefill(IDS, 8, lambda index, layer: layer)


@pytest.mark.real
def test_exact_chunks_of_smol_lose_nothing_and_evicting_ones_do():
    from kvtheory.sample import sample_text

    tokenizer, model = models.load("smol")
    runner = Runner(model, tokenizer)
    ids = models.encode(tokenizer, sample_text(), 144)
    exact = runner.evaluate(ids, 96, runner.compressed_prefill(ids[:96], 32, lambda index, layer: None))
    assert exact.mean_kl_bits < 1e-6 and exact.top1_agreement == 1
    evicting = runner.evaluate(ids, 96, runner.compressed_prefill(ids[:96], 32, sinks_and_window))
    assert evicting.mean_kl_bits > 0.1
