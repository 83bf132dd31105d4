// Dense packing of codes of 1 to 16 bits, least significant bit first. Equals reference/packing.py;
// tests/kernels/test_packing.py.
//
// pack:    one thread a 32-bit word of the stream: it gathers all codes with bits in it; no two threads share a word.
// unpack:  one thread four codes, written as one vector; their bits lie in at most three words.
// Blocks of 256 threads in one dimension. Codes of up to 8 bits are unsigned char, others unsigned short.
#include "bits.cuh"
#include "vectors.cuh"

// codes (count,), the first one at bit `phase` < 32 of the stream -> words of the stream, unused bits 0. wrong: the
// first code of more than BITS bits, all ones if there is none.
template <class T, int BITS>
__global__ void __launch_bounds__(256) pack(const T* __restrict__ codes, unsigned long long count, unsigned phase,
                                            unsigned* __restrict__ stream, unsigned long long words,
                                            unsigned long long* __restrict__ wrong) {
    const unsigned long long w = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (w >= words) return;
    const long long start = (long long)(32 * w) - phase;    // of the word, counted from the first code
    const unsigned long long first = start > 0 ? start / BITS : 0;
    unsigned word = 0;
    constexpr int MOST = (32 + BITS - 2) / BITS + 1;
#pragma unroll
    for (int j = 0; j < MOST; ++j) {
        const long long at = (long long)((first + j) * BITS) - start;
        if (first + j >= count || at >= 32) break;
        const unsigned code = codes[first + j];
        if (code >> BITS) atomicMin(wrong, first + j);
        word |= at >= 0 ? code << at : code >> -at;
    }
    stream[w] = word;
}

// The inverse: the stream's first code begins at bit 0.
template <class T, int BITS>
__global__ void __launch_bounds__(256)
    unpack(const unsigned* __restrict__ stream, unsigned long long count, T* __restrict__ codes) {
    const unsigned long long first = 4 * ((unsigned long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= count) return;
    Vec<T, 4> four;
    const int many = first + 4 <= count ? 4 : int(count - first);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < many) four.v[i] = T(get_bits(stream, (first + i) * BITS, BITS));
    if (many == 4) {
        store<4>(codes + first, four);
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < many) codes[first + i] = four.v[i];
}
