"""Predictors as bytes: the state of PredictiveDelta.

part 0   u8 length and name; u8 count and varints: its whole numbers; 4 varints: layers, kv_heads, head_dim, value_dim (all 0 where it runs the
         model alone); for each layer varint index + 1 (0: none); for each layer a rope: u8 0 none, 1 as below, 2 follows; u8 0 or 16 and the digest of the model; of SmallerModel also the
         16 bytes of its own model and its rope (0 or 2)
part 1   what was fitted: varint rows of TokenTable's ids or of EmbeddingLinear's matrix; then the arrays, int32 and binary32
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtheory import prediction
from kvtheory.layer import Rope
from kvtheory.prediction.fitted import GIVEN, Fitted
from reference.rotary import read_rope, write_rope
from reference.stream import Part, Reader, varint

__all__ = ["MOST_SIZE", "known", "read_predictor", "write_predictor"]

#: of layers, heads, channels; of a vocabulary
MOST_SIZE, MOST_VOCABULARY = 1 << 12, 1 << 24

_KINDS = {
    kind.name: kind
    for kind in (
        prediction.Nothing, prediction.PreviousToken, prediction.TokenTable, prediction.EmbeddingLinear, prediction.LayerLinear,
        prediction.SmallerModel, prediction.TopK, prediction.FullVocabulary, prediction.KnownToken,
    )
}  # fmt: skip


def known(predictor: Any) -> bool:
    """Whether it is one of those that a state can name."""
    return type(predictor) in _KINDS.values()


def _write_ropes(ropes: tuple[Rope | None, ...]) -> bytes:
    out, below = b"", None
    for i, rope in enumerate(ropes):
        same = i > 0 and rope is not None and below is not None and write_rope(rope) == write_rope(below)
        out += b"\x00" if rope is None else (b"\x01" if same else b"\x02" + write_rope(rope))
        below = rope
    return out


def write_predictor(predictor: Any, digest: bytes) -> list[Part]:
    """Parts of the state. digest: 16 bytes of the model that is run, or none."""
    fitted = isinstance(predictor, Fitted)
    sizes = predictor.sizes if fitted else (0, 0, 0, 0)
    head = [bytes([len(predictor.name)]), predictor.name.encode(), bytes([len(predictor.arguments)])]
    head += [varint(number) for number in (*predictor.arguments, *sizes)]
    if fitted:
        head += [varint(0 if index is None else index + 1) for index in predictor.indices]
    head += [_write_ropes(predictor.ropes) if fitted else b"", bytes([len(digest)]), digest]
    if isinstance(predictor, prediction.SmallerModel):
        head += [predictor.digest, _write_ropes((predictor.small_rope,))]
    body = []
    if isinstance(predictor, prediction.TokenTable):
        body.append(varint(len(predictor.ids)))
    if isinstance(predictor, prediction.EmbeddingLinear):
        body.append(varint(len(predictor.matrix)))
    body += [array.astype(array.dtype.newbyteorder("<")).tobytes() for array in predictor.arrays().values()]
    return [b"".join(head), b"".join(body)]


def read_predictor(parts: list[Reader]) -> tuple[Any, bytes]:
    """(predictor, digest of the model) of the two parts of a state; CorruptStream for what `write_predictor` does not write."""
    head, body = parts
    start = head.offset
    name = bytes(head.take(head.u8("length of the predictor's name"), "predictor's name")).decode("latin-1")
    if name not in _KINDS:
        head.fail(f"predictor: expected one of {', '.join(_KINDS)}, got {name!r}", start)
    kind: Any = _KINDS[name]
    start = head.offset
    count = head.u8("count of the predictor's numbers")
    wanted = {"TokenTable": 2, "EmbeddingLinear": 1, "SmallerModel": 4, "TopK": 1, "FullVocabulary": 1}.get(name, 0)
    if count != wanted:
        head.fail(f"numbers of {name}: expected {wanted}, got {count}", start)
    start = head.offset
    numbers = [head.varint(f"number of {name}", most=MOST_VOCABULARY) for _ in range(count)]
    sizes = tuple(head.varint(size, most=MOST_SIZE) for size in ("layers", "kv_heads", "head_dim", "value_dim"))
    fitted = issubclass(kind, Fitted)
    if (0 in sizes) if fitted else any(sizes):
        head.fail(f"sizes of {name}: expected {'none' if fitted else 'all'} to be 0, got {sizes}", start)
    positive, choice = (numbers[1:], numbers[:1]) if name in ("TokenTable", "EmbeddingLinear") else (numbers, [])
    if 0 in positive or any(number > 1 for number in choice):
        head.fail(f"numbers of {name}: got {numbers}", start)
    start = head.offset
    indices = [head.varint("layer index", most=1 << 32) for _ in range(sizes[0])]
    if any(b <= a and b for a, b in itertools.pairwise(indices)):
        head.fail(f"layer indices: expected them to ascend, none first, got {indices}", start)
    ropes = _read_ropes(head, sizes[0], sizes[2])
    like = (sizes, ropes, tuple(index - 1 if index else None for index in indices))
    start = head.offset
    if (length := head.u8("length of a model's digest")) not in (0, 16):
        head.fail(f"length of a model's digest: expected 0 or 16, got {length}", start)
    digest = bytes(head.take(length, "digest of the model"))
    predictor = _read_fitted(kind, name, numbers, like, head, body) if fitted else kind(*numbers)
    head.end("predictor")
    body.end("what was fitted")
    if bool(digest) != ("player" in predictor.needs):
        head.fail(f"{name}: expected {'a' if 'player' in predictor.needs else 'no'} model's digest", start)
    return predictor, digest


def _read_ropes(reader: Reader, layers: int, dim: int) -> tuple[Rope | None, ...]:
    ropes: list[Rope | None] = []
    for _ in range(layers):
        start = reader.offset
        form = reader.u8("form of a rope")
        if form > 2 or (form == 1 and (not ropes or ropes[-1] is None)):
            reader.fail(f"form of a rope: expected 0, 2, or 1 above another rope, got {form}", start)
        ropes.append(None if form == 0 else (ropes[-1] if form == 1 else read_rope(reader, dim)))
    return tuple(ropes)


def _read_fitted(
    kind: Any, name: str, numbers: list[int], like: tuple[Any, Any, Any], head: Reader, body: Reader
) -> Any:
    sizes = like[0]
    layers, heads, d, dv = sizes
    width = layers * heads * (d + dv)
    if name == "Nothing":
        return kind(*like, _floats(body, (width,), "mean"))
    if name == "PreviousToken":
        return kind(*like)
    if name == "TokenTable":
        rows = body.varint("number of token ids", most=body.remaining)
        start = body.offset
        ids = body.array("<i4", rows, "token ids").astype(np.int32)
        if rows and (int(ids[0]) < 0 or int(ids[-1]) >= numbers[1] or (np.diff(ids.astype(np.int64)) <= 0).any()):
            body.fail(f"token ids: expected them to ascend from 0 or above to at most {numbers[1] - 1}", start)
        return kind(
            *like,
            ids,
            _floats(body, (rows, width), "means"),
            _floats(body, (width,), "mean"),
            numbers[1],
            GIVEN[numbers[0]],
        )
    if name == "EmbeddingLinear":
        rows = body.varint("width of the embeddings", most=body.remaining)
        return kind(*like, _floats(body, (rows, width), "matrix"), _floats(body, (width,), "offset"), GIVEN[numbers[0]])
    if name == "LayerLinear":
        count = sum((rows + 1) * columns for rows, columns in kind.shapes(sizes))
        return kind(*like, _floats(body, (count,), "maps"))
    start = head.offset
    if max(numbers) > MOST_SIZE:
        head.fail(f"sizes of the smaller model: expected at most {MOST_SIZE}, got {numbers}", start)
    own = bytes(head.take(16, "digest of the smaller model"))
    (rope,) = _read_ropes(head, 1, numbers[2])
    inputs = numbers[1] * (numbers[2] + numbers[3])
    maps = _floats(body, (layers * (inputs + 1) * heads * (d + dv),), "maps")
    return kind(*like, tuple(numbers), own, rope, maps)


def _floats(reader: Reader, shape: tuple[int, ...], what: str) -> NDArray[np.float32]:
    start = reader.offset
    count = 1
    for size in shape:
        count *= size
    array = reader.array("<f4", count, what).astype(np.float32)
    with np.errstate(invalid="ignore"):
        if not np.isfinite(array).all():
            reader.fail(f"{what}: expected finite numbers", start)
    return array.reshape(shape)
