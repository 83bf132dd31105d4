"""Uniform quantisers whose codes are entropy-coded: what a law costs in bits at a given distortion.

Cells of one width Delta, [(k - 1/2 + offset) Delta, (k + 1/2 + offset) Delta), each decoded to its centroid c_k; the codes have the
ideal length of -log2 p_k bits:

    R = -sum_k p_k log2 p_k,   D = sum_k int_cell (x - c_k)^2 f(x) dx

At small Delta, D = Delta^2/12 and R = h - log2 Delta, so that R is log2(pi e / 6) / 2 = .2546 bit above Shannon's lower bound
h - log2(2 pi e D) / 2, a factor of 1.53 dB in D (Gish and Pierce 1968), whatever the law.
"""

from __future__ import annotations

import numpy as np

from kvtheory.checks import positive
from kvtheory.rate.density import Density, cell_integrals

#: more cells are refused
MOST_CELLS = 1 << 22


def entropy_coded(law: Density, step: float, offset: float = 0.0) -> tuple[float, float]:
    """(R in bits, D) of `law` under the uniform quantiser of width `step` with centroids and ideal code lengths.

    offset: of the cells against the law's centre (0 where it has none), in steps: 0 a cell in the middle (mid-tread), 1/2 an edge there
    (mid-rise). The law is taken over its panels: to 1e-16 of its mass. ValueError for step <= 0, and for more than 2^22 cells.
    """
    step = positive("step", step)
    low, high = (float(x) for x in law.chart(law.panels[[0, -1]])[0])
    first = (law.centre or 0.0) + (offset - 0.5) * step
    below, above = int(np.ceil((first - low) / step)), int(np.ceil((high - first) / step))
    if below + above > MOST_CELLS:
        raise ValueError(f"step: expected at most {MOST_CELLS} cells, got {below + above}")
    edges = first + step * np.arange(-below, above + 1, dtype=np.float64)
    middles = 0.5 * (edges[:-1] + edges[1:])
    mass, first_moment, second = cell_integrals(law, edges, middles)
    held = mass > 0
    p = mass[held]
    # about the middle of a cell: int (x - c)^2 = int (x - m)^2 - (c - m)^2 p
    distortion = (second[held] - first_moment[held] ** 2 / p).sum()
    return float(-(p * np.log2(p)).sum()), float(distortion)


def entropy_coded_bits(law: Density, distortion: float, offset: float = 0.0) -> float:
    """Bits R at which `entropy_coded` has this distortion, 0 < distortion < variance of the law.

    Found between a step that has less and one that has more; D rises with the step for the laws here (uni-modal, symmetric).
    ValueError for a distortion that no step up to 2^60 times the first one has.
    """
    from scipy.optimize import brentq

    target = positive("distortion", distortion)
    # the step that has D where it is fine against the law
    low = high = float(np.sqrt(12 * target))
    while entropy_coded(law, low, offset)[1] > target:
        low /= 2
    for _ in range(60):
        if entropy_coded(law, high, offset)[1] > target:
            break
        high *= 2
    else:
        raise ValueError(f"distortion: expected less than the law's variance, got {target:g}, which no step has")
    step = brentq(lambda x: entropy_coded(law, x, offset)[1] - target, low, high, xtol=1e-14, rtol=1e-13)
    return entropy_coded(law, float(step), offset)[0]
