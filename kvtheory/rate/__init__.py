"""Bits: how many to spend on which component, and the best scalar quantiser for a given number of them.

- `reverse_waterfill`, `integer_bits`: allocation, real and integer
- `lloyd_max` and `Quantizer`: the optimal scalar quantiser of a density or of samples; `uniform`, `best_reach`: uniform ones
- `entropy_coded`, `entropy_coded_bits`: uniform quantisers with ideal code lengths
- `measured_table`, `law_table`, `gaussian_table`, `uniform_table`: distortion against bits
- `Density`: a law on the line with its integrals over cells
"""

from kvtheory.rate.allocation import greedy_bits, integer_bits, reverse_waterfill, water_level
from kvtheory.rate.density import Density, cell_integrals, density_of
from kvtheory.rate.entropy_coded import entropy_coded, entropy_coded_bits
from kvtheory.rate.lloyd import Certificate, Quantizer, lloyd_max
from kvtheory.rate.tables import gaussian_table, law_table, measured_table, uniform_table
from kvtheory.rate.uniform import best_reach, uniform

__all__ = [
    "Certificate",
    "Density",
    "Quantizer",
    "best_reach",
    "cell_integrals",
    "density_of",
    "entropy_coded",
    "entropy_coded_bits",
    "gaussian_table",
    "greedy_bits",
    "integer_bits",
    "law_table",
    "lloyd_max",
    "measured_table",
    "reverse_waterfill",
    "uniform",
    "uniform_table",
    "water_level",
]
