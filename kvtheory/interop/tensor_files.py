"""`.safetensors`, and `.pt` by torch.load(weights_only=True): tensors alone, whose sizes are those of the file."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kvtheory import checks
from kvtheory.interop.errors import CannotImport
from kvtheory.interop.numpy_files import open_zip
from kvtheory.layer.record import as_array


class Safetensors:
    """The tensors of a .safetensors by name; each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        import ml_dtypes  # noqa: F401  gives NumPy the name bfloat16, which safetensors asks it for
        from safetensors import SafetensorError, safe_open

        self.path, self._error = path, SafetensorError
        try:
            self._file = safe_open(path, framework="np")
        except (SafetensorError, OSError, ValueError) as problem:
            raise CannotImport(f"{path}: not a readable safetensors file ({problem})") from None

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> NDArray[Any]:
        try:
            array: NDArray[Any] = self._file.get_tensor(name)
        except (self._error, OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
            kind = self._file.get_slice(name).get_dtype()
            raise CannotImport(f"{self.path}: cannot read tensor {name!r} of {kind} ({problem})") from None
        return array

    def close(self) -> None:
        del self._file


class TorchFile:
    """The tensors of a .pt by their path in its dicts, lists and tuples: "0.1" is the second of the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            import torch
        except ImportError:
            raise CannotImport(
                f"{path}: a .pt is read by torch, which is not here: {checks.install('real')}; or save a .safetensors"
            ) from None
        if not _is_zip(path):
            raise CannotImport(
                f"{path}: not a file of torch.save, or of its format before 1.6; load it and save it anew"
            )
        with open_zip(path, "file of torch.save") as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                    raise CannotImport(f"{path}: {entry.filename!r} is compressed; torch.save does not")
            if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                raise CannotImport(f"{path}: its entries claim more bytes than the file has")
        try:
            held = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as problem:  # whatever the unpickler and the readers of storages raise
            said = " ".join(str(problem).split())
            if "weights_only" in said.lower() or "unsupported global" in said.lower() or "WeightsUnpickler" in said:
                raise CannotImport(
                    f"{path}: holds objects, and only tensors are loaded (weights_only): save tensors, as in "
                    "torch.save([(one.keys, one.values) for one in cache.layers], FILE)"
                ) from None
            raise CannotImport(f"{path}: torch cannot load it ({type(problem).__name__}: {said[:160]})") from None
        self._tensors: dict[str, Any] = {}
        self._walk(held, "", 0)

    def _walk(self, value: Any, name: str, depth: int) -> None:
        if depth > 8:
            raise CannotImport(f"{self.path}: {name!r} is nested more than 8 deep")
        if hasattr(value, "element_size"):
            self._tensors[name or "tensor"] = value
        elif isinstance(value, dict):
            for key, one in value.items():
                self._walk(one, f"{name}.{key}" if name else str(key), depth + 1)
        elif isinstance(value, (list, tuple)):
            for i, one in enumerate(value):
                self._walk(one, f"{name}.{i}" if name else str(i), depth + 1)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> NDArray[Any]:
        tensor = self._tensors[name]
        if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
            raise CannotImport(f"{self.path}: {name!r} is {tensor.layout}; expected plain numbers")
        held = tensor.untyped_storage().nbytes()
        if math.prod(tensor.shape) * tensor.element_size() > held:
            raise CannotImport(
                f"{self.path}: {name!r} claims {tuple(tensor.shape)}, and the file holds {held:,} bytes of it"
            )
        try:
            return as_array(name, tensor)
        except TypeError as problem:
            raise CannotImport(f"{self.path}: {name!r}: {problem}") from None

    def close(self) -> None:
        self._tensors.clear()


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # it is one, altered: `open_zip` says how
        return True
