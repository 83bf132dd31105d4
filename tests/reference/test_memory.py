"""Memory given out again is nobody else's, and not more than is said is kept."""

import gc
import threading

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvtheory
import reference
from reference.memory import LEAST, Pool

SIZE = LEAST // 4


def test_memory_comes_back_and_is_given_out_again() -> None:
    pool = Pool()
    first = pool.empty((4, SIZE), np.dtype(np.float32))
    place = first.ctypes.data
    del first
    assert pool.held == 4 * LEAST
    again = pool.empty((SIZE, 4), np.dtype(np.float32))
    assert again.ctypes.data == place and again.flags.c_contiguous and again.flags.writeable
    assert pool.held == 0


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
def test_a_view_keeps_its_memory(dtype: type) -> None:
    pool = Pool()
    array = pool.empty((8, SIZE), np.dtype(dtype))
    array[...] = 1
    view = array.reshape(2, 4, SIZE).transpose(1, 0, 2)[1:, :, ::7]
    del array
    gc.collect()
    other = pool.empty((8, SIZE), np.dtype(dtype))
    other[...] = 2
    assert (view == np.array(1, dtype)).all() and not np.shares_memory(view, other)


def test_not_more_than_it_may_keep() -> None:
    pool = Pool(most=5 * LEAST)
    arrays = [pool.empty((SIZE,), np.dtype(np.float32)) for _ in range(9)]
    del arrays
    assert pool.held == 5 * LEAST
    # sizes that are no more asked for are let go
    other = pool.empty((2 * SIZE,), np.dtype(np.float32))
    del other
    assert pool.held == 2 * LEAST
    # none of the largest and none of the smallest are kept
    for count in (6 * SIZE, SIZE - 1, 0):
        array = pool.empty((count,), np.dtype(np.float32))
        assert array.flags.owndata and array.size == count


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), max_size=40))
def test_living_arrays_never_overlap(steps: list[tuple[int, int]]) -> None:
    pool = Pool(most=8 * LEAST)
    living: dict[int, tuple[np.ndarray, int]] = {}
    for stamp, (place, times) in enumerate(steps):
        living.pop(place, None)
        array = pool.empty((times * LEAST // 2,), np.dtype(np.uint16))
        array[...] = stamp
        living[place] = array, stamp
        for held, written in living.values():
            assert held[0] == written and held[-1] == written and (held[:: LEAST // 8] == written).all()
    assert pool.held <= pool.most


def test_threads_do_not_get_the_same_memory() -> None:
    pool, wrong = Pool(), []

    def work(stamp: int) -> None:
        for _ in range(200):
            array = pool.empty((SIZE,), np.dtype(np.float32))
            array[::1024] = stamp
            if (array[::1024] != stamp).any():
                wrong.append(stamp)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_decoded_arrays_stay_what_they_were() -> None:
    layers = [kvtheory.synthetic.make("gaussian", tokens=2048, head_dim=128, queries=1, seed=seed) for seed in (0, 1)]
    for codec in (reference.KIVI(), reference.TurboQuant(), reference.QJL(), reference.PolarQuant()):
        streams = [codec.encode(layer) for layer in layers]
        first = codec.decode(streams[0])
        keys = first.keys.copy()
        second = codec.decode(streams[1])
        assert not np.shares_memory(first.keys, second.keys)
        np.testing.assert_array_equal(first.keys, keys)
        place = second.keys.ctypes.data
        del second
        third = codec.decode(streams[1])
        assert place in (third.keys.ctypes.data, third.values.ctypes.data)  # the memory of the second, given out again
