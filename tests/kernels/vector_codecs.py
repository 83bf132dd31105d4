"""What the tests of codecs by vectors (TurboQuant, QJL, PolarQuant) share: layers, and what every one of them must hold to."""

import contextlib
import itertools
import sys

import numpy as np
from hypothesis import strategies as st

import kvtheory
from reference import stream as container
from reference.shape import Shape
from tests.kernels.codecs import check_refused, check_same_outcome, decoded, encoded, of_decoded, outcome
from tests.kernels.strategies import ELEMENTS, KINDS, STRIDES, numbers, strided
from tests.reference.strategies import DTYPES

#: around every number of registers a lane may hold, multiples of a group and not, powers of two and odd
DIMS = (1, 2, 3, 5, 8, 31, 32, 33, 48, 63, 64, 65, 80, 96, 99, 127, 128, 129, 160, 192, 255, 256)
#: float64 is rounded to float32 before a kernel sees it
TYPES = (*ELEMENTS, np.dtype(np.float64))
LARGE = (257, 384, 576, 999, 1023, 1024)


@st.composite
def layers(draw, dims=DIMS, most_tokens=12, dtypes=TYPES, least_tokens=0):
    """Layers whose keys and values differ in kind, strides (token-major among them) and head_dim; a row that differs from the others."""
    dtype, heads = draw(st.sampled_from(dtypes)), draw(st.integers(1, 3))
    tokens = draw(st.integers(least_tokens, most_tokens))
    sides = []
    for _ in range(2):
        dim, kinds = draw(st.sampled_from(dims)), [draw(st.sampled_from(KINDS)) for _ in range(2)]
        seed, how = draw(st.integers(0, 2**32 - 1)), draw(st.sampled_from((*STRIDES, "token-major")))
        x = numbers(kinds[0], (heads, tokens, dim), dtype, seed)
        if tokens:
            x[draw(st.integers(0, heads - 1)), draw(st.integers(0, tokens - 1))] = numbers(
                kinds[1], (dim,), dtype, seed
            )
        if dtype == np.float64:  # what the codecs compute in must hold it
            x = np.clip(x, -3.4e38, 3.4e38)
        sides.append(
            np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2) if how == "token-major" else strided(x, how)
        )
    return kvtheory.Layer(*sides, index=draw(st.sampled_from((None, 3))))


def check(backend, gpu_codec, reference_codec, layer, order):
    """encode and decode as the reference, bit for bit: of layers in even orders, of arrays in odd ones and on a GPU."""
    stream = reference_codec.encode(layer)
    with backend.running(order):
        assert encoded(backend, gpu_codec, layer, order) == stream
        assert decoded(backend, gpu_codec, stream, order) == of_decoded(reference_codec.decode(stream))


def check_refusal(backend, gpu_codec, reference_codec, layer, places, order):
    """Numbers that are not finite in float32, at places (side, head, token, channel, number): the reference's message."""
    for side, head, token, channel, number in places:
        array = getattr(layer, side)
        with np.errstate(over="ignore"):
            array[head % array.shape[0], token % array.shape[1], channel % array.shape[2]] = number
    check_refused(backend, gpu_codec, reference_codec, layer, order)


def refusals():
    """Places for `check_refusal`, in layers of float64: NaN, inf, and a number that float32 cannot hold."""
    place = st.integers(0, 10**6)
    number = st.sampled_from((np.nan, np.inf, -np.inf, 1e300))
    return st.lists(st.tuples(st.sampled_from(("keys", "values")), place, place, place, number), min_size=1, max_size=4)


def check_hostile(backend, gpu_codec, reference_codec, layer, data, order):
    """A stream altered at a few bytes, at the end of a part, or cut, and sealed again: both refuse it, or both decode the same."""
    stream = reference_codec.encode(layer)
    if data.draw(st.booleans()):  # where bits are that no code has
        header, (parts,) = container.read(stream)
        parts = [bytearray(part.rest()) for part in parts]
        part = data.draw(st.sampled_from([part for part in parts if part]))
        part[-1] ^= 1 << data.draw(st.sampled_from((7, 7, 7, 4, 0)))
        stream = container.write(header, [parts])
    else:
        body = bytearray(container.unseal(stream))
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(body) - 1))
            if data.draw(st.integers(0, 9)) == 9:
                del body[at:]
                break
            body[at] = data.draw(st.integers(0, 255))
        stream = container.seal(bytes(body))
    # which of several faults is named first may differ: an inner one is found by a kernel
    wanted = outcome(lambda: of_decoded(reference_codec.decode(stream)))
    with backend.running(order):
        found = outcome(lambda: decoded(backend, gpu_codec, stream, order))
    assert found[0] == wanted[0] if isinstance(wanted, tuple) else found == wanted


def check_padding(backend, gpu_codec, reference_codec):
    """The highest bit of each part's last byte, which no code has in some of them: refused where the reference refuses it."""
    layer = example(heads=1, tokens=3, dim=5, value_dim=3)
    header, (parts,) = container.read(reference_codec.encode(layer))
    parts = [bytes(part.rest()) for part in parts]
    refused = 0
    for i, part in enumerate(parts):
        altered = part[:-1] + bytes([part[-1] ^ 128])
        stream = container.write(header, [[*parts[:i], altered, *parts[i + 1 :]]])
        check_same_outcome(backend, gpu_codec, reference_codec, stream, i)
        refused += isinstance(outcome(lambda stream=stream: reference_codec.decode(stream)), tuple)
    assert refused >= 2


def check_appender(backend, gpu_codec, reference_codec, layer, cuts, order):
    """Tokens appended in pieces give the stream of all at once; what holds a stream that grows takes arrays on a GPU as well."""
    cuts = sorted({c % (layer.tokens + 1) for c in cuts})
    ends = [*cuts, layer.tokens]
    wanted = reference_codec.encode(layer)
    with backend.running(order):
        if backend.with_layers(order):
            first = kvtheory.Layer(layer.keys[:, : ends[0]], layer.values[:, : ends[0]], index=layer.index)
            appender = gpu_codec.appender(first)
            for start, end in itertools.pairwise(ends):
                appender.append(layer.keys[:, start:end], layer.values[:, start:end])
            assert appender.stream() == wanted
            return
        growing = sys.modules[type(gpu_codec).__module__]._Appender(gpu_codec, Shape.of(layer))
        for start, end in itertools.pairwise([0, *ends]):
            growing.take(*(backend.put(array[:, start:end]) for array in (layer.keys, layer.values)))
        assert growing.stream() == wanted


@contextlib.contextmanager
def launches(monkeypatch, module):
    """Counts the kernels that a module launches."""
    names = []
    launch = module.launch

    def counted(kernel, *args, **kwargs):
        names.append(kernel.name.split("<")[0])
        return launch(kernel, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "launch", counted)
        yield names


def example(dtype="float32", heads=2, tokens=5, dim=96, value_dim=80, seed=7):
    """A small Gaussian layer."""
    rng = np.random.Generator(np.random.Philox(seed))
    sides = (rng.standard_normal((heads, tokens, d)).astype(DTYPES[dtype]) for d in (dim, value_dim))
    return kvtheory.Layer(*sides)
