"""Choose a codec for 2.5 bits a number: every candidate at exactly these held bits, errors with paired intervals, the choice and why.

    python examples/choose_codec.py                                     # SmolLM2-135M where torch and its weights are there, else the embedded cache
    python examples/choose_codec.py --at 3 --model qwen --layers 3,9,15,21
    python examples/choose_codec.py --cache my.safetensors --calibration other-text.safetensors

Fitted codecs take part where there is a calibration, another text of the same model. Needs the extra `sweep` (Parquet). A minute or two on two cores; stopped, it
goes on where it was when the same command is given again (`kvtheory compare` keeps every finished task in --out).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path

#: what stands in for a codec's properties when two cannot be told apart: the earlier is simpler to use
WHY = {
    "TurboQuant": "nothing is fitted, tokens can be appended, nothing is dropped",
    "SnapKV": "half the tokens are dropped, those that the prompt's end did not look at: not for lookups anywhere in the text",
    "StreamingLLM": "all but the first and the latest tokens are dropped: what the window has passed cannot be found again",
    "MergeReduce": "half the tokens are summarised with weights, which attention must add to its logits; not for lookups of single tokens",
    "MetricKLT": "fitted to another text of this model; its state lies beside the cache, once a model",
    "AATC": "fitted to another text of this model; its state lies beside the cache, once a model",
    "KVQuant": "fitted to another text of this model; its state lies beside the cache, once a model",
    "PALU": "fitted to another text of this model; what its rank leaves out is lost at any rate",
    "KVTC": "fitted to another text of this model; all tokens are decoded together, none is appended",
}


def candidates(bits: float, fitted: bool) -> str:
    """Codecs as `kvtheory compare --codecs` takes them, each at nominal rates whose held ones lie on both sides of `bits`."""
    whole = "|".join(str(b) for b in range(max(1, math.floor(bits) - 1), min(8, math.ceil(bits) + 1) + 1))
    twice = "|".join(str(b) for b in range(max(1, math.floor(2 * bits) - 1), min(8, math.ceil(2 * bits) + 1) + 1))
    near = "|".join(f"{b:g}" for b in (bits - 1, bits - 0.5, bits, bits + 0.5) if 0 < b <= 8)
    named = [f"TurboQuant(bits={whole})", f"QJL(bits={whole})"]
    named += [
        f"{reducer} > TurboQuant(bits={twice})"
        for reducer in ("SnapKV(keep=.5)", "StreamingLLM(keep=.5)", "MergeReduce(keep=.5,reducer=refit)")
    ]
    if fitted:
        named += [f"MetricKLT(bits={near})", f"MetricKLT(coding=fixed,bits={near})", f"AATC(window=0,bits={near})"]
        named += [f"PALU(bits={whole}|{min(8, math.ceil(bits) + 2)})", f"KVTC(window=0,bits={near})"]
    return ",".join(named)


def source(options: argparse.Namespace) -> tuple[list[str], bool]:
    """What is coded, as options of `kvtheory compare`, and whether there is a calibration."""
    if options.cache:
        more = ["--calibration", str(options.calibration)] if options.calibration else []
        return ["--cache", str(options.cache), *more], bool(options.calibration)
    if importlib.util.find_spec("torch") is not None:
        from kvtheory import models

        if options.model not in models.MODELS or models.available(options.model):
            words = [
                "--model",
                options.model,
                "--text",
                options.text,
                "--calibration",
                str(options.calibration or "emma"),
            ]
            return [*words, "--calibration-tokens", str(options.tokens), "--layers", options.layers, "--no-kl"], True
    print(
        f"no torch, or no weights of {options.model} (kvtheory models fetch {options.model}): the embedded cache, and what needs no fit"
    )
    return ["--cache", "sample"], False


def compared(words: list[str], options: argparse.Namespace, baseline: str) -> list[dict]:
    """Rows of equal-rate.json at the wanted rate, attention error as geometric mean over layers."""
    command = [sys.executable, "-m", "kvtheory", "compare", *words, "--at", str(options.at), "--baseline", baseline]
    command += ["--jobs", str(options.jobs), "--out", str(options.out), "--no-figures"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[1:])}\n{done.stdout}{done.stderr}")
    rows = json.loads((options.out / "equal-rate.json").read_text(encoding="utf-8"))
    return [row for row in rows if row["measure"] == "attention" and row["target_bits"] == options.at]


def told(rows: list[dict], best: str) -> list[str]:
    """The table, the choice and the reasons."""
    measured = sorted((row for row in rows if row["error"] is not None), key=lambda row: row["error"])
    first = measured[0]
    lines = [
        f"{first['model']}, {first['text']}: layers {first['layers']}, {first['prefix']} tokens coded; all at {first['target_bits']:g} held bits a number",
        "",
    ]
    lines += [f"{'codec':52}{'error':>9}  {'95 %':20}{'over the best, paired':24}between held bits"]
    for row in measured:
        error = f"[{row['error_low']:.3g}, {row['error_high']:.3g}]"
        ratio = f"{row['ratio']:.2f} [{row['ratio_low']:.2f}, {row['ratio_high']:.2f}]"
        lines.append(
            f"{row['label']:52}{row['error']:9.3g}  {error:20}{ratio:24}{row['below_bits']:.2f} and {row['above_bits']:.2f}"
        )
    lines += [f"{row['label']:52}{'-':>9}  {row['why']}" for row in rows if row["error"] is None]
    # told apart: the whole paired interval of the ratio lies above 1
    near = [row["label"] for row in measured if row["label"] != best and row["ratio_low"] <= 1]
    beaten = [row for row in measured if row["ratio_low"] > 1]
    lines += ["", f"choice: {best}"]
    if beaten:
        lines.append(
            f"  its error is {1 / beaten[0]['ratio']:.2f} of the next that can be told from it, {beaten[0]['label']}, and {1 / beaten[-1]['ratio']:.2g} of the worst"
        )
    if near:
        lines.append(f"  not told apart from it on this text: {', '.join(near)}")
    for label in (best, *near):
        lines.append(
            f"  {label}: {'; '.join(why for name, why in WHY.items() if name in label and (name != 'TurboQuant' or '>' not in label))}"
        )
    free = [row for row in measured if ">" not in row["label"]]
    if ">" in best and free:
        lines.append(f"  if every token must stay: {free[0]['label']}, {free[0]['ratio']:.1f} times its error")
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", type=float, default=2.5, help="held bits a number")
    parser.add_argument("--model", default="smol", help="a name of `kvtheory models`, a folder or a hub id")
    parser.add_argument("--text", default="hamlet", help="what is coded: a text's name in kvtheory, or a file")
    parser.add_argument(
        "--calibration",
        help="what codecs are fitted to: a text, or with --cache a captured file; default with a model: emma",
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of the calibration")
    parser.add_argument("--layers", default="2,10,18,26")
    parser.add_argument("--cache", help="a captured cache in place of a model: sample, or a file")
    parser.add_argument("--codecs", help="candidates of your own, as for `kvtheory compare`")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("report/choose"))
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    words, fitted = source(options)
    codecs = options.codecs or candidates(options.at, fitted)
    words += ["--codecs", codecs]
    print(f"$ kvtheory compare {' '.join(words)} --at {options.at:g}", flush=True)
    rows = compared(words, options, "TurboQuant")
    measured = [row for row in rows if row["error"] is not None]
    if not measured:
        raise SystemExit(f"--at {options.at:g}: no candidate was measured on both sides of it")
    best = min(measured, key=lambda row: row["error"])["label"]
    # ratios to the best, on the same segments: the tasks are finished, only the table is made again
    print("\n" + "\n".join(told(compared(words, options, best), best)))
    print(f"\nevery point: {options.out / 'results.parquet'}   ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
