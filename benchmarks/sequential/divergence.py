"""Two texts that part at one token and go on alike: how far keys and values are apart, by layer; and how much each layer can stretch."""

import numpy as np
import torch
from transformers import DynamicCache

from benchmarks.sequential.shared import cache_argument, digits, ids

TEXT, CONTEXT, BEHIND, PAIRS = "moby-dick", 64, 16, 24
#: pairs of which the layers' Jacobians are taken, at so many nodes of Gauss and Legendre between the two states
SEGMENTS, NODES = 2, 3
#: of one pair the numbers themselves: layers, as parts of the depth, and positions, from the divergence on
LAYERS, POSITIONS = (0.0, 1 / 3, 2 / 3, 1.0), (-1, 0, 1, 8)


def measure(model, tokenizer):
    model.set_attn_implementation("eager")
    length = CONTEXT + 1 + BEHIND
    texts = ids(tokenizer, TEXT, 0, (PAIRS + 1) * length).reshape(PAIRS + 1, length)
    table = model.get_input_embeddings().weight.detach()
    embedding, at, behind, unrelated, segments, sample = [], [], [], [], [], None
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
        if len(segments) < SEGMENTS:
            segments.append({"pair": len(at) - 1, **segment(model, tokens[: CONTEXT + 1], other[: CONTEXT + 1])})
        sample = sample or numbers(one, two)
    return {
        "text": TEXT,
        "context": CONTEXT,
        "behind": BEHIND,
        "embedding_distance": digits(embedding, 4),
        "note": "distances of (keys, values) of one position, by layer; rows are pairs; behind: root mean square over the positions behind, "
        "where both have the same token; unrelated: the same position of two windows; segments, of some pairs: largest singular value of the Jacobian of a layer's output, "
        "and of its keys and values before RoPE, by its input at the position of the divergence, at nodes between the two inputs; rows are nodes; sample: keys and values "
        "of both texts of the first pair, some numbers of some layers and positions (from the divergence on)",
        "at": digits(at),
        "behind_rms": digits([np.sqrt((x**2).mean(axis=1)) for x in behind]),
        "unrelated": digits(unrelated),
        "segments": segments,
        "sample": sample,
    }


def numbers(one, two, every=6):
    """Of both texts of a pair, each sixth number of some layers and positions, as they are."""
    layers = sorted({round(part * (len(one) - 1)) for part in LAYERS})
    return {
        "layers": layers,
        "positions": list(POSITIONS),
        "texts": [[[[float(v) for v in x[i, CONTEXT + p, ::every]] for p in POSITIONS] for i in layers] for x in (one, two)],
    }  # fmt: skip


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


def segment(model, one, two):
    """Of two texts that differ in their last token: each layer's stretch, and that of its keys and values, at NODES states between theirs."""
    base, caches, states = model.base_model, [], []
    for tokens in (one, two):
        cache = DynamicCache()
        with torch.no_grad():
            out = base(
                input_ids=torch.tensor(tokens)[None], use_cache=True, output_hidden_states=True,
                **{cache_argument(model): cache},
            )  # fmt: skip
        caches.append(cache)
        states.append([x[:, -1:].detach() for x in out.hidden_states])
    nodes = (np.polynomial.legendre.leggauss(NODES)[0] + 1) / 2
    found = {"stretch_layer": [], "stretch_kv": []}
    for node in nodes:
        rows = [
            at_state(model, caches[0], i, (1 - node) * x + node * y, len(one) - 1)
            for i, (x, y) in enumerate(zip(*(s[:-1] for s in states)))
        ]
        for name, column in zip(found, zip(*rows)):
            found[name].append(digits(column, 4))
    # the layers written out must be the model's own
    for i, (x, y) in enumerate(zip(states[0], states[0][1:-1])):
        made = output(model, caches[0], i, x, len(one) - 1)
        off = float((made - y).norm() / y.norm())
        assert off < 1e-3, f"layer {i}: its output is off by {off}"
    return found


def output(model, cache, i, x, position):
    """What layer i makes of the state x at the last position, behind the cache's past."""
    past = DynamicCache()
    past.update(cache.layers[i].keys[:, :, :-1], cache.layers[i].values[:, :, :-1], i)
    turned = model.base_model.rotary_emb(x, torch.tensor([[position]]))
    layer = model.base_model.layers[i]
    y = layer(x, position_ids=torch.tensor([[position]]), position_embeddings=turned, **{"past_key_values": past})
    return y[0] if isinstance(y, tuple) else y


def at_state(model, cache, i, x, position):
    """(sigma of the layer, sigma of its keys and values) at the state x of the last position."""
    x = x.clone().requires_grad_(True)
    layer = model.base_model.layers[i]
    h = layer.input_layernorm(x)
    own = torch.cat([layer.self_attn.k_proj(h), layer.self_attn.v_proj(h)], dim=-1)
    return largest(output(model, cache, i, x, position), x), largest(own, x)


def largest(y, x):
    y = y.reshape(-1)
    rows = torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True, retain_graph=True)[0]
    return float(torch.linalg.matrix_norm(rows.reshape(len(y), -1), 2))
