"""The same passage behind a system prompt, behind its paraphrase and behind an unrelated one: how far apart keys and values are."""

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.sequential.shared import cache_argument, digits
from kvtheory.models.capture import capture, encode
from kvtheory.models.texts import text
from kvtheory.workload import PARAPHRASES

PASSAGE, TOKENS, PASSAGES = "moby-dick", 48, 8


def measure(model, tokenizer):
    passages = np.asarray(encode(tokenizer, text(PASSAGE)[:4000]))[: TOKENS * PASSAGES].reshape(PASSAGES, TOKENS)
    prompts = [[np.asarray(encode(tokenizer, p + " ")) for p in pair] for pair in PARAPHRASES]
    ropes = [layer.rope for layer in capture(model, None, passages[0], query_positions=[0])]
    # written[prompt][version][passage]: of each layer (tokens, numbers) keys before RoPE, and values
    written = [[[behind(model, ropes, p, x) for x in passages] for p in pair] for pair in prompts]
    rows = {"paraphrase": [], "unrelated": [], "other_tokens": []}
    for i, pair in enumerate(written):
        other = written[(i + 1) % len(written)]
        for j in range(PASSAGES):
            rows["paraphrase"].append(apart(pair[0][j], pair[1][j]))
            rows["unrelated"].append(apart(pair[0][j], other[0][j]))
            rows["other_tokens"].append(apart(pair[0][j], pair[0][(j + 1) % PASSAGES]))
    common = [int(np.argmin([*(a == b for a, b in zip(*pair)), False])) for pair in prompts]
    return {
        "text": PASSAGE,
        "tokens": TOKENS,
        "prompts": [list(pair) for pair in PARAPHRASES],
        "prompt_tokens": [[len(p) for p in pair] for pair in prompts],
        "literal_prefix_tokens": common,
        "note": "squared distance of keys (before RoPE) and values of one passage behind two prompts, over the sum of both variances about their means; by layer; rows: "
        "prompt pairs times passages; other_tokens: two passages behind one prompt, token by token",
        "keys": {name: digits([[k for k, _ in row] for row in found]) for name, found in rows.items()},
        "values": {name: digits([[v for _, v in row] for row in found]) for name, found in rows.items()},
    }


def behind(model, ropes, prompt, passage):
    cache, tokens = DynamicCache(), np.concatenate([prompt, passage])
    with torch.inference_mode():
        model.base_model(input_ids=torch.tensor(tokens)[None], use_cache=True, **{cache_argument(model): cache})
    positions, own = np.arange(len(tokens)), slice(len(prompt), None)
    found = []
    for rope, layer in zip(ropes, cache.layers):
        keys, values = (x[0].double().numpy() for x in (layer.keys, layer.values))
        keys = keys if rope is None else rope.undo(keys, positions)
        found.append(tuple(x[:, own].transpose(1, 0, 2).reshape(len(passage), -1) for x in (keys, values)))
    return found


def apart(one, two):
    """Of each layer, keys and values: sum |x - y|^2 / (sum |x - mean|^2 + sum |y - mean|^2); 1 for independent ones of one mean."""
    return [
        tuple(
            float(((x - y) ** 2).sum() / sum(((z - z.mean(axis=0)) ** 2).sum() for z in (x, y)))
            for x, y in zip(a, b, strict=True)
        )
        for a, b in zip(one, two, strict=True)
    ]
