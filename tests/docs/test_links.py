"""Links of every page lead to a file, and to a heading in it. Links outside are not followed: `python -m tests.docs.test_links` lists them."""

import re

import pytest

from tests.docs import book

NAMES = {str(page.relative_to(book.ROOT)): page for page in book.PAGES}
EXTERNAL = {page: [x for x in book.links(page) if "://" in x] for page in book.PAGES}


@pytest.mark.parametrize("name", NAMES)
def test_internal_links_and_anchors_lead_somewhere(name):
    page = NAMES[name]
    for target in book.links(page):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        other = page if not path else (page.parent / path).resolve()
        assert other.exists(), f"{name}: {target}"
        if anchor:
            assert anchor in [book.slug(title) for _, title in book.headings(other)], f"{name}: {target}"


@pytest.mark.parametrize("name", NAMES)
def test_anchors_of_a_page_are_one_each_where_they_are_linked(name):
    """Two headings of one text have one anchor: a link to it would lead to the first, silently."""
    linked = {
        target.partition("#")[2]
        for page in book.PAGES
        for target in book.links(page)
        if "#" in target
        and (page if target.startswith("#") else (page.parent / target.partition("#")[0]).resolve()) == NAMES[name]
    }
    anchors = [book.slug(title) for _, title in book.headings(NAMES[name])]
    assert [anchor for anchor in linked if anchors.count(anchor) > 1] == []


def test_external_links_are_whole_and_encrypted():
    assert sum(map(len, EXTERNAL.values())) > 20
    for page, found in EXTERNAL.items():
        for target in found:
            assert re.fullmatch(r"https://[a-z0-9.-]+\.[a-z]+(/[^\s<>\"]*)?", target), f"{page.name}: {target}"


def test_pictures_of_the_pages_are_used():
    used = {(page.parent / x).resolve() for page in book.PAGES for x in book.links(page) if x.endswith(".png")}
    assert sorted(set(book.DOCS.rglob("*.png")) - used - set((book.DOCS / "_build").rglob("*.png"))) == []


if __name__ == "__main__":
    for target in sorted({x for found in EXTERNAL.values() for x in found}):
        print(target)
