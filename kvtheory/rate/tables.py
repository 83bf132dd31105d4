"""Distortion tables D_c(b): what b bits leave of a component, measured or integrated, where 4^{-b} is only a law for many bits.

For N(0, 1), b = 1..4: 4^{-b} is .25, .0625, .0156, .0039; Lloyd-Max .3634, .1175, .0345, .0095; the best uniform quantiser .3634,
.1188, .0374, .0115. `kvtheory.rate.integer_bits` allocates by any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtheory.checks import finite, shape
from kvtheory.rate.density import Density
from kvtheory.rate.lloyd import Quantizer, lloyd_max
from kvtheory.rate.uniform import Kind, _gaussian, best_reach, uniform

Float = NDArray[np.float64]

#: what measured_table takes for b bits: a Quantizer, or a function from samples to what the decoder makes of them
Coder = Quantizer | Callable[[Float], Any]


def measured_table(samples: ArrayLike, quantizers: Sequence[Coder], scale: ArrayLike | None = None) -> Float:
    """tables[c, b] = mean over samples of (x - x_hat)^2, x_hat by quantizers[b]; (components, levels) float64.

    samples (n, components), n >= 1. quantizers: one for each number of bits b = 0, 1, ...: a `Quantizer`, or a function that
    maps the samples (n, components) to their decoded values of the same shape. scale (components,) or a number, > 0: the quantisers see
    x / scale and the table is in the units of x, D_c(b) = scale_c^2 mean (x/scale_c - Q_b(x/scale_c))^2; where a component's scale
    is 0 it decodes to 0. A component's own root mean square fits quantisers made for unit variance.
    ValueError for shapes that do not fit, NaN or inf in samples or decoded values, a negative scale.
    """
    x = np.asarray(samples, dtype=np.float64)
    sizes = shape("samples", x, ("n", "components"))
    if sizes["n"] == 0 or not len(quantizers):
        raise ValueError(
            f"samples, quantizers: expected at least one of each, got {sizes['n']} rows and {len(quantizers)} levels"
        )
    finite("samples", x, ("sample", "component"))
    size = np.ones(sizes["components"]) if scale is None else np.asarray(scale, dtype=np.float64)
    if size.ndim == 0:
        size = np.full(sizes["components"], float(size))
    shape("scale", size, ("components",), sizes)
    finite("scale", size, ("component",))
    if (size < 0).any():
        raise ValueError(f"scale: expected numbers >= 0, got {size.min()} at component {int(np.argmin(size))}")
    alive = size > 0
    unit = x / np.where(alive, size, 1.0)
    table = np.empty((sizes["components"], len(quantizers)))
    for b, coder in enumerate(quantizers):
        decoded = coder.decode(coder.encode(unit)) if isinstance(coder, Quantizer) else np.asarray(coder(unit))
        shape(f"quantizers[{b}](samples)", decoded, x.shape)
        finite(f"quantizers[{b}](samples)", decoded, ("sample", "component"))
        # the error in units of x, in which a scale of 0 means that x_hat = 0
        table[:, b] = ((np.where(alive, unit - decoded, unit) * np.where(alive, size, 1.0)) ** 2).mean(axis=0)
    return table


def law_table(source: Density | Any, quantizers: Sequence[Quantizer]) -> Float:
    """E (x - x_hat)^2 of one law under each quantiser, (levels,) float64: exact integrals under a Density."""
    return np.array([quantizer.distortion(source) for quantizer in quantizers])


def gaussian_table(levels: int) -> Float:
    """D(b) of N(0, 1) under its Lloyd-Max quantiser of 2^b points, b = 0 .. levels - 1; (levels,) float64.

    1, .36338, .11748, .034548, .0095007, ... Times a component's variance it is the component's table if that is Gaussian.
    Convex in b. levels: 1 to 17, or ValueError.
    """
    _levels(levels, 17)
    law = _gaussian()
    return law_table(law, [lloyd_max(law, 2**b) for b in range(levels)])


def uniform_table(
    levels: int, kind: Kind = "midrise", reach: float | Sequence[float] | None = None, source: Density | Any = None
) -> Float:
    """D(b) under `uniform(b, reach, kind)`, b = 0 .. levels - 1; (levels,) float64.

    reach: one for all b, one each (levels,), or None for the best of each (`best_reach`). source: a Density or samples (n,), default
    N(0, 1). With a fixed reach it tends to the overload of the values beyond, not to 0. levels: 1 to 25, or ValueError.
    """
    _levels(levels, 25)
    law = _gaussian() if source is None else source
    if reach is None:
        reaches = [1.0] + [best_reach(b, kind, law) for b in range(1, levels)]
    else:
        wide = np.asarray(reach, dtype=np.float64)
        shape("reach", wide, () if wide.ndim == 0 else (levels,))
        reaches = np.broadcast_to(wide, (levels,)).tolist()
    return law_table(law, [uniform(b, reaches[b], kind) for b in range(levels)])


def _levels(levels: int, most: int) -> None:
    if isinstance(levels, bool) or not isinstance(levels, (int, np.integer)):
        raise TypeError(f"levels: expected an int, got {type(levels).__name__}")
    if not 1 <= levels <= most:
        raise ValueError(f"levels: expected 1 to {most}, got {levels}")
