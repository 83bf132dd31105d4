"""What reducing a cache costs up to 131,072 tokens, and its attention risk beside goodpoints' Compress++, all in one run.

    python benchmarks/risk.py [--full --captures FILE ... --venv FOLDER --seeds 10]

Cost: a synthetic head (keys and values that move slowly over the tokens, channels of decaying size, one sink), 128 queries. Every
measurement is a process of its own with one thread: processor seconds, and the most memory that the process held, NumPy and the
input included. Reducers get the coordinates of the profiles in their 256 leading directions, and keep one token in 16.

Risk: real heads (the embedded cache; with --captures those too), n = 4^k tokens, later queries that see them all, every second one
for the choice and the others for the test. Twice: of all tokens, and with the first four, the attention sinks, kept as they are by
every method beside its n. goodpoints and we get the same array: profiles of the first queries in at most 256
directions. goodpoints' kernel is a Gaussian on it or on standardised (k, v), bandwidths from 1/4 to 256 times the mean squared
distance. Of the twelve the best counts, head by head: once the best on the first queries, which is what one can know, and once the
best on the test queries, which is more than one can. goodpoints gives each token one weight, may take a token twice, and picks the
best of its own candidates; ours are single unbiased draws with no parameter chosen, but for "best of 16 draws", the one of least
linear risk on the first queries. Compress++ returns sqrt(n) tokens; kernel thinning itself (kt.thin, whole kernel matrix, up to 256
tokens) n/8.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

REQUIREMENTS = ("goodpoints==0.6.3", "numpy==2.4.6")
QUICK, FULL = (4096, 8192, 16384), (4096, 16384, 65536, 131072)
RANK, QUERIES, PROTECT, SHARE = 256, 128, 64, 16
SINKS = 4
#: most tokens that plain kernel thinning is run on: it takes n^2 kernel values in Python for each kernel
KERNEL_THINNING = 256
BANDWIDTHS = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
#: name in the table -> options of balancing.sample for K tokens
OURS = {
    "srs": lambda K: dict(method="srs"),
    "stratified, 4 directions": lambda K: dict(method="stratified", protect=4),
    "halving": lambda K: dict(method="halving"),
    "cluster": lambda K: dict(method="cluster"),
    "cube, m = K/4": lambda K: dict(method="cube", protect=K // 4),
    "cube, m = K/4, by norm": lambda K: dict(method="cube", protect=K // 4, probability="norm"),
    "cube, m = K/4, by norm, best of 16 draws": lambda K: dict(method="cube", protect=K // 4, probability="norm"),
    "spectral, m = K/6": lambda K: dict(method="spectral", protect=K // 6),
    "spectral, m = K/6, by norm": lambda K: dict(method="spectral", protect=K // 6, probability="norm"),
}
#: of so many the one of least linear risk on the first queries
DRAWS = 16
CLAIMED = ("halving", "cube, m = K/4", "cube, m = K/4, by norm", "cube, m = K/4, by norm, best of 16 draws")
POINTS = ("profiles", "kv")


def synthetic(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q (128, 64), k (n, 64), v (n, 64)."""
    from scipy.signal import lfilter

    from kvtheory.randomness import generator

    rng = generator(0, "benchmarks/risk.py head")
    slow = lfilter([np.sqrt(1 - 0.9**2)], [1, -0.9], rng.standard_normal((n, 128)), axis=0)
    scale = 2 * np.arange(1, 65) ** -0.5
    k, v = slow[:, :64] * scale, slow[:, 64:] * np.exp(0.5 * rng.standard_normal((n, 1)))
    q = 2 * rng.standard_normal((QUERIES, 64))
    k[0], v[0] = 4 * q.mean(axis=0), 0.01 * v[0]
    return q, k, v


# --- workers


