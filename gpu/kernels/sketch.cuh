// Products with the sketch S, an integer matrix of entries within 127 (reference/sketch.py), tiled through shared
// memory.
//
// A block of four warps works out 32 rows x 64 columns: a warp eight rows, a lane the columns l and l + 32, 16 sums in
// registers. Terms and sums are integers of at most 2^24 in floats: exact, in any order. Grid: ceil(rows / 32) x
// ceil(columns / 64).
#pragma once
#include "bits.cuh"
#include "vectors.cuh"

namespace sketching {

constexpr int ROWS = 32, COLUMNS = 64, DEPTH = 32, EACH = ROWS / WARPS, RESIDENT = 4;

using Sums = float[EACH][2];

// sums[r][h] = sum_k left(row, k) right[k][column], of row = blockIdx.x ROWS + warp EACH + r, column = blockIdx.y
// COLUMNS + 32 h + lane; 0 beyond rows and columns. right: (depth, columns). All threads of the block come here.
template <class Left>
__device__ inline void product(Left left, const signed char* __restrict__ right, long long rows, int depth,
                               int columns, Sums& sums) {
    __shared__ float4 a[ROWS][DEPTH / 4];
    __shared__ float4 b[DEPTH][COLUMNS / 4];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, column0 = blockIdx.y * COLUMNS;
    const long long row0 = (long long)blockIdx.x * ROWS;
#pragma unroll
    for (int r = 0; r < EACH; ++r) sums[r][0] = sums[r][1] = 0;
    const bool busy = row0 + warp * EACH < rows;
    for (int k0 = 0; k0 < depth; k0 += DEPTH) {
#pragma unroll
        for (int r = warp; r < ROWS; r += WARPS) {
            const bool inside = row0 + r < rows && k0 + lane < depth;
            reinterpret_cast<float*>(a[r])[lane] = inside ? left(row0 + r, k0 + lane) : 0;
        }
        const int few = t % (COLUMNS / 4) * 4, column = column0 + few;
#pragma unroll
        for (int k = t / (COLUMNS / 4); k < DEPTH; k += WARPS * 32 / (COLUMNS / 4)) {
            const signed char* own = right + (long long)(k0 + k) * columns + column;
            float4 entries = make_float4(0, 0, 0, 0);
            if (k0 + k < depth && columns % 4 == 0 && column < columns) {
                const Vec<signed char, 4> four = load<4>(own);
                entries = make_float4(four.v[0], four.v[1], four.v[2], four.v[3]);
            } else if (k0 + k < depth) {
                if (column < columns) entries.x = own[0];
                if (column + 1 < columns) entries.y = own[1];
                if (column + 2 < columns) entries.z = own[2];
                if (column + 3 < columns) entries.w = own[3];
            }
            b[k][few / 4] = entries;
        }
        __syncthreads();
        if (busy) {
#pragma unroll 2
            for (int k = 0; k < DEPTH && k0 + k < depth; k += 4) {
                float own[4][2];
#pragma unroll
                for (int q = 0; q < 4; ++q) {
                    const float* entries = reinterpret_cast<const float*>(b[k + q]);
                    own[q][0] = entries[lane], own[q][1] = entries[lane + 32];
                }
#pragma unroll
                for (int r = 0; r < EACH; ++r) {
                    const float4 few = a[warp * EACH + r][k / 4];
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        // in one rounding or two, the same integer
                        sums[r][h] = fmaf(few.x, own[0][h], sums[r][h]);
                        sums[r][h] = fmaf(few.y, own[1][h], sums[r][h]);
                        sums[r][h] = fmaf(few.z, own[2][h], sums[r][h]);
                        sums[r][h] = fmaf(few.w, own[3][h], sums[r][h]);
                    }
                }
            }
        }
        __syncthreads();
    }
}

// Integers of at most 2^14, (rows, depth).
struct Integers {
    const short* numbers;
    int depth;
    __device__ float operator()(long long row, int k) const { return numbers[row * depth + k]; }
};

// The highest bits of codes of `bits` bits, densely packed (rows, depth): -1 where one is set, else 1.
struct Signs {
    const unsigned* codes;
    int depth, bits;
    __device__ float operator()(long long row, int k) const {
        return get_bits(codes, ((unsigned long long)row * depth + k + 1) * bits - 1, 1) ? -1 : 1;
    }
};

// Calls f(row, column, sum) for each of a thread's sums that is one of the product.
template <class F> __device__ inline void each(const Sums& sums, long long rows, int columns, F f) {
#pragma unroll
    for (int r = 0; r < EACH; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const long long row = (long long)blockIdx.x * ROWS + threadIdx.x / 32 * EACH + r;
            const int column = blockIdx.y * COLUMNS + 32 * h + threadIdx.x % 32;
            if (row < rows && column < columns) f(row, column, sums[r][h]);
        }
}

}  // namespace sketching
