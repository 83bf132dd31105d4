"""Claims of "KV Cache Compression Through the Lens of Transform Coding" (arXiv 2608.14191): what noise on a cache costs at the output,
which transform and which bits make that least, and where the theory of noise is not what quantisers do.

Symbols: a = softmax(scale k q) over the tokens a query sees, u_i = v_i W_O - o, sigma_ic^2 the variance of the noise on channel c of
token i, s_i^2 that of logit i; Sigma a covariance, M a metric, T a transform, s_c and w_c variance and price of a coefficient, b_c its bits.
"""

# The order of the imports is that of the ledger.
# isort: off
from proofs_checks.transform_coding.first_order import key_distortion, value_distortion
from proofs_checks.transform_coding.together import additivity
from proofs_checks.transform_coding.validity import validity_range
from proofs_checks.transform_coding.next_order import remainder
from proofs_checks.transform_coding.grouped import grouped_heads
from proofs_checks.transform_coding.grouped_metrics import group_metric, separate_heads
from proofs_checks.transform_coding.rotated_keys import rope_metric, rope_distance_zero
from proofs_checks.transform_coding.whitening import whitening_is_pca
from proofs_checks.transform_coding.optimal_transform import parseval, metric_klt
from proofs_checks.transform_coding.klt_limits import klt_any_law, product_model
from proofs_checks.transform_coding.basis_loss import pca_weights_loss
from proofs_checks.transform_coding.real_bits import water_filling
from proofs_checks.transform_coding.whole_bits import integer_allocation, greedy_allocation
from proofs_checks.transform_coding.quantiser_distortion import quantiser_law, measured_tables
from proofs_checks.transform_coding.weights import attention_weights, weights_gain
from proofs_checks.transform_coding.token_errors import token_independence, error_correlation
from proofs_checks.transform_coding.quantiser_noise import noise_laws, coherent_shrinkage
from proofs_checks.transform_coding.jensen import jensen_sign, noisy_mass
from proofs_checks.transform_coding.eviction import eviction_error, eviction_surrogate, zero_bits
from proofs_checks.transform_coding.systems import special_cases
from proofs_checks.transform_coding.headline import ratio_582, ratio_any_context
# isort: on

__all__ = [
    "additivity",
    "attention_weights",
    "coherent_shrinkage",
    "error_correlation",
    "eviction_error",
    "eviction_surrogate",
    "greedy_allocation",
    "group_metric",
    "grouped_heads",
    "integer_allocation",
    "jensen_sign",
    "key_distortion",
    "klt_any_law",
    "measured_tables",
    "metric_klt",
    "noise_laws",
    "noisy_mass",
    "parseval",
    "pca_weights_loss",
    "product_model",
    "quantiser_law",
    "ratio_582",
    "ratio_any_context",
    "remainder",
    "rope_distance_zero",
    "rope_metric",
    "separate_heads",
    "special_cases",
    "token_independence",
    "validity_range",
    "value_distortion",
    "water_filling",
    "weights_gain",
    "whitening_is_pca",
    "zero_bits",
]
