"""The process in which somebody else's codec runs. Alone in its file: it needs NumPy and the standard library, and no kvtheory.

`python worker.py FOLDER` reads one JSON request a line, answers one JSON line each, and passes numbers through FOLDER/in.bin and
FOLDER/out.bin. What the codec prints goes to standard error. The other end is proofs_checks.conform.subject.
"""

import hashlib
import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

# the folder of this file is none to import from: what is beside it is not the codec's
if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]

import numpy as np

#: leaves of fewer numbers are sizes and settings, not data
FEW = 8
SIMPLE = (bool, int, float, complex, np.generic)


# -- numbers between two processes ----------------------------------------------------------------------------------------


def pack(path: Path, arrays: list[Any]) -> list[dict[str, Any]]:
    """Write arrays one behind the other; what says how to read them back."""
    records = []
    with open(path, "wb") as file:
        for one in arrays:
            given = np.asarray(one)
            array = np.ascontiguousarray(given).reshape(given.shape)  # NumPy makes (1,) of ()
            name = array.dtype.newbyteorder("=").name
            raw = array.view(np.uint16) if name == "bfloat16" else array.astype(array.dtype.newbyteorder("="))
            records.append({"dtype": name, "shape": list(array.shape)})
            file.write(raw.tobytes())
    return records


def unpack(path: Path, records: list[dict[str, Any]]) -> list[Any]:
    data, at, out = path.read_bytes(), 0, []
    for record in records:
        name, shape = record["dtype"], tuple(record["shape"])
        kind = np.dtype(np.uint16 if name == "bfloat16" else name)
        count = math.prod(shape)
        array = np.frombuffer(data, kind, count, at).reshape(shape).copy()
        at += array.nbytes
        if name == "bfloat16":
            import ml_dtypes

            array = array.view(ml_dtypes.bfloat16)
        out.append(array)
    return out


def numpy_of(value: Any) -> Any:
    """A NumPy array of whatever a codec gives back."""
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if hasattr(value, "dequantize") and hasattr(value, "__tensor_flatten__"):
            value = value.dequantize()
        if str(value.dtype) == "torch.bfloat16":
            import ml_dtypes
            import torch

            return value.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()
    return np.asarray(value)


def torch_of(array: Any) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


# -- what an encoded object holds ------------------------------------------------------------------------------------------


def _opaque(value: Any) -> bool:
    """Code, and what describes numbers rather than being some."""
    if isinstance(value, type) or inspect.ismodule(value) or inspect.isroutine(value):
        return True
    if callable(value) and not hasattr(value, "__dict__"):
        return True
    named = ("device", "dtype", "Generator", "Size", "layout")
    return type(value).__module__.partition(".")[0] == "torch" and type(value).__name__ in named


