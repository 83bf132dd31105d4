// What all transform coders share (reference/transform_coding/stacked.py, basis.py, reference/rotary.py): a token of a layer as one
// vector, and a basis there and back. The same numbers to the last bit as the reference, on any machine: integers are summed as integers,
// and everything else is a binary64 operation that rounds once, in the reference's order. But for `project`: the reference leaves its order
// of summation to BLAS, so here it is one that every machine has, and a coefficient is the reference's to rounding.
//
//   any_bad     whether an array holds NaN, inf, or a number larger than allowed
//   stack       keys or values (heads, tokens, dim) -> columns of stacked vectors (count, width), RoPE undone
//   project     z (count, depth) and a (columns, depth) -> y_c = (...((z_0 a_c0 + z_1 a_c1) + z_2 a_c2) + ...), every * and + rounded
//   product     integers y (count, columns) -> x_i = g 2^{e_i} sum_c m_ic y_c + mean_i, at places of stacked vectors (count, width)
//   unstack     columns of stacked vectors -> keys or values, RoPE applied, rounded to their element type
//
// Grid: stack and unstack a warp for each token, lanes along channels (a lane's angle serves all heads); project and product a block of
// 16 x 16 threads for 64 tokens and 64 coefficients or rows, 4 x 4 sums to a thread, tiles of 32 terms in shared memory.
#include "common.cuh"
#include "norms.cuh"

// ---- element types -----------------------------------------------------------------------------------------------------
template <class T> __device__ inline double widened(T x) { return (double)to_float(x); }
template <> __device__ inline double widened(double x) { return x; }

// Rounded to the element type as a decoder has it: at most the largest number, through binary32, a zero as +0.
template <class T> __device__ inline T rounded(double x, double largest) {
    const T y = from_float<T>((float)fmin(fmax(x, -largest), largest));
    return to_float(y) == 0 ? from_float<T>(0.0f) : y;
}
template <> __device__ inline double rounded(double x, double largest) {
    const double y = fmin(fmax(x, -largest), largest);
    return y == 0 ? 0.0 : y;
}

// bad[0] becomes 1 where a number is NaN or inf, or larger than `most` in magnitude.
template <class T>
__global__ void __launch_bounds__(256)
any_bad(const T* __restrict__ x, unsigned* __restrict__ bad, double most, unsigned long long count) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        const double v = widened(x[i]);
        if (!(v - v == 0) || fabs(v) > most) {
            atomicOr(bad, 1u);
            return;
        }
    }
}

// ---- RoPE: angles are fractions of a turn in 64 bits, sines and cosines Taylor polynomials by Horner's rule ------------------
struct Angle { double cos, sin; };

__device__ inline Angle angle_at(unsigned long long turns, long long position) {
    const unsigned long long u = turns * (unsigned long long)position;
    const unsigned long long quarter = (u + (1ull << 61)) >> 62;
    const double x = (double)(long long)(u - (quarter << 62)) * 0x1.921fb54442d18p-62;     // 2 pi 2^-64
    const double s = x * x;
    double c = 1.0 / 20922789888000.0, d = 1.0 / 355687428096000.0;                        // 1/16!, 1/17!
    c = -1.0 / 87178291200.0 + s * c, d = -1.0 / 1307674368000.0 + s * d;
    c = 1.0 / 479001600.0 + s * c, d = 1.0 / 6227020800.0 + s * d;
    c = -1.0 / 3628800.0 + s * c, d = -1.0 / 39916800.0 + s * d;
    c = 1.0 / 40320.0 + s * c, d = 1.0 / 362880.0 + s * d;
    c = -1.0 / 720.0 + s * c, d = -1.0 / 5040.0 + s * d;
    c = 1.0 / 24.0 + s * c, d = 1.0 / 120.0 + s * d;
    c = -1.0 / 2.0 + s * c, d = -1.0 / 6.0 + s * d;
    c = 1.0 + s * c, d = x * (1.0 + s * d);
    const Angle turned = quarter & 1 ? Angle{-d, c} : Angle{c, d};
    return quarter & 2 ? Angle{-turned.cos, -turned.sin} : turned;
}

