"""Caches that other programs captured: `.npz`, `.safetensors` and `.pt` files of tensors, by named layout, without unpickling anything."""

from kvtheory.interop import layout
from kvtheory.interop.captured import How, open_file, read_cache, same
from kvtheory.interop.errors import CannotImport

__all__ = ["CannotImport", "How", "layout", "open_file", "read_cache", "same"]
