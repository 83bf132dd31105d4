"""KIVI's, QJL's and PolarQuant's streams in plain Python numbers, written from docs/stream-format.md alone: no NumPy, nothing of `reference`.

Like independent.py, whose TurboQuant parts they share: slow and straight, what the array code is held against.
"""

import math
import struct
import zlib
from fractions import Fraction

from tests.reference.independent import Bytes, bits_of, input_bits, matrix, norm_code, norm_of, raw_words, to_float32

#: exactly representable in binary64, so that rounding to binary32 is one rounding
TYPES = {0: ("<e", 2, 65504.0), 1: (None, 2, (2 - 2**-7) * 2.0**127), 2: ("<f", 4, (2 - 2**-23) * 2.0**127)}
TYPES[3] = ("<d", 8, TYPES[2][2])


def f32(x):
    return to_float32(x)


def number(data, kind):
    """A number of element type `kind` from its bytes."""
    if kind == 1:
        return struct.unpack("<f", b"\0\0" + data)[0]
    return struct.unpack(TYPES[kind][0], data)[0]


def read(stream):
    """(codec id, Bytes of its parameters, parts) of a stream of one layer."""
    assert stream[:4] == b"\x93KVS" and zlib.crc32(stream[:-4]) == int.from_bytes(stream[-4:], "little")
    s = Bytes(stream[4:-4])
    assert s.take(2) == bytes([1, 0])
    codec = s.take(s.take(1)[0]).decode()
    parameters = Bytes(s.take(s.varint()))
    assert s.take(1) == b"\0"
    sizes = [s.varint() for _ in range(s.varint())]
    parts = [Bytes(s.take(n)) for n in sizes]
    assert s.at == len(s.data)
    return codec, parameters, parts


def shape(part):
    heads, tokens, d, dv = (part.varint() for _ in range(4))
    part.varint()
    types = part.take(1)[0]
    return heads, tokens, d, dv, types & 15, types >> 4


def decode(stream):
    """(keys, values), each [head][token][channel] of Python floats: exactly the float32 numbers before the last cast (recent ones: all)."""
    codec, parameters, parts = read(stream)
    return {"KIVI": decode_kivi, "QJL": decode_qjl, "PolarQuant": decode_polar}[codec](parameters, parts)


# -- min/max groups ----------------------------------------------------------------------------------------------------


