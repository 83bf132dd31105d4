"""TurboQuant's streams in plain Python integers, written from docs/stream-format.md alone: no NumPy, nothing of `reference`.

Slow and straight: the oracle that the array code is held against, and the stranger who has only the document. rotation "hadamard".
"""

import hashlib
import itertools
import math
import struct
import zlib
from fractions import Fraction

M64 = (1 << 64) - 1


class Bytes:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, n):
        assert self.at + n <= len(self.data)
        self.at += n
        return self.data[self.at - n : self.at]

    def varint(self):
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def zigzag(self):
        value = self.varint()
        return -((value + 1) // 2) if value % 2 else value // 2


def philox(key, count):
    """`count` words of Philox4x64-10 for a key of two words; the counter starts at 1."""
    words = []
    counter = 0
    while len(words) < count:
        counter += 1
        c = [counter & M64, counter >> 64, 0, 0]
        k = list(key)
        for _ in range(10):
            p0, p1 = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(p1 >> 64) ^ c[1] ^ k[0], p1 & M64, (p0 >> 64) ^ c[3] ^ k[1], p0 & M64]
            k = [(k[0] + 0x9E3779B97F4A7C15) & M64, (k[1] + 0xBB67AE8584CAA73B) & M64]
        words += c
    return words[:count]


def raw_words(seed, purpose, count):
    digest = hashlib.sha256(f"{seed}\0{purpose}".encode()).digest()
    return philox(struct.unpack("<QQ", digest[:16]), count)


