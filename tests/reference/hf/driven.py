"""A CompressedCache driven without a model, on tensors of one's own, beside transformers' plain cache; and what must be true of it."""

import copy
import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import reference  # noqa: E402
from reference.hf import CompressedCache  # noqa: E402
from reference.hf.facts import LayerFacts  # noqa: E402
from tests.reference.cases import FITTED, OBLIVIOUS, REDUCERS  # noqa: E402
from tests.reference.strategies import text  # noqa: E402

HEADS, QUERY_HEADS, DIM, VALUE_DIM, LAYERS = 2, 4, 16, 12, 2
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@functools.cache
def calibration():
    return text("A", indices=tuple(range(LAYERS)))


def facts():
    return tuple(
        LayerFacts(i, QUERY_HEADS, HEADS, DIM, VALUE_DIM, DIM**-0.5, layer.rope, layer.output_proj, None)
        for i, layer in enumerate(calibration())
    )


#: one of each code path: lossless, streaming, not appendable, fitted, with log-weights, evicting, a share of the prompt, composed
NAMES = (
    "Full", "TurboQuant 3", "TurboQuant prod 2", "QJL 1", "PolarQuant 3 2 seed 7", "KIVI 2 groups of 2", "Pipeline Full KIVI",
    "KVQuant 2", "KVQuant sparse", "AATC 3", "PALU", "MetricKLT", "MetricKLT fixed", "Pipeline MetricKLT",
    "StreamingLLM 12", "StreamingLLM share", "SnapKV 12", "SnapKV share", "ScissorHands 12", "MergeReduce random", "MergeReduce refit",
    "MergeReduce share", "Pipeline SnapKV TurboQuant", "Pipeline MergeReduce TurboQuant", "Pipeline MergeReduce MetricKLT",
)  # fmt: skip


@functools.cache
def codec(name):
    if name == "Pipeline SnapKV TurboQuant":
        return reference.Pipeline([reference.SnapKV(0.5, sinks=1, window=2), reference.TurboQuant(4)])
    if name == "Pipeline MergeReduce MetricKLT":
        return reference.Pipeline([reference.MergeReduce(0.5, "random", sinks=1, window=2), codec("MetricKLT")])
    if name == "Pipeline MergeReduce TurboQuant":
        return reference.Pipeline([reference.MergeReduce(0.5, "refit", sinks=1, window=2), reference.TurboQuant(4)])
    if name in FITTED:
        return FITTED[name].fit(list(calibration()))
    return {**OBLIVIOUS, **REDUCERS}[name]


