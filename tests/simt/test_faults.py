"""Every planted fault is named: the rule, the line, the argument or variable, in every order of threads."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from gpu.module import KernelFault, Source, launch, simulator
from gpu.simt import machine

PATH = Path(__file__).parent / "faults.cu"
#: kernel -> (rule, what the sentence says)
FAULTS = {
    "past_end": ("out of bounds", r"write of 4 bytes at byte offset 256 of argument 0 \(x\) \(256 bytes\)"),
    "before_start": ("out of bounds", r"read of 4 bytes at byte offset -4 of argument 0 \(x\)"),
    "far_away": ("out of bounds", "belongs to no argument"),
    "copied_past_end": ("out of bounds", r"read of 260 bytes at byte offset 0 of argument 0 \(x\) \(256 bytes\)"),
    "past_dynamic": ("out of bounds", r"byte offset 1\d\d of dynamic shared memory \(100 bytes\)"),
    "into_next_variable": ("out of bounds", r"byte offset \d+ of shared memory first \(256 bytes\)"),
    "row_too_long": ("out of bounds", r"index 16 of an array 'float \[16\]'"),
    "local_array": ("out of bounds", r"index 4 of an array 'float \[4\]'"),
    "other_stack": ("out of bounds", "local memory of thread 0"),
    "race_shared": ("data race", "of shared memory s races with a"),
    "race_warp": ("data race", "of shared memory s races with a"),
    "race_after_shuffle": ("data race", "of shared memory s races with a"),
    "race_of_warps": ("data race", "of shared memory s races with a"),
    "race_blocks": ("data race", r"of argument 0 \(x\) races with a write by thread 0 of another block"),
    "race_read_blocks": ("data race", r"of argument 0 \(x\) races with a (read|write) by thread 0 of another block"),
    "race_mixed": ("data race", "(atomic .* races with a write|(write|read) .* races with an atomic)"),
    "race_late": ("data race", "of another block"),
    "race_plain_after_atomic": ("data race", "(read of .* races with an atomic|atomic of .* races with a read)"),
    "race_bytes": ("data race", r"write of byte offset \d+ of argument 0 \(x\) races with a write"),
    "uninitialised": ("uninitialised", "byte offset 0 of shared memory s"),
    "divergent_barrier": ("divergent barrier", "thread 0 waits in __syncthreads at line .*, thread 32 in __syncthreads at line"),
    "missing_lane": ("deadlock", "32 of 64 threads wait .* thread 3 in __syncthreads"),
    "barrier_in_loop": ("deadlock", r"thread 40 in __syncwarp at line \d+ \(mask 00000300\)"),
    "wrong_mask": ("mask", "the mask 0000ffff of __shfl_xor_sync lacks lane"),
    "two_masks": ("divergent warp operation", "mask fffffff[df]"),
    "inactive_lane": ("inactive lane", r"lane 0 reads lane 16, which takes no part \(mask 0000ffff\)"),
    "exited_lane": ("inactive lane", "reads lane 7, which takes no part"),
    "wrong_width": ("width", "width 12"),
    "active_mask": ("unspecified", "__activemask"),
    "misaligned": ("misaligned", r"byte offset 4 of argument 0 \(x\) .* 'const struct uint4'"),
    "misaligned_atomic": ("misaligned", r"atomic of 4 bytes at byte offset 2 of argument 0 \(x\)"),
    "read_only": ("read-only", r"write of argument 0 \(x\)"),
    "shift_too_far": ("arithmetic", r"shift of 'unsigned int' \(1\) by 40 bits"),
    "signed_overflow": ("arithmetic", "a product does not fit 'int'"),
    "cast_overflow": ("arithmetic", "a value of 'float' does not fit 'int'"),
    "divided_by_zero": ("arithmetic", "divided by zero"),
    "endless": ("endless", "still running after 0.2 s"),
    "endless_spin": ("endless", "still running after 0.2 s"),
    "stack_overflow": ("stack overflow", "thread .* uses more than"),
    "trap": ("trap", "__trap"),
}  # fmt: skip
SCALARS = {
    "stack_overflow": 100_000,
    "signed_overflow": 100_000,
    "shift_too_far": 40,
    "cast_overflow": 3e9,
    "divided_by_zero": 0,
    "local_array": 4,
}
#: what the fast build sees too: guard pages behind the arguments, barriers and masks, stacks, endless loops
FAST = (
    "past_end", "far_away", "divergent_barrier", "missing_lane", "barrier_in_loop", "wrong_mask", "two_masks", "inactive_lane",
    "exited_lane", "wrong_width", "active_mask", "endless", "endless_spin", "stack_overflow", "trap", "divided_by_zero", "read_only",
    "misaligned_atomic",
)  # fmt: skip
NUMPY = {(b"f", 4): np.float32, (b"i", 4): np.int32, (b"u", 4): np.uint32, (b"u", 1): np.uint8}
SOURCE = Source(PATH, list(FAULTS))


def arguments(name: str, library: machine.Library) -> list[np.ndarray | np.generic]:
    out: list[np.ndarray | np.generic] = []
    for p in library.entries[name].parameters:
        dtype = NUMPY[p.kind, p.size]
        out.append(np.zeros(64, dtype) if p.pointer else dtype(SCALARS.get(name, 64)))
    return out


def lines(name: str) -> set[str]:
    """The places marked in the source."""
    marked = re.compile(rf"// FAULT {name}$")
    return {f"faults.cu:{i}" for i, line in enumerate(PATH.read_text().splitlines(), 1) if marked.search(line)}


def test_every_kernel_of_the_file_is_here() -> None:
    assert set(re.findall(r"^__global__ void (\w+)", PATH.read_text(), re.M)) == set(FAULTS) and len(FAULTS) >= 20


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("name", FAULTS)
def test_the_checked_build_names_it(name: str, seed: int) -> None:
    args = arguments(name, machine.load(PATH, SOURCE.instances, "check"))
    with pytest.raises(KernelFault) as caught, simulator("check", seed, seconds=0.2):
        launch(SOURCE[name], 2, 64, args, shared_mem=100)
    fault = caught.value
    rule, sentence = FAULTS[name]
    assert fault.fault == rule
    assert re.search(sentence, fault.detail), fault.detail
    assert fault.kernel == name
    assert fault.places and set(fault.places) <= lines(name), (fault.places, lines(name))
    assert len(fault.places) == (2 if rule == "data race" else 1)
    assert 0 <= fault.thread[0] < 64 and 0 <= fault.block[0] < 2
    assert f"thread {fault.thread} of block {fault.block}" in str(fault)
    assert all(not a.any() for a in args if isinstance(a, np.ndarray)), "a fault leaves the arguments as they were"


@pytest.mark.parametrize("name", FAST)
def test_the_fast_build_sees_it_too(name: str) -> None:
    args = arguments(name, machine.load(PATH, SOURCE.instances, "fast"))
    with pytest.raises(KernelFault) as caught, simulator("fast", 1, seconds=0.2):
        launch(SOURCE[name], 2, 64, args, shared_mem=100)
    fault = caught.value
    assert fault.fault == {"divided_by_zero": "trap"}.get(name, FAULTS[name][0])
    if name == "read_only":
        assert not fault.places  # seen afterwards only
    else:
        assert set(fault.places) <= lines(name) and fault.places


def test_the_portable_change_of_stacks_sees_the_same() -> None:
    library = machine.load(PATH, SOURCE.instances, "check", portable=True)
    for name in ("past_end", "race_shared", "divergent_barrier", "missing_lane", "stack_overflow", "endless"):
        with pytest.raises(KernelFault) as caught:
            machine.launch(
                library, name, (2, 1, 1), (64, 1, 1), arguments(name, library), 100, seed=1, races=True, seconds=0.2
            )
        assert caught.value.fault == FAULTS[name][0] and set(caught.value.places) <= lines(name)


def test_races_can_be_allowed() -> None:
    x = np.zeros(64, np.float32)
    with simulator("check", races=False):
        launch(SOURCE["race_blocks"], 2, 64, (x,))
    assert x[0] == 2


def test_a_launch_after_a_fault_is_as_good_as_new() -> None:
    for build in ("fast", "check"):
        x = np.zeros(65, np.float32)
        with simulator(build):
            for _ in range(3):
                with pytest.raises(KernelFault):
                    launch(SOURCE["missing_lane"], 2, 64, (x,))
                launch(SOURCE["past_end"], 2, 64, (x,))
        assert x[1:].all() and x[0] == 0
