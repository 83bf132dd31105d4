"""The simulator's operations against what CUDA's programming guide says they do, computed in Python."""

from __future__ import annotations

import functools
import operator
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu.module import FOLDER, KernelFault, Source, launch, simulator

PATH = Path(__file__).parent / "semantics.cu"
TYPES = {"int": np.int32, "float": np.float32, "unsigned long long": np.uint64, "__half": np.float16}
WIDTHS = (1, 2, 4, 8, 16, 32)
INTEGERS = {"int": np.int32, "unsigned": np.uint32, "unsigned long long": np.uint64}
SOURCE = Source(
    PATH,
    [
        *(f"shuffle<{t}, {w}>" for t in TYPES for w in WIDTHS),
        "votes", "sum_of_the_living", "exchange_by_syncwarp", "block_votes", "reverse<float>", "reverse<unsigned char>", "unwritten_shared",
        "indices", "tickets", "turns", "locked", *(f"atomics<{t}>" for t in INTEGERS), "atomics_of_unsigned", "atomic_sum<float>",
        "atomic_sum<double>", "integers", "conversions", "two_roundings", "fused<__half>", "fused<__nv_bfloat16>", "to_and_fro<__half>",
        "to_and_fro<__nv_bfloat16>", "reductions<int>", "reductions<float>", "vectors<float, 4>", "vectors<__half, 8>", "vectors<unsigned char, 16>",
        "test_finite", "every_type", "write_at", "add_one",
    ],
)  # fmt: skip
ALL = 2**32 - 1
seeds = st.integers(0, 2**32 - 1)
both = st.sampled_from(["fast", "check"])
few = settings(max_examples=60, deadline=None)


def run(name: str, grid: Any, block: Any, args: tuple[Any, ...], build: str, seed: int, **how: Any) -> None:
    with simulator(build, seed):
        launch(SOURCE[name], grid, block, args, **how)


def source_lane(operation: int, lane: int, argument: int, width: int) -> int:
    """Of whom a lane gets the value, by the guide."""
    first = lane - lane % width
    if operation == 0:
        return first + argument % width
    other = {1: lane ^ argument, 2: lane - argument, 3: lane + argument}[operation]
    if operation == 1:
        return lane if other >= first + width else other
    return other if first <= other < first + width else lane


@few
@given(
    st.sampled_from(list(TYPES)), st.sampled_from(WIDTHS), st.integers(0, 3), st.integers(0, 31),
    st.one_of(st.just(ALL), st.integers(1, ALL)), seeds, both,
)  # fmt: skip
def test_shuffles(kind: str, width: int, operation: int, argument: int, mask: int, seed: int, build: str) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 1000, 32).astype(TYPES[kind])
    own = rng.integers(-40, 40, 32).astype(np.int32) if operation == 0 else np.full(32, argument, np.int32)
    out = np.zeros(32, TYPES[kind])
    lanes = [n for n in range(32) if mask >> n & 1]
    sources = {n: source_lane(operation, n, int(own[n]), width) for n in lanes}
    args = (x, own, out, np.uint32(mask), np.int32(operation))
    name = f"shuffle<{kind}, {width}>"
    if not set(sources.values()) <= set(lanes):
        with pytest.raises(KernelFault, match="takes no part"):
            run(name, 1, 32, args, build, seed)
        return
    run(name, 1, 32, args, build, seed)
    want = np.zeros(32, TYPES[kind])
    for n in lanes:
        want[n] = x[sources[n]]
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("operation", range(4))
@pytest.mark.parametrize("width", WIDTHS)
def test_every_shuffle_of_a_whole_warp(width: int, operation: int) -> None:
    x = np.random.default_rng(0).permutation(1000)[:32].astype(np.int32)
    for argument in range(32):
        out = np.zeros(32, np.int32)
        args = (x, np.full(32, argument, np.int32), out, np.uint32(ALL), np.int32(operation))
        run(f"shuffle<int, {width}>", 1, 32, args, "fast", argument)
        assert out.tolist() == [x[source_lane(operation, n, argument, width)] for n in range(32)], argument


def signed(x: int, bits: int = 32) -> int:
    x %= 1 << bits
    return x - (1 << bits) if x >> (bits - 1) else x


