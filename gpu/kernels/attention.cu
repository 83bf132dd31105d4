// Around attention over segments (attention.cuh): queries into the frame of a codec's keys, partial results together, and out of the frame of
// its values. Sums are in double, each result is rounded once. Equals kvtheory/attention.py up to rounding (docs/attention.md).
//
//   project    q (rows, dim) -> scale (q A_h, q . mean_h): (rows, columns + 1)          a thread for each number
//   combine    (m, l, o) of slots -> those of all together, o divided by l if asked     a block for each row
//   restore    o (rows, columns) in the frame -> o S_h^T + l mean_h (rows, dim)         a thread for each number
//   places     where kernels look for token t: index arithmetic alone, for tests        a thread for each token
//
// Rows are in the order of KV heads, `each` of a head.
#include "attention.cuh"

template <class T>
__global__ void __launch_bounds__(256)
project(const T* __restrict__ queries, const double* __restrict__ matrices, float* __restrict__ out, double scale, long long rows,
        long long each, int dim, int columns, int apart) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= rows * columns) return;
    const long long row = i / columns;
    const int column = int(i % columns);
    const double* matrix = matrices + (apart ? row / each : 0) * dim * columns + column;
    double sum = 0;
    for (int k = 0; k < dim; ++k) sum += double(to_float(queries[row * dim + k])) * matrix[(long long)k * columns];
    out[i] = float(sum * scale);
}

__global__ void __launch_bounds__(256)
restore(const float* __restrict__ sums, const float* __restrict__ in, const double* __restrict__ matrices, const double* __restrict__ means,
        float* __restrict__ out, long long rows, long long each, int columns, int dim, int apart) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= rows * dim) return;
    const long long row = i / dim, head = apart ? row / each : 0;
    const int channel = int(i % dim);
    double sum = double(sums[row]) * means[head * dim + channel];
    for (int k = 0; k < columns; ++k) sum += double(in[row * columns + k]) * matrices[(head * columns + k) * dim + channel];
    out[i] = float(sum);
}

__global__ void __launch_bounds__(THREADS)
combine(const float* __restrict__ maxima, const float* __restrict__ sums, const float* __restrict__ in, float* __restrict__ most,
        float* __restrict__ sum, float* __restrict__ out, int slots, long long rows, int width, int divide) {
    const long long row = blockIdx.x;
    float top = minus_infinity();
    for (int s = 0; s < slots; ++s) top = fmaxf(top, maxima[s * rows + row]);
    const bool any = top > minus_infinity();
    float total = 0.0f;
    for (int s = 0; s < slots; ++s)
        if (any) total = fmaf(sums[s * rows + row], expf(maxima[s * rows + row] - top), total);
    for (int c = threadIdx.x; c < width; c += THREADS) {
        float o = 0.0f;
        for (int s = 0; s < slots; ++s)
            if (any) o = fmaf(in[(s * rows + row) * width + c], expf(maxima[s * rows + row] - top), o);
        out[row * width + c] = divide ? o / total : o;
    }
    if (threadIdx.x == 0) most[row] = top, sum[row] = total;
}

// kind 0: rows of numbers at starts + token stride; 1: the first bit of row token x heads + head of `each` bits; 2: a partial result, of row
// `token` of slot `head` of rows `each`, times width.
__global__ void __launch_bounds__(256)
places(const long long* __restrict__ tokens, const int* __restrict__ numbers, const long long* __restrict__ starts, long long* __restrict__ out,
       long long count, long long each, int heads, int width, int kind) {
    const long long i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= count) return;
    const int head = numbers[i];
    const Rows<float> rows{nullptr, starts, each, width};
    out[i] = kind == 0 ? rows.at(head, tokens[i]) : kind == 1 ? row_number(tokens[i], heads, head) * each : (head * each + tokens[i]) * width;
}