class Driven:
    """`cache` and transformers' DynamicCache `plain` on the same tensors."""

    def __init__(self, made_of, batch=1, dtype="float32", seed=0, **options):
        self.cache = CompressedCache(made_of, **options)
        self.plain = transformers.DynamicCache()
        self.batch, self.dtype = batch, DTYPES[dtype]
        self.random = torch.Generator().manual_seed(seed)
        self.valid = np.zeros((batch, 0), bool)
        self.model = torch.nn.Identity()

    def tensors(self, columns):
        """Keys, values, queries of a pass, in each layer; some channels are large, as real keys have them."""
        large = 1 + 7 * (torch.arange(DIM) % 5 == 0)
        return [
            tuple(
                (torch.randn(self.batch, heads, columns, dim, generator=self.random) * factor).to(self.dtype)
                for heads, dim, factor in ((HEADS, DIM, large), (HEADS, VALUE_DIM, 1), (QUERY_HEADS, DIM, 1))
            )
            for _ in range(LAYERS)
        ]

    def run(self, columns, padding=(), tensors=None):
        """A pass of so many columns, of which the first padding[r] are none of row r's tokens."""
        new = np.ones((self.batch, columns), bool)
        for r, n in enumerate(padding):
            new[r, :n] = False
        self.valid = np.concatenate([self.valid, new], axis=1)
        mask = torch.from_numpy(self.valid.astype(np.int64))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -columns:]
        self.cache.begin(self.model, facts(), self.batch, columns, None if self.valid.all() else mask, positions)
        for i, (k, v, q) in enumerate(self.tensors(columns) if tensors is None else tensors):
            self.plain.update(k, v, i)
            self.cache.update(k, v, i)
            self.cache.layers[i].attended(q)

    def select(self, rows):
        self.cache.reorder_cache(torch.tensor(rows))
        self.plain.reorder_cache(torch.tensor(rows))
        self.valid, self.batch = self.valid[list(rows)], len(rows)

    def crop(self, count):
        self.cache.crop(-count)
        if count:
            self.plain.crop(-count)
            self.valid = self.valid[:, :-count]

    def twin(self):
        other = copy.copy(self)
        other.cache, other.plain = copy.deepcopy(self.cache), copy.deepcopy(self.plain)
        return other

    # -- what must be true ---------------------------------------------------------------------------------------------

    def check(self):
        """Attention reads exactly: sinks and newest tokens as they came, and between them what a receiver decodes from the bytes."""
        for r in range(self.batch):
            own = np.flatnonzero(self.valid[r])
            streams, used = self.cache.streams(r), self.cache.in_use(r)
            for i, layer in enumerate(self.cache.layers):
                read = self.read(layer, r)
                for h in range(HEADS):
                    expected = self.expected(i, r, h, own, streams[i], used[i])
                    assert sorted(read[h]) == sorted(expected), (i, r, h)
                    for column, (key, value, weight) in expected.items():
                        assert torch.equal(read[h][column][0], key) and torch.equal(read[h][column][1], value)
                        assert read[h][column][2] == torch.tensor(weight).to(self.dtype)
        assert self.cache.get_seq_length() == self.valid.shape[1]

    def read(self, layer, r):
        """{column: (key, value, log-weight)} of each head, of the slots that are not padding."""
        size = layer.keys.shape[2]
        found = []
        for h in range(HEADS):
            if layer.columns is None:
                assert size == self.valid.shape[1]
                columns = np.where(self.valid[r], np.arange(size), -1)
            else:
                columns = layer.columns[r, h % layer.columns.shape[1]].numpy()
            weights = torch.zeros(size, dtype=self.dtype) if layer.log_weights is None else layer.log_weights[r, h]
            there = np.flatnonzero(columns >= 0)
            assert len(set(columns[there])) == len(there)
            found.append({int(columns[s]): (layer.keys[r, h, s], layer.values[r, h, s], weights[s]) for s in there})
        return found

    def expected(self, i, r, h, own, streams, used):
        out = {}
        exact = set(range(len(own)))
        for stream, (first, count) in zip(streams, used, strict=True):
            decoded = reference.decode(stream, self.cache.codec.state)
            exact -= set(range(first, first + count))
            for s in range(int(decoded.kept[h])):
                token = int(decoded.positions[h, s])  # positions are numbers of tokens here
                if token < first + count:
                    pair = (
                        torch.from_numpy(np.array(x[h, s], np.float64)).to(self.dtype)
                        for x in (decoded.keys, decoded.values)
                    )
                    out[int(own[token])] = (*pair, float(decoded.log_weights[h, s]))
        for token in exact:
            column = int(own[token])
            plain = self.plain.layers[i]
            out[column] = (plain.keys[r, h, column], plain.values[r, h, column], 0.0)
        return out

    def check_held(self):
        """The bits of a receiver, counted by hand."""
        held = self.cache.held()
        size = 8 * torch.finfo(self.dtype).bits // 8
        per_token = HEADS * (DIM + VALUE_DIM)
        streams = [
            (s, u)
            for r in range(self.batch)
            for i in range(LAYERS)
            for s, u in zip(self.cache.streams(r)[i], self.cache.in_use(r)[i])
        ]
        assert held.streams == sum(8 * len(s) for s, _ in streams)
        tokens = LAYERS * int(self.valid.sum())
        assert held.exact == (tokens - sum(count for _, (_, count) in streams)) * per_token * size
        assert held.side == 128 * (self.batch + len(streams))
        assert held.numbers == tokens * per_token
        assert self.cache.held_bits() == held.bits == held.streams + held.exact + held.side
        assert held.per_number == pytest.approx(held.bits / held.numbers)
        assert held.state == 8 * self.cache.codec.state_bytes


__all__ = ["NAMES", "Driven", "codec", "facts"]
