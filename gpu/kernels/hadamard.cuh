// The integer rotation of reference/hadamard.py in a warp's registers (vectors.cuh): M = K_m (x) H_B with d = m B, B
// the largest power of two in d, K_m = m I - 2 J. M is symmetric, so that this is its inverse too, up to m d. No sum
// leaves 32 bits.
#pragma once
#include "vectors.cuh"

namespace rotation {

template <int E> __device__ inline void butterfly(int (&y)[E], int stride) {
#pragma unroll
    for (int e = 0; e < E; ++e)
        if (!(e & stride)) {
            const int a = y[e], b = y[e | stride];
            y[e] = a + b, y[e | stride] = a - b;
        }
}

template <int E> __device__ inline void join(int (&s)[E], int stride) {
#pragma unroll
    for (int e = 0; e < E; ++e)
        if (!(e & stride)) s[e] = s[e | stride] = s[e] + s[e | stride];
}

}  // namespace rotation

// y <- M y. Coordinates from dim on are 0 before and after.
template <int E> __device__ inline void rotate(int (&y)[E], int dim, int lane) {
    constexpr int V = GROUP<E>;
    const int block = dim & -dim, m = dim / block;
    // neighbours in a group; lanes, 1 to 16 groups apart; groups of a lane, 32 groups apart and more
#pragma unroll
    for (int stride = 1; stride < V; stride <<= 1)
        if (stride < block) rotation::butterfly(y, stride);
#pragma unroll 1
    for (int stride = 1; stride < 32 && stride * V < block; stride <<= 1)
#pragma unroll
        for (int e = 0; e < E; ++e) {
            const int other = __shfl_xor_sync(ALL, y[e], stride);
            y[e] = lane & stride ? other - y[e] : y[e] + other;
        }
#pragma unroll
    for (int stride = V; stride < E; stride <<= 1)
        if (stride * 32 < block) rotation::butterfly(y, stride);
    if (m == 1) return;
    // s: the sum over the m blocks; the strides that are left join them
    int s[E];
#pragma unroll
    for (int e = 0; e < E; ++e) s[e] = y[e];
#pragma unroll
    for (int stride = 1; stride < V; stride <<= 1)
        if (stride >= block) rotation::join(s, stride);
#pragma unroll 1
    for (int stride = block < V ? 1 : block / V; stride < 32; stride <<= 1)
#pragma unroll
        for (int e = 0; e < E; ++e) s[e] += __shfl_xor_sync(ALL, s[e], stride);
#pragma unroll
    for (int stride = V; stride < E; stride <<= 1)
        if (stride * 32 >= block) rotation::join(s, stride);
#pragma unroll
    for (int e = 0; e < E; ++e) y[e] = place<E>(e, lane) < dim ? m * y[e] - 2 * s[e] : 0;
}
