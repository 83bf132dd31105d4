"""Two texts that part at one token and go on alike: how far keys and values are apart, by layer; and how much each layer can stretch."""

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.sequential.shared import cache_argument, digits, ids

TEXT, CONTEXT, BEHIND, PAIRS, STATES = "moby-dick", 64, 16, 24, 3


def measure(model, tokenizer):
    model.set_attn_implementation("eager")
    length = CONTEXT + 1 + BEHIND
    texts = ids(tokenizer, TEXT, 0, (PAIRS + 1) * length).reshape(PAIRS + 1, length)
    table = model.get_input_embeddings().weight.detach()
    embedding, at, behind, unrelated = [], [], [], []
    before = None
    for i, tokens in enumerate(texts[:-1]):
        other = tokens.copy()
        other[CONTEXT] = texts[i + 1][CONTEXT]  # a token of the same text, elsewhere
        if other[CONTEXT] == tokens[CONTEXT]:
            continue
        one, two = (kv(model, x) for x in (tokens, other))
        apart = np.linalg.norm(one - two, axis=2)  # (layers, positions)
        embedding.append(float((table[int(tokens[CONTEXT])] - table[int(other[CONTEXT])]).norm()))
        at.append(apart[:, CONTEXT])
        behind.append(apart[:, CONTEXT + 1 :])
        if before is not None:
            unrelated.append(np.linalg.norm(one[:, CONTEXT] - before[:, CONTEXT], axis=1))
        before = one
    stretch = [jacobians(model, texts[i][: CONTEXT + 1]) for i in range(STATES)]
    return {
        "text": TEXT,
        "context": CONTEXT,
        "behind": BEHIND,
        "embedding_distance": digits(embedding, 4),
        "note": "distances of (keys, values) of one position, by layer; rows are pairs; behind: root mean square over the positions behind, "
        "where both have the same token; unrelated: the same position of two windows; stretch: largest singular value of the Jacobian of a layer's output, "
        "and of its keys and values before RoPE, by its input at the last position, at states of the text",
        "at": digits(at),
        "behind_rms": digits([np.sqrt((x**2).mean(axis=1)) for x in behind]),
        "unrelated": digits(unrelated),
        "stretch_layer": digits([[a for a, _ in one] for one in stretch]),
        "stretch_kv": digits([[b for _, b in one] for one in stretch]),
    }


def kv(model, tokens):
    """(layers, positions, numbers)."""
    cache = DynamicCache()
    with torch.inference_mode():
        model.base_model(input_ids=torch.tensor(tokens)[None], use_cache=True, **{cache_argument(model): cache})
    return np.stack(
        [
            torch.cat([x[0].transpose(0, 1).flatten(1) for x in (layer.keys, layer.values)], dim=1).double().numpy()
            for layer in cache.layers
        ]
    )


def jacobians(model, tokens):
    """(sigma of the layer, sigma of its keys and values) of each layer at the last position."""
    base, cache = model.base_model, DynamicCache()
    with torch.no_grad():
        out = base(
            input_ids=torch.tensor(tokens)[None], use_cache=True, output_hidden_states=True,
            **{cache_argument(model): cache},
        )  # fmt: skip
    position = torch.tensor([[len(tokens) - 1]])
    found = []
    for i, layer in enumerate(base.layers):
        x = out.hidden_states[i][:, -1:].detach().clone().requires_grad_(True)
        past = DynamicCache()
        past.update(cache.layers[i].keys[:, :, :-1], cache.layers[i].values[:, :, :-1], i)
        turned = base.rotary_emb(x, position)
        y = layer(x, position_ids=position, position_embeddings=turned, **{"past_key_values": past})
        y = y[0] if isinstance(y, tuple) else y
        if i + 1 < len(base.layers):
            off = float((y - out.hidden_states[i + 1][:, -1:]).norm() / y.norm())
            assert off < 1e-3, f"layer {i}: its output is off by {off}"
        h = layer.input_layernorm(x)
        own = torch.cat([layer.self_attn.k_proj(h), layer.self_attn.v_proj(h)], dim=-1)
        found.append((largest(y, x), largest(own, x)))
    return found


def largest(y, x):
    y = y.reshape(-1)
    rows = torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True, retain_graph=True)[0]
    return float(torch.linalg.matrix_norm(rows.reshape(len(y), -1), 2))
