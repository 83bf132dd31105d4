// TurboQuant, kind "mse": rotate by random signs and an integer Hadamard matrix, the nearest of 2^bits points for every
// coordinate, dense packing; and back. Equals reference/turboquant.py byte for byte; tests/kernels/test_turboquant.py.
//
// One warp a vector, four a block, the vector in registers (vectors.cuh: E registers a lane). Grid: ceil(rows / 4).
// Vectors are taken token by token, heads within, whatever the strides. Codes are put together in shared memory, 32 E 8
// bits at most, and stored as words; only the words at the ends of a row that is no multiple of 32 bits are shared by
// rows, and ORed.
#include "turboquant.cuh"

// x (heads, tokens, dim) -> norms, codes (zeroed words; the first code at bit `phase`). points: 2^{bits-1} positive
// ones, ascending.
template <class T, int E>
__global__ void __launch_bounds__(128, RESIDENT<E>)
    encode(const T* __restrict__ x, long long head_stride, long long token_stride, int heads, long long rows, int dim,
           const unsigned* __restrict__ flips, const int* __restrict__ points, int bits, int fraction_bits,
           int input_bits, int mantissa_bits, unsigned phase, unsigned short* __restrict__ norms,
           unsigned* __restrict__ codes, unsigned* __restrict__ refused) {
    constexpr int V = GROUP<E>;
    __shared__ unsigned packed[WARPS][row_words(32 * E * 8)];
    __shared__ int limits[WARPS][MOST_POINTS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = (long long)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const Strides at{head_stride, token_stride, heads};
    int y[E], e;
    long long squares;
    if (!rotated<T, E>(x + at(row), dim, lane, input_bits, flips, refused, y, squares, e)) return;

    const int half = 1 << (bits - 1);
    const unsigned long long first = phase + (unsigned long long)row * dim * bits;
    const int shift = first % 32, words = (shift + dim * bits + 31) / 32;
    thresholds(points, half, dim, fraction_bits, squares, lane, limits[warp]);
    for (int w = lane; w < words; w += 32) packed[warp][w] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < E; i += V) {
        unsigned few = 0;
#pragma unroll
        for (int v = 0; v < V; ++v)    // 0 from dim on
            few |= (cell(y[i + v], limits[warp], half) | (y[i + v] < 0 ? half : 0)) << (v * bits);
        if (place<E>(i, lane) < dim) put_bits(packed[warp], shift + place<E>(i, lane) * bits, few);
    }
    __syncwarp();
    store_bits(codes, first, dim * bits, packed[warp], lane);
    if (lane == 0) store_norm(norms, row, norm_code(double(squares), e - input_bits, mantissa_bits), mantissa_bits);
}

// norms, codes -> x (heads, tokens, dim) of magnitude <= limit. unit: what a norm is divided by for the gain, 2^f d
// sqrt(m).
template <class T, int E>
__global__ void __launch_bounds__(128, RESIDENT<E>)
    decode(const unsigned short* __restrict__ norms, const unsigned* __restrict__ codes, int heads, long long rows,
           int dim, const unsigned* __restrict__ flips, const int* __restrict__ points, int bits, int mantissa_bits,
           double unit, float limit, T* __restrict__ x, long long head_stride, long long token_stride) {
    constexpr int V = GROUP<E>;
    __shared__ int table[2 * MOST_POINTS];
    signed_points(points, 1 << (bits - 1), table);
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = (long long)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    int p[E];
#pragma unroll
    for (int i = 0; i < E; i += V) {
        const int at = place<E>(i, lane), many = min(dim - at, V);
        const unsigned few = many > 0 ? get_bits(codes, ((unsigned long long)row * dim + at) * bits, many * bits) : 0;
#pragma unroll
        for (int v = 0; v < V; ++v) p[i + v] = v < many ? table[few >> (v * bits) & ((1u << bits) - 1)] : 0;
    }
    rotate<E>(p, dim, lane);
    flip<E>(p, flips, lane);
    const Gain gain(norm_of(load_norm(norms, row, mantissa_bits), mantissa_bits) / unit, limit);
    float out[E];
    gain(p, out);
    const Strides at{head_stride, token_stride, heads};
    give<T, E>(x + at(row), dim, lane, out);
}
