// Response profiles of one head (kvtheory/risk/profiles.py), and what kvtheory/risk/spectra.py and kvtheory/risk/gram.py make of them,
// without the profiles in memory: with densities b (tokens, queries), values v, outputs o and r_i = sqrt(p_i / m),
//
//   X[i, (j, c)] = r_i b_ij (v_ic - o_jc)        centred
//                  r_i (b_ij v_ic - o_jc)        augmented; v and o then have one more channel, of the constant c
//   densities      exp(z - M) / L x f_i, (tokens, queries)
//   forward        X y, (tokens, columns), of y (queries x channels, columns)
//   adjoint        X^T y in parts, (parts, queries x channels, columns), of y (tokens, columns)
//   gram           sum_j b_ij b_lj ((v_i - o_j).(v_l - o_j) + c2) / m, from (v_i.v_l + c2) P + R, P = sum_j b_ij b_lj,
//                  R = sum_j (e_ij b_lj - b_ij u_lj), u_ij = b_ij v_i.o_j, e_ij = b_ij |o_j|^2 - u_ij
//
// Blocks of 16 x 16 threads for tiles of 64 x 64 sums, 4 x 4 to a thread, 32 terms (gram: 16) in shared memory at a time; a tile of X is
// made there from b, v and o, and forgotten. adjoint: blocks along z share the tokens. gram: tiles on and above the diagonal, mirrored.
// densities: a block for each 64 tokens (logits.cuh).
#include "logits.cuh"

constexpr int SIZE = 64;

template <class T, class A>
__global__ void __launch_bounds__(THREADS, 2)
densities(const T* __restrict__ q, const T* __restrict__ k, const A* __restrict__ tops, const A* __restrict__ inverses,
          const A* __restrict__ factors, A* __restrict__ out, long long rows, long long tokens, int dim, A scale) {
    constexpr int R = Arithmetic<A>::ROWS;
    __shared__ Tile<A> tile;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const long long t0 = (long long)blockIdx.x * TOKENS;
    for (long long r0 = 0; r0 < rows; r0 += SIDE * R) {
        A z[R][MINE];
        multiply<T, A>(z, tile, q, k, rows, tokens, r0, t0, dim);
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const long long t = t0 + tx * MINE + j;
            if (t >= tokens) break;
            const A factor = factors[t];
#pragma unroll
            for (int i = 0; i < R; ++i) {
                const long long row = r0 + ty * R + i;
                if (row < rows)
                    out[t * rows + row] =
                        Arithmetic<A>::exponential(z[i][j] * scale - tops[row]) * inverses[row] * factor;
            }
        }
    }
}

// X, made where it is needed.
template <class A> struct Profiles {
    const A* __restrict__ b;             // (tokens, queries)
    const A* __restrict__ v;             // (tokens, channels)
    const A* __restrict__ o;             // (queries, channels)
    const A* __restrict__ roots;         // (tokens)
    long long tokens;
    int queries, channels;
    bool centred;
    __device__ A at(long long i, int j, int c) const {
        const A own = b[i * queries + j], value = v[i * channels + c], mean = o[(long long)j * channels + c];
        return roots[i] * (centred ? own * (value - mean) : own * value - mean);
    }
};

template <class A> struct Pair64 {
    static constexpr int PAD = 16 / sizeof(A);
    alignas(16) A left[DEPTH][SIZE + PAD];
    alignas(16) A right[DEPTH][SIZE + PAD];
};

template <class A> __device__ inline void accumulate(A (&sums)[MINE][MINE], const Pair64<A>& pair) {
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
#pragma unroll 4
    for (int d = 0; d < DEPTH; ++d) {
        A own[MINE], other[MINE];
        fetch(own, &pair.left[d][ty * MINE]);
        fetch(other, &pair.right[d][tx * MINE]);
#pragma unroll
        for (int i = 0; i < MINE; ++i)
#pragma unroll
            for (int j = 0; j < MINE; ++j) sums[i][j] = Arithmetic<A>::fused(own[i], other[j], sums[i][j]);
    }
}

