"""The four systems: which packages claim to be one, on which data, and what error the algorithm has when computed exactly."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peers import coders
from peers.coders import DIM, GROUP, Coder

OURS = "kvtheory"
TOKENS = 4096
Build = Callable[[int, int], Coder]


@dataclasses.dataclass(frozen=True)
class Package:
    """A pinned requirement, how it is built from (bits, seed), and what to know about it."""

    requirement: str
    build: Build
    note: str = ""


@dataclasses.dataclass(frozen=True)
class System:
    """ours: how ours is built. exact: (bits, folder of the data) -> error of the algorithm. sketches: over how many seeds error and bias are taken."""

    name: str
    says: str
    ours: Build
    packages: dict[str, Package]
    exact: Callable[[int, str], float]
    sketches: int = 1
    widths: tuple[int, ...] = (1, 2, 3, 4)


def timed(system: str, folder: str) -> Any:
    """What is encoded and decoded against the clock."""
    x, keys, values = (np.load(Path(folder, f"{name}.npy")) for name in ("x", "keys", "values"))
    return (keys, values) if system == "kivi" else x


def judged(system: str, folder: str) -> Any:
    """What error and bias are taken of."""
    return timed(system, folder) if system == "kivi" else np.load(Path(folder, "unit.npy"))


def with_nan(system: str, folder: str) -> Any:
    x = np.load(Path(folder, "nan.npy"))
    return (x, np.ascontiguousarray(x[:, ::-1])) if system == "kivi" else x


def write_arrays(folder: str, heads: int, tokens: int) -> None:
    """The data, from random streams that no package draws from. Keys have channels of large numbers, as those of models have."""
    from kvtheory.randomness import generator

    rng = generator(20240601, "benchmarks/peers.py data")
    x = rng.standard_normal((heads, tokens, DIM), np.float32)
    unit = rng.standard_normal((1, TOKENS, DIM))
    unit = (unit / np.linalg.norm(unit, axis=-1, keepdims=True)).astype(np.float32)
    keys = x * np.exp(rng.standard_normal((heads, 1, DIM), np.float32))
    values = rng.standard_normal((heads, tokens, DIM), np.float32)
    nan = rng.standard_normal((1, 2 * GROUP, DIM), np.float32)
    nan[0, 3, 5] = np.nan
    for name, array in {"x": x, "unit": unit, "keys": keys, "values": values, "nan": nan}.items():
        np.save(Path(folder, f"{name}.npy"), array)


def _mse(bits: int, folder: str) -> float:
    from kvtheory.quantization import mse_distortion

    return mse_distortion(DIM, bits)


def _prod(bits: int, folder: str) -> float:
    from kvtheory.quantization import prod_distortion

    return prod_distortion(DIM, bits)


def _qjl(bits: int, folder: str) -> float:
    """((pi/2) d - 1)/m, m = bits d."""
    from kvtheory.quantization import qjl_distortion

    return qjl_distortion(DIM, bits * DIM)


def _kivi(bits: int, folder: str) -> float:
    """Every group of these data between its minimum and its maximum in 2^bits - 1 equal steps, in float64."""
    keys, values = timed("kivi", folder)
    error = []
    for x, axis in ((keys, 1), (values, 2)):
        shape = (*x.shape[:axis], x.shape[axis] // GROUP, GROUP, *x.shape[axis + 1 :])
        groups = x.astype(np.float64).reshape(shape)
        low, high = (f(groups, axis=axis + 1, keepdims=True) for f in (np.min, np.max))
        step = (high - low) / (2**bits - 1)
        back = (low + step * np.rint((groups - low) / step)).reshape(x.shape)
        error.append(((back - x) ** 2).sum(axis=-1) / (x.astype(np.float64) ** 2).sum(axis=-1))
    return float(np.mean(error))


CPU, PYT, PY = "pyturboquant-cpu==0.1.0", "pyturboquant==0.1.1", "turboquant-py==0.1.0"
TORCH, PLAIN, LLM = "turboquant-torch==0.4.0", "turboquant==0.2.0", "turboquant-llm==0.1.0"
QUANTO, HQQ, TINY = "optimum-quanto==0.2.7", "hqq==0.2.8.post1", "tiny-turboquant==0.18.0"

SYSTEMS = {
    system.name: system
    for system in (
        System(
            "mse",
            "TurboQuant for the least error. Exact: the optimal scalar quantiser of a coordinate.",
            coders.our_turboquant("mse"),
            {
                "pyturboquant-cpu": Package(CPU, coders.pyturboquant_cpu_mse),
                "pyturboquant": Package(PYT, coders.pyturboquant_mse, "asks for Python 3.12, runs on 3.11"),
                "turboquant-py": Package(PY, coders.turboquant_py_mse),
                "turboquant-torch": Package(TORCH, coders.turboquant_torch_mse),
                "turboquant": Package(PLAIN, coders.turboquant_mse, "np.trapz put back, its cache left out"),
                "turboquant-llm": Package(LLM, coders.turboquant_llm_mse, "its sketch is held but never decoded"),
            },
            _mse,
        ),
        System(
            "prod",
            "TurboQuant without bias, the last bit a sign of the residual's sketch. Exact: D_mse(b-1) ((pi/2) d - 1)/d; at 1 bit that of QJL.",
            coders.our_turboquant("prod"),
            {
                "pyturboquant-cpu": Package(CPU, coders.pyturboquant_cpu_prod, "signs packed in a Python loop"),
                "pyturboquant": Package(
                    PYT,
                    coders.pyturboquant_prod,
                    "its decode leaves the sketch out: its estimates of the inner products with the unit vectors are added",
                ),
                "turboquant-py": Package(PY, coders.turboquant_py_prod, "its sketch is held but never decoded"),
                "turboquant-torch": Package(TORCH, coders.turboquant_torch_prod),
                "turboquant": Package(PLAIN, coders.turboquant_prod, "its sketch is divided by sqrt(d) and so does next to nothing"),
            },
            _prod,
            sketches=8,
        ),
        System(
            "qjl",
            "QJL with b d signs, keys alone. Exact: ((pi/2) d - 1)/(b d). Ours also codes values of one channel, timed and not counted.",
            coders.our_qjl,
            {
                "pyturboquant": Package(PYT, coders.pyturboquant_qjl, "its estimates of the inner products with the unit vectors"),
                "turboquant-torch": Package(TORCH, coders.turboquant_torch_qjl, "its own packing called, which its QJL does not do"),
                "turboquant-py": Package(PY, coders.turboquant_py_qjl, "orthogonal rows of length 1 where sqrt(d) is meant; no vectors, see coders.py"),
                "pyturboquant-cpu": Package(CPU, coders.pyturboquant_cpu_qjl, "signs packed in a Python loop"),
            },
            _qjl,
            sketches=8,
        ),
        System(
            "kivi",
            f"KIVI, keys by channel and values by token, groups of {GROUP}, ours with a window of {GROUP}. Exact: min/max in float64 on these data.",
            coders.our_kivi,
            {
                "optimum-quanto": Package(QUANTO, coders.quanto(-1), "axis -1 for keys, 0 for values; compiles its C++ at first use"),
                "optimum-quanto, by token": Package(QUANTO, coders.quanto(0), "axis 0 for both, as the cache of transformers has it: not KIVI"),
                "hqq": Package(HQQ, coders.hqq, "its optimiser off: with it, it is not KIVI"),
                "tiny-turboquant": Package(TINY, coders.tiny_turboquant, "transformers left out"),
            },
            _kivi,
        ),
    )
}  # fmt: skip
