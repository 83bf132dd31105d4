"""Every figure is a module with a name, a caption, a table; unknown names and formats are refused."""

import importlib

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
