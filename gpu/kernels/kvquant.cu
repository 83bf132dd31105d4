// KVQuant (reference/kvquant.py): keys by channel before RoPE, values by token, non-uniform levels, outliers apart. Equal byte for byte.
//
// Numbers are counted token by token, head by head, channel by channel, from the first token behind the sinks on: a *row* is the vector of
// one (token, head). A warp takes as many rows together as fill whole words of codes and of the outliers' bitmap, 32 / gcd(dim, 32): one,
// but for odd sizes. All arithmetic on numbers is in double, in the reference's order.
//
//     turns           cosine and sine of each (position, pair of channels), for all heads             a thread each
//     encode_keys     lanes code 32 numbers at a time: RoPE undone, normalised, searched in the thresholds; bits voted into words, outliers
//                     into the bitmap, and counted by each warp
//     value_ends      a warp finds the two ends of a row: of m smallest and m largest numbers together m are left out
//     encode_values   as encode_keys, of rows whose ends are known
//     exclusive_sums  where each warp's outliers start: one block
//     place_keys, place_values    a warp writes places and numbers of its outliers from there on: in order, whoever runs first
//     gap_sizes, gap_bytes        places as gaps of one byte each (reference/places.py), by another prefix sum
//     decode_keys, decode_values  a warp takes a row; an outlier is looked up among the places of its row
//
// Four blocks on a processor are enough for the keys' kernels: for more, ptxas of sm_120 spills.
//
// x, y: (heads, tokens, dim), of which tokens from `first` on are coded. bad: becomes 1 where a number is NaN or inf.
#include "bits.cuh"
#include "codes.cuh"
#include "minmax.cuh"
#include "rotary.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, SUM_THREADS = 1024;

// Of this thread.
__device__ inline long long own_warp() { return blockIdx.x * (long long)WARPS + threadIdx.x / 32; }

__device__ inline double clamped(double x, double limit) { return fmin(fmax(x, -limit), limit); }

// A number as outliers and decoded ones are stored: in float, at most the largest number of the element type, a zero as +0.
template <class T>
__device__ inline T stored(double x, double limit) { return from_float<T>(float(clamped(x, limit)) + 0.0f); }

// An outlier, alike, but for the order of rounding and limiting.
template <class T>
__device__ inline T apart(double x, float limit) { return from_float<T>(fminf(fmaxf(float(x), -limit), limit) + 0.0f); }

// Where row `row` starts in (heads, tokens, dim).
__device__ inline long long row_start(long long row, long long tokens, long long first, int heads, int dim) {
    return (row % heads * tokens + first + row / heads) * dim;
}

// The rope of a layer: turns of (token, 1 or heads, pairs). rotated: channels in pairs, 0 where there is no rope.
struct Rope {
    const double2* turns;
    int rotated, interleaved, heads_apart;
    double scaling;
    __device__ const double2* of(long long row, int heads) const {
        return turns + (heads_apart ? row : row / heads) * (rotated / 2);
    }
    // A channel of a key before RoPE.
    template <class T>
    __device__ double undone(const T* key, int channel, const double2* own) const {
        const double x = to_float(key[channel]);
        if (channel >= rotated) return x;
        const Pair pair(channel, rotated, interleaved);
        return unrotated_channel(x, to_float(key[pair.other]), pair.second, own[pair.number], scaling);
    }
};

// Thresholds in shared memory: all threads of the block call it.
__device__ inline void load_thresholds(float* table, const float* thresholds, int bits) {
    for (int k = threadIdx.x; k < (1 << bits) - 1; k += THREADS) table[k] = thresholds[k];
    __syncthreads();
}

// The number of thresholds below a, which ascend.
__device__ inline unsigned level(const float* thresholds, double a, int bits) {
    unsigned code = 0;
    for (unsigned step = 1u << (bits - 1); step; step /= 2)
        if (double(thresholds[code + step - 1]) < a) code += step;
    return code;
}

