"""rans.cu: the payloads of `reference.rans`, byte for byte; wrong ones are found out as there, and never lead a lane astray."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import rans as kernels
from reference import CorruptStream, rans
from reference.rans import LANES, TOTAL, Tables
from tests.kernels.strategies import kernel_settings, often, orders, sizes

VECTORS = Path(__file__).parents[1] / "vectors" / "rans.json"


@st.composite
def tables(draw):
    """1 to 4 tables of 1 to 300 symbols, some without a frequency, some certain."""
    alphabet, rng = draw(st.sampled_from((1, 2, 3, 17, 258, 300))), np.random.default_rng(draw(st.integers(0, 1 << 30)))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        counts = rng.integers(0, 1 << draw(st.integers(1, 20)), alphabet) * (
            rng.random(alphabet) < draw(st.sampled_from((0.1, 0.6, 1)))
        )
        counts[rng.integers(alphabet)] += 1
        rows.append(rans.frequencies(counts))
    return Tables(np.stack(rows))


@st.composite
def messages(draw, most=999):
    """Symbols, tables, contexts, and how they are coded: (symbols, tables, contexts, options)."""
    coder, own, count = draw(tables()), draw(st.booleans()), draw(st.one_of(st.just(0), sizes(most)))
    block, lanes = draw(st.sampled_from((1, 7, 31, 32, 33, 99, 257, 400, 1000, 65536))), draw(st.sampled_from(LANES))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    period = max(count, 1) if own else draw(st.sampled_from((1, 2, 5, 8, 31, 33, 70)))
    contexts = rng.integers(0, coder.count, period)
    flat, symbols = draw(st.booleans()), np.zeros(count, draw(st.sampled_from((np.uint16, np.int64, np.int32))))
    used = tables_of(contexts, count, block, own)
    for table in range(coder.count):
        f = coder.frequencies[table].astype(np.float64)
        f, mine = (f > 0).astype(np.float64) if flat else f, used == table
        symbols[mine] = rng.choice(f.size, int(mine.sum()), p=f / f.sum())
    return symbols, coder, contexts, {"block": block, "lanes": lanes, "own": own}


def tables_of(contexts, count, block, own):
    return contexts[:count] if own else np.resize(np.resize(contexts, block), count)


def outcome(decode):
    """What a decoder gives: symbols, or what it says is corrupt, and where."""
    try:
        return decode().tolist()
    except CorruptStream as error:
        return error.problem, error.offset


def put(backend, contexts, own):
    return backend.put(contexts.astype(np.uint16)) if own else contexts


@often
@given(messages(), orders())
def test_the_references_bytes_and_back(backend, message, order):
    symbols, coder, contexts, options = message
    wanted = rans.encode(symbols, coder, contexts, **options)
    given_contexts = put(backend, contexts, options["own"])
    with backend.running(order):
        assert kernels.encode(backend.put(symbols), coder, given_contexts, **options) == wanted
        found = kernels.decode(wanted, symbols.size, coder, given_contexts, own=options["own"], xp=backend.xp)
    assert found.dtype == np.uint16 and np.array_equal(backend.get(found), symbols)


@kernel_settings
@given(messages(most=300), orders(), st.data())
def test_altered_payloads_are_the_references_errors(backend, message, order, data):
    """Words, states, ends, sizes: whatever is altered, cut or put in, what comes out is what the reference says, with its offset."""
    symbols, coder, contexts, options = message
    payload = bytearray(rans.encode(symbols, coder, contexts, **options))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    way = data.draw(st.sampled_from(("words", "anything", "swapped", "random words")))
    coded = rans.parse(bytes(payload), symbols.size)
    words = coded.offsets[2]
    if way == "anything" and payload:
        for _ in range(data.draw(st.integers(1, 4))):
            payload[rng.integers(len(payload))] = rng.integers(256)
    elif way == "words" and len(payload) > words:
        payload[rng.integers(words, len(payload))] ^= 1 << rng.integers(8)
    elif way == "swapped" and coded.blocks > 1:
        # a block takes words of its neighbour: one runs out, or leaves some
        ends, at = coded.ends.copy(), int(rng.integers(coded.blocks - 1))
        ends[at] = rng.integers(coded.ends[at - 1] if at else 0, coded.ends[at + 1] + 1)
        payload[coded.offsets[0] : coded.offsets[1]] = ends.astype("<u4").tobytes()
    elif way == "random words":
        payload[coded.offsets[1] : words] = rng.integers(1 << 16, 1 << 32, coded.states.size).astype("<u4").tobytes()
        payload[words:] = rng.integers(0, 256, len(payload) - words).astype(np.uint8).tobytes()
    own = options["own"]
    wanted = outcome(lambda: rans.decode(bytes(payload), symbols.size, coder, contexts, own=own))
    given_contexts = put(backend, contexts, own)
    with backend.running(order):
        found = outcome(
            lambda: backend.get(
                kernels.decode(bytes(payload), symbols.size, coder, given_contexts, own=own, xp=backend.xp)
            )
        )
    assert found == wanted


@kernel_settings
@given(messages(), orders(), st.data())
def test_blocks_are_decoded_alone(backend, message, order, data):
    symbols, coder, contexts, options = message
    coded = rans.parse(rans.encode(symbols, coder, contexts, **options), symbols.size)
    first = data.draw(st.integers(0, coded.blocks))
    last = data.draw(st.integers(first, coded.blocks))
    part = slice(first * options["block"], last * options["block"])
    if options["own"]:
        contexts = contexts[part] if symbols.size else contexts
    with backend.running(order):
        found = kernels.decode_blocks(
            coded, coder, put(backend, contexts, options["own"]), first, last, own=options["own"], xp=backend.xp
        )
    assert np.array_equal(backend.get(found), symbols[part])


@kernel_settings
@given(messages(most=300), orders(), st.data())
def test_what_cannot_be_coded_is_the_references_error(backend, message, order, data):
    symbols, coder, contexts, options = message
    if not symbols.size:
        return
    symbols = symbols.astype(np.int64)
    at = data.draw(st.integers(0, symbols.size - 1))
    symbols[at:] = data.draw(st.sampled_from((-1, coder.symbols, 1 << 20, *range(min(3, coder.symbols)))))
    given_contexts = put(backend, contexts, options["own"])
    try:
        wanted = rans.encode(symbols, coder, contexts, **options)
    except ValueError as error:
        with backend.running(order), pytest.raises(ValueError) as found:
            kernels.encode(backend.put(symbols), coder, given_contexts, **options)
        assert str(found.value) == str(error)
    else:
        with backend.running(order):
            assert kernels.encode(backend.put(symbols), coder, given_contexts, **options) == wanted


@pytest.mark.parametrize(
    "case", json.loads(VECTORS.read_text()), ids=lambda case: f"{case['lanes']} lanes, {len(case['symbols'])} symbols"
)
def test_golden_payloads(backend, case):
    coder = Tables(np.array(case["frequencies"]))
    payload = bytes.fromhex(case["payload"])
    with backend.running():
        found = kernels.decode(payload, len(case["symbols"]), coder, case["contexts"], xp=backend.xp)
        again = kernels.encode(found, coder, case["contexts"], block=case["block"], lanes=case["lanes"])
    assert backend.get(found).tolist() == case["symbols"] and again == payload


def test_certain_symbols_take_no_words(backend):
    coder = Tables(np.array([[0, TOTAL, 0]]))
    symbols = np.ones(1000, np.int64)
    with backend.running():
        payload = kernels.encode(backend.put(symbols), coder, block=500, lanes=8)
        assert rans.parse(payload, 1000).words.size == 0 and payload == rans.encode(symbols, coder, block=500, lanes=8)
        assert (backend.get(kernels.decode(payload, 1000, coder, xp=backend.xp)) == 1).all()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("count", (3 * 32, 999))
def test_states_on_the_bound(backend, lanes, count):
    """4096 symbols of frequency 1: a lane's first states are 2^16, 2^28, 2^24, 2^20 and what the symbols add, and 2^20 f is to be written."""
    coder = Tables(np.ones((1, TOTAL), np.int64))
    symbols = np.random.default_rng(count).integers(0, TOTAL, count)
    wanted = rans.encode(symbols, coder, block=1000, lanes=lanes)
    with backend.running(lanes):
        assert kernels.encode(backend.put(symbols), coder, block=1000, lanes=lanes) == wanted
        assert np.array_equal(backend.get(kernels.decode(wanted, count, coder, xp=backend.xp)), symbols)


