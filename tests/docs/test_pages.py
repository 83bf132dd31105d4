"""The book's pages have the shape that they promise, and name claims, verdicts, defaults and functions as they are."""

import ast
import dataclasses
import importlib
import inspect
import re

import pytest

import proofs_checks
import reference
from tests.docs import book

CLAIMS = proofs_checks.claims()
PREFIXES = sorted({claim_id.partition("/")[0] for claim_id in CLAIMS})
PAPERS = {"transform-coding.md": "transform-coding/", "risk.md": "risk/", "sequential.md": ""}
PAPER_SHAPE = (
    "In one paragraph",
    "As printed, and what holds",
    "Counterexamples by hand",
    "What to do with it",
    "Measured",
    "What surprised us",
    "Reproduce",
    "Limits",
)
CODEC_SHAPE = ("Algorithm", "Stream and bits", "Defaults", "Pitfalls")
CODEC_PAGES = sorted(p for p in (book.DOCS / "codecs").glob("*.md") if p.name != "index.md")


def sections(page):
    return [title for level, title in book.headings(page) if level == 2]


def in_order(wanted, found):
    places = [next((i for i, title in enumerate(found) if title.startswith(name)), None) for name in wanted]
    return None not in places and places == sorted(places)


@pytest.mark.parametrize("name", PAPERS)
def test_pages_of_papers_have_one_shape(name):
    page = book.DOCS / name
    assert in_order(PAPER_SHAPE, sections(page)), sections(page)
    assert [x for x in book.links(page) if x.endswith(".png")], "no picture"


@pytest.mark.parametrize("name", PAPERS)
def test_statements_as_printed_have_the_registered_verdict(name):
    """A row's verdict is that of its first claim; every claim that it names is in the ledger."""
    text = (
        (book.DOCS / name).read_text(encoding="utf-8").split("\n## As printed, and what holds\n")[1].split("\n## ")[0]
    )
    (header, *rows) = book.tables(text)[0]
    assert [header[2], header[4]] == ["verdict", "claim"] and len(rows) >= 15
    for row in rows:
        ids = [x if "/" in x else PAPERS[name] + x for x in re.findall(r"`([^`]+)`", row[4])]
        assert ids and all(x in CLAIMS for x in ids), row
        assert row[2] == CLAIMS[ids[0]].expected.value, ids[0]
        correction = CLAIMS[ids[0]].correction
        assert correction is None or correction in ids, f"{ids[0]}: its correction {correction} is not in its row"


@pytest.mark.parametrize("name", ["formula.md"])
def test_verdicts_beside_claims(name):
    tables = book.tables((book.DOCS / name).read_text(encoding="utf-8"))
    rows = [row for table in tables if table[0][-2:] == ["claim", "verdict"] for row in table[1:]]
    assert len(rows) >= 5
    for row in rows:
        for claim_id in re.findall(r"`([^`]+)`", row[-2]):
            assert CLAIMS[claim_id].expected.value == row[-1], claim_id


@pytest.mark.parametrize("page", book.PAGES, ids=lambda p: str(p.relative_to(book.ROOT)))
def test_claims_that_pages_name_exist(page):
    named = re.findall(rf"`((?:{'|'.join(PREFIXES)})/[a-z0-9.-]+)`", page.read_text(encoding="utf-8"))
    assert [x for x in named if x not in CLAIMS] == []


@pytest.mark.parametrize("page", CODEC_PAGES, ids=lambda p: p.stem)
def test_pages_of_codecs_have_one_shape(page):
    assert in_order(CODEC_SHAPE, sections(page)), sections(page)
    pitfalls = page.read_text(encoding="utf-8").split("\n## Pitfalls\n")[1].split("\n## ")[0]
    assert len(re.findall(r"^- ", pitfalls, re.M)) >= 2


def own_codecs():
    """Those of the package, without what other tests have registered in this process."""
    return {name: codec for name, codec in reference.codecs().items() if codec.__module__.startswith("reference.")}


def test_every_codec_has_a_page():
    said = {re.search(r"`reference\.(\w+)", page.read_text(encoding="utf-8"))[1] for page in CODEC_PAGES}
    assert said == set(own_codecs()) | {"Pipeline"}


