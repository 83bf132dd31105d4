// Tokens that a reducer leaves: gathered (reference/reducer.py), merged by weight (reference/merging.py), and turned to other positions
// (reference/rotary.py). Which, the host decides.
//
//     gather   rows of `units` units of 16, 8, 4 or 2 bytes, whatever numbers they hold: out[r] = x[source[r]], zeros where source[r] < 0.
//              A thread moves a unit; neighbours move neighbours
//     merge    out[r] = sum_j w_j x[member_j] / m, m = masses[r] = sum_j w_j, j from starts[r] to starts[r + 1] - 1 in that order, in double,
//              every operation rounded. A thread sums a channel, neighbours neighbouring ones; nothing: zeros
//     turn     keys of the first `first` tokens of each head, by `by` positions each; limited to the largest number of their type. A
//              thread turns a pair of channels in place
#include "rotary.cuh"

constexpr int THREADS = 256;

__device__ inline double to_double(double x) { return x; }
template <class T> __device__ inline double to_double(T x) { return double(to_float(x)); }

// A double as NumPy rounds it: once, but for bfloat16, which goes by float.
template <class T> __device__ inline T from_double(double x) { return from_float<T>(float(x)); }
template <> __device__ inline __half from_double<__half>(double x) { return __double2half(x); }
template <> __device__ inline double from_double<double>(double x) { return x; }

template <class U>
__global__ void __launch_bounds__(THREADS) gather(const U* __restrict__ x, const long long* __restrict__ source, U* __restrict__ out,
                                                  long long rows, int units) {
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x, row = at / units;
    if (row >= rows) return;
    const long long from = source[row];
    out[at] = from < 0 ? U{} : x[from * units + at % units];
}

template <class T>
__global__ void __launch_bounds__(THREADS) merge(const T* __restrict__ x, const long long* __restrict__ starts,
                                                 const long long* __restrict__ members, const double* __restrict__ weights,
                                                 T* __restrict__ out, double* __restrict__ masses, long long rows, int dim) {
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x, row = at / dim;
    if (row >= rows) return;
    const int channel = int(at % dim);
    double sum = 0, total = 0;
    for (long long j = starts[row]; j < starts[row + 1]; ++j) {
        const double term = weights[j] * to_double(x[members[j] * dim + channel]);
        sum = sum + term, total = total + weights[j];
    }
    out[at] = from_double<T>(total > 0 ? sum / total : 0.0);
    if (channel == 0) masses[row] = total;
}

// keys: (heads, tokens, dim). by: (first,).
template <class T>
__global__ void __launch_bounds__(THREADS) turn_first(T* __restrict__ keys, const long long* __restrict__ by,
                                                      const unsigned long long* __restrict__ frequencies, int heads, long long tokens,
                                                      int first, int dim, int rotated, int interleaved, double limit) {
    const int pairs = rotated / 2;
    const long long at = blockIdx.x * (long long)THREADS + threadIdx.x;
    if (at >= (long long)heads * first * pairs) return;
    const int number = int(at % pairs), token = int(at / pairs % first);
    T* key = keys + (at / pairs / first * tokens + token) * dim;
    const int one = interleaved ? 2 * number : number, other = Pair(one, rotated, interleaved).other;
    const double2 own = turn(by[token], frequencies[number]);
    const double a = to_double(key[one]), b = to_double(key[other]);
    key[one] = from_double<T>(fmin(fmax(rotated_channel(a, b, false, own, 1.0), -limit), limit));
    key[other] = from_double<T>(fmin(fmax(rotated_channel(b, a, true, own, 1.0), -limit), limit));
}
