"""What comes from outside: no reader unpickles anything, and the lock pins with hashes what constraints.txt pins."""

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvtheory", "reference", "gpu", "proofs_checks", "figures")
#: modules that make objects of bytes, and so run what the bytes say
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
#: (file, module): where one is imported for objects of this very process, and why
ALLOWED = {
    ("reference/hf/coded.py", "pickle"): "a copy of an appender: dumped and loaded in one function, no bytes come in"
}


def _supply():
    spec = importlib.util.spec_from_file_location("supply", ROOT / "scripts" / "supply.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _dotted(node):
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "?", *reversed(parts)])


def _says(call, name, value):
    return any(k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in call.keywords)


def unsafe(source):
    """(line, what) of each way in which a source could run what a file says."""
    found = []
    tree = ast.parse(source)
    origin = {}  # what a name of `from x import y as z` stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, a.name) for a in node.names if a.name.partition(".")[0] in UNPICKLERS]
            origin.update({a.asname: a.name for a in node.names if a.asname})
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if module.partition(".")[0] in UNPICKLERS:
                found.append((node.lineno, module))
            origin.update({a.asname or a.name: f"{module}.{a.name}" for a in node.names})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func)
        head, dot, rest = name.partition(".")
        name = origin.get(head, head) + dot + rest
        if name == "torch.load" and not _says(node, "weights_only", True):
            found.append((node.lineno, "torch.load without weights_only=True"))
        if (
            name.startswith(("numpy.", "np."))
            and any(k.arg == "allow_pickle" for k in node.keywords)
            and not _says(node, "allow_pickle", False)
        ):
            found.append((node.lineno, "allow_pickle"))
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
            found.append((node.lineno, name))
        if name in ("eval", "exec", "pandas.read_pickle", "numpy.lib.format.read_array"):
            found.append((node.lineno, name))
        if name in ("__import__", "importlib.import_module") and node.args and isinstance(node.args[0], ast.Constant) and str(node.args[0].value) in UNPICKLERS:  # fmt: skip
            found.append((node.lineno, f"{name}({node.args[0].value!r})"))
    return sorted(set(found))


def test_no_module_unpickles_what_it_reads():
    files = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert len(files) > 200
    found = {
        (path.relative_to(ROOT).as_posix(), what): line
        for path in files
        for line, what in unsafe(path.read_text(encoding="utf-8"))
    }
    assert set(found) == set(ALLOWED), {where: line for where, line in found.items() if where not in ALLOWED}


def test_the_copy_that_pickles_reads_its_own_bytes():
    """The exception: nothing but what the same function has just dumped reaches its Unpickler."""
    source = (ROOT / "reference/hf/coded.py").read_text(encoding="utf-8")
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and _dotted(node.func).startswith("pickle.")
    ]
    assert sorted(_dotted(node.func) for node in calls) == ["pickle.Pickler", "pickle.Unpickler"]
    (reader,) = (node for node in calls if _dotted(node.func) == "pickle.Unpickler")
    assert ast.unparse(reader.args[0]) == "io.BytesIO(written.getvalue())"
    assert "written = io.BytesIO()" in source and source.count("written") == 3


@pytest.mark.parametrize(
    "planted",
    [
        "import pickle", "import pickle as safe", "from pickle import loads", "import joblib.numpy_pickle", "def f():\n    import dill",
        "import torch\ntorch.load(path)", "import torch\ntorch.load(path, weights_only=False)", "from torch import load\nload(path)",
        "import torch as t\nt.load(path, weights_only=flag)",
        "import numpy as np\nnp.load(path, allow_pickle=True)", "import numpy\nnumpy.load(path, allow_pickle=wanted)",
        "from numpy import load as read\nread(path, allow_pickle=True)", "import yaml\nyaml.load(text)", "from yaml import unsafe_load\nunsafe_load(text)",
        "eval(text)", "import importlib\nimportlib.import_module('pickle')", "__import__('marshal')",
    ],
)  # fmt: skip
def test_the_check_sees(planted):
    assert len(unsafe(planted)) == 1, planted


def test_the_check_lets_pass():
    for source in (
        "import torch\ntorch.load(path, weights_only=True)", "import numpy as np\nnp.load(path)", "np.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)", "import json\njson.loads(text)", "model.eval()", "from safetensors import safe_open",
    ):  # fmt: skip
        assert unsafe(source) == [], source


def test_the_lock_is_that_of_the_constraints(tmp_path):
    supply = _supply()
    assert supply.problems() == []
    assert set(supply.pins()) - set(supply.pins(supply.LOCK)) == set(supply.WITHOUT) & set(supply.pins())
    text = supply.LOCK.read_text()
    broken = tmp_path / "constraints.hashes.txt"
    for old, new, said in (
        ("numpy==", "numpy==0", "numpy: "),
        ("numpy==", "numqy==", "numqy: in"),
        ("--hash=sha256:", "--hash=md5:", "no hash"),
        ("# ", "# --index-url https://index.example/ ", "names an index"),
    ):
        broken.write_text(text.replace(old, new))
        assert any(said in problem for problem in supply.problems(lock=broken)), said


def test_every_pin_has_its_licence_on_the_page(capsys):
    supply = _supply()
    assert supply.main("check") == 0
    said = capsys.readouterr().out
    assert f"{len(supply.pins())} licences listed" in said and "lock and list are current" in said