@pytest.mark.parametrize("page", CODEC_PAGES, ids=lambda p: p.stem)
def test_defaults_of_codecs_are_the_ones_in_the_code(page):
    call = re.search(r"`(reference\.[^`]+)`", page.read_text(encoding="utf-8"))[1]
    tree = ast.parse(call.replace(", ...)", ")"), mode="eval").body
    named = ast.unparse(tree.func).split(".")[1:]
    defaults = _defaults(getattr(reference, named[0]), named[1:])
    for argument in tree.keywords:
        said = eval(
            compile(ast.Expression(argument.value), page.name, "eval"),
            own_codecs(),
        )
        assert defaults[argument.arg] == said, f"{page.stem}: {argument.arg}"
    if "..." not in call:
        told = {argument.arg for argument in tree.keywords} | {a.id for a in tree.args if isinstance(a, ast.Name)}
        told.add("digest")  # of a player: what `reference.load` passes on
        assert set(defaults) <= told, f"{page.stem}: the page leaves out {set(defaults) - told}"


def _defaults(codec, method):
    """Default of each argument; of a `fit` that passes options on, those of the codec's fields as well."""
    parameters = inspect.signature(getattr(codec, *method) if method else codec).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        found |= {
            f.name: f.default for f in dataclasses.fields(codec) if "state" not in f.metadata and f.name not in found
        }
    return found


def test_every_page_is_in_the_contents():
    """As Sphinx reads the toctrees of index pages, patterns included."""
    listed = set()
    for index in (book.DOCS / "index.md", book.DOCS / "codecs" / "index.md"):
        for body in re.findall(r"^```\{toctree\}\n(.*?)^```", index.read_text(encoding="utf-8"), re.M | re.S):
            for entry in (line for line in body.splitlines() if line and not line.startswith(":")):
                found = {p.with_suffix("") for suffix in (".md", ".rst") for p in index.parent.glob(entry + suffix)}
                assert found, f"{index}: nothing is called {entry}"
                listed |= found
    pages = {
        p.with_suffix("") for p in [*book.DOCS.rglob("*.md"), *book.DOCS.rglob("*.rst")] if "_build" not in p.parts
    }
    assert sorted(pages - listed - {book.DOCS / "index"}) == []


def test_the_ledger_s_page_names_every_option():
    import typer

    from kvtheory.cli import app

    text = (book.DOCS / "ledger.md").read_text(encoding="utf-8")
    options = [x for p in typer.main.get_command(app).commands["verify"].params for x in (*p.opts, *p.secondary_opts)]
    said = {option for option in options if f"`{option}" in text}
    assert set(options) - said <= {"--figures"}  # what --no-figures turns off


def test_symbols_are_where_the_table_says():
    """The last column of each table: names under kvtheory, reference, or of a record of either."""
    records = {
        name: getattr(importlib.import_module("kvtheory.layer"), name)
        for name in ("Layer", "Head", "Cache", "Decoded", "Rope")
    }
    records["Spectrum"] = importlib.import_module("kvtheory.risk").Spectrum
    checked = 0
    for table in book.tables((book.DOCS / "symbols.md").read_text(encoding="utf-8")):
        assert table[0][-1] == "in code" and len({len(row) for row in table}) == 1
        for row in table[1:]:
            before = ""
            for name in re.findall(r"`([A-Za-z_.]+)[(`]", row[-1]):
                if name in ("index", "weight", "weights"):
                    continue  # arguments and results, named in the row
                before = _resolves(name, records, before)
                checked += 1
    assert checked > 40


def _resolves(name, records, before):
    """The module that `name` was found in; a bare name is looked for where the one before it was."""
    head, _, rest = name.partition(".")
    if head in records:
        own = inspect.signature(records[head]).parameters
        assert not rest or hasattr(records[head], rest) or rest in own, name
        return before
    root = name if head in ("kvtheory", "reference") else f"kvtheory.{name}" if rest else f"{before}.{name}"
    parts = root.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            assert hasattr(found, part), name
            found = getattr(found, part)
        return ".".join(parts[:-1])
    raise AssertionError(name)