__global__ void __launch_bounds__(THREADS) turns(const long long* __restrict__ positions,
                                                 const unsigned long long* __restrict__ frequencies, double2* __restrict__ out,
                                                 long long count, int pairs) {
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (at >= count * pairs) return;
    out[at] = turn(positions[at / pairs], frequencies[at % pairs]);
}

// Codes, bitmap and count of the outliers of one warp's rows. A Row is told which row it is, then gives codes of its channels.
template <class Row>
__device__ inline void write_rows(Row own, const Share& share, int dim, int bits, unsigned* words, unsigned* masks,
                                  unsigned* counts, int lane) {
    const int count = share.count * dim;                                // at most 2^5 2^20
    WarpCodes codes(words + share.first * dim * bits / 32);
    masks += share.first * dim / 32;
    unsigned outliers = 0;
    long long row = share.first - 1;
    int channel = lane + dim;                                           // of that row: the next one is entered at once
    for (int at = lane; at - lane < count; at += 32, channel += 32) {
        unsigned code = 0;
        bool outside = false;
        if (channel >= dim) {
            for (; channel >= dim; channel -= dim) ++row;
            if (at < count) own.enter(row);
        }
        if (at < count) code = own.code(channel, outside);
        codes.put(outside ? 0 : code, bits, lane);
        const unsigned mask = __ballot_sync(ALL, outside);
        if (lane == 0) *masks++ = mask;
        outliers += __popc(mask);
    }
    codes.finish(-count & 31, bits, lane);
    if (lane == 0) counts[own_warp()] = outliers;
}

template <class T>
struct KeyRow {
    const T* x;
    const float *lows, *highs, *thresholds;
    Rope rope;
    long long tokens, first;
    int heads, dim, bits, sparse;
    bool& finite;
    const T* key;
    const double2* turns;
    int ends;
    __device__ void enter(long long row) {
        key = x + row_start(row, tokens, first, heads, dim), turns = rope.of(row, heads), ends = int(row % heads) * dim;
    }
    __device__ unsigned code(int channel, bool& outside) const {
        finite = finite && is_finite(to_float(key[channel]));
        const double before = rope.undone(key, channel, turns);
        const double low = lows[ends + channel], high = highs[ends + channel], centre = (high + low) / 2, half = (high - low) / 2;
        outside = sparse && (before < low || before > high);
        return level(thresholds, half > 0 ? (before - centre) / half : 0.0, bits);
    }
};

template <class T>
struct ValueRow {
    const T* x;
    const float2* ends;
    const unsigned short* scales;
    const float* thresholds;
    long long tokens, first;
    int heads, dim, bits;
    bool& finite;
    const T* value;
    float2 own;
    double half;
    __device__ void enter(long long row) {
        value = x + row_start(row, tokens, first, heads, dim), own = ends[row], half = __uint_as_float(unsigned(scales[row]) << 15);
    }
    __device__ unsigned code(int channel, bool& outside) const {
        const float number = to_float(value[channel]);
        finite = finite && is_finite(number);
        outside = number < own.x || number > own.y;
        return level(thresholds, (double(number) - double(own.x)) / (half > 0 ? half : 1.0) - 1.0, bits);
    }
};

template <class T>
__global__ void __launch_bounds__(THREADS, 4) encode_keys(const T* __restrict__ x, const double2* __restrict__ turned,
                                                       const float* __restrict__ lows, const float* __restrict__ highs,
                                                       const float* __restrict__ thresholds, unsigned* __restrict__ words,
                                                       unsigned* __restrict__ masks, unsigned* __restrict__ counts,
                                                       unsigned* __restrict__ bad, long long rows, long long tokens,
                                                       long long first, int heads, int dim, int bits, int together,
                                                       int rotated, int interleaved, int heads_apart, double scaling, int sparse) {
    __shared__ float table[255];
    load_thresholds(table, thresholds, bits);
    const int lane = threadIdx.x % 32;
    const Share share(own_warp(), rows, together);
    if (!share.count) return;
    bool finite = true;
    const KeyRow<T> row{x, lows, highs, table, {turned, rotated, interleaved, heads_apart, scaling}, tokens, first, heads, dim, bits, sparse, finite};
    write_rows(row, share, dim, bits, words, masks, counts, lane);
    if (!finite) atomicOr(bad, 1u);
}

