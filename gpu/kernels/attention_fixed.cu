// Attention on transform coders of fixed rate (reference/transform_coding/fixed.py): a tile holds the coefficients that this head's keys and
// values are made of and that have bits; the others are 0 and take nothing. Values are never made: outputs are, of their coefficients' sums.
// Keys are made where they were coded before RoPE (attention_coefficients.cuh). Algorithm, grid and block: attention.cuh.
//
// Columns (heads, columns): bits, where they begin among a token's bits, the unit, and which of a token's scales of kind LOG is theirs; first
// those of keys alone, then those of both, from value_first on those of values.
#include "attention_coefficients.cuh"
#include "bits.cuh"
#include "norms.cuh"

enum { NONE, LOG, MAX, RANGE };
enum { LISTED, MIDRISE, MIDTREAD, OFFSET };

struct Columns {
    const unsigned* words;
    const unsigned char* bits;
    const int *bit_at, *unit, *choice, *books, *starts;
    const unsigned short* norms;        // (tokens, units)
    const unsigned char *choices, *zeros;   // (tokens, all choices) of 4 bits, (tokens, units)
    int columns, token_bits, units, all_choices, scale, kind;

    __device__ int level(int b, int code) const {
        if (kind == LISTED) return books[starts[b] + code];
        return kind == OFFSET ? code : (2 * code + (kind == MIDRISE) - (1 << b)) * (1 << (16 - b));
    }
    __device__ float operator()(int head, long long token, int column) const {
        const int at = head * columns + column, b = bits[at];
        if (!b) return 0.0f;
        const unsigned code = get_bits(words, (unsigned long long)token * token_bits + bit_at[at], b);
        int own = level(b, (int)code);
        if (scale == RANGE) own -= zeros[token * units + unit[at]];
        if (scale == LOG) {
            const long long own_choice = token * all_choices + choice[at];
            const unsigned found = choices[own_choice / 2] >> (own_choice % 2 * 4) & 15;
            return float(own) * float((2 + (found & 1)) << (found >> 1));
        }
        return scale == NONE ? float(own) : float(own) * float(norm(norms[token * units + unit[at]]));
    }
};

struct Fixed {
    static constexpr bool ORDERED = true;
    const Cache& c;
    const Room& room;
    Stretch stretch;
    Columns columns;
    Synthesis synthesis;
    const int* value_first;
    float *keys, *values;
    int key_stride, value_stride, made;

    __device__ Fixed(const Cache& c, const Room& room, Columns columns, Synthesis synthesis, const int* value_first, int made, long long split)
        : c(c), room(room), stretch(c, split), columns(columns), synthesis(synthesis), value_first(value_first), made(made) {
        value_stride = tile_stride(columns.columns), values = room.tiles;
        key_stride = made ? tile_stride(synthesis.dim) : value_stride;
        keys = made ? values + c.tile * value_stride : values;
    }
    __device__ long long tiles() const { return stretch.tiles(); }
    __device__ long long token(long long tile, int place) const { return stretch.token(tile, place); }
    __device__ int key_at(int) const { return 0; }
    __device__ int value_at(int own) const { return value_first[c.first_head() + own]; }
    __device__ void load(long long) {
        const int head = c.first_head();
        fill(c, room, values, value_stride, (columns.columns + 3) / 4 * 4, [&](long long token, int column) {
            Vec<float, 4> out;
#pragma unroll
            for (int v = 0; v < 4; ++v) out.v[v] = column + v < columns.columns ? columns(head, token, column + v) : 0.0f;
            return out;
        });
        if (made) {
            __syncthreads();
            synthesis(c, room, values, value_stride, keys, key_stride);
        }
    }
};

__global__ void __launch_bounds__(THREADS, RESIDENT)
attend_fixed(const unsigned* __restrict__ words, const unsigned char* __restrict__ bits, const int* __restrict__ bit_at,
             const int* __restrict__ unit, const int* __restrict__ choice, const int* __restrict__ books, const int* __restrict__ starts,
             const unsigned short* __restrict__ norms, const unsigned char* __restrict__ choices, const unsigned char* __restrict__ zeros,
             const int* __restrict__ value_first, const int* __restrict__ key_first, const float* __restrict__ matrix,
             const float* __restrict__ mean, const unsigned long long* __restrict__ frequencies, float scaling, int pairs, int interleaved,
             int key_columns, int dim, int made, int columns, int token_bits, int units, int all_choices, int scale, int kind,
             long long split, CACHE_PARAMETERS) {
    extern __shared__ uint4 smem[];
    const Cache cache CACHE;
    const Room room(cache, smem);
    Fixed codec(cache, room, {words, bits, bit_at, unit, choice, books, starts, norms, choices, zeros, columns, token_bits, units, all_choices, scale, kind},
                {matrix, mean, key_first, {frequencies, pairs, interleaved, scaling}, key_columns, dim}, value_first, made, split);
    attend(codec, cache, room);
}
