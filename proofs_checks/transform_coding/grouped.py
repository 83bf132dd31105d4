"""Grouped queries: one stored vector is read by several query heads, so its error reaches the output coherently, before squaring."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import attention
from kvtheory.layer import Decoded, Layer
from proofs_checks import mutants as systematic
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, numerical
from proofs_checks.papers import OWN

Float = NDArray[np.float64]

#: noise of the stored vectors, in units of their standard deviation
_NOISE = 0.1


def _noisy(context: Context, name: str, layer: Layer) -> Decoded:
    """The layer with independent noise on keys and values."""
    rng = context.rng(f"noise of {name}")

    def noisy(array: Any) -> Float:
        x = np.asarray(array, dtype=np.float64)
        return x + _NOISE * float(x.std()) * rng.standard_normal(x.shape)

    return Decoded.of(noisy(layer.keys), noisy(layer.values), layer.positions)


def _by_loops(layer: Layer, decoded: Decoded) -> tuple[Float, float]:
    """The definition, query by query and head by head: (each KV head, the whole layer)."""
    assert layer.queries is not None and layer.output_proj is not None
    heads, queries, _ = layer.queries.shape
    group = heads // layer.kv_heads
    error, energy = np.zeros(layer.kv_heads), np.zeros(layer.kv_heads)
    whole = np.zeros(2)
    for j in range(queries):
        sees = (
            np.ones(layer.tokens, bool)
            if layer.query_positions is None
            else layer.positions <= layer.query_positions[j]
        )
        true, held = np.zeros((2, layer.kv_heads, layer.output_proj.shape[2]))
        for h in range(heads):
            q = np.asarray(layer.queries[h, j], dtype=np.float64)
            w_o = np.asarray(layer.output_proj[h], dtype=np.float64)
            for out, keys, values in ((true, layer.keys, layer.values), (held, decoded.keys, decoded.values)):
                k, v = (np.asarray(x[h // group], dtype=np.float64)[sees] for x in (keys, values))
                a = np.exp(layer.scale * (k @ q - (k @ q).max()))
                out[h // group] += (a / a.sum()) @ v @ w_o
        error += ((held - true) ** 2).sum(axis=1)
        energy += (true**2).sum(axis=1)
        whole += ((held - true).sum(axis=0) ** 2).sum(), (true.sum(axis=0) ** 2).sum()
    return error / energy, float(whole[0] / whole[1])


def _instances(context: Context) -> Iterator[tuple[str, Layer]]:
    for kind in ("gaussian", "attention_sink", "heavy_tail"):
        layer = context.synthetic(
            kind, kv_heads=2, query_heads=6, tokens=24, head_dim=8, value_dim=5, model_dim=11, queries=6
        )
        yield f"{kind}, 2 KV and 6 query heads, n=24, future queries, seed {context.seed}", layer
        causal = layer.replace(query_positions=[3, 7, 11, 15, 19, 23])
        yield f"{kind}, 2 KV and 6 query heads, n=24, causal queries, seed {context.seed}", causal
    for name, layer in context.real():
        assert layer.queries is not None
        some = np.linspace(0, layer.queries.shape[1] - 1, context.size(6, 48)).astype(int)
        seen = None if layer.query_positions is None else layer.query_positions[some]
        part = layer.replace(queries=layer.queries[:, some], query_positions=seen)
        yield (
            f"{name}, {layer.kv_heads} KV and {layer.query_heads} query heads, n={layer.tokens}, {len(some)} queries",
            part,
        )


def _squared_first(true: Function) -> Function:
    """Heads added after squaring: exact only where the heads' errors do not correlate."""

    def wrong(layer: Layer, decoded: Decoded, queries: Any = None, by: str = "layer") -> Any:
        exact = attention.head_outputs(layer)
        error = attention.head_outputs(layer, decoded) - exact
        squares = [
            np.array([((x[h] @ layer.projection(h)) ** 2).sum() for h in range(layer.query_heads)])
            for x in (error, exact)
        ]
        if by == "layer":
            return float(squares[0].sum() / squares[1].sum())
        error_of, energy_of = (s.reshape(layer.kv_heads, layer.group).sum(axis=1) for s in squares)
        return error_of / energy_of

    return wrong


def _on_layer(**changes: Any) -> Any:
    return lambda true: (
        lambda layer, decoded, queries=None, by="layer": true(layer.replace(**changes), decoded, queries, by)
    )


def _scaled(true: Function) -> Function:
    def wrong(layer: Layer, decoded: Decoded, queries: Any = None, by: str = "layer") -> Any:
        return true(layer.replace(scale=layer.scale**2), decoded, queries, by)

    return wrong


@claim(
    id="transform-coding/grouped-heads",
    paper=OWN,
    section="the unit in which every codec is scored; query head h reads KV head h // G",
    statement=(
        "The attention error of a stored KV head is that of the sum of its query heads' outputs after W_O, added before squaring, "
        "each head reading KV head h // G and seeing the tokens that its position allows."
    ),
    formula="err_kv = Σ_j ‖Σ_{h: h // G = kv} (ô_{jh} − o_{jh}) W_O^h‖² / Σ_j ‖Σ_{h: h // G = kv} o_{jh} W_O^h‖²",
    expected=Verdict.HOLDS,
    functions={"attention_error": "kvtheory.distortion.attention_error"},
    mutants=[
        *systematic.heads_by_modulo("attention_error"),
        *systematic.scales("attention_error"),
        *systematic.square_dropped("attention_error"),
        Mutant("heads added after squaring", "attention_error", _squared_first),
        Mutant("W_O dropped: heads side by side", "attention_error", _on_layer(output_proj=None)),
        Mutant("every query sees every token", "attention_error", _on_layer(query_positions=None, window=None)),
        Mutant("scale 1/d for 1/√d", "attention_error", _scaled),
    ],
)
def grouped_heads(context: Context, *, attention_error: Function) -> Iterator[Evidence]:
    for name, layer in _instances(context):
        decoded = context.memo(("noisy", name), lambda name=name, layer=layer: _noisy(context, name, layer))  # type: ignore[misc]
        by_head, whole = context.memo(("truth", name), lambda layer=layer, decoded=decoded: _by_loops(layer, decoded))  # type: ignore[misc]
        found = attention_error(layer, decoded, by="kv_head")
        worst = int(np.argmax(np.abs(found / by_head - 1)))
        because = (
            f"outputs are known to n·2⁻⁵² of the largest value, and their squared difference, {by_head.min():.0e} of the energy at least, "
            "to twice that over its root"
        )
        tolerance = 8 * layer.tokens * 2.0**-52 / np.sqrt(float(by_head.min()))
        yield numerical(
            what="attention_error of each KV head = its definition, query by query and head by head, worst head",
            ran_on=name, observed=found[worst], predicted=by_head[worst], tolerance=tolerance, because=because,
            worst_case=f"KV head {worst}",
        )  # fmt: skip
        yield numerical(
            what="attention_error of the whole layer = its definition, all heads added before squaring",
            ran_on=name, observed=attention_error(layer, decoded), predicted=whole, tolerance=tolerance, because=because,
        )  # fmt: skip
