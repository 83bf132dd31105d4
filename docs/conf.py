"""Sphinx configuration: the pages of docs/ and the API from the docstrings."""

from __future__ import annotations

from typing import Any

import kvtheory

project = "kvtheory"
author = "The kvtheory developers"
release = version = kvtheory.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["plain.css"]
myst_enable_extensions = ["dollarmath", "deflist"]
autodoc_typehints = "none"
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_ambiguous"]


def _verbatim(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings here are plain text with formulas and tables in them: shown as they are written, not parsed as markup."""
    if any(line.strip() for line in lines):
        lines[:] = [".. code-block:: text", "", *(f"   {line}" for line in lines), ""]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _verbatim)
