"""What the measurements share: texts, laws, rounding for print."""

import numpy as np

from kvtheory.models.capture import encode
from kvtheory.models.texts import text


def ids(tokenizer, name, start, count):
    """`count` tokens of a text from token `start` on."""
    found = encode(tokenizer, text(name)[: 12 * (start + count) + 1000])
    assert len(found) >= start + count, f"{name}: {len(found)} tokens of {start + count}"
    return np.asarray(found[start : start + count])


def digits(x, places=3):
    """An array as lists of numbers of so many significant digits."""
    x = np.asarray(x, float)
    if x.ndim:
        return [digits(row, places) for row in x]
    return float(f"{float(x):.{places}g}")


def log2_softmax(logits):
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return (wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))) / np.log(2)


def cache_argument(model):
    import inspect

    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
