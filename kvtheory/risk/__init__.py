"""The risk of keeping K tokens of a cache (arXiv 2607.01520): response profiles, their spectrum, and what it bounds.

A cache is a probability measure P = sum_i p_i delta_(k_i, v_i), a query law nu a sample of m queries, a summary another measure
Phat = sum_i w_i delta_(k_i, v_i) of few atoms. With A the attention output and Z the softmax denominator,

    A_Phat(q) - A_P(q) = (Z_P(q) / Z_Phat(q)) int Gamma_P(k, v)(q) dPhat,        Gamma_P(k, v)(q) = (e_q(k) / Z_P(q)) (v - A_P(q)).

One head at a time, as arrays q (m, d), k (n, d), v (n, dv) in float64, every query seeing every token: of a causal layer, take
the tokens at or before the earliest query used.
"""

from kvtheory.risk.bounds import (
    augmented_bound,
    cube_bound,
    paper_bound,
    safe_bound,
    search_floor,
    spectral_bound,
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
    lookup,
    lookup_sampling_risk,
    lookup_trace,
    opposed_pairs,
    summary_by_synthetic_tokens,
)
from kvtheory.risk.profiles import attention_risk, density, linear_risk, response_profiles
from kvtheory.risk.spectra import Spectrum, profile_spectrum, spectrum

__all__ = [
    "Instance",
    "Spectrum",
    "attention_risk",
    "augmented_bound",
    "coherent_block",
    "cube_bound",
    "density",
    "dissenter",
    "dissenter_risk",
    "faint_needle",
    "faint_needle_risk",
    "flat_cache",
    "hidden_lookup",
    "linear_risk",
    "lookup",
    "lookup_sampling_risk",
    "lookup_trace",
    "opposed_pairs",
    "paper_bound",
    "profile_spectrum",
    "response_profiles",
    "safe_bound",
    "search_floor",
    "spectral_bound",
    "spectrum",
    "summary_by_synthetic_tokens",
    "trace_bound",
]
