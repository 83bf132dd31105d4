"""Tables of kernels: made once for an owner, a name and a device, and gone with the owner."""

import gc
import weakref

import numpy as np

from gpu.resident import device, host, kept


class Owner:
    """Compared by identity, as coders and tables are."""


def test_tables_are_made_once_and_go_with_their_owner(backend):
    made, xp = [], backend.xp

    def make(value):
        made.append(value)
        return np.full(3, value)

    first, second = Owner(), Owner()
    one = kept(first, "a", xp, lambda: make(1))
    assert kept(first, "a", xp, lambda: make(2)) is one and host(one).tolist() == [1, 1, 1]
    assert host(kept(first, "b", xp, lambda: make(3))).tolist() == [3, 3, 3]
    assert host(kept(second, "a", xp, lambda: make(4))).tolist() == [4, 4, 4]
    assert made == [1, 3, 4]
    gone = weakref.ref(one) if xp is np else None
    del one, first
    gc.collect()
    assert gone is None or gone() is None
    assert host(kept(second, "a", xp, lambda: make(5))).tolist() == [4, 4, 4] and made == [1, 3, 4]


def test_transfers(backend):
    array = np.arange(6).reshape(2, 3)
    there = device(array.T, backend.xp)
    assert there.flags.c_contiguous and np.array_equal(host(there), array.T)
    if backend.name == "simulator":
        assert device(array, np) is array and host(array) is array
