"""What all transform coders share: AATC, KVTC, PALU and MetricKLT differ in basis, allocation and coder, and only in these.

stacked     keys of a token before RoPE and its values, all heads, as one vector; which tokens stay exact
basis       x = S y + mean with S in 16-bit integers: what a decoder computes is exact, its bytes the same everywhere
fixed       so many bits for each coefficient: codebooks, scales of tokens, dense packing
entropy     one uniform step for all coefficients, interleaved rANS under tables by spread
codec       the codec around them: state by layer, streams, appenders
"""

from reference.transform_coding.basis import Basis
from reference.transform_coding.codec import LayerCoder, TransformCodec
from reference.transform_coding.entropy import EntropyCoder
from reference.transform_coding.fixed import FixedCoder

__all__ = ["Basis", "EntropyCoder", "FixedCoder", "LayerCoder", "TransformCodec"]
