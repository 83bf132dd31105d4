"""From saved results to files: which figures exist, what each reads, and how it is written (same data, same bytes)."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import pkgutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtheory.files import replacing

FORMATS = ("pdf", "png", "svg")
_HELPERS = {"book", "style"}


class Drawn(NamedTuple):
    """name of the figure, its caption, and the files written (picture formats, .csv, .txt)."""

    name: str
    caption: str
    files: list[Path]


def names() -> dict[str, str]:
    """Figure name -> module, in alphabetical order."""
    import figures

    found = {}
    for info in pkgutil.iter_modules(figures.__path__):
        if info.name not in _HELPERS and not info.name.startswith("_"):
            found[importlib.import_module(f"figures.{info.name}").NAME] = f"figures.{info.name}"
    return dict(sorted(found.items()))


def load(results: Path, name: str) -> dict[str, Any]:
    """The saved data of one figure: claim id -> data. The figure "ledger" reads ledger.json itself."""
    if name == "ledger":
        path = results / "ledger.json"
        return {"ledger": json.loads(path.read_text(encoding="utf-8"))} if path.is_file() else {}
    found = {}
    for path in sorted((results / "data" / name).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found[record["claim"]] = record["data"]
    # what no run of the claims saves, a benchmark of public packages for one, comes with the figures; beside a ledger only
    packaged = Path(__file__).parent / "saved" / f"{name}.json"
    if not found and packaged.is_file() and (results / "ledger.json").is_file():
        record = json.loads(packaged.read_text(encoding="utf-8"))
        found[record["claim"]] = record["data"]
    return found


def draw(
    results: str | os.PathLike[str],
    names: Iterable[str] | None = None,
    formats: Sequence[str] = FORMATS,
    style: str = "paper",
) -> list[Drawn]:
    """Draw the named figures (default: every one with saved data) into RESULTS/figures.

    Each gets its picture in every format, its data as CSV and its caption as text. ValueError for an unknown name or format
    and for a named figure that has no saved data; FileNotFoundError where there are no results at all.
    """
    from figures import style as styles

    results = Path(results)
    known = _known()
    if not (results / "ledger.json").is_file() and not (results / "data").is_dir():
        raise FileNotFoundError(f"results: no finished run in {results}; run `kvtheory verify --out {results}` first")
    for fmt in formats:
        if fmt not in FORMATS:
            raise ValueError(f"format: expected some of {', '.join(FORMATS)}, got {fmt!r}")
    wanted = list(known) if names is None else list(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"name: no figure {name!r}; there are {', '.join(known)}")
    drawn = []
    for name in wanted:
        data = load(results, name)
        if not data:
            if names is not None:
                raise ValueError(f"name: no saved data for {name!r} in {results}; run the claim that makes it first")
            continue
        module = importlib.import_module(known[name])
        with styles.using(style):
            figure = module.draw(data, style)
            files = [_save(figure, results / "figures" / f"{name}.{fmt}") for fmt in formats]
            styles.close(figure)
        header, rows = module.table(data)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        for suffix, content in ((".csv", text.getvalue()), (".txt", module.CAPTION + "\n")):
            path = results / "figures" / f"{name}{suffix}"
            with replacing(path) as scratch:
                scratch.write_text(content, encoding="utf-8")
            files.append(path)
        drawn.append(Drawn(name, module.CAPTION, files))
    return drawn


_known = names


def _save(figure: Any, path: Path) -> Path:
    # no dates and no program versions in the file: the same data give the same bytes
    metadata = {
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
        "svg": {"Date": None},
        "png": {"Software": None},
    }
    fmt = path.suffix[1:]
    with replacing(path) as scratch:
        figure.savefig(scratch, format=fmt, metadata=metadata[fmt])
    return path
