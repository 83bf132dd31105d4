"""The package as users meet it: quick to import, light, and safe about its common names."""

import subprocess
import sys
import time

import pytest

import kvtheory

LIGHT = "numpy scipy safetensors ml_dtypes"


def python(code: str, *args: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *args, "-c", code], capture_output=True, text=True, check=False, cwd=cwd)


def test_import_is_quick_and_light():
    heavy = "torch transformers matplotlib scipy.stats cupy typer rich jinja2 flint"
    code = f"import sys, kvtheory; print([m for m in {heavy.split()} if m in sys.modules])"
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = python(code)
        times.append(time.perf_counter() - start)
        assert done.stdout.strip() == "[]", done
    assert min(times) < 0.5


def test_theory_and_sample_cache_need_the_four_base_dependencies_only():
    # every other distribution is hidden: importing anything outside the standard library and the four fails
    code = f"""
import sys, importlib.abc
allowed = set({LIGHT.split()}) | {{"kvtheory", "reference"}} | set(sys.stdlib_module_names)
class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and not top.startswith("_"):
            raise ModuleNotFoundError(f"hidden: {{name}}")
sys.meta_path.insert(0, Only())
import kvtheory
for name in kvtheory._MODULES:
    getattr(kvtheory, name)
cache = kvtheory.sample_cache()
layer = cache[0]
print(kvtheory.attention.layer_outputs(layer).shape, len(cache))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(")


def test_every_public_name_is_reachable():
    for name in kvtheory.__all__:
        assert getattr(kvtheory, name) is not None
    assert set(kvtheory.__all__) <= set(dir(kvtheory))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        kvtheory.nothing  # noqa: B018


def test_packages_are_the_same_modules_under_both_names():
    import figures
    import gpu
    import proofs_checks
    import reference

    for name, module in (
        ("figures", figures),
        ("gpu", gpu),
        ("proofs_checks", proofs_checks),
        ("reference", reference),
    ):
        assert getattr(kvtheory, name) is module
        assert module.__kvtheory__ == kvtheory.__version__


def test_a_stranger_of_the_same_name_is_named(tmp_path):
    (tmp_path / "reference").mkdir()
    (tmp_path / "reference" / "__init__.py").write_text("x = 1\n")
    done = python("import kvtheory\ntry:\n    kvtheory.reference\nexcept ImportError as e:\n    print(e)", cwd=tmp_path)
    assert "another module named 'reference' stands first on the path" in done.stdout, done
    assert str(tmp_path / "reference" / "__init__.py") in done.stdout
