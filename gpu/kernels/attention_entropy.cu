// Attention on entropy-coded coefficients (reference/transform_coding/entropy.py, reference/rans.py): a CUDA block takes `together` blocks of
// tokens, each decoded by its L lanes of interleaved rANS, `each` tokens of it at a time, into a tile in shared memory; then attention goes over
// the tile. rANS has no random access within a block of tokens, so all coefficients of the layer are decoded, and as many KV heads as shared
// memory has room for are served by one decoding. Algorithm, grid and block: attention.cuh.
//
// each L' = all lanes of a step: each size is a multiple of L, so that a tile ends where a step does. Place p of a tile is token `tile each +
// p % each` of block p / each. wrong: becomes 1 where a block's words do not lead back to its first state, or its escapes are others.
#include "attention_coefficients.cuh"

constexpr unsigned TOTAL_BITS = 12, TOTAL = 1u << TOTAL_BITS, LOW = 1u << 16;
constexpr unsigned NOT_CODED = 255, SYMBOLS = 258, ESCAPE = SYMBOLS - 1;
constexpr int UNIT = 256;

struct Coded {
    const unsigned *ends, *states;      // (blocks + 1), (blocks, lanes)
    const unsigned short* words;
    const uint2* slots;                 // (tables, 2^12): x a symbol, y 2^12 f + u - c
    const unsigned char* classes;       // (tokens, units)
    const unsigned short* unit_of;      // (size)
    const unsigned char *tables, *shifts;   // (classes, size)
    const signed char* deltas;          // (tables, SYMBOLS)
    const int* escapes;
    const long long *escape_at, *bit_at;    // (blocks + 1): escapes and low bits before a block
    const unsigned* low;                // one word more than the low bits need
    unsigned* wrong;
    int size, units, lanes, block_tokens, together, each;
};

struct Entropy {
    static constexpr bool ORDERED = false;
    const Cache& c;
    const Room& room;
    const Coded& coded;
    Synthesis synthesis;
    const int *key_first, *value_first;
    float *keys, *values;
    int key_stride, value_stride, made;
    // of this thread: its block of tokens, its lane, the state
    long long block, first;
    int lane, count;
    unsigned x, taken, start, room_of_words;
    long long escape, bit;

    __device__ Entropy(const Cache& c, const Room& room, const Coded& coded, Synthesis synthesis, const int* key_first,
                       const int* value_first, int made)
        : c(c), room(room), coded(coded), synthesis(synthesis), key_first(key_first), value_first(value_first), made(made) {
        value_stride = tile_stride(coded.size), values = room.tiles;
        key_stride = made ? tile_stride(c.heads_block * synthesis.width()) : value_stride;
        keys = made ? values + c.tile * value_stride : values;
        const int own = threadIdx.x / coded.lanes;
        block = (long long)blockIdx.x * coded.together + own, lane = threadIdx.x % coded.lanes;
        first = block * coded.block_tokens;
        count = own < coded.together ? int(max(0ll, min(c.tokens - first, (long long)coded.block_tokens))) : 0;
        x = LOW, taken = start = room_of_words = 0, escape = bit = 0;
        if (count) {
            start = coded.ends[block], room_of_words = coded.ends[block + 1] - start, x = coded.states[block * coded.lanes + lane];
            escape = coded.escape_at[block], bit = coded.bit_at[block];
        }
        // what no coefficient is written to is read nevertheless
        for (int i = threadIdx.x; i < c.tile * value_stride; i += THREADS) values[i] = 0.0f;
        if (made) synthesis.clear(c, keys, key_stride);
    }
    __device__ long long tiles() const { return (coded.block_tokens + coded.each - 1) / coded.each; }
    __device__ long long token(long long tile, int place) const {
        const long long own = (long long)blockIdx.x * coded.together + place / coded.each;
        const long long inside = tile * coded.each + place % coded.each, token = own * coded.block_tokens + inside;
        return inside < coded.block_tokens && token < c.tokens ? token : -1;
    }
    __device__ int key_at(int own) const { return made ? own * synthesis.width() : head_of(key_first, own); }
    __device__ int value_at(int own) const { return head_of(value_first, own); }
    __device__ int head_of(const int* columns, int own) const { return columns[min(c.first_head() + own, c.heads - 1)]; }

    __device__ unsigned own_lanes(unsigned ballot) const {
        return coded.lanes == 32 ? ballot : ballot >> (threadIdx.x % 32 / coded.lanes * coded.lanes) & ((1u << coded.lanes) - 1);
    }