def scale_of(code):
    assert code == 0 or 256 <= code <= 65279
    return 0.0 if code == 0 else (1 + code % 256 / 256) * 2.0 ** (code // 256 - 126)


def wide(z, s, bits):
    return abs(z) >= 2.0**125 or s >= 2.0 ** (125 - bits)


def decode_group(z, scale_code, codes, bits, limit):
    s = scale_of(scale_code)
    out = []
    for c in codes:
        x = 4 * f32(z / 4 + c * (s / 4)) if wide(z, s, bits) else f32(z + c * s)
        out.append(max(-limit, min(limit, x + 0.0)))
    return out


def encode_group(x, bits):
    """(zero, scale code, codes) of float32 numbers."""
    z = min(x) + 0.0
    u = (max(x) - z) / (2**bits - 1)
    g, h = math.frexp(u)
    code = min(65279, max(256, 256 * (h + 125) + math.ceil(512 * g) - 256)) if u else 0
    s = scale_of(code)
    if s == 0:
        return z, 0, [0] * len(x)
    p = 0.25 if wide(z, s, bits) else 1.0
    inverse = f32(1 / (s * p))
    codes = [min(2**bits - 1, round(f32(f32(v * p - z * p) * inverse))) for v in x]
    return z, code, codes


def zero_type(kind):
    return kind if TYPES[kind][1] == 2 else 2


def groups(zeros, scales, codes, at, size, bits, kind):
    """Group number `at` of parts, whose codes have begun to be taken."""
    zero_kind = zero_type(kind)
    width = TYPES[zero_kind][1]
    z = number(zeros.data[width * at : width * (at + 1)], zero_kind) + 0.0
    scale_code = int.from_bytes(scales.data[2 * at : 2 * at + 2], "little")
    own, codes[:] = codes[:size], codes[size:]
    return decode_group(z, scale_code, own, bits, TYPES[kind][2])


def value_rows(parts, rows, dim, group, bits, kind):
    zeros, scales, packed = parts
    codes = bits_of(packed.data, bits, rows * dim)
    at, out = 0, []
    for _ in range(rows):
        row = []
        for start in range(0, dim, group):
            row += groups(zeros, scales, codes, at, min(group, dim - start), bits, kind)
            at += 1
        out.append(row)
    return out


# -- KIVI --------------------------------------------------------------------------------------------------------------


def decode_kivi(p, parts):
    bits, group, window = p.zigzag(), p.zigzag(), p.zigzag()
    heads, tokens, d, dv, key_kind, value_kind = shape(parts[0])
    coded_keys, coded_values = tokens - tokens % window, max(0, tokens - window)
    keys = [[[None] * d for _ in range(tokens)] for _ in range(heads)]
    values = [[None] * tokens for _ in range(heads)]
    codes = bits_of(parts[3].data, bits, coded_keys * heads * d)
    at = 0
    for first in range(0, coded_keys, group):
        for h in range(heads):
            for c in range(d):
                for t, x in enumerate(groups(parts[1], parts[2], codes, at, group, bits, key_kind)):
                    keys[h][first + t][c] = x
                at += 1
    for n, row in enumerate(value_rows(parts[5:8], coded_values * heads, dv, group, bits, value_kind)):
        values[n % heads][n // heads] = row
    for array, part, first, kind, dim in (
        (keys, parts[4], coded_keys, key_kind, d),
        (values, parts[8], coded_values, value_kind, dv),
    ):
        for t in range(first, tokens):
            for h in range(heads):
                array[h][t] = [number(part.take(TYPES[kind][1]), kind) for _ in range(dim)]
        assert part.at == len(part.data)
    return keys, values


# -- QJL ---------------------------------------------------------------------------------------------------------------


def sketch(seed, rows, dim):
    edges = [math.floor(2**32 * 0.5 * math.erfc(-(k + 0.5) / 16 / math.sqrt(2)) + 0.5) for k in range(-128, 128)]
    entries = []
    for word in raw_words(seed, "reference.QJL key sketch", -(-rows * dim // 2)):
        entries += [sum(w >= e for e in edges) - 128 for w in (word & (1 << 32) - 1, word >> 32)]
    return [entries[i * dim : (i + 1) * dim] for i in range(rows)]


def rounded_gain(gain):
    f, k = math.frexp(gain)
    return math.ldexp(round(f * 2**24), k - 24)


def decode_qjl(p, parts):
    bits, seed = p.zigzag(), p.zigzag()
    heads, tokens, d, dv, key_kind, value_kind = shape(parts[0])
    m = bits * d
    s = sketch(seed, m, d) if tokens else []
    flags = bits_of(parts[2].data, 1, tokens * heads * m)
    keys = [[None] * tokens for _ in range(heads)]
    values = [[None] * tokens for _ in range(heads)]
    limit = TYPES[key_kind][2]
    for n in range(tokens * heads):
        q = [-1 if flag else 1 for flag in flags[n * m : (n + 1) * m]]
        z = [sum(s[j][i] * q[j] for j in range(m)) for i in range(d)]
        norm = norm_of(int.from_bytes(parts[1].take(2), "little"), 7)
        gain = rounded_gain(math.sqrt(math.pi / 2) / math.sqrt(256 + 1 / 12) / m * norm)
        keys[n % heads][n // heads] = [max(-limit, min(limit, f32(v * gain))) + 0.0 for v in z]
    for n, row in enumerate(value_rows(parts[3:], tokens * heads, dv, dv, max(bits, 2), value_kind)):
        values[n % heads][n // heads] = row
    return keys, values


def encode_qjl_key(x, bits, seed):
    """(norm code, signs) of one key of float32 numbers."""
    s = sketch(seed, bits * len(x), len(x))
    a = min(14, ((1 << 24) // max(1, *(sum(abs(v) for v in row) for row in s))).bit_length() - 1)
    e = math.frexp(max(abs(v) for v in x))[1]
    n = [round(Fraction(v) * Fraction(2) ** (a - e)) for v in x]
    signs = [int(sum(c * v for c, v in zip(row, n)) < 0) for row in s]
    return norm_code(sum(v * v for v in n), e - a, 7), signs


# -- PolarQuant --------------------------------------------------------------------------------------------------------


def polar_signs(seed, side, d):
    words = raw_words(seed, f"reference.PolarQuant {side} signs", -(-d // 64))
    return [-1 if words[i // 64] >> (i % 64) & 1 else 1 for i in range(d)]


def nodes(d, level):
    return -(-d // 2**level)


def cosine_tables(part, level_bits):
    sizes = [2 ** level_bits[0] // 4, *(2**b for b in level_bits[1:])]
    return [[int.from_bytes(part.take(2), "little") for _ in range(size)] for size in sizes]


def factors(table, code, bits, level):
    if level > 1:
        return table[code] / 2**15, table[len(table) - 1 - code] / 2**15
    second = -1 if code >> (bits - 1) else 1
    if bits == 1:
        return 0.0, float(second)
    k = code % 2 ** (bits - 2)
    first = -1 if code >> (bits - 2) & 1 else 1
    return first * table[k] / 2**15, second * table[len(table) - 1 - k] / 2**15


def decode_polar(p, parts):
    level_bits = [p.zigzag() for _ in range(p.varint())]
    seed, levels = p.zigzag(), len(level_bits)
    heads, tokens, dk, dv, key_kind, value_kind = shape(parts[0])
    tables = cosine_tables(parts[1], level_bits)
    out = []
    for side, d, kind, radius_part, angle_part in (
        ("key", dk, key_kind, parts[2], parts[3]),
        ("value", dv, value_kind, parts[4], parts[5]),
    ):
        each = [nodes(d, 1), *(nodes(d, level - 1) // 2 for level in range(2, levels + 1))]
        sections = [
            bits_of(angle_part.take(-(-tokens * heads * n * b // 8)), b, tokens * heads * n)
            for n, b in zip(each, level_bits)
        ]
        sign, (rows, m), a, limit = polar_signs(seed, side, d), matrix(d), input_bits(d), TYPES[kind][2]
        layer = [[None] * tokens for _ in range(heads)]
        for n in range(tokens * heads):
            radii = [int.from_bytes(radius_part.take(2), "little") for _ in range(nodes(d, levels))]
            top = max(radii) // 128 - 255 if max(radii) else 0
            v = [math.ldexp(norm_of(r, 7), a - top) for r in radii]
            for level in range(levels, 0, -1):
                codes = sections[level - 1][n * each[level - 1] : (n + 1) * each[level - 1]]
                below = []
                for j in range(len(v)):
                    if len(below) + 1 < nodes(d, level - 1):
                        pair = factors(tables[level - 1], codes[j], level_bits[level - 1], level)
                        below += [f32(v[j] * factor) for factor in pair]
                    elif level == 1:
                        assert codes[j] % 2 ** (level_bits[0] - 1) == 0
                        below.append(-v[j] if codes[j] else v[j])
                    else:
                        below.append(v[j])
                v = below
            leaves = [round(x) for x in v]
            gain = rounded_gain(2.0 ** (top - a) / math.sqrt(m * d))
            z = [sign[i] * sum(rows[i][j] * leaves[j] for j in range(d)) for i in range(d)]
            layer[n % heads][n // heads] = [max(-limit, min(limit, f32(x * gain))) + 0.0 for x in z]
        out.append(layer)
    return tuple(out)


def encode_polar(x, level_bits, tables, seed, side):
    """(radius codes, codes of each level) of one vector of float32 numbers."""
    d = len(x)
    a, (rows, m), sign = input_bits(d), matrix(d), polar_signs(seed, side, d)
    e = math.frexp(max(abs(v) for v in x))[1]
    n = [round(Fraction(v) * Fraction(2) ** (a - e)) for v in x]
    y = [sum(rows[j][i] * sign[i] * n[i] for i in range(d)) for j in range(d)]
    q = [f32(float(v * v)) for v in y]
    codes = []
    for level, bits in enumerate(level_bits, 1):
        c = tables[level - 1]
        s = c[::-1]
        t = [f32(((s[k] + s[k + 1]) / (c[k] + c[k + 1])) ** 2) for k in range(len(c) - 1)]
        own, above = [], []
        for j in range(0, len(q), 2):
            if j + 1 < len(q):
                code = sum(q[j + 1] > f32(tk * q[j]) for tk in t)
                if level == 1:
                    code += (2 ** (bits - 2) if bits > 1 and y[j] < 0 else 0) + (2 ** (bits - 1) if y[j + 1] < 0 else 0)
                own.append(code)
                above.append(f32(q[j] + q[j + 1]))
            else:
                if level == 1:
                    own.append(2 ** (bits - 1) if y[j] < 0 else 0)
                above.append(q[j])
        codes.append(own)
        q = above
    return [norm_code(v / (m * d), e - a, 7) for v in q], codes


# -- reducers ------------------------------------------------------------------------------------------------------------


def positions_of(part, count):
    width, first = part.take(1)[0], part.zigzag()
    assert width in (0, 1, 2, 4, 8) and first >= 0
    out = [first + i for i in range(count)] if width == 0 else [first]
    while len(out) < count:
        out.append(out[-1] + int.from_bytes(part.take(width), "little"))
    return out


def log_weights_of(part, form, counts):
    """Log-weights of part "kept" behind its positions, head by head."""
    total = sum(counts)
    if form == 0:
        flat = [0.0] * total
    elif form == 1:
        table = [number(part.take(4), 2) for _ in range(part.varint())]
        bits = (len(table) - 1).bit_length()
        codes = bits_of(part.take(-(-total * bits // 8)), bits, total) if bits else [0] * total
        flat = [table[code] for code in codes]
    else:
        flat = [number(part.take(4), 2) for _ in range(total)]
    return [flat[sum(counts[:h]) : sum(counts[: h + 1])] for h in range(len(counts))]


def decode_reduced(stream):
    """{"keys", "values": [head][token][channel], "positions", "log_weights": [head][token]} of a stream of StreamingLLM, SnapKV, ..."""
    _, _, (first, common, kept, keys, values) = read(stream)
    heads, tokens, d, dv, key_kind, value_kind = shape(first)
    assert first.data[first.at :] == b"\0\0"
    flags = kept.take(1)[0]
    form = flags >> 1
    assert form < 3 and bool(flags & 1) == bool(common.data)
    if flags & 1:
        positions = [positions_of(common, common.varint())] * heads
    else:
        positions = [positions_of(kept, kept.varint()) for _ in range(heads)]
    counts = [len(own) for own in positions]
    assert max(counts) <= tokens and heads * max(counts) <= 64 * sum(counts)
    out = {"positions": positions, "log_weights": log_weights_of(kept, form, counts)}
    for name, part, dim, kind in (("keys", keys, d, key_kind), ("values", values, dv, value_kind)):
        size = TYPES[kind][1]
        out[name] = [[[number(part.take(size), kind) for _ in range(dim)] for _ in range(n)] for n in counts]
    assert all(part.at == len(part.data) for part in (common, kept, keys, values))
    return out
