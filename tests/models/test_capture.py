"""A captured layer must say what the model computed: rebuilt outputs, rotation, weights, surprisal and gradients against the model's own."""

import importlib
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvtheory import Cache, attention  # noqa: E402
from kvtheory.models import UnsupportedModel, capture, capture_to, inside  # noqa: E402
from tests.models import tiny  # noqa: E402

T = 24
IDS = tiny.tokens(T)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning"),  # its new name came with 5.20
]


def run(model, **hooks):
    """The model's own forward pass: its logits, and what the modules named by `hooks` put out, per layer."""
    seen, handles = {name: [] for name in hooks}, []
    for layer in inside.stack(model).layers:
        for name, submodule in hooks.items():
            module = next(m for path, m in layer.named_modules() if path.rpartition(".")[2] == submodule)
            handles.append(
                module.register_forward_hook(lambda m, a, o, name=name: seen[name].append((a[0].detach(), o.detach())))
            )
    cache = transformers.DynamicCache()
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(IDS)[None], past_key_values=cache, use_cache=True)
    for handle in handles:
        handle.remove()
    return out.logits[0].double(), cache, seen


def out_name(model):
    """The name of the output projection in this architecture."""
    attention_module = next(m for m in model.modules() if type(m).__name__.endswith("Attention"))
    return inside.child(attention_module, inside.OUTPUT_NAMES)[0]


def relative(a, b):
    return np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b))


@pytest.fixture(scope="module", params=sorted(tiny.ARCHITECTURES))
def made(request):
    model = tiny.ARCHITECTURES[request.param]()
    return request.param, model, capture(model, None, IDS, inputs=True)


def test_rebuilt_attention_output_is_the_model_s(made):
    name, model, cache = made
    _, _, seen = run(model, out=out_name(model))
    for layer, (_, output) in zip(cache, seen["out"], strict=True):
        projection = next(
            m for p, m in inside.stack(model).layers[layer.index].named_modules() if p.endswith(out_name(model))
        )
        bias = 0 if getattr(projection, "bias", None) is None else projection.bias.detach().numpy()
        # in float64 the model's float32 sums of at most 64 terms are known to about 64 * 2^-24 of their terms
        assert relative(attention.layer_outputs(layer), output[0].numpy() - bias) < 1e-4, name