    __device__ void load(long long tile) {
        const int size = coded.size, steps = coded.each * size / coded.lanes, here = int(min((long long)coded.each, count - tile * coded.each));
        const unsigned before = (1u << lane) - 1;
        int column = lane, inside = 0;
        for (int step = 0; step < steps; ++step, column += coded.lanes) {
            for (; column >= size; column -= size) ++inside;
            const bool active = inside < here;
            unsigned symbol = 0, table = NOT_CODED, width = 0;
            if (active) {
                const long long token = first + tile * coded.each + inside;
                const int at = coded.classes[token * coded.units + coded.unit_of[column]] * size + column;
                table = coded.tables[at];
                if (table != NOT_CODED) {
                    width = coded.shifts[at];
                    const uint2 slot = coded.slots[table * TOTAL + x % TOTAL];
                    symbol = slot.x;
                    x = (slot.y >> TOTAL_BITS) * (x >> TOTAL_BITS) + slot.y % TOTAL;
                }
            }
            const bool hungry = x < LOW;
            const unsigned readers = own_lanes(__ballot_sync(ALL, hungry));
            if (hungry) {
                const unsigned at = taken + __popc(readers & before);
                x = x << 16 | (at < room_of_words ? coded.words[(size_t)start + at] : 0u);
            }
            taken += __popc(readers);
            const bool escaped = symbol == ESCAPE && table != NOT_CODED;
            const unsigned escapers = own_lanes(__ballot_sync(ALL, escaped));
            const long long own_escape = escape + __popc(escapers & before);
            escape += __popc(escapers);
            unsigned low = 0;
            if (__any_sync(ALL, width)) {
                unsigned sum = width;
                for (int d = 1; d < coded.lanes; d *= 2) {
                    const unsigned other = __shfl_up_sync(ALL, sum, d, coded.lanes);
                    if (lane >= d) sum += other;
                }
                const long long at = bit + sum - width;
                bit += __shfl_sync(ALL, sum, coded.lanes - 1, coded.lanes);
                if (width) low = __funnelshift_r(coded.low[at / 32], coded.low[at / 32 + 1], unsigned(at % 32)) & ((1u << width) - 1);
            }
            if (inside < coded.each && threadIdx.x / coded.lanes < coded.together) {
                const int m = symbol & 1 ? -int((symbol + 1) >> 1) : int(symbol >> 1);
                long long value = 0;
                if (table != NOT_CODED) {
                    value = UNIT * (m * (1ll << width) + low);
                    if (width == 0) value += coded.deltas[table * SYMBOLS + symbol];
                    if (escaped) value = own_escape < coded.escape_at[block + 1] ? (long long)UNIT * coded.escapes[own_escape] : 0;
                }
                values[(threadIdx.x / coded.lanes * coded.each + inside) * value_stride + column] = float(value);
            }
        }
        if (made) {
            __syncthreads();
            synthesis(c, room, values, value_stride, keys, key_stride);
        }
    }
    __device__ void finish() const {
        const bool bad = count && (taken != room_of_words || x != LOW || escape != coded.escape_at[block + 1]);
        if (bad) atomicOr(coded.wrong, 1u);
    }
};

__global__ void __launch_bounds__(THREADS, RESIDENT)
attend_entropy(const unsigned* __restrict__ ends, const unsigned* __restrict__ states, const unsigned short* __restrict__ words,
               const uint2* __restrict__ slots, const unsigned char* __restrict__ classes, const unsigned short* __restrict__ unit_of,
               const unsigned char* __restrict__ tables, const unsigned char* __restrict__ shifts, const signed char* __restrict__ deltas,
               const int* __restrict__ escapes, const long long* __restrict__ escape_at, const long long* __restrict__ bit_at,
               const unsigned* __restrict__ low, unsigned* __restrict__ wrong, const int* __restrict__ value_first,
               const int* __restrict__ key_first, const float* __restrict__ matrix, const float* __restrict__ mean,
               const unsigned long long* __restrict__ frequencies, float scaling, int pairs, int interleaved, int key_columns, int dim,
               int made, int size, int units, int lanes, int block_tokens, int together, int each, CACHE_PARAMETERS) {
    extern __shared__ uint4 smem[];
    const Cache cache CACHE;
    const Room room(cache, smem);
    const Coded coded{ends, states, words, slots, classes, unit_of, tables, shifts, deltas, escapes, escape_at, bit_at, low, wrong,
                      size, units, lanes, block_tokens, together, each};
    Entropy codec(cache, room, coded, {matrix, mean, key_first, {frequencies, pairs, interleaved, scaling}, key_columns, dim}, key_first,
                  value_first, made);
    attend(codec, cache, room);
    codec.finish();
}
