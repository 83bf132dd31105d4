"""The runner against brute force: a lossless prefix gives the plain model's bits, and every replaced prefix what a mask says of it."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from kvtheory.attention import attend  # noqa: E402
from kvtheory.layer import Decoded  # noqa: E402
from kvtheory.models import UnsupportedModel, capture  # noqa: E402
from kvtheory.models.runner import Evaluation, Runner  # noqa: E402
from tests.models import tiny  # noqa: E402

PREFIX, TOKENS = 16, 24
IDS = tiny.tokens(TOKENS)


def captured(model, ids=IDS[:PREFIX]):
    return list(capture(model, None, ids))


def exact(model):
    return [Decoded.exact(layer) for layer in captured(model)]


def chosen(layer, rng, *, ragged, weighted, keep=10):
    """A Decoded of some tokens of `layer`; `ragged`: each head its own, and its own number of them."""
    heads, tokens = layer.keys.shape[:2]
    counts = [int(rng.integers(1, keep + 1)) if ragged else keep for _ in range(heads)]
    one = np.sort(rng.permutation(tokens)[:keep])
    picks = [np.sort(rng.permutation(tokens)[:count]) if ragged else one for count in counts]
    size = max(counts) + 2  # padding longer than it must be
    keys, values = (np.zeros((heads, size, x.shape[2]), np.float32) for x in (layer.keys, layer.values))
    weights, positions = np.full((heads, size), -np.inf), np.full((heads, size), -1)
    for h, pick in enumerate(picks):
        keys[h, : len(pick)], values[h, : len(pick)] = layer.keys[h, pick], layer.values[h, pick]
        weights[h, : len(pick)] = rng.normal(size=len(pick)) if weighted else 0.0
        positions[h, : len(pick)] = pick
    return Decoded(keys, values, weights, positions, np.array(counts))


def by_masks(model, ids, prefix, decoded):
    """Logits of the continuation, from the plain model on the whole text at once without a cache, each layer's attention mask changed:
    a continuation token sees of the prefix what `decoded` kept, with its log-weights; the prefix sees all of itself.
    """
    count = len(ids)
    heads = model.config.get_text_config().num_attention_heads
    types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(decoded)
    hooks = []
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if index is None:
            continue
        age = torch.arange(count)[:, None] - torch.arange(count)[None, :]
        window = model.config.sliding_window if types[index] == "sliding_attention" else count
        mask = torch.zeros(heads, count, count).masked_fill(~((age >= 0) & (age < window)), -torch.inf)
        entry = decoded[index]
        if entry is not None:
            group = heads // len(entry.kept)
            for h in range(heads):
                added = torch.full((prefix,), -torch.inf)
                kv = h // group
                n = entry.kept[kv]
                added[torch.from_numpy(np.array(entry.positions[kv, :n]))] = torch.from_numpy(
                    np.array(entry.log_weights[kv, :n])
                ).float()
                mask[h, prefix:, :prefix] += added
        hooks.append(module.register_forward_pre_hook(_masked_by(mask[None]), with_kwargs=True))
    try:
        with torch.no_grad():
            return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, prefix:].numpy()
    finally:
        for hook in hooks:
            hook.remove()


def _masked_by(mask):
    def change(module, arguments, options):
        if "attention_mask" in options:
            options["attention_mask"] = mask
        return arguments, options

    return change


def by_hand(model, ids, prefix, blocks):
    """The plain run on the runner's plan, written with transformers alone."""
    cache, found = DynamicCache(), []
    with torch.no_grad():
        model.base_model(input_ids=torch.from_numpy(ids[:prefix])[None], **{tiny.CACHE: cache}, use_cache=True)
        for start in range(prefix, len(ids), blocks):
            out = model(
                input_ids=torch.from_numpy(ids[start : start + blocks])[None], **{tiny.CACHE: cache}, use_cache=True
            )
            found.append(out.logits[0].numpy())
    return np.concatenate(found)