// Numbers of a row as integers in their order, ties by place: zeros of both signs are one number.
__device__ inline unsigned long long in_order(float x, int place) {
    const unsigned word = __float_as_uint(x + 0.0f);
    return (unsigned long long)(word >> 31 ? ~word : word | 1u << 31) << 32 | unsigned(place);
}
__device__ inline float number_of(unsigned long long key) {
    const unsigned word = unsigned(key >> 32);
    return __uint_as_float(word >> 31 ? word & ~(1u << 31) : ~word);
}

// The least number of a row at or above `from`, and the largest at or below it; all lanes of a warp call it.
template <class T>
__device__ inline unsigned long long least_from(const T* row, int dim, unsigned long long from, int lane) {
    unsigned long long best = ~0ull;
    for (int i = lane; i < dim; i += 32) {
        const unsigned long long key = in_order(to_float(row[i]), i);
        if (key >= from) best = min(best, key);
    }
    return warp_min(best);
}
template <class T>
__device__ inline unsigned long long largest_to(const T* row, int dim, unsigned long long to, int lane) {
    unsigned long long best = 0;
    for (int i = lane; i < dim; i += 32) {
        const unsigned long long key = in_order(to_float(row[i]), i);
        if (key <= to) best = max(best, key);
    }
    return warp_max(best);
}

// The ends of what is left of a row where j small and most - j large numbers are left out: the least range, the first of equal ones.
template <class T>
__device__ inline float2 ends_of(const T* row, int dim, int most, int lane) {
    unsigned long long low = least_from(row, dim, 0, lane), high = largest_to(row, dim, ~0ull, lane);
    for (int k = 0; k < most; ++k) high = largest_to(row, dim, high - 1, lane);
    float2 ends = make_float2(number_of(low), number_of(high));
    double range = double(ends.y) - double(ends.x);
    for (int j = 1; j <= most; ++j) {
        low = least_from(row, dim, low + 1, lane), high = least_from(row, dim, high + 1, lane);
        const double other = double(number_of(high)) - double(number_of(low));
        if (other < range) range = other, ends = make_float2(number_of(low), number_of(high));
    }
    return ends;
}

template <class T>
__global__ void __launch_bounds__(THREADS) value_ends(const T* __restrict__ x, T* __restrict__ zeros,
                                                      unsigned short* __restrict__ scales, float2* __restrict__ ends,
                                                      long long rows, long long tokens, long long first, int heads, int dim,
                                                      int most) {
    const int lane = threadIdx.x % 32;
    const long long row = own_warp();
    if (row >= rows) return;
    const float2 own = ends_of(x + row_start(row, tokens, first, heads, dim), dim, most, lane);
    if (lane) return;
    ends[row] = own;
    zeros[row] = from_float<T>(own.x);
    scales[row] = (unsigned short)scale_code(double(own.y) - double(own.x), 1);
}

template <class T>
__global__ void __launch_bounds__(THREADS) encode_values(const T* __restrict__ x, const float2* __restrict__ ends,
                                                         const unsigned short* __restrict__ scales,
                                                         const float* __restrict__ thresholds, unsigned* __restrict__ words,
                                                         unsigned* __restrict__ masks, unsigned* __restrict__ counts,
                                                         unsigned* __restrict__ bad, long long rows, long long tokens,
                                                         long long first, int heads, int dim, int bits, int together) {
    __shared__ float table[255];
    load_thresholds(table, thresholds, bits);
    const int lane = threadIdx.x % 32;
    const Share share(own_warp(), rows, together);
    if (!share.count) return;
    bool finite = true;
    const ValueRow<T> row{x, ends, scales, table, tokens, first, heads, dim, bits, finite};
    write_rows(row, share, dim, bits, words, masks, counts, lane);
    if (!finite) atomicOr(bad, 1u);
}