// (rows, columns) of `from` -> terms d0 ... d0 + 31 of `to`, columns r0 ...; zeros beyond the ends.
template <class A>
__device__ inline void fill(A (&to)[DEPTH][SIZE + 16 / sizeof(A)], const A* __restrict__ from, long long d0,
                            long long rows, int r0, int columns) {
    const int lane = threadIdx.x % SIZE;
    for (int d = threadIdx.x / SIZE; d < DEPTH; d += THREADS / SIZE)
        to[d][lane] = d0 + d < rows && r0 + lane < columns ? from[(d0 + d) * columns + r0 + lane] : A(0);
}

template <class A> __device__ inline void clear(A (&sums)[MINE][MINE]) {
#pragma unroll
    for (int i = 0; i < MINE; ++i)
#pragma unroll
        for (int j = 0; j < MINE; ++j) sums[i][j] = 0;
}

template <class A>
__global__ void __launch_bounds__(THREADS, 1)
forward(const A* __restrict__ b, const A* __restrict__ v, const A* __restrict__ o, const A* __restrict__ roots,
        const A* __restrict__ y, A* __restrict__ out, long long tokens, int queries, int channels, int columns,
        bool centred) {
    __shared__ Pair64<A> pair;
    const Profiles<A> x{b, v, o, roots, tokens, queries, channels, centred};
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE, lane = threadIdx.x % DEPTH;
    const long long t0 = (long long)blockIdx.x * SIZE, width = (long long)queries * channels;
    const int r0 = blockIdx.y * SIZE;
    A sums[MINE][MINE];
    clear(sums);
    for (long long d0 = 0; d0 < width; d0 += DEPTH) {
        const long long d = d0 + lane;
        const int j = int(d / channels), c = int(d % channels);
        for (int i = threadIdx.x / DEPTH; i < SIZE; i += THREADS / DEPTH)
            pair.left[lane][i] = d < width && t0 + i < tokens ? x.at(t0 + i, j, c) : A(0);
        fill<A>(pair.right, y, d0, width, r0, columns);
        __syncthreads();
        accumulate(sums, pair);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i)
#pragma unroll
        for (int j = 0; j < MINE; ++j) {
            const long long t = t0 + ty * MINE + i;
            const int r = r0 + tx * MINE + j;
            if (t < tokens && r < columns) out[t * columns + r] = sums[i][j];
        }
}

template <class A>
__global__ void __launch_bounds__(THREADS, 1)
adjoint(const A* __restrict__ b, const A* __restrict__ v, const A* __restrict__ o, const A* __restrict__ roots,
        const A* __restrict__ y, A* __restrict__ out, long long tokens, long long part, int queries, int channels,
        int columns, bool centred) {
    __shared__ Pair64<A> pair;
    const Profiles<A> x{b, v, o, roots, tokens, queries, channels, centred};
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE, lane = threadIdx.x % SIZE;
    const long long w0 = (long long)blockIdx.x * SIZE, width = (long long)queries * channels;
    const long long begin = blockIdx.z * part, end = begin + part < tokens ? begin + part : tokens;
    const int r0 = blockIdx.y * SIZE;
    const long long w = w0 + lane;
    const int j = int(w / channels), c = int(w % channels);
    A sums[MINE][MINE];
    clear(sums);
    for (long long d0 = begin; d0 < end; d0 += DEPTH) {
        for (int d = threadIdx.x / SIZE; d < DEPTH; d += THREADS / SIZE)
            pair.left[d][lane] = w < width && d0 + d < end ? x.at(d0 + d, j, c) : A(0);
        fill<A>(pair.right, y, d0, end, r0, columns);
        __syncthreads();
        accumulate(sums, pair);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i)
#pragma unroll
        for (int k = 0; k < MINE; ++k) {
            const long long at = w0 + ty * MINE + i;
            const int r = r0 + tx * MINE + k;
            if (at < width && r < columns) out[(blockIdx.z * width + at) * columns + r] = sums[i][k];
        }
}

