"""Every figure is a module with a name, a caption, a table; unknown names and formats are refused."""

import importlib
import json
import re
from pathlib import Path

import pytest

import figures
from figures import book


def test_every_module_is_whole():
    for name, module_name in figures.names().items():
        module = importlib.import_module(module_name)
        assert name == module.NAME and module.CAPTION.endswith(".") and len(module.CAPTION) > 60
        assert callable(module.draw) and callable(module.table)


def test_every_claim_with_a_figure_has_its_module():
    import proofs_checks

    wanted = {c.figure for c in proofs_checks.claims().values() if c.figure}
    assert wanted <= set(figures.names())


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no finished run"):
        book.draw(tmp_path)
    (tmp_path / "ledger.json").write_text('{"claims": []}')
    with pytest.raises(ValueError, match="no figure 'x'"):
        book.draw(tmp_path, names=["x"])
    with pytest.raises(ValueError, match="expected some of pdf, png, svg, got 'bmp'"):
        book.draw(tmp_path, formats=("bmp",))
    with pytest.raises(ValueError, match='expected "paper" or "slides"'):
        book.draw(tmp_path, names=["ledger"], style="poster")


def test_the_packaged_run_is_the_one_in_the_docs():
    """figures/saved/packages-held-bits.json has what docs/peers.md says, system by system; and it is drawn beside a ledger only."""
    root = Path(book.__file__).parents[1]
    said, system = [], ""
    for line in (root / "docs" / "peers.md").read_text().splitlines():
        system = line.removeprefix("## ").split(":")[0] if line.startswith("## ") else system
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) >= 12 and re.fullmatch(r"[\d.]+", cells[2]):
            said.append((system, cells[0], int(cells[1]), float(cells[2]), float(cells[4])))
    rows = json.loads((root / "figures" / "saved" / "packages-held-bits.json").read_text())["data"]["rows"]
    kept = [
        (r["system"].split()[-1].lower(), *(r[k] for k in ("package", "claimed", "held", "error over exact")))
        for r in rows
    ]
    assert kept == said and len(said) > 50


def test_packaged_data_need_a_ledger(tmp_path):
    assert book.load(tmp_path, "packages-held-bits") == {}
    (tmp_path / "ledger.json").write_text("{}")
    assert book.load(tmp_path, "packages-held-bits")