@few
@given(st.integers(0, ALL), seeds, both, st.integers(1, 4))
def test_votes_matches_and_reductions(mask: int, seed: int, build: str, variety: int) -> None:
    x = np.random.default_rng(seed).integers(0, 2**32, variety, dtype=np.uint32)[
        np.random.default_rng(seed + 1).integers(0, variety, 32)
    ]
    out = np.zeros((32, 16), np.uint32)
    run("votes", 1, 32, (x, out, np.uint32(mask)), build, seed)
    for lane in range(32):
        own = [n for n in range(32) if (mask >> n & 1) == (mask >> lane & 1)]
        values = [int(x[n]) for n in own]
        group = sum(1 << n for n in own)
        same = len(set(values)) == 1
        want = [
            sum(1 << n for n in own if x[n] & 1), any(v & 1 for v in values), all(v & 1 for v in values),
            sum(1 << n for n in own if x[n] == x[lane]), group if same else 0, same,
            sum(values) % 2**32, min(values), max(values),
            functools.reduce(operator.and_, values), functools.reduce(operator.or_, values), functools.reduce(operator.xor, values),
            min(signed(v) for v in values) % 2**32, max(signed(v) for v in values) % 2**32, sum(values) % 2**32,
        ]  # fmt: skip
        assert out[lane, :15].tolist() == [int(w) for w in want]


@few
@given(st.integers(1, 70), st.integers(0, 31), seeds, both)
def test_lanes_that_ended_are_not_waited_for(threads: int, ended: int, seed: int, build: str) -> None:
    x = np.random.default_rng(seed).integers(-100, 100, threads).astype(np.int32)
    out = np.full(threads, 12345, np.int32)
    run("sum_of_the_living", 1, threads, (x, out, np.int32(ended)), build, seed)
    for t in range(threads):
        alive = [u for u in range(t - t % 32, min(threads, t - t % 32 + 32)) if u % 32 >= ended]
        assert out[t] == (x[alive].sum() if t in alive else 12345)


@few
@given(st.integers(1, 100), st.integers(0, 99), seeds, both)
def test_barriers_that_count(threads: int, ended: int, seed: int, build: str) -> None:
    ended = min(ended, threads - 1)
    x = np.random.default_rng(seed).integers(0, 2, threads).astype(np.int32)
    x[:] = x if seed % 3 else seed % 2
    out = np.zeros((threads, 4), np.int32)
    run("block_votes", 1, threads, (x, out, np.int32(ended)), build, seed)
    alive = x[ended:]
    want = [alive.sum(), alive.all(), alive.any(), (alive == 0).sum()]
    assert (out[ended:] == want).all() and not out[:ended].any()


@few
@given(seeds, both)
def test_syncwarp_orders_memory(seed: int, build: str) -> None:
    x, out = np.arange(64, dtype=np.int32), np.zeros(64, np.int32)
    run("exchange_by_syncwarp", 3, 64, (x, out), build, seed) if build == "fast" else run(
        "exchange_by_syncwarp", 1, 64, (x, out), build, seed
    )
    np.testing.assert_array_equal(out, x + 1)


@few
@given(st.integers(1, 3000), st.integers(1, 200), st.sampled_from(["float", "unsigned char"]), seeds, both)
def test_static_and_dynamic_shared_memory(n: int, threads: int, kind: str, seed: int, build: str) -> None:
    dtype = np.float32 if kind == "float" else np.uint8
    x = np.random.default_rng(seed).integers(0, 255, n).astype(dtype)
    out = np.zeros(n + 2, dtype)
    run(f"reverse<{kind}>", 1, threads, (x, out, np.int32(n)), build, seed, shared_mem=x.nbytes)
    np.testing.assert_array_equal(out, [*x[::-1], x[-1], x[0]])


def test_unwritten_shared_memory_is_no_number() -> None:
    out = np.zeros(64, np.uint32)
    run("unwritten_shared", 2, 32, (out,), "fast", 0)
    assert (out == ALL).all()


@few
@given(st.tuples(*[st.integers(1, 4)] * 3), st.tuples(*[st.integers(1, 6)] * 3), seeds, both)
def test_indices_in_three_dimensions(grid: tuple[int, ...], block: tuple[int, ...], seed: int, build: str) -> None:
    out = np.zeros(int(np.prod(grid) * np.prod(block)), np.uint32)
    run("indices", grid, block, (out,), build, seed)
    np.testing.assert_array_equal(out, np.arange(1, out.size + 1))


