"""The conformance runner: our properties and claims against anybody's codec, which runs in a process of its own.

`kvtheory conform package.module:Codec` runs it; docs/conform.md says what a codec must have (encode and decode) and what is checked.
"""

from __future__ import annotations

from proofs_checks.conform.registry import CLAIMS, PROPERTIES
from proofs_checks.conform.run import Finding, Report, run
from proofs_checks.conform.subject import ForeignError, Subject

__all__ = ["CLAIMS", "PROPERTIES", "Finding", "ForeignError", "Report", "Subject", "run"]
