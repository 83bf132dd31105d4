// Coefficients of transform coders in a tile, and keys made of them where they were coded before RoPE. Without RoPE queries and outputs are
// transformed in place of keys and values, and no key is ever made.
#pragma once
#include "attention.cuh"
#include "attention_rope.cuh"

// Keys of the heads of a block from coefficients of a tile: k = R_p (sum_c S_c y_c + mean). matrix (heads, columns, dim): S of the columns from
// key_at on; mean (heads, dim). Threads take neighbouring channels of up to 4 tokens, so that a number of S is loaded once for them.
struct Synthesis {
    const float *matrix, *mean;
    const int* first;                   // (heads): the first of its columns
    Turns turns;
    int columns, dim;

    __device__ int width() const { return (dim + 3) / 4 * 4; }      // from head to head in a tile

    __device__ void operator()(const Cache& c, const Room& room, const float* y, int y_stride, float* keys, int stride) const {
        const int items = dim - turns.pairs, padding = width() - dim, tiles = (c.tile + 3) / 4;
        for (int i = threadIdx.x; i < c.heads_block * tiles * items; i += THREADS) {
            const int item = i % items, t0 = i / items % tiles * 4, own = i / items / tiles, head = c.first_head() + own;
            if (head >= c.heads) continue;
            const bool turned = item < turns.pairs;
            const int a = turned ? turns.first(item) : item + turns.pairs, b = turned ? turns.second(item) : a;
            const float* s = matrix + (long long)head * columns * dim;
            float p[4], q[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) p[t] = mean[head * dim + a], q[t] = mean[head * dim + b];
            for (int column = 0; column < columns; ++column) {
                const float sa = s[(long long)column * dim + a], sb = s[(long long)column * dim + b];
#pragma unroll
                for (int t = 0; t < 4; ++t)
                    if (t0 + t < c.tile) {
                        const float coefficient = y[(t0 + t) * y_stride + first[head] + column];
                        p[t] = fmaf(sa, coefficient, p[t]), q[t] = fmaf(sb, coefficient, q[t]);
                    }
            }
#pragma unroll
            for (int t = 0; t < 4; ++t)
                if (t0 + t < c.tile) {
                    float* key = keys + (t0 + t) * stride + own * width();
                    const long long token = room.token[t0 + t];
                    if (turned && token >= 0) {
                        const float2 both = turns.of(p[t], q[t], c.position(head, token), item);
                        key[a] = both.x, key[b] = both.y;
                    } else {
                        key[a] = p[t];
                        if (turned) key[b] = q[t];
                    }
                }
        }
        for (int i = threadIdx.x; padding && i < c.heads_block * c.tile * padding; i += THREADS)
            keys[i / padding % c.tile * stride + i / padding / c.tile * width() + dim + i % padding] = 0.0f;
    }
    // Heads behind the last one have no keys, but rows of zeros are read.
    __device__ void clear(const Cache& c, float* keys, int stride) const {
        for (int i = threadIdx.x; i < c.tile * c.heads_block * width(); i += THREADS)
            keys[i / (c.heads_block * width()) * stride + i % (c.heads_block * width())] = 0.0f;
    }
};
