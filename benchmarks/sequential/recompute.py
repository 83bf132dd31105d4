"""Keys and values of one text, recomputed another way: how many numbers differ, layer by layer, and what noting the differences costs."""

import copy

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.sequential.shared import cache_argument, digits, ids, log2_softmax

TEXT, TOKENS = "hamlet", 256
BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


def measure(model, tokenizer):
    tokens = ids(tokenizer, TEXT, 0, TOKENS)
    found = []
    for compute in ("float32", "bfloat16", "float16"):
        own = model if compute == "float32" else copy.deepcopy(model).to(getattr(torch, compute))
        torch.set_num_threads(1)
        own.set_attn_implementation("sdpa")
        reference = run(own, tokens)
        if not all(torch.isfinite(x).all() for pair in reference for x in pair):
            found.append({"compute": compute, "not_finite": True})
            continue
        plans = []
        for name, options in PLANS.items():
            others = run(own, tokens, **options)
            stored = {compute: compare(reference, others)}
            if compute == "float32":
                for kind in ("bfloat16", "float16"):
                    stored[kind] = compare(*(rounded(x, kind) for x in (reference, others)))
            plans.append({"plan": name, "tokens": options.get("first", TOKENS), "stored": stored})
            torch.set_num_threads(1)
            own.set_attn_implementation("sdpa")
        found.append({"compute": compute, "plans": plans})
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(tokens)[None]).logits[0, :-1].float().numpy()
    law = log2_softmax(logits)
    surprisal = -law[np.arange(TOKENS - 1), tokens[1:]].sum() + np.log2(law.shape[1])
    numbers = sum(x[0, :, 0].numel() for pair in reference_shapes(model) for x in pair)
    return {
        "text": TEXT,
        "tokens": TOKENS,
        "numbers_a_token": numbers,
        "surprisal_bits": digits(surprisal, 6),
        "reference": "one go, one thread, batch of one, sdpa",
        "runs": found,
    }


def reference_shapes(model):
    return run(model, np.zeros(1, np.int64))


#: what is changed of the reference
PLANS = {
    "the same call again": {},
    "row 0 of a batch of 2": {"rows": 2},
    "first 192 tokens alone": {"first": 192},
    "chunks of 128": {"chunk": 128},
    "chunks of 64": {"chunk": 64},
    "token by token": {"chunk": 1},
    "2 threads": {"threads": 2},
    "eager attention": {"attention": "eager"},
}


def run(model, tokens, rows=1, first=None, chunk=None, threads=1, attention="sdpa"):
    torch.set_num_threads(threads)
    model.set_attn_implementation(attention)
    tokens = tokens[:first]
    batch = torch.tensor(np.stack([tokens, *(tokens[::-1].copy() for _ in range(rows - 1))]))
    cache = DynamicCache()
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk or len(tokens)):
            part = batch[:, start : start + (chunk or len(tokens))]
            model.base_model(input_ids=part, use_cache=True, **{cache_argument(model): cache})
    return [(layer.keys[:1], layer.values[:1]) for layer in cache.layers]


def rounded(cache, kind):
    return [tuple(x.to(getattr(torch, kind)) for x in pair) for pair in cache]


def rank(x):
    """Floats as integers in their order: neighbours differ by 1, and both zeros are 0."""
    width = {2: torch.int16, 4: torch.int32}[x.element_size()]
    bits = x.contiguous().view(width).long().numpy()
    least = -(1 << (8 * x.element_size() - 1))
    return np.where(bits < 0, least - bits, bits)


def compare(reference, others):
    """Of each layer: share of numbers that differ, entropy of the difference in steps of the format (order 0, plug-in), the largest step."""
    layers = []
    for one, two in zip(reference, others):
        steps = np.concatenate([(rank(b) - rank(a[:, :, : b.shape[2]])).ravel() for a, b in zip(one, two, strict=True)])
        _, counts = np.unique(steps, return_counts=True)
        p = counts / counts.sum()
        layers.append((float((steps != 0).mean()), float(-(p * np.log2(p)).sum()) + 0.0, float(np.abs(steps).max())))
    share, bits, largest = zip(*layers)
    return {"differing": digits(share), "entropy_bits": digits(bits), "largest_step": digits(largest)}