class TestLossless:
    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", tiny.ARCHITECTURES)
    def test_captured_layers_give_the_plain_model_bit_for_bit(self, name, attention):
        model = tiny.ARCHITECTURES[name](attention=attention)
        for block in (None, 3):
            runner = Runner(model, block=block)
            plain = runner.logits(IDS, PREFIX)
            assert plain.dtype == np.float32 and plain.shape == (TOKENS - PREFIX, tiny.VOCABULARY)
            np.testing.assert_array_equal(plain, by_hand(model, IDS, PREFIX, block or TOKENS))
            np.testing.assert_array_equal(runner.logits(IDS, PREFIX, exact(model)), plain)
        with torch.no_grad():
            whole = model(input_ids=torch.from_numpy(IDS)[None]).logits[0, PREFIX:].numpy()
        np.testing.assert_allclose(plain, whole, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    def test_the_codec_full_does_too(self, name):
        from reference import Full

        model = tiny.ARCHITECTURES[name]()
        runner, codec = Runner(model), Full()
        decoded = [codec.decode(codec.encode(layer)) for layer in captured(model)]
        np.testing.assert_array_equal(runner.logits(IDS, PREFIX, decoded), runner.logits(IDS, PREFIX))

    def test_padding_that_nobody_needs_changes_nothing(self):
        model = tiny.llama()
        padded = []
        for entry in exact(model):
            fill = ((0, 0), (0, 3))
            padded.append(
                Decoded(
                    np.pad(entry.keys, (*fill, (0, 0))), np.pad(entry.values, (*fill, (0, 0))),
                    np.pad(entry.log_weights, fill, constant_values=-np.inf), np.pad(entry.positions, fill, constant_values=-1), entry.kept,
                )
            )  # fmt: skip
        runner = Runner(model)
        np.testing.assert_array_equal(runner.logits(IDS, PREFIX, padded), runner.logits(IDS, PREFIX))

    def test_a_changed_number_changes_the_logits(self):
        model = tiny.llama()
        decoded = exact(model)
        decoded[1].keys[0, 3, 5] += 0.5
        runner = Runner(model)
        assert not np.array_equal(runner.logits(IDS, PREFIX, decoded), runner.logits(IDS, PREFIX))

    def test_layers_left_out_stay_exact(self):
        model = tiny.llama()
        runner = Runner(model)
        entry = chosen(captured(model)[1], np.random.default_rng(0), ragged=False, weighted=False)
        both = runner.logits(IDS, PREFIX, [exact(model)[0], entry])
        np.testing.assert_array_equal(runner.logits(IDS, PREFIX, [None, entry]), both)
        np.testing.assert_array_equal(runner.logits(IDS, PREFIX, {1: entry}), both)
        np.testing.assert_array_equal(runner.logits(IDS, PREFIX, {}), runner.logits(IDS, PREFIX))


class TestAgainstMasks:
    """Same numbers as the plain model under masks, but for float32 sums in another order."""

    def check(self, model, decoded, block=None, ids=IDS, prefix=PREFIX):
        found = Runner(model, block=block).logits(ids, prefix, decoded)
        expected = by_masks(model, ids, prefix, decoded)
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-4)
        return found

    @pytest.mark.parametrize("attention", ["sdpa", "eager"])
    @pytest.mark.parametrize("name", tiny.ARCHITECTURES)
    @pytest.mark.parametrize("ragged, weighted", [(False, False), (False, True), (True, False), (True, True)])
    def test_dropped_ragged_and_weighted_tokens(self, name, attention, ragged, weighted):
        model = tiny.ARCHITECTURES[name](attention=attention)
        rng = np.random.default_rng(len(name) + 2 * ragged + weighted)
        decoded = [chosen(layer, rng, ragged=ragged, weighted=weighted) for layer in captured(model)]
        found = self.check(model, decoded)
        self.check(model, decoded, block=1)  # one query at a time: other kernels, and no mask of the model's own
        self.check(model, decoded, block=3)
        assert np.abs(found - Runner(model).logits(IDS, PREFIX)).max() > 1e-2  # the check could fail

    def test_one_layer_rewritten_the_other_not(self):
        model = tiny.gemma3()
        for index in (0, 1):
            decoded = [None, None]
            decoded[index] = chosen(captured(model)[index], np.random.default_rng(1), ragged=True, weighted=True)
            self.check(model, decoded)

    def test_a_head_may_keep_nothing(self):
        model = tiny.llama()
        decoded = exact(model)
        keys, values = (np.array(x) for x in (decoded[0].keys, decoded[0].values))
        keys[1], values[1] = 0, 0
        weights, positions = np.zeros((2, PREFIX)), np.tile(np.arange(PREFIX), (2, 1))
        weights[1], positions[1] = -np.inf, -1
        decoded[0] = Decoded(keys, values, weights, positions, np.array([PREFIX, 0]))
        self.check(model, decoded)
        nothing = [Decoded(np.zeros((2, 0, 16), np.float32), np.zeros((2, 0, 16), np.float32), np.zeros((2, 0)), np.zeros((2, 0), int), [0, 0])] * 2  # fmt: skip
        self.check(model, nothing)

    def test_sinks_and_window(self):
        model = tiny.yarn()
        keep = np.r_[0:2, PREFIX - 5 : PREFIX]
        decoded = [Decoded.of(x.keys[:, keep], x.values[:, keep], keep) for x in captured(model)]
        self.check(model, decoded)

    def test_positions_go_on_from_the_prefix(self):
        """With the first half dropped, what is left is not the second half alone: its tokens would sit elsewhere."""
        model = tiny.gpt2()
        keep = np.arange(PREFIX // 2, PREFIX)
        decoded = [Decoded.of(x.keys[:, keep], x.values[:, keep], keep) for x in captured(model)]
        found = self.check(model, decoded)
        shifted = Runner(model).logits(IDS[PREFIX // 2 :], PREFIX // 2)
        assert np.abs(found - shifted).max() > 1e-2

    def test_windows_look_at_original_positions(self):
        """A sliding layer of 8: a token that far back is out of sight, however few tokens are kept in between."""
        model = tiny.gemma3()
        runner = Runner(model)
        first, kept = captured(model)[0], np.array([0, 1, PREFIX - 1])
        decoded = {0: Decoded.of(first.keys[:, kept], first.values[:, kept], kept)}
        moved = {
            0: Decoded.of(first.keys[:, kept], first.values[:, kept], np.array([PREFIX - 3, PREFIX - 2, PREFIX - 1]))
        }
        alone = {0: Decoded.of(first.keys[:, kept[2:]], first.values[:, kept[2:]], kept[2:])}
        found = runner.logits(IDS, PREFIX, decoded)
        np.testing.assert_allclose(found, runner.logits(IDS, PREFIX, alone), rtol=1e-3, atol=2e-4)
        assert np.abs(found - runner.logits(IDS, PREFIX, moved)).max() > 1e-2

    @pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
    def test_two_equal_tokens_are_one_with_log_weight_ln_2(self, name):
        model = tiny.ARCHITECTURES[name]()
        runner = Runner(model)
        twice, once = [], []
        for layer in captured(model):
            keys, values = np.array(layer.keys), np.array(layer.values)
            keys[:, 13], values[:, 13] = keys[:, 12], values[:, 12]
            twice.append(Decoded.of(keys, values))
            rest = np.delete(np.arange(PREFIX), 13)
            single = Decoded.of(keys[:, rest], values[:, rest], rest)
            weights = np.array(single.log_weights)
            weights[:, 12] = math.log(2)
            once.append(Decoded(single.keys, single.values, weights, single.positions, single.kept))
        expected, found = runner.logits(IDS, PREFIX, twice), runner.logits(IDS, PREFIX, once)
        # in a window of 8 the pair leaves one by one, its merger at once: the same until then
        same = 12 + 8 - PREFIX if name == "gemma3" else TOKENS - PREFIX
        np.testing.assert_allclose(found[:same], expected[:same], rtol=1e-3, atol=2e-4)
        assert same == TOKENS - PREFIX or np.abs(found[same] - expected[same]).max() > 1e-2
        unweighted = [Decoded.of(x.keys, x.values, np.delete(np.arange(PREFIX), 13)) for x in once]
        assert np.abs(runner.logits(IDS, PREFIX, unweighted) - expected).max() > 1e-2

    def test_the_first_layer_attends_as_kvtheory_says(self):
        """kvtheory.attention.attend on Decoded and continuation together is what enters the output projection."""
        model = tiny.llama()
        layer = captured(model)[0]
        entry = chosen(layer, np.random.default_rng(3), ragged=False, weighted=True)
        whole = capture(model, None, IDS)[0]  # layer 0 of the continuation does not depend on the prefix's cache
        seen = []
        projection = model.model.layers[0].self_attn.o_proj
        runner = Runner(model)
        runner.logits(IDS, PREFIX)
        hook = projection.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0][0].numpy()))
        runner.logits(IDS, PREFIX, {0: entry})
        hook.remove()
        kept = int(entry.kept[0])
        late = np.arange(PREFIX, TOKENS)
        expected = attend(
            whole.queries[:, PREFIX:],
            np.concatenate([entry.keys[:, :kept], whole.keys[:, PREFIX:]], axis=1),
            np.concatenate([entry.values[:, :kept], whole.values[:, PREFIX:]], axis=1),
            scale=whole.scale,
            log_weights=np.pad(entry.log_weights[:, :kept], ((0, 0), (0, len(late)))),
            positions=np.concatenate([entry.positions[0, :kept], late]),
            query_positions=late,
        )
        np.testing.assert_allclose(seen[0], expected.transpose(1, 0, 2).reshape(len(late), -1), rtol=1e-4, atol=1e-5)