def signs(seed, side, d):
    words = raw_words(seed, f"reference.TurboQuant {side} signs", -(-d // 64))
    return [-1 if words[i // 64] >> (i % 64) & 1 else 1 for i in range(d)]


def sylvester(i, j):
    return -1 if bin(i & j).count("1") % 2 else 1


def matrix(d):
    """M = K_m (x) H_B as a list of rows, and m."""
    b = d & -d
    m = d // b

    def k(i, j):
        return 1 if m == 1 else (m if i == j else 0) - 2

    return [[k(i // b, j // b) * sylvester(i % b, j % b) for j in range(d)] for i in range(d)], m


def row_sum(d):
    return sum(abs(v) for v in matrix(d)[0][0])


def input_bits(d):
    return min(14, ((1 << 24) // row_sum(d)).bit_length() - 1)


def fraction_bits(d):
    return min(11, ((1 << 24) // row_sum(d)).bit_length() - 4)


def bits_of(data, width, count):
    whole = int.from_bytes(data, "little")
    assert whole >> (width * count) == 0
    return [whole >> (i * width) & ((1 << width) - 1) for i in range(count)]


def norm_of(code, mu):
    return 0.0 if code == 0 else math.ldexp(1 + (code & ((1 << mu) - 1)) / 2**mu, (code >> mu) - 256)


def norm_code(squares, exponent, mu):
    """The stored form of 2^exponent sqrt(squares)."""
    if squares == 0:
        return 0
    f, k = math.frexp(math.sqrt(squares))
    return ((k + exponent - 1 + 256) << mu) + math.floor(f * 2 ** (mu + 1) + 0.5) - (1 << mu)


def to_float32(x):
    """A double rounded to float32, at most its largest number."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(struct.unpack("<f", b"\xff\xff\x7f\x7f")[0], x)


def read(stream):
    """Header and parts of a stream of one TurboQuant layer."""
    assert stream[:4] == b"\x93KVS" and zlib.crc32(stream[:-4]) == int.from_bytes(stream[-4:], "little")
    s = Bytes(stream[4:-4])
    assert s.take(2) == bytes([1, 0])
    assert s.take(s.take(1)[0]) == b"TurboQuant"
    p = Bytes(s.take(s.varint()))
    out = {
        "bits": p.zigzag(),
        "seed": p.zigzag(),
        "kind": ("mse", "prod")[p.take(1)[0]],
        "rotation": ("hadamard", "haar")[p.take(1)[0]],
    }
    assert s.take(1) == b"\0"
    sizes = [s.varint() for _ in range(s.varint())]
    out["parts"] = [s.take(n) for n in sizes]
    assert s.at == len(s.data)
    h = Bytes(out["parts"][0])
    out["heads"], out["tokens"], out["d"], out["dv"] = (h.varint() for _ in range(4))
    out["index"] = h.varint() - 1
    types = h.take(1)[0]
    out["types"] = (types & 15, types >> 4)
    width, first = h.take(1)[0], h.zigzag()
    steps = [int.from_bytes(h.take(width), "little") if width else 1 for _ in range(max(out["tokens"] - 1, 0))]
    out["positions"] = [first + sum(steps[:i]) for i in range(out["tokens"])]
    return out


def sketch(seed, side, d):
    edges = [math.floor(2**32 * 0.5 * math.erfc(-(k + 0.5) / 16 / math.sqrt(2)) + 0.5) for k in range(-128, 128)]
    entries = []
    for word in raw_words(seed, f"reference.TurboQuant {side} sketch", -(-d * d // 2)):
        entries += [sum(w >= e for e in edges) - 128 for w in (word & (1 << 32) - 1, word >> 32)]
    return [entries[i * d : (i + 1) * d] for i in range(d)]


def decode_prod(code_bits, codes, points, norms, d, sign, rows, m, s):
    """One vector of kind "prod"."""
    q = [-1 if c >> (code_bits - 1) else 1 for c in codes]
    t = [sum(s[i][j] * q[i] for i in range(d)) for j in range(d)]
    root = math.sqrt(m * d)
    sigma = math.sqrt(256 + 1 / 12)
    x = [0.0] * d
    if code_bits > 1:
        half = 2 ** (code_bits - 2)
        low = [c % (2 * half) for c in codes]
        p = [(-1 if c // half else 1) * points[c % half] for c in low]
        gain = norms[0] / (2.0 ** fraction_bits(d) * math.sqrt(d)) / root
        x = [sum(rows[i][j] * p[j] for j in range(d)) * gain for i in range(d)]
    gain = math.sqrt(math.pi / 2) / sigma / d * norms[-1] / root
    x = [x[i] + sum(rows[i][j] * t[j] for j in range(d)) * gain for i in range(d)]
    return [to_float32(sign[i] * x[i]) + 0.0 for i in range(d)]


def decode(stream):
    """{"keys": [head][token][channel], "values": ...} as Python floats, exactly the float32 numbers before the last cast."""
    s = read(stream)
    assert s["rotation"] == "hadamard"
    b, heads, tokens = s["bits"], s["heads"], s["tokens"]
    mu, norm_bytes = (7, 2) if b <= 6 else (23, 4)
    points = Bytes(s["parts"][1])
    out = {"positions": s["positions"], "index": s["index"]}
    for name, side, d, norm_part, code_part in (
        ("keys", "key", s["d"], s["parts"][2], s["parts"][3]),
        ("values", "value", s["dv"], s["parts"][4], s["parts"][5]),
    ):
        prod = s["kind"] == "prod"
        c = b - prod
        p = [int.from_bytes(points.take(2), "little") for _ in range(2 ** (c - 1) if c else 0)]
        sign, (rows, m) = signs(s["seed"], side, d), matrix(d)
        codes = bits_of(code_part, b, tokens * heads * d)
        layer = [[None] * tokens for _ in range(heads)]
        for t in range(tokens):
            for h in range(heads):
                n = t * heads + h
                own = codes[n * d : (n + 1) * d]
                each = 2 if prod and b > 1 else 1
                place = [norm_bytes * (n * each + i) for i in range(each)]
                norms = [norm_of(int.from_bytes(norm_part[at : at + norm_bytes], "little"), mu) for at in place]
                if prod:
                    s.setdefault(name, sketch(s["seed"], side, d))
                    layer[h][t] = decode_prod(b, own, p, norms, d, sign, rows, m, s[name])
                    continue
                (norm,) = norms
                y = [(-1 if c >> (b - 1) else 1) * p[c & (2 ** (b - 1) - 1)] for c in own]
                z = [sign[i] * sum(rows[j][i] * y[j] for j in range(d)) for i in range(d)]
                gain = norm / (float(2 ** fraction_bits(d)) * d * math.sqrt(m))
                f, k = math.frexp(gain)
                gain = math.ldexp(round(f * 2**24), k - 24)
                layer[h][t] = [to_float32(v * gain) + 0.0 for v in z]  # -0.0 + 0.0 is 0.0
        out[name] = layer
    return out


def encode_vector(x, bits, seed, side, points, kind="mse"):
    """(norm codes, codes) of one vector of float32 numbers; `points` are those of the bits that name a point."""
    d = len(x)
    a, f = input_bits(d), fraction_bits(d)
    mu = 7 if bits <= 6 else 23
    c = bits - (kind == "prod")
    e = math.frexp(max(abs(v) for v in x))[1]
    n = [round(Fraction(v) * Fraction(2) ** (a - e)) for v in x]  # Python rounds halves to even
    squares = sum(v * v for v in n)
    rows, m = matrix(d)
    sign = signs(seed, side, d)
    y = [sum(rows[j][i] * sign[i] * n[i] for i in range(d)) for j in range(d)]
    r = math.isqrt(16 * m * squares)
    thresholds = [(p + q) * r >> (f + 3) for p, q in itertools.pairwise(points)]
    cells = [sum(abs(v) > t for t in thresholds) for v in y]
    codes = [k + ((1 << (c - 1)) * (v < 0) if c else 0) for k, v in zip(cells, y)]
    norms = [norm_code(squares, e - a, mu)]
    if kind == "mse":
        return norms, codes
    if c:
        stored = math.floor(4 * math.sqrt(m) * math.ldexp(norm_of(norms[0], mu), a - e))
        y = [2 ** (f + 2) * v - stored * (-1 if v < 0 else 1) * points[k] for v, k in zip(y, cells)]
        e -= f + 2
    s = sketch(seed, side, d)
    largest = max(sum(abs(v) for v in row) for row in s)
    a2 = min(14, ((1 << 24) // max(largest, 1)).bit_length() - 1)
    e2 = math.frexp(max(abs(v) for v in y))[1]
    rho = [round(Fraction(v) * Fraction(2) ** (a2 - e2)) for v in y]
    negative = [sum(s[j][i] * rho[i] for i in range(d)) < 0 for j in range(d)]
    left = norm_code(sum(v * v for v in rho) / (m * d), e - a + e2 - a2, mu)
    return [*norms, left] if c else [left], [k | (minus << (bits - 1)) for k, minus in zip(codes, negative)]
