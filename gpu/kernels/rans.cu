// Interleaved rANS (reference/rans.py): symbols to words and back, the same words in the same order as the reference writes.
//
// L lanes (8 or 32) own a block of symbols, lane l its symbols l, l + L, ...; a warp holds 32 / L blocks, and blocks know nothing of
// each other. All lanes of a block share one stream of words: at each step those that need a word take the next ones in the order of
// lanes, which a ballot and the bits below one's own tell. The decoder walks forwards, the encoder backwards.
//
//   encode   symbols, backwards -> words at the end of each block's room, how many, and the lanes' last states.  Then
//   gather   the words of all blocks, one block after the other
//   decode   states, words -> symbols.  A block that asks for more words than it has reads zeros, and ends up wrong
//
// Grid: one thread for each lane of each block, THREADS a CUDA block; of gather a CUDA block for each block of symbols.
// A slot is what 12 bits of a state stand for under one table: x its symbol, y = 2^12 f + (u - c), so that a step is one 8-byte load.

constexpr unsigned TOTAL_BITS = 12, TOTAL = 1u << TOTAL_BITS, LOW = 1u << 16, ALL = 0xffffffffu;

// Which table codes a lane's symbol: contexts[i] of symbol i of all (OWN), else contexts[i mod period] of symbol i of its block.
template <bool OWN> struct Contexts {
    const unsigned short* contexts;
    unsigned at, turn, period;

    __device__ Contexts(const unsigned short* contexts, unsigned period, unsigned i, unsigned lanes)
        : contexts(contexts), at(OWN ? 0 : i % period), turn(OWN ? 0 : lanes % period), period(period) {}
    __device__ unsigned operator()(unsigned long long symbol) const { return OWN ? contexts[symbol] : contexts[at]; }
    __device__ void forwards() {
        if (!OWN) at = at + turn < period ? at + turn : at + turn - period;
    }
    __device__ void backwards() {
        if (!OWN) at = at < turn ? at + period - turn : at - turn;
    }
};

// The bits of a ballot that belong to the L lanes around this one.
template <int L> __device__ inline unsigned own_lanes(unsigned ballot) {
    return L == 32 ? ballot : ballot >> (threadIdx.x % 32 / L * L) & ((1ull << L) - 1);
}

template <int L, bool OWN>
__global__ void __launch_bounds__(128)
encode(const unsigned short* __restrict__ symbols,    // (count)
       const unsigned short* __restrict__ contexts,   // (count) if OWN, else (period)
       const unsigned* __restrict__ entries,          // (tables, alphabet): f + 2^16 c
       unsigned short* __restrict__ buffer,           // (blocks, room): a block's words fill its room from the end
       unsigned* __restrict__ used,                   // (blocks)
       unsigned* __restrict__ states,                 // (blocks, L)
       unsigned long long* __restrict__ wrong,        // the first symbol that has no frequency, or is none at all
       unsigned long long count, unsigned period, unsigned alphabet, unsigned block, unsigned blocks, unsigned room) {
    const unsigned b = (blockIdx.x * blockDim.x + threadIdx.x) / L, lane = threadIdx.x % L;
    if (b / (32 / L) * (32 / L) >= blocks) return;    // no block for any lane of this warp
    const unsigned long long first = (unsigned long long)b * block;
    const unsigned size = b < blocks ? (unsigned)min(count - first, (unsigned long long)block) : 0;
    const unsigned steps = room / L;
    unsigned x = LOW, words = 0;
    Contexts<OWN> table(contexts, period, (steps - 1) * L + lane, L);
    for (unsigned step = steps; step-- > 0; table.backwards()) {
        const unsigned i = step * L + lane;
        unsigned f = TOTAL, c = 0;                    // a lane without a symbol takes a certain one, which changes nothing
        if (i < size) {
            const unsigned symbol = symbols[first + i];
            const unsigned entry = symbol < alphabet ? entries[(size_t)table(first + i) * alphabet + symbol] : 0;
            f = entry & 0xffff, c = entry >> 16;
            if (f == 0) atomicMin(wrong, first + i), f = TOTAL, c = 0;
        }
        const bool full = x >> 20 >= f;
        const unsigned writers = own_lanes<L>(__ballot_sync(ALL, full));
        words += __popc(writers);
        if (full) {
            buffer[(size_t)b * room + room - words + __popc(writers & ((1u << lane) - 1))] = (unsigned short)x;
            x >>= 16;
        }
        const unsigned q = x / f;
        x = (q << TOTAL_BITS) + (x - q * f) + c;
    }
    if (b >= blocks) return;
    states[(size_t)b * L + lane] = x;
    if (lane == 0) used[b] = words;
}

// starts (blocks): of each block's words among all of them.
__global__ void __launch_bounds__(128)
gather(const unsigned short* __restrict__ buffer, const unsigned* __restrict__ used, const unsigned* __restrict__ starts,
       unsigned short* __restrict__ words, unsigned room) {
    const unsigned count = used[blockIdx.x];
    const unsigned short* from = buffer + (size_t)blockIdx.x * room + (room - count);
    unsigned short* to = words + starts[blockIdx.x];
    for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

template <int L, bool OWN>
__global__ void __launch_bounds__(128)
decode(const unsigned* __restrict__ ends,             // (blocks + 1): words before the first block, before the second ..., before the end
       const unsigned* __restrict__ states,           // (blocks, L), each at least 2^16
       const unsigned short* __restrict__ words,      // (ends[blocks])
       const unsigned short* __restrict__ contexts,   // (count) if OWN, else (period)
       const uint2* __restrict__ slots,               // (tables, 2^12)
       unsigned short* __restrict__ symbols,          // (count)
       unsigned* __restrict__ wrong,                  // the first block whose words do not lead back to where its encoder began
       unsigned long long count, unsigned period, unsigned block, unsigned blocks) {
    const unsigned b = (blockIdx.x * blockDim.x + threadIdx.x) / L, lane = threadIdx.x % L;
    if (b / (32 / L) * (32 / L) >= blocks) return;
    const bool mine = b < blocks;
    const unsigned long long first = (unsigned long long)b * block;
    const unsigned size = mine ? (unsigned)min(count - first, (unsigned long long)block) : 0;
    const unsigned start = mine ? ends[b] : 0, room = mine ? ends[b + 1] - start : 0;
    const unsigned steps = ((unsigned)min(count, (unsigned long long)block) + L - 1) / L;     // as many for all blocks of a warp
    unsigned x = mine ? states[(size_t)b * L + lane] : LOW, taken = 0;
    Contexts<OWN> table(contexts, period, lane, L);
    for (unsigned step = 0; step < steps; ++step, table.forwards()) {
        const unsigned i = step * L + lane;
        if (i < size) {
            const uint2 slot = slots[(size_t)table(first + i) * TOTAL + x % TOTAL];
            symbols[first + i] = (unsigned short)slot.x;
            x = (slot.y >> TOTAL_BITS) * (x >> TOTAL_BITS) + slot.y % TOTAL;
        }
        const bool hungry = x < LOW;
        const unsigned readers = own_lanes<L>(__ballot_sync(ALL, hungry));
        if (hungry) {
            const unsigned at = taken + __popc(readers & ((1u << lane) - 1));
            x = x << 16 | (at < room ? words[(size_t)start + at] : 0u);
        }
        taken += __popc(readers);
    }
    const unsigned bad = own_lanes<L>(__ballot_sync(ALL, taken != room || x != LOW));
    if (mine && lane == 0 && bad) atomicMin(wrong, b);
}
