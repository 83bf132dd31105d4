"""Published numbers of cards, and what a multiprocessor of each compute capability holds. Nothing here was measured by us."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CARDS", "LIMITS", "Card", "Limits", "occupancy"]


@dataclass(frozen=True)
class Limits:
    """Of one multiprocessor: resident warps and blocks, 32-bit registers, bytes of shared memory, float64 multiply-adds a cycle.

    Source: CUDA C++ Programming Guide, tables of technical specifications and of arithmetic throughput by compute capability.
    """

    warps: int
    blocks: int
    registers: int
    shared: int
    float64: int


LIMITS = {
    "80": Limits(64, 32, 65536, 164 << 10, 32),
    "90": Limits(64, 32, 65536, 228 << 10, 64),
    "100": Limits(64, 32, 65536, 228 << 10, 64),
    "120": Limits(48, 24, 65536, 100 << 10, 2),
}


@dataclass(frozen=True)
class Card:
    """bandwidth: bytes a second, peak. clock: Hz, boost. source: where the maker publishes these."""

    name: str
    architecture: str
    processors: int
    clock: float
    bandwidth: float
    source: str


CARDS = (
    Card("A100 SXM 80 GB", "80", 108, 1.41e9, 2.039e12, "NVIDIA A100 Tensor Core GPU datasheet; A100 architecture whitepaper"),
    Card("H100 SXM", "90", 132, 1.98e9, 3.35e12, "NVIDIA H100 Tensor Core GPU datasheet; H100 architecture whitepaper"),
    Card("H200 SXM", "90", 132, 1.98e9, 4.8e12, "NVIDIA H200 Tensor Core GPU datasheet"),
    Card("B200", "100", 148, 1.98e9, 8.0e12, "NVIDIA HGX B200 datasheet; processors and clock as others list them (75 TFLOP/s of float32)"),
    Card("RTX 5090", "120", 170, 2.407e9, 1.792e12, "NVIDIA RTX Blackwell GPU architecture whitepaper"),
)  # fmt: skip


def occupancy(architecture: str, registers: int, shared: int, threads: int) -> tuple[int, str]:
    """Resident warps of a multiprocessor for blocks of `threads` that take `registers` a thread and `shared` bytes, and what limits them.

    Registers are given to a warp by 256; a block has 1 KiB of shared memory to itself beside its own.
    """
    limits = LIMITS[architecture]
    warps = -(-threads // 32)
    each = -(-registers * 32 // 256) * 256 * warps
    fits = {
        "warps": limits.warps // warps,
        "registers": limits.registers // each,
        "shared memory": limits.shared // (shared + 1024),
        "blocks": limits.blocks,
    }
    limit = min(fits, key=lambda name: fits[name])
    return fits[limit] * warps, limit
