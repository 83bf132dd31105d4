"""Claims of "KV Cache Compression Through the Lens of Transform Coding" (arXiv 2608.14191): what noise on a cache costs at the output.

Symbols: a = softmax(scale k q) over the tokens a query sees, u_i = v_i W_O - o, sigma_ic^2 the variance of the noise on channel c of
token i, s_i^2 that of logit i.
"""

# The order of the imports is that of the ledger.
# isort: off
from proofs_checks.transform_coding.first_order import key_distortion, value_distortion
from proofs_checks.transform_coding.together import additivity
from proofs_checks.transform_coding.validity import validity_range
from proofs_checks.transform_coding.next_order import remainder
from proofs_checks.transform_coding.grouped import grouped_heads
# isort: on

__all__ = ["additivity", "grouped_heads", "key_distortion", "remainder", "validity_range", "value_distortion"]
