// So many bits for each coefficient (reference/transform_coding/fixed.py): the same codes for the same coefficients, and the same
// integers for the same codes.
//
//   quantise<SCALE>   coefficients of one unit (count, columns) -> codes, and for each token a scale of 16 bits (MAX), and a zero (RANGE)
//   quantise_log      the same with a scale of 4 bits for each 64 coefficients, of least squared error
//   pack              codes of all units -> bits, b_c of them for coefficient c, token after token
//   dequantise<Y>     bits -> integers y (count, columns) of one unit
//
// Grid: a warp for each token, lanes along coefficients; quantise_log 16 lanes for each token and group, one for each scale; pack a thread
// for each 32-bit word that is written: it gathers the codes that lie in it, so that no two threads write one word.
//
// Levels P_b: LISTED in codebooks, in units of 2^-12; MIDRISE (2 k + 1) / 2^b - 1 and MIDTREAD 2 k / 2^b - 1, in units of 2^-16;
// OFFSET k - z. They and the scales are numbered as in a stream.
#include "norms.cuh"

enum { NONE, LOG, MAX, RANGE };
enum { LISTED, MIDRISE, MIDTREAD, OFFSET };
constexpr int GROUP = 64, LOG_SCALES = 16;

// books: points of b bits from books[starts[b]] on, where listed.
struct Levels {
    int kind;
    const int* books;
    const int* starts;

    __device__ int point(int b, int k) const {
        if (kind == LISTED) return books[starts[b] + k];
        return kind == OFFSET ? k : (2 * k + (kind == MIDRISE) - (1 << b)) * (1 << (16 - b));
    }
    // The bound between levels k and k + 1.
    __device__ double bound(int b, int k) const { return 0.5 * ((double)point(b, k + 1) + (double)point(b, k)); }
    // How many of the 2^b - 1 bounds are at most v: the nearest level, the upper one of two.
    __device__ int nearest(int b, double v) const {
        int code = 0;
        for (int step = 1 << (b - 1); step; step >>= 1)
            if (v >= bound(b, code + step - 1)) code += step;
        return code;
    }
};

// live (coded): the columns that have bits; bits (coded). codes (count, all): this unit's from column `at` on. norms, zeros (count, units).
// unit: of the coefficients' integers; one: of the levels'. most_bits: the largest of bits.
template <int SCALE>
__global__ void __launch_bounds__(128)
quantise(const double* __restrict__ y, const int* __restrict__ live, const unsigned char* __restrict__ bits,
         const int* __restrict__ books, const int* __restrict__ starts, unsigned short* __restrict__ codes,
         unsigned short* __restrict__ norms, unsigned char* __restrict__ zeros, double unit, double one,
         unsigned long long count, unsigned columns, unsigned coded, unsigned all, unsigned at, unsigned units, unsigned index,
         int most_bits, int kind) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    const unsigned lane = threadIdx.x % 32;
    if (t >= count) return;
    const double* own = y + t * columns;
    double gain = 1.0, zero = 0.0;
    if (SCALE == MAX || SCALE == RANGE) {
        double above = 0.0, below = 0.0;             // largest number, and largest of its negative, 0 included
        for (unsigned c = lane; c < coded; c += 32) {
            const double ratio = own[live[c]] / unit;
            above = fmax(above, ratio), below = fmax(below, -ratio);
        }
        above = warp_max(above), below = warp_max(below);
        const int top = most_bits ? (1 << most_bits) - 1 : 1;
        const unsigned code = rounded_up(SCALE == MAX ? fmax(above, below) : (above + below) / top);
        if (code) gain = norm(code);
        if (SCALE == RANGE && most_bits) zero = fmin(rint(below / gain), (double)top);
        if (lane == 0) {
            norms[t * units + index] = (unsigned short)code;
            if (SCALE == RANGE) zeros[t * units + index] = (unsigned char)zero;
        }
    }
    const Levels levels{kind, books, starts};
    for (unsigned c = lane; c < coded; c += 32) {
        double scaled = own[live[c]] / unit / gain * one;
        if (SCALE == RANGE) scaled += zero;
        codes[t * all + at + c] = (unsigned short)levels.nearest(bits[c], scaled);
    }
}

__device__ inline int log_scale(unsigned choice) { return (int)(2 + (choice & 1)) << (choice >> 1); }      // in units of 1/32

