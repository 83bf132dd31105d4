"""A compressed cache on tensors of one's own: whatever is done to it, attention reads what a receiver would decode, and nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.reference.hf.driven import DTYPES, LAYERS, NAMES, Driven, codec  # noqa: E402

every = pytest.mark.parametrize("name", NAMES)
#: of each codec; together there are hundreds
fewer = settings(max_examples=max(12, settings().max_examples // 4))
#: tokens stand for others there, so that the last ones cannot always be taken back
MERGING = tuple(name for name in NAMES if "MergeReduce" in name)


@st.composite
def histories(draw):
    """A prompt, and what happens to it: passes with padding, crops, selections of rows, copies."""
    batch = draw(st.integers(1, 3))
    prompt = draw(st.integers(1, 20))
    padding = draw(st.lists(st.integers(0, prompt - 1), min_size=batch, max_size=batch))
    steps = [("pass", prompt, padding)]
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["pass", "pass", "pass", "crop", "select", "copy", "hold"]))
        if kind == "pass":
            size = draw(st.integers(1, 9))
            steps.append((kind, size, draw(st.lists(st.integers(0, size), min_size=0, max_size=1))))
        else:
            steps.append((kind, draw(st.integers(0, 12)), draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))))
    return batch, steps


options = st.fixed_dictionaries(
    {"sinks": st.integers(0, 5), "window": st.integers(0, 8), "every": st.one_of(st.none(), st.integers(1, 6))}
)


@every
@fewer
@given(history=histories(), option=options, dtype=st.sampled_from(sorted(DTYPES)), seed=st.integers(0, 2**16))
def test_what_is_read_is_what_is_decoded(name, history, option, dtype, seed):
    batch, steps = history
    driven = Driven(codec(name), batch, dtype, seed, **option)
    for kind, number, rows in steps:
        if kind == "pass":
            ends = coded(driven)
            driven.run(number, rows)
            on_time(driven, ends)
        elif kind == "crop":
            count = min(number, driven.valid.shape[1] - 1)
            if count and not driven.valid[:, :-count].any(axis=1).all():
                continue
            try:
                driven.crop(count)
            except ValueError as problem:
                assert name in MERGING and "stand, with weights" in str(problem)
        elif kind == "select":
            driven.select([r % driven.batch for r in rows])
        elif kind == "copy":
            other = driven.twin()
            other.run(3)  # goes on alone, and leaves no trace
            other.check()
        else:
            held_off(driven, number, rows)
        driven.check()
        driven.check_held()


def coded(driven):
    return [[layer.rows[r].end for r in range(driven.batch)] for layer in driven.cache.layers]


def on_time(driven, before):
    """Tokens are coded when they should be: the prompt at its end, later ones in pieces, and never one of the newest."""
    cache = driven.cache
    for i, layer in enumerate(cache.layers):
        for r, row in enumerate(layer.rows):
            tokens = int(driven.valid[r].sum())
            first = row.end or min(cache.sinks, tokens)
            assert tokens - first < cache.window + cache.every or not tokens
            if not before:
                assert tokens - first == min(cache.window, tokens - min(cache.sinks, tokens))
            elif row.end != before[i][r]:
                assert (
                    tokens - row.end == cache.window
                    and tokens - (before[i][r] or row.sinks) >= cache.window + cache.every
                )
            assert row.end == 0 or row.sinks == min(cache.sinks, tokens)


def held_off(driven, number, rows):
    """While the past is recorded nothing is coded before a crop, so that what it takes back leaves no trace."""
    driven.cache.activate_past_recording()
    ends = coded(driven)
    size = 1 + number % 5
    driven.run(size)
    assert coded(driven) == ends
    driven.crop(min(size, rows[0]))
    for layer in driven.cache.layers:
        layer.record_past = False


@every
@fewer
@given(data=st.data(), option=options, seed=st.integers(0, 2**16))
def test_a_row_of_a_batch_is_held_as_alone(name, data, option, seed):
    """Groups, frequencies and evictions never cross requests, and padding is not coded: the same bytes as of the row by itself."""
    batch = data.draw(st.integers(2, 3))
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    paddings = [data.draw(st.lists(st.integers(0, n - 1), min_size=batch, max_size=batch)) for n in sizes]
    together = Driven(codec(name), batch, seed=seed, **option)
    alone = [Driven(codec(name), 1, **option) for _ in range(batch)]
    for n, padding in zip(sizes, paddings):
        tensors = together.tensors(n)
        together.run(n, padding, tensors)
        for r, one in enumerate(alone):
            one.run(n - padding[r], (), [tuple(x[r : r + 1, :, padding[r] :] for x in each) for each in tensors])
    for r, one in enumerate(alone):
        assert together.cache.streams(r) == one.cache.streams()
        assert together.cache.in_use(r) == one.cache.in_use()
    assert together.cache.held_bits() == sum(one.cache.held_bits() for one in alone)


@every
def test_the_stream_is_that_of_the_tokens_between(name):
    """At the end of a prompt: the bytes that the codec itself makes of them, with the queries, at their positions."""
    driven = Driven(codec(name), sinks=3, window=5, seed=1)
    tensors = driven.tensors(30)
    driven.run(30, (), tensors)
    for i, (keys, values, queries) in enumerate(tensors):
        facts = driven.cache.layers[i].facts
        from kvtheory import Layer

        layer = Layer(
            keys[0, :, 3:25], values[0, :, 3:25], queries[0], facts.output_proj, rope=facts.rope, index=i,
            positions=np.arange(3, 25), query_positions=np.arange(30),
        )  # fmt: skip
        assert driven.cache.streams()[i] == (driven.cache.codec.encode(layer),)


# MergeReduce asks the queries of its first prompt, and the longer prompt here has others
@pytest.mark.parametrize("name", [name for name in NAMES if codec(name).streaming and name != "MergeReduce refit"])
def test_a_codec_that_streams_has_one_stream_as_if_at_once(name):
    """Tokens that age one after the other, and the same tokens in one prompt: the same bytes."""
    driven = Driven(codec(name), sinks=2, window=4, every=3, seed=2)
    tensors = driven.tensors(40)
    for start, stop in ((0, 20), *((i, i + 1) for i in range(20, 40))):
        driven.run(stop - start, (), [tuple(x[:, :, start:stop] for x in each) for each in tensors])
    end = driven.cache.layers[0].rows[0].end
    at_once = Driven(codec(name), sinks=2, window=0)
    at_once.run(end, (), [tuple(x[:, :, :end] for x in each) for each in tensors])
    assert driven.cache.streams() == at_once.cache.streams()
    assert [len(streams) for streams in driven.cache.streams()] == [1] * LAYERS


def test_eviction_is_decided_once():
    """Behind the prompt every token is kept, exactly; the kept ones of the prompt have their own positions in each head."""
    driven = Driven(codec("SnapKV 12"), sinks=0, window=0, every=4, seed=3)
    driven.run(30)
    kept = [layer.columns.clone() for layer in driven.cache.layers]
    for _ in range(9):
        driven.run(1)
    driven.check()
    for layer, before in zip(driven.cache.layers, kept):
        assert before.shape == (1, 2, 12) and not torch.equal(before[:, 0], before[:, 1])
        assert torch.equal(layer.columns[:, :, :12], before)
        assert layer.columns[0, :, 12:].tolist() == [list(range(30, 39))] * 2
        assert layer.rows[0].segments[0].decoded.kept.tolist() == [20, 20]


@pytest.mark.parametrize("name", ["SnapKV 12", "StreamingLLM 12", "TurboQuant 3"])
def test_padding_between_prompts_is_never_coded(name):
    """Second prompts of different lengths, behind tokens that were evicted, or were not."""
    driven = Driven(codec(name), 2, sinks=0, window=2, every=3, seed=6)
    for columns, padding in ((30, (0, 7)), (6, (4, 0)), (6, (0, 3)), (1, ()), (5, (2, 5))):
        driven.run(columns, padding)
        driven.check()
        driven.check_held()


@pytest.mark.parametrize("name", ["SnapKV 12", "MergeReduce refit", "Pipeline MergeReduce TurboQuant"])
def test_rejected_tokens_leave_no_trace(name):
    """Drafts behind a prompt, taken back before anything is coded: streams, queries of later ones, all as without them."""
    found = []
    for drafts in (0, 7):
        driven = Driven(codec(name), sinks=1, window=2, every=3, seed=7)
        driven.cache.activate_past_recording()
        tensors = driven.tensors(50)
        driven.run(30 + drafts, (), [tuple(x[:, :, : 30 + drafts] for x in each) for each in tensors])
        assert not any(driven.cache.streams())
        driven.crop(drafts)
        assert all(driven.cache.streams())
        driven.run(6, (), [tuple(x[:, :, 40:46] for x in each) for each in tensors])
        driven.crop(2)
        driven.check()
        found.append(driven.cache.streams())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["TurboQuant 3", "SnapKV 12"])
def test_what_was_not_taken_back_is_coded_before_the_next_pass(name):
    """All drafts were right: the next pass reads them as decoded, not as they came."""
    driven = Driven(codec(name), sinks=1, window=2, every=3, seed=7)
    driven.cache.activate_past_recording()
    driven.run(30)
    assert coded(driven) == [[0]] * len(driven.cache.layers)
    driven.run(1)
    assert coded(driven) == [[28]] * len(driven.cache.layers)


@pytest.mark.parametrize("name", ["SnapKV 12", "MergeReduce random", "KIVI 2 groups of 2"])
def test_rows_that_change_places_take_all_they_have_along(name):
    driven = Driven(codec(name), 3, sinks=1, window=2, every=4, seed=8)
    driven.run(30, (0, 5, 14))
    for rows in ((2, 0, 1, 0), (3, 1, 1), (0, 2)):
        driven.select(rows)
        driven.check()
        for _ in range(5):
            driven.run(1)
        driven.check()
        driven.check_held()


def test_crop_takes_exact_tokens_back_as_if_they_had_never_come():
    fresh = Driven(codec("TurboQuant 3"), sinks=2, window=6, every=50, seed=4)
    tensors = fresh.tensors(30)
    fresh.run(20, (), [tuple(x[:, :, :20] for x in each) for each in tensors])
    cropped = fresh.twin()
    cropped.run(5)
    cropped.crop(8)
    fresh.crop(3)
    for one in (fresh, cropped):
        one.run(10, (), [tuple(x[:, :, 20:] for x in each) for each in tensors])
        one.check()
    assert fresh.cache.streams() == cropped.cache.streams()
    for a, b in zip(fresh.cache.layers, cropped.cache.layers):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


def test_crop_into_a_stream_leaves_its_first_tokens():
    driven = Driven(codec("TurboQuant 3"), sinks=2, window=4, seed=5)
    driven.run(30)
    (stream,) = driven.cache.streams()[0]
    driven.crop(20)
    assert driven.cache.in_use()[0] == ((2, 8),) and driven.cache.streams()[0] == (stream,)
    driven.check()
    driven.run(20)
    assert driven.cache.in_use()[0] == ((2, 8), (10, 16))
    driven.crop(28)  # what is left is exact
    assert driven.cache.in_use()[0] == () and driven.cache.streams()[0] == ()
    driven.check()
    driven.crop(driven.valid.shape[1])
    assert driven.cache.get_seq_length() == 0 and driven.cache.held_bits() == 0
