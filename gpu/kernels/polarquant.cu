// PolarQuant: an integer rotation, then a tree of angles, level by level, and one radius a block. Equals
// reference/polarquant.py byte for byte; tests/kernels/test_polarquant.py.
//
// One warp a vector, four a block, everything in registers (vectors.cuh). Node j of level l lies where coordinate j 2^l
// does: a level joins neighbours in a group, then lanes, then groups of a lane; where a node has no partner, that is 0.
// Grid: ceil(rows / 4).
//
// Angles lie level by level in one array of words: those of level l begin at bit start[l-1], a multiple of 32 apart.
#include "bits.cuh"
#include "hadamard.cuh"
#include "vectors.cuh"

constexpr int MOST_LEVELS = 10;
constexpr int TABLE = 256;    // entries a level has room for

template <int E> constexpr int LOG = E == 2 ? 6 : E == 4 ? 7 : E == 8 ? 8 : 10;      // of 32 E
template <int E> constexpr int LOG_GROUP = E == 2 ? 1 : 2;

// Codes of level k + 1 in a vector of dim coordinates: one a pair, and at level 1 one for a lone coordinate.
__device__ inline int codes_of(int dim, int k) { return k ? ((dim - 1) / (1 << k) + 1) / 2 : (dim + 1) / 2; }

// Where the codes of level k + 1 of one vector lie among all angles.
struct Level {
    unsigned long long first;
    int each, quadrant, bits, shift, words;
    __device__ Level(int dim, int k, const int* level_bits, const unsigned long long* start, long long row) {
        each = level_bits[k];
        quadrant = k ? each : max(each - 2, 0);
        bits = codes_of(dim, k) * each;
        first = start[k] + (unsigned long long)row * bits;
        shift = first % 32, words = (shift + bits + 31) / 32;
    }
};

// Codes one pair of level k + 1, its first node at coordinate `place`, into a row of shared memory; the two nodes
// joined. A node without a partner goes up as it is, with no code; its partner's norm is 0.
__device__ inline float coded(unsigned* row, const Level& level, int k, int place, int dim, float first, float second,
                              const float* __restrict__ tangents, unsigned signs) {
    const bool whole = place + (1 << k) < dim;
    unsigned code = 0;
    if (whole)
        for (unsigned step = (1u << level.quadrant) / 2; step; step /= 2)
            if (second > tangents[k * TABLE + code + step - 1] * first) code += step;
    if (place < dim && (whole || k == 0)) put_bits(row, level.shift + (place >> (k + 1)) * level.each, code | signs);
    return first + second;
}

// The inverse: what the norm of the pair is for the first node; for the second in `second`.
__device__ inline float parted(const unsigned* __restrict__ angles, const Level& level, int k, int place, int dim,
                               float norm, const float* __restrict__ factors, float& second, unsigned* damaged) {
    const bool whole = place + (1 << k) < dim;
    second = 0;
    if (place >= dim || (!whole && k)) return norm;
    const unsigned long long at = level.first + (unsigned long long)(place >> (k + 1)) * level.each;
    const unsigned code = get_bits(angles, at, level.each);
    if (whole) {
        second = norm * factors[(2 * k + 1) * TABLE + code];
        return norm * factors[2 * k * TABLE + code];
    }
    // a lone coordinate
    if (code & ((1u << (level.each - 1)) - 1)) atomicOr(damaged, 1u);
    return code >> (level.each - 1) ? -norm : norm;
}

// x (heads, tokens, dim) -> radii (rows, ceil(dim / 2^levels)), angles (zeroed). level_bits, start: (levels,); tangents
// (levels, TABLE): the 2^c - 1 squared tangents between the points of one quadrant, ascending, c = bits but at level 1
// bits - 2. gain2: m d.
template <class T, int E>
__global__ void __launch_bounds__(128, RESIDENT<E>)
    encode(const T* __restrict__ x, long long head_stride, long long token_stride, int heads, long long rows, int dim,
           const unsigned* __restrict__ flips, int levels, const int* __restrict__ level_bits,
           const unsigned long long* __restrict__ start, const float* __restrict__ tangents, int input_bits,
           double gain2, unsigned short* __restrict__ radii, unsigned* __restrict__ angles,
           unsigned* __restrict__ refused) {
    constexpr int V = GROUP<E>, ROOM = row_words(32 * E * 8) + 2 * MOST_LEVELS;
    __shared__ unsigned packed[WARPS][ROOM];
    __shared__ float blocks[WARPS][16 * E];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = (long long)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const Strides at{head_stride, token_stride, heads};
    int y[E], e;
    {
        float own[E];
        take<T, E>(x + at(row), dim, lane, own);
        if (!integers<E>(own, input_bits, y, e)) {
            if (lane == 0) atomicOr(refused, 1u);
            return;
        }
    }
    flip<E>(y, flips, lane);
    rotate<E>(y, dim, lane);
    float q[E];
#pragma unroll
    for (int i = 0; i < E; ++i) q[i] = float(y[i]) * float(y[i]);

    for (int w = lane; w < ROOM; w += 32) packed[warp][w] = 0;
    __syncwarp();
    unsigned* out = packed[warp];
    // neighbours in a group, the signs at level 1; lanes; groups of lane 0
#pragma unroll
    for (int k = 0; k < LOG_GROUP<E>; ++k) {
        if (k >= levels) continue;
        const Level level(dim, k, level_bits, start, row);
#pragma unroll
        for (int i = 0; i < E; i += 2 << k) {
            const int own = place<E>(i, lane);
            unsigned signs = 0;
            if (k == 0) {
                const bool whole = own + 1 < dim;
                signs = (whole ? y[i + 1] : y[i]) < 0 ? 1u << (level.each - 1) : 0;    // or a lone coordinate's
                if (whole && level.each > 1 && y[i] < 0) signs |= 1u << (level.each - 2);
            }
            q[i] = coded(out, level, k, own, dim, q[i], q[i + (1 << k)], tangents, signs);
        }
        out += level.words;
    }
#pragma unroll 1
    for (int k = LOG_GROUP<E>; k < LOG_GROUP<E> + 5 && k < levels; ++k) {
        const Level level(dim, k, level_bits, start, row);
        const int stride = 1 << (k - LOG_GROUP<E>);
#pragma unroll
        for (int i = 0; i < E; i += V) {
            const float other = __shfl_xor_sync(ALL, q[i], stride);
            if (lane % (2 * stride) == 0) q[i] = coded(out, level, k, place<E>(i, lane), dim, q[i], other, tangents, 0);
        }
        out += level.words;
    }
#pragma unroll
    for (int k = LOG_GROUP<E> + 5; k < LOG<E>; ++k) {
        if (k >= levels) continue;
        const Level level(dim, k, level_bits, start, row);
        constexpr int ALONE = LOG_GROUP<E> + 5;
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < E; i += 2 * V << (k - ALONE))
                q[i] = coded(out, level, k, place<E>(i, 0), dim, q[i], q[i + (V << (k - ALONE))], tangents, 0);
        out += level.words;
    }
    // the radii, from where they came to lie
    const int block = 1 << levels, each = (dim - 1) / block + 1;
