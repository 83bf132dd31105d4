// Attention on KVQuant's codes (reference/kvquant.py): keys by channel before RoPE, values by token, points of a table, and outliers apart. A
// tile is filled from codes, then outliers are put in their places, then keys are turned by RoPE. Sinks are another segment. Algorithm, grid
// and block: attention.cuh.
//
// Vectors lie token by token, heads within: r = token heads + head has codes from bit r d b on and outliers starts[r] ... starts[r + 1] - 1, each
// a channel and a number.
#include "attention_rope.cuh"
#include "attention.cuh"
#include "bits.cuh"

template <class T> struct Dense {
    const unsigned* codes;
    const unsigned* starts;             // (rows + 1)
    const unsigned short* channels;
    const T* outliers;
    const float* points;                // (2^b)
    int dim, bits;

    // Outliers of a tile, over what is there: a warp takes a token.
    __device__ void apart(const Cache& c, const Room& room, float* tile, int stride) const {
        for (int t = threadIdx.x / 32; t < c.tile; t += WARPS) {
            if (room.token[t] < 0) continue;
            const long long row = row_number(room.token[t], c.heads, c.first_head());
            for (unsigned i = starts[row] + threadIdx.x % 32; i < starts[row + 1]; i += 32)
                tile[t * stride + channels[i]] = to_float(outliers[i]);
        }
    }
};

template <class T> struct KVQuant {
    static constexpr bool ORDERED = true;
    const Cache& c;
    const Room& room;
    Stretch stretch;
    Dense<T> key, value;
    const float *centres, *halves;      // (heads, head dim), of key channels
    const T* zeros;                     // (rows), of value vectors
    const unsigned short* scales;
    Turns turns;
    float *keys, *values;
    int key_stride, value_stride;

    __device__ KVQuant(const Cache& c, const Room& room, Dense<T> k, Dense<T> v, const float* centres, const float* halves, const T* zeros,
                       const unsigned short* scales, Turns turns, long long split)
        : c(c), room(room), stretch(c, split), key(k), value(v), centres(centres), halves(halves), zeros(zeros), scales(scales), turns(turns) {
        key_stride = tile_stride(k.dim), value_stride = tile_stride(v.dim);
        keys = room.tiles, values = keys + c.tile * key_stride;
    }
    __device__ long long tiles() const { return stretch.tiles(); }
    __device__ long long token(long long tile, int place) const { return stretch.token(tile, place); }
    __device__ int key_at(int) const { return 0; }
    __device__ int value_at(int) const { return 0; }

    // number(row, channel, point) of the codes of a tile.
    template <class F> __device__ void dense(const Dense<T>& own, float* tile, int stride, F number) {
        fill(c, room, tile, stride, (own.dim + 3) / 4 * 4, [&](long long token, int channel) {
            Vec<float, 4> out;
            const long long row = row_number(token, c.heads, c.first_head());
            const int many = min(own.dim - channel, 4);
            const unsigned few = get_bits(own.codes, ((unsigned long long)row * own.dim + channel) * own.bits, many * own.bits);
#pragma unroll
            for (int v = 0; v < 4; ++v)
                out.v[v] = v < many ? number(row, channel + v, own.points[few >> (v * own.bits) & ((1u << own.bits) - 1)]) : 0.0f;
            return out;
        });
    }

    __device__ void load(long long) {
        const int head = c.first_head();
        dense(key, keys, key_stride, [&](long long, int channel, float point) {
            const int at = head * key.dim + channel;
            return fmaf(halves[at], point, centres[at]);
        });
        dense(value, values, value_stride, [&](long long row, int, float point) {
            return fmaf(__uint_as_float(unsigned(scales[row]) << 15), 1.0f + point, to_float(zeros[row]));
        });
        __syncthreads();
        key.apart(c, room, keys, key_stride);
        value.apart(c, room, values, value_stride);
        if (turns.pairs == 0) return;
        __syncthreads();
        for (int t = threadIdx.x / 32; t < c.tile; t += WARPS) {
            if (room.token[t] < 0) continue;
            const long long position = c.position(head, room.token[t]);
            for (int pair = threadIdx.x % 32; pair < turns.pairs; pair += 32) {
                float *a = keys + t * key_stride + turns.first(pair), *b = keys + t * key_stride + turns.second(pair);
                const float2 both = turns.of(*a, *b, position, pair);
                *a = both.x, *b = both.y;
            }
        }
    }
};

template <class T>
__global__ void __launch_bounds__(THREADS, RESIDENT)
attend_kvquant(const unsigned* __restrict__ key_codes, const unsigned* __restrict__ key_starts, const unsigned short* __restrict__ key_channels,
               const T* __restrict__ key_outliers, const float* __restrict__ key_points, const float* __restrict__ centres,
               const float* __restrict__ halves, const unsigned long long* __restrict__ frequencies, const unsigned* __restrict__ value_codes,
               const unsigned* __restrict__ value_starts, const unsigned short* __restrict__ value_channels,
               const T* __restrict__ value_outliers, const float* __restrict__ value_points, const T* __restrict__ zeros,
               const unsigned short* __restrict__ scales, float scaling, int pairs, int interleaved, int bits, long long split,
               CACHE_PARAMETERS) {
    extern __shared__ uint4 smem[];
    const Cache cache CACHE;
    const Room room(cache, smem);
    KVQuant<T> codec(cache, room, {key_codes, key_starts, key_channels, key_outliers, key_points, key_width, bits},
                     {value_codes, value_starts, value_channels, value_outliers, value_points, value_width, bits}, centres, halves, zeros,
                     scales, {frequencies, pairs, interleaved, scaling}, split);
    attend(codec, cache, room);
}
