"""Codecs with one fault each, and sound ones: what the conformance runner must find, and must not.

Each is built from (dim, bits, seed) as foreign codecs are. They share a sound core: per-vector norm, random rotation, Lloyd-Max codes (`Sound`).
"""

import os
import signal
import struct
import time
import zlib

import numpy as np

from kvtheory.quantization import SphereCoordinate
from kvtheory.randomness import generator
from kvtheory.rate import lloyd_max

CALLS = []


def points_of(dim, bits):
    if dim == 1:
        return np.linspace(-1, 1, 2**bits)
    return np.asarray(lloyd_max(SphereCoordinate(dim), 2**bits).points)


def rotation(dim, seed, purpose="zoo rotation"):
    q, r = np.linalg.qr(generator(seed, purpose).standard_normal((dim, dim)))
    return q * np.sign(np.diag(r))


class Sound:
    """Arrays in, a dict of arrays out; codes are packed by np.packbits, norms are float32."""

    claims = ("turboquant-mse",)

    def __init__(self, dim, bits=3, seed=0):
        self.dim, self.bits, self.seed = dim, bits, seed
        self.points, self.turn = points_of(dim, bits), self.rotation(dim, seed)

    def rotation(self, dim, seed):
        return rotation(dim, seed)

    def check(self, x):
        if not np.isfinite(x.astype(np.float64)).all():
            raise ValueError("x: expected finite numbers, got NaN or inf")

    def norms(self, x):
        # by the largest number first: squares neither overflow nor underflow
        most = np.abs(x).max(axis=-1, keepdims=True, initial=0)
        most[most == 0] = 1
        return most * np.sqrt(np.square(x / most).sum(axis=-1, keepdims=True))

    def encode(self, x):
        self.check(x)
        wide = np.ascontiguousarray(x).astype(np.float64)
        norms = self.norms(wide)
        codes = (
            np.abs(((wide / np.where(norms, norms, 1)) @ self.turn)[..., None] - self.points)
            .argmin(axis=-1)
            .astype(np.uint8)
        )
        bits = np.unpackbits(codes.reshape(-1, 1), axis=1, bitorder="little")[:, : self.bits]
        kept = norms.astype(np.float64 if x.dtype == np.float64 else np.float32)
        return {"codes": np.packbits(bits), "norms": kept, "dtype": x.dtype.name}

    def codes(self, held):
        count = held["norms"].size * self.dim
        bits = np.unpackbits(held["codes"])[: count * self.bits].reshape(count, self.bits)
        return (bits << np.arange(self.bits)).sum(axis=1).reshape(*held["norms"].shape[:-1], self.dim)

    def decode(self, held):
        import ml_dtypes  # noqa: F401 so that its name is known

        most = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.7e308}[held["dtype"]]
        x = held["norms"].astype(np.float64) * (self.points[self.codes(held)] @ self.turn.T)
        return np.clip(x, -most, most).astype(held["dtype"])


class SoundBytes(Sound):
    """The same as checked bytes."""

    claims = ("turboquant-mse",)

    def encode(self, x):
        held = super().encode(x)
        head = struct.pack("<3I10s", *x.shape, held["dtype"].encode())
        body = head + held["norms"].tobytes() + held["codes"].tobytes()
        return body + struct.pack("<I", zlib.crc32(body))

    def parsed(self, data):
        if len(data) < 26 or zlib.crc32(data[:-4]) != struct.unpack("<I", data[-4:])[0]:
            raise ValueError("stream: not one of this codec, or altered")
        *shape, name = struct.unpack_from("<3I10s", data)
        name = name.rstrip(b"\0").decode()
        rows, width = shape[0] * shape[1], 8 if name == "float64" else 4
        norms = np.frombuffer(data, f"<f{width}", rows, 22).reshape(*shape[:2], 1)
        return {"codes": np.frombuffer(data[22 + width * rows : -4], np.uint8), "norms": norms, "dtype": name}

    def decode(self, data):
        return super().decode(self.parsed(data))


