"""Transform coders' streams in plain Python numbers, written from docs/stream-format.md alone: no NumPy, nothing of `reference`.

Like independent.py and stranger_kvquant.py, whose readers it shares.
"""

import itertools
import math
import struct
import zlib

from tests.reference.independent import Bytes, bits_of, norm_of, to_float32
from tests.reference.stranger_kvquant import applied, floats, numbers, opened, positions
from tests.reference.strangers import TYPES, shape

LARGEST = {**{kind: TYPES[kind][2] for kind in range(3)}, 3: (2 - 2.0**-52) * 2.0**1023}
LOG_SCALES = sorted([2 * 2**i for i in range(8)] + [3 * 2**i for i in range(8)])


def ints(s, count, letter):
    return list(struct.unpack(f"<{count}{letter}", s.take(count * struct.calcsize(letter))))


# -- states ------------------------------------------------------------------------------------------------------------


def basis(s):
    """(places, mean, exponents, matrix by rows)."""
    rows, columns = s.varint(), s.varint()
    places = [s.varint() for _ in range(rows)]
    mean, exponents = floats(s, rows, "f"), ints(s, rows, "h")
    return places, mean, exponents, [ints(s, columns, "h") for _ in range(rows)]


def synthesise(b, y, g=None):
    """{place: x} of integers y."""
    out = {}
    for place, mean, e, row in zip(*b, strict=True):
        total = float(sum(m * n for m, n in zip(row, y, strict=True)))  # one rounding
        out[place] = (total if g is None else total * g) * 2.0**e + mean
    return out


def kind_of(s, before):
    """(index plus 1, heads, d, dv, rope)."""
    sizes = [s.varint() for _ in range(4)]
    turn = s.take(1)[0]
    rope = before if turn == 2 else None
    if turn == 1:
        layout, (scaling,) = s.take(1)[0], floats(s, 1, "d")
        rope = layout, scaling, floats(s, s.varint(), "d")
    return *sizes, rope


def fixed_state(s):
    kinds = s.take(1)[0]
    units = []
    for _ in range(s.varint()):
        b = basis(s)
        units.append((b, list(s.take(len(b[3][0]) if b[3] else 0))))
    books = {}
    if kinds >> 4 == 0:
        for _ in range(s.varint()):
            b = s.take(1)[0]
            books[b] = ints(s, 2**b, "i")
    return kinds & 15, kinds >> 4, units, books


