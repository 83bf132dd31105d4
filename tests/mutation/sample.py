"""Which mutants: those of cosmic-ray's operators in a package's sources, and the fixed random sample of them that is tried.

A mutant's name is a hash of what it changes (module, definition, operator, text of its lines, which one of several alike), not of
where that stands: lines added above it leave the name. The sample of a package is the mutants of the least names, so it is random,
the same on every machine, and an edit changes only the part of it that the edit touches. A larger sample holds the smaller one.

Left out before the draw, because no test could tell them: what stands in an annotation (`from __future__ import annotations`
never evaluates it), and a second mutant that gives the same text.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: package: (sources, tests that are about it)
THEORY = {
    "kvtheory.distortion": ("kvtheory/distortion", "distortion coherent jensen metrics tokens"),
    "kvtheory.transform": ("kvtheory/transform", "transform"),
    "kvtheory.rate": ("kvtheory/rate", "rate tables entropy_coded"),
    "kvtheory.entropy": ("kvtheory/entropy.py", "entropy mixture"),
    "kvtheory.trie": ("kvtheory/trie.py", "trie"),
    "kvtheory.risk": ("kvtheory/risk", "risk laws minimax"),
    "kvtheory.balancing": ("kvtheory/balancing", "balancing"),
    "kvtheory.attention": ("kvtheory/attention.py", "attention"),
}
PACKAGES = {
    name: (source, [f"tests/theory/test_{test}.py" for test in tests.split()])
    for name, (source, tests) in THEORY.items()
} | {"reference": ("reference", ["tests/reference"])}


@dataclass(frozen=True)
class Mutant:
    """name: 12 hex digits. lines: (first, last) of the statement it is in, 1-based; None: outside all functions, where an import runs it."""

    name: str
    module: str
    operator: str
    occurrence: int
    line: int
    was: str
    becomes: str
    lines: tuple[int, int] | None


def sources(root: Path, package: str) -> list[Path]:
    """The package's files; of `reference` those at the top, one a codec, and what they share."""
    where = root / PACKAGES[package][0]
    if where.is_file():
        return [where]
    return sorted(where.glob("*.py") if package == "reference" else where.rglob("*.py"))


def _annotations(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    found = []
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        found += [
            ((p.lineno, p.col_offset), (p.end_lineno, p.end_col_offset)) for p in parts if isinstance(p, ast.expr)
        ]
    return found


def _statements(tree: ast.AST) -> list[tuple[int, int, bool]]:
    """(first line, last line, whether inside a function) of each statement; of a compound one its head alone."""
    found: list[tuple[int, int, bool]] = []

    def walk(node: ast.AST, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                first = min([child.lineno, *(d.lineno for d in getattr(child, "decorator_list", []))])
                body = getattr(child, "body", None)
                last = max(first, body[0].lineno - 1) if body else child.end_lineno or first
                found.append((first, max(last, child.lineno), inside))
            walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    walk(tree, False)
    return found


def _of_file(root: Path, path: Path) -> Iterator[Mutant]:
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.ast.ast_query import ASTQuery

    text = path.read_text(encoding="utf-8")
    lines, tree, parsed = text.splitlines(), ast.parse(text), get_ast(text)
    skipped, statements = _annotations(tree), _statements(tree)
    module = path.relative_to(root).as_posix()
    seen: Counter[str] = Counter()
    for operator_name in sorted(cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(operator_name)
        if operator.arguments() or operator_name.endswith("NoOp"):
            continue
        positions = (
            (node, start, end) for node in ast_nodes(parsed) for start, end in operator().mutation_positions(node)
        )
        for occurrence, (node, start, end) in enumerate(positions):
            if any(low <= start and end <= high for low, high in skipped):
                continue
            definition = ASTQuery(node).get_definition_name() or ""
            was = "\n".join(lines[start[0] - 1 : end[0]]).strip()
            key = "\0".join((module, definition, operator_name, was))
            seen[key] += 1
            name = hashlib.sha256(f"{key}\0{seen[key]}".encode()).hexdigest()[:12]
            within = [s for s in statements if s[0] <= start[0] <= s[1]]
            first, last, inside = max(within, key=lambda s: (s[0], -s[1])) if within else (start[0], end[0], False)
            yield Mutant(
                name, module, operator_name.rpartition("/")[2], occurrence, start[0], was, "", (first, last) if inside else None
            )  # fmt: skip


def text_of(root: Path, mutant: Mutant) -> str | None:
    """The module's text with the mutant in it; None where that is no other text, or none that compiles."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    whole = next(n for n in cosmic_ray.plugins.operator_names() if n.rpartition("/")[2] == mutant.operator)
    text = (root / mutant.module).read_text(encoding="utf-8")
    changed = mutate_code(text, cosmic_ray.plugins.get_operator(whole)(), mutant.occurrence)
    if changed is None or changed == text:
        return None
    try:
        compile(changed, mutant.module, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return changed


def changed_lines(before: str, after: str) -> str:
    """What the changed lines have become."""
    old, new = before.splitlines(), after.splitlines()
    first = next((i for i, (a, b) in enumerate(zip(old, new)) if a != b), min(len(old), len(new)))
    back = 0
    while back < min(len(old), len(new)) - first and old[-1 - back] == new[-1 - back]:
        back += 1
    return "\n".join(new[first : len(new) - back]).strip()


def draw(root: Path, package: str, size: int) -> tuple[list[tuple[Mutant, str]], int]:
    """([(mutant, text of its module)], in the order in which they are tried; how many there were to draw from)."""
    mutants = sorted((m for path in sources(root, package) for m in _of_file(root, path)), key=lambda m: m.name)
    drawn: list[tuple[Mutant, str]] = []
    texts: set[tuple[str, str]] = set()
    for mutant in mutants:
        if len(drawn) == size:
            break
        text = text_of(root, mutant)
        if text is None or (mutant.module, text) in texts:
            continue
        texts.add((mutant.module, text))
        becomes = changed_lines((root / mutant.module).read_text(encoding="utf-8"), text)
        drawn.append((Mutant(**{**mutant.__dict__, "becomes": becomes}), text))
    return drawn, len(mutants)
