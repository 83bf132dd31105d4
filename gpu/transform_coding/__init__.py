"""Transform coders on the GPU: `reference.transform_coding`, its coders' cores replaced by kernels.

stacked, basis    gpu/kernels/transform.cu    tokens of a layer as vectors, RoPE undone and applied; the exact synthesis of a basis
fixed             gpu/kernels/fixed.cu        so many bits for each coefficient
entropy           gpu/kernels/entropy.cu      one step for all, symbols by gpu/rans.py
codec             the codecs around them

What equals what. Decoding is bit for bit the reference's, on any machine: the format says so (docs/stream-format.md). Encoding goes through
coefficients y, the pseudo-inverse of the basis times x in binary64, which the format leaves to the encoder: they are a matrix product of the
arrays' own library, here as in the reference. So with NumPy arrays every byte equals the reference's; with CuPy arrays a coefficient next to a
threshold may get the neighbouring code, and all that follows from the coefficients is the same integers.
"""