@pytest.mark.parametrize("beyond", (0, 1, 65535 - 3))
def test_a_symbol_of_no_table_leads_no_lane_astray(backend, beyond):
    """Where a caller vouches for its symbols the kernel still looks: one that there is none of counts as without a frequency."""
    coder = Tables(np.array([[TOTAL, 0, 0], [1, 1, TOTAL - 2]]))
    symbols, contexts = np.full(40, 2, np.uint16), np.ones(40, np.uint16)
    symbols[33] = 3 + beyond
    with backend.running(1), pytest.raises(ValueError, match=f"symbol {3 + beyond} at 33 has frequency 0 in table 1"):
        kernels.encode_checked(backend.put(symbols), coder, backend.put(contexts), block=16, lanes=8, own=True)


@pytest.mark.parametrize("lanes", LANES)
def test_the_wrong_block_is_named(backend, lanes):
    """Each block in turn: a word altered, a state altered, a word that its neighbour is given; decoded with all others, and from a later one on."""
    coder = Tables(np.stack([rans.frequencies(row) for row in ([5, 1, 0, 9, 40], [1, 1, 1, 1, 1])]))
    symbols = np.random.default_rng(lanes).choice(np.array([0, 1, 3, 4]), 6 * 400 - 7)
    payload = rans.encode(symbols, coder, [0, 1], block=400, lanes=lanes)
    honest = rans.parse(payload, symbols.size)
    assert (np.diff(honest.ends, prepend=0) > 0).all()
    for bad in range(honest.blocks):
        start = int(honest.ends[bad - 1]) if bad else 0
        word, state = honest.offsets[2] + 2 * start, honest.offsets[1] + 4 * lanes * bad
        taken = honest.ends.copy()
        taken[bad] -= 1
        for at, new in (
            (word, bytes([payload[word] ^ 1])),
            (state, bytes([payload[state] ^ 16])),
            (honest.offsets[0], taken[: bad + 1].astype("<u4").tobytes()),
        ):
            if bad == honest.blocks - 1 and at == honest.offsets[0]:
                continue  # the last end is that of all words
            altered = payload[:at] + new + payload[at + len(new) :]
            coded = rans.parse(altered, symbols.size)
            for first in (0, bad // 2, bad):
                with backend.running(bad), pytest.raises(CorruptStream) as found:
                    kernels.decode_blocks(coded, coder, [0, 1], first, xp=backend.xp)
                with pytest.raises(CorruptStream) as wanted:
                    coded.decode(coder, [0, 1], first)
                assert (found.value.problem, found.value.offset) == (wanted.value.problem, wanted.value.offset)
                assert (
                    f"rANS block {bad}:" in found.value.problem and found.value.offset == honest.offsets[2] + 2 * start
                )


def test_a_hostile_claim_is_found_before_much_is_made_of_it(backend, monkeypatch):
    """Certain symbols cost no words: 2^16 in each block of 36 bytes. A wrong first block is found out before the others are made."""
    coder = Tables(np.array([[TOTAL, 0], [1, TOTAL - 1]]))
    blocks = 40
    payload = bytearray(rans.encode(np.zeros(blocks << 16, np.uint8), coder, block=1 << 16, lanes=8))
    coded = rans.parse(bytes(payload), blocks << 16)
    payload[coded.offsets[1] : coded.offsets[1] + 4] = (1 << 17).to_bytes(4, "little")
    made = []
    monkeypatch.setattr(
        kernels, "decode_blocks", lambda *a, inner=kernels.decode_blocks, **o: made.append(a[3:5]) or inner(*a, **o)
    )
    with backend.running(build="fast"), pytest.raises(CorruptStream, match="rANS block 0"):
        kernels.decode(bytes(payload), blocks << 16, coder, xp=backend.xp)
    assert made == [(0, 1)]


def test_arguments_are_refused(backend):
    coder = Tables(np.array([[TOTAL]]))
    symbols = backend.put(np.zeros(4, np.int64))
    for error, message, call in (
        (ValueError, "lanes: expected 8 or 32, got 16", lambda: kernels.encode(symbols, coder, lanes=16)),
        (ValueError, "block: expected 1 to 65536", lambda: kernels.encode(symbols, coder, block=0)),
        (TypeError, "symbols: expected integers", lambda: kernels.encode(backend.put(np.zeros(4)), coder)),
        (ValueError, "contexts: expected numbers of tables", lambda: kernels.encode(symbols, coder, np.array([1]))),
        (ValueError, "contexts: expected one for each of 4", lambda: kernels.encode(symbols, coder, backend.put(np.zeros(3, np.int64)), own=True)),
        (ValueError, "first, last", lambda: kernels.decode_blocks(rans.parse(rans.encode(np.zeros(4, np.int64), coder), 4), coder, first=2, xp=backend.xp)),
        (TypeError, "NumPy arrays only or CuPy", lambda: kernels.encode(Foreign(), coder)),
    ):  # fmt: skip
        with pytest.raises(error, match=message), backend.running():
            call()


class Foreign:
    """An array of another library."""

    dtype = np.dtype(np.int64)