class Pair:
    """Keys and values together."""

    claims = ("turboquant-mse",)

    def __init__(self, dim, value_dim, bits=3, seed=0):
        self.bits, self.sides = bits, (Sound(dim, bits, seed), Sound(value_dim, bits, seed + 1))

    def encode(self, keys, values):
        return tuple(side.encode(x) for side, x in zip(self.sides, (keys, values)))

    def decode(self, held):
        return tuple(side.decode(x) for side, x in zip(self.sides, held))


class Sketch(Sound):
    """TurboQuant without bias: b - 1 bits, and the signs of a Gaussian sketch of the residual."""

    claims = ("turboquant-prod",)
    gain = 1.0

    def __init__(self, dim, bits=3, seed=0):
        super().__init__(dim, bits - 1, seed)
        self.bits_, self.s = bits, generator(seed, "zoo sketch").standard_normal((dim, dim))

    def encode(self, x):
        held = super().encode(x)
        rest = x.astype(np.float64) - super().decode(held | {"dtype": "float64"})
        return held | {
            "signs": np.packbits(rest @ self.s.T > 0),
            "lengths": self.norms(rest).astype(held["norms"].dtype),
        }

    def decode(self, held):
        x = super().decode(held | {"dtype": "float64"})
        signs = 2.0 * np.unpackbits(held["signs"])[: x.size].reshape(x.shape) - 1
        x = x + self.gain * np.sqrt(np.pi / 2) / self.dim * held["lengths"] * (signs @ self.s)
        most = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38, "float64": 1.7e308}[held["dtype"]]
        import ml_dtypes  # noqa: F401

        return np.clip(x, -most, most).astype(held["dtype"])


def sketch(dim, bits=3, seed=0):
    made = Sketch(dim, bits, seed)
    made.claimed = bits
    return made


# -- one fault each ---------------------------------------------------------------------------------------------------------


class DeadScale(Sketch):
    gain = 0.0


class TinyScale(Sketch):
    gain = 0.1


class NoNaN(Sound):
    def check(self, x):
        pass


class NaNNamedNothing(Sound):
    def check(self, x):
        if np.isnan(x.astype(np.float64)).any():
            raise ValueError("bad input")
        super().check(x)


class InfAccepted(Sound):
    def check(self, x):
        if np.isnan(x.astype(np.float64)).any():
            raise ValueError("x: NaN")

    def norms(self, x):
        return np.minimum(super().norms(x), 1e300)


class NoEmpty(Sound):
    def encode(self, x):
        x.max()
        return super().encode(x)


class NoSingle(Sound):
    def encode(self, x):
        if x.shape[1] == 1:
            raise IndexError("index 1 is out of bounds")
        return super().encode(x)


class EvenOnly(Sound):
    def __init__(self, dim, bits=3, seed=0):
        assert dim % 2 == 0
        super().__init__(dim, bits, seed)


