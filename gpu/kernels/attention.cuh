// Attention of a block of query rows over a stretch of tokens, whatever the tokens are coded by: the part that all attention kernels share.
// Equals kvtheory/attention.py up to rounding; docs/attention.md derives how far.
//
// A cache is read in *segments* (what is coded; exact sinks, window, tail), each in *splits* of tokens. One CUDA block takes a split of one KV
// head and `rows` of its query rows (all query heads that read it, and their queries): K and V are read once for all of them. It goes through
// its tokens in tiles of at most 32, online:
//
//     load      the codec turns codes into floats in shared memory: a tile of keys and one of values, each in a *frame* of its own (rotated,
//               transform coefficients, or plain channels; queries come in the frame of keys), and a scale for each token
//     scores    s = scale_t (q . k_t) + offset + log-weight            lanes are tokens, warps take every fourth quad of channels
//     softmax   m' = max(m, s), p = e^(s - m'), sums and accumulators times e^(m - m')              a warp for each row
//     values    o += p_t scale'_t v_t                                                               a thread for each column of the frame
//
// and leaves (m, sum of p, o) of each row in slot `slot + split`; kernels combine and restore (attention.cu) put them together.
//
// Rows of queries: (heads, group rows, width + 1), the last number is the offset; row r of a head is of query r % count.
#pragma once
#include "common.cuh"

// RESIDENT: blocks that a multiprocessor has room for at least, which shared memory allows; left to itself, ptxas spills registers to fit more.
constexpr int THREADS = 128, WARPS = THREADS / 32, MOST_TILE = 32, RESIDENT = 4;
enum { CAUSAL = 1, POSITIONS = 2, WEIGHTS = 4, COUNTS = 8 };

__device__ inline float minus_infinity() { return __uint_as_float(0xff800000u); }

// Numbers from one token to the next in a tile: quads of an odd number, so that 8 lanes that read a quad each of their token meet no bank twice.
__device__ inline int tile_stride(int width) { return 4 * ((width + 3) / 4 | 1); }

// Tokens, rows and where results go. positions (heads or 1, tokens): of tokens, where flags has POSITIONS, else first_position, + 1, ...;
// log_weights where WEIGHTS; counts (heads): tokens that a head has, where COUNTS.
struct Cache {
    const float* queries;
    const long long* limits;        // (count): queries see positions up to these, where CAUSAL
    const long long* positions;
    const float* log_weights;
    const long long* counts;
    float *maxima, *sums, *out;     // (slots, heads group_rows), the last one times value width
    long long tokens, first_position, position_stride, weight_head, weight_token;
    int heads, heads_block, group_rows, count, rows, key_width, value_width, tile, flags, slot;

    __device__ long long all_rows() const { return (long long)heads * group_rows; }
    __device__ int row_blocks() const { return (rows + 3) / 4; }
    __device__ int first_head() const { return blockIdx.y * heads_block; }
    // Row j of row block b: its head (of this block's), and its number among the head's rows, or -1.
    __device__ int head_of(int block) const { return block / row_blocks(); }
    __device__ int row_of(int block, int j) const {
        const int own = block % row_blocks() * 4 + j, row = blockIdx.z * rows + own;
        return row < group_rows && first_head() + head_of(block) < heads ? row : -1;
    }
    __device__ long long place(int block, int j) const { return (long long)(first_head() + head_of(block)) * group_rows + row_of(block, j); }
    __device__ long long position(int head, long long token) const {
        return flags & POSITIONS ? positions[head * position_stride + token] : first_position + token;
    }
    // The largest position that a row of this block may see.
    __device__ long long most_limit() const {
        long long most = limits[0];
        for (int i = 1; i < count; ++i) most = max(most, limits[i]);
        return most;
    }
    __device__ bool is_there(int head, long long token) const {
        return token >= 0 && !(flags & COUNTS && token >= counts[head]);
    }
};

// The shared memory of a block; gpu/device_cache/launches.py counts it alike. What is left of it, from `tiles` on, is the codec's.
struct Room {
    long long* token;                                   // (tile): which token a place of the tile is, or -1
    float *queries, *weights, *out;                     // (row blocks, width, 4), (row blocks, tile, 4), (row blocks, value width, 4)
    float *parts;                                       // (WARPS, rows, tile): shares of scores
    float *maxima, *sums, *factors, *offsets;           // (rows)
    float *key_scales, *value_scales;                   // (tile)
    float* tiles;
    int blocks, key_width;

    __device__ Room(const Cache& c, uint4* memory) {
        blocks = c.heads_block * c.row_blocks(), key_width = (c.key_width + 3) / 4 * 4;
        token = reinterpret_cast<long long*>(memory);
        queries = reinterpret_cast<float*>(memory) + 2 * MOST_TILE;
        weights = queries + blocks * key_width * 4;
        out = weights + blocks * c.tile * 4;
        parts = out + blocks * c.value_width * 4;
        maxima = parts + WARPS * blocks * 4 * c.tile;
        sums = maxima + blocks * 4, factors = sums + blocks * 4, offsets = factors + blocks * 4;
        key_scales = offsets + blocks * 4, value_scales = key_scales + MOST_TILE;
        tiles = value_scales + MOST_TILE;
    }
};

