"""Measure one thing on one real model, as JSON: what the claims of proofs_checks.sequential read.

    python -m benchmarks.sequential residual --model smol > proofs_checks/sequential/measured/residual-smol.json

residual     what the mean over the likeliest tokens leaves, against surprisal, by layer       1 to 3 minutes on one busy core
recompute    keys and values recomputed in other chunks, batches, threads, kernels, types      2 to 5 minutes
context      surprisal against position                                                        5 minutes
divergence   keys and values where two texts part and behind, and each layer's Jacobian        1 to 3 minutes
replay       TokenReplay, the interval of checkpoints against bits, passes, time and error     5 to 10 minutes
thousand     TokenReplay of 1,000 tokens: payload, header, operations, seconds                  5 minutes
predictors   PredictiveDelta with every predictor: bits, error, passes, time                   10 minutes
smaller      with --model qwen-1.5b: PredictiveDelta with Qwen2.5-Coder-0.5B as its predictor     10 minutes
stack        sessions that share prefixes, predicted, quantised: every subset of the three        10 minutes
vocabulary   the mean over the whole vocabulary, beside fewer candidates, on few positions        30 minutes
paraphrases  the same passage behind a system prompt, its paraphrase, an unrelated one          1 minute
"""

import argparse
import importlib
import json
import os
import sys

NAMES = (
    "residual",
    "recompute",
    "context",
    "divergence",
    "replay",
    "thousand",
    "predictors",
    "smaller",
    "stack",
    "vocabulary",
    "paraphrases",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--model", default="smol")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from kvtheory import models
    from kvtheory.models.capture import plan

    torch.set_num_threads(1)
    tokenizer, model = models.load(arguments.model)
    measured = importlib.import_module(f"benchmarks.sequential.{arguments.name}").measure(model, tokenizer)
    known = models.MODELS.get(arguments.model)
    record = {
        "command": f"python -m benchmarks.sequential {arguments.name} --model {arguments.model}",
        "model": arguments.model,
        "title": known.title if known else arguments.model,
        "plan": plan(model),
        **measured,
    }
    json.dump(record, sys.stdout, separators=(",", ":"), allow_nan=False)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
