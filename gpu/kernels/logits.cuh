// A tile of logits q.k of one KV head: 16 R queries (rows) by 64 tokens, by a block of 16 x 16 threads, of which each has R rows by 4 tokens.
// Sums are of A (float, or double), channel after channel by fmaf or fma, so each is rounded `dim` times.
#pragma once
#include "common.cuh"

constexpr int SIDE = 16, DEPTH = 32, MINE = 4, TOKENS = SIDE * MINE, THREADS = SIDE * SIDE;

template <class A> struct Arithmetic;
template <> struct Arithmetic<float> {
    static constexpr int ROWS = 8;                       // of a thread: 32 sums for 3 vectors read from shared memory
    static constexpr float LOWEST = -3.402823466e38f;
    static __device__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
    static __device__ float exponential(float x) { return expf(x); }
};
template <> struct Arithmetic<double> {
    static constexpr int ROWS = 4;
    static constexpr double LOWEST = -1.7976931348623157e308;
    static __device__ double fused(double a, double b, double c) { return fma(a, b, c); }
    static __device__ double exponential(double x) { return exp(x); }
};

template <class A, class T> __device__ inline A widen(T x) { return (A)to_float(x); }
template <> __device__ inline double widen<double, double>(double x) { return x; }

// N numbers in a row, by accesses of 16 bytes.
template <class A, int N> __device__ inline void fetch(A (&to)[N], const A* from) {
    constexpr int EACH = 16 / sizeof(A);
    static_assert(N % EACH == 0, "whole vectors");
#pragma unroll
    for (int i = 0; i < N; i += EACH) {
        const Vec<A, EACH> some = load<EACH>(from + i);
#pragma unroll
        for (int j = 0; j < EACH; ++j) to[i + j] = some.v[j];
    }
}

// Channels first, so that a thread's numbers lie side by side; rows of 16 bytes more than they hold, against bank conflicts.
template <class A> struct Tile {
    static constexpr int PAD = 16 / sizeof(A), ROWS = SIDE * Arithmetic<A>::ROWS;
    alignas(16) A rows[DEPTH][ROWS + PAD];
    alignas(16) A tokens[DEPTH][TOKENS + PAD];
};

// Rows r0 ... of `q` (rows, dim) and tokens t0 ... of `k` (tokens, dim) -> z; zeros beyond the ends. All threads of the block, which may
// read what it last wrote to `tile` no more.
template <class T, class A>
__device__ inline void multiply(A (&z)[Arithmetic<A>::ROWS][MINE], Tile<A>& tile, const T* __restrict__ q,
                                const T* __restrict__ k, long long rows, long long tokens, long long r0, long long t0,
                                int dim) {
    constexpr int R = Arithmetic<A>::ROWS;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE, lane = threadIdx.x % DEPTH;
#pragma unroll
    for (int i = 0; i < R; ++i)
#pragma unroll
        for (int j = 0; j < MINE; ++j) z[i][j] = 0;
    for (int c0 = 0; c0 < dim; c0 += DEPTH) {
        const bool inside = c0 + lane < dim;
        for (int i = threadIdx.x / DEPTH; i < SIDE * R; i += THREADS / DEPTH)
            tile.rows[lane][i] = inside && r0 + i < rows ? widen<A>(q[(r0 + i) * dim + c0 + lane]) : A(0);
        for (int i = threadIdx.x / DEPTH; i < TOKENS; i += THREADS / DEPTH)
            tile.tokens[lane][i] = inside && t0 + i < tokens ? widen<A>(k[(t0 + i) * dim + c0 + lane]) : A(0);
        __syncthreads();
#pragma unroll 4
        for (int c = 0; c < DEPTH; ++c) {
            A own[R], other[MINE];
            fetch(own, &tile.rows[c][ty * R]);
            fetch(other, &tile.tokens[c][tx * MINE]);
#pragma unroll
            for (int i = 0; i < R; ++i)
#pragma unroll
                for (int j = 0; j < MINE; ++j) z[i][j] = Arithmetic<A>::fused(own[i], other[j], z[i][j]);
        }
        __syncthreads();
    }
}

// Who sees whom: query j at queries[j] the tokens at queries[j] - window < position <= queries[j]; all, where nothing is placed.
struct Places {
    const long long* __restrict__ tokens;
    const long long* __restrict__ queries;
    long long window;
    bool placed;
};
enum Sight { SEEN, BEHIND, AHEAD };                      // BEHIND: older than the window; AHEAD: not there yet
__device__ inline Sight sight(long long query, long long token, long long window) {
    const long long before = query - token;
    return before < 0 ? AHEAD : before < window ? SEEN : BEHIND;
}
