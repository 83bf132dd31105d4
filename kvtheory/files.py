"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A scratch path beside `path`: renamed to it when the block ends, removed if the block raises.

    A reader sees the old file or the whole new one. Folders on the way are made; the file gets ordinary permissions.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield scratch
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """This process alone has `folder` while the block runs; made where it is not there. ValueError where another process has it.

    The lock is the process's own and goes with it, however it ends. Where the system or the file system has no such locks, nothing is held.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(folder / ".lock", "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is at work in {folder}; wait for it, or choose another folder") from None
        except OSError:  # a file system without locks
            pass
        yield
