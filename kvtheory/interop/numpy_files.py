"""`.npz` without pickle: headers and sizes are read before any number is."""

from __future__ import annotations

import ast
import math
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.interop.errors import CannotImport

#: deflate cannot do better than 1032 to 1: an entry that claims more is no honest one
DEFLATE = 1032


def open_zip(path: Path, what: str) -> zipfile.ZipFile:
    """The zip file at `path`; CannotImport for one that zipfile cannot read, whatever it raises on altered bytes."""
    try:
        return zipfile.ZipFile(path)
    except Exception as problem:
        raise CannotImport(f"{path}: not a readable {what} ({problem})") from None


class Npz:
    """The arrays of a .npz by name; each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._zip = open_zip(path, ".npz")
        self._entries: dict[str, zipfile.ZipInfo] = {}
        for entry in self._zip.infolist():
            name = entry.filename.removesuffix(".npy")
            if name in self._entries:
                raise CannotImport(f"{path}: holds two arrays named {name!r}")
            if name == entry.filename:
                raise CannotImport(f"{path}: holds {name!r}, which is no .npy")
            if entry.file_size > (
                entry.compress_size if entry.compress_type == zipfile.ZIP_STORED else DEFLATE * entry.compress_size + 64
            ):
                raise CannotImport(
                    f"{path}: {name!r} claims {entry.file_size:,} bytes, of {entry.compress_size:,} in the file"
                )
            self._entries[name] = entry
        if sum(e.compress_size for e in self._entries.values()) > path.stat().st_size:
            raise CannotImport(f"{path}: its entries claim more bytes than the file has")

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        with self._open(name) as file:
            return self._header(name, file)[0]

    def read(self, name: str) -> NDArray[Any]:
        try:
            with self._open(name) as file:
                shape, fortran, dtype, start = self._header(name, file)
                data = file.read()
        except CannotImport:
            raise
        except Exception as problem:  # whatever zipfile and its decompressors raise on altered bytes
            raise CannotImport(f"{self.path}: cannot read {name!r} ({problem})") from None
        if len(data) != self._entries[name].file_size - start:
            raise CannotImport(f"{self.path}: {name!r} is cut short")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")

    def close(self) -> None:
        self._zip.close()

    def _open(self, name: str) -> IO[bytes]:
        try:
            return self._zip.open(self._entries[name])
        except Exception as problem:  # likewise
            raise CannotImport(f"{self.path}: cannot read {name!r} ({problem})") from None

    def _header(self, name: str, file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
        """(shape, Fortran order, element type, bytes of the header), checked against the entry's size."""

        def no(why: str) -> CannotImport:
            return CannotImport(f"{self.path}: {name!r} {why}")

        try:
            magic = file.read(8)
            if magic[:6] != b"\x93NUMPY" or magic[6:7] not in (b"\x01", b"\x02", b"\x03"):
                raise no("is no .npy")
            width = 2 if magic[6] == 1 else 4
            size = int.from_bytes(file.read(width), "little")
            if size > 1 << 16:
                raise no(f"has a header of {size:,} bytes")
            text = file.read(size)
            record = ast.literal_eval(text.decode("latin1").strip())
            shape, fortran, described = record["shape"], record["fortran_order"], record["descr"]
            if (
                not isinstance(shape, tuple)
                or not all(type(n) is int and n >= 0 for n in shape)
                or type(fortran) is not bool
            ):
                raise ValueError
            if not isinstance(described, str):
                raise no("holds records; expected numbers")
            dtype = np.dtype(described)
        except CannotImport:
            raise
        except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError):
            raise no("has a malformed header") from None
        except Exception as problem:  # likewise
            raise no(f"cannot be read ({problem})") from None
        if dtype.hasobject:
            raise no("holds pickled objects, which are never loaded; save numbers")
        start = 8 + width + size
        if math.prod(shape) * dtype.itemsize != self._entries[name].file_size - start:
            raise no(f"claims {shape} of {dtype}, and holds {self._entries[name].file_size - start:,} bytes")
        return shape, fortran, dtype, start
