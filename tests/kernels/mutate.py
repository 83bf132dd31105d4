"""Breaks a kernel in every place where breaking it should be seen, and asks its test whether it sees it.

    python -m tests.kernels.mutate turboquant            # gpu/kernels/turboquant.cu by tests/kernels/test_turboquant.py
    python -m tests.kernels.mutate norms.cuh --test tests/kernels/test_qjl.py --only 12-20

Mutants: each barrier dropped, each comparison that guards moved by one (< and <=, > and >=), each atomic made a plain read and
write. Each runs in a copy of the tree (kernels and tests of this working tree; nothing here is touched) in the checked build.
A mutant that no test sees is killed by a better test, or written down with the reason why it changes nothing, in
tests/kernels/equivalent.md as "- `its name`: reason".
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "mutants"]

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "gpu" / "kernels"
EQUIVALENT = Path(__file__).parent / "equivalent.md"

_PLAIN = """
template <class T, class V> __device__ inline T plain_Add(T* p, V v) { const T old = *p; *p = T(old + v); return old; }
template <class T, class V> __device__ inline T plain_Sub(T* p, V v) { const T old = *p; *p = T(old - v); return old; }
template <class T, class V> __device__ inline T plain_Or(T* p, V v) { const T old = *p; *p = T(old | v); return old; }
template <class T, class V> __device__ inline T plain_And(T* p, V v) { const T old = *p; *p = T(old & v); return old; }
template <class T, class V> __device__ inline T plain_Xor(T* p, V v) { const T old = *p; *p = T(old ^ v); return old; }
template <class T, class V> __device__ inline T plain_Min(T* p, V v) { const T old = *p; if (T(v) < old) *p = T(v); return old; }
template <class T, class V> __device__ inline T plain_Max(T* p, V v) { const T old = *p; if (T(v) > old) *p = T(v); return old; }
template <class T, class V> __device__ inline T plain_Exch(T* p, V v) { const T old = *p; *p = T(v); return old; }
template <class T, class C, class V> __device__ inline T plain_CAS(T* p, C c, V v) { const T old = *p; if (old == T(c)) *p = T(v); return old; }
#line 1
"""
_BARRIER = re.compile(r"\b(__syncthreads|__syncwarp)\s*\(([^;]*?)\)\s*;")
_COMPARISON = re.compile(r"(?<=\s)(<=|>=|<|>)(?=\s)")
_ATOMIC = re.compile(r"\batomic(Add|Sub|Or|And|Xor|Min|Max|Exch|CAS)\s*\(")
_MOVED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}


@dataclass(frozen=True)
class Mutant:
    """One changed source. name: stable while the line's text stays, wherever it moves to."""

    name: str
    line: int
    text: str


