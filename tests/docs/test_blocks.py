"""Every block of code in README and docs: Python is run, or compiled and its names looked up; commands are held against the real options.

What a page takes for granted (a cache at hand, a model's weights) is in GIVEN; a block that cannot run here is in STATIC with its reason:
it must compile, its imports of ours must work, and every attribute of ours that it names must be there.
"""

import ast
import contextlib
import fnmatch
import importlib
import io
import os
import re
import shlex
import tomllib

import pytest
import typer
from typer.testing import CliRunner

import proofs_checks
from kvtheory.cli import app
from reference.compare.specs import specs
from tests.docs import book

click = typer.main.get_command(app)
PYTHON = [block for page in book.PAGES for block in book.blocks(page) if book.is_python(block)]
SHELL = [block for page in book.PAGES for block in book.blocks(page) if book.is_shell(block)]
OURS = {"kvtheory", "reference", "gpu", "proofs_checks", "figures"}

#: page -> what stands before its first block
GIVEN = {
    "docs/codecs/prefix-store.md": "import kvtheory, reference\ncache = kvtheory.sample_cache()\ntokens = cache.tokens",
}
#: pages that run a model: a random one of two layers stands for SmolLM2
WITH_A_MODEL = ("docs/codecs/predictive-delta.md", "docs/codecs/token-replay.md")
#: page -> why its blocks are compiled and not run
STATIC = {
    "docs/attention.md": "one call of a class on a stream at hand; tests/kernels/test_attention*.py run it",
    "docs/codecs/kvquant.md": "reads the results of two comparisons of a model",
    "docs/compare.md": "read results, or captures, of a model",
    "docs/conform.md": "imports a public package, which is not installed",
    "docs/gpu.md": "shows how a kernel is written that is not there",
    "docs/hf.md": "generates with a model's weights and tokenizer; tests/reference/hf run the same on tiny ones",
    "docs/import.md": "saves the cache of a model that has just run",
    "docs/scale.md": "starts jobs of a Slurm cluster",
}


def name(block):
    return block.where


def page_of(block):
    return str(block.page.relative_to(book.ROOT))


# -- Python ------------------------------------------------------------------------------------------------------------


def run(blocks, given, folder, **more):
    """The printed lines of blocks run one after another in one namespace, in an empty folder."""
    said, names, before = io.StringIO(), {"__name__": "page", **more}, os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(said):
            exec(compile(given, "given", "exec"), names)
            for block in blocks:
                exec(compile(block.text, block.where, "exec"), names)
    finally:
        os.chdir(before)
    return said.getvalue().splitlines()


RUN = sorted({page_of(block) for block in PYTHON} - set(STATIC))


@pytest.mark.parametrize("page", [p for p in RUN if p not in WITH_A_MODEL])
def test_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path, monkeypatch):
    from reference import codec

    monkeypatch.setattr(codec, "_registered", dict(codec._registered))  # a page registers a codec of its own
    blocks = [block for block in PYTHON if page_of(block) == page]
    lines = run(blocks, GIVEN.get(page, ""), tmp_path)
    promised = re.findall(r"^print\(.*\)  # (.+)$", blocks[-1].text, re.M)
    if page == "README.md":
        held, error = map(float, lines[-1].split()[-2:])
        bits, rounded = re.match(r"([\d.]+) bits per number; ([\d.]+)", promised[-1]).groups()
        assert round(held, 2) == float(bits) and round(error, 2) == float(rounded)
    elif promised:
        assert lines[-1] == promised[-1]
    shown = [b for b in book.blocks(book.ROOT / page) if b.language == "text"]
    if shown:  # what the page says its block prints
        assert lines == shown[0].text.splitlines()


