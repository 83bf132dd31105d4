"""Inner products of response profiles in H_nu without the profiles: a Gram matrix costs n^2 (m + dv), its profiles n m dv each way."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["centred_gram"]

Float = NDArray[np.float64]


def centred_gram(b: Float, v: Float, o: Float, c2: float = 0.0) -> Float:
    """mean_j b_i b_l ((v_i - o_j).(v_l - o_j) + c2), (n, n), of densities or attention b (n, m), values v (n, dv), outputs o (m, dv).

    (v_i - o).(v_l - o) + c2 = v_i.v_l + c2 - v_i.o - v_l.o + |o|^2, summed over j with weights b_i b_l. c2 = 0: the centred profile
    (theory C-D1); c2 > 0: with a channel c b for the mass beside it.
    """
    cross = (b * (v @ o.T)) @ b.T
    gram = (b @ b.T) * (v @ v.T + c2) - cross - cross.T + (b * (o**2).sum(axis=1)) @ b.T
    return np.asarray(0.5 * (gram + gram.T) / b.shape[1])