def _blank(text: str) -> str:
    """The text with comments, strings, preprocessor lines and template heads blanked out, every character at its place."""

    def spaces(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", spaces, text, flags=re.S)
    text = re.sub(r"^[ \t]*#[^\n]*(?:\\\n[^\n]*)*", spaces, text, flags=re.M)
    text = re.sub(r"\bstatic_assert\s*\([^;]*;", spaces, text)
    for head in reversed(list(re.finditer(r"\btemplate\s*<", text))):
        depth, end = 1, head.end()
        while depth and end < len(text):
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            end += 1
        text = text[: head.start()] + re.sub(r"[^\n]", " ", text[head.start() : end]) + text[end:]
    return text


def _heads(code: str) -> list[tuple[int, int]]:
    """Where the parentheses of if, for and while begin and end."""
    found = []
    for m in re.finditer(r"\b(?:if|for|while)\s*(?:constexpr\s*)?\(", code):
        depth, end = 1, m.end()
        while depth and end < len(code):
            depth += {"(": 1, ")": -1}.get(code[end], 0)
            end += 1
        found.append((m.start(), end))
    return found


def mutants(text: str, file: str) -> Iterator[Mutant]:
    """All mutants of a source, in the order of their lines."""
    code = _blank(text)
    changes = []
    for m in _BARRIER.finditer(code):
        changes.append((m.start(), m.end(), ";", f"no {m[1]}"))
    heads = _heads(code)
    for m in _COMPARISON.finditer(code):
        # a sign (x < 0 ? -x : x) is no guard: with or without the zero, it is the same
        if re.match(r"\s*0\s*[),;:?&|]", code[m.end() :]) and not any(a < m.start() < b for a, b in heads):
            continue
        changes.append((m.start(), m.end(), _MOVED[m[1]], f"{m[1]} becomes {_MOVED[m[1]]}"))
    for m in _ATOMIC.finditer(code):
        changes.append((m.start(), m.end(), f"plain_{m[1]}(", f"atomic{m[1]} becomes plain"))
    taken: dict[str, int] = {}
    for start, end, new, what in sorted(changes):
        line = text.count("\n", 0, start) + 1
        name = f"{file}: {text.splitlines()[line - 1].split('//')[0].strip()} [{what}]"
        taken[name] = taken.get(name, 0) + 1
        numbered = name if taken[name] == 1 else f"{name} #{taken[name]}"
        body = text[:start] + new + text[end:]
        if new.startswith("plain_"):
            after = body.index("\n", body.rfind("#include")) if "#include" in body else 0
            first = body.count("\n", 0, after) + 1
            body = body[:after] + _PLAIN.replace("#line 1", f"#line {first + 1}").rstrip("\n") + body[after:]
        yield Mutant(numbered, line, body)


def _copy(to: Path) -> None:
    """A tree whose gpu/ and tests/ are copies and whose rest is this one's."""
    hidden = shutil.ignore_patterns("__pycache__", "vectors")
    for part in ("gpu", "tests"):
        shutil.copytree(ROOT / part, to / part, ignore=hidden)
    for part in ("kvtheory", "reference", "proofs_checks", "figures", "pyproject.toml", "tests/vectors"):
        if (ROOT / part).exists():
            (to / part).symlink_to(ROOT / part)


def _verdict(tree: Path, test: str, seconds: float, examples: int) -> tuple[str, str]:
    """("killed" | "survives" | "refused", by what)."""
    environment = {
        **os.environ,
        "CI": "1",
        "PYTHONPATH": str(tree),
        "KVTHEORY_KERNEL_EXAMPLES": str(examples),
        "KVTHEORY_CACHE": str(tree / "cache"),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:xdist", "--tb=short", test]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return "killed", f"no end within {seconds:g} s"
    out = done.stdout + done.stderr
    if done.returncode == 0:
        return "survives", ""
    if "BuildError" in out:
        return "refused", "the compiler refuses it"
    if done.returncode == 1:
        told = re.findall(r"^E\s+(?:\S+\.)?KernelFault: [^:]*?: ([a-z -]+?)(?: at |:)", out, re.M) or re.findall(
            r"^E\s+(.*)", out, re.M
        )
        return "killed", told[0][:100] if told else "a test fails"
    return (
        ("killed", "the process died")
        if done.returncode < 0
        else ("refused", f"pytest ended with {done.returncode}: {out[-500:]}")
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="name in gpu/kernels, with or without .cu")
    parser.add_argument("--test", help="default: tests/kernels/test_NAME.py")
    parser.add_argument("--only", help="numbers of mutants, as 3 or 3-9")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--seconds", type=float, default=300, help="for one mutant")
    parser.add_argument("--examples", type=int, default=100, help="of hypothesis for each test of a mutant")
    given = parser.parse_args()
    file = given.file if Path(given.file).suffix else f"{given.file}.cu"
    found = list(mutants((KERNELS / file).read_text(encoding="utf-8"), Path(file).name))
    low, _, high = (given.only or f"1-{len(found)}").partition("-")
    chosen = [(i, m) for i, m in enumerate(found, 1) if int(low) <= i <= int(high or low)]
    if given.list:
        for i, m in chosen:
            print(f"{i:3} line {m.line:4}  {m.name}")
        return 0
    test = given.test or f"tests/kernels/test_{Path(file).stem}.py"
    excused = EQUIVALENT.read_text(encoding="utf-8") if EQUIVALENT.exists() else ""
    counts = {"killed": 0, "equivalent": 0, "refused": 0, "survives": 0}
    with tempfile.TemporaryDirectory(prefix="kvtheory-mutate-") as scratch:
        tree = Path(scratch)
        _copy(tree)
        verdict, why = _verdict(tree, test, given.seconds, given.examples)
        if verdict != "survives":
            print(f"the test fails before anything is changed: {why}")
            return 2
        target = tree / "gpu" / "kernels" / file
        unchanged = target.read_text(encoding="utf-8")
        for i, m in chosen:
            start = time.perf_counter()
            target.write_text(m.text, encoding="utf-8")
            verdict, why = _verdict(tree, test, given.seconds, given.examples)
            target.write_text(unchanged, encoding="utf-8")
            if verdict == "survives" and f"`{m.name}`" in excused:
                verdict, why = "equivalent", "see equivalent.md"
            counts[verdict] += 1
            print(
                f"{i:3} {verdict:10} {time.perf_counter() - start:5.1f} s  line {m.line:4}  {m.name}  {why}", flush=True
            )
    print(", ".join(f"{n} {verdict}" for verdict, n in counts.items()))
    return 1 if counts["survives"] or counts["refused"] else 0


if __name__ == "__main__":
    sys.exit(main())
