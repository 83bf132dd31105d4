// What queries pay each token, summed over the queries, without queries x tokens in memory: the scores of reference/snapkv.py (sums of
// attention) and of reference/scissorhands.py (how often attention was below a threshold).
//
//   statistics   of each query and chunk of tokens: M = max z and L = sum exp(z - M), z = scale q.k, over the tokens that it sees
//   columns      of each token: the sum over queries of exp(z - M) / L (COUNT false), or how many of these are below the query's threshold,
//                and how many are so near to it that rounding may have decided (COUNT true)
//   norms        the largest ||x||^2 of all vectors, for the bound on rounding
//
// Layout: q (kv_heads, rows, dim), where rows are query heads x queries of a KV head, and k (kv_heads, tokens, dim), row-major. Blocks of 256
// threads (logits.cuh), two on a processor: for three, ptxas spills. statistics: a block for each chunk, tile of rows and head; columns: one for each 64 tokens of a head, which goes through
// all rows, so no atomics, and the order of additions is fixed. norms: a warp for each vector.
#include "logits.cuh"

template <class T, class A>
__global__ void __launch_bounds__(THREADS, 2)
statistics(const T* __restrict__ q, const T* __restrict__ k, const long long* __restrict__ token_positions,
           const long long* __restrict__ query_positions, A* __restrict__ tops, A* __restrict__ totals,
           unsigned* __restrict__ refused, long long rows, long long tokens, long long chunk, long long chunks, int dim,
           int queries, A scale, long long window, bool placed, bool own_positions) {
    constexpr int R = Arithmetic<A>::ROWS;
    __shared__ Tile<A> tile;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const long long row_tiles = (rows + SIDE * R - 1) / (SIDE * R), rest = blockIdx.x / chunks;
    const long long begin = blockIdx.x % chunks * chunk, head = rest / row_tiles, r0 = rest % row_tiles * (SIDE * R);
    const long long end = begin + chunk < tokens ? begin + chunk : tokens;
    const Places places{token_positions + (own_positions ? head * tokens : 0), query_positions, window, placed};
    A top[R], total[R];
#pragma unroll
    for (int i = 0; i < R; ++i) top[i] = Arithmetic<A>::LOWEST, total[i] = 0;
    bool bad = false;
    for (long long t0 = begin; t0 < end; t0 += TOKENS) {
        A z[R][MINE];
        multiply<T, A>(z, tile, q + head * rows * dim, k + head * tokens * dim, rows, end, r0, t0, dim);
        long long at[MINE];
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const long long t = t0 + tx * MINE + j;
            at[j] = placed && t < end ? places.tokens[t] : 0;
        }
#pragma unroll
        for (int i = 0; i < R; ++i) {
            const long long row = r0 + ty * R + i;
            const long long here = placed && row < rows ? places.queries[row % queries] : 0;
            A highest = top[i];
            bool seen[MINE];
#pragma unroll
            for (int j = 0; j < MINE; ++j) {
                z[i][j] *= scale;
                const bool inside = row < rows && t0 + tx * MINE + j < end;
                bad |= inside && !(z[i][j] - z[i][j] == 0);
                seen[j] = inside && (!placed || sight(here, at[j], window) == SEEN);
                if (seen[j] && z[i][j] > highest) highest = z[i][j];
            }
            total[i] *= Arithmetic<A>::exponential(top[i] - highest);
            top[i] = highest;
#pragma unroll
            for (int j = 0; j < MINE; ++j)
                if (seen[j]) total[i] += Arithmetic<A>::exponential(z[i][j] - highest);
        }
    }
    if (bad) atomicOr(refused, 1u);
#pragma unroll
    for (int i = 0; i < R; ++i) {
        for (int d = SIDE / 2; d; d /= 2) {
            const A top2 = __shfl_xor_sync(ALL, top[i], d), total2 = __shfl_xor_sync(ALL, total[i], d);
            const A highest = top2 > top[i] ? top2 : top[i];
            total[i] = total[i] * Arithmetic<A>::exponential(top[i] - highest) +
                       total2 * Arithmetic<A>::exponential(top2 - highest);
            top[i] = highest;
        }
        const long long row = r0 + ty * R + i;
        if (tx == 0 && row < rows) {
            const long long to = (head * chunks + begin / chunk) * rows + row;
            tops[to] = top[i], totals[to] = total[i];
        }
    }
}

