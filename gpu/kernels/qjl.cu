// QJL: keys as the signs of a Gaussian sketch and a norm, values by token between their minimum and maximum. Equals
// reference/qjl.py (values: reference/minmax.py) byte for byte; tests/kernels/test_qjl.py.
//
// keys, encode:    rounded<T, E>     one warp a vector: norms, and the vector as integers of 14 bits or fewer
//                  signs             S times the integers (sketch.cuh), a ballot makes a word of 32 signs
// keys, decode:    decode<T>         S^T times the signs, times the gain
// values:          encode_values<T>, decode_values<T>    one warp a vector, four numbers a lane and step
#include "sketch.cuh"

// x (heads, tokens, dim) -> norms, n (rows, dim) with |n| <= 2^input_bits.
template <class T, int E>
__global__ void __launch_bounds__(128, RESIDENT<E>)
    rounded(const T* __restrict__ x, long long head_stride, long long token_stride, int heads, long long rows, int dim,
            int input_bits, unsigned short* __restrict__ norms, short* __restrict__ n,
            unsigned* __restrict__ refused) {
    const int lane = threadIdx.x % 32;
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    const Strides at{head_stride, token_stride, heads};
    float own[E];
    take<T, E>(x + at(row), dim, lane, own);
    int numbers[E], e;
    if (!integers<E>(own, input_bits, numbers, e)) {
        if (lane == 0) atomicOr(refused, 1u);
        return;
    }
    const long long squares = sum_of_squares<E>(numbers);
    if (lane == 0) store_norm(norms, row, norm_code(double(squares), e - input_bits, 7), 7);
#pragma unroll
    for (int i = 0; i < E; ++i)
        if (place<E>(i, lane) < dim) n[row * dim + place<E>(i, lane)] = (short)numbers[i];
}

// Bit `phase` + row * count + j of the zeroed stream: whether (S n)_j of that row is negative. transposed: S^T, (dim,
// count).
__global__ void __launch_bounds__(128, sketching::RESIDENT)
    signs(const short* __restrict__ n, const signed char* __restrict__ transposed, long long rows, int dim, int count,
          unsigned phase, unsigned* __restrict__ stream) {
    sketching::Sums sums;
    sketching::product(sketching::Integers{n, dim}, transposed, rows, dim, count, sums);
    // lane 2 r + h keeps the word of row r, half h
    const int lane = threadIdx.x % 32;
    unsigned own = 0;
#pragma unroll
    for (int r = 0; r < sketching::EACH; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const unsigned word = __ballot_sync(ALL, sums[r][h] < 0);    // beyond the rows and columns they are 0
            if (lane == 2 * r + h) own = word;
        }
    const long long row = (long long)blockIdx.x * sketching::ROWS + threadIdx.x / 32 * sketching::EACH + lane / 2;
    const int column = blockIdx.y * sketching::COLUMNS + lane % 2 * 32;
    if (lane >= 2 * sketching::EACH || row >= rows || column >= count) return;
    const unsigned long long at = phase + (unsigned long long)row * count + column;
    unsigned* word = stream + at / 32;
    const int shift = at % 32;
    if (shift == 0 && column + 32 <= count) {
        *word = own;
        return;
    }
    atomicOr(word, own << shift);
    const unsigned rest = shift ? own >> (32 - shift) : 0;
    if (rest) atomicOr(word + 1, rest);
}

// norms, signs (rows, count) -> x (heads, tokens, dim) of magnitude <= limit. sketch: S, (count, dim). The gain is
// factor norm.
template <class T>
__global__ void __launch_bounds__(128, sketching::RESIDENT)
    decode(const unsigned short* __restrict__ norms, const unsigned* __restrict__ stream,
           const signed char* __restrict__ sketch, int heads, long long rows, int dim, int count, double factor,
           float limit, T* __restrict__ x, long long head_stride, long long token_stride) {
    sketching::Sums sums;
    sketching::product(sketching::Signs{stream, count, 1}, sketch, rows, count, dim, sums);
    const Strides at{head_stride, token_stride, heads};
    sketching::each(sums, rows, dim, [=](long long row, int column, float sum) {
        const Gain gain(factor * norm_of(norms[row], 7), limit);
        x[at(row) + column] = from_float<T>(gain(int(sum)));
    });
}

// ---- values
// --------------------------------------------------------------------------------------------------------------------

