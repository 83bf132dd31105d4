"""Layer 1 of arXiv 2604.15356, and what serving systems do in its place: sessions that begin alike stored together.

blocks.py, radix.py: exact reuse; groups.py: the paper's; layout.py: the stream; store.py: `PrefixStore`.
"""

from reference.prefix_store.layout import Sessions
from reference.prefix_store.store import Lease, PrefixStore, Stats

__all__ = ["Lease", "PrefixStore", "Sessions", "Stats"]
