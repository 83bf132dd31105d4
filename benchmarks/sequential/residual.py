"""The residual of the mean over the 16 likeliest tokens, at every position and layer, exact past; and what bounds it."""

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.sequential.shared import cache_argument, digits, ids, log2_softmax
from kvtheory.models.capture import capture

TEXTS = ("moby-dick", "hamlet", "python-code")
CONTEXT, POSITIONS, K, AT_ONCE = 256, 128, 16, 8


def measure(model, tokenizer):
    return {
        "context": CONTEXT,
        "positions": POSITIONS,
        "top": K,
        "texts": [{"name": name, **one(model, ids(tokenizer, name, 0, CONTEXT + POSITIONS))} for name in TEXTS],
    }


def candidates(model, cache, position_tokens):
    """F(past, v) for every (position, tokens v): of each layer keys and values (candidates, numbers), by one pass with a mask.

    cache: of the whole text, of which a candidate at position i sees what is before i, and itself.
    """
    n = cache[0][0].shape[2]
    flat = [(i, int(v)) for i, tokens in position_tokens for v in tokens]
    where = torch.tensor([i for i, _ in flat])
    mask = torch.full((len(flat), n + len(flat)), torch.finfo(model.dtype).min)
    mask[:, :n][torch.arange(n)[None] < where[:, None]] = 0
    mask[torch.arange(len(flat)), n + torch.arange(len(flat))] = 0
    past = DynamicCache()
    for i, (keys, values) in enumerate(cache):
        past.update(keys, values, i)
    with torch.inference_mode():
        model.base_model(
            input_ids=torch.tensor([[v for _, v in flat]]), attention_mask=mask[None, None], position_ids=where[None],
            use_cache=True, **{cache_argument(model): past},
        )  # fmt: skip
    return [
        tuple(x[0, :, n:].transpose(0, 1).reshape(len(flat), -1).double().numpy() for x in (layer.keys, layer.values))
        for layer in past.layers
    ]


def one(model, tokens):
    with torch.inference_mode():
        out = model(
            input_ids=torch.tensor(tokens)[None], use_cache=True, logits_to_keep=POSITIONS + 1,
            **{cache_argument(model): DynamicCache()},
        )  # fmt: skip
    cache = [(layer.keys, layer.values) for layer in out.past_key_values.layers]
    law = log2_softmax(out.logits[0, :-1].float().numpy())  # of positions CONTEXT ..
    p = np.exp2(law)
    came = tokens[CONTEXT:]
    top = np.argsort(-law, axis=1, kind="stable")[:, :K]
    mass = np.take_along_axis(p, top, axis=1).sum(axis=1)
    q = np.take_along_axis(p, top, axis=1) / mass[:, None]
    # one less the probability, as a sum of the others: it keeps its digits where one token is nearly certain
    others = np.where(top == came[:, None], 0.0, q)

    scale = scales(model, tokens, cache)
    found = np.zeros((3, len(cache), 2, POSITIONS))
    worst = 0.0
    for start in range(0, POSITIONS, AT_ONCE):
        rows = range(start, min(start + AT_ONCE, POSITIONS))
        kv = candidates(model, cache, [(CONTEXT + r, [*top[r], came[r]]) for r in rows])
        for i, layer in enumerate(kv):
            for part, x in enumerate(layer):
                f = x.reshape(len(rows), K + 1, -1)
                true = cache[i][part][0, :, CONTEXT + start : CONTEXT + rows[-1] + 1].transpose(0, 1)
                true = true.reshape(len(rows), -1).double().numpy()
                worst = max(worst, float(np.abs(true - f[:, K]).max()))
                for j, r in enumerate(rows):
                    mean = q[r] @ f[j, :K]
                    # f - mean = sum q_u (f - f_u), in which the token that came has no part
                    found[0, i, part, r] = ((others[r] @ (f[j, K] - f[j, :K])) ** 2).sum()
                    found[1, i, part, r] = q[r] @ ((f[j, :K] - mean) ** 2).sum(axis=1)
                    squares = (f[j] ** 2).sum(axis=1)
                    found[2, i, part, r] = (squares[:, None] + squares[None] - 2 * f[j] @ f[j].T).max()
    return {
        "surprisal_bits": digits(-law[np.arange(POSITIONS), came], 4),
        "entropy_bits": digits(-(p * np.where(p > 0, law, 0)).sum(axis=1), 4),
        "collision": digits((p**2).sum(axis=1), 4),
        "top_mass": digits(mass, 4),
        "top_law_but_its_first": digits(q[:, 1:], 4),
        "top_less_what_came": digits(others.sum(axis=1), 4),
        "candidate_of_the_token_against_the_cache": digits(worst),
        "layers": [
            {
                name: {
                    "energy": digits(scale[i][part][0]),
                    "variance": digits(scale[i][part][1]),
                    "residual": digits(found[0, i, part]),
                    "expected": digits(found[1, i, part]),
                    "squared_diameter": digits(found[2, i, part]),
                }
                for part, name in enumerate(("keys", "values"))
            }
            for i in range(len(cache))
        ],
    }


def scales(model, tokens, cache):
    """Of each layer and part: mean energy of the coded positions, and that about the mean of the context (keys before RoPE)."""
    ropes = [(layer.rope, layer.positions) for layer in capture(model, None, tokens, query_positions=[0])]
    found = []
    for (rope, positions), parts in zip(ropes, cache):
        pair = []
        for part, x in enumerate(parts):
            y = x[0].double().numpy()
            bare = rope.undo(y, positions) if part == 0 and rope is not None else y
            centred = bare - bare[:, :CONTEXT].mean(axis=1, keepdims=True)
            pair.append(tuple(float((z[:, CONTEXT:] ** 2).sum(axis=(0, 2)).mean()) for z in (bare, centred)))
        found.append(pair)
    return found
