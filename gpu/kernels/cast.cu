// An array in another element type, as NumPy converts it (reference/vectors.py takes numbers in and gives them back so): to nearest, ties to
// even, beyond the largest number inf, subnormal numbers kept. CuPy's own conversions are compiled to flush those of float to 0.
//
// A thread converts a number.
#include "common.cuh"

constexpr int THREADS = 256;

__device__ inline float single(double x) { return (float)x; }
template <class T> __device__ inline float single(T x) { return to_float(x); }
template <class T> __device__ inline T of_single(float x) { return from_float<T>(x); }
template <> __device__ inline double of_single<double>(float x) { return (double)x; }

// float stands between any two types: it holds every half and bfloat16, and no double becomes one of these here.
template <class To, class From>
__global__ void __launch_bounds__(THREADS) cast(const From* __restrict__ x, To* __restrict__ y, long long count) {
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (at < count) y[at] = of_single<To>(single(x[at]));
}