// Tokens first ... first + count - 1 of `in` -> x[., column + head dim + channel]. positions (count), or (heads, count) where each head
// has its own; pairs = 0: no RoPE.
template <class T>
__global__ void __launch_bounds__(128)
stack(const T* __restrict__ in, double* __restrict__ x, const unsigned long long* __restrict__ turns,
      const long long* __restrict__ positions, double scaling, unsigned long long tokens, unsigned long long first,
      unsigned long long count, unsigned heads, unsigned dim, unsigned width, unsigned column, unsigned pairs,
      bool interleaved, bool own_positions) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    double* to = x + t * width + column;
    for (unsigned j = threadIdx.x % 32; j < pairs; j += 32) {
        const unsigned a = interleaved ? 2 * j : j, b = interleaved ? 2 * j + 1 : j + pairs;
        Angle angle;
        for (unsigned h = 0; h < heads; ++h) {
            if (h == 0 || own_positions) angle = angle_at(turns[j], positions[h * count * own_positions + t]);
            const T* from = in + (h * tokens + first + t) * dim;
            const double p = widened(from[a]), q = widened(from[b]);
            to[(size_t)h * dim + a] = (p * angle.cos + q * angle.sin) / scaling;
            to[(size_t)h * dim + b] = (q * angle.cos - p * angle.sin) / scaling;
        }
    }
    for (unsigned c = 2 * pairs + threadIdx.x % 32; c < dim; c += 32)
        for (unsigned h = 0; h < heads; ++h) to[(size_t)h * dim + c] = widened(in[(h * tokens + first + t) * dim + c]);
}

// The inverse: x -> tokens first ... first + count - 1 of `out`. Six blocks on a processor are enough: for more, ptxas of sm_120 spills.
template <class T>
__global__ void __launch_bounds__(128, 6)
unstack(const double* __restrict__ x, T* __restrict__ out, const unsigned long long* __restrict__ turns,
        const long long* __restrict__ positions, double scaling, double largest, unsigned long long tokens,
        unsigned long long first, unsigned long long count, unsigned heads, unsigned dim, unsigned width, unsigned column,
        unsigned pairs, bool interleaved, bool own_positions) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    const double* from = x + t * width + column;
    for (unsigned j = threadIdx.x % 32; j < pairs; j += 32) {
        const unsigned a = interleaved ? 2 * j : j, b = interleaved ? 2 * j + 1 : j + pairs;
        Angle angle;
        for (unsigned h = 0; h < heads; ++h) {
            if (h == 0 || own_positions) angle = angle_at(turns[j], positions[h * count * own_positions + t]);
            const double p = from[(size_t)h * dim + a], q = from[(size_t)h * dim + b];
            T* to = out + (h * tokens + first + t) * dim;
            to[a] = rounded<T>((p * angle.cos - q * angle.sin) * scaling, largest);
            to[b] = rounded<T>((q * angle.cos + p * angle.sin) * scaling, largest);
        }
    }
    for (unsigned c = 2 * pairs + threadIdx.x % 32; c < dim; c += 32)
        for (unsigned h = 0; h < heads; ++h)
            out[(h * tokens + first + t) * dim + c] = rounded<T>(from[(size_t)h * dim + c], largest);
}

// ---- analysis -----------------------------------------------------------------------------------------------------------
constexpr int TILE = 64, DEPTH = 32, SIDE = 16, MINE = TILE / SIDE;

__global__ void __launch_bounds__(SIDE * SIDE)
project(const double* __restrict__ z, const double* __restrict__ a, double* __restrict__ y, unsigned long long count, unsigned columns,
        unsigned depth) {
    __shared__ double tokens[DEPTH][TILE + 1];
    __shared__ double entries[DEPTH][TILE + 1];
    const unsigned thread = threadIdx.x, tx = thread % SIDE, ty = thread / SIDE, k = thread % DEPTH;
    const unsigned long long t0 = (unsigned long long)blockIdx.x * TILE;
    const unsigned c0 = blockIdx.y * TILE;
    double sums[MINE][MINE] = {};
    for (unsigned k0 = 0; k0 < depth; k0 += DEPTH) {
        const unsigned terms = min(depth - k0, (unsigned)DEPTH);
        if (k < terms)
            for (unsigned i = thread / DEPTH; i < TILE; i += SIDE * SIDE / DEPTH) {
                tokens[k][i] = t0 + i < count ? z[(t0 + i) * depth + k0 + k] : 0.0;
                entries[k][i] = c0 + i < columns ? a[(size_t)(c0 + i) * depth + k0 + k] : 0.0;
            }
        __syncthreads();
        for (unsigned d = 0; d < terms; ++d)
            for (int i = 0; i < MINE; ++i) {
                const double own = tokens[d][ty + SIDE * i];
                for (int j = 0; j < MINE; ++j) sums[i][j] = sums[i][j] + own * entries[d][tx + SIDE * j];
            }
        __syncthreads();
    }
    for (int i = 0; i < MINE; ++i) {
        const unsigned long long t = t0 + ty + SIDE * i;
        if (t >= count) break;
        for (int j = 0; j < MINE; ++j) {
            const unsigned c = c0 + tx + SIDE * j;
            if (c < columns) y[t * columns + c] = sums[i][j];
        }
    }
}

