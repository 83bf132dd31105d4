"""SmolLM2-135M itself: Full says what the plain cache says, and other codecs what `kvtheory compare` says of them."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

import reference  # noqa: E402
from kvtheory import models  # noqa: E402
from kvtheory.models import Runner, capture  # noqa: E402
from kvtheory.sample import sample_text  # noqa: E402
from reference import hf  # noqa: E402
from tests.reference.hf.test_generate import generate, run, same  # noqa: E402

pytestmark = pytest.mark.real
PROMPT = 96


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the captures are made: more threads add in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smol():
    tokenizer, model = models.load("smol")
    return tokenizer, model, torch.from_numpy(models.encode(tokenizer, sample_text(), PROMPT + 16))[None]


def test_full_is_the_plain_cache(smol):
    _, model, ids = smol
    hf.detach(model)
    expected = generate(model, ids[:, :PROMPT], DynamicCache(), new=8)
    hf.attach(model)
    same(expected, generate(model, ids[:, :PROMPT], hf.CompressedCache(reference.Full(), window=4), new=8))


@pytest.mark.parametrize(
    "codec",
    [
        reference.TurboQuant(3),
        reference.KIVI(2, window=32),
        reference.SnapKV(24, window=8),
        reference.MergeReduce(24, "refit", window=8),
    ],
    ids=lambda codec: codec.codec_id,
)
def test_the_logits_are_those_of_compare(smol, codec):
    """Bytes of a capture, logits of the replaced prefix: the same 30 layers, bit for bit."""
    _, model, ids = smol
    hf.detach(model)
    streams = [codec.encode(layer) for layer in capture(model, None, ids[0, :PROMPT].numpy())]
    expected = Runner(model, block=16).logits(ids[0].numpy(), PROMPT, [codec.decode(stream) for stream in streams])
    hf.attach(model)
    cache = hf.CompressedCache(codec, sinks=0, window=0, every=64)
    run(model, ids[:, :PROMPT], cache)
    assert [one for (one,) in cache.streams()] == streams
    found = run(model, ids[:, PROMPT:], cache)[0]
    assert torch.equal(found, torch.from_numpy(expected))


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_the_other_models_at_hand(name):
    """Biases, two KV heads, QK-norm, sliding windows of 512, head_dim 256: where the weights are here already."""
    if not models.available(name):
        pytest.skip(f"{name} is optional and not here; `kvtheory models fetch {name}` puts it there")
    tokenizer, model = models.load(name)
    ids = torch.from_numpy(models.encode(tokenizer, sample_text(), 40))[None]
    expected = generate(model, ids, DynamicCache(), new=4)
    hf.attach(model)
    same(expected, generate(model, ids, hf.CompressedCache(reference.Full(), window=4), new=4))
    cache = hf.CompressedCache(reference.SnapKV(16, window=4), window=4)
    assert all(torch.isfinite(logits).all() for logits in generate(model, ids, cache, new=4).logits)
    assert all(layer.columns.shape[2] == 4 + 16 + 4 + 3 for layer in cache.layers)
