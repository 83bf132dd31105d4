"""Bits: how many to spend on which component, and the best scalar quantiser for a given number of them.

- `reverse_waterfill`, `integer_bits`: allocation, real and integer
- `lloyd_max` and `Quantizer`: the optimal scalar quantiser of a density or of samples
- `Density`: a law on the line with its integrals over cells
"""

from kvtheory.rate.allocation import greedy_bits, integer_bits, reverse_waterfill, water_level
from kvtheory.rate.density import Density, cell_integrals, density_of
from kvtheory.rate.lloyd import Certificate, Quantizer, lloyd_max

__all__ = [
    "Certificate",
    "Density",
    "Quantizer",
    "cell_integrals",
    "density_of",
    "greedy_bits",
    "integer_bits",
    "lloyd_max",
    "reverse_waterfill",
    "water_level",
]
