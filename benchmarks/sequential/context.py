"""Surprisal against position: windows of several texts, means over spans of positions that double."""

import itertools

import numpy as np
import torch

from benchmarks.sequential.shared import digits, ids, log2_softmax

TEXTS = ("moby-dick", "hamlet", "state-of-the-union", "python-docs", "python-code")
WINDOWS, LENGTH, AT_ONCE = 4, 2048, 256
SPANS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]


def measure(model, tokenizer):
    found = []
    for name in TEXTS:
        for w in range(WINDOWS):
            try:
                tokens = ids(tokenizer, name, w * LENGTH, LENGTH)
            except AssertionError:
                break
            bits = surprisals(model, tokens)
            means = [bits[a - 1 : b - 1].mean() for a, b in itertools.pairwise(SPANS)]
            found.append({"text": name, "window": w, "bits": digits(means, 4), "total": digits(bits.sum(), 6)})
    return {
        "length": LENGTH,
        "spans": SPANS,
        "note": "bits[i]: mean surprisal of positions spans[i] .. spans[i+1] - 1, from 0; the first token has no law and is left out",
        "windows": found,
    }


def surprisals(model, tokens):
    """(n - 1,) bits of tokens 1 .. n - 1."""
    with torch.inference_mode():
        hidden = model.base_model(input_ids=torch.tensor(tokens)[None]).last_hidden_state[0]
        out = []
        for start in range(0, len(tokens) - 1, AT_ONCE):
            rows = hidden[start : min(start + AT_ONCE, len(tokens) - 1)]
            law = log2_softmax(model.lm_head(rows).float().numpy())
            out.append(-law[np.arange(len(rows)), tokens[start + 1 : start + 1 + len(rows)]])
    return np.concatenate(out)
