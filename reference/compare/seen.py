"""Calibration layers as the last stage of a pipeline sees them: what the stages before it leave, one token of each head a row.

    row i of head h    the i-th token that is left of head h, at the position p_hi where it stood
    one position a row p_i, the mean over the heads of p_hi: a Layer has one for all its heads

Keys are turned from p_hi to p_i, so that undoing RoPE at p_i gives what the stage, which is told p_hi, gets at p_hi. Rows with the same p_i
are set apart by one position each: the queries meet such a token at a distance that is wrong by that much, which the metric of a
transform coder, a mean over distances, does not tell apart. Log-weights are not said: a Layer has none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtheory.layer import Decoded, Layer
from reference.codec import Codec
from reference.full import Full
from reference.kept import Kept
from reference.pipeline import Pipeline, _layer
from reference.rotary import rotary

__all__ = ["as_seen"]


def as_seen(stages: Sequence[Codec], layer: Layer) -> Layer:
    """What `stages`, one behind another, leave of a layer; its queries as they are. The layer itself without stages.

    Heads that keep fewer tokens than the fullest have their last one repeated, as `Pipeline` codes them. ValueError as `Pipeline.encode`.
    """
    if not stages:
        return layer
    # any last stage: only what comes before it is asked
    decoded: Decoded = Pipeline((*stages, Full()))._reduced(layer)
    kept = Kept.of(decoded)
    left = _layer(layer, decoded, kept)
    if kept.places is None:
        return left
    stood = kept.positions(left.tokens)
    row = np.round(stood.mean(axis=0)).astype(np.int64)
    # ascending, and none twice: a Layer's positions
    ascending = np.maximum.accumulate(row - np.arange(len(row))) + np.arange(len(row))
    keys = left.keys
    if layer.rope is not None:
        turn = rotary(layer.rope)
        bare = turn.undo(keys, stood)
        keys = turn.apply(bare, np.broadcast_to(ascending, stood.shape)).astype(keys.dtype)
    return left.replace(keys=keys, positions=ascending)
