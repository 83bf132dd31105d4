// How a warp holds one vector of up to 32 E coordinates, takes it in as integers, and stores norms:
// reference/vectors.py, bit for bit.
//
// Lane l holds E coordinates in groups of V = min(E, 4) neighbours: register e is coordinate (e / V * 32 + l) V + e %
// V, so that a group is one vector load and the warp's loads are contiguous. Coordinates from `dim` on are 0. E is 2,
// 4, 8 or 32: up to 64, 128, 256, 1024.
#pragma once
#include "common.cuh"

constexpr int WARPS = 4;    // of a block; each has a vector of its own

// Blocks that a multiprocessor has room for at least. Left to itself, ptxas spills a few registers to fit one more.
template <int E> constexpr int RESIDENT = E < 32 ? 8 : 3;

template <int E> constexpr int GROUP = E < 4 ? E : 4;

template <int E> __device__ inline int place(int e, int lane) {
    return (e / GROUP<E> * 32 + lane) * GROUP<E> + e % GROUP<E>;
}

// Where vectors of an array (heads, tokens, dim) begin, in the order of streams: token by token, heads within. Rows are
// fewer than 2^31: a division of 32 bits.
struct Strides {
    long long head, token;
    int heads;
    __device__ long long operator()(long long row) const {
        const unsigned t = unsigned(row) / unsigned(heads), h = unsigned(row) - t * unsigned(heads);
        return h * head + t * token;
    }
};

template <class T, int E> __device__ inline bool grouped(const T* row, int dim) {
    return dim % GROUP<E> == 0 && (unsigned long long)row % sizeof(Vec<T, GROUP<E>>) == 0;
}

template <class T, int E>
__device__ inline void take(const T* __restrict__ row, int dim, int lane, float (&x)[E]) {
    constexpr int V = GROUP<E>;
    const bool whole = grouped<T, E>(row, dim);
#pragma unroll
    for (int e = 0; e < E; e += V) {
        const int at = place<E>(e, lane);
        if (whole && at < dim) {
            const Vec<T, V> few = load<V>(row + at);
#pragma unroll
            for (int v = 0; v < V; ++v) x[e + v] = to_float(few.v[v]);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) x[e + v] = at + v < dim ? to_float(row[at + v]) : 0;
        }
    }
}

template <class T, int E>
__device__ inline void give(T* __restrict__ row, int dim, int lane, const float (&x)[E]) {
    constexpr int V = GROUP<E>;
    const bool whole = grouped<T, E>(row, dim);
#pragma unroll
    for (int e = 0; e < E; e += V) {
        const int at = place<E>(e, lane);
        if (whole && at < dim) {
            Vec<T, V> few;
#pragma unroll
            for (int v = 0; v < V; ++v) few.v[v] = from_float<T>(x[e + v]);
            store<V>(row + at, few);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v)
                if (at + v < dim) row[at + v] = from_float<T>(x[e + v]);
        }
    }
}

// 2^k as a normal float: -126 <= k <= 127; as a normal double: -1022 <= k <= 1023.
__device__ inline float power(int k) { return __uint_as_float(unsigned(k + 127) << 23); }
__device__ inline double wide_power(int k) { return __longlong_as_double((long long)(k + 1023) << 52); }

// e with 2^{e-1} <= |x| < 2^e, of the bits of |x|; 0 of 0.
__device__ inline int exponent_of(unsigned magnitude) {
    if (magnitude >> 23) return int(magnitude >> 23) - 126;
    return magnitude ? 32 - __clz(int(magnitude)) - 149 : 0;
}

// Integers n = round_half_even(x 2^{bits - e}) of a warp's vector, e as above for its largest coordinate; false if one
// is not finite.
template <int E>
__device__ inline bool integers(const float (&x)[E], int bits, int (&n)[E], int& e) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) most = max(most, __float_as_uint(x[i]) & 0x7fffffffu);
    most = warp_max(most);
    e = exponent_of(most);
    if (most >= 0x7f800000u) return false;
    // for subnormal vectors 2^shift itself is no float
    const int shift = bits - e, beyond = max(shift - 127, 0);
    const float first = power(shift - beyond), second = power(beyond);
#pragma unroll
    for (int i = 0; i < E; ++i) n[i] = __float2int_rn(x[i] * first * second);
    return true;
}