namespace attention {

__device__ inline void start(const Cache& c, const Room& room) {
    const int width = room.key_width;
    for (int i = threadIdx.x; i < room.blocks * width * 4; i += THREADS) {
        const int j = i % 4, channel = i / 4 % width, block = i / 4 / width;
        const bool any = channel < c.key_width && c.row_of(block, j) >= 0;
        room.queries[i] = any ? c.queries[c.place(block, j) * (c.key_width + 1) + channel] : 0.0f;
    }
    for (int i = threadIdx.x; i < room.blocks * c.value_width * 4; i += THREADS) room.out[i] = 0.0f;
    for (int i = threadIdx.x; i < room.blocks * 4; i += THREADS) {
        room.maxima[i] = minus_infinity(), room.sums[i] = 0.0f;
        const bool any = c.row_of(i / 4, i % 4) >= 0;
        room.offsets[i] = any ? c.queries[c.place(i / 4, i % 4) * (c.key_width + 1) + c.key_width] : 0.0f;
    }
}

// Shares of q . k: lanes are tokens, a warp takes every fourth quad of channels. key_at(head): where the head's columns begin, a multiple of 4.
template <class Codec>
__device__ inline void scores(const Codec& codec, const Cache& c, const Room& room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = room.key_width / 4;
    if (lane < c.tile)
        for (int block = 0; block < room.blocks; ++block) {
            const float* keys = codec.keys + lane * codec.key_stride + codec.key_at(c.head_of(block));
            const float* queries = room.queries + block * room.key_width * 4;
            float s[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (int quad = warp; quad < quads; quad += WARPS) {
                const Vec<float, 4> k = load<4>(keys + 4 * quad);
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    const Vec<float, 4> q = load<4>(queries + (4 * quad + v) * 4);
#pragma unroll
                    for (int j = 0; j < 4; ++j) s[j] = fmaf(q.v[j], k.v[v], s[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) room.parts[((warp * room.blocks + block) * 4 + j) * c.tile + lane] = s[j];
        }
}

__device__ inline void softmax(const Cache& c, const Room& room) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int r = warp; r < room.blocks * 4; r += WARPS) {
        const int block = r / 4, row = c.row_of(block, r % 4), head = c.first_head() + c.head_of(block);
        float s = minus_infinity();
        if (lane < c.tile && row >= 0) {
            const long long token = room.token[lane];
            const bool seen = c.is_there(head, token) && !(c.flags & CAUSAL && c.position(head, token) > c.limits[row % c.count]);
            if (seen) {
                s = 0.0f;
                for (int w = 0; w < WARPS; ++w) s += room.parts[((w * room.blocks + block) * 4 + r % 4) * c.tile + lane];
                s = fmaf(s, room.key_scales[lane], room.offsets[r]);
                if (c.flags & WEIGHTS) s += c.log_weights[head * c.weight_head + token * c.weight_token];
            }
        }
        const float before = room.maxima[r], most = fmaxf(before, warp_max(s));
        const bool any = most > minus_infinity();           // else no token was seen yet
        const float p = any ? expf(s - most) : 0.0f, factor = any ? expf(before - most) : 1.0f;
        const float sum = warp_sum(p);
        if (lane < c.tile) room.weights[(block * c.tile + lane) * 4 + r % 4] = p * room.value_scales[lane];
        __syncwarp();                                       // maxima are read by all lanes before one writes
        if (lane == 0) room.maxima[r] = most, room.factors[r] = factor, room.sums[r] = fmaf(room.sums[r], factor, sum);
    }
}

template <class Codec>
__device__ inline void values(const Codec& codec, const Cache& c, const Room& room) {
    for (int i = threadIdx.x; i < room.blocks * c.value_width; i += THREADS) {
        const int block = i / c.value_width, column = i % c.value_width;
        const float* v = codec.values + codec.value_at(c.head_of(block)) + column;
        const Vec<float, 4> factors = load<4>(room.factors + block * 4);
        Vec<float, 4> o = load<4>(room.out + i * 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) o.v[j] *= factors.v[j];
        for (int t = 0; t < c.tile; ++t) {
            const float own = v[t * codec.value_stride];
            const Vec<float, 4> p = load<4>(room.weights + (block * c.tile + t) * 4);
#pragma unroll
            for (int j = 0; j < 4; ++j) o.v[j] = fmaf(p.v[j], own, o.v[j]);
        }
        store<4>(room.out + i * 4, o);
    }
}

__device__ inline void finish(const Cache& c, const Room& room) {
    const long long slot = (c.slot + blockIdx.x) * c.all_rows();
    for (int i = threadIdx.x; i < room.blocks * c.value_width * 4; i += THREADS) {
        const int j = i % 4, column = i / 4 % c.value_width, block = i / 4 / c.value_width;
        if (c.row_of(block, j) >= 0) c.out[(slot + c.place(block, j)) * c.value_width + column] = room.out[i];
    }
    for (int r = threadIdx.x; r < room.blocks * 4; r += THREADS)
        if (c.row_of(r / 4, r % 4) >= 0) {
            const long long at = slot + c.place(r / 4, r % 4);
            c.maxima[at] = room.maxima[r], c.sums[at] = room.sums[r];
        }
}

}  // namespace attention

// A Codec has: tiles(), how many; token(tile, place), which token lies there, or -1; load(tile), which fills its tiles for all places of
// room.token, 0 where there is none, and may change room.key_scales and room.value_scales (else 1); keys, values, their strides, key_at, value_at.
// ORDERED: tokens ascend, so that the first of a tile tells whether any of this tile or a later one may be seen.
template <class Codec>
__device__ inline void attend(Codec& codec, const Cache& c, const Room& room) {
    attention::start(c, room);
    const long long most = c.flags & CAUSAL ? c.most_limit() : 0;
    const long long tiles = codec.tiles();
    for (long long tile = 0; tile < tiles; ++tile) {
        if (Codec::ORDERED && c.flags & CAUSAL && c.heads_block == 1) {
            const long long first = codec.token(tile, 0);
            if (first < 0 || !c.is_there(c.first_head(), first) || c.position(c.first_head(), first) > most) break;
        }
        if (threadIdx.x < c.tile) {
            room.token[threadIdx.x] = codec.token(tile, threadIdx.x);
            room.key_scales[threadIdx.x] = room.value_scales[threadIdx.x] = 1.0f;
        }
        __syncthreads();
        codec.load(tile);
        __syncthreads();
        attention::scores(codec, c, room);
        __syncthreads();
        attention::softmax(c, room);
        __syncthreads();
        attention::values(codec, c, room);      // what it reads is written behind the next tile's first barrier
    }
    __syncthreads();
    attention::finish(c, room);
}

// Tokens of a split, one after the other: split number blockIdx.x takes `split` of them.
struct Stretch {
    long long begin, end;
    int tile;
    __device__ Stretch(const Cache& c, long long split)
        : begin(blockIdx.x * split), end(min(blockIdx.x * split + split, c.tokens)), tile(c.tile) {}
    __device__ long long tiles() const { return end > begin ? (end - begin + tile - 1) / tile : 0; }
    __device__ long long token(long long number, int place) const {
        const long long token = begin + number * tile + place;
        return token < end ? token : -1;
    }
};

// The number of a vector where they lie token by token, heads within, as in streams.
__device__ inline long long row_number(long long token, int heads, int head) { return token * heads + head; }

// Plain rows of numbers: token t of head h begins at starts[h] + t stride.
template <class T> struct Rows {
    const T* numbers;
    const long long* starts;
    long long stride;
    int dim;
    __device__ long long at(int head, long long token) const { return starts[head] + token * stride; }
    // Quad of channels from `channel` on, 0 behind the last one.
    __device__ Vec<float, 4> quad(long long row, int channel) const {
        Vec<float, 4> out;
        const T* own = numbers + row + channel;
        if (channel + 4 <= dim && (unsigned long long)own % sizeof(Vec<T, 4>) == 0) {
            const Vec<T, 4> few = load<4>(own);
#pragma unroll
            for (int v = 0; v < 4; ++v) out.v[v] = to_float(few.v[v]);
        } else {
#pragma unroll
            for (int v = 0; v < 4; ++v) out.v[v] = channel + v < dim ? to_float(own[v]) : 0.0f;
        }
        return out;
    }
};

// quad(token, channel) for each token and quad of a tile of `width` columns; a warp takes a token.
template <class F>
__device__ inline void fill(const Cache& c, const Room& room, float* tile, int stride, int width, F quad) {
    for (int t = threadIdx.x / 32; t < c.tile; t += WARPS) {
        const long long token = room.token[t];
        for (int channel = threadIdx.x % 32 * 4; channel < width; channel += 128) {
            Vec<float, 4> few = {{0.0f, 0.0f, 0.0f, 0.0f}};
            if (token >= 0) few = quad(token, channel);
            store<4>(tile + t * stride + channel, few);
        }
    }
}

// What all kernels are given beside their codec's arrays, in this order; and the Cache of it.
#define CACHE_PARAMETERS                                                                                                              \
    const float *__restrict__ queries, const long long *__restrict__ limits, const long long *__restrict__ positions,                 \
        const float *__restrict__ log_weights, const long long *__restrict__ counts, float *__restrict__ maxima,                      \
        float *__restrict__ sums, float *__restrict__ out, long long tokens, long long first_position, long long position_stride,     \
        long long weight_head, long long weight_token, int heads, int heads_block, int group_rows, int count, int rows,              \
        int key_width, int value_width, int tile, int flags, int slot
#define CACHE                                                                                                                         \
    {queries, limits, positions, log_weights, counts, maxima, sums, out, tokens, first_position, position_stride, weight_head,        \
     weight_token, heads, heads_block, group_rows, count, rows, key_width, value_width, tile, flags, slot}