#pragma unroll
    for (int i = 0; i < E; i += 2) {
        const int own = place<E>(i, lane);
        if (own < dim && own % block == 0) blocks[warp][own / block] = q[i];
    }
    __syncwarp();
    out = packed[warp];
    for (int k = 0; k < levels && k < LOG<E>; ++k) {
        const Level level(dim, k, level_bits, start, row);
        store_bits(angles, level.first, level.bits, out, lane);
        out += level.words;
    }
    for (int j = lane; j < each; j += 32)
        store_norm(radii, row * each + j, norm_code(double(blocks[warp][j]) / gain2, e - input_bits, 7), 7);
}

// The inverse: x of magnitude <= limit. factors (levels, 2, TABLE): what a code multiplies a norm by, for the first and
// the second of the pair. gain: 1 / sqrt(m d). damaged: set if a lone coordinate has a code with more than a sign.
template <class T, int E>
__global__ void __launch_bounds__(128, RESIDENT<E>)
    decode(const unsigned short* __restrict__ radii, const unsigned* __restrict__ angles, int heads, long long rows,
           int dim, const unsigned* __restrict__ flips, int levels, const int* __restrict__ level_bits,
           const unsigned long long* __restrict__ start, const float* __restrict__ factors, int input_bits,
           double gain, float limit, T* __restrict__ x, long long head_stride, long long token_stride,
           unsigned* __restrict__ damaged) {
    constexpr int V = GROUP<E>;
    const int lane = threadIdx.x % 32;
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    const int block = 1 << levels, each = (dim - 1) / block + 1;
    unsigned codes[E], most = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) {
        const int own = place<E>(i, lane);
        codes[i] = i % 2 == 0 && own < dim && own % block == 0 ? radii[row * each + own / block] : 0;
        most = max(most, codes[i]);
    }
    most = warp_max(most);
    // the largest radius of a vector is below 2^top; any power does for a zero vector
    const int top = most ? int(most >> 7) - 256 + 1 : 0;
    float q[E];
#pragma unroll
    for (int i = 0; i < E; ++i) q[i] = float(norm_of(codes[i], 7) * wide_power(input_bits - top));

    // as above, from the top down
    constexpr int ALONE = LOG_GROUP<E> + 5;
#pragma unroll
    for (int k = LOG<E> - 1; k >= ALONE; --k) {
        if (k >= levels || lane) continue;
        const Level level(dim, k, level_bits, start, row);
#pragma unroll
        for (int i = 0; i < E; i += 2 * V << (k - ALONE))
            q[i] = parted(angles, level, k, place<E>(i, 0), dim, q[i], factors, q[i + (V << (k - ALONE))], damaged);
    }
#pragma unroll 1
    for (int k = min(levels, ALONE) - 1; k >= LOG_GROUP<E>; --k) {
        const Level level(dim, k, level_bits, start, row);
        const int stride = 1 << (k - LOG_GROUP<E>), rest = lane % (2 * stride);
#pragma unroll
        for (int i = 0; i < E; i += V) {
            float second = 0;
            if (rest == 0) q[i] = parted(angles, level, k, place<E>(i, lane), dim, q[i], factors, second, damaged);
            second = __shfl_xor_sync(ALL, second, stride);
            if (rest == stride) q[i] = second;
        }
    }
#pragma unroll
    for (int k = LOG_GROUP<E> - 1; k >= 0; --k) {
        if (k >= levels) continue;
        const Level level(dim, k, level_bits, start, row);
#pragma unroll
        for (int i = 0; i < E; i += 2 << k)
            q[i] = parted(angles, level, k, place<E>(i, lane), dim, q[i], factors, q[i + (1 << k)], damaged);
    }
    int p[E];
#pragma unroll
    for (int i = 0; i < E; ++i) p[i] = __float2int_rn(q[i]);    // 0 from dim on
    rotate<E>(p, dim, lane);
    flip<E>(p, flips, lane);
    const Gain out_gain(gain * wide_power(top - input_bits), limit);
    float out[E];
    out_gain(p, out);
    const Strides at{head_stride, token_stride, heads};
    give<T, E>(x + at(row), dim, lane, out);
}
