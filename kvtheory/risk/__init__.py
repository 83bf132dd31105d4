"""The risk of keeping K tokens of a cache (arXiv 2607.01520): response profiles, their spectrum, and what it bounds.

A cache is a probability measure P = sum_i p_i delta_(k_i, v_i), a query law nu a sample of m queries, a summary another measure
Phat = sum_i w_i delta_(k_i, v_i) of few atoms. With A the attention output and Z the softmax denominator,

    A_Phat(q) - A_P(q) = (Z_P(q) / Z_Phat(q)) int Gamma_P(k, v)(q) dPhat,        Gamma_P(k, v)(q) = (e_q(k) / Z_P(q)) (v - A_P(q)).

One head at a time, as arrays q (m, d), k (n, d), v (n, dv) in float64, every query seeing every token: of a causal layer, take
the tokens at or before the earliest query used.
"""

from kvtheory.risk import laws, maps
from kvtheory.risk.atoms import any_atoms_floor, refitted_atoms
from kvtheory.risk.bounds import (
    augmented_bound,
    cube_bound,
    paper_bound,
    safe_bound,
    search_floor,
    spectral_bound,
    spectral_window,
    trace_bound,
)
from kvtheory.risk.instances import (
    Instance,
    coherent_block,
    dissenter,
    dissenter_risk,
    faint_needle,
    faint_needle_risk,
    flat_cache,
    hidden_lookup,
    hidden_needles,
    hidden_needles_floor,
    hidden_needles_risk,
    lookup,
    lookup_sampling_risk,
    lookup_trace,
    opposed_pairs,
    simplex,
    summary_by_synthetic_tokens,
)
from kvtheory.risk.maps import effective_rank, held_energy, profile_gram, protected_bound, token_energy
from kvtheory.risk.merging import accumulated_bias, accumulated_risk, staircase
from kvtheory.risk.minimax import (
    Mixture,
    Optimum,
    best_attended,
    best_for_laws,
    best_mixture,
    best_summary,
    game,
    hull_floor,
    spectral_floor,
)
from kvtheory.risk.profiles import attention_risk, density, linear_risk, response_profiles
from kvtheory.risk.selection import refit_weights, selection_bound
from kvtheory.risk.spectra import Features, Spectrum, profile_features, profile_spectrum, spectrum

__all__ = [
    "Features",
    "Instance",
    "Mixture",
    "Optimum",
    "Spectrum",
    "accumulated_bias",
    "accumulated_risk",
    "any_atoms_floor",
    "attention_risk",
    "augmented_bound",
    "best_attended",
    "best_for_laws",
    "best_mixture",
    "best_summary",
    "coherent_block",
    "cube_bound",
    "density",
    "dissenter",
    "dissenter_risk",
    "effective_rank",
    "faint_needle",
    "faint_needle_risk",
    "flat_cache",
    "game",
    "held_energy",
    "hidden_lookup",
    "hidden_needles",
    "hidden_needles_floor",
    "hidden_needles_risk",
    "hull_floor",
    "laws",
    "linear_risk",
    "lookup",
    "lookup_sampling_risk",
    "lookup_trace",
    "maps",
    "opposed_pairs",
    "paper_bound",
    "profile_features",
    "profile_gram",
    "profile_spectrum",
    "protected_bound",
    "refit_weights",
    "refitted_atoms",
    "response_profiles",
    "safe_bound",
    "search_floor",
    "selection_bound",
    "simplex",
    "spectral_bound",
    "spectral_floor",
    "spectral_window",
    "spectrum",
    "staircase",
    "summary_by_synthetic_tokens",
    "token_energy",
    "trace_bound",
]