template <int E> __device__ inline long long sum_of_squares(const int (&n)[E]) {
    long long sum = 0;
#pragma unroll
    for (int i = 0; i < E; ++i) sum += (long long)n[i] * n[i];
    return warp_sum(sum);
}

// The stored form of the norm 2^exponent sqrt(squares): `norm_codes`. A double is used as IEEE 754 has it, its bits
// read as integers.
__device__ inline unsigned norm_code(double squares, int exponent, int mantissa_bits) {
    if (!(squares > 0)) return 0;
    const unsigned long long root = __double_as_longlong(sqrt(squares));
    const int k = int(root >> 52) - 1022;    // root = f 2^k, 1/2 <= f < 1
    const unsigned long long f = (root & 0xfffffffffffffull) | 1ull << 52;
    const int drop = 52 - mantissa_bits;
    const unsigned mantissa = unsigned((f + (1ull << (drop - 1))) >> drop);    // half up, carry included
    return (unsigned(k + exponent - 1 + 256) << mantissa_bits) + mantissa - (1u << mantissa_bits);
}

// The norm that a code stands for, exact.
__device__ inline double norm_of(unsigned code, int mantissa_bits) {
    if (!code) return 0;
    const long long fraction = code & ((1u << mantissa_bits) - 1);
    const long long exponent = (long long)(code >> mantissa_bits) - 256 + 1023;
    return __longlong_as_double(exponent << 52 | fraction << (52 - mantissa_bits));
}

// Norms lie in streams in 2 bytes (7 bits of mantissa) or 4 (23), low ones first.
__device__ inline void store_norm(unsigned short* norms, long long at, unsigned code, int mantissa_bits) {
    if (mantissa_bits <= 7) {
        norms[at] = (unsigned short)code;
    } else {
        norms[2 * at] = (unsigned short)code;
        norms[2 * at + 1] = (unsigned short)(code >> 16);
    }
}

__device__ inline unsigned load_norm(const unsigned short* __restrict__ norms, long long at, int mantissa_bits) {
    return mantissa_bits <= 7 ? norms[at] : norms[2 * at] | (unsigned)norms[2 * at + 1] << 16;
}

// What multiplies integers of at most 2^24 on the way out: a gain >= 0 rounded to 24 bits, half to even, whatever its
// exponent. Where it is a float, the product is rounded once in float; else it is exact in double, and rounded once to
// float.
struct Gain {
    double wide;
    float single, limit;
    bool fits;
    __device__ Gain(double gain, float most) : limit(most) {
        unsigned long long bits = __double_as_longlong(gain);
        bits += (1ull << 28) - 1 + (bits >> 29 & 1);
        wide = __longlong_as_double(bits & ~((1ull << 29) - 1));
        single = float(wide);
        fits = double(single) == wide;
    }
    // a zero is +0
    __device__ float clipped(float x) const { return fminf(fmaxf(x, -limit), limit) + 0.0f; }
    __device__ float operator()(int n) const { return clipped(fits ? float(n) * single : float(double(n) * wide)); }
    template <int E> __device__ void operator()(const int (&n)[E], float (&out)[E]) const {
        if (fits) {
#pragma unroll
            for (int i = 0; i < E; ++i) out[i] = clipped(float(n[i]) * single);
        } else {
#pragma unroll
            for (int i = 0; i < E; ++i) out[i] = clipped(float(double(n[i]) * wide));
        }
    }
};

// Whether coordinates `at`, a multiple of V, ... at + V - 1 change sign: bit v of the result. flips: 32 words, one bit
// a coordinate, 0 from dim on.
template <int E> __device__ inline unsigned flips_of(const unsigned* __restrict__ flips, int at) {
    return flips[at / 32] >> (at % 32) & ((1u << GROUP<E>) - 1);
}

template <int E>
__device__ inline void flip(int (&n)[E], const unsigned* __restrict__ flips, int lane) {
#pragma unroll
    for (int e = 0; e < E; e += GROUP<E>) {
        const unsigned mask = flips_of<E>(flips, place<E>(e, lane));
#pragma unroll
        for (int v = 0; v < GROUP<E>; ++v)
            if (mask >> v & 1) n[e + v] = -n[e + v];
    }
}