def test_attention_of_the_test_models_is_not_uniform(made):
    """Else the test above would pass with wrong keys: here the largest weight is far above 1/n."""
    _, _, cache = made
    largest = [
        attention.weights(layer.queries[h], layer.keys[h // layer.group], layer.scale, visible=layer.visible())[
            -1
        ].max()
        for layer in cache
        for h in range(layer.query_heads)
    ]
    assert np.median(largest) > 3 / T
    swapped = [layer.replace(keys=layer.keys[:, ::-1]) for layer in cache]
    assert all(relative(attention.layer_outputs(s), attention.layer_outputs(o)) > 0.05 for s, o in zip(swapped, cache))


def test_keys_and_values_are_those_of_the_model_s_own_cache(made):
    _, model, cache = made
    _, own, _ = run(model)
    for layer in cache:
        np.testing.assert_array_equal(layer.keys, own.layers[layer.index].keys[0].numpy())
        np.testing.assert_array_equal(layer.values, own.layers[layer.index].values[0].numpy())


def test_rope_undone_gives_the_keys_before_rotation(made):
    name, model, cache = made
    if name not in tiny.KEY_OUTPUT:
        return  # no module of this architecture puts out its keys before rotation; the test of inputs x weights covers it
    _, _, seen = run(model, key=tiny.KEY_OUTPUT[name])
    for layer, (_, output) in zip(cache, seen["key"], strict=True):
        heads = output[0].numpy()
        if heads.ndim == 2:
            heads = heads.reshape(T, layer.kv_heads, layer.head_dim).transpose(1, 0, 2)
        elif heads.shape[0] == T:
            heads = heads.transpose(1, 0, 2)
        assert relative(layer.rope.undo(layer.keys, layer.positions), heads) < 1e-5
        assert relative(layer.keys, heads) > 0.1  # and rotation is no identity here


def test_rotation_is_found_as_the_architecture_has_it(made):
    name, _, cache = made
    ropes = [layer.rope for layer in cache]
    if name in ("gpt2", "opt"):
        assert ropes == [None, None]
        return
    assert {rope.layout for rope in ropes} == {"interleaved" if name == "cohere" else "half"}
    assert [rope.rotated for rope in ropes] == [8 if name == "gpt_neox" else cache[0].head_dim] * 2
    assert (ropes[0] == ropes[1]) == (name != "gemma3")  # gemma's full and sliding layers turn at different speeds
    assert (ropes[0].attention_scaling != 1) == (name == "yarn")


def test_inputs_times_weights_are_keys_and_values(made):
    name, _, cache = made
    for layer in cache:
        for part, seen in (("key", layer.keys), ("value", layer.values)):
            if part == "key" and name == "gemma3":
                continue  # a norm stands between
            made_of = np.einsum("td,hcd->htc", layer.extras["inputs"], layer.extras[f"{part}_weight"])
            if f"{part}_bias" in layer.extras:
                made_of = made_of + layer.extras[f"{part}_bias"][:, None]
            if part == "key" and layer.rope is not None:
                made_of = layer.rope.apply(made_of, layer.positions)
            assert relative(made_of, seen) < 1e-4
    assert ("key_bias" in cache[0].extras) == (name in ("qwen2", "gpt2", "gpt_neox", "opt"))


def test_surprisal_is_that_of_the_model_s_logits(made):
    _, model, cache = made
    logits, _, _ = run(model)
    own = -torch.log_softmax(logits, -1)[torch.arange(T - 1), torch.from_numpy(IDS[1:])].numpy() / np.log(2)
    np.testing.assert_allclose(cache.surprisal_bits[1:], own, rtol=1e-5, atol=1e-6)
    assert cache.surprisal_bits[0] == np.log2(tiny.VOCABULARY)
    assert cache.surprisal_bits.dtype == np.float64
    np.testing.assert_array_equal(cache.tokens, IDS)


def test_surprisal_in_blocks_equals_in_one(monkeypatch):
    model = tiny.gemma3()
    whole = capture(model, None, IDS).surprisal_bits
    # by name, since kvtheory.models.capture is the function
    monkeypatch.setattr(importlib.import_module("kvtheory.models.capture"), "_LOGITS_AT_ONCE", 5 * tiny.VOCABULARY)
    np.testing.assert_allclose(capture(model, None, IDS).surprisal_bits, whole, rtol=1e-5)


def test_bos_says_nothing_and_a_first_word_does():
    model, words = tiny.llama(), " ".join(map(str, IDS))
    with_bos = capture(model, tiny.Words(bos=2), words, tokens=10)
    assert with_bos.tokens[0] == 2 and with_bos.surprisal_bits[0] == 0
    without = capture(model, tiny.Words(), words, tokens=10)
    assert without.tokens[0] == IDS[0] and without.surprisal_bits[0] == np.log2(tiny.VOCABULARY)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "gpt_neox", "yarn"])
def test_fisher_is_the_mean_squared_gradient(name):
    """The layer-by-layer walk against one backward pass through the whole model."""
    model = tiny.ARCHITECTURES[name]()
    cache = capture(model, None, IDS, fisher=True)
    kept = []

    class Keeping(transformers.DynamicCache):
        def update(self, keys, values, *args, **options):
            keys.retain_grad()
            values.retain_grad()
            kept.append((keys, values))
            return keys, values

    logits = model(input_ids=torch.from_numpy(IDS)[None], past_key_values=Keeping(), use_cache=True).logits[0]
    torch.nn.functional.cross_entropy(logits[:-1], torch.from_numpy(IDS[1:]), reduction="sum").backward()
    for layer, (keys, values) in zip(cache, kept, strict=True):
        for part, tensor in (("key", keys), ("value", values)):
            own = tensor.grad[0].square().mean(1).numpy()
            np.testing.assert_allclose(layer.extras[f"{part}_fisher"], own, rtol=2e-3, atol=1e-6 * own.max())
        # the gradient by the keys before rotation is the rotation undone on the gradient, times s^2 (rotations are orthogonal)
        before = keys.grad[0].numpy()
        if layer.rope is not None:
            r, s = layer.rope.rotated, layer.rope.attention_scaling
            before = layer.rope.undo(before, layer.positions)
            before[..., :r] *= s**2
        own = (before**2).mean(1)
        np.testing.assert_allclose(layer.extras["key_fisher_pre_rope"], own, rtol=2e-3, atol=1e-6 * own.max())


