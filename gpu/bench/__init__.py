"""How fast the kernels are against the card that they run on: `python -m gpu.bench` (docs/gpu-bench.md).

record    the launches of an operation, to be timed one by one
cases     operations: inputs, the check against the reference, the straightforward array version
plain     array versions
clock     CUDA events, and the copy bandwidth
measure   the table on a GPU
sass      what the assembler made of a kernel, without a GPU
cards     published numbers of cards
model     the predicted table, without a GPU
"""
