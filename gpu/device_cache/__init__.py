"""Attention on a cache as it is coded: `gpu.DeviceCache` (docs/attention.md)."""

from gpu.device_cache.bound import error_bound
from gpu.device_cache.cache import DeviceCache

__all__ = ["DeviceCache", "error_bound"]
