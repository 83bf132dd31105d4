"""Claims of TurboQuant (arXiv 2504.19874): exact distortion, its upper and lower bounds, its printed tables, corrected; our codec."""

from proofs_checks.quantizers.codec import reference_turboquant
from proofs_checks.quantizers.full import reference_full
from proofs_checks.quantizers.lower_bounds import lower_bound, sphere_lower_bound
from proofs_checks.quantizers.mse import turboquant_mse, turboquant_mse_bound
from proofs_checks.quantizers.products import prod_distortion, prod_table
from proofs_checks.quantizers.tables import turboquant_printed_table, turboquant_table

__all__ = [
    "lower_bound",
    "prod_distortion",
    "prod_table",
    "reference_full",
    "reference_turboquant",
    "sphere_lower_bound",
    "turboquant_mse",
    "turboquant_mse_bound",
    "turboquant_printed_table",
    "turboquant_table",
]
