"""What a decoder raises on a stream that it cannot or must not read. Both are ValueErrors."""

from __future__ import annotations


class CorruptStream(ValueError):
    """The bytes are no stream, are cut short or altered, or say something impossible; `offset` is the byte where that shows."""

    def __init__(self, problem: str, offset: int) -> None:
        super().__init__(problem, offset)
        self.problem, self.offset = problem, offset

    def __str__(self) -> str:
        return f"{self.problem} (at byte {self.offset})"


class StateMismatch(ValueError):
    """The stream was written with a state (bases, codebooks fitted to calibration data) other than the one given, or with none."""
