"""Sphinx configuration: the pages of docs/ and the API from the docstrings."""

import kvtheory

project = "kvtheory"
author = "The kvtheory developers"
release = version = kvtheory.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
myst_enable_extensions = ["dollarmath", "deflist"]
autodoc_typehints = "description"
exclude_patterns = ["_build"]