// The sum of x over this lane and those before it.
__device__ inline long long running_sum(long long x, int lane) {
    for (int d = 1; d < 32; d *= 2) {
        const long long other = __shfl_up_sync(ALL, x, d);
        if (lane >= d) x += other;
    }
    return x;
}

// starts[i] = counts[0] + ... + counts[i - 1], i = 0 ... count. One block.
__global__ void __launch_bounds__(SUM_THREADS) exclusive_sums(const unsigned* __restrict__ counts, long long* __restrict__ starts,
                                                              long long count) {
    __shared__ long long of_warp[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long before = 0;                                               // the sum of all tiles so far
    for (long long tile = 0; tile <= count; tile += SUM_THREADS) {
        const long long at = tile + threadIdx.x, own = at < count ? counts[at] : 0, sum = running_sum(own, lane);
        if (lane == 31) of_warp[warp] = sum;
        __syncthreads();
        const long long all = running_sum(of_warp[lane], lane), earlier = __shfl_sync(ALL, all, warp == 0 ? 0 : warp - 1);
        if (at <= count) starts[at] = before + (warp == 0 ? 0 : earlier) + sum - own;
        before += __shfl_sync(ALL, all, 31);
        __syncthreads();                                                // of_warp is written again
    }
}

// Places and numbers of a warp's outliers, from starts[warp] on. number(row, channel) is what is stored of one.
template <class T, class F>
__device__ inline void place_rows(const Share& share, const unsigned* masks, const long long* starts, long long* places, T* outliers,
                                  int dim, F number) {
    const int lane = threadIdx.x % 32, count = share.count * dim;
    const long long before = share.first * dim;
    long long next = starts[own_warp()];
    for (int start = 0; start < count; start += 32) {
        const unsigned mask = masks[(before + start) / 32];
        if (mask >> lane & 1) {
            const long long own = next + __popc(mask & ((1u << lane) - 1));
            places[own] = before + start + lane;
            outliers[own] = number(share.first + (start + lane) / dim, (start + lane) % dim);
        }
        next += __popc(mask);
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS, 4) place_keys(const T* __restrict__ x, const double2* __restrict__ turned,
                                                      const unsigned* __restrict__ masks, const long long* __restrict__ starts,
                                                      long long* __restrict__ places, T* __restrict__ outliers, long long rows,
                                                      long long tokens, long long first, int heads, int dim, int together,
                                                      int rotated, int interleaved, int heads_apart, double scaling, float limit) {
    const Share share(own_warp(), rows, together);
    if (!share.count) return;
    const Rope rope{turned, rotated, interleaved, heads_apart, scaling};
    place_rows(share, masks, starts, places, outliers, dim, [&](long long row, int channel) {
        const T* key = x + row_start(row, tokens, first, heads, dim);
        return apart<T>(rope.undone(key, channel, rope.of(row, heads)), limit);
    });
}

template <class T>
__global__ void __launch_bounds__(THREADS) place_values(const T* __restrict__ x, const unsigned* __restrict__ masks,
                                                        const long long* __restrict__ starts, long long* __restrict__ places,
                                                        T* __restrict__ outliers, long long rows, long long tokens,
                                                        long long first, int heads, int dim, int together, float limit) {
    const Share share(own_warp(), rows, together);
    if (!share.count) return;
    place_rows(share, masks, starts, places, outliers, dim, [&](long long row, int channel) {
        return apart<T>(to_float(x[row_start(row, tokens, first, heads, dim) + channel]), limit);
    });
}

// Numbers passed over on the way to outlier i.
__device__ inline long long gap_before(const long long* places, long long i) { return places[i] - (i ? places[i - 1] + 1 : 0); }

__global__ void __launch_bounds__(THREADS) gap_sizes(const long long* __restrict__ places, unsigned* __restrict__ sizes, long long count) {
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (at < count) sizes[at] = unsigned(gap_before(places, at) / 255) + 1;
}

__global__ void __launch_bounds__(THREADS) gap_bytes(const long long* __restrict__ places, const long long* __restrict__ starts,
                                                     unsigned char* __restrict__ out, long long count) {
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (at >= count) return;
    const long long last = starts[at + 1] - 1;
    for (long long i = starts[at]; i < last; ++i) out[i] = 255;
    out[last] = (unsigned char)(gap_before(places, at) % 255);
}

// The first of places[from ... to - 1], ascending, that is not below `place`; `to` if there is none.
__device__ inline long long search(const long long* places, long long from, long long to, long long place) {
    while (from < to) {
        const long long middle = (from + to) / 2;
        if (places[middle] < place) from = middle + 1;
        else to = middle;
    }
    return from;
}

// The outliers of one row.
template <class T>
struct Outliers {
    const long long* places;
    const T* numbers;
    long long begin, end, before;       // before: numbers ahead of the row
    __device__ Outliers(const long long* p, const T* n, long long count, long long row, int dim)
        : places(p), numbers(n), before(row * dim) {
        begin = search(p, 0, count, before);
        end = search(p, begin, count, before + dim);
    }
    __device__ double or_else(int channel, double dense) const {
        if (begin == end) return dense;
        const long long at = search(places, begin, end, before + channel);
        return at < end && places[at] == before + channel ? double(to_float(numbers[at])) : dense;
    }
};

template <class T>
__global__ void __launch_bounds__(THREADS) decode_keys(const unsigned* __restrict__ words, const long long* __restrict__ places,
                                                       const T* __restrict__ outliers, const double2* __restrict__ turned,
                                                       const float* __restrict__ lows, const float* __restrict__ highs,
                                                       const float* __restrict__ points, T* __restrict__ y, long long count,
                                                       long long rows, long long tokens, long long first, int heads, int dim,
                                                       int bits, int rotated, int interleaved, int heads_apart, double scaling,
                                                       double limit) {
    const int lane = threadIdx.x % 32;
    const long long row = own_warp();
    if (row >= rows) return;
    const Rope rope{turned, rotated, interleaved, heads_apart, scaling};
    const Outliers<T> apart(places, outliers, count, row, dim);
    T* own = y + row_start(row, tokens, first, heads, dim);
    const double2* own_turns = rope.of(row, heads);
    const auto before = [&](int channel) {
        const int place = int(row % heads) * dim + channel;
        const double low = lows[place], high = highs[place], centre = (high + low) / 2, half = (high - low) / 2;
        return apart.or_else(channel, centre + half * double(points[get_bits(words, (row * dim + channel) * bits, bits)]));
    };
    for (int channel = lane; channel < dim; channel += 32) {
        double key = before(channel);
        if (channel < rotated) {
            const Pair pair(channel, rotated, interleaved);
            key = rotated_channel(key, before(pair.other), pair.second, own_turns[pair.number], scaling);
        }
        own[channel] = stored<T>(key, limit);
    }
}

template <class T>
__global__ void __launch_bounds__(THREADS) decode_values(const unsigned* __restrict__ words, const long long* __restrict__ places,
                                                         const T* __restrict__ outliers, const T* __restrict__ zeros,
                                                         const unsigned short* __restrict__ scales, const float* __restrict__ points,
                                                         T* __restrict__ y, long long count, long long rows, long long tokens,
                                                         long long first, int heads, int dim, int bits, double limit) {
    const int lane = threadIdx.x % 32;
    const long long row = own_warp();
    if (row >= rows) return;
    const Outliers<T> apart(places, outliers, count, row, dim);
    T* own = y + row_start(row, tokens, first, heads, dim);
    const double low = to_float(zeros[row]), half = __uint_as_float(unsigned(scales[row]) << 15);
    for (int channel = lane; channel < dim; channel += 32) {
        const double dense = low + half * (1.0 + double(points[get_bits(words, (row * dim + channel) * bits, bits)]));
        own[channel] = stored<T>(apart.or_else(channel, dense), limit);
    }
}
