"""Verify the claims on your own model's cache: capture it, check every claim that looks at a real cache, print what holds.

    python examples/verify_your_model.py                                   # SmolLM2-135M where torch and its weights are there, else the embedded cache
    python examples/verify_your_model.py --model path/to/model --text novel.txt --layers 2,-4
    python examples/verify_your_model.py --cache my.safetensors            # a cache that is there already (`kvtheory capture`, `kvtheory import`)

One to two minutes on two cores for two layers. Everything goes into one folder (--out); stopped, it goes on where it was when the same command is given again.
Expected verdicts were committed on the embedded cache: another verdict on yours is a finding, and is printed first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

#: claims that look at the real cache; those of the other papers' parts look at languages and saved tables
CLAIMS = (
    "transform-coding/*",
    "risk/*",
    "quantizers/*",
    "sharing/residual-of-aligned-tails",
    "trie/retrieval-is-longest-prefix",
)
ORDER = ("holds", "holds under assumptions", "fails as stated", "not settled", "not run")


def kvtheory(*words: str) -> int:
    """A command of ours in a process of its own, as from a terminal; its exit status."""
    print(f"\n$ kvtheory {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, "-m", "kvtheory", *words], check=False).returncode


def captured(options: argparse.Namespace) -> str:
    """The cache to verify: the file named, a capture of the model, or "sample"."""
    if options.cache:
        return str(options.cache)
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed (pip install -e '.[real]'): the embedded cache stands for your model's")
        return "sample"
    from kvtheory import models

    if options.model in models.MODELS and not models.available(options.model):
        print(
            f"no weights of {options.model} here (kvtheory models fetch {options.model}): the embedded cache stands for your model's"
        )
        return "sample"
    asked = {name: str(getattr(options, name)) for name in ("model", "text", "tokens", "layers")}
    path, note = options.out / "cache.safetensors", options.out / "cache.json"
    if path.is_file() and note.is_file() and json.loads(note.read_text()) == asked:
        print(f"{path} is there already: {asked}")
        return str(path)
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    if status := kvtheory("capture", *words, "--queries", "128", "--out", str(path)):
        raise SystemExit(status)
    note.write_text(json.dumps(asked))
    return str(path)


def verify(options: argparse.Namespace, cache: str) -> dict:
    """The ledger of the claims on this cache. Goes on with what an interrupted run has finished, if nothing has changed since."""
    words = ["verify", "--cache", cache, "--budget", options.budget, "--jobs", str(options.jobs)]
    for claim in options.claims.split(","):
        words += ["--claim", claim]
    folder = options.out / "verify"
    # 2: the folder is of another cache, seed or version of the sources, and cannot be gone on with
    resumed = (folder / "claims").is_dir() and kvtheory(*words, "--resume", str(folder)) != 2
    if not resumed:
        kvtheory(*words, "--out", str(folder))
    return json.loads((folder / "ledger.json").read_text(encoding="utf-8"))


def told(ledger: dict, name: str) -> list[str]:
    """The summary, a line each: what differs first, then by verdict, each claim with what was seen on this cache."""
    seen = []
    for claim in ledger["claims"]:
        on_it = [e for e in claim["evidence"] if f"{name} layer" in e["ran_on"]]
        if on_it or claim["verdict"] != claim["expected"]:
            seen.append((claim, on_it))
    differ = [claim for claim, _ in seen if claim["verdict"] not in (claim["expected"], "not run")]
    lines = [
        f"{len(seen)} of {len(ledger['claims'])} claims looked at {name}; {len(differ)} of them end otherwise than on the embedded cache"
    ]
    lines += [f"  FINDING  {c['id']}: {c['verdict']}, expected {c['expected']}" for c in differ]
    for verdict in ORDER:
        group = [(claim, on_it) for claim, on_it in seen if claim["verdict"] == verdict]
        if group:
            lines.append(f"{verdict}:")
        for claim, on_it in group:
            part = sum(e["agrees"] is True for e in on_it)
            statement = claim["statement"].removeprefix("A statement of our own. ")
            lines.append(
                f"  {claim['id']:42} {part:3} of {len(on_it):3} comparisons on it agree   {textwrap.shorten(statement, 110, placeholder=' …')}"
            )
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol", help="a name of `kvtheory models`, a folder or a hub id")
    parser.add_argument("--text", default="hamlet", help="what it reads: a text's name in kvtheory, or a file")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--layers", default="2,-12", help="which layers; negative from the end")
    parser.add_argument("--cache", type=Path, help="a captured cache, in place of a model")
    parser.add_argument("--claims", default=",".join(CLAIMS), help="globs of claims, comma-separated")
    parser.add_argument("--budget", choices=("quick", "full"), default="quick")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("report/your-model"))
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    options.out.mkdir(parents=True, exist_ok=True)
    cache = captured(options)
    ledger = verify(options, cache)
    name = ledger["cache_meta"].get("model", cache)
    print()
    print("\n".join(told(ledger, name)))
    print(f"\nevery number: {options.out / 'verify' / 'index.html'}   ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