@pytest.mark.parametrize("build", ["fast", "check"])
def test_a_seed_is_an_order_and_other_seeds_are_others(build: str) -> None:
    def order(seed: int, kernel: str = "tickets", blocks: int = 4) -> tuple[int, ...]:
        out = np.zeros(32 * blocks, np.uint32)
        run(kernel, blocks, 32, (np.zeros(1, np.uint32), out), build, seed)
        return tuple(out.tolist())

    assert order(0) == tuple(range(128))
    assert order(7) == order(7)
    assert len({order(s) for s in range(20)}) == 20
    assert len({order(s, "turns", 1) for s in range(20)}) == 20, "after a barrier too"
    first_blocks = {np.argmin(order(s)) // 32 for s in range(1, 40)}
    assert first_blocks == {0, 1, 2, 3}, "any block may be the first"
    first_threads = {np.argmin(order(s)) % 32 for s in range(1, 300)}
    assert len(first_threads) == 32, "and any thread"


@few
@given(seeds, both)
def test_a_lock_by_spinning(seed: int, build: str) -> None:
    total = np.zeros(1, np.uint32)
    run("locked", 2, 48, (np.zeros(1, np.uint32), total), build, seed)
    assert total[0] == 96


@few
@given(st.sampled_from(list(INTEGERS)), st.integers(1, 100), seeds, both)
def test_integer_atomics(kind: str, n: int, seed: int, build: str) -> None:
    dtype = INTEGERS[kind]
    info = np.iinfo(dtype)
    x = np.random.default_rng(seed).integers(info.min, info.max, n, dtype=dtype, endpoint=True)
    start = np.random.default_rng(seed + 1).integers(info.min, info.max, 8, dtype=dtype, endpoint=True)
    start[7] = 0
    out = start.copy()
    run(f"atomics<{kind}>", 3, 64, (x, out, np.int32(n)), build, seed)
    values = [int(v) for v in x]
    bits = 8 * np.dtype(dtype).itemsize
    total = int(start[0]) + sum(values)
    assert int(out[0]) == (signed(total, bits) if info.min < 0 else total % 2**bits)
    assert int(out[1]) == min(int(start[1]), *values) and int(out[2]) == max(int(start[2]), *values)
    for k, f in ((3, operator.and_), (4, operator.or_), (5, operator.xor)):
        assert int(out[k]) == functools.reduce(f, values, int(start[k]))
    assert out[6] in x and (out[7] in x)


@few
@given(st.integers(1, 64), st.integers(0, 70), seeds, both)
def test_wrapping_atomics(threads: int, most: int, seed: int, build: str) -> None:
    x = np.random.default_rng(seed).integers(0, 2**32, threads, dtype=np.uint32)
    out = np.array([5, 0, 3], np.uint32)
    run("atomics_of_unsigned", 1, threads, (x, out, np.uint32(most)), build, seed)
    up, down = 0, 3
    for _ in range(threads):
        up = 0 if up >= most else up + 1
        down = most if down == 0 or down > most else down - 1
    assert out.tolist() == [(5 - int(x.sum(dtype=np.uint64))) % 2**32, up, down]


@few
@given(st.sampled_from(["float", "double"]), st.integers(1, 100), seeds, both)
def test_float_atomics(kind: str, threads: int, seed: int, build: str) -> None:
    dtype = np.float32 if kind == "float" else np.float64
    x, out = np.random.default_rng(seed).integers(-1000, 1000, threads).astype(dtype), np.zeros(1, dtype)
    run(f"atomic_sum<{kind}>", 1, threads, (x, out), build, seed)
    assert out[0] == x.sum()


word = st.one_of(st.integers(0, ALL), st.sampled_from([0, 1, ALL, 2**31, 2**31 - 1, 0x80008000]))


@few
@given(st.lists(st.tuples(word, word, word), min_size=1, max_size=32), both)
def test_integer_intrinsics(rows: list[tuple[int, int, int]], build: str) -> None:
    a, b, c = (np.array(col, np.uint32) for col in zip(*rows))
    out = np.zeros((len(rows), 32), np.uint32)
    run("integers", 1, len(rows), (a, b, c, out), build, 0)
    for (x, y, z), got in zip(rows, out):
        w, v, pair = x << 32 | y, y << 32 | z, y << 32 | x
        permuted = 0
        for i in range(4):
            choice = z >> (4 * i)
            byte = pair >> (8 * (choice & 7)) & 255
            permuted |= (255 * (byte >> 7) if choice & 8 else byte) << (8 * i)
        wide = (signed(w, 64) * signed(v, 64) >> 64) % 2**64
        want = [
            x.bit_count(), 32 - x.bit_length(), (x & -x).bit_length(), int(f"{x:032b}"[::-1], 2),
            w.bit_count(), 64 - w.bit_length(), (w & -w).bit_length(), int(f"{w:064b}"[::-1], 2) >> 32,
            (pair << (z & 31) >> 32) % 2**32, (pair >> (z & 31)) % 2**32,
            (pair << min(z & 63, 32) >> 32) % 2**32, (pair >> min(z & 63, 32)) % 2**32,
            permuted, x * y >> 32, (signed(x) * signed(y) >> 32) % 2**32,
            (z + sum((x >> s & 255) * (y >> s & 255) for s in (0, 8, 16, 24))) % 2**32,
            w * v >> 96, (w * v >> 64) % 2**32, min(x, y), max(x, y),
            min(signed(x), signed(y)) % 2**32, max(signed(x), signed(y)) % 2**32, x, wide >> 32, wide % 2**32,
        ]  # fmt: skip
        assert got[:25].tolist() == want


floats = st.floats(width=32, allow_nan=True, allow_infinity=True)


@few
@given(
    st.lists(
        st.one_of(
            floats, st.sampled_from([0.5, 1.5, 2.5, -0.5, -1.5, 2147483648.0, 4294967296.0, -2147483648.0, 2.0**63])
        ),
        min_size=1,
        max_size=32,
    ),
    both,
)
def test_conversions_saturate(values: list[float], build: str) -> None:
    x = np.array(values, np.float32)
    ints, words, longs = np.zeros((x.size, 4), np.int32), np.zeros((x.size, 2), np.uint32), np.zeros(x.size, np.int64)
    run("conversions", 1, x.size, (x, ints, words, longs), build, 0)

    def clip(v: float, low: int, high: int) -> int:
        return low if v <= low else high if v >= high else int(v)

    for i, f in enumerate(x.astype(np.float64)):
        if np.isnan(f):
            assert not ints[i].any() and not words[i].any() and longs[i] == -(2**63)
            continue
        rounded = [np.rint(f), np.trunc(f), np.floor(f), np.ceil(f)]
        assert ints[i].tolist() == [clip(r, -(2**31), 2**31 - 1) for r in rounded]
        assert words[i].tolist() == [clip(r, 0, 2**32 - 1) for r in rounded[:2]]
        assert longs[i] == clip(rounded[0], -(2**63), 2**63 - 1)


@few
@given(seeds, both)
def test_float_arithmetic_is_that_of_numpy(seed: int, build: str) -> None:
    rng = np.random.default_rng(seed)
    a, b, c = (rng.standard_normal((3, 64)) * 2.0 ** rng.integers(-60, 60, (3, 64))).astype(np.float32)
    a[:8] *= np.float32(2.0**-80)  # subnormal products
    b[8] = 0
    out = np.zeros((4, 64), np.float32)
    run("two_roundings", 1, 64, (a, b, c, out), build, seed)
    with np.errstate(all="ignore"):
        want = [a * b + c, a / b, np.sqrt(np.abs(a))]
    np.testing.assert_array_equal(out[:3], want)
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        if abs(exact) < Fraction(float(np.finfo(np.float32).max)):
            near = np.float32(float(exact))
            choices = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
            best = min(abs(Fraction(float(v)) - exact) for v in choices if np.isfinite(v))
            assert abs(Fraction(float(out[3, i])) - exact) == best


@few
@given(st.sampled_from(["__half", "__nv_bfloat16"]), seeds, both)
def test_fused_half_is_rounded_once(kind: str, seed: int, build: str) -> None:
    dtype = np.dtype(np.float16 if kind == "__half" else ml_dtypes.bfloat16)
    rng = np.random.default_rng(seed)
    reach = 4 if kind == "__half" else 60
    a, b, c = (rng.standard_normal((3, 64)) * 2.0 ** rng.integers(-reach, reach, (3, 64))).astype(dtype)
    c[:32] = (a[:32].astype(np.float64) * b[:32].astype(np.float64) * 2.0 ** rng.integers(-30, 30, 32)).astype(dtype)
    out = np.zeros(64, dtype)
    run(f"fused<{kind}>", 1, 64, (a, b, c, out), build, seed)
    for x, y, z, got in zip(a, b, c, out):
        if not (np.isfinite(float(got)) and np.isfinite(float(z))):
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        bits = got.view(np.uint16)
        off = abs(Fraction(float(got)) - exact)
        for step in (-1, 1):  # no neighbour is nearer, and a tie goes to the even one
            other = float(np.array(int(bits) + step & 0xFFFF, np.uint16).view(dtype))
            if np.isfinite(other) and (float(got) != 0):
                away = abs(Fraction(other) - exact)
                assert off < away or (off == away and int(bits) % 2 == 0)


@pytest.mark.parametrize("build", ["fast", "check"])
def test_fused_bfloat16_beside_a_tie(build: str) -> None:
    """a b lies in the middle between two numbers, and c, which no double holds beside it, decides."""
    b16 = ml_dtypes.bfloat16
    a, b = np.full(3, 1 + 2.0**-7).astype(b16), np.full(3, 1.5).astype(b16)
    c, out = np.array([2.0**-70, 0, -(2.0**-70)]).astype(b16), np.zeros(3, b16)
    run("fused<__nv_bfloat16>", 1, 3, (a, b, c, out), build, 0)
    assert out.astype(float).tolist() == [1.5 + 2 * 2.0**-7, 1.5 + 2 * 2.0**-7, 1.5 + 2.0**-7]
    run("fused<__nv_bfloat16>", 1, 3, (-a, b, -c, out), build, 0)
    assert (-out.astype(float)).tolist() == [1.5 + 2 * 2.0**-7, 1.5 + 2 * 2.0**-7, 1.5 + 2.0**-7]


@few
@given(st.sampled_from(["__half", "__nv_bfloat16"]), st.lists(floats, min_size=1, max_size=32), both)
def test_narrow_types_round_as_numpy_does(kind: str, values: list[float], build: str) -> None:
    dtype = np.dtype(np.float16 if kind == "__half" else ml_dtypes.bfloat16)
    x = np.array(values, np.float32)
    narrow, back = np.zeros(x.size, dtype), np.zeros(x.size, np.float32)
    run(f"to_and_fro<{kind}>", 1, x.size, (x, narrow, back), build, 0)
    with np.errstate(all="ignore"):
        want = x.astype(dtype)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(narrow.view(np.uint16)[number], want.view(np.uint16)[number])
    assert np.isnan(back[~number]).all()
    np.testing.assert_array_equal(back[number], want.astype(np.float32)[number])


@few
@given(st.sampled_from(["int", "float"]), seeds, both)
def test_warp_reductions_of_common(kind: str, seed: int, build: str) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.integers(-(2**25), 2**25, 64) if kind == "int" else rng.standard_normal(64) * 1e3).astype(TYPES[kind])
    out = np.zeros((64, 3), x.dtype)
    run(f"reductions<{kind}>", 1, 64, (x, out), build, seed)
    for w in (x[:32], x[32:]):
        s = w.copy()
        for d in (16, 8, 4, 2, 1):
            s = s + s[np.arange(32) ^ d]
        got = out[:32] if w is not None and np.shares_memory(w, x[:32]) else out[32:]
        assert (s == s[0]).all() and (got == [s[0], w.max(), w.min()]).all()


@pytest.mark.parametrize("build", ["fast", "check"])
@pytest.mark.parametrize(
    ("kind", "n", "dtype"), [("float", 4, np.float32), ("__half", 8, np.float16), ("unsigned char", 16, np.uint8)]
)
def test_vector_accesses_of_common(kind: str, n: int, dtype: Any, build: str) -> None:
    x = np.arange(32 * n).astype(dtype)
    out = np.zeros_like(x)
    run(f"vectors<{kind}, {n}>", 1, 32, (x, out), build, 3)
    np.testing.assert_array_equal(out, x)


@few
@given(st.lists(floats, min_size=1, max_size=32), both)
def test_is_finite_of_common(values: list[float], build: str) -> None:
    x = np.array(values, np.float32)
    out = np.zeros(x.size, np.int32)
    run("test_finite", 1, x.size, (x, out), build, 0)
    np.testing.assert_array_equal(out, np.isfinite(x))


def test_common_is_the_product_s() -> None:
    assert (FOLDER / "common.cuh").is_file()
