"""The pages as tests read them: blocks of code, commands, headings, links and tables of Markdown files, without a browser."""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(p for p in DOCS.rglob("*.md") if "_build" not in p.parts), ROOT / "benchmarks" / "README.md"]
)
PAGES = [page for page in PAGES if page.is_file()]

FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2 *$", re.M | re.S)
#: what a command of a page may begin with; the first three are held against their real options
OURS = ("kvtheory", "make", "python")
SHELL = (*OURS, "source", "pip", "dask", "pytest", "gdb", "pipx", "git", "cd", "export")


class Block(NamedTuple):
    """language as the fence says it ("" where it says nothing; "indented" for a block by four spaces), line it starts at, its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Every block of code, fenced or indented, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    prose = list(text)
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[3].strip(), textwrap.dedent(match[4])))
        for at in range(match.start(), match.end()):
            if prose[at] != "\n":
                prose[at] = "x"
    lines, run = "".join(prose).split("\n"), []
    for number, line in enumerate([*lines, "end"], 1):
        blank_before = not run and (number == 1 or not lines[number - 2].strip())
        if line.startswith("    ") and (run or blank_before) and not re.match(r" *([-*|]|\d+\.) ", line):
            run.append((number, line))
        elif run and not line.strip():
            run.append((number, ""))
        elif run:
            body = textwrap.dedent("\n".join(x for _, x in run)).strip("\n") + "\n"
            found.append(Block(page, run[0][0], "indented", body))
            run = []
    return sorted(found, key=lambda block: block.line)


def is_shell(block: Block) -> bool:
    first = block.text.strip().split(maxsplit=1)
    return block.language in ("", "sh", "bash", "shell", "indented") and bool(first) and first[0] in SHELL


def is_python(block: Block) -> bool:
    """Fenced as Python, or indented and made of Python's statements."""
    if block.language == "python":
        return True
    if block.language != "indented" or is_shell(block):
        return False
    try:
        tree = ast.parse(block.text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom | ast.Call) for node in ast.walk(tree))


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block as words; comments and lines that only show output are left out, `\\` joins lines."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0] in SHELL:
            found.append(words)
        elif words:
            raise ValueError(f"expected a command that begins with one of {', '.join(SHELL)}, got {line!r}")
    return found


def inline_commands(page: Path) -> list[list[str]]:
    """`kvtheory ...` and `make ...` between single backticks in the prose."""
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"(?<!`)`((?:kvtheory |make |pip |python -m |python examples/)[^`\n]*)`(?!`)", prose)
    return [shlex.split(command) for command in found]


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def slug(heading: str) -> str:
    """The anchor that GitHub and myst-parser give a heading."""
    plain = re.sub(r"`|\*|\[([^\]]*)\]\([^)]*\)", lambda m: m[1] or "", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def headings(page: Path) -> list[tuple[int, str]]:
    """(level, text) of each heading; those of an included page count as the page's own."""
    text = page.read_text(encoding="utf-8")
    for included in re.findall(r"^```\{include\} (\S+)", text, re.M):
        text += "\n" + (page.parent / included).read_text(encoding="utf-8")
    return [(len(hashes), title) for hashes, title in re.findall(r"^(#+) (.+)$", FENCE.sub("", text), re.M)]


def links(page: Path) -> list[str]:
    """Targets of links and pictures, external ones as well."""
    text = page.read_text(encoding="utf-8")
    pictures = re.findall(r"^```\{(?:image|figure)\} (\S+)", text, re.M)
    return re.findall(r"\]\(([^()\s]+(?:\([^()]*\))?[^()\s]*)\)", without_code(text)) + pictures


def tables(text: str) -> list[list[list[str]]]:
    """Every table as rows of cells, the header first."""
    found: list[list[list[str]]] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if not inside:
            found.append([])
            inside = True
        if not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
            found[-1].append(cells)
    return found