class OddTokens(Sound):
    def encode(self, x):
        return super().encode(x[:, : x.shape[1] // 2 * 2] if x.shape[1] > 1 else x)


class Float32Always(Sound):
    def decode(self, held):
        return super().decode(held).astype(np.float32)


class HalfNorms(Sound):
    def encode(self, x):
        held = super().encode(x)
        with np.errstate(over="ignore"):
            return held | {"norms": np.minimum(held["norms"].astype(np.float16), np.float16(65504))}


class Epsilon(Sound):
    def norms(self, x):
        return super().norms(x) + 1e-6


class NaNOfZero(Sound):
    def decode(self, held):
        with np.errstate(invalid="ignore"):
            return super().decode(held) * (held["norms"] / held["norms"]).astype(held["norms"].dtype)


class OffsetZero(Sound):
    def decode(self, held):
        return super().decode(held) + np.asarray(1e-30, held["norms"].dtype).astype(held["dtype"])


class Overflow(Sound):
    def encode(self, x):
        held = super().encode(x)
        with np.errstate(over="ignore"):
            return held | {"norms": held["norms"].astype(np.float16).astype(np.float32)}


class OneScale(Sound):
    """All vectors share the largest norm."""

    claims = ()

    def norms(self, x):
        own = super().norms(x)
        return np.full_like(own, own.max(initial=0))


class Subnormal(Sound):
    def norms(self, x):
        return np.maximum(super().norms(x), 1e-36)


class ReadsMemory(Sound):
    """Reads what lies in memory, whatever the strides."""

    def encode(self, x):
        base = x if x.base is None or x.flags.c_contiguous else x.base
        flat = np.ascontiguousarray(base).reshape(-1)[: x.size]
        return super().encode(flat.reshape(x.shape))


class WritesInput(Sound):
    def encode(self, x):
        held = super().encode(x)
        x /= 2
        return held


class HeadRotations(Sound):
    """Flips the sign that decode expects, of every head but the first."""

    claims = ()

    def decode(self, held):
        x = super().decode(held)
        x[1:] = np.roll(x[1:], 1, axis=-1)
        return x


class HeadsMix(Sound):
    claims = ()

    def encode(self, x):
        y = x.copy()
        y[1:] = y[1:] + (np.asarray(0.01) * x[:1]).astype(x.dtype)
        return super().encode(y)


class Unseeded(Sound):
    def encode(self, x):
        self.turn = rotation(self.dim, int.from_bytes(os.urandom(3), "little"))
        return super().encode(x)


class Counting(Sound):
    """Another rotation for each call."""

    def encode(self, x):
        CALLS.append(1)
        self.turn = rotation(self.dim, len(CALLS))
        return super().encode(x) | {"call": len(CALLS)}

    def decode(self, held):
        self.turn = rotation(self.dim, held["call"])
        return super().decode(held)


class Threads(Sound):
    def rotation(self, dim, seed):
        return rotation(dim, seed + int(os.environ["OMP_NUM_THREADS"]))


class KeepsState(Sound):
    """The norms stay with the encoder."""

    def encode(self, x):
        held = super().encode(x)
        self.kept = held["norms"]
        return held | {"norms": np.zeros_like(held["norms"])}

    def decode(self, held):
        return super().decode(held | {"norms": getattr(self, "kept", held["norms"])})


class Unpacked(Sound):
    def encode(self, x):
        held = super().encode(x)
        return held | {"codes": self.codes(held).astype(np.int64)}

    def decode(self, held):
        bits = np.unpackbits(held["codes"].astype(np.uint8).reshape(-1, 1), axis=1, bitorder="little")[:, : self.bits]
        return super().decode(held | {"codes": np.packbits(bits)})


class OwnAccounting(Sound):
    """Says that it holds the codes alone."""

    def claimed_bits(self, held):
        return float(self.bits)


class DeadArray(Sound):
    def encode(self, x):
        return super().encode(x) | {"signs": np.packbits(x > 0)}


class DeadBytes(SoundBytes):
    def encode(self, x):
        body = super().encode(x)
        return body + bytes(len(body))

    def decode(self, data):
        return super().decode(data[: len(data) // 2])


STORE = {}


class Hides(Sound):
    """What it was given waits outside of what it holds."""

    claims = ()

    def encode(self, x):
        self.check(x)
        STORE[len(STORE)] = x.copy()
        return {"at": len(STORE) - 1}

    def decode(self, held):
        return STORE[held["at"]]


class WorseThanZeros(Sound):
    claims = ()

    def decode(self, held):
        return -super().decode(held)


class FixedWidth(Sound):
    """Two bits, whatever is asked."""

    claims = ()

    def __init__(self, dim, bits=3, seed=0):
        super().__init__(dim, min(bits, 2), seed)


class WidePoints(Sound):
    def __init__(self, dim, bits=3, seed=0):
        super().__init__(dim, bits, seed)
        self.points = 1.15 * self.points


class Biased(Sound):
    claims = ("unbiased",)


class SharedStream(Sound):
    """Draws its rotation as everybody draws data."""

    def rotation(self, dim, seed):
        q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)).T)
        return q * np.sign(np.diag(r))


class Lossy(Sound):
    claims = ("lossless",)


class Unchecked(SoundBytes):
    def parsed(self, data):
        *shape, name = struct.unpack_from("<3I10s", data)
        rows = shape[0] * shape[1]
        return {"codes": np.frombuffer(data[22 + 4 * rows : -4], np.uint8), "norms": np.frombuffer(data, "<f4", rows, 22).reshape(*shape[:2], 1),
                "dtype": name.rstrip(b"\0").decode()}  # fmt: skip


class TakesTruncated(SoundBytes):
    def decode(self, data):
        try:
            return super().decode(data)
        except ValueError:
            return np.zeros((1, 1, self.dim), np.float32)


class Crashes(SoundBytes):
    def decode(self, data):
        try:
            return super().decode(data)
        except ValueError:
            os.kill(os.getpid(), signal.SIGSEGV)


class Hangs(SoundBytes):
    def decode(self, data):
        try:
            return super().decode(data)
        except ValueError:
            time.sleep(600)


class Greedy(SoundBytes):
    def decode(self, data):
        try:
            return super().decode(data)
        except ValueError:
            np.ones(1 << 40)


class NotFinite(Sound):
    """Half-precision input overflows on the way."""

    def decode(self, held):
        with np.errstate(over="ignore", invalid="ignore"):
            x = super().decode(held)
            return x * 60000 / 60000 if x.dtype == np.float16 else x


#: fault -> (codec, the property that must find it)
FAULTS = {
    "a dead sketch": ("DeadScale", "unbiased"),
    "a sketch scaled by a tenth": ("TinyScale", "law"),
    "NaN accepted": ("NoNaN", "nan"),
    "NaN refused without its name": ("NaNNamedNothing", "nan"),
    "inf accepted": ("InfAccepted", "inf"),
    "T = 0 raises": ("NoEmpty", "empty"),
    "T = 1 raises": ("NoSingle", "one-token"),
    "odd dimensions fail an assertion": ("EvenOnly", "dimensions"),
    "an odd last token is lost": ("OddTokens", "tokens"),
    "float32, whatever came": ("Float32Always", "dtype"),
    "norms of float16": ("HalfNorms", "scale"),
    "an epsilon on the norm": ("Epsilon", "scale"),
    "0/0 for zeros": ("NaNOfZero", "zeros"),
    "almost zeros for zeros": ("OffsetZero", "zeros"),
    "norms that overflow": ("Overflow", "outlier"),
    "one scale for all": ("OneScale", "outlier"),
    "a floor below the normal numbers": ("Subnormal", "subnormals"),
    "strides ignored": ("ReadsMemory", "views"),
    "its input overwritten": ("WritesInput", "input"),
    "heads at their places": ("HeadRotations", "heads"),
    "heads that mix": ("HeadsMix", "heads"),
    "no seed": ("Unseeded", "determinism"),
    "another rotation each call": ("Counting", "determinism"),
    "a rotation by the number of threads": ("Threads", "determinism"),
    "norms kept by the encoder": ("KeepsState", "fresh-decoder"),
    "codes of 64 bits": ("Unpacked", "held-bits"),
    "norms left out of its own accounting": ("OwnAccounting", "held-bits"),
    "an array that is never decoded": ("DeadArray", "no-dead-parts"),
    "half a stream that is never decoded": ("DeadBytes", "no-dead-parts"),
    "data outside of what is held": ("Hides", "rate-bound"),
    "worse than zeros": ("WorseThanZeros", "useful"),
    "one width for all": ("FixedWidth", "widths"),
    "points too wide": ("WidePoints", "law"),
    "lossless in name": ("Lossy", "law"),
    "unbiased in name": ("Biased", "unbiased"),
    "a rotation drawn like data": ("SharedStream", "seed-collision"),
    "bytes taken on trust": ("Unchecked", "hostile-bytes"),
    "cut streams decoded": ("TakesTruncated", "hostile-bytes"),
    "a crash": ("Crashes", "hostile-bytes"),
    "a hang": ("Hangs", "hostile-bytes"),
    "a terabyte": ("Greedy", "hostile-bytes"),
    "an overflow in half precision": ("NotFinite", "finite"),
}


class OneStep:
    """8 bits between the extremes of all numbers: other faults, but its vectors err together, which no seed does."""

    def encode(self, keys, values):
        return [(np.round(a / s).astype(np.int8), s) for a in (keys, values) for s in [np.abs(a).max() / 127 or 1.0]]

    def decode(self, code):
        return tuple((a * s).astype(np.float32) for a, s in code)
