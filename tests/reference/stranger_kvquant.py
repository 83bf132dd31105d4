"""KVQuant's streams in plain Python numbers, written from docs/stream-format.md alone: no NumPy, nothing of `reference`.

Like independent.py and strangers.py, whose readers it shares.
"""

import math
import struct
import zlib
from fractions import Fraction

from tests.reference.independent import Bytes, bits_of, to_float32
from tests.reference.strangers import TYPES, number, scale_of, shape

M64 = (1 << 64) - 1


def opened(data):
    """(kind, codec id, Bytes of the parameters, parts)."""
    assert data[:4] == b"\x93KVS" and zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")
    s = Bytes(data[4:-4])
    assert s.take(1) == b"\1"
    kind = s.take(1)[0]
    codec = s.take(s.take(1)[0]).decode()
    parameters = Bytes(s.take(s.varint()))
    s.take(s.take(1)[0])  # the digest
    sizes = [s.varint() for _ in range(s.varint())]
    return kind, codec, parameters, [Bytes(s.take(n)) for n in sizes]


def floats(s, count, letter):
    return list(struct.unpack(f"<{count}{letter}", s.take(count * struct.calcsize(letter))))


# -- RoPE --------------------------------------------------------------------------------------------------------------


def pi(bits):
    """floor(pi 2^bits) but for a few units, by Machin's formula."""

    def arctan(n):
        total = term = (1 << (bits + 32)) // n
        k, sign = 3, -1
        while term:
            term //= n * n
            total += sign * (term // k)
            k, sign = k + 2, -sign
        return total

    return (16 * arctan(5) - 4 * arctan(239)) >> 32


PI = Fraction(pi(600), 1 << 600)


def cos_sin(frequency, position):
    turns = math.floor(Fraction(frequency) * (1 << 64) / (2 * PI) + Fraction(1, 2)) & M64
    u = position * turns & M64
    q = (u + (1 << 61) >> 62) % 4
    signed = (u - (q << 62)) & M64
    signed -= 1 << 64 if signed >> 63 else 0
    x = float(signed) * (2 * math.pi * 2.0**-64)
    s = x * x

    def horner(odd):
        total = 1.0 / math.factorial(16 + odd)
        for k in range(7, -1, -1):
            total = (-1) ** k / math.factorial(2 * k + odd) + s * total
        return total

    c, d = horner(0), x * horner(1)
    return [(c, d), (-d, c), (-c, -d), (d, -c)][q]


def applied(rope, x, position):
    layout, scaling, frequencies = rope
    out, r = list(x), 2 * len(frequencies)
    for j, frequency in enumerate(frequencies):
        first, second = (2 * j, 2 * j + 1) if layout else (j, j + r // 2)
        cos, sin = cos_sin(frequency, position)
        a, b = x[first], x[second]
        out[first], out[second] = (a * cos - b * sin) * scaling, (b * cos + a * sin) * scaling
    return out


# -- state and stream --------------------------------------------------------------------------------------------------


def tables(state, bits):
    """index (plus 1) -> (heads, d, dv, rope, low, high, key points, value points)."""
    kind, codec, _, (part,) = opened(state)
    assert kind == 3 and codec == "KVQuant"
    out, rope = {}, None
    for _ in range(part.varint()):
        index, heads, d, dv = (part.varint() for _ in range(4))
        part.take(1)
        turn = part.take(1)[0]
        if turn == 0:
            rope = None
        elif turn == 1:
            layout, (scaling,) = part.take(1)[0], floats(part, 1, "d")
            rope = layout, scaling, floats(part, part.varint(), "d")
        low, high = floats(part, heads * d, "f"), floats(part, heads * d, "f")
        points = []
        for _ in range(2):
            floats(part, 2**bits - 1, "f")
            points.append(floats(part, 2**bits, "f"))
        out[index] = heads, d, dv, rope, low, high, *points
    assert part.at == len(part.data)
    return out


def positions(part, tokens):
    width = part.take(1)[0]
    out = [part.zigzag()]
    for _ in range(tokens - 1):
        out.append(out[-1] + (int.from_bytes(part.take(width), "little") if width else 1))
    return out[:tokens]


def numbers(part, count, kind):
    size = TYPES[kind][1]
    return [number(part.take(size), kind) for _ in range(count)]


def places(part):
    at, out = 0, []
    for gap in part.data:
        at += gap
        if gap < 255:
            out.append(at)
            at += 1
    return out


def finished(x, kind):
    limit = TYPES[kind][2]
    return to_float32(max(-limit, min(limit, x))) + 0.0


def decode(stream, state):
    """(keys, values), each [head][token][channel]: the float32 numbers before the last cast; sinks as they are."""
    _, _, parameters, parts = opened(stream)
    bits, _, most = parameters.zigzag(), floats(parameters, 1, "d"), parameters.zigzag()
    at = parts[0].data
    index_reader = Bytes(at)
    index = [index_reader.varint() for _ in range(5)][4]
    heads, tokens, d, dv, *kinds = shape(parts[0])
    where = positions(parts[0], tokens)
    *sizes, rope, low, high, key_points, value_points = tables(state, bits)[index]
    assert sizes == [heads, d, dv]
    sinks = min(most, tokens)
    rows = (tokens - sinks) * heads
    out = []
    for side, dim, kind in ((0, d, kinds[0]), (1, dv, kinds[1])):
        exact = numbers(parts[1 + side], sinks * heads * dim, kind)
        codes_part, places_part, outliers_part = parts[3:6] if side == 0 else parts[8:11]
        codes = bits_of(codes_part.data, bits, rows * dim)
        kept = places(places_part)
        narrow = 2 if kind == 3 else kind
        apart = dict(zip(kept, numbers(outliers_part, len(kept), narrow), strict=True))
        assert all(codes[place] == 0 for place in kept)
        if side:
            zeros = numbers(parts[6], rows, narrow)
            halves = [scale_of(int.from_bytes(parts[7].take(2), "little")) / 2 for _ in range(rows)]
        side_out = [
            [exact[(t * heads + h) * dim : (t * heads + h + 1) * dim] for t in range(sinks)] for h in range(heads)
        ]
        for row in range(rows):
            t, h = sinks + row // heads, row % heads
            x = []
            for c in range(dim):
                place = row * dim + c
                if place in apart:
                    x.append(apart[place])
                elif side:
                    x.append(zeros[row] + halves[row] * (1.0 + value_points[codes[place]]))
                else:
                    a, b = low[h * d + c], high[h * d + c]
                    x.append((b + a) / 2 + (b - a) / 2 * key_points[codes[place]])
            if not side and rope:
                x = applied(rope, x, where[t])
            side_out[h].append([finished(v, kind) for v in x])
        out.append(side_out)
    return out
