"""The registered attention functions: the mask that fits what is left, entry by entry, and the plain bits for all other caches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvtheory.attention import attend  # noqa: E402
from kvtheory.models import UnsupportedModel  # noqa: E402
from reference.hf import attention  # noqa: E402


@st.composite
def masks(draw):
    """Sizes, a causal mask with padding, the columns of slots, their log-weights."""
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    queries, past, size = draw(st.integers(1, 4)), draw(st.integers(0, 6)), draw(st.integers(1, 8))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    length = past + queries
    looks = (np.arange(length) <= past + np.arange(queries)[:, None])[None] & random.integers(
        0, 4, (batch, 1, length)
    ).astype(bool)
    own = kv_heads if draw(st.booleans()) else 1
    columns = random.integers(-1, length, (batch, own, size)) if draw(st.booleans()) else None
    slots = length if columns is None else size
    weights = random.normal(size=(batch, kv_heads, slots)) if draw(st.booleans()) else None
    return batch, kv_heads, group, looks, columns, weights


@given(case=masks(), floats=st.booleans(), given_floats=st.booleans())
def test_the_mask_of_every_slot(case, floats, given_floats):
    batch, kv_heads, group, looks, columns, weights = case
    queries, length = looks.shape[1:]
    mask = torch.from_numpy(looks)[:, None]
    if given_floats:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    query = torch.zeros(batch, kv_heads * group, queries, 4)
    found = attention.rewritten(
        mask,
        query,
        None if columns is None else torch.from_numpy(columns),
        None if weights is None else torch.from_numpy(weights).float(),
        length,
        floats,
    )
    if columns is None and weights is None:
        assert found is mask
        return
    assert found.dtype == (torch.float32 if floats or weights is not None else torch.bool)
    found = found.expand(batch, kv_heads * group, queries, -1)
    for b, head, i in np.ndindex(batch, kv_heads * group, queries):
        h = head // group
        where = np.arange(length) if columns is None else columns[b, h % columns.shape[1]]
        sees = [int(c) >= 0 and bool(looks[b, i, c]) for c in where]
        if not any(sees):
            sees = [True] * len(sees)  # what such a query reads is never used
        for s, seen in enumerate(sees):
            weight = 0.0 if weights is None else np.float32(weights[b, h, s])
            expected = seen if found.dtype == torch.bool else (weight if seen else -np.inf)
            assert found[b, head, i, s] == expected


@pytest.mark.parametrize("plain", ["sdpa", "eager"])
def test_log_weights_are_added_to_logits(plain):
    """The registered function against NumPy: heads with tokens of their own, weighted, and a group of query heads."""
    attention.register()
    from transformers import AttentionInterface
    from transformers.models.llama import modeling_llama

    class Module(modeling_llama.LlamaAttention):
        def __init__(self):
            torch.nn.Module.__init__(self)
            self.num_key_value_groups, self.is_causal = 2, True

    Module.__module__ = modeling_llama.__name__  # where the plain function is looked for

    class Reading:
        columns = torch.tensor([[[0, 2, 5, -1], [1, 3, 4, 5]]])
        log_weights = torch.tensor([[[0.5, -1.0, 0.0, 0.0], [0.0, 2.0, 0.25, 0.0]]])
        length = 6
        told = None

        def attended(self, query):
            self.told = query

    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, h, n, d, generator=random) for h, n, d in ((4, 1, 8), (2, 4, 8), (2, 4, 6)))
    reading = Reading()
    setattr(key, attention.MARK, reading)
    found = AttentionInterface()[attention.NAMES[plain]](Module().eval(), query, key, value, None, scaling=0.3)[0]
    weights = np.where(reading.columns[0] < 0, -np.inf, reading.log_weights[0])
    expected = attend(query[0].numpy(), key[0].numpy(), value[0].numpy(), scale=0.3, log_weights=weights)
    # float32 against float64: sums of 8 products and of 4 weighted values, each rounded to 2^-24 of terms of size 1
    np.testing.assert_allclose(found[0].transpose(0, 1).numpy(), expected, atol=16 * 2.0**-24 * 4)
    assert reading.told is query and not hasattr(key, attention.MARK)


def test_causality_that_is_left_to_the_kernel_is_refused():
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModel, match="no attention mask for 3 queries"):
        attention.rewritten(None, query, torch.zeros(1, 1, 5, dtype=torch.int64), None, 8, False)
    with pytest.raises(UnsupportedModel, match="over 8 tokens for all heads"):
        attention.rewritten(torch.ones(1, 2, 3, 8), query, torch.zeros(1, 1, 5, dtype=torch.int64), None, 8, False)
