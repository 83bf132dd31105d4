"""Breaks a kernel in every place where breaking it should be seen, and asks its test whether it sees it.

    python -m tests.kernels.mutate turboquant            # gpu/kernels/turboquant.cu by tests/kernels/test_turboquant.py
    python -m tests.kernels.mutate norms.cuh --test tests/kernels/test_qjl.py --only 12-20
    python -m tests.kernels.mutate all --log FILE        # every file; what FILE has of a run before is not run again

A header is tested by the tests of the files that include it, one after the other until one sees the mutant. The last lines are a table by file.

Mutants: each barrier dropped, each comparison that guards moved by one (< and <=, > and >=), each atomic made a plain read and
write. Each runs in a copy of the tree (kernels and tests of this working tree; nothing here is touched) in the checked build.
A mutant that no test sees is killed by a better test, or written down with the reason why it changes nothing, in
tests/kernels/equivalent.md as "- `its name`: reason".
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu.simt.build import with_includes

__all__ = ["Mutant", "mutants"]

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "gpu" / "kernels"
EQUIVALENT = Path(__file__).parent / "equivalent.md"

#: files whose test has another name
_TESTED_BY = {"turboquant_prod.cu": "turboquant"}

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


def tests_of(file: str) -> list[str]:
    """The tests of a file of kernels: its own, or of a header those of all files that it is part of."""
    if file.endswith(".cu"):
        return [f"tests/kernels/test_{_TESTED_BY.get(file, Path(file).stem)}.py"]
    found = [test for name in users(file) for test in tests_of(name)]
    return list(dict.fromkeys(test for test in found if (ROOT / test).exists()))


def users(file: str) -> list[str]:
    """The .cu files that a file is part of."""
    return [p.name for p in sorted(KERNELS.glob("*.cu")) if KERNELS.resolve() / file in with_includes(p)]


_SERVE = """
import os, resource, sys
import hypothesis.extra.numpy, pytest, ml_dtypes, gpu, reference, kvtheory
gpu.codecs(), reference.codecs()
for line in sys.stdin:
    seconds, said, test = line.rstrip("\\n").split("\\t")
    child = os.fork()
    if child == 0:
        # processor time, not the clock: a machine that others use is no fault of a mutant
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
        out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        code = pytest.main(["-x", "-q", "-p", "no:randomly", "-p", "no:xdist", "--tb=short", "--timeout=0", test])
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class _Tests:
    """Runs tests in a tree, each in a process of its own, forked from one that has imported what takes longest."""

    def __init__(self, tree: Path, examples: int) -> None:
        self._said = tree / "said"
        environment = {
            **os.environ, "CI": "1", "PYTHONPATH": str(tree), "KVTHEORY_KERNEL_EXAMPLES": str(examples), "KVTHEORY_KERNEL_SECONDS": "5", "KVTHEORY_CACHE": str(tree / "cache"),
        }  # fmt: skip
        self._server = subprocess.Popen(
            [sys.executable, "-c", _SERVE], cwd=tree, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )  # fmt: skip

    def run(self, test: str, seconds: float) -> tuple[int, str]:
        """How the process ended, and what it said."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{seconds:g}\t{self._said}\t{test}\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline()), self._said.read_text(encoding="utf-8", errors="replace")

    def end(self) -> None:
        self._server.communicate("")


def _verdict(run: _Tests, tests: list[str], seconds: float) -> tuple[str, str]:
    """("killed" | "survives" | "refused", by what), by the first test that sees it."""
    for test in tests:
        verdict, why = _verdict_of(run, test, seconds)
        if verdict != "survives":
            return verdict, why if len(tests) == 1 else f"{Path(test).stem}: {why}"
    return "survives", ""


def _verdict_of(run: _Tests, test: str, seconds: float) -> tuple[str, str]:
    code, out = run.run(test, seconds)
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "killed", f"no end within {seconds:g} s of processor time"
    if code == 0:
        return "survives", ""
    if "BuildError" in out:
        return "refused", "the compiler refuses it"
    if code == 1:
        told = re.findall(r"^E\s+(?:\S+\.)?KernelFault: [^:]*?: ([a-z -]+?)(?: at |:)", out, re.M) or re.findall(
            r"^E\s+(.*)", out, re.M
        )
        return "killed", told[0][:100] if told else "a test fails"
    return ("killed", "the process died") if code < 0 else ("refused", f"pytest ended with {code}: {out[-500:]}")


def _known(log: Path | None) -> dict[str, tuple[str, str]]:
    """Verdicts of a run before, by mutant and digest of its text."""
    if log is None or not log.exists():
        return {}
    lines = (line.split("\t") for line in log.read_text(encoding="utf-8").splitlines())
    return {line[0]: (line[1], line[2]) for line in lines if len(line) >= 3}


def _digest(m: Mutant, file: str, tests: list[str], examples: int) -> str:
    """Of all that a verdict follows from: the mutant, what is compiled with it, the tests and what they share."""
    helpers = sorted(p for p in Path(__file__).parent.glob("*.py") if not p.name.startswith("test_"))
    with_it = {path.name: text for name in users(file) for path, text in with_includes(KERNELS / name).items()}
    read = [p.read_text(encoding="utf-8") for p in [*helpers, *(ROOT / t for t in tests)]]
    texts = [m.text, sorted(with_it.items()), read]
    return hashlib.sha256(repr((m.name, file, examples, texts)).encode()).hexdigest()[:16]


def _run(file: str, given: argparse.Namespace, counts: dict[str, int]) -> None:
    found = list(mutants((KERNELS / file).read_text(encoding="utf-8"), Path(file).name))
    low, _, high = (given.only or f"1-{max(1, len(found))}").partition("-")
    chosen = [(i, m) for i, m in enumerate(found, 1) if int(low) <= i <= int(high or low)]
    if given.list:
        for i, m in chosen:
            print(f"{i:3} line {m.line:4}  {m.name}")
        return
    tests = [given.test] if given.test else tests_of(file)
    excused = EQUIVALENT.read_text(encoding="utf-8") if EQUIVALENT.exists() else ""
    known = _known(given.log)
    with tempfile.TemporaryDirectory(prefix="kvtheory-mutate-") as scratch:
        tree = Path(scratch)
        _copy(tree)
        target = tree / "gpu" / "kernels" / file
        unchanged = target.read_text(encoding="utf-8")
        run, sound = _Tests(tree, given.examples), False
        for i, m in chosen:
            start, digest = time.perf_counter(), _digest(m, file, tests, given.examples)
            verdict, why = known.get(digest, ("", ""))
            if not verdict:
                if not sound and (broken := _verdict(run, tests, given.seconds))[0] != "survives":
                    raise SystemExit(f"{file}: a test fails before anything is changed: {broken[1]}")
                sound = True
                target.write_text(m.text, encoding="utf-8")
                verdict, why = _verdict(run, tests, given.seconds)
                target.write_text(unchanged, encoding="utf-8")
                if given.log is not None:
                    with given.log.open("a", encoding="utf-8") as log:
                        log.write("\t".join((digest, verdict, why.replace("\t", " "), m.name)) + "\n")
            if verdict == "survives" and f"`{m.name}`" in excused:
                verdict, why = "equivalent", "see equivalent.md"
            counts[verdict] += 1
            print(
                f"{i:3} {verdict:10} {time.perf_counter() - start:5.1f} s  line {m.line:4}  {m.name}  {why}", flush=True
            )
        run.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="names in gpu/kernels, with or without .cu; all: every one")
    parser.add_argument("--test", help="default: tests/kernels/test_NAME.py")
    parser.add_argument("--only", help="numbers of mutants, as 3 or 3-9")
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--seconds", type=float, default=300, help="of processor time, for one test of a mutant")
    parser.add_argument("--examples", type=int, default=100, help="of hypothesis for each test of a mutant")
    parser.add_argument(
        "--log", type=Path, help="verdicts are kept here, and taken from here while nothing has changed"
    )
    given = parser.parse_args()
    names = [f if Path(f).suffix else f"{f}.cu" for f in given.files]
    if given.files == ["all"]:
        names = [p.name for p in [*sorted(KERNELS.glob("*.cu")), *sorted(KERNELS.glob("*.cuh"))]]
    table = {}
    for file in names:
        table[file] = dict.fromkeys(("killed", "equivalent", "refused", "survives"), 0)
        _run(file, given, table[file])
    if given.list:
        return 0
    print("\n| file | mutants | seen | change nothing | not compiled | not seen |\n|---|---|---|---|---|---|")
    for file, counts in table.items():
        print(f"| {file} | {sum(counts.values())} | " + " | ".join(str(n) for n in counts.values()) + " |")
    wrong = sum(counts["survives"] + counts["refused"] for counts in table.values())
    print(f"\n{sum(sum(counts.values()) for counts in table.values())} mutants, {wrong} not seen or not compiled")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