def rans_tables(s):
    count, symbols = s.varint(), s.varint()
    flat = bits_of(s.take(-(-13 * count * symbols // 8)), 13, count * symbols)
    return [flat[i * symbols : (i + 1) * symbols] for i in range(count)]


def entropy_state(s):
    block, count, classes = s.varint(), s.varint(), s.varint()
    units = []
    for _ in range(count):
        b = basis(s)
        size = len(b[3][0])
        floats(s, size, "d")
        floats(s, classes - 1, "d")
        tables, shifts = ([list(s.take(size)) for _ in range(classes)] for _ in range(2))
        units.append((b, tables, shifts))
    return block, classes, units, rans_tables(s), rans_tables(s), [ints(s, 258, "b") for _ in range(29)]


# -- coders --------------------------------------------------------------------------------------------------------------


def fixed_decode(state, parts, tokens):
    """[{place: x}] of each token."""
    scale, levels, units, books = state
    side, codes = parts[:2]
    assert not any(part.data for part in parts[2:])
    coded = [[b for b in bits if b] for _, bits in units]
    each = [-(-len(own) // 64) if scale == 1 else int(scale > 1) for own in coded]
    count = tokens * sum(each)
    if scale == 1:
        scales = [LOG_SCALES[k] for k in bits_of(side.data, 4, count)]
    else:
        scales = [norm_of(code, 7) for code in ints(side, count, "H")]
    offsets = list(side.take(count)) if scale == 3 else [0] * tokens * len(units)
    widths = [b for own in coded for b in own]
    stream = int.from_bytes(codes.data, "little")
    length = max(sum(widths), int(sum(each) == 0))
    assert len(codes.data) == -(-tokens * length // 8) and stream < 1 << tokens * length
    out = []
    at = scale_at = offset_at = 0
    for _ in range(tokens):
        x = {}
        for (b, bits), own_scales in zip(units, each):
            y, rank = [], 0
            for width in bits:
                if width == 0:
                    y.append(0)
                    continue
                k = stream >> at & (1 << width) - 1
                at += width
                n = (
                    books[width][k] if levels == 0 else (2 * k + 1 - 2**width) * 2 ** (16 - width) if levels == 1
                    else (2 * k - 2**width) * 2 ** (16 - width) if levels == 2 else k - offsets[offset_at]
                )  # fmt: skip
                y.append(n * scales[scale_at + rank // 64] if scale == 1 else n)
                rank += 1
            x |= synthesise(b, y, scales[scale_at] if scale > 1 else None)
            scale_at += own_scales
            offset_at += 1
        at += length - sum(widths)
        out.append(x)
    return out


def rans(part, table_of):
    """Symbols; table_of(i) the table of symbol i, known once the symbols before are."""
    lanes, count, block = part.take(1)[0], part.varint(), part.varint()
    blocks = -(-count // block)
    ends = ints(part, blocks, "I")
    states = ints(part, blocks * lanes, "I")
    words = ints(part, ends[-1] if ends else 0, "H")
    out = []
    for n in range(blocks):
        x, at = states[n * lanes : (n + 1) * lanes], ends[n - 1] if n else 0
        for i in range(min(block, count - n * block)):
            if i % lanes == 0:
                low = []
            lane, table = i % lanes, table_of(len(out))
            u = x[lane] % 4096
            s = next(s for s, c in enumerate(itertools.accumulate(table)) if u < c)
            x[lane] = table[s] * (x[lane] // 4096) + u - sum(table[:s])
            out.append(s)
            low.append(lane)
            if lane == lanes - 1 or i == min(block, count - n * block) - 1:
                for lane in low:
                    if x[lane] < 1 << 16:
                        x[lane] = (x[lane] << 16) + words[at]
                        at += 1
        assert at == ends[n] and x == [1 << 16] * lanes
    assert part.at == len(part.data)
    return out


def entropy_decode(state, parts, tokens):
    block, classes, units, class_tables, tables, centroids = state
    certain = [4096] + [0] * 257
    columns = sum(len(own[0]) for _, own, _ in units)
    size = max(1, min(block, 2**16 // max(1, columns)))
    k = rans(parts[0], lambda i: class_tables[i % len(units)]) if classes > 1 else [0] * tokens * len(units)
    contexts = []
    for t in range(tokens):
        for u, (_, own, shifts) in enumerate(units):
            contexts += zip(own[k[t * len(units) + u]], shifts[k[t * len(units) + u]])
    symbols = rans(parts[1], lambda i: certain if contexts[i][0] == 255 else tables[contexts[i][0]])
    counts = ints(parts[2], -(-tokens // size), "I")
    escapes = ints(parts[2], sum(counts), "i")
    low, at, y, found = int.from_bytes(parts[3].data, "little"), 0, [], [0] * len(counts)
    for i, ((table, s), symbol) in enumerate(zip(contexts, symbols, strict=True)):
        if table == 255:
            y.append(0)
            continue
        bits = low >> at & (1 << s) - 1
        at += s
        if symbol == 257:
            y.append(256 * escapes[sum(found)])
            found[i // columns // size] += 1
            continue
        m = -(symbol + 1) // 2 if symbol % 2 else symbol // 2
        y.append(256 * (m * 2**s + bits) + (centroids[table][symbol] if s == 0 else 0))
    assert found == counts and len(parts[3].data) == -(-at // 8) and low < 1 << at
    out = []
    for t in range(tokens):
        x, first = {}, t * columns
        for b, own, _ in units:
            x |= synthesise(b, y[first : first + len(own[0])])
            first += len(own[0])
        out.append(x)
    return out, sum(counts), at


# -- streams -------------------------------------------------------------------------------------------------------------


def finished(x, kind):
    x = max(-LARGEST[kind], min(LARGEST[kind], x))
    return (x if kind == 3 else to_float32(x)) + 0.0


def layer(sizes, rope, kinds, where, exact, vectors, first):
    """(keys, values) by head and token from exact numbers, and stacked vectors of the tokens from `first` on."""
    heads, d, dv = sizes
    out = []
    for side, dim, kind in ((0, d, kinds[0]), (1, dv, kinds[1])):
        tokens = [
            [exact[side][(t * heads + h) * dim : (t * heads + h + 1) * dim] for h in range(heads)]
            for t in range(len(exact[side]) // (heads * dim))
        ]
        coded = []
        for i, x in enumerate(vectors):
            rows = []
            for h in range(heads):
                start = side * heads * d + h * dim
                row = [x[c] for c in range(start, start + dim)]
                if not side and rope:
                    row = applied(rope, row, where[first + i])
                rows.append([finished(v, kind) for v in row])
            coded.append(rows)
        every = tokens[:first] + coded + tokens[first:]
        out.append([[token[h] for token in every] for h in range(heads)])
    return tuple(out)


def parameters(codec, s):
    """(sinks, window, coding)."""
    maybe = lambda read: read() if s.take(1)[0] else None  # noqa: E731
    real, word = (lambda: floats(s, 1, "d")[0]), (lambda: s.take(1)[0])
    coding = 1
    if codec == "AATC":
        real(), maybe(real), word(), word(), maybe(word), word(), s.zigzag(), s.zigzag()
        sinks, window = s.zigzag(), s.zigzag()
    elif codec == "PALU":
        s.zigzag(), real(), maybe(word), word(), word(), s.zigzag()
        sinks, window = s.zigzag(), s.zigzag()
    elif codec == "KVTC":
        real(), maybe(real), s.zigzag()
        sinks, window = s.zigzag(), s.zigzag()
    else:
        assert codec == "MetricKLT"
        real()
        coding, sinks, window = word(), s.zigzag(), s.zigzag()
        s.zigzag(), s.zigzag(), [word() for _ in range(4)], real(), [word() for _ in range(3)]
    assert s.at == len(s.data)
    return sinks, window, coding


def shaped(data):
    """(index plus 1, (heads, tokens, d, dv, kinds), positions) of a part "shape"."""
    reader = Bytes(data)
    index = [reader.varint() for _ in range(5)][4]
    part = Bytes(data)
    found = shape(part)
    return index, found, positions(part, found[1])


def decode(stream, state):
    """A list of (keys, values, log-weights) by layer; keys and values [head][token][channel] before the last cast."""
    kind, codec, arguments, parts = opened(stream)
    sinks, window, coding = parameters(codec, arguments)
    _, again, _, (s,) = opened(state)
    assert again == codec
    if codec == "KVTC":
        assert kind == 2
        return decode_kvtc(sinks, window, s, parts)
    layers, before = {}, None
    for _ in range(s.varint()):
        own = kind_of(s, before)
        before = own[4]
        weights = floats(s, own[1], "f")
        layers[own[0]] = own, weights, fixed_state(s) if coding else entropy_state(s)
    assert s.at == len(s.data)
    index, (heads, tokens, d, dv, *kinds), where = shaped(parts[0].data)
    own, weights, coder = layers[index]
    assert own[1:4] == (heads, d, dv)
    first = min(sinks, tokens)
    last = max(first, tokens - window)
    apart = (tokens - last + first) * heads
    exact = [numbers(part, apart * dim, k) for part, dim, k in zip(parts[1:3], (d, dv), kinds)]
    if coding:
        vectors = fixed_decode(coder, parts[3:], last - first)
    else:
        vectors, _, _ = entropy_decode(coder, parts[3:], last - first)
    keys, values = layer((heads, d, dv), own[4], kinds, where, exact, vectors, first)
    return [(keys, values, [[w if first <= t < last else 0.0 for t in range(tokens)] for w in weights])]


def decode_kvtc(sinks, window, s, parts):
    known, before = [], None
    for _ in range(s.varint()):
        known.append(kind_of(s, before))
        before = known[-1][4]
    sides = []
    for _ in range(2):
        b = basis(s)
        sides.append((b, [(s.varint(), s.take(1)[0]) for _ in range(s.varint())]))
    assert s.at == len(s.data)
    shapes = []
    while parts[0].at < len(parts[0].data):
        shapes.append(shaped(parts[0].take(parts[0].varint())))
    tokens = shapes[0][1][1]
    first = min(sinks, tokens)
    last = max(first, tokens - window)
    n, vectors = last - first, []
    for (b, groups), packed_scales, packed_codes in zip(sides, parts[3::2], parts[4::2]):
        scales = ints(Bytes(zlib.decompress(packed_scales.data)), n * len(groups), "H")
        codes = Bytes(zlib.decompress(packed_codes.data))
        columns = []
        for g, (size, bits) in enumerate(groups):
            for _ in range(size):
                own = bits_of(codes.take(-(-n * bits // 8)), bits, n)
                alpha = [norm_of(scales[t * len(groups) + g], 7) for t in range(n)]
                exact = [a * (2 * k + 1 - 2**bits) / 2**bits for a, k in zip(alpha, own)]
                columns.append([max(-(2**31) + 1, min(2**31 - 1, round(y))) for y in exact])
        assert codes.at == len(codes.data)
        vectors.append([synthesise(b, y) for y in zip(*columns)])
    out = []
    for index, (heads, count, d, dv, *kinds), where in shapes:
        assert count == tokens
        (own,) = [one for one in known if one[0] == index]
        apart = (tokens - n) * heads
        exact = [numbers(part, apart * dim, k) for part, dim, k in zip(parts[1:3], (d, dv), kinds)]
        starts = [sum(one[1] * one[2 + side] for one in known[: known.index(own)]) for side in range(2)]
        stacked = [
            {
                **{c: keys[starts[0] + c] for c in range(heads * d)},
                **{heads * d + c: values[starts[1] + c] for c in range(heads * dv)},
            }
            for keys, values in zip(*vectors)
        ]
        keys, values = layer((heads, d, dv), own[4], kinds, where, exact, stacked, first)
        out.append((keys, values, [[0.0] * tokens] * heads))
    assert all(part.at == len(part.data) for part in parts[:3]) and math.isfinite(keys[0][0][0])
    return out
