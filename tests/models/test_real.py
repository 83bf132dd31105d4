"""SmolLM2-135M itself (93 MB, fetched through the installer): the embedded sample is its cache, and a capture says what it computes."""

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import kvtheory  # noqa: E402
from kvtheory import Cache, attention, models  # noqa: E402
from kvtheory.sample import sample_text, ulps  # noqa: E402

pytestmark = pytest.mark.real
PREFIX = 64


@pytest.fixture(scope="module")
def smol():
    return models.load("smol")


@pytest.fixture(scope="module")
def prefix(smol):
    tokenizer, model = smol
    return models.capture(model, tokenizer, sample_text(), tokens=PREFIX, inputs=True)


def test_the_model_is_the_one_written_down(smol):
    _, model = smol
    wanted = models.MODELS["smol"]
    assert sum(p.numel() for p in model.parameters()) == wanted.parameters
    config = model.config
    kv = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    assert 2 * kv == wanted.kv_bytes_per_token
    assert models.available("smol")


def test_the_sample_is_a_capture_of_its_first_tokens(prefix):
    """Causal: the first 64 of 384 tokens have the same cache when they stand alone. 99%: sums of float32 taken in another order."""
    sample = kvtheory.sample_cache()
    np.testing.assert_array_equal(prefix.tokens, sample.tokens[:PREFIX])
    np.testing.assert_allclose(prefix.surprisal_bits, sample.surprisal_bits[:PREFIX], atol=1e-3)
    for stored in sample:
        layer = prefix[stored.index]
        assert layer.index == stored.index and layer.rope == stored.rope and layer.scale == stored.scale
        early = stored.query_positions < PREFIX
        pairs = {
            "keys": (stored.keys[:, :PREFIX], layer.keys),
            "values": (stored.values[:, :PREFIX], layer.values),
            "queries": (stored.queries[:, early], layer.queries[:, stored.query_positions[early]]),
            "output_proj": (stored.output_proj, layer.output_proj),
        }
        for name, (old, new) in pairs.items():
            assert (ulps(old, new.astype(np.float16)) <= 1).mean() >= 0.99, (stored.index, name)


def test_a_sample_of_another_layer_would_not_pass(prefix):
    stored, other = kvtheory.sample_cache()[0], prefix[3]
    assert (ulps(stored.keys[:, :PREFIX], other.keys.astype(np.float16)) <= 1).mean() < 0.01


def test_every_layer_rebuilds_the_model_s_attention_output(smol, prefix):
    _, model = smol
    outputs = []
    hooks = [
        layer.self_attn.o_proj.register_forward_hook(
            lambda module, arguments, output: outputs.append(output[0].numpy())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.from_numpy(prefix.tokens)[None], use_cache=False, logits_to_keep=1)
    for hook in hooks:
        hook.remove()
    assert len(outputs) == len(prefix) == 30
    for layer, output in zip(prefix, outputs, strict=True):
        error = np.linalg.norm(attention.layer_outputs(layer) - output) / np.linalg.norm(output)
        assert error < 1e-5, layer.index  # found: 6e-7


def test_keys_come_from_inputs_by_weight_and_rotation(prefix):
    for layer in prefix:
        made = np.einsum("td,hcd->htc", layer.extras["inputs"], layer.extras["key_weight"])
        before = layer.rope.undo(layer.keys, layer.positions)
        assert np.linalg.norm(before - made) / np.linalg.norm(made) < 1e-5


def test_the_first_layer_s_keys_before_rotation_depend_on_the_token_alone(prefix):
    """Layer 0 reads embeddings, so equal tokens have equal rows there; in the layer after, context has entered."""
    first, second = prefix[0], prefix[1]
    ids, counts = np.unique(prefix.tokens, return_counts=True)
    where = np.flatnonzero(prefix.tokens == ids[np.argmax(counts)])
    assert len(where) >= 3
    for layer, same in ((first, True), (second, False)):
        rows = layer.rope.undo(layer.keys, layer.positions)[:, where]
        spread = np.abs(rows - rows[:, :1]).max() / np.abs(rows).max()
        assert (spread < 1e-4) == same


def test_surprisal_is_in_bits_and_sane(prefix):
    assert prefix.surprisal_bits[0] == np.log2(49_152)
    assert 3 < prefix.surprisal_bits[1:].mean() < 8  # English prose under this model: 4.6 to 5.6 bits at length


def test_a_capture_of_2048_tokens_stays_under_2_gb(tmp_path):
    """All 30 layers, written as the pass reaches them: the peak of a process of its own, as the kernel counts it."""
    code = f"""
import pathlib
from kvtheory import models
tokenizer, model = models.load("smol")
ids = [(7 * i * i + 11 * i) % 49152 for i in range(2048)]
models.capture_to({str(tmp_path / "x.safetensors")!r}, model, tokenizer, ids)
# not ru_maxrss: that of a process started by fork is at least its parent's
(peak,) = [line.split()[1] for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
print(int(peak) * 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 2e9
    assert len(Cache.load(tmp_path / "x.safetensors")) == 30
