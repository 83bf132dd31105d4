"""Texts: the embedded and the standard library's ones are always there; fetched ones are checked; R's data is read without R."""

import hashlib
import struct
import zlib

import pytest

from kvtheory.models import rdata, texts
from kvtheory.models.fetch import ModelUnavailable


def test_texts_that_need_no_network():
    assert texts.text("sample").startswith("No one who had ever seen Catherine Morland")
    assert len(texts.text("python-docs")) > 100_000 and "class ArgumentParser" in texts.text("python-code")


def test_an_unknown_text_is_named():
    with pytest.raises(ValueError, match="no text 'ulysses'; there are sample, emma"):
        texts.text("ulysses")


def entry(get, content="hello\n"):
    return texts.Text("Toy", "toy package", "free", get, hashlib.sha256(content.encode()).hexdigest())


def test_a_fetched_text_is_checked_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setitem(texts.TEXTS, "toy", entry(lambda folder: calls.append(folder) or "hello\n"))
    assert texts.text("toy") == texts.text("toy") == "hello\n"
    assert len(calls) == 1 and not calls[0].exists()
    (kept,) = (tmp_path / "texts").iterdir()
    kept.write_text("damaged\n")
    assert texts.text("toy") == "hello\n" and len(calls) == 2


def test_another_text_or_none_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path))
    monkeypatch.setitem(texts.TEXTS, "toy", entry(lambda folder: "hullo\n"))
    with pytest.raises(texts.TextUnavailable, match="toy package holds another text"):
        texts.text("toy")

    def offline(folder):
        raise ModelUnavailable("no connection")

    monkeypatch.setitem(texts.TEXTS, "toy", entry(offline))
    with pytest.raises(texts.TextUnavailable, match=r"could not be had from toy package \(no connection\)"):
        texts.text("toy")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(texts.TextUnavailable, match="needs the program npm"):
        texts.text("moby-dick")


def test_prose_joins_lines_and_drops_headings():
    assert texts.prose("TITLE\n\nOne two\nthree.\n\n\n Four\n  five.", "One") == "One two three.\n\nFour five.\n"


def serialised(*strings, version=3):
    """A character vector as R writes it."""
    out = b"X\n" + struct.pack(">iii", version, 0, 0)
    if version == 3:
        out += struct.pack(">i", 5) + b"UTF-8"
    out += struct.pack(">ii", 16, len(strings))
    for s in strings:
        data = b"" if s is None else s.encode()
        out += struct.pack(">ii", 9, -1 if s is None else len(data)) + data
    return out


@pytest.mark.parametrize("version", [2, 3])
def test_r_character_vectors_are_read(version):
    vector = ["one", None, "", "zwölf"]
    assert rdata._unserialise(serialised(*vector, version=version)) == vector


def test_cut_and_foreign_r_data_is_refused():
    whole = serialised("one", "two")
    for cut in range(len(whole)):
        with pytest.raises(ValueError, match="R data"):
            rdata._unserialise(whole[:cut])
    with pytest.raises(ValueError, match="type 24"):
        rdata._unserialise(serialised()[:-8] + struct.pack(">i", 24))


def test_compressed_chunks_are_inflated():
    assert rdata._inflate(struct.pack(">I", 3) + zlib.compress(b"abc")) == b"abc"
