"""The changelog and the citation name the version that is installed. Pages, links and code of the documents: tests/docs."""

from pathlib import Path

import kvtheory

ROOT = Path(__file__).parent.parent


def test_the_changelog_and_the_citation_name_this_version():
    assert f"## {kvtheory.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {kvtheory.__version__}" in (ROOT / "CITATION.cff").read_text()
