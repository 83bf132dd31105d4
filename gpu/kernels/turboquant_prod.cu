// TurboQuant, kind "prod": the points of "mse" at bits - 1 bits, and for every coordinate one sign of a Gaussian sketch
// of what they leave. Equals reference/turboquant.py byte for byte; tests/kernels/test_turboquant.py.
//
// encode:  residuals<T, E>   one warp a vector, as in turboquant.cu: norms, codes as bytes, residuals in 14 bits
//          add_signs         S times the residuals (sketch.cuh); the sign becomes the highest bit of its code
//          pack              packing.cu
// decode:  sketched          S^T times the signs, small integers
//          decode<T, E>      one warp a vector: both terms rotated back, times gains in double, rounded once
#include "sketch.cuh"
#include "turboquant.cuh"

// x (heads, tokens, dim) -> norms (rows, 1 or 2), codes (rows, dim), rho (rows, dim). mse_bits may be 0: no points, and
// no norm but the residual's, which is the vector itself. root: 4 sqrt(m). gain2: m d. sketch_bits: |rho| <=
// 2^sketch_bits.
template <class T, int E>
__global__ void __launch_bounds__(128, RESIDENT<E>)
    residuals(const T* __restrict__ x, long long head_stride, long long token_stride, int heads, long long rows,
              int dim, const unsigned* __restrict__ flips, const int* __restrict__ points, int mse_bits,
              int fraction_bits, int input_bits, int sketch_bits, int mantissa_bits, double root, double gain2,
              unsigned short* __restrict__ norms, unsigned char* __restrict__ codes, short* __restrict__ rho,
              unsigned* __restrict__ refused) {
    __shared__ int limits[WARPS][MOST_POINTS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = (long long)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    const Strides at{head_stride, token_stride, heads};
    int y[E], e;
    long long squares;
    if (!rotated<T, E>(x + at(row), dim, lane, input_bits, flips, refused, y, squares, e)) return;

    // r: what the points leave, in units of 2^-(f+2), below 2^42
    long long r[E];
    int unit = e;
    if (mse_bits) {
        const int half = 1 << (mse_bits - 1);
        thresholds(points, half, dim, fraction_bits, squares, lane, limits[warp]);
        __syncwarp();
        const unsigned stored = norm_code(double(squares), e - input_bits, mantissa_bits);
        if (lane == 0) store_norm(norms, 2 * row, stored, mantissa_bits);
        // from the stored norm, so that rounding it leaves no bias
        const long long scale = (long long)(root * (norm_of(stored, mantissa_bits) * wide_power(input_bits - e)));
#pragma unroll
        for (int i = 0; i < E; ++i) {
            r[i] = 0;
            if (place<E>(i, lane) >= dim) continue;
            const unsigned code = cell(y[i], limits[warp], half);
            const int point = points[code];
            r[i] = y[i] * (4ll << fraction_bits) - (y[i] < 0 ? -point : point) * scale;
            codes[row * dim + place<E>(i, lane)] = (unsigned char)(code | (y[i] < 0 ? half : 0));
        }
        unit = e - fraction_bits - 2;
    } else {
#pragma unroll
        for (int i = 0; i < E; ++i) {
            r[i] = y[i];
            if (place<E>(i, lane) < dim) codes[row * dim + place<E>(i, lane)] = 0;
        }
    }
    long long most = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) {
        most = max(most, r[i] < 0 ? -r[i] : r[i]);
    }
    most = warp_max(most);
    const int length = most ? 64 - __clzll(most) : 0;    // 2^{length-1} <= most < 2^length
    const int drop = length - sketch_bits;
    int kept[E];
#pragma unroll
    for (int i = 0; i < E; ++i) {
        // half to even
        kept[i] = drop > 0 ? int((r[i] + (1ll << (drop - 1)) - 1 + (r[i] >> drop & 1)) >> drop)
                           : int(r[i] * (1ll << -drop));
        if (place<E>(i, lane) < dim) rho[row * dim + place<E>(i, lane)] = (short)kept[i];
    }
    const double left = double(sum_of_squares<E>(kept)) / gain2;
    if (lane == 0) {
        const unsigned stored = norm_code(left, unit - input_bits + drop, mantissa_bits);
        store_norm(norms, mse_bits ? 2 * row + 1 : row, stored, mantissa_bits);
    }
}

