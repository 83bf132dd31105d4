"""Write the golden vectors anew: `python -m tests.vectors.make`, and only when the stream format is meant to change.

Each case is one JSON file, all that another implementation needs: the stream (hex), and what it must give.

    valid/NAME.json      "stream", "inputs" (what was encoded), "codec", "parameters", "decoded"; arrays are {"dtype", "shape", "hex"},
                         little-endian, C order; "state" where the codec has one, "inputs_give" where the stream has another origin;
                         inputs have "queries" and "query_positions" (null: all tokens are seen) where the codec asks for them
    invalid/NAME.json    "stream", "error" (CorruptStream or StateMismatch), "offset", "why"; "state" where one is given
    rans.json            symbols, tables, contexts, block, lanes -> payload
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import kvtheory
import reference
from kvtheory.layer import Decoded, Layer, Rope
from reference import entropy_coding, packing, rans, stream
from reference.rans import Tables

HERE = Path(__file__).parent


def numbers(seed: int, *shape: int) -> Any:
    """Small multiples of 1/64: the same in every NumPy, and exact in every element type."""
    words = kvtheory.randomness.raw_words(seed, "golden vectors", int(np.prod(shape)))
    return ((words >> np.uint64(56)).astype(np.int64) - 128).reshape(shape) / 64.0


def layer(seed: int, heads: int, tokens: int, dim: int, value_dim: int, dtype: str = "float32", **fields: Any) -> Layer:
    from tests.reference.strategies import DTYPES

    keys, values = numbers(seed, heads, tokens, dim), numbers(seed + 1, heads, tokens, value_dim)
    return Layer(keys.astype(DTYPES[dtype]), values.astype(DTYPES[dtype]), **fields)


def hard(dim: int) -> Layer:
    """Rows that break codecs: zeros, a spike, a constant, subnormals, the largest numbers, halves that round to even."""
    rows = np.zeros((1, 7, dim), np.float32)
    rows[0, 1, dim // 2] = -70000
    rows[0, 2] = 3
    rows[0, 3] = 2.0**-149 * (np.arange(dim) % 4)
    rows[0, 4] = np.finfo(np.float32).max * np.where(np.arange(dim) % 3, 1, -1)
    rows[0, 5] = np.append(1 - 2.0**-24, (np.arange(dim - 1) + 0.5) / 2**14)
    rows[0, 6] = numbers(99, dim) * 2.0**100
    return Layer(rows, -rows[:, :, ::-1])


def limits(dim: int) -> Layer:
    """float64 rows near the largest number of binary32, which what is decoded may not exceed, and below its least normal one."""
    rows = np.stack(
        [np.full(dim, np.finfo(np.float32).max), numbers(97, dim) * 2.0**127 / 2, numbers(98, dim) * 2.0**-140]
    )
    rows[1, 3] = -np.finfo(np.float32).max
    return Layer(rows[None].astype(np.float64), -rows[None, :, ::-1])


def underflow(dim: int) -> Layer:
    """float16 rows of the smallest subnormal number: what is decoded is rounded to them, and to zeros of either sign."""
    rows = np.zeros((1, 3, dim), np.float16)
    rows[0, 0, 1], rows[0, 1, ::3], rows[0, 2] = 2.0**-24, -(2.0**-24), 65504 * np.where(np.arange(dim) % 3, 1, -1)
    return Layer(rows, -rows[:, :, ::-1])


def valid() -> dict[str, tuple[Any, Any]]:
    """name -> (codec, layer or list of layers)."""
    turbo = reference.TurboQuant
    out: dict[str, tuple[Any, Any]] = {
        "full-float32": (reference.Full(), layer(1, 2, 3, 4, 2)),
        "full-float16": (reference.Full(), layer(2, 1, 2, 3, 3, "float16", index=7)),
        "full-bfloat16": (reference.Full(), layer(3, 1, 2, 3, 3, "bfloat16", positions=np.array([5, 300]))),
        "full-float64": (reference.Full(), layer(4, 1, 2, 2, 3, "float64", positions=np.array([0, 1 << 40]))),
        "full-no-tokens": (reference.Full(), layer(5, 2, 0, 4, 4)),
        "full-layers": (reference.Full(), [layer(6, 1, 2, 2, 2, index=0), layer(8, 2, 1, 3, 2, "float16", index=1)]),
        "turboquant-3-d128": (turbo(3), layer(10, 2, 3, 128, 128)),
        "turboquant-4-d96-bfloat16": (turbo(4), layer(12, 1, 3, 96, 64, "bfloat16")),
        "turboquant-2-d80-float16": (
            turbo(2, seed=12345),
            layer(14, 2, 2, 80, 24, "float16", positions=np.array([1, 1])),
        ),
        "turboquant-3-d3": (turbo(3), layer(16, 1, 3, 3, 1)),
        "turboquant-3-no-tokens": (turbo(3), layer(17, 1, 0, 8, 8)),
        "turboquant-2-layers": (turbo(2), [layer(18, 1, 2, 8, 4, index=3), layer(20, 2, 1, 8, 16, index=4)]),
        "turboquant-3-hard": (turbo(3, seed=1), hard(16)),
        "turboquant-8-hard": (turbo(8), hard(12)),
        "turboquant-prod-3-hard": (turbo(3, seed=2, kind="prod"), hard(8)),
        # codes name b - 1 bits, and norms take the 4 bytes of b
        "turboquant-prod-7-d16": (turbo(7, seed=7, kind="prod"), layer(57, 1, 2, 16, 6)),
        # sketches of 25 and 9 entries: the high half of the last word is not used
        "turboquant-prod-2-d5": (turbo(2, kind="prod"), layer(59, 1, 3, 5, 3, "bfloat16")),
        "turboquant-2-float64-limits": (turbo(2), limits(16)),
        "turboquant-prod-2-float64-limits": (turbo(2, kind="prod"), limits(16)),
        "turboquant-2-float16-underflow": (turbo(2), underflow(16)),
        "turboquant-prod-3-float16-underflow": (turbo(3, kind="prod"), underflow(8)),
    }
    for bits in range(1, 9):
        out[f"turboquant-{bits}-d16"] = (turbo(bits, seed=bits), layer(30 + bits, 1, 3, 16, 8))
    for bits in (1, 2, 4, 8):
        out[f"turboquant-prod-{bits}-d16"] = (turbo(bits, seed=bits, kind="prod"), layer(50 + bits, 2, 2, 16, 6))
    for bits in (1, 2, 3, 8):
        out[f"qjl-{bits}-d8"] = (reference.QJL(bits, seed=bits), layer(70 + bits, 2, 2, 8, 6))
    polar, kivi = reference.PolarQuant, reference.KIVI
    out |= {
        "qjl-1-d3-bfloat16": (reference.QJL(1), layer(80, 2, 3, 3, 5, "bfloat16")),
        "qjl-2-hard": (reference.QJL(2, seed=3), hard(12)),
        "qjl-1-no-tokens": (reference.QJL(1), layer(82, 2, 0, 4, 4)),
        "polarquant-d64": (polar(), layer(84, 1, 2, 64, 32)),
        "polarquant-d80-float16": (polar(seed=12345), layer(86, 1, 2, 80, 24, "float16")),
        "polarquant-d11": (polar(seed=4), layer(88, 2, 2, 11, 1)),
        "polarquant-hard": (polar(), hard(16)),
        "polarquant-1-3-5-8": (polar((1, 3, 5, 8)), layer(90, 1, 2, 24, 16, "bfloat16")),
        "polarquant-8": (polar((8,)), layer(92, 1, 2, 6, 3, "float64")),
        "polarquant-2-no-tokens": (polar((2,)), layer(94, 1, 0, 4, 4)),
        "kivi-2": (kivi(), layer(100, 1, 3, 4, 4, "float16")),
        "kivi-2-group-8": (kivi(2, 8, 8), layer(102, 2, 17, 4, 11, "float16")),
        "kivi-4-group-4-window-8": (kivi(4, 4, 8), layer(104, 1, 20, 3, 6, "bfloat16")),
        "kivi-3-group-3": (kivi(3, 3, 3), layer(106, 2, 7, 3, 4)),
        "kivi-1-float64": (kivi(1, 2, 2), layer(108, 1, 5, 3, 2, "float64", positions=np.array([1, 2, 3, 9, 10]))),
        "kivi-8-hard": (kivi(8, 1, 1), hard(6)),
        "kivi-1-hard": (kivi(1, 2, 2), hard(7)),
        "kivi-2-hard": (kivi(2, 7, 7), hard(6)),
        "kivi-2-no-tokens": (kivi(), layer(110, 1, 0, 4, 4)),
        "kivi-2-layers": (kivi(2, 2, 2), [layer(112, 1, 2, 3, 4, index=3), layer(114, 2, 4, 4, 2, "float16", index=4)]),
    }
    return out


def invalid() -> dict[str, tuple[bytes, str]]:
    """name -> (stream, why it must be refused)."""
    good = reference.TurboQuant(3).encode(layer(1, 1, 2, 8, 8))
    body = stream.unseal(good)
    header, [parts] = stream.read(good)
    raw = [bytes(part.rest()) for part in parts]

    def with_part(i: int, part: bytes) -> bytes:
        return stream.write(header, [[*raw[:i], part, *raw[i + 1 :]]])

    def altered(stream_: bytes, i: int, change: Any) -> bytes:
        """Part number i changed by a function."""
        own, [own_parts] = stream.read(stream_)
        pieces = [bytes(part.rest()) for part in own_parts]
        return stream.write(own, [[*pieces[:i], change(pieces[i]), *pieces[i + 1 :]]])

    kivi = reference.KIVI(2, 2, 2).encode(layer(1, 1, 5, 4, 4, "float16"))
    qjl = reference.QJL(1).encode(layer(1, 1, 2, 3, 4))
    polar = reference.PolarQuant().encode(layer(1, 1, 2, 8, 3))
    return {
        "kivi-window": (stream.seal(stream.unseal(kivi).replace(b"KIVI\x03\x04\x04\x04", b"KIVI\x03\x04\x04\x06")), "a window that is no multiple of the group"),
        "kivi-group": (stream.seal(stream.unseal(kivi).replace(b"KIVI\x03\x04\x04\x04", b"KIVI\x03\x04\x00\x04")), "groups of no numbers"),
        "kivi-scale": (altered(kivi, 2, lambda b: b"\xff\x00" + b[2:]), "a scale below the least one that is not 0"),
        "kivi-scale-large": (altered(kivi, 6, lambda b: b"\x00\xff" + b[2:]), "a scale above the largest one"),
        "kivi-zero": (altered(kivi, 1, lambda b: b"\x00\x7c" + b[2:]), "a zero that is inf"),
        "kivi-recent": (altered(kivi, 4, lambda b: b"\x00\x7e" + b[2:]), "NaN among the recent keys"),
        "kivi-recent-cut": (altered(kivi, 8, lambda b: b[:-2]), "too few recent values"),
        "kivi-codes": (altered(kivi, 3, lambda b: b + b"\0"), "a byte too many among the codes"),
        "qjl-signs": (altered(qjl, 2, lambda b: b + b"\0"), "a byte too many among the signs"),
        "qjl-spare-bits": (altered(qjl, 2, lambda b: bytes([b[0] | 0x80])), "a bit behind the last sign is set"),
        "qjl-norm": (altered(qjl, 1, lambda b: b"\x7f\x00" + b[2:]), "a norm that no float32 vector has"),
        "qjl-zero": (altered(qjl, 3, lambda b: b"\x00\x00\xc0\x7f" + b[4:]), "a zero that is NaN"),
        "polarquant-levels": (stream.seal(stream.unseal(polar).replace(b"\x04\x08\x04\x04\x04", b"\x04\x08\x04\x04\x12")), "9 bits for an angle"),
        "polarquant-no-levels": (stream.write(stream.Header(stream.Kind.LAYER, "PolarQuant", b"\x00\x00"), [[b""] * 6]), "no levels"),
        "polarquant-cosines": (altered(polar, 1, lambda b: b[2:4] + b[:2] + b[4:]), "cosines that rise"),
        "polarquant-cosine": (altered(polar, 1, lambda b: b"\x01\x80" + b[2:]), "a cosine above 1"),
        "polarquant-radius": (altered(polar, 2, lambda b: b"\xff\xff" + b[2:]), "a radius that no float32 vector has"),
        "polarquant-lone": (altered(polar, 5, lambda b: bytes([b[0] | 0x10]) + b[1:]), "a lone coordinate's code with more than its sign"),
        "polarquant-angles": (altered(polar, 3, lambda b: b[:-1]), "a byte too few among the angles"),
        "empty": (b"", "no bytes"),
        "magic": (b"\x92" + good[1:], "another magic"),
        "cut": (good[:-7], "cut short: the checksum is wrong"),
        "bit": (good[:40] + bytes([good[40] ^ 4]) + good[41:], "one bit altered: the checksum is wrong"),
        "version": (stream.seal(b"\xff" + body[1:]), "a later format version"),
        "kind": (stream.seal(body[:1] + b"\x07" + body[2:]), "no such kind of stream"),
        "codec": (stream.seal(body.replace(b"TurboQuant", b"TurboQuack")), "no such codec"),
        "junk": (stream.seal(body + b"\0"), "a byte behind the last part"),
        "state": (
            stream.write(stream.Header(stream.Kind.LAYER, "TurboQuant", header.parameters, bytes(16)), [raw]),
            "written with a state that is not given",
        ),
        "bits": (stream.seal(body.replace(b"TurboQuant\x04\x06", b"TurboQuant\x04\x00")), "0 bits a code"),
        "parts": (stream.write(header, [raw[:-1]]), "a part is missing"),
        "tokens": (with_part(0, raw[0][:1] + b"\x03" + raw[0][2:]), "more tokens than norms and codes"),
        "varint": (with_part(0, b"\x81\x00" + raw[0][1:]), "a varint not in its shortest form"),
        "position": (with_part(0, raw[0][:-1] + b"\x01"), "a negative position"),
        "points": (with_part(1, raw[1][2:4] + raw[1][:2] + raw[1][4:]), "points that fall"),
        "norm": (with_part(2, b"\xff\xff" + raw[2][2:]), "a norm that no float32 vector has"),
        "codes": (with_part(3, raw[3] + b"\0"), "a byte too many among the codes"),
        "spare-bits": (
            stream.write(
                stream.Header(stream.Kind.LAYER, "TurboQuant", header.parameters),
                [[reference.shape.Shape.of(layer(2, 1, 1, 3, 3)).write(), raw[1], *(2 * [b"\x80\x80", b"\x00\x80"])]],
            ),
            "a bit behind the last code is set",
        ),
        "nan": (
            reference.Full().encode(layer(3, 1, 1, 2, 2)).replace(numbers(3, 1, 1, 2).astype("<f4").tobytes(), b"\x00\x00\xc0\x7f" * 2),
            "NaN in a full cache, and a wrong checksum",
        ),
        "nan-sealed": (
            stream.seal(stream.unseal(reference.Full().encode(layer(3, 1, 1, 2, 2))).replace(
                numbers(3, 1, 1, 2).astype("<f4").tobytes(), b"\x00\x00\xc0\x7f" * 2)),
            "NaN in a full cache",
        ),
    }  # fmt: skip


def array(x: Any) -> dict[str, Any]:
    little = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("<"))
    return {"dtype": x.dtype.name, "shape": list(x.shape), "hex": little.tobytes().hex()}


def unarray(record: dict[str, Any]) -> Any:
    from tests.reference.strategies import DTYPES

    dtype = np.dtype(DTYPES.get(record["dtype"], record["dtype"]))
    raw = np.frombuffer(bytes.fromhex(record["hex"]), f"<u{dtype.itemsize}")
    return raw.astype(raw.dtype.newbyteorder("=")).view(dtype).reshape(record["shape"])


def input_record(one: Layer, with_queries: bool) -> dict[str, Any]:
    record = {
        "keys": array(one.keys),
        "values": array(one.values),
        "positions": array(one.positions),
        "index": one.index,
        **({} if one.rope is None else {"rope": one.rope.to_json()}),
    }
    if with_queries:
        places = one.query_positions
        record |= {"queries": array(one.queries), "query_positions": None if places is None else array(places)}
    return record


def input_layer(record: dict[str, Any]) -> Layer:
    """The layer of an `input_record`."""
    places = record.get("query_positions")
    return Layer(
        unarray(record["keys"]),
        unarray(record["values"]),
        unarray(record["queries"]) if "queries" in record else None,
        positions=unarray(record["positions"]),
        index=record["index"],
        rope=Rope.from_json(record["rope"]) if "rope" in record else None,
        query_positions=None if places is None else unarray(places),
    )


def decoded_record(decoded: Decoded) -> dict[str, Any]:
    return {
        "keys": array(decoded.keys),
        "values": array(decoded.values),
        "log_weights": array(decoded.log_weights),
        "positions": array(decoded.positions),
        "kept": array(decoded.kept),
    }


def rans_cases() -> list[dict[str, Any]]:
    out = []
    for lanes, block, count, contexts in (
        (8, 40, 100, [0, 1, 1]),
        (32, 64, 64, [0]),
        (32, 1000, 70, [1, 0]),
        (8, 16, 0, [0]),
    ):
        tables = Tables(np.stack([rans.frequencies([50, 20, 20, 9, 1]), rans.frequencies([0, 1, 0, 1, 0])]))
        words = kvtheory.randomness.raw_words(count, "golden vectors", count)
        used = np.resize(np.resize(contexts, block), count)
        symbols = np.where(
            used == 1, 1 + 2 * (words % 2).astype(np.int64), (words >> np.uint64(60)).astype(np.int64) % 5
        )
        payload = rans.encode(symbols, tables, contexts, block=block, lanes=lanes)
        out.append(
            {
                "frequencies": tables.frequencies.tolist(), "tables": tables.write().hex(), "contexts": contexts, "block": block,
                "lanes": lanes, "symbols": symbols.tolist(), "payload": payload.hex(),
                "range": entropy_coding.range_encode(symbols, tables, np.resize(contexts, block)).hex() if count <= block else None,
            }
        )  # fmt: skip
    return out


def packing_cases() -> list[dict[str, Any]]:
    out = []
    for bits in packing.WIDTHS:
        words = kvtheory.randomness.raw_words(bits, "golden vectors", 11)
        codes = (words >> np.uint64(64 - bits)).astype(np.int64)
        out.append({"bits": bits, "codes": codes.tolist(), "packed": packing.pack(codes, bits).hex()})
    return out


def write(path: Path, record: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    from tests.vectors import fitted

    for name, (codec, data, *given) in {**valid(), **fitted.valid()}.items():
        layers = data if isinstance(data, list) else [data]
        made = reference.encode_cache(codec, data) if isinstance(data, list) else codec.encode(data)
        made = given[0] if given else made
        decoded = reference.decode(made, codec.state)
        write(
            HERE / "valid" / f"{name}.json",
            {
                "codec": codec.codec_id,
                "parameters": reference.inspect(made).record()["parameters"],
                "stream": made.hex(),
                **({"state": codec.state.hex()} if codec.state else {}),
                **({"inputs_give": "another stream"} if given else {}),
                "inputs": [input_record(one, "queries" in codec.needs) for one in layers],
                "decoded": [decoded_record(one) for one in (decoded if isinstance(decoded, list) else [decoded])],
            },
        )
    for name, (data, why, *states) in {**invalid(), **fitted.invalid()}.items():
        state = states[0] if states else b""
        try:
            reference.decode(data, state)
        except (reference.CorruptStream, reference.StateMismatch) as problem:
            error, offset = type(problem).__name__, getattr(problem, "offset", None)
        else:
            raise AssertionError(f"{name} decodes")
        record = {"stream": data.hex(), "error": error, "offset": offset, "why": why}
        write(HERE / "invalid" / f"{name}.json", record | ({"state": state.hex()} if state else {}))
    write(HERE / "rans.json", rans_cases())
    write(HERE / "packing.json", packing_cases())


if __name__ == "__main__":
    main()
