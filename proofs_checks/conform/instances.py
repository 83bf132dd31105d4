"""What codecs are given: small layers that shrink to the least that still fails."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvtheory.randomness import generator

Array = NDArray[Any]
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float64": np.float64,
}
Fill = Literal["ones", "ramp", "gaussian", "zeros"]


@dataclass(frozen=True)
class Instance:
    """A layer by its recipe. fill: of all numbers, times 2**power; puts: (side, head, token, channel, number) written over them.

    "gaussian" numbers come from the Philox stream (seed, "conform instance"), which no codec draws from.
    """

    heads: int = 1
    tokens: int = 1
    dim: int = 1
    value_dim: int = 1
    dtype: str = "float32"
    fill: Fill = "ones"
    seed: int = 0
    power: int = 0
    puts: tuple[tuple[str, int, int, int, float], ...] = ()

    def arrays(self) -> tuple[Array, Array]:
        """keys (heads, tokens, dim), values (heads, tokens, value_dim)."""
        rng, out = generator(self.seed, "conform instance"), {}
        for side, d in (("keys", self.dim), ("values", self.value_dim)):
            shape = (self.heads, self.tokens, d)
            if self.fill == "gaussian":
                x = rng.standard_normal(shape)
            elif self.fill == "ramp":
                x = (np.arange(np.prod(shape)).reshape(shape) % 7 - 3).astype(np.float64)
            else:
                x = np.full(shape, float(self.fill == "ones"))
            with np.errstate(over="ignore", under="ignore"):
                out[side] = np.ldexp(x, self.power).astype(DTYPES[self.dtype])
        for side, h, t, c, number in self.puts:
            with np.errstate(over="ignore", invalid="ignore"):
                out[side][h, t, c] = number
        return out["keys"], out["values"]

    @property
    def numbers(self) -> int:
        return self.heads * self.tokens * (self.dim + self.value_dim)

    def order(self) -> tuple[Any, ...]:
        """Less is simpler."""
        return (
            self.numbers, abs(self.power), ("zeros", "ones", "ramp", "gaussian").index(self.fill), self.seed, len(self.puts),
            list(DTYPES).index(self.dtype), tuple((side, h, t, c) for side, h, t, c, _ in self.puts),
        )  # fmt: skip

    def __str__(self) -> str:
        shape = f"({self.heads}, {self.tokens}, {self.dim})"
        if self.value_dim != self.dim:
            shape += f" and ({self.heads}, {self.tokens}, {self.value_dim})"
        what = {"ones": "ones", "ramp": "-3 ... 3", "gaussian": f"Gaussian, seed {self.seed}", "zeros": "zeros"}[
            self.fill
        ]
        text = f"{what} {shape} {self.dtype}"
        if self.power:
            text += f", times 2^{self.power}"
        for side, h, t, c, number in self.puts:
            text += f", {side}[{h}, {t}, {c}] = {number:g}"
        return text

    def record(self) -> dict[str, Any]:
        """For JSON: the recipe, and the numbers themselves where they are few (NaN and inf as text)."""
        out: dict[str, Any] = {
            "text": str(self), "kv_heads": self.heads, "tokens": self.tokens, "head_dim": self.dim, "value_dim": self.value_dim,
            "dtype": self.dtype, "fill": self.fill, "seed": self.seed, "power": self.power,
            "puts": [[side, h, t, c, _plain(number)] for side, h, t, c, number in self.puts],
        }  # fmt: skip
        if self.numbers <= 64:
            keys, values = self.arrays()
            out |= {"keys": _lists(keys), "values": _lists(values)}
        return out

    def put(self, side: str, h: int, t: int, c: int, number: float) -> Instance:
        return replace(self, puts=(*self.puts, (side, h, t, c, number)))


def _plain(number: float) -> float | str:
    return float(number) if np.isfinite(number) else str(float(number))


def _lists(array: Array) -> list[Any]:
    def down(x: Any) -> Any:
        return [down(one) for one in x] if isinstance(x, list) else _plain(x)

    return down(array.astype(np.float64).tolist())  # type: ignore[no-any-return]


Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Sizes:
    """What a codec codes at all, as the survey found it. shapes: (heads, tokens, dim, value_dim) of small layers that it codes."""

    heads: tuple[int, ...]
    tokens: tuple[int, ...]
    dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    own_value_dim: bool  # values may have another dimension than keys
    shapes: tuple[Shape, ...]

    @property
    def usual(self) -> int:
        """The dimension for measurements: 128, else the largest that works."""
        return 128 if 128 in self.dims else max(self.dims)

    @property
    def smallest(self) -> Shape:
        return self.shapes[0]


def instances(
    sizes: Sizes, *, dtypes: tuple[str, ...] = ("float32",), fills: tuple[Fill, ...] = ("ones", "ramp", "gaussian"), least_heads: int = 1
) -> Any:  # fmt: skip
    """A hypothesis strategy of Instances of the shapes in `sizes`, simplest first; LookupError if there is none."""
    from hypothesis import strategies as st

    chosen = [shape for shape in sizes.shapes if shape[0] >= least_heads]
    if not chosen:
        raise LookupError(f"no small layer of {least_heads} heads is coded")
    allowed = [d for d in dtypes if d in sizes.dtypes] or list(sizes.dtypes[:1])

    def make(shape: Shape, fill: Fill, seed: int, dtype: str) -> Instance:
        return Instance(*shape, dtype=dtype, fill=fill, seed=seed)

    return st.builds(
        make, st.sampled_from(chosen), st.sampled_from(fills), st.integers(0, 255), st.sampled_from(allowed)
    )