def leaves(value: Any, known: set[int], path: str = "", seen: set[int] | None = None) -> list[tuple[str, Any]]:
    """(path, leaf) of every array, tensor, byte string, number and text that `value` reaches, but for what is in `known`."""
    seen = set() if seen is None else seen
    if value is None or isinstance(value, SIMPLE):
        return [] if value is None else [(path, value)]
    if id(value) in seen or id(value) in known or _opaque(value):
        return []
    seen.add(id(value))
    if isinstance(value, (bytes, bytearray, memoryview, str, np.ndarray)):
        if isinstance(value, np.ndarray) and value.dtype == object:
            return [leaf for i, one in enumerate(value.flat) for leaf in leaves(one, known, f"{path}[{i}]", seen)]
        return [(path, value)]
    if hasattr(
        value, "__tensor_flatten__"
    ):  # a tensor of tensors, such as optimum-quanto's, which seems to hold what it stands for
        names = value.__tensor_flatten__()[0]
        return [leaf for name in names for leaf in leaves(getattr(value, name), known, f"{path}.{name}", seen)]
    if hasattr(value, "element_size") and hasattr(value, "numel"):
        return [(path, value)]
    if isinstance(value, dict):
        items = [(f"{path}[{key!r}]", one) for key, one in value.items()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        names = getattr(value, "_fields", None)
        items = [(f"{path}.{names[i]}" if names else f"{path}[{i}]", one) for i, one in enumerate(value)]
    else:
        slots = [name for kind in type(value).__mro__ for name in _names(getattr(kind, "__slots__", ()))]
        held = {name: getattr(value, name) for name in slots if hasattr(value, name)}
        held |= getattr(value, "__dict__", {})
        items = [(f"{path}.{name}", one) for name, one in held.items()]
    return [leaf for where, one in items for leaf in leaves(one, known, where, seen)]


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def size(leaf: Any) -> int:
    """Bytes of a leaf as it is held; numbers that a broadcast repeats count once."""
    if isinstance(leaf, np.ndarray):
        return leaf.itemsize * math.prod(n for n, step in zip(leaf.shape, leaf.strides) if step or n == 0)
    if hasattr(leaf, "element_size"):
        steps = leaf.stride() if str(leaf.layout) == "torch.strided" else (1,) * leaf.dim()
        return leaf.element_size() * math.prod(n for n, step in zip(leaf.shape, steps) if step or n == 0)
    if isinstance(leaf, str):
        return len(leaf.encode())
    if isinstance(leaf, (bytes, bytearray)):
        return len(leaf)
    if isinstance(leaf, memoryview):
        return leaf.nbytes
    if isinstance(leaf, np.generic):
        return leaf.nbytes
    return 1 if isinstance(leaf, bool) else 16 if isinstance(leaf, complex) else 8


def _raw(leaf: Any) -> bytes:
    if isinstance(leaf, np.ndarray) or hasattr(leaf, "element_size"):
        array = numpy_of(leaf)
        return f"{array.dtype}{array.shape}".encode() + np.ascontiguousarray(array).tobytes()
    if isinstance(leaf, (bytes, bytearray, memoryview)):
        return bytes(leaf)
    return repr(leaf).encode()


def digest(held: list[tuple[str, Any]]) -> str:
    """Of everything that is held, by path."""
    sha = hashlib.sha256()
    for path, leaf in sorted(held, key=lambda pair: pair[0]):
        for part in (path.encode(), _raw(leaf)):
            sha.update(len(part).to_bytes(8, "little") + part)
    return sha.hexdigest()


def reachable(value: Any, limit: int = 200_000) -> set[int]:
    """Ids of what a codec holds before it encodes: its tables are state, not part of what it encodes to."""
    found: set[int] = set()
    stack = [value]
    while stack and len(found) < limit:
        one = stack.pop()
        if one is None or isinstance(one, (*SIMPLE, str)) or id(one) in found or _opaque(one):
            continue
        found.add(id(one))
        if isinstance(one, dict):
            stack += one.values()
        elif isinstance(one, (list, tuple, set, frozenset)):
            stack += one
        elif not isinstance(one, (bytes, bytearray, np.ndarray)) and not hasattr(one, "element_size"):
            stack += getattr(one, "__dict__", {}).values()
    return found


# -- the codec -------------------------------------------------------------------------------------------------------------


def load(spec: str) -> Any:
    """The object that "package.module:Name" or "file.py:Name" names."""
    where, _, name = spec.rpartition(":")
    if where.endswith(".py"):
        path = Path(where).resolve()
        # a name of its own: an adapter may be called like the package that it adapts
        described = importlib.util.spec_from_file_location(f"kvtheory_conform_{path.stem}", path)
        if described is None or described.loader is None or not path.is_file():
            raise ModuleNotFoundError(f"no file {where}")
        module = importlib.util.module_from_spec(described)
        sys.modules[described.name] = module
        described.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    target: Any = module
    for part in name.split("."):
        target = getattr(target, part)
    return target


def _parameters(make: Any) -> dict[str, Any]:
    try:
        return dict(inspect.signature(make).parameters)
    except (TypeError, ValueError):
        return {}


def takes(codec: Any) -> str:
    """ "layer", "pair" or "array": what encode is given. Said by the codec's `takes`, or read off encode's parameters."""
    said = getattr(codec, "takes", None)
    if said is not None:
        if said not in ("layer", "pair", "array"):
            raise TypeError(f'takes: expected "layer", "pair" or "array", got {said!r}')
        return str(said)
    needed = [
        p for p in _parameters(codec.encode).values() if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(needed) >= 2:
        return "pair"
    return "layer" if needed and needed[0].name in ("layer", "data", "cache") else "array"


class Codecs:
    """Builds the codec for the sizes of what it is given, and passes numbers through it."""

    def __init__(self, spec: str, arguments: dict[str, Any], fit: bool) -> None:
        self.target, self.arguments, self.fitted = load(spec), arguments, fit
        self.instance = not callable(self.target)
        if not self.instance:
            self.accepts = _parameters(self.target)
        elif arguments:
            raise TypeError(f"arguments: {spec} is an object, and takes none")
        else:
            self.accepts = {}
        self.made: dict[Any, Any] = {}

    def build(self, dim: int, value_dim: int, heads: int, options: dict[str, Any], fresh: bool = False) -> Any:
        """The codec; `fresh` for one that has seen nothing. options: "seed", "bits" (in place of the arguments') and "power"."""
        if self.instance:
            return self.target
        given = dict(self.arguments) | {k: v for k, v in options.items() if k in ("seed", "bits") and v is not None}
        sizes = {"dim": dim, "head_dim": dim, "value_dim": value_dim, "heads": heads, "kv_heads": heads}
        given |= {name: n for name, n in sizes.items() if name in self.accepts and name not in given}
        power = options.get("power", 0)
        key = (json.dumps(given, sort_keys=True), self.fitted and (dim, value_dim, heads, power))
        if fresh or key not in self.made:
            codec = self._fit(given, dim, value_dim, heads, power) if self.fitted else self.target(**given)
            if not (hasattr(codec, "encode") and hasattr(codec, "decode")):
                raise TypeError(f"codec: expected an object with encode and decode, got {type(codec).__name__}")
            if fresh:
                return codec
            self.made[key] = codec
        return self.made[key]

    def _fit(self, given: dict[str, Any], dim: int, value_dim: int, heads: int, power: int) -> Any:
        return self.target.fit([_calibration(heads, dim, value_dim, power)], **given)

    def sides(
        self, keys: Any, values: Any, options: dict[str, Any], fresh: bool = False
    ) -> list[tuple[Any, list[Any]]]:
        """(codec, what it is given) of each call of encode: one for keys and values together, or one each."""
        dim, value_dim, heads = keys.shape[-1], values.shape[-1], keys.shape[0]
        codec = self.build(dim, value_dim, heads, options, fresh)
        kind = takes(codec)
        if kind == "layer":
            import kvtheory

            sound = [np.where(np.isfinite(x.astype(np.float64)), x, 0).astype(x.dtype) for x in (keys, values)]
            layer = kvtheory.Layer(
                *(x if np.array_equal(x, y) else y for x, y in zip((keys, values), sound)),
                index=0 if self.fitted else None,
            )
            for x, y in ((layer.keys, keys), (layer.values, values)):
                if x is not y:
                    x[...] = (
                        y  # NaN and inf behind the back of Layer, which refuses them too: it is encode that is asked
                    )
            return [(codec, [[layer] if getattr(codec, "scope", "layer") == "cache" else layer])]
        if getattr(codec, "arrays", "numpy") == "torch":
            keys, values = torch_of(keys), torch_of(values)
        if kind == "pair":
            return [(codec, [keys, values])]
        # tables made for another size, where sizes differ
        other = codec if value_dim == dim and not fresh else self.build(value_dim, value_dim, heads, options, fresh)
        return [(codec, [keys]), (other, [values])]

    def decoded(self, codec: Any, code: Any) -> list[Any]:
        return self.back(codec, codec.decode(code))

    @staticmethod
    def back(codec: Any, decoded: Any) -> list[Any]:
        """The arrays of one call of decode."""
        if takes(codec) == "array":
            return [numpy_of(decoded)]
        if isinstance(decoded, list) and len(decoded) == 1:
            decoded = decoded[0]
        if isinstance(decoded, dict):
            return [numpy_of(decoded["keys"]), numpy_of(decoded["values"])]
        if hasattr(decoded, "keys") and hasattr(decoded, "values"):
            return [numpy_of(decoded.keys), numpy_of(decoded.values)]
        if isinstance(decoded, (tuple, list)) and len(decoded) == 2:
            return [numpy_of(one) for one in decoded]
        raise TypeError(
            f"decode: expected (keys, values) or an object with keys and values, got {type(decoded).__name__}"
        )


def _calibration(heads: int, dim: int, value_dim: int, power: int, tokens: int = 1024, text: int = 0) -> Any:
    """A layer for fitted codecs, of correlated channels of unlike size, with queries: made input, like no model's. text: which draw of it."""
    import kvtheory

    model, rng = (np.random.Generator(np.random.Philox(seed)) for seed in (20260514, 1 + text))

    def side(d: int) -> Any:
        mix = model.standard_normal((heads, d, d)) / np.sqrt(d) + np.eye(d)
        sizes = np.exp(0.5 * model.standard_normal((heads, 1, d)))
        return (2.0**power * sizes * (rng.standard_normal((heads, tokens, d)) @ mix)).astype(np.float32)

    keys, values = side(dim), side(value_dim)
    queries = (rng.standard_normal((heads, 256, dim)) * 2.0 ** -max(power, -100)).astype(np.float32)
    return kvtheory.Layer(keys, values, queries, index=0)


# -- requests --------------------------------------------------------------------------------------------------------------


class Staged(Exception):
    """A failure of the codec's, and where."""

    def __init__(self, stage: str, problem: BaseException) -> None:
        super().__init__(stage)
        self.stage, self.problem = stage, problem


def _do(stage: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except BaseException as problem:
        raise Staged(stage, problem) from None


def _laid_out(array: Any, layout: str) -> Any:
    """The same numbers as another view: "transposed" (tokens first in memory) or "step" (every second channel of a wider array)."""
    if layout == "transposed":
        return np.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2)
    if layout == "step":
        wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        wide[..., ::2] = array
        return wide[..., ::2]
    return array


class Server:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.codecs: Any = None

    def load(self, request: dict[str, Any], _: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """What there is to know before anything is coded."""
        self.codecs = _do("load", Codecs, request["spec"], request["arguments"], request["fit"])
        target = self.codecs.target
        parameters = set(self.codecs.accepts)
        defaults = {
            name: p.default
            for name, p in self.codecs.accepts.items()
            if p.default is not p.empty and isinstance(p.default, (int, float, str, bool))
        }
        if self.codecs.fitted:
            parameters |= set(_do("load", lambda: _parameters(target.fit)))
        try:
            import ml_dtypes  # noqa: F401

            bfloat16 = True
        except ImportError:
            bfloat16 = False
        return {
            "parameters": sorted(parameters),
            "defaults": defaults,
            "claims": _claims(target),
            "requirement": _text(getattr(target, "requirement", None)),
            "bits": _number(getattr(target, "bits", None)),
            "bfloat16": bfloat16,
            "torch": importlib.util.find_spec("torch") is not None,
            "python": sys.version.split()[0],
            "numpy": np.__version__,
        }, []

    def describe(self, request: dict[str, Any], _: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """What a built codec says of itself."""
        codec = _do("build", self.codecs.build, request["dim"], request["dim"], request["heads"], {})
        state = [
            leaf
            for leaf in _do("build", leaves, codec, set())
            if isinstance(leaf[1], np.ndarray) or hasattr(leaf[1], "element_size")
        ]
        return {
            "takes": takes(codec),
            "claims": _claims(codec),
            "bits": _number(getattr(codec, "bits", None)),
            "requirement": _text(getattr(codec, "requirement", None)),
            "state_bytes": int(getattr(codec, "state_bytes", sum(size(leaf) for _, leaf in state))),
            "says_bits": hasattr(codec, "claimed_bits"),
        }, []

    def through(self, request: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Encode and decode. `fresh`: decoded by a codec that has not encoded; `keep`: give the bytes back too."""
        options = request.get("options", {})
        views = [_laid_out(array, request.get("layout", "")) for array in arrays[:2]]
        before = [array.tobytes() for array in views]
        sides = _do("build", self.codecs.sides, *views, options)
        decoders = _do("build", self.codecs.sides, *views, options, True) if request.get("fresh") else sides
        found: list[Any] = []
        held, digests, raw, plain, says = 0, [], [], True, []
        for (codec, given), (decoder, _) in zip(sides, decoders):
            known = reachable(codec)
            known |= {id(one) for one in given}
            code = _do("encode", codec.encode, *given)
            if request.get("shared"):  # a table that another encoding holds too, the very same object, is held once
                other = codec.encode(
                    *(one.replace(keys=-one.keys) if hasattr(one, "replace") else one * 1 for one in given)
                )
                known |= reachable(other) & reachable(code)
            if hasattr(codec, "claimed_bits"):
                says.append(float(_do("claimed_bits", codec.claimed_bits, code)))
            plain = plain and isinstance(code, (bytes, bytearray))
            kept = _do("encode", leaves, code, set() if plain else known)
            held += sum(size(leaf) for _, leaf in kept)
            digests.append(digest(kept))
            if plain:
                raw.append(np.frombuffer(bytes(code), np.uint8))
            found += _do("decode", self.codecs.decoded, decoder, code)
        answer = {"held": held, "digest": "".join(digests), "bytes": plain, "says": says,
                  "changed": [array.tobytes() for array in views] != before}  # fmt: skip
        return answer, found + (raw if request.get("keep") and plain else [])

    def decode(self, request: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Bytes, perhaps hostile, by a codec built for these sizes."""
        codec = _do(
            "build",
            self.codecs.build,
            request["dim"],
            request["value_dim"],
            request["heads"],
            request.get("options", {}),
        )
        found = _do("decode", self.codecs.decoded, codec, arrays[0].tobytes())
        return {}, found

    def ablate(self, request: dict[str, Any], arrays: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Spoil one held array after the other, in place, and see how much what is decoded moves."""
        out = []
        for side, (codec, given) in enumerate(_do("build", self.codecs.sides, *arrays, request.get("options", {}))):
            known = reachable(codec) | {id(one) for one in given}
            code = _do("encode", codec.encode, *given)
            true = _do("decode", self.codecs.decoded, codec, code)
            norm = math.sqrt(sum(float(np.square(one.astype(np.float64)).sum()) for one in true)) or 1.0
            for path, leaf in leaves(code, known):
                array = leaf if isinstance(leaf, np.ndarray) else None
                if array is None and hasattr(leaf, "element_size"):
                    array = numpy_of(leaf) if leaf.is_contiguous() else None
                    if array is None or not np.shares_memory(array, numpy_of(leaf)):
                        continue
                if array is None or array.size < FEW:
                    continue
                saved = array.copy()
                spoilt = np.roll(saved.reshape(-1), 1 + saved.size // 3).reshape(saved.shape)
                if np.array_equal(spoilt, saved):
                    continue
                try:
                    array[...] = spoilt
                except ValueError:
                    continue
                try:
                    other = self.codecs.decoded(codec, code)
                    moved = (
                        math.sqrt(sum(float(np.square(a.astype(np.float64) - b).sum()) for a, b in zip(other, true)))
                        / norm
                    )
                except Exception:
                    moved = math.inf
                array[...] = saved
                name = ("keys", "values")[side] if takes(codec) == "array" else "layer"
                out.append(
                    {
                        "path": f"{name}{path}",
                        "bytes": size(leaf),
                        "moved": "inf" if math.isinf(moved) or math.isnan(moved) else moved,
                    }
                )
        return {"leaves": out}, []

    def held_out(self, request: dict[str, Any], _: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Keys and values of the calibration's law that the codec was not fitted to."""
        layer = _calibration(request["heads"], request["dim"], request["dim"], 0, request["tokens"], 1)
        return {}, [layer.keys, layer.values]

    def seeded(self, request: dict[str, Any], _: list[Any]) -> tuple[dict[str, Any], list[Any]]:
        """Standard normal numbers as people draw them from a seed, by the library named."""
        shape, seed = tuple(request["shape"]), request["seed"]
        if request["library"] == "torch":
            import torch

            torch.manual_seed(seed)
            return {}, [torch.randn(shape).numpy()]
        if request["library"] == "RandomState":
            return {}, [np.random.RandomState(seed).standard_normal(shape).astype(np.float32)]
        return {}, [np.random.default_rng(seed).standard_normal(shape).astype(np.float32)]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _claims(codec: Any) -> list[str]:
    said = getattr(codec, "claims", ())
    return list(said) if isinstance(said, (tuple, list)) and all(isinstance(one, str) for one in said) else []


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float, np.number)) and not isinstance(value, bool) else None


def failure(stage: str, problem: BaseException) -> dict[str, Any]:
    return {
        "error": type(problem).__name__,
        "kinds": [kind.__name__ for kind in type(problem).__mro__],
        "message": " ".join(str(problem).split())[:600],
        "stage": stage,
    }


def _end_with_parent(parent: int) -> None:
    """A codec that hangs does not outlive the command that was interrupted."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    folder = Path(sys.argv[1])
    threads, memory = int(sys.argv[2]), float(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    sys.path.append(os.getcwd())  # behind all else, as a folder may hold common names
    os.dup2(2, 1)  # whatever a package prints goes elsewhere
    if memory and os.name == "posix":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (int(memory * 2**30), int(memory * 2**30)))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    server = Server(folder)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            arrays = unpack(folder / "in.bin", request.get("arrays", []))
            answer, found = getattr(server, request["do"])(request, arrays)
            if "torch" in sys.modules and sys.modules["torch"].get_num_threads() != threads:
                sys.modules["torch"].set_num_threads(threads)
            answer["arrays"] = pack(folder / "out.bin", found)
        except Staged as staged:
            if isinstance(staged.problem, KeyboardInterrupt):
                raise staged.problem from None
            answer = failure(staged.stage, staged.problem)
        except Exception as problem:
            answer = failure("result", problem)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
