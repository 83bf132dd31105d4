"""CuPy kernels that implement the reference codecs at speed, and attention on the compressed cache.

No kernel has landed yet: `codecs()` is empty, and the NumPy codecs of `reference` are what works today.
"""

from __future__ import annotations

from kvtheory import __version__

__kvtheory__ = __version__
__all__ = ["codecs"]


def codecs() -> dict[str, type]:
    """Name -> class of each codec that has kernels here; mirrors `reference.codecs()`."""
    return {}
