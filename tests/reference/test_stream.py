"""The container: what is sealed comes back, and whatever else comes in is CorruptStream with an offset."""

import contextlib
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import CorruptStream, StateMismatch, stream
from reference.stream import Header, Kind, Reader

headers = st.builds(
    Header,
    st.sampled_from([Kind.LAYER, Kind.CACHE, Kind.STATE]),
    st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,20}", fullmatch=True),
    st.binary(max_size=300),
    st.sampled_from([b"", bytes(16), b"0123456789abcdef"]),
)
parts = st.lists(st.binary(max_size=200), max_size=6)


@given(st.binary(max_size=100))
def test_sealed_bodies_come_back(body):
    sealed = stream.seal(body)
    assert stream.unseal(sealed) == body
    assert stream.unseal(memoryview(sealed)) == body
    assert len(sealed) == len(body) + 8


@given(st.binary(max_size=60), st.data())
def test_every_altered_byte_is_seen(body, data):
    sealed = bytearray(stream.seal(body))
    at = data.draw(st.integers(0, len(sealed) - 1))
    sealed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptStream) as raised:
        stream.unseal(bytes(sealed))
    assert raised.value.offset in (0, len(sealed) - 4)


@given(st.binary(max_size=60), st.data())
def test_every_cut_is_seen(body, data):
    sealed = stream.seal(body)
    with pytest.raises(CorruptStream):
        stream.unseal(sealed[: data.draw(st.integers(0, len(sealed) - 1))])


@given(headers, parts)
def test_what_is_written_is_read(header, group):
    found, groups = stream.read(stream.write(header, [group]))
    assert found == header
    assert [bytes(p.rest()) for p in groups[0]] == group


@given(st.lists(parts, max_size=5))
def test_layers_keep_their_parts_apart(groups):
    header = Header(Kind.LAYERS, "X")
    found, read = stream.read(stream.write(header, groups))
    assert found == header
    assert [[bytes(p.rest()) for p in group] for group in read] == groups


def test_offsets_are_of_the_whole_stream():
    data = stream.write(Header(Kind.LAYER, "Codec", b"pp"), [[b"abc", b"defg"]])
    _, [[first, second]] = stream.read(data)
    assert data[first.offset :][:3] == b"abc" and data[second.offset :][:4] == b"defg"
    second.take(1)
    with pytest.raises(CorruptStream, match=f"at byte {second.offset}") as raised:
        second.take(4)
    assert raised.value.offset == second.offset


def test_junk_behind_the_parts_is_refused():
    body = stream.unseal(stream.write(Header(Kind.LAYER, "Codec"), [[b"abc"]]))
    with pytest.raises(CorruptStream, match="1 bytes too many"):
        stream.read(stream.seal(body + b"\0"))


def test_newer_versions_say_so():
    body = bytearray(stream.unseal(stream.write(Header(Kind.LAYER, "Codec"), [[b"abc"]])))
    body[0] = stream.VERSION + 1
    with pytest.raises(CorruptStream, match=f"version {stream.VERSION + 1}.*upgrade"):
        stream.read(stream.seal(bytes(body)))


def test_the_draft_is_refused():
    body = bytearray(stream.unseal(stream.write(Header(Kind.LAYER, "Codec"), [[b"abc"]])))
    assert body[0] == stream.VERSION == 1
    body[0] = 0
    with pytest.raises(CorruptStream, match="version 0, expected 1 to 1"):
        stream.read(stream.seal(bytes(body)))


@pytest.mark.parametrize("count, what", [(stream.MOST_PARTS + 1, "number of parts"), (1 << 62, "number of parts")])
def test_counts_are_refused_before_anything_is_made(count, what):
    head = bytes([stream.VERSION, 0, 1]) + b"X" + b"\0\0" + stream.varint(count)
    with pytest.raises(CorruptStream, match=what):
        stream.read(stream.seal(head + b"\0" * 100))


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="expected bytes, got str"):
        stream.unseal("text")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="codec"):
        stream.write(Header(Kind.LAYER, "no spaces"), [[]])
    with pytest.raises(ValueError, match="groups"):
        stream.write(Header(Kind.LAYER, "X"), [[], []])


@given(st.integers(0, (1 << 64) - 1))
def test_varints_come_back(value):
    written = stream.varint(value)
    reader = Reader(written)
    assert reader.varint() == value and reader.remaining == 0
    assert len(written) == max(1, -(-value.bit_length() // 7))


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_zigzag_comes_back(value):
    assert Reader(stream.zigzag(value)).zigzag() == value


@pytest.mark.parametrize("wrong", [b"", b"\x80", b"\xff" * 9, b"\xff" * 10 + b"\0", b"\x80\0", b"\xff" * 9 + b"\x02"])
def test_only_shortest_varints_are_read(wrong):
    with pytest.raises(CorruptStream):
        Reader(wrong).varint()


@given(st.binary(max_size=40))
def test_readers_never_raise_anything_else(data):
    for read in (
        lambda r: r.varint(), lambda r: r.zigzag(), lambda r: r.array("<u4", r.varint()), lambda r: r.part(r.u8()).end(),
    ):  # fmt: skip
        reader = Reader(data, 100)
        try:
            for _ in range(50):
                read(reader)
        except CorruptStream as problem:
            assert 100 <= problem.offset <= 100 + len(data)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_stream_or_corrupt(data):
    for candidate in (data, stream.seal(data), stream.seal(bytes([stream.VERSION, 0]) + data)):
        with contextlib.suppress(CorruptStream):
            stream.read(candidate)


def test_errors_survive_a_process_boundary():
    for problem in (CorruptStream("what", 17), StateMismatch("which")):
        again = pickle.loads(pickle.dumps(problem))
        assert type(again) is type(problem) and str(again) == str(problem) and isinstance(again, ValueError)
    assert str(CorruptStream("what", 17)) == "what (at byte 17)" and CorruptStream("what", 17).offset == 17


def test_checksum_is_crc32_of_magic_and_body():
    sealed = stream.seal(b"body")
    assert sealed == b"\x93KVSbody" + zlib.crc32(b"\x93KVSbody").to_bytes(4, "little")
