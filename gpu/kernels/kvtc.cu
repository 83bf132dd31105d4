// Groups of components with a scale for each token (reference/kvtc.py): the same codes for the same coefficients, and the same integers for
// the same codes. What a stream holds is component after component, all tokens of one together; coefficients are token after token.
//
//   quantise   coefficients (count, columns) -> a scale of 16 bits for each token and group, and codes (count, columns)
//   pack       codes -> b bits each, a component's tokens one after the other, from the byte on where it begins
//   unpack     bits and scales -> integers y (count, columns)
//
// Grid: quantise a warp for each token and group. pack and unpack a block of 256 threads for 64 tokens of 32 components: turned in shared
// memory, so that threads run along components on one side and along tokens on the other; eight codes of b bits fill b bytes, a thread's.
#include "norms.cuh"

constexpr int UNIT = 65536, TOKENS = 64, COMPONENTS = 32, THREADS = 256, EIGHT = 8;

// ends (groups): where each group's components end. widths (groups): bits.
__global__ void __launch_bounds__(128)
quantise(const double* __restrict__ y, const int* __restrict__ ends, const unsigned char* __restrict__ widths,
         unsigned short* __restrict__ norms, unsigned char* __restrict__ codes, unsigned long long count, unsigned columns,
         unsigned groups) {
    const unsigned long long job = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (job >= count * groups) return;
    const unsigned long long t = job / groups;
    const unsigned group = (unsigned)(job % groups), lane = threadIdx.x % 32;
    const unsigned first = group ? ends[group - 1] : 0, end = ends[group];
    double most = 0.0;
    for (unsigned c = first + lane; c < end; c += 32) most = fmax(most, fabs(y[t * columns + c]));
    const unsigned code = rounded_up(warp_max(most));
    const double scale = code ? norm(code) : 1.0;
    const int b = widths[group];
    for (unsigned c = first + lane; c < end; c += 32) {
        const double cell = floor((y[t * columns + c] / scale + 1.0) * (1 << (b - 1)));
        codes[t * columns + c] = (unsigned char)fmin(fmax(cell, 0.0), (double)((1 << b) - 1));
    }
    if (lane == 0) norms[job] = (unsigned short)code;
}

// widths, starts (columns): bits of each component, and the byte in which it begins.
__global__ void __launch_bounds__(THREADS)
pack(const unsigned char* __restrict__ codes, const unsigned char* __restrict__ widths, const unsigned long long* __restrict__ starts,
     unsigned char* __restrict__ bytes, unsigned long long count, unsigned columns) {
    __shared__ unsigned char tile[TOKENS][COMPONENTS + 1];
    const unsigned long long t0 = (unsigned long long)blockIdx.x * TOKENS;
    const unsigned c0 = blockIdx.y * COMPONENTS, along = threadIdx.x % COMPONENTS;
    for (unsigned i = threadIdx.x / COMPONENTS; i < TOKENS; i += THREADS / COMPONENTS)
        tile[i][along] = t0 + i < count && c0 + along < columns ? codes[(t0 + i) * columns + c0 + along] : 0;
    __syncthreads();
    const unsigned c = c0 + threadIdx.x / EIGHT, eight = threadIdx.x % EIGHT;
    if (c >= columns) return;
    const unsigned b = widths[c];
    unsigned long long bits = 0;
    for (unsigned i = 0; i < EIGHT; ++i) bits |= (unsigned long long)tile[eight * EIGHT + i][c - c0] << (i * b);
    const unsigned long long size = (count * b + 7) / 8, at = (t0 / EIGHT + eight) * b;
    for (unsigned j = 0; j < b && at + j < size; ++j) bytes[starts[c] + at + j] = (unsigned char)(bits >> (8 * j));
}

// group_of (columns): whose scale, of norms (count, groups), a component has.
__global__ void __launch_bounds__(THREADS)
unpack(const unsigned char* __restrict__ bytes, const unsigned char* __restrict__ widths, const unsigned long long* __restrict__ starts,
       const int* __restrict__ group_of, const unsigned short* __restrict__ norms, int* __restrict__ y, unsigned long long count,
       unsigned columns, unsigned groups) {
    __shared__ unsigned char tile[TOKENS][COMPONENTS + 1];
    const unsigned long long t0 = (unsigned long long)blockIdx.x * TOKENS;
    const unsigned c0 = blockIdx.y * COMPONENTS;
    const unsigned own = c0 + threadIdx.x / EIGHT, eight = threadIdx.x % EIGHT;
    if (own < columns) {
        const unsigned b = widths[own];
        const unsigned long long size = (count * b + 7) / 8, at = (t0 / EIGHT + eight) * b;
        unsigned long long bits = 0;
        for (unsigned j = 0; j < b && at + j < size; ++j) bits |= (unsigned long long)bytes[starts[own] + at + j] << (8 * j);
        for (unsigned i = 0; i < EIGHT; ++i)
            tile[eight * EIGHT + i][own - c0] = (unsigned char)(bits >> (i * b) & ((1u << b) - 1));
    }
    __syncthreads();
    const unsigned c = c0 + threadIdx.x % COMPONENTS;
    if (c >= columns) return;
    const int b = widths[c];
    for (unsigned i = threadIdx.x / COMPONENTS; i < TOKENS && t0 + i < count; i += THREADS / COMPONENTS) {
        const int point = (2 * tile[i][c - c0] + 1 - (1 << b)) * (1 << (16 - b));
        // exact but for one rounding to an integer
        const double z = rint(norm(norms[(t0 + i) * groups + group_of[c]]) * point / UNIT);
        y[(t0 + i) * columns + c] = (int)fmin(fmax(z, -2147483647.0), 2147483647.0);
    }
}
