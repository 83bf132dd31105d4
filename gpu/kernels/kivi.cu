// KIVI (reference/kivi.py): keys in groups of tokens of one channel, values in groups of channels of one token. Equal byte for byte.
//
// A *row* is what codes are stored by: of keys `group` tokens of one (group of tokens, head, channel), of values all channels of one
// (token, head); its groups have a zero and a scale each, and its codes follow those of the row before it without a gap. So a thread or a
// warp takes as many rows together as fill whole words, 32 / gcd(bits of a row, 32): one, but for odd sizes. No word has two writers.
//
//     encode_keys     a thread takes `together` rows: minimum and maximum in one pass, codes in the next. Neighbouring threads have
//                     neighbouring channels, so that a warp reads each token's channels side by side.        blocks of 256 threads
//     encode_values   a warp takes `together` rows: teams of lanes find the ends of a group each, then the lanes code 32 numbers at a
//                     time and vote their bits into words.                                                    blocks of 8 warps
//     decode_keys     a thread takes a row.         decode_values: a warp takes a row.
//
// x, y: (heads, tokens, dim), of which the first tokens are coded: rows of keys are (tokens / group, heads, dim), of values (tokens, heads).
// bad: becomes 1 where a number is NaN or inf.
#include "bits.cuh"
#include "codes.cuh"
#include "minmax.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr float FARTHEST = 3.402823466e38f;     // the largest float

// Where row `row` of keys starts in (heads, tokens, dim); its numbers are dim apart.
__device__ inline long long key_row(long long row, long long tokens, int heads, int dim, int group) {
    const int channel = int(row % dim), head = int(row / dim % heads);
    const long long first = row / dim / heads * group;
    return (head * tokens + first) * dim + channel;
}

// Where row `row` of values, (token, head), starts.
__device__ inline long long value_row(long long row, long long tokens, int heads, int dim) {
    return (row % heads * tokens + row / heads) * dim;
}

template <class T>
__global__ void __launch_bounds__(THREADS) encode_keys(const T* __restrict__ x, T* __restrict__ zeros,
                                                       unsigned short* __restrict__ scales, unsigned* __restrict__ words,
                                                       unsigned* __restrict__ bad, long long rows, long long tokens,
                                                       int heads, int dim, int group, int bits, int together) {
    const Share share(blockIdx.x * (long long)THREADS + threadIdx.x, rows, together);
    ThreadCodes codes(words + share.first * group * bits / 32);
    for (int r = 0; r < share.count; ++r) {
        const long long row = share.first + r;
        const T* own = x + key_row(row, tokens, heads, dim, group);
        float low = to_float(own[0]), high = low;
        bool finite = true;
        for (int i = 0; i < group; ++i) {
            const float v = to_float(own[(long long)i * dim]);
            finite = finite && is_finite(v);
            low = fminf(low, v), high = fmaxf(high, v);
        }
        if (!finite) {
            atomicOr(bad, 1u);
            return;
        }
        low = low + 0.0f;                                               // a zero is +0
        const unsigned stored = scale_code(double(high) - double(low), bits);
        zeros[row] = from_float<T>(low), scales[row] = (unsigned short)stored;
        const Group own_group(low, stored, bits);
        const float inverse = own_group.inverse();
        for (int i = 0; i < group; ++i) codes.put(own_group.code(to_float(own[(long long)i * dim]), inverse, bits), bits);
    }
    codes.finish();
}

// `team`: lanes to a group, a power of two.
template <class T>
__global__ void __launch_bounds__(THREADS) encode_values(const T* __restrict__ x, T* __restrict__ zeros,
                                                         unsigned short* __restrict__ scales, unsigned* __restrict__ words,
                                                         unsigned* __restrict__ bad, long long rows, long long tokens,
                                                         int heads, int dim, int group, int bits, int together, int team) {
    const int lane = threadIdx.x % 32;
    const Share share(blockIdx.x * (long long)WARPS + threadIdx.x / 32, rows, together);
    const int each = (dim + group - 1) / group, groups = share.count * each;

    bool finite = true;
    for (int start = 0; start < groups; start += 32 / team) {
        const int at = start + lane / team;                             // of a group, among those of these rows
        const bool any = at < groups;
        float low = FARTHEST, high = -FARTHEST;
        if (any) {
            const long long row = share.first + at / each;
            const int begin = at % each * group, end = min(begin + group, dim);
            const T* own = x + value_row(row, tokens, heads, dim);
            for (int i = begin + lane % team; i < end; i += team) {
                const float v = to_float(own[i]);
                finite = finite && is_finite(v);
                low = fminf(low, v), high = fmaxf(high, v);
            }
        }
        for (int m = team / 2; m; m /= 2) {
            low = fminf(low, __shfl_xor_sync(ALL, low, m));
            high = fmaxf(high, __shfl_xor_sync(ALL, high, m));
        }
        if (any && lane % team == 0) {
            low = low + 0.0f;
            zeros[share.first * each + at] = from_float<T>(low);
            scales[share.first * each + at] = (unsigned short)scale_code(double(high) - double(low), bits);
        }
    }
    if (!finite) atomicOr(bad, 1u);
    __syncwarp();                                                       // zeros and scales of this warp's rows are read below

    const int count = share.count * dim;                                // at most 2^5 2^20
    WarpCodes codes(words + share.first * dim * bits / 32);
    long long row = share.first;
    int i = lane;                                                       // of the row
    for (int at = lane; at - lane < count; at += 32, i += 32) {
        for (; i >= dim; i -= dim) ++row;
        unsigned code = 0;
        if (at < count) {
            const long long place = row * each + i / group;
            const Group own_group(to_float(zeros[place]), scales[place], bits);
            code = own_group.code(to_float(x[value_row(row, tokens, heads, dim) + i]), own_group.inverse(), bits);
        }
        codes.put(code, bits, lane);
    }
    codes.finish(-count & 31, bits, lane);
}

template <class T>
__global__ void __launch_bounds__(THREADS) decode_keys(const T* __restrict__ zeros, const unsigned short* __restrict__ scales,
                                                       const unsigned* __restrict__ words, T* __restrict__ y,
                                                       long long rows, long long tokens, int heads, int dim, int group,
                                                       int bits, float limit) {
    const long long row = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (row >= rows) return;
    const Group own_group(to_float(zeros[row]), scales[row], bits);
    T* own = y + key_row(row, tokens, heads, dim, group);
    for (int i = 0; i < group; ++i)
        own[(long long)i * dim] = from_float<T>(own_group.number(get_bits(words, (row * group + i) * bits, bits), limit));
}

template <class T>
__global__ void __launch_bounds__(THREADS) decode_values(const T* __restrict__ zeros, const unsigned short* __restrict__ scales,
                                                         const unsigned* __restrict__ words, T* __restrict__ y,
                                                         long long rows, long long tokens, int heads, int dim, int group,
                                                         int bits, float limit) {
    const int lane = threadIdx.x % 32, each = (dim + group - 1) / group;
    const long long row = blockIdx.x * (long long)WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    T* own = y + value_row(row, tokens, heads, dim);
    for (int i = lane; i < dim; i += 32) {
        const long long place = row * each + i / group;
        const Group own_group(to_float(zeros[place]), scales[place], bits);
        own[i] = from_float<T>(own_group.number(get_bits(words, (row * dim + i) * bits, bits), limit));
    }
}
