"""rANS: what is coded comes back, in as many bits as the module says, and altered words are found out."""

import constriction
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import CorruptStream, rans
from reference.rans import LANES, TOTAL, Tables
from reference.stream import Reader


@st.composite
def tables(draw, most=4):
    symbols = draw(st.integers(1, 40))
    rows = []
    for _ in range(draw(st.integers(1, most))):
        counts = draw(st.lists(st.integers(0, 1 << draw(st.integers(0, 20))), min_size=symbols, max_size=symbols))
        counts[draw(st.integers(0, symbols - 1))] += 1
        rows.append(rans.frequencies(counts))
    return Tables(np.stack(rows))


@st.composite
def messages(draw, most=300):
    own = draw(tables())
    contexts = np.array(draw(st.lists(st.integers(0, own.count - 1), min_size=1, max_size=7)))
    block, count = draw(st.integers(1, 120)), draw(st.integers(0, most))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    used = np.resize(np.resize(contexts, block), count)
    # uniform over the symbols that can occur, or drawn from the table itself
    flat = draw(st.booleans())
    symbols = np.zeros(count, np.int64)
    for table in range(own.count):
        f = own.frequencies[table].astype(np.float64)
        f = (f > 0).astype(np.float64) if flat else f
        mine = used == table
        symbols[mine] = rng.choice(f.size, int(mine.sum()), p=f / f.sum())
    return symbols, own, contexts, block, draw(st.sampled_from(LANES))


@given(messages())
def test_what_is_coded_comes_back(message):
    symbols, own, contexts, block, lanes = message
    payload = rans.encode(symbols, own, contexts, block=block, lanes=lanes)
    assert np.array_equal(rans.decode(payload, symbols.size, own, contexts), symbols)
    assert rans.encode(symbols, own, contexts, block=block, lanes=lanes) == payload


@given(messages(), st.data())
def test_blocks_are_decoded_alone(message, data):
    symbols, own, contexts, block, lanes = message
    coded = rans.parse(rans.encode(symbols, own, contexts, block=block, lanes=lanes), symbols.size)
    first = data.draw(st.integers(0, coded.blocks))
    last = data.draw(st.integers(first, coded.blocks))
    assert np.array_equal(coded.decode(own, contexts, first, last), symbols[first * block : last * block])


@given(messages())
def test_code_length_keeps_its_bounds(message):
    """bits = sum log2(2^12/f) + sum e + sum_lanes (48 - log2 x): each e in (-.181, .0875], each lane's term in (16, 32]."""
    symbols, own, contexts, block, lanes = message
    payload = rans.encode(symbols, own, contexts, block=block, lanes=lanes)
    coded = rans.parse(payload, symbols.size)
    bits = 16 * coded.words.size + 32 * coded.states.size
    ideal = own.ideal_bits(symbols, np.resize(contexts, block))
    states = 48 - np.log2(coded.states.astype(np.float64))
    assert ((states > 16) & (states <= 32)).all()
    excess = bits - ideal - states.sum()
    assert -0.1805 * symbols.size - 1e-6 <= excess <= np.log2(17 / 16) * symbols.size + 1e-6
    head = len(payload) * 8 - bits - 32 * coded.blocks
    assert head == 8 * (1 + len(_varints(symbols.size, block)))


def _varints(*values):
    from reference.stream import varint

    return b"".join(varint(v) for v in values)


@pytest.mark.parametrize("lanes", LANES)
def test_code_length_is_the_entropy_and_constrictions(lanes):
    """On symbols of the table's own law e averages to nothing: the length is the ideal one and 24 bits a lane, within .003 a symbol."""
    rng = np.random.default_rng(3)
    p = np.exp(-np.abs(np.arange(-7, 8)) / 1.5)
    own = Tables(rans.frequencies((p / p.sum() * 1e6).astype(np.int64)))
    q = own.frequencies[0] / TOTAL
    entropy = -(q * np.log2(q)).sum()
    n, block = 1 << 18, 1 << 14
    symbols = rng.choice(q.size, n, p=q)
    ideal = own.ideal_bits(symbols)
    payload = rans.encode(symbols, own, block=block, lanes=lanes)
    coded = rans.parse(payload, n)
    states = float((48 - np.log2(coded.states.astype(np.float64))).sum())
    net = 16 * coded.words.size + 32 * coded.states.size - states
    assert abs(net - ideal) < 0.003 * n
    assert abs(ideal / n - entropy) < 0.01  # and the sample is typical of its law
    assert 22 < states / coded.states.size < 26
    ans = constriction.stream.stack.AnsCoder()
    ans.encode_reverse(symbols.astype(np.int32), constriction.stream.model.Categorical(q, perfect=False))
    assert abs(net - ans.num_bits()) < 0.004 * n


def test_the_cost_of_a_block_is_its_states_and_its_end():
    own = Tables(rans.frequencies([1000, 700, 400, 10]))
    symbols = np.random.default_rng(0).choice(4, 1 << 14, p=own.frequencies[0] / TOTAL)
    sizes = {b: 8 * len(rans.encode(symbols, own, block=b, lanes=8)) for b in (1 << 14, 1 << 10)}
    # 15 more blocks of 8 lanes and an end of 32 bits; log2 of a last state is nearly uniform on [16, 32), so 24 bits a lane
    assert abs(sizes[1 << 10] - sizes[1 << 14] - 15 * (8 * 24 + 32)) < 15 * 8 * 2


