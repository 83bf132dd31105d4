"""Sphinx configuration: the pages of docs/ and the API from the docstrings."""

from __future__ import annotations

from typing import Any

from docutils import nodes

import kvtheory

try:
    import latex2mathml.converter
except ImportError:
    latex2mathml = None

project = "kvtheory"
author = "The kvtheory developers"
release = version = kvtheory.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["plain.css"]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
highlight_language = "none"  # blocks that do not say theirs are commands
autodoc_typehints = "none"
exclude_patterns = ["_build"]
suppress_warnings = ["myst.xref_ambiguous"]


def _verbatim(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings here are plain text with formulas and tables in them: shown as they are written, not parsed as markup."""
    if any(line.strip() for line in lines):
        lines[:] = [".. code-block:: text", "", *(f"   {line}" for line in lines), ""]


def _mathml(translator: Any, node: Any) -> None:
    """A formula as MathML, which browsers draw by themselves: the pages then need no network (MathJax comes from one)."""
    block = isinstance(node, nodes.math_block)
    try:
        drawn = latex2mathml.converter.convert(node.astext(), display="block" if block else "inline")
    except Exception as problem:
        raise ValueError(f"{translator.builder.current_docname}: no MathML of {node.astext()!r}") from problem
    translator.body.append(f'<div class="math">{drawn}</div>' if block else drawn)
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _verbatim)
    if latex2mathml is not None:
        html_math = (_mathml, None)
        app.add_node(nodes.math, override=True, html=html_math)
        app.add_node(nodes.math_block, override=True, html=html_math)
