"""What the property tests of all codecs draw from: one strategy file, every codec and every backend."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import kvtheory

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
#: head dimensions and token counts that implementations get wrong
DIMS = (1, 3, 64, 80, 96, 128, 192, 256, 576)
TOKENS = (0, 1, 2, 31, 33, 160)


def layer(seed, heads=2, tokens=7, dim=8, value_dim=None, dtype="float32", scale=1.0, **fields):
    """A Gaussian layer; the same for the same arguments."""
    rng = np.random.Generator(np.random.Philox(seed))
    keys = scale * rng.standard_normal((heads, tokens, dim))
    values = scale * rng.standard_normal((heads, tokens, value_dim or dim))
    return kvtheory.Layer(keys.astype(DTYPES[dtype]), values.astype(DTYPES[dtype]), **fields)


def text(name="A", tokens=96, dtype="float32", indices=(3, 5), heads=2, dim=16, value_dim=12, scale=1.0):
    """Layers of one small made-up model on the text `name`: what fitted codecs are fitted to and encode, with all that one may need.

    The model is the same for every text, whatever its length and element type. Keys before RoPE are inputs @ key_weight, with one channel of
    large numbers a head; scale multiplies keys and values.
    """
    model_dim, query_heads, out = 40, 2 * heads, []
    rope = kvtheory.Rope(1000.0 ** (-np.arange(dim // 2) / max(1, dim // 2))) if dim > 1 else None
    words = kvtheory.randomness.generator(0, f"text {name}")
    mixed = words.standard_normal((max(tokens, 1), 8)) @ words.standard_normal((8, model_dim)) / 3
    inputs = (mixed + 0.3 * words.standard_normal(mixed.shape))[:tokens]
    for index in indices:
        model = kvtheory.randomness.generator(index, "text model")
        key_weight = model.standard_normal((heads, dim, model_dim)) / np.sqrt(model_dim)
        key_weight[:, dim // 3] *= 8
        value_weight = model.standard_normal((heads, value_dim, model_dim)) / np.sqrt(model_dim)
        query_weight = model.standard_normal((query_heads, dim, model_dim)) / np.sqrt(model_dim)
        keys = np.einsum("tm,hdm->htd", inputs, key_weight)
        queries = np.einsum("tm,hdm->htd", inputs, query_weight)
        if rope is not None:
            keys, queries = (rope.apply(x, np.arange(tokens)) for x in (keys, queries))
        values = np.einsum("tm,hdm->htd", inputs, value_weight)
        extras = {
            "inputs": inputs,
            "key_weight": key_weight,
            "value_weight": value_weight,
            **{f"{side}_fisher": model.uniform(0.5, 2, (heads, d)) for side, d in (("key", dim), ("value", value_dim))},
            "key_fisher_pre_rope": model.uniform(0.5, 2, (heads, dim)),
        }
        layer_ = kvtheory.Layer(
            (scale * keys).astype(DTYPES[dtype]),
            (scale * values).astype(DTYPES[dtype]),
            queries[:, ::2],
            model.standard_normal((query_heads, value_dim, model_dim)) / np.sqrt(query_heads * value_dim),
            rope=rope,
            index=index,
            query_positions=np.arange(tokens)[::2],
            extras=extras,
        )
        out.append(layer_)
    return out


@st.composite
def layers(draw, most_numbers=4096):
    """Layers of all element types and shapes, with the vectors that break codecs among their rows."""
    dim = draw(st.sampled_from((1, 2, 3, 4, 5, 8, 12, 24, 64, 80)))
    value_dim = draw(st.sampled_from((dim, 1, 3, 16)))
    heads = draw(st.integers(1, 3))
    tokens = draw(st.integers(0, max(0, min(9, most_numbers // (heads * (dim + value_dim))))))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    base = layer(draw(st.integers(0, 1 << 20)), heads, tokens, dim, value_dim, dtype)
    keys, values = base.keys.copy(), base.values.copy()
    for array in (keys, values):
        for h in range(heads):
            for t in range(tokens):
                array[h, t] = vectors(draw, array[h, t])
    positions = None
    if draw(st.booleans()):
        steps = draw(st.lists(st.integers(0, 70000), min_size=tokens, max_size=tokens))
        positions = np.cumsum(np.array(steps, np.int64), dtype=np.int64)
    index = draw(st.one_of(st.none(), st.integers(0, 300)))
    return kvtheory.Layer(keys, values, index=index, positions=positions)


def vectors(draw, x):
    """The row x, or a row that breaks codecs, of its element type and shape."""
    kind = draw(
        st.sampled_from(("plain", "zero", "one hot", "constant", "tiny", "subnormal", "large", "ties", "negative zero"))
    )
    info = ml_dtypes.finfo(x.dtype) if x.dtype.name == "bfloat16" else np.finfo(x.dtype)
    one = np.ones_like(x)
    if kind == "zero":
        return 0 * one
    if kind == "negative zero":
        return -(0 * one)
    if kind == "one hot":
        out = 0 * one
        out[draw(st.integers(0, x.size - 1))] = -1000
        return out
    if kind == "constant":
        return 3 * one
    if kind == "tiny":
        return (x.astype(np.float64) * max(float(info.tiny), 2.0**-126)).astype(x.dtype)
    if kind == "subnormal":
        smallest = max(float(info.smallest_subnormal), 2.0**-149)
        return np.array([smallest * draw(st.integers(-3, 3)) for _ in range(x.size)]).astype(x.dtype)
    if kind == "large":
        most = min(float(info.max), float(np.finfo(np.float32).max))
        return (np.sign(x.astype(np.float64)) * most).astype(x.dtype)
    if kind == "ties":
        return (np.round(2 * x.astype(np.float64)) / 2).astype(x.dtype)
    return x
