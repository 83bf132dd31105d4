"""Claims of "The risk of KV cache compression" (arXiv 2607.01520), on the centred response profile unless one says augmented.

    centred    Γ(q)  = (e_q(k)/Z_P(q)) (v − A_P(q))                        augmented  Γ⁺(q) = (e_q(k)/Z_P(q)) (v, c) − (A_P(q), c)

The paper's own definition of the profile could not be established, so every claim says which of the two it is about.
"""

from proofs_checks.risk.assumption import assumption_5_1, protected_features
from proofs_checks.risk.balanced import plain_cube_bound, spectral_bound
from proofs_checks.risk.decay import spectral_decay
from proofs_checks.risk.floors import any_atoms_floor, own_tokens_floor, search_lower_bound_any_atoms
from proofs_checks.risk.identity import error_identity
from proofs_checks.risk.knowledge import aware_agnostic_separation
from proofs_checks.risk.longbench import longbench_table
from proofs_checks.risk.merge_reduce import merge_reduce_accumulation
from proofs_checks.risk.minimax import minimax_sandwich, minimax_trace
from proofs_checks.risk.query_laws import query_knowledge
from proofs_checks.risk.retrieval import augmented_trace_bound, retrieval_regime, safe_bound, search_lower_bound
from proofs_checks.risk.sampling import sampling_iid, sampling_without_replacement
from proofs_checks.risk.selection import selection_beats_balance, selection_bound
from proofs_checks.risk.sinks import sinks, sinks_kept
from proofs_checks.risk.slope import sampling_rate
from proofs_checks.risk.weights import weights_beat_dropping

__all__ = [
    "any_atoms_floor",
    "assumption_5_1",
    "augmented_trace_bound",
    "aware_agnostic_separation",
    "error_identity",
    "longbench_table",
    "merge_reduce_accumulation",
    "minimax_sandwich",
    "minimax_trace",
    "own_tokens_floor",
    "plain_cube_bound",
    "protected_features",
    "query_knowledge",
    "retrieval_regime",
    "safe_bound",
    "sampling_iid",
    "sampling_rate",
    "sampling_without_replacement",
    "search_lower_bound",
    "search_lower_bound_any_atoms",
    "selection_beats_balance",
    "selection_bound",
    "sinks",
    "sinks_kept",
    "spectral_bound",
    "spectral_decay",
    "weights_beat_dropping",
]
