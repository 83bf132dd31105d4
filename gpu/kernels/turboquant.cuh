// What the two kinds of TurboQuant share: a warp's vector to integers, rotated; the cells of its coordinates; points of
// codes.
#pragma once
#include "bits.cuh"
#include "hadamard.cuh"
#include "vectors.cuh"

constexpr int MOST_POINTS = 128;    // positive ones, at 8 bits

// A vector as rotated integers y = M diag(s) n, with N = sum n^2 and its exponent e; false, and `refused` set, if it is
// not finite.
template <class T, int E>
__device__ inline bool rotated(const T* __restrict__ row, int dim, int lane, int input_bits,
                               const unsigned* __restrict__ flips, unsigned* refused, int (&y)[E], long long& squares,
                               int& e) {
    float x[E];
    take<T, E>(row, dim, lane, x);
    if (!integers<E>(x, input_bits, y, e)) {
        if (lane == 0) atomicOr(refused, 1u);
        return false;
    }
    squares = sum_of_squares<E>(y);
    flip<E>(y, flips, lane);
    rotate<E>(y, dim, lane);
    return true;
}

// T_k = floor((P_k + P_{k+1}) R / 2^{f+3}) with R = floor(4 sqrt(m N)), by a warp; 16 m N < 2^53, so that the root is
// exact enough.
__device__ inline void thresholds(const int* __restrict__ points, int half, int dim, int fraction_bits,
                                  long long squares, int lane, int* out) {
    const int m = dim / (dim & -dim);
    const long long r = (long long)sqrt(16.0 * m * double(squares));
    for (int k = lane; k < half - 1; k += 32) out[k] = int((points[k] + points[k + 1]) * r >> (fraction_bits + 3));
}

// #{k : |y| > T_k} of half - 1 thresholds, half a power of two.
__device__ inline unsigned cell(int y, const int* thresholds, int half) {
    const int magnitude = y < 0 ? -y : y;
    unsigned below = 0;
    for (unsigned step = half / 2; step; step /= 2)
        if (magnitude > thresholds[below + step - 1]) below += step;
    return below;
}

// The points of codes without their sign bit, then their opposites; by a block, before a barrier.
__device__ inline void signed_points(const int* __restrict__ points, int half, int* out) {
    for (int k = threadIdx.x; k < half; k += blockDim.x) out[k] = points[k], out[half + k] = -points[k];
}
