"""Public packages through the conformance runner: what each codec of theirs breaks, with the least input that shows it.

    python benchmarks/conform.py [--venv FOLDER --only pyturboquant_mse,hqq_kivi --out report/conform --docs docs/conform.md]

Each file in benchmarks/conform/ is a recipe: one pinned package as an object with encode and decode. Packages go where benchmarks/peers.py puts them, a
virtual environment of its own, each into its own folder. Every codec runs in a process of its own with a time and a memory limit. What was found is
written to OUT as JSON, one file a recipe, and as tables to standard output, or between the marks of --docs.
"""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from peers.run import install

from proofs_checks.conform import ForeignError, Subject, report, run

RECIPES = Path(__file__).resolve().parent / "conform"
START, END = "<!-- tables: python benchmarks/conform.py --docs docs/conform.md -->", "<!-- end of tables -->"
#: the classes of faults that are known of public packages, and the properties that find them
KNOWN = {
    "dead sketch": ("unbiased", "no-dead-parts"), "held bits": ("held-bits",), "NaN accepted": ("nan",), "T = 0": ("empty",),
    "scale": ("scale",), "seed": ("seed-collision",), "threads": ("determinism",), "law": ("law", "widths"), "dtype": ("dtype",),
    "neighbours": ("heads", "outlier"),
}  # fmt: skip


def requirement(recipe: Path) -> str:
    found = re.search(r'requirement.*?= "([^"]+)"', recipe.read_text())
    if found is None:
        raise ValueError(f"{recipe}: expected a line with requirement = ...")
    return found[1]


def tables(records: list[dict], missing: dict[str, str]) -> str:
    """Markdown: one row a recipe and known class of faults, then every failure with its least input."""
    head = ["package", "recipe", *KNOWN, "fails", "holds"]
    out = [f"| {' | '.join(head)} |", "|" + "--|" * len(head)]
    for record in records:
        verdicts = {p["property"]: p["verdict"] for p in record["properties"]}
        cells = []
        for properties in KNOWN.values():
            own = [verdicts.get(p, "-") for p in properties]
            cells.append(
                "**found**"
                if "fails" in own
                else "open"
                if "not settled" in own
                else "holds"
                if "holds" in own
                else "-"
            )
        name = Path(record["codec"]["spec"].rpartition(":")[0]).stem
        counts = [str(record["summary"][v]) for v in ("fails", "holds")]
        out.append(f"| {record['codec']['requirement']} | {name} | {' | '.join(cells + counts)} |")
    out += [f"\nNot installed: {name}: {why}" for name, why in missing.items()]
    packages = {r["codec"]["requirement"] for r in records}
    known = [one for properties in list(KNOWN.values())[:5] for one in properties]
    faulty = {
        r["codec"]["requirement"]
        for r in records
        if any(p["verdict"] == "fails" and p["property"] in known for p in r["properties"])
    }
    out.append(
        f"\n{len(faulty)} of {len(packages)} packages have one of the first five (dead sketch, held bits, NaN accepted, T = 0, scale). "
        "-: not asked, as it is not claimed.\n"
    )
    return "\n".join(out) + "\n" + report.rows(records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache" / "kvtheory" / "peers")
    parser.add_argument(
        "--only",
        default="",
        help="recipes, separated by commas; the others' results are taken from OUT where they are there",
    )
    parser.add_argument("--out", type=Path, default=Path("report/conform"))
    parser.add_argument("--docs", type=Path, help="a page whose tables are replaced")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--examples", type=int, default=30)
    options = parser.parse_args()
    recipes = sorted(RECIPES.glob("*.py"))
    chosen = [r for r in recipes if not options.only or r.stem in options.only.split(",")]
    needs = {requirement(r) for r in chosen}
    packages = SimpleNamespace(packages={name: SimpleNamespace(requirement=name) for name in needs})
    python, folders, missing = install(options.venv, [packages])
    options.out.mkdir(parents=True, exist_ok=True)
    for recipe in chosen:
        name = requirement(recipe)
        if name in missing:
            continue
        start = time.monotonic()
        # as a reader of the table would write it
        spec = f"{recipe.relative_to(Path.cwd()) if recipe.is_relative_to(Path.cwd()) else recipe}:Codec"
        subject = Subject(spec, {}, python, (folders[name],), options.timeout)
        try:
            found = run(subject, examples=options.examples)
        except ForeignError as problem:
            print(f"{recipe.stem}: {problem}", file=sys.stderr)
            missing[f"{name} ({recipe.stem})"] = str(problem)
            continue
        record = found.record()
        record["codec"]["requirement"] = name
        (options.out / f"{recipe.stem}.json").write_text(json.dumps(record, indent=1) + "\n")
        print(f"{report.summary(found)}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    records = [json.loads(p.read_text()) for r in recipes if (p := options.out / f"{r.stem}.json").exists()]
    text = tables(records, missing)
    if options.docs is None:
        print(text)
        return
    page = options.docs.read_text()
    before, _, rest = page.partition(START)
    if END not in rest:
        raise SystemExit(f"{options.docs}: expected the lines {START} and {END}")
    options.docs.write_text(f"{before}{START}\n\n{text}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