constexpr int TERMS = 16;
template <class A> struct Four {
    static constexpr int PAD = 16 / sizeof(A);
    alignas(16) A bi[TERMS][SIZE + PAD];
    alignas(16) A ei[TERMS][SIZE + PAD];
    alignas(16) A bl[TERMS][SIZE + PAD];
    alignas(16) A ul[TERMS][SIZE + PAD];
};

// Rows of `from` (count, width) from r0 on, terms d0 ... d0 + 15, turned.
template <class A>
__device__ inline void turn_in(A (&to)[TERMS][SIZE + 16 / sizeof(A)], const A* __restrict__ from, long long r0,
                               long long count, int d0, int width) {
    const int lane = threadIdx.x % TERMS;
    for (int i = threadIdx.x / TERMS; i < SIZE; i += THREADS / TERMS)
        to[lane][i] = r0 + i < count && d0 + lane < width ? from[(r0 + i) * width + d0 + lane] : A(0);
}

template <class A>
__global__ void __launch_bounds__(THREADS, 1)
gram(const A* __restrict__ b, const A* __restrict__ e, const A* __restrict__ u, const A* __restrict__ v,
     A* __restrict__ out, long long tokens, int queries, int channels, A c2) {
    if (blockIdx.x < blockIdx.y) return;
    __shared__ Four<A> four;
    const int tx = threadIdx.x % SIDE, ty = threadIdx.x / SIDE;
    const long long i0 = (long long)blockIdx.y * SIZE, l0 = (long long)blockIdx.x * SIZE;
    A values[MINE][MINE], products[MINE][MINE], rest[MINE][MINE];
    clear(values), clear(products), clear(rest);
    for (int c0 = 0; c0 < channels; c0 += TERMS) {
        turn_in<A>(four.bi, v, i0, tokens, c0, channels);
        turn_in<A>(four.bl, v, l0, tokens, c0, channels);
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < TERMS; ++d) {
            A own[MINE], other[MINE];
            fetch(own, &four.bi[d][ty * MINE]);
            fetch(other, &four.bl[d][tx * MINE]);
#pragma unroll
            for (int i = 0; i < MINE; ++i)
#pragma unroll
                for (int l = 0; l < MINE; ++l) values[i][l] = Arithmetic<A>::fused(own[i], other[l], values[i][l]);
        }
        __syncthreads();
    }
    for (int j0 = 0; j0 < queries; j0 += TERMS) {
        turn_in<A>(four.bi, b, i0, tokens, j0, queries);
        turn_in<A>(four.ei, e, i0, tokens, j0, queries);
        turn_in<A>(four.bl, b, l0, tokens, j0, queries);
        turn_in<A>(four.ul, u, l0, tokens, j0, queries);
        __syncthreads();
#pragma unroll 2
        for (int d = 0; d < TERMS; ++d) {
            A bi[MINE], ei[MINE], bl[MINE], ul[MINE];
            fetch(bi, &four.bi[d][ty * MINE]);
            fetch(ei, &four.ei[d][ty * MINE]);
            fetch(bl, &four.bl[d][tx * MINE]);
            fetch(ul, &four.ul[d][tx * MINE]);
#pragma unroll
            for (int i = 0; i < MINE; ++i)
#pragma unroll
                for (int l = 0; l < MINE; ++l) {
                    products[i][l] = Arithmetic<A>::fused(bi[i], bl[l], products[i][l]);
                    rest[i][l] = Arithmetic<A>::fused(ei[i], bl[l], rest[i][l]);
                    rest[i][l] = Arithmetic<A>::fused(-bi[i], ul[l], rest[i][l]);
                }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i)
#pragma unroll
        for (int l = 0; l < MINE; ++l) {
            const long long at = i0 + ty * MINE + i, to = l0 + tx * MINE + l;
            if (at > to || to >= tokens) continue;
            const A sum = Arithmetic<A>::fused(values[i][l] + c2, products[i][l], rest[i][l]) / A(queries);
            out[at * tokens + to] = sum;
            out[to * tokens + at] = sum;
        }
}
