"""CRC-32 is zlib's, with isal and without."""

import importlib
import sys
import zlib

from hypothesis import given
from hypothesis import strategies as st

from kvtheory import checksums


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_the_number_is_zlibs(data, before):
    assert checksums.crc32(data, before) == zlib.crc32(data, before)
    assert checksums.crc32(data) == zlib.crc32(data)


def test_where_isal_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "isal", None)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    try:
        assert importlib.reload(checksums).crc32 is zlib.crc32
    finally:
        monkeypatch.undo()
        assert importlib.reload(checksums).crc32 is not zlib.crc32
