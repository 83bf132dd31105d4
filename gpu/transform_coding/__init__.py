"""Transform coders on the GPU: `reference.transform_coding`, its coders' cores replaced by kernels.

stacked, basis    gpu/kernels/transform.cu    tokens of a layer as vectors, RoPE undone and applied; the exact synthesis of a basis
fixed             gpu/kernels/fixed.cu        so many bits for each coefficient
entropy           gpu/kernels/entropy.cu      one step for all, symbols by gpu/rans.py
codec             the codecs around them

What equals what. Decoding is bit for bit the reference's, on any machine: the format says so (docs/stream-format.md). Encoding goes through
coefficients y, the pseudo-inverse of the basis times x in binary64, which the format leaves to the encoder. The reference's are a product by
NumPy's BLAS, whose order of summation is its own; here they are summed from the first entry to the last by a kernel (`project`), so that a GPU
and the simulator write the same bytes, and need no cuBLAS. Against the reference a coefficient within rounding of a threshold may get the
neighbouring code; from given coefficients on all bytes are the reference's. (The pseudo-inverse itself is the host's LAPACK: two hosts may differ.)
"""