class TestEvaluate:
    def evaluated(self, block=None, **options):
        model = tiny.llama()
        rng = np.random.default_rng(4)
        decoded = [chosen(layer, rng, ragged=True, weighted=True) for layer in captured(model)]
        runner = Runner(model, block=block)
        return runner, decoded, runner.evaluate(IDS, PREFIX, decoded, **options)

    @pytest.mark.parametrize("block", [None, 3])
    def test_numbers_are_those_of_the_logits(self, block):
        runner, decoded, found = self.evaluated(block)
        p, q = (
            torch.log_softmax(torch.from_numpy(x).double(), -1).numpy() / math.log(2)
            for x in (runner.logits(IDS, PREFIX), runner.logits(IDS, PREFIX, decoded))
        )
        np.testing.assert_allclose(found.kl_bits, (2**p * (p - q)).sum(1), rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(found.agrees, p.argmax(1) == q.argmax(1))
        for bits, own in ((p, found.plain_surprisal_bits), (q, found.surprisal_bits)):
            np.testing.assert_allclose(own, -bits[np.arange(TOKENS - PREFIX - 1), IDS[PREFIX + 1 :]], rtol=1e-12)
        assert found.summary() == {
            "prefix": PREFIX,
            "positions": TOKENS - PREFIX,
            "mean_kl_bits": found.kl_bits.mean(),
            "top1_agreement": found.agrees.mean(),
            "plain_perplexity": 2 ** found.plain_surprisal_bits.mean(),
            "perplexity": 2 ** found.surprisal_bits.mean(),
        }
        assert (found.kl_bits > 1e-3).all() and found.mean_kl_bits > 0.01

    def test_surprisal_is_the_capture_s(self):
        runner, _, found = self.evaluated()
        cache = capture(runner.model, None, IDS)
        np.testing.assert_allclose(found.plain_surprisal_bits, cache.surprisal_bits[PREFIX + 1 :], rtol=1e-4)

    def test_lossless_is_exactly_nothing_lost(self):
        model = tiny.gemma3()
        found = Runner(model).evaluate(IDS, PREFIX, exact(model))
        assert found.mean_kl_bits == 0 and not found.kl_bits.any() and found.top1_agreement == 1
        np.testing.assert_array_equal(found.surprisal_bits, found.plain_surprisal_bits)

    def test_the_plain_run_is_remembered_for_its_text_only(self, monkeypatch):
        runner, decoded, first = self.evaluated()
        runs = []
        true = Runner._continue
        monkeypatch.setattr(Runner, "_continue", lambda *arguments: runs.append(1) or true(*arguments))
        again = runner.evaluate(IDS, PREFIX, decoded)
        assert len(runs) == 1
        for name in Evaluation.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(first, name), getattr(again, name))
        other = tiny.tokens(TOKENS, seed=2)
        theirs = runner.evaluate(other, PREFIX, decoded)
        assert len(runs) == 3
        shorter = [Decoded.exact(layer) for layer in captured(runner.model, other[: PREFIX - 4])]
        assert runner.evaluate(other, PREFIX - 4, shorter).mean_kl_bits == 0
        assert len(runs) == 5
        np.testing.assert_array_equal(theirs.kl_bits, Runner(tiny.llama()).evaluate(other, PREFIX, decoded).kl_bits)

    def test_progress_ends_at_the_end(self):
        told = []
        self.evaluated(block=3, progress=lambda done, total, what: told.append((done, total)))
        assert told == [(0, 8), (3, 8), (6, 8), (8, 8)]