def test_fisher_leaves_the_model_as_it_was():
    model = tiny.llama()
    next(iter(model.parameters())).requires_grad_(False)
    before = [p.requires_grad for p in model.parameters()]
    capture(model, None, IDS, fisher=True)
    assert [p.requires_grad for p in model.parameters()] == before
    assert all(p.grad is None for p in model.parameters())


def test_only_the_layers_and_queries_asked_for():
    model = tiny.llama()
    whole = capture(model, None, IDS)
    some = capture(model, None, IDS, layers=[-1], query_positions=[20, 3, 7])
    assert len(some) == 1 and some[0].index == 1
    np.testing.assert_array_equal(some[0].queries, whole[1].queries[:, [20, 3, 7]])
    np.testing.assert_array_equal(some[0].query_positions, [20, 3, 7])
    np.testing.assert_allclose(
        attention.layer_outputs(some[0]), attention.layer_outputs(whole[1])[[20, 3, 7]], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_streaming_to_a_file_gives_the_same_cache(name, tmp_path):
    model = tiny.ARCHITECTURES[name]()
    options = {"layers": [1, 0], "query_positions": [5, 6], "inputs": True, "fisher": True}
    told = []
    streamed = capture_to(tmp_path / "x.safetensors", model, None, IDS, progress=lambda *a: told.append(a), **options)
    direct = capture(model, None, IDS, **options)
    assert isinstance(streamed, Cache) and [layer.index for layer in streamed] == [1, 0]
    for a, b in zip(streamed, direct, strict=True):
        for field in ("keys", "values", "queries", "output_proj", "query_positions"):
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        assert a.rope == b.rope and a.scale == b.scale and a.extras.keys() == b.extras.keys()
        for extra in a.extras:
            np.testing.assert_array_equal(a.extras[extra], b.extras[extra])
    assert streamed.meta == direct.meta
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert told[-1][0] == told[-1][1]
    assert [done for done, *_ in told] == sorted(done for done, *_ in told)


def test_a_failed_capture_leaves_no_file_and_restores_the_tables(tmp_path):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    model = tiny.llama()
    tables = dict(ALL_ATTENTION_FUNCTIONS), modeling_llama.apply_rotary_pos_emb

    def fail(done, total, what):
        raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        capture_to(tmp_path / "x.safetensors", model, None, IDS, progress=fail)
    assert list(tmp_path.iterdir()) == []
    assert (dict(ALL_ATTENTION_FUNCTIONS), modeling_llama.apply_rotary_pos_emb) == tables
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert len(capture(model, None, IDS)) == 2


def test_eager_and_sdpa_agree():
    a, b = (capture(tiny.llama(attention=kind), None, IDS) for kind in ("eager", "sdpa"))
    assert relative(a[1].keys, b[1].keys) < 1e-5
    assert a.meta["plan"]["attention"] == "eager"


def test_a_sliding_window_is_named_and_all_its_tokens_are_kept():
    cache = capture(tiny.gemma3(), None, IDS)
    assert [layer.window for layer in cache] == [8, None] and cache[0].tokens == T
    assert cache[0].visible().sum(axis=1).max() == 8
    short = capture(tiny.gemma3(), None, IDS[:8])
    assert short[0].window is None  # a window as long as the text hides nothing


def test_meta_names_plan_and_model():
    meta = capture(tiny.llama(), None, IDS, text_name="random").meta
    assert meta["plan"]["compute"] == "float32" and meta["plan"]["threads"] == torch.get_num_threads()
    assert {"torch", "transformers"} <= set(meta["plan"]["versions"])
    assert meta["text"] == "random" and meta["architecture"] == "llama"
    json.dumps(meta)


@pytest.mark.parametrize("count", [1, 2])
def test_one_token_and_two(count):
    cache = capture(tiny.llama(), None, IDS[:count], fisher=True, inputs=True)
    assert cache[0].tokens == count and len(cache.surprisal_bits) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [2]}, "layers: expected numbers from -2 to 1"),
        ({"layers": [0, -2]}, "none twice"),
        ({"layers": []}, "at least one layer"),
        ({"query_positions": [T]}, f"query_positions: expected numbers from 0 to {T - 1}"),
        ({"query_positions": [0.5]}, "query_positions: expected integers"),
        ({"tokens": 0}, "tokens: expected an int >= 1"),
        ({"tokens": T + 1}, f"source: expected at least {T + 1} tokens, got {T}"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        capture(tiny.llama(), None, IDS, **options)


def test_bad_sources_and_models_are_named():
    model = tiny.llama()
    with pytest.raises(ValueError, match=f"token ids from 0 to {tiny.VOCABULARY - 1}"):
        capture(model, None, [1, tiny.VOCABULARY])
    with pytest.raises(ValueError, match="tokenizer: expected one for a text"):
        capture(model, None, "1 2 3")
    with pytest.raises(ValueError, match="expected at least 9 tokens, the text has 3"):
        capture(model, tiny.Words(), "1 2 3", tokens=9)
    with pytest.raises(ValueError, match=r"source: expected a text or token ids of shape \(n,\)"):
        capture(model, None, [[1, 2]])
    with pytest.raises(ValueError, match="at least 1 token"):
        capture(model, tiny.Words(), "")
    with pytest.raises(ValueError, match="expected float32 weights"):
        capture(tiny.llama().to(torch.bfloat16), None, IDS)
    with pytest.raises(ValueError, match="evaluation mode"):
        capture(tiny.llama().train(), None, IDS)


def test_attention_that_no_layer_can_state_is_refused():
    with pytest.raises(UnsupportedModel, match="caps its logits"):
        capture(
            tiny._build("Gemma2", attention="eager", **tiny._COMMON, **tiny._LLAMA, attn_logit_softcapping=5.0),
            None,
            IDS,
        )
    with pytest.raises(UnsupportedModel, match="showed no attention call"):
        capture(
            tiny._build("Bloom", vocab_size=tiny.VOCABULARY, hidden_size=24, n_layer=2, n_head=3, attention="eager"),
            None,
            IDS,
        )


def test_a_change_between_attention_and_projection_is_refused():
    model = tiny.llama()
    projection = model.model.layers[1].self_attn.o_proj
    projection.register_forward_pre_hook(lambda module, arguments: (arguments[0] * 1.001,), prepend=True)
    with pytest.raises(UnsupportedModel, match="layer 1 changes the attention output"):
        capture(model, None, IDS)


def test_a_wrong_rotation_is_refused():
    rng = np.random.default_rng(0)
    before, positions = rng.normal(size=(2, 9, 8)), np.arange(9)
    from kvtheory import Rope

    true = Rope(1e4 ** (-np.arange(4) / 4), "interleaved", 1.2)
    after = np.concatenate([true.apply(before, positions), rng.normal(size=(2, 9, 3))], axis=2)
    assert inside.find_rope(before, after, positions, [(true.inv_freq * 2, 1.2), (true.inv_freq, 1.2)]) == true
    with pytest.raises(UnsupportedModel, match="relative errors"):
        inside.find_rope(before, after, positions, [(true.inv_freq, 1.0)])
    with pytest.raises(UnsupportedModel, match="no set fits 8 channels"):
        inside.find_rope(before, after, positions, [])
