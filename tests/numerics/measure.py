"""What one set of conditions gives, as JSON: hashes of streams, of fitted states and of what these are made of; verdicts; float32, float64, exact.

python -m tests.numerics.measure [STATES.json]      # states fitted elsewhere, name: hex; without: fitted here and given back
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
import proofs_checks
import reference
from kvtheory import attention, distortion, transform
from proofs_checks.context import Context
from proofs_checks.run import run_claim

#: data-oblivious codecs, whose bytes are integers' work; and calibrated ones, whose state is made once and given to all
PLAIN = ("Full", "TurboQuant", "QJL", "PolarQuant", "KIVI", "StreamingLLM", "SnapKV", "MergeReduce")
FITTED = ("MetricKLT", "AATC")
#: of every paper, cheap, and each with linear algebra in it
CLAIMS = (
    "transform-coding/key-distortion", "transform-coding/metric-klt", "transform-coding/group-metric", "transform-coding/water-filling",
    "sequential/total-entropy", "sequential/per-step-entropy", "prediction/residual-of-a-mixture", "trie/similarity-ultrametric",
    "risk/minimax-trace", "risk/spectral-bound", "risk/safe-bound", "risk/selection-bound", "quantizers/turboquant-mse",
    "quantizers/turboquant-mse-bound", "quantizers/qjl-variance", "quantizers/sphere-lower-bound",
)  # fmt: skip


def sha(data: Any) -> str:
    return hashlib.sha256(data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()).hexdigest()[:16]


def _made(name: str) -> Any:
    codec = reference.codecs()[name]
    return codec(keep=64) if name in ("StreamingLLM", "SnapKV", "MergeReduce") else codec()


def _decoded(stream: bytes, state: bytes = b"") -> str:
    got = reference.decode(stream, state)
    return sha(np.asarray(got.keys).astype(np.float64)) + sha(np.asarray(got.values).astype(np.float64))


def measure(states: dict[str, str] | None) -> dict[str, Any]:
    cache = kvtheory.sample_cache()
    layer = cache[0]
    out: dict[str, Any] = {
        "numpy": np.__version__,
        "python": sys.version.split()[0],
        "streams": {},
        "decoded": {},
        "fits": {},
    }
    for name in PLAIN:
        stream = _made(name).encode(layer)
        out["streams"][name], out["decoded"][name] = sha(stream), _decoded(stream)
    fitted = {name: reference.codecs()[name].fit([layer], bits=3) for name in FITTED}
    out["fits"] = {name: sha(codec.state) for name, codec in fitted.items()}
    out["states"] = {name: codec.state.hex() for name, codec in fitted.items()}
    for name in FITTED:
        state = bytes.fromhex((states or out["states"])[name])
        stream = reference.load(state).encode(layer)
        out["streams"][f"{name}, one state"], out["decoded"][f"{name}, one state"] = (
            sha(stream),
            _decoded(stream, state),
        )
    keys = np.asarray(layer.keys, np.float64)[0]
    centred = keys - keys.mean(axis=0)
    covariance = centred.T @ centred / len(keys)
    metric = distortion.key_metric(layer)[0]
    out["parts of a fit"] = {
        "mean": sha(keys.mean(axis=0)),
        "covariance, one product": sha(covariance),
        "key metric": sha(metric),
        "eigh of a given matrix": sha(np.linalg.eigh(np.round(covariance, 3))[1]),
        "metric_klt of given matrices": sha(
            transform.metric_klt(np.round(covariance, 3) + np.eye(len(covariance)), np.eye(len(covariance))).analysis
        ),
    }
    context = Context(cache=cache, cache_name="sample", claims=len(proofs_checks.claims()))
    out["verdicts"] = {name: str(run_claim(proofs_checks.claims()[name], context).verdict) for name in CLAIMS}
    return out


def rounding() -> list[tuple[str, float, float]]:
    """[(what, error against balls, what conditioning allows)] of attention in float32 and float64 on an instance of rationals.

    Allowed: a logit's rounding (d + 2) u sum |q k| changes its weight relatively by as much, the weighted mean adds (n + 2) u: together
    2 (max (d + 2) sum |q k| + n + 2) u max |v|, u the unit roundoff. The ball's own radius is 1e-50.
    """
    import flint

    generator, n, d = np.random.default_rng(3), 24, 8
    q, k, v = (generator.integers(-64, 65, shape) / 32 for shape in ((1, 3, d), (1, n, d), (1, n, 2)))
    with flint.ctx.workprec(200):
        exact = np.zeros((3, 2))
        for j in range(3):
            ball = lambda x: flint.arb(float(x))  # noqa: E731  dyadic: exact
            logits = [sum((ball(a) * ball(b) for a, b in zip(q[0, j], row)), flint.arb(0)) for row in k[0]]
            weights = [z.exp() for z in logits]
            total = sum(weights, flint.arb(0))
            for c in range(2):
                exact[j, c] = float(sum((w * ball(x) for w, x in zip(weights, v[0, :, c])), flint.arb(0)) / total)
    size = float((np.abs(q[0]) @ np.abs(k[0]).T).max())
    found = []
    for dtype in (np.float32, np.float64):
        got = attention.attend(q.astype(dtype), k.astype(dtype), v.astype(dtype), scale=1.0)[0]
        unit = float(np.finfo(got.dtype if got.dtype == np.float32 else np.float64).eps) / 2
        found.append(
            (
                f"attention of {dtype.__name__} input, computed in {got.dtype}",
                float(np.abs(got - exact).max()),
                2 * ((d + 2) * size + n + 2) * unit * float(np.abs(v).max()),
            )
        )
        low = np.asarray(q[0] @ k[0].T, dtype)
        w = np.exp(low - low.max(axis=1, keepdims=True)).astype(dtype)
        plain = (w @ v[0].astype(dtype)) / w.sum(axis=1, keepdims=True)
        unit = float(np.finfo(dtype).eps) / 2
        found.append(
            (
                f"softmax and mean in {dtype.__name__}",
                float(np.abs(plain - exact).max()),
                2 * ((d + 2) * size + n + 2) * unit * float(np.abs(v).max()),
            )
        )
    return found


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")) if len(sys.argv) > 1 else None
    print(json.dumps(measure(given)))
