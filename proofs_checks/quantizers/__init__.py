"""Claims of the codecs' papers: TurboQuant (arXiv 2504.19874), QJL, PolarQuant, KIVI, KVQuant; and of our codecs of these names."""

# The order of the imports is that of the ledger.
# isort: off
from proofs_checks.quantizers.codec import reference_turboquant
from proofs_checks.quantizers.full import reference_full
from proofs_checks.quantizers.lower_bounds import lower_bound, sphere_lower_bound
from proofs_checks.quantizers.mse import turboquant_mse, turboquant_mse_bound
from proofs_checks.quantizers.products import prod_distortion, prod_table
from proofs_checks.quantizers.tables import turboquant_printed_table, turboquant_table
from proofs_checks.quantizers.unbiased import prod_on_attention, prod_unbiased
from proofs_checks.quantizers.sign_sketch import qjl_variance
from proofs_checks.quantizers.polar import polar_angles, polar_distortion
from proofs_checks.quantizers.kivi import kivi_channels
from proofs_checks.quantizers.held import codecs_hold, kivi_two_bits
from proofs_checks.quantizers.kvquant import kvquant_pre_rope, kvquant_q_norm, kvquant_stages, q_norm_cost
from proofs_checks.quantizers.entropy_coded import entropy_coded_uniform
# isort: on

__all__ = [
    "codecs_hold",
    "entropy_coded_uniform",
    "kivi_channels",
    "kivi_two_bits",
    "kvquant_pre_rope",
    "kvquant_q_norm",
    "kvquant_stages",
    "lower_bound",
    "polar_angles",
    "polar_distortion",
    "prod_distortion",
    "prod_on_attention",
    "prod_table",
    "prod_unbiased",
    "q_norm_cost",
    "qjl_variance",
    "reference_full",
    "reference_turboquant",
    "sphere_lower_bound",
    "turboquant_mse",
    "turboquant_mse_bound",
    "turboquant_printed_table",
    "turboquant_table",
]
