"""What is wrong with a file of somebody else's."""

from __future__ import annotations


class CannotImport(ValueError):
    """The file is not what its name says, is cut short, claims more than it holds, or does not hold what was asked for; one sentence."""