// weights (coded): what a squared error of each coefficient costs. choices (count, all_scales): this unit's from column `scale_at` on.
__global__ void __launch_bounds__(128)
quantise_log(const double* __restrict__ y, const int* __restrict__ live, const unsigned char* __restrict__ bits,
             const double* __restrict__ weights, const int* __restrict__ books, const int* __restrict__ starts,
             unsigned short* __restrict__ codes, unsigned char* __restrict__ choices, double unit, double one,
             unsigned long long count, unsigned columns, unsigned coded, unsigned all, unsigned at, unsigned scales,
             unsigned all_scales, unsigned scale_at, int kind) {
    const unsigned long long job = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / LOG_SCALES;
    const unsigned lane = threadIdx.x % LOG_SCALES;
    const unsigned long long jobs = count * scales;
    if (job / 2 * 2 >= jobs) return;                 // no job for either half of this warp
    const bool mine = job < jobs;
    const unsigned long long t = mine ? job / scales : 0;
    const unsigned group = mine ? (unsigned)(job % scales) : 0;
    const unsigned first = group * GROUP, end = min(first + GROUP, coded);
    const double* own = y + t * columns;
    const Levels levels{kind, books, starts};
    double cost = 0.0;
    double gain = log_scale(lane) / 32.0;
    for (unsigned c = first; c < end; ++c) {         // in order: so the sums round as the reference's do
        const double ratio = own[live[c]] / unit;
        const int b = bits[c];
        const double decoded = gain * (levels.point(b, levels.nearest(b, ratio / gain * one)) / one);
        const double error = ratio - decoded;
        cost += weights[c] * (error * error);
    }
    unsigned best = lane;
    for (int d = LOG_SCALES / 2; d; d >>= 1) {       // of equal ones the first
        const double cost2 = __shfl_xor_sync(ALL, cost, d, LOG_SCALES);
        const unsigned best2 = __shfl_xor_sync(ALL, best, d, LOG_SCALES);
        if (cost2 < cost || (cost2 == cost && best2 < best)) cost = cost2, best = best2;
    }
    if (!mine) return;
    gain = log_scale(best) / 32.0;
    if (lane == 0) choices[t * all_scales + scale_at + group] = (unsigned char)best;
    for (unsigned c = first + lane; c < end; c += LOG_SCALES)
        codes[t * all + at + c] = (unsigned short)levels.nearest(bits[c], own[live[c]] / unit / gain * one);
}

// owners (bits of a token): the coefficient of each of a token's bits; bit_at (coded + 1): where each begins.
__global__ void __launch_bounds__(256)
pack(const unsigned short* __restrict__ codes, const int* __restrict__ owners, const int* __restrict__ bit_at,
     unsigned* __restrict__ words, unsigned long long count, unsigned long long total, unsigned coded) {
    const unsigned long long w = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (w >= total) return;
    const unsigned token_bits = (unsigned)bit_at[coded];
    unsigned long long t = w * 32 / token_bits;
    unsigned c = owners[w * 32 % token_bits], word = 0;
    int at = (int)((long long)(t * token_bits + bit_at[c]) - (long long)(w * 32));    // the first code may begin before the word
    while (at < 32 && t < count) {
        const unsigned code = codes[t * coded + c];
        word |= at >= 0 ? code << at : code >> -at;
        at += bit_at[c + 1] - bit_at[c];
        if (++c == coded) c = 0, ++t;
    }
    words[w] = word;
}

// bits, bit_at, ranks (columns): of each column of the unit its bits, where they begin in a token, and its place among those that have any.
// words has one word more than the codes need. choices (count, all_scales) with `scales` = LOG, zeros (count, units) with OFFSET levels.
template <class Y>
__global__ void __launch_bounds__(128)
dequantise(const unsigned* __restrict__ words, const unsigned char* __restrict__ bits, const int* __restrict__ bit_at,
           const int* __restrict__ ranks, const int* __restrict__ books, const int* __restrict__ starts,
           const unsigned char* __restrict__ choices, const unsigned char* __restrict__ zeros, Y* __restrict__ y,
           unsigned long long count, unsigned columns, unsigned token_bits, unsigned all_scales, unsigned scale_at,
           unsigned units, unsigned index, int scale, int kind) {
    const unsigned long long t = ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (t >= count) return;
    const Levels levels{kind, books, starts};
    const int zero = kind == OFFSET ? zeros[t * units + index] : 0;
    for (unsigned c = threadIdx.x % 32; c < columns; c += 32) {
        const int b = bits[c];
        Y level = 0;
        if (b) {
            const unsigned long long at = t * token_bits + bit_at[c];
            const unsigned* word = words + at / 32;
            const unsigned code = __funnelshift_r(word[0], word[1], (unsigned)(at % 32)) & ((1u << b) - 1);
            level = levels.point(b, (int)code) - zero;
            if (scale == LOG) level *= log_scale(choices[t * all_scales + scale_at + ranks[c] / GROUP]);
        }
        y[t * columns + c] = level;
    }
}
