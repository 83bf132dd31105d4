"""docs/api.rst has every public name: of kvtheory and its modules, reference, gpu, proofs_checks and figures; and nothing that is not there."""

import importlib
import inspect
import re

import pytest

import kvtheory
from tests.docs import book

DIRECTIVE = re.compile(r"^\.\. auto(module|class|function|exception|data):: (\S+)\n((?:   :.*\n)*)", re.M)
ROOTS = {
    "kvtheory": [],
    **{f"kvtheory.{name}": [] for name in kvtheory._MODULES},
    "kvtheory.interop": [],
    "kvtheory.prediction.mixture": [],
    "reference": [],
    "reference.hf": [],
    "reference.compare": [],
    "gpu": [],
    "proofs_checks": [],
    "proofs_checks.conform": [],
    "figures": [],
}
#: names that are values, and are said in a docstring or a page
VALUES = (int, float, str, tuple, list, dict, frozenset, set, bytes)


def resolved(name):
    """The object of a dotted name; where a module and what it defines have one name, as reference.hf.attach, the latter."""
    parts = name.split(".")
    found, path = importlib.import_module(parts[0]), parts[0]
    for part in parts[1:]:
        path += f".{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


def documented():
    """ids of the objects that the page documents."""
    found = {}
    pages = [book.DOCS / "api.rst", book.DOCS / "hf.md"]
    for kind, name, options in (
        match.groups() for page in pages for match in DIRECTIVE.finditer(page.read_text(encoding="utf-8") + "\n")
    ):
        thing = importlib.import_module(name) if kind == "module" else resolved(name)
        found[id(thing)] = name
        if kind != "module":
            continue
        members = re.search(r":members:(.*)", options)
        left_out = set(re.sub(r"[,\s]+", " ", (re.search(r":exclude-members:(.*)", options) or ["", ""])[1]).split())
        if members is None:
            continue
        chosen = [x.strip() for x in members[1].split(",") if x.strip()] or getattr(thing, "__all__", None)
        if chosen is None:
            chosen = [
                n for n, v in vars(thing).items() if not n.startswith("_") and getattr(v, "__module__", None) == name
            ]
        for member in chosen:
            if member not in left_out:
                found[id(getattr(thing, member))] = f"{name}.{member}"
    return found


FOUND = documented()


@pytest.mark.parametrize("root", ROOTS)
def test_every_public_name_is_in_the_page(root):
    module = importlib.import_module(root)
    missing = []
    for name in getattr(module, "__all__", []):
        thing = getattr(module, name)
        if name.startswith("__") or isinstance(thing, VALUES) or not hasattr(thing, "__doc__"):
            continue
        if inspect.ismodule(thing) and (thing.__name__ in ROOTS or thing.__name__.split(".")[0] != root.split(".")[0]):
            continue  # its own row
        if id(thing) not in FOUND:
            missing.append(name)
    assert missing == []


def test_every_codec_and_kernel_codec_is_in_the_page():
    import gpu
    import reference

    # other tests register codecs in this process
    ours = {name: codec for name, codec in reference.codecs().items() if codec.__module__.startswith("reference.")}
    codecs = {**ours, **{f"gpu {name}": codec for name, codec in gpu.codecs().items()}}
    assert [name for name, codec in codecs.items() if id(codec) not in FOUND] == []


def test_what_the_page_documents_has_a_docstring():
    assert len(FOUND) > 250
    bare = []
    for name in FOUND.values():
        thing = resolved(name)
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not (inspect.getdoc(thing) or "").strip():
            bare.append(name)
    assert bare == []
