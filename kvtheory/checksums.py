"""CRC-32 as zlib has it (polynomial 0xEDB88320), from isal, which is thirteen times as fast; where that is not installed, from zlib."""

try:
    from isal.isal_zlib import crc32
except ModuleNotFoundError:  # a machine without wheels: the same numbers, slower
    from zlib import crc32

__all__ = ["crc32"]
