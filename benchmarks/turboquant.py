"""TurboQuant on one layer of a cache: MB/s of its float32 numbers, held bits, and error against the exact optimum, at every width.

    OMP_NUM_THREADS=1 python benchmarks/turboquant.py [--heads 8 --tokens 4096 --dim 128 --repeat 5]

"plain NumPy" is the same pipeline without the codec, as short as it can be written: norms, one dense float32 GEMM, compare and add,
packing by shifts. It writes no stream and checks nothing; ratios within one run are what to compare, speeds wobble with the machine.
"""

import argparse
import time

import numpy as np

import kvtheory
import reference
from kvtheory import quantization, rate
from reference.hadamard import hadamard


def best(repeat, work):
    """(seconds of the fastest run, its result)."""
    fastest, result = float("inf"), None
    for _ in range(repeat):
        start = time.perf_counter()
        result = work()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest, result


def plain(x, bits):
    """Rows x (n, d), d a power of two -> (norms, packed codes), in blocks of 2,048 rows."""
    d = x.shape[1]
    matrix = (hadamard(d) / np.sqrt(d)).astype(np.float32)
    points = rate.lloyd_max(quantization.SphereCoordinate(d), 2**bits)
    out = []
    for start in range(0, len(x), 2048):
        block = x[start : start + 2048]
        norms = np.sqrt(np.einsum("ij,ij->i", block, block))
        y = block @ matrix
        codes = np.zeros(y.shape, np.uint8)
        for threshold in points.thresholds.astype(np.float32):
            codes += (y > threshold * norms[:, None]).view(np.uint8)
        out.append((norms, np.packbits(codes) if bits == 1 else reference.packing.pack(codes, bits)))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    rng = kvtheory.randomness.generator(0, "benchmark")
    keys, values = (rng.standard_normal((options.heads, options.tokens, options.dim), np.float32) for _ in range(2))
    layer = kvtheory.Layer(keys, values)
    megabytes = (keys.nbytes + values.nbytes) / 1e6
    power = options.dim & (options.dim - 1) == 0
    print(
        f"{options.heads} heads x {options.tokens} tokens x {options.dim}, keys and values, {megabytes:.1f} MB of float32"
    )
    print(
        f"{'codec':>14} {'encode':>8} {'decode':>8} {'held':>7} {'error':>9} {'exact':>9} {'ratio':>7} {'plain NumPy encode':>20}"
    )
    for kind in ("mse", "prod"):
        for bits in range(1, 9):
            codec = reference.TurboQuant(bits, kind=kind)
            encode, stream = best(options.repeat, lambda codec=codec: codec.encode(layer))
            decode, decoded = best(options.repeat, lambda codec=codec, stream=stream: codec.decode(stream))
            error = float(((decoded.keys.astype(np.float64) - keys) ** 2).sum() / (keys.astype(np.float64) ** 2).sum())
            exact = quantization.mse_distortion(options.dim, bits)
            line = (
                f"{kind:>9} {bits:>4} {megabytes / encode:>8.0f} {megabytes / decode:>8.0f} "
                f"{reference.held_bits(stream, layer):>7.3f} {error:>9.6f}"
            )
            if kind == "mse":
                line += f" {exact:>9.6f} {error / exact:>7.4f}"
                if power and bits <= 4:
                    rows = keys.reshape(-1, options.dim)
                    seconds, _ = best(options.repeat, lambda rows=rows, bits=bits: plain(rows, bits))
                    line += f" {rows.nbytes / 1e6 / seconds:>15.0f} MB/s"
            print(line, flush=True)


if __name__ == "__main__":
    main()
