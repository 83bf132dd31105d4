"""Properties of numbers: zeros, scales, outliers, neighbours, repeatability, and what is held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory.randomness import generator
from proofs_checks.conform.instances import Instance, instances
from proofs_checks.conform.registry import Asked, prop
from proofs_checks.conform.search import Skip, Violation
from proofs_checks.conform.subject import ForeignError

Array = NDArray[Any]
#: half a unit in the last place of a 16-bit scale of eight digits (bfloat16), the coarsest that published systems keep
SCALE_ULP = 2.0**-8
#: bits of sizes and settings
HEADER = 8 * 64


def _norm(x: Array) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(np.square(x.astype(np.float64)).sum()))


def _finite(through: Any, one: Instance) -> None:
    for name, x in (("keys", through.keys), ("values", through.values)):
        bad = ~np.isfinite(x.astype(np.float64))
        if bad.any():
            where = np.unravel_index(int(np.argmax(bad)), bad.shape)
            raise Violation(
                f"{name}[{', '.join(map(str, where))}] decoded to {float(x[where])}; {int(bad.sum())} such in all", one
            )


@prop("finite", "finite numbers decode to finite numbers")
def finite(asked: Asked) -> str:
    def check(one: Instance) -> None:
        _finite(asked.through(one), one)

    for name, said in asked.refused.items():
        if name.startswith("dtype ") and "NaN or inf" in said:
            raise Violation(said, Instance(1, max(asked.sizes.tokens), *asked.sizes.smallest[2:], name[6:], "gaussian"))
    asked.search(instances(asked.sizes, dtypes=("float32", "float16", "bfloat16", "float64")), check)
    return "finite at all sizes and element types"


@prop("zeros", "a layer of zeros comes back as zeros, exactly")
def zeros(asked: Asked) -> str:
    if asked.calibrated:
        raise Skip("a fitted codec may subtract a mean of its calibration")

    def check(one: Instance) -> None:
        through = asked.through(one)
        _finite(through, one)
        for name, x in (("keys", through.keys), ("values", through.values)):
            if x.any():
                raise Violation(f"{name} hold {float(np.abs(x.astype(np.float64)).max()):.3g} instead of 0", one)

    asked.search(instances(asked.sizes, fills=("zeros",), dtypes=("float32", "float16")), check)
    return "exact"


@prop(
    "scale",
    "numbers times a power of two, from 1e-30 to 1e30, err by the same share: at most 1.1 times, and what a 16-bit scale costs (2^-8), more",
)  # fmt: skip
def scale(asked: Asked) -> str:
    from hypothesis import strategies as st

    if not {"float32", "float64"} & set(asked.sizes.dtypes):
        raise Skip("float16 has no such range")
    dtype = ("float32",) if "float32" in asked.sizes.dtypes else ("float64",)
    worst = [0.0]

    def share(one: Instance, power: int) -> tuple[float, float]:
        moved = replace(one, power=power)
        through = asked.through(moved, power=power)
        _finite(through, moved)
        out = []
        for x, y in zip(moved.arrays(), (through.keys, through.values)):
            length = _norm(np.ldexp(x.astype(np.float64), -power))
            error = _norm(np.ldexp(y.astype(np.float64), -power) - np.ldexp(x.astype(np.float64), -power))
            out.append(error / length if length else error)
        return out[0], out[1]

    def check(one: Instance) -> None:
        base = replace(one, power=0)
        for side, plain, scaled in zip(("keys", "values"), share(base, 0), share(base, one.power)):
            worst[0] = max(worst[0], scaled - plain)
            if scaled > 1.1 * plain + SCALE_ULP:
                raise Violation(
                    f"{side} err by {plain:.3g} of their length at scale 1, by {scaled:.3g} at 2^{one.power}", one
                )

    steps = st.integers(-100, 100).filter(bool)
    strategy = st.builds(lambda one, power: replace(one, power=power), instances(asked.sizes, dtypes=dtype), steps)
    asked.search(strategy, check)
    return f"the share of the error grows by at most {worst[0]:.1e}"


@prop(
    "outlier",
    "one number of -70000 (float16: -65504) leaves all numbers finite, errs by no more than its vector's length, and leaves other heads as they are",
)
def outlier(asked: Asked) -> str:
    from hypothesis import strategies as st

    def put(one: Instance, side: str, h: int, t: int, c: int) -> Instance:
        d = one.dim if side == "keys" else one.value_dim
        return one.put(side, h % one.heads, t % one.tokens, c % d, -65504.0 if one.dtype == "float16" else -70000.0)

    def check(one: Instance) -> None:
        side, h, _, _, _ = one.puts[0]
        through, plain = asked.through(one), asked.through(replace(one, puts=()))
        _finite(through, one)
        x, back = one.arrays()[side == "values"], getattr(through, side)
        error, length = _norm(back[h] - x[h].astype(np.float64)), _norm(x[h])
        # a sketch of signs is unbiased, and errs by sqrt(pi/2 d/m) of the length and more where m is small
        most = (3.0 if asked.unbiased else 1.05) * length
        if error > most:
            raise Violation(f"{side} of that head err by {error / length:.3g} of their length", one)
        if asked.calibrated:
            return
        for name in ("keys", "values"):
            a, b = getattr(through, name), getattr(plain, name)
            rest = [i for i in range(one.heads) if i != h or name != side]
            if rest and _norm(a[rest].astype(np.float64) - b[rest]) > 1e-5 * _norm(b[rest]):
                raise Violation(f"{name} of another head or side changed", one)

    places = st.integers(0, 7)
    asked.search(
        st.builds(put, instances(asked.sizes, dtypes=("float32", "float16")), st.sampled_from(("keys", "values")), places, places, places),
        check,
    )  # fmt: skip
    return "its own vector's business"


@prop("subnormals", "numbers below 2^-126 err by no more than their length, or by the least normal number each")
def subnormals(asked: Asked) -> str:
    from hypothesis import strategies as st

    if "float32" not in asked.sizes.dtypes:
        raise Skip("float32 is not taken")

    def check(one: Instance) -> None:
        through = asked.through(one, power=one.power)
        _finite(through, one)
        for name, x, y in zip(("keys", "values"), one.arrays(), (through.keys, through.values)):
            error, length = _norm(y - x.astype(np.float64)), _norm(x)
            factor = 3.0 if asked.unbiased else 1.05
            if error > factor * length + 2.0**-126 * np.sqrt(x.size):
                raise Violation(f"{name} of length {length:.3g} err by {error:.3g}", one)

    powers = st.integers(-146, -127)
    asked.search(st.builds(lambda one, power: replace(one, power=power), instances(asked.sizes), powers), check)
    return "coded like others, or as zero"


@prop(
    "heads",
    "heads do not mix: in another order they decode to the same numbers in that order, and one head's numbers do not change another's",
)
def heads(asked: Asked) -> str:
    if asked.calibrated:
        raise Skip("a fitted codec may code heads jointly, each at its place")
    if max(asked.sizes.heads) < 2:
        raise Skip("one head at a time")

    def check(one: Instance) -> None:
        keys, values = one.arrays()
        plain = asked.run(keys, values, one)
        turned = asked.run(np.ascontiguousarray(keys[::-1]), np.ascontiguousarray(values[::-1]), one)
        spoilt = [x.copy() for x in (keys, values)]
        for x in spoilt:
            x[0] = -3 * x[0] + 1
        other = asked.run(spoilt[0], spoilt[1], one)
        for name in ("keys", "values"):
            a, b, c = (getattr(x, name).astype(np.float64) for x in (plain, turned, other))
            if _norm(a[::-1] - b) > 1e-5 * _norm(a):
                raise Violation(
                    f"{name} of heads in reverse order are not those of the heads: {_norm(a[::-1] - b) / _norm(a):.3g} of their length",
                    one,
                )
            if _norm(a[1:] - c[1:]) > 1e-5 * _norm(a[1:]):
                raise Violation(f"{name} of head 1 change with head 0", one)

    asked.search(instances(asked.sizes, fills=("ramp", "gaussian"), least_heads=2), check)
    return "each head by itself"


def _measured(
    asked: Asked, purpose: str, heads: int = 2, tokens: int = 256, dtypes: tuple[str, ...] = ("float32",)
) -> tuple[Array, Array]:  # fmt: skip
    """Gaussian keys and values, of the first of `dtypes` that is taken."""
    d, dtype = asked.sizes.usual, next((n for n in dtypes if n in asked.sizes.dtypes), asked.sizes.dtypes[0])
    h = heads if heads in asked.sizes.heads else asked.sizes.heads[0]
    rng = generator(0, f"conform {purpose}")
    return tuple(rng.standard_normal((h, tokens, d)).astype(dtype) for _ in range(2))  # type: ignore[return-value]


def _same(a: Any, b: Any, how: str, what: str) -> None:
    if a.digest == b.digest and (a.keys.tobytes(), a.values.tobytes()) == (b.keys.tobytes(), b.values.tobytes()):
        return
    x, y = (np.concatenate([r.keys.ravel(), r.values.ravel()]).astype(np.float64) for r in (a, b))
    bytes_ = "the same bytes" if a.digest == b.digest else "other bytes"
    raise Violation(
        f"{how}: {bytes_}, which decode to numbers {_norm(x - y) / (_norm(x) or 1.0):.2g} of their length away", what
    )


@prop(
    "determinism",
    "the same numbers give the same bytes: again, after others, by a new object, in a new process, and with 2 threads",
)
def determinism(asked: Asked) -> str:
    keys, values = _measured(asked, "determinism")
    other = _measured(asked, "determinism, others")
    what = f"Gaussian {keys.shape} {keys.dtype}"
    first = asked.run(keys, values, what)
    _same(first, asked.run(keys, values, what), "a second time", what)
    asked.run(other[0], other[1], what)
    _same(first, asked.run(keys, values, what), "after other numbers", what)
    # a fit may differ in its last digits with the order of sums, and its state, fitted once, is what is kept
    for threads in (1,) if asked.calibrated else (1, 2):
        with asked.subject.with_threads(threads) as subject:
            try:
                again = subject.through(keys, values)
            except ForeignError as problem:
                raise Violation(f"in a new process with {threads} threads: {problem}", what) from None
        _same(first, again, f"in a new process with {threads} thread{'s' * (threads > 1)}", what)
    return "the same bytes each time"


@prop("fresh-decoder", "what is encoded is decoded alike by a codec of the same arguments that has not encoded it")
def fresh_decoder(asked: Asked) -> str:
    keys, values = _measured(asked, "fresh decoder", tokens=128)
    what = f"Gaussian {keys.shape} {keys.dtype}"
    first, fresh = asked.run(keys, values, what), asked.run(keys, values, what, fresh=True)
    for name in ("keys", "values"):
        a, b = getattr(first, name).astype(np.float64), getattr(fresh, name).astype(np.float64)
        if not _norm(a - b) <= 1e-6 * _norm(a):
            raise Violation(
                f"{name} differ by {_norm(a - b) / _norm(a):.3g} of their length: the decoder needs what the encoder keeps",
                what,
            )
    return "the same numbers"


@prop(
    "held-bits",
    "of each further token, all bits that decode needs are at most those claimed, and one a number of side information (a scale and a zero of "
    "16 bits for 32 numbers)",
)  # fmt: skip
def held_bits(asked: Asked) -> str:
    """From 512 to 1,024 tokens of float16, as caches are: headers, tables and a window of recent tokens cost the same in both, and are said beside."""
    kinds = ("float16", "bfloat16", "float32")
    short, long = (_measured(asked, "held bits", tokens=n, dtypes=kinds) for n in (512, 1024))
    what = f"Gaussian {long[0].shape} {long[0].dtype}, less its first 512 tokens"
    if asked.calibrated:  # entropy coders hold more of numbers of another law
        h, d = long[0].shape[0], long[0].shape[2]
        drawn = asked.subject.ask("held_out", heads=h, dim=d, tokens=1024)[1]
        long = tuple(x.astype(long[0].dtype) for x in drawn)  # type: ignore[assignment]
        short = tuple(x[:, :512] for x in long)  # type: ignore[assignment]
        what = f"of the calibration's law, {what.partition(' ')[2]}"
    first, through = (asked.run(pair[0], pair[1], what, shared=True) for pair in (short, long))
    numbers, few = (pair[0].size + pair[1].size for pair in (long, short))
    held = 8 * (through.held - first.held) / (numbers - few)
    constant = first.held - held * few / 8
    whole = 8 * first.held / few
    asked.measured |= {"held_bits": held, "held_bits_512_tokens": whole, "constant_bytes": constant}
    text = f"{held:.3f} bits a number are held ({whole:.3f} of 512 tokens, with {max(0, constant):,.0f} bytes whatever the tokens)"
    if asked.state_bytes:
        text += f"; state of {asked.state_bytes:,} bytes beside"
    if first.says:
        says = float(np.mean(first.says))
        asked.measured["says_bits"] = says
        if whole > says * (1 + 1e-3) + HEADER / few:
            raise Violation(
                f"{whole:.3f} bits a number are held of 512 tokens, {says:.3f} its own accounting says", what
            )
    if asked.bits is None:
        raise Skip(f"no bits are claimed; {text}")
    if held > asked.bits + 1 + HEADER / (numbers - few):
        raise Violation(f"{text}; {asked.bits:g} are claimed", what)
    return f"{text}; {asked.bits:g} are claimed"


@prop("no-dead-parts", "every array that is held matters: with its numbers in another order, other numbers are decoded")
def dead_parts(asked: Asked) -> str:
    keys, values = _measured(asked, "dead parts", tokens=64)
    what = f"Gaussian {keys.shape} {keys.dtype}"
    if asked.run(keys, values, what).is_bytes:
        return _dead_bytes(asked, keys, values, what)
    try:
        leaves = asked.subject.ask("ablate", [keys, values])[0]["leaves"]
    except ForeignError as problem:
        raise Violation(str(problem), what) from None
    if not leaves:
        raise Skip("no array of what is held can be written to")
    dead = [leaf for leaf in leaves if float(leaf["moved"]) == 0]
    if dead:
        share = sum(leaf["bytes"] for leaf in dead) * 8 / (keys.size + values.size)
        raise Violation(
            f"{', '.join(leaf['path'] for leaf in dead)}: held ({share:.3g} bits a number) and never decoded", what
        )
    return f"{len(leaves)} arrays, the least of which moves what is decoded by {min(float(leaf['moved']) for leaf in leaves):.2g} of its length"


def _dead_bytes(asked: Asked, keys: Array, values: Array, what: str) -> str:
    """Of a stream: no tenth of it may be changed without any effect."""
    true = asked.run(keys, values, what, keep=True)
    data = true.raw[0]
    idle, refused, tried = 0, 0, 40
    for i in range(tried):
        at = (2 * i + 1) * len(data) // (2 * tried)
        bad = bytearray(data)
        bad[at] ^= 0x5A
        try:
            back = asked.subject.decode(bytes(bad), keys.shape[0], keys.shape[2], values.shape[2])
        except ForeignError:
            refused += 1
            continue
        idle += all(np.array_equal(x, y) for x, y in zip(back, (true.keys, true.values)))
    if idle > tried // 10:
        raise Violation(
            f"{idle} of {tried} bytes of a stream of {len(data):,}, evenly spread, can be changed without any effect",
            what,
        )
    return f"of {tried} bytes changed, {refused} refused, {tried - refused - idle} decoded otherwise, {idle} without effect"
