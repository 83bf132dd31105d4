"""Which code a task's rows depend on: a change touches the tasks of the codec that it is in, and no others."""

import shutil
import textwrap
from pathlib import Path

import pytest

import reference
from kvtheory import sweep
from reference import compare
from reference.compare import fitted, versions
from reference.compare.tasks import measure
from tests.sweep.test_compare import SPLIT, Here, command, file, here, sources  # noqa: F401  (fixtures)

SOURCES = {
    "__init__": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from PACKAGE.only_types import X\n",
    "one": "import numpy\nfrom PACKAGE import shared\nfrom PACKAGE.deep import value\n\ndef f():\n    from PACKAGE.late import g\n    return g\n",
    "other": "from . import shared\n",
    "shared": "x = 1\n",
    "deep": "from PACKAGE.deeper import value\n",
    "deeper": "value = 2\n",
    "late": "def g():\n    pass\n",
    "only_types": "X = int\n",
    "lonely": "import zlib, json\n",
}


@pytest.fixture
def package(tmp_path, monkeypatch, request):
    """A package of its own name for each test (names are remembered), and a function that forgets what was read."""
    name = f"versioned_{abs(hash(request.node.name))}"
    folder = tmp_path / name
    folder.mkdir()
    for module, text in SOURCES.items():
        (folder / f"{module}.py").write_text(text.replace("PACKAGE", name))
    monkeypatch.syspath_prepend(tmp_path)

    def at(*modules):
        versions.of_modules.cache_clear()
        versions._imports.cache_clear()
        return versions.of_modules(*(f"{name}.{module}" for module in modules))

    yield name, folder, at
    versions.of_modules.cache_clear()
    versions._imports.cache_clear()


def test_a_closure_is_what_a_module_imports_wherever_it_imports_it(package):
    name, _, _ = package
    ours, others = versions.closure(f"{name}.one")
    assert ours == {name, *(f"{name}.{m}" for m in ("one", "shared", "deep", "deeper", "late"))}
    assert others == {"numpy"}
    assert versions.closure(f"{name}.lonely") == ({name, f"{name}.lonely"}, {"zlib"})


@pytest.mark.parametrize(
    ("changed", "touched"),
    [("one", {"one"}), ("late", {"one"}), ("deeper", {"one"}), ("shared", {"one", "other"}), ("only_types", set()), ("__init__", {"one", "other", "lonely"})],
)  # fmt: skip
def test_a_change_touches_what_depends_on_it(package, changed, touched):
    _, folder, at = package
    before = {module: at(module) for module in ("one", "other", "lonely")}
    path = folder / f"{changed}.py"
    path.write_text(path.read_text() + "# changed\n")
    assert {module for module, version in before.items() if at(module) != version} == touched


def test_another_library_is_another_version(package, monkeypatch):
    _, _, at = package
    before = at("one"), at("other"), at("lonely")
    monkeypatch.setattr(versions, "_version", lambda name: "9.9")
    assert [a != b for a, b in zip(before, (at("one"), at("other"), at("lonely")))] == [True, False, True]


def test_codecs_do_not_depend_on_each_other():
    """Every codec's own module is in its version; those of other systems are not, but where it is built on them."""
    built_on = {
        "ScissorHands": {"reference.snapkv"},
        "TokenReplay": {"reference.turboquant"},
        "PredictiveDelta": {"reference.turboquant", "reference.token_replay"},
        "PrefixStore": {"reference.pipeline"},
    }
    homes = {name: codec.__module__ for name, codec in reference.codecs().items() if name in reference._CODECS}
    for name, home in homes.items():
        ours, others = versions.closure(home)
        assert home in ours and "kvtheory.layer.record" in ours and "numpy" in others
        assert ours & (set(homes.values()) - {home, "reference.full"}) == built_on.get(name, set()), name
    # the measuring itself is in all
    assert "kvtheory.attention" in versions.closure(measure.__module__)[0]


def test_a_pipeline_has_the_versions_of_its_stages(monkeypatch):
    asked = []
    monkeypatch.setattr(versions, "of_modules", lambda *names: asked.append(names) or "x")
    versions.of_codec(reference.Pipeline([reference.SnapKV(keep=0.5), reference.KIVI()]), measure)
    assert {"reference.pipeline", "reference.snapkv", "reference.kivi", "reference.compare.tasks"} == set(asked[0])


def test_a_changed_codec_runs_its_own_tasks_again_and_no_others(file, tmp_path, here, monkeypatch):  # noqa: F811
    options = [
        "--cache",
        file,
        "--codecs",
        "Full,TurboQuant,KIVI",
        "--bits",
        "2,3",
        "--no-figures",
        "--out",
        tmp_path / "out",
    ]
    assert command(*options)[0] == 0 and here.calls == 10
    before = (tmp_path / "out" / "results.parquet").read_bytes()
    monkeypatch.setattr(versions, "of_modules", lambda *names: "new" if "reference.kivi" in names else "these")
    code, said = command(*options)
    assert code == 0 and "10 tasks, 6 finished before" in said and here.calls == 4, said
    # a version is in no row: the numbers did not change, and so neither did a byte
    assert (tmp_path / "out" / "results.parquet").read_bytes() == before
    assert len(list((tmp_path / "out" / "tasks").iterdir())) == 14
    # back to the code before: everything is still there
    monkeypatch.setattr(versions, "of_modules", lambda *names: "these")
    code, said = command(*options)
    assert code == 0 and "10 tasks, 10 finished before" in said and here.calls == 0


def test_states_of_a_changed_codec_are_fitted_again(file, tmp_path, sources, monkeypatch):  # noqa: F811
    its = compare.calibration(file)
    spec = "AATC(window=0, protected=0)"
    names = {fitted._name(compare.Spec("AATC"), {}, its, [3]), fitted._name(compare.Spec("KVTC"), {}, its, [3])}
    monkeypatch.setattr(versions, "of_modules", lambda *asked: "new" if "reference.aatc" in asked else "these")
    changed = {fitted._name(compare.Spec("AATC"), {}, its, [3]), fitted._name(compare.Spec("KVTC"), {}, its, [3])}
    assert len(names & changed) == 1 and next(iter(names & changed)).startswith("KVTC")
    (own,) = compare.fit(spec, [2], its, tmp_path / "states", layers=[3])
    assert Path(own.files[3][0]).parent.name == fitted._name(
        compare.Spec("AATC"), {"bits": 2, "window": 0, "protected": 0}, its, [3]
    )
    shutil.rmtree(tmp_path / "states")


def test_a_task_s_name_has_its_version_and_its_key():
    task, same, other, key = (
        sweep.Task({"x": x}, measure, (), version) for x, version in ((1, ""), (1, ""), (1, "a"), (2, ""))
    )
    assert task.name == same.name and len({task.name, other.name, key.name}) == 3


def test_stages_are_timed_apart_and_in_no_row(file, tmp_path):  # noqa: F811
    tasks = compare.plan([compare.source(file)], [reference.TurboQuant(bits=2)], split=SPLIT)
    rows, timings = sweep.run(tasks, Here(), tmp_path, same={})
    for timing in timings:
        parts = timing["encode_seconds"], timing["decode_seconds"]
        assert min(parts) > 0 and sum(parts) < timing["cpu_seconds"] and timing["seconds"] > 0
    assert not {"seconds", "cpu_seconds", "encode_seconds"} & set(rows[0])


def test_the_page_names_what_is_timed():
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text(encoding="utf-8")
    for name in (*compare.TIMING_COLUMNS, *compare.RANKING_COLUMNS):
        assert f"`{name}`" in page, name
    assert textwrap.dedent(page) == page
