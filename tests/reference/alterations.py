"""Local changes of byte strings, for tests of single codecs; the mutation engine for all of them is tests/fuzz."""

from reference import stream

__all__ = ["altered", "mutant"]


def altered(rng, data):
    """One to three local changes of a byte string."""
    data = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not data:
            break
        at = int(rng.integers(len(data) if rng.random() < 0.3 else min(len(data), 64)))
        kind = int(rng.integers(6))
        if kind == 0:
            data[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            data[at] = int(rng.integers(256))
        elif kind == 2:
            data[at] = int(rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
        elif kind == 3:
            del data[at : at + int(rng.integers(1, 9))]
        elif kind == 4:
            data[at:at] = rng.bytes(int(rng.integers(1, 9)))
        else:
            del data[at:]
    return bytes(data)


def mutant(rng, streams):
    data = streams[int(rng.integers(len(streams)))]
    kind = rng.random()
    if kind < 0.4:
        body = altered(rng, stream.unseal(data))
        return stream.seal(body) if rng.random() < 0.9 else stream.seal(body)[: int(rng.integers(8 + len(body)))]
    if kind < 0.5:
        return altered(rng, data)
    header, groups = stream.read(data)
    parts = [[bytes(part.rest()) for part in group] for group in groups]
    own = parts[int(rng.integers(len(parts)))]
    place = int(rng.integers(len(own)))
    if kind < 0.9:
        own[place] = altered(rng, own[place])
    else:
        others = stream.read(streams[int(rng.integers(len(streams)))])[1][0]
        own[place] = bytes(others[int(rng.integers(len(others)))].rest())
    return stream.write(header, parts)