class TestRefusals:
    def test_of_arguments(self):
        model = tiny.llama()
        runner, good = Runner(model), exact(model)
        for arguments, message in (
            ((IDS[None], PREFIX), r"tokens: expected ids of shape \(n,\), got int64 of shape \(1, 24\)"),
            ((IDS, TOKENS), "prefix: expected an int from 1 to 23 of 24 tokens, got 24"),
            ((IDS, 0), "prefix: expected an int from 1"),
            ((np.full(24, tiny.VOCABULARY), 3), "tokens: expected ids from 0 to 100, got 101"),
            ((IDS, PREFIX, good[:1]), "decoded: expected 2 entries, one a layer"),
            ((IDS, PREFIX, {2: good[0]}), "decoded: expected layers from 0 to 1, got 2"),
            ((IDS, PREFIX - 1, good), "positions in the prefix, below 15, got 15"),
            ((IDS, PREFIX, [Decoded.of(good[0].keys[..., :8], good[0].values)] * 2), r"expected \(kv_heads, head_dim"),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=message):
                runner.logits(*arguments)
        with pytest.raises(TypeError, match=r"decoded\[0\]: expected a Decoded or None, got Layer"):
            runner.logits(IDS, PREFIX, captured(model))
        with pytest.raises(ValueError, match="prefix: expected an int from 1 to 22"):
            runner.evaluate(IDS, TOKENS - 1, good)
        with pytest.raises(ValueError, match="block: expected an int >= 1"):
            Runner(model, block=0)

    def test_of_models(self):
        with pytest.raises(ValueError, match="training mode"):
            Runner(tiny.llama().train())
        model = tiny.llama()
        model.config._attn_implementation = "flex_attention"
        with pytest.raises(ValueError, match='expected attention "sdpa" or "eager"'):
            Runner(model)

    def test_attention_that_hides_from_the_table(self, monkeypatch):
        from transformers.modeling_utils import AttentionInterface

        model = tiny.llama()
        lossless = exact(model)
        one = lossless[0]
        reweighted = Decoded(one.keys, one.values, np.ones_like(one.log_weights), one.positions, one.kept)
        monkeypatch.setattr("transformers.models.llama.modeling_llama.ALL_ATTENTION_FUNCTIONS", AttentionInterface())
        runner = Runner(model)
        with pytest.raises(UnsupportedModel, match="attention of layer 0 of LlamaForCausalLM does not go through"):
            # as many tokens as there were, so that the model's own mask fits and nothing fails by itself
            runner.logits(IDS, PREFIX, {0: reweighted})
        np.testing.assert_array_equal(runner.logits(IDS, PREFIX, lossless), runner.logits(IDS, PREFIX))

    def test_the_table_is_as_it_was(self):
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        before = dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
        model = tiny.llama()
        entry = chosen(captured(model)[0], np.random.default_rng(0), ragged=True, weighted=True)
        runner = Runner(model)
        runner.logits(IDS, PREFIX, {0: entry})
        assert ALL_ATTENTION_FUNCTIONS._local_mapping == before