// codes (rows, dim) |= highest, where the sketch of rho is negative. transposed: S^T, (dim, dim).
__global__ void __launch_bounds__(128, sketching::RESIDENT)
    add_signs(const short* __restrict__ rho, const signed char* __restrict__ transposed, long long rows, int dim,
              int highest, unsigned char* __restrict__ codes) {
    sketching::Sums sums;
    sketching::product(sketching::Integers{rho, dim}, transposed, rows, dim, dim, sums);
    sketching::each(sums, rows, dim, [=](long long row, int column, float sum) {
        if (sum < 0) codes[row * dim + column] |= highest;
    });
}

// S^T q of the signs q, the highest bits of the codes: (rows, dim). sketch: S, (dim, dim).
__global__ void __launch_bounds__(128, sketching::RESIDENT)
    sketched(const unsigned* __restrict__ codes, const signed char* __restrict__ sketch, long long rows, int dim,
             int bits, int* __restrict__ out) {
    sketching::Sums sums;
    sketching::product(sketching::Signs{codes, dim, bits}, sketch, rows, dim, dim, sums);
    sketching::each(sums, rows, dim, [=](long long row, int column, float sum) { out[row * dim + column] = int(sum); });
}

// norms (rows, 1 or 2), codes, back = S^T q -> x (heads, tokens, dim) of magnitude <= limit. bits counts the sign's.
// The gains are norm / unit / root and factor norm / root.
template <class T, int E>
__global__ void __launch_bounds__(128, RESIDENT<E>)
    decode(const unsigned short* __restrict__ norms, const unsigned* __restrict__ codes, const int* __restrict__ back,
           int heads, long long rows, int dim, const unsigned* __restrict__ flips, const int* __restrict__ points,
           int bits, int mantissa_bits, double unit, double factor, double root, float limit, T* __restrict__ x,
           long long head_stride, long long token_stride) {
    constexpr int V = GROUP<E>;
    __shared__ int table[2 * MOST_POINTS];
    if (bits > 1) signed_points(points, 1 << (bits - 2), table);
    __syncthreads();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long row = (long long)blockIdx.x * WARPS + warp;
    if (row >= rows) return;
    int p[E], z[E];
#pragma unroll
    for (int i = 0; i < E; i += V) {
        const int at = place<E>(i, lane), many = min(dim - at, V);
        const unsigned few = many > 0 ? get_bits(codes, ((unsigned long long)row * dim + at) * bits, many * bits) : 0;
#pragma unroll
        for (int v = 0; v < V; ++v) {
            p[i + v] = v < many && bits > 1 ? table[few >> (v * bits) & ((1u << (bits - 1)) - 1)] : 0;
            z[i + v] = v < many ? back[row * dim + at + v] : 0;
        }
    }
    rotate<E>(z, dim, lane);
    flip<E>(z, flips, lane);
    double first = 0, second;
    if (bits > 1) {
        rotate<E>(p, dim, lane);
        flip<E>(p, flips, lane);
        first = norm_of(load_norm(norms, 2 * row, mantissa_bits), mantissa_bits) / unit / root;
        second = factor * norm_of(load_norm(norms, 2 * row + 1, mantissa_bits), mantissa_bits) / root;
    } else {
        second = factor * norm_of(load_norm(norms, row, mantissa_bits), mantissa_bits) / root;
    }
    float out[E];
#pragma unroll
    for (int i = 0; i < E; ++i) {
        const double total = double(p[i]) * first + double(z[i]) * second;
        const float single = float(fmin(fmax(total, -double(limit)), double(limit)));
        out[i] = fminf(fmaxf(single, -limit), limit) + 0.0f;
    }
    const Strides at{head_stride, token_stride, heads};
    give<T, E>(x + at(row), dim, lane, out);
}
