"""The assumption under Theorem 1 of arXiv 2604.15356, on a trained model: do the first layer's keys and values tell all tokens apart?

The first layer reads embeddings, so its K (before rotation) and V are a function of the token: |V| rows, all computed and compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.models import MODELS, ModelUnavailable
from kvtheory.models.layer_zero import LayerZero, read, weights_folder
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, NotRun, exact

PAPER = "2604.15356"
Result = Iterator[Evidence | NotRun]
FLOATS = ("float32", "float16", "bfloat16")
CODES = (8, 4, 3, 2, 1)

#: One weight a channel and squares with whole means, so that the rows can be written down: (2,4,4,8) has root mean square 5, so n = (.4,.8,.8,1.6).
BY_HAND = LayerZero(
    embedding=np.array([[2, 2, 2, 2], [4, 0, 0, 0], [0, -4, 0, 0], [8, 0, 0, 0], [2, 4, 4, 8], [0, -4, 0, 0]], np.float32),
    gain=np.array([5, 10, 15, 20], np.float32),
    key_weight=np.array([[[1, 0, 0, 0]], [[0, 1, 0, 0]]], np.float32),
    value_weight=np.array([[[0, 0, 1, 0]], [[0, 0, 0, 1]]], np.float32),
    eps=0.0,
)  # fmt: skip
ROWS_BY_HAND = [[5, 10, 15, 20], [10, 0, 0, 0], [0, -20, 0, 0], [10, 0, 0, 0], [2, 8, 12, 32], [0, -20, 0, 0]]
#: a sign of zero; a permutation; two neighbours, one that only float32 tells apart and one that float16 does too; an equal sum
PLANTED = np.array(
    [[0, 1, 2], [-0.0, 1, 2], [2, 1, 0], [0, 1 + 2**-23, 2], [1, 1, 1], [0, 1, 2], [1, 1, 1], [0, 1 + 2**-9, 2]], np.float32
)  # fmt: skip


def _of_rows(name: str, change: Any) -> Mutant:
    return Mutant(name, "key_value_rows", lambda true: lambda first: change(true(first)))


def _of_weights(name: str, change: Any) -> Mutant:
    return Mutant(name, "key_value_rows", lambda true: lambda first: true(change(first)))


def _blanked(kept: slice) -> Any:
    def change(rows: NDArray[Any]) -> NDArray[Any]:
        out = np.zeros_like(rows)
        out[:, kept] = rows[:, kept]
        return out

    return change


def _unnormalised(first: LayerZero) -> LayerZero:
    """A norm of 1 for every embedding: eps so large that it is all there is, and the gain scaled up to make good for it."""
    return replace(first, eps=1e30, gain=first.gain.astype(np.float64) * 1e15)


MUTANTS = [
    _of_rows("one channel of one head's keys", _blanked(slice(0, 1))),
    _of_rows("values left out", lambda rows: _blanked(slice(0, rows.shape[1] // 2))(rows)),
    _of_rows("keys left out", lambda rows: _blanked(slice(rows.shape[1] // 2, None))(rows)),
    _of_weights("embeddings rounded to 1 bit", lambda first: replace(first, embedding=np.sign(first.embedding))),
    _of_weights("the norm left out", _unnormalised),
    _of_weights("the norm's gain left out", lambda first: replace(first, gain=np.ones_like(first.gain))),
    Mutant("rows compared by their sums", "collisions", lambda true: lambda rows: true(rows.astype(np.float64).sum(axis=1, keepdims=True))),
    Mutant("rows compared by their first channel", "collisions", lambda true: lambda rows: true(rows[:, :1])),
    Mutant("0.0 and -0.0 told apart", "collisions", lambda true: lambda rows: true(np.ascontiguousarray(rows).view(np.uint8))),
    Mutant("a bit more than said", "stored", lambda true: lambda rows, bits: true(rows, bits if isinstance(bits, str) else min(bits + 1, 8))),
    Mutant("every float rounded to bfloat16", "stored", lambda true: lambda rows, bits: true(rows, "bfloat16" if isinstance(bits, str) else bits)),
    Mutant("a scale for each row, not for each channel", "stored", lambda true: lambda rows, bits: true(rows.T, bits).T),
]  # fmt: skip
FUNCTIONS = {
    "key_value_rows": "kvtheory.models.layer_zero.key_value_rows",
    "collisions": "kvtheory.models.layer_zero.collisions",
    "stored": "kvtheory.models.layer_zero.stored",
}


def _table(rows: Any) -> str:
    """Rows of numbers as text, equal where the numbers are: whole ones as integers, others with all their digits."""
    return "; ".join(" ".join(str(int(x)) if float(x).is_integer() else repr(float(x)) for x in row) for row in rows)


def _groups(groups: Any) -> str:
    return " ".join("{" + ", ".join(str(i) for i in group) + "}" for group in groups) or "none"


def _controls(key_value_rows: Function, collisions: Function, stored: Function) -> Iterator[Evidence]:
    """Rows, groups and codes that can be written down by hand."""
    rows = key_value_rows(BY_HAND)
    where = f"{len(ROWS_BY_HAND)} embeddings of 4 numbers, two KV heads of one channel, integers"
    yield exact(
        what="K and V of two heads for each token, computed and by hand",
        ran_on=where,
        observed=_table(rows.tolist()),
        predicted=_table(ROWS_BY_HAND),
        role="control",
    )
    for what, table, predicted in (
        ("K and V computed by hand", rows, [[1, 3], [2, 5]]),
        ("planted rows, float32", stored(PLANTED, "float32"), [[0, 1, 5], [4, 6]]),
        ("planted rows, float16", stored(PLANTED, "float16"), [[0, 1, 3, 5], [4, 6]]),
        ("planted rows, bfloat16", stored(PLANTED, "bfloat16"), [[0, 1, 3, 5, 7], [4, 6]]),
        ("planted rows, codes of 2 bits", stored(PLANTED, 2), [[0, 1, 3, 5], [4, 6]]),
        ("0, 1, .. 7 in codes of 2 bits", stored(np.arange(8.0)[:, None], 2), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("(0, 0), (7, 70), (1, 10), (6, 60) in codes of 1 bit", stored(np.array([[0.0, 0], [7, 70], [1, 10], [6, 60]]), 1), [[0, 2], [1, 3]]),
    ):  # fmt: skip
        yield exact(
            what=f"groups of tokens found to have equal rows: {what}",
            ran_on="tables with equal rows put in by hand",
            observed=_groups(collisions(table).shared),
            predicted=_groups(predicted),
            role="control",
        )


def _models(context: Context) -> list[str]:
    """SmolLM2 decides; a full run also reads the optional models, where they are."""
    return (
        ["smol"] if context.budget == "quick" else ["smol", *(name for name, model in MODELS.items() if model.optional)]
    )


def _first_layers(context: Context) -> Iterator[tuple[str, str, Path, LayerZero] | NotRun]:
    for name in _models(context):
        try:
            folder = weights_folder(name)
        except ModelUnavailable:
            if not MODELS[name].optional:
                yield NotRun(
                    missing=f"the weights of {MODELS[name].title}, converted to float32",
                    how=f"pip install 'kvtheory[real]', then kvtheory models fetch {name} ({MODELS[name].download / 1e6:.0f} MB)",
                )
                return
            continue
        first = context.memo(("weights", name), lambda folder=folder: read(folder))  # type: ignore[misc]
        label = f"{MODELS[name].title} dequantised to float32, its whole vocabulary of {len(first.embedding):,} tokens, layer 0, all KV heads"
        yield name, label, folder, first


def _texts(folder: Path, groups: list[list[int]]) -> str:
    """The tokens of each group as the tokenizer writes them; at most four groups and four of each."""
    vocabulary: Any = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    texts = (
        {i: text for text, i in vocabulary.items()}
        if isinstance(vocabulary, dict)
        else {i: v[0] for i, v in enumerate(vocabulary)}
    )
    shown = sorted(groups, key=len)[:4]
    return "; ".join(
        " = ".join(f"{texts.get(i, 'no text')} ({i})" for i in group[:4])
        + (f" and {len(group) - 4} more" if len(group) > 4 else "")
        for group in shown
    ) + (f"; {len(groups) - 4} groups more" if len(groups) > 4 else "")


def _format(bits: int | str) -> str:
    return bits if isinstance(bits, str) else f"codes of {bits} bit{'s' * (bits > 1)}, uniform for each channel"


@claim(
    id="sequential/injectivity-on-real-models", paper=PAPER, section="Theorem 1, its assumption",
    statement="In a trained model, different tokens write different keys and values at the first layer (assumed with probability one), as "
    "floats and when stored with few bits.",
    formula="t ≠ t' ⇒ (K_1, V_1)(t) ≠ (K_1, V_1)(t')",
    expected=Verdict.FAILS, functions=FUNCTIONS, mutants=MUTANTS, correction="sequential/injectivity-up-to-embeddings",
)  # fmt: skip
def on_real_models(context: Context, *, key_value_rows: Function, collisions: Function, stored: Function) -> Result:
    for found in _first_layers(context):
        if isinstance(found, NotRun):
            yield found
            return
        _, label, folder, first = found
        yield from _controls(key_value_rows, collisions, stored)
        rows = key_value_rows(first)
        for bits in (*FLOATS, *CODES):
            equal = collisions(stored(rows, bits))
            sizes = [len(group) for group in equal.shared]
            yield exact(
                what=f"tokens less distinct (K, V) rows in the vocabulary, 0 if no two tokens share theirs: {_format(bits)}", ran_on=label, observed=equal.lost,
                predicted=0, worst_case=f"{sum(sizes)} tokens share their rows, in {len(sizes)} group(s), at most {max(sizes)} in one" if sizes else None,
                note=f"{_texts(folder, equal.shared)}. The weights are rounded by their GGUF file; the published ones may keep near tokens apart"
                if sizes and bits == FLOATS[0] else None,
            )  # fmt: skip


@claim(
    id="sequential/injectivity-up-to-embeddings", paper=PAPER, section="Theorem 1, its assumption corrected",
    statement="In a trained model, two tokens write the same keys and values at the first layer exactly where their embeddings are the same: "
    "the projections lose no token, in float32, float16 and bfloat16.",
    formula="(K_1, V_1)(t) = (K_1, V_1)(t') ⇔ E_t = E_t'",
    expected=Verdict.HOLDS, functions=FUNCTIONS, mutants=MUTANTS,
)  # fmt: skip
def up_to_embeddings(context: Context, *, key_value_rows: Function, collisions: Function, stored: Function) -> Result:
    for found in _first_layers(context):
        if isinstance(found, NotRun):
            yield found
            return
        name, label, folder, first = found
        yield from _controls(key_value_rows, collisions, stored)
        groups = context.memo(("embeddings", name), lambda first=first: _equal_embeddings(first))  # type: ignore[misc]
        distinct = len(first.embedding) - sum(len(g) - 1 for g in groups)
        rows = key_value_rows(first)
        keys = rows[:, : first.key_weight.shape[0] * first.key_weight.shape[1]]
        for floats in FLOATS:
            equal = collisions(stored(rows, floats))
            yield exact(
                what=f"distinct (K, V) rows = distinct embeddings: {_format(floats)}", ran_on=label, observed=equal.distinct, predicted=distinct,
                note=f"equal embeddings: {_texts(folder, groups)}" if groups and floats == FLOATS[0] else None,
            )  # fmt: skip
            yield exact(
                what=f"groups of tokens with equal (K, V) but not equal embeddings, or the reverse: {_format(floats)}",
                ran_on=label,
                observed=len({*map(tuple, equal.shared)} ^ {*map(tuple, groups)}),
                predicted=0,
            )
        measured: list[tuple[int | str, str, NDArray[Any]]] = [(bits, "keys and values", rows) for bits in CODES]
        measured += [(kind, "keys alone", keys) for kind in (*FLOATS, *CODES)]
        for kind, part, table in measured:
            yield exact(
                what=f"distinct embeddings less distinct rows, {part}: {_format(kind)}", ran_on=label, predicted=0, role="assumption",
                observed=distinct - collisions(stored(table, kind)).distinct,
            )  # fmt: skip
        tokens = None if context.cache is None else context.cache.tokens
        if tokens is not None and context.cache is not None and context.cache.meta.get("model") == name:
            shared = {token for group in groups for token in group}
            yield exact(
                what="tokens of the real text that share their embedding with another token", ran_on=f"{len(tokens)} tokens of the real cache", role="assumption",
                observed=sum(int(token) in shared for token in tokens), predicted=0,
            )  # fmt: skip


def _equal_embeddings(first: LayerZero) -> list[list[int]]:
    """Tokens with the same embedding, by a route of its own: a dictionary of the rows' bytes."""
    groups: dict[bytes, list[int]] = {}
    for token, row in enumerate(first.embedding + np.float32(0)):
        groups.setdefault(row.tobytes(), []).append(token)
    return [group for group in groups.values() if len(group) > 1]
