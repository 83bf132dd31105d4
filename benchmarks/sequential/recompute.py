"""Keys and values of one text, recomputed another way: how many numbers differ, layer by layer, and what noting the differences costs."""

import copy

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.sequential.shared import cache_argument, digits, ids, log2_softmax

#: of a model with more than LARGE parameters fewer tokens, and no float16, which takes this processor minutes
TEXT, TOKENS, FEWER, LARGE = "hamlet", 256, 128, 300e6
#: layers of which the steps themselves are saved, as parts of the depth; and how many numbers that differ
SAMPLED, PAIRS = (0.0, 0.5, 1.0), 48
WIDTHS = {2: torch.int16, 4: torch.int32}


def measure(model, tokenizer):
    large = sum(p.numel() for p in model.parameters()) > LARGE
    count = FEWER if large else TOKENS
    tokens = ids(tokenizer, TEXT, 0, count)
    found = []
    for compute in ("float32", "bfloat16") if large else ("float32", "bfloat16", "float16"):
        own = model if compute == "float32" else copy.deepcopy(model).to(getattr(torch, compute))
        torch.set_num_threads(1)
        own.set_attn_implementation("sdpa")
        reference = run(own, tokens)
        if not all(torch.isfinite(x).all() for pair in reference for x in pair):
            found.append({"compute": compute, "not_finite": True})
            continue
        plans = []
        for name, options in plans_of(count).items():
            others = run(own, tokens, **options)
            stored = {compute: compare(reference, others, SAMPLED)}
            if compute == "float32":
                for kind in ("bfloat16", "float16"):
                    stored[kind] = compare(*(rounded(x, kind) for x in (reference, others)), SAMPLED)
            plans.append({"plan": name, "tokens": options.get("first", count), "stored": stored})
            torch.set_num_threads(1)
            own.set_attn_implementation("sdpa")
        found.append({"compute": compute, "plans": plans})
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor(tokens)[None]).logits[0, :-1].float().numpy()
    law = log2_softmax(logits)
    surprisal = -law[np.arange(count - 1), tokens[1:]].sum() + np.log2(law.shape[1])
    numbers = sum(x[0, :, 0].numel() for pair in reference_shapes(model) for x in pair)
    return {
        "text": TEXT,
        "tokens": count,
        "numbers_a_token": numbers,
        "surprisal_bits": digits(surprisal, 6),
        "reference": "one go, one thread, batch of one, sdpa",
        "runs": found,
    }


def reference_shapes(model):
    return run(model, np.zeros(1, np.int64))


def plans_of(count):
    """What is changed of the reference."""
    return {
        "the same call again": {},
        "row 0 of a batch of 2": {"rows": 2},
        f"first {3 * count // 4} tokens alone": {"first": 3 * count // 4},
        f"chunks of {count // 2}": {"chunk": count // 2},
        f"chunks of {count // 4}": {"chunk": count // 4},
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
    bits = x.contiguous().view(WIDTHS[x.element_size()]).long().numpy()
    least = -(1 << (8 * x.element_size() - 1))
    return np.where(bits < 0, least - bits, bits)


def compare(reference, others, sampled):
    """Of each layer: share of numbers that differ, entropy of the difference in steps of the format (order 0, plug-in), the largest step.

    Of some layers also what these come of. steps: how many numbers lie 0, 1 and -1 steps apart; spectrum: of the other distances [how many numbers lie
    so far apart, of how many distances that is so]. pairs, of float16: numbers of the reference and of the other way that differ, the first PAIRS of
    the layer, as the whole numbers that their 16 bits are.
    """
    layers, whole = [], {}
    for number, (one, two) in enumerate(zip(reference, others)):
        pairs = [(a[:, :, : b.shape[2]], b) for a, b in zip(one, two, strict=True)]
        steps = np.concatenate([(rank(b) - rank(a)).ravel() for a, b in pairs])
        values, counts = np.unique(steps, return_counts=True)
        p = counts / counts.sum()
        layers.append((float((steps != 0).mean()), float(-(p * np.log2(p)).sum()) + 0.0, float(np.abs(steps).max())))
        if number in _numbers(sampled, len(reference)):
            whole[str(number)] = histogram(values, counts)
            if one[0].dtype == torch.float16:
                whole[str(number)]["pairs"] = differing(pairs)
    share, bits, largest = zip(*layers)
    return {"differing": digits(share), "entropy_bits": digits(bits), "largest_step": digits(largest), "layers": whole}


def _numbers(sampled, layers):
    """Numbers of the layers at these parts of the depth."""
    return {round(part * (layers - 1)) for part in sampled}


def histogram(values, counts):
    near = {int(v): int(c) for v, c in zip(values, counts) if abs(v) <= 1}
    sizes, many = np.unique([c for v, c in zip(values, counts) if abs(v) > 1], return_counts=True)
    return {
        "steps": [near.get(v, 0) for v in (0, 1, -1)],
        "spectrum": [[int(size), int(number)] for size, number in zip(sizes, many)],
    }


def differing(pairs):
    found = []
    for a, b in pairs:
        bits_a, bits_b = (x.contiguous().view(WIDTHS[x.element_size()]).numpy().ravel() for x in (a, b))
        for at in np.flatnonzero(bits_a != bits_b)[: PAIRS - len(found)]:
            found.append([int(bits_a[at]), int(bits_b[at])])
    return found
