"""Certified small instances: the ledger's inequalities proved again in exact and in ball arithmetic, where rounding cannot hide a violation.

`python -m proofs_checks.certified` (= `make certify`) prints a line for each: the claim, the inequality, both sides as rationals or balls, the
margin, and the wrong formulas that the same comparison refutes. What has no certificate is listed with its reason (`without`).
"""

from __future__ import annotations

from proofs_checks.certified.run import certificates, main, without

__all__ = ["certificates", "main", "without"]
