"""Held bits and seconds a token of generating through a CompressedCache, for every codec of scope "layer". Makes the table of docs/hf.md.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--model smol --tokens 512 --new 32 --dtype bfloat16]

A prompt from one text, codecs fitted to another. Held bits are the cache's when the last token is out: streams, exact tokens (sinks and
window of the cache), side information; states of fitted codecs are beside them. "same" counts the leading tokens that are the plain cache's.
Seconds are of one run on a machine that may be shared: compare them with the plain row of the same run.
"""

import argparse
import time

import torch
import transformers

import reference
from kvtheory import models
from kvtheory.models.texts import text


def codecs(calibration):
    """name -> codec; fitted ones on `calibration`, at about 3 bits, reducers at a quarter of the prompt."""
    r = reference
    made = {
        "Full()": r.Full(),
        "TurboQuant(3)": r.TurboQuant(3),
        "TurboQuant(3, kind='prod')": r.TurboQuant(3, kind="prod"),
        "QJL(3)": r.QJL(3),
        "PolarQuant()": r.PolarQuant(),
        "KIVI(2)": r.KIVI(2),
        "KVQuant(3)": r.KVQuant.fit(calibration, bits=3),
        "PALU(3, ratio=0.7)": r.PALU.fit(calibration, bits=3, ratio=0.7),
        "AATC(3, window=0)": r.AATC.fit(calibration, bits=3, window=0),
        "MetricKLT(2)": r.MetricKLT.fit(calibration, bits=2),
        "MetricKLT(2, coding='fixed')": r.MetricKLT.fit(calibration, bits=2, coding="fixed"),
        "StreamingLLM(112)": r.StreamingLLM(112),
        "SnapKV(112)": r.SnapKV(112),
        "ScissorHands(112)": r.ScissorHands(112),
        "MergeReduce(112, 'spectral')": r.MergeReduce(112, "spectral"),
        "MergeReduce(112, 'refit')": r.MergeReduce(112, "refit"),
    }
    made["Pipeline(SnapKV(112), TurboQuant(4))"] = r.Pipeline([r.SnapKV(112), r.TurboQuant(4)])
    made["Pipeline(SnapKV(224), MetricKLT(2))"] = r.Pipeline([r.SnapKV(224), made["MetricKLT(2)"]])
    return made


class Clock(transformers.StoppingCriteria):
    """When each token was out."""

    def __init__(self):
        self.times = []

    def __call__(self, input_ids, scores, **options):
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def run(model, ids, cache, new):
    """(tokens, seconds to the first, seconds for each later one)."""
    clock = Clock()
    start = time.perf_counter()
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=new, min_new_tokens=new, do_sample=False,
        stopping_criteria=transformers.StoppingCriteriaList([clock]),
    )  # fmt: skip
    later = (clock.times[-1] - clock.times[0]) / max(1, len(clock.times) - 1)
    return found[0, ids.shape[1] :].tolist(), clock.times[0] - start, later


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and cache; fitting takes place in float32")
    parser.add_argument("--text", default="hamlet")
    parser.add_argument("--calibration", default="emma")
    parser.add_argument("--capture", help="a captured calibration cache (kvtheory capture), in place of making one")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--only", default="", help="codecs whose name contains this")
    options = parser.parse_args()

    if options.capture:
        from kvtheory import Cache

        calibration = list(Cache.load(options.capture))
    else:
        tokenizer, exact = models.load(options.model)
        calibration = list(models.capture(exact, tokenizer, text(options.calibration), tokens=1024))
        del exact
    every = {name: codec for name, codec in codecs(calibration).items() if options.only in name}
    del calibration
    tokenizer, model = models.load(options.model, dtype=options.dtype)
    ids = torch.from_numpy(models.encode(tokenizer, text(options.text), options.tokens))[None]
    reference.hf.attach(model)
    expected, first, later = run(model, ids, transformers.DynamicCache(), options.new)
    size = 8 * torch.finfo(getattr(torch, options.dtype)).bits // 8
    print(
        f"{options.model}, {options.dtype}, {options.tokens} tokens of {options.text}, {options.new} new, sinks={options.sinks}, "
        f"window={options.window}, transformers {transformers.__version__}, {torch.get_num_threads()} thread(s)\n"
    )
    print("| codec | held bits a number | of them exact | streams | state, MB | same | s to first token | s a token |")
    print("|---|---|---|---|---|---|---|---|")
    print(f"| plain cache | {size:.2f} | {size:.2f} | 0 | | {options.new} | {first:.2f} | {later:.3f} |", flush=True)
    for name, codec in every.items():
        cache = reference.hf.CompressedCache(codec, sinks=options.sinks, window=options.window)
        found, first, later = run(model, ids, cache, options.new)
        held = cache.held()
        same = next((i for i, (a, b) in enumerate(zip(found, expected)) if a != b), len(found))
        state = f"{held.state / 8e6:.2f}" if held.state else ""
        print(
            f"| `{name}` | {held.per_number:.2f} | {held.exact / held.numbers:.2f} | {sum(map(len, cache.streams()))} | {state} | {same} | "
            f"{first:.2f} | {later:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
