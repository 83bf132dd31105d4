"""Cache files: whole or not at all, the same bytes each time, and a clear word about a file that is none."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import kvtheory
from kvtheory import Cache, Layer, Rope
from kvtheory.layer.store import CorruptCache
from kvtheory.synthetic import make


def example(dtype=np.float32):
    layer = make("gaussian", tokens=6, head_dim=4, queries=3)
    first = Layer(
        *(np.asarray(x, dtype=dtype) for x in (layer.keys, layer.values, layer.queries, layer.output_proj)),
        rope=Rope([1.0, 0.1 + 0.2], "interleaved", 1.25), scale=0.3, index=5, positions=[0, 1, 2, 3, 4, 9], query_positions=[3, 9, 9], window=7,
        extras={"key_fisher": np.ones((2, 4)), "note": np.array([1, 2, 3], dtype=np.int32)},
    )  # fmt: skip
    return Cache(
        [first, lambda: layer],
        tokens=list(range(6)),
        surprisal_bits=np.linspace(0, 5, 6),
        meta={"model": "toy", "σ": [1, None]},
    )


def same(a: Layer, b: Layer) -> None:
    for name in ("keys", "values", "queries", "output_proj", "positions", "query_positions"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x.astype(np.float64), y.astype(np.float64))
    assert (a.rope, a.scale, a.index, a.window, list(a.extras)) == (b.rope, b.scale, b.index, b.window, list(b.extras))
    for name in a.extras:
        np.testing.assert_array_equal(a.extras[name], b.extras[name])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_round_trip(tmp_path, dtype):
    cache = example(dtype)
    cache.save(tmp_path / "x.safetensors")
    loaded = Cache.load(tmp_path / "x.safetensors")
    assert len(loaded) == 2 and loaded.meta == cache.meta
    np.testing.assert_array_equal(loaded.tokens, cache.tokens)
    np.testing.assert_array_equal(loaded.surprisal_bits, cache.surprisal_bits)
    for a, b in zip(cache, loaded, strict=True):
        same(a, b)
    loaded.save(tmp_path / "y.safetensors")
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.safetensors", "y.safetensors"]


def test_the_safetensors_library_reads_it_and_tensors_are_aligned(tmp_path):
    example(np.float16).save(tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    assert tensors["0.keys"].shape == (2, 6, 4) and tensors["tokens"].tolist() == list(range(6))
    raw = (tmp_path / "x.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    sizes = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2}
    for name, entry in header.items():
        if name != "__metadata__":
            assert (8 + length + entry["data_offsets"][0]) % sizes[entry["dtype"]] == 0


def test_strided_and_big_endian_arrays_are_stored_by_value(tmp_path):
    layer = make("gaussian", tokens=6, head_dim=4, queries=3)
    keys = np.asarray(np.repeat(layer.keys, 2, axis=2)[..., ::2], dtype=">f4")
    Cache([layer.replace(keys=keys)]).save(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(Cache.load(tmp_path / "x.safetensors")[0].keys, keys.astype("<f4"))


def test_one_layer_in_memory_at_a_time(tmp_path):
    alive, most = 0, 0

    class Counted(Layer):
        __slots__ = ("__weakref__",)

        def __del__(self):
            nonlocal alive
            alive -= 1

    def lazy():
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        layer = make("gaussian", tokens=4, head_dim=2, queries=1)
        return Counted(layer.keys, layer.values)

    Cache([lazy] * 5).save(tmp_path / "x.safetensors")
    # the loop variable holds the last layer while the next one is made
    assert most <= 2


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.safetensors"
    example().save(path)
    before = path.read_bytes()

    def broken():
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        Cache([example()[0], broken]).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@settings(max_examples=150)
@given(st.data())
def test_a_cut_or_changed_file_is_a_clear_error_and_never_other_numbers(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "x.safetensors"
    example().save(path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    try:
        # numbers are guarded by checksums: what still reads is the caller's own text (meta, a scale), or the very same file
        for old, new in zip(example(), Cache.load(path), strict=False):
            np.testing.assert_array_equal(old.keys, new.keys)
    except CorruptCache as problem:
        assert str(path) in str(problem)


def test_other_files_are_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="no cache file at"):
        Cache.load(tmp_path / "absent")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CorruptCache, match="not a readable safetensors file"):
        Cache.load(tmp_path / "text")
    save_file({"a": np.zeros(3)}, tmp_path / "other")
    with pytest.raises(CorruptCache, match="not a kvtheory cache"):
        Cache.load(tmp_path / "other")
    record = {"format": "kvtheory-cache", "version": 99, "layers": [], "meta": {}}
    save_file({"a": np.zeros(3)}, tmp_path / "future", metadata={"kvtheory": json.dumps(record)})
    with pytest.raises(CorruptCache, match="version 99, this kvtheory reads up to 1"):
        Cache.load(tmp_path / "future")
    record = {"format": "kvtheory-cache", "version": 1, "layers": [{"extras": []}], "crc32": {}, "meta": {}}
    save_file({"a": np.zeros(3)}, tmp_path / "lacking", metadata={"kvtheory": json.dumps(record)})
    with pytest.raises(CorruptCache, match=r"layer 0 lacks '0.keys'"):
        Cache.load(tmp_path / "lacking")


def test_bad_arguments_are_named():
    with pytest.raises(TypeError, match=r"layers\[0\]: expected a Layer or a callable"):
        Cache([3])
    with pytest.raises(TypeError, match=r"layers\[0\]: expected its callable to return a Layer, got int"):
        Cache([lambda: 3])[0]
    with pytest.raises(ValueError, match=r"surprisal_bits: expected shape \(n=2\), got \(1,\)"):
        Cache([], tokens=[1, 2], surprisal_bits=[1.0])
    with pytest.raises(ValueError, match="surprisal_bits: expected finite"):
        Cache([], surprisal_bits=[np.nan])
    with pytest.raises(ValueError, match="meta: expected what JSON can hold"):
        Cache([], meta={"x": float("nan")})
    with pytest.raises(TypeError, match="tokens: expected integers"):
        Cache([], tokens=[0.5])


def test_layers_are_read_when_asked_for(tmp_path):
    path = tmp_path / "x.safetensors"
    example().save(path)
    loaded = Cache.load(path)
    os.unlink(path)
    with pytest.raises(CorruptCache, match="not a readable safetensors file"):
        loaded[0]
    assert kvtheory.Cache is Cache