template <class A, bool COUNT> struct Sum { typedef A type; };
template <class A> struct Sum<A, true> { typedef int type; };

template <class T, class A, bool COUNT>
__global__ void __launch_bounds__(THREADS, 2)
columns(const T* __restrict__ q, const T* __restrict__ k, const long long* __restrict__ token_positions,
        const long long* __restrict__ query_positions, const A* __restrict__ tops,      // (kv_heads, rows): M
        const A* __restrict__ inverses,                                                 // (kv_heads, rows): 1 / L, 0 for a row that sees nothing
        const A* __restrict__ thresholds,                                               // (queries)
        typename Sum<A, COUNT>::type* __restrict__ out, int* __restrict__ doubts,       // (kv_heads, tokens)
        long long rows, long long tokens, int dim, int queries, A scale, A near, long long window, bool placed,
        bool own_positions) {
    typedef typename Sum<A, COUNT>::type S;
    constexpr int R = Arithmetic<A>::ROWS;
    __shared__ Tile<A> tile;
    __shared__ S partial[SIDE][TOKENS];
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const long long tiles = (tokens + TOKENS - 1) / TOKENS, head = blockIdx.x / tiles, t0 = blockIdx.x % tiles * TOKENS;
    const Places places{token_positions + (own_positions ? head * tokens : 0), query_positions, window, placed};
    S sum[MINE];
    int doubt[MINE];
    long long at[MINE];
#pragma unroll
    for (int j = 0; j < MINE; ++j) {
        const long long t = t0 + tx * MINE + j;
        sum[j] = 0, doubt[j] = 0, at[j] = placed && t < tokens ? places.tokens[t] : 0;
    }
    for (long long r0 = 0; r0 < rows; r0 += SIDE * R) {
        A z[R][MINE];
        multiply<T, A>(z, tile, q + head * rows * dim, k + head * tokens * dim, rows, tokens, r0, t0, dim);
#pragma unroll
        for (int i = 0; i < R; ++i) {
            const long long row = r0 + ty * R + i;
            if (row >= rows) break;
            const long long here = placed ? places.queries[row % queries] : 0;
            const A top = tops[head * rows + row], inverse = inverses[head * rows + row];
            const A threshold = COUNT ? thresholds[row % queries] : A(0);
            if (inverse == 0) continue;
#pragma unroll
            for (int j = 0; j < MINE; ++j) {
                const Sight how = placed ? sight(here, at[j], window) : SEEN;
                if (how == AHEAD) continue;
                const A a = how == SEEN ? Arithmetic<A>::exponential(z[i][j] * scale - top) * inverse : A(0);
                if (COUNT) {
                    const A apart = a > threshold ? a - threshold : threshold - a;
                    sum[j] += a < threshold;
                    doubt[j] += how == SEEN && apart <= near * threshold;
                } else {
                    sum[j] += a;
                }
            }
        }
    }
#pragma unroll
    for (int j = 0; j < MINE; ++j) partial[ty][tx * MINE + j] = sum[j];
    __syncthreads();
    const long long t = t0 + threadIdx.x;
    if (threadIdx.x < TOKENS && t < tokens) {
        S all = 0;
        for (int y = 0; y < SIDE; ++y) all += partial[y][threadIdx.x];
        out[head * tokens + t] = all;
    }
    if (!COUNT) return;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < MINE; ++j) partial[ty][tx * MINE + j] = doubt[j];
    __syncthreads();
    if (threadIdx.x < TOKENS && t < tokens) {
        int all = 0;
        for (int y = 0; y < SIDE; ++y) all += (int)partial[y][threadIdx.x];
        doubts[head * tokens + t] = all;
    }
}

// Numbers >= 0 are ordered as their bits are; NaN comes above all.
template <class T>
__global__ void __launch_bounds__(THREADS)
norms(const T* __restrict__ x, unsigned long long* __restrict__ largest, long long count, int dim) {
    const long long v = ((long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (v >= count) return;
    double square = 0;
    for (int c = lane_of_thread(); c < dim; c += 32) {
        const double own = widen<double>(x[v * dim + c]);
        square += own * own;
    }
    square = warp_sum(square);
    if (lane_of_thread() == 0) atomicMax(largest, (unsigned long long)__double_as_longlong(square));
}