def test_the_cost_of_a_lane_can_be_all_of_its_state():
    """Where every symbol takes exactly 2 bits the last states are not spread: 128 steps a lane end near 2^16, at almost 32 bits."""
    own = Tables(rans.frequencies([1, 1, 1, 1]))
    coded = rans.parse(
        rans.encode(np.random.default_rng(0).integers(0, 4, 1 << 10), own, block=1 << 10, lanes=8), 1 << 10
    )
    assert (48 - np.log2(coded.states.astype(np.float64))).mean() > 30


def test_certain_symbols_cost_nothing():
    own = Tables(np.array([[0, TOTAL, 0]]))
    payload = rans.encode(np.ones(1000, np.int64), own, block=500, lanes=8)
    assert rans.parse(payload, 1000).words.size == 0
    assert np.array_equal(rans.decode(payload, 1000, own), np.ones(1000))


@given(st.lists(st.integers(0, 1 << 30), min_size=1, max_size=200).filter(any))
def test_frequencies_are_a_table(counts):
    f = rans.frequencies(counts)
    assert f.sum() == TOTAL and ((f > 0) == (np.array(counts) > 0)).all()


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=5).filter(lambda c: sum(n > 0 for n in c) > 1))
def test_no_single_move_improves_frequencies(counts):
    """The objective is concave and separable: a table that no move of one unit improves is the best one."""
    n, f = np.array(counts, float), rans.frequencies(counts).astype(float)
    seen = n > 0

    def length(g):
        return -(n[seen] * np.log2(g[seen] / TOTAL)).sum()

    for i in np.flatnonzero(seen):
        for j in np.flatnonzero(seen):
            g = f.copy()
            g[i] += 1
            g[j] -= 1
            if i != j and g[j] >= 1:
                assert length(g) >= length(f) * (1 - 1e-12) - 1e-9


def test_frequencies_of_many_rare_symbols():
    f = rans.frequencies([1 << 40] + [1] * (TOTAL - 1))
    assert (f == 1).all()
    with pytest.raises(ValueError, match="expected 1 to 4096 symbols that occur, got 4097"):
        rans.frequencies([1] * (TOTAL + 1))


@given(tables())
def test_tables_come_back(own):
    written = own.write()
    assert np.array_equal(Tables.read(Reader(written), own.count).frequencies, own.frequencies)
    with pytest.raises(CorruptStream, match="number of tables"):
        Tables.read(Reader(written), own.count + 1)


def test_slots_invert_the_starts():
    own = Tables(np.stack([rans.frequencies([5, 0, 1, 1000]), rans.frequencies([1, 1, 1, 1])]))
    symbol, step = own.slots
    for table in range(2):
        for u in (0, 1, 15, 16, 17, 1023, 1024, TOTAL - 1):
            s = int(symbol[table * TOTAL + u])
            c, f = int(own.starts[table, s]), int(own.frequencies[table, s])
            assert c <= u < c + f and int(step[table * TOTAL + u]) == f * TOTAL + u - c


@given(messages(), st.data())
def test_altered_words_are_found_out(message, data):
    """A lane must end in its first state. What passes is, with a chance of about 2^-16, the code of other symbols."""
    symbols, own, contexts, block, lanes = message
    payload = rans.encode(symbols, own, contexts, block=block, lanes=lanes)
    start = rans.parse(payload, symbols.size).offsets[1]
    if len(payload) == start:
        return
    altered = bytearray(payload)
    altered[data.draw(st.integers(start, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        others = rans.decode(bytes(altered), symbols.size, own, contexts)
    except CorruptStream:
        return
    assert not np.array_equal(others, symbols)
    assert rans.encode(others, own, contexts, block=block, lanes=lanes) == bytes(altered)


@given(st.binary(max_size=200), st.integers(0, 100), tables())
def test_any_bytes_are_the_code_of_some_symbols_or_corrupt(data, count, own):
    for candidate in (data, bytes([8, count, 50]) + data):
        try:
            coded = rans.parse(candidate, count)
            symbols = coded.decode(own)
        except CorruptStream as problem:
            assert 0 <= problem.offset <= len(candidate)
        else:
            assert rans.encode(symbols, own, block=coded.block, lanes=coded.lanes) == candidate


def test_a_huge_count_is_refused_before_it_is_allocated():
    own = Tables(np.array([[TOTAL]]))
    with pytest.raises(CorruptStream, match="ends of the blocks"):
        rans.decode(bytes([8]) + _varints(1 << 50, 1 << 16) + b"\0" * 100, 1 << 50, own)
    with pytest.raises(CorruptStream, match="symbols a block"):
        rans.decode(bytes([8]) + _varints(1 << 50, 1 << 50) + b"\0" * 100, 1 << 50, own)


def test_wrong_arguments_are_refused():
    own = Tables(rans.frequencies([1, 0, 1]))
    with pytest.raises(ValueError, match="symbol 1 at 2 has frequency 0 in table 0"):
        rans.encode([0, 2, 1], own)
    with pytest.raises(ValueError, match="symbols: expected 0 to 2"):
        rans.encode([3], own)
    with pytest.raises(ValueError, match="lanes: expected 8 or 32"):
        rans.encode([0], own, lanes=16)
    with pytest.raises(ValueError, match="block"):
        rans.encode([0], own, block=0)
    with pytest.raises(ValueError, match="contexts"):
        rans.encode([0], own, [1])
    with pytest.raises(ValueError, match="sum 4096"):
        Tables(np.array([[1, 2]]))
    with pytest.raises(TypeError, match="counts"):
        rans.frequencies([0.5])
