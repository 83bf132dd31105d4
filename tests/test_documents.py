"""The documents: links lead somewhere, the README's Python runs, and says what it prints."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "codecs").glob("*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_readme_s_python_prints_what_it_says():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S).group(1)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(code, "README.md", "exec"), {})
    held, error = map(float, said.getvalue().split()[-2:])
    promised = re.search(r"# ([\d.]+) bits per number; ([\d.]+)", code)
    assert round(held, 2) == float(promised.group(1)) and round(error, 2) == float(promised.group(2))


def test_the_changelog_and_the_citation_name_this_version():
    import kvtheory

    assert f"## {kvtheory.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {kvtheory.__version__}" in (ROOT / "CITATION.cff").read_text()