// How one group is worked out: s, z and numbers times `unit`, 1/4 where the group is wide, so that nothing overflows.
struct Group {
    float zero, scale, unit;
    __device__ Group(float z, unsigned code, int bits) {
        const float s = 2 * __uint_as_float(code << 15);
        unit = fabsf(z) >= power(125) || s >= power(125 - bits) ? 0.25f : 1.0f;
        zero = z * unit, scale = s * unit;
    }
};

// The least stored scale >= range / (2^bits - 1): 256 E + F stands for (1 + F/256) 2^(E - 126); 0 for the range 0.
__device__ inline unsigned scale_code(double range, int bits) {
    if (!(range > 0)) return 0;
    const unsigned long long quotient = __double_as_longlong(range / ((1 << bits) - 1));
    const int k = int(quotient >> 52) - 1022;
    const unsigned long long f = (quotient & 0xfffffffffffffull) | 1ull << 52;    // quotient = f 2^{k-53}
    // F = ceil(512 f 2^-53) - 256, carry included
    const int code = (k - 1 + 126) * 256 + int((f + (1ull << 44) - 1) >> 44) - 256;
    return min(max(code, 256), 254 * 256 + 255);
}

// x (heads, tokens, dim) -> of each vector its minimum, the code of its scale, its codes (zeroed words, the first code
// at bit `phase`).
template <class T>
__global__ void __launch_bounds__(128)
    encode_values(const T* __restrict__ x, long long head_stride, long long token_stride, int heads, long long rows,
                  int dim, int bits, unsigned phase, T* __restrict__ zeros, unsigned short* __restrict__ scales,
                  unsigned* __restrict__ codes, unsigned* __restrict__ refused) {
    __shared__ unsigned packed[WARPS][row_words(1024 * 8)];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = (long long)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const Strides at{head_stride, token_stride, heads};
    const T* own = x + at(row);
    float low = to_float(own[0]), high = low;
    bool finite = true;
    for (int i = lane; i < dim; i += 32) {
        const float number = to_float(own[i]);
        finite = finite && (__float_as_uint(number) & 0x7fffffffu) < 0x7f800000u;
        low = fminf(low, number), high = fmaxf(high, number);
    }
    if (!__all_sync(ALL, finite)) {
        if (lane == 0) atomicOr(refused, 1u);
        return;
    }
    low = -warp_max(-low) + 0.0f, high = warp_max(high);    // of zeros of both signs either may have come out
    const unsigned scale = scale_code(double(high) - double(low), bits);
    const Group group(low, scale, bits);
    const float inverse = scale ? 1 / group.scale : 0;

    const unsigned long long first = phase + (unsigned long long)row * dim * bits;
    const int shift = first % 32, words = (shift + dim * bits + 31) / 32;
    for (int w = lane; w < words; w += 32) packed[warp][w] = 0;
    __syncwarp();
    for (int i = 4 * lane; i < dim; i += 4 * 32) {
        unsigned few = 0;
#pragma unroll
        for (int v = 0; v < 4; ++v)
            if (i + v < dim) {
                const float above = to_float(own[i + v]) * group.unit - group.zero;
                few |= unsigned(__float2int_rn(above * inverse)) << (v * bits);
            }
        put_bits(packed[warp], shift + i * bits, few);
    }
    __syncwarp();
    store_bits(codes, first, dim * bits, packed[warp], lane);
    if (lane == 0) zeros[row] = from_float<T>(low), scales[row] = (unsigned short)scale;
}

// The inverse; numbers of magnitude <= limit.
template <class T>
__global__ void __launch_bounds__(128)
    decode_values(const T* __restrict__ zeros, const unsigned short* __restrict__ scales,
                  const unsigned* __restrict__ codes, int heads, long long rows, int dim, int bits, float limit,
                  T* __restrict__ x, long long head_stride, long long token_stride) {
    const int lane = threadIdx.x % 32;
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    const Group group(to_float(zeros[row]) + 0.0f, scales[row], bits);
    const Strides at{head_stride, token_stride, heads};
    T* own = x + at(row);
    for (int i = 4 * lane; i < dim; i += 4 * 32) {
        const int many = min(dim - i, 4);
        const unsigned few = get_bits(codes, ((unsigned long long)row * dim + i) * bits, many * bits);
#pragma unroll
        for (int v = 0; v < 4; ++v) {
            if (v >= many) break;
            const float above = float(few >> (v * bits) & ((1u << bits) - 1)) * group.scale;
            const float number = (above + group.zero) * (1 / group.unit);
            own[i + v] = from_float<T>(fminf(fmaxf(number, -limit), limit));
        }
    }
}
