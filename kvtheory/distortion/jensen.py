"""The Jensen bias of noisy logits: how much attention the exact tokens of a cache lose or gain beside quantised ones.

With s^2 the variance of a noisy logit, and Gaussian noise, E e^{z + eps} = e^{z + s^2/2}. Which side of the identity the stored
key stands on is a matter of the quantiser:

    "dither"    noise independent of the key: the stored logit is z + eps, noisy tokens weigh e^{s^2/2} too much
    "centroid"  noise independent of the stored key, E[k | k_hat] = k_hat: the true logit is z_hat + eps, and e^{z_hat} weighs
                e^{s^2/2} too little

so that the logit's correction is -s^2/2 for the one and +s^2/2 for the other. At high rate both signs are right to the order of
the noise alone: E[e k] = 0 and E[e k_hat] = 0 then differ by s^2 themselves. Noise that all tokens share cancels in the softmax.
Derived here; compare arXiv 2605.26266.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from kvtheory import checks

__all__ = ["exact_mass", "logit_correction", "logit_variance"]

Float = NDArray[np.float64]
Noise = Literal["dither", "centroid"]

#: the sign of the correction
_SIGNS = {"dither": -1.0, "centroid": 1.0}


def logit_variance(q: Any, covariance: Any, scale: float | None = None) -> Float:
    """s^2 = scale^2 q^T Sigma_eps q, the variance of a logit whose key has noise of covariance Sigma_eps.

    q (m, d). covariance (d, d), the same for all tokens: returns (m,). covariance (n, d, d), one a token: returns (m, n).
    scale: default 1/sqrt(d). float64. ValueError for shapes that do not fit, NaN or inf, and a negative variance beyond rounding
    (such a covariance is none).
    """
    q = np.asarray(q, dtype=np.float64)
    sizes = checks.shape("q", q, ("m", "d"))
    if sizes["d"] == 0:
        raise ValueError("q: expected d >= 1 channels, got 0")
    sigma = np.asarray(covariance, dtype=np.float64)
    checks.shape("covariance", sigma, ("d", "d") if sigma.ndim == 2 else ("n", "d", "d"), {"d": sizes["d"]})
    checks.finite("q", q)
    checks.finite("covariance", sigma)
    scale = sizes["d"] ** -0.5 if scale is None else checks.positive("scale", scale)
    s2 = np.einsum("mc,...ce,me->m...", q, sigma, q, optimize=True)
    noise = np.einsum("mc,...ce,me->m...", np.abs(q), np.abs(sigma), np.abs(q), optimize=True)
    if (s2 < -1e-12 * noise).any():
        raise ValueError(
            f"covariance: expected positive semi-definite matrices, got a logit of variance {scale**2 * s2.min()}"
        )
    return scale**2 * np.maximum(s2, 0.0)


def logit_correction(logit_variance: ArrayLike, noise: Noise = "dither") -> Float:
    """What to add to a noisy logit of variance s^2: -s^2/2 for "dither", +s^2/2 for "centroid". Shape of the input, float64.

    With Gaussian noise of the stated kind the mass of exact tokens is then right up to a rest of one sign: for dither
    E[mass] >= true mass, for centroid mass <= E[true mass | stored keys] (Jensen, 1/(M + N) is convex in N).
    ValueError unless s^2 is finite and >= 0, or for another noise.
    """
    return 0.5 * _sign(noise) * _variance(logit_variance)


def exact_mass(mass: ArrayLike, logit_variance: ArrayLike, noise: Noise = "dither") -> Float:
    """Attention that tokens with exact keys hold together once all others have noisy logits of variance s^2, uncorrected.

        m / (m + (1 - m) e^{+s^2/2})   dither,      m / (m + (1 - m) e^{-s^2/2})   centroid

    mass: m, their mass with exact logits, in [0, 1]. Broadcasts; float64. Exact in the limit of many noisy tokens; for few, dither's
    expectation is at least this (Jensen), whatever the joint law of the noise.
    ValueError for a mass outside [0, 1], a variance that is not finite and >= 0, or another noise.
    """
    m = checks.finite("mass", np.asarray(mass, dtype=np.float64))
    if ((m < 0) | (m > 1)).any():
        raise ValueError(f"mass: expected numbers in [0, 1], got {m.min()} to {m.max()}")
    return np.asarray(special.expit(special.logit(m) + 0.5 * _sign(noise) * _variance(logit_variance)))


def _variance(logit_variance: ArrayLike) -> Float:
    s2 = checks.finite("logit_variance", np.asarray(logit_variance, dtype=np.float64))
    if (s2 < 0).any():
        raise ValueError(f"logit_variance: expected numbers >= 0, got {s2.min()}")
    return s2


def _sign(noise: str) -> float:
    if noise not in _SIGNS:
        raise ValueError(f'noise: expected "dither" or "centroid", got {noise!r}')
    return _SIGNS[noise]
