"""Linear transforms before scalar quantisation: which one spends fewest bits on a quadratic error.

Vectors x of covariance Sigma are coded as y = T x, each coefficient by a quantiser of its own, and the error e of x costs
e^T M e. With the high-rate law, an error variance proportional to var(y_c) 4^{-b_c},

    D(T) = d c 4^{-b} [prod_c (T Sigma T^T)_cc (T^{-T} M T^{-1})_cc]^{1/d} >= d c 4^{-b} (det Sigma det M)^{1/d}

by Hadamard's inequality, used twice. Equality where T diagonalises both, which `metric_klt` does.

- `metric_klt`: the transform that attains the bound; `pca`: the same for M = I; `Transform`
- `shrink`: a metric made definite and less spread
- `whitened_svd`: the construction of arXiv 2608.14191 from a layer's weights, which is PCA
- `basis_loss_bits`, `pca_loss_bits`, `coded_distortion`: what another basis costs
"""

from kvtheory.transform.basis import Transform, metric_klt, pca, shrink
from kvtheory.transform.loss import basis_loss_bits, coded_distortion, pca_loss_bits
from kvtheory.transform.whitening import Whitened, whitened_svd

__all__ = [
    "Transform",
    "Whitened",
    "basis_loss_bits",
    "coded_distortion",
    "metric_klt",
    "pca",
    "pca_loss_bits",
    "shrink",
    "whitened_svd",
]
