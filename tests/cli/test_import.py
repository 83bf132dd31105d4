"""`kvtheory import`: caches of other programs come in bit for bit; whatever else a file is, one sentence says so and nothing is written."""

import io
import itertools
import pickle
import re
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from typer.testing import CliRunner

import kvtheory
from kvtheory import interop
from kvtheory.cli import app

LAYERS, HEADS, TOKENS, DIM = 3, 2, 5, 4


def run(*arguments):
    done = CliRunner().invoke(app, ["import", *map(str, arguments)])
    return done.exit_code, re.sub(r"[\s│]+", " ", done.output)


def plain(seed=0, dtype=np.float16, dim=DIM):
    """{(side, layer): (heads, tokens, dim)}."""
    rng = np.random.default_rng(seed)
    return {(side, i): rng.standard_normal((HEADS, TOKENS, dim)).astype(dtype) for side in ("keys", "values") for i in range(LAYERS)}  # fmt: skip


def named(arrays, pattern="layers.{}.{}", change=lambda x: x):
    return {pattern.format(i, side): np.ascontiguousarray(change(x)) for (side, i), x in arrays.items()}


def check(path, arrays):
    cache = kvtheory.Cache.load(path)
    assert len(cache) == LAYERS
    for i, layer in enumerate(cache):
        assert layer.index == i and layer.positions.tolist() == list(range(TOKENS))
        for side in ("keys", "values"):
            own, true = getattr(layer, side), arrays[side, i]
            assert own.dtype == true.dtype and own.tobytes() == true.tobytes()
    return cache


