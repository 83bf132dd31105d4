// What all kernels share: element types, vectors that are loaded in one access, sums and maxima over a warp.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr unsigned ALL = 0xffffffffu;       // every lane of a warp

// float32 holds every half and every bfloat16 exactly; the way back rounds to the nearest, ties to even, as NumPy does.
__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T> __device__ inline T from_float(float x);
template <> __device__ inline float from_float<float>(float x) { return x; }
template <> __device__ inline __half from_float<__half>(float x) { return __float2half_rn(x); }
template <> __device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// NaN or infinite, by the bits: no comparison that a compiler could simplify.
__device__ inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// N elements that one access loads or stores, if the address is a multiple of their size (16 bytes at most).
template <class T, int N> struct alignas(N * sizeof(T)) Vec {
    static_assert(N * sizeof(T) <= 16, "one access moves 16 bytes at most");
    T v[N];
};
template <int N, class T> __device__ inline Vec<T, N> load(const T* p) { return *reinterpret_cast<const Vec<T, N>*>(p); }
template <int N, class T> __device__ inline void store(T* p, const Vec<T, N>& x) { *reinterpret_cast<Vec<T, N>*>(p) = x; }

__device__ inline unsigned lane_of_thread() { return threadIdx.x % 32; }

// Every lane of the warp must call these, and each gets the result. Sums of floats pair lanes at distance 16, 8, 4, 2, 1:
// x[l] + x[l ^ 16] first. That order is fixed, and commutative in each step, so that all lanes hold the same bits.
template <class T> __device__ inline T warp_sum(T x) {
    for (int d = 16; d; d /= 2) x += __shfl_xor_sync(ALL, x, d);
    return x;
}
template <class T> __device__ inline T warp_max(T x) {
    for (int d = 16; d; d /= 2) {
        const T other = __shfl_xor_sync(ALL, x, d);
        x = other > x ? other : x;
    }
    return x;
}
template <class T> __device__ inline T warp_min(T x) {
    for (int d = 16; d; d /= 2) {
        const T other = __shfl_xor_sync(ALL, x, d);
        x = other < x ? other : x;
    }
    return x;
}