// ---- synthesis -----------------------------------------------------------------------------------------------------------
// An exact sum of products m y, |m| < 2^15, of at most 2^16 of them: in 64 bits where |y| < 2^31, else (|y| < 2^47) in two halves.
template <class Y> struct Sum;
template <> struct Sum<int> {
    long long total = 0;
    __device__ void add(int m, int y) { total += (long long)m * y; }
    __device__ double value() const { return (double)total; }                  // rounds once
};
template <> struct Sum<long long> {
    long long high = 0, low = 0;
    __device__ void add(int m, long long y) { high += m * (y >> 16), low += m * (y & 0xffff); }
    __device__ double value() const { return (double)high * 65536.0 + (double)low; }       // both exact: so does their sum
};

template <class Y>
__global__ void __launch_bounds__(SIDE * SIDE)
product(const Y* __restrict__ y,                     // (count, stride), this basis' columns from column `from` on
        const short* __restrict__ matrix,            // m (rows, columns)
        const int* __restrict__ exponents,           // e (rows)
        const float* __restrict__ means,             // (rows)
        const int* __restrict__ places,              // (rows)
        const unsigned short* __restrict__ norms,    // of scales (count, units), this one's in column `unit`; units = 0: g = 1
        double* __restrict__ x,                      // (count, width)
        unsigned long long count, unsigned rows, unsigned columns, unsigned stride, unsigned from, unsigned width, unsigned units,
        unsigned unit) {
    __shared__ Y tokens[DEPTH][TILE + 1];
    __shared__ int entries[DEPTH][TILE + 1];
    const unsigned thread = threadIdx.x, tx = thread % SIDE, ty = thread / SIDE;
    const unsigned long long t0 = (unsigned long long)blockIdx.x * TILE;
    const unsigned r0 = blockIdx.y * TILE;
    Sum<Y> sums[MINE][MINE];
    for (unsigned c0 = 0; c0 < columns; c0 += DEPTH) {
        const unsigned depth = min(columns - c0, (unsigned)DEPTH), k = thread % DEPTH;
        if (k < depth)
            for (unsigned i = thread / DEPTH; i < TILE; i += SIDE * SIDE / DEPTH) {
                tokens[k][i] = t0 + i < count ? y[(t0 + i) * stride + from + c0 + k] : 0;
                entries[k][i] = r0 + i < rows ? matrix[(size_t)(r0 + i) * columns + c0 + k] : 0;
            }
        __syncthreads();
        for (unsigned d = 0; d < depth; ++d) {
            int m[MINE];
            for (int j = 0; j < MINE; ++j) m[j] = entries[d][tx + SIDE * j];
            for (int i = 0; i < MINE; ++i) {
                const Y own = tokens[d][ty + SIDE * i];
                for (int j = 0; j < MINE; ++j) sums[i][j].add(m[j], own);
            }
        }
        __syncthreads();
    }
    constexpr double MOST = 0x1p900;                 // beyond is no encoder's, and RoPE would make NaN of inf
    for (int i = 0; i < MINE; ++i) {
        const unsigned long long t = t0 + ty + SIDE * i;
        if (t >= count) break;
        const double gain = units ? norm(norms[t * units + unit]) : 1.0;
        for (int j = 0; j < MINE; ++j) {
            const unsigned row = r0 + tx + SIDE * j;
            if (row >= rows) break;
            const double sum = sums[i][j].value() * gain * power(exponents[row]);
            x[t * width + places[row]] = fmin(fmax(sum, -MOST), MOST) + (double)means[row];
        }
    }
}