class TestWhatComesIn:
    @pytest.mark.parametrize("word", ["".join(w) for n in ("htd", "bhtd") for w in itertools.permutations(n)])
    def test_every_layout(self, tmp_path, word):
        def change(x):
            axes = ["htd".index(axis) for axis in word if axis != "b"]
            return np.expand_dims(x.transpose(axes), word.index("b")) if "b" in word else x.transpose(axes)

        arrays = plain()
        np.savez(tmp_path / "x.npz", **named(arrays, change=change))
        code, said = run(tmp_path / "x.npz", "--layout", word, "--out", tmp_path / "x.safetensors")
        assert code == 0 and "3 layers of 2 KV heads x 5 tokens x (4 + 4), float16" in said
        check(tmp_path / "x.safetensors", arrays)

    @pytest.mark.parametrize("pattern", ["layers.{}.{}", "model/layers/{}/{}", "{}_{}", "past.{}.{}", "cache-{}-{}"])
    @pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, ml_dtypes.bfloat16])
    def test_names_and_types_of_safetensors(self, tmp_path, pattern, dtype):
        arrays = plain(1, dtype)
        save_file(named(arrays, pattern), tmp_path / "in.safetensors")
        assert run(tmp_path / "in.safetensors", "--layout", "htd", "--out", tmp_path / "x.safetensors")[0] == 0
        check(tmp_path / "x.safetensors", arrays)

    @pytest.mark.parametrize(
        "names", [("key_cache.{}", "value_cache.{}"), ("k_{}", "v_{}"), ("keys.{}", "values.{}"), ("key{}", "value{}")]
    )
    def test_names_with_the_layer_last_and_compressed_entries(self, tmp_path, names):
        arrays = plain(2)
        np.savez_compressed(
            tmp_path / "x.npz", **{names[side == "values"].format(i): x for (side, i), x in arrays.items()}
        )
        assert run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "x.safetensors")[0] == 0
        check(tmp_path / "x.safetensors", arrays)

    def test_names_that_are_said_and_ten_layers_in_order(self, tmp_path):
        rng = np.random.default_rng(0)
        keys = {i: rng.standard_normal((1, 3, 2)).astype(np.float32) for i in range(11)}
        np.savez(tmp_path / "x.npz", **{f"a{i}b": x for i, x in keys.items()}, **{f"c{i}": -x for i, x in keys.items()})
        arguments = [
            "--layout",
            "htd",
            "--keys",
            "a{layer}b",
            "--values",
            "c{layer}",
            "--out",
            tmp_path / "x.safetensors",
            "--layers",
            11,
        ]
        assert run(tmp_path / "x.npz", *arguments)[0] == 0
        for i, layer in enumerate(kvtheory.Cache.load(tmp_path / "x.safetensors")):
            assert np.array_equal(layer.keys, keys[i]) and np.array_equal(layer.values, -keys[i])

    def test_all_layers_in_one_array(self, tmp_path):
        arrays = plain(3)
        stacked = {side: np.stack([arrays[side, i] for i in range(LAYERS)])[:, None] for side in ("keys", "values")}
        np.savez(tmp_path / "x.npz", **stacked)
        assert run(tmp_path / "x.npz", "--layout", "lbhtd", "--out", tmp_path / "x.safetensors")[0] == 0
        check(tmp_path / "x.safetensors", arrays)
        code, said = run(tmp_path / "x.npz", "--layout", "lbhtd", "--layers", 4, "--out", tmp_path / "y.safetensors")
        assert code == 2 and "expected 4 layers, got 3" in said and not (tmp_path / "y.safetensors").exists()

    def test_queries_rope_and_positions(self, tmp_path):
        arrays, rng = plain(4), np.random.default_rng(9)
        queries = {
            f"layers.{i}.q": rng.standard_normal((2 * HEADS, TOKENS, DIM)).astype(np.float16) for i in range(LAYERS)
        }
        where = np.array([2, 3, 5, 8, 9])
        np.savez(tmp_path / "x.npz", **named(arrays), **queries, at=where, f=np.array([1.0, 0.1]))
        more = ["--queries", "layers.{layer}.q", "--causal", "--positions", "at", "--inv-freq", "f"]
        code, said = run(tmp_path / "x.npz", "--layout", "htd", *more, "--out", tmp_path / "x.safetensors")
        assert code == 0 and "4 query heads x 5 queries, RoPE" in said
        layer = kvtheory.Cache.load(tmp_path / "x.safetensors")[1]
        assert layer.positions.tolist() == where.tolist() == layer.query_positions.tolist()
        assert np.array_equal(layer.queries, queries["layers.1.q"]) and layer.rope == kvtheory.Rope(
            np.array([1.0, 0.1])
        )
        code, _ = run(tmp_path / "x.npz", "--layout", "htd", "--rope-theta", 100, "--out", tmp_path / "y.safetensors")
        assert code == 0
        assert kvtheory.Cache.load(tmp_path / "y.safetensors")[0].rope == kvtheory.Rope(100.0 ** -np.array([0.0, 0.5]))

    def test_batch_rows_and_padding(self, tmp_path):
        arrays = plain(5)
        padded = named(
            arrays, change=lambda x: np.stack([x * 0, np.concatenate([x[:, :2] * 0, x], axis=1)[:, :TOKENS]])
        )
        np.savez(tmp_path / "x.npz", **padded)
        code, said = run(tmp_path / "x.npz", "--layout", "bhtd", "--out", tmp_path / "x.safetensors")
        assert code == 2 and "holds a batch of 2; say which with --batch" in said
        more = ["--layout", "bhtd", "--batch", 1, "--skip", 2, "--tokens", 3]
        assert run(tmp_path / "x.npz", *more, "--out", tmp_path / "x.safetensors")[0] == 0
        layer = kvtheory.Cache.load(tmp_path / "x.safetensors")[2]
        assert np.array_equal(layer.keys, arrays["keys", 2][:, :3]) and layer.positions.tolist() == [0, 1, 2]


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self):
        pytest.importorskip("torch")

    def tensors(self, dtype):
        import torch

        generator = torch.Generator().manual_seed(0)
        return [
            tuple(torch.randn(1, HEADS, TOKENS, DIM, generator=generator).to(getattr(torch, dtype)) for _ in range(2))
            for _ in range(LAYERS)
        ]

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_tuple_of_pairs(self, tmp_path, dtype):
        import torch

        pairs = self.tensors(dtype)
        torch.save(tuple(pairs), tmp_path / "x.pt")
        assert run(tmp_path / "x.pt", "--layout", "bhtd", "--out", tmp_path / "x.safetensors")[0] == 0
        for (k, v), layer in zip(pairs, kvtheory.Cache.load(tmp_path / "x.safetensors"), strict=True):
            assert layer.keys.dtype.name == dtype
            assert torch.equal(torch.tensor(layer.keys.astype(np.float64)), k[0].double())
            assert torch.equal(torch.tensor(layer.values.astype(np.float64)), v[0].double())

    def test_lists_of_a_cache_as_kvpress_has_it(self, tmp_path):
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        cache = transformers.DynamicCache()
        pairs = self.tensors("float16")
        for i, (k, v) in enumerate(pairs):
            cache.update(k, v, i)
        held = {"key_cache": [one.keys for one in cache.layers], "value_cache": [one.values for one in cache.layers]}
        torch.save(held, tmp_path / "x.pt")
        assert run(tmp_path / "x.pt", "--layout", "bhtd", "--out", tmp_path / "x.safetensors")[0] == 0
        imported = kvtheory.Cache.load(tmp_path / "x.safetensors")
        for i in range(LAYERS):
            assert interop.same(imported[i], kvtheory.Layer.from_hf(cache, i))
        torch.save(cache, tmp_path / "object.pt")
        code, said = run(tmp_path / "object.pt", "--layout", "bhtd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "holds objects, and only tensors are loaded" in said and "one.keys" in said

    def test_nothing_is_run(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return (open, (str(tmp_path / "ran"), "w"))

        import torch

        torch.save([Evil()], tmp_path / "x.pt")
        (tmp_path / "old.pt").write_bytes(pickle.dumps([Evil()]))
        for name in ("x.pt", "old.pt"):
            code, said = run(tmp_path / name, "--layout", "bhtd", "--out", tmp_path / "y.safetensors")
            assert code == 2 and ("only tensors" in said or "not a file of torch.save" in said)
        assert not (tmp_path / "ran").exists() and not (tmp_path / "y.safetensors").exists()

    def test_broadcast_tensors_that_claim_more_than_the_file(self, tmp_path):
        import torch

        huge = torch.zeros(1, 1, 1, 1).expand(1, 1 << 10, 1 << 20, 1 << 10)
        torch.save([(huge, huge)], tmp_path / "x.pt")
        code, said = run(tmp_path / "x.pt", "--layout", "bhtd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "claims (1, 1024, 1048576, 1024), and the file holds 4 bytes" in said

    def test_without_torch_the_extra_is_named_and_others_work(self, tmp_path, monkeypatch):
        import torch

        torch.save(self.tensors("float32"), tmp_path / "x.pt")
        monkeypatch.setitem(__import__("sys").modules, "torch", None)
        code, said = run(tmp_path / "x.pt", "--layout", "bhtd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "pip install 'kvtheory[real]'" in said
        arrays = plain()
        np.savez(tmp_path / "x.npz", **named(arrays))
        assert run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "y.safetensors")[0] == 0
        check(tmp_path / "y.safetensors", arrays)


class TestRefusals:
    @pytest.fixture
    def good(self, tmp_path):
        np.savez(tmp_path / "x.npz", **named(plain()))
        return tmp_path / "x.npz"

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["--layout", "hdt"], "channels"),
            (["--layout", "bhtd"], "expected 4 axes (batch, heads, tokens, channels), as the layout bhtd says, got shape (2, 5, 4)"),
            (["--layout", "hhd"], "each once, such as bhtd; got 'hhd'"),
            (["--layout", "htx"], "each once, such as bhtd; got 'htx'"),
            (["--layout", "thd", "--heads", "2"], "layer 0: expected 2 heads, got 5; is the layout thd?"),
            (["--layout", "htd", "--keys", "layers.{layer}.keys"], "expected names of both, or of none"),
            (["--layout", "htd", "--keys", "k.{layer}", "--values", "v.{layer}"], "no array is named 'k.{layer}'; there are 'layers.0.keys'"),
            (["--layout", "htd", "--queries", "q"], "no array is named 'q'"),
            (["--layout", "htd", "--positions", "p"], "no array is named 'p', for the positions"),
            (["--layout", "htd", "--skip", "6"], "expected at least the 6 tokens to skip, got 5"),
            (["--layout", "htd", "--rope-theta", "0"], "rope_theta: expected a number above 0"),
            (["--layout", "htd", "--rope-theta", "9", "--rope-dim", "3"], "rope_dim: expected an even number"),
            (["--layout", "htd", "--rope-theta", "9", "--rope-dim", "8"], "expected at most head_dim = 4 rotated channels, got 8"),
        ],
    )  # fmt: skip
    def test_options_that_do_not_fit(self, good, tmp_path, arguments, sentence):
        if arguments == ["--layout", "hdt"]:
            arguments = [*arguments, "--head-dim", "4"]
            sentence = "layer 0: expected 4 channels, got 5; is the layout hdt?"
        code, said = run(good, *arguments, "--out", tmp_path / "y.safetensors")
        assert code == 2 and sentence in said and "Traceback" not in said
        assert [p.name for p in tmp_path.iterdir()] == ["x.npz"]

    @pytest.mark.parametrize("number", [np.nan, np.inf])
    @pytest.mark.parametrize("side", ["keys", "values"])
    def test_nan_and_inf_are_named_by_layer_and_place(self, tmp_path, number, side):
        arrays = plain()
        arrays[side, 2][1, 3, 0] = number
        np.savez(tmp_path / "x.npz", **named(arrays))
        (tmp_path / "y.safetensors").write_bytes(b"what was there")
        code, said = run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "y.safetensors")
        assert (
            code == 2
            and f"layer 2: {side}: expected finite numbers, got {number} at (head 1, token 3, {'value ' * (side == 'values')}channel 0)"
            in said
        )
        assert (tmp_path / "y.safetensors").read_bytes() == b"what was there"

    def test_layers_whose_sides_differ(self, tmp_path):
        arrays = named(plain())
        np.savez(tmp_path / "x.npz", **(arrays | {"layers.1.values": arrays["layers.1.values"][:, 1:]}))
        code, said = run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "layer 1: keys 'layers.1.keys' have 5 tokens, values 'layers.1.values' 4" in said
        arrays.pop("layers.2.values")
        np.savez(tmp_path / "x.npz", **arrays)
        code, said = run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "layer 2 has keys alone" in said

    def test_integers_and_unknown_files(self, tmp_path):
        np.savez(tmp_path / "x.npz", keys=np.ones((1, 2, 3), np.int32), values=np.ones((1, 2, 3), np.int32))
        code, said = run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "keys: expected elements of bfloat16, float16, float32, float64, got int32" in said
        (tmp_path / "x.pkl").write_bytes(b"")
        for name, sentence in (
            ("x.pkl", "expected a .npz, .safetensors or .pt, got .pkl"),
            ("none.npz", "there is no such file"),
        ):
            code, said = run(tmp_path / name, "--layout", "htd", "--out", tmp_path / "y.safetensors")
            assert code == 2 and sentence in said


def npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


class TestHostileFiles:
    @pytest.mark.parametrize(
        ("entry", "sentence"),
        [
            (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1048576, 1048576, 4)}"), "claims (1048576, 1048576, 4) of float32, and holds 0 bytes"),
            (npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1, 1, 1)}", b"x" * 8), "pickled objects, which are never loaded"),
            (npy(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1, 1, 1)}"), "malformed header"),
            (npy(b"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1, 1, 1)}", b"1234"), "holds records"),
            (npy(b"__import__('os')"), "malformed header"),
            (npy(b"("), "malformed header"),
            (npy(b"(" * 60000), "malformed header"),
            (b"hello", "is no .npy"),
            (b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "has a header of 4,294,967,295 bytes"),
        ],
        ids=["huge", "objects", "negative", "records", "code", "open", "deep", "text", "long"],
    )  # fmt: skip
    def test_entries_of_npz(self, tmp_path, entry, sentence):
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("keys.npy", entry)
            archive.writestr("values.npy", entry)
        tracemalloc.start()
        try:
            code, said = run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "y.safetensors")
            assert tracemalloc.get_traced_memory()[1] < 1 << 24
        finally:
            tracemalloc.stop()
        assert code == 2 and sentence in said and "Traceback" not in said

    def test_entries_that_claim_more_than_deflate_can_give(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("keys.npy", b"12")
        data = bytearray((tmp_path / "x.npz").read_bytes())
        at = data.rindex(b"PK\x01\x02")
        data[at + 24 : at + 28] = (1 << 31).to_bytes(4, "little")
        (tmp_path / "x.npz").write_bytes(data)
        code, said = run(tmp_path / "x.npz", "--layout", "htd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "'keys' claims 2,147,483,648 bytes, of 4 in the file" in said

    def test_a_pt_that_says_it_spans_disks(self, tmp_path):
        """zipfile.is_zipfile itself raises."""
        pytest.importorskip("torch")
        data = bytearray(_files()["pt"])
        locator = data.rindex(b"PK\x06\x07")
        data[locator + 16 : locator + 20] = (2).to_bytes(4, "little")
        (tmp_path / "x.pt").write_bytes(data)
        code, said = run(tmp_path / "x.pt", "--layout", "htd", "--out", tmp_path / "y.safetensors")
        assert code == 2 and "not a readable file of torch.save" in said and not (tmp_path / "y.safetensors").exists()

    def test_what_zipfile_says_is_cut_short(self, tmp_path):
        """A wrong length of a name makes zipfile quote everything behind it, in one sentence of any size."""
        np.savez(tmp_path / "x.npz", keys=np.ones((1, 2000, 3), np.float32), values=np.ones((1, 2000, 3), np.float32))
        data = bytearray((tmp_path / "x.npz").read_bytes())
        data[26:28] = (20000).to_bytes(2, "little")
        (tmp_path / "x.npz").write_bytes(data)
        with pytest.raises(interop.CannotImport) as refused:
            interop.read_cache(interop.open_file(tmp_path / "x.npz"), interop.How("htd")).save(
                tmp_path / "y.safetensors"
            )
        said = str(refused.value)
        assert len(said) <= 800 and "\n" not in said and f"{tmp_path / 'x.npz'}: cannot read 'keys'" in said

    @settings(max_examples=120, deadline=None)
    @given(
        kind=st.sampled_from(["npz", "safetensors", "pt"]),
        at=st.floats(0, 1),
        bytes_=st.binary(min_size=1, max_size=6),
        cut=st.booleans(),
    )
    def test_any_altered_file_comes_in_or_is_refused(self, tmp_path_factory, kind, at, bytes_, cut):
        folder = tmp_path_factory.mktemp("hostile")
        data = bytearray(_files()[kind])
        place = int(at * (len(data) - 1))
        if cut:
            del data[place:]
        else:
            data[place : place + len(bytes_)] = bytes_
        (folder / f"x.{kind}").write_bytes(data)
        out = folder / "y.safetensors"
        try:
            file = interop.open_file(folder / f"x.{kind}")
            cache = interop.read_cache(file, interop.How("htd"))
            cache.save(out)
            file.close()
        except interop.CannotImport as problem:
            assert not out.exists() and len(str(problem)) < 1000
            return
        assert all(layer.keys.ndim == 3 for layer in kvtheory.Cache.load(out))


def _files(made={}):  # noqa: B006 made once
    if not made:
        arrays = {f"{i}.{side}": np.ones((1, 2, 3), np.float32) for i in range(2) for side in ("keys", "values")}
        file = io.BytesIO()
        np.savez(file, **arrays)
        made["npz"] = file.getvalue()
        from safetensors.numpy import save

        made["safetensors"] = save(arrays)
        try:
            import torch
        except ImportError:
            made["pt"] = made["npz"]
        else:
            file = io.BytesIO()
            torch.save({name: torch.from_numpy(x) for name, x in arrays.items()}, file)
            made["pt"] = file.getvalue()
    return made