@pytest.mark.parametrize("page", WITH_A_MODEL)
def test_python_of_a_page_runs_on_a_tiny_model(page, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from kvtheory import models
    from tests.models import tiny

    model = tiny.llama()
    caches = [models.capture(model, None, [*tiny.tokens(3), end]) for end in (3, 5)]
    monkeypatch.setattr(models, "load", lambda name: (None, model))
    run([b for b in PYTHON if page_of(b) == page], "", tmp_path, cache=caches[0], other=caches[1])


@pytest.mark.parametrize("block", [b for b in PYTHON if page_of(b) in STATIC], ids=name)
def test_python_that_cannot_run_here_compiles_and_names_what_is_there(block):
    tree = ast.parse(block.text)
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in OURS:
                    found = importlib.import_module(alias.name)
                    known[alias.asname or alias.name.split(".")[0]] = (
                        found if alias.asname else importlib.import_module(alias.name.split(".")[0])
                    )
        elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in OURS:
            source = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(source, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
                known[alias.asname or alias.name] = getattr(source, alias.name)
    for module in OURS | {"compare"}:  # pages leave `import reference` to the reader
        known.setdefault(module, importlib.import_module("reference.compare" if module == "compare" else module))
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in ast.walk(tree):
        chain, inner = [], node
        while isinstance(inner, ast.Attribute):
            chain, inner = [inner.attr, *chain], inner.value
        if chain and isinstance(inner, ast.Name) and inner.id in known and inner.id not in stored:
            found = known[inner.id]
            for part in chain:
                if not isinstance(found, type | type(ast)):
                    break
                assert hasattr(found, part), f"{inner.id}.{'.'.join(chain)}"
                found = getattr(found, part)


def test_pages_that_are_not_run_have_blocks_and_reasons():
    pages = {page_of(block) for block in PYTHON}
    assert set(STATIC) | set(GIVEN) | set(WITH_A_MODEL) <= pages
    assert all(len(reason) > 15 for reason in STATIC.values())


# -- commands ----------------------------------------------------------------------------------------------------------

TARGETS = set(re.findall(r"^([a-z-]+):", (book.ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
EXTRAS = set(
    tomllib.loads((book.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
)
COMMANDS = [(block.where, words) for block in SHELL for words in book.commands(block.text)]
INLINE = [
    (f"{page.relative_to(book.ROOT)}, in the text", words)
    for page in book.PAGES
    for words in book.inline_commands(page)
]


def check_kvtheory(words, whole):
    """Every option is one that there is, with a value that it takes. whole: nothing that is required may be missing."""
    words = [w for w in words if w not in ("...", "--help")]
    if words[:1] == ["--version"]:
        return
    command, name = click, "kvtheory"
    context = typer.Context(command, info_name=name)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        name, words = words[0], words[1:]
        command = command.commands[name]
    assert command is not click, f"no command {words[:1]}"
    try:
        parsed = command.make_context(name, list(words), parent=context)
    except Exception as problem:
        if not whole and (type(problem).__name__ == "MissingParameter" or "requires an argument" in str(problem)):
            return  # the text names a command or an option alone
        raise AssertionError(f"kvtheory {name} {shlex.join(words)}: {problem}") from problem
    values = parsed.params
    if name == "verify":
        ids = list(proofs_checks.claims())
        for glob in values["claim"] or []:
            assert glob == "your/id" or fnmatch.filter(ids, glob), f"no claim matches {glob}"
    if name == "compare":
        for text in filter(None, (values["codecs"], values["baseline"])):
            rates = [float(x) for x in values["bits"].split(",")]
            for spec in specs(text):
                if not spec.fitted and not getattr(spec, "stages", None):
                    options = (
                        {"bits": max(2, int(rates[0])), **spec.options}
                        if "bits" in getattr(spec.codec, "__dataclass_fields__", {})
                        else spec.options
                    )
                    spec.codec(**options)


def check(words, whole):
    tool = words[0]
    if tool == "kvtheory":
        check_kvtheory(words[1:], whole)
    elif tool == "make":
        for word in words[1:]:
            assert word in TARGETS or re.fullmatch(r"(ARGS|T|PYTHON)=.*", word), f"make has no {word}"
    elif tool == "python":
        check_script(words[1:])
    elif tool == "pip":
        for extras in re.findall(r"\[([a-z,]+)\]", " ".join(words)):
            assert set(extras.split(",")) <= EXTRAS


def check_script(words):
    """A script or module of ours is there, and its source knows every option."""
    if words[0] == "-m":
        module = words[1].replace(".", "/")
        path = next((p for p in (book.ROOT / f"{module}.py", book.ROOT / module / "__main__.py") if p.is_file()), None)
        if words[1].split(".")[0] not in ("benchmarks", "tests", *OURS):
            return
        assert path is not None, words[1]
    else:
        path = book.ROOT / words[0]
        assert path.is_file(), words[0]
    source = "".join(
        p.read_text(encoding="utf-8") for p in ([path] if path.stem != "__main__" else path.parent.rglob("*.py"))
    )
    for word in words[1:]:
        if word.startswith("--"):
            assert f'"{word.split("=")[0]}"' in source, f"{path.name} has no {word}"


def test_there_are_commands():
    assert sum(words[0] == "kvtheory" for _, words in COMMANDS) > 40 and len(INLINE) > 20


@pytest.mark.parametrize("where", sorted({where for where, _ in COMMANDS}))
def test_commands_of_a_block_are_real(where):
    for words in (w for at, w in COMMANDS if at == where):
        check(words, whole="..." not in words)


@pytest.mark.parametrize("where", sorted({where for where, _ in INLINE}))
def test_commands_in_the_text_are_real(where):
    for words in (w for at, w in INLINE if at == where):
        check(words, whole=False)


#: commands of the pages that take a second or two: run in one folder, in this order, after the page's Python
QUICK = {
    "docs/start.md": ["kvtheory --version"],
    "docs/howto/verify.md": [
        "kvtheory verify --cache my.safetensors --claim 'transform-coding/key-distortion' --claim 'transform-coding/eviction-error'"
    ],
    "docs/howto/figure.md": [
        "kvtheory verify --claim 'trie/metric' --out report/one",
        "kvtheory figures trie-distances --results report/one --format pdf --style paper",
    ],
    "docs/howto/check-codec.md": ["kvtheory conform --list"],
    "README.md": ["kvtheory models", "kvtheory compare --cache sample --codecs Full,TurboQuant --bits 2,3"],
}


@pytest.mark.parametrize("page", QUICK)
def test_quick_commands_of_a_page_run(page, tmp_path, monkeypatch):
    said = {shlex.join(words) for block in SHELL if page_of(block) == page for words in book.commands(block.text)}
    if page == "docs/howto/verify.md":
        run([block for block in PYTHON if page_of(block) == page], "", tmp_path)
    monkeypatch.chdir(tmp_path)
    for command in QUICK[page]:
        words = shlex.split(command)
        assert shlex.join(words) in said, f"{page} does not say {command}"
        more = (
            ["--no-figures", "--jobs", "1"]
            if words[1] == "compare"
            else ["--no-figures"]
            if words[1] == "verify"
            else []
        )
        done = CliRunner().invoke(app, words[1:] + more)
        assert done.exit_code == 0, done.output
