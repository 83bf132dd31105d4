"""How much a layer's keys tell of its values, and neighbours of each other: bits a component that a linear prediction saves.

    python benchmarks/keys_tell_values.py CALIBRATION.safetensors TEST.safetensors [--layers 1,5,10]

Two caches of one model on two texts (`kvtheory capture`). Keys are taken before RoPE, the first four tokens are left out. The prediction of y
from x is a ridge regression on the first text; on the second,

    gain  =  1/(2d) log2 ( det Cov(y - mean) / det Cov(y - prediction) ),          d components of y

is what a Gaussian coder saves at high rate; negative where the prediction does not carry over.
"""

import argparse

import numpy as np

from kvtheory.layer import Cache

SINKS = 4


def log_det(x):
    second = x.T @ x / len(x)
    return np.linalg.slogdet(second + 1e-9 * np.trace(second) / len(second) * np.eye(len(second)))[1]


def gain(x, y, x_test, y_test):
    """Bits a component: x (n, p) and y (n, d) of the first text, alike of the second."""
    mean_x, mean_y = x.mean(axis=0), y.mean(axis=0)
    second = (x - mean_x).T @ (x - mean_x)
    second += 1e-3 * np.trace(second) / len(second) * np.eye(len(second))
    slope = np.linalg.solve(second, (x - mean_x).T @ (y - mean_y))
    rest = y_test - mean_y - (x_test - mean_x) @ slope
    return (log_det(y_test - mean_y) - log_det(rest)) / (2 * np.log(2) * y.shape[1])


def parts(layer):
    """Keys before RoPE and values of each KV head behind the sinks."""
    keys = layer.keys.astype(np.float64) if layer.rope is None else layer.rope.undo(layer.keys, layer.positions)
    return list(keys[:, SINKS:]), list(layer.values[:, SINKS:].astype(np.float64))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calibration")
    parser.add_argument("test")
    parser.add_argument("--layers", help="numbers in the cache, comma-separated; default: all")
    arguments = parser.parse_args()
    first, second = Cache.load(arguments.calibration), Cache.load(arguments.test)
    chosen = range(len(first)) if arguments.layers is None else [int(i) for i in arguments.layers.split(",")]
    names = ("own keys", "all keys", "other values", "value before", "key before")
    print("layer  " + "  ".join(f"{name:>13}" for name in names))
    every = []
    for i in chosen:
        (k, v), (k2, v2) = parts(first[i]), parts(second[i])
        rows = []
        for h in range(len(k)):
            others, others2 = ([a for j, a in enumerate(side) if j != h] for side in (v, v2))
            rows.append(
                (
                    gain(k[h], v[h], k2[h], v2[h]),
                    gain(np.hstack(k), v[h], np.hstack(k2), v2[h]),
                    gain(np.hstack(others), v[h], np.hstack(others2), v2[h]) if others else 0.0,
                    gain(v[h][:-1], v[h][1:], v2[h][:-1], v2[h][1:]),
                    gain(k[h][:-1], k[h][1:], k2[h][:-1], k2[h][1:]),
                )
            )
        every.append(np.mean(rows, axis=0))
        print(f"{i:5}  " + "  ".join(f"{x:13.3f}" for x in every[-1]), flush=True)
    print(" mean  " + "  ".join(f"{x:13.3f}" for x in np.mean(every, axis=0)))


if __name__ == "__main__":
    main()
