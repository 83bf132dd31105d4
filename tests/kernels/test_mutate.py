"""The tool that breaks kernels: it finds every place, and changes nothing else."""

from __future__ import annotations

from tests.kernels.mutate import mutants

SOURCE = """#include "common.cuh"
// a comment with atomicAdd( and i < n is no code
template <class T, int N = (3)>
__global__ void k(T* x, int n) {  // n < 5
    __shared__ int s[4];
    if (n > 1 && threadIdx.x < n) s[0] = 1;
    __syncthreads();
    const int sign = n < 0 ? -1 : 1;
    const int most = n < 7 ? n : 7;
    atomicAdd(&x[0], T(static_cast<float>(n)));
    __syncwarp(1u << most);
    while (s[0] <= sign) ++s[0];
}
"""


def test_every_barrier_guard_and_atomic_is_broken_once() -> None:
    found = [(m.line, m.name.rsplit("[", 1)[1]) for m in mutants(SOURCE, "k.cu")]
    assert found == [
        (6, "> becomes >=]"), (6, "< becomes <=]"), (7, "no __syncthreads]"), (9, "< becomes <=]"), (10, "atomicAdd becomes plain]"),
        (11, "no __syncwarp]"), (12, "<= becomes <]"),
    ]  # fmt: skip


def test_a_mutant_differs_in_its_line_only() -> None:
    for m in mutants(SOURCE, "k.cu"):
        if "plain" in m.name:
            assert "plain_Add(&x[0]" in m.text and "atomicAdd(&x" not in m.text and "#line 2" in m.text
            continue
        old, new = SOURCE.splitlines(), m.text.splitlines()
        assert [i + 1 for i, (a, b) in enumerate(zip(old, new)) if a != b] == [m.line] and len(old) == len(new)


def test_names_are_unique_and_do_not_depend_on_the_place() -> None:
    names = [m.name for m in mutants(SOURCE + SOURCE, "k.cu")]
    assert len(set(names)) == len(names)
    assert [m.name for m in mutants("\n\n" + SOURCE, "k.cu")] == [m.name for m in mutants(SOURCE, "k.cu")]
