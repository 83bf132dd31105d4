"""Claims of "The risk of KV cache compression" (arXiv 2607.01520), on the centred response profile unless one says augmented.

    centred    Γ(q)  = (e_q(k)/Z_P(q)) (v − A_P(q))                        augmented  Γ⁺(q) = (e_q(k)/Z_P(q)) (v, c) − (A_P(q), c)

The paper's own definition of the profile could not be established, so every claim says which of the two it is about.
"""

from proofs_checks.risk.balanced import plain_cube_bound, spectral_bound
from proofs_checks.risk.identity import error_identity
from proofs_checks.risk.retrieval import augmented_trace_bound, retrieval_regime, safe_bound, search_lower_bound
from proofs_checks.risk.sampling import sampling_iid, sampling_without_replacement

__all__ = [
    "augmented_trace_bound",
    "error_identity",
    "plain_cube_bound",
    "retrieval_regime",
    "safe_bound",
    "sampling_iid",
    "sampling_without_replacement",
    "search_lower_bound",
    "spectral_bound",
]
