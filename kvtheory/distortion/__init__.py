"""Attention-aware distortion: what noise on keys and values costs at the attention output (arXiv 2608.14191, Theorem 1).

One query q, weights a = softmax(scale k q), output o = sum_i a_i v_i W_O; white noise, independent over tokens and channels,
of variance sigma_ic^2:

    E||do||^2 = D_K + D_V + higher order
    D_K = sum_i a_i^2 ||v_i W_O - o||^2 scale^2 sum_c q_c^2 sigma_ic^2        (the paper: scale^2 = 1/d)
    D_V = sum_i a_i^2 sum_c sigma_ic^2 ||W_O,c||^2                             (W_O,c = row c of W_O; exact at any noise)

The next order is `remainder_term`: for equal logit variance s^2 on all tokens it is c s^2 D_K with -7/4 <= c <= 7/2.

- `key_term`, `value_term`, `remainder_term`; `attention_error`, in which every codec is scored
- `key_metric`, `value_metric`, `query_metric`: the two terms as quadratic forms in the noise covariance
- `token_factor`, `eviction_error`, `single_eviction_error`, `eviction_surrogate`: the token's side, and removal
- `coherent_term`: errors that are known given the cache, such as the shrinkage of centroid quantisers
- `logit_variance`, `logit_correction`, `exact_mass`: the Jensen bias of noisy logits
"""

from __future__ import annotations

from kvtheory.distortion.coherent import coherent_term
from kvtheory.distortion.error import attention_error
from kvtheory.distortion.jensen import exact_mass, logit_correction, logit_variance
from kvtheory.distortion.metrics import key_metric, query_metric, value_metric
from kvtheory.distortion.terms import key_term, remainder_term, value_term
from kvtheory.distortion.tokens import eviction_error, eviction_surrogate, single_eviction_error, token_factor

__all__ = [
    "attention_error",
    "coherent_term",
    "eviction_error",
    "eviction_surrogate",
    "exact_mass",
    "key_metric",
    "key_term",
    "logit_correction",
    "logit_variance",
    "query_metric",
    "remainder_term",
    "single_eviction_error",
    "token_factor",
    "value_metric",
    "value_term",
]
