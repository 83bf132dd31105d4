"""Claims on token replay (arXiv 2604.15356, the entropy bound's own decoder): how long its payload is, and what checkpoints trade."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import reference
from kvtheory.distortion import attention_error
from kvtheory.prediction import TokenKV, ToyPlayer
from proofs_checks.claim import Function, Mutant, Verdict, claim
from proofs_checks.context import Context
from proofs_checks.evidence import Evidence, Picture, exact, numerical
from proofs_checks.sequential import measured
from proofs_checks.sequential.residual import Counting
from proofs_checks.sequential.toy_texts import player_of, text

PAPER = "2604.15356"
Result = Iterator[Evidence | Picture]
CHECKS = 2 / 64
BECAUSE = "coder: 2^-24 at least for a token, words of 32 bits; a check symbol of 2 bits every 64 tokens"


class Twisted:
    """A player that says another law than its own."""

    def __init__(self, player: Any, twist: Any) -> None:
        self._player, self._twist = player, twist

    def __getattr__(self, name: str) -> Any:
        return getattr(self._player, name)

    def start(self) -> Any:
        return _TwistedPlay(self._player.start(), self._twist)


class _TwistedPlay:
    def __init__(self, play: Any, twist: Any) -> None:
        self._play, self._twist, self._before = play, twist, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._play, name)

    def feed(self, token: int) -> list[TokenKV]:
        self._before = self._play.logits
        return list(self._play.feed(token))

    @property
    def logits(self) -> Any:
        own = self._play.logits
        return None if own is None else self._twist(own, self._before)


def _twisted(name: str, twist: Any) -> Mutant:
    def wrong(true: Any) -> Any:
        class Other:
            @staticmethod
            def of(player: Any, *args: Any, **more: Any) -> Any:
                return true.of(Twisted(player, twist), *args, **more)

        return Other

    return Mutant(name, "codec", wrong)


def payload(codec: Any, cache: Any) -> tuple[int, int]:
    """(bits of the tokens' part, bits of all the rest) of a stream."""
    data = codec.encode(cache)
    own = {part.name: 8 * part.bytes for part in reference.inspect(data).parts}["tokens"]
    return own, 8 * len(data) - own


@claim(
    id="sequential/payload-is-surprisal", paper=PAPER, section="the entropy bound, as a code",
    statement="The tokens, arithmetic-coded under the model's law, take what the model is surprised by, within 0.1 % and 64 bits, and 2 bits in 64 tokens for the checks.",
    formula="Σ_t −log2 P(t_t | t_<t) ≤ payload ≤ 1.001 Σ_t −log2 P(t_t | t_<t) + n/32 + 64",
    expected=Verdict.HOLDS,
    functions={"codec": "reference.TokenReplay", "law": "kvtheory.prediction.law_weights"},
    mutants=[
        _twisted("all tokens alike", lambda own, before: np.zeros_like(own)),
        _twisted("logits halved", lambda own, before: own / 2),
        _twisted("the law of the position before", lambda own, before: own if before is None else before),
        Mutant("nats", "law", lambda true: lambda logits: true(np.asarray(logits) * math.log(2))),
        Mutant("weights of 8 bits", "law", lambda true: lambda logits: np.asarray(true(logits)) >> 32),
    ],
)  # fmt: skip
def payload_is_surprisal(context: Context, *, codec: Any, law: Function) -> Result:
    for sharpness in (0.55, 1.0):
        player = ToyPlayer(vocabulary=64, layers=2, kv_heads=1, head_dim=16, sharpness=sharpness, seed=context.seed)
        length = context.size(128, 1000)
        rng = context.rng(f"text {sharpness}")
        cache = context.memo(sharpness, lambda p=player, n=length, r=rng: text(p, n, r))  # type: ignore[misc]
        assert cache.tokens is not None and cache.surprisal_bits is not None
        own, rest = payload(codec.of(player), cache)
        bits = float(np.sum(cache.surprisal_bits))
        where = f"toy transformer of 2 layers, 64 tokens, its own text of {length}, {bits / length:.2f} bits a token"
        yield numerical(
            what="payload ≤ 1.001 of the surprisal, checks, and 64 bits", ran_on=where, observed=own, predicted=1.001 * bits + CHECKS * length + 64, relation="<=",
            tolerance=0.0, because=BECAUSE, note=f"{own} bits, surprisal {bits:.0f}; head and header {rest} bits",
        )  # fmt: skip
        yield numerical(
            what="payload ≥ the surprisal, less a word", ran_on=where, observed=own, predicted=bits - 32, relation=">=", tolerance=0.0,
            because="a prefix code of the same law; the last word holds less than it could",
        )  # fmt: skip
        yield exact(
            what="bits of everything else in the stream ≤ 512",
            ran_on=where,
            observed=rest,
            predicted=512,
            relation="<=",
        )
        play, summed = player.start(), math.log2(player.vocabulary)
        for token, after in zip(cache.tokens.tolist(), cache.tokens.tolist()[1:]):
            play.feed(token)
            weights = np.asarray(law(play.logits), float)
            summed += math.log2(weights.sum()) - (math.log2(weights[after]) if weights[after] else -64.0)
        yield numerical(
            what="surprisal under the integer law that the coder sees = the model's own", ran_on=where, observed=summed, predicted=bits, tolerance=1e-6,
            because="weights of 40 bits; tokens of 64 alternatives",
        )  # fmt: skip
    for table in context.memo("tables", lambda: measured.load("replay")):
        row = next(r for r in table["replay"] if r["checkpoint_every"] is None)
        n, bits = table["tokens"], table["surprisal_bits"]
        yield numerical(
            what="payload ≤ 1.001 of the surprisal, checks, and 64 bits", ran_on=f"{table['title']}, {n} tokens of {table['text']}, saved table", observed=row["payload_bits"],
            predicted=1.001 * bits + CHECKS * n + 64, relation="<=", tolerance=0.0, because=BECAUSE,
            note=f"{row['payload_bits']} bits, surprisal {bits:.1f}; the rest of the stream {row['stream_bits'] - row['payload_bits']} bits",
        )  # fmt: skip

    for table in context.memo("thousand", lambda: measured.load("thousand")):
        n, bits, own = table["tokens"], table["surprisal_bits"], table["payload_bits"]
        where = f"{table['title']}, {n} tokens of {table['text']}, saved table"
        three = next(t for t in table["turboquant"] if t["bits"] == 3)
        yield numerical(
            what="payload ≤ 1.001 of the surprisal and 64 bits, checks within them", ran_on=where, observed=own, predicted=1.001 * bits + 64, relation="<=", tolerance=0.0, because=BECAUSE,
            tightness=own / (1.001 * bits + 64), note=f"{own} bits, surprisal {bits:.1f}; {own - bits:.1f} bits more, of these {n // 64 * 2} for checks",
        )  # fmt: skip
        yield numerical(
            what="payload ≥ the surprisal, less a word", ran_on=where, observed=own, predicted=bits - 32, relation=">=", tolerance=0.0,
            because="a prefix code of the same law; the last word holds less than it could",
        )  # fmt: skip
        yield exact(
            what="bits of everything else in the stream ≤ 512",
            ran_on=where,
            observed=table["header_bits"],
            predicted=512,
            relation="<=",
        )
        whole = own + table["header_bits"]
        yield numerical(
            what="bits of 3-bit TurboQuant over those of replay, header and all: above 1", ran_on=where, observed=three["stream_bits"] / whole, predicted=1.0, relation=">",
            tolerance=0.0, because="lengths of streams",
            note=f"{three['stream_bits']:,} over {whole:,}; decoding takes {table['operations'] / 1e9:,.0f} billion operations and {table['decode_seconds']:g} s, encoding "
            f"{table['encode_seconds']:g} s, TurboQuant {three['decode_seconds']:g} s: {table['decode_seconds'] / three['decode_seconds']:,.0f} times as long",
        )  # fmt: skip


def _every(change: Any) -> Any:
    def wrong(true: Any) -> Any:
        class Other:
            @staticmethod
            def of(player: Any, every: int | None = None, inner: Any = None) -> Any:
                return true.of(player, *change(every, inner))

        return Other

    return wrong


@claim(
    id="sequential/checkpoints", paper=PAPER, section="replay against storage: the frontier between them",
    statement="With every B-th position stored, quantised, a decoder runs the model n − ⌊n/B⌋ times, and the stream holds ⌊n/B⌋ positions: fewer passes are bought with bits, one "
    "position each, from the tokens alone to a cache stored whole.",
    formula="passes = n − ⌊n/B⌋,   bits = payload + c ⌊n/B⌋ + tables",
    expected=Verdict.HOLDS,
    functions={"codec": "reference.TokenReplay"},
    mutants=[
        Mutant("half as many checkpoints", "codec", _every(lambda every, inner: (None if every is None else 2 * every, inner))),
        Mutant("checkpoints at one bit less", "codec", _every(lambda every, inner: (every, None if inner is None else reference.TurboQuant(inner.bits - 1)))),
        Mutant("no checkpoints", "codec", _every(lambda every, inner: (None, None))),
    ],
    figure="replay-frontier",
)  # fmt: skip
def checkpoints(context: Context, *, codec: Any) -> Result:
    player, length = player_of(2), context.size(36, 240)
    cache = text(player, length, context.rng("text"))
    counter = Counting(player)
    rows = []
    inner = reference.TurboQuant(4)
    for every in (None, 12, 4, 2, 1):
        its = codec.of(counter, every, None if every is None else inner)
        data = its.encode(cache)
        counter.passes = 0
        decoded = its.decode(data)
        stored = 0 if every is None else length // every
        where = f"toy transformer of 2 layers, {length} tokens, a checkpoint every {every}, 4-bit TurboQuant"
        yield exact(
            what="passes of the decoder, counted", ran_on=where, observed=counter.passes, predicted=length - stored
        )
        parts = {part.name: part.bytes for part in reference.inspect(data).parts}
        # a layer's checkpoints as a stream of the inner codec of its own, of as many positions: its length is written in front
        expected = 0
        if stored:
            from reference import stream

            for layer in cache:
                few = layer.replace(
                    keys=layer.keys[:, :stored],
                    values=layer.values[:, :stored],
                    positions=layer.positions[:stored],
                    queries=None,
                    query_positions=None,
                )
                body = stream.join(inner.encode_parts(few))
                expected += len(stream.varint(len(body))) + len(body)
        elif every is not None:
            expected = 2
        yield exact(
            what="bytes of the checkpoints = what the inner codec takes for so many positions",
            ran_on=where,
            observed=parts["checkpoints"],
            predicted=expected,
        )
        errors = [attention_error(layer, d) for layer, d in zip(cache, decoded)]
        rows.append(
            {
                "checkpoint_every": every, "stream_bits": 8 * len(data), "operations": its.decode_flops(data), "passes": length - stored,
                "error": float(np.exp(np.mean(np.log(np.maximum(errors, 1e-300))))),
            }
        )  # fmt: skip
    yield exact(
        what="pairs of neighbours, from none to every position stored, where bits do not grow or operations do not fall", ran_on=f"toy transformer of 2 layers, {length} tokens", predicted=0,
        observed=sum(not (b["stream_bits"] > a["stream_bits"] and b["operations"] < a["operations"]) for a, b in itertools.pairwise(rows)),
    )  # fmt: skip
    tables = context.memo("tables", lambda: measured.load("replay"))
    for table in tables:
        yield from _of_model(table)
    yield Picture(
        figure="replay-frontier",
        data={
            "models": [
                {
                    "model": t["title"],
                    "tokens": t["tokens"],
                    "numbers": t["numbers"],
                    "replay": t["replay"],
                    "turboquant": t["turboquant"],
                }
                for t in tables
            ]
        },
    )


def _of_model(table: dict[str, Any]) -> Result:
    rows: Sequence[dict[str, Any]] = table["replay"]
    where = f"{table['title']}, {table['tokens']} tokens of {table['text']}, saved table"
    yield exact(
        what="pairs of neighbours, from none to every position stored, where bits do not grow or operations do not fall", ran_on=where, predicted=0,
        observed=sum(not (b["stream_bits"] > a["stream_bits"] and b["operations"] < a["operations"]) for a, b in itertools.pairwise(rows)),
    )  # fmt: skip
    alone, last, three = rows[0], rows[-1], next(t for t in table["turboquant"] if t["bits"] == 3)
    yield numerical(
        what="bits of 3-bit TurboQuant over those of replay, header and all: above 1", ran_on=where, observed=three["stream_bits"] / alone["stream_bits"], predicted=1.0,
        relation=">", tolerance=0.0, because="lengths of streams", note=f"operations of decoding {alone['operations'] / three['operations']:,.0f} times as many, seconds "
        f"{alone['seconds'] / three['seconds']:,.0f} times; {last['stream_bits'] / table['numbers']:.2f} bits a number with every position stored",
    )  # fmt: skip


# -- what a replay costs -------------------------------------------------------------------------------------------------


def replay_operations(weights: Any, tokens: int, layers: int, width: int) -> Any:
    """Additions and multiplications of computing `tokens` positions anew, one after another: 2 P n for the weights, 4 L d for each pair of a query
    and a key, of which there are n (n + 1) / 2. width: of all query heads together. Source: theory A6."""
    return 2 * weights * tokens + 2 * layers * width * tokens * (tokens + 1)


@claim(
    id="sequential/replay-cost", paper=PAPER, section="the bound's decoder; linear cost",
    statement="Computing a cache anew from its tokens takes 2 P n operations for the weights and 2 L d n (n + 1) for attention, P weights read for a token, d the width of all query heads: "
    "of a text of 128,000 tokens by a 70B model 3.9e16, thousands of times the seconds that reading the stored cache takes.",
    formula="2 P n + 2 L d n (n + 1)",
    expected=Verdict.HOLDS,
    functions={"operations": "proofs_checks.sequential.replaying.replay_operations"},
    mutants=[
        Mutant("attention left out", "operations", lambda true: lambda weights, tokens, layers, width: true(weights, tokens, 0, width)),
        Mutant("every query reads every key", "operations", lambda true: lambda weights, tokens, layers, width: 2 * true(0, tokens, layers, width) + true(weights, tokens, 0, width)),
        Mutant("a multiplication alone for each weight", "operations", lambda true: lambda weights, tokens, layers, width: true(weights, tokens, layers, width) - weights * tokens),
        Mutant("attention linear in the tokens", "operations", lambda true: lambda weights, tokens, layers, width: true(weights, tokens, 0, width) + 4 * layers * width * tokens),
    ],
)  # fmt: skip
def replay_cost(context: Context, *, operations: Function) -> Result:
    for table in context.memo("thousand", lambda: measured.load("thousand")):
        weights, size = table["weights_read_a_pass"], table["layers_times_width"]
        yield exact(
            what="operations of the decoder, counted pass by pass, and by the formula", ran_on=f"{table['title']}, {table['tokens']} tokens, saved table",
            observed=table["operations"], predicted=operations(weights, table["tokens"], 1, size), note=f"{weights:,} weights read a pass, L d = {size:,}",
        )  # fmt: skip
    player = ToyPlayer(vocabulary=24, layers=2, kv_heads=1, head_dim=8, seed=context.seed)
    for n in (1, 5, 17):
        cache = text(player, n, context.rng("text"))
        codec = reference.TokenReplay.of(player)
        yield exact(
            what="operations that TokenReplay says decoding takes, and by the formula", ran_on=f"toy transformer of 2 layers, {n} tokens", observed=int(codec.decode_flops(codec.encode(cache))),
            predicted=operations(player.flops // 2, n, 1, player.attention_flops(1) // 4),
        )  # fmt: skip
    # the paper's "70B": 80 layers, 64 heads of 128; 8 KV heads in 16 bits are 41.9 GB, read at 3.35 TB/s
    n = 128_000
    found = operations(70e9, n, 80, 8192)
    yield numerical(
        what="operations of a replay of 128,000 tokens by the paper's 70B: 1.79e16 + 2.15e16 = 3.9e16", ran_on="P = 70e9, L = 80, d = 8192", observed=found, predicted=3.94e16, tolerance=5e-3,
        because="printed to three digits",
    )  # fmt: skip
    read = 2 * 80 * 8 * 128 * 2 * n / 3.35e12
    yield numerical(
        what="seconds of that at 1e15 operations a second, over those of reading the cache of 8 KV heads in 16 bits at 3.35e12 bytes a second: above 1000", ran_on="P = 70e9, L = 80, d = 8192",
        observed=found / 1e15 / read, predicted=1000.0, relation=">", tolerance=0.0, because="both at the hardware's peak", note=f"{found / 1e15:.1f} s against {1e3 * read:.1f} ms",
    )  # fmt: skip