def cost(what: str, n: int, folder: str) -> dict[str, float]:
    from kvtheory import balancing, risk

    features = Path(folder, f"{n}.npy")
    if what in ("spectrum", "features"):
        head = synthetic(n)
        start = time.process_time()
        if what == "spectrum":
            risk.spectrum(*head, rank=RANK)
        else:
            found = risk.profile_features(*head, RANK)
        seconds = time.process_time() - start
        if what == "features":
            np.save(features, found.coordinates)
    else:
        x = np.load(features)
        protect = {"cube": PROTECT, "spectral": PROTECT, "stratified": 4}.get(what, 0)
        start = time.process_time()
        balancing.sample(x, n // SHARE, what, protect)
        seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    return {"seconds": seconds, "gigabytes": peak}


def _gaussian(y: np.ndarray, X: np.ndarray, width: float) -> np.ndarray:
    return np.exp(-((X - y) ** 2).sum(axis=1) / width)


def peer(file: str) -> dict[str, Any]:
    """What goodpoints chooses of the arrays of one head, for every kind of points, bandwidth and seed; runs in its environment."""
    from goodpoints import compress, kt

    given = np.load(file)
    results: list[dict[str, Any]] = []
    for points in POINTS:
        x = np.ascontiguousarray(given[points])
        square = 2 * x.var(axis=0).sum()  # mean ||x - x'||^2
        for factor in BANDWIDTHS:
            width = np.array([factor * square])
            kernel = partial(_gaussian, width=factor * square)
            for what in ("Compress++ g=2", "kernel thinning")[: 1 if len(x) > KERNEL_THINNING else 2]:
                index, start = [], time.process_time()
                for seed in given["seeds"][: None if what.startswith("C") else 3]:
                    if what.startswith("C"):
                        # four bins, the package's default; gaussian: exp(-||x - y||^2 / k_params)
                        index.append(compress.compresspp_kt(x, b"gaussian", k_params=width, g=2, seed=int(seed)))
                    else:
                        index.append(kt.thin(x, 3, kernel, kernel, seed=int(seed), store_K=True, unique=False))
                seconds = (time.process_time() - start) / len(index)
                results.append(
                    {
                        "what": what,
                        "points": points,
                        "factor": factor,
                        "seconds": seconds,
                        "index": [np.asarray(i).tolist() for i in index],
                    }
                )
    return {"results": results}


# --- the run


def ask(python: str, *arguments: str) -> Any:
    done = subprocess.run([python, __file__, *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    return json.loads(done.stdout)


def costs(sizes: tuple[int, ...]) -> None:
    from kvtheory.balancing import METHODS

    print(
        "| tokens | "
        + " | ".join(f"{n:,}" for n in sizes)
        + " | doubling time | doubling memory |\n|--|"
        + "--|" * (len(sizes) + 2)
    )
    with tempfile.TemporaryDirectory() as folder:
        for what in ("spectrum", "features", *METHODS):
            row = []
            for n in sizes:
                row.append(ask(sys.executable, "--cost", what, str(n), folder))
                print(f"{what}, {n:,} tokens: {row[-1]}", file=sys.stderr, flush=True)
            if any("error" in r for r in row):
                print(f"| {what} | FAILED: {next(r['error'] for r in row if 'error' in r)} |")
                continue
            doublings = np.log2(sizes[-1] / sizes[-2])
            ratios = [(row[-1][x] / row[-2][x]) ** (1 / doublings) for x in ("seconds", "gigabytes")]
            cells = [f"{r['seconds']:.2f} s, {r['gigabytes']:.2f} GB" for r in row]
            print(f"| {what} | " + " | ".join(cells) + f" | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def heads(
    cache: Any, layers: tuple[int, ...], n: int, after: int
) -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """(name, queries to choose by, queries to test by, k, v): the first n + 4 tokens, queries of later positions up to n + after."""
    found = []
    for layer in (cache[i] for i in layers):
        for h in range(layer.kv_heads):
            late = (layer.query_positions >= n + SINKS) & (layer.query_positions < n + after)
            group = layer.query_heads // layer.kv_heads
            q = layer.queries[h * group : (h + 1) * group, late].astype(np.float64)
            choose, test = (q[:, i::2].reshape(-1, q.shape[-1]) for i in (0, 1))
            k, v = (x[h, : n + SINKS].astype(np.float64) for x in (layer.keys, layer.values))
            found.append((f"{cache.meta.get('model', 'model')} layer {layer.index} head {h}", choose, test, k, v))
    return found


def compare(python: str, chosen: list[Any], seeds: int, sinks: int) -> dict[str, dict[str, list[float]]]:
    """{size|method: {"risk": mean over seeds of the risk over E||A_P||^2, head by head; "seconds": the same}}.

    The first `sinks` tokens keep their weight 1/n; the others, 4^k of them, are what is reduced.
    """
    from kvtheory import balancing, risk
    from kvtheory.risk.profiles import means

    table: dict[str, dict[str, list[float]]] = {}

    def note(name: str, error: float, seconds: float) -> None:
        row = table.setdefault(name, {"risk": [], "seconds": []})
        row["risk"].append(error)
        row["seconds"].append(seconds)

    for name, choose, test, keys, values in chosen:
        k, v = (x[: len(x) - SINKS + sinks] for x in (keys, values))
        n = len(k) - sinks

        def error(index: Any, weight: np.ndarray, q: np.ndarray, k: np.ndarray = k, v: np.ndarray = v) -> float:
            whole = len(k)
            output = means(q, k, v, np.full(whole, 1 / whole), k.shape[1] ** -0.5)[0]
            index = np.append(np.arange(sinks), np.asarray(index) + sinks)
            weight = np.append(np.full(sinks, 1.0), (whole - sinks) * weight) / whole
            return risk.attention_risk(q, k, v, index, weight) / float((output**2).sum(axis=1).mean())

        # some 128 queries: the rank is 256
        x = risk.profile_features(choose[:: max(1, len(choose) // 128)], k, v, min(RANK, n)).coordinates[sinks:]
        mean = x.mean(axis=0)
        kv = np.hstack([k, v])[sinks:]
        kv = (kv - kv.mean(axis=0)) / np.maximum(kv.std(axis=0), 1e-12)
        with tempfile.TemporaryDirectory() as folder:
            file = str(Path(folder, "head.npz"))
            np.savez(file, profiles=x, kv=kv, seeds=np.arange(seeds))
            answer = ask(python, "--peer", file)
        if "error" in answer:
            raise SystemExit(f"goodpoints failed on {name}: {answer['error']}")
        for what, size in {"Compress++ g=2": round(n**0.5), "kernel thinning": n // 8}.items():
            found = [r for r in answer["results"] if r["what"] == what]
            if not found:
                continue
            if any(len(index) != size for r in found for index in r["index"]):
                raise SystemExit(f"{what}: another number of tokens than {size}")
            even = np.full(size, 1 / size)
            by = {}
            for law, q in (("first", choose), ("test", test)):
                by[law] = [float(np.mean([error(i, even, q) for i in r["index"]])) for r in found]
            for points in POINTS:
                among = [i for i, r in enumerate(found) if r["points"] == points]
                best = min(among, key=lambda i: by["test"][i])
                note(f"{size} of {n}|{what} on {points}, best", by["test"][best], found[best]["seconds"])
            for law in ("first", "test"):
                best = int(np.argmin(by[law]))
                note(f"{size} of {n}|{what}, best on {law} queries", by["test"][best], found[best]["seconds"])
            for label, options in OURS.items():
                start = time.process_time()
                draws = DRAWS if label.endswith("draws") else 1
                samples = [
                    min(
                        (balancing.sample(x, size, seed=seed * draws + i, **options(size)) for i in range(draws)),
                        key=lambda s: float(((s[1] @ x[s[0]] - mean) ** 2).sum()),
                    )
                    for seed in range(seeds)
                ]
                spent = time.process_time() - start
                note(f"{size} of {n}|{label}", float(np.mean([error(*s, test) for s in samples])), spent / seeds)
        print(f"{name}: done", file=sys.stderr, flush=True)
    return table


def show(table: dict[str, dict[str, list[float]]]) -> dict[str, bool]:
    """Print; whether each claimed method is below Compress++ with the kernel that is best on the first queries."""
    below: dict[str, bool] = {}
    for size in dict.fromkeys(name.split("|")[0] for name in table):
        rows = {name.split("|")[1]: row for name, row in table.items() if name.startswith(size + "|")}
        rival = next(name for name in rows if name.endswith("best on test queries"))
        fair = rival.replace("on test", "on first")
        print(f"\n{size} tokens kept, {len(rows[rival]['risk'])} heads\n")
        print(
            f"| method | risk / output energy, geometric mean | over {fair} | heads won | over {rival} | heads won | ms |\n|--|--|--|--|--|--|--|"
        )
        for name, row in rows.items():
            cells = [f"{np.exp(np.log(row['risk']).mean()):.4f}"]
            for other in (fair, rival):
                ratio = np.log(np.array(row["risk"]) / rows[other]["risk"])
                cells += [f"{np.exp(ratio.mean()):.2f}", f"{int((ratio < 0).sum())} of {len(ratio)}"]
            print(f"| {name} | " + " | ".join(cells) + f" | {1e3 * np.median(row['seconds']):.1f} |")
        if "Compress++" in rival:
            print()
            for name in CLAIMED:
                ratios = [
                    float(np.exp(np.log(np.array(rows[name]["risk"]) / rows[x]["risk"]).mean())) for x in (fair, rival)
                ]
                slower = np.median(rows[name]["seconds"]) / np.median(rows[fair]["seconds"])
                print(
                    f"{name}: {ratios[0]:.2f} of the risk of {fair}, {ratios[1]:.2f} of that of {rival}; time x {slower:.2f}"
                )
                below[name] = below.get(name, True) and ratios[0] < 1
            sys.stdout.flush()
    return below


def install(folder: Path) -> str:
    """goodpoints in an environment of its own; its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    check = subprocess.run([str(python), "-c", "from goodpoints import compress"], check=False, capture_output=True)
    if check.returncode:
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
    return str(python)


def one_thread() -> None:
    """Start this script anew with one thread, for itself and its workers."""
    wanted = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if os.environ | wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


def main() -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true", help="up to 131,072 tokens (a quarter of an hour), not 16,384")
    parser.add_argument(
        "--captures", nargs="*", default=[], help="caches of `kvtheory capture` with 1,536 tokens or more"
    )
    parser.add_argument("--venv", type=Path, default=cache / "kvtheory" / "peers" / "goodpoints")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--only", choices=("cost", "risk"))
    parser.add_argument("--cost", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    # `make bench` gives all benchmarks the same options
    options, _ = parser.parse_known_args()
    if options.cost:
        what, n, folder = options.cost
        print(json.dumps(cost(what, int(n), folder)))
        return
    if options.peer:
        print(json.dumps(peer(options.peer)))
        return
    one_thread()
    import kvtheory

    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    print(
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} processors{load}; Python {platform.python_version()}"
    )
    print(f"kvtheory {kvtheory.__version__}, NumPy {np.__version__}; {', '.join(REQUIREMENTS)}\n")
    if options.only != "risk":
        print(
            f"Processor seconds and peak memory, one thread; spectrum and features: rank {RANK}, {QUERIES} queries, 64 channels; "
            f"reducers: {RANK} features, one token in {SHARE} kept, {PROTECT} directions protected by cube and spectral\n"
        )
        costs(FULL if options.full else QUICK)
    if options.only != "cost":
        python = install(options.venv.expanduser().resolve())
        sample = kvtheory.sample_cache()
        chosen = heads(sample, tuple(range(len(sample))), 256, 128)
        groups = {"the embedded cache": chosen}
        for file in options.captures:
            captured = kvtheory.Cache.load(file)
            layers = tuple(round(len(captured) * x) for x in (0.1, 0.35, 0.65, 0.9))
            groups[Path(file).stem] = heads(captured, layers, 1024, 512)
        below = dict.fromkeys(CLAIMED, True)
        for group, chosen in groups.items():
            for sinks in (0, SINKS):
                print(f"\n### {group}" + (f", {sinks} sinks kept beside" if sinks else ""))
                for name, yes in show(compare(python, chosen, options.seeds, sinks)).items():
                    below[name] = below[name] and yes
        print(
            "\nBelow Compress++ g=2 (kernel chosen on the first queries) in attention risk at equal size, in every table:"
        )
        for name, yes in below.items():
            print(f"- {name}: {'yes' if yes else 'no'}")


if __name__ == "__main__":
    main()
